package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/prove"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/roles"
)

// recording is the environment variable that makes a process a role of tandem that records its
// steps. Its value is the file, which has a line for each step.
const recording = "TANDEM_PROOF_STEPS"

// recorded runs a role of tandem and writes its steps to a file.
func recorded(file string) int {
	f, err := os.Create(file)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/sim/proof:", err)
		return 1
	}
	b := bufio.NewWriterSize(f, 1<<20)
	status := roles.MainWith(func(o *engine.Options) {
		step := o.Watch.Step
		o.Watch.Step = func(s profile.Shape, d time.Duration) {
			fmt.Fprintln(b, s.Streams, s.ContextSum, s.Chunk, s.Attended, d.Seconds())
			step(s, d)
		}
	}, "0.0.0", os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	if err := errors.Join(b.Flush(), f.Close()); err != nil {
		fmt.Fprintln(os.Stderr, "bench/sim/proof:", err)
		return 1
	}
	return status
}

// stepsFile returns the file of a node's steps.
func (o *options) stepsFile(node string) string { return filepath.Join(o.dir, node+".steps") }

// readSteps reads the steps of a node.
func readSteps(file string) (steps []profile.TimedStep, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(data)) {
		var s profile.TimedStep
		if _, err := fmt.Sscan(line, &s.Streams, &s.ContextSum, &s.Chunk, &s.Attended, &s.Seconds); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, line, err)
		}
		steps = append(steps, s)
	}
	return steps, nil
}

// leastSteps is how many steps of a kind compareSteps wants.
const leastSteps = 10

// compareSteps returns the mean times of steps next to those of a profile, by the sequences of a
// step, and those with prompt tokens together.
func compareSteps(p *profile.Profile, steps []profile.TimedStep) (figures []prove.Figure) {
	times, kinds := p.Times(), map[int][]profile.TimedStep{}
	for _, s := range steps {
		kind := int(s.Streams)
		if s.Chunk > 0 {
			kind = 0
		}
		kinds[kind] = append(kinds[kind], s)
	}
	most := 0
	for kind := range kinds {
		most = max(most, kind)
	}
	for kind := 0; kind <= most; kind++ {
		if len(kinds[kind]) < leastSteps {
			continue
		}
		var f prove.Figure
		var all []float64
		for _, s := range kinds[kind] {
			f.Predicted += 1e3 * times.Predict(&s) / float64(len(kinds[kind]))
			f.Measured += 1e3 * s.Seconds / float64(len(kinds[kind]))
			all = append(all, 1e3*s.Seconds)
		}
		slices.Sort(all)
		of := fmt.Sprintf("%d sequences", kind)
		if kind == 0 {
			of = "prompts"
		}
		f.Name = fmt.Sprintf("mean of %d steps of %s (p10 %.1f, p90 %.1f), ms", len(all), of, all[len(all)/10], all[len(all)*9/10])
		figures = append(figures, f)
	}
	return figures
}

// recordedFigures returns the figures of the nodes' steps in the last run; none without -record.
func (o *options) recordedFigures(p *profile.Profile) (figures []prove.Figure, err error) {
	if !o.record {
		return nil, nil
	}
	for _, node := range []string{"prefill-0", "decode-0"} {
		steps, err := readSteps(o.stepsFile(node))
		if err != nil {
			return nil, err
		}
		figures = append(figures, compareSteps(p, steps)...)
	}
	return figures, nil
}
