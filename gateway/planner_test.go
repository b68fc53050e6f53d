package gateway

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/deploy/planner/control"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// planned is a planner for nodes whose prompts take a second for ten tokens.
func planned() *Planner {
	return &Planner{ID: "gw", Interval: time.Hour, Options: control.Options{
		Costs: control.Costs{PromptToken: 0.1, Fixed: 1e-3, PerSeq: 1e-3, KVTokens: 1e6, Start: time.Minute},
		TTFT:  2 * time.Second, ITL: 50 * time.Millisecond, Most: [2]int{20, 20},
	}}
}

// The planner counts requests and answers, asks for more nodes where the prompts need them, logs the
// change with its arithmetic, and only advises while another gateway leads or a majority is gone.
func TestPlanner(t *testing.T) {
	members := []nodes.Member{decodeMember("d"), {ID: "p", Role: "prefill", RPC: "p", Fingerprint: 7, Class: "test", Ready: true}, {ID: "gw", Role: "gateway"}}
	b := newBed(t, Options{Planner: planned(), Members: members}, map[string]nodestest.Options{"d": {}})
	p := b.g.planner
	if r := b.do("GET", "/admin/desired", ""); r.StatusCode != 503 {
		t.Errorf("before the first decision: status %d", r.StatusCode)
	}
	b.g.SetMembers(members)
	p.tick(0)
	if d := p.now.Load(); d.Prefill.Desired != nil || b.g.Meters.Gauge(metrics.DesiredNodes, "decode").Get() != 0 {
		t.Errorf("asks for nodes before it has seen the fleet: %+v", d)
	}
	for at := time.Duration(0); at < 2*time.Minute; at += plannerInterval {
		for range 10 {
			b.post("/v1/completions", `{"prompt":"`+strings.Repeat("x", 100)+`","max_tokens":2}`)
		}
		p.tick(at + plannerInterval)
	}
	view := func() (d desired) {
		t.Helper()
		r := b.do("GET", "/admin/desired", "")
		if err := json.Unmarshal([]byte(r.body), &d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := view()
	if !d.Leads || d.Model != "tiny" || d.Prefill.Desired == nil || *d.Prefill.Desired < 10 || d.Decode.Advised != 1 || d.Prefill.Changed == "" || !strings.Contains(d.Prefill.Why, "work ") {
		t.Errorf("%+v", d)
	}
	if v := b.g.Meters.Gauge(metrics.DesiredNodes, "prefill").Get(); int(v) != d.Prefill.Advised {
		t.Errorf("metric %v, answer %+v", v, d.Prefill)
	}
	if d.Note != "" || strings.Contains(b.log.String(), "another model") {
		t.Errorf("a profile without a model: %+v", d)
	}
	p.o.Model = "0x0000000000000007"
	p.tick(2*time.Minute + time.Second)
	if d := view(); d.Note != "" {
		t.Errorf("a profile of the nodes' model: %+v", d)
	}
	p.o.Model = "0x0000000000000008"
	p.tick(2*time.Minute + 2*time.Second)
	p.tick(2*time.Minute + 3*time.Second)
	if d := view(); !strings.Contains(d.Note, "another model") || strings.Count(b.log.String(), "planner: profile of another model") != 1 {
		t.Errorf("a profile of another model: %+v", d)
	}
	if text := b.log.String(); !strings.Contains(text, "planner: number of nodes changed") || !strings.Contains(text, "role=prefill from=") {
		t.Error(text)
	}
	b.g.SetMembers(append(members, nodes.Member{ID: "a", Role: "gateway"}))
	p.tick(3 * time.Minute)
	if d := view(); d.Leads || d.Prefill.Desired != nil || d.Prefill.Advised < 10 {
		t.Errorf("with a gateway of a lower id: %+v", d)
	}
	if v := b.g.Meters.Gauge(metrics.DesiredNodes, "prefill").Get(); v != 0 {
		t.Errorf("metric %v of a gateway that does not lead", v)
	}
	b.g.SetMembers(members[2:])
	p.tick(4 * time.Minute)
	if d := view(); d.Leads {
		t.Errorf("with one of four members: %+v", d)
	}
}

// Without a planner there is no answer.
func TestNoPlanner(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"d": {}})
	if r := b.do("GET", "/admin/desired", ""); r.StatusCode != 404 {
		t.Errorf("status %d", r.StatusCode)
	}
}

// A request of several choices is as many: its answers are counted one by one, too.
func TestPlannerCountsChoices(t *testing.T) {
	b := newBed(t, Options{Planner: planned()}, map[string]nodestest.Options{"d": {}})
	b.post("/v1/completions", `{"prompt":["aaaaaaaaaa","bbbb"],"n":3,"max_tokens":2}`)
	p := b.g.planner
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.demand.Requests != 6 || p.demand.Ended != 6 || p.demand.Work < 3.5 || p.demand.Work > 4.3 {
		t.Errorf("%+v", p.demand)
	}
}

