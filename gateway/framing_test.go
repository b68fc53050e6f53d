package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// A request that is framed in two ways, or whose Transfer-Encoding a proxy need not
// know, gets one 400 and the end of its connection: the request hidden in it is not served.
func TestFaultyFraming(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	const hidden = "GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
	const chunked = "Transfer-Encoding: chunked\r\n"
	for name, request := range map[string]string{
		"length first":         "POST /nope HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n" + chunked + "\r\n0\r\n\r\n" + hidden,
		"encoding first":       "POST /nope HTTP/1.1\r\nHost: t\r\n" + chunked + "Content-Length: 4\r\n\r\n0\r\n\r\n" + hidden,
		"other case":           "POST /nope HTTP/1.1\r\nHost: t\r\ntransfer-ENCODING: chunked\r\ncontent-LENGTH: 4\r\n\r\n0\r\n\r\n" + hidden,
		"expecting":            "POST /nope HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n" + chunked + "Content-Length: 4\r\n\r\n0\r\n\r\n" + hidden,
		"body to come":         "POST /nope HTTP/1.1\r\nHost: t\r\n" + chunked + "Content-Length: 400000\r\n\r\n",
		"identity":             "POST /nope HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: identity\r\n\r\n" + hidden,
		"identity with length": "POST /nope HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n" + hidden,
		"HTTP/1.0":             "POST /nope HTTP/1.0\r\nHost: t\r\nConnection: keep-alive\r\n" + chunked + "\r\n0\r\n\r\n" + hidden,
		"keeping":              "POST /nope HTTP/1.1\r\nHost: t\r\nConnection: keep-alive\r\nContent-Length: 4\r\n" + chunked + "\r\n0\r\n\r\n" + hidden,
	} {
		c := b.dial()
		if _, err := io.WriteString(c, request); err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(c.r)
		c.Close()
		if answer := string(all); err != nil || strings.Count(answer, exchange.RequestIDHeader+": ") != 1 || !strings.HasPrefix(answer, "HTTP/1.1 400 ") ||
			!strings.Contains(answer, "Transfer-Encoding") || !strings.Contains(answer, "Connection: close\r\n") {
			t.Errorf("%s: %q, %v", name, answer, err)
		}
	}
	c := b.dial()
	defer c.Close()
	for range 2 { // the only header that says where the body ends
		const body = `{"prompt":"x","max_tokens":1}`
		if _, err := io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\n"+chunked+"\r\n1d\r\n"+body+"\r\n0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if r := c.receive(); r.StatusCode != 200 || r.err != nil {
			t.Fatalf("chunked: %d %s %v", r.StatusCode, r.body, r.err)
		}
	}
}

// Versions, header names and expectations that the server's parser lets through get their
// status and the end of the connection. Minor versions above 1 are served as HTTP/1.1.
func TestRefusedHeads(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	const hidden = "GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
	const body = `{"prompt":"x","max_tokens":1}`
	for name, c := range map[string]struct{ request, want, says string }{
		"HTTP/2.0":               {"GET /livez HTTP/2.0\r\nHost: t\r\n\r\n", "505", "HTTP/1.1"},
		"HTTP/2's preface":       {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "505", "HTTP/1.1"},
		"HTTP/0.9":               {"GET /livez HTTP/0.9\r\nHost: t\r\n\r\n", "505", "HTTP/1.1"},
		"HTTP/1.9 without Host":  {"GET /livez HTTP/1.9\r\n\r\n", "400", "Host"},
		"unknown expectation":    {"POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 200-ok\r\nContent-Length: 29\r\n\r\n" + body, "417", "100-continue"},
		"one of two unknown":     {"POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nExpect: 200-ok\r\nContent-Length: 29\r\n\r\n" + body, "417", "100-continue"},
		"the gateway's own mark": {"POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nExpect: loan\r\nContent-Length: 29\r\n\r\n" + body, "417", "100-continue"},
		"a space in a name":      {"GET /livez HTTP/1.1\r\nHost: t\r\nFoo Bar: x\r\n\r\n", "400", "space"},
		"a space at its end":     {"GET /livez HTTP/1.1\r\nHost: t\r\nFoo : x\r\n\r\n", "400", "invalid header key"},
		"a hidden length":        {"POST /nope HTTP/1.1\r\nHost: t\r\nContent Length: 9\r\n\r\n", "400", "space"},
	} {
		conn := b.dial()
		if _, err := io.WriteString(conn, c.request+hidden); err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(conn.r)
		conn.Close()
		if answer := string(all); err != nil || strings.Count(answer, exchange.RequestIDHeader+": ") != 1 || !strings.HasPrefix(answer, "HTTP/1.1 "+c.want+" ") ||
			!strings.Contains(answer, c.says) || !strings.Contains(answer, "Connection: close\r\n") {
			t.Errorf("%s: %q, %v; want %s", name, answer, err, c.want)
		}
	}
	for name, request := range map[string]string{
		"HTTP/1.9":                     "POST /v1/completions HTTP/1.9\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1d\r\n" + body + "\r\n0\r\n\r\n",
		"expectation in HTTP/1.0":      "POST /v1/completions HTTP/1.0\r\nExpect: 200-ok\r\nContent-Length: 29\r\n\r\n" + body,
		"expectation in capitals":      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nExpect: 100-CONTINUE\r\nContent-Length: 29\r\n\r\n" + body,
		"colons and spaces in a value": "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nX: a b: c\r\n d e: f\r\nContent-Length: 29\r\n\r\n" + body,
	} {
		conn := b.dial()
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(conn.r)
		conn.Close()
		if answer := strings.TrimPrefix(string(all), "HTTP/1.1 100 Continue\r\n\r\n"); err != nil || !strings.HasPrefix(answer, "HTTP/1.1 200 ") || !strings.Contains(answer, `"text"`) {
			t.Errorf("%s: %q, %v", name, all, err)
		}
	}
}

