package planner

import (
	"math"
	"slices"
	"time"
)

// Demand is the load in figures that formulas need. Seconds are those of one kind of node.
type Demand struct {
	Requests       int
	Span           float64 // seconds between the first and the last arrival
	Rate           float64 // requests per second
	Prompt, Output float64 // mean tokens
	Longest        int     // tokens of the longest prompt
	Cached         float64 // share of prompt tokens that earlier prompts also begin with
	Context        float64 // mean tokens that a decoded token attends to
	Residence      float64 // sum over answer tokens of the context, per second

	LeastWork float64 // Work if prompts share steps as well as they can: no fleet has less
	Work      float64 // seconds of prefill per second, each prompt alone, with every shared prefix cached
	ColdWork  float64 // the same without caches
	Service   float64 // mean seconds of a prompt, with every shared prefix cached
	Variation float64 // squared coefficient of variation of these
}

// Describe computes a load's figures for a kind of node. batch is the tokens of a step; of
// LeastWork, most.
func Describe(n *Node, requests []Request, batch, most int) (d Demand) {
	d.Requests = len(requests)
	d.Span = max(requests[len(requests)-1].At.Seconds()-requests[0].At.Seconds(), 1e-3)
	d.Rate = float64(len(requests)) / d.Span
	var prompt, output, cached, context, warm, cold, square, least float64
	var tokens, pairs []float64 // least seconds of each, by kind of node
	for _, k := range n.computing() {
		perToken, perPair := k.leastChunk(most)
		tokens, pairs = append(tokens, perToken), append(pairs, perPair)
	}
	times := promptTimes{n: n.prefill(), batch: batch}
	for _, q := range requests {
		out := float64(max(1, q.Output))
		prompt, output, cached = prompt+float64(q.Prompt), output+out, cached+float64(q.Cached)
		context += out * (float64(q.Prompt) + out/2)
		s := times.seconds(q.Prompt, q.Cached)
		warm, square, cold = warm+s, square+s*s, cold+times.seconds(q.Prompt, 0)
		start := float64(min(q.Cached, q.Prompt-1))
		n := float64(q.Prompt) - start
		fastest := math.Inf(1)
		for k := range tokens {
			fastest = min(fastest, tokens[k]*n+pairs[k]*n*(start+n/2))
		}
		least += fastest
		d.Longest = max(d.Longest, q.Prompt)
	}
	d.LeastWork = least / d.Span
	k := float64(len(requests))
	d.Prompt, d.Output, d.Cached, d.Context = prompt/k, output/k, cached/prompt, context/output
	d.Residence = context / d.Span
	d.Work, d.ColdWork, d.Service = warm/d.Span, cold/d.Span, warm/k
	d.Variation = max(0, square/k/(d.Service*d.Service)-1)
	return d
}

// leastChunk returns seconds of a token, and of a pair of a token and one before it, of which the
// sum is at most the time of a step with at most so many tokens, whichever prompts share it.
func (n *Node) leastChunk(most int) (perToken, perPair float64) {
	sizes := []int{most}
	for t := 1; t < most; t = max(t+1, t*5/4) {
		sizes = append(sizes, t)
	}
	starts := []int{1 << 10, 1 << 12, 1 << 14, 1 << 16}
	perToken, perPair = math.Inf(1), math.Inf(1)
	for _, t := range sizes {
		for _, start := range starts {
			perPair = min(perPair, (n.Chunk(t, start)-n.Chunk(t, 0))/(float64(t)*float64(start)))
		}
	}
	perPair = max(0, perPair)
	for _, t := range sizes {
		for _, start := range append(starts, 0, -t/2) { // -t/2: tokens of many prompts, which attend to few
			attended := float64(t) * (float64(start) + float64(t)/2)
			perToken = min(perToken, (n.Chunk(t, start)-perPair*attended)/float64(t))
		}
	}
	return max(0, perToken), perPair
}

// promptTimes computes the seconds of prompts.
type promptTimes struct {
	n     *Node
	batch int
}

// seconds returns the seconds of a prompt's steps on an idle node after so many cached tokens. At
// least one token is computed.
func (t promptTimes) seconds(tokens, cached int) (s float64) {
	for at := min(cached, tokens-1); at < tokens; at += t.batch {
		s += t.n.Chunk(min(t.batch, tokens-at), at)
	}
	return s
}

// Floor is what no number of nodes changes: the time of prompts on a fleet that is idle.
type Floor struct {
	TTFT       time.Duration // at the objective's percentile, with every shared prefix cached
	Infeasible float64       // share of requests whose first token is later than the limit, with every shared prefix cached
	Cold       float64       // the same without caches
	Longest    int           // tokens of the longest prompt within the limit, without caches
	TPOT       time.Duration // of a short request alone on a node
}

// FloorOf returns the floor for a limit of the TTFT at a percentile, with steps of batch tokens.
func FloorOf(n *Node, requests []Request, batch int, limit time.Duration, percentile float64) (f Floor) {
	seconds := func(tokens, cached int) float64 { // on the faster kind of node
		least := math.Inf(1)
		for _, k := range n.computing() {
			least = min(least, promptTimes{n: k, batch: batch}.seconds(tokens, cached))
		}
		return least + n.Latency
	}
	all := make([]float64, len(requests))
	warm, cold := 0, 0
	for i, q := range requests {
		all[i] = seconds(q.Prompt, q.Cached)
		if limit > 0 && all[i] > limit.Seconds() {
			warm++
		}
		if s := seconds(q.Prompt, 0); limit > 0 && s > limit.Seconds() {
			cold++
		} else {
			f.Longest = max(f.Longest, q.Prompt)
		}
	}
	slices.Sort(all)
	f.TTFT = duration(all[min(len(all)-1, int(percentile/100*float64(len(all))))])
	f.Infeasible, f.Cold = float64(warm)/float64(len(all)), float64(cold)/float64(len(all))
	f.TPOT = duration(n.Alone)
	return f
}

