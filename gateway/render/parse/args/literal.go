package args

import (
	"bytes"
	"unicode/utf8"
)

// maxNesting bounds the brackets within each other of a value that is converted.
const maxNesting = 64

// literal converts a value in the notation of Python, or of Gemma, to JSON.
type literal struct {
	src   []byte
	at    int
	quote string // that encloses strings without escapes; empty: the notation has none
	dst   []byte
}

// AppendLiteral appends the value in src as JSON. Quote encloses strings without escapes; empty:
// the notation is Python's. If ok is false, src is no literal and dst is as it was.
func AppendLiteral(dst, src []byte, quote string) (out []byte, ok bool) {
	l := literal{src: src, quote: quote, dst: dst}
	if l.value(0) {
		if l.space(); l.at == len(src) {
			return l.dst, true
		}
	}
	return dst, false
}

func (l *literal) space() {
	for l.at < len(l.src) && IsSpace(l.src[l.at]) {
		l.at++
	}
}

// next skips white space and takes c, if that follows.
func (l *literal) next(c byte) bool {
	if l.space(); l.at < len(l.src) && l.src[l.at] == c {
		l.at++
		return true
	}
	return false
}

func (l *literal) value(depth int) bool {
	if l.space(); l.at >= len(l.src) || depth > maxNesting {
		return false
	}
	if l.quote != "" && bytes.HasPrefix(l.src[l.at:], []byte(l.quote)) {
		return l.quoted()
	}
	switch c := l.src[l.at]; c {
	case '[', '(':
		l.at++
		return l.list(depth, c)
	case '{':
		l.at++
		return l.dict(depth)
	case '\'', '"':
		return l.str()
	}
	return l.word()
}

// quoted converts a string between two of the notation's quotes.
func (l *literal) quoted() bool {
	rest := l.src[l.at+len(l.quote):]
	n := bytes.Index(rest, []byte(l.quote))
	if n < 0 {
		return false
	}
	l.dst = AppendQuoted(l.dst, rest[:n])
	l.at = len(l.src) - len(rest) + n + len(l.quote)
	return true
}

func (l *literal) str() bool {
	l.dst = append(l.dst, '"')
	s := PythonString{}
	for n := 1; ; n++ {
		end := l.at + n
		if s.Open(l.src[l.at:min(end, len(l.src))], end >= len(l.src)) {
			break
		}
	}
	l.at += s.Opened()
	n := 0
	l.dst, n = s.Feed(l.dst, l.src[l.at:], true)
	l.at += n
	l.dst = append(l.dst, '"')
	return s.Closed
}

func (l *literal) list(depth int, open byte) bool {
	l.dst = append(l.dst, '[')
	last := byte(']')
	if open == '(' {
		last = ')'
	}
	for first := true; !l.next(last); first = false {
		if !first {
			if !l.next(',') {
				return false
			}
			if l.next(last) {
				break
			}
			l.dst = append(l.dst, ',')
		}
		if !l.value(depth + 1) {
			return false
		}
	}
	l.dst = append(l.dst, ']')
	return true
}

// dict converts a dict, or a set as an array.
func (l *literal) dict(depth int) bool {
	start := len(l.dst)
	l.dst = append(l.dst, '{')
	for first := true; !l.next('}'); first = false {
		if !first {
			if !l.next(',') {
				return false
			}
			if l.next('}') {
				break
			}
			l.dst = append(l.dst, ',')
		}
		from := len(l.dst)
		if !l.value(depth + 1) {
			return false
		}
		switch colon := l.next(':'); {
		case first && !colon:
			l.dst[start] = '['
		case colon != (l.dst[start] == '{'):
			return false
		}
		if l.dst[start] == '[' {
			continue
		}
		if l.dst[from] != '"' {
			key := bytes.Clone(l.dst[from:])
			l.dst = AppendQuoted(l.dst[:from], key)
		}
		if l.dst = append(l.dst, ':'); !l.value(depth + 1) {
			return false
		}
	}
	l.dst = append(l.dst, l.dst[start]+2)
	return true
}

