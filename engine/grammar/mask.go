package grammar

import (
	"bytes"
	"fmt"
	"math/bits"
	"slices"
)

// A mask is the set of tokens that are allowed in a state.
type mask struct {
	base  *mask    // the set starts with this one
	plain int32    // or with the plain tokens of at most so many characters
	ids   []int32  // and these
	less  []int32  // but not these
	bits  []uint64 // instead of all others, where that is smaller
	count int      // tokens in the set
	first int32    // the lowest
	steps int      // counted when it was computed
}

// A maskBuilder collects a mask: a set of plain tokens by length, tokens to add and tokens to
// leave out.
type maskBuilder struct {
	bits []uint64
	ids  []int32 // added; some may be there twice
	less []int32 // left out, and not added
}

func (b *maskBuilder) add(id int32) {
	set(b.bits, id)
	if len(b.ids) <= 2*len(b.bits) {
		b.ids = append(b.ids, id)
	}
}

func (b *maskBuilder) drop(id int32) {
	b.bits[id>>6] &^= 1 << (id & 63)
	if len(b.less) <= 2*len(b.bits) {
		b.less = append(b.less, id)
	}
}

// reserve leaves out the tokens that the grammar names.
func (b *maskBuilder) reserve(ids []int32) {
	for _, id := range ids {
		if id >= 0 && b.bits[id>>6]>>(id&63)&1 != 0 {
			b.drop(id)
			b.ids = slices.DeleteFunc(b.ids, func(x int32) bool { return x == id })
		}
	}
}

// maskOf returns the mask of a state. A mask that is cached counts as many steps as when it was
// computed.
func (a *Automaton) maskOf(s int32) (*mask, error) {
	s, err := a.round(s)
	if err != nil {
		return nil, err
	}
	if m := a.states[s].mask; m != nil {
		a.work += m.steps
		return m, nil
	}
	counted := a.work
	a.newEpoch()
	var base *mask
	ref := s
	if a.plain[s] == 0 {
		if ref, err = a.usual(s); err != nil {
			return nil, err
		}
	}
	if ref != deadState && ref != s {
		if ref, err = a.round(ref); err != nil {
			return nil, err
		}
		if a.plain[ref] > 0 {
			if base, err = a.maskOf(ref); err != nil {
				return nil, err
			}
		}
	}
	a.newEpoch() // what counts below does not depend on whether the base was cached
	b := &a.fill
	b.ids, b.less = b.ids[:0], b.less[:0]
	plain, err := a.fillMask(s, ref, base)
	if err != nil {
		return nil, err
	}
	b.reserve(a.tokens)
	for _, it := range a.states[s].items {
		if p := &a.p.pos[it.pos]; p.op == opToken {
			b.add(a.tokens[p.b])
		}
	}
	for _, id := range a.vocab.eos {
		if a.states[s].accept {
			b.add(id)
		} else if base != nil {
			b.drop(id)
		}
	}
	m := b.mask(plain, base)
	m.steps = a.work - counted
	a.states[s].mask = m
	a.bytes += 96 + 4*len(m.ids) + 4*len(m.less) + 8*len(m.bits)
	return m, nil
}

// fillMask collects the tokens with bytes that are allowed in s. base is the mask of ref, the state
// to which most characters lead, or nil. It returns the plain tokens that the mask starts with.
func (a *Automaton) fillMask(s, ref int32, base *mask) (int32, error) {
	v, b := a.vocab, &a.fill
	if base != nil {
		base.write(v, b.bits)
		b.reserve(a.tokens)
		return 0, a.walkDifference(s, ref)
	}
	plain := a.plain[s]
	mostly := ref != deadState && a.plain[s] == 0
	if mostly {
		plain = unlimited
	}
	if plain > 0 {
		v.plainInto(b.bits, plain)
	} else {
		clear(b.bits)
	}
	switch {
	case mostly:
		return plain, a.walkTrie(&v.all, s, v.sorted, nil, true)
	case a.states[s].loop:
		return plain, a.walkTrie(&v.tails, s, nil, v.tailIDs, false)
	case plain > 0:
		return plain, a.walkTrie(&v.marked, s, v.markedIDs, nil, false)
	}
	return 0, a.walkTrie(&v.all, s, v.sorted, nil, false)
}

// usual returns the state to which most printable ASCII characters lead from s, the dead state if
// they lead nowhere. Where they lead to many states it returns s.
func (a *Automaton) usual(s int32) (int32, error) {
	const most = 64
	alive, best, n := 0, deadState, 0 // Boyer and Moore's vote
	var to [0x7F]int32
	for c := byte(' '); c < 0x7F; c++ {
		t, err := a.step(s, a.p.class[c])
		if err != nil {
			return deadState, err
		}
		to[c] = t
		if t != deadState {
			alive++
		}
		switch {
		case n == 0:
			best, n = t, 1
		case t == best:
			n++
		default:
			n--
		}
	}
	if alive <= most {
		return deadState, nil
	}
	n = 0
	for _, t := range to[' ':] {
		if t == best {
			n++
		}
	}
	if n <= most {
		return s, nil
	}
	return best, nil
}

