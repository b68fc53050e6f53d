package roles

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/profiler"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner/pools"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/process"
)

// adviser is a call of tandem advise.
type adviser struct {
	o        pools.Options
	now      pools.Present
	client   *console.Client
	length   time.Duration // of the recording
	every    time.Duration // between two readings of the nodes' counters
	most     *int          // recorded requests
	fleet    string
	profile  string
	from     []string
	out      string // file of the trace
	messages io.Writer
}

// allNodes is the value of --from for all nodes of the gateway.
const allNodes = "fleet"

// leastReadings is the least number of readings of counters in a recording: one more than the
// intervals that profiler.Live needs of each kind of step.
const leastReadings = profiler.LeastIntervals + 1

// maxFrom bounds the nodes whose counters are read.
const maxFrom = 64

// runAdvise advises about a fleet that runs.
func runAdvise(v *cli.Invocation) error {
	a := &adviser{client: cli.Client(v), length: 10 * time.Minute, every: 2 * time.Second, messages: v.ErrOut}
	a.register(v)
	if _, err := v.Parse(0); err != nil {
		return err
	}
	// A recording is never the same again. A key is a secret, as are a user and a password of a URL.
	if a.o.Trace != "" && !v.Changed("api-key") && a.client.Shown() == a.client.URL {
		a.o.Command = "tandem advise " + cli.Quoted(v.Arguments)
	}
	useMachine(v, &a.o)
	if a.profile == "" {
		return fmt.Errorf("%w: --profile is missing: give a file that tandem profile wrote on such a node, or an estimate by name such as h200:llama-8b", config.ErrValue)
	}
	p, err := profile.Load(a.profile)
	if err != nil {
		return fmt.Errorf("%w: %s", config.ErrValue, strings.TrimPrefix(err.Error(), profile.ErrProfile.Error()+": "))
	}
	a.now.Profile = p
	if err := a.o.Check(p, a.now.WhatIf); err != nil {
		return ofPools(err)
	}
	if a.o.Trace != "" && len(a.from) > 0 {
		return fmt.Errorf("%w: --from reads counters while the load is recorded, and --trace records none: leave one of them out, or give the profile that tandem profile --from writes", config.ErrValue)
	}
	if len(a.from) > 0 && (a.every < profiler.LeastEvery || a.length < leastReadings*a.every) {
		return fmt.Errorf("%w: --for %v with --every %v: give at least %d readings of the nodes' counters, %v or more apart", config.ErrValue, a.length, a.every, leastReadings, profiler.LeastEvery)
	}
	if a.o.Trace != "" {
		if _, err := os.Stat(a.o.Trace); err != nil {
			return fmt.Errorf("%w: --trace: %w", config.ErrValue, err)
		}
	}
	if a.o.Trace == "" || a.fleet == "" {
		ctx, _, stop := process.Signals()
		err := a.observe(ctx)
		stop()
		if err != nil {
			return ofPools(err)
		}
	}
	if a.fleet != "" {
		if a.now.Prefill, a.now.Decode, err = pools.ParseFleet(a.fleet); err != nil {
			return ofPools(err)
		}
		a.now.Prefills, a.now.Decodes = nil, nil
	}
	return computed(&a.o, func() error { return pools.Advise(&a.o, &a.now, v.Out) })
}

