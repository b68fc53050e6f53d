package gateway

import (
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/openai"
)

// exchange is one request from its head to its end, whether own nodes (job) or an
// upstream server (relay) answer it. The goroutine of its client's connection owns it.
type exchange struct {
	g        *Gateway
	path     string // where it was asked
	key      *key   // of the client; nil: there are none
	by       by     // how a node or server is chosen
	start    time.Time
	deadline time.Time
	span     span
	watch    *watch // on the client; nil: it is not watched
	slot     slot
	cause    string // of metrics.StreamAborts, when it did not end well
	status   int    // of the answer; 0: 200
}

// slot is a request's place among those that an admission queue has let through.
type slot struct {
	a        *admission // nil: none is held
	priority int32
	choices  int64          // not given back
	tokens   int64          // of all prompts, counted until its attempts count their own
	blocks   int64          // KV blocks, likewise
	owed     int            // tokens served and not charged to the key's flow
	queued   bool           // it has waited for its turn
	avoid    *upstream.Node // that another request waits for, which it has passed
}

// headers reads how the request is routed and how long it may take.
func (x *exchange) headers(h *fasthttp.RequestHeader) (fault *openai.Error) {
	if x.by, fault = x.g.routing(h); fault != nil {
		return fault
	}
	timeout, fault := x.g.timeout(h)
	x.deadline = x.start.Add(timeout)
	return fault
}

// admit waits until a has room for the request's choices and prompt tokens. The error
// says why it is turned away. watch is called before it waits, if nothing watches the
// client yet; it may return nil.
func (x *exchange) admit(a *admission, priority int32, choices, tokens int64, kv kvRoom, watch func() *watch) *openai.Error {
	s := slot{a: a, priority: priority, choices: choices, tokens: tokens, blocks: kv.blocks}
	if a.pass(choices, tokens, kv) {
		x.slot = s
		return nil
	}
	if x.watch == nil {
		x.watch = watch()
	}
	c := claim{a: a, flow: x.flow(a), priority: priority, choices: choices, tokens: tokens, room: kv, start: x.start, deadline: x.deadline}
	if x.watch != nil {
		c.gone = x.watch.gone
	}
	fault, cause := x.g.waitForRoom(&c)
	if x.cause = cause; fault == nil {
		s.queued, s.avoid = true, c.avoid
		x.slot = s
	}
	return fault
}

// flow is charged for the request's tokens in a queue.
func (x *exchange) flow(a *admission) *admit.Flow {
	if x.key != nil && a == x.g.admission {
		return x.key.use.flow
	}
	return a.flowOf(x.key)
}

// attempted gives back the tokens and blocks that were counted before the request's
// attempts counted theirs.
func (x *exchange) attempted() {
	if s := &x.slot; s.tokens > 0 {
		s.a.computed(s.tokens)
		s.a.routed(s.blocks)
		s.tokens, s.blocks = 0, 0
	}
}

// served charges the key for tokens of an answer.
func (x *exchange) served(tokens int) {
	if x.key == nil || x.slot.a == nil {
		return
	}
	if x.slot.owed += tokens; x.slot.owed >= chargeTokens {
		x.charge(x.slot.owed)
	}
}

// charge counts tokens that the key was served; negative ones are given back.
func (x *exchange) charge(tokens int) {
	s := &x.slot
	if s.owed = 0; tokens != 0 && s.a.waiting.Load() > 0 {
		s.a.charge(x.flow(s.a), s.priority, tokens)
	}
}

// release gives back the place of one choice, which has ended.
func (x *exchange) release() {
	if s := &x.slot; s.choices > 0 {
		s.choices--
		s.a.leave(1)
	}
}

// depart ends what the request has with its queue. unserved is the prompt tokens that
// the key was charged for when its turn came, if nothing was served for them.
func (x *exchange) depart(unserved int) {
	s := &x.slot
	if s.a == nil {
		return
	}
	x.attempted()
	if x.key != nil {
		if x.charge(s.owed); s.queued {
			x.charge(-unserved)
		}
	}
	if s.choices > 0 {
		s.a.leave(s.choices)
	}
	*s = slot{}
}

// done counts the end of the request, which had output tokens.
func (x *exchange) done(output int) {
	if x.watch != nil {
		x.watch.stop()
	}
	if x.cause != "" {
		x.g.meters.set.Counter(metrics.GatewayStreamsAborted, x.cause).Inc()
	}
	x.key.done(output)
	x.g.inFlight.Add(-1)
}
