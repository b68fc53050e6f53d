package console

import (
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// style is a set of attributes of text at a terminal.
type style uint8

const (
	bold style = 1 << iota
	dim
	italic
	underline
	strike
	code
	red
)

// attributes are the parameters of SGR for each style, in the order of the bits.
var attributes = [...]string{"1", "2", "3", "4", "9", "36", "31"}

// paint returns text with the style's attributes and a reset behind it.
func (s style) paint(text string) string {
	if s == 0 || text == "" {
		return text
	}
	var on []string
	for i, a := range attributes {
		if s&(1<<i) != 0 {
			on = append(on, a)
		}
	}
	return "\x1b[" + strings.Join(on, ";") + "m" + text + "\x1b[0m"
}

// Bounds of what markdown looks at or holds back, in bytes, to know how a part of a line is shown.
const (
	maxMarker = 16  // of a line's start
	maxSpan   = 400 // of emphasis, code or a link
	maxLine   = 4096
)

// edge is how many cells at the right of a line words are held back in until their end, so that
// words of at most so many cells are not split.
const edge = 16

// markdown shows Markdown at a terminal as it arrives.
//
// Algorithm: the start of a line is held back until its kind is known, and a marker of emphasis,
// code or a link until its end; without an end in the line, the marker is text. Everything else is
// written at once, wrapped between words. Only Visible text may be given to write.
//
// Invariant: the cells and styles of the output do not depend on where the text is split, except
// where words longer than edge are wrapped.
type markdown struct {
	out   io.Writer
	width int   // cells of a line; 0: unknown
	plain bool  // the text as it is, wrapped
	base  style // of all text

	pending string // not yet shown
	inside  bool   // the line's kind is known
	fence   string // that ends the code block; empty: no code block
	verse   bool   // the line is not wrapped
	heading style  // of the whole line
	hang    part   // starts further rows of the line
	last    rune   // before pending in its line; 0: none

	col   int    // of the cursor
	word  []part // not yet written
	cells int    // of word
	gap   int    // spaces before word
	begun bool   // the word's start was written already
	used  bool   // some text was given
}

// lineStart matches the start of a line: its indent, then a heading, a quote, an item of a list, or
// a row of a table.
var lineStart = regexp.MustCompile(`^([ \t]*)(?:(#{1,6})[ \t]+|(>)[ \t]?|([-*+]|\d{1,9}[.)])[ \t]+|(\|))`)

var (
	undecided = regexp.MustCompile("^[ \t]*(#{0,6}|[-*+_= \t]*|\\d{0,9}[.)]?|`{0,2}|~{0,2}|>)$")
	opening   = regexp.MustCompile("^ {0,3}(```+|~~~+)[^`\n]*$")
	rule      = regexp.MustCompile(`^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$`)
)

// write shows as much of the text as is decided.
func (m *markdown) write(text string) error {
	m.pending += text
	m.used = m.used || text != ""
	return m.advance(false)
}

// close shows what is left.
func (m *markdown) close() error { return m.advance(true) }

// separate ends the line, if it has begun, and writes an empty one.
func (m *markdown) separate() error {
	text := "\n"
	if m.col > 0 {
		text = "\n\n"
	}
	_, err := io.WriteString(m.out, text)
	return err
}

// advance shows what is decided of pending; all of it at the end.
func (m *markdown) advance(end bool) error {
	var b strings.Builder
	for m.pending != "" {
		before, was := len(m.pending), m.inside
		line, whole := m.line()
		switch whole = whole || end && len(line) == before; {
		case m.plain:
			m.text(&b, m.take(len(m.pending)), 0)
		case m.fence != "":
			m.codeLine(&b, line, whole)
		case !m.inside:
			m.start(&b, line, whole)
		default:
			m.span(&b, line, whole)
		}
		if len(m.pending) == before && m.inside == was {
			break
		}
	}
	if end || m.col+m.gap+m.cells+edge <= m.width {
		m.flush(&b)
		m.begun = !end
	}
	_, err := io.WriteString(m.out, b.String())
	return err
}

// line returns the start of pending without the end of its line, at most maxLine bytes, and whether
// the line ends there.
func (m *markdown) line() (line string, whole bool) {
	n := min(len(m.pending), maxLine)
	for n < len(m.pending) && !utf8.RuneStart(m.pending[n]) {
		n--
	}
	line, _, whole = strings.Cut(m.pending[:n], "\n")
	return line, whole
}

// take removes and returns n bytes of pending.
func (m *markdown) take(n int) string {
	text := m.pending[:n]
	if n > 0 {
		m.last, _ = utf8.DecodeLastRuneInString(text)
	}
	m.pending = m.pending[n:]
	return text
}

// endLine takes the end of a line, if pending starts with it.
func (m *markdown) endLine(b *strings.Builder) {
	if strings.HasPrefix(m.pending, "\n") {
		m.take(1)
		m.newline(b)
	}
}

// newline ends the line.
func (m *markdown) newline(b *strings.Builder) {
	m.flush(b)
	b.WriteByte('\n')
	m.inside, m.verse, m.heading, m.hang, m.last = false, false, 0, part{}, 0
	m.col, m.gap, m.begun = 0, 0, false
}

// start decides the kind of a line and shows what its marker becomes.
func (m *markdown) start(b *strings.Builder, line string, whole bool) {
	if !whole && len(line) <= maxMarker && undecided.MatchString(line) {
		return
	}
	if f := opening.FindStringSubmatch(line); f != nil {
		if whole || len(line) > maxSpan {
			m.fence, m.verse = f[1], true
			m.text(b, m.take(len(line)), dim)
			m.endLine(b)
		}
		return
	}
	if rule.MatchString(line) {
		if whole || len(line) > maxSpan {
			m.take(len(line))
			m.inside = true
			m.text(b, strings.Repeat("─", max(3, min(m.width, 40))), dim)
			m.endLine(b)
		}
		return
	}
	m.inside = true
	f := lineStart.FindStringSubmatch(line)
	if f == nil {
		indent := len(line) - len(strings.TrimLeft(line, " \t"))
		m.hang = part{text: line[:indent]}
		m.text(b, m.take(indent), 0)
		m.endLine(b)
		return
	}
	m.take(len(f[0]))
	m.last = 0
	switch indent := f[1]; {
	case f[2] != "":
		m.heading = bold
	case f[3] != "":
		m.hang = part{indent + "│ ", dim}
		m.text(b, m.hang.text, dim)
	case f[4] != "":
		mark := f[4]
		if len(mark) == 1 {
			mark = "•"
		}
		m.hang = part{text: indent + strings.Repeat(" ", utf8.RuneCountInString(mark)+1)}
		m.text(b, indent+mark+" ", 0)
	default:
		m.verse = true
		m.text(b, indent+"|", dim)
	}
	m.endLine(b)
}

// codeLine shows a line of a code block, or its end.
func (m *markdown) codeLine(b *strings.Builder, line string, whole bool) {
	m.verse = true
	if trimmed := strings.TrimLeft(line, " "); !m.inside {
		mark := strings.Trim(trimmed, m.fence[:1]+" \t") == "" && len(line)-len(trimmed) < 4
		switch closes := mark && strings.HasPrefix(trimmed, m.fence); {
		case closes && whole:
			m.fence = ""
			m.text(b, m.take(len(line)), dim)
			m.endLine(b)
			return
		case mark && !whole && len(line) <= maxSpan:
			return
		}
		m.inside = true
	}
	m.text(b, m.take(len(line)), code)
	m.endLine(b)
}

// span shows the next part of a line.
func (m *markdown) span(b *strings.Builder, line string, whole bool) {
	n := strings.IndexAny(line, special)
	if n < 0 {
		m.text(b, m.take(len(line)), m.heading)
		m.endLine(b)
		return
	}
	m.text(b, m.take(n), m.heading)
	n, parts, known := inline(line[n:min(len(line), n+maxSpan)], m.last, whole || len(line) > n+maxSpan)
	if !known {
		return
	}
	m.take(n)
	for _, p := range parts {
		m.text(b, p.text, p.style|m.heading)
	}
	m.endLine(b)
}

// special starts inline markup.
const special = "\\`*_~["

// part is text of one style.
type part struct {
	text string
	style
}

// inline parses the markup at the start of a line's rest: how many bytes it has and what is shown.
// before is the character in front; whole: no more of the line will come. It is not known without
// the markup's end, unless the line is whole.
func inline(line string, before rune, whole bool) (n int, parts []part, known bool) {
	mark := line[:1]
	run := len(line) - len(strings.TrimLeft(line, mark))
	literal := func(n int) (int, []part, bool) { return n, []part{{text: line[:n]}}, true }
	switch mark {
	case "\\":
		if len(line) == 1 {
			return 1, []part{{text: line}}, whole
		}
		if r, size := utf8.DecodeRuneInString(line[1:]); r < utf8.RuneSelf && (unicode.IsPunct(r) || unicode.IsSymbol(r)) {
			return 1 + size, []part{{text: line[1 : 1+size]}}, true
		}
		return literal(1)
	case "[":
		return link(line, whole)
	case "`":
		rest := line[run:]
		for from := 0; ; {
			i := strings.Index(rest[from:], line[:run])
			if i < 0 {
				break
			}
			i += from
			closing := len(rest[i:]) - len(strings.TrimLeft(rest[i:], "`"))
			if i+closing == len(rest) && !whole {
				return 0, nil, false
			}
			if closing == run {
				text := rest[:i]
				if t := strings.TrimSpace(text); t != "" && len(text) >= len(t)+2 {
					text = text[1 : len(text)-1]
				}
				return run + i + run, []part{{text, code}}, true
			}
			from = i + closing
		}
		if !whole {
			return 0, nil, false
		}
		return literal(run)
	}
	// Emphasis.
	if run == len(line) {
		if !whole {
			return 0, nil, false
		}
		return literal(run)
	}
	with := map[string]style{"*": italic, "_": italic, "**": bold, "__": bold, "***": bold | italic, "___": bold | italic, "~~": strike}[line[:run]]
	after, _ := utf8.DecodeRuneInString(line[run:])
	if with == 0 || unicode.IsSpace(after) || mark == "_" && alphanumeric(before) {
		return literal(run)
	}
	rest := line[run:]
	for from := 0; ; {
		i := strings.Index(rest[from:], line[:run])
		if i < 0 {
			break
		}
		i += from
		closing := len(rest[i:]) - len(strings.TrimLeft(rest[i:], mark))
		if i+closing == len(rest) && !whole {
			return 0, nil, false
		}
		inner, _ := utf8.DecodeLastRuneInString(rest[:i])
		next, _ := utf8.DecodeRuneInString(rest[i+closing:])
		if (closing == run || closing == 3 && run < 3) && i > 0 && !unicode.IsSpace(inner) && (mark != "_" || !alphanumeric(next)) {
			text := rest[:i+closing-run]
			return run + i + closing, within(text, with), true
		}
		from = i + closing
	}
	if !whole {
		return 0, nil, false
	}
	return literal(run)
}

// within parses the text inside of emphasis.
func within(text string, with style) (parts []part) {
	last := rune(0)
	for text != "" {
		n := strings.IndexAny(text, special)
		inner := []part{{text: text[:max(n, 0)]}}
		switch {
		case n < 0:
			n, inner = len(text), []part{{text: text}}
		case n == 0:
			n, inner, _ = inline(text, last, true)
		}
		for _, p := range inner {
			parts = append(parts, part{p.text, p.style | with})
		}
		last, _ = utf8.DecodeLastRuneInString(text[:n])
		text = text[n:]
	}
	return parts
}

// link parses [text](target).
func link(line string, whole bool) (n int, parts []part, known bool) {
	middle := strings.IndexByte(line, ']')
	if middle < 0 || middle+1 == len(line) {
		return 1, []part{{text: "["}}, whole
	}
	last := strings.IndexByte(line[middle:], ')')
	if line[middle+1] != '(' || last < 0 && whole {
		return 1, []part{{text: "["}}, true
	}
	if last < 0 {
		return 0, nil, false
	}
	text, target := line[1:middle], line[middle+2:middle+last]
	parts = within(text, underline)
	if target != text {
		parts = append(parts, part{" (" + target + ")", dim})
	}
	return middle + last + 1, parts, true
}

func alphanumeric(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }

// text shows text of one style, wrapped between words. Lines may also be wrapped next to wide
// characters.
func (m *markdown) text(b *strings.Builder, text string, with style) {
	for text != "" {
		cluster, cells := firstCluster(text)
		text = text[len(cluster):]
		switch {
		case cluster == "\n":
			m.newline(b)
			continue
		case cluster == "\t", cluster == " " && !m.verse:
			m.flush(b)
			m.begun = false
			m.gap++
			for cluster == "\t" && (m.col+m.gap)%8 != 0 {
				m.gap++
			}
			continue
		case cells > 1:
			m.flush(b)
			m.begun = false
		}
		if last := len(m.word) - 1; last >= 0 && m.word[last].style == with|m.base {
			m.word[last].text += cluster
		} else {
			m.word = append(m.word, part{cluster, with | m.base})
		}
		m.cells += cells
	}
}

// flush writes the word, in the next row if it does not fit in this one.
func (m *markdown) flush(b *strings.Builder) {
	if len(m.word) == 0 {
		return
	}
	hang := cellsOf(m.hang.text)
	if !m.verse && !m.begun && m.width > hang && m.col > hang && m.col+m.gap+m.cells > m.width {
		b.WriteString("\n" + m.hang.style.paint(m.hang.text))
		m.col, m.gap = hang, 0
	}
	b.WriteString(strings.Repeat(" ", m.gap))
	for _, p := range m.word {
		b.WriteString(p.style.paint(p.text))
	}
	m.col += m.gap + m.cells
	if m.width > 0 && m.col > m.width {
		m.col %= m.width // the terminal has wrapped it
	}
	m.word, m.cells, m.gap, m.begun = nil, 0, 0, false
}

// cellsOf returns how many cells of a terminal text takes.
func cellsOf(text string) (n int) {
	for text != "" {
		cluster, cells := firstCluster(text)
		text, n = text[len(cluster):], n+cells
	}
	return n
}
