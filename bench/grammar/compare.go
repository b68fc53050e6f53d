package main

import (
	"fmt"
	"maps"
	"math/bits"
	"math/rand/v2"
	"slices"

	"github.com/tandem-serving/tandem/engine/grammar"
)

// comparison counts the states in which both sides' masks were compared.
type comparison struct {
	states, equal int
	more, fewer   map[string]int // states by the first tokens that only ours, or only theirs allows
	examples      map[string]string
}

// compare walks at random through the schemas until enough masks were compared.
func (b *bench) compare() error {
	c := &comparison{more: map[string]int{}, fewer: map[string]int{}, examples: map[string]string{}}
	r := rand.New(rand.NewPCG(b.o.seed, 0))
	perSchema := max(1, b.o.compare/len(b.cases)*5/4)
	for _, i := range r.Perm(len(b.cases)) {
		if c.states >= b.o.compare {
			break
		}
		if err := b.compareCase(c, &b.cases[i], r, perSchema); err != nil {
			return fmt.Errorf("%s: %w", b.cases[i].name, err)
		}
	}
	fmt.Printf("%d states, %d equal (%.2f %%)\n", c.states, c.equal, 100*float64(c.equal)/float64(max(1, c.states)))
	for _, m := range []struct {
		name string
		n    map[string]int
	}{{"only ours", c.more}, {"only theirs", c.fewer}} {
		for _, k := range slices.SortedFunc(maps.Keys(m.n), func(x, y string) int { return m.n[y] - m.n[x] })[:min(40, len(m.n))] {
			fmt.Printf("%s %6d %s   e.g. %s\n", m.name, m.n[k], k, c.examples[m.name+k])
		}
	}
	return nil
}

func (b *bench) compareCase(c *comparison, bc *benchCase, r *rand.Rand, most int) error {
	limits := grammar.DefaultLimits()
	g, err := grammar.Compile(grammar.Source{Kind: grammar.JSONSchema, Text: bc.Schema}, limits)
	if err != nil {
		return nil
	}
	a, err := grammar.NewAutomaton(g, b.vocab, limits)
	if err != nil {
		return err
	}
	for end := c.states + most; c.states < end; {
		if _, err := b.peer.compile(string(bc.Schema)); err != nil {
			return nil
		}
		if err := b.compareWalk(c, bc, a, r, end); err != nil {
			return err
		}
	}
	return nil
}

// compareWalk compares masks along one random output.
func (b *bench) compareWalk(c *comparison, bc *benchCase, a *grammar.Automaton, r *rand.Rand, end int) error {
	m, err := a.NewMatcher()
	if err != nil {
		return err
	}
	ours, theirs := make([]uint64, b.vocab.Words()), make([]uint64, b.vocab.Words())
	var text []byte
	for step := 0; step < 60 && c.states < end; step++ {
		err := m.Mask(ours)
		_, perr := b.peer.mask(theirs)
		if err != nil || perr != nil {
			if (err == nil) != (perr == nil) {
				c.states++
				c.note("only ours", "no mask", fmt.Sprintf("%s %q: ours %v, theirs %v", bc.name, text, err, perr), c.more)
			}
			return nil
		}
		c.states++
		if slices.Equal(ours, theirs) {
			c.equal++
		} else {
			c.difference(b, bc, text, ours, theirs)
		}
		id, ok := b.choose(ours, theirs, r)
		if !ok {
			return nil
		}
		if err := m.Accept(id); err != nil {
			return err
		}
		if b.peer.accept(id) != nil || int(id) == len(b.tokens)-1 {
			return nil
		}
		text = append(text, b.tokens[id]...)
	}
	return nil
}

func (c *comparison) note(side, key, example string, n map[string]int) {
	n[key]++
	if c.examples[side+key] == "" {
		c.examples[side+key] = example
	}
}

// difference counts a state under the first token on each side that only that side allows.
func (c *comparison) difference(b *bench, bc *benchCase, text []byte, ours, theirs []uint64) {
	count := func(x, y []uint64, side string, n map[string]int) {
		total, first := 0, int32(-1)
		for i := range x {
			d := x[i] &^ y[i]
			if d != 0 && first < 0 {
				first = int32(i*64 + bits.TrailingZeros64(d))
			}
			total += bits.OnesCount64(d)
		}
		if total > 0 {
			tail := text[max(0, len(text)-60):]
			c.note(side, fmt.Sprintf("%q", b.tokens[first]), fmt.Sprintf("%d tokens in %s after %q", total, bc.name, tail), n)
		}
	}
	count(ours, theirs, "only ours", c.more)
	count(theirs, ours, "only theirs", c.fewer)
}

// choose returns a token that both allow: more often a short one, or one that ends a string, than
// an even draw would, so that walks get through a schema.
func (b *bench) choose(ours, theirs []uint64, r *rand.Rand) (int32, bool) {
	var ids, short []int32
	for i := range ours {
		for d := ours[i] & theirs[i]; d != 0; d &= d - 1 {
			id := int32(i*64 + bits.TrailingZeros64(d))
			ids = append(ids, id)
			if t := b.tokens[id]; len(t) <= 3 && (slices.Contains(t, '"') || slices.Contains(t, '}') || slices.Contains(t, ']') || slices.Contains(t, ',')) {
				short = append(short, id)
			}
		}
	}
	switch {
	case len(ids) == 0:
		return 0, false
	case len(short) > 0 && r.IntN(3) == 0:
		return short[r.IntN(len(short))], true
	}
	return ids[r.IntN(len(ids))], true
}
