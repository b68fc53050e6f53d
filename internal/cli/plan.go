package cli

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
)

// plan computes properties of a fleet before it exists. Its first argument is the kind of
// plan.
func plan(v *Invocation) error {
	memory := config.Bytes(0)
	v.Var(&memory, "kv-memory", "memory for KV, such as 8.9924GiB")
	o := engine.PlanOptions{}
	v.StringVar(&o.KVDType, "kv-cache-dtype", "auto", "type that KV is stored in: auto, float32, bfloat16 or fp8")
	v.StringVar(&o.Quantization, "quantization", "none", "quantization of weights while they are loaded: none, int8 or int4")
	v.IntVar(&o.BlockTokens, "block-size", 16, "tokens per KV block")
	v.AutoVar(&o.MaxModelLen, "max-model-len", "tokens per sequence, such as 4096 or 32k; 0, auto or -1: the model's own limit")
	v.CountVar(&o.MaxBatchedTokens, "max-num-batched-tokens", 2048, 1, "tokens per step, which a window's blocks also hold")
	v.IntVar(&o.TensorParallel, "tensor-parallel-size", 1, "processes or GPUs that split each matrix of the model, with --kv-memory each")
	args, err := v.Parse(2)
	if err != nil {
		return err
	}
	if len(args) != 2 || args[0] != "memory" {
		return fmt.Errorf("%w: name the kind of plan and a model, such as in `tandem plan memory ./model/config.json --kv-memory 8GiB`", config.ErrValue)
	}
	if o.Model, _, err = findModel(args[1], "", v.Environ, nil); err != nil {
		return err
	}
	o.KVMemory = int64(memory)
	p, err := engine.PlanMemory(o)
	if errors.Is(err, engine.ErrOption) || errors.Is(err, engine.ErrModel) {
		return fmt.Errorf("%w: %w", config.ErrValue, err)
	}
	if err != nil {
		return err
	}
	for _, line := range p.Lines {
		if _, err := fmt.Fprintln(v.Out, line); err != nil {
			return err
		}
	}
	return nil
}
