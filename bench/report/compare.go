package report

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
)

// ErrFile is wrapped by every error about a result file.
var ErrFile = errors.New("report: bad result file")

// maxResult bounds a result file in bytes.
const maxResult = 1 << 30

// Run is a saved result, with the fields that comparisons need.
type Run struct {
	RequestThroughput float64     `json:"request_throughput"`
	OutputThroughput  float64     `json:"output_throughput"`
	Goodput           *float64    `json:"request_goodput"`
	OutputLens        []int       `json:"output_lens"`
	TTFTs             []float64   `json:"ttfts"` // seconds, 0 for a failed request
	ITLs              [][]float64 `json:"itls"`
	Errors            []string    `json:"errors"`
}

// Load reads a file of results, one object after the other.
func Load(path string) ([]Run, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxResult+1))
	if err == nil && len(data) > maxResult {
		err = fmt.Errorf("more than %d bytes", maxResult)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrFile, path, err)
	}
	var runs []Run
	for d := json.NewDecoder(bytes.NewReader(data)); ; {
		var r Run
		if err := d.Decode(&r); err == io.EOF {
			break
		} else if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrFile, path, err)
		}
		if len(r.ITLs) != len(r.TTFTs) || len(r.OutputLens) != len(r.TTFTs) || len(r.Errors) != len(r.TTFTs) {
			return nil, fmt.Errorf("%w: %s: its lists of requests have different lengths", ErrFile, path)
		}
		runs = append(runs, r)
	}
	if len(runs) == 0 {
		return nil, fmt.Errorf("%w: %s has no result", ErrFile, path)
	}
	return runs, nil
}

// Row is one figure of two sides. The interval is of the change B/A−1, and NaN if there
// are too few samples.
type Row struct {
	Name      string
	A, B      float64
	Change    float64 // share
	Low, High float64 // 95 % confidence
}

// Resolved reports whether the interval excludes a change by chance.
func (r Row) Resolved() bool { return r.Low > 0 || r.High < 0 }

// resamples of the bootstrap: enough for two digits of a 95 % interval.
const resamples = 1000

// Compare compares two sides' figures. Intervals are bootstrapped: from requests for
// latencies, which need --save-detailed, and from whole runs for throughputs, which need
// a few runs on each side. Requests of one run are not independent under load, so that
// the intervals of latencies are too narrow rather than too wide. Several runs are more
// reliable than one.
func Compare(a, b []Run, seed uint64) []Row {
	var rows []Row
	rng := rand.New(rand.NewPCG(seed, 0x636f6d70617265))
	add := func(name string, of func([]Run) []float64, figures ...figure) {
		va, vb := of(a), of(b)
		if len(va) == 0 || len(vb) == 0 {
			return
		}
		slices.Sort(va)
		slices.Sort(vb)
		rows = append(rows, bootstrap(rng, name, va, vb, figures)...)
	}
	add("Request throughput (req/s)", perRun(func(r *Run) (float64, bool) { return r.RequestThroughput, true }), average)
	add("Output token throughput (tok/s)", perRun(func(r *Run) (float64, bool) { return r.OutputThroughput, true }), average)
	add("Request goodput (req/s)", perRun(func(r *Run) (float64, bool) {
		if r.Goodput == nil {
			return 0, false
		}
		return *r.Goodput, true
	}), average)
	for _, m := range []struct {
		name string
		of   func([]Run) []float64
	}{{"TTFT", perRequest(func(r *Run, i int) (float64, bool) { return r.TTFTs[i] * 1e3, true })},
		{"TPOT", perRequest(func(r *Run, i int) (float64, bool) {
			return sum(r.ITLs[i]) * 1e3 / float64(max(1, r.OutputLens[i]-1)), r.OutputLens[i] > 1
		})},
		{"longest ITL", perRequest(func(r *Run, i int) (float64, bool) {
			if len(r.ITLs[i]) == 0 {
				return 0, false
			}
			return slices.Max(r.ITLs[i]) * 1e3, true
		})},
		{"E2EL", perRequest(func(r *Run, i int) (float64, bool) { return (r.TTFTs[i] + sum(r.ITLs[i])) * 1e3, true })},
	} {
		add(m.name+" (ms)", m.of, figure{"Mean ", average.of}, quantileOf("Median ", 50), quantileOf("P99 ", 99))
	}
	return rows
}

