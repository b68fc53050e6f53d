package cpu

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/sample"
)

// samplers are the variants' kernels for rows of logits.
func samplers() map[string]sample.Kernels {
	all := map[string]sample.Kernels{}
	for _, name := range append(Variants(), AMX) {
		if name != Portable && Has(name) {
			all[name] = newSampler(name)
		}
	}
	return all
}

// likePortable holds every loop over a row to sample.Portable, bit for bit.
func likePortable(t *testing.T, name string, k sample.Kernels, logits []float32, by sample.Weighing, from int, x float32) {
	t.Helper()
	var p sample.Portable
	n := len(logits)
	fail := func(what string, got, want any) {
		t.Helper()
		t.Fatalf("%s: %s of %d logits by %+v, from %d, %v: %v, want %v", name, what, n, by, from, x, got, want)
	}
	if got, want := k.Argmax(logits), p.Argmax(logits); got != want {
		fail("Argmax", got, want)
	}
	if got, want := k.Above(logits, from, x), p.Above(logits, from, x); got != want {
		fail("Above", got, want)
	}
	if got, want := k.Count(logits, x), p.Count(logits, x); got != want {
		fail("Count", got, want)
	}
	blocks := (n + sample.Block - 1) / sample.Block
	row := func() ([]float32, []float64) { return make([]float32, n+1), make([]float64, blocks+1) }
	got, sums := row()
	want, wantSums := row()
	got[n], sums[blocks] = 7, 7 // what is behind them stays
	want[n], wantSums[blocks] = 7, 7
	k.Weigh(got[:n], sums[:blocks], logits, &by)
	p.Weigh(want[:n], wantSums[:blocks], logits, &by)
	for i := range got {
		if !sameBits(got[i], want[i]) {
			fail(fmt.Sprintf("weight %d", i), got[i], want[i])
		}
	}
	if !slices.Equal(sums, wantSums) {
		fail("sums", sums, wantSums)
	}
	clear(sums[:blocks])
	if k.Weigh(nil, sums[:blocks], logits, &by); !slices.Equal(sums, wantSums) {
		fail("sums alone", sums, wantSums)
	}
	edges := []float32{0, 1, math.Nextafter32(1, 2), float32(math.Inf(1)), math.SmallestNonzeroFloat32}
	if n > 0 {
		edges = append(edges, want[from%n], math.Nextafter32(want[from%n], 2), want[n-1])
	}
	for i, least := range edges {
		k.Mass(sums[:blocks], want[:n], least)
		if p.Mass(wantSums[:blocks], want[:n], least); !slices.Equal(sums, wantSums) {
			fail(fmt.Sprintf("Mass from %v on", least), sums, wantSums)
		}
		limit := max(least, edges[(i+3)%len(edges)])
		list, wantList := make([]float32, n), make([]float32, n)
		counts, wantCounts := make([]int32, blocks+1), make([]int32, blocks+1)
		counts[blocks], wantCounts[blocks] = 7, 7
		m := k.Between(list, counts[:blocks], sums[:blocks], want[:n], least, limit)
		wantM := p.Between(wantList, wantCounts[:blocks], wantSums[:blocks], want[:n], least, limit)
		if m != wantM || !slices.Equal(list, wantList) || !slices.Equal(counts, wantCounts) || !slices.Equal(sums, wantSums) {
			fail(fmt.Sprintf("Between %v and %v", least, limit), fmt.Sprint(m, list, counts, sums), fmt.Sprint(wantM, wantList, wantCounts, wantSums))
		}
		// Where they are, too.
		copy(list, want[:n])
		if m := k.Between(list, nil, nil, list, least, limit); m != wantM || !slices.Equal(list[:m], wantList[:m]) {
			fail(fmt.Sprintf("Between %v and %v in place", least, limit), list[:m], wantList[:wantM])
		}
	}
}

func sameBits(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }

