package exchange

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
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// Backend answers one request. It embeds an Exchange, which calls its methods in the order
// in which they stand here, each at most once; the last three in any case.
type Backend interface {
	Base() *Exchange
	// Prepare reads the request. Of what it takes only the key's place (LetIn) outlives it.
	Prepare() *openai.Error
	// Claim says what the request asks of which queue; without a queue nothing is asked.
	Claim() (Claim, *openai.Error)
	// Run makes attempts until the answer has begun: all of it is there, or the first part
	// of a stream is.
	Run() *openai.Error
	// Respond gives the response. If it streams, its body's Close calls CloseBody.
	Respond() (streams bool)

	// ClientGone is called from another goroutine when a watched client has gone, up to the
	// end of Stop.
	ClientGone()
	// Stop ends the attempts that still run, and counts how the answers ended.
	Stop()
	// Ending says what came of the request, after Stop.
	Ending() Ending
	// Free gives back memory; the backend is not used after it.
	Free()
}

// Exchange is one request from its head to its end, whoever answers it. The goroutine of
// its client's connection owns it.
type Exchange struct {
	S        *Service
	Ctx      *fasthttp.RequestCtx
	Path     string // where it was asked
	On       openai.Endpoint
	ID       []byte     // of the request
	Hints    RouteHints // how a node or server is chosen
	Start    time.Time
	Deadline time.Time
	Span     span
	Watch    *httpserver.Watch // on the client; nil: it is not watched
	Admitted bool
	Cause    string // of metrics.StreamAborts, when it did not end well
	Status   int    // of the answer; 0: 200

	b      Backend
	key    *auth.Key // of the client; nil: there are none, or it was not let in
	slot   slot
	closed bool
}

// slot is a request's place among those that an admission queue has let through.
type slot struct {
	a        *Admission // nil: none is held
	priority int32
	choices  int64 // not given back
	tokens   int64 // of all prompts, counted until its attempts count their own
	blocks   int64 // KV blocks, likewise
	owed     int   // tokens served and not charged to the key's flow
	queued   bool  // it has waited for its turn
	avoid    any   // node that another request waits for, which it has passed; nil: none
}

// Ending is what came of a request, for its span and its log line.
type Ending struct {
	Model     string // empty: it was not found
	Node      string // that answered, or was asked last; empty: the request reached none
	Finish    string // why its last choice ended; empty: none did
	Prompt    int    // tokens; 0: not known
	Cached    int    // of them
	Output    int
	Choices   int
	MaxTokens int // of each choice; 0: not known
	Stream    bool
	First     time.Time // token
	Text      string    // of the prompt, as much as is to be logged
	Unserved  int       // prompt tokens that the key was charged for and nothing was served for
}

// Base is x itself: what embeds it implements this method of Backend.
func (x *Exchange) Base() *Exchange { return x }

// Answer has b answer the request.
func (s *Service) Answer(ctx *fasthttp.RequestCtx, path string, on openai.Endpoint, b Backend) {
	x := b.Base()
	x.S, x.b, x.Ctx, x.Path, x.On, x.Start = s, b, ctx, path, on, time.Now()
	if fault := s.Enter(); fault != nil {
		b.Free()
		s.Fail(ctx, fault)
		return
	}
	x.Deadline = x.Start.Add(s.Limits().RequestTimeout)
	x.ID = ctx.Response.Header.Peek(RequestIDHeader)
	x.Span = s.startSpan(ctx, on, x.Start)
	streams := false
	defer func() { // also after a panic
		if !streams {
			x.Status = ctx.Response.StatusCode()
			x.close()
		}
	}()
	fault := b.Prepare()
	if fault == nil {
		fault = x.admit()
	}
	if fault == nil {
		fault = b.Run()
	}
	if fault != nil {
		s.Fail(ctx, fault)
		return
	}
	streams = b.Respond()
}

// Enter counts a request as being answered, if there is room for it.
func (s *Service) Enter() *openai.Error {
	if n := s.InFlight.Add(1); n > int64(s.Limits().MaxInFlight) {
		s.InFlight.Add(-1)
		s.Meters.Full.Inc()
		return openai.Unavailable(RetryAfter, "the gateway is full: it is answering %d requests", n-1)
	}
	return nil
}

