package sample

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// reference is Pick in float64 with a full sort, one token at a time. tight means that the
// outcome depends on the order of a sum. The rounding of weights decides in about one of
// 10^6 draws, and for none of the seeds here.
func reference(logits []float32, p Params, position int32) (token int32, tight bool) {
	const slack = 1e-11
	clean := make([]float64, len(logits))
	best := 0
	for i, v := range logits {
		clean[i] = float64(v)
		if v != v {
			clean[i] = math.Inf(-1)
		}
		if clean[i] > clean[best] {
			best = i
		}
	}
	if p.Temperature <= 0 || math.IsInf(clean[best], 0) {
		return int32(best), false
	}
	order := make([]int, len(clean)) // best first, ties by id
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case clean[a] > clean[b]:
			return -1
		case clean[a] < clean[b]:
			return 1
		}
		return a - b
	})
	weight := func(i int) float64 { return math.Exp((clean[i] - clean[best]) / float64(p.Temperature)) }
	if k := int(p.TopK); k > 0 && k < len(order) {
		last := clean[order[k-1]]
		for k < len(order) && clean[order[k]] == last {
			k++
		}
		order = order[:k]
	}
	order = slices.DeleteFunc(order, func(i int) bool {
		if p.MinP > 0 && math.Abs(weight(i)-float64(p.MinP)) < slack {
			tight = true
		}
		return weight(i) < float64(p.MinP)
	})
	sum := 0.0
	for _, i := range order {
		sum += weight(i)
	}
	if p.TopP > 0 && p.TopP < 1 {
		before := 0.0
		for n, i := range order {
			if math.Abs(before-float64(p.TopP)*sum) < slack*sum {
				tight = true
			}
			if before >= float64(p.TopP)*sum {
				order = order[:n]
				break
			}
			before += weight(i)
		}
		sum = 0
		for _, i := range order {
			sum += weight(i)
		}
	}
	slices.Sort(order)
	rest := uniform(p.Seed, p.Choice, position) * sum
	for _, i := range order {
		w := weight(i)
		if math.Abs(rest-w) < slack*sum {
			tight = true
		}
		if rest < w {
			return int32(i), tight
		}
		rest -= w
	}
	return int32(order[len(order)-1]), true
}

// randomLogits makes rows of many kinds: smooth, tied, flat, steep, with the
// values that arithmetic gone wrong produces.
func randomLogits(r *rand.Rand, n int) []float32 {
	l := make([]float32, n)
	kind := r.IntN(6)
	scale := math.Exp(r.Float64()*8 - 4)
	for i := range l {
		switch kind {
		case 0, 1:
			l[i] = float32(r.NormFloat64() * scale)
		case 2: // heavy ties
			l[i] = float32(r.IntN(5)) - 2
		case 3: // all equal
			l[i] = 1.25
		case 4: // a smooth tail
			l[i] = float32(-scale * float64((i*7919)%n))
		case 5:
			l[i] = float32(r.NormFloat64())
			switch r.IntN(12) {
			case 0:
				l[i] = float32(math.NaN())
			case 1:
				l[i] = float32(math.Inf(-1))
			case 2:
				l[i] = float32(math.Copysign(0, -1))
			case 3:
				l[i] = 0
			}
		}
	}
	if r.IntN(40) == 0 {
		l[r.IntN(n)] = float32(math.Inf(1))
	}
	return l
}

func randomParams(r *rand.Rand, n int) Params {
	p := Params{Seed: r.Uint64(), Choice: uint32(r.IntN(4)), Temperature: float32(math.Exp(r.NormFloat64()))}
	if r.IntN(3) > 0 {
		p.TopK = int32(r.IntN(n+3)) - 1
	}
	if r.IntN(3) > 0 {
		p.TopP = float32(r.Float64()) * 1.1
	}
	if r.IntN(3) == 0 {
		p.MinP = float32(r.Float64() * r.Float64())
	}
	switch r.IntN(12) {
	case 0:
		p.Temperature = 0
	case 1:
		p.Temperature = 1e-6
	case 2:
		p.TopP = 1e-9
	case 3:
		p.TopP = 0.9999999
	}
	return p
}

func TestPickMatchesReference(t *testing.T) {
	var s Scratch
	tights := 0
	const rounds = 6000
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := 1 + r.IntN(1500)
		if seed%3 == 0 {
			n = 1 + r.IntN(12)
		}
		logits, p, position := randomLogits(r, n), randomParams(r, n), int32(r.IntN(5000))
		want, tight := reference(logits, p, position)
		if tight {
			tights++
			continue
		}
		if got := Pick(logits, &p, position, &s); got != want {
			t.Fatalf("seed %d: Pick(%d logits, %+v, position %d) = %d, reference %d", seed, n, p, position, got, want)
		}
	}
	if tights > rounds/20 {
		t.Errorf("%d of %d rounds were too tight to compare", tights, rounds)
	}
}