// register declares the flags of tandem advise.
func (a *adviser) register(v *cli.Invocation) {
	s, o := v.Set, &a.o
	s.First("url", "api-key", "profile", "for", "ttft", "tpot", "price-per-hour")
	s.Section("Load")
	a.most = cli.RecordFlags(v, &a.length, "how long the load of the gateway is recorded; Ctrl-C ends it earlier, and the advice is for the load so far")
	s.StringVar(&o.Trace, "trace", "", "trace to use instead of a recording: JSON lines of tandem record or Mooncake, or the CSV of Azure's, compressed by gzip or not")
	s.StringVar(&a.out, "out", "", "file to write the recorded trace to, which tandem sim --trace reads; empty: none")
	s.CountVar(&o.Requests, "num-prompts", 0, 0, "requests of --trace; 0: all")
	s.Float64Var(&o.Growth, "growth", 1.2, "factor on the pace of the load that the advised fleet has to hold, so that it has room")
	s.BoolVar(&o.DropTooLong, "drop-too-long", false, "leave out requests that are longer than a node can serve")
	s.Section("Fleet")
	s.StringVar(&a.fleet, "fleet", "", "nodes, instead of those of the gateway: 6P2D has 6 prefill and 2 decode nodes, 8D 8 nodes that do both")
	s.CountVar(&o.Gateways, "gateways", 1, 1, "gateways among which clients are spread evenly: the load of all is so many times the recorded one")
	s.StringVar(&a.profile, "profile", "", "step times of its nodes: a profile's file, or an estimate by name, GPU:MODEL or NxGPU:MODEL, such as 4xh100:llama-70b. GPUs: "+profile.GPUs()+"; models: "+profile.Models())
	s.StringSliceVar(&a.from, "from", nil, "HOST:PORT or URL of the metrics of nodes, or "+allNodes+" for all that the gateway names: step times are fitted to their counters while the load is recorded, instead of those of --profile")
	s.SecondsVar(&a.every, "every", false, "with --from: time between two readings")
	s.IntSliceVar(&o.BatchedTokens, "max-num-batched-tokens", []int{scheduler.DefaultMaxBatchedTokens, 512, 8192}, "tokens of a step: first those of the fleet now, then others to choose from")
	s.CountVar(&o.MaxSeqs, "max-num-seqs", scheduler.DefaultMaxSeqs, 1, "requests that a node of the fleet runs at once")
	s.IntSliceVar(&o.MinRemote, "min-remote-prefill-tokens", []int{gateway.DefaultMinRemotePrefillTokens, 512, 1}, "uncached tokens from which on prompts are computed by prefill nodes: first those of the fleet now, then others to choose from; 1: always")
	goalFlags(s, o)
	s.Section("Changes")
	s.StringArrayVar(&a.now.WhatIf, "what-if", nil, "change of the fleet or of its load to simulate: "+pools.WhatIfs+"; may be repeated. "+strings.Join(pools.DefaultWhatIf, ", ")+" are simulated unless given otherwise")
	s.BoolVar(&o.CompareEstimates, "compare-estimates", false, "compare a measured profile with estimates")
	s.StringVar(&o.Shape, "shape", "auto", "fleets to choose from: pools of prefill and decode nodes, colocated nodes that do both, or auto, both")
	s.Values("shape", pools.Shapes...)
	s.CountVar(&o.MaxNodes, "max-nodes", 64, 1, "most nodes of an advised fleet")
	s.CountVar(&o.Spare, "spare", 0, 0, "nodes to add to each pool of the advised fleet")
	costFlags(s, o)
	s.Section("Search and output")
	s.Uint64Var(&o.Seed, "seed", 0, "seed of the router's draws")
	s.CountVar(&o.Budget, "budget", 400_000, 1, "requests that are simulated at most in the search for a cheaper fleet; the present fleet and its changes are simulated in addition")
	s.StringVar(&o.Helm, "helm", "", "file to write the advised fleet to as values of the Helm chart")
	s.BoolVar(&o.JSON, "json", false, "print the advice as one JSON object")
}

// observe reads the fleet from its gateway and, without a trace, records its load.
func (a *adviser) observe(ctx context.Context) error {
	before, err := a.nodes(ctx)
	if err != nil || a.o.Trace != "" {
		return err
	}
	err = a.record(ctx, before)
	if err != nil {
		return err
	}
	then := a.now
	switch _, err := a.nodes(context.WithoutCancel(ctx)); {
	case errors.Is(err, pools.ErrOption): // of another model
		return err
	case err != nil: // the recording is worth more than what the gateway answers at its end
		a.now = then
		a.note("The prediction is for the fleet at the beginning of the recording, because that at its end is not known: %s.", strings.TrimPrefix(err.Error(), config.ErrValue.Error()+": "))
	case then.Prefill != a.now.Prefill || then.Decode != a.now.Decode:
		a.note("The fleet changed while the load was recorded, from %s to %s: the prediction is for the latter.", size(then.Prefill, then.Decode), size(a.now.Prefill, a.now.Decode))
	}
	return nil
}

// note adds a note to the advice, once.
func (a *adviser) note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(a.now.Notes, text) {
		a.now.Notes = append(a.now.Notes, text)
	}
}

