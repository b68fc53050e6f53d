package pools

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/simulate"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/internal/limits"
)

// Shares of the budget of one simulation, and of the requests of the part.
const (
	wholeShare = 30
	partShare  = 8
	minPart    = 500
	windowsOf  = 8 // windows of a part of the load
)

// grantTimeout is the time that decode nodes give a grant (decode.Options).
const grantTimeout = 2 * time.Second

// run is the making of one plan.
type run struct {
	*Options
	profiles    []kind
	trace       []sim.Request // all
	source      string        // of the trace, if it is not of the options
	whole, part []sim.Request // that are simulated
	tenants     []tenant
	dropped     int     // requests that are too long
	block       int     // tokens of a simulated KV block
	sliced      bool    // large fleets are simulated as slices
	longer      float64 // factor on the requests of the load, of which slices take a part
	simulated   int     // requests so far
	problem     planner.Problem
	plan        *planner.Plan
}

// Run makes a plan and writes it to out.
func Run(o *Options, out io.Writer) error {
	r := &run{Options: o, longer: 1}
	if err := r.prepare(); err != nil {
		return err
	}
	plan, err := planner.Make(r.problem)
	if r.Progress != nil {
		r.Progress(Progress{})
	}
	if err != nil {
		if errors.Is(err, planner.ErrProblem) || errors.Is(err, fleet.ErrOptions) || errors.Is(err, fleet.ErrStuck) {
			return wrap(err)
		}
		return err
	}
	r.plan = plan
	return r.outputs(out)
}

// prepare checks the options, reads the files and states the problem.
func (r *run) prepare() error {
	goals, err := r.checkAll()
	if err != nil {
		return err
	}
	if r.profiles, err = r.readKinds(); err != nil {
		return err
	}
	if err := r.readLoad(); err != nil {
		return err
	}
	r.lengthen()
	r.state(goals)
	return nil
}

// checkAll checks the options and returns the objectives.
func (r *run) checkAll() ([]planner.Objective, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	// Before minutes of simulations.
	for flag, name := range map[string]string{"html": r.HTML, "helm": r.Helm} {
		if name == "" {
			continue
		}
		if info, err := os.Stat(filepath.Dir(name)); err != nil || !info.IsDir() {
			return nil, fmt.Errorf("%w: --%s %s: its folder does not exist: create it, or name another file", ErrOption, flag, name)
		}
	}
	return r.objectives()
}

// state states the problem for the profiles and the load.
func (r *run) state(goals []planner.Objective) {
	r.whole = windows(r.trace, max(minPart, int(max(1, r.longer)*float64(r.Budget/wholeShare))), windowsOf)
	r.part = windows(r.whole, max(minPart, len(r.whole)/partShare), windowsOf)
	list := requests(r.whole)
	p := &r.problem
	*p = planner.Problem{
		Requests: list, Objectives: goals, Goodput: r.Goodput, Settings: r.settings(),
		Colocated: r.Shape != "pools", Disjoint: r.Shape != "colocated", MaxNodes: r.MaxNodes, Spare: r.Spare, Plots: r.HTML != "",
		Budget: r.Budget, Whole: r.counted(r.whole), PartOf: r.counted(r.part), Simulate: r.simulate,
	}
	if most := r.nodesInMemory(); !r.sliced || most < sliceNodes {
		p.MaxNodes = min(p.MaxNodes, most)
	}
	for _, k := range r.profiles {
		p.Nodes = append(p.Nodes, k.node(r.Overhead))
	}
}

// maxBlocks bounds the KV blocks of all fleets that are simulated at once, about 100 bytes each.
const maxBlocks = 64_000_000

// nodesInMemory returns the most nodes of a fleet whose simulations fit in memory.
func (r *run) nodesInMemory() int {
	most := 0
	for _, k := range r.profiles {
		for _, p := range k.profiles() {
			most = max(most, p.Memory.Blocks*p.Memory.BlockTokens/r.block)
		}
	}
	return max(1, maxBlocks/max(1, most)/max(1, r.Workers))
}

// settings returns the settings that are tried: each number of tokens of a step, then each number
// of tokens from which on prompts are computed by prefill nodes.
func (r *run) settings() (list []planner.Settings) {
	first := planner.Settings{BatchedTokens: r.BatchedTokens[0], MaxSeqs: r.MaxSeqs, MinRemote: r.MinRemote[0]}
	list = append(list, first)
	for _, n := range r.BatchedTokens[1:] {
		s := first
		s.BatchedTokens = n
		list = append(list, s)
	}
	for _, n := range r.MinRemote[1:] {
		s := first
		s.MinRemote = n
		list = append(list, s)
	}
	return list
}

