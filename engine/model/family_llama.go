package model

import (
	"fmt"
	"slices"
)

// biases reads attention_bias and mlp_bias as Llama has them.
func (r *rawConfig) biases(c *Config) {
	c.Features.QKVBias, c.Features.OutputBias, c.Features.MLPBias = or(r.AttentionBias, false), or(r.AttentionBias, false), r.MLPBias
}

func configLlama(r *rawConfig, c *Config) error {
	r.biases(c)
	if !slices.Contains(r.LayerTypes, "sliding_attention") {
		return r.noWindows(c)
	}
	var err error
	if c.Window, err = r.slidingWindow(0); err != nil {
		return err
	}
	return r.layerTypes(c)
}

// noWindows refuses windows of layers.
func (r *rawConfig) noWindows(*Config) error {
	if slices.ContainsFunc(r.LayerTypes, func(t string) bool { return t != "full_attention" }) {
		return refuse("layer_types", r.LayerTypes, "full_attention")
	}
	return nil
}

// configMistral reads the window, which every layer has unless layer_types exempts it, and which
// null turns off.
func configMistral(r *rawConfig, c *Config) (err error) {
	c.KVHeads = or(r.NumKVHeads, 8)
	c.MaxPositions = or(r.MaxPositions, 131072)
	r.biases(c)
	if c.Window, err = r.slidingWindow(4096); err != nil {
		return err
	}
	return r.layerTypes(c)
}

// configMinistral3 reads Ministral 3: Mistral whose queries grow with the position, so that scores
// stay sharp in long contexts.
func configMinistral3(r *rawConfig, c *Config) (err error) {
	c.KVHeads, c.MaxPositions, c.Eps = or(r.NumKVHeads, 8), or(r.MaxPositions, 262144), float32(or(r.RMSNormEps, 1e-5))
	if len(r.SlidingWindow) > 0 {
		if c.Window, err = r.slidingWindow(0); err != nil {
			return err
		}
	}
	if c.Rope, err = r.rope(c); err != nil {
		return err
	}
	if c.Features.QueryGrowth < 0 || c.Features.QueryGrowth > 0 && !(c.Rope.Original >= 1 && c.Rope.Original <= maxDim) {
		return fmt.Errorf("%w: config.json: llama_4_scaling_beta %v over original_max_position_embeddings %v", ErrConfig, c.Features.QueryGrowth, c.Rope.Original)
	}
	c.Features.QueryGrowthSpan = int(c.Rope.Original)
	return nil
}

// layerTypes reads which layers have no window. Without the key all have it.
func (r *rawConfig) layerTypes(c *Config) (err error) {
	if r.LayerTypes == nil || c.Window == 0 && !slices.Contains(r.LayerTypes, "sliding_attention") {
		return r.noWindows(c)
	}
	c.FullLayers, err = r.fullLayers(1)
	if !slices.Contains(c.FullLayers, true) {
		c.FullLayers = nil
	}
	return err
}
