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
	// maxHeld is how much of an answer that is no stream is held until all of it
	// is there, in bytes: until then another server can be asked.
	maxHeld = 64 << 10
	// watchAfter is how long a server may take to answer before its client is
	// watched: quick answers do without.
	watchAfter = 10 * time.Millisecond
	// meetPatience is how long a request for a model that nobody serves waits while
	// there are servers that have just been found; meetPause is between two looks.
	meetPatience = 5 * time.Second
	meetPause    = 5 * time.Millisecond
	// bytesPerToken is what a prompt's bytes are taken for where nobody counts
	// tokens: of English text in JSON.
	bytesPerToken = 4
)

// relay is one request that a server of another kind answers. The goroutine of
// its client's connection owns it.
type relay struct {
	exchange.Exchange
	p        *Proxy
	body     []byte             // as it is sent
	envelope *upstream.Envelope // what was read of body before; nil: nothing
	look     upstream.Envelope
	model    *upstream.Model
	prompt   kvcache.Hash // key on the ring
	nPrompt  int          // tokens of the prompt, where they were hashed; 0: its bytes were
	try      trace.Span   // of the present attempt
	life     fsm.Choice[*upstream.Server]
	patient  bool // reads wait until the deadline

	call    *upstream.Call    // nil: none is under way
	server  *upstream.Server  // that is asked, or was last
	prefill *leg              // SGLang's other leg; nil: none
	patched []byte            // the body of a leg
	renamed []byte            // the body with the name that servers know the model by
	ranks   []int             // of prefill servers; a buffer
	failure *exchange.Failure // of the last attempt; nil: none failed
	head    []byte            // of the request, as it is sent
	length  int               // of the answer's body; -1: not told
	lines   []byte            // the answer's headers
	events  bool              // the answer is a stream of events
	held    []byte            // the answer's body so far
	full    bool              // held is all of it
	times   exchange.Timing   // streams only
	nEvents int               // that the answer had
	told    outcome

	mu    sync.Mutex // of what follows, and of whether prefill is there
	cur   *upstream.Call
	gone  bool
	unfed bool // the prefill leg has failed the present attempt
	fed   bool // the decode leg needs the other no more
}

// relays are kept between requests, with their buffers.
var relays = sync.Pool{New: func() any { return new(relay) }}

// Relays reports whether upstreams answer POST requests for a path.
func Relays(path string) bool {
	switch path {
	case "/tokenize", "/detokenize", openai.TokensPath, "/score", "/rerank", "/v2/rerank", "/pooling", "/classify":
		return true
	case openai.LoadAdapterPath, openai.UnloadAdapterPath: // would reach one server of several
		return false
	}
	return strings.HasPrefix(path, "/v1/") && plainPath(path)
}

// plainPath says whether a path can be sent on as it was understood here.
func plainPath(path string) bool {
	if httpserver.DotSegments([]byte(path)) {
		return false
	}
	for i := range len(path) {
		c := path[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("/_-.:", c) >= 0) {
			return false
		}
	}
	return true
}

// Respond implements exchange.Backend.
func (r *relay) Respond() (streams bool) {
	r.answerHead()
	if r.full {
		r.told.learn(r.held)
		r.held = r.rename(r.held)
		r.Ctx.Response.SetBody(r.held)
		r.end(nil)
		return false
	}
	if r.events {
		r.Ctx.Response.Header.Set("X-Accel-Buffering", "no")
		r.length = -1 // names and the last event may differ: a length told would make a cut answer look whole
	}
	if r.renames() {
		r.length = -1
	}
	r.letGo()
	r.Ctx.Response.SetBodyStream(&relayBody{r: r, done: r.events && r.completes() && r.Status == 200, buf: r.held}, r.length)
	return true
}

// completes says whether the path's streams end in [DONE].
func (r *relay) completes() bool {
	return r.Path == "/v1/chat/completions" || r.Path == "/v1/completions"
}

// is says whether a media type is the one in lower case, whatever its parameters.
func is(kind []byte, want string) bool {
	return len(kind) >= len(want) && strings.EqualFold(string(kind[:len(want)]), want) && (len(kind) == len(want) || kind[len(want)] == ';' || kind[len(want)] == ' ')
}

