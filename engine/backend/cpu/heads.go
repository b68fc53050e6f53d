package cpu

import (
	"math"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// HeadLinear records a product per head as one of experts. Every row selects every
// head, a head's slots are contiguous, and its matrix is read once for all rows.
func (c *CPU) HeadLinear(dst, x backend.Buf, s backend.HeadSpec) {
	d, a, in, out := c.buf(dst), c.buf(x), c.buf(s.In), c.buf(s.Out)
	heads := len(s.Weights)
	need(heads > 0 && heads <= maxExperts, "HeadLinear: %d heads", heads)
	first := c.weight(s.Weights[0])
	for _, b := range []*buffer{d, in, out} {
		need(b.rows == a.rows, "HeadLinear: row sets %d and %d", b.rows, a.rows)
	}
	need(d != a && in != a && out != d && in != out, "HeadLinear: in place")
	need(in.cols == heads*first.in && out.cols == heads*first.out && a.cols%heads == 0 && a.cols >= in.cols &&
		d.cols-out.cols == a.cols-in.cols, "HeadLinear: %d heads of [%d, %d] from %d to %d columns, scratch of %d and %d",
		heads, first.out, first.in, a.cols, d.cols, in.cols, out.cols)
	r := c.routing(a.rows, heads, heads, byHead)
	product := op{kind: opExperts, rows: a.rows, dst: out, a: in, slots: heads, route: r}
	for _, id := range s.Weights {
		w := c.weight(id)
		need(w.in == first.in && w.out == first.out && c.formFor(w) == c.formFor(first), "HeadLinear: %s is [%d, %d], want [%d, %d]", w.name, w.out, w.in, first.out, first.in)
		product.experts = append(product.experts, w)
	}
	c.record(op{kind: opSplit, rows: a.rows, dst: in, a: a, heads: heads, dim: first.in})
	need(ordersOf(product.experts) == "", "HeadLinear: matrices with an order of inputs")
	c.quantizeFor(product.experts, in, heads, nil)
	c.record(product)
	c.record(op{kind: opJoin, rows: a.rows, dst: d, a: a, b: out, heads: heads, dim: first.out})
	c.recording.heads = append(c.recording.heads, r)
}

// selectAll lists the spans of rows that all select every expert.
func (r *routing) selectAll(rows int) {
	list := r.list[:1]
	for e := range r.experts {
		for at := 0; at < rows; at += spanSlots {
			list = append(list, int32(e), int32(e*rows+at), int32(min(rows-at, spanSlots)))
		}
	}
	list[0] = int32(len(list) / 3)
}

// split copies the first columns of a row's heads to their slots.
func (o *op) split(row, rows int) {
	x, width := o.a.row(row), o.a.cols/o.heads
	for h := range o.heads {
		copy(o.dst.data[(h*rows+row)*o.dim:][:o.dim], x[h*width:])
	}
}

// join copies a row's heads from their slots, and the columns that split left out.
func (o *op) join(row, rows int) {
	dst, x := o.dst.row(row), o.a.row(row)
	width, from := o.dst.cols/o.heads, o.a.cols/o.heads
	for h := range o.heads {
		to := dst[h*width : (h+1)*width]
		copy(to, o.b.data[(h*rows+row)*o.dim:][:o.dim])
		copy(to[o.dim:], x[(h+1)*from-(width-o.dim):])
	}
}

// pickGroups selects a row's experts among the best groups; see
// backend.SigmoidRouter. A NaN score still selects an expert that exists.
func (r *routing) pickGroups(row int, scores, bias []float32, s *backend.SigmoidRouter, normalize bool) {
	ids, weights := r.ids[row*r.topK:(row+1)*r.topK], r.weights[row*r.topK:(row+1)*r.topK]
	size := r.experts / s.Groups
	var p, choice, together [maxExperts]float32
	var dropped, taken [maxExperts]bool
	if s.Softmax {
		most, total := float64(slices.Max(scores)), 0.0
		for _, z := range scores {
			total += math.Exp(float64(z) - most)
		}
		for e, z := range scores {
			p[e] = float32(math.Exp(float64(z)-most) / total)
			choice[e] = p[e]
		}
	} else {
		for e, z := range scores {
			p[e] = float32(1 / (1 + math.Exp(-float64(z))))
			choice[e] = p[e] + bias[e]
		}
	}
	for g := range s.Groups {
		first, second := float32(math.Inf(-1)), float32(math.Inf(-1))
		for _, v := range choice[g*size : (g+1)*size] {
			if v > first {
				first, second = v, first
			} else if v > second {
				second = v
			}
		}
		together[g], dropped[g] = first, true
		if size > 1 && !s.Softmax {
			together[g] += second
		}
	}
	for range s.Keep {
		dropped[best(s.Groups, together[:], func(g int) bool { return !dropped[g] })] = false
	}
	sum := 0.0
	for j := range ids {
		e := best(r.experts, choice[:], func(e int) bool { return dropped[e/size] || taken[e] })
		taken[e], ids[j] = true, int32(e)
		sum += float64(p[e])
	}
	for j, e := range ids {
		w := float64(p[e])
		if normalize {
			w /= sum + 1e-20
		}
		weights[j] = float32(w * float64(s.Factor))
	}
}

// best returns the first of the largest values for which without returns false.
func best(n int, v []float32, without func(i int) bool) int {
	at := -1
	for i := range n {
		if !without(i) && (at < 0 || v[i] > v[at]) {
			at = i
		}
	}
	return at
}
