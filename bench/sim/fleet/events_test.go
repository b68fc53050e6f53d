package fleet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/internal/limits"
)

// randomEvents draws deaths, drains, starts and clients that leave.
func randomEvents(draw *rand.Rand, o *Options, span time.Duration) (events []Event) {
	for range 2 + draw.IntN(12) {
		e := Event{At: time.Duration(draw.Float64() * float64(span)), Action: Action(draw.IntN(len(actions))), Timeout: time.Duration(draw.IntN(4000)) * time.Millisecond}
		if e.Action == Cancel {
			e.Share = 0.2 + 0.5*draw.Float64()
		} else if draw.IntN(6) == 0 && e.Action != Drain {
			e.Target = Target{Gateway: true, Node: draw.IntN(o.Gateways)}
			events = append(events, e)
			continue
		} else if e.Target.Prefill = draw.IntN(2) == 0 && o.Prefill > 0; e.Target.Prefill {
			e.Target.Node = draw.IntN(o.Prefill)
		} else {
			e.Target.Node = draw.IntN(o.Decode)
		}
		if e.Action == Start && draw.IntN(3) == 0 { // one that the fleet did not have
			e.Target.Node = o.Decode
			e.Target.Prefill = false
		}
		events = append(events, e)
	}
	return events
}

// eventsFleet is randomFleet with random delays, limits and events.
func eventsFleet(seed uint64) (name string, trace []sim.Request, o Options) {
	draw := rand.New(rand.NewPCG(seed, 99))
	name, trace, o = randomFleet(seed)
	trace = trace[:40+draw.IntN(100)]
	o.Gateways, o.Start = 1+draw.IntN(3), time.Duration(draw.IntN(3000))*time.Millisecond
	o.ReportDelay = []time.Duration{0, 20 * time.Millisecond, time.Second}[draw.IntN(3)]
	o.Heartbeat = []time.Duration{0, 100 * time.Millisecond, time.Second}[draw.IntN(3)]
	o.Dispatch, o.Emit, o.Setup = time.Duration(draw.IntN(3))*time.Millisecond, time.Duration(draw.IntN(2))*time.Millisecond, time.Duration(draw.IntN(3))*time.Millisecond
	o.RoundTrip = []time.Duration{0, 20 * time.Millisecond, 300 * time.Millisecond}[draw.IntN(3)] // long ones leave room for races
	o.MinRemote, o.SampleEvery, o.KeepGaps = 1+draw.IntN(2)*64, 500*time.Millisecond, true
	l := limits.Default()
	l.QueueTimeout = time.Duration(1+draw.IntN(30)) * time.Second
	if draw.IntN(2) == 0 {
		l.MaxQueuedRequests, l.RequestTimeout = 1+draw.IntN(8), time.Duration(2+draw.IntN(60))*time.Second
	}
	if draw.IntN(3) == 0 {
		l.RetriesPerSecond, l.ResumesPerSecond, l.ResumeTimeout, l.MaxAttempts = 1, 1, time.Second, 1
	}
	o.Limits = &l
	if seed%3 == 0 {
		o.Link = 1e8 * float64(1+seed%50)
	}
	o.Events = randomEvents(draw, &o, trace[len(trace)-1].At+5*time.Second)
	return name, trace, o
}