// A client that closes its side in the middle of a head or a body is no fault of the
// gateway's: no status of 5xx is answered or counted.
func TestBrokenOffRequests(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for name, request := range map[string]string{
		"head":          "POST /v1/completions HTTP/1.1\r\nHos",
		"after a line":  "POST /v1/completions HTTP/1.1\r\nHost: t\r\n",
		"body":          "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 29\r\n\r\n{",
		"large body":    "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 29000\r\n\r\n{",
		"chunk":         "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1d\r\n{",
		"body to come":  "POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 29\r\n\r\n",
		"head as ended": "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 29\r\n",
	} {
		conn := b.dial()
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		half, ok := conn.Conn.(interface{ CloseWrite() error })
		if !ok {
			t.Fatalf("%T has no CloseWrite", conn.Conn)
		}
		if err := half.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(conn.r)
		conn.Close()
		if answer := strings.TrimPrefix(string(all), "HTTP/1.1 100 Continue\r\n\r\n"); err != nil || !strings.HasPrefix(answer, "HTTP/1.1 400 ") || !strings.Contains(answer, "Connection: close\r\n") {
			t.Errorf("%s: %q, %v", name, all, err)
		}
	}
}

// A client of HTTP/1.0 gets a streamed answer without chunks; its end is the connection's.
// Answers whose length is known keep the connection where the client asks for that.
func TestHTTP10(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	r := newRelayed(t, Options{}, "s1")
	for name, c := range map[string]struct {
		on         *bed
		path, body string
		want       []string
	}{
		"node":     {b, "/v1/completions", `{"prompt":"x","max_tokens":3,"stream":true}`, []string{`"text":"H"`, "data: [DONE]\n\n"}},
		"upstream": {r.bed, "/v1/chat/completions", ask(true, "x"), []string{`"content":"one "`, `"content":"three"`, "data: [DONE]\n\n"}},
	} {
		conn := c.on.dial()
		if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n%s", c.path, len(c.body), c.body); err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(conn.r)
		conn.Close()
		head, body, _ := strings.Cut(string(all), "\r\n\r\n")
		if err != nil || !strings.HasPrefix(head, "HTTP/1.1 200 ") || strings.Contains(head, "chunked") || strings.Contains(head, "Content-Length") ||
			!strings.Contains(head, "Connection: close") || !strings.HasPrefix(body, "data: ") || strings.Contains(body, "\r\n") {
			t.Errorf("%s: %q %v", name, all, err)
		}
		for _, want := range c.want {
			if body = strings.Replace(body, want, "", 1); strings.Contains(body, want) {
				t.Errorf("%s: %q is there twice, or not at all", name, want)
			}
		}
	}
	conn := b.dial()
	defer conn.Close()
	for range 2 {
		if _, err := io.WriteString(conn, "GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if got := conn.receive(); got.StatusCode != 200 || got.err != nil || !strings.Contains(got.body, "tiny") {
			t.Fatalf("kept: %d %q %v", got.StatusCode, got.body, got.err)
		}
	}
}

