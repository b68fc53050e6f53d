package route

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// What the index says that nodes of a model with these KV groups hold of a prompt
// is what their pools find, whatever has been evicted: of groups with a window only
// the last blocks that it reaches count, and the group that has least decides.
func TestHeldIsWhatPoolsFind(t *testing.T) {
	const unit, nodes = 4, 5
	layouts := map[string][]kvcache.Group{
		"full and window":          {{}, {Window: 13}},
		"larger blocks":            {{}, {BlockTokens: 2 * unit, Window: 9}},
		"full larger, two windows": {{BlockTokens: 2 * unit}, {Window: 6}, {BlockTokens: 3 * unit, Window: 30}},
		"two that see all":         {{}, {BlockTokens: 2 * unit}},
		"one":                      {{}},
		"one with a window":        {{Window: 13}},
		"common factor":            {{}, {BlockTokens: 2 * unit, Window: 9}, {BlockTokens: 4 * unit, Window: 30}},
		"windows alone":            {{Window: 30}, {BlockTokens: 2 * unit, Window: 9}},
	}
	for name, groups := range layouts {
		t.Run(name, func(t *testing.T) {
			lowered, headless := 0, 0
			for seed := range uint64(15) {
				rng := rand.New(rand.NewPCG(seed, 5))
				x := NewIndex()
				x.Grow(nodes)
				var prompts [][]int32
				for range 3 {
					prompt := make([]int32, 90)
					for i := range prompt {
						prompt[i] = int32(rng.IntN(2))
					}
					prompts = append(prompts, prompt, append(prompt[:40:40], prompt[:50]...))
				}
				var pools []*kvcache.Pool
				for slot := range nodes {
					p, err := kvcache.NewPool(kvcache.Config{Blocks: 60, BlockTokens: unit, Groups: groups, MaxEvents: 1 << 12})
					if err != nil {
						t.Fatal(err)
					}
					pools = append(pools, p)
					for range 4 + rng.IntN(8) {
						cache(t, p, prompts[rng.IntN(len(prompts))], rng)
					}
					events, gap := p.Events(nil)
					if gap {
						t.Fatal("events were dropped")
					}
					for _, e := range events {
						if h := e.Hash.In(e.Group); e.Kind == kvcache.Stored {
							x.Add(slot, h)
						} else {
							x.Remove(slot, h)
						}
					}
				}
				for _, prompt := range prompts {
					l, h := checkHeld(t, fmt.Sprintf("seed %d", seed), x, pools, prompt, unit)
					lowered, headless = lowered+l, headless+h
				}
			}
			if len(groups) > 1 && lowered < 10 {
				t.Errorf("another group than the first decided only %d times", lowered)
			}
			if groups[0].Window > 0 && headless < 10 {
				t.Errorf("only %d prefixes were found without their first block", headless)
			}
		})
	}
}

// checkHeld compares index and pools, and counts the nodes of which the first group
// alone says more, and those that have lost the first block of what they hold.
func checkHeld(t *testing.T, what string, x *Index, pools []*kvcache.Pool, prompt []int32, unit int) (lowered, headless int) {
	t.Helper()
	hashes := kvcache.AppendHashes(nil, 1, prompt, unit)
	held := make([]int32, len(pools))
	first := make([]int32, len(pools))
	x.Held(hashes, unit, pools[0].Groups()[:1], first)
	x.Held(hashes, unit, pools[0].Groups(), held)
	for slot, p := range pools {
		c := p.NewChain(1, len(prompt))
		p.Extend(&c, prompt)
		if want := p.Match(&c, len(prompt)); int(held[slot])*unit != want {
			t.Fatalf("%s: node %d: %d tokens by the index, the pool finds %d (the first group %d)", what, slot, int(held[slot])*unit, want, int(first[slot])*unit)
		}
		if held[slot] < first[slot] {
			lowered++
		}
		if held[slot] > 0 && p.Find(0, &c, 0) == kvcache.NoBlock {
			headless++
		}
	}
	return lowered, headless
}

// cache has a pool compute a prompt. Blocks of groups without a window are given back
// from the last to the first, as nodes do, so that a prefix outlives what follows it;
// of others any may go first, and often those do that fell out of the window first.
func cache(t *testing.T, p *kvcache.Pool, prompt []int32, rng *rand.Rand) {
	t.Helper()
	c := p.NewChain(1, len(prompt))
	p.Extend(&c, prompt)
	var all []kvcache.BlockID
	for g, spec := range p.Groups() {
		var own []kvcache.BlockID
		for place := range len(prompt) / spec.BlockTokens {
			id := p.Find(g, &c, place)
			if id != kvcache.NoBlock {
				p.Ref(id)
			} else {
				var ok bool
				if id, ok = p.Alloc(); !ok {
					break // a prefix is kept
				}
				if have := p.Store(id, g, &c, place); have != id {
					t.Fatal("stored twice")
				}
			}
			own = append(own, id)
		}
		switch {
		case spec.Window == 0:
			slices.Reverse(own)
		case rng.IntN(2) == 0:
			rng.Shuffle(len(own), func(i, j int) { own[i], own[j] = own[j], own[i] })
		}
		if rng.IntN(2) == 0 {
			all = append(all, own...)
		} else {
			all = append(own, all...)
		}
	}
	for _, id := range all {
		p.Unref(id)
	}
}

func TestHeldDoesNotAllocate(t *testing.T) {
	x := NewIndex()
	x.Grow(64)
	hashes := make([]kvcache.Hash, 100)
	for i := range hashes {
		hashes[i] = kvcache.Hash(i + 1)
		for slot := range 64 {
			if x.Add(slot, hashes[i]); i < 50+slot {
				x.Add(slot, hashes[i].In(1))
			}
		}
	}
	held := make([]int32, 64)
	if n := testing.AllocsPerRun(20, func() {
		clear(held)
		x.Held(hashes, 16, []kvcache.Group{{BlockTokens: 16}, {BlockTokens: 16, Window: 128}}, held)
	}); n != 0 || held[0] != 50 || held[63] != 100 {
		t.Errorf("%v allocations, held %v", n, held)
	}
}
