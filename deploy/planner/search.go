package planner

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
)

// errBudget ends a search whose simulated requests are used up.
var errBudget = errors.New("planner: budget")

// search has the simulations so far.
type search struct {
	*Problem
	demands  []Demand
	floors   []Floor
	bounds   []Bounds
	outcomes map[Case]*Outcome
	spent    int     // simulated requests
	part     bool    // cases are of the part of the load
	slowness float64 // factor on the duration of steps of all cases; 0: 1
}

// limit returns the strictest limit of the metrics, and its percentile; 0: there is none.
func (p *Problem) limit(of ...Metric) (o Objective) {
	for _, g := range p.Objectives {
		if slices.Contains(of, g.Metric) && (o.Limit == 0 || g.Limit < o.Limit) {
			o = g
		}
	}
	return o
}

// run simulates cases that have not been simulated, and returns all outcomes.
func (s *search) run(cases ...Case) ([]*Outcome, error) {
	var missing []Case
	cost := 0
	for i := range cases {
		c := &cases[i]
		c.Load, c.Slow = cmp.Or(c.Load, 1), cmp.Or(c.Slow, 1)
		if s.Whole <= s.PartOf {
			c.Part = false
		}
		if s.outcomes[*c] == nil && !slices.Contains(missing, *c) {
			missing = append(missing, *c)
			cost += s.requests(*c)
		}
	}
	if len(missing) > 0 {
		if s.spent+cost > s.Budget {
			return nil, errBudget
		}
		s.spent += cost
		results, err := s.Simulate(missing)
		if err != nil {
			return nil, err
		}
		for i := range missing {
			s.outcomes[missing[i]] = &results[i]
		}
	}
	list := make([]*Outcome, len(cases))
	for i := range cases {
		list[i] = s.outcomes[cases[i]]
	}
	return list, nil
}

// requests returns the number of requests that a case simulates.
func (s *search) requests(c Case) int {
	if c.Part {
		return s.PartOf
	}
	return s.Whole
}

// meets simulates one fleet and reports whether it meets every objective.
func (s *search) meets(f Fleet) (bool, error) {
	o, err := s.run(Case{Fleet: f, Part: s.part, Slow: s.slowness})
	return err == nil && s.Meets(o[0]), err
}

// least returns the least n of low..high for which ok is true, if it is true for every n above. It
// begins at guess. It returns high+1 if ok(high) is false.
func least(low, guess, high int, ok func(int) (bool, error)) (int, error) {
	bad, good := low-1, high+1
	guess = min(max(guess, low), high)
	for step := max(1, guess/16); good-bad > 1; {
		at := guess
		switch {
		case bad < low && good > high: // the first one
		case good > high:
			at = min(high, bad+step)
			step *= 2
		case bad < low:
			at = max(low, good-step)
			step *= 2
		default:
			at = (bad + good) / 2
		}
		yes, err := ok(at)
		if err != nil {
			return good, err
		}
		if yes {
			good = at
		} else {
			bad = at
		}
	}
	return good, nil
}

// colocated returns the least fleet of nodes that do both which meets the objectives on the part.
func (s *search) colocated(node int) (Fleet, bool, error) {
	b := s.bounds[node]
	fleet := func(n int) Fleet { return Fleet{Node: node, Decode: n, Settings: s.Settings[0]} }
	if b.Nodes > s.MaxNodes {
		return fleet(b.Nodes), false, nil
	}
	n, err := least(b.Nodes, b.GuessColocated, s.MaxNodes, func(n int) (bool, error) { return s.meets(fleet(n)) })
	return fleet(n), err == nil && n <= s.MaxNodes, err
}

