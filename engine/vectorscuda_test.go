//go:build cgo && linux

package engine

import (
	"testing"

	kernels "github.com/tandem-serving/tandem/cuda"
)

// The kernels' host twin gives the vectors of transformers, also where steps overlap.
func TestVectorsOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"qwen3", "vectors/scores"} {
		b := vectorBench(t, LoadOptions{Model: name, Device: "cuda:0", CUDALibrary: twin, MaxSeqs: 4, MaxBatchedTokens: 40, MaxModelLen: 160})
		for _, c := range vectorGoldens(t)[name][:5] {
			for i, want := range [][]float32{c.Last, c.Mean, c.Scores, c.Logits} {
				if want == nil {
					continue
				}
				if v := vectorOf(t, b.Engine, c.Prompt, PoolLast+Pool(i), 1)(); len(v) != len(want) || cosine(v, want) < 0.99999 {
					t.Errorf("%s, %d tokens, pool %d: %v, want %v", name, len(c.Prompt), 1+i, v, want)
				}
			}
		}
	}
}
