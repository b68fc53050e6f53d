package proxy

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// Bounds of relayed requests.
const (
	// maxHeld is the size in bytes up to which an answer other than a stream is read before it is
	// passed on. Until then another server can be tried.
	maxHeld = 64 << 10
	// watchDelay is the time after which the client of a request without an answer is watched. Quick
	// answers need no watch.
	watchDelay = 10 * time.Millisecond
	// probeWait is how long a request for an unknown model waits while there are servers whose first
	// probe has not ended. probePoll is the interval of checks.
	probeWait = 5 * time.Second
	probePoll = 5 * time.Millisecond
	// bytesPerToken estimates the tokens of a prompt from its bytes, for English text in JSON.
	bytesPerToken = 4
)

// relay is one request that an upstream server answers. The goroutine of the client's connection
// owns it.
type relay struct {
	exchange.Exchange
	p             *Proxy
	sent          string             // path at the server; empty: as requested
	method        string             // empty: POST
	body          []byte             // that is sent
	parsed        *upstream.Envelope // of the body, if it was parsed before
	envelope      upstream.Envelope
	model         *upstream.Model
	prompt        kvcache.Hash // key on the ring
	nPrompt       int          // tokens of the prompt, if they are the key; 0: its bytes are
	try           trace.Span   // of the current attempt
	life          fsm.Choice[*upstream.Server]
	untilDeadline bool // reads wait until the request's deadline

	call    *upstream.Call    // nil: there is none
	server  *upstream.Server  // of the current or last attempt
	prefill *prefillCall      // SGLang's request to the prefill server; nil: none
	patched []byte            // the body for a pair of servers
	renamed []byte            // the body with the servers' name of the model
	ranks   []int             // of prefill servers; a buffer
	failure *exchange.Failure // of the last attempt; nil: none failed
	head    []byte            // of the request that is sent
	length  int               // of the answer's body; -1: unknown
	lines   []byte            // the answer's headers
	events  bool              // the answer is a stream of events
	held    []byte            // the answer's body so far
	full    bool              // held is the whole body
	times   exchange.Timing   // of streams
	nEvents int               // of the answer
	outcome outcome
	tail    []byte // end of an answer, or of an event, that is sent in parts

	mu            sync.Mutex // guards what follows, and whether prefill is set
	cur           *upstream.Call
	gone          bool // the client has closed the connection
	prefillFailed bool // the prefill server has failed the current attempt
	prefillDone   bool // the decode server has answered and needs no more KV
}

// relays pools relays with their buffers.
var relays = sync.Pool{New: func() any { return new(relay) }}

// Relays reports whether upstreams answer POST requests for a path.
func Relays(path string) bool {
	switch path {
	case "/tokenize", "/detokenize", openai.TokensPath, openai.InvocationsPath, "/score", "/rerank", "/v2/rerank", "/pooling", "/v2/embed", "/classify":
		return true
	case openai.LoadAdapterPath, openai.UnloadAdapterPath: // it would reach only one of several servers
		return false
	}
	return strings.HasPrefix(path, "/v1/") && plainPath(path) && !(strings.HasPrefix(path, StoredPath) && strings.HasSuffix(path, "/cancel"))
}

// plainPath reports whether every server will read a path as the gateway does.
func plainPath(path string) bool {
	if httpserver.DotSegments(path) {
		return false
	}
	return !strings.ContainsFunc(path, func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.ContainsRune("/_-.:", c))
	})
}

// Streams implements exchange.Backend.
func (r *relay) Streams() bool { return r.envelope.Stream && r.completes() }

// Respond implements exchange.Backend.
func (r *relay) Respond(begun bool) (fasthttp.ReadCloserWithError, *openai.Error) {
	if begun && !(r.events && r.Status == 200) {
		return nil, r.noEvents()
	}
	if !begun {
		r.answerHead()
		r.learnStored()
	}
	if r.full && !begun {
		r.learn(r.held)
		r.held = r.rename(r.held)
		r.Ctx.Response.SetBody(r.held)
		r.end(nil)
		return nil, nil
	}
	if r.events && !begun {
		r.Ctx.Response.Header.Set("X-Accel-Buffering", "no")
		r.length = -1 // renaming and the last event may change it, and a cut answer would look complete
	}
	if r.renames() {
		r.length = -1
	}
	r.releaseBody()
	body := &relayBody{r: r, done: r.events && r.completes() && r.Status == 200, buf: r.held}
	if r.events {
		body.quiet = r.S.Limits().SSEKeepAlive
	}
	if r.full {
		body.begun = true
		body.release(io.EOF)
	}
	if !begun {
		r.Ctx.Response.SetBodyStream(body, r.length)
	}
	return body, nil
}

