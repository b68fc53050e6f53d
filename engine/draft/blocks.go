package draft

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// attach adds the longest cached prefix of a new sequence's certain tokens.
func (d *Drafter) attach(s *sequence, tokens []int32) {
	d.pool.Extend(&s.chain, tokens)
	n := d.pool.Match(&s.chain, len(tokens))
	for g, spec := range d.groups {
		t := &s.tables[g]
		for range spec.First(n) {
			t.blocks = append(t.blocks, kvcache.NoBlock)
		}
		t.gone = len(t.blocks)
		for place := t.gone; place < spec.End(n); place++ {
			id := d.pool.Find(g, &s.chain, place)
			d.pool.Ref(id)
			t.blocks = append(t.blocks, id)
		}
		t.hashed = len(t.blocks)
	}
	s.tokens, s.certain = append(s.tokens, tokens[:n]...), n
}

// store puts the complete blocks of certain tokens into the prefix cache. If the
// cache has the same content already, the sequence uses that block.
func (d *Drafter) store(s *sequence) {
	d.pool.Extend(&s.chain, s.tokens[:s.certain])
	for g, spec := range d.groups {
		t := &s.tables[g]
		for ; (t.hashed+1)*spec.BlockTokens <= s.certain; t.hashed++ {
			own := t.blocks[t.hashed]
			if kept := d.pool.Store(own, g, &s.chain, t.hashed); kept != own {
				d.pool.Ref(kept)
				d.pool.Unref(own)
				t.blocks[t.hashed] = kept
			}
		}
	}
}

// freeBefore frees a table's blocks before a place, last to first.
func (d *Drafter) freeBefore(t *table, before int) {
	for place := before - 1; place >= t.gone; place-- {
		d.pool.Unref(t.blocks[place])
		t.blocks[place] = kvcache.NoBlock
	}
	t.gone, t.hashed = max(t.gone, before), max(t.hashed, before)
}

// allocBlocks allocates blocks for n tokens of a sequence. If the pool is empty, it
// evicts sequences that this call of Draft does not use, least recently used first.
func (d *Drafter) allocBlocks(s *sequence, n int) bool {
	for g, spec := range d.groups {
		t := &s.tables[g]
		for len(t.blocks) < spec.End(n) {
			id, ok := d.pool.Alloc()
			if !ok {
				if !d.evict() {
					return false
				}
				continue
			}
			t.blocks = append(t.blocks, id)
		}
	}
	return true
}

// evict forgets the least recently used sequence.
func (d *Drafter) evict() bool {
	oldest, turn := uint64(0), d.turn
	for id, s := range d.byID {
		if s.turn < turn || s.turn == turn && turn < d.turn && id < oldest {
			oldest, turn = id, s.turn
		}
	}
	if turn == d.turn {
		return false
	}
	d.Remove(oldest)
	return true
}

// Usage returns the pool's counts of blocks.
func (d *Drafter) Usage() kvcache.Usage { return d.pool.Usage() }

// Check verifies that a block's references are the tables that hold it, that a
// private block is in one table only, and the pool's own laws.
func (d *Drafter) Check() error {
	held := make([]int, d.pool.Usage().Blocks)
	for id, s := range d.byID {
		if s.certain > len(s.tokens) {
			return fmt.Errorf("%w: sequence %d has %d certain tokens of %d", ErrBroken, id, s.certain, len(s.tokens))
		}
		for g, spec := range d.groups {
			t := &s.tables[g]
			if t.gone > t.hashed || t.hashed > len(t.blocks) || len(t.blocks) < spec.End(len(s.tokens)) || t.hashed*spec.BlockTokens > s.certain && t.hashed > t.gone {
				return fmt.Errorf("%w: sequence %d of %d tokens, %d certain: table %d has %d blocks, %d cached, %d gone",
					ErrBroken, id, len(s.tokens), s.certain, g, len(t.blocks), t.hashed, t.gone)
			}
			for place, b := range t.blocks {
				switch {
				case place < t.gone != (b == kvcache.NoBlock):
					return fmt.Errorf("%w: sequence %d, table %d: block %d at place %d, %d are gone", ErrBroken, id, g, b, place, t.gone)
				case b == kvcache.NoBlock:
					continue
				case place >= t.hashed && (d.pool.Info(b).Hashed || d.pool.Info(b).Refs != 1):
					return fmt.Errorf("%w: sequence %d writes block %d, which others can read: %+v", ErrBroken, id, b, d.pool.Info(b))
				}
				held[b]++
			}
		}
	}
	for b, n := range held {
		if refs := d.pool.Info(kvcache.BlockID(b)).Refs; refs != n {
			return fmt.Errorf("%w: block %d is in %d tables and has %d references", ErrBroken, b, n, refs)
		}
	}
	return d.pool.Check()
}