// ReadHeaders reads how the request is routed and how long it may take.
func (x *Exchange) ReadHeaders() (fault *openai.Error) {
	if x.Hints, fault = x.S.Routing(&x.Ctx.Request.Header); fault != nil {
		return fault
	}
	timeout, fault := x.S.timeout(&x.Ctx.Request.Header)
	x.Deadline = x.Start.Add(timeout)
	return fault
}

// LetIn takes a place of the client's key for a request with so many prompt tokens.
func (x *Exchange) LetIn(nTokens int) *openai.Error {
	k := x.S.KeyOf(x.Ctx)
	if no := k.Acquire(nTokens); no != nil {
		x.S.Refused(no.Limit)
		return openai.TooMany(no.RetryAfter, "%s", no.Message)
	}
	x.key = k
	return nil
}

// Priority is that of a request which asks for one: a key has a best one.
func (x *Exchange) Priority(asked int32) int32 {
	if x.key == nil {
		return asked
	}
	return max(asked, x.key.Limits.Priority)
}

// WatchClient has the connection watched for its client's end, if nothing watches it yet.
func (x *Exchange) WatchClient() {
	if c, ok := x.Ctx.Conn().(*httpserver.Conn); ok && x.Watch == nil {
		x.Watch = c.Watch(x.b)
	}
}

// admit waits until the queue that the request asks has room for it. The error says why
// it is turned away.
func (x *Exchange) admit() *openai.Error {
	c, fault := x.b.Claim()
	if fault != nil {
		return fault
	}
	x.Admitted = c.Queue == nil || c.Queue.pass(c.Choices, c.Tokens, c.Room)
	if !x.Admitted {
		x.WatchClient()
		if fault := x.queue(&c); fault != nil {
			return fault
		}
		x.Admitted = true
	}
	x.slot = slot{a: c.Queue, priority: c.Priority, choices: c.Choices, tokens: c.Tokens, blocks: c.Room.Blocks, queued: c.queued, avoid: c.avoid}
	return nil
}

// queue has a claim wait for its turn.
func (x *Exchange) queue(c *Claim) *openai.Error {
	c.flow, c.start, c.deadline, c.queued = x.flow(c.Queue), x.Start, x.Deadline, true
	if x.Watch != nil {
		c.gone = x.Watch.Gone
	}
	fault, cause := x.S.waitForRoom(c)
	x.Cause = cause
	return fault
}

// flow is charged for the request's tokens in a queue.
func (x *Exchange) flow(a *Admission) *admit.Flow {
	if x.key != nil && a == x.S.Queue {
		return x.key.Flow()
	}
	return a.flowOf(x.key)
}

// Attempted gives back the tokens and blocks that were counted before the request's
// attempts counted theirs.
func (x *Exchange) Attempted() {
	if s := &x.slot; s.tokens > 0 {
		s.a.Computed(s.tokens)
		s.a.Routed(s.blocks)
		s.tokens, s.blocks = 0, 0
	}
}

// Avoid is the node that another request waits for, which this one has passed; nil: none.
func (x *Exchange) Avoid() any { return x.slot.avoid }

// AttemptFailed counts, logs and traces the failure of an attempt. who is "node" or
// "upstream".
func (x *Exchange) AttemptFailed(f *Failure, s *trace.Span, who, name string) {
	FailSpan(s, f)
	x.S.Meters.Set.Counter(metrics.GatewayAttemptFailures, f.Kind).Inc()
	x.S.Log.Warn("attempt failed", "request", string(x.ID), who, name, "error", f.Err)
}

// Next says what follows a failed attempt of c at node, within the limits of attempts and
// the budget of retries of all requests.
func Next[N comparable](x *Exchange, c *fsm.Choice[N], node N, f *Failure) fsm.Action {
	a := c.Failed(node, f.Failure, time.Now(), x.S.ChoiceLimits())
	if a == fsm.Retry && !x.S.Budget.Allow() {
		return fsm.GiveUp
	}
	return a
}

