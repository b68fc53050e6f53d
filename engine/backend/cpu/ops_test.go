package cpu

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// rig is a backend for single operations.
type rig struct {
	*CPU
	t    testing.TB
	rng  *rand.Rand
	rows int
}

func newRig(t testing.TB, kernels string, rows int, rng *rand.Rand) *rig {
	t.Helper()
	c, err := New(Options{Kernels: kernels, Threads: 1 + rng.IntN(3), Mapped: rng.IntN(2) == 0,
		Limits: backend.Limits{Tokens: rows, Outputs: rows, Seqs: rows, Blocks: 64}})
	if err != nil {
		t.Fatal(err)
	}
	return &rig{CPU: c, t: t, rng: rng, rows: rows}
}

// buf allocates a buffer of random values.
func (b *rig) buf(rows backend.Rows, cols int, dev float64) (backend.Buf, []float32) {
	b.t.Helper()
	id, err := b.Alloc(rows, cols)
	if err != nil {
		b.t.Fatal(err)
	}
	data := b.buffers[id].data
	for i := range data {
		data[i] = float32(b.rng.NormFloat64() * dev)
	}
	return id, data
}

// load makes a random weight and its values.
func (b *rig) load(dt backend.DType, dims ...int) (backend.Weight, []float32) {
	b.t.Helper()
	if dt == backend.MXFP4 {
		return b.loadMXFP4(dims[0], dims[1])
	}
	tn := tensor(b.rng, dt, 1, dims...)
	w, err := b.Load(tn)
	if err != nil {
		b.t.Fatal(err)
	}
	if tn.DType == backend.FP8 {
		tn = tn.Expand(backend.F32)
	}
	values := make([]float32, len(tn.Data)/tn.DType.Size())
	decode(values, tn.Data, tn.DType)
	if tn.As != 0 {
		dequantize(values, tn.Shape[1], tn.As)
	}
	return w, values
}

// once runs one operation on all rows.
func (b *rig) once(step *backend.Step, record func()) {
	b.t.Helper()
	if step == nil {
		step = &backend.Step{}
	}
	if step.Tokens == nil {
		step.Tokens = make([]int32, b.rows)
	}
	if step.Positions == nil {
		step.Positions = make([]int32, b.rows)
	}
	step.Sampled = make([]int32, len(step.Outputs))
	if err := b.Replay(backend.Key{Tokens: b.rows, Outputs: b.rows}, step, record, nil); err != nil {
		b.t.Fatal(err)
	}
}

// eachVariant runs f for many seeds and every variant.
func eachVariant(t *testing.T, n int, f func(t *testing.T, kernels string, seed uint64, rng *rand.Rand)) {
	for _, kernels := range Variants() {
		// But for these products they are the same code as those without VNNI.
		if strings.HasSuffix(kernels, "vnni") && !strings.Contains(t.Name(), "Quantized") {
			continue
		}
		t.Run(kernels, func(t *testing.T) {
			for seed := range trials(n) {
				f(t, kernels, seed, rand.New(rand.NewPCG(seed, 21)))
				if t.Failed() {
					return
				}
			}
		})
	}
}

// near fails unless |got-want| <= bound.
func near(t *testing.T, seed uint64, what string, i int, got float32, want, bound float64) {
	t.Helper()
	if d := math.Abs(float64(got) - want); !(d <= bound) {
		t.Fatalf("seed %d: %s [%d] is %g, want %g: off by %g, bound %g", seed, what, i, got, want, d, bound)
	}
}

const ulp = 1.0 / (1 << 24) // half a unit in the last place, relative

