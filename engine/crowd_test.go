package engine

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// A long prompt among 255 others, in a pool that holds it and a few of them,
// on the engine that ships: all get to their end, those that gave way among them,
// with the tokens that they get alone, and nothing is left. It has 32k tokens in
// `make soak`, and is shorter otherwise: engine/scheduler has that length on a device
// that computes nothing.
func TestLongPromptInACrowd(t *testing.T) {
	const crowd = 256
	long := 8 << 10
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		long = 32 << 10
	case raceEnabled || cpu.Variants()[0] == cpu.Portable:
		long = 2 << 10
	}
	dir := longContext(t, "gpt-oss-mxfp4", long+64)
	rng := rand.New(rand.NewPCG(5, 7))
	prompts := make([][]int32, crowd)
	for i := range prompts {
		prompts[i] = make([]int32, 1+rng.IntN(24))
		if i == crowd/3 {
			prompts[i] = make([]int32, long)
		}
		for p := range prompts[i] {
			prompts[i][p] = int32(rng.IntN(128))
		}
	}
	few := int64(0) // bytes of KV for the long one and some others
	answers := func(o LoadOptions, atOnce int) (tokens [][]int32, s Stats) {
		o.Model, o.Threads, o.MaxModelLen = dir, 2, long+64
		l, err := Load(o)
		if err != nil {
			t.Fatal(err)
		}
		e, err := New(l.Options())
		if err != nil {
			t.Fatal(err)
		}
		few = int64(l.KV.BlockBytes()) * int64(kvcache.Peak(e.Groups(), long+64, 512)+crowd/8)
		ctx, stop := context.WithCancel(context.Background())
		go e.Run(ctx)
		tokens = make([][]int32, crowd)
		slots, done := make(chan struct{}, atOnce), make(chan error, crowd)
		for i, prompt := range prompts {
			slots <- struct{}{}
			r := &Request{Prompt: prompt, MaxTokens: 40, Root: 1, Sampling: Sampling{Seed: uint64(i), Temperature: 0.9}}
			r.Emit = func(tok Token) {
				tokens[i] = append(tokens[i], tok.ID)
				if tok.Finish != 0 {
					<-slots
					done <- tok.Err
				}
			}
			go func() { // so that many wait before the next step
				if _, _, err := e.Add(r); err != nil {
					done <- err
				}
			}()
		}
		for range crowd {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if err := e.Check(); err != nil {
			t.Error(err)
		}
		s = e.Stats()
		stop()
		<-e.Done()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		return tokens, s
	}
	alone, _ := answers(LoadOptions{MaxSeqs: 1, MaxBatchedTokens: 512, KVMemory: 256 << 20}, 1)
	together, s := answers(LoadOptions{MaxSeqs: crowd, MaxBatchedTokens: 512, KVMemory: few}, crowd)
	t.Logf("%d preemptions in %d steps over %d blocks", s.Scheduler.Preemptions, s.Steps, s.Scheduler.Blocks.Blocks)
	for i := range alone {
		if !slices.Equal(alone[i], together[i]) {
			t.Errorf("request %d of %d tokens: %v among others, %v alone", i, len(prompts[i]), together[i], alone[i])
		}
	}
	if u := s.Scheduler.Blocks; s.Scheduler.Preemptions == 0 || u.Used+u.Pinned != 0 {
		t.Errorf("%d preemptions, left behind: %+v", s.Scheduler.Preemptions, u)
	}
}

// longContext returns a checkpoint whose config has the given number of positions.
func longContext(t *testing.T, name string, positions int) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("model/testdata", name))); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	keys["max_position_embeddings"] = positions
	if text, err = json.Marshal(keys); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}