// Every request ends once, with its whole answer or a known error, while nodes die, drain and start
// and clients leave at random times. The laws of all nodes hold, no gateway counts
// anything in the end, and a second run is equal.
func TestRandomEvents(t *testing.T) {
	seeds := uint64(120)
	if testing.Short() {
		seeds = 40
	}
	if soaking() {
		seeds = 5000
	}
	var total Result
	reasons := map[error]int{}
	found := []uint64{
		346,  // a request's node depends on when the eviction of a block is published
		494,  // a step's allocations make room for a request that waits to reserve
		1674, // a request that was held is admitted behind later ones
	}
	for seed := range seeds + uint64(len(found)) {
		if seed >= seeds {
			seed = found[seed-seeds]
		}
		name, trace, o := eventsFleet(seed)
		r, err := Run(trace, o)
		if err != nil {
			t.Fatalf("seed %d, %s: %v\nevents: %v", seed, name, err, o.Events)
		}
		tokens := 0
		for i := range r.Requests {
			q := &r.Requests[i]
			tokens += q.emitted
			want := q.Output
			if q.Err != nil {
				want = q.emitted
				for _, known := range []error{ErrTooLong, ErrRefused, ErrNoNode, ErrNode, ErrDeadline, ErrCancelled, ErrGateway} {
					if errors.Is(q.Err, known) {
						reasons[known]++
						want = -1
					}
				}
				if want != -1 {
					t.Fatalf("seed %d: request %d: %v", seed, i, q.Err)
				}
				want = q.emitted
			}
			if !q.closed || q.a != nil || q.emitted != want || len(q.Gaps) != max(0, q.emitted-1) || q.emitted > 0 && (q.First <= q.At || q.Last < q.First) {
				t.Fatalf("seed %d: request %d of %d prompt and %d answer tokens has %d tokens, first at %v, last at %v, %d gaps, error %v",
					seed, i, q.Prompt, q.Output, q.emitted, q.First, q.Last, len(q.Gaps), q.Err)
			}
			if err := q.choice.Check(); err != nil {
				t.Fatalf("seed %d: request %d: %v", seed, i, err)
			}
		}
		if tokens != r.Tokens || r.Checks < o.Prefill+o.Decode {
			t.Fatalf("seed %d: %d tokens were counted, requests have %d; %d checks", seed, r.Tokens, tokens, r.Checks)
		}
		for _, s := range r.Samples {
			for _, u := range []Usage{s.Prefill, s.Decode} {
				if !(u.Busy >= 0 && u.Busy <= 1 && u.KV >= 0 && u.KV <= u.MaxKV+1e-9 && u.MaxKV <= 1) {
					t.Fatalf("seed %d: at %v: %+v", seed, s.At, u)
				}
			}
		}
		if o.Stepwise = seed%4 > 0; seed%2 == 0 { // the same again, or without steps that are planned ahead
			again, err := Run(trace, o)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if diff := r.differs(again); diff != "" {
				t.Fatalf("seed %d: a second run, stepwise %v, had another result: %s", seed, o.Stepwise, diff)
			}
		}
		total.Killed += r.Killed
		total.Started += r.Started
		total.Drained += r.Drained
		total.Cancelled += r.Cancelled
		total.Retried += r.Retried
		total.Resumed += r.Resumed
	}
	t.Logf("note: %d deaths, %d starts, %d drains, %d cancelled requests, %d retries, %d resumes, errors %v",
		total.Killed, total.Started, total.Drained, total.Cancelled, total.Retried, total.Resumed, reasons)
	if min(total.Killed, total.Started, total.Drained, total.Cancelled, total.Retried, total.Resumed) < 5 || len(reasons) < 5 {
		t.Error("too little happened")
	}
}

// differs returns what differs between two results; "": nothing.
func (r *Result) differs(other *Result) string {
	if a, b := r.Digest(), other.Digest(); a != b {
		for i := range r.Requests {
			p, q := &r.Requests[i], &other.Requests[i]
			if p.First != q.First || p.Last != q.Last || p.emitted != q.emitted || (p.Err == nil) != (q.Err == nil) || !slices.Equal(p.Gaps, q.Gaps) {
				return fmt.Sprintf("request %d: first %v, last %v, %d tokens, %v; then first %v, last %v, %d tokens, %v", i, p.First, p.Last, p.emitted, p.Err, q.First, q.Last, q.emitted, q.Err)
			}
		}
		return fmt.Sprintf("digests %x and %x", a, b)
	}
	for i := range min(len(r.Samples), len(other.Samples)) {
		if r.Samples[i] != other.Samples[i] {
			return fmt.Sprintf("samples %+v and %+v", r.Samples[i], other.Samples[i])
		}
	}
	a, b := *r, *other
	a.Requests, b.Requests = nil, nil
	if !reflect.DeepEqual(a, b) {
		a.Samples, b.Samples = nil, nil
		a.gaps.counts, b.gaps.counts = [4096]int64{}, [4096]int64{}
		return fmt.Sprintf("%+v and %+v", a, b)
	}
	return ""
}

// A stream whose node dies continues on another one: it has all of its tokens, and a pause.
func TestKilledNodesStreamsResume(t *testing.T) {
	o := dynamoFleet(t, 0, 2, 0, 1)
	o.Heartbeat = 100 * time.Millisecond
	o.Events = []Event{{At: 10 * time.Second, Action: Kill, Target: Target{Node: 1}}}
	undisturbed := o
	undisturbed.Events = nil
	r, before := play(t, 60, o), play(t, 60, undisturbed)
	if r.Resumed < 1 || r.Failed > 0 || r.Tokens != before.Tokens {
		t.Errorf("%d streams resumed, %d failed, %d tokens of %d", r.Resumed, r.Failed, r.Tokens, before.Tokens)
	}
	if r.Checks != 3 { // one of them when it died
		t.Errorf("%d checks, want 3", r.Checks)
	}
}

