package engine

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// starter is a Model that takes a step while another one runs, as *model.Model
// does over a backend.Ahead.
type starter interface {
	StartsAhead() bool
	Start(step *backend.Step) error
	Finish(sampled []int32) error
}

// flight is a step on the device whose tokens have not been read.
type flight struct {
	batch   scheduler.Batch
	sampled []int32 // [outputs]
	prompts uint64  // tokens of prompts that it computes
	began   time.Duration
}

// startsAhead is the model, where it and the options allow steps to overlap.
func (o *Options) startsAhead() starter {
	if m, ok := o.Model.(starter); ok && m.StartsAhead() && !o.Synchronous {
		return m
	}
	return nil
}

// flies says whether the batch's tokens can be read while a later step runs:
// nobody wants to see its layers or logits, and no rule decides what is drawn that
// the device does not have.
func (e *Engine) flies(b scheduler.Batch) bool {
	if e.starter == nil || e.wantsLogits(b) {
		return false
	}
	for i := range b.Seqs {
		if r := e.live[b.Seqs[i].ID]; r != nil && (r.job != nil || !e.ruled(r.req)) {
			return false
		}
	}
	return true
}

// lookAhead is what is known of a request's next step while it is in one.
func (e *Engine) lookAhead(id scheduler.RequestID) scheduler.Next {
	r := e.live[id]
	switch {
	case r == nil || r.job != nil || r.req.LogProbs && !e.scored(r) || !e.ruled(r.req) || e.o.Probe != nil:
		return scheduler.Waits
	case r.output+1 >= r.req.MaxTokens:
		return scheduler.Ends
	}
	return scheduler.Continues
}

// takeOff starts the step of a batch. last is the batch of the step before, where
// that one has not ended: the tokens that it samples are taken from there.
func (e *Engine) takeOff(b scheduler.Batch, last *scheduler.Batch) error {
	prompts := e.count.PromptComputed
	e.fill(b)
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
	f := &e.flights[:len(e.flights)+1][len(e.flights)] // of two, whose memory is kept
	f.batch, f.began, f.prompts = b, e.now(), e.count.PromptComputed-prompts
	f.sampled = slices.Grow(f.sampled[:0], len(e.step.Outputs))[:len(e.step.Outputs)]
	if err := e.starter.Start(&e.step); err != nil {
		return fmt.Errorf("%w: %d tokens, %d sequences: %w", ErrStep, b.Tokens, len(b.Seqs), err)
	}
	e.flights = e.flights[:len(e.flights)+1]
	return nil
}

// overlap runs the step that is on the device to its end, after it has put the next
// one behind it, if there is one that needs nothing of what the first samples but
// its tokens.
func (e *Engine) overlap() {
	b := e.flights[0].batch
	if next, ok := e.sched.Ahead(e.looksAhead); ok {
		e.land(e.takeOff(next, &b))
		return
	}
	e.land(nil)
}

// land runs the first step on the device to its end, unless what was put behind it
// has failed.
func (e *Engine) land(err error) {
	b := e.flights[0].batch
	if err == nil {
		err = e.landFirst()
	}
	if err != nil {
		for ; len(e.flights) > 0; e.forget() {
			_ = e.starter.Finish(e.flights[0].sampled) // of steps that have failed already
		}
		e.failBatch(b, err)
		return
	}
	e.complete(b)
}

// forget lets go of the first step on the device.
func (e *Engine) forget() {
	e.flights[0], e.flights[len(e.flights)-1] = e.flights[len(e.flights)-1], e.flights[0]
	e.flights = e.flights[:len(e.flights)-1]
}

// landFirst waits for the first step on the device and hands out its tokens.
func (e *Engine) landFirst() error {
	f := e.flights[0]
	e.forget()
	if err := e.starter.Finish(f.sampled); err != nil {
		return fmt.Errorf("%w: %d tokens, %d sequences: %w", ErrStep, f.batch.Tokens, len(f.batch.Seqs), err)
	}
	began := max(f.began, e.landed) // a step begins when the one before has ended
	e.landed = e.now()
	e.ran(f.batch, f.prompts, e.landed-began)
	e.emit(f.batch, f.sampled)
	e.paced(f.batch, e.landed-began)
	return nil
}
