package gateway

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// First tokens come before and after what routing predicts, to the nanosecond of
// virtual time, and the metrics say both times and by how much they differ.
// What was not predicted is in none of them.
func TestFirstTokensAgainstTheirPredictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Minute) }) // the server's own tickers
		gate := make(chan struct{})
		b := newBed(t, Options{}, one(nodestest.Options{Gate: gate}))
		hold := func(id metrics.ID, n uint64, seconds float64, labels ...string) {
			t.Helper()
			h := b.g.Meters.Histogram(id, labels...)
			if h.Count() != n || math.Abs(h.Sum()-seconds) > 1e-6 {
				t.Errorf("%s%v: %d of %g s, want %d of %g s", metrics.Rows[id].Name, labels, h.Count(), h.Sum(), n, seconds)
			}
		}
		stats := func(rate float64, queued uint32) {
			b.nodes["d1"].Send(rpc.FrameStats, &nodepb.Stats{PrefillTokensPerS: rate, QueuedTokens: queued})
			synctest.Wait()
		}
		ask := func(tokens int, first time.Duration) {
			t.Helper()
			c := b.dial()
			defer c.Close()
			c.send("POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1}`, strings.Repeat("x", tokens)))
			time.Sleep(first)
			gate <- struct{}{}
			if r := c.receive(); r.StatusCode != 200 {
				t.Fatalf("%d %s", r.StatusCode, r.body)
			}
		}
		ask(101, time.Second) // nothing is known of the node's speed
		hold(metrics.GatewayPredictedFirst, 0, 0)
		hold(metrics.GatewayActualFirst, 0, 0)

		stats(1000, 300)
		ask(101, 700*time.Millisecond) // 300 tokens queued and 100 to compute: 0.4 s
		hold(metrics.GatewayPredictedFirst, 1, 0.4)
		hold(metrics.GatewayActualFirst, 1, 0.7)
		hold(metrics.GatewayFirstError, 1, 0.3, "late")
		hold(metrics.GatewayFirstError, 0, 0, "early")

		stats(500, 0)
		ask(201, 150*time.Millisecond) // 0.4 s again
		hold(metrics.GatewayPredictedFirst, 2, 0.8)
		hold(metrics.GatewayActualFirst, 2, 0.85)
		hold(metrics.GatewayFirstError, 1, 0.3, "late")
		hold(metrics.GatewayFirstError, 1, 0.25, "early")
	})
}

// What was refused and tried elsewhere is no test of the prediction.
func TestSecondAttemptsAreNotForetold(t *testing.T) {
	refuse := func(r *nodepb.Generate) (nodepb.Code, string) {
		if r.Attempt == 1 {
			return nodepb.Code_CODE_OVERLOADED, "busy"
		}
		return 0, ""
	}
	o := nodestest.Options{Refuse: refuse}
	b := newBed(t, Options{Members: []nodes.Member{decodeMember("d1"), decodeMember("d2")}}, map[string]nodestest.Options{"d1": o, "d2": o})
	for _, n := range b.nodes {
		n.Send(rpc.FrameStats, &nodepb.Stats{PrefillTokensPerS: 1000})
	}
	b.until(func() bool {
		v := b.g.native.Nodes.Now().View()
		v.Look(nodes.Query{})
		return v.Decode[0].Rate > 0 && v.Decode[1].Rate > 0
	})
	if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":2}`); r.StatusCode != 200 {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	for _, id := range []metrics.ID{metrics.GatewayPredictedFirst, metrics.GatewayActualFirst} {
		if n := b.g.Meters.Histogram(id).Count(); n != 0 {
			t.Errorf("%s counts %d", metrics.Rows[id].Name, n)
		}
	}
}

// A token of an attempt that is not the current one reaches nobody, and is counted.
func TestStaleTokensAreCounted(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{}, one(nodestest.Options{Gate: gate, Token: ramble, Garble: func(tok rpc.Token) rpc.Token {
		if tok.Position == 3 && tok.Attempt == 1 {
			tok.Attempt = 77
		}
		return tok
	}}))
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":5}`)
	feed(gate, 3)
	stale := b.g.Meters.Counter(metrics.GatewayStaleTokens)
	b.until(func() bool { return stale.Get() == 1 })
	close(gate)
	if r := c.receive(); r.StatusCode != 200 || r.parse(t).Choices[0].Text != lore[:5] {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// A request that waits in the gateway until there is room, 1.5 s of virtual time or
// more, is told as having waited so long; those that did not wait are not told.
func TestQueueTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Minute) }) // the server's own tickers
		b, gate := crowd(t, Options{})
		clients := []*client{b.ask("a", 0), b.ask("b", 0)}
		began := time.Now()
		clients = append(clients, b.ask("c", 0))
		if n := b.g.Queue.Waiting(); n != 1 {
			t.Fatalf("%d wait", n)
		}
		time.Sleep(1500 * time.Millisecond)
		feed(gate, 2)
		told := b.g.Meters.Histogram(metrics.GatewayQueueTime)
		b.until(func() bool { return told.Count() == 1 })
		waited := time.Since(began).Seconds()
		if s := told.Sum(); s < 1.5 || s > waited || s < waited-0.005 { // polls of a millisecond
			t.Errorf("%g s are told as %g s", waited, s)
		}
		close(gate)
		for _, c := range clients {
			if r := c.receive(); r.StatusCode != 200 {
				t.Errorf("%d %s", r.StatusCode, r.body)
			}
			c.Close()
		}
		if n := told.Count(); n != 1 {
			t.Errorf("%d waits are told", n)
		}
	})
}
