package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

func small() scheduler.Config {
	return scheduler.Config{Pool: kvcache.Config{Blocks: 32}, MaxSeqs: 4, MaxBatchedTokens: 8, MaxModelLen: 64}
}

func TestFinish(t *testing.T) {
	b := newBench(t, small(), nil).start()
	prompt := tokens(5, 1)
	third := next(slices.Concat(prompt, []int32{next(prompt, 7), next(append(slices.Clone(prompt), next(prompt, 7)), 7)}), 7)
	for _, c := range []struct {
		name   string
		change func(*caller)
		n      int
		want   Finish
	}{
		{"length", func(c *caller) {}, 6, FinishLength},
		{"one token", func(c *caller) { c.MaxTokens = 1 }, 1, FinishLength},
		{"a stop token is delivered", func(c *caller) { c.Stop = []int32{third} }, 3, FinishStop},
		{"a stop token that is also the last", func(c *caller) { c.Stop, c.MaxTokens = []int32{third}, 3 }, 3, FinishStop},
		{"the context is full", func(c *caller) { c.MaxTokens = 1000 }, 64 - 5, FinishLength},
		{"earlier output counts", func(c *caller) { c.Output = tokens(4, 9) }, 2, FinishLength},
	} {
		r := b.caller(prompt, 6)
		c.change(r)
		b.add(r)
		if got := r.wait(); got.Finish != c.want || len(r.tokens) != c.n {
			t.Errorf("%s: %d tokens, finish %d; want %d, %d", c.name, len(r.tokens), got.Finish, c.n, c.want)
		}
	}
	b.settled()
	if s := b.Stats(); s.Generated != 6+1+3+3+59+2 || s.Aborted != 0 || s.FailedSteps != 0 {
		t.Errorf("%+v", s)
	}
}

// The default context length is more than one token.
func TestContextLengthDefaultsToThePool(t *testing.T) {
	c := small()
	c.MaxModelLen = 0
	b := newBench(t, c, nil).start()
	r := b.caller(tokens(5, 1), 1000)
	b.add(r)
	if r.wait(); len(r.tokens) != 32*testBlock-5 {
		t.Errorf("%d tokens", len(r.tokens))
	}
}

func TestOptionsThatDoNotFit(t *testing.T) {
	d := &device{}
	for _, kv := range []backend.KVSpec{backend.UniformKV(1, 31, testBlock, 1, 2, backend.F32), backend.UniformKV(1, 32, 8, 1, 2, backend.F32)} {
		c := small()
		c.Pool.BlockTokens = testBlock
		if _, err := New(Options{Model: d, Backend: d, KV: kv, Scheduler: c}); !errors.Is(err, ErrConfig) {
			t.Errorf("device %+v: %v", kv, err)
		}
	}
	if _, err := New(Options{}); !errors.Is(err, kvcache.ErrConfig) {
		t.Error(err)
	}
}

func TestRefusals(t *testing.T) {
	b := newBench(t, small(), nil).start()
	for _, c := range []struct {
		tokens []int32
		want   error
		job    error
	}{
		{[]int32{1, testVocab}, ErrToken, ErrToken},
		{[]int32{-1}, ErrToken, ErrToken},
		{nil, scheduler.ErrEmpty, scheduler.ErrEmpty},
		{tokens(64, 1), scheduler.ErrTooLong, nil}, // no room to sample
		{tokens(65, 1), scheduler.ErrTooLong, scheduler.ErrTooLong},
	} {
		if _, _, err := b.Add(&b.caller(c.tokens, 4).Request); !errors.Is(err, c.want) {
			t.Errorf("request of %d tokens: %v", len(c.tokens), err)
		}
		p := b.prefill(c.tokens)
		var err error
		if p.id, _, err = b.AddJob(&p.Job); !errors.Is(err, c.job) {
			t.Errorf("job of %d tokens: %v", len(c.tokens), err)
		}
		if check := b.CheckJob(c.tokens); len(c.tokens) > 0 && (check == nil) != (c.job == nil) {
			t.Errorf("CheckJob of %d tokens: %v, AddJob: %v", len(c.tokens), check, err)
		}
		if err == nil {
			<-p.done
			p.release()
		}
	}
}

