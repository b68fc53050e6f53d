package fleet

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway/route"
)

// engineFleet has a prefill and a decode node: a step takes 10 ms if it decodes, and .1 ms for each
// prompt token.
func engineFleet() Options {
	return Options{
		Prefill: 1, Decode: 1, Blocks: 1000, BlockTokens: 16, RoundTrip: 4 * time.Microsecond, MinRemote: 1, NoEvents: true, Heartbeat: 100 * time.Millisecond,
		Steps: StepTimes{Name: "test", Step: func(s Shape, _ int) time.Duration {
			d := time.Duration(s.Chunk) * 100 * time.Microsecond
			if s.Streams > 0 {
				d += 10 * time.Millisecond
			}
			return d
		}},
	}
}

func prompt(i, tokens, output int, at time.Duration) sim.Request {
	return sim.Request{At: at, Tokens: tokens, Output: output, Block: 1 << 20, Blocks: []kvcache.Hash{kvcache.Hash(i + 1)}}
}

// A decode node adds a request and grants its KV between two steps, so that a request that arrives
// within a step waits for its end, and for the end of the next one.
func TestEngineAnswersBetweenSteps(t *testing.T) {
	r, err := Run([]sim.Request{prompt(0, 51, 20, 0), prompt(1, 51, 2, 27*time.Millisecond)}, engineFleet())
	if err != nil {
		t.Fatal(err)
	}
	// The first prompt takes 5 ms, and steps of the decode node end at 15, 25, 35 ms and so on. The
	// second request is added at 35 ms and granted at 45 ms, its KV is there at 50 ms, and it is in
	// the step from 55 to 65 ms.
	for i, want := range []time.Duration{15 * time.Millisecond, 65 * time.Millisecond} {
		if d := r.Requests[i].First - want; d.Abs() > 100*time.Microsecond {
			t.Errorf("request %d has its first token at %v, want %v", i, r.Requests[i].First, want)
		}
	}
}

// Prefill nodes reduce the tokens of a step that takes longer than StepTime.
func TestPrefillStepTime(t *testing.T) {
	chunks := func(o Options) (list []int) {
		o.Steps.Count = func(s Shape) {
			if s.Chunk > 0 {
				list = append(list, s.Chunk)
			}
		}
		if _, err := Run([]sim.Request{prompt(0, 1001, 1, 0), prompt(1, 1001, 1, time.Second)}, o); err != nil {
			t.Fatal(err)
		}
		return list
	}
	o := engineFleet()
	if got := chunks(o); !slices.Equal(got, []int{1000, 1000}) {
		t.Errorf("without a bound: steps of %v tokens", got)
	}
	o.StepTime = 30 * time.Millisecond                                    // 300 tokens
	if got := chunks(o); len(got) < 4 || got[0] != 1000 || got[1] > 600 { // the first request of a step may have twice as many
		t.Errorf("steps of %v tokens", got)
	}
}

// idleFleet is a fleet without requests, and its gateway.
func idleFleet(t *testing.T) (*fleet, *gateway) {
	t.Helper()
	f := &fleet{o: engineFleet()}
	f.decodeKind, f.prefillKind = f.o.kinds()
	if err := f.o.resolve(); err != nil {
		t.Fatal(err)
	}
	f.setLimits()
	for i := range 2 {
		n, err := f.newNode(0, i == 1)
		if err != nil {
			t.Fatal(err)
		}
		if n.up = true; i == 1 {
			f.prefill = append(f.prefill, n)
		} else {
			f.decode = append(f.decode, n)
		}
	}
	f.table, f.decodeBlocks, f.prefillBlocks = newTable(f), route.NewIndex(), route.NewIndex()
	f.decodeBlocks.Grow(1)
	f.prefillBlocks.Grow(1)
	f.gateways = []*gateway{newGateway(f, 0)}
	return f, f.gateways[0]
}

// A node whose load does not change makes every fifth of its reports, which begin at 50 ms here.
func TestReportsOfUnchangedLoad(t *testing.T) {
	f, g := idleFleet(t)
	f.startHeartbeats()
	g.decode.reports[0].Rate = 7 // until the next report
	for f.clock.heap[0].at < 449*time.Millisecond {
		if f.clock.next(); g.decode.reports[0].Rate != 7 {
			t.Fatalf("the node reported at %v, although nothing has changed", f.clock.now)
		}
	}
	for f.clock.heap[0].at < 451*time.Millisecond {
		f.clock.next()
	}
	if g.decode.reports[0].Rate != 0 {
		t.Error("the node has not reported after 450 ms")
	}
}

// A report does not have what arrives within a step before that step has ended.
func TestReportsAreOfTheLastStep(t *testing.T) {
	f, _ := idleFleet(t)
	n := f.decode[0]
	f.tokens = make([]int32, 40)
	for i, want := range []int{1, 1} { // requests that the report has while the first one's step runs
		if _, _, err := n.add(scheduler.Request{Tokens: f.tokens, MaxNew: 10}); err != nil {
			t.Fatal(err)
		}
		n.start()
		if r := n.report(); r.Running+r.Waiting != want {
			t.Errorf("with %d requests: the report has %d running and %d waiting, want %d", i+1, r.Running, r.Waiting, want)
		}
	}
	f.clock.next() // the step ends, and one with both requests begins
	if r := n.report(); r.Running != 2 {
		t.Errorf("after the step: the report has %d running requests, want 2", r.Running)
	}
}

// A gateway's view has whether a decode node computed its last prompt that was worth a transfer.
func TestRemembersPlaceOfPrefill(t *testing.T) {
	f, g := idleFleet(t)
	for _, c := range []struct {
		reason route.Reason
		want   bool
	}{{route.ReasonLocal, true}, {route.ReasonShort, true}, {route.ReasonRemote, false}, {route.ReasonShort, false}} {
		g.remember(&route.Decision{PrefillReason: c.reason})
		if g.decode.look(&f.o, 0); g.decode.states[0].Local != c.want {
			t.Errorf("after %s: local %v, want %v", c.reason, g.decode.states[0].Local, c.want)
		}
	}
}

// A step whose request ends meanwhile has the prompt tokens that it had at its start: a request that
// decodes has none, and the node's measured rate stays.
func TestRateWithoutPromptTokens(t *testing.T) {
	f, g := idleFleet(t)
	n := f.decode[0]
	f.tokens = make([]int32, 40)
	r := &Request{Prompt: 30, Output: 1000, idTokens: 16, g: g}
	g.send(r, route.Decision{})
	f.clock.next() // the step of the prompt ends
	rate := n.rate
	for range 3 {
		f.clock.next()
	}
	if n.remove(r.a); rate == 0 || n.rate != rate {
		t.Fatalf("tokens per second: %g, then %g", rate, n.rate)
	}
	f.clock.next() // the running step ends
	if n.stepping || n.rate != rate {
		t.Errorf("stepping %v, %g tokens per second, want %g", n.stepping, n.rate, rate)
	}
}
