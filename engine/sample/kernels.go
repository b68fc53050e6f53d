package sample

import "math"

// Constants of the definition. A change of one of them changes samples, so that
// KernelVersion of both backends must change with it.
const (
	// Block is the number of tokens per partial sum of weights.
	Block = 512

	// lanes is the number of partial sums of a block: lane j adds the weights of
	// tokens j, j+16, j+32, … of the block in that order.
	lanes = 16

	// weightFloor is the binary exponent below which a weight is zero. All weights
	// are normal numbers, and a whole vocabulary of weights of 2^-90 is far below
	// the resolution of the 53-bit draw.
	weightFloor = -90

	// log2e converts from e^x to 2^x.
	log2e = 1.4426950408889634

	// roundHalf added to a number between -2^22 and 2^22 rounds it to the nearest
	// integer, ties to even, and leaves that integer in the low bits.
	roundHalf = 12582912 // 1.5 * 2^23
)

// Coefficients of 2^f = 1 + f*(exp2c1 + f*(exp2c2 + …)) on [-1/2, 1/2]:
// interpolation of (2^f-1)/f at the six Chebyshev nodes, each rounded to float32.
const (
	exp2c1 float32 = 0.6931471880262288
	exp2c2 float32 = 0.24022650760568087
	exp2c3 float32 = 0.05550357114219124
	exp2c4 float32 = 0.009618082557285924
	exp2c5 float32 = 0.001339086336464892
	exp2c6 float32 = 0.0001545316294214853
)

// Weighing defines how logits become weights: 2^((logit - Max) * Scale). The weight is
// zero for logits below Lowest, for weights below MinP and for NaN.
type Weighing struct {
	Max    float32 // largest logit, finite
	Scale  float32 // log2(e) / temperature, finite and not negative
	Lowest float32
	MinP   float32
}

// weight returns the weight of one logit. Every operation rounds to float32 by
// itself: the conversions keep the compiler from fusing a product with a sum.
func (w *Weighing) weight(logit float32) float32 {
	x := float32((logit - w.Max) * w.Scale)
	if !(x >= weightFloor) || !(logit >= w.Lowest) { // also NaN
		return 0
	}
	t := x + roundHalf
	f := x - (t - roundHalf) // exact
	p := float32(exp2c6*f) + exp2c5
	p = float32(p*f) + exp2c4
	p = float32(p*f) + exp2c3
	p = float32(p*f) + exp2c2
	p = float32(p*f) + exp2c1
	p = float32(p*f) + 1
	p = math.Float32frombits(math.Float32bits(p) + math.Float32bits(t)<<23) // times 2^round(x)
	if !(p >= w.MinP) {
		return 0
	}
	return p
}

// Kernels are the loops over whole rows of logits and weights. Implementations
// return the bits of Portable. They are safe for concurrent use.
type Kernels interface {
	// Argmax returns the index of the largest logit, the lowest of several. It
	// ignores NaN, and returns 0 if no logit is above -Inf.
	Argmax(logits []float32) int32
	// Weigh writes the sum of the weights of each block of logits to sums, and the
	// weights themselves to weights unless that is nil.
	Weigh(weights []float32, sums []float64, logits []float32, by *Weighing)
	// Mass writes to sums the sum of each block's weights that are at least least.
	Mass(sums []float64, weights []float32, least float32)
	// Between copies the weights in [least, limit) to dst, in order, and returns
	// their number. It writes to counts their number in each block, and to above the
	// sum of each block's weights that are at least limit, unless these are nil. dst
	// may be weights.
	Between(dst []float32, counts []int32, above []float64, weights []float32, least, limit float32) int
	// Above returns the first index from from on whose value is larger than x, or
	// len(values).
	Above(values []float32, from int, x float32) int
	// Count returns how many values are larger than x.
	Count(values []float32, x float32) int
}

// Portable implements Kernels in Go. It is the definition of their results.
type Portable struct{}

// Argmax implements Kernels.
func (Portable) Argmax(logits []float32) int32 {
	best, at := lowest, 0
	for i, v := range logits {
		if v > best { // never for NaN
			best, at = v, i
		}
	}
	return int32(at)
}

// Weigh implements Kernels.
func (Portable) Weigh(weights []float32, sums []float64, logits []float32, by *Weighing) {
	w := *by
	for b := range sums {
		block := logits[b*Block : min(len(logits), (b+1)*Block)]
		var sum [lanes]float64
		for i, v := range block {
			p := w.weight(v)
			if weights != nil {
				weights[b*Block+i] = p
			}
			sum[i%lanes] += float64(p)
		}
		sums[b] = join(&sum)
	}
}

// join adds the lanes of a block: the upper half to the lower one, four times.
func join(sum *[lanes]float64) float64 {
	for half := lanes / 2; half > 0; half /= 2 {
		for i := range half {
			sum[i] += sum[i+half]
		}
	}
	return sum[0]
}

// Mass implements Kernels.
func (Portable) Mass(sums []float64, weights []float32, least float32) {
	for b := range sums {
		var sum [lanes]float64
		for i, w := range weights[b*Block : min(len(weights), (b+1)*Block)] {
			if w >= least {
				sum[i%lanes] += float64(w)
			}
		}
		sums[b] = join(&sum)
	}
}

// Between implements Kernels.
func (p Portable) Between(dst []float32, counts []int32, above []float64, weights []float32, least, limit float32) int {
	if above != nil {
		p.Mass(above, weights, limit)
	}
	clear(counts)
	n := 0
	for i, w := range weights {
		if w >= least && w < limit {
			dst[n] = w
			n++
			if counts != nil {
				counts[i/Block]++
			}
		}
	}
	return n
}

// Above implements Kernels.
func (Portable) Above(values []float32, from int, x float32) int {
	for i, v := range values[from:] {
		if v > x {
			return from + i
		}
	}
	return len(values)
}

// Count implements Kernels.
func (Portable) Count(values []float32, x float32) int {
	n := 0
	for _, v := range values {
		if v > x {
			n++
		}
	}
	return n
}

// blocks returns the number of blocks of n tokens.
func blocks(n int) int { return (n + Block - 1) / Block }

// inOrder returns the sum of the blocks' sums, added from the first to the last.
func inOrder(sums []float64) float64 {
	total := 0.0
	for _, s := range sums {
		total += s
	}
	return total
}
