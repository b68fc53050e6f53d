package pools

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/simulate"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// Present is a fleet that runs, and its load.
type Present struct {
	Profile         *profile.Profile
	Calibrated      bool // the step times of Profile were fitted to the fleet's counters
	Prefill, Decode int
	Prefills        []string // names of the prefill nodes, the idlest first; empty: not known
	Decodes         []string
	URL             string        // of the gateway; empty: not known
	Keyed           bool          // the gateway requires a key
	Load            []sim.Request // nil: Options.Trace has it
	Source          string        // where Load is from, such as a recording
	Measured        *Measured     // nil: nothing was measured
	Notes           []string      // what may have disturbed the measurement
	WhatIf          []string      // in addition to DefaultWhatIf, or in place of those with equal keys
}

// Measured is what a gateway measured while the load was recorded.
type Measured struct {
	Window          time.Duration
	TTFT, TPOT, ITL [3]Known // at the 50th, 90th and 99th percentile
	Prompt, Output  float64  // tokens per second
	Requests        int
}

// Known is a duration that is known to be within two bounds; zero: not measured.
type Known struct{ Value, Low, High time.Duration }

// Exactly returns a duration that is known exactly.
func Exactly(d time.Duration) Known { return Known{d, d, d} }

// DefaultWhatIf are the changes that are simulated unless others of their keys are given.
var DefaultWhatIf = []string{"load=2.5", "zones=3", "upgrade=2"}

// WhatIfs is how changes are written, for help.
const WhatIfs = "load=2.5 (factor), zones=3 (one of three zones fails), upgrade=2 (nodes at a time), gpu=h200 or gpu=h200:llama-8b, profile=FILE, fleet=3P2D, min-remote-prefill-tokens=512"

// whatIf matches a change.
var whatIf = regexp.MustCompile(`^(load|zones|upgrade|gpu|profile|fleet|min-remote-prefill-tokens)=(.+)$`)

// presentShare is the share of the budget for the simulation that is compared with the measurement:
// it has to play consecutive requests.
const presentShare = 4

// advice is the making of one piece of advice. The load is that of now at Options.Growth times its
// pace, which the advised fleet has to hold; the present fleet is simulated at 1/Growth of it.
type advice struct {
	*run
	now       *Present
	fleet     planner.Fleet
	predicted planner.Outcome // of the present fleet with its load
	took      time.Duration   // of that load
	played    int             // requests of it
	rows      []scenario
	noPlan    error // why there is no plan
}

// scenario is a change of the present fleet, or of its load.
type scenario struct {
	planner.Row
	why     string // it was not simulated; empty: it was
	assumes string // what the simulation assumes, in words; empty: nothing
	events  func(span, start time.Duration) []fleet.Event
	takes   time.Duration // of the events; 0: they have no end
	// replan has the least fleet for the changed load or node; nil: none was sought or found.
	replan *planner.Plan
	sought bool // a fleet is sought if the present one fails, or costs another price
}

// Check returns an error for objectives that no load can meet, before a recording takes its time.
func (o *Options) Check(p *profile.Profile, whatIfs []string) error {
	r := &run{Options: o, profiles: []kind{{Profile: p}}}
	goals, err := r.checkAll()
	if err != nil {
		return err
	}
	a := &advice{run: r, now: &Present{Profile: p, Decode: 1, WhatIf: whatIfs}}
	if err := a.scenarios(); err != nil {
		return err
	}
	n := node(p)
	for _, g := range goals {
		if least := time.Duration(n.Alone * float64(time.Second)); (g.Metric == planner.TPOT || g.Metric == planner.ITL) && least > g.Limit {
			return fmt.Errorf("%w: %s cannot be at most %v on %s: a request alone on a node takes %v a token; raise the limit, or use a faster node", ErrOption, g.Name(), g.Limit, n.Name, least.Round(10*time.Microsecond))
		}
	}
	return nil
}

