package quantize

import (
	"cmp"
	"context"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// damping is the share of the mean square of all inputs that is added to that of each, so that
// inputs that the calibration hardly uses keep their weights.
const damping = 0.05

// panel is the number of rows of the factor that are computed together.
const panel = 64

// lanes is the number of outputs that are rounded together.
const lanes = 8

// factor describes how the inputs of a matrix vary together: their moments are the product of the
// transposed rows of unit, of pivots and of the rows of unit. Numbers are those of places, not of
// inputs.
type factor struct {
	order []int       // the input of each place, from the smallest to the largest mean square
	unit  [][]float32 // [place] the elements behind the diagonal, which is 1
	pivot []float32   // [place]
	drift []float32   // [input, input] mean products with the drift of each input; nil: there is none
}

// newFactor returns the factor of moments, of which row i has the mean products of input i and each
// one from i on. It is a Cholesky factor of which each row is divided by its element of the
// diagonal. It means nothing if the context of w has ended.
func newFactor(moments [][]float32, n int, w workers) *factor {
	f := &factor{order: make([]int, n), unit: make([][]float32, n), pivot: make([]float32, n)}
	mean := 0.0
	for i := range n {
		f.order[i] = i
		mean += float64(moments[i][0]) / float64(n)
	}
	slices.SortStableFunc(f.order, func(a, b int) int { return cmp.Compare(moments[a][0], moments[b][0]) })
	damp := max(damping*mean, math.SmallestNonzeroFloat32)
	h := make([][]float64, n) // by places, each row from the diagonal on
	w.each(n, func(i int) {
		h[i] = make([]float64, n-i)
		for j := range h[i] {
			a, b := f.order[i], f.order[i+j]
			h[i][j] = float64(moments[min(a, b)][max(a, b)-min(a, b)])
		}
		h[i][0] += damp
	})
	if w.ctx.Err() != nil { // rows are missing
		return f
	}
	for from := 0; from < n; from += panel {
		to := min(from+panel, n)
		w.each((n-from+panel-1)/panel, func(part int) { // less the products of earlier rows
			lo, hi := from+part*panel, min(from+(part+1)*panel, n)
			for i := from; i < to; i++ {
				if at := max(lo, i); at < hi {
					subtractAll(h[i][at-i:hi-i], h[:from], at, i)
				}
			}
		})
		for i := from; i < to; i++ {
			for k := from; k < i; k++ {
				subtract(h[i], h[k][i-k:], h[k][i-k])
			}
			root := math.Sqrt(max(h[i][0], damp*1e-6))
			for j := range h[i] {
				h[i][j] /= root
			}
		}
	}
	w.each(n, func(i int) {
		row := h[i]
		f.pivot[i], f.unit[i] = float32(row[0]*row[0]), make([]float32, n-i-1)
		for j := range f.unit[i] {
			f.unit[i][j] = float32(row[1+j] / row[0])
		}
		h[i] = nil // its memory can be used
	})
	return f
}

// subtractAll subtracts the products of rows with their elements of column i of to, which has the
// columns from at on. Four rows are read at once, and subtracted one after the other.
func subtractAll(to []float64, rows [][]float64, at, i int) {
	k := 0
	for ; k+4 <= len(rows); k += 4 {
		a, b, c, d := rows[k], rows[k+1], rows[k+2], rows[k+3]
		byA, byB, byC, byD := a[i-k], b[i-k-1], c[i-k-2], d[i-k-3]
		a, b, c, d = a[at-k:][:len(to)], b[at-k-1:][:len(to)], c[at-k-2:][:len(to)], d[at-k-3:][:len(to)]
		for j := range to {
			v := to[j] - byA*a[j]
			v -= byB * b[j]
			v -= byC * c[j]
			to[j] = v - byD*d[j]
		}
	}
	for ; k < len(rows); k++ {
		subtract(to, rows[k][at-k:], rows[k][i-k])
	}
}

// subtract subtracts by·from of to.
func subtract(to, from []float64, by float64) {
	from = from[:len(to)]
	for i := range to {
		to[i] -= by * from[i]
	}
}

// workers are so many threads, which stop when the context ends.
type workers struct {
	ctx     context.Context
	threads int // 0: GOMAXPROCS
}

// each calls f for all numbers below n. It leaves numbers out when the context ends.
func (w workers) each(n int, f func(i int)) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range min(n, cmp.Or(w.threads, runtime.GOMAXPROCS(0))) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && w.ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	all.Wait()
}

// scaling is the form of scales.
type scaling struct {
	bits  int                     // of a code: 4 or 8
	group int                     // inputs that share a scale
	round func(v float32) float32 // to the type in which scales are stored
}

// matrix is integers with scales.
type matrix struct {
	out, in int
	scaling
	codes  []int8    // [out, in]
	scales []float32 // [out, in/group]

	infinite atomic.Bool // a weight is infinite or NaN, and codes mean nothing
}

// row writes the weights of an output.
func (m *matrix) row(dst []float32, out int) {
	for i := range dst {
		dst[i] = float32(m.codes[out*m.in+i]) * m.scales[(out*m.in+i)/m.group]
	}
}

