// Package lease decides which writes may land in a reader's pages, and when those pages belong to
// their owner again.
//
// A reader grants a lease over a list of pages. A piece is a pair (region, index): page list[index]
// of one region. A lease expects every piece exactly once. Runs of pages may exist in the first few
// regions only. Before the reader reads a byte from a connection, it calls Admit (once per frame:
// which pieces may land, and in which pages) and BeginRead (before each read into the pages: is the
// lease still live). EndRead reports the landed pieces. A lease that ends during a read is
// quarantined, and released by the last EndRead:
//
//	Free → Granted → Arriving → Complete              every piece landed and matched
//	          └─────────┴────→ Quarantined → Released ended: expired, cancelled, aborted, broken
//	          └─────────┴──────────────────→ Released the same with no read in progress
//
// Complete and Released slots wait for Free, so that a slot is not granted again before its owner
// has been notified. A lease is named by (epoch, slot, generation). The epoch is random for each
// process start, and the generation grows each time the slot is granted. So a frame of an earlier
// lease is always recognised.
//
// Invariant: a page belongs to at most one lease that is not Complete, Released or Free, and
// BeginRead succeeds for that lease only. Once a lease is Complete or Released, no read into its
// pages is in progress and none can begin.
//
// The package does not read clocks, sockets or memory. Time is a duration since a fixed start, and
// the caller locks. It does not compare checksums: the caller does not report a piece that did not
// match as landed. locks. It does not compare checksums; a piece that did not match is simply never
// reported as landed.
package lease

import (
	"errors"
	"fmt"
	"math"
	"time"
)

var (
	ErrFull     = errors.New("lease: every slot is taken")
	ErrPageBusy = errors.New("lease: page already under a lease")
	ErrPages    = errors.New("lease: bad page list")
	ErrDuration = errors.New("lease: duration is not positive")
)

// Key identifies a lease. No two leases of any process have the same key.
type Key struct {
	Epoch uint64 // of the reader, random per process start
	Slot  uint32 // in the reader's table
	Gen   uint32 // grows each time the slot is granted; 0 is never granted
}

// String returns the key as logs and errors show it.
func (k Key) String() string { return fmt.Sprintf("%016x/%d.%d", k.Epoch, k.Slot, k.Gen) }

// State is the state of a lease.
type State uint8

const (
	Free        State = iota // the slot holds no lease
	Granted                  // no piece has been admitted
	Arriving                 // at least one piece was admitted
	Complete                 // every piece landed; the pages are the owner's
	Quarantined              // ended with a read in progress, or unfenced; the pages may still be written
	Released                 // ended and fenced; the pages are the owner's
	nStates
)

func (s State) String() string {
	return [...]string{"free", "granted", "arriving", "complete", "quarantined", "released"}[s]
}

// live reports whether writes may still land.
func (s State) live() bool { return s == Granted || s == Arriving }

// Verdict is the result of Admit.
type Verdict uint8

const (
	Admitted Verdict = iota // pieces with a page may land, those with NoPage may not
	Stale                   // not a live lease of this epoch and generation, or another writer's: discard the frame
	Invalid                 // the lease is live but the frame names a piece it does not have
)

// NoPage marks a piece that must not land: it was admitted before.
const NoPage = int32(-1)

// Options size a table.
type Options struct {
	Epoch      uint64        // of this process
	Regions    int           // regions each page list applies to
	Pages      int           // pages per region
	MaxLeases  int           // slots; Grant fails beyond
	Quarantine time.Duration // how long a quarantined lease may wait for its reads before Expire reports it as overdue
}

// Counts are totals since the table's creation, and the number of leases in each state.
type Counts struct {
	Granted         uint64 // leases ever granted
	Completed       uint64 // of these, complete
	Ended           uint64 // of these, ended before completion
	Expired         uint64 // of the ended, by silence
	Quarantines     uint64 // of the ended, with a read in progress
	StaleFrames     uint64 // frames refused by Admit, and reads refused by BeginRead
	StalePieces     uint64 // pieces in those
	DuplicatePieces uint64 // pieces of a live lease that had been admitted before
	ByState         [nStates]int
}

