package lease

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// modelLease is a lease told in plain maps, slowly.
type modelLease struct {
	key      Key
	pages    []int32
	duration time.Duration
	deadline time.Duration
	progress uint64
	writer   uint64
	state    State
	overdue  bool
	claimed  map[[2]uint32]bool
	landed   map[[2]uint32]bool
	reads    []modelRead
	open     bool // its writer may write by itself
}

type modelRead struct {
	region uint32
	index  []uint32 // claimed for this read
}

// model runs random operations on a table and on plain maps.
type model struct {
	t       *Table
	o       Options
	rng     *rand.Rand
	now     time.Duration
	current map[Key]*modelLease // not Free
	past    []Key               // every key ever granted, and some never
	hits    map[string]int      // how often each path ran
	counts  Counts              // without ByState
}

func TestAgainstModel(t *testing.T) {
	hits := make(map[string]int)
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 0))
		o := Options{Epoch: 1 + rng.Uint64N(1<<40), Regions: 1 + rng.IntN(3), Pages: 1 + rng.IntN(12), MaxLeases: 1 + rng.IntN(5), Quarantine: time.Duration(1 + rng.IntN(50))}
		m := &model{t: New(o), o: o, rng: rng, current: make(map[Key]*modelLease), hits: hits}
		for step := range 400 {
			err := m.step()
			if err == nil {
				err = m.compare()
			}
			if err == nil {
				err = m.t.Check()
			}
			if err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
		}
	}
	for _, path := range []string{"granted", "full", "busy", "bad pages", "admitted", "duplicate", "stale", "invalid", "other writer", "read", "fenced",
		"landed", "complete", "released at once", "released by read", "permitted", "released by fence", "still read", "expired", "overdue", "renewed", "not renewed", "freed"} {
		if hits[path] < 20 {
			t.Errorf("path %q ran %d times, want at least 20", path, hits[path])
		}
	}
}

// pick returns a key to act on: mostly one of now, else an old or an invented one.
func (m *model) pick() (Key, *modelLease) {
	if m.rng.IntN(8) == 0 && len(m.past) > 0 {
		k := m.past[m.rng.IntN(len(m.past))]
		switch m.rng.IntN(4) {
		case 0:
			k.Epoch++
		case 1:
			k.Gen++
		case 2:
			k.Slot += 3
		}
		return k, m.current[k]
	}
	// Random choice over a map would not replay, so keys are taken in the order granted.
	var keys []Key
	for _, k := range m.past {
		if m.current[k] != nil {
			keys = append(keys, k)
		}
	}
	if len(keys) == 0 {
		return Key{Epoch: m.o.Epoch}, nil
	}
	k := keys[m.rng.IntN(len(keys))]
	return k, m.current[k]
}

func (m *model) step() error {
	m.now += time.Duration(m.rng.IntN(4))
	k, l := m.pick()
	switch m.rng.IntN(10) {
	case 0:
		return m.grant()
	case 1:
		return m.renew(k, l)
	case 2, 3:
		return m.admit(k, l)
	case 4, 5, 6:
		if l != nil && len(l.reads) > 0 && (m.rng.IntN(3) > 0) {
			return m.endRead(k, l)
		}
		return nil
	case 7:
		if m.rng.IntN(3) == 0 {
			return m.end(k, l)
		}
		if l != nil && (l.state == Complete || l.state == Released) {
			m.t.Free(k)
			delete(m.current, k)
			m.hits["freed"]++
		}
		return nil
	case 8:
		return m.permit(k, l)
	default:
		return m.expire()
	}
}

// permit lets a writer write by itself, or says that this is over.
func (m *model) permit(k Key, l *modelLease) error {
	if m.rng.IntN(2) == 0 {
		if got := m.t.Permit(k); got != l.isLive() {
			return fmt.Errorf("permitting %v: %t, %+v", k, got, l)
		}
		if l.isLive() {
			l.open = true
			m.hits["permitted"]++
		}
		return nil
	}
	want := l != nil && l.open && l.state == Quarantined && len(l.reads) == 0
	if got := m.t.Fence(k); got != want {
		return fmt.Errorf("fencing %v: %t, want %t, %+v", k, got, want, l)
	}
	if l != nil {
		l.open = false
	}
	if want {
		l.state = Released
		m.hits["released by fence"]++
	}
	return nil
}

