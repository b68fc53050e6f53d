// Package simulate is the command `tandem sim`. It plays a trace or a drawn load against a
// simulated fleet, and reports the figures of `tandem bench serve`.
//
// The fleet is that of bench/sim/fleet, the step times are those of a profile (bench/sim/profile),
// and the figures are computed by bench/report, so that tools that read results of bench serve read
// these, too.
//
// Invariant: the output depends on the options, the profile and the trace only. Equal options give
// equal files, byte for byte. Every figure that rests on an estimate is marked.
//
// The package reads no clock and uses no network.
package simulate

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/lengths"
	"github.com/tandem-serving/tandem/internal/limits"
)

// ErrOption is wrapped by every error that the user can correct.
var ErrOption = errors.New("simulate: bad option")

// Options are the settings of a simulation.
type Options struct {
	Command string // that repeats the run; printed on the page

	Fleet, Profile, Trace, Load string
	PrefillProfile              string // of prefill nodes; empty: Profile
	Requests                    int    // of the trace; 0: all
	Speedup                     float64
	Seed                        uint64
	Events                      []string
	Price                       float64 // per node and hour in US dollars; negative: that of the profile

	Gateways               int
	Policy                 string
	MinRemote              int
	Limits                 limits.Limits
	NoEvents               bool          // gateways get no block events
	Heartbeat, ReportDelay time.Duration // 0: those of the profile

	Blocks, BlockTokens             int // 0: those of the profile
	BatchedTokens, MaxSeqs          int
	MaxModelLen                     int           // 0: that of the profile
	RoundTrip, GrantTimeout, Starts time.Duration // Starts: of a node until it is ready; 0: that of the profile

	Metrics     []string
	Percentiles []float64
	Goodput     []string
	Label       string // empty: sim
	Save        bool
	Detailed    bool
	File        string // of the JSON; empty: LABEL-FLEET.json
	HTML        string // empty: no page
	Compare     string // result of bench serve that is set next to the figures; empty: none
}

// maxTokens bounds the tokens of all answers, whose times are kept: 8 bytes each.
const maxTokens = 500_000_000

// heartbeat is how often nodes report while their load changes (internal/node), for profiles that
// do not have it.
const heartbeat = 100 * time.Millisecond

// Bounds of a step.
const (
	maxSeqs    = 1 << 20
	maxBatched = 1 << 28
)

// minHeartbeat bounds the reports of a run.
const minHeartbeat = time.Millisecond

// fleetSize matches the size of a fleet.
var fleetSize = regexp.MustCompile(`^(?:(\d{1,6})[Pp])?(\d{1,6})[Dd]?$`)

// ParseFleet parses 6P2D (6 prefill and 2 decode nodes), 8D or 8 (8 colocated nodes).
func ParseFleet(text string) (prefill, decode int, err error) {
	m := fleetSize.FindStringSubmatch(text)
	if m != nil {
		prefill, _ = strconv.Atoi(m[1]) // empty: 0
		decode, _ = strconv.Atoi(m[2])
	}
	if decode < 1 {
		return 0, 0, fmt.Errorf("%w: --fleet %q: write such as 6P2D for 6 prefill and 2 decode nodes, or 8D for 8 nodes that do both", ErrOption, text)
	}
	return prefill, decode, nil
}

// run is one simulation.
type run struct {
	*Options
	profile *profile.Profile
	times   *profile.Times

	prefill      *profile.Profile // of prefill nodes of another kind; nil: they are as the others
	prefillTimes *profile.Times
	fleet        fleet.Options
	trace        []sim.Request
	rate         float64 // of a drawn load; +Inf: the trace has the times
	goals        map[string]float64

	measured map[string]any // fields of Options.Compare
}

// wrap marks an error of another package as one that the user can correct. Its text is the
// sentence for the user.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, kind := range []error{sim.ErrTrace, sim.ErrLoad, profile.ErrProfile, fleet.ErrOptions, fleet.ErrStuck} {
		text = strings.TrimPrefix(text, kind.Error()+": ")
	}
	return fmt.Errorf("%w: %s", ErrOption, text)
}