// A step that fails ends the requests in it, and no others.
func TestFailedStep(t *testing.T) {
	c := small()
	c.MaxSeqs = 2
	b := newBench(t, c, nil)
	b.d.gate()
	b.start()
	broken := errors.New("the device is on fire")

	in := []*caller{b.caller(tokens(6, 1), 8), b.caller(tokens(6, 2), 8)}
	out := b.caller(tokens(6, 3), 8)
	b.add(in[0])
	<-b.d.begun // with the first alone; the others come during it
	for i, r := range []*caller{in[1], out} {
		go func() {
			if _, _, err := b.Add(&r.Request); err != nil {
				t.Error(err)
			}
		}()
		b.posted(i + 1)
	}
	b.d.goOn <- struct{}{}
	<-b.d.begun
	b.d.fail.Store(&broken)
	b.d.open()
	for _, r := range in {
		if got := r.wait(); !errors.Is(got.Err, ErrStep) || !errors.Is(got.Err, broken) {
			t.Errorf("in the batch: %+v", got)
		}
	}
	if got := out.wait(); got.Finish != FinishLength {
		t.Errorf("not in the batch: %+v", got)
	}
	// Nothing of the failed step may be found in the cache.
	again := b.caller(tokens(6, 1), 8)
	b.add(again)
	if got := again.wait(); got.Finish != FinishLength {
		t.Errorf("after it: %+v", got)
	}
	b.settled()
	if s := b.Stats(); s.FailedSteps != 1 {
		t.Errorf("%d failed steps", s.FailedSteps)
	}
}

// A device that has failed for good ends the engine, so that requests go to other nodes.
func TestFailedDevice(t *testing.T) {
	b := newBench(t, small(), nil)
	broken := fmt.Errorf("%w: an illegal address", ErrDevice)
	b.d.fail.Store(&broken)
	go b.Run(t.Context())
	c := b.caller(tokens(6, 1), 8)
	b.add(c)
	if got := c.wait(); !errors.Is(got.Err, ErrDevice) {
		t.Errorf("in the batch: %+v", got)
	}
	<-b.Done()
	if err := b.Err(); !errors.Is(err, ErrDevice) {
		t.Errorf("the engine ended with %v", err)
	}
	if _, _, err := b.Add(&b.caller(tokens(6, 2), 8).Request); !errors.Is(err, ErrDevice) && !errors.Is(err, ErrClosed) {
		t.Errorf("after it: %v", err)
	}
}

func TestFailedStepEndsJobs(t *testing.T) {
	b := newBench(t, small(), nil).start()
	broken := errors.New("out of memory")
	b.d.fail.Store(&broken)
	p := b.prefill(tokens(20, 1))
	b.addJob(p)
	<-p.done
	if !errors.Is(p.err, ErrStep) {
		t.Error(p.err)
	}
	b.settled()
	if u := b.Stats().Scheduler.Blocks; u.Leaving == 0 {
		t.Error("the push may still read, but nothing is pinned")
	}
	b.ReleaseJob(p.id, &p.Job)
	b.ReleaseJob(p.id, &p.Job) // again is nothing
	again := b.prefill(tokens(20, 1))
	b.addJob(again)
	<-again.done
	if again.err != nil {
		t.Error(again.err)
	}
	again.release()
}

