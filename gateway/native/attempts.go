package native

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// request is one request that decode nodes answer. The goroutine of the client's connection owns
// it.
type request struct {
	exchange.Exchange
	fleet    *Fleet
	req      *openai.Request
	model    *Model
	answerID string
	encoder  *openai.Encoder
	surface  Surface // nil: encoder writes the answer
	seed     uint64
	prompts  []render.Prompt
	choices  []choice
	queue    *exchange.Admission // of the model, or of its vectors
	live     int                 // choices that have not finished
	started  int                 // with pools: choices that have an attempt, the first ones
	in       *nodes.Inbox
	events   []nodes.Event // buffer of Drain
	timer    *time.Timer   // wakes at timerAt, the next bound of the request
	uncut    func() bool   // ends the wake at a shutdown
	timerAt  time.Time
	quiet    time.Duration // silence after which the stream gets a comment; 0: its head was not sent, negative: never
	wrote    time.Time     // when the last events or comment were added to buf; set with quiet
	buf      []byte        // encoded events that are to be sent; streams only
	counted  int           // bytes of buf that are part of Fleet.Buffered
	used     openai.Usage  // with the event that is encoded; streams only
	nPrompt  int           // tokens of all prompts
}

// choice is one answer of a request.
type choice struct {
	number  int // among the choices of its prompt; part of the sampling key
	prompt  *render.Prompt
	text    *render.Text  // nil: the model has no tokenizer
	parser  *parse.Parser // splits the text; nil: all of it is content
	parsed  []parse.Delta // buffer of parser
	output  []int32       // all tokens received
	delta   openai.Delta  // not sent yet: the next event, or the whole answer
	sent    int           // tokens of output in events sent before
	cached  int           // tokens of the prompt in the cache of the node that sent the first token
	textEnd int           // bytes of token texts so far, for offsets
	vector  []float32     // of the prompt, as the node sent it; nil: not yet, or tokens are requested
	state   fsm.Choice[*nodes.Node]

	stream        *nodes.Stream     // of the current attempt
	home          *nodes.Node       // has the prompt's KV; nil: not known
	node          *nodes.Node       // runs the attempt; nil: none
	last          string            // name of the last node that ran an attempt
	class         string            // numerics class of the node that sent the last token; empty: not known
	prefill       *nodes.Node       // expected to compute the prompt; nil: none, or done
	computes      *nodes.Node       // counts the tokens to compute, prefill or decode; nil: done
	held          int               // leading tokens in the cache of the attempt's decode node
	queued        int               // tokens of prompt and output that are to be computed
	plan          *nodes.Node       // computes of the attempt that is about to begin
	failure       *exchange.Failure // of the last attempt that failed
	since         time.Time         // start of the current attempt
	predictedTTFT time.Duration     // from since to the first token; negative: none
	times         exchange.Timing
	span          trace.Span // of the current attempt
}

// startAll starts the first choice of each prompt. The other choices of a prompt follow when the
// first has a token, because its node then has the prompt's KV, which they share.
func (x *request) startAll() *openai.Error {
	defer x.Attempted()
	wake := x.in.Wake
	x.timer, x.timerAt = time.AfterFunc(time.Until(x.Deadline), wake), x.Deadline
	x.uncut = context.AfterFunc(x.S.Cut, wake)
	if x.pools() {
		return x.startVectors()
	}
	for i := range x.choices {
		if x.choices[i].number > 0 {
			continue
		}
		if fault := x.attempt(&x.choices[i]); fault != nil {
			return fault
		}
	}
	return nil
}

// follow starts the other choices of a prompt whose first choice has its first token.
func (x *request) follow(first *choice) *openai.Error {
	for i := first.delta.Index + 1; i < len(x.choices) && x.choices[i].number > 0; i++ {
		c := &x.choices[i]
		c.home = first.node
		if fault := x.attempt(c); fault != nil {
			return fault
		}
	}
	return nil
}

