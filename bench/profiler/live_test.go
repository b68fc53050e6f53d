package profiler

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
)

// node is a node that makes steps by a profile, for tests: at each scrape a hundred more.
type node struct {
	times   *profile.Times
	scrapes int
	kinds   map[string]*counters
	shape   func(kind string, scrape int) profile.TimedStep
}

// ServeHTTP writes the counters.
func (n *node) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	n.scrapes++
	for kind, c := range n.kinds {
		s := n.shape(kind, n.scrapes)
		if s.Streams+s.Chunk > 0 {
			c.steps += 100
			c.sequences += 100 * s.Streams
			c.context += 100 * s.ContextSum
			c.prompt += 100 * s.Chunk
			c.attended += 100 * s.Attended
			c.seconds += 100 * n.times.Predict(&s)
		}
	}
	fmt.Fprintln(w, `# TYPE vllm:cache_config_info gauge`)
	fmt.Fprintln(w, `vllm:cache_config_info{block_size="16",cache_dtype="bf16",num_gpu_blocks="777"} 1`)
	fmt.Fprintln(w, "# TYPE tandem:engine_work_total counter")
	for kind, c := range n.kinds {
		for of, v := range map[string]float64{"steps": c.steps, "sequences": c.sequences, "context": c.context, "prompt": c.prompt, "attended": c.attended, "of a newer node": 1} {
			fmt.Fprintf(w, "tandem:engine_work_total{step=%q,of=%q} %g\n", kind, of, v)
		}
	}
	fmt.Fprintln(w, "# TYPE tandem:engine_work_seconds_total counter")
	for kind, c := range n.kinds {
		fmt.Fprintf(w, "tandem:engine_work_seconds_total{step=%q} %g\n", kind, c.seconds)
	}
}

// varied is a load with batches of all sizes.
func varied(kind string, scrape int) profile.TimedStep {
	if kind == "decode" {
		seqs := float64(1 + scrape*7%40)
		return profile.TimedStep{Streams: seqs, ContextSum: seqs * float64(100+scrape*scrape*37%1900)}
	}
	tokens := float64(500 + scrape*911%3000)
	return profile.TimedStep{Chunk: tokens, Attended: tokens * (tokens/2 + float64(scrape*scrape*13%800))}
}

