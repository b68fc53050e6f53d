//go:build !race

// One goroutine, and 15 times as long under the race detector.

package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// naiveMerge is BPE as its definition says: the lowest rank, the leftmost of it.
func naiveMerge(b *bpe, word string) []int32 {
	ids := b.appendSymbols(nil, word)
	for {
		best, at := noMerge, -1
		for i := range len(ids) - 1 {
			if r := b.pairs.get(ids[i], ids[i+1]); r < best {
				best, at = r, i
			}
		}
		if at < 0 {
			return ids
		}
		ids = slices.Replace(ids, at, at+2, int32(uint32(best)))
	}
}

func TestMergeEqualsNaive(t *testing.T) {
	eachGolden(t, func(t *testing.T, tok *Tokenizer, _ *golden) {
		var w scratch
		long := 0
		for seed := range uint64(1500) {
			rng := rand.New(rand.NewPCG(seed, 3))
			word := randomText(rng, false)
			if rng.IntN(3) == 0 {
				word = strings.Repeat(word, 4)
			}
			if len(word) == 0 {
				continue
			}
			if len(word) > shortWord {
				long++
			}
			if tok.unigram != nil {
				want := naiveUnigram(tok, word)
				if got := tok.unigram.cut(nil, word, &w, &tok.bpe.byteID); !slices.Equal(got, want) {
					t.Fatalf("seed %d: cut(%q)\n got %v\nwant %v", seed, word, got, want)
				}
				continue
			}
			want := naiveMerge(&tok.bpe, word)
			if got := tok.bpe.merge(nil, word, &w); !slices.Equal(got, want) {
				t.Fatalf("seed %d: merge(%q)\n got %v\nwant %v", seed, word, got, want)
			}
		}
		if long < 100 {
			t.Errorf("only %d words took the long path", long)
		}
	})
}
