package model

import (
	"fmt"
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

// RopeConfig is the rotation of a checkpoint. The four numbers after Type are
// used by type llama3 alone.
type RopeConfig struct {
	Theta    float64
	Type     string  // default or llama3
	Factor   float64 // by how much low frequencies are stretched
	LowFreq  float64 // wavelengths above Original/LowFreq are stretched
	HighFreq float64 // wavelengths below Original/HighFreq are left
	Original float64 // context of the training before the stretch, tokens
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
	}
	return fmt.Errorf("%w: rope_type is %q; supported: default, llama3", ErrUnsupported, c.Type)
}

// table is the rotation of a head: one inverse frequency per pair of halves.
func (c *RopeConfig) table(headDim int) backend.Rope {
	inv := make([]float32, headDim/2)
	for i := range inv {
		f := math.Pow(c.Theta, -2*float64(i)/float64(headDim))
		if c.Type == "llama3" {
			f = c.stretch(f)
		}
		inv[i] = float32(f)
	}
	return backend.Rope{InvFreq: inv, Scale: 1}
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