// live plays a node for a minute and fits a profile to its counters.
func live(t *testing.T, shape func(string, int) profile.TimedStep) (*Result, error) {
	truth, _, err := profile.Named("h200:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	base, _, _ := profile.Named("l4:llama-8b")
	return liveFrom(t, truth, base, shape)
}

// liveFrom is live of a node with the step times of truth.
func liveFrom(t *testing.T, truth, base *profile.Profile, shape func(string, int) profile.TimedStep) (*Result, error) {
	server := httptest.NewServer(&node{times: truth.Times(), kinds: map[string]*counters{"decode": {}, "prefill": {}}, shape: shape})
	defer server.Close()
	return Live(t.Context(), LiveOptions{URLs: []string{server.URL}, For: 600 * time.Millisecond, Every: 20 * time.Millisecond, Base: base})
}

// Counters of a varied load give the coefficients of the node's steps, whatever the base has.
func TestLive(t *testing.T) {
	r, err := live(t, varied)
	if err != nil {
		t.Fatal(err)
	}
	truth, _, _ := profile.Named("h200:llama-8b")
	for i, pair := range [][2]float64{
		{r.Profile.Step.Decode.Fixed, truth.Step.Decode.Fixed}, {r.Profile.Step.Decode.PerCtx, truth.Step.Decode.PerCtx}, {r.Profile.Step.Decode.PerSeq, truth.Step.Decode.PerSeq},
		{r.Profile.Step.Prefill.PerToken, truth.Step.Prefill.PerToken}, {r.Profile.Step.Prefill.PerPair, truth.Step.Prefill.PerPair},
	} {
		if math.Abs(pair[0]/pair[1]-1) > 0.02 {
			t.Errorf("coefficient %d is %g, want %g", i, pair[0], pair[1])
		}
	}
	if mean, _ := r.Errors(); r.Profile.Step.Source != profile.Measured || r.Profile.Step.Error != 0 || r.Profile.Memory.Blocks != 777 || len(r.HeldOut) < 8 || mean > 0.01 {
		t.Errorf("%d intervals, error %g, %+v", len(r.HeldOut), mean, r.Profile)
	}
	if err := r.Profile.Check(); err != nil {
		t.Error(err)
	}
}

// Points of the base profile keep their proportions, also under a load that does not vary. Points
// with other proportions than the node's give way to coefficients.
func TestLiveKeepsPoints(t *testing.T) {
	t.Parallel()
	base, _, err := profile.Named("l4:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	base.Step.Decode.Points = [][]float64{{1, 1, .01, .001}, {1, 9000, .02, .001}, {2, 1, .02, .001}, {2, 9000, .03, .001}, {64, 1, .03, .001}, {64, 9000, .04, .001}}
	base.Step.Prefill.Points = [][]float64{{1, 0, .01}, {1, 9000, .02}, {9000, 0, 2}, {9000, 9000, 3}}
	truth := *base
	truth.Step.Decode.Points, truth.Step.Prefill.Points = scaled(base.Step.Decode.Points, 1.25), scaled(base.Step.Prefill.Points, 1.5)
	r, err := liveFrom(t, &truth, base, func(kind string, _ int) profile.TimedStep { return varied(kind, 1) })
	if err != nil {
		t.Fatal(err)
	}
	if d, c := r.Profile.Step.Decode.Points[2], r.Profile.Step.Prefill.Points[3]; d[2] != .025 || d[3] != .00125 || c[2] != 4.5 || base.Step.Decode.Points[2][2] != .02 {
		t.Errorf("points %g and %g, want .025 and 4.5; the base's: %g", d, c, base.Step.Decode.Points[2])
	}
	if f := r.Profile.Step.Decode.PerSeq / base.Step.Decode.PerSeq; math.Abs(f-1.25) > .001 || len(r.Notes) != 2 || !strings.Contains(r.Notes[0], "decoding are those of the base profile multiplied by 1.250") {
		t.Errorf("coefficients times %g; %q", f, r.Notes)
	}
	if mean, _ := r.Errors(); mean > .001 {
		t.Errorf("error %g", mean)
	}
	truth.Step.Decode.Points, truth.Step.Decode.PerSeq = nil, .01
	if r, err = liveFrom(t, &truth, base, varied); err != nil || len(r.Profile.Step.Decode.Points) > 0 || len(r.Notes) != 1 || math.Abs(r.Profile.Step.Decode.PerSeq/truth.Step.Decode.PerSeq-1) > .02 {
		t.Errorf("%v, %+v", err, r)
	}
}

// A load that does not vary gives no profile. One kind of work leaves the other as the base has it.
func TestLiveRefuses(t *testing.T) {
	t.Parallel()
	if _, err := live(t, func(kind string, _ int) profile.TimedStep { return varied(kind, 1) }); !errors.Is(err, ErrLive) || !strings.Contains(err.Error(), "have to vary by a factor of 1.5") {
		t.Error(err)
	}
	if _, err := live(t, func(string, int) profile.TimedStep { return profile.TimedStep{} }); !errors.Is(err, ErrLive) || !strings.Contains(err.Error(), "0 intervals with steps of this kind") {
		t.Error(err)
	}
	r, err := live(t, func(kind string, scrape int) profile.TimedStep {
		if kind == "prefill" {
			return profile.TimedStep{}
		}
		return varied(kind, scrape)
	})
	if err != nil || r.Profile.Step.Source != profile.Estimate || len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "remain for prompts") {
		t.Errorf("%v, %+v", err, r)
	}
	base, _, _ := profile.Named("l4:llama-8b")
	notMetrics := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { http.NotFound(w, q) }))
	defer notMetrics.Close()
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "up 1") }))
	defer gateway.Close()
	for url, want := range map[string]string{notMetrics.URL: "answered 404", gateway.URL: "not a gateway", "http://127.0.0.1:1/metrics": "connection refused"} {
		if _, err := Live(t.Context(), LiveOptions{URLs: []string{url}, For: time.Minute, Every: time.Second, Base: base}); !errors.Is(err, ErrLive) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", url, err)
		}
	}
	if _, err := Live(t.Context(), LiveOptions{URLs: []string{"http://127.0.0.1:1"}, For: time.Second, Every: time.Second, Base: base}); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
}

