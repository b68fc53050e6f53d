package roles

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/simulate"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/limits"
)

// runSim simulates a fleet in virtual time.
func runSim(v *cli.Invocation) error {
	o := simulate.Options{Limits: limits.Default(), GrantTimeout: simGrantTimeout, RoundTrip: fleet.DefaultRoundTrip}
	v.Arguments = bench.JoinLists(v.Arguments)
	printProfile := simFlags(v.Set, &o)
	if _, err := v.Parse(0); err != nil {
		return err
	}
	o.Command = "tandem sim " + cli.Quoted(v.Arguments)
	run := simulate.Run
	if *printProfile {
		run = simulate.PrintProfile
	}
	err := cli.UntilSignal(func() error { return run(&o, v.Out) })
	if errors.Is(err, simulate.ErrOption) {
		return fmt.Errorf("%w: %s", config.ErrValue, strings.TrimPrefix(err.Error(), simulate.ErrOption.Error()+": "))
	}
	return err
}

// simGrantTimeout is the time that decode nodes give a grant (decode.Options).
const simGrantTimeout = 2 * time.Second

// simFlags declares the flags of tandem sim.
func simFlags(s *config.Set, o *simulate.Options) (printProfile *bool) {
	l := &o.Limits
	s.First("fleet", "profile", "trace", "load", "goodput", "event", "html", "save-result")
	s.Section("Fleet and load")
	s.Values("policy", strings.Split(route.Policies(), ", ")...)
	s.StringVar(&o.Fleet, "fleet", "1P1D", "nodes: 6P2D has 6 prefill and 2 decode nodes, 8D 8 nodes that do both")
	s.StringVar(&o.Profile, "profile", "", "step times of a node: a profile's file, or an estimate by name, GPU:MODEL or NxGPU:MODEL, such as 4xh100:llama-70b. GPUs: "+profile.GPUs()+"; models: "+profile.Models())
	s.StringVar(&o.PrefillProfile, "prefill-profile", "", "step times of prefill nodes, in the same form; empty: those of --profile. KV moves between nodes of one numerics class only (tandem status)")
	printProfile = s.Bool("print-profile", false, "print the profile as a file that --profile reads, and exit")
	s.StringVar(&o.Trace, "trace", "", "trace to play: JSON lines of Mooncake's format or the CSV of Azure's, compressed by gzip or not")
	s.StringVar(&o.Load, "load", "", `requests to draw instead of a trace, such as "rps=10,n=2000,in=lognormal(8,0.9),out=343,prefix=0.3". Lengths: 343, 100-2000, lognormal(MU,SIGMA) or exp(MEAN) tokens; prefix: the share of prompts that others have in common; further keys: prefixes, burstiness`)
	s.CountVar(&o.Requests, "num-prompts", 0, 0, "requests of the trace or load; 0: all of the trace, or the n of the load")
	s.Float64Var(&o.Speedup, "speedup", 1, "factor on the pace of the requests")
	s.StringSliceVar(&o.Events, "event", nil, `changes of the fleet at times since the start: "120s kill decode-1", "60s drain prefill-0 10s", "90s start decode-2", "2m kill gateway-0", "30s cancel 10%"; may be repeated`)
	s.Uint64Var(&o.Seed, "seed", 0, "seed of drawn requests, of the router's draws and of the requests that an event cancels")
	s.Float64Var(&o.Price, "price-per-hour", -1, "US dollars for a node and hour, instead of the profile's; 0: no cost is printed")
	s.Section("Gateways")
	s.CountVar(&o.Gateways, "gateways", 1, 1, "gateways among which requests are spread in turn")
	s.StringVar(&o.Policy, "policy", "prefix", "routing policy: prefix, consistent_hash, least_load, power_of_two, round_robin or session")
	s.CountVar(&o.MinRemote, "min-remote-prefill-tokens", gateway.DefaultMinRemotePrefillTokens, 0, "prompts with fewer uncached tokens are prefilled on the decode node")
	s.CountVar(&l.MaxQueuedRequests, "max-queued-requests", l.MaxQueuedRequests, 1, "requests that may wait in the gateway while the fleet is full; further ones get 429")
	s.CountVar(&l.MaxQueuedTokens, "max-queued-tokens", l.MaxQueuedTokens, 1, "prompt tokens of the waiting requests; further requests get 429")
	s.SecondsVar(&l.QueueTimeout, "queue-timeout", false, "how long a request may wait in the gateway; a request that would wait longer is refused at once")
	s.CountVar(&l.NodeBacklog, "node-backlog-requests", l.NodeBacklog, 1, "requests that wait on a decode node in addition to the running ones; further ones wait in the gateway")
	s.SecondsVar(&l.NodeBacklogTime, "node-backlog-time", true, "prompts that wait on nodes, measured in the time to compute them; further ones wait in the gateway")
	s.SecondsVar(&l.RequestTimeout, "request-timeout", false, "longest duration of a request")
	s.CountVar(&l.MaxPromptTokens, "max-prompt-tokens", l.MaxPromptTokens, 0, "most tokens of a prompt; 0: the model's limit")
	s.CountVar(&l.MaxAttempts, "max-attempts", l.MaxAttempts, 1, "nodes on which a request is tried without receiving a token")
	s.SecondsVar(&l.ResumeTimeout, "resume-timeout", true, "how long a stream waits for another decode node after its node died")
	s.RateVar(&l.RetriesPerSecond, "retries-per-second", "retries on another node before the first token, of all requests together; bursts of ten seconds' worth")
	s.RateVar(&l.ResumesPerSecond, "resumes-per-second", "streams per second that move to another node after theirs was lost; the others follow in turn")
	s.SecondsVar(&o.Heartbeat, "heartbeat", false, "time between two reports of a node; 0: the profile's")
	s.SecondsVar(&o.ReportDelay, "report-delay", false, "time until heartbeats and block events reach the gateways; 0: the profile's")
	s.BoolVar(&o.NoEvents, "no-block-events", false, "gateways get no block events, as without NATS")
	s.Section("Nodes")
	s.CountVar(&o.MaxSeqs, "max-num-seqs", scheduler.DefaultMaxSeqs, 1, "requests that a node runs at once")
	s.CountVar(&o.BatchedTokens, "max-num-batched-tokens", scheduler.DefaultMaxBatchedTokens, 1, "tokens of a step")
	s.AutoVar(&o.MaxModelLen, "max-model-len", "tokens per sequence, such as 4096 or 32k; 0, auto or -1: the profile's")
	s.CountVar(&o.BlockTokens, "block-size", 0, 0, "tokens per KV block; 0: the profile's")
	s.CountVar(&o.Blocks, "num-gpu-blocks-override", 0, 0, "KV blocks of a node; 0: the profile's")
	s.SecondsVar(&o.Starts, "start-time", false, "time from the start of a node until it is ready; 0: the profile's")
	s.SecondsVar(&o.RoundTrip, "round-trip", false, "time of a message between two processes and back")
	s.Section("Report")
	s.StringSliceVar(&o.Metrics, "percentile-metrics", []string{"ttft", "tpot", "itl"}, "latencies to report: "+strings.Join(report.MetricNames(), ", "))
	s.Float64SliceVar(&o.Percentiles, "metric-percentiles", []float64{99}, "percentiles to report")
	s.StringArrayVar(&o.Goodput, "goodput", nil, "KEY:VALUE objectives in milliseconds, of ttft, tpot and e2el; goodput counts the requests that meet all")
	s.BoolVar(&o.Save, "save-result", false, "write the figures as JSON")
	s.BoolVar(&o.Detailed, "save-detailed", false, "include each request's own figures")
	s.StringVar(&o.File, "result-filename", "", "name of the JSON; default: LABEL-FLEET.json")
	s.StringVar(&o.Label, "label", "", "label in the JSON, and prefix of its name; default: sim")
	s.StringVar(&o.Compare, "compare", "", "result that tandem bench serve --save-result wrote for the same load: its figures are printed next to the predicted ones, with the error")
	s.StringVar(&o.HTML, "html", "", "file to write the result to as one HTML page")
	return printProfile
}
