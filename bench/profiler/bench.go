package profiler

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// step is a step of the engine.
type step struct {
	shape   profile.Shape
	took    time.Duration // on the device
	ended   time.Time     // on the device
	emitted time.Time     // its tokens; zero: not yet
}

// bench is a running engine whose steps are recorded.
type bench struct {
	loaded *engine.Loaded
	eng    *engine.Engine
	stop   func()
	vocab  int
	seed   uint64
	fresh  uint64    // sequences of fresh tokens so far
	bases  [][]int32 // tokens whose KV is reused from shape to shape
	// computed are the tokens of each base whose KV was computed. The cache may have evicted some.
	computed map[int]int

	mu    sync.Mutex
	steps []step
}

// newBench starts an engine.
func newBench(ctx context.Context, l *engine.Loaded, log *slog.Logger, seed uint64) (*bench, error) {
	b := &bench{loaded: l, vocab: l.Model.VocabSize(), seed: seed, computed: map[int]int{}}
	o := l.Options()
	o.Logger = log
	o.Watch.Step = func(s scheduler.Shape, took time.Duration) {
		b.mu.Lock()
		b.steps = append(b.steps, step{shape: s, took: took, ended: time.Now()})
		b.mu.Unlock()
	}
	o.OnStep = func() {
		b.mu.Lock()
		if n := len(b.steps); n > 0 && b.steps[n-1].emitted.IsZero() {
			b.steps[n-1].emitted = time.Now()
		}
		b.mu.Unlock()
	}
	var err error
	if b.eng, err = engine.New(o); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	go b.eng.Run(ctx)
	b.stop = func() {
		cancel()
		<-b.eng.Done()
	}
	return b, nil
}

// take returns the steps since the last call.
func (b *bench) take() []step {
	b.mu.Lock()
	defer b.mu.Unlock()
	steps := b.steps
	b.steps = nil
	return steps
}

// draw appends n random tokens.
func (b *bench) draw(tokens []int32, from *rand.Rand, n int) []int32 {
	for range n {
		tokens = append(tokens, from.Int32N(int32(b.vocab)))
	}
	return tokens
}

// base returns the first n tokens of the i-th sequence whose KV is reused.
func (b *bench) base(i, n int) []int32 {
	for len(b.bases) <= i {
		b.bases = append(b.bases, nil)
	}
	if have := len(b.bases[i]); have < n {
		from := rand.New(rand.NewPCG(b.seed, uint64(i)))
		b.draw(make([]int32, 0, have), from, have) // as far as the sequence has been drawn
		b.bases[i] = b.draw(b.bases[i], from, n-have)
	}
	return b.bases[i][:n:n]
}

// prompt returns start tokens of the first sequence and n fresh ones.
func (b *bench) prompt(start, n int) []int32 {
	b.fresh++
	return b.draw(b.base(0, start), rand.New(rand.NewPCG(b.seed, 1<<32+b.fresh)), n)
}

// root is the root of all sequences in the prefix cache.
const root kvcache.Hash = 0x70726f66696c6572

// compute computes the KV of tokens that is not cached.
func (b *bench) compute(ctx context.Context, tokens []int32) error {
	done := make(chan error, 1)
	j := &engine.Job{Root: root, Tokens: tokens, Layer: func(int, int, [][]kvcache.BlockID) {}, Done: func(err error) { done <- err }}
	id, _, err := b.eng.AddJob(j)
	if err != nil {
		return fmt.Errorf("compute %d tokens: %w", len(tokens), err)
	}
	defer b.eng.ReleaseJob(id, j)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// computeBase returns the first n tokens of the i-th sequence, whose KV is cached.
func (b *bench) computeBase(ctx context.Context, i, n int) ([]int32, error) {
	tokens := b.base(i, n)
	b.computed[i] = max(b.computed[i], n)
	return tokens, b.compute(ctx, tokens)
}

// decode runs requests with these prompts for so many tokens each. They begin together. While they
// run, during is called once if it is not nil.
func (b *bench) decode(ctx context.Context, prompts [][]int32, tokens int, during func() error) error {
	done := make(chan error, len(prompts))
	ids := make([]scheduler.RequestID, 0, len(prompts))
	defer func() {
		for _, id := range ids {
			b.eng.Abort(id)
		}
	}()
	for i, p := range prompts {
		id, _, err := b.eng.Add(&engine.Request{
			Root: root, Prompt: p, MaxTokens: tokens, Hold: true, Sampling: engine.Sampling{Seed: b.seed + uint64(i), Temperature: 1},
			Emit: func(t engine.Token) {
				if t.Finish != 0 {
					done <- t.Err
				}
			},
		})
		if err != nil {
			return fmt.Errorf("decode %s of %s: %w", counted(len(prompts), "sequence"), counted(len(p), "token"), err)
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		b.eng.Proceed(id)
	}
	if during != nil {
		if err := during(); err != nil {
			return err
		}
	}
	for range prompts {
		select {
		case err := <-done:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// warmUp returns how much longer the first prompt and tokens take than the same work later.
func (b *bench) warmUp(ctx context.Context) (time.Duration, error) {
	var took [3]time.Duration
	for i := range took {
		began := time.Now()
		n := min(32, b.loaded.Scheduler.MaxModelLen-4)
		if err := b.decode(ctx, [][]int32{b.prompt(0, n)}, 3, nil); err != nil {
			return 0, err
		}
		took[i] = time.Since(began)
	}
	b.take()
	return max(0, took[0]-min(took[1], took[2])), nil
}
