package grammar

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// A value is a JSON value. Members keep their order, which encoding/json loses.
type value struct {
	kind  byte   // 'n' null, 'b' true or false, '0' number, '"' string, '[' array, '{' object
	yes   bool   // of a bool
	text  string // of a string; of a number as it is written
	arr   []*value
	keys  []string
	vals  []*value
	index map[string]int // of keys, where there are many

	// Of schemas: where the value is, and its number among those that were compiled.
	parent *value
	name   string
	res    *resource
	id     int32
}

// get returns a member, nil if there is none.
func (v *value) get(key string) *value {
	if v == nil || v.kind != '{' {
		return nil
	}
	if len(v.keys) > 16 && v.index == nil {
		v.index = make(map[string]int, len(v.keys))
		for i, k := range v.keys {
			v.index[k] = i
		}
	}
	if v.index != nil {
		if i, ok := v.index[key]; ok {
			return v.vals[i]
		}
		return nil
	}
	for i, k := range v.keys {
		if k == key {
			return v.vals[i]
		}
	}
	return nil
}

func (v *value) put(key string, x *value) {
	for i, k := range v.keys {
		if k == key {
			v.vals[i] = x
			return
		}
	}
	v.keys, v.vals, v.index = append(v.keys, key), append(v.vals, x), nil
}

func stringValue(s string) *value { return &value{kind: '"', text: s} }

func boolValue(b bool) *value { return &value{kind: 'b', yes: b} }

func numberValue(s string) *value { return &value{kind: '0', text: s} }

func arrayValue(vs ...*value) *value { return &value{kind: '[', arr: vs} }

// objectValue returns an object of keys and values in turn.
func objectValue(kv ...any) *value {
	v := &value{kind: '{'}
	for i := 0; i < len(kv); i += 2 {
		v.put(kv[i].(string), kv[i+1].(*value))
	}
	return v
}

// jsonReader reads one JSON value.
type jsonReader struct {
	text  string
	at    int
	depth int
}

func readJSON(text []byte, depth int) (*value, error) {
	r := &jsonReader{text: string(text), depth: depth}
	v, err := r.value()
	if err != nil {
		return nil, err
	}
	if r.space(); r.at < len(r.text) {
		return nil, r.bad("text after the value")
	}
	return v, nil
}

// below returns an error of a part as one of what has the part by a name.
func below(err error, name string) error {
	e := *err.(*Error)
	at, ok := strings.CutPrefix(e.Pointer, "#")
	if !ok {
		at = ""
	}
	e.Pointer = "#/" + escapePointer(clip(name)) + at
	return &e
}

func (r *jsonReader) bad(what string) error {
	return &Error{Keyword: "json", Pointer: "byte " + strconv.Itoa(r.at), Reason: what}
}

func (r *jsonReader) space() {
	for r.at < len(r.text) && strings.IndexByte(" \t\r\n", r.text[r.at]) >= 0 {
		r.at++
	}
}

func (r *jsonReader) next(c byte) bool {
	r.space()
	if r.at < len(r.text) && r.text[r.at] == c {
		r.at++
		return true
	}
	return false
}

func (r *jsonReader) value() (*value, error) {
	if r.depth--; r.depth < 0 {
		return nil, &Error{Keyword: "json", Pointer: "byte " + strconv.Itoa(r.at), Reason: "nested too deeply", Err: ErrBudget}
	}
	defer func() { r.depth++ }()
	r.space()
	if r.at >= len(r.text) {
		return nil, r.bad("value expected")
	}
	switch c := r.text[r.at]; {
	case c == '{':
		return r.object()
	case c == '[':
		r.at++
		v := &value{kind: '['}
		if r.next(']') {
			return v, nil
		}
		for {
			x, err := r.value()
			if err != nil {
				return nil, below(err, strconv.Itoa(len(v.arr)))
			}
			v.arr = append(v.arr, x)
			if r.next(']') {
				return v, nil
			}
			if !r.next(',') {
				return nil, r.bad("comma or ] expected")
			}
		}
	case c == '"':
		s, err := r.str()
		return stringValue(s), err
	case c == '-' || '0' <= c && c <= '9':
		return r.number()
	case strings.HasPrefix(r.text[r.at:], "true"):
		r.at += 4
		return boolValue(true), nil
	case strings.HasPrefix(r.text[r.at:], "false"):
		r.at += 5
		return boolValue(false), nil
	case strings.HasPrefix(r.text[r.at:], "null"):
		r.at += 4
		return &value{kind: 'n'}, nil
	}
	return nil, r.bad("value expected")
}

