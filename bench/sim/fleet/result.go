package fleet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/bits"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/exchange/choice"
)

// Request is a request of the trace and what its client measured. Times are since the
// start of the run.
type Request struct {
	At             time.Duration
	First, Last    time.Duration   // tokens of the answer
	Gaps           []time.Duration // between tokens, with Options.KeepGaps
	Prompt, Output int             // tokens
	Err            error           // nil: the answer is complete

	ids                       []kvcache.Hash
	idTokens                  int // tokens of each id
	index                     int32
	emitted                   int
	arrived, admitted, closed bool
	g                         *gateway
	item                      *admit.Item // in its gateway's queue; nil: it has not waited
	a                         *attempt    // nil: none runs
	choice                    choice.Choice[int]
	chain                     *kvcache.Chain // nil: not made yet, or the request has ended
}

// Received returns the number of tokens that the client has received.
func (r *Request) Received() int { return r.emitted }

// Result is the outcome of a run.
type Result struct {
	Requests       []Request
	Span           time.Duration // until the last token
	Tokens         int           // of answers
	Failed         int           // requests
	Cancelled      int           // of these, requests that their clients or deadlines ended
	Waited         int           // requests that waited for room
	Local          int           // prompts computed by decode nodes
	Retried        int           // attempts after one without a token
	Resumed        int           // attempts after one with tokens
	Killed         int           // nodes and gateways
	Started        int           // nodes, after the run's start
	Drained        int           // nodes
	Preemptions    uint64
	GrantsDeferred int // grants that waited for room
	GrantTimeouts  int
	GrantWait      time.Duration // sum
	Reuse          float64       // share of prompt tokens that the computing nodes had cached
	PrefillBusy    float64       // share of the time
	DecodeBusy     float64
	Steps          int
	Checks         int // schedulers and lines whose laws were verified
	Samples        []Sample

	open      int
	gaps      histogram
	published uint64 // hash of all block events, of their nodes and times
}

// Sample is the state of the fleet at a time.
type Sample struct {
	At            time.Duration
	Waiting       int // requests in the gateways' queues
	WaitingTokens int // of their prompts
	Prefill       Usage
	Decode        Usage
}

// Usage is the state of the nodes of a role.
type Usage struct {
	Up      int     // nodes
	Busy    float64 // share of the time since the last sample
	Running int     // requests
	Waiting int     // requests, those that wait for KV included
	Queued  int     // prompt tokens to compute
	KV      float64 // share of the blocks in use
	MaxKV   float64 // of the fullest node

	busy time.Duration // of all nodes until now
}

// Summary is the figures of a result with the load tester's definitions (bench/report).
type Summary struct {
	TTFTMean, TTFTP50, TTFTP90, TTFTP99 time.Duration
	ITLMean, ITLP50, ITLP90, ITLP99     time.Duration
	TokensPerSecond                     float64
	Failed                              int
	Goodput                             float64 // share of requests within the goals
}

// Goals are the objectives of a good request: the time to its first token and the mean
// time per further token.
type Goals struct{ TTFT, TPOT time.Duration }

// Summarize computes the figures of a result.
func (r *Result) Summarize(g Goals) Summary {
	s := Summary{TokensPerSecond: float64(r.Tokens) / r.Span.Seconds()}
	var ttft []time.Duration
	good, sum := 0, 0.0
	for i := range r.Requests {
		q := &r.Requests[i]
		if q.Err != nil {
			s.Failed++
			continue
		}
		first, perToken := q.First-q.At, time.Duration(0)
		if q.Output > 1 {
			perToken = (q.Last - q.First) / time.Duration(q.Output-1)
		}
		if first <= g.TTFT && perToken <= g.TPOT {
			good++
		}
		sum += first.Seconds()
		ttft = append(ttft, first)
	}
	if s.Goodput = float64(good) / float64(len(r.Requests)); len(ttft) > 0 {
		slices.Sort(ttft)
		at := func(p float64) time.Duration { return ttft[min(len(ttft)-1, int(p*float64(len(ttft))))] }
		s.TTFTMean = time.Duration(sum / float64(len(ttft)) * 1e9)
		s.TTFTP50, s.TTFTP90, s.TTFTP99 = at(.5), at(.9), at(.99)
	}
	s.ITLMean, s.ITLP50, s.ITLP90, s.ITLP99 = r.gaps.mean(), r.gaps.quantile(.5), r.gaps.quantile(.9), r.gaps.quantile(.99)
	return s
}

