package scheduler

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// ReservationID names a reservation; IDs are not used twice.
type ReservationID uint64

// Reservation is a range of a held request's tokens that another node computes,
// and the blocks that receive their KV.
type Reservation struct {
	ID      ReservationID
	Request RequestID
	From    int               // first token; a multiple of the block size
	UpTo    int               // token after the last one
	Blocks  []kvcache.BlockID // receive tokens [From, UpTo); not to be changed
}

// reservation owns its blocks, one reference each while it is live and one
// incoming pin each until the lease has ended. They are in no block table, so
// that nothing a request goes through can reach them.
type reservation struct {
	Reservation
	r    *request
	live bool // not given up
}

// Reserve gives a held request the blocks for what it lacks of its first upTo
// tokens, at most n-1 of n. From is where its cached prefix ends now. The blocks
// are pinned: until Arrived, or Release after the lease's fenced end, nobody
// else gets them, whatever happens to the request.
func (s *Scheduler) Reserve(id RequestID, upTo int) (Reservation, error) {
	r, err := s.heldRequest(id, "reserve")
	if err != nil {
		return Reservation{}, err
	}
	if r.reservation != nil {
		return Reservation{}, fmt.Errorf("%w: request %d, reservation %d", ErrReserved, id, r.reservation.ID)
	}
	if upTo < 1 || upTo > len(r.tokens)-1 {
		return Reservation{}, fmt.Errorf("%w: request %d up to token %d, which is not in 1 to %d",
			ErrRange, id, upTo, len(r.tokens)-1)
	}
	s.attach(r)
	from := len(r.table) * s.blockTokens
	if from >= upTo {
		return Reservation{}, fmt.Errorf("%w: request %d up to token %d, %d are cached", ErrNothingMissing, id, upTo, from)
	}
	nBlocks := s.blocksFor(upTo) - len(r.table)
	if nBlocks > s.maxArriving {
		return Reservation{}, fmt.Errorf("%w: %w: request %d needs %d blocks, at most %d may ever arrive at once",
			ErrNoRoom, ErrNeverFits, id, nBlocks, s.maxArriving)
	}
	arriving, available := s.pool.Usage().Arriving, s.pool.Available()
	if arriving+nBlocks > s.maxArriving || available-nBlocks < s.watermark {
		return Reservation{}, fmt.Errorf("%w: request %d needs %d blocks; %d of at most %d are arriving, %d are available above a watermark of %d",
			ErrNoRoom, id, nBlocks, arriving, s.maxArriving, available, s.watermark)
	}
	s.lastID++
	res := &reservation{
		Reservation: Reservation{ID: s.lastID, Request: id, From: from, UpTo: upTo},
		r:           r,
		live:        true,
	}
	for range nBlocks {
		b, ok := s.pool.Alloc()
		if !ok {
			panic(fmt.Sprintf("scheduler: pool has fewer than its %d available blocks", available))
		}
		s.pool.PinIn(b)
		res.Blocks = append(res.Blocks, b)
	}
	r.reservation = res
	s.reservations = append(s.reservations, res)
	if !r.asked {
		r.asked = true
		s.counters.externalQueries += uint64(upTo - from)
	}
	return res.Reservation, nil
}

// Arrived says that all bytes of a reservation have landed and are verified.
// Its full blocks enter the prefix cache and its request may run from UpTo. If
// the request is gone the cache keeps the blocks as long as it can.
func (s *Scheduler) Arrived(id ReservationID) error {
	at, err := s.findReservation(id, "arrived")
	if err != nil {
		return err
	}
	res := s.reservations[at]
	if !res.live {
		return fmt.Errorf("%w: arrived %d of request %d", ErrLost, id, res.Request)
	}
	s.reservations = slices.Delete(s.reservations, at, at+1)
	s.unpin(res)
	r := res.r
	r.reservation = nil
	s.attach(r)
	s.take(r, res)
	s.store(r)
	if r.state == stateGone {
		s.release(r)
		return nil
	}
	s.unhold(r)
	return nil
}

// take appends arrived blocks to r's table. The prefix before them may be
// longer than it was, then some of them are not needed; or it was reclaimed and
// evicted, then none of them can be used.
func (s *Scheduler) take(r *request, res *reservation) {
	drop := len(r.table) - res.From/s.blockTokens
	if drop < 0 || drop > len(res.Blocks) {
		drop = len(res.Blocks)
	}
	s.unref(res.Blocks[:drop])
	if drop < len(res.Blocks) {
		r.table = append(r.table, res.Blocks[drop:]...)
		r.arrived = res.UpTo - r.computed
		r.computed = res.UpTo
		if r.state != stateGone {
			s.counters.externalHits += uint64(r.arrived)
		}
	}
}

// Lost says that a transfer is given up. The request lets go of the blocks and
// stays held: it may Reserve again, or Proceed. The network may still write
// them, so they stay pinned until Release.
func (s *Scheduler) Lost(id ReservationID) error {
	at, err := s.findReservation(id, "lost")
	if err != nil {
		return err
	}
	res := s.reservations[at]
	if !res.live {
		return fmt.Errorf("%w: lost %d of request %d", ErrLost, id, res.Request)
	}
	s.giveUp(res)
	return nil
}

// Release is the fenced end of a lease: nothing will write these blocks any
// more. A live reservation is given up first.
func (s *Scheduler) Release(id ReservationID) error {
	at, err := s.findReservation(id, "release")
	if err != nil {
		return err
	}
	res := s.reservations[at]
	if res.live {
		s.giveUp(res)
	}
	s.reservations = slices.Delete(s.reservations, at, at+1)
	s.unpin(res)
	return nil
}

func (s *Scheduler) findReservation(id ReservationID, tried string) (at int, err error) {
	at, found := slices.BinarySearchFunc(s.reservations, id,
		func(res *reservation, id ReservationID) int { return cmp.Compare(res.ID, id) })
	if !found {
		return 0, fmt.Errorf("%w: %s %d", ErrUnknownReservation, tried, id)
	}
	return at, nil
}

// giveUp takes a live reservation's references; the pins stay.
func (s *Scheduler) giveUp(res *reservation) {
	res.live = false
	res.r.reservation = nil
	s.unref(res.Blocks)
	if s.broken == faultLostFrees {
		s.unpin(res)
		res.Blocks = nil
	}
}

func (s *Scheduler) unpin(res *reservation) {
	for i := len(res.Blocks) - 1; i >= 0; i-- {
		s.pool.UnpinIn(res.Blocks[i])
	}
}
