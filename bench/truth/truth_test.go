package truth

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
)

var pace = Pace{First: 50 * time.Millisecond, Spread: 200 * time.Millisecond, Gap: 100 * time.Millisecond, Jitter: 40 * time.Millisecond}

// bubble runs a load against the mock in virtual time, where nothing is late, and
// gives what the client saw and what was true.
func bubble(t *testing.T, p Pace, a load.Arrivals, n, output, concurrency int) (got, truth *report.Summary) {
	m := NewMock(p, time.Now())
	c, err := load.NewClient(load.Target{URL: "http://mock/v1/completions", Dial: func(context.Context) (net.Conn, error) {
		here, there := net.Pipe()
		go m.Conn(there)
		return here, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	at, _, err := a.Times(n)
	if err != nil {
		t.Fatal(err)
	}
	body := fmt.Appendf(nil, `{"prompt":[1,2,3],"stream":true,"max_tokens":%d}`, output)
	rec, err := c.Run(t.Context(), load.Plan{At: at, Body: func(int) []byte { return body }, ID: strconv.Itoa, MaxConcurrency: concurrency})
	if err != nil {
		t.Fatal(err)
	}
	want, err := Record(rec, m.Streams(), m.start, strconv.Itoa)
	if err != nil {
		t.Fatal(err)
	}
	sum := func(r *load.Record) *report.Summary {
		return report.Summarize(r, report.Options{Percentiles: []float64{50, 90, 99, 99.9}, RequestRate: math.Inf(1), Goodput: map[string]float64{"ttft": 150}},
			func(i int) int { return r.Outcomes[i].Prompt }, func(i int) int { return r.Outcomes[i].Output })
	}
	return sum(rec), sum(want)
}

// Where nothing is late every figure is the truth to the nanosecond, with many
// streams as with few, with and without a bound on requests in flight.
func TestFiguresAreTheTruth(t *testing.T) {
	for _, c := range []struct{ streams, concurrency int }{{10, 0}, {10, 10}, {100, 0}, {100, 100}, {1000, 1000}} {
		synctest.Test(t, func(t *testing.T) {
			const tokens = 20
			got, truth := bubble(t, pace, load.Arrivals{Rate: float64(c.streams), Burstiness: 1, Seed: 3}, 2*c.streams, tokens, c.concurrency)
			for _, r := range Compare(got, truth, 0) {
				if math.Abs(r.Got-r.Truth) > 1e-9*math.Abs(r.Truth) {
					t.Errorf("%d streams, at most %d: %s is %v, in truth %v", c.streams, c.concurrency, r.Name, r.Got, r.Truth)
				}
			}
			if got.Completed != 2*c.streams || got.Output != 2*tokens*c.streams || got.Stats["ttft"].Std < 40 || got.Stats["itl"].Std < 10 || c.concurrency == 0 && got.PeakConcurrent < c.streams {
				t.Errorf("the load is not what it should be: %+v", got.Stats)
			}
		})
	}
}

// A stall of two seconds is two seconds in P99, although requests that may not
// leave meanwhile are not there to see it.
func TestStallIsInTheTail(t *testing.T) {
	for _, concurrency := range []int{0, 40} {
		synctest.Test(t, func(t *testing.T) {
			p := pace
			p.StallAfter, p.Stall = 5*time.Second, 2*time.Second
			got, truth := bubble(t, p, load.Arrivals{Rate: 20, Burstiness: 1, Seed: 3}, 300, 10, concurrency)
			tail := got.Stats["e2el_including_client_queue"].Percentiles[2] - got.Stats["e2el_including_client_queue"].Percentiles[0]
			if tail < 1800 {
				t.Errorf("at most %d: P99 from the scheduled arrival is only %.0f ms above the median", concurrency, tail)
			}
			if first := got.Stats["ttft"].Percentiles[2]; concurrency == 0 && first < 1800 {
				t.Errorf("P99 TTFT is %.0f ms", first)
			}
			if w := Worst(Compare(got, truth, 0)); math.Abs(w.Got-w.Truth) > 1e-9*w.Truth {
				t.Errorf("at most %d: %+v", concurrency, w)
			}
		})
	}
}

// Over TCP, in this process, figures are the truth but for how late this process
// is; they are never less than it.
func TestMockOverTCP(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m := NewMock(Pace{First: 5 * time.Millisecond, Gap: 5 * time.Millisecond}, time.Now())
	go func() {
		if err := m.Serve(l); err != nil {
			t.Error(err)
		}
	}()
	base := "http://" + l.Addr().String()
	c, err := load.NewClient(load.Target{URL: base + "/v1/chat/completions", Chat: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	body := []byte(`{"messages":[{"role":"user","content":"a b"}],"stream":true,"max_completion_tokens":20}`)
	rec, err := c.Run(t.Context(), load.Plan{At: make([]time.Duration, 20), Body: func(int) []byte { return body }, ID: strconv.Itoa})
	if err != nil {
		t.Fatal(err)
	}
	var streams []*Stream
	a, err := http.Get(base + "/truth")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	if err := json.NewDecoder(a.Body).Decode(&streams); err != nil || len(streams) != 20 {
		t.Fatalf("%d streams: %v", len(streams), err)
	}
	want, err := Record(rec, streams, m.start, strconv.Itoa)
	if err != nil {
		t.Fatal(err)
	}
	for i := range rec.Outcomes {
		o, w := &rec.Outcomes[i], &want.Outcomes[i]
		if o.Err != nil || o.Chunks != 20 || o.Output != 20 || o.Sent > w.Sent || o.First < w.First || o.Last < w.Last {
			t.Errorf("request %d: client %+v\nserver %+v", i, o, w)
		}
	}
	if r, err := http.Post(base+"/truth/forget", "", nil); err != nil || r.StatusCode != 200 || len(m.Streams()) != 0 {
		t.Errorf("forget: %v", err)
	}
}

// A chat without max_tokens has a default length.
func TestMockChatWithoutMaxTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		go NewMock(pace, time.Now()).Conn(there)
		const body = `{"stream":true,"messages":[]}`
		go fmt.Fprintf(here, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		r, err := http.ReadResponse(bufio.NewReader(here), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer here.Close()
		text, err := io.ReadAll(r.Body)
		if err != nil || strings.Count(string(text), `" tok"`) != chatTokens || !strings.Contains(string(text), `"length"`) {
			t.Errorf("%v: %s", err, text)
		}
	})
}

func TestMockRefuses(t *testing.T) {
	m := NewMock(pace, time.Now())
	for _, c := range []struct{ path, body, want string }{
		{"/v1/completions", `{"max_tokens":3}`, "stream"},
		{"/v1/completions", `{"stream":true}`, "max_tokens"},
		{"/v1/completions", `x`, "stream"},
		{"/v1/other", `{}`, "route"},
	} {
		here, there := net.Pipe()
		go m.Conn(there)
		go fmt.Fprintf(here, "POST %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", c.path, len(c.body), c.body)
		if err := here.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1000)
		n, err := io.ReadAtLeast(here, b, 120)
		if err != nil && n == 0 || !strings.Contains(string(b[:n]), c.want) {
			t.Errorf("%+v: %q, %v", c, b[:n], err)
		}
		here.Close()
	}
}

// What could not show anything is refused before anything runs.
func TestCheckRefuses(t *testing.T) {
	for _, o := range []Options{
		{Streams: []int{10}, Stall: 500 * time.Millisecond},
		{Streams: []int{10}, Stall: 10 * time.Second},
		{Streams: []int{10}},
		{Streams: []int{10, 0}, Stall: 2 * time.Second},
		{Streams: []int{10}, Stall: 2 * time.Second, Runs: []string{"steady", "fast"}},
		{Streams: []int{10}, Stall: 2 * time.Second, Runs: []string{"guidellm"}},
	} {
		var out bytes.Buffer
		o.Out, o.ErrOut, o.Binary = &out, io.Discard, "/nothing"
		if err := Check(t.Context(), o); !errors.Is(err, bench.ErrOption) || out.Len() > 0 {
			t.Errorf("%+v: %v, %q", o, err, out.String())
		}
	}
}
