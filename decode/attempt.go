package decode

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/node"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// run carries an accepted attempt from the engine's queue to its end. Tokens are sent from the step
// goroutine to the gateway's outbox without passing through it.
func (n *Node) run(ctx context.Context, a *attempt, g *nodepb.Generate) {
	defer n.done()
	timeout := n.o.RequestTimeout
	if ms := g.DeadlineMs; ms > 0 && ms < uint64(timeout/time.Millisecond) {
		timeout = time.Duration(ms) * time.Millisecond
	}
	ctx, stop := context.WithTimeoutCause(ctx, timeout, ErrDeadline)
	defer stop()

	// Accepted is sent at once, because the engine may be in a long step. The number of cached
	// tokens follows before any token.
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
		a.span.End(time.Now()) // the engine will not end it
		return
	}
	n.mu.Lock()
	a.id = id
	over := a.ended
	n.mu.Unlock()
	if over { // cancelled during Add
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

// done ends an owner.
func (n *Node) done() {
	n.mu.Lock()
	n.owners--
	n.mu.Unlock()
	n.Owners.Done()
}

// accepted sends Accepted to the gateway. An outbox without room for it would have none for the
// tokens either.
func (n *Node) accepted(a *attempt, cached int) {
	err := a.key.conn.Send(rpc.FrameAccepted, a.key.stream, &nodepb.Accepted{Attempt: a.number, CachedTokens: uint32(cached)})
	if errors.Is(err, rpc.ErrOutboxFull) {
		n.mu.Lock()
		n.count.DroppedStreams++
		n.mu.Unlock()
		n.endAttempt(a, err)
	}
}

// request returns the engine's form of a Generate.
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
		MaxTokens: maxTokens(g), Grammar: grammarOf(g.Grammar), Stop: stop, Priority: int(g.Priority),
		Hold:     len(g.Prefill) > 0 && n.o.Reader != nil && len(g.Prompt)+len(g.Output) > 1,
		Emit:     func(t engine.Token) { n.emit(a, t) },
		OnFinish: func(l engine.RequestStats) { n.endSpan(a, l) },
	}
	r.PoolTokens = g.Pooling.GetTokens()
	if r.Pool = node.Pool(g.Pooling); r.Pool == engine.PoolMean {
		r.Hold = false // the KV of a prefill node lacks the rows
	}
	if g.PromptLogprobs != nil {
		r.Hold = false // the KV of a prefill node lacks the logits
		r.TopPromptLogProbs = int(g.GetPromptLogprobs())
		r.EmitPrompt = func(first int, probs []engine.LogProbs) { n.emitPrompt(a, first, probs) }
	}
	return r
}

// maxTokens returns the limit of the output of a Generate.
func maxTokens(g *nodepb.Generate) int {
	switch {
	case g.Pooling != nil: // the engine's step samples a token, which is dropped
		return 1
	case g.Grammar != nil:
		return int(g.Grammar.MaxTokens)
	}
	return int(g.MaxTokens)
}

// grammarOf returns the engine's form of a grammar; nil: there is none.
func grammarOf(g *nodepb.Grammar) *engine.Grammar {
	if g == nil {
		return nil
	}
	return &engine.Grammar{
		Kind: engine.GrammarKind(g.Kind - nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA), Text: g.Text, Choices: g.Choices,
		Compact: g.Compact, After: g.After, Special: g.Special, MaskSteps: int(g.MaskSteps),
	}
}

// rules returns the rules of a Generate for its logits. They count the output of earlier attempts
// as well.
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

