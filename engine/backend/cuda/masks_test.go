//go:build cgo && linux

package cuda

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// The device draws only tokens of a mask, and the same as without one where an output has none.
func TestMasks(t *testing.T) {
	src, err := model.OpenDir("../../model/testdata/gqa-tied")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	m := sit(t, src, openGPU(t, Options{Limits: modelLimits}), backend.F32)
	a := &aheadRows{spec: kvSpec(src, backend.F32), tokens: []int32{5, 6}, params: []sample.Params{{Seed: 1, Temperature: 1}, {Seed: 2, Temperature: 1}}}
	draw := func(mask []uint64) []int32 {
		a.pos, a.params[0].Mask = 0, mask
		s := a.step([]int32{0, 1}, nil)
		if err := m.Step(s, nil); err != nil {
			t.Fatal(err)
		}
		return s.Sampled
	}
	free := draw(nil)
	for token := int32(0); token < 200; token += 19 {
		mask := make([]uint64, 4)
		mask[token/64] = 1 << (token % 64)
		if got := draw(mask); got[0] != token || got[1] != free[1] {
			t.Fatalf("drew %v where only token %d is allowed, and %d without a mask", got, token, free[1])
		}
	}
	all := []uint64{1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1}
	if got := draw(all); got[0] != free[0] {
		t.Errorf("drew %d under a mask of all tokens, %d without", got[0], free[0])
	}
	if n := len(m.Backend.(*CUDA).plans); n != 1 {
		t.Errorf("%d plans were recorded for steps with and without masks", n)
	}
}

// Under masks, with rules and without, the device draws engine/sample's tokens over
// vocabularies of real sizes. One plan serves steps with any number of masks.
func TestMasksAreTheDefinition(t *testing.T) {
	const rows = 8
	for i, vocab := range []int{32_003, 128_259, 151_937, 262_209} {
		if testing.Short() && i > 1 {
			continue
		}
		rng := rand.New(rand.NewPCG(uint64(vocab), 4))
		logits := make([]float32, rows*vocab)
		for i := range logits {
			logits[i] = float32(4 * rng.NormFloat64())
			if i/vocab == 3 { // many ties
				logits[i] = float32(math.Round(float64(logits[i])))
			}
		}
		dev := openGPU(t, Options{Limits: backend.Limits{Tokens: rows, Outputs: rows + 3, Seqs: 1, Blocks: 1}, draws: []int32{drawsAlone, 0}[i%2]})
		b := &bench{Backend: dev, rng: rng}
		table, err := b.Load(backend.Tensor{Name: "logits", DType: backend.F32, Shape: []int{rows, vocab}, Data: float32Bytes(logits)})
		b.must(err)
		x := b.buf(vocab)
		out, err := b.Alloc(backend.OutputRows, vocab)
		b.must(err)
		var s sample.Scratch
		masked := 0
		for n := range 3 {
			step := plainStep(rng, rows)
			for i := range rows {
				step.Tokens[i] = int32(i)
				p := sample.Params{Seed: rng.Uint64(), Temperature: []float32{0, 0.7, 1.3}[rng.IntN(3)]}
				switch rng.IntN(4) {
				case 0:
					p.TopK = 1 + rng.Int32N(50)
				case 1:
					p.TopP = 0.5 + 0.4*rng.Float32()
				}
				if n > 0 && (i+n)%4 > 0 {
					p.Mask = randomMask(rng, vocab, []float64{0, 1e-4, 0.01, 0.9}[(i+n)%4])
					masked++
				}
				switch (i + n) % 8 {
				case 2: // a mask ends before the vocabulary
					if p.Mask != nil {
						p.Mask = p.Mask[:vocab/128]
					}
				case 3: // one token, the last
					p.Mask = make([]uint64, (vocab+63)/64)
					p.Mask[(vocab-1)/64] = 1 << ((vocab - 1) % 64)
				case 5: // none is left
					p.Mask = []uint64{}
				case 6, 7: // penalties do not undo a mask
					r := sample.Rules{Repetition: 1.7, Presence: -30}
					var prompt []int32
					for range 300 {
						prompt = append(prompt, rng.Int32N(int32(vocab)))
						r.Bias = append(r.Bias, sample.Bias{Token: rng.Int32N(int32(vocab)), Value: 40})
					}
					if i%2 == 0 {
						for token := int32(n); token < 3000; token += 2 {
							r.Allowed = append(r.Allowed, token)
						}
					}
					r.BadWords = [][]int32{{prompt[0]}, {prompt[3]}}
					p.Controls = sample.NewControls(r, prompt, prompt[:7])
				}
				step.Outputs = append(step.Outputs, backend.Output{Row: int32(i), Position: int32(n), Params: p})
			}
			step.Sampled = make([]int32, rows)
			b.must(dev.Replay(backend.Key{Tokens: rows, Outputs: rows}, step, func() {
				b.Embed(x, table)
				b.Rows(out, x)
				b.Sample(out)
			}, nil))
			for i, got := range step.Sampled {
				if want := sample.Pick(logits[i*vocab:(i+1)*vocab], &step.Outputs[i].Params, int32(n), &s); got != want {
					t.Errorf("step %d, row %d of %d tokens: token %d drawn, want %d", n, i, vocab, got, want)
				}
			}
		}
		if len(dev.plans) != 1 || len(dev.step.controlled) > 0 || masked < rows {
			t.Errorf("%d plans, %d outputs drawn by the host, %d masks", len(dev.plans), len(dev.step.controlled), masked)
		}
		dev.Close()
	}
}
