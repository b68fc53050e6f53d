package scheduler

import "time"

// Work is a running or waiting request, as the function of OrderBy sees it.
type Work struct {
	Ticket uint64 // of its Request
	Left   int    // tokens to compute
	r      *request
}

// OrderBy sets f to rank the requests of each step, instead of their arrival and
// priority: f sorts work, best first. A waiting request that ranks before a running one
// starts before the running one gets more of the step. It is for nodes that only have
// requests with ComputeOnly or Once. No order preempts a running request. A request starts only if
// it is alone, or if all of its tokens fit in addition to what the running ones still
// need.
func (s *Scheduler) OrderBy(f func(work []Work)) { s.order = f }

// rerank sorts running and waiting requests by OrderBy's function.
func (s *Scheduler) rerank() {
	s.work = s.work[:0]
	for _, queue := range [...][]*request{s.running, s.waiting} {
		for _, r := range queue {
			s.work = append(s.work, Work{Ticket: r.ticket, Left: r.missing(), r: r})
		}
	}
	s.order(s.work)
	s.running, s.waiting = s.running[:0], s.waiting[:0]
	for i := range s.work {
		r := s.work[i].r
		r.rank.due = time.Duration(i)
		if r.state == stateRunning {
			s.running = append(s.running, r)
		} else {
			s.waiting = append(s.waiting, r)
		}
	}
	clear(s.work)
}
