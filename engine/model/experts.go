package model

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
)

// MoEConfig is the mixture of experts of a checkpoint; without one it is zero.
type MoEConfig struct {
	Experts    int
	TopK       int   // experts of a token
	FFN        int   // width between an expert's projections
	Normalize  bool  // the weights of the chosen are divided by their sum
	Every      int   // layers Every-1, 2·Every-1, … have experts
	Dense      []int // but these layers have none
	FirstDense int   `fingerprint:"new"` // nor do so many first layers

	Shared     int     `fingerprint:"new"` // width of an MLP that all tokens go through in addition; 0: none
	SharedGate bool    `fingerprint:"new"` // what that MLP returns is multiplied by the logistic function of a product
	Factor     float32 `fingerprint:"new"` // multiplies what the chosen experts return; 0: 1

	Sigmoid            bool `fingerprint:"new"` // experts are chosen by the logistic function of their scores, and a bias
	Groups, KeepGroups int  `fingerprint:"new"` // the chosen are of the KeepGroups best groups; 0: of all
	RouterBias         bool `fingerprint:"new"`
	Clamped            bool `fingerprint:"new"` // experts have GPT-OSS's activation
	Biases             bool `fingerprint:"new"` // of the experts' projections
}

func (m *MoEConfig) layer(i int) bool {
	return m.Experts > 0 && i >= m.FirstDense && (i+1)%m.Every == 0 && !slices.Contains(m.Dense, i)
}

// check bounds the configuration of experts.
func (m *MoEConfig) check(c *Config) error {
	if m.Experts < 1 || m.Experts > maxExperts || m.TopK < 1 || m.TopK > m.Experts {
		return fmt.Errorf("%w: config.json: num_experts_per_tok is %d, num_experts %d of at most %d", ErrConfig, m.TopK, m.Experts, maxExperts)
	}
	if c.Layers > maxAllExperts/m.Experts {
		return fmt.Errorf("%w: config.json: %d layers of %d experts, at most %d experts in all", ErrConfig, c.Layers, m.Experts, maxAllExperts)
	}
	// The buffers of a step are TopK times as wide.
	if m.FFN < 1 || m.FFN > maxDim/m.TopK || c.Hidden > maxDim/m.TopK {
		return fmt.Errorf("%w: config.json: moe_intermediate_size is %d and hidden_size %d with %d experts per token, not between 1 and %d",
			ErrConfig, m.FFN, c.Hidden, m.TopK, maxDim/m.TopK)
	}
	if m.Every < 1 || m.Every > maxLayers {
		return fmt.Errorf("%w: config.json: decoder_sparse_step is %d, not between 1 and %d", ErrConfig, m.Every, maxLayers)
	}
	if m.Shared < 0 || m.Shared > maxDim || m.FirstDense < 0 || m.FirstDense > maxLayers {
		return fmt.Errorf("%w: config.json: shared experts of a width of %d, first_k_dense_replace %d", ErrConfig, m.Shared, m.FirstDense)
	}
	if !m.Sigmoid && m.Groups == 0 {
		return nil
	}
	if m.Groups < 1 || m.Experts%m.Groups != 0 || m.KeepGroups < 1 || m.KeepGroups > m.Groups || m.TopK > m.Experts/m.Groups*m.KeepGroups {
		return fmt.Errorf("%w: config.json: num_experts_per_tok %d out of the best topk_group %d of n_group %d, of %d experts in all",
			ErrConfig, m.TopK, m.KeepGroups, m.Groups, m.Experts)
	}
	if !(m.Factor > 0) {
		return fmt.Errorf("%w: config.json: routed_scaling_factor is %v", ErrConfig, m.Factor)
	}
	return nil
}

// expertsLayer is a router and its experts. The experts' weights are in Experts where the
// checkpoint has a tensor for each, in stacked where one tensor has those of all.
type expertsLayer struct {
	Router  backend.Weight `hf:"gate.weight" shape:"experts,hidden"`
	Bias    *routerBias    `hf:"gate"`
	Choice  *choiceBias    `hf:"gate"`
	Experts []expert       `hf:"experts"`
	Shared  *sharedMLP     `hf:"shared_experts"`
	Gate    *sharedGate    `hf:""`

	stacked stackedExperts
}

