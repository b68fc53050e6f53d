package route

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

// holdings draws how much of a prompt nodes hold, and the nodes that hold most.
func (d *drawing) holdings(n int) (h Holdings) {
	h = Holdings{BlockTokens: 16, Tokens: 2047, Slots: make([]int32, n)}
	for i := range h.Slots {
		if d.IntN(6) > 0 {
			h.Slots[i] = int32(1 + d.IntN(n+3)) // some beyond the blocks, some twice
		}
	}
	common := []int32{0, 0, 4, 64}[d.IntN(4)]
	for range n {
		blocks := common
		if d.IntN(5) == 0 {
			blocks = d.n(130)
		}
		h.Blocks = append(h.Blocks, blocks)
	}
	h.Least = int(common) * 16
	if d.IntN(3) == 0 {
		h.Least = 64 * 16
	}
	h.Least = min(h.Least, h.Tokens)
	for i := range n {
		if int(h.of(i)) > h.Least || d.IntN(20) == 0 {
			h.Most = append(h.Most, int32(i))
		}
	}
	return h
}

// copyOf returns a view without an outline, in which Held of all nodes is set.
func copyOf(v View) View {
	c := v
	c.Decode, c.Prefill = slices.Clone(v.Decode), slices.Clone(v.Prefill)
	c.Fill()
	c.Outline = nil
	return c
}

// Decisions by an outline are those without it, and mark the same nodes as full, while nodes change
// between decisions.
func TestOutline(t *testing.T) {
	seeds := uint64(300)
	if testing.Short() {
		seeds = 90
	}
	reasons := map[Reason]int{}
	for seed := range seeds {
		d := &drawing{Rand: rand.New(rand.NewPCG(seed, 77)), values: []int{1, 2, 4, 1000, 1000}[seed%5], hard: seed%7 == 0}
		most := []int{40, 150, 400}[seed%3]
		classes := 1 + d.IntN(2)*d.IntN(7)
		of := func(nodes []Node) []Node {
			for i := range nodes {
				if nodes[i].Class = fmt.Sprint(d.IntN(classes)); seed%2 == 0 { // neighbours mostly have one class
					nodes[i].Class = fmt.Sprint(i * classes / len(nodes))
				}
			}
			return permute(nodes, d.Perm(len(nodes)))
		}
		table := New(of(fleet(1+d.IntN(most), "")), of(fleet(d.IntN(most), "")))
		v := View{Decode: d.states(len(table.decode.nodes)), Prefill: d.states(len(table.prefill.nodes)), Outline: table.Outline()}
		if seed%3 > 0 { // as in a fleet
			for _, states := range [][]State{v.Decode, v.Prefill} {
				for i := range states {
					states[i].Full = false
				}
			}
		}
		for step := range 20 {
			if step%7 == 6 {
				v.Decode, v.Prefill = d.states(len(v.Decode)), d.states(len(v.Prefill))
				v.Outline.ChangedAll()
			}
			for range d.IntN(8) {
				i := d.IntN(len(v.Decode))
				v.Decode[i] = d.states(1)[0]
				v.Outline.ChangedDecode(i)
				if n := len(v.Prefill); n > 0 {
					i := d.IntN(n)
					v.Prefill[i] = d.states(1)[0]
					v.Prefill[i].Full = seed%3 == 0 && v.Prefill[i].Full
					v.Outline.ChangedPrefill(i)
				}
			}
			v.DecodeHeld, v.PrefillHeld = d.holdings(len(v.Decode)), d.holdings(len(v.Prefill))
			r, plain := d.request(), copyOf(v)
			got, want := table.Pick(r, v, nil), table.Pick(r, plain, nil)
			reasons[got.Reason]++
			reasons[got.PrefillReason]++
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d, step %d: %+v, without an outline %+v, for %+v", seed, step, got, want, r)
			}
			for i := range v.Decode {
				if v.Decode[i].Full != plain.Decode[i].Full {
					t.Fatalf("seed %d, step %d: decode node %d full: %t, without an outline %t, for %+v: %+v", seed, step, i, v.Decode[i].Full, plain.Decode[i].Full, r, v.Decode[i])
				}
			}
			checkGroups(t, &table.decode, v.Decode, &v.Outline.decode)
			checkGroups(t, &table.prefill, v.Prefill, &v.Outline.prefill)
			if got.Decode >= 0 && v.Decode[got.Decode].Held != plain.Decode[got.Decode].Held || len(got.Prefill) > 0 && v.Prefill[got.Prefill[0]].Held != plain.Prefill[got.Prefill[0]].Held {
				t.Fatalf("seed %d, step %d: Held of the chosen nodes is not set", seed, step)
			}
		}
	}
	for _, r := range []Reason{ReasonPrefix, ReasonLoad, ReasonHealth, ReasonCached, ReasonPolicy, ReasonNoDecode, ReasonNoRoom, ReasonRemote, ReasonLocal, ReasonShort, ReasonNoPrefill} {
		if reasons[r] == 0 {
			t.Errorf("%d decisions for the reason %s", reasons[r], r)
		}
	}
}

// checkGroups compares the groups of an outline, after its changes, with those of a new one: they
// have equal counts, and their bounds are not above.
func checkGroups(t *testing.T, r *ring, states []State, o *outline) {
	t.Helper()
	if len(o.changed)+len(o.stale) > 0 {
		return // the last decision has not used it
	}
	exact := newOutline(r)
	exact.decode = o.decode
	s := side{ring: r, states: states, outline: &exact}
	s.refresh()
	for at := range o.groups {
		g, want := &o.groups[at], &exact.groups[at]
		if g.usable != want.usable || g.load != want.load || g.known != want.known || g.nMemory != want.nMemory {
			t.Fatalf("group %d: %d usable, load %d, %d rates and %d memories are known; want %d, %d, %d and %d", at,
				g.usable, g.load, g.known, g.nMemory, want.usable, want.load, want.known, want.nMemory)
		}
		above := g.queued > want.queued || g.extra > want.extra || g.slope > want.slope || want.nMemory > 0 && (g.total > want.total || g.spare > want.spare)
		for k := range g.line {
			above = above || g.line[k] > want.line[k]
		}
		if above || want.mixed && !g.mixed || want.short && !g.short || !o.decode && !g.mixed && g.usable > 0 && g.class != want.class {
			t.Fatalf("group %d: %+v, want at most %+v", at, *g, *want)
		}
		if sum, n := (&side{ring: r, states: states, outline: o}).sumRates(at); n > 0 {
			if wantSum, wantN := s.sumRates(at); sum != wantSum || n != wantN {
				t.Fatalf("group %d: %d rates of %g, want %d of %g", at, n, sum, wantN, wantSum)
			}
		}
	}
}