// walkDifference corrects the mask of state ref to that of state s. Where both reach one state the
// tokens below are alike.
func (a *Automaton) walkDifference(s, ref int32) error {
	t, b := &a.vocab.all, &a.fill
	a.walk[0], a.other[0] = s, ref
	for i := 0; i < len(t.char); {
		d := t.depth[i]
		c := a.p.class[t.char[i]]
		to, err := a.step(a.walk[d-1], c)
		if err != nil {
			return err
		}
		was := deadState
		if a.other[d-1] != deadState {
			if was, err = a.step(a.other[d-1], c); err != nil {
				return err
			}
		}
		if a.work > a.limits.MaskSteps {
			return a.tooManySteps()
		}
		if to == was {
			i = int(t.end[i])
			continue
		}
		a.walk[d], a.other[d] = to, was
		last := t.own[i]
		if to == deadState {
			last = t.last[i]
		}
		for r := t.token[i]; r < last; r++ {
			id := a.vocab.sorted[r]
			in := b.bits[id>>6]>>(id&63)&1 != 0
			if in && to == deadState {
				b.drop(id)
			} else if !in && to != deadState {
				b.add(id)
			}
		}
		i++
		if to == deadState {
			i = int(t.end[i-1])
		}
	}
	return nil
}

// mask returns what was collected, in the smaller form.
func (b *maskBuilder) mask(plain int32, base *mask) *mask {
	m := &mask{first: -1}
	for i, w := range b.bits {
		if w != 0 && m.first < 0 {
			m.first = int32(i*64 + bits.TrailingZeros64(w))
		}
		m.count += bits.OnesCount64(w)
	}
	if len(b.ids)+len(b.less) > 2*len(b.bits) {
		m.bits = slices.Clone(b.bits)
		return m
	}
	m.base, m.plain, m.ids, m.less = base, plain, slices.Clone(b.ids), slices.Clone(b.less)
	return m
}

// write copies m to dst.
func (m *mask) write(v *Vocabulary, dst []uint64) {
	if m.bits != nil {
		copy(dst, m.bits)
		return
	}
	switch {
	case m.base != nil:
		m.base.write(v, dst)
	case m.plain > 0:
		v.plainInto(dst, m.plain)
	default:
		clear(dst)
	}
	for _, id := range m.less {
		dst[id>>6] &^= 1 << (id & 63)
	}
	for _, id := range m.ids {
		set(dst, id)
	}
}

// walkTrie adds the tokens of t that are allowed in state s: those of ids by rank, or those of
// lists. With base, plain tokens are in the mask already, and those that are not allowed are left
// out. Subtrees of which every token is allowed are not walked: plain text where the state takes
// that, and kinds of characters that lead from a state back to it.
func (a *Automaton) walkTrie(t *trie, s int32, ids []int32, lists [][]int32, base bool) error {
	a.walk[0] = s
	class, classes, trans := &a.p.class, int32(a.p.classes), a.trans
	for i := 0; i < len(t.char); {
		d := t.depth[i]
		c := class[t.char[i]]
		from := a.walk[d-1]
		to := trans[from*classes+int32(c)]
		if to >= 0 {
			a.work++
		} else {
			var err error
			if to, err = a.step(from, c); err != nil {
				return err
			}
			trans = a.trans
		}
		if a.work > a.limits.MaskSteps {
			return a.tooManySteps()
		}
		if to == deadState {
			if base {
				a.dropPlain(t.token[i], t.last[i])
			}
			i = int(t.end[i])
			continue
		}
		a.walk[d] = to
		all, err := a.takesAll(t, i, from, to)
		if err != nil {
			return err
		}
		trans = a.trans
		if all {
			if !base || !t.whole[i] || !t.plain[i] {
				a.addRange(t.token[i], t.last[i], ids, lists, base)
			}
			i = int(t.end[i])
			continue
		}
		if t.token[i] < t.own[i] {
			a.addRange(t.token[i], t.own[i], ids, lists, base)
		}
		i++
	}
	return nil
}

func (a *Automaton) tooManySteps() error {
	return fmt.Errorf("%w: more than %d steps of a mask or a token", ErrBudget, a.limits.MaskSteps)
}

