package proxy

import (
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// What of a relayed prompt keys the ring. Where there is a tokenizer for its model it
// is rendered, tokenized and hashed in blocks as a native one, so that prompts with
// equal tokens meet, however their bytes are written; a prompt with which that cannot
// be done, and one without a tokenizer, goes by its bytes. Nothing is refused for it,
// and what is sent on are the client's own bytes.

// Tokenizer is a model's chat template and tokenizer. It is not changed once made.
type Tokenizer struct{ m render.Model }

// NewTokenizer takes them out of a bundle, of which nothing else is looked at;
// template, unless empty, is used instead of the bundle's.
func NewTokenizer(b *nodepb.Bundle, template string) (*Tokenizer, error) {
	text, err := render.NewTextModel(b, template)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	// No bounds of context and vocabulary: those are the servers' to tell.
	return &Tokenizer{render.Model{BlockTokens: kvcache.DefaultBlockTokens, Text: text}}, nil
}

// tokenizer is that of a model; nil: there is none.
func (p *Proxy) tokenizer(m *upstream.Model) *Tokenizer {
	for _, name := range []string{m.Name, m.As, ""} {
		if t := p.o.Tokenizers[name]; t != nil {
			return t
		}
	}
	return nil
}

// hash sets the request's key on the ring, and nPrompt where that is of tokens; the
// fault says why it is of bytes.
func (r *relay) hash(body []byte) *openai.Error {
	p, fault := r.tokenize(body)
	if fault != nil {
		r.prompt, r.nPrompt = keyOf(r.model.Name, r.look.Prompt, body), 0
		return fault
	}
	r.prompt, r.nPrompt = p.Key, len(p.Tokens)
	return nil
}

// Why a prompt goes by its bytes, besides what is wrong with it.
var (
	errNoHash      = openai.BadRequest("", "the policy does not look at it")
	errNoTokenizer = openai.BadRequest("", "there is no tokenizer for the model")
	errNoPrompt    = openai.BadRequest("", "only chats, completions and requests of tokens have one that is tokenized")
)

// tokenize renders, tokenizes and hashes the request's prompt, the first of several.
func (r *relay) tokenize(body []byte) (render.Prompt, *openai.Error) {
	t, on := r.p.tokenizer(r.model), openai.Completions
	switch {
	case !hashes(&r.Hints):
		return render.Prompt{}, errNoHash
	case t == nil:
		return render.Prompt{}, errNoTokenizer
	case r.Path == "/v1/chat/completions":
		on = openai.Chat
	case r.Path == openai.TokensPath:
		body = append(append([]byte(`{"prompt":`), r.look.Prompt...), '}')
	case r.Path != "/v1/completions":
		return render.Prompt{}, errNoPrompt
	}
	charged := 0
	charge := func(n int) *openai.Error {
		fault := r.p.Charge(r.Ctx)(n)
		if fault == nil && n > httpserver.HeadBytes { // less is not counted
			charged += n
		}
		return fault
	}
	defer func() {
		httpserver.Refund(r.Ctx, charged)
	}()
	req, fault := openai.ParsePrompt(on, body, charge)
	if fault != nil {
		return render.Prompt{}, fault
	}
	req.Prompts = req.Prompts[:min(1, len(req.Prompts))]
	m := t.m
	m.Name, m.Fingerprint = r.model.Name, xxhash.Sum64String(ownName(r.model))
	ps, fault := m.Prompts(req, charge)
	if fault != nil {
		return render.Prompt{}, fault
	}
	return ps[0], nil
}

// hashes says whether the policy looks at the prompt.
func hashes(b *exchange.RouteHints) bool {
	return b.Policy == route.Prefix || b.Policy == route.ConsistentHash || b.Policy == route.Session && b.Session == 0
}

// keyChunks are how many leading bytes of a prompt may key the ring: as for
// tokens (route.Key), the largest that the prompt fills.
var keyChunks = [...]int{1024, 256, 64}

// keyOf is the ring key of a prompt as it is written in the request's body.
func keyOf(model string, prompt, body []byte) kvcache.Hash {
	if len(prompt) == 0 {
		prompt = body
	}
	for _, n := range keyChunks {
		if len(prompt) >= n {
			prompt = prompt[:n]
			break
		}
	}
	var d xxhash.Digest
	d.ResetWithSeed(xxhash.Sum64String(model))
	d.Write(prompt)
	return kvcache.Hash(d.Sum64())
}
