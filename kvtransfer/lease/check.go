package lease

import (
	"fmt"
	"math"
	"math/bits"
)

// Check checks the table's conservation laws.
func (t *Table) Check() error {
	nOwned := 0
	for p, o := range t.owner {
		if o == 0 {
			continue
		}
		nOwned++
		if int(o) > len(t.slots) {
			return fmt.Errorf("lease: page %d belongs to slot %d of %d", p, o-1, len(t.slots))
		}
	}
	nHeld, nFree := 0, 0
	for i := range t.slots {
		s := &t.slots[i]
		if err := t.checkSlot(uint32(i), s); err != nil {
			return fmt.Errorf("lease: slot %d (%v): %w", i, s.state, err)
		}
		nHeld += len(s.pages)
		if s.state == Free && s.gen < math.MaxUint32 {
			nFree++
		}
	}
	if nOwned != nHeld {
		return fmt.Errorf("lease: %d pages are owned but leases hold %d", nOwned, nHeld)
	}
	nListed := 0
	for _, i := range t.free {
		if t.slots[i].state != Free {
			return fmt.Errorf("lease: slot %d is on the free list but %v", i, t.slots[i].state)
		}
		if t.slots[i].gen < math.MaxUint32 {
			nListed++
		}
	}
	if nListed != nFree {
		return fmt.Errorf("lease: %d slots are free but %d are listed", nFree, nListed)
	}
	c := t.Counts()
	if live := uint64(c.ByState[Granted] + c.ByState[Arriving]); c.Granted != live+c.Completed+c.Ended {
		return fmt.Errorf("lease: %d granted, but %d live, %d completed, %d ended", c.Granted, live, c.Completed, c.Ended)
	}
	return nil
}

func (t *Table) checkSlot(i uint32, s *slot) error {
	for _, p := range s.pages {
		if t.owner[p] != i+1 {
			return fmt.Errorf("page %d belongs to slot %d", p, int(t.owner[p])-1)
		}
	}
	nLanded := 0
	for w := range s.landed {
		if s.landed[w]&^s.claimed[w] != 0 {
			return fmt.Errorf("a piece landed without admission")
		}
		nLanded += bits.OnesCount64(s.landed[w])
	}
	if s.pages != nil && nLanded != s.nLanded {
		return fmt.Errorf("%d pieces landed but %d counted", nLanded, s.nLanded)
	}
	holds := s.state.live() || s.state == Quarantined
	if holds != (s.pages != nil) {
		return fmt.Errorf("holds %d pages", len(s.pages))
	}
	if s.nReads < 0 || (s.nReads > 0) && s.state != Arriving && s.state != Quarantined {
		return fmt.Errorf("%d reads in progress", s.nReads)
	}
	if s.state == Quarantined && s.nReads == 0 && !s.open {
		return fmt.Errorf("quarantined without a read")
	}
	if s.open && !holds {
		return fmt.Errorf("its writer may write, though it is over")
	}
	if s.state.live() && s.nLanded == s.nPieces {
		return fmt.Errorf("every piece landed but the lease is not complete")
	}
	return nil
}

// bitset is a fixed set of small integers.
type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) has(i int) bool { return b[i/64]&(1<<(i%64)) != 0 }

// set adds i and reports whether it was new.
func (b bitset) set(i int) bool {
	if b.has(i) {
		return false
	}
	b[i/64] |= 1 << (i % 64)
	return true
}
