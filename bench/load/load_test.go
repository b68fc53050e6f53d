package load

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"
)

func target(url string) Target {
	return Target{URL: url + "/v1/completions", Header: http.Header{"X-Test": {"yes"}}, KeepText: true}
}

// A server that stalls is seen from the scheduled arrivals although
// --max-concurrency keeps requests back meanwhile.
func TestStallIsSeen(t *testing.T) {
	m := newMock(t)
	m.tokens, m.gap, m.stallAt, m.stall = 2, time.Millisecond, 30, 2*time.Second
	c, err := NewClient(target(m.url))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	at, _, _ := Arrivals{Rate: 100, Burstiness: 1, Seed: 1}.Times(100)
	rec, err := c.Run(context.Background(), Plan{At: at, MaxConcurrency: 2, Body: func(i int) []byte { return []byte(`{"id":` + itoa(i) + `}`) }})
	if err != nil {
		t.Fatal(err)
	}
	waited, served := 0, 0
	for i := range rec.Outcomes {
		o := &rec.Outcomes[i]
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		if o.Last-o.Scheduled > time.Second {
			waited++
		}
		if o.Latency() > time.Second {
			served++
		}
	}
	if served == 0 || served > 5 {
		t.Errorf("%d requests were served slowly, want the few that the stall met", served)
	}
	if waited < 40 {
		t.Errorf("%d of 100 requests waited more than a second from their scheduled arrival, want those that came during the stall", waited)
	}
	if rec.Self.Lag > time.Second {
		t.Errorf("waiting for the server counts as the client's lag: %v", rec.Self.Lag)
	}
}

// What goes wrong is an outcome with an error, and the connection is not used again.
func TestFailures(t *testing.T) {
	m := newMock(t)
	c, err := NewClient(target(m.url))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, f := range []struct {
		mode string
		want error
	}{{"status", ErrStatus}, {"error", ErrStream}, {"empty", ErrEmpty}, {"cut", ErrCut}, {"", nil}, {"close", nil}, {"", nil}} {
		m.mode = f.mode
		var o Outcome
		c.Do(context.Background(), time.Now(), []byte(`{"id":0}`), "x", &o)
		if !errors.Is(o.Err, f.want) || f.want == nil && o.Err != nil {
			t.Errorf("%q: %v, want %v", f.mode, o.Err, f.want)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.mode, m.tokens, m.gap = "", 100, 50*time.Millisecond
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	if _, err := c.Run(ctx, Plan{At: make([]time.Duration, 3), Body: func(int) []byte { return []byte(`{"id":0}`) }}); !errors.Is(err, context.Canceled) || time.Since(began) > 3*time.Second {
		t.Errorf("a stopped run: %v after %v", err, time.Since(began))
	}
	for _, bad := range []Target{{URL: "ftp://x"}, {URL: "nothing"}, {URL: "http://x", Header: http.Header{"A": {"b\r\nc: d"}}}} {
		if _, err := NewClient(bad); !errors.Is(err, ErrOption) {
			t.Errorf("%q: %v", bad.URL, err)
		}
	}
}

// A server that closes an idle connection, by its end or by a reset, as a request is sent has not failed it.
func TestIdleConnectionClosed(t *testing.T) {
	for _, reset := range []bool{false, true} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var conns atomic.Int32
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Request-Id") == "late" && conns.Load() == 1 {
				k, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				if reset {
					_ = k.(*net.TCPConn).SetLinger(0)
				}
				_ = k.Close()
				return
			}
			_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n")
		}), ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				conns.Add(1)
			}
		}}
		go func() { _ = s.Serve(l) }()
		c, err := NewClient(target("http://" + l.Addr().String()))
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"early", "late"} {
			var o Outcome
			c.Do(t.Context(), time.Now(), []byte(`{"id":0}`), id, &o)
			if o.Err != nil {
				t.Errorf("reset %v, request %q: %v", reset, id, o.Err)
			}
		}
		if n := conns.Load(); n != 2 {
			t.Errorf("reset %v: %d connections, want 2", reset, n)
		}
		c.Close()
		_ = s.Close()
	}
}

