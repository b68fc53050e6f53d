package planner

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Plan is the chosen fleet, with the simulations that show why.
type Plan struct {
	Fleet   Fleet // with spare nodes
	Needed  Fleet // without
	Outcome *Outcome
	Meets   bool    // every objective; false: no fleet that was simulated does
	Price   float64 // of an hour; without prices, GPUs

	Demand  Demand // for the chosen kind of node, as Floor and Bounds
	Floor   Floor
	Bounds  Bounds
	Backlog float64 // Demand.Backlog of the prefill nodes, or of all of them

	Alternatives []Alternative // in the order of their lower bounds
	Neighbours   []Row         // with one node less or more in a pool
	Losses       []Row         // of a node that dies and starts again
	Growth       []Row         // by load
	Slower       []Row         // by the duration of steps

	Holds   float64 // largest simulated factor on the load that meets every objective; 0: not simulated
	Fails   float64 // least one that does not; +Inf: every simulated load does
	Breaks  []Break // objectives in the order in which they fail
	Slow    float64 // largest simulated factor on the duration of steps that meets every objective; 0: not simulated
	TooSlow float64 // least one that does not; +Inf: every simulated one does

	// Safe is the least fleet that meets the objectives if steps take longer by the estimate's error;
	// nil: it was not simulated.
	Safe *Row

	Grid     []Row // fleets around the chosen one, on the part of the load; as the next two for plots
	Steps    []Row // by the duration of steps
	Prefixes []Row // by the share of requests whose prompts have nothing in common with others

	Spent    int  // simulated requests
	Finished bool // false: the budget ended the search or the simulations after it
}

// Row is a simulated case.
type Row struct {
	Name string
	Case
	*Outcome
	Meets bool
	Price float64
}

// Alternative is a kind of node with pools or without, and the least fleet of it.
type Alternative struct {
	Node   int
	Pools  bool
	Least  int    // nodes below which it cannot serve the load
	Reason string // why it was not simulated, or has no fleet; empty: it has one
	Row
}

// Break is an objective that fails when the load grows.
type Break struct {
	Objective string
	Load      float64 // least simulated factor at which it fails
	Cause     string
}

// Make returns a plan.
func Make(p Problem) (*Plan, error) {
	s := &search{Problem: &p, outcomes: map[Case]*Outcome{}, part: true}
	if err := s.check(); err != nil {
		return nil, err
	}
	for i := range p.Nodes {
		n := &p.Nodes[i]
		batch, most := p.Settings[0].BatchedTokens, 0
		for _, settings := range p.Settings {
			most = max(most, settings.BatchedTokens)
		}
		d := Describe(n, p.Requests, batch, most)
		ttft := p.limit(TTFT)
		s.demands = append(s.demands, d)
		s.floors = append(s.floors, FloorOf(n, p.Requests, most, ttft.Limit, cmp.Or(ttft.Percentile, 90)))
		s.bounds = append(s.bounds, d.Bounds(n, p.limit(TPOT, ITL).Limit))
	}
	plan := &Plan{Finished: true}
	total := p.Budget
	if !p.Brief {
		p.Budget = max(p.Whole, total*6/10) // the rest is for the simulations of the chosen fleet
	}
	if err := s.choose(plan); err != nil {
		return nil, err
	}
	p.Budget = total
	k := plan.Fleet.Node
	plan.Demand, plan.Floor, plan.Bounds = s.demands[k], s.floors[k], s.bounds[k]
	if plan.Meets {
		plan.Fleet.Decode += p.Spare
		if plan.Fleet.Prefill > 0 {
			plan.Fleet.Prefill += p.Spare
		}
	}
	plan.Price = p.Price(plan.Fleet)
	plan.Backlog = plan.Demand.Backlog(&p.Nodes[k], p.Requests, plan.Fleet.BatchedTokens, cmp.Or(plan.Fleet.Prefill, plan.Fleet.Decode))
	if err := s.examine(plan); err != nil && !errors.Is(err, errBudget) {
		return nil, err
	} else if err != nil {
		plan.Finished = false
	}
	plan.Spent = s.spent
	return plan, nil
}

