package gateway

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// asked is where requests of a prompt went, by the header that asks for a policy.
func (b *bed) asked(n int, headers ...string) map[string]int {
	b.Helper()
	before, at := map[string]int{}, map[string]int{}
	for name, node := range b.nodes {
		before[name] = len(node.Requests())
	}
	for range n {
		if r := b.post("/v1/completions", `{"prompt":"the same prompt","max_tokens":2}`, headers...); r.StatusCode != 200 {
			b.Fatalf("%d %s", r.StatusCode, r.body)
		}
	}
	for name, node := range b.nodes {
		if n := len(node.Requests()) - before[name]; n > 0 {
			at[name] = n
		}
	}
	return at
}

func TestPolicies(t *testing.T) {
	b := newBed(t, Options{Policy: "consistent_hash"}, map[string]nodestest.Options{"d1": {}, "d2": {}, "d3": {}})
	if at := b.asked(6); len(at) != 1 {
		t.Errorf("consistent_hash spread one prompt over %v", at)
	}
	if at := b.asked(6, "X-Tandem-Policy: round_robin"); at["d1"] != 2 || at["d2"] != 2 || at["d3"] != 2 {
		t.Errorf("round_robin: %v", at)
	}
	if at := b.asked(2, "X-Tandem-Policy: least_load"); len(at) != 1 {
		t.Errorf("least_load of an idle fleet: %v", at)
	}
	if at := b.asked(40, "X-Tandem-Policy: power_of_two"); len(at) < 2 {
		t.Errorf("power_of_two of an idle fleet: %v", at)
	}
	spread := map[string]bool{}
	for i := range 20 {
		at := b.asked(2, "X-Tandem-Policy: session", fmt.Sprintf("X-Session-Id: s%d", i))
		if len(at) != 1 {
			t.Errorf("session %d: %v", i, at)
		}
		for name := range at {
			spread[name] = true
		}
	}
	if len(spread) != 3 {
		t.Errorf("20 sessions met %v", spread)
	}
	if r := b.post("/v1/completions", `{"prompt":"x"}`, "X-Tandem-Policy: luck"); r.StatusCode != 400 || !strings.Contains(r.body, "round_robin") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if _, err := New(Options{Policy: "luck", RPC: rpc.Options{Hello: &nodepb.Hello{}}}); err == nil {
		t.Error("an unknown policy is taken")
	}
}

