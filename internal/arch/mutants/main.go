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
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
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
)

// packages are the packages that a run samples: the deciders, whose purity internal/arch tests,
// and the two roles of nodes.
var packages = []string{
	"internal/lengths", "gateway/admit", "gateway/exchange/choice", "gateway/liveness", "engine/scheduler", "engine/kvcache", "engine/memory", "gateway/route", "kvtransfer/lease", "prefill/line", "decode/course",
	"decode", "prefill",
}

// notSampled lists pure packages that a run leaves out, with the reason.
var notSampled = map[string]string{
	"engine/grammar":      "its tests take 10 s, so that its share of a sample would take as long as all others",
	"internal/explainlog": "it decides nothing: a wrong explanation is seen by its reader",
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
	for _, r := range s.results {
		switch {
		case r.reason != "":
			equivalents++
		case r.fate == survived:
			survivors++
		default:
			kills++
		}
	}
	return kills, survivors, equivalents
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

// load parses the packages below root.
func load(root string, names []string) ([]*sampled, error) {
	var all []*sampled
	for _, name := range names {
		cmd := exec.Command("go", "list", "-f", `{{join .GoFiles "\n"}}`, "./"+name)
		cmd.Dir, cmd.Env, cmd.Stderr = root, append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list %s: %w", name, err)
		}
		s := &sampled{name: name}
		for _, f := range strings.Fields(string(out)) {
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

// knownEquivalents returns the list as a map from key to reason. An entry that
// matches no mutant is an error, so that the list cannot outlive its code.
func knownEquivalents(path string, all []*sampled) (map[string]string, error) {
	list, err := readEquivalents(path)
	if err != nil {
		return nil, err
	}
	keys := map[string]bool{}
	for _, s := range all {
		for _, m := range s.mutants {
			keys[m.key()] = true
		}
	}
	known := map[string]string{}
	for _, e := range list {
		if !keys[e.key] {
			return nil, fmt.Errorf("%s: matches no mutant: %s: remove it, or write the line as it is now", path, e.key)
		}
		known[e.key] = e.reason
	}
	return known, nil
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
	dir, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	switch f, out := test(ctx, dir, s.name, nil, 10*minTimeout); {
	case ctx.Err() != nil:
		return ctx.Err()
	case f != survived:
		return fmt.Errorf("the tests of %s fail without any change:\n%s", s.name, out)
	}
	s.timeout = max(minTimeout, timeoutRatio*time.Since(began))

	draw := order(s.mutants, o.seed)
	var mu sync.Mutex
	var failure error
	next, good, running := 0, 0, 0
	done := sync.NewCond(&mu)
	// take returns the next mutant to run, or nil when enough compiled.
	take := func() *mutant {
		mu.Lock()
		defer mu.Unlock()
		for {
			if failure != nil || ctx.Err() != nil || good >= s.want || next == len(draw) {
				return nil
			}
			if good+running < s.want {
				running++
				next++
				return draw[next-1]
			}
			done.Wait()
		}
	}
	var workers sync.WaitGroup
	for range max(1, o.workers) {
		workers.Go(func() {
			own, err := os.MkdirTemp(dir, "")
			for m := take(); m != nil; m = take() {
				f, kept := earlier.fate(m)
				if err == nil && !kept {
					f, _, err = try(ctx, own, s.name, m, s.timeout)
				}
				mu.Lock()
				running--
				if kept {
					s.kept++
				} else if err == nil && ctx.Err() == nil {
					err = earlier.add(m, f)
				}
				switch {
				case err != nil:
					failure = err
				case ctx.Err() != nil:
				case f == broken:
					s.rejected++
				default:
					good++
					s.results = append(s.results, result{m, f, known[m.key()]})
					if f == survived && known[m.key()] == "" {
						fmt.Fprintf(o.out, "survived: %s:%d: %s\n", m.file, m.line, describe(m))
					}
				}
				done.Broadcast()
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	s.took = time.Since(began)
	slices.SortFunc(s.results, func(a, b result) int { return strings.Compare(a.m.key(), b.m.key()) })
	if failure != nil {
		return failure
	}
	return ctx.Err()
}

// try runs the package's tests with one mutant in place.
func try(ctx context.Context, dir, pkg string, m *mutant, timeout time.Duration) (fate, string, error) {
	text, err := os.ReadFile(m.file)
	if err != nil {
		return 0, "", err
	}
	path, err := filepath.Abs(m.file)
	if err != nil {
		return 0, "", err
	}
	f, out := test(ctx, dir, pkg, map[string][]byte{path: m.apply(text)}, timeout)
	return f, out, nil
}

// test runs go test on a package of the working directory with some files
// replaced.
func test(ctx context.Context, dir, pkg string, files map[string][]byte, timeout time.Duration) (fate, string) {
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for path, text := range files {
		other := filepath.Join(dir, filepath.Base(path))
		if err := os.WriteFile(other, text, 0o644); err != nil {
			return broken, err.Error()
		}
		overlay.Replace[path] = other
	}
	list, err := json.Marshal(overlay)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "overlay.json"), list, 0o644)
	}
	if err != nil {
		return broken, err.Error()
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
		return survived, text
	case strings.Contains(text, "[build failed]") || strings.Contains(text, "[setup failed]"):
		return broken, text
	case strings.Contains(text, "panic: test timed out"):
		return timedOut, text
	}
	return killed, text
}

// describe returns the operator, the line and what it becomes.
func describe(m *mutant) string {
	if m.becomes == "" {
		return fmt.Sprintf("%s: `%s`", m.operator, m.at)
	}
	return fmt.Sprintf("%s: `%s` → `%s`", m.operator, m.at, m.becomes)
}