// pools returns the least fleets of prefill and decode nodes that meet the objectives on the part:
// all with the same number of nodes.
func (s *search) pools(node int) (best []Fleet, err error) {
	b := s.bounds[node]
	fleet := func(p, d int) Fleet { return Fleet{Node: node, Prefill: p, Decode: d, Settings: s.Settings[0]} }
	if b.Pools() > s.MaxNodes {
		return nil, nil
	}
	// A fleet with room in both pools, which grows until it meets the objectives.
	p, d := b.GuessPrefill, b.GuessDecode
	for p+d < s.MaxNodes {
		ok, err := s.meets(fleet(p, d))
		if err != nil {
			return nil, err
		}
		if ok {
			break
		}
		p, d = p+max(1, p/2), d+max(1, d/2)
	}
	if p+d >= s.MaxNodes {
		ok, err := false, error(nil)
		if p, ok, err = s.splitMost(b, p*s.MaxNodes/(p+d), fleet); err != nil || !ok {
			return nil, err
		}
		d = s.MaxNodes - p
	}
	high := d
	if d, err = least(max(b.Decode, b.Nodes-p), d, high, func(n int) (bool, error) { return s.meets(fleet(p, n)) }); err != nil {
		return nil, err
	}
	fewest := d // decode nodes, however many prefill nodes there are
	best = []Fleet{fleet(p, d)}
	first, err := least(max(1, b.Nodes-high), p, p, func(n int) (bool, error) { return s.meets(fleet(n, high)) })
	if err != nil {
		return best, err
	}
	// From there on, each prefill node may save decode nodes.
	for q, most := first, high; q+fewest <= best[0].Nodes(); q += max(1, q/32) {
		limit := min(most, best[0].Nodes()-q)
		n, err := least(max(fewest, b.Nodes-q), limit, limit, func(n int) (bool, error) { return s.meets(fleet(q, n)) })
		if err != nil {
			return best, err
		}
		if n > limit {
			continue
		}
		most = n
		f := fleet(q, n)
		if f.Nodes() < best[0].Nodes() {
			best = best[:0]
		}
		if !slices.Contains(best, f) {
			best = append(best, f)
		}
	}
	return best, nil
}

// splitMost returns the prefill nodes of a fleet of MaxNodes that meets the objectives on the part.
// It begins with a guess, and tries more of them before fewer.
func (s *search) splitMost(b Bounds, guess int, fleet func(p, d int) Fleet) (prefill int, ok bool, err error) {
	most := s.MaxNodes - b.Decode
	guess = min(max(guess, 1), most)
	splits := []int{guess}
	for p := guess; p < most; {
		p = min(p+max(1, p/2), most)
		splits = append(splits, p)
	}
	for p := guess; p > 1; {
		p -= max(1, p/3)
		splits = append(splits, p)
	}
	for _, p := range splits {
		if ok, err := s.meets(fleet(p, s.MaxNodes-p)); ok || err != nil {
			return p, ok, err
		}
	}
	return 0, false, nil
}

// Shares of the time and of memory above which a pool limits a fleet that fails.
const (
	busyPool = .85
	fullBusy = .93
	fullKV   = .9
)

// settle decides among fleets that are near to each other. It begins with the best of them, adds
// nodes until the objectives are met, and removes nodes while they are. It returns false if that
// fails.
func (s *search) settle(fleets []Fleet) (f Fleet, ok bool, err error) {
	if len(fleets) == 0 {
		return f, false, nil
	}
	f, ok, err = s.best(fleets)
	for step := max(1, f.Nodes()/32); err == nil && !ok; step += step / 2 {
		more := s.around(f, step)
		if len(more) == 0 {
			return f, false, nil
		}
		f, ok, err = s.best(more)
	}
	gallops := true // until a step was too large
	for step := max(1, f.Nodes()/32); err == nil; {
		var next Fleet
		var met bool
		if next, met, err = s.best(s.around(f, -step)); err != nil {
			break
		}
		switch {
		case met:
			if f = next; gallops && step > 1 { // near the end, every fleet next to the best one counts
				step *= 2
			}
		case step == 1:
			return f, ok, nil
		default:
			step /= 2
			gallops = false
		}
	}
	return f, ok, err
}

// mostForOne is the most nodes of one kind that take the place of a node of another kind.
const mostForOne = 8

