package gateway

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// A server that hangs keeps nothing that it was asked, neither before its probes
// became late nor from then until it counts as down: all of it is answered by
// another within twice the stall timeout.
func TestRelayHangsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own ticker
		const stall = 10 * time.Second
		b := newRelayed(t, Options{StallTimeout: stall, Policy: "round_robin", Limits: Limits{RetriesPerSecond: 1e6}}, "s1", "s2")
		for _, s := range b.far {
			s.does(func(w http.ResponseWriter, r *http.Request) { time.Sleep(time.Second); streams(w, r) })
		}
		var asked sync.WaitGroup
		one := func() {
			c := b.dial()
			defer c.Close()
			began := time.Now()
			c.send("POST", "/v1/chat/completions", ask(true, "x"))
			r := c.receive()
			if took := time.Since(began); r.err != nil || r.StatusCode != 200 || took > 2*stall+8*time.Second { // and probes
				t.Errorf("%d after %v: %q %v", r.StatusCode, took, r.body, r.err)
			}
		}
		for range 128 { // their connections are kept, and hang later
			asked.Go(one)
		}
		asked.Wait()
		b.net.Silence("s1:80", true)
		for b.g.proxy.Pool.Now().Up() == 2 {
			asked.Go(one)
			time.Sleep(200 * time.Millisecond)
		}
		asked.Wait()
		b.net.Silence("s1:80", false)
		back := time.Now()
		b.until(func() bool { return b.g.proxy.Pool.Now().Up() == 2 })
		if took := time.Since(back); took > 3*time.Second { // the probe under way may be late, too
			t.Errorf("up again %v after it can answer", took)
		}
		b.stop()
		synctest.Wait()
	})
}

// A restarted server serves again within 2 s of being ready.
func TestRelayBackInService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) })
		b := newRelayed(t, Options{Policy: "round_robin"}, "s1", "s2")
		for _, s := range b.far {
			s.does(whole)
		}
		for _, away := range []time.Duration{100 * time.Millisecond, 5 * time.Second, time.Minute} {
			b.far["s1"].kill()
			for end := time.Now().Add(away); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				if r := b.post("/v1/chat/completions", ask(false, "x")); r.StatusCode != 200 {
					t.Fatal(r.StatusCode, r.body)
				}
			}
			had := len(b.far["s1"].requests())
			b.far["s1"].start()
			ready := time.Now()
			for len(b.far["s1"].requests()) == had {
				if r := b.post("/v1/chat/completions", ask(false, "x")); r.StatusCode != 200 {
					t.Fatal(r.StatusCode, r.body)
				}
				time.Sleep(10 * time.Millisecond)
			}
			if took := time.Since(ready); took > 2*time.Second {
				t.Errorf("away for %v, it served again %v after it was ready", away, took)
			}
		}
		b.stop()
		synctest.Wait()
	})
}

// A gateway that is told to stop before it serves ends all the same.
func TestStopBeforeServing(t *testing.T) {
	for i := range 20 {
		g := idle(t, Options{DrainDelay: -1})
		ctx, stop := context.WithCancel(t.Context())
		stop()
		ended := make(chan error, 1)
		go func() { ended <- g.Run(ctx) }()
		select {
		case err := <-ended:
			if err != nil {
				t.Fatalf("run %d: %v", i, err)
			}
		case <-time.After(soon):
			t.Fatalf("run %d does not end", i)
		}
	}
}

// Headers of one connection go no further, whichever of several Connection headers
// names them, in requests and in answers.
func TestRelayHopByHop(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Connection"] = []string{"keep-alive", "X-Near"}
		w.Header().Set("X-Near", "1")
		w.Header().Set("X-Far", "1")
		_, _ = fmt.Fprint(w, "{}")
	})
	for i, connections := range [][]string{{"keep-alive", "x-hop"}, {"X-Hop", "keep-alive"}, {"x-hop", "close"}, {"close", "x-hop"}, {"a, X-HOP ,b"}} {
		var headers []string
		for _, c := range connections {
			headers = append(headers, "Connection: "+c)
		}
		r := b.post("/v1/chat/completions", ask(false, "x"), append(headers, "X-Hop: no", "X-Kept: yes")...)
		if r.StatusCode != 200 || r.Header.Get("X-Near") != "" || r.Header.Get("X-Far") != "1" {
			t.Errorf("%q: %d %v", connections, r.StatusCode, r.Header)
		}
		got := b.far["s1"].requests()[i].header
		if got.Get("X-Hop") != "" || got.Get("X-Kept") != "yes" || strings.Contains(strings.ToLower(got.Get("Connection")), "hop") {
			t.Errorf("%q: the server got %v", connections, got)
		}
	}
}

// Clients of relayed answers that read a byte a second hold what buffers hold, on
// both sides of the gateway, and are given up; those that send so reach no server.
func TestRelaySlowClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) })
		const nClients, answer = 8, 16 << 20
		b := newRelayed(t, Options{}, "s1")
		var written atomic.Int64
		b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			piece := chunkEvent(strings.Repeat("x", 1000))
			for n := 0; n < answer; n += len(piece) {
				if _, err := io.WriteString(w, piece); err != nil {
					return
				}
				w.(http.Flusher).Flush()
				written.Add(int64(len(piece)))
			}
		})
		var clients sync.WaitGroup
		for range nClients {
			c := b.dial().timeless()
			c.send("POST", "/v1/chat/completions", ask(true, "x"))
			clients.Go(func() {
				defer c.Close()
				one := make([]byte, 1)
				for range 60 {
					if _, err := c.Conn.Read(one); err != nil {
						return
					}
					time.Sleep(time.Second)
				}
				time.Sleep(time.Minute) // for longer than --slow-client-timeout
			})
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		// Two connections' worth, an event being put together, and what the readers
		// and writers of both sides have in hand.
		const bound = 2*(256<<10) + 2*maxEvent + 64<<10
		if each := written.Load() / nClients; each == 0 || each > bound {
			t.Errorf("servers got rid of %d bytes for each client, the bound is %d", each, bound)
		}
		clients.Wait()
		b.until(func() bool { return b.g.InFlight.Load() == 0 && b.far["s1"].running.Load() == 0 })
		if n := b.g.Meters.Counter(metrics.GatewayStreamsAborted, "slow_client").Get(); n != nClients {
			t.Errorf("%g were given up", n)
		}
		c := b.dial().timeless()
		var sends sync.WaitGroup
		sends.Go(func() {
			c.drip("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 50000\r\n\r\n"+ask(true, "x"), 1, time.Second)
		})
		if r := c.receive(); r.StatusCode != 408 {
			t.Errorf("%d %s", r.StatusCode, r.body)
		}
		c.Close()
		sends.Wait()
		if n := len(b.far["s1"].requests()); n != nClients {
			t.Errorf("%d requests reached the server", n)
		}
		b.stop()
		synctest.Wait()
	})
}