// The streams of a gateway that dies fail, the other's do not, and later requests of both arrive at
// the other until the first one is back.
func TestKilledGateway(t *testing.T) {
	o := dynamoFleet(t, 0, 2, 0, 1)
	o.Heartbeat, o.Gateways = 100*time.Millisecond, 2
	o.Events = []Event{{At: 10 * time.Second, Action: Kill, Target: Target{Gateway: true}}, {At: 20 * time.Second, Action: Start, Target: Target{Gateway: true}}}
	r := play(t, 200, o)
	failed, moved := 0, 0
	for i := range r.Requests {
		q := &r.Requests[i]
		if q.Err != nil {
			failed++
			if i%2 == 1 || q.At > 10*time.Second || !errors.Is(q.Err, ErrGateway) {
				t.Errorf("request %d at %v: %v", i, q.At, q.Err)
			}
		}
		if i%2 == 0 && q.g != r.Requests[0].g {
			moved++
			if q.At < 10*time.Second || q.At > 20*time.Second {
				t.Errorf("request %d at %v arrived at the other gateway", i, q.At)
			}
		}
	}
	if failed == 0 || moved == 0 || r.Killed != 1 {
		t.Errorf("%d requests failed, %d arrived at the other gateway, %d deaths", failed, moved, r.Killed)
	}
}

// While no node is left, requests fail or wait; a node that starts serves again.
func TestFleetThatRestarts(t *testing.T) {
	o := dynamoFleet(t, 0, 1, 0, 1)
	o.Heartbeat, o.Start = 100*time.Millisecond, 2*time.Second
	o.Events = []Event{{At: 10 * time.Second, Action: Kill, Target: Target{}}, {At: 20 * time.Second, Action: Start, Target: Target{}}}
	r := play(t, 200, o)
	for i := range r.Requests {
		q := &r.Requests[i]
		if down := q.At > 11*time.Second && q.At < 21*time.Second; down && !errors.Is(q.Err, ErrNoNode) || q.At > 23*time.Second && q.Err != nil {
			t.Errorf("request %d at %v: %v", i, q.At, q.Err)
		}
	}
	if r.Started != 1 || r.Killed != 1 {
		t.Errorf("%+v", r)
	}
	o.Events = []Event{{At: 0, Action: Drain, Target: Target{}, Timeout: time.Hour}}
	if r := play(t, 60, o); r.Failed == 0 || r.Failed == 60 || r.Drained != 1 { // some were there before
		t.Errorf("%d of 60 requests failed at a drained fleet", r.Failed)
	}
}

func TestParseEvent(t *testing.T) {
	for text, want := range map[string]Event{
		"120s kill decode-1":         {At: 2 * time.Minute, Action: Kill, Target: Target{Node: 1}},
		" 60s  drain prefill-0 10s ": {At: time.Minute, Action: Drain, Target: Target{Prefill: true}, Timeout: 10 * time.Second},
		"1m drain decode-0":          {At: time.Minute, Action: Drain, Timeout: DrainTimeout},
		"90s start decode-4":         {At: 90 * time.Second, Action: Start, Target: Target{Node: 4}},
		"2m kill gateway-1":          {At: 2 * time.Minute, Action: Kill, Target: Target{Gateway: true, Node: 1}},
		"30s cancel 10%":             {At: 30 * time.Second, Action: Cancel, Share: 0.1},
	} {
		got, err := ParseEvent(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
		if again, err := ParseEvent(got.String()); err != nil || again != want {
			t.Errorf("%q became %q: %+v, %v", text, got, again, err)
		}
	}
	for text, want := range map[string]string{
		"": "a time, an action and a node", "soon kill decode-1": "not a time", "-1s kill decode-1": "not a time", "1s stop decode-1": "not an action",
		"1s kill router-0": "not a node", "1s kill decode": "not a node", "1s kill decode--1": "not a node", "1s kill decode-1 2s": "one word too many",
		"1s drain decode-1 soon": "not a duration", "1s cancel 10": "not a share", "1s cancel 0%": "not a share", "1s cancel NaN%": "not a share", "1s start decode-100000": "not a node",
	} {
		if _, err := ParseEvent(text); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for text, want := range map[string]string{
		"1s kill decode-4": "has no decode-4: its last one is decode-3", "1s drain prefill-0": "has no prefill-0", "1s start prefill-0": "give it one",
	} {
		e, err := ParseEvent(text)
		if err != nil {
			t.Fatal(err)
		}
		o := dynamoFleet(t, 0, 4, 0, 1)
		o.Events = []Event{e}
		if err := o.resolve(); !errors.Is(err, ErrOptions) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// The queue of a gateway refuses requests beyond its bounds.
func TestQueueBounds(t *testing.T) {
	o := dynamoFleet(t, 0, 1, 0, 20)
	o.Heartbeat, o.MaxSeqs = 100*time.Millisecond, 4
	l := limits.Default()
	l.MaxQueuedRequests, l.NodeBacklog, l.QueueTimeout = 5, 1, 20*time.Second
	o.Limits, o.SampleEvery = &l, 100*time.Millisecond
	r := play(t, 300, o)
	refused, most := 0, 0
	for i := range r.Requests {
		if errors.Is(r.Requests[i].Err, ErrRefused) {
			refused++
		}
	}
	for _, s := range r.Samples {
		most = max(most, s.Waiting)
	}
	if refused < 50 || most < 4 || most > 5 {
		t.Errorf("%d of 300 requests were refused, at most %d waited", refused, most)
	}
}
