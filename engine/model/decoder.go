package model

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
)

// decoder is the network of every architecture but Gemma 4: blocks of attention and a gated MLP
// around a residual stream. Config.Features, Config.MoE and Config.Latent
// select what its blocks compute.
// The tags hold Llama's names of tensors; the architecture's table entry has the names that differ.
type decoder struct {
	Embed  backend.Weight `hf:"model.embed_tokens.weight" shape:"vocab,hidden"`
	Norm   backend.Weight `hf:"model.norm.weight" shape:"hidden"`
	Head   backend.Weight `hf:"lm_head.weight" shape:"vocab,hidden"`
	Layers []decoderLayer `hf:"model.layers"`

	cfg         *Config
	arch        *architecture
	rope, local backend.Rope // of all layers; of those with a window, where that differs
	query       backend.Rope // of queries, where they grow with the position

	tokens  rowBuffers  // one row per token
	outputs rowBuffers  // one row per output: behind the last attention only these are read
	q       backend.Buf // [heads*headDim] per token
	k, v    backend.Buf // [kvHeads*headDim] per token
	gate    backend.Buf // [heads*headDim] per token, of OutputGate
	latent  latentBuffers
	delta   deltaBuffers
	scores  backend.Buf // [vocab] per output
	share   backend.Buf // [this rank's part of the vocabulary] per output; scores where that is all
}

// decoderLayer is a block. Weights that the architecture does not have are nil.
type decoderLayer struct {
	InputNorm *norm         `hf:"input_layernorm"`
	Heads     *headWeights  `hf:"self_attn"` // nil where attention stores latents
	Latent    *latentLayer  `hf:"self_attn"`
	Delta     *deltaLayer   `hf:"linear_attn"`
	AttnNorm  *norm         `hf:"post_self_attn_layernorm"`
	MLPNorm   *norm         `hf:"post_attention_layernorm"`
	MLP       *gatedMLP     `hf:"mlp"` // nil in a layer of experts
	MoE       *expertsLayer `hf:"mlp"` // nil in a dense layer
	OutNorm   *norm         `hf:"post_mlp_layernorm"`
}

// norm is the weight of an RMS norm over the hidden dimension.
type norm struct {
	Weight backend.Weight `hf:"weight" shape:"hidden"`
}

// headWeights are a layer's projections around attention over grouped heads.
type headWeights struct {
	Q        backend.Weight `hf:"q_proj.weight" shape:"q,hidden"`
	K        backend.Weight `hf:"k_proj.weight" shape:"kv,hidden"`
	V        backend.Weight `hf:"v_proj.weight" shape:"kv,hidden"`
	O        backend.Weight `hf:"o_proj.weight" shape:"hidden,q"`
	Bias     *qkvBias       `hf:""`
	OBias    *outputBias    `hf:""`
	Norms    *headNorms     `hf:""`
	AllNorms *allHeadNorms  `hf:""`
	Sinks    *sinks         `hf:""`
	Gate     *outputGate    `hf:""`
}

type qkvBias struct {
	Q backend.Weight `hf:"q_proj.bias" shape:"q"`
	K backend.Weight `hf:"k_proj.bias" shape:"kv"`
	V backend.Weight `hf:"v_proj.bias" shape:"kv"`
}

type outputBias struct {
	O backend.Weight `hf:"o_proj.bias" shape:"hidden"`
}

// headNorms are the norms of each query and key head before the rotation.
type headNorms struct {
	Q backend.Weight `hf:"q_norm.weight" shape:"head"`
	K backend.Weight `hf:"k_norm.weight" shape:"head"`
}

// allHeadNorms are the norms of all query heads and all key heads of a token.
type allHeadNorms struct {
	Q backend.Weight `hf:"q_norm.weight" shape:"q"`
	K backend.Weight `hf:"k_norm.weight" shape:"kv"`
}

// outputGate is in the tensor of the queries, each head's behind its query.
type outputGate struct {
	Gate backend.Weight `hf:"q_proj.gate.weight" shape:"q,hidden"`
}

type sinks struct {
	Sinks backend.Weight `hf:"sinks" shape:"heads"`
}

// gatedMLP is down(act(gate x)·up x).
type gatedMLP struct {
	Gate backend.Weight `hf:"gate_proj.weight" shape:"ffn,hidden"`
	Up   backend.Weight `hf:"up_proj.weight" shape:"ffn,hidden"`
	Down backend.Weight `hf:"down_proj.weight" shape:"hidden,ffn"`
	Bias *mlpBias       `hf:""`
}

