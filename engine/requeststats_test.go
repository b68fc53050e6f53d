package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Random requests and jobs from many goroutines share a pool that is too small for them:
// requests that finish, are aborted, or wait for KV that arrives, is lost or never
// requested, and jobs whose pushes last. Every token must be the one that the request gets
// alone, and each request receives one end. Announced blocks do not change until their
// release, and nothing is left.

type lives struct {
	mu sync.Mutex
	n  map[string]int
}

func (l *lives) ran(what string) {
	l.mu.Lock()
	l.n[what]++
	l.mu.Unlock()
}

func TestRandomLives(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 10
	}
	if os.Getenv("TANDEM_SOAK") != "" {
		seeds = 5000
	}
	count := &lives{n: map[string]int{}}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { randomLives(t, seed, count) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Log(count.n)
	for what, least := range map[string]int{
		"finished": 10, "aborted": 2, "arrived": 2, "lost": 2, "proceeded": 2, "no room": 1,
		"job done": 4, "job released early": 1, "failed steps": 1, "preemptions": 1,
	} {
		if got := count.n[what]; got < least*int(seeds)/10 {
			t.Errorf("%s: %d times, want %d: the campaign no longer covers this", what, got, least*int(seeds)/10)
		}
	}
}

func randomLives(t *testing.T, seed uint64, count *lives) {
	rng := rand.New(rand.NewPCG(seed, 11))
	blocks := 14 + rng.IntN(20)
	b := newBench(t, scheduler.Config{
		Pool: kvcache.Config{Blocks: blocks}, MaxSeqs: 2 + rng.IntN(4), MaxBatchedTokens: 6 + rng.IntN(20),
		MaxModelLen: blocks * testBlock * 2 / 3, ArrivingFraction: 0.5,
	}, nil)
	longest := b.o.Scheduler.MaxModelLen
	var wg sync.WaitGroup
	if seed%2 == 1 { // its first step has two requests, of which one is preempted: together they outgrow the pool
		for i := range 2 {
			c := b.caller(tokens(longest/2, 3+i), longest-longest/2)
			wg.Go(func() {
				b.add(c)
				c.wait()
			})
		}
		b.posted(2)
	}
	b.start()
	for range 4 {
		mine := rand.New(rand.NewPCG(rng.Uint64(), 13))
		wg.Go(func() {
			for range 6 {
				prompt := tokens(1+mine.IntN(longest-8), mine.IntN(3))
				switch {
				case mine.IntN(4) == 0:
					b.jobLife(mine, prompt, count)
				default:
					b.requestLife(mine, prompt, count)
				}
			}
		})
	}
	if seed%3 == 0 {
		time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
		err := errors.New("a fault now and then")
		b.d.fail.Store(&err)
	}
	wg.Wait()
	b.settled()
	s := b.Stats()
	for range s.FailedSteps {
		count.ran("failed steps")
	}
	for range s.Scheduler.Preemptions {
		count.ran("preemptions")
	}
}

func pause(rng *rand.Rand) { time.Sleep(time.Duration(rng.IntN(150)) * time.Microsecond) }

func (b *bench) jobLife(rng *rand.Rand, prompt []int32, count *lives) {
	p := b.prefill(prompt)
	b.addJob(p)
	if rng.IntN(3) == 0 {
		pause(rng)
		count.ran("job released early")
		p.release()
		return
	}
	<-p.done
	pause(rng) // its push goes on
	count.ran("job done")
	if errors.Is(p.err, ErrStuck) {
		count.ran("job unstuck")
	}
	if p.err != nil { // its last blocks are not to be relied on
		b.ReleaseJob(p.id, &p.Job)
		return
	}
	p.release()
}

func (b *bench) requestLife(rng *rand.Rand, prompt []int32, count *lives) {
	c := b.caller(prompt, 1+rng.IntN(12))
	c.Hold = len(prompt) > 1 && rng.IntN(2) == 0
	id := b.add(c)
	if c.Hold {
		b.fetch(rng, id, prompt, count)
	}
	if rng.IntN(5) == 0 {
		pause(rng)
		b.Abort(id)
		b.settled()
		count.ran("aborted")
		return
	}
	if last := c.wait(); last.Err == nil {
		count.ran("finished")
	}
}

// fetch plays the network for a held request: it writes what was reserved.
func (b *bench) fetch(rng *rand.Rand, id scheduler.RequestID, prompt []int32, count *lives) {
	for rng.IntN(6) > 0 {
		res, err := b.Reserve(id, len(prompt)-1)
		if errors.Is(err, scheduler.ErrNoRoom) && !errors.Is(err, scheduler.ErrNeverFits) {
			count.ran("no room")
			pause(rng)
			continue
		}
		if err != nil {
			break
		}
		for i, t := range prompt[res.From:res.UpTo] {
			slot := int(res.Groups[0].Blocks[i/testBlock])*testBlock + i%testBlock
			b.d.kv[slot] = -2 // half a write
			if i%5 == 0 {
				pause(rng)
			}
			b.d.kv[slot] = t
		}
		if rng.IntN(3) > 0 {
			b.Arrived(res.ID)
			count.ran("arrived")
			return
		}
		b.Lost(res.ID)
		b.d.kv[int(res.Groups[0].Blocks[0])*testBlock] = -3 // a late write, before the lease has ended
		b.Release(res.ID)
		count.ran("lost")
	}
	b.Proceed(id)
	count.ran("proceeded")
}

