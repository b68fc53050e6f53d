package model

import (
	"fmt"
	"math"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// RopeConfig is the rotation of a checkpoint. Each number after Type is used by some types only.
type RopeConfig struct {
	Theta    float64
	Type     string  // a key of ropeKeys, or proportional
	Factor   float64 // by how much low frequencies are stretched
	LowFreq  float64 // wavelengths above Original/LowFreq are stretched
	HighFreq float64 // wavelengths below Original/HighFreq are left
	Original float64 // context of the training before the stretch, tokens

	BetaFast, BetaSlow float64 // of yarn: turns in Original above which a frequency is left, below which it is stretched
	Whole              bool    // of yarn: the ramp between them begins and ends at whole pairs
	Attention          float64 // of yarn: on cosine and sine; 0: 0.1 ln(Factor) + 1
	Partial            float64 // of proportional: the share of pairs that turn
	MScale, MScaleAll  float64 // of yarn: instead of Attention, the quotient of two such; 0: not

	Short, Long []float64 `fingerprint:"new"` // of longrope: what the wavelength of each pair is multiplied by
	Stretched   bool      `fingerprint:"new"` // of longrope and dynamic: the context served is longer than Original
}

// setContext sets how many positions are served. Transformers uses longrope's long factors, and
// dynamic's larger base, for sequences longer than Original, so that cached keys become wrong when
// their sequence grows past it. Here all sequences have the rotation of the longest one that is
// served, as in vLLM.
func (c *RopeConfig) setContext(positions int) {
	c.Stretched = (c.Type == "longrope" || c.Type == "dynamic") && float64(positions) > c.Original
}

func (c *RopeConfig) check() error {
	if !(c.Theta > 1) || math.IsInf(c.Theta, 0) {
		return fmt.Errorf("%w: rope_theta is %v", ErrConfig, c.Theta)
	}
	switch c.Type {
	case "default":
		return nil
	case "linear":
		if !(c.Factor >= 1) {
			return fmt.Errorf("%w: linear with factor %v", ErrConfig, c.Factor)
		}
		return nil
	case "dynamic":
		if !(c.Factor >= 1 && c.Original >= 1) {
			return fmt.Errorf("%w: dynamic with factor %v, max_position_embeddings %v", ErrConfig, c.Factor, c.Original)
		}
		return nil
	case "longrope":
		if !(c.Factor > 0 && c.Original > 1 && c.Attention >= 0) || slices.ContainsFunc(slices.Concat(c.Short, c.Long), func(f float64) bool { return !(f > 0) }) {
			return fmt.Errorf("%w: longrope with factor %v, original_max_position_embeddings %v, attention_factor %v", ErrConfig, c.Factor, c.Original, c.Attention)
		}
		return nil
	case "llama3":
		if !(c.Factor >= 1 && c.LowFreq > 0 && c.HighFreq > c.LowFreq && c.Original >= 1) {
			return fmt.Errorf("%w: llama3 with factor %v, low_freq_factor %v, high_freq_factor %v, original_max_position_embeddings %v",
				ErrConfig, c.Factor, c.LowFreq, c.HighFreq, c.Original)
		}
		return nil
	case "proportional":
		if !(c.Partial > 0 && c.Partial <= 1) || c.Factor != 0 && c.Factor < 1 {
			return fmt.Errorf("%w: proportional with partial_rotary_factor %v and factor %v", ErrConfig, c.Partial, c.Factor)
		}
		return nil
	case "yarn":
		if !(c.Factor >= 1 && c.BetaFast > 0 && c.BetaSlow > 0 && c.BetaFast >= c.BetaSlow && c.Original >= 1 && c.Attention >= 0) {
			return fmt.Errorf("%w: yarn with factor %v, beta_fast %v, beta_slow %v, original_max_position_embeddings %v, attention_factor %v",
				ErrConfig, c.Factor, c.BetaFast, c.BetaSlow, c.Original, c.Attention)
		}
		return nil
	}
	return fmt.Errorf("%w: rope_type is %q; supported: %s", ErrUnsupported, c.Type, ropeTypes)
}

// table returns the rotation of a head: one inverse frequency per pair of halves.
//
// All steps round to float32 in the order of transformers' modeling_rope_utils.py,
// because an error of one ulp turns into an angle that grows with the position. The
// conversions keep the compiler from fusing a product with a sum.
func (c *RopeConfig) table(headDim int) backend.Rope {
	inv := make([]float32, headDim/2)
	factor, theta := float32(c.Factor), c.Theta
	if c.Type == "dynamic" && c.Stretched && headDim > 2 { // for a sequence of Original*Factor positions
		theta *= math.Pow(c.Factor*c.Factor-(c.Factor-1), float64(headDim)/float64(headDim-2))
	}
	longrope := c.Short
	if c.Stretched {
		longrope = c.Long
	}
	for i := range inv {
		exponent := float32(2*i) / float32(headDim)
		power := float32(math.Pow(float64(float32(theta)), float64(exponent)))
		inv[i] = 1 / power
		switch c.Type {
		case "linear":
			inv[i] /= factor
		case "longrope":
			inv[i] = 1 / (float32(longrope[i]) * power)
		case "llama3":
			inv[i] = c.stretch(inv[i])
		case "proportional":
			if i >= int(c.Partial*float64(headDim)/2) {
				inv[i] = 0
			}
			inv[i] /= max(factor, 1)
		case "yarn":
			keep := 1 - c.ramp(i, headDim)
			stretched := 1 / (factor * power)
			inv[i] = float32(stretched*(1-keep)) + float32(inv[i]*keep)
		}
	}
	return backend.Rope{InvFreq: inv, Scale: float32(c.scale())}
}

// ramp returns the share of yarn's stretch for pair i: 0 for pairs that turn often in Original
// positions, 1 for pairs that hardly turn.
func (c *RopeConfig) ramp(i, headDim int) float32 {
	pair := func(turns float64) float64 {
		return float64(headDim) * math.Log(c.Original/(2*math.Pi*turns)) / (2 * math.Log(c.Theta))
	}
	lo, hi := pair(c.BetaFast), pair(c.BetaSlow)
	if c.Whole {
		lo, hi = math.Floor(lo), math.Ceil(hi)
	}
	lo, hi = max(lo, 0), min(hi, float64(headDim-1))
	if lo == hi {
		hi += 0.001
	}
	return min(max((float32(i)-float32(lo))/float32(hi-lo), 0), 1)
}

// scale returns the factor on cosine and sine, which sharpens scores in longer contexts.
func (c *RopeConfig) scale() float64 {
	switch {
	case c.Type != "yarn" && c.Type != "longrope":
		return 1
	case c.Attention > 0:
		return c.Attention
	case c.Type == "longrope" && c.Factor <= 1:
		return 1
	case c.Type == "longrope":
		return math.Sqrt(1 + math.Log(c.Factor)/math.Log(c.Original))
	case c.MScale > 0 && c.MScaleAll > 0:
		return mscale(c.Factor, c.MScale) / mscale(c.Factor, c.MScaleAll)
	}
	return mscale(c.Factor, 1)
}

func mscale(factor, m float64) float64 {
	if factor <= 1 {
		return 1
	}
	return 0.1*m*math.Log(factor) + 1
}

// stretch divides low frequencies by the factor, leaves high ones, and passes
// smoothly from one to the other between. A number divided by a tensor is the
// tensor's reciprocal times the number in torch.
func (c *RopeConfig) stretch(f float32) float32 {
	wavelength := 1 / f * float32(2*math.Pi)
	switch {
	case wavelength > float32(c.Original/c.LowFreq):
		return f / float32(c.Factor)
	case wavelength < float32(c.Original/c.HighFreq):
		return f
	}
	mix := (float32(1/wavelength*float32(c.Original)) - float32(c.LowFreq)) / float32(c.HighFreq-c.LowFreq)
	return float32((1-mix)*f/float32(c.Factor)) + float32(mix*f)
}
