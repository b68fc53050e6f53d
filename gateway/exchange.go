package gateway

import (
	"errors"
	"os"
	"runtime/debug"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// backend answers one request: decode nodes do (job), or an upstream server (relay). The
// exchange calls its methods in the order in which they stand here, each at most once; the
// last three in any case.
type backend interface {
	base() *exchange
	// prepare reads the request. Of what it takes only the key's place (letIn) outlives it.
	prepare() *openai.Error
	// claim says what the request asks of which queue; without a queue nothing is asked.
	claim() (claim, *openai.Error)
	// run makes attempts until the answer has begun: all of it is there, or the first part
	// of a stream is.
	run() *openai.Error
	// respond gives the response. If it streams, its body's Close ends the exchange.
	respond() (streams bool)

	// ClientGone is called from another goroutine when a watched client has gone, up to stop.
	ClientGone()
	// stop ends the attempts that still run, and counts how the answers ended.
	stop()
	// ending says what came of the request, after stop.
	ending() ending
	// free gives back memory; the backend is not used after it.
	free()
}

// exchange is one request from its head to its end, whoever answers it. The goroutine of
// its client's connection owns it.
type exchange struct {
	g        *Gateway
	b        backend
	ctx      *fasthttp.RequestCtx
	path     string // where it was asked
	on       openai.Endpoint
	id       []byte    // of the request
	key      *auth.Key // of the client; nil: there are none, or it was not let in
	by       by        // how a node or server is chosen
	start    time.Time
	deadline time.Time
	span     span
	watch    *httpserver.Watch // on the client; nil: it is not watched
	slot     slot
	admitted bool
	closed   bool
	cause    string // of metrics.StreamAborts, when it did not end well
	status   int    // of the answer; 0: 200
}

// slot is a request's place among those that an admission queue has let through.
type slot struct {
	a        *admission // nil: none is held
	priority int32
	choices  int64       // not given back
	tokens   int64       // of all prompts, counted until its attempts count their own
	blocks   int64       // KV blocks, likewise
	owed     int         // tokens served and not charged to the key's flow
	queued   bool        // it has waited for its turn
	avoid    *nodes.Node // that another request waits for, which it has passed
}

// ending is what came of a request, for its span and its log line.
type ending struct {
	model     string // empty: it was not found
	node      string // that answered, or was asked last; empty: the request reached none
	finish    string // why its last choice ended; empty: none did
	prompt    int    // tokens; 0: not known
	cached    int    // of them
	output    int
	choices   int
	maxTokens int // of each choice; 0: not known
	stream    bool
	first     time.Time // token
	text      string    // of the prompt, as much as is to be logged
	unserved  int       // prompt tokens that the key was charged for and nothing was served for
}

func (x *exchange) base() *exchange { return x }

// answer has b answer the request.
func (g *Gateway) answer(ctx *fasthttp.RequestCtx, path string, on openai.Endpoint, b backend) {
	x := b.base()
	x.g, x.b, x.ctx, x.path, x.on, x.start = g, b, ctx, path, on, time.Now()
	if fault := g.enter(); fault != nil {
		b.free()
		g.fail(ctx, fault)
		return
	}
	x.deadline = x.start.Add(g.lim().RequestTimeout)
	x.id = ctx.Response.Header.Peek(requestIDHeader)
	x.span = g.startSpan(ctx, on, x.start)
	streams := false
	defer func() { // also after a panic
		if !streams {
			x.status = ctx.Response.StatusCode()
			x.close()
		}
	}()
	fault := b.prepare()
	if fault == nil {
		fault = x.admit()
	}
	if fault == nil {
		fault = b.run()
	}
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	streams = b.respond()
}

// enter counts a request as being answered, if there is room for it.
func (g *Gateway) enter() *openai.Error {
	if n := g.inFlight.Add(1); n > int64(g.lim().MaxInFlight) {
		g.inFlight.Add(-1)
		g.meters.full.Inc()
		return openai.Unavailable(retryAfter, "the gateway is full: it is answering %d requests", n-1)
	}
	return nil
}

// headers reads how the request is routed and how long it may take.
func (x *exchange) headers() (fault *openai.Error) {
	if x.by, fault = x.g.routing(&x.ctx.Request.Header); fault != nil {
		return fault
	}
	timeout, fault := x.g.timeout(&x.ctx.Request.Header)
	x.deadline = x.start.Add(timeout)
	return fault
}

// letIn takes a place of the client's key for a request with so many prompt tokens.
func (x *exchange) letIn(nTokens int) *openai.Error {
	k := x.g.keyOf(x.ctx)
	if no := k.LetIn(nTokens); no != nil {
		x.g.refused(no.Limit)
		return tooMany(no.RetryAfter, "%s", no.Message)
	}
	x.key = k
	return nil
}

// priority is that of a request which asks for one: a key has a best one.
func (x *exchange) priority(asked int32) int32 {
	if x.key == nil {
		return asked
	}
	return max(asked, x.key.Limits.Priority)
}

// watchClient has the connection watched for its client's end, if nothing watches it yet.
func (x *exchange) watchClient() {
	if c, ok := x.ctx.Conn().(*httpserver.Conn); ok && x.watch == nil {
		x.watch = c.Watch(x.b)
	}
}

// admit waits until the queue that the request asks has room for it. The error says why
// it is turned away.
func (x *exchange) admit() *openai.Error {
	c, fault := x.b.claim()
	if fault != nil {
		return fault
	}
	x.admitted = c.a == nil || c.a.pass(c.choices, c.tokens, c.room)
	if !x.admitted {
		x.watchClient()
		if fault := x.queue(&c); fault != nil {
			return fault
		}
		x.admitted = true
	}
	x.slot = slot{a: c.a, priority: c.priority, choices: c.choices, tokens: c.tokens, blocks: c.room.blocks, queued: c.queued, avoid: c.avoid}
	return nil
}

// queue has a claim wait for its turn.
func (x *exchange) queue(c *claim) *openai.Error {
	c.flow, c.start, c.deadline, c.queued = x.flow(c.a), x.start, x.deadline, true
	if x.watch != nil {
		c.gone = x.watch.Gone
	}
	fault, cause := x.g.waitForRoom(c)
	x.cause = cause
	return fault
}

// flow is charged for the request's tokens in a queue.
func (x *exchange) flow(a *admission) *admit.Flow {
	if x.key != nil && a == x.g.admission {
		return x.key.Flow()
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

// attemptFailed counts, logs and traces the failure of an attempt. who is "node" or
// "upstream".
func (x *exchange) attemptFailed(f *failure, s *trace.Span, who, name string) {
	failSpan(s, f)
	x.g.meters.set.Counter(metrics.GatewayAttemptFailures, f.kind).Inc()
	x.g.log.Warn("attempt failed", "request", string(x.id), who, name, "error", f.err)
}

// next says what follows a failed attempt of c at node, within the limits of attempts and
// the budget of retries of all requests.
func next[N comparable](x *exchange, c *fsm.Choice[N], node N, f *failure) fsm.Action {
	a := c.Failed(node, f.Failure, time.Now(), x.g.choiceLimits())
	if a == fsm.Retry && !x.g.budget.Allow() {
		return fsm.GiveUp
	}
	return a
}

// choiceLimits bound a choice's attempts.
func (g *Gateway) choiceLimits() fsm.Limits {
	l := g.lim()
	return fsm.Limits{MaxAttempts: l.MaxAttempts, ResumeTimeout: l.ResumeTimeout}
}

// Causes of ends, of metrics.StreamAborts.
const (
	causeClientGone = "client_gone"
	causeSlowClient = "slow_client"
	causeShutdown   = "shutdown"
	causeDeadline   = "deadline"
	causeUpstream   = "upstream"
)

// cutOff ends the request for a cause that is not its backend's.
func (x *exchange) cutOff(cause string) *openai.Error {
	switch x.cause = cause; cause {
	case causeClientGone:
		return errGone
	case causeShutdown:
		return errShutdown
	}
	return tooLate(x.start, x.deadline)
}

// unread reports whether nobody reads the answer.
func (x *exchange) unread() bool { return x.cause == causeClientGone || x.cause == causeSlowClient }

// timing is when the first and the last tokens of an answer came; zero: none has.
type timing struct{ first, last time.Time }

// came counts n tokens of an answer that came at once, and reports whether they are its
// first.
func (x *exchange) came(t *timing, n int, at time.Time) (first bool) {
	m := &x.g.meters
	m.tokens.Add(float64(n))
	if first = t.first.IsZero(); first {
		t.first = at
		m.ttft.Observe(at.Sub(x.start).Seconds())
	} else {
		m.interToken.Observe(at.Sub(t.last).Seconds())
	}
	t.last = at
	x.served(n)
	return first
}

// whole counts an answer that came to its end; -1: it is not known how many tokens the
// prompt, or the answer, has.
func (x *exchange) whole(t *timing, prompt, output int) {
	m := &x.g.meters
	m.e2e.Observe(time.Since(x.start).Seconds())
	if prompt >= 0 {
		m.promptTokens.Observe(float64(prompt))
	}
	if output >= 0 {
		m.outputTokens.Observe(float64(output))
	}
	if t.first.IsZero() {
		return
	}
	took := t.last.Sub(t.first).Seconds()
	m.decode.Observe(took)
	if output > 1 {
		m.perToken.Observe(took / float64(output-1))
	}
}

// finished counts n answers that ended for a reason; broken is that of one that did not
// come to its end.
func (x *exchange) finished(reason string, n int) {
	if n > 0 {
		x.g.meters.set.Counter(metrics.RequestSuccess, reason).Add(float64(n))
	}
}

// broken is the reason of an answer that did not come to its end.
func (x *exchange) broken() string {
	if x.unread() {
		return metrics.ReasonAbort
	}
	return metrics.ReasonError
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

// depart ends what the request has with its queue.
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

// close ends the request: attempts that still run are cancelled, and the connection is the
// server's again.
func (x *exchange) close() {
	if x.closed {
		return
	}
	x.closed = true
	x.b.stop()
	e := x.b.ending()
	if x.status == 0 {
		x.status = fasthttp.StatusOK
	}
	x.depart(e.unserved)
	x.endSpan(&e)
	x.log(&e)
	if x.watch != nil {
		x.watch.Stop()
	}
	if x.cause != "" {
		x.g.meters.set.Counter(metrics.GatewayStreamsAborted, x.cause).Inc()
	}
	x.key.Done(e.output)
	x.g.inFlight.Add(-1)
	x.b.free()
}

// closeBody ends the request of a streamed answer. err is why its body could not be
// written to its end, or nil; ended says that the body had come to its end, or was cut.
func (x *exchange) closeBody(err error, ended bool) {
	if x.closed {
		return
	}
	if err != nil && !ended { // the writing failed, not the request
		x.cause = causeClientGone
		if errors.Is(err, os.ErrDeadlineExceeded) {
			x.cause = causeSlowClient
		}
	}
	g, path := x.g, x.path
	status := x.status
	if status == 0 {
		status = fasthttp.StatusOK
	}
	x.close()
	g.count(path, status)
}

// caught turns a panic while a streamed answer is read into its cut. It is deferred.
func (x *exchange) caught(n *int, err *error) {
	if r := recover(); r != nil {
		x.g.log.Error("panic while streaming", "request", string(x.id), "panic", r, "stack", string(debug.Stack()))
		*n, *err = 0, errCut
	}
}

// log tells of the request's end, where requests are logged.
func (x *exchange) log(e *ending) {
	if !x.g.o.LogRequests {
		return
	}
	if e.node == "" {
		x.g.logRefusal(x.ctx, x.start)
		return
	}
	finish := e.finish
	if x.cause != "" && finish == "" {
		finish = x.cause
	}
	attrs := []any{"request", string(x.id), "path", x.path, "status", x.status, "model", openai.Clip(e.model, 200), "node", e.node, "finish", finish,
		"prompt_tokens", e.prompt, "cached_tokens", e.cached, "output_tokens", e.output, "choices", e.choices, "stream", e.stream}
	if e.maxTokens > 0 {
		attrs = append(attrs, "max_tokens", e.maxTokens)
	}
	if x.key != nil && x.key.Name != "" {
		attrs = append(attrs, "key", x.key.Name)
	}
	if !e.first.IsZero() {
		attrs = append(attrs, "first_token", e.first.Sub(x.start))
	}
	attrs = append(attrs, "total", time.Since(x.start))
	if e.text != "" {
		attrs = append(attrs, "prompt", e.text)
	}
	x.g.log.Info("request ended", attrs...)
}

// logRefusal is log of a request that reached no node.
func (g *Gateway) logRefusal(ctx *fasthttp.RequestCtx, start time.Time) {
	if !g.o.LogRequests {
		return
	}
	attrs := []any{"request", string(ctx.Response.Header.Peek(requestIDHeader)), "path", openai.Clip(string(ctx.Path()), 100), "status", ctx.Response.StatusCode(),
		"peer", ctx.RemoteAddr().String(), "total", time.Since(start)}
	if k := g.keyOf(ctx); k != nil && k.Name != "" {
		attrs = append(attrs, "key", k.Name)
	}
	g.log.Info("request refused", attrs...)
}
