package kvcache

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"testing"
)

// serve runs one request through a pool: what is cached is found, the rest
// computed and stored, and all is given back. It returns the tokens found.
func serve(t testing.TB, p *Pool, tokens []int32) int {
	t.Helper()
	c := p.NewChain(1, len(tokens))
	p.Extend(&c, tokens)
	found := p.Match(&c, len(tokens)) / p.blockTokens
	var blocks []BlockID
	for place := range len(tokens) / p.blockTokens {
		if place < found {
			id := p.Find(0, &c, place)
			p.Ref(id)
			blocks = append(blocks, id)
		}
	}
	for place := found; place < len(tokens)/p.blockTokens; place++ {
		id, ok := p.Alloc()
		if !ok {
			break // longer than the pool: its start is cached
		}
		if p.Store(id, 0, &c, place) != id {
			t.Fatal("a block that was not found is there")
		}
		blocks = append(blocks, id)
	}
	for i := len(blocks) - 1; i >= 0; i-- {
		p.Unref(blocks[i])
	}
	return found * p.blockTokens
}

// numbered are n tokens that begin with a number of their own.
func numbered(start, n int) []int32 {
	ts := make([]int32, n)
	for i := range ts {
		ts[i] = int32(start + i)
	}
	return ts
}

// Prompts that come once, together many times the pool, push out neither a system
// prompt that was used twice, nor each other's one after the next of those; what
// was hot and is used no more goes when other prefixes get hot.
func TestScansLeaveHotPrefixes(t *testing.T) {
	const blocks = 100
	for what, hot := range map[string]float64{"LRU": 1e-9, "hot": 0.5} {
		p := newPool(t, Config{Blocks: blocks, BlockTokens: 4, HotFraction: hot})
		system := numbered(1, 40*4)
		serve(t, p, system)
		serve(t, p, system)
		for scan := range 30 {
			serve(t, p, numbered(1000*(scan+1), 20*4))
			if err := p.Check(); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := serve(t, p, system), map[string]int{"LRU": 0, "hot": len(system)}[what]; got != want {
			t.Errorf("%s: %d of the system prompt's %d tokens are left, want %d", what, got, len(system), want)
		}
		// Others get hot: at most half the pool is, so the first cools down, and a scan takes it.
		for other := range 3 {
			for range 2 {
				serve(t, p, numbered(100_000*(other+1), 30*4))
			}
		}
		for scan := range 10 {
			serve(t, p, numbered(1_000_000*(scan+1), 20*4))
		}
		if got := serve(t, p, system); got != 0 {
			t.Errorf("%s: %d tokens of a prefix that cooled down are left", what, got)
		}
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

// On a trace of real prompts the hot part of the pool finds more than plain LRU.
func TestHotPrefixesOnTheMooncakeTrace(t *testing.T) {
	trace := mooncake(t)
	for _, blocks := range []int{1000, 4000, 10_000} {
		rates := map[float64]float64{}
		for _, hot := range []float64{1e-9, DefaultHotFraction} {
			p := newPool(t, Config{Blocks: blocks, BlockTokens: 1, HotFraction: hot, MaxEvents: 1})
			found, all := 0, 0
			for _, prompt := range trace {
				found += serve(t, p, prompt)
				all += len(prompt)
			}
			rates[hot] = float64(found) / float64(all)
			t.Logf("note: %d blocks of 512 tokens, %3.0f %% hot at most: %.2f %% of tokens found", blocks, 100*hot, 100*rates[hot])
		}
		if rates[DefaultHotFraction] <= rates[1e-9] {
			t.Errorf("%d blocks: %.4f found, LRU has %.4f", blocks, rates[DefaultHotFraction], rates[1e-9])
		}
	}
}

// mooncake returns the prompts of a trace, as a number for each 512 tokens that also
// identifies all tokens before them.
func mooncake(t *testing.T) (prompts [][]int32) {
	t.Helper()
	f, err := os.Open("../../bench/sim/testdata/mooncake_synthetic.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r struct {
			Hashes []int32 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		prompts = append(prompts, r.Hashes)
	}
	if err := lines.Err(); err != nil || len(prompts) < 1000 {
		t.Fatalf("%d prompts, %v", len(prompts), err)
	}
	return prompts
}
