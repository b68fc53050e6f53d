package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// report collects what all steps did and prints it as it comes.
type report struct {
	out, log                io.Writer
	skips                   skips
	began                   time.Time
	passed, failed, skipped int // tests with subtests, and checks
	times                   []timing
	notes                   []string // what tests want to be read although they passed
	failures                []string // one line each
}

// timing is what one package, or one check, cost.
type timing struct {
	step, name string
	d          time.Duration
	tests      int
}

// maxShown bounds how much of one failure's output is printed.
const maxShown = 16 << 10

// fail notes that something went wrong, with its output.
func (r *report) fail(step, what, output string) {
	r.failed++
	r.failures = append(r.failures, step+": "+what)
	fmt.Fprintf(r.out, "FAIL %-12s %s\n", step, what)
	r.show(output)
}

// atOnce is how many steps of a group run side by side: most end with one long
// test, and the C compiler takes one file at a time.
const atOnce = 2

// together runs a group of steps side by side, and prints what each said when it
// has ended.
func (r *report) together(group []step, run func(*report, step)) {
	if len(group) == 1 {
		run(r, group[0])
		return
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for _, s := range group {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			var out, log bytes.Buffer
			own := &report{out: &out, log: &log, skips: r.skips}
			if r.log == io.Discard {
				own.log = io.Discard
			}
			run(own, s)
			mu.Lock()
			defer mu.Unlock()
			out.WriteTo(r.out)
			log.WriteTo(r.log)
			r.passed, r.failed, r.skipped = r.passed+own.passed, r.failed+own.failed, r.skipped+own.skipped
			r.times, r.notes, r.failures = append(r.times, own.times...), append(r.notes, own.notes...), append(r.failures, own.failures...)
		})
	}
	wg.Wait()
}

// show prints output, indented; the middle of too much is left out.
func (r *report) show(output string) {
	if n := len(output); n > maxShown {
		output = output[:maxShown/2] + fmt.Sprintf("\n… %d bytes left out; a run with -log FILE keeps them …\n", n-maxShown) + output[n-maxShown/2:]
	}
	for line := range strings.Lines(output) {
		fmt.Fprintf(r.out, "     | %s\n", strings.TrimRight(line, "\n"))
	}
}

// check notes the end of a step that is one command.
func (r *report) check(step string, d time.Duration, err error, output string) {
	r.times = append(r.times, timing{step: step, name: "-", d: d})
	fmt.Fprintf(r.log, "%s: %v\n%s", step, err, output)
	if err != nil {
		r.fail(step, err.Error(), output)
		return
	}
	r.passed++
	fmt.Fprintf(r.out, "ok   %-12s %7.1f s\n", step, d.Seconds())
}

// packageEnd notes the end of a package's tests.
func (r *report) packageEnd(p *packageRun, e event) {
	d := time.Duration(e.Elapsed * float64(time.Second))
	ran := p.passed + p.failed + p.skipped
	r.passed += p.passed
	r.skipped += p.skipped
	r.times = append(r.times, timing{p.step.name, p.name, d, ran})
	// A failed subtest fails its parents; what they print themselves is theirs.
	for _, test := range p.failing {
		r.fail(p.step.name, p.name+" "+test, p.said(test))
		delete(p.output, test)
	}
	own := p.said("")
	delete(p.output, "")
	// The tests that are left had begun when the process died: what killed it is among what they said.
	for _, test := range slices.Sorted(maps.Keys(p.output)) {
		own = p.said(test) + own
	}
	switch {
	case e.Action == "fail" && len(p.failing) == 0:
		// It did not compile, or died.
		r.fail(p.step.name, p.name, own)
	case len(p.failing) > 0:
		r.show(own)
	case ran == 0 && p.step.each:
		r.fail(p.step.name, p.name+": no test ran", own)
	case ran == 0:
		fmt.Fprintf(r.out, "ok   %-12s           %s (no tests)\n", p.step.name, p.name)
	default:
		fmt.Fprintf(r.out, "ok   %-12s %7.1f s %s (%d)\n", p.step.name, d.Seconds(), p.name, ran)
	}
}

// summary prints what a run cost and how it ended.
func (r *report) summary() {
	if len(r.notes) > 0 {
		fmt.Fprint(r.out, "\nNotes:\n")
		for _, n := range r.notes {
			fmt.Fprintf(r.out, "  %s\n", n)
		}
	}
	fmt.Fprint(r.out, "\nTime per package:\n")
	slices.SortStableFunc(r.times, func(a, b timing) int { return cmp.Compare(b.d, a.d) })
	for _, t := range r.times {
		if t.d > 0 {
			fmt.Fprintf(r.out, "  %7.1f s  %-12s %s\n", t.d.Seconds(), t.step, t.name)
		}
	}
	fmt.Fprintf(r.out, "  %7.1f s  in all, with compiling; packages run side by side\n", time.Since(r.began).Seconds())
	if len(r.failures) > 0 {
		fmt.Fprint(r.out, "\nFailed:\n")
		for _, f := range r.failures {
			fmt.Fprintf(r.out, "  %s\n", f)
		}
	}
	fmt.Fprintf(r.out, "\n%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
}

// skips are the lines of testdata/skips.
type skips []skip

type skip struct{ step, pkg, test, reason string }

// reason returns why a test may skip in a step, or "" where it may not. A line
// for a test also stands for its subtests.
func (ss skips) reason(step, pkg, test string) string {
	for _, s := range ss {
		if (s.step == "*" || s.step == step) && s.pkg == pkg && (s.test == test || strings.HasPrefix(test, s.test+"/")) {
			return s.reason
		}
	}
	return ""
}

// readSkips reads the list; a line without a reason is an error.
func readSkips(path string) (skips, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var ss skips
	for n, line := range strings.Split(string(text), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || f[0][0] == '#' {
			continue
		}
		if len(f) < 5 {
			return nil, fmt.Errorf("%s:%d: want STEP PACKAGE TEST REASON", path, n+1)
		}
		ss = append(ss, skip{f[0], f[1], f[2], strings.Join(f[3:], " ")})
	}
	return ss, nil
}
