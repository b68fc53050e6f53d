package gateway

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const streamed = `{"prompt":"x","max_tokens":40,"stream":true}`

func TestErrors(t *testing.T) {
	b := newBed(t, Options{APIKeys: []string{"k1", "k2"}, Limits: Limits{MaxBodyBytes: 5000}, Version: "9.9"}, one(nodestest.Options{}))
	const key = "Authorization: Bearer k2"
	for _, c := range []struct {
		method, path, body, header string
		status                     int
		kind, param, says          string
	}{
		{"POST", "/v1/completions", `{"prompt":"x"}`, "X-A: b", 401, "Unauthorized", "", "API key"},
		{"POST", "/v1/completions", `{"prompt":"x"}`, "Authorization: Bearer k3", 401, "Unauthorized", "", "API key"},
		{"POST", "/v1/completions", `{"prompt":"x"}`, "Authorization: k1", 401, "Unauthorized", "", "API key"},
		{"GET", "/v1/models", "", "Authorization: Bearer ", 401, "Unauthorized", "", "API key"},
		{"POST", "/v1/completions", `{"prompt":"x"}`, "authorization: bearer k1", 200, "", "", ""},
		{"POST", "/v1/completions", `{"prompt":"x","model":"gpt"}`, key, 404, "NotFoundError", "model", `"gpt" does not exist`},
		{"GET", "/v1/models/gpt", "", key, 404, "NotFoundError", "model", "does not exist"},
		{"GET", "/v1/models/tiny", "", key, 200, "", "", ""},
		{"GET", "/v1/nothing", "", key, 404, "NotFoundError", "", "/v1/nothing"},
		{"GET", "/v1/completions", "", key, 405, "Method Not Allowed", "", "takes POST"},
		{"POST", "/health", "", key, 405, "Method Not Allowed", "", "takes GET"},
		{"POST", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 5000) + `"}`, key, 413, "Request Entity Too Large", "", "5000 bytes"},
		{"GET", "/v1/models", "", "X-Long: " + strings.Repeat("x", 20000), 431, "Request Header Fields Too Large", "", "head"},
		{"POST", "/v1/completions", `{"prompt":`, key, 400, "BadRequestError", "", "not valid JSON"},
		{"POST", "/v1/completions", `{"prompt":"x","temperature":-1}`, key, 400, "BadRequestError", "temperature", "temperature"},
		{"POST", "/v1/completions", `{"prompt":""}`, key, 400, "BadRequestError", "prompt", "empty"},
		{"POST", "/v1/completions", `{"prompt":[258]}`, key, 400, "BadRequestError", "prompt", "vocabulary of 258"},
		{"POST", "/v1/completions", `{"prompt":"x","max_tokens":100000}`, key, 400, "BadRequestError", "max_tokens", "maximum context length is 100000"},
		{"POST", "/v1/chat/completions", `{` + hi + `,"tools":[{}]}`, key, 400, "BadRequestError", "tools[0].type", "must be"},
		{"POST", "/v1/chat/completions", `{"messages":[{"role":"user"}]}`, key, 400, "BadRequestError", "messages", "chat template"},
		{"GET", "/livez", "", "X-A: b", 200, "", "", ""},
		{"GET", "/readyz", "", "X-A: b", 200, "", "", ""},
		{"HEAD", "/health", "", "X-A: b", 200, "", "", ""},
		{"GET", "/ping", "", "X-A: b", 200, "", "", ""},
		{"GET", "/version", "", "X-A: b", 401, "Unauthorized", "", "API key"},
		{"GET", "/metrics", "", key, 200, "", "", ""},
	} {
		r := b.do(c.method, c.path, c.body, c.header, "Connection: close")
		if r.StatusCode != c.status || r.Header.Get("X-Request-Id") == "" || r.Header.Get("Date") != "" {
			t.Errorf("%s %s %.60s: %d %q %v, want %d", c.method, c.path, c.body, r.StatusCode, r.body, r.Header, c.status)
			continue
		}
		if c.status == 200 {
			continue
		}
		code := any(float64(c.status))
		if strings.Contains(c.says, "maximum context") {
			code = "context_length_exceeded"
		}
		e := r.parse(t).Error
		if e == nil || e.Type != c.kind || e.Code != code || (e.Param == nil) != (c.param == "") || e.Param != nil && *e.Param != c.param || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s %s %.60s: %s", c.method, c.path, c.body, r.body)
		}
	}
	if r := b.do("GET", "/version", "", key); r.body != `{"version":"9.9"}` {
		t.Errorf("%q", r.body)
	}
	if r := b.do("GET", "/v1/completions", "", key); r.Header.Get("Allow") != "POST, OPTIONS" {
		t.Errorf("%v", r.Header)
	}
	text := b.do("GET", "/metrics", "", key).body
	for _, want := range []string{`tandem:http_requests_total{route="/v1/completions",status="200"} 1`, `tandem:http_requests_total{route="/v1/completions",status="401"} 3`,
		`tandem:http_requests_total{route="other",status="431"} 1`, "tandem:gateway_usable_decode_nodes 1", "tandem:gateway_requests_in_flight 0"} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("metrics lack %s", want)
		}
	}
}

