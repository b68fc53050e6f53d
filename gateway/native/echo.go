package native

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// What a client is told of a choice, beside its text.

// scores says whether a choice's attempt has its prompt's log-probabilities told,
// with how many best tokens: the first attempt of a prompt's first choice does,
// for all.
func (j *job) scores(c *choice) (best uint32, scored bool) {
	if c.number > 0 || len(c.output) > 0 {
		return 0, false
	}
	if j.req.PromptLogprobs != nil {
		best, scored = uint32(*j.req.PromptLogprobs), true
	}
	if j.echoProbs() {
		best, scored = max(best, uint32(j.req.TopLogprobs)), true
	}
	return best, scored
}

// echoProbs says whether the prompt's tokens come with the answer's, as do their
// log-probabilities.
func (j *job) echoProbs() bool {
	return j.req.Echo && j.req.Logprobs && j.req.Endpoint == openai.Completions
}

// scored takes the next of a prompt's log-probabilities; upstream keeps them in
// order.
func scored(p *render.Prompt, m *nodepb.PromptLogProbs) {
	p.Probs.LogProbs = append(p.Probs.LogProbs, m.Logprobs...)
	p.Probs.Ranks = append(p.Probs.Ranks, m.Ranks...)
	p.Probs.TopTokens = append(p.Probs.TopTokens, m.TopTokens...)
	p.Probs.TopLogProbs = append(p.Probs.TopLogProbs, m.TopLogprobs...)
}

// echoed ends a choice that asked for no token: the one that came stands for the
// prompt's end.
func (j *job) echoed(c *choice) *openai.Error {
	if c.stream != nil {
		c.stream.Cancel("nothing but the prompt was asked for")
	}
	j.leave(c)
	c.state.Finish()
	c.stream, c.finish.Reason = nil, metrics.ReasonLength
	j.Release()
	j.live--
	j.emit(c, "")
	return nil
}

// told is what the client asked of a choice's prompt; nil: nothing.
func (j *job) told(c *choice) *openai.Told {
	r := j.req
	if !r.TokenIDs && !r.PromptText && r.PromptLogprobs == nil {
		return nil
	}
	t := &openai.Told{}
	if r.TokenIDs {
		t.Tokens = c.prompt.Tokens
	}
	if r.PromptText {
		t.Text = &c.prompt.Text
	}
	if r.PromptLogprobs != nil {
		t.Probs, t.Best, t.Decode = &c.prompt.Probs, *r.PromptLogprobs, j.model.TokenText
	}
	return t
}

// opening is what stands before a choice's own text and log-probabilities.
func (j *job) opening(c *choice) (text string, probs []openai.TokenProb) {
	if !j.req.Echo {
		return "", nil
	}
	if j.echoProbs() {
		probs = j.promptProbs(c)
	}
	return c.prompt.Echo, probs
}

// promptProbs is a prompt's tokens as those of the answer are told about.
func (j *job) promptProbs(c *choice) []openai.TokenProb {
	all := make([]openai.TokenProb, 0, len(c.prompt.Tokens)+len(c.probs)) // and not what max_tokens would allow
	offset := 0
	for i, id := range c.prompt.Tokens {
		t := openai.TokenProb{First: true}
		if i == 0 {
			t = j.model.TokenProb(id, 0, j.req.TokensAsIDs)
			t.First = true
		} else {
			t = j.model.TokenProb(id, c.prompt.Probs.LogProbs[i-1], j.req.TokensAsIDs)
			ids, probs := c.prompt.Probs.Best(i-1, j.req.TopLogprobs)
			for k := range ids {
				t.Top = append(t.Top, j.model.TokenProb(ids[k], probs[k], j.req.TokensAsIDs))
			}
		}
		t.Offset = offset
		offset += len(j.model.TokenText(id))
		all = append(all, t)
	}
	return all
}

// emit hands on a choice's text and, when it is done, its finish.
func (j *job) emit(c *choice, piece string) {
	if !j.req.Stream {
		c.body = append(c.body, piece...)
		return
	}
	if n := j.req.StreamInterval; n > 1 {
		if c.roleSent && !c.done() && len(c.output)-c.sent < n {
			c.pending = append(c.pending, piece...)
			return
		}
		piece = string(append(c.pending, piece...))
		c.pending = c.pending[:0]
	}
	if piece == "" && len(c.probs) == 0 && !c.done() && !j.req.ContinuousUsage && !j.req.TokenIDs {
		return
	}
	d := openai.Delta{Index: c.index, Text: piece, Probs: c.probs, Finish: c.finish}
	if j.req.ContinuousUsage {
		now := j.usage()
		d.Usage = &now
	}
	if j.req.TokenIDs {
		d.Tokens = append([]int32{}, c.output[c.sent:]...) // never nil
	}
	c.sent = len(c.output)
	if !c.roleSent {
		c.roleSent, d.Begin, d.Prompt = true, true, j.told(c)
		text, probs := j.opening(c)
		d.Text, d.Probs = text+d.Text, append(probs, d.Probs...)
	}
	j.buf = j.encoder.AppendDelta(j.buf, &d)
	if c.probs != nil {
		c.probs = c.probs[:0]
	}
}

// response is the whole answer in one piece.
func (j *job) response() []byte {
	out := make([]openai.Choice, len(j.choices))
	for i := range j.choices {
		c := &j.choices[i]
		text, probs := j.opening(c)
		out[i] = openai.Choice{Text: append([]byte(text), c.body...), Probs: append(probs, c.probs...), Prompt: j.told(c), Finish: c.finish}
		if j.req.TokenIDs {
			out[i].Tokens = append([]int32{}, c.output...)
		}
	}
	return j.encoder.AppendWhole(nil, out, j.usage())
}
