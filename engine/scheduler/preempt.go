package scheduler

import "math"

// maxCandidates bounds how many of a queue are weighed against each other, the
// last ones by rank: their tables are looked through.
const maxCandidates = 8

// candidate is a request that may give way.
type candidate struct {
	level  int // priority: a higher number gives way first
	tokens int // that it would have to compute again
	blocks int // that come free
	times  int // that it gave way before
}

// cheapest says who gives way so that need blocks come free, or -1 for nobody: of
// the lowest priority, among those that free as many or else among all, who loses
// the least. Each time that a request gave way already doubles what it would lose,
// so that the same one is not taken again and again. Of equals the first goes.
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
		if c.blocks < need { // then others have to follow: what counts is the price of a block
			if enough {
				continue
			}
			if c.blocks == 0 {
				cost = (1 + cost) * 1e200 // one that frees nothing goes when there is nobody else
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

// reclaim has a request give its blocks back, so that need come free for r: one
// that ranks behind r, or else any that waits or is held, since they may wait for
// room that r has. So the first of the running requests can take everything but
// pinned blocks, and always gets on.
func (s *Scheduler) reclaim(r *request, need int) bool {
	s.candidates, s.victims = s.candidates[:0], s.victims[:0]
	for i := len(s.running) - 1; i >= 0 && len(s.victims) < maxCandidates && r.rank.before(s.running[i].rank); i-- {
		s.weigh(s.running[i])
	}
	for _, behind := range [...]bool{true, false} {
		for _, queue := range [...][]*request{s.waiting, s.held} {
			for i, n := len(queue)-1, 0; i >= 0 && n < maxCandidates; i-- {
				if q := queue[i]; q != r && q.holds() > 0 && r.rank.before(q.rank) == behind {
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
	if s.broken == faultPreemptByRank {
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

// weigh adds a request to those that may give way. Blocks that others have too, or
// transfers read, stay where they are: they free nothing, and what leads to the
// request's end in them is not lost.
func (s *Scheduler) weigh(q *request) {
	c := candidate{level: q.level, tokens: q.computed, times: q.preempted}
	for g := range q.tables {
		t, kept := &q.tables[g], g == 0 && q.tables[g].gone == 0
		for _, id := range t.blocks[t.gone:] {
			if b := s.pool.Info(id); b.Refs == 1 && b.PinsIn+b.PinsOut == 0 {
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
