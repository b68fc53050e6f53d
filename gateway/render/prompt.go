package render

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/gateway/route"
)

// defaultMaxTokens is the API's default for /v1/completions.
const defaultMaxTokens = 16

// Model holds what rendering needs of a model. It is immutable.
type Model struct {
	Name        string // the model's name in the API
	Fingerprint uint64
	Adapter     string     // digest of the adapter that requests use; empty: none
	MaxLen      int        // tokens of prompt and answer together; 0: not known
	Vocab       int        // tokens; 0: not known
	BlockTokens int        // tokens of a KV block
	Text        *TextModel // nil: the model has no tokenizer
}

// Root returns the hash before a prompt's first block, for requests with the salt.
func (m *Model) Root(salt string) kvcache.Hash {
	return kvcache.Root(m.rootFields(salt))
}

// RootDigest returns the digest before a prompt's first block.
func (m *Model) RootDigest(salt string) []byte {
	d := kvcache.DigestRoot(m.rootFields(salt))
	return d[:]
}

// rootFields returns the fields that two requests must share to share cached blocks.
func (m *Model) rootFields(salt string) (fingerprint, adapter, s string) {
	// The adapter's digest, not its name, because a name can move to another adapter.
	return strconv.FormatUint(m.Fingerprint, 16), m.Adapter, salt
}

// Prompt is one prompt of a request, shared by its n choices.
type Prompt struct {
	Text      string // the tokenized text; of a prompt sent as tokens only if the answer shows it
	Echo      string // the beginning of the answer, with echo
	Tokens    []int32
	Start     parse.Start           // of the answer, where the prompt ends
	Probs     openai.PromptLogprobs // the log-probabilities received so far; empty: not requested
	MaxTokens int                   // of each choice
	Key       kvcache.Hash
	Hashes    []kvcache.Hash // of the full blocks
}

