package planner

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

// h100 is an H100 that computes Llama 3.1 8B in bfloat16, by the coefficients of
// bench/sim/fleet/steptime.go.
func h100() Node {
	const fixed, perToken, perPair = 6.403e-3, 20.36e-6, .782e-9
	return Node{
		Name: "h100", GPUs: 1, Price: 2.99, KVTokens: 806 * 512, Fixed: fixed, PerSeq: 10.57e-6, PerCtx: 42.19e-9, Alone: fixed + 10.57e-6,
		Chunk: func(tokens, start int) float64 {
			return fixed + perToken*float64(tokens) + perPair*float64(tokens)*(float64(start)+float64(tokens)/2)
		},
	}
}

// close reports whether a is within a relative error of b.
func close(a, b, within float64) bool { return math.Abs(a-b) <= within*math.Abs(b) }

// Times of prompts, as worked out by hand and by an exact recursion.
func TestPrompts(t *testing.T) {
	n := h100()
	times := promptTimes{n: &n, batch: 8192}
	for tokens, want := range map[int]float64{12_035: .314, 52_000: 2.16, 85_401: 4.66} {
		if got := times.seconds(tokens, 0); !close(got, want, .005) {
			t.Errorf("%d tokens take %.4g s, want %g", tokens, got, want)
		}
	}
	if got, want := times.seconds(1000, 1000), n.Chunk(1, 999); got != want {
		t.Errorf("a cached prompt takes %g s, want that of one token, %g", got, want)
	}
}

// load is a load of equal requests.
func load(n int, rate float64, prompt, output int) (list []Request) {
	for i := range n {
		list = append(list, Request{At: time.Duration(float64(i) / rate * 1e9), Prompt: prompt, Output: output})
	}
	return list
}

// The fixed point of decoding, of Mooncake's conversation trace at three times its pace.
func TestDecoding(t *testing.T) {
	n := h100()
	d := Demand{Rate: 10.20, Output: 343, Context: 13_126}
	for nodes, want := range map[int]float64{3: 18.7e-3, 4: 12.6e-3, 5: 10.6e-3, 6: 9.5e-3} {
		if s := d.Decoding(&n, nodes); !close(s.ITL, want, .02) {
			t.Errorf("%d nodes: %.3g s between tokens, want %g", nodes, s.ITL, want)
		}
	}
	if s := d.Decoding(&n, 3); !close(s.KV, .69, .05) {
		t.Errorf("3 nodes use %.2f of their KV memory, want .69", s.KV)
	}
	if s := d.Decoding(&n, 1); !math.IsInf(s.ITL, 1) {
		t.Errorf("one node decodes at %g s a token, which it cannot", s.ITL)
	}
	if got := 1 / (n.PerSeq + n.PerCtx*d.Context); !close(got, 1772, .005) {
		t.Errorf("at most %.0f tokens per second and node, want 1,772", got)
	}
}

// The wait of M/M/1 and of M/D/1, and Erlang's C of two servers.
func TestWait(t *testing.T) {
	for _, c := range []struct {
		variation float64
		k         int
		work      float64
		want      float64
	}{
		{1, 1, .5, 1},                         // ρ/(1-ρ)
		{0, 1, .5, .5},                        // half of it
		{1, 2, 1, 1.0 / 3},                    // C(2, 1) = 1/3
		{4.10, 4, 2.8, 2.55 * .4287 / 4 / .3}, // ρ = .7
		{1, 1, 1, math.Inf(1)},
	} {
		d := Demand{Work: c.work, Service: 1, Variation: c.variation}
		if got := d.Wait(c.k); !close(got, c.want, .001) && got != c.want {
			t.Errorf("%+v: %g", c, got)
		}
	}
	n := h100()
	requests := load(10, 1000, 8000, 1)
	one := (promptTimes{n: &n, batch: 8192}).seconds(8000, 0)
	d := Describe(&n, requests, 8192, 8192)
	if got := d.Backlog(&n, requests, 8192, 2); !close(got, 5*one, .03) {
		t.Errorf("ten prompts at once: the backlog of two nodes is %g s, want %g", got, 5*one)
	}
}