// Counters of a new process, values that are not finite, and steps without work give no row.
func TestAddRowsLeavesOut(t *testing.T) {
	t.Parallel()
	whole := counters{steps: 100, sequences: 400, context: 4000, seconds: 1}
	for name, change := range map[string]func(c *counters){
		"no sequence":        func(c *counters) { c.sequences = 0 },
		"fewer tokens":       func(c *counters) { c.context = -1 },
		"infinite context":   func(c *counters) { c.context = math.Inf(1) },
		"seconds not known":  func(c *counters) { c.seconds = math.NaN() },
		"no seconds":         func(c *counters) { c.seconds = 0 },
		"too few steps":      func(c *counters) { c.steps = 2 },
		"steps not a number": func(c *counters) { c.steps = math.NaN() },
		"":                   func(*counters) {},
	} {
		now, rows := whole, map[string][]profile.TimedStep{}
		change(&now)
		addRows(rows, &scrape{}, &scrape{kinds: map[string]counters{"decode": now}})
		if got, want := len(rows["decode"]), map[bool]int{true: 1}[name == ""]; got != want {
			t.Errorf("%q: %d rows, want %d", name, got, want)
		}
	}
}

// A node that restarts may miss two scrapes in a row. One that misses three ends the measurement.
func TestLiveRestart(t *testing.T) {
	t.Parallel()
	p, _, err := profile.Named("h200:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	base, _, _ := profile.Named("l4:llama-8b")
	n := &node{times: p.Times(), kinds: map[string]*counters{"decode": {}, "prefill": {}}, shape: varied}
	for _, misses := range []int{2, 3} {
		times := 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if times++; times > 3 && times <= 3+misses {
				http.Error(w, "starting", http.StatusServiceUnavailable)
				return
			}
			n.ServeHTTP(w, q)
		}))
		_, err := Live(t.Context(), LiveOptions{URLs: []string{server.URL}, For: 600 * time.Millisecond, Every: 20 * time.Millisecond, Base: base})
		server.Close()
		if (err != nil) != (misses == 3) {
			t.Errorf("%d missed scrapes: %v", misses, err)
		}
	}
}

// No error has the password of a node's metrics.
func TestMasked(t *testing.T) {
	for url, want := range map[string]string{
		"http://u:p@h:7301/metrics": "http://h:7301/metrics", "h:7301": "h:7301", "u:p@h": "h", "http://u:a/b@c@h": "http://h", "": "", "http://h/x?y=1": "http://h/x?y=1",
	} {
		if got := Masked(url); got != want {
			t.Errorf("%s: %s, want %s", url, got, want)
		}
	}
	answers := []string{"503", "not metrics {", "# TYPE a counter\na 1\n"}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, password, _ := r.BasicAuth(); password != "secret" {
			t.Errorf("password %q", password)
		}
		if answers[0] == "503" {
			w.WriteHeader(503)
		}
		_, _ = w.Write([]byte(answers[0]))
		answers = answers[1:]
	}))
	defer server.Close()
	url := strings.Replace(server.URL, "http://", "http://user:secret@", 1)
	for range 3 {
		if _, err := readScrape(context.Background(), url); err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "127.0.0.1") {
			t.Error(err)
		}
	}
	server.Close()
	for _, url := range []string{url, "http://user:secret@ h"} {
		if _, err := readScrape(context.Background(), url); err == nil || strings.Contains(err.Error(), "secret") {
			t.Error(err)
		}
	}
}
