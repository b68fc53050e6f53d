package memory

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// layers makes n KV layers of a shape, then whatever follows.
func layers(n, window, kvHeads, headDim int, rest ...backend.KVShape) []backend.KVShape {
	return append(slices.Repeat([]backend.KVShape{{Window: window, KVHeads: kvHeads, HeadDim: headDim}}, n), rest...)
}

// A Llama-3.2-1B in bfloat16, worked by hand: a block of 16 tokens is
// 2*16*8*64*2*16 = 524288 bytes.
func TestFitByHand(t *testing.T) {
	n := Need{
		Budget: 8 << 30, Weights: 2 << 30, Step: 512 << 20,
		Layers: layers(16, 0, 8, 64), BlockTokens: 16, DType: backend.BF16, MaxModelLen: 8192, MaxBatchedTokens: 512,
	}
	p, err := Fit(n)
	if err != nil {
		t.Fatal(err)
	}
	if p.KV.Blocks != 11264 || p.Tokens != 180224 || p.Bytes != 5632<<20 {
		t.Errorf("Fit = %+v, want 11264 blocks", p)
	}
	want := []string{
		"budget        8 GiB",
		"weights       -2 GiB",
		"step buffers  -512 MiB",
		"left for KV   5.50 GiB",
		"group 0       16 layers: 2 (K and V) x 8 KV heads x 64 x 2 bytes (bfloat16) x 16 tokens = 32 KiB a page",
		"one block     16 pages of 32 KiB = 512 KiB",
		"blocks        5.50 GiB / 512 KiB = 11264 fit",
		"KV cache      11264 blocks (5.50 GiB) / 1 group x 16 tokens = 180,224 tokens",
		"one sequence  of 8,192 tokens: 512 (all, in blocks of 16) = 512 blocks at most",
		"at once       11264 / 512 = 22.00x of 8,192 tokens",
	}
	if !slices.Equal(p.Lines, want) {
		t.Errorf("lines:\n%s\nwant:\n%s", strings.Join(p.Lines, "\n"), strings.Join(want, "\n"))
	}
	n.MaxBlocks = 1024
	if p, err = Fit(n); err != nil || p.KV.Blocks != 1024 || !strings.Contains(strings.Join(p.Lines, "\n"), "capped at 1024") {
		t.Errorf("with a cap: %+v, %v", p, err)
	}
}

// A DeepSeek-V3: a token is 576 numbers in each of 61 layers, and not 128 heads of
// 192 and 128.
func TestFitLatent(t *testing.T) {
	p, err := Fit(Need{
		Budget: 61 * 576 * 2 * 32768, Layers: slices.Repeat([]backend.KVShape{{KVHeads: 1, HeadDim: 576, Latent: 512}}, 61),
		BlockTokens: 16, DType: backend.BF16, MaxModelLen: 4096, MaxBatchedTokens: 512,
	})
	if err != nil || p.Tokens != 32768 {
		t.Fatalf("%d tokens, %v, want 32768", p.Tokens, err)
	}
	want := "group 0       61 layers: a latent of 512 and 64 rotated x 2 bytes (bfloat16) x 16 tokens = 18 KiB a page"
	if !slices.Contains(p.Lines, want) {
		t.Errorf("lines:\n%s\nwant one:\n%s", strings.Join(p.Lines, "\n"), want)
	}
}

// alternating is n layers, every stride-th of which sees all.
func alternating(n, stride int, windowed, full backend.KVShape) (all []backend.KVShape) {
	for i := range n {
		if (i+1)%stride == 0 {
			all = append(all, full)
		} else {
			all = append(all, windowed)
		}
	}
	return all
}

