package route

import "slices"

// roomMargin is the share of a pool that new requests leave to those that run,
// which grow.
const roomMargin = 0.03

// Memory is a decode node's KV memory, in blocks.
type Memory struct {
	Total    int // 0: not known
	Free     int // empty
	Cached   int // evictable: of prefixes that no request uses
	Reserved int // that requests in the node's hands will take for their prompts
}

// Demand is what a request takes of a decode node's KV memory, in blocks.
type Demand struct {
	Prompt int // of the prompt and one token; 0: room is not asked for
	Answer int // that the rest of the answer is expected to add
}

// Growing adds to Reserved what the answers of a report's requests are expected
// to take: of those that run half of an answer is still to come.
func (m *Memory) Growing(r *Report, answer int) {
	m.Reserved += r.Running*answer/2 + (r.Waiting+r.Held)*answer
}

// Holds reports whether the whole pool could hold the prompt and a token.
func (m *Memory) Holds(d Demand) bool { return m.Total == 0 || d.Prompt <= m.Total }

// Fits reports whether the pool has room for a request of whose prompt it caches
// so many blocks. An idle pool fits all that it holds. Cached blocks of the prompt
// are not taken twice, but may be among the evictable ones.
func (m *Memory) Fits(d Demand, cached int) bool {
	if m.Total == 0 || d.Prompt == 0 {
		return true
	}
	return m.Holds(d) && m.spare(d, cached) >= 0
}

// spare is how many blocks are left beside the request's; negative: so many are lacking.
func (m *Memory) spare(d Demand, cached int) int {
	most := m.Total - int(roomMargin*float64(m.Total))
	need := min(d.Prompt+d.Answer, most)
	cached = min(cached, d.Prompt)
	room := m.Free + m.Cached - m.Reserved - (m.Total - most)
	return room - (need - cached + min(cached, m.Cached))
}

// used is the share of the pool that is not for new requests; 0: not known.
func (m *Memory) used() float64 {
	if m.Total == 0 {
		return 0
	}
	return min(1, max(0, 1-float64(m.Free+m.Cached-m.Reserved)/float64(m.Total)))
}

// full marks the nodes that have no room for the request.
func full(states []State, r *Request) {
	for i := range states {
		s := &states[i]
		s.Full = !s.HasRoom(r)
	}
}

// HasRoom reports whether the node has KV memory for the request.
func (s *State) HasRoom(r *Request) bool { return s.Memory.Fits(r.Demand, s.heldBlocks(r)) }

// Roomiest is the usable node that lacks the fewest blocks for the request: the one that
// will probably have room for it first. -1: none is usable, or their memory is not known.
func Roomiest(states []State, r *Request) int {
	best, most := -1, 0
	for i := range states {
		s := &states[i]
		if m := &s.Memory; !s.Usable || m.Total == 0 || !m.Holds(r.Demand) {
			continue
		}
		if spare := s.Memory.spare(r.Demand, s.heldBlocks(r)); best < 0 || spare > most {
			best, most = i, spare
		}
	}
	return best
}

// heldBlocks is how many of the prompt's blocks the node has, about.
func (s *State) heldBlocks(r *Request) int {
	if r.Uncached <= 0 {
		return 0
	}
	return r.Demand.Prompt * min(max(0, s.Held), r.Uncached) / (r.Uncached + 1)
}

const (
	// answerWindow is how many answers Answers looks back.
	answerWindow = 256
	// FirstAnswer is what Answers expects before an answer has ended, in tokens.
	FirstAnswer = 256
)

// Answers knows the lengths of a model's recent answers. The zero value is ready.
// It is not safe for concurrent use.
type Answers struct {
	recent [answerWindow]int
	n      int
	sorted []int
	p75    int
}

// Add counts an answer of so many tokens.
func (a *Answers) Add(tokens int) {
	a.recent[a.n%answerWindow] = tokens
	a.n++
	if a.n < 16 || a.n%16 == 0 { // sorting costs a few µs
		a.sorted = append(a.sorted[:0], a.recent[:min(a.n, answerWindow)]...)
		slices.Sort(a.sorted)
		a.p75 = a.sorted[len(a.sorted)*3/4]
	}
}

// Expect is the length that three of four answers do not exceed, at most the
// request's own limit.
func (a *Answers) Expect(maxTokens int) int {
	if a.n == 0 {
		return min(maxTokens, FirstAnswer)
	}
	return min(maxTokens, a.p75)
}