// oddLogits are rows of all kinds: smooth, tied, flat, with the values that
// arithmetic gone wrong produces.
func oddLogits(r *rand.Rand, n int) []float32 {
	odd := []float32{float32(math.NaN()), float32(math.Inf(-1)), float32(math.Copysign(0, -1)), 0, -math.MaxFloat32, math.MaxFloat32,
		math.SmallestNonzeroFloat32, float32(math.Inf(1))}
	l, kind, spread := make([]float32, n), r.IntN(8), math.Exp(8*r.Float64()-4)
	level := float32(r.NormFloat64() * spread)
	for i := range l {
		switch kind {
		case 0, 1:
			l[i] = float32(r.NormFloat64() * spread)
		case 2:
			l[i] = float32(r.IntN(5)) - 2
		case 3:
			l[i] = 1.25
		case 4:
			if l[i] = float32(r.NormFloat64() * spread); r.IntN(6) == 0 {
				l[i] = odd[r.IntN(len(odd)-r.IntN(2))]
			}
		case 5: // denormal
			l[i] = math.Float32frombits(r.Uint32() & 0x807fffff)
		case 6: // nothing to draw, or little
			if l[i] = odd[r.IntN(2)]; r.IntN(8) == 0 {
				l[i] = level
			}
		case 7: // next to each other
			if l[i] = level; r.IntN(3) > 0 {
				l[i] = math.Nextafter32(level, odd[4+r.IntN(2)])
			}
		}
	}
	return l
}

func oddWeighing(r *rand.Rand, logits []float32) sample.Weighing {
	by := sample.Weighing{Scale: float32(math.Exp(2 * r.NormFloat64())), Lowest: float32(math.Inf(-1))}
	if len(logits) > 0 {
		by.Max = logits[sample.Portable{}.Argmax(logits)]
	}
	switch r.IntN(6) {
	case 0:
		by.Scale = 0
	case 1:
		by.Scale = math.MaxFloat32
	case 2:
		by.Lowest = by.Max - float32(r.Float64()*5)
	case 3:
		by.MinP = float32(r.Float64() * r.Float64())
	case 4:
		by.Max += float32(r.ExpFloat64()) // part of a row whose largest logit is elsewhere
	}
	return by
}

// TestSamplers holds the C kernels to the portable ones.
func TestSamplers(t *testing.T) {
	all := samplers()
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 51))
		n := r.IntN(70)
		switch seed % 4 {
		case 0:
			n = []int{511, 512, 513, 1024, 1039, 1040, 1041}[r.IntN(7)]
		case 1:
			n = r.IntN(3000)
		}
		logits := oddLogits(r, n)[min(n, r.IntN(4)):] // of any alignment
		by, from := oddWeighing(r, logits), r.IntN(len(logits)+1)
		x := float32(r.NormFloat64())
		if len(logits) > 0 && seed%2 == 0 {
			x = logits[r.IntN(len(logits))]
		}
		for name, k := range all {
			likePortable(t, name, k, logits, by, from, x)
		}
	}
}

// FuzzSamplers is TestSamplers with any bits.
func FuzzSamplers(f *testing.F) {
	f.Add([]byte("\x00\x00\x80\x3f\x00\x00\xc0\x7f\x00\x00\x80\xff"), float32(0), float32(1.5), float32(-1), float32(0.1), float32(0), uint16(0), uint16(700))
	f.Add([]byte("\x00\x00\x80\x7f\x00\x00\x00\x80"), float32(3), float32(0), float32(math.Inf(-1)), float32(0), float32(-0.5), uint16(1), uint16(3))
	all := samplers()
	f.Fuzz(func(t *testing.T, data []byte, top, scale, lowest, minP, x float32, from, repeat uint16) {
		by := sample.Weighing{Max: top, Scale: scale, Lowest: lowest, MinP: minP}
		if !(math.Abs(float64(top)) <= math.MaxFloat32) || !(scale >= 0 && scale <= math.MaxFloat32) || minP != minP {
			return // what Weighing excludes
		}
		var logits []float32
		for range 1 + int(repeat)%800/max(1, len(data)/4) {
			for i := 0; i+4 <= len(data); i += 4 {
				// Pick weighs by the largest logit.
				if v := math.Float32frombits(binary.LittleEndian.Uint32(data[i:])); !(v > top) {
					logits = append(logits, v)
				}
			}
		}
		for name, k := range all {
			likePortable(t, name, k, logits, by, int(from)%(len(logits)+1), x)
		}
	})
}

