package scheduler

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// ReservationID identifies a reservation. IDs are not reused.
type ReservationID uint64

// Reservation is a range of a held request's tokens that another node computes,
// and the blocks that receive their KV.
type Reservation struct {
	ID      ReservationID
	Request RequestID
	From    int // first token; blocks of all groups begin there
	UpTo    int // token after the last one

	// Groups receive what will be read of tokens [From, UpTo), one entry per KV
	// group. They must not be changed. A window may leave out the earlier tokens.
	Groups []Reserved
}

// Reserved is a reservation's blocks of one group.
type Reserved struct {
	First  int // place of the first one
	Blocks []kvcache.BlockID
}

// reservation owns its blocks: one reference each while it is live, and one
// incoming pin each until the lease has ended. They are in no block table, so that
// preemption and Abort of the request cannot free them.
type reservation struct {
	Reservation
	r    *request
	live bool        // not given up
	one  [1]Reserved // of Groups, where one is enough
}

// Places returns the places of a group for tokens [from, upTo) that tokens from
// upTo on can read.
func Places(g kvcache.Group, from, upTo int) (first, end int) {
	return min(max(from/g.BlockTokens, g.First(upTo)), g.End(upTo)), g.End(upTo)
}

// size returns the number of blocks of a reservation.
func (res *Reservation) size() (n int) {
	for _, g := range res.Groups {
		n += len(g.Blocks)
	}
	return n
}

// Reserve gives a held request the blocks for what it lacks of its first upTo
// tokens, at most n-1 of n. From is where its cached prefix ends now. The blocks
// are pinned until Arrived, or until Release after the fenced end of the lease. No
// other request gets them before, whatever happens to this one.
func (s *Scheduler) Reserve(id RequestID, upTo int) (Reservation, error) {
	r, err := s.reservable(id, upTo)
	if err != nil {
		return Reservation{}, err
	}
	return s.reserve(r, upTo)
}

// reservable returns the held request that may reserve blocks up to upTo.
func (s *Scheduler) reservable(id RequestID, upTo int) (*request, error) {
	r, err := s.heldRequest(id, "reserve")
	switch {
	case err != nil:
		return nil, err
	case r.reservation != nil:
		return nil, fmt.Errorf("%w: request %d, reservation %d", ErrReserved, id, r.reservation.ID)
	case upTo < 1 || upTo > len(r.tokens)-1:
		return nil, fmt.Errorf("%w: request %d up to token %d, which is not in 1 to %d", ErrRange, id, upTo, len(r.tokens)-1)
	}
	return r, nil
}

func (s *Scheduler) reserve(r *request, upTo int) (Reservation, error) {
	id := r.id
	s.attach(r)
	from := r.computed
	if from >= upTo {
		return Reservation{}, fmt.Errorf("%w: request %d up to token %d, %d are cached", ErrNothingMissing, id, upTo, from)
	}
	nBlocks := 0
	for _, g := range s.groups {
		first, end := Places(g, from, upTo)
		nBlocks += end - first
	}
	r.reserveBlocks = nBlocks
	if nBlocks > s.maxArriving {
		return Reservation{}, fmt.Errorf("%w: %w: request %d needs %d blocks, at most %d may ever arrive at once",
			ErrNoRoom, ErrNeverFits, id, nBlocks, s.maxArriving)
	}
	if !s.roomFor(nBlocks) {
		return Reservation{}, fmt.Errorf("%w: request %d needs %d blocks; %d of at most %d are arriving, %d are available above a watermark of %d",
			ErrNoRoom, id, nBlocks, s.pool.Usage().Arriving, s.maxArriving, s.pool.Available(), s.watermark)
	}
	s.lastID++
	res := &reservation{
		Reservation: Reservation{ID: s.lastID, Request: id, From: from, UpTo: upTo},
		r:           r,
		live:        true,
	}
	res.Groups = res.one[:0]
	for _, g := range s.groups {
		first, end := Places(g, from, upTo)
		res.Groups = append(res.Groups, Reserved{First: first, Blocks: s.arriving(end - first)})
	}
	r.reservation = res
	s.reservations = append(s.reservations, res)
	if !r.externalCounted {
		r.externalCounted = true
		s.counters.externalQueries += uint64(upTo - from)
	}
	return res.Reservation, nil
}

// roomFor reports whether nBlocks blocks may be reserved now.
func (s *Scheduler) roomFor(nBlocks int) bool {
	return s.pool.Usage().Arriving+nBlocks <= s.maxArriving && s.pool.Available()-nBlocks >= s.watermark
}

// ReserveInTurn is Reserve after the requests that already wait for room. If it
// returns ErrNoRoom without ErrNeverFits, the request waits from now on.
// NextReserved returns its reservation when there is room; StopWaiting ends the
// wait.
func (s *Scheduler) ReserveInTurn(id RequestID, upTo int) (Reservation, error) {
	r, err := s.reservable(id, upTo)
	if err != nil {
		return Reservation{}, err
	}
	if s.roomIndex(r) >= 0 {
		return Reservation{}, fmt.Errorf("%w: request %d waits for room already", ErrReserved, id)
	}
	if n := len(s.roomQueue); n > 0 {
		r.reserveBlocks = 0 // counted when its turn comes
		s.roomQueue = append(s.roomQueue, roomWaiter{r, upTo})
		return Reservation{}, fmt.Errorf("%w: request %d waits behind %d others", ErrNoRoom, id, n)
	}
	res, err := s.reserve(r, upTo)
	if errors.Is(err, ErrNoRoom) && !errors.Is(err, ErrNeverFits) {
		s.roomQueue = append(s.roomQueue, roomWaiter{r, upTo})
	}
	return res, err
}

