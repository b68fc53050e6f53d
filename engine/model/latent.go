package model

import (
	"github.com/tandem-serving/tandem/engine/backend"
)

// latentConfig is DeepSeek's attention, which stores one latent per token.
type latentConfig struct {
	QueryRank    int // 0: queries are a product with the hidden state
	Latent, Rope int // columns that are stored of a token: the latent, and the key that rotates
	Nope, Value  int // columns of a head's key that do not rotate, of its values
	Interleaved  bool
	Scale        float32 // of scores
	Split        bool    `fingerprint:"new"` // the files have the matrices of keys and of values apart, those of keys turned
}

// latentLayer is a layer's attention over latents. Every head's keys and values are products of
// the latent with a matrix. Instead of computing them, the head's query goes through its key
// matrix, attends to the latents, and what it read of them goes through its value matrix: the
// same sums in another order.
type latentLayer struct {
	Waist  *latentWaist   `hf:""` // nil where queries have none
	KVNorm backend.Weight `hf:"kv_a_layernorm.weight" shape:"latent"`
	O      backend.Weight `hf:"o_proj.weight" shape:"hidden,values"`

	query  [1][]backend.Weight // one: [heads*(nope+rope), hidden or queryRank]
	lower  [2][]backend.Weight // one each: [latent, hidden], [rope, hidden]
	raises [2][]backend.Weight // per head: [latent, nope], [values, latent]
}

type latentWaist struct {
	A    backend.Weight `hf:"q_a_proj.weight" shape:"waist,hidden"`
	Norm backend.Weight `hf:"q_a_layernorm.weight" shape:"waist"`
}

func newLatentLayer(c *Config) *latentLayer {
	l := &latentLayer{}
	if c.Latent.QueryRank > 0 {
		l.Waist = &latentWaist{}
	}
	return l
}

// stacks returns the matrices that are cut: by heads, and so that halves of a key rotate where
// neighbours rotate in the checkpoint.
func (l *latentLayer) stacks(c *Config, prefix string) []stack {
	d, heads := c.Latent, c.dims().heads
	wide, pair := d.Nope+d.Rope, d.Nope+d.Value
	query, in := "q_proj.weight", c.Hidden
	if d.QueryRank > 0 {
		query, in = "q_b_proj.weight", d.QueryRank
	}
	all := []stack{
		{names: []string{prefix + query}, experts: 1, out: heads.times(wide), in: whole(in), targets: l.query[:],
			rows: func(_, _ int) (rows []int, turned bool) {
				for h := heads.from; h < heads.from+heads.n; h++ {
					rows = append(rows, span(h*wide, d.Nope)...)
					rows = append(rows, d.halves(h*wide+d.Nope)...)
				}
				return rows, false
			}},
		{names: []string{prefix + "kv_a_proj_with_mqa.weight"}, experts: 1, out: whole(d.Latent + d.Rope), in: whole(c.Hidden), targets: l.lower[:],
			rows: func(_, target int) ([]int, bool) {
				if target == 0 {
					return span(0, d.Latent), false
				}
				return d.halves(d.Latent), false
			}},
		{names: []string{prefix + "kv_b_proj.weight"}, experts: c.Heads, out: heads.times(pair), in: whole(d.Latent), targets: l.raises[:],
			rows: func(head, target int) ([]int, bool) {
				head += heads.from
				if target == 0 {
					return span(head*pair, d.Nope), true
				}
				return span(head*pair+d.Nope, d.Value), false
			}},
	}
	if !d.Split {
		return all
	}
	one := func(name string, rows, in int, targets [][]backend.Weight) stack {
		return stack{names: []string{prefix + name}, experts: c.Heads, out: heads.times(rows), in: whole(in), targets: targets,
			rows: func(head, _ int) ([]int, bool) { return span((heads.from+head)*rows, rows), false }}
	}
	return append(all[:2], one("k_b_proj.weight", d.Latent, d.Nope, l.raises[:1]), one("v_b_proj.weight", d.Value, d.Latent, l.raises[1:]))
}

// halves returns the rows of a part that rotates, of neighbours the first ones first.
func (d *latentConfig) halves(from int) []int {
	if !d.Interleaved {
		return span(from, d.Rope)
	}
	return neighbours(from, d.Rope)
}

// latentRows are the buffers of one row set.
type latentRows struct {
	read          backend.Buf // [heads*latent] what the heads read, of the latents
	scratch       backend.Buf // [heads*latent]
	values, slots backend.Buf // [heads*value]
}

// latentBuffers have a row per token.
type latentBuffers struct {
	waist       backend.Buf // [queryRank]
	q, absorbed backend.Buf // [heads*(nope+rope)], [heads*(latent+rope)]
	latent, key backend.Buf // [latent], [rope]
	nope        backend.Buf // [heads*nope], scratch
}

func allocLatentRows(a *allocator, c *Config, r backend.Rows) latentRows {
	l := c.Latent
	return latentRows{
		read: a.alloc(r, c.Heads*l.Latent), scratch: a.alloc(r, c.Heads*l.Latent),
		values: a.alloc(r, c.Heads*l.Value), slots: a.alloc(r, c.Heads*l.Value),
	}
}

func allocLatent(a *allocator, c *Config) latentBuffers {
	l, r := c.Latent, backend.TokenRows
	return latentBuffers{
		waist: a.alloc(r, max(l.QueryRank, 1)), q: a.alloc(r, c.Heads*(l.Nope+l.Rope)), nope: a.alloc(r, c.Heads*l.Nope),
		absorbed: a.alloc(r, c.Heads*(l.Latent+l.Rope)), latent: a.alloc(r, l.Latent), key: a.alloc(r, l.Rope),
	}
}

// attendLatent is layer i's attention over latents, from in to delta; see attend.
func (d *decoder) attendLatent(b backend.Backend, i int, r *rowBuffers, in backend.Buf) *rowBuffers {
	c, w, to, at := d.cfg, d.Layers[i].Latent, &d.latent, &r.latent
	l, from := c.Latent, in
	if w.Waist != nil {
		b.Linear(to.waist, in, w.Waist.A, backend.NoWeight)
		b.RMSNorm(to.waist, to.waist, w.Waist.Norm, c.Eps)
		from = to.waist
	}
	b.Linear(to.q, from, w.query[0][0], backend.NoWeight)
	b.Rope(to.q, c.Heads, l.Nope+l.Rope, &d.rope)
	b.HeadLinear(to.absorbed, to.q, backend.HeadSpec{Weights: w.raises[0], In: to.nope, Out: at.scratch})
	b.Linear(to.latent, in, w.lower[0][0], backend.NoWeight)
	b.RMSNorm(to.latent, to.latent, w.KVNorm, c.Eps)
	b.Linear(to.key, in, w.lower[1][0], backend.NoWeight)
	b.Rope(to.key, 1, l.Rope, &d.rope)
	b.StoreKV(i, to.latent, to.key)
	b.Mark(i)
	b.Attention(at.read, to.absorbed, backend.AttentionSpec{Layer: i, Heads: c.Heads, KVHeads: 1, HeadDim: l.Latent + l.Rope, Scale: l.Scale})
	if i+1 == c.Layers {
		b.Rows(d.outputs.latent.read, at.read)
		b.Rows(d.outputs.x, r.x)
		r = &d.outputs
		at = &r.latent
	}
	b.HeadLinear(at.values, at.read, backend.HeadSpec{Weights: w.raises[1], In: at.scratch, Out: at.slots})
	b.Linear(r.delta, at.values, w.O, backend.NoWeight)
	b.AllReduce(r.delta)
	return r
}