// prepare checks the options and reads the files.
func (r *run) prepare() (err error) {
	if r.goals, err = report.ParseGoodput(r.Goodput); err != nil {
		return wrap(err)
	}
	if err := report.CheckFigures(r.Metrics, r.Percentiles); err != nil {
		return wrap(err)
	}
	f := &r.fleet
	if f.Prefill, f.Decode, err = ParseFleet(r.Fleet); err != nil {
		return err
	}
	if f.Policy, err = route.ParsePolicy(r.Policy); err != nil {
		return fmt.Errorf("%w: --policy %q: want one of %s", ErrOption, r.Policy, route.Policies())
	}
	for _, text := range r.Events {
		e, err := fleet.ParseEvent(text)
		if err != nil {
			return wrap(err)
		}
		f.Events = append(f.Events, e)
	}
	if !(r.Speedup > 0 && r.Speedup <= 1e6) {
		return fmt.Errorf("%w: --speedup %g: want more than 0, such as 2 for twice the load", ErrOption, r.Speedup)
	}
	if r.MaxSeqs > maxSeqs || r.BatchedTokens > maxBatched {
		return fmt.Errorf("%w: --max-num-seqs %d and --max-num-batched-tokens %d: at most %d and %d are simulated, and no node runs so many: give those of a node, such as 256 and 2048", ErrOption, r.MaxSeqs, r.BatchedTokens, maxSeqs, maxBatched)
	}
	if r.BatchedTokens < r.MaxSeqs {
		return fmt.Errorf("%w: --max-num-batched-tokens %d is less than --max-num-seqs %d: raise the one or lower the other", ErrOption, r.BatchedTokens, r.MaxSeqs)
	}
	if err := r.readProfile(); err != nil {
		return err
	}
	if err := r.readPrefillProfile(); err != nil {
		return err
	}
	if err := r.readLoad(); err != nil {
		return err
	}
	r.setFleet()
	if err := r.readMeasured(); err != nil {
		return err
	}
	if err := r.checkSize(); err != nil {
		return err
	}
	return r.checkMeasured()
}

// Bounds of a simulation's memory: about 100 bytes for each KV block, and about a kilobyte for each
// node that a gateway knows.
const (
	maxBlocks = 64_000_000
	maxKnown  = 2_000_000
)

// checkSize returns an error for fleets that do not fit in memory, for reports that would take
// forever, and for objectives that no request could meet.
func (r *run) checkSize() error {
	nodes, each := r.nodes(), r.profile.Memory.Blocks
	if k := r.fleet.PrefillKind; k != nil {
		each = max(each, k.Blocks)
	}
	if total := float64(nodes) * float64(each); total > maxBlocks {
		larger := r.profile.Memory.BlockTokens * int(math.Ceil(total/maxBlocks))
		return fmt.Errorf("%w: %d nodes of %d KV blocks are too many to simulate: give larger blocks, such as --block-size %d", ErrOption, nodes, each, larger)
	}
	if gateways := max(1, r.Gateways); gateways > maxKnown/nodes {
		return fmt.Errorf("%w: --gateways %d with %d nodes is too large to simulate: give at most %d", ErrOption, gateways, nodes, max(1, maxKnown/nodes))
	}
	if h := r.fleet.Heartbeat; h < minHeartbeat {
		return fmt.Errorf("%w: nodes report every %v, at least %v are simulated: give --heartbeat, or correct gateway.heartbeat of the profile", ErrOption, h, minHeartbeat)
	}
	times := r.profile.Times()
	first := times.Step(profile.Shape{Chunk: 1, Attended: 1})
	if r.prefill != nil {
		first = min(first, r.prefill.Times().Step(profile.Shape{Chunk: 1, Attended: 1}))
	}
	for _, g := range []struct {
		key   string
		least time.Duration
	}{{"ttft", first}, {"tpot", times.Step(profile.Shape{Streams: 1, ContextSum: 1})}} {
		if most, set := r.goals[g.key]; set && most < g.least.Seconds()*1e3 {
			return fmt.Errorf("%w: --goodput %s:%g: the shortest step of %s takes %.1f ms: give a longer time, or a faster node", ErrOption, g.key, most, r.profile.Node.Name, g.least.Seconds()*1e3)
		}
	}
	return nil
}

