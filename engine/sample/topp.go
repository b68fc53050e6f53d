package sample

import (
	"math"
	"math/bits"
)

// one is the bits of the best token's weight, the largest there is.
var one = math.Float32bits(1)

// topP keeps of the weights of s the smallest set of best ones that holds target:
// those above a threshold, and of those equal to the threshold as many as are
// needed, lower ids first. It sets the others of that threshold to zero, leaves the
// blocks' sums of what it keeps in s.sums, and returns the threshold.
//
// The threshold is the largest number t for which the weights that are at least t
// sum up to target or more: by blocks, and the blocks in order. Rounding is
// monotone, so the sum never grows with t and there is one such t, whatever order it
// is searched in.
func (s *Scratch) topP(k Kernels, target float64) float32 {
	threshold, above, ties := s.search(k, target)
	if stay := math.Ceil((target - above) / float64(threshold)); stay < float64(ties) {
		s.dropTies(threshold, int(stay))
		k.Mass(s.sums, s.weights, threshold)
	}
	return threshold
}

// search returns the threshold, the sum of the weights above it and how many are
// equal to it, and leaves in s.sums the blocks' sums of the weights that are at least
// the threshold.
func (s *Scratch) search(k Kernels, target float64) (threshold float32, above float64, ties int) {
	low, high := uint32(0), one+1 // bits of numbers: what is kept reaches target from low on, not from high on
	for probe := min(s.guess(k, target), one); ; probe = low + (high-low)/2 {
		threshold = math.Float32frombits(probe)
		k.Mass(s.sums, s.weights, threshold)
		if inOrder(s.sums) < target {
			high = probe
			continue
		}
		if above, ties = s.above(k, threshold); above < target {
			return threshold, above, ties
		}
		low = probe + 1
	}
}

// above returns the sum of the weights above w and how many are equal to it. s.sums has
// the blocks' sums of the weights that are at least w.
func (s *Scratch) above(k Kernels, w float32) (sum float64, ties int) {
	next := math.Nextafter32(w, 2)
	first := k.Equal(s.weights, 0, w)
	if first == len(s.weights) {
		return inOrder(s.sums), 0
	}
	if k.Equal(s.weights, first+1, w) < len(s.weights) {
		s.others = grow(s.others, len(s.sums))
		k.Mass(s.others, s.weights, next)
		return inOrder(s.others), k.Count(s.weights, math.Nextafter32(w, lowest)) - k.Count(s.weights, w)
	}
	// Only the sum of its block is another without it.
	b := first / Block
	own := s.sums[b]
	k.Mass(s.sums[b:b+1], s.weights[b*Block:min(len(s.weights), (b+1)*Block)], next)
	sum, s.sums[b] = inOrder(s.sums), own
	return sum, 1
}

// dropTies sets all weights equal to w to zero but for the first so many.
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

// guess returns the bits of the threshold of top_p as sums in another order have it:
// almost always the right one, and topP checks it.
func (s *Scratch) guess(k Kernels, target float64) uint32 {
	s.list = grow(s.list, len(s.weights))
	// All weights below this number together are no more than what may be left out.
	least := float32((inOrder(s.sums) - target) / float64(len(s.weights)))
	floor := max(1, min(math.Float32bits(least), one))
	low, high := s.bracket(k, target, floor)
	for {
		n, above := k.Between(s.list, s.weights, math.Float32frombits(low), math.Float32frombits(high))
		all := low <= floor && high > one
		if above >= target && !all { // it is not below high
			low, high = high, one+1
			continue
		}
		at, found := s.refine(k, s.list[:n], target-above, low, high)
		if found || low <= floor {
			return at
		}
		low, high = floor, low
	}
}

// sampleSize is about how many weights of a large vocabulary bracket looks at.
const sampleSize = 2048

// bracket returns bits between which the threshold of top_p probably is, from a
// sample of the weights and not below floor: three standard deviations to either
// side. Of the two parts that the threshold makes of the weights it estimates the
// smaller one.
func (s *Scratch) bracket(k Kernels, target float64, floor uint32) (low, high uint32) {
	low, high = floor, one+1
	stride := len(s.weights) / sampleSize
	if stride < 4 {
		return low, high
	}
	s.sample = s.sample[:0]
	total, least, most := 0.0, high, uint32(1)
	for i := stride / 2; i < len(s.weights); i += stride {
		if w := s.weights[i]; w > 0 {
			s.sample = append(s.sample, w)
			total += float64(w)
			least, most = min(least, math.Float32bits(w)), max(most, math.Float32bits(w))
		}
	}
	at := func(share float64) (uint32, bool) { // the threshold of the sample
		if share <= 0 || share >= total {
			return 0, false
		}
		list := s.list[:copy(s.list, s.sample)]
		return s.refine(k, list, share, least, most+1)
	}
	part, share := target, target/float64(stride)
	if below := inOrder(s.sums) - target; below < target {
		part, share = below, total-below/float64(stride)
	}
	middle, found := at(share)
	if !found {
		return low, high
	}
	// The weights of the part are at most the threshold below it, and about as large
	// as that above it where it is the smaller one.
	margin := 3 * math.Sqrt(part/float64(stride)*float64(math.Float32frombits(middle)))
	if edge, ok := at(share + margin); ok {
		low = max(low, edge)
	}
	if edge, ok := at(share - margin); ok {
		high = max(low, edge) + 1
	}
	return low, high
}

// refine returns the bits of the weight of list, all of them in [low, high), at which
// the weights from the largest on reach target, and whether they do. It changes list.
func (s *Scratch) refine(k Kernels, list []float32, target float64, low, high uint32) (at uint32, found bool) {
	const digits = 256
	var mass [digits]float64
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
		if digit == 0 && mass[0] < target && found {
			found = false
		}
		low += digit << shift
		high = min(high, low+1<<shift)
		n, _ := k.Between(list, list, math.Float32frombits(low), math.Float32frombits(high))
		list = list[:n]
	}
	return low, found && len(list) > 0
}

// grow returns a slice of n elements, s where it has room. Contents are undefined.
func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
