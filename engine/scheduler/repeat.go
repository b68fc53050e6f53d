package scheduler

import "slices"

// Steady returns how often Repeat may repeat the running step: as long as each of its requests
// decodes one token, no request ends by MaxModelLen or fills a block, NextReserved would change
// nothing, and the next Schedule would return the same requests in the same order. Only steps of
// requests with a Chain are steady.
func (s *Scheduler) Steady() int {
	if !s.stepping || len(s.inStep) == 0 || len(s.inStep) != len(s.running) || len(s.next.inStep)+len(s.duplicates) > 0 || s.order != nil ||
		s.cfg.Draft != nil || s.cfg.DraftAll != nil || s.cfg.Guide != nil || len(s.batch.Completed)+len(s.batch.Preempted) > 0 {
		return 0
	}
	if len(s.roomQueue) > 0 && s.tryReserve(s.roomQueue[0].r) { // Schedule has freed blocks of a held request
		return 0
	}
	n := s.cfg.MaxModelLen
	for i, r := range s.inStep {
		if r != s.running[i] { // it was admitted after requests that rank behind it
			return 0
		}
		if r.state != stateRunning || !r.named || !r.samples || r.scheduled != 1 || r.drafts+r.extra > 0 || r.once || r.sitsOut || r.scored < r.score {
			return 0
		}
		n = min(n, s.cfg.MaxModelLen-len(r.tokens)-1)
		for _, spec := range s.groups {
			if spec.Window > 0 {
				return 0
			}
			n = min(n, spec.BlockTokens-1-r.computed%spec.BlockTokens)
		}
	}
	if len(s.waiting) > 0 && len(s.running) < s.cfg.MaxSeqs && s.budget > 0 && s.fits(s.waiting[0], 0) {
		return 0
	}
	return max(0, n)
}

// Repeat has the effect of n times Update and Schedule, where n is at most Steady. The batch of the
// running step stays valid, with its tokens at later positions.
func (s *Scheduler) Repeat(n int) {
	for i, r := range s.inStep {
		r.computed += n
		r.tokens = slices.Grow(r.tokens, n)[:len(r.tokens)+n]
		s.batch.Seqs[i].Start += n
		s.batch.Seqs[i].Tokens = r.tokens[r.computed : r.computed+1]
	}
}
