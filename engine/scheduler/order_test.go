package scheduler

import (
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// With a bound on a step's tokens a prompt of up to twice as many that comes first is
// computed whole, what completes is not filled up with a part of a longer prompt, and
// short ones share a step.
func TestLimitTokens(t *testing.T) {
	prompts := func(limit int, lengths ...int) (steps [][]int) {
		s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 64}, MaxBatchedTokens: 100, MaxSeqs: 8})
		s.OrderBy(func(work []Work) {
			slices.SortStableFunc(work, func(a, b Work) int { return a.Left - b.Left })
		})
		s.LimitTokens(limit)
		for i, n := range lengths {
			add(t, s, Request{ID: RequestID(i + 1), Tokens: text(i+1, n), ComputeOnly: true}, 0)
		}
		for range 20 {
			b, _ := step(t, s, 0)
			if len(b.Seqs) == 0 {
				return steps
			}
			var chunks []int
			for i := range b.Seqs {
				chunks = append(chunks, len(b.Seqs[i].Tokens))
			}
			steps = append(steps, chunks)
		}
		t.Fatalf("%v have no end with a bound of %d: %v", lengths, limit, steps)
		return nil
	}
	for _, c := range []struct {
		limit   int
		lengths []int
		want    [][]int
	}{
		{0, []int{150}, [][]int{{100}, {50}}},
		{40, []int{150}, [][]int{{40}, {40}, {70}}},                 // the last 70 at once
		{40, []int{150, 30}, [][]int{{30}, {40}, {40}, {70}}},       // nothing besides the short one
		{40, []int{150, 10}, [][]int{{10, 30}, {40}, {80}}},         // which has less than half of a step
		{40, []int{150, 81}, [][]int{{40}, {41}, {40}, {40}, {70}}}, // 81 is above twice the bound
		{40, []int{15, 15, 15}, [][]int{{15, 15}, {15}}},            // and nobody gets a tenth of a prompt
		{80, []int{150}, [][]int{{80}, {70}}},                       // never above MaxBatchedTokens
		{200, []int{150}, [][]int{{100}, {50}}},
	} {
		if got := prompts(c.limit, c.lengths...); !slices.EqualFunc(got, c.want, slices.Equal) {
			t.Errorf("%v with a bound of %d: %v, want %v", c.lengths, c.limit, got, c.want)
		}
	}
}
