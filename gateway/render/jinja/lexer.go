package jinja

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

type tokenKind uint8

const (
	tokEOF      tokenKind = iota
	tokData               // text between tags
	tokVarBegin           // {{
	tokVarEnd             // }}
	tokBegin              // {%
	tokEnd                // %}
	tokName
	tokString // text is the value
	tokInt    // value is an int64
	tokFloat  // value is a float64
	tokOp     // text is the operator
)

type token struct {
	kind  tokenKind
	text  string
	value Value
	line  int
}

func (t token) String() string {
	switch t.kind {
	case tokEOF:
		return "end of template"
	case tokData:
		return "text"
	case tokVarBegin:
		return "{{"
	case tokVarEnd:
		return "}}"
	case tokBegin:
		return "{%"
	case tokEnd:
		return "%}"
	}
	return strconv.Quote(t.text)
}

// lexer cuts a template into tokens, applying whitespace control as Jinja does
// with trim_blocks and lstrip_blocks: a line break after a block or comment tag
// goes, and so does white space before one at the start of a line.
type lexer struct {
	src       string
	pos       int
	line      int
	lineStart bool   // what was last consumed ended with a line break
	balance   []byte // closing brackets still expected in this tag
	out       []token
	err       error
}

func lex(src string) ([]token, error) {
	src = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(src)
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1, lineStart: true}
	for l.err == nil && l.pos < len(l.src) {
		l.root()
	}
	l.emit(tokEOF, "", nil)
	return l.out, l.err
}

func (l *lexer) fail(kind error, format string, args ...any) {
	if l.err == nil {
		l.err = &Error{Kind: kind, Line: l.line, Msg: fmt.Sprintf(format, args...)}
	}
}

func (l *lexer) emit(kind tokenKind, text string, v Value) {
	l.out = append(l.out, token{kind, text, v, l.line})
}

// take consumes the source up to end.
func (l *lexer) take(end int) {
	text := l.src[l.pos:end]
	l.line += strings.Count(text, "\n")
	if text != "" {
		l.lineStart = text[len(text)-1] == '\n'
	}
	l.pos = end
}

// root consumes the text up to the next tag, and the tag.
func (l *lexer) root() {
	rest := l.src[l.pos:]
	n := 0
	for {
		k := strings.IndexByte(rest[n:], '{')
		if k < 0 || n+k+1 >= len(rest) {
			l.emit(tokData, rest, nil)
			l.take(len(l.src))
			return
		}
		if n += k; strings.IndexByte("{%#", rest[n+1]) >= 0 {
			break
		}
		n++
	}
	text, tag := rest[:n], rest[n+1]
	body := l.pos + n + 2
	sign := byte(0)
	if body < len(l.src) && (l.src[body] == '-' || l.src[body] == '+') {
		sign = l.src[body]
		body++
	}
	if text = l.stripBefore(text, sign, tag != '{'); text != "" {
		l.emit(tokData, text, nil)
	}
	l.take(body)
	switch {
	case tag == '#':
		l.comment()
	case tag == '%' && l.raw():
	case tag == '%':
		l.emit(tokBegin, "", nil)
		l.tag(tokEnd)
	default:
		l.emit(tokVarBegin, "", nil)
		l.tag(tokVarEnd)
	}
}

// stripBefore applies the sign of a tag, and lstrip_blocks, to the text before.
func (l *lexer) stripBefore(text string, sign byte, block bool) string {
	if sign == '-' {
		return strings.TrimRightFunc(text, isSpace)
	}
	if sign == '+' || !block {
		return text
	}
	lineAt := strings.LastIndexByte(text, '\n') + 1
	if lineAt == 0 && !l.lineStart {
		return text
	}
	if strings.TrimLeftFunc(text[lineAt:], isSpace) == "" {
		return text[:lineAt]
	}
	return text
}

// afterBlock returns where a block or comment tag that is closed at end, where
// its sign is known, really ends.
func (l *lexer) afterBlock(end int, sign byte) int {
	switch {
	case sign == '-':
		return l.skipSpace(end)
	case sign != '+' && end < len(l.src) && l.src[end] == '\n':
		return end + 1
	}
	return end
}

func (l *lexer) skipSpace(at int) int {
	rest := l.src[at:]
	return at + len(rest) - len(strings.TrimLeftFunc(rest, isSpace))
}

func (l *lexer) comment() {
	k := strings.Index(l.src[l.pos:], "#}")
	if k < 0 && l.pos == len(l.src) {
		return // Jinja lets an opening at the very end pass
	}
	if k < 0 {
		l.fail(ErrSyntax, "missing end of comment tag")
		return
	}
	sign := byte(0)
	if k > 0 {
		sign = l.src[l.pos+k-1]
	}
	l.take(l.afterBlock(l.pos+k+2, sign))
}

