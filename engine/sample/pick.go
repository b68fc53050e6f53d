// Package sample turns a row of logits into a token.
//
// Greedy is the largest logit, the lowest id of several. Otherwise a token is drawn
// by its weight, after top_k, min_p and top_p in this order:
//
//   - A token's weight is 2^((logit - largest) * s) in float32, where s is log2(e) /
//     temperature, divided in float64 and rounded to float32. Weights below 2^-90 are
//     zero; NaN counts as -Inf. With x = (logit - largest) * s, n the integer next to
//     x (ties to even) and f = x - n, which is exact, it is 2^n times a polynomial of
//     degree 6 in f by Horner's rule. Each subtraction, product and sum rounds by
//     itself: no fused multiply-add. The largest logit has the weight 1. The
//     relative error is below 1.2e-7 + 1.3e-7*|x|, of which 9.6e-8 is the polynomial
//     and the second part the rounding of x.
//   - Weights are summed in float64. A block is 512 tokens, and has 16 partial sums:
//     of tokens j, j+16, …, in order. They are joined as a tree: 8 and 8, 4 and 4, 2
//     and 2, 1 and 1. The sums of blocks are added from the first to the last.
//   - top_k keeps the logits that are at least the k-th largest: all that tie with it.
//   - min_p keeps weights of at least min_p.
//   - top_p keeps the smallest set of largest weights whose sum is at least top_p of
//     the whole: by a threshold, see topP. Of the tokens whose weight is the
//     threshold, those with lower ids stay: as many as the exact quotient requires.
//   - The draw is u times the sum of what is kept. It goes to the first block whose
//     sum is larger than what the blocks before it leave of the draw, and in the
//     block to the first token whose weight is larger than what the tokens before
//     it leave. u comes from a counter-based generator keyed by the request's seed
//     and counted by (choice, position).
//
// Log-probabilities are logit - largest - ln(sum), where the sum is of weights at
// temperature 1 by the same rules: within 4e-6 before it is rounded to float32.
//
// Invariant: the token depends on (logits, Params, position) alone. There is no state
// between calls, and no arithmetic whose bits vary with the machine, so that a request
// samples the same tokens alone, batched, resumed or moved. Portable, the C kernels of
// engine/backend/cpu and those of cuda/ return the same bits.
//
// A request's Controls (penalties, bias, masks) change a copy of the logits before
// that. They are made from its tokens alone, so that they too are the same on every
// path.
// A Mask, which a grammar computes, comes last: penalties and bias cannot undo it.
//
// The package does not know what a request is or when it ends.
package sample

import (
	"math"
	"math/bits"
	"slices"
)

// Scratch is the working memory of Pick. It may be reused for any logits, because no
// result depends on its contents. One goroutine uses it at a time.
type Scratch struct {
	Kernels Kernels // nil: Portable

	heap       []float32 // [top_k] the best logits so far
	sums       []float64 // [blocks] of the weights that may be sampled
	others     []float64 // [blocks] of the weights above the threshold of top_p
	weights    []float32 // [vocab], or of one block
	near       near      // weights near the threshold of top_p
	list       []float32 // those of near that are nearer to it
	sample     []float32 // a sample of the weights
	weighing   Weighing
	controlled []float32 // [vocab] the logits under Controls
}