// Run is a number of consecutive pages of a lease that have pieces in the first Regions regions
// only.
type Run struct{ Pages, Regions int }

type slot struct {
	gen      uint32
	state    State
	overdue  bool          // Expire has reported this quarantine
	writer   uint64        // the only session that may write; 0 until the first one tries
	pages    []int32       // [index] page
	runs     []Run         // of pages, in order
	nPieces  int           // expected
	claimed  bitset        // [region*len(pages)+index] admitted once
	landed   bitset        // same shape; subset of claimed
	nLanded  int           // bits set in landed
	nReads   int           // reads into the pages in progress
	open     bool          // the writer may write to the pages by itself
	duration time.Duration // silence after which the lease expires
	deadline time.Duration // live: when it expires; quarantined: when it is overdue
	progress uint64        // highest that the writer has reported
}

// Table holds a reader's leases. It is not safe for concurrent use.
type Table struct {
	o      Options
	slots  []slot
	free   []uint32 // slots to grant again, last freed first
	owner  []uint32 // [page] slot+1 of the lease that holds it, or 0
	counts Counts
}

// New returns an empty table.
func New(o Options) *Table {
	return &Table{o: o, owner: make([]uint32, o.Pages)}
}

// Grant leases pages to the writer that presents the returned key. The lease expires after duration
// without progress. The table keeps pages. Runs, if any, cover them in order; without runs each
// page has a piece in every region.
func (t *Table) Grant(now time.Duration, pages []int32, duration time.Duration, runs ...Run) (Key, error) {
	if len(runs) == 0 {
		runs = []Run{{len(pages), t.o.Regions}}
	}
	if duration <= 0 {
		return Key{}, fmt.Errorf("%w: %v", ErrDuration, duration)
	}
	if len(pages) == 0 || len(pages) > t.o.Pages {
		return Key{}, fmt.Errorf("%w: %d pages of %d", ErrPages, len(pages), t.o.Pages)
	}
	nPieces, err := t.pieces(len(pages), runs)
	if err != nil {
		return Key{}, err
	}
	i, err := t.takeSlot()
	if err != nil {
		return Key{}, err
	}
	for n, p := range pages {
		if p >= 0 && int(p) < t.o.Pages && t.owner[p] == 0 {
			t.owner[p] = i + 1
			continue
		}
		for _, q := range pages[:n] {
			t.owner[q] = 0
		}
		t.free = append(t.free, i)
		if p < 0 || int(p) >= t.o.Pages {
			return Key{}, fmt.Errorf("%w: page %d of %d", ErrPages, p, t.o.Pages)
		}
		return Key{}, fmt.Errorf("%w: page %d", ErrPageBusy, p)
	}
	s := &t.slots[i]
	nBits := len(pages) * t.o.Regions
	*s = slot{
		gen: s.gen + 1, state: Granted, pages: pages, runs: runs, nPieces: nPieces,
		claimed: newBitset(nBits), landed: newBitset(nBits),
		duration: duration, deadline: now + duration,
	}
	t.counts.Granted++
	return Key{t.o.Epoch, i, s.gen}, nil
}

// pieces returns the number of pieces of a lease whose runs must cover its pages.
func (t *Table) pieces(nPages int, runs []Run) (n int, err error) {
	left := nPages
	for _, r := range runs {
		if r.Pages < 1 || r.Regions < 1 || r.Regions > t.o.Regions || r.Pages > left {
			return 0, fmt.Errorf("%w: runs %v of %d pages in %d regions", ErrPages, runs, nPages, t.o.Regions)
		}
		left -= r.Pages
		n += r.Pages * r.Regions
	}
	if left != 0 {
		return 0, fmt.Errorf("%w: runs %v of %d pages", ErrPages, runs, nPages)
	}
	return n, nil
}