type mlpBias struct {
	Gate backend.Weight `hf:"gate_proj.bias" shape:"ffn"`
	Up   backend.Weight `hf:"up_proj.bias" shape:"ffn"`
	Down backend.Weight `hf:"down_proj.bias" shape:"hidden"`
}

// rowBuffers are the buffers that a block works in, all of one row set.
type rowBuffers struct {
	x      backend.Buf // [hidden] the residual stream
	normed backend.Buf // [hidden]
	attn   backend.Buf // [heads*headDim] what the heads read
	read   backend.Buf // [valueHeads*valueDim] what is read of states
	delta  backend.Buf // [hidden] what attention or MLP adds to x
	gate   backend.Buf // [ffn]
	up     backend.Buf // [ffn]

	experts moeBuffers
	latent  latentRows
}

func newDecoder(c *Config) network {
	f := &c.Features
	d := &decoder{cfg: c, arch: architectures[c.Architecture], Layers: make([]decoderLayer, c.Layers)}
	if c.Apart {
		apart := *d.arch
		apart.fused, apart.stacked = nil, nil
		d.arch = &apart
	}
	d.rope = c.Rope.table(c.rotary())
	if f.QueryGrowth != 0 {
		d.query = d.rope
		d.query.Growth, d.query.Span = f.QueryGrowth, f.QueryGrowthSpan
	}
	if f.LocalRope.Type != "" {
		d.local = f.LocalRope.table(c.rotary())
	}
	optional := func(have bool) *norm {
		if have {
			return &norm{}
		}
		return nil
	}
	for i := range d.Layers {
		l := &d.Layers[i]
		l.InputNorm, l.MLPNorm = optional(f.Norms != normsBehind), optional(f.Norms != normsBehind)
		l.AttnNorm, l.OutNorm = optional(f.Norms != normsBefore), optional(f.Norms != normsBefore)
		if c.Delta.layer(i) {
			l.Delta = &deltaLayer{}
		} else if c.Latent != nil {
			l.Latent = newLatentLayer(c)
		} else {
			l.Heads = newHeads(f)
		}
		if c.MoE.layer(i) {
			l.MoE = newExperts(c, d.arch)
		} else if l.MLP = (&gatedMLP{}); f.MLPBias {
			l.MLP.Bias = &mlpBias{}
		}
	}
	return d
}

func newHeads(f *Features) *headWeights {
	w := &headWeights{}
	if f.QKVBias {
		w.Bias = &qkvBias{}
	}
	if f.OutputBias {
		w.OBias = &outputBias{}
	}
	switch f.HeadNorms {
	case eachHeadNorm:
		w.Norms = &headNorms{}
	case allHeadsNorms:
		w.AllNorms = &allHeadNorms{}
	}
	if f.Sinks {
		w.Sinks = &sinks{}
	}
	if f.OutputGate {
		w.Gate = &outputGate{}
	}
	return w
}

// rotary returns how many columns of a head rotate.
func (c *Config) rotary() int {
	switch {
	case c.Latent != nil:
		return c.Latent.Rope
	case c.Features.RotaryDim > 0:
		return c.Features.RotaryDim
	}
	return c.HeadDim
}

func (d *decoder) weights() []binding {
	c, p := d.cfg, d.cfg.dims()
	dims := map[string]part{
		"vocab": p.vocab, "hidden": whole(c.Hidden), "ffn": p.ffn, "q": p.heads.times(c.HeadDim), "kv": p.kvHeads.times(c.HeadDim),
		"head": whole(c.HeadDim), "heads": p.heads, "experts": whole(c.MoE.Experts), "expert": p.expert, "shared": p.shared,
		"one": whole(1),
	}
	if c.Delta != nil {
		c.Delta.dims(dims, p.keyHeads)
	}
	if l := c.Latent; l != nil {
		dims["latent"], dims["waist"], dims["values"] = whole(l.Latent), whole(l.QueryRank), p.heads.times(l.Value)
	}
	all := bindings(d, "", dims)
	if c.TieEmbedding {
		all = slices.DeleteFunc(all, func(b binding) bool { return b.target == &d.Head })
	}
	for i := range all {
		if c.Delta != nil {
			c.Delta.place(&all[i], p.keyHeads)
		}
		all[i].reorder(c)
	}
	return d.arch.place(all)
}