// attempt starts the next attempt of a choice. It tries other nodes while nodes cannot be reached.
func (x *request) attempt(c *choice) *openai.Error {
	c.state.Seek()
	for {
		node, decision, fleet := x.pick(c)
		if node == nil || c.state.Excludes(node) {
			return x.nowhere(c, node)
		}
		c.since, c.predictedTTFT = time.Now(), decision.First
		if c.span = exchange.Begin(&x.Exchange, &c.state, node.Name, c.since); c.span.On() {
			c.span.Set(trace.Choice.Int(c.delta.Index), trace.Resumed.Int(c.state.From),
				trace.RouteReason.String(string(decision.Reason)), trace.PrefillReason.String(string(decision.PrefillReason)))
		}
		ctx, cancel := context.WithDeadline(context.Background(), x.Deadline)
		s, err := node.Generate(ctx, x.message(c, decision, fleet), x.in, int32(c.delta.Index))
		cancel()
		if err == nil {
			c.state.Sent()
			c.stream, c.node, c.last = s, node, node.Name
			x.wake(c.since.Add(x.fleet.o.AcceptTimeout))
			node.AddInFlight(1)
			node.Constrained.Add(x.constrained())
			s.Takes(x.takes(c))
			x.forecast(c, node)
			if len(decision.Prefill) > 0 {
				c.prefill = fleet.Prefill[decision.Prefill[0]]
				c.prefill.AddInFlight(1)
			}
			c.computes = c.plan
			c.computes.Computes(c.queued)
			x.queue.Count(int64(c.queued))
			return nil
		}
		f := nodeFailure(err)
		f.Lost = false // nothing was sent
		if fault := x.failed(c, node, f); fault != nil {
			return fault
		}
		if !time.Now().Before(x.Deadline) {
			return x.CutOff(exchange.CauseDeadline)
		}
	}
}

// pick routes a choice's next attempt, around the nodes that failed it.
func (x *request) pick(c *choice) (*nodes.Node, route.Decision, *nodes.Snapshot) {
	fleet := x.snapshot()
	view := fleet.View()
	defer view.Release()
	remote := max(1, x.fleet.o.MinRemotePrefillTokens)
	// Transferred KV lacks the logits, and the rows behind the last norm. A whole fleet transfers none.
	if _, scores := x.scores(c); scores || x.means() || fleet.Whole() {
		remote = math.MaxInt
	}
	demand := route.Demand{} // a stream resumes even where memory is short
	if !c.state.Started() {
		demand = x.demand(c.prompt)
	}
	avoid := c.state.Tried
	if n, ok := x.Avoid().(*nodes.Node); ok && c.state.Attempt == 0 {
		avoid = []*nodes.Node{n}
	}
	d := x.fleet.route(fleet, view, x.model, c.prompt, &x.Hints, demand, len(c.output), remote, avoid, c.class)
	if d.Reason == route.ReasonNoRoom { // other requests were faster since admission: it waits on the node
		d = x.fleet.route(fleet, view, x.model, c.prompt, &x.Hints, route.Demand{}, len(c.output), remote, avoid, c.class)
	}
	if at := slices.Index(fleet.Decode, c.home); at >= 0 && view.Decode[at].Usable && !slices.Contains(c.state.Tried, c.home) && !view.Closed(route.Decision{Decode: at}) {
		d = route.Decision{Decode: at, Reason: route.ReasonPrefix, PrefillReason: route.ReasonShort, First: -1}
	}
	x.S.Meters.Counter(metrics.GatewayRoutes, string(d.Reason)).Inc()
	if d.Decode < 0 {
		return nil, d, fleet
	}
	x.S.Meters.Counter(metrics.GatewayRoutes, string(d.PrefillReason)).Inc()
	node := fleet.Decode[d.Decode]
	switch d.PrefillReason {
	case route.ReasonLocal:
		node.SetLocal(true)
	case route.ReasonRemote:
		node.SetLocal(false)
	}
	held := int(view.Decode[d.Decode].Held)
	c.held = held
	if c.plan = node; len(d.Prefill) > 0 {
		c.plan, held = fleet.Prefill[d.Prefill[0]], int(view.Prefill[d.Prefill[0]].Held)
	}
	c.queued = max(0, len(c.prompt.Tokens)+len(c.output)-1-held)
	return node, d, fleet
}