// regions returns the number of regions in which the page at an index has pieces.
func (s *slot) regions(index uint32) uint32 {
	for _, r := range s.runs {
		if int(index) < r.Pages {
			return uint32(r.Regions)
		}
		index -= uint32(r.Pages)
	}
	return 0
}

// takeSlot returns a free slot. It retires slots whose generation is exhausted.
func (t *Table) takeSlot() (uint32, error) {
	for len(t.free) > 0 {
		i := t.free[len(t.free)-1]
		t.free = t.free[:len(t.free)-1]
		if t.slots[i].gen < math.MaxUint32 {
			return i, nil
		}
	}
	if len(t.slots) >= t.o.MaxLeases {
		return 0, fmt.Errorf("%w: %d", ErrFull, t.o.MaxLeases)
	}
	t.slots = append(t.slots, slot{})
	return uint32(len(t.slots) - 1), nil
}

// find returns the slot of k if k is its current lease.
func (t *Table) find(k Key) *slot {
	if k.Epoch != t.o.Epoch || int(k.Slot) >= len(t.slots) || k.Gen == 0 {
		return nil
	}
	if s := &t.slots[k.Slot]; s.gen == k.Gen && s.state != Free {
		return s
	}
	return nil
}

// live returns the slot of k if writer may write under it. The first writer that asks gets the
// lease.
func (t *Table) live(k Key, writer uint64) *slot {
	s := t.find(k)
	if s == nil || !s.state.live() || (s.writer != 0 && s.writer != writer) {
		return nil
	}
	s.writer = writer
	return s
}

// Renew moves the expiry of a live lease if progress exceeds the writer's earlier reports. It
// returns whether the lease is live.
func (t *Table) Renew(now time.Duration, k Key, writer, progress uint64) bool {
	s := t.live(k, writer)
	if s == nil {
		return false
	}
	if progress > s.progress {
		s.progress = progress
		s.deadline = now + s.duration
	}
	return true
}

// Admit decides which of a frame's pieces of one region may land, and stores their pages in dst,
// which is as long as index. A piece is admitted once: a repetition gets NoPage.
func (t *Table) Admit(k Key, writer uint64, region uint32, index []uint32, dst []int32) Verdict {
	s := t.live(k, writer)
	if s == nil {
		t.counts.StaleFrames++
		t.counts.StalePieces += uint64(len(index))
		return Stale
	}
	if region >= uint32(t.o.Regions) {
		return Invalid
	}
	for _, i := range index {
		if i >= uint32(len(s.pages)) || region >= s.regions(i) {
			return Invalid
		}
	}
	s.state = Arriving
	for n, i := range index {
		dst[n] = s.pages[i]
		if !s.claimed.set(int(region)*len(s.pages) + int(i)) {
			dst[n] = NoPage
			t.counts.DuplicatePieces++
		}
	}
	return Admitted
}

// Permit lets a live lease's writer write to its pages by itself, without BeginRead. From then on,
// a lease that ends is quarantined until Fence. Permit returns whether the lease is live.
func (t *Table) Permit(k Key) bool {
	s := t.find(k)
	if s == nil || !s.state.live() {
		return false
	}
	s.open = true
	return true
}

// Fence records that none of the writes that Permit allowed can land any more. It returns whether
// this released the lease.
func (t *Table) Fence(k Key) (released bool) {
	s := t.find(k)
	if s == nil || !s.open {
		return false
	}
	s.open = false
	if s.state != Quarantined || s.nReads > 0 {
		return false
	}
	t.release(s, Released)
	return true
}

// BeginRead begins a read into pages that Admit returned for k and that have not landed; EndRead
// must follow. False means that the lease has ended: nothing may be read into its pages, and the
// frame's nPieces remaining pieces count as stale.
func (t *Table) BeginRead(k Key, nPieces int) bool {
	s := t.find(k)
	if s == nil || s.state != Arriving {
		t.counts.StaleFrames++
		t.counts.StalePieces += uint64(nPieces)
		return false
	}
	s.nReads++
	return true
}

