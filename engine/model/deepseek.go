package model

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
)

const deepseekName = "DeepseekV3ForCausalLM"

// deepseek is DeepseekV3ForCausalLM. Its attention stores one latent per token,
// from which every head's keys and values would follow by a matrix. Instead of
// computing them, the head's query goes through its key matrix, attends to the
// latents, and what it read of them goes through its value matrix: the same sums
// in another order. Behind the first layers the MLP is a few experts out of the
// best groups, and one that all tokens share.
type deepseek struct {
	decoder
	Layers []deepseekLayer `hf:"model.layers"`

	tokens, outputs deepseekRows
	waist           backend.Buf // [queryRank] per token
	q, absorbed     backend.Buf // [heads*(nope+rope)], [heads*(latent+rope)] per token
	latent, key     backend.Buf // [latent], [rope] per token
	nope            backend.Buf // [heads*nope] per token, scratch
}

type deepseekLayer struct {
	InputNorm backend.Weight  `hf:"input_layernorm.weight" shape:"hidden"`
	Waist     *deepseekWaist  `hf:"self_attn"` // nil where queries have none
	KVNorm    backend.Weight  `hf:"self_attn.kv_a_layernorm.weight" shape:"latent"`
	O         backend.Weight  `hf:"self_attn.o_proj.weight" shape:"hidden,values"`
	PostNorm  backend.Weight  `hf:"post_attention_layernorm.weight" shape:"hidden"`
	MLP       *gatedMLP       `hf:"mlp"` // nil in a layer of experts
	MoE       *deepseekMoE    `hf:"mlp"` // nil in a dense layer
	Shared    *deepseekShared `hf:"mlp.shared_experts"`

	query  [1][]backend.Weight // one: [heads*(nope+rope), hidden or queryRank]
	lower  [2][]backend.Weight // one each: [latent, hidden], [rope, hidden]
	raises [2][]backend.Weight // per head: [latent, nope], [values, latent]
}

type deepseekWaist struct {
	A    backend.Weight `hf:"q_a_proj.weight" shape:"waist,hidden"`
	Norm backend.Weight `hf:"q_a_layernorm.weight" shape:"waist"`
}

type deepseekMoE struct {
	experts
	Bias backend.Weight `hf:"gate.e_score_correction_bias" shape:"experts"`
}

type deepseekShared struct {
	Gate backend.Weight `hf:"gate_proj.weight" shape:"shared,hidden"`
	Up   backend.Weight `hf:"up_proj.weight" shape:"shared,hidden"`
	Down backend.Weight `hf:"down_proj.weight" shape:"hidden,shared"`
}

// deepseekRows are the buffers of one row set beside those of rowBuffers.
type deepseekRows struct {
	read             backend.Buf // [heads*latent] what the heads read, of the latents
	scratch          backend.Buf // [heads*latent]
	values, slots    backend.Buf // [heads*value]
	sharedUp, shared backend.Buf // [ffn of the shared experts]
	sum              backend.Buf // [hidden]
	moe              moeBuffers
}

// deepseekConfig is what the family's configs have of their own.
type deepseekConfig struct {
	QueryRank          int // 0: queries come from the hidden state at once
	Latent, Rope       int // columns of what is stored of a token: the latent, and the key that turns
	Nope, Value        int // columns of a head's key that do not turn, of its values
	Interleaved        bool
	Dense              int // first layers without experts
	Shared             int // experts that all tokens share
	Groups, KeepGroups int
	Factor             float32
	Scale              float32 // of scores
}

