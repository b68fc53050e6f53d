// Package explainlog explains the lines of a start-up or stats log of vLLM or of Tandem.
//
// Each line is split into its prefix (process, level, time, source) and its message. The first
// rule of a literal table that matches the message explains it. A rule may have a function that
// checks the figures of the line against those of earlier lines: KV memory against tokens and
// concurrency, graphs, times, rates. A line that no rule knows is explained by its shape: its
// level, the module that wrote it and its figures.
//
// Invariant: every line is counted in exactly one entry, or in Report.Omitted, and no text of the
// log is returned with a control character in it. Memory is bounded by the constants below,
// whatever the input is.
//
// The package is pure: lines come in, explanations go out. It reads no file and no clock.
package explainlog

import (
	"fmt"
	"strings"
	"time"
)

// Bounds of what is kept. Lines past them are still counted, and rates of them still enter the
// figures of a run.
const (
	MaxLine     = 64 << 10 // bytes of a line that are looked at
	maxEntries  = 20_000   // entries of all runs
	maxRuns     = 200
	maxSeries   = 64      // engines or processes whose rates are kept
	maxSamples  = 2048    // rates of one series; past it every second one is dropped
	maxText     = 2000    // characters of a line that an entry keeps
	maxTextSum  = 8 << 20 // characters of all entries
	maxFindings = 200     // of one run
)

// Severity orders what the explanations find.
type Severity int

// The severities, from what needs no attention to what stops a server.
const (
	Plain Severity = iota
	Note
	Warning
	Problem
)

// String returns the severity's name, empty for Plain.
func (s Severity) String() string { return [...]string{"", "note", "warning", "problem"}[s] }

// Entry explains one line, or several that follow each other and have one explanation.
type Entry struct {
	First, Last int // numbers of lines, from 1
	Count       int // lines
	Level       string
	Process     string // such as "EngineCore pid=289"
	When        string // as in the log
	Source      string // such as "scheduler.py:216"
	Topic       string
	Text        string // the first line's message, printable
	What        string
	Math        []string
	Severity    Severity
	Unusual     string // what is unusual about it
	Change      string // what to change
	Rule        string // name of the rule; empty: explained by its shape

	fold bool // lines of the same rule that follow are added to this entry
}

// Finding is something unusual, or a figure that several lines together give.
type Finding struct {
	Severity Severity
	Line     int // that gave it; 0: several
	Text     string
	Math     []string
	Change   string
}

// Run is one start of a server, or one result block of a benchmark.
type Run struct {
	Title    string
	Facts    []string
	Findings []Finding
	Entries  []Entry
	Series   []Series // rates
	Fit      *Fit     // throughput against KV use; nil without enough rates
}

// Report is the explanation of a log.
type Report struct {
	Lines   int // of the input
	ByShape int // of them, lines that no rule knows
	Omitted int // lines whose entries were not kept
	Cut     int // lines longer than MaxLine
	Runs    []Run
	Across  []Finding // comparisons of runs
}

// Explainer takes the lines of one log. Its methods may not be called concurrently.
type Explainer struct {
	rules   []compiled
	find    *finder // of the rules' needles
	own     map[string]Message
	ownList []Message // with placeholders, to be matched in order
	report  Report
	planned planned  // of the last plan of any run
	states  []*state // of report.Runs
	entries int
	text    int // characters in them
}

// New returns an Explainer that also knows the given lines of Tandem.
func New(own []Message) *Explainer { return explainer(compile(rules), own) }

func explainer(rules []compiled, own []Message) *Explainer {
	e := &Explainer{rules: rules, find: newFinder(rules), own: map[string]Message{}}
	for _, m := range own {
		e.own[m.Text] = m
		e.ownList = append(e.ownList, m)
	}
	return e
}

// Add explains the next line, without its newline. Bytes past MaxLine are ignored; cut reports
// that the caller has already dropped some.
func (e *Explainer) Add(line []byte, cut bool) {
	e.report.Lines++
	if len(line) > MaxLine {
		line, cut = line[:MaxLine], true
	}
	if cut {
		e.report.Cut++
	}
	for i, r := range split(line) {
		e.record(r, i == 0)
	}
}

// record explains one record. A line may hold several: a progress bar and the record behind it.
func (e *Explainer) record(r record, first bool) {
	s := e.state(r)
	s.line = e.report.Lines
	var entry Entry
	if own, ok := e.ownLine(r); ok {
		entry = own.entry(s, r)
	} else if c, m := e.match(r.msg); c != nil && !r.binary {
		entry = c.entry(s, r, m)
	} else {
		entry = byShape(s, r)
	}
	if entry.Rule == "" && first {
		e.report.ByShape++
	}
	entry.First, entry.Last, entry.Count = e.report.Lines, e.report.Lines, 1
	if !first {
		entry.Count = 0
	}
	entry.Level, entry.Process, entry.When, entry.Source = r.level, r.process, r.when, r.source
	entry.Text = shorten(r.msg, maxText)
	s.seen(r, &entry, first)
	if entry.Severity > Plain && len(s.findings) < maxFindings && entry.Unusual != "" {
		s.find(Finding{Severity: entry.Severity, Line: entry.First, Text: entry.Unusual, Change: entry.Change})
	}
	e.keep(s, entry, first)
}

// keep adds an entry to the run, or to the entry before it.
func (e *Explainer) keep(s *state, entry Entry, first bool) {
	if n := len(s.entries); n > 0 {
		last := &s.entries[n-1]
		if entry.fold && last.fold && last.Rule == entry.Rule && last.What == entry.What && last.Level == entry.Level {
			last.Last = entry.Last
			last.Count += entry.Count
			if len(entry.Math) > 0 {
				last.Math = entry.Math
			}
			return
		}
	}
	if e.entries >= maxEntries || e.text+len(entry.Text) > maxTextSum {
		if first {
			e.report.Omitted++
		}
		return
	}
	e.entries++
	e.text += len(entry.Text)
	s.entries = append(s.entries, entry)
}

// state returns the run that a record belongs to. A command line, a banner or the server's version
// starts a new one if the present run has had its own.
func (e *Explainer) state(r record) *state {
	starts := startsRun(r)
	if n := len(e.states); n > 0 {
		s := e.states[n-1]
		if starts == noStart || n >= maxRuns || !s.ended(starts) {
			s.mark(starts)
			return s
		}
	}
	s := newState(len(e.states), &e.planned)
	s.mark(starts)
	e.states = append(e.states, s)
	return s
}

// Report returns the explanation of all lines so far. The Explainer must not be used afterwards.
func (e *Explainer) Report() *Report {
	for _, s := range e.states {
		e.report.Runs = append(e.report.Runs, s.run())
	}
	e.report.Across = across(e.states)
	return &e.report
}

// shorten cuts text at n characters.
func shorten(text string, n int) string {
	if len(text) <= n {
		return text
	}
	r := []rune(text)
	if len(r) <= n {
		return text
	}
	return string(r[:n]) + fmt.Sprintf("… (%s more characters)", thousands(len(r)-n))
}

// thousands writes a whole number with separators.
func thousands(n int) string {
	if n < 0 {
		return "-" + thousands(-n)
	}
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// seconds writes a duration for people.
func seconds(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
	case d < 2*time.Minute:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", d.Seconds()), ".0") + " s"
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min %02d s", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%d h %02d min", int(d.Hours()), int(d.Minutes())%60)
}
