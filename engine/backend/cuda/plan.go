package cuda

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// stop is a place in the plan at which the KV of a layer is complete.
type stop struct{ at, layer int }

// plan is a recorded forward pass.
type plan struct {
	ops      []op
	marks    []stop
	logits   *buffer   // the sampled logits; nil: none
	sampling *sampling // of logits
	turned   map[*backend.Rope]bool
	vocab    int // smallest embedding table, 0 without one
	usesKV   bool
	adapts   bool // with adapters

	whole, eager recorded // whole is a graph for decode steps
}

// need panics if shapes disagree, which is a bug of the model file.
func need(ok bool, format string, args ...any) {
	if !ok {
		panic("cuda: " + fmt.Sprintf(format, args...))
	}
}

// record appends an operation over rows like b's. It must be called inside Replay's
// record function.
func (c *CUDA) record(b *buffer, o op) {
	if b.rows == backend.OutputRows {
		o.outputs = 1
	}
	c.plan().ops = append(c.recording.ops, o)
}

func (c *CUDA) plan() *plan {
	need(c.recording != nil, "operation issued outside of Replay's record function")
	return c.recording
}

func (c *CUDA) buf(b backend.Buf) *buffer {
	need(b >= 0 && int(b) < len(c.buffers), "buffer %d of %d", b, len(c.buffers))
	return c.buffers[b]
}

func (c *CUDA) weight(id backend.Weight) *weight {
	need(id >= 0 && int(id) < len(c.weights), "weight %d of %d", id, len(c.weights))
	return c.weights[id]
}

// vector returns the address of a parameter vector of n elements, or 0 for NoWeight.
func (c *CUDA) vector(id backend.Weight, n int) address {
	if id == backend.NoWeight {
		return 0
	}
	w := c.weight(id)
	need(w.in == 0 && w.out == n, "%s is [%d, %d], want a vector of %d", w.name, w.out, w.in, n)
	return w.data
}

// alike returns the buffers, which must have one row set and one width.
func (c *CUDA) alike(what string, first backend.Buf, rest ...backend.Buf) (*buffer, []*buffer) {
	a, all := c.buf(first), make([]*buffer, len(rest))
	for i, id := range rest {
		all[i] = c.buf(id)
		need(all[i].rows == a.rows && all[i].cols == a.cols, "%s: %d columns of row set %d against %d of %d",
			what, a.cols, a.rows, all[i].cols, all[i].rows)
	}
	return a, all
}

// Embed records dst = table[Step.Tokens].
func (c *CUDA) Embed(dst backend.Buf, table backend.Weight) {
	d, w := c.buf(dst), c.weight(table)
	need(d.rows == backend.TokenRows && w.in == d.cols, "Embed: %s is [%d, %d] for %d columns", w.name, w.out, w.in, d.cols)
	c.record(d, op{kind: opEmbed, n: int32(d.cols), k: int32(w.first), from: int32(w.out), dtype: w.dtype, dst: d.data, w: w.data, scales: w.scales})
	if p := c.recording; p.vocab == 0 || w.of < p.vocab {
		p.vocab = w.of
	}
}

// Linear records dst = x·Wᵀ + bias.
func (c *CUDA) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	d, a, m := c.buf(dst), c.buf(x), c.weight(w)
	need(d != a && d.rows == a.rows && m.in == a.cols && m.out == d.cols, "Linear: %s is [%d, %d] from %d to %d columns",
		m.name, m.out, m.in, a.cols, d.cols)
	c.record(d, op{kind: opLinear, n: int32(m.out), k: int32(m.in), dtype: m.dtype, dst: d.data, a: a.data, w: m.data, bias: c.vector(bias, m.out), scales: m.scales})
	c.adaptLinear(d, a, m)
}

// norm records a norm of every dim columns. With add it first records x += add.
func (c *CUDA) norm(d, x, add *buffer, dim int, w backend.Weight, eps float32) {
	o := op{kind: opNorm, n: int32(d.cols), dim: int32(dim), scale: eps, dst: d.data, a: x.data, w: c.vector(w, dim)}
	if add != nil {
		o.b = add.data
	}
	c.record(d, o)
}

// RMSNorm records dst = norm(x)·w.
func (c *CUDA) RMSNorm(dst, x backend.Buf, w backend.Weight, eps float32) {
	d, rest := c.alike("RMSNorm", dst, x)
	c.norm(d, rest[0], nil, d.cols, w, eps)
}

