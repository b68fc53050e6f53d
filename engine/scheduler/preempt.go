package scheduler

import "math"

// maxCandidates bounds how many requests of a queue are compared, the last ones by
// rank, because weighing one reads its whole tables.
const maxCandidates = 8

// candidate is a request that may be preempted.
type candidate struct {
	level  int // priority: a higher number is preempted first
	tokens int // tokens that it would have to compute again
	blocks int // blocks that it would free
	times  int // times that it was preempted before
}

// cheapest returns the index of the request to preempt so that need blocks become
// free, or -1 if there is none. Of the lowest priority it prefers requests that
// free need blocks alone, and of these the one that loses the least. Each earlier
// preemption doubles a request's loss, so that the same one is not preempted
// repeatedly. The first of equals is returned.
func cheapest(all []candidate, need int) int {
	best, least, enough := -1, math.Inf(1), false
	for i, c := range all {
		if best >= 0 && c.level < all[best].level {
			continue
		}
		if best >= 0 && c.level > all[best].level {
			best, least, enough = -1, math.Inf(1), false
		}
		cost := math.Ldexp(float64(c.tokens), min(c.times, 30))
		if c.blocks < need { // others have to follow: compare the price of a block
			if enough {
				continue
			}
			if c.blocks == 0 {
				cost = (1 + cost) * 1e200 // it frees nothing: only if there is no other
			} else {
				cost /= float64(c.blocks)
			}
		} else if !enough {
			least, enough = math.Inf(1), true
		}
		if cost < least {
			best, least = i, cost
		}
	}
	return best
}

// reclaim preempts a request so that need blocks become free for r. It takes one
// that ranks after r. If there is none, it takes any that waits or is held,
// because that one may wait for room that r has. So the first running request can
// get all but pinned blocks, and always advances.
func (s *Scheduler) reclaim(r *request, need int) bool {
	s.candidates, s.victims = s.candidates[:0], s.victims[:0]
	for i := len(s.running) - 1; i >= 0 && len(s.victims) < maxCandidates && r.rank.before(s.running[i].rank); i-- {
		s.weigh(s.running[i])
	}
	for _, behind := range [...]bool{true, false} {
		for _, queue := range [...][]*request{s.waiting, s.held} {
			for i, n := len(queue)-1, 0; i >= 0 && n < maxCandidates; i-- {
				if q := queue[i]; q != r && q.nBlocks() > 0 && r.rank.before(q.rank) == behind {
					s.weigh(q)
					n++
				}
			}
		}
		if len(s.victims) > 0 {
			break
		}
	}
	victim := 0
	if s.fault == faultPreemptByRank {
		for i, q := range s.victims {
			if s.victims[victim].rank.before(q.rank) {
				victim = i
			}
		}
	} else {
		victim = cheapest(s.candidates, need)
	}
	if victim < 0 || len(s.victims) == 0 {
		return false
	}
	s.preempt(s.victims[victim])
	return true
}

// weigh adds a request to the candidates. Blocks that are shared or pinned by
// transfers free nothing, and the tokens in a leading run of such blocks are not
// lost.
func (s *Scheduler) weigh(q *request) {
	c := candidate{level: q.level, tokens: q.computed, times: q.preempted}
	for g := range q.tables {
		t, kept := &q.tables[g], g == 0 && q.tables[g].gone == 0
		for i := t.gone; i < len(t.blocks); i++ {
			refs := 1 // of this table
			for ; i+1 < len(t.blocks) && t.blocks[i+1] == t.blocks[i]; i++ {
				refs++
			}
			if b := s.pool.Info(t.blocks[i]); b.Refs == refs && b.PinsIn+b.PinsOut == 0 {
				c.blocks++
				kept = false
			} else if kept {
				c.tokens -= s.groups[0].BlockTokens
			}
		}
	}
	c.tokens = max(0, c.tokens)
	s.candidates, s.victims = append(s.candidates, c), append(s.victims, q)
}
