package profile

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Shape is the work of a batch, which determines its duration.
type Shape = scheduler.Shape

// Uses counts the parts of steps by how their duration was found.
type Uses struct {
	Points       int // interpolated between points
	Coefficients int // outside of them
}

// String returns the shares.
func (u Uses) String() string {
	switch n := u.Points + u.Coefficients; {
	case n == 0:
		return "none"
	case u.Points == 0:
		return "all by coefficients"
	case u.Coefficients == 0:
		return "all between points"
	default:
		return fmt.Sprintf("%.1f %% between points, the others by coefficients", 100*float64(u.Points)/float64(n))
	}
}

// Add returns the sum of both.
func (u Uses) Add(other Uses) Uses {
	return Uses{u.Points + other.Points, u.Coefficients + other.Coefficients}
}

// Times are the step times of a profile. They count uses, so that they belong to one run.
type Times struct {
	p               *Profile
	decode, prefill grid
	Decode, Prefill Uses
}

// Times returns the profile's step times.
func (p *Profile) Times() *Times {
	return &Times{p: p, decode: newGrid(p.Step.Decode.Points), prefill: newGrid(p.Step.Prefill.Points)}
}

// Step counts a step and returns its duration, with the time until the next one can start.
func (t *Times) Step(s Shape) time.Duration {
	t.Count(s)
	return t.Of(s)
}

// Of returns the duration of a step without counting it.
func (t *Times) Of(s Shape) time.Duration {
	step := TimedStep{Chunk: float64(s.Chunk), Attended: s.Attended, Streams: float64(s.Streams), ContextSum: float64(s.ContextSum)}
	return duration(finite(t.p.Step.Overhead.Between + t.Predict(&step)))
}

// Count counts a step.
func (t *Times) Count(s Shape) {
	if s.Streams > 0 {
		_, byPoints := t.decode.at(float64(s.Streams), float64(s.ContextSum)/float64(s.Streams))
		t.Decode.count(byPoints)
	}
	if s.Chunk > 0 || s.Streams == 0 {
		_, byPoints := t.prefill.at(float64(s.Chunk), startOf(float64(s.Chunk), s.Attended))
		t.Prefill.count(byPoints)
	}
}

func (u *Uses) count(byPoints bool) {
	if byPoints {
		u.Points++
	} else {
		u.Coefficients++
	}
}

// mixed returns the seconds of a step with both kinds of work.
func (t *Times) mixed(chunk, streams float64) float64 {
	return max(chunk, streams) + max(0, t.p.Step.Mixed.Gamma*min(chunk, streams)-t.p.Step.Decode.Fixed)
}

// streams returns the seconds of decoding for so many sequences and context tokens of all.
func (t *Times) streams(seqs, ctx float64) float64 {
	if seconds, ok := t.decode.at(seqs, ctx/seqs); ok {
		return seconds
	}
	d := &t.p.Step.Decode
	return d.Fixed + d.PerSeq*seqs + d.PerCtx*ctx
}

// startOf returns the position where a chunk begins that attends to so many tokens.
func startOf(tokens, attended float64) float64 { return max(0, attended/tokens-tokens/2) }

// chunk returns the seconds of computing prompt tokens. Several chunks attend to fewer tokens than
// one of their size, which the coefficient of attention accounts for.
func (t *Times) chunk(tokens, attended float64) float64 {
	r, start := &t.p.Step.Prefill, startOf(tokens, attended)
	if seconds, ok := t.prefill.at(tokens, start); ok {
		return max(r.Floor, seconds+r.PerPair*min(0, attended-tokens*(start+tokens/2)))
	}
	return max(r.Floor, r.Fixed+r.PerToken*tokens+r.PerPair*attended)
}

// grid has points in rows of equal first coordinate.
type grid []row

type row struct {
	x    float64
	y, z []float64 // by y
}

// newGrid sorts points into rows. Where noise makes more work take less time, the longer time
// counts.
func newGrid(points [][]float64) (g grid) {
	sorted := slices.Clone(points)
	sort.Slice(sorted, func(i, j int) bool {
		a, b := sorted[i], sorted[j]
		return a[0] < b[0] || a[0] == b[0] && a[1] < b[1]
	})
	for _, p := range sorted {
		if len(g) == 0 || g[len(g)-1].x != p[0] {
			g = append(g, row{x: p[0]})
		}
		r := &g[len(g)-1]
		z := p[2]
		if n := len(r.z); n > 0 {
			z = max(z, r.z[n-1])
		}
		if len(g) > 1 {
			if below, ok := g[len(g)-2].at(p[1]); ok {
				z = max(z, below)
			}
		}
		r.y, r.z = append(r.y, p[1]), append(r.z, z)
	}
	return g
}

// at returns the value of a row, interpolated; false: y is outside.
func (r *row) at(y float64) (float64, bool) {
	n := len(r.y)
	if y < r.y[0] || y > r.y[n-1] {
		return 0, false
	}
	i := sort.SearchFloat64s(r.y, y)
	if r.y[i] == y {
		return r.z[i], true
	}
	return between(r.y[i-1], r.y[i], r.z[i-1], r.z[i], y), true
}

// at returns the value of a grid, interpolated between the two rows around x; false: the place is
// outside of one of them.
func (g grid) at(x, y float64) (float64, bool) {
	if len(g) == 0 || x < g[0].x || x > g[len(g)-1].x {
		return 0, false
	}
	i := sort.Search(len(g), func(i int) bool { return g[i].x >= x })
	high, ok := g[i].at(y)
	if !ok || g[i].x == x {
		return high, ok
	}
	low, ok := g[i-1].at(y)
	return between(g[i-1].x, g[i].x, low, high, x), ok
}

// between interpolates linearly: a step's duration is nearly linear in each coordinate.
func between(x0, x1, z0, z1, x float64) float64 { return z0 + (z1-z0)*(x-x0)/(x1-x0) }
