package fleet

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// StepTimes says how long a step of a node takes.
type StepTimes struct {
	Name   string
	Source string // of the figures; estimates say so
	Step   func(s Shape, poolTokens int) time.Duration
}

// Shape is what of a batch its time depends on.
type Shape struct {
	Chunk      int     // prompt tokens
	Attended   float64 // sum over the chunks' tokens of the tokens before each
	Streams    int     // sequences that decode one token
	ContextSum int     // tokens that these attend to
}

// shape counts a batch.
func shape(b *scheduler.Batch) (s Shape) {
	for i := range b.Seqs {
		q := &b.Seqs[i]
		if n := len(q.Tokens); n == 1 && q.Sample {
			s.Streams++
			s.ContextSum += q.Start + 1
		} else {
			s.Chunk += n
			s.Attended += float64(n) * (float64(q.Start) + float64(n)/2)
		}
	}
	return s
}

// stepTimes are those that StepTimesOf knows.
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

// linear are step times with five coefficients, in seconds: of a step, of a
// prompt token, of a pair of prompt token and token before it, of a token of
// context and of a stream.
func linear(name, source string, fixed, perToken, perPair, perContext, perStream float64) StepTimes {
	return StepTimes{name, source, func(s Shape, _ int) time.Duration {
		t := fixed + perToken*float64(s.Chunk) + perPair*s.Attended + perContext*float64(s.ContextSum) + perStream*float64(s.Streams)
		return time.Duration(t * float64(time.Second))
	}}
}

// StepTimesOf finds step times by their name.
func StepTimesOf(name string) (StepTimes, error) {
	if i := slices.IndexFunc(stepTimes, func(t StepTimes) bool { return t.Name == name }); i >= 0 {
		return stepTimes[i], nil
	}
	return StepTimes{}, fmt.Errorf("%w: step times %q, want one of %s", errOptions, name, StepTimesNames())
}

// StepTimesNames lists the names that StepTimesOf knows.
func StepTimesNames() string {
	names := make([]string, len(stepTimes))
	for i := range stepTimes {
		names[i] = stepTimes[i].Name
	}
	return strings.Join(names, ", ")
}
