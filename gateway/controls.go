package gateway

import (
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// controls fills in what changes logits.
func (j *job) controls(s *nodepb.Sampling) {
	r := j.req
	if r.MinP != nil {
		s.MinP = *r.MinP
	}
	if r.RepetitionPenalty != nil {
		s.RepetitionPenalty = *r.RepetitionPenalty
	}
	s.PresencePenalty, s.FrequencyPenalty = r.PresencePenalty, r.FrequencyPenalty
	s.MinTokens = uint32(r.MinTokens)
	s.AllowedTokenIds = r.AllowedTokens
	for _, b := range r.LogitBias {
		s.LogitBias = append(s.LogitBias, &nodepb.LogitBias{Token: b.Token, Value: b.Value})
	}
	for _, w := range r.BadWords {
		for _, ids := range j.model.badWord(w) {
			s.BadWords = append(s.BadWords, &nodepb.TokenSequence{Tokens: ids})
		}
	}
}

// badWord is the token sequences that a word to avoid is written with: at the
// beginning of a text, and after a space where that is another way to begin the
// same number of tokens (vLLM's rule).
func (m *model) badWord(word string) [][]int32 {
	word = strings.TrimLeft(word, " ")
	bare := m.text.tokens(word, false)
	if len(bare) == 0 {
		return nil
	}
	spaced := m.text.tokens(" "+word, false)
	if len(spaced) == len(bare) && spaced[0] != bare[0] {
		return [][]int32{bare, spaced}
	}
	return [][]int32{bare}
}

// checkControls refuses what the model's vocabulary does not have.
func (m *model) checkControls(r *openai.Request) *openai.Error {
	vocab := int32(m.bundle.VocabSize)
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
	if len(r.BadWords) > 0 && m.text == nil {
		return openai.BadRequest("bad_words", "model %q has no tokenizer to write bad_words with", m.name)
	}
	return nil
}

// prob is one token's log-probabilities as the client sees them.
func (m *model) prob(c *choice, id int32, p *nodepb.TokenLogProbs, asIDs bool) openai.TokenProb {
	t := m.tokenProb(id, p.Logprob, asIDs)
	t.Offset = c.textEnd
	c.textEnd += len(m.tokenText(id))
	for i, top := range p.TopTokens {
		if i < len(p.TopLogprobs) {
			t.Top = append(t.Top, m.tokenProb(top, p.TopLogprobs[i], asIDs))
		}
	}
	return t
}

// tokenProb tells of a token by its text, or by its id, which tells tokens of one
// text apart.
func (m *model) tokenProb(id int32, logProb float32, asID bool) openai.TokenProb {
	if asID || m.text == nil {
		text := m.tokenText(id)
		if asID {
			text = "token_id:" + strconv.Itoa(int(id))
		}
		return openai.TokenProb{Text: text, Bytes: []byte(text), LogProb: logProb}
	}
	return openai.TokenProb{Text: m.tokenText(id), Bytes: m.text.tok.TokenBytes(id), LogProb: logProb}
}

// tokenText is the text of a token by itself.
func (m *model) tokenText(id int32) string {
	if m.text == nil {
		return bareToken(id)
	}
	return m.text.decode([]int32{id}, false)
}
