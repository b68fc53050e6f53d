package report

import (
	"cmp"
	"fmt"
	"slices"
)

// repeated is the runs of one load of one server.
type repeated []*Point

// loads groups the runs by load, in the order of their first run.
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

// figure returns the median, minimum and maximum of a figure over the runs.
func (r repeated) figure(of func(*Point) float64) (median, low, high float64) {
	v := make([]float64, len(r))
	for i, p := range r {
		v[i] = of(p)
	}
	slices.Sort(v)
	return Quantile(v, 50), v[0], v[len(v)-1]
}

// representative returns the run with the median TTFT in the middle, which represents all runs in
// plots of one.
func (r repeated) representative() *Point {
	byTTFT := slices.Clone(r)
	slices.SortStableFunc(byTTFT, func(a, b *Point) int {
		return cmp.Compare(a.Summary.quantile("ttft", 50), b.Summary.quantile("ttft", 50))
	})
	return byTTFT[(len(byTTFT)-1)/2]
}

// cell formats a figure: the median and the range of the runs.
func (r repeated) cell(of func(*Point) float64) string {
	median, low, high := r.figure(of)
	if len(r) == 1 {
		return Figure(median)
	}
	return fmt.Sprintf("%s<br><small>%s – %s</small>", Figure(median), Figure(low), Figure(high))
}

// representatives returns the representative run of each load.
func representatives(points []Point) []Point {
	var out []Point
	for _, r := range loads(pointers(points)) {
		out = append(out, *r.representative())
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
