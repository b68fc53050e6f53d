package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// target is one fuzz function.
type target struct{ dir, name string }

var fuzzFunc = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(\w+ \*testing\.F\)`)

// fuzzTargets finds the fuzz functions of packages, in order.
func fuzzTargets(packages []string) ([]target, error) {
	var all []target
	for _, p := range packages {
		files, err := filepath.Glob(filepath.Join(short(p), "*_test.go"))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				return nil, err
			}
			for _, m := range fuzzFunc.FindAllSubmatch(text, -1) {
				all = append(all, target{short(p), string(m[1])})
			}
		}
	}
	return all, nil
}

// counted are the numbers of the last line in which go test tells how far it is.
var counted = regexp.MustCompile(`execs: (\d+) .*new interesting: (\d+) \(total: (\d+)\)`)

// runFuzz runs each target for so long. What it finds go test writes below the
// package's testdata/fuzz, for the tests to repeat.
func runFuzz(ctx context.Context, r *report, s step, packages []string, each time.Duration) {
	targets, err := fuzzTargets(packages)
	if err != nil {
		r.fail(s.name, err.Error(), "")
		return
	}
	for _, t := range targets {
		if ctx.Err() != nil {
			return
		}
		began := time.Now()
		// An input that covers new code by chance is not minimized for long, which
		// would take most of the time.
		cmd := exec.CommandContext(ctx, "go", "test", "./"+t.dir, "-run", "^$", "-fuzz", "^"+t.name+"$",
			"-fuzztime", each.String(), "-fuzzminimizetime", "10x", "-timeout", packageTimeoutSoak.String())
		cmd.Env = append(os.Environ(), s.env...)
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = time.Minute
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		if ctx.Err() != nil {
			return // it found nothing, it was ended
		}
		fmt.Fprintf(r.log, "%s %s %s: %v\n%s", s.name, t.dir, t.name, err, &out)
		r.times = append(r.times, timing{s.name, t.dir + " " + t.name, time.Since(began), 1})
		if err != nil {
			r.fail(s.name, t.dir+" "+t.name, out.String())
			continue
		}
		r.passed++
		line := ""
		if all := counted.FindAllStringSubmatch(out.String(), -1); len(all) > 0 {
			m := all[len(all)-1]
			line = fmt.Sprintf("%s executions, %s inputs that cover new code, %s in all", m[1], m[2], m[3])
		}
		r.notes = append(r.notes, strings.TrimSpace(fmt.Sprintf("%s %s: %s", t.dir, t.name, line)))
		fmt.Fprintf(r.out, "ok   %-12s %7.1f s %s %s: %s\n", s.name, time.Since(began).Seconds(), t.dir, t.name, line)
	}
}
