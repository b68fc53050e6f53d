package native

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// job is one request that decode nodes answer. The goroutine of its client's connection
// owns it.
type job struct {
	exchange.Exchange
	fleet    *Fleet
	req      *openai.Request
	model    *Model
	answerID string
	encoder  *openai.Encoder
	seed     uint64
	prompts  []render.Prompt
	choices  []choice
	live     int // choices that have not finished
	in       *nodes.Inbox
	events   []nodes.Event // given back to in
	timer    *time.Timer   // to the next bound that may pass
	timerAt  time.Time
	buf      []byte // events to be written; streams only
	counted  int    // bytes of buf that are part of Gateway.buffered
	nPrompt  int    // tokens of all prompts
}

// choice is one answer of a request.
type choice struct {
	index    int // in the response
	number   int // among the answers to its prompt: part of the sampling key
	prompt   *render.Prompt
	text     *render.Text       // nil: the model has no tokenizer
	output   []int32            // every token taken so far
	body     []byte             // text so far; whole responses only
	probs    []openai.TokenProb // of tokens not sent yet, or of all; nil: not asked for
	pending  []byte             // text not sent yet, where events wait for several tokens
	sent     int                // tokens of output that events have brought
	cached   int                // tokens of the prompt that the node of its first token found in its cache
	textEnd  int                // bytes of token texts so far, for their offsets
	finish   openai.Finish
	state    fsm.Choice[*nodes.Node]
	roleSent bool

	stream   *nodes.Stream     // of the current attempt
	home     *nodes.Node       // that holds its prompt's KV; nil: not known
	node     *nodes.Node       // that has it in hand; nil: none
	last     string            // node that had it last
	class    string            // numerics class of the node that sent its last token; empty: not known
	prefill  *nodes.Node       // expected to compute its prompt; nil: none, or done
	computes *nodes.Node       // that has queued tokens of it to compute, prefill or decode; nil: done
	held     int               // leading tokens that the decode node of the attempt that begins has cached
	queued   int               // tokens of the prompt and the output that are to be computed
	plan     *nodes.Node       // computes of the attempt that begins
	failure  *exchange.Failure // of the last attempt that failed
	since    time.Time         // start of the current attempt
	foretold time.Duration     // from then to its first token; negative: nothing
	times    exchange.Timing
	span     trace.Span // of the current attempt
}

// startAll starts the first choice of every prompt. The others of a prompt
// follow when it has a token: by then its node holds the prompt's KV, which
// they share instead of computing it once each.
func (j *job) startAll() *openai.Error {
	defer j.Attempted()
	j.timer, j.timerAt = time.NewTimer(time.Until(j.Deadline)), j.Deadline
	for i := range j.choices {
		if j.choices[i].number > 0 {
			continue
		}
		if fault := j.attempt(&j.choices[i]); fault != nil {
			return fault
		}
	}
	return nil
}

// follow starts the other choices of a prompt whose first has its first token.
func (j *job) follow(first *choice) *openai.Error {
	for i := first.index + 1; i < len(j.choices) && j.choices[i].number > 0; i++ {
		c := &j.choices[i]
		c.home = first.node
		if fault := j.attempt(c); fault != nil {
			return fault
		}
	}
	return nil
}

