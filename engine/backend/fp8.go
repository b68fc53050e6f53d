package backend

import (
	"bytes"
	"encoding/binary"
	"math"
)

// Scales are the factors of an FP8 matrix, one for each block of rows and columns. The
// matrix may be a part of a larger one, so that its first block may be incomplete.
type Scales struct {
	Values     []float32 // [blocks down, blocks across]
	Rows, Cols int       // of a block
	Row, Col   int       // rows and columns of the first block that are before the matrix
}

// Across returns the number of blocks in a row of in inputs.
func (s *Scales) Across(in int) int { return (s.Col+in-1)/s.Cols + 1 }

// Of returns the factors of a row, one per block.
func (s *Scales) Of(row, in int) []float32 {
	across, at := s.Across(in), (s.Row+row)/s.Rows
	return s.Values[at*across : (at+1)*across]
}

// Fit reports whether the scales are those of a matrix [out, in].
func (s *Scales) Fit(out, in int) bool {
	return s != nil && out > 0 && in > 0 && s.Rows > 0 && s.Cols > 0 && s.Row >= 0 && s.Row < s.Rows && s.Col >= 0 && s.Col < s.Cols &&
		len(s.Values) == ((s.Row+out-1)/s.Rows+1)*s.Across(in)
}

// E4M3 has the values of FP8's bytes: no infinity, and one NaN of either sign.
var E4M3 = func() (t [256]float32) {
	for i := range t {
		exponent, mantissa := i>>3&15, float64(i&7)
		v := math.Ldexp(mantissa, -9)
		if exponent > 0 {
			v = math.Ldexp(8+mantissa, exponent-10)
		}
		t[i] = float32(math.Copysign(v, float64(127-i)))
	}
	t[0x7f], t[0xff] = float32(math.NaN()), float32(math.NaN())
	return t
}()

// ToE4M3 returns the FP8 byte of the value nearest to f, of two the even one. Values beyond ±448
// become that, and a NaN stays one.
func ToE4M3(f float32) byte {
	u := math.Float32bits(f)
	sign := byte(u >> 24 & 0x80)
	u = min(u&0x7fffffff, math.Float32bits(float32(math.Inf(1)))+1)
	switch {
	case u > 0x7f800000:
		return sign | 0x7f
	case u < 0x3c800000: // below 2^-6 in steps of 2^-9, as is a float from 2^14 on
		return sign | byte(math.Float32bits(math.Float32frombits(u)+0x1p14)-0x46800000)
	}
	u = min(u, 0x43e00000) // 448
	u += 0x7ffff + u>>20&1
	return sign | byte(u>>20-120<<3)
}

// Finite reports whether an FP8 matrix and its scales hold only finite numbers.
// Backends compute with nothing else.
func (t *Tensor) Finite() bool {
	for _, v := range t.Scales.Values {
		if v-v != 0 {
			return false
		}
	}
	return bytes.IndexByte(t.Data, 0x7f) < 0 && bytes.IndexByte(t.Data, 0xff) < 0
}

// Row writes row i of an FP8 matrix to dst, multiplied by its scales.
func (t *Tensor) Row(dst []float32, i int) {
	in, s := t.Shape[1], t.Scales
	data, scales := t.Data[i*in:(i+1)*in], s.Of(i, in)
	for b, scale := range scales {
		from, to := max(0, b*s.Cols-s.Col), min(in, (b+1)*s.Cols-s.Col)
		for j, v := range data[from:to] {
			dst[from+j] = E4M3[v] * scale
		}
	}
}

// Expand returns an FP8 matrix as F32, or as BF16 rounded to nearest even.
func (t *Tensor) Expand(to DType) Tensor {
	wide := *t
	out, in := t.Shape[0], t.Shape[1]
	wide.DType, wide.Scales, wide.Data = to, nil, make([]byte, 0, out*in*to.Size())
	row := make([]float32, in)
	for i := range out {
		t.Row(row, i)
		for _, v := range row {
			u := math.Float32bits(v)
			if to == BF16 {
				wide.Data = binary.LittleEndian.AppendUint16(wide.Data, uint16((u+0x7fff+u>>16&1)>>16))
			} else {
				wide.Data = binary.LittleEndian.AppendUint32(wide.Data, u)
			}
		}
	}
	return wide
}