// message returns the Generate of a choice's current attempt.
func (x *request) message(c *choice, d route.Decision, fleet *nodes.Snapshot) *nodepb.Generate {
	m := &nodepb.Generate{
		RequestId:    x.req.RequestID,
		Attempt:      c.state.Attempt,
		Prompt:       c.prompt.Tokens,
		Output:       c.output,
		Sampling:     x.sampling(c),
		MaxTokens:    uint32(c.prompt.MaxTokens),
		StopTokenIds: x.req.StopTokens,
		IgnoreEos:    x.req.IgnoreEOS,
		PrefixRoot:   uint64(x.model.Root(x.req.CacheSalt)),
		PrefixDigest: x.model.RootDigest(x.req.CacheSalt),
		DeadlineMs:   uint64(max(1, time.Until(x.Deadline).Milliseconds())),
		Priority:     x.req.Priority,
		Model:        cmp.Or(fleet.Decode[d.Decode].Model(), x.model.bundle.Model), // nodes refuse other names
		EosTokenIds:  x.model.bundle.EosTokenIds,
		Logprobs:     x.req.Logprobs,
		TopLogprobs:  uint32(x.req.TopLogprobs),
		Trace:        c.span.Context(),
		Adapter:      x.model.adapter,

		LogprobTokenIds: x.req.LogprobTokens,
	}
	if x.pools() { // a node that does not know the field refuses 0
		m.Pooling, _ = x.pooling()
		m.MaxTokens = 0
	}
	if x.req.Grammar != nil { // likewise
		m.Grammar, m.MaxTokens = x.grammarOf(m.MaxTokens), 0
	}
	if n, scores := x.scores(c); scores {
		// An earlier attempt may have delivered a part.
		c.prompt.Probs = openai.PromptLogprobs{Tokens: c.prompt.Tokens}
		m.PromptLogprobs = &n
	}
	for _, p := range d.Prefill {
		m.Prefill = append(m.Prefill, fleet.Prefill[p].Name)
	}
	return m
}

// leave ends the choice's attempt here and removes it from the counters of its nodes.
func (x *request) leave(c *choice) {
	c.span.End(time.Now())
	c.stream = nil
	if c.node != nil {
		c.node.AddInFlight(-1)
		c.node.Constrained.Add(-x.constrained())
		c.node = nil
	}
	x.prefilled(c)
}

// prefilled removes the choice from the counters of the node that was to compute its prompt.
func (x *request) prefilled(c *choice) {
	if c.prefill != nil {
		c.prefill.AddInFlight(-1)
		c.prefill = nil
	}
	if c.computes != nil {
		c.computes.Computed(c.queued)
		c.computes = nil
		x.queue.Computed(int64(c.queued))
	}
}

// wait blocks until there may be events. It returns an error when the request is to be cut.
func (x *request) wait() *openai.Error {
	<-x.in.Ready
	switch {
	case !x.in.Woken():
		return nil
	case x.Watch != nil && x.Watch.Closed():
		return x.CutOff(exchange.CauseClientGone)
	case x.S.Cut.Err() != nil:
		return x.CutOff(exchange.CauseShutdown)
	case x.Aborted():
		return x.abort()
	}
	return x.bounds()
}

// abort ends the request with the tokens that it has, for which their clients may ask. The
// log-probabilities of a prompt may not be complete, so that requests for them end with an error,
// as those of a Surface do, whose API has no such reason for the end of an answer.
func (x *request) abort() *openai.Error {
	if x.surface != nil || x.req.PromptLogprobs != nil || x.echoProbs() || x.pools() {
		return x.CutOff(exchange.CauseAborted)
	}
	for i := range x.choices {
		c := &x.choices[i]
		if c.done() {
			continue
		}
		if c.stream != nil {
			c.stream.Cancel("aborted by the client")
		}
		rest, _ := x.rest(c)
		c.delta.Finish.Reason = metrics.ReasonAbort
		x.finish(c, rest)
	}
	return nil
}

// bounds handles the bounds that have passed and sets the timer to the next one.
func (x *request) bounds() *openai.Error {
	t := time.Now()
	if !t.Before(x.Deadline) {
		return x.CutOff(exchange.CauseDeadline)
	}
	x.timerAt = x.Deadline
	x.timer.Reset(time.Until(x.timerAt))
	for i := range x.choices {
		c := &x.choices[i]
		if c.state.State == fsm.Waiting {
			if at := c.state.RetryAt; at.After(t) {
				x.wake(at)
			} else if fault := x.attempt(c); fault != nil {
				return fault
			}
			continue
		}
		if c.state.State != fsm.Asked {
			continue
		}
		if by := c.since.Add(x.fleet.o.AcceptTimeout); by.After(t) {
			x.wake(by)
			continue
		}
		c.stream.Cancel("not accepted in time")
		if fault := x.retry(c, fmt.Errorf("%w: %s within %v", errNotAccepted, c.node.Name, x.fleet.o.AcceptTimeout)); fault != nil {
			return fault
		}
	}
	if x.quiet > 0 {
		if t.Sub(x.wrote) >= x.quiet {
			x.buf, x.wrote = x.appendKeepAlive(x.buf), t
		}
		x.wake(x.wrote.Add(x.quiet))
	}
	return nil
}

