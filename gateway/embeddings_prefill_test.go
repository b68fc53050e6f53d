package gateway

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// prefillNode is a prefill node that gives vectors as vectorNode does; version 0: none, as one of
// an earlier version.
func prefillNode(addr string, version uint32) nodestest.Options {
	o := vectorNode(addr, nil)
	o.Hello.Role, o.Hello.Vectors = "prefill", version
	if version == 0 {
		o.Vector = nil
	}
	return o
}

func prefillMember(addr string) nodes.Member {
	m := decodeMember(addr)
	m.Role = "prefill"
	return m
}

// vectorFleet is a gateway with the decode node d and prefill nodes.
func vectorFleet(t *testing.T, o Options, d nodestest.Options, prefill map[string]nodestest.Options) *bed {
	t.Helper()
	o.Members = []nodes.Member{decodeMember("d")}
	first := &bed{TB: t, net: rpc.NewNetwork(), nodes: map[string]*nodestest.Node{}}
	for addr, node := range prefill {
		first.node(addr, node)
		o.Members = append(o.Members, prefillMember(addr))
	}
	b := newBedOn(t, first.net, o, map[string]nodestest.Options{"d": d})
	maps.Copy(b.nodes, first.nodes)
	b.until(func() bool {
		for _, n := range b.g.native.Nodes.Now().Prefill {
			if !n.Usable() {
				return false
			}
		}
		return true
	})
	return b
}

// embed wants the vector of a text of one letter.
func (b *bed) embed(t *testing.T, letter string) {
	t.Helper()
	if _, got := b.post("/v1/embeddings", `{"input":"`+letter+`"}`).vectors(t); len(got) != 1 || !slices.Equal(got[0], unit(rawVector([]int32{int32(letter[0])}))) {
		t.Errorf("%s: %v", letter, got)
	}
}

// Prefill nodes answer requests for vectors as decode nodes do, those of an earlier version and
// those of another version of vectors get none, and no prefill node gets one for tokens.
func TestEmbeddingsByPrefillNodes(t *testing.T) {
	b := vectorFleet(t, Options{}, vectorNode("d", nil), map[string]nodestest.Options{
		"p": prefillNode("p", rpc.VectorVersion), "old": prefillNode("old", 0), "next": prefillNode("next", rpc.VectorVersion+1),
	})
	for i := range 26 {
		b.embed(t, string(rune('a'+i)))
	}
	if r := b.post("/score", `{"text_1":"ab","text_2":["ab","zz"]}`); r.StatusCode != 200 {
		t.Error(r.body)
	}
	if r := b.post("/v1/completions", `{"prompt":"abc"}`); r.StatusCode != 200 {
		t.Error(r.body)
	}
	for addr, want := range map[string]bool{"d": true, "p": true, "old": false, "next": false} {
		all := b.nodes[addr].Requests()
		if (len(all) > 0) != want {
			t.Errorf("%s got %d requests", addr, len(all))
		}
		for _, r := range all {
			if r.Pooling == nil && addr != "d" || len(r.Prefill) > 0 && r.Pooling != nil {
				t.Errorf("%s got %v", addr, r)
			}
		}
	}
	for line := range strings.Lines(b.do("GET", "/metrics", "").body) {
		if strings.Contains(line, `reason="no_prefill"`) && !strings.HasSuffix(line, " 0\n") {
			t.Error(line)
		}
	}
	if err := b.g.native.Nodes.Check(true); err != nil {
		t.Error(err)
	}
}

