package model

import (
	"fmt"
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

// gemma4 is Gemma4ForCausalLM. Five of six layers have a window and heads of one size, the others
// have no window and heads of another. Norms precede and follow attention and MLP. Some models have
// experts in addition to each dense MLP, some use the keys of full layers as values. Some give each
// layer an embedding of its own, and their last layers read the KV of earlier ones.
type gemma4 struct {
	Embed backend.Weight `hf:"model.embed_tokens.weight" shape:"vocab,hidden"`
	Norm  backend.Weight `hf:"model.norm.weight" shape:"hidden"`
	PLE   *gemma4PLE     `hf:"model"` // nil without embeddings per layer

	cfg    *Config
	layers []gemma4Layer
	kinds  [2]gemma4Kind // of windowed layers, of full ones

	tokens, outputs gemma4Rows
	scores, share   backend.Buf // see decoder
	ple, pleTokens  backend.Buf // [layers*ple] per token
	pleSlice        backend.Buf // [ple] per token
}

// gemma4PLE are the embeddings per layer.
type gemma4PLE struct {
	Embed   backend.Weight `hf:"embed_tokens_per_layer.weight" shape:"plevocab,ples"`
	Project backend.Weight `hf:"per_layer_model_projection.weight" shape:"ples,hidden"`
	Norm    backend.Weight `hf:"per_layer_projection_norm.weight" shape:"ple"`
}

// gemma4Kind is what layers of one attention kind share.
type gemma4Kind struct {
	rope    backend.Rope
	q, k, v backend.Buf // per token
}

type gemma4Layer struct {
	Scalar    backend.Weight `hf:"layer_scalar" shape:"one"`
	InputNorm backend.Weight `hf:"input_layernorm.weight" shape:"hidden"`
	Q         backend.Weight `hf:"self_attn.q_proj.weight" shape:"q,hidden"`
	QNorm     backend.Weight `hf:"self_attn.q_norm.weight" shape:"head"`
	O         backend.Weight `hf:"self_attn.o_proj.weight" shape:"hidden,q"`
	Keys      *gemma4Keys    `hf:"self_attn"` // nil where another layer's KV is read
	Values    *gemma4Values  `hf:"self_attn"` // nil where keys are values
	PostNorm  backend.Weight `hf:"post_attention_layernorm.weight" shape:"hidden"`
	PreNorm   backend.Weight `hf:"pre_feedforward_layernorm.weight" shape:"hidden"`
	MLP       gatedMLP       `hf:"mlp"`
	OutNorm   backend.Weight `hf:"post_feedforward_layernorm.weight" shape:"hidden"`
	MoE       *gemma4MoE     `hf:""`
	Input     *gemma4Input   `hf:""`

	kv int // KV layer that it reads, and stores unless Keys is nil
}

type gemma4Keys struct {
	K    backend.Weight `hf:"k_proj.weight" shape:"kv,hidden"`
	Norm backend.Weight `hf:"k_norm.weight" shape:"head"`
}

type gemma4Values struct {
	V backend.Weight `hf:"v_proj.weight" shape:"kv,hidden"`
}

type gemma4MoE struct {
	Scale       backend.Weight `hf:"router.scale" shape:"hidden"`
	ExpertScale backend.Weight `hf:"router.per_expert_scale" shape:"experts"`
	Router      backend.Weight `hf:"router.proj.weight" shape:"experts,hidden"`
	DenseNorm   backend.Weight `hf:"post_feedforward_layernorm_1.weight" shape:"hidden"`
	PreNorm     backend.Weight `hf:"pre_feedforward_layernorm_2.weight" shape:"hidden"`
	PostNorm    backend.Weight `hf:"post_feedforward_layernorm_2.weight" shape:"hidden"`

	gateUp [2][]backend.Weight
	down   [1][]backend.Weight
}

type gemma4Input struct {
	Gate    backend.Weight `hf:"per_layer_input_gate.weight" shape:"ple,hidden"`
	Project backend.Weight `hf:"per_layer_projection.weight" shape:"hidden,ple"`
	Norm    backend.Weight `hf:"post_per_layer_input_norm.weight" shape:"hidden"`
}

// gemma4Rows are the buffers of one row set.
type gemma4Rows struct {
	x, normed, delta, sum backend.Buf
	attn                  [2]backend.Buf // per kind
	gate, up              [2]backend.Buf // of an MLP, of one twice as wide
	ple, pleGate          backend.Buf
	moe                   moeBuffers
}

// gemma4Config is what the family's configs have of their own.
type gemma4Config struct {
	FullKVHeads, FullHeadDim int
	FullRope                 RopeConfig
	KeysAreValues            bool // in full layers
	Softcap                  float32
	PLE, PLEVocab            int // width and rows of the embeddings per layer; 0: none
	Shared                   int // last layers that read the KV of earlier ones
	DoubleWide               bool
}

// shape is layer i's attention.
func (c *Config) shape(i int) backend.KVShape {
	if c.Gemma4 != nil && c.window(i) == 0 {
		return backend.KVShape{KVHeads: c.Gemma4.FullKVHeads, HeadDim: c.Gemma4.FullHeadDim}
	}
	if d := c.Latent; d != nil {
		return backend.KVShape{KVHeads: 1, HeadDim: d.Latent + d.Rope, Latent: d.Latent}
	}
	return backend.KVShape{Window: c.window(i), KVHeads: c.KVHeads, HeadDim: c.HeadDim}
}

func kindOf(full bool) int {
	if full {
		return 1
	}
	return 0
}

func newGemma4(c *Config) network {
	g := c.Gemma4
	m := &gemma4{cfg: c, layers: make([]gemma4Layer, c.Layers)}
	m.kinds[0].rope, m.kinds[1].rope = c.Rope.table(c.HeadDim), g.FullRope.table(g.FullHeadDim)
	if g.PLE > 0 {
		m.PLE = &gemma4PLE{}
	}
	last := [2]int{} // KV layer that each kind stored last
	for i := range m.layers {
		l, full := &m.layers[i], c.FullLayers[i]
		l.kv = last[kindOf(full)]
		if i < c.Layers-g.Shared {
			l.kv = i
			last[kindOf(full)] = i
			l.Keys = &gemma4Keys{}
			if !full || !g.KeysAreValues {
				l.Values = &gemma4Values{}
			}
		}
		if c.MoE.Experts > 0 {
			l.MoE = &gemma4MoE{}
		}
		if g.PLE > 0 {
			l.Input = &gemma4Input{}
		}
	}
	return m
}

// wide reports whether layer i's MLP is twice as wide.
func (m *gemma4) wide(i int) bool {
	return m.cfg.Gemma4.DoubleWide && i >= m.cfg.Layers-m.cfg.Gemma4.Shared
}

func (m *gemma4) weights() []binding {
	c, g, p := m.cfg, m.cfg.Gemma4, m.cfg.dims()
	dims := map[string]part{
		"one": whole(1), "vocab": p.vocab, "hidden": whole(c.Hidden), "experts": whole(c.MoE.Experts),
		"ple": whole(g.PLE), "ples": whole(c.Layers * g.PLE), "plevocab": p.pleVocab,
	}
	all := bindings(m, "", dims)
	for i := range m.layers {
		s := c.shape(i)
		kv := p.kvHeads
		if s.Window == 0 {
			kv = p.fullKVHeads
		}
		dims["q"], dims["kv"], dims["head"], dims["ffn"] = p.heads.times(s.HeadDim), kv.times(s.HeadDim), whole(s.HeadDim), p.ffn
		if m.wide(i) {
			dims["ffn"] = p.ffn.times(2)
		}
		all = append(all, bindings(&m.layers[i], fmt.Sprintf("model.layers.%d.", i), dims)...)
	}
	return all
}

func (m *gemma4) ignore(name string) bool { return name == "lm_head.weight" }

func (m *gemma4) stacks() (all []stack) {
	c, wide, hidden := m.cfg, m.cfg.dims().expert, whole(m.cfg.Hidden)
	for i := range m.layers {
		if e := m.layers[i].MoE; e != nil {
			prefix := fmt.Sprintf("model.layers.%d.experts.", i)
			all = append(all,
				stack{names: []string{prefix + "gate_up_proj"}, experts: c.MoE.Experts, out: wide, in: hidden, targets: e.gateUp[:]},
				stack{names: []string{prefix + "down_proj"}, experts: c.MoE.Experts, out: hidden, in: wide, targets: e.down[:]})
		}
	}
	return all
}

func (m *gemma4) alloc(to memory) error {
	c, g := m.cfg, m.cfg.Gemma4
	a := allocator{to: to}
	dims := [2]backend.KVShape{{KVHeads: c.KVHeads, HeadDim: c.HeadDim}, {KVHeads: g.FullKVHeads, HeadDim: g.FullHeadDim}}
	rows := func(r backend.Rows) (b gemma4Rows) {
		b.x, b.normed, b.delta, b.sum = a.alloc(r, c.Hidden), a.alloc(r, c.Hidden), a.alloc(r, c.Hidden), a.alloc(r, c.Hidden)
		for kind, d := range dims {
			b.attn[kind] = a.alloc(r, c.Heads*d.HeadDim)
		}
		b.gate[0], b.up[0] = a.alloc(r, c.FFN), a.alloc(r, c.FFN)
		if g.DoubleWide {
			b.gate[1], b.up[1] = a.alloc(r, 2*c.FFN), a.alloc(r, 2*c.FFN)
		}
		if g.PLE > 0 {
			b.ple, b.pleGate = a.alloc(r, g.PLE), a.alloc(r, g.PLE)
		}
		return b
	}
	m.tokens, m.outputs = rows(backend.TokenRows), rows(backend.OutputRows)
	for kind, d := range dims {
		k := &m.kinds[kind]
		k.q = a.alloc(backend.TokenRows, c.Heads*d.HeadDim)
		k.k, k.v = a.alloc(backend.TokenRows, d.KVHeads*d.HeadDim), a.alloc(backend.TokenRows, d.KVHeads*d.HeadDim)
	}
	if g.PLE > 0 {
		m.ple, m.pleTokens = a.alloc(backend.TokenRows, c.Layers*g.PLE), a.alloc(backend.TokenRows, c.Layers*g.PLE)
		m.pleSlice = a.alloc(backend.TokenRows, g.PLE)
	}
	m.scores, m.share = a.logits(c)
	if c.MoE.Experts > 0 {
		m.tokens.moe, m.outputs.moe = allocMoE(&a, c, backend.TokenRows), allocMoE(&a, c, backend.OutputRows)
	}
	return a.err
}

func (m *gemma4) logits() backend.Buf { return m.scores }

func (m *gemma4) hidden() backend.Buf { return m.outputs.normed }

func (m *gemma4) forward(b backend.Backend) {
	c, r := m.cfg, &m.tokens
	b.Embed(r.x, m.Embed)
	b.AllReduce(r.x)
	b.Scale(r.x, float32(math.Sqrt(float64(c.Hidden))))
	if m.PLE != nil {
		m.inputs(b)
	}
	for i := range m.layers {
		l := &m.layers[i]
		b.RMSNorm(r.normed, r.x, l.InputNorm, c.Eps)
		r = m.attention(b, i, r)
		b.RMSNorm(r.delta, r.delta, l.PostNorm, c.Eps)
		b.AddRMSNorm(r.normed, r.x, r.delta, l.PreNorm, c.Eps)
		m.mlp(b, i, r)
		if l.MoE != nil {
			m.moe(b, r, l.MoE)
		}
		b.RMSNorm(r.delta, r.delta, l.OutNorm, c.Eps)
		if l.Input == nil {
			b.Add(r.x, r.delta, l.Scalar)
			continue
		}
		b.Add(r.x, r.delta, backend.NoWeight)
		b.Linear(r.pleGate, r.x, l.Input.Gate, backend.NoWeight)
		m.slice(b, i, r)
		b.GatedAct(r.pleGate, r.pleGate, r.ple, backend.GELUTanh)
		b.Linear(r.delta, r.pleGate, l.Input.Project, backend.NoWeight)
		b.RMSNorm(r.delta, r.delta, l.Input.Norm, c.Eps)
		b.Add(r.x, r.delta, l.Scalar)
	}
	b.RMSNorm(r.normed, r.x, m.Norm, c.Eps)
	b.Linear(m.share, r.normed, m.Embed, backend.NoWeight)
	b.AllGather(m.scores, m.share)
	if c.Gemma4.Softcap > 0 {
		b.Softcap(m.scores, c.Gemma4.Softcap)
	}
	b.Sample(m.scores)
}

// inputs makes every layer's embedding: of the token, and of what it became.
func (m *gemma4) inputs(b backend.Backend) {
	c, n := m.cfg, m.cfg.Gemma4.PLE
	b.Embed(m.pleTokens, m.PLE.Embed)
	b.AllReduce(m.pleTokens)
	b.Scale(m.pleTokens, float32(math.Sqrt(float64(n))))
	b.Linear(m.ple, m.tokens.x, m.PLE.Project, backend.NoWeight)
	b.Scale(m.ple, float32(1/math.Sqrt(float64(c.Hidden))))
	b.HeadNorm(m.ple, m.ple, c.Layers, n, m.PLE.Norm, c.Eps)
	b.Add(m.ple, m.pleTokens, backend.NoWeight)
	b.Scale(m.ple, float32(1/math.Sqrt(2)))
}

// slice is layer i's embedding, in r.ple.
func (m *gemma4) slice(b backend.Backend, i int, r *gemma4Rows) {
	from := i * m.cfg.Gemma4.PLE
	if r == &m.tokens {
		b.Columns(r.ple, m.ple, from)
		return
	}
	b.Columns(m.pleSlice, m.ple, from)
	b.Rows(r.ple, m.pleSlice)
}

// attention is layer i's, from normed to delta; see decoder.attend.
func (m *gemma4) attention(b backend.Backend, i int, r *gemma4Rows) *gemma4Rows {
	c, l, s := m.cfg, &m.layers[i], m.cfg.shape(i)
	kind := kindOf(s.Window == 0)
	k := &m.kinds[kind]
	b.Linear(k.q, r.normed, l.Q, backend.NoWeight)
	b.HeadNorm(k.q, k.q, c.Heads, s.HeadDim, l.QNorm, c.Eps)
	b.Rope(k.q, c.Heads, s.HeadDim, &k.rope)
	if l.Keys != nil {
		b.Linear(k.k, r.normed, l.Keys.K, backend.NoWeight)
		if l.Values != nil {
			b.Linear(k.v, r.normed, l.Values.V, backend.NoWeight)
			b.HeadNorm(k.v, k.v, s.KVHeads, s.HeadDim, backend.NoWeight, c.Eps)
		} else {
			b.HeadNorm(k.v, k.k, s.KVHeads, s.HeadDim, backend.NoWeight, c.Eps)
		}
		b.HeadNorm(k.k, k.k, s.KVHeads, s.HeadDim, l.Keys.Norm, c.Eps)
		b.Rope(k.k, s.KVHeads, s.HeadDim, &k.rope)
		b.StoreKV(l.kv, k.k, k.v)
		b.Mark(l.kv)
	}
	b.Attention(r.attn[kind], k.q, backend.AttentionSpec{
		Layer: l.kv, Heads: c.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, Scale: 1, Window: s.Window,
	})
	if i+1 == c.Layers {
		b.Rows(m.outputs.attn[kind], r.attn[kind])
		b.Rows(m.outputs.x, r.x)
		r = &m.outputs
	}
	b.Linear(r.delta, r.attn[kind], l.O, backend.NoWeight)
	b.AllReduce(r.delta)
	return r
}

// mlp is layer i's dense MLP, from normed to delta.
func (m *gemma4) mlp(b backend.Backend, i int, r *gemma4Rows) {
	l, width := &m.layers[i], kindOf(m.wide(i))
	b.Linear(r.gate[width], r.normed, l.MLP.Gate, backend.NoWeight)
	b.Linear(r.up[width], r.normed, l.MLP.Up, backend.NoWeight)
	b.GatedAct(r.gate[width], r.gate[width], r.up[width], backend.GELUTanh)
	b.Linear(r.delta, r.gate[width], l.MLP.Down, backend.NoWeight)
	b.AllReduce(r.delta)
}

// moe adds the experts of x to the dense MLP's delta, each normed.
func (m *gemma4) moe(b backend.Backend, r *gemma4Rows, w *gemma4MoE) {
	c := m.cfg
	b.RMSNorm(r.delta, r.delta, w.DenseNorm, c.Eps)
	b.RMSNorm(r.normed, r.x, w.Scale, c.Eps)
	b.Scale(r.normed, float32(1/math.Sqrt(float64(c.Hidden))))
	b.Linear(r.moe.router, r.normed, w.Router, backend.NoWeight)
	b.RMSNorm(r.normed, r.x, w.PreNorm, c.Eps)
	b.MoE(r.sum, r.normed, r.moe.router, backend.MoESpec{
		TopK: c.MoE.TopK, Normalize: true, Act: backend.GELUTanh, Scale: &w.ExpertScale,
		Gate: w.gateUp[0], Up: w.gateUp[1], Down: w.down[0],
		Hidden: r.moe.hidden, Inner: r.moe.inner, InnerUp: r.moe.up,
	})
	b.AllReduce(r.sum)
	b.RMSNorm(r.sum, r.sum, w.PostNorm, c.Eps)
	b.Add(r.delta, r.sum, backend.NoWeight)
}
