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
	low, high := uint32(0), one+1 // bits of numbers: what is kept reaches target from low on, not from high on
	above, more := 0.0, 0         // weight and number of what is at least high
	at := s.guess(k, target)
	probe, last, count := at+1, uint32(0), 0
	for high-low > 1 {
		if probe <= low || probe >= high {
			probe = low + (high-low)/2
		}
		last = probe
		count = k.Mass(s.sums, s.weights, math.Float32frombits(probe))
		if mass := inOrder(s.sums); mass >= target {
			low = probe
		} else {
			high, above, more = probe, mass, count
			probe = at
		}
	}
	threshold := math.Float32frombits(low)
	if last != low {
		count = k.Mass(s.sums, s.weights, threshold)
	}
	if stay := math.Ceil((target - above) / float64(threshold)); stay < float64(count-more) {
		s.dropTies(threshold, int(stay))
		k.Mass(s.sums, s.weights, threshold)
	}
	return threshold
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
	low, high := s.bracket(target)
	for {
		n, above := k.Between(s.list, s.weights, math.Float32frombits(low), math.Float32frombits(high))
		all := low <= 1 && high > one
		if above >= target && !all { // it is not below high
			low, high = high, one+1
			continue
		}
		at, found := s.refine(k, s.list[:n], target-above, low, high)
		if found || all || low <= 1 {
			return at
		}
		low, high = 1, low
	}
}

// sampleSize is about how many weights of a large vocabulary bracket looks at.
const sampleSize = 4096

// Buckets of bracket: sixteen for each power of two.
const (
	bucketShift = 19
	firstBucket = (127 + weightFloor - 1) << (23 - bucketShift)
)

// bracket returns bits between which the threshold of top_p probably is, from a
// sample of the weights: as many times standard deviations to either side as make
// that rarely wrong. Of the two parts that the threshold makes of the weights it
// estimates the one that is smaller.
func (s *Scratch) bracket(target float64) (low, high uint32) {
	low, high = 1, one+1
	stride := len(s.weights) / sampleSize
	if stride < 4 {
		return low, high
	}
	if s.mass == nil {
		s.mass = make([]float64, int(one)>>bucketShift-firstBucket+1)
	}
	clear(s.mass)
	for i := stride / 2; i < len(s.weights); i += stride {
		if w := s.weights[i]; w > 0 {
			s.mass[int(math.Float32bits(w))>>bucketShift-firstBucket] += float64(w)
		}
	}
	const deviations = 3
	edge := func(bucket int) uint32 { return uint32(bucket+firstBucket) << bucketShift }
	sum, squares, times := 0.0, 0.0, float64(stride)
	add := func(bucket int) (least, most float64) {
		sum += times * s.mass[bucket]
		squares += times * s.mass[bucket] * times * float64(math.Float32frombits(edge(bucket+1)))
		return sum - deviations*math.Sqrt(squares), sum + deviations*math.Sqrt(squares)
	}
	if below := inOrder(s.sums) - target; below < target {
		for b := range s.mass {
			least, most := add(b)
			if most < below {
				low = edge(b)
			}
			if least > below {
				return max(low, 1), min(edge(b+1), one+1)
			}
		}
		return low, high
	}
	for b := len(s.mass) - 1; b >= 0; b-- {
		least, most := add(b)
		if most < target {
			high = min(edge(b+1), one+1)
		}
		if least > target {
			return edge(b), high
		}
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
