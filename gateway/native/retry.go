package native

import (
	"errors"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// done reports whether the choice has its last token.
func (c *choice) done() bool { return c.state.State == fsm.Finished }

// retry ends a choice's current attempt, which failed, and starts the next one. A choice without a
// token is tried on a few nodes. A choice with tokens is resumed: prompt and output continue on
// another node, at the next position. If no node takes them, the choice waits for a bounded time.
func (x *request) retry(c *choice, err error) *openai.Error {
	node, f := c.node, nodeFailure(err)
	exchange.FailSpan(&c.span, f)
	x.leave(c)
	if fault := x.failed(c, node, f); fault != nil {
		return fault
	}
	if !c.state.Started() {
		return x.attempt(c)
	}
	x.S.Meters.Counter(metrics.GatewayResumes).Inc()
	r := x.S.Resumes.Reserve()
	if wait := r.Delay(); wait > x.S.Limits().ResumeTimeout {
		r.Cancel()
		return x.lose(c)
	} else if wait > 0 { // many at once: the remaining nodes take them in turn
		c.state.Delay(time.Now().Add(wait))
		x.wake(c.state.RetryAt)
		return nil
	}
	return x.attempt(c)
}

// failed records a failed attempt. It returns an error if no other may follow.
func (x *request) failed(c *choice, node *nodes.Node, f *exchange.Failure) *openai.Error {
	if x.pools() {
		f.Prefix = strings.Replace(f.Prefix, "decode node", x.answerer(), 1)
	}
	x.AttemptFailed(f, &c.span, "node", node.Name)
	c.failure = f
	if exchange.Next(&x.Exchange, &c.state, node, f) == fsm.GiveUp {
		return x.lose(c)
	}
	return nil
}

// enterClass records the numerics class of the node that sends a choice's next token. A stream that
// enters another class keeps its tokens. Those that follow may differ from what the former class
// would have drawn.
func (x *request) enterClass(c *choice) {
	class := c.node.Class()
	if c.state.Started() && c.class != "" && class != "" && class != c.class {
		x.S.Meters.Counter(metrics.GatewayClassChanges).Inc()
		x.S.Log.Warn("stream continues in another numerics class: no node of its own is usable", "request", x.req.RequestID,
			"node", c.node.Name, "tokens", len(c.output), "class", class, "before", c.class)
	}
	c.class = class
}

// nowhere handles a choice that no node is left for. A choice with tokens waits for one, within
// ResumeTimeout. node is one that has failed the choice already; nil: no node serves the model.
func (x *request) nowhere(c *choice, node *nodes.Node) *openai.Error {
	if c.state.NoNode(time.Now(), x.S.ChoiceLimits()) == fsm.Wait {
		x.wake(c.state.RetryAt)
		return nil
	}
	if !c.state.Started() && node == nil {
		c.failure = nil
	}
	return x.lose(c)
}

// answerer returns what errors call the nodes that answer the request.
func (x *request) answerer() string {
	if x.pools() {
		return "node"
	}
	return "decode node"
}

// lose gives a choice up.
func (x *request) lose(c *choice) *openai.Error {
	c.state.Abandon()
	fault := x.NoAttempt(c.failure, x.answerer(), x.model.Name, c.state.Started())
	if c.failure == nil {
		switch other := x.unconstrained(x.model); {
		case other == nil:
		case x.surface != nil:
			return x.surface.Fault(other)
		default:
			return other
		}
	}
	return fault
}

var errNotAccepted = errors.New("gateway: attempt not accepted")

// nodeFailure classifies the error of an attempt on a decode node.
func nodeFailure(err error) *exchange.Failure {
	var code *nodes.CodeError
	if errors.As(err, &code) {
		f, known := failures[code.Code]
		if !known {
			f = exchange.Failure{Kind: "other", Status: 500, Prefix: nodeFailed, Failure: fsm.Failure{Untouched: true}}
		}
		f.Err, f.Message, f.Refused = err, code.Message, true
		return &f
	}
	f := &exchange.Failure{Err: err, Kind: "other", Status: 503, Prefix: "the decode node failed while it answered: ", Message: err.Error(),
		Failure: fsm.Failure{Lost: errors.Is(err, nodes.ErrLost), Untouched: errors.Is(err, nodes.ErrNode)}}
	switch {
	case errors.Is(err, errNotAccepted):
		f.Kind = "timeout"
	case f.Lost, f.Untouched:
		f.Kind = "connection"
	}
	return f
}

const nodeFailed = "the decode node failed: "

// failures has what a node's codes mean.
var failures = map[nodepb.Code]exchange.Failure{
	nodepb.Code_CODE_INVALID:    {Kind: "invalid", Status: 400, Failure: fsm.Failure{Untouched: true, Final: true}},
	nodepb.Code_CODE_NOT_FOUND:  {Kind: "invalid", Status: 404, Failure: fsm.Failure{Untouched: true, Final: true}},
	nodepb.Code_CODE_DEADLINE:   {Kind: "timeout", Status: 504, Failure: fsm.Failure{Untouched: true, Final: true}, Late: true},
	nodepb.Code_CODE_OVERLOADED: {Kind: "overloaded", Status: 503, Prefix: "the decode nodes are overloaded: ", Failure: fsm.Failure{Untouched: true, HandedOver: true}},
	nodepb.Code_CODE_DRAINING:   {Kind: "draining", Status: 503, Prefix: "the decode nodes are leaving: ", Failure: fsm.Failure{Untouched: true, HandedOver: true, Drained: true}},
	nodepb.Code_CODE_FORBIDDEN:  {Kind: "other", Status: 503, Prefix: "the decode nodes refuse this gateway: ", Failure: fsm.Failure{Untouched: true}},
	nodepb.Code_CODE_MISMATCH:   {Kind: "mismatch", Status: 503, Prefix: "the decode nodes do not fit this gateway's model: ", Failure: fsm.Failure{Untouched: true}},
	nodepb.Code_CODE_INTERNAL:   {Kind: "internal", Status: 500, Prefix: nodeFailed},
	nodepb.Code_CODE_CANCELLED:  {Kind: "other", Status: 500, Prefix: nodeFailed},
}
