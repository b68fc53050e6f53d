package model

import (
	"math"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
)

// decoder is what the architectures of pre-norm blocks share: the two ends of
// the model, the buffers between, and attention with rotated positions over
// grouped heads, without biases. An architecture embeds it and adds its layers.
type decoder struct {
	Embed backend.Weight `hf:"model.embed_tokens.weight" shape:"vocab,hidden"`
	Norm  backend.Weight `hf:"model.norm.weight" shape:"hidden"`
	Head  backend.Weight `hf:"lm_head.weight" shape:"vocab,hidden"`

	cfg  *Config
	rope backend.Rope

	tokens  rowBuffers  // one row per token
	outputs rowBuffers  // one row per output: behind the last attention only these matter
	q       backend.Buf // [heads*headDim] per token
	k, v    backend.Buf // [kvHeads*headDim] per token
	scores  backend.Buf // [vocab] per output
	share   backend.Buf // [this rank's part of the vocabulary] per output; scores where that is all
}

// rowBuffers are the buffers that a block works in, all of one row set.
type rowBuffers struct {
	x      backend.Buf // [hidden] the residual stream
	normed backend.Buf // [hidden]
	attn   backend.Buf // [heads*headDim] what the heads read
	delta  backend.Buf // [hidden] what attention or MLP adds to x
	gate   backend.Buf // [ffn]
	up     backend.Buf // [ffn]
}

// attentionWeights are a layer's projections around attention.
type attentionWeights struct {
	Q backend.Weight `hf:"self_attn.q_proj.weight" shape:"q,hidden"`
	K backend.Weight `hf:"self_attn.k_proj.weight" shape:"kv,hidden"`
	V backend.Weight `hf:"self_attn.v_proj.weight" shape:"kv,hidden"`
	O backend.Weight `hf:"self_attn.o_proj.weight" shape:"hidden,q"`
}

// headNorms are the norms of each query and key head before the rotation.
type headNorms struct {
	Q backend.Weight `hf:"self_attn.q_norm.weight" shape:"head"`
	K backend.Weight `hf:"self_attn.k_norm.weight" shape:"head"`
}

// gatedMLP is down(silu(gate x)·up x).
type gatedMLP struct {
	Gate backend.Weight `hf:"gate_proj.weight" shape:"ffn,hidden"`
	Up   backend.Weight `hf:"up_proj.weight" shape:"ffn,hidden"`
	Down backend.Weight `hf:"down_proj.weight" shape:"hidden,ffn"`
}

func newDecoder(c *Config) decoder { return decoder{cfg: c, rope: c.Rope.table(c.HeadDim)} }

// bind lists the weights of the architecture that embeds d.
func (d *decoder) bind(model any) []binding {
	c, p := d.cfg, d.cfg.dims()
	return d.untied(bindings(model, "", map[string]part{
		"vocab": p.vocab, "hidden": whole(c.Hidden), "ffn": p.ffn, "q": p.heads.times(c.HeadDim), "kv": p.kvHeads.times(c.HeadDim),
		"head": whole(c.HeadDim), "heads": p.heads, "experts": whole(c.MoE.Experts), "expert": p.expert,
	}))
}

// untied leaves out the output projection where the embedding is that.
func (d *decoder) untied(all []binding) []binding {
	if d.cfg.TieEmbedding {
		all = slices.DeleteFunc(all, func(b binding) bool { return b.target == &d.Head })
	}
	return all
}

// ignore: rotation tables that old checkpoints carry and nobody reads, and the
// second copy of a tied embedding.
func (d *decoder) ignore(name string) bool {
	return strings.HasSuffix(name, ".rotary_emb.inv_freq") || d.cfg.TieEmbedding && name == "lm_head.weight"
}

func (d *decoder) tie() {
	if d.cfg.TieEmbedding {
		d.Head = d.Embed
	}
}