// What vLLM prints at start-up for these models and this much KV memory. The
// memory is known to a hundredth of a GiB, so the tokens are to that.
func TestFiguresOfVLLM(t *testing.T) {
	oss := func(n int) []backend.KVShape {
		return alternating(n, 2, backend.KVShape{Window: 128, KVHeads: 8, HeadDim: 64}, backend.KVShape{KVHeads: 8, HeadDim: 64})
	}
	moe := alternating(30, 6, backend.KVShape{Window: 1024, KVHeads: 8, HeadDim: 256}, backend.KVShape{KVHeads: 2, HeadDim: 512})
	dense := alternating(60, 6, backend.KVShape{Window: 1024, KVHeads: 16, HeadDim: 256}, backend.KVShape{KVHeads: 4, HeadDim: 512})
	for _, c := range []struct {
		name          string
		layers        []backend.KVShape
		gib           float64
		maxLen, batch int
		tokens        int
		concurrency   string
		groups        int
	}{
		{"GPT-OSS-120B", oss(36), 8.9924, 98304, 8192, 130_960, "2.46", 2},
		{"GPT-OSS-20B", oss(24), 36.56, 131072, 2048, 798_624, "11.99", 2},
		{"Llama-3.2-1B", layers(16, 0, 8, 64), 37.10, 131072, 2048, 1_215_552, "9.27", 1},
		{"Gemma-4-26B-A4B", moe, 21.5, 131072, 2048, 93_936, "6.96", 6},
		{"Gemma-4-26B-A4B fp8", moe, 24.45, 262144, 2048, 106_800, "4.37", 6},
		{"Gemma-4-31B", dense, 15.18, 131072, 2048, 16_576, "1.23", 6},
	} {
		n := Need{
			Budget: int64(c.gib * (1 << 30)), Layers: c.layers, BlockTokens: 16, DType: backend.BF16,
			MaxModelLen: c.maxLen, MaxBatchedTokens: c.batch,
		}
		p, err := Fit(n)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		// Half of the last digit of the memory, in tokens; one decimal more is exact.
		rounding := 0.005 / c.gib * float64(p.Tokens)
		if c.gib == 8.9924 {
			rounding = 0
		}
		if off := p.Tokens - c.tokens; float64(max(off, -off)) > rounding+0 || fmt.Sprintf("%.2f", p.Concurrency) != c.concurrency || len(p.KV.Groups) != c.groups {
			t.Errorf("%s: %d tokens, %.2fx, %d groups; want %d (to %.0f), %sx, %d\n%s", c.name, p.Tokens, p.Concurrency, len(p.KV.Groups),
				c.tokens, rounding, c.concurrency, c.groups, strings.Join(p.Lines, "\n"))
		}
		t.Logf("%s\n%s", c.name, strings.Join(p.Lines, "\n"))
	}
}

// Where the rarest kind of layer does not divide the others, groups of its size
// would leave most of some blocks empty.
func TestArrangeWastesLess(t *testing.T) {
	n := Need{
		Budget: 40 << 30, BlockTokens: 16, DType: backend.BF16, MaxModelLen: 65536, MaxBatchedTokens: 2048,
		Layers: layers(24, 0, 8, 128, layers(7, 1024, 8, 128)...),
	}
	p, err := Fit(n)
	if err != nil {
		t.Fatal(err)
	}
	spec, _ := vllmArrangement(n)
	ours, theirs := p.Peak*p.KV.BlockBytes(), kvcache.Peak(Groups(spec), n.MaxModelLen, n.MaxBatchedTokens)*spec.BlockBytes()
	if float64(ours) > 0.9*float64(theirs) {
		t.Errorf("one sequence takes %s, with groups of 7 layers %s\n%s", Bytes(int64(ours)), Bytes(int64(theirs)), strings.Join(p.Lines, "\n"))
	}
}

// naive lives through a sequence's steps, token by token and layer by layer, and
// counts pages that hold something that is still read or is being written.
func naive(spec backend.KVSpec, maxLen, chunk int) (peak int) {
	for first := 1; first <= min(chunk, maxLen); first++ { // all alignments of the steps after the first
		done := 0
		for step := first; done < maxLen; step = min(chunk, maxLen-done) {
			pages := map[[2]int]bool{}
			for g, spec := range spec.Groups {
				for pos := range done + step {
					if spec.Window == 0 || pos > done-spec.Window {
						pages[[2]int{g, pos / spec.BlockTokens}] = true
					}
				}
			}
			peak = max(peak, len(pages))
			done += step
		}
	}
	return peak
}

