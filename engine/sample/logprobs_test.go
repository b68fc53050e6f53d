package sample

import (
	"math"
	"math/rand/v2"
	"sort"
	"testing"
)

func TestLogProbsAgainstSort(t *testing.T) {
	for seed := uint64(0); seed < 200; seed++ {
		rng := rand.New(rand.NewPCG(seed, 4))
		logits := make([]float32, 1+rng.IntN(60))
		sum := 0.0
		for i := range logits {
			logits[i] = float32(rng.IntN(12)) / 2 // ties
			sum += math.Exp(float64(logits[i]))
		}
		order := make([]int, len(logits))
		for i := range order {
			order[i] = i
		}
		sort.SliceStable(order, func(a, b int) bool { return logits[order[a]] > logits[order[b]] })
		token, n := int32(rng.IntN(len(logits))), rng.IntN(8)
		lp, rank, top := LogProbs(Portable{}, logits, token, n, nil, nil)
		if want := float64(logits[token]) - math.Log(sum); math.Abs(float64(lp)-want) > 1e-5 {
			t.Fatalf("seed %d: log-probability %v, want %v", seed, lp, want)
		}
		if order[rank-1] != int(token) {
			t.Fatalf("seed %d: token %d has rank %d, there stands %d", seed, token, rank, order[rank-1])
		}
		if len(top) != min(n, len(logits)) {
			t.Fatalf("seed %d: %d top tokens, want %d", seed, len(top), n)
		}
		for i, x := range top {
			if int(x.Token) != order[i] {
				t.Fatalf("seed %d: top %d is %d, want %d", seed, i, x.Token, order[i])
			}
		}
		only := []int32{token, int32(rng.IntN(len(logits))), int32(len(logits))}
		lp2, rank2, named := LogProbs(Portable{}, logits, token, n, only, nil)
		if lp2 != lp || rank2 != rank || len(named) != 3 || named[0] != (Top{token, lp}) || !math.IsInf(float64(named[2].LogProb), -1) {
			t.Fatalf("seed %d: of %v: %v, rank %d, %v", seed, only, lp2, rank2, named)
		}
		if want := float64(logits[only[1]]) - math.Log(sum); named[1].Token != only[1] || math.Abs(float64(named[1].LogProb)-want) > 1e-5 {
			t.Fatalf("seed %d: %v, want token %d with %v", seed, named[1], only[1], want)
		}
	}
}