// Prepare implements exchange.Backend. It looks at the request as far as routing needs it.
func (r *relay) Prepare() (fault *openai.Error) {
	p, ctx := r.p, r.Ctx
	r.body = ctx.PostBody()
	if is(ctx.Request.Header.ContentType(), "application/json") || len(ctx.Request.Header.ContentType()) == 0 || r.completes() {
		if fault := exchange.CheckJSON(&ctx.Request.Header); fault != nil {
			return fault
		}
		var err error
		if r.envelope != nil {
			r.look = *r.envelope
		} else if r.look, err = upstream.ParseEnvelope(r.body); err != nil {
			return openai.BadRequest("", "%s", strings.TrimPrefix(err.Error(), "foreign: "))
		}
	}
	if fault := r.checkLimits(); fault != nil {
		return fault
	}
	if fault := r.ReadHeaders(); fault != nil {
		return fault
	}
	if fault := r.find(); fault != nil {
		return fault
	}
	if fault := r.chargePair(); fault != nil {
		return fault
	}
	if fault := r.LetIn(len(r.look.Prompt) / bytesPerToken); fault != nil {
		return fault
	}
	switch r.hash(ctx.PostBody()) { // by bytes where it is not by tokens
	case nil, errNoHash, errNoTokenizer, errNoPrompt:
	default:
		p.Meters.Untokenized.Inc()
	}
	p.Meters.N.Observe(float64(max(1, r.look.N)))
	return nil
}

// find is the model that the request names.
func (r *relay) find() *openai.Error {
	now := r.p.Pool.Now()
	r.model = now.Find(r.look.Model)
	for until := r.Start.Add(meetPatience); r.model == nil && now.Probing() && time.Now().Before(until); {
		time.Sleep(meetPause)
		now = r.p.Pool.Now()
		r.model = now.Find(r.look.Model)
	}
	if r.model != nil {
		if as := r.model.As; as != "" {
			if fault := r.p.Charge(r.Ctx)(len(r.body)); fault != nil {
				return fault
			}
			r.renamed = r.look.WithModel(r.renamed[:0], r.body, as)
			r.body = r.renamed
		}
		return nil
	}
	switch {
	case now.Unknown > 0 || len(now.Servers) == 0:
		return openai.Unavailable(exchange.RetryAfter, "no upstream serves the model %q: %d of %d have not told their models yet", openai.Clip(r.look.Model, 200), now.Unknown, len(now.Servers))
	case r.look.Model == "":
		return openai.BadRequest("model", "several models are served here: name one of /v1/models")
	}
	return openai.NoModel(r.look.Model)
}

// views are kept between decisions.
var views = sync.Pool{New: func() any { return new(route.View) }}

// decide asks the router, around the servers that have failed the request.
func (r *relay) decide(view *route.View) (route.Decision, upstream.Forced) {
	force := r.model.FillView(view, r.life.Tried())
	q := r.Hints.Request(r.prompt)
	q.Uncached, q.MinRemote = cmp.Or(r.nPrompt, 1+len(r.look.Prompt)/bytesPerToken), 1
	d := r.model.Table.Pick(q, *view, r.ranks[:0])
	r.ranks = d.Prefill
	return d, force
}

// chosen are the servers of a decision; prefill is nil where one server does all.
func (r *relay) chosen(d route.Decision) (s, prefill *upstream.Server) {
	s = r.model.Servers[d.Decode]
	if len(d.Prefill) > 0 && s.Role == upstream.Decode && !(r.p.Pool.Protocol() == upstream.VLLM && r.alone()) {
		prefill = r.model.Prefill[d.Prefill[0]]
	}
	return s, prefill
}

// pick chooses the next server and the one that computes its prompt; nil: there
// is none left.
func (r *relay) pick() (s, prefill *upstream.Server, force upstream.Forced) {
	view := views.Get().(*route.View)
	defer views.Put(view)
	d, force := r.decide(view)
	r.S.Meters.Set.Counter(metrics.GatewayRoutes, string(d.Reason)).Inc()
	if d.Decode < 0 {
		return nil, nil, force
	}
	s, prefill = r.chosen(d)
	return s, prefill, force
}

// Run implements exchange.Backend: it asks servers until one answers. A server that failed is not
// asked again, but, once, for one whose kept connection was closed when there is no other.
func (r *relay) Run() *openai.Error {
	r.Attempted() // how fast servers compute prompts is not known
	for stale := 0; ; {
		s, prefill, force := r.pick()
		if s == nil {
			return r.nobody()
		}
		if r.try = exchange.Begin(&r.Exchange, &r.life, s.Name, time.Now()); r.try.On() {
			r.describe(prefill)
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
			r.drop(nil)
		} else {
			r.drop(err)
		}
		r.unpair()
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
			return r.nobody()
		}
	}
}

// retried says whether a status is worth asking another server.
func retried(status int) bool {
	return status == 500 || status == 502 || status == 503 || status == 504
}

