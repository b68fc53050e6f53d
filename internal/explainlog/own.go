package explainlog

import (
	"regexp"
	"strings"
	"time"
)

// Message is one line of Tandem's log with its explanation.
type Message struct{ Text, What string }

var marked = regexp.MustCompile("`([^`]+)`")

// Messages reads the tables of docs/logs.md: rows whose first cell has the messages in backquotes,
// and whose second cell explains them.
func Messages(page string) (all []Message) {
	listed := false
	for line := range strings.SplitSeq(page, "\n") {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if !strings.HasPrefix(line, "|") {
			listed = false
		}
		if len(cells) < 2 {
			continue
		}
		if strings.HasPrefix(strings.TrimSpace(cells[0]), "line") {
			listed = true
			continue
		}
		what := strings.TrimSpace(strings.Join(cells[1:], " | "))
		for _, m := range marked.FindAllStringSubmatch(cells[0], -1) {
			if listed {
				all = append(all, Message{Text: m[1], What: sentence(what)})
			}
		}
	}
	return all
}

// sentence drops Markdown's marks and begins with a capital.
func sentence(s string) string {
	s = strings.ReplaceAll(s, "`", "")
	if s == "" {
		return s
	}
	s = strings.ToUpper(s[:1]) + s[1:]
	if !strings.HasSuffix(s, ".") {
		s += "."
	}
	return s
}

// ownMath has the arithmetic of lines of Tandem, by their messages on docs/logs.md.
var ownMath = []struct {
	text string
	math func(s *state, f map[string]string, n *note)
}{
	{"model loaded", func(s *state, f map[string]string, n *note) {
		bytes, sec := sizeOf(f["weights"]), number(f["seconds"])
		if bytes > 0 && sec > 0 {
			n.math("%s ÷ %s s = %.2f GiB/s", f["weights"], f["seconds"], bytes/(1<<30)/sec)
		}
		s.mem.weights = bytes / (1 << 30)
		s.model = or(f["model"], s.model)
	}},
	{"KV cache", func(s *state, f map[string]string, n *note) {
		blocks, size := number(f["blocks"]), sizeOf(f["block_bytes"])
		if blocks > 0 && size > 0 {
			n.math("%s blocks x %s bytes = %.3f GiB", thousands(int(blocks)), thousands(int(size)), blocks*size/(1<<30))
			s.mem.kv = blocks * size / (1 << 30)
		}
		s.kvTokens = whole(f["tokens"])
		if s.kvTokens > 0 && blocks > 0 {
			n.math("%s tokens ÷ %s blocks = %.4g tokens a block and group", thousands(s.kvTokens), thousands(int(blocks)), float64(s.kvTokens)/blocks)
		}
		if c := number(f["concurrency"]); c > 0 {
			s.concurrency = c
			n.math("%.2f requests of full length: about %s tokens each", c, thousands(int(float64(s.kvTokens)/c)))
			if c < 1.5 {
				n.find(Warning, "Hardly one request of full length fits the KV cache.", "Raise --kv-cache-memory-bytes, or lower --max-model-len.")
			}
		}
	}},
	{"computing on a GPU", func(s *state, _ map[string]string, _ *note) { s.gpu = true }},
	{"graphs captured", func(s *state, f map[string]string, n *note) {
		s.captured = true
		graphs, bytes := number(or(f["graphs"], f["of"])), sizeOf(f["memory"])
		if graphs > 0 && bytes > 0 {
			n.math("%s ÷ %.0f graphs = %.1f MiB each", f["memory"], graphs, bytes/(1<<20)/graphs)
		}
	}},
	{"request ended", func(_ *state, f map[string]string, n *note) {
		first, total, out := durationOf(f["first_token"]), durationOf(f["total"]), number(f["output_tokens"])
		if out > 1 && total > first {
			n.math("(%s - %s) ÷ (%.0f - 1) tokens = %.1f ms a token after the first", seconds(total), seconds(first), out, (total-first).Seconds()*1000/(out-1))
		}
		if p, c := number(f["prompt_tokens"]), number(f["cached_tokens"]); p > 0 && c > 0 {
			n.math("%.0f of %.0f prompt tokens were cached: %.0f %%", c, p, 100*c/p)
		}
	}},
	{"draining", func(_ *state, f map[string]string, n *note) {
		if v := f["in_flight"]; v != "" {
			n.math("%s requests have %s to end", shorten(v, 20), shorten(f["timeout"], 20))
		}
	}},
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

var sized = regexp.MustCompile(`^([\d.]+) ?([KMGT]i?B|B)?$`)

// sizeOf reads bytes with or without a unit.
func sizeOf(s string) float64 {
	m := sized.FindStringSubmatch(s)
	if m == nil {
		return 0
	}
	unit := 1.0
	if m[2] != "" && m[2] != "B" {
		unit = map[byte]float64{'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}[m[2][0]]
	}
	return number(m[1]) * unit
}

func durationOf(s string) time.Duration {
	if d, err := time.ParseDuration(s); err == nil {
		return d
	}
	return time.Duration(number(s)) // JSON: nanoseconds
}

var factPair = regexp.MustCompile(`([A-Za-z_][\w.]*)=("(?:[^"\\]|\\.)*"|\S*)`)

// facts reads the name=value pairs behind a message of Tandem's text form.
func facts(msg string) map[string]string {
	all := map[string]string{}
	for _, m := range factPair.FindAllStringSubmatch(shorten(msg, matchLen), 64) {
		all[m[1]] = strings.Trim(m[2], `"`)
	}
	return all
}

// ownLine finds a record among Tandem's messages: the longest one that the record's begins with.
func (e *Explainer) ownLine(r record) (ownMatch, bool) {
	if r.level == "" || r.source != "" {
		return ownMatch{}, false
	}
	msg := strings.Trim(r.msg, `"`)
	best := Message{}
	if m, ok := e.own[msg]; ok {
		best = m
	} else {
		for _, m := range e.ownList {
			if len(m.Text) > len(best.Text) && strings.HasPrefix(msg, m.Text) && (len(msg) == len(m.Text) || strings.ContainsRune(` :",;`, rune(msg[len(m.Text)]))) {
				best = m
			}
		}
	}
	return ownMatch{best}, best.Text != ""
}

type ownMatch struct{ Message }

func (o ownMatch) entry(s *state, r record) Entry {
	e := Entry{Rule: "tandem: " + o.Text, Topic: topicStart, What: o.What}
	f := r.json
	if f == nil {
		f = facts(strings.TrimPrefix(r.msg, o.Text))
	}
	n := note{line: s.line}
	s.own = true
	if v := f["version"]; v != "" {
		s.version = shorten(v, 60)
	}
	for _, m := range ownMath {
		if m.text == o.Text {
			m.math(s, f, &n)
		}
	}
	if n.sev == Plain && (r.level == "WARNING" || r.level == "ERROR") {
		n.sev, n.unusual = Note, shorten(r.msg, 200)
		if r.level == "ERROR" {
			n.sev = Warning
		}
		n.changes = "docs/logs.md explains the line."
	}
	n.apply(&e)
	if len(e.Math) == 0 && o.Text == "KV memory" {
		e.fold = true
	}
	return e
}
