package scheduler

import "time"

// Work is a running or waiting request, as the function of OrderBy sees it.
type Work struct {
	Ticket uint64 // of its Request
	Left   int    // tokens to compute
	r      *request
}

// OrderBy has f rank the requests of each step, instead of their arrival and priority: f
// sorts work, best first. Waiting requests that rank before a running one start before
// that one gets more of the step. It is for nodes that have ComputeOnly requests alone.
// However they are ranked, none that runs gives way, because each starts when all of its
// tokens fit beside what the running ones still need, or alone.
func (s *Scheduler) OrderBy(f func(work []Work)) { s.order = f }

// rerank puts running and waiting requests into the order of OrderBy.
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
