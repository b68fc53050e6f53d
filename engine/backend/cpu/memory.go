package cpu

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

// memory owns the anonymous mappings of one backend. They are outside the Go heap:
// the collector neither scans nor moves them, C may keep their addresses, and a page
// takes no memory before it is touched.
type memory struct {
	maps [][]byte
	rest []byte // of the last mapping that hot parts share
}

// pageBytes is the alignment of bytes.
const pageBytes = 4096

// bytes returns n zeroed bytes, aligned to a page. hot requests huge pages, which avoid
// most TLB misses of a streaming read. A matrix may be smaller than a huge page, so that hot
// parts share mappings of hotBytes.
func (m *memory) bytes(n int, hot bool) ([]byte, error) {
	if n <= 0 {
		return nil, fmt.Errorf("%w: mapping of %d bytes", backend.ErrShape, n)
	}
	if !hot || n >= hotBytes {
		return m.mapping(n, hot)
	}
	whole := (n + pageBytes - 1) / pageBytes * pageBytes
	if len(m.rest) < whole {
		b, err := m.mapping(hotBytes, true)
		if err != nil {
			return nil, err
		}
		m.rest = b
	}
	b := m.rest[:n:n]
	m.rest = m.rest[whole:]
	return b, nil
}

// mapping maps n bytes.
func (m *memory) mapping(n int, hot bool) ([]byte, error) {
	b, err := mapBytes(n)
	if err != nil {
		return nil, fmt.Errorf("%w: mapping of %d bytes: %v", backend.ErrMemory, n, err)
	}
	if hot {
		adviseHuge(b)
	}
	m.maps = append(m.maps, b)
	return b, nil
}

func (m *memory) floats(n int) ([]float32, error) {
	b, err := m.bytes(n*4, false)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n), nil
}

func (m *memory) ints(n int) ([]int32, error) {
	b, err := m.bytes(n*4, false)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&b[0])), n), nil
}

func (m *memory) free() error {
	var errs []error
	for _, b := range m.maps {
		errs = append(errs, unmapBytes(b))
	}
	m.maps, m.rest = nil, nil
	return errors.Join(errs...)
}

// f32view returns bytes as elements; so does u16view. Checkpoints need not align their
// tensors, and the processors that Tandem builds for load unaligned words.
func f32view(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

func u16view(b []byte) []uint16 {
	return unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/2)
}

// decodeRow converts one row of a row-major matrix to float32.
func (w *weight) decodeRow(dst []float32, row int) {
	if w.dtype.Quantized() {
		w.decodeQuantized(dst, row)
		return
	}
	if w.dtype == backend.GRID {
		r := w.grid.NewRow(w.in)
		w.grid.Row(r, row)
		w.grid.Weights(dst, r)
		return
	}
	if w.dtype == backend.FP8 {
		t := backend.Tensor{Shape: []int{w.out, w.in}, Data: w.matrix, Scales: w.scales}
		t.Row(dst, row)
		return
	}
	if w.dtype != backend.MXFP4 {
		size := w.in * w.dtype.Size()
		decode(dst, w.matrix[row*size:(row+1)*size], w.dtype)
		return
	}
	blocks := w.matrix[row*w.in/2:]
	scales := w.matrix[w.out*w.in/2+row*w.in/32:]
	for i := range dst {
		code := blocks[i/2] >> (4 * (i % 2)) & 15
		dst[i] = float32(math.Ldexp(float64(backend.E2M1[code]), int(scales[i/32])-127))
	}
}

// decode converts len(dst) elements to float32.
func decode(dst []float32, src []byte, dt backend.DType) {
	if dt == backend.F32 {
		copy(dst, f32view(src))
		return
	}
	for i, v := range u16view(src)[:len(dst)] {
		dst[i] = fromBF16(v)
	}
}

func fromBF16(v uint16) float32 { return math.Float32frombits(uint32(v) << 16) }

// toBF16 rounds to nearest even. A NaN stays a NaN.
func toBF16(f float32) uint16 {
	u := math.Float32bits(f)
	if u&0x7fffffff > 0x7f800000 {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}
