package report

import (
	"cmp"
	"fmt"
	"slices"
)

// repeated are the runs of one load of one server.
type repeated []*Point

// loads gathers the runs of each load, in the order of their first.
func loads(points []*Point) (all []repeated) {
	for _, p := range points {
		i := slices.IndexFunc(all, func(r repeated) bool { return r[0].Name() == p.Name() })
		if i < 0 {
			all = append(all, nil)
			i = len(all) - 1
		}
		all[i] = append(all[i], p)
	}
	return all
}

// figure is the median of a figure over the runs, and the least and the most of them.
func (r repeated) figure(of func(*Point) float64) (median, low, high float64) {
	v := make([]float64, len(r))
	for i, p := range r {
		v[i] = of(p)
	}
	slices.Sort(v)
	return Quantile(v, 50), v[0], v[len(v)-1]
}

// middle is the run that stands for all where one has to: that of the middle
// median TTFT.
func (r repeated) middle() *Point {
	byTTFT := slices.Clone(r)
	slices.SortStableFunc(byTTFT, func(a, b *Point) int {
		return cmp.Compare(a.Summary.quantile("ttft", 50), b.Summary.quantile("ttft", 50))
	})
	return byTTFT[(len(byTTFT)-1)/2]
}

// cell is a figure as text: the median, and from where to where the runs spread.
func (r repeated) cell(of func(*Point) float64) string {
	median, low, high := r.figure(of)
	if len(r) == 1 {
		return fmt.Sprintf("%.5g", median)
	}
	return fmt.Sprintf("%.5g<br><small>%.4g – %.4g</small>", median, low, high)
}

// middles are the runs that stand for their loads.
func middles(points []Point) []Point {
	var out []Point
	for _, r := range loads(pointers(points)) {
		out = append(out, *r.middle())
	}
	return out
}

func pointers(points []Point) []*Point {
	out := make([]*Point, len(points))
	for i := range points {
		out[i] = &points[i]
	}
	return out
}
