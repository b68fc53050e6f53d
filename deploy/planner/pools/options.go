// Package pools is the commands `tandem plan pools` and `tandem advise`. It reads a load and
// profiles of nodes, has deploy/planner choose the numbers of nodes, and prints the plan. For a
// fleet that runs, it compares the simulation with what was measured, and prints what to change.
//
// Fleets are simulated by bench/sim/fleet, with the real router, queue and scheduler. Prices are
// computed by internal/cost.
//
// Invariant: the output depends on the options, the profiles and the load only. Every row that
// rests on an estimate is marked.
//
// The package reads no clock and uses no network.
package pools

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/internal/cost"
)

// ErrOption is wrapped by every error that the user can correct.
var ErrOption = errors.New("pools: bad option")

// Options are the settings of a plan.
type Options struct {
	Command string // that repeats the plan

	Profiles          []string
	PrefillProfiles   []string // of prefill nodes, for fleets whose decode nodes are of Profiles
	GPUs              []int    // for each model, of estimates; empty: those of the profile
	CompareEstimates  bool
	Trace             string
	Loads             []string // several are tenants, of which each may have a name
	Requests          int      // of the trace or of each load; 0: all
	Growth            float64  // factor on the pace of the load
	Seed              uint64
	DropTooLong       bool
	TTFT, TPOT        string // such as p90=2s; empty: no objective
	ITL, E2EL         string
	Goodput           float64 // share of requests
	Shape             string  // of the fleets; one of Shapes
	MaxNodes, Spare   int
	Budget            int   // simulated requests
	BatchedTokens     []int // that are tried; the first one until nodes are found
	MaxSeqs           int
	MinRemote         []int
	Gateways, Workers int

	Prices              []float64 // per hour of a node, one for all or one for each profile
	Overhead            float64
	Machine             cost.Machine // with Capex: its price instead of Prices
	APIInput, APIOutput float64      // US dollars for a million tokens of an API; 0: none

	// Progress, if not nil, is called before and after each simulation, by one goroutine at a time,
	// and at last with the zero Progress.
	Progress func(Progress)

	JSON, Explain, Up bool
	HTML, Helm        string // files
}

// Progress is how far the search for a plan is.
type Progress struct {
	Running           string // size of the fleet whose simulation began last
	Requests          int    // of its simulation
	Simulated, Budget int    // requests of all simulations that have ended; at most Budget
}

// Shapes are the kinds of fleets that can be planned.
var Shapes = []string{"auto", "pools", "colocated"}

// objective matches p90=2s, and 2s, which is p90.
var objective = regexp.MustCompile(`^(?:[pP](\d{1,2}(?:\.\d+)?|100)=)?([^=]+)$`)

// defaultPercentile is the percentile of an objective that names none.
const defaultPercentile = 90

// parseObjective parses such as p90=2s.
func parseObjective(flag string, m planner.Metric, text string) (o planner.Objective, err error) {
	parts := objective.FindStringSubmatch(text)
	if parts != nil {
		o = planner.Objective{Metric: m, Percentile: defaultPercentile}
		if parts[1] != "" {
			o.Percentile, _ = strconv.ParseFloat(parts[1], 64)
		}
		o.Limit, err = time.ParseDuration(parts[2])
	}
	if parts == nil || err != nil || o.Limit <= 0 || o.Limit > time.Hour {
		return o, fmt.Errorf("%w: --%s %s: write a percentile and a time up to 1h, such as p90=2s or p99=50ms", ErrOption, flag, text)
	}
	return o, nil
}

// objectives returns the objectives of the options.
func (o *Options) objectives() (list []planner.Objective, err error) {
	for _, f := range []struct {
		flag, text string
		metric     planner.Metric
	}{{"ttft", o.TTFT, planner.TTFT}, {"tpot", o.TPOT, planner.TPOT}, {"itl", o.ITL, planner.ITL}, {"e2el", o.E2EL, planner.E2EL}} {
		if f.text == "" {
			continue
		}
		g, err := parseObjective(f.flag, f.metric, f.text)
		if err != nil {
			return nil, err
		}
		list = append(list, g)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: there is no objective: give at least one, such as --ttft p90=2s --tpot p90=50ms", ErrOption)
	}
	return list, nil
}

