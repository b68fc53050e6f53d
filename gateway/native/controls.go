package native

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// controls sets what changes the logits.
func (x *request) controls(s *nodepb.Sampling) {
	r := x.req
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
		for _, ids := range x.model.BadWord(w) {
			s.BadWords = append(s.BadWords, &nodepb.TokenSequence{Tokens: ids})
		}
	}
}

// logprob returns one token's log-probabilities in the API's form.
func (m *Model) logprob(c *choice, id int32, p *nodepb.TokenLogProbs, asIDs bool) openai.TokenLogprob {
	t := m.TokenProb(id, p.Logprob, asIDs)
	t.Offset = c.textEnd
	c.textEnd += len(m.TokenText(id))
	for i, top := range p.TopTokens {
		if i < len(p.TopLogprobs) {
			t.Top = append(t.Top, m.TokenProb(top, p.TopLogprobs[i], asIDs))
		}
	}
	return t
}
