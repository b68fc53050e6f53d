package engine

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// starter is a Model that accepts a step while another one runs, as *model.Model
// does on a backend.Ahead.
type starter interface {
	StartsAhead() bool
	Start(step *backend.Step) error
	Finish(sampled []int32) error
}

// inflightStep is a step on the device whose tokens have not been read.
type inflightStep struct {
	batch   scheduler.Batch
	sampled []int32 // [outputs]
	prompts uint64  // prompt tokens that it computes
	began   time.Duration
}

// startsAhead returns the model if it and the options allow steps to overlap.
func (o *Options) startsAhead() starter {
	if m, ok := o.Model.(starter); ok && m.StartsAhead() && !o.Synchronous {
		return m
	}
	return nil
}

// canOverlap reports whether the batch's tokens can be read while a later step runs. That
// is so if no receiver needs its layers or logits and the device applies all rules
// of its requests.
func (e *Engine) canOverlap(b scheduler.Batch) bool {
	if e.starter == nil || e.needsLogits(b) || e.needsHidden(b) {
		return false
	}
	for i := range b.Seqs {
		if r := e.live[b.Seqs[i].ID]; r != nil && (r.job != nil || !e.deviceRules(r.req)) {
			return false
		}
	}
	return true
}

// lookAhead returns what is known of a request's next step while a step runs. A constrained
// request waits, because its next mask depends on the token that is being sampled.
func (e *Engine) lookAhead(id scheduler.RequestID) scheduler.Next {
	r := e.live[id]
	switch {
	case r == nil || r.job != nil || r.guide != nil || r.req.Pool != PoolNone || r.req.LogProbs && !e.deviceLogprobs(r) || !e.deviceRules(r.req) || e.o.Probe != nil:
		return scheduler.Waits
	case r.output+1 >= r.req.MaxTokens:
		return scheduler.Ends
	}
	return scheduler.Continues
}

// submit starts the step of a batch. last is the batch of the step before if that
// one has not ended; the tokens that it samples are inputs of this one.
func (e *Engine) submit(b scheduler.Batch, last *scheduler.Batch) error {
	prompts := e.count.PromptComputed
	e.fillStep(b)
	if last != nil {
		row := int32(0) // of last's outputs
		was := last.Seqs
		for i := range b.Seqs {
			for was[0].ID != b.Seqs[i].ID {
				if was[0].Sample {
					row++
				}
				was = was[1:]
			}
			e.step.Tokens[i] = -1 - row
		}
	}
	e.publish()
	f := &e.inflight[:len(e.inflight)+1][len(e.inflight)] // of two entries, whose memory is reused
	f.batch, f.began, f.prompts = b, e.now(), e.count.PromptComputed-prompts
	f.sampled = slices.Grow(f.sampled[:0], len(e.step.Outputs))[:len(e.step.Outputs)]
	if err := e.starter.Start(&e.step); err != nil {
		return fmt.Errorf("%w: %d tokens, %d sequences: %w", ErrStep, b.Tokens, len(b.Seqs), err)
	}
	e.inflight = e.inflight[:len(e.inflight)+1]
	return nil
}

// overlap collects the step on the device after it has submitted the next one, if
// the next one needs nothing from the first but its sampled tokens.
func (e *Engine) overlap() {
	b := e.inflight[0].batch
	if next, ok := e.sched.Ahead(e.lookAheadFunc); ok {
		e.collect(e.submit(next, &b))
		return
	}
	e.collect(nil)
}

// collect collects the first step on the device, unless err is not nil because the
// step submitted after it has failed.
func (e *Engine) collect(err error) {
	b := e.inflight[0].batch
	if err == nil {
		err = e.collectFirst()
	}
	if err != nil {
		for ; len(e.inflight) > 0; e.removeFirst() {
			_ = e.starter.Finish(e.inflight[0].sampled) // of steps that have failed already
		}
		e.failBatch(b, err)
		return
	}
	e.complete(b)
}

// removeFirst removes the first step on the device from e.inflight.
func (e *Engine) removeFirst() {
	e.inflight[0], e.inflight[len(e.inflight)-1] = e.inflight[len(e.inflight)-1], e.inflight[0]
	e.inflight = e.inflight[:len(e.inflight)-1]
}

// collectFirst waits for the first step on the device and emits its tokens.
func (e *Engine) collectFirst() error {
	f := e.inflight[0]
	e.removeFirst()
	if err := e.starter.Finish(f.sampled); err != nil {
		return fmt.Errorf("%w: %d tokens, %d sequences: %w", ErrStep, f.batch.Tokens, len(f.batch.Seqs), err)
	}
	began := max(f.began, e.collectedAt) // a step begins when the one before has ended
	e.collectedAt = e.now()
	e.countStep(f.batch, f.prompts, e.collectedAt-began)
	e.emit(f.batch, f.sampled)
	e.recordPace(f.batch, e.collectedAt-began)
	return nil
}
