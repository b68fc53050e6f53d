package decode

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// own carries an accepted attempt from the engine's queue to its end. Tokens
// flow past it, from the step goroutine to the gateway's outbox.
func (n *Node) own(ctx context.Context, a *attempt, g *nodepb.Generate) {
	defer n.disown()
	timeout := n.o.RequestTimeout
	if ms := g.DeadlineMs; ms > 0 && ms < uint64(timeout/time.Millisecond) {
		timeout = time.Duration(ms) * time.Millisecond
	}
	ctx, stop := context.WithTimeoutCause(ctx, timeout, ErrDeadline)
	defer stop()

	// The gateway hears at once that the attempt is here: the engine may be in
	// a long step. What the cache holds of it follows, before any token.
	n.accepted(a, 0)
	r := n.request(a, g)
	r.OnAdded = func(cached int) {
		if cached > 0 {
			n.accepted(a, cached)
		}
	}
	id, cached, err := n.o.Engine.Add(r)
	if err != nil {
		n.endAttempt(a, err)
		a.span.End(time.Now()) // no engine will
		return
	}
	n.mu.Lock()
	a.id = id
	over := a.ended
	n.mu.Unlock()
	if over { // cancelled while it was being added
		n.o.Engine.Abort(id)
		return
	}
	if r.Hold {
		n.fill(ctx, a, id, g, append(append([]int32(nil), r.Prompt...), r.Output...), cached)
	} else {
		n.addCount(&n.count.LocalPrefills)
	}
	<-ctx.Done()
	if err := context.Cause(ctx); errors.Is(err, ErrDeadline) {
		n.endAttempt(a, err)
	}
}

// disown ends an owner.
func (n *Node) disown() {
	n.mu.Lock()
	n.owners--
	n.mu.Unlock()
	n.wg.Done()
}

// accepted tells the gateway that the attempt is here. One that has no room to
// hear it would not hear its tokens either.
func (n *Node) accepted(a *attempt, cached int) {
	err := a.key.conn.Send(rpc.FrameAccepted, a.key.stream, &nodepb.Accepted{Attempt: a.number, CachedTokens: uint32(cached)})
	if errors.Is(err, rpc.ErrOutboxFull) {
		n.mu.Lock()
		n.count.DroppedStreams++
		n.mu.Unlock()
		n.endAttempt(a, err)
	}
}

// request is what the engine sees of a Generate.
func (n *Node) request(a *attempt, g *nodepb.Generate) *engine.Request {
	stop := append([]int32(nil), g.StopTokenIds...)
	if !g.IgnoreEos {
		stop = append(stop, g.EosTokenIds...)
	}
	s := g.GetSampling()
	digest, _ := kvcache.ParseRootDigest(g.PrefixDigest) // checked
	r := &engine.Request{
		Root: kvcache.Hash(g.PrefixRoot), RootDigest: digest, Prompt: g.Prompt, Output: g.Output,
		Adapter: g.GetAdapter().GetName(), AdapterDigest: g.GetAdapter().GetDigest(),
		Sampling: engine.Sampling{
			Seed: s.GetSeed(), Choice: s.GetChoice(),
			Temperature: s.GetTemperature(), TopP: s.GetTopP(), TopK: s.GetTopK(), MinP: s.GetMinP(),
		},
		Rules: rules(s, stop), LogProbs: g.Logprobs, TopLogProbs: int(g.TopLogprobs), LogProbTokens: g.LogprobTokenIds,
		MaxTokens: int(g.MaxTokens), Stop: stop, Priority: int(g.Priority),
		Hold:     len(g.Prefill) > 0 && n.o.Reader != nil && len(g.Prompt)+len(g.Output) > 1,
		Emit:     func(t engine.Token) { n.emit(a, t) },
		OnFinish: func(l engine.RequestStats) { n.endSpan(a, l) },
	}
	if g.PromptLogprobs != nil {
		r.Hold = false // what each position says of the next is not in the KV that a prefill node sends
		r.TopPromptLogProbs = int(g.GetPromptLogprobs())
		r.EmitPrompt = func(first int, probs []engine.LogProbs) { n.emitPrompt(a, first, probs) }
	}
	return r
}

// rules is what a Generate asks of its logits. Its output so far, of earlier
// attempts, counts in all of them.
func rules(s *nodepb.Sampling, stops []int32) engine.Rules {
	r := engine.Rules{
		Allowed: s.GetAllowedTokenIds(), Repetition: s.GetRepetitionPenalty(), Presence: s.GetPresencePenalty(),
		Frequency: s.GetFrequencyPenalty(), MinTokens: int(s.GetMinTokens()), Stops: stops,
	}
	for _, b := range s.GetLogitBias() {
		r.Bias = append(r.Bias, engine.Bias{Token: b.Token, Value: b.Value})
	}
	for _, w := range s.GetBadWords() {
		if len(w.Tokens) > 0 {
			r.BadWords = append(r.BadWords, w.Tokens)
		}
	}
	return r
}