// around returns the fleets with so many nodes more, or fewer, in one of the pools, and for one
// node fewer also those that have moved a node to the other pool. For two kinds of nodes, these are
// the fleets that cost less.
func (s *search) around(f Fleet, step int) (list []Fleet) {
	two := s.Nodes[f.Node].Prefill != nil
	add := func(prefill, decode int) {
		g := f
		g.Prefill, g.Decode = f.Prefill+prefill, f.Decode+decode
		if two && step < 0 && s.Price(g) >= s.Price(f) {
			return // fewer nodes may cost more, and more of them less
		}
		if g.Decode > 0 && (f.Prefill == 0) == (g.Prefill == 0) && g.Prefill >= 0 && g.Nodes() <= s.MaxNodes && g.Nodes() >= s.bounds[g.Node].Nodes {
			list = append(list, g)
		}
	}
	add(step, 0)
	add(0, step)
	if step == -1 {
		add(1, -2)
		add(-2, 1)
		for n := 1; two && n <= mostForOne; n *= 2 {
			add(n, -1)
			add(-1, n)
		}
	}
	return list
}

// best simulates fleets and returns the one with the largest margin, and whether it meets the
// objectives. Of fleets that meet them, it returns the cheapest, and of these the one with the
// highest goodput.
func (s *search) best(fleets []Fleet) (f Fleet, ok bool, err error) {
	if len(fleets) == 0 {
		return f, false, nil
	}
	cases := make([]Case, len(fleets))
	for i := range fleets {
		cases[i] = Case{Fleet: fleets[i], Part: s.part, Slow: s.slowness}
	}
	outcomes, err := s.run(cases...)
	if err != nil {
		return fleets[0], false, err
	}
	order := make([]int, len(fleets))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		a, b := outcomes[i], outcomes[j]
		if c := cmp.Compare(s.Price(fleets[i]), s.Price(fleets[j])); c != 0 && s.Meets(a) && s.Meets(b) {
			return c
		}
		return cmp.Or(compare(s.Meets(b), s.Meets(a)), cmp.Compare(math.Round(1e3*b.Goodput), math.Round(1e3*a.Goodput)), cmp.Compare(s.Margin(b), s.Margin(a)))
	})
	return fleets[order[0]], s.Meets(outcomes[order[0]]), nil
}

func compare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// tune returns the fleet with the settings that leave the largest margin on the part. Other
// settings than the first have to be clearly better.
func (s *search) tune(f Fleet) (Fleet, error) {
	s.part = true
	const clearly = .02
	margin := func(f Fleet) (float64, error) {
		o, err := s.run(Case{Fleet: f, Part: true})
		if err != nil {
			return 0, err
		}
		return s.Margin(o[0]) + o[0].Goodput, nil
	}
	most, err := margin(f)
	best := f
	for _, settings := range s.Settings[1:] {
		if err != nil {
			return best, err
		}
		g := f
		g.Settings = settings
		var m float64
		if m, err = margin(g); err == nil && m > most+clearly {
			best, most = g, m
		}
	}
	return best, err
}

// Price returns the price of an hour of a fleet in US dollars, or its GPUs if a kind of node has no
// price.
func (p *Problem) Price(f Fleet) float64 {
	n := &p.Nodes[f.Node]
	if k := n.prefill(); p.Priced() && k.Price != n.Price {
		return float64(f.Prefill)*k.Price + float64(f.Decode)*n.Price
	} else if p.Priced() {
		return float64(f.Nodes()) * n.Price
	} else if k.GPUs != n.GPUs {
		return float64(f.Prefill*k.GPUs + f.Decode*n.GPUs)
	}
	return float64(f.Nodes()) * float64(n.GPUs)
}

// Priced reports whether all kinds of nodes have a price.
func (p *Problem) Priced() bool {
	return !slices.ContainsFunc(p.Nodes, func(n Node) bool { return n.Price == 0 || n.prefill().Price == 0 })
}

// check returns an error for problems without a plan, whatever the number of nodes.
func (s *search) check() error {
	if len(s.Nodes) == 0 || len(s.Requests) == 0 || len(s.Objectives) == 0 || len(s.Settings) == 0 || s.Simulate == nil {
		return fmt.Errorf("%w: nodes, requests, objectives, settings and a simulator are needed", ErrProblem)
	}
	if s.Budget < s.Whole {
		return fmt.Errorf("%w: a budget of %d simulated requests is less than one simulation of %d: raise it to %d or more", ErrProblem, s.Budget, s.Whole, 20*s.Whole)
	}
	return nil
}
