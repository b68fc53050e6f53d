//go:build cgo && amd64

package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// amxRounded is x as AMX's products see it.
func amxRounded(x []float32) []float64 {
	out := make([]float64, len(x))
	for i, v := range x {
		b := math.Float32bits(v)
		b += 0x7fff + b>>16&1
		out[i] = float64(math.Float32frombits(b &^ 0xffff))
	}
	return out
}

// TestAMXLinear: products are those of the weights with rows rounded to bf16, to the rounding of the sums.
func TestAMXLinear(t *testing.T) {
	needAMX(t)
	for seed := range trials(60) {
		rng := rand.New(rand.NewPCG(seed, 43))
		rows, in, out := 1+rng.IntN(40), 1+rng.IntN(300), 1+rng.IntN(200)
		if seed%8 == 0 {
			in += 2100 // more than one block of the reduction
		}
		if seed%11 == 0 {
			rows += 95
		}
		dt := backend.BF16
		switch seed % 4 {
		case 2:
			dt, in = backend.MXFP4, (in+31)/32*32
		case 3:
			dt = backend.FP8
		}
		b := newRig(t, AMX, rows, rng)
		x, xs := b.buf(backend.TokenRows, in, 1)
		y, ys := b.buf(backend.TokenRows, out, 1)
		w, ws := b.load(dt, out, in)
		bias, bs := b.load(backend.BF16, out)
		if dt == backend.FP8 { // what a scale makes of a value is rounded, too
			for i, v := range amxRounded(ws) {
				ws[i] = float32(v)
			}
		}
		b.once(nil, func() { b.Linear(y, x, w, bias) })
		for r := range rows {
			row := amxRounded(xs[r*in : (r+1)*in])
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
		b.Close()
	}
}

// TestAMXSameBits: a row gives the same bits alone and in every company, whole tiles or not, in one pass over the weights or several.
func TestAMXSameBits(t *testing.T) {
	needAMX(t)
	for seed := range trials(20) {
		rng := rand.New(rand.NewPCG(seed, 44))
		in, out := 1+rng.IntN(2500), 1+rng.IntN(150)
		const most = 120
		values := make([]float32, most*in)
		for i := range values {
			values[i] = float32(rng.NormFloat64())
		}
		tn := tensor(rng, []backend.DType{backend.BF16, backend.FP8}[seed%2], 0.05, out, in)
		var first []float32
		for _, rows := range []int{most, 1, 2, 15, 16, 17, 1 + rng.IntN(most)} {
			b := newRig(t, AMX, rows, rng)
			x, xs := b.buf(backend.TokenRows, in, 1)
			y, ys := b.buf(backend.TokenRows, out, 1)
			w, err := b.Load(tn)
			if err != nil {
				t.Fatal(err)
			}
			copy(xs, values)
			b.once(nil, func() { b.Linear(y, x, w, backend.NoWeight) })
			if first == nil {
				first = slices.Clone(ys)
			} else if !slices.Equal(first[:rows*out], ys) {
				t.Errorf("seed %d: %d rows of [%d, %d] differ from the same among %d", seed, rows, out, in, most)
			}
			b.Close()
		}
	}
}

// TestAMXForms: a row that products read in 8 bits, in bf16 and as it is, is there for each in its form.
func TestAMXForms(t *testing.T) {
	needAMX(t)
	rng := rand.New(rand.NewPCG(1, 45))
	b := newRig(t, AMX, 3, rng)
	defer b.Close()
	x, _ := b.buf(backend.TokenRows, 70, 1)
	var ys [6][]float32
	var ids [6]backend.Buf
	for i := range ys {
		ids[i], ys[i] = b.buf(backend.TokenRows, 50, 1)
	}
	half, _ := b.load(backend.BF16, 50, 70)
	eight, _ := b.load(backend.INT8, 50, 70)
	plain, _ := b.load(backend.F32, 50, 70)
	b.once(nil, func() {
		for i, w := range []backend.Weight{half, eight, plain, half, eight, plain} {
			b.Linear(ids[i], x, w, backend.NoWeight)
		}
	})
	for i := range 3 {
		if !slices.Equal(ys[i], ys[i+3]) {
			t.Errorf("product %d is another one the second time", i)
		}
	}
}

func needAMX(t *testing.T) {
	t.Helper()
	if !Has(AMX) {
		t.Log("this processor has no AMX: its kernels are only compiled here")
		t.SkipNow()
	}
}