// round rounds a matrix [out, in], of which row writes the weights of an output. With a factor each
// rounding considers the errors of the inputs rounded before; the inputs of the largest mean square
// come first. f may be nil.
func round(out, in int, row func(dst []float32, out int), s scaling, f *factor, on workers) *matrix {
	m := &matrix{out: out, in: in, scaling: s, codes: make([]int8, out*in), scales: make([]float32, out*in/s.group)}
	on.each((out+lanes-1)/lanes, func(part int) {
		from := part * lanes
		rows := min(lanes, out-from)
		w := make([][]float32, rows)
		for r := range w {
			w[r] = make([]float32, in)
			row(w[r], from+r)
			if !finite(w[r]) {
				m.infinite.Store(true)
			}
			for g := 0; g < in; g += s.group {
				m.scales[((from+r)*in+g)/s.group] = s.scale(w[r][g : g+s.group])
			}
		}
		if f == nil {
			for r := range w {
				for i, v := range w[r] {
					at := (from+r)*in + i
					m.codes[at] = s.code(v, m.scales[at/s.group])
				}
			}
			return
		}
		if f.drift != nil {
			f.correct(w)
		}
		m.feedBack(from, w, f)
	})
	return m
}

// finite reports whether no number is infinite or NaN.
func finite(s []float32) bool {
	return !slices.ContainsFunc(s, func(v float32) bool { return v-v != 0 })
}

// correct changes the weights of up to lanes outputs. With the inputs of the model with rounded
// matrices, the outputs come closest to those of the original weights with the original inputs.
func (f *factor) correct(w [][]float32) {
	n := len(f.order)
	turned, v := make([][lanes]float32, n), make([][lanes]float32, n) // by input, by place
	for r := range w {
		for i, x := range w[r] {
			turned[i][r] = x
		}
	}
	for place, in := range f.order {
		v[place] = products(f.drift[in*n:(in+1)*n], turned)
	}
	for i, row := range f.unit {
		have := v[i]
		for j, u := range row {
			x := &v[i+1+j]
			x[0] -= u * have[0]
			x[1] -= u * have[1]
			x[2] -= u * have[2]
			x[3] -= u * have[3]
			x[4] -= u * have[4]
			x[5] -= u * have[5]
			x[6] -= u * have[6]
			x[7] -= u * have[7]
		}
		for r := range lanes {
			v[i][r] /= f.pivot[i]
		}
	}
	for i := n - 1; i >= 0; i-- {
		for r, sum := range products(f.unit[i], v[i+1:]) {
			v[i][r] -= sum
		}
		for r := range w {
			w[r][f.order[i]] += v[i][r]
		}
	}
}

// products returns the sums of the products of a and each lane of b, which have equal lengths.
func products(a []float32, b [][lanes]float32) (sum [lanes]float32) {
	b = b[:len(a)]
	for j, u := range a {
		x := &b[j]
		sum[0] += u * x[0]
		sum[1] += u * x[1]
		sum[2] += u * x[2]
		sum[3] += u * x[3]
		sum[4] += u * x[4]
		sum[5] += u * x[5]
		sum[6] += u * x[6]
		sum[7] += u * x[7]
	}
	return sum
}

// feedBack rounds up to lanes outputs, input by input.
func (m *matrix) feedBack(from int, w [][]float32, f *factor) {
	errs := make([][lanes]float32, m.in) // in the order of f
	for i := m.in - 1; i >= 0; i-- {
		sum := products(f.unit[i], errs[i+1:])
		in := f.order[i]
		for r := range w {
			at := (from+r)*m.in + in
			scale := m.scales[at/m.group]
			c := m.code(w[r][in]+sum[r], scale)
			m.codes[at], errs[i][r] = c, w[r][in]-float32(c)*scale
		}
	}
}

// middle returns what is added to codes where they must not be negative.
func (s *scaling) middle() int { return 1 << (s.bits - 1) }

// code returns the integer next to v/scale.
func (s *scaling) code(v, scale float32) int8 {
	if scale == 0 {
		return 0
	}
	const magic = 1.5 * (1 << 23) // what remains of a sum is an integer
	end := float32(s.middle())
	return int8(float32(min(max(v/scale, -end), end-1)+magic) - magic)
}

// scale returns the scale with which the weights of a group are rounded with the least squared
// error, of some that map the largest weight to about the code at either end.
func (s *scaling) scale(w []float32) (best float32) {
	most, signed := float32(0), float32(0)
	for _, v := range w {
		if a := max(v, -v); a > most {
			most, signed = a, v
		}
	}
	if most == 0 {
		return 0
	}
	lowest, middle := math.Inf(1), float32(s.middle())
	for _, end := range []float32{-middle, middle - 1} {
		for k := range steps {
			scale := s.round(signed / end * (firstStep + float32(k)*(lastStep-firstStep)/(steps-1)))
			if scale == 0 {
				continue
			}
			sum := 0.0
			for _, v := range w {
				d := float64(v - float32(s.code(v, scale))*scale)
				sum += d * d
			}
			if sum < lowest {
				lowest, best = sum, scale
			}
		}
	}
	return best
}

// Candidates for a scale, as shares of the one that maps the largest weight to an end.
const (
	steps               = 16
	firstStep, lastStep = 0.7, 1.1
)
