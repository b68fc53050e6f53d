package quantize

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

var two = workers{context.Background(), 2}

// correlated returns inputs [rows, n] that are mixtures of few signals, of very different sizes.
func correlated(r *rand.Rand, rows, n int) []float32 {
	mix := make([]float64, n*n)
	for i := range mix {
		mix[i] = r.NormFloat64() * math.Exp(r.NormFloat64()*0.5) / (1 + float64(i%n))
	}
	x := make([]float32, rows*n)
	for t := range rows {
		signal := make([]float64, n)
		for i := range signal {
			signal[i] = r.NormFloat64()
		}
		for i := range n {
			sum := 0.0
			for k, s := range signal {
				sum += mix[i*n+k] * s
			}
			x[t*n+i] = float32(sum)
		}
	}
	return x
}

func weights(r *rand.Rand, out, in int) []float32 {
	w := make([]float32, out*in)
	for i := range w {
		w[i] = float32(r.NormFloat64() * 0.05)
	}
	return w
}

func rowOf(w []float32, in int) func(dst []float32, out int) {
	return func(dst []float32, out int) { copy(dst, w[out*in:(out+1)*in]) }
}

// loss is the mean squared error of the outputs.
func loss(m *matrix, w, x []float32) (sum float64) {
	row := make([]float32, m.in)
	for out := range m.out {
		m.row(row, out)
		for t := 0; t < len(x); t += m.in {
			d := 0.0
			for i, v := range row {
				d += float64(v-w[out*m.in+i]) * float64(x[t+i])
			}
			sum += d * d
		}
	}
	return sum / float64(len(x)/m.in*m.out)
}

// naive rounds an output as the GPTQ paper has it: after each input, in the order in which the
// factor has them from its end, what remains is updated by the inverse of the moments of the inputs
// that remain.
func naive(w []float32, scales []float32, s scaling, h [][]float64, order []int) []int8 {
	n := len(w)
	rest := make([]float64, n)
	for i, v := range w {
		rest[i] = float64(v)
	}
	codes := make([]int8, n)
	left := slices.Clone(order)
	for len(left) > 0 {
		k := len(left)
		inverse := invert(h, left)
		in := left[k-1]
		codes[in] = s.code(float32(rest[in]), scales[in/s.group])
		e := (rest[in] - float64(codes[in])*float64(scales[in/s.group])) / inverse[k-1][k-1]
		for i, other := range left[:k-1] {
			rest[other] -= e * inverse[i][k-1]
		}
		left = left[:k-1]
	}
	return codes
}

// invert returns the inverse of some rows and columns of h, by Gauss-Jordan elimination.
func invert(h [][]float64, of []int) [][]float64 {
	n := len(of)
	a := make([][]float64, n)
	for i := range a {
		a[i] = make([]float64, 2*n)
		for j := range n {
			a[i][j] = h[of[i]][of[j]]
		}
		a[i][n+i] = 1
	}
	for i := range n {
		p := a[i][i]
		for j := range a[i] {
			a[i][j] /= p
		}
		for k := range n {
			if f := a[k][i]; k != i {
				for j := range a[k] {
					a[k][j] -= f * a[i][j]
				}
			}
		}
	}
	for i := range a {
		a[i] = a[i][n:]
	}
	return a
}

// Rounding with a factor gives the codes of the paper's algorithm, and smaller errors of outputs
// than rounding to the nearest code.
func TestFeedback(t *testing.T) {
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 1))
		n, group, out := []int{32, 64}[seed%2], 32, 5+int(seed)
		x, w := correlated(r, 4*n, n), weights(r, out, n)
		moments, err := triangleOf(x, n, two)
		if err != nil {
			t.Fatal(err)
		}
		f := newFactor(moments, n, two)
		s := scaling{[]int{4, 8}[seed/2], group, roundBFloat}
		with, without := round(out, n, rowOf(w, n), s, f, two), round(out, n, rowOf(w, n), s, nil, two)
		if a, b := loss(with, w, x), loss(without, w, x); !(a < 0.8*b) {
			t.Errorf("seed %d: the error is %g with feedback, %g without", seed, a, b)
		}
		h, mean := make([][]float64, n), 0.0
		for i := range h {
			mean += float64(moments[i][0]) / float64(n)
		}
		for i := range h {
			h[i] = make([]float64, n)
			for j := range h[i] {
				h[i][j] = float64(moments[min(i, j)][max(i, j)-min(i, j)])
			}
			h[i][i] += damping * mean
		}
		differ := 0
		for o := range out {
			scales := with.scales[o*n/group : (o+1)*n/group]
			for i, c := range naive(w[o*n:(o+1)*n], scales, s, h, f.order) {
				if c != with.codes[o*n+i] {
					differ++ // where a float32 sum lies between two codes, and all that follow
				}
			}
		}
		if differ > out*n/25 {
			t.Errorf("seed %d: %d of %d codes differ from the naive algorithm's", seed, differ, out*n)
		}
	}
}

