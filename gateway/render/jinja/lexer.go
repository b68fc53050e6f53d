package jinja

import (
	"regexp"
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

// tokenNames are the tokens that errors do not quote.
var tokenNames = map[tokenKind]string{
	tokEOF: "end of template", tokData: "text", tokVarBegin: "{{", tokVarEnd: "}}", tokBegin: "{%", tokEnd: "%}",
}

func (t token) String() string {
	if name, ok := tokenNames[t.kind]; ok {
		return name
	}
	return strconv.Quote(t.text)
}

// lexer splits a template into tokens, with Jinja's whitespace control for
// trim_blocks and lstrip_blocks: it removes a line break after a block or comment
// tag, and white space between the start of a line and such a tag.
type lexer struct {
	src       string
	pos       int
	line      int
	lineStart bool   // the last consumed character is a line break
	balance   []byte // closing brackets still expected in this tag
	out       []token
}

// What Jinja's lexer matches, with space as Python's \s.
const (
	space  = `[\s\v\x1c-\x1f\x{85}\p{Z}]*`
	digits = `[0-9](?:_?[0-9])*`
)

var (
	tagBegin   = regexp.MustCompile(`\{[{%#]([-+]?)`)
	commentEnd = regexp.MustCompile(`([-+]?)#\}`)
	rawBegin   = regexp.MustCompile(`^` + space + `raw` + space + `(?:-%\}` + space + `|%\})`)
	rawEnd     = regexp.MustCompile(`\{%([-+]?)` + space + `endraw` + space + `([-+]?)%\}`)
	spaces     = regexp.MustCompile(`^` + space)
	nameToken  = regexp.MustCompile(`^[\p{L}_][\p{L}\p{N}_]*`)
	operator   = regexp.MustCompile(`^(?://|\*\*|[=!<>]=|[-+*/%~\[\](){}<>=.:|,;])`)
	integer    = regexp.MustCompile(`^(?i:0x(?:_?[0-9a-f])+|0o(?:_?[0-7])+|0b(?:_?[01])+|0(?:_?0)*|` + digits + `)`)
	float      = regexp.MustCompile(`^` + digits + `(?:\.` + digits + `)?(?:[eE][-+]?` + digits + `)?`)
	quotation  = regexp.MustCompile(`(?s)^(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")`)
	escape     = regexp.MustCompile(`(?s)\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)`)
)

// lex returns the tokens of a template. It fails as described at fail.
func lex(src string) []token {
	src = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(src)
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1, lineStart: true}
	for l.pos < len(l.src) {
		l.root()
	}
	l.emit(tokEOF, "", nil)
	return l.out
}

func (l *lexer) fail(kind error, format string, args ...any) { fail(kind, l.line, format, args...) }

func (l *lexer) emit(kind tokenKind, text string, v Value) {
	l.out = append(l.out, token{kind, text, v, l.line})
}

