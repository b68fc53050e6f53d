package jinja

import (
	"math"
	"strconv"
	"strings"
	"unicode"
)

// maxValueDepth bounds how deep values may nest where they are printed or
// compared. Python's own limit is about a thousand.
const maxValueDepth = 200

// str is Python's str(v).
func (r *run) str(v Value) string {
	switch v := v.(type) {
	case string:
		return v
	case markup:
		return string(v)
	case *undefined:
		return ""
	}
	var b strings.Builder
	r.repr(&b, v, 0)
	s := b.String()
	r.fits(len(s))
	return s
}

// repr writes Python's repr(v).
func (r *run) repr(b *strings.Builder, v Value, depth int) {
	if !r.charge(1) {
		return
	}
	if depth > maxValueDepth {
		r.fail(ErrLimit, "a value nests deeper than %d", maxValueDepth)
		return
	}
	if b.Len() > maxOutput {
		r.fail(ErrLimit, "a string is longer than %d bytes", maxOutput)
		return
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("None")
	case bool:
		b.WriteString(map[bool]string{true: "True", false: "False"}[v])
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case BigInt:
		b.WriteString(string(v))
	case float64:
		b.WriteString(floatRepr(v))
	case string:
		reprString(b, v)
	case markup:
		b.WriteString("Markup(")
		reprString(b, string(v))
		b.WriteByte(')')
	case List:
		r.reprSeq(b, "[", v, "]", depth)
	case Tuple:
		closing := ")"
		if len(v) == 1 {
			closing = ",)"
		}
		r.reprSeq(b, "(", v, closing, depth)
	case *Dict:
		r.reprDict(b, v, depth)
	case dictView:
		b.WriteString("dict_" + v.kind + "(")
		r.reprSeq(b, "[", v.list(), "])", depth)
	case intRange:
		b.WriteString("range(" + strconv.FormatInt(v.start, 10) + ", " + strconv.FormatInt(v.stop, 10))
		if v.step != 1 {
			b.WriteString(", " + strconv.FormatInt(v.step, 10))
		}
		b.WriteByte(')')
	case *undefined:
		b.WriteString("Undefined")
	case *namespace:
		b.WriteString("<Namespace ")
		r.reprDict(b, v.vars, depth)
		b.WriteByte('>')
	default:
		r.fail(ErrUnsupported, "printing a %s", typeName(v))
	}
}

func (r *run) reprSeq(b *strings.Builder, opening string, vs []Value, closing string, depth int) {
	b.WriteString(opening)
	for i, v := range vs {
		if i > 0 {
			b.WriteString(", ")
		}
		r.repr(b, v, depth+1)
		if r.err != nil {
			return
		}
	}
	b.WriteString(closing)
}

func (r *run) reprDict(b *strings.Builder, d *Dict, depth int) {
	b.WriteByte('{')
	for i, k := range d.keys {
		if i > 0 {
			b.WriteString(", ")
		}
		r.repr(b, k, depth+1)
		b.WriteString(": ")
		r.repr(b, d.vals[i], depth+1)
		if r.err != nil {
			return
		}
	}
	b.WriteByte('}')
}

const hexDigits = "0123456789abcdef"

// reprString quotes with ' unless only ' occurs in s.
func reprString(b *strings.Builder, s string) {
	quote := '\''
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b.WriteRune(quote)
	for _, c := range s {
		switch {
		case c == quote || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case c == '\n':
			b.WriteString(`\n`)
		case c == '\r':
			b.WriteString(`\r`)
		case c == '\t':
			b.WriteString(`\t`)
		case unicode.IsPrint(c):
			b.WriteRune(c)
		case c < 0x100:
			writeHex(b, `\x`, c, 2)
		case c < 0x10000:
			writeHex(b, `\u`, c, 4)
		default:
			writeHex(b, `\U`, c, 8)
		}
	}
	b.WriteRune(quote)
}

func writeHex(b *strings.Builder, prefix string, c rune, digits int) {
	b.WriteString(prefix)
	for shift := 4 * (digits - 1); shift >= 0; shift -= 4 {
		b.WriteByte(hexDigits[c>>shift&15])
	}
}

