package metrics

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttputil"
	"go.uber.org/goleak"
)

var sampleLine = regexp.MustCompile(`^([a-z_:][a-z0-9_:]*)(\{((?:[^"}]|"[^"]*")*)\})? ([-+0-9.eInf]+)$`)

// exposed parses a scrape: family name → series → value. It fails on a line
// that is not of the text format, and on a sample outside its family's head.
func exposed(t *testing.T, text []byte) map[string]map[string]float64 {
	t.Helper()
	out := map[string]map[string]float64{}
	family, kind := "", ""
	for sc := bufio.NewScanner(bytes.NewReader(text)); sc.Scan(); {
		line := sc.Text()
		if strings.HasPrefix(line, "# TYPE ") {
			f := strings.Fields(line)
			family, kind = f[2], f[3]
			if out[family] != nil {
				t.Fatalf("%s has two heads", family)
			}
			out[family] = map[string]float64{}
			continue
		}
		if strings.HasPrefix(line, "# HELP ") {
			continue
		}
		m := sampleLine.FindStringSubmatch(line)
		if m == nil {
			t.Fatalf("not a sample: %q", line)
		}
		name := m[1]
		if kind == "histogram" || kind == "summary" {
			for _, s := range []string{"_bucket", "_sum", "_count"} {
				name = strings.TrimSuffix(name, s)
			}
		}
		if name != family {
			t.Fatalf("%q under the head of %q", line, family)
		}
		v, err := strconv.ParseFloat(m[4], 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if _, twice := out[family][m[1]+m[2]]; twice {
			t.Fatalf("series %q twice", m[1]+m[2])
		}
		out[family][m[1]+m[2]] = v
	}
	return out
}

// Every row of the table is exposed for its roles, and nothing else is but the
// process' own figures.
func TestTableAndScrapeAgree(t *testing.T) {
	for _, roles := range []Role{Gateway, Prefill, Decode, Gateway | Prefill | Decode} {
		s := New(roles, "m")
		for id := range Rows {
			if row := &Rows[id]; row.Kind == KindInfo && s.Has(ID(id)) {
				s.Info(ID(id), make([]string, len(row.Labels))...)
			}
		}
		got := exposed(t, s.Append(nil))
		for id := range Rows {
			row := &Rows[id]
			series, ok := got[row.Name]
			delete(got, row.Name)
			if want := row.Roles&roles != 0; ok != want {
				t.Errorf("roles %b: %s exposed %v, want %v", roles, row.Name, ok, want)
				continue
			} else if !want {
				continue
			}
			n := 1
			for _, l := range row.Labels {
				if row.Kind != KindInfo {
					n *= len(l.valuesOf(roles))
				}
			}
			if row.Kind == KindHistogram {
				n *= len(row.Buckets) + 3
			}
			if len(series) != n {
				t.Errorf("%s has %d series, want %d", row.Name, len(series), n)
			}
		}
		for name := range got {
			if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
				t.Errorf("roles %b: %s is exposed but not in the table", roles, name)
			}
		}
	}
}

func TestTableIsSound(t *testing.T) {
	names := map[string]bool{}
	for id := range Rows {
		r := &Rows[id]
		switch {
		case names[r.Name]:
			t.Errorf("%s twice", r.Name)
		case !strings.HasPrefix(r.Name, "vllm:") && !strings.HasPrefix(r.Name, "tandem:"):
			t.Errorf("row %d: name %q", id, r.Name)
		case r.Roles == 0 || r.Help == "" || r.Kind == 0:
			t.Errorf("%s lacks roles, help or kind", r.Name)
		case (r.Kind == KindHistogram) != (len(r.Buckets) > 0):
			t.Errorf("%s: buckets and kind disagree", r.Name)
		case !sort.Float64sAreSorted(r.Buckets):
			t.Errorf("%s: buckets are not ascending", r.Name)
		case r.Kind == KindCounter && !strings.HasSuffix(r.Name, "_total"):
			t.Errorf("%s: a counter ends in _total", r.Name)
		}
		names[r.Name] = true
		for _, l := range r.Labels {
			most := 32
			if l.Name == "route" { // the gateway's table has as many
				most = 48
			}
			if (len(l.Values) == 0) != (r.Kind == KindInfo) || len(l.Values) > most {
				t.Errorf("%s: label %s has %d values", r.Name, l.Name, len(l.Values))
			}
		}
	}
}

