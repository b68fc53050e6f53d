package gateway

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// quiet is the silence of these tests after which a stream gets a comment.
const quiet = 40 * time.Millisecond

// wantComments checks that a stream has comments, each of them between two events, and otherwise the
// events.
func wantComments(t *testing.T, r reply, events string) {
	t.Helper()
	if n := strings.Count(r.body, exchange.KeepAlive); r.StatusCode != 200 || r.err != nil || n < 2 || n > 100 {
		t.Errorf("%d, %d comments, %v in %q", r.StatusCode, n, r.err, r.body)
	}
	for before := range strings.SplitSeq(r.body, exchange.KeepAlive) {
		if before != "" && !strings.HasSuffix(before, "\n\n") {
			t.Errorf("a comment is within an event: %q", r.body)
		}
	}
	if got := strings.ReplaceAll(r.body, exchange.KeepAlive, ""); events != "" && got != events {
		t.Errorf("without comments it is %q, want %q", got, events)
	}
	if first := strings.Index(r.body, exchange.KeepAlive); first == 0 {
		t.Errorf("the first event is a comment: %q", r.body)
	}
}

// A stream of an own node gets comments after silence: over a plain socket, where they are chunks of
// their own, over TLS, in HTTP/1.0 and over a connection without a socket. Its answer is counted
// without them.
func TestKeepAliveOfNodes(t *testing.T) {
	for name, conf := range map[string]*tls.Config{"memory": nil, "tcp": nil, "http/1.0": nil, "tls": {Certificates: []tls.Certificate{selfSigned(t)}}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := Options{TLS: conf}
			o.Limits.SSEKeepAlive = quiet
			if name != "memory" {
				var err error
				if o.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
					t.Fatal(err)
				}
			}
			gate := make(chan struct{})
			b := newBed(t, o, one(nodestest.Options{Gate: gate}))
			c := b.dialAny(t, o.Listener != nil, conf)
			defer c.Close()
			go func() {
				gate <- struct{}{}
				time.Sleep(10 * quiet)
				feed(gate, 2)
			}()
			const body = `{"prompt":"x","max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`
			if name == "http/1.0" {
				fmt.Fprintf(c, "POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			} else {
				c.send("POST", "/v1/completions", body)
			}
			r := c.receive()
			wantComments(t, r, "")
			r.body = strings.ReplaceAll(r.body, exchange.KeepAlive, "")
			if s := r.events(t); !s.done || s.text[0] != "Hel" || s.last.Usage.Completion != 3 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Streams of upstreams get comments, too, never within an event that has arrived in parts.
func TestKeepAliveOfUpstreams(t *testing.T) {
	one, two := chunkEvent("one "), chunkEvent("two ")
	for name, make := range map[string]func(*testing.T, Options) *relayed{
		"memory": func(t *testing.T, o Options) *relayed { return newRelayed(t, o, "s1") },
		"tcp":    func(t *testing.T, o Options) *relayed { return onSocketsWith(t, o) },
		"tls": func(t *testing.T, o Options) *relayed {
			o.TLS = &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}}
			return onSocketsWith(t, o)
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{}
			o.Limits.SSEKeepAlive = quiet
			b := make(t, o)
			b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				for _, part := range []string{one, two[:9], two[9:], "data: [DONE]\n\n"} {
					event(w, part)
					time.Sleep(2 * quiet)
				}
			})
			for range 2 { // the connections to the upstream are used again
				c := b.dialAny(t, name != "memory", map[bool]*tls.Config{true: {}}[name == "tls"])
				c.send("POST", "/v1/chat/completions", ask(true, "hello"), "Connection: close")
				wantComments(t, c.receive(), one+two+"data: [DONE]\n\n")
				c.Close()
			}
		})
	}
}

// Without the limit there are no comments, and answers that are no streams of events have none.
func TestNoKeepAlive(t *testing.T) {
	for name, after := range map[string]time.Duration{"off": -1, "no events": quiet} {
		o := Options{}
		o.Limits.SSEKeepAlive = after
		b := newRelayed(t, o, "s1")
		b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
			if name == "off" {
				w.Header().Set("Content-Type", "text/event-stream")
			}
			event(w, chunkEvent("one "))
			time.Sleep(3 * quiet)
			event(w, "data: [DONE]\n\n")
		})
		if r := b.post("/v1/chat/completions", ask(true, "hello")); r.body != chunkEvent("one ")+"data: [DONE]\n\n" {
			t.Errorf("%s: %q", name, r.body)
		}
	}
}