// word converts a number or a name.
func (l *literal) word() bool {
	from := l.at
	for l.at < len(l.src) && !delimits(l.src[l.at]) && l.src[l.at] != ')' {
		l.at++
	}
	w := l.src[from:l.at]
	if js := constant(w); js != "" {
		l.dst = append(l.dst, js...)
		return true
	}
	if TypeOf(w) != 0 {
		l.dst = append(l.dst, w...)
		return true
	}
	if l.quote == "" || len(w) == 0 {
		return false
	}
	for l.at < len(l.src) && (!delimits(l.src[l.at]) || l.src[l.at] == ' ') { // a bare text
		l.at++
	}
	l.dst = AppendQuoted(l.dst, bytes.TrimRight(l.src[from:l.at], " "))
	return true
}

// constant returns a constant of Python or JSON as JSON; empty: w is none.
func constant(w []byte) string {
	switch string(w) {
	case "True", "true":
		return "true"
	case "False", "false":
		return "false"
	case "None", "null":
		return "null"
	}
	return ""
}

// PythonString decodes a string of Python, with its quotes, through pieces of text.
type PythonString struct {
	Closed bool // the closing quotes have come

	quote  byte
	triple bool
}

// Open reads the opening quotes at the beginning of b. It returns false if more text is needed,
// which last excludes.
func (s *PythonString) Open(b []byte, last bool) bool {
	*s = PythonString{quote: b[0]}
	switch {
	case len(b) > 1 && b[1] != b[0]:
	case len(b) > 2:
		s.triple = b[2] == b[0]
	default:
		return last
	}
	return true
}

// Opened returns the number of bytes of the opening quotes.
func (s *PythonString) Opened() int {
	if s.triple {
		return 3
	}
	return 1
}

// Feed appends the text of the string in b as it is written within a JSON string. It returns the
// number of bytes that it has read: fewer than len(b) if Closed is set, or if b ends in the
// beginning of an escape or of the closing quotes and last is false.
func (s *PythonString) Feed(dst, b []byte, last bool) (out []byte, n int) {
	for n < len(b) {
		switch c := b[n]; {
		case c == s.quote && !s.triple:
			s.Closed = true
			return dst, n + 1
		case c == s.quote:
			k := 1
			for k < 3 && n+k < len(b) && b[n+k] == c {
				k++
			}
			if k == 3 {
				s.Closed = true
				return dst, n + 3
			}
			if n+k == len(b) && !last {
				return dst, n
			}
			dst = AppendEscaped(dst, b[n:n+k])
			n += k
		case c == '\\':
			var width int
			if dst, width = appendEscape(dst, b[n:], last); width == 0 {
				return dst, n
			}
			n += width
		default:
			k := n + 1
			for k < len(b) && b[k] != s.quote && b[k] != '\\' {
				k++
			}
			dst = AppendEscaped(dst, b[n:k])
			n = k
		}
	}
	return dst, n
}

// appendEscape appends the character of the escape at the beginning of b. Width is the number of
// its bytes; 0: more text is needed, which last excludes. An escape that Python does not know is
// its own text.
func appendEscape(dst, b []byte, last bool) (out []byte, width int) {
	if len(b) == 1 {
		if last {
			return append(dst, '\\', '\\'), 1
		}
		return dst, 0
	}
	digits := 0
	var r rune
	switch c := b[1]; c {
	case '\\', '\'', '"', '/':
		return AppendEscaped(dst, b[1:2]), 2
	case '\n':
		return dst, 2
	case 'n', 't', 'r', 'b', 'f':
		return append(dst, '\\', c), 2
	case 'a':
		return append(dst, `\u0007`...), 2
	case 'v':
		return append(dst, `\u000b`...), 2
	case '0':
		return append(dst, `\u0000`...), 2
	case 'x':
		digits = 2
	case 'u':
		digits = 4
	case 'U':
		digits = 8
	default:
		return append(dst, '\\', '\\'), 1
	}
	for k := range digits {
		if 2+k == len(b) && !last {
			return dst, 0
		}
		if 2+k >= len(b) || unhex(b[2+k]) < 0 {
			return append(dst, '\\', '\\'), 1
		}
		r = r<<4 | rune(unhex(b[2+k]))
	}
	if digits == 4 { // also halves of surrogate pairs
		return append(dst, b[:6]...), 6
	}
	return AppendEscaped(dst, utf8.AppendRune(nil, r)), 2 + digits
}

// Spaces is JSON's white space.
const Spaces = " \n\t\r"

// IsSpace reports whether c is white space.
func IsSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }
