package engine

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

const (
	testVocab  = 97
	testLayers = 3
	testBlock  = 4 // tokens
)

// device is a model whose KV is the token itself: a step stores its tokens in
// their slots and samples from what it reads back through the block tables, so
// that a wrong block, position or cached prefix gives another token.
type device struct {
	backend.Backend           // what the loop does not use panics
	kv              []int32   // [blocks*testBlock]
	steps           int       // run, failed ones included
	logits          []float32 // [outputs, testVocab]

	fail    atomic.Pointer[error] // of the next step
	outside atomic.Bool           // it samples token 0 for what has a mask
	gated   atomic.Bool           // each step says that it has begun, and waits
	begun   chan struct{}
	goOn    chan struct{}
}

// gate makes every step wait; open ends that while one waits.
func (d *device) gate() {
	d.begun, d.goOn = make(chan struct{}), make(chan struct{})
	d.gated.Store(true)
}

func (d *device) open() {
	d.gated.Store(false)
	d.goOn <- struct{}{}
}

func (d *device) VocabSize() int      { return testVocab }
func (d *device) Logits() backend.Buf { return 0 }
func (d *device) Download(dst []float32, _ backend.Buf) []float32 {
	return append(dst[:0], d.logits...)
}

// sum folds a sequence's tokens; next is the token that follows them.
func sum(h uint32, token int32) uint32 { return (h ^ uint32(token+1)) * 16777619 }

func next(tokens []int32, seed uint64) int32 {
	h := uint32(seed)
	for _, t := range tokens {
		h = sum(h, t)
	}
	return int32(h % testVocab)
}

func (d *device) Step(s *backend.Step, onMark func(int)) error {
	d.steps++
	if d.gated.Load() {
		d.begun <- struct{}{}
		<-d.goOn
	}
	if err := d.fail.Swap(nil); err != nil {
		for _, q := range s.Spans {
			for i := range q.Tokens {
				*d.at(&q, q.Start+i) = -1 // whatever it wrote is wrong
			}
		}
		return *err
	}
	for _, q := range s.Spans {
		for i, t := range s.Tokens[q.Row : q.Row+q.Tokens] {
			*d.at(&q, q.Start+int32(i)) = t
		}
	}
	for l := range testLayers {
		if onMark != nil {
			onMark(l)
		}
	}
	d.logits = d.logits[:0]
	for i, o := range s.Outputs {
		h := uint32(o.Params.Seed)
		for _, q := range s.Spans {
			if o.Row < q.Row || o.Row >= q.Row+q.Tokens {
				continue
			}
			for p := range q.Start + o.Row - q.Row + 1 {
				h = sum(h, *d.at(&q, p))
			}
		}
		s.Sampled[i] = int32(h % testVocab)
		if o.Params.Mask != nil {
			s.Sampled[i] = nextOf(o.Params.Mask, h)
			if d.outside.Load() {
				s.Sampled[i] = 0
			}
		}
		for v := range testVocab {
			d.logits = append(d.logits, 0)
			if v == int(s.Sampled[i]) {
				d.logits[len(d.logits)-1] = float32(o.Position)
			}
		}
	}
	return nil
}

// at is where the device keeps a position of a sequence.
func (d *device) at(q *backend.Span, pos int32) *int32 {
	return &d.kv[q.Tables[0][pos/testBlock]*testBlock+pos%testBlock]
}

// read is what the device holds in a table's first n tokens.
func (d *device) read(blocks []kvcache.BlockID, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = d.kv[int(blocks[i/testBlock])*testBlock+i%testBlock]
	}
	return out
}

// bench is an engine over a device.
type bench struct {
	*Engine
	t *testing.T
	d *device
}

// newBench makes an engine that does not run yet.
func newBench(t *testing.T, c scheduler.Config, change func(*Options)) *bench {
	t.Helper()
	c.Pool.BlockTokens = testBlock
	d := &device{kv: make([]int32, c.Pool.Blocks*testBlock)}
	o := Options{
		Model: d, Backend: d, Scheduler: c,
		KV: backend.UniformKV(testLayers, c.Pool.Blocks, testBlock, 1, 2, backend.F32),
	}
	if change != nil {
		change(&o)
	}
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return &bench{Engine: e, t: t, d: d}
}

// start runs it until the test ends, and then wants it whole and empty.
func (b *bench) start() *bench {
	ctx, cancel := context.WithCancel(context.Background())
	go b.Run(ctx)
	b.t.Cleanup(func() {
		b.empty()
		cancel()
		<-b.Done()
	})
	return b
}

// empty wants nothing left behind.
func (b *bench) empty() {
	b.t.Helper()
	if err := b.Check(); err != nil {
		b.t.Error(err)
	}
	var s scheduler.Stats
	live := 0
	if err := b.do(func() { s, live = b.sched.Stats(), len(b.live) }); err != nil {
		b.t.Fatal(err)
	}
	if u := s.Blocks; live != 0 || s.Running+s.Waiting+s.Held+s.Reservations != 0 || u.Used+u.Pinned+u.Arriving+u.Leaving != 0 {
		b.t.Errorf("left behind: %d known to the engine, %+v", live, s)
	}
}

