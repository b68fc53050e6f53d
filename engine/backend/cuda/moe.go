package cuda

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// routing is the buffers of a step's expert selections, which the layers share.
type routing struct {
	rows                        backend.Rows
	topK, experts               int
	chosen, weights, slot, list address // slot: of each choice, then the choice of each slot
}

// spanSlots is kSpanSlots of the kernels: the most slots of one span.
const spanSlots = 64

// routing returns the arrays for such a routing.
func (c *CUDA) routing(rows backend.Rows, topK, experts int) *routing {
	for _, r := range c.routes {
		if r.rows == rows && r.topK == topK && r.experts == experts {
			return r
		}
	}
	n := c.limit(rows) * topK
	r := &routing{rows: rows, topK: topK, experts: experts}
	var err error
	for _, a := range []struct {
		to *address
		n  int
	}{{&r.chosen, n}, {&r.weights, n}, {&r.slot, 2 * n}, {&r.list, 1 + 3*(min(n, experts)+n/spanSlots)}} {
		if err == nil {
			*a.to, err = c.reserve(a.n*4, "routing")
		}
	}
	need(err == nil, "MoE: %v", err)
	c.routes = append(c.routes, r)
	return r
}

// MoE records the selection of experts, their three products and the sum.
func (c *CUDA) MoE(dst, x, router backend.Buf, m backend.MoESpec) {
	d, rest := c.alike("MoE", dst, x)
	inner, ups := c.alike("MoE", m.Inner, m.InnerUp)
	a, up, scores, hidden := rest[0], ups[0], c.buf(router), c.buf(m.Hidden)
	n := len(m.Gate)
	need(n > 0 && n <= maxExperts && len(m.Up) == n && len(m.Down) == n && scores.cols == n && m.TopK > 0 && m.TopK <= n,
		"MoE: top %d of %d, %d and %d experts by %d scores", m.TopK, n, len(m.Up), len(m.Down), scores.cols)
	need(hidden.cols == m.TopK*a.cols && inner.cols%m.TopK == 0, "MoE: scratch of %d and %d columns for top %d of %d columns",
		hidden.cols, inner.cols, m.TopK, a.cols)
	need(scores.rows == a.rows && hidden.rows == a.rows && inner.rows == a.rows, "MoE: buffers of different row sets")
	need(d != a && hidden != a && hidden != d && inner != up, "MoE: in place")
	r, wide := c.routing(a.rows, m.TopK, n), inner.cols/m.TopK
	base := op{
		topK: int32(m.TopK), experts: int32(n), chosen: r.chosen, weights: r.weights, slot: r.slot, list: r.list,
	}
	part := func(kind opKind) op {
		o := base
		o.kind = kind
		return o
	}
	o := part(opRoute)
	o.a = scores.data
	if m.Normalize {
		o.normalize = 1
	}
	if m.Scale != nil {
		o.extra = c.vector(*m.Scale, n)
	}
	if g := m.Sigmoid; g != nil {
		need(g.Groups > 0 && n%g.Groups == 0 && g.Keep > 0 && g.Keep <= g.Groups && m.TopK <= n/g.Groups*g.Keep && m.Scale == nil,
			"MoE: top %d of the best %d of %d groups of %d experts", m.TopK, g.Keep, g.Groups, n)
		o.kind, o.heads, o.kvHeads, o.scale = opRouteGroups, int32(g.Groups), int32(g.Keep), g.Factor
		if !g.Softmax {
			o.bias = c.vector(g.Bias, n)
		}
	}
	c.record(a, o)
	c.record(a, part(opGroup))
	o = part(opScatter)
	o.dst, o.a, o.k = hidden.data, a.data, int32(a.cols)
	c.record(a, o)
	product := func(to, from *buffer, ids, biases []backend.Weight, out, in int) {
		o := part(opLinear)
		o.slots, o.n, o.k, o.dst, o.a = int32(m.TopK), int32(out), int32(in), to.data, from.data
		o.table, o.dtype = c.experts(ids, biases, out, in)
		c.record(a, o)
	}
	product(inner, hidden, m.Gate, m.GateBias, wide, a.cols)
	product(up, hidden, m.Up, m.UpBias, wide, a.cols)
	c.record(a, op{kind: opGatedAct, slots: int32(m.TopK), n: int32(wide), act: int32(m.Act), dst: inner.data, a: inner.data, b: up.data})
	product(hidden, inner, m.Down, m.DownBias, a.cols, wide)
	o = part(opCombine)
	o.dst, o.a, o.n = d.data, hidden.data, int32(d.cols)
	c.record(a, o)
}

