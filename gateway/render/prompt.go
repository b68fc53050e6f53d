package render

import (
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/route"
)

// defaultMaxTokens is the API's default for /v1/completions.
const defaultMaxTokens = 16

// Model is a model's way between what clients send and tokens. It is not changed once made.
type Model struct {
	Name        string // as clients say it
	Fingerprint uint64
	Adapter     string     // digest of the adapter that computes its requests; empty: none
	MaxLen      int        // tokens of prompt and answer together; 0: not known
	Vocab       int        // tokens; 0: not known
	BlockTokens int        // of KV blocks
	Text        *TextModel // nil: it has no tokenizer
}

// Root is where the block hashes of requests with the salt start.
func (m *Model) Root(salt string) kvcache.Hash {
	return kvcache.Root(m.rootFields(salt))
}

// RootDigest is where the digests of their blocks start.
func (m *Model) RootDigest(salt string) []byte {
	d := kvcache.DigestRoot(m.rootFields(salt))
	return d[:]
}

// rootFields are what requests have in common that may share cached blocks.
func (m *Model) rootFields(salt string) (fingerprint, adapter, s string) {
	// The adapter's content, so that a name may be given to another one.
	return strconv.FormatUint(m.Fingerprint, 16), m.Adapter, salt
}

// Prompt is one prompt of a request, shared by its n choices.
type Prompt struct {
	Text      string // that was tokenized; for prompts that came as tokens only where it is told
	Echo      string // what an answer begins with, with echo
	Tokens    []int32
	Probs     openai.PromptLogprobs // as far as they have come; empty: not asked for
	MaxTokens int                   // of each answer
	Key       kvcache.Hash
	Hashes    []kvcache.Hash // of its full blocks
}

// Prompts renders, tokenizes and checks what the request asks to continue. What that
// takes besides the request is counted by charge, whose error ends it.
func (m *Model) Prompts(req *openai.Request, charge func(bytes int) *openai.Error) ([]Prompt, *openai.Error) {
	out := make([]Prompt, 0, max(1, len(req.Prompts)))
	param := "prompt"
	if req.Endpoint == openai.Chat {
		param = "messages"
		p, fault := m.Chat(req, charge)
		if fault != nil {
			return nil, fault
		}
		out = append(out, p)
	}
	for _, in := range req.Prompts {
		p := Prompt{Tokens: in.Tokens}
		switch {
		case in.Tokens == nil && m.Text == nil:
			return nil, openai.BadRequest(param, "model %q has no tokenizer: send the prompt as a list of token ids", m.Name)
		case in.Tokens == nil:
			if fault := m.Fits(in.Text, param); fault != nil {
				return nil, fault
			}
			p.Text = in.Text
			var fault *openai.Error
			if p.Tokens, fault = m.Text.TokensWithin(in.Text, req.AddSpecialTokens == nil || *req.AddSpecialTokens, charge); fault != nil {
				return nil, fault
			}
		case (req.Echo || req.PromptText) && m.Text != nil:
			p.Text = m.Text.Decode(in.Tokens, req.SkipSpecial)
		case req.Echo || req.PromptText:
			for _, id := range in.Tokens {
				p.Text += BareToken(id)
			}
		}
		p.Echo = p.Text
		out = append(out, p)
	}
	if m.Text == nil && len(req.Stop) > 0 {
		return nil, openai.BadRequest("stop", "model %q has no tokenizer: use stop_token_ids", m.Name)
	}
	if fault := m.checkControls(req); fault != nil {
		return nil, fault
	}
	root := m.Root(req.CacheSalt)
	told := 0 // log-probabilities of prompts in the answer
	for i := range out {
		m.truncate(&out[i], req)
		if fault := m.fit(&out[i], req, param); fault != nil {
			return nil, fault
		}
		told += len(out[i].Tokens) * probsPerToken(req)
		if told > maxPromptProbs {
			return nil, openai.BadRequest(param, "log-probabilities of %d or more prompt tokens are asked for, best ones and choices counted; at most %d are told: send fewer prompts, or ask for less",
				told, maxPromptProbs)
		}
		out[i].Hashes = kvcache.AppendHashes(nil, root, out[i].Tokens, m.BlockTokens)
		out[i].Key = route.Key(root, out[i].Hashes, out[i].Tokens)
	}
	return out, nil
}

// maxPromptProbs bounds the log-probabilities of prompts in one answer, which is
// held whole: each takes some 60 bytes of JSON. A prompt of 32,768 tokens with 20
// best ones each has 688,128.
const maxPromptProbs = 1 << 20

// probsPerToken is how many log-probabilities an answer tells for each token of a
// prompt.
func probsPerToken(req *openai.Request) (n int) {
	if req.PromptLogprobs != nil {
		n += 1 + *req.PromptLogprobs
	}
	if req.Endpoint == openai.Completions {
		if req.Echo && req.Logprobs {
			n += 1 + req.TopLogprobs
		}
		n *= req.N // each choice has them
	}
	return n
}

// chat renders and tokenizes the messages. charge is as in prompts.
func (m *Model) Chat(req *openai.Request, charge func(bytes int) *openai.Error) (Prompt, *openai.Error) {
	switch {
	case m.Text == nil:
		return Prompt{}, openai.BadRequest("messages", "model %q has no tokenizer: use /v1/completions with token ids", m.Name)
	case m.Text.chat == nil:
		return Prompt{}, openai.BadRequest("messages", "model %q has no chat template: use /v1/completions", m.Name)
	}
	text, fault := m.Text.render(req)
	if fault != nil {
		return Prompt{}, fault
	}
	if fault := m.Fits(text, "messages"); fault != nil {
		return Prompt{}, fault
	}
	if fault := charge(len(text)); fault != nil {
		return Prompt{}, fault
	}
	p := Prompt{Text: text}
	if p.Tokens, fault = m.Text.TokensWithin(text, req.AddSpecialTokens != nil && *req.AddSpecialTokens, charge); fault != nil {
		return Prompt{}, fault
	}
	if req.Echo {
		p.Echo = openai.LastContent(req.Messages, "assistant")
	}
	return p, nil
}

