// Command testall is `make test`: every check and every test of the tree, what
// failed in full, what each package cost, and one line that counts.
//
// It runs the steps of one literal table in order, some of them two at a time, and
// goes on after a failure, so that a run tells all that is wrong. Invariant: it exits with 0 only if each
// step ran, no test failed, and no test was skipped that testdata/skips does not
// list with its reason.
//
// It installs nothing (the Makefile does) and decides nothing by itself: a test
// that must not run somewhere says so in the tables.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"iter"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	var o options
	flag.BoolVar(&o.soak, "soak", false, "the long form: TANDEM_SOAK=1 for every test, and hours of time")
	flag.StringVar(&o.log, "log", "", "file for the whole output of every test, with its seeds")
	flag.StringVar(&o.record, "record", "", "file for a page of what ran and what came out")
	flag.StringVar(&o.run, "run", "", "only tests that match, as go test has it")
	flag.Uint64Var(&o.seed, "seed", 1, "where a soak begins to draw")
	flag.Float64Var(&o.minutes, "minutes", wholeMinutes, "how long a soak's mixed load lasts")
	flag.DurationVar(&o.fuzz, "fuzz", wholeFuzz, "how long a soak fuzzes each target")
	flag.Usage = func() {
		fmt.Fprintf(os.Stderr, "Usage: go run ./internal/arch/testall [flags] [STEP ...]\n\nSteps, all of them by default:\n")
		for _, s := range steps {
			fmt.Fprintf(os.Stderr, "  %-12s %s\n", s.name, s.what)
		}
		fmt.Fprintln(os.Stderr, "\nFlags:")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o.only, o.out = flag.Args(), os.Stdout
	ok, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testall:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// options are one run's.
type options struct {
	soak        bool
	log, record string // files, or empty
	run         string // which tests of the steps, or empty
	seed        uint64
	minutes     float64       // of mixed load
	fuzz        time.Duration // per target
	only        []string      // names of steps; empty: all
	out         io.Writer
}

// wants says whether a step runs: one that is named, or else one of this form.
func (o *options) wants(s step) bool {
	if len(o.only) > 0 {
		return slices.Contains(o.only, s.name)
	}
	return o.soak && s.soak || !o.soak && !s.long
}

// env returns the environment that a soak adds for its tests and programs.
func (o *options) env() []string {
	if !o.soak {
		return nil
	}
	return []string{"TANDEM_SOAK=1", fmt.Sprintf("TANDEM_SOAK_SEED=%d", o.seed), fmt.Sprintf("TANDEM_SOAK_MINUTES=%g", o.minutes)}
}

// allPages reports whether each of the steps that ran writes a page of its own.
func allPages(ran []string) bool {
	return !slices.ContainsFunc(steps, func(s step) bool { return slices.Contains(ran, s.name) && !s.page })
}

// groups yields the wanted steps in order: neighbours that may run together in one
// group, each of the others alone.
func groups(all []step, wanted func(step) bool) iter.Seq[[]step] {
	return func(yield func([]step) bool) {
		var group []step
		for _, s := range all {
			if !wanted(s) {
				continue
			}
			if len(group) > 0 && !(s.together && group[0].together) {
				if !yield(group) {
					return
				}
				group = nil
			}
			group = append(group, s)
		}
		if len(group) > 0 {
			yield(group)
		}
	}
}

// run says whether all went well.
func run(ctx context.Context, o options) (ok bool, err error) {
	for _, name := range o.only {
		if !slices.ContainsFunc(steps, func(s step) bool { return s.name == name }) {
			return false, fmt.Errorf("no step is called %q", name)
		}
	}
	packages, err := listPackages(ctx)
	if err != nil {
		return false, err
	}
	skips, err := readSkips("internal/arch/testdata/skips")
	if err != nil {
		return false, err
	}
	r := &report{out: o.out, log: io.Discard, skips: skips, began: time.Now()}
	if o.log != "" {
		f, err := os.Create(o.log)
		if err != nil {
			return false, err
		}
		defer f.Close()
		r.log = f
	}
	var ran []string
	for group := range groups(steps, o.wants) {
		for _, s := range group {
			ran = append(ran, s.name)
		}
		r.together(group, func(r *report, s step) {
			s.env = append(slices.Clone(s.env), o.env()...)
			switch {
			case s.packages == nil:
				runCheck(ctx, r, s)
			case s.fuzz:
				runFuzz(ctx, r, s, s.packages(packages), o.fuzz)
			default:
				runTests(ctx, r, s, s.packages(packages), o)
			}
		})
		if ctx.Err() != nil {
			r.fail(group[len(group)-1].name, "interrupted", "")
			break
		}
	}
	r.summary()
	if o.record != "" && !allPages(ran) {
		if err := r.record(o.record, o, ran); err != nil {
			return false, err
		}
	}
	return len(r.failures) == 0, nil
}

// short is a package's name without the module's.
func short(pkg string) string {
	if pkg == module {
		return "."
	}
	return strings.TrimPrefix(pkg, module+"/")
}
