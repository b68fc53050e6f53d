package cpu

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

func TestHeadNorm(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, heads, dim := 1+rng.IntN(20), 1+rng.IntN(5), 1+rng.IntN(150)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, heads*dim, 3)
		in := slices.Clone(xs)
		y, ys := b.buf(backend.TokenRows, heads*dim, 1)
		if seed%2 == 0 {
			y, ys = x, xs
		}
		w, ws := b.load(backend.BF16, dim)
		b.once(nil, func() { b.HeadNorm(y, x, heads, dim, w, 1e-5) })
		for h := range rows * heads {
			head, sum := in[h*dim:(h+1)*dim], 0.0
			for _, v := range head {
				sum += float64(v) * float64(v)
			}
			inv := 1 / math.Sqrt(sum/float64(dim)+1e-5)
			for i, v := range head {
				want := float64(v) * inv * float64(ws[i])
				near(t, seed, "y", h*dim+i, ys[h*dim+i], want, math.Abs(want)*ulp*16)
			}
		}
	})
}

// TestWindowReadsOnlyItsBlocks: blocks before every window of the step may have any
// content, as after another request has received them.
func TestWindowReadsOnlyItsBlocks(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		const heads, dim = 4, 32
		bt, n, window := 1+rng.IntN(40), 40+rng.IntN(500), 1+rng.IntN(60)
		blocks := (n + bt - 1) / bt
		c, err := New(Options{Kernels: kernels, Limits: backend.Limits{Tokens: n, Outputs: 1, Seqs: 1, Blocks: blocks}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		b := &rig{CPU: c, t: t, rng: rng, rows: n}
		spec := backend.UniformKV(1, blocks, bt, 2, dim, backend.BF16)
		if err := c.AllocKV(spec); err != nil {
			t.Fatal(err)
		}
		q, qs := b.buf(backend.TokenRows, heads*dim, 1)
		k, ks := b.buf(backend.TokenRows, 2*dim, 1)
		y, ys := b.buf(backend.TokenRows, heads*dim, 1)
		s := &sequence{tokens: make([]int32, n)}
		for i := range blocks {
			s.blocks = append(s.blocks, int32(i))
		}
		step := func(tokens int) []float32 {
			st := (&net{shape: shape{blockTokens: bt}}).stepOf([]chunk{{s, tokens}})
			st.Outputs = nil
			if err := c.Replay(backend.Key{Tokens: n}, st, func() {
				c.StoreKV(0, k, k)
				c.Attention(y, q, backend.AttentionSpec{Heads: heads, KVHeads: 2, HeadDim: dim, Scale: 0.2, Window: window})
			}, nil); err != nil {
				t.Fatal(err)
			}
			return slices.Clone(ys[:tokens*heads*dim])
		}
		want := step(n)[(n-1)*heads*dim:]
		dead := max(0, n-window) / bt * spec.PageBytes // bytes of the blocks before the last token's window
		for i := range dead {
			c.KVRegion(0)[i] = 0xff
		}
		copy(qs, qs[(n-1)*heads*dim:])
		copy(ks, ks[(n-1)*2*dim:])
		s.done = n - 1
		for i, v := range step(1) {
			if math.Float32bits(v) != math.Float32bits(want[i]) {
				t.Fatalf("seed %d: %d tokens in blocks of %d, window %d: [%d] is %g, %g before %d bytes became garbage",
					seed, n, bt, window, i, v, want[i], dead)
			}
		}
	})
}

// mixture is a random mixture of experts in a rig.
type mixture struct {
	hidden, inner, experts int
	spec                   backend.MoESpec
	x, y, router           backend.Buf
	xs, ys, scores         []float32
	gate, up, down         [][]float32
	gateBias, upBias       [][]float32 // zeros where the spec has none
	downBias               [][]float32
	scale                  []float32 // ones where the spec has none
}