// floorError returns why no number of nodes of a kind meets the objectives, or an empty text.
func (s *search) floorError(node int) string {
	f, n := &s.floors[node], &s.Nodes[node]
	ttft, tpot := s.limit(TTFT), s.limit(TPOT, ITL)
	switch {
	case ttft.Limit > 0 && f.TTFT > ttft.Limit:
		return fmt.Sprintf("%s cannot be at most %v on %s: %.1f %% of the prompts take longer on an idle node; raise the limit to %v, or use a faster node, such as more GPUs for each model",
			ttft.Name(), ttft.Limit, n.Name, 100*f.Infeasible, roundUp(f.TTFT))
	case tpot.Limit > 0 && f.TPOT > tpot.Limit:
		return fmt.Sprintf("%s cannot be at most %v on %s: a request alone on a node takes %v a token; raise the limit, or use a faster node, such as more GPUs for each model",
			tpot.Name(), tpot.Limit, n.Name, roundUp(f.TPOT))
	case s.Goodput > 1-f.Infeasible:
		return fmt.Sprintf("goodput cannot be %g on %s: the first token of %.1f %% of the requests is later than %v on an idle node; lower it to %.2f, raise the limit, or use a faster node",
			s.Goodput, n.Name, 100*f.Infeasible, ttft.Limit, math.Floor(100*(1-f.Infeasible))/100)
	}
	return ""
}

// roundUp returns the duration with two digits, rounded up.
func roundUp(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d/unit >= 100 {
		unit *= 10
	}
	return (d + unit - 1) / unit * unit
}

// choose finds the cheapest fleet that meets the objectives.
func (s *search) choose(plan *Plan) error {
	var list []Alternative
	for node := range s.Nodes {
		b := s.bounds[node]
		if s.Disjoint {
			list = append(list, Alternative{Node: node, Pools: true, Least: b.Pools()})
		}
		if s.Colocated && s.Nodes[node].Prefill == nil {
			list = append(list, Alternative{Node: node, Least: b.Nodes})
		}
	}
	lowest := func(a *Alternative) float64 {
		return min(s.Price(Fleet{Node: a.Node, Decode: a.Least}), s.Price(Fleet{Node: a.Node, Prefill: a.Least}))
	}
	slices.SortStableFunc(list, func(a, b Alternative) int { return cmp.Compare(lowest(&a), lowest(&b)) })
	best := -1
	impossible := ""
	possible := false
	for i := range list {
		a := &list[i]
		if a.Reason = s.floorError(a.Node); a.Reason != "" {
			impossible = cmp.Or(impossible, a.Reason)
			continue
		}
		possible = true
		if best >= 0 && list[best].Meets && lowest(a) > list[best].Price {
			a.Reason = fmt.Sprintf("not simulated: the least number of nodes, %d, costs more", a.Least)
			continue
		}
		if err := s.fill(a); errors.Is(err, errBudget) {
			plan.Finished = false
			if a.Outcome == nil {
				a.Reason = "not simulated: the budget is used up"
				continue
			}
		} else if err != nil {
			return err
		}
		if a.Outcome != nil && (best < 0 || better(a, &list[best])) {
			best = i
		}
	}
	plan.Alternatives = list
	switch {
	case !possible:
		return fmt.Errorf("%w: %s", ErrProblem, impossible)
	case best < 0:
		if !plan.Finished {
			return fmt.Errorf("%w: a budget of %d simulated requests is too small to find a fleet: raise it", ErrProblem, s.Budget)
		}
		return fmt.Errorf("%w: at least %d nodes are needed, and at most %d are allowed: allow more, or use faster nodes", ErrProblem, list[0].Least, s.MaxNodes)
	}
	plan.Fleet, plan.Needed, plan.Outcome, plan.Meets = list[best].Fleet, list[best].Fleet, list[best].Outcome, list[best].Meets
	return nil
}

