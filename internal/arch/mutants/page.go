package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/arch/provenance"
)

// rate returns killed of killed and surviving mutants, from 0 to 1; 1 for none.
func rate(kills, survivors int) float64 {
	if kills+survivors == 0 {
		return 1
	}
	return float64(kills) / float64(kills+survivors)
}

// summary is one package's result in a line.
func (s *sampled) summary() string {
	kills, survivors, equivalents := s.count()
	return fmt.Sprintf("%s: %d mutants, %d killed, %d survived, %d equivalent: %.0f %%, %.0f s", s.name, len(s.results), kills, survivors, equivalents, 100*rate(kills, survivors), s.took.Seconds())
}

// judge returns what a run misses of its goals, one line each.
func judge(all []*sampled) []string {
	var failures []string
	miss := func(format string, args ...any) { failures = append(failures, fmt.Sprintf(format, args...)) }
	var kills, survivors, equivalents int
	for _, s := range all {
		k, v, e := s.count()
		kills, survivors, equivalents = kills+k, survivors+v, equivalents+e
		if rate(k, v) < minKilledEach {
			miss("%s: the tests kill %d of %d mutants, %.1f %%: want %.0f %% of each package", s.name, k, k+v, 100*rate(k, v), 100*minKilledEach)
		}
		if len(s.results) < s.want {
			miss("%s: only %d mutants compile: want %d", s.name, len(s.results), s.want)
		}
		for _, r := range s.results {
			if r.reason != "" && r.fate != survived {
				miss("testdata/equivalents: a test kills this mutant, so it is not equivalent: %s", r.m.key())
			}
		}
	}
	if rate(kills, survivors) < minKilled {
		miss("the tests kill %d of %d mutants, %.1f %%: want %.0f %%", kills, kills+survivors, 100*rate(kills, survivors), 100*minKilled)
	}
	if n := kills + survivors + equivalents; float64(equivalents) > maxEquivalent*float64(n) {
		miss("%d of %d mutants are listed as equivalent: want at most %.0f %%", equivalents, n, 100*maxEquivalent)
	}
	return failures
}

// page returns the results in Markdown.
func page(o options, all []*sampled, failures []string, began time.Time) string {
	var b strings.Builder
	command := fmt.Sprintf("make soak ONLY=mutants SOAK_SEED=%d", o.seed)
	if o.sample != wholeSample || len(o.packages) > 0 {
		command = fmt.Sprintf("go run ./internal/arch/mutants -seed %d -n %d %s", o.seed, o.sample, strings.Join(o.packages, " "))
	}
	b.WriteString(provenance.Header("Mutants: whether tests notice wrong code", began, strings.TrimSpace(command)))
	fmt.Fprintf(&b, "- Seed: %d\n- Goals: %.0f %% of all mutants killed, %.0f %% of each package's, at most %.0f %% equivalent\n\n", o.seed, 100*minKilled, 100*minKilledEach, 100*maxEquivalent)
	for _, f := range failures {
		fmt.Fprintf(&b, "- MISSED: %s\n", f)
	}
	if len(failures) > 0 {
		b.WriteString("\n")
	}
	b.WriteString("Killed is a share of the mutants that are not equivalent. A timeout counts as killed; a mutant that does not compile is replaced by the next of the draw.\n\n")
	b.WriteString("| package | lines | possible mutants | drawn | killed | of these by timeout | survived | equivalent | killed, % | not compiling | seconds |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	total := sampled{name: "all"}
	for _, s := range all {
		total.lines += s.lines
		total.mutants = append(total.mutants, s.mutants...)
		total.results = append(total.results, s.results...)
		total.rejected += s.rejected
		total.kept += s.kept
		total.took += s.took
	}
	for _, s := range append(all, &total) {
		kills, survivors, equivalents := s.count()
		timeouts := len(s.chosen(func(r result) bool { return r.fate == timedOut }))
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d | %d | %d | %.1f | %d | %.0f |\n", s.name, s.lines, len(s.mutants), len(s.results),
			kills, timeouts, survivors, equivalents, 100*rate(kills, survivors), s.rejected, s.took.Seconds())
	}
	b.WriteString("\n## By operator\n\n| operator | killed | survived | equivalent |\n|---|---|---|---|\n")
	for _, op := range operators {
		of := sampled{results: total.chosen(func(r result) bool { return r.m.operator == op })}
		k, v, e := of.count()
		fmt.Fprintf(&b, "| %s | %d | %d | %d |\n", op, k, v, e)
	}
	if total.kept > 0 {
		fmt.Fprintf(&b, "\n%d results (killed, or not compiling) are of runs before the last tests were added; the other mutants ran at this commit.\n", total.kept)
	}
	list(&b, "Survivors", total.chosen(func(r result) bool { return r.fate == survived && r.reason == "" }))
	list(&b, "Equivalents", total.chosen(func(r result) bool { return r.reason != "" }))
	return b.String()
}

// chosen returns the results for which f returns true.
func (s *sampled) chosen(f func(result) bool) []result {
	return slices.DeleteFunc(slices.Clone(s.results), func(r result) bool { return !f(r) })
}

// list writes a section with one line for each result.
func list(b *strings.Builder, title string, results []result) {
	fmt.Fprintf(b, "\n## %s\n\n", title)
	for _, r := range results {
		fmt.Fprintf(b, "- %s:%d, %s", r.m.file, r.m.line, describe(r.m))
		if r.reason != "" {
			fmt.Fprintf(b, ": %s", r.reason)
		}
		b.WriteString("\n")
	}
	if len(results) == 0 {
		b.WriteString("None.\n")
	}
}
