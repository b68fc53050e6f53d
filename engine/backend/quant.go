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

// QuantizeTo converts a group of weights to codes of a GridPlain, and returns their scale, which is
// a bf16 value. Of some scales it selects the one with the least squared error.
func QuantizeTo(codes []byte, w []float32, bits int) (best float32) {
	middle := float32(int(1) << (bits - 1))
	most, signed := float32(0), float32(0)
	for _, v := range w {
		if size := max(v, -v); size > most {
			most, signed = size, v
		}
	}
	lowest := float32(math.Inf(1))
	for step := range 6 {
		scale := bf16Scale(signed/-middle*(0.9+0.04*float32(step)), false)
		if scale == 0 {
			continue
		}
		sum := float32(0)
		for _, v := range w {
			d := v - float32(scale*roundTo(v/scale, middle))
			sum += float32(d * d)
		}
		if sum < lowest {
			lowest, best = sum, scale
		}
	}
	for i, v := range w {
		codes[i] = byte(middle)
		if best != 0 {
			codes[i] = byte(int(roundTo(v/best, middle) + middle))
		}
	}
	return best
}

// roundTo rounds to an integer from -middle to middle-1.
func roundTo(v, middle float32) float32 {
	return float32(min(max(v, -middle), middle-1)+roundMagic) - roundMagic
}
