package e2e

import (
	"os"
	"testing"
)

// TestStatesOnEveryPath: a model whose layers have a state gives the same bits on every path, also
// where a sequence starts from a kept state, alone, after a preemption or on another node.
func TestStatesOnEveryPath(t *testing.T) {
	seeds, begin := 30, uint64(1)
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		seeds, begin = 1500, soakSeed(t, begin)
	case raceEnabled, testing.Short():
		seeds = 9
	}
	var count paths
	for i, c := range []campaigned{
		{checkpoint: "qwen3-next", states: 32}, {checkpoint: "qwen3.5", states: 16, kv: "fp8"}, {checkpoint: "qwen3.5-moe", states: 48, quantization: "int8"},
	} {
		c.kernels = native()
		if err := campaign(t, c, begin+uint64(i*1_000_000), seeds/3, false, &count); err != nil {
			t.Fatalf("%s: %v", c.checkpoint, err)
		}
	}
	t.Logf("note: seed %d, %d schedules: %s", begin, seeds, &count)
	if count.drafted+count.guessed > 0 {
		t.Errorf("%d tokens were guessed", count.drafted+count.guessed)
	}
	if seeds < 30 { // too few for each path
		return
	}
	for _, c := range []struct {
		path string
		n    uint64
		min  int // in a hundred schedules
	}{
		{"requests", count.requests, 500}, {"batched steps", count.batched, 800}, {"chunked prompts", count.chunked, 150}, {"prefix hits", count.hits, 300},
		{"preemptions", count.preempted, 15}, {"remote prefills", count.remote, 60}, {"local prefills", count.local, 20}, {"resumed", count.resumed, 60},
		{"scored prompts", count.scored, 40}, {"with a grammar", count.constrained, 100},
	} {
		if c.n < uint64(c.min*seeds/100) {
			t.Errorf("%s: ran %d times in %d schedules, want at least %d in a hundred", c.path, c.n, seeds, c.min)
		}
	}
}
