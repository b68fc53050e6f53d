package prove

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Prompts share the tokens of the blocks that they have in common, and no others.
func TestTokens(t *testing.T) {
	trace := []sim.Request{
		{Tokens: 40, Block: 16, Blocks: []kvcache.Hash{1, 2, 3}},
		{Tokens: 40, Block: 16, Blocks: []kvcache.Hash{1, 2, 4}},
		{Tokens: 20, Block: 16, Blocks: []kvcache.Hash{5, 2}},
	}
	p := Tokens(trace, 100)
	for i := range trace {
		if len(p[i]) != trace[i].Tokens || slices.Min(p[i]) < 0 || slices.Max(p[i]) >= 100 {
			t.Errorf("prompt %d: %v", i, p[i])
		}
	}
	if !slices.Equal(p[0][:32], p[1][:32]) || slices.Equal(p[0][32:], p[1][32:]) || slices.Equal(p[0][:16], p[2][:16]) || !slices.Equal(p[0][16:20], p[2][16:]) {
		t.Errorf("%v", p)
	}
	if k := Keys(p, 7, 16); k[0] != k[1] || k[0] == k[2] {
		t.Errorf("keys %x: prompts with an equal first block have equal ones", k)
	}
}

// Errors are relative to what was measured, those of goodput are differences. Errors beyond their
// bounds are bold.
func TestFigures(t *testing.T) {
	for _, c := range []struct {
		f      Figure
		err    float64
		within bool
	}{
		{Figure{Predicted: 104, Measured: 100, Bound: .03}, .04, false},
		{Figure{Predicted: 96, Measured: 100, Bound: .05}, -.04, true},
		{Figure{Predicted: 50, Measured: 100}, -.5, true},
		{Figure{}, 0, true},
		{Figure{Predicted: 94, Measured: 98, Bound: .03, share: true}, -.04, false},
	} {
		if d := c.f.Error() - c.err; d > 1e-9 || d < -1e-9 || c.f.Within() != c.within {
			t.Errorf("%+v: error %g, within %v", c.f, c.f.Error(), c.f.Within())
		}
	}
	var b strings.Builder
	if err := WriteRows(&b, "1P1D at 0.30", []Figure{{Name: "TTFT p50 ms", Predicted: 104, Measured: 100, Bound: .03}}); err != nil {
		t.Fatal(err)
	}
	if want := "| 1P1D at 0.30 | TTFT p50 ms | 104.00 | 100.00 | **+4.0 %** | 3 % |\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}
