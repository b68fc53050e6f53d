package kvcache

import (
	"errors"
	"fmt"
)

// ErrBroken says that a conservation law of the pool does not hold.
var ErrBroken = errors.New("kvcache: pool is inconsistent")

// Check verifies the pool's conservation laws in time proportional to its
// size: every block is in exactly the list that its counts ask for, every hashed
// block is in the index exactly once under the hash of its content, serials are
// unique, and no referenced block has a parent that is gone.
func (p *Pool) Check() error {
	if err := p.checkLists(); err != nil {
		return err
	}
	if err := p.checkIndex(); err != nil {
		return err
	}
	return p.checkChains()
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
		case b.hashed:
			want = stateCached
		}
		if b.refs < 0 || b.pinIn < 0 || b.pinOut < 0 || b.state != want {
			return fmt.Errorf("%w: block %d is in state %d, want %d (references %d, pins in %d, out %d, hashed %v)",
				ErrBroken, i, b.state, want, b.refs, b.pinIn, b.pinOut, b.hashed)
		}
		if b.hashed && b.pinIn > 0 {
			return fmt.Errorf("%w: block %d is in the prefix cache while the network may write it", ErrBroken, i)
		}
	}
	if counts != p.counts || arriving != p.arriving || leaving != p.leaving {
		return fmt.Errorf("%w: counted %v, %d arriving, %d leaving; kept %v, %d, %d",
			ErrBroken, counts, arriving, leaving, p.counts, p.arriving, p.leaving)
	}
	for _, s := range [...]state{stateFree, stateCached} {
		n, prev := 0, NoBlock
		for id := p.lists[s].head; id != NoBlock; id = p.blocks[id].next {
			if b := &p.blocks[id]; b.state != s || b.prev != prev || n >= counts[s] {
				return fmt.Errorf("%w: list %d at block %d: state %d, previous %d, want %d",
					ErrBroken, s, id, b.state, b.prev, prev)
			}
			prev = id
			n++
		}
		if n != counts[s] || p.lists[s].tail != prev {
			return fmt.Errorf("%w: list %d has %d blocks and ends at %d, want %d and %d",
				ErrBroken, s, n, p.lists[s].tail, counts[s], prev)
		}
	}
	return nil
}

func (p *Pool) checkIndex() error {
	indexed, hashed := 0, 0
	for i, id := range p.buckets {
		for ; id != NoBlock; id = p.blocks[id].bucketNext {
			b := &p.blocks[id]
			if !b.hashed || p.bucket(b.hash) != i || b.hash != p.hash(b.parent, p.content(id)) {
				return fmt.Errorf("%w: block %d in bucket %d has hashed %v, hash %x", ErrBroken, id, i, b.hashed, b.hash)
			}
			if indexed++; indexed > len(p.blocks) {
				return fmt.Errorf("%w: bucket %d is a ring", ErrBroken, i)
			}
		}
	}
	for i := range p.blocks {
		if p.blocks[i].hashed {
			hashed++
		}
	}
	if indexed != hashed {
		return fmt.Errorf("%w: %d blocks in the index, %d hashed", ErrBroken, indexed, hashed)
	}
	return nil
}

func (p *Pool) checkChains() error {
	bySerial := make(map[uint64]*block, len(p.blocks))
	for i := range p.blocks {
		b := &p.blocks[i]
		if !b.hashed {
			continue
		}
		if b.serial == 0 || b.serial > p.serial || bySerial[b.serial] != nil {
			return fmt.Errorf("%w: block %d has serial %d of %d, or a second one with it", ErrBroken, i, b.serial, p.serial)
		}
		bySerial[b.serial] = b
	}
	for i := range p.blocks {
		b := &p.blocks[i]
		if !b.hashed || b.link == 0 {
			continue
		}
		parent := bySerial[b.link]
		if parent != nil && (parent.hash != b.parent || parent.serial >= b.serial) {
			return fmt.Errorf("%w: block %d continues serial %d with hash %x, want %x",
				ErrBroken, i, b.link, parent.hash, b.parent)
		}
		if b.refs > 0 && (parent == nil || parent.refs == 0) {
			return fmt.Errorf("%w: block %d is referenced, its parent (serial %d) is not", ErrBroken, i, b.link)
		}
	}
	return nil
}
