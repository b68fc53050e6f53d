package gateway

import (
	"bufio"
	"io"
	"strings"
	"testing"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/upstream/upstreamtest"
)

// A request that is framed in two ways, or whose Transfer-Encoding a proxy need not
// know, gets one 400 and the end of its connection: the request hidden in it is not served.
func TestFaultyFraming(t *testing.T) {
	b := newBed(t, Options{}, one(upstreamtest.Options{}))
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
		if answer := string(all); err != nil || strings.Count(answer, requestIDHeader+": ") != 1 || !strings.HasPrefix(answer, "HTTP/1.1 400 ") ||
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

// Each request's head is looked at without an allocation.
func TestFramingCheckDoesNotAllocate(t *testing.T) {
	var h fasthttp.RequestHeader
	if err := h.Read(bufio.NewReader(strings.NewReader("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" +
		"User-Agent: python\r\nAuthorization: Bearer x\r\nContent-Length: 4\r\n\r\n"))); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		if faultyFraming(&h) {
			t.Fatal("a plain request is refused")
		}
	}); n != 0 {
		t.Fatalf("%g allocations", n)
	}
}

func BenchmarkFramingCheck(b *testing.B) {
	var h fasthttp.RequestHeader
	if err := h.Read(bufio.NewReader(strings.NewReader("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" +
		"User-Agent: python\r\nAuthorization: Bearer x\r\nContent-Length: 4\r\n\r\n"))); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		faultyFraming(&h)
	}
}
