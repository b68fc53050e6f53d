//go:build linux

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// farServer is one half of a pair of servers of another kind.
type farServer struct {
	*httptest.Server
	ill  atomic.Bool   // its probes fail
	errs atomic.Bool   // its answers are errors
	gate chan struct{} // what each answer waits for
	held atomic.Int64  // answers that wait

	mu      sync.Mutex
	parents []string // traceparent of each request
}

// traced are the spans below which it was asked in a trace.
func (f *farServer) traced(trace string) (spans []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.parents {
		if part := strings.Split(p, "-"); len(part) == 4 && part[1] == trace {
			spans = append(spans, part[2])
		}
	}
	return spans
}

// startFar serves a model "m"; a closed gate lets all pass.
func startFar(t *testing.T, gate chan struct{}) *farServer {
	t.Helper()
	f := &farServer{gate: gate}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what has come of it
		switch {
		case r.URL.Path == "/health" && f.ill.Load():
			w.WriteHeader(503)
		case r.URL.Path == "/health":
		case r.URL.Path == "/v1/models":
			fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		default:
			f.mu.Lock()
			f.parents = append(f.parents, r.Header.Get("Traceparent"))
			f.mu.Unlock()
			if f.errs.Load() {
				w.WriteHeader(500)
				return
			}
			f.held.Add(1)
			select {
			case <-f.gate:
			case <-r.Context().Done():
			}
			f.held.Add(-1)
			const answer = `{"id":"x","choices":[{"text":"yes","finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}},"kv_transfer_params":{"remote":1}}`
			if bytes.Contains(body, []byte(`"stream":true`)) {
				w.Header().Set("Content-Type", "text/event-stream")
				fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", answer)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, answer)
		}
	}))
	t.Cleanup(f.Close)
	return f
}

// A gateway with nothing but pairs of upstreams, two that prefill and two that
// decode: what it says of them is what they are, panels and alerts show it, and
// nobody is told of decode nodes that it never had.
func TestBinaryUpstreamMeters(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.seen = map[string]bool{}
	path := binary(t)
	open, gate := make(chan struct{}), make(chan struct{})
	close(open)
	p, d := []*farServer{startFar(t, open), startFar(t, open)}, []*farServer{startFar(t, gate), startFar(t, gate)}
	file := filepath.Join(c.state, "gateway.yaml")
	name := func(decode ...*farServer) {
		t.Helper()
		text := fmt.Sprintf("port: %d\nupstream-prefill: [%s, %s]\nupstream-decode: [", c.port, p[0].URL, p[1].URL)
		for _, d := range decode {
			text += d.URL + ","
		}
		if err := os.WriteFile(file, []byte(strings.TrimSuffix(text, ",")+"]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	name(d...)
	c.start(path, "gateway", "--config", file)
	c.wait(startBound, "the gateway is ready", func() bool { return c.body("/readyz") != "" })
	prometheus := startProm(t, c, quickened(t))

	g := []int{gatewayNode}
	const servers, requests, breakers = "tandem:gateway_upstreams", "tandem:gateway_upstream_requests", "tandem:gateway_upstream_breakers"
	c.hold("all are well", []want{
		{g, servers, `state="up",task="prefill"`, 2}, {g, servers, `state="up",task="decode"`, 2}, {g, servers, "", 4},
		{g, breakers, `"closed"`, 4}, {g, breakers, "", 4}, {g, requests, "", 0}, {g, "tandem:gateway_usable_decode_nodes", "", 0},
	})
	prometheus.until("it scrapes", breakers, sum(4))
	const shows, inHand = "Upstreams as gateways see them", "Upstreams: requests in flight"
	well := show(map[string]float64{"closed": 4, "half-open": 0, "open": 0})
	prometheus.holdPanels(map[string][]shown{shows: {show(map[string]float64{"up prefill": 2, "up decode": 2}), well}, inHand: {zeros("serve", "prefill", "decode")}})

	answers := make(chan string, 3)
	ask := func() {
		resp, err := http.Post(c.url("/v1/completions"), "application/json", bytes.NewBufferString(`{"model":"m","prompt":"hello"}`))
		if err != nil {
			answers <- err.Error()
			return
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		answers <- resp.Status + " " + string(text)
	}
	for range cap(answers) {
		go ask()
	}
	c.hold("three are in hand", []want{{g, requests, `"decode"`, 3}, {g, requests, "", 3}, {g, "tandem:gateway_requests_in_flight", "", 3}})
	prometheus.holdPanels(map[string][]shown{inHand: {show(map[string]float64{"serve": 0, "prefill": 0, "decode": 3})}})

	// One that is named no more keeps what it has in hand.
	if n := d[0].held.Load() + d[1].held.Load(); n != 3 {
		t.Errorf("the servers have %d requests in hand", n)
	}
	kept := 0 // which of them has any
	if d[1].held.Load() > 0 {
		kept = 1
	}
	name(d[1-kept])
	c.signal(syscall.SIGHUP)
	c.hold("one leaves", []want{{g, servers, `state="leaving",task="decode"`, 1}, {g, servers, `state="up",task="decode"`, 1}, {g, servers, "", 4}})
	prometheus.holdPanels(map[string][]shown{shows: {show(map[string]float64{"up prefill": 2, "up decode": 1, "leaving decode": 1}), show(map[string]float64{"closed": 3, "half-open": 0, "open": 0})}})
	close(gate)
	for range cap(answers) {
		if a := <-answers; !strings.HasPrefix(a, "200 ") || !strings.Contains(a, "yes") {
			t.Error(a)
		}
	}
	c.hold("it has left", []want{{g, servers, `"leaving"`, 0}, {g, servers, "", 3}, {g, requests, "", 0}})
	name(d...)
	c.signal(syscall.SIGHUP)
	c.hold("it is back", []want{{g, servers, `state="up",task="decode"`, 2}, {g, servers, "", 4}})

	// Errors open breakers, which let one through a second later.
	for _, s := range d {
		s.errs.Store(true)
	}
	c.wait(startBound, "both breakers have opened", func() bool {
		ask()
		<-answers
		text := c.scrape(gatewayNode)
		closed, _ := pick(text, breakers, `"closed"`)
		ajar, _ := pick(text, breakers, `"half-open"`)
		opened, _ := pick(text, breakers, `"open"`)
		return closed == 2 && ajar+opened == 2
	})

	d[0].ill.Store(true)
	c.hold("one is ill", []want{{g, servers, `state="down",task="decode"`, 1}, {g, servers, `state="up",task="decode"`, 1}})
	prometheus.fired("an upstream that is down", "TandemUpstreamDown")
	d[1].ill.Store(true)
	c.hold("both are ill", []want{{g, servers, `state="down",task="decode"`, 2}, {g, servers, `state="up",task="prefill"`, 2}, {g, servers, `"up"`, 2}})
	prometheus.fired("no upstream is well", "TandemNoUpstream")
	prometheus.until("no decode nodes, of which there were never any", `count(tandem:gateway_usable_decode_nodes == 0) unless count(count_over_time(ALERTS{alertname="TandemNoDecodeNode"}[10m]))`,
		func(values []float64, _ []map[string]string) bool { return len(values) == 1 && values[0] == 1 })
	c.holdSeen()
	c.signal(syscall.SIGINT)
	c.waitGone(stopBound)
}