// HeadLinear records a product per head as one of experts. Every row uses every head, a
// head's slots are contiguous, and its matrix is read once for all rows.
func (c *CUDA) HeadLinear(dst, x backend.Buf, s backend.HeadSpec) {
	d, a, in, out := c.buf(dst), c.buf(x), c.buf(s.In), c.buf(s.Out)
	heads := len(s.Weights)
	need(heads > 0 && heads <= maxExperts, "HeadLinear: %d heads", heads)
	w := c.weight(s.Weights[0])
	need(d.rows == a.rows && in.rows == a.rows && out.rows == a.rows && d != a && in != a && out != d && in != out, "HeadLinear: row sets differ, or in place")
	need(in.cols == heads*w.in && out.cols == heads*w.out && a.cols%heads == 0 && a.cols >= in.cols && d.cols-out.cols == a.cols-in.cols,
		"HeadLinear: %d heads of [%d, %d] from %d to %d columns, scratch of %d and %d", heads, w.out, w.in, a.cols, d.cols, in.cols, out.cols)
	r := c.routing(a.rows, heads, heads)
	k := int32(a.cols / heads)
	c.record(a, op{kind: opSplit, heads: int32(heads), k: k, dim: int32(w.in), list: r.list, dst: in.data, a: a.data})
	o := op{kind: opLinear, slots: int32(heads), experts: int32(heads), n: int32(w.out), k: int32(w.in), dst: out.data, a: in.data, list: r.list}
	o.table, o.dtype = c.experts(s.Weights, nil, w.out, w.in)
	c.record(a, o)
	c.record(a, op{kind: opJoin, heads: int32(heads), n: int32(d.cols), k: k, dim: int32(w.out), dst: d.data, a: a.data, b: out.data})
}

// fewScales returns an error for a scale with which few_mxfp4 does not compute exactly: of more
// than 2^33, or of less than 2^-100 with a number that is not zero.
func fewScales(t *backend.Tensor) error {
	const least, most, zero = 127 - 100, 127 + 33, 127
	groups := len(t.Data) / 17
	numbers, scales := t.Data[:16*groups], t.Data[16*groups:]
	for i, code := range scales {
		if code >= least && code <= most {
			continue
		}
		for _, two := range numbers[16*i : 16*i+16] {
			if code > most || two&0x77 != 0 {
				return fmt.Errorf("%w: tensor %s: a scale of 2^%d in row %d; GPUs compute with 2^%d to 2^%d: use --device cpu",
					backend.ErrShape, t.Name, int(code)-zero, i*32/t.Shape[1], least-zero, most-zero)
			}
		}
	}
	return nil
}

// experts returns the table of matrices [out, in] and their biases.
func (c *CUDA) experts(ids, biases []backend.Weight, out, in int) (address, int32) {
	need(biases == nil || len(biases) == len(ids), "MoE: %d biases of %d experts", len(biases), len(ids))
	if have, ok := c.tables[ids[0]]; ok { // a weight belongs to one list of experts
		return have, c.weight(ids[0]).dtype
	}
	err := c.oneType(ids)
	need(err == nil, "MoE: %v", err)
	table := make([]expert, len(ids))
	dtype := c.weight(ids[0]).dtype
	for i, id := range ids {
		w := c.weight(id)
		need(w.in == in && w.out == out && w.dtype == dtype, "MoE: %s is [%d, %d], want [%d, %d] of one type", w.name, w.out, w.in, out, in)
		table[i].w, table[i].scales = w.data, w.scales
		if biases != nil {
			table[i].bias = c.vector(biases[i], out)
		}
	}
	a, err := c.put(raw(table), "experts")
	need(err == nil, "MoE: %v", err)
	c.tables[ids[0]] = a
	return a, dtype
}