func configDeepseek(r *rawConfig, c *Config) error {
	var raw struct {
		QueryRank   *int     `json:"q_lora_rank"`
		Latent      *int     `json:"kv_lora_rank"`
		Rope        *int     `json:"qk_rope_head_dim"`
		Nope        *int     `json:"qk_nope_head_dim"`
		Value       *int     `json:"v_head_dim"`
		Interleaved *bool    `json:"rope_interleave"`
		Experts     *int     `json:"n_routed_experts"`
		Shared      *int     `json:"n_shared_experts"`
		Groups      *int     `json:"n_group"`
		KeepGroups  *int     `json:"topk_group"`
		Factor      *float64 `json:"routed_scaling_factor"`
		Dense       *int     `json:"first_k_dense_replace"`
		Every       *int     `json:"moe_layer_freq"`
		Scoring     *string  `json:"scoring_func"`
		Method      *string  `json:"topk_method"`
		Normalize   *bool    `json:"norm_topk_prob"`
	}
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	if s := or(raw.Scoring, "sigmoid"); s != "sigmoid" {
		return refuse("scoring_func", s, "sigmoid")
	}
	if s := or(raw.Method, "noaux_tc"); s != "noaux_tc" {
		return refuse("topk_method", s, "noaux_tc")
	}
	if n := or(raw.Every, 1); n != 1 {
		return refuse("moe_layer_freq", n, "1")
	}
	d := &deepseekConfig{
		QueryRank: or(raw.QueryRank, 0), Latent: or(raw.Latent, 512), Rope: or(raw.Rope, 64), Nope: or(raw.Nope, 128), Value: or(raw.Value, 128),
		Interleaved: or(raw.Interleaved, true), Dense: or(raw.Dense, 3), Shared: or(raw.Shared, 1),
		Groups: or(raw.Groups, 8), KeepGroups: or(raw.KeepGroups, 4), Factor: float32(or(raw.Factor, 2.5)),
	}
	if raw.QueryRank == nil && !strings.Contains(string(r.text), `"q_lora_rank"`) {
		d.QueryRank = 1536
	}
	c.Deepseek = d
	c.KVHeads, c.HeadDim, c.MaxPositions = 1, d.Latent+d.Rope, or(r.MaxPositions, 4096)
	r.HeadDim = &c.HeadDim
	c.MoE = MoEConfig{
		Experts: or(raw.Experts, or(r.LocalExperts, 256)), TopK: or(r.TopK, 8), FFN: or(r.MoEFFN, 2048),
		Normalize: or(raw.Normalize, true), Every: 1,
	}
	if err := c.MoE.check(c); err != nil {
		return err
	}
	if err := d.check(c); err != nil {
		return err
	}
	rope, err := r.rope()
	if err != nil {
		return err
	}
	scale := 1 / math.Sqrt(float64(d.Nope+d.Rope))
	if rope.Type != "default" && rope.MScaleAll > 0 {
		scale *= math.Pow(mscale(rope.Factor, rope.MScaleAll), 2)
	}
	d.Scale = float32(scale)
	return nil
}

// check bounds what the common check does not know.
func (d *deepseekConfig) check(c *Config) error {
	for _, n := range []struct {
		key   string
		value int
	}{
		{"kv_lora_rank", d.Latent}, {"qk_rope_head_dim", d.Rope}, {"qk_nope_head_dim", d.Nope}, {"v_head_dim", d.Value},
		{"q_lora_rank", max(d.QueryRank, 1)}, {"n_shared_experts", d.Shared},
	} {
		if n.value < 1 || n.value > maxDim/64 {
			return fmt.Errorf("%w: config.json: %s is %d, not between 1 and %d", ErrConfig, n.key, n.value, maxDim/64)
		}
	}
	experts := c.MoE.Experts
	switch {
	case d.QueryRank < 0:
		return fmt.Errorf("%w: config.json: q_lora_rank is %d", ErrConfig, d.QueryRank)
	case d.Rope%2 != 0:
		return fmt.Errorf("%w: config.json: qk_rope_head_dim %d is odd and cannot be rotated", ErrConfig, d.Rope)
	case c.Heads < 1 || c.Heads > maxExperts || (d.Latent+d.Nope+d.Value+d.Rope) > maxDim/c.Heads:
		return fmt.Errorf("%w: config.json: %d attention heads of a latent of %d, at most %d", ErrConfig, c.Heads, d.Latent, maxExperts)
	case d.Shared > maxDim/c.MoE.FFN || d.Dense < 0 || d.Dense > maxLayers:
		return fmt.Errorf("%w: config.json: n_shared_experts %d, first_k_dense_replace %d", ErrConfig, d.Shared, d.Dense)
	case d.Groups < 1 || experts%d.Groups != 0 || d.KeepGroups < 1 || d.KeepGroups > d.Groups || c.MoE.TopK > experts/d.Groups*d.KeepGroups:
		return fmt.Errorf("%w: config.json: num_experts_per_tok %d out of the best topk_group %d of n_group %d, of %d experts in all",
			ErrConfig, c.MoE.TopK, d.KeepGroups, d.Groups, experts)
	case !(d.Factor > 0):
		return fmt.Errorf("%w: config.json: routed_scaling_factor is %v", ErrConfig, d.Factor)
	}
	return nil
}

func newDeepseek(c *Config) network {
	d := c.Deepseek
	m := &deepseek{decoder: decoder{cfg: c, rope: c.Rope.table(d.Rope)}, Layers: make([]deepseekLayer, c.Layers)}
	for i := range m.Layers {
		l := &m.Layers[i]
		if d.QueryRank > 0 {
			l.Waist = &deepseekWaist{}
		}
		if i < d.Dense {
			l.MLP = &gatedMLP{}
			continue
		}
		l.MoE = &deepseekMoE{experts: experts{Experts: make([]expert, c.MoE.Experts)}}
		l.Shared = &deepseekShared{}
	}
	return m
}

