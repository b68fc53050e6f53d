package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// loadMXFP4 makes a random matrix of that kind and its values, which come from
// the format's definition and not from the code under test.
func (b *rig) loadMXFP4(out, in int) (backend.Weight, []float32) {
	b.t.Helper()
	magnitudes := [8]float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}
	data, values := make([]byte, out*in/32*17), make([]float32, out*in)
	scales := data[out*in/2:]
	for i := range scales {
		scales[i] = byte(121 + b.rng.IntN(6))
	}
	for i := range values {
		code := b.rng.IntN(16)
		data[i/2] |= byte(code << (i % 2 * 4))
		v := math.Ldexp(magnitudes[code%8], int(scales[i/32])-127)
		if code >= 8 {
			v = -v
		}
		values[i] = float32(v)
	}
	w, err := b.Load(backend.Tensor{Name: "random MXFP4", DType: backend.MXFP4, Shape: []int{out, in}, Data: data})
	if err != nil {
		b.t.Fatal(err)
	}
	return w, values
}

// TestRowOps: the operations that look at one number at a time.
func TestRowOps(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, cols := 1+rng.IntN(20), 2+rng.IntN(300)
		width := 1 + rng.IntN(cols)
		from := rng.IntN(cols - width + 1)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		var x [4]backend.Buf
		var xs, in [4][]float32
		for i := range x {
			x[i], xs[i] = b.buf(backend.TokenRows, cols, 20)
			in[i] = slices.Clone(xs[i])
		}
		add, adds := b.buf(backend.TokenRows, cols, 20)
		part, parts := b.buf(backend.TokenRows, width, 1)
		w, ws := b.load(backend.F32, 1)
		limit := float32(1 + 40*rng.Float64())
		b.once(nil, func() {
			b.Columns(part, x[0], from)
			b.Add(x[0], add, w)
			b.Add(x[1], add, backend.NoWeight)
			b.Scale(x[2], -1.75)
			b.Softcap(x[3], limit)
		})
		for i := range in[0] {
			sum := float64(in[0][i] + adds[i])
			near(t, seed, "scaled sum", i, xs[0][i], sum*float64(ws[0]), math.Abs(sum*float64(ws[0]))*ulp*2)
			near(t, seed, "sum", i, xs[1][i], float64(in[1][i]+adds[i]), 0)
			near(t, seed, "scaled", i, xs[2][i], float64(in[2][i]*-1.75), 0)
			want := float64(limit) * math.Tanh(float64(in[3][i])/float64(limit))
			near(t, seed, "softcap", i, xs[3][i], want, float64(limit)*ulp*16)
		}
		for i, v := range parts {
			near(t, seed, "columns", i, v, float64(in[0][i/width*cols+from+i%width]), 0)
		}
	})
}

// TestActivations: every gate, on numbers small and large.
func TestActivations(t *testing.T) {
	eachVariant(t, 20, func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		rows, cols := 1+rng.IntN(20), 1+rng.IntN(300)
		act := backend.Act(seed % 3)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		g, gs := b.buf(backend.TokenRows, cols, math.Pow(10, float64(rng.IntN(4))-1))
		u, us := b.buf(backend.TokenRows, cols, 10)
		in := slices.Clone(gs)
		b.once(nil, func() { b.GatedAct(g, g, u, act) })
		for i, v := range in {
			want := naiveAct(act, float64(v), float64(us[i]))
			// exp makes a relative error of the absolute one of its argument, and
			// 1+tanh loses what cancels.
			bound := math.Abs(want)*ulp*(16+4*math.Abs(float64(v))) + 1e-34
			if act == backend.GELUTanh {
				bound += math.Abs(float64(v)*float64(us[i])) * ulp * 8
			}
			near(t, seed, "act·up", i, gs[i], want, bound)
		}
	})
}
