package model

import (
	"encoding/json"
	"fmt"
	"strconv"
)

const gemma4Name = "Gemma4ForCausalLM"

// rawGemma4 is what config.json has of the family alone.
type rawGemma4 struct {
	Activation     *string           `json:"hidden_activation"`
	FullHeadDim    *int              `json:"global_head_dim"`
	FullKVHeads    *int              `json:"num_global_key_value_heads"`
	PerLayer       map[string]layer4 `json:"per_layer_config"` // instead of the two above, since transformers 5.23
	KEqV           bool              `json:"attention_k_eq_v"`
	Softcap        *float64          `json:"final_logit_softcapping"`
	PLE            *int              `json:"hidden_size_per_layer_input"`
	PLEVocab       *int              `json:"vocab_size_per_layer_input"`
	Shared         int               `json:"num_kv_shared_layers"`
	DoubleWide     bool              `json:"use_double_wide_mlp"`
	MoE            bool              `json:"enable_moe_block"`
	TopK           *int              `json:"top_k_experts"`
	RopeParameters map[string]struct {
		Type    string   `json:"rope_type"`
		Theta   float64  `json:"rope_theta"`
		Partial *float64 `json:"partial_rotary_factor"`
		Factor  float64  `json:"factor"`
	} `json:"rope_parameters"`
}

// layer4 is how one layer differs from the others.
type layer4 struct {
	HeadDim *int `json:"head_dim"`
	KVHeads *int `json:"num_key_value_heads"`
}

func configGemma4(r *rawConfig, c *Config) (err error) {
	var raw rawGemma4
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	if act := or(raw.Activation, "gelu_pytorch_tanh"); act != "gelu_pytorch_tanh" {
		return refuse("hidden_activation", act, "gelu_pytorch_tanh")
	}
	c.TieEmbedding, c.MaxPositions = true, or(r.MaxPositions, 131072)
	c.HeadDim, c.KVHeads = or(r.HeadDim, 256), or(r.NumKVHeads, r.NumHeads)
	r.HeadDim = &c.HeadDim
	if c.Window, err = r.slidingWindow(512); err != nil {
		return err
	}
	if c.FullLayers, err = r.fullLayers(6); err != nil {
		return err
	}
	g := &gemma4Config{
		FullHeadDim: or(raw.FullHeadDim, 512), FullKVHeads: c.KVHeads, KeysAreValues: raw.KEqV, Softcap: float32(or(raw.Softcap, 0)),
		PLE: or(raw.PLE, 256), PLEVocab: or(raw.PLEVocab, 262144), Shared: raw.Shared, DoubleWide: raw.DoubleWide,
	}
	c.Gemma4 = g
	if raw.KEqV {
		g.FullKVHeads = or(raw.FullKVHeads, c.KVHeads)
	}
	if raw.PerLayer != nil {
		if err := g.perLayer(raw.PerLayer, c); err != nil {
			return err
		}
	}
	if raw.MoE {
		c.MoE = MoEConfig{Experts: or(r.NumExperts, or(r.LocalExperts, 0)), TopK: or(raw.TopK, 0), FFN: or(r.MoEFFN, 0), Normalize: true, Every: 1}
		if err := c.MoE.check(c); err != nil {
			return err
		}
	}
	if err := g.check(c); err != nil {
		return err
	}
	return g.ropes(&raw, c)
}

// perLayer reads the newer spelling: what full layers have of their own.
func (g *gemma4Config) perLayer(layers map[string]layer4, c *Config) error {
	g.FullHeadDim, g.FullKVHeads = c.HeadDim, c.KVHeads
	for i, full := range c.FullLayers {
		l, own := layers[strconv.Itoa(i)]
		if own && !full {
			return refuse("per_layer_config", i, "layers of full_attention")
		}
		if full {
			dim, heads := or(l.HeadDim, c.HeadDim), or(l.KVHeads, c.KVHeads)
			if first := g.FullHeadDim == c.HeadDim && g.FullKVHeads == c.KVHeads; !first && (dim != g.FullHeadDim || heads != g.FullKVHeads) {
				return refuse("per_layer_config", fmt.Sprintf("%d: head_dim %d, num_key_value_heads %d", i, dim, heads), "the same in all layers of full_attention")
			}
			g.FullHeadDim, g.FullKVHeads = dim, heads
		}
	}
	return nil
}

// check bounds what the common check does not know.
func (g *gemma4Config) check(c *Config) error {
	switch {
	case g.FullHeadDim < 2 || g.FullHeadDim > maxDim || g.FullHeadDim%2 != 0 || g.FullKVHeads < 1 || c.Heads < 1 || c.Heads%max(g.FullKVHeads, 1) != 0 || g.FullHeadDim > maxDim/c.Heads:
		return fmt.Errorf("%w: config.json: global_head_dim %d and num_global_key_value_heads %d for %d heads", ErrConfig, g.FullHeadDim, g.FullKVHeads, c.Heads)
	case g.PLE < 0 || g.PLEVocab < 1 || g.PLEVocab > maxDim || c.Layers < 1 || g.PLE > maxDim/c.Layers:
		return fmt.Errorf("%w: config.json: hidden_size_per_layer_input %d, vocab_size_per_layer_input %d", ErrConfig, g.PLE, g.PLEVocab)
	case g.PLE > 0 && g.PLEVocab < c.Vocab:
		return fmt.Errorf("%w: config.json: vocab_size_per_layer_input %d is less than vocab_size %d", ErrConfig, g.PLEVocab, c.Vocab)
	case !(g.Softcap >= 0) || c.FFN > maxDim/2:
		return fmt.Errorf("%w: config.json: final_logit_softcapping %v, intermediate_size %d", ErrConfig, g.Softcap, c.FFN)
	}
	if g.Shared < 0 || g.Shared >= c.Layers {
		return fmt.Errorf("%w: config.json: num_kv_shared_layers is %d of %d layers", ErrConfig, g.Shared, c.Layers)
	}
	var stored [2]bool
	for i, full := range c.FullLayers {
		if i < c.Layers-g.Shared {
			stored[kindOf(full)] = true
		} else if !stored[kindOf(full)] {
			return fmt.Errorf("%w: config.json: layer %d shares the KV of an earlier one, but none of its type stores any", ErrConfig, i)
		}
	}
	return nil
}

// ropes reads the two rotations, which are nested by layer type.
func (g *gemma4Config) ropes(raw *rawGemma4, c *Config) error {
	c.Rope = RopeConfig{Theta: 10000, Type: "default"}
	g.FullRope = RopeConfig{Theta: 1000000, Type: "proportional", Partial: 0.25}
	for kind, to := range map[string]*RopeConfig{"sliding_attention": &c.Rope, "full_attention": &g.FullRope} {
		p, ok := raw.RopeParameters[kind]
		if !ok {
			continue
		}
		*to = RopeConfig{Theta: p.Theta, Type: p.Type}
		if p.Type == "proportional" {
			to.Partial, to.Factor = or(p.Partial, 1), p.Factor
		}
		if p.Type != "default" && p.Type != "proportional" {
			return refuse("rope_parameters."+kind+".rope_type", p.Type, "default, proportional")
		}
		if err := to.check(); err != nil {
			return fmt.Errorf("config.json: rope_parameters.%s: %w", kind, err)
		}
	}
	return nil
}
