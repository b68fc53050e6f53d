package memory

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// A Qwen3-Next-80B in bfloat16: each of 36 states is 8 parts of two key heads, each with the last
// 3 of 512 inputs of the convolution and two matrices of 128 x 128.
func TestFitStates(t *testing.T) {
	const state = 2 * (3*512 + 2*128*128)
	n := Need{
		Budget: 16 << 30, BlockTokens: 16, DType: backend.BF16, Context: 262144, MaxModelLen: 32768, MaxBatchedTokens: 2048,
	}
	for i := range 48 {
		if i%4 == 3 {
			n.Layers = append(n.Layers, backend.KVShape{KVHeads: 2, HeadDim: 256})
			continue
		}
		for range 8 {
			n.Layers = append(n.Layers, backend.KVShape{Window: 2, State: state})
		}
	}
	p, err := Fit(n)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"left for KV   16 GiB",
		"group 0       12 layers: 2 (K and V) x 2 KV heads x 256 x 2 bytes (bfloat16) x 128 tokens = 256 KiB a page, 144 KiB of a block stay empty",
		"groups 1-24   24 x 12 parts of states, kept every 1024 tokens: 68608 x 4 bytes (float32) = 268 KiB a page",
		"one block     12 pages of 268 KiB = 3.14 MiB",
		"blocks        16 GiB / 3.14 MiB = 5216 fit",
		"KV cache      5216 blocks (16.00 GiB) / 32 blocks x 1024 tokens = 166,912 tokens, with a state kept after each 1024",
		"one sequence  of 32,768 tokens: 256 (all, in blocks of 128) + 24 groups x 5 (the states that a step of 2048 starts from, keeps and ends with) = 376 blocks at most",
		"at once       5216 / 376 = 13.87x of 32,768 tokens",
	}
	if !slices.Equal(p.Lines, want) {
		t.Errorf("lines:\n%s\nwant:\n%s", strings.Join(p.Lines, "\n"), strings.Join(want, "\n"))
	}
	if got, want := p.KV.TokenBytes(), float64(12*2*2*256*2+24*12*4*state/1024); got != want {
		t.Errorf("a token takes %v bytes, want %v", got, want)
	}
	n.Budget, n.MaxModelLen = 28*int64(p.KV.BlockBytes()), 128 // less than a kept state and its tokens take
	if p, err = Fit(n); err != nil || p.KV.Blocks != 28 || p.Tokens != 28*1024/32 {
		t.Errorf("%v: %d tokens in %d blocks", err, p.Tokens, p.KV.Blocks)
	}
	n.MaxModelLen = 32768
	for _, bad := range []backend.KVShape{{Window: 2, State: -1}, {State: state}, {Window: 3, State: state}} {
		n.Layers[0] = bad
		if _, err := Fit(n); !errors.Is(err, ErrBudget) {
			t.Errorf("a layer %+v: %v", bad, err)
		}
	}
}

// States are kept every StateTokens tokens, rounded up to whole blocks of keys and values, in any
// type of KV. A prefix can end where such a block does.
func TestStateTokens(t *testing.T) {
	for _, c := range []struct{ unit, tokens int }{{16, 0}, {16, 40}, {48, 0}, {1, 7}, {256, 64}} {
		for _, dtype := range []backend.DType{backend.F32, backend.BF16, backend.FP8} {
			kv := Arrange(Need{
				Layers:      []backend.KVShape{{KVHeads: 1, HeadDim: 6}, {Window: 2, State: 37}, {Window: 2, State: 37}},
				BlockTokens: c.unit, StateTokens: c.tokens, DType: dtype, MaxModelLen: 4096, MaxBatchedTokens: 128,
			})
			kv.Blocks = 1
			unit := kv.Groups[0].BlockTokens
			if !kv.Valid() || kv.Groups[1].Every != roundUp(cmp.Or(c.tokens, 1024), unit) || kv.Groups[1].BlockTokens != unit || kv.Groups[1].PageBytes(dtype) != 4*37 {
				t.Errorf("%+v, %s: %+v", c, dtype, kv)
			}
		}
	}
}
