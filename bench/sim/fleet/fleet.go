// Package fleet simulates whole fleets in virtual time. The real router (gateway/route), queue
// (gateway/admit), scheduler (engine/scheduler) and KV block pool (engine/kvcache) run on every
// gateway and node.
//
// Two things are modelled: the duration of a step (StepTimes), and the duration of messages and
// transfers. As in a node, the engine answers only between two steps. Prefill nodes use the real
// line (prefill/line), decode nodes the real course over them (decode/course), and requests whose
// node dies the real rule of retries (gateway/exchange/choice).
// Gateways learn about nodes as in a cluster: by heartbeats, block events and their own decisions.
//
// Invariant: equal traces, options and seeds give equal results. Every request is served once or
// ends with an error, and the conservation laws of every scheduler hold at the end.
//
// The package does not model speculation, adapters, keys with different weights, partitions, or
// gateways that are themselves the limit.
package fleet

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/limits"
)

// Defaults of Options.
const (
	DefaultBatchedTokens = 8192
	DefaultMaxSeqs       = 256
	DefaultRoundTrip     = 400 * time.Microsecond
	DefaultBandwidth     = 12.5e9
	DefaultKVBytes       = 131_072 // Llama-3.1-8B in bfloat16
	DefaultLayers        = 32
	DefaultMinRemote     = 16
)

// maxIdle is the virtual time without progress after which a run ends with ErrStuck.
const maxIdle = time.Hour

// ErrOptions means that no fleet can have such options.
var ErrOptions = errors.New("fleet: bad options")

// ErrStuck means that requests wait for something that will not happen.
var ErrStuck = errors.New("fleet: nothing will happen")

// Options describe a fleet and its load.
type Options struct {
	Prefill, Decode int // nodes; without prefill nodes the decode nodes are colocated
	Gateways        int // among which requests are spread in turn; 0: 1
	Blocks          int // of each node's pool
	BlockTokens     int
	BatchedTokens   int // of a step; 0: DefaultBatchedTokens
	MaxSeqs         int // running requests of a node; 0: DefaultMaxSeqs
	MaxModelLen     int // tokens of a request; 0: what the pool holds
	Steps           StepTimes

	Policy    route.Policy
	MinRemote int    // as --min-remote-prefill-tokens; 0: DefaultMinRemote, 1: always remote
	Seed      uint64 // of the router's random choices, the order of grants, and the choice of cancelled requests
	// Placing varies what a policy leaves to chance: the places of nodes on the hash ring,
	// and round robin's first node.
	Placing int
	// Names and Keys are those of a real fleet on the same trace, so that both place prompts alike:
	// the nodes' names, and the ring key of each request's prompt. Nil: they are made up.
	Names    func(Target) string
	Keys     []kvcache.Hash
	NoEvents bool // gateways get no block events
	NoRoom   bool // the router ignores KV memory
	// Limits are those of the gateways; nil: requests are refused only if no node can hold them.
	Limits *limits.Limits

	// Heartbeat is the time between two reports of a node while its load changes. With 0, gateways
	// know the current prefill rates and count only their own requests.
	Heartbeat   time.Duration
	ReportDelay time.Duration // from a heartbeat or a block event to the gateways

	StepTime     time.Duration // that prefill nodes aim at for a step; 0: only BatchedTokens bounds it
	RunAhead     int           // prompt tokens that a prefill node starts before they are computed; 0: 2 × BatchedTokens
	GrantTimeout time.Duration // after which a decode node tries the next prefill node; 0: never
	RoundTrip    time.Duration // between two nodes; 0: DefaultRoundTrip
	Bandwidth    float64       // bytes per second of a transfer; 0: DefaultBandwidth
	Link         float64       // bytes per second of a node's link, which its transfers share; 0: not a limit
	PrefillKind  *Kind         // of prefill nodes; nil: that of decode nodes
	Setup        time.Duration // of a transfer
	KVBytes      float64       // of a token; 0: DefaultKVBytes
	Layers       int           // which are sent one by one; 0: DefaultLayers
	Dispatch     time.Duration // from a request's arrival at its gateway to its node
	Emit         time.Duration // from the end of a step to the client
	Start        time.Duration // from the start of a node until it is ready
	Events       []Event       // in order of time
	Speedup      float64       // divides the times between arrivals; 0: 1
	KeepGaps     bool          // keep the times between the tokens of each request
	SampleEvery  time.Duration // between two Samples of the result; 0: none
	Stepwise     bool          // plan no step ahead; the result is the same

	// Control, if set, is called every ControlEvery. Its events, none of them a Cancel, happen at
	// once. Nodes that it starts must be in the fleet: an event that is never reached adds them.
	Control      func(*Sample) []Event
	ControlEvery time.Duration
}

