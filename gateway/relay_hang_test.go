package gateway

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A server that hangs keeps nothing that it was asked, neither before its probes
// became late nor from then until it counts as down: all of it is answered by
// another within twice the stall timeout.
func TestRelayHangsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own ticker
		const stall = 10 * time.Second
		b := newRelayed(t, Options{StallTimeout: stall, Policy: "round_robin", RetriesPerSecond: 1e6}, "s1", "s2")
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
		for b.g.foreign.Now().Up() == 2 {
			asked.Go(one)
			time.Sleep(200 * time.Millisecond)
		}
		asked.Wait()
		b.net.Silence("s1:80", false)
		back := time.Now()
		b.until(func() bool { return b.g.foreign.Now().Up() == 2 })
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