func (m *model) grant() error {
	pages := make([]int32, m.rng.IntN(m.o.Pages+1))
	perm := m.rng.Perm(m.o.Pages)
	for i := range pages {
		pages[i] = int32(perm[i])
	}
	var want error
	switch {
	case len(pages) == 0:
		want = ErrPages
	case len(m.current) == m.o.MaxLeases:
		want = ErrFull
	case m.rng.IntN(10) == 0:
		pages[len(pages)-1] = int32(m.o.Pages)
		want = ErrPages
		for _, p := range pages[:len(pages)-1] {
			if m.ownerOf(p) != nil {
				want = ErrPageBusy
			}
		}
	default:
		for _, p := range pages {
			if m.ownerOf(p) != nil {
				want = ErrPageBusy
			}
		}
	}
	d := time.Duration(20 + m.rng.IntN(60))
	k, err := m.t.Grant(m.now, pages, d)
	if !errors.Is(err, want) || (err == nil) != (want == nil) {
		return fmt.Errorf("granting %v: %v, want %v", pages, err, want)
	}
	switch want {
	case nil:
		m.counts.Granted++
		m.hits["granted"]++
		if m.current[k] != nil {
			return fmt.Errorf("key %v granted while in use", k)
		}
		for _, old := range m.past {
			if old == k {
				return fmt.Errorf("key %v granted twice", k)
			}
		}
		m.past = append(m.past, k)
		m.current[k] = &modelLease{key: k, pages: pages, duration: d, deadline: m.now + d, state: Granted,
			claimed: make(map[[2]uint32]bool), landed: make(map[[2]uint32]bool)}
	case ErrFull:
		m.hits["full"]++
	case ErrPageBusy:
		m.hits["busy"]++
	case ErrPages:
		m.hits["bad pages"]++
	}
	return nil
}

// ownerOf returns the lease whose pages p still are.
func (m *model) ownerOf(p int32) *modelLease {
	for _, l := range m.current {
		if l.state == Complete || l.state == Released {
			continue
		}
		for _, q := range l.pages {
			if p == q {
				return l
			}
		}
	}
	return nil
}

func (l *modelLease) isLive() bool { return l != nil && (l.state == Granted || l.state == Arriving) }

// may binds the writer as the table must.
func (l *modelLease) may(writer uint64) bool {
	if !l.isLive() || (l.writer != 0 && l.writer != writer) {
		return false
	}
	l.writer = writer
	return true
}

func (m *model) writer() uint64 { return 1 + uint64(max(m.rng.IntN(12)-10, 0)) }

func (m *model) renew(k Key, l *modelLease) error {
	w, progress := m.writer(), m.rng.Uint64N(20)
	want := l.may(w)
	if got := m.t.Renew(m.now, k, w, progress); got != want {
		return fmt.Errorf("renewing %v: %t, want %t", k, got, want)
	}
	if !want {
		m.hits["not renewed"]++
	} else if progress > l.progress {
		m.hits["renewed"]++
		l.progress, l.deadline = progress, m.now+l.duration
	}
	return nil
}

