package native

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// newRequest returns a request that no node answers and that no queue counts.
func (fl *Fleet) newRequest(ctx *fasthttp.RequestCtx, on openai.Endpoint) *request {
	x := &request{fleet: fl}
	x.S, x.Ctx, x.On, x.Start = fl.Service, ctx, on, time.Now()
	x.ID = ctx.Response.Header.Peek(exchange.RequestIDHeader)
	return x
}

// Render returns the requests of openai.TokensPath that the prompts of a chat or of completions
// are: one for a chat, a list for completions. All checks are those of a request that is answered.
func (fl *Fleet) Render(ctx *fasthttp.RequestCtx, on openai.Endpoint) ([]byte, *openai.Error) {
	x := fl.newRequest(ctx, on)
	m, prompts, fault := x.render(ctx.PostBody(), fl.Charge(ctx))
	if fault != nil {
		return nil, fault
	}
	if g := x.req.Grammar; g != nil && g.Lead {
		x.req.Grammar = g.Own
	} else if g != nil && (g.After != "" || len(g.Special) > 0) {
		return nil, openai.BadRequest(g.Param, "%s: a grammar behind reasoning, or of tool calls, cannot be rendered: leave it out, or send the request as it is", g.Param)
	}
	x.model = m
	s := x.sampling(&choice{})
	out := openai.Rendered{Model: m.Name, Temperature: s.Temperature, TopP: s.TopP, TopK: s.TopK, MinP: s.MinP, RepetitionPenalty: s.RepetitionPenalty,
		FrequencyPenalty: s.FrequencyPenalty, PresencePenalty: s.PresencePenalty}
	one := func(dst []byte, p *render.Prompt) []byte {
		out.Tokens, out.MaxTokens = p.Tokens, p.MaxTokens
		return out.Append(dst, x.req)
	}
	if on == openai.Chat {
		out.ID = shortID("chatcmpl-"+x.req.RequestID, x.req.RequestID)
		return one(nil, &prompts[0]), nil
	}
	b := []byte{'['}
	for i := range prompts {
		out.ID = shortID(fmt.Sprintf("cmpl-%s-%d", x.req.RequestID, i), x.req.RequestID)
		b = append(one(b, &prompts[i]), ',')
	}
	b[len(b)-1] = ']'
	return b, nil
}

// shortID returns id, or otherwise if id is longer than a request's may be.
func shortID(id, otherwise string) string {
	if len(id) > openai.MaxID {
		return otherwise
	}
	return id
}

// Derender returns the answer of a chat or of completions that answers of openai.TokensPath are, or
// the event and the state that follow from an event and the state before it. With the request that
// was rendered, stop strings end the texts, and the answer of a chat is split into content,
// reasoning and tool calls.
func (fl *Fleet) Derender(ctx *fasthttp.RequestCtx, on openai.Endpoint) ([]byte, *openai.Error) {
	x, charge := fl.newRequest(ctx, on), fl.Charge(ctx)
	d, fault := openai.ParseDerender(on, ctx.PostBody(), charge)
	if fault != nil {
		return nil, fault
	}
	m, fault := fl.Find(d.Model)
	switch {
	case fault != nil:
		return nil, fault
	case m.Text == nil:
		return nil, openai.BadRequest("model", "model %q has no tokenizer: its answers are token ids", m.Name)
	}
	x.model, x.req = m, &openai.Request{Endpoint: on, SkipSpecial: true}
	prompts := make([]render.Prompt, len(d.Answers))
	var newParser func(*render.Prompt) *parse.Parser
	if d.Request != nil {
		if x.req, fault = openai.ParseWithin(on, d.Request, charge); fault != nil {
			return nil, fault
		}
		if fault := m.CheckTools(x.req, fl.o.NoToolCalls); fault != nil {
			return nil, fault
		}
		if newParser = x.parsers(m); newParser != nil { // whose state depends on the prompt's end
			if prompts[0], fault = m.Chat(x.req, charge); fault != nil {
				return nil, fault
			}
		}
	}
	nPrompt := 0
	for i := range d.Answers {
		a := &d.Answers[i]
		x.seed = xxhash.Sum64String(a.ID)
		nPrompt += cmp.Or(max(0, a.Prompt), len(prompts[i].Tokens))
		for k := range a.Choices {
			t, before := &a.Choices[k], []int32(nil)
			if d.State != nil {
				before = d.State.Tokens
			}
			output := slices.Concat(before, t.Tokens)
			if m.MaxLen > 0 && len(output) > m.MaxLen {
				return nil, openai.ContextTooLong("token_ids", m.MaxLen, "A choice has %d tokens", len(output))
			}
			if fault := m.Known(output, "token_ids"); fault != nil {
				return nil, fault
			}
			x.choices = append(x.choices, choice{prompt: &prompts[i], text: m.Text.Output(x.req), output: output})
			c := &x.choices[len(x.choices)-1]
			c.delta = openai.Delta{Index: len(x.choices) - 1, Finish: t.Finish}
			if d.State != nil {
				c.delta.Index = t.Index
			}
			if newParser != nil {
				c.parser = newParser(c.prompt)
			}
			x.replay(c, len(before), t)
		}
	}
	x.nPrompt = nPrompt
	encoder := openai.NewEncoder(on, cmp.Or(d.Answers[0].ID, string(x.ID)), x.Start.Unix(), m.Name, m.systemPrint)
	if d.State != nil {
		return x.derenderedEvent(encoder, d), nil
	}
	out := make([]openai.Delta, len(x.choices))
	for i := range x.choices {
		if out[i] = x.choices[i].delta; x.req.TokenIDs {
			out[i].Tokens = append([]int32{}, x.choices[i].output...)
		}
	}
	return encoder.AppendWhole(nil, out, x.usage()), nil
}