func TestRequestIDs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	id := func(body string, headers ...string) (string, string, string) {
		r := b.post("/v1/completions", body, headers...)
		return r.Header.Get("X-Request-Id"), r.parse(t).ID, lastRequest(b, "d1").RequestId
	}
	for _, c := range []struct{ body, header, want string }{
		{`{"prompt":"x","request_id":"mine"}`, "X-A: b", "mine"},
		{`{"prompt":"x"}`, "X-Request-Id: theirs", "theirs"},
		{`{"prompt":"x","request_id":"mine"}`, "X-Request-Id: theirs", "theirs"},
	} {
		if h, resp, node := id(c.body, c.header); h != c.want || resp != "cmpl-"+c.want || node != c.want {
			t.Errorf("%s: %s %s %s", c.body, h, resp, node)
		}
	}
	h, resp, node := id(`{"prompt":"x"}`, "X-Request-Id: not\tgood")
	if len(h) != 32 || resp != "cmpl-"+h || node != h {
		t.Errorf("%s %s %s", h, resp, node)
	}
}

// breaks starts a stream and lets the node break once its first token is out.
func (b *bed) breaks(gate chan struct{}) *client {
	b.Helper()
	b.rested()
	c := b.dial()
	b.Cleanup(func() { c.Close() })
	c.send("POST", "/v1/completions", streamed)
	gate <- struct{}{}
	if _, err := c.r.Peek(1); err != nil {
		b.Fatal(err)
	}
	go feed(gate, 4)
	return c
}

// rested waits until the node is there and has let go of the stream before,
// which would otherwise take what the gate lets through.
func (b *bed) rested() {
	b.Helper()
	b.until(func() bool {
		for _, n := range b.nodes {
			if n.Running() > 0 {
				return false
			}
		}
		return b.g.native.Usable() == 1
	})
}

func feed(gate chan struct{}, n int) {
	for range n {
		gate <- struct{}{}
	}
}

// A node that dies while it answers, and nobody who goes on: the client sees an
// error event and a body without its last chunk; where nothing was sent yet, a
// status.
func TestBrokenStreamIsVisible(t *testing.T) {
	virtually(t, func(t *testing.T) {
		for name, o := range map[string]nodestest.Options{
			"connection lost": {CutAfter: 5},
			"out of order": {Garble: func(tok rpc.Token) rpc.Token {
				if tok.Position == 5 {
					tok.Position = 9
				}
				return tok
			}},
		} {
			gate := make(chan struct{})
			o.Gate = gate
			o.Refuse = func(r *nodepb.Generate) (nodepb.Code, string) {
				if len(r.Output) > 0 {
					return nodepb.Code_CODE_OVERLOADED, "full"
				}
				return 0, ""
			}
			b := newBed(t, Options{Limits: Limits{ResumeTimeout: 100 * time.Millisecond}}, one(o))
			// Once as bytes, once as a client library sees it.
			c := b.breaks(gate)
			raw, err := io.ReadAll(c.r)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if strings.HasSuffix(string(raw), "0\r\n\r\n") || strings.Contains(string(raw), "[DONE]") || !strings.Contains(string(raw), `data: {"error"`) {
				t.Errorf("%s: the body ends cleanly: %q", name, raw)
			}
			r := b.breaks(gate).receive()
			s := r.events(t)
			if r.err != io.ErrUnexpectedEOF || s.done || !strings.HasPrefix("Hello", s.text[0]) || s.text[0] == "" || s.finish[0] != "" || s.failure == nil || s.failure.Error.Code != 503.0 {
				t.Errorf("%s: %v %q", name, r.err, r.body)
			}
			b.rested()
			go feed(gate, 5)
			if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":40}`); r.StatusCode != 503 || r.Header.Get("Retry-After") == "" || r.parse(t).Error.Type != "ServiceUnavailableError" {
				t.Errorf("%s: %d %q", name, r.StatusCode, r.body)
			}
			b.close()
			if n := b.g.Meters.Counter(metrics.GatewayStreamsAborted, "upstream").Get(); n != 3 {
				t.Errorf("%s: %g aborts counted", name, n)
			}
		}
	})
}

