package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
)

// plan computes properties of a fleet before it exists. Its first argument is the kind of plan,
// which is a command of the table. Flags of memory may precede it.
func plan(v *Invocation) error {
	if len(v.Arguments) == 0 && !v.declared {
		return errKind(v)
	}
	kinds := v.Table.kinds("plan")
	for i := range kinds {
		if c := &kinds[i]; len(v.Arguments) > 0 && c.Name == "plan "+v.Arguments[0] {
			v.Set, v.Arguments = c.Flags(v.Out), v.Arguments[1:]
			return c.Run(v)
		}
	}
	v.Set = config.New("plan KIND [flags]", "Computes properties of a fleet before it exists. `tandem plan KIND --help` has the flags of each; below are those of memory.\n\nKinds:"+kinds.listed(),
		planExample, v.Out)
	o := memoryFlags(v.Set)
	args, err := v.Parse(2)
	if err != nil {
		return err
	}
	if len(args) == 0 || args[0] != "memory" {
		return errKind(v, args...)
	}
	return o.print(v, args[1:])
}

const planExample = "tandem plan memory ./gpt-oss-120b/config.json --kv-memory 8.9924GiB --max-model-len 98304 --max-num-batched-tokens 8192"

// errKind returns the error of a call without the kind of plan, or with another word in its place.
func errKind(v *Invocation, words ...string) error {
	kinds := v.Table.kinds("plan").lasts()
	unknown := ""
	if len(words) > 0 && !slices.Contains(kinds, words[0]) {
		unknown = fmt.Sprintf("no plan is called %q", words[0])
		if near := config.Nearest(words[0], kinds); near != "" {
			unknown += fmt.Sprintf(" (did you mean %s?)", near)
		}
		unknown += ": "
	}
	return fmt.Errorf("%w: %sname the kind of plan first, such as in `tandem plan memory ./model/config.json --kv-memory 8GiB`: %s", config.ErrValue, unknown, strings.Join(kinds, ", "))
}

// memoryOptions are the flags of `tandem plan memory`.
type memoryOptions struct {
	engine.PlanOptions
	memory config.Bytes
}

func memoryFlags(s *config.Set) *memoryOptions {
	o := new(memoryOptions)
	s.Var(&o.memory, "kv-memory", "memory for KV, such as 8.9924GiB")
	s.StringVar(&o.KVDType, "kv-cache-dtype", "auto", "type that KV is stored in: auto, float32, bfloat16 or fp8")
	s.StringVar(&o.Quantization, "quantization", "none", "quantization of weights while they are loaded: none, int8 or int4")
	s.IntVar(&o.BlockTokens, "block-size", 16, "tokens per KV block")
	s.AutoVar(&o.MaxModelLen, "max-model-len", "tokens per sequence, such as 4096 or 32k; 0, auto or -1: the model's own limit")
	s.CountVar(&o.MaxBatchedTokens, "max-num-batched-tokens", 2048, 1, "tokens per step, which a window's blocks also hold")
	s.IntVar(&o.TensorParallel, "tensor-parallel-size", 1, "processes or GPUs that split each matrix of the model, with --kv-memory each")
	return o
}

// planMemory prints how many tokens of a model fit in a node's memory.
func planMemory(v *Invocation) error {
	o := memoryFlags(v.Set)
	args, err := v.Parse(1)
	if err != nil {
		return err
	}
	return o.print(v, args)
}

// print prints the plan of the model that args name.
func (o *memoryOptions) print(v *Invocation, args []string) (err error) {
	if len(args) != 1 {
		return fmt.Errorf("%w: name a model, such as in `tandem plan memory ./model/config.json --kv-memory 8GiB`", config.ErrValue)
	}
	if o.Model, _, err = findModel(args[0], "", v.Environ, nil); err != nil {
		return err
	}
	o.KVMemory = int64(o.memory)
	p, err := engine.PlanMemory(o.PlanOptions)
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
