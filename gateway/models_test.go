package gateway

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// other is a model whose tokenizer, template and context are not bundle's.
func other() *nodepb.Bundle {
	b := proto.CloneOf(bundle())
	b.Model, b.Fingerprint, b.MaxModelLen, b.VocabSize = "other", 8, 50, 259
	b.TokenizerJson = nodestest.Tokenizer([][2]string{{"H", "e"}}, "<|im_start|>", "<|im_end|>")
	b.ChatTemplate = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
	return b
}

// two is a gateway before two nodes of one model each.
func two(t *testing.T, o Options) *bed {
	t.Helper()
	second := decodeMember("d2")
	second.Fingerprint, second.Model = 8, "other"
	o.Members = []nodes.Member{decodeMember("d1"), second}
	b := newBed(t, o, map[string]nodestest.Options{"d1": {}, "d2": {Bundle: other()}})
	b.until(func() bool { return len(b.g.native.Models.All()) == 2 })
	return b
}

// Nodes of several models stand behind one URL: a request goes to those of its model,
// with that model's tokenizer, template and bounds.
func TestSeveralModels(t *testing.T) {
	b := two(t, Options{Upstreams: Upstreams{Options: upstream.Options{Names: map[string]string{"alias": "other"}}}})
	got := func(node string) int { return len(b.nodes[node].Requests()) }
	for i, c := range []struct{ model, node, prompt string }{
		{"tiny", "d1", "<|im_start|>user\nhi!<|im_end|>\n<|im_start|>assistant\n"}, {"other", "d2", "[hi!]"}, {"alias", "d2", "[hi!]"},
	} {
		before := got(c.node)
		r := b.post("/v1/chat/completions", fmt.Sprintf(`{"model":%q,"max_tokens":3,"messages":[{"role":"user","content":"hi!"}]}`, c.model))
		if a := r.parse(t); r.StatusCode != 200 || a.Model != c.model || got(c.node) != before+1 {
			t.Fatalf("%d: %d %s", i, r.StatusCode, r.body)
		}
		m, fault := b.g.native.Find(c.model)
		if fault != nil {
			t.Fatal(fault)
		}
		if text := m.Text.Decode(lastRequest(b, c.node).Prompt, false); text != c.prompt {
			t.Errorf("%s got %q", c.model, text)
		}
	}
	long := strings.Repeat("x", 60)
	b.post("/v1/completions", `{"model":"other","prompt":"`+long+`"}`).wantError(t, 400, "maximum context length is 50 tokens")
	if r := b.post("/v1/completions", `{"model":"tiny","max_tokens":1,"prompt":"`+long+`"}`); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
	b.post("/v1/completions", `{"model":"third","prompt":"x"}`).wantError(t, 404, `"third" does not exist`)
	b.post("/v1/completions", `{"prompt":"x"}`).wantError(t, 400, "several models")
	list := b.do("GET", "/v1/models", "")
	for _, m := range []string{"tiny", "other", "alias"} {
		if !strings.Contains(list.body, fmt.Sprintf(`"id":%q`, m)) {
			t.Errorf("%s is not in %s", m, list.body)
		}
		if r := b.do("GET", "/v1/models/"+m, ""); r.StatusCode != 200 || !strings.Contains(r.body, fmt.Sprintf(`"id":%q`, m)) {
			t.Errorf("%s: %d %s", m, r.StatusCode, r.body)
		}
	}
	if r := b.post("/tokenize", `{"model":"other","prompt":"He"}`); !strings.Contains(r.body, `"count":1`) {
		t.Error(r.body)
	}
	if r := b.post("/tokenize", `{"model":"tiny","prompt":"He"}`); !strings.Contains(r.body, `"count":2`) {
		t.Error(r.body)
	}
	if r := b.do("GET", "/debug/route?model=other&prompt=x", ""); !strings.Contains(r.body, `"decode":"d2"`) {
		t.Error(r.body)
	}
	// Of a model that nobody serves any more requests are refused, those of the other go on.
	b.g.SetMembers([]nodes.Member{decodeMember("d1")})
	b.until(func() bool { return len(b.g.native.Models.All()) == 1 })
	b.post("/v1/completions", `{"model":"other","prompt":"x"}`).wantError(t, 404, "does not exist")
	if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":1}`); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
}

// A new version under the same name waits until no node serves the present one.
func TestModelOfTheSameName(t *testing.T) {
	next := proto.CloneOf(bundle())
	next.Fingerprint = 8
	second := decodeMember("d2")
	second.Fingerprint = 8
	b := newBed(t, Options{Members: []nodes.Member{decodeMember("d1")}}, map[string]nodestest.Options{"d1": {}})
	b.node("d2", nodestest.Options{Bundle: next})
	b.g.SetMembers([]nodes.Member{decodeMember("d1"), second})
	b.until(func() bool { return strings.Contains(b.log.String(), "newer model of the same name waits") })
	for range 4 {
		if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":1}`); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	if n := len(b.nodes["d2"].Requests()); n != 0 || len(b.g.native.Models.All()) != 1 {
		t.Fatalf("%d requests of the present model reached the next", n)
	}
	time.Sleep(nodes.DefaultProbeInterval) // it is not asked again and again
	if n := strings.Count(b.log.String(), "newer model of the same name waits"); n != 1 {
		t.Errorf("asked %d times", n)
	}
	b.g.SetMembers([]nodes.Member{second})
	b.until(func() bool { m := b.g.native.Models.All(); return len(m) == 1 && m[0].Fingerprint == 8 })
}

