package model

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// Weights of every stored format, multiplied as 8 bits, give nearly the probabilities that they give
// in float32, which other tests hold to those of transformers over the same weights. The mean
// divergence is over 600 positions.
func TestFastPath(t *testing.T) {
	const positions, most = 600, 0.005
	// Of random experts, rounding chooses others at some positions.
	bounds := map[string]float64{"deepseek-fp8": 0.05, "qwen3moe": 0.02}
	sources := []*Source{openCheckpoint(t, "deepseek-fp8")}
	folders, err := filepath.Glob("testdata/quantized/*")
	if err != nil || len(folders) < 11 {
		t.Fatal(folders, err)
	}
	for _, f := range folders {
		sources = append(sources, openCheckpoint(t, "quantized/"+filepath.Base(f)))
	}
	for _, name := range ggufCheckpoints {
		sources = append(sources, openGGUFCheckpoint(t, name))
	}
	for _, src := range sources {
		t.Run(src.Name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(31, 41))
			prompt := make([]int32, positions)
			for i := range prompt {
				prompt[i] = r.Int32N(int32(src.Config.Vocab))
			}
			mean := divergence(t, src, [][]int32{prompt})
			t.Logf("the probabilities diverge by %.5f", mean)
			bound, ok := bounds[src.Name]
			if !ok {
				bound = most
			}
			if !(mean <= bound) {
				t.Errorf("the probabilities diverge by %.5f, at most %g is allowed", mean, bound)
			}
		})
	}
}

// divergence returns the mean Kullback-Leibler divergence, over all positions of prompts, of the
// probabilities with weights of 8 bits from those with the stored weights in float32.
func divergence(t *testing.T, src *Source, prompts [][]int32) (mean float64) {
	t.Helper()
	wide := *src
	wide.ExpandIntegers()
	exact, fast := loadFamily(t, &wide, cpu.Auto, Options{}, nil), loadFamily(t, src, cpu.Auto, Options{Quantization: INT8}, nil)
	n := 0
	for _, prompt := range prompts {
		a, b := newSequenceWithin(exact, familyLimits, prompt, 1), newSequenceWithin(fast, familyLimits, prompt, 1)
		for a.done < len(prompt) {
			step := min(familyLimits.Outputs, len(prompt)-a.done)
			p, _ := a.step(t, step, span(a.done, step))
			q, _ := b.step(t, step, span(b.done, step))
			for i := range p {
				mean += kullbackLeibler(p[i], q[i])
				n++
			}
		}
	}
	return mean / float64(n)
}

// kullbackLeibler returns how far the probabilities of logits q diverge from those of p, in nats.
func kullbackLeibler(p, q []float32) (sum float64) {
	logs := func(logits []float32) float64 {
		total, most := 0.0, float64(logits[0])
		for _, v := range logits {
			most = max(most, float64(v))
		}
		for _, v := range logits {
			total += math.Exp(float64(v) - most)
		}
		return most + math.Log(total)
	}
	ofP, ofQ := logs(p), logs(q)
	for i := range p {
		a, b := float64(p[i])-ofP, float64(q[i])-ofQ
		sum += math.Exp(a) * (a - b)
	}
	return sum
}