// Silent streams cost no goroutine for their comments.
func TestKeepAliveGoroutines(t *testing.T) {
	const streams = 50
	counts := map[time.Duration]int{}
	for _, after := range []time.Duration{-1, quiet} {
		o := Options{}
		o.Limits.SSEKeepAlive = after
		b := onSocketsWith(t, o)
		b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			event(w, chunkEvent("one "))
			never(w, r)
		})
		before := runtime.NumGoroutine()
		var all []*client
		for range streams {
			c := b.connect()
			c.send("POST", "/v1/chat/completions", ask(true, "hello"))
			if _, err := c.r.ReadString('}'); err != nil {
				t.Fatal(err)
			}
			all = append(all, c)
		}
		time.Sleep(3 * quiet)
		counts[after] = runtime.NumGoroutine() - before
		for _, c := range all {
			c.Close()
		}
		b.until(func() bool { return b.g.InFlight.Load() == 0 })
	}
	if n, without := counts[quiet], counts[-1]; n > without+streams/4 {
		t.Errorf("%d goroutines with comments, %d without", n, without)
	}
}

// dialAny is a connection to the gateway, over a socket or in memory.
func (b *bed) dialAny(t *testing.T, socket bool, conf *tls.Config) *client {
	t.Helper()
	if !socket {
		return b.dial()
	}
	nc, err := net.Dial("tcp", b.g.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.SetDeadline(time.Now().Add(2 * soon)); err != nil {
		t.Fatal(err)
	}
	if conf != nil {
		nc = tls.Client(nc, &tls.Config{InsecureSkipVerify: true})
	}
	return &client{bed: b, Conn: nc, r: bufio.NewReader(nc)}
}

// What 1,000 silent streams cost for each --sse-keep-alive: processor time, memory and goroutines.
// Clients and servers are in the process, so that figures without comments are the base.
func BenchmarkSilentStreams(b *testing.B) {
	for _, kind := range []string{"nodes", "upstreams"} {
		for name, after := range map[string]time.Duration{"off": -1, "10s": 10 * time.Second, "1s": time.Second} {
			b.Run(kind+"/"+name, func(b *testing.B) { measureSilence(b, kind == "nodes", after) })
		}
	}
}

// measureSilence measures streams that have begun and wait, over sockets.
func measureSilence(b *testing.B, native bool, after time.Duration) {
	const streams, window = 1000, 20 * time.Second
	o, silent := Options{}, make(chan struct{})
	o.Limits.SSEKeepAlive = after
	var bed *bed
	path, body := "/v1/chat/completions", ask(true, "hello")
	if native {
		var err error
		if o.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			b.Fatal(err)
		}
		path, body = "/v1/completions", `{"prompt":"x","max_tokens":9,"stream":true}`
		bed = newBed(b, o, one(nodestest.Options{MaxRunning: 2 * streams, Token: func(r *nodepb.Generate, position int) int32 {
			if position > len(r.Prompt) {
				<-silent
			}
			return 'x'
		}}))
	} else {
		r := onSocketsWith(b, o)
		r.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			event(w, chunkEvent("one "))
			<-silent
		})
		bed = r.bed
	}
	memory := func() (heap, stacks uint64) {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, m.StackInuse
	}
	heap, stacks := memory()
	goroutines := runtime.NumGoroutine()
	var all []net.Conn
	p := make([]byte, 4096)
	for range streams {
		c, err := net.Dial("tcp", bed.g.Addr())
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
		if n, err := c.Read(p); err != nil || !strings.HasPrefix(string(p[:n]), "HTTP/1.1 200 ") {
			b.Fatalf("%v %s", err, p[:n])
		}
		all = append(all, c)
	}
	grown, grownStacks := memory()
	used := func() time.Duration {
		var r syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
			b.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	cpu, began := used(), time.Now()
	for b.Loop() {
		time.Sleep(window)
	}
	cpu = used() - cpu
	b.ReportMetric(float64(cpu.Microseconds())/time.Since(began).Seconds(), "cpu-µs/s")
	b.ReportMetric(float64(grown-heap)/streams, "heap-B/stream")
	b.ReportMetric(float64(grownStacks-stacks)/streams, "stack-B/stream")
	b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/streams, "goroutines/stream")
	close(silent)
	for _, c := range all {
		c.Close()
	}
	bed.until(func() bool { return bed.g.InFlight.Load() == 0 })
}