// word returns the end of keyword, between white space, at at; or -1.
func (l *lexer) word(at int, keyword string) int {
	at = l.skipSpace(at)
	if !strings.HasPrefix(l.src[at:], keyword) {
		return -1
	}
	return l.skipSpace(at + len(keyword))
}

// raw consumes {% raw %}…{% endraw %} if that is what the block tag begins.
func (l *lexer) raw() bool {
	at := l.word(l.pos, "raw")
	switch {
	case at < 0:
		return false
	case strings.HasPrefix(l.src[at:], "-%}"):
		l.take(l.skipSpace(at + 3))
	case strings.HasPrefix(l.src[at:], "%}"):
		l.take(at + 2)
	default:
		return false
	}
	for from := l.pos; ; {
		k := strings.Index(l.src[from:], "{%")
		if k < 0 && l.pos == len(l.src) {
			return true // as for comments
		}
		if k < 0 {
			l.fail(ErrSyntax, "missing end of raw directive")
			return true
		}
		start, body := from+k, from+k+2
		sign := byte(0)
		if body < len(l.src) && (l.src[body] == '-' || l.src[body] == '+') {
			sign = l.src[body]
			body++
		}
		end := l.word(body, "endraw")
		if end < 0 {
			from = start + 2
			continue
		}
		closing := byte(0)
		if end < len(l.src) && (l.src[end] == '-' || l.src[end] == '+') {
			closing = l.src[end]
			end++
		}
		if !strings.HasPrefix(l.src[end:], "%}") {
			from = start + 2
			continue
		}
		if text := l.stripBefore(l.src[l.pos:start], sign, true); text != "" {
			l.emit(tokData, text, nil)
		}
		l.take(l.afterBlock(end+2, closing))
		return true
	}
}

// tag lexes the inside of a tag up to its end.
func (l *lexer) tag(closing tokenKind) {
	l.balance = l.balance[:0]
	for l.err == nil {
		if l.pos == len(l.src) {
			l.fail(ErrSyntax, "a tag is not closed")
			return
		}
		if len(l.balance) == 0 && l.closeTag(closing) {
			return
		}
		if at := l.skipSpace(l.pos); at > l.pos {
			l.take(at)
			continue
		}
		l.lexeme()
	}
}

func (l *lexer) closeTag(closing tokenKind) bool {
	rest := l.src[l.pos:]
	sign := byte(0)
	if rest[0] == '-' || rest[0] == '+' && closing == tokEnd {
		sign = rest[0]
		rest = rest[1:]
	}
	switch {
	case closing == tokEnd && strings.HasPrefix(rest, "%}"):
		l.emit(tokEnd, "", nil)
		l.take(l.afterBlock(len(l.src)-len(rest)+2, sign))
	case closing == tokVarEnd && strings.HasPrefix(rest, "}}"):
		end := len(l.src) - len(rest) + 2
		if sign == '-' {
			end = l.skipSpace(end)
		}
		l.emit(tokVarEnd, "", nil)
		l.take(end)
	default:
		return false
	}
	return true
}

// operators, longest first.
var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";"}

func (l *lexer) lexeme() {
	rest := l.src[l.pos:]
	c, width := utf8.DecodeRuneInString(rest)
	switch {
	case c >= '0' && c <= '9':
		l.number()
		return
	case c == '_' || unicode.IsLetter(c):
		end := width
		for end < len(rest) {
			c, w := utf8.DecodeRuneInString(rest[end:])
			if c != '_' && !unicode.IsLetter(c) && !unicode.IsNumber(c) {
				break
			}
			end += w
		}
		l.emit(tokName, rest[:end], nil)
		l.take(l.pos + end)
		return
	case c == '\'' || c == '"':
		l.quoted(rest)
		return
	}
	for _, op := range operators {
		if strings.HasPrefix(rest, op) {
			if l.bracket(op); l.err == nil {
				l.emit(tokOp, op, nil)
				l.take(l.pos + len(op))
			}
			return
		}
	}
	l.fail(ErrSyntax, "unexpected char %q", c)
}

func (l *lexer) bracket(op string) {
	switch op {
	case "{":
		l.balance = append(l.balance, '}')
	case "(":
		l.balance = append(l.balance, ')')
	case "[":
		l.balance = append(l.balance, ']')
	case "}", ")", "]":
		n := len(l.balance)
		if n == 0 {
			l.fail(ErrSyntax, "unexpected %q", op)
		} else if want := l.balance[n-1]; want != op[0] {
			l.fail(ErrSyntax, "unexpected %q, expected %q", op, string(want))
		} else {
			l.balance = l.balance[:n-1]
		}
	}
}

