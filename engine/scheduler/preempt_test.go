package scheduler

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

func TestCheapest(t *testing.T) {
	for what, c := range map[string]struct {
		all  []candidate
		need int
		want int
	}{
		"nobody":                          {nil, 1, -1},
		"the least to compute again":      {[]candidate{{0, 90, 6, 0}, {0, 40, 3, 0}, {0, 70, 5, 0}}, 2, 1},
		"who frees enough":                {[]candidate{{0, 90, 6, 0}, {0, 40, 3, 0}}, 4, 0},
		"the price of a block":            {[]candidate{{0, 90, 6, 0}, {0, 40, 4, 0}}, 9, 1},
		"priority before cost":            {[]candidate{{0, 10, 2, 0}, {3, 900, 60, 0}, {1, 5, 2, 0}}, 1, 1},
		"not the same again":              {[]candidate{{0, 40, 4, 2}, {0, 90, 6, 0}}, 1, 1},
		"many times, and still somebody":  {[]candidate{{0, 40, 4, 90}}, 1, 0},
		"who frees nothing, last":         {[]candidate{{0, 1, 0, 0}, {0, 400, 1, 0}}, 3, 1},
		"who frees and loses nothing":     {[]candidate{{0, 0, 0, 0}, {0, 400, 1, 30}}, 3, 1},
		"who frees nothing, if need be":   {[]candidate{{0, 7, 0, 0}, {0, 3, 0, 0}}, 1, 1},
		"of equals the first":             {[]candidate{{0, 16, 1, 0}, {0, 16, 1, 0}}, 1, 0},
		"a better one of a lower urgency": {[]candidate{{2, 50, 2, 0}, {2, 30, 2, 0}, {1, 1, 2, 0}}, 1, 1},
	} {
		if got := cheapest(c.all, c.need); got != c.want {
			t.Errorf("%s: %d, want %d", what, got, c.want)
		}
	}
}

// shortPool serves requests of mixed lengths in a pool that is short, to their
// ends, and counts what is computed in all and how long the last one waited for its
// end.
func shortPool(t *testing.T, seed uint64, long int, broken fault) (computed, steps int, longest int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 0x9c057))
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 160, BlockTokens: 16}, MaxSeqs: 24, MaxBatchedTokens: 256, Watermark: 1e-6})
	s.fault = broken
	type life struct{ left, start int }
	lives := map[RequestID]*life{}
	next := RequestID(0)
	for steps = 0; len(lives) > 0 || next < 200; steps++ {
		for next < 200 && len(lives) < 40 {
			next++
			n := 8 + rng.IntN(40)
			if rng.IntN(6) == 0 {
				n = long + rng.IntN(long)
			}
			add(t, s, Request{ID: next, Tokens: text(int(next)*1000, n)}, time.Duration(steps))
			lives[next] = &life{20 + rng.IntN(120), steps}
		}
		b := s.Schedule(time.Duration(steps))
		computed += b.Tokens
		var results []Result
		for _, q := range b.Seqs {
			if q.Sample {
				l := lives[q.ID]
				l.left--
				results = append(results, Result{Tokens: []int32{int32(rng.IntN(1000))}, Finished: l.left == 0})
			}
		}
		for _, id := range s.Update(b, results) {
			longest = max(longest, steps-lives[id].start)
			delete(lives, id)
		}
		if err := s.Check(); err != nil {
			t.Fatalf("seed %d, step %d: %v", seed, steps, err)
		}
		if steps > 100_000 {
			t.Fatalf("seed %d: %d requests are not done", seed, len(lives))
		}
	}
	return computed, steps, longest
}

// If single prompts are a large part of the pool, preemption by cost takes fewer steps, and
// recomputes less, than preemption of the last by rank. Otherwise it is as good within some
// percent. No request waits longer for it.
func TestPreemptionByCost(t *testing.T) {
	for _, c := range []struct {
		long int        // tokens of one prompt in six, of a pool of 2,560, and up to twice as many
		most [3]float64 // of what the rank needs
	}{{150, [3]float64{1.03, 1.03, 1.1}}, {1000, [3]float64{0.99, 0.96, 1}}} {
		var byCost, byRank [3]int
		for seed := range uint64(10) {
			for i, sum := range []*[3]int{&byCost, &byRank} {
				computed, steps, longest := shortPool(t, seed, c.long, []fault{0, faultPreemptByRank}[i])
				sum[0] += computed
				sum[1] += steps
				sum[2] = max(sum[2], longest)
			}
		}
		t.Logf("note: prompts of %d tokens among short ones: tokens, steps, most steps of a request: by cost %v, the last by rank %v", c.long, byCost, byRank)
		for i, of := range c.most {
			if float64(byCost[i]) > of*float64(byRank[i]) {
				t.Errorf("prompts of %d: by cost %v, by rank %v: want at most %v of that", c.long, byCost, byRank, of)
			}
		}
	}
}
