package cpu

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// deltaCase is a rig with one layer of the gated delta rule and its inputs.
type deltaCase struct {
	b                *rig
	spec             backend.DeltaSpec
	dst              backend.Buf
	record           func()
	qkv, beta, alpha []float32 // buffers
	out              []float32
	conv, bias, rate []float32
	every, blocks    int // tokens of a place, blocks of the pool
}

func newDeltaCase(t *testing.T, kernels string, kv backend.DType, rng *rand.Rand) *deltaCase {
	s := backend.DeltaSpec{Layer: 1, Parts: 1 + rng.IntN(3), KeyDim: 1 + rng.IntN(40), ValueDim: 1 + rng.IntN(40)}
	if rng.IntN(3) == 0 {
		s.KeyDim, s.ValueDim = 16*(1+rng.IntN(3)), 64*(1+rng.IntN(2))
	}
	s.KeyHeads = s.Parts * (1 + rng.IntN(2))
	s.ValueHeads = s.KeyHeads * (1 + rng.IntN(3))
	c := &deltaCase{b: newRig(t, kernels, 48, rng), every: 1 + rng.IntN(20), blocks: 200}
	var weights [3]backend.Weight
	weights[0], c.conv = c.b.load(backend.F32, s.Channels()*backend.DeltaConv)
	weights[1], c.bias = c.b.load(backend.BF16, s.ValueHeads)
	weights[2], c.rate = c.b.load(backend.F32, s.ValueHeads)
	s.Conv, s.Bias, s.Decay = weights[0], weights[1], weights[2]
	c.spec = s
	group := backend.KVGroup{BlockTokens: c.every, State: s.State(), Window: 2, Layers: 1}
	store := backend.KVSpec{Blocks: c.blocks, Regions: 1, PageBytes: group.PageBytes(kv) + 64, DType: kv,
		Groups: []backend.KVGroup{{BlockTokens: 16, KVHeads: 1, HeadDim: 2, Layers: 1}}, Layers: []backend.KVPlace{{}}}
	for part := range s.Parts {
		store.Groups, store.Layers = append(store.Groups, group), append(store.Layers, backend.KVPlace{Group: 1 + part})
	}
	if err := c.b.AllocKV(store); err != nil {
		t.Fatal(err)
	}
	for i := range c.b.KVRegion(0) { // pages hold garbage before their first token
		c.b.KVRegion(0)[i] = 0xff
	}
	var qkv, beta, alpha backend.Buf
	qkv, c.qkv = c.b.buf(backend.TokenRows, s.Channels(), 1)
	beta, c.beta = c.b.buf(backend.TokenRows, s.ValueHeads, 2)
	alpha, c.alpha = c.b.buf(backend.TokenRows, s.ValueHeads, 3)
	c.dst, c.out = c.b.buf(backend.TokenRows, s.ValueHeads*s.ValueDim, 1)
	c.record = func() { c.b.DeltaRule(c.dst, qkv, beta, alpha, s) }
	return c
}

// deltaSequence is the inputs and, once computed, the outputs of one sequence.
type deltaSequence struct {
	qkv, beta, alpha, out []float32
	tables                [][]int32
	tokens, done          int
}

func (c *deltaCase) sequence(rng *rand.Rand, n int) *deltaSequence {
	random := func(cols int, dev float64) []float32 {
		x := make([]float32, n*cols)
		for i := range x {
			x[i] = float32(rng.NormFloat64() * dev)
		}
		return x
	}
	return &deltaSequence{qkv: random(c.spec.Channels(), 1), beta: random(c.spec.ValueHeads, 2), alpha: random(c.spec.ValueHeads, 3), tokens: n,
		out: make([]float32, n*c.spec.ValueHeads*c.spec.ValueDim)}
}

// place gives sequences distinct random blocks and starts them again.
func (c *deltaCase) place(rng *rand.Rand, all ...*deltaSequence) {
	perm := rng.Perm(c.blocks)
	for _, s := range all {
		s.done, s.tables = 0, nil
		for g := range 1 + c.spec.Parts {
			bt := c.every
			if g == 0 {
				bt = 16
			}
			table := make([]int32, (s.tokens+bt-1)/bt)
			for i := range table {
				table[i], perm = int32(perm[0]), perm[1:]
			}
			s.tables = append(s.tables, table)
		}
	}
}

