package report

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// side is a run of requests whose TTFT has this mean in seconds.
func side(seed uint64, mean float64) Run {
	rng := rand.New(rand.NewPCG(seed, 1))
	r := Run{RequestThroughput: 10 * mean, OutputThroughput: 5}
	for range 400 {
		r.TTFTs = append(r.TTFTs, mean*(1+0.3*rng.NormFloat64()))
		r.ITLs = append(r.ITLs, []float64{0.01, 0.03})
		r.OutputLens = append(r.OutputLens, 3)
		r.Errors = append(r.Errors, "")
	}
	return r
}

func row(t *testing.T, rows []Row, name string) Row {
	for _, r := range rows {
		if r.Name == name {
			return r
		}
	}
	t.Fatalf("no row %q", name)
	return Row{}
}

// A true change is found, and its interval contains the truth about as often as promised.
// No change is reported as a change about one time in twenty.
func TestCompareIntervals(t *testing.T) {
	const tries = 40
	held, found, false1 := 0, 0, 0
	for seed := range uint64(tries) {
		base := side(seed, 0.1)
		changed := row(t, Compare([]Run{base}, []Run{side(seed+1000, 0.11)}, seed), "Mean TTFT (ms)")
		if changed.Low < 0.1 && changed.High > 0.1 {
			held++
		}
		if changed.Resolved() {
			found++
		}
		if row(t, Compare([]Run{base}, []Run{side(seed+2000, 0.1)}, seed), "Mean TTFT (ms)").Resolved() {
			false1++
		}
	}
	if held < 34 || found < 36 || false1 > 6 {
		t.Errorf("of %d: interval held the truth %d times, the change was found %d times, none was called one %d times", tries, held, found, false1)
	}
}

func TestCompareFiles(t *testing.T) {
	rows := Compare([]Run{side(1, 0.1)}, []Run{side(2, 0.1)}, 0)
	if r := row(t, rows, "Request throughput (req/s)"); r.A != 1 || !math.IsNaN(r.Low) || r.Resolved() {
		t.Errorf("one run has an interval: %+v", r)
	}
	if r := row(t, rows, "Mean TPOT (ms)"); math.Abs(r.A-20) > 1e-9 || math.Abs(r.Change) > 1e-9 {
		t.Errorf("TPOT: %+v", r)
	}
	rows = Compare([]Run{side(1, 0.1), side(2, 0.1)}, []Run{side(3, 0.2), side(4, 0.2)}, 0)
	if r := row(t, rows, "Request throughput (req/s)"); r.Change != 1 || !r.Resolved() {
		t.Errorf("several runs: %+v", r)
	}
	var b bytes.Buffer
	if err := PrintRows(&b, rows); err != nil || !strings.Contains(b.String(), "+100.0%") || strings.Contains(b.String(), "--save-detailed") {
		t.Errorf("%v\n%s", err, b.String())
	}
	b.Reset()
	if err := PrintRows(&b, Compare([]Run{{RequestThroughput: 1}}, []Run{{RequestThroughput: 2}}, 0)); err != nil || !strings.Contains(b.String(), "--save-detailed") {
		t.Errorf("%v\n%s", err, b.String())
	}
	for text, want := range map[string]int{`{"request_throughput":1}`: 1, "{}\n{}": 2, "": -1, "{": -1, `{"ttfts":[1]}`: -1} {
		path := filepath.Join(t.TempDir(), "r.json")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		runs, err := Load(path)
		if want < 0 && !errors.Is(err, ErrFile) || want >= 0 && (err != nil || len(runs) != want) {
			t.Errorf("%q: %d runs, %v", text, len(runs), err)
		}
	}
}

// A resample's percentile is that of the samples written out.
func TestWeightedQuantiles(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 2))
		v, times := make([]float64, 1+rng.IntN(9)), []int(nil)
		for i := range v {
			v[i] = float64(i * i)
		}
		times = make([]int, len(v))
		draw(rng, times)
		var all []float64
		for i, n := range times {
			for range n {
				all = append(all, v[i])
			}
		}
		for _, p := range []float64{0, 50, 90, 99, 100} {
			if got, want := quantileOf("", p).of(v, times), Quantile(all, p); math.Abs(got-want) > 1e-9 {
				t.Fatalf("seed %d: P%g of %v is %g, want %g", seed, p, all, got, want)
			}
		}
	}
}
