package gateway

import (
	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/messages"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/render"
)

// The routes between text and tokens use no node. They count as requests in flight, because a large
// body keeps a processor busy.

// tokenize answers with the tokens of a prompt or of a rendered chat, which a completion would
// continue.
func (g *Gateway) tokenize(ctx *fasthttp.RequestCtx) {
	g.translate(ctx, openai.Tokenize, nil, func(m *native.Model, req *openai.Request) ([]byte, *openai.Error) {
		charge := g.Charge(ctx)
		var p render.Prompt
		if req.Messages != nil {
			var fault *openai.Error
			if p, fault = m.Chat(req, charge); fault != nil {
				return nil, fault
			}
		} else if fault := m.Fits(req.Prompts[0].Text, "prompt"); fault != nil {
			return nil, fault
		} else if p.Tokens, fault = m.Text.TokensWithin(req.Prompts[0].Text, req.AddSpecialTokens == nil || *req.AddSpecialTokens, charge); fault != nil {
			return nil, fault
		}
		var strs []string
		if req.TokenStrings {
			strs = make([]string, len(p.Tokens))
			for i, id := range p.Tokens {
				strs[i] = m.Text.TokenName(id)
			}
		}
		return openai.AppendTokenized(nil, p.Tokens, strs, m.MaxLen), nil
	})
}

// detokenize answers with the text of tokens, including special ones.
func (g *Gateway) detokenize(ctx *fasthttp.RequestCtx) {
	g.translate(ctx, openai.Detokenize, nil, func(m *native.Model, req *openai.Request) ([]byte, *openai.Error) {
		ids := req.Prompts[0].Tokens
		if fault := m.Known(ids, "tokens"); fault != nil {
			return nil, fault
		}
		return openai.AppendDetokenized(nil, m.Text.Decode(ids, false)), nil
	})
}

// countTokens answers with the number of tokens of the prompt that a message of the same body has.
func (g *Gateway) countTokens(ctx *fasthttp.RequestCtx) {
	setRequestID(ctx)
	g.translate(ctx, openai.Chat, messages.NewCount(), func(m *native.Model, req *openai.Request) ([]byte, *openai.Error) {
		if fault := m.CheckTools(req, g.o.NoToolCalls); fault != nil {
			return nil, fault
		}
		p, fault := m.Chat(req, g.Charge(ctx))
		return messages.AppendCount(nil, len(p.Tokens)), fault
	})
}

// translate serves these routes: it parses the request, finds its model and answers with what do
// returns. s translates the body and errors; nil: there is no need.
func (g *Gateway) translate(ctx *fasthttp.RequestCtx, on openai.Endpoint, s native.Surface, do func(*native.Model, *openai.Request) ([]byte, *openai.Error)) {
	g.compute(ctx, func() ([]byte, *openai.Error) {
		charge := g.Charge(ctx)
		if s == nil {
			return g.translated(on, ctx.PostBody(), charge, do)
		}
		body, fault := s.Chat(ctx.PostBody(), charge)
		if fault != nil {
			return nil, fault
		}
		answer, fault := g.translated(on, body, charge, do)
		if fault != nil {
			return nil, s.Fault(fault)
		}
		return answer, nil
	})
}

// translated returns the answer to a body.
func (g *Gateway) translated(on openai.Endpoint, body []byte, charge func(int) *openai.Error, do func(*native.Model, *openai.Request) ([]byte, *openai.Error)) ([]byte, *openai.Error) {
	req, fault := openai.ParseWithin(on, body, charge)
	if fault != nil {
		return nil, fault
	}
	g.WarnUnknown(req.Unknown)
	m, fault := g.native.Find(req.Model)
	switch {
	case fault != nil:
		return nil, fault
	case m.Text == nil:
		return nil, openai.BadRequest("model", "model %q has no tokenizer: its prompts are token ids already", m.Name)
	}
	return do(m, req)
}

// compute answers with the JSON that do returns.
func (g *Gateway) compute(ctx *fasthttp.RequestCtx, do func() ([]byte, *openai.Error)) {
	if fault := g.Enter(); fault != nil {
		g.fail(ctx, fault)
		return
	}
	defer g.InFlight.Add(-1)
	body, fault := do()
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	sendJSON(ctx, body)
}

// messages answers a request of Anthropic's Messages API.
func (g *Gateway) messages(ctx *fasthttp.RequestCtx) {
	setRequestID(ctx)
	g.native.ServeAs(ctx, pathOf(ctx), messages.New())
}

// setRequestID sets the id of the request for Anthropic's clients.
func setRequestID(ctx *fasthttp.RequestCtx) {
	ctx.Response.Header.SetBytesV(messages.RequestIDHeader, ctx.Response.Header.Peek(exchange.RequestIDHeader))
}

// rendered returns a handler that answers with the requests of openai.TokensPath for the prompts of
// a request.
func rendered(on openai.Endpoint) func(*Gateway, *fasthttp.RequestCtx) {
	return func(g *Gateway, ctx *fasthttp.RequestCtx) {
		g.compute(ctx, func() ([]byte, *openai.Error) { return g.native.Render(ctx, on) })
	}
}

// derendered returns a handler that answers with the text of answers of openai.TokensPath.
func derendered(on openai.Endpoint) func(*Gateway, *fasthttp.RequestCtx) {
	return func(g *Gateway, ctx *fasthttp.RequestCtx) {
		g.compute(ctx, func() ([]byte, *openai.Error) { return g.native.Derender(ctx, on) })
	}
}