// wrap marks an error of another package as one that the user can correct. Its text is the
// sentence for the user.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, kind := range []error{sim.ErrTrace, sim.ErrLoad, profile.ErrProfile, fleet.ErrOptions, fleet.ErrStuck, planner.ErrProblem} {
		text = strings.TrimPrefix(text, kind.Error()+": ")
	}
	return fmt.Errorf("%w: %s", ErrOption, text)
}

// check returns an error for figures out of range.
func (o *Options) check() error {
	for _, f := range []struct {
		flag        string
		value       float64
		least, most float64
	}{
		{"growth", o.Growth, 1e-3, 1e3}, {"goodput-share", o.Goodput, 0, 1}, {"max-nodes", float64(o.MaxNodes), 1, maxNodes}, {"spare", float64(o.Spare), 0, maxNodes},
		{"budget", float64(o.Budget), 1, maxBudget}, {"max-num-seqs", float64(o.MaxSeqs), 1, 1 << 20}, {"gateways", float64(o.Gateways), 1, 1000},
		{"overhead", o.Overhead, 0, 10}, {"capex", o.Machine.Capex, 0, 1e9}, {"capex-years", o.Machine.Years, .1, 100}, {"availability", o.Machine.Availability, .01, 1},
		{"watts", o.Machine.Watts, 0, 1e6}, {"pue", o.Machine.PUE, 1, 10}, {"price-per-kwh", o.Machine.PerKWh, 0, 100}, {"ops-per-hour", o.Machine.Ops, 0, 1e6},
		{"api-price input", o.APIInput, 0, 1e6}, {"api-price output", o.APIOutput, 0, 1e6},
	} {
		if !(f.value >= f.least && f.value <= f.most) {
			return fmt.Errorf("%w: --%s %g: want %g to %g", ErrOption, f.flag, f.value, f.least, f.most)
		}
	}
	if len(o.Prices) > 0 && o.Machine.Capex > 0 {
		return fmt.Errorf("%w: of --price-per-hour and --capex only one can be the price of a node: leave one", ErrOption)
	}
	for _, price := range o.Prices {
		if !(price >= 0 && price <= 1e6) {
			return fmt.Errorf("%w: --price-per-hour %g: want US dollars for an hour of a node, 0 to 1e6", ErrOption, price)
		}
	}
	for _, n := range o.BatchedTokens {
		if n < o.MaxSeqs || n > 1<<20 {
			return fmt.Errorf("%w: --max-num-batched-tokens %d: want at least the %d of --max-num-seqs, and at most %d", ErrOption, n, o.MaxSeqs, 1<<20)
		}
	}
	for _, n := range o.MinRemote {
		if n < 0 || n > maxMinRemote {
			return fmt.Errorf("%w: --min-remote-prefill-tokens %d: want 0 to %d", ErrOption, n, maxMinRemote)
		}
	}
	if o.JSON && (o.Up || o.Explain) || o.Up && o.Explain {
		return fmt.Errorf("%w: of --json and --up and --explain only one can be printed: leave one", ErrOption)
	}
	if !slices.Contains(Shapes, o.Shape) {
		return fmt.Errorf("%w: --shape %s: want one of %s", ErrOption, o.Shape, strings.Join(Shapes, ", "))
	}
	return nil
}

// Bounds of --max-nodes, --budget and --min-remote-prefill-tokens.
const (
	maxMinRemote = 1 << 20

	maxNodes  = 10_000
	maxBudget = 1e9
)