func (m *deepseek) weights() []binding {
	c, d, p := m.cfg, m.cfg.Deepseek, m.cfg.dims()
	return m.untied(bindings(m, "", map[string]part{
		"vocab": p.vocab, "hidden": whole(c.Hidden), "ffn": p.ffn, "latent": whole(d.Latent), "waist": whole(d.QueryRank), "values": p.heads.times(d.Value),
		"experts": whole(c.MoE.Experts), "expert": p.expert, "shared": p.expert.times(d.Shared),
	}))
}

// ignore: layers behind the last one guess the token after next.
func (m *deepseek) ignore(name string) bool {
	if rest, ok := strings.CutPrefix(name, "model.layers."); ok {
		number, _, _ := strings.Cut(rest, ".")
		if n, err := strconv.Atoi(number); err == nil && n >= m.cfg.Layers {
			return true
		}
	}
	return m.decoder.ignore(name)
}

// stacks are the matrices that are cut: by heads, and so that halves of a key turn
// where the checkpoint has neighbours turn.
func (m *deepseek) stacks() (all []stack) {
	c, d, p := m.cfg, m.cfg.Deepseek, m.cfg.dims()
	heads := p.heads
	wide, pair := d.Nope+d.Rope, d.Nope+d.Value
	for i := range m.Layers {
		l, prefix := &m.Layers[i], fmt.Sprintf("model.layers.%d.self_attn.", i)
		query, in := "q_proj.weight", c.Hidden
		if d.QueryRank > 0 {
			query, in = "q_b_proj.weight", d.QueryRank
		}
		all = append(all,
			stack{names: []string{prefix + query}, experts: 1, out: heads.times(wide), in: whole(in), targets: l.query[:], rows: func(_, _ int) (rows []int, turned bool) {
				for h := heads.from; h < heads.from+heads.n; h++ {
					rows = append(rows, span(h*wide, d.Nope)...)
					rows = append(rows, d.halves(h*wide+d.Nope)...)
				}
				return rows, false
			}},
			stack{names: []string{prefix + "kv_a_proj_with_mqa.weight"}, experts: 1, out: whole(d.Latent + d.Rope), in: whole(c.Hidden), targets: l.lower[:],
				rows: func(_, target int) ([]int, bool) {
					if target == 0 {
						return span(0, d.Latent), false
					}
					return d.halves(d.Latent), false
				}},
			stack{names: []string{prefix + "kv_b_proj.weight"}, experts: c.Heads, out: heads.times(pair), in: whole(d.Latent), targets: l.raises[:],
				rows: func(head, target int) ([]int, bool) {
					head += heads.from
					if target == 0 {
						return span(head*pair, d.Nope), true
					}
					return span(head*pair+d.Nope, d.Value), false
				}})
	}
	return all
}

// span is n rows from from on.
func span(from, n int) []int {
	rows := make([]int, n)
	for i := range rows {
		rows[i] = from + i
	}
	return rows
}

// halves is the rows of a part that turns, of neighbours the first ones first.
func (d *deepseekConfig) halves(from int) []int {
	rows := span(from, d.Rope)
	if d.Interleaved {
		for i := range d.Rope / 2 {
			rows[i], rows[i+d.Rope/2] = from+2*i, from+2*i+1
		}
	}
	return rows
}

func (m *deepseek) alloc(to memory) error {
	m.tie()
	c, d := m.cfg, m.cfg.Deepseek
	a := allocator{to: to}
	rows := func(r backend.Rows) (rowBuffers, deepseekRows) {
		return rowBuffers{
				x: a.alloc(r, c.Hidden), normed: a.alloc(r, c.Hidden), delta: a.alloc(r, c.Hidden), gate: a.alloc(r, c.FFN), up: a.alloc(r, c.FFN),
			}, deepseekRows{
				read: a.alloc(r, c.Heads*d.Latent), scratch: a.alloc(r, c.Heads*d.Latent),
				values: a.alloc(r, c.Heads*d.Value), slots: a.alloc(r, c.Heads*d.Value),
				shared: a.alloc(r, c.MoE.FFN*d.Shared), sharedUp: a.alloc(r, c.MoE.FFN*d.Shared), sum: a.alloc(r, c.Hidden),
			}
	}
	m.decoder.tokens, m.tokens = rows(backend.TokenRows)
	m.decoder.outputs, m.outputs = rows(backend.OutputRows)
	m.waist = a.alloc(backend.TokenRows, max(d.QueryRank, 1))
	m.q, m.nope = a.alloc(backend.TokenRows, c.Heads*(d.Nope+d.Rope)), a.alloc(backend.TokenRows, c.Heads*d.Nope)
	m.absorbed = a.alloc(backend.TokenRows, c.Heads*(d.Latent+d.Rope))
	m.latent, m.key = a.alloc(backend.TokenRows, d.Latent), a.alloc(backend.TokenRows, d.Rope)
	m.scores, m.share = a.logits(c)
	var err error
	m.tokens.moe, m.outputs.moe, err = allocMoE(to, c, a.err)
	return err
}

