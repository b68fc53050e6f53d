package scheduler

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// ErrBroken means that a conservation law of the scheduler does not hold.
var ErrBroken = errors.New("scheduler: state is inconsistent")

// Check verifies the conservation laws of the scheduler and of the pool. Every
// request is in one queue, in order. A block's references are the tables and live
// reservations that contain it; its incoming pins are the reservations. The
// blocks that a request writes next are its own. The time is proportional to the
// pool and all tables.
func (s *Scheduler) Check() error {
	if err := s.pool.Check(); err != nil {
		return err
	}
	n := s.pool.Usage().Blocks
	owners := owned{refs: make([]int32, n), pinsIn: make([]int32, n)}
	queues := [...][]*request{stateHeld: s.held, stateWaiting: s.waiting, stateRunning: s.running}
	named := 0
	for state, queue := range queues {
		named += len(queue)
		for i, r := range queue {
			if i > 0 && !queue[i-1].rank.before(r.rank) {
				return fmt.Errorf("%w: queue %d is out of order at request %d", ErrBroken, state, r.id)
			}
			if r.state != requestState(state) || s.byID[r.id] != r {
				return fmt.Errorf("%w: request %d is in queue %d with state %d", ErrBroken, r.id, state, r.state)
			}
			if err := s.checkRequest(r, &owners); err != nil {
				return err
			}
		}
	}
	if named != len(s.byID) || len(s.running) > s.cfg.MaxSeqs {
		return fmt.Errorf("%w: %d requests in queues, %d known; %d of at most %d running",
			ErrBroken, named, len(s.byID), len(s.running), s.cfg.MaxSeqs)
	}
	if s.stepping {
		for _, r := range s.inStep {
			if r.state != stateGone {
				continue
			}
			if err := s.checkRequest(r, &owners); err != nil {
				return err
			}
		}
	}
	if err := s.checkReservations(&owners); err != nil {
		return err
	}
	for _, id := range s.duplicates {
		owners.refs[id]++
	}
	for i := range n {
		info := s.pool.Info(kvcache.BlockID(i))
		if info.Refs != int(owners.refs[i]) || info.PinsIn != int(owners.pinsIn[i]) {
			return fmt.Errorf("%w: block %d has %d references and %d incoming pins, its owners make %d and %d",
				ErrBroken, i, info.Refs, info.PinsIn, owners.refs[i], owners.pinsIn[i])
		}
	}
	return nil
}

// owned counts the references and incoming pins of each block by its owners.
type owned struct{ refs, pinsIn []int32 }

func (s *Scheduler) checkRequest(r *request, owners *owned) error {
	end := r.computed + r.scheduled + r.drafts
	switch {
	case r.computed < 0 || end > len(r.tokens)+r.drafts || r.scored > r.score || len(r.tokens) > s.cfg.MaxModelLen:
		return fmt.Errorf("%w: request %d has %d computed, %d scheduled of %d tokens",
			ErrBroken, r.id, r.computed, r.scheduled, len(r.tokens))
	case r.ahead && !(r.inStep && r.samples):
		return fmt.Errorf("%w: request %d is given out ahead, in step %v", ErrBroken, r.id, r.inStep)
	case r.drafts+r.extra > 0 && r.scheduled == 0:
		return fmt.Errorf("%w: request %d has %d drafts and %d more rows with nothing scheduled", ErrBroken, r.id, r.drafts, r.extra)
	case r.scheduled > 0 && !(s.stepping && r.inStep), r.inStep && !s.stepping:
		return fmt.Errorf("%w: request %d has %d tokens scheduled, in step %v", ErrBroken, r.id, r.scheduled, r.inStep)
	case r.reservation != nil && r.state != stateHeld:
		return fmt.Errorf("%w: request %d has reservation %d in state %d", ErrBroken, r.id, r.reservation.ID, r.state)
	}
	for g := range r.tables {
		if err := s.checkTable(r, g, owners); err != nil {
			return err
		}
	}
	return nil
}

// checkTable verifies that a table has exactly the places that its tokens need.
// Places before the window are empty. The others hold blocks up to the end of the
// step: complete blocks are in the cache, and the rest are the request's alone.
func (s *Scheduler) checkTable(r *request, g int, owners *owned) error {
	t, spec, end := &r.tables[g], s.groups[g], r.computed+r.scheduled+r.drafts
	if r.ahead {
		end++
	}
	if len(t.blocks) != spec.End(end) || t.gone != spec.First(r.computed) || t.hashed != max(t.gone, r.computed/spec.BlockTokens) {
		return fmt.Errorf("%w: request %d has in group %d %d places, %d gone, %d hashed, for %d tokens of which %d are computed",
			ErrBroken, r.id, g, len(t.blocks), t.gone, t.hashed, end, r.computed)
	}
	for i, id := range t.blocks {
		if i < t.gone {
			if id != kvcache.NoBlock {
				return fmt.Errorf("%w: request %d keeps block %d at place %d of group %d, before its window", ErrBroken, r.id, id, i, g)
			}
			continue
		}
		owners.refs[id]++
		info := s.pool.Info(id)
		if info.PinsIn > 0 {
			return fmt.Errorf("%w: block %d of request %d has an incoming pin", ErrBroken, id, r.id)
		}
		refs := 1
		if spec.Every > 0 {
			refs = copies(t.blocks[t.gone:], id)
		}
		kept := i < t.hashed && (info.Hashed || s.keeps(r, g, i))
		if info.Hashed != kept || !info.Hashed && info.Refs != refs {
			return fmt.Errorf("%w: block %d (%d of request %d in group %d, %d hashed): hashed %v, %d references",
				ErrBroken, id, i, r.id, g, t.hashed, info.Hashed, info.Refs)
		}
	}
	return nil
}

// copies counts a block in a table.
func copies(blocks []kvcache.BlockID, id kvcache.BlockID) (n int) {
	for _, b := range blocks {
		if b == id {
			n++
		}
	}
	return n
}

func (s *Scheduler) checkReservations(owners *owned) error {
	for i, a := range s.roomQueue {
		if s.roomIndex(a.r) != i {
			return fmt.Errorf("%w: request %d waits for room twice", ErrBroken, a.r.id)
		}
	}
	live := 0
	for i, res := range s.reservations {
		if i > 0 && s.reservations[i-1].ID >= res.ID {
			return fmt.Errorf("%w: reservation %d is out of order", ErrBroken, res.ID)
		}
		if res.live != (res.r.reservation == res) {
			return fmt.Errorf("%w: reservation %d is live %v, request %d has another one", ErrBroken, res.ID, res.live, res.Request)
		}
		for _, g := range res.Groups {
			for _, id := range g.Blocks {
				owners.pinsIn[id]++
				if res.live {
					owners.refs[id]++
				}
			}
		}
		if res.live && res.r.state == stateHeld {
			live++
		}
	}
	for _, r := range s.held {
		if r.reservation != nil {
			live--
		}
	}
	if live != 0 {
		return fmt.Errorf("%w: live reservations and the requests that have one differ by %d", ErrBroken, live)
	}
	return nil
}
