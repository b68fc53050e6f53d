package pools

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// tenant is one load of several.
type tenant struct {
	name                string
	requests, in, out   int
	text                string // as given
	inPerSec, outPerSec float64
}

// tenantName matches the name of a load, such as chat in "chat: rps=10,in=…".
var tenantName = regexp.MustCompile(`^\s*([A-Za-z0-9_.-]{1,40}):\s*(.*)$`)

// requestCount matches the key n of a load.
var requestCount = regexp.MustCompile(`(^|,)\s*n\s*=`)

// Requests of a load without n: those of some minutes, as far as the budget allows.
const (
	minDrawn     = 1000
	drawnSeconds = 600
)

// maxLoad bounds the requests of all loads together.
const maxLoad = 10_000_000

// readLoad reads the trace, or draws the loads and merges them.
func (r *run) readLoad() error {
	o := r.Options
	switch {
	case (o.Trace == "") == (len(o.Loads) == 0):
		return fmt.Errorf("%w: give either --trace FILE or --load SPEC such as \"rps=10,in=lognormal(8,0.9),out=343\"", ErrOption)
	case o.Trace != "":
		trace, err := sim.LoadTrace(o.Trace)
		if err != nil {
			return wrap(err)
		}
		if o.Requests > 0 && o.Requests < len(trace) {
			trace = trace[:o.Requests]
		}
		r.trace = trace
	default:
		for i, text := range o.Loads {
			if err := r.draw(i, text); err != nil {
				return err
			}
		}
		slices.SortStableFunc(r.trace, func(a, b sim.Request) int { return int(a.At - b.At) })
	}
	return r.checkLoad()
}

// checkLoad checks the load and sets its pace.
func (r *run) checkLoad() error {
	o := r.Options
	if last := r.trace[len(r.trace)-1].At; last <= 0 && len(r.trace) > 1 {
		return fmt.Errorf("%w: all %d requests arrive at the same time: a plan needs the times of the requests", ErrOption, len(r.trace))
	}
	if len(r.trace) < minRequests {
		return fmt.Errorf("%w: the load has %s, too few for percentiles: give at least %d", ErrOption, count(len(r.trace), "request"), minRequests)
	}
	for i := range r.trace {
		q := &r.trace[i]
		q.At = time.Duration(float64(q.At) / o.Growth)
		q.Output = max(1, q.Output)
	}
	if span := r.trace[len(r.trace)-1].At.Seconds(); span > sim.MaxSpan {
		return fmt.Errorf("%w: the load takes %.0f s, at most %g are simulated: give --num-prompts", ErrOption, span, float64(sim.MaxSpan))
	}
	r.block = r.blockTokens()
	return r.checkLengths()
}

// minRequests is the least number of requests for which percentiles mean something.
const minRequests = 20

// draw adds the requests of a tenant.
func (r *run) draw(i int, text string) error {
	t := tenant{name: fmt.Sprintf("load %d", i+1), text: text}
	spec := text
	if m := tenantName.FindStringSubmatch(text); m != nil {
		t.name, spec = m[1], m[2]
	}
	if slices.ContainsFunc(r.tenants, func(other tenant) bool { return other.name == t.name }) {
		return fmt.Errorf("%w: two loads are called %s: give each a name of its own", ErrOption, t.name)
	}
	l, err := sim.ParseLoad(spec)
	if err != nil {
		return wrap(err)
	}
	if r.Requests > 0 {
		l.N = r.Requests
	} else if !requestCount.MatchString(spec) {
		// A fleet that cannot keep up needs some time to show it.
		l.N = min(max(minDrawn, int(min(l.Rate*drawnSeconds, maxLoad))), max(minDrawn, int(r.longer*float64(r.Budget/wholeShare/len(r.Loads)))))
	}
	if len(r.trace)+l.N > maxLoad {
		return fmt.Errorf("%w: the loads have more than %d requests together: draw fewer, with n=", ErrOption, maxLoad)
	}
	trace, err := l.Trace(r.Seed + uint64(i)<<32)
	if err != nil {
		return wrap(err)
	}
	for k := range trace {
		q := &trace[k]
		for b := range q.Blocks {
			q.Blocks[b] ^= kvcache.Hash(uint64(i) * 0x9e3779b97f4a7c15) // tenants have no prefix in common
		}
		t.requests, t.in, t.out = t.requests+1, t.in+q.Tokens, t.out+max(1, q.Output)
	}
	span := max(trace[len(trace)-1].At.Seconds(), 1e-3) / r.Growth
	t.inPerSec, t.outPerSec = float64(t.in)/span, float64(t.out)/span
	r.tenants, r.trace = append(r.tenants, t), append(r.trace, trace...)
	return nil
}

