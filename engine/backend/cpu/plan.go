package cpu

import (
	"fmt"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

type opKind int32

// Kinds of recorded operations. kernels.h has the same numbers.
const (
	opEmbed opKind = iota + 1
	opLinear
	opRMSNorm
	opRope
	opStoreKV
	opAttention
	opGatedAct
	opRows
	opRoute   // MoE: each row's experts and their weights
	opGroup   // MoE: slots, sorted by expert
	opScatter // MoE: rows to their slots
	opExperts // MoE: products of each slot with its expert's matrix
	opCombine // MoE: slots to their rows, weighted
	opAdd     // a = (a + b)·scale·w; b and w are optional
	opSoftcap
	opColumns
	opSplit    // the first columns of each head, head by head
	opJoin     // its inverse, with the remaining columns
	opAdapt    // dst += a in rows that have an adapter
	opQuantize // rows of a to a.q
	opDelta    // items are key heads of spans
	opGate
)

// op is one recorded operation. Buffers have all rows; the number of live rows comes
// from the step each time it runs.
type op struct {
	kind    opKind
	rows    backend.Rows
	dst     *buffer // written; nil for opStoreKV
	a, b    *buffer // read; opRMSNorm with b set first does a += b
	w, bias *weight
	rope    *ropeTable
	layer   int
	heads   int
	kvHeads int
	dim     int     // of a head; of opRope the rotated columns, of opSplit and opJoin the copied ones
	latent  int     // of opStoreKV and opAttention: see KVShape
	scale   float32 // of the scores, or epsilon of a norm
	cap     float32 // bounds the scores of opAttention; 0: not bounded
	window  int     // positions that a row attends to; 0: all

	// For MoE. Buffers of slots hold slots rows in each row.
	slots     int // 0 except for operations whose rows are slots
	route     *routing
	experts   []*weight // of opExperts
	biases    []*weight // of opExperts; nil: none
	scales    *weight   // of opRoute; nil: none
	normalize bool
	sigmoid   *backend.SigmoidRouter // of opRoute

	delta *deltaRule    // of opDelta
	from  int           // of opColumns the first one, of opEmbed the token of the first row
	form  backend.DType // of opQuantize
	act   backend.Act
	sinks *weight // of opAttention; nil: none
}

// width returns the columns of a buffer's rows in this operation.
func (o *op) width(b *buffer) int { return b.cols / max(o.slots, 1) }

// stop is a place in the plan where control returns to Go.
type stop struct {
	kind  stopKind
	at    int     // before operation at
	layer int     // of a mark
	buf   *buffer // the logits, the reduced buffer, or the destination of a gather
	part  *buffer // of a gather: this worker's columns
}

type stopKind uint8

const (
	stopMark stopKind = iota
	stopSample
	stopReduce
	stopGather
)

// plan is a recorded forward pass.
type plan struct {
	ops    []op
	stops  []stop
	ropes  []*ropeTable // the tables used, filled at the start of each step
	vocab  int          // smallest embedding table, 0 without one
	heads  []*routing   // of HeadLinear: every row selects every head
	usesKV bool
	marks  []int          // while recording: layers whose KV other workers may not have stored yet
	native unsafe.Pointer // the C form of ops, mapped

	quantized map[*buffer]quantForm // while recording: buffers whose q is current, and its form
}

// record appends an operation; c must be inside Replay's record call.
func (c *CPU) record(o op) {
	p := c.plan()
	p.ops = append(p.ops, o)
	for _, written := range []*buffer{o.dst, o.a} {
		if written == o.dst || o.kind == opRMSNorm && o.b != nil {
			delete(p.quantized, written)
		}
	}
}

func (c *CPU) plan() *plan {
	if c.recording == nil {
		panic("cpu: operation issued outside of Replay's record function")
	}
	return c.recording
}

// need panics if shapes disagree, which is a bug of the model file.
func need(ok bool, format string, args ...any) {
	if !ok {
		panic("cpu: " + fmt.Sprintf(format, args...))
	}
}

func (c *CPU) buf(b backend.Buf) *buffer {
	need(b >= 0 && int(b) < len(c.buffers), "buffer %d of %d", b, len(c.buffers))
	return c.buffers[b]
}

func (c *CPU) weight(id backend.Weight) *weight {
	need(id >= 0 && int(id) < len(c.weights), "weight %d of %d", id, len(c.weights))
	return c.weights[id]
}

// vector returns a parameter vector of n elements.
func (c *CPU) vector(id backend.Weight, n int) *weight {
	w := c.weight(id)
	need(w.in == 0 && w.out == n, "%s is [%d, %d], want a vector of %d", w.name, w.out, w.in, n)
	return w
}

// optional returns the vector, or nil for NoWeight.
func (c *CPU) optional(id backend.Weight, n int) *weight {
	if id == backend.NoWeight {
		return nil
	}
	return c.vector(id, n)
}

// Add records x = (x + add)·scale.
func (c *CPU) Add(x, add backend.Buf, scale backend.Weight) {
	a, b := c.buf(x), c.buf(add)
	sameShape("Add", a, b)
	c.record(op{kind: opAdd, rows: a.rows, dst: a, a: a, b: b, w: c.optional(scale, 1), scale: 1})
}

// Scale records x *= by.
func (c *CPU) Scale(x backend.Buf, by float32) {
	a := c.buf(x)
	c.record(op{kind: opAdd, rows: a.rows, dst: a, a: a, scale: by})
}

// Softcap records x = limit·tanh(x/limit).
func (c *CPU) Softcap(x backend.Buf, limit float32) {
	a := c.buf(x)
	need(limit > 0, "Softcap: limit of %v", limit)
	c.record(op{kind: opSoftcap, rows: a.rows, dst: a, a: a, scale: limit})
}

// Columns records dst = src's columns from from on.
func (c *CPU) Columns(dst, src backend.Buf, from int) {
	d, a := c.buf(dst), c.buf(src)
	need(d != a && d.rows == a.rows && from >= 0 && from+d.cols <= a.cols, "Columns: %d from %d of %d", d.cols, from, a.cols)
	c.record(op{kind: opColumns, rows: d.rows, dst: d, a: a, from: from})
}

// sameShape panics unless the buffers have one row set and one width.
func sameShape(what string, first *buffer, rest ...*buffer) {
	for _, b := range rest {
		need(b.rows == first.rows && b.cols == first.cols, "%s: %d columns of row set %d against %d of %d",
			what, first.cols, first.rows, b.cols, b.rows)
	}
}

// Embed records dst = table[Step.Tokens].
func (c *CPU) Embed(dst backend.Buf, table backend.Weight) {
	d, w := c.buf(dst), c.weight(table)
	need(d.rows == backend.TokenRows && w.in == d.cols && w.order == nil, "Embed: %s is [%d, %d] for %d columns", w.name, w.out, w.in, d.cols)
	c.record(op{kind: opEmbed, rows: d.rows, dst: d, w: w, from: w.first})
	if p := c.recording; p.vocab == 0 || w.of < p.vocab {
		p.vocab = w.of
	}
}

// Linear records dst = x·Wᵀ + bias.
func (c *CPU) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	d, a, m := c.buf(dst), c.buf(x), c.weight(w)
	need(d != a, "Linear: %s in place", m.name)
	need(d.rows == a.rows && m.in == a.cols && m.out == d.cols, "Linear: %s is [%d, %d] from %d to %d columns",
		m.name, m.out, m.in, a.cols, d.cols)
	c.quantizeFor([]*weight{m}, a, 1, nil)
	o := op{kind: opLinear, rows: d.rows, dst: d, a: a, w: m}
	if bias != backend.NoWeight {
		o.bias = c.vector(bias, m.out)
	}
	c.record(o)
	c.adaptLinear(d, a, m)
}

