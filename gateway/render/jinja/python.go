package jinja

import (
	"cmp"
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
	case string:
		s, ok := b.(string)
		if !ok || len(a) != len(s) {
			return false
		}
		r.scans(a)
		return a == s
	case bool, int64, float64:
		if x, y, ok := both(asInt, a, b); ok {
			return x == y
		}
		x, y, ok := both(asFloat, a, b)
		return ok && x == y
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
	case nil, BigInt, *namespace, *macro, *loop, *iterator, *function:
		return a == b
	}
	r.fail(ErrUnsupported, "comparing a %s", typeName(a))
	return false
}

func (r *run) equalSeq(a, b []Value, depth int) bool {
	return slices.EqualFunc(a, b, func(x, y Value) bool { return r.equal(x, y, depth+1) })
}

func (r *run) equalDict(a, b *Dict, depth int) bool {
	if a.Len() != b.Len() {
		return false
	}
	for i, k := range a.keys {
		v, ok := r.entry(b, k)
		if !ok || !r.equal(a.vals[i], v, depth+1) {
			return false
		}
	}
	return true
}

// order returns a negative number if a < b in Python, a positive one if b < a, and otherwise 0. It
// fails where Python raises a TypeError.
func (r *run) order(a, b Value, depth int) int {
	r.enter(depth, 0)
	a, b = plain(a), plain(b)
	if x, y, ok := both(asInt, a, b); ok {
		return cmp.Compare(x, y)
	}
	if x, y, ok := both(asFloat, a, b); ok {
		if math.IsNaN(x) || math.IsNaN(y) {
			return 0
		}
		return cmp.Compare(x, y)
	}
	if s, t, ok := both(asStr, a, b); ok {
		r.scans(s)
		return cmp.Compare(s, t)
	}
	l, m, ok := sequences(a, b)
	if !ok {
		r.fail(ErrRender, "'<' not supported between instances of '%s' and '%s'", typeName(a), typeName(b))
	}
	for i := range min(len(l), len(m)) {
		if !r.equal(l[i], m[i], depth+1) {
			return r.order(l[i], m[i], depth+1)
		}
	}
	return cmp.Compare(len(l), len(m))
}
