package model

import (
	"fmt"
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

// RopeConfig is the rotation of a checkpoint. The numbers after Type are used by
// the types that have them alone.
type RopeConfig struct {
	Theta    float64
	Type     string  // default, llama3 or yarn
	Factor   float64 // by how much low frequencies are stretched
	LowFreq  float64 // wavelengths above Original/LowFreq are stretched
	HighFreq float64 // wavelengths below Original/HighFreq are left
	Original float64 // context of the training before the stretch, tokens

	BetaFast, BetaSlow float64 // of yarn: turns in Original above which a frequency is left, below which it is stretched
	Whole              bool    // of yarn: the ramp between them begins and ends at whole pairs
	Attention          float64 // of yarn: on cosine and sine; 0: 0.1 ln(Factor) + 1
	Partial            float64 // of proportional: the share of pairs that turn
	MScale, MScaleAll  float64 // of yarn: instead of Attention, the quotient of two such; 0: not
}

func (c *RopeConfig) check() error {
	if !(c.Theta > 1) || math.IsInf(c.Theta, 0) {
		return fmt.Errorf("%w: rope_theta is %v", ErrConfig, c.Theta)
	}
	switch c.Type {
	case "default":
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
	return fmt.Errorf("%w: rope_type is %q; supported: default, llama3, yarn", ErrUnsupported, c.Type)
}

// table is the rotation of a head: one inverse frequency per pair of halves.
func (c *RopeConfig) table(headDim int) backend.Rope {
	inv := make([]float32, headDim/2)
	for i := range inv {
		f := math.Pow(c.Theta, -2*float64(i)/float64(headDim))
		switch c.Type {
		case "llama3":
			f = c.stretch(f)
		case "proportional":
			if i >= int(c.Partial*float64(headDim)/2) {
				f = 0
			}
			f /= max(c.Factor, 1)
		case "yarn":
			ramp := c.ramp(i, headDim)
			f = f/c.Factor*ramp + f*(1-ramp)
		}
		inv[i] = float32(f)
	}
	return backend.Rope{InvFreq: inv, Scale: float32(c.scale())}
}

// ramp is how much of yarn's stretch pair i takes: 0 for those that turn often,
// 1 for those that hardly turn at all.
func (c *RopeConfig) ramp(i, headDim int) float64 {
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
	return min(max((float64(i)-lo)/(hi-lo), 0), 1)
}

// scale is on cosine and sine: a longer context wants sharper scores.
func (c *RopeConfig) scale() float64 {
	switch {
	case c.Type != "yarn":
		return 1
	case c.Attention > 0:
		return c.Attention
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
// smoothly from one to the other between.
func (c *RopeConfig) stretch(f float64) float64 {
	wavelength := 2 * math.Pi / f
	switch {
	case wavelength > c.Original/c.LowFreq:
		return f / c.Factor
	case wavelength < c.Original/c.HighFreq:
		return f
	}
	mix := (c.Original/wavelength - c.LowFreq) / (c.HighFreq - c.LowFreq)
	return (1-mix)*f/c.Factor + mix*f
}