// ignore reports whether a tensor is of no use here: rotation tables of old checkpoints, the second
// copy of a tied embedding, a classifier, which the engine computes, and layers behind the last
// one or next to them all, which guess the token after next.
func (d *decoder) ignore(name string) bool {
	if rest, ok := strings.CutPrefix(name, "model.layers."); ok {
		number, _, _ := strings.Cut(rest, ".")
		if n, err := strconv.Atoi(number); err == nil && n >= d.cfg.Layers && d.arch.extraLayers {
			return true
		}
	}
	if strings.HasPrefix(name, "mtp.") && d.arch.extraLayers {
		return true
	}
	return d.cfg.labels > 0 && name == classifierName || strings.HasSuffix(name, ".rotary_emb.inv_freq") || d.cfg.TieEmbedding && name == "lm_head.weight"
}

func (d *decoder) alloc(to memory) error {
	if d.cfg.TieEmbedding {
		d.Head = d.Embed
	}
	c := d.cfg
	a := allocator{to: to}
	rows := func(r backend.Rows) (b rowBuffers) {
		b.x, b.normed, b.delta = a.alloc(r, c.Hidden), a.alloc(r, c.Hidden), a.alloc(r, c.Hidden)
		b.gate, b.up = a.alloc(r, c.FFN), a.alloc(r, c.FFN)
		if c.Latent != nil {
			b.latent = allocLatentRows(&a, c, r)
		} else {
			b.attn = a.alloc(r, c.Heads*c.HeadDim)
		}
		if c.Delta != nil {
			b.read = a.alloc(r, c.Delta.ValueHeads*c.Delta.ValueDim)
		}
		if c.MoE.Experts > 0 {
			b.experts = allocMoE(&a, c, r)
		}
		return b
	}
	d.tokens, d.outputs = rows(backend.TokenRows), rows(backend.OutputRows)
	if c.Latent != nil {
		d.latent = allocLatent(&a, c)
	} else {
		d.q = a.alloc(backend.TokenRows, c.Heads*c.HeadDim)
		d.k, d.v = a.alloc(backend.TokenRows, c.KVHeads*c.HeadDim), a.alloc(backend.TokenRows, c.KVHeads*c.HeadDim)
	}
	if c.Features.OutputGate {
		d.gate = a.alloc(backend.TokenRows, c.Heads*c.HeadDim)
	}
	if c.Delta != nil {
		d.delta = allocDelta(&a, c.Delta)
	}
	d.scores, d.share = a.logits(c)
	return a.err
}

func (d *decoder) logits() backend.Buf { return d.scores }

func (d *decoder) hidden() backend.Buf { return d.outputs.normed }

func (d *decoder) forward(b backend.Backend) {
	r := &d.tokens
	b.Embed(r.x, d.Embed)
	b.AllReduce(r.x)
	if s := d.cfg.Features.EmbedScale; s != 0 {
		b.Scale(r.x, s)
	}
	if first := d.Layers[0].InputNorm; first != nil {
		b.RMSNorm(r.normed, r.x, first.Weight, d.cfg.Eps)
	}
	for i := range d.Layers {
		l, next := &d.Layers[i], &norm{d.Norm}
		if i+1 < len(d.Layers) {
			next = d.Layers[i+1].InputNorm
		}
		r = d.attend(b, i, r)
		d.add(b, r, l.AttnNorm, l.MLPNorm)
		if l.MoE != nil {
			d.experts(b, r, l)
		} else {
			d.mlp(b, r, l)
		}
		d.add(b, r, l.OutNorm, next)
	}
	d.end(b, r)
}

// input returns what a block's half reads: the residual stream, or its norm.
func (r *rowBuffers) input(n *norm) backend.Buf {
	if n == nil {
		return r.x
	}
	return r.normed
}

// add adds delta, behind its own norm and factor, to the residual stream, and leaves the norm of
// the sum in normed. Either norm may be nil.
func (d *decoder) add(b backend.Backend, r *rowBuffers, own, next *norm) {
	if own != nil {
		b.RMSNorm(r.delta, r.delta, own.Weight, d.cfg.Eps)
	}
	if s := d.cfg.Features.ResidualScale; s != 0 {
		b.Scale(r.delta, s)
	}
	if next == nil {
		b.Add(r.x, r.delta, backend.NoWeight)
		return
	}
	b.AddRMSNorm(r.normed, r.x, r.delta, next.Weight, d.cfg.Eps)
}