// duration converts seconds, and bounds them.
func duration(s float64) time.Duration {
	if !(s < 1e9) {
		return Failing
	}
	return time.Duration(s * float64(time.Second))
}

// Decoding is the predicted state of a decode node in a fleet.
type Decoding struct {
	ITL   float64 // seconds; +Inf: the nodes cannot decode as many tokens
	Batch float64 // requests that run at once
	KV    float64 // share of KV memory
}

// Decoding returns the state of decode nodes by Little's law: a node that has x tokens per second
// to decode needs steps of fixed / (1 - x·(perSeq + perCtx·context)) seconds.
func (d *Demand) Decoding(n *Node, nodes int) (s Decoding) {
	x := d.Rate * d.Output / float64(nodes)
	idle := 1 - x*(n.PerSeq+n.PerCtx*d.Context)
	if idle <= 0 {
		return Decoding{math.Inf(1), math.Inf(1), math.Inf(1)}
	}
	s.ITL = n.Fixed / idle
	s.Batch = x * s.ITL
	s.KV = s.Batch * d.Context / float64(max(1, n.KVTokens))
	return s
}

// Wait returns the mean seconds that prompts wait for k prefill nodes (M/G/k after Lee and
// Longton), and +Inf if the nodes have more work than time.
func (d *Demand) Wait(k int) float64 {
	rho := d.Work / float64(k)
	if rho >= 1 {
		return math.Inf(1)
	}
	return (1 + d.Variation) / 2 * erlangC(k, d.Work) * d.Service / (float64(k) * (1 - rho))
}

// erlangC returns the probability that an arrival waits for k servers with a load of a.
func erlangC(k int, a float64) float64 {
	b := 1.0 // Erlang B
	for i := 1; i <= k; i++ {
		b = a * b / (float64(i) + a*b)
	}
	rho := a / float64(k)
	return b / (1 - rho*(1-b))
}

// Backlog returns the longest time that prompts wait for k prefill nodes that are never idle while
// one waits: max over time of the work that arrived less the work that k nodes have done.
func (d *Demand) Backlog(n *Node, requests []Request, batch, k int) (longest float64) {
	times := promptTimes{n: n.prefill(), batch: batch}
	work, last := 0.0, requests[0].At
	for _, q := range requests {
		work = max(0, work-float64(k)*(q.At-last).Seconds())
		last = q.At
		work += times.seconds(q.Prompt, q.Cached)
		longest = max(longest, work/float64(k))
	}
	return longest
}

// Bounds are numbers of nodes below which a load cannot be served, and numbers to begin with.
type Bounds struct {
	// Nodes is the least number of nodes of any fleet that keeps up, whatever a simulation of a short
	// load shows. Decode is that of the decode nodes of pools. Prefill nodes have no bound, because
	// decode nodes may compute prompts; Prefill is the number that prompts occupy wherever they are.
	Nodes, Prefill, Decode                    int
	GuessPrefill, GuessDecode, GuessColocated int
}

// Pools returns the least number of nodes of a fleet of prefill and decode nodes.
func (b *Bounds) Pools() int { return max(b.Nodes, b.Decode+1) }

// Shares of the nodes' time and memory at which a guess plans them. Prompts of very different
// lengths wait long above the first; KV memory needs room for arrivals and variance.
const (
	GuessBusy = .75
	GuessKV   = .5
	guessITL  = .8 // of the limit
)

// Bounds returns the bounds of a kind of node. itl is the limit of the time between tokens; 0:
// none.
func (d *Demand) Bounds(n *Node, itl time.Duration) (b Bounds) {
	decodeWork := d.Rate * d.Output * (n.PerSeq + n.PerCtx*d.Context) // seconds per second, in large batches
	both := d.LeastWork + decodeWork
	if n.Mixed < 1 || n.prefill().Mixed < 1 { // the one kind of work may hide the other
		both = max(d.LeastWork, decodeWork)
	}
	b.Nodes = max(1, ceil(both))
	b.Prefill = max(1, ceil(d.LeastWork))
	b.GuessPrefill = max(b.Prefill, ceil(d.LeastWork/GuessBusy))
	b.Decode = max(1, ceil(decodeWork))
	fastest := *n // of few sequences, which read few experts
	fastest.Fixed = min(n.Fixed, n.Alone)
	holds := func(n *Node, nodes int, kv, share float64) bool {
		s := d.Decoding(n, nodes)
		return s.KV <= kv && (itl == 0 || s.ITL <= share*itl.Seconds())
	}
	for b.Decode < maxGuess && !holds(&fastest, b.Decode, 1, 1) {
		b.Decode += max(1, b.Decode/64)
	}
	b.GuessDecode = b.Decode
	for b.GuessDecode < maxGuess && !holds(n, b.GuessDecode, GuessKV, guessITL) {
		b.GuessDecode += max(1, b.GuessDecode/64)
	}
	b.GuessColocated = max(b.Nodes, ceil((d.LeastWork+decodeWork)/GuessBusy))
	return b
}

// maxGuess bounds the nodes of a guess.
const maxGuess = 1 << 20

func ceil(x float64) int { return int(min(math.Ceil(x-1e-9), maxGuess)) }
