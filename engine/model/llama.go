package model

import "github.com/tandem-serving/tandem/engine/backend"

// llama is LlamaForCausalLM: pre-norm blocks of grouped-query attention with
// rotated positions and a gated MLP, without biases.
type llama struct {
	decoder
	Layers []llamaLayer `hf:"model.layers"`
}

type llamaLayer struct {
	InputNorm backend.Weight `hf:"input_layernorm.weight" shape:"hidden"`
	attentionWeights
	PostNorm backend.Weight `hf:"post_attention_layernorm.weight" shape:"hidden"`
	MLP      gatedMLP       `hf:"mlp"`
}

func newLlama(c *Config) network {
	return &llama{decoder: newDecoder(c), Layers: make([]llamaLayer, c.Layers)}
}

func (m *llama) weights() []binding { return m.bind(m) }

func (m *llama) forward(b backend.Backend) {
	r := m.begin(b, m.Layers[0].InputNorm)
	for i := range m.Layers {
		l, next := &m.Layers[i], m.Norm
		if i+1 < len(m.Layers) {
			next = m.Layers[i+1].InputNorm
		}
		r = m.attend(b, i, r, &l.attentionWeights, nil)
		b.AddRMSNorm(r.normed, r.x, r.delta, l.PostNorm, m.cfg.Eps)
		m.mlp(b, r, &l.MLP)
		b.AddRMSNorm(r.normed, r.x, r.delta, next, m.cfg.Eps)
	}
	m.end(b, r)
}
