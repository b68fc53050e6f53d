package scheduler_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// A prompt of 10 tokens is computed in chunks of at most 8, then one token is sampled in each step.
func ExampleScheduler() {
	s, err := scheduler.New(scheduler.Config{Pool: kvcache.Config{Blocks: 16, BlockTokens: 4}, MaxBatchedTokens: 8, MaxSeqs: 4})
	if err != nil {
		panic(err)
	}
	if _, err := s.Add(scheduler.Request{ID: 1, Tokens: make([]int32, 10)}, 0); err != nil {
		panic(err)
	}
	for step := range 4 {
		b := s.Schedule(0)
		var results []scheduler.Result
		for _, q := range b.Seqs {
			fmt.Printf("request %d: tokens %d to %d, sample %v\n", q.ID, q.Start, q.Start+len(q.Tokens)-1, q.Sample)
			if q.Sample { // the model's work
				results = append(results, scheduler.Result{Tokens: []int32{7}, Finished: step == 3})
			}
		}
		s.Update(b, results)
	}
	// Output:
	// request 1: tokens 0 to 7, sample false
	// request 1: tokens 8 to 9, sample true
	// request 1: tokens 10 to 10, sample true
	// request 1: tokens 11 to 11, sample true
}
