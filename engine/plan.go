package engine

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// PlanOptions are the inputs of PlanMemory. Zero values take defaults.
type PlanOptions struct {
	Model            string // a config.json, or the folder that holds it
	KVMemory         int64  // bytes left for KV
	KVDType          string // see LoadOptions
	Quantization     string // see LoadOptions
	BlockTokens      int    // 0: 16
	MaxModelLen      int    // 0: what the model was made for
	MaxBatchedTokens int    // 0: 2048
	TensorParallel   int    // tensor-parallel workers, with KVMemory each; 0: 1
}

// openConfig reads the config of a folder, of a config.json or of Builtin.
func openConfig(name string) (model.Config, error) {
	if name != Builtin {
		return model.OpenConfig(name)
	}
	s, err := OpenModel(name)
	if err != nil {
		return model.Config{}, err
	}
	return s.Config, s.Close()
}

// PlanMemory computes how much KV of a model a node holds in the given memory. It
// reads only the model's config.
func PlanMemory(o PlanOptions) (memory.Plan, error) {
	c, err := openConfig(o.Model)
	if err != nil {
		return memory.Plan{}, refuse(o.Model, err)
	}
	dtype, err := kvDType(o.KVDType, c.DType)
	if err != nil {
		return memory.Plan{}, err
	}
	if o.KVMemory <= 0 {
		return memory.Plan{}, fmt.Errorf("%w: --kv-memory %d: give the bytes left for KV, such as --kv-memory 8GiB", ErrOption, o.KVMemory)
	}
	for _, v := range []struct {
		flag  string
		value int
	}{{"--tensor-parallel-size", o.TensorParallel}, {"--block-size", o.BlockTokens}, {"--max-model-len", o.MaxModelLen}, {"--max-num-batched-tokens", o.MaxBatchedTokens}} {
		if v.value < 0 {
			return memory.Plan{}, fmt.Errorf("%w: %s %d, want at least 1, or leave it out for the default", ErrOption, v.flag, v.value)
		}
	}
	q, err := stored(o.Quantization, filepath.Base(o.Model), &c)
	if err != nil {
		return memory.Plan{}, err
	}
	all := c
	shard := model.Shard{Ranks: o.TensorParallel}
	if c, err = shard.Of(&all); err != nil {
		return memory.Plan{}, fmt.Errorf("%w: --tensor-parallel-size %d: %w", ErrOption, o.TensorParallel, err)
	}
	p, err := memory.Fit(memory.Need{
		Budget: o.KVMemory, Layers: c.KVLayers(), BlockTokens: cmp.Or(o.BlockTokens, kvcache.DefaultBlockTokens), DType: dtype,
		Context: c.MaxPositions, MaxModelLen: cmp.Or(o.MaxModelLen, c.MaxPositions),
		MaxBatchedTokens: cmp.Or(o.MaxBatchedTokens, scheduler.DefaultMaxBatchedTokens),
	})
	if err != nil {
		return p, fmt.Errorf("%w: --kv-memory %s: %w", ErrOption, memory.Bytes(o.KVMemory), err)
	}
	expand := func() { all.Expand = true }
	bytes := func(q model.Quantization, of model.Shard) int64 {
		part, _ := of.Of(&all) // cannot fail: Of succeeded above
		return part.WeightBytes(q)
	}
	if strings.EqualFold(filepath.Ext(o.Model), ".gguf") { // whose metadata do not have the types
		src, err := OpenModel(o.Model)
		if err != nil {
			return p, refuse(o.Model, err)
		}
		defer src.Close()
		expand = src.ExpandIntegers
		bytes = func(q model.Quantization, of model.Shard) int64 {
			n, _ := src.RankBytes(q, of) // as above, and the file is open
			return n
		}
	}
	weights := func(q model.Quantization) (n int64) { // of the worker that has most
		for r := range max(1, o.TensorParallel) {
			n = max(n, bytes(q, model.Shard{Rank: r, Ranks: o.TensorParallel}))
		}
		return n
	}
	kept := weights(q)
	line := fmt.Sprintf("%-14s%s in addition to the KV memory", "weights", memory.Bytes(kept))
	if q != model.AsStored {
		line += fmt.Sprintf(", in %s; %s as they are stored", q, memory.Bytes(weights(model.AsStored)))
	}
	lines := []string{line}
	if o.TensorParallel > 1 {
		lines = append(lines, fmt.Sprintf("%-14s%d; all figures are per process, with the weights of the largest; one process alone has %s of weights",
			"workers", o.TensorParallel, memory.Bytes(bytes(q, model.Shard{}))))
	}
	if expand(); q == model.AsStored && weights(q) != kept {
		lines[0] += fmt.Sprintf("; %s on GPUs, which expand integers", memory.Bytes(weights(q)))
	}
	p.Lines = append(lines, p.Lines...)
	return p, nil
}

// CheckConfig returns why a folder's model is not loaded, as far as its config.json shows it. It
// does not read weights or the tokenizer.
func CheckConfig(folder string) error {
	_, err := openConfig(folder)
	return err
}
