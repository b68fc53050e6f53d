//go:build cgo

package cpu

/*
#cgo noescape tandem_run
#cgo nocallback tandem_run
#cgo noescape tandem_argmax
#cgo nocallback tandem_argmax
#cgo noescape tandem_weigh
#cgo nocallback tandem_weigh
#cgo noescape tandem_mass
#cgo nocallback tandem_mass
#cgo noescape tandem_between
#cgo nocallback tandem_between
#cgo noescape tandem_first_above
#cgo nocallback tandem_first_above
#cgo noescape tandem_count_above
#cgo nocallback tandem_count_above
#include "kernels/kernels.h"
*/
import "C"

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/cpu"

	"github.com/tandem-serving/tandem/engine/backend"
	_ "github.com/tandem-serving/tandem/engine/backend/cpu/kernels" // defines the C functions called below
	"github.com/tandem-serving/tandem/engine/sample"
)

// nativeNames are indexed by the variant number of kernels.h.
var nativeNames = [...]string{Generic, AVX2, AVX512, NEON, AVXVNNI, AVX512VNNI, AMX}

// nativeVariants returns the variants whose instructions (TARGET in vec.h) the processor
// has and whose registers the system saves.
func nativeVariants() []string {
	x := &cpu.X86
	avx2 := x.HasAVX2 && x.HasFMA && C.tandem_has_f16c() != 0
	var names []string
	if avx512 := avx2 && x.HasAVX512F && x.HasAVX512BW && x.HasAVX512VL && x.HasAVX512DQ; avx512 {
		if x.HasAVX512VNNI {
			names = append(names, AVX512VNNI)
		}
		names = append(names, AVX512)
	}
	if avx2 && x.HasAVXVNNI {
		names = append(names, AVXVNNI)
	}
	if avx2 {
		names = append(names, AVX2)
	}
	if cpu.ARM64.HasASIMD {
		names = append(names, NEON)
	}
	return append(names, Generic)
}

// hasAMX reports whether amx.h's kernels can run. Auto never selects them.
func hasAMX() bool {
	x := &cpu.X86
	return x.HasAVX512BF16 && x.HasAMXTile && x.HasAMXBF16 && slices.Contains(nativeVariants(), AVX512VNNI) && tilesAllowed()
}

// variantNumber returns the number of kernels.h for a name of nativeNames.
func variantNumber(kernels string) int { return max(0, slices.Index(nativeNames[:], kernels)) }

// nativeSampler implements sample.Kernels in C.
type nativeSampler struct{ variant C.int }

func newSampler(kernels string) sample.Kernels {
	if kernels == Portable {
		return sample.Portable{}
	}
	return nativeSampler{C.int(variantNumber(kernels))}
}

func (s nativeSampler) Argmax(logits []float32) int32 {
	return int32(C.tandem_argmax(s.variant, first(logits), C.int64_t(len(logits))))
}

func (s nativeSampler) Weigh(weights []float32, sums []float64, logits []float32, by *sample.Weighing) {
	to := C.tandem_weighing{C.float(by.Max), C.float(by.Scale), C.float(by.Lowest), C.float(by.MinP)}
	C.tandem_weigh(s.variant, first(weights), (*C.double)(unsafe.SliceData(sums)), first(logits), C.int64_t(len(logits)), &to)
}

func (s nativeSampler) Mass(sums []float64, weights []float32, least float32) {
	C.tandem_mass(s.variant, (*C.double)(unsafe.SliceData(sums)), first(weights), C.int64_t(len(weights)), C.float(least))
}

func (s nativeSampler) Between(dst []float32, counts []int32, above []float64, weights []float32, least, limit float32) int {
	return int(C.tandem_between(s.variant, first(dst), (*C.int32_t)(unsafe.SliceData(counts)), (*C.double)(unsafe.SliceData(above)),
		first(weights), C.int64_t(len(weights)), C.float(least), C.float(limit)))
}

func (s nativeSampler) Above(values []float32, from int, x float32) int {
	return int(C.tandem_first_above(s.variant, first(values), C.int64_t(len(values)), C.int64_t(from), C.float(x)))
}

func (s nativeSampler) Count(values []float32, x float32) int {
	return int(C.tandem_count_above(s.variant, first(values), C.int64_t(len(values)), C.float(x)))
}