// attempt starts the next attempt of a choice. It goes on to other nodes while
// nodes cannot be reached.
func (j *job) attempt(c *choice) *openai.Error {
	c.state.Seek()
	for {
		node, decision, fleet := j.pick(c)
		if node == nil || c.state.Excludes(node) {
			return j.nowhere(c, node)
		}
		c.since, c.foretold = time.Now(), decision.First
		if c.span = exchange.Begin(&j.Exchange, &c.state, node.Name, c.since); c.span.On() {
			c.describeAttempt(decision)
		}
		ctx, cancel := context.WithDeadline(context.Background(), j.Deadline)
		s, err := node.Generate(ctx, j.message(c, decision, fleet), j.in, int32(c.index))
		cancel()
		if err == nil {
			c.state.Sent()
			c.stream, c.node, c.last = s, node, node.Name
			j.wake(c.since.Add(j.fleet.o.AcceptTimeout))
			node.InFlight.Add(1)
			s.Takes(j.takes(c))
			j.forecast(c, node)
			if len(decision.Prefill) > 0 {
				c.prefill = fleet.Prefill[decision.Prefill[0]]
				c.prefill.InFlight.Add(1)
			}
			c.computes = c.plan
			c.computes.Computes(c.queued)
			j.model.queue.Count(int64(c.queued))
			return nil
		}
		f := nodeFailure(err)
		f.Lost = false // nothing was on its way
		if fault := j.failed(c, node, f); fault != nil {
			return fault
		}
		if !time.Now().Before(j.Deadline) {
			return j.CutOff(exchange.CauseDeadline)
		}
	}
}

// views are kept between decisions.
var views = sync.Pool{New: func() any { return new(route.View) }}

// pick routes a choice's next attempt, around the nodes it has failed on.
func (j *job) pick(c *choice) (*nodes.Node, route.Decision, *nodes.Snapshot) {
	fleet := j.fleet.Nodes.Now()
	view := views.Get().(*route.View)
	defer views.Put(view)
	remote := max(1, j.fleet.o.MinRemotePrefillTokens)
	if _, scored := j.scores(c); scored {
		remote = math.MaxInt // KV from elsewhere does not tell what its tokens' logits were
	}
	demand := route.Demand{} // a stream goes on also where memory is short
	if !c.state.Started() {
		demand = j.demand(c.prompt)
	}
	avoid := c.state.Tried()
	if n, ok := j.Avoid().(*nodes.Node); ok && c.state.Attempt() == 0 {
		avoid = []*nodes.Node{n}
	}
	d := j.fleet.route(fleet, view, j.model, c.prompt, &j.Hints, demand, len(c.output), remote, avoid, c.class)
	if d.Reason == route.ReasonNoRoom { // it was let through, and others were faster: the node has it wait
		d = j.fleet.route(fleet, view, j.model, c.prompt, &j.Hints, route.Demand{}, len(c.output), remote, avoid, c.class)
	}
	if at := slices.Index(fleet.Decode, c.home); at >= 0 && view.Decode[at].Usable && !slices.Contains(c.state.Tried(), c.home) {
		d = route.Decision{Decode: at, Reason: route.ReasonPrefix, PrefillReason: route.ReasonShort, First: -1}
	}
	j.S.Meters.Set.Counter(metrics.GatewayRoutes, string(d.Reason)).Inc()
	if d.Decode < 0 {
		return nil, d, fleet
	}
	j.S.Meters.Set.Counter(metrics.GatewayRoutes, string(d.PrefillReason)).Inc()
	node := fleet.Decode[d.Decode]
	switch d.PrefillReason {
	case route.ReasonLocal:
		node.Local.Store(true)
	case route.ReasonRemote:
		node.Local.Store(false)
	}
	held := view.Decode[d.Decode].Held
	c.held = held
	if c.plan = node; len(d.Prefill) > 0 {
		c.plan, held = fleet.Prefill[d.Prefill[0]], view.Prefill[d.Prefill[0]].Held
	}
	c.queued = max(0, len(c.prompt.Tokens)+len(c.output)-1-held)
	return node, d, fleet
}