// RMSNorm records dst = norm(x)·w.
func (c *CPU) RMSNorm(dst, x backend.Buf, w backend.Weight, eps float32) {
	d, a := c.buf(dst), c.buf(x)
	sameShape("RMSNorm", d, a)
	c.record(op{kind: opRMSNorm, rows: d.rows, dst: d, a: a, w: c.optional(w, d.cols), dim: d.cols, scale: eps})
}

// AddRMSNorm records x += add, dst = norm(x)·w.
func (c *CPU) AddRMSNorm(dst, x, add backend.Buf, w backend.Weight, eps float32) {
	d, a, b := c.buf(dst), c.buf(x), c.buf(add)
	sameShape("AddRMSNorm", d, a, b)
	need(d != a && a != b, "AddRMSNorm: x must differ from dst and add")
	c.record(op{kind: opRMSNorm, rows: d.rows, dst: d, a: a, b: b, w: c.vector(w, d.cols), dim: d.cols, scale: eps})
}

// HeadNorm records dst = norm(x)·w for each head of each row.
func (c *CPU) HeadNorm(dst, x backend.Buf, heads, headDim int, w backend.Weight, eps float32) {
	d, a := c.buf(dst), c.buf(x)
	sameShape("HeadNorm", d, a)
	need(heads > 0 && headDim > 0 && heads*headDim == a.cols, "HeadNorm: %d heads of %d in %d columns", heads, headDim, a.cols)
	c.record(op{kind: opRMSNorm, rows: d.rows, dst: d, a: a, w: c.optional(w, headDim), heads: heads, dim: headDim, scale: eps})
}

