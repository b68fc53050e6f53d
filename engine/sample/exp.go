package sample

import "math"

// weightFloor is the exponent under which a token's weight is taken as zero.
// e^-60 is 9e-27 of the best token's weight: a whole vocabulary of them stays
// far below the resolution of the 53-bit draw.
const weightFloor = -60

const (
	stepsPerLn2 = 46.16624130844683      // 32 / ln 2
	stepHi      = 0.02166084938653512    // ln 2 / 32, upper bits: k*stepHi is exact here
	stepLo      = 5.9631716539705866e-12 // the rest
)

// exp2Table is 2^(j/32), rounded once.
var exp2Table = [32]float64{
	1.0, 1.0218971486541166, 1.0442737824274138, 1.0671404006768237,
	1.0905077326652577, 1.1143867425958924, 1.1387886347566916, 1.1637248587775775,
	1.189207115002721, 1.215247359980469, 1.241857812073484, 1.2690509571917332,
	1.2968395546510096, 1.3252366431597413, 1.3542555469368927, 1.383909881963832,
	1.4142135623730951, 1.4451808069770467, 1.4768261459394993, 1.5091644275934228,
	1.5422108254079407, 1.5759808451078865, 1.6104903319492543, 1.645755478153965,
	1.681792830507429, 1.718619298122478, 1.7562521603732995, 1.7947090750031072,
	1.8340080864093424, 1.8741676341103, 1.9152065613971474, 1.9571441241754002,
}

// expWeight is e^x for x <= 0: a table of 32 steps and a polynomial between
// them. Package math picks its code by CPU, and the compiler may fuse a
// multiplication with an addition; either would let two machines with equal
// logits draw unequal tokens. Here every product is rounded by itself, so the
// bits are the same everywhere. The relative error is below 1e-14.
func expWeight(x float64) float64 {
	if !(x >= weightFloor) { // also NaN
		return 0
	}
	k := int64(float64(x*stepsPerLn2) - 0.5) // nearest, as x <= 0
	f := float64(k)
	r := (x - float64(f*stepHi)) - float64(f*stepLo) // |r| <= ln(2)/64
	p := float64(r*(1.0/120)) + 1.0/24
	p = float64(p*r) + 1.0/6
	p = float64(p*r) + 0.5
	p = float64(p*r) + 1
	p = float64(p*r) + 1
	power := math.Float64frombits(uint64(1023+k>>5) << 52) // a normal number
	return float64(p*exp2Table[k&31]) * power
}
