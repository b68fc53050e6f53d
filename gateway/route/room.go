package route

import "slices"

// roomMargin is the share of a pool that new requests leave for the growth of running ones.
const roomMargin = 0.03

// Memory is a decode node's KV memory, in blocks.
type Memory struct {
	Total    int32 // 0: not known
	Free     int32 // empty
	Cached   int32 // evictable: of prefixes that no request uses
	Reserved int32 // that accepted requests will take for their prompts
}

// Demand is the KV memory that a request needs on a decode node, in blocks.
type Demand struct {
	Prompt int // for the prompt and one token; 0: any node has room
	Answer int // expected for the rest of the answer
}

// Reserve adds blocks to Reserved: those of the gateway's own decisions, and the expected blocks of
// the answers of running and waiting requests. Running requests have half of their answer left. A
// pool that is not known keeps none.
func (m *Memory) Reserve(own, running, waiting, answer int) {
	if m.Total > 0 {
		m.Reserved = Count(int(m.Reserved) + own + running*answer/2 + waiting*answer)
	}
}

// Holds reports whether an empty pool could hold the prompt and a token.
func (m *Memory) Holds(d Demand) bool { return m.Total == 0 || d.Prompt <= int(m.Total) }

// Fits reports whether the pool has room for a request, of whose prompt it has cached blocks. An
// idle pool has room for every request for which Holds is true. Cached blocks of the prompt are not
// taken again, but may be among the evictable ones.
func (m *Memory) Fits(d Demand, cached int) bool {
	if m.Total == 0 || d.Prompt == 0 {
		return true
	}
	return m.Holds(d) && m.spare(d, cached) >= 0
}

// spare returns how many blocks are left with the request; negative: how many are missing.
func (m *Memory) spare(d Demand, cached int) int {
	margin := int(roomMargin * float64(m.Total))
	need := min(d.Prompt+d.Answer, int(m.Total)-margin)
	cached = min(cached, d.Prompt)
	return m.available() - margin - (need - cached + min(cached, int(m.Cached)))
}

// available returns the blocks that new requests can take.
func (m *Memory) available() int { return int(m.Free) + int(m.Cached) - int(m.Reserved) }

// beyondMargin returns at most the blocks that new requests can take beyond the margin. A
// thirty-second is more than roomMargin.
func (m *Memory) beyondMargin() int { return m.available() - int(m.Total)/32 }

// used returns the share of the pool that is not available to new requests; 0: not known.
func (m *Memory) used() float64 {
	if m.Total == 0 {
		return 0
	}
	return min(1, max(0, 1-float64(m.available())/float64(m.Total)))
}

// full marks the nodes that have no room for the request.
func full(states []State, r *Request) {
	for i := range states {
		s := &states[i]
		s.Full = !s.HasRoom(r)
	}
}

// HasRoom reports whether the node has KV memory for the request.
func (s *State) HasRoom(r *Request) bool {
	m, d := &s.Memory, &r.Demand
	// Most nodes have room for the whole request, without cached blocks and beyond the margin.
	if m.Total == 0 || d.Prompt <= int(m.Total) && d.Prompt+d.Answer <= m.beyondMargin() {
		return true
	}
	return m.Fits(*d, s.heldBlocks(r))
}

// Roomiest returns the usable node that lacks the fewest blocks for the request, which will
// probably be the first to have room for it. It returns -1 if no node is usable, or their memory is
// not known.
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

// heldBlocks returns about how many of the prompt's blocks the node has.
func (s *State) heldBlocks(r *Request) int {
	if r.Uncached <= 0 {
		return 0
	}
	return r.Demand.Prompt * min(max(0, int(s.Held)), r.Uncached) / (r.Uncached + 1)
}

const (
	// answerWindow is the number of recent answers that Answers keeps.
	answerWindow = 256
	// FirstAnswer is the expected length in tokens before an answer has ended.
	FirstAnswer = 256
)

// Answers has the lengths of a model's recent answers. The zero value is ready to use. It is not
// safe for concurrent use.
type Answers struct {
	recent [answerWindow]int
	n      int
	sorted []int // the lengths in recent
	p75    int   // changes after each 16th answer, so that predictions of the answers between are alike
}

// Add adds the length of an answer in tokens.
func (a *Answers) Add(tokens int) {
	oldest := &a.recent[a.n%answerWindow]
	if a.n >= answerWindow {
		at, _ := slices.BinarySearch(a.sorted, *oldest)
		a.sorted = slices.Delete(a.sorted, at, at+1)
	}
	at, _ := slices.BinarySearch(a.sorted, tokens)
	a.sorted = slices.Insert(a.sorted, at, tokens)
	*oldest = tokens
	if a.n++; a.n < 16 || a.n%16 == 0 {
		a.p75 = a.sorted[len(a.sorted)*3/4]
	}
}

// Expect returns the length that three of four answers do not exceed, and at most maxTokens.
func (a *Answers) Expect(maxTokens int) int {
	if a.n == 0 {
		return min(maxTokens, FirstAnswer)
	}
	return min(maxTokens, a.p75)
}
