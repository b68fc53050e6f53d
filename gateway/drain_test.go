package gateway

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// A drained node gets nothing new, until it is taken back.
func TestDrainNode(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": {}, "d2": {}})
	for _, c := range []struct {
		method, path, header string
		want                 int
		says                 string
	}{
		{"POST", "/admin/drain/d9", "X-A: b", 404, "d9"},
		{"POST", "/admin/drain/", "X-A: b", 404, "nothing"},
		{"POST", "/admin/drain/d1?timeout=soon", "X-A: b", 400, "soon"},
		{"POST", "/admin/drain/d1?timeout=0s", "X-A: b", 400, "1ms"},
		{"POST", "/admin/drain/d1?timeout=25h", "X-A: b", 400, "24h"},
		{"POST", "/admin/drain/d1", "Origin: http://example.com", 403, "web pages"},
		{"GET", "/admin/drain/d1", "X-A: b", 405, "POST"},
	} {
		if r := b.do(c.method, c.path, "", c.header); r.StatusCode != c.want || !strings.Contains(r.body, c.says) {
			t.Errorf("%s %s: %d %s", c.method, c.path, r.StatusCode, r.body)
		}
	}
	if n := len(b.nodes["d1"].Drains()); n != 0 {
		t.Fatalf("d1 was told %d times", n)
	}
	r := b.post("/admin/drain/d1?timeout=1500ms", "")
	if want := `{"node":"d1","role":"decode","draining":true,"timeout_s":1.5,"in_flight":0,"others":1}`; r.StatusCode != 200 || r.body != want {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.native.Usable() == 1 })
	if ds := b.nodes["d1"].Drains(); len(ds) != 1 || ds[0].TimeoutMs != 1500 || ds[0].Cancel {
		t.Errorf("%v", ds)
	}
	for range 20 {
		if r := b.post("/v1/completions", `{"prompt":"a","max_tokens":2}`, "X-Tandem-Policy: round_robin"); r.StatusCode != 200 {
			t.Fatalf("%d %s", r.StatusCode, r.body)
		}
	}
	if n := len(b.nodes["d1"].Requests()); n != 0 {
		t.Errorf("d1 got %d requests", n)
	}
	if r := b.post("/admin/drain/d1", ""); r.StatusCode != 200 || !strings.Contains(r.body, `"draining":true,"timeout_s":30,`) {
		t.Fatalf("without a timeout: %d %s", r.StatusCode, r.body)
	}
	if r := b.do("DELETE", "/admin/drain/d1", ""); r.StatusCode != 200 || !strings.Contains(r.body, `"draining":false,"in_flight"`) {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.native.Usable() == 2 })
	b.nodes["d1"].Stop()
	b.until(func() bool { return b.g.native.Usable() == 1 })
	if r := b.post("/admin/drain/d1", ""); r.StatusCode != 503 || r.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// A node whose constrained streams no other node can continue is drained with the time of a whole
// request.
func TestDrainLastConstrained(t *testing.T) {
	gate := make(chan struct{})
	o := constraining("d1", grammar.Version)
	o.Gate = gate
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": o, "d2": constraining("d2", grammar.Version+1)})
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", `{"prompt":[1,2,3],"max_tokens":2,"stream":true,"structured_outputs":{"regex":"z*"}}`)
	b.until(func() bool { // the gateway counts the stream after it has sent the request
		return slices.ContainsFunc(b.g.native.Nodes.Now().Decode, func(n *nodes.Node) bool { return n.Constrained.Load() == 1 })
	})
	r := b.post("/admin/drain/d1?timeout=30s", "")
	if e := r.parse(t).Error; r.StatusCode != 409 || e == nil || !strings.Contains(e.Message, fmt.Sprintf("node d1 is the last with grammars of version %d and runs 1 constrained streams", grammar.Version)) {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	for path, want := range map[string]string{"/admin/drain/d1": `"timeout_s":1800,`, "/admin/drain/d1?timeout=1h": `"timeout_s":3600,`, "/admin/drain/d2": `"timeout_s":30,`} {
		if r := b.post(path, ""); r.StatusCode != 200 || !strings.Contains(r.body, want) {
			t.Errorf("%s: %d %s", path, r.StatusCode, r.body)
		}
	}
	feed(gate, 2)
	if r := c.receive(); r.StatusCode != 200 || r.err != nil {
		t.Errorf("%d %q %v", r.StatusCode, r.body, r.err)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if r := b.post("/admin/drain/d1?timeout=5s", ""); r.StatusCode != 200 || !strings.Contains(r.body, `"timeout_s":5,`) {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// A name that several nodes have is refused with their addresses, each of which names one.
func TestDrainAmbiguous(t *testing.T) {
	first, second := decodeMember("d1"), decodeMember("d2")
	first.ID, second.ID = cluster.NewID("d", time.Unix(1, 0)), cluster.NewID("d", time.Unix(2, 0))
	b := newBed(t, Options{Members: []nodes.Member{first, second}}, map[string]nodestest.Options{"d1": {}, "d2": {}})
	r := b.post("/admin/drain/d", "")
	if r.StatusCode != 409 || !strings.Contains(r.body, "2 nodes are called d: ") || !strings.Contains(r.body, "at d1 (decode)") || !strings.Contains(r.body, "at d2 (decode)") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if n := len(b.nodes["d1"].Drains()) + len(b.nodes["d2"].Drains()); n != 0 {
		t.Errorf("%d nodes were drained", n)
	}
	if r := b.post("/admin/drain/d2", ""); r.StatusCode != 200 || !strings.Contains(r.body, `"draining":true`) {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return len(b.nodes["d2"].Drains()) == 1 })
}