// emitData emits the text between tags.
func (l *lexer) emitData(text string) {
	if text != "" {
		l.emit(tokData, text, nil)
	}
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

// match returns the text at the position that a pattern matches, or nothing.
func (l *lexer) match(pattern *regexp.Regexp) string { return pattern.FindString(l.src[l.pos:]) }

// root consumes the text up to the next tag, and the tag.
func (l *lexer) root() {
	rest := l.src[l.pos:]
	at := tagBegin.FindStringSubmatchIndex(rest)
	if at == nil {
		l.emitData(rest)
		l.take(len(l.src))
		return
	}
	tag := rest[at[0]+1]
	l.emitData(l.stripBefore(rest[:at[0]], rest[at[2]:at[3]], tag != '{'))
	l.take(l.pos + at[1])
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

// stripBefore applies the sign of a tag, and lstrip_blocks, to the text before the tag.
func (l *lexer) stripBefore(text, sign string, block bool) string {
	if sign == "-" {
		return strings.TrimRightFunc(text, isSpace)
	}
	lineAt := strings.LastIndexByte(text, '\n') + 1
	if sign == "" && block && (lineAt > 0 || l.lineStart) && strings.TrimLeftFunc(text[lineAt:], isSpace) == "" {
		return text[:lineAt]
	}
	return text
}

// takeTag consumes the source up to end, the end of a tag that closes with sign, and the white
// space that the sign or trim_blocks removes after it.
func (l *lexer) takeTag(end int, sign string, block bool) {
	l.take(end)
	if sign == "-" {
		l.take(end + len(l.match(spaces)))
	} else if block && sign == "" && strings.HasPrefix(l.src[end:], "\n") {
		l.take(end + 1)
	}
}

func (l *lexer) comment() {
	rest := l.src[l.pos:]
	at := commentEnd.FindStringSubmatchIndex(rest)
	if at == nil && rest == "" {
		return // Jinja accepts an opening at the end of the template
	}
	if at == nil {
		l.fail(ErrSyntax, "missing end of comment tag")
	}
	l.takeTag(l.pos+at[1], rest[at[2]:at[3]], true)
}

// raw consumes {% raw %}…{% endraw %} if that is the block tag at the position.
func (l *lexer) raw() bool {
	begin := l.match(rawBegin)
	if begin == "" {
		return false
	}
	l.take(l.pos + len(begin))
	rest := l.src[l.pos:]
	if rest == "" {
		return true // as for comments
	}
	at := rawEnd.FindStringSubmatchIndex(rest)
	if at == nil {
		l.fail(ErrSyntax, "missing end of raw directive")
	}
	l.emitData(l.stripBefore(rest[:at[0]], rest[at[2]:at[3]], true))
	l.takeTag(l.pos+at[1], rest[at[4]:at[5]], true)
	return true
}

// tag lexes the inside of a tag up to its end.
func (l *lexer) tag(closing tokenKind) {
	l.balance = l.balance[:0]
	for {
		if l.pos == len(l.src) {
			l.fail(ErrSyntax, "a tag is not closed")
		}
		if len(l.balance) == 0 && l.closeTag(closing) {
			return
		}
		if n := len(l.match(spaces)); n > 0 {
			l.take(l.pos + n)
		} else {
			l.lexeme()
		}
	}
}

func (l *lexer) closeTag(closing tokenKind) bool {
	rest := l.src[l.pos:]
	sign := ""
	if rest[0] == '-' || rest[0] == '+' && closing == tokEnd {
		sign = rest[:1]
	}
	if !strings.HasPrefix(rest[len(sign):], tokenNames[closing]) {
		return false
	}
	l.emit(closing, "", nil)
	l.takeTag(l.pos+len(sign)+2, sign, closing == tokEnd)
	return true
}

func (l *lexer) lexeme() {
	c, _ := utf8.DecodeRuneInString(l.src[l.pos:])
	kind, text, v := tokName, l.match(nameToken), Value(nil)
	end := l.pos + len(text)
	switch {
	case text != "":
	case c >= '0' && c <= '9':
		kind, text, v = l.number()
		end = l.pos + len(text)
	case c == '\'' || c == '"':
		kind, text = tokString, l.match(quotation)
		if text == "" {
			l.fail(ErrSyntax, "unexpected char %q: the string is not closed", c)
		}
		end = l.pos + len(text)
		text = l.unescape(text[1 : len(text)-1])
	default:
		kind, text = tokOp, l.match(operator)
		if text == "" {
			l.fail(ErrSyntax, "unexpected char %q", c)
		}
		end = l.pos + len(text)
		l.bracket(text)
	}
	l.emit(kind, text, v)
	l.take(end)
}

func (l *lexer) bracket(op string) {
	const opening, closing = "([{", ")]}"
	if k := strings.Index(opening, op); k >= 0 {
		l.balance = append(l.balance, closing[k])
	}
	if !strings.Contains(closing, op) {
		return
	}
	n := len(l.balance)
	if n == 0 {
		l.fail(ErrSyntax, "unexpected %q", op)
	}
	if want := l.balance[n-1]; want != op[0] {
		l.fail(ErrSyntax, "unexpected %q, expected %q", op, string(want))
	}
	l.balance = l.balance[:n-1]
}

func (l *lexer) number() (kind tokenKind, text string, v Value) {
	text = l.match(float)
	// After a dot, as in x.0.1, Jinja reads no float.
	if strings.ContainsAny(text, ".eE") && l.src[l.pos-1] != '.' {
		f, _ := strconv.ParseFloat(strings.ReplaceAll(text, "_", ""), 64) // infinite where it is out of range
		return tokFloat, text, f
	}
	text = l.match(integer)
	i, err := strconv.ParseInt(text, 0, 64)
	if err != nil {
		l.fail(ErrUnsupported, "integer %s beyond 64 bits", text)
	}
	return tokInt, text, i
}

// unescape resolves the escapes of a Python string literal. Unknown ones stay.
func (l *lexer) unescape(s string) string {
	return escape.ReplaceAllStringFunc(s, func(e string) string {
		if k := strings.IndexByte("\\'\"abfnrtv", e[1]); k >= 0 {
			return "\\'\"\a\b\f\n\r\t\v"[k : k+1]
		}
		number, base := e[2:], 16
		switch c := e[1]; {
		case c >= '0' && c <= '7':
			number, base = e[1:], 8
		case c == '\n': // a continued line
			return ""
		case c == 'N' || c >= utf8.RuneSelf:
			l.fail(ErrUnsupported, `escape \%s`, e[1:])
		case strings.IndexByte("xuU", c) < 0:
			return e
		case number == "":
			l.fail(ErrSyntax, `truncated %s escape`, e)
		}
		n, err := strconv.ParseUint(number, base, 32)
		if err != nil || n > unicode.MaxRune || n >= 0xd800 && n < 0xe000 {
			l.fail(ErrUnsupported, "escape of U+%04X, which is no character", n)
		}
		return string(rune(n))
	})
}