// ChoiceLimits bound a choice's attempts.
func (s *Service) ChoiceLimits() fsm.Limits {
	l := s.Limits()
	return fsm.Limits{MaxAttempts: l.MaxAttempts, ResumeTimeout: l.ResumeTimeout}
}

// Causes of ends, of metrics.StreamAborts.
const (
	CauseClientGone = "client_gone"
	CauseSlowClient = "slow_client"
	CauseShutdown   = "shutdown"
	CauseDeadline   = "deadline"
	CauseUpstream   = "upstream"
)

// CutOff ends the request for a cause that is not its backend's.
func (x *Exchange) CutOff(cause string) *openai.Error {
	switch x.Cause = cause; cause {
	case CauseClientGone:
		return ErrGone
	case CauseShutdown:
		return errShutdown
	}
	return tooLate(x.Start, x.Deadline)
}

// Unread reports whether nobody reads the answer.
func (x *Exchange) Unread() bool { return x.Cause == CauseClientGone || x.Cause == CauseSlowClient }

// Timing is when the first and the last tokens of an answer came; zero: none has.
type Timing struct{ First, Last time.Time }

// Came counts n tokens of an answer that came at once, and reports whether they are its
// first.
func (x *Exchange) Came(t *Timing, n int, at time.Time) (first bool) {
	m := &x.S.Meters
	m.Tokens.Add(float64(n))
	if first = t.First.IsZero(); first {
		t.First = at
		m.TTFT.Observe(at.Sub(x.Start).Seconds())
	} else {
		m.InterToken.Observe(at.Sub(t.Last).Seconds())
	}
	t.Last = at
	x.served(n)
	return first
}

// Whole counts an answer that came to its end; -1: it is not known how many tokens the
// prompt, or the answer, has.
func (x *Exchange) Whole(t *Timing, prompt, output int) {
	m := &x.S.Meters
	m.E2E.Observe(time.Since(x.Start).Seconds())
	if prompt >= 0 {
		m.PromptTokens.Observe(float64(prompt))
	}
	if output >= 0 {
		m.OutputTokens.Observe(float64(output))
	}
	if t.First.IsZero() {
		return
	}
	took := t.Last.Sub(t.First).Seconds()
	m.Decode.Observe(took)
	if output > 1 {
		m.PerToken.Observe(took / float64(output-1))
	}
}

// Finished counts n answers that ended for a reason.
func (x *Exchange) Finished(reason string, n int) {
	if n > 0 {
		x.S.Meters.Set.Counter(metrics.RequestSuccess, reason).Add(float64(n))
	}
}

// Broken is the reason of an answer that did not come to its end.
func (x *Exchange) Broken() string {
	if x.Unread() {
		return metrics.ReasonAbort
	}
	return metrics.ReasonError
}

// served charges the key for tokens of an answer.
func (x *Exchange) served(tokens int) {
	if x.key == nil || x.slot.a == nil {
		return
	}
	if x.slot.owed += tokens; x.slot.owed >= chargeTokens {
		x.charge(x.slot.owed)
	}
}

// charge counts tokens that the key was served; negative ones are given back.
func (x *Exchange) charge(tokens int) {
	s := &x.slot
	if s.owed = 0; tokens != 0 && s.a.waiting.Load() > 0 {
		s.a.charge(x.flow(s.a), s.priority, tokens)
	}
}

// Release gives back the place of one choice, which has ended.
func (x *Exchange) Release() {
	if s := &x.slot; s.choices > 0 {
		s.choices--
		s.a.Leave(1)
	}
}

// depart ends what the request has with its queue.
func (x *Exchange) depart(unserved int) {
	s := &x.slot
	if s.a == nil {
		return
	}
	x.Attempted()
	if x.key != nil {
		if x.charge(s.owed); s.queued {
			x.charge(-unserved)
		}
	}
	if s.choices > 0 {
		s.a.Leave(s.choices)
	}
	*s = slot{}
}

