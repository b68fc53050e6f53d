package profiler

import (
	"fmt"

	"github.com/tandem-serving/tandem/bench/sim/profile"
)

// fit completes a profile by the measured steps. It returns the result with ErrFit where the
// profile does not predict the shapes that were not fitted.
func (s *sweep) fit(p *profile.Profile) (*Result, error) {
	r := &Result{Profile: p}
	p.Step.Source = profile.Measured
	p.Step.Overhead = profile.Overhead{Between: round(quantile(s.between, 0.5)), Emit: round(quantile(s.emit, 0.5))}
	var decode, prefill, mixed []profile.TimedStep
	var noise []float64
	left := 0
	for _, o := range s.all() {
		if len(o.rounds) == 0 {
			left++
			continue
		}
		best := o.best()
		noise = append(noise, o.noise())
		t, seconds, spread := best.TimedStep, round(best.Seconds), round(best.spread)
		switch {
		case o.heldOut:
		case o.chunk == 0:
			decode = append(decode, t)
			p.Step.Decode.Points = append(p.Step.Decode.Points, []float64{float64(o.seqs), round(t.ContextSum / t.Streams), seconds, spread})
		case o.seqs == 0:
			prefill = append(prefill, t)
			p.Step.Prefill.Points = append(p.Step.Prefill.Points, []float64{float64(o.chunk), float64(o.start), seconds, spread})
		default:
			mixed = append(mixed, t)
		}
	}
	if len(decode) < 4 || len(prefill) < 4 {
		return nil, fmt.Errorf("%w: only %d shapes of decoding and %d of prompts were measured: give a longer --budget, a longer --max-model-len or more KV memory", ErrOption, len(decode), len(prefill))
	}
	d, c := &p.Step.Decode, &p.Step.Prefill
	d.FitDecode(decode)
	c.FitPrefill(prefill)
	roundAll(p)
	p.Step.Mixed.Gamma = 1
	p.FitMixed(mixed)
	p.Step.Mixed.Gamma = round(p.Step.Mixed.Gamma)
	p.Measured.Noise = round(quantile(noise, 0.5))
	times := p.Times()
	for _, o := range s.others {
		if o.heldOut && len(o.rounds) > 0 {
			t := o.best()
			r.HeldOut = append(r.HeldOut, Comparison{o.String(), times.Predict(&t.TimedStep), t.Seconds})
		}
	}
	if left > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%s not measured for lack of KV memory or of --budget: times there are computed by the fitted coefficients", was(left)))
	}
	if p.Measured.Noise > maxNoise {
		r.Notes = append(r.Notes, fmt.Sprintf("The machine was not quiet: steps of a shape took %.0f %% longer in the median round than in the best of %d: end other programs and repeat the measurement", 100*p.Measured.Noise, s.rounds))
	}
	if worst := max(d.MAPE, c.MAPE); worst > MaxFitError {
		r.Notes = append(r.Notes, fmt.Sprintf("The coefficients are off by %.0f %% on average, which counts for batches outside of the points only", 100*worst))
	}
	if mean, _ := r.Errors(); mean > MaxFitError {
		return r, fmt.Errorf("%w: shapes that were not fitted are off by %.1f %% on average, at most %.0f %% are accepted: repeat on a quiet machine, or give --accept to write the profile all the same", ErrFit, 100*mean, 100*MaxFitError)
	}
	return r, nil
}

// roundAll rounds the coefficients.
func roundAll(p *profile.Profile) {
	d, c := &p.Step.Decode, &p.Step.Prefill
	for _, x := range []*float64{&d.Fixed, &d.PerCtx, &d.PerSeq, &d.MAPE, &c.Floor, &c.Fixed, &c.PerToken, &c.PerPair, &c.MAPE} {
		*x = round(*x)
	}
}

// was returns a number of shapes with its verb.
func was(n int) string {
	if n == 1 {
		return "1 shape was"
	}
	return fmt.Sprintf("%d shapes were", n)
}