// AddRMSNorm records x += add, dst = norm(x)·w.
func (c *CUDA) AddRMSNorm(dst, x, add backend.Buf, w backend.Weight, eps float32) {
	d, rest := c.alike("AddRMSNorm", dst, x, add)
	need(dst != x && x != add, "AddRMSNorm: x must differ from dst and add")
	c.norm(d, rest[0], rest[1], d.cols, w, eps)
}

// HeadNorm records dst = norm(x)·w for each head of each row.
func (c *CUDA) HeadNorm(dst, x backend.Buf, heads, headDim int, w backend.Weight, eps float32) {
	d, rest := c.alike("HeadNorm", dst, x)
	need(heads > 0 && headDim > 0 && heads*headDim == d.cols, "HeadNorm: %d heads of %d in %d columns", heads, headDim, d.cols)
	c.norm(d, rest[0], nil, headDim, w, eps)
}

// Rope records the rotation of each head of x by the rows' positions. The table of a
// rotation is computed once per step for all layers.
func (c *CUDA) Rope(x backend.Buf, heads, headDim int, r *backend.Rope) {
	a := c.buf(x)
	dim := 2 * len(r.InvFreq)
	need(a.rows == backend.TokenRows && heads > 0 && heads*headDim == a.cols && dim > 0 && dim <= headDim,
		"Rope: %d heads of %d in %d columns, %d frequencies", heads, headDim, a.cols, len(r.InvFreq))
	t, known := c.angles[r]
	if !known {
		var err error
		if t.table, err = c.reserve(c.opts.Limits.Tokens*dim*4, "angles"); err == nil {
			t.freq, err = c.put(float32Bytes(r.InvFreq), "frequencies")
		}
		need(err == nil, "Rope: %v", err)
		c.angles[r] = t
	}
	if p := c.plan(); !p.turned[r] {
		p.turned[r] = true
		c.record(a, op{kind: opAngles, dim: int32(dim), scale: r.Scale, cap: r.Growth, from: int32(r.Span), dst: t.table, w: t.freq})
	}
	c.record(a, op{kind: opRope, n: int32(a.cols), k: int32(headDim), dim: int32(dim), dst: a.data, b: t.table})
}

// kvOp returns the fields that operations on a KV layer have in common.
func (c *CUDA) kvOp(kind opKind, layer int) (op, *backend.KVGroup) {
	s := &c.kv.spec
	need(layer >= 0 && layer < len(s.Layers), "KV layer %d of %d", layer, len(s.Layers))
	c.plan().usesKV = true
	g, place := c.kv.group(layer), s.Layers[layer]
	o := op{
		kind: kind, group: int32(place.Group), blockTokens: int32(g.BlockTokens), kvHeads: int32(g.KVHeads), dim: int32(g.HeadDim),
		k: int32(g.ValueDim()), kv: c.kv.regions[place.Region], pageBytes: int64(s.PageBytes),
	}
	if g.Latent == 0 {
		o.vAt = int64(g.BlockTokens * g.TokenBytes(s.DType) / 2)
	}
	switch s.DType {
	case backend.BF16:
		o.dtype = typeBF16
	case backend.FP8:
		o.dtype, o.w, o.bias = typeFP8, c.kv.scales[layer].k, c.kv.scales[layer].v
		if g.Latent > 0 { // whose values are a part of its keys
			o.bias = o.w
		}
	}
	return o, g
}

// StoreKV records the write of k and v to the slots of the step.
func (c *CUDA) StoreKV(layer int, k, v backend.Buf) {
	a, b := c.buf(k), c.buf(v)
	o, g := c.kvOp(opStoreKV, layer)
	if g.Latent > 0 {
		need(a.cols == g.Latent && a.cols+b.cols == g.HeadDim, "StoreKV: %d and %d columns for a latent of %d in %d", a.cols, b.cols, g.Latent, g.HeadDim)
	} else {
		need(a.cols == g.KVHeads*g.HeadDim && b.cols == a.cols, "StoreKV: %d and %d columns for %d heads of %d", a.cols, b.cols, g.KVHeads, g.HeadDim)
	}
	need(a.rows == backend.TokenRows && b.rows == a.rows, "StoreKV: row sets %d and %d", a.rows, b.rows)
	o.n, o.a, o.b = int32(g.KVHeads*g.HeadDim), a.data, b.data
	c.record(a, o)
}