// noEvents returns the fault of a request whose stream has begun, and whose server has answered
// with anything else. It ends the call.
func (r *relay) noEvents() *openai.Error {
	var unread error
	if !r.full {
		unread = upstream.ErrNoVerdict
	}
	r.end(unread)
	if r.Status == 200 {
		return openai.BadGateway("the upstream's answer is no stream of events")
	}
	f := exchange.Failure{Status: r.Status, Prefix: fmt.Sprintf("the upstream answered with status %d: ", r.Status), Message: string(r.held)}
	fault := f.Fault()
	if r.Status == 429 {
		fault.Type = openai.TypeRateLimit
	}
	return fault
}

// path returns the request's path at the server.
func (r *relay) path() string { return cmp.Or(r.sent, r.Path) }

// completes reports whether the path's streams end in [DONE].
func (r *relay) completes() bool {
	return r.path() == "/v1/chat/completions" || r.path() == "/v1/completions"
}

// hasMediaType reports whether a Content-Type has the media type want, which is in lower case.
func hasMediaType(kind []byte, want string) bool {
	return len(kind) >= len(want) && strings.EqualFold(string(kind[:len(want)]), want) && (len(kind) == len(want) || kind[len(want)] == ';' || kind[len(want)] == ' ')
}

// Prepare implements exchange.Backend. It reads what routing needs.
func (r *relay) Prepare() (fault *openai.Error) {
	p, ctx := r.p, r.Ctx
	r.body = ctx.PostBody()
	if hasMediaType(ctx.Request.Header.ContentType(), "application/json") || len(ctx.Request.Header.ContentType()) == 0 || r.completes() || r.responds() {
		if fault := exchange.CheckJSON(&ctx.Request.Header); fault != nil {
			return fault
		}
		var err error
		if r.parsed != nil {
			r.envelope = *r.parsed
		} else if r.envelope, err = upstream.ParseEnvelope(r.body); err != nil {
			return openai.BadRequest("", "%s", strings.TrimPrefix(err.Error(), "upstream: "))
		}
	}
	for _, step := range [...]func() *openai.Error{r.checkLimits, r.ReadHeaders, r.find, r.checkPrevious, r.chargePair} {
		if fault := step(); fault != nil {
			return fault
		}
	}
	if fault := r.LetIn(len(r.envelope.Prompt) / bytesPerToken); fault != nil {
		return fault
	}
	switch r.hash(ctx.PostBody()) { // any other fault means that the prompt is routed by its bytes
	case nil, errNoHash, errNoTokenizer, errNoPrompt:
	default:
		p.Meters.Counter(metrics.GatewayUntokenized).Inc()
	}
	p.Meters.Histogram(metrics.RequestParamsN).Observe(float64(max(1, r.envelope.N)))
	return nil
}

// find sets the model that the request names.
func (r *relay) find() *openai.Error {
	for until := r.Start.Add(probeWait); ; time.Sleep(probePoll) {
		now := r.p.Pool.Now()
		if r.model = now.Find(r.envelope.Model); r.model != nil {
			break
		}
		if !now.Probing() || !time.Now().Before(until) {
			return noModel(now, r.envelope.Model)
		}
	}
	if as := r.model.As; as != "" {
		if fault := r.p.Charge(r.Ctx)(len(r.body)); fault != nil {
			return fault
		}
		r.renamed = r.envelope.WithModel(r.renamed[:0], r.body, as)
		r.body = r.renamed
	}
	return nil
}

// NoModel returns the error of a request for a model that no upstream serves.
func (p *Proxy) NoModel(name string) *openai.Error { return noModel(p.Pool.Now(), name) }

func noModel(now *upstream.Snapshot, name string) *openai.Error {
	switch {
	case len(now.Servers) == 0:
		return openai.Unavailable(exchange.RetryAfter, "no upstream is known: the sources that --upstream names have none yet")
	case now.Unknown > 0 && name == "":
		return openai.Unavailable(exchange.RetryAfter, "no upstream can be chosen: the models of %d of %d upstreams are not known yet", now.Unknown, len(now.Servers))
	case now.Unknown > 0:
		return openai.Unavailable(exchange.RetryAfter, "no upstream serves the model %q: the models of %d of %d upstreams are not known yet", openai.Clip(name, 200), now.Unknown, len(now.Servers))
	case name == "":
		return openai.BadRequest("model", "several models are served here: name one of /v1/models")
	}
	return openai.NoModel(name)
}

// views pools views.
var views = sync.Pool{New: func() any { return new(route.View) }}