// Gaps have the mean and the variance of their distribution, the whole has
// exactly the rate, and a seed gives the same.
func TestArrivals(t *testing.T) {
	const n = 20000
	for _, b := range []float64{0.25, 0.5, 1, 4} {
		for seed := range uint64(3) {
			a := Arrivals{Rate: 50, Burstiness: b, Seed: seed}
			at, _, err := a.Times(n)
			if err != nil {
				t.Fatal(err)
			}
			again, _, _ := a.Times(n)
			var mean, square float64
			last := time.Duration(0)
			for i, x := range at {
				if x < last || again[i] != x {
					t.Fatalf("burstiness %g, seed %d: request %d at %v after %v, again %v", b, seed, i, x, last, again[i])
				}
				gap := (x - last).Seconds() * 50
				mean += gap / n
				square += gap * gap / n
				last = x
			}
			if cv := square - mean*mean; math.Abs(mean-1) > 1e-6 || math.Abs(cv*b-1) > 0.12 {
				t.Errorf("burstiness %g, seed %d: mean gap %.6f, variance %.4f; want 1 and %.4f", b, seed, mean, cv, 1/b)
			}
		}
	}
	for _, ramp := range []string{"linear", "exponential"} {
		at, changes, err := Arrivals{Ramp: ramp, From: 2, To: 40, Burstiness: 1}.Times(4000)
		if err != nil {
			t.Fatal(err)
		}
		early, late := at[400].Seconds()/400, (at[3999]-at[3599]).Seconds()/400
		if early < 3*late || len(changes) != 39 || changes[0].RPS != 2 || changes[38].RPS != 40 {
			t.Errorf("%s: gaps of %.4f s, then %.4f s; changes %v", ramp, early, late, changes)
		}
	}
	at, _, err := Arrivals{Rate: math.Inf(1), Burstiness: 1}.Times(3)
	if err != nil || at[2] != 0 {
		t.Errorf("all at once: %v %v", at, err)
	}
	for _, bad := range []Arrivals{{Rate: 0, Burstiness: 1}, {Rate: 1}, {Rate: 1, Burstiness: math.NaN()}, {Ramp: "up", Burstiness: 1, To: 1}, {Ramp: "exponential", To: 3, Burstiness: 1}, {Ramp: "linear", From: 3, To: 3, Burstiness: 1}} {
		if _, _, err := bad.Times(2); !errors.Is(err, ErrOption) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	if g := gamma(rng, 1e15); g != 1e15 {
		t.Errorf("a huge shape: %g", g)
	}
}

// The client counts as the limit only if a share of the requests, and not one or two of
// them, were sent clearly late.
func TestLimitIsNotOneLateRequest(t *testing.T) {
	run := func(n, late int, by time.Duration) Self {
		r := &Record{Duration: 10 * time.Second, Outcomes: make([]Outcome, n)}
		for i := range r.Outcomes {
			o := &r.Outcomes[i]
			o.Scheduled = time.Duration(i+1) * time.Millisecond
			o.Ready, o.Sent = o.Scheduled, o.Scheduled+time.Millisecond
			if i < late {
				o.Sent = o.Ready + by
			}
		}
		return judgeClient(r, time.Second, nil)
	}
	for _, c := range []struct {
		n, late int
		by      time.Duration
		limited bool
	}{
		{10, 1, time.Second, false}, {20, 2, time.Second, false}, {20, 3, 11 * time.Millisecond, true}, {20, 20, maxLag, false},
		{300, 3, time.Second, false}, {300, 4, time.Second, true}, {1000, 10, time.Second, false}, {1000, 11, time.Second, true},
	} {
		if s := run(c.n, c.late, c.by); (s.Overloaded != "") != c.limited {
			t.Errorf("%d of %d requests %v late: %q", c.late, c.n, c.by, s.Overloaded)
		}
	}
	timers := make([]time.Duration, 500)
	for i := range 6 {
		timers[len(timers)-1-i] = time.Second
		s := judgeClient(&Record{Duration: time.Second}, 0, timers)
		if (s.Overloaded != "") != (i == 5) {
			t.Errorf("%d of 500 timers late: %q", i+1, s.Overloaded)
		}
	}
}
