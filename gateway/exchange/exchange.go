package exchange

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync/atomic"
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

// Backend answers one request. It embeds an Exchange, which calls the methods in the order below,
// each at most once, and Stop, Ending and Free in any case.
type Backend interface {
	Base() *Exchange
	// Prepare reads the request. Of what it acquires, only the place of the key (LetIn) outlives an
	// error.
	Prepare() *openai.Error
	// Streams reports whether the request is for a stream of events.
	Streams() bool
	// Claim returns what the request asks of an admission queue. Without a queue the request is
	// admitted at once.
	Claim() (Claim, *openai.Error)
	// Run makes attempts until the whole answer is there, or the first part of a stream. It may run
	// on another goroutine than the methods before and after it.
	Run() *openai.Error
	// Respond sets the response. body is that of a stream, whose close calls CloseBody; nil: the
	// answer is no stream. If the head of a stream of events has begun, Respond leaves the response
	// unchanged, and returns such a body or a fault.
	Respond(begun bool) (body fasthttp.ReadCloserWithError, fault *openai.Error)
	// AppendFault appends the events that end a stream which fails. end ends the body behind them:
	// io.EOF if the API has an event for a failed answer, and otherwise ErrCut.
	AppendFault(dst []byte, fault *openai.Error) (events []byte, end error)

	// ClientGone is called from another goroutine when a watched client has closed its connection or
	// the request was aborted (Aborted), between Prepare and the return of Stop.
	ClientGone()
	// Stop cancels the attempts that still run, and counts how the answers ended.
	Stop()
	// Ending returns the result of the request, after Stop.
	Ending() Ending
	// Free returns memory to its pools. The backend is not used after it.
	Free()
}

// Exchange is one request from its head to its end, with any backend. The goroutine of the client's
// connection owns it.
type Exchange struct {
	S        *Service
	Ctx      *fasthttp.RequestCtx
	Path     string // as requested
	On       openai.Endpoint
	ID       []byte     // of the request
	Hints    RouteHints // for the choice of a node or server
	Start    time.Time
	Deadline time.Time
	Span     span
	Watch    *httpserver.Watch // of the client's connection; nil: it is not watched
	Admitted bool
	Cause    string // of metrics.StreamAborts; empty: the request ended well
	Status   int    // of the answer; 0: 200

	b      Backend
	key    *auth.Key // of the client; nil: there are no keys, or none was admitted
	claim  Claim     // what the request holds of its queue; zero: nothing
	closed bool

	aborted atomic.Bool // by Service.Abort
	// Guarded by the list of running requests.
	nextRunning, prevRunning *Exchange
	listed                   bool
	abort                    chan struct{} // closed by Abort; nil: the request does not wait for room
}

// Ending is the result of a request, for its span and its log line.
type Ending struct {
	Model     string // empty: not found
	Node      string // that answered, or was tried last; empty: none was
	Finish    string // of the last choice that finished; empty: none did
	Prompt    int    // tokens; 0: not known
	Cached    int    // tokens of the prompt
	Output    int
	Choices   int
	MaxTokens int // of each choice; 0: not known
	Stream    bool
	First     time.Time // token
	Text      string    // of the prompt, clipped for the log
	Unserved  int       // prompt tokens that the key was charged for although it got no answer
}

// Base returns x. Types that embed an Exchange get this method of Backend from it.
func (x *Exchange) Base() *Exchange { return x }

// Answer lets b answer the request.
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
	var early *earlyBody
	if fault == nil {
		early, fault = x.run()
	}
	if early != nil {
		streams = true
		EventsHead(ctx)
		ctx.Response.SetBodyStream(early, -1)
		return
	}
	var body fasthttp.ReadCloserWithError
	if fault == nil {
		body, fault = b.Respond(false)
	}
	if fault != nil {
		s.Fail(ctx, fault)
		return
	}
	streams = body != nil
}

// Enter counts a request in flight, or refuses it because the limit is reached.
func (s *Service) Enter() *openai.Error {
	if n := s.InFlight.Add(1); n > int64(s.Limits().MaxInFlight) {
		s.InFlight.Add(-1)
		s.Meters.Counter(metrics.AdmissionRejections, "max_num_queued_reqs").Inc()
		return openai.Unavailable(RetryAfter, "the gateway is full: it is answering %d requests", n-1)
	}
	return nil
}

// ReadHeaders reads the routing hints and the timeout of the request.
func (x *Exchange) ReadHeaders() (fault *openai.Error) {
	if x.Hints, fault = x.S.Routing(&x.Ctx.Request.Header); fault != nil {
		return fault
	}
	timeout, fault := x.S.timeout(&x.Ctx.Request.Header)
	x.Deadline = x.Start.Add(timeout)
	return fault
}

