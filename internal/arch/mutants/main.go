// Command mutants measures whether tests notice wrong code: it changes one
// place of a package's source, runs that package's own tests, and expects them
// to fail.
//
// A run draws its mutants from a seed, stratified over the packages: at least
// minPerPackage in each, the rest in proportion to their lines. Every line takes
// part, whether a test covers it or not. A mutant that does not compile is
// replaced by the next of the draw. A mutant is killed if a test fails, the
// process dies, or the tests run into their time limit; it survives if all pass.
// testdata/equivalents lists, with reasons, mutants that behave as the original
// does; they run too, and one that is killed is a wrong entry.
//
// Invariant: no file of the tree changes (mutants are overlays of go test), and
// the same seed and source draw the same mutants.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/build"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// packages are the packages that a run samples: the deciders, whose purity internal/arch tests,
// and the two roles of nodes.
var packages = []string{
	"deploy/planner", "deploy/planner/control", "internal/cost", "internal/lengths", "gateway/admit", "gateway/exchange/choice", "gateway/liveness", "engine/scheduler", "engine/kvcache", "engine/memory", "gateway/route", "kvtransfer/lease", "prefill/line", "decode/course",
	"decode", "prefill",
}

// notSampled lists pure packages that a run leaves out, with the reason.
var notSampled = map[string]string{
	"engine/grammar":            "its tests take 10 s, so that its share of a sample would take as long as all others",
	"gateway/render/parse":      "its tests take 10 s, as those of engine/grammar",
	"gateway/render/parse/args": "likewise: most of it is tested through gateway/render/parse",
	"internal/explainlog":       "it decides nothing: a wrong explanation is seen by its reader",
}

// Goals of a run of all packages.
const (
	wholeSample   = 330
	minPerPackage = 25
	minKilled     = 0.92 // of all, without equivalents
	minKilledEach = 0.85 // of each package's
	maxEquivalent = 0.05 // of all
)

const (
	minTimeout   = time.Minute // of one mutant's tests
	timeoutRatio = 6           // times what the package's tests take unchanged
	// maxMemory bounds the address space of the compiler and of the tests,
	// because a mutant may append forever.
	maxMemory = 6 << 30
)

func main() {
	o := options{out: os.Stdout}
	seed, err := strconv.ParseUint(os.Getenv("TANDEM_SOAK_SEED"), 10, 64)
	if err != nil {
		seed = 1
	}
	flag.Uint64Var(&o.seed, "seed", seed, "where the draw begins; the default is TANDEM_SOAK_SEED or 1")
	flag.IntVar(&o.sample, "n", wholeSample, "how many mutants of all packages together")
	flag.IntVar(&o.workers, "workers", runtime.NumCPU(), "how many run at a time")
	flag.StringVar(&o.record, "record", "", "file for a page of the results")
	flag.StringVar(&o.kills, "kills", "", "file that keeps which mutants were killed: a later run with it repeats only the others")
	flag.Usage = func() {
		fmt.Fprintf(os.Stderr, "Usage: go run ./internal/arch/mutants [flags] [PACKAGE ...]\n\nIn the module's root. Packages, all of them by default: %s\n\nFlags:\n", strings.Join(packages, ", "))
		flag.PrintDefaults()
	}
	flag.Parse()
	o.packages = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

type options struct {
	seed     uint64
	sample   int
	workers  int
	record   string
	kills    string
	packages []string // empty: all
	out      io.Writer
}

// result is the result of one mutant.
type result struct {
	m      *mutant
	fate   fate
	reason string // of an equivalent
}

type fate int

const (
	survived fate = iota
	killed
	timedOut // also killed
	broken   // does not compile
)

// sampled is one package's part of a run.
type sampled struct {
	name     string
	lines    int // of source
	want     int // mutants to draw
	mutants  []*mutant
	timeout  time.Duration
	took     time.Duration
	results  []result
	rejected int // drawn, but did not compile
	kept     int // results of earlier runs
}

// count returns how many were killed, survived, and are equivalent.
func (s *sampled) count() (kills, survivors, equivalents int) {
	equivalents = len(s.chosen(func(r result) bool { return r.reason != "" }))
	survivors = len(s.chosen(func(r result) bool { return r.reason == "" && r.fate == survived }))
	return len(s.results) - survivors - equivalents, survivors, equivalents
}

// run draws, runs and reports mutants, and returns an error if the tests miss a goal.
func run(ctx context.Context, o options) error {
	began := time.Now()
	names := o.packages
	if len(names) == 0 {
		names = packages
	}
	all, err := load(".", packages)
	if err != nil {
		return err
	}
	known, err := knownEquivalents("internal/arch/mutants/testdata/equivalents", all)
	if err != nil {
		return err
	}
	earlier, err := openKills(o.kills)
	if err != nil {
		return err
	}
	defer earlier.close()
	share(all, o.sample)
	var chosen []*sampled
	for _, name := range names {
		i := slices.IndexFunc(all, func(s *sampled) bool { return s.name == name })
		if i < 0 {
			return fmt.Errorf("%q is not among the packages: %s", name, strings.Join(packages, ", "))
		}
		chosen = append(chosen, all[i])
	}
	fmt.Fprintf(o.out, "seed %d\n", o.seed)
	for _, s := range chosen {
		if err := s.run(ctx, o, known, earlier); err != nil {
			return err
		}
		fmt.Fprintf(o.out, "%s\n", s.summary())
	}
	failures := judge(chosen)
	if o.record != "" {
		if err := os.WriteFile(o.record, []byte(page(o, chosen, failures, began)), 0o644); err != nil {
			return err
		}
	}
	if len(failures) > 0 {
		return errors.New(strings.Join(failures, "\n"))
	}
	return nil
}

// load parses the packages below root, without cgo.
func load(root string, names []string) ([]*sampled, error) {
	pure := build.Default
	pure.CgoEnabled = false
	var all []*sampled
	for _, name := range names {
		p, err := pure.ImportDir(filepath.Join(root, name), 0)
		if err != nil {
			return nil, err
		}
		s := &sampled{name: name}
		for _, f := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(root, name, f))
			if err != nil {
				return nil, err
			}
			ms, err := mutants(name+"/"+f, text)
			if err != nil {
				return nil, err
			}
			s.lines += strings.Count(string(text), "\n")
			s.mutants = append(s.mutants, ms...)
		}
		all = append(all, s)
	}
	return all, nil
}

