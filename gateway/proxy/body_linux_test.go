package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

const soon = time.Minute // on a machine that has other things to do

// newProxy is a proxy of one server of model m, which answers as handler does.
func newProxy(t *testing.T, handler http.HandlerFunc) *Proxy {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"data":[{"id":"m"}]}`)) })
	mux.HandleFunc("/v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { handler(w, r.WithContext(ctx)) })
	server := httptest.NewServer(mux)
	log := slog.New(slog.DiscardHandler)
	s := &exchange.Service{Log: log, Meters: metrics.New(metrics.Gateway, "m"), Cut: context.Background(),
		AppendFault: func(dst []byte, _ string, _ []byte, e *openai.Error) []byte { return e.AppendEvent(dst) }}
	p, err := New(s, Options{Upstreams: upstream.Options{Targets: []upstream.Target{{URL: server.URL}}, Log: log}, Pollers: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); p.Close(); server.Close() })
	for until := time.Now().Add(soon); p.Pool.Now().Up() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the server does not come up")
		}
	}
	return p
}

// ask is a chat request's body.
func ask(stream bool, text string) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":%q}]}`, stream, text)
}

// event writes events, each flushed.
func event(w http.ResponseWriter, texts ...string) {
	for _, t := range texts {
		_, _ = io.WriteString(w, t)
		w.(http.Flusher).Flush()
	}
}

// chunkEvent is an event with a piece of text.
func chunkEvent(text string) string {
	return fmt.Sprintf("data: {\"id\":\"x\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":%q}}]}\n\n", text)
}

// pumped is the body of a request at s1 whose client has a socket of its own, as it
// is once the answer's head has left; far is the client's end.
func pumped(t *testing.T, p *Proxy, path string) (rb *relayBody, far net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if far, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	near, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close(); near.Close() })
	client := httpserver.New(l, httpserver.Options{Log: p.Log}).Admit(near)
	if client.Raw == nil {
		t.Fatal("no socket below a TCP connection")
	}
	s := p.Pool.Now().Servers[0]
	call, err := s.Open(t.Context(), time.Now().Add(soon), false)
	if err != nil {
		t.Fatal(err)
	}
	body := ask(true, "x")
	if err := call.Send(fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", path, len(body)), []byte(body), time.Now().Add(soon), false); err != nil {
		t.Fatal(err)
	}
	if err := call.Head(); err != nil {
		t.Fatal(err)
	}
	ctx := new(fasthttp.RequestCtx)
	ctx.Init2(client, nil, false)
	r := &relay{Exchange: exchange.Exchange{S: p.Service, Path: path, Start: time.Now(), Deadline: time.Now().Add(time.Hour), Ctx: ctx}, p: p, server: s, call: call, events: true, untilDeadline: true}
	return &relayBody{r: r, done: r.completes(), begun: true}, far
}

// An answer that breaks off behind events that have left counts them once.
func TestPumpedEventsCountOnce(t *testing.T) {
	leave := make(chan struct{})
	relayer := newProxy(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, chunkEvent("one "), chunkEvent("two "), `data: {"choices":[{"index":0,"delta":{"content":"three"},"finish_reason":"length"}]}`+"\n\n")
		<-leave
		if c, _, err := w.(http.Hijacker).Hijack(); err == nil {
			c.Close()
		}
	})
	rb, far := pumped(t, relayer, "/v1/chat/completions")
	go func() {
		defer close(leave)
		var got []byte
		for p := make([]byte, 1000); !bytes.Contains(got, []byte("three")); {
			n, err := far.Read(p)
			if got = append(got, p[:n]...); err != nil {
				t.Errorf("%q: %v", got, err)
				return
			}
		}
	}()
	var last []byte
	p, err := make([]byte, 4096), error(nil)
	for n := 0; err == nil; {
		n, err = rb.Read(p)
		last = append(last, p[:n]...)
	}
	if err != exchange.ErrCut || !bytes.Contains(last, []byte("broke off")) || bytes.Contains(last, []byte("three")) {
		t.Errorf("%q, %v", last, err)
	}
	if n := relayer.Meters.Counter(metrics.GenerationTokens).Get(); n != 3 || rb.r.nEvents != 3 || rb.r.outcome.lengths != 1 {
		t.Errorf("%g tokens, %d events and %d ends were counted", n, rb.r.nEvents, rb.r.outcome.lengths)
	}
}

// From a server's connection to the bytes that leave, an event allocates nothing.
func TestRelayedEventDoesNotAllocate(t *testing.T) {
	const nEvents = 6000
	relayer := newProxy(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, strings.Repeat(chunkEvent("token"), nEvents))
		<-r.Context().Done()
	})
	s := relayer.Pool.Now().Servers[0]
	call, err := s.Open(t.Context(), time.Now().Add(soon), false)
	if err != nil {
		t.Fatal(err)
	}
	body := ask(true, "x")
	if err := call.Send(fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", len(body)), []byte(body), time.Now().Add(soon), false); err != nil {
		t.Fatal(err)
	}
	if err := call.Head(); err != nil {
		t.Fatal(err)
	}
	r := &relay{Exchange: exchange.Exchange{S: relayer.Service, Start: time.Now(), Ctx: new(fasthttp.RequestCtx)}, p: relayer, call: call, events: true, untilDeadline: true}
	rb := &relayBody{r: r, done: true, buf: make([]byte, 0, 2*maxEvent)}
	p, n := make([]byte, 200), 0
	if allocs := testing.AllocsPerRun(1000, func() {
		k, err := rb.Read(p)
		if n += k; err != nil {
			t.Fatal(err)
		}
	}); allocs != 0 || n < 1000 {
		t.Fatalf("%g allocations an event; %d bytes", allocs, n)
	}
	call.Close(upstream.ErrNoVerdict)
}