// Prompts renders, tokenizes and checks the prompts of a request. It calls charge with the bytes
// that this allocates besides the request, and returns its error.
func (m *Model) Prompts(req *openai.Request, charge func(bytes int) *openai.Error) ([]Prompt, *openai.Error) {
	out := make([]Prompt, 0, max(1, len(req.Prompts)))
	param := openai.PromptParam(req.Endpoint)
	if req.Endpoint == openai.Chat {
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
	nProbs := 0 // log-probabilities of prompts in the answer
	for i := range out {
		m.truncate(&out[i], req)
		if fault := m.fit(&out[i], req, param); fault != nil {
			return nil, fault
		}
		nProbs += len(out[i].Tokens) * probsPerToken(req)
		if nProbs > maxPromptProbs {
			return nil, openai.BadRequest(param, "the answer would have %d or more log-probabilities of prompt tokens, for all alternatives and choices; at most %d are returned: send fewer prompts, or request fewer log-probabilities",
				nProbs, maxPromptProbs)
		}
		out[i].Hashes = kvcache.AppendHashes(nil, root, out[i].Tokens, m.BlockTokens)
		out[i].Key = route.Key(root, out[i].Hashes, out[i].Tokens)
	}
	return out, nil
}

// maxPromptProbs bounds the log-probabilities of prompts in one answer, which is held in memory as
// a whole: each takes some 60 bytes of JSON. A prompt of 32,768 tokens with 20 alternatives each
// has 688,128.
const maxPromptProbs = 1 << 20

// probsPerToken returns how many log-probabilities the answer has for each token of a prompt.
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

// Chat renders and tokenizes the messages. charge is as in Prompts.
func (m *Model) Chat(req *openai.Request, charge func(bytes int) *openai.Error) (Prompt, *openai.Error) {
	switch {
	case m.Text == nil:
		return Prompt{}, openai.BadRequest("messages", "model %q has no tokenizer: use /v1/completions with token ids", m.Name)
	case m.Text.chat == nil && req.ChatTemplate == "":
		return Prompt{}, openai.BadRequest("messages", "model %q has no chat template: use /v1/completions", m.Name)
	}
	t := m.Text
	if req.ChatTemplate != "" {
		var fault *openai.Error
		if t, fault = m.with(req.ChatTemplate, charge); fault != nil {
			return Prompt{}, fault
		}
	}
	text, start, fault := t.render(req)
	if fault != nil {
		return Prompt{}, fault
	}
	if fault := m.Fits(text, "messages"); fault != nil {
		return Prompt{}, fault
	}
	if fault := charge(len(text)); fault != nil {
		return Prompt{}, fault
	}
	p := Prompt{Text: text, Start: start}
	if p.Tokens, fault = m.Text.TokensWithin(text, req.AddSpecialTokens != nil && *req.AddSpecialTokens, charge); fault != nil {
		return Prompt{}, fault
	}
	if req.Echo {
		p.Echo = openai.LastContent(req.Messages, "assistant")
	}
	return p, nil
}

// truncate shortens the prompt to the tokens that the request keeps.
func (m *Model) truncate(p *Prompt, req *openai.Request) {
	keep, n := req.Truncate, len(p.Tokens)
	if keep < 0 && m.MaxLen > 0 {
		keep = max(1, m.MaxLen-max(1, req.MaxTokens))
		if req.Endpoint.Vectors() {
			keep = m.MaxLen
		}
	}
	if keep <= 0 || n <= keep {
		return
	}
	switch suffix := m.suffix(p, req); {
	case req.TruncateEnd && len(suffix) < keep:
		p.Tokens = append(p.Tokens[:keep-len(suffix):keep-len(suffix)], suffix...)
	case req.TruncateEnd:
		p.Tokens = p.Tokens[:keep]
	default:
		p.Tokens = p.Tokens[n-keep:]
	}
	if m.Text != nil && (req.Echo || req.PromptText) { // the answer shows the kept tokens
		p.Text = m.Text.Decode(p.Tokens, false)
		if req.Endpoint == openai.Completions {
			p.Echo = p.Text
		}
	}
}

// suffix returns the special tokens behind the text of an input, which truncation keeps: the vector
// of many models is that of their last token.
func (m *Model) suffix(p *Prompt, req *openai.Request) []int32 {
	if !req.Endpoint.Vectors() || p.Text == "" || req.AddSpecialTokens != nil && !*req.AddSpecialTokens {
		return nil
	}
	bare, with := m.Text.Tokens("a", false), m.Text.Tokens("a", true)
	for i := range len(with) - len(bare) + 1 {
		if slices.Equal(with[i:i+len(bare)], bare) {
			return with[i+len(bare):]
		}
	}
	return nil
}

// counted returns a number of tokens with its noun.
func counted(tokens int) string {
	if tokens == 1 {
		return "1 token"
	}
	return fmt.Sprintf("%d tokens", tokens)
}

// fit checks the prompt against the vocabulary and the context, and sets MaxTokens.
func (m *Model) fit(p *Prompt, req *openai.Request, param string) *openai.Error {
	nTokens, most := len(p.Tokens), m.MaxLen
	if nTokens == 0 {
		return openai.BadRequest(param, "the prompt is empty: at least one token is needed")
	}
	if fault := m.Known(p.Tokens, param); fault != nil {
		return fault
	}
	room := most - nTokens
	if req.Endpoint.Vectors() {
		if most > 0 && room < 0 {
			return openai.ContextTooLong(param, most, "The input has %s: shorten it, or set truncate_prompt_tokens", counted(nTokens))
		}
		return nil
	}
	if most > 0 && room <= 0 {
		return openai.ContextTooLong(param, most, "The prompt has %s, which leaves no room for an answer: shorten it", counted(nTokens))
	}
	switch {
	case req.MaxTokens > room && most > 0 && req.ClipMax:
		p.MaxTokens = room
	case req.MaxTokens > 0 && most > 0 && req.MaxTokens > room:
		return openai.ContextTooLong("max_tokens", most, "The prompt has %s and max_tokens is %d, which is more together: shorten one of them",
			counted(nTokens), req.MaxTokens)
	case req.MaxTokens >= 0:
		p.MaxTokens = max(1, req.MaxTokens) // 0 still needs one for the end of the prompt
	case req.Endpoint == openai.Completions && most > 0:
		p.MaxTokens = min(defaultMaxTokens, room)
	case most > 0:
		p.MaxTokens = room
	default:
		p.MaxTokens = defaultMaxTokens
	}
	return nil
}

// Known returns an error that names param if a token id is outside the vocabulary.
func (m *Model) Known(ids []int32, param string) *openai.Error {
	vocab := int32(m.Vocab)
	for i, t := range ids {
		if vocab > 0 && t >= vocab {
			return openai.BadRequest(param, "token id %d at position %d is outside the vocabulary of %d tokens", t, i, vocab)
		}
	}
	return nil
}

// BadWord returns the token sequences that a word to avoid is generated as: at the beginning of a
// text, and after a space if that gives another sequence of the same length (vLLM's rule).
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

// checkControls rejects token ids outside the vocabulary, and bad_words without a tokenizer.
func (m *Model) checkControls(r *openai.Request) *openai.Error {
	biased := make([]int32, len(r.LogitBias))
	for i, b := range r.LogitBias {
		biased[i] = b.Token
	}
	for _, field := range []struct {
		name string
		ids  []int32
	}{{"logit_bias", biased}, {"allowed_token_ids", r.AllowedTokens}, {"logprob_token_ids", r.LogprobTokens}} {
		for _, t := range field.ids {
			if int(t) >= m.Vocab {
				return openai.BadRequest(field.name, "%s names token %d; the vocabulary has %d", field.name, t, m.Vocab)
			}
		}
	}
	if len(r.BadWords) > 0 && m.Text == nil {
		return openai.BadRequest("bad_words", "model %q has no tokenizer to write bad_words with", m.Name)
	}
	return nil
}

// TokenProb returns a token and its log-probability. The token is its text, or with asID its id,
// which distinguishes tokens of the same text.
func (m *Model) TokenProb(id int32, logProb float32, asID bool) openai.TokenLogprob {
	text := m.TokenText(id)
	switch {
	case asID:
		text = "token_id:" + strconv.Itoa(int(id))
	case m.Text != nil:
		return openai.TokenLogprob{Text: text, Bytes: m.Text.tok.TokenBytes(id), Logprob: logProb}
	}
	return openai.TokenLogprob{Text: text, Bytes: []byte(text), Logprob: logProb}
}

// TokenText returns the text of a single token.
func (m *Model) TokenText(id int32) string {
	if m.Text == nil {
		return BareToken(id)
	}
	return m.Text.Decode([]int32{id}, false)
}

// BareToken returns a token's text where the model has no tokenizer: its id in decimal and a space.
func BareToken(id int32) string { return strconv.Itoa(int(id)) + " " }

// TokenName returns a token as the tokenizer's file writes it, or its text if that is not found.
func (t *TextModel) TokenName(id int32) string {
	raw := string(t.tok.TokenBytes(id))
	names := []string{tokenizer.ByteLevel(raw), raw, strings.ReplaceAll(raw, " ", "\u2581")} // the last as SentencePiece writes spaces
	if len(raw) == 1 {
		names = append(names, fmt.Sprintf("<0x%02X>", raw[0])) // as byte fallback writes bytes
	}
	for _, name := range names {
		if got, ok := t.tok.ID(name); ok && got == id {
			return name
		}
	}
	return raw
}
