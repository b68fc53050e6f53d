package route

const (
	// interTokenTarget is the longest pause, in seconds, that a prompt may add between
	// two tokens of a decode node's streams while a prefill node can compute it. Readers
	// notice a pause of about this length.
	interTokenTarget = 0.1
	// chunkTokens is how many tokens of a prompt a step is taken to have at most: nodes do
	// not tell. A longer prompt is computed in several steps, and streams get a token
	// after each.
	chunkTokens = 2048
)

// forbidden reports whether a decode node must leave the prompt to a prefill node. Its
// streams would pause for longer than interTokenTarget, or its KV memory is full up to
// the margin of the requests that run. A decode node without a usable prefill node
// computes the prompt in any case.
func (s *State) forbidden(r *Request) bool {
	if s.Memory.used() >= 1-roomMargin {
		return true
	}
	rate := s.Rate
	if rate <= 0 {
		rate = unknownRate
	}
	chunk := min(r.Uncached-s.Held, chunkTokens)
	return s.Load > 0 && float64(chunk) > interTokenTarget*rate
}
