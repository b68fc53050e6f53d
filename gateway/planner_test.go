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
