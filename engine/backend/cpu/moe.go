package cpu

import (
	"math"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// routing holds the experts that the rows of a step selected. Each selection, a row and
// a rank, has a slot. Slots are sorted by expert, so that an expert's matrices are read
// once for all its rows. A row finds its slots by rank. All arrays are mapped; the C
// kernels write and read the same ones.
type routing struct {
	rows          backend.Rows
	topK, experts int
	by            choice
	ids           []int32   // [rows, topK] best expert first
	weights       []float32 // [rows, topK]
	slots         []int32   // [rows, topK]
	list          []int32   // [1 + 3*spans] number of spans, then expert, first slot, slots of each
	count         []int32   // [experts+1] used by group
}

// choice is the input that rows are routed by.
type choice uint8

const (
	byScores  choice = iota
	byHead           // every row to every head: see HeadLinear
	byAdapter        // to the adapter of the row's span; slots are rows
)

// span is some neighbouring slots of one expert.
type span struct{ expert, first, count int32 }

// spanSlots is the most slots of a span, LINEAR_ROWS of kernels.h. With more, threads
// would be idle when most rows of a prompt select one expert.
const spanSlots = 96

func (r *routing) spans() int { return int(r.list[0]) }

func (r *routing) span(i int) span {
	return span{r.list[1+3*i], r.list[2+3*i], r.list[3+3*i]}
}

// routing returns the arrays for such a routing, which the layers share.
func (c *CPU) routing(rows backend.Rows, topK, experts int, by choice) *routing {
	for _, r := range c.routes {
		if r.rows == rows && r.topK == topK && r.experts == experts && r.by == by {
			return r
		}
	}
	n := c.limit(rows) * topK
	r := &routing{rows: rows, topK: topK, experts: experts, by: by}
	var err error
	ints := func(n int) (s []int32) {
		if err == nil {
			s, err = c.mem.ints(n)
		}
		return s
	}
	r.ids, r.slots, r.count = ints(n), ints(n), ints(experts+1)
	spans := min(n, experts) + n/spanSlots
	if by == byAdapter {
		spans = n // rows are not sorted
	}
	r.list = ints(1 + 3*spans)
	if err == nil {
		r.weights, err = c.mem.floats(n)
	}
	need(err == nil, "MoE: %v", err)
	c.routes = append(c.routes, r)
	return r
}

// MoE records the selection of experts, their three products and the sum.
func (c *CPU) MoE(dst, x, router backend.Buf, m backend.MoESpec) {
	d, a, scores := c.buf(dst), c.buf(x), c.buf(router)
	hidden, inner, up := c.buf(m.Hidden), c.buf(m.Inner), c.buf(m.InnerUp)
	sameShape("MoE", d, a)
	sameShape("MoE", inner, up)
	n := len(m.Gate)
	need(n > 0 && n <= maxExperts && len(m.Up) == n && len(m.Down) == n && scores.cols == n && m.TopK > 0 && m.TopK <= n,
		"MoE: top %d of %d, %d and %d experts by %d scores", m.TopK, n, len(m.Up), len(m.Down), scores.cols)
	need(hidden.cols == m.TopK*a.cols && inner.cols%m.TopK == 0, "MoE: scratch of %d and %d columns for top %d of %d columns",
		hidden.cols, inner.cols, m.TopK, a.cols)
	for _, b := range []*buffer{scores, hidden, inner} {
		need(b.rows == a.rows, "MoE: buffers of row sets %d and %d", a.rows, b.rows)
	}
	need(d != a && hidden != a && hidden != d && inner != up, "MoE: in place")
	r, wide := c.routing(a.rows, m.TopK, n, byScores), inner.cols/m.TopK
	product := func(to, from *buffer, ids, biases []backend.Weight, out, in int) {
		o := op{kind: opExperts, rows: a.rows, dst: to, a: from, slots: m.TopK, route: r}
		need(biases == nil || len(biases) == n, "MoE: %d biases of %d experts", len(biases), n)
		for _, id := range biases {
			o.biases = append(o.biases, c.vector(id, out))
		}
		for _, id := range ids {
			w := c.weight(id)
			need(w.in == in && w.out == out, "MoE: %s is [%d, %d], want [%d, %d]", w.name, w.out, w.in, out, in)
			need(c.formFor(w) == c.formFor(c.weight(ids[0])), "MoE: %s is %s among others", w.name, w.dtype)
			o.experts = append(o.experts, w)
		}
		c.quantizeFor(o.experts, from, m.TopK, r)
		c.record(o)
	}
	route := op{kind: opRoute, rows: a.rows, a: scores, route: r, normalize: m.Normalize}
	if m.Scale != nil {
		route.scales = c.vector(*m.Scale, n)
	}
	if s := m.Sigmoid; s != nil {
		need(s.Groups > 0 && n%s.Groups == 0 && s.Keep > 0 && s.Keep <= s.Groups && m.TopK <= n/s.Groups*s.Keep && m.Scale == nil,
			"MoE: top %d of the best %d of %d groups of %d experts", m.TopK, s.Keep, s.Groups, n)
		if route.sigmoid = s; !s.Softmax {
			route.bias = c.vector(s.Bias, n)
		}
	}
	c.record(route)
	c.record(op{kind: opGroup, rows: a.rows, route: r})
	c.record(op{kind: opScatter, rows: a.rows, dst: hidden, a: a, route: r})
	product(inner, hidden, m.Gate, m.GateBias, wide, a.cols)
	product(up, hidden, m.Up, m.UpBias, wide, a.cols)
	c.record(op{kind: opGatedAct, rows: a.rows, dst: inner, a: inner, b: up, slots: m.TopK, act: m.Act})
	product(hidden, inner, m.Down, m.DownBias, a.cols, wide)
	c.record(op{kind: opCombine, rows: a.rows, dst: d, a: hidden, route: r})
}

// pick selects a row's experts and computes their weights. Each rank takes an expert
// that none before it took, whatever the scores are, so that a NaN score still selects
// an expert that exists.
func (r *routing) pick(row int, scores []float32, normalize bool, scales *weight) {
	ids, weights := r.ids[row*r.topK:(row+1)*r.topK], r.weights[row*r.topK:(row+1)*r.topK]
	var taken [maxExperts]bool
	for j := range ids {
		best := -1
		for e, z := range scores {
			if !taken[e] && (best < 0 || z > scores[best]) {
				best = e
			}
		}
		taken[best] = true
		ids[j] = int32(best)
	}
	most, total, chosen := float64(scores[ids[0]]), 0.0, 0.0
	for _, z := range scores {
		total += math.Exp(float64(z) - most)
	}
	for _, e := range ids {
		chosen += math.Exp(float64(scores[e]) - most)
	}
	if normalize {
		total = chosen
	}
	for j, e := range ids {
		w := math.Exp(float64(scores[e])-most) / total
		if scales != nil {
			w *= float64(scales.vector[e])
		}
		weights[j] = float32(w)
	}
}

// group assigns a slot to every selection of the rows and lists the spans.
func (r *routing) group(rows int) {
	clear(r.count)
	ids := r.ids[:rows*r.topK]
	for _, e := range ids {
		r.count[e+1]++
	}
	spans := int32(0)
	for e := range r.experts {
		n := r.count[e+1]
		r.count[e+1] += r.count[e] // from here the expert's first slot is count[e]
		for at := int32(0); at < n; at += spanSlots {
			copy(r.list[1+3*spans:], []int32{int32(e), r.count[e] + at, min(n-at, spanSlots)})
			spans++
		}
	}
	r.list[0] = spans
	for i, e := range ids {
		r.slots[i] = r.count[e]
		r.count[e]++
	}
}

// expertOf returns the expert of a slot, after group.
func (r *routing) expertOf(slot int) int {
	e, _ := slices.BinarySearch(r.count[:r.experts], int32(slot)+1) // count[e] is the slot behind its last
	return e
}

// scatter copies a row to its slots.
func (r *routing) scatter(row int, dst *buffer, x []float32) {
	for _, slot := range r.slots[row*r.topK : (row+1)*r.topK] {
		copy(dst.data[int(slot)*len(x):], x)
	}
}

// combine sums a row's slots in the order of their ranks.
func (r *routing) combine(row int, dst []float32, from *buffer) {
	slots, weights := r.slots[row*r.topK:], r.weights[row*r.topK:]
	for i := range dst {
		sum := 0.0
		for j := range r.topK {
			sum += float64(weights[j]) * float64(from.data[int(slots[j])*len(dst)+i])
		}
		dst[i] = float32(sum)
	}
}