func (m *model) admit(k Key, l *modelLease) error {
	w, region := m.writer(), uint32(m.rng.IntN(m.o.Regions))
	nPages := 1
	if l != nil {
		nPages = len(l.pages)
	}
	index := make([]uint32, 1+m.rng.IntN(4))
	for i := range index {
		index[i] = uint32(m.rng.IntN(nPages))
	}
	invalid := m.rng.IntN(30) == 0
	if invalid && m.rng.IntN(2) == 0 {
		region = uint32(m.o.Regions)
	} else if invalid {
		index[len(index)-1] = uint32(nPages)
	}
	bound := l.isLive() && l.writer != 0 && l.writer != w
	want := Admitted
	if !l.may(w) {
		want = Stale
	} else if invalid {
		want = Invalid
	}
	dst := make([]int32, len(index))
	if got := m.t.Admit(k, w, region, index, dst); got != want {
		return fmt.Errorf("admitting %v: %v, want %v", k, got, want)
	}
	switch want {
	case Stale:
		m.counts.StaleFrames++
		m.counts.StalePieces += uint64(len(index))
		m.hits["stale"]++
		if bound {
			m.hits["other writer"]++
		}
		return nil
	case Invalid:
		m.hits["invalid"]++
		return nil
	}
	l.state = Arriving
	r := modelRead{region: region}
	for n, i := range index {
		piece := [2]uint32{region, i}
		if l.claimed[piece] {
			m.counts.DuplicatePieces++
			m.hits["duplicate"]++
			if dst[n] != NoPage || dst[n] >= 0 { // a number from 0 is a page
				return fmt.Errorf("piece %v of %v admitted twice", piece, k)
			}
			continue
		}
		l.claimed[piece] = true
		r.index = append(r.index, i)
		if dst[n] != l.pages[i] {
			return fmt.Errorf("piece %v of %v goes to page %d, want %d", piece, k, dst[n], l.pages[i])
		}
	}
	m.hits["admitted"]++
	if len(r.index) == 0 {
		return nil // nothing of it may land, so the reader does not ask
	}
	return m.beginRead(k, l, r)
}

func (m *model) beginRead(k Key, l *modelLease, r modelRead) error {
	if m.rng.IntN(4) == 0 { // the lease ends between header and read
		if err := m.end(k, l); err != nil {
			return err
		}
	}
	want := l.state == Arriving
	if got := m.t.BeginRead(k, len(r.index)); got != want {
		return fmt.Errorf("reading for %v, %v: %t, want %t", k, l.state, got, want)
	}
	if !want {
		m.counts.StaleFrames++
		m.counts.StalePieces += uint64(len(r.index))
		m.hits["fenced"]++
		return nil
	}
	m.hits["read"]++
	l.reads = append(l.reads, r)
	return nil
}

func (m *model) endRead(k Key, l *modelLease) error {
	i := m.rng.IntN(len(l.reads))
	r := l.reads[i]
	l.reads = append(l.reads[:i], l.reads[i+1:]...)
	landed := r.index
	if m.rng.IntN(6) == 0 {
		landed = nil // broken off, or did not match
	}
	if l.isLive() {
		for _, i := range landed {
			l.landed[[2]uint32{r.region, i}] = true
			l.deadline = m.now + l.duration
			m.hits["landed"]++
		}
		if len(l.landed) == m.o.Regions*len(l.pages) {
			l.state, l.open = Complete, false
			m.counts.Completed++
			m.hits["complete"]++
		}
	} else if len(l.reads) == 0 && !l.open {
		l.state = Released
		m.hits["released by read"]++
	} else {
		m.hits["still read"]++
	}
	if got := m.t.EndRead(m.now, k, r.region, landed); got != l.state {
		return fmt.Errorf("read for %v ended: %v, want %v", k, got, l.state)
	}
	return nil
}

func (m *model) end(k Key, l *modelLease) error {
	wantEnded := l.isLive()
	wantReleased := wantEnded && len(l.reads) == 0 && !l.open
	ended, released := m.t.End(m.now, k)
	if ended != wantEnded || released != wantReleased {
		return fmt.Errorf("ending %v: %t, %t, want %t, %t", k, ended, released, wantEnded, wantReleased)
	}
	if wantEnded {
		m.ended(l)
	}
	return nil
}

func (m *model) ended(l *modelLease) {
	m.counts.Ended++
	if len(l.reads) == 0 && !l.open {
		l.state = Released
		m.hits["released at once"]++
		return
	}
	m.counts.Quarantines++
	l.state = Quarantined
	l.deadline = m.now + m.o.Quarantine
}

