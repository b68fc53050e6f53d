package gateway

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// What a decode node has told of its cache keeps a prompt from being sent
// elsewhere for prefill, and only that prompt.
func TestCachedPrefixIsNotPrefilledElsewhere(t *testing.T) {
	b := newBed(t, Options{
		MinRemotePrefillTokens: 32,
		Members: []nodes.Member{
			decodeMember("d"), {ID: "p", Role: "prefill", RPC: "p", Fingerprint: 7, Class: "test", Ready: true},
		},
	}, map[string]nodestest.Options{"d": {}})
	m := b.g.native.Models.Load()
	prompt := make([]int32, 100)
	for i := range prompt {
		prompt[i] = int32(i)
	}
	prefilledBy := func() int {
		t.Helper()
		text, err := json.Marshal(prompt)
		if err != nil {
			t.Fatal(err)
		}
		b.post("/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":2}`, text))
		all := b.nodes["d"].Requests()
		return len(all[len(all)-1].Prefill)
	}
	if n := prefilledBy(); n != 1 {
		t.Fatalf("a cold prompt went to %d prefill nodes, want 1", n)
	}
	e := cluster.BlockEvent{Node: "d"}
	for _, h := range kvcache.AppendHashes(nil, m.Root(""), prompt, m.BlockTokens) {
		e.Stored = append(e.Stored, cluster.Stored{Hash: uint64(h)})
	}
	b.g.native.Blocks.Blocks(e)
	if n := prefilledBy(); n != 0 {
		t.Errorf("a cached prompt went to %d prefill nodes", n)
	}
	prompt[0]++
	if n := prefilledBy(); n != 1 {
		t.Errorf("another prompt was taken for the cached one")
	}
}

func TestNodesView(t *testing.T) {
	b := newBed(t, Options{Version: "9", APIKeys: []string{"k"}}, map[string]nodestest.Options{"d": {}})
	if r := b.do("GET", "/debug/nodes", ""); r.StatusCode != 401 {
		t.Errorf("without a key: status %d", r.StatusCode)
	}
	r := b.do("GET", "/debug/nodes", "", "Authorization: Bearer k")
	var v fleetView
	if err := json.Unmarshal([]byte(r.body), &v); err != nil || r.StatusCode != 200 {
		t.Fatalf("status %d, %v: %s", r.StatusCode, err, r.body)
	}
	if v.Version != "9" || !v.Ready || len(v.Nodes) != 1 || v.Nodes[0].Name != "d" || !v.Nodes[0].Connected || v.Nodes[0].Role != "decode" {
		t.Errorf("got %+v", v)
	}
}

// A node that was away for a moment, as far as gossip knew, is asked for all that
// it caches: it was forgotten, and would tell only of changes.
func TestNodeThatComesBackTellsAll(t *testing.T) {
	server, err := cluster.StartServer(cluster.ServerOptions{Name: "gw", Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	bus := func(name string) *cluster.Bus {
		b := cluster.NewBus(cluster.BusOptions{Name: name})
		t.Cleanup(b.Close)
		b.SetServers([]string{server.Addr()})
		return b
	}
	b := newBed(t, Options{}, one(nodestest.Options{}))
	node := bus("d1")
	news, err := node.Publisher("tiny", "d1")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex // of the cache and of Tell
	var cache []kvcache.Event
	store := func() {
		mu.Lock()
		defer mu.Unlock()
		cache = append(cache, kvcache.Event{Kind: kvcache.Stored, Hash: kvcache.Hash(1 + len(cache))})
		news.Publish(cache[len(cache)-1:], false)
	}
	news.Answer(func() {
		mu.Lock()
		defer mu.Unlock()
		news.Publish(cache, true)
	})
	b.g.FollowEvents(bus("gateway"))
	for range 20 {
		store()
	}
	known := func() bool { // everything, though only changes are told unasked
		store()
		time.Sleep(20 * time.Millisecond)
		return b.g.native.Blocks.Count("d1") >= len(cache)-1
	}
	b.until(known)
	b.g.SetMembers(nil)
	b.g.SetMembers([]nodes.Member{decodeMember("d1")})
	b.until(known)
}

// Block events are published under the name that a node announces, and followed under all names of
// the model: those of prefill nodes too.
func TestBlockEventsOfAllNames(t *testing.T) {
	server, err := cluster.StartServer(cluster.ServerOptions{Name: "gw", Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	bus := func(name string) *cluster.Bus {
		b := cluster.NewBus(cluster.BusOptions{Name: name})
		t.Cleanup(b.Close)
		b.SetServers([]string{server.Addr()})
		return b
	}
	m1, o1 := named("d1", "tiny")
	m2, o2 := named("d2", "small")
	m3, _ := named("p1", "little")
	m3.Role = "prefill"
	b := newBed(t, Options{Members: []nodes.Member{m1, m2, m3}}, map[string]nodestest.Options{"d1": o1, "d2": o2})
	b.g.FollowEvents(bus("gateway"))
	for _, m := range []nodes.Member{m1, m2, m3} {
		node := bus(m.ID)
		events, err := node.Publisher(m.Model, m.ID)
		if err != nil {
			t.Fatal(err)
		}
		hash := kvcache.Hash(0)
		events.Answer(func() {})
		b.until(func() bool {
			hash++
			events.Publish([]kvcache.Event{{Kind: kvcache.Stored, Hash: hash}}, true)
			return b.g.native.Blocks.Count(m.ID) > 0
		})
	}
}
