package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/checkpoint"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/profiler"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/prove"
	"github.com/tandem-serving/tandem/bench/sim/simulate"
	"github.com/tandem-serving/tandem/deploy/planner/pools"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/cost"
	"github.com/tandem-serving/tandem/internal/limits"
)

// Settings of the nodes that sleep. Their steps are long, so that the two cores of a small machine
// are not the limit of 16 nodes.
const (
	maxSeqs   = 64
	maxTokens = 512 // of a step
	minRemote = 16
	blocks    = 2048 // of 16 tokens
	kvMemory  = "64MiB"
	kvBytes   = 2048 // of a token of the built-in model
)

// sleepProfile is the profile of the nodes that sleep.
var sleepProfile = profile.Profile{
	Version: profile.Version,
	Node:    profile.Node{Name: "sleep", Device: "a node that sleeps", TP: 1},
	Model:   profile.Model{Name: "sleep", Layers: 4, KVBytes: kvBytes, MaxLen: 2048},
	Memory:  profile.Memory{Blocks: blocks, BlockTokens: 16},
	Step: profile.Step{
		Source:  profile.Imported,
		Decode:  profile.Decode{Fixed: 40e-3, PerSeq: .2e-3, PerCtx: .1e-6},
		Prefill: profile.Prefill{Floor: 12e-3, Fixed: 2e-3, PerToken: 150e-6, PerPair: 20e-9},
		Mixed:   profile.Mixed{Gamma: 1}, Overhead: profile.Overhead{Between: 150e-6, Emit: 50e-6},
	},
	Transfer: profile.Transfer{Setup: 1e-3, BytesPerSecond: 1e9, PerLayer: true, Checksum: true, Over: "loopback"},
	Gateway:  profile.Gateway{PerRequest: 1e-3, PerToken: 50e-6, Heartbeat: .1, ReportDelay: .02},
}

