package cpu

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// TestStepChecks: a step that would read or write outside of what was
// allocated is refused before anything runs, and the error names the value.
func TestStepChecks(t *testing.T) {
	for _, kernels := range Variants() {
		rng := rand.New(rand.NewPCG(5, 5))
		s := randomShape(rng)
		s.blockTokens = 4
		s.setContext(90)
		n := newNet(t, s, Options{Kernels: kernels, Threads: 2}, 1)
		seqs := sequences(s, rng, 9, 6)
		chunks := []chunk{{seqs[0], 9}, {seqs[1], 6}}
		key := backend.Key{Tokens: 20, Outputs: 20}
		for _, c := range []struct {
			want  string
			spoil func(st *backend.Step)
		}{
			{"token id 100000", func(st *backend.Step) { st.Tokens[3] = 100000 }},
			{"token id -1", func(st *backend.Step) { st.Tokens[3] = -1 }},
			{"reads row 15", func(st *backend.Step) { st.Outputs[2].Row = 15 }},
			{"reads row -1", func(st *backend.Step) { st.Outputs[2].Row = -1 }},
			{"14 positions", func(st *backend.Step) { st.Positions = st.Positions[:14] }},
			{"room for 3 samples", func(st *backend.Step) { st.Sampled = st.Sampled[:3] }},
			{"has 2 block tables", func(st *backend.Step) { st.Spans[0].Tables = make([][]int32, 2) }},
			{"block 100000", func(st *backend.Step) { st.Spans[1].Tables[0] = []int32{100000, 0} }},
			{"block -7", func(st *backend.Step) { st.Spans[1].Tables[0] = []int32{-7, 0} }},
			{"has 1 blocks", func(st *backend.Step) { st.Spans[1].Tables[0] = st.Spans[1].Tables[0][:1] }},
			{"spans cover 9 of 15", func(st *backend.Step) { st.Spans = st.Spans[:1] }},
			{"span 1 at row 8", func(st *backend.Step) { st.Spans[1].Row = 8 }},
			{"from position -2", func(st *backend.Step) { st.Spans[1].Start = -2 }},
			{"position 77", func(st *backend.Step) { st.Positions[2] = 77 }},
			{"step of 0 tokens", func(st *backend.Step) { *st = backend.Step{} }},
		} {
			st := n.stepOf(chunks)
			for i := range st.Spans {
				st.Spans[i].Tables = [][]int32{slices.Clone(st.Spans[i].Tables[0])}
			}
			c.spoil(st)
			err := n.Replay(key, st, n.record, func(int) { t.Errorf("%s: it ran", c.want) })
			if !errors.Is(err, backend.ErrShape) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: error %v, want one that says %q", kernels, err, c.want)
			}
		}
		if err := n.Replay(backend.Key{Tokens: 41}, n.stepOf(chunks), n.record, nil); !errors.Is(err, backend.ErrShape) {
			t.Errorf("plan beyond the limits: %v", err)
		}
		n.forward(t, chunks, nil) // the backend still works
	}
}

// TestMarks: the KV of a layer may be read from its mark on, marks come in
// order, and with or without them the result is the same.
func TestMarks(t *testing.T) {
	for _, kernels := range Variants() {
		rng := rand.New(rand.NewPCG(6, 6))
		s := randomShape(rng)
		s.layers, s.blockTokens, s.kvType = 3, 16, backend.F32
		s.setContext(90)
		n := newNet(t, s, Options{Kernels: kernels, Threads: 2}, 1)
		seqs := sequences(s, rng, 33)
		plain := clone(seqs)
		n.forward(t, []chunk{{plain[0], 33}}, nil)
		want := make([][]byte, s.layers)
		for i := range want {
			want[i] = slices.Clone(n.KVRegion(i))
			clear(n.KVRegion(i))
		}
		var marks []int
		n.forward(t, []chunk{{seqs[0], 33}}, func(layer int) {
			marks = append(marks, layer)
			for i := range want {
				if written := slices.Equal(want[i], n.KVRegion(i)); written != (i <= layer) {
					t.Errorf("%s: at mark %d, layer %d written: %v", kernels, layer, i, written)
				}
			}
		})
		if !slices.Equal(marks, []int{0, 1, 2}) {
			t.Errorf("%s: marks %v", kernels, marks)
		}
		if d := firstDifference(plain, seqs); d != "" {
			t.Errorf("%s: with marks, %s", kernels, d)
		}
	}
}

