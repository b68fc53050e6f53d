package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// point is a run of one request: its first token after ttft, nine more after gap each.
func point(server string, rate float64, ttft, gap time.Duration) report.Point {
	o := load.Outcome{First: ttft, Last: ttft + 9*gap, Chunks: 10}
	for range 9 {
		o.ITL = append(o.ITL, gap)
	}
	one := func(int) int { return 10 }
	s := report.Summarize(&load.Record{Outcomes: []load.Outcome{o}, Duration: time.Second}, report.Options{Percentiles: []float64{99}}, one, one)
	return report.Point{Server: server, Rate: rate, Summary: s}
}

// The best chunk size has the shortest gaps of those whose first tokens are not late.
func TestBest(t *testing.T) {
	const ms = time.Millisecond
	points := []report.Point{point("", 1, 200*ms, 10*ms), point("", 1, 110*ms, 20*ms), point("", 1, 100*ms, 30*ms)}
	if got, err := best(points, []string{"128", "256", "512"}); err != nil || got != 256 {
		t.Errorf("%d, %v, want 256", got, err)
	}
	if _, err := best(points, []string{"128"}); err == nil {
		t.Error("three runs of one chunk size")
	}
}

// The page has medians over repetitions, and the disaggregated fleet's share of the
// other's.
func TestPage(t *testing.T) {
	const ms = time.Millisecond
	var points []report.Point
	for _, gap := range []time.Duration{4, 5, 60} {
		points = append(points, point(disaggregated, 2, 100*ms, gap*ms), point(colocated, 2, 50*ms, 20*ms))
	}
	o := options{repeat: 3, seconds: 60, chunk: 512, capacity: 4, ttft: time.Second, tpot: 20 * ms}
	page := o.page(points, []float64{2}, []string{"50 %"})
	if want := "| 50 % | 5, 20: 0.25 × | 100, 50: 2.00 × | 100, 50: 2.00 × |"; !strings.Contains(page, want) {
		t.Errorf("no %q in\n%s", want, page)
	}
}

// The mix is drawn in its shares, and the estimate's sides are both served whole.
func TestEstimate(t *testing.T) {
	of, err := kinds()
	if err != nil {
		t.Fatal(err)
	}
	long, all := 0, trace(4000, 10, of)
	for i := range all {
		if all[i].Tokens == 1024 && all[i].Output == 16 {
			long++
		} else if all[i].Tokens != 64 || all[i].Output != 96 {
			t.Fatalf("a request of %d and %d tokens", all[i].Tokens, all[i].Output)
		}
	}
	if share := float64(long) / 4000; math.Abs(share-0.2) > 0.03 {
		t.Errorf("%.3f of the prompts are long", share)
	}
	if span := all[len(all)-1].At.Seconds(); math.Abs(span-400) > 40 {
		t.Errorf("4000 requests at 10/s take %.0f s", span)
	}
	text, err := estimate([]int{2}, []float64{0.5})
	if err != nil || !strings.Contains(text, "| 2 | 1P1D steps of ") || !strings.Contains(text, "estimate: Llama-3.1-8B") {
		t.Errorf("%v\n%s", err, text)
	}
}

// The model's parameters are those that its name promises, and its tokenizer reads
// what it writes: a token a byte.
func TestModel(t *testing.T) {
	if n := parameters(); n < 120_000_000 || n > 130_000_000 {
		t.Errorf("%d parameters", n)
	}
	dir := t.TempDir()
	if err := shape.Tokenizer(dir); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(data)
	if err != nil {
		t.Fatal(err)
	}
	const text = "two cores,\n\tzwei Kerne – ½\x00"
	ids := tok.Encode(text, false)
	if len(ids) != len(text) {
		t.Errorf("%d tokens of %d bytes", len(ids), len(text))
	}
	if got := tok.Decode(ids, true); got != text {
		t.Errorf("%q came back as %q", text, got)
	}
}
