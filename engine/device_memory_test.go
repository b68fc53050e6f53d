package engine

import (
	"errors"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
)

// The KV memory of a GPU is what --gpu-memory-utilization allows, less the memory in use, the
// weights, a step and the graphs. Adapters have twice as many graphs and eager steps none. If
// nothing is left, the error has these numbers.
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
	if got, err := c.kvMemory(&base, 70*gib); !errors.Is(err, ErrOption) {
		t.Errorf("weights that leave nothing: %d bytes, %v", got, err)
	}
}
