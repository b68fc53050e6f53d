package cpu

import (
	"math"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

// portable runs every operation in plain Go. It is the oracle of the C kernels. Sums
// are float64, in which a product of two float32 is exact, so that a result is almost
// always the exact one rounded once.
type portable struct {
	pool    *pool
	scratch []portableScratch // [threads]

	c  *CPU // of the operation that runs
	op *op
}

// portableScratch is one worker's memory in addition to the buffers.
type portableScratch struct {
	row    []float32 // [most columns in] one decoded row of a matrix
	scores []float64 // [positions]
	out    []float64 // [head dim]
}

func newPortable(c *CPU) *portable {
	return &portable{pool: c.rows, scratch: make([]portableScratch, c.opts.Threads)}
}

func (p *portable) close() {} // the pool is the backend's

// load keeps the matrix row-major, and in place if it stays mapped.
func (p *portable) load(c *CPU, w *weight, data []byte) error {
	if w.dtype.Quantized() {
		return p.loadQuantized(c, w, data)
	}
	if w.dtype == backend.GRID {
		return p.loadGrid(c, w)
	}
	if c.opts.Mapped && !w.renewed {
		w.matrix = data
		return nil
	}
	if w.matrix == nil {
		m, err := c.mem.bytes(len(data), true)
		if err != nil {
			return err
		}
		w.matrix = m
	}
	copy(w.matrix, data)
	return nil
}

func (p *portable) size(w *weight) int { return w.dtype.MatrixBytes(w.out, w.in) }

// compile grows the workers' scratch to the size that the plan needs.
func (p *portable) compile(c *CPU, pl *plan) (unsafe.Pointer, error) {
	cols, positions, dim := 0, 0, 0
	for i := range pl.ops {
		switch o := &pl.ops[i]; o.kind {
		case opLinear:
			cols = max(cols, o.w.in)
		case opExperts:
			cols = max(cols, o.experts[0].in)
		case opAttention:
			positions = max(positions, c.opts.Limits.Blocks*c.kv.group(o.layer).BlockTokens)
			dim = max(dim, o.dim)
		}
	}
	for i := range p.scratch {
		s := &p.scratch[i]
		if len(s.row) < cols {
			s.row = make([]float32, cols)
		}
		if len(s.scores) < positions {
			s.scores = make([]float64, positions)
		}
		if len(s.out) < dim {
			s.out = make([]float64, dim)
		}
	}
	return nil, nil
}

// linearRows is the number of outputs of Linear per item.
const linearRows = 16

func (p *portable) run(c *CPU, pl *plan, lo, hi int) {
	for i := lo; i < hi; i++ {
		p.c, p.op = c, &pl.ops[i]
		items := c.step.live(p.op.rows) * max(p.op.slots, 1)
		switch p.op.kind {
		case opLinear:
			if items > 0 {
				items = (p.op.w.out + linearRows - 1) / linearRows
			}
		case opAttention:
			items *= p.op.heads
		case opDelta:
			items = c.step.spans * p.op.delta.KeyHeads
		case opGroup:
			items = min(items, 1)
		case opAdapt:
			if p.op.route.spans() == 0 {
				items = 0
			}
		case opExperts:
			items = p.op.route.spans() * ((p.op.experts[0].out + linearRows - 1) / linearRows)
		}
		p.pool.run(p, items)
	}
	p.c, p.op = nil, nil
}

// item runs one row of the operation, or the operation's own unit of work.
func (p *portable) item(worker, i int) {
	o, s := p.op, &p.c.step
	switch o.kind {
	case opEmbed:
		if id := int(s.ids[i]) - o.from; id >= 0 && id < o.w.out {
			o.w.decodeRow(o.dst.row(i), id)
		} else {
			clear(o.dst.row(i))
		}
	case opLinear:
		p.linear(&p.scratch[worker], o.w, o.bias, 0, s.live(o.rows), i*linearRows)
	case opRMSNorm:
		dst, x, n := o.dst.row(i), o.a.row(i), o.dim
		var add, w []float32
		if o.w != nil {
			w = o.w.vector
		}
		if o.b != nil {
			add = o.b.row(i)
		}
		for at := 0; at < len(x); at += n { // once, or head by head
			rmsNorm(dst[at:at+n], x[at:at+n], add, w, o.scale)
		}
	case opRope:
		width := o.a.cols / o.heads
		for x := o.a.row(i); len(x) > 0; x = x[width:] {
			rotate(x[width-o.dim:width], o.rope.table[i*o.dim:(i+1)*o.dim], o.dim)
		}
	case opStoreKV:
		p.storeKV(i)
	case opAttention:
		p.attention(&p.scratch[worker], i/o.heads, i%o.heads)
	case opDelta:
		p.delta(i/o.delta.KeyHeads, i%o.delta.KeyHeads)
	case opGate:
		o.gate(i)
	case opGatedAct:
		n := o.width(o.dst)
		gatedAct(o.act, o.dst.data[i*n:(i+1)*n], o.a.data[i*n:(i+1)*n], o.b.data[i*n:(i+1)*n])
	case opAdd:
		by := o.scale
		if o.w != nil {
			by = o.w.vector[0]
		}
		for j, x := range o.a.row(i) {
			if o.b != nil {
				x += o.b.row(i)[j]
			}
			o.dst.row(i)[j] = x * by
		}
	case opSoftcap:
		for j, x := range o.a.row(i) {
			o.dst.row(i)[j] = float32(float64(o.scale) * math.Tanh(float64(x)/float64(o.scale)))
		}
	case opColumns:
		copy(o.dst.row(i), o.a.row(i)[o.from:])
	case opQuantize:
		n := o.width(o.a)
		at := quantLayout(n)
		quantize(o.a.q[i*at.size:(i+1)*at.size], o.ordered(i, o.a.data[i*n:(i+1)*n], p.scratch[worker].row))
	case opRows:
		copy(o.dst.row(i), o.a.row(int(s.outputRows[i])))
	case opRoute:
		if o.sigmoid != nil {
			var bias []float32
			if o.bias != nil {
				bias = o.bias.vector
			}
			o.route.pickGroups(i, o.a.row(i), bias, o.sigmoid, o.normalize)
		} else {
			o.route.pick(i, o.a.row(i), o.normalize, o.scales)
		}
	case opGroup:
		o.route.group(s.live(o.rows))
	case opScatter:
		o.route.scatter(i, o.dst, o.a.row(i))
	case opSplit:
		o.split(i, s.live(o.rows))
	case opJoin:
		o.join(i, s.live(o.rows))
	case opAdapt:
		if o.route.ids[i] >= 0 {
			for j, v := range o.b.row(i) {
				o.dst.row(i)[j] += v
			}
		}
	case opExperts:
		spans := o.route.spans()
		e := o.route.span(i % spans)
		var bias *weight
		if o.biases != nil {
			bias = o.biases[e.expert]
		}
		p.linear(&p.scratch[worker], o.experts[e.expert], bias, int(e.first), int(e.count), i/spans*linearRows)
	case opCombine:
		o.route.combine(i, o.dst.row(i), o.a)
	}
}

// row returns the i-th row of the buffer.
func (b *buffer) row(i int) []float32 { return b.data[i*b.cols : (i+1)*b.cols] }

// linear computes up to linearRows outputs from lo on for rows [first,
// first+live). Each row of the matrix is decoded once for the whole batch.
func (p *portable) linear(s *portableScratch, m, bias *weight, first, live, lo int) {
	o := p.op
	w := s.row[:m.in]
	half := len(w)
	if p.c.opts.FaultBatchOrder && live > 1 {
		half /= 2
	}
	if m.dtype.Quantized() || m.dtype == backend.GRID {
		p.linearQuantized(m, bias, first, live, lo)
		return
	}
	for n := lo; n < min(lo+linearRows, m.out); n++ {
		m.decodeRow(w, n)
		for r := first; r < first+live; r++ {
			x := o.a.data[r*m.in : (r+1)*m.in]
			y := float32(dot(w[:half], x[:half]))
			if half < len(w) {
				y += float32(dot(w[half:], x[half:]))
			}
			if bias != nil {
				y += bias.vector[n]
			}
			o.dst.data[r*m.out+n] = y
		}
	}
}

// dot sums in four interleaved chains, which are joined in order.
func dot(a, b []float32) float64 {
	b = b[:len(a)]
	var s0, s1, s2, s3 float64
	for len(a) >= 4 && len(b) >= 4 {
		s0 += float64(a[0]) * float64(b[0])
		s1 += float64(a[1]) * float64(b[1])
		s2 += float64(a[2]) * float64(b[2])
		s3 += float64(a[3]) * float64(b[3])
		a, b = a[4:], b[4:]
	}
	for i := range a {
		s0 += float64(a[i]) * float64(b[i])
	}
	return (s0 + s1) + (s2 + s3)
}

// rmsNorm adds add, if any, to x, then writes norm(x)·w to dst.
func rmsNorm(dst, x, add, w []float32, eps float32) {
	sum := 0.0
	for i := range x {
		if add != nil {
			x[i] += add[i]
		}
		sum += float64(x[i]) * float64(x[i])
	}
	inv := float32(1 / math.Sqrt(sum/float64(len(x))+float64(eps)))
	for i := range dst {
		dst[i] = x[i] * inv
		if w != nil {
			dst[i] *= w[i]
		}
	}
}

// rotate rotates each head of x by half-split pairs. cs holds cosines, then sines.
func rotate(x, cs []float32, dim int) {
	half := dim / 2
	for ; len(x) >= dim; x = x[dim:] {
		for i := range half {
			a, b := x[i], x[i+half]
			x[i] = float32(a*cs[i]) - float32(b*cs[i+half])
			x[i+half] = float32(b*cs[i]) + float32(a*cs[i+half])
		}
	}
}

func gatedAct(act backend.Act, dst, gate, up []float32) {
	for i, g := range gate {
		x, u := float64(g), up[i]
		switch act {
		case backend.GELUTanh:
			dst[i] = float32(x*0.5*(1+math.Tanh(geluTanhScale*(x+geluTanhCube*x*x*x)))) * u
		case backend.ClampedSwish:
			x = min(x, swishLimit)
			u = min(max(u, -swishLimit), swishLimit)
			dst[i] = float32(x/(1+math.Exp(-swishSlope*x))) * (u + 1)
		default:
			dst[i] = float32(x/(1+math.Exp(-x))) * u
		}
	}
}

// Constants of the activations, as in kernels/body.h.
const (
	geluTanhScale = 0.7978845608028654 // sqrt(2/pi)
	geluTanhCube  = 0.044715
	swishLimit    = 7
	swishSlope    = 1.702
)

// page returns one block of one layer as bytes: K [kvHeads, dim, blockTokens] and V
// [kvHeads, blockTokens, dim]. For a latent, both are the same bytes.
func (kv *kvStore) page(layer int, block int32) (k, v []byte) {
	size, half := kv.spec.PageBytes, kv.group(layer).half
	b := kv.memory(layer)[int(block)*size : (int(block)+1)*size]
	if half == 0 {
		return b, b
	}
	return b[:half], b[half : 2*half]
}

func (p *portable) storeKV(row int) {
	o, g, dtype := p.op, p.c.kv.group(p.op.layer), p.c.kv.spec.DType
	slot := int(g.slots[row])
	off := slot % g.BlockTokens
	kp, vp := p.c.kv.page(o.layer, int32(slot/g.BlockTokens))
	k, v := o.a.row(row), o.b.row(row)
	scaleK, scaleV := p.c.kv.scalesOf(o.layer)
	if o.latent > 0 {
		for d := range g.HeadDim {
			f := k[min(d, o.latent-1)]
			if d >= o.latent {
				f = v[d-o.latent]
			}
			put(kp, off*g.HeadDim+d, f, dtype, scaleK(0))
		}
		return
	}
	for h := range g.KVHeads {
		for d := range g.HeadDim {
			ki := (h*g.HeadDim+d)*g.BlockTokens + off
			vi := (h*g.BlockTokens+off)*g.HeadDim + d
			put(kp, ki, k[h*g.HeadDim+d], dtype, scaleK(h))
			put(vp, vi, v[h*g.HeadDim+d], dtype, scaleV(h))
		}
	}
}

// scalesOf returns the scales of a layer's keys and values by head: 1 unless the type is FP8. The
// values of a latent are a part of its keys.
func (kv *kvStore) scalesOf(layer int) (k, v func(head int) float32) {
	if kv.scales == nil {
		one := func(int) float32 { return 1 }
		return one, one
	}
	s := kv.scales[layer]
	k = func(head int) float32 { return s.k256[head] / 256 }
	if kv.group(layer).Latent > 0 {
		return k, k
	}
	return k, func(head int) float32 { return s.v256[head] / 256 }
}

// put stores a number of KV, of FP8 divided by its scale.
func put(dst []byte, i int, f float32, dt backend.DType, scale float32) {
	switch dt {
	case backend.BF16:
		u16view(dst)[i] = toBF16(f)
	case backend.FP8:
		dst[i] = backend.ToE4M3(f / scale)
	default:
		f32view(dst)[i] = f
	}
}

// get returns a number of KV, of FP8 without its scale.
func get(src []byte, i int, dt backend.DType) float64 {
	switch dt {
	case backend.BF16:
		return float64(fromBF16(u16view(src)[i]))
	case backend.FP8:
		return float64(backend.E4M3[src[i]])
	}
	return float64(f32view(src)[i])
}

// attention computes one head of one row over the positions of its window, up to its
// own.
func (p *portable) attention(s *portableScratch, row, head int) {
	o, g, dtype := p.op, p.c.kv.group(p.op.layer), p.c.kv.spec.DType
	dim, bt := g.HeadDim, g.BlockTokens
	h := head / (o.heads / o.kvHeads)
	table := g.tables[int(p.c.step.rowSpan[row])*p.c.opts.Limits.Blocks:]
	n, first := int(p.c.step.positions[row])+1, 0
	if o.window > 0 {
		first = max(0, n-o.window)
	}
	q := o.a.row(row)[head*dim : (head+1)*dim]
	wide := g.ValueDim()
	key := func(t, d int) int { return (h*dim+d)*bt + t%bt }
	value := func(t, d int) int { return (h*bt+t%bt)*dim + d }
	if o.latent > 0 {
		key = value // the rows of a latent hold both
	}

	scaleK, scaleV := p.c.kv.scalesOf(o.layer)
	factor := float64(o.scale * scaleK(h))
	scores, most := s.scores[:n], math.Inf(-1)
	for t := first; t < n; t++ {
		k, _ := p.c.kv.page(o.layer, table[t/bt])
		sum := 0.0
		for d, qd := range q {
			sum += float64(qd) * get(k, key(t, d), dtype)
		}
		if scores[t] = sum * factor; o.cap > 0 {
			scores[t] = float64(o.cap) * math.Tanh(scores[t]/float64(o.cap))
		}
		most = max(most, scores[t])
	}
	total, out := 0.0, s.out[:wide]
	if o.sinks != nil {
		sink := float64(o.sinks.vector[head])
		most = max(most, sink)
		total = math.Exp(sink - most)
	}
	clear(out)
	for t := first; t < n; t++ {
		_, v := p.c.kv.page(o.layer, table[t/bt])
		e := math.Exp(scores[t] - most)
		total += e
		for d := range out {
			out[d] += e * get(v, value(t, d), dtype)
		}
	}
	dst := o.dst.row(row)[head*wide : (head+1)*wide]
	for d := range dst {
		dst[d] = float32(out[d] / total * float64(scaleV(h)))
	}
}