// Attention records causal attention of q over the sequences' pages.
func (c *CUDA) Attention(dst, q backend.Buf, a backend.AttentionSpec) {
	d, x := c.buf(dst), c.buf(q)
	o, g := c.kvOp(opAttention, a.Layer)
	need(dst != q && d.rows == backend.TokenRows && x.rows == d.rows && a.KVHeads == g.KVHeads && a.HeadDim == g.HeadDim &&
		a.Heads > 0 && a.Heads%a.KVHeads == 0 && a.Heads*a.HeadDim == x.cols && a.Heads*g.ValueDim() == d.cols,
		"Attention: %+v over KV %+v in %d columns", a, *g, d.cols)
	need(a.Window >= 0 && a.Window <= maxCols && (g.Window == 0 || a.Window > 0 && a.Window <= g.Window),
		"Attention: window of %d over KV that keeps %d", a.Window, g.Window)
	o.heads, o.scale, o.cap, o.window, o.n = int32(a.Heads), a.Scale, a.Softcap, int32(a.Window), int32(d.cols)
	o.dst, o.a = d.data, x.data
	if a.Sinks != nil {
		o.extra = c.vector(*a.Sinks, a.Heads)
	}
	c.record(d, o)
}

// GatedAct records dst = act(gate)·up.
func (c *CUDA) GatedAct(dst, gate, up backend.Buf, act backend.Act) {
	d, rest := c.alike("GatedAct", dst, gate, up)
	c.record(d, op{kind: opGatedAct, n: int32(d.cols), act: int32(act), dst: d.data, a: rest[0].data, b: rest[1].data})
}

// Add records x = (x + add)·scale.
func (c *CUDA) Add(x, add backend.Buf, scale backend.Weight) {
	a, rest := c.alike("Add", x, add)
	c.record(a, op{kind: opAdd, n: int32(a.cols), scale: 1, dst: a.data, a: a.data, b: rest[0].data, w: c.vector(scale, 1)})
}

// Scale records x *= by.
func (c *CUDA) Scale(x backend.Buf, by float32) {
	a := c.buf(x)
	c.record(a, op{kind: opAdd, n: int32(a.cols), scale: by, dst: a.data, a: a.data})
}

// Softcap records x = limit·tanh(x/limit).
func (c *CUDA) Softcap(x backend.Buf, limit float32) {
	a := c.buf(x)
	need(limit > 0, "Softcap: limit of %v", limit)
	c.record(a, op{kind: opSoftcap, n: int32(a.cols), scale: limit, dst: a.data, a: a.data})
}

// Columns records dst = src's columns from from on.
func (c *CUDA) Columns(dst, src backend.Buf, from int) {
	d, a := c.buf(dst), c.buf(src)
	need(d != a && d.rows == a.rows && from >= 0 && from+d.cols <= a.cols, "Columns: %d from %d of %d", d.cols, from, a.cols)
	c.record(d, op{kind: opColumns, n: int32(d.cols), k: int32(a.cols), from: int32(from), dst: d.data, a: a.data})
}

// Rows records dst[i] = src[Outputs[i].Row].
func (c *CUDA) Rows(dst, src backend.Buf) {
	d, a := c.buf(dst), c.buf(src)
	need(d.rows == backend.OutputRows && a.rows == backend.TokenRows && d.cols == a.cols, "Rows: from %d columns of row set %d to %d of %d",
		a.cols, a.rows, d.cols, d.rows)
	c.record(d, op{kind: opRows, n: int32(d.cols), dst: d.data, a: a.data})
}

// Sample records the draw of Step.Sampled from the logits.
func (c *CUDA) Sample(logits backend.Buf) {
	b := c.buf(logits)
	need(b.rows == backend.OutputRows && c.plan().logits == nil, "Sample: logits must have output rows, and be sampled once")
	if c.opts.Group != nil && c.opts.Group.Rank() > 0 {
		return
	}
	m, err := c.samplingOf(b)
	need(err == nil, "Sample: %v", err)
	c.recording.logits, c.recording.sampling = b, m
	c.record(b, op{kind: opSample, n: int32(b.cols), k: int32(m.words), dst: m.ruled, a: b.data, b: m.at})
}

// Mark records that all KV of a layer has been stored.
func (c *CUDA) Mark(layer int) {
	p := c.plan()
	p.marks = append(p.marks, stop{len(p.ops), layer})
}
