package sample

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// bound is what the package promises of a weight: the relative error at 2^x.
func bound(x float64) float64 { return 1.2e-7 + 1.3e-7*math.Abs(x) }

// TestWeight: weights are the correct powers within the promised error, and zero where
// specified.
func TestWeight(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 9))
	exact := Weighing{Scale: 1, Lowest: lowest}
	worst := 0.0
	for range 300_000 { // without rounding before the polynomial
		x := -float32(r.Float64() * 60 * r.Float64())
		worst = max(worst, math.Abs(float64(exact.weight(x))/math.Exp2(float64(x))-1))
	}
	t.Logf("largest error of the polynomial: %.3g", worst)
	if worst > 1.2e-7 {
		t.Errorf("a weight is off by %g", worst)
	}
	for range 300_000 {
		temperature := float32(math.Exp(2 * r.NormFloat64()))
		w := Weighing{Max: float32(r.NormFloat64() * 20), Scale: float32(log2e / float64(temperature)), Lowest: lowest}
		v := w.Max - float32(r.ExpFloat64()*5)
		x := (float64(v) - float64(w.Max)) * log2e / float64(temperature)
		if got, want := float64(w.weight(v)), math.Exp2(x); x > weightFloor+0.01 && math.Abs(got/want-1) > bound(x) {
			t.Fatalf("logit %v of %+v: weight %v, want %v", v, w, got, want)
		}
	}
	if w := exact.weight(0); w != 1 {
		t.Errorf("the largest logit weighs %v", w)
	}
	if w := exact.weight(weightFloor); w != 0x1p-90 {
		t.Errorf("at the floor: %v", w)
	}
	for _, x := range []float32{math.Nextafter32(weightFloor, lowest), -math.MaxFloat32, lowest, float32(math.NaN())} {
		if w := exact.weight(x); w != 0 {
			t.Errorf("%v weighs %v", x, w)
		}
	}
	filtered := Weighing{Scale: 1, Lowest: -2, MinP: 0.5}
	if a, b, c := filtered.weight(-1), filtered.weight(-1.01), (&Weighing{Scale: 1, Lowest: -2}).weight(-2.01); a != 0.5 || b != 0 || c != 0 {
		t.Errorf("at and below min_p: %v and %v; below the lowest logit: %v", a, b, c)
	}
}

// plainDraw is Pick as in the package comment: sorted, and every sum computed again.
func plainDraw(logits []float32, p Params, position int32) int32 {
	best := Portable{}.Argmax(logits)
	w := Weighing{Max: logits[best], Scale: float32(log2e / float64(p.Temperature)), Lowest: lowest, MinP: p.MinP}
	if !(p.Temperature > 0) || math.IsInf(float64(w.Max), 0) || math.IsInf(float64(w.Scale), 1) {
		return best
	}
	if k := int(p.TopK); k > 0 && k < len(logits) {
		sorted := slices.DeleteFunc(slices.Clone(logits), func(v float32) bool { return v != v })
		slices.SortFunc(sorted, func(a, b float32) int { return int(orderOf(b) - orderOf(a)) })
		if len(sorted) >= k {
			w.Lowest = sorted[k-1]
		}
	}
	weights := make([]float64, len(logits))
	for i, v := range logits {
		weights[i] = float64(w.weight(v))
	}
	sum := func(from, to int) float64 { // of a block
		var lane [16]float64
		for i := from; i < to; i++ {
			lane[(i-from)%16] += weights[i]
		}
		for n := 8; n > 0; n /= 2 {
			for i := range n {
				lane[i] += lane[i+n]
			}
		}
		return lane[0]
	}
	total := func() (all float64, each []float64) {
		for b := 0; b < len(weights); b += 512 {
			each = append(each, sum(b, min(b+512, len(weights))))
			all += each[len(each)-1]
		}
		return all, each
	}
	all, _ := total()
	if all == 0 {
		return best
	}
	if p.TopP > 0 && p.TopP < 1 {
		target := float64(p.TopP) * all
		whole := slices.Clone(weights)
		distinct := slices.Compact(slices.Sorted(slices.Values(whole)))
		above := 0.0
		for i := len(distinct) - 1; i >= 0; i-- {
			for j, v := range whole {
				weights[j] = 0
				if v >= distinct[i] {
					weights[j] = v
				}
			}
			mass, _ := total()
			if mass < target {
				above = mass
				continue
			}
			stay := math.Ceil((target - above) / distinct[i])
			for j, v := range whole {
				if v == distinct[i] {
					if stay--; stay < 0 {
						weights[j] = 0
					}
				}
			}
			break
		}
	}
	all, each := total()
	rest := uniform(p.Seed, p.Choice, position) * all
	for b, mass := range each {
		if rest < mass || b == len(each)-1 {
			for i := b * 512; i < min(b*512+512, len(weights)); i++ {
				if weights[i] > 0 {
					best = int32(i)
					if rest < weights[i] {
						return best
					}
					rest -= weights[i]
				}
			}
			return best
		}
		rest -= mass
	}
	return best
}