// Each model has a queue of its own: one that is full holds up no other.
func TestModelsWaitApart(t *testing.T) {
	gate := make(chan struct{})
	second := decodeMember("d2")
	second.Fingerprint, second.Model = 8, "other"
	b := newBed(t, Options{Limits: Limits{NodeBacklog: 1}, APIKeyFile: keyFile(t, "a weight=2\nb\n"), Members: []nodes.Member{decodeMember("d1"), second}},
		map[string]nodestest.Options{"d1": {MaxRunning: 1, Gate: gate}, "d2": {Bundle: other(), MaxRunning: 1}})
	b.until(func() bool { return len(b.g.native.Models.All()) == 2 })
	full := func(m *native.Model) bool { return m.Queue().Room() < 1<<40 }
	b.until(func() bool { return full(b.g.native.Models.All()[0]) && full(b.g.native.Models.All()[1]) })
	var answers sync.WaitGroup
	for range 5 {
		c := b.dial()
		c.send("POST", "/v1/completions", `{"model":"tiny","prompt":"x","max_tokens":1}`, "Authorization: Bearer a")
		answers.Go(func() { defer c.Close(); c.receive() })
	}
	waiting := func() (n int64) {
		b.g.EachQueue(func(_ any, a *exchange.Admission) { n += a.Waiting() })
		return n
	}
	b.until(func() bool { return waiting() >= 3 })
	for _, key := range []string{"a", "b"} {
		if r := b.post("/v1/completions", `{"model":"other","prompt":"x","max_tokens":1}`, "Authorization: Bearer "+key); r.StatusCode != 200 {
			t.Error(r.StatusCode, r.body)
		}
	}
	close(gate)
	answers.Wait()
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	if all := b.g.native.Models.All(); slices.ContainsFunc(all, func(m *native.Model) bool { return !m.Queue().Idle() }) {
		t.Error("a queue is not empty")
	}
}

// A request that names no model is served by the native nodes of the one model that
// they have, and not by the servers of another kind beside them.
func TestModelNotNamed(t *testing.T) {
	n := rpc.NewNetwork()
	far := strangers(t, n, "s1")["s1"]
	far.does(whole)
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) { return n.Dial(ctx, addr) }
	b := newBedOn(t, n, Options{Upstreams: Upstreams{Options: upstream.Options{Targets: []upstream.Target{{URL: far.url()}}, Dial: dial}}}, map[string]nodestest.Options{"d1": {}})
	b.until(func() bool { return b.g.native.Models.Load() != nil && b.g.proxy.Pool.Now().Find("m") != nil })
	for _, c := range []struct {
		model             string
		native, elsewhere int
	}{{"", 1, 0}, {`"model":"tiny",`, 2, 0}, {`"model":"m",`, 2, 1}} {
		if r := b.post("/v1/completions", "{"+c.model+`"prompt":"x","max_tokens":1}`); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
		if native, elsewhere := len(b.nodes["d1"].Requests()), len(far.requests()); native != c.native || elsewhere != c.elsewhere {
			t.Errorf("{%s}: nodes were asked %d times and upstreams %d times, want %d and %d", c.model, native, elsewhere, c.native, c.elsewhere)
		}
	}
	for model, want := range map[string]int{`"model":"tiny",`: 404, "": 404, `"model":"m",`: 200} {
		before := len(far.requests())
		r := b.post("/v1/responses/compact", "{"+model+`"input":"x"}`)
		if n := len(far.requests()) - before; r.StatusCode != want || want == 404 && (n != 0 || !strings.Contains(r.body, "there is nothing at /v1/responses/compact")) {
			t.Errorf("{%s}: upstreams were asked %d times: %d %s", model, n, r.StatusCode, r.body)
		}
	}
}

// named is a member and node of bundle's weights under a name, which refuses requests under others
// as decode nodes do.
func named(addr, name string) (nodes.Member, nodestest.Options) {
	m, bd := decodeMember(addr), proto.CloneOf(bundle())
	m.Model, bd.Model = name, name
	return m, nodestest.Options{Bundle: bd, Refuse: func(r *nodepb.Generate) (nodepb.Code, string) {
		if r.Model != "" && r.Model != name {
			return nodepb.Code_CODE_NOT_FOUND, fmt.Sprintf("model %q is not served here, %q is", r.Model, name)
		}
		return 0, ""
	}}
}