// readProfile reads the profile and applies the options that override it.
func (r *run) readProfile() (err error) {
	if r.Profile == "" {
		return fmt.Errorf("%w: --profile is missing: give a file, or an estimate by name such as h200:llama-8b (GPUs: %s; models: %s)", ErrOption, profile.GPUs(), profile.Models())
	}
	if !(r.Price >= 0 || r.Price == -1) {
		return fmt.Errorf("%w: --price-per-hour %g: give US dollars, or -1 for the profile's price", ErrOption, r.Price)
	}
	r.profile, err = r.loadProfile(r.Profile)
	return err
}

// readPrefillProfile reads the profile of prefill nodes of another kind.
func (r *run) readPrefillProfile() (err error) {
	if r.PrefillProfile == "" {
		return nil
	}
	if r.fleet.Prefill == 0 {
		return fmt.Errorf("%w: --prefill-profile %s: the fleet %s has no prefill nodes: give it some, such as 2P2D, or leave the flag out", ErrOption, r.PrefillProfile, r.Fleet)
	}
	if r.prefill, err = r.loadProfile(r.PrefillProfile); err != nil {
		return err
	}
	return wrap(profile.CheckPools(r.prefill, r.profile))
}

// loadProfile reads a profile and applies the options that override it.
func (r *run) loadProfile(name string) (*profile.Profile, error) {
	p, err := profile.Load(name)
	if err != nil {
		return nil, wrap(err)
	}
	if r.Price >= 0 {
		p.Node.Price = r.Price
	}
	if r.BlockTokens > 0 { // the same memory in other blocks, unless their number is given
		p.Memory.Blocks = p.Memory.Blocks * p.Memory.BlockTokens / r.BlockTokens
		p.Memory.BlockTokens = r.BlockTokens
	}
	if r.Blocks > 0 {
		p.Memory.Blocks = r.Blocks
	}
	if r.MaxModelLen > 0 {
		p.Model.MaxLen = r.MaxModelLen
	}
	return p, wrap(p.Check())
}

// readLoad reads the trace or draws the load.
func (r *run) readLoad() (err error) {
	r.rate = math.Inf(1)
	switch {
	case (r.Trace == "") == (r.Load == ""):
		return fmt.Errorf("%w: give either --trace FILE or --load SPEC such as \"rps=10,in=lognormal(8,0.9),out=343\"", ErrOption)
	case r.Trace != "":
		if r.trace, err = sim.LoadTrace(r.Trace); err != nil {
			return wrap(err)
		}
		if r.Requests > 0 && r.Requests < len(r.trace) {
			r.trace = r.trace[:r.Requests]
		}
	default:
		l, err := sim.ParseLoad(r.Load)
		if err != nil {
			return wrap(err)
		}
		if r.Requests > 0 {
			l.N = r.Requests
		}
		if r.trace, err = l.Trace(r.Seed); err != nil {
			return wrap(err)
		}
		r.rate = l.Rate * r.Speedup
	}
	if span := r.trace[len(r.trace)-1].At.Seconds() / r.Speedup; span > sim.MaxSpan {
		return fmt.Errorf("%w: the load takes %.0f s, at most %g are simulated: give --num-prompts or --speedup", ErrOption, span, float64(sim.MaxSpan))
	}
	tokens := 0
	for i := range r.trace {
		tokens += max(1, r.trace[i].Output)
	}
	if tokens > maxTokens {
		return fmt.Errorf("%w: the answers have %d tokens, at most %d are simulated: give --num-prompts", ErrOption, tokens, maxTokens)
	}
	return nil
}