// ITL returns a quantile, from 0 to 1, of the times between tokens of all requests.
func (r *Result) ITL(quantile float64) time.Duration { return r.gaps.quantile(quantile) }

// Digest hashes the times of every request, the counters, and the block events of every node with
// their times. Equal runs have equal digests.
func (r *Result) Digest() uint64 {
	h := fnv.New64a()
	var line []byte
	for i := range r.Requests {
		q := &r.Requests[i]
		line = line[:0]
		for _, n := range [...]time.Duration{q.At, q.First, q.Last, time.Duration(q.emitted)} {
			line = binary.LittleEndian.AppendUint64(line, uint64(n))
		}
		if q.Err != nil {
			line = append(line, q.Err.Error()...)
		}
		h.Write(line)
	}
	fmt.Fprintln(h, r.Span, r.Tokens, r.Failed, r.Cancelled, r.Waited, r.Local, r.Retried, r.Resumed, r.Killed, r.Started, r.Drained,
		r.Preemptions, r.GrantsDeferred, r.GrantTimeouts, r.GrantWait, r.Reuse, r.PrefillBusy, r.DecodeBusy, r.Steps, r.published)
	return h.Sum64()
}

// publish adds block events to the hash of all.
func (r *Result) publish(n *node, events []kvcache.Event) {
	if len(events) == 0 {
		return
	}
	mix := func(x uint64) { r.published = bits.RotateLeft64(r.published^x, 29) * 0x9e3779b97f4a7c15 }
	mix(uint64(n.f.clock.now))
	mix(n.order)
	for _, e := range events {
		mix(uint64(e.Hash))
		mix(uint64(e.Kind))
	}
}

// check verifies a node's scheduler and line.
func (f *fleet) check(n *node) {
	if err := errors.Join(n.look().Check(), n.line.Check()); err != nil {
		f.fail(fmt.Errorf("%s: %w", n.name(), err))
	}
	f.result.Checks++
}

// finish verifies every node and gateway and adds up the nodes' counters.
func (f *fleet) finish() error {
	r := &f.result
	r.Span = max(1, r.Span)
	var queries, hits uint64
	share := func(nodes []*node) (busy float64) {
		for _, n := range nodes {
			n.look()
			busy += n.busy.Seconds() / r.Span.Seconds() / float64(len(nodes))
		}
		return busy
	}
	r.PrefillBusy, r.DecodeBusy = share(f.prefill), share(f.decode)
	for _, n := range slices.Concat(f.decode, f.prefill) {
		f.check(n)
		st := n.look().Stats()
		if n.attempts.n+n.jobs.n+n.computing.n+len(n.awaiting)+len(n.transfers) > 0 || st.Running+st.Waiting+st.Held+st.Reservations > 0 || n.line.Len() > 0 {
			return fmt.Errorf("fleet: %s: %d attempts and %d jobs are left, %d in the line, %d wait for room, %+v", n.name(), n.attempts.n, n.jobs.n, n.line.Len(), len(n.awaiting), st)
		}
		c := n.counts()
		r.Preemptions += c.preemptions
		r.Steps += n.steps
		if n.computes || len(f.prefill) == 0 {
			queries, hits = queries+c.queries, hits+c.hits
		}
	}
	r.Reuse = float64(hits) / float64(max(1, queries))
	for _, g := range f.gateways {
		for _, sent := range slices.Concat(g.decode.sent, g.prefill.sent) {
			if sent.Requests != 0 || sent.Queued != 0 {
				return fmt.Errorf("fleet: a gateway still counts %+v", sent)
			}
		}
		if err := g.waiting.Check(); err != nil || g.waiting.Len() > 0 || g.room.running != 0 || g.room.sent != 0 || g.room.short != 0 {
			return fmt.Errorf("fleet: a gateway still counts %+v, %d wait, %w", g.room, g.waiting.Len(), err)
		}
	}
	return f.failed
}

// sample appends the state of the fleet, and again after the interval.
func (f *fleet) sample() {
	s := Sample{At: f.clock.now}
	for _, g := range f.gateways {
		s.Waiting += g.waiting.Len()
		s.WaitingTokens += g.waiting.Tokens()
	}
	var last Sample
	if n := len(f.result.Samples); n > 0 {
		last = f.result.Samples[n-1]
	}
	s.Prefill, s.Decode = f.usage(f.prefill), f.usage(f.decode)
	for _, u := range []struct{ now, last *Usage }{{&s.Prefill, &last.Prefill}, {&s.Decode, &last.Decode}} {
		if d := s.At - last.At; d > 0 && u.now.Up > 0 {
			u.now.Busy = min(1, (u.now.busy-u.last.busy).Seconds()/d.Seconds()/float64(u.now.Up))
		}
	}
	if f.result.Samples = append(f.result.Samples, s); len(f.result.Samples) == maxSamples {
		f.halveSamples()
	}
	f.clock.at(f.clock.now+f.o.SampleEvery, f.sample)
}