func digitsEnd(s string, i int, in string) int {
	start := i
	for i < len(s) && (strings.IndexByte(in, s[i]) >= 0 || s[i] == '_' && i > start && i+1 < len(s) && strings.IndexByte(in, s[i+1]) >= 0) {
		i++
	}
	return i
}

const decimal = "0123456789"

func (l *lexer) number() {
	rest := l.src[l.pos:]
	if end := prefixedInt(rest); end > 0 {
		l.integer(rest[:end])
		return
	}
	end := digitsEnd(rest, 0, decimal)
	float := false
	if end+1 < len(rest) && rest[end] == '.' {
		if fraction := digitsEnd(rest, end+1, decimal); fraction > end+1 {
			end, float = fraction, true
		}
	}
	if end < len(rest) && rest[end]|0x20 == 'e' {
		at := end + 1
		if at < len(rest) && (rest[at] == '+' || rest[at] == '-') {
			at++
		}
		if exponent := digitsEnd(rest, at, decimal); exponent > at {
			end, float = exponent, true
		}
	}
	// After a dot, as in x.0.1, Jinja reads no float.
	if float && (l.pos == 0 || l.src[l.pos-1] != '.') {
		f, err := strconv.ParseFloat(strings.ReplaceAll(rest[:end], "_", ""), 64)
		if err != nil && f == 0 {
			l.fail(ErrSyntax, "number %s: %v", rest[:end], err)
			return
		}
		l.emit(tokFloat, rest[:end], f)
		l.take(l.pos + end)
		return
	}
	end = digitsEnd(rest, 0, decimal)
	if rest[0] == '0' {
		end = digitsEnd(rest, 0, "0")
	}
	l.integer(rest[:end])
}

// prefixedInt returns the end of a 0x, 0o or 0b integer, or 0.
func prefixedInt(s string) int {
	if len(s) < 3 || s[0] != '0' {
		return 0
	}
	in := map[byte]string{'x': "0123456789abcdefABCDEF", 'o': "01234567", 'b': "01"}[s[1]|0x20]
	at := 2
	if s[at] == '_' {
		at++
	}
	if end := digitsEnd(s, at, in); in != "" && end > at {
		return end
	}
	return 0
}

func (l *lexer) integer(text string) {
	v, err := strconv.ParseInt(text, 0, 64)
	if err != nil {
		l.fail(ErrUnsupported, "integer %s beyond 64 bits", text)
		return
	}
	l.emit(tokInt, text, v)
	l.take(l.pos + len(text))
}

func (l *lexer) quoted(rest string) {
	end := 1
	for end < len(rest) && rest[end] != rest[0] {
		if rest[end] == '\\' {
			end++
		}
		end++
	}
	if end >= len(rest) {
		l.fail(ErrSyntax, "unexpected char %q: the string is not closed", rest[0])
		return
	}
	v, err := unescape(rest[1:end])
	if err != nil {
		l.fail(err.Kind, "%s", err.Msg)
		return
	}
	l.emit(tokString, v, v)
	l.take(l.pos + end + 1)
}

// unescape resolves the escapes of a Python string literal. Unknown ones stay.
func unescape(s string) (string, *Error) {
	if strings.IndexByte(s, '\\') < 0 {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		i++
		if k := strings.IndexByte(`\'"abfnrtv`, s[i]); k >= 0 {
			b.WriteByte("\\'\"\a\b\f\n\r\t\v"[k])
			continue
		}
		digits := map[byte]int{'x': 2, 'u': 4, 'U': 8}[s[i]]
		switch {
		case digits > 0:
			n, err := strconv.ParseUint(s[i+1:min(i+1+digits, len(s))], 16, 32)
			if err != nil || i+digits >= len(s) {
				return "", &Error{Kind: ErrSyntax, Msg: `truncated \` + s[i:i+1] + " escape"}
			}
			if n > unicode.MaxRune || n >= 0xd800 && n < 0xe000 {
				return "", &Error{Kind: ErrUnsupported, Msg: fmt.Sprintf("escape of U+%04X, which is no character", n)}
			}
			b.WriteRune(rune(n))
			i += digits
		case s[i] >= '0' && s[i] <= '7':
			n := rune(0)
			end := i
			for end < len(s) && end < i+3 && s[end] >= '0' && s[end] <= '7' {
				n = n*8 + rune(s[end]-'0')
				end++
			}
			b.WriteRune(n)
			i = end - 1
		case s[i] == 'N':
			return "", &Error{Kind: ErrUnsupported, Msg: `\N escape`}
		case s[i] == '\n': // a continued line
		case s[i] >= utf8.RuneSelf:
			return "", &Error{Kind: ErrUnsupported, Msg: "escape of a character outside ASCII"}
		default:
			b.WriteByte('\\')
			b.WriteByte(s[i])
		}
	}
	return b.String(), nil
}
