// Package sleep has a model whose steps compute nothing and take the time that a profile predicts.
// With it, the real engine, roles and gateway serve a load at the speed of a simulated fleet.
//
// Invariant: a step ends no earlier than the profile's duration after its start, and its layers are
// complete at equal distances within it. Every output is the same token.
//
// The package is for proofs of the simulator. The program tandem does not import it.
package sleep

import (
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/engine/backend"
)

// Model is an engine's model. One goroutine uses it.
type Model struct {
	Times  *profile.Times
	Layers int   // that report their KV
	Vocab  int   // tokens
	Token  int32 // of every output
}

// VocabSize returns the number of tokens.
func (m *Model) VocabSize() int { return m.Vocab }

// Logits returns no buffer: no step has logits, so that requests for log-probabilities fail.
func (m *Model) Logits() backend.Buf { return 0 }

// Step sleeps for the duration of the step, and samples Token for each output.
func (m *Model) Step(s *backend.Step, onMark func(layer int)) error {
	began, whole := time.Now(), m.Times.Step(Shape(s))
	if onMark != nil {
		for layer := range m.Layers {
			sleepUntil(began.Add(whole * time.Duration(layer+1) / time.Duration(m.Layers)))
			onMark(layer)
		}
	}
	sleepUntil(began.Add(whole))
	for i := range s.Sampled {
		s.Sampled[i] = m.Token
	}
	return nil
}

func sleepUntil(t time.Time) { time.Sleep(time.Until(t)) }

// Shape returns the shape of a step's batch, as scheduler.Batch.Shape does.
func Shape(s *backend.Step) (p profile.Shape) {
	outputs := s.Outputs
	for i := range s.Spans {
		q := &s.Spans[i]
		samples := false
		for len(outputs) > 0 && outputs[0].Row < q.Row+q.Tokens {
			samples, outputs = true, outputs[1:]
		}
		if n := int(q.Tokens); n == 1 && samples {
			p.Streams++
			p.ContextSum += int(q.Start) + 1
		} else {
			p.Chunk += n
			p.Attended += float64(n) * (float64(q.Start) + float64(n)/2)
		}
	}
	return p
}
