package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"sync"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Matrices of 8 and 4 bits in the layout of the kernels, which cuda/api.h describes.

const (
	fp8Fill   = 16 // rows of FP8 are padded to a multiple of it
	groupFill = 64 // rows of INT8 and INT4 are padded to a multiple of it
	leastCols = 16 // least columns of FP8 that share a scale
	allOfThem = 30 // exponent of a power of two above any number of rows or columns
)

var quantized = map[backend.DType]int32{backend.INT8: typeINT8, backend.INT4: typeINT4}

// FP8Blocks reports whether blocks of rows × cols stay FP8 on the device, also in matrices
// that are transposed or begin at a multiple of 16 of either. 0 means all.
func FP8Blocks(rows, cols int) bool { return rows%leastCols == 0 && cols%leastCols == 0 }

// shareScales checks an FP8 matrix and returns how many rows and columns share a scale in
// the kernels: powers of two that divide every block evenly. If that leaves fewer columns
// than the kernels need, Load converts the matrix to bf16.
func shareScales(t *backend.Tensor) (scales, error) {
	if len(t.Shape) != 2 || !t.Scales.Fit(t.Shape[0], t.Shape[1]) || len(t.Data) != t.Shape[0]*t.Shape[1] {
		return scales{}, fmt.Errorf("%w: tensor %s %s %v of %d bytes and its scales", backend.ErrShape, t.Name, t.DType, t.Shape, len(t.Data))
	}
	if !t.Finite() {
		return scales{}, fmt.Errorf("tensor %s: fp8 with a value or a scale that is not finite", t.Name)
	}
	out, in, s := t.Shape[0], t.Shape[1], t.Scales
	shared := scales{powerOfTwo(s.Rows, s.Row, out), powerOfTwo(s.Cols, s.Col, in)}
	if 1<<shared.cols < leastCols {
		*t = t.Expand(backend.BF16)
		return scales{}, nil
	}
	return shared, nil
}

// powerOfTwo returns the exponent of the largest power of two that divides blocks of the
// given size, of which the first lacks before elements.
func powerOfTwo(block, before, all int) int32 {
	if before+all <= block {
		return allOfThem
	}
	n := int32(0)
	for ; (block|before)>>n&1 == 0; n++ {
	}
	return n
}

// packFP8 pads the rows and appends the scales.
func packFP8(t *backend.Tensor, s scales) []byte {
	out, in := t.Shape[0], t.Shape[1]
	length := (in + fp8Fill - 1) / fp8Fill * fp8Fill
	down, across := (out-1)>>s.rows+1, (in-1)>>s.cols+1
	m := make([]byte, out*length, out*length+down*across*4)
	for i := range out {
		copy(m[i*length:], t.Data[i*in:(i+1)*in])
	}
	for i := range down {
		row := t.Scales.Of(i<<s.rows, in)
		for j := range across {
			m = binary.LittleEndian.AppendUint32(m, math.Float32bits(row[(t.Scales.Col+j<<s.cols)/t.Scales.Cols]))
		}
	}
	return m
}

// oneType converts the matrices of a list to bf16 if one of them was converted at load.
// Heads may be parts of one matrix, and block edges may cut one head and not the next.
func (c *CUDA) oneType(ids []backend.Weight) error {
	wide := false
	for _, id := range ids {
		wide = wide || c.weight(id).dtype == typeBF16
	}
	for _, id := range ids {
		if w := c.weight(id); wide && w.dtype == typeFP8 {
			if err := c.widenFP8(w); err != nil {
				return err
			}
		}
	}
	return nil
}

// widenFP8 converts an FP8 matrix on the device to bf16.
func (c *CUDA) widenFP8(w *weight) error {
	length := (w.in + fp8Fill - 1) / fp8Fill * fp8Fill
	t := backend.Tensor{Name: w.name, DType: backend.FP8, Shape: []int{w.out, w.in}, Scales: &backend.Scales{Rows: 1 << w.scales.rows, Cols: 1 << w.scales.cols}}
	values := ((w.out-1)>>w.scales.rows + 1) * t.Scales.Across(w.in)
	m := make([]byte, w.out*length+4*values)
	if !c.dev.download(m, w.data) {
		return c.failed("reading " + w.name)
	}
	for i := range w.out {
		t.Data = append(t.Data, m[i*length:][:w.in]...)
	}
	t.Scales.Values = make([]float32, values)
	floats(t.Scales.Values, m[w.out*length:], backend.F32)
	a, err := c.put(t.Expand(backend.BF16).Data, "tensor "+w.name)
	if err == nil {
		w.data, w.dtype, w.scales = a, typeBF16, scales{}
	}
	return err
}

// quantize converts an F32 or BF16 matrix to Tensor.As, with all processors.
func quantize(t *backend.Tensor) []byte {
	out, in := t.Shape[0], t.Shape[1]
	m := make([]byte, t.As.MatrixBytes(out, in))
	parts := min(runtime.GOMAXPROCS(0), out)
	var all sync.WaitGroup
	for p := range parts {
		all.Go(func() { quantizeRows(m, t, out*p/parts, out*(p+1)/parts) })
	}
	all.Wait()
	return m
}

func quantizeRows(m []byte, t *backend.Tensor, from, to int) {
	out, in, size := t.Shape[0], t.Shape[1], t.DType.Size()
	length := (in + groupFill - 1) / groupFill * groupFill
	bytes := length
	if t.As == backend.INT4 {
		bytes /= 2
	}
	numbers, scales := m[:out*bytes], m[out*bytes:]
	row, q := make([]float32, in), make([]byte, length)
	for i := from; i < to; i++ {
		floats(row, t.Data[i*in*size:(i+1)*in*size], t.DType)
		for g := range length / backend.QuantGroup {
			at := g * backend.QuantGroup
			scale := backend.QuantizeGroup(q[at:], row[min(at, in):min(at+backend.QuantGroup, in)], t.As)
			binary.LittleEndian.PutUint16(scales[2*(i*length/backend.QuantGroup+g):], uint16(math.Float32bits(scale)>>16))
		}
		if to := numbers[i*bytes : (i+1)*bytes]; t.As == backend.INT4 {
			packFours(to, q)
		} else {
			copy(to, q)
		}
	}
}

// packFours packs eight numbers of 4 bits, with an offset of 8, into a word.
func packFours(dst, q []byte) {
	for at := 0; at < len(q); at += 8 {
		var word uint32
		for i, v := range q[at : at+8] {
			word |= uint32(v+8) & 15 << (i/2*4 + i%2*16)
		}
		binary.LittleEndian.PutUint32(dst[at/2:], word)
	}
}

// floats converts F32 or BF16 numbers.
func floats(dst []float32, data []byte, from backend.DType) {
	for i := range dst {
		if from == backend.BF16 {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[2*i:])) << 16)
		} else {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
	}
}