// world is a simulator whose fleets meet the objectives from given numbers of nodes on.
type world struct {
	prefill, decode, colocated int // at the load 1, for pools with 4 prefill nodes fewer decode nodes are enough
	runs, requests             int
}

func (w *world) simulate(cases []Case) (list []Outcome, err error) {
	for _, c := range cases {
		w.runs++
		w.requests += map[bool]int{true: 100, false: 1000}[c.Part]
		x := c.Load * c.Slow
		need := func(n int) float64 { return x * float64(n) }
		ok := float64(c.Decode) >= need(w.colocated)
		if c.Prefill > 0 {
			ok = float64(c.Prefill) >= need(w.prefill) && float64(c.Decode) >= need(w.decode) && float64(c.Nodes()) >= need(w.prefill+w.decode+1)
		}
		o := Outcome{Values: []time.Duration{time.Second, 20 * time.Millisecond}, Goodput: .99, PrefillBusy: .7, DecodeKV: .5}
		if !ok {
			o.Values[0], o.Goodput = 9*time.Second, .3
			if float64(c.Prefill) < need(w.prefill) {
				o.PrefillBusy = .95
			} else {
				o.DecodeKV = .99
			}
		}
		list = append(list, o)
	}
	return list, nil
}

func problem(w *world) Problem {
	n := h100()
	return Problem{
		Nodes: []Node{n}, Requests: load(1000, 10, 2000, 200), Objectives: []Objective{{TTFT, 90, 2 * time.Second}, {TPOT, 90, 50 * time.Millisecond}},
		Settings: []Settings{{2048, 256, 16}}, Colocated: true, Disjoint: true, MaxNodes: 400, Budget: 100_000, Whole: 1000, PartOf: 100, Simulate: w.simulate,
	}
}

// The least fleet is found, with its neighbours, the load at which it fails, and within the budget.
func TestFindsTheLeast(t *testing.T) {
	for _, c := range []struct {
		w            world
		want         string
		holds, fails float64
	}{
		{world{prefill: 3, decode: 4, colocated: 9}, "8 nodes", 1, 1.1},
		{world{prefill: 3, decode: 4, colocated: 8}, "8 nodes", 1, 1.1},
		{world{prefill: 3, decode: 4, colocated: 7}, "7D", 1, 1.1},
		{world{prefill: 1, decode: 1, colocated: 30}, "3 nodes", 1, 1.1},
		{world{prefill: 70, decode: 120, colocated: 300}, "191 nodes", 1, 1.05},
	} {
		w := c.w
		p := problem(&w)
		plan, err := Make(p)
		if err != nil {
			t.Fatal(err)
		}
		size := plan.Fleet.Size()
		if strings.HasSuffix(c.want, "nodes") {
			size = fmt.Sprintf("%d nodes", plan.Fleet.Nodes())
		}
		if size != c.want || !plan.Meets || !plan.Finished || plan.Spent > p.Budget || plan.Spent != w.requests {
			t.Errorf("%+v: %s (%s), %d requests of %d, finished %v", w, plan.Fleet.Size(), c.want, plan.Spent, w.requests, plan.Finished)
		}
		if plan.Holds < c.holds || plan.Fails > c.fails+.1 || plan.Fails <= plan.Holds || len(plan.Breaks) == 0 {
			t.Errorf("%+v: holds at %g, fails at %g, %v", w, plan.Holds, plan.Fails, plan.Breaks)
		}
		for _, n := range plan.Neighbours {
			if n.Nodes() < plan.Fleet.Nodes() && n.Meets {
				t.Errorf("%+v: %s meets the objectives with fewer nodes than %s", w, n.Size(), plan.Fleet.Size())
			}
		}
		again := c.w
		p.Simulate = again.simulate
		if second, err := Make(p); err != nil || !reflect.DeepEqual(plan, second) {
			t.Errorf("%+v: a second plan differs: %v", w, err)
		}
	}
}