// size returns numbers of nodes as --fleet takes them.
func size(prefill, decode int) string {
	if prefill == 0 {
		return fmt.Sprintf("%dD", decode)
	}
	return fmt.Sprintf("%dP%dD", prefill, decode)
}

// nodes reads the present fleet from its gateway, and returns the nodes that take work.
func (a *adviser) nodes(ctx context.Context) (ready []console.Node, err error) {
	f, err := a.client.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	var models []string
	other := 0
	for i := range f.Nodes {
		n := &f.Nodes[i]
		if n.State() != "ready" {
			other++
			continue
		}
		ready = append(ready, *n)
		if n.Model != "" && !slices.Contains(models, n.Model) {
			models = append(models, n.Model)
		}
	}
	slices.SortStableFunc(ready, func(a, b console.Node) int {
		return cmp.Or(cmp.Compare(a.Running+a.Waiting, b.Running+b.Waiting), strings.Compare(b.ID, a.ID))
	})
	var names [2][]string
	for i := range ready {
		pool := 1
		if ready[i].Role == "prefill" {
			pool = 0
		}
		names[pool] = append(names[pool], ready[i].ID)
	}
	a.now.Prefills, a.now.Decodes = names[0], names[1]
	a.now.Prefill, a.now.Decode = len(names[0]), len(names[1])
	switch {
	case len(models) > 1:
		return nil, fmt.Errorf("%w: the nodes serve %d models, and a recording does not name them: give a gateway of one model, or --trace and --fleet of one", config.ErrValue, len(models))
	case len(f.Nodes) == 0 && len(f.Upstreams) > 0:
		return nil, fmt.Errorf("%w: the gateway has upstreams and no nodes of its own: advice is for Tandem's nodes", config.ErrValue)
	case len(f.Nodes) == 0 && f.Ready:
		a.now.Decode = 1 // the process of the gateway computes
	case a.now.Decode == 0:
		return nil, fmt.Errorf("%w: no decode node of %s is ready: wait until tandem status shows one, or give --fleet and --trace", config.ErrValue, a.client.Shown())
	}
	switch {
	case other == 1:
		a.note("1 node of the fleet is not ready or drained, and does not count.")
	case other > 1:
		a.note("%d nodes of the fleet are not ready or drained, and do not count.", other)
	}
	if len(ready) > 0 {
		note, err := pools.ModelOf(a.now.Profile, ready[0].Class, console.Printable(ready[0].Model))
		if err != nil {
			return nil, err
		}
		if note != "" {
			a.note("%s", note)
		}
	}
	a.now.URL, a.now.Keyed = a.client.Shown(), a.client.Key != ""
	return ready, nil
}