// ParseFleet parses 6P2D (6 prefill and 2 decode nodes), or 8D (8 nodes that do both).
func ParseFleet(text string) (prefill, decode int, err error) {
	prefill, decode, err = simulate.ParseFleet(text)
	if err != nil {
		return 0, 0, fmt.Errorf("%w: %s", ErrOption, strings.TrimPrefix(err.Error(), simulate.ErrOption.Error()+": "))
	}
	return prefill, decode, nil
}

// Advise simulates a fleet that runs under its own load, compares the prediction with the
// measurement, and writes what a cheaper fleet saves and what the fleet risks.
func Advise(o *Options, now *Present, out io.Writer) error {
	a := &advice{run: &run{Options: o}, now: now}
	if err := a.work(); err != nil {
		return err
	}
	b := bufio.NewWriter(out)
	if err := a.write(b); err != nil {
		return err
	}
	return cmp.Or(b.Flush(), a.noPlan)
}

// work simulates and plans.
func (a *advice) work() error {
	if err := a.prepare(); err != nil {
		return err
	}
	if err := a.simulateNow(); err != nil {
		return a.ofUser(err)
	}
	plan, err := planner.Make(a.problem)
	switch {
	case errors.Is(err, planner.ErrProblem):
		a.noPlan = wrap(err)
	case err != nil:
		return a.ofUser(err)
	}
	a.plan = plan
	if err := a.replans(); err != nil {
		return a.ofUser(err)
	}
	if a.Progress != nil {
		a.Progress(Progress{})
	}
	return nil
}

// ofUser marks an error of a simulation that the user can correct.
func (a *advice) ofUser(err error) error {
	if errors.Is(err, fleet.ErrOptions) || errors.Is(err, fleet.ErrStuck) {
		return wrap(err)
	}
	return err
}

// prepare checks the options, reads the load and states the problem.
func (a *advice) prepare() error {
	goals, err := a.checkAll()
	if err != nil {
		return err
	}
	a.setPrice(a.now.Profile, 0)
	a.profiles = []kind{{Profile: a.now.Profile}}
	if a.now.Load == nil {
		err = a.readLoad()
	} else {
		a.trace, a.source = slices.Clone(a.now.Load), a.now.Source // checkLoad sets its pace
		a.ofAllGateways()
		err = a.checkLoad()
	}
	if err != nil {
		return err
	}
	a.state(goals)
	a.fleet = planner.Fleet{Prefill: a.now.Prefill, Decode: a.now.Decode, Settings: a.problem.Settings[0]}
	if most := a.nodesInMemory(); a.fleet.Nodes() > most {
		return fmt.Errorf("%w: the fleet has %d nodes, and at most %d fit in the memory of a simulation: give --fleet a part of it, and --trace the same part of the load", ErrOption, a.fleet.Nodes(), most)
	}
	return a.scenarios()
}

// ofAllGateways scales the load of one gateway, and what it measured, to all of them.
func (a *advice) ofAllGateways() {
	n := max(1, a.Gateways)
	for i := range a.trace {
		a.trace[i].At /= time.Duration(n)
	}
	if a.now.Measured != nil {
		m := *a.now.Measured
		m.Window /= time.Duration(n)
		m.Prompt, m.Output = float64(n)*m.Prompt, float64(n)*m.Output
		now := *a.now
		now.Measured = &m
		a.now = &now
	}
	if n > 1 {
		a.source += fmt.Sprintf(", one of %d gateways", n)
	}
}

