package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// fp8Tensor is a random matrix in FP8, every byte that is a number among them, with
// blocks of random sizes that begin anywhere.
func fp8Tensor(rng *rand.Rand, dev float64, out, in int) backend.Tensor {
	side := func(n int) (size, first int) {
		size = []int{1, 7, 16, 32, 128, n}[rng.IntN(6)]
		return size, rng.IntN(2) * rng.IntN(size)
	}
	s := &backend.Scales{}
	s.Rows, s.Row = side(out)
	s.Cols, s.Col = side(in)
	for range ((s.Row+out-1)/s.Rows + 1) * s.Across(in) {
		s.Values = append(s.Values, float32(dev/100*(0.5+rng.Float64())))
	}
	data := make([]byte, out*in)
	for i := range data {
		for data[i] = byte(rng.IntN(256)); data[i]&0x7f == 0x7f; {
			data[i] = byte(rng.IntN(256))
		}
	}
	return backend.Tensor{Name: "random fp8", DType: backend.FP8, Shape: []int{out, in}, Data: data, Scales: s}
}

// TestFP8Linear: a matrix in FP8 gives the bits of one in float32 that holds what
// it means, whatever the blocks and the batch, and the sums of float64.
func TestFP8Linear(t *testing.T) {
	eachVariant(t, 40, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, in, out := 1+rng.IntN(20), 1+rng.IntN(300), 1+rng.IntN(200)
		if seed%8 == 0 {
			in += 2000 // more than one block of the reduction
		}
		if seed%11 == 0 {
			rows += 95
		}
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, in, 1)
		y, ys := b.buf(backend.TokenRows, out, 1)
		z, zs := b.buf(backend.TokenRows, out, 1)
		small := fp8Tensor(rng, 1, out, in)
		wide := small.Expand(backend.F32)
		bias, bs := b.load(backend.BF16, out)
		var ids [2]backend.Weight
		for i, tn := range []backend.Tensor{small, wide} {
			var err error
			if ids[i], err = b.Load(tn); err != nil {
				t.Fatal(err)
			}
		}
		b.once(nil, func() {
			b.Linear(y, x, ids[0], bias)
			b.Linear(z, x, ids[1], bias)
		})
		if !slices.Equal(ys, zs) {
			t.Fatalf("seed %d: %d rows of [%d, %d], blocks %+v: the bits are not those of float32", seed, rows, out, in, small.Scales)
		}
		ws := make([]float32, in)
		for n := range out {
			decode(ws, wide.Data[n*in*4:(n+1)*in*4], backend.F32)
			for r := range rows {
				sum, size := float64(bs[n]), math.Abs(float64(bs[n]))
				for k, v := range xs[r*in : (r+1)*in] {
					sum += float64(v) * float64(ws[k])
					size += math.Abs(float64(v) * float64(ws[k]))
				}
				near(t, seed, "y", r*out+n, ys[r*out+n], sum, ulp*size*float64(in+4))
			}
		}
	})
}

// TestFP8Values: each byte has its E4M3 value in every variant, and an embedding's row is
// multiplied by its scales.
func TestFP8Values(t *testing.T) {
	eachVariant(t, 3, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		const vocab, cols = 3, 254
		tn := fp8Tensor(rng, 1, vocab, cols)
		for i := range tn.Data {
			if tn.Data[i] = byte(i % cols); i%cols >= 127 {
				tn.Data[i]++ // but for the NaN of either sign
			}
		}
		b := newRig(t, kernels, vocab, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, cols, 1)
		w, err := b.Load(tn)
		if err != nil {
			t.Fatal(err)
		}
		b.once(&backend.Step{Tokens: []int32{0, 1, 2}}, func() { b.Embed(x, w) })
		for i, v := range xs {
			scale := tn.Scales.Of(i/cols, cols)[(tn.Scales.Col+i%cols)/tn.Scales.Cols]
			if want := backend.E4M3[tn.Data[i]] * scale; math.Float32bits(v) != math.Float32bits(want) {
				t.Fatalf("byte %#x with scale %g is %g, want %g", tn.Data[i], scale, v, want)
			}
		}
	})
}

// TestFP8MoE: experts in FP8 give the bits of experts in float32.
func TestFP8MoE(t *testing.T) {
	eachVariant(t, 6, func(t *testing.T, kernels string, seed uint64, _ *rand.Rand) {
		var results [2][]float32
		for i := range results {
			rng := rand.New(rand.NewPCG(seed, 51))
			b := newRig(t, kernels, 2+rng.IntN(40), rng)
			m := newMixtureOf(b, backend.F32)
			matrices := func(ids []backend.Weight, out, in int) {
				for e := range ids {
					tn := fp8Tensor(rng, 0.3, out, in)
					if i == 1 {
						tn = tn.Expand(backend.F32)
					}
					var err error
					if ids[e], err = b.Load(tn); err != nil {
						t.Fatal(err)
					}
				}
			}
			matrices(m.spec.Gate, m.inner, m.hidden)
			matrices(m.spec.Up, m.inner, m.hidden)
			matrices(m.spec.Down, m.hidden, m.inner)
			b.once(nil, func() { b.MoE(m.y, m.x, m.router, m.spec) })
			results[i] = slices.Clone(m.ys)
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(results[0], results[1]) {
			t.Errorf("seed %d: the bits are not those of float32", seed)
		}
	})
}

// TestFP8Takes: blocks of 128 by 128 cost half a hundredth of what they scale, and
// what is no number, or has no scales, is refused.
func TestFP8Takes(t *testing.T) {
	b := newRig(t, Variants()[0], 1, rand.New(rand.NewPCG(1, 1)))
	defer b.Close()
	matrix := func(change func(*backend.Tensor)) error {
		tn := backend.Tensor{Name: "w", DType: backend.FP8, Shape: []int{256, 384}, Data: make([]byte, 256*384),
			Scales: &backend.Scales{Values: make([]float32, 6), Rows: 128, Cols: 128}}
		change(&tn)
		_, err := b.Load(tn)
		return err
	}
	if err := matrix(func(*backend.Tensor) {}); err != nil {
		t.Fatal(err)
	}
	if n := len(b.weights[0].matrix); n > 256*384*1005/1000 {
		t.Errorf("%d values of 8 bits take %d bytes", 256*384, n)
	}
	for says, change := range map[string]func(*backend.Tensor){
		"scales of tensor w": func(tn *backend.Tensor) { tn.Scales = nil },
		"w [256 384]":        func(tn *backend.Tensor) { tn.Scales.Values = tn.Scales.Values[1:] },
		"not finite":         func(tn *backend.Tensor) { tn.Data[7] = 0xff },
		"w: fp8 with":        func(tn *backend.Tensor) { tn.Scales.Values[3] = float32(math.Inf(1)) },
		"as int8":            func(tn *backend.Tensor) { tn.As = backend.INT8 },
		"of 98303 bytes":     func(tn *backend.Tensor) { tn.Data = tn.Data[1:] },
	} {
		if err := matrix(change); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}