// A vector goes where it is predicted first: not to a decode node with streams, nor to a prefill
// node with a long queue.
func TestEmbeddingsByLoad(t *testing.T) {
	b := vectorFleet(t, Options{}, vectorNode("d", nil), map[string]nodestest.Options{"p": prefillNode("p", rpc.VectorVersion)})
	beats := uint64(0)
	ask := func(streams, queued uint32) (atPrefill int) {
		t.Helper()
		beats++
		b.nodes["d"].Send(rpc.FrameStats, &nodepb.Stats{Steps: beats, Running: streams, MaxRunning: 256, PrefillTokensPerS: 1000})
		b.nodes["p"].Send(rpc.FrameStats, &nodepb.Stats{Steps: beats, Waiting: queued / 1000, QueuedTokens: queued, MaxRunning: 256, PrefillTokensPerS: 1000})
		b.until(func() bool {
			fleet := b.g.native.Nodes.Now()
			return fleet.Decode[0].View().Running == int(streams) && fleet.Prefill[0].View().QueuedTokens == int(queued)
		})
		before := len(b.nodes["p"].Requests())
		for i := range 8 {
			if r := b.post("/v1/embeddings", fmt.Sprintf(`{"input":"%d%s"}`, i, strings.Repeat("x", 50))); r.StatusCode != 200 {
				t.Fatal(r.body)
			}
		}
		return len(b.nodes["p"].Requests()) - before
	}
	if n := ask(20, 0); n != 8 {
		t.Errorf("%d of 8 requests at the prefill node, next to 20 streams", n)
	}
	if n := ask(0, 9000); n != 0 {
		t.Errorf("%d of 8 requests at the prefill node, behind 9,000 tokens", n)
	}
	if n := ask(0, 0); n == 0 || n == 8 {
		t.Errorf("%d of 8 requests at the prefill node of an idle fleet", n)
	}
}

// Without a prefill node that computes vectors, decode nodes compute them as before, and prefill
// nodes their prompts.
func TestEmbeddingsWithOlderPrefillNodes(t *testing.T) {
	b := vectorFleet(t, Options{}, vectorNode("d", nil), map[string]nodestest.Options{"old": prefillNode("old", 0)})
	b.embed(t, "a")
	if r := b.post("/v1/embeddings", `{"input":"a longer text"}`); r.StatusCode != 200 {
		t.Error(r.body)
	}
	all := b.nodes["d"].Requests()
	if last := all[len(all)-1]; len(all) != 2 || !slices.Equal(last.Prefill, []string{"old"}) || len(b.nodes["old"].Requests()) > 0 {
		t.Errorf("%v", all)
	}
}