func (m *model) expire() error {
	var first time.Duration = math.MaxInt64
	for _, l := range m.current {
		if l.isLive() || (l.state == Quarantined && !l.overdue) {
			first = min(first, l.deadline)
		}
	}
	if at, ok := m.t.NextDeadline(); ok != (first != math.MaxInt64) || (ok && at != first) {
		return fmt.Errorf("next deadline %v, %t, want %v", at, ok, first)
	}
	expired, overdue := m.t.Expire(m.now)
	nDue, nOver := 0, 0
	for _, l := range m.current {
		switch {
		case l.deadline > m.now:
		case l.isLive():
			nDue++
		case l.state == Quarantined && !l.overdue:
			nOver++
		}
	}
	if len(expired) != nDue || len(overdue) != nOver {
		return fmt.Errorf("at %v expired %v, overdue %v; want %d and %d", m.now, expired, overdue, nDue, nOver)
	}
	for _, e := range expired {
		l := m.current[e.Key]
		if !l.isLive() || l.deadline > m.now || e.Released != (len(l.reads) == 0 && !l.open) {
			return fmt.Errorf("at %v %v expired, it is %+v", m.now, e, l)
		}
		m.ended(l)
		m.counts.Expired++
		m.hits["expired"]++
	}
	for _, k := range overdue {
		l := m.current[k]
		if l.state != Quarantined || l.overdue || l.deadline > m.now {
			return fmt.Errorf("at %v %v is overdue, it is %+v", m.now, k, l)
		}
		l.overdue = true
		m.hits["overdue"]++
	}
	return nil
}

// compare holds the table's view of every key against the model's.
func (m *model) compare() error {
	for _, k := range m.past {
		want := Free
		if l := m.current[k]; l != nil {
			want = l.state
		}
		if got := m.t.State(k); got != want {
			return fmt.Errorf("%v is %v, want %v", k, got, want)
		}
	}
	want := m.counts
	for _, l := range m.current {
		want.ByState[l.state]++
	}
	want.ByState[Free] = len(m.t.slots) - len(m.current)
	if got := m.t.Counts(); got != want {
		return fmt.Errorf("counts %+v, want %+v", got, want)
	}
	for p := range m.o.Pages {
		l := m.ownerOf(int32(p))
		if owner := m.t.owner[p]; (owner == 0) != (l == nil) || (l != nil && owner != l.key.Slot+1) {
			return fmt.Errorf("page %d belongs to slot %d, want %+v", p, int(owner)-1, l)
		}
	}
	return nil
}

// TestGenerationsEnd proves that a slot is retired rather than granted under a key that was there before.
func TestGenerationsEnd(t *testing.T) {
	tab := New(Options{Epoch: 7, Regions: 1, Pages: 2, MaxLeases: 1, Quarantine: 1})
	k, err := tab.Grant(0, []int32{0}, 10)
	if err != nil {
		t.Fatal(err)
	}
	tab.slots[0].gen = math.MaxUint32
	k.Gen = math.MaxUint32
	tab.End(1, k)
	tab.Free(k)
	if _, err := tab.Grant(2, []int32{1}, 10); !errors.Is(err, ErrFull) {
		t.Fatalf("a slot without generations was granted: %v", err)
	}
	if err := tab.Check(); err != nil {
		t.Fatal(err)
	}
}

// TestGenerationsAreConsecutive proves that a slot serves as many leases as it has generations.
func TestGenerationsAreConsecutive(t *testing.T) {
	tab := New(Options{Epoch: 7, Regions: 1, Pages: 2, MaxLeases: 1, Quarantine: 1})
	for want := uint32(1); want < 5; want++ {
		k, err := tab.Grant(0, []int32{0}, 10)
		if err != nil || k.Gen != want {
			t.Fatalf("%v, %v: want generation %d", k, err, want)
		}
		tab.End(1, k)
		tab.Free(k)
	}
}

