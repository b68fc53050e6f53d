package gateway

import (
	"errors"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/openai"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

var errNotAccepted = errors.New("gateway: attempt not accepted")

// Between two looks for a node, while there is none for a stream that has begun.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
)

// started says that a choice has tokens that its client may have seen.
func (c *choice) started() bool { return len(c.output) > 0 }

// taken notes that a node has the current attempt.
func (c *choice) taken() { c.accepted, c.lost, c.pause = true, time.Time{}, 0 }

// retry ends a choice's current attempt, which failed, and starts the next one.
// A choice without a token yet is tried on a few nodes. One that has begun is
// resumed: prompt and output so far go to another node, at exactly the next
// position, and where no node takes them it waits for one, a bounded time.
func (j *job) retry(c *choice, err error) *openai.Error {
	node := c.node
	c.failSpan(err)
	unseen := !c.accepted && errors.Is(err, upstream.ErrLost) // it died with the attempt on the way: that says nothing about it
	j.leave(c)
	c.stream = nil
	if fault := j.failed(c, node, err, unseen); fault != nil {
		return fault
	}
	if !c.started() {
		return j.attempt(c)
	}
	j.g.meters.resumes.Inc()
	r := j.g.resumes.Reserve()
	if wait := r.Delay(); wait > j.g.lim().ResumeTimeout {
		r.Cancel()
		return j.lose(c)
	} else if wait > 0 { // many at once: the nodes that are left take them one after the other
		j.sleep(c, wait)
		return nil
	}
	return j.attempt(c)
}

// failed books a failed attempt, which the node may never have seen; it returns an
// error when there may be no other.
func (j *job) failed(c *choice, node *upstream.Node, err error, unseen bool) *openai.Error {
	c.failSpan(err)
	j.failure(node, err)
	moved := len(c.output) > c.from // since the attempt began
	if moved {
		c.tried, c.refused, c.failures = c.tried[:0], c.refused[:0], 0
	}
	if c.lost.IsZero() {
		c.lost = time.Now()
	}
	if c.accepted { // since then whoever said no may have room again, or be back
		c.refused = c.refused[:0]
	}
	c.tried, c.lastErr = append(c.tried, node), err
	if refuses(err) && !moved && !(c.accepted && handsOver(err)) {
		c.refused = append(c.refused, node)
	}
	if !moved && !unseen && !(c.started() && untouched(err)) {
		c.failures++
	}
	var code *upstream.CodeError
	switch {
	case errors.As(err, &code) && !elsewhere(code.Code), c.failures >= j.g.lim().MaxAttempts:
		return j.lose(c)
	case !c.started() && !j.g.budget.Allow():
		return faultOf(err)
	}
	return nil
}

// enterClass notes the numerics class of the node that sends a choice's next token.
// A stream that enters another class keeps the tokens that it has; those that follow
// may differ from what the class before would have drawn.
func (j *job) enterClass(c *choice) {
	class := c.node.Class()
	if c.started() && c.class != "" && class != "" && class != c.class {
		j.g.meters.classChanges.Inc()
		j.g.log.Warn("stream continues in another numerics class: no node of its own is usable", "request", j.req.RequestID,
			"node", c.node.Name, "tokens", len(c.output), "class", class, "before", c.class)
	}
	c.class = class
}

// nowhere is what becomes of a choice that no node is left for: a stream that
// has begun waits for one, within ResumeTimeout. node is one that would be asked
// again, or nil.
func (j *job) nowhere(c *choice, node *upstream.Node) *openai.Error {
	switch {
	case !c.started() && node != nil:
		return faultOf(c.lastErr)
	case !c.started():
		return j.noNode()
	case c.lost.IsZero(): // it was paused for its client
		c.lost = time.Now()
	}
	if time.Since(c.lost) >= j.g.lim().ResumeTimeout {
		return j.lose(c)
	}
	c.tried, c.refused = c.tried[:0], c.refused[:0] // whoever said no, or was away, may have recovered
	c.pause = min(max(firstPause, 2*c.pause), longestPause)
	j.sleep(c, c.pause)
	return nil
}

// sleep has the choice look for a node again later.
func (j *job) sleep(c *choice, d time.Duration) {
	c.again = time.Now().Add(d)
	j.wake(c.again)
}