// Requests for vectors do not wait for chats that fill the decode nodes, and are answered without
// any decode node.
func TestEmbeddingsWithoutDecodeNodes(t *testing.T) {
	gate := make(chan struct{})
	d := vectorNode("d", nil)
	d.Gate, d.MaxRunning = gate, 1
	p := prefillNode("p", rpc.VectorVersion)
	p.MaxRunning = 4
	o := Options{}
	o.Limits.NodeBacklog = 1
	b := vectorFleet(t, o, d, map[string]nodestest.Options{"p": p})
	queue := b.g.native.Queue
	b.until(func() bool { return queue.Room() == 2 })
	var chats []*client
	for range 3 {
		c := b.dial()
		defer c.Close()
		c.send("POST", "/v1/completions", `{"prompt":"abc","max_tokens":1}`)
		chats = append(chats, c)
	}
	b.until(func() bool { return queue.Running() == 2 && queue.Waiting() == 1 })
	for i := range 4 { // some have their home on d, which is loaded
		b.embed(t, string(rune('a'+i)))
	}
	room := func(chats, requests, tokens int64) {
		t.Helper()
		if r := b.g.native.Nodes.Now().VectorRoom(7, rpc.VectorVersion, 1, 0, chats); r.Requests != requests || r.Tokens != tokens {
			t.Errorf("with %d chats: %+v, want %d requests and %d tokens", chats, r, requests, tokens)
		}
	}
	room(0, 2+5, 2*2048)
	room(2, 5, 2*2048)
	room(3, 5, 2*2048)
	if n := len(b.nodes["p"].Requests()); n != 4 {
		t.Errorf("%d of 4 requests at the prefill node", n)
	}
	close(gate)
	for _, c := range chats {
		if r := c.receive(); r.StatusCode != 200 {
			t.Error(r.body)
		}
	}
	b.g.SetMembers([]nodes.Member{prefillMember("p")})
	b.until(func() bool { return b.g.native.Usable() == 0 })
	room(2, 5, 2048)
	b.embed(t, "x")
	if r := b.post("/v1/completions", `{"prompt":"abc"}`); r.StatusCode != 503 || !strings.Contains(r.body, "no decode node") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if err := b.g.Ready(); err == nil {
		t.Error("a gateway without a decode node is ready")
	}
	b.g.SetMembers(nil)
	b.until(func() bool { return len(b.g.native.Nodes.Now().Prefill) == 0 })
	if r := b.post("/v1/embeddings", `{"input":"x"}`); r.StatusCode != 503 || strings.Contains(r.body, "decode node") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// A model without decode nodes stays for its vectors, next to another model, until another model of
// its name comes.
func TestModelOfPrefillNodes(t *testing.T) {
	b := vectorFleet(t, Options{}, vectorNode("d", nil), map[string]nodestest.Options{"p": prefillNode("p", rpc.VectorVersion)})
	second := vectorNode("e", func(*nodepb.Vectors) {})
	second.Bundle.Model, second.Bundle.Fingerprint = "other", 8
	b.node("e", second)
	other, next := decodeMember("e"), decodeMember("f")
	other.Model, other.Fingerprint = "other", 8
	b.g.SetMembers([]nodes.Member{decodeMember("d"), prefillMember("p"), other})
	b.until(func() bool { return len(b.g.native.Models.All()) == 2 })
	b.g.SetMembers([]nodes.Member{prefillMember("p"), other})
	b.until(func() bool { return b.g.native.Nodes.Now().Usable(7) == 0 })
	for range 3 {
		if r := b.post("/v1/embeddings", `{"model":"tiny","input":"x"}`); r.StatusCode != 200 {
			t.Errorf("%d %s", r.StatusCode, r.body)
		}
		if r := b.post("/v1/completions", `{"model":"tiny","prompt":"x"}`); r.StatusCode != 503 {
			t.Errorf("%d %s", r.StatusCode, r.body)
		}
	}
	newer := vectorNode("f", nil)
	newer.Bundle.Fingerprint, next.Fingerprint = 9, 9
	b.node("f", newer)
	b.g.SetMembers([]nodes.Member{prefillMember("p"), other, next})
	b.until(func() bool { return b.post("/v1/completions", `{"model":"tiny","prompt":"x"}`).StatusCode == 200 })
	if all := b.g.native.Models.All(); len(all) != 2 {
		t.Errorf("%d models", len(all))
	}
}

// A request whose prefill node is lost, drains or refuses is answered by another node.
func TestEmbeddingsOfLostPrefillNode(t *testing.T) {
	never := make(chan struct{})
	for name, change := range map[string]func(*nodestest.Options){
		"lost": func(o *nodestest.Options) { o.Gate = never },
		"drains": func(o *nodestest.Options) {
			o.Leave = func(*nodepb.Generate) nodepb.Code { return nodepb.Code_CODE_DRAINING }
		},
		"overloaded": func(o *nodestest.Options) {
			o.Refuse = func(*nodepb.Generate) (nodepb.Code, string) { return nodepb.Code_CODE_OVERLOADED, "full" }
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := prefillNode("p", rpc.VectorVersion)
			change(&p)
			b := vectorFleet(t, Options{}, vectorNode("d", nil), map[string]nodestest.Options{"p": p})
			c := b.dial()
			defer c.Close()
			c.send("POST", "/v1/embeddings", `{"input":["`+strings.Join(strings.Split("abcdefghij", ""), `","`)+`"]}`)
			if name == "lost" {
				b.until(func() bool { return b.nodes["p"].Running() > 0 })
				b.nodes["p"].Stop()
			}
			_, got := c.receive().vectors(t)
			for i, v := range got {
				if !slices.Equal(v, unit(rawVector([]int32{'a' + int32(i)}))) {
					t.Errorf("input %d: %v", i, v)
				}
			}
			if len(got) != 10 || len(b.nodes["p"].Requests()) == 0 {
				t.Errorf("%d vectors, %d requests at the prefill node", len(got), len(b.nodes["p"].Requests()))
			}
			if err := b.g.native.Nodes.Check(false); err != nil {
				t.Error(err)
			}
		})
	}
}

// An error of a prefill node does not call it a decode node.
func TestEmbeddingsFailed(t *testing.T) {
	p, d := prefillNode("p", rpc.VectorVersion), vectorNode("d", nil)
	refuse := func(*nodepb.Generate) (nodepb.Code, string) { return nodepb.Code_CODE_OVERLOADED, "full" }
	p.Refuse, d.Refuse = refuse, refuse
	b := vectorFleet(t, Options{}, d, map[string]nodestest.Options{"p": p})
	if r := b.post("/v1/embeddings", `{"input":"x"}`); r.StatusCode != 503 || !strings.Contains(r.body, "the nodes are overloaded: full") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if n := len(b.nodes["p"].Requests()) + len(b.nodes["d"].Requests()); n < 2 {
		t.Errorf("%d attempts", n)
	}
}
