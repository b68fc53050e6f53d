package gateway

import (
	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/render"
)

// The routes between text and tokens use no node. They count as requests in flight, because a large
// body keeps a processor busy.

// tokenize answers with the tokens of a prompt or of a rendered chat, which a completion would
// continue.
func (g *Gateway) tokenize(ctx *fasthttp.RequestCtx) {
	g.translate(ctx, openai.Tokenize, func(m *native.Model, req *openai.Request) ([]byte, *openai.Error) {
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
	g.translate(ctx, openai.Detokenize, func(m *native.Model, req *openai.Request) ([]byte, *openai.Error) {
		ids := req.Prompts[0].Tokens
		if fault := m.Known(ids, "tokens"); fault != nil {
			return nil, fault
		}
		return openai.AppendDetokenized(nil, m.Text.Decode(ids, false)), nil
	})
}

// translate serves both: it parses the request, finds its model and answers with what do returns.
func (g *Gateway) translate(ctx *fasthttp.RequestCtx, on openai.Endpoint, do func(*native.Model, *openai.Request) ([]byte, *openai.Error)) {
	g.compute(ctx, func() ([]byte, *openai.Error) {
		req, fault := openai.ParseWithin(on, ctx.PostBody(), g.Charge(ctx))
		if fault != nil {
			return nil, fault
		}
		g.WarnUnknown(req.Unknown)
		m, fault := g.native.Find(req.Model)
		if fault == nil && m.Text == nil {
			fault = openai.BadRequest("model", "model %q has no tokenizer: its prompts are token ids already", m.Name)
		}
		if fault != nil {
			return nil, fault
		}
		return do(m, req)
	})
}

// compute answers with the JSON that do returns.
func (g *Gateway) compute(ctx *fasthttp.RequestCtx, do func() ([]byte, *openai.Error)) {
	fault := g.Enter()
	if fault != nil {
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
