package cpu

import (
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

// deltaRule are the parameters of opDelta in addition to those of op.
type deltaRule struct {
	backend.DeltaSpec
	decay *weight // Spec.Decay; op.w has Spec.Conv, op.bias Spec.Bias
	alpha *buffer // op.a has the queries, keys and values, op.b has beta
}

// DeltaRule records the gated delta rule; see backend.DeltaSpec.
func (c *CPU) DeltaRule(dst, qkv, beta, alpha backend.Buf, s backend.DeltaSpec) {
	d, a, b, e := c.buf(dst), c.buf(qkv), c.buf(beta), c.buf(alpha)
	sameShape("DeltaRule", b, e)
	need(s.Valid() && s.KeyDim <= maxHeadDim && 2*s.KeyDim+s.ValueHeads/s.KeyHeads*s.ValueDim <= backend.DeltaColumns, "DeltaRule: %+v", s)
	need(d.rows == backend.TokenRows && a.rows == d.rows && b.rows == d.rows && d != a, "DeltaRule: row sets %d, %d and %d", d.rows, a.rows, b.rows)
	need(d.cols == s.ValueHeads*s.ValueDim && a.cols == s.Channels() && b.cols == s.ValueHeads,
		"DeltaRule: from %d and %d columns to %d: %+v", a.cols, b.cols, d.cols, s)
	for part := range s.Parts {
		g := c.kvGroup("DeltaRule", s.Layer+part)
		need(g.State == s.State() && g.BlockTokens == c.kv.group(s.Layer).BlockTokens, "DeltaRule: %+v over a state of %d", s, g.State)
	}
	c.record(op{kind: opDelta, rows: d.rows, dst: d, a: a, b: b, w: c.vector(s.Conv, s.Channels()*backend.DeltaConv), bias: c.vector(s.Bias, s.ValueHeads),
		layer: s.Layer, delta: &deltaRule{s, c.vector(s.Decay, s.ValueHeads), e}})
}

// Gate records dst = σ(gate)·x, where each column of gate is the factor of cols(x)/cols(gate)
// neighbouring columns.
func (c *CPU) Gate(dst, gate, x backend.Buf) {
	d, g, a := c.buf(dst), c.buf(gate), c.buf(x)
	sameShape("Gate", d, a)
	need(g.rows == a.rows && a.cols%g.cols == 0 && g != d, "Gate: %d columns for %d", g.cols, a.cols)
	c.record(op{kind: opGate, rows: d.rows, dst: d, a: a, b: g, heads: g.cols})
}

// gate computes one row of opGate.
func (o *op) gate(row int) {
	dst, x, wide := o.dst.row(row), o.a.row(row), o.a.cols/o.heads
	for h, g := range o.b.row(row) {
		f := float32(1 / (1 + math.Exp(-float64(g))))
		for i := h * wide; i < (h+1)*wide; i++ {
			dst[i] = f * x[i]
		}
	}
}

// delta computes one key head of one span, token by token.
func (p *portable) delta(span, head int) {
	o, s, kv := p.op, &p.c.step, &p.c.kv
	d := o.delta
	group, perPart := d.ValueHeads/d.KeyHeads, d.KeyHeads/d.Parts
	layer := o.layer + head/perPart
	g := kv.group(layer)
	table, size := g.tables[span*p.c.opts.Limits.Blocks:], kv.spec.PageBytes
	unit := d.State() / perPart // floats of a key head
	state := func(place int) []float32 {
		page := kv.memory(layer)[int(table[place])*size:]
		return f32view(page)[head%perPart*unit:][:unit]
	}
	wide := 2*d.KeyDim + group*d.ValueDim
	mixed, out := make([]float64, wide), make([]float64, d.ValueDim)
	for row := int(s.spanRows[span]); row < int(s.spanRows[span+1]); row++ {
		pos := int(s.positions[row])
		st := state(pos / g.BlockTokens)
		switch {
		case pos == 0:
			clear(st)
		case pos%g.BlockTokens == 0 && table[pos/g.BlockTokens-1] != table[pos/g.BlockTokens]:
			copy(st, state(pos/g.BlockTokens-1))
		}
		p.deltaMix(mixed, st, row, head, pos)
		q, k := mixed[:d.KeyDim], mixed[d.KeyDim:2*d.KeyDim]
		unitLength(q, 1/math.Sqrt(float64(d.KeyDim)))
		unitLength(k, 1)
		for j := range group {
			h := head*group + j
			v := mixed[2*d.KeyDim+j*d.ValueDim:][:d.ValueDim]
			beta := 1 / (1 + math.Exp(-float64(o.b.row(row)[h])))
			x := float64(d.alpha.row(row)[h]) + float64(o.bias.vector[h])
			softplus := x
			if x <= 20 {
				softplus = math.Log1p(math.Exp(x))
			}
			decay := math.Exp(-math.Exp(float64(d.decay.vector[h])) * softplus)
			m := st[3*wide+j*d.KeyDim*d.ValueDim:][:d.KeyDim*d.ValueDim]
			clear(out)
			for i, ki := range k {
				for c, f := range m[i*d.ValueDim : (i+1)*d.ValueDim] {
					out[c] += float64(f) * ki
				}
			}
			for c := range out { // what is to be written: the part of v that the state does not return for k
				v[c] = (v[c] - decay*out[c]) * beta
				out[c] = 0
			}
			for i, ki := range k {
				r := m[i*d.ValueDim : (i+1)*d.ValueDim]
				for c := range r {
					r[c] = float32(float64(r[c])*decay + ki*v[c])
					out[c] += float64(r[c]) * q[i]
				}
			}
			for c, f := range out {
				o.dst.row(row)[h*d.ValueDim+c] = float32(f)
			}
		}
	}
}

// deltaMix computes the convolution of a key head's queries, keys and values, and replaces the
// oldest of the inputs in st.
func (p *portable) deltaMix(mixed []float64, st []float32, row, head, pos int) {
	o, d := p.op, p.op.delta
	x, at, wide := o.a.row(row), 0, len(mixed)
	for _, part := range d.Parted(head) {
		for c := part[0]; c < part[1]; c++ {
			w := o.w.vector[c*backend.DeltaConv:]
			y := float64(w[3]) * float64(x[c])
			for i := range 3 {
				y += float64(w[i]) * float64(st[(pos+i)%3*wide+at])
			}
			st[pos%3*wide+at] = x[c]
			mixed[at] = y / (1 + math.Exp(-y))
			at++
		}
	}
}

// unitLength scales x to a length of by.
func unitLength(x []float64, by float64) {
	sum := 0.0
	for _, f := range x {
		sum += f * f
	}
	by /= math.Sqrt(sum + backend.DeltaEps)
	for i := range x {
		x[i] *= by
	}
}
