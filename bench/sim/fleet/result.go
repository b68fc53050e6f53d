package fleet

import (
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/decode/course"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/prefill/line"
)

// Request is a request of the trace and what its client measured. Times are since the
// start of the run.
type Request struct {
	At             time.Duration
	First, Last    time.Duration // tokens of the answer
	Prompt, Output int           // tokens
	Refused        bool          // no node can hold it

	ids         []kvcache.Hash
	decode      int           // index of its node
	prefill     []int         // indices of the candidate prefill nodes
	course      course.Course // over them
	claimed     int           // tokens counted in claimedOf
	claimedOf   *route.Sent
	id          scheduler.RequestID // on its decode node
	reservation scheduler.ReservationID
	from        int           // first token that is transferred
	ticket      line.ID       // in its prefill node's line
	pushed      time.Duration // when its transfer began
	emitted     int
	blocks      int // expected number of blocks on its node
}

// Result is the outcome of a run.
type Result struct {
	Requests       []Request
	Span           time.Duration // until the last token
	Tokens         int           // of answers
	Waited         int           // requests that waited for room
	Local          int           // prompts computed by decode nodes
	Preemptions    uint64
	GrantsDeferred int // grants that waited for room
	GrantTimeouts  int
	GrantWait      time.Duration // sum
	Reuse          float64       // share of prompt tokens that the computing nodes had cached
	PrefillBusy    float64       // share of the time
	DecodeBusy     float64
	Steps          int

	open int
	gaps histogram
}

// Summary is the figures of a result with the load tester's definitions (bench/report).
type Summary struct {
	TTFTMean, TTFTP50, TTFTP90, TTFTP99 time.Duration
	ITLMean, ITLP50, ITLP90, ITLP99     time.Duration
	TokensPerSecond                     float64
	Refused                             int
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
		if q.Refused {
			s.Refused++
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

// Digest hashes the times of every request. Equal runs have equal digests.
func (r *Result) Digest() uint64 {
	h := fnv.New64a()
	for i := range r.Requests {
		q := &r.Requests[i]
		fmt.Fprintln(h, q.At, q.First, q.Last, q.Refused)
	}
	return h.Sum64()
}

// finish verifies every scheduler and adds up the nodes' counters.
func (f *fleet) finish() error {
	r := &f.result
	r.Span = max(1, f.clock.now)
	var queries, hits uint64
	share := func(nodes []*node) (busy float64) {
		for _, n := range nodes {
			busy += n.busy.Seconds() / r.Span.Seconds() / float64(len(nodes))
		}
		return busy
	}
	r.PrefillBusy, r.DecodeBusy = share(f.prefill), share(f.decode)
	for _, n := range slices.Concat(f.decode, f.prefill) {
		if err := n.s.Check(); err != nil {
			return fmt.Errorf("fleet: node %d: %w", n.at, err)
		}
		st := n.s.Stats()
		if err := n.line.Check(); err != nil {
			return fmt.Errorf("fleet: node %d: %w", n.at, err)
		}
		if len(n.requests)+len(n.jobs)+len(n.awaiting) > 0 || st.Running+st.Waiting+st.Held > 0 || n.line.Len() > 0 {
			return fmt.Errorf("fleet: node %d: %d requests are left, %d in the line, %d wait for room, %+v", n.at, len(n.requests), n.line.Len(), len(n.awaiting), st)
		}
		r.Preemptions += st.Preemptions
		r.Steps += n.steps
		if n.computes || len(f.prefill) == 0 {
			queries, hits = queries+st.PrefixQueries, hits+st.PrefixHits
		}
	}
	r.Reuse = float64(hits) / float64(max(1, queries))
	for _, sent := range slices.Concat(f.gateway.decode.sent, f.gateway.prefill.sent) {
		if sent.Requests != 0 || sent.Queued != 0 {
			return fmt.Errorf("fleet: the gateway still counts %+v", sent)
		}
	}
	return nil
}

// histogram counts durations in classes that grow by 0.5 % from 1 µs on.
type histogram struct {
	counts [4096]int64
	n      int64
	sum    float64
}

const (
	classBase  = 1e-6
	classRatio = 1.005
)

func (h *histogram) add(d time.Duration) {
	s := d.Seconds()
	h.n++
	h.sum += s
	class := 0
	if s > classBase {
		class = int(math.Log(s/classBase) / math.Log(classRatio))
	}
	h.counts[min(class, len(h.counts)-1)]++
}

func (h *histogram) mean() time.Duration {
	return time.Duration(h.sum / float64(max(1, h.n)) * 1e9)
}

func (h *histogram) quantile(p float64) time.Duration {
	want, seen := int64(p*float64(h.n)), int64(0)
	for class, n := range h.counts {
		if seen += n; seen > want {
			return time.Duration(classBase * math.Pow(classRatio, float64(class)+.5) * 1e9)
		}
	}
	return 0
}