// scenarios lists what is simulated about the present fleet.
func (a *advice) scenarios() error {
	settings := a.settings()
	base := planner.Case{Fleet: planner.Fleet{Prefill: a.now.Prefill, Decode: a.now.Decode, Settings: settings[0]}, Load: 1 / a.Growth, Slow: 1}
	a.rows = nil
	add := func(name string, c planner.Case) *scenario {
		a.rows = append(a.rows, scenario{Row: planner.Row{Name: name, Case: c}})
		return &a.rows[len(a.rows)-1]
	}
	add("now", base)
	list := slices.Clone(a.now.WhatIf)
	for _, text := range DefaultWhatIf {
		key, _, _ := strings.Cut(text, "=")
		if !slices.ContainsFunc(a.now.WhatIf, func(other string) bool { return strings.HasPrefix(other, key+"=") }) {
			list = append(list, text)
		}
	}
	for _, s := range settings[1:] {
		if s.MinRemote != settings[0].MinRemote && a.now.Prefill > 0 {
			if text := fmt.Sprintf("min-remote-prefill-tokens=%d", max(1, s.MinRemote)); !slices.Contains(list, text) {
				list = append(list, text)
			}
		}
	}
	for _, text := range list {
		m := whatIf.FindStringSubmatch(text)
		if m == nil {
			return fmt.Errorf("%w: --what-if %s: write one of %s", ErrOption, text, WhatIfs)
		}
		number := func(least, most float64) (float64, error) {
			v, err := strconv.ParseFloat(m[2], 64)
			if err != nil || !(v >= least && v <= most) {
				return 0, fmt.Errorf("%w: --what-if %s: write a number of %g to %g", ErrOption, text, least, most)
			}
			return v, nil
		}
		var err error
		var v float64
		c := base
		switch m[1] {
		case "load":
			if v, err = number(.01, 100); err == nil {
				c.Load = v / a.Growth
				add(fmt.Sprintf("load × %g", v), c).sought = true
			}
		case "zones":
			if v, err = number(2, 1000); err == nil {
				a.loseZone(add(fmt.Sprintf("one of %d zones fails", int(v)), c), int(v))
			}
		case "upgrade":
			if v, err = number(1, maxNodes); err == nil {
				s := add(fmt.Sprintf("upgrade, %s at a time", count(int(v), "node")), c)
				s.events, s.takes = a.upgrade(int(v))
			}
		case "gpu", "profile":
			if c.Node, err = a.addProfile(m[1], m[2]); err == nil {
				add(a.profiles[c.Node].Node.Name, c).sought = true
			}
		case "fleet":
			if c.Prefill, c.Decode, err = ParseFleet(m[2]); err == nil {
				add("fleet "+c.Size(), c)
			}
		case "min-remote-prefill-tokens":
			if v, err = number(1, maxMinRemote); err == nil {
				c.MinRemote = int(v)
				add(fmt.Sprintf("min-remote %d", c.MinRemote), c)
			}
		}
		if err != nil {
			return err
		}
		if last := &a.rows[len(a.rows)-1]; a.block > 0 && last.Fleet.Nodes() > a.nodesInMemory() {
			return fmt.Errorf("%w: --what-if %s: at most %d nodes fit in the memory of a simulation: give fewer", ErrOption, text, a.nodesInMemory())
		}
	}
	return nil
}

// addProfile adds the profile of another kind of node, and returns its index.
func (a *advice) addProfile(key, name string) (int, error) {
	now := a.now.Profile
	if key == "gpu" && !strings.Contains(name, ":") {
		name += ":" + now.Model.Name
	}
	p, err := profile.Load(name)
	if err != nil {
		return 0, fmt.Errorf("%w; a GPU with the name of an estimate's model is written such as --what-if gpu=h200:llama-8b", wrap(err))
	}
	if p.Model.Layers != now.Model.Layers {
		return 0, fmt.Errorf("%w: --what-if %s=%s has a model of %d layers, and that of profile %s has %d: give an estimate, or a profile, of the same model", ErrOption, key, name, p.Model.Layers, now.Node.Name, now.Model.Layers)
	}
	same := *p
	same.Model = now.Model // the names of estimates are not those of checkpoints
	if err := comparable([]*profile.Profile{now, &same}, a.CompareEstimates); err != nil {
		return 0, err
	}
	for i, q := range a.profiles {
		if q.Node.Name == p.Node.Name && i > 0 {
			return i, nil
		}
	}
	if n := len(a.profiles); n < len(a.Prices) { // the first price is that of the present nodes
		p.Node.Price = a.Prices[n]
	}
	a.profiles = append(a.profiles, kind{Profile: p})
	return len(a.profiles) - 1, nil
}

