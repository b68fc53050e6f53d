package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// maxRuns bounds a sweep.
const maxRuns = 256

// SweepOptions are the flags of bench sweep besides those of serve.
type SweepOptions struct {
	Rates         []float64 // empty: the one of --request-rate
	Concurrencies []int     // empty: the one of --max-concurrency
	Dir           string    // of the report
	Pause         time.Duration
}

// Sweep runs bench serve for each rate and concurrency and writes report.html,
// sweep.csv and sweep.json. A run in which nothing succeeded is in them as such.
func Sweep(ctx context.Context, o *Options, s SweepOptions, out, errOut io.Writer) error {
	rates, concurrencies := s.Rates, s.Concurrencies
	if len(rates) == 0 {
		rates = []float64{o.RequestRate}
	}
	if len(concurrencies) == 0 {
		concurrencies = []int{o.MaxConcurrency}
	}
	if n := len(rates) * len(concurrencies); n > maxRuns {
		return fmt.Errorf("%w: %d runs, want at most %d", ErrOption, n, maxRuns)
	}
	for _, r := range rates {
		if !(r > 0) {
			return fmt.Errorf("%w: --request-rates %g: want more than 0", ErrOption, r)
		}
	}
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return err
	}
	var points []report.Point
	var results []report.Object
	var facts []string
	for _, c := range concurrencies {
		for _, rate := range rates {
			if len(points) > 0 {
				select { // the server settles between runs
				case <-time.After(s.Pause):
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			one := *o
			one.RequestRate, one.MaxConcurrency = rate, c
			one.Seed += uint64(len(points)) // other prompts: a run must not find those of the one before in a prefix cache
			p := report.Point{Rate: rate, Concurrency: c}
			fmt.Fprintf(out, "\nRun %d of %d: %s\n", len(points)+1, len(rates)*len(concurrencies), p.Name())
			res, err := Serve(ctx, &one, out, errOut)
			if err != nil && (res == nil || !errors.Is(err, ErrFailed)) {
				return err
			}
			p.Summary, p.Limited = res.Summary, res.Self.Overloaded
			points = append(points, p)
			results = append(results, res.Summary.Result(res.Head, false))
			facts = []string{
				"model " + res.Head.Model + " at " + one.BaseURL + one.Endpoint,
				fmt.Sprintf("dataset %s, %d requests per run, burstiness %g, seeds from %d on, one per run", one.Data.Name, res.Head.NumPrompts, one.Burstiness, o.Seed),
				"finished " + res.Head.Date.Format(time.RFC3339),
			}
			if len(o.GoodputSpec) > 0 {
				facts = append(facts, fmt.Sprintf("objectives in milliseconds: %v", o.GoodputSpec))
			}
		}
	}
	return writeSweep(s.Dir, facts, points, results, out)
}

func writeSweep(dir string, facts []string, points []report.Point, results []report.Object, out io.Writer) error {
	for name, write := range map[string]func(io.Writer) error{
		"sweep.csv":   func(w io.Writer) error { return report.WriteCSV(w, points) },
		"sweep.json":  func(w io.Writer) error { return json.NewEncoder(w).Encode(results) },
		"report.html": func(w io.Writer) error { return report.WritePage(w, "Sweep", facts, points) },
	} {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if err := errors.Join(write(f), f.Close()); err != nil {
			return fmt.Errorf("write %s: %w", f.Name(), err)
		}
	}
	_, err := fmt.Fprintf(out, "\nWrote %s with sweep.csv and sweep.json beside it.\n", filepath.Join(dir, "report.html"))
	return err
}
