package fleet

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// The times to the first token of a prefill node with Poisson arrivals of equal prompts, each of one
// step, are within 2 % of Lindley's recursion of a queue in order of arrival, on the mean and at
// p99. (Prompts of different lengths are not computed in order of arrival.)
func TestQueueOfOneNode(t *testing.T) {
	o := dynamoFleet(t, 1, 4, route.LeastLoad, 1)
	var err error
	if o.Steps, err = StepTimesOf("h100"); err != nil {
		t.Fatal(err)
	}
	const prompt, requests = 2001, 3000 // of the prompt, the decode node computes the last token
	o.BlockTokens, o.Blocks, o.BatchedTokens, o.MinRemote = 250, 4000, prompt-1, 1
	service := o.Steps.Step(Shape{Chunk: prompt - 1, Attended: (prompt - 1) * (prompt - 1) / 2}, 0)
	for _, load := range []float64{0.5, 0.7, 0.85} {
		draw := rand.New(rand.NewPCG(5, uint64(100*load)))
		trace := make([]sim.Request, requests)
		at := 0.0
		for i := range trace {
			if i > 0 {
				at += draw.ExpFloat64() * service.Seconds() / load
			}
			trace[i] = sim.Request{At: time.Duration(at * 1e9), Tokens: prompt, Output: 1}
			for b := range prompt/sim.BlockTokens + 1 {
				trace[i].Blocks = append(trace[i].Blocks, kvcache.Hash(i<<8|b))
			}
		}
		r, err := Run(trace, o)
		if err != nil {
			t.Fatal(err)
		}
		alone := r.Requests[0].First // it has not waited
		var got, want []float64
		var free time.Duration // when the node has computed the prompts before
		for i := range r.Requests {
			q := &r.Requests[i]
			begin := max(q.At, free)
			free = begin + service
			got, want = append(got, (q.First-q.At).Seconds()), append(want, (begin-q.At+alone).Seconds())
		}
		figures := func(v []float64) (mean, p99 float64) {
			for _, s := range v {
				mean += s / float64(len(v))
			}
			slices.Sort(v)
			return mean, v[len(v)*99/100]
		}
		mean, p99 := figures(got)
		wantMean, wantP99 := figures(want)
		t.Logf("note: load %g: TTFT mean %.1f ms, p99 %.1f; by the recursion %.1f, %.1f", load, mean*1e3, p99*1e3, wantMean*1e3, wantP99*1e3)
		if math.Abs(mean/wantMean-1) > 0.02 || math.Abs(p99/wantP99-1) > 0.02 {
			t.Errorf("load %g: mean %.4f s, p99 %.4f s, by the recursion %.4f and %.4f", load, mean, p99, wantMean, wantP99)
		}
	}
}
