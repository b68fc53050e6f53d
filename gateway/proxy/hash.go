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

// The key of a relayed prompt on the ring: if its model has a tokenizer, the prompt is rendered,
// tokenized and hashed in blocks as a native one is, so that prompts with equal tokens have the
// same home, however their bytes are written. Without a tokenizer, or if that fails, the prompt's
// bytes are hashed. No request is refused for it, and the bytes that are sent are the client's.

// Tokenizer is a model's chat template and tokenizer. It is immutable.
type Tokenizer struct{ m render.Model }

// NewTokenizer returns the tokenizer of a bundle. template replaces the bundle's, unless it is
// empty.
func NewTokenizer(b *nodepb.Bundle, template string) (*Tokenizer, error) {
	text, err := render.NewTextModel(b, template)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	// It has no bounds of context and vocabulary, because the servers check them.
	return &Tokenizer{render.Model{BlockTokens: kvcache.DefaultBlockTokens, Text: text}}, nil
}

// tokenizer returns the tokenizer of a model, or nil.
func (p *Proxy) tokenizer(m *upstream.Model) *Tokenizer {
	for _, name := range []string{m.Name, m.As, ""} {
		if t := p.o.Tokenizers[name]; t != nil {
			return t
		}
	}
	return nil
}

// hash sets the request's key on the ring, and nPrompt if the key is of tokens. The fault is the
// reason for a key of bytes.
func (r *relay) hash(body []byte) *openai.Error {
	p, fault := r.tokenize(body)
	if fault != nil {
		r.prompt, r.nPrompt = keyOf(r.model.Name, r.envelope.Prompt, body), 0
		return fault
	}
	r.prompt, r.nPrompt = p.Key, len(p.Tokens)
	return nil
}

// Reasons for a key of bytes, other than faults of the prompt.
var (
	errNoHash      = openai.BadRequest("", "the policy does not use it")
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
	case r.path() == "/v1/chat/completions":
		on = openai.Chat
	case r.path() == openai.TokensPath:
		body = append(append([]byte(`{"prompt":`), r.envelope.Prompt...), '}')
	case r.path() != "/v1/completions":
		return render.Prompt{}, errNoPrompt
	}
	charged := 0
	charge := func(n int) *openai.Error {
		fault := r.p.Charge(r.Ctx)(n)
		if fault == nil && n > httpserver.HeadBytes { // Charge does not count less
			charged += n
		}
		return fault
	}
	defer func() { httpserver.Refund(r.Ctx, charged) }()
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

// hashes reports whether the policy uses the prompt.
func hashes(b *exchange.RouteHints) bool {
	return b.Policy == route.Prefix || b.Policy == route.ConsistentHash || b.Policy == route.Session && b.Session == 0
}

// keyChunks are the numbers of leading bytes of a prompt that may be its key. As for tokens
// (route.Key), the largest that the prompt fills is used.
var keyChunks = [...]int{1024, 256, 64}

// keyOf returns the ring key of a prompt as it is written in the request's body.
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
