package model

import (
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// MoEConfig is the mixture of experts of a checkpoint; without one it is zero.
type MoEConfig struct {
	Experts   int
	TopK      int   // experts of a token
	FFN       int   // width between an expert's projections
	Normalize bool  // the weights of the chosen are divided by their sum
	Every     int   // layers Every-1, 2·Every-1, … have experts
	Dense     []int // but these layers have none
}

func (m *MoEConfig) layer(i int) bool {
	return m.Experts > 0 && (i+1)%m.Every == 0 && !slices.Contains(m.Dense, i)
}

// qwen3MoE is Qwen3MoeForCausalLM: Qwen3 whose MLP is, in most or all layers, a
// few experts out of many, chosen per token.
type qwen3MoE struct {
	decoder
	Layers []qwen3MoELayer `hf:"model.layers"`

	tokenMoE, outputMoE moeBuffers
}

type qwen3MoELayer struct {
	InputNorm backend.Weight `hf:"input_layernorm.weight" shape:"hidden"`
	attentionWeights
	HeadNorms headNorms      `hf:""`
	PostNorm  backend.Weight `hf:"post_attention_layernorm.weight" shape:"hidden"`
	MLP       *gatedMLP      `hf:"mlp"` // nil in a layer of experts
	MoE       *experts       `hf:"mlp"` // nil in a dense layer
}

type experts struct {
	Router  backend.Weight `hf:"gate.weight" shape:"experts,hidden"`
	Experts []expert       `hf:"experts"`
}

type expert struct {
	Gate backend.Weight `hf:"gate_proj.weight" shape:"expert,hidden"`
	Up   backend.Weight `hf:"up_proj.weight" shape:"expert,hidden"`
	Down backend.Weight `hf:"down_proj.weight" shape:"hidden,expert"`
}

// moeBuffers are what experts work in, all of one row set.
type moeBuffers struct {
	router    backend.Buf // [experts]
	hidden    backend.Buf // [topK*hidden]
	inner, up backend.Buf // [topK*ffn of an expert]
}

func newQwen3MoE(c *Config) network {
	m := &qwen3MoE{decoder: newDecoder(c), Layers: make([]qwen3MoELayer, c.Layers)}
	for i := range m.Layers {
		if c.MoE.layer(i) {
			m.Layers[i].MoE = &experts{Experts: make([]expert, c.MoE.Experts)}
		} else {
			m.Layers[i].MLP = &gatedMLP{}
		}
	}
	return m
}

func configQwen3MoE(r *rawConfig, c *Config) error {
	c.KVHeads = or(r.NumKVHeads, 4)
	c.MoE = MoEConfig{
		Experts: or(r.NumExperts, or(r.LocalExperts, 128)), TopK: or(r.TopK, 8), FFN: or(r.MoEFFN, 768),
		Normalize: r.NormTopK, Every: or(r.SparseStep, 1), Dense: r.MLPOnlyLayers,
	}
	if err := c.MoE.check(c); err != nil {
		return err
	}
	return configQwen3(r, c)
}

// check bounds what the config says of experts.
func (m *MoEConfig) check(c *Config) error {
	if m.Experts < 1 || m.Experts > maxExperts || m.TopK < 1 || m.TopK > m.Experts {
		return fmt.Errorf("%w: config.json: num_experts_per_tok is %d, num_experts %d of at most %d", ErrConfig, m.TopK, m.Experts, maxExperts)
	}
	// The buffers of a step are TopK times as wide.
	if m.FFN < 1 || m.FFN > maxDim/m.TopK || c.Hidden > maxDim/m.TopK {
		return fmt.Errorf("%w: config.json: moe_intermediate_size is %d and hidden_size %d with %d experts per token, not between 1 and %d",
			ErrConfig, m.FFN, c.Hidden, m.TopK, maxDim/m.TopK)
	}
	if m.Every < 1 || m.Every > maxLayers {
		return fmt.Errorf("%w: config.json: decoder_sparse_step is %d, not between 1 and %d", ErrConfig, m.Every, maxLayers)
	}
	return nil
}

func (m *qwen3MoE) weights() []binding { return m.bind(m) }

func (m *qwen3MoE) alloc(to memory) (err error) {
	m.tokenMoE, m.outputMoE, err = allocMoE(to, m.cfg, m.decoder.alloc(to))
	return err
}

// allocMoE allocates what experts work in, unless err says that all is lost.
func allocMoE(to memory, c *Config, err error) (tokens, outputs moeBuffers, _ error) {
	a := allocator{to: to, err: err}
	rows := func(r backend.Rows) moeBuffers {
		return moeBuffers{
			router: a.alloc(r, c.MoE.Experts), hidden: a.alloc(r, c.MoE.TopK*c.Hidden),
			inner: a.alloc(r, c.MoE.TopK*c.MoE.FFN), up: a.alloc(r, c.MoE.TopK*c.MoE.FFN),
		}
	}
	tokens, outputs = rows(backend.TokenRows), rows(backend.OutputRows)
	return tokens, outputs, a.err
}

func (m *qwen3MoE) forward(b backend.Backend) {
	r := m.begin(b, m.Layers[0].InputNorm)
	for i := range m.Layers {
		l, next := &m.Layers[i], m.Norm
		if i+1 < len(m.Layers) {
			next = m.Layers[i+1].InputNorm
		}
		r = m.attend(b, i, r, &l.attentionWeights, &l.HeadNorms)
		b.AddRMSNorm(r.normed, r.x, r.delta, l.PostNorm, m.cfg.Eps)
		if l.MoE != nil {
			m.moe(b, r, l.MoE)
		} else {
			m.mlp(b, r, l.MLP)
		}
		b.AddRMSNorm(r.normed, r.x, r.delta, next, m.cfg.Eps)
	}
	m.end(b, r)
}

// moe is a layer's router and experts, from normed to delta.
func (m *qwen3MoE) moe(b backend.Backend, r *rowBuffers, w *experts) {
	to := &m.tokenMoE
	if r == &m.outputs {
		to = &m.outputMoE
	}
	spec := backend.MoESpec{
		TopK: m.cfg.MoE.TopK, Normalize: m.cfg.MoE.Normalize, Hidden: to.hidden, Inner: to.inner, InnerUp: to.up,
	}
	for _, e := range w.Experts {
		spec.Gate, spec.Up, spec.Down = append(spec.Gate, e.Gate), append(spec.Up, e.Up), append(spec.Down, e.Down)
	}
	b.Linear(to.router, r.normed, w.Router, backend.NoWeight)
	b.MoE(r.delta, r.normed, to.router, spec)
	b.AllReduce(r.delta)
}
