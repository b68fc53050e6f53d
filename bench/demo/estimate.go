package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// The estimate plays the same mix in virtual time, on fleets of GPUs that were not
// available for a measurement.
const (
	estimateSteps    = "h100"
	estimateRequests = 500     // for each node
	estimatePool     = 400_000 // tokens of KV in a GPU of 80 GB, after 16 GB of weights
	estimateBlock    = 16
	trialShare       = 0.6
)

var estimateGoals = fleet.Goals{TTFT: 500 * time.Millisecond, TPOT: 20 * time.Millisecond}

// kind is one kind of request of the mix.
type kind struct {
	share          float64
	prompt, answer int
}

func kinds() (all []kind, err error) {
	for _, l := range mix {
		var k kind
		if _, err := fmt.Sscanf(strings.ReplaceAll(l, ":", " "), "%g %d %d", &k.share, &k.prompt, &k.answer); err != nil {
			return nil, fmt.Errorf("mix %q, want SHARE:PROMPT:ANSWER: %w", l, err)
		}
		all = append(all, k)
	}
	return all, nil
}

// trace draws n requests that arrive at a rate; 0: all at once. No two prompts have a
// block in common.
func trace(n int, rate float64, of []kind) []sim.Request {
	draw := rand.New(rand.NewPCG(1, 8))
	var all []sim.Request
	at := 0.0
	for i := range n {
		if rate > 0 {
			at += draw.ExpFloat64() / rate
		}
		k, v := 0, draw.Float64()
		for v > of[k].share && k < len(of)-1 {
			v -= of[k].share
			k++
		}
		q := sim.Request{At: time.Duration(at * 1e9), Tokens: of[k].prompt, Output: of[k].answer}
		for b := range q.Tokens/sim.BlockTokens + 1 {
			q.Blocks = append(q.Blocks, kvcache.Hash(uint64(i)<<16|uint64(b)))
		}
		all = append(all, q)
	}
	return all
}

// side is a fleet of the estimate with its step size.
type side struct{ prefill, decode, chunk int }

func (s side) run(rate float64, of []kind) (fleet.Summary, *fleet.Result, error) {
	steps, err := fleet.StepTimesOf(estimateSteps)
	if err != nil {
		return fleet.Summary{}, nil, err
	}
	policy, err := route.ParsePolicy("prefix")
	if err != nil {
		return fleet.Summary{}, nil, err
	}
	r, err := fleet.Run(trace(estimateRequests*(s.prefill+s.decode), rate, of), fleet.Options{
		Prefill: s.prefill, Decode: s.decode, Blocks: estimatePool / estimateBlock, BlockTokens: estimateBlock, BatchedTokens: s.chunk,
		Steps: steps, Policy: policy, Seed: 1, Heartbeat: 100 * time.Millisecond, GrantTimeout: 2 * time.Second,
	})
	if err != nil {
		return fleet.Summary{}, nil, err
	}
	return r.Summarize(estimateGoals), r, nil
}

// choose returns the side with the lowest inter-token latency among those with about the
// shortest time to first token and the highest goodput.
func choose(all []side, rate float64, of []kind) (side, error) {
	sums := make([]fleet.Summary, len(all))
	good, soonest, at := 0.0, time.Duration(1<<62), -1
	for i, s := range all {
		var err error
		if sums[i], _, err = s.run(rate, of); err != nil {
			return side{}, err
		}
		good = max(good, sums[i].Goodput)
	}
	for i := range all {
		if sums[i].Goodput >= good-0.01 {
			soonest = min(soonest, sums[i].TTFTP50)
		}
	}
	for i := range all {
		if sums[i].Goodput >= good-0.01 && float64(sums[i].TTFTP50) <= tolerable*float64(soonest) && (at < 0 || sums[i].ITLP99 < sums[at].ITLP99) {
			at = i
		}
	}
	return all[at], nil
}

// estimate returns the page's section about fleets of GPUs.
func estimate(sizes []int, shares []float64) (string, error) {
	of, err := kinds()
	if err != nil {
		return "", err
	}
	steps, err := fleet.StepTimesOf(estimateSteps)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "## The same mix on GPUs: an estimate\n\n"+
		"In virtual time, by the router, scheduler and KV pool of the product (`bench/sim/fleet`). These are not measurements: step times are an %s; a node holds %d tokens of KV, transfers run at 100 Gbit/s, prompts share no prefix. "+
		"Each fleet has its best split and step size at %.0f %% of the load, among those that keep as many requests within %v and %v per token. 100 %% is the throughput of the colocated nodes when all requests arrive at once.\n\n",
		steps.Source, estimatePool, 100*trialShare, estimateGoals.TTFT, estimateGoals.TPOT)
	b.WriteString("| nodes | fleets | requests/s | load | ITL p99, ms | TTFT p50, ms | TTFT p99, ms | goodput |\n|---|---|---|---|---|---|---|---|\n")
	for _, n := range sizes {
		var colocated, split []side
		for _, chunk := range []int{512, 1024, 2048, 8192} {
			colocated = append(colocated, side{0, n, chunk})
			for p := 1; p <= n/2; p++ {
				split = append(split, side{p, n - p, chunk})
			}
		}
		capacity := 0.0
		for _, s := range colocated {
			_, r, err := s.run(0, of)
			if err != nil {
				return "", err
			}
			capacity = max(capacity, float64(len(r.Requests))/r.Span.Seconds())
		}
		c, err := choose(colocated, trialShare*capacity, of)
		if err != nil {
			return "", err
		}
		d, err := choose(split, trialShare*capacity, of)
		if err != nil {
			return "", err
		}
		for _, share := range shares {
			x, _, err := d.run(share*capacity, of)
			if err != nil {
				return "", err
			}
			y, _, err := c.run(share*capacity, of)
			if err != nil {
				return "", err
			}
			ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
			fmt.Fprintf(&b, "| %d | %dP%dD steps of %d, %d colocated steps of %d | %.0f | %.0f %%", n, d.prefill, d.decode, d.chunk, c.decode, c.chunk, share*capacity, 100*share)
			for _, pair := range [][2]time.Duration{{x.ITLP99, y.ITLP99}, {x.TTFTP50, y.TTFTP50}, {x.TTFTP99, y.TTFTP99}} {
				fmt.Fprintf(&b, " | %.3g, %.3g: %.2f ×", ms(pair[0]), ms(pair[1]), float64(pair[0])/float64(pair[1]))
			}
			fmt.Fprintf(&b, " | %.3f, %.3f |\n", x.Goodput, y.Goodput)
		}
	}
	return b.String(), nil
}