// Random models on random memory: blocks are those that a loop can take from
// the budget, and a sequence's peak is what a page-by-page allocator sees.
func TestAgainstNaiveAllocator(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 5))
		var all []backend.KVShape
		for range 1 + r.IntN(3) {
			s := backend.KVShape{KVHeads: 1 + r.IntN(4), HeadDim: 16 << r.IntN(4)}
			if r.IntN(2) == 0 {
				s.Window = 1 + r.IntN(60)
			}
			all = append(all, slices.Repeat([]backend.KVShape{s}, 1+r.IntN(9))...)
		}
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		n := Need{
			Layers: all, BlockTokens: 1 << r.IntN(5), DType: backend.DType(1 + r.IntN(2)), Weights: r.Int64N(1 << 20), Step: r.Int64N(1 << 20),
			MaxModelLen: 1 + r.IntN(160), MaxBatchedTokens: 1 + r.IntN(48), Budget: 2<<20 + r.Int64N(1<<26),
		}
		p, err := Fit(n)
		if err != nil {
			if !errors.Is(err, ErrBudget) {
				t.Fatalf("seed %d: %v", seed, err)
			}
			continue
		}
		if !p.KV.Valid() || len(p.KV.Layers) != len(all) {
			t.Fatalf("seed %d: %+v", seed, p.KV)
		}
		taken, blocks := n.Weights+n.Step, 0
		for taken+int64(p.KV.Regions*p.KV.PageBytes) <= n.Budget {
			taken += int64(p.KV.Regions * p.KV.PageBytes)
			blocks++
		}
		if p.KV.Blocks != blocks {
			t.Errorf("seed %d: %d blocks, a loop takes %d", seed, p.KV.Blocks, blocks)
		}
		got, want := p.Peak, naive(p.KV, n.MaxModelLen, n.MaxBatchedTokens)
		exact := true // unless a sequence is too short for its window to lie anywhere in a block
		for _, g := range p.KV.Groups {
			exact = exact && (g.Window == 0 || n.MaxModelLen >= g.Window-1+n.MaxBatchedTokens+2*g.BlockTokens && n.MaxBatchedTokens >= g.BlockTokens)
		}
		if got < want || exact && got != want && len(p.KV.Groups) == 1 || got > want+len(p.KV.Groups) {
			t.Errorf("seed %d: at most %d blocks for %d tokens in steps of %d, the naive allocator needs %d: %+v",
				seed, got, n.MaxModelLen, n.MaxBatchedTokens, want, p.KV.Groups)
		}
		places := map[backend.KVPlace]int{}
		for i, place := range p.KV.Layers {
			g := p.KV.Groups[place.Group]
			if other, twice := places[place]; twice || g.KVHeads != all[i].KVHeads || g.HeadDim != all[i].HeadDim || g.Window != all[i].Window {
				t.Errorf("seed %d: layer %d (%+v) lies with layer %d in %+v", seed, i, all[i], other, g)
			}
			places[place] = i
		}
	}
}

func TestFitRefuses(t *testing.T) {
	n := Need{Budget: 1000, Weights: 300, Layers: layers(1, 0, 1, 2), BlockTokens: 16, DType: backend.F32, MaxModelLen: 33, MaxBatchedTokens: 8} // 256 bytes a block
	_, err := Fit(n)
	if !errors.Is(err, ErrBudget) || !strings.Contains(err.Error(), "enough for 2 blocks") || !strings.Contains(err.Error(), "needs 3 blocks") {
		t.Errorf("err = %v", err)
	}
	n.Budget = 100
	if _, err = Fit(n); !errors.Is(err, ErrBudget) {
		t.Errorf("weights above the budget: err = %v", err)
	}
	if _, err = Fit(Need{Budget: 1000}); !errors.Is(err, ErrBudget) {
		t.Errorf("no KV shape: err = %v", err)
	}
}