func TestAbortInEveryState(t *testing.T) {
	c := small()
	c.MaxSeqs = 1
	b := newBench(t, c, nil)
	b.d.gate()
	b.start()
	running := b.caller(tokens(6, 1), 8)
	id := b.add(running)
	<-b.d.begun // the step runs

	type added struct {
		id  scheduler.RequestID
		err error
	}
	ids := make(chan added, 3)
	waiting, held, reserved := b.caller(tokens(6, 2), 8), b.caller(tokens(6, 3), 8), b.caller(tokens(20, 4), 8)
	held.Hold, reserved.Hold = true, true
	go func() {
		for _, r := range []*caller{waiting, held, reserved} {
			id, _, err := b.Add(&r.Request)
			ids <- added{id, err}
		}
	}()
	b.Abort(id) // takes effect behind the step that runs
	b.d.open()
	var all []scheduler.RequestID
	for range 3 {
		a := <-ids
		if a.err != nil {
			t.Fatal(a.err)
		}
		all = append(all, a.id)
	}
	res, err := b.Reserve(all[2], 19)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range all {
		b.Abort(id)
		b.Abort(id)
	}
	b.Abort(1 << 40)
	b.Proceed(all[1])
	b.settled()
	if u := b.Stats().Scheduler.Blocks; u.Arriving != 5 {
		t.Errorf("the network may still write, but %d blocks are kept for it", u.Arriving)
	}
	b.Release(res.ID)
	b.settled()
	for _, r := range []*caller{held, reserved} {
		if len(r.tokens) > 0 || r.over {
			t.Errorf("an aborted request was told %d tokens, end %t", len(r.tokens), r.over)
		}
	}
	if running.over || len(running.tokens) > 1 {
		t.Errorf("aborted in its first step, told %d tokens, end %t", len(running.tokens), running.over)
	}
	if _, err := b.Reserve(all[2], 19); !errors.Is(err, scheduler.ErrUnknownRequest) {
		t.Error(err)
	}
}

// Every chunk's layers come in order; a prompt that the cache holds is
// announced at once.
func TestJobLayers(t *testing.T) {
	b := newBench(t, small(), nil).start()
	p := b.prefill(tokens(30, 1)) // four chunks
	b.addJob(p)
	<-p.done
	if p.err != nil || b.d.steps != 4 {
		t.Errorf("%v after %d steps", p.err, b.d.steps)
	}
	cachedAll := b.prefill(tokens(30, 1)[:28])
	if n := b.addJob(cachedAll); n != 28 {
		t.Errorf("%d of 28 tokens cached", n)
	}
	<-cachedAll.done
	if cachedAll.err != nil || b.d.steps != 4 {
		t.Errorf("wholly cached: %v after %d steps", cachedAll.err, b.d.steps)
	}
	p.release()
	b.settled()
	if u := b.Stats().Scheduler.Blocks; u.Leaving != 7 {
		t.Errorf("%d blocks pinned by the second push, want 7", u.Leaving)
	}
	cachedAll.release()
	if s := b.Stats(); s.PromptComputed != 30 {
		t.Errorf("computed %d", s.PromptComputed)
	}
}

// Two pushes of one prompt at once: the cache keeps one copy, each push reads
// what it was shown.
func TestJobsOfOnePrompt(t *testing.T) {
	b := newBench(t, small(), nil).start()
	one, two := b.prefill(tokens(23, 1)), b.prefill(tokens(23, 1))
	b.addJob(one)
	b.addJob(two)
	<-one.done
	<-two.done
	one.release()
	fill := b.caller(tokens(50, 5), 10) // takes whatever is free
	b.add(fill)
	fill.wait()
	two.release()
}

// A request that outranks a half-computed job takes its turn and not its blocks:
// the push reads those until the job is done, which needs the request's. The
// engine breaks that circle itself, and with no more than it must.
func TestJobsAndRequestsDoNotWaitInACircle(t *testing.T) {
	c := small()
	c.Pool.Blocks, c.MaxModelLen, c.MaxSeqs, c.MaxBatchedTokens = 16, 60, 2, 2
	b := newBench(t, c, nil)
	b.d.gate()
	b.start()
	r := b.caller(tokens(20, 2), 40) // grows to 15 blocks
	b.add(r)
	<-b.d.begun
	p := b.prefill(tokens(36, 1)) // 9 blocks: fits while the request is short
	added := make(chan error)
	go func() {
		var err error
		p.id, _, err = b.AddJob(&p.Job)
		added <- err
	}()
	b.posted(1)
	b.d.open()
	if err := <-added; err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		t.Fatalf("nobody gets on: %+v", b.Stats())
	}
	if !errors.Is(p.err, ErrStuck) || r.over {
		t.Errorf("job: %v, request over: %t", p.err, r.over)
	}
	b.ReleaseJob(p.id, &p.Job)
	if got := r.wait(); got.Finish != FinishLength {
		t.Errorf("%+v", got)
	}
	again := b.prefill(tokens(36, 1))
	b.addJob(again)
	if <-again.done; again.err != nil {
		t.Error(again.err)
	}
	again.release()
}

