package cuda

import "github.com/tandem-serving/tandem/engine/backend"

// deltaMemory is what layers with a state take in addition to their weights and pages.
type deltaMemory struct {
	states  map[int]address // tables of parts, by their first KV layer
	scratch address         // of all layers, one after the other
	floats  int             // of scratch
}

// deltaRow returns the floats of scratch for a row. kernels/delta.cuh has their order.
func deltaRow(s *backend.DeltaSpec) int {
	width := deltaWidth
	if s.KeyDim > deltaWidth {
		width = deltaWidest
	}
	return s.KeyHeads * (2*width + (2*(s.ValueHeads/s.KeyHeads)+3)/4*4)
}

// DeltaStepBytes returns the memory of a step in addition to a model's buffers.
func DeltaStepBytes(s backend.DeltaSpec, l backend.Limits) int64 {
	return int64(l.Tokens) * int64(deltaRow(&s)) * 4
}

// DeltaRule records the gated delta rule; see backend.DeltaSpec.
func (c *CUDA) DeltaRule(dst, qkv, beta, alpha backend.Buf, s backend.DeltaSpec) {
	d, a := c.buf(dst), c.buf(qkv)
	b, rest := c.alike("DeltaRule", beta, alpha)
	need(s.Valid() && s.KeyDim <= deltaWidest && 2*s.KeyDim+s.ValueHeads/s.KeyHeads*s.ValueDim <= backend.DeltaColumns, "DeltaRule: %+v", s)
	need(d != a && d.rows == backend.TokenRows && a.rows == d.rows && b.rows == d.rows, "DeltaRule: row sets %d, %d and %d", d.rows, a.rows, b.rows)
	need(d.cols == s.ValueHeads*s.ValueDim && a.cols == s.Channels() && b.cols == s.ValueHeads,
		"DeltaRule: from %d and %d columns to %d: %+v", a.cols, b.cols, d.cols, s)
	table, blockTokens := c.statesOf(&s)
	c.plan().usesKV = true
	c.record(d, op{
		kind: opDelta, n: int32(d.cols), k: int32(a.cols), heads: int32(s.KeyHeads), kvHeads: int32(s.ValueHeads), dim: int32(s.KeyDim), from: int32(s.ValueDim),
		blockTokens: int32(blockTokens), topK: int32(s.Parts), pageBytes: int64(c.kv.spec.PageBytes),
		dst: d.data, a: a.data, b: b.data, extra: rest[0].data, w: c.vector(s.Conv, a.cols*backend.DeltaConv), bias: c.vector(s.Bias, s.ValueHeads),
		weights: c.vector(s.Decay, s.ValueHeads), table: table, list: c.deltaScratch(&s),
	})
}

// statesOf returns the table of a layer's parts, and the tokens of their blocks.
func (c *CUDA) statesOf(s *backend.DeltaSpec) (table address, blockTokens int) {
	kv := &c.kv.spec
	need(s.Layer+s.Parts <= len(kv.Layers), "DeltaRule: KV layers %d to %d of %d", s.Layer, s.Layer+s.Parts-1, len(kv.Layers))
	blockTokens = c.kv.group(s.Layer).BlockTokens
	parts := make([]state, s.Parts)
	for i := range parts {
		g, place := c.kv.group(s.Layer+i), kv.Layers[s.Layer+i]
		need(g.State == s.State() && g.BlockTokens == blockTokens, "DeltaRule: %+v over a state of %d", *s, g.State)
		parts[i] = state{kv: c.kv.regions[place.Region], group: int32(place.Group)}
	}
	if table, ok := c.delta.states[s.Layer]; ok {
		return table, blockTokens
	}
	table, err := c.put(raw(parts), "a layer's states")
	need(err == nil, "DeltaRule: %v", err)
	if c.delta.states == nil {
		c.delta.states = make(map[int]address)
	}
	c.delta.states[s.Layer] = table
	return table, blockTokens
}

// deltaScratch returns memory for the rows of a step.
func (c *CUDA) deltaScratch(s *backend.DeltaSpec) address {
	if n := c.opts.Limits.Tokens * deltaRow(s); n > c.delta.floats { // earlier plans keep theirs
		a, err := c.reserve(4*n, "scratch of states")
		need(err == nil, "DeltaRule: %v", err)
		c.delta.scratch, c.delta.floats = a, n
	}
	return c.delta.scratch
}

// Gate records dst = σ(gate)·x, where each column of gate is the factor of cols(x)/cols(gate)
// neighbouring columns.
func (c *CUDA) Gate(dst, gate, x backend.Buf) {
	d, rest := c.alike("Gate", dst, x)
	g := c.buf(gate)
	need(g.rows == d.rows && d.cols%g.cols == 0 && g != d, "Gate: %d columns for %d", g.cols, d.cols)
	c.record(d, op{kind: opGate, n: int32(d.cols), heads: int32(g.cols), dst: d.data, a: rest[0].data, b: g.data})
}