// message is the Generate of a choice's current attempt.
func (j *job) message(c *choice, d route.Decision, fleet *nodes.Snapshot) *nodepb.Generate {
	m := &nodepb.Generate{
		RequestId:    j.req.RequestID,
		Attempt:      c.state.Attempt(),
		Prompt:       c.prompt.Tokens,
		Output:       c.output,
		Sampling:     j.sampling(c),
		MaxTokens:    uint32(c.prompt.MaxTokens),
		StopTokenIds: j.req.StopTokens,
		IgnoreEos:    j.req.IgnoreEOS,
		PrefixRoot:   uint64(j.model.Root(j.req.CacheSalt)),
		PrefixDigest: j.model.RootDigest(j.req.CacheSalt),
		DeadlineMs:   uint64(max(1, time.Until(j.Deadline).Milliseconds())),
		Priority:     j.req.Priority,
		Model:        j.model.bundle.Model,
		EosTokenIds:  j.model.bundle.EosTokenIds,
		Logprobs:     j.req.Logprobs,
		TopLogprobs:  uint32(j.req.TopLogprobs),
		Trace:        c.span.Wire(),
		Adapter:      j.model.adapter,

		LogprobTokenIds: j.req.LogprobTokens,
	}
	if n, scored := j.scores(c); scored {
		// An attempt before this one may have told of a part.
		c.prompt.Probs = openai.PromptProbs{Tokens: c.prompt.Tokens}
		m.PromptLogprobs = &n
	}
	for _, p := range d.Prefill {
		m.Prefill = append(m.Prefill, fleet.Prefill[p].Name)
	}
	return m
}

// leave takes the choice off its node's books.
func (j *job) leave(c *choice) {
	c.span.End(time.Now())
	if c.node != nil {
		c.node.InFlight.Add(-1)
		c.node = nil
	}
	j.prefilled(c)
}

// prefilled takes the choice off the books of whoever was to compute its prompt.
func (j *job) prefilled(c *choice) {
	if c.prefill != nil {
		c.prefill.InFlight.Add(-1)
		c.prefill = nil
	}
	if c.computes != nil {
		c.computes.Computed(c.queued)
		c.computes = nil
		j.model.queue.Computed(int64(c.queued))
	}
}

// wait blocks until events, a bound or the client's going end it. It returns an
// error when the request is to be cut.
func (j *job) wait() *openai.Error {
	var gone <-chan struct{}
	if j.Watch != nil {
		gone = j.Watch.Gone
	}
	for {
		select {
		case <-j.in.Ready:
			return nil
		case <-gone:
			return j.CutOff(exchange.CauseClientGone)
		case <-j.S.Cut:
			return j.CutOff(exchange.CauseShutdown)
		case <-j.timer.C:
			if fault := j.bounds(); fault != nil {
				return fault
			}
		}
	}
}

// bounds looks which bound has passed and sets the timer to the next one.
func (j *job) bounds() *openai.Error {
	t := time.Now()
	if !t.Before(j.Deadline) {
		return j.CutOff(exchange.CauseDeadline)
	}
	j.timerAt = j.Deadline
	for i := range j.choices {
		c := &j.choices[i]
		if c.state.State() == fsm.Waiting {
			if at := c.state.RetryAt(); at.After(t) {
				j.timerAt = earlier(j.timerAt, at)
			} else if fault := j.attempt(c); fault != nil {
				return fault
			}
			continue
		}
		if c.state.State() != fsm.Asked {
			continue
		}
		if by := c.since.Add(j.fleet.o.AcceptTimeout); by.After(t) {
			j.timerAt = earlier(j.timerAt, by)
			continue
		}
		c.stream.Cancel("not accepted in time")
		if fault := j.retry(c, fmt.Errorf("%w: %s within %v", errNotAccepted, c.node.Name, j.fleet.o.AcceptTimeout)); fault != nil {
			return fault
		}
	}
	j.timer.Reset(time.Until(j.timerAt))
	return nil
}

