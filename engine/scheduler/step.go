package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Seq is one request's part of a step: compute the KV of Tokens at positions
// Start, Start+1, …, and sample after the last one if Sample is set.
type Seq struct {
	ID     RequestID
	Start  int
	Tokens []int32 // never empty
	Sample bool

	// Tables are the block tables, one per group, for positions [0,
	// Start+len(Tokens)). Places before the group's window, which no token of this
	// step reads, hold kvcache.NoBlock.
	Tables [][]kvcache.BlockID
	// Drafts is how many of the last Tokens are drafts. The device samples before
	// the first and after each of them, 1+Drafts times.
	Drafts int
	// The logits after the tokens at positions [ScoreFrom, ScoreTo) are wanted in
	// addition to those that are sampled from.
	ScoreFrom, ScoreTo int
}

// Batch is one step. It is read-only and valid until Update.
type Batch struct {
	Seqs      []Seq       // single tokens first, then chunks, each by rank
	Tokens    int         // sum over Seqs
	Preempted []RequestID // lost their KV and wait again; only to be counted
	// Completed are ComputeOnly requests that were wholly cached. They have no Seq. Update
	// returns them, and Tables is valid until then.
	Completed []RequestID
	Admitted  []Admission // requests that run for the first time, Completed ones included
}

// Shape is the work of a batch, which determines how long its step takes.
type Shape struct {
	Chunk      int     // tokens of prompts, and of requests with drafts
	Attended   float64 // sum over these tokens of the tokens before each
	Streams    int     // requests that decode one token
	ContextSum int     // tokens that these attend to
}

// Shape returns the batch's shape.
func (b *Batch) Shape() (s Shape) {
	for i := range b.Seqs {
		q := &b.Seqs[i]
		if n := len(q.Tokens); n == 1 && q.Sample {
			s.Streams++
			s.ContextSum += q.Start + 1
		} else {
			s.Chunk += n
			s.Attended += float64(n) * (float64(q.Start) + float64(n)/2)
		}
	}
	return s
}

// Admission is a request's first step: the tokens that it did not have to compute.
type Admission struct {
	ID      RequestID
	Cached  int // leading tokens found in the prefix cache
	Arrived int // tokens after those whose KV came from another node
}

// Result is the outcome of a Seq with Sample: at least one token. All but the
// last are the Seq's first drafts.
type Result struct {
	Tokens   []int32
	Finished bool // the request ends with the last of them
}

// Schedule returns the next step's batch. Update must follow it, even if the batch
// has no Seqs.
func (s *Scheduler) Schedule(now time.Duration) Batch {
	if s.stepping {
		panic("scheduler: Schedule before the last batch's Update")
	}
	s.stepping = true
	s.budget = s.stepTokens()
	s.spareRows = s.cfg.MaxOutputs - min(s.cfg.MaxSeqs, len(s.running)+len(s.waiting))
	s.scoreRows = cmp.Or(s.maxScores, s.cfg.MaxOutputs)
	s.placed, s.inStep, s.views = s.placed[:0], s.inStep[:0], s.views[:0]
	if s.order != nil {
		s.rerank()
	}
	s.batch = Batch{Seqs: s.batch.Seqs[:0], Preempted: s.batch.Preempted[:0], Completed: s.batch.Completed[:0], Admitted: s.batch.Admitted[:0]}

	// Preemption removes requests only from the end of running, after i.
	for i := 0; i < len(s.running); i++ {
		if r := s.running[i]; r.missing() == 1 {
			s.grow(r)
		}
	}
	s.admit(now, 1, nil) // a request whose KV has arrived decodes before the chunks of others
	for i := 0; i < len(s.running) && s.budget > 0; i++ {
		r := s.running[i]
		if r.missing() <= 1 {
			continue
		}
		if s.order != nil {
			s.admit(now, s.cfg.MaxModelLen, r)
			if i = slices.Index(s.running, r); i < 0 {
				break // r was preempted
			}
		}
		s.grow(r)
	}
	s.admit(now, s.cfg.MaxModelLen, nil)

	for _, r := range s.placed {
		if r.scheduled > 0 { // not preempted after it was placed
			r.inStep = true
			r.samples = r.computed+r.scheduled == len(r.tokens) && !r.computeOnly
		}
	}
	s.draft()
	s.views = slices.Grow(s.views, len(s.placed)*len(s.groups)) // so that no append moves them
	for _, r := range s.placed {
		if r.scheduled == 0 {
			continue
		}
		end := r.computed + r.scheduled
		q := Seq{
			ID: r.id, Start: r.computed, Tokens: r.tokens[r.computed : end+r.drafts], Tables: s.tablesOf(r),
			Sample: r.samples, Drafts: r.drafts,
		}
		if from, to := max(r.computed, r.scored), min(end, r.score); from < to {
			q.ScoreFrom, q.ScoreTo = from, to
		}
		s.inStep = append(s.inStep, r)
		s.batch.Seqs = append(s.batch.Seqs, q)
		s.batch.Tokens += len(q.Tokens)
	}
	for _, id := range s.batch.Completed {
		r := s.byID[id]
		r.inStep, r.samples = true, false
		s.inStep = append(s.inStep, r)
	}
	return s.batch
}