// Caches and queues that nodes tell of decide, and /debug/route says so.
func TestRouteIsExplained(t *testing.T) {
	member := func(at, role string) nodes.Member {
		return nodes.Member{ID: at, Role: role, RPC: at, Fingerprint: 7, Class: "test", Ready: true}
	}
	east := member("d1", "decode")
	east.ID = cluster.NewID("east", time.Now())
	b := newBed(t, Options{
		MinRemotePrefillTokens: 32, APIKeys: []string{"k"},
		Members: []nodes.Member{east, member("p1", "prefill"), member("p2", "prefill")},
	}, map[string]nodestest.Options{"d1": {}})
	for _, at := range []string{"p1", "p2"} {
		b.node(at, nodestest.Options{Hello: &nodepb.Hello{NodeId: at, Role: "prefill"}})
		b.until(func() bool { return b.nodes[at].Connected() == 1 })
	}
	text := strings.Repeat("a long prompt ", 100)
	ask := func() (e explanation) {
		t.Helper()
		r := b.do("GET", "/debug/route?prompt="+url.QueryEscape(text), "", "Authorization: Bearer k")
		if err := json.Unmarshal([]byte(r.body), &e); err != nil || r.StatusCode != 200 || e.Decode != "d1" {
			t.Fatalf("%d %s %v", r.StatusCode, r.body, err)
		}
		return e
	}
	// The nodes have the connections before the gateway knows that it has them.
	b.until(func() bool {
		return !slices.ContainsFunc(ask().Nodes, func(n routeNode) bool { return !n.Usable })
	})
	if e := ask(); e.Nodes[0].ID != "east" || e.Nodes[0].Name != "d1" || !strings.HasPrefix(e.Words[0], "Decode on east at d1: ") {
		t.Errorf("the name that people use is not in %+v", e)
	}
	home := ask().Prefill[0]
	other := map[string]string{"p1": "p2", "p2": "p1"}[home]
	stats := func(at string, queued uint32) {
		t.Helper()
		b.nodes[at].Send(rpc.FrameStats, &nodepb.Stats{PrefillTokensPerS: 1000, QueuedTokens: queued})
		b.until(func() bool {
			for _, n := range ask().Nodes {
				if n.Name == at && n.Rate == 1000 && n.Queued == int(queued) {
					return true
				}
			}
			return false
		})
	}
	stats(home, 20000)
	stats(other, 100)
	if e := ask(); e.Prefill[0] != other || !strings.Contains(strings.Join(e.Words, " "), "100 tokens queued") {
		t.Errorf("a queue of 20,000 tokens is taken: %+v", e)
	}
	stats(home, 100)
	if e := ask(); e.Prefill[0] != home {
		t.Errorf("equal queues, and not at home: %+v", e)
	}
	m := b.g.native.Models.Load()
	e := cluster.BlockEvent{Node: other}
	for _, h := range kvcache.AppendHashes(nil, m.Root(""), m.Text.Tokens(text, true), m.BlockTokens) {
		e.Stored = append(e.Stored, cluster.Stored{Hash: uint64(h)})
	}
	b.g.native.Blocks.Blocks(e)
	if e := ask(); e.Prefill[0] != other || !strings.Contains(strings.Join(e.Words, " "), "1392 of the prompt's cached") {
		t.Errorf("what %s holds is not seen: %+v", other, e)
	}
	b.nodes["d1"].Send(rpc.FrameStats, &nodepb.Stats{PrefillTokensPerS: 1e6})
	b.g.native.Blocks.Forget(other, "test")
	b.until(func() bool {
		e := ask()
		return len(e.Prefill) == 0 && strings.Contains(strings.Join(e.Words, " "), "computes the prompt itself: that is predicted")
	})
	if r := b.do("GET", "/debug/route?prompt=x", ""); r.StatusCode != 401 {
		t.Errorf("without a key: %d", r.StatusCode)
	}
	if r := b.do("GET", "/debug/route", "", "Authorization: Bearer k"); r.StatusCode != 400 {
		t.Errorf("without a prompt: %d", r.StatusCode)
	}
}

// Prefill nodes compute the prompts of constrained requests and of vectors too: they know nothing of
// what follows a prompt. A mean needs the rows of all tokens, which only the decode node has.
func TestPrefillForGrammarsAndVectors(t *testing.T) {
	member := func(at, role string) nodes.Member {
		return nodes.Member{ID: at, Role: role, RPC: at, Fingerprint: 7, Class: "test", Ready: true}
	}
	for kind, byPrefill := range map[nodepb.PoolingKind]bool{nodepb.PoolingKind_POOLING_KIND_LAST: true, nodepb.PoolingKind_POOLING_KIND_MEAN: false} {
		d := vectorNode("d1", func(v *nodepb.Vectors) { v.Kind = kind })
		d.Hello.Grammar = grammar.Version
		b := newBed(t, Options{MinRemotePrefillTokens: 32, Members: []nodes.Member{member("d1", "decode"), member("p1", "prefill")}}, map[string]nodestest.Options{"d1": d})
		b.node("p1", nodestest.Options{Hello: &nodepb.Hello{NodeId: "p1", Role: "prefill"}})
		text := strings.Repeat("a long prompt ", 100)
		last := func(path, body string) *nodepb.Generate {
			t.Helper()
			if r := b.post(path, body); r.StatusCode != 200 {
				t.Fatalf("%d %s", r.StatusCode, r.body)
			}
			all := b.nodes["d1"].Requests()
			return all[len(all)-1]
		}
		b.until(func() bool { return len(last("/v1/completions", `{"prompt":"`+text+`","max_tokens":1}`).Prefill) == 1 })
		if g := last("/v1/completions", `{"prompt":"`+text+`","max_tokens":1,"guided_regex":"x"}`); len(g.Prefill) != 1 || g.Grammar == nil {
			t.Errorf("constrained: prefill nodes %v", g.Prefill)
		}
		if g := last("/v1/embeddings", `{"input":"`+text+`"}`); len(g.Prefill) == 1 != byPrefill || g.Pooling == nil {
			t.Errorf("vector %v: prefill nodes %v", kind, g.Prefill)
		}
	}
}