// seconds converts seconds.
func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// setFleet sets the fleet's options.
func (r *run) setFleet() {
	p, f := r.profile, &r.fleet
	r.times = p.Times()
	of := FleetOptions(p, r.times, r.RoundTrip)
	if r.prefill != nil {
		r.prefillTimes = r.prefill.Times()
		SetPrefillKind(&of, r.prefill, r.prefillTimes)
	}
	of.Prefill, of.Decode, of.Policy, of.Events = f.Prefill, f.Decode, f.Policy, f.Events
	*f = of
	f.Gateways, f.MinRemote, f.Seed, f.NoEvents, f.Speedup = r.Gateways, max(1, r.MinRemote), r.Seed, r.NoEvents, r.Speedup
	f.BatchedTokens, f.MaxSeqs = r.BatchedTokens, r.MaxSeqs
	f.Steps.Name = r.Profile
	f.Limits = &r.Limits
	f.Heartbeat, f.ReportDelay = cmp.Or(r.Heartbeat, f.Heartbeat), cmp.Or(r.ReportDelay, f.ReportDelay)
	f.Start = cmp.Or(r.Starts, f.Start)
	if k := f.PrefillKind; k != nil {
		k.Steps.Name, k.Start = r.PrefillProfile, cmp.Or(r.Starts, k.Start)
	}
	f.GrantTimeout = r.GrantTimeout
	f.KeepGaps = true
	span := float64(r.trace[len(r.trace)-1].At) / r.Speedup
	f.SampleEvery = max(100*time.Millisecond, time.Duration(span/300))
}

// SetPrefillKind makes the prefill nodes of a fleet those of a profile. Transfers are as fast as
// those of the slower kind. times are the profile's step times, of this fleet alone.
func SetPrefillKind(o *fleet.Options, p *profile.Profile, times *profile.Times) {
	of := FleetOptions(p, times, o.RoundTrip)
	o.PrefillKind = &fleet.Kind{Steps: of.Steps, Blocks: of.Blocks * of.BlockTokens / o.BlockTokens, Link: of.Link, Start: of.Start}
	o.Bandwidth, o.Setup, o.Layers = min(o.Bandwidth, of.Bandwidth), max(o.Setup, of.Setup), min(o.Layers, of.Layers)
	if of.MaxModelLen > 0 {
		o.MaxModelLen = min(cmp.Or(o.MaxModelLen, of.MaxModelLen), of.MaxModelLen)
	}
}

// FleetOptions returns the options of a fleet that a profile determines. times are the profile's
// step times, of this fleet alone, and roundTrip is the time of a message between two processes and
// back.
func FleetOptions(p *profile.Profile, times *profile.Times, roundTrip time.Duration) fleet.Options {
	o := fleet.Options{
		Blocks: p.Memory.Blocks, BlockTokens: p.Memory.BlockTokens,
		Steps:     fleet.StepTimes{Name: p.Node.Name, Source: p.Basis(), Step: func(s fleet.Shape, _ int) time.Duration { return times.Of(s) }, Count: times.Count},
		Heartbeat: cmp.Or(seconds(p.Gateway.Heartbeat), heartbeat), ReportDelay: seconds(p.Gateway.ReportDelay), RoundTrip: roundTrip,
		Bandwidth: p.Transfer.BytesPerSecond, Link: p.Transfer.Link, Setup: seconds(p.Transfer.Setup), KVBytes: p.Model.KVBytes, Layers: p.Model.Layers,
		Dispatch: seconds(p.Gateway.PerRequest) + roundTrip/2,
		Emit:     seconds(p.Step.Overhead.Emit+p.Gateway.PerToken) + roundTrip/2,
		Start:    p.Start.Total(),
		StepTime: lengths.StepTime,
	}
	if !p.Transfer.PerLayer {
		o.Layers = 1
	}
	if p.Model.MaxLen > 0 {
		o.MaxModelLen = min(p.Model.MaxLen, p.Memory.Blocks*p.Memory.BlockTokens)
	}
	return o
}
