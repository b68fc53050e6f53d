package control

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/gateway/route"
)

// tick is the time between two decisions.
const tick = 5 * time.Second

// rig runs a simulated fleet under a controller.
type rig struct {
	p       *profile.Profile
	trace   []sim.Request
	seen    int // requests of the trace that have arrived
	c       *Controller
	nodes   [roles][]state
	targets [roles][]int // at each change, the first included
	log     []string
}

// state is the state of a simulated node.
type state struct {
	up, starting, draining bool
	since                  time.Duration
}

// drain is the time that a drained node gets.
const drain = 20 * time.Second

// arrivals draws requests whose rate is a function of time, at most so many a second.
func arrivals(rate func(at float64) float64, most, span, mean, sigma float64, output float64, seed uint64) (trace []sim.Request) {
	r := rand.New(rand.NewPCG(seed, 1))
	for at := 0.0; ; {
		if at += r.ExpFloat64() / most; at > span {
			return trace
		}
		if r.Float64()*most > rate(at) {
			continue
		}
		n := int(min(30_000, max(16, math.Exp(math.Log(mean)-sigma*sigma/2+sigma*r.NormFloat64()))))
		trace = append(trace, sim.Request{At: time.Duration(at * 1e9), Tokens: n, Output: 1 + int(output*r.ExpFloat64()), Block: 512})
	}
}

// control is fleet.Options.Control.
func (g *rig) control(f *fleet.Sample) (events []fleet.Event) {
	costs := g.c.Costs()
	s := Sample{At: f.At, Backlog: float64(f.WaitingTokens+f.Prefill.Queued) * costs.PromptToken}
	for ; g.seen < len(g.trace) && g.trace[g.seen].At <= f.At; g.seen++ {
		q := &g.trace[g.seen]
		s.Arrive(costs, q.Tokens, 0)
		s.End(costs, q.Tokens, q.Output)
	}
	for r := range g.nodes {
		for i := range g.nodes[r] {
			n := &g.nodes[r][i]
			switch {
			case n.starting && f.At-n.since >= costs.Start:
				n.starting, n.up = false, true
			case n.draining && f.At-n.since > drain:
				n.draining = false
				events = append(events, fleet.Event{Action: fleet.Kill, Target: fleet.Target{Prefill: Role(r) == Prefill, Node: i}})
			}
			if n.up {
				s.Nodes[r].Ready++
			}
			if n.starting {
				s.Nodes[r].Starting++
			}
		}
	}
	for r, d := range g.c.Tick(s) {
		if d.Change == 0 {
			continue
		}
		g.targets[r] = append(g.targets[r], d.Target)
		g.log = append(g.log, fmt.Sprintf("%v %v: %d: %s", f.At, Role(r), d.Target, d.Why))
		have := s.Nodes[r].Ready + s.Nodes[r].Starting
		for i := range g.nodes[r] {
			if n := &g.nodes[r][i]; have < d.Target && !n.up && !n.starting && !n.draining {
				*n = state{starting: true, since: f.At}
				events = append(events, fleet.Event{Action: fleet.Start, Target: fleet.Target{Prefill: Role(r) == Prefill, Node: i}})
				have++
			}
		}
		for i := len(g.nodes[r]) - 1; i >= 0 && have > d.Target; i-- {
			if n := &g.nodes[r][i]; n.up {
				*n = state{draining: true, since: f.At}
				events = append(events, fleet.Event{Action: fleet.Drain, Timeout: drain, Target: fleet.Target{Prefill: Role(r) == Prefill, Node: i}})
				have--
			}
		}
	}
	return events
}

// outcome is the result of a run.
type outcome struct {
	goodput   float64
	reversals [roles]int // changes of direction of the targets
	largest   [roles]int
	log       []string
}