// emit runs on the step goroutine: it files the token for the step's frame.
func (n *Node) emit(a *attempt, t engine.Token) {
	if t.Finish == engine.FinishError {
		n.endAttempt(a, t.Err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	gw := n.gateways[a.key.conn]
	if a.ended || gw == nil {
		return
	}
	gw.tokens = append(gw.tokens, rpc.Token{
		Stream: a.key.stream, Attempt: a.number, Position: uint32(t.Position),
		ID: t.ID, Finish: uint8(t.Finish),
	})
	if t.LogProbs != nil {
		gw.logProbs = append(gw.logProbs, logProbs(a, t))
	}
	n.soil(gw)
	switch t.Finish {
	case engine.FinishStop:
		n.count.FinishedStop++
	case engine.FinishLength:
		n.count.FinishedLength++
	default:
		return
	}
	n.forget(a, nil)
}

// emitPrompt files what a step tells of an attempt's prompt.
func (n *Node) emitPrompt(a *attempt, first int, probs []engine.LogProbs) {
	n.mu.Lock()
	defer n.mu.Unlock()
	gw := n.gateways[a.key.conn]
	if gw == nil || a.ended {
		return
	}
	for len(probs) > 0 {
		rows := frameful(len(probs), func(i int) int { return len(probs[i].Top) })
		gw.prompts = append(gw.prompts, promptProbs{a, promptLogProbs(a, first, probs[:rows])})
		first, probs = first+rows, probs[rows:]
	}
	n.soil(gw)
}

// frameProbs is how many log-probabilities go into a frame. Each takes at most 9
// bytes, and a token's own and its stream, position and rank less than 8 of them:
// so a frame stays below the 4 MiB that rpc allows, except where one token alone
// has more, which no vocabulary does.
const frameProbs = 1 << 18

// frameful is how many of n tokens go into the next frame, at least one; tops is
// how many best tokens are told of with one.
func frameful(n int, tops func(i int) int) int {
	sum := 0
	for i := range n {
		if sum += 8 + tops(i); sum > frameProbs {
			return max(i, 1)
		}
	}
	return n
}

// soil has the next Flush send something to a gateway. n.mu is held.
func (n *Node) soil(gw *gateway) {
	if !gw.dirty {
		gw.dirty = true
		n.dirty = append(n.dirty, gw)
	}
}

// Flush sends one frame per gateway with the tokens of the step that has just
// ended. It is the engine's OnStep. A gateway whose outbox is full loses these
// streams and no others; it may start them again elsewhere.
func (n *Node) Flush() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, gw := range n.dirty {
		n.payEnds(gw)
		n.sendPrompts(gw)
		tokens, probs := gw.tokens, gw.logProbs
		gw.tokens, gw.logProbs, gw.dirty = gw.tokens[:0], nil, false
		n.dirty[i] = nil
		var err error
		if len(probs) > 0 { // before the tokens that they tell about
			for err == nil && len(probs) > 0 {
				n := frameful(len(probs), func(i int) int { return len(probs[i].TopTokens) })
				err = gw.conn.Send(rpc.FrameLogProbs, 0, &nodepb.LogProbs{Tokens: probs[:n]})
				probs = probs[n:]
			}
		}
		if err == nil {
			err = gw.conn.SendTokens(tokens)
		}
		if err != nil && !errors.Is(err, rpc.ErrClosed) {
			n.dropStreams(gw, tokens, fmt.Errorf("tokens could not be queued for the gateway: %w", err))
		}
	}
	n.dirty = n.dirty[:0]
}

// sendPrompts sends what the step told of prompts. n.mu is held.
func (n *Node) sendPrompts(gw *gateway) {
	prompts := gw.prompts
	gw.prompts = nil
	for _, p := range prompts {
		err := gw.conn.Send(rpc.FramePromptProbs, p.a.key.stream, p.m)
		if err != nil && !errors.Is(err, rpc.ErrClosed) {
			n.dropStreams(gw, []rpc.Token{{Stream: p.a.key.stream, Attempt: p.a.number}}, fmt.Errorf("log-probabilities of a prompt could not be queued for the gateway: %w", err))
		}
	}
}

// dropStreams ends the streams whose tokens were lost, those that had their
// last one among them too. n.mu is held.
func (n *Node) dropStreams(gw *gateway, lost []rpc.Token, cause error) {
	n.count.DroppedStreams += uint64(len(lost))
	for _, t := range lost {
		if a := n.attempts[key{gw.conn, t.Stream}]; a != nil {
			n.endLocked(a, cause, true)
			continue
		}
		n.tellEnd(gw, t.Stream, &nodepb.End{Code: codeOf(cause), Message: cause.Error(), Attempt: t.Attempt})
	}
}

// end takes a stream's attempt off the node's books, if there is one.
func (n *Node) end(k key, cause error, tell bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a := n.attempts[k]; a != nil {
		n.endLocked(a, cause, tell)
	}
}

// endAttempt ends an attempt with an error, unless it has ended.
func (n *Node) endAttempt(a *attempt, cause error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !a.ended {
		n.endLocked(a, cause, true)
	}
}

// endLocked frees what an attempt holds; tell says whether the gateway still
// wants to hear of it.
func (n *Node) endLocked(a *attempt, cause error, tell bool) {
	n.forget(a, cause)
	if a.id != 0 {
		n.o.Engine.Abort(a.id)
	}
	gw := n.gateways[a.key.conn]
	if gw != nil { // nothing of a stream follows its End
		gw.tokens = slices.DeleteFunc(gw.tokens, func(t rpc.Token) bool { return t.Stream == a.key.stream })
		gw.prompts = slices.DeleteFunc(gw.prompts, func(p promptProbs) bool { return p.a == a })
	}
	if !tell {
		n.count.FinishedAbort++
		return
	}
	n.count.FinishedError++
	n.tellEnd(gw, a.key.stream, &nodepb.End{Code: codeOf(cause), Message: cause.Error(), Attempt: a.number})
}

// tellEnd sends a stream's End, now or as soon as the gateway's outbox has room:
// a gateway that missed it would wait for a stream that nobody serves. n.mu is
// held; gw is nil where the connection is over.
func (n *Node) tellEnd(gw *gateway, stream uint64, m *nodepb.End) {
	if gw == nil {
		return
	}
	gw.owed = append(gw.owed, owed{stream, m})
	n.payEnds(gw)
	if len(gw.owed) > n.o.MaxRequests {
		gw.conn.Close(fmt.Errorf("%w: %d streams have ended and the gateway takes no word of it", rpc.ErrOutboxFull, len(gw.owed)))
	}
}

// payEnds sends what Ends are owed, as far as there is room. n.mu is held.
func (n *Node) payEnds(gw *gateway) {
	paid := 0
	for _, o := range gw.owed {
		if err := gw.conn.Send(rpc.FrameEnd, o.stream, o.end); errors.Is(err, rpc.ErrOutboxFull) {
			break
		}
		paid++
	}
	gw.owed = slices.Delete(gw.owed, 0, paid)
}

// forget removes an attempt; n.mu is held.
func (n *Node) forget(a *attempt, cause error) {
	a.ended = true
	a.failSpan(cause)
	a.cancel(cause)
	delete(n.attempts, a.key)
	n.draining.Left(len(n.attempts))
}

// codeOf sorts an error into the protocol's codes.
func codeOf(err error) nodepb.Code {
	switch {
	case errors.Is(err, ErrDeadline):
		return nodepb.Code_CODE_DEADLINE
	case errors.Is(err, ErrDrained), errors.Is(err, engine.ErrClosed), errors.Is(err, engine.ErrLost):
		return nodepb.Code_CODE_DRAINING
	case errors.Is(err, scheduler.ErrQueueFull), errors.Is(err, rpc.ErrOutboxFull):
		return nodepb.Code_CODE_OVERLOADED
	case errors.Is(err, engine.ErrToken), errors.Is(err, scheduler.ErrTooLong), errors.Is(err, ErrStreamTwice):
		return nodepb.Code_CODE_INVALID
	case errors.Is(err, engine.ErrAdapter): // other nodes may have it
		return nodepb.Code_CODE_MISMATCH
	case errors.Is(err, ErrCancelled):
		return nodepb.Code_CODE_CANCELLED
	}
	return nodepb.Code_CODE_INTERNAL
}

// logProbs is one token's, for the frame.
func logProbs(a *attempt, t engine.Token) *nodepb.TokenLogProbs {
	p := &nodepb.TokenLogProbs{
		Stream: a.key.stream, Attempt: a.number, Position: uint32(t.Position),
		Logprob: t.LogProbs.LogProb, Rank: uint32(t.LogProbs.Rank),
	}
	for _, top := range t.LogProbs.Top {
		p.TopTokens = append(p.TopTokens, top.Token)
		p.TopLogprobs = append(p.TopLogprobs, top.LogProb)
	}
	return p
}

// promptLogProbs is a run of a prompt's tokens, for the frame.
func promptLogProbs(a *attempt, first int, probs []engine.LogProbs) *nodepb.PromptLogProbs {
	m := &nodepb.PromptLogProbs{Attempt: a.number, First: uint32(first)}
	for i := range probs {
		m.Logprobs = append(m.Logprobs, probs[i].LogProb)
		m.Ranks = append(m.Ranks, uint32(probs[i].Rank))
		for _, top := range probs[i].Top {
			m.TopTokens = append(m.TopTokens, top.Token)
			m.TopLogprobs = append(m.TopLogprobs, top.LogProb)
		}
	}
	return m
}
