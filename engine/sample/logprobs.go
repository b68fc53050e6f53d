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

// LogProbs is what a client sees of a token: its log-probability and rank (1 is
// the best) under the model's own distribution, before temperature, masks and
// penalties, and the n best tokens, best first, or those that only names where it
// is not empty. They are appended to dst; tokens beyond the vocabulary have -Inf.
func LogProbs(logits []float32, token int32, n int, only []int32, dst []Top) (logProb float32, rank int, top []Top) {
	norm := logSumExp(logits)
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
	own := finite(logits[token])
	rank = 1
	for i, v := range logits {
		if f := finite(v); f > own || f == own && int32(i) < token {
			rank++
		}
	}
	if len(only) == 0 {
		dst = best(logits, norm, n, dst)
	}
	return at(token), rank, dst
}

// logSumExp is the logarithm of the sum of e^logit, -Inf when there is nothing to
// sum. Like a draw's weights, the terms have the same bits on every machine.
func logSumExp(logits []float32) float64 {
	most := math.Inf(-1)
	for _, v := range logits {
		most = math.Max(most, finite(v))
	}
	if math.IsInf(most, -1) {
		return most
	}
	sum := 0.0
	for _, v := range logits {
		sum += expWeight(finite(v) - most)
	}
	return most + math.Log(sum)
}

// best appends the n largest, of equals the first.
func best(logits []float32, norm float64, n int, dst []Top) []Top {
	if n <= 0 {
		return dst
	}
	start := len(dst)
	for i, v := range logits {
		lp := float32(finite(v) - norm)
		if len(dst)-start == n {
			if lp <= dst[len(dst)-1].LogProb {
				continue
			}
			dst = dst[:len(dst)-1]
		}
		at := start + sort.Search(len(dst)-start, func(k int) bool { return dst[start+k].LogProb < lp })
		dst = slices.Insert(dst, at, Top{int32(i), lp})
	}
	return dst
}

// finite reads NaN as -Inf, as Pick does.
func finite(v float32) float64 {
	if v != v {
		return math.Inf(-1)
	}
	return float64(v)
}
