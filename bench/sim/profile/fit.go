package profile

import (
	"math"
	"slices"
)

// TimedStep is a measured step, or the mean of several.
type TimedStep struct {
	Chunk, Attended, Streams, ContextSum float64 // as Shape has them
	Seconds                              float64
	Weight                               float64 // steps of which this is the mean; 0: 1
}

// DecodePoint returns the step of a point of decoding.
func DecodePoint(p []float64) TimedStep {
	return TimedStep{Streams: p[0], ContextSum: p[0] * p[1], Seconds: p[2]}
}

// PrefillPoint returns the step of a point of prefill.
func PrefillPoint(p []float64) TimedStep {
	return TimedStep{Chunk: p[0], Attended: p[0] * (p[1] + p[0]/2), Seconds: p[2]}
}

// FitDecode sets the coefficients and their mean relative error from steps that only decode. No
// coefficient is negative.
func (d *Decode) FitDecode(steps []TimedStep) {
	rows := make([][]float64, len(steps))
	for i, s := range steps {
		rows[i] = []float64{1, s.ContextSum, s.Streams}
	}
	x := leastSquares(rows, steps)
	d.Fixed, d.PerCtx, d.PerSeq = x[0], x[1], x[2]
	d.MAPE = meanError(steps, func(i int) float64 { return dot(rows[i], x) })
}

// FitPrefill sets the coefficients and their mean relative error from steps that only compute
// prompt tokens. The floor is the one of the measured times with which the error is least.
func (r *Prefill) FitPrefill(steps []TimedStep) {
	rows := make([][]float64, len(steps))
	floors := []float64{0}
	for i, s := range steps {
		rows[i] = []float64{1, s.Chunk, s.Attended}
		floors = append(floors, s.Seconds)
	}
	slices.Sort(floors)
	best := math.Inf(1)
	for _, floor := range floors[:1+len(floors)/2] {
		var above [][]float64
		var fitted []TimedStep
		for i, s := range steps {
			if s.Seconds > floor {
				above, fitted = append(above, rows[i]), append(fitted, s)
			}
		}
		if len(fitted) < 3 {
			break
		}
		x := leastSquares(above, fitted)
		if e := meanError(steps, func(i int) float64 { return max(floor, dot(rows[i], x)) }); e < best {
			best = e
			*r = Prefill{Floor: floor, Fixed: x[0], PerToken: x[1], PerPair: x[2], MAPE: e, Points: r.Points}
		}
	}
}

// FitMixed sets Gamma, in hundredths, from steps with both kinds of work, by the profile's other
// times. Without steps it is 1.
func (p *Profile) FitMixed(steps []TimedStep) {
	best, bestError := 1.0, math.Inf(1)
	for i := 100; i >= 0; i-- {
		p.Step.Mixed.Gamma = float64(i) / 100
		t := p.Times()
		if e := meanError(steps, func(i int) float64 { return t.Predict(&steps[i]) }); e < bestError {
			best, bestError = p.Step.Mixed.Gamma, e
		}
	}
	p.Step.Mixed.Gamma = best
}

// Predict returns the seconds of a step's computation, without the time between steps.
func (t *Times) Predict(s *TimedStep) float64 {
	switch {
	case s.Streams == 0:
		return t.chunk(s.Chunk, s.Attended)
	case s.Chunk == 0:
		return t.streams(s.Streams, s.ContextSum)
	}
	return t.mixed(t.chunk(s.Chunk, s.Attended), t.streams(s.Streams, s.ContextSum))
}

// meanError returns the mean relative error of predictions.
func meanError(steps []TimedStep, predict func(i int) float64) float64 {
	sum := 0.0
	for i, s := range steps {
		sum += math.Abs(predict(i)/s.Seconds - 1)
	}
	return sum / float64(max(1, len(steps)))
}

func dot(a, b []float64) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// leastSquares returns the non-negative coefficients with the least sum of squared relative errors.
// With so few coefficients, every subset of them is tried.
func leastSquares(rows [][]float64, steps []TimedStep) []float64 {
	n := len(rows[0])
	best, bestError := make([]float64, n), math.Inf(1)
	for set := 1; set < 1<<n; set++ {
		var used []int
		for k := range n {
			if set>>k&1 == 1 {
				used = append(used, k)
			}
		}
		x, ok := solve(rows, steps, used)
		if !ok {
			continue
		}
		e := 0.0
		for i, s := range steps {
			off := dot(rows[i], x)/s.Seconds - 1
			e += max(1, s.Weight) * off * off
		}
		if e < bestError {
			best, bestError = x, e
		}
	}
	return best
}

// solve solves the normal equations of some of the coefficients, the others being 0; false: one is
// negative, or the steps do not determine them.
func solve(rows [][]float64, steps []TimedStep, used []int) ([]float64, bool) {
	n := len(used)
	m := make([][]float64, n) // [n × n+1]
	scale := make([]float64, n)
	for a, k := range used {
		for i, s := range steps {
			scale[a] = max(scale[a], rows[i][k]/s.Seconds)
		}
		if scale[a] == 0 {
			return nil, false
		}
	}
	for a := range m {
		m[a] = make([]float64, n+1)
		for i, s := range steps {
			v := max(1, s.Weight) * rows[i][used[a]] / s.Seconds / scale[a]
			for b := range n {
				m[a][b] += v * rows[i][used[b]] / s.Seconds / scale[b]
			}
			m[a][n] += v
		}
	}
	for c := range n { // Gauss-Jordan with the largest pivot
		p := c
		for r := c; r < n; r++ {
			if math.Abs(m[r][c]) > math.Abs(m[p][c]) {
				p = r
			}
		}
		if math.Abs(m[p][c]) < 1e-12 {
			return nil, false
		}
		m[c], m[p] = m[p], m[c]
		for r := range m {
			if r != c {
				f := m[r][c] / m[c][c]
				for k := c; k <= n; k++ {
					m[r][k] -= f * m[c][k]
				}
			}
		}
	}
	x := make([]float64, len(rows[0]))
	for a, k := range used {
		if x[k] = m[a][n] / m[a][a] / scale[a]; x[k] < 0 {
			return nil, false
		}
	}
	return x, true
}
