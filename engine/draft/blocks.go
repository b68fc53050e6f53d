package draft

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// attach starts a sequence behind the longest cached prefix of its certain tokens.
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

// store puts the complete blocks of certain tokens into the prefix cache. Where the
// cache has one already, the sequence takes that.
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

// drop lets go of a table's blocks before a place, last to first.
func (d *Drafter) drop(t *table, before int) {
	for place := before - 1; place >= t.gone; place-- {
		d.pool.Unref(t.blocks[place])
		t.blocks[place] = kvcache.NoBlock
	}
	t.gone, t.hashed = max(t.gone, before), max(t.hashed, before)
}

// lengthen gives a sequence blocks for n tokens, if need be those of sequences that
// are not asked for in this turn, the longest ago first.
func (d *Drafter) lengthen(s *sequence, n int) bool {
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

// evict forgets the sequence that was asked for the longest ago.
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
	d.Forget(oldest)
	return true
}

// Usage counts the blocks.
func (d *Drafter) Usage() kvcache.Usage { return d.pool.Usage() }

// Check verifies that each block is held once per table that has it, that private
// ones are in one table only, and the pool's own laws.
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