// TestGrantOfTooManyPages names the number, not a page that is then granted twice.
func TestGrantOfTooManyPages(t *testing.T) {
	tab := New(Options{Epoch: 7, Regions: 1, Pages: 2, MaxLeases: 1, Quarantine: 1})
	for _, pages := range [][]int32{nil, {0, 1, 0}} {
		if _, err := tab.Grant(0, pages, 10); !errors.Is(err, ErrPages) || !strings.Contains(err.Error(), fmt.Sprintf("%d pages of 2", len(pages))) {
			t.Errorf("%d of 2 pages: %v", len(pages), err)
		}
	}
}

// TestReadsArePaired panics on an EndRead that no BeginRead opened.
func TestReadsArePaired(t *testing.T) {
	tab := New(Options{Epoch: 7, Regions: 1, Pages: 2, MaxLeases: 1, Quarantine: 1})
	k, err := tab.Grant(0, []int32{0, 1}, 10)
	if err != nil {
		t.Fatal(err)
	}
	var dst [1]int32
	if tab.Admit(k, 1, 0, []uint32{0}, dst[:]) != Admitted {
		t.Fatal("not admitted")
	}
	defer func() {
		if text, _ := recover().(string); !strings.Contains(text, "without BeginRead") {
			t.Errorf("EndRead of a read that never began: %q", text)
		}
	}()
	tab.EndRead(1, k, 0, []uint32{0})
}

// TestCheckFindsDamage breaks each conservation law and expects Check to say so.
func TestCheckFindsDamage(t *testing.T) {
	damages := map[string]func(*Table){
		"owner lost":           func(t *Table) { t.owner[1] = 0 },
		"owner invented":       func(t *Table) { t.owner[3] = 1 },
		"owner unknown":        func(t *Table) { t.owner[3] = 9 },
		"landed not claimed":   func(t *Table) { t.slots[0].landed.set(1) },
		"landed miscounted":    func(t *Table) { t.slots[0].nLanded++ },
		"read of a granted":    func(t *Table) { t.slots[0].state = Granted },
		"writes after the end": func(t *Table) { t.release(&t.slots[0], Released); t.slots[0].open = true },
		"quarantine, no read":  func(t *Table) { t.slots[0].state, t.slots[0].nReads = Quarantined, 0 },
		"released holds pages": func(t *Table) { t.slots[0].state, t.slots[0].nReads = Released, 0 },
		"free list":            func(t *Table) { t.free = append(t.free, 0) },
		"free list, used up":   func(t *Table) { t.slots[0].gen = math.MaxUint32; t.free = append(t.free, 0) },
		"grant uncounted":      func(t *Table) { t.counts.Granted++ },
	}
	for name, damage := range damages {
		tab := New(Options{Epoch: 7, Regions: 1, Pages: 4, MaxLeases: 2, Quarantine: 1})
		k, err := tab.Grant(0, []int32{1, 2}, 10)
		if err != nil {
			t.Fatal(err)
		}
		var dst [1]int32
		if tab.Admit(k, 1, 0, []uint32{0}, dst[:]) != Admitted || !tab.BeginRead(k, 1) {
			t.Fatal("not admitted")
		}
		if err := tab.Check(); err != nil {
			t.Fatal(err)
		}
		damage(tab)
		if tab.Check() == nil {
			t.Errorf("%s: Check found nothing", name)
		}
	}
}

// TestNoAllocations holds the path of every frame to it.
func TestNoAllocations(t *testing.T) {
	tab := New(Options{Epoch: 7, Regions: 1000, Pages: 16, MaxLeases: 1, Quarantine: 1})
	pages, index, dst := make([]int32, 16), make([]uint32, 16), make([]int32, 16)
	for i := range pages {
		pages[i], index[i] = int32(i), uint32(i)
	}
	k, err := tab.Grant(0, pages, 1000)
	if err != nil {
		t.Fatal(err)
	}
	region := uint32(0)
	n := testing.AllocsPerRun(100, func() {
		tab.Admit(k, 1, region, index, dst)
		tab.BeginRead(k, 16)
		tab.EndRead(1, k, region, index)
		region++
	})
	if n != 0 {
		t.Errorf("%v allocations for a frame", n)
	}
}
