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
	stateRunning                     // is in every step if memory allows
	stateGone                        // finished or aborted; only a step or a reservation still references it
)

// rank orders requests: the lower one is placed first and preempted last. No two
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
	tokens      []int32 // prompt and output so far, owned
	computeOnly bool
	noCacheRead bool
	guided      bool
	named       bool // has a Request.Chain
	once        bool // ends with its first sample
	sitsOut     bool // computes all tokens but the last
	ticket      uint64
	rank        rank
	level       int // its priority
	preempted   int // times that it was preempted
	queuedAt    time.Duration
	state       requestState

	tables   []table       // [groups] covers [0, computed), and the step's tokens while it runs
	computed int           // tokens whose KV is in the tables
	chain    kvcache.Chain // hashes of its tokens, extended on demand

	credit int // bounds its drafts of Config.Draft per step; see learn

	keep int // the state after so many tokens is kept, for requests that continue this one

	score  int // leading tokens whose following logits are wanted
	scored int // of these, tokens whose logits have been computed

	scheduled  int  // tokens that the step computes
	drafts     int  // draft tokens after them, beyond len(tokens) in the same array
	uncomputed int  // drafts after those that the step does not compute, 0 or 1
	extra      int  // rows of logits beyond the first that the step makes for it
	inStep     bool // in the batch (or its Completed) between Schedule and Update
	samples    bool // its Seq samples
	ahead      bool // also in the step ahead

	reservation     *reservation // the live one
	reserveBlocks   int          // blocks that the last Reserve needed
	prefixCounted   bool         // counted in prefixQueries
	externalCounted bool         // counted in externalQueries
	admitted        bool         // counted in admitted
	arrived         int          // of computed, tokens whose KV came from another node

	table  [1]table           // of tables, where one is enough
	blocks [8]kvcache.BlockID // of this table, where they are enough
}

// table is a request's blocks of one group, one reference each. The first gone
// places have fallen out of the group's window and hold kvcache.NoBlock.
type table struct {
	blocks []kvcache.BlockID
	gone   int // places
	hashed int // leading places that are gone, in the prefix cache, or whose state is not kept
}

// nBlocks returns the number of places of a table that have a block.
func (t *table) nBlocks() int { return len(t.blocks) - t.gone }

// distinct returns the number of blocks of a group of states. A state that moves on is at several
// places until the step has ended, with a reference for each.
func (t *table) distinct() (n int) {
	for i := t.gone; i < len(t.blocks); i++ {
		if i == t.gone || t.blocks[i] != t.blocks[i-1] {
			n++
		}
	}
	return n
}

// keeps reports whether the block at a place of r stays there and enters the prefix cache. All do
// but most states.
func (s *Scheduler) keeps(r *request, group, place int) bool {
	spec := s.groups[group]
	end := (place + 1) * spec.BlockTokens
	return spec.Every == 0 || end%spec.Every == 0 || end == r.keep
}

// moves reports whether the block at the end of r's table moves on to the next place.
func (s *Scheduler) moves(r *request, group int) bool {
	t := &r.tables[group]
	last := len(t.blocks) - 1
	return last >= t.gone && !s.keeps(r, group, last) && !s.pool.Info(t.blocks[last]).Hashed
}