// Before the first token a failed attempt goes elsewhere, with the next attempt
// number and the same seed; 4xx never does.
func TestRetries(t *testing.T) {
	refuse := func(code nodepb.Code) nodestest.Options {
		return nodestest.Options{Refuse: func(*nodepb.Generate) (nodepb.Code, string) { return code, "told so" }}
	}
	for name, c := range map[string]struct {
		bad    nodestest.Options
		status int // with the bad nodes alone
		kind   string
	}{
		"overloaded": {refuse(nodepb.Code_CODE_OVERLOADED), 503, "overloaded"},
		"draining":   {refuse(nodepb.Code_CODE_DRAINING), 503, "draining"},
		"mismatch":   {refuse(nodepb.Code_CODE_MISMATCH), 503, "mismatch"},
		"mute":       {nodestest.Options{Mute: func(*nodepb.Generate) bool { return true }}, 503, "timeout"},
		"lost": {nodestest.Options{Garble: func(tok rpc.Token) rpc.Token {
			tok.ID = -7 // ends the connection before the first token
			return tok
		}}, 503, "connection"},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				// Only the mute are waited for, and a good node is not to seem mute.
				o := Options{AcceptTimeout: time.Second, Limits: Limits{MaxAttempts: 2}}
				if name != "mute" {
					o.AcceptTimeout = soon
				}
				b := newBed(t, o, map[string]nodestest.Options{"bad": c.bad, "good": {}})
				for i := range 40 {
					b.until(func() bool { return b.g.native.Usable() == 2 }) // the lost one is back
					body := fmt.Sprintf(`{"prompt":"prompt %d","max_tokens":5,"seed":%d,"stream":%v}`, i, i, i%2 == 0)
					if r := b.post("/v1/completions", body); r.StatusCode != 200 || !strings.Contains(r.body, "length") {
						t.Fatalf("%d: %d %q; log:\n%s", i, r.StatusCode, r.body, b.log.String())
					}
					if len(b.nodes["bad"].Requests()) >= 3 {
						break
					}
				}
				if n := b.g.Meters.Counter(metrics.GatewayAttemptFailures, c.kind).Get(); n < 3 {
					t.Fatalf("%g failures of kind %s", n, c.kind)
				}
				seconds := 0
				for _, r := range b.nodes["good"].Requests() {
					if r.Attempt == 2 {
						seconds++
					}
				}
				if seconds < 3 {
					t.Fatalf("%d second attempts", seconds)
				}
				alone := newBed(t, o, map[string]nodestest.Options{"bad": c.bad})
				r := alone.post("/v1/completions", `{"prompt":"x","stream":true}`)
				if r.StatusCode != c.status || r.Header.Get("Retry-After") != "1" {
					t.Errorf("alone: %d %q %v", r.StatusCode, r.body, r.Header)
				}
				if n := len(alone.nodes["bad"].Requests()); n > 2 {
					t.Errorf("a lone node was asked %d times", n)
				}
			})
		})
	}
	for code, status := range map[nodepb.Code]int{nodepb.Code_CODE_INVALID: 400, nodepb.Code_CODE_NOT_FOUND: 404, nodepb.Code_CODE_DEADLINE: 504} {
		b := newBed(t, Options{}, map[string]nodestest.Options{"d1": refuse(code), "d2": refuse(code)})
		if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != status || !strings.Contains(r.parse(t).Error.Message, "told so") {
			t.Errorf("%s: %d %q", code, r.StatusCode, r.body)
		}
		if n := len(b.nodes["d1"].Requests()) + len(b.nodes["d2"].Requests()); n != 1 {
			t.Errorf("%s: tried %d times", code, n)
		}
		if n := b.g.Meters.Counter(metrics.GatewayStreamsAborted, "deadline").Get(); (n == 1) != (code == nodepb.Code_CODE_DEADLINE) {
			t.Errorf("%s: %g requests ended by their deadline", code, n)
		}
	}
}