// truncate shortens the prompt to what the request keeps of it.
func (m *Model) truncate(p *Prompt, req *openai.Request) {
	keep := req.Truncate
	if keep < 0 {
		if m.MaxLen == 0 {
			return
		}
		keep = max(1, m.MaxLen-max(1, req.MaxTokens))
	}
	n := len(p.Tokens)
	if keep == 0 || n <= keep {
		return
	}
	if req.TruncateEnd {
		p.Tokens = p.Tokens[:keep]
	} else {
		p.Tokens = p.Tokens[n-keep:]
	}
	if m.Text != nil && (req.Echo || req.PromptText) { // what was kept is what is told
		p.Text = m.Text.Decode(p.Tokens, false)
		if req.Endpoint == openai.Completions {
			p.Echo = p.Text
		}
	}
}

// fit checks the prompt against vocabulary and context and settles max_tokens.
func (m *Model) fit(p *Prompt, req *openai.Request, param string) *openai.Error {
	nTokens, most := len(p.Tokens), m.MaxLen
	if nTokens == 0 {
		return openai.BadRequest(param, "the prompt is empty: at least one token is needed")
	}
	if fault := m.Known(p.Tokens, param); fault != nil {
		return fault
	}
	room := most - nTokens
	if most > 0 && room <= 0 {
		return openai.BadRequest(param, "the prompt has %d tokens, which leaves no room in the model's context of %d tokens: shorten it", nTokens, most)
	}
	switch {
	case req.MaxTokens > 0 && most > 0 && req.MaxTokens > room:
		return openai.BadRequest("max_tokens", "the prompt has %d tokens and max_tokens is %d, together more than the model's context of %d tokens: shorten one of them",
			nTokens, req.MaxTokens, most)
	case req.MaxTokens >= 0:
		p.MaxTokens = max(1, req.MaxTokens) // one stands for the prompt's end
	case req.Endpoint == openai.Completions && most > 0:
		p.MaxTokens = min(defaultMaxTokens, room)
	case most > 0:
		p.MaxTokens = room
	default:
		p.MaxTokens = defaultMaxTokens
	}
	return nil
}

// Known checks that token ids are in the vocabulary.
func (m *Model) Known(ids []int32, param string) *openai.Error {
	vocab := int32(m.Vocab)
	for i, t := range ids {
		if vocab > 0 && t >= vocab {
			return openai.BadRequest(param, "token id %d at position %d is outside the vocabulary of %d tokens", t, i, vocab)
		}
	}
	return nil
}

// BadWord is the token sequences that a word to avoid is written with: at the
// beginning of a text, and after a space where that is another way to begin the
// same number of tokens (vLLM's rule).
func (m *Model) BadWord(word string) [][]int32 {
	word = strings.TrimLeft(word, " ")
	bare := m.Text.Tokens(word, false)
	if len(bare) == 0 {
		return nil
	}
	spaced := m.Text.Tokens(" "+word, false)
	if len(spaced) == len(bare) && spaced[0] != bare[0] {
		return [][]int32{bare, spaced}
	}
	return [][]int32{bare}
}

// checkControls refuses what the model's vocabulary does not have.
func (m *Model) checkControls(r *openai.Request) *openai.Error {
	vocab := int32(m.Vocab)
	for _, b := range r.LogitBias {
		if b.Token >= vocab {
			return openai.BadRequest("logit_bias", "logit_bias names token %d; the vocabulary has %d", b.Token, vocab)
		}
	}
	for _, t := range r.AllowedTokens {
		if t >= vocab {
			return openai.BadRequest("allowed_token_ids", "allowed_token_ids names token %d; the vocabulary has %d", t, vocab)
		}
	}
	for _, t := range r.LogprobTokens {
		if t >= vocab {
			return openai.BadRequest("logprob_token_ids", "logprob_token_ids names token %d; the vocabulary has %d", t, vocab)
		}
	}
	if len(r.BadWords) > 0 && m.Text == nil {
		return openai.BadRequest("bad_words", "model %q has no tokenizer to write bad_words with", m.Name)
	}
	return nil
}

// TokenProb tells of a token by its text, or by its id, which tells tokens of one
// text apart.
func (m *Model) TokenProb(id int32, logProb float32, asID bool) openai.TokenLogprob {
	if asID || m.Text == nil {
		text := m.TokenText(id)
		if asID {
			text = "token_id:" + strconv.Itoa(int(id))
		}
		return openai.TokenLogprob{Text: text, Bytes: []byte(text), Logprob: logProb}
	}
	return openai.TokenLogprob{Text: m.TokenText(id), Bytes: m.Text.tok.TokenBytes(id), Logprob: logProb}
}

// TokenText is the text of a token by itself.
func (m *Model) TokenText(id int32) string {
	if m.Text == nil {
		return BareToken(id)
	}
	return m.Text.Decode([]int32{id}, false)
}

// BareToken stands for a token's text where the model has no tokenizer: its id
// in decimal and a space.
func BareToken(id int32) string { return strconv.Itoa(int(id)) + " " }

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

// TokenName is a token as the tokenizer's file writes it; where that cannot be
// found, its text.
func (t *TextModel) TokenName(id int32) string {
	tok := t.tok
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
