//go:build linux

package engine

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestRank is not a test but a rank's process: this program with the word rank.
func TestRank(t *testing.T) {
	if flag.Arg(0) != "rank" {
		return
	}
	if err := ServeWorker(); err != nil {
		t.Fatal(err)
	}
}

// rankCommand runs it.
func rankCommand(n int) TensorParallel {
	return TensorParallel{Size: n, Timeout: time.Minute, Command: []string{os.Args[0], "-test.run=^TestRank$", "rank"}}
}

// parallel is an engine over a model of testdata.
type parallel struct {
	*Engine
	*Loaded
	t *testing.T
}

func startParallel(t *testing.T, o LoadOptions) *parallel {
	t.Helper()
	o.Device, o.Threads = "cpu", 1
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	e, err := New(l.Options())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go e.Run(ctx)
	t.Cleanup(func() {
		cancel()
		<-e.Done()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return &parallel{e, l, t}
}

// answer is what a request ended with.
type answer struct {
	tokens []int32
	err    error
}

// ask adds a greedy request. The channel receives its end.
func (p *parallel) ask(prompt []int32, n int) <-chan answer {
	return p.watch(prompt, n, func(Token) {})
}

// watch is ask with a look at each token, on the step goroutine.
func (p *parallel) watch(prompt []int32, n int, look func(Token)) <-chan answer {
	done, a := make(chan answer, 1), answer{}
	r := &Request{Prompt: prompt, MaxTokens: n}
	r.Emit = func(t Token) {
		look(t)
		if t.Finish != FinishError {
			a.tokens = append(a.tokens, t.ID)
		}
		if t.Finish != 0 {
			a.err = t.Err
			done <- a
		}
	}
	if _, _, err := p.Add(r); err != nil {
		done <- answer{err: err}
	}
	return done
}

type golden struct {
	Prompt []int32   `json:"prompt"`
	Greedy []int32   `json:"greedy"`
	Gaps   []float64 `json:"gaps"`
}

func goldensOf(t *testing.T, dir string) []golden {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "goldens.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Cases []golden `json:"cases"`
	}
	if err := json.NewDecoder(z).Decode(&all); err != nil {
		t.Fatal(err)
	}
	return all.Cases
}

// Tensor-parallel workers give transformers' greedy tokens, alone and in a batch that is
// chunked, cached and preempted.
func TestTensorParallel(t *testing.T) {
	for _, c := range []struct {
		name   string
		ranks  int
		blocks int64 // bytes of KV of a rank: few, so that requests give way
	}{
		{"gqa-tied", 2, 64 << 10}, {"gqa-tied", 4, 64 << 10}, {"qwen3", 2, 64 << 10}, {"qwen3-moe", 2, 64 << 10}, {"mistral-window", 2, 64 << 10},
		{"gpt-oss-mxfp4", 2, 64 << 10}, {"gemma4-ple", 2, 64 << 10}, {"deepseek", 2, 64 << 10},
	} {
		t.Run(fmt.Sprintf("%s/%d", c.name, c.ranks), func(t *testing.T) {
			dir := filepath.Join("model", "testdata", c.name)
			p := startParallel(t, LoadOptions{
				Model: dir, TensorParallel: rankCommand(c.ranks), KVMemory: c.blocks, KVDType: "float32", MaxModelLen: 128, MaxSeqs: 4, MaxBatchedTokens: 24,
			})
			if !strings.HasSuffix(p.Class, fmt.Sprintf("/tp%d", c.ranks)) {
				t.Errorf("class %s", p.Class)
			}
			all := goldensOf(t, dir)
			all = slices.DeleteFunc(all, func(g golden) bool { return len(g.Prompt)+len(g.Greedy) > 128 })
			alone := make([][]int32, len(all))
			compared := 0
			for i, g := range all {
				a := <-p.ask(g.Prompt, len(g.Greedy))
				alone[i] = a.tokens
				for j, want := range g.Greedy {
					if g.Gaps[j] <= 2e-4 {
						break
					}
					if a.err != nil || j >= len(a.tokens) || a.tokens[j] != want {
						t.Fatalf("prompt %d: %v, %v; transformers says %v", i, a.tokens, a.err, g.Greedy)
					}
					compared++
				}
			}
			if compared < 20 {
				t.Errorf("only %d tokens were compared", compared)
			}
			longest := slices.MaxFunc(all, func(a, b golden) int { return len(a.Prompt) - len(b.Prompt) })
			for range 2 { // of which the second finds blocks of the first
				<-p.ask(longest.Prompt, 1)
			}
			s := p.Engine.Stats()
			for round := 0; round < 20 && s.Scheduler.Preemptions == 0; round++ { // on a slow machine requests may come one after the other
				for i, done := range p.crowd(append(slices.Clone(all), all...)) {
					if a := <-done; a.err != nil || !slices.Equal(a.tokens, alone[i%len(all)]) {
						t.Errorf("prompt %d in a crowd: %v, %v; alone %v", i%len(all), a.tokens, a.err, alone[i%len(all)])
					}
				}
				s = p.Engine.Stats()
			}
			t.Logf("%d tokens compared, %d preemptions, %d tokens cached", compared, s.Scheduler.Preemptions, s.Prompts.Cached)
			if s.Scheduler.Preemptions == 0 || s.BatchedSteps == 0 || s.Prompts.Cached == 0 {
				t.Errorf("nobody gave way in the crowd, or found anything: %+v", s)
			}
		})
	}
}

// crowd adds requests that all arrive between the same two steps.
func (p *parallel) crowd(all []golden) []<-chan answer {
	hold, asked := make(chan struct{}), make([]<-chan answer, len(all))
	first := p.watch([]int32{1}, 1, func(Token) { <-hold })
	var adding sync.WaitGroup
	for i, g := range all {
		adding.Go(func() { asked[i] = p.ask(g.Prompt, len(g.Greedy)) })
	}
	for posted := 0; posted < len(all); time.Sleep(time.Millisecond) {
		p.mu.Lock()
		posted = len(p.inbox)
		p.mu.Unlock()
	}
	close(hold)
	adding.Wait()
	<-first
	return asked
}

// pids are the processes of ranks 1 and on.
func (p *parallel) pids() []int { return p.workers.Processes() }

// gone reports whether a process has ended and been waited for.
func gone(pid int) bool { return syscall.Kill(pid, 0) != nil }

// A rank that is killed, during a step or between two, ends every request with an
// error that names it, and the engine; no process is left.
func TestTensorParallelKilled(t *testing.T) {
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprintf("busy=%t", busy), func(t *testing.T) {
			p := startParallel(t, LoadOptions{Model: Builtin, TensorParallel: rankCommand(2), KVMemory: 1 << 20})
			kill := sync.OnceFunc(func() {
				for _, pid := range p.pids() {
					if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
						t.Error(err)
					}
				}
			})
			var asked []<-chan answer
			if busy {
				asked = append(asked, p.watch([]int32{1, 2}, 1000, func(k Token) {
					if k.Position == 5 {
						kill()
					}
				}))
			} else {
				kill()
			}
			<-p.Done()
			if err := p.Err(); !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "rank 1 of 2: its process has ended: signal: killed") {
				t.Errorf("the engine ended with %v", err)
			}
			for i, done := range asked {
				if a := <-done; !errors.Is(a.err, ErrLost) || len(a.tokens) < 4 {
					t.Errorf("request %d ended with %v after %d tokens", i, a.err, len(a.tokens))
				}
			}
			if a := <-p.ask([]int32{1}, 1); !errors.Is(a.err, ErrClosed) {
				t.Errorf("a request afterwards: %v", a.err)
			}
		})
	}
}