// Nodes of equal weights are one model under each name that they announce: a request under any name
// goes to any node, under the node's name. A name leaves with its last node.
func TestModelOfSeveralNames(t *testing.T) {
	m1, o1 := named("d1", "tiny")
	m2, o2 := named("d2", "small")
	b := newBed(t, Options{Members: []nodes.Member{m1, m2}, Upstreams: Upstreams{Options: upstream.Options{Names: map[string]string{"alias": "small"}}}},
		map[string]nodestest.Options{"d1": o1, "d2": o2})
	ids := func() (ids []string) {
		for _, c := range b.g.native.Cards() {
			ids = append(ids, c.ID)
		}
		slices.Sort(ids)
		return ids
	}
	listed := func(want ...string) { t.Helper(); b.until(func() bool { return slices.Equal(ids(), want) }) }
	listed("alias", "small", "tiny")
	ask := func(model string) {
		t.Helper()
		for i := range 20 { // prompts of many homes
			r := b.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"%d","max_tokens":1}`, model, i))
			if a := r.parse(t); r.StatusCode != 200 || a.Model != model {
				t.Fatalf("%s: %d %s", model, r.StatusCode, r.body)
			}
		}
	}
	for _, model := range []string{"tiny", "small", "alias"} {
		was := [2]int{len(b.nodes["d1"].Requests()), len(b.nodes["d2"].Requests())}
		ask(model)
		if d1, d2 := len(b.nodes["d1"].Requests())-was[0], len(b.nodes["d2"].Requests())-was[1]; d1 == 0 || d2 == 0 || d1+d2 != 20 {
			t.Errorf("%s: %d attempts on d1 and %d on d2, want some on each, 20 in all", model, d1, d2)
		}
		if r := b.do("GET", "/v1/models/"+model, ""); r.StatusCode != 200 || !strings.Contains(r.body, fmt.Sprintf(`"id":%q`, model)) {
			t.Errorf("%s: %d %s", model, r.StatusCode, r.body)
		}
	}
	if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":1}`); r.StatusCode != 200 {
		t.Errorf("without a model: %d %s", r.StatusCode, r.body)
	}
	b.post("/v1/completions", `{"model":"third","prompt":"x"}`).wantError(t, 404, `"small", "tiny"`)

	b.g.SetMembers([]nodes.Member{m2})
	listed("alias", "small")
	b.post("/v1/completions", `{"model":"tiny","prompt":"x"}`).wantError(t, 404, `"tiny" does not exist`)
	ask("small")
	b.g.SetMembers([]nodes.Member{m1, m2})
	listed("alias", "small", "tiny")
	ask("tiny")
	b.g.SetMembers([]nodes.Member{m1})
	listed("tiny")
}

// A name belongs to one model: another model that has the name too gets it when the first has left,
// and serves under its other names until then.
func TestNameOfTwoModels(t *testing.T) {
	m1, o1 := named("d1", "tiny")
	m2, o2 := named("d2", "small")
	m3, o3 := named("d3", "small")
	m2.Fingerprint, o2.Bundle.Fingerprint = 8, 8
	b := newBed(t, Options{Members: []nodes.Member{m1, m2}}, map[string]nodestest.Options{"d1": o1, "d2": o2})
	b.until(func() bool { return len(b.g.native.Models.All()) == 2 })
	b.node("d3", o3)
	b.g.SetMembers([]nodes.Member{m1, m2, m3})
	b.until(func() bool { return b.g.native.Nodes.Now().Usable(7) == 2 })
	for i := range 10 {
		for _, model := range []string{"tiny", "small"} {
			if r := b.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"%d","max_tokens":1}`, model, i)); r.StatusCode != 200 {
				t.Fatalf("%s: %d %s", model, r.StatusCode, r.body)
			}
		}
	}
	if n := len(b.nodes["d2"].Requests()); n != 10 {
		t.Errorf("%d requests under the name of d2 reached it, want 10", n)
	}
	b.g.SetMembers([]nodes.Member{m1, m3})
	b.until(func() bool { m, fault := b.g.native.Find("small"); return fault == nil && m.Fingerprint == 7 })
}

// A name that the gateway's operator gave replaces all names that the nodes announce.
func TestServedNameOfSeveralNames(t *testing.T) {
	m1, o1 := named("d1", "tiny")
	m2, o2 := named("d2", "small")
	b := newBed(t, Options{ServedModelName: "mine", Members: []nodes.Member{m1, m2}}, map[string]nodestest.Options{"d1": o1, "d2": o2})
	for i := range 10 {
		if r := b.post("/v1/completions", fmt.Sprintf(`{"model":"mine","prompt":"%d","max_tokens":1}`, i)); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	b.post("/v1/completions", `{"model":"small","prompt":"x"}`).wantError(t, 404, `serves "mine"`)
	if cards := b.g.native.Cards(); len(cards) != 1 || cards[0].ID != "mine" {
		t.Errorf("%+v", cards)
	}
}
