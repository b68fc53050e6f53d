package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// timeless takes the client's own deadline away.
func (c *client) timeless() *client {
	if err := c.SetDeadline(time.Time{}); err != nil {
		c.Fatal(err)
	}
	return c
}

// drip writes text a few bytes at a time; it stops when the other side is gone.
func (c *client) drip(text string, nBytes int, every time.Duration) {
	for len(text) > 0 {
		n := min(nBytes, len(text))
		if _, err := io.WriteString(c, text[:n]); err != nil {
			return
		}
		text = text[n:]
		time.Sleep(every)
	}
}

// A request's head has a time, its body a least rate; who keeps it is served however
// long it takes.
func TestSlowSenders(t *testing.T) {
	body := `{"prompt":"` + strings.Repeat("x", 40_000) + `","max_tokens":1}`
	head := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n", len(body))
	for what, c := range map[string]struct {
		send        func(*client)
		status      int
		least, most time.Duration
	}{
		"one byte a second":   {func(c *client) { c.drip(head, 1, time.Second) }, 408, 10 * time.Second, 11 * time.Second},
		"its body so":         {func(c *client) { _, _ = io.WriteString(c, head); c.drip(body, 1, time.Second) }, 408, 10 * time.Second, 11 * time.Second},
		"slower than allowed": {func(c *client) { _, _ = io.WriteString(c, head); c.drip(body, 500, time.Second) }, 408, 15 * time.Second, 25 * time.Second},
		"faster than that":    {func(c *client) { _, _ = io.WriteString(c, head); c.drip(body, 1500, time.Second) }, 200, 25 * time.Second, 28 * time.Second},
		"told that it may go on": {func(c *client) {
			_, _ = io.WriteString(c, strings.Replace(head, "\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n", 1))
		}, 408, 10 * time.Second, 11 * time.Second},
		"nothing at all": {func(*client) {}, 408, 10 * time.Second, 11 * time.Second},
		"a chunk that never ends": {func(c *client) {
			_, _ = io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
			c.drip("ffff\r\n"+body, 1, time.Second)
		}, 408, 10 * time.Second, 11 * time.Second},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own ticker
				b := newBed(t, Options{}, one(nodestest.Options{}))
				conn := b.dial().timeless()
				began := time.Now()
				var sends sync.WaitGroup
				sends.Go(func() { c.send(conn) })
				status := 0
				for resp := ""; status == 0; {
					line, err := conn.r.ReadString('\n')
					if resp += line; err != nil {
						status = -1
					} else if strings.HasPrefix(line, "HTTP/1.1 ") && !strings.HasPrefix(line, "HTTP/1.1 100") {
						_, _ = fmt.Sscanf(line, "HTTP/1.1 %d", &status)
					}
				}
				if took := time.Since(began); status != c.status && !(what == "nothing at all" && status == -1) || took < c.least || took > c.most {
					t.Errorf("status %d after %v, want %d after %v to %v", status, took, c.status, c.least, c.most)
				}
				conn.Close()
				sends.Wait()
				b.stop()
				synctest.Wait()
				if held := b.g.http.Held(); held != 0 {
					t.Errorf("%d bytes of bodies are still counted", held)
				}
			})
		})
	}
}

// Large bodies have memory together; who finds none is told to come back, and what
// is left behind by clients that go is free again.
func TestMemoryOfBodies(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{Limits: Limits{MaxBodyMemory: 262_000}}, one(nodestest.Options{Gate: gate}))
	body := `{"messages":[{"role":"user","content":"x","name":"` + strings.Repeat("x", 60_000) + `"}],"max_tokens":1}`
	head := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n", len(body))
	first := b.dial()
	if _, err := io.WriteString(first, head+body[:20_000]); err != nil {
		t.Fatal(err)
	}
	b.until(func() bool { return b.g.http.Held() > 0 })
	// Its parse would take three times its bytes.
	b.post("/v1/chat/completions", body).wantError(t, 429, "--max-body-memory 262000")
	b.until(func() bool { return b.g.http.Held() < 100_000 }) // what was refused is given back
	more := b.dial()
	if _, err := io.WriteString(more, strings.Replace(head, fmt.Sprint(len(body)), "200000", 1)+body[:20_000]); err != nil {
		t.Fatal(err)
	}
	b.until(func() bool { return b.g.http.Held() > 200_000 })
	b.post("/v1/chat/completions", body).wantError(t, 429, "--max-body-memory 262000") // before it is read
	more.Close()
	b.until(func() bool { return b.g.http.Held() < 100_000 })
	b.post("/v1/completions", `{"prompt":"`+strings.Repeat("x", 10_000)+`","temperature":-1}`).wantError(t, 400, "temperature")
	first.Close()
	b.until(func() bool { return b.g.http.Held() == 0 })
	second := b.dial()
	defer second.Close()
	for range 3 { // each gives back what it had
		second.send("POST", "/v1/chat/completions", body)
		gate <- struct{}{}
		if r := second.receive(); r.StatusCode != 200 {
			t.Fatalf("%d %s", r.StatusCode, r.body)
		}
	}
	b.until(func() bool { return b.g.http.Held() == 0 })
	if n := b.refused("body_memory"); n != 2 {
		t.Errorf("%g refusals", n)
	}
}

