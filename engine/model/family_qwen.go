package model

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// configQwen2 reads Qwen2: Llama's blocks with biases of queries, keys and values. The last
// layers may have a window.
func configQwen2(r *rawConfig, c *Config) error {
	c.KVHeads, c.MaxPositions, c.Features.QKVBias = or(r.NumKVHeads, 32), or(r.MaxPositions, 32768), true
	return r.qwenWindows(c)
}

// configQwen3 reads Qwen3: Llama's blocks with a norm of each query and key head.
func configQwen3(r *rawConfig, c *Config) error {
	if r.HeadDim == nil {
		r.HeadDim = new(int)
		*r.HeadDim = 128
	}
	c.KVHeads, c.HeadDim = or(r.NumKVHeads, 32), *r.HeadDim
	return configQwen3Common(r, c)
}

func configQwen3Common(r *rawConfig, c *Config) error {
	c.MaxPositions, c.Features.HeadNorms = or(r.MaxPositions, 32768), eachHeadNorm
	c.Features.QKVBias, c.Features.OutputBias = or(r.AttentionBias, false), or(r.AttentionBias, false)
	return r.qwenWindows(c)
}

// configQwen3MoE reads Qwen3 whose MLP is, in most or all layers, a few experts out of many.
func configQwen3MoE(r *rawConfig, c *Config) error {
	c.KVHeads = or(r.NumKVHeads, 4)
	c.MoE = MoEConfig{
		Experts: or(r.NumExperts, or(r.LocalExperts, 128)), TopK: or(r.TopK, 8), FFN: or(r.MoEFFN, 768),
		Normalize: or(r.NormTopK, false), Every: or(r.SparseStep, 1), Dense: r.MLPOnlyLayers,
	}
	if err := c.MoE.check(c); err != nil {
		return err
	}
	return configQwen3Common(r, c)
}

// qwenWindows reads the window of layers from max_window_layers on, or of those that layer_types
// names. It counts only with use_sliding_window.
func (r *rawConfig) qwenWindows(c *Config) (err error) {
	if !r.UseSlidingWindow {
		return r.noWindows(c)
	}
	if c.Window, err = r.slidingWindow(4096); err != nil || c.Window == 0 {
		return err
	}
	if r.LayerTypes != nil {
		return r.layerTypes(c)
	}
	if err := r.boundLayers(); err != nil {
		return err
	}
	c.FullLayers = make([]bool, r.NumLayers)
	for i := range c.FullLayers {
		c.FullLayers[i] = i < or(r.MaxWindowLayers, 28)
	}
	return nil
}

// configQwen3Next reads Qwen3-Next: three of four layers have a state, the others gate what their
// heads read, and the MLP is experts with a shared one that has a gate.
func configQwen3Next(r *rawConfig, c *Config) error {
	c.KVHeads, c.FFN = or(r.NumKVHeads, 2), cmp.Or(c.FFN, 5632)
	err := r.qwenStates(c, true)
	if err != nil {
		return err
	}
	c.MoE.Experts, c.MoE.TopK = or(r.NumExperts, or(r.LocalExperts, 512)), or(r.TopK, 10)
	c.MoE.Normalize, c.MoE.Every, c.MoE.Dense = or(r.NormTopK, true), or(r.SparseStep, 1), r.MLPOnlyLayers
	return c.MoE.check(c)
}

// configQwen35 reads Qwen3.5: the same with a dense MLP.
func configQwen35(r *rawConfig, c *Config) error {
	c.KVHeads = or(r.NumKVHeads, 4)
	err := r.qwenStates(c, false)
	c.MoE = MoEConfig{}
	return err
}

// configQwen35MoE reads Qwen3.5 with experts, whose weights always are divided by their sum.
func configQwen35MoE(r *rawConfig, c *Config) error {
	c.KVHeads = or(r.NumKVHeads, 2)
	if err := r.qwenStates(c, false); err != nil {
		return err
	}
	c.FFN = c.MoE.FFN // no layer is dense
	c.MoE.Experts, c.MoE.TopK, c.MoE.Normalize, c.MoE.Every = or(r.NumExperts, or(r.LocalExperts, 256)), or(r.TopK, 8), true, 1
	return c.MoE.check(c)
}

// qwenStates reads what Qwen3-Next and Qwen3.5 have in common.
func (r *rawConfig) qwenStates(c *Config, mixed bool) error {
	var raw struct {
		Conv       *int  `json:"linear_conv_kernel_dim"`
		KeyDim     *int  `json:"linear_key_head_dim"`
		ValueDim   *int  `json:"linear_value_head_dim"`
		KeyHeads   *int  `json:"linear_num_key_heads"`
		ValueHeads *int  `json:"linear_num_value_heads"`
		Shared     *int  `json:"shared_expert_intermediate_size"`
		Interval   *int  `json:"full_attention_interval"`
		Gate       *bool `json:"attn_output_gate"`
	}
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	c.HeadDim, c.MaxPositions = or(r.HeadDim, 256), or(r.MaxPositions, 32768)
	r.HeadDim = &c.HeadDim
	switch {
	case or(raw.Conv, backend.DeltaConv) != backend.DeltaConv:
		return refuse("linear_conv_kernel_dim", *raw.Conv, fmt.Sprint(backend.DeltaConv))
	case or(r.AttentionBias, false):
		return refuse("attention_bias", true, "false")
	case !or(raw.Gate, true):
		return refuse("attn_output_gate", false, "true")
	}
	d := &deltaConfig{KeyHeads: or(raw.KeyHeads, 16), ValueHeads: or(raw.ValueHeads, 32), KeyDim: or(raw.KeyDim, 128), ValueDim: or(raw.ValueDim, 128), Mixed: mixed}
	const most = 1 << 9 // heads, and columns of a head
	if min(d.KeyHeads, d.ValueHeads, d.KeyDim, d.ValueDim) < 1 || max(d.KeyHeads, d.ValueHeads, d.KeyDim, d.ValueDim) > most || d.ValueHeads%d.KeyHeads != 0 ||
		2*d.KeyDim+d.ValueHeads/d.KeyHeads*d.ValueDim > backend.DeltaColumns {
		return fmt.Errorf("%w: config.json: %d linear_num_key_heads of %d columns, %d linear_num_value_heads of %d", ErrConfig, d.KeyHeads, d.KeyDim, d.ValueHeads, d.ValueDim)
	}
	interval := or(raw.Interval, 4)
	if err := r.boundLayers(); err != nil || interval < 1 {
		return fmt.Errorf("%w: config.json: %d layer_types for %d layers, full_attention_interval %d", ErrConfig, len(r.LayerTypes), r.NumLayers, interval)
	}
	d.Layers = make([]bool, r.NumLayers)
	for i := range d.Layers {
		if d.Layers[i] = (i+1)%interval != 0; r.LayerTypes == nil {
			continue
		}
		switch kind := r.LayerTypes[i]; kind {
		case "linear_attention", "full_attention":
			d.Layers[i] = kind == "linear_attention"
		default:
			return refuse("layer_types", kind, "full_attention, linear_attention")
		}
	}
	if !slices.Contains(d.Layers, false) {
		return refuse("layer_types", "linear_attention in every layer", "full_attention in some")
	}
	if slices.Contains(d.Layers, true) {
		c.Delta = d
	}
	c.Features.OnePlus, c.Features.HeadNorms, c.Features.OutputGate = true, eachHeadNorm, true
	c.MoE = MoEConfig{FFN: or(r.MoEFFN, 512), Shared: or(raw.Shared, 512), SharedGate: true}
	return nil
}