// grow places as many of r's missing tokens as budget and memory allow, and
// returns how many. If none fits, r is unchanged and tries again in the next step.
func (s *Scheduler) grow(r *request) int {
	want := r.computed + s.limitRows(r, s.share(r))
	if r.sitsOut {
		want = min(want, len(r.tokens)-1)
	}
	end := s.capacity(r)
	for end < want && s.allocBlocks(r, end) {
		end = s.capacity(r)
	}
	n := min(want, end) - r.computed
	if n > 0 {
		r.scheduled = n
		r.extra = r.scoredRows()
		s.scoreRows -= r.extra
		if r.computed+n < len(r.tokens) {
			r.extra = max(0, r.extra-1) // it samples nothing, so that its first row is free
		}
		s.budget = max(0, s.budget-n)
		s.spareRows -= r.extra
		s.placed = append(s.placed, r)
	}
	return n
}

// share returns how many of r's missing tokens the step may compute.
func (s *Scheduler) share(r *request) int {
	n, most := r.missing(), min(s.maxTokens, s.cfg.MaxBatchedTokens)
	switch {
	case n <= s.budget || s.maxTokens == 0:
	case s.budget == most && n <= min(2*most, s.cfg.MaxBatchedTokens): // r is first: two steps would take as long
		return n
	case s.budget <= most/2: // the requests that this step completes do not wait for a chunk of r
		return 0
	}
	return min(n, s.budget)
}

// LimitTokens bounds the tokens of each later step below MaxBatchedTokens. The
// first request is computed in one step even if it has up to twice as many tokens.
// A step that has half of the tokens is not filled with a part of a request.
// LimitTokens is for nodes that only have requests with ComputeOnly or Once, because a
// request that decodes may have to wait for its turn. 0 means MaxBatchedTokens.
func (s *Scheduler) LimitTokens(tokens int) { s.maxTokens = max(0, tokens) }

func (s *Scheduler) stepTokens() int {
	return min(cmp.Or(s.maxTokens, s.cfg.MaxBatchedTokens), s.cfg.MaxBatchedTokens)
}

// LimitScores bounds the prompt rows that are scored in each later step. Running
// requests wait for their turn by rank. A request that is admitted may score one
// row beyond the bound. 0 means MaxOutputs.
func (s *Scheduler) LimitScores(rows int) { s.maxScores = max(0, rows) }

// limitRows reduces a chunk of n of r's tokens to the rows of logits that are left. One
// row is r's own, so that a single token always has its row.
func (s *Scheduler) limitRows(r *request, n int) int {
	from := max(r.computed, r.scored)
	if from >= r.score {
		return n
	}
	most := max(0, s.scoreRows)
	if r.state == stateWaiting {
		most = max(1, most) // else requests behind it in the queue would wait as well
	}
	if r.score-from > min(most, s.spareRows) {
		n = min(n, from+min(most, 1+s.spareRows)-r.computed)
	}
	return n
}

// scoredRows returns the number of prompt rows of r that this step scores.
func (r *request) scoredRows() int {
	return max(0, min(r.computed+r.scheduled, r.score)-max(r.computed, r.scored))
}

// draft adds draft tokens for the requests that sample in this step. It uses only
// the budget, rows and free memory that are left and preempts no request.
func (s *Scheduler) draft() {
	if s.cfg.Guide != nil {
		s.draftGuided()
	}
	switch {
	case s.cfg.DraftAll != nil:
		s.draftAll()
	case s.cfg.Draft != nil:
		for _, r := range s.placed {
			if r.guided || r.once {
				continue
			}
			if most := s.maxDrafts(r, s.cfg.MaxDrafts); r.inStep && r.samples && most > 0 {
				most = min(most, r.credit)
				s.placeDrafts(r, s.cfg.Draft(r.tokens, most+1), most) // one more than computed, for learn
			}
		}
	}
}