// caller is one request and what it received.
type caller struct {
	Request
	t      *testing.T
	tokens []int32 // emitted; the step goroutine's until done is closed
	last   Token
	over   bool
	done   chan struct{}
}

func (b *bench) caller(prompt []int32, maxTokens int) *caller {
	c := &caller{t: b.t, done: make(chan struct{})}
	c.Prompt, c.MaxTokens, c.Emit = prompt, maxTokens, c.emit
	c.Sampling.Seed = 7
	return c
}

func (c *caller) emit(tk Token) {
	if c.over {
		c.t.Errorf("%+v after the end, %+v", tk, c.last)
		return
	}
	if tk.Finish == FinishError {
		if tk.Err == nil || tk.ID != -1 {
			c.t.Errorf("a failure without a reason, or with a token: %+v", tk)
		}
	} else {
		before := slices.Concat(c.Prompt, c.Output, c.tokens)
		if want := next(before, c.Sampling.Seed); tk.ID != want && c.Grammar == nil || tk.Position != len(before) || tk.Err != nil {
			c.t.Errorf("got %+v, want token %d at position %d", tk, want, len(before))
		}
		c.tokens = append(c.tokens, tk.ID)
	}
	c.last = tk
	if tk.Finish != 0 {
		c.over = true
		close(c.done)
	}
}

// wait returns the last emission.
func (c *caller) wait() Token {
	c.t.Helper()
	select {
	case <-c.done:
	case <-time.After(20 * time.Second):
		c.t.Fatalf("request did not end; %d tokens", len(c.tokens))
	}
	return c.last
}

// add starts it.
func (b *bench) add(c *caller) scheduler.RequestID {
	b.t.Helper()
	id, _, err := b.Add(&c.Request)
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

// prefill is a job and what it received.
type prefill struct {
	Job
	b      *bench
	id     scheduler.RequestID
	layers [testLayers]int   // upTo told
	table  []kvcache.BlockID // as first announced, by place
	ended  bool
	err    error
	done   chan struct{}
}

func (b *bench) prefill(tokens []int32) *prefill {
	p := &prefill{b: b, done: make(chan struct{})}
	p.Tokens, p.Layer, p.Done = tokens, p.layer, p.end
	return p
}

// layer checks the order of announcements and that the content is there.
func (p *prefill) layer(layer, upTo int, tables [][]kvcache.BlockID) {
	blocks := tables[0]
	if p.ended {
		p.b.t.Errorf("layer %d up to %d after the end", layer, upTo)
	}
	if got := p.b.d.read(blocks, upTo); !slices.Equal(got, p.Tokens[:upTo]) {
		p.b.t.Errorf("layer %d is announced up to %d with %v, want %v", layer, upTo, got, p.Tokens[:upTo])
	}
	if layer > 0 && p.layers[layer-1] != upTo {
		p.b.t.Errorf("layer %d up to %d, the one before it up to %d", layer, upTo, p.layers[layer-1])
	}
	p.layers[layer] = upTo
	if layer == testLayers-1 {
		for i := len(p.table); i < upTo/testBlock; i++ {
			p.table = append(p.table, blocks[i])
		}
	}
}

func (p *prefill) end(err error) {
	if p.ended {
		p.b.t.Error("Done twice")
		return
	}
	p.ended, p.err = true, err
	if err == nil && p.layers != [testLayers]int{len(p.Tokens), len(p.Tokens), len(p.Tokens)} {
		p.b.t.Errorf("done with layers at %v of %d", p.layers, len(p.Tokens))
	}
	close(p.done)
}

// release reads the announced blocks a last time: nothing may have changed them.
func (p *prefill) release() {
	err := p.b.do(func() {
		n := len(p.table) * testBlock
		if got := p.b.d.read(p.table, n); !slices.Equal(got, p.Tokens[:n]) {
			p.b.t.Errorf("announced blocks changed under the push: %v, want %v", got, p.Tokens[:n])
		}
	})
	if err != nil {
		p.b.t.Error(err)
	}
	p.b.ReleaseJob(p.id, &p.Job)
}

func (b *bench) addJob(p *prefill) (cached int) {
	b.t.Helper()
	var err error
	if p.id, cached, err = b.AddJob(&p.Job); err != nil {
		b.t.Fatal(err)
	}
	return cached
}

// tokens makes n tokens that differ by salt.
func tokens(n, salt int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32((i*31 + salt*7 + i*i*salt) % testVocab)
	}
	return out
}

// posted waits until n calls wait for the step to end.
func (b *bench) posted(n int) {
	b.t.Helper()
	for range 20000 {
		b.mu.Lock()
		waiting := len(b.inbox)
		b.mu.Unlock()
		if waiting >= n {
			return
		}
		time.Sleep(time.Millisecond)
	}
	b.t.Fatalf("no %d calls wait", n)
}

// settled waits until the engine has run what was posted before, and shows it in
// Stats: what runs second finds the first's turn over.
func (b *bench) settled() {
	b.t.Helper()
	for range 2 {
		if err := b.do(func() {}); err != nil {
			b.t.Fatal(fmt.Errorf("engine: %w", err))
		}
	}
}