// maxSamples bounds the samples of a run.
const maxSamples = 1024

// halveSamples merges each two samples into one, and doubles the interval.
func (f *fleet) halveSamples() {
	all := f.result.Samples
	for i := range len(all) / 2 {
		a, b := all[2*i], all[2*i+1]
		b.Prefill.Busy, b.Decode.Busy = (a.Prefill.Busy+b.Prefill.Busy)/2, (a.Decode.Busy+b.Decode.Busy)/2
		b.Prefill.MaxKV, b.Decode.MaxKV = max(a.Prefill.MaxKV, b.Prefill.MaxKV), max(a.Decode.MaxKV, b.Decode.MaxKV)
		all[i] = b
	}
	f.result.Samples = all[:len(all)/2]
	f.o.SampleEvery *= 2
}

// usage returns the state of nodes.
func (f *fleet) usage(nodes []*node) (u Usage) {
	for _, n := range nodes {
		st := n.look().Stats()
		u.busy += n.busy
		if !n.up {
			continue
		}
		if n.stepping {
			u.busy -= n.ends[n.next] - f.clock.now
		}
		u.Up++
		u.Running += st.Running
		u.Waiting += st.Waiting + st.Held + n.line.Waiting()
		u.Queued += st.Pending + n.line.WaitingTokens()
		kv := 1 - float64(st.Blocks.Free+st.Blocks.Cached)/float64(st.Blocks.Blocks)
		u.KV += kv
		u.MaxKV = max(u.MaxKV, kv)
	}
	u.KV /= float64(max(1, u.Up))
	return u
}

// histogram counts durations in classes that grow by 0.5 % from 1 µs on.
type histogram struct {
	counts [4096]int64
	n      int64
	sum    time.Duration
}

const (
	classBase  = 1e-6
	classRatio = 1.005
)

// add counts a duration so many times.
func (h *histogram) add(d time.Duration, times int) {
	h.n += int64(times)
	h.sum += d * time.Duration(times)
	h.counts[classOf(d)] += int64(times)
}

// classOf returns the class of a duration.
func classOf(d time.Duration) int {
	if d <= time.Microsecond {
		return 0
	}
	c := classes()
	// Of the durations that share these leading bits, the first has the least class.
	shift := max(0, bits.Len64(uint64(d))-leadingBits)
	class := int(c.first[shift][uint64(d)>>shift])
	for class+1 < len(c.least) && d >= c.least[class+1] {
		class++
	}
	return class
}

// leadingBits is the number of a duration's bits that the search for its class begins with. Such
// durations have up to three classes.
const leadingBits = 7

// classTable has the bounds of the classes.
type classTable struct {
	least [4096]time.Duration                        // of each class
	first [64 - leadingBits][1 << leadingBits]uint16 // class of the least duration with these leading bits
}

// classes returns the table of the classes: class k begins at classBase times classRatio^k.
var classes = sync.OnceValue(func() *classTable {
	c := new(classTable)
	of := func(d time.Duration) int {
		if s := d.Seconds(); s > classBase {
			return min(int(math.Log(s/classBase)/math.Log(classRatio)), len(c.least)-1)
		}
		return 0
	}
	c.least[0] = time.Microsecond
	for k := 1; k < len(c.least); k++ {
		low := c.least[k-1]
		c.least[k] = low + time.Duration(sort.Search(int(low/64)+64, func(n int) bool { return of(low+time.Duration(n)) >= k }))
	}
	for shift := range c.first {
		for lead := range c.first[shift] {
			c.first[shift][lead] = uint16(of(time.Duration(lead << shift)))
		}
	}
	return c
})

func (h *histogram) mean() time.Duration { return h.sum / time.Duration(max(1, h.n)) }

func (h *histogram) quantile(p float64) time.Duration {
	want, seen := int64(p*float64(h.n)), int64(0)
	for class, n := range h.counts {
		if seen += n; seen > want {
			return time.Duration(classBase * math.Pow(classRatio, float64(class)+.5) * 1e9)
		}
	}
	return 0
}