// EndRead ends a read and reports the pieces that are now complete and matched; they renew the
// lease. It returns the lease's state. Exactly one EndRead returns Complete or Released.
// Quarantined means that other reads are in progress.
func (t *Table) EndRead(now time.Duration, k Key, region uint32, landed []uint32) State {
	s := t.find(k)
	if s == nil || s.nReads == 0 {
		panic(fmt.Sprintf("lease: EndRead of %v without BeginRead", k))
	}
	s.nReads--
	if s.state == Quarantined {
		if s.nReads == 0 && !s.open {
			t.release(s, Released)
		}
		return s.state
	}
	for _, i := range landed {
		bit := int(region)*len(s.pages) + int(i)
		if !s.claimed.has(bit) || !s.landed.set(bit) {
			panic(fmt.Sprintf("lease: piece %d.%d of %v landed without admission or twice", region, i, k))
		}
		s.nLanded++
		s.deadline = now + s.duration
	}
	if s.nLanded == s.nPieces {
		t.counts.Completed++
		t.release(s, Complete)
	}
	return s.state
}

// End ends a live lease. ended is false if k was not live; released reports that its pages are the
// owner's at once.
func (t *Table) End(now time.Duration, k Key) (ended, released bool) {
	s := t.find(k)
	if s == nil || !s.state.live() {
		return false, false
	}
	t.counts.Ended++
	if s.nReads == 0 && !s.open {
		t.release(s, Released)
		return true, true
	}
	t.counts.Quarantines++
	s.state = Quarantined
	s.deadline = now + t.o.Quarantine
	return true, false
}

// release returns the pages to their owner.
func (t *Table) release(s *slot, to State) {
	for _, p := range s.pages {
		t.owner[p] = 0
	}
	s.state, s.open = to, false
	s.pages, s.runs, s.claimed, s.landed = nil, nil, nil, nil
}

// Free makes the slot of a Complete or Released lease grantable again.
func (t *Table) Free(k Key) {
	s := t.find(k)
	if s == nil || (s.state != Complete && s.state != Released) {
		panic(fmt.Sprintf("lease: Free of %v, which is not over", k))
	}
	s.state = Free
	t.free = append(t.free, k.Slot)
}

// Expiry is a lease that Expire ended.
type Expiry struct {
	Key      Key
	Released bool // otherwise quarantined
}

// Expire ends the live leases whose deadline has passed. It also returns the quarantined leases,
// each once, whose reads did not end within Options.Quarantine: the caller must close their
// connections.
func (t *Table) Expire(now time.Duration) (expired []Expiry, overdue []Key) {
	for i := range t.slots {
		s := &t.slots[i]
		k := Key{t.o.Epoch, uint32(i), s.gen}
		switch {
		case s.state.live() && s.deadline <= now:
			_, released := t.End(now, k)
			t.counts.Expired++
			expired = append(expired, Expiry{k, released})
		case s.state == Quarantined && !s.overdue && s.deadline <= now:
			s.overdue = true
			overdue = append(overdue, k)
		}
	}
	return expired, overdue
}

// NextDeadline returns the next time at which Expire has work if nothing else happens.
func (t *Table) NextDeadline() (at time.Duration, ok bool) {
	for i := range t.slots {
		s := &t.slots[i]
		if !s.state.live() && (s.state != Quarantined || s.overdue) {
			continue
		}
		if !ok || s.deadline < at {
			at, ok = s.deadline, true
		}
	}
	return at, ok
}

// State returns the state of k: Free if it has been freed, or was never granted.
func (t *Table) State(k Key) State {
	if s := t.find(k); s != nil {
		return s.state
	}
	return Free
}

// Counts returns the totals.
func (t *Table) Counts() Counts {
	c := t.counts
	for i := range t.slots {
		c.ByState[t.slots[i].state]++
	}
	return c
}
