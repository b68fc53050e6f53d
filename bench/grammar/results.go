package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// spaced returns JSON as Python writes it: a space behind each colon and comma.
func spaced(data json.RawMessage) ([]byte, error) {
	var compact bytes.Buffer
	if err := json.Compact(&compact, data); err != nil {
		return nil, err
	}
	var out []byte
	quoted := false
	for i, c := range compact.Bytes() {
		out = append(out, c)
		switch {
		case c == '"' && !escaped(compact.Bytes()[:i]):
			quoted = !quoted
		case !quoted && (c == ':' || c == ','):
			out = append(out, ' ')
		}
	}
	return out, nil
}

// escaped reports whether b ends with an odd number of backslashes.
func escaped(b []byte) bool {
	return (len(b)-len(bytes.TrimRight(b, `\`)))%2 == 1
}

// table returns the results as a page.
func (b *bench) table() string {
	var s strings.Builder
	fmt.Fprintf(&s, "# Masks and compiling, next to llguidance\n\n")
	fmt.Fprintf(&s, "Machine: %s, %d CPUs, %s. Commit: %s. Command: `make bench-grammar`.\n\n", model(), runtime.NumCPU(), runtime.Version(), b.o.commit)
	fmt.Fprintf(&s, "%d schemas, %d compiled by both; %d tokens in the vocabulary.\n\n", len(b.cases), b.both, len(b.tokens))
	fmt.Fprintf(&s, "| | ours | llguidance |\n|---|---|---|\n")
	row := func(name, ours, theirs string) { fmt.Fprintf(&s, "| %s | %s | %s |\n", name, ours, theirs) }
	row("set-up of the vocabulary", round(b.ours.setup), round(b.theirs.setup))
	row("memory of the vocabulary", fmt.Sprintf("%d MiB", b.ours.setupBytes>>20), fmt.Sprintf("%d MiB", b.theirs.setupBytes>>20))
	row("schemas refused", fmt.Sprint(b.ours.refused), fmt.Sprint(b.theirs.refused))
	row("instances that ended early (order, spelling)", fmt.Sprint(b.ours.failed), fmt.Sprint(b.theirs.failed))
	row("masks", fmt.Sprint(len(b.ours.masks)), fmt.Sprint(len(b.theirs.masks)))
	for _, p := range []struct {
		name string
		at   int
	}{{"p50", 500}, {"p90", 900}, {"p99", 990}, {"p99.9", 999}, {"max", 1000}} {
		row("compile "+p.name, round(percentile(b.ours.compiles, p.at)), round(percentile(b.theirs.compiles, p.at)))
		row("mask "+p.name, round(percentile(b.ours.masks, p.at)), round(percentile(b.theirs.masks, p.at)))
	}
	for i, what := range []string{"slowest to compile", "slowest mask"} {
		row(what, b.ours.slowest[i].name, b.theirs.slowest[i].name)
	}
	return s.String()
}

func round(d time.Duration) string {
	if d < 10*time.Microsecond {
		return fmt.Sprintf("%.1f µs", float64(d)/1e3)
	}
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.0f µs", float64(d)/1e3)
	}
	return fmt.Sprintf("%.0f ms", float64(d)/1e6)
}

// model returns the processor's name.
func model() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}
