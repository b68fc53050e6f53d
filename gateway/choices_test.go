package gateway

import (
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// The choices of a prompt share its KV: one computes it, the others start on
// the same node once that has a token, and ask nobody for prefill.
func TestChoicesShareTheirPrompt(t *testing.T) {
	gate := make(chan struct{})
	o := nodestest.Options{Gate: gate}
	b := newBed(t, Options{
		MinRemotePrefillTokens: 1,
		Members: []nodes.Member{
			decodeMember("d1"), decodeMember("d2"), {ID: "p", Role: "prefill", RPC: "p", Fingerprint: 7, Class: "test", Ready: true},
		},
	}, map[string]nodestest.Options{"d1": o, "d2": o})
	answered := make(chan reply)
	go func() {
		answered <- b.post("/v1/completions", `{"prompt":"a prompt of some length","n":3,"max_tokens":2}`)
	}()
	count := func() int { return len(b.nodes["d1"].Requests()) + len(b.nodes["d2"].Requests()) }
	b.until(func() bool { return count() == 1 })
	time.Sleep(20 * time.Millisecond)
	if n := count(); n != 1 {
		t.Fatalf("%d choices started before the first token", n)
	}
	gate <- struct{}{}
	b.until(func() bool { return count() == 3 })
	home := b.nodes["d1"].Requests()
	if len(home) == 0 {
		home = b.nodes["d2"].Requests()
	}
	if len(home) != 3 {
		t.Fatalf("%d of 3 choices are on the node that holds the prompt", len(home))
	}
	for i, r := range home {
		if want := i == 0; (len(r.Prefill) > 0) != want || r.Sampling.Choice != uint32(i) || r.Sampling.Seed != home[0].Sampling.Seed {
			t.Errorf("choice %d asks %d prefill nodes, with %v", i, len(r.Prefill), r.Sampling)
		}
	}
	feed(gate, 5)
	if r := <-answered; r.StatusCode != 200 || len(r.parse(t).Choices) != 3 {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}
