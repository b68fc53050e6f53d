package jinja

import (
	"fmt"
	"math"
	"slices"
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
	return r.reprOf(v)
}

// reprOf is Python's repr(v).
func (r *run) reprOf(v Value) string {
	var b strings.Builder
	r.repr(&b, v, 0)
	r.fits(b.Len())
	return b.String()
}

// enter charges for a value that is printed or compared, within depth others and after n bytes of
// output, and fails past the bounds of both.
func (r *run) enter(depth, n int) {
	r.charge(1)
	if depth > maxValueDepth {
		r.fail(ErrLimit, "a value nests deeper than %d", maxValueDepth)
	}
	if n > maxOutput {
		r.fail(ErrLimit, "a string is longer than %d bytes", maxOutput)
	}
}

// repr writes Python's repr(v).
func (r *run) repr(b *strings.Builder, v Value, depth int) {
	r.enter(depth, b.Len())
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
		r.reprSeq(b, typeName(v)+"([", v.list(), "])", depth)
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
	}
	b.WriteByte('}')
}

// reprString quotes with ' unless only ' occurs in s.
func reprString(b *strings.Builder, s string) {
	quote := '\''
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b.WriteRune(quote)
	for _, c := range s {
		switch short := strings.IndexRune("\\\n\r\t", c); {
		case short >= 0:
			b.WriteByte('\\')
			b.WriteByte(`\nrt`[short])
		case c == quote:
			b.WriteByte('\\')
			b.WriteRune(c)
		case unicode.IsPrint(c):
			b.WriteRune(c)
		case c < 0x100:
			fmt.Fprintf(b, `\x%02x`, c)
		case c < 0x10000:
			fmt.Fprintf(b, `\u%04x`, c)
		default:
			fmt.Fprintf(b, `\U%08x`, c)
		}
	}
	b.WriteRune(quote)
}

// floatRepr is repr of a float: the shortest digits that read back the same,
// with an exponent from 1e16 up and below 1e-4.
func floatRepr(f float64) string {
	format := byte('f')
	a := math.Abs(f)
	switch {
	case math.IsNaN(f) || math.IsInf(f, 0):
		return strings.ToLower(strings.TrimPrefix(strconv.FormatFloat(f, 'g', -1, 64), "+"))
	case a != 0 && (a < 1e-4 || a >= 1e16):
		format = 'e' // Go, like Python, writes at least two exponent digits
	}
	s := strconv.FormatFloat(f, format, -1, 64)
	if format == 'f' && !strings.Contains(s, ".") {
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
	r.enter(depth, 0)
	a, b = plain(a), plain(b)
	switch a := a.(type) {
	case nil:
		return b == nil
	case string:
		s, ok := b.(string)
		if !ok || len(a) != len(s) {
			return false
		}
		r.scans(a)
		return a == s
	case BigInt:
		return b == Value(a)
	case bool, int64, float64:
		return numbersEqual(a, b)
	case List, Tuple:
		x, y, ok := sequences(a, b)
		return ok && r.equalSeq(x, y, depth)
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
	x, ok1 := asInt(a)
	y, ok2 := asInt(b)
	if ok1 && ok2 {
		return x == y
	}
	f, ok1 := asFloat(a)
	g, ok2 := asFloat(b)
	return ok1 && ok2 && f == g
}

func (r *run) equalSeq(a, b []Value, depth int) bool {
	return slices.EqualFunc(a, b, func(x, y Value) bool { return r.equal(x, y, depth+1) })
}

func (r *run) equalDict(a, b *Dict, depth int) bool {
	if a.Len() != b.Len() {
		return false
	}
	for i, k := range a.keys {
		v, ok := b.Get(k)
		if !ok || !r.equal(a.vals[i], v, depth+1) {
			return false
		}
	}
	return true
}

// less is Python's a < b; it fails where Python raises a TypeError.
func (r *run) less(a, b Value, depth int) bool {
	r.enter(depth, 0)
	a, b = plain(a), plain(b)
	x, ok1 := asInt(a)
	y, ok2 := asInt(b)
	if ok1 && ok2 {
		return x < y
	}
	f, ok1 := asFloat(a)
	g, ok2 := asFloat(b)
	if ok1 && ok2 {
		return f < g
	}
	s, ok1 := a.(string)
	t, ok2 := b.(string)
	if ok1 && ok2 {
		r.scans(s)
		return s < t
	}
	l, m, ok := sequences(a, b)
	if !ok {
		r.fail(ErrRender, "'<' not supported between instances of '%s' and '%s'", typeName(a), typeName(b))
	}
	for i := range min(len(l), len(m)) {
		if !r.equal(l[i], m[i], depth+1) {
			return r.less(l[i], m[i], depth+1)
		}
	}
	return len(l) < len(m)
}
