package engine

import (
	"errors"
	"time"

	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Stats is a snapshot of an engine. Counters only grow.
type Stats struct {
	Steps          uint64
	FailedSteps    uint64
	FailedDrafts   uint64 // steps in which the draft model failed
	BatchedSteps   uint64 // with more than one sequence
	PromptComputed uint64 // prompt tokens put through the device, recomputation included
	// PromptRate is the tokens per second of the steps that compute prompts,
	// averaged over the last few thousand; 0 before the first.
	PromptRate float64
	Generated  uint64 // tokens sampled for requests that still ran
	Prompts    Source // sources of the KV of prompts whose KV is complete
	Aborted    uint64 // requests and jobs ended by their owner
	Scheduler  scheduler.Stats
	Adapters   AdapterUse
	SatOut     uint64      // times that a constrained request sat a step out, because its mask was not known
	Masks      masks.Stats // of constrained requests
}

// Stats returns the latest snapshot. Any goroutine may call it. The snapshot includes
// what the caller has learned from Emit, Layer or Done in an earlier step, or from
// OnStep in this one.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	s := e.stats
	e.mu.Unlock()
	if e.masks != nil {
		s.Masks = e.masks.Stats()
	}
	return s
}

// Progress returns a counter that grows as long as the engine works for any request
// or job. It distinguishes a slow engine from one that hangs.
func (e *Engine) Progress() uint64 { return e.progress.Load() }

// rateTokens is the number of prompt tokens over which PromptRate is averaged.
const rateTokens = 4096

// ratePrompts records the time of a step that had prompt tokens among its tokens.
func (s *Stats) ratePrompts(prompt uint64, tokens int, took time.Duration) {
	if prompt == 0 || took <= 0 {
		return
	}
	rate := float64(tokens) / took.Seconds()
	if s.PromptRate == 0 {
		s.PromptRate = rate
	}
	s.PromptRate += (rate - s.PromptRate) * min(1, float64(prompt)/rateTokens)
}

// publish stores a new snapshot.
func (e *Engine) publish() {
	if e.adaptersChanged {
		e.count.Adapters, e.adaptersChanged = e.adapterUse(), false
	}
	s := e.count
	s.Scheduler = e.sched.Stats()
	e.mu.Lock()
	e.stats = s
	e.mu.Unlock()
}

// Check verifies the conservation laws of scheduler, pool, adapters and drafter.
func (e *Engine) Check() error {
	var err error
	if derr := e.do(func() { err = errors.Join(e.sched.Check(), e.checkAdapters(), e.checkDrafter()) }); derr != nil {
		err = derr
	}
	return err
}

// now returns the time since New on the engine's monotonic clock.
func (e *Engine) now() time.Duration { return time.Since(e.start) }

// Ping returns once the step goroutine has taken a call, between two steps, or has ended.
func (e *Engine) Ping() {
	_ = e.do(func() {}) // the error is that the engine has ended
}
