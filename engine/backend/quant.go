package backend

import "math"

// QuantGroup is how many inputs of a matrix of INT8 or INT4 share a scale.
const QuantGroup = 32

// roundMagic is 1.5·2^23: a small number added to it is rounded to a whole one,
// which its low bits then are.
const roundMagic = 12582912

// RoundBits rounds to a whole number of at most 8 bits.
func RoundBits(f float32) byte { return byte(math.Float32bits(f + roundMagic)) }

// bf16Scale rounds a scale to bf16, away from zero when up, so that nothing is
// cut off; it is 0 where it would be of no use.
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

// QuantizeGroup turns a group of weights into numbers of INT8 or INT4, a byte each,
// and gives their scale, which bf16 holds. Every backend makes them so.
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
