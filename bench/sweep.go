package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// maxRuns bounds a sweep.
const maxRuns = 256

// SweepOptions are the flags of bench sweep in addition to those of serve.
type SweepOptions struct {
	Rates         []float64 // empty: the one of --request-rate
	Concurrencies []int     // empty: the one of --max-concurrency
	RunSeconds    int       // duration of the arrivals at each finite rate; 0: --num-prompts
	Repeat        int       // runs of each load, each with its own prompts; 0: 1
	Alternate     bool      // each repetition goes around all servers, which are restarted
	Dir           string    // of the report
	Title         string
	Notes         []string // for the page
	Pause         time.Duration
	Before        string // command line, by the shell, before each run; empty: none

	Commands []string // servers to start, one after the other; empty: a server that already runs
	Labels   []string // of the commands, in their order
	Vary     []string // NAME=V1,V2: flags of the servers, all combinations
	Metrics  []string // URLs; empty: the known ones of the server
}

// variant is one server of a sweep.
type variant struct {
	name, command string
	flags         []string
}

// variants returns the servers of the sweep: each command with each combination of the
// values of its flags.
func (s *SweepOptions) variants() ([]variant, error) {
	if len(s.Commands) == 0 {
		if len(s.Vary) > 0 || len(s.Labels) > 0 {
			return nil, fmt.Errorf("%w: --vary and --serve-label are for servers that the sweep starts: give --serve-cmd, such as --serve-cmd 'tandem up --port 8000'", ErrOption)
		}
		return []variant{{}}, nil
	}
	if len(s.Labels) > 0 && len(s.Labels) != len(s.Commands) {
		return nil, fmt.Errorf("%w: --serve-label: %d labels for %d commands", ErrOption, len(s.Labels), len(s.Commands))
	}
	var vs []variant
	for i, c := range s.Commands {
		v := variant{command: c}
		if len(s.Commands) > 1 {
			v.name = c
		}
		if len(s.Labels) > 0 {
			v.name = s.Labels[i]
		}
		vs = append(vs, v)
	}
	for _, f := range s.Vary {
		name, values, ok := strings.Cut(f, "=")
		if name = strings.TrimLeft(name, "-"); !ok || name == "" {
			return nil, fmt.Errorf("%w: --vary %q: want NAME=V1,V2, such as max-num-batched-tokens=256,512", ErrOption, f)
		}
		var next []variant
		for _, v := range vs {
			for value := range strings.SplitSeq(values, ",") {
				label := strings.TrimSpace(v.name + " " + name + "=" + value)
				next = append(next, variant{label, v.command, append(slices.Clone(v.flags), "--"+name+"="+value)})
			}
		}
		vs = next
	}
	return vs, nil
}

// sweep is a sweep in progress.
type sweep struct {
	*Options
	SweepOptions
	out, errOut io.Writer
	total       int
	points      []report.Point
	results     []report.Object
	facts       []string
}

// Sweep runs bench serve for each server, concurrency and rate, and writes report.html,
// sweep.csv and sweep.json. They include runs in which no request succeeded.
func Sweep(ctx context.Context, o *Options, so SweepOptions, out, errOut io.Writer) error {
	_, err := Points(ctx, o, so, out, errOut)
	return err
}

// Points is Sweep and returns the runs in order.
func Points(ctx context.Context, o *Options, so SweepOptions, out, errOut io.Writer) ([]report.Point, error) {
	s := &sweep{Options: o, SweepOptions: so, out: out, errOut: errOut}
	if len(s.Rates) == 0 {
		s.Rates = []float64{o.RequestRate}
	}
	if len(s.Concurrencies) == 0 {
		s.Concurrencies = []int{o.MaxConcurrency}
	}
	variants, err := s.variants()
	if err != nil {
		return nil, err
	}
	if s.Repeat < 0 || s.Repeat > maxRuns {
		return nil, fmt.Errorf("%w: --repeat %d: want 1 to %d", ErrOption, s.Repeat, maxRuns)
	}
	s.Repeat = max(s.Repeat, 1)
	if s.total = len(s.Rates) * len(s.Concurrencies) * len(variants) * s.Repeat; s.total > maxRuns {
		return nil, fmt.Errorf("%w: %d runs, want at most %d", ErrOption, s.total, maxRuns)
	}
	for _, r := range s.Rates {
		if !(r > 0) {
			return nil, fmt.Errorf("%w: --request-rates %g: want more than 0", ErrOption, r)
		}
	}
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return nil, err
	}
	rounds, each := 1, s.Repeat
	if s.Alternate {
		rounds, each = s.Repeat, 1
	}
	for round := range rounds {
		for i, v := range variants {
			if err := s.server(ctx, round*len(variants)+i, v, round*each, each); err != nil {
				return nil, err
			}
		}
	}
	return s.points, s.write()
}

// server runs repetitions of all loads against one server, the n-th that is started.
func (s *sweep) server(ctx context.Context, n int, v variant, first, repetitions int) error {
	if v.command == "" {
		return s.loads(ctx, v, first, repetitions)
	}
	log, err := serverLog(s.Dir, n)
	if err != nil {
		return err
	}
	defer log.Close()
	fmt.Fprintf(s.out, "\nStarting %s %s\n", v.command, strings.Join(v.flags, " "))
	p, err := startServer(v.command, v.flags, log)
	if err != nil {
		return err
	}
	timeout := readyDefault
	if s.ReadyTimeout > 0 {
		timeout = time.Duration(s.ReadyTimeout) * time.Second
	}
	if err := p.ready(ctx, s.base(), timeout); err != nil {
		_ = p.drain() // the error is that it did not start
		return fmt.Errorf("%w; its output is in %s", err, log.Name())
	}
	err = s.loads(ctx, v, first, repetitions)
	return errors.Join(err, p.drain())
}