// Kind is what distinguishes one kind of nodes from another.
type Kind struct {
	Steps  StepTimes
	Blocks int           // of a node's pool
	Link   float64       // as Options.Link
	Start  time.Duration // as Options.Start
}

// kinds returns the kinds of decode and of prefill nodes.
func (o *Options) kinds() (decode, prefill *Kind) {
	decode = &Kind{o.Steps, o.Blocks, o.Link, o.Start}
	return decode, cmp.Or(o.PrefillKind, decode)
}

// resolve sets defaults and checks the options.
func (o *Options) resolve() error {
	setDefault(&o.Gateways, 1)
	setDefault(&o.BatchedTokens, DefaultBatchedTokens)
	setDefault(&o.MaxSeqs, DefaultMaxSeqs)
	setDefault(&o.MinRemote, DefaultMinRemote)
	setDefault(&o.RunAhead, 2*o.BatchedTokens)
	setDefault(&o.RoundTrip, DefaultRoundTrip)
	setDefault(&o.Bandwidth, DefaultBandwidth)
	setDefault(&o.KVBytes, DefaultKVBytes)
	setDefault(&o.Layers, DefaultLayers)
	setDefault(&o.Speedup, 1)
	if o.Prefill < 0 || o.Decode < 1 || o.Gateways < 1 || o.Steps.Name == "" || o.RunAhead < 1 || o.Heartbeat < 0 || o.GrantTimeout < 0 ||
		!(o.Bandwidth > 0) || !(o.Link >= 0) || !(o.KVBytes >= 0) || o.Layers < 1 || !(o.Speedup > 0) {
		return fmt.Errorf("%w: %d prefill and %d decode nodes (at least 0 and 1), %d gateways, step times %q, run-ahead %d, heartbeat %v, grant timeout %v, %g bytes/s, links of %g, %g bytes a token, %d layers, speedup %g",
			ErrOptions, o.Prefill, o.Decode, o.Gateways, o.Steps.Name, o.RunAhead, o.Heartbeat, o.GrantTimeout, o.Bandwidth, o.Link, o.KVBytes, o.Layers, o.Speedup)
	}
	if o.StepTime < 0 || o.ReportDelay < 0 || o.Setup < 0 || o.Dispatch < 0 || o.Emit < 0 || o.Start < 0 || o.SampleEvery < 0 {
		return fmt.Errorf("%w: step time %v, delay of reports %v, setup %v, dispatch %v, emit %v, start %v and interval of samples %v: none may be negative",
			ErrOptions, o.StepTime, o.ReportDelay, o.Setup, o.Dispatch, o.Emit, o.Start, o.SampleEvery)
	}
	if k := o.PrefillKind; k != nil {
		if k.Steps.Name == "" || k.Blocks < 1 || !(k.Link >= 0) || k.Start < 0 {
			return fmt.Errorf("%w: prefill nodes with step times %q, %d blocks, links of %g and a start of %v", ErrOptions, k.Steps.Name, k.Blocks, k.Link, k.Start)
		}
		most := min(o.Blocks, k.Blocks) * o.BlockTokens // a prompt has to fit the nodes of both roles
		o.MaxModelLen = min(cmp.Or(o.MaxModelLen, most), most)
	}
	return o.checkEvents()
}

