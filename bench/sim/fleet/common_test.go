package fleet

import (
	"testing"
	"time"
)

// A run whose gateways index only blocks that several prompts have equals one whose gateways index
// all blocks.
func TestIndexOfCommonBlocks(t *testing.T) {
	reused := 0
	for seed := range uint64(12) {
		name, trace, o := randomFleet(seed)
		o.Heartbeat, o.Gateways = 100*time.Millisecond, 1+int(seed%2)
		r, err := Run(trace, o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		o.Control, o.ControlEvery = func(*Sample) []Event { return nil }, 1000*time.Hour // it might kill nodes
		whole, err := Run(trace, o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := r.differs(whole); diff != "" {
			t.Errorf("seed %d: %s: %s", seed, name, diff)
		}
		if r.Reuse > .1 {
			reused++
		}
	}
	if reused < 4 {
		t.Errorf("caches had more than 10 %% of the prompt tokens in %d runs, want 4", reused)
	}
}
