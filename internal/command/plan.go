package command

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
)

// plan answers questions about a fleet before there is one. Its first word says
// what is planned.
func plan(v *Invocation) error {
	memory := config.Bytes(0)
	v.Var(&memory, "kv-memory", "memory for KV, such as 8.9924GiB")
	o := engine.PlanOptions{}
	v.StringVar(&o.KVDType, "kv-cache-dtype", "auto", "type that KV is stored in: auto, float32 or bfloat16")
	v.StringVar(&o.Quantization, "quantization", "none", "what weights are turned into as they are loaded: none, int8 or int4")
	v.IntVar(&o.BlockTokens, "block-size", 16, "tokens per KV block")
	v.IntVar(&o.MaxModelLen, "max-model-len", 0, "tokens per sequence; 0: what the model was made for")
	v.IntVar(&o.MaxBatchedTokens, "max-num-batched-tokens", 2048, "tokens per step: a window holds what a step writes too")
	v.IntVar(&o.TensorParallel, "tensor-parallel-size", 1, "processes or GPUs that compute the model together, a part of each matrix and --kv-memory each")
	args, err := v.Parse(2)
	if err != nil {
		return err
	}
	if len(args) != 2 || args[0] != "memory" {
		return fmt.Errorf("%w: say what to plan and give a config.json, such as in `tandem plan memory ./model/config.json --kv-memory 8GiB`", config.ErrValue)
	}
	o.Model, o.KVMemory = args[1], int64(memory)
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