func orderOf(v float32) int64 {
	if v == 0 {
		return 0
	}
	if b := math.Float32bits(v); b>>31 == 0 {
		return int64(b)
	} else {
		return -int64(b &^ (1 << 31))
	}
}

// TestPickIsTheDefinition holds Pick to the definition, bit for bit, over rows of all
// kinds and of lengths around blocks.
func TestPickIsTheDefinition(t *testing.T) {
	var s Scratch
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 6))
		n := 1 + r.IntN(40)
		switch seed % 5 {
		case 0:
			n = []int{511, 512, 513, 1024, 1535, 1536}[r.IntN(6)]
		case 1:
			n = 1 + r.IntN(1200)
		}
		logits := randomLogits(r, n)
		for position := range int32(3) {
			p := randomParams(r, n)
			if got, want := Pick(logits, &p, position, &s), plainDraw(logits, p, position); got != want {
				t.Fatalf("seed %d: Pick(%d logits, %+v, position %d) = %d, the definition says %d", seed, n, p, position, got, want)
			}
		}
	}
}

// TestTopPOfLargeRows: where the threshold is guessed from a sample, it is the one
// that a search by halves finds, also where the guess is wrong.
func TestTopPOfLargeRows(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 7))
		n := 8*sampleSize + r.IntN(20_000)
		logits := randomLogits(r, n)
		if seed%4 == 0 { // a few tokens have nearly all
			for range 3 {
				logits[r.IntN(n)] = 30
			}
		}
		w := Weighing{Max: logits[Portable{}.Argmax(logits)], Scale: float32(log2e), Lowest: lowest}
		if math.IsInf(float64(w.Max), 0) {
			continue
		}
		s := &Scratch{weights: make([]float32, n), sums: make([]float64, blocks(n))}
		Portable{}.Weigh(s.weights, s.sums, logits, &w)
		whole, target := slices.Clone(s.weights), inOrder(s.sums)*(1e-6+(1-2e-6)*r.Float64())
		got := s.topP(Portable{}, target)
		kept := slices.Clone(s.weights)
		copy(s.weights, whole)
		low, high := uint32(0), one+1
		for high-low > 1 {
			mid := low + (high-low)/2
			Portable{}.Mass(s.sums, s.weights, math.Float32frombits(mid))
			if inOrder(s.sums) >= target {
				low = mid
			} else {
				high = mid
			}
		}
		if want := math.Float32frombits(low); got != want {
			t.Fatalf("seed %d: the threshold is %v, want %v", seed, got, want)
		}
		sum, smallest := 0.0, math.Inf(1)
		for _, v := range kept {
			if v >= got {
				sum += float64(v)
				smallest = min(smallest, float64(v))
			}
		}
		if without := sum - smallest; sum < target*(1-1e-12) || without >= target*(1+1e-12) {
			t.Fatalf("seed %d: what is kept has %v, without one %v, of %v", seed, sum, without, target)
		}
	}
}

