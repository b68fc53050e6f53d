package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/bench/report"
)

// A sweep runs each pair, and its page needs nothing from elsewhere.
func TestSweep(t *testing.T) {
	var mu sync.Mutex
	prompts := map[string]bool{} // no run sends those of another
	url := fake(t, func(path string, body map[string]any) {
		mu.Lock()
		defer mu.Unlock()
		if path == "/v1/completions" {
			prompts[fmt.Sprint(body["prompt"])] = true
		}
	})
	dir := t.TempDir()
	o := parse(t, "--base-url", url, "--num-prompts", "6", "--input-len", "40", "--goodput", "ttft:1000")
	if err := Sweep(t.Context(), o, SweepOptions{Rates: []float64{100, 200}, Concurrencies: []int{1, 3}, Dir: dir, Before: "echo before >> '" + dir + "/before'"}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if len(prompts) != 24 {
		t.Errorf("%d different prompts in 4 runs of 6", len(prompts))
	}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if said := read("before"); strings.Count(said, "before") != 4 {
		t.Errorf("before 4 runs: %q", said)
	}
	if err := Sweep(t.Context(), o, SweepOptions{Dir: dir, Before: "exit 3"}, io.Discard, io.Discard); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "exit 3") {
		t.Errorf("a command that fails before a run: %v", err)
	}
	csv := strings.Split(strings.TrimSpace(read("sweep.csv")), "\n")
	if len(csv) != 5 || !strings.HasPrefix(csv[1], ",100,1,6,0,") || !strings.HasPrefix(csv[4], ",200,3,6,0,") {
		t.Errorf("CSV: %q", csv)
	}
	var results []map[string]any
	if err := json.Unmarshal([]byte(read("sweep.json")), &results); err != nil || len(results) != 4 || results[3]["request_rate"] != 200.0 || results[3]["completed"] != 6.0 {
		t.Errorf("JSON: %v, %v", results, err)
	}
	page := read("report.html")
	if strings.Count(page, "<svg") != 9 || strings.Contains(page, "NaN") || strings.Contains(page, "http://www") || strings.Contains(page, "<script") || strings.Contains(page, "src=") {
		t.Errorf("page: %.2000s", page)
	}
	if err := Sweep(t.Context(), o, SweepOptions{Rates: []float64{0}, Dir: dir}, io.Discard, io.Discard); !errors.Is(err, ErrOption) {
		t.Errorf("a rate of 0: %v", err)
	}
}