// Rope records the rotation of each head of x by the rows' positions.
func (c *CPU) Rope(x backend.Buf, heads, headDim int, r *backend.Rope) {
	a := c.buf(x)
	dim := 2 * len(r.InvFreq)
	need(a.rows == backend.TokenRows && heads > 0 && heads*headDim == a.cols,
		"Rope: %d heads of %d in %d columns", heads, headDim, a.cols)
	need(dim > 0 && dim <= headDim, "Rope: %d frequencies for heads of %d", len(r.InvFreq), headDim)
	c.record(op{kind: opRope, rows: a.rows, dst: a, a: a, rope: c.ropeTable(r), heads: heads, dim: dim})
}

// ropeTable returns the table of r, which it may have to make, and adds it to the plan.
func (c *CPU) ropeTable(r *backend.Rope) *ropeTable {
	var t *ropeTable
	for _, have := range c.ropes {
		if have.rope == r {
			t = have
		}
	}
	if t == nil {
		half := len(r.InvFreq)
		data, err := c.mem.floats(c.opts.Limits.Tokens * 2 * half)
		need(err == nil, "Rope: %v", err)
		t = &ropeTable{rope: r, half: half, table: data}
		c.ropes = append(c.ropes, t)
	}
	p := c.plan()
	for _, have := range p.ropes {
		if have == t {
			return t
		}
	}
	p.ropes = append(p.ropes, t)
	return t
}

// kvGroup returns the group of an operation's KV layer.
func (c *CPU) kvGroup(what string, layer int) *kvGroup {
	need(layer >= 0 && layer < len(c.kv.spec.Layers), "%s: layer %d of %d", what, layer, len(c.kv.spec.Layers))
	c.plan().usesKV = true
	return c.kv.group(layer)
}

// StoreKV records the write of k and v to the slots of the step.
func (c *CPU) StoreKV(layer int, k, v backend.Buf) {
	a, b, g := c.buf(k), c.buf(v), c.kvGroup("StoreKV", layer)
	if g.Latent > 0 {
		need(b.rows == a.rows && a.cols == g.Latent && a.cols+b.cols == g.HeadDim, "StoreKV: %d and %d columns for a latent of %d in %d",
			a.cols, b.cols, g.Latent, g.HeadDim)
	} else {
		sameShape("StoreKV", a, b)
		need(a.cols == g.KVHeads*g.HeadDim, "StoreKV: %d columns for %d heads of %d", a.cols, g.KVHeads, g.HeadDim)
	}
	need(a.rows == backend.TokenRows, "StoreKV: row set %d", a.rows)
	c.record(op{kind: opStoreKV, rows: a.rows, a: a, b: b, layer: layer, kvHeads: g.KVHeads, dim: g.HeadDim, latent: g.Latent})
}