// A fleet of all nodes that are allowed is divided in other ways if the guess fails.
func TestSplitsTheMost(t *testing.T) {
	for _, w := range []world{{prefill: 8, decode: 3, colocated: 99}, {prefill: 3, decode: 8, colocated: 99}, {prefill: 6, decode: 5, colocated: 99}} {
		p := problem(&w)
		p.MaxNodes = 12
		if plan, err := Make(p); err != nil || !plan.Meets || plan.Fleet.Nodes() != 12 {
			t.Errorf("%+v: %+v, %v, want 12 nodes that meet the objectives", w, plan, err)
		}
	}
}

// With two kinds of nodes, the cheapest fleet is not the one with the fewest nodes.
func TestTwoKinds(t *testing.T) {
	w := &world{}
	p := problem(w)
	cheap, dear := h100(), h100()
	cheap.Name, cheap.Price, dear.Price = "cheap", 1, 10
	dear.Prefill = &cheap
	p.Nodes = []Node{dear}
	p.Simulate = func(cases []Case) (list []Outcome, err error) {
		for _, c := range cases {
			o := Outcome{Values: []time.Duration{time.Second, 20 * time.Millisecond}, Goodput: .99}
			if float64(c.Prefill+3*c.Decode) < 9*c.Load*c.Slow {
				o.Values[0], o.Goodput = 9*time.Second, .3
			}
			list = append(list, o)
		}
		return list, nil
	}
	plan, err := Make(p)
	if err != nil {
		t.Fatal(err)
	}
	if plan.Fleet.Size() != "6P1D" || plan.Price != 16 || !plan.Meets || len(plan.Alternatives) != 1 {
		t.Errorf("%s at %g, meets %v, %d alternatives: want 6P1D at 16", plan.Fleet.Size(), plan.Price, plan.Meets, len(plan.Alternatives))
	}
	// The bounds are those of the faster kind for each prompt.
	slow := h100()
	slow.Chunk = func(tokens, start int) float64 { return 5 * cheap.Chunk(tokens, start) }
	fast := Describe(&cheap, p.Requests, 2048, 2048)
	for _, n := range []Node{{Name: "x", Chunk: slow.Chunk, Prefill: &cheap}, {Name: "y", Chunk: cheap.Chunk, Prefill: &slow}} {
		d, f := Describe(&n, p.Requests, 2048, 2048), FloorOf(&n, p.Requests, 2048, time.Second, 90)
		if !close(d.LeastWork, fast.LeastWork, 1e-9) || !close(d.Work, fast.Work*map[string]float64{"x": 1, "y": 5}[n.Name], 1e-9) || f.TTFT != FloorOf(&cheap, p.Requests, 2048, time.Second, 90).TTFT-duration(cheap.Latency) {
			t.Errorf("%s: least work %g, work %g, floor %v; the faster kind has %g and %g", n.Name, d.LeastWork, d.Work, f.TTFT, fast.LeastWork, fast.Work)
		}
	}
}

// However small the budget, it is kept.
func TestBudget(t *testing.T) {
	found := 0
	for budget := 1000; budget < 60_000; budget += 700 {
		w := world{prefill: 3, decode: 4, colocated: 9}
		p := problem(&w)
		p.Budget = budget
		plan, err := Make(p)
		if w.requests > budget {
			t.Fatalf("budget %d: %d requests", budget, w.requests)
		}
		switch {
		case err != nil && !errors.Is(err, ErrProblem):
			t.Fatal(err)
		case err == nil && plan.Finished:
			found++
		}
	}
	if found == 0 {
		t.Error("no budget was enough")
	}
}