// draftGuided drafts for the guided requests.
func (s *Scheduler) draftGuided() {
	for _, r := range s.placed {
		if !r.guided || !r.inStep || !r.samples {
			continue
		}
		guesses := 0
		if s.cfg.Draft != nil {
			guesses = min(s.cfg.MaxDrafts, r.credit)
		}
		if most := s.maxDrafts(r, DraftLimit); most > 0 {
			s.placeDrafts(r, s.cfg.Guide(r.id, r.tokens, most, guesses), most)
		}
	}
}

// draftAll drafts for all decoding requests at once. Each gets an equal share of
// what is left, because a sequence's first draft is worth more than another's last.
func (s *Scheduler) draftAll() {
	s.draftRequests, s.drafting = s.draftRequests[:0], s.drafting[:0]
	for _, r := range s.placed {
		if r.inStep && r.samples && r.scheduled == 1 && !r.guided && !r.once {
			s.drafting = append(s.drafting, r)
		}
	}
	left := min(s.budget, s.spareRows)
	if len(s.drafting) == 0 || left < 1 || s.cfg.MaxDrafts < 1 {
		return
	}
	share := max(1, left/len(s.drafting))
	for _, r := range s.drafting {
		most := s.maxDrafts(r, min(share, left, s.cfg.MaxDrafts))
		s.draftRequests = append(s.draftRequests, DraftRequest{ID: r.id, Tokens: r.tokens, MaxDrafts: max(0, most)})
		left -= max(0, most)
	}
	s.cfg.DraftAll(s.draftRequests)
	for i, r := range s.drafting {
		s.placeDrafts(r, s.draftRequests[i].Tokens, s.draftRequests[i].MaxDrafts)
	}
}

// maxDrafts returns how many of n drafts r may have.
func (s *Scheduler) maxDrafts(r *request, n int) int {
	return min(n, s.budget, s.spareRows, s.cfg.MaxModelLen-len(r.tokens)-1)
}

// placeDrafts places the drafts that follow r's tokens in all, as far as free memory allows.
func (s *Scheduler) placeDrafts(r *request, all []int32, most int) {
	n := len(r.tokens)
	r.tokens = all[:n]
	nDrafts := min(len(all)-n, most)
	end := s.capacity(r)
	for end < n+nDrafts && s.pool.Available()-s.fullTables(r, end) >= s.watermark && s.allocBlocks(r, end) {
		end = s.capacity(r)
	}
	r.drafts = max(0, min(nDrafts, end-n))
	r.uncomputed = min(1, len(all)-n-r.drafts)
	s.budget -= r.drafts
	s.spareRows -= r.drafts
	if r.drafts > 0 {
		s.counters.drafts++
		s.counters.drafted += uint64(r.drafts)
	}
}

// tablesOf returns r's block tables as the batch's Seq has them.
func (s *Scheduler) tablesOf(r *request) [][]kvcache.BlockID {
	at := len(s.views)
	s.views = r.appendTables(s.views)
	return s.views[at:len(s.views):len(s.views)]
}

func (r *request) appendTables(dst [][]kvcache.BlockID) [][]kvcache.BlockID {
	for g := range r.tables {
		dst = append(dst, r.tables[g].blocks)
	}
	return dst
}

// capacity returns how many tokens r's tables have places for, in every group.
func (s *Scheduler) capacity(r *request) int {
	least := len(r.tables[0].blocks) * s.groups[0].BlockTokens
	for g, spec := range s.groups[1:] {
		least = min(least, len(r.tables[g+1].blocks)*spec.BlockTokens)
	}
	return least
}

// fullTables returns how many of r's tables end at token end and need another block.
func (s *Scheduler) fullTables(r *request, end int) (n int) {
	for g, spec := range s.groups {
		if len(r.tables[g].blocks)*spec.BlockTokens == end && !s.moves(r, g) {
			n++
		}
	}
	return n
}