// TestSampled: greedy draws are the argmax of the downloaded logits.
func TestSampled(t *testing.T) {
	for _, kernels := range Variants() {
		rng := rand.New(rand.NewPCG(8, 8))
		s := randomShape(rng)
		s.setContext(90)
		n := newNet(t, s, Options{Kernels: kernels}, 1)
		seqs := sequences(s, rng, 20)
		st := n.forward(t, []chunk{{seqs[0], 20}}, nil)
		for i, row := range seqs[0].logits {
			if want := int32(slices.Index(row, slices.Max(row))); st.Sampled[i] != want {
				t.Errorf("%s: position %d drew %d, argmax is %d", kernels, i, st.Sampled[i], want)
			}
		}
		if got := len(n.Download(make([]float32, 1), n.hidden)); got != 20*s.hidden {
			t.Errorf("downloaded %d values of 20 rows of %d", got, s.hidden)
		}
	}
}

// TestReplayAllocatesNothing holds after the first call of a key.
func TestReplayAllocatesNothing(t *testing.T) {
	for i, kernels := range slices.Concat(Variants(), Variants()) {
		rng := rand.New(rand.NewPCG(9, 9))
		s := randomShape(rng)
		s.setContext(90)
		s.dtype = []backend.DType{backend.BF16, backend.INT8}[i/len(Variants())]
		n := newNet(t, s, Options{Kernels: kernels, Threads: 2}, 1)
		seqs := sequences(s, rng, 20)
		st := n.stepOf([]chunk{{seqs[0], 20}})
		key := backend.Key{Tokens: 30, Outputs: 30}
		marks := 0
		onMark := func(int) { marks++ }
		var failed error
		run := func() { failed = errors.Join(failed, n.Replay(key, st, n.record, onMark)) }
		run()
		if got := testing.AllocsPerRun(20, run); got != 0 || failed != nil || marks == 0 {
			t.Errorf("%s: %v allocations a step, %d marks, error %v", kernels, got, marks, failed)
		}
	}
}

// TestReplayLeavesGoAlone: a step enters C once for each stretch between two places
// where it returns to Go and once for each greedy draw, and starts no goroutine: nothing in it waits for Go's scheduler.
func TestReplayLeavesGoAlone(t *testing.T) {
	for _, kernels := range Variants() {
		if kernels == Portable {
			continue // it is Go
		}
		rng := rand.New(rand.NewPCG(9, 9))
		s := randomShape(rng)
		s.setContext(90)
		n := newNet(t, s, Options{Kernels: kernels, Threads: 2}, 1)
		st := n.stepOf([]chunk{{sequences(s, rng, 20)[0], 20}})
		key := backend.Key{Tokens: 30, Outputs: 30}
		run := func(steps int) {
			for range steps {
				if err := n.Replay(key, st, n.record, func(int) {}); err != nil {
					t.Fatal(err)
				}
			}
		}
		run(1)
		p, stretches, from := n.plans[key], 0, 0
		for _, to := range append(slices.Clone(p.stops), stop{at: len(p.ops)}) {
			if to.at > from {
				stretches, from = stretches+1, to.at
			}
		}
		const steps = 50
		born := []metrics.Sample{{Name: "/sched/goroutines-created:goroutines"}}
		runtime.GC() // whose workers begin with the first one
		metrics.Read(born)
		before, calls := born[0].Value.Uint64(), runtime.NumCgoCall()
		run(steps)
		calls = runtime.NumCgoCall() - calls
		metrics.Read(born)
		if calls != int64(steps*(stretches+len(st.Outputs))) || stretches >= len(p.ops) {
			t.Errorf("%s: %d calls of C in %d steps of %d operations in %d stretches", kernels, calls, steps, len(p.ops), stretches)
		}
		if n := born[0].Value.Uint64() - before; n != 0 {
			t.Errorf("%s: %d goroutines began in %d steps", kernels, n, steps)
		}
	}
}

