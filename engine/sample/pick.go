// Package sample turns a row of logits into a token. Greedy is the largest
// logit. Otherwise: logits over temperature, those at least min_p times as
// probable as the best, the top_k best of them, of those the smallest set that
// holds top_p of their probability, and one draw by inverse CDF in token order. The draw comes from a counter-based generator
// keyed by the request's seed and counted by (choice, position).
//
// Invariant: the token depends on (logits, Params, position) alone. There is no
// state between calls, and no arithmetic whose bits vary with the machine, so a
// request draws the same tokens alone, batched, resumed or moved.
//
// A request's Controls (penalties, bias, masks) change a copy of the logits
// before that; they are made from its tokens alone, so they too are the same on
// every path.
//
// The package does not know what a request is or when it ends.
package sample

import "math"

// digits is the number of buckets of one radix pass: 11 bits of the order key.
const digits = 2048

// Scratch is the working memory of Pick. It may be reused for any logits; it
// carries nothing from one call to the next. One goroutine uses it at a time.
type Scratch struct {
	heap       []float32       // [top_k] the best logits seen
	candidates []candidate     // [at most vocab] tokens that may be drawn, in token order
	mass       [digits]float64 // weight per digit of the order key
	controlled []float32       // [vocab] the logits under Controls
}

// candidate is a token with its place in the order of logits and its weight
// e^((logit - best)/temperature): the softmax before division by its sum.
type candidate struct {
	key    uint32
	token  int32
	weight float64
}

// Pick draws the token of a position. A NaN logit counts as -Inf; when there is
// a +Inf it is picked, the first of several; when nothing is left, token 0 is.
// top_k keeps every token that ties with the k-th, as vLLM does; at the edge of
// top_p, of tokens that tie, those with lower ids stay.
func Pick(logits []float32, p *Params, position int32, s *Scratch) int32 {
	if p.Controls != nil {
		s.controlled = append(s.controlled[:0], logits...)
		logits = s.controlled
		p.Controls.apply(logits)
	}
	best := argmax(logits)
	if !(p.Temperature > 0) || len(logits) == 0 {
		return best
	}
	max := float64(logits[best])
	inverse := 1 / float64(p.Temperature)
	if math.IsInf(max, 0) || max != max || math.IsInf(inverse, 1) {
		return best
	}
	lowest := float32(math.Inf(-1))
	if k := int(p.TopK); k > 0 && k < len(logits) {
		lowest = kthLargest(logits, k, s)
	}
	s.candidates = s.candidates[:0]
	total := 0.0
	for i, v := range logits {
		if !(v >= lowest) { // also NaN
			continue
		}
		if w := expWeight(float64((float64(v) - max) * inverse)); w > 0 && w >= float64(p.MinP) {
			s.candidates = append(s.candidates, candidate{orderKey(v), int32(i), w})
			total += w
		}
	}
	kept := s.candidates
	if p.TopP > 0 && p.TopP < 1 {
		kept, total = topP(kept, float64(float64(p.TopP)*total), &s.mass)
	}
	return draw(kept, float64(uniform(p.Seed, p.Choice, position)*total))
}

// argmax is the index of the largest logit, the lowest of several.
func argmax(logits []float32) int32 {
	best, at := float32(math.Inf(-1)), 0
	for i, v := range logits {
		if v > best { // never for NaN
			best, at = v, i
		}
	}
	return int32(at)
}

// kthLargest is the k-th largest logit, ties counted one by one, or -Inf when
// there are fewer numbers than that. The k best so far form a heap with the
// least of them on top, so that most logits cost one comparison.
func kthLargest(logits []float32, k int, s *Scratch) float32 {
	h := s.heap[:0]
	for _, v := range logits {
		if v != v {
			continue
		}
		if len(h) == k {
			if v > h[0] {
				h[0] = v
				sink(h, 0)
			}
			continue
		}
		h = append(h, v)
		if len(h) == k {
			for j := k/2 - 1; j >= 0; j-- {
				sink(h, j)
			}
		}
	}
	s.heap = h
	if len(h) < k {
		return float32(math.Inf(-1))
	}
	return h[0]
}

// sink restores the heap below i.
func sink(h []float32, i int) {
	v := h[i]
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && h[child+1] < h[child] {
			child++
		}
		if v <= h[child] {
			break
		}
		h[i] = h[child]
		i = child
	}
	h[i] = v
}

// orderKey maps a number to an integer of the same order.
func orderKey(v float32) uint32 {
	b := math.Float32bits(v)
	if v == 0 {
		b = 0 // -0 ties with +0
	}
	return b ^ (uint32(int32(b)>>31) | 1<<31)
}

// passes of a radix selection over a key's 32 bits, most significant first.
var passes = [3]struct {
	shift, width uint
	mask         uint32
}{{21, 11, digits - 1}, {10, 11, digits - 1}, {0, 10, digits/2 - 1}}

// topP keeps the smallest set of best candidates that holds the weight target:
// one stays while the weight of those before it is less. Each pass of the radix
// selection finds 11 bits of the last key that stays, with no sorting. It
// returns the set, in token order, and its weight.
func topP(all []candidate, target float64, mass *[digits]float64) ([]candidate, float64) {
	var prefix uint32  // the bits found so far
	var before float64 // weight of the keys above the range that shares prefix
	for _, pass := range passes {
		clear(mass[:])
		above := pass.shift + pass.width
		for i := range all {
			if key := all[i].key; uint64(key)>>above == uint64(prefix) {
				mass[key>>pass.shift&pass.mask] += all[i].weight
			}
		}
		digit, lowest := pass.mask, pass.mask
		for ; ; digit-- {
			if mass[digit] > 0 {
				lowest = digit
				if before+mass[digit] >= target {
					break
				}
				before += mass[digit]
			}
			if digit == 0 { // rounding alone kept the sum below the target
				before -= mass[lowest]
				digit = lowest
				break
			}
		}
		prefix = prefix<<pass.width | digit
	}
	kept, total := all[:0], 0.0
	for _, c := range all {
		if c.key < prefix || c.key == prefix && before >= target {
			continue
		}
		if c.key == prefix { // of those that tie, lower ids first, at least one
			before += c.weight
		}
		kept = append(kept, c)
		total += c.weight
	}
	return kept, total
}

// draw is the inverse CDF in token order: the first token at which the weights
// so far exceed rest.
func draw(kept []candidate, rest float64) int32 {
	for _, c := range kept {
		if rest < c.weight {
			return c.token
		}
		rest -= c.weight
	}
	return kept[len(kept)-1].token // rounding left rest at the very end
}
