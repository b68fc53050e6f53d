package cpu

import (
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Weights and activations as integers, as in quant.h. The layout of a quantized row of
// activations is the same here. That of weights is row-major: [out, in'] numbers, then
// [out, in'/32] scales in bf16, where in' is in rounded up to a whole group.
const (
	quantGroup = 32
	quantPair  = 2 * quantGroup
	amxDepth   = 32 // a row for AMX is padded to a multiple of this
)

// quantRow is the offsets of the parts of a quantized row, in bytes.
type quantRow struct{ scale, less8, less128, less, less32, size int }

func quantLayout(cols int) quantRow {
	pad := (cols + quantPair - 1) / quantPair * quantPair
	each := pad / quantGroup * 4
	return quantRow{pad, pad + each, pad + 2*each, pad + 3*each, pad + 4*each, (pad + 6*each + 63) / 64 * 64}
}

// quantForm is the content of a buffer's q: rows of so many slots, as 8-bit integers or, for AMX,
// bf16.
type quantForm struct {
	dtype  backend.DType // INT8 or BF16; 0: nothing
	slots  int
	orders string // of the inputs of each slot's matrix; empty: as they are in the row
}

// inputOrder is the order of a grid's inputs. Matrices with equal ones share it, so that a row is
// rounded in that order once for all their products.
type inputOrder struct {
	id     int
	inputs []int32 // mapped
}

// inputOrder returns the order of so many inputs.
func (c *CPU) inputOrder(inputs []int32) (*inputOrder, error) {
	for _, have := range c.orders {
		if slices.Equal(have.inputs, inputs) {
			return have, nil
		}
	}
	mapped, err := c.mem.ints(len(inputs))
	if err != nil {
		return nil, err
	}
	copy(mapped, inputs)
	o := &inputOrder{len(c.orders) + 1, mapped}
	c.orders = append(c.orders, o)
	return o, nil
}

// ordersOf names the orders of matrices' inputs; empty: none has one.
func ordersOf(all []*weight) string {
	ids, any := make([]int, len(all)), false
	for i, w := range all {
		if w.order != nil {
			ids[i], any = w.order.id, true
		}
	}
	if !any {
		return ""
	}
	return fmt.Sprint(ids)
}

// formFor returns the form of q that a product with w reads, or 0 if it reads the row itself.
func (c *CPU) formFor(w *weight) backend.DType {
	switch {
	case w.dtype.Quantized() || w.dtype == backend.GRID:
		return backend.INT8
	case c.opts.Kernels == AMX && (w.dtype == backend.BF16 || w.dtype == backend.MXFP4 || w.dtype == backend.FP8):
		return backend.BF16
	}
	return 0
}

// quantizeFor records the conversion of a's rows to the form that products with all
// matrices read, unless q is current. A row has slots parts of equal width, which r, if set,
// assigns to the matrices.
func (c *CPU) quantizeFor(all []*weight, a *buffer, slots int, r *routing) {
	p, form := c.plan(), quantForm{c.formFor(all[0]), slots, ordersOf(all)}
	if form.dtype == 0 || p.quantized[a] == form {
		return
	}
	cols := a.cols / slots
	bytes := quantLayout(cols).size
	if form.dtype == backend.BF16 {
		bytes = (cols + amxDepth - 1) / amxDepth * amxDepth * 2
	}
	if rows := c.limit(a.rows) * slots; len(a.q) < rows*bytes {
		q, err := c.mem.bytes(rows*bytes, false)
		need(err == nil, "quantized rows of %d columns: %v", a.cols, err)
		a.q = q
	}
	o := op{kind: opQuantize, rows: a.rows, a: a, form: form.dtype}
	if slots > 1 {
		o.slots = slots
	}
	if form.orders != "" {
		if o.w = all[0]; r != nil {
			o.w, o.experts, o.route = nil, all, r
		}
	}
	c.record(o)
	p.quantized[a] = form
}

// ordered returns row i of an opQuantize in the order that its product reads, perhaps in memory.
func (o *op) ordered(i int, x, memory []float32) []float32 {
	w := o.w
	if o.route != nil {
		w = o.experts[o.route.expertOf(i)]
	}
	if w == nil || w.order == nil {
		return x
	}
	memory = memory[:len(x)]
	for k, input := range w.order.inputs {
		memory[k] = x[input]
	}
	return memory
}

// quantize writes a row x exactly as quant.h's quantize does.
func quantize(dst []byte, x []float32) {
	at := quantLayout(len(x))
	scales, less8, less128 := f32view(dst[at.scale:at.less8]), i32view(dst[at.less8:at.less128]), i32view(dst[at.less128:at.less])
	less, less32 := f32view(dst[at.less:at.less32]), i32view(dst[at.less32:])
	for g := range scales {
		group := x[min(g*quantGroup, len(x)):min((g+1)*quantGroup, len(x))]
		most, sums := float32(0), [2]int32{}
		for _, v := range group {
			most = max(most, v, -v)
		}
		scales[g] = 0
		up := float32(0)
		if most > 1e-30 {
			scales[g], up = most/127, 127/most
		}
		q := dst[g*quantGroup : (g+1)*quantGroup]
		clear(q)
		for i, v := range group {
			q[i] = backend.RoundBits(float32(v * up))
			sums[i/(quantGroup/2)] += int32(int8(q[i]))
		}
		sum := sums[0] + sums[1]
		less8[g], less128[g], less[g] = -8*sum, -128*sum, -scales[g]*float32(sum)
		less32[2*g], less32[2*g+1] = -32*sums[0], -32*sums[1]
	}
}

// loadQuantized quantizes a matrix to 8 or 4 bits, with one byte per weight in both cases.
func (p *portable) loadQuantized(c *CPU, w *weight, data []byte) error {
	pad := quantLayout(w.in).scale
	groups := pad / quantGroup
	m, err := c.mem.bytes(w.out*(pad+groups*2), true)
	if err != nil {
		return err
	}
	scales := u16view(m[w.out*pad:])
	row := make([]float32, w.in)
	for n := range w.out {
		size := w.in * w.from.Size()
		decode(row, data[n*size:(n+1)*size], w.from)
		for g := range groups {
			group := row[min(g*quantGroup, w.in):min((g+1)*quantGroup, w.in)]
			scale := backend.QuantizeGroup(m[n*pad+g*quantGroup:], group, w.dtype)
			scales[n*groups+g] = uint16(math.Float32bits(scale) >> 16)
		}
	}
	w.matrix = m
	return nil
}

// quantizedRow returns one output's numbers and scales.
func (w *weight) quantizedRow(row int) (q []byte, scales []uint16) {
	pad := quantLayout(w.in).scale
	groups := pad / quantGroup
	return w.matrix[row*pad : (row+1)*pad], u16view(w.matrix[w.out*pad:])[row*groups : (row+1)*groups]
}

// decodeQuantized is decodeRow for 8 and 4 bits.
func (w *weight) decodeQuantized(dst []float32, row int) {
	q, scales := w.quantizedRow(row)
	for i := range dst {
		dst[i] = fromBF16(scales[i/quantGroup]) * float32(int8(q[i]))
	}
}

// linearQuantized is linear for 8 and 4 bits.
func (p *portable) linearQuantized(m, bias *weight, first, live, lo int) {
	if m.dtype == backend.GRID {
		p.linearGrid(m, bias, first, live, lo)
		return
	}
	o, at := p.op, quantLayout(m.in)
	for n := lo; n < min(lo+linearRows, m.out); n++ {
		q, scales := m.quantizedRow(n)
		for r := first; r < first+live; r++ {
			x := o.a.q[r*at.size : (r+1)*at.size]
			half := len(scales)
			if p.c.opts.FaultBatchOrder && live > 1 {
				half /= 2
			}
			y := float32(dotQuantized(q, scales[:half], x, f32view(x[at.scale:at.less8])))
			if half < len(scales) {
				y += float32(dotQuantized(q[half*quantGroup:], scales[half:], x[half*quantGroup:], f32view(x[at.scale:at.less8])[half:]))
			}
			if bias != nil {
				y += bias.vector[n]
			}
			o.dst.data[r*m.out+n] = y
		}
	}
}

// dotQuantized multiplies as many groups as w has scales.
func dotQuantized(w []byte, scales []uint16, x []byte, xs []float32) (sum float64) {
	for g, scale := range scales {
		whole := int32(0)
		ws, qs := w[g*quantGroup:(g+1)*quantGroup], x[g*quantGroup:(g+1)*quantGroup]
		for i, v := range ws {
			whole += int32(int8(v)) * int32(int8(qs[i]))
		}
		sum += float64(whole) * float64(fromBF16(scale)*xs[g])
	}
	return sum
}

func i32view(b []byte) []int32 {
	return unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}