// An estimate has a fleet that holds if its step times are too short by their error.
func TestSafe(t *testing.T) {
	w := world{prefill: 3, decode: 4, colocated: 9}
	p := problem(&w)
	p.Nodes[0].Error = .25
	plan, err := Make(p)
	if err != nil || plan.Safe == nil || plan.Safe.Nodes() != 10 || plan.Safe.Slow != 1.25 {
		t.Errorf("%+v, %v", plan, err)
	}
	p.Spare = 2
	if plan, err = Make(p); err != nil || plan.Fleet.Nodes() != plan.Needed.Nodes()+4 {
		t.Errorf("%+v, %v", plan, err)
	}
}

// What no number of nodes changes is an answer, not a search.
func TestFloor(t *testing.T) {
	for _, c := range []struct {
		change func(*Problem)
		want   string
	}{
		{func(p *Problem) { p.Objectives[0].Limit = 30 * time.Millisecond }, "TTFT p90 cannot be at most 30ms on h100: 100.0 % of the prompts take longer on an idle node; raise the limit to 49ms"},
		{func(p *Problem) { p.Objectives[1].Limit = 5 * time.Millisecond }, "TPOT p90 cannot be at most 5ms on h100: a request alone on a node takes 6.5ms a token"},
		{func(p *Problem) { p.Goodput, p.Requests[7].Prompt = .9995, 60_000 }, "goodput cannot be 0.9995 on h100: the first token of 0.1 % of the requests"},
		{func(p *Problem) { p.MaxNodes, p.Requests = 2, load(1000, 100, 2000, 200) }, "nodes are needed, and at most 2 are allowed"},
		{func(p *Problem) { p.Budget = 10 }, "raise it to 20000 or more"},
	} {
		w := world{prefill: 3, decode: 4, colocated: 9}
		p := problem(&w)
		c.change(&p)
		_, err := Make(p)
		if !errors.Is(err, ErrProblem) || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("want %q: %v", c.want, err)
		}
		if w.runs > 0 {
			t.Errorf("%q: %d simulations", c.want, w.runs)
		}
	}
}

// least finds the least number from any guess.
func TestLeast(t *testing.T) {
	for low := 1; low < 4; low++ {
		for want := low; want <= 41; want++ {
			for guess := 0; guess < 50; guess += 3 {
				got, err := least(low, guess, 40, func(n int) (bool, error) {
					if n < low || n > 40 {
						t.Fatalf("tried %d", n)
					}
					return n >= want, nil
				})
				if got != want || err != nil {
					t.Fatalf("from %d, guess %d: %d, want %d", low, guess, got, want)
				}
			}
		}
	}
}

// Prompts that wait are no cause of long times between tokens.
func TestCause(t *testing.T) {
	o := &Outcome{PrefillBusy: .99, DecodeBusy: 1, DecodeKV: .95, TTFT: Quantiles{P90: 9 * time.Second}, TPOT: Quantiles{P90: time.Second}}
	for _, c := range []struct {
		objective Metric
		pools     bool
		want      string
	}{
		{TTFT, true, "prefill nodes compute 99 %"},
		{TTFT, false, "KV memory of nodes is full (95 %"},
		{E2EL, true, "prefill nodes compute 99 %"},
		{TPOT, true, "steps of decode nodes take longer"},
		{TPOT, false, "steps of nodes take longer"},
		{ITL, false, "steps of nodes take longer"},
	} {
		if got := Cause(o, c.pools, Objective{Metric: c.objective, Percentile: 90}.Name()); !strings.HasPrefix(strings.TrimPrefix(got, "the "), c.want) {
			t.Errorf("%s, pools %v: %q, want %q", c.objective, c.pools, got, c.want)
		}
	}
	o.Failed, o.TTFT.P99 = 7, Failing
	if got := Cause(o, false, "TPOT p90"); got != "7 requests are refused, because too many wait" {
		t.Error(got)
	}
}
