package main

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

// How long the parts of a whole soak last.
const (
	wholeFuzz    = time.Minute // per target
	wholeMinutes = 60.0        // of mixed load
)

// record writes what a soak was and what came out, as a page to be committed.
func (r *report) record(path string, o options, ran []string) error {
	var b strings.Builder
	short := ""
	if o.run != "" || o.fuzz < wholeFuzz || o.minutes < wholeMinutes || len(o.only) > 0 && !slices.Equal(o.only, soakSteps()) {
		short = ", shortened"
	}
	fmt.Fprintf(&b, "# Soak%s\n\n", short)
	fmt.Fprintf(&b, "- Machine: %s\n- Commit: %s\n- Go: %s\n- Begun: %s, lasted %v\n", machine(), commit(), runtime.Version(),
		r.began.UTC().Format("2006-01-02 15:04 MST"), time.Since(r.began).Round(time.Second))
	fmt.Fprintf(&b, "- Command: `make soak SOAK_SEED=%d SOAK_MINUTES=%g SOAK_FUZZ=%v ONLY=\"%s\" RUN='%s'`\n", o.seed, o.minutes, o.fuzz, strings.Join(ran, " "), o.run)
	fmt.Fprintf(&b, "- Result: %d passed, %d failed, %d skipped\n\n", r.passed, r.failed, r.skipped)
	for _, f := range r.failures {
		fmt.Fprintf(&b, "- FAILED: %s\n", strings.ReplaceAll(f, "\n", " "))
	}
	if len(r.failures) > 0 {
		b.WriteString("\n")
	}
	b.WriteString("| step | what | seconds | tests |\n|---|---|---|---|\n")
	times := slices.Clone(r.times)
	slices.SortStableFunc(times, func(a, b timing) int { return cmp.Compare(b.d, a.d) })
	for _, t := range times {
		if t.tests > 0 {
			fmt.Fprintf(&b, "| %s | %s | %.1f | %d |\n", t.step, t.name, t.d.Seconds(), t.tests)
		}
	}
	b.WriteString("\nWhat the parts say of themselves:\n\n")
	for _, n := range r.notes {
		fmt.Fprintf(&b, "- %s\n", strings.ReplaceAll(n, "\n", " "))
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

// soakSteps are the steps of a whole soak: what `make test` tests and what only a
// soak does, without the checks of sources.
func soakSteps() []string {
	var names []string
	for _, s := range steps {
		if s.soak {
			names = append(names, s.name)
		}
	}
	return names
}

// machine names the processor, its cores, the memory and the system.
func machine() string {
	name, memory := runtime.GOARCH, ""
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(text), "model name"); ok {
			line, _, _ := strings.Cut(rest, "\n")
			name = strings.TrimLeft(line, "\t :")
		}
	}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		var kib int64
		if _, err := fmt.Sscanf(string(text), "MemTotal: %d kB", &kib); err == nil {
			memory = fmt.Sprintf(", %d GiB", (kib+1<<19)>>20)
		}
	}
	return fmt.Sprintf("%s, %d cores%s, %s", name, runtime.NumCPU(), memory, runtime.GOOS)
}

// commit is what git says of the tree.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