// driftOf returns the mean products of columns and drifts, and triangleOf those of columns without
// the ones before the diagonal, also of more columns than are multiplied together.
func TestMoments(t *testing.T) {
	for _, n := range []int{1, 37, leftColumns + 5, rightColumns + 3} {
		const rows = 51
		r := rand.New(rand.NewPCG(1, 2))
		x, y := make([]float32, rows*n), make([]float32, rows*n)
		for i := range x {
			x[i], y[i] = float32(r.NormFloat64()), float32(r.NormFloat64())
		}
		drift, err := driftOf(x, y, n, two)
		if err != nil {
			t.Fatal(err)
		}
		half, err := triangleOf(x, n, two)
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, got float32, i, j int, of func(at int) float32) {
			sum, size := 0.0, 0.0
			for k := range rows {
				p := float64(x[k*n+i]) * float64(of(k*n+j))
				sum, size = sum+p/rows, size+math.Abs(p)/rows
			}
			if d := math.Abs(float64(got) - sum); !(d <= 1e-5*size) {
				t.Fatalf("%d columns: %s of %d and %d is %g, want %g", n, what, i, j, got, sum)
			}
		}
		for i := 0; i < n; i += 1 + n/60 {
			for j := range n {
				check("the drift", drift[i*n+j], i, j, func(at int) float32 { return y[at] - x[at] })
				if j >= i {
					check("the moment", half[i][j-i], i, j, func(at int) float32 { return x[at] })
				}
			}
		}
	}
}

// Inputs that are always zero, or equal to others, and matrices of zeros have finite codes.
func TestFeedbackOfNothing(t *testing.T) {
	const n = 64
	for name, x := range map[string][]float32{"zero": make([]float32, n*n), "one": slices.Repeat([]float32{1}, n*n)} {
		moments, err := triangleOf(x, n, two)
		if err != nil {
			t.Fatal(err)
		}
		f, w := newFactor(moments, n, two), weights(rand.New(rand.NewPCG(1, 3)), 3, n)
		clear(w[n : 2*n])
		m := round(3, n, rowOf(w, n), scaling{4, 32, roundBFloat}, f, two)
		row := make([]float32, n)
		for o := range 3 {
			m.row(row, o)
			for i, v := range row {
				if d := math.Abs(float64(v - w[o*n+i])); !(d <= 0.2) || o == 1 && v != 0 {
					t.Errorf("%s: weight [%d, %d] is %g, was %g", name, o, i, v, w[o*n+i])
				}
			}
		}
	}
}

// A scale is at least as good as that of the largest weight.
func TestScale(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 4))
	s := scaling{4, 32, roundBFloat}
	off := func(w []float32, scale float32) (sum float64) {
		for _, v := range w {
			d := float64(v - float32(s.code(v, scale))*scale)
			sum += d * d
		}
		return sum
	}
	better := 0
	for range 200 {
		w := weights(r, 1, 32)
		plain := roundBFloat(max(slices.Max(w), -slices.Min(w)) / 7)
		found := s.scale(w)
		if found == 0 || off(w, found) > 1.1*off(w, plain) {
			t.Fatalf("the scale of %v is %g, with an error of %g", w, found, off(w, found))
		}
		if off(w, found) < off(w, plain) {
			better++
		}
	}
	if better < 150 {
		t.Errorf("%d of 200 scales are better than that of the largest weight", better)
	}
}

// float16 scales are those of backend.Half.
func TestHalf(t *testing.T) {
	for _, v := range []float32{0, 1, -1, 0.333, 1e-7, -6e-5, 65504, 3.0517578e-05, 6.1035156e-05, 6.0975552e-05} {
		if got := roundHalf(v); math.Abs(float64(got-v)) > max(math.Abs(float64(v))/2048, 1.0/(1<<25)) || roundHalf(got) != got {
			t.Errorf("%g becomes %g", v, got)
		}
	}
}

// A disk that is too small is an error before the conversion.
func TestRoom(t *testing.T) {
	if err := room(t.TempDir(), 1); err != nil {
		t.Error(err)
	}
	if err := room(t.TempDir(), math.MaxInt64); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
}

// Inputs that overflow have no factor.
func TestOverflow(t *testing.T) {
	x := slices.Repeat([]float32{1e30}, 64)
	if _, err := factorOf(x, x, 32, two); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
}