func (m *deepseek) forward(b backend.Backend) {
	r := m.begin(b, m.Layers[0].InputNorm)
	for i := range m.Layers {
		l, next := &m.Layers[i], m.Norm
		if i+1 < len(m.Layers) {
			next = m.Layers[i+1].InputNorm
		}
		r = m.attention(b, i, r)
		b.AddRMSNorm(r.normed, r.x, r.delta, l.PostNorm, m.cfg.Eps)
		if l.MoE != nil {
			m.moe(b, r, l)
		} else {
			m.mlp(b, r, l.MLP)
		}
		b.AddRMSNorm(r.normed, r.x, r.delta, next, m.cfg.Eps)
	}
	m.end(b, r)
}

// attention is layer i's, from normed to delta.
func (m *deepseek) attention(b backend.Backend, i int, r *rowBuffers) *rowBuffers {
	c, d, l, to := m.cfg, m.cfg.Deepseek, &m.Layers[i], &m.tokens
	from := r.normed
	if l.Waist != nil {
		b.Linear(m.waist, r.normed, l.Waist.A, backend.NoWeight)
		b.RMSNorm(m.waist, m.waist, l.Waist.Norm, c.Eps)
		from = m.waist
	}
	b.Linear(m.q, from, l.query[0][0], backend.NoWeight)
	b.Rope(m.q, c.Heads, d.Nope+d.Rope, &m.rope)
	b.HeadLinear(m.absorbed, m.q, backend.HeadSpec{Weights: l.raises[0], In: m.nope, Out: to.scratch})
	b.Linear(m.latent, r.normed, l.lower[0][0], backend.NoWeight)
	b.RMSNorm(m.latent, m.latent, l.KVNorm, c.Eps)
	b.Linear(m.key, r.normed, l.lower[1][0], backend.NoWeight)
	b.Rope(m.key, 1, d.Rope, &m.rope)
	b.StoreKV(i, m.latent, m.key)
	b.Mark(i)
	b.Attention(to.read, m.absorbed, backend.AttentionSpec{Layer: i, Heads: c.Heads, KVHeads: 1, HeadDim: d.Latent + d.Rope, Scale: d.Scale})
	if i+1 == c.Layers {
		b.Rows(m.outputs.read, to.read)
		b.Rows(m.decoder.outputs.x, r.x)
		r, to = &m.decoder.outputs, &m.outputs
	}
	b.HeadLinear(to.values, to.read, backend.HeadSpec{Weights: l.raises[1], In: to.scratch, Out: to.slots})
	b.Linear(r.delta, to.values, l.O, backend.NoWeight)
	b.AllReduce(r.delta)
	return r
}

// moe is a layer's router, experts and shared experts, from normed to delta.
func (m *deepseek) moe(b backend.Backend, r *rowBuffers, l *deepseekLayer) {
	c, d, to := m.cfg, m.cfg.Deepseek, &m.tokens
	if r == &m.decoder.outputs {
		to = &m.outputs
	}
	spec := backend.MoESpec{
		TopK: c.MoE.TopK, Normalize: c.MoE.Normalize, Hidden: to.moe.hidden, Inner: to.moe.inner, InnerUp: to.moe.up,
		Sigmoid: &backend.SigmoidRouter{Bias: l.MoE.Bias, Groups: d.Groups, Keep: d.KeepGroups, Factor: d.Factor},
	}
	for _, e := range l.MoE.Experts {
		spec.Gate, spec.Up, spec.Down = append(spec.Gate, e.Gate), append(spec.Up, e.Up), append(spec.Down, e.Down)
	}
	b.Linear(to.moe.router, r.normed, l.MoE.Router, backend.NoWeight)
	b.MoE(r.delta, r.normed, to.moe.router, spec)
	b.Linear(to.shared, r.normed, l.Shared.Gate, backend.NoWeight)
	b.Linear(to.sharedUp, r.normed, l.Shared.Up, backend.NoWeight)
	b.GatedAct(to.shared, to.shared, to.sharedUp, backend.SiLU)
	b.Linear(to.sum, to.shared, l.Shared.Down, backend.NoWeight)
	b.Add(r.delta, to.sum, backend.NoWeight)
	b.AllReduce(r.delta)
}