// node returns a profile as the planner's formulas need it.
func node(p *profile.Profile) planner.Node {
	times := p.Times()
	between := p.Step.Overhead.Between
	n := planner.Node{
		Name: p.Node.Name, GPUs: p.Node.TP, Price: p.Node.Price, KVTokens: p.Memory.Blocks * p.Memory.BlockTokens,
		Fixed: p.Step.Decode.Fixed + between, PerSeq: p.Step.Decode.PerSeq, PerCtx: p.Step.Decode.PerCtx, Mixed: p.Step.Mixed.Gamma,
		Alone:   times.Step(profile.Shape{Streams: 1, ContextSum: 1}).Seconds(),
		Latency: p.Gateway.PerRequest + p.Gateway.PerToken + p.Step.Overhead.Emit + fleet.DefaultRoundTrip.Seconds(),
		Chunk: func(tokens, start int) float64 {
			return times.Step(profile.Shape{Chunk: tokens, Attended: float64(tokens) * (float64(start) + float64(tokens)/2)}).Seconds()
		},
	}
	if p.Step.Source == profile.Estimate {
		n.Error = p.Step.Error
	}
	return n
}

// Bounds of a simulated KV block in tokens: blocks as large as a sixteenth of a request simulate
// several times as fast as small ones.
const (
	maxBlock    = 512
	blocksOfOne = 16
)

// blockTokens returns the tokens of a simulated KV block.
func (r *run) blockTokens() int {
	tokens := 0
	for i := range r.trace {
		tokens += r.trace[i].Tokens + r.trace[i].Output
	}
	block := r.profiles[0].Memory.BlockTokens
	for 2*block <= min(maxBlock, tokens/len(r.trace)/blocksOfOne) {
		block *= 2
	}
	return block
}

// simulate runs cases, several at once.
func (r *run) simulate(cases []planner.Case) ([]planner.Outcome, error) {
	outcomes := make([]planner.Outcome, len(cases))
	var mu sync.Mutex
	progress := func(c planner.Case, ended bool) {
		if r.Progress == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		list := r.whole
		if c.Part {
			list = r.part
		}
		if ended {
			r.simulated += r.counted(list)
		}
		r.Progress(Progress{Running: c.Size(), Requests: r.counted(list), Simulated: r.simulated, Budget: r.Budget})
	}
	return outcomes, r.atOnce(len(cases), func(i int) (err error) {
		progress(cases[i], false)
		defer progress(cases[i], true)
		outcomes[i], err = r.one(cases[i])
		return err
	})
}

// atOnce calls f with 0 to n-1, on as many goroutines as there are workers, and returns the error
// of the least number.
func (r *run) atOnce(n int, f func(i int) error) error {
	errs := make([]error, n)
	turn := make(chan struct{}, max(1, r.Workers))
	var wg sync.WaitGroup
	for i := range n {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			errs[i] = f(i)
		})
	}
	wg.Wait()
	return cmp.Or(errs...)
}

// counted returns the number of requests of the budget that a simulation of requests uses.
func (r *run) counted(list []sim.Request) int {
	return max(1, int(float64(len(list))/max(1, r.longer)))
}

// one simulates a case.
func (r *run) one(c planner.Case) (planner.Outcome, error) {
	trace := r.whole
	if c.Part {
		trace = r.part
	}
	var events func(span, start time.Duration) []fleet.Event
	if c.Loss != planner.NoLoss {
		events = func(span, _ time.Duration) []fleet.Event {
			target, at := fleet.Target{Prefill: c.Loss == planner.LosePrefill}, span*2/5
			return []fleet.Event{{At: at, Action: fleet.Kill, Target: target}, {At: at + time.Millisecond, Action: fleet.Start, Target: target}}
		}
	}
	o, _, err := r.play(c, trace, events)
	return o, err
}