type routerBias struct {
	Bias backend.Weight `hf:"bias" shape:"experts"`
}

// choiceBias is added to scores where experts are chosen, not to their weights.
type choiceBias struct {
	Bias backend.Weight `hf:"e_score_correction_bias" shape:"experts"`
}

type expert struct {
	Gate backend.Weight `hf:"gate_proj.weight" shape:"expert,hidden"`
	Up   backend.Weight `hf:"up_proj.weight" shape:"expert,hidden"`
	Down backend.Weight `hf:"down_proj.weight" shape:"hidden,expert"`
	Bias *expertBias    `hf:""`
}

type expertBias struct {
	Gate backend.Weight `hf:"gate_proj.bias" shape:"expert"`
	Up   backend.Weight `hf:"up_proj.bias" shape:"expert"`
	Down backend.Weight `hf:"down_proj.bias" shape:"hidden"`
}

// sharedMLP is the MLP that all tokens go through in addition to their experts.
type sharedMLP struct {
	Gate backend.Weight `hf:"gate_proj.weight" shape:"shared,hidden"`
	Up   backend.Weight `hf:"up_proj.weight" shape:"shared,hidden"`
	Down backend.Weight `hf:"down_proj.weight" shape:"hidden,shared"`
}

type sharedGate struct {
	Gate backend.Weight `hf:"shared_expert_gate.weight" shape:"one,hidden"`
}

// stackedExperts are the weights of a layer's experts, by expert.
type stackedExperts struct {
	gateUp, gateUpBias [2][]backend.Weight // of gate, of up
	down, downBias     [1][]backend.Weight
}

func newExperts(c *Config, arch *architecture) *expertsLayer {
	l := &expertsLayer{}
	if c.stacks(arch) == nil {
		l.Experts = make([]expert, c.MoE.Experts)
	}
	if c.MoE.Biases {
		for i := range l.Experts {
			l.Experts[i].Bias = &expertBias{}
		}
	}
	if c.MoE.RouterBias {
		l.Bias = &routerBias{}
	}
	if c.MoE.Sigmoid {
		l.Choice = &choiceBias{}
	}
	if c.MoE.Shared > 0 {
		l.Shared = &sharedMLP{}
		if c.MoE.SharedGate {
			l.Gate = &sharedGate{}
		}
	}
	return l
}

// stackNames are the tensors that hold the weights of all experts of a layer.
type stackNames struct {
	gateUp, down string // below the layer's prefix
	interleaved  bool   // rows of gate and up alternate; else gate is the first half
	byInput      bool   // [experts, in, out]; else [experts, out, in]
}

// findStacks finds out whether the experts of a layer share tensors, from the names of all tensors.
func (c *Config) findStacks(names []string) {
	if either := architectures[c.Architecture].either; either != nil {
		c.stacked = slices.ContainsFunc(names, func(name string) bool { return strings.HasSuffix(name, "."+either.gateUp) })
	}
}

// stacks returns the tensors of all experts of a layer; nil: each expert has tensors of its own.
func (c *Config) stacks(arch *architecture) *stackNames {
	if c.stacked {
		return arch.either
	}
	return arch.stacked
}

func (d *decoder) stacks() (all []stack) {
	c, wide, hidden := d.cfg, d.cfg.dims().expert, whole(d.cfg.Hidden)
	for i := range d.Layers {
		l, prefix := &d.Layers[i], fmt.Sprintf("model.layers.%d.", i)
		if l.Latent != nil {
			all = append(all, l.Latent.stacks(c, prefix+"self_attn.")...)
		}
		names := c.stacks(d.arch)
		if l.MoE == nil || names == nil {
			continue
		}
		add := func(name string, out, in part, targets [][]backend.Weight) {
			s := stack{names: []string{prefix + name}, experts: c.MoE.Experts, out: out, in: in, targets: targets}
			if names.interleaved {
				s.deal = alternate
			}
			switch {
			case in.of > 0 && c.MXFP4:
				s.names = []string{prefix + name + "_blocks", prefix + name + "_scales"}
			case in.of > 0:
				s.byInput = names.byInput
			}
			all = append(all, s)
		}
		e := &l.MoE.stacked
		add(names.gateUp, wide, hidden, e.gateUp[:])
		if c.MoE.Biases {
			add(names.gateUp+"_bias", wide, part{}, e.gateUpBias[:])
		}
		add(names.down, hidden, wide, e.down[:])
		if c.MoE.Biases {
			add(names.down+"_bias", hidden, part{}, e.downBias[:])
		}
	}
	return all
}