// sleepNode writes the profile and returns nodes that sleep by it.
func (o *options) sleepNode() (*node, error) {
	file, err := filepath.Abs(filepath.Join(o.dir, "sleep.yaml"))
	if err != nil {
		return nil, err
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(sleepProfile.Write(f), f.Close()); err != nil {
		return nil, err
	}
	return &node{profile: file, tokens: "builtin", flags: []string{"--kv-cache-memory-bytes", kvMemory, "--max-num-seqs", strconv.Itoa(maxSeqs), "--max-num-batched-tokens", strconv.Itoa(maxTokens)}}, nil
}

// simulated returns the options of a fleet of a kind of node.
func simulated(p *profile.Profile, prefill, decode int) fleet.Options {
	o := simulate.FleetOptions(p, p.Times(), fleet.DefaultRoundTrip)
	l := limits.Default()
	o.Prefill, o.Decode, o.Policy, o.Limits, o.MinRemote = prefill, decode, route.Prefix, &l, minRemote
	o.BatchedTokens, o.MaxSeqs, o.KeepGaps, o.GrantTimeout = maxTokens, maxSeqs, true, 2*time.Second
	return o
}

// draw draws a load for a fleet at a share of its capacity, for so many seconds.
func draw(spec string, o fleet.Options, share float64, seconds int) ([]sim.Request, error) {
	l, err := sim.ParseLoad("rps=1,n=2000," + spec)
	if err != nil {
		return nil, err
	}
	trace, err := l.Trace(1)
	if err != nil {
		return nil, err
	}
	capacity, err := prove.Capacity(trace, o)
	if err != nil {
		return nil, err
	}
	if l.N = max(20, int(share*capacity*float64(seconds))); l.N < len(trace) {
		trace = trace[:l.N]
	} else if trace, err = l.Trace(1); err != nil {
		return nil, err
	}
	return prove.Pace(trace, share*capacity), nil
}

// seeds is how many simulations, with simultaneous grants in another order each, count together.
const seeds = 4

// compare sets a run next to its simulation.
func compare(o fleet.Options, trace []sim.Request, r *run, b prove.Bounds) ([]prove.Figure, error) {
	goals := prove.Goals{TTFT: time.Second, TPOT: 60 * time.Millisecond}
	all := new(load.Record)
	for seed := range seeds {
		o.Seed = uint64(seed)
		result, err := fleet.Run(trace, o)
		if err != nil {
			return nil, err
		}
		all.Outcomes = append(all.Outcomes, simulate.Record(result).Outcomes...)
	}
	return prove.Compare(prove.Summarize(all, goals), prove.Summarize(r.record, goals), b), nil
}

// used describes the processors' use in a run.
func (r *run) used(name string) string {
	text := fmt.Sprintf("%s: the client used %.2f cores, the gateway %.2f, all nodes together %.2f.", name, r.client, r.gateway, r.nodes)
	if r.limited != "" {
		text += " The client was a limit: " + r.limited + "."
	}
	return text
}

// sleep is the part with nodes that sleep.
func (o *options) sleep(ctx context.Context, out, errOut io.Writer) (string, error) {
	loads, err := numbers(o.loads)
	if err != nil {
		return "", fmt.Errorf("-loads: %w", err)
	}
	n, err := o.sleepNode()
	if err != nil {
		return "", err
	}
	const spec = "in=100-1200,out=10-60,prefix=0.3,prefixes=16"
	var table strings.Builder
	var notes []string
	for name := range strings.SplitSeq(o.fleets, ",") {
		var prefill, decode int
		if c, err := fmt.Sscanf(name, "%dP%dD", &prefill, &decode); c != 2 || err != nil {
			return "", fmt.Errorf("-fleets %s: want such as 2P2D,8P8D", o.fleets)
		}
		f := simulated(&sleepProfile, prefill, decode)
		for _, share := range loads {
			trace, err := draw(spec, f, share, o.seconds)
			if err != nil {
				return "", err
			}
			r, err := o.measure(ctx, n, prefill, decode, trace, out, errOut)
			if err = errors.Join(err, r.complete()); err != nil {
				return "", err
			}
			figures, err := compare(f, trace, r, sleepBounds)
			if err != nil {
				return "", err
			}
			run := fmt.Sprintf("%s at %g, %d requests", name, share, len(trace))
			if err := prove.WriteRows(&table, run, figures); err != nil {
				return "", err
			}
			notes = append(notes, "- "+r.used(run))
		}
	}
	return fmt.Sprintf("## Nodes that sleep\n\nReal gateway, prefill and decode processes. Steps sleep for the time of a profile (decoding %.0f ms, a prompt token %.0f µs).\nLoad: %s, for %d s of arrivals, at shares of the capacity of the simulated fleet.\n\n%s%s\n%s\n",
		1e3*sleepProfile.Step.Decode.Fixed, 1e6*sleepProfile.Step.Prefill.PerToken, spec, o.seconds, prove.TableHead, table.String(), strings.Join(notes, "\n")), nil
}

// planned is a fleet in the JSON of tandem plan pools.
type planned struct {
	Name            string
	Prefill, Decode int
	Meets           bool      `json:"meets_objectives"`
	TTFT            []float64 `json:"ttft_ms"`
	TPOT            []float64 `json:"tpot_ms"`
}

// plan is the part in which a planned fleet meets its objectives.
func (o *options) plan(ctx context.Context, out, errOut io.Writer) (string, error) {
	n, err := o.sleepNode()
	if err != nil {
		return "", err
	}
	const ttft, tpot = 700, 60 // ms at p90
	spec := fmt.Sprintf("rps=18,n=%d,in=100-1200,out=30-90", 18*o.seconds)
	p := pools.Options{
		Profiles: []string{n.profile}, Loads: []string{spec}, Growth: 1, Seed: 1, TTFT: fmt.Sprintf("p90=%dms", ttft), TPOT: fmt.Sprintf("p90=%dms", tpot), Shape: "pools", MaxNodes: 16,
		Budget: 200_000, BatchedTokens: []int{maxTokens}, MaxSeqs: maxSeqs, MinRemote: []int{minRemote}, Gateways: 1, Workers: 1, JSON: true, Machine: cost.Machine{Years: 4, Availability: .95, PUE: 1.3},
	}
	var text bytes.Buffer
	if err := pools.Run(&p, &text); err != nil {
		return "", err
	}
	var plan struct {
		Fleet      planned
		Meets      bool `json:"meets_objectives"`
		Neighbours []planned
	}
	if err := json.Unmarshal(text.Bytes(), &plan); err != nil {
		return "", err
	}
	if !plan.Meets {
		return "", errors.New("no fleet meets the objectives of the plan")
	}
	l, err := sim.ParseLoad(spec)
	if err != nil {
		return "", err
	}
	trace, err := l.Trace(1)
	if err != nil {
		return "", err
	}
	fleets := []planned{plan.Fleet}
	for _, f := range plan.Neighbours {
		if !f.Meets && f.Prefill+f.Decode < plan.Fleet.Prefill+plan.Fleet.Decode {
			fleets = append(fleets, f)
		}
	}
	var table strings.Builder
	for _, f := range fleets {
		r, err := o.measure(ctx, n, f.Prefill, f.Decode, trace, out, errOut)
		if err != nil {
			return "", err
		}
		met := true
		for _, g := range []struct {
			metric    string
			predicted float64
			limit     float64
		}{{"ttft", f.TTFT[1], ttft}, {"tpot", f.TPOT[1], tpot}} {
			measured := percentile(r.record, g.metric, 90)
			met = met && measured <= g.limit
			fmt.Fprintf(&table, "| %s, %dP%dD | %s p90 ms, limit %g | %.1f | %.1f | %+.1f %% | |\n", f.Name, f.Prefill, f.Decode, report.MetricName(g.metric), g.limit, g.predicted, measured, 100*(g.predicted/measured-1))
		}
		verdict := map[bool]string{true: "yes", false: "no"}
		fmt.Fprintf(&table, "| %s, %dP%dD | meets the objectives | %s | %s | | |\n", f.Name, f.Prefill, f.Decode, verdict[f.Meets], verdict[met])
	}
	return fmt.Sprintf("## A planned fleet\n\n`tandem plan pools` for the nodes that sleep, `--load %q --ttft p90=%dms --tpot p90=%dms`: the fleet that it chose, and those with a node less.\n\n%s%s", spec, ttft, tpot, prove.TableHead, table.String()), nil
}

// percentile returns a percentile of a latency in milliseconds. Failed requests are the slowest.
func percentile(rec *load.Record, metric string, at float64) float64 {
	s := report.Summarize(rec, report.Options{Metrics: []string{metric}, RequestRate: math.Inf(1)}, func(i int) int { return rec.Outcomes[i].Prompt }, func(i int) int { return rec.Outcomes[i].Output })
	values := append(s.Samples(metric), slices.Repeat([]float64{math.Inf(1)}, s.Failed)...)
	slices.Sort(values)
	return values[min(len(values)-1, int(at/100*float64(len(values))))]
}

// shape is that of the model of the nodes that compute, with 123.5 million parameters, as in
// bench/demo.
var shape = checkpoint.Shape{Vocab: 50257, Hidden: 768, FFN: 2048, Layers: 12, Heads: 12, KVHeads: 12, HeadDim: 64, Positions: 4096, RopeTheta: 10000}

// profiled is the model of the nodes that compute, and its profile.
type profiled struct {
	model  string // folder
	file   string // of the profile
	report string // of tandem profile
}

// profileModel writes the model and profiles it on one core, once.
func (o *options) profileModel(ctx context.Context, errOut io.Writer) (*profiled, error) {
	if o.profiled != nil {
		return o.profiled, nil
	}
	p := &profiled{model: filepath.Join(o.dir, "model"), file: filepath.Join(o.dir, "engine.yaml")}
	if err := errors.Join(shape.HuggingFace(p.model), shape.Tokenizer(p.model)); err != nil {
		return nil, err
	}
	args := append([]string{"-c", "0", o.tandem, "profile", p.model, "--out", p.file, "--threads", "1", "--budget", o.budget.String()}, engineFlags...)
	c := exec.CommandContext(ctx, "taskset", args...)
	var both bytes.Buffer
	c.Stdout, c.Stderr = io.MultiWriter(&both, errOut), io.MultiWriter(&both, errOut)
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("tandem profile: %w", err)
	}
	p.report = both.String()
	o.profiled = p
	return p, nil
}

