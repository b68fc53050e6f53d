package gateway

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// early returns options with an early head, and with a socket if tcp is set.
func early(t *testing.T, tcp bool) (o Options) {
	t.Helper()
	o.Limits.SSEKeepAlive, o.Limits.SSEEarlyHead = quiet, true
	if tcp {
		var err error
		if o.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

// wantEarly checks that a stream begins with comments, and returns what follows them.
func wantEarly(t *testing.T, r reply, cut bool) reply {
	t.Helper()
	if !strings.HasPrefix(r.body, exchange.KeepAlive+exchange.KeepAlive) || r.StatusCode != 200 || (r.err != nil) != cut ||
		r.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || r.Header.Get("X-Accel-Buffering") != "no" || r.Header.Get("X-Request-Id") == "" {
		t.Errorf("%d %v, %v, %q", r.StatusCode, r.Header, r.err, r.body)
	}
	r.body = strings.ReplaceAll(r.body, exchange.KeepAlive, "")
	return r
}

// The head of a stream leaves after silence, and comments follow until the first token. The stream
// is otherwise unchanged, and the connection can be used again.
func TestEarlyHeadOfNodes(t *testing.T) {
	for name, tcp := range map[string]bool{"memory": false, "tcp": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gate := make(chan struct{})
			b := newBed(t, early(t, tcp), one(nodestest.Options{Gate: gate}))
			c := b.dialAny(t, tcp, nil)
			defer c.Close()
			for range 2 {
				c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`)
				var got []byte
				for err := error(nil); bytes.Count(got, []byte(exchange.KeepAlive)) < 2; {
					if got, err = c.r.Peek(len(got) + 1); err != nil {
						t.Fatalf("%v after %q", err, got)
					}
				}
				go feed(gate, 3)
				r := wantEarly(t, c.receive(), false)
				if s := r.events(t); !s.done || s.text[0] != "Hel" || s.last.Usage.Completion != 3 {
					t.Errorf("%+v", s)
				}
			}
			go feed(gate, 3)
			c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":3}`)
			if r := c.receive(); r.StatusCode != 200 || strings.Contains(r.body, exchange.KeepAlive) {
				t.Errorf("%d %q", r.StatusCode, r.body)
			}
		})
	}
}

// A stream that is refused at once gets an HTTP status. A stream that is refused after its head gets
// an error event, and an aborted connection unless its API has an event for failed answers.
func TestEarlyHeadRefused(t *testing.T) {
	o := early(t, false)
	o.Limits.QueueTimeout = 12 * quiet // on a busy machine comments are late
	b, gate := crowd(t, o)
	b.ask("first", 0)
	b.ask("second", 0)
	r := wantEarly(t, b.post("/v1/completions", `{"prompt":"x","max_tokens":2,"stream":true}`), true)
	if s := r.events(t); s.failure == nil || s.done || s.failure.Error.Code != float64(429) || !strings.Contains(s.failure.Error.Message, "no room") {
		t.Errorf("%q", r.body)
	}
	for path, body := range map[string]string{
		"/v1/messages":  `{"max_tokens":2,"messages":[{"role":"user","content":"x"}],"stream":true}`,
		"/v1/responses": `{"input":"x","stream":true}`,
	} { // APIs with an event for failed answers
		if r := wantEarly(t, b.post(path, body), false); !strings.Contains(r.body, "event: error\n") && !strings.Contains(r.body, "event: response.failed\n") || !strings.Contains(r.body, "no room") {
			t.Errorf("%s: %q", path, r.body)
		}
	}
	b.post("/v1/completions", `{"prompt":"x","max_tokens":2}`).wantError(t, 429, "no room")
	b.post("/v1/completions", `{"prompt":"x","max_tokens":2,"stream":true}`, "X-Tandem-Timeout: 1ms").wantError(t, 504, "longer than 1ms")
	b.post("/v1/completions", `{"prompt":"x","max_tokens":0.5,"stream":true}`).wantError(t, 400, "max_tokens")
	feed(gate, 4)
}

// A client that leaves after the head ends its request, whether that waits for room or for a token.
func TestEarlyHeadClientGone(t *testing.T) {
	b, gate := crowd(t, early(t, false))
	b.ask("first", 0)
	for range 2 { // the first one waits on the node, the second one for room
		c := b.dial()
		before := b.g.InFlight.Load()
		c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":2,"stream":true}`)
		var got []byte
		for !bytes.Contains(got, []byte(exchange.KeepAlive)) {
			p := make([]byte, 4096)
			n, err := c.Read(p)
			if err != nil {
				t.Fatalf("%v after %q", err, got)
			}
			got = append(got, p[:n]...)
		}
		c.Close()
		b.until(func() bool { return b.g.InFlight.Load() == before })
		b.ask("second", 0)
	}
	feed(gate, 6)
}

// Streams of upstreams get an early head, too. What the upstream answers in place of a stream is an
// error event then.
func TestEarlyHeadOfUpstreams(t *testing.T) {
	events := chunkEvent("one ") + "data: [DONE]\n\n"
	for name, c := range map[string]struct {
		status     int
		kind, body string
		want       string // in the error's message; empty: the stream is whole
	}{
		"stream":    {200, "text/event-stream", events, ""},
		"refused":   {429, "application/json", `{"error":{"message":"busy"}}`, "status 429: {\"error\":{\"message\":\"busy\"}}"},
		"no stream": {200, "application/json", `{}`, "no stream of events"},
		"large":     {400, "text/plain", strings.Repeat("x", 200<<10), "status 400: xxx"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newRelayed(t, early(t, false), "s1")
			b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
				time.Sleep(15 * quiet) // on a busy machine comments are late
				w.Header().Set("Content-Type", c.kind)
				w.WriteHeader(c.status)
				io.WriteString(w, c.body)
			})
			for range 2 {
				r := wantEarly(t, b.post("/v1/chat/completions", ask(true, "hello")), c.want != "")
				if c.want == "" {
					if r.body != events {
						t.Errorf("%q", r.body)
					}
				} else if s := r.events(t); s.failure == nil || s.done || !strings.Contains(s.failure.Error.Message, c.want) {
					t.Errorf("%q", r.body)
				}
			}
		})
	}
}

// An answer that arrives in time has the upstream's status and headers.
func TestEarlyHeadInTime(t *testing.T) {
	o := early(t, false)
	o.Limits.SSEKeepAlive = soon
	b := newRelayed(t, o, "s1")
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(418) })
	if r := b.post("/v1/chat/completions", ask(true, "hello")); r.StatusCode != 418 {
		t.Errorf("%d %q", r.StatusCode, r.body)
	}
}
