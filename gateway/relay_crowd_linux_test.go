package gateway

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// onSockets is a gateway in front of one stranger with sockets on both sides, where
// streams wait in a crowd.
func onSockets(t *testing.T) *relayed { return onSocketsWith(t, Options{}) }

// onSocketsWith is onSockets with options.
func onSocketsWith(t testing.TB, o Options) *relayed {
	t.Helper()
	r := &relayed{far: strangers(t, rpc.NewNetwork(), "s1")}
	var ls [2]net.Listener
	for i := range ls {
		var err error
		if ls[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	go func() { _ = r.far["s1"].server.Serve(ls[0]) }()
	o.Listener = ls[1]
	o.Upstreams.Targets = []upstream.Target{{URL: "http://" + ls[0].Addr().String()}}
	r.bed = newBedOn(t, rpc.NewNetwork(), o, nil)
	r.until(func() bool { return r.g.proxy.Pool.Now().Up() == 1 && r.g.proxy.Pool.Now().Unknown == 0 })
	return r
}

// connect is a client with a socket.
func (r *relayed) connect() *client {
	r.Helper()
	c, err := net.Dial("tcp", r.g.Addr())
	if err != nil {
		r.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(4 * soon)); err != nil {
		r.Fatal(err)
	}
	return &client{bed: r.bed, Conn: c, r: bufio.NewReader(c)}
}

// Streams over sockets, each with events of its own: those that end have all of theirs, one
// after the other on a connection; those that break off are aborted behind an error event;
// where the client goes, so does the request; and nobody waits any more in the end.
func TestStreamsInACrowd(t *testing.T) {
	b := onSockets(t)
	s := b.far["s1"]
	s.does(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		id := r.Header.Get("X-Stream")
		for i := range 30 {
			event(w, chunkEvent(fmt.Sprintf("%s.%d ", id, i)))
			if i%7 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		switch id[0] {
		case 'b':
			breaks(w)
		case 'l': // its client leaves
			<-r.Context().Done()
		default:
			event(w, "data: [DONE]\n\n")
		}
	})
	var wg sync.WaitGroup
	for i := range 24 {
		c := b.connect()
		kind := "wwbl"[i%4]
		wg.Go(func() {
			defer c.Close()
			for turn := range 3 {
				id := fmt.Sprintf("%c%d.%d", kind, i, turn)
				want := ""
				for i := range 30 {
					want += fmt.Sprintf("%s.%d ", id, i)
				}
				c.send("POST", "/v1/chat/completions", ask(true, id), "X-Stream: "+id)
				if kind == 'l' {
					for got := ""; !strings.Contains(got, id+".29 "); {
						line, err := c.r.ReadString('\n')
						if got += line; err != nil {
							t.Errorf("%s: %q, %v", id, got, err)
							return
						}
					}
					return
				}
				r := c.receive()
				told := r.events(t)
				if told.text[0] != want || told.done != (kind == 'w') || (told.failure != nil) != (kind == 'b') || (r.err == nil) != (kind == 'w') {
					t.Errorf("%s: %q, %v", id, r.body, r.err)
				}
				if kind == 'b' {
					return
				}
			}
		})
	}
	wg.Wait()
	b.until(func() bool { return s.running.Load() == 0 && b.g.InFlight.Load() == 0 && b.g.proxy.Polled() == 0 })
}

// While no event comes, a client that goes, a server that falls silent and is found dead, and
// the gateway's end are all seen by streams in a crowd; of the latter two the client is told.
func TestCrowdWhileNothingComes(t *testing.T) {
	for what, end := range map[string]func(b *relayed, c *client){
		"the client goes": func(_ *relayed, c *client) { c.Close() },
		"its half does":   func(_ *relayed, c *client) { _ = c.Conn.(*net.TCPConn).CloseWrite() },
		"the server ends": func(b *relayed, _ *client) { b.far["s1"].kill() },
		"it is aborted": func(b *relayed, _ *client) {
			b.g.proxy.Pool.AbortAll()
		},
		"all are closed": func(b *relayed, _ *client) { b.g.http.CloseAll() },
	} {
		t.Run(what, func(t *testing.T) {
			b := onSockets(t)
			var gone atomic.Int64
			b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				event(w, chunkEvent("one "))
				<-r.Context().Done()
				gone.Add(1)
			})
			c := b.connect()
			defer c.Close()
			c.send("POST", "/v1/chat/completions", ask(true, "x"))
			b.until(func() bool { return b.g.proxy.Polled() == 1 })
			end(b, c)
			b.until(func() bool { return gone.Load() == 1 && b.g.InFlight.Load() == 0 && b.g.proxy.Polled() == 0 })
			if what == "the server ends" || what == "it is aborted" {
				if r := c.receive(); r.err == nil || r.events(t).failure == nil {
					t.Errorf("%q, %v", r.body, r.err)
				}
			}
		})
	}
}

// A client that reads nothing keeps only its own stream waiting: its stay ends, others go on,
// and when it reads it has all of it.
func TestSlowReaderInACrowd(t *testing.T) {
	b := onSockets(t)
	const nEvents = 200
	text := strings.Repeat("x", 50<<10) // all of them are more than the sockets hold
	b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Stream") != "large" {
			streams(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range nEvents {
			event(w, chunkEvent(text))
		}
		event(w, "data: [DONE]\n\n")
	})
	slow := b.connect()
	defer slow.Close()
	if err := slow.Conn.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	slow.send("POST", "/v1/chat/completions", ask(true, "x"), "X-Stream: large")
	b.until(func() bool { return b.g.Meters.Counter(metrics.GenerationTokens).Get() > 0 && b.g.proxy.Polled() == 0 })
	quick := b.connect()
	defer quick.Close()
	for range 3 {
		quick.send("POST", "/v1/chat/completions", ask(true, "x"), "X-Stream: small")
		if r := quick.receive(); r.err != nil || !r.events(t).done {
			t.Fatal(r.body, r.err)
		}
	}
	if n := b.g.InFlight.Load(); n != 1 {
		t.Errorf("%d requests are in hand, want the slow one", n)
	}
	r := slow.receive()
	if n := strings.Count(r.body, text); r.err != nil || n != nEvents || !strings.HasSuffix(r.body, "data: [DONE]\n\n") {
		t.Errorf("%d events, %v", n, r.err)
	}
}