// engineFlags are those of the nodes that compute.
var engineFlags = []string{"--quantization", "int8", "--kv-cache-memory-bytes", "512MiB", "--max-model-len", "1024", "--max-num-seqs", strconv.Itoa(maxSeqs), "--max-num-batched-tokens", strconv.Itoa(maxTokens)}

// engine is the part with nodes that compute.
func (o *options) engine(ctx context.Context, out, errOut io.Writer) (string, error) {
	m, err := o.profileModel(ctx, errOut)
	if err != nil {
		return "", err
	}
	p, err := profile.Load(m.file)
	if err != nil {
		return "", err
	}
	n := &node{tokens: m.model, flags: append([]string{"--model", m.model}, engineFlags...)}
	const spec = "in=64-512,out=16-96"
	if p, err = o.live(ctx, n, p, spec, out, errOut); err != nil {
		return "", err
	}
	f := simulated(p, 1, 1)
	var table strings.Builder
	var notes []string
	for _, share := range []float64{.3, .6} {
		trace, err := draw(spec, f, share, o.seconds)
		if err != nil {
			return "", err
		}
		r, err := o.measure(ctx, n, 1, 1, trace, out, errOut)
		if err = errors.Join(err, r.complete()); err != nil {
			return "", err
		}
		figures, err := compare(f, trace, r, engineBounds)
		if err != nil {
			return "", err
		}
		steps, err := o.recordedFigures(p)
		if err != nil {
			return "", err
		}
		figures = append(figures, steps...)
		run := fmt.Sprintf("1P1D at %g, %d requests", share, len(trace))
		if err := prove.WriteRows(&table, run, figures); err != nil {
			return "", err
		}
		notes = append(notes, "- "+r.used(run))
		if max(r.client, r.gateway) > .05 {
			notes = append(notes, "- "+run+": the client or the gateway took more than 5 % of a core from the nodes.")
		}
	}
	return fmt.Sprintf("## Nodes that compute\n\n1P1D with 123.5 million random parameters in int8, each node one thread on a core of its own. The profile is that of `tandem profile`, with step times of the counters of such\nnodes under another load, as by `tandem profile --from`: a node in a fleet is slower than alone.\nLoad: %s, for %d s of arrivals.\n\n%s%s\n%s\n", spec, o.seconds, prove.TableHead, table.String(), strings.Join(notes, "\n")), nil
}