// longest returns the tokens of the longest request that a node can serve with such KV blocks.
func longest(p *profile.Profile, block int) int {
	most := p.Memory.Blocks * p.Memory.BlockTokens / block * block
	if p.Model.MaxLen > 0 {
		most = min(most, p.Model.MaxLen)
	}
	return most
}

// checkLengths returns an error for requests that are longer than a node can serve, unless they are
// to be left out.
func (r *run) checkLengths() error {
	most := longest(r.profiles[0].Profile, r.block)
	name := r.profiles[0].Node.Name
	for _, k := range r.profiles {
		for _, p := range k.profiles() {
			if n := longest(p, r.block); n < most {
				most, name = n, p.Node.Name
			}
		}
	}
	kept := r.trace[:0:0]
	worst := 0
	for i := range r.trace {
		if n := r.trace[i].Tokens + r.trace[i].Output; n > most {
			worst = max(worst, n)
			continue
		}
		kept = append(kept, r.trace[i])
	}
	dropped := len(r.trace) - len(kept)
	switch {
	case dropped == 0:
		return nil
	case !r.DropTooLong:
		return fmt.Errorf("%w: %d of %d requests have more than the %d tokens that a node of %s can serve, the longest %d: add --drop-too-long to leave them out, or give a profile with more KV memory or a longer max_model_len", ErrOption, dropped, len(r.trace), most, name, worst)
	case len(kept) < minRequests:
		return fmt.Errorf("%w: without the requests of more than %d tokens %d are left: give at least %d", ErrOption, most, len(kept), minRequests)
	}
	r.dropped, r.trace = dropped, kept
	return nil
}

// windows returns n of the requests: consecutive ones of some windows, evenly spread over the trace
// and joined without the time between them. Prefixes and bursts within a window remain.
func windows(trace []sim.Request, n, count int) []sim.Request {
	if n >= len(trace) {
		return trace
	}
	count = max(1, min(count, n/minRequests))
	var part []sim.Request
	shift := time.Duration(0)
	gap := trace[len(trace)-1].At / time.Duration(len(trace)-1)
	for w := range count {
		size := n*(w+1)/count - n*w/count
		room := len(trace) / count
		from := w*room + (room-size)/2
		for i := from; i < from+size; i++ {
			q := trace[i]
			q.At = shift + trace[i].At - trace[from].At
			part = append(part, q)
		}
		shift = part[len(part)-1].At + gap
	}
	return part
}

// maxSeen bounds the blocks that are remembered to find shared prefixes.
const maxSeen = 8 << 20

// requests returns the load as the planner's formulas need it.
func requests(trace []sim.Request) []planner.Request {
	list := make([]planner.Request, len(trace))
	seen := map[kvcache.Hash]struct{}{}
	for i := range trace {
		q := &trace[i]
		shared := 0
		for shared < len(q.Blocks) {
			if _, ok := seen[q.Blocks[shared]]; !ok {
				break
			}
			shared++
		}
		for _, b := range q.Blocks[shared:] {
			if len(seen) < maxSeen {
				seen[b] = struct{}{}
			}
		}
		list[i] = planner.Request{At: q.At, Prompt: q.Tokens, Output: q.Output, Cached: min(shared*q.IDTokens(), q.Tokens-1)}
	}
	return list
}

// unshared returns the requests with the prompts of a share of them replaced by prompts that have
// nothing in common with others.
func unshared(trace []sim.Request, share float64) []sim.Request {
	if share == 0 {
		return trace
	}
	list := slices.Clone(trace)
	for i := range list {
		if _, place := math.Modf(float64(i) * golden); place >= share {
			continue
		}
		blocks := slices.Clone(list[i].Blocks)
		for b := range blocks {
			blocks[b] ^= kvcache.Hash(uint64(i+1) * 0x9e3779b97f4a7c15)
		}
		list[i].Blocks = blocks
	}
	return list
}

// golden spreads multiples of it evenly between whole numbers.
const golden = 0.6180339887498949