// hostileParams asks for draws of every kind, also by numbers at the ends of their range.
func hostileParams(r *rand.Rand, n int) sample.Params {
	one := func(values ...float32) float32 { return values[r.IntN(len(values))] }
	p := sample.Params{Seed: r.Uint64(), Choice: r.Uint32N(3), Temperature: float32(math.Exp(r.NormFloat64()))}
	if r.IntN(8) == 0 {
		p.Temperature = one(0, math.SmallestNonzeroFloat32, 1e-38, 1e-6, 0.01, 1e6, 1e38, math.MaxFloat32)
	}
	if r.IntN(3) == 0 {
		p.TopK = int32(r.IntN(n + 3))
	} else if r.IntN(8) == 0 {
		p.TopK = []int32{-1, 0, 1, int32(n) - 1, int32(n), math.MaxInt32}[r.IntN(6)]
	}
	if r.IntN(2) == 0 {
		p.TopP = r.Float32()
	} else if r.IntN(8) == 0 {
		p.TopP = one(0, math.SmallestNonzeroFloat32, 1e-6, math.Nextafter32(1, 0), 1)
	}
	if r.IntN(4) == 0 {
		p.MinP = r.Float32() * r.Float32()
	} else if r.IntN(8) == 0 {
		p.MinP = one(0, math.SmallestNonzeroFloat32, 1e-20, math.Nextafter32(1, 0), 1)
	}
	return p
}

// mayDraw returns why p forbids the token, or "": a reference in float64 without sorting. It
// forbids only tokens that are outside by more than weights in float32 may be off.
func mayDraw(logits []float32, p *sample.Params, token int32) string {
	at := func(i int) float32 { // NaN counts as -Inf
		if logits[i] != logits[i] {
			return float32(math.Inf(-1))
		}
		return logits[i]
	}
	best := 0
	for i := range logits {
		if at(i) > at(best) {
			best = i
		}
	}
	scale := math.Log2E / float64(p.Temperature)
	if math.IsInf(float64(at(best)), 0) || !(p.Temperature > 0) || math.IsInf(float64(float32(scale)), 1) {
		if int(token) != best {
			return fmt.Sprintf("the choice is greedy: token %d", best)
		}
		return ""
	}
	if int(token) == best { // has the weight 1, whatever p is
		return ""
	}
	// The weight of a token, and by how much it may be off.
	weight := func(i int) (w, off float64) {
		x := (float64(at(i)) - float64(at(best))) * scale
		w = math.Exp2(x)
		return w, w * (4e-7 - 4e-7*x)
	}
	w, off := weight(int(token))
	switch {
	case !(w+off > 0x1p-90):
		return "its weight is zero"
	case w+off < float64(p.MinP):
		return "its weight is below min_p"
	}
	better, ahead, all := 0, 0.0, 0.0 // ahead: at least, all: at most
	for i := range logits {
		if at(i) > at(int(token)) {
			better++
		}
	}
	if p.TopK > 0 && better >= int(p.TopK) {
		return "better tokens are as many as top_k"
	}
	kept := lowestKept(logits, int(p.TopK))
	for i := range logits {
		v, o := weight(i)
		if !(v+o >= max(float64(p.MinP), 0x1p-90)) || !(at(i) >= kept) {
			continue
		}
		all += v + o
		if v-o > w+off || at(i) == at(int(token)) && i < int(token) {
			ahead += v - o
		}
	}
	if p.TopP > 0 && p.TopP < 1 && ahead >= float64(p.TopP)*all {
		return "better tokens reach top_p"
	}
	return ""
}

// lowestKept returns the k-th largest logit, or -Inf if all are kept.
func lowestKept(logits []float32, k int) float32 {
	sorted := slices.DeleteFunc(slices.Clone(logits), func(v float32) bool { return v != v })
	if k <= 0 || k >= len(sorted) {
		return float32(math.Inf(-1))
	}
	slices.Sort(sorted)
	return sorted[len(sorted)-k]
}

// likeReference draws a token on every variant and holds the variants to each other, and
// the token to what the parameters allow.
func likeReference(t *testing.T, variants map[string]*sample.Scratch, logits []float32, p *sample.Params, position int32) {
	t.Helper()
	token := sample.Pick(logits, p, position, variants[Portable])
	for name, s := range variants {
		if other := sample.Pick(logits, p, position, s); other != token {
			t.Fatalf("position %d, %d logits, %+v: %s draws %d, portable %d", position, len(logits), *p, name, other, token)
		}
	}
	if why := mayDraw(logits, p, token); why != "" {
		t.Fatalf("position %d, %d logits, %+v: token %d is drawn, but %s", position, len(logits), *p, token, why)
	}
}