// share sets how many mutants each package has in a sample of n.
func share(all []*sampled, n int) {
	lines := 0
	for _, s := range all {
		lines += s.lines
	}
	rest := max(0, n-minPerPackage*len(all))
	for _, s := range all {
		s.want = min(minPerPackage, len(s.mutants)/3) + (rest*s.lines+lines-1)/lines // fewer of a small package
	}
}

// run runs the package's part of the sample.
func (s *sampled) run(ctx context.Context, o options, known map[string]string, earlier *kills) error {
	began := time.Now()
	switch f, out, err := try(ctx, s.name, nil, 10*minTimeout); {
	case ctx.Err() != nil || err != nil:
		return cmp.Or(ctx.Err(), err)
	case f != survived:
		return fmt.Errorf("the tests of %s fail without any change:\n%s", s.name, out)
	}
	s.timeout = max(minTimeout, timeoutRatio*time.Since(began))
	// Each round draws as many mutants as are missing, so that broken ones are replaced.
	for draw := order(s.mutants, o.seed); len(s.results) < s.want && len(draw) > 0; {
		n := min(len(draw), s.want-len(s.results))
		if err := s.round(ctx, o, draw[:n], known, earlier); err != nil {
			return err
		}
		draw = draw[n:]
	}
	s.took = time.Since(began)
	slices.SortFunc(s.results, func(a, b result) int { return strings.Compare(a.m.key(), b.m.key()) })
	return nil
}

// round adds the results of mutants that compile. It runs them on the workers.
func (s *sampled) round(ctx context.Context, o options, ms []*mutant, known map[string]string, earlier *kills) error {
	workers, ctx := errgroup.WithContext(ctx)
	workers.SetLimit(max(1, o.workers))
	var mu sync.Mutex
	for _, m := range ms {
		workers.Go(func() error {
			f, kept := earlier.fate(m)
			if !kept {
				var err error
				if f, _, err = try(ctx, s.name, m, s.timeout); cmp.Or(ctx.Err(), err) != nil {
					return cmp.Or(ctx.Err(), err)
				}
				if err := earlier.add(m, f); err != nil {
					return err
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if kept {
				s.kept++
			}
			if f == broken {
				s.rejected++
				return nil
			}
			s.results = append(s.results, result{m, f, known[m.key()]})
			if f == survived && known[m.key()] == "" {
				fmt.Fprintf(o.out, "survived: %s:%d: %s\n", m.file, m.line, describe(m))
			}
			return nil
		})
	}
	return workers.Wait()
}

// try runs go test on a package of the working directory with a mutant in place; nil: none.
func try(ctx context.Context, pkg string, m *mutant, timeout time.Duration) (fate, string, error) {
	dir, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return 0, "", err
	}
	defer os.RemoveAll(dir)
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	if m != nil {
		text, err := os.ReadFile(m.file)
		if err != nil {
			return 0, "", err
		}
		other := filepath.Join(dir, filepath.Base(m.file))
		if err := os.WriteFile(other, m.apply(text), 0o644); err != nil {
			return 0, "", err
		}
		overlay.Replace[m.file] = other
	}
	list, err := json.Marshal(overlay)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "overlay.json"), list, 0o644)
	}
	if err != nil {
		return 0, "", err
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", fmt.Sprintf(`ulimit -v %d; exec "$@"`, maxMemory>>10), "sh",
		"go", "test", "-overlay", filepath.Join(dir, "overlay.json"), "-p", "1", "-vet=off", "-short", "-failfast", "-count=1",
		"-timeout", timeout.String(), "./"+pkg)
	// A soak's own variables would have the tests take their long form.
	short := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "TANDEM_SOAK") })
	cmd.Env = append(short, "CGO_ENABLED=0", "GOFLAGS=")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	text := string(out)
	switch {
	case err == nil:
		return survived, text, nil
	case strings.Contains(text, "[build failed]") || strings.Contains(text, "[setup failed]"):
		return broken, text, nil
	case strings.Contains(text, "panic: test timed out"):
		return timedOut, text, nil
	}
	return killed, text, nil
}

// describe returns the operator, the line and what it becomes.
func describe(m *mutant) string {
	if m.becomes == "" {
		return fmt.Sprintf("%s: `%s`", m.operator, m.at)
	}
	return fmt.Sprintf("%s: `%s` → `%s`", m.operator, m.at, m.becomes)
}
