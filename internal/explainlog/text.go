package explainlog

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// TextOptions shape the output for a terminal.
type TextOptions struct {
	Color   bool
	Width   int  // columns; below 40: 100
	Summary bool // leave the lines out
}

// Text returns the report for a terminal. It has no control characters but newlines and, with
// Color, the escapes of colours.
func (r *Report) Text(name string, o TextOptions) string {
	if o.Width < 40 {
		o.Width = 100
	}
	p := &printer{o: o}
	p.line("%s: %s lines, %s of them explained by their shape alone", printable(name), thousands(r.Lines), thousands(r.ByShape))
	if r.Cut > 0 {
		p.line("%s lines are longer than %d KiB: only their beginning was read", thousands(r.Cut), MaxLine>>10)
	}
	for i := range r.Runs {
		p.run(i, &r.Runs[i], len(r.Runs) > 1)
	}
	if len(r.Across) > 0 {
		p.line("")
		p.head("Runs compared")
		p.findings(r.Across)
	}
	if r.Omitted > 0 {
		p.line("")
		p.line("%s more lines are counted above and not shown.", thousands(r.Omitted))
	}
	return p.b.String()
}

type printer struct {
	b strings.Builder
	o TextOptions
}

func (p *printer) line(format string, args ...any) {
	fmt.Fprintf(&p.b, format+"\n", args...)
}

// color wraps text in an SGR escape.
func (p *printer) color(code, text string) string {
	if !p.o.Color || text == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (p *printer) head(text string) { p.line("%s", p.color("1", text)) }

// wrap writes words behind a first prefix, and later lines behind another.
func (p *printer) wrap(first, later, code, text string) {
	width := max(p.o.Width-utf8.RuneCountInString(later), 20)
	prefix := first
	for len(text) > 0 {
		line := text
		if utf8.RuneCountInString(text) > width {
			runes := []rune(text)
			at := width
			for at > width/2 && runes[at] != ' ' {
				at--
			}
			if runes[at] != ' ' {
				at = width
			}
			line, text = string(runes[:at]), strings.TrimLeft(string(runes[at:]), " ")
		} else {
			text = ""
		}
		p.line("%s%s", prefix, p.color(code, strings.TrimRight(line, " ")))
		prefix = later
	}
}

func (p *printer) run(i int, r *Run, several bool) {
	p.line("")
	title := r.Title
	if several {
		title = fmt.Sprintf("Run %d: %s", i+1, r.Title)
	}
	p.head(title)
	for _, f := range r.Facts {
		p.wrap("  ", "    ", "", f)
	}
	if len(r.Findings) > 0 {
		p.line("")
		p.head("  Unusual, and what to change")
		p.findings(r.Findings)
	}
	if p.o.Summary {
		return
	}
	p.line("")
	p.head("  Line by line")
	for j := range r.Entries {
		p.entry(&r.Entries[j])
	}
}

var severityColor = [...]string{Plain: "", Note: "36", Warning: "33", Problem: "31"}

func (p *printer) findings(all []Finding) {
	for _, f := range all {
		mark := p.color(severityColor[f.Severity], fmt.Sprintf("  %-8s", f.Severity))
		text := f.Text
		if f.Line > 0 {
			text += fmt.Sprintf(" (line %d)", f.Line)
		}
		p.wrap(mark, "          ", "", text)
		for _, m := range f.Math {
			p.wrap("            = ", "              ", "2", m)
		}
		if f.Change != "" {
			p.wrap("            > ", "              ", "", f.Change)
		}
	}
}

const textOfLine = 240 // characters of a log's line that are shown

func (p *printer) entry(e *Entry) {
	number := fmt.Sprint(e.First)
	if e.Last > e.First {
		number += fmt.Sprintf("-%d", e.Last)
	}
	code := map[string]string{"WARNING": "33", "ERROR": "31", "CRITICAL": "31"}[e.Level]
	head := fmt.Sprintf("  %9s  ", number)
	p.wrap(head, "             ", code, strings.TrimSpace(e.Level+" "+e.node()+shorten(strings.TrimSpace(e.Text), textOfLine)))
	const indent = "             "
	if e.What != "" {
		p.wrap(indent+"  ", indent+"  ", "2", e.What)
	}
	for _, m := range e.Math {
		p.wrap(indent+"  = ", indent+"    ", "36", m)
	}
	if e.Unusual != "" {
		p.wrap(indent+"  ! ", indent+"    ", severityColor[e.Severity], e.Unusual)
	}
	if e.Change != "" {
		p.wrap(indent+"  > ", indent+"    ", "", e.Change)
	}
}

// node returns the name of the node that wrote the line, if the log has several.
func (e *Entry) node() string {
	if e.Process == "" || strings.Contains(e.Process, "=") {
		return ""
	}
	return e.Process + ": "
}

// printable returns a name without control characters.
func printable(s string) string {
	text, _ := clean(s)
	return text
}