// open begins a call that ends with the client.
func (r *relay) open(s *upstream.Server, force bool) error {
	patience := r.Deadline
	if r.patient = r.Watch != nil; !r.patient {
		patience = time.Now().Add(watchAfter)
		if r.Deadline.Before(patience) {
			patience = r.Deadline
		}
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

// ask sends a body to one server and waits for its answer: for all of a small
// one, for the first of events, for the head of others. most is how much of an
// answer is small.
func (r *relay) ask(s *upstream.Server, force bool, body []byte, most int) error {
	if err := r.open(s, force); err != nil {
		return err
	}
	send := r.call.SendAndRead
	if r.patient { // a retry, which nothing would wake
		send = r.call.Send
	}
	if err := send(r.appendHead(s, len(body)), body, r.Deadline); err != nil {
		return err
	}
	return r.await(most)
}

// await waits for the answer to what was sent.
func (r *relay) await(most int) error {
	call := r.call
	if err := call.Head(); err != nil {
		if !call.Late || !r.wait() {
			return err
		}
		if err := call.Head(); err != nil {
			return err
		}
	}
	if retried(call.Status) && (r.server.Role == upstream.Prefill || r.others()) {
		return fmt.Errorf("%w: %d", errStatus, call.Status)
	}
	r.Status, r.length = call.Status, int(call.Length)
	r.lines, r.held, r.full = append(r.lines[:0], call.Lines...), r.held[:0], false
	if r.events = is(call.ContentType, "text/event-stream"); !r.events && call.Length > int64(most) {
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

// others says whether there is a server of that kind to be asked instead.
func (r *relay) others() bool {
	return r.untried() > 0 && len(r.life.Tried())+1 < r.S.Limits().MaxAttempts
}

// untried is the number of servers of r.server's kind that have not been asked.
func (r *relay) untried() (n int) {
	all := r.model.Servers
	if r.server.Role == upstream.Prefill {
		all = r.model.Prefill
	}
	for _, s := range all {
		if s != r.server && !s.Draining() && !slices.Contains(r.life.Tried(), s) {
			n++
		}
	}
	return n
}

// next is the next piece of the answer's body.
func (r *relay) next() ([]byte, error) {
	piece, err := r.call.Next(true)
	if err != nil && r.call.Late && r.wait() {
		piece, err = r.call.Next(true)
	}
	return piece, err
}

// wait has the client watched while the server takes its time; false: it was
// waited for long enough.
func (r *relay) wait() bool {
	if r.patient || !time.Now().Before(r.Deadline) {
		return false
	}
	r.WatchClient()
	r.patient = true
	return r.call.SetDeadline(r.Deadline) == nil
}

// hold makes the call the one that ends with the client; false: it has gone.
func (r *relay) hold(call *upstream.Call) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cur = call
	return !r.gone && !r.unfed
}

// ClientGone implements exchange.Backend: it ends what is under way.
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

// interrupted says whether something other than the server ended the request.
func (r *relay) interrupted() *openai.Error {
	r.mu.Lock()
	gone := r.gone
	r.mu.Unlock()
	select {
	case <-r.S.Cut:
		return r.CutOff(exchange.CauseShutdown)
	default:
	}
	switch {
	case gone:
		return r.CutOff(exchange.CauseClientGone)
	case !time.Now().Before(r.Deadline):
		return r.CutOff(exchange.CauseDeadline)
	}
	return nil
}

// drop ends the current call; err is what it says of the server, nil: nothing.
func (r *relay) drop(err error) {
	r.mu.Lock()
	r.cur = nil
	r.mu.Unlock()
	if r.call == nil {
		return
	}
	if err == nil {
		r.call.NoVerdict()
	} else {
		r.call.Close(err)
	}
	r.call = nil
}

// end ends the call whose answer was taken; err is why it was not to its end.
func (r *relay) end(err error) {
	r.mu.Lock()
	r.cur = nil
	r.mu.Unlock()
	if r.call != nil {
		r.call.Close(err)
		r.call = nil
	}
}

// nobody is what the client is told when no server is left.
func (r *relay) nobody() *openai.Error {
	return r.NoAttempt(r.failure, "upstream", r.look.Model, false)
}

// Stop implements exchange.Backend.
func (r *relay) Stop() {
	r.drop(nil)
	r.unpair()
	r.try.End(time.Now())
	r.record()
}

// Ending implements exchange.Backend.
func (r *relay) Ending() exchange.Ending {
	e := exchange.Ending{Choices: r.look.N, Output: r.nOutput(), Stream: r.look.Stream, First: r.times.First}
	if r.model != nil {
		e.Model = r.model.Name
	}
	if r.server != nil {
		e.Node = r.server.Name
	}
	if u := &r.told.usage; u.Completion > 0 {
		e.Prompt, e.Cached = u.Prompt, u.Cached
	}
	if r.Cause == "" {
		e.Finish = r.told.finish()
	}
	return e
}

// Free implements exchange.Backend.
func (r *relay) Free() {
	head, lines, held, patched, renamed, ranks := r.head[:0], r.lines[:0], r.held[:0], r.patched[:0], r.renamed[:0], r.ranks[:0]
	if cap(held) > 2*maxHeld {
		held = nil
	}
	if cap(patched) > 2*maxHeld {
		patched = nil
	}
	if cap(renamed) > 2*maxHeld {
		renamed = nil
	}
	*r = relay{head: head, lines: lines, held: held, patched: patched, renamed: renamed, ranks: ranks}
	relays.Put(r)
}
