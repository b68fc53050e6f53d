package route

import "cmp"

const (
	// interTokenTarget is the longest pause, in seconds, that a prompt may add between
	// two tokens of a decode node's streams while a prefill node can compute it. Readers
	// notice a pause of about this length.
	interTokenTarget = 0.1
	// usualStepTokens is how many tokens of a prompt a step is taken to have at most where
	// the node does not tell. A longer prompt is computed in several steps, and streams
	// get a token after each.
	usualStepTokens = 2048
)

// forbidden reports whether a decode node must leave the prompt to a prefill node. Its
// streams would pause for longer than interTokenTarget, or its KV memory is full up to
// the margin of the requests that run. A decode node without a usable prefill node
// computes the prompt in any case.
func (s *side) forbidden(r *Request, i int) bool {
	n := &s.states[i]
	if n.Memory.used() >= 1-roomMargin {
		return true
	}
	chunk := min(r.Uncached-n.Held, cmp.Or(n.StepTokens, usualStepTokens))
	return n.Load > 0 && float64(chunk) > interTokenTarget*s.rate(i)
}
