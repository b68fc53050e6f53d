package engine

import (
	"errors"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Stats is a snapshot of an engine. Counters only grow.
type Stats struct {
	Steps          uint64
	FailedSteps    uint64
	FailedDrafts   uint64 // steps that a draft model was to guess for, and could not
	BatchedSteps   uint64 // with more than one sequence
	PromptComputed uint64 // prompt tokens put through the device, recomputation included
	// PromptRate is the tokens per second of the steps that compute prompts,
	// averaged over the last few thousand; 0 before the first.
	PromptRate float64
	Generated  uint64 // tokens sampled for requests that still ran
	Prompts    Source // of prompts whose KV is complete, where its tokens' KV came from
	Aborted    uint64 // requests and jobs ended by their owner
	Scheduler  scheduler.Stats
	Adapters   AdapterUse
}

// Stats returns the latest snapshot. It may be read from any goroutine, and is
// never older than what the caller has learnt from Emit, Layer or Done in an
// earlier step, or from OnStep in this one.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stats
}

// Progress only grows, and grows as long as the engine works, whoever it works
// for: what tells slowness from standstill.
func (e *Engine) Progress() uint64 { return e.moved.Load() }

// rateTokens is over how many prompt tokens PromptRate is averaged.
const rateTokens = 4096

// ratePrompts notes how long a step took that had prompt tokens among its tokens.
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

// publish makes a new snapshot.
func (e *Engine) publish() {
	if e.useChanged {
		e.count.Adapters, e.useChanged = e.adapterUse(), false
	}
	s := e.count
	s.Scheduler = e.sched.Stats()
	e.mu.Lock()
	e.stats = s
	e.mu.Unlock()
}

// Check verifies the conservation laws of scheduler and pool.
func (e *Engine) Check() error {
	var err error
	if derr := e.do(func() { err = errors.Join(e.sched.Check(), e.checkAdapters(), e.checkDrafter()) }); derr != nil {
		err = derr
	}
	return err
}

// now is the engine's monotonic clock, since New.
func (e *Engine) now() time.Duration { return time.Since(e.start) }

// Ping returns once the step goroutine has taken a call, between two steps, or has ended.
func (e *Engine) Ping() {
	_ = e.do(func() {}) // the error is that the engine has ended
}