// Pick samples the token of a position. A NaN logit counts as -Inf. If there is a +Inf,
// the first one is picked; if no logit is left, token 0 is. top_k keeps every token
// that ties with the k-th, as vLLM does. Of tokens that tie at the edge of top_p, those
// with lower ids stay.
func Pick(logits []float32, p *Params, position int32, s *Scratch) int32 {
	k := s.Kernels
	if k == nil {
		k = Portable{}
	}
	if p.Controls != nil {
		s.controlled = append(s.controlled[:0], logits...)
		logits = s.controlled
		p.Controls.apply(logits)
	}
	if p.Mask != nil {
		s.controlled = grow(s.controlled, len(logits))
		mask(s.controlled, logits, p.Mask)
		logits = s.controlled
	}
	best := k.Argmax(logits)
	if !(p.Temperature > 0) || len(logits) == 0 {
		return best
	}
	w := &s.weighing
	*w = Weighing{Max: logits[best], Scale: float32(log2e / float64(p.Temperature)), Lowest: lowest, MinP: p.MinP}
	if most := float64(w.Max); math.IsInf(most, 0) || most != most || math.IsInf(float64(w.Scale), 1) {
		return best
	}
	if n := int(p.TopK); n > 0 && n < len(logits) {
		w.Lowest = kthLargest(k, logits, n, s)
	}
	s.sums = grow(s.sums, blocks(len(logits)))
	u := uniform(p.Seed, p.Choice, position)
	if !(p.TopP > 0 && p.TopP < 1) {
		k.Weigh(nil, s.sums, logits, w)
		b, rest := locate(s.sums, float64(u*inOrder(s.sums)))
		row := logits[b*Block : min(len(logits), (b+1)*Block)]
		s.weights = grow(s.weights, len(row))
		k.Weigh(s.weights, s.sums[:1], row, w)
		return draw(s.weights, rest, 0, b*Block, best)
	}
	s.weights = grow(s.weights, len(logits))
	k.Weigh(s.weights, s.sums, logits, w)
	total := inOrder(s.sums)
	if total == 0 { // min_p above 1
		return best
	}
	least := s.topP(k, float64(float64(p.TopP)*total))
	b, rest := locate(s.sums, float64(u*inOrder(s.sums)))
	return draw(s.weights[b*Block:min(len(logits), (b+1)*Block)], rest, least, b*Block, best)
}

// mask writes to dst the logits whose bit is set, and -Inf for the others. dst may be logits.
func mask(dst, logits []float32, set []uint64) {
	for at := 0; at < len(logits); at += 64 {
		to, from, word := dst[at:min(at+64, len(logits))], logits[at:min(at+64, len(logits))], uint64(0)
		if at>>6 < len(set) {
			word = set[at>>6]
		}
		all := uint64(math.MaxUint64) >> (64 - len(to))
		if word &= all; bits.OnesCount64(word) > len(to)/2 { // the fewer of the two are written one by one
			copy(to, from)
			for w := all &^ word; w != 0; w &= w - 1 {
				to[bits.TrailingZeros64(w)] = lowest
			}
			continue
		}
		next := 0
		for w := word; w != 0; w &= w - 1 {
			i := bits.TrailingZeros64(w)
			copy(to[next:i], excluded[:])
			to[i], next = from[i], i+1
		}
		copy(to[next:], excluded[:])
	}
}

// excluded are the logits of 64 tokens that a mask excludes.
var excluded = [64]float32(slices.Repeat([]float32{lowest}, 64))

// locate returns the first block whose sum exceeds what the blocks before it leave of
// rest, and that remainder. If rounding leaves a remainder after the last block, it
// returns the last block that has a weight, and +Inf.
func locate(sums []float64, rest float64) (int, float64) {
	last := 0
	for b, sum := range sums {
		if rest < sum {
			return b, rest
		}
		rest -= sum
		if sum > 0 {
			last = b
		}
	}
	return last, math.Inf(1)
}

// draw returns the first token whose weight exceeds what those before it leave of rest,
// of the weights that are at least least. If there is none, it returns the last token
// that has a weight, or best. first is the token of the first weight.
func draw(weights []float32, rest float64, least float32, first int, best int32) int32 {
	for i, w := range weights {
		if w < least || w == 0 {
			continue
		}
		best = int32(first + i)
		if rest < float64(w) {
			break
		}
		rest -= float64(w)
	}
	return best
}

// kthLargest returns the k-th largest logit, ties counted one by one, or -Inf if there
// are fewer numbers. The k best so far form a heap with the least of them on top, so
// that most logits cost one comparison.
func kthLargest(kernels Kernels, logits []float32, k int, s *Scratch) float32 {
	h := s.heap[:0]
	at := 0
	for ; at < len(logits) && len(h) < k; at++ {
		if v := logits[at]; v == v {
			h = append(h, v)
		}
	}
	s.heap = h
	if len(h) < k {
		return lowest
	}
	for j := k/2 - 1; j >= 0; j-- {
		sink(h, j)
	}
	for {
		if at = kernels.Above(logits, at, h[0]); at == len(logits) {
			return h[0]
		}
		h[0] = logits[at]
		sink(h, 0)
		at++
	}
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
