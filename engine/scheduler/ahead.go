package scheduler

import "github.com/tandem-serving/tandem/engine/kvcache"

// Unknown replaces a token in a batch that the running step samples.
const Unknown = -1

// Next is what is known of a request before its running step has ended.
type Next uint8

// Values that the function of Ahead returns.
const (
	Continues Next = iota // unless the token that is being sampled ends it
	Ends                  // that token is its last, whatever it is
	Waits                 // its next step cannot begin before that token is known
)

// ahead is a step that the device has received while another one runs.
type ahead struct {
	inStep []*request
	batch  Batch
	views  [][]kvcache.BlockID
}

var unknown = []int32{Unknown}

// Ahead returns the batch that follows the running one before the tokens of the
// running one are known. Each of its requests, in the running step's order,
// computes the Unknown token that the running step samples for it. Update then
// ends the running step, and a second Update ends this one. A request that turns
// out to be finished, or is aborted, keeps its row in this step and its blocks
// until then; its result is ignored.
//
// It returns false and changes nothing if the next step could do anything but
// decode: a request waits and may run, has a chunk to compute, has drafts or rows
// to score, must wait, or memory is short. So it preempts no request, and the
// step after it has the input that it would have had, one step later.
func (s *Scheduler) Ahead(next func(RequestID) Next) (Batch, bool) {
	if !s.stepping || len(s.next.inStep) > 0 || s.cfg.Draft != nil || s.cfg.DraftAll != nil || len(s.batch.Completed) > 0 ||
		len(s.waiting) > 0 && len(s.running) < s.cfg.MaxSeqs {
		return Batch{}, false
	}
	inStep, need := s.next.inStep[:0], 0
	for _, r := range s.running {
		if !r.inStep || !r.samples || r.extra > 0 {
			return Batch{}, false
		}
	}
	for _, r := range s.inStep {
		if r.state == stateGone {
			continue
		}
		if r.state != stateRunning {
			return Batch{}, false
		}
		switch n := next(r.id); {
		case n == Waits:
			return Batch{}, false
		case n == Ends || r.once || len(r.tokens)+1 >= s.cfg.MaxModelLen:
			continue
		}
		inStep = append(inStep, r)
		need += s.fullTables(r, len(r.tokens))
	}
	if len(inStep) == 0 || s.pool.Available()-need < s.watermark {
		return Batch{}, false
	}
	a := &s.next
	a.inStep, a.views = inStep, a.views[:0]
	a.batch = Batch{Seqs: a.batch.Seqs[:0], Tokens: len(inStep)}
	for _, r := range inStep {
		if s.capacity(r) == len(r.tokens) && !s.allocBlocks(r, len(r.tokens)) {
			panic("scheduler: pool has fewer blocks than Available returned")
		}
		r.ahead = true
	}
	for _, r := range inStep {
		at := len(a.views)
		a.views = r.appendTables(a.views)
		a.batch.Seqs = append(a.batch.Seqs, Seq{ID: r.id, Start: len(r.tokens), Tokens: unknown, Sample: true})
		a.batch.Seqs[len(a.batch.Seqs)-1].Tables = a.views[at:len(a.views):len(a.views)]
	}
	return a.batch, true
}

// advance makes the step ahead the running one, if there is one.
func (s *Scheduler) advance() {
	if s.stepping = len(s.next.inStep) > 0; !s.stepping {
		return
	}
	s.inStep, s.next.inStep = s.next.inStep, s.inStep[:0]
	s.batch, s.next.batch = s.next.batch, s.batch
	s.views, s.next.views = s.next.views, s.views
}

// advance moves r from the step ahead to the running step. It returns false if r is not in the
// step ahead.
func (r *request) advance() bool {
	if !r.ahead {
		return false
	}
	r.ahead, r.inStep, r.scheduled = false, true, 1
	return true
}

// freeDuplicates frees the duplicate blocks that the ended step might have read.
func (s *Scheduler) freeDuplicates() {
	s.unref(s.duplicates)
	s.duplicates = s.duplicates[:0]
}
