package cpu

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// checkFP8 returns an error for an FP8 matrix without valid scales or with a value that is not
// finite.
func checkFP8(t *backend.Tensor) error {
	if t.DType != backend.FP8 {
		return nil
	}
	if len(t.Shape) != 2 || !t.Scales.Fit(t.Shape[0], t.Shape[1]) {
		return fmt.Errorf("%w: scales of tensor %s %v", backend.ErrShape, t.Name, t.Shape)
	}
	if !t.Finite() {
		return fmt.Errorf("tensor %s: fp8 with a value or a scale that is not finite", t.Name)
	}
	return nil
}

// tileScales returns the scales as fp8.h reads them: 256 times each, for each tile and
// block. lanes is the number of values per tile and block. It is 1 if the outputs of
// every tile share blocks.
func tileScales(s *backend.Scales, out, in, tile int) (values []float32, lanes int) {
	across := s.Across(in)
	lanes = 1
	for n := range out {
		if n%tile > 0 && (s.Row+n)/s.Rows != (s.Row+n-1)/s.Rows {
			lanes = tile
		}
	}
	for first := 0; first < out; first += tile {
		for b := range across {
			for lane := range lanes {
				v := float32(0)
				if n := first + lane; n < out {
					v = 256 * s.Of(n, in)[b]
				}
				values = append(values, v)
			}
		}
	}
	return values, lanes
}
