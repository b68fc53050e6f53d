package node

import (
	"testing"
	"time"
)

// Throughput is that of the last second or more, and 0 before the first.
func TestThroughput(t *testing.T) {
	var r throughput
	at := time.Unix(0, 0)
	for _, step := range []struct {
		after            time.Duration
		prompt, output   uint64
		prompts, outputs float64
	}{
		{0, 100, 10, 0, 0},
		{500 * time.Millisecond, 200, 20, 0, 0},
		{500 * time.Millisecond, 300, 30, 200, 20},
		{600 * time.Millisecond, 900, 90, 200, 20},
		{1400 * time.Millisecond, 700, 40, 200, 5},
		{time.Second, 700, 40, 0, 0},
	} {
		at = at.Add(step.after)
		r.update(at, step.prompt, step.output)
		if r.prompts != step.prompts || r.outputs != step.outputs {
			t.Errorf("at %v: %v and %v tokens/s, want %v and %v", at.Sub(time.Unix(0, 0)), r.prompts, r.outputs, step.prompts, step.outputs)
		}
	}
}
