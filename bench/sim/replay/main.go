// Command replay plays a trace against simulated fleets and prints one line of
// figures for each.
//
//	go run ./bench/sim/replay -trace TRACE.jsonl[.gz] -fleet 0P8D,6P2D -policy round_robin,prefix -speedup 3
//
// The figures have the names of `tandem bench serve`. Times are virtual: they depend only
// on the trace and the flags.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/gateway/route"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "replay:", err)
		os.Exit(1)
	}
}

// options are the command's flags.
type options struct {
	trace, mix, fleets, policies, steps string
	requests                            int
	rate                                float64
	goals                               fleet.Goals
	fleet                               fleet.Options
}

func run(args []string, w io.Writer) error {
	var o options
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.StringVar(&o.trace, "trace", "bench/sim/testdata/mooncake_conversation.jsonl.gz", "trace in Mooncake's format, .gz or not")
	f.StringVar(&o.mix, "mix", "", "instead of a trace, drawn requests: SHARE:PROMPT:ANSWER with commas, such as 0.8:64:96,0.2:1024:16")
	f.IntVar(&o.requests, "requests", 10_000, "of the mix")
	f.Float64Var(&o.rate, "rate", 1, "of the mix: requests per second")
	f.StringVar(&o.fleets, "fleet", "0P8D", "fleets to play, with commas: 6P2D has 6 prefill and 2 decode nodes, 0P8D 8 colocated ones")
	f.StringVar(&o.policies, "policy", "prefix", "policies of the gateway, with commas: "+route.Policies())
	f.StringVar(&o.steps, "steps", "dynamo", "step times: "+fleet.StepTimesNames())
	f.Float64Var(&o.fleet.Speedup, "speedup", 1, "divides the times between arrivals")
	f.IntVar(&o.fleet.Blocks, "blocks", 2000, "KV blocks of a node")
	f.IntVar(&o.fleet.BlockTokens, "block-tokens", sim.BlockTokens, "tokens of a block")
	f.IntVar(&o.fleet.BatchedTokens, "max-num-batched-tokens", fleet.DefaultBatchedTokens, "tokens of a step")
	f.IntVar(&o.fleet.MaxSeqs, "max-num-seqs", fleet.DefaultMaxSeqs, "requests that a node runs at once")
	f.IntVar(&o.fleet.MinRemote, "min-remote-prefill-tokens", fleet.DefaultMinRemote, "uncached tokens from which prefill nodes are asked; 1: always")
	f.DurationVar(&o.fleet.Heartbeat, "heartbeat", 0, "time between two reports of a node; 0: none, the gateway knows its own requests and all rates")
	f.DurationVar(&o.fleet.GrantTimeout, "grant-timeout", 0, "after which a grant without room goes to the next prefill node; 0: never")
	f.BoolVar(&o.fleet.NoEvents, "no-block-events", false, "gateways get no block events")
	f.BoolVar(&o.fleet.NoRoom, "no-room", false, "the router ignores KV memory")
	f.Uint64Var(&o.fleet.Seed, "seed", 1, "of the router's draws, and of the mix")
	f.DurationVar(&o.goals.TTFT, "ttft", 2*time.Second, "goodput: longest time to the first token")
	f.DurationVar(&o.goals.TPOT, "tpot", 50*time.Millisecond, "goodput: longest mean time per further token")
	if err := f.Parse(args); err != nil {
		return err
	}
	trace, err := o.load()
	if err != nil {
		return err
	}
	if o.fleet.Steps, err = fleet.StepTimesOf(o.steps); err != nil {
		return err
	}
	fmt.Fprintf(w, "%d requests; step times: %s\n\n", len(trace), o.fleet.Steps.Source)
	fmt.Fprintln(w, "| fleet | policy | TTFT mean ms | p50 | p90 | p99 | ITL mean ms | p99 | out tok/s | goodput | reuse | prompts on decode | waited for room | preempted | P busy | D busy |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
	for size := range strings.SplitSeq(o.fleets, ",") {
		if _, err := fmt.Sscanf(size, "%dP%dD", &o.fleet.Prefill, &o.fleet.Decode); err != nil {
			return fmt.Errorf("fleet %q, want such as 6P2D: %w", size, err)
		}
		for name := range strings.SplitSeq(o.policies, ",") {
			if o.fleet.Policy, err = route.ParsePolicy(name); err != nil {
				return err
			}
			r, err := fleet.Run(trace, o.fleet)
			if err != nil {
				return err
			}
			s := r.Summarize(o.goals)
			ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
			fmt.Fprintf(w, "| %s | %s | %.1f | %.1f | %.1f | %.1f | %.2f | %.2f | %.1f | %.3f | %.3f | %.2f | %.2f | %d | %.2f | %.2f |\n", size, name,
				ms(s.TTFTMean), ms(s.TTFTP50), ms(s.TTFTP90), ms(s.TTFTP99), ms(s.ITLMean), ms(s.ITLP99), s.TokensPerSecond,
				s.Goodput, r.Reuse, float64(r.Local)/float64(len(trace)), float64(r.Waited)/float64(len(trace)), r.Preemptions, r.PrefillBusy, r.DecodeBusy)
		}
	}
	return nil
}

// load reads the trace or draws the mix.
func (o *options) load() ([]sim.Request, error) {
	if o.mix == "" {
		return sim.LoadTrace(o.trace)
	}
	if o.requests < 1 || !(o.rate > 0) {
		return nil, fmt.Errorf("%d requests at %g per second: both have to be positive", o.requests, o.rate)
	}
	kinds, err := sim.ParseMix(o.mix)
	if err != nil {
		return nil, err
	}
	return sim.Mix(kinds, o.requests, o.rate, o.fleet.Seed), nil
}
