package ngram

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// plain tries every length from the longest, every place from the last.
func plain(l Lookup, tokens []int32, n int) []int32 {
	out := slices.Clone(tokens)
	for size := min(l.Max, len(tokens)-1); size >= l.Min; size-- {
		for at := len(tokens) - 1; at >= size; at-- {
			if slices.Equal(tokens[at-size:at], tokens[len(tokens)-size:]) {
				for i := range n {
					out = append(out, out[at+i])
				}
				return out
			}
		}
	}
	return out
}

func TestDraftAgainstPlainSearch(t *testing.T) {
	found := 0
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		tokens := make([]int32, 1+rng.IntN(40))
		for i := range tokens {
			tokens[i] = int32(rng.IntN(1 + rng.IntN(6)))
		}
		low := 1 + rng.IntN(4)
		l, n := Lookup{Min: low, Max: low + rng.IntN(4)}, rng.IntN(8)
		before := slices.Clone(tokens)
		got, want := l.Draft(tokens, n), plain(l, tokens, n)
		if !slices.Equal(got, want) || !slices.Equal(before, tokens) {
			t.Fatalf("seed %d: %+v, %d after %v: %v, want %v", seed, l, n, tokens, got, want)
		}
		if len(got) > len(tokens) {
			found++
		}
	}
	if found < 500 {
		t.Errorf("%d of 3000 texts had a guess", found)
	}
}

func TestDraft(t *testing.T) {
	for _, c := range []struct {
		l            Lookup
		tokens, want []int32
	}{
		{Lookup{2, 3}, []int32{1, 2, 3, 9, 1, 2, 3}, []int32{9, 1, 2}},
		{Lookup{2, 3}, []int32{1, 2, 3, 9, 5, 2, 3}, []int32{9, 5, 2}},
		{Lookup{2, 3}, []int32{1, 2, 3, 9, 5, 6, 3}, nil},                 // one token is too short
		{Lookup{1, 3}, []int32{3, 7, 3, 8, 3}, []int32{8, 3, 8}},          // the last of two places, and on into itself
		{Lookup{1, 5}, []int32{4, 4, 4}, []int32{4, 4, 4}},                //
		{Lookup{1, 2}, []int32{1, 2, 5, 7, 2, 6, 1, 2}, []int32{5, 7, 2}}, // the longer one, though it is further back
		{Lookup{1, 2}, []int32{1}, nil},
	} {
		if got := c.l.Draft(c.tokens, 3)[len(c.tokens):]; !slices.Equal(got, c.want) {
			t.Errorf("%+v after %v: %v, want %v", c.l, c.tokens, got, c.want)
		}
	}
}

// A guess looks back so far and no further, and allocates nothing where there is
// room behind the tokens.
func TestDraftIsBounded(t *testing.T) {
	tokens := make([]int32, maxLook+100, maxLook+200)
	for i := range tokens {
		tokens[i] = int32(i)
	}
	l := Lookup{1, 4}
	tokens[len(tokens)-1] = tokens[50]
	if got := l.Draft(tokens, 5); len(got) != len(tokens) {
		t.Errorf("found what is %d tokens back", len(tokens)-51)
	}
	tokens[len(tokens)-1] = tokens[150]
	if n := testing.AllocsPerRun(10, func() {
		if got := l.Draft(tokens, 5); len(got) != len(tokens)+5 || got[len(tokens)] != tokens[151] {
			t.Errorf("%v", got[len(tokens):])
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkDraft8k(b *testing.B) {
	tokens := make([]int32, 8192, 8300)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range tokens {
		tokens[i] = int32(rng.IntN(5000))
	}
	for b.Loop() {
		Lookup{3, 5}.Draft(tokens, 5)
	}
}
