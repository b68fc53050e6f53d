package draft

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/sample"
)

const vocab = 50

// device is a model whose KV is the token itself, and whose next token is a
// function of all that its groups' tables show it.
type device struct {
	groups []kvcache.Group
	kv     [][][]int32 // [groups][blocks][BlockTokens]
	fail   bool
	steps  int
	widest int // tokens of a step
}

func newDevice(c kvcache.Config) *device {
	d := &device{groups: c.Groups}
	for _, g := range c.Groups {
		blocks := make([][]int32, c.Blocks)
		for i := range blocks {
			blocks[i] = make([]int32, g.BlockTokens)
		}
		d.kv = append(d.kv, blocks)
	}
	return d
}

// follows is the token after tokens, as the device draws it for a seed.
func (d *device) follows(tokens []int32, seed uint64) int32 {
	sum := seed + uint64(len(tokens))
	for g, spec := range d.groups {
		from := 0
		if spec.Window > 0 {
			from = max(0, len(tokens)-spec.Window)
		}
		for i, t := range tokens[from:] {
			sum = sum*31 + uint64(t)*uint64(g+1) + uint64(from+i)
		}
	}
	return int32(sum>>7) % vocab & 0x7fffffff
}

func (d *device) Step(s *backend.Step, _ func(int)) error {
	d.steps++
	d.widest = max(d.widest, len(s.Tokens))
	out := 0
	for i := range s.Spans {
		span := &s.Spans[i]
		for g, spec := range d.groups {
			for n := range int(span.Tokens) {
				pos := int(span.Start) + n
				d.kv[g][span.Tables[g][pos/spec.BlockTokens]][pos%spec.BlockTokens] = s.Tokens[int(span.Row)+n]
			}
		}
		if out == len(s.Outputs) || s.Outputs[out].Row != span.Row+span.Tokens-1 {
			continue
		}
		n := int(span.Start + span.Tokens)
		if int(s.Outputs[out].Position) != n {
			return fmt.Errorf("output of row %d for position %d, want %d", s.Outputs[out].Row, s.Outputs[out].Position, n)
		}
		sum := s.Outputs[out].Params.Seed + uint64(n)
		for g, spec := range d.groups {
			from := 0
			if spec.Window > 0 {
				from = max(0, n-spec.Window)
			}
			for pos := from; pos < n; pos++ {
				block := span.Tables[g][pos/spec.BlockTokens]
				if block < 0 {
					return fmt.Errorf("group %d: position %d of %d is in no block", g, pos, n)
				}
				sum = sum*31 + uint64(d.kv[g][block][pos%spec.BlockTokens])*uint64(g+1) + uint64(pos)
			}
		}
		s.Sampled[out] = int32(sum>>7) % vocab & 0x7fffffff
		out++
	}
	if out != len(s.Outputs) {
		return fmt.Errorf("%d outputs, %d of them behind spans", len(s.Outputs), out)
	}
	if d.fail {
		return errors.New("out of order")
	}
	return nil
}

func newDrafter(t *testing.T, pool kvcache.Config, tokens, maxLen int) (*Drafter, *device) {
	t.Helper()
	if len(pool.Groups) == 0 {
		pool.Groups = []kvcache.Group{{BlockTokens: 4}}
	}
	pool.BlockTokens = 4
	dev := newDevice(pool)
	d, err := New(Config{Model: dev, Pool: pool, MaxTokens: tokens, MaxOutputs: 8, MaxModelLen: maxLen})
	if err != nil {
		t.Fatal(err)
	}
	return d, dev
}