// close ends the request: attempts that still run are cancelled, and the connection is the
// server's again.
func (x *Exchange) close() {
	if x.closed {
		return
	}
	x.closed = true
	x.b.Stop()
	e := x.b.Ending()
	if x.Status == 0 {
		x.Status = fasthttp.StatusOK
	}
	x.depart(e.Unserved)
	x.endSpan(&e)
	x.log(&e)
	if x.Watch != nil {
		x.Watch.Stop()
	}
	if x.Cause != "" {
		x.S.Meters.Set.Counter(metrics.GatewayStreamsAborted, x.Cause).Inc()
	}
	x.key.Release(e.Output)
	x.S.InFlight.Add(-1)
	x.b.Free()
}

// CloseBody ends the request of a streamed answer. err is why its body could not be
// written to its end, or nil; ended says that the body had come to its end, or was cut.
func (x *Exchange) CloseBody(err error, ended bool) {
	if x.closed {
		return
	}
	if err != nil && !ended { // the writing failed, not the request
		x.Cause = CauseClientGone
		if errors.Is(err, os.ErrDeadlineExceeded) {
			x.Cause = CauseSlowClient
		}
	}
	s, path := x.S, x.Path
	status := x.Status
	if status == 0 {
		status = fasthttp.StatusOK
	}
	x.close()
	s.Count(path, status)
}

// Caught turns a panic while a streamed answer is read into its cut. It is deferred.
func (x *Exchange) Caught(n *int, err *error) {
	if r := recover(); r != nil {
		x.S.Log.Error("panic while streaming", "request", string(x.ID), "panic", r, "stack", string(debug.Stack()))
		*n, *err = 0, ErrCut
	}
}

// log tells of the request's end, where requests are logged.
func (x *Exchange) log(e *Ending) {
	if !x.S.LogRequests {
		return
	}
	if e.Node == "" {
		x.S.LogRefusal(x.Ctx, x.Start)
		return
	}
	finish := e.Finish
	if x.Cause != "" && finish == "" {
		finish = x.Cause
	}
	attrs := []any{"request", string(x.ID), "path", x.Path, "status", x.Status, "model", openai.Clip(e.Model, 200), "node", e.Node, "finish", finish,
		"prompt_tokens", e.Prompt, "cached_tokens", e.Cached, "output_tokens", e.Output, "choices", e.Choices, "stream", e.Stream}
	if e.MaxTokens > 0 {
		attrs = append(attrs, "max_tokens", e.MaxTokens)
	}
	if x.key != nil && x.key.Name != "" {
		attrs = append(attrs, "key", x.key.Name)
	}
	if !e.First.IsZero() {
		attrs = append(attrs, "first_token", e.First.Sub(x.Start))
	}
	attrs = append(attrs, "total", time.Since(x.Start))
	if e.Text != "" {
		attrs = append(attrs, "prompt", e.Text)
	}
	x.S.Log.Info("request ended", attrs...)
}

// LogRefusal is log of a request that reached no node.
func (s *Service) LogRefusal(ctx *fasthttp.RequestCtx, start time.Time) {
	if !s.LogRequests {
		return
	}
	attrs := []any{"request", string(ctx.Response.Header.Peek(RequestIDHeader)), "path", openai.Clip(string(ctx.Path()), 100), "status", ctx.Response.StatusCode(),
		"peer", ctx.RemoteAddr().String(), "total", time.Since(start)}
	if k := s.KeyOf(ctx); k != nil && k.Name != "" {
		attrs = append(attrs, "key", k.Name)
	}
	s.Log.Info("request refused", attrs...)
}

// Why requests are cut.
var (
	ErrGone     = &openai.Error{Status: 499, Type: "ClientClosedRequest", Message: "the client closed the connection"}
	errShutdown = &openai.Error{Status: 503, Type: openai.TypeUnavailable, RetryAfter: RetryAfter,
		Message: "the gateway is shutting down: send the request again"}
)

// ErrCut ends a body without its last chunk: the server then closes the
// connection, and the client sees that the answer is not whole.
var ErrCut = errors.New("gateway: answer cut")
