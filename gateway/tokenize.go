package gateway

import (
	"unicode/utf8"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// The routes between text and tokens, which no node takes part in. They count
// as requests being answered, since a large body keeps a processor busy.

// tokenize answers with the tokens of a prompt or of a rendered chat: those
// that a completion would continue.
func (g *Gateway) tokenize(ctx *fasthttp.RequestCtx) {
	g.translate(ctx, openai.Tokenize, func(m *model, req *openai.Request) ([]byte, *openai.Error) {
		charge := g.charge(ctx)
		var p prompt
		if req.Messages != nil {
			var fault *openai.Error
			if p, fault = m.chat(req, charge); fault != nil {
				return nil, fault
			}
		} else if fault := m.fits(req.Prompts[0].Text, "prompt"); fault != nil {
			return nil, fault
		} else if p.tokens, fault = m.text.tokensWithin(req.Prompts[0].Text, req.AddSpecialTokens == nil || *req.AddSpecialTokens, charge); fault != nil {
			return nil, fault
		}
		var strs []string
		if req.TokenStrings {
			strs = make([]string, len(p.tokens))
			for i, id := range p.tokens {
				strs[i] = tokenName(m.text.tok, id)
			}
		}
		return openai.AppendTokenized(nil, p.tokens, strs, int(m.bundle.MaxModelLen)), nil
	})
}

// detokenize answers with the text of tokens, special ones included.
func (g *Gateway) detokenize(ctx *fasthttp.RequestCtx) {
	g.translate(ctx, openai.Detokenize, func(m *model, req *openai.Request) ([]byte, *openai.Error) {
		ids := req.Prompts[0].Tokens
		if fault := m.known(ids, "tokens"); fault != nil {
			return nil, fault
		}
		return openai.AppendDetokenized(nil, m.text.decode(ids, false)), nil
	})
}

// translate does what both have in common.
func (g *Gateway) translate(ctx *fasthttp.RequestCtx, on openai.Endpoint, do func(*model, *openai.Request) ([]byte, *openai.Error)) {
	if fault := g.enter(); fault != nil {
		g.fail(ctx, fault)
		return
	}
	defer g.inFlight.Add(-1)
	req, fault := openai.ParseWithin(on, ctx.PostBody(), g.charge(ctx))
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	g.warnUnknown(req.Unknown)
	m, fault := g.find(req.Model)
	if fault == nil && m.text == nil {
		fault = openai.BadRequest("model", "model %q has no tokenizer: its prompts are token ids already", m.name)
	}
	var body []byte
	if fault == nil {
		body, fault = do(m, req)
	}
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	ctx.SetContentType("application/json")
	ctx.Response.SetBodyRaw(body)
}

// alphabet is how byte-level vocabularies write bytes: printable ones as
// themselves, the others from U+0100 on.
var alphabet = func() (t [256]rune) {
	next := rune(256)
	for b := range t {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			t[b] = rune(b)
		} else {
			t[b] = next
			next++
		}
	}
	return t
}()

// tokenName is a token as the tokenizer's file writes it; where that cannot be
// found, its text.
func tokenName(tok *tokenizer.Tokenizer, id int32) string {
	raw := tok.TokenBytes(id)
	byteLevel := make([]byte, 0, 2*len(raw))
	for _, b := range raw {
		byteLevel = utf8.AppendRune(byteLevel, alphabet[b])
	}
	spaced := make([]byte, 0, 2*len(raw)) // as SentencePiece writes spaces
	for _, b := range raw {
		if b == ' ' {
			spaced = append(spaced, "\u2581"...)
		} else {
			spaced = append(spaced, b)
		}
	}
	names := [][]byte{byteLevel, raw, spaced}
	if len(raw) == 1 { // as byte fallback writes bytes
		const hex = "0123456789ABCDEF"
		names = append(names, []byte{'<', '0', 'x', hex[raw[0]>>4], hex[raw[0]&15], '>'})
	}
	for _, name := range names {
		if got, ok := tok.ID(string(name)); ok && got == id {
			return string(name)
		}
	}
	return string(raw)
}