// takesAll reports whether every token below node i is allowed in state to. It uses the loops of
// states that the same walk has found or would have, so that the walk visits the same nodes
// whatever was computed before.
func (a *Automaton) takesAll(t *trie, i int, from, to int32) (bool, error) {
	if a.plain[to] > 0 && t.plain[i] && a.plain[to] >= int32(t.below[i]) {
		return true, nil
	}
	const few = 16 // tokens, for which it is not worth a look
	if t.last[i]-t.token[i] < few {
		return a.loopsUsed[to] == a.epoch && t.kinds[i]&^a.loops[to] == 0, nil
	}
	if from != to && t.below[i] <= shortToken {
		var err error
		if from, err = a.relax(from); err != nil {
			return false, err
		}
		if to, err = a.relax(to); err != nil {
			return false, err
		}
	}
	if a.loopsUsed[to] != a.epoch {
		if from != to {
			return false, nil
		}
		if err := a.findLoops(to); err != nil {
			return false, err
		}
		a.loopsUsed[to] = a.epoch
	}
	return t.kinds[i]&^a.loops[to] == 0, nil
}

// addRange adds the tokens of ranks lo to hi.
func (a *Automaton) addRange(lo, hi int32, ids []int32, lists [][]int32, base bool) {
	b := &a.fill
	if lists != nil {
		for _, list := range lists[lo:hi] {
			for _, id := range list {
				b.add(id)
			}
		}
		return
	}
	for r := lo; r < hi; r++ {
		if !base || a.vocab.from[r] != 0 {
			b.add(ids[r])
		}
	}
}

// dropPlain leaves out the plain tokens of ranks lo to hi.
func (a *Automaton) dropPlain(lo, hi int32) {
	for r := lo; r < hi; r++ {
		if a.vocab.from[r] == 0 {
			a.fill.drop(a.vocab.sorted[r])
		}
	}
}

// kindsKnown marks that loops was computed.
const kindsKnown = 1 << 63

// findLoops computes which kinds of characters lead from state s back to it. Loops that are cached
// count as many steps as when they were computed.
func (a *Automaton) findLoops(s int32) error {
	if a.loops[s]&kindsKnown != 0 {
		a.work += int(a.states[s].loopSteps)
		return nil
	}
	counted, before := a.work, a.epoch
	defer func() { a.epoch = before }()
	a.epoch = 0
	loops := uint64(1<<63 - 1)
	loops &^= kindOther | kindSpace
	for c, kind := range asciiKinds {
		if loops&kind == 0 {
			continue
		}
		to, err := a.step(s, a.p.class[c])
		if err != nil {
			return err
		}
		if to != s {
			loops &^= kind
		}
	}
	wide, err := a.wideLoop(s)
	if err != nil {
		return err
	}
	if !wide {
		loops &^= kindWide
	}
	a.loops[s] = loops | kindsKnown
	a.states[s].loopSteps = int32(a.work - counted)
	return nil
}

// wideLoop reports whether every character of kindWide leads from s back to it. Bytes of one class
// are tried once.
func (a *Automaton) wideLoop(s int32) (bool, error) {
	type place struct {
		state int32
		left  int
	}
	done := map[place]bool{}
	var follow func(state int32, prefix []byte, left int) (bool, error)
	follow = func(state int32, prefix []byte, left int) (bool, error) {
		if left == 0 {
			return state == s || isSpaceBytes(prefix), nil
		}
		special := beginsSpace(prefix)
		if state == deadState || !special && done[place{state, left}] {
			return state != deadState, nil
		}
		lo, hi := continuationRange(prefix)
		seen := -1
		for c := lo; c <= hi; c++ {
			class := int(a.p.class[c])
			if class == seen && !special {
				continue
			}
			seen = class
			to, err := a.step(state, uint8(class))
			if err != nil {
				return false, err
			}
			ok, err := follow(to, append(prefix[:len(prefix):len(prefix)], byte(c)), left-1)
			if !ok || err != nil {
				return false, err
			}
		}
		if len(prefix) > 1 || lo == 0x80 && hi == 0xBF {
			done[place{state, left}] = true
		}
		return true, nil
	}
	for c := 0xC2; c <= 0xF4; c++ {
		to, err := a.step(s, a.p.class[c])
		if err != nil {
			return false, err
		}
		if ok, err := follow(to, []byte{byte(c)}, bytesAfter(byte(c))); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// spaceBytes are the spellings of the characters of kindSpace.
var spaceBytes = func() (out [][]byte) {
	for _, r := range wideSpaces {
		for c := r.lo; c <= r.hi; c++ {
			out = append(out, []byte(string(c)))
		}
	}
	return out
}()

func isSpaceBytes(b []byte) bool {
	return slices.ContainsFunc(spaceBytes, func(s []byte) bool { return bytes.Equal(s, b) })
}

func beginsSpace(b []byte) bool {
	return slices.ContainsFunc(spaceBytes, func(s []byte) bool { return bytes.HasPrefix(s, b) })
}

// continuationRange returns the bytes that may follow the beginning of a character.
func continuationRange(prefix []byte) (lo, hi int) {
	lo, hi = 0x80, 0xBF
	if len(prefix) == 1 {
		switch prefix[0] {
		case 0xE0:
			lo = 0xA0
		case 0xED:
			hi = 0x9F
		case 0xF0:
			lo = 0x90
		case 0xF4:
			hi = 0x8F
		}
	}
	return lo, hi
}
