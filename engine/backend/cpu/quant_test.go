package cpu

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// dequantize rounds a matrix of rows of cols to what it means in 8 or 4 bits.
func dequantize(values []float32, cols int, as backend.DType) {
	q := make([]byte, quantGroup)
	for row := range slices.Chunk(values, cols) {
		for group := range slices.Chunk(row, quantGroup) {
			scale := backend.QuantizeGroup(q, group, as)
			for i := range group {
				group[i] = scale * float32(int8(q[i]))
			}
		}
	}
}

// rounded is x as products with quantized weights see it.
func rounded(x []float32) []float64 {
	at := quantLayout(len(x))
	q := make([]byte, at.size)
	quantize(q, x)
	out := make([]float64, len(x))
	for i := range out {
		out[i] = float64(int8(q[i])) * float64(f32view(q[at.scale:])[i/quantGroup])
	}
	return out
}

// TestQuantizedError: no number moves by more than half a step of its group, of
// which 8 bits have 127 to the largest and 4 bits 8.
func TestQuantizedError(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range trials(2000) {
		x := make([]float32, 1+rng.IntN(150))
		size := math.Exp(rng.NormFloat64() * 8)
		for i := range x {
			x[i] = float32(rng.NormFloat64() * size)
			if rng.IntN(9) == 0 {
				x[i] = 0
			}
		}
		got := rounded(x)
		eight, four := slices.Clone(x), slices.Clone(x)
		dequantize(eight, len(x), backend.INT8)
		dequantize(four, len(x), backend.INT4)
		for at := 0; at < len(x); at += quantGroup {
			group := x[at:min(at+quantGroup, len(x))]
			most := float64(max(slices.Max(group), -slices.Min(group)))
			for i, v := range group {
				for name, c := range map[string]struct{ got, bound float64 }{
					"activation": {got[at+i], most / 127 * 0.5001},
					"int8":       {float64(eight[at+i]), most / 127 * 0.505},
					"int4":       {float64(four[at+i]), most / 8 * 1.03}, // the other end has 7 steps
				} {
					if d := math.Abs(c.got - float64(v)); !(d <= c.bound+1e-30) {
						t.Fatalf("%s of %g in a group up to %g is %g", name, v, most, c.got)
					}
				}
			}
		}
	}
}

// TestQuantizedLinear: products with int8 and int4 weights are those of the
// numbers that weights and activations were rounded to, made from either type,
// and every kind of dot product gives the same bits.
func TestQuantizedLinear(t *testing.T) {
	for seed := range trials(40) {
		var fused []float32
		for _, kernels := range Variants() {
			t.Run(kernels, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 41))
				rows, in, out := 1+rng.IntN(20), 1+rng.IntN(300), 1+rng.IntN(200)
				if seed%8 == 0 {
					in += 2100 // more than one block of the reduction
				}
				if seed%11 == 0 {
					rows += 95
				}
				as, from := []backend.DType{backend.INT8, backend.INT4}[rng.IntN(2)], backend.DType(1+rng.IntN(2))
				b := newRig(t, kernels, rows, rng)
				defer b.Close()
				x, xs := b.buf(backend.TokenRows, in, 1)
				y, ys := b.buf(backend.TokenRows, out, 1)
				tn := tensor(rng, from, 0.05, out, in)
				ws := make([]float32, out*in)
				decode(ws, tn.Data, from)
				dequantize(ws, in, as)
				tn.As = as
				w, err := b.Load(tn)
				if err != nil {
					t.Fatal(err)
				}
				bias, bs := b.load(backend.BF16, out)
				b.once(nil, func() { b.Linear(y, x, w, bias) })
				for r := range rows {
					row := rounded(xs[r*in : (r+1)*in])
					for n := range out {
						sum, size := float64(bs[n]), math.Abs(float64(bs[n]))
						for k, v := range row {
							p := v * float64(ws[n*in+k])
							sum += p
							size += math.Abs(p)
						}
						near(t, seed, "y", r*out+n, ys[r*out+n], sum, ulp*size*8)
					}
				}
				switch {
				case kernels == Portable || kernels == Generic:
				case fused == nil:
					fused = slices.Clone(ys)
				case !slices.Equal(fused, ys):
					t.Errorf("seed %d: the bits differ from those of %s", seed, Variants()[0])
				}
			})
		}
	}
}

// TestQuantizedShares: rows are rounded once for all products that read them, and
// again when they have changed.
func TestQuantizedShares(t *testing.T) {
	eachVariant(t, 4, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		b := newRig(t, kernels, 3, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, 70, 1)
		y, _ := b.buf(backend.TokenRows, 70, 1)
		z, zs := b.buf(backend.TokenRows, 70, 1)
		w, ws := b.load(backend.INT8, 70, 70)
		b.once(nil, func() {
			b.Linear(y, x, w, backend.NoWeight)
			b.Linear(z, x, w, backend.NoWeight)
			b.Scale(x, 3)
			b.Linear(z, x, w, backend.NoWeight)
		})
		kinds := map[opKind]int{}
		for _, p := range b.plans {
			for _, o := range p.ops {
				kinds[o.kind]++
			}
		}
		if kinds[opQuantize] != 2 || kinds[opLinear] != 3 {
			t.Errorf("recorded %d times rounding for %d products, want 2 for 3", kinds[opQuantize], kinds[opLinear])
		}
		for r := range 3 {
			row := rounded(xs[r*70 : (r+1)*70]) // after Scale
			for n := range 70 {
				sum, size := 0.0, 0.0
				for k, v := range row {
					sum += v * float64(ws[n*70+k])
					size += math.Abs(v * float64(ws[n*70+k]))
				}
				near(t, seed, "z", r*70+n, zs[r*70+n], sum, ulp*size*8)
			}
		}
	})
}