// Repetitions are runs with their own prompts, around all loads, and the page has one row
// per load.
func TestSweepRepeats(t *testing.T) {
	var mu sync.Mutex
	prompts := map[string]bool{}
	url := fake(t, func(path string, body map[string]any) {
		mu.Lock()
		defer mu.Unlock()
		if path == "/v1/completions" {
			prompts[fmt.Sprint(body["prompt"])] = true
		}
	})
	dir := t.TempDir()
	o := parse(t, "--base-url", url, "--num-prompts", "4", "--input-len", "40")
	if err := Sweep(t.Context(), o, SweepOptions{Rates: []float64{100, 200}, Repeat: 3, Dir: dir}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if len(prompts) != 2*3*4 {
		t.Errorf("%d different prompts in 6 runs of 4", len(prompts))
	}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	var order []string
	for _, line := range strings.Split(strings.TrimSpace(read("sweep.csv")), "\n")[1:] {
		f := strings.Split(line, ",")
		order = append(order, f[1]+"#"+f[len(f)-1])
	}
	if want := "100#0 200#0 100#1 200#1 100#2 200#2"; strings.Join(order, " ") != want {
		t.Errorf("runs: %v, want %s", order, want)
	}
	var results []map[string]any
	if err := json.Unmarshal([]byte(read("sweep.json")), &results); err != nil || len(results) != 6 || results[5]["repetition"] != "2" {
		t.Errorf("JSON: %v, %v", results, err)
	}
	if page := read("report.html"); strings.Count(strings.SplitN(page, "<h2>", 2)[0], "<tr><th>rate 100</th>") != 1 || !strings.Contains(page, "Each load was run 3 times") || strings.Contains(page, "NaN") {
		t.Errorf("page: %.2000s", page)
	}
}

// Servers are started one after the other, each with its flags, are asked the
// same, and are gone afterwards.
func TestSweepStartsServers(t *testing.T) {
	var mu sync.Mutex
	prompts := map[string]int{}
	url := fake(t, func(path string, body map[string]any) {
		mu.Lock()
		defer mu.Unlock()
		if path == "/v1/completions" {
			prompts[fmt.Sprint(body["prompt"])]++
		}
	})
	dir := t.TempDir()
	seen := filepath.Join(dir, "seen")
	command := `sh -c 'echo began "$@" >> "` + seen + `"; echo words of the server; trap "echo ended >> ` + seen + `; exit 0" TERM; while :; do sleep 0.01; done' x `
	err := Sweep(t.Context(), parse(t, "--base-url", url, "--num-prompts", "6", "--input-len", "40", "--request-rate", "100"), SweepOptions{
		Commands: []string{command + "--a", command + "--b"}, Labels: []string{"A", "B"}, Vary: []string{"max-num-seqs=1,2"},
		Metrics: []string{url + "/metrics"}, Dir: dir, Title: "A & B", Notes: []string{"because"},
	}, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	var want string
	for _, f := range []string{"--a --max-num-seqs=1", "--a --max-num-seqs=2", "--b --max-num-seqs=1", "--b --max-num-seqs=2"} {
		want += "began " + f + "\nended\n"
	}
	if string(data) != want {
		t.Errorf("servers: %q, want %q", data, want)
	}
	for p, n := range prompts {
		if n != 4 {
			t.Errorf("%.40s… was asked %d times, want once of each server", p, n)
		}
	}
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"A &amp; B", "because", "<h2>A max-num-seqs=1 against B max-num-seqs=2</h2>", "What the server&#39;s processes and the client used", "<td>client</td>", "A max-num-seqs=2: rate 100"} {
		if !strings.Contains(string(page), part) && !strings.Contains(string(page), strings.ReplaceAll(part, "&#39;", "'")) {
			t.Errorf("the page has no %q", part)
		}
	}
	if log, err := os.ReadFile(filepath.Join(dir, "server-3.log")); err != nil || string(log) != "words of the server\n" {
		t.Errorf("log %q, %v", log, err)
	}
}

// Servers that alternate are restarted for each repetition. It sends all of them the same
// prompts, and no prompts of another repetition.
func TestSweepAlternates(t *testing.T) {
	var mu sync.Mutex
	prompts := map[string]int{}
	url := fake(t, func(path string, body map[string]any) {
		mu.Lock()
		defer mu.Unlock()
		if path == "/v1/completions" {
			prompts[fmt.Sprint(body["prompt"])]++
		}
	})
	dir := t.TempDir()
	seen := filepath.Join(dir, "seen")
	command := `sh -c 'echo began "$@" >> "` + seen + `"; trap "exit 0" TERM; while :; do sleep 0.01; done' x `
	points, err := Points(t.Context(), parse(t, "--base-url", url, "--num-prompts", "2", "--input-len", "40"), SweepOptions{
		Commands: []string{command + "--a", command + "--b"}, Labels: []string{"A", "B"}, Rates: []float64{100, 200}, Repeat: 3, Alternate: true,
		Metrics: []string{url + "/metrics"}, Dir: dir,
	}, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	var order string
	for i := range points {
		order += fmt.Sprintf("%s %g %d, ", points[i].Server, points[i].Rate, points[i].Repetition)
		if n := points[i].Figure("completed"); n != 2 {
			t.Errorf("run %d completed %g", i, n)
		}
	}
	var want, began string
	for r := range 3 {
		want += fmt.Sprintf("A 100 %d, A 200 %d, B 100 %d, B 200 %d, ", r, r, r, r)
		began += "began --a\nbegan --b\n"
	}
	if order != want {
		t.Errorf("runs: %s want %s", order, want)
	}
	if data, err := os.ReadFile(seen); err != nil || string(data) != began {
		t.Errorf("servers: %q, %v, want %q", data, err, began)
	}
	if len(prompts) != 3*2*2 {
		t.Errorf("%d different prompts", len(prompts))
	}
	for p, n := range prompts {
		if n != 2 {
			t.Errorf("%.40s… was asked %d times, want once of each server", p, n)
		}
	}
}

func TestSweepRefuses(t *testing.T) {
	for _, c := range []struct {
		o    SweepOptions
		want error
	}{
		{SweepOptions{Vary: []string{"a=1"}}, ErrOption},
		{SweepOptions{Commands: []string{"true"}, Labels: []string{"a", "b"}}, ErrOption},
		{SweepOptions{Commands: []string{"true"}, Vary: []string{"a"}}, ErrOption},
		{SweepOptions{Rates: make([]float64, maxRuns+1)}, ErrOption},
		{SweepOptions{Rates: []float64{0}}, ErrOption},
		{SweepOptions{Repeat: -1}, ErrOption},
		{SweepOptions{Rates: []float64{1, 2}, Repeat: maxRuns}, ErrOption},
		{SweepOptions{Commands: []string{"false"}}, ErrServer},
	} {
		c.o.Dir = t.TempDir()
		if err := Sweep(t.Context(), parse(t, "--model", "m", "--base-url", "http://127.0.0.1:1"), c.o, io.Discard, io.Discard); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.o, err, c.want)
		}
	}
}

// What is read of metrics is the sum over a server's engines, and of fill the mean.
func TestReadSample(t *testing.T) {
	var s report.Sample
	text := "vllm:kv_cache_usage_perc{a=\"x y\",engine=\"0\"} 0.2\nvllm:kv_cache_usage_perc 0.4 17\nvllm:generation_tokens_total{e=\"}\"} 5\nvllm:generation_tokens_total 7e0\nprocess_cpu_seconds_total 1.5\nprocess_cpu_seconds_total x\nother 3\n\n{\n"
	if err := readSample(strings.NewReader(text), &s); err != nil || math.Abs(s.Fill-0.3) > 1e-9 || s.Tokens != 12 || s.CPU != 1.5 || !s.HasFill || !s.Generates {
		t.Errorf("%+v, %v", s, err)
	}
}
