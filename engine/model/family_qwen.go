package model

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
