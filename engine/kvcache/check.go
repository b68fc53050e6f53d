package kvcache

import (
	"errors"
	"fmt"
)

// ErrBroken means that a conservation law of the pool does not hold.
var ErrBroken = errors.New("kvcache: pool is inconsistent")

// Check verifies the pool's conservation laws in time proportional to its size.
// Every block is in the list that its counts determine. Every hashed block is in the
// index exactly once, and no two hold the same content.
func (p *Pool) Check() error {
	if err := p.checkLists(); err != nil {
		return err
	}
	return p.checkIndex()
}

func (p *Pool) checkLists() error {
	var counts [nStates]int
	var arriving, leaving int
	for i := range p.blocks {
		b := &p.blocks[i]
		counts[b.state]++
		if b.pinIn > 0 {
			arriving++
		}
		if b.pinOut > 0 {
			leaving++
		}
		want := stateFree
		switch {
		case b.refs > 0:
			want = stateUsed
		case b.pinIn > 0 || b.pinOut > 0:
			want = statePinned
		case b.hashed && b.hot && p.maxHot > 0:
			want = stateHot
		case b.hashed:
			want = stateCached
		}
		if b.hot && !b.hashed {
			return fmt.Errorf("%w: block %d is hot and holds nothing", ErrBroken, i)
		}
		if b.refs < 0 || b.pinIn < 0 || b.pinOut < 0 || b.state != want {
			return fmt.Errorf("%w: block %d is in state %d, want %d (references %d, pins in %d, out %d, hashed %v)",
				ErrBroken, i, b.state, want, b.refs, b.pinIn, b.pinOut, b.hashed)
		}
		if b.hashed && b.pinIn > 0 {
			return fmt.Errorf("%w: block %d is in the prefix cache while the network may write it", ErrBroken, i)
		}
	}
	for i, b := range p.blocks[p.fresh:] {
		if b != (block{}) {
			return fmt.Errorf("%w: block %d was never allocated and is %+v", ErrBroken, int(p.fresh)+i, b)
		}
	}
	if counts[stateHot] > p.maxHot {
		return fmt.Errorf("%w: %d blocks are hot, at most %d", ErrBroken, counts[stateHot], p.maxHot)
	}
	if counts != p.counts || arriving != p.arriving || leaving != p.leaving {
		return fmt.Errorf("%w: counted %v, %d arriving, %d leaving; kept %v, %d, %d",
			ErrBroken, counts, arriving, leaving, p.counts, p.arriving, p.leaving)
	}
	for _, s := range [...]state{stateFree, stateCached, stateHot} {
		n, prev := 0, NoBlock
		for id := p.lists[s].head; id != NoBlock; id = p.blocks[id].next {
			if b := &p.blocks[id]; b.state != s || b.prev != prev || n >= counts[s] {
				return fmt.Errorf("%w: list %d at block %d: state %d, previous %d, want %d",
					ErrBroken, s, id, b.state, b.prev, prev)
			}
			prev = id
			n++
		}
		if s == stateFree {
			n += len(p.blocks) - int(p.fresh)
		}
		if n != counts[s] || p.lists[s].tail != prev {
			return fmt.Errorf("%w: list %d has %d blocks and ends at %d, want %d and %d",
				ErrBroken, s, n, p.lists[s].tail, counts[s], prev)
		}
	}
	return nil
}

func (p *Pool) checkIndex() error {
	type name struct {
		group  uint8
		digest digest
	}
	indexed, hashed := 0, 0
	for i := range p.blocks {
		if p.blocks[i].hashed {
			hashed++
		}
	}
	names := make(map[name]BlockID, hashed)
	for i := range p.index.slots {
		at := uint32(i)
		s := p.index.slots[at]
		if s.block == 0 {
			continue
		}
		id := s.block - 1
		b, c := &p.blocks[id], &p.contents[id]
		if !b.hashed || int(b.group) >= len(p.groups) || s.tag != tagOf(int(b.group), c.hash) {
			return fmt.Errorf("%w: block %d in slot %d has hashed %v, group %d, hash %x", ErrBroken, id, i, b.hashed, b.group, c.hash)
		}
		for home := p.index.home(s.tag); home != at; home = p.index.after(home) {
			if p.index.slots[home].block == 0 {
				return fmt.Errorf("%w: block %d in slot %d is not found, because slot %d is empty", ErrBroken, id, i, home)
			}
		}
		indexed++
		n := name{b.group, c.digest}
		if other, twice := names[n]; twice {
			return fmt.Errorf("%w: blocks %d and %d of group %d have the same content", ErrBroken, id, other, b.group)
		}
		names[n] = id
	}
	if indexed != hashed {
		return fmt.Errorf("%w: %d blocks in the index, %d hashed", ErrBroken, indexed, hashed)
	}
	return nil
}
