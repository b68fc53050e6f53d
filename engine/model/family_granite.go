package model

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// rawGranite is what config.json has of the family alone.
type rawGranite struct {
	Embedding *float64 `json:"embedding_multiplier"`
	Residual  *float64 `json:"residual_multiplier"`
	Attention *float64 `json:"attention_multiplier"`
	Logits    *float64 `json:"logits_scaling"`
	Shared    *int     `json:"shared_intermediate_size"`
	Positions *string  `json:"position_embedding_type"`
	Blocks    []string `json:"layers_block_type"`
}

// configGranite reads Granite 3: Llama's blocks with multipliers.
func configGranite(r *rawConfig, c *Config) error {
	r.biases(c)
	_, err := r.granite(c)
	return err
}

func (r *rawConfig) granite(c *Config) (*rawGranite, error) {
	raw := &rawGranite{}
	if err := json.Unmarshal(r.text, raw); err != nil {
		return nil, fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	logits := or(raw.Logits, 1)
	if logits == 0 {
		return nil, fmt.Errorf("%w: config.json: logits_scaling is 0", ErrConfig)
	}
	f := &c.Features
	f.EmbedScale, f.ResidualScale = float32(or(raw.Embedding, 1)), float32(or(raw.Residual, 1))
	f.AttentionScale, f.LogitScale = float32(or(raw.Attention, 1)), float32(1/logits)
	return raw, nil
}

// configGraniteMoE reads Granite 3 whose MLP is a few experts out of many, and perhaps one that
// all tokens go through in addition.
func configGraniteMoE(r *rawConfig, c *Config) error { return r.graniteMoE(c, 0) }

// configGraniteHybrid reads Granite 4 whose layers are all attention. Without experts the shared
// MLP is the only one.
func configGraniteHybrid(r *rawConfig, c *Config) error {
	raw, err := r.granite(c)
	if err != nil {
		return err
	}
	for _, kind := range append(raw.Blocks, r.LayerTypes...) {
		if kind != "attention" && kind != "full_attention" {
			return refuse("layer_types", kind, "attention")
		}
	}
	if raw.Blocks == nil && r.LayerTypes == nil {
		return refuse("layer_types", "absent, which means mamba", "attention")
	}
	if err := r.boundLayers(); err != nil {
		return err
	}
	switch kind := or(raw.Positions, ""); kind {
	case "rope":
	case "", "nope":
		c.Features.NoRope = slices.Repeat([]bool{true}, r.NumLayers)
	default:
		return refuse("position_embedding_type", kind, "rope, nope")
	}
	if or(r.LocalExperts, 8) > 0 {
		return r.graniteMoE(c, 1024)
	}
	c.FFN = or(raw.Shared, 1024)
	c.Features.QKVBias, c.Features.OutputBias = or(r.AttentionBias, false), or(r.AttentionBias, false)
	return nil
}

func (r *rawConfig) graniteMoE(c *Config, shared int) error {
	raw, err := r.granite(c)
	if err != nil {
		return err
	}
	c.Features.QKVBias, c.Features.OutputBias = or(r.AttentionBias, false), or(r.AttentionBias, false)
	c.MoE = MoEConfig{
		Experts: or(r.LocalExperts, or(r.NumExperts, 8)), TopK: or(r.TopK, 2), FFN: c.FFN, Normalize: true, Every: 1, Shared: or(raw.Shared, shared),
	}
	return c.MoE.check(c)
}

// Granite's tensors. Its hybrid calls the only MLP of dense layers shared.
var (
	graniteNames   = strings.NewReplacer(".mlp.gate.", ".block_sparse_moe.router.layer.", ".mlp.down_proj.", ".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear.")
	graniteShared  = []fusion{{"shared_mlp.input_linear", []string{"mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"}}, {"shared_mlp.input_linear", []string{"mlp.gate_proj", "mlp.up_proj"}}}
	graniteExperts = &stackNames{gateUp: "block_sparse_moe.input_linear.weight", down: "block_sparse_moe.output_linear.weight"}
)