// figure is one number of sorted samples. times is how often each sample is counted.
type figure struct {
	prefix string // of the row's name
	of     func(sorted []float64, times []int) float64
}

var average = figure{"", func(sorted []float64, times []int) (mean float64) {
	for i, v := range sorted {
		mean += v * float64(times[i])
	}
	return mean / float64(len(sorted))
}}

// quantileOf returns the figure of a percentile.
func quantileOf(prefix string, percent float64) figure {
	return figure{prefix, func(sorted []float64, times []int) float64 {
		at := percent / 100 * float64(len(sorted)-1)
		whole := int(at)
		for i, seen := 0, 0; i < len(sorted); i++ {
			if seen += times[i]; seen <= whole {
				continue
			}
			next := i // index of the next sample
			if seen == whole+1 {
				for next++; next < len(sorted) && times[next] == 0; next++ {
				}
			}
			if next >= len(sorted) {
				return sorted[i]
			}
			return sorted[i] + (sorted[next]-sorted[i])*(at-float64(whole))
		}
		return math.NaN()
	}}
}

// bootstrap returns the rows of some figures of the same samples.
func bootstrap(rng *rand.Rand, name string, a, b []float64, figures []figure) []Row {
	ta, tb := make([]int, len(a)), make([]int, len(b))
	for i := range ta {
		ta[i] = 1
	}
	for i := range tb {
		tb[i] = 1
	}
	rows := make([]Row, len(figures))
	changes := make([][]float64, len(figures))
	for i, f := range figures {
		r := Row{Name: f.prefix + name, A: f.of(a, ta), B: f.of(b, tb), Low: math.NaN(), High: math.NaN()}
		r.Change = r.B/r.A - 1
		rows[i] = r
	}
	if len(a) < 2 || len(b) < 2 {
		return rows
	}
	for range resamples {
		draw(rng, ta)
		draw(rng, tb)
		for i, f := range figures {
			if c := f.of(b, tb)/f.of(a, ta) - 1; !math.IsNaN(c) {
				changes[i] = append(changes[i], c)
			}
		}
	}
	for i := range rows {
		if len(changes[i]) > 0 {
			slices.Sort(changes[i])
			rows[i].Low, rows[i].High = Quantile(changes[i], 2.5), Quantile(changes[i], 97.5)
		}
	}
	return rows
}

// draw sets how often each sample is in one resample.
func draw(rng *rand.Rand, times []int) {
	clear(times)
	for range times {
		times[rng.IntN(len(times))]++
	}
}

func perRun(f func(*Run) (float64, bool)) func([]Run) []float64 {
	return func(runs []Run) (v []float64) {
		for i := range runs {
			if x, ok := f(&runs[i]); ok {
				v = append(v, x)
			}
		}
		return v
	}
}

func perRequest(f func(*Run, int) (float64, bool)) func([]Run) []float64 {
	return func(runs []Run) (v []float64) {
		for i := range runs {
			for j := range runs[i].TTFTs {
				if x, ok := f(&runs[i], j); ok && runs[i].Errors[j] == "" {
					v = append(v, x)
				}
			}
		}
		return v
	}
}

func sum(v []float64) (s float64) {
	for _, x := range v {
		s += x
	}
	return s
}

// PrintRows writes a table of the rows, with a note if it has no latencies.
func PrintRows(w io.Writer, rows []Row) error {
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "%-34s %12s %12s %9s  %s\n", "", "A", "B", "change", "95 % interval")
	latencies := false
	for _, r := range rows {
		latencies = latencies || strings.HasSuffix(r.Name, "(ms)")
		interval, mark := "needs more runs", ""
		if !math.IsNaN(r.Low) {
			interval = fmt.Sprintf("%+.1f %% to %+.1f %%", r.Low*100, r.High*100)
			if !r.Resolved() {
				mark = "  (may be chance)"
			}
		}
		fmt.Fprintf(b, "%-34s %12.2f %12.2f %+8.1f%%  %s%s\n", r.Name, r.A, r.B, r.Change*100, interval, mark)
	}
	if !latencies {
		fmt.Fprintln(b, "No latencies: comparing them needs --save-detailed on both sides.")
	}
	return b.Flush()
}