// decide returns the router's decision, without the servers that have failed the request.
func (r *relay) decide(view *route.View) (route.Decision, upstream.Forced) {
	force := r.model.FillView(view, r.life.Tried)
	q := r.Hints.Request(r.prompt)
	q.Uncached, q.MinRemote = cmp.Or(r.nPrompt, 1+len(r.envelope.Prompt)/bytesPerToken), 1
	d := r.model.Table.Pick(q, *view, r.ranks[:0])
	r.ranks = d.Prefill
	return d, force
}

// chosen returns the servers of a decision. prefill is nil if one server computes prompt and
// answer.
func (r *relay) chosen(d route.Decision) (s, prefill *upstream.Server) {
	s = r.model.Servers[d.Decode]
	if len(d.Prefill) > 0 && s.Role == upstream.Decode && !(r.p.Pool.Protocol() == upstream.VLLM && r.oneServer()) {
		prefill = r.model.Prefill[d.Prefill[0]]
	}
	return s, prefill
}

// pick returns the next server and the one that computes its prompt. s is nil if none is left.
func (r *relay) pick() (s, prefill *upstream.Server, force upstream.Forced) {
	view := views.Get().(*route.View)
	defer views.Put(view)
	d, force := r.decide(view)
	r.S.Meters.Counter(metrics.GatewayRoutes, string(d.Reason)).Inc()
	if d.Decode < 0 {
		return nil, nil, force
	}
	s, prefill = r.chosen(d)
	return s, prefill, force
}

// Run implements exchange.Backend. It tries servers until one answers. A server that failed is not
// tried again, except once if a kept connection was closed and there is no other server.
func (r *relay) Run() *openai.Error {
	r.Attempted() // the speed of upstreams is not known
	for stale := 0; ; {
		s, prefill, force := r.pick()
		if s == nil {
			return r.noServer()
		}
		if r.try = exchange.Begin(&r.Exchange, &r.life, s.Name, time.Now()); r.try.On() {
			r.try.Set(trace.RequestModel.String(r.model.Name))
			if prefill != nil {
				r.try.Set(trace.PrefillPeer.String(prefill.Name))
			}
		}
		err := r.attempt(s, prefill, force)
		if err == nil {
			if r.try.On() {
				r.try.Event("first byte", time.Now())
			}
			return nil
		}
		r.failure = upstreamFailure(err)
		fault := r.interrupted()
		if fault != nil {
			exchange.FailSpan(&r.try, r.failure)
			err = upstream.ErrNoVerdict
		}
		r.end(err)
		r.endPrefill()
		if fault != nil {
			return fault
		}
		r.AttemptFailed(r.failure, &r.try, "upstream", r.server.Name)
		if r.failure.Lost {
			stale++
		}
		if stale == 1 && r.failure.Lost && r.untried() == 0 && r.S.Budget.Allow() {
			continue
		}
		if exchange.Next(&r.Exchange, &r.life, r.server, r.failure) == fsm.GiveUp || stale >= r.S.Limits().MaxAttempts {
			return r.noServer()
		}
	}
}

// retried reports whether another server is tried after a status.
func retried(status int) bool {
	return status == 500 || status == 502 || status == 503 || status == 504
}

// open starts a call that is aborted when the client closes its connection.
func (r *relay) open(s *upstream.Server, force bool) error {
	patience := time.Now().Add(watchDelay)
	if r.untilDeadline = r.Watch != nil; r.untilDeadline || r.Deadline.Before(patience) {
		patience = r.Deadline
	}
	r.server = s
	call, err := s.Open(context.Background(), patience, force)
	if err != nil {
		return err
	}
	r.call = call
	if !r.hold(call) {
		return exchange.ErrGone
	}
	return nil
}

// ask sends a body to one server and waits for its answer: for all of an answer of at most most
// bytes, for the first event of a stream, and for the head of any other.
func (r *relay) ask(s *upstream.Server, force bool, body []byte, most int) error {
	if err := r.open(s, force); err != nil {
		return err
	}
	read := !r.untilDeadline // after a read, a closed connection would show at the deadline only
	if err := r.call.Send(r.appendHead(s, len(body)), body, r.Deadline, read); err != nil {
		return err
	}
	return r.await(most)
}

// await waits for the answer to the request.
func (r *relay) await(most int) error {
	call := r.call
	err := call.Head()
	if err != nil && call.Late && r.wait() {
		err = call.Head()
	}
	if err != nil {
		return err
	}
	if retried(call.Status) && (r.server.Role == upstream.Prefill || r.others()) {
		return fmt.Errorf("%w: %d", errStatus, call.Status)
	}
	r.Status, r.length = call.Status, int(call.Length)
	r.lines, r.held, r.full = append(r.lines[:0], call.Lines...), r.held[:0], false
	if r.events = hasMediaType(call.ContentType, "text/event-stream"); !r.events && call.Length > int64(most) {
		return nil
	}
	for len(r.held) <= most {
		piece, err := r.next()
		if err == io.EOF && r.events && r.completes() && call.Status == 200 && !endsDone(r.held) {
			return fmt.Errorf("%w: a stream without an event", upstream.ErrBroken)
		}
		if err == io.EOF {
			r.full = true
			return nil
		}
		if err != nil {
			return err
		}
		if r.held = append(r.held, piece...); r.events && wholeEvents(r.held) > 0 {
			return nil
		}
	}
	return nil
}