// first returns a pointer to the elements of s, which may be empty.
func first(s []float32) *C.float { return (*C.float)(unsafe.SliceData(s)) }

// native runs compiled plans on the C thread pool.
type native struct {
	pool *C.tandem_pool
	step *C.tandem_step // mapped; its arrays are stepData's
}

func newNative(c *CPU) (runner, error) {
	variant := variantNumber(c.opts.Kernels)
	mem, err := c.mem.bytes(int(unsafe.Sizeof(C.tandem_step{})), false)
	if err != nil {
		return nil, err
	}
	s := (*C.tandem_step)(unsafe.Pointer(&mem[0]))
	s.ids, s.positions = ints(c.step.ids), ints(c.step.positions)
	s.row_span, s.output_rows, s.span_rows = ints(c.step.rowSpan), ints(c.step.outputRows), ints(c.step.spanRows)
	s.table_stride = C.int32_t(c.opts.Limits.Blocks)
	if c.opts.FaultBatchOrder {
		s.fault_batch_order = 1
	}
	pool := C.tandem_pool_new(C.int(c.opts.Threads), C.int(variant))
	if pool == nil {
		return nil, fmt.Errorf("%w: %d threads did not start", backend.ErrMemory, c.opts.Threads)
	}
	return &native{pool: pool, step: s}, nil
}

func (n *native) close() { C.tandem_pool_free(n.pool) }

// load packs a matrix into tiles of 16 outputs: fp32 [tile, in, 16] and bf16 [tile,
// in/2, 16, 2], so that one 64-byte line feeds 16 lanes. MXFP4 is [tile, in/32] of 16
// blocks and their exponents, unchanged. The layouts of int8 and int4 are in quant.h,
// that of grids in grid.h, and that of FP8 in fp8.h.
func (n *native) load(c *CPU, w *weight, data []byte) error {
	tiles, size := (w.out+C.TILE-1)/C.TILE, n.size(w)
	if w.dtype == backend.MXFP4 {
		size = tiles * w.in / 32 * C.MXFP4_GROUP
	}
	var scales []float32
	var head C.tandem_fp8
	if w.dtype == backend.FP8 {
		var lanes int
		scales, lanes = tileScales(w.scales, w.out, w.in, C.TILE)
		tileBytes := C.TILE * ((w.in + 1) &^ 1)
		head = C.tandem_fp8{cols: C.int32_t(w.scales.Cols), from: C.int32_t(w.scales.Col), across: C.int32_t(w.scales.Across(w.in)),
			lanes: C.int32_t(lanes), scales: C.int64_t(int(unsafe.Sizeof(head)) + tiles*tileBytes)}
		size = int(head.scales) + 4*len(scales)
	}
	if w.dtype.Quantized() {
		size = w.dtype.MatrixBytes(tiles*C.TILE, w.in)
	}
	if w.dtype == backend.GRID {
		size = int(unsafe.Sizeof(C.tandem_grid{})) + w.grid.MatrixBytes(tiles*C.TILE, w.in)
	}
	m := w.matrix
	if m == nil {
		var err error
		if m, err = c.mem.bytes(size, true); err != nil {
			return err
		}
		w.matrix = m
	}
	if w.dtype == backend.FP8 {
		*(*C.tandem_fp8)(unsafe.Pointer(&m[0])) = head
		copy(f32view(m[head.scales:]), scales)
	}
	if w.dtype == backend.GRID {
		l, at := gridLayoutOf(w.grid, w.in), unsafe.Sizeof(C.tandem_grid{})
		head := C.tandem_grid{kind: C.int32_t(w.grid.Kind), bits: C.int32_t(w.grid.Bits), pairs: C.int32_t(l.pairs), head: C.int32_t(l.head), pair: C.int32_t(l.pair), tile: C.int64_t(l.tile)}
		if w.grid.BFloat {
			head.bfloat = 1
		}
		head.whole, head.factor = C.float(w.grid.Whole), C.float(128*w.grid.Whole) // half of 256
		if w.grid.Divide {
			head.divide, head.factor = 1, C.float(128/w.grid.Whole)
		}
		*(*C.tandem_grid)(unsafe.Pointer(&m[0])) = head
		c.rows.run(&gridPacker{m[at:], w.grid, l, w.out, w.in}, tiles)
		w.grid = nil // C reads only the packed form
		return nil
	}
	// The source may be Go memory, and C memory must not hold pointers to that.
	op := C.tandem_op{kind: C.OP_PACK, n: C.int32_t(w.out), k: C.int32_t(w.in), bf16: elem(w.dtype), from: elem(w.from), w: unsafe.Pointer(&m[0])}
	C.tandem_pack(n.pool, op, unsafe.Pointer(unsafe.SliceData(data)), n.step)
	return nil
}

