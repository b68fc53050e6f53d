package sample

import (
	"math"
	"math/bits"
)

// one is the bits of the best token's weight, the largest there is.
var one = math.Float32bits(1)

// topP keeps the smallest set of largest weights of s whose sum is at least target:
// those above a threshold, and of those equal to the threshold as many as are needed,
// lower ids first. It sets the other weights equal to the threshold to zero, stores the
// blocks' sums of the kept weights in s.sums, and returns the threshold.
//
// The threshold is the largest number t for which the weights that are at least t sum
// up to target or more: by blocks, and the blocks in order. Rounding is monotone, so
// that the sum never grows with t. So there is one such t, whatever the order of the
// search.
func (s *Scratch) topP(k Kernels, target float64) float32 {
	threshold, above, ties := s.search(k, target, s.guess(k, target))
	if stay := math.Ceil((target - above) / float64(threshold)); stay < float64(ties) {
		s.dropTies(threshold, int(stay))
		k.Mass(s.sums, s.weights, threshold)
	}
	return threshold
}

// search returns the threshold, the sum of the weights above it and how many are equal
// to it. It stores the blocks' sums of the weights that are at least the threshold in
// s.sums. It tries the number with the bits probe first.
func (s *Scratch) search(k Kernels, target float64, probe uint32) (threshold float32, above float64, ties int) {
	low, high := uint32(0), one+1 // bits: the sum reaches target at thresholds up to low, not from high on
	for ; ; probe = low + (high-low)/2 {
		threshold = math.Float32frombits(probe)
		ties = s.split(k, threshold)
		if inOrder(s.sums) < target {
			high = probe
			continue
		}
		if above = inOrder(s.others); above < target {
			return threshold, above, ties
		}
		low = probe + 1
	}
}

// exact is the number from which on sums of weights are exact in float64, in any order.
// Such weights are multiples of 2^-43, and a block's weights add up to at most 512.
const exact = 0x1p-20

// split stores the blocks' sums of the weights that are at least w in s.sums, and those of
// the weights above it in s.others. It returns how many are equal to it.
func (s *Scratch) split(k Kernels, w float32) (ties int) {
	s.others = grow(s.others, len(s.sums))
	if n := &s.near; w < exact || math.Float32bits(w) < n.low || math.Float32bits(w) >= n.high {
		k.Mass(s.sums, s.weights, w)
		k.Mass(s.others, s.weights, math.Nextafter32(w, 2))
		return k.Count(s.weights, math.Nextafter32(w, lowest)) - k.Count(s.weights, w)
	}
	rest, edge := s.near.weights, math.Float32bits(w)
	for b, above := range s.near.above {
		equal := 0
		block := rest[:s.near.counts[b]]
		rest = rest[len(block):]
		for _, v := range block { // without branches, because they would be mispredicted
			v := math.Float32bits(v)
			larger := uint32(int32(edge-v) >> 31)
			above += float64(math.Float32frombits(v & larger))
			equal += int(((v ^ edge) - 1) >> 31)
		}
		s.others[b], s.sums[b] = above, above+float64(equal)*float64(w)
		ties += equal
	}
	return ties
}

// dropTies sets all weights equal to w to zero except the first stay of them.
func (s *Scratch) dropTies(w float32, stay int) {
	for i, v := range s.weights {
		if v != w {
			continue
		}
		if stay > 0 {
			stay--
		} else {
			s.weights[i] = 0
		}
	}
}

// near holds the weights whose bits are in [low, high), in order. For each block it has
// their number and the sum of the weights from high on.
type near struct {
	low, high uint32
	weights   []float32
	counts    []int32
	above     []float64
}

// fillNear fills s.near.
func (s *Scratch) fillNear(k Kernels, low, high uint32) {
	n := &s.near
	n.low, n.high = low, high
	n.weights, n.counts, n.above = grow(n.weights, len(s.weights)), grow(n.counts, len(s.sums)), grow(n.above, len(s.sums))
	n.weights = n.weights[:k.Between(n.weights, n.counts, n.above, s.weights, math.Float32frombits(low), math.Float32frombits(high))]
}