// A slash at the end is no part of a route; where the path ends in a name it is the name's.
func TestPathsOfRoutes(t *testing.T) {
	b := newBed(t, Options{Upstreams: Upstreams{Options: upstream.Options{Names: map[string]string{"org/m": "tiny", "end/": "tiny", "a//b": "tiny", "x/../y": "tiny"}}}}, one(nodestest.Options{}))
	c := b.dial()
	defer c.Close()
	for path, want := range map[string]int{
		"/v1/models/": 200, "/health/": 200, "/version/?x=y": 200, "/health//": 200, "/%68ealth/": 200, "/v1/completions/": 405, "/nope/": 404,
		"/v1/models/org%2fm": 200, "/v1/models/org%2Fm": 200, "/v1/models/org/m": 200, "/v1/models/o%72g/m": 200, "/v1/models/org%252fm": 404,
		"/v1/models/org/m/": 404, "/v1/models/org%2fm%2f": 404, "/v1/models/end/": 200, "/v1/models/end%2f": 200, "/v1/models/end": 404,
		"/v1/models/a//b": 200, "/v1/models/a%2f%2fb": 200, "/v1/models/a/b": 404, "/v1/models/x%2f..%2fy": 200, "/v1/models/y": 404,
		"/v1/models/../models": 200, "/v1/models/..": 404, "/v1/models/%2e%2e/models/org%2fm": 200,
	} {
		c.send("GET", path, "")
		r := c.receive()
		if r.StatusCode != want || r.err != nil || r.Header.Get("Location") != "" {
			t.Errorf("GET %s: %d %q %v, want %d", path, r.StatusCode, r.body, r.err, want)
		}
	}
}

// What is relayed has the path as it came, but never one that means another path here.
func TestRelayedPaths(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	b.far["s1"].does(whole)
	c := b.dial()
	defer c.Close()
	for path, want := range map[string]string{ // empty: 404
		"/v1/x%2fy": "/v1/x%2fy", "/v1/x%2Fy": "/v1/x%2Fy", "/v1/x/y": "/v1/x/y", "/v1/x%2fy?q=%2f": "/v1/x%2fy?q=%2f", "/v1/x/": "/v1/x/", "/v1/x%2f": "/v1/x%2f",
		"/v1/%65mbeddings": "/v1/%65mbeddings", "/v1/chat/completions/": "/v1/chat/completions", "/v1/chat%2fcompletions": "/v1/chat%2fcompletions", "/score/": "/score", "/classify/": "/classify/",
		"/v1/a/../b": "/v1/b", "//v1//x": "/v1/x", "/v1/a/..%2fb": "/v1/b", "/v1/../admin": "", "/v1/..%2fadmin": "", "/v1/x%252fy": "", "/v1/%zz": "",
		"/v1/models/x%2f..%2fy": "", "/v1/models/x%2fy": "/v1/models/x%2fy", "/v1/load_lora_adapter/": "", "/v1/load_lora_adapter%2f": "",
	} {
		before := len(b.far["s1"].requests())
		c.send("POST", path, ask(false, "x"))
		r := c.receive()
		all := b.far["s1"].requests()[before:]
		switch {
		case want == "" && (len(all) > 0 || r.StatusCode == 200):
			t.Errorf("POST %s: %d, %d reached the upstream", path, r.StatusCode, len(all))
		case want != "" && (len(all) != 1 || all[0].path != want || r.StatusCode != 200):
			t.Errorf("POST %s: %d, got %v, want %s", path, r.StatusCode, all, want)
		}
	}
}

// A malformed answer of an upstream is a 502 of which nothing is passed on, and its
// connection is closed.
func TestRelayedMalformedAnswers(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	c := b.dial()
	defer c.Close()
	for _, head := range []string{
		"HTTP/1.1 200 OK\r\nX-Secret: s\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX-Secret: s\r\nTransfer-Encoding : chunked\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX-Secret: s\r\n folded\r\nContent-Length: 6\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX-Secret: s\x00\r\nContent-Length: 6\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX-Secret: s\r\nContent-Length: +6\r\n\r\n",
		"HTTP/1.1 999 OK\r\nX-Secret: s\r\nContent-Length: 6\r\n\r\n",
	} {
		var closed atomic.Bool
		b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
			conn, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, head+"secret")
			_, err = rw.ReadByte()
			closed.Store(err != nil)
		})
		c.send("POST", "/v1/chat/completions", ask(false, "x"))
		r := c.receive()
		if r.StatusCode != 502 || r.err != nil || r.Header.Get("X-Secret") != "" || !strings.Contains(r.body, "malformed answer") || strings.Contains(r.body, "secret\"") {
			t.Errorf("%q: %d %q %v", head, r.StatusCode, r.body, r.err)
		}
		b.until(closed.Load)
		b.far["s1"].does(whole) // closes the breaker again
		b.until(func() bool {
			c.send("POST", "/v1/chat/completions", ask(false, "x"))
			return c.receive().StatusCode == 200
		})
	}
}