func (r *jsonReader) object() (*value, error) {
	r.at++
	v := &value{kind: '{'}
	if r.next('}') {
		return v, nil
	}
	seen := map[string]int{}
	for {
		r.space()
		if r.at >= len(r.text) || r.text[r.at] != '"' {
			return nil, r.bad("key expected")
		}
		key, err := r.str()
		if err != nil {
			return nil, err
		}
		if !r.next(':') {
			return nil, r.bad("colon expected")
		}
		x, err := r.value()
		if err != nil {
			return nil, below(err, key)
		}
		if i, twice := seen[key]; twice {
			v.vals[i] = x
		} else {
			seen[key] = len(v.keys)
			v.keys, v.vals = append(v.keys, key), append(v.vals, x)
		}
		if r.next('}') {
			return v, nil
		}
		if !r.next(',') {
			return nil, r.bad("comma or } expected")
		}
	}
}

func (r *jsonReader) number() (*value, error) {
	start := r.at
	digits := func() bool {
		from := r.at
		for r.at < len(r.text) && '0' <= r.text[r.at] && r.text[r.at] <= '9' {
			r.at++
		}
		return r.at > from
	}
	peek := func(set string) bool { return r.at < len(r.text) && strings.IndexByte(set, r.text[r.at]) >= 0 }
	if peek("-") {
		r.at++
	}
	if peek("0") {
		r.at++
	} else if !digits() {
		return nil, r.bad("digit expected")
	}
	if peek(".") {
		r.at++
		if !digits() {
			return nil, r.bad("digit expected")
		}
	}
	if peek("eE") {
		r.at++
		if peek("+-") {
			r.at++
		}
		if !digits() {
			return nil, r.bad("digit expected")
		}
	}
	return numberValue(r.text[start:r.at]), nil
}

func (r *jsonReader) str() (string, error) {
	r.at++
	var out strings.Builder
	for r.at < len(r.text) {
		c := r.text[r.at]
		switch {
		case c == '"':
			r.at++
			return out.String(), nil
		case c < 0x20:
			return "", r.bad("control character in a string")
		case c != '\\':
			ch, n := utf8.DecodeRuneInString(r.text[r.at:])
			if ch == utf8.RuneError && n == 1 {
				return "", r.bad("string is not UTF-8")
			}
			out.WriteString(r.text[r.at : r.at+n])
			r.at += n
		default:
			if err := r.unescape(&out); err != nil {
				return "", err
			}
		}
	}
	return "", r.bad("string without an end")
}

func (r *jsonReader) unescape(out *strings.Builder) error {
	if r.at+1 >= len(r.text) {
		return r.bad("string without an end")
	}
	c := r.text[r.at+1]
	if i := strings.IndexByte(`"\/bfnrt`, c); i >= 0 {
		out.WriteByte("\"\\/\b\f\n\r\t"[i])
		r.at += 2
		return nil
	}
	if c != 'u' {
		return r.bad("unknown escape in a string")
	}
	ch, ok := r.hex(r.at)
	if !ok {
		return r.bad("bad escape in a string")
	}
	r.at += 6
	if utf16.IsSurrogate(ch) {
		low, ok := r.hex(r.at)
		both := utf16.DecodeRune(ch, low)
		if !ok || both == utf8.RuneError {
			return r.bad("half a surrogate pair in a string")
		}
		r.at += 6
		ch = both
	}
	out.WriteRune(ch)
	return nil
}