// LetIn takes a place of the client's key for a request with nTokens prompt tokens.
func (x *Exchange) LetIn(nTokens int) *openai.Error {
	k := x.S.KeyOf(x.Ctx)
	if no := k.Acquire(nTokens); no != nil {
		x.S.Refused(no.Limit)
		return openai.TooMany(no.RetryAfter, "%s", no.Message)
	}
	x.key = k
	return nil
}

// Priority returns the priority that is asked for, or the best one of the client's key if that is
// lower.
func (x *Exchange) Priority(asked int32) int32 {
	if x.key == nil {
		return asked
	}
	return max(asked, x.key.Limits.Priority)
}

// WatchClient starts watching the client's connection, unless it is watched already.
func (x *Exchange) WatchClient() {
	if c, ok := x.Ctx.Conn().(*httpserver.Conn); ok && x.Watch == nil {
		x.Watch = c.Watch(x.b)
	}
}

// Gone returns a channel that is closed when a watched client has closed its connection.
func (x *Exchange) Gone() <-chan struct{} {
	if x.Watch == nil {
		return nil
	}
	return x.Watch.Gone
}

// admit waits until the queue of the request's claim has room. The error is the reason why the
// request is refused.
func (x *Exchange) admit() *openai.Error {
	x.S.running.add(x)
	c, fault := x.b.Claim()
	if fault != nil {
		return fault
	}
	if c.Queue != nil && !c.Queue.pass(c.Choices, c.Tokens, c.Room) {
		x.WatchClient()
		if fault := x.waitForRoom(&c); fault != nil {
			return fault
		}
	}
	x.Admitted, x.claim = true, c
	return nil
}

// flow returns the flow that is charged for the request's tokens in a queue.
func (x *Exchange) flow(a *Admission) *admit.Flow {
	if x.key != nil && a == x.S.Queue {
		return x.key.Flow()
	}
	return a.flowOf(x.key)
}

// Attempted releases the tokens and blocks that were counted for the request until its attempts
// count their own.
func (x *Exchange) Attempted() {
	if c := &x.claim; c.Tokens > 0 {
		c.Queue.Computed(c.Tokens)
		c.Queue.Routed(c.Room.Blocks)
		c.Tokens, c.Room = 0, Room{}
	}
}

// Avoid returns the node that a request ahead of this one waits for; nil: none.
func (x *Exchange) Avoid() any { return x.claim.avoid }

// Begin counts an attempt of c that is about to be sent to a node, and starts its span.
func Begin[N comparable](x *Exchange, c *fsm.Choice[N], node string, at time.Time) trace.Span {
	number := c.Begin()
	x.S.Meters.Counter(metrics.GatewayAttempts).Inc()
	s := x.Span.Child("attempt", trace.Client, at)
	if s.On() {
		s.Set(trace.Peer.String(node), trace.Attempt.Int(int(number)))
	}
	return s
}

// AttemptFailed counts, logs and traces the failure of an attempt. who is "node" or "upstream".
func (x *Exchange) AttemptFailed(f *Failure, s *trace.Span, who, name string) {
	FailSpan(s, f)
	x.S.Meters.Counter(metrics.GatewayAttemptFailures, f.Kind).Inc()
	x.S.Log.Warn("attempt failed", "request", string(x.ID), who, name, "error", f.Err)
}

// Next returns what follows a failed attempt of c at node, within the limits of attempts and the
// retry budget of all requests.
func Next[N comparable](x *Exchange, c *fsm.Choice[N], node N, f *Failure) fsm.Action {
	a := c.Failed(node, f.Failure, time.Now(), x.S.ChoiceLimits())
	if a == fsm.Retry && !x.S.Budget.Allow() {
		return fsm.GiveUp
	}
	return a
}

// NoAttempt returns the answer to a request of which a choice cannot be attempted again. f is the
// failure of the last attempt; nil: no server of the kind who was available. model may be empty.
// started reports that the choice has tokens.
func (x *Exchange) NoAttempt(f *Failure, who, model string, started bool) *openai.Error {
	switch {
	case f != nil && f.Late: // the node's timer was first
		x.Cause = CauseDeadline
	case started:
		x.Cause = CauseUpstream
	}
	if f == nil {
		of := ""
		if model != "" {
			of = fmt.Sprintf(" for model %q", openai.Clip(model, 200))
		}
		return openai.Unavailable(RetryAfter, "no %s is available%s", who, of)
	}
	return f.Fault()
}

