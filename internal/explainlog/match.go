package explainlog

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// rule explains messages that match it.
type rule struct {
	name    string
	topic   string
	has     string // a part of each such message, in lower case
	pattern string // of the message; empty: has is enough. {1}, {2}, … in texts are its groups
	what    string
	sev     Severity
	unusual string
	change  string
	fold    bool // lines that follow with the same explanation are one entry
	math    func(*state, record, []string, *note)
}

type compiled struct {
	rule
	re      *regexp.Regexp // nil: has is enough
	needles []string       // of which each match contains one, in lower case; nil: unknown
}

func compile(rules []rule) []compiled {
	all := make([]compiled, len(rules))
	for i, r := range rules {
		all[i].rule = r
		if r.pattern != "" {
			all[i].re = regexp.MustCompile(r.pattern)
			all[i].needles = needles(r.pattern)
		}
	}
	return all
}

// note collects what a rule's function adds.
type note struct {
	line    int
	what    string
	maths   []string
	sev     Severity
	unusual string
	changes string
	fold    bool
}

func (n *note) math(format string, args ...any) {
	n.maths = append(n.maths, fmt.Sprintf(format, args...))
}

func (n *note) change(format string, args ...any) { n.changes = fmt.Sprintf(format, args...) }

func (n *note) find(sev Severity, text, change string) {
	if sev > n.sev {
		n.sev, n.unusual, n.changes = sev, text, change
	}
}

// matchLen is the part of a message that patterns are matched with. Long dumps have what names them
// at their start.
const matchLen = 4096

// match returns the first rule for a message.
func (e *Explainer) match(msg string) (*compiled, []string) {
	text := msg
	if len(text) > matchLen {
		text = text[:matchLen]
	}
	e.find.look(strings.ToLower(text))
	for i := range e.rules {
		c := &e.rules[i]
		if !e.find.may(i) {
			continue
		}
		if c.re == nil {
			return c, nil
		}
		if m := c.re.FindStringSubmatch(text); m != nil {
			return c, m
		}
	}
	return nil, nil
}

// fill puts the groups of a match into a text.
func fill(text string, m []string) string {
	for i := 1; i < len(m) && strings.Contains(text, "{"); i++ {
		text = strings.ReplaceAll(text, "{"+strconv.Itoa(i)+"}", shorten(m[i], 200))
	}
	return text
}

func (c *compiled) entry(s *state, r record, m []string) Entry {
	e := Entry{Rule: c.name, Topic: c.topic, What: fill(c.what, m), Severity: c.sev, Unusual: fill(c.unusual, m), Change: fill(c.change, m), fold: c.fold}
	n := note{line: s.line, sev: c.sev, unusual: e.Unusual, changes: e.Change}
	if c.math != nil {
		c.math(s, r, m, &n)
	}
	n.apply(&e)
	if e.Severity == Plain {
		levelSeverity(r.level, &e)
	}
	return e
}

func (n *note) apply(e *Entry) {
	if n.what != "" {
		e.What = n.what
	}
	e.Math, e.Severity, e.Unusual, e.Change = n.maths, n.sev, n.unusual, n.changes
	e.fold = e.fold || n.fold
}

// levelSeverity gives a line of WARNING or ERROR its severity where no rule did.
func levelSeverity(level string, e *Entry) {
	switch level {
	case "ERROR", "CRITICAL":
		e.Severity = Warning
	case "WARNING":
		e.Severity = Note
	}
}
