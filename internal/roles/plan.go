package roles

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner/pools"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
)

// runPlanPools chooses the numbers of prefill and decode nodes for a load.
func runPlanPools(v *cli.Invocation) error {
	var o pools.Options
	api := poolFlags(v.Set, &o)
	decode := v.Set.String("decode-profile", "", "") // not in the help
	v.Set.Lookup("decode-profile").Hidden = true
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if *decode != "" {
		return fmt.Errorf("%w: --decode-profile %s: give the decode nodes to --profile, and those of prefill nodes to --prefill-profile", config.ErrValue, *decode)
	}
	if len(*api) != 0 && len(*api) != 2 {
		return fmt.Errorf("%w: --api-price has %d prices: give two, for a million prompt tokens and for a million answer tokens, such as 0.05,0.40", config.ErrValue, len(*api))
	}
	if len(*api) == 2 {
		o.APIInput, o.APIOutput = (*api)[0], (*api)[1]
	}
	o.Command = "tandem plan pools " + cli.Quoted(v.Arguments)
	useMachine(v, &o)
	return computed(&o, func() error { return pools.Run(&o, v.Out) })
}

// computed runs simulations until a signal.
func computed(o *pools.Options, simulations func() error) error {
	err := cli.UntilSignal(simulations)
	var signal process.Stopped
	if errors.As(err, &signal) && o.Progress != nil {
		o.Progress(pools.Progress{}) // clears the line
	}
	return ofPools(err)
}

// useMachine has simulations use every processor, and show their progress on a terminal.
func useMachine(v *cli.Invocation, o *pools.Options) {
	o.Workers = runtime.GOMAXPROCS(0)
	if !cli.Draws(os.Stderr) {
		return
	}
	o.Progress = func(p pools.Progress) {
		fmt.Fprint(v.ErrOut, "\r\x1b[K")
		if p.Budget > 0 {
			fmt.Fprintf(v.ErrOut, "simulated %d requests of at most %d; %s with %d requests is running", p.Simulated, p.Budget, p.Running, p.Requests)
		}
	}
}

// ofPools returns an error of a plan as one that the user can correct.
func ofPools(err error) error {
	if errors.Is(err, pools.ErrOption) {
		return fmt.Errorf("%w: %s", config.ErrValue, strings.TrimPrefix(err.Error(), pools.ErrOption.Error()+": "))
	}
	return err
}

