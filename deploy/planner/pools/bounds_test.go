package pools

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// No simulated fleet computes a load in less time of its nodes than the bounds say: with short and
// long prompts, with and without common beginnings, between points and by coefficients, colocated
// and in pools, whether or not it keeps up. For many short prompts the bound is near the simulation.
func TestBoundsAreBounds(t *testing.T) {
	compared, nearest := 0, 9.0
	for seed := range uint64(8) {
		draw := rand.New(rand.NewPCG(seed, 23))
		o := options()
		o.Profiles = []string{[]string{"h100:llama-8b", "l4:llama-8b", "h200:llama-8b"}[seed%3]}
		in := []string{"20", "64-256", "lognormal(7,1)", "4000"}[draw.IntN(4)]
		o.Loads = []string{fmt.Sprintf("rps=%d,n=200,in=%s,out=%d,prefix=%.1f,prefixes=3", 20<<draw.IntN(5), in, 1+draw.IntN(60), float64(draw.IntN(3))*.3)}
		o.BatchedTokens, o.MaxSeqs, o.MinRemote, o.DropTooLong = []int{512 << (2 * draw.IntN(3))}, 256, []int{1}, true
		r := &run{Options: &o, longer: 1}
		if err := r.prepare(); err != nil {
			t.Fatal(err)
		}
		p := r.profiles[0].Profile
		points := seed%2 == 1
		if points { // some of which are far below the coefficients
			for _, x := range []float64{1, 128, 2048, 16384} {
				for _, start := range []float64{0, 4096, 1e5} {
					c := &p.Step.Prefill
					p.Step.Prefill.Points = append(p.Step.Prefill.Points, []float64{x, start, (.5 + .5*draw.Float64()) * (c.Fixed + c.PerToken*x + c.PerPair*x*(start+x/2))})
				}
			}
			p.Step.Mixed.Gamma = draw.Float64()
		}
		n := node(p)
		d := planner.Describe(&n, r.problem.Requests, o.BatchedTokens[0], o.BatchedTokens[0])
		least := d.LeastWork
		if !points {
			least += d.Rate * d.Output * (n.PerSeq + n.PerCtx*d.Context)
		}
		for _, f := range []planner.Fleet{{Decode: 1}, {Decode: 6}, {Prefill: 1, Decode: 1}, {Prefill: 3, Decode: 2}} {
			f.Settings = r.problem.Settings[0]
			got, err := r.one(planner.Case{Fleet: f, Load: 1, Slow: 1})
			if err != nil {
				t.Fatal(err)
			}
			if got.Failed > 0 || got.RequestRate == 0 {
				continue
			}
			span := float64(d.Requests) / got.RequestRate
			busy := (got.PrefillBusy*float64(f.Prefill) + got.DecodeBusy*float64(f.Decode)) * span
			compared++
			if busy < least*d.Span*(1-1e-6) {
				t.Errorf("seed %d: %s, %s, steps of %d: %s took %.4g s of its nodes' time, at least %.4g are needed", seed, o.Profiles[0], o.Loads[0], o.BatchedTokens[0], f.Size(), busy, least*d.Span)
			}
			nearest = min(nearest, busy/(least*d.Span))
		}
	}
	t.Logf("note: %d fleets, the nearest %.3f times the bound", compared, nearest)
	if compared < 16 || nearest > 1.3 {
		t.Errorf("%d fleets were compared, the nearest took %.3f times the least time", compared, nearest)
	}
}

// A thousand short prompts a second share steps: their bound counts a step's fixed time once for a
// full step, not for each prompt.
func TestShortPromptsShareSteps(t *testing.T) {
	p, _, err := profile.Named("h100:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	n := node(p)
	var list []planner.Request
	for i := range 1000 {
		list = append(list, planner.Request{At: time.Duration(i) * time.Millisecond, Prompt: 50, Output: 1})
	}
	d := planner.Describe(&n, list, 2048, 2048)
	if share := n.Chunk(2048, 0) / 2048 * 50 * 1000; d.LeastWork > share*1.01 || d.LeastWork < share*.8 || d.Work < 3*d.LeastWork {
		t.Errorf("least work %.3g s a second, want about %.3g; %.3g if each prompt is alone", d.LeastWork, share, d.Work)
	}
}