func (d *decoder) alloc(to memory) error {
	d.tie()
	c := d.cfg
	a := allocator{to: to}
	rows := func(r backend.Rows) rowBuffers {
		return rowBuffers{
			x: a.alloc(r, c.Hidden), normed: a.alloc(r, c.Hidden), attn: a.alloc(r, c.Heads*c.HeadDim),
			delta: a.alloc(r, c.Hidden), gate: a.alloc(r, c.FFN), up: a.alloc(r, c.FFN),
		}
	}
	d.tokens, d.outputs = rows(backend.TokenRows), rows(backend.OutputRows)
	d.q = a.alloc(backend.TokenRows, c.Heads*c.HeadDim)
	d.k, d.v = a.alloc(backend.TokenRows, c.KVHeads*c.HeadDim), a.alloc(backend.TokenRows, c.KVHeads*c.HeadDim)
	d.scores, d.share = a.logits(c)
	return a.err
}

func (d *decoder) logits() backend.Buf { return d.scores }

// begin embeds the tokens and leaves the first layer's input in normed.
func (d *decoder) begin(b backend.Backend, norm backend.Weight) *rowBuffers {
	r := &d.tokens
	b.Embed(r.x, d.Embed)
	b.AllReduce(r.x)
	b.RMSNorm(r.normed, r.x, norm, d.cfg.Eps)
	return r
}

// attend is layer i's attention, from normed to delta; norms may be nil. Behind
// the last layer's heads nothing reads other rows than the outputs': it returns
// the buffers to go on with.
func (d *decoder) attend(b backend.Backend, i int, r *rowBuffers, w *attentionWeights, norms *headNorms) *rowBuffers {
	c := d.cfg
	b.Linear(d.q, r.normed, w.Q, backend.NoWeight)
	b.Linear(d.k, r.normed, w.K, backend.NoWeight)
	b.Linear(d.v, r.normed, w.V, backend.NoWeight)
	if norms != nil {
		b.HeadNorm(d.q, d.q, c.Heads, c.HeadDim, norms.Q, c.Eps)
		b.HeadNorm(d.k, d.k, c.KVHeads, c.HeadDim, norms.K, c.Eps)
	}
	b.Rope(d.q, c.Heads, c.HeadDim, &d.rope)
	b.Rope(d.k, c.KVHeads, c.HeadDim, &d.rope)
	b.StoreKV(i, d.k, d.v)
	b.Mark(i)
	b.Attention(r.attn, d.q, backend.AttentionSpec{
		Layer: i, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Scale: float32(1 / math.Sqrt(float64(c.HeadDim))), Window: c.window(i),
	})
	r = d.onlyOutputs(b, i, r)
	b.Linear(r.delta, r.attn, w.O, backend.NoWeight)
	b.AllReduce(r.delta)
	return r
}

// onlyOutputs goes on with the outputs' rows behind the last layer's heads.
func (d *decoder) onlyOutputs(b backend.Backend, i int, r *rowBuffers) *rowBuffers {
	if i+1 < d.cfg.Layers {
		return r
	}
	b.Rows(d.outputs.attn, r.attn)
	b.Rows(d.outputs.x, r.x)
	return &d.outputs
}

// mlp is a dense MLP, from normed to delta.
func (d *decoder) mlp(b backend.Backend, r *rowBuffers, w *gatedMLP) {
	b.Linear(r.gate, r.normed, w.Gate, backend.NoWeight)
	b.Linear(r.up, r.normed, w.Up, backend.NoWeight)
	b.GatedAct(r.gate, r.gate, r.up, backend.SiLU)
	b.Linear(r.delta, r.gate, w.Down, backend.NoWeight)
	b.AllReduce(r.delta)
}

// end turns the last norm's output into logits and tokens.
func (d *decoder) end(b backend.Backend, r *rowBuffers) {
	b.Linear(d.share, r.normed, d.Head, backend.NoWeight)
	b.AllGather(d.scores, d.share)
	b.Sample(d.scores)
}