// play simulates a case with a trace, and with the events for its duration and for that of a node's
// start; nil: there are none. It returns the duration until the last token, too.
func (r *run) play(c planner.Case, trace []sim.Request, events func(span, start time.Duration) []fleet.Event) (o planner.Outcome, took time.Duration, err error) {
	p := r.profiles[c.Node]
	prefill, decode, share := r.slice(c.Fleet)
	trace = unshared(thinned(trace, share), c.Unshared)
	times := p.Times()
	f := simulate.FleetOptions(p.Profile, times, fleet.DefaultRoundTrip)
	used := []*profile.Times{times}
	slower := func(s *fleet.StepTimes) {
		step := s.Step
		s.Step = func(s fleet.Shape, pool int) time.Duration { return time.Duration(c.Slow * float64(step(s, pool))) }
	}
	slower(&f.Steps)
	if q := p.prefill; q != nil {
		used = append(used, q.Times())
		simulate.SetPrefillKind(&f, q, used[1])
		slower(&f.PrefillKind.Steps)
		f.PrefillKind.Blocks = max(2, q.Memory.Blocks*q.Memory.BlockTokens/r.block)
	}
	all := limits.Default()
	f.Prefill, f.Decode, f.Gateways, f.Limits = prefill, decode, r.Gateways, &all
	f.BatchedTokens, f.MaxSeqs, f.MinRemote = c.BatchedTokens, c.MaxSeqs, max(1, c.MinRemote)
	f.Blocks, f.BlockTokens = max(2, p.Memory.Blocks*p.Memory.BlockTokens/r.block), r.block
	if f.MaxModelLen > 0 {
		f.MaxModelLen = min(f.MaxModelLen, f.Blocks*f.BlockTokens)
	}
	f.Seed, f.Speedup, f.GrantTimeout = r.Seed, c.Load, grantTimeout
	span := time.Duration(float64(trace[len(trace)-1].At) / c.Load)
	f.SampleEvery = max(100*time.Millisecond, span/300)
	if events != nil {
		f.Events = events(span, f.Start)
	}
	result, err := fleet.Run(trace, f)
	if err != nil {
		return o, 0, err
	}
	r.measure(&o, result)
	if share < 1 {
		for _, n := range []*int{&o.Failed, &o.Waited, &o.Resumed, &o.Preempted} {
			*n = int(math.Round(float64(*n) / share))
		}
		o.Input, o.Output, o.RequestRate = o.Input/share, o.Output/share, o.RequestRate/share
	}
	for _, t := range used {
		u := t.Decode.Add(t.Prefill)
		o.Points, o.Coefficients = o.Points+u.Points, o.Coefficients+u.Coefficients
	}
	return o, result.Span, nil
}

// measure computes an outcome. Requests that failed are the slowest ones in every percentile.
func (r *run) measure(o *planner.Outcome, result *fleet.Result) {
	n := len(result.Requests)
	by := map[planner.Metric][]time.Duration{}
	for _, m := range []planner.Metric{planner.TTFT, planner.TPOT, planner.E2EL} {
		by[m] = make([]time.Duration, n)
	}
	limit := func(m planner.Metric) time.Duration { // 0: none
		for _, g := range r.problem.Objectives {
			if g.Metric == m || g.Metric == planner.ITL && m == planner.TPOT {
				return g.Limit
			}
		}
		return 0
	}
	most := map[planner.Metric]time.Duration{planner.TTFT: limit(planner.TTFT), planner.TPOT: limit(planner.TPOT), planner.E2EL: limit(planner.E2EL)}
	good, input, output := 0, 0, 0
	for i := range result.Requests {
		q := &result.Requests[i]
		ttft, tpot, e2el := planner.Failing, planner.Failing, planner.Failing
		if q.Err == nil {
			ttft, tpot, e2el = q.First-q.At, 0, q.Last-q.At
			if q.Output > 1 {
				tpot = (q.Last - q.First) / time.Duration(q.Output-1)
			}
			input, output = input+q.Prompt, output+q.Received()
		} else {
			o.Failed++
		}
		by[planner.TTFT][i], by[planner.TPOT][i], by[planner.E2EL][i] = ttft, tpot, e2el
		met := q.Err == nil
		for m, d := range most {
			met = met && (d == 0 || by[m][i] <= d)
		}
		if met {
			good++
		}
	}
	for _, list := range by {
		slices.Sort(list)
	}
	at := func(m planner.Metric, percentile float64) time.Duration {
		if m == planner.ITL {
			return result.ITL(min(percentile/100, 1-1e-9))
		}
		return by[m][min(n-1, int(percentile/100*float64(n)))]
	}
	three := func(m planner.Metric) planner.Quantiles {
		return planner.Quantiles{P50: at(m, 50), P90: at(m, 90), P99: at(m, 99)}
	}
	o.TTFT, o.TPOT, o.ITL = three(planner.TTFT), three(planner.TPOT), three(planner.ITL)
	for _, g := range r.problem.Objectives {
		o.Values = append(o.Values, at(g.Metric, g.Percentile))
	}
	o.Goodput = float64(good) / float64(n)
	o.PrefillBusy, o.DecodeBusy, o.Cached, o.Local = result.PrefillBusy, result.DecodeBusy, result.Reuse, float64(result.Local)/float64(n)
	o.Waited, o.Resumed, o.Preempted = result.Waited, result.Resumed, int(result.Preemptions)
	seconds := result.Span.Seconds()
	o.Input, o.Output, o.RequestRate = float64(input)/seconds, float64(output)/seconds, float64(n-o.Failed)/seconds
	for i := range result.Samples {
		o.DecodeKV = max(o.DecodeKV, result.Samples[i].Decode.MaxKV)
	}
}
