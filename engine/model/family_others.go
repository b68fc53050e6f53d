package model

import (
	"encoding/json"
	"fmt"
)

// configMixtral reads Mixtral: Mistral's blocks whose MLP is a few experts out of eight.
func configMixtral(r *rawConfig, c *Config) (err error) {
	c.KVHeads, c.MaxPositions, c.Eps = or(r.NumKVHeads, 8), or(r.MaxPositions, 131072), float32(or(r.RMSNormEps, 1e-5))
	if len(r.SlidingWindow) > 0 {
		if c.Window, err = r.slidingWindow(0); err != nil {
			return err
		}
	}
	c.MoE = MoEConfig{Experts: or(r.LocalExperts, or(r.NumExperts, 8)), TopK: or(r.TopK, 2), FFN: c.FFN, Normalize: true, Every: 1}
	return c.MoE.check(c)
}

// configOLMo2 reads OLMo 2: norms of what attention and MLP return, and of all heads together.
func configOLMo2(r *rawConfig, c *Config) error {
	c.Eps, c.Features.Norms, c.Features.HeadNorms = float32(or(r.RMSNormEps, 1e-5)), normsBehind, allHeadsNorms
	c.Features.QKVBias, c.Features.OutputBias = or(r.AttentionBias, false), or(r.AttentionBias, false)
	return r.noWindows(c)
}

// configPhi3 reads Phi-3 and Phi-4: Llama's blocks with fused projections.
func configPhi3(r *rawConfig, c *Config) (err error) {
	c.MaxPositions, c.Eps = or(r.MaxPositions, 4096), float32(or(r.RMSNormEps, 1e-5))
	if r.OriginalPositions == nil {
		r.OriginalPositions = new(float64)
		*r.OriginalPositions = 4096
	}
	if len(r.SlidingWindow) > 0 {
		c.Window, err = r.slidingWindow(0)
	}
	return err
}

// configSmolLM3 reads SmolLM3: Llama's blocks, every fourth of which does not rotate.
func configSmolLM3(r *rawConfig, c *Config) error {
	var raw struct {
		Rope     []int `json:"no_rope_layers"` // 1 for layers that rotate
		Interval *int  `json:"no_rope_layer_interval"`
	}
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	c.KVHeads, c.MaxPositions, c.TieEmbedding = or(r.NumKVHeads, 4), or(r.MaxPositions, 32768), or(r.TieWordEmbedding, true)
	r.biases(c)
	interval := or(raw.Interval, 4)
	if err := r.boundLayers(); err != nil || interval < 1 || raw.Rope != nil && len(raw.Rope) != r.NumLayers {
		return fmt.Errorf("%w: config.json: %d no_rope_layers for %d layers, no_rope_layer_interval %d", ErrConfig, len(raw.Rope), r.NumLayers, interval)
	}
	c.Features.NoRope = make([]bool, r.NumLayers)
	for i := range c.Features.NoRope {
		if c.Features.NoRope[i] = (i+1)%interval == 0; raw.Rope != nil {
			c.Features.NoRope[i] = raw.Rope[i] == 0
		}
	}
	if !r.UseSlidingWindow || len(r.SlidingWindow) == 0 {
		return nil
	}
	var err error
	if c.Window, err = r.slidingWindow(0); err != nil || c.Window == 0 {
		return err
	}
	if r.LayerTypes != nil {
		return r.layerTypes(c)
	}
	c.FullLayers = make([]bool, r.NumLayers)
	for i := range c.FullLayers {
		c.FullLayers[i] = !c.Features.NoRope[i]
	}
	return nil
}

// configMiniMaxM2 reads MiniMax-M2: norms of all heads together, of which some columns rotate,
// and experts that are chosen by the logistic function of their scores.
func configMiniMaxM2(r *rawConfig, c *Config) error {
	var raw struct {
		RotaryDim *int    `json:"rotary_dim"`
		NormKind  *string `json:"qk_norm_type"`
		HeadNorm  *bool   `json:"use_qk_norm"`
		Scoring   *string `json:"scoring_func"`
		Bias      *bool   `json:"use_routing_bias"`
		Shared    *int    `json:"shared_intermediate_size"`
	}
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	switch {
	case or(raw.NormKind, "per_layer") != "per_layer":
		return refuse("qk_norm_type", *raw.NormKind, "per_layer")
	case !or(raw.HeadNorm, true):
		return refuse("use_qk_norm", false, "true")
	case or(raw.Scoring, "sigmoid") != "sigmoid":
		return refuse("scoring_func", *raw.Scoring, "sigmoid")
	case !or(raw.Bias, true):
		return refuse("use_routing_bias", false, "true")
	case or(raw.Shared, 0) != 0:
		return refuse("shared_intermediate_size", *raw.Shared, "0")
	}
	c.KVHeads, c.HeadDim, c.MaxPositions = or(r.NumKVHeads, 8), or(r.HeadDim, 128), or(r.MaxPositions, 196608)
	r.HeadDim, c.Features.HeadNorms = &c.HeadDim, allHeadsNorms
	if raw.RotaryDim != nil && r.PartialRotary == nil && c.HeadDim > 0 {
		r.PartialRotary = new(float64)
		*r.PartialRotary = float64(*raw.RotaryDim) / float64(c.HeadDim)
	}
	c.MoE = MoEConfig{
		Experts: or(r.LocalExperts, or(r.NumExperts, 256)), TopK: or(r.TopK, 8), FFN: c.FFN, Normalize: true, Every: 1,
		Sigmoid: true, Groups: 1, KeepGroups: 1, Factor: 1,
	}
	return c.MoE.check(c)
}