// attend is layer i's attention, into delta. Behind the last layer's heads only the outputs' rows
// are read: attend returns the buffers to continue with.
func (d *decoder) attend(b backend.Backend, i int, r *rowBuffers) *rowBuffers {
	c, f, l := d.cfg, &d.cfg.Features, &d.Layers[i]
	in := r.input(l.InputNorm)
	if l.Delta != nil {
		return d.attendDelta(b, i, r, in)
	}
	if l.Latent != nil {
		return d.attendLatent(b, i, r, in)
	}
	w := l.Heads
	bias := qkvBias{backend.NoWeight, backend.NoWeight, backend.NoWeight}
	if w.Bias != nil {
		bias = *w.Bias
	}
	b.Linear(d.q, in, w.Q, bias.Q)
	b.Linear(d.k, in, w.K, bias.K)
	b.Linear(d.v, in, w.V, bias.V)
	switch {
	case w.Norms != nil:
		b.HeadNorm(d.q, d.q, c.Heads, c.HeadDim, w.Norms.Q, c.Eps)
		b.HeadNorm(d.k, d.k, c.KVHeads, c.HeadDim, w.Norms.K, c.Eps)
	case w.AllNorms != nil:
		b.RMSNorm(d.q, d.q, w.AllNorms.Q, c.Eps)
		b.RMSNorm(d.k, d.k, w.AllNorms.K, c.Eps)
	}
	if len(f.NoRope) == 0 || !f.NoRope[i] {
		rope := &d.rope
		if d.local.InvFreq != nil && c.window(i) > 0 {
			rope = &d.local
		}
		query := rope
		if d.query.InvFreq != nil {
			query = &d.query
		}
		b.Rope(d.q, c.Heads, c.HeadDim, query)
		b.Rope(d.k, c.KVHeads, c.HeadDim, rope)
	}
	kv := c.kvLayer(i)
	b.StoreKV(kv, d.k, d.v)
	b.Mark(kv)
	spec := backend.AttentionSpec{
		Layer: kv, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Scale: c.attentionScale(), Softcap: f.ScoreSoftcap, Window: c.window(i),
	}
	if w.Sinks != nil {
		spec.Sinks = &w.Sinks.Sinks
	}
	b.Attention(r.attn, d.q, spec)
	if w.Gate != nil {
		b.Linear(d.gate, in, w.Gate.Gate, backend.NoWeight)
		b.Gate(r.attn, d.gate, r.attn)
	}
	if i+1 == c.Layers {
		b.Rows(d.outputs.attn, r.attn)
		b.Rows(d.outputs.x, r.x)
		r = &d.outputs
	}
	out := backend.NoWeight
	if w.OBias != nil {
		out = c.once(w.OBias.O)
	}
	b.Linear(r.delta, r.attn, w.O, out)
	b.AllReduce(r.delta)
	return r
}

func (c *Config) attentionScale() float32 {
	if c.Features.AttentionScale != 0 {
		return c.Features.AttentionScale
	}
	return float32(1 / math.Sqrt(float64(c.HeadDim)))
}

// mlp is a dense MLP, into delta.
func (d *decoder) mlp(b backend.Backend, r *rowBuffers, l *decoderLayer) {
	w, in := l.MLP, r.input(l.MLPNorm)
	bias := mlpBias{backend.NoWeight, backend.NoWeight, backend.NoWeight}
	if w.Bias != nil {
		bias = *w.Bias
		bias.Down = d.cfg.once(bias.Down)
	}
	b.Linear(r.gate, in, w.Gate, bias.Gate)
	b.Linear(r.up, in, w.Up, bias.Up)
	b.GatedAct(r.gate, r.gate, r.up, d.cfg.Features.act())
	b.Linear(r.delta, r.gate, w.Down, bias.Down)
	b.AllReduce(r.delta)
}

// end turns the last norm's output into logits and tokens.
func (d *decoder) end(b backend.Backend, r *rowBuffers) {
	b.Linear(d.share, r.normed, d.Head, backend.NoWeight)
	b.AllGather(d.scores, d.share)
	if s := d.cfg.Features.LogitScale; s != 0 {
		b.Scale(d.scores, s)
	}
	if s := d.cfg.Features.LogitSoftcap; s > 0 {
		b.Softcap(d.scores, s)
	}
	b.Sample(d.scores)
}