// step computes the next n tokens of each sequence, in one step.
func (c *deltaCase) step(n []int, all ...*deltaSequence) {
	step, row := &backend.Step{}, 0
	spread := func(dst, src []float32, cols, at, n int) { copy(dst[row*cols:(row+n)*cols], src[at*cols:(at+n)*cols]) }
	heads := c.spec.ValueHeads
	for i, s := range all {
		span := backend.Span{Row: int32(row), Tokens: int32(n[i]), Start: int32(s.done)}
		for g, table := range s.tables {
			bt := c.every
			if g == 0 {
				bt = 16
			} else {
				table = slices.Clone(table)
				for place := range max(0, s.done-1) / bt { // the state before the last token is gone
					table[place] = -1
				}
			}
			span.Tables = append(span.Tables, table[:(s.done+n[i]+bt-1)/bt])
		}
		spread(c.qkv, s.qkv, c.spec.Channels(), s.done, n[i])
		spread(c.beta, s.beta, heads, s.done, n[i])
		spread(c.alpha, s.alpha, heads, s.done, n[i])
		for p := range n[i] {
			step.Tokens, step.Positions = append(step.Tokens, 0), append(step.Positions, int32(s.done+p))
		}
		step.Spans = append(step.Spans, span)
		row += n[i]
	}
	c.b.once(step, c.record)
	row = 0
	for i, s := range all {
		cols := heads * c.spec.ValueDim
		copy(s.out[s.done*cols:(s.done+n[i])*cols], c.out[row*cols:(row+n[i])*cols])
		s.done += n[i]
		row += n[i]
	}
}

// naive computes a sequence from the formulas of DeltaSpec, in float64.
func (c *deltaCase) naive(s *deltaSequence) []float64 {
	d := &c.spec
	group, keys, out := d.ValueHeads/d.KeyHeads, d.KeyHeads*d.KeyDim, []float64{}
	states := make([][]float64, d.ValueHeads)
	for h := range states {
		states[h] = make([]float64, d.KeyDim*d.ValueDim)
	}
	for t := range s.tokens {
		mixed := make([]float64, d.Channels())
		for ch := range mixed {
			for i := range backend.DeltaConv {
				if at := t - 3 + i; at >= 0 {
					mixed[ch] += float64(c.conv[ch*backend.DeltaConv+i]) * float64(s.qkv[at*d.Channels()+ch])
				}
			}
			mixed[ch] /= 1 + math.Exp(-mixed[ch])
		}
		unit := func(x []float64, by float64) []float64 {
			sum := 1e-6
			for _, f := range x {
				sum += f * f
			}
			y := slices.Clone(x)
			for i := range y {
				y[i] *= by / math.Sqrt(sum)
			}
			return y
		}
		for h, m := range states {
			kh := h / group
			q := unit(mixed[kh*d.KeyDim:(kh+1)*d.KeyDim], 1/math.Sqrt(float64(d.KeyDim)))
			k := unit(mixed[keys+kh*d.KeyDim:keys+(kh+1)*d.KeyDim], 1)
			beta := 1 / (1 + math.Exp(-float64(s.beta[t*d.ValueHeads+h])))
			decay := math.Exp(-math.Exp(float64(c.rate[h])) * math.Log1p(math.Exp(float64(s.alpha[t*d.ValueHeads+h])+float64(c.bias[h]))))
			for col := range d.ValueDim {
				known, y := 0.0, 0.0
				for i := range k {
					m[i*d.ValueDim+col] *= decay
					known += k[i] * m[i*d.ValueDim+col]
				}
				more := (mixed[2*keys+h*d.ValueDim+col] - known) * beta
				for i := range k {
					m[i*d.ValueDim+col] += k[i] * more
					y += q[i] * m[i*d.ValueDim+col]
				}
				out = append(out, y)
			}
		}
	}
	return out
}

