package profile

import (
	"math"
	"testing"
)

// near reports whether two figures differ by at most a thousandth.
func near(a, b float64) bool { return math.Abs(a-b) <= 1e-3*math.Abs(b)+1e-15 }

// Steps that follow coefficients exactly give these coefficients back.
func TestFitFindsCoefficients(t *testing.T) {
	want := named(t, "h200:llama-8b")
	want.Step.Mixed.Gamma = 0.4
	times := want.Times()
	var decode, prefill, mixed []TimedStep
	for seqs := 1.0; seqs <= 64; seqs *= 4 {
		for ctx := 32.0; ctx <= 8192; ctx *= 4 {
			s := DecodePoint([]float64{seqs, ctx, 1})
			s.Seconds = times.Predict(&s)
			decode = append(decode, s)
			s.Chunk, s.Attended = 2048, 2048*1024
			s.Seconds = times.Predict(&s)
			mixed = append(mixed, s)
		}
	}
	for chunk := 16.0; chunk <= 8192; chunk *= 2 {
		for _, start := range []float64{0, 1024, 16384} {
			s := PrefillPoint([]float64{chunk, start, 1})
			s.Seconds = times.Predict(&s)
			prefill = append(prefill, s)
		}
	}
	got := named(t, "l4:llama-8b")
	got.Step.Decode.FitDecode(decode)
	got.Step.Prefill.FitPrefill(prefill)
	got.FitMixed(mixed)
	d, r, wd, wr := got.Step.Decode, got.Step.Prefill, want.Step.Decode, want.Step.Prefill
	if !near(d.Fixed, wd.Fixed) || !near(d.PerCtx, wd.PerCtx) || !near(d.PerSeq, wd.PerSeq) || d.MAPE > 1e-3 {
		t.Errorf("decode: %+v, want %+v", d, wd)
	}
	if !near(r.Floor, wr.Floor) || !near(r.PerToken, wr.PerToken) || !near(r.PerPair, wr.PerPair) || r.MAPE > 1e-3 {
		t.Errorf("prefill: %+v, want %+v", r, wr)
	}
	if !near(got.Step.Mixed.Gamma, 0.4) {
		t.Errorf("gamma %g, want 0.4", got.Step.Mixed.Gamma)
	}
}

// No coefficient is negative, whatever the noise, and a fit of nothing does not panic.
func TestFitIsNotNegative(t *testing.T) {
	var d Decode
	d.FitDecode([]TimedStep{DecodePoint([]float64{1, 100, 5}), DecodePoint([]float64{2, 200, 4}), DecodePoint([]float64{4, 50, 3})})
	if d.Fixed <= 0 || d.PerCtx < 0 || d.PerSeq < 0 || !(d.MAPE > 0) {
		t.Errorf("%+v", d)
	}
	var r Prefill
	r.FitPrefill([]TimedStep{PrefillPoint([]float64{16, 0, 1}), PrefillPoint([]float64{16, 0, 1}), PrefillPoint([]float64{16, 0, 1})})
	if math.IsNaN(r.PerToken) || r.Fixed+r.PerToken+r.PerPair <= 0 {
		t.Errorf("%+v", r)
	}
}
