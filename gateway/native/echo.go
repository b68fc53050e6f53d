package native

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// scores reports whether a choice's attempt requests the log-probabilities of its prompt, and with
// how many best tokens. The first attempt of a prompt's first choice requests them for all choices.
func (x *request) scores(c *choice) (best uint32, scored bool) {
	if c.number > 0 || len(c.output) > 0 {
		return 0, false
	}
	if x.req.PromptLogprobs != nil {
		best, scored = uint32(*x.req.PromptLogprobs), true
	}
	if x.echoProbs() {
		best, scored = max(best, uint32(x.req.TopLogprobs)), true
	}
	return best, scored
}

// echoProbs reports whether the prompt's tokens and their log-probabilities precede those of the
// answer.
func (x *request) echoProbs() bool {
	return x.req.Echo && x.req.Logprobs && x.req.Endpoint == openai.Completions
}

// logprob returns one token's log-probabilities in the API's form.
func (m *Model) logprob(c *choice, id int32, p *nodepb.TokenLogProbs, asIDs bool) openai.TokenLogprob {
	t := m.TokenProb(id, p.Logprob, asIDs)
	t.Offset = c.textEnd
	c.textEnd += len(m.TokenText(id))
	for i, top := range p.TopTokens[:min(len(p.TopTokens), len(p.TopLogprobs))] {
		t.Top = append(t.Top, m.TokenProb(top, p.TopLogprobs[i], asIDs))
	}
	return t
}

// promptInfo returns what the client requested about a choice's prompt; nil: nothing.
func (x *request) promptInfo(c *choice) *openai.PromptInfo {
	r := x.req
	if !r.TokenIDs && !r.PromptText && r.PromptLogprobs == nil || x.Path == openai.BatchPath { // several prompts have no place in a chat's answer
		return nil
	}
	t := &openai.PromptInfo{}
	if r.TokenIDs {
		t.Tokens = c.prompt.Tokens
	}
	if r.PromptText {
		t.Text = &c.prompt.Text
	}
	if r.PromptLogprobs != nil {
		t.Logprobs, t.Best, t.Decode = &c.prompt.Probs, *r.PromptLogprobs, x.model.TokenText
	}
	return t
}

// begin adds to a choice's first Delta what precedes its own text and log-probabilities.
func (x *request) begin(c *choice) {
	d := &c.delta
	d.Prompt = x.promptInfo(c)
	if !x.req.Echo {
		return
	}
	d.Text = append([]byte(c.prompt.Echo), d.Text...)
	if x.echoProbs() {
		d.Logprobs = append(x.promptProbs(c), d.Logprobs...)
	}
}

// promptProbs returns the prompt's tokens with their log-probabilities, in the form of the
// answer's.
func (x *request) promptProbs(c *choice) []openai.TokenLogprob {
	all := make([]openai.TokenLogprob, 0, len(c.prompt.Tokens)+len(c.delta.Logprobs))
	offset := 0
	for i, id := range c.prompt.Tokens {
		logprob := float32(0)
		if i > 0 {
			logprob = c.prompt.Probs.Logprobs[i-1]
		}
		t := x.model.TokenProb(id, logprob, x.req.TokensAsIDs)
		if t.First = i == 0; !t.First {
			ids, probs := c.prompt.Probs.Best(i-1, x.req.TopLogprobs)
			for k := range ids {
				t.Top = append(t.Top, x.model.TokenProb(ids[k], probs[k], x.req.TokensAsIDs))
			}
		}
		t.Offset = offset
		offset += len(x.model.TokenText(id))
		all = append(all, t)
	}
	return all
}

// emit adds text to a choice's Delta. The Delta of a stream is encoded and starts again, unless it
// waits for more tokens.
func (x *request) emit(c *choice, piece string) {
	d := &c.delta
	d.Text = append(d.Text, piece...)
	if n := x.req.StreamInterval; !x.req.Stream || n > 1 && !d.Begin && !c.done() && len(c.output)-c.sent < n {
		return
	}
	if len(d.Text)+len(d.Reasoning)+len(d.Calls) == 0 && len(d.Logprobs) == 0 && !c.done() && !x.req.ContinuousUsage && !x.req.TokenIDs {
		return
	}
	if x.req.ContinuousUsage {
		x.used = x.usage()
		d.Usage = &x.used
	}
	if x.req.TokenIDs {
		d.Tokens = append([]int32{}, c.output[c.sent:]...) // never nil
	}
	c.sent = len(c.output)
	if d.Begin {
		x.begin(c)
	}
	x.buf = x.appendDelta(x.buf, d)
	d.Begin, d.Prompt, d.Text, d.Logprobs = false, nil, d.Text[:0], d.Logprobs[:0]
	d.Reasoning, d.Calls = d.Reasoning[:0], d.Calls[:0]
}

// response returns the whole answer.
func (x *request) response() []byte {
	if x.pools() {
		return x.vectorAnswer()
	}
	out := make([]openai.Delta, len(x.choices))
	for i := range x.choices {
		c := &x.choices[i]
		if x.begin(c); x.req.TokenIDs {
			c.delta.Tokens = append([]int32{}, c.output...)
		}
		out[i] = c.delta
	}
	return x.appendWhole(nil, out, x.usage())
}
