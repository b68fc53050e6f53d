package jinja

import (
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// tokenKind is the kind of a token, as errors name it.
type tokenKind string

const (
	tokEOF      tokenKind = "end of template"
	tokData     tokenKind = "text" // between tags
	tokVarBegin tokenKind = "{{"
	tokVarEnd   tokenKind = "}}"
	tokBegin    tokenKind = "{%"
	tokEnd      tokenKind = "%}"
	tokName     tokenKind = "name"
	tokString   tokenKind = "string"   // text is the value
	tokInt      tokenKind = "integer"  // value is an int64
	tokFloat    tokenKind = "float"    // value is a float64
	tokOp       tokenKind = "operator" // text is the operator
)

type token struct {
	kind  tokenKind
	text  string
	value Value
	line  int
}

func (t token) String() string {
	switch t.kind {
	case tokName, tokString, tokInt, tokFloat, tokOp:
		return strconv.Quote(t.text)
	}
	return string(t.kind)
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
	space    = `[\s\v\x1c-\x1f\x{85}\p{Z}]*`
	digits   = `[0-9](?:_?[0-9])*`
	exponent = `[eE][-+]?` + digits
)

var (
	tagBegin   = regexp.MustCompile(`\{[{%#]([-+]?)`)
	commentEnd = regexp.MustCompile(`([-+]?)#\}`)
	rawBegin   = regexp.MustCompile(`^` + space + `raw` + space + `(?:-%\}` + space + `|%\})`)
	rawEnd     = regexp.MustCompile(`\{%([-+]?)` + space + `endraw` + space + `([-+]?)%\}`)
	spaces     = regexp.MustCompile(`^` + space)
	varEnd     = regexp.MustCompile(`^(-?)\}\}`)
	blockEnd   = regexp.MustCompile(`^([-+]?)%\}`)
	escape     = regexp.MustCompile(`(?s)\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)`)
)

// lexemes are what is inside tags. They are tried in this order.
var lexemes = []struct {
	kind    tokenKind
	pattern *regexp.Regexp
}{
	{tokData, spaces}, // no token
	{tokName, regexp.MustCompile(`^[\p{L}_][\p{L}\p{N}_]*`)},
	{tokFloat, regexp.MustCompile(`^` + digits + `(?:\.` + digits + `(?:` + exponent + `)?|` + exponent + `)`)},
	{tokInt, regexp.MustCompile(`^(?i:0x(?:_?[0-9a-f])+|0o(?:_?[0-7])+|0b(?:_?[01])+|0(?:_?0)*|` + digits + `)`)},
	{tokString, regexp.MustCompile(`(?s)^(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")`)},
	{tokOp, regexp.MustCompile(`^(?://|\*\*|[=!<>]=|[-+*/%~\[\](){}<>=.:|,;])`)},
}

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

// emit adds a token, unless it is empty text.
func (l *lexer) emit(kind tokenKind, text string, v Value) {
	if kind != tokData || text != "" {
		l.out = append(l.out, token{kind, text, v, l.line})
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
		l.emit(tokData, rest, nil)
		l.take(len(l.src))
		return
	}
	tag := rest[at[0]+1]
	l.emit(tokData, l.stripBefore(rest[:at[0]], rest[at[2]:at[3]], tag != '{'), nil)
	l.take(l.pos + at[1])
	switch {
	case tag == '#':
		l.finish(commentEnd, "missing end of comment tag")
	case tag == '%' && l.match(rawBegin) != "":
		l.take(l.pos + len(l.match(rawBegin)))
		l.finish(rawEnd, "missing end of raw directive")
	case tag == '%':
		l.emit(tokBegin, "", nil)
		l.tag(blockEnd, tokEnd)
	default:
		l.emit(tokVarBegin, "", nil)
		l.tag(varEnd, tokVarEnd)
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

// finish consumes a comment or raw block up to its end, whose pattern has the signs of the tag's
// brackets; that of a comment has only the closing one. It emits the text of a raw block.
func (l *lexer) finish(end *regexp.Regexp, missing string) {
	rest := l.src[l.pos:]
	at := end.FindStringSubmatchIndex(rest)
	if at == nil && rest == "" {
		return // Jinja accepts an opening at the end of the template
	}
	if at == nil {
		l.fail(ErrSyntax, "%s", missing)
	}
	if end == rawEnd {
		l.emit(tokData, l.stripBefore(rest[:at[0]], rest[at[2]:at[3]], true), nil)
	}
	l.takeTag(l.pos+at[1], rest[at[len(at)-2]:at[len(at)-1]], true)
}

// tag lexes the inside of a tag up to its end, which is not within brackets.
func (l *lexer) tag(end *regexp.Regexp, closing tokenKind) {
	for l.balance = l.balance[:0]; l.pos < len(l.src); {
		at := end.FindStringSubmatch(l.src[l.pos:])
		if at != nil && len(l.balance) == 0 {
			l.emit(closing, "", nil)
			l.takeTag(l.pos+len(at[0]), at[1], closing == tokEnd)
			return
		}
		l.lexeme()
	}
	l.fail(ErrSyntax, "a tag is not closed")
}

func (l *lexer) lexeme() {
	for _, x := range lexemes {
		text := l.match(x.pattern)
		// After a dot, as in x.0.1, Jinja reads no float.
		if text == "" || x.kind == tokFloat && l.src[l.pos-1] == '.' {
			continue
		}
		end, v := l.pos+len(text), Value(nil)
		switch x.kind {
		case tokData:
			text = ""
		case tokFloat:
			v, _ = strconv.ParseFloat(strings.ReplaceAll(text, "_", ""), 64) // infinite where it is out of range
		case tokInt:
			i, err := strconv.ParseInt(text, 0, 64)
			if err != nil {
				l.fail(ErrUnsupported, "integer %s beyond 64 bits", text)
			}
			v = i
		case tokString:
			text = l.unescape(text[1 : len(text)-1])
		case tokOp:
			l.bracket(text)
		}
		l.emit(x.kind, text, v)
		l.take(end)
		return
	}
	c, _ := utf8.DecodeRuneInString(l.src[l.pos:])
	if c == '\'' || c == '"' {
		l.fail(ErrSyntax, "unexpected char %q: the string is not closed", c)
	}
	l.fail(ErrSyntax, "unexpected char %q", c)
}

// bracket checks that op, if it is a bracket, fits the ones that are open.
func (l *lexer) bracket(op string) {
	const opening, closing = "([{", ")]}"
	n := len(l.balance)
	switch k := strings.Index(opening, op); {
	case k >= 0:
		l.balance = append(l.balance, closing[k])
	case !strings.Contains(closing, op):
	case n == 0:
		l.fail(ErrSyntax, "unexpected %q", op)
	case l.balance[n-1] != op[0]:
		l.fail(ErrSyntax, "unexpected %q, expected %q", op, string(l.balance[n-1]))
	default:
		l.balance = l.balance[:n-1]
	}
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