func TestLinear(t *testing.T) {
	eachVariant(t, 40, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, in, out := 1+rng.IntN(20), 1+rng.IntN(300), 1+rng.IntN(200)
		if seed%8 == 0 {
			in += 2000 // more than one block of the reduction
		}
		dt := backend.DType(1 + rng.IntN(2))
		if seed%3 == 0 {
			dt, in = backend.MXFP4, (in+31)/32*32
		}
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, in, 1)
		y, ys := b.buf(backend.TokenRows, out, 1)
		w, ws := b.load(dt, out, in)
		bias, bs := b.load(backend.BF16, out)
		if seed%2 == 0 {
			bias, bs = backend.NoWeight, make([]float32, out)
		}
		b.once(nil, func() { b.Linear(y, x, w, bias) })
		for r := range rows {
			for n := range out {
				sum, size := float64(bs[n]), math.Abs(float64(bs[n]))
				for k := range in {
					p := float64(xs[r*in+k]) * float64(ws[n*in+k])
					sum += p
					size += math.Abs(p)
				}
				near(t, seed, "y", r*out+n, ys[r*out+n], sum, ulp*size*(2+math.Sqrt(float64(in))))
			}
		}
	})
}

func TestEmbedAndRows(t *testing.T) {
	eachVariant(t, 10, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, cols, vocab := 1+rng.IntN(20), 1+rng.IntN(100), 1+rng.IntN(70)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, cols, 1)
		y, ys := b.buf(backend.OutputRows, cols, 1)
		w, ws := b.load(backend.DType(1+rng.IntN(2)), vocab, cols)
		st := &backend.Step{Tokens: make([]int32, rows)}
		for i := range st.Tokens {
			st.Tokens[i] = int32(rng.IntN(vocab))
			st.Outputs = append(st.Outputs, backend.Output{Row: int32(rng.IntN(rows))})
		}
		b.once(st, func() { b.Embed(x, w); b.Rows(y, x) })
		for r := range rows {
			for i := range cols {
				at := int(st.Tokens[r])*cols + i
				near(t, seed, "x", r*cols+i, xs[r*cols+i], float64(ws[at]), 0)
				at = int(st.Tokens[st.Outputs[r].Row])*cols + i
				near(t, seed, "y", r*cols+i, ys[r*cols+i], float64(ws[at]), 0)
			}
		}
	})
}

func TestRMSNorm(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, cols := 1+rng.IntN(20), 1+rng.IntN(300)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, cols, 3)
		a, as := b.buf(backend.TokenRows, cols, 3)
		y, ys := b.buf(backend.TokenRows, cols, 1)
		w, ws := b.load(backend.F32, cols)
		want := append([]float32(nil), xs...)
		if seed%2 == 0 {
			for i := range want {
				want[i] += as[i]
			}
			b.once(nil, func() { b.AddRMSNorm(y, x, a, w, 1e-5) })
		} else {
			b.once(nil, func() { b.RMSNorm(y, x, w, 1e-5) })
		}
		for r := range rows {
			sum := 0.0
			for i := range cols {
				near(t, seed, "x", r*cols+i, xs[r*cols+i], float64(want[r*cols+i]), 0)
				sum += float64(want[r*cols+i]) * float64(want[r*cols+i])
			}
			inv := 1 / math.Sqrt(sum/float64(cols)+1e-5)
			for i := range cols {
				v := float64(want[r*cols+i]) * inv * float64(ws[i])
				near(t, seed, "y", r*cols+i, ys[r*cols+i], v, math.Abs(v)*ulp*16)
			}
		}
	})
}

func TestRope(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, heads, dim := 1+rng.IntN(20), 1+rng.IntN(5), 2*(1+rng.IntN(128))
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, heads*dim, 1)
		in := append([]float32(nil), xs...)
		rope := &backend.Rope{InvFreq: make([]float32, dim/2), Scale: 1.25}
		for i := range rope.InvFreq {
			rope.InvFreq[i] = rng.Float32()
		}
		st := &backend.Step{Positions: make([]int32, rows)}
		for i := range st.Positions {
			st.Positions[i] = int32(rng.IntN(1 << (1 + rng.IntN(17))))
		}
		b.once(st, func() { b.Rope(x, heads, dim, rope) })
		for i := range xs {
			r, d := i/(heads*dim), i%dim
			f := d % (dim / 2)
			sin, cos := math.Sincos(float64(float32(st.Positions[r]) * rope.InvFreq[f]))
			var want float64
			if d < dim/2 {
				want = float64(in[i])*cos - float64(in[i+dim/2])*sin
			} else {
				want = float64(in[i])*cos + float64(in[i-dim/2])*sin
			}
			near(t, seed, "x", i, xs[i], want*1.25, ulp*40)
		}
	})
}

