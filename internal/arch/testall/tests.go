package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// maxLine bounds one line of output; go test -json cuts longer ones itself.
const maxLine = 4 << 20

// listPackages returns the import paths of the module.
func listPackages(ctx context.Context) ([]string, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	return strings.Fields(string(out)), nil
}

// runCheck runs a step that is one command.
func runCheck(ctx context.Context, r *report, s step) {
	began := time.Now()
	cmd := exec.CommandContext(ctx, s.command[0], s.command[1:]...)
	cmd.Env = append(os.Environ(), s.env...)
	out, err := cmd.CombinedOutput()
	if err == nil && s.quiet && len(bytes.TrimSpace(out)) > 0 {
		err = errors.New("these need work")
	}
	r.check(s.name, time.Since(began), err, string(out))
}

// event is one line of go test -json.
type event struct {
	Action, Package, ImportPath, Test, Output, FailedBuild string
	Elapsed                                                float64 // seconds
}

// runTests runs go test on packages and hands every event to the report.
func runTests(ctx context.Context, r *report, s step, packages []string, o options) {
	if len(packages) == 0 {
		return
	}
	timeout := packageTimeout
	if o.soak {
		timeout = packageTimeoutSoak + time.Duration(o.minutes*float64(time.Minute))
	}
	// Nothing is taken from an earlier run: what the tests start (the binary,
	// Python) is not among the inputs that go test knows.
	args := append([]string{"test", "-json", "-count=1", "-timeout", timeout.String()}, s.args...)
	if o.run != "" {
		args, s.each = append(args, "-run", o.run), false // the last one counts
	}
	cmd := exec.CommandContext(ctx, "go", append(args, packages...)...)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		r.fail(s.name, err.Error(), "")
		return
	}
	before := len(r.failures)
	seen := r.events(s, stdout)
	err = cmd.Wait()
	if err != nil && len(r.failures) == before {
		r.fail(s.name, "go test: "+err.Error(), stderr.String())
	}
	for _, p := range packages {
		if !seen[p] {
			r.fail(s.name, short(p)+": no result", stderr.String())
		}
	}
}

// events reads go test's output and returns the packages that ended.
func (r *report) events(s step, in io.Reader) map[string]bool {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	running := map[string]*packageRun{}
	builds := map[string]*strings.Builder{} // the compiler's complaints, by ImportPath
	seen := map[string]bool{}
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			r.fail(s.name, "go test printed no JSON", lines.Text())
			continue
		}
		if e.Action == "build-output" {
			if builds[e.ImportPath] == nil {
				builds[e.ImportPath] = new(strings.Builder)
			}
			builds[e.ImportPath].WriteString(e.Output)
			continue
		}
		if e.Package == "" {
			continue
		}
		p := running[e.Package]
		if p == nil {
			p = &packageRun{step: s, name: short(e.Package), output: map[string]*strings.Builder{}}
			running[e.Package] = p
		}
		if p.take(r, e) {
			if e.FailedBuild != "" && builds[e.FailedBuild] != nil {
				p.print("", builds[e.FailedBuild].String())
			}
			r.packageEnd(p, e)
			seen[e.Package] = true
			delete(running, e.Package)
		}
	}
	if err := lines.Err(); err != nil {
		r.fail(s.name, "reading go test's output: "+err.Error(), "")
	}
	return seen
}

// packageRun is one package's tests in one step.
type packageRun struct {
	step                    step
	name                    string
	passed, failed, skipped int
	output                  map[string]*strings.Builder // by test; "" is the package's own
	failing                 []string                    // tests, in order of their end
}

func (p *packageRun) print(test, text string) {
	if p.output[test] == nil {
		p.output[test] = new(strings.Builder)
	}
	p.output[test].WriteString(text)
}

// said is what a test has printed, "" that of the package.
func (p *packageRun) said(test string) string {
	if b := p.output[test]; b != nil {
		return b.String()
	}
	return ""
}

// take notes one event, and says whether it was the package's last.
func (p *packageRun) take(r *report, e event) (ended bool) {
	switch e.Action {
	case "output":
		fmt.Fprintf(r.log, "%s %s: %s", p.step.name, p.name, e.Output)
		p.print(e.Test, e.Output)
		if _, note, ok := strings.Cut(e.Output, ": note: "); ok {
			r.notes = append(r.notes, p.name+": "+strings.TrimSpace(note))
		}
	case "pass", "fail", "skip":
		if e.Test == "" {
			return true
		}
		switch e.Action {
		case "pass":
			p.passed++
			delete(p.output, e.Test)
		case "fail":
			p.failed++
			p.failing = append(p.failing, e.Test)
		case "skip":
			p.skipped++
			if reason := r.skips.reason(p.step.name, p.name, e.Test); reason == "" {
				p.failed++
				p.skipped--
				p.failing = append(p.failing, e.Test)
				p.print(e.Test, "    this skip is not listed in internal/arch/testdata/skips\n")
			} else {
				r.notes = append(r.notes, fmt.Sprintf("%s: %s skipped %s: %s", p.step.name, p.name, e.Test, reason))
				delete(p.output, e.Test)
			}
		}
	}
	return false
}
