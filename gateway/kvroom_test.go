package gateway

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// pools is a gateway before nodes with 10 KV blocks of 16 tokens, of which used
// say how many are in use.
func pools(t *testing.T, o Options, used ...*atomic.Uint32) *bed {
	nodes := map[string]nodestest.Options{}
	for i, u := range used {
		nodes[fmt.Sprintf("d%d", i+1)] = nodestest.Options{MaxRunning: 100, Memory: func() (total, in, cached, reserved uint32) { return 10, u.Load(), 0, 0 }}
	}
	b := newBed(t, o, nodes)
	b.until(func() bool {
		return b.g.Queue.Room() == int64(len(used)*(100+b.g.Limits().NodeBacklog))
	})
	return b
}

const short = `{"prompt":"x","max_tokens":2}`

// A request that no node has KV memory for waits in the gateway until a heartbeat
// reports room; the next is refused with 429 when the queue is full. The gateway
// stays ready.
func TestRequestsWaitForKVMemory(t *testing.T) {
	used := new(atomic.Uint32)
	used.Store(10)
	b := pools(t, Options{Limits: Limits{MaxQueuedRequests: 1}}, used)
	first := b.dial()
	t.Cleanup(func() { first.Close() })
	first.send("POST", "/v1/completions", short)
	b.until(func() bool { return b.g.Queue.Waiting() == 1 })
	b.post("/v1/completions", short).wantError(t, 429, "wait for the fleet")
	if r := b.do("GET", "/readyz", ""); r.StatusCode != 200 {
		t.Errorf("/readyz: %d %s", r.StatusCode, r.body)
	}
	if r := b.do("GET", "/debug/route?prompt=x", ""); !strings.Contains(r.body, "waits in the gateway") || !strings.Contains(r.body, `"kv_full":true`) {
		t.Errorf("/debug/route: %s", r.body)
	}
	if n := len(b.nodes["d1"].Requests()); n != 0 {
		t.Errorf("%d requests reached a full node", n)
	}
	used.Store(0)
	b.nodes["d1"].Beat()
	if r := first.receive(); r.StatusCode != 200 {
		t.Errorf("the request that waited: %d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
}

// New requests go to the node that has KV memory, whatever their prompts begin
// with; a prompt that no node's whole memory holds is refused at once.
func TestFullNodeGetsNoNewRequests(t *testing.T) {
	full, idle := new(atomic.Uint32), new(atomic.Uint32)
	full.Store(10)
	b := pools(t, Options{}, full, idle)
	for i := range 20 {
		if r := b.post("/v1/completions", fmt.Sprintf(`{"prompt":"%c and more","max_tokens":2}`, 'a'+i)); r.StatusCode != 200 {
			t.Fatalf("%d: %d %s", i, r.StatusCode, r.body)
		}
	}
	if n := len(b.nodes["d1"].Requests()); n != 0 {
		t.Errorf("the full node got %d requests", n)
	}
	b.post("/v1/completions", `{"prompt":"`+strings.Repeat("x", 200)+`","max_tokens":2}`).wantError(t, 400, "KV blocks")
	r := b.post("/v1/responses", `{"input":"`+strings.Repeat("x", 200)+`"}`)
	if r.wantError(t, 400, "KV blocks"); *r.parse(t).Error.Param != "input" {
		t.Error(r.body)
	}
	if n := len(b.nodes["d2"].Requests()); n != 20 {
		t.Errorf("the idle node got %d requests", n)
	}
}

// While a large request waits for the node that lacks least, any number of shorter ones
// go to the other, and few take of the room that it waits for.
func TestShorterRequestsGoElsewhere(t *testing.T) {
	waitedFor, other := new(atomic.Uint32), new(atomic.Uint32)
	waitedFor.Store(6)
	other.Store(8)
	b := pools(t, Options{}, waitedFor, other)
	large := b.dial()
	t.Cleanup(func() { large.Close() })
	large.send("POST", "/v1/completions", `{"prompt":"`+strings.Repeat("x", 150)+`","max_tokens":2}`)
	b.until(func() bool { return b.g.Queue.Waiting() == 1 })
	const n, tokens = 150, 30
	const few = (admit.PassTokens + 150) / tokens
	for i := range n {
		if r := b.post("/v1/completions", fmt.Sprintf(`{"prompt":"%03d%s","max_tokens":2}`, i, strings.Repeat("y", tokens-3))); r.StatusCode != 200 {
			t.Fatalf("%d: %d %s", i, r.StatusCode, r.body)
		}
	}
	if a, c := len(b.nodes["d1"].Requests()), len(b.nodes["d2"].Requests()); a > few || a+c != n {
		t.Errorf("%d short requests went to the node that the large one waits for, %d of %d to the other; want at most %d", a, c, n, few)
	}
	waitedFor.Store(0)
	b.nodes["d1"].Beat()
	if r := large.receive(); r.StatusCode != 200 {
		t.Errorf("the request that waited: %d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
}
