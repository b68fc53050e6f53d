// Command verdict judges the results of the steps of `make test` and `make soak`.
//
// The Makefile runs each step, keeps its exit status in DIR/STEP/status, and has gotestsum keep the
// output of go test -json in DIR/STEP/*.json. The command counts the tests of all steps and prints
// failures, notes and durations; its last line is the result.
//
// Invariant: the exit status is 0 only if each step ran and succeeded, each package with tests ran
// one, and each skipped test is listed with its reason in internal/arch/testdata/skips.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"gotest.tools/gotestsum/testjson"

	"github.com/tandem-serving/tandem/internal/arch/provenance"
)

const module = "github.com/tandem-serving/tandem"

func main() {
	skips := flag.String("skips", "internal/arch/testdata/skips", "list of tests that may skip")
	log := flag.String("log", "", "file for the output of every test")
	page := flag.String("page", "", "file for a page of the results")
	title := flag.String("title", "Soak", "title of that page")
	command := flag.String("command", "", "command that the page names")
	picked := flag.Bool("picked", false, "a package without a matching test is no failure: the run picked tests")
	flag.Parse()
	r := &report{log: io.Discard, picked: *picked}
	failed := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "verdict:", err)
			os.Exit(1)
		}
	}
	failed(r.readSkips(*skips))
	dir, steps := flag.Arg(0), flag.Args()[min(1, flag.NArg()):]
	info, err := os.Stat(dir) // made as the run began
	failed(err)
	if *log != "" {
		f, err := os.Create(*log)
		failed(err)
		r.log = f
	}
	for _, step := range steps {
		r.step(dir, step)
	}
	r.summary(os.Stdout)
	if *page != "" {
		text := provenance.Header(*title, info.ModTime(), *command) + r.page()
		failed(os.WriteFile(*page, []byte(text), 0o644))
	}
	if len(r.failures) > 0 {
		os.Exit(1)
	}
}

// report collects the results of steps.
type report struct {
	log             io.Writer
	picked          bool
	skips           []skip
	passed, skipped int // tests with subtests, and commands
	times           []timing
	notes           []string // lines that tests print for the reader although they passed
	failures        []string
}

// timing is the duration of a package's tests.
type timing struct {
	step, name string
	d          time.Duration
	tests      int
}

// skip is a line of the list: why a test, with its subtests, may skip in a step.
type skip struct{ step, pkg, test, reason string }

// short returns the name of a package without the module's.
func short(pkg string) string {
	return cmp.Or(strings.TrimPrefix(strings.TrimPrefix(pkg, module), "/"), ".")
}