// TestQuantizedEmbed: a row of a quantized table is what the row was rounded to.
func TestQuantizedEmbed(t *testing.T) {
	eachVariant(t, 8, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, cols, vocab := 1+rng.IntN(20), 1+rng.IntN(200), 1+rng.IntN(70)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, cols, 1)
		w, ws := b.load([]backend.DType{backend.INT8, backend.INT4}[seed%2], vocab, cols)
		ids := make([]int32, rows)
		for i := range ids {
			ids[i] = int32(rng.IntN(vocab))
		}
		b.once(&backend.Step{Tokens: ids}, func() { b.Embed(x, w) })
		for r, id := range ids {
			for i := range cols {
				near(t, seed, "x", r*cols+i, xs[r*cols+i], float64(ws[int(id)*cols+i]), 0)
			}
		}
	})
}

// TestQuantizedMoE: experts in 8 and 4 bits give each row the same bits alone and
// in a batch, and about what they give unrounded.
func TestQuantizedMoE(t *testing.T) {
	eachVariant(t, 4, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows := 2 + rng.IntN(120)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		m := newMixtureOf(b, []backend.DType{backend.INT8, backend.INT4}[seed%2])
		record := func() { b.MoE(m.y, m.x, m.router, m.spec) }
		b.once(nil, record)
		batch := slices.Clone(m.ys)
		var off, all float64
		for r := range rows {
			want, _ := m.naive(r) // of rounded weights, but not of rounded activations
			copy(m.xs, m.xs[r*m.hidden:(r+1)*m.hidden])
			copy(m.scores, m.scores[r*m.experts:(r+1)*m.experts])
			b.once(&backend.Step{Tokens: make([]int32, 1), Positions: make([]int32, 1)}, record)
			for i, v := range batch[r*m.hidden : (r+1)*m.hidden] {
				if math.Float32bits(v) != math.Float32bits(m.ys[i]) {
					t.Fatalf("seed %d: [%d, %d] is %g in a batch of %d, %g alone", seed, r, i, v, rows, m.ys[i])
				}
				off += (float64(v) - want[i]) * (float64(v) - want[i])
				all += want[i] * want[i]
			}
		}
		if !(off <= all*4e-4) { // 2 % of its size
			t.Errorf("seed %d: the outputs are off by %g of %g, in squares", seed, off, all)
		}
	})
}

// TestQuantizedRefusals: what cannot be turned into 8 or 4 bits is refused.
func TestQuantizedRefusals(t *testing.T) {
	b := newRig(t, Variants()[0], 1, rand.New(rand.NewPCG(1, 1)))
	defer b.Close()
	for _, tn := range []backend.Tensor{
		{DType: backend.F32, Shape: []int{4}, Data: make([]byte, 16), As: backend.INT8},
		{DType: backend.MXFP4, Shape: []int{1, 32}, Data: make([]byte, 17), As: backend.INT4},
		{DType: backend.F32, Shape: []int{1, 4}, Data: make([]byte, 16), As: backend.BF16},
		{DType: backend.INT8, Shape: []int{1, 64}, Data: make([]byte, 68)},
	} {
		if _, err := b.Load(tn); err == nil {
			t.Errorf("%s %v as %s was loaded", tn.DType, tn.Shape, tn.As)
		}
	}
}

// TestSameBitsQuantized is TestSameBits for int8 and int4.
func TestSameBitsQuantized(t *testing.T) {
	const want = 0x532310e67a7cb8e7 // changes only with KernelVersion
	for _, kernels := range Variants() {
		if kernels == Portable || kernels == Generic {
			continue
		}
		t.Run(kernels, func(t *testing.T) {
			const rows, in, out = 37, 1100, 150
			p := plainBits(1)
			b := newRig(t, kernels, rows, rand.New(rand.NewPCG(1, 1)))
			defer b.Close()
			x, xs := b.buf(backend.TokenRows, in, 1)
			p.fill(xs)
			h := fnv.New64a()
			for _, as := range []backend.DType{backend.INT8, backend.INT4} {
				y, ys := b.buf(backend.TokenRows, out, 1)
				var data []byte
				for range out * in {
					data = binary.LittleEndian.AppendUint16(data, toBF16(p.next()))
				}
				w, err := b.Load(backend.Tensor{Name: "plain", DType: backend.BF16, Shape: []int{out, in}, Data: data, As: as})
				if err != nil {
					t.Fatal(err)
				}
				clear(b.plans)
				b.once(nil, func() { b.Linear(y, x, w, backend.NoWeight) })
				for _, f := range ys {
					h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(f)))
				}
			}
			if got := h.Sum64(); got != want {
				t.Errorf("the results hash to %#x, want %#x", got, uint64(want))
			}
		})
	}
}
