// Package profiler measures the profile of a node, which the simulator and the planner read: step
// times over shapes of batches with the real engine, KV memory, and the time of a start.
//
// Each shape is measured in several rounds over all shapes, so that a slow change of the machine
// affects all alike. A shape's time is the median of its steps in the round in which that is
// lowest, because other processes only make steps longer. Some shapes are measured like the others
// and not fitted: the report compares them with the profile.
//
// Invariant: a profile that predicts the shapes that were not fitted worse than MaxFitError is
// returned with ErrFit. The package knows no network: the caller measures transfers.
package profiler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/engine"
)

// ErrOption means that nothing can be measured with the options. ErrFit means that the profile does
// not predict the shapes that were not fitted.
var (
	ErrOption = errors.New("profiler: bad option")
	ErrFit    = errors.New("profiler: bad fit")
)

// MaxFitError is the largest mean relative error of predictions that is accepted.
const MaxFitError = 0.10

// maxNoise is the largest noise that is not reported.
const maxNoise = 0.03

// Options describe a measurement.
type Options struct {
	Load   engine.LoadOptions
	Name   string        // of the kind of node; empty: the device's
	Model  string        // name of the model
	Price  float64       // US dollars for an hour of the node; 0: not known
	Watts  float64       // of the node; 0: not known
	Budget time.Duration // of the measurement after the model is loaded
	Seed   uint64        // of the tokens
	Log    io.Writer     // progress

	rounds int // most rounds; 0: maxRounds
}

// Result is a measured profile.
type Result struct {
	Profile *profile.Profile
	HeldOut []Comparison // shapes that were not fitted
	Notes   []string     // what limits the profile
}

// Comparison has the measured time of a shape and the profile's, in seconds.
type Comparison struct {
	Shape               string
	Predicted, Measured float64
}

// Error returns the relative error of the prediction.
func (c *Comparison) Error() float64 { return c.Predicted/c.Measured - 1 }

// Errors returns the mean and the largest relative error of the shapes that were not fitted.
func (r *Result) Errors() (mean, most float64) {
	for i := range r.HeldOut {
		e := math.Abs(r.HeldOut[i].Error())
		mean += e / float64(len(r.HeldOut))
		most = max(most, e)
	}
	return mean, most
}

// Measure loads the model and measures its steps. With ErrFit, it returns the result, too.
func Measure(ctx context.Context, o Options) (*Result, error) {
	if o.Budget < time.Second {
		return nil, fmt.Errorf("%w: --budget %v, want at least a second", ErrOption, o.Budget)
	}
	began := time.Now()
	l, err := engine.Load(o.Load)
	if err != nil {
		return nil, err
	}
	b, err := newBench(ctx, l, o.Load.Logger, o.Seed)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	warm, err := b.warmUp(ctx)
	var s *sweep
	if err == nil {
		s = newSweep(b, o.Budget, o.Log)
		s.mostRounds = cmp.Or(o.rounds, maxRounds)
		err = s.run(ctx)
	}
	b.stop()
	if err = errors.Join(err, l.Close()); err != nil {
		return nil, err
	}
	p := describe(&o, l)
	p.Start = profile.Start{Load: round(l.LoadTime.Seconds()), Warm: round(warm.Seconds())}
	r, err := s.fit(p)
	p.Measured.Seconds = round(time.Since(began).Seconds())
	return r, err
}

// describe returns the profile without figures of time.
func describe(o *Options, l *engine.Loaded) *profile.Profile {
	device := report.Machine()
	if variant := l.Backend.Variant(); variant != "" {
		device += ", " + variant
	}
	p := &profile.Profile{
		Version: profile.Version,
		Node:    profile.Node{Name: o.Name, Device: device, TP: l.Workers(), Price: o.Price, Watts: o.Watts},
		Model: profile.Model{
			Name: o.Model, Fingerprint: fmt.Sprintf("%#016x", l.Fingerprint), Class: l.Class, Layers: len(l.KV.Layers),
			Weights: float64(l.WeightBytes), KVBytes: l.KV.TokenBytes() * float64(l.Workers()), MaxLen: l.Scheduler.MaxModelLen,
		},
		Memory:  profile.Memory{Blocks: l.Plan.Tokens / l.Scheduler.Pool.BlockTokens, BlockTokens: l.Scheduler.Pool.BlockTokens},
		Gateway: profile.DefaultGateway(),
	}
	if p.Node.Name == "" {
		p.Node.Name = fmt.Sprintf("%s-%dcores", l.Backend.Variant(), runtime.GOMAXPROCS(0))
	}
	return p
}

// round rounds to four digits, so that the file is readable.
func round(x float64) float64 {
	if x == 0 || math.IsInf(x, 0) || math.IsNaN(x) {
		return x
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(x))))
	return math.Round(x*scale) / scale
}

// quantile returns a quantile of values, interpolated; 0 of none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	return report.Quantile(slices.Sorted(slices.Values(values)), 100*q)
}