// wake makes the timer fire at t at the latest.
func (j *job) wake(t time.Time) {
	if t.Before(j.timerAt) {
		j.timerAt = t
		j.timer.Reset(time.Until(t))
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// take handles one event.
func (j *job) take(e *nodes.Event, at time.Time) *openai.Error {
	c := &j.choices[e.Choice]
	if !c.state.Live() || e.Attempt != c.state.Attempt() {
		return nil // of an attempt that was cancelled while this was under way
	}
	switch e.Kind {
	case nodes.Accepted:
		c.state.Accepted()
		j.S.Meters.Actual.Add(float64(e.Cached))
		if !c.state.Started() { // a later attempt finds what this request itself has left
			c.cached = min(int(e.Cached), len(c.prompt.Tokens))
		}
	case nodes.Scored:
		scored(c.prompt, e.Prompt)
	case nodes.Token:
		return j.token(c, e, at)
	case nodes.Failed:
		return j.retry(c, e.Err)
	case nodes.Overflow:
		j.leave(c)
		c.state.Pause()
		c.stream = nil
		j.S.Meters.Paused.Inc()
	}
	return nil
}

// token takes the next token of a choice, or its end.
func (j *job) token(c *choice, e *nodes.Event, at time.Time) *openai.Error {
	c.state.Accepted()
	piece, hit := "", false
	if e.Token >= 0 {
		if c.state.Fresh() {
			j.prefilled(c)
			j.enterClass(c)
		}
		j.measure(c, at)
		if len(c.output) == 0 && c.number == 0 {
			if fault := j.follow(c); fault != nil {
				return fault
			}
		}
		if j.req.MaxTokens == 0 {
			return j.echoed(c)
		}
		c.output = append(c.output, e.Token)
		c.state.Token()
		if e.Probs != nil {
			c.probs = append(c.probs, j.model.prob(c, e.Token, e.Probs, j.req.TokensAsIDs))
		}
		if !j.hidden(e) {
			piece, hit = c.push(e.Token)
		}
	}
	reason := nodepb.FinishReason(e.Finish)
	switch {
	case hit:
		if e.Finish == 0 {
			c.stream.Cancel("stop string")
		}
	case e.Finish == 0:
		j.emit(c, piece)
		return nil
	case reason == nodepb.FinishReason_FINISH_REASON_STOP:
		c.finish.Reason = metrics.ReasonStop
		if slices.Contains(j.req.StopTokens, e.Token) {
			c.finish.Token = e.Token
		}
	case reason == nodepb.FinishReason_FINISH_REASON_LENGTH:
		c.finish.Reason = metrics.ReasonLength
	default: // nobody here has cancelled it
		return j.retry(c, &nodes.CodeError{Code: nodepb.Code_CODE_CANCELLED, Message: "the node aborted the request"})
	}
	if !hit {
		var rest string
		rest, hit = c.flush()
		piece += rest
	}
	if hit {
		stop, _ := c.text.Stopped()
		c.finish = openai.Finish{Reason: metrics.ReasonStop, Stop: stop, Token: -1}
	}
	j.leave(c)
	c.state.Finish()
	c.stream = nil
	j.model.queue.Answered(len(c.output))
	j.Release()
	j.live--
	j.emit(c, piece)
	return nil
}

// push turns a token into text.
func (c *choice) push(id int32) (piece string, stopped bool) {
	if c.text == nil {
		return render.BareToken(id), false
	}
	return c.text.Push(id)
}

// flush gives what text has been held back at the end.
func (c *choice) flush() (rest string, stopped bool) {
	if c.text == nil {
		return "", false
	}
	return c.text.Flush()
}

// hidden says that a token ended the answer and is not part of its text.
func (j *job) hidden(e *nodes.Event) bool {
	return nodepb.FinishReason(e.Finish) == nodepb.FinishReason_FINISH_REASON_STOP && !j.req.IncludeStop
}

// measure records a token's time.
func (j *job) measure(c *choice, at time.Time) {
	if !j.Came(&c.times, 1, at) {
		return
	}
	m := &j.S.Meters
	if c.state.Attempt() == 1 && c.foretold >= 0 { // of a later attempt nothing was predicted
		m.FirstToken(c.foretold, at.Sub(c.since))
	}
	c.span.Event("first token", at)
	m.Prompt.Add(float64(len(c.prompt.Tokens)))
	m.Cached.Add(float64(c.cached))
}

// usage counts the request's tokens so far.
func (j *job) usage() openai.Usage {
	var u openai.Usage
	for i := range j.prompts {
		u.Prompt += len(j.prompts[i].Tokens)
	}
	for i := range j.choices {
		c := &j.choices[i]
		if c.number == 0 { // the others of its prompt find what it has left
			u.Cached += c.cached
		}
		u.Completion += len(c.output)
	}
	return u
}

// advance waits for events and takes all that are there. Choices that were
// paused go on first: their client has read what there was.
func (j *job) advance() *openai.Error {
	for i := range j.choices {
		if c := &j.choices[i]; c.state.State() == fsm.Paused {
			if fault := j.attempt(c); fault != nil {
				return fault
			}
		}
	}
	if fault := j.wait(); fault != nil {
		return fault
	}
	j.events = j.in.Drain(j.events)
	at := time.Now()
	for i := range j.events {
		if fault := j.take(&j.events[i], at); fault != nil {
			return fault
		}
	}
	return nil
}

// Run implements exchange.Backend: it waits for the first thing to send of a stream, and for all of
// another answer.
func (j *job) Run() *openai.Error {
	if j.req.Stream {
		j.takeBuffer()
	}
	if fault := j.startAll(); fault != nil {
		return fault
	}
	for len(j.buf) == 0 && j.live > 0 {
		if fault := j.advance(); fault != nil {
			return fault
		}
	}
	return nil
}

// Respond implements exchange.Backend. The status line of a stream waits for its first event: until
// then an error is an HTTP status, and the head leaves together with the first token.
func (j *job) Respond() (streams bool) {
	if !j.req.Stream {
		j.Ctx.SetContentType("application/json")
		j.Ctx.Response.SetBodyRaw(j.response())
		return false
	}
	j.Ctx.SetContentType("text/event-stream; charset=utf-8")
	j.Ctx.Response.Header.Set("Cache-Control", "no-cache")
	j.Ctx.Response.Header.Set("X-Accel-Buffering", "no")
	j.Ctx.Response.SetBodyStream(&stream{j: j}, -1)
	return true
}

// ClientGone implements exchange.Backend: wait sees the watch's channel.
func (j *job) ClientGone() {}

// Stop implements exchange.Backend.
func (j *job) Stop() {
	most := 0
	for i := range j.choices {
		c := &j.choices[i]
		if c.stream != nil {
			c.stream.Cancel("request ended")
			c.stream = nil
		}
		j.leave(c)
		most = max(most, len(c.output))
		switch {
		case c.done():
			j.Whole(&c.times, len(c.prompt.Tokens), len(c.output))
			j.Finished(c.finish.Reason, 1)
		case j.Admitted:
			j.Finished(j.Broken(), 1)
		}
	}
	if len(j.choices) > 0 && j.live == 0 {
		j.S.Meters.MostTokens.Observe(float64(most))
	}
	if j.timer != nil {
		j.timer.Stop()
	}
	j.giveBuffer()
}

// Ending implements exchange.Backend.
func (j *job) Ending() exchange.Ending {
	if len(j.choices) == 0 {
		return exchange.Ending{}
	}
	j.describe()
	u, c := j.usage(), &j.choices[0]
	e := exchange.Ending{Model: j.model.Name, Node: c.last, Prompt: u.Prompt, Cached: u.Cached, Output: u.Completion, Choices: len(j.choices),
		MaxTokens: c.prompt.MaxTokens, Stream: j.req.Stream, Unserved: j.nPrompt}
	for i := range j.choices {
		c := &j.choices[i]
		if c.done() {
			e.Finish = c.finish.Reason
		}
		if c.state.Started() || c.done() {
			e.Unserved = 0
		}
		if at := c.times.First; !at.IsZero() && (e.First.IsZero() || at.Before(e.First)) {
			e.First = at
		}
	}
	if n := j.fleet.o.LogPromptText; j.S.LogRequests && n > 0 && j.model.Text != nil {
		e.Text = openai.Clip(j.model.Text.Decode(c.prompt.Tokens, false), n)
	}
	return e
}

// Free implements exchange.Backend: the collector frees the job.
func (j *job) Free() {}