// lose gives a choice up.
func (j *job) lose(c *choice) *openai.Error {
	if c.started() {
		j.cause = "upstream"
	}
	if c.lastErr == nil {
		return j.noNode()
	}
	return faultOf(c.lastErr)
}

func (j *job) noNode() *openai.Error {
	return openai.Unavailable(retryAfter, "no decode node is available for model %q", j.model.name)
}

// handsOver says that a node which had taken an attempt gave it away, being drained
// or out of room: it is no judgement on the request, and may be over soon.
func handsOver(err error) bool {
	var code *upstream.CodeError
	return errors.As(err, &code) && (code.Code == nodepb.Code_CODE_DRAINING || code.Code == nodepb.Code_CODE_OVERLOADED)
}

// untouched says that the node has not worked on the attempt: it could not be
// reached or said no at once.
func untouched(err error) bool {
	var code *upstream.CodeError
	if errors.As(err, &code) {
		return code.Code != nodepb.Code_CODE_INTERNAL && code.Code != nodepb.Code_CODE_CANCELLED
	}
	return errors.Is(err, upstream.ErrNode)
}

// failure counts and logs a failed attempt.
func (j *job) failure(node *upstream.Node, err error) {
	j.g.meters.set.Counter(metrics.GatewayAttemptFailures, kindOf(err)).Inc()
	j.g.log.Warn("attempt failed", "request", j.req.RequestID, "node", node.Name, "error", err)
}

// elsewhere says whether another node may do what one refused with the code.
func elsewhere(c nodepb.Code) bool {
	switch c {
	case nodepb.Code_CODE_INVALID, nodepb.Code_CODE_NOT_FOUND, nodepb.Code_CODE_DEADLINE:
		return false
	}
	return true
}

// refuses says whether the error is a node's own no, not a broken connection.
func refuses(err error) bool {
	var code *upstream.CodeError
	return errors.As(err, &code)
}

// kindOf is the error's value of the label code of GatewayAttemptFailures.
func kindOf(err error) string {
	var code *upstream.CodeError
	if !errors.As(err, &code) {
		switch {
		case errors.Is(err, errNotAccepted):
			return "timeout"
		case errors.Is(err, upstream.ErrLost), errors.Is(err, upstream.ErrNode):
			return "connection"
		}
		return "other"
	}
	switch code.Code {
	case nodepb.Code_CODE_OVERLOADED:
		return "overloaded"
	case nodepb.Code_CODE_DRAINING:
		return "draining"
	case nodepb.Code_CODE_MISMATCH:
		return "mismatch"
	case nodepb.Code_CODE_INVALID, nodepb.Code_CODE_NOT_FOUND:
		return "invalid"
	case nodepb.Code_CODE_DEADLINE:
		return "timeout"
	case nodepb.Code_CODE_INTERNAL:
		return "internal"
	}
	return "other"
}

// faultOf is what a client is told of a failed attempt.
func faultOf(err error) *openai.Error {
	var code *upstream.CodeError
	if !errors.As(err, &code) {
		return openai.Unavailable(retryAfter, "the decode node failed while it answered: %s", clip(err.Error(), 300))
	}
	say := clip(code.Message, 300)
	switch code.Code {
	case nodepb.Code_CODE_INVALID:
		return openai.BadRequest("", "%s", say)
	case nodepb.Code_CODE_NOT_FOUND:
		return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model", Message: say}
	case nodepb.Code_CODE_OVERLOADED:
		return openai.Unavailable(retryAfter, "the decode nodes are overloaded: %s", say)
	case nodepb.Code_CODE_DRAINING:
		return openai.Unavailable(retryAfter, "the decode nodes are leaving: %s", say)
	case nodepb.Code_CODE_FORBIDDEN:
		return openai.Unavailable(retryAfter, "the decode nodes refuse this gateway: %s", say)
	case nodepb.Code_CODE_MISMATCH:
		return openai.Unavailable(retryAfter, "the decode nodes do not fit this gateway's model: %s", say)
	case nodepb.Code_CODE_DEADLINE:
		return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: say}
	}
	return &openai.Error{Status: 500, Type: openai.TypeInternal, Message: fmt.Sprintf("the decode node failed: %s", say)}
}