// floatRepr is repr of a float: the shortest digits that read back the same,
// with an exponent from 1e16 up and below 1e-4.
func floatRepr(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		s := strconv.FormatFloat(f, 'e', -1, 64)
		return s // Go, like Python, writes at least two exponent digits
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// isSpace is str.isspace of one character, and \s of Python's re.
func isSpace(c rune) bool {
	return unicode.IsSpace(c) || c >= 0x1c && c <= 0x1f
}

// equal is Python's a == b.
func (r *run) equal(a, b Value, depth int) bool {
	if !r.charge(1) {
		return false
	}
	if depth > maxValueDepth {
		r.fail(ErrLimit, "a value nests deeper than %d", maxValueDepth)
		return false
	}
	a, b = plain(a), plain(b)
	switch a := a.(type) {
	case nil:
		return b == nil
	case string:
		s, ok := b.(string)
		return ok && len(a) == len(s) && r.scans(a) && a == s
	case BigInt:
		s, ok := b.(BigInt)
		return ok && a == s
	case bool, int64, float64:
		return numbersEqual(a, b)
	case List:
		l, ok := b.(List)
		return ok && r.equalSeq(a, l, depth)
	case Tuple:
		l, ok := b.(Tuple)
		return ok && r.equalSeq(a, l, depth)
	case *Dict:
		d, ok := b.(*Dict)
		return ok && r.equalDict(a, d, depth)
	case *undefined:
		return isUndefined(b)
	case intRange:
		g, ok := b.(intRange)
		n := a.length()
		return ok && n == g.length() && (n == 0 || a.start == g.start && (n == 1 || a.step == g.step))
	case *namespace, *macro, *loop, *iterator, *function:
		return a == b
	}
	r.fail(ErrUnsupported, "comparing a %s", typeName(a))
	return false
}

func numbersEqual(a, b Value) bool {
	x, xi := asInt(a)
	y, yi := asInt(b)
	if xi && yi {
		return x == y
	}
	f, ok1 := asFloat(a)
	g, ok2 := asFloat(b)
	return ok1 && ok2 && f == g
}

func (r *run) equalSeq(a, b []Value, depth int) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !r.equal(a[i], b[i], depth+1) {
			return false
		}
	}
	return true
}

func (r *run) equalDict(a, b *Dict, depth int) bool {
	if a.Len() != b.Len() {
		return false
	}
	for i, k := range a.keys {
		v, ok := b.get(k)
		if !ok || !r.equal(a.vals[i], v, depth+1) {
			return false
		}
	}
	return true
}

// less is Python's a < b; it fails where Python raises a TypeError.
func (r *run) less(a, b Value, depth int) bool {
	if !r.charge(1) {
		return false
	}
	if depth > maxValueDepth {
		r.fail(ErrLimit, "a value nests deeper than %d", maxValueDepth)
		return false
	}
	a, b = plain(a), plain(b)
	x, xi := asInt(a)
	y, yi := asInt(b)
	if xi && yi {
		return x < y
	}
	f, ok1 := asFloat(a)
	g, ok2 := asFloat(b)
	if ok1 && ok2 {
		return f < g
	}
	switch a := a.(type) {
	case string:
		if s, ok := b.(string); ok {
			return r.scans(a) && a < s
		}
	case List:
		if l, ok := b.(List); ok {
			return r.lessSeq(a, l, depth)
		}
	case Tuple:
		if l, ok := b.(Tuple); ok {
			return r.lessSeq(a, l, depth)
		}
	}
	r.fail(ErrRender, "'<' not supported between instances of '%s' and '%s'", typeName(a), typeName(b))
	return false
}

func (r *run) lessSeq(a, b []Value, depth int) bool {
	for i := range min(len(a), len(b)) {
		if !r.equal(a[i], b[i], depth+1) {
			return r.err == nil && r.less(a[i], b[i], depth+1)
		}
	}
	return len(a) < len(b)
}