// TestIdleCostsNothing: threads sleep soon after a step, however many there are.
func TestIdleCostsNothing(t *testing.T) {
	for _, kernels := range Variants() {
		rng := rand.New(rand.NewPCG(10, 10))
		s := randomShape(rng)
		s.setContext(90)
		n := newNet(t, s, Options{Kernels: kernels, Threads: 8}, 1)
		n.mixed(t, sequences(s, rng, 30, 40), rng)
		time.Sleep(20 * time.Millisecond)
		before := processTime(t)
		time.Sleep(150 * time.Millisecond)
		if spent := processTime(t) - before; spent > 40*time.Millisecond {
			t.Errorf("%s: %v of processor time in 150 ms of rest", kernels, spent)
		}
	}
}

func processTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestMain also checks that every backend's goroutines end with it.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNewRefuses(t *testing.T) {
	good := backend.Limits{Tokens: 1, Outputs: 1, Seqs: 1, Blocks: 1}
	_, err := New(Options{Kernels: "sse9", Limits: good})
	if !errors.Is(err, backend.ErrNoDevice) || !strings.Contains(err.Error(), "sse9") || !strings.Contains(err.Error(), Portable) {
		t.Errorf("unknown kernels: %v", err)
	}
	if _, err = New(Options{}); !errors.Is(err, backend.ErrShape) {
		t.Errorf("no limits: %v", err)
	}
	if _, err = New(Options{Threads: -1, Limits: good}); !errors.Is(err, backend.ErrShape) {
		t.Errorf("threads: %v", err)
	}
	for _, v := range Variants() {
		c, err := New(Options{Kernels: v, Limits: good})
		if err != nil {
			t.Fatal(err)
		}
		if want := "cpu-" + v + "-"; !strings.HasPrefix(c.Variant(), want) {
			t.Errorf("variant %s of kernels %s", c.Variant(), v)
		}
		if _, err := c.Alloc(backend.TokenRows, math.MaxInt); !errors.Is(err, backend.ErrShape) {
			t.Errorf("huge buffer: %v", err)
		}
		for range 2 {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// Rows are drawn on all threads, each as it would be alone.
func TestDrawsByThreads(t *testing.T) {
	const rows, vocab = 24, 4099
	r := rand.New(rand.NewPCG(3, 5))
	logits := make([]float32, rows*vocab)
	for i := range logits {
		logits[i] = float32(r.NormFloat64() * 3)
	}
	for _, threads := range []int{1, 2, 5} {
		c := &CPU{rows: newPool(threads), scratch: make([]sample.Scratch, threads)}
		defer c.rows.close()
		want := make([]int32, rows)
		for i := range rows {
			p := sample.Params{Seed: uint64(i), Temperature: float32(i%3) * 0.7, TopP: 0.9 * float32(i%2), TopK: int32(i % 5 * 20)}
			c.step.draws = append(c.step.draws, backend.Output{Position: int32(i), Params: p})
			want[i] = sample.Pick(logits[i*vocab:(i+1)*vocab], &p, int32(i), new(sample.Scratch))
		}
		for round := range 20 {
			got := make([]int32, rows)
			c.draw(draws{c, logits, vocab, got})
			if !slices.Equal(got, want) {
				t.Fatalf("%d threads, round %d: %v, want %v", threads, round, got, want)
			}
		}
	}
}