func TestValuesReachTheScrape(t *testing.T) {
	s := New(Decode|Prefill, `a "quoted" \ model`)
	s.Counter(KVTransferBytes, "in").Add(4096)
	s.Counter(KVTransferBytes, "out").Add(1)
	s.Counter(RequestSuccess, "length").Inc()
	s.Counter(RequestSuccess, "never heard of").Inc() // counts as the last value: error
	var running atomic.Int64
	s.Gauge(NumRequestsRunning).Func(func() float64 { return float64(running.Load()) })
	running.Store(7)
	text := string(s.Append(nil))
	for _, want := range []string{
		`tandem:kv_transfer_bytes_total{direction="in"} 4096`,
		`tandem:kv_transfer_bytes_total{direction="out"} 1`,
		`vllm:num_requests_running{engine="0",model_name="a \"quoted\" \\ model"} 7`,
		`{engine="0",finished_reason="length",model_name="a \"quoted\" \\ model"} 1`,
		`{engine="0",finished_reason="error",model_name="a \"quoted\" \\ model"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no line ending %s", want)
		}
	}
	s.SetModel("other")
	if text := string(s.Append(nil)); strings.Contains(text, "quoted") || !strings.Contains(text, `vllm:num_requests_running{engine="0",model_name="other"} 7`) {
		t.Error("SetModel does not reach the scrape")
	}
}

// Buckets against a naive count.
func TestHistogramAgainstNaive(t *testing.T) {
	for seed := uint64(0); seed < 50; seed++ {
		r := rand.New(rand.NewPCG(seed, 1))
		s := New(Gateway, "m")
		h := s.Histogram(TimeToFirstToken)
		var xs []float64
		for range r.IntN(200) {
			x := r.ExpFloat64()
			if r.IntN(4) == 0 {
				x = ttftBuckets[r.IntN(len(ttftBuckets))] // exactly on a bound
			}
			xs = append(xs, x)
			h.Observe(x)
		}
		got := exposed(t, s.Append(nil))["vllm:time_to_first_token_seconds"]
		for _, b := range ttftBuckets {
			n := 0
			for _, x := range xs {
				if x <= b {
					n++
				}
			}
			key := fmt.Sprintf(`vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m",le="%g"}`, b)
			if got[key] != float64(n) {
				t.Fatalf("seed %d: le %g: %g, want %d", seed, b, got[key], n)
			}
		}
		if h.Count() != uint64(len(xs)) {
			t.Fatalf("seed %d: count %d, want %d", seed, h.Count(), len(xs))
		}
	}
}

func TestMisuseOfTheTablePanics(t *testing.T) {
	s := New(Gateway, "m")
	for name, f := range map[string]func(){
		"wrong kind":   func() { s.Gauge(HTTPRequests, "other", "other") },
		"wrong role":   func() { s.Counter(KVTransferBytes, "in") },
		"wrong labels": func() { s.Counter(HTTPRequests) },
		"wrong facts":  func() { s.Info(BuildInfo) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

func TestRecordingDoesNotAllocate(t *testing.T) {
	s := New(Gateway, "m")
	c, h := s.Counter(GenerationTokens), s.Histogram(InterTokenLatency)
	if n := testing.AllocsPerRun(100, func() { c.Inc(); h.Observe(0.3) }); n != 0 {
		t.Fatalf("%g allocations", n)
	}
}

func TestServeNode(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), // fasthttp's own tickers outlive a server
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"))
	l := fasthttputil.NewInmemoryListener()
	ctx, cancel := context.WithCancel(context.Background())
	var why atomic.Pointer[error]
	done := make(chan error, 1)
	go func() {
		done <- ServeNode(ctx, l, NodeOptions{Set: New(Decode, "m"), Version: "1.2.3", Ready: func() error {
			if e := why.Load(); e != nil {
				return *e
			}
			return nil
		}})
	}()
	c := &fasthttp.HostClient{Addr: "node", Dial: func(string) (net.Conn, error) { return l.Dial() }}
	get := func(method, path string) (int, string) {
		t.Helper()
		var req fasthttp.Request
		var resp fasthttp.Response
		req.SetRequestURI("http://node" + path)
		req.Header.SetMethod(method)
		if err := c.Do(&req, &resp); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode(), string(resp.Body())
	}
	check := func(method, path string, status int, part string) {
		t.Helper()
		if st, body := get(method, path); st != status || !strings.Contains(body, part) {
			t.Errorf("%s %s: %d %q, want %d with %q", method, path, st, body, status, part)
		}
	}
	check("GET", "/livez", 200, "ok")
	check("GET", "/readyz", 200, "ok")
	check("GET", "/version", 200, `{"version":"1.2.3"}`)
	check("GET", "/metrics", 200, "tandem:prefill_tokens_computed_total 0")
	check("GET", "/nothing", 404, "not found")
	check("POST", "/metrics", 405, "method not allowed")
	draining := errors.New("draining")
	why.Store(&draining)
	check("GET", "/readyz", 503, "draining")
	check("GET", "/health", 503, "draining")
	check("GET", "/livez", 200, "ok")
	c.CloseIdleConnections()
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
