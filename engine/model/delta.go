package model

import (
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
)

// deltaConfig is the gated delta rule of the layers whose memory is a state (backend.DeltaSpec).
type deltaConfig struct {
	Layers               []bool // those layers
	KeyHeads, ValueHeads int
	KeyDim, ValueDim     int  // of a head
	Mixed                bool // the files have the rows of all projections by key head, in two tensors
}

// layer reports whether layer i has a state.
func (d *deltaConfig) layer(i int) bool { return d != nil && d.Layers[i] }

// deltaLayer are the weights of such a layer.
type deltaLayer struct {
	QKV   backend.Weight `hf:"in_proj_qkv.weight" shape:"mix,hidden"`
	Z     backend.Weight `hf:"in_proj_z.weight" shape:"read,hidden"`
	Beta  backend.Weight `hf:"in_proj_b.weight" shape:"gates,hidden"`
	Alpha backend.Weight `hf:"in_proj_a.weight" shape:"gates,hidden"`
	Conv  backend.Weight `hf:"conv1d.weight" shape:"mix,one,taps"`
	Bias  backend.Weight `hf:"dt_bias" shape:"gates"`
	Decay backend.Weight `hf:"A_log" shape:"gates"`
	Norm  backend.Weight `hf:"norm.weight" shape:"column"`
	O     backend.Weight `hf:"out_proj.weight" shape:"hidden,read"`
}

// dims adds the dimensions of deltaLayer's weights. heads are the rank's key heads.
func (d *deltaConfig) dims(to map[string]part, heads part) {
	group := d.ValueHeads / d.KeyHeads
	to["mix"], to["read"], to["gates"] = heads.times(2*d.KeyDim+group*d.ValueDim), heads.times(group*d.ValueDim), heads.times(group)
	to["column"], to["taps"] = whole(d.ValueDim), whole(backend.DeltaConv)
}

func (d *deltaConfig) spec(layer, parts int) backend.DeltaSpec {
	return backend.DeltaSpec{Layer: layer, Parts: parts, KeyHeads: d.KeyHeads, ValueHeads: d.ValueHeads, KeyDim: d.KeyDim, ValueDim: d.ValueDim}
}

// stateGroups bounds the parts of a state, and so the KV groups of a model. maxLayers bounds the
// parts of all states, because a plan takes time in proportion to the square of the KV layers.
const stateGroups = 32

// parts returns in how many KV layers the state of a layer is. A part is one page of a block, and a
// block has about as many pages as there are layers of attention. Smaller parts leave less of the
// pages of keys and values empty, and make more KV groups.
func (d *deltaConfig) parts() int {
	states := 0
	for _, state := range d.Layers {
		if state {
			states++
		}
	}
	for n := d.KeyHeads; n > 1; n-- {
		if d.KeyHeads%n == 0 && n*states <= min(stateGroups*(len(d.Layers)-states), maxLayers) {
			return n
		}
	}
	return 1
}

// kvLayer returns the first KV layer of layer i.
func (c *Config) kvLayer(i int) int {
	if c.Delta == nil {
		return i
	}
	at, parts := 0, c.Delta.parts()
	for _, state := range c.Delta.Layers[:i] {
		if at++; state {
			at += parts - 1
		}
	}
	return at
}

// HasStates reports whether layers of the model have a state instead of keys and values. Such a
// model computes no token twice in place, so that it verifies no guessed tokens.
func (c *Config) HasStates() bool { return c.Delta != nil }

// DeltaSpec returns the shape of the model's states, without weights. HasStates must be true.
func (c *Config) DeltaSpec() backend.DeltaSpec { return c.Delta.spec(0, c.Delta.parts()) }

// place chooses the rows of a rank's key heads where they are not neighbours in the tensor. It
// renames the bindings of a checkpoint whose projections are mixed, and has their rows loaded in
// the order of the others.
func (d *deltaConfig) place(b *binding, heads part) {
	group := d.ValueHeads / d.KeyHeads
	wide := group * d.ValueDim
	name, ok := strings.CutSuffix(b.name, ".weight")
	if !ok {
		return
	}
	at := strings.LastIndex(name, ".") + 1
	weight := name[at:]
	if weight == "conv1d" || weight == "in_proj_qkv" && !d.Mixed {
		if keys := heads.of * d.KeyDim; !heads.whole() {
			b.rows = slices.Concat(span(heads.from*d.KeyDim, heads.n*d.KeyDim), span(keys+heads.from*d.KeyDim, heads.n*d.KeyDim), span(2*keys+heads.from*wide, heads.n*wide))
		}
		return
	}
	if !d.Mixed {
		return
	}
	pick := func(tensor string, of int, from, n int) { // of each head's rows
		for h := range heads.n {
			b.rows = append(b.rows, span((heads.from+h)*of+from, n)...)
		}
		b.name, b.shape[0], b.parts[0].of = name[:at]+tensor+".weight", heads.of*of, heads.of*of
	}
	const qkvz, ba = "in_proj_qkvz", "in_proj_ba"
	all := 2*d.KeyDim + 2*wide
	switch weight {
	case "in_proj_qkv":
		pick(qkvz, all, 0, d.KeyDim)
		pick(qkvz, all, d.KeyDim, d.KeyDim)
		pick(qkvz, all, 2*d.KeyDim, wide)
	case "in_proj_z":
		pick(qkvz, all, 2*d.KeyDim+wide, wide)
	case "in_proj_b":
		pick(ba, 2*group, 0, group)
	case "in_proj_a":
		pick(ba, 2*group, group, group)
	}
}

// deltaBuffers have a row per token.
type deltaBuffers struct {
	qkv         backend.Buf // [channels]
	z           backend.Buf // [valueHeads*valueDim]
	beta, alpha backend.Buf // [valueHeads]
}

func allocDelta(a *allocator, d *deltaConfig) deltaBuffers {
	r, spec := backend.TokenRows, d.spec(0, 1)
	return deltaBuffers{
		qkv: a.alloc(r, spec.Channels()), z: a.alloc(r, d.ValueHeads*d.ValueDim),
		beta: a.alloc(r, d.ValueHeads), alpha: a.alloc(r, d.ValueHeads),
	}
}

// attendDelta is layer i's gated delta rule, from in to delta; see attend.
func (d *decoder) attendDelta(b backend.Backend, i int, r *rowBuffers, in backend.Buf) *rowBuffers {
	c, w, to := d.cfg, d.Layers[i].Delta, &d.delta
	b.Linear(to.qkv, in, w.QKV, backend.NoWeight)
	b.Linear(to.z, in, w.Z, backend.NoWeight)
	b.Linear(to.beta, in, w.Beta, backend.NoWeight)
	b.Linear(to.alpha, in, w.Alpha, backend.NoWeight)
	spec := c.Delta.spec(c.kvLayer(i), c.Delta.parts())
	spec.Conv, spec.Bias, spec.Decay = w.Conv, w.Bias, w.Decay
	b.DeltaRule(r.read, to.qkv, to.beta, to.alpha, spec)
	for part := range spec.Parts {
		b.Mark(spec.Layer + part)
	}
	b.HeadNorm(r.read, r.read, c.Delta.ValueHeads, c.Delta.ValueDim, w.Norm, c.Eps)
	b.GatedAct(r.read, to.z, r.read, backend.SiLU)
	if i+1 == c.Layers {
		b.Rows(d.outputs.read, r.read)
		b.Rows(d.outputs.x, r.x)
		r = &d.outputs
	}
	b.Linear(r.delta, r.read, w.O, backend.NoWeight)
	b.AllReduce(r.delta)
	return r
}