// AppendFault appends the event that ends a stream which fails, in the form of the path's API, and
// cuts the body. It is the method of every Backend whose streams have no events of their own for
// this.
func (x *Exchange) AppendFault(dst []byte, fault *openai.Error) (events []byte, end error) {
	return x.S.AppendFault(dst, x.Path, x.ID, fault), ErrCut
}

// ChoiceLimits returns the bounds of a choice's attempts.
func (s *Service) ChoiceLimits() fsm.Limits {
	l := s.Limits()
	return fsm.Limits{MaxAttempts: l.MaxAttempts, ResumeTimeout: l.ResumeTimeout}
}

// Causes of aborted requests, of metrics.StreamAborts.
const (
	CauseClientGone = "client_gone"
	CauseSlowClient = "slow_client"
	CauseShutdown   = "shutdown"
	CauseDeadline   = "deadline"
	CauseUpstream   = "upstream"
	CauseAborted    = "aborted"
)

// CutOff records a cause that is not the backend's, and returns the answer for it.
func (x *Exchange) CutOff(cause string) *openai.Error {
	switch x.Cause = cause; cause {
	case CauseClientGone:
		return ErrGone
	case CauseShutdown:
		return errShutdown
	case CauseAborted:
		return errAborted
	}
	return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: fmt.Sprintf("the request took longer than %v", x.Deadline.Sub(x.Start))}
}

// Unread reports whether the client no longer reads the answer.
func (x *Exchange) Unread() bool { return x.Cause == CauseClientGone || x.Cause == CauseSlowClient }

// Timing is when the first and the last tokens of an answer arrived; zero: none has.
type Timing struct{ First, Last time.Time }

// CountTokens counts n tokens of an answer that arrived together, and reports whether they are its
// first.
func (x *Exchange) CountTokens(t *Timing, n int, at time.Time) (first bool) {
	m := x.S.Meters
	x.CountOutput(n)
	if first = t.First.IsZero(); first {
		t.First = at
		m.Histogram(metrics.TimeToFirstToken).Observe(at.Sub(x.Start).Seconds())
	} else {
		m.Histogram(metrics.InterTokenLatency).Observe(at.Sub(t.Last).Seconds())
	}
	t.Last = at
	x.charged(n)
	return first
}

// CountOutput counts n tokens of an answer.
func (x *Exchange) CountOutput(n int) {
	x.S.Meters.Counter(metrics.GenerationTokens).Add(float64(n))
	x.countOfKey(metrics.KeyOutput, n)
}

// CountPrompt counts a prompt of n tokens, some of which a cache had.
func (x *Exchange) CountPrompt(n, cached int) {
	x.S.Meters.Counter(metrics.PromptTokens).Add(float64(n))
	x.S.Meters.Counter(metrics.PromptTokensCached).Add(float64(cached))
	x.countOfKey(metrics.KeyPrompt, n)
	x.countOfKey(metrics.KeyCached, cached)
}

// countOfKey counts n tokens of a kind, an index of metrics.KeyTokens, for the client's key.
func (x *Exchange) countOfKey(of, n int) {
	counter := x.key.Counter(of)
	if counter == nil {
		counter = x.S.Meters.Counter(metrics.GatewayKeyTokens, metrics.OtherKeys, metrics.KeyTokens[of])
	}
	counter.Add(float64(n))
}

// CountAnswer counts an answer that is complete. A negative number of tokens is not known.
func (x *Exchange) CountAnswer(t *Timing, prompt, output int) {
	m := x.S.Meters
	m.Histogram(metrics.E2ERequestLatency).Observe(time.Since(x.Start).Seconds())
	if prompt >= 0 {
		m.Histogram(metrics.RequestPromptTokens).Observe(float64(prompt))
	}
	if output >= 0 {
		m.Histogram(metrics.RequestGenerationTokens).Observe(float64(output))
	}
	if t.First.IsZero() {
		return
	}
	took := t.Last.Sub(t.First).Seconds()
	m.Histogram(metrics.RequestDecodeTime).Observe(took)
	if output > 1 {
		m.Histogram(metrics.TimePerOutputToken).Observe(took / float64(output-1))
	}
}

// CountFinished counts n answers that ended for a reason.
func (x *Exchange) CountFinished(reason string, n int) {
	if n > 0 {
		x.S.Meters.Counter(metrics.RequestSuccess, reason).Add(float64(n))
	}
}