// poolFlags declares the flags of tandem plan pools.
func poolFlags(s *config.Set, o *pools.Options) (api *[]float64) {
	s.First("profile", "trace", "load", "ttft", "tpot", "price-per-hour")
	s.Values("shape", pools.Shapes...)
	s.Section("Load")
	s.StringVar(&o.Trace, "trace", "", "trace of the load: JSON lines of Mooncake's format or the CSV of Azure's, compressed by gzip or not")
	s.StringArrayVar(&o.Loads, "load", nil, `requests to draw instead of a trace, such as "rps=10,n=2000,in=lognormal(8,0.9),out=343,prefix=0.3", as tandem sim takes them; several are tenants, which may have names: "chat: rps=10,…"`)
	s.CountVar(&o.Requests, "num-prompts", 0, 0, "requests of the trace or of each load; 0: all of the trace, or the n of the load")
	s.Float64Var(&o.Growth, "growth", 1, "factor on the pace of the load to plan for, such as 1.3 for a growth of 30 %")
	s.Uint64Var(&o.Seed, "seed", 0, "seed of drawn requests and of the router's draws")
	s.BoolVar(&o.DropTooLong, "drop-too-long", false, "leave out requests that are longer than a node can serve")
	goalFlags(s, o)
	s.Section("Nodes")
	s.StringSliceVar(&o.Profiles, "profile", nil, "step times of the kinds of nodes to choose from: files, or estimates by name, GPU:MODEL or NxGPU:MODEL, such as 4xh100:llama-70b. GPUs: "+profile.GPUs()+"; models: "+profile.Models())
	s.StringSliceVar(&o.PrefillProfiles, "prefill-profile", nil, "step times of kinds of prefill nodes, in the same form: also consider fleets with prefill nodes of these and decode nodes of --profile. KV moves between nodes of one numerics class only (tandem status)")
	s.IntSliceVar(&o.GPUs, "gpus-per-node", nil, "numbers of GPUs that compute one model (--tensor-parallel-size) to choose from, such as 1,2,4; only for estimates by name; default: that of the profile")
	s.BoolVar(&o.CompareEstimates, "compare-estimates", false, "compare measured profiles with estimates")
	s.StringVar(&o.Shape, "shape", "auto", "fleets to choose from: pools of prefill and decode nodes, colocated nodes that do both, or auto, both")
	s.CountVar(&o.MaxNodes, "max-nodes", 64, 1, "most nodes of a fleet")
	s.CountVar(&o.Spare, "spare", 0, 0, "nodes to add to each pool")
	s.IntSliceVar(&o.BatchedTokens, "max-num-batched-tokens", []int{scheduler.DefaultMaxBatchedTokens, 512, 8192}, "tokens of a step to choose from; the first is taken unless another one is clearly better")
	s.CountVar(&o.MaxSeqs, "max-num-seqs", scheduler.DefaultMaxSeqs, 1, "requests that a node runs at once")
	s.IntSliceVar(&o.MinRemote, "min-remote-prefill-tokens", []int{gateway.DefaultMinRemotePrefillTokens, 512, 1}, "uncached tokens from which on prompts are computed by prefill nodes, to choose from; 1: always")
	s.CountVar(&o.Gateways, "gateways", 1, 1, "gateways among which requests are spread in turn")
	costFlags(s, o)
	api = s.Float64Slice("api-price", nil, "US dollars of an API for a million prompt tokens and for a million answer tokens, such as 0.05,0.40, to compare with")
	s.Section("Search and output")
	s.CountVar(&o.Budget, "budget", 1_000_000, 1, "requests that are simulated at most, of all fleets together")
	s.StringVar(&o.HTML, "html", "", "file to write the plan to as one HTML page with plots")
	s.StringVar(&o.Helm, "helm", "", "file to write the fleet to as values of the Helm chart")
	s.BoolVar(&o.Up, "up", false, "print only the command that starts the fleet on one machine")
	s.BoolVar(&o.Explain, "explain", false, "also print how each number was derived")
	s.BoolVar(&o.JSON, "json", false, "print the plan as one JSON object")
	return api
}

// goalFlags declares the objectives of a plan.
func goalFlags(s *config.Set, o *pools.Options) {
	s.Section("Objectives")
	s.StringVar(&o.TTFT, "ttft", "p90=2s", "time to the first token of a share of the requests, such as p90=2s; empty: no objective")
	s.StringVar(&o.TPOT, "tpot", "p90=50ms", "mean time per further token, in the same form")
	s.StringVar(&o.ITL, "itl", "", "times between tokens, of all requests together, in the same form")
	s.StringVar(&o.E2EL, "e2el", "", "time to the last token, in the same form")
	s.Float64Var(&o.Goodput, "goodput-share", 0, "share of the requests that have to be within every limit, such as 0.95; 0: only the percentiles count")
}

// costFlags declares the prices of nodes.
func costFlags(s *config.Set, o *pools.Options) {
	s.Section("Cost")
	s.Float64SliceVar(&o.Prices, "price-per-hour", nil, "US dollars for a node and hour, one for all profiles or one for each, those of --prefill-profile last, instead of the profile's")
	s.Float64Var(&o.Overhead, "overhead", 0, "share that is added to the price of nodes, such as 0.1 for gateways and staff")
	s.Float64Var(&o.Machine.Capex, "capex", 0, "price of purchase of a node, instead of a price per hour; 0: none")
	s.Float64Var(&o.Machine.Years, "capex-years", 4, "years until --capex is written off")
	s.Float64Var(&o.Machine.Availability, "availability", 0.95, "share of the time in which a bought node works")
	s.Float64Var(&o.Machine.Watts, "watts", 0, "power of a bought node; 0: the profile's")
	s.Float64Var(&o.Machine.PUE, "pue", 1.3, "power of the data center for each watt of a bought node")
	s.Float64Var(&o.Machine.PerKWh, "price-per-kwh", 0.12, "US dollars for a kilowatt hour")
	s.Float64Var(&o.Machine.Ops, "ops-per-hour", 0, "US dollars for an hour of a bought node's place and care")
}