// loseZone has a share of the nodes of each pool die for good, after two fifths of the load.
func (a *advice) loseZone(s *scenario, zones int) {
	lost := func(n int) int { return (n + zones - 1) / zones }
	prefill, decode := lost(s.Prefill), lost(s.Decode)
	if decode == s.Decode {
		s.why = fmt.Sprintf("the zone may have %s: nothing would be left to serve", count(decode, "decode node"))
		if s.Decode == 1 {
			s.why = "the only decode node may be in the zone: nothing would be left to serve"
		}
		return
	}
	dies := count(decode, "decode node")
	if prefill > 0 {
		dies = count(prefill, "prefill node") + " and " + dies
	}
	s.assumes = fmt.Sprintf("%s: %s die, because nodes name no zones and are taken to be spread evenly.", s.Name, dies)
	s.events = func(span, _ time.Duration) (list []fleet.Event) {
		for i := range prefill + decode {
			t := fleet.Target{Prefill: i < prefill, Node: i}
			if !t.Prefill {
				t.Node -= prefill
			}
			list = append(list, fleet.Event{At: span * 2 / 5, Action: fleet.Kill, Target: t})
		}
		return list
	}
}

// upgrade drains, ends and starts so many nodes at a time, prefill nodes first, from a tenth of the
// load on. It returns how long that takes, too.
func (a *advice) upgrade(atOnce int) (events func(span, start time.Duration) []fleet.Event, takes time.Duration) {
	prefill, nodes := a.now.Prefill, a.now.Prefill+a.now.Decode
	each := func(start time.Duration) time.Duration { return fleet.DrainTimeout + start + time.Second }
	events = func(span, start time.Duration) (list []fleet.Event) {
		for i := range nodes {
			t := fleet.Target{Prefill: i < prefill, Node: i}
			if !t.Prefill {
				t.Node -= prefill
			}
			at := span/10 + time.Duration(i/atOnce)*each(start)
			list = append(list, fleet.Event{At: at, Action: fleet.Drain, Target: t, Timeout: fleet.DrainTimeout},
				fleet.Event{At: at + fleet.DrainTimeout, Action: fleet.Kill, Target: t},
				fleet.Event{At: at + fleet.DrainTimeout + time.Millisecond, Action: fleet.Start, Target: t})
		}
		slices.SortStableFunc(list, func(a, b fleet.Event) int { return cmp.Compare(a.At, b.At) })
		return list
	}
	return events, time.Duration((nodes+atOnce-1)/atOnce) * each(a.now.Profile.Start.Total())
}

// simulateNow simulates the present fleet, and its changes.
func (a *advice) simulateNow() error {
	load := windows(a.trace, max(len(a.whole), a.Budget/presentShare), 1)
	a.played = len(load)
	return a.atOnce(1+len(a.rows), func(i int) (err error) {
		if i == 0 {
			a.predicted, a.took, err = a.play(planner.Case{Fleet: a.fleet, Load: 1 / a.Growth, Slow: 1}, load, nil)
			return err
		}
		s := &a.rows[i-1]
		if s.why != "" {
			return nil
		}
		o, _, err := a.play(s.Case, a.whole, s.events)
		s.Outcome, s.Meets, s.Price = &o, a.problem.Meets(&o), a.priceOf(s.Fleet)
		return err
	})
}

// priceOf returns the price of an hour of a fleet, or its GPUs without prices.
func (a *advice) priceOf(f planner.Fleet) float64 {
	if !a.problem.Priced() {
		return float64(a.gpus(f))
	}
	return a.profileOf(f).hourly(f) * (1 + a.Overhead)
}

// replanShare is the share of the budget of each search for a fleet after a change.
const replanShare = 6

