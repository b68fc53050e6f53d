//go:build cgo && linux

package cuda

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	kernels "github.com/tandem-serving/tandem/cuda"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/sample"
)

// manyDraws returns the number of draws that drawMany compares and the time after which it ends
// early. The number is 0 outside a soak and without a GPU.
func manyDraws() (draws int, limit time.Duration) {
	soak, gpu := os.Getenv("TANDEM_SOAK") != "", os.Getenv("TANDEM_CUDA_LIBRARY") != ""
	switch {
	case soak && os.Getenv("TANDEM_CUDA_SANITIZE") != "":
		return 100_000, math.MaxInt64
	case soak:
		return 10_000_000, math.MaxInt64
	case gpu: // a part of the 90 s that cuda/gpu_hour.py gives each test
		return 1_000_000, 10 * time.Second
	}
	return 0, 0
}

// drawMany compares the device's tokens and those of each C variant with engine/sample's. A
// batch is one vocabulary on one device. Every second batch draws by a single block of threads alone. The
// same TANDEM_SOAK_SEED gives the same draws. On the host most batches are drawn by the
// narrow twin, because 10 million draws by 256 emulated threads a block take hours.
func drawMany(t *testing.T, draws int, limit time.Duration) {
	seed := uint64(1)
	if text := os.Getenv("TANDEM_SOAK_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("TANDEM_SOAK_SEED=%s: %v", text, err)
		}
	}
	var variants []string
	var native []*sample.Scratch
	for _, name := range cpu.Variants() {
		if name == cpu.Portable { // is sample.Portable
			continue
		}
		c, err := cpu.New(cpu.Options{Limits: backend.Limits{Tokens: 1, Outputs: 1, Seqs: 1, Blocks: 1}, Threads: 1, Kernels: name})
		if err != nil {
			t.Fatal(err)
		}
		variants, native = append(variants, name), append(native, &sample.Scratch{Kernels: c.Kernels()})
		c.Close()
	}
	narrow := libraryPath
	if os.Getenv("TANDEM_CUDA_LIBRARY") == "" {
		sanitizers := ""
		if os.Getenv("TANDEM_CUDA_SANITIZE") != "" {
			sanitizers = kernels.Sanitizers
		}
		var err error
		if narrow, err = kernels.NarrowTwin("../../..", sanitizers); err != nil {
			t.Fatal(err)
		}
	}
	byForm, byBits := map[int32]int{}, map[int]int{}
	began, done, full := time.Now(), 0, 0
	for batch := uint64(0); done < draws && time.Since(began) < limit; batch++ {
		form := []int32{drawsAlone, 0}[batch%2]
		d, library := newDrawBatch(rand.New(rand.NewPCG(seed, batch)), batch/2), narrow
		if d.full {
			library = libraryPath
		}
		d.run(t, library, form, fmt.Sprintf("seed %d, batch %d, form %d", seed, batch, form), variants, native)
		n, size := d.outputs*d.steps, bits.Len(uint(d.vocab))
		byForm[form], byBits[size] = byForm[form]+n, byBits[size]+n
		if d.full {
			full += n
		}
		if (done+n)/1_000_000 > done/1_000_000 {
			t.Logf("%d draws in %v", done+n, time.Since(began).Round(time.Second))
		}
		done += n
	}
	if narrow == libraryPath {
		full = done
	}
	t.Logf("note: seed %d: %d draws of Go, C (%s) and the device (%d alone, %d by slices; %d in blocks of 256 threads), by bits of the vocabulary's size %v, in %v",
		seed, done, strings.Join(variants, ", "), byForm[drawsAlone], byForm[0], full, byBits, time.Since(began).Round(time.Second))
}

// drawBatch is a number of steps whose outputs each draw from one of some rows of logits.
type drawBatch struct {
	rng                         *rand.Rand
	vocab, rows, outputs, steps int
	full                        bool      // in blocks of 256 threads, on the host too
	logits                      []float32 // [rows, vocab]
	masks                       [][]uint64
}