func newMixture(b *rig) *mixture {
	dtypes := []backend.DType{backend.F32, backend.BF16}
	if b.rng.IntN(3) == 0 {
		dtypes = append(dtypes, backend.MXFP4)
	}
	return newMixtureOf(b, dtypes...)
}

// newMixtureOf has experts of random types out of those.
func newMixtureOf(b *rig, dtypes ...backend.DType) *mixture {
	rng := b.rng
	m := &mixture{hidden: 1 + rng.IntN(90), inner: 1 + rng.IntN(90), experts: 1 + rng.IntN(40)}
	if slices.Contains(dtypes, backend.MXFP4) {
		m.hidden, m.inner = 32*(1+rng.IntN(3)), 32*(1+rng.IntN(3))
	}
	m.spec = backend.MoESpec{TopK: 1 + rng.IntN(min(m.experts, 9)), Normalize: rng.IntN(2) == 0, Act: backend.Act(rng.IntN(3))}
	load := func(ids *[]backend.Weight, values *[][]float32, out, in int) {
		w, v := b.load(dtypes[rng.IntN(len(dtypes))], out, in)
		*ids, *values = append(*ids, w), append(*values, v)
	}
	biases := rng.IntN(2) == 0
	bias := func(ids *[]backend.Weight, values *[][]float32, out int) {
		if !biases {
			*values = append(*values, make([]float32, out))
			return
		}
		w, v := b.load(backend.DType(1+rng.IntN(2)), out)
		*ids, *values = append(*ids, w), append(*values, v)
	}
	for range m.experts {
		load(&m.spec.Gate, &m.gate, m.inner, m.hidden)
		load(&m.spec.Up, &m.up, m.inner, m.hidden)
		load(&m.spec.Down, &m.down, m.hidden, m.inner)
		bias(&m.spec.GateBias, &m.gateBias, m.inner)
		bias(&m.spec.UpBias, &m.upBias, m.inner)
		bias(&m.spec.DownBias, &m.downBias, m.hidden)
	}
	if m.scale = slices.Repeat([]float32{1}, m.experts); rng.IntN(2) == 0 {
		var w backend.Weight
		w, m.scale = b.load(backend.F32, m.experts)
		m.spec.Scale = &w
	}
	m.x, m.xs = b.buf(backend.TokenRows, m.hidden, 0.3)
	m.y, m.ys = b.buf(backend.TokenRows, m.hidden, 1)
	m.router, m.scores = b.buf(backend.TokenRows, m.experts, 2)
	m.spec.Hidden, _ = b.buf(backend.TokenRows, m.spec.TopK*m.hidden, 1)
	m.spec.Inner, _ = b.buf(backend.TokenRows, m.spec.TopK*m.inner, 1)
	m.spec.InnerUp, _ = b.buf(backend.TokenRows, m.spec.TopK*m.inner, 1)
	return m
}

// naive is row r in float64, with the size of what was added up.
func (m *mixture) naive(r int) (y, size []float64) {
	scores, x := m.scores[r*m.experts:(r+1)*m.experts], m.xs[r*m.hidden:(r+1)*m.hidden]
	order := make([]int, m.experts)
	total, chosen := 0.0, 0.0
	for e := range order {
		order[e] = e
		total += math.Exp(float64(scores[e]))
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(scores[b], scores[a]) })
	for _, e := range order[:m.spec.TopK] {
		chosen += math.Exp(float64(scores[e]))
	}
	if m.spec.Normalize {
		total = chosen
	}
	y, size = make([]float64, m.hidden), make([]float64, m.hidden)
	for _, e := range order[:m.spec.TopK] {
		p := math.Exp(float64(scores[e])) / total * float64(m.scale[e])
		for o := range y {
			v := p * float64(m.downBias[e][o])
			y[o] += v
			size[o] += math.Abs(v)
		}
		for i := range m.inner {
			g, u := float64(m.gateBias[e][i]), float64(m.upBias[e][i])
			for k, v := range x {
				g += float64(v) * float64(m.gate[e][i*m.hidden+k])
				u += float64(v) * float64(m.up[e][i*m.hidden+k])
			}
			h := naiveAct(m.spec.Act, g, u)
			for o := range y {
				v := p * h * float64(m.down[e][o*m.inner+i])
				y[o] += v
				size[o] += math.Abs(v) + math.Abs(p*float64(m.down[e][o*m.inner+i]))*(1+math.Abs(g)+math.Abs(u))
			}
		}
	}
	return y, size
}