func setDefault[T int | float64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// fleet is the state of a run.
type fleet struct {
	o                           Options
	limits                      limits.Limits
	decodeKind, prefillKind     *Kind
	links                       bool         // links of nodes limit transfers
	table                       *route.Table // of all gateways, as the indexes
	decodeBlocks, prefillBlocks *route.Index
	gateways                    []*gateway
	decode                      []*node // those of Options.Decode, and those that start later
	prefill                     []*node
	clock                       clock
	result                      Result
	budget                      *rate.Limiter // of retries before the first token
	resumes                     *rate.Limiter
	draw                        *rand.Rand    // of the order of grants
	cleaning                    int           // messages under way that end work of requests that have ended
	progress                    time.Duration // when a request last advanced
	tokens                      []int32       // zeros, as many as the longest request has: chains name the content
	names                       []kvcache.Hash
	common                      filter // blocks that gateways may look up
	events                      []kvcache.Event
	failed                      error
}

// Run plays a trace, in order of arrival, and returns what its clients measured.
func Run(trace []sim.Request, o Options) (*Result, error) {
	if err := o.resolve(); err != nil {
		return nil, err
	}
	if len(trace) == 0 {
		return nil, fmt.Errorf("%w: an empty trace", ErrOptions)
	}
	if o.Keys != nil && len(o.Keys) != len(trace) {
		return nil, fmt.Errorf("%w: %d keys of %d requests", ErrOptions, len(o.Keys), len(trace))
	}
	f := &fleet{o: o, draw: rand.New(rand.NewPCG(o.Seed, 1<<33))}
	f.setLimits()
	f.decodeKind, f.prefillKind = o.kinds()
	f.links = f.decodeKind.Link+f.prefillKind.Link > 0
	prefill, decode := o.largest()
	for role, n := range []int{decode, prefill} {
		for i := range n {
			n, err := f.newNode(i, role == 1)
			if err != nil {
				return nil, err
			}
			if role == 1 {
				n.up = i < o.Prefill
				f.prefill = append(f.prefill, n)
			} else {
				n.up = i < o.Decode
				f.decode = append(f.decode, n)
			}
		}
	}
	f.table, f.decodeBlocks, f.prefillBlocks = newTable(f), route.NewIndex(), route.NewIndex()
	f.decodeBlocks.Grow(decode)
	f.prefillBlocks.Grow(prefill)
	for i := range o.Gateways {
		f.gateways = append(f.gateways, newGateway(f, i))
	}
	f.result.Requests = make([]Request, len(trace))
	longest := 0
	for i := range trace {
		r := &f.result.Requests[i]
		*r = Request{Prompt: trace[i].Tokens, Output: max(1, trace[i].Output), ids: trace[i].Blocks, idTokens: trace[i].IDTokens(), index: int32(i), g: f.gateways[i%len(f.gateways)]}
		r.At = time.Duration(float64(trace[i].At) / o.Speedup)
		longest = max(longest, r.Prompt+r.Output)
	}
	f.tokens = make([]int32, longest+1)
	f.findCommon()
	if err := f.play(); err != nil {
		return nil, err
	}
	return &f.result, f.finish()
}

// setLimits sets the limits of the gateways. Without any, only failures of nodes are bounded.
func (f *fleet) setLimits() {
	if f.o.Limits != nil {
		f.limits = *f.o.Limits
	} else {
		d := limits.Default()
		f.limits = limits.Limits{MaxAttempts: d.MaxAttempts, ResumeTimeout: d.ResumeTimeout, RetriesPerSecond: d.RetriesPerSecond, ResumesPerSecond: d.ResumesPerSecond}
	}
	f.budget, f.resumes = limiter(f.limits.RetriesPerSecond, 10), limiter(f.limits.ResumesPerSecond, 10)
}

// limiter returns a limiter with bursts of so many seconds' worth, as a gateway's.
func limiter(perSecond, seconds float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), max(1, int(perSecond*seconds)))
}

// play runs arrivals and events in order of time until none is left.
func (f *fleet) play() error {
	f.startHeartbeats()
	f.setEvents()
	if f.o.SampleEvery > 0 {
		f.sample()
	}
	if f.o.Control != nil {
		f.control()
	}
	arrivals := f.result.Requests
	for f.failed == nil && (len(arrivals) > 0 || f.result.open > 0 || f.cleaning > 0) {
		if len(arrivals) > 0 && f.clock.isBefore(arrivals[0].At) {
			f.clock.arrive(arrivals[0].At)
			f.progress = f.clock.now
			f.result.open++
			f.arrive(&arrivals[0])
			arrivals = arrivals[1:]
			continue
		}
		if len(f.clock.heap) == 0 || len(arrivals) == 0 && f.clock.now-f.progress > maxIdle {
			return fmt.Errorf("%w: %d requests wait and no node works: start the nodes that they need, or give --queue-timeout", ErrStuck, f.result.open)
		}
		f.clock.next()
	}
	return f.failed
}

// fail ends the run with an error, which is a bug of the simulator.
func (f *fleet) fail(err error) {
	if f.failed == nil {
		f.failed = fmt.Errorf("fleet: at %v: %w", f.clock.now, err)
	}
}

// afterMessage runs do after a message has arrived.
func (f *fleet) afterMessage(do func()) { f.clock.at(f.clock.now+f.o.RoundTrip/2, do) }

// cleanUp runs do after a time, before the run may end.
func (f *fleet) cleanUp(after time.Duration, do func()) {
	f.cleaning++
	f.clock.at(f.clock.now+after, func() {
		f.cleaning--
		do()
	})
}