// record records the load of the gateway, its counters, and those of the nodes.
func (a *adviser) record(ctx context.Context, ready []console.Node) error {
	urls, err := a.counters(ready)
	if err != nil {
		return err
	}
	if a.out != "" {
		if info, err := os.Stat(filepath.Dir(a.out)); err != nil || !info.IsDir() {
			return fmt.Errorf("%w: --out %s: its folder does not exist: create it, or name another file", config.ErrValue, a.out)
		}
	}
	if err := profiler.CheckURLs(ctx, urls); err != nil {
		return fmt.Errorf("%w: %s, or leave --from out to take the step times of --profile", config.ErrValue, ofProfiler(err))
	}
	before, err := a.client.Counters(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(a.messages, "Recording the load of %s for %v; Ctrl-C ends it earlier\n", a.client.Shown(), a.length)
	ended := make(chan struct{})
	fitted := make(chan func(), 1)
	if len(urls) > 0 {
		go func() {
			r, err := profiler.Live(context.WithoutCancel(ctx), profiler.LiveOptions{URLs: urls, For: a.length, Every: a.every, Base: a.now.Profile, Stop: ended})
			fitted <- func() { a.fit(r, err) }
		}()
	} else {
		fitted <- func() {}
	}
	t, err := cli.Record(ctx, a.client, a.length, *a.most)
	close(ended)
	(<-fitted)()
	if len(t.Requests) == 0 {
		return cmp.Or(err, context.Cause(ctx))
	}
	if err != nil {
		a.note("The recording ended early: %v.", err)
	}
	fmt.Fprintln(a.messages, t)
	after, err := a.client.Counters(context.WithoutCancel(ctx))
	var counted *console.Counters
	if err == nil {
		counted, err = after.Since(before)
	}
	if err != nil {
		a.note("What the gateway measured is not known: %v.", err)
	} else {
		a.now.Measured = measured(t, counted, after.At.Sub(before.At))
		a.note("The simulated caches begin empty, and those of the fleet were warm: first tokens may be predicted too late.")
	}
	var trace bytes.Buffer
	if err := t.Write(&trace); err != nil {
		return err
	}
	if a.out != "" {
		if err := os.WriteFile(a.out, trace.Bytes(), 0o644); err != nil {
			return err
		}
	}
	if a.now.Load, err = sim.ReadTrace(&trace); err != nil {
		return err
	}
	a.now.Source = fmt.Sprintf("recorded from %s", a.client.Shown())
	return nil
}

// counters returns the URLs of the metrics of nodes that --from names.
func (a *adviser) counters(ready []console.Node) ([]string, error) {
	from := a.from
	if slices.Equal(from, []string{allNodes}) {
		from = nil
		for i := range ready {
			if ready[i].HTTP != "" && len(from) < maxFrom {
				from = append(from, ready[i].HTTP)
			}
		}
		if len(from) == 0 {
			return nil, fmt.Errorf("%w: --from %s: the gateway names no metrics of nodes: give their HOST:PORT", config.ErrValue, allNodes)
		}
	}
	return cli.MetricsURLs(from)
}

// ofProfiler returns the sentence of an error for the user.
func ofProfiler(err error) string {
	return strings.TrimPrefix(strings.TrimPrefix(err.Error(), profiler.ErrLive.Error()+": "), profiler.ErrOption.Error()+": ")
}

// fit takes the step times that were fitted to the nodes' counters, unless these do not give any.
func (a *adviser) fit(r *profiler.Result, err error) {
	if err != nil && !errors.Is(err, profiler.ErrFit) {
		a.note("The step times are those of --profile, because the counters of the nodes give none: %s.", ofProfiler(err))
		return
	}
	if err := r.Profile.Check(); err != nil {
		a.note("The step times are those of --profile, because those fitted to the counters are not sound: %s.", strings.TrimPrefix(err.Error(), profile.ErrProfile.Error()+": "))
		return
	}
	mean, most := r.Errors()
	a.now.Profile, a.now.Calibrated = r.Profile, true
	a.note("The step times were fitted to the counters of the nodes; those of intervals that were not fitted are off by %.0f %% on average, %.0f %% at most.", 100*mean, 100*most)
	for _, n := range r.Notes {
		a.note("%s.", n)
	}
}

// measured returns what the gateway measured. An older gateway sends no times of requests, so that
// its histogram counts.
func measured(t *cli.Recording, n *console.Counters, window time.Duration) *pools.Measured {
	m := &pools.Measured{
		Window: window, Requests: len(t.Requests), Prompt: n.PromptTokens / window.Seconds(), Output: n.OutputTokens / window.Seconds(),
		TTFT: quantiles(&n.TTFT), ITL: quantiles(&n.ITL),
	}
	var first, each []time.Duration
	failed := 0
	for i := range t.Requests {
		q := &t.Requests[i]
		switch {
		case q.End == console.EndRefused:
			failed++
		case q.End != console.EndIncomplete && q.First > 0:
			first = append(first, time.Duration(q.First)*time.Microsecond)
			each = append(each, time.Duration(max(0, q.Last-q.First))*time.Microsecond/time.Duration(max(1, q.Output-1)))
		}
	}
	if len(first) > 0 {
		m.TTFT, m.TPOT = pools.Exact(first, failed), pools.Exact(each, failed)
	}
	return m
}

// quantiles returns the percentiles of a histogram; zero: it is empty.
func quantiles(h *console.Histogram) (k [3]pools.Known) {
	for i, q := range []float64{.5, .9, .99} {
		value, low, high := h.Quantile(q)
		if value >= 0 {
			k[i] = pools.Known{Value: seconds(value), Low: seconds(low), High: seconds(high)}
		}
	}
	return k
}

// seconds converts seconds; a bound that is infinite is the longest duration.
func seconds(s float64) time.Duration {
	if s >= 1e9 {
		return 1<<63 - 1
	}
	return time.Duration(s * float64(time.Second))
}