// A call leaves nothing behind: a used Scratch and a fresh one agree, and so
// does the same row among others.
func TestPickHasNoMemory(t *testing.T) {
	var used Scratch
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 2))
		n := 1 + r.IntN(3000)
		logits, p, position := randomLogits(r, n), randomParams(r, n), int32(r.IntN(100))
		before := slices.Clone(logits)
		got := Pick(logits, &p, position, &used)
		if want := Pick(logits, &p, position, new(Scratch)); got != want {
			t.Fatalf("seed %d: used scratch gives %d, fresh %d", seed, got, want)
		}
		for i := range before {
			if math.Float32bits(before[i]) != math.Float32bits(logits[i]) {
				t.Fatalf("seed %d: logit %d was changed", seed, i)
			}
		}
	}
}

func TestPickEdges(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	hot := Params{Temperature: 1, Seed: 7}
	for _, c := range []struct {
		name   string
		logits []float32
		params Params
		want   int32
	}{
		{"greedy", []float32{1, 3, 2}, Params{}, 1},
		{"greedy tie: the lowest id", []float32{1, 3, 3}, Params{}, 1},
		{"greedy, zeroes of both signs tie", []float32{float32(math.Copysign(0, -1)), 0}, Params{}, 0},
		{"greedy skips NaN", []float32{nan, -3, nan}, Params{}, 1},
		{"all NaN", []float32{nan, nan}, hot, 0},
		{"all -Inf", []float32{-inf, -inf}, hot, 0},
		{"+Inf is certain", []float32{1, inf, inf}, hot, 1},
		{"NaN is never drawn", []float32{nan, -inf, 5}, hot, 2},
		{"one token", []float32{-1e30}, hot, 0},
		{"none", nil, hot, 0},
		{"top_k 1", []float32{1, 3, 2}, Params{Temperature: 100, TopK: 1, Seed: 3}, 1},
		{"tiny top_p", []float32{1, 3, 2}, Params{Temperature: 100, TopP: 1e-30, Seed: 3}, 1},
		{"tiny top_p, tie", []float32{1, 3, 3}, Params{Temperature: 100, TopP: 1e-30, Seed: 3}, 1},
		{"tiny temperature", []float32{1, 3, 2.999}, Params{Temperature: 1e-30}, 1},
		{"subnormal temperature", []float32{1, 3, 2}, Params{Temperature: math.SmallestNonzeroFloat32}, 1},
		{"negative temperature is greedy", []float32{1, 3, 2}, Params{Temperature: -1}, 1},
		{"NaN temperature is greedy", []float32{1, 3, 2}, Params{Temperature: nan}, 1},
		{"extremes do not overflow", []float32{-math.MaxFloat32, math.MaxFloat32}, hot, 1},
	} {
		if got := Pick(c.logits, &c.params, 0, new(Scratch)); got != c.want {
			t.Errorf("%s: Pick = %d, want %d", c.name, got, c.want)
		}
	}
}

// top_k keeps what ties with the k-th; top_p is applied to what top_k left.
func TestFilterOrder(t *testing.T) {
	seen := func(logits []float32, p Params) map[int32]bool {
		m := map[int32]bool{}
		var s Scratch
		for pos := range int32(2000) {
			m[Pick(logits, &p, pos, &s)] = true
		}
		return m
	}
	even := []float32{0, 0, 0, 0, -20, -20}
	if got := seen(even, Params{Temperature: 1, TopK: 2}); len(got) != 4 {
		t.Errorf("top_k 2 over four that tie drew %v, want all four", got)
	}
	// Probabilities 0.4 0.3 0.2 0.1. After top_k 2 they are 4/7 and 3/7, so
	// top_p 0.5 keeps the first only; before it would have kept two.
	l := []float32{float32(math.Log(.4)), float32(math.Log(.3)), float32(math.Log(.2)), float32(math.Log(.1))}
	if got := seen(l, Params{Temperature: 1, TopK: 2, TopP: .5}); len(got) != 1 || !got[0] {
		t.Errorf("top_k 2, top_p 0.5 drew %v, want only 0", got)
	}
	if got := seen(l, Params{Temperature: 1, TopP: .5}); len(got) != 2 || !got[0] || !got[1] {
		t.Errorf("top_p 0.5 drew %v, want 0 and 1", got)
	}
}

// The share of each token over many positions is its probability (chi-square,
// fixed seeds), and choices and seeds draw independently.
func TestPickDistribution(t *testing.T) {
	l := []float32{2, 1, 0, -1, 1.5, 0.5, -2, 3}
	const draws = 40000
	for seed := range uint64(4) {
		p := Params{Seed: seed, Choice: uint32(seed), Temperature: 1.3}
		var got [8]int
		var s Scratch
		for pos := range int32(draws) {
			got[Pick(l, &p, pos, &s)]++
		}
		sum := 0.0
		for _, v := range l {
			sum += math.Exp(float64(v) / 1.3)
		}
		chi := 0.0
		for i, v := range l {
			want := draws * math.Exp(float64(v)/1.3) / sum
			chi += (float64(got[i]) - want) * (float64(got[i]) - want) / want
		}
		if chi > 24.3 { // 7 degrees of freedom, one in a thousand
			t.Errorf("seed %d: chi-square %.1f over %v", seed, chi, got)
		}
	}
	flat := make([]float32, 1000)
	p, q, r := Params{Temperature: 1}, Params{Temperature: 1, Choice: 1}, Params{Temperature: 1, Seed: 1 << 40}
	same := 0
	var s Scratch
	for pos := range int32(1000) {
		a, b, c := Pick(flat, &p, pos, &s), Pick(flat, &q, pos, &s), Pick(flat, &r, pos, &s)
		if a == b {
			same++
		}
		if a == c {
			same++
		}
	}
	if same > 12 { // 2 expected
		t.Errorf("choices and seeds agreed on %d of 2000 draws from 1000 tokens", same)
	}
}