// loads runs each concurrency and rate for some of the repetitions.
func (s *sweep) loads(ctx context.Context, v variant, first, repetitions int) error {
	n := len(s.Concurrencies) * len(s.Rates)
	// Repetitions go around all loads, so that slow changes affect all of them.
	for try := first * n; try < (first+repetitions)*n; try++ {
		i, k := try%n/len(s.Rates), try%len(s.Rates)
		c, rate := s.Concurrencies[i], s.Rates[k]
		if len(s.points) > 0 {
			select { // the server settles between runs
			case <-time.After(s.Pause):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		one := *s.Options
		one.RequestRate, one.MaxConcurrency, one.metrics = rate, c, s.Metrics
		if len(one.metrics) == 0 {
			one.metrics = nodeMetrics(ctx, s.base(), v.command != "")
		}
		// Each run of a server has other prompts, so that none finds those of the run before
		// in a prefix cache. All servers get the same prompts.
		one.Seed += uint64(try)
		if s.RunSeconds > 0 && !math.IsInf(rate, 1) {
			one.NumPrompts = max(1, int(math.Round(rate*float64(s.RunSeconds))))
		}
		if err := s.run(ctx, v, &one, try/n); err != nil {
			return err
		}
	}
	return nil
}

// run is one run.
func (s *sweep) run(ctx context.Context, v variant, one *Options, repetition int) error {
	p := report.Point{Server: v.name, Rate: one.RequestRate, Concurrency: one.MaxConcurrency, Repetition: repetition}
	fmt.Fprintf(s.out, "\nRun %d of %d: %s\n", len(s.points)+1, s.total, p.Name())
	if s.Before != "" {
		before := exec.CommandContext(ctx, "sh", "-c", s.Before)
		before.Stdout, before.Stderr = s.errOut, s.errOut
		before.WaitDelay = time.Second // processes that it leaves behind may keep the output open
		if err := before.Run(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
			return fmt.Errorf("%w: --before-bench-cmd %q: %w", ErrOption, s.Before, err)
		}
	}
	res, err := Serve(ctx, one, s.out, s.errOut)
	if err != nil && (res == nil || !errors.Is(err, ErrFailed)) {
		return err
	}
	p.Summary, p.Limited, p.Start, p.Nodes, p.Client = res.Summary, res.Self.Overloaded, res.Record.Start, res.Nodes, res.Self.Cores
	s.points = append(s.points, p)
	if v.name != "" {
		res.Head.Metadata = append(res.Head.Metadata, report.Field{Key: "server", Value: v.name})
	}
	if s.Repeat > 1 {
		res.Head.Metadata = append(res.Head.Metadata, report.Field{Key: "repetition", Value: strconv.Itoa(repetition)})
	}
	s.results = append(s.results, res.Summary.Result(res.Head, false))
	load := fmt.Sprintf("%d requests per run", one.NumPrompts)
	if s.RunSeconds > 0 {
		load = fmt.Sprintf("%d s of arrivals per run", s.RunSeconds)
	}
	s.facts = []string{
		"model " + res.Head.Model + " at " + one.BaseURL + one.Endpoint,
		fmt.Sprintf("dataset %s, %s, burstiness %g, seeds from %d on, one per run of a server", one.Data.Name, load, one.Burstiness, s.Seed),
		"finished " + res.Head.Date.Format(time.RFC3339) + ", on " + report.Machine(),
	}
	return nil
}

// base is the server's URL.
func (s *sweep) base() string {
	if s.BaseURL != "" {
		return strings.TrimSuffix(s.BaseURL, "/")
	}
	return fmt.Sprintf("http://%s:%d", bracketed(s.Host), s.Port)
}

func (s *sweep) write() error {
	facts := s.facts
	if len(s.GoodputSpec) > 0 {
		facts = append(facts, fmt.Sprintf("objectives in milliseconds: %s", strings.Join(s.GoodputSpec, ", ")))
	}
	for i, c := range s.Commands {
		label := "server"
		if len(s.Labels) > 0 {
			label = s.Labels[i]
		}
		facts = append(facts, label+": "+c)
	}
	facts = append(facts, s.Notes...)
	title := s.Title
	if title == "" {
		title = "Sweep"
	}
	for name, write := range map[string]func(io.Writer) error{
		"sweep.csv":   func(w io.Writer) error { return report.WriteCSV(w, s.points) },
		"sweep.json":  func(w io.Writer) error { return json.NewEncoder(w).Encode(s.results) },
		"report.html": func(w io.Writer) error { return report.WritePage(w, title, facts, s.points) },
	} {
		f, err := os.Create(filepath.Join(s.Dir, name))
		if err != nil {
			return err
		}
		if err := errors.Join(write(f), f.Close()); err != nil {
			return fmt.Errorf("write %s: %w", f.Name(), err)
		}
	}
	_, err := fmt.Fprintf(s.out, "\nWrote %s with sweep.csv and sweep.json next to it.\n", filepath.Join(s.Dir, "report.html"))
	return err
}