// hex reads \uXXXX at a place.
func (r *jsonReader) hex(at int) (rune, bool) {
	if len(r.text) < at+6 || r.text[at] != '\\' || r.text[at+1] != 'u' {
		return 0, false
	}
	v, err := strconv.ParseUint(r.text[at+2:at+6], 16, 32)
	return rune(v), err == nil
}

// A decimal is a number without an exponent: the digits of its integer part, without leading
// zeros, and of its fraction, without trailing zeros.
type decimal struct {
	neg       bool
	int, frac string
}

// longestDecimal bounds the digits of a decimal on each side of the point.
const longestDecimal = 400

// parseDecimal returns the decimal of a JSON number.
func parseDecimal(s string) (decimal, error) {
	var d decimal
	text := s
	if strings.HasPrefix(s, "-") {
		d.neg, s = true, s[1:]
	}
	exp := 0
	if i := strings.IndexAny(s, "eE"); i >= 0 {
		var err error
		if exp, err = strconv.Atoi(strings.TrimPrefix(s[i+1:], "+")); err != nil || exp > longestDecimal || exp < -longestDecimal {
			return d, fmt.Errorf("%s is out of range", clip(text))
		}
		s = s[:i]
	}
	whole, frac, _ := strings.Cut(s, ".")
	for ; exp > 0; exp-- {
		if frac == "" {
			frac = "0"
		}
		whole, frac = whole+frac[:1], frac[1:]
	}
	for ; exp < 0; exp++ {
		if whole == "" {
			whole = "0"
		}
		whole, frac = whole[:len(whole)-1], whole[len(whole)-1:]+frac
	}
	d.int, d.frac = strings.TrimLeft(whole, "0"), strings.TrimRight(frac, "0")
	if len(d.int) > longestDecimal || len(d.frac) > longestDecimal {
		return d, fmt.Errorf("%s has too many digits", clip(text))
	}
	if d.int == "" && d.frac == "" {
		d.neg = false
	}
	return d, nil
}

// String returns d as JSON spells it.
func (d decimal) String() string {
	s := d.int
	if s == "" {
		s = "0"
	}
	if d.frac != "" {
		s += "." + d.frac
	}
	if d.neg {
		s = "-" + s
	}
	return s
}

// compare orders decimals.
func (d decimal) compare(x decimal) int {
	if d.neg != x.neg {
		if d.neg {
			return -1
		}
		return 1
	}
	c := compareMagnitude(d, x)
	if d.neg {
		c = -c
	}
	return c
}

func compareMagnitude(d, x decimal) int {
	if len(d.int) != len(x.int) {
		return len(d.int) - len(x.int)
	}
	if c := strings.Compare(d.int, x.int); c != 0 {
		return c
	}
	return strings.Compare(d.frac, x.frac)
}

// isPlain reports whether a number is written as an integer.
func isPlain(number string) bool { return !strings.ContainsAny(number, ".eE") }

// equalValues reports whether two JSON values are equal as JSON Schema defines it: numbers by
// value, members in any order. It counts a compile step for each item and member.
func equalValues(a, b *value, steps *int) bool {
	if a.kind != b.kind {
		return false
	}
	switch a.kind {
	case 'b':
		return a.yes == b.yes
	case '"':
		return a.text == b.text
	case '0':
		if a.text == b.text {
			return true
		}
		if isPlain(a.text) && isPlain(b.text) && a.text != "-0" && b.text != "-0" {
			return false // integers have one spelling
		}
		x, err := parseDecimal(a.text)
		y, err2 := parseDecimal(b.text)
		return err == nil && err2 == nil && x == y
	case '[':
		if len(a.arr) != len(b.arr) {
			return false
		}
		for i := range a.arr {
			if *steps++; !equalValues(a.arr[i], b.arr[i], steps) {
				return false
			}
		}
	case '{':
		if len(a.keys) != len(b.keys) {
			return false
		}
		for i, k := range a.keys {
			*steps++
			if x := b.get(k); x == nil || !equalValues(a.vals[i], x, steps) {
				return false
			}
		}
	}
	return true
}