// allocBlocks adds a place to each of r's tables that end at token end, with another block or
// with a state that moves on. It adds to none and returns false if memory does not suffice for all.
func (s *Scheduler) allocBlocks(r *request, end int) bool {
	need := s.fullTables(r, end)
	for s.pool.Available() < need {
		if !s.reclaim(r, need-s.pool.Available()) {
			return false
		}
	}
	for g, spec := range s.groups {
		if t := &r.tables[g]; len(t.blocks)*spec.BlockTokens == end {
			if s.moves(r, g) {
				last := t.blocks[len(t.blocks)-1]
				s.pool.Ref(last)
				t.blocks = append(t.blocks, last)
				continue
			}
			id, ok := s.pool.Alloc()
			if !ok {
				panic("scheduler: pool has fewer blocks than Available returned")
			}
			t.blocks = append(t.blocks, id)
		}
	}
	return true
}

// preempt frees all blocks of r's tables. Hashed blocks stay cached until they are
// evicted; r recomputes the rest. Blocks of a reservation are not in the tables.
func (s *Scheduler) preempt(r *request) {
	s.release(r)
	if s.fault == faultPreemptFreesArriving && r.reservation != nil {
		s.unpin(r.reservation)
		r.reservation.release(s)
		r.reservation.Groups = nil
	}
	if r.state == stateHeld {
		s.counters.reclaimed++
		return
	}
	r.preempted++
	s.counters.preemptions++
	s.batch.Preempted = append(s.batch.Preempted, r.id)
	// A job that was wholly cached may have completed in this very step. It has no
	// KV any more, so that Update must not return it.
	if i := slices.Index(s.batch.Completed, r.id); i >= 0 {
		s.batch.Completed = slices.Delete(s.batch.Completed, i, i+1)
	}
	if r.state == stateRunning {
		s.budget += r.scheduled
		s.spareRows += r.extra
		s.scoreRows += r.scoredRows()
		r.scheduled, r.extra = 0, 0
		s.running = remove(s.running, r)
		s.waiting = insert(s.waiting, r)
		r.state = stateWaiting
	}
}

// admit starts waiting requests that lack at most longest tokens, in rank order
// and none out of turn, while slots and budget last. All of a request's tokens
// must fit in addition to what the running requests still need. If none runs, the
// first one may take all blocks, so that it advances. If before is not nil, only
// requests that rank before it start.
func (s *Scheduler) admit(now time.Duration, longest int, before *request) {
	if s.budget == 0 || len(s.waiting) == 0 || len(s.running) == s.cfg.MaxSeqs {
		return // most steps: return before the loop over running
	}
	claimed := 0 // blocks that running requests need for the tokens they have
	for _, r := range s.running {
		claimed += s.blocksNeeded(r, r.computed)
	}
	for s.budget > 0 && len(s.waiting) > 0 && len(s.running) < s.cfg.MaxSeqs {
		if len(s.batch.Preempted) > 0 {
			return // memory is short, and a preempted request cannot be in this batch twice
		}
		r := s.waiting[0]
		if r.missing() > longest || before != nil && !r.rank.before(before.rank) || len(s.running) > 0 && !s.fits(r, claimed) {
			return
		}
		s.attach(r)
		if r.missing() == 0 {
			s.batch.Completed = append(s.batch.Completed, r.id)
		} else if s.grow(r) == 0 && !(r.sitsOut && r.missing() == 1) {
			return
		}
		s.waiting = remove(s.waiting, r)
		s.running = insert(s.running, r)
		r.state = stateRunning
		if !r.admitted {
			r.admitted = true
			s.counters.admitted++
			s.counters.queueTime += now - r.queuedAt
			s.batch.Admitted = append(s.batch.Admitted, Admission{ID: r.id, Cached: r.computed - r.arrived, Arrived: r.arrived})
		}
		claimed += s.blocksNeeded(r, r.computed)
	}
}

// fits reports whether r's tokens fit above the watermark, in addition to claimed blocks.
func (s *Scheduler) fits(r *request, claimed int) bool {
	n := s.lookup(r)
	need := s.blocksNeeded(r, n)
	if n > r.computed {
		s.eachHit(r, n, func(_, _ int, id kvcache.BlockID) {
			if s.pool.Info(id).Reusable {
				need++ // cached and unreferenced: a reference makes one less available
			}
		})
	}
	return s.pool.Available()-claimed-need >= s.watermark
}