// moeBuffers are what experts work in, all of one row set.
type moeBuffers struct {
	router    backend.Buf // [experts]
	hidden    backend.Buf // [topK*hidden]
	inner, up backend.Buf // [topK*ffn of an expert]

	shared, sharedUp backend.Buf // [shared]
	sum              backend.Buf // [hidden] what the shared MLP returns
	gate             backend.Buf // [1]
}

func allocMoE(a *allocator, c *Config, r backend.Rows) moeBuffers {
	m := moeBuffers{
		router: a.alloc(r, c.MoE.Experts), hidden: a.alloc(r, c.MoE.TopK*c.Hidden),
		inner: a.alloc(r, c.MoE.TopK*c.MoE.FFN), up: a.alloc(r, c.MoE.TopK*c.MoE.FFN),
	}
	if c.MoE.Shared > 0 {
		m.shared, m.sharedUp, m.sum = a.alloc(r, c.MoE.Shared), a.alloc(r, c.MoE.Shared), a.alloc(r, c.Hidden)
		if c.MoE.SharedGate {
			m.gate = a.alloc(r, 1)
		}
	}
	return m
}

// experts is a layer's router, experts and shared MLP, into delta.
func (d *decoder) experts(b backend.Backend, r *rowBuffers, l *decoderLayer) {
	c, w, to, in := d.cfg, l.MoE, &r.experts, r.input(l.MLPNorm)
	bias := backend.NoWeight
	if w.Bias != nil {
		bias = w.Bias.Bias
	}
	b.Linear(to.router, in, w.Router, bias)
	b.MoE(r.delta, in, to.router, w.spec(c, to))
	if c.MoE.Factor != 0 && c.MoE.Groups == 0 {
		b.Scale(r.delta, c.MoE.Factor)
	}
	if w.Shared != nil {
		b.Linear(to.shared, in, w.Shared.Gate, backend.NoWeight)
		b.Linear(to.sharedUp, in, w.Shared.Up, backend.NoWeight)
		b.GatedAct(to.shared, to.shared, to.sharedUp, c.Features.act())
		b.Linear(to.sum, to.shared, w.Shared.Down, backend.NoWeight)
		if w.Gate != nil {
			b.Linear(to.gate, in, w.Gate.Gate, backend.NoWeight)
			b.Gate(to.sum, to.gate, to.sum)
		}
		b.Add(r.delta, to.sum, backend.NoWeight)
	}
	b.AllReduce(r.delta)
}

func (w *expertsLayer) spec(c *Config, to *moeBuffers) backend.MoESpec {
	s := backend.MoESpec{
		TopK: c.MoE.TopK, Normalize: c.MoE.Normalize, Act: c.Features.act(),
		Hidden: to.hidden, Inner: to.inner, InnerUp: to.up,
		Gate: w.stacked.gateUp[0], Up: w.stacked.gateUp[1], Down: w.stacked.down[0],
		GateBias: w.stacked.gateUpBias[0], UpBias: w.stacked.gateUpBias[1], DownBias: w.stacked.downBias[0],
	}
	if c.MoE.Clamped {
		s.Act = backend.ClampedSwish
	}
	if c.MoE.Groups > 0 {
		s.Sigmoid = &backend.SigmoidRouter{Softmax: true, Bias: backend.NoWeight, Groups: c.MoE.Groups, Keep: c.MoE.KeepGroups, Factor: c.MoE.Factor}
	}
	if w.Choice != nil {
		s.Sigmoid.Softmax, s.Sigmoid.Bias = false, w.Choice.Bias
	}
	for _, e := range w.Experts {
		s.Gate, s.Up, s.Down = append(s.Gate, e.Gate), append(s.Up, e.Up), append(s.Down, e.Down)
		if e.Bias != nil {
			s.GateBias, s.UpBias, s.DownBias = append(s.GateBias, e.Bias.Gate), append(s.UpBias, e.Bias.Up), append(s.DownBias, e.Bias.Down)
		}
	}
	s.DownBias = c.each(s.DownBias)
	return s
}