// readKinds reads the profiles. Estimates by name become one for each number of GPUs. Each profile
// of prefill nodes makes a kind with each profile to whose nodes it can send KV.
func (o *Options) readKinds() (list []kind, err error) {
	if len(o.Profiles) == 0 {
		return nil, fmt.Errorf("%w: --profile is missing: give a file, or an estimate by name such as h200:llama-8b (GPUs: %s; models: %s)", ErrOption, profile.GPUs(), profile.Models())
	}
	names := slices.Concat(o.Profiles, o.PrefillProfiles)
	if n := len(o.Prices); n > 1 && n != len(o.Profiles) && n != len(names) {
		return nil, fmt.Errorf("%w: --price-per-hour has %d prices for %d profiles: give one price for all, or one for each, those of --profile first", ErrOption, n, len(names))
	}
	if len(o.PrefillProfiles) > 0 && o.Shape == "colocated" {
		return nil, fmt.Errorf("%w: --prefill-profile with --shape colocated, which has no prefill nodes: leave one of them out", ErrOption)
	}
	var all, prefills []*profile.Profile
	for i, name := range names {
		p, err := profile.Load(name)
		if err != nil {
			return nil, wrap(err)
		}
		o.setPrice(p, i)
		more := []*profile.Profile{p}
		if len(o.GPUs) > 0 {
			if more, err = withGPUs(name, p, o.GPUs); err != nil {
				return nil, err
			}
		}
		if all = append(all, more...); i < len(o.Profiles) {
			for _, p := range more {
				list = append(list, kind{Profile: p})
			}
		} else {
			prefills = append(prefills, more...)
		}
	}
	if err := comparable(all, o.CompareEstimates); err != nil {
		return nil, err
	}
	for _, q := range prefills {
		pairs := 0
		for _, k := range list {
			if e := profile.CheckPools(q, k.Profile); k.prefill != nil {
				continue
			} else if e != nil {
				err = cmp.Or(err, e)
				continue
			}
			pairs++
			if q.Node.Name != k.Node.Name {
				list = append(list, kind{k.Profile, q})
			}
		}
		if pairs == 0 {
			return nil, wrap(err)
		}
	}
	return list, nil
}

// setPrice sets the price of the i-th profile.
func (o *Options) setPrice(p *profile.Profile, i int) {
	if n := len(o.Prices); n == 1 || i < n {
		p.Node.Price = o.Prices[min(i, n-1)]
	}
	if o.Machine.Capex > 0 {
		m := o.Machine
		m.Watts = cmp.Or(m.Watts, p.Node.Watts)
		p.Node.Price = m.PerHour()
	}
}

// withGPUs returns an estimate with other numbers of GPUs for each model, at the same price for a
// GPU. Numbers that leave no KV memory are left out.
func withGPUs(name string, p *profile.Profile, gpus []int) (list []*profile.Profile, err error) {
	if _, known, _ := profile.Named(name); !known {
		return nil, fmt.Errorf("%w: --gpus-per-node: %s is a file, which has one number of GPUs: give a profile for each number", ErrOption, name)
	}
	if _, after, found := strings.Cut(name, "x"); found && strings.HasPrefix(name, strconv.Itoa(p.Node.TP)+"x") {
		name = after
	}
	for _, n := range gpus {
		named := name
		if n != 1 {
			named = fmt.Sprintf("%dx%s", n, name)
		}
		q, _, e := profile.Named(named)
		if e != nil {
			err = cmp.Or(err, e)
			continue
		}
		q.Node.Price = p.Node.Price / float64(p.Node.TP) * float64(n)
		list = append(list, q)
	}
	if len(list) == 0 {
		return nil, wrap(err)
	}
	return list, nil
}

// comparable returns an error for profiles whose figures cannot be compared: of different models,
// or of different sources.
func comparable(list []*profile.Profile, mixed bool) error {
	first := list[0]
	for _, p := range list[1:] {
		if a, b := &first.Model, &p.Model; a.Name != b.Name || a.Layers != b.Layers || a.Fingerprint != b.Fingerprint && a.Fingerprint != "" && b.Fingerprint != "" {
			return fmt.Errorf("%w: profile %s is of model %s, and %s of %s: give profiles of one model, and make a plan for each model", ErrOption, first.Node.Name, describeModel(a), p.Node.Name, describeModel(b))
		}
		if (first.Step.Source == profile.Estimate) != (p.Step.Source == profile.Estimate) && !mixed {
			return fmt.Errorf("%w: profile %s is %s, and %s is %s: measure both, or add --compare-estimates to compare them although the estimate may be wrong by more than they differ", ErrOption, first.Node.Name, first.Basis(), p.Node.Name, p.Basis())
		}
	}
	return nil
}

func describeModel(m *profile.Model) string {
	text := fmt.Sprintf("%s with %d layers", cmp.Or(m.Name, "an unnamed one"), m.Layers)
	if m.Fingerprint != "" {
		text += " and weights " + m.Fingerprint
	}
	return text
}