// A node that has said no is asked again when another has taken the request
// meanwhile and given it away: it is back, as in a rolling restart.
func TestRefusalsAreForgotten(t *testing.T) {
	for _, code := range []nodepb.Code{nodepb.Code_CODE_DRAINING, nodepb.Code_CODE_OVERLOADED} {
		o := nodestest.Options{
			Refuse: func(r *nodepb.Generate) (nodepb.Code, string) {
				if r.Attempt == 1 {
					return code, "not now"
				}
				return 0, ""
			},
			Leave: func(r *nodepb.Generate) nodepb.Code {
				if r.Attempt == 2 {
					return code
				}
				return 0
			},
		}
		b := newBed(t, Options{AcceptTimeout: soon}, map[string]nodestest.Options{"d1": o, "d2": o})
		if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":3}`); r.StatusCode != 200 {
			t.Errorf("%s: %d %q", code, r.StatusCode, r.body)
		}
		if a, b := len(b.nodes["d1"].Requests()), len(b.nodes["d2"].Requests()); a+b != 3 || a*b != 2 {
			t.Errorf("%s: asked %d and %d times", code, a, b)
		}
	}
}

// Nodes that die with an attempt on its way to them, one after the other, are not
// counted against a request that none of them has taken.
func TestNodesThatVanish(t *testing.T) {
	o := nodestest.Options{Vanish: func(r *nodepb.Generate) bool { return r.Attempt <= 4 }}
	b := newBed(t, Options{Limits: Limits{MaxAttempts: 2}, AcceptTimeout: soon}, map[string]nodestest.Options{"d1": o, "d2": o, "d3": o, "d4": o, "d5": o, "d6": o})
	if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":3}`); r.StatusCode != 200 {
		t.Errorf("%d %q", r.StatusCode, r.body)
	}
}

// Every request finds the living nodes while others are killed and return.
func TestKillsBeforeFirstToken(t *testing.T) {
	b := newBed(t, Options{Limits: Limits{MaxAttempts: 4}}, map[string]nodestest.Options{"d1": {}, "d2": {}, "d3": {}})
	r, dead := rand.New(rand.NewPCG(1, 1)), ""
	for i := range 60 {
		switch i % 6 {
		case 1: // gone without a word
			dead = fmt.Sprintf("d%d", 1+r.IntN(3))
			b.nodes[dead].Stop()
		case 4:
			b.node(dead, nodestest.Options{})
		}
		if r := b.post("/v1/completions", fmt.Sprintf(`{"prompt":"p%d","max_tokens":3}`, i)); r.StatusCode != 200 {
			t.Fatalf("request %d: %d %q", i, r.StatusCode, r.body)
		}
	}
}