// Sequences that grow by what was guessed, by part of it, or otherwise, that come,
// go and share prefixes, in a pool that is short: every guess is what the model
// draws behind those very tokens.
func TestGuessesAreTheModels(t *testing.T) {
	guesses, evicted, cached := 0, 0, 0
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 7))
		pool := kvcache.Config{Blocks: 40 + rng.IntN(60)}
		switch rng.IntN(3) {
		case 0:
			pool.Groups = []kvcache.Group{{BlockTokens: 4}, {BlockTokens: 8, Window: 6}}
		case 1:
			pool.Groups = []kvcache.Group{{BlockTokens: 4, Window: 9}}
		}
		d, dev := newDrafter(t, pool, 5+rng.IntN(40), 80)
		live, next := map[uint64][]int32{}, uint64(0)
		stem := randomTokens(rng, 30)
		for range 60 {
			if len(live) < 6 && rng.IntN(2) == 0 {
				next++
				live[next] = append(slices.Clone(stem[:1+rng.IntN(len(stem))]), randomTokens(rng, rng.IntN(8))...)
			}
			var asks []Request
			for id := range next + 1 {
				if tokens := live[id]; tokens != nil && rng.IntN(4) > 0 {
					asks = append(asks, Request{ID: id, Root: kvcache.Hash(id % 2), Tokens: slices.Clone(tokens), MaxDrafts: rng.IntN(6), Sampling: sample.Params{Seed: id % 3}})
				}
			}
			known := len(d.byID)
			if err := d.Draft(asks); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			evicted += max(0, known-len(d.byID))
			if err := d.Check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			for _, a := range asks {
				n := len(live[a.ID])
				if !slices.Equal(a.Tokens[:n], live[a.ID]) || len(a.Tokens)-n > a.MaxDrafts || len(a.Tokens) > 80 {
					t.Fatalf("seed %d: %v became %v, at most %d guesses", seed, live[a.ID], a.Tokens, a.MaxDrafts)
				}
				for i := n; i < len(a.Tokens); i++ {
					if want := dev.follows(a.Tokens[:i], a.Sampling.Seed); a.Tokens[i] != want {
						t.Fatalf("seed %d: guess %d behind %v is %d, the model draws %d", seed, i-n, a.Tokens[:i], a.Tokens[i], want)
					}
				}
				guesses += len(a.Tokens) - n
				kept := n + rng.IntN(len(a.Tokens)-n+1)
				live[a.ID] = append(slices.Clone(a.Tokens[:kept]), int32(rng.IntN(vocab)))
				if len(live[a.ID]) >= 78 || rng.IntN(12) == 0 {
					delete(live, a.ID)
					d.Remove(a.ID)
				}
			}
		}
		cached += d.Usage().Cached
		for id := range live {
			d.Remove(id)
		}
		if u := d.Usage(); u.Used != 0 {
			t.Fatalf("seed %d: %+v when all are gone", seed, u)
		}
		if err := d.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	if guesses < 5000 || evicted < 20 || cached < 100 {
		t.Errorf("%d guesses, %d sequences lost their blocks, %d blocks stayed cached: the test no longer covers them", guesses, evicted, cached)
	}
}

func randomTokens(rng *rand.Rand, n int) []int32 {
	ts := make([]int32, n)
	for i := range ts {
		ts[i] = int32(rng.IntN(vocab))
	}
	return ts
}

// A long prompt catches up a chunk per call, and sequences that are nearly complete get
// drafts meanwhile. A second sequence with the same prompt starts from its blocks.
func TestLongPromptsCatchUpBesideOthers(t *testing.T) {
	d, dev := newDrafter(t, kvcache.Config{Blocks: 200}, 16, 400)
	rng := rand.New(rand.NewPCG(1, 7))
	long, short := randomTokens(rng, 100), randomTokens(rng, 3)
	calls := 0
	for calls < 20 {
		asks := []Request{{ID: 1, Tokens: slices.Clone(long), MaxDrafts: 2}, {ID: 2, Tokens: slices.Clone(short), MaxDrafts: 2}}
		if err := d.Draft(asks); err != nil {
			t.Fatal(err)
		}
		if len(asks[1].Tokens) != len(short)+2 {
			t.Fatalf("call %d: the short one has %d guesses", calls, len(asks[1].Tokens)-len(short))
		}
		calls++
		if short = append(short, 1); len(asks[0].Tokens) > len(long) {
			break
		}
	}
	if calls < 7 || calls > 9 || dev.widest > 16 {
		t.Errorf("100 tokens caught up in %d calls of at most 16 tokens, the widest of %d", calls, dev.widest)
	}
	again := []Request{{ID: 3, Tokens: append(slices.Clone(long), 5), MaxDrafts: 1}}
	d.Remove(1)
	if err := d.Draft(again[:1]); err != nil || len(again[0].Tokens) != len(long)+2 {
		t.Errorf("%d tokens, %v: the prompt was not found in the cache", len(again[0].Tokens), err)
	}
}

// A step that fails costs guesses, and nothing that it computed is used.
func TestFailedSteps(t *testing.T) {
	d, dev := newDrafter(t, kvcache.Config{Blocks: 50}, 16, 100)
	asks := []Request{{ID: 1, Tokens: []int32{1, 2, 3, 4, 5, 6}, MaxDrafts: 3}}
	dev.fail = true
	if err := d.Draft(asks); !errors.Is(err, ErrStep) || len(asks[0].Tokens) != 6 {
		t.Errorf("%v, %v", err, asks[0].Tokens)
	}
	if u := d.Usage(); u.Used+u.Cached != 0 || d.Check() != nil {
		t.Errorf("%+v after a failed step", u)
	}
	dev.fail = false
	if err := d.Draft(asks); err != nil || len(asks[0].Tokens) != 9 {
		t.Errorf("%v, %v", err, asks[0].Tokens)
	}
}

func TestConfig(t *testing.T) {
	pool := kvcache.Config{Blocks: 10, BlockTokens: 4}
	for what, c := range map[string]Config{
		"no model":  {Pool: pool, MaxTokens: 1, MaxOutputs: 1, MaxModelLen: 8},
		"no tokens": {Model: &device{}, Pool: pool, MaxOutputs: 1, MaxModelLen: 8},
		"too long":  {Model: &device{}, Pool: pool, MaxTokens: 1, MaxOutputs: 1, MaxModelLen: 41},
	} {
		if _, err := New(c); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
