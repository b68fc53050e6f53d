package memory

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// A Llama-3.2-1B in bfloat16, worked by hand: a block of 16 tokens is
// 2*16*8*64*2*16 = 524288 bytes.
func TestFitByHand(t *testing.T) {
	n := Need{
		Budget: 8 << 30, Weights: 2 << 30, Step: 512 << 20,
		KV:          backend.KVSpec{Layers: 16, BlockTokens: 16, KVHeads: 8, HeadDim: 64, DType: backend.BF16},
		MaxModelLen: 8192,
	}
	p, err := Fit(n)
	if err != nil {
		t.Fatal(err)
	}
	if p.Blocks != 11264 || p.Tokens != 180224 || p.Bytes != 5632<<20 {
		t.Errorf("Fit = %+v, want 11264 blocks", p)
	}
	want := []string{
		"budget        8 GiB",
		"weights      -2 GiB",
		"step buffers -512 MiB",
		"left for KV   5.50 GiB",
		"one block     2 (K and V) x 16 layers x 8 KV heads x 64 x 2 bytes (bfloat16) x 16 tokens = 512 KiB",
		"blocks        11264 fit",
		"KV            11264 blocks = 180224 tokens = 5.50 GiB",
		"at once       22.0 sequences of 8192 tokens",
	}
	if !slices.Equal(p.Lines, want) {
		t.Errorf("lines:\n%s\nwant:\n%s", strings.Join(p.Lines, "\n"), strings.Join(want, "\n"))
	}
	n.MaxBlocks = 1024
	if p, err = Fit(n); err != nil || p.Blocks != 1024 || !strings.Contains(strings.Join(p.Lines, "\n"), "capped at 1024") {
		t.Errorf("with a cap: %+v, %v", p, err)
	}
}

// The package's invariant, on random needs.
func TestFitFillsTheBudget(t *testing.T) {
	fitted := 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 0))
		n := Need{
			Budget: r.Int64N(1 << 36), Weights: r.Int64N(1 << 34), Step: r.Int64N(1 << 30),
			KV: backend.KVSpec{
				Layers: 1 + r.IntN(80), BlockTokens: 1 << r.IntN(8), KVHeads: 1 + r.IntN(32),
				HeadDim: 2 + 2*r.IntN(128), DType: backend.DType(1 + r.IntN(2)),
			},
			MaxModelLen: 1 + r.IntN(1<<17),
		}
		if r.IntN(2) == 0 {
			n.MaxBlocks = 1 + r.IntN(1<<12)
		}
		longest := (n.MaxModelLen + n.KV.BlockTokens - 1) / n.KV.BlockTokens
		block := int64(n.KV.BlockBytes())
		p, err := Fit(n)
		if err != nil {
			if !errors.Is(err, ErrBudget) || n.Weights+n.Step+int64(longest)*block <= n.Budget {
				t.Fatalf("seed %d: %+v refused: %v", seed, n, err)
			}
			continue
		}
		fitted++
		used := n.Weights + n.Step + p.Bytes
		capped := n.MaxBlocks > 0 && p.Blocks == max(n.MaxBlocks, longest)
		if used > n.Budget || p.Blocks < longest || p.Bytes != int64(p.Blocks)*block || p.Tokens != p.Blocks*n.KV.BlockTokens {
			t.Fatalf("seed %d: %+v planned as %+v", seed, n, p)
		}
		if used+block <= n.Budget && !capped {
			t.Fatalf("seed %d: room for another block in %+v: %+v", seed, n, p)
		}
	}
	if fitted < 300 {
		t.Fatalf("only %d needs fitted", fitted)
	}
}

func TestFitRefuses(t *testing.T) {
	kv := backend.KVSpec{Layers: 1, BlockTokens: 16, KVHeads: 1, HeadDim: 2, DType: backend.F32} // 256 bytes a block
	_, err := Fit(Need{Budget: 1000, Weights: 300, KV: kv, MaxModelLen: 33})
	if !errors.Is(err, ErrBudget) || !strings.Contains(err.Error(), "enough for 32 tokens") || !strings.Contains(err.Error(), "needs 3 blocks") {
		t.Errorf("err = %v", err)
	}
	if _, err = Fit(Need{Budget: 100, Weights: 300, KV: kv, MaxModelLen: 1}); !errors.Is(err, ErrBudget) {
		t.Errorf("weights above the budget: err = %v", err)
	}
	if _, err = Fit(Need{Budget: 1000}); !errors.Is(err, ErrBudget) {
		t.Errorf("no KV shape: err = %v", err)
	}
}

func TestSlotsStayIn31Bits(t *testing.T) {
	kv := backend.KVSpec{Layers: 1, BlockTokens: 128, KVHeads: 1, HeadDim: 2, DType: backend.BF16}
	p, err := Fit(Need{Budget: 1 << 40, KV: kv, MaxModelLen: 1})
	if err != nil || p.Blocks != (1<<31-1)/128 {
		t.Errorf("Fit = %+v, %v", p, err)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.50 KiB", 5 << 30: "5 GiB", -3 << 20: "-3 MiB"} {
		if got := Bytes(n); got != want {
			t.Errorf("Bytes(%d) = %q, want %q", n, got, want)
		}
	}
}