// emit adds a token to the step's frame. It runs on the step goroutine.
func (n *Node) emit(a *attempt, t engine.Token) {
	if t.Finish == engine.FinishError {
		n.Flush() // the attempt's tokens of this step come before its end
		n.endAttempt(a, t.Err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	gw := n.gateways[a.key.conn]
	if a.ended || gw == nil {
		return
	}
	if t.Vector != nil {
		gw.vectors = append(gw.vectors, vector{a, &nodepb.Vector{Attempt: a.number, Values: t.Vector}})
		n.markDirty(gw)
		n.count.FinishedStop++
		n.remove(a, nil)
		return
	}
	gw.tokens = append(gw.tokens, rpc.Token{
		Stream: a.key.stream, Attempt: a.number, Position: uint32(t.Position),
		ID: t.ID, Finish: uint8(t.Finish),
	})
	if t.LogProbs != nil {
		gw.logProbs = append(gw.logProbs, logProbs(a, t))
	}
	n.markDirty(gw)
	switch t.Finish {
	case engine.FinishStop:
		n.count.FinishedStop++
	case engine.FinishLength:
		n.count.FinishedLength++
	default:
		return
	}
	n.remove(a, nil)
}

// emitPrompt adds log-probabilities of an attempt's prompt to the step's frames.
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
	n.markDirty(gw)
}

// frameProbs is how many log-probabilities a frame has. Each takes at most 9 bytes, and a token's
// own, its stream, position and rank less than 8 of them. So a frame stays below the 4 MiB that rpc
// allows, unless one token alone has more, which no vocabulary has.
const frameProbs = 1 << 18

// frameful returns how many of n tokens go into the next frame, at least one. tops returns how many
// best tokens a token has.
func frameful(n int, tops func(i int) int) int {
	sum := 0
	for i := range n {
		if sum += 8 + tops(i); sum > frameProbs {
			return max(i, 1)
		}
	}
	return n
}

// markDirty queues gw for the next Flush. The caller holds n.mu.
func (n *Node) markDirty(gw *gateway) {
	if !gw.dirty {
		gw.dirty = true
		n.dirty = append(n.dirty, gw)
	}
}

// Flush sends one frame per gateway with the tokens of the step that has just ended. It is the
// engine's OnStep. A gateway whose outbox is full loses the streams of the frame and no others. It
// may resume them elsewhere.
func (n *Node) Flush() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, gw := range n.dirty {
		n.flushEnds(gw)
		n.sendPrompts(gw)
		n.sendVectors(gw)
		tokens, probs := gw.tokens, gw.logProbs
		gw.tokens, gw.logProbs, gw.dirty = gw.tokens[:0], nil, false
		n.dirty[i] = nil
		var err error
		if len(probs) > 0 { // before their tokens
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

// sendPrompts sends the step's log-probabilities of prompts. The caller holds n.mu.
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

// sendVectors sends the step's vectors. The caller holds n.mu.
func (n *Node) sendVectors(gw *gateway) {
	vectors := gw.vectors
	gw.vectors = nil
	for _, v := range vectors {
		err := gw.conn.Send(rpc.FrameVector, v.a.key.stream, v.m)
		if err != nil && !errors.Is(err, rpc.ErrClosed) {
			n.dropStreams(gw, []rpc.Token{{Stream: v.a.key.stream, Attempt: v.a.number}}, fmt.Errorf("a vector could not be queued for the gateway: %w", err))
		}
	}
}

// dropStreams ends the streams whose tokens were lost, including those whose last token was. The
// caller holds n.mu.
func (n *Node) dropStreams(gw *gateway, lost []rpc.Token, cause error) {
	n.count.DroppedStreams += uint64(len(lost))
	for _, t := range lost {
		if a := n.attempts[key{gw.conn, t.Stream}]; a != nil {
			n.endLocked(a, cause, true)
			continue
		}
		n.sendEnd(gw, t.Stream, &nodepb.End{Code: codeOf(cause), Message: cause.Error(), Attempt: t.Attempt})
	}
}

// end ends the attempt of a stream, if there is one.
func (n *Node) end(k key, cause error, notify bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a := n.attempts[k]; a != nil {
		n.endLocked(a, cause, notify)
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

// endLocked frees what an attempt holds. notify reports whether the gateway still needs an End.
func (n *Node) endLocked(a *attempt, cause error, notify bool) {
	n.remove(a, cause)
	if a.id != 0 {
		n.o.Engine.Abort(a.id)
	}
	gw := n.gateways[a.key.conn]
	if gw != nil { // no token may follow the stream's End
		gw.tokens = slices.DeleteFunc(gw.tokens, func(t rpc.Token) bool { return t.Stream == a.key.stream })
		gw.prompts = slices.DeleteFunc(gw.prompts, func(p promptProbs) bool { return p.a == a })
	}
	if !notify {
		n.count.FinishedAbort++
		return
	}
	n.count.FinishedError++
	n.sendEnd(gw, a.key.stream, &nodepb.End{Code: codeOf(cause), Message: cause.Error(), Attempt: a.number})
}

// sendEnd sends a stream's End, now or as soon as the gateway's outbox has room, because a gateway
// without the End would wait for a stream that has ended. The caller holds n.mu. gw is nil if the
// connection is over.
func (n *Node) sendEnd(gw *gateway, stream uint64, m *nodepb.End) {
	if gw == nil {
		return
	}
	gw.pendingEnds = append(gw.pendingEnds, pendingEnd{stream, m})
	n.flushEnds(gw)
	if len(gw.pendingEnds) > n.o.MaxRequests {
		gw.conn.Close(fmt.Errorf("%w: %d streams have ended and the gateway does not read their ends", rpc.ErrOutboxFull, len(gw.pendingEnds)))
	}
}

// flushEnds sends pending Ends, as far as the outbox has room. The caller holds n.mu.
func (n *Node) flushEnds(gw *gateway) {
	sent := 0
	for _, o := range gw.pendingEnds {
		if err := gw.conn.Send(rpc.FrameEnd, o.stream, o.end); errors.Is(err, rpc.ErrOutboxFull) {
			break
		}
		sent++
	}
	gw.pendingEnds = slices.Delete(gw.pendingEnds, 0, sent)
}

// remove removes an attempt. The caller holds n.mu.
func (n *Node) remove(a *attempt, cause error) {
	a.ended = true
	a.failSpan(cause)
	a.cancel(cause)
	delete(n.attempts, a.key)
	n.Ended()
}

// codeOf returns the protocol's code of an error.
func codeOf(err error) nodepb.Code {
	switch {
	case errors.Is(err, ErrDeadline):
		return nodepb.Code_CODE_DEADLINE
	case errors.Is(err, ErrDrained):
		return nodepb.Code_CODE_DRAINING
	case errors.Is(err, rpc.ErrOutboxFull):
		return nodepb.Code_CODE_OVERLOADED
	case errors.Is(err, ErrStreamTwice):
		return nodepb.Code_CODE_INVALID
	case errors.Is(err, ErrCancelled):
		return nodepb.Code_CODE_CANCELLED
	}
	return node.Code(err)
}

// logProbs returns the log-probabilities of one token for its frame.
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

// promptLogProbs returns the log-probabilities of a run of a prompt's tokens for their frame.
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
