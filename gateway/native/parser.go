package native

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// parsers returns a function that makes the parser of a choice; nil: answers are text alone. A
// parser is a function of the choice's tokens, so that an attempt on another node continues it.
func (x *request) parsers(m *Model) func(*render.Prompt) *parse.Parser {
	if x.On != openai.Chat || m.Text == nil || m.Text.Format() == nil {
		return nil
	}
	f, g := m.Text.Format(), x.req.Grammar
	o := parse.Options{NoTools: x.req.Calls.None || x.req.Functions == nil, OneContent: g.IsJSON()}
	if f.Reasoning() == "" && o.NoTools && !f.Wraps() {
		return nil
	}
	if o.NoTools && !f.Channels() {
		o.OneContent = g.IsContent()
	}
	o.Wrapped = o.OneContent && g.Whole
	if !o.NoTools {
		o.Tools = render.ArgumentTypes(x.req.Functions)
	}
	return func(p *render.Prompt) *parse.Parser {
		o.Reasoning, o.Start = p.Start == parse.InReasoning, p.Start
		return f.NewParser(o)
	}
}

// parseToken adds to a choice's Delta what a token completes. The token's text is left out unless
// shown is set.
func (x *request) parseToken(c *choice, id int32, shown bool) (stopped bool) {
	text := ""
	if shown {
		text = c.text.Decode(id)
	}
	c.parsed = c.parser.Push(c.parsed[:0], id, text)
	return x.split(c)
}

// parseEnd adds to a choice's Delta what was held back at the end.
func (x *request) parseEnd(c *choice) (stopped bool) {
	c.parsed = c.parser.Finish(c.parser.Push(c.parsed[:0], -1, c.text.Rest()))
	if x.split(c) {
		return true
	}
	c.delta.Text, stopped = c.text.Search(c.delta.Text, nil, true)
	return stopped
}

// split adds the parsed deltas to a choice's Delta, up to a stop string in the content.
func (x *request) split(c *choice) (stopped bool) {
	d := &c.delta
	for i := range c.parsed {
		switch p := &c.parsed[i]; p.Kind {
		case parse.Content:
			if d.Text, stopped = c.text.Search(d.Text, p.Text, false); stopped {
				return true
			}
		case parse.Reasoning:
			if !x.req.HideReasoning {
				d.Reasoning = append(d.Reasoning, p.Text...)
			}
		case parse.CallStart:
			d.AddCall(openai.ToolCall{Index: p.Call, ID: x.callID(c, p), Name: p.Name})
		case parse.Arguments:
			d.AddCall(openai.ToolCall{Index: p.Call, Arguments: p.Text})
		}
	}
	return false
}

// callID returns the id of a call: the model's own or, by the request's seed, the choice and the
// prompt's length, one that differs from those of the same chat's earlier answers.
func (x *request) callID(c *choice, p *parse.Delta) string {
	if p.ID != "" {
		return p.ID
	}
	seed := x.seed ^ uint64(len(c.prompt.Tokens))<<32 ^ uint64(c.delta.Index)<<16
	return string(x.model.Text.Format().IDs().AppendID(nil, p.Name, seed, p.Call))
}

// finishReason returns the reason of an answer that the model ended. As in OpenAI's API, an answer
// has stopped if tool_choice names its call.
func (c *choice) finishReason(named bool) string {
	if c.parser != nil && c.parser.Calls() > 0 && !named {
		return openai.ReasonToolCalls
	}
	return metrics.ReasonStop
}

// countedReason returns the choice's finish reason as metrics have it, which are vLLM's.
func (c *choice) countedReason() string {
	if r := c.delta.Finish.Reason; r != openai.ReasonToolCalls {
		return r
	}
	return metrics.ReasonStop
}