func TestSlotsStayIn31Bits(t *testing.T) {
	p, err := Fit(Need{Budget: 1 << 40, Layers: layers(1, 0, 1, 2), BlockTokens: 128, DType: backend.BF16, MaxModelLen: 1, MaxBatchedTokens: 1})
	if err != nil || p.KV.Blocks != (1<<31-1)/128 {
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

// The derivation for a model of two kinds of layers names each kind's share of a
// sequence and what vLLM makes of the same memory.
func TestExplainsWindows(t *testing.T) {
	oss := alternating(24, 2, backend.KVShape{Window: 128, KVHeads: 8, HeadDim: 64}, backend.KVShape{KVHeads: 8, HeadDim: 64})
	many := layers(kvcache.MaxGroups+3, 64, 3, 8, layers(1, 0, 7, 8)...)
	for _, c := range []struct {
		name   string
		layers []backend.KVShape
		want   []string
	}{
		{"GPT-OSS-20B", oss, ossLines},
		{"one layer of a kind among many", many, []string{"vLLM          pads the pages of these layers, whose sizes do not divide each other, or refuses them"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Fit(Need{Budget: 1 << 30, Layers: c.layers, BlockTokens: 16, DType: backend.BF16, MaxModelLen: 8192, MaxBatchedTokens: 512})
			if err != nil {
				t.Fatal(err)
			}
			got := p.Lines[max(0, len(p.Lines)-len(c.want)):]
			if !slices.Equal(got, c.want) {
				t.Errorf("lines end in:\n%s\nwant:\n%s\nall:\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"), strings.Join(p.Lines, "\n"))
			}
		})
	}
}

var ossLines = []string{
	"one sequence  of 8,192 tokens: 512 (all, in blocks of 16) + 41 (127 of the window + 512 of a step, anywhere in blocks of 16) = 553 blocks at most",
	"at once       2730 / 553 = 4.94x of 8,192 tokens",
	"vLLM          2730 blocks of 12 pages, 2 groups: 21,840 tokens, 4.94x",
	"              the same: both give each group 12 layers and leave nothing of a block empty",
}

// Blocks of 256 tokens are the largest that a kernel's segment holds.
func TestLargestBlock(t *testing.T) {
	n := Need{Budget: 8 << 30, Layers: layers(16, 0, 8, 64), DType: backend.BF16, MaxModelLen: 8192, MaxBatchedTokens: 512}
	n.BlockTokens = 256
	if p, err := Fit(n); err != nil || p.KV.Groups[0].BlockTokens != 256 {
		t.Errorf("blocks of 256 tokens: %+v, %v", p, err)
	}
	if spec, ok := arrange(kinds(n.Layers), n, 1, 2, true); ok {
		t.Errorf("pages of 512 tokens: %+v", spec)
	}
}

// Layers that see all come first, the others in the order of the model.
func TestKindsInOrder(t *testing.T) {
	var windows []int
	for _, k := range kinds(slices.Concat(layers(2, 128, 8, 64), layers(1, 64, 8, 64), layers(1, 0, 8, 64), layers(1, 1, 8, 64), layers(1, 128, 8, 64))) {
		windows = append(windows, k.Window)
	}
	if want := []int{0, 128, 64, 1}; !slices.Equal(windows, want) {
		t.Errorf("windows %v: want %v", windows, want)
	}
}

// vLLM puts all layers of a kind into one group where the kinds are nearly of
// one size (less than a quarter apart), and else as many as the rarest has.
func TestUsualGroups(t *testing.T) {
	for full, want := range map[int]int{10: 10, 12: 12, 13: 10, 20: 10} {
		spec, ok := vllmArrangement(Need{Layers: layers(10, 128, 8, 64, layers(full, 0, 8, 64)...), BlockTokens: 16, DType: backend.BF16})
		if !ok || spec.Regions != want {
			t.Errorf("10 layers with a window and %d without: groups of %d, %t: want %d", full, spec.Regions, ok, want)
		}
	}
}

// Pages of a smaller shape hold as many times the tokens as fit, or the power of
// two below.
func TestArrangePowersOfTwo(t *testing.T) {
	n := Need{Layers: layers(2, 0, 7, 64, layers(2, 0, 1, 64)...), BlockTokens: 16, DType: backend.BF16}
	for pow2, want := range map[bool]int{true: 64, false: 112} {
		spec, _ := arrange(kinds(n.Layers), n, 2, 1, pow2)
		if got := spec.Groups[1].BlockTokens; got != want {
			t.Errorf("pow2 %t: blocks of %d tokens: want %d", pow2, got, want)
		}
	}
}

// The derivation names every group once and all of the model's layers.
func TestExplanationCountsEveryLayer(t *testing.T) {
	line := regexp.MustCompile(`^groups? (\d+)(?:-(\d+))? +(?:(\d+) x )?(\d+) layers`)
	number := func(s string) int {
		n, _ := strconv.Atoi(s)
		return n
	}
	for name, all := range map[string][]backend.KVShape{
		"one kind":                     layers(16, 0, 8, 64),
		"as many of each":              alternating(24, 2, backend.KVShape{Window: 128, KVHeads: 8, HeadDim: 64}, backend.KVShape{KVHeads: 8, HeadDim: 64}),
		"twice as many with a window":  layers(20, 128, 8, 64, layers(10, 0, 8, 64)...),
		"three times as many":          layers(30, 128, 8, 64, layers(10, 0, 8, 64)...),
		"five times as many":           layers(50, 128, 8, 64, layers(10, 0, 8, 64)...),
		"a few of another size":        layers(20, 128, 2, 64, layers(7, 0, 8, 64)...),
		"many, and one of another one": layers(9, 64, 3, 8, layers(1, 0, 7, 8)...),
	} {
		p, err := Fit(Need{Budget: 8 << 30, Layers: all, BlockTokens: 16, DType: backend.BF16, MaxModelLen: 8192, MaxBatchedTokens: 512})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		groups, sum := 0, 0
		for _, l := range p.Lines {
			m := line.FindStringSubmatch(l)
			if m == nil {
				continue
			}
			same := 1
			if m[2] != "" {
				same = number(m[2]) - number(m[1]) + 1
			}
			if number(m[1]) != groups || (same > 1) != (m[3] != "") || same > 1 && number(m[3]) != same {
				t.Errorf("%s: after %d groups: %s", name, groups, l)
			}
			groups += same
			sum += same * number(m[4])
		}
		if groups != len(p.KV.Groups) || sum != len(all) {
			t.Errorf("%s: %d groups with %d layers are explained, want %d with %d:\n%s", name, groups, sum, len(p.KV.Groups), len(all), strings.Join(p.Lines, "\n"))
		}
	}
}