// A decode step costs no allocation: not in the loop, nor in the scheduler
// under it.
func TestStepDoesNotAllocate(t *testing.T) {
	b := newBench(t, scheduler.Config{
		Pool: kvcache.Config{Blocks: 4096}, MaxSeqs: 8, MaxBatchedTokens: 64, MaxModelLen: 4096,
	}, func(o *Options) { o.OnStep = func() {} })
	b.d.logits = make([]float32, 0, 8*testVocab)
	emitted := 0
	for i := range 8 {
		r := &Request{Prompt: tokens(6, i), MaxTokens: 3000, Emit: func(Token) { emitted++ }}
		added := make(chan error)
		go func() {
			_, _, err := b.Add(r)
			added <- err
		}()
		b.posted(1)
		b.drainInbox()
		if err := <-added; err != nil {
			t.Fatal(err)
		}
	}
	step := func() {
		b.drainInbox()
		if !b.stepOnce() {
			t.Fatal("nothing ran")
		}
	}
	for range 40 {
		step()
	}
	before := emitted
	if n := testing.AllocsPerRun(500, step); n != 0 {
		t.Errorf("%g allocations a step", n)
	}
	if emitted-before < 8*500 {
		t.Fatalf("%d tokens in 500 steps of 8", emitted-before)
	}
	s := b.Stats() // a reader costs nothing either
	if n := testing.AllocsPerRun(100, func() { s = b.Stats() }); n != 0 || s.BatchedSteps < 500 {
		t.Errorf("%g allocations for %+v", n, s)
	}
}

// A node may run more requests than its steps were meant to have tokens. The device and the
// scheduler must have the same bound.
func TestLoadAgreesOnTheBoundsOfAStep(t *testing.T) {
	l, err := Load(LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 8 << 20, MaxSeqs: 12, MaxBatchedTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	b := &bench{t: t}
	b.Engine, err = New(Options{Model: l.Model, Backend: l.Backend, KV: l.KV, Scheduler: l.Scheduler})
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan Token, 12*20)
	for i := range 12 {
		r := &Request{Prompt: []int32{int32(i)}, MaxTokens: 20, Emit: func(tk Token) {
			if tk.Finish != 0 {
				stop <- tk
			}
		}}
		go func() {
			if _, _, err := b.Add(r); err != nil {
				t.Error(err)
			}
		}()
		b.posted(i + 1)
	}
	b.start()
	for range 12 {
		if tk := <-stop; tk.Finish != FinishLength {
			t.Fatalf("%+v", tk)
		}
	}
}

func TestLoadRefusals(t *testing.T) {
	const dir = "model/testdata/gqa-tied"
	for _, o := range []LoadOptions{
		{Model: dir, MaxSeqs: -1}, {Model: dir, MaxBatchedTokens: -1}, {Model: dir, BlockTokens: -16}, {Model: dir, KVMemory: -1},
		{Model: dir, MaxQueued: -1}, {Model: dir, MaxModelLen: -1}, {Model: dir, Threads: -1}, {Model: dir, Device: "abacus"},
		{Model: dir, KVDType: "fp4"}, {Model: dir, KVDType: "fp8_e5m2"}, {Model: dir, MaxModelLen: 1 << 30},
	} {
		if l, err := Load(o); !errors.Is(err, ErrOption) {
			t.Errorf("%+v: %v", o, err)
			if err == nil {
				_ = l.Close()
			}
		}
	}
}

// Logits in chunks are those in one piece.
func TestLogits(t *testing.T) {
	prompt := []int32{1, 5, 9, 2, 7, 7, 3, 8, 1, 0, 4}
	collect := func(maxSeqs, from int) (rows [][]float32) {
		l, err := Load(LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxSeqs: maxSeqs, MaxBatchedTokens: 16, MaxModelLen: 32})
		if err != nil {
			t.Fatal(err)
		}
		at := from
		err = errors.Join(l.Logits(prompt, from, func(position int, logits []float32) error {
			if position != at || len(logits) != l.Model.VocabSize() {
				t.Fatalf("position %d with %d logits, want position %d", position, len(logits), at)
			}
			at++
			rows = append(rows, slices.Clone(logits))
			return nil
		}), l.Close())
		if err != nil || at != len(prompt) {
			t.Fatalf("up to %d: %v", at, err)
		}
		return rows
	}
	whole := collect(16, 0)
	for i, row := range collect(3, 4) {
		if !slices.Equal(row, whole[4+i]) {
			t.Errorf("position %d differs", 4+i)
		}
	}
	l, err := Load(LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxModelLen: 32})
	if err != nil {
		t.Fatal(err)
	}
	visit := func(int, []float32) error { return nil }
	if err := l.Logits([]int32{1, 1 << 20}, 0, visit); !errors.Is(err, ErrToken) {
		t.Error(err)
	}
	if err := l.Logits(make([]int32, 33), 0, visit); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
	full := errors.New("enough")
	if err := l.Logits(prompt, 0, func(int, []float32) error { return full }); !errors.Is(err, full) {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