// newDrawBatch returns the nth batch. Of 500 batches two have a vocabulary of 151,936 or 262,144
// tokens, ten one of 8,193 to 28,192, 25 one of 513 to 8,512 and the others one of at most 512.
// A draw from a larger vocabulary takes longer, so that such batches have fewer steps.
func newDrawBatch(rng *rand.Rand, nth uint64) *drawBatch {
	d := &drawBatch{rng: rng, rows: 100, outputs: 50, steps: 40}
	switch {
	case nth%250 == 3:
		d.vocab, d.rows, d.outputs, d.steps = []int{151_936, 262_144}[nth/250%2], 16, 10, 20
	case nth%50 == 4:
		d.vocab, d.rows, d.steps = 8193+rng.IntN(20_000), 50, 5
	case nth%20 == 1:
		d.vocab, d.steps = 513+rng.IntN(8000), 10
	case nth%3 > 0:
		d.vocab = 1 + rng.IntN(64)
	default:
		d.vocab = 1 + rng.IntN(512)
	}
	d.full = nth%100 == 2 || nth%100 == 4 || d.vocab > 32_000
	for range d.rows {
		d.logits = append(d.logits, manyLogits(rng, d.vocab)...)
	}
	for _, share := range []float64{0, 2 / float64(d.vocab), 0.02, 0.5, 0.95} {
		mask := randomMask(rng, d.vocab, share)
		d.masks = append(d.masks, mask, mask[:rng.IntN(len(mask)+1)]) // and one that ends before the vocabulary
	}
	return d
}

// manyLogits returns a row: smooth, tied, flat, of denormal numbers, one unit in the last place
// apart, or with NaN and infinities.
func manyLogits(rng *rand.Rand, vocab int) []float32 {
	row, kind, spread := make([]float32, vocab), rng.IntN(8), math.Exp(6*rng.Float64()-3)
	inf := math.Inf(1)
	level := float32(rng.NormFloat64() * spread)
	for i := range row {
		v := rng.NormFloat64() * spread
		switch row[i] = float32(v); kind {
		case 0:
			row[i] = float32(math.Round(v))
		case 1:
			row[i] = level
		case 2:
			if rng.IntN(5) == 0 {
				row[i] = float32([]float64{math.NaN(), -inf, 0, math.Copysign(0, -1), -math.MaxFloat32}[rng.IntN(5)])
			}
		case 3:
			if row[i] = float32(-inf); rng.IntN(8) == 0 {
				row[i] = []float32{level, float32(math.NaN()), float32(inf), math.MaxFloat32}[max(0, rng.IntN(40)-36)]
			}
		case 4:
			row[i] = math.Float32frombits(rng.Uint32() & 0x807fffff)
		case 5:
			if row[i] = level; rng.IntN(3) > 0 {
				row[i] = math.Nextafter32(level, float32(inf))
			}
		}
	}
	return row
}

// params returns how an output draws, with numbers at the ends of their ranges, too.
func (d *drawBatch) params() sample.Params {
	rng := d.rng
	one := func(values ...float32) float32 { return values[rng.IntN(len(values))] }
	p := sample.Params{Seed: rng.Uint64(), Choice: rng.Uint32N(3), Temperature: float32(math.Exp(rng.NormFloat64()))}
	if rng.IntN(8) == 0 {
		p.Temperature = one(0, math.SmallestNonzeroFloat32, 1e-6, 0.01, 1e6, math.MaxFloat32)
	}
	if rng.IntN(3) == 0 {
		p.TopK = rng.Int32N(int32(min(d.vocab, 5000)) + 3)
	}
	switch rng.IntN(16) {
	case 0:
		p.TopP = one(math.SmallestNonzeroFloat32, 1e-6, math.Nextafter32(1, 0), 1)
	case 1, 2, 3, 4, 5, 6, 7:
		p.TopP = rng.Float32()
	}
	switch rng.IntN(16) {
	case 0:
		p.MinP = one(math.SmallestNonzeroFloat32, 1e-20, math.Nextafter32(1, 0), 1)
	case 1, 2, 3, 4:
		p.MinP = rng.Float32() * rng.Float32()
	}
	if rng.IntN(4) == 0 {
		p.Controls = d.controls()
	}
	if rng.IntN(4) == 0 {
		p.Mask = d.masks[rng.IntN(len(d.masks))]
	}
	return p
}

