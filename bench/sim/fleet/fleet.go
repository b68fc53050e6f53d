// Package fleet simulates whole fleets in virtual time. The real router (gateway/route),
// scheduler (engine/scheduler) and KV block pool (engine/kvcache) run on every node.
//
// Two things are modelled: the duration of a step (StepTimes), and the duration of
// messages and transfers. Prefill nodes use the real line (prefill/line), decode nodes
// the real course over them (decode/course). Gateways learn about nodes as in a cluster:
// by heartbeats, block events and their own decisions.
//
// Invariant: equal traces, options and seeds give equal results. Every request is served
// once or refused, and the conservation laws of every scheduler hold at the end.
//
// The package does not model failures, speculation, cancelled requests or the time that
// gateways and nodes spend between steps.
package fleet

import (
	"errors"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
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

// errOptions means that no fleet can have such options.
var errOptions = errors.New("fleet: bad options")

// Options describe a fleet and its load.
type Options struct {
	Prefill, Decode int // nodes; without prefill nodes the decode nodes are colocated
	Blocks          int // of each node's pool
	BlockTokens     int
	BatchedTokens   int // of a step; 0: DefaultBatchedTokens
	MaxSeqs         int // running requests of a node; 0: DefaultMaxSeqs
	Steps           StepTimes

	Policy    route.Policy
	MinRemote int    // as --min-remote-prefill-tokens; 0: DefaultMinRemote, 1: always remote
	Seed      uint64 // of the router's random choices
	// Placing varies what a policy leaves to chance: the places of nodes on the hash ring,
	// and round robin's first node.
	Placing  int
	NoEvents bool // gateways get no block events
	NoRoom   bool // the router ignores KV memory

	// Heartbeat is the time between two reports of a node. With 0, gateways know the
	// current prefill rates and count only their own requests.
	Heartbeat time.Duration

	RunAhead     int           // prompt tokens that a prefill node starts before they are computed; 0: 2 × BatchedTokens
	GrantTimeout time.Duration // after which a decode node tries the next prefill node; 0: never
	RoundTrip    time.Duration // between two nodes; 0: DefaultRoundTrip
	Bandwidth    float64       // bytes per second of a transfer; 0: DefaultBandwidth
	KVBytes      float64       // of a token; 0: DefaultKVBytes
	Layers       int           // which are sent one by one; 0: DefaultLayers

	Speedup float64 // divides the times between arrivals; 0: 1
}

// resolve sets defaults and checks the options.
func (o *Options) resolve() error {
	setDefault(&o.BatchedTokens, DefaultBatchedTokens)
	setDefault(&o.MaxSeqs, DefaultMaxSeqs)
	setDefault(&o.MinRemote, DefaultMinRemote)
	setDefault(&o.RunAhead, 2*o.BatchedTokens)
	setDefault(&o.RoundTrip, DefaultRoundTrip)
	setDefault(&o.Bandwidth, DefaultBandwidth)
	setDefault(&o.KVBytes, DefaultKVBytes)
	setDefault(&o.Layers, DefaultLayers)
	setDefault(&o.Speedup, 1)
	if o.Prefill < 0 || o.Decode < 1 || o.Steps.Name == "" || o.RunAhead < 1 || o.Heartbeat < 0 || o.GrantTimeout < 0 ||
		!(o.Bandwidth > 0) || !(o.KVBytes >= 0) || o.Layers < 1 || !(o.Speedup > 0) {
		return fmt.Errorf("%w: %d prefill and %d decode nodes (at least 0 and 1), step times %q, run-ahead %d, heartbeat %v, grant timeout %v, %g bytes/s, %g bytes a token, %d layers, speedup %g",
			errOptions, o.Prefill, o.Decode, o.Steps.Name, o.RunAhead, o.Heartbeat, o.GrantTimeout, o.Bandwidth, o.KVBytes, o.Layers, o.Speedup)
	}
	return nil
}

func setDefault[T int | float64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// fleet is the state of a run.
type fleet struct {
	o       Options
	gateway *gateway
	decode  []*node
	prefill []*node
	clock   clock
	result  Result
	tokens  []int32         // reused: a prompt
	events  []kvcache.Event // reused
	failed  error
}

// Run plays a trace, in order of arrival, and returns what its clients measured.
func Run(trace []sim.Request, o Options) (*Result, error) {
	if err := o.resolve(); err != nil {
		return nil, err
	}
	if len(trace) == 0 {
		return nil, fmt.Errorf("%w: an empty trace", errOptions)
	}
	f := &fleet{o: o}
	for i := range o.Decode + o.Prefill {
		n, err := f.newNode(i)
		if err != nil {
			return nil, err
		}
		if i < o.Decode {
			f.decode = append(f.decode, n)
		} else {
			f.prefill = append(f.prefill, n)
		}
	}
	f.gateway = newGateway(f)
	f.result.Requests = make([]Request, len(trace))
	for i := range trace {
		r := &f.result.Requests[i]
		*r = Request{Prompt: trace[i].Tokens, Output: max(1, trace[i].Output), ids: trace[i].Blocks}
		r.At = time.Duration(float64(trace[i].At) / o.Speedup)
	}
	if err := f.play(); err != nil {
		return nil, err
	}
	return &f.result, f.finish()
}

// play runs arrivals and events in order of time until none is left.
func (f *fleet) play() error {
	f.startHeartbeats()
	arrivals := f.result.Requests
	for f.failed == nil && (len(arrivals) > 0 || f.result.open > 0) {
		if len(arrivals) > 0 && (len(f.clock.heap) == 0 || arrivals[0].At <= f.clock.heap[0].at) {
			f.clock.now = arrivals[0].At
			f.result.open++
			f.arrive(&arrivals[0])
			arrivals = arrivals[1:]
			continue
		}
		if len(f.clock.heap) == 0 {
			return fmt.Errorf("fleet: %d requests are open and nothing will happen", f.result.open)
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

// prompt returns the request's tokens, valid until the next call.
func (f *fleet) prompt(r *Request) []int32 {
	f.tokens = f.tokens[:0]
	for i := range r.Prompt {
		token := int32(i)
		if b := i / sim.BlockTokens; b < len(r.ids) {
			token = int32(r.ids[b] & 0x3fffffff)
		}
		f.tokens = append(f.tokens, token)
	}
	return f.tokens
}