// TestDeltaRule: outputs are those of the formulas; chunks and sequences that share a step change no
// bit, nor does a start from the state at the end of a place, in other blocks; and vectors of 8 and
// 16 lanes agree.
func TestDeltaRule(t *testing.T) {
	for seed := range trials(8) {
		sums := map[string][]float32{}
		for _, kernels := range Variants() {
			rng := rand.New(rand.NewPCG(seed, 51))
			c := newDeltaCase(t, kernels, []backend.DType{backend.F32, backend.BF16, backend.FP8}[seed%3], rng)
			a, b := c.sequence(rng, 1+rng.IntN(48)), c.sequence(rng, 1+rng.IntN(24))
			c.place(rng, a)
			c.step([]int{a.tokens}, a)
			for i, want := range c.naive(a) {
				near(t, seed, kernels+" dst", i, a.out[i], want, 2e-5)
			}
			whole := slices.Clone(a.out)
			sums[kernels] = whole

			c.place(rng, a, b)
			for a.done < a.tokens {
				n := 1 + rng.IntN(min(a.tokens-a.done, 20))
				if b.done < b.tokens {
					c.step([]int{n, 1 + rng.IntN(min(b.tokens-b.done, 20))}, a, b)
				} else {
					c.step([]int{n}, a)
				}
			}
			sameFloats(t, seed, kernels+" in chunks", a.out, whole)

			c.place(rng, a)
			for _, table := range a.tables[1:] { // the state moves on in one block, but for some places
				for i := 1; i < len(table); i++ {
					if i%3 > 0 {
						table[i] = table[i-1]
					}
				}
			}
			clear(a.out)
			for a.done < a.tokens {
				c.step([]int{1 + rng.IntN(a.tokens-a.done)}, a)
			}
			sameFloats(t, seed, kernels+" in few blocks", a.out, whole)

			if at := a.tokens / c.every * c.every; at > 0 && at < a.tokens {
				c.place(rng, a)
				c.step([]int{at}, a)
				kept := slices.Clone(a.tables)
				last := at/c.every - 1
				for again := true; again; { // as after a prefix hit, whose blocks no other place has
					c.place(rng, a)
					again = false
					for _, table := range kept[1:] {
						again = again || slices.ContainsFunc(a.tables[1:], func(t []int32) bool { return slices.Contains(t[last+1:], table[last]) })
					}
				}
				for g := range kept[1:] {
					copy(a.tables[g+1], kept[g+1][:last+1])
				}
				clear(a.out[at*c.spec.ValueHeads*c.spec.ValueDim:])
				a.done = at
				c.step([]int{a.tokens - at}, a)
				sameFloats(t, seed, kernels+" from a kept state", a.out, whole)
			}
			if err := c.b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if a, b := sums[AVX2], sums[AVX512]; a != nil && b != nil {
			sameFloats(t, seed, "avx2 and avx512", a, b)
		}
	}
}

func sameFloats(t *testing.T, seed uint64, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("seed %d: %s: [%d] is %g, want %g", seed, what, i, got[i], want[i])
		}
	}
}

// TestGate: each column of the gate multiplies its columns.
func TestGate(t *testing.T) {
	eachVariant(t, 12, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, gates, wide := 1+rng.IntN(9), 1+rng.IntN(40), 1+rng.IntN(40)
		if seed%3 == 0 {
			wide = 1
		}
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		g, gs := b.buf(backend.TokenRows, gates, 3)
		x, xs := b.buf(backend.TokenRows, gates*wide, 2)
		before := slices.Clone(xs)
		b.once(nil, func() { b.Gate(x, g, x) })
		for i, got := range xs {
			want := float64(before[i]) / (1 + math.Exp(-float64(gs[i/wide])))
			near(t, seed, kernels, i, got, want, math.Abs(want)*1e-6+1e-9)
		}
	})
}

// TestStatesOutliveSteps: a page keeps its state bit for bit, whatever its place in memory, so that
// copies of the bytes can be shipped.
func TestStatesOutliveSteps(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 52))
	c := newDeltaCase(t, Auto, backend.BF16, rng)
	a := c.sequence(rng, 2*c.every+1)
	c.place(rng, a)
	c.step([]int{2 * c.every}, a)
	page := func(place int) []byte {
		size := c.b.kv.spec.PageBytes
		at := int(a.tables[1][place]) * size
		return c.b.KVRegion(0)[at : at+4*c.spec.State()]
	}
	kept := slices.Clone(page(1))
	c.step([]int{1}, a)
	if !slices.Equal(kept, page(1)) {
		t.Error("the token after the end of a place changed the state at the end")
	}
	if f := math.Float32frombits(binary.LittleEndian.Uint32(page(2))); f != f {
		t.Error("a state begins with a NaN: it was not copied")
	}
	if err := c.b.Close(); err != nil {
		t.Fatal(err)
	}
}
