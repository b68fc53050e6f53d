package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// lateDevice is a device that takes a step while another one runs, and does it as
// late as it may: when its tokens are asked for.
type lateDevice struct {
	*device
	started []*backend.Step
	last    []int32 // what the last step that ran has drawn
	ahead   int     // steps that were started behind another one
}

func (d *lateDevice) StartsAhead() bool { return true }

func (d *lateDevice) Start(s *backend.Step) error {
	if len(d.started) == 2 {
		return errors.New("a third step")
	}
	d.ahead += len(d.started)
	c := &backend.Step{
		Tokens: slices.Clone(s.Tokens), Positions: slices.Clone(s.Positions), Spans: slices.Clone(s.Spans), Outputs: slices.Clone(s.Outputs),
		Sampled: make([]int32, len(s.Outputs)),
	}
	for i := range c.Spans {
		c.Spans[i].Tables = [][]int32{slices.Clone(c.Spans[i].Tables[0])}
	}
	d.started = append(d.started, c)
	return nil
}

func (d *lateDevice) Finish(sampled []int32) error {
	s := d.started[0]
	d.started = d.started[1:]
	for i, t := range s.Tokens {
		if t < 0 {
			s.Tokens[i] = d.last[-1-t]
		}
	}
	err := d.device.Step(s, nil)
	d.last = s.Sampled
	copy(sampled, s.Sampled)
	return err
}

func (d *lateDevice) Step(s *backend.Step, onMark func(int)) error {
	if len(d.started) > 0 {
		return errors.New("a step while others were started")
	}
	return d.device.Step(s, onMark)
}

// flying makes a bench over a late device.
func flying(t *testing.T, c scheduler.Config) (*bench, *lateDevice) {
	var late *lateDevice
	b := newBench(t, c, func(o *Options) {
		late = &lateDevice{device: o.Model.(*device)}
		o.Model = late
	})
	return b, late
}

// Steps that start before the tokens of the last one are known give every request the
// tokens that it gets alone. The pool is too small for all, and requests end early, are
// aborted, need logits or run with jobs.
func TestStepsAhead(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			c := small()
			c.Pool.Blocks, c.MaxSeqs = 24+rng.IntN(60), 2+rng.IntN(6)
			c.MaxQueued = 100
			b, late := flying(t, c)
			b.start()
			var all sync.WaitGroup
			for range 24 {
				r := b.caller(tokens(1+rng.IntN(20), rng.IntN(5)), 1+rng.IntN(24))
				switch rng.IntN(6) {
				case 0:
					r.Stop = []int32{next(append(slices.Clone(r.Prompt), next(r.Prompt, 7)), 7)} // its second token, if it gets there
				case 1:
					r.LogProbs = rng.IntN(4) == 0
				}
				if rng.IntN(8) == 0 {
					p := b.prefill(tokens(1+rng.IntN(20), rng.IntN(5)))
					b.addJob(p)
					all.Go(func() {
						<-p.done
						p.release()
					})
				}
				id := b.add(r)
				if rng.IntN(6) == 0 {
					b.Abort(id)
					continue
				}
				all.Go(func() {
					last := r.wait()
					if want := len(r.tokens) == r.MaxTokens; !want && !slices.Contains(r.Stop, last.ID) {
						t.Errorf("%d of %d tokens, the last %+v", len(r.tokens), r.MaxTokens, last)
					}
				})
			}
			all.Wait()
			b.settled()
			var ahead int
			if err := b.do(func() { ahead = late.ahead }); err != nil {
				t.Fatal(err)
			}
			if ahead == 0 {
				t.Error("no step was started ahead")
			}
		})
	}
}

// A device that fails with two steps on it ends those that were in them, once each.
func TestStepAheadFails(t *testing.T) {
	b, _ := flying(t, small())
	b.start()
	broken := errors.New("the device is on fire")
	first := b.caller(tokens(6, 1), 60)
	count := 0
	emit := first.Emit
	first.Emit = func(tk Token) {
		if count++; count == 5 {
			b.d.fail.Store(&broken) // of a step that is on its way
		}
		emit(tk)
	}
	b.add(first)
	if got := first.wait(); !errors.Is(got.Err, broken) {
		t.Errorf("%+v", got)
	}
	again := b.caller(tokens(6, 1), 8)
	b.add(again)
	if got := again.wait(); got.Finish != FinishLength {
		t.Errorf("after it: %+v", got)
	}
	b.settled()
}

// An engine that is stopped while steps overlap ends with the steps on the device, not
// with the requests.
func TestStepAheadEnds(t *testing.T) {
	b, late := flying(t, small())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := b.caller(tokens(6, 1), 50)
	count, emit := 0, r.Emit
	r.Emit = func(tk Token) {
		if count++; count == 5 {
			cancel()
		}
		emit(tk)
	}
	go b.Run(ctx)
	b.add(r)
	<-b.Done()
	if got := r.wait(); !errors.Is(got.Err, ErrClosed) || len(late.started) > 0 {
		t.Errorf("%+v after %d tokens, %d steps left on the device", got, len(r.tokens), len(late.started))
	}
	if err := b.sched.Check(); err != nil {
		t.Error(err)
	}
}