// run plays a trace from so many nodes. Without scaling the fleet keeps them.
func run(t *testing.T, trace []sim.Request, from [roles]int, most int, scaled bool) outcome {
	t.Helper()
	p, err := profile.Load("l40s:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	d, pre := &p.Step.Decode, &p.Step.Prefill
	o := Options{
		Costs: Costs{PromptToken: pre.PerToken, PromptPair: pre.PerPair, Fixed: d.Fixed, PerSeq: d.PerSeq, PerCtx: d.PerCtx, KVTokens: float64(p.Memory.Blocks * p.Memory.BlockTokens), Start: 40 * time.Second},
		TTFT:  4 * time.Second, ITL: 80 * time.Millisecond, Most: [roles]int{most, most},
	}
	g := &rig{p: p, trace: trace, c: New(o)}
	times := p.Times()
	f := fleet.Options{
		Prefill: from[Prefill], Decode: from[Decode], BlockTokens: 512, Blocks: p.Memory.Blocks * p.Memory.BlockTokens / 512, BatchedTokens: 8192,
		Steps: fleet.StepTimes{Name: "profile", Step: func(s fleet.Shape, _ int) time.Duration { return times.Step(s) }}, Policy: route.Prefix, MinRemote: 16, Seed: 1,
		Heartbeat: 500 * time.Millisecond, ReportDelay: 20 * time.Millisecond, Start: o.Start, KVBytes: p.Model.KVBytes, Layers: p.Model.Layers, NoEvents: true,
	}
	if scaled {
		for r := range g.nodes {
			g.nodes[r] = make([]state, most)
			for i := range from[r] {
				g.nodes[r][i].up = true
			}
			g.targets[r] = []int{from[r]}
			f.Events = append(f.Events, fleet.Event{At: 1e6 * time.Hour, Action: fleet.Start, Target: fleet.Target{Prefill: Role(r) == Prefill, Node: most - 1}})
		}
		f.Control, f.ControlEvery = g.control, tick
	}
	result, err := fleet.Run(trace, f)
	if err != nil {
		t.Fatal(err)
	}
	out := outcome{goodput: result.Summarize(fleet.Goals{TTFT: o.TTFT, TPOT: o.ITL}).Goodput, log: g.log}
	for r, targets := range g.targets {
		direction := 0
		for i := 1; i < len(targets); i++ {
			now := 1
			if targets[i] < targets[i-1] {
				now = -1
			}
			if direction != 0 && now != direction {
				out.reversals[r]++
			}
			direction = now
			if n := targets[i] - targets[i-1]; n > max(leastStep, targets[i-1]) {
				t.Errorf("%v grows from %d to %d", Role(r), targets[i-1], targets[i])
			}
			out.largest[r] = max(out.largest[r], targets[i])
		}
	}
	return out
}

// A burst of four times the load within a minute, and back: the fleet grows with it and shrinks
// once, and nearly as many requests meet the goals as in a fleet that always had the largest size.
func TestBurst(t *testing.T) {
	rate := func(at float64) float64 {
		switch {
		case at < 400:
			return 3
		case at < 460:
			return 3 + 9*(at-400)/60
		case at < 800:
			return 12
		case at < 860:
			return 12 - 9*(at-800)/60
		}
		return 3
	}
	trace := arrivals(rate, 12, 1700, 5000, 0.9, 60, 3)
	got := run(t, trace, [roles]int{3, 1}, 24, true)
	still := run(t, trace, [roles]int{max(2, got.largest[Prefill]), max(2, got.largest[Decode])}, 24, false)
	t.Logf("%d requests, goodput %.3f of %.3f, largest %v, reversals %v", len(trace), got.goodput, still.goodput, got.largest, got.reversals)
	if got.goodput < 0.9*still.goodput || got.reversals[Prefill] > 1 || got.reversals[Decode] > 1 || got.largest[Prefill] < 4 {
		for _, line := range got.log {
			t.Log(line)
		}
		t.Errorf("goodput %.3f of %.3f, largest %v, reversals %v", got.goodput, still.goodput, got.largest, got.reversals)
	}
}

// A load that swings between 1 and 12 requests per second: one change of direction for each of its
// reversals.
func TestSinusoid(t *testing.T) {
	const period, periods = 900.0, 2
	rate := func(at float64) float64 { return 6.5 - 5.5*math.Cos(2*math.Pi*at/period) }
	trace := arrivals(rate, 12, periods*period, 4000, 0.8, 40, 4)
	got := run(t, trace, [roles]int{1, 1}, 24, true)
	still := run(t, trace, [roles]int{max(2, got.largest[Prefill]), max(2, got.largest[Decode])}, 24, false)
	t.Logf("%d requests, goodput %.3f of %.3f, largest %v, reversals %v", len(trace), got.goodput, still.goodput, got.largest, got.reversals)
	if got.goodput < 0.9*still.goodput || got.reversals[Prefill] > 2*periods-1 || got.reversals[Decode] > 2*periods-1 || got.largest[Prefill] < 3 {
		for _, line := range got.log {
			t.Log(line)
		}
		t.Errorf("goodput %.3f of %.3f, largest %v, reversals %v", got.goodput, still.goodput, got.largest, got.reversals)
	}
}

// Six hours of constant load: the fleet keeps the size that it reached in the first minutes, up to
// nodes that noise adds, and never changes direction.
func TestConstantLoad(t *testing.T) {
	trace := arrivals(func(float64) float64 { return 0.6 }, 0.6, 6*3600, 12000, 0.8, 20, 5)
	got := run(t, trace, [roles]int{2, 1}, 24, true)
	t.Logf("%d requests, goodput %.3f, largest %v, reversals %v", len(trace), got.goodput, got.largest, got.reversals)
	if got.reversals != [roles]int{} || got.goodput < 0.9 {
		for _, line := range got.log {
			t.Log(line)
		}
		t.Errorf("goodput %.3f, reversals %v", got.goodput, got.reversals)
	}
}
