package gateway

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// crowd is a gateway whose one node runs one request and has one more wait.
func crowd(t *testing.T, o Options) (b *bed, gate chan struct{}) {
	gate = make(chan struct{})
	o.Limits.NodeBacklog = 1
	b = newBed(t, o, one(nodestest.Options{Gate: gate, MaxRunning: 1}))
	b.until(func() bool { return b.g.Queue.Room() == 2 })
	return b, gate
}

const words = `{"prompt":%q,"max_tokens":2,"priority":%d}`

// ask sends a request that is answered later, and waits until it is on the node or
// in the queue.
func (b *bed) ask(prompt string, priority int, headers ...string) *client {
	b.Helper()
	c := b.dial()
	b.Cleanup(func() { c.Close() })
	before := b.g.Queue.Waiting() + int64(len(b.nodes["d1"].Requests()))
	c.send("POST", "/v1/completions", fmt.Sprintf(words, prompt, priority), headers...)
	b.until(func() bool { return b.g.Queue.Waiting()+int64(len(b.nodes["d1"].Requests())) > before })
	return c
}

// prompts are those of the requests that the node got, in order.
func (b *bed) prompts() (out []string) {
	for _, r := range b.nodes["d1"].Requests() {
		text := ""
		for _, id := range r.Prompt {
			text += string(rune(id))
		}
		out = append(out, text)
	}
	return out
}

func (b *bed) refused(limit string) float64 {
	return b.g.Meters.Counter(metrics.GatewayRefused, limit).Get()
}

// wantError holds an answer against an error that it should be.
func (r reply) wantError(t *testing.T, status int, says string) {
	t.Helper()
	e := r.parse(t).Error
	if after := r.Header.Get("Retry-After"); r.StatusCode != status || e == nil || !strings.Contains(e.Message, says) || (status == 429 || status == 503) != (after != "") {
		t.Errorf("%d %s, Retry-After %q, want %d and %q", r.StatusCode, r.body, after, status, says)
	}
}

// What the fleet has no room for waits in the gateway, and leaves when its client
// does.
func TestRequestsWait(t *testing.T) {
	b, gate := crowd(t, Options{})
	var answers sync.WaitGroup
	ask := func(prompt string, priority int) {
		c := b.ask(prompt, priority)
		answers.Go(func() {
			if r := c.receive(); r.StatusCode != 200 {
				b.Errorf("%s: %d %s", prompt, r.StatusCode, r.body)
			}
		})
	}
	ask("a", 0)
	ask("b", 0)
	ask("c", 5)
	leaves := b.ask("d", 1)
	ask("e", 0)
	ask("f", -3)
	if got := strings.Join(b.prompts(), ""); got != "ab" || b.g.Queue.Waiting() != 4 {
		t.Fatalf("%q on the node, %d wait", got, b.g.Queue.Waiting())
	}
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	leaves.Close()
	b.until(func() bool { return b.g.Queue.Waiting() == 3 })
	close(gate)
	answers.Wait()
	if got := b.prompts(); len(got) != 5 || slices.Contains(got, "d") {
		t.Errorf("the node got %q", got)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	if n := b.g.Meters.Histogram(metrics.GatewayQueueTime).Count(); n != 4 {
		t.Errorf("%d waits recorded", n)
	}
}

// A queue's bounds: requests, prompt tokens, time; each with its own refusal.
func TestQueueIsBounded(t *testing.T) {
	t.Run("requests", func(t *testing.T) {
		b, gate := crowd(t, Options{Limits: Limits{MaxQueuedRequests: 1}})
		for _, p := range []string{"a", "b", "c"} {
			b.ask(p, 0)
		}
		b.post("/v1/completions", fmt.Sprintf(words, "d", 0)).wantError(t, 429, "1 requests wait")
		first := b.refused("queue")
		better := b.dial()
		defer better.Close()
		better.send("POST", "/v1/completions", fmt.Sprintf(words, "e", -1))
		b.until(func() bool { return b.refused("evicted") == 1 })
		close(gate)
		if r := better.receive(); r.StatusCode != 200 || first != 1 {
			t.Errorf("%d %s, %g refused", r.StatusCode, r.body, first)
		}
		if got := strings.Join(b.prompts(), ""); got != "abe" {
			t.Errorf("the node got %q", got)
		}
	})
	t.Run("tokens", func(t *testing.T) {
		b, gate := crowd(t, Options{Limits: Limits{MaxQueuedTokens: 100}})
		long := strings.Repeat("y", 90)
		for _, p := range []string{"a", "b", long} {
			b.ask(p, 0)
		}
		b.post("/v1/completions", fmt.Sprintf(words, long, 0)).wantError(t, 429, "90 prompt tokens wait for the fleet and this request has 90 more: the bound is 100")
		close(gate)
	})
	t.Run("time", func(t *testing.T) {
		b, gate := crowd(t, Options{Limits: Limits{QueueTimeout: 50 * time.Millisecond}})
		b.ask("a", 0)
		b.ask("b", 0)
		b.post("/v1/completions", fmt.Sprintf(words, "c", 0)).wantError(t, 429, "no room for this request within 50ms")
		if n := b.refused("timeout"); n != 1 {
			t.Errorf("%g refusals", n)
		}
		close(gate)
	})
	t.Run("deadline", func(t *testing.T) {
		b, gate := crowd(t, Options{})
		b.ask("a", 0)
		b.ask("b", 0)
		b.post("/v1/completions", fmt.Sprintf(words, "c", 0), "X-Tandem-Timeout: 20ms").wantError(t, 504, "longer than 20ms")
		b.post("/v1/completions", fmt.Sprintf(words, "c", 0), "X-Tandem-Timeout: 0.02").wantError(t, 504, "longer than 20ms")
		for _, bad := range []string{"0", "-1s", "soon", "NaN"} {
			b.post("/v1/completions", fmt.Sprintf(words, "c", 0), "X-Tandem-Timeout: "+bad).wantError(t, 400, strconv.Quote(bad)[1:len(bad)])
		}
		close(gate)
	})
}

// Keys that wait share the fleet by their weights; their priority is bounded.
func TestKeysShare(t *testing.T) {
	b, gate := crowd(t, Options{APIKeyFile: keyFile(t, "two weight=2\none priority=0\nlow priority=7\n")})
	var answers sync.WaitGroup
	ask := func(prompt, key string, priority int) {
		c := b.ask(prompt, priority, "Authorization: Bearer "+key)
		answers.Go(func() {
			if r := c.receive(); r.StatusCode != 200 {
				b.Errorf("%s: %d %s", prompt, r.StatusCode, r.body)
			}
		})
	}
	ask("0", "one", 0)
	ask("0", "one", 0)
	ask("l", "low", -9)
	for range 4 {
		ask("1", "one", -9)
	}
	for range 8 {
		ask("2", "two", 0)
	}
	close(gate)
	answers.Wait()
	got := strings.Join(b.prompts(), "")
	if at := strings.Index(got, "l"); at < 10 {
		t.Errorf("low came at %d of %q", at, got)
	}
	if ones := strings.Count(got[2:8], "1"); ones > 4 {
		t.Errorf("the node got %q", got)
	}
	if n := b.nodes["d1"].Requests()[2].Priority; n != 0 {
		t.Errorf("a priority of %d was passed on", n)
	}
}