// naiveAct is act(g)·u in float64.
func naiveAct(act backend.Act, g, u float64) float64 {
	switch act {
	case backend.GELUTanh:
		return 0.5 * g * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(g+0.044715*g*g*g))) * u
	case backend.ClampedSwish:
		g, u = math.Min(g, 7), math.Max(-7, math.Min(u, 7))
		return g / (1 + math.Exp(-1.702*g)) * (u + 1)
	}
	return g / (1 + math.Exp(-g)) * u
}

// TestMoE: the mixture is that of float64, each row has the same bits alone and
// in a batch, and AVX2 gives those of AVX-512.
func TestMoE(t *testing.T) {
	for seed := range trials(12) {
		results := map[string][]float32{}
		for _, kernels := range Variants() {
			rng := rand.New(rand.NewPCG(seed, 31))
			rows := 2 + rng.IntN(30)
			if seed%4 == 0 {
				rows += 150 // more than a span of one expert
			}
			b := newRig(t, kernels, rows, rng)
			m := newMixture(b)
			record := func() { b.MoE(m.y, m.x, m.router, m.spec) }
			b.once(nil, record)
			for r := range rows {
				y, size := m.naive(r)
				for i := range y {
					near(t, seed, kernels+" y", r*m.hidden+i, m.ys[r*m.hidden+i], y[i], ulp*size[i]*40+1e-7)
				}
			}
			batch := slices.Clone(m.ys)
			results[kernels] = batch
			for r := range rows {
				copy(m.xs, m.xs[r*m.hidden:(r+1)*m.hidden])
				copy(m.scores, m.scores[r*m.experts:(r+1)*m.experts])
				b.once(&backend.Step{Tokens: make([]int32, 1), Positions: make([]int32, 1)}, record)
				for i, v := range batch[r*m.hidden : (r+1)*m.hidden] {
					if math.Float32bits(v) != math.Float32bits(m.ys[i]) {
						t.Fatalf("%s, seed %d: [%d, %d] is %g in a batch of %d, %g alone", kernels, seed, r, i, v, rows, m.ys[i])
					}
				}
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, kernels := range Variants() {
			if a, b := results[AVX2], results[kernels]; a != nil && kernels != Generic && kernels != Portable && !slices.Equal(a, b) {
				t.Errorf("seed %d: avx2 and %s differ", seed, kernels)
			}
		}
	}
}

// TestRouteOfNoNumbers: scores that are no numbers, or equal, still choose
// experts that exist, each once.
func TestRouteOfNoNumbers(t *testing.T) {
	eachVariant(t, 6, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		b := newRig(t, kernels, 5, rng)
		defer b.Close()
		m := newMixture(b)
		for i := range m.scores {
			m.scores[i] = []float32{float32(math.NaN()), float32(math.Inf(-1)), 0}[rng.IntN(1+int(seed%3))]
		}
		b.once(nil, func() { b.MoE(m.y, m.x, m.router, m.spec) })
		ids := b.routes[0].ids
		for r := range 5 {
			chosen := slices.Sorted(slices.Values(ids[r*m.spec.TopK : (r+1)*m.spec.TopK]))
			if chosen[0] < 0 || int(chosen[len(chosen)-1]) >= m.experts || len(slices.Compact(slices.Clone(chosen))) != m.spec.TopK {
				t.Errorf("seed %d: row %d chose %v of %d", seed, r, chosen, m.experts)
			}
		}
	})
}