// Update ends the step of batch b. Its tokens are computed, results (one per Seq
// with Sample, in order) are appended, and complete blocks enter the prefix cache.
// It returns the requests that left: finished ones, those that reached
// MaxModelLen, and ComputeOnly ones that have all their KV. Requests that were
// aborted during the step are not listed and their results are ignored. The
// slice is valid until the next Update.
func (s *Scheduler) Update(b Batch, results []Result) (done []RequestID) {
	if !s.stepping || len(b.Seqs)+len(b.Completed) != len(s.inStep) {
		panic(fmt.Sprintf("scheduler: Update of a batch of %d, the step has %d", len(b.Seqs)+len(b.Completed), len(s.inStep)))
	}
	s.done = s.done[:0]
	s.freeDuplicates()
	used := 0 // results so far
	for _, r := range s.inStep {
		drafted := r.tokens[len(r.tokens) : len(r.tokens)+r.drafts+r.uncomputed]
		drafts := drafted[:r.drafts]
		r.computed += r.scheduled
		r.scored = max(r.scored, min(r.computed, r.score))
		r.scheduled, r.drafts, r.uncomputed, r.extra, r.inStep = 0, 0, 0, 0, false
		finished := r.computeOnly && r.missing() == 0
		ahead := r.advance()
		if r.samples {
			if used == len(results) {
				panic(fmt.Sprintf("scheduler: Update with %d results, request %d has none", len(results), r.id))
			}
			result := results[used]
			used++
			if r.state != stateGone {
				s.learn(r, drafted, result.Tokens)
				s.extend(r, drafts, result.Tokens)
				finished = result.Finished || r.once || len(r.tokens) >= s.cfg.MaxModelLen
			} else if ahead {
				s.extend(r, drafts, result.Tokens) // the step ahead computes it
			}
		}
		if len(drafts) > 0 {
			s.freeRejected(r)
		}
		s.store(r)
		s.freeOutsideWindow(r)
		ahead = ahead && s.fault != faultAheadFrees
		if finished && r.state != stateGone {
			s.remove(r)
			s.done = append(s.done, r.id)
		}
		if r.state == stateGone && !ahead {
			s.release(r)
		}
	}
	if used != len(results) {
		panic(fmt.Sprintf("scheduler: Update with %d results, the batch samples %d", len(results), used))
	}
	s.advance()
	return s.done
}

// learn updates r's credit by what the model sampled where tokens were drafted. An
// accepted draft adds one, a rejected one halves it. The draft that the step did
// not compute counts as well, so that a request without credit gains some once its
// text repeats itself. The bound keeps all drafts of a long quote after a single
// rejected one.
func (s *Scheduler) learn(r *request, drafts, sampled []int32) {
	for i := range min(len(drafts), len(sampled)) {
		if drafts[i] == sampled[i] {
			r.credit = min(r.credit+1, 2*s.cfg.MaxDrafts)
		} else {
			r.credit /= 2
		}
	}
}

// extend appends the sampled tokens. The KV of accepted drafts is kept.
func (s *Scheduler) extend(r *request, drafts, sampled []int32) {
	kept := len(sampled) - 1
	if kept < 0 || kept > len(drafts) || !slices.Equal(sampled[:kept], drafts[:kept]) {
		panic(fmt.Sprintf("scheduler: Update of request %d with %v after drafts %v", r.id, sampled, drafts))
	}
	for i := range kept {
		s.counters.accepted[i]++
	}
	r.tokens = append(r.tokens, sampled...)
	r.computed += kept
	if s.fault == faultDraftsKept && kept < len(drafts) {
		r.computed++
	}
}

// freeRejected frees the blocks of rejected drafts.
func (s *Scheduler) freeRejected(r *request) {
	for g, spec := range s.groups {
		t, need := &r.tables[g], spec.End(r.computed)
		s.unref(t.blocks[need:])
		t.blocks = t.blocks[:need]
	}
}

// Discard ends the step of batch b as failed, together with the step ahead. What
// the step wrote is not trusted: no block enters the prefix cache, and every
// request in it leaves. It returns the requests that had not been aborted before.
// The slice is valid until the next Update or Discard.
func (s *Scheduler) Discard(b Batch) (gone []RequestID) {
	if !s.stepping || len(b.Seqs)+len(b.Completed) != len(s.inStep) {
		panic(fmt.Sprintf("scheduler: Discard of a batch of %d, the step has %d", len(b.Seqs)+len(b.Completed), len(s.inStep)))
	}
	s.stepping = false
	s.done = s.done[:0]
	for _, r := range s.inStep {
		r.scheduled, r.drafts, r.uncomputed, r.extra, r.inStep, r.ahead = 0, 0, 0, 0, false, false
		if r.state != stateGone {
			s.remove(r)
			s.done = append(s.done, r.id)
		}
		s.release(r)
	}
	s.next.inStep = s.next.inStep[:0] // all of them were in b
	s.freeDuplicates()
	return s.done
}