// better reports whether an alternative is better than another: it meets the objectives, costs
// less, has fewer nodes, a clearly higher goodput, or one kind of nodes.
func better(a, b *Alternative) bool {
	if a.Meets != b.Meets {
		return a.Meets
	}
	if !a.Meets {
		return a.Goodput > b.Goodput
	}
	const clearly = .01 // less is not worth two kinds of nodes
	if c := cmp.Or(cmp.Compare(a.Price, b.Price), cmp.Compare(a.Nodes(), b.Nodes())); c != 0 || math.Abs(a.Goodput-b.Goodput) > clearly {
		return cmp.Or(c, cmp.Compare(b.Goodput, a.Goodput)) < 0
	}
	return !a.Pools && b.Pools
}

// fill finds the least fleet of an alternative. If there is none, it keeps the largest one that was
// simulated.
func (s *search) fill(a *Alternative) error {
	s.part = true
	var fleets []Fleet
	var err error
	if a.Pools {
		fleets, err = s.pools(a.Node)
	} else {
		var f Fleet
		var ok bool
		if f, ok, err = s.colocated(a.Node); ok {
			fleets = []Fleet{f}
		}
	}
	if err != nil && len(fleets) == 0 {
		return err
	}
	if len(fleets) == 0 {
		if a.Least > s.MaxNodes {
			a.Reason = fmt.Sprintf("needs at least %d nodes, more than the %d that are allowed", a.Least, s.MaxNodes)
			return nil
		}
		// The part fails with every allowed number of nodes. The whole load may be easier.
		b := s.bounds[a.Node]
		f := Fleet{Node: a.Node, Decode: s.MaxNodes, Settings: s.Settings[0]}
		if a.Pools {
			f.Prefill = min(s.MaxNodes-1, max(1, s.MaxNodes*b.GuessPrefill/(b.GuessPrefill+b.GuessDecode)))
			f.Decode -= f.Prefill
		}
		fleets = []Fleet{f}
	}
	tuned, err := s.tune(fleets[0])
	if err != nil && !errors.Is(err, errBudget) {
		return err
	}
	// The part may mislead about settings, so that the whole load decides.
	s.part = false
	for i, settings := range []Settings{s.Settings[0], tuned.Settings} {
		if i == 1 && settings == s.Settings[0] {
			break
		}
		for k := range fleets {
			fleets[k].Settings = settings
		}
		var f Fleet
		f, _, err = s.settle(fleets)
		c := Case{Fleet: f, Load: 1, Slow: 1}
		if o := s.outcomes[c]; o != nil {
			if next := (Alternative{Pools: a.Pools, Row: s.row("", c, o)}); a.Outcome == nil || better(&next, a) {
				a.Row = next.Row
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// row returns the row of a case.
func (s *search) row(name string, c Case, o *Outcome) Row {
	return Row{Name: name, Case: c, Outcome: o, Meets: s.Meets(o), Price: s.Price(c.Fleet)}
}

// rows simulates cases of the whole load and returns their rows.
func (s *search) rows(names []string, cases []Case) (list []Row, err error) {
	outcomes, err := s.run(cases...)
	for i, o := range outcomes {
		list = append(list, s.row(names[i], cases[i], o))
	}
	return list, err
}

// examine simulates what the plan reports about the chosen fleet, the most important first.
func (s *search) examine(plan *Plan) (err error) {
	s.part = false
	f := plan.Fleet
	outcomes, err := s.run(Case{Fleet: f})
	if err != nil {
		return err
	}
	plan.Outcome = outcomes[0]
	plan.Meets = s.Meets(plan.Outcome)
	if s.Brief {
		return nil
	}
	var names []string
	var cases []Case
	for _, c := range []struct {
		name            string
		prefill, decode int
	}{
		{"one prefill node fewer", -1, 0}, {"one decode node fewer", 0, -1}, {"one prefill node more", 1, 0}, {"one decode node more", 0, 1},
		{"one moved to prefill", 1, -1}, {"one moved to decode", -1, 1},
	} {
		g := f
		if f.Prefill == 0 && c.prefill != 0 {
			continue
		}
		if g.Prefill, g.Decode = f.Prefill+c.prefill, f.Decode+c.decode; g.Decode < 1 || f.Prefill > 0 && g.Prefill < 1 {
			continue
		}
		name := c.name
		if f.Prefill == 0 {
			name = map[int]string{-1: "one node fewer", 1: "one node more"}[c.decode]
		}
		names, cases = append(names, name), append(cases, Case{Fleet: g})
	}
	if plan.Neighbours, err = s.rows(names, cases); err != nil || !plan.Meets {
		return err
	}
	if err = s.grow(plan); err != nil {
		return err
	}
	names, cases = []string{"a node dies"}, []Case{{Fleet: f, Loss: LoseDecode}}
	if f.Prefill > 0 {
		names, cases = []string{"a prefill node dies", "a decode node dies"}, []Case{{Fleet: f, Loss: LosePrefill}, {Fleet: f, Loss: LoseDecode}}
	}
	if f.Decode == 1 { // nothing would be left to serve
		names, cases = names[:len(names)-1], cases[:len(cases)-1]
	}
	if plan.Losses, err = s.rows(names, cases); err != nil {
		return err
	}
	if err = s.slow(plan); err != nil || !s.Plots {
		return err
	}
	return s.plots(plan)
}

// gridReach is how many nodes the fleets of the grid differ from the chosen one, in each pool.
const gridReach = 2

// plots simulates what plots show, most of it on the part of the load.
func (s *search) plots(plan *Plan) (err error) {
	f := plan.Fleet
	slower, err := s.rows([]string{"0.5", "0.75"}, []Case{{Fleet: f, Load: .5}, {Fleet: f, Load: .75}})
	if err != nil {
		return err
	}
	plan.Growth = slices.Insert(plan.Growth, 0, slower...)
	var grid, steps, prefixes []Case
	reach := gridReach
	if f.Nodes() > 32 {
		reach = f.Nodes() / 16
	}
	for p := -reach; p <= reach; p += max(1, reach/2) {
		for d := -reach; d <= reach; d += max(1, reach/2) {
			if g := (Fleet{f.Node, f.Prefill + p, f.Decode + d, f.Settings}); g.Decode > 0 && (f.Prefill == 0 && p == 0 || f.Prefill > 0 && g.Prefill > 0) {
				grid = append(grid, Case{Fleet: g, Part: true})
			}
		}
	}
	for _, x := range []float64{.75, .9, 1, 1.1, 1.25, 1.5} {
		steps = append(steps, Case{Fleet: f, Part: true, Slow: x})
	}
	for _, x := range []float64{0, .25, .5, .75, 1} {
		prefixes = append(prefixes, Case{Fleet: f, Part: true, Unshared: x})
	}
	for _, x := range []struct {
		to    *[]Row
		cases []Case
	}{{&plan.Grid, grid}, {&plan.Steps, steps}, {&plan.Prefixes, prefixes}} {
		if *x.to, err = s.rows(make([]string, len(x.cases)), x.cases); err != nil {
			return err
		}
	}
	return nil
}

// Bounds of the simulated growth of the load, and of the duration of steps.
const (
	mostLoad    = 8
	mostSlow    = 2
	growthSteps = 4 // of the bisection
	slowSteps   = 3
)

// bisect finds the factor from which on a fleet fails: above low, which does not fail. It tries
// high, and its powers up to most.
func (s *search) bisect(low, high, most float64, steps int, c func(float64) Case) (holds, fails float64, list []Row, err error) {
	holds, fails = low, math.Inf(1)
	try := func(x float64) error {
		outcomes, err := s.run(c(x))
		if err != nil {
			return err
		}
		list = append(list, s.row(fmt.Sprintf("%.3g", x), c(x), outcomes[0]))
		if s.Meets(outcomes[0]) {
			holds = x
		} else {
			fails = x
		}
		return nil
	}
	for x := high; math.IsInf(fails, 1) && x <= most; x *= high {
		if err = try(x); err != nil {
			return holds, fails, list, err
		}
	}
	for i := 0; i < steps && !math.IsInf(fails, 1); i++ {
		if err = try(math.Sqrt(holds * fails)); err != nil {
			break
		}
	}
	slices.SortFunc(list, func(a, b Row) int { return cmp.Or(cmp.Compare(a.Load, b.Load), cmp.Compare(a.Slow, b.Slow)) })
	return holds, fails, list, err
}

// grow finds the load at which the chosen fleet fails, and what fails first.
func (s *search) grow(plan *Plan) (err error) {
	plan.Holds, plan.Fails, plan.Growth, err = s.bisect(1, 2, mostLoad, growthSteps, func(x float64) Case { return Case{Fleet: plan.Fleet, Load: x, Slow: 1} })
	now := Case{Fleet: plan.Fleet, Load: 1, Slow: 1}
	plan.Growth = slices.Insert(plan.Growth, 0, s.row("1", now, plan.Outcome))
	for i := range plan.Growth {
		r := &plan.Growth[i]
		for _, name := range s.Problem.Fails(r.Outcome) {
			if !slices.ContainsFunc(plan.Breaks, func(b Break) bool { return b.Objective == name }) {
				plan.Breaks = append(plan.Breaks, Break{name, r.Load, Cause(r.Outcome, r.Prefill > 0, name)})
			}
		}
	}
	return err
}

// slow finds how much slower than in the profile steps may be.
func (s *search) slow(plan *Plan) (err error) {
	likely := s.Nodes[plan.Fleet.Node].likelyError()
	first := 1 + cmp.Or(likely, .1)
	plan.Slow, plan.TooSlow, plan.Slower, err = s.bisect(1, first, mostSlow, slowSteps, func(x float64) Case { return Case{Fleet: plan.Fleet, Load: 1, Slow: x} })
	if err != nil || plan.TooSlow > first || likely == 0 {
		return err
	}
	// The least fleet that holds although the estimate was too fast.
	f := plan.Fleet
	f.Prefill, f.Decode = ceil(first*float64(f.Prefill)), ceil(first*float64(f.Decode))
	s.slowness = first
	defer func() { s.slowness = 0 }()
	f, ok, err := s.settle([]Fleet{f})
	if c := (Case{Fleet: f, Load: 1, Slow: first}); ok && s.outcomes[c] != nil {
		row := s.row("steps that slow", c, s.outcomes[c])
		plan.Safe = &row
	}
	return err
}

// Cause returns why a fleet fails an objective, which Fails has named, as its nodes show it. pools
// reports whether the fleet has prefill nodes.
func Cause(o *Outcome, pools bool, objective string) string {
	between := strings.HasPrefix(objective, "TPOT") || strings.HasPrefix(objective, "ITL") // prompts that wait do not count
	nodes := "nodes"
	if pools {
		nodes = "decode nodes"
	}
	switch {
	case o.Failed > 0 && o.TTFT.P99 == Failing:
		return fmt.Sprintf("%d requests are refused, because too many wait", o.Failed)
	case between:
	case pools && o.PrefillBusy > fullBusy:
		return fmt.Sprintf("prefill nodes compute %.0f %% of the time, so that prompts wait", 100*o.PrefillBusy)
	case o.DecodeKV > fullKV:
		return fmt.Sprintf("the KV memory of %s is full (%.0f %% on the fullest one), so that requests wait", nodes, 100*o.DecodeKV)
	case pools && o.PrefillBusy > busyPool:
		return fmt.Sprintf("prefill nodes compute %.0f %% of the time, so that prompts wait", 100*o.PrefillBusy)
	case !pools && o.DecodeBusy > busyPool && o.TTFT.P90 > 10*o.TPOT.P90:
		return fmt.Sprintf("nodes compute %.0f %% of the time, so that prompts wait", 100*o.DecodeBusy)
	case pools && o.PrefillBusy > .6:
		return fmt.Sprintf("prompts wait for each other in bursts (prefill nodes compute %.0f %% of the time)", 100*o.PrefillBusy)
	}
	return fmt.Sprintf("steps of %s take longer with more requests in them", nodes)
}