// Attention records causal attention of q over the sequences' pages.
func (c *CPU) Attention(dst, q backend.Buf, a backend.AttentionSpec) {
	d, x, g := c.buf(dst), c.buf(q), c.kvGroup("Attention", a.Layer)
	need(d.rows == x.rows && x.cols == a.Heads*a.HeadDim, "Attention: %+v of %d columns", a, x.cols)
	need(d != x, "Attention: in place")
	need(d.rows == backend.TokenRows && a.KVHeads == g.KVHeads && a.HeadDim == g.HeadDim &&
		a.Heads > 0 && a.Heads%a.KVHeads == 0 && a.Heads*g.ValueDim() == d.cols,
		"Attention: %+v over KV %+v in %d columns", a, g.KVGroup, d.cols)
	need(a.Window >= 0 && a.Window <= maxCols && (g.Window == 0 || a.Window > 0 && a.Window <= g.Window),
		"Attention: window of %d over KV that keeps %d", a.Window, g.Window)
	o := op{kind: opAttention, rows: d.rows, dst: d, a: x, layer: a.Layer,
		heads: a.Heads, kvHeads: a.KVHeads, dim: a.HeadDim, latent: g.Latent, scale: a.Scale, cap: a.Softcap, window: a.Window}
	if a.Sinks != nil {
		o.sinks = c.vector(*a.Sinks, a.Heads)
	}
	c.record(o)
}

// GatedAct records dst = act(gate)·up.
func (c *CPU) GatedAct(dst, gate, up backend.Buf, act backend.Act) {
	d, a, b := c.buf(dst), c.buf(gate), c.buf(up)
	sameShape("GatedAct", d, a, b)
	c.record(op{kind: opGatedAct, rows: d.rows, dst: d, a: a, b: b, act: act})
}

// Rows records dst[i] = src[Outputs[i].Row].
func (c *CPU) Rows(dst, src backend.Buf) {
	d, a := c.buf(dst), c.buf(src)
	need(d.rows == backend.OutputRows && a.rows == backend.TokenRows && d.cols == a.cols,
		"Rows: from %d columns of row set %d to %d of %d", a.cols, a.rows, d.cols, d.rows)
	c.record(op{kind: opRows, rows: d.rows, dst: d, a: a})
}

// Sample records the draw of Step.Sampled from the logits.
func (c *CPU) Sample(logits backend.Buf) {
	b := c.buf(logits)
	need(b.rows == backend.OutputRows, "Sample: logits must have output rows")
	if c.rank() == 0 {
		c.stop(stop{kind: stopSample, buf: b})
	}
}

// Mark records that all KV of a layer has been stored. With several workers the mark
// moves to their next AllReduce, after which every worker has stored its part.
func (c *CPU) Mark(layer int) {
	if c.opts.Group != nil {
		p := c.plan()
		p.marks = append(p.marks, layer)
		return
	}
	c.stop(stop{kind: stopMark, layer: layer})
}

// stop records a place where control returns to Go.
func (c *CPU) stop(s stop) {
	p := c.plan()
	s.at = len(p.ops)
	p.stops = append(p.stops, s)
}

func (c *CPU) rank() int {
	if c.opts.Group == nil {
		return 0
	}
	return c.opts.Group.Rank()
}

// AllReduce records x = the sum of all workers' x.
func (c *CPU) AllReduce(x backend.Buf) {
	b := c.buf(x)
	if c.opts.Group == nil {
		return
	}
	c.stop(stop{kind: stopReduce, buf: b})
	p := c.recording
	delete(p.quantized, b)
	for _, layer := range p.marks {
		c.stop(stop{kind: stopMark, layer: layer})
	}
	p.marks = p.marks[:0]
}

// AllGather records dst = all workers' src, side by side.
func (c *CPU) AllGather(dst, src backend.Buf) {
	d, a := c.buf(dst), c.buf(src)
	need(d.rows == a.rows, "AllGather: row sets %d and %d", a.rows, d.rows)
	if c.opts.Group == nil {
		need(d == a, "AllGather: %d of %d columns with one worker", a.cols, d.cols)
		return
	}
	from, end := backend.Cut(d.cols, 1, c.rank(), c.opts.Group.Size())
	need(d != a && a.cols == end-from, "AllGather: rank %d has %d columns of %d, want %d", c.rank(), a.cols, d.cols, end-from)
	c.stop(stop{kind: stopGather, buf: d, part: a})
	delete(c.recording.quantized, d)
}