// Demand of other gateways counts as they publish it. One that publishes none, such as one of an
// older release, is logged once and counts as the mean of the others.
func TestPlannerSums(t *testing.T) {
	members := []nodes.Member{decodeMember("d"), {ID: "gw", Role: "gateway"}, {ID: "x", Role: "gateway"}, {ID: "y", Role: "gateway"}}
	b := newBed(t, Options{Planner: planned(), Members: members}, map[string]nodestest.Options{"d": {}})
	b.g.SetMembers(members)
	p := b.g.planner
	var published []string
	p.publish = func(m []byte) bool {
		published = append(published, string(m))
		return true
	}
	at := time.Duration(0)
	tick := func(messages ...string) (requests, work, backlog float64) {
		for _, m := range messages {
			p.receive([]byte(m))
		}
		p.mu.Lock()
		p.demand.Requests, p.demand.Work = 2, 10
		p.mu.Unlock()
		at += plannerInterval
		s, _, _, _ := p.sample(at)
		return s.Requests, s.Work, s.Backlog
	}
	unknown := func(id string) int {
		return strings.Count(b.log.String(), `planner: demand of a gateway is unknown`+`" gateway=`+id)
	}
	if requests, work, _ := tick(); requests != 6 || work != 30 {
		t.Errorf("nothing is received: %g requests, %g s", requests, work)
	}
	x := `{"gateway":"x","requests":4,"work":20,"backlog":50,"of a later release":{"a":1}}`
	if requests, work, backlog := tick(x, x); requests != 15 || work != 75 || backlog != 7.5 {
		t.Errorf("x published 8 requests of 40 s: %g requests, %g s, backlog %g s", requests, work, backlog)
	}
	for _, bad := range []string{`{"gateway":"gw","requests":5}`, `{"gateway":"stranger","requests":5}`, `{"gateway":"y","requests":-5}`, `{"gateway":"y","work":1e999}`, `{"gateway":"y","backlog":-1}`, `{`, ``, `{"requests":5}`} {
		p.receive([]byte(bad))
	}
	if requests, _, _ := tick(x); requests != 9 {
		t.Errorf("%g requests", requests)
	}
	if unknown("y") != 1 || unknown("x") != 0 {
		t.Error(b.log.String())
	}
	y := `{"gateway":"y"}`
	if requests, _, _ := tick(x, y); requests != 6 {
		t.Errorf("y has none: %g requests", requests)
	}
	for range silentTicks {
		tick(y)
	}
	if requests, _, _ := tick(y); requests != 3 || unknown("x") != 1 || unknown("y") != 1 {
		t.Errorf("x is silent: %g requests\n%s", requests, b.log.String())
	}
	p.tick(at + plannerInterval)
	if d := p.now.Load(); d.Known != 2 || d.Unknown != 1 {
		t.Errorf("%+v", d)
	}
	b.g.SetMembers(members[:2])
	if requests, _, _ := tick(); requests != 2 || len(p.others) != 0 {
		t.Errorf("alone: %g requests, %d others", requests, len(p.others))
	}
	var m demandMessage
	if err := json.Unmarshal([]byte(published[0]), &m); err != nil || m.Gateway != "gw" || m.Requests != 2 || m.Work != 10 {
		t.Errorf("%s: %v", published[0], err)
	}
}

// A gateway that joins counts as one without requests until it publishes, or has been silent for
// too long: targets do not rise while gateways are started again one after the other.
func TestPlannerJoins(t *testing.T) {
	members := []nodes.Member{decodeMember("d"), {ID: "gw", Role: "gateway"}, {ID: "x", Role: "gateway"}}
	b := newBed(t, Options{Planner: planned(), Members: members[:2]}, map[string]nodestest.Options{"d": {}})
	p := b.g.planner
	p.tick(plannerInterval)
	b.g.SetMembers(members)
	for i := range 2 * silentTicks {
		p.mu.Lock()
		p.demand.Requests = 2
		p.mu.Unlock()
		want := 2.0
		if i+1 >= silentTicks {
			want = 4
		}
		if s, _, _, known := p.sample(time.Duration(2+i) * plannerInterval); s.Requests != want || known != 1 {
			t.Errorf("tick %d: %g requests of %d known gateways, want %g of 1", i, s.Requests, known, want)
		}
	}
}

// Requests that are refused because no node is there count: the fleet can grow from zero.
func TestPlannerFromZero(t *testing.T) {
	b := newBed(t, Options{Planner: planned()}, nil)
	p := b.g.planner
	for at := time.Duration(0); at < 130*time.Second; at += plannerInterval {
		for range 10 {
			if r := b.do("POST", "/v1/completions", `{"prompt":"`+strings.Repeat("x", 160)+`","max_tokens":2}`); r.StatusCode != 503 {
				t.Fatalf("status %d: %s", r.StatusCode, r.body)
			}
		}
		p.tick(at + plannerInterval)
		if d := p.now.Load(); at < 110*time.Second && d.Decode.Desired != nil {
			t.Errorf("after %v: %+v", at, d)
		}
	}
	d := p.now.Load()
	if d.Decode.Desired == nil || *d.Decode.Desired != 1 || d.Prefill.Desired == nil || *d.Prefill.Desired < 8 || d.Decode.Ready+d.Decode.Start != 0 {
		t.Errorf("%+v", d)
	}
	var longest control.Demand
	longest.Arrive(&p.o.Costs, int(p.o.Costs.KVTokens), 0)
	p.demand = control.Demand{}
	if p.unserved(1 << 40); p.demand != longest {
		t.Errorf("a body that no node can serve counts as %+v, want %+v", p.demand, longest)
	}
}
