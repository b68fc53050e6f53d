package model

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

const gptOSSName = "GptOssForCausalLM"

// gptOSS is GptOssForCausalLM: pre-norm blocks whose attention has biases, a
// learned sink per head and, in every second layer, a window; and whose MLP is a
// few experts out of many, stored as MXFP4 or as bfloat16.
type gptOSS struct {
	decoder
	Layers []gptOSSLayer `hf:"model.layers"`

	tokenMoE, outputMoE moeBuffers
}

type gptOSSLayer struct {
	InputNorm backend.Weight `hf:"input_layernorm.weight" shape:"hidden"`
	attentionWeights
	QBias    backend.Weight `hf:"self_attn.q_proj.bias" shape:"q"`
	KBias    backend.Weight `hf:"self_attn.k_proj.bias" shape:"kv"`
	VBias    backend.Weight `hf:"self_attn.v_proj.bias" shape:"kv"`
	OBias    backend.Weight `hf:"self_attn.o_proj.bias" shape:"hidden"`
	Sinks    backend.Weight `hf:"self_attn.sinks" shape:"heads"`
	PostNorm backend.Weight `hf:"post_attention_layernorm.weight" shape:"hidden"`
	Router   backend.Weight `hf:"mlp.router.weight" shape:"experts,hidden"`
	Bias     backend.Weight `hf:"mlp.router.bias" shape:"experts"`

	experts stackedExperts
}

// stackedExperts are the weights of a layer's experts, by expert.
type stackedExperts struct {
	gateUp, gateUpBias [2][]backend.Weight // of gate, of up
	down, downBias     [1][]backend.Weight
}

func newGPTOSS(c *Config) network {
	return &gptOSS{decoder: newDecoder(c), Layers: make([]gptOSSLayer, c.Layers)}
}

func configGPTOSS(r *rawConfig, c *Config) error {
	c.HeadDim = or(r.HeadDim, 64)
	if r.HeadDim == nil {
		r.HeadDim = &c.HeadDim
	}
	c.KVHeads, c.MaxPositions, c.Eps = or(r.NumKVHeads, 8), or(r.MaxPositions, 131072), float32(or(r.RMSNormEps, 1e-5))
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
	c.MoE = MoEConfig{
		Experts: or(r.LocalExperts, or(r.NumExperts, 128)), TopK: or(r.TopK, 4), FFN: c.FFN, Normalize: true, Every: 1,
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

// fullLayers reads layer_types; without them every stride-th layer has no window.
func (r *rawConfig) fullLayers(stride int) ([]bool, error) {
	if r.NumLayers < 0 || r.NumLayers > maxLayers || r.LayerTypes != nil && len(r.LayerTypes) != r.NumLayers {
		return nil, fmt.Errorf("%w: config.json: %d layer_types for %d layers", ErrConfig, len(r.LayerTypes), r.NumLayers)
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

func (m *gptOSS) weights() []binding { return m.bind(m) }

func (m *gptOSS) stacks() (all []stack) {
	c, wide, hidden := m.cfg, m.cfg.dims().expert, whole(m.cfg.Hidden)
	for i := range m.Layers {
		e := &m.Layers[i].experts
		prefix := fmt.Sprintf("model.layers.%d.mlp.experts.", i)
		add := func(name string, out, in part, targets [][]backend.Weight) {
			s := stack{names: []string{prefix + name}, experts: c.MoE.Experts, out: out, in: in, deal: alternate, targets: targets}
			switch {
			case in.of > 0 && c.MXFP4:
				s.names = []string{prefix + name + "_blocks", prefix + name + "_scales"}
			case in.of > 0:
				s.byInput = true
			}
			all = append(all, s)
		}
		add("gate_up_proj", wide, hidden, e.gateUp[:])
		add("gate_up_proj_bias", wide, part{}, e.gateUpBias[:])
		add("down_proj", hidden, wide, e.down[:])
		add("down_proj_bias", hidden, part{}, e.downBias[:])
	}
	return all
}

func (m *gptOSS) alloc(to memory) (err error) {
	m.tokenMoE, m.outputMoE, err = allocMoE(to, m.cfg, m.decoder.alloc(to))
	return err
}

func (m *gptOSS) forward(b backend.Backend) {
	r := m.begin(b, m.Layers[0].InputNorm)
	for i := range m.Layers {
		l, next := &m.Layers[i], m.Norm
		if i+1 < len(m.Layers) {
			next = m.Layers[i+1].InputNorm
		}
		r = m.attention(b, i, r, l)
		b.AddRMSNorm(r.normed, r.x, r.delta, l.PostNorm, m.cfg.Eps)
		m.moe(b, r, l)
		b.AddRMSNorm(r.normed, r.x, r.delta, next, m.cfg.Eps)
	}
	m.end(b, r)
}

// attention is layer i's, from normed to delta.
func (m *gptOSS) attention(b backend.Backend, i int, r *rowBuffers, l *gptOSSLayer) *rowBuffers {
	c := m.cfg
	b.Linear(m.q, r.normed, l.Q, l.QBias)
	b.Linear(m.k, r.normed, l.K, l.KBias)
	b.Linear(m.v, r.normed, l.V, l.VBias)
	b.Rope(m.q, c.Heads, c.HeadDim, &m.rope)
	b.Rope(m.k, c.KVHeads, c.HeadDim, &m.rope)
	b.StoreKV(i, m.k, m.v)
	b.Mark(i)
	b.Attention(r.attn, m.q, backend.AttentionSpec{
		Layer: i, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Scale: float32(1 / math.Sqrt(float64(c.HeadDim))), Window: c.window(i), Sinks: &l.Sinks,
	})
	r = m.onlyOutputs(b, i, r)
	b.Linear(r.delta, r.attn, l.O, c.once(l.OBias))
	b.AllReduce(r.delta)
	return r
}

// moe is a layer's router and experts, from normed to delta. The softmax over
// the chosen scores alone is that over all, divided by its sum over the chosen.
func (m *gptOSS) moe(b backend.Backend, r *rowBuffers, l *gptOSSLayer) {
	to := &m.tokenMoE
	if r == &m.outputs {
		to = &m.outputMoE
	}
	e := &l.experts
	b.Linear(to.router, r.normed, l.Router, l.Bias)
	b.MoE(r.delta, r.normed, to.router, backend.MoESpec{
		TopK: m.cfg.MoE.TopK, Normalize: m.cfg.MoE.Normalize, Act: backend.ClampedSwish,
		Gate: e.gateUp[0], Up: e.gateUp[1], Down: e.down[0],
		GateBias: e.gateUpBias[0], UpBias: e.gateUpBias[1], DownBias: m.cfg.each(e.downBias[0]),
		Hidden: to.hidden, Inner: to.inner, InnerUp: to.up,
	})
	b.AllReduce(r.delta)
}