// others reports whether another server can be tried.
func (r *relay) others() bool {
	return r.untried() > 0 && len(r.life.Tried)+1 < r.S.Limits().MaxAttempts
}

// untried returns the number of servers of r.server's role that have not been tried.
func (r *relay) untried() (n int) {
	if r.model == nil {
		return 0
	}
	all := r.model.Servers
	if r.server.Role == upstream.Prefill {
		all = r.model.Prefill
	}
	for _, s := range all {
		if s != r.server && !s.Draining() && !slices.Contains(r.life.Tried, s) {
			n++
		}
	}
	return n
}

// next returns the next piece of the answer's body.
func (r *relay) next() ([]byte, error) {
	piece, err := r.call.Next(true)
	if err != nil && r.call.Late && r.wait() {
		piece, err = r.call.Next(true)
	}
	return piece, err
}

// wait starts to watch the client of a slow request, and moves the read deadline to the request's.
// It returns false if that has passed, or is set already.
func (r *relay) wait() bool {
	if r.untilDeadline || !time.Now().Before(r.Deadline) {
		return false
	}
	r.WatchClient()
	r.untilDeadline = true
	return r.call.SetDeadline(r.Deadline) == nil
}

// hold makes call the one that ClientGone aborts. It returns false if the call must not continue.
func (r *relay) hold(call *upstream.Call) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cur = call
	return !r.gone && !r.prefillFailed
}

// ClientGone implements exchange.Backend. It aborts the current calls.
func (r *relay) ClientGone() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = true
	if r.cur != nil {
		r.cur.Abort()
	}
	if r.prefill != nil {
		r.prefill.abort()
	}
}

// interrupted returns the fault of a request that something other than the server ended, or nil.
func (r *relay) interrupted() *openai.Error {
	r.mu.Lock()
	gone := r.gone
	r.mu.Unlock()
	select {
	case <-r.S.Cut.Done():
		return r.CutOff(exchange.CauseShutdown)
	default:
	}
	switch {
	case r.Aborted():
		return r.CutOff(exchange.CauseAborted)
	case gone:
		return r.CutOff(exchange.CauseClientGone)
	case !time.Now().Before(r.Deadline):
		return r.CutOff(exchange.CauseDeadline)
	}
	return nil
}

// end ends the current call. err is the server's failure, upstream.ErrNoVerdict, or nil after all
// of the answer.
func (r *relay) end(err error) {
	r.mu.Lock()
	r.cur = nil
	r.mu.Unlock()
	if r.call != nil {
		r.call.Close(err)
		r.call = nil
	}
}

// noServer returns the fault of a request for which no server is left.
func (r *relay) noServer() *openai.Error {
	return r.NoAttempt(r.failure, "upstream", cmp.Or(r.envelope.Model, r.model.Name), false)
}

// Stop implements exchange.Backend.
func (r *relay) Stop() {
	r.end(upstream.ErrNoVerdict)
	r.endPrefill()
	r.try.End(time.Now())
	r.record()
}

// Ending implements exchange.Backend.
func (r *relay) Ending() exchange.Ending {
	e := exchange.Ending{Choices: r.envelope.N, Output: r.nOutput(), Stream: r.envelope.Stream, First: r.times.First}
	if r.model != nil {
		e.Model = r.model.Name
	}
	if r.server != nil {
		e.Node = r.server.Name
	}
	if u := &r.outcome.usage; u.Completion > 0 {
		e.Prompt, e.Cached = u.Prompt, u.Cached
	}
	if r.Cause == "" {
		e.Finish = r.outcome.finish()
	}
	return e
}

// Free implements exchange.Backend.
func (r *relay) Free() {
	*r = relay{head: r.head[:0], lines: r.lines[:0], ranks: r.ranks[:0],
		held: reuse(r.held, 2*maxHeld), patched: reuse(r.patched, 2*maxHeld), renamed: reuse(r.renamed, 2*maxHeld)}
	relays.Put(r)
}

// reuse returns an empty buffer with the memory of b, or nil if that has more than most bytes.
func reuse(b []byte, most int) []byte {
	if cap(b) > most {
		return nil
	}
	return b[:0]
}
