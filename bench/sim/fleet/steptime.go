package fleet

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// StepTimes is the duration of a node's step as a function of its batch.
type StepTimes struct {
	Name   string
	Source string // of the figures; estimates are named as such
	// Step returns the duration of a step. It is also called for steps that are not computed in the
	// end. The sum of a run's durations must fit time.Duration.
	Step func(s Shape, poolTokens int) time.Duration
	// Count, if not nil, is called for each step that is computed.
	Count func(s Shape)
}

// Shape is the properties of a batch that determine its duration.
type Shape = profile.Shape

// shape computes a batch's Shape.
func shape(b *scheduler.Batch) Shape { return b.Shape() }

// stepTimes are the step times of StepTimesOf.
var stepTimes = []StepTimes{
	{
		Name:   "dynamo",
		Source: "the default polynomials of NVIDIA Dynamo's mocker (ai-dynamo, PyPI)",
		Step: func(s Shape, poolTokens int) time.Duration {
			ms := 0.0
			if n := float64(s.Chunk); n > 0 {
				ms += 4.209989e-07*n*n + 1.518344e-02*n + 1.650142e+01
			}
			if s.Streams > 0 {
				p := min(1, float64(s.ContextSum)/float64(poolTokens))
				ms += max(1, -25.74*p*p+54.01*p+5.74)
			}
			return time.Duration(ms * 1e6)
		},
	},
	linear("h100", "estimate: Llama-3.1-8B bf16 on one H100 SXM, fitted to aiconfigurator-core 0.12.0 (vLLM 0.24.0)",
		6.403e-3, 20.36e-6, 0.782e-9, 42.19e-9, 10.57e-6),
	linear("h200", "estimate: Llama-3.1-8B bf16 on one H200 SXM, fitted to aiconfigurator-core 0.12.0 (vLLM 0.24.0)",
		4.943e-3, 20.07e-6, 0.812e-9, 29.85e-9, 11.02e-6),
}

// linear returns step times with five coefficients, in seconds: per step, per prompt
// token, per pair of a prompt token and a token before it, per token of context and per
// stream.
func linear(name, source string, fixed, perToken, perPair, perContext, perStream float64) StepTimes {
	return StepTimes{Name: name, Source: source, Step: func(s Shape, _ int) time.Duration {
		t := fixed + perToken*float64(s.Chunk) + perPair*s.Attended + perContext*float64(s.ContextSum) + perStream*float64(s.Streams)
		return time.Duration(t * float64(time.Second))
	}}
}

// StepTimesOf returns step times by their name.
func StepTimesOf(name string) (StepTimes, error) {
	if i := slices.IndexFunc(stepTimes, func(t StepTimes) bool { return t.Name == name }); i >= 0 {
		return stepTimes[i], nil
	}
	return StepTimes{}, fmt.Errorf("%w: step times %q, want one of %s", ErrOptions, name, StepTimesNames())
}

// StepTimesNames returns the names that StepTimesOf knows.
func StepTimesNames() string {
	names := make([]string, len(stepTimes))
	for i := range stepTimes {
		names[i] = stepTimes[i].Name
	}
	return strings.Join(names, ", ")
}
