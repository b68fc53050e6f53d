package engine

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/memory"
)

// Integers of a checkpoint take their own memory and have a numerics class of their own. --dtype
// float32 expands them, and a plan has the memory of a node.
func TestIntegersStay(t *testing.T) {
	for _, name := range []string{"gguf/qwen3.gguf", "quantized/awq"} {
		o := LoadOptions{Model: filepath.Join("model/testdata", name), Device: "cpu", Threads: 1, KVMemory: 1 << 20}
		kept, err := Load(o)
		if err != nil {
			t.Fatal(err)
		}
		defer kept.Close()
		o.DType = "float32"
		wide, err := Load(o)
		if err != nil {
			t.Fatal(err)
		}
		defer wide.Close()
		if _, err := Check(o); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		plan, err := PlanMemory(PlanOptions{Model: o.Model, KVMemory: o.KVMemory})
		want := fmt.Sprintf("%s in addition to the KV memory; %s on GPUs", memory.Bytes(kept.WeightBytes), memory.Bytes(wide.WeightBytes))
		if err != nil || !strings.Contains(plan.Lines[0], want) {
			t.Errorf("%s: %v, %q, want %s", name, err, plan.Lines, want)
		}
		if kept.WeightBytes > wide.WeightBytes*3/4 || !strings.Contains(kept.Class, "/grid/") || strings.Contains(wide.Class, "grid") || kept.Fingerprint != wide.Fingerprint {
			t.Errorf("%s: %d bytes as %s, in float32 %d as %s", name, kept.WeightBytes, kept.Class, wide.WeightBytes, wide.Class)
		}
	}
}

// A plan has the memory of a node for MXFP4 in GGUF, which stays in MXFP4 whatever else is asked for.
func TestMXFP4Planned(t *testing.T) {
	for _, quantization := range []string{"", "int8"} {
		o := LoadOptions{Model: "model/testdata/converted/gpt-oss.gguf", Device: "cpu", Threads: 1, KVMemory: 1 << 20, Quantization: quantization}
		l, err := Load(o)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if strings.Contains(l.Class, "grid") {
			t.Errorf("the class is %s", l.Class)
		}
		for _, ranks := range []int{1, 2} {
			plan, err := PlanMemory(PlanOptions{Model: o.Model, KVMemory: o.KVMemory, Quantization: quantization, TensorParallel: ranks})
			if err != nil {
				t.Fatal(err)
			}
			if ranks == 1 && !strings.HasPrefix(strings.TrimLeft(strings.TrimPrefix(plan.Lines[0], "weights"), " "), memory.Bytes(l.WeightBytes)) || strings.Contains(plan.Lines[0], "on GPUs") {
				t.Errorf("%s, %d ranks: %q, want %s", quantization, ranks, plan.Lines, memory.Bytes(l.WeightBytes))
			}
		}
	}
}