func TestSiluMul(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, cols := 1+rng.IntN(20), 1+rng.IntN(300)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		g, gs := b.buf(backend.TokenRows, cols, math.Pow(10, float64(rng.IntN(4))-1))
		u, us := b.buf(backend.TokenRows, cols, 1)
		in := append([]float32(nil), gs...)
		b.once(nil, func() { b.GatedAct(g, g, u, backend.SiLU) })
		for i, v := range in {
			want := float64(v) / (1 + math.Exp(-float64(v))) * float64(us[i])
			near(t, seed, "silu·up", i, gs[i], want, math.Abs(want)*ulp*10+1e-34)
		}
	})
}

// TestExp: for large x, silu(-x) is -x/exp(x) but for two more roundings, which
// shows the error of exp over all of its reduced range.
func TestExp(t *testing.T) {
	const rows, cols = 64, 1024
	eachVariant(t, 1, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		g, gs := b.buf(backend.TokenRows, cols, 1)
		u, us := b.buf(backend.TokenRows, cols, 1)
		in := make([]float32, len(gs))
		for i := range gs {
			in[i] = -20 - 67*float32(i)/float32(len(gs))
			us[i] = 1
		}
		copy(gs, in)
		b.once(nil, func() { b.GatedAct(g, g, u, backend.SiLU) })
		for i, x := range in {
			want := float64(x) / (1 + math.Exp(-float64(x)))
			near(t, seed, "silu", i, gs[i], want, -want*ulp*2*(2+1))
		}
		// Beyond the range it saturates; what is not a number stays so.
		copy(gs, []float32{-1e4, 1e4, float32(math.Inf(1)), float32(math.NaN())})
		b.once(nil, func() { b.GatedAct(g, g, u, backend.SiLU) })
		for i, want := range []float64{0, 1e4, math.Inf(1)} {
			if d := float64(gs[i]) - want; math.Abs(d) > 1e-33 {
				t.Errorf("silu of an extreme [%d] is %g, want %g", i, gs[i], want)
			}
		}
		if gs[3] == gs[3] {
			t.Errorf("silu(NaN) is %g", gs[3])
		}
	})
}

// TestAttention stores several sequences through StoreKV and compares with a
// softmax over contiguous keys in float64.
func TestAttention(t *testing.T) {
	eachVariant(t, 30, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		kvHeads := 1 + rng.IntN(3)
		heads := kvHeads * (1 + rng.IntN(9))
		dim := 1 + rng.IntN(256)
		if rng.IntN(2) == 0 {
			dim = 16 << rng.IntN(6)
		}
		bt := []int{1, 3, 8, 16, 16, 16, 32, 48}[rng.IntN(8)]
		lengths := []int{1 + rng.IntN(40), 1, 1 + rng.IntN(600/(1+rng.IntN(20)))}
		window := 0
		if rng.IntN(2) == 0 {
			window = 1 + rng.IntN(1+rng.IntN(400))
		}
		checkAttention(t, kernels, seed, rng, attentionCase{heads, kvHeads, dim, bt, window, lengths, rng.IntN(2) == 0, float64(rng.IntN(3))})
	})
}

type attentionCase struct {
	heads, kvHeads, dim, bt int
	window                  int // 0: all
	lengths                 []int
	sinks                   bool
	softcap                 float64 // 0: none
}

