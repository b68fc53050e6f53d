package model

import (
	"fmt"
	"strings"

	"github.com/tandem-serving/tandem/engine/safetensors"
)

// Names of the scales of keys and of values in a layer's self_attn, as compressed-tensors, ModelOpt
// and Quark write them. The first that a checkpoint has counts.
var (
	keyScales   = []string{"k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"}
	valueScales = []string{"v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"}
	// otherScales are of queries and of weights of keys, which stay float32 here.
	otherScales = []string{"q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_scale", "attn.prob_scale"}
)

// scaleOfKV reports whether a tensor is a scale of attention, which only KV in FP8 reads.
func scaleOfKV(tensor string) bool {
	_, name, ok := strings.Cut(tensor, ".self_attn.")
	if !ok || !strings.HasPrefix(tensor, "model.layers.") {
		return false
	}
	for _, names := range [][]string{keyScales, valueScales, otherScales} {
		for _, n := range names {
			if n == name {
				return true
			}
		}
	}
	return false
}

// ScaleKV sets the backend's scales of KV in FP8 to those of the checkpoint, which the model was
// loaded from. Layers without any keep 1. The caller has allocated the KV store.
func (m *Model) ScaleKV(src *Source) error {
	checkpoint, err := src.weights()
	if err != nil {
		return err
	}
	for i := range m.config.Layers {
		kv := m.config.kvLayer(i)
		if m.config.Delta.layer(i) || kv >= len(m.config.KVLayers()) { // of Gemma 4, it reads the KV of another one
			continue
		}
		k, nameK, err := m.config.layerScales(checkpoint, i, keyScales)
		if err != nil {
			return fmt.Errorf("%s: %w", src.Name, err)
		}
		v, nameV, err := m.config.layerScales(checkpoint, i, valueScales)
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", src.Name, err)
		case nameK == "" && nameV == "":
			continue
		}
		if err := m.backend.ScaleKV(kv, k, v); err != nil {
			return fmt.Errorf("%w: %s: %s %s: want positive finite numbers: %w", ErrWeights, src.Name, nameK, nameV, err)
		}
	}
	return nil
}

// layerScales returns this rank's scales of a KV layer, one for each head or one for all, and the
// name of their tensor; empty: there is none, and the scale is 1.
func (c *Config) layerScales(checkpoint *safetensors.Checkpoint, layer int, names []string) (scales []float32, name string, err error) {
	heads := c.dims().kvHeads
	if c.Gemma4 != nil && c.window(layer) == 0 {
		heads = c.dims().fullKVHeads
	}
	for _, n := range names {
		t, ok := checkpoint.Tensor(fmt.Sprintf("model.layers.%d.self_attn.%s", layer, n))
		if !ok {
			continue
		}
		count := 1
		for _, d := range t.Shape {
			count *= d
		}
		perHead := c.Latent == nil && count > 1 && count == heads.of && t.Shape[0] == count
		if widths[t.DType] < 2 || count != 1 && !perHead {
			return nil, "", fmt.Errorf("%w: %s: %s %v, want one number, or one for each of %d heads", ErrWeights, t.Name, t.DType, t.Shape, heads.of)
		}
		from, to := 0, 1
		if perHead {
			from, to = heads.from, heads.from+heads.n
		}
		for i := from; i < to; i++ {
			scales = append(scales, number(t.Data, i, t.DType))
		}
		return scales, t.Name, nil
	}
	return []float32{1}, "", nil
}
