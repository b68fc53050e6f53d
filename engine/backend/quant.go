package backend

import "math"

// QuantGroup is the number of inputs of an INT8 or INT4 matrix that share a scale.
const QuantGroup = 32

// roundMagic is 1.5·2^23: adding it rounds a small number to an integer, which is then
// in the low bits.
const roundMagic = 12582912

// RoundBits rounds to an integer of at most 8 bits.
func RoundBits(f float32) byte { return byte(math.Float32bits(f + roundMagic)) }

// bf16Scale rounds a scale to bf16, away from zero if up is set, so that no weight is
// cut off. It returns 0 for scales that are too small to be of use.
func bf16Scale(f float32, up bool) float32 {
	u := math.Float32bits(f)
	if up {
		u += 0xffff
	} else {
		u += 0x7fff + u>>16&1
	}
	if f = math.Float32frombits(u &^ 0xffff); f > 1e-35 || f < -1e-35 {
		return f
	}
	return 0
}

// QuantizeGroup converts a group of weights to INT8 or INT4 numbers, one byte each, and
// returns their scale, which is a bf16 value. All backends use it.
func QuantizeGroup(dst []byte, w []float32, as DType) (scale float32) {
	most, signed := float32(0), float32(0)
	for _, v := range w {
		if size := max(v, -v); size > most {
			most, signed = size, v
		}
	}
	least, greatest := float32(-127), float32(127)
	if as == INT4 {
		least, greatest = -8, 7
		scale = bf16Scale(signed/-8, false)
	} else {
		scale = bf16Scale(most/127, true)
	}
	up := float32(0)
	if scale != 0 {
		up = 1 / scale
	}
	for i, v := range w {
		dst[i] = RoundBits(min(max(float32(v*up), least), greatest))
	}
	return scale
}