// wake makes the timer fire at t at the latest.
func (x *request) wake(t time.Time) {
	if t.Before(x.timerAt) {
		x.timerAt = t
		x.timer.Reset(time.Until(t))
	}
}

// handle handles one event.
func (x *request) handle(e *nodes.Event, at time.Time) *openai.Error {
	c := &x.choices[e.Choice]
	if !c.state.Live() || e.Attempt != c.state.Attempt {
		return nil // of an attempt that was cancelled since
	}
	switch e.Kind {
	case nodes.Accepted:
		c.state.Accepted()
		x.S.Meters.Counter(metrics.GatewayActualCached).Add(float64(e.Cached))
		if !c.state.Started() { // a later attempt finds the request's own blocks
			c.cached = min(int(e.Cached), len(c.prompt.Tokens))
		}
	case nodes.Scored:
		p, m := &c.prompt.Probs, e.Prompt // in order
		p.Logprobs, p.Ranks = append(p.Logprobs, m.Logprobs...), append(p.Ranks, m.Ranks...)
		p.TopTokens, p.TopLogprobs = append(p.TopTokens, m.TopTokens...), append(p.TopLogprobs, m.TopLogprobs...)
	case nodes.Token:
		return x.token(c, e, at)
	case nodes.Vector:
		return x.vector(c, e.Vector.Values)
	case nodes.Failed:
		return x.retry(c, e.Err)
	case nodes.Overflow:
		x.leave(c)
		c.state.Pause()
		x.S.Meters.Counter(metrics.GatewayStreamsPaused).Inc()
	}
	return nil
}

// token handles the next token of a choice, or its end.
func (x *request) token(c *choice, e *nodes.Event, at time.Time) *openai.Error {
	c.state.Accepted()
	piece, hit, reason := "", false, nodepb.FinishReason(e.Finish)
	if e.Token >= 0 {
		if c.state.Fresh() {
			x.prefilled(c)
			x.enterClass(c)
		}
		x.measure(c, at)
		if len(c.output) == 0 && c.number == 0 {
			if fault := x.follow(c); fault != nil {
				return fault
			}
		}
		if x.req.MaxTokens == 0 { // this token marks the prompt's end
			if c.stream != nil {
				c.stream.Cancel("nothing but the prompt was asked for")
			}
			c.delta.Finish.Reason = metrics.ReasonLength
			x.finish(c, "")
			return nil
		}
		c.output = append(c.output, e.Token)
		c.state.Token()
		if e.Probs != nil {
			c.delta.Logprobs = append(c.delta.Logprobs, x.model.logprob(c, e.Token, e.Probs, x.req.TokensAsIDs))
		}
		piece, hit = x.read(c, e.Token, reason != nodepb.FinishReason_FINISH_REASON_STOP || x.req.IncludeStop)
	}
	switch {
	case hit:
		if e.Finish == 0 {
			c.stream.Cancel("stop string")
		}
	case e.Finish == 0:
		x.emit(c, piece)
		return nil
	case reason == nodepb.FinishReason_FINISH_REASON_STOP:
		c.delta.Finish.Reason = metrics.ReasonStop
		if slices.Contains(x.req.StopTokens, e.Token) {
			c.delta.Finish.Token = e.Token
		}
	case reason == nodepb.FinishReason_FINISH_REASON_LENGTH:
		c.delta.Finish.Reason = metrics.ReasonLength
	default: // not cancelled by this gateway
		return x.retry(c, &nodes.CodeError{Code: nodepb.Code_CODE_CANCELLED, Message: "the node aborted the request"})
	}
	if !hit {
		var rest string
		rest, hit = x.rest(c)
		piece += rest
	}
	c.ended(hit, x.req.Calls.Name != "")
	x.model.queue.Answered(len(c.output))
	x.finish(c, piece)
	return nil
}

// finish ends a choice with its last text.
func (x *request) finish(c *choice, piece string) {
	x.leave(c)
	c.state.Finish()
	x.Release()
	x.live--
	x.emit(c, piece)
}

