package grammar

import (
	"fmt"
	"math/bits"
	"slices"
)

// A mask is the set of tokens that are allowed in a state.
type mask struct {
	plain int32    // the plain tokens of at most so many characters are in the set
	ids   []int32  // and these
	bits  []uint64 // instead of both, where that is smaller
	count int      // tokens in the set
	first int32    // the lowest
}

// A maskBuilder collects a mask.
type maskBuilder struct {
	bits []uint64
	ids  []int32 // set after the plain tokens; some may be there twice
}

func (b *maskBuilder) add(id int32) {
	set(b.bits, id)
	b.ids = append(b.ids, id)
}

// maskOf returns the mask of a state.
func (a *Automaton) maskOf(s int32) (*mask, error) {
	s, err := a.round(s)
	if err != nil {
		return nil, err
	}
	if m := a.states[s].mask; m != nil {
		return m, nil
	}
	b := &a.fill
	b.ids = b.ids[:0]
	plain := a.plain[s]
	if plain > 0 {
		a.vocab.plainInto(b.bits, plain)
	} else {
		clear(b.bits)
	}
	switch {
	case a.states[s].loop:
		err = a.walkTrie(&a.vocab.tails, s, func(tail int) {
			for _, id := range a.vocab.tailIDs[tail] {
				b.add(id)
			}
		})
	case plain > 0:
		err = a.walkTrie(&a.vocab.marked, s, func(i int) { b.add(a.vocab.markedIDs[i]) })
	default:
		err = a.walkTrie(&a.vocab.all, s, func(rank int) { b.add(a.vocab.sorted[rank]) })
	}
	if err != nil {
		return nil, err
	}
	for _, it := range a.states[s].items {
		if p := &a.p.pos[it.pos]; p.op == opToken {
			b.add(a.tokens[p.b])
		}
	}
	if a.states[s].accept {
		for _, id := range a.vocab.eos {
			b.add(id)
		}
	}
	m := b.mask(plain)
	a.states[s].mask = m
	a.bytes += 64 + 4*len(m.ids) + 8*len(m.bits)
	return m, nil
}

// mask returns what was collected, in the smaller form.
func (b *maskBuilder) mask(plain int32) *mask {
	m := &mask{first: -1}
	for i, w := range b.bits {
		if w != 0 && m.first < 0 {
			m.first = int32(i*64 + bits.TrailingZeros64(w))
		}
		m.count += bits.OnesCount64(w)
	}
	if len(b.ids) > 2*len(b.bits) {
		m.bits = slices.Clone(b.bits)
		return m
	}
	m.plain, m.ids = plain, slices.Clone(b.ids)
	return m
}

// write copies m to dst.
func (m *mask) write(v *Vocabulary, dst []uint64) {
	if m.bits != nil {
		copy(dst, m.bits)
		return
	}
	if m.plain > 0 {
		v.plainInto(dst, m.plain)
	} else {
		clear(dst)
	}
	for _, id := range m.ids {
		set(dst, id)
	}
}

// walkTrie calls found for each token of t that is allowed in state s. Subtrees that are plain text
// are taken as a whole where the state allows that.
func (a *Automaton) walkTrie(t *trie, s int32, found func(int)) error {
	a.walk[0] = s
	class, classes, trans := &a.p.class, int32(a.p.classes), a.trans
	limit := a.work + a.limits.MaskSteps
	for i := 0; i < len(t.char); {
		d := t.depth[i]
		c := class[t.char[i]]
		from := a.walk[d-1]
		to := trans[from*classes+int32(c)]
		a.work++
		if to == unknown {
			var err error
			if to, err = a.step(from, c); err != nil {
				return err
			}
			trans = a.trans
			if a.work > limit {
				return fmt.Errorf("%w: more than %d steps of a mask", ErrBudget, a.limits.MaskSteps)
			}
		}
		if to == deadState {
			i = int(t.end[i])
			continue
		}
		a.walk[d] = to
		if t.plain[i] && a.plain[to] >= int32(t.below[i]) && a.plain[to] > 0 {
			for r := t.token[i]; r < t.last[i]; r++ {
				found(int(r))
			}
			i = int(t.end[i])
			continue
		}
		for r := t.token[i]; r < t.own[i]; r++ {
			found(int(r))
		}
		i++
	}
	return nil
}
