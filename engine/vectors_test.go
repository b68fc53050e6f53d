package engine

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"math"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// vectorGolden is what transformers computed for a prompt; see testdata/make_vectors.py.
type vectorGolden struct {
	Prompt     []int32
	Last, Mean []float32
	Scores     []float32 // of a classifier
	Logits     []float32 // of tokens 5 and 9
}

func vectorGoldens(t *testing.T) map[string][]vectorGolden {
	t.Helper()
	f, err := os.Open("model/testdata/vectors/goldens.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g struct{ Models map[string][]vectorGolden }
	if err := json.NewDecoder(z).Decode(&g); err != nil {
		t.Fatal(err)
	}
	return g.Models
}

// vectorBench is an engine of a checkpoint.
func vectorBench(t *testing.T, o LoadOptions) *bench {
	t.Helper()
	o.Model, o.Threads, o.KVMemory, o.KVDType = "model/testdata/"+o.Model, 2, 16<<20, "float32"
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t}
	if b.Engine, err = New(l.Options()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return b.start()
}

// vectorOf starts a request for a vector, and returns a function that waits for it.
func vectorOf(t *testing.T, e *Engine, prompt []int32, pool Pool, root kvcache.Hash) func() []float32 {
	t.Helper()
	got := make(chan Token, 2)
	r := &Request{Root: root, Prompt: prompt, MaxTokens: 1, Pool: pool, Emit: func(tk Token) { got <- tk }}
	if pool == PoolLogits {
		r.PoolTokens = []int32{5, 9}
	}
	if _, _, err := e.Add(r); err != nil {
		t.Fatal(err)
	}
	return func() []float32 {
		tk := <-got
		if tk.Err != nil || tk.ID != -1 || tk.Finish != FinishStop {
			t.Fatalf("%+v", tk)
		}
		return tk.Vector
	}
}

func cosine(a, b []float32) float64 {
	var ab, aa, bb float64
	for i := range a {
		ab, aa, bb = ab+float64(a[i])*float64(b[i]), aa+float64(a[i])*float64(a[i]), bb+float64(b[i])*float64(b[i])
	}
	return ab / math.Sqrt(aa*bb)
}

// Vectors are those of transformers, and the same bits whatever the chunks, the other requests of a
// step and the prefix cache.
func TestVectors(t *testing.T) {
	for name, cases := range vectorGoldens(t) {
		t.Run(name, func(t *testing.T) {
			var first [][]float32
			for _, o := range []LoadOptions{{MaxSeqs: 8, MaxBatchedTokens: 512}, {MaxSeqs: 3, MaxBatchedTokens: 20}} {
				o.Model = name
				b := vectorBench(t, o)
				for round := range 2 { // the second finds the prompts in the cache
					var waits []func() []float32
					var wants [][]float32
					for _, c := range cases {
						for i, want := range [][]float32{c.Last, c.Mean, c.Scores, c.Logits} {
							if want != nil {
								waits, wants = append(waits, vectorOf(t, b.Engine, c.Prompt, PoolLast+Pool(i), 1)), append(wants, want)
							}
						}
					}
					var got [][]float32
					for i, wait := range waits {
						v, want := wait(), wants[i]
						if len(v) != len(want) {
							t.Fatalf("vector %d has %d numbers, want %d", i, len(v), len(want))
						}
						if similar := cosine(v, want); similar < 0.99999 {
							t.Errorf("vector %d: cosine %.7f", i, similar)
						}
						for k := range v {
							if math.Abs(float64(v[k]-want[k])) > 2e-4*(1+math.Abs(float64(want[k]))) {
								t.Errorf("vector %d: number %d is %v, want %v", i, k, v[k], want[k])
								break
							}
						}
						got = append(got, v)
					}
					if first == nil {
						first = got
					} else if !slices.EqualFunc(got, first, slices.Equal) {
						t.Errorf("round %d, steps of %d: other bits", round, o.MaxBatchedTokens)
					}
				}
				if s := b.Stats(); s.Generated != 0 || s.Prompts.Cached == 0 {
					t.Errorf("%d tokens generated, %d cached", s.Generated, s.Prompts.Cached)
				}
			}
		})
	}
}

// Vectors have the same bits alone and among requests for tokens, whose tokens do not change, with
// guesses or without. A prompt may fill the context.
func TestVectorsAmongTokens(t *testing.T) {
	cases := vectorGoldens(t)["qwen3"]
	const longest = 160
	load := func(o LoadOptions) *bench {
		o.Model, o.MaxModelLen = "qwen3", longest
		return vectorBench(t, o)
	}
	run := func(b *bench, vectors bool) (all [][]float32, text [][]int32) {
		text = make([][]int32, 6)
		var wg sync.WaitGroup
		for i := range text {
			wg.Add(1)
			r := &Request{Root: 5, Prompt: tokens(20+i, 3), MaxTokens: 30, Sampling: Sampling{Seed: uint64(i), Temperature: 0.8}}
			r.Emit = func(tk Token) {
				if text[i] = append(text[i], tk.ID); tk.Finish != 0 {
					wg.Done()
				}
			}
			if _, _, err := b.Add(r); err != nil {
				t.Fatal(err)
			}
		}
		if vectors {
			full := slices.Concat(cases[5].Prompt, cases[4].Prompt)[:longest]
			for _, prompt := range [][]int32{full, cases[4].Prompt, cases[0].Prompt} {
				a, m := vectorOf(t, b.Engine, prompt, PoolLast, 1), vectorOf(t, b.Engine, prompt, PoolMean, 2)
				all = append(all, a(), m())
			}
		}
		wg.Wait()
		return all, text
	}
	alone, _ := run(load(LoadOptions{MaxSeqs: 1, MaxBatchedTokens: 512}), true)
	_, text := run(load(LoadOptions{MaxSeqs: 6, MaxBatchedTokens: 24}), false)
	for _, o := range []LoadOptions{
		{MaxSeqs: 12, MaxBatchedTokens: 24},
		{MaxSeqs: 12, MaxBatchedTokens: 40, Speculation: Speculation{Tokens: 4, Lookup: Lookup{Min: 1, Max: 3}}},
		{MaxSeqs: 12, MaxBatchedTokens: 40, Speculation: Speculation{Tokens: 2, Model: "model/testdata/qwen3"}},
	} {
		vectors, among := run(load(o), true)
		if !slices.EqualFunc(vectors, alone, slices.Equal) {
			t.Errorf("%+v: other vectors than alone", o.Speculation)
		}
		if !slices.EqualFunc(among, text, slices.Equal) {
			t.Errorf("%+v: other tokens than without vectors", o.Speculation)
		}
	}
}

// Ranks that share a model give its vectors.
func TestVectorsTensorParallel(t *testing.T) {
	all := vectorGoldens(t)
	for _, name := range []string{"vectors/scores", "vectors/mean", "qwen3"} {
		b := vectorBench(t, LoadOptions{Model: name, MaxSeqs: 4, MaxBatchedTokens: 24, TensorParallel: rankCommand(2)})
		for _, c := range all[name] {
			for i, want := range [][]float32{c.Last, c.Mean, c.Scores, c.Logits} {
				if want == nil {
					continue
				}
				v := vectorOf(t, b.Engine, c.Prompt, PoolLast+Pool(i), 1)()
				if !slices.EqualFunc(v, want, func(a, b float32) bool { return math.Abs(float64(a-b)) <= 2e-4*(1+math.Abs(float64(b))) }) {
					t.Errorf("%s, kind %d: %v, want %v", name, i, v, want)
				}
			}
		}
	}
}

// What a request for a vector excludes is refused, and so are prompts longer than the context.
func TestVectorsRefused(t *testing.T) {
	b := vectorBench(t, LoadOptions{Model: "qwen3", MaxSeqs: 2, MaxBatchedTokens: 64, MaxModelLen: 64})
	emit := func(Token) {}
	for name, c := range map[string]struct {
		r    Request
		want error
	}{
		"unknown kind":    {Request{Pool: PoolLogits + 1}, ErrPool},
		"no classifier":   {Request{Pool: PoolScores}, ErrPool},
		"no tokens":       {Request{Pool: PoolLogits}, ErrPool},
		"many tokens":     {Request{Pool: PoolLogits, PoolTokens: tokens(17, 3)}, ErrPool},
		"unknown token":   {Request{Pool: PoolLogits, PoolTokens: []int32{256}}, ErrToken},
		"output":          {Request{Pool: PoolLast, Output: []int32{1}}, ErrPool},
		"logprobs":        {Request{Pool: PoolLast, LogProbs: true}, ErrPool},
		"prompt logprobs": {Request{Pool: PoolMean, EmitPrompt: func(int, []LogProbs) {}}, ErrPool},
		"a mean on hold":  {Request{Pool: PoolMean, Hold: true}, ErrPool},
		"too long":        {Request{Pool: PoolLast, Prompt: tokens(65, 3)}, scheduler.ErrTooLong},
	} {
		c.r.Emit, c.r.MaxTokens = emit, 1
		if c.r.Prompt == nil {
			c.r.Prompt = tokens(4, 3)
		}
		if _, _, err := b.Add(&c.r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := newBench(t, scheduler.Config{Pool: kvcache.Config{Blocks: 8}}, nil).start().Add(&Request{Prompt: tokens(4, 3), MaxTokens: 1, Pool: PoolLast, Emit: emit}); !errors.Is(err, ErrPool) {
		t.Errorf("a model without rows: %v", err)
	}
}

// Requests for vectors that are aborted leave nothing.
func TestVectorsAborted(t *testing.T) {
	b := vectorBench(t, LoadOptions{Model: "qwen3", MaxSeqs: 2, MaxBatchedTokens: 16, MaxModelLen: 256})
	for i := range 40 {
		id, _, err := b.Add(&Request{Root: 9, Prompt: tokens(200, 3+i), MaxTokens: 1, Pool: PoolMean, Emit: func(Token) {}})
		if err != nil {
			t.Fatal(err)
		}
		b.Abort(id)
	}
	vectorOf(t, b.Engine, tokens(30, 7), PoolMean, 1)()
}
