package cpu

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// TestHeadLinear: each head's columns by its own matrix, the others unchanged, and
// a row has the same bits alone and in a batch.
func TestHeadLinear(t *testing.T) {
	for seed := range trials(10) {
		results := map[string][]float32{}
		for _, kernels := range Variants() {
			rng := rand.New(rand.NewPCG(seed, 41))
			rows, heads, in, out, rest := 1+rng.IntN(40), 1+rng.IntN(9), 1+rng.IntN(70), 1+rng.IntN(70), rng.IntN(20)
			if seed%4 == 0 {
				rows += 100 // more than a span
			}
			b := newRig(t, kernels, rows, rng)
			x, xs := b.buf(backend.TokenRows, heads*(in+rest), 1)
			y, ys := b.buf(backend.TokenRows, heads*(out+rest), 1)
			var s backend.HeadSpec
			var ws [][]float32
			for range heads {
				w, v := b.load(backend.DType(1+rng.IntN(2)), out, in)
				s.Weights, ws = append(s.Weights, w), append(ws, v)
			}
			s.In, _ = b.buf(backend.TokenRows, heads*in, 1)
			s.Out, _ = b.buf(backend.TokenRows, heads*out, 1)
			record := func() { b.HeadLinear(y, x, s) }
			b.once(nil, record)
			for i, got := range ys {
				row, h, n := i/(heads*(out+rest)), i/(out+rest)%heads, i%(out+rest)
				from := xs[(row*heads+h)*(in+rest):][:in+rest]
				if n >= out {
					near(t, seed, kernels+" rest", i, got, float64(from[in+n-out]), 0)
					continue
				}
				want, size := 0.0, 0.0
				for k, v := range from[:in] {
					p := float64(v) * float64(ws[h][n*in+k])
					want, size = want+p, size+math.Abs(p)
				}
				near(t, seed, kernels+" y", i, got, want, size*ulp*float64(in)+1e-9)
			}
			batch := slices.Clone(ys)
			results[kernels] = batch
			for r := range rows {
				copy(xs, xs[r*heads*(in+rest):(r+1)*heads*(in+rest)])
				b.once(&backend.Step{Tokens: make([]int32, 1), Positions: make([]int32, 1)}, record)
				for i, v := range batch[r*heads*(out+rest) : (r+1)*heads*(out+rest)] {
					if math.Float32bits(v) != math.Float32bits(ys[i]) {
						t.Fatalf("%s, seed %d: [%d, %d] is %g in a batch of %d, %g alone", kernels, seed, r, i, v, rows, ys[i])
					}
				}
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if a, b := results[AVX2], results[AVX512]; a != nil && b != nil && !slices.Equal(a, b) {
			t.Errorf("seed %d: avx2 and avx512 differ", seed)
		}
	}
}

// TestLatentAttention: attention over a latent is a softmax over its rows in
// float64; a token alone gives the bits that it has in its prompt.
func TestLatentAttention(t *testing.T) {
	for seed := range trials(8) {
		results := map[string][]float32{}
		for _, kernels := range Variants() {
			rng := rand.New(rand.NewPCG(seed, 43))
			n, heads, latent, rest, bt := 2+rng.IntN(60), 1+rng.IntN(20), 1+rng.IntN(100), 1+rng.IntN(20), 1+rng.IntN(40)
			switch seed % 4 {
			case 0:
				latent, rest = 512, 64 // DeepSeek-V3's
			case 1:
				n = 300 // more than a segment
			}
			dtype := []backend.DType{backend.F32, backend.BF16, backend.FP8}[rng.IntN(3)]
			dim, blocks := latent+rest, (n+bt-1)/bt
			b, err := New(Options{Kernels: kernels, Threads: 2, Limits: backend.Limits{Tokens: n, Outputs: 1, Seqs: 1, Blocks: blocks}})
			if err != nil {
				t.Fatal(err)
			}
			g := backend.KVGroup{BlockTokens: bt, KVHeads: 1, HeadDim: dim, Latent: latent, Layers: 1}
			if err := b.AllocKV(backend.KVSpec{Blocks: blocks, Regions: 1, PageBytes: bt * g.TokenBytes(dtype), Groups: []backend.KVGroup{g},
				Layers: []backend.KVPlace{{}}, DType: dtype}); err != nil {
				t.Fatal(err)
			}
			const keyScale = 1.0 / 64
			if dtype == backend.FP8 {
				if err := b.ScaleKV(0, []float32{keyScale}, []float32{7}); err != nil { // of the values is not read
					t.Fatal(err)
				}
			}
			r := &rig{CPU: b, t: t, rng: rng, rows: n}
			c, cs := r.buf(backend.TokenRows, latent, 1)
			k, ks := r.buf(backend.TokenRows, rest, 1)
			q, qs := r.buf(backend.TokenRows, heads*dim, 0.3)
			y, ys := r.buf(backend.TokenRows, heads*latent, 1)
			spec := backend.AttentionSpec{Heads: heads, KVHeads: 1, HeadDim: dim, Scale: 0.2}
			table := make([]int32, blocks)
			for i, p := range rng.Perm(blocks) {
				table[i] = int32(p)
			}
			asStored := func(t, d int) float64 {
				f := cs[t*latent+min(d, latent-1)]
				if d >= latent {
					f = ks[t*rest+d-latent]
				}
				switch dtype {
				case backend.BF16:
					f = fromBF16(toBF16(f))
				case backend.FP8:
					f = backend.E4M3[backend.ToE4M3(f/keyScale)] * keyScale
				}
				return float64(f)
			}
			all := make([]float64, n*dim) // converted once
			for i := range all {
				all[i] = asStored(i/dim, i%dim)
			}
			stored := func(t, d int) float64 { return all[t*dim+d] }
			step := func(from, count int) {
				s := &backend.Step{Spans: []backend.Span{{Tokens: int32(count), Start: int32(from), Tables: [][]int32{table}}}}
				for i := range count {
					s.Tokens, s.Positions = append(s.Tokens, 0), append(s.Positions, int32(from+i))
				}
				if err := b.Replay(backend.Key{Tokens: n}, s, func() {
					b.StoreKV(0, c, k)
					b.Attention(y, q, spec)
				}, nil); err != nil {
					t.Fatal(err)
				}
			}
			step(0, n)
			for i, got := range ys {
				row, h, d := i/(heads*latent), i/latent%heads, i%latent
				if (row%37 != 0 || d%5 != 0) && row != n-1 || d%3 != 0 {
					continue
				}
				var scores []float64
				most, total, want, size := math.Inf(-1), 0.0, 0.0, 0.0
				for at := range row + 1 {
					sum := 0.0
					for j, v := range qs[(row*heads+h)*dim:][:dim] {
						sum += float64(v) * stored(at, j)
					}
					scores, most = append(scores, sum*0.2), max(most, sum*0.2)
				}
				for at, s := range scores {
					e := math.Exp(s - most)
					total, want, size = total+e, want+e*stored(at, d), size+e*math.Abs(stored(at, d))
				}
				near(t, seed, kernels+" y", i, got, want/total, size/total*1e-4+1e-6)
			}
			results[kernels] = slices.Clone(ys)
			last := slices.Clone(ys[(n-1)*heads*latent:])
			copy(qs, qs[(n-1)*heads*dim:])
			copy(cs, cs[(n-1)*latent:])
			copy(ks, ks[(n-1)*rest:])
			step(n-1, 1)
			for i, v := range last {
				if math.Float32bits(v) != math.Float32bits(ys[i]) {
					t.Fatalf("%s, seed %d: column %d of the last of %d tokens is %g, %g alone", kernels, seed, i, n, v, ys[i])
				}
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if a, b := results[AVX2], results[AVX512]; a != nil && b != nil && !slices.Equal(a, b) {
			t.Errorf("seed %d: avx2 and avx512 differ", seed)
		}
	}
}

// TestSigmoidRouter: experts and weights are those of the definition, and scores
// that are no numbers, or equal, choose experts that exist, each once.
func TestSigmoidRouter(t *testing.T) {
	eachVariant(t, 12, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		const rows = 9
		groups, size := 1+rng.IntN(6), 1+rng.IntN(20)
		experts, keep := groups*size, 1+rng.IntN(groups)
		topK := 1 + rng.IntN(min(size*keep, 8))
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		m := newMixture(b)
		first := func(ids []backend.Weight) []backend.Weight { return slices.Repeat(ids[:1], experts) }
		router, scores := b.buf(backend.TokenRows, experts, 2)
		bias, biases := b.load(backend.F32, experts)
		spec := backend.MoESpec{
			TopK: topK, Normalize: rng.IntN(2) == 0, Gate: first(m.spec.Gate), Up: first(m.spec.Up), Down: first(m.spec.Down),
			Sigmoid: &backend.SigmoidRouter{Bias: bias, Groups: groups, Keep: keep, Factor: 2.5},
		}
		if seed%4 == 1 {
			spec.Sigmoid.Softmax, spec.Sigmoid.Bias = true, backend.NoWeight
		}
		spec.Hidden, _ = b.buf(backend.TokenRows, topK*m.hidden, 1)
		spec.Inner, _ = b.buf(backend.TokenRows, topK*m.inner, 1)
		spec.InnerUp, _ = b.buf(backend.TokenRows, topK*m.inner, 1)
		if seed%3 == 2 {
			for i := range scores {
				scores[i] = []float32{float32(math.NaN()), float32(math.Inf(-1)), 0}[rng.IntN(1+int(seed%2))]
			}
		}
		b.once(nil, func() { b.MoE(m.y, m.x, router, spec) })
		route := b.routes[0]
		for r := range rows {
			ids, weights := route.ids[r*topK:(r+1)*topK], route.weights[r*topK:(r+1)*topK]
			chosen := slices.Sorted(slices.Values(ids))
			if chosen[0] < 0 || int(chosen[topK-1]) >= experts || len(slices.Compact(slices.Clone(chosen))) != topK {
				t.Fatalf("seed %d: row %d chose %v of %d", seed, r, ids, experts)
			}
			if seed%3 == 2 {
				continue
			}
			row := scores[r*experts : (r+1)*experts]
			sigmoid := func(e int) float64 { return 1 / (1 + math.Exp(-float64(row[e]))) }
			together, choice := 2, func(e int) float64 { return sigmoid(e) + float64(biases[e]) }
			if spec.Sigmoid.Softmax {
				total := 0.0
				for _, z := range row {
					total += math.Exp(float64(z))
				}
				sigmoid = func(e int) float64 { return math.Exp(float64(row[e])) / total }
				together, choice = 1, sigmoid
			}
			want, sum := naiveGroups(experts, choice, together, groups, keep)[:topK], 0.0
			for _, e := range want {
				sum += sigmoid(e)
			}
			if !spec.Normalize {
				sum = 1
			}
			for j, e := range want {
				if int(ids[j]) != e {
					t.Fatalf("seed %d: row %d chose %v, want %v", seed, r, ids, want)
				}
				near(t, seed, "weight", j, weights[j], sigmoid(e)/sum*2.5, 1e-5)
			}
		}
	})
}

// naiveGroups returns the experts that may be chosen, the best first. A group is as good as its
// best ones together.
func naiveGroups(n int, choice func(e int) float64, bests, groups, keep int) []int {
	size := n / groups
	var best []int
	together := make([]float64, groups)
	for g := range groups {
		var all []float64
		for e := g * size; e < (g+1)*size; e++ {
			all = append(all, choice(e))
		}
		slices.SortFunc(all, func(a, b float64) int { return cmp.Compare(b, a) })
		for _, v := range all[:min(bests, size)] {
			together[g] += v
		}
		best = append(best, g)
	}
	slices.SortStableFunc(best, func(a, b int) int { return cmp.Compare(together[b], together[a]) })
	var experts []int
	for e := range n {
		if slices.Contains(best[:keep], e/size) {
			experts = append(experts, e)
		}
	}
	slices.SortStableFunc(experts, func(a, b int) int { return cmp.Compare(choice(b), choice(a)) })
	return experts
}
