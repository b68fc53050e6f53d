package model

// configMistral reads what MistralForCausalLM has beside Llama's: a window that
// every layer's attention has, unless it is null. The blocks are Llama's.
func configMistral(r *rawConfig, c *Config) error {
	c.KVHeads = or(r.NumKVHeads, 8)
	c.MaxPositions = or(r.MaxPositions, 131072)
	if r.LayerTypes != nil {
		return refuse("layer_types", r.LayerTypes, "one attention for all layers, by sliding_window")
	}
	window, err := r.slidingWindow(4096)
	if err != nil {
		return err
	}
	c.Window = window
	return nil
}
