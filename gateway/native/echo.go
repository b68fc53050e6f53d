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
	c.delta.Finish.Reason = metrics.ReasonLength
	j.finish(c, "")
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

// begin adds to a choice's first Delta what precedes its own text and log-probabilities.
func (j *job) begin(c *choice) {
	d := &c.delta
	d.Prompt = j.told(c)
	if !j.req.Echo {
		return
	}
	d.Text = append([]byte(c.prompt.Echo), d.Text...)
	if j.echoProbs() {
		d.Probs = append(j.promptProbs(c), d.Probs...)
	}
}

// promptProbs is a prompt's tokens as those of the answer are told about.
func (j *job) promptProbs(c *choice) []openai.TokenProb {
	all := make([]openai.TokenProb, 0, len(c.prompt.Tokens)+len(c.delta.Probs)) // and not what max_tokens would allow
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

// emit adds text to a choice's Delta. The Delta of a stream is encoded and starts again, unless it
// waits for more tokens.
func (j *job) emit(c *choice, piece string) {
	d := &c.delta
	d.Text = append(d.Text, piece...)
	if n := j.req.StreamInterval; !j.req.Stream || n > 1 && !d.Begin && !c.done() && len(c.output)-c.sent < n {
		return
	}
	if len(d.Text) == 0 && len(d.Probs) == 0 && !c.done() && !j.req.ContinuousUsage && !j.req.TokenIDs {
		return
	}
	if j.req.ContinuousUsage {
		now := j.usage()
		d.Usage = &now
	}
	if j.req.TokenIDs {
		d.Tokens = append([]int32{}, c.output[c.sent:]...) // never nil
	}
	c.sent = len(c.output)
	if d.Begin {
		j.begin(c)
	}
	j.buf = j.encoder.AppendDelta(j.buf, d)
	d.Begin, d.Prompt, d.Text, d.Probs = false, nil, d.Text[:0], d.Probs[:0]
}

// response is the whole answer in one piece.
func (j *job) response() []byte {
	out := make([]openai.Delta, len(j.choices))
	for i := range j.choices {
		c := &j.choices[i]
		if j.begin(c); j.req.TokenIDs {
			c.delta.Tokens = append([]int32{}, c.output...)
		}
		out[i] = c.delta
	}
	return j.encoder.AppendWhole(nil, out, j.usage())
}
