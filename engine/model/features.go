package model

import (
	"reflect"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Features are what the decoder computes in addition to, or instead of, the blocks of Llama.
// The zero value is Llama: norms before attention and MLP, no biases, a gated MLP with SiLU,
// and heads that rotate whole.
type Features struct {
	QKVBias, OutputBias bool // biases of the projections before and behind the heads
	MLPBias             bool // biases of dense MLPs
	Sinks               bool // a learned score for each head, which takes a share of the softmax

	Norms     normPlaces
	OnePlus   bool // norms multiply by 1 + weight
	HeadNorms headNormKind

	OutputGate bool // what each head read is multiplied by the logistic function of a projection

	GELU bool // gated MLPs use the tanh approximation of GELU instead of SiLU

	EmbedScale      float32 // multiplies embeddings; 0: 1
	ResidualScale   float32 // multiplies what attention and MLP add; 0: 1
	AttentionScale  float32 // multiplies scores; 0: HeadDim^-0.5
	LogitScale      float32 // multiplies logits; 0: 1
	ScoreSoftcap    float32 // bounds scores by tanh; 0: not bounded
	LogitSoftcap    float32 // bounds logits by tanh; 0: not bounded
	QueryGrowth     float32 // queries grow with the logarithm of the position; 0: they do not
	QueryGrowthSpan int     // positions in which queries do not grow

	RotaryDim   int        // columns of a head that rotate, its first ones; 0: all
	Interleaved bool       // neighbouring columns rotate together instead of halves
	LocalRope   RopeConfig // the rotation of layers with a window; Type "": that of all layers
	NoRope      []bool     // layers that do not rotate; nil: all rotate
}

// normPlaces names where a block has norms.
type normPlaces uint8

const (
	normsBefore normPlaces = iota // of what attention and MLP read
	normsAround                   // of what they read and of what they return
	normsBehind                   // of what they return
)

// headNormKind names how queries and keys are normed before the rotation.
type headNormKind uint8

const (
	noHeadNorms   headNormKind = iota
	eachHeadNorm               // each head by itself
	allHeadsNorms              // all heads of a token together
)

// zero reports whether the decoder computes Llama's blocks.
func (f *Features) zero() bool { return reflect.ValueOf(*f).IsZero() }

// act returns the activation of gated MLPs.
func (f *Features) act() backend.Act {
	if f.GELU {
		return backend.GELUTanh
	}
	return backend.SiLU
}
