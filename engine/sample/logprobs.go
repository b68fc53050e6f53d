package sample

import (
	"math"
	"slices"
	"sort"
)

// Top is a token with its log-probability.
type Top struct {
	Token   int32
	LogProb float32
}

// LogProbs returns a token's log-probability and rank (1 is the best) under the
// model's own distribution, before temperature, masks and penalties. It appends to
// dst the n best tokens, best first, or the tokens of only if that is not empty.
// Tokens beyond the vocabulary have -Inf.
func LogProbs(k Kernels, logits []float32, token int32, n int, only []int32, dst []Top) (logProb float32, rank int, top []Top) {
	norm, largest := logSumExp(k, logits)
	at := func(t int32) float32 {
		if !inside(logits, t) || math.IsInf(norm, -1) {
			return lowest
		}
		return float32(finite(logits[t]) - norm)
	}
	if len(only) > 0 {
		for _, t := range only {
			dst = append(dst, Top{t, at(t)})
		}
	}
	if !inside(logits, token) || math.IsInf(norm, -1) {
		return lowest, len(logits), dst
	}
	if len(only) == 0 {
		dst = best(k, logits, norm, n, dst)
	}
	if token == largest {
		return at(token), 1, dst
	}
	return at(token), rankOf(k, logits, token), dst
}

// rankOf returns 1 plus the number of tokens that are better than token, ties by id.
func rankOf(k Kernels, logits []float32, token int32) int {
	own := logits[token]
	if finite(own) == math.Inf(-1) { // every number is better, and so are earlier tokens of -Inf
		rank := 1 + k.Count(logits, lowest)
		for _, v := range logits[:token] {
			if finite(v) == math.Inf(-1) {
				rank++
			}
		}
		return rank
	}
	below := math.Nextafter32(own, lowest)
	return 1 + k.Count(logits[:token], below) + k.Count(logits[token+1:], own)
}

// logSumExp returns the logarithm of the sum of e^logit, or -Inf if there is nothing to
// sum, and the index of the first of the largest logits. The sum has the same bits on
// every machine.
func logSumExp(k Kernels, logits []float32) (sum float64, largest int32) {
	if len(logits) == 0 {
		return math.Inf(-1), 0
	}
	largest = k.Argmax(logits)
	most := logits[largest]
	if math.IsInf(finite(most), -1) {
		return math.Inf(-1), 0
	}
	const atOnce = 64 // blocks
	sums, total := make([]float64, min(atOnce, blocks(len(logits)))), 0.0
	w := Weighing{Max: most, Scale: log2e, Lowest: lowest}
	for len(logits) > 0 {
		part := logits[:min(len(logits), atOnce*Block)]
		these := sums[:blocks(len(part))]
		k.Weigh(nil, these, part, &w)
		for _, s := range these {
			total += s
		}
		logits = logits[len(part):]
	}
	return float64(most) + math.Log(total), largest
}

// best appends the n largest, of equals the first. It compares log-probabilities as a
// client receives them, so that those which round to the same number tie.
func best(k Kernels, logits []float32, norm float64, n int, dst []Top) []Top {
	if n <= 0 {
		return dst
	}
	start, i := len(dst), 0
	for ; i < len(logits) && len(dst)-start < n; i++ {
		dst = insert(dst, start, Top{int32(i), float32(finite(logits[i]) - norm)})
	}
	for len(dst)-start == n {
		// A logit not above that of the last token kept cannot round to more.
		last := dst[len(dst)-1]
		if i = k.Above(logits, i, float32(finite(logits[last.Token]))); i == len(logits) {
			break
		}
		if lp := float32(finite(logits[i]) - norm); lp > last.LogProb {
			dst = insert(dst[:len(dst)-1], start, Top{int32(i), lp})
		}
		i++
	}
	return dst
}

// insert inserts t into dst[start:] after the entries that are not less.
func insert(dst []Top, start int, t Top) []Top {
	at := start + sort.Search(len(dst)-start, func(k int) bool { return dst[start+k].LogProb < t.LogProb })
	return slices.Insert(dst, at, t)
}

// finite returns v as float64, with NaN as -Inf, as Pick reads it.
func finite(v float32) float64 {
	if v != v {
		return math.Inf(-1)
	}
	return float64(v)
}
