package route

import "cmp"

const (
	// interTokenTarget is the longest pause, in seconds, that a prompt may add between two tokens of a
	// decode node's streams if a prefill node can compute it. Readers notice a pause of about this
	// length.
	interTokenTarget = 0.1
	// usualStepTokens is the assumed maximum of prompt tokens in a step of a node that does not report
	// it. A longer prompt is computed in several steps, and streams get a token after each.
	usualStepTokens = 2048
)

// forbidden reports whether a decode node must leave the prompt to a prefill node, because its
// streams would pause for longer than interTokenTarget, or because its KV memory is full up to the
// margin for running requests. Without a usable prefill node, the decode node computes the prompt
// in any case.
func (s *side) forbidden(r *Request, i int) bool {
	n := &s.states[i]
	if n.Memory.used() >= 1-roomMargin {
		return true
	}
	chunk := min(r.Uncached-int(n.Held), cmp.Or(int(n.StepTokens), usualStepTokens))
	return n.Load > 0 && float64(chunk) > interTokenTarget*s.rate(i)
}