// size returns the bytes of a packed matrix of F32 or BF16.
func (n *native) size(w *weight) int {
	tiles, depth := (w.out+C.TILE-1)/C.TILE, w.in
	if w.dtype == backend.BF16 {
		depth = (depth + 1) &^ 1
	}
	return tiles * C.TILE * depth * w.dtype.Size()
}

// compile writes the plan as an array that C reads.
func (n *native) compile(c *CPU, p *plan) (unsafe.Pointer, error) {
	if spec := c.kv.spec; c.kv.regions != nil {
		n.step.kv_elem = elem(spec.DType)
		n.step.page_bytes = C.int64_t(spec.PageBytes)
	}
	if len(p.ops) == 0 {
		return nil, nil
	}
	mem, err := c.mem.bytes(len(p.ops)*int(unsafe.Sizeof(C.tandem_op{})), false)
	if err != nil {
		return nil, err
	}
	ops := unsafe.Slice((*C.tandem_op)(unsafe.Pointer(&mem[0])), len(p.ops))
	for i := range ops {
		if err := lower(c, &p.ops[i], &ops[i]); err != nil {
			return nil, err
		}
	}
	return unsafe.Pointer(&mem[0]), nil
}

// lower fills the zeroed C form of an operation.
func lower(c *CPU, o *op, to *C.tandem_op) error {
	to.kind = C.int32_t(o.kind)
	if o.rows == backend.OutputRows {
		to.output_rows = 1
	}
	to.heads, to.kv_heads, to.dim = C.int32_t(o.heads), C.int32_t(o.kvHeads), C.int32_t(o.dim)
	to.cap = C.float(o.cap)
	to.scale, to.window, to.slots = C.float(o.scale), C.int32_t(o.window), C.int32_t(o.slots)
	if o.a != nil {
		to.a, to.k = floats(o.a.data), C.int32_t(o.width(o.a))
		if o.a.q != nil {
			to.q = (*C.uint8_t)(&o.a.q[0])
		}
	}
	to.n = to.k
	if o.b != nil {
		to.b = floats(o.b.data)
	}
	if o.dst != nil {
		to.dst, to.n = floats(o.dst.data), C.int32_t(o.width(o.dst))
	}
	if w := o.w; w != nil {
		to.bf16 = elem(w.dtype)
		if w.in == 0 {
			to.w = unsafe.Pointer(&w.vector[0])
		} else {
			to.w, to.k, to.w_rows = unsafe.Pointer(&w.matrix[0]), C.int32_t(w.in), C.int32_t(w.out)
		}
	}
	if o.bias != nil {
		to.bias = floats(o.bias.vector)
	}
	if o.sinks != nil {
		to.sinks = floats(o.sinks.vector)
	}
	if o.kind == opQuantize {
		to.bf16 = elem(o.form)
		if o.w != nil {
			to.order = ints(o.w.order.inputs)
		}
	}
	to.act, to.from, to.latent = C.int32_t(o.act), C.int32_t(o.from), C.int32_t(o.latent)
	if o.rope != nil {
		to.cs = floats(o.rope.table)
	}
	if o.kind == opStoreKV || o.kind == opAttention {
		g := c.kv.group(o.layer)
		to.kv = (*C.uint8_t)(&c.kv.memory(o.layer)[0])
		to.block_tokens, to.v_at = C.int32_t(g.BlockTokens), C.int64_t(g.half)
		to.slots_kv, to.tables = ints(g.slots), ints(g.tables)
		if s := c.kv.scales; s != nil {
			to.k_scales, to.v_scales = floats(s[o.layer].k256), floats(s[o.layer].v256)
			if g.Latent > 0 { // whose values are a part of its keys
				to.v_scales = to.k_scales
			}
		}
	}
	if o.delta != nil {
		return lowerDelta(c, o, to)
	}
	if o.route != nil {
		return lowerMoE(c, o, to)
	}
	return nil
}

