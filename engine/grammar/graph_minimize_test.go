package grammar

import (
	"math/rand/v2"
	"testing"
)

// Of the strings of a random graph, those of its minimal one are the same, and no two of its states
// accept the same strings.
func TestMinimize(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 8))
		n, k := 1+r.IntN(30), 1+r.IntN(4)
		g := &graph{classes: k, next: make([]int32, n*k), accept: make([]bool, n)}
		for c := range g.class {
			g.class[c] = uint8(c % k)
		}
		for i := range g.next {
			g.next[i] = int32(r.IntN(n+n/3+1)) - int32(n/3) - 1
			g.next[i] = max(g.next[i], -1)
		}
		for s := range g.accept {
			g.accept[s] = r.IntN(3) == 0
		}
		m, err := g.finish(&Limits{})
		if err != nil {
			t.Fatal(err)
		}
		for range 300 {
			text := make([]byte, r.IntN(12))
			for i := range text {
				text[i] = byte(r.IntN(k))
			}
			if g.matches(string(text)) != m.matches(string(text)) {
				t.Fatalf("seed %d: %v matches %v: %v", seed, m, text, !g.matches(string(text)))
			}
		}
		for a := range m.states() {
			for b := range a {
				if x, y := *m, *m; !differ(&x, &y, int32(a), int32(b)) {
					t.Fatalf("seed %d: states %d and %d are equal", seed, a, b)
				}
			}
		}
	}
}

// differ reports whether a string leads to acceptance from one of two states only.
func differ(x, y *graph, a, b int32) bool {
	x.start, y.start = a, b
	limits := &Limits{DFAStates: 1 << 20}
	more, err := combine(x, y, onlyFirst, limits)
	less, err2 := combine(y, x, onlyFirst, limits)
	return err != nil || err2 != nil || !more.empty() || !less.empty()
}
