package engine

import (
	"errors"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
	"github.com/tandem-serving/tandem/engine/model"
)

// The KV memory of a GPU is what --gpu-memory-utilization allows, less the memory in use, the
// weights, a step and the graphs. Adapters have twice as many graphs and eager steps none. Layers
// with a state take more of a step. If nothing is left, the error has these numbers.
func TestGPUMemoryForKV(t *testing.T) {
	const gib = 1 << 30
	c := choice{gpu: true, total: 80 * gib, free: 78 * gib}
	base := LoadOptions{GPUMemory: 0.9, BLAS: "none"}
	step := cuda.AdapterStepBytes(8, backend.Limits{Outputs: extraOutputs})
	for name, x := range map[string]struct {
		change func(o *LoadOptions)
		want   int64
	}{
		"graphs":   {func(*LoadOptions) {}, 72*gib - 2*gib - 20*gib - 768<<20},
		"eager":    {func(o *LoadOptions) { o.EnforceEager = true }, 72*gib - 2*gib - 20*gib - 256<<20},
		"adapters": {func(o *LoadOptions) { o.Adapters = Adapters{Places: 2, Rank: 8} }, 72*gib - 2*gib - 20*gib - 1280<<20 - step},
	} {
		o := base
		x.change(&o)
		if got, err := c.kvMemory(&o, 20*gib); err != nil || got != x.want {
			t.Errorf("%s: %d bytes, %v, want %d", name, got, err, x.want)
		}
	}
	config, err := model.OpenConfig("model/testdata/qwen3-next")
	if err != nil {
		t.Fatal(err)
	}
	limits := backend.Limits{Tokens: 1000, Outputs: extraOutputs}
	states := cuda.DeltaStepBytes(config.DeltaSpec(), limits) // of two key heads, with two value heads each
	step = config.StepBytes(limits) + extraOutputs*cuda.OutputBytes(config.Vocab) + states
	base.MaxBatchedTokens = limits.Tokens
	if got, err := c.kvMemory(&base, 20*gib, &config); err != nil || got != 72*gib-2*gib-20*gib-768<<20-step || states != 1000*4*2*(2*128+4) {
		t.Errorf("with states: %d bytes, %v; a step takes %d, %d of them for states", got, err, step, states)
	}
	if got, err := c.kvMemory(&base, 70*gib); !errors.Is(err, ErrOption) {
		t.Errorf("weights that leave nothing: %d bytes, %v", got, err)
	}
}