// scratches are memory of draws by each variant.
func scratches() map[string]*sample.Scratch {
	all := map[string]*sample.Scratch{Portable: {}}
	for name, k := range samplers() {
		all[name] = &sample.Scratch{Kernels: k}
	}
	return all
}

// FuzzDraws is TestDraws with any bits.
func FuzzDraws(f *testing.F) {
	row := func(values ...float32) (data []byte) {
		for _, v := range values {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
		}
		return data
	}
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	f.Add(row(1, 2, 2, 3), uint64(1), int32(0), float32(1), float32(0.8), float32(0.05), int32(3), uint16(0))
	f.Add(row(1.5), uint64(2), int32(5), float32(0.7), float32(0.5), float32(0), int32(0), uint16(799))
	f.Add(row(nan, -inf, 0, 1e-40), uint64(3), int32(9), float32(1e-6), float32(1), float32(1), int32(1), uint16(600))
	f.Add(row(nan, -inf), uint64(4), int32(1), float32(1), float32(0.9), float32(0), int32(0), uint16(20))
	f.Add(row(3, inf, inf), uint64(5), int32(1), float32(2), float32(0.9), float32(0.1), int32(0), uint16(3))
	f.Add(row(-math.MaxFloat32, math.MaxFloat32, 0), uint64(6), int32(1), float32(math.MaxFloat32), float32(0.3), float32(0), int32(0), uint16(40))
	all := scratches()
	f.Fuzz(func(t *testing.T, data []byte, seed uint64, position int32, temperature, topP, minP float32, topK int32, repeat uint16) {
		if minP != minP {
			return // no request may have it
		}
		var logits []float32
		for range 1 + int(repeat)%800/max(1, len(data)/4) {
			for i := 0; i+4 <= len(data); i += 4 {
				logits = append(logits, math.Float32frombits(binary.LittleEndian.Uint32(data[i:])))
			}
		}
		if len(logits) == 0 {
			return
		}
		likeReference(t, all, logits, &sample.Params{Seed: seed, Temperature: temperature, TopP: topP, MinP: minP, TopK: topK}, position)
	})
}

// TestDraws: every variant draws the portable tokens, which the parameters allow, and has
// the portable log-probabilities: 50,000 draws of all kinds; as a soak 10 million.
func TestDraws(t *testing.T) {
	draws, seed := 50_000, uint64(0)
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		draws = 10_000_000
	case raceEnabled: // one goroutine draws
		draws = 5_000
	}
	all, variants := samplers(), scratches()
	t.Log("variants", slices.Sorted(maps.Keys(variants)))
	began, sizes := time.Now(), map[int]int{}
	for done := 0; done < draws; seed++ {
		r := rand.New(rand.NewPCG(seed, 52))
		n, each := 1+r.IntN(40), 50
		switch {
		case seed%2000 == 1: // a vocabulary as they are
			n, each = 151_936, 10
		case seed%500 == 0: // so many that the threshold of top_p is guessed from some
			n = 8192 + r.IntN(20_000)
		case seed%20 == 0:
			n = 1 + r.IntN(2000)
		}
		logits := oddLogits(r, n)
		for range each {
			p := hostileParams(r, n)
			likeReference(t, variants, logits, &p, int32(done))
			done++
		}
		sizes[bits.Len(uint(n))] += each
		token := int32(r.IntN(n))
		own, rank, top := sample.LogProbs(sample.Portable{}, logits, token, 20, nil, nil)
		for name, k := range all {
			o, ra, to := sample.LogProbs(k, logits, token, 20, nil, nil)
			same := func(a, b sample.Top) bool { return a.Token == b.Token && sameBits(a.LogProb, b.LogProb) }
			if !sameBits(o, own) && own == own || ra != rank || own == own && !slices.EqualFunc(to, top, same) {
				t.Fatalf("seed %d: %s has %v, rank %d, %v of token %d of %d, portable %v, %d, %v", seed, name, o, ra, to, token, n, own, rank, top)
			}
		}
	}
	t.Logf("seeds 0 to %d: %d draws, by bits of the number of logits %v, in %v", seed-1, draws, sizes, time.Since(began).Round(time.Second))
}