// lowerDelta sets the fields of opDelta.
func lowerDelta(c *CPU, o *op, to *C.tandem_op) error {
	d := o.delta
	to.heads, to.kv_heads, to.dim, to.value_dim = C.int32_t(d.KeyHeads), C.int32_t(d.ValueHeads), C.int32_t(d.KeyDim), C.int32_t(d.ValueDim)
	to.scales, to.alpha = floats(d.decay.vector), floats(d.alpha.data)
	mem, err := c.mem.bytes(d.Parts*int(unsafe.Sizeof(C.tandem_state{})), false)
	if err != nil {
		return err
	}
	states := unsafe.Slice((*C.tandem_state)(unsafe.Pointer(&mem[0])), d.Parts)
	for i := range states {
		g := c.kv.group(o.layer + i)
		states[i] = C.tandem_state{kv: (*C.uint8_t)(&c.kv.memory(o.layer + i)[0]), tables: ints(g.tables)}
		to.block_tokens = C.int32_t(g.BlockTokens)
	}
	to.parts, to.states = C.int32_t(d.Parts), &states[0]
	return nil
}

// lowerMoE sets the fields of the operations of a mixture of experts. A combined row is
// as wide as dst, not as the slots that it is read from.
func lowerMoE(c *CPU, o *op, to *C.tandem_op) error {
	r := o.route
	to.top_k, to.n_experts = C.int32_t(r.topK), C.int32_t(r.experts)
	to.chosen, to.weights = ints(r.ids), floats(r.weights)
	to.slot, to.list, to.count = ints(r.slots), ints(r.list), ints(r.count)
	if o.normalize {
		to.normalize = 1
	}
	if o.scales != nil {
		to.scales = floats(o.scales.vector)
	}
	if s := o.sigmoid; s != nil {
		to.groups, to.keep, to.scale = C.int32_t(s.Groups), C.int32_t(s.Keep), C.float(s.Factor)
	}
	if len(o.experts) == 0 {
		return nil
	}
	mem, err := c.mem.bytes(len(o.experts)*int(unsafe.Sizeof(C.tandem_expert{})), false)
	if err != nil {
		return err
	}
	table := unsafe.Slice((*C.tandem_expert)(unsafe.Pointer(&mem[0])), len(o.experts))
	for i, w := range o.experts {
		table[i] = C.tandem_expert{w: unsafe.Pointer(&w.matrix[0]), bf16: C.int64_t(elem(w.dtype))}
		if o.biases != nil {
			table[i].bias = floats(o.biases[i].vector)
		}
		if w.order != nil {
			table[i].order = ints(w.order.inputs)
		}
	}
	to.experts = &table[0]
	return nil
}

func (n *native) run(c *CPU, p *plan, lo, hi int) {
	n.step.tokens, n.step.outputs, n.step.spans = C.int32_t(c.step.tokens), C.int32_t(c.step.outputs), C.int32_t(c.step.spans)
	first := unsafe.Add(p.native, lo*int(unsafe.Sizeof(C.tandem_op{})))
	C.tandem_run(n.pool, (*C.tandem_op)(first), C.int(hi-lo), n.step)
}

func ints(s []int32) *C.int32_t { return (*C.int32_t)(unsafe.Pointer(&s[0])) }

func floats(s []float32) *C.float { return (*C.float)(unsafe.Pointer(&s[0])) }

// elem returns the number of an element type in kernels.h.
func elem(dt backend.DType) C.int32_t {
	switch dt {
	case backend.BF16:
		return C.ELEM_BF16
	case backend.MXFP4:
		return C.ELEM_MXFP4
	case backend.INT8:
		return C.ELEM_INT8
	case backend.INT4:
		return C.ELEM_INT4
	case backend.FP8:
		return C.ELEM_FP8
	case backend.GRID:
		return C.ELEM_GRID
	}
	return C.ELEM_F32
}