// controls returns rules of some kinds, for a prompt and an output that share tokens.
func (d *drawBatch) controls() *sample.Controls {
	rng := d.rng
	some := func(n int) []int32 {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = rng.Int32N(int32(d.vocab))
		}
		return tokens
	}
	prompt, output := some(rng.IntN(20)), some(1+rng.IntN(4))
	output = append(output, output[:rng.IntN(len(output))]...)
	var r sample.Rules
	if rng.IntN(2) == 0 {
		r.Repetition = 0.5 + rng.Float32()
	}
	if rng.IntN(2) == 0 {
		r.Presence, r.Frequency = 4*rng.Float32()-2, 4*rng.Float32()-2
	}
	for _, token := range some(rng.IntN(6)) {
		r.Bias = append(r.Bias, sample.Bias{Token: token, Value: 20*rng.Float32() - 10})
	}
	if rng.IntN(4) == 0 {
		r.Allowed = some(1 + rng.IntN(30))
	}
	if rng.IntN(4) == 0 {
		r.BadWords = [][]int32{some(1), {output[len(output)-1], rng.Int32N(int32(d.vocab))}}
	}
	if rng.IntN(4) == 0 {
		r.MinTokens, r.Stops = rng.IntN(8), some(3)
	}
	return sample.NewControls(r, prompt, output)
}

// run draws the batch and ends the test at the first token that differs.
func (d *drawBatch) run(t *testing.T, library string, form int32, what string, variants []string, native []*sample.Scratch) {
	t.Helper()
	dev, err := New(Options{Library: library, Limits: backend.Limits{Tokens: d.outputs, Outputs: d.outputs, Seqs: 1, Blocks: 1}, draws: form})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	b := &bench{Backend: dev, rng: d.rng}
	table, err := b.Load(backend.Tensor{Name: "logits", DType: backend.F32, Shape: []int{d.rows, d.vocab}, Data: float32Bytes(d.logits)})
	b.must(err)
	x := b.buf(d.vocab)
	out, err := b.Alloc(backend.OutputRows, d.vocab)
	b.must(err)
	var portable sample.Scratch
	for n := range d.steps {
		step := plainStep(d.rng, d.outputs)
		for i := range d.outputs {
			step.Tokens[i] = d.rng.Int32N(int32(d.rows))
			step.Outputs = append(step.Outputs, backend.Output{Row: int32(i), Position: d.rng.Int32N(1 << 20), Params: d.params()})
		}
		step.Sampled = make([]int32, d.outputs)
		b.must(dev.Replay(backend.Key{Tokens: d.outputs, Outputs: d.outputs}, step, func() {
			b.Embed(x, table)
			b.Rows(out, x)
			b.Sample(out)
		}, nil))
		if host := dev.step.controlled; len(host) > 0 {
			t.Fatalf("%s: outputs %v of step %d are drawn by the host", what, host, n)
		}
		for i := range step.Outputs {
			o, row := &step.Outputs[i], int(step.Tokens[i])
			logits := d.logits[row*d.vocab : (row+1)*d.vocab]
			want := sample.Pick(logits, &o.Params, o.Position, &portable)
			tokens := []int32{step.Sampled[i]}
			for _, s := range native {
				tokens = append(tokens, sample.Pick(logits, &o.Params, o.Position, s))
			}
			if at := slices.IndexFunc(tokens, func(token int32) bool { return token != want }); at >= 0 {
				t.Fatalf("%s, step %d, output %d of %d tokens, %+v: %s draws %d, Go %d",
					what, n, i, d.vocab, o.Params, append([]string{"the device"}, variants...)[at], tokens[at], want)
			}
		}
	}
}