// Broken returns the finish reason of an answer that is not complete.
func (x *Exchange) Broken() string {
	if x.Unread() || x.Cause == CauseAborted {
		return metrics.ReasonAbort
	}
	return metrics.ReasonError
}

// charged charges the key for tokens of an answer, some at a time.
func (x *Exchange) charged(tokens int) {
	c := &x.claim
	if x.key == nil || c.Queue == nil {
		return
	}
	if c.served += tokens; c.served >= chargeTokens {
		x.charge(c.served)
	}
}

// charge counts tokens that the key was served. Negative tokens are given back.
func (x *Exchange) charge(tokens int) {
	c := &x.claim
	if c.served = 0; tokens != 0 && c.Queue.Waiting() > 0 {
		c.Queue.charge(x.flow(c.Queue), c.Priority, tokens)
	}
}

// Release returns the place of one choice, which has ended, to the queue.
func (x *Exchange) Release() {
	if c := &x.claim; c.Choices > 0 {
		c.Choices--
		c.Queue.Leave(1)
	}
}

// depart returns to the queue all that the request holds of it.
func (x *Exchange) depart(unserved int) {
	c := &x.claim
	if c.Queue == nil {
		return
	}
	x.Attempted()
	if x.key != nil {
		if x.charge(c.served); c.queued {
			x.charge(-unserved)
		}
	}
	if c.Choices > 0 {
		c.Queue.Leave(c.Choices)
	}
	*c = Claim{}
}

// close ends the request. It cancels attempts that still run and returns the connection to the
// server.
func (x *Exchange) close() {
	if x.closed {
		return
	}
	x.closed = true
	x.S.running.remove(x)
	x.b.Stop()
	e := x.b.Ending()
	x.depart(e.Unserved)
	x.endSpan(&e)
	x.log(&e)
	if x.Watch != nil {
		x.Watch.Stop()
	}
	if x.Cause != "" {
		x.S.Meters.Counter(metrics.GatewayStreamsAborted, x.Cause).Inc()
	}
	x.key.Release(e.Output)
	x.S.InFlight.Add(-1)
	x.b.Free()
}

// CloseBody ends the request of a streamed answer. err is why its body could not be written
// completely; nil: it was. ended reports that the body was complete or had been cut before.
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
	x.Status = cmp.Or(x.Status, fasthttp.StatusOK)
	s, path, status := x.S, x.Path, x.Status
	x.close()
	s.Count(path, status)
}

// RecoverRead turns a panic in the Read of a streamed answer into a cut answer. It must be
// deferred.
func (x *Exchange) RecoverRead(n *int, err *error) {
	if r := recover(); r != nil {
		x.S.Log.Error("panic while streaming", "request", string(x.ID), "panic", r, "stack", string(debug.Stack()))
		*n, *err = 0, ErrCut
	}
}

// log writes the line of the request's end, if requests are logged.
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

// LogRefusal writes the log line of a request that reached no node, if requests are logged.
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

// Answers to requests that are cut.
var (
	ErrGone     = &openai.Error{Status: 499, Type: "ClientClosedRequest", Message: "the client closed the connection"}
	errAborted  = &openai.Error{Status: 499, Type: "RequestAborted", Message: "the request was aborted by POST /abort_requests"}
	errShutdown = &openai.Error{Status: 503, Type: openai.TypeUnavailable, RetryAfter: RetryAfter,
		Message: "the gateway is shutting down: send the request again"}
)

// KeepAlive is the comment that a stream of events gets after silence. Clients ignore it.
const KeepAlive = ": keep-alive\n\n"

// ErrCut ends a body without its last chunk. The server then aborts the connection, so that the
// client sees that the answer is not complete.
var ErrCut = errors.New("gateway: answer cut")

// Failure is the error of one attempt. The backend classifies it once.
type Failure struct {
	Err  error
	Kind string // label code of GatewayAttemptFailures

	fsm.Failure
	Late bool // the request's deadline has passed

	Status  int    // of the answer to the client, if no other attempt follows
	Prefix  string // of the answer's message
	Message string // the rest of it, of any length
}

// Fault returns the answer to a client whose request has no further attempt.
func (f *Failure) Fault() *openai.Error {
	message := f.Prefix + openai.Clip(f.Message, 300)
	switch f.Status {
	case 400:
		return openai.BadRequest("", "%s", message)
	case 404:
		return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model", Message: message}
	case 502:
		return openai.BadGateway("%s", message)
	case 503:
		return openai.Unavailable(RetryAfter, "%s", message)
	case 504:
		return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: message}
	}
	return &openai.Error{Status: f.Status, Type: openai.TypeInternal, Message: message}
}
