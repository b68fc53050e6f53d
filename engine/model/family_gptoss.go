package model

import (
	"encoding/json"
	"fmt"
)

const gptOSSName = "GptOssForCausalLM"

// configGPTOSS reads GPT-OSS: attention has biases, a learned sink for each head and, in every
// second layer, a window; the MLP is a few experts out of many, in MXFP4 or bfloat16.
func configGPTOSS(r *rawConfig, c *Config) error {
	if !or(r.AttentionBias, false) {
		return refuse("attention_bias", false, "true")
	}
	c.HeadDim = or(r.HeadDim, 64)
	if r.HeadDim == nil {
		r.HeadDim = &c.HeadDim
	}
	c.KVHeads, c.MaxPositions, c.Eps = or(r.NumKVHeads, 8), or(r.MaxPositions, 131072), float32(or(r.RMSNormEps, 1e-5))
	c.Features = Features{QKVBias: true, OutputBias: true, Sinks: true}
	if limit := or(r.SwigluLimit, 7); limit != 7 {
		return refuse("swiglu_limit", limit, "7")
	}
	var err error
	if c.Window, err = r.slidingWindow(128); err != nil {
		return err
	}
	if c.FullLayers, err = r.fullLayers(2); err != nil {
		return err
	}
	// The softmax over the chosen scores alone is that over all, divided by its sum over the chosen.
	c.MoE = MoEConfig{
		Experts: or(r.LocalExperts, or(r.NumExperts, 128)), TopK: or(r.TopK, 4), FFN: c.FFN, Normalize: true, Every: 1, RouterBias: true, Clamped: true, Biases: true,
	}
	if err := c.MoE.check(c); err != nil {
		return err
	}
	var q struct {
		Method string `json:"quant_method"`
	}
	c.MXFP4 = json.Unmarshal(r.Quantization, &q) == nil && q.Method == "mxfp4"
	if c.MXFP4 && (c.Hidden%32 != 0 || c.FFN%32 != 0) {
		return fmt.Errorf("%w: config.json: hidden_size %d and intermediate_size %d are no multiples of 32, as MXFP4 needs", ErrConfig, c.Hidden, c.FFN)
	}
	return nil
}

// boundLayers bounds num_hidden_layers before something is allocated for each layer.
func (r *rawConfig) boundLayers() error {
	if r.NumLayers < 0 || r.NumLayers > maxLayers || r.LayerTypes != nil && len(r.LayerTypes) != r.NumLayers {
		return fmt.Errorf("%w: config.json: %d layer_types for %d layers", ErrConfig, len(r.LayerTypes), r.NumLayers)
	}
	return nil
}

// fullLayers reads layer_types; without them every stride-th layer has no window.
func (r *rawConfig) fullLayers(stride int) ([]bool, error) {
	if err := r.boundLayers(); err != nil {
		return nil, err
	}
	full := make([]bool, r.NumLayers)
	for i := range full {
		full[i] = (i+1)%stride == 0
		if r.LayerTypes == nil {
			continue
		}
		switch r.LayerTypes[i] {
		case "full_attention":
			full[i] = true
		case "sliding_attention":
			full[i] = false
		default:
			return nil, refuse("layer_types", r.LayerTypes[i], "full_attention, sliding_attention")
		}
	}
	return full, nil
}
