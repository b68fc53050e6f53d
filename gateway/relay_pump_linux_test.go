package gateway

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/exchange"
)

// pumped is the body of a request at s1 whose client has a socket of its own, as it
// is once the answer's head has left; far is the client's end.
func pumped(t *testing.T, b *relayed, path string) (rb *relayBody, far net.Conn) {
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
	client := b.g.http.Admit(near)
	if client.Raw == nil {
		t.Fatal("no socket below a TCP connection")
	}
	s := b.g.foreign.Now().Servers[0]
	call, err := s.Open(t.Context(), time.Now().Add(soon), false)
	if err != nil {
		t.Fatal(err)
	}
	body := ask(true, "x")
	if err := call.Send(fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", path, len(body)), []byte(body), time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	if err := call.Head(); err != nil {
		t.Fatal(err)
	}
	ctx := new(fasthttp.RequestCtx)
	ctx.Init2(client, nil, false)
	r := &relay{Exchange: exchange.Exchange{S: b.g.Service, Path: path, Start: time.Now(), Deadline: time.Now().Add(time.Hour), Ctx: ctx}, g: b.g, server: s, call: call, events: true, patient: true}
	return &relayBody{r: r, done: r.completes(), begun: true}, far
}

// An answer that breaks off behind events that have left counts them once.
func TestPumpedEventsCountOnce(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	leave := make(chan struct{})
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, chunkEvent("one "), chunkEvent("two "), `data: {"choices":[{"index":0,"delta":{"content":"three"},"finish_reason":"length"}]}`+"\n\n")
		<-leave
		breaks(w)
	})
	rb, far := pumped(t, b, "/v1/chat/completions")
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
	if n := b.g.Meters.Tokens.Get(); n != 3 || rb.r.nEvents != 3 || rb.r.told.lengths != 1 {
		t.Errorf("%g tokens, %d events and %d ends were counted", n, rb.r.nEvents, rb.r.told.lengths)
	}
}