func TestPickDoesNotAllocate(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	logits := make([]float32, 32000)
	for i := range logits {
		logits[i] = float32(r.NormFloat64())
	}
	var s Scratch
	for _, p := range []Params{{}, {Temperature: 1}, {Temperature: 1, TopK: 40}, {Temperature: 1, TopP: .9}, {Temperature: 1, TopK: 40, TopP: .9}} {
		Pick(logits, &p, 0, &s)
		if n := testing.AllocsPerRun(5, func() { Pick(logits, &p, 1, &s) }); n != 0 {
			t.Errorf("%+v: %v allocations per call", p, n)
		}
	}
}

// The known answers that the authors of Philox publish with Random123
// (kat_vectors, philox4x32 with 10 rounds).
func TestPhiloxKnownAnswers(t *testing.T) {
	const all = 0xffffffff
	for _, c := range []struct {
		ctr  [4]uint32
		key  [2]uint32
		want [4]uint32
	}{
		{want: [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{all, all, all, all}, [2]uint32{all, all}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{ // digits of pi
			[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0},
			[4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
		},
	} {
		if got := philox(c.key, c.ctr); got != c.want {
			t.Errorf("philox(%x, %x) = %x, want %x", c.key, c.ctr, got, c.want)
		}
	}
}

func BenchmarkPick128k(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	logits := make([]float32, 128256)
	for i := range logits {
		logits[i] = float32(r.NormFloat64() * 3)
	}
	for _, c := range []struct {
		name string
		p    Params
	}{{"greedy", Params{}}, {"temperature", Params{Temperature: .7}}, {"top_k", Params{Temperature: .7, TopK: 40}},
		{"top_p", Params{Temperature: .7, TopP: .9}}, {"top_k+top_p", Params{Temperature: .7, TopK: 40, TopP: .9}}} {
		b.Run(c.name, func(b *testing.B) {
			var s Scratch
			for i := range b.N {
				Pick(logits, &c.p, int32(i), &s)
			}
		})
	}
}

// The weights may add up to less than the draw, by rounding: then it is the last
// token that has one, and without any the best.
func TestDrawBehindTheLastWeight(t *testing.T) {
	weights := []float32{0, 0.25, 0, 0.75, 0}
	for rest, want := range map[float64]int32{0: 101, 0.25: 103, 0.999: 103, 1: 103, 1.5: 103} {
		if got := draw(weights, rest, 0, 100, 7); got != want {
			t.Errorf("draw at %g of 1: token %d, want %d", rest, got, want)
		}
	}
	if got := draw(make([]float32, 3), 0, 0, 100, 7); got != 7 {
		t.Errorf("draw without weights: token %d, want the best, 7", got)
	}
}

// A mask has the effect of -Inf in place of the logits outside it, after rules and before everything
// else.
func TestMask(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 9))
	var s, plain Scratch
	for i := range 400 {
		logits := make([]float32, 1+r.IntN(700))
		for j := range logits {
			logits[j] = float32(4 * r.NormFloat64())
		}
		bits := make([]uint64, r.IntN(2+len(logits)/64))
		for j := range bits {
			bits[j] = []uint64{0, math.MaxUint64, r.Uint64(), 1 << r.IntN(64)}[r.IntN(4)]
		}
		p := Params{Seed: uint64(i), Temperature: float32(r.IntN(3)), TopP: r.Float32(), TopK: int32(r.IntN(20)), MinP: r.Float32() * 0.1, Mask: bits}
		if r.IntN(2) == 0 {
			p.Controls = NewControls(Rules{Presence: 1, Bias: []Bias{{Token: int32(r.IntN(len(logits))), Value: 50}}}, nil, []int32{0})
		}
		want := append([]float32(nil), logits...)
		if p.Controls != nil {
			p.Controls.apply(want)
		}
		left := false
		for j := range want {
			if j>>6 < len(bits) && bits[j>>6]>>(j&63)&1 != 0 {
				left = true
			} else {
				want[j] = float32(math.Inf(-1))
			}
		}
		q := p
		q.Controls, q.Mask = nil, nil
		if p.Mask == nil {
			p.Mask = []uint64{}
		}
		got, expected := Pick(logits, &p, 7, &s), Pick(want, &q, 7, &plain)
		if got != expected {
			t.Fatalf("case %d: token %d, with -Inf in the logits %d", i, got, expected)
		}
		if left && (int(got)>>6 >= len(bits) || bits[got>>6]>>(got&63)&1 == 0) {
			t.Fatalf("case %d: token %d is outside the mask", i, got)
		}
	}
}