// TestSearchFromAnywhere: the result does not depend on the number that search tries first,
// nor on the range of weights in near.
func TestSearchFromAnywhere(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 8))
		n := 1 + r.IntN(2000)
		logits := randomLogits(r, n)
		w := Weighing{Max: logits[Portable{}.Argmax(logits)], Scale: float32(log2e * math.Exp(3*r.Float64())), Lowest: lowest}
		if math.IsInf(float64(w.Max), 0) {
			continue
		}
		s := &Scratch{weights: make([]float32, n), sums: make([]float64, blocks(n))}
		Portable{}.Weigh(s.weights, s.sums, logits, &w)
		target := inOrder(s.sums) * (1e-6 + (1-2e-6)*r.Float64())
		all := slices.Clone(s.sums)
		threshold, above, ties := s.search(Portable{}, target, s.guess(Portable{}, target))
		sums := slices.Clone(s.sums)
		for range 20 {
			copy(s.sums, all)
			at := math.Float32bits(s.weights[r.IntN(n)])
			low := at - min(at, uint32(r.IntN(1<<r.IntN(24))))
			s.fillNear(Portable{}, low, at+1+uint32(r.IntN(1<<r.IntN(24))))
			if t2, above2, ties2 := s.search(Portable{}, target, min(at+uint32(r.IntN(3))-1, one)); t2 != threshold || above2 != above || ties2 != ties || !slices.Equal(s.sums, sums) {
				t.Fatalf("seed %d: from the bits %#x on: %v, %v, %d, %v, want %v, %v, %d, %v", seed, at, t2, above2, ties2, s.sums, threshold, above, ties, sums)
			}
		}
	}
}

// TestDistribution: the weights of a row are its softmax, and draws follow it.
func TestDistribution(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for _, spread := range []float64{0.1, 1, 3, 10} {
		logits := make([]float32, 20_000)
		for i := range logits {
			logits[i] = float32(r.NormFloat64() * spread)
		}
		w := Weighing{Max: logits[Portable{}.Argmax(logits)], Scale: float32(log2e), Lowest: lowest}
		weights, sums := make([]float32, len(logits)), make([]float64, blocks(len(logits)))
		Portable{}.Weigh(weights, sums, logits, &w)
		sum := 0.0
		for _, v := range logits {
			sum += math.Exp(float64(v) - float64(w.Max))
		}
		total, variation := inOrder(sums), 0.0
		for i, v := range logits {
			variation += math.Abs(float64(weights[i])/total-math.Exp(float64(v)-float64(w.Max))/sum) / 2
		}
		if variation > 2e-7 {
			t.Errorf("spread %v: total variation %g", spread, variation)
		}
		norm, _ := logSumExp(Portable{}, logits)
		if off := math.Abs(norm - (float64(w.Max) + math.Log(sum))); off > 4e-6 {
			t.Errorf("spread %v: the logarithm of the sum is off by %g", spread, off)
		}
		t.Logf("spread %v: total variation %.2g", spread, variation)
	}
	const tokens, draws = 40, 100_000
	logits := make([]float32, tokens)
	sum, expected := 0.0, make([]float64, tokens)
	for i := range logits {
		logits[i] = float32(r.NormFloat64())
		expected[i] = math.Exp(float64(logits[i]) / 0.8)
		sum += expected[i]
	}
	var s Scratch
	got, square := make([]float64, tokens), 0.0
	for position := range int32(draws) {
		got[Pick(logits, &Params{Temperature: 0.8, Seed: 11}, position, &s)]++
	}
	for i, n := range got {
		e := expected[i] / sum * draws
		square += (n - e) * (n - e) / e
	}
	if square > 85 { // of 39 degrees of freedom: once in 30,000 seeds
		t.Errorf("chi-square %v", square)
	}
}
