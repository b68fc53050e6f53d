package report

import "fmt"

// Spec is a server's counters of speculative decoding during a run.
type Spec struct {
	Drafts, DraftTokens, Accepted float64
	PerPosition                   []float64 // accepted tokens by their place in a draft
}

// Rate returns the accepted share of the drafted tokens, in percent.
func (s *Spec) Rate() float64 { return 100 * ratio(s.Accepted, s.DraftTokens) }

// Length returns the mean tokens per step, including the one that is not a draft.
func (s *Spec) Length() float64 { return 1 + ratio(s.Accepted, s.Drafts) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// print writes the section of the block.
func (s *Spec) print(title func(string), count func(string, int), value func(string, float64), line func(string)) {
	title("Speculative Decoding")
	value("Acceptance rate (%):", s.Rate())
	value("Acceptance length:", s.Length())
	count("Drafts:", int(s.Drafts))
	count("Draft tokens:", int(s.DraftTokens))
	count("Accepted tokens:", int(s.Accepted))
	if len(s.PerPosition) > 0 {
		line("Per-position acceptance (%):")
		for i, n := range s.PerPosition {
			value(fmt.Sprintf("  Position %d:", i), 100*ratio(n, s.Drafts))
		}
	}
}

// json returns the keys of the JSON.
func (s *Spec) json() Object {
	positions := make([]float64, len(s.PerPosition))
	for i, n := range s.PerPosition {
		positions[i] = ratio(n, s.Drafts)
	}
	return Object{
		{"spec_decode_acceptance_rate", s.Rate()}, {"spec_decode_acceptance_length", s.Length()}, {"spec_decode_num_drafts", int(s.Drafts)},
		{"spec_decode_draft_tokens", int(s.DraftTokens)}, {"spec_decode_accepted_tokens", int(s.Accepted)}, {"spec_decode_per_position_acceptance_rates", positions},
	}
}