func (r *report) fail(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

// step adds the results of one step. A step without tests is one command, which passed or failed.
func (r *report) step(dir, step string) {
	status, err := os.ReadFile(filepath.Join(dir, step, "status"))
	if err != nil {
		r.fail("%s: did not run", step)
		return
	}
	before := len(r.failures)
	files, _ := filepath.Glob(filepath.Join(dir, step, "*.json")) // the pattern is well formed
	for _, name := range files {
		f, err := os.Open(name)
		if err == nil {
			err = r.tests(step, f)
			f.Close()
		}
		if err != nil {
			r.fail("%s: %v", step, err)
		}
	}
	switch ok := strings.TrimSpace(string(status)) == "0"; {
	case ok && len(files) == 0:
		r.passed++
	case !ok && len(r.failures) == before:
		r.fail("%s: exit status %s; see %s", step, strings.TrimSpace(string(status)), filepath.Join(dir, step, "output"))
	}
}

// tests adds the results that a run of go test -json printed.
func (r *report) tests(step string, in io.Reader) error {
	h := &notes{report: r, step: step, none: map[string]bool{}, fuzzed: map[string]string{}}
	x, err := testjson.ScanTestOutput(testjson.ScanConfig{Stdout: in, Handler: h, IgnoreNonJSONOutputLines: true})
	if err != nil {
		return err
	}
	for _, t := range x.Failed() {
		r.fail("%s: %s", step, strings.TrimSpace(short(t.Package)+" "+t.Test.Name()))
	}
	for _, t := range x.Skipped() {
		r.skip(step, short(t.Package), t.Test.Name())
	}
	for _, name := range x.Packages() {
		p := x.Package(name)
		r.passed += len(p.Passed)
		if p.Total > 0 {
			r.times = append(r.times, timing{step, short(name), p.Elapsed(), p.Total})
		} else if h.none[name] && !r.picked {
			r.fail("%s: %s: no test ran", step, short(name))
		}
	}
	for target, line := range h.fuzzed {
		r.notes = append(r.notes, target+": "+line)
	}
	return nil
}

// skip adds a skipped test: a failure unless the list has a reason.
func (r *report) skip(step, pkg, test string) {
	for _, s := range r.skips {
		if (s.step == "*" || s.step == step) && s.pkg == pkg && (s.test == test || strings.HasPrefix(test, s.test+"/")) {
			r.skipped++
			r.notes = append(r.notes, fmt.Sprintf("%s: %s skipped %s: %s", step, pkg, test, s.reason))
			return
		}
	}
	r.fail("%s: %s %s: this skip is not listed in internal/arch/testdata/skips", step, pkg, test)
}

// notes is the testjson.EventHandler of a step. It writes all output to the log and keeps what the
// reader should see.
type notes struct {
	*report
	step   string
	none   map[string]bool   // packages whose tests match no pattern
	fuzzed map[string]string // the last progress of each fuzz target
}

// progress matches a line in which go test -fuzz reports how far it is.
var progress = regexp.MustCompile(`execs: (\d+) .*new interesting: (\d+) \(total: (\d+)\)`)

// Event implements testjson.EventHandler.
func (h *notes) Event(e testjson.TestEvent, _ *testjson.Execution) error {
	if e.Action != testjson.ActionOutput {
		return nil
	}
	fmt.Fprintf(h.log, "%s %s: %s", h.step, short(e.Package), e.Output)
	if _, note, ok := strings.Cut(e.Output, ": note: "); ok {
		h.report.notes = append(h.report.notes, short(e.Package)+": "+strings.TrimSpace(note))
	}
	if m := progress.FindStringSubmatch(e.Output); m != nil {
		h.fuzzed[short(e.Package)+" "+e.Test] = fmt.Sprintf("%s executions, %s inputs that cover new code, %s in all", m[1], m[2], m[3])
	}
	if strings.HasPrefix(e.Output, "testing: warning: no tests to run") {
		h.none[e.Package] = true
	}
	return nil
}

// Err implements testjson.EventHandler. The step has printed the line already.
func (*notes) Err(string) error { return nil }

// result is the last line of a run.
func (r *report) result() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", r.passed, len(r.failures), r.skipped)
}

// summary prints notes, durations, failures and the result.
func (r *report) summary(out io.Writer) {
	slices.SortStableFunc(r.times, func(a, b timing) int { return cmp.Compare(b.d, a.d) })
	var times []string
	for _, t := range r.times {
		times = append(times, fmt.Sprintf("%7.1f s  %-12s %s", t.d.Seconds(), t.step, t.name))
	}
	for _, part := range []struct {
		title string
		lines []string
	}{{"Notes", r.notes}, {"Time per package", times}, {"Failed", r.failures}} {
		if len(part.lines) > 0 {
			fmt.Fprintf(out, "\n%s:\n  %s\n", part.title, strings.Join(part.lines, "\n  "))
		}
	}
	fmt.Fprintf(out, "\n%s\n", r.result())
}

// page returns the results in Markdown, below the head of the page.
func (r *report) page() string {
	var b strings.Builder
	list := func(prefix string, lines []string) {
		for _, l := range lines {
			fmt.Fprintf(&b, "- %s%s\n", prefix, l)
		}
		b.WriteString("\n")
	}
	list("Result: ", []string{r.result()})
	list("FAILED: ", r.failures)
	b.WriteString("| step | package | seconds | tests |\n|---|---|---|---|\n")
	for _, t := range r.times {
		fmt.Fprintf(&b, "| %s | %s | %.1f | %d |\n", t.step, t.name, t.d.Seconds(), t.tests)
	}
	b.WriteString("\nNotes of the tests:\n\n")
	list("", r.notes)
	return b.String()
}

// readSkips reads the list of allowed skips; a line without a reason is an error.
func (r *report) readSkips(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for n, line := range strings.Split(string(text), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || f[0][0] == '#' {
			continue
		}
		if len(f) < 5 {
			return fmt.Errorf("%s:%d: want STEP PACKAGE TEST REASON", path, n+1)
		}
		r.skips = append(r.skips, skip{f[0], f[1], f[2], strings.Join(f[3:], " ")})
	}
	return nil
}