// newRequest copies q, with buffers for the tokens that it may get.
func (s *Scheduler) newRequest(q Request) *request {
	n := len(q.Tokens)
	room := min(n+min(max(q.MaxNew, 0), maxHint), s.cfg.MaxModelLen)
	r := &request{
		id:          q.ID,
		computeOnly: q.ComputeOnly,
		noCacheRead: q.NoCacheRead,
		ticket:      q.Ticket,
		guided:      q.Guided,
		once:        q.Once,
		score:       q.Score,
		credit:      1,
		keep:        n / s.pool.Align() * s.pool.Align(),
	}
	if !q.ComputeOnly { // a hit covers all tokens but the last
		r.keep = (n - 1) / s.pool.Align() * s.pool.Align()
	}
	if q.Chain != nil {
		r.tokens, r.chain, r.named = q.Tokens, *q.Chain, true
	} else {
		r.tokens, r.chain = append(make([]int32, 0, room), q.Tokens...), s.pool.NewChain(q.Root, room)
		r.chain.StartAt(q.RootDigest)
	}
	if n := s.groups[0].End(room); len(s.groups) == 1 {
		r.tables, r.table[0].blocks = r.table[:], r.blocks[:0]
		if n > len(r.blocks) {
			r.table[0].blocks = make([]kvcache.BlockID, 0, n)
		}
		return r
	}
	r.tables = make([]table, len(s.groups))
	for g := range r.tables {
		r.tables[g].blocks = make([]kvcache.BlockID, 0, s.groups[g].End(room))
	}
	return r
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

// unhold moves a held request to the waiting queue.
func (s *Scheduler) unhold(r *request) {
	s.held = remove(s.held, r)
	s.waiting = insert(s.waiting, r)
	r.state = stateWaiting
}

// remove removes a request from its queue and its ID from the index. It keeps its blocks.
func (s *Scheduler) remove(r *request) {
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

// nBlocks returns the number of blocks that r has.
func (r *request) nBlocks() (n int) {
	for g := range r.tables {
		n += r.tables[g].nBlocks()
	}
	return n
}

// blocksNeeded returns the most blocks that r still needs at once until it has the KV of
// all its tokens, if it starts at token n: at r.computed, or after a hit.
func (s *Scheduler) blocksNeeded(r *request, n int) int {
	sum := 0
	for g, spec := range s.groups {
		t := &r.tables[g]
		gone, holds := t.gone, t.nBlocks()
		if spec.Every > 0 {
			holds = t.distinct()
		}
		if n > r.computed {
			gone, holds = spec.First(n), spec.End(n)-spec.First(n)
		}
		most := spec.End(len(r.tokens)) - gone
		if spec.Window > 0 {
			most = min(most, spec.Touched(spec.Window-1+min(len(r.tokens)-n, s.cfg.MaxBatchedTokens)))
		}
		sum += max(0, most-holds)
	}
	return sum
}

// lookup returns how many leading tokens of r would be in its table after a cache
// hit, at least r.computed. A hit covers at most n-1 of n tokens: the last one has
// to be computed for its logits, and it must not be written into a block that
// others read. Nor does a hit cover tokens that are still to be scored.
func (s *Scheduler) lookup(r *request) (nTokens int) {
	if r.noCacheRead {
		return r.computed
	}
	for g := range r.tables {
		if t := &r.tables[g]; t.hashed != len(t.blocks) {
			return r.computed
		}
	}
	limit := len(r.tokens)
	if !r.computeOnly && s.fault != faultSharedWritten {
		limit--
	}
	if r.scored < r.score && s.fault != faultScoreHits {
		limit = r.scored
	}
	s.pool.Extend(&r.chain, r.tokens)
	return max(r.computed, s.pool.Match(&r.chain, limit))
}

// eachHit calls visit with the group, the place and the cached block of each block
// that r lacks to start after n tokens. lookup has found that they are cached.
func (s *Scheduler) eachHit(r *request, n int, visit func(group, place int, id kvcache.BlockID)) {
	for g, spec := range s.groups {
		for place := max(len(r.tables[g].blocks), spec.First(n)); place < spec.End(n); place++ {
			visit(g, place, s.pool.Find(g, &r.chain, place))
		}
	}
}

// attach moves r's start to the end of the longest cached prefix.
func (s *Scheduler) attach(r *request) {
	if n := s.lookup(r); n > r.computed {
		s.eachHit(r, n, func(g, place int, id kvcache.BlockID) {
			s.pool.Ref(id)
			s.appendBlock(&r.tables[g], place, id)
		})
		r.computed = n
		for g := range r.tables {
			s.appendBlock(&r.tables[g], s.groups[g].First(n), kvcache.NoBlock)
			r.tables[g].hashed = len(r.tables[g].blocks)
		}
		s.freeOutsideWindow(r)
	}
	if s.fault == faultSharedWritten && !r.computeOnly {
		r.computed = min(r.computed, len(r.tokens)-1)
	}
	if !r.prefixCounted && !r.noCacheRead {
		r.prefixCounted = true
		s.counters.prefixQueries += uint64(len(r.tokens))
		s.counters.prefixHits += uint64(r.computed)
	}
}

// appendBlock adds a block at a place at or after a table's end. The places between are
// outside the window and hold no block. It adds only those if id is NoBlock.
func (s *Scheduler) appendBlock(t *table, place int, id kvcache.BlockID) {
	if len(t.blocks) < place {
		s.freeBefore(t, len(t.blocks))
		for len(t.blocks) < place {
			t.blocks = append(t.blocks, kvcache.NoBlock)
		}
		t.gone, t.hashed = place, max(t.hashed, place)
	}
	if id != kvcache.NoBlock {
		t.blocks = append(t.blocks, id)
	}
}

// freeOutsideWindow frees the blocks that fell out of their group's window.
func (s *Scheduler) freeOutsideWindow(r *request) {
	for g, spec := range s.groups {
		if spec.Window > 0 && s.fault != faultWindowKept {
			first := spec.First(r.computed)
			if s.fault == faultWindowShort {
				first = max(0, r.computed-spec.Window+2) / spec.BlockTokens
			}
			s.freeBefore(&r.tables[g], min(first, len(r.tables[g].blocks)))
		}
	}
}

// freeBefore frees the blocks before a place, last to first.
func (s *Scheduler) freeBefore(t *table, before int) {
	for place := before - 1; place >= t.gone; place-- {
		s.pool.Unref(t.blocks[place])
		t.blocks[place] = kvcache.NoBlock
	}
	t.gone = max(t.gone, before)
	t.hashed = max(t.hashed, t.gone)
}

// store puts r's complete blocks into the prefix cache. If the cache has the
// content already, the table takes that block and r's own copy is freed.
func (s *Scheduler) store(r *request) {
	for g, spec := range s.groups {
		t := &r.tables[g]
		if (t.hashed+1)*spec.BlockTokens > r.computed {
			continue // most steps complete no block
		}
		s.pool.Extend(&r.chain, r.tokens[:r.computed])
		for ; (t.hashed+1)*spec.BlockTokens <= r.computed; t.hashed++ {
			if !s.keeps(r, g, t.hashed) {
				continue
			}
			own := t.blocks[t.hashed]
			kept := s.pool.Store(own, g, &r.chain, t.hashed)
			if kept != own {
				s.pool.Ref(kept)
				t.blocks[t.hashed] = kept
				if r.inStep && s.fault != faultDoublesFree {
					s.duplicates = append(s.duplicates, own)
				} else {
					s.pool.Unref(own)
				}
			}
		}
	}
}

// release frees all of r's blocks.
func (s *Scheduler) release(r *request) {
	for g := range r.tables {
		t := &r.tables[g]
		s.unref(t.blocks[t.gone:])
		t.blocks, t.gone, t.hashed = t.blocks[:0], 0, 0
	}
	r.computed, r.arrived = 0, 0
}

// unref releases blocks last to first, because the cache evicts in that order and
// a prefix is worth more than what follows it.
func (s *Scheduler) unref(blocks []kvcache.BlockID) {
	for i := len(blocks) - 1; i >= 0; i-- {
		s.pool.Unref(blocks[i])
	}
}
