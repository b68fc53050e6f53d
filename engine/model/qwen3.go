package model

import (
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// qwen3 is Qwen3ForCausalLM: Llama's blocks with a norm of each query and key
// head before the rotation.
type qwen3 struct {
	decoder
	Layers []qwen3Layer `hf:"model.layers"`
}

type qwen3Layer struct {
	InputNorm backend.Weight `hf:"input_layernorm.weight" shape:"hidden"`
	attentionWeights
	HeadNorms headNorms      `hf:""`
	PostNorm  backend.Weight `hf:"post_attention_layernorm.weight" shape:"hidden"`
	MLP       gatedMLP       `hf:"mlp"`
}

func newQwen3(c *Config) network {
	return &qwen3{decoder: newDecoder(c), Layers: make([]qwen3Layer, c.Layers)}
}

// configQwen3 refuses windows, which no release of Qwen3 uses.
func configQwen3(r *rawConfig, c *Config) error {
	if r.UseSlidingWindow {
		return refuse("use_sliding_window", true, "false")
	}
	if slices.ContainsFunc(r.LayerTypes, func(t string) bool { return t != "full_attention" }) {
		return refuse("layer_types", r.LayerTypes, "full_attention")
	}
	c.MaxPositions = or(r.MaxPositions, 32768)
	return nil
}

// configQwen3Dense also has a head size of its own where none is given.
func configQwen3Dense(r *rawConfig, c *Config) error {
	if r.HeadDim == nil {
		r.HeadDim = new(int)
		*r.HeadDim = 128
	}
	c.KVHeads, c.HeadDim = or(r.NumKVHeads, 32), *r.HeadDim
	return configQwen3(r, c)
}

func (m *qwen3) weights() []binding { return m.bind(m) }

func (m *qwen3) forward(b backend.Backend) {
	r := m.begin(b, m.Layers[0].InputNorm)
	for i := range m.Layers {
		l, next := &m.Layers[i], m.Norm
		if i+1 < len(m.Layers) {
			next = m.Layers[i+1].InputNorm
		}
		r = m.attend(b, i, r, &l.attentionWeights, &l.HeadNorms)
		b.AddRMSNorm(r.normed, r.x, r.delta, l.PostNorm, m.cfg.Eps)
		m.mlp(b, r, &l.MLP)
		b.AddRMSNorm(r.normed, r.x, r.delta, next, m.cfg.Eps)
	}
	m.end(b, r)
}