// guess returns the bits of the threshold of top_p computed with sums in another order.
// It is almost always right, and search checks it.
func (s *Scratch) guess(k Kernels, target float64) uint32 {
	// All weights below this number together are at most what may be left out.
	least := float32((inOrder(s.sums) - target) / float64(len(s.weights)))
	floor := max(1, min(math.Float32bits(least), one))
	low, high := s.bracket(target, floor)
	for {
		s.fillNear(k, low, high)
		above := inOrder(s.near.above)
		all := low <= floor && high > one
		if above >= target && !all { // the threshold is at or above high
			low, high = high, one+1
			continue
		}
		at, found := s.refine(k, target-above)
		if found || low <= floor {
			return min(at, one)
		}
		low, high = floor, low
	}
}

const (
	// sampleSize is about how many weights of a large vocabulary bracket samples.
	sampleSize = 2048

	// sampleDigits is the number of intervals of bracket's histogram, digits that of
	// refine's.
	sampleDigits = 1024
	digits       = 256
)

// bracket returns bits between which the threshold of top_p probably is, at or above
// floor: three standard deviations to either side, from a sample of the weights. The
// threshold divides the weights into two parts; bracket estimates the smaller one.
func (s *Scratch) bracket(target float64, floor uint32) (low, high uint32) {
	stride := len(s.weights) / sampleSize
	if stride < 4 {
		return floor, one + 1
	}
	s.sample = s.sample[:0]
	total, least, most := 0.0, one+1, uint32(1)
	for i := stride / 2; i < len(s.weights); i += stride {
		if w := s.weights[i]; w > 0 {
			s.sample = append(s.sample, w)
			total += float64(w)
			least, most = min(least, math.Float32bits(w)), max(most, math.Float32bits(w))
		}
	}
	part, share := target, target/float64(stride)
	if below := inOrder(s.sums) - target; below < target {
		part, share = below, total-below/float64(stride)
	}
	if share <= 0 || share >= total {
		return floor, one + 1
	}
	shift := bits.Len32((most - least) / sampleDigits)
	var mass [sampleDigits]float64
	for _, w := range s.sample {
		mass[(math.Float32bits(w)-least)>>shift%sampleDigits] += float64(w)
	}
	// from returns the first bits of the interval in which the sample reaches a share.
	from := func(share float64) uint32 {
		digit := sampleDigits - 1
		for ; digit > 0 && mass[digit] < share; digit-- {
			share -= mass[digit]
		}
		return least + uint32(digit)<<shift
	}
	// The weights of the part are at most the threshold below it, and if the part above
	// is the smaller one, about as large as the threshold.
	margin := 3 * math.Sqrt(part/float64(stride)*float64(math.Float32frombits(from(share))))
	low, high = floor, one+1
	if share+margin < total {
		low = max(low, from(share+margin))
	}
	if share > margin {
		high = max(low+1, from(share-margin)+1<<shift)
	}
	return low, high
}

// refine returns the bits of the weight of s.near at which the sum from the largest on
// reaches target, and whether it does.
func (s *Scratch) refine(k Kernels, target float64) (at uint32, found bool) {
	var mass [digits]float64
	low, high, list := s.near.low, s.near.high, s.near.weights
	found = true
	for high-low > 1 && len(list) > 0 {
		shift := bits.Len32((high - low - 1) / digits)
		clear(mass[:])
		for _, w := range list {
			mass[(math.Float32bits(w)-low)>>shift%digits] += float64(w)
		}
		digit := uint32(digits - 1)
		for ; digit > 0 && mass[digit] < target; digit-- {
			target -= mass[digit]
		}
		if digit == 0 && mass[0] < target {
			found = false
		}
		low += digit << shift
		high = min(high, low+1<<shift)
		s.list = grow(s.list, len(list))
		list = s.list[:k.Between(s.list, nil, nil, list, math.Float32frombits(low), math.Float32frombits(high))]
	}
	return low, found && len(list) > 0
}

// grow returns a slice of n elements, reusing s if it has room. Contents are undefined.
func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