// A released job stops, and Done is not called.
func TestReleaseOfARunningJob(t *testing.T) {
	b := newBench(t, small(), nil)
	b.d.gate()
	b.start()
	p := b.prefill(tokens(60, 1))
	b.addJob(p)
	<-b.d.begun
	b.d.goOn <- struct{}{}
	<-b.d.begun
	b.ReleaseJob(p.id, &p.Job)
	b.d.open()
	b.settled()
	b.settled()
	if p.ended || b.d.steps > 3 {
		t.Errorf("ended %t, %d steps", p.ended, b.d.steps)
	}
	if n := b.Stats().Aborted; n != 1 {
		t.Errorf("%d aborted", n)
	}
}

func TestOnStepIsCalledOncePerStep(t *testing.T) {
	var b *bench
	calls, seen, total := 0, 0, 0
	callers := map[*Request]*caller{}
	b = newBench(t, small(), func(o *Options) {
		o.OnStep = func() {
			calls++
			if s := b.Stats(); int(s.Steps) != calls && seen < total { // the snapshot has this step in it
				t.Errorf("call %d sees %d steps", calls, s.Steps)
			}
		}
		o.Probe = func(r *Request, position int, logits []float32) {
			seen++
			if len(logits) != testVocab || logits[next(slices.Concat(r.Prompt, callers[r].tokens), 7)] != float32(position) {
				t.Errorf("position %d: these are another token's logits", position)
			}
		}
	})
	for i := range 6 {
		r := b.caller(tokens(5+i, i), 3+i)
		callers[&r.Request] = r
		total += r.MaxTokens
	}
	b.start()
	for _, r := range callers {
		b.add(r)
	}
	for _, r := range callers {
		r.wait()
	}
	b.settled()
	if int(b.Stats().Generated) != seen || calls != b.d.steps {
		t.Errorf("%d tokens, %d probed; %d steps, OnStep %d times", b.Stats().Generated, seen, b.d.steps, calls)
	}
}

// KV that arrives for an aborted request still enters the cache, and gateways receive the
// event although no step follows.
func TestBlockEventsNeedNoStep(t *testing.T) {
	events := make(chan []kvcache.Event, 64)
	b := newBench(t, small(), func(o *Options) {
		o.OnBlocks = func(es []kvcache.Event, gap bool) { events <- slices.Clone(es) }
	}).start()
	r := b.caller(tokens(9, 1), 4)
	r.Hold = true
	id := b.add(r)
	res, err := b.Reserve(id, 8)
	if err != nil {
		t.Fatal(err)
	}
	b.Abort(id)
	b.Arrived(res.ID)
	select {
	case es := <-events:
		if len(es) != 2 || es[0].Kind != kvcache.Stored {
			t.Errorf("%+v", es)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("nobody heard of it")
	}
	if b.d.steps != 0 {
		t.Errorf("%d steps", b.d.steps)
	}
}

func TestShutdown(t *testing.T) {
	b := newBench(t, small(), nil)
	ctx, cancel := context.WithCancel(context.Background())
	b.d.gate()
	go b.Run(ctx)
	var rs []*caller
	for i := range 3 {
		r := b.caller(tokens(6, i), 50)
		r.Hold = true
		rs = append(rs, r)
		id := b.add(r)
		if i == 2 {
			b.Proceed(id)
		}
	}
	<-b.d.begun
	late := make(chan error)
	go func() {
		_, _, err := b.Add(&b.caller(tokens(3, 1), 1).Request)
		late <- err
	}()
	cancel()
	b.d.open()
	for _, r := range rs {
		if got := r.wait(); !errors.Is(got.Err, ErrClosed) {
			t.Errorf("%+v", got)
		}
	}
	<-late // taken and ended, or refused: in any case answered
	<-b.Done()
	if _, _, err := b.Add(&b.caller(tokens(3, 1), 1).Request); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := b.Check(); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := b.sched.Check(); err != nil {
		t.Error(err)
	}
	if s := b.sched.Stats(); s.Running+s.Waiting+s.Held+s.Blocks.Used != 0 {
		t.Errorf("left behind: %+v", s)
	}
	b.Abort(1)
	b.Release(1) // after the end they do nothing
}