// read returns the text that a token completes, or adds it to the choice's Delta if there is a
// parser. The token itself is no part of the text unless shown is set.
func (x *request) read(c *choice, id int32, shown bool) (piece string, stopped bool) {
	switch {
	case c.parser != nil:
		return "", x.parseToken(c, id, shown)
	case shown:
		return c.push(id)
	}
	return "", false
}

// rest is read for what is held back after the last token.
func (x *request) rest(c *choice) (piece string, stopped bool) {
	if c.parser != nil {
		return "", x.parseEnd(c)
	}
	return c.flush()
}

// ended corrects the reason of the choice's end by its text. stopped reports that a stop string
// ended the text.
func (c *choice) ended(stopped, named bool) {
	if stopped {
		stop, _ := c.text.Stopped()
		c.delta.Finish = openai.Finish{Reason: metrics.ReasonStop, Stop: stop, Token: -1}
	} else if c.delta.Finish.Reason == metrics.ReasonStop {
		c.delta.Finish.Reason = c.finishReason(named)
	}
}

// push returns the text of a token.
func (c *choice) push(id int32) (piece string, stopped bool) {
	if c.text == nil {
		return render.BareToken(id), false
	}
	return c.text.Push(id)
}

// flush returns the text that is held back at the end.
func (c *choice) flush() (rest string, stopped bool) {
	if c.text == nil {
		return "", false
	}
	return c.text.Flush()
}

// measure records the time of a token.
func (x *request) measure(c *choice, at time.Time) {
	if !x.CountTokens(&c.times, 1, at) {
		return
	}
	m := x.S.Meters
	if c.state.Attempt == 1 && c.predictedTTFT >= 0 { // only the first attempt has a prediction
		took := at.Sub(c.since)
		m.Histogram(metrics.GatewayPredictedFirst).Observe(c.predictedTTFT.Seconds())
		m.Histogram(metrics.GatewayActualFirst).Observe(took.Seconds())
		side := "late"
		if took < c.predictedTTFT {
			side = "early"
		}
		m.Histogram(metrics.GatewayFirstError, side).Observe((took - c.predictedTTFT).Abs().Seconds())
	}
	c.span.Event("first token", at)
	x.CountPrompt(len(c.prompt.Tokens), c.cached)
}

// usage returns the request's token counts so far.
func (x *request) usage() openai.Usage {
	u := openai.Usage{Prompt: x.nPrompt}
	for i := range x.choices {
		c := &x.choices[i]
		if c.number == 0 { // the other choices of its prompt find its blocks
			u.Cached += c.cached
		}
		u.Completion += len(c.output)
		if c.parser != nil && x.model.Text.Format().Reasoning() != "" {
			u.Reasons = true
			u.Reasoning += c.parser.ReasoningTokens()
		}
	}
	return u
}

// advance waits for events and handles all that are there. Paused choices start first, because the
// client has read what there was.
func (x *request) advance() *openai.Error {
	for i := range x.choices {
		if c := &x.choices[i]; c.state.State == fsm.Paused {
			if fault := x.attempt(c); fault != nil {
				return fault
			}
		}
	}
	if fault := x.wait(); fault != nil {
		return fault
	}
	x.events = x.in.Drain(x.events)
	at := time.Now()
	for i := range x.events {
		if fault := x.handle(&x.events[i], at); fault != nil {
			return fault
		}
	}
	if x.quiet > 0 && len(x.events) > 0 && len(x.buf) > 0 {
		x.wrote = at
	}
	return nil
}

// describe adds to the request's span what it asked, and why its choices ended.
func (x *request) describe() {
	s, r := &x.Span, x.req
	if !s.On() {
		return
	}
	var reasons []string
	for i := range x.choices {
		if c := &x.choices[i]; c.done() {
			reasons = append(reasons, c.delta.Finish.Reason)
		}
	}
	s.Set(trace.ResponseModel.String(x.model.Name), trace.ResponseID.String(x.answerID), trace.FinishReasons.StringSlice(reasons))
	if r.Temperature != nil {
		s.Set(trace.Temperature.Float64(float64(*r.Temperature)))
	}
	if r.TopP != nil {
		s.Set(trace.TopP.Float64(float64(*r.TopP)))
	}
	if r.TopK != nil {
		s.Set(trace.TopK.Int(int(*r.TopK)))
	}
	if r.Seed != nil {
		s.Set(trace.Seed.Int64(int64(*r.Seed)))
	}
}
