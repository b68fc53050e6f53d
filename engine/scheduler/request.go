package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// requestState is the queue a request is in.
type requestState uint8

const (
	stateHeld    requestState = iota // waits for KV from another node
	stateWaiting                     // may run when there is room
	stateRunning                     // is in every step, memory permitting
	stateGone                        // finished or aborted; only a step or a reservation still knows it
)

// rank orders requests: the lower one goes first and is preempted last. No two
// are equal.
type rank struct {
	due     time.Duration // arrival, moved by the priority's head start
	arrival uint64
}

func (a rank) before(b rank) bool {
	return a.due < b.due || a.due == b.due && a.arrival < b.arrival
}

type request struct {
	id          RequestID
	root        kvcache.Hash
	tokens      []int32 // prompt and output so far, owned
	computeOnly bool
	noCacheRead bool
	rank        rank
	queuedAt    time.Duration
	state       requestState

	table    []kvcache.BlockID // one reference each; covers [0, computed), and the step's tokens while it runs
	computed int               // tokens whose KV is in table
	hashed   int               // leading blocks of table that are in the prefix cache

	score  int // leading tokens behind which the logits are wanted
	scored int // of these, behind which they have been computed

	scheduled int  // tokens the step computes
	guesses   int  // tokens that stand behind them, beyond len(tokens) in the same array
	extra     int  // rows of logits beyond the first that the step makes for it
	inStep    bool // in the batch (or its Completed) between Schedule and Update
	samples   bool // its Seq samples

	reservation *reservation // the live one
	looked      bool         // counted in prefixQueries
	asked       bool         // counted in externalQueries
	admitted    bool         // counted in admitted
	arrived     int          // of computed, tokens whose KV came from another node
}

// newRequest copies q, with buffers for as many tokens as it says it may get.
func (s *Scheduler) newRequest(q Request) *request {
	n := len(q.Tokens)
	room := min(n+min(max(q.MaxNew, 0), maxHint), s.cfg.MaxModelLen)
	return &request{
		id:          q.ID,
		root:        q.Root,
		tokens:      append(make([]int32, 0, room), q.Tokens...),
		table:       make([]kvcache.BlockID, 0, s.blocksFor(room)),
		computeOnly: q.ComputeOnly,
		noCacheRead: q.NoCacheRead,
		score:       q.Score,
	}
}

func (r *request) missing() int { return len(r.tokens) - r.computed }

// insert puts r into a queue at its rank.
func insert(queue []*request, r *request) []*request {
	at, _ := slices.BinarySearchFunc(queue, r, byRank)
	return slices.Insert(queue, at, r)
}

// remove takes r out of a queue that has it.
func remove(queue []*request, r *request) []*request {
	at, found := slices.BinarySearchFunc(queue, r, byRank)
	if !found {
		panic(fmt.Sprintf("scheduler: request %d is not in its queue", r.id))
	}
	return slices.Delete(queue, at, at+1)
}

func byRank(a, b *request) int {
	switch {
	case a.rank.before(b.rank):
		return -1
	case b.rank.before(a.rank):
		return 1
	}
	return 0
}

func (s *Scheduler) heldRequest(id RequestID, tried string) (*request, error) {
	r := s.byID[id]
	if r == nil {
		return nil, fmt.Errorf("%w: %s %d", ErrUnknownRequest, tried, id)
	}
	if r.state != stateHeld {
		return nil, fmt.Errorf("%w: %s %d", ErrNotHeld, tried, id)
	}
	return r, nil
}

// unhold lets a held request wait for its turn.
func (s *Scheduler) unhold(r *request) {
	s.held = remove(s.held, r)
	s.waiting = insert(s.waiting, r)
	r.state = stateWaiting
}

// leave takes a request out of its queue and its name; its blocks stay.
func (s *Scheduler) leave(r *request) {
	switch r.state {
	case stateHeld:
		s.held = remove(s.held, r)
	case stateWaiting:
		s.waiting = remove(s.waiting, r)
	case stateRunning:
		s.running = remove(s.running, r)
	}
	r.state = stateGone
	delete(s.byID, r.id)
}

// blocksFor is the number of blocks that n tokens take.
func (s *Scheduler) blocksFor(nTokens int) int {
	return (nTokens + s.blockTokens - 1) / s.blockTokens
}

// lookup returns the cached blocks that would continue r's table. A hit covers
// at most n-1 of n tokens: the last one has to be computed to be sampled from,
// and it may not be written into a block that others read. Nor does it cover
// what is still to be scored.
func (s *Scheduler) lookup(r *request) []kvcache.BlockID {
	if r.noCacheRead || len(r.table) != r.hashed || r.computed != r.hashed*s.blockTokens {
		return nil
	}
	limit := len(r.tokens)
	if !r.computeOnly && s.broken != faultSharedWritten {
		limit--
	}
	if r.scored < r.score && s.broken != faultScoreHits {
		limit = r.scored
	}
	s.match = s.pool.AppendMatch(s.match[:0], r.root, r.tokens[:limit])
	return s.match[min(r.hashed, len(s.match)):]
}

// attach moves r's start to the end of the longest cached prefix.
func (s *Scheduler) attach(r *request) {
	if found := s.lookup(r); len(found) > 0 {
		for _, id := range found {
			s.pool.Ref(id)
		}
		r.table = append(r.table, found...)
		r.hashed = len(r.table)
		r.computed = r.hashed * s.blockTokens
	}
	if s.broken == faultSharedWritten && !r.computeOnly {
		r.computed = min(r.computed, len(r.tokens)-1)
	}
	if !r.looked && !r.noCacheRead {
		r.looked = true
		s.counters.prefixQueries += uint64(len(r.tokens))
		s.counters.prefixHits += uint64(r.computed)
	}
}

// store puts r's complete blocks into the prefix cache. Where the cache has the
// content already, the table takes that block and r's own copy returns.
func (s *Scheduler) store(r *request) {
	complete := r.computed / s.blockTokens
	for ; r.hashed < complete; r.hashed++ {
		i := r.hashed
		parent := kvcache.NoBlock
		if i > 0 {
			parent = r.table[i-1]
		}
		own := r.table[i]
		kept := s.pool.Store(own, parent, r.root, r.tokens[i*s.blockTokens:(i+1)*s.blockTokens])
		if kept != own {
			s.pool.Ref(kept)
			s.pool.Unref(own)
			r.table[i] = kept
		}
	}
}

// release gives all of r's blocks back.
func (s *Scheduler) release(r *request) {
	s.unref(r.table)
	r.table = r.table[:0]
	r.computed, r.hashed, r.arrived = 0, 0, 0
}

// unref releases blocks last to first: the cache evicts in that order, and a
// prefix is worth more than what follows it.
func (s *Scheduler) unref(blocks []kvcache.BlockID) {
	for i := len(blocks) - 1; i >= 0; i-- {
		s.pool.Unref(blocks[i])
	}
}