// live returns a profile with the step times of the counters of a prefill and a decode node under a
// load of its own.
func (o *options) live(ctx context.Context, n *node, base *profile.Profile, spec string, out, errOut io.Writer) (*profile.Profile, error) {
	trace, err := draw(spec, simulated(base, 1, 1), .45, o.seconds)
	if err != nil {
		return nil, err
	}
	urls := make([]string, 2)
	for i := range urls {
		urls[i] = fmt.Sprintf("http://127.0.0.1:%d/metrics", o.port+1+i)
	}
	type result struct {
		*profiler.Result
		err error
	}
	done := make(chan result, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for profiler.CheckURLs(ctx, urls) != nil {
			select {
			case <-ctx.Done():
				done <- result{nil, context.Cause(ctx)}
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
		// The nodes are there for some seconds more than the arrivals take.
		r, err := profiler.Live(ctx, profiler.LiveOptions{URLs: urls, For: time.Duration(o.seconds) * time.Second, Every: time.Second, Base: base, Log: errOut})
		done <- result{r, err}
	}()
	r, err := o.measure(ctx, n, 1, 1, trace, out, errOut)
	if err = errors.Join(err, r.complete()); err != nil {
		return nil, err
	}
	fitted := <-done
	switch {
	case errors.Is(fitted.err, profiler.ErrFit): // the table has what it predicts
		fmt.Fprintln(errOut, "Note:", fitted.err)
	case fitted.err != nil:
		return nil, fmt.Errorf("the counters of nodes that compute: %w", fitted.err)
	}
	for _, note := range fitted.Notes {
		fmt.Fprintln(errOut, "Note:", note)
	}
	return fitted.Profile, nil
}

// heldOut matches a line of tandem profile about a shape that was not fitted.
var heldOut = regexp.MustCompile(`(?m)^(.*\S) +([0-9.e+-]+) +([0-9.e+-]+) +([+-][0-9.]+)%$`)

// shapes is the part about the profile on shapes that were not fitted.
func (o *options) shapes(ctx context.Context, _, errOut io.Writer) (string, error) {
	p, err := o.profileModel(ctx, errOut)
	if err != nil {
		return "", err
	}
	var figures []prove.Figure
	sum := 0.0
	for _, m := range heldOut.FindAllStringSubmatch(p.report, -1) {
		predicted, err := strconv.ParseFloat(m[2], 64)
		measured, err2 := strconv.ParseFloat(m[3], 64)
		if err := errors.Join(err, err2); err != nil {
			return "", err
		}
		f := prove.Figure{Name: m[1] + ", ms", Predicted: predicted, Measured: measured}
		figures = append(figures, f)
		sum += math.Abs(f.Error())
	}
	if len(figures) == 0 {
		return "", fmt.Errorf("tandem profile has reported no shape that was not fitted: %s", p.report)
	}
	var table strings.Builder
	if err := prove.WriteRows(&table, "step", figures); err != nil {
		return "", err
	}
	mean := 100 * sum / float64(len(figures))
	return fmt.Sprintf("## Shapes that were not fitted\n\nSteps of the model above on one core next to its profile. Mean error %.1f %%, bound 5 %%.\n\n%s%s", mean, prove.TableHead, table.String()), nil
}