// A rank that hangs is noticed within the bound, by name, and does not outlive the
// model.
func TestTensorParallelHangs(t *testing.T) {
	parallel := rankCommand(2)
	parallel.Timeout = 300 * time.Millisecond
	var pids []int
	t.Run("", func(t *testing.T) {
		p := startParallel(t, LoadOptions{Model: Builtin, TensorParallel: parallel, KVMemory: 1 << 20})
		pids = p.pids()
		if err := syscall.Kill(pids[0], syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if a := <-p.ask([]int32{1, 2}, 5); !errors.Is(a.err, ErrLost) || !strings.Contains(a.err.Error(), "rank 1 of 2: no response within 300ms") {
			t.Errorf("got %v", a.err)
		}
		<-p.Done()
	})
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// Ranks end with the model; with rank 0's process they end too, since their
// connection is closed (TestBinaryTensorParallel kills it).
func TestTensorParallelEnds(t *testing.T) {
	var pids []int
	t.Run("", func(t *testing.T) {
		pids = startParallel(t, LoadOptions{Model: Builtin, TensorParallel: rankCommand(4), KVMemory: 1 << 20}).pids()
	})
	if len(pids) != 3 {
		t.Errorf("%d processes", len(pids))
	}
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// A model that cannot be divided is refused with its numbers, before anything starts. An
// error that a worker finds is returned by its leader.
func TestTensorParallelRefused(t *testing.T) {
	for want, o := range map[string]LoadOptions{
		"--tensor-parallel-size 17, want 1 to 16": {TensorParallel: rankCommand(17)},
		"--tensor-parallel-size -1":               {TensorParallel: rankCommand(-1)},
		"4 attention heads (num_attention_heads) cannot be shared by 3 ranks": {
			Model: filepath.Join("model", "testdata", "qwen3"), TensorParallel: rankCommand(3)},
		"--enable-lora with --tensor-parallel-size 2": {TensorParallel: rankCommand(2), Adapters: Adapters{Places: 1, Rank: 8}},
		"cannot start worker processes":               {TensorParallel: TensorParallel{Size: 2}},
		"rank 1 of 2: its process has ended":          {TensorParallel: TensorParallel{Size: 2, Command: []string{"/bin/true"}}},
		"no such file":                                {TensorParallel: TensorParallel{Size: 2, Command: []string{"/does/not/exist"}}},
	} {
		o.Device, o.KVMemory = "cpu", 1<<20
		if o.Model == "" {
			o.Model = Builtin
		}
		l, err := Load(o)
		if err == nil {
			l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