func checkAttention(t *testing.T, kernels string, seed uint64, rng *rand.Rand, a attentionCase) {
	rows, blocks := 0, 0
	for _, n := range a.lengths {
		rows += n
		blocks += (n + a.bt - 1) / a.bt
	}
	c, err := New(Options{Kernels: kernels, Threads: 1 + rng.IntN(3),
		Limits: backend.Limits{Tokens: rows, Outputs: 1, Seqs: 3, Blocks: blocks}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := &rig{CPU: c, t: t, rng: rng, rows: rows}
	dt := []backend.DType{backend.F32, backend.BF16, backend.FP8}[rng.IntN(3)]
	spec := backend.UniformKV(2, blocks+2, a.bt, a.kvHeads, a.dim, dt)
	if err := c.AllocKV(spec); err != nil {
		t.Fatal(err)
	}
	var scales [2][]float32 // of K and V
	for i := range scales {
		for range a.kvHeads {
			scales[i] = append(scales[i], float32(math.Exp(4*rng.Float64()-5)))
		}
	}
	if dt == backend.FP8 {
		if err := c.ScaleKV(1, scales[0], scales[1]); err != nil {
			t.Fatal(err)
		}
	}
	for i := range c.KVRegion(1) {
		c.KVRegion(1)[i] = 0xff // stale pages hold NaN: nothing unwritten may be used
	}
	q, qs := b.buf(backend.TokenRows, a.heads*a.dim, 1)
	k, ks := b.buf(backend.TokenRows, a.kvHeads*a.dim, 1)
	v, vs := b.buf(backend.TokenRows, a.kvHeads*a.dim, 1)
	y, ys := b.buf(backend.TokenRows, a.heads*a.dim, 1)
	var seqs []*sequence
	var chunks []chunk
	perm := rng.Perm(spec.Blocks)
	for _, n := range a.lengths {
		s := &sequence{tokens: make([]int32, n)}
		for range (n + a.bt - 1) / a.bt {
			s.blocks, perm = append(s.blocks, int32(perm[0])), perm[1:]
		}
		seqs, chunks = append(seqs, s), append(chunks, chunk{s, n})
	}
	st := (&net{shape: shape{blockTokens: a.bt}}).stepOf(chunks)
	st.Outputs = nil
	scale := float32(1 / math.Sqrt(float64(a.dim)))
	attend := backend.AttentionSpec{Layer: 1, Heads: a.heads, KVHeads: a.kvHeads, HeadDim: a.dim, Scale: scale, Softcap: float32(a.softcap), Window: a.window}
	var sinks []float32
	if a.sinks {
		var w backend.Weight
		w, sinks = b.load(backend.BF16, a.heads)
		attend.Sinks = &w
	}
	if err := c.Replay(backend.Key{Tokens: rows}, st, func() {
		c.StoreKV(1, k, v)
		c.Attention(y, q, attend)
	}, nil); err != nil {
		t.Fatal(err)
	}
	round := func(which, head int, f float32) float64 {
		switch dt {
		case backend.BF16:
			f = fromBF16(toBF16(f))
		case backend.FP8:
			s := scales[which][head]
			return float64(backend.E4M3[backend.ToE4M3(f/s)]) * float64(s)
		}
		return float64(f)
	}
	stored := func(which int, values []float32) []float64 {
		list := make([]float64, len(values))
		for i, v := range values {
			list[i] = round(which, i/a.dim%a.kvHeads, v)
		}
		return list
	}
	keys, values := stored(0, ks), stored(1, vs)
	first := 0
	for _, s := range seqs {
		for i := 0; i < len(s.tokens); i += 1 + rng.IntN(7) {
			for h := range a.heads {
				want, bound := naiveHead(a, qs, keys, values, sinks, first, i, h, float64(scale))
				for d := range want {
					at := ((first+i)*a.heads+h)*a.dim + d
					near(t, seed, "attention", at, ys[at], want[d], bound)
				}
			}
		}
		first += len(s.tokens)
	}
}

// naiveHead is softmax(q·K)·V of head h of token i of the sequence whose first
// row is first, with a bound on the error of a sound float32 computation.
func naiveHead(a attentionCase, qs []float32, keys, values []float64, sinks []float32, first, i, h int, scale float64) (out []float64, bound float64) {
	kh := h / (a.heads / a.kvHeads)
	scores, most, from := make([]float64, i+1), math.Inf(-1), 0
	if a.window > 0 {
		from = max(0, i+1-a.window)
	}
	for t := from; t <= i; t++ {
		for d := range a.dim {
			scores[t] += float64(qs[((first+i)*a.heads+h)*a.dim+d]) * keys[((first+t)*a.kvHeads+kh)*a.dim+d] * scale
		}
		if a.softcap > 0 {
			scores[t] = a.softcap * math.Tanh(scores[t]/a.softcap)
		}
		most = max(most, scores[t])
	}
	out, total := make([]float64, a.dim), 0.0
	if a.sinks {
		most = max(most, float64(sinks[h]))
		total = math.Exp(float64(sinks[h]) - most)
	}
	for t := from; t <= i; t++ {
		e := math.Exp(scores[t] - most)
		total += e
		for d := range out {
			out[d] += e * values[((first+t)*a.kvHeads+kh)*a.dim+d]
		}
	}
	for d := range out {
		out[d] /= total
	}
	return out, 4e-6
}

// TestKVRounding: bf16 KV rounds to nearest even, the same in every variant.
func TestKVRounding(t *testing.T) {
	values := []float32{1, 1 + 1.0/256, 1 + 3.0/256, -1 - 1.0/256, 3.4028235e38, 1e-40, float32(math.Inf(1)), 0.1}
	want := []uint16{0x3f80, 0x3f80, 0x3f82, 0xbf80, 0x7f80, 0x0001, 0x7f80, 0x3dcd}
	eachVariant(t, 1, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		b := newRig(t, kernels, 1, rng)
		defer b.Close()
		if err := b.AllocKV(backend.UniformKV(1, 1, 1, 1, len(values), backend.BF16)); err != nil {
			t.Fatal(err)
		}
		k, ks := b.buf(backend.TokenRows, len(values), 1)
		copy(ks, values)
		b.once(&backend.Step{Spans: []backend.Span{{Tokens: 1, Tables: [][]int32{{0}}}}}, func() { b.StoreKV(0, k, k) })
		for i, u := range u16view(b.KVRegion(0)) {
			if w := want[i%len(want)]; u != w {
				t.Errorf("%g is stored as %04x, want %04x", values[i%len(want)], u, w)
			}
		}
	})
}

// TestKVRoundingFP8: KV of E4M3 rounds the quotient by the scale to nearest even, within ±448, the
// same in every variant. Of -0, NaN and infinities only the bytes are compared.
func TestKVRoundingFP8(t *testing.T) {
	var values []float32
	for b := range 0x7f { // each value, the middle to the next, and the floats beside both
		at, next := backend.E4M3[b], backend.E4M3[min(b+1, 0x7e)]
		for _, f := range []float32{at, (at + next) / 2} {
			for _, g := range []float32{f, math.Nextafter32(f, -1), math.Nextafter32(f, 1000)} {
				values = append(values, g, -g)
			}
		}
	}
	want := make([]byte, len(values))
	for i, f := range values {
		want[i] = nearestE4M3(f)
	}
	inf := float32(math.Inf(1))
	values = append(values, 464, 465, 1e30, inf, -inf, float32(math.NaN()), 1e-40)
	want = append(want, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x7f, 0)
	for i, f := range values {
		if got := backend.ToE4M3(f); got != want[i] {
			t.Errorf("%g becomes %02x, want %02x", f, got, want[i])
		}
	}
	const width = 16
	for len(values)%width != 0 {
		values, want = append(values, 0), append(want, 0)
	}
	eachVariant(t, 1, func(t *testing.T, kernels string, _ uint64, rng *rand.Rand) {
		for _, scale := range []float32{1, 0.125, 4} {
			b := newRig(t, kernels, 1, rng)
			if err := b.AllocKV(backend.UniformKV(1, 1, 1, len(values)/width, width, backend.FP8)); err != nil {
				t.Fatal(err)
			}
			if scale != 1 {
				if err := b.ScaleKV(0, []float32{scale}, []float32{scale}); err != nil {
					t.Fatal(err)
				}
			}
			k, ks := b.buf(backend.TokenRows, len(values), 1)
			for i, f := range values {
				ks[i] = f * scale
			}
			b.once(&backend.Step{Spans: []backend.Span{{Tokens: 1, Tables: [][]int32{{0}}}}}, func() { b.StoreKV(0, k, k) })
			for i, got := range b.KVRegion(0) {
				if w := want[i%len(want)]; got != w {
					t.Errorf("%g by %g is stored as %02x, want %02x", ks[i%len(want)], scale, got, w)
				}
			}
			b.Close()
		}
	})
}

// nearestE4M3 returns the byte of the nearest value, of two the even one.
func nearestE4M3(f float32) byte {
	best, least := 0, math.Inf(1)
	for b := range 0x7f {
		d := math.Abs(math.Abs(float64(f)) - float64(backend.E4M3[b]))
		if d < least || d == least && b%2 == 0 {
			best, least = b, d
		}
	}
	if math.Signbit(float64(f)) {
		best |= 0x80
	}
	return byte(best)
}

// TestScaleKVRefuses: scales that fit no layer, or are not positive and finite.
func TestScaleKVRefuses(t *testing.T) {
	one := []float32{1}
	for _, dt := range []backend.DType{backend.BF16, backend.FP8} {
		b := newRig(t, Portable, 1, rand.New(rand.NewPCG(1, 1)))
		defer b.Close()
		if err := b.AllocKV(backend.UniformKV(1, 1, 1, 2, 8, dt)); err != nil {
			t.Fatal(err)
		}
		if err := b.ScaleKV(0, []float32{1, 2}, one); (err == nil) != (dt == backend.FP8) {
			t.Error(dt, err)
		}
		for _, bad := range [][]float32{nil, {1, 1, 1}, {0}, {-1}, {float32(math.NaN())}, {1, float32(math.Inf(1))}, {1e-30}} {
			if err := b.ScaleKV(0, one, bad); !errors.Is(err, backend.ErrShape) {
				t.Errorf("%v: %v", bad, err)
			}
			if err := b.ScaleKV(0, bad, one); !errors.Is(err, backend.ErrShape) {
				t.Errorf("%v: %v", bad, err)
			}
		}
		if err := b.ScaleKV(1, one, one); !errors.Is(err, backend.ErrShape) {
			t.Error(err)
		}
	}
}

// TestLoadRefuses: tensors whose data does not match their shape.
func TestLoadRefuses(t *testing.T) {
	b := newRig(t, Portable, 1, rand.New(rand.NewPCG(1, 1)))
	defer b.Close()
	for _, tn := range []backend.Tensor{
		{DType: backend.F32, Shape: []int{2, 3}, Data: make([]byte, 23)},
		{DType: backend.BF16, Shape: []int{4}, Data: make([]byte, 16)},
		{DType: backend.F32, Shape: []int{2, 0}},
		{DType: backend.F32, Shape: []int{1, 2, 3}, Data: make([]byte, 24)},
		{DType: 9, Shape: []int{2}, Data: make([]byte, 8)},
		{DType: backend.F32, Shape: []int{-2, -3}, Data: make([]byte, 24)},
	} {
		if _, err := b.Load(tn); !errors.Is(err, backend.ErrShape) {
			t.Errorf("%v of %d bytes: %v", tn.Shape, len(tn.Data), err)
		}
	}
}