// derenderedEvent returns the event that follows from an event of openai.TokensPath, and the next
// state.
func (x *request) derenderedEvent(e *openai.Encoder, d *openai.Derender) []byte {
	next, event := *d.State, []openai.Delta(nil)
	if len(x.choices) > 0 {
		c := &x.choices[0]
		if c.delta.Role = x.On == openai.Chat && !next.RoleSent; c.delta.Role {
			next.RoleSent = true
		}
		if x.req.TokenIDs {
			c.delta.Tokens = append([]int32{}, c.output[len(next.Tokens):]...)
		}
		event, next.Tokens = []openai.Delta{c.delta}, c.output
	}
	var usage *openai.Usage
	if u := d.Answers[0].Usage; u != nil {
		usage = &openai.Usage{Prompt: cmp.Or(x.nPrompt, u.Prompt), Completion: u.Completion}
	}
	b := e.AppendChunk([]byte(`{"chunk":`), event, usage)
	return append(next.Append(append(b, `,"stream_state":`...)), '}')
}

// replay sets a choice's Delta from its tokens after the first n. Without a reason of its end, the
// choice may have more tokens.
func (x *request) replay(c *choice, n int, t *openai.TokenChoice) {
	stopped := false
	for _, id := range c.output[:n] {
		if t.Logprobs != nil {
			c.textEnd += len(x.model.TokenText(id))
		}
		if _, stopped = x.read(c, id, true); stopped {
			break
		}
	}
	c.delta.Text, c.delta.Reasoning, c.delta.Calls = c.delta.Text[:0], c.delta.Reasoning[:0], c.delta.Calls[:0]
	if stopped { // the answer ended before
		c.ended(stopped, false)
		return
	}
	if t.Logprobs != nil {
		for i := range t.Logprobs.Content {
			c.delta.Logprobs = append(c.delta.Logprobs, x.model.candidate(c, &t.Logprobs.Content[i]))
		}
	}
	for i, id := range t.Tokens {
		last := i == len(t.Tokens)-1 && t.Finish.Reason == metrics.ReasonStop && t.Finish.Stop == ""
		ends := last && (id == t.Finish.Token || slices.Contains(x.model.bundle.EosTokenIds, id) && !x.req.IgnoreEOS || slices.Contains(x.req.StopTokens, id))
		var piece string
		piece, stopped = x.read(c, id, !ends || x.req.IncludeStop)
		if c.delta.Text = append(c.delta.Text, piece...); stopped {
			break
		}
	}
	if !stopped && t.Finish.Reason == "" {
		return
	}
	if !stopped {
		var rest string
		rest, stopped = x.rest(c)
		c.delta.Text = append(c.delta.Text, rest...)
	}
	c.ended(stopped, x.req.Calls.Name != "")
}

// candidate returns a token with its log-probability in the API's form.
func (m *Model) candidate(c *choice, p *openai.TokenCandidate) openai.TokenLogprob {
	one := func(p *openai.TokenCandidate) openai.TokenLogprob {
		if p.ID != nil && *p.ID >= 0 && int(*p.ID) < m.Vocab {
			return m.TokenProb(*p.ID, float32(p.Logprob), false)
		}
		t := openai.TokenLogprob{Text: p.Text, Logprob: float32(p.Logprob)}
		for _, b := range p.Bytes {
			t.Bytes = append(t.Bytes, byte(b))
		}
		return t
	}
	t := one(p)
	t.Offset = c.textEnd
	c.textEnd += len(t.Text)
	for i := range p.Top {
		t.Top = append(t.Top, one(&p.Top[i]))
	}
	return t
}
