package cpu

import (
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// trials returns n, many more in a soak, and an eighth under the race detector: it watches what
// goroutines share, which is the same for all seeds, and the references in Go take ten times as long.
func trials(n int) uint64 {
	if os.Getenv("TANDEM_SOAK") == "1" {
		n *= 50
	}
	if raceEnabled {
		n = (n + 7) / 8
	}
	return uint64(n)
}

// TestBitIdentity: the same token at the same position has the same logits,
// bit for bit, alone, batched and chunked in any way, on any number of threads.
func TestBitIdentity(t *testing.T) {
	for _, kernels := range Variants() {
		t.Run(kernels, func(t *testing.T) {
			steps, widest, long := 0, 0, 0
			for seed := range max(8, trials(8)) { // fewer have no long sequence
				rng := rand.New(rand.NewPCG(seed, 7))
				s := randomShape(rng)
				if kernels == Portable {
					s.setContext(90) // it has no segments
				}
				seqs := sequences(s, rng, 1, 1+rng.IntN(20), 16, s.context/3+rng.IntN(s.context*2/3))
				long = max(long, len(seqs[3].tokens))
				reference := clone(seqs)
				newNet(t, s, Options{Kernels: kernels, Threads: 1}, seed).alone(t, reference)
				for range 2 {
					n := newNet(t, s, Options{Kernels: kernels, Threads: 1 + rng.IntN(4)}, seed)
					got := clone(seqs)
					k, w := n.mixed(t, got, rng)
					steps, widest = steps+k, max(widest, w)
					if d := firstDifference(reference, got); d != "" {
						t.Fatalf("seed %d, %+v, %d threads: %s", seed, s, n.opts.Threads, d)
					}
				}
			}
			if widest < 3 {
				t.Errorf("no step held 3 sequences: widest %d of %d steps", widest, steps)
			}
			if long < 300 && kernels != Portable {
				t.Errorf("no sequence was longer than an attention segment: %d", long)
			}
		})
	}
}

// TestLinearBits: a row's results are the same bits alone and in a batch, on any
// number of threads, with and without a blocked reduction; and AVX2 gives those
// of AVX-512.
func TestLinearBits(t *testing.T) {
	for seed := range trials(12) {
		results := make(map[string][]float32)
		for _, kernels := range Variants() {
			rng := rand.New(rand.NewPCG(seed, 4))
			rows, in, out := 2+rng.IntN(20), 1+rng.IntN(200), 1+rng.IntN(150)
			dt := []backend.DType{backend.F32, backend.BF16, backend.INT8, backend.INT4, backend.FP8}[rng.IntN(5)]
			switch seed % 3 {
			case 0:
				in += 1023 + rng.IntN(3000)
			case 1:
				rows += 90 + rng.IntN(20)
			}
			b := newRig(t, kernels, rows, rng)
			x, xs := b.buf(backend.TokenRows, in, 1)
			y, ys := b.buf(backend.TokenRows, out, 1)
			w, _ := b.load(dt, out, in)
			bias, _ := b.load(backend.BF16, out)
			record := func() { b.Linear(y, x, w, bias) }
			b.once(nil, record)
			batch := slices.Clone(ys)
			results[kernels] = batch
			for r := range rows {
				copy(xs, xs[r*in:(r+1)*in])
				b.once(&backend.Step{Tokens: make([]int32, 1), Positions: make([]int32, 1)}, record)
				for n, v := range batch[r*out : (r+1)*out] {
					if math.Float32bits(v) != math.Float32bits(ys[n]) {
						t.Fatalf("%s, seed %d: [%d, %d] is %g in a batch of %d rows of %d, %g alone",
							kernels, seed, r, n, v, rows, in, ys[n])
					}
				}
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, kernels := range Variants() {
			if a, b := results[AVX2], results[kernels]; a != nil && kernels != Generic && kernels != Portable && !slices.Equal(a, b) {
				t.Errorf("seed %d: avx2 and %s differ", seed, kernels)
			}
		}
	}
}

// TestFaultBatchOrder: the knob makes results depend on the batch, so that the
// comparison above would see it, and leaves them right to rounding.
func TestFaultBatchOrder(t *testing.T) {
	for i, kernels := range slices.Repeat(Variants(), 3) {
		rng := rand.New(rand.NewPCG(3, 3))
		s := randomShape(rng)
		s.setContext(90)
		s.dtype = []backend.DType{backend.BF16, backend.INT8, backend.FP8}[i/len(Variants())]
		s.hidden, s.inner = 150, 170 // several groups in each half
		seqs := sequences(s, rng, 30, 40)
		reference, got := clone(seqs), clone(seqs)
		o := Options{Kernels: kernels, FaultBatchOrder: true}
		newNet(t, s, o, 1).alone(t, reference)
		newNet(t, s, o, 1).mixed(t, got, rng)
		if firstDifference(reference, got) == "" {
			t.Errorf("%s, %s: the batch-dependent reduction went unseen", kernels, s.dtype)
		}
		most := 1e-3
		if s.dtype.Quantized() {
			most = 0.5
		}
		if worst := worstDifference(reference, got); worst > most {
			t.Errorf("%s: the fault moved a logit by %g", kernels, worst)
		}
	}
}

// TestVariantsAgree: every variant gives portable's logits to rounding, and
// AVX2 those of AVX-512 to the bit.
func TestVariantsAgree(t *testing.T) {
	for seed := range trials(6) {
		rng := rand.New(rand.NewPCG(seed, 9))
		s := randomShape(rng)
		// Without rounding of KV in between, which could widen a last bit.
		s.kvType = backend.F32
		seqs := sequences(s, rng, 25, 60)
		results := make(map[string][]*sequence)
		for _, kernels := range Variants() {
			got := clone(seqs)
			newNet(t, s, Options{Kernels: kernels, Threads: 2}, seed).mixed(t, got, rng)
			results[kernels] = got
		}
		for kernels, got := range results {
			most := 2e-4
			if s.dtype.Quantized() { // a last bit may be another whole number of 8 bits
				most = 0.5
			}
			if worst := worstDifference(results[Portable], got); worst > most {
				t.Errorf("seed %d, %+v: %s differs from portable by %g", seed, s, kernels, worst)
			}
		}
		for _, kernels := range Variants() {
			if a := results[AVX2]; a != nil && kernels != Generic && kernels != Portable {
				if d := firstDifference(a, results[kernels]); d != "" {
					t.Errorf("seed %d, %+v: avx2 and %s: %s", seed, s, kernels, d)
				}
			}
		}
	}
}

func worstDifference(a, b []*sequence) float64 {
	worst := 0.0
	for i := range a {
		for pos := range a[i].logits {
			for v, x := range a[i].logits[pos] {
				d := math.Abs(float64(x) - float64(b[i].logits[pos][v]))
				if !(d <= worst) {
					worst = d
				}
			}
		}
	}
	return worst
}