// Of one address there are so many connections, and no more.
func TestConnectionsPerAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := newBed(t, Options{Listener: l, Limits: Limits{MaxConnsPerAddress: 2}}, one(nodestest.Options{}))
	dial := func() *client {
		nc, err := net.Dial("tcp", b.g.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
		return &client{bed: b, Conn: nc, r: bufio.NewReader(nc)}
	}
	open := func(n int) {
		t.Helper()
		b.until(func() bool { all, _, _ := b.g.http.Connections(); return all == n })
	}
	one, two := dial(), dial()
	open(2)
	dial().receive().wantError(t, 429, "2 connections")
	one.Close()
	open(1)
	three := dial()
	for _, c := range []*client{two, three} {
		c.send("GET", "/livez", "")
		if r := c.receive(); r.StatusCode != 200 {
			t.Errorf("%d %s", r.StatusCode, r.body)
		}
	}
	two.Close()
	three.Close()
	b.until(func() bool { _, _, from := b.g.http.Connections(); return from == 0 })
	if n := b.refused("address"); n != 1 {
		t.Errorf("%g refusals", n)
	}
}

// What a request may ask for is bounded, and the bounds change while it runs.
func TestLimitsOfRequests(t *testing.T) {
	o := Options{Limits: Limits{MaxN: 2, MaxPromptTokens: 5, MaxLogprobs: 3, MaxBodyBytes: 500}}
	b := newBed(t, o, one(nodestest.Options{}))
	cases := []struct {
		path, body string
		status     int
		says       string
	}{
		{"/v1/completions", `{"prompt":"x","max_tokens":1,"n":3}`, 400, "at most 2 choices"},
		{"/v1/completions", `{"prompt":"abcdef","max_tokens":1}`, 400, "6 tokens: this gateway takes at most 5"},
		{"/v1/completions", `{"prompt":["a","abcdef"],"max_tokens":1}`, 400, "6 tokens"},
		{"/v1/chat/completions", `{` + hi + `,"max_tokens":1}`, 400, "takes at most 5"},
		{"/v1/completions", `{"prompt":"x","max_tokens":1,"logprobs":4}`, 400, "3"},
		{"/v1/completions", `{"prompt":"x","max_tokens":1,"user":"` + strings.Repeat("u", 500) + `"}`, 413, "500 bytes"},
	}
	for _, c := range cases {
		b.post(c.path, c.body).wantError(t, c.status, c.says)
	}
	if r := b.post("/v1/completions", `{"prompt":"abcde","max_tokens":1,"n":2,"logprobs":3}`); r.StatusCode != 200 {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	for _, bad := range []Limits{{MaxN: 129}, {MaxN: -1}, {MaxLogprobs: 10_000}} {
		if err := b.g.SetLimits(bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
	b.post("/v1/completions", cases[0].body).wantError(t, 400, "at most 2 choices") // the old ones stay
	if err := b.g.SetLimits(Limits{MaxQueuedRequests: 7}); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if r := b.post(c.path, c.body); r.StatusCode != 200 {
			t.Errorf("%s: %d %s", c.body, r.StatusCode, r.body)
		}
	}
	if text := b.do("GET", "/metrics", "").body; !strings.Contains(text, `tandem:queue_limit{queue="waiting"} 7`) {
		t.Error("metrics have the old limit")
	}
}

// Clients that read a byte a second hold what their buffers hold, however many
// they are and however long their answers, and nothing is left of them.
func TestSlowReadersHoldTheirBuffers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own ticker
		const nClients, tokens, eventBytes = 40, 50, 300
		door := rpc.NewNetwork()
		door.Buffer = 2 << 10
		l, err := door.Listen("door")
		if err != nil {
			t.Fatal(err)
		}
		b := newBed(t, Options{Listener: l, StreamTokens: tokens}, one(nodestest.Options{Token: ramble}))
		var clients sync.WaitGroup
		for range nClients {
			nc, err := door.Dial(t.Context(), "door")
			if err != nil {
				t.Fatal(err)
			}
			c := &client{bed: b, Conn: nc, r: bufio.NewReaderSize(nc, 16)}
			c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":90000,"stream":true}`)
			clients.Go(func() {
				defer c.Close()
				one := make([]byte, 1)
				for {
					if _, err := c.Conn.Read(one); err != nil {
						return
					}
					time.Sleep(time.Second)
				}
			})
		}
		most, told := int64(0), b.g.Meters.Gauge(metrics.GatewayStreamBuffers)
		for range 100 {
			time.Sleep(500 * time.Millisecond)
			synctest.Wait()
			held := b.g.native.Buffered.Load()
			if told.Get() != float64(held) {
				t.Fatalf("%d bytes are held, %g are told", held, told.Get())
			}
			most = max(most, held)
		}
		// Of each an event for every token of its bound, and as many again while the
		// buffer doubles.
		if bound := int64(nClients * 2 * tokens * eventBytes); most == 0 || most > bound {
			t.Errorf("%d clients held %d bytes, the bound is %d", nClients, most, bound)
		}
		t.Logf("%d bytes a client", most/nClients)
		clients.Wait() // each is given up
		synctest.Wait()
		if left := b.g.native.Buffered.Load(); left != 0 || b.g.InFlight.Load() != 0 || b.nodes["d1"].Running() != 0 {
			t.Errorf("%d bytes, %d requests and %d attempts are left", left, b.g.InFlight.Load(), b.nodes["d1"].Running())
		}
		if err := b.g.Check(); err != nil {
			t.Error(err)
		}
	})
}

// Every limit by which requests are refused has a test that counts its refusals.
func TestEveryLimitHasATest(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	tests := ""
	for _, f := range append(files, "exchange/admission_test.go") {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		tests += string(text)
	}
	for _, limit := range metrics.Rows[metrics.GatewayRefused].Labels[0].Values {
		if !strings.Contains(tests, fmt.Sprintf("refused(%q)", limit)) {
			t.Errorf("no test looks at refused(%q)", limit)
		}
	}
}