// NextReserved reserves for the request that has waited longest, if there is room
// for it. It returns false if none waits or there is no room. An error ends the
// wait of that request only. It is cheap while there is no room, so that it may be
// called after each step.
func (s *Scheduler) NextReserved() (id RequestID, res Reservation, err error, ok bool) {
	if len(s.roomQueue) == 0 {
		return 0, Reservation{}, nil, false
	}
	next := s.roomQueue[0]
	r := next.r
	switch {
	case s.byID[r.id] != r || r.state != stateHeld:
		err = fmt.Errorf("%w: request %d proceeded without the reservation", ErrNotHeld, r.id)
	case r.reservation != nil:
		err = fmt.Errorf("%w: request %d, reservation %d", ErrReserved, r.id, r.reservation.ID)
	case !s.roomFor(r.reserveBlocks):
		return 0, Reservation{}, nil, false
	default:
		res, err = s.reserve(r, next.upTo)
		if errors.Is(err, ErrNoRoom) && !errors.Is(err, ErrNeverFits) {
			return 0, Reservation{}, nil, false
		}
	}
	s.roomQueue = slices.Delete(s.roomQueue, 0, 1)
	return r.id, res, err, true
}

// tryReserve reports whether NextReserved would do more than look at the request that has waited
// longest, r.
func (s *Scheduler) tryReserve(r *request) bool {
	return s.byID[r.id] != r || r.state != stateHeld || r.reservation != nil || s.roomFor(r.reserveBlocks)
}

// StopWaiting ends a request's wait for room and reports whether it waited. If
// several requests had the ID in turn, it is the current one, if any.
func (s *Scheduler) StopWaiting(id RequestID) bool {
	r := s.byID[id]
	at := slices.IndexFunc(s.roomQueue, func(a roomWaiter) bool { return a.r == r || r == nil && a.r.id == id })
	if at < 0 {
		return false
	}
	s.roomQueue = slices.Delete(s.roomQueue, at, at+1)
	return true
}

// roomIndex returns a request's index among those that wait for room, or -1.
func (s *Scheduler) roomIndex(r *request) int {
	return slices.IndexFunc(s.roomQueue, func(a roomWaiter) bool { return a.r == r })
}

// roomWaiter is a request that waits for room for its first upTo tokens.
type roomWaiter struct {
	r    *request
	upTo int
}

// arriving allocates n blocks that the network may write.
func (s *Scheduler) arriving(n int) []kvcache.BlockID {
	blocks := make([]kvcache.BlockID, 0, n)
	for range n {
		b, ok := s.pool.Alloc()
		if !ok {
			panic("scheduler: pool has fewer blocks than Available returned")
		}
		s.pool.PinIn(b)
		blocks = append(blocks, b)
	}
	return blocks
}

// Reservation returns a live reservation.
func (s *Scheduler) Reservation(id ReservationID) (Reservation, bool) {
	at, err := s.findReservation(id, "look up")
	if err != nil || !s.reservations[at].live {
		return Reservation{}, false
	}
	return s.reservations[at].Reservation, true
}

// Arrived reports that all bytes of a reservation have landed and are verified.
// Its full blocks enter the prefix cache, and its request may run from UpTo. If
// the request is gone, the blocks stay in the cache until they are evicted.
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
	s.appendArrived(r, res)
	s.store(r)
	s.freeOutsideWindow(r)
	if r.state == stateGone {
		s.release(r)
		return nil
	}
	s.unhold(r)
	return nil
}

// appendArrived appends arrived blocks to r's tables. If the cached prefix has grown
// meanwhile, some of them are not needed. If it was evicted, none can be used.
func (s *Scheduler) appendArrived(r *request, res *reservation) {
	if r.computed < res.From || r.computed >= res.UpTo {
		res.release(s)
		return
	}
	for g := range res.Groups {
		got, t := &res.Groups[g], &r.tables[g]
		drop := min(max(0, len(t.blocks)-got.First), len(got.Blocks))
		s.unref(got.Blocks[:drop])
		for i, id := range got.Blocks[drop:] {
			s.appendBlock(t, got.First+drop+i, id)
		}
	}
	r.arrived = res.UpTo - r.computed
	r.computed = res.UpTo
	if r.state != stateGone {
		s.counters.externalHits += uint64(r.arrived)
	}
}

// release releases the references of a reservation.
func (res *reservation) release(s *Scheduler) {
	for _, g := range res.Groups {
		s.unref(g.Blocks)
	}
}

// Lost gives a transfer up. The request loses the blocks and stays held: it may
// call Reserve again, or Proceed. The blocks stay pinned until Release, because the
// network may still write them.
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

// Release is the fenced end of a lease: nothing writes these blocks any more. A
// live reservation is given up first.
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

// giveUp releases a live reservation's references and keeps its pins.
func (s *Scheduler) giveUp(res *reservation) {
	res.live = false
	res.r.reservation = nil
	res.release(s)
	if s.fault == faultLostFrees {
		s.unpin(res)
		res.Groups = nil
	}
}

func (s *Scheduler) unpin(res *reservation) {
	for _, g := range res.Groups {
		for i := len(g.Blocks) - 1; i >= 0; i-- {
			s.pool.UnpinIn(g.Blocks[i])
		}
	}
}