// No usable node is a clear 503, and service returns with the node.
func TestNoNode(t *testing.T) {
	b := newBed(t, Options{}, nil)
	if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 503 || r.Header.Get("Retry-After") != "1" {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
	if r := b.do("GET", "/readyz", ""); r.StatusCode != 503 {
		t.Fatalf("%d", r.StatusCode)
	}
	if r := b.do("GET", "/v1/models", ""); r.body != `{"object":"list","data":[]}` {
		t.Fatalf("%q", r.body)
	}
	b.node("d1", nodestest.Options{})
	b.g.SetMembers([]nodes.Member{decodeMember("d1")})
	b.until(func() bool { return b.do("GET", "/readyz", "").StatusCode == 200 })
	if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 200 {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
	b.g.SetMembers(nil)
	if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 503 {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
}

// The bundle is asked for again when the fleet's model changes, and a bundle
// without a tokenizer refuses text clearly.
func TestModelChanges(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	next := bundle()
	next.Model, next.Fingerprint = "second", 8
	b.node("d2", nodestest.Options{Bundle: next})
	m := decodeMember("d2")
	m.Fingerprint = 8
	b.g.SetMembers([]nodes.Member{decodeMember("d1"), m})
	time.Sleep(20 * time.Millisecond)
	if name := b.g.native.Models.Load().Name; name != "tiny" {
		t.Fatalf("%s while its node is ready", name)
	}
	b.g.SetMembers([]nodes.Member{m})
	b.until(func() bool { return b.g.native.Models.Load().Name == "second" && b.g.native.Usable() == 1 })
	if r := b.post("/v1/completions", `{"prompt":"x","model":"second"}`); r.StatusCode != 200 {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
	bare := &nodepb.Bundle{Model: "bare", Fingerprint: 9, MaxModelLen: 100}
	b.node("d3", nodestest.Options{Bundle: bare})
	m = decodeMember("d3")
	m.Fingerprint = 9
	b.g.SetMembers([]nodes.Member{m})
	b.until(func() bool { return b.g.native.Models.Load().Name == "bare" && b.g.native.Usable() == 1 })
	for path, body := range map[string]string{"/v1/completions": `{"prompt":"x"}`, "/v1/chat/completions": `{` + hi + `}`} {
		if r := b.post(path, body); r.StatusCode != 400 || !strings.Contains(r.body, "no tokenizer") {
			t.Errorf("%s: %d %q", path, r.StatusCode, r.body)
		}
	}
	a := b.post("/v1/completions", `{"prompt":[5,300],"max_tokens":3,"echo":true}`).parse(t)
	if want := fmt.Sprintf("5 300 %d %d %d ", lore[0], lore[1], lore[2]); a.Choices[0].Text != want {
		t.Errorf("%q, want %q", a.Choices[0].Text, want)
	}
	if r := b.post("/v1/completions", `{"prompt":[5],"stop":"x"}`); r.StatusCode != 400 {
		t.Errorf("%d %q", r.StatusCode, r.body)
	}
}

// A client that goes away is noticed at once, also while nothing is written to
// it, and its attempts end on the node.
func TestClientGoesAway(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{}, one(nodestest.Options{Gate: gate}))
	n := b.nodes["d1"]
	for i, body := range []string{streamed, `{"prompt":"x","n":3}`, streamed} {
		before := n.Cancelled()
		c := b.dial()
		c.send("POST", "/v1/completions", body)
		b.until(func() bool { return n.Running() == 1 })
		if i == 1 { // the other choices follow the first one's token
			gate <- struct{}{}
			b.until(func() bool { return n.Running() == 3 })
		}
		if i == 2 { // in the middle of the stream
			gate <- struct{}{}
			if _, err := http.ReadResponse(c.r, nil); err != nil {
				t.Fatal(err)
			}
		}
		c.Close()
		if err := n.Wait(soon, func() bool { return n.Running() == 0 && n.Cancelled() > before }); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		b.until(func() bool { return b.g.InFlight.Load() == 0 })
	}
	if got := b.g.Meters.Counter(metrics.GatewayStreamsAborted, "client_gone").Get(); got != 3 {
		t.Errorf("%g counted", got)
	}
}

// A client that reads nothing holds a bounded number of tokens, pauses its
// generation, and is given up after the named time.
func TestClientThatNeverReads(t *testing.T) {
	b := newBed(t, Options{StreamTokens: 200, Limits: Limits{SlowClientTimeout: 150 * time.Millisecond}}, one(nodestest.Options{Token: ramble}))
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":99999,"stream":true}`)
	aborted := b.g.Meters.Counter(metrics.GatewayStreamsAborted, "slow_client")
	b.until(func() bool { return b.g.Meters.Counter(metrics.GatewayStreamsPaused).Get() >= 1 || aborted.Get() == 1 })
	if err := b.nodes["d1"].Wait(soon, func() bool { return b.nodes["d1"].Running() == 0 }); err != nil {
		t.Fatal(err)
	}
	b.until(func() bool { return aborted.Get() == 1 })
	raw, _ := io.ReadAll(c.r)
	if strings.Contains(string(raw), "[DONE]") || strings.HasSuffix(string(raw), "0\r\n\r\n") {
		t.Error("the body of a client that was given up ends cleanly")
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
}

// A slow client gets exactly what a fast one gets: pauses do not show.
func TestSlowClientLosesNothing(t *testing.T) {
	const n = 3000
	b := newBed(t, Options{StreamTokens: 200}, one(nodestest.Options{Token: ramble}))
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", fmt.Sprintf(`{"prompt":"x","max_tokens":%d,"stream":true,"stream_options":{"include_usage":true}}`, n))
	b.until(func() bool { return b.g.Meters.Counter(metrics.GatewayStreamsPaused).Get() >= 1 })
	s := c.receive().events(t)
	want := strings.ToValidUTF8(strings.Repeat(lore, n/len(lore)+1)[:n], "\uFFFD")
	if s.text[0] != want || !s.done || s.last.Usage.Completion != n {
		t.Fatalf("%d bytes of %d, done %v, usage %+v, %v; log:\n%s", len(s.text[0]), len(want), s.done, s.last.Usage, s.failure, b.log.String())
	}
	if paused := b.g.Meters.Counter(metrics.GatewayStreamsPaused).Get(); int(paused) != len(b.nodes["d1"].Requests())-1 {
		t.Errorf("%g pauses, and %d attempts", paused, len(b.nodes["d1"].Requests()))
	}
	for i, r := range b.nodes["d1"].Requests() {
		if int(r.Attempt) != i+1 || (i == 0) != (len(r.Output) == 0) {
			t.Fatalf("attempt %d came as %d with %d tokens of output", i+1, r.Attempt, len(r.Output))
		}
	}
}

func TestDeadline(t *testing.T) {
	virtually(t, func(t *testing.T) {
		gate := make(chan struct{})
		b := newBed(t, Options{Limits: Limits{RequestTimeout: 100 * time.Millisecond}}, one(nodestest.Options{Gate: gate}))
		start := time.Now()
		if r := b.post("/v1/completions", streamed); r.StatusCode != 504 || time.Since(start) > soon/2 {
			t.Fatalf("%d %q after %v", r.StatusCode, r.body, time.Since(start))
		}
		b.until(func() bool { return b.nodes["d1"].Running() == 0 })

		// Once it streams; the first token has to be in time.
		b = newBed(t, Options{Limits: Limits{RequestTimeout: 2 * time.Second}}, one(nodestest.Options{Gate: gate}))
		c := b.dial()
		defer c.Close()
		c.send("POST", "/v1/completions", streamed)
		gate <- struct{}{}
		if r := c.receive(); r.err != io.ErrUnexpectedEOF || r.events(t).failure == nil || r.events(t).failure.Error.Code != 504.0 {
			t.Fatalf("%v %q", r.err, r.body)
		}
		b.until(func() bool { return b.nodes["d1"].Running() == 0 })
	})
}

// Draining: unready at once, new connections for a while, what runs to its end.
func TestDrainFinishesWhatRuns(t *testing.T) {
	virtually(t, func(t *testing.T) {
		gate := make(chan struct{})
		b := newBed(t, Options{DrainDelay: 3 * time.Second}, one(nodestest.Options{Gate: gate}))
		c := b.dial()
		defer c.Close()
		c.send("POST", "/v1/completions", streamed)
		gate <- struct{}{}
		b.stop()
		b.until(func() bool { return b.do("GET", "/readyz", "").StatusCode == 503 })
		if r := b.do("GET", "/livez", ""); r.StatusCode != 200 {
			t.Fatalf("%d", r.StatusCode)
		}
		late := b.dial()
		defer late.Close()
		late.send("POST", "/v1/completions", `{"prompt":"late","max_tokens":2}`)
		b.until(func() bool { return b.nodes["d1"].Running() == 2 })
		go feed(gate, 41)
		if s := c.receive().events(t); !s.done {
			t.Fatalf("%+v", s)
		}
		if r := late.receive(); r.StatusCode != 200 {
			t.Fatalf("%d", r.StatusCode)
		}
		if err := <-b.done; err != nil {
			t.Fatal(err)
		}
		b.done = nil
		if _, err := b.net.Dial(t.Context(), "gateway"); err == nil {
			t.Error("still listening")
		}
	})
}

// What is left when the shutdown timeout is over is cut visibly.
func TestDrainCuts(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{ShutdownTimeout: 200 * time.Millisecond}, one(nodestest.Options{Gate: gate}))
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", streamed)
	gate <- struct{}{}
	b.until(func() bool { return b.g.Meters.Counter(metrics.GenerationTokens).Get() == 1 })
	b.stop()
	if r := c.receive(); r.err != io.ErrUnexpectedEOF || r.events(t).failure == nil {
		t.Fatalf("%v %q", r.err, r.body)
	}
	if err := <-b.done; err != nil {
		t.Fatal(err)
	}
	b.done = nil
	if n := b.nodes["d1"].Running(); n != 0 {
		t.Errorf("%d attempts run on", n)
	}
}

func TestLimits(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{Limits: Limits{MaxInFlight: 1}}, one(nodestest.Options{Gate: gate}))
	c := b.dial()
	c.send("POST", "/v1/completions", streamed)
	b.until(func() bool { return b.nodes["d1"].Running() == 1 })
	if r := b.post("/v1/completions", streamed); r.StatusCode != 503 || r.Header.Get("Retry-After") != "1" {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
	if n := b.g.Meters.Counter(metrics.AdmissionRejections, "max_num_queued_reqs").Get(); n != 1 {
		t.Errorf("%g counted as refused", n)
	}
	c.Close()
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
}

// Retries of all requests together have a budget: when it is spent, the first
// failure is the answer.
func TestRetryBudget(t *testing.T) {
	full := nodestest.Options{Refuse: func(*nodepb.Generate) (nodepb.Code, string) { return nodepb.Code_CODE_OVERLOADED, "full" }}
	b := newBed(t, Options{Limits: Limits{RetriesPerSecond: 0.01}}, map[string]nodestest.Options{"d1": full, "d2": full})
	for range 10 {
		if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 503 || r.Header.Get("Retry-After") != "1" {
			t.Fatalf("%d %q", r.StatusCode, r.body)
		}
	}
	if n := len(b.nodes["d1"].Requests()) + len(b.nodes["d2"].Requests()); n != 11 {
		t.Fatalf("%d attempts for 10 requests with a budget of one retry", n)
	}
}

// A fault of the gateway's own costs the one request.
func TestPanicsAreContained(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	sound := b.g.native.Models.Load()
	broken := *sound
	broken.Text = new(render.TextModel)
	b.g.native.Models.Store(&broken)
	if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 500 || r.parse(t).Error.Type != "InternalServerError" {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
	b.g.native.Models.Store(sound)
	if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 200 {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
}

func TestUnknownFieldsAreWarnedAboutOnce(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for range 3 {
		if r := b.post("/v1/completions", `{"prompt":"x","novel_field":1}`); r.StatusCode != 200 {
			t.Fatalf("%d %q", r.StatusCode, r.body)
		}
	}
	if n := strings.Count(b.log.String(), "novel_field"); n != 1 {
		t.Fatalf("%d warnings", n)
	}
}

// Many clients at random: some read, some go, nodes come and go. In the end
// nothing is left anywhere, and every whole answer is right.
func TestRandomClients(t *testing.T) {
	for seed := range uint64(3) {
		b := newBed(t, Options{StreamTokens: 20}, map[string]nodestest.Options{"d1": {}, "d2": {}, "d3": {}})
		var finished atomic.Int64
		ends := make(chan struct{}, 40)
		for i := range 40 {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			c := b.dial()
			c.send("POST", "/v1/completions", fmt.Sprintf(`{"prompt":"p%d","max_tokens":%d,"n":%d,"stream":%v}`, i, 1+r.IntN(100), 1+r.IntN(3), i%2 == 0))
			go func() {
				defer func() { ends <- struct{}{} }()
				defer c.Close()
				if r.IntN(3) == 0 {
					time.Sleep(time.Duration(r.IntN(3)) * time.Millisecond)
					return
				}
				resp, err := http.ReadResponse(c.r, nil)
				if err != nil {
					return
				}
				body, err := io.ReadAll(resp.Body)
				if err != nil || resp.StatusCode != 200 {
					return
				}
				finished.Add(1)
				if i%2 == 0 {
					for n, text := range (reply{resp, string(body), nil}).events(t).text {
						if !strings.HasPrefix(strings.ReplaceAll(lore, "\uFFFD", ""), strings.ReplaceAll(text, "\uFFFD", "")) {
							t.Errorf("seed %d client %d choice %d: %q", seed, i, n, text)
						}
					}
				}
			}()
		}
		b.nodes["d2"].Stop()
		for range 40 {
			<-ends
		}
		b.until(func() bool {
			return b.g.InFlight.Load() == 0 && b.nodes["d1"].Running() == 0 && b.nodes["d3"].Running() == 0
		})
		if finished.Load() < 10 {
			t.Errorf("seed %d: only %d finished", seed, finished.Load())
		}
		b.close()
	}
}