// replans seeks the least fleets for changes of the load that the present fleet does not hold, and
// those of other nodes for the load that the advised fleet has to hold.
func (a *advice) replans() error {
	for i := range a.rows {
		s := &a.rows[i]
		if !s.sought || s.Meets && s.Node == 0 {
			continue
		}
		load := s.Load
		if s.Node > 0 {
			load = 1
		}
		p := a.problem
		p.Brief, p.Plots, p.Budget = true, false, a.Budget/replanShare
		p.Requests = slices.Clone(p.Requests)
		for k := range p.Requests {
			p.Requests[k].At = time.Duration(float64(p.Requests[k].At) / load)
		}
		p.Nodes = []planner.Node{a.profiles[s.Node].node(a.Overhead)}
		p.Simulate = func(cases []planner.Case) ([]planner.Outcome, error) {
			cases = slices.Clone(cases)
			for k := range cases {
				cases[k].Node, cases[k].Load = s.Node, cases[k].Load*load
			}
			return a.simulate(cases)
		}
		plan, err := planner.Make(p)
		if errors.Is(err, planner.ErrProblem) {
			continue
		}
		if err != nil {
			return err
		}
		plan.Fleet.Node = s.Node
		s.replan = plan
	}
	return nil
}

// compared is a figure that was predicted and measured.
type compared struct {
	Name                         string
	Predicted, Measured, Low, Up float64 // seconds, or tokens per second
	Rate                         bool    // tokens per second
	Counts                       bool    // a disagreement makes the advice void
}

// Error returns the relative error of the prediction.
func (c *compared) Error() float64 { return c.Predicted/c.Measured - 1 }

// Sure returns the part of the error that is sure: that to the nearer bound of the measurement.
func (c *compared) Sure() float64 {
	switch {
	case c.Predicted > c.Up:
		return c.Predicted/c.Up - 1
	case c.Predicted < c.Low:
		return c.Predicted/c.Low - 1
	}
	return 0
}

// Bounds of a disagreement.
const (
	mostError = .25  // of a percentile or rate
	tiny      = .002 // seconds: differences below are those of clocks and of the network
	fewCounts = 100  // requests below which a p90 is chance
)

// Disagrees reports whether prediction and measurement differ by more than chance explains.
func (c *compared) Disagrees() bool {
	if !c.Rate && math.Abs(c.Predicted-min(max(c.Predicted, c.Low), c.Up)) < tiny {
		return false
	}
	return c.Counts && math.Abs(c.Sure()) > mostError
}

// comparison returns the figures that were predicted and measured.
func (a *advice) comparison() (list []compared) {
	m := a.now.Measured
	if m == nil {
		return nil
	}
	seconds := func(d time.Duration) float64 {
		if d == planner.Failing {
			return math.Inf(1)
		}
		return d.Seconds()
	}
	for _, f := range []struct {
		name string
		q    planner.Quantiles
		k    [3]Known
	}{{"TTFT", a.predicted.TTFT, m.TTFT}, {"TPOT", a.predicted.TPOT, m.TPOT}, {"ITL", a.predicted.ITL, m.ITL}} {
		for i, d := range []time.Duration{f.q.P50, f.q.P90, f.q.P99} {
			if k := f.k[i]; k.Value > 0 {
				name := f.name + [...]string{" p50", " p90", " p99"}[i]
				list = append(list, compared{name, seconds(d), seconds(k.Value), seconds(k.Low), seconds(k.High), false, i < 2})
			}
		}
	}
	// The load has pauses at its ends, which the recording's time has, too.
	stretch := 1.0
	if a.played == len(a.trace) && m.Window > a.took {
		stretch = a.took.Seconds() / m.Window.Seconds()
	}
	for _, f := range []struct {
		name                string
		predicted, measured float64
	}{{"prompt tokens/s", a.predicted.Input, m.Prompt}, {"answer tokens/s", a.predicted.Output, m.Output}} {
		if f.measured > 0 {
			list = append(list, compared{f.name, f.predicted * stretch, f.measured, f.measured, f.measured, true, true})
		}
	}
	return list
}

// disagreements returns the figures that disagree.
func disagreements(list []compared) (of []compared) {
	for i := range list {
		if list[i].Disagrees() {
			of = append(of, list[i])
		}
	}
	return of
}
