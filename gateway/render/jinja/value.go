package jinja

import (
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Value is a Python value: nil (None), bool, int64, float64, BigInt, string, List,
// Tuple or *Dict, and inside the evaluator the types below. A render never changes
// a Value of its input, so that renders may share inputs.
type Value = any

// List is a Python list.
type List []Value

// Tuple is a Python tuple.
type Tuple []Value

// BigInt is an integer beyond 64 bits, in decimal. It can be printed and
// compared for equality; arithmetic with it fails.
type BigInt string

// dictIndexFrom is the size from which a Dict finds keys by a map: below it,
// comparing a few strings is cheaper.
const dictIndexFrom = 9

// Dict is a Python dict: it keeps the order in which keys were first set.
type Dict struct {
	keys  []Value
	vals  []Value
	index map[Value]int // normalized key → position; nil below dictIndexFrom keys
}

// NewDict returns a dict of alternating string keys and values.
func NewDict(pairs ...Value) *Dict {
	d := new(Dict)
	for i := 0; i+1 < len(pairs); i += 2 {
		d.Set(pairs[i], pairs[i+1])
	}
	return d
}

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// At returns the i-th key and its value.
func (d *Dict) At(i int) (key, v Value) { return d.keys[i], d.vals[i] }

// normalKey maps keys that are equal in Python to equal Go values; ok is false
// for a key that Python cannot hash or that is not supported as a key.
func normalKey(k Value) (Value, bool) {
	switch k := k.(type) {
	case nil, string, int64, BigInt:
		return k, true
	case bool:
		return boolInt(k), true
	case markup:
		return string(k), true
	case float64:
		if i := int64(k); float64(i) == k {
			return i, true
		}
		return k, true
	}
	return nil, false
}

func (d *Dict) find(key Value) int {
	k, ok := normalKey(key)
	if !ok {
		return -1
	}
	if d.index == nil {
		return slices.IndexFunc(d.keys, func(have Value) bool { h, _ := normalKey(have); return h == k })
	}
	if i, ok := d.index[k]; ok {
		return i
	}
	return -1
}

// Get returns the value of key.
func (d *Dict) Get(key Value) (Value, bool) {
	if i := d.find(key); i >= 0 {
		return d.vals[i], true
	}
	return nil, false
}

// Set sets the value of key; a new key goes to the end. It returns false if key cannot be a key.
func (d *Dict) Set(key, v Value) bool {
	k, ok := normalKey(key)
	if !ok {
		return false
	}
	if i := d.find(key); i >= 0 {
		d.vals[i] = v
		return true
	}
	d.keys, d.vals = append(d.keys, plain(key)), append(d.vals, v)
	switch n := len(d.keys); {
	case n == dictIndexFrom:
		d.index = make(map[Value]int, 2*n)
		for i, key := range d.keys {
			k, _ := normalKey(key)
			d.index[k] = i
		}
	case n > dictIndexFrom:
		d.index[k] = n - 1
	}
	return true
}

// clone returns a copy whose keys can be set without changing d.
func (d *Dict) clone() *Dict {
	return &Dict{slices.Clone(d.keys), slices.Clone(d.vals), maps.Clone(d.index)}
}

// undefined is Jinja's Undefined: it prints as nothing, is false and empty, and
// any other use fails with its message.
type undefined struct{ msg string }

// namespace is Jinja's namespace object, the only value that a template can change.
type namespace struct{ vars *Dict }

// dictView is the result of items(), keys() or values() of a dict.
type dictView struct {
	d    *Dict
	kind string // dict_items, dict_keys or dict_values
}

// intRange is Python's range.
type intRange struct{ start, stop, step int64 }

func (g intRange) length() int64 { return steps(g.start, g.stop, g.step) }

func (g intRange) at(i int64) Value { return g.start + i*g.step }

// iterator is a Python generator or iterator: it has no length and can be iterated over once.
type iterator struct {
	name  string // of its Python type
	items []Value
}

func boolInt(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// asInt returns v as Python's integer, which a bool also is.
func asInt(v Value) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case bool:
		return boolInt(v), true
	}
	return 0, false
}

// asFloat returns any number as a float.
func asFloat(v Value) (float64, bool) {
	if f, ok := v.(float64); ok {
		return f, true
	}
	i, ok := asInt(v)
	return float64(i), ok
}

// asStr returns a string, or markup as one.
func asStr(v Value) (s string, ok bool) {
	s, ok = plain(v).(string)
	return s, ok
}

func isUndefined(v Value) bool {
	_, ok := v.(*undefined)
	return ok
}

// truth is Python's bool(v).
func truth(v Value) bool {
	switch v := v.(type) {
	case nil:
		return false
	case bool:
		return v
	case string:
		return v != ""
	case int64:
		return v != 0
	case float64:
		return v != 0
	}
	n, ok := length(v)
	return n > 0 || !ok
}

// length is Python's len(v); ok is false where that is a TypeError.
func length(v Value) (n int, ok bool) {
	if vs, ok := sequence(v); ok {
		return len(vs), true
	}
	switch v := plain(v).(type) {
	case string:
		return utf8.RuneCountInString(v), true
	case *Dict:
		return v.Len(), true
	case dictView:
		return v.d.Len(), true
	case intRange:
		return int(v.length()), true
	case *undefined:
		return 0, true
	}
	return 0, false
}

// sequence returns the elements of a list or tuple, which the caller must not change.
func sequence(v Value) (vs []Value, ok bool) {
	switch v := v.(type) {
	case List:
		return v, true
	case Tuple:
		return v, true
	}
	return nil, false
}

// like returns vs as a tuple if v is one, otherwise as a list.
func like(v Value, vs []Value) Value {
	if _, ok := v.(Tuple); ok {
		return Tuple(vs)
	}
	return List(vs)
}

// both returns what as returns of two values; ok is false unless both are such.
func both[T any](as func(Value) (T, bool), a, b Value) (x, y T, ok bool) {
	if x, ok = as(a); ok {
		y, ok = as(b)
	}
	return x, y, ok
}

// mapped returns what f returns for each of s.
func mapped[S, T any](s []S, f func(S) T) []T {
	out := make([]T, len(s))
	for i, x := range s {
		out[i] = f(x)
	}
	return out
}

// is returns v as a T; ok is false if it has another type.
func is[T any](v Value) (x T, ok bool) {
	x, ok = v.(T)
	return x, ok
}

// want returns what as returns of v. If v is not such, it fails: with the message of v if that is
// undefined, else with msg, in which %s is replaced by the type of v.
func want[T any](r *run, as func(Value) (T, bool), v Value, msg string) T {
	x, ok := as(v)
	if !ok {
		r.reject(v, "%s", strings.Replace(msg, "%s", typeName(v), 1))
	}
	return x
}

func (r *run) wantStr(v Value) string { return want(r, asStr, v, "expected str, got %s") }

func (r *run) wantInt(v Value) int64 {
	return want(r, asInt, v, "'%s' object cannot be interpreted as an integer")
}

// sequences returns the elements of two lists or of two tuples; ok is false for anything else.
func sequences(a, b Value) (x, y []Value, ok bool) {
	x, y, ok = both(sequence, a, b)
	return x, y, ok && typeName(a) == typeName(b)
}

// typeName is type(v).__name__.
func typeName(v Value) string {
	switch v := v.(type) {
	case nil:
		return "NoneType"
	case bool:
		return "bool"
	case int64, BigInt:
		return "int"
	case float64:
		return "float"
	case string:
		return "str"
	case markup:
		return "Markup"
	case List:
		return "list"
	case Tuple:
		return "tuple"
	case *Dict:
		return "dict"
	case interface{ typeName() string }:
		return v.typeName()
	}
	return "function"
}

func (v dictView) typeName() string  { return v.kind }
func (intRange) typeName() string    { return "range" }
func (v *iterator) typeName() string { return v.name }
func (*undefined) typeName() string  { return "Undefined" }
func (*namespace) typeName() string  { return "Namespace" }
func (*macro) typeName() string      { return "Macro" }
func (*loop) typeName() string       { return "LoopContext" }
func (method) typeName() string      { return "builtin_function_or_method" }

// items returns the elements that iterating over v yields, and charges for them; ok is false
// where v is not iterable. It exhausts an iterator. The caller must not change the result.
func (r *run) items(v Value) (out []Value, ok bool) {
	v = plain(v)
	n := 0
	switch v := v.(type) {
	case string:
		n = len(v)
	case *iterator:
		n = len(v.items)
	default:
		n, _ = length(v)
	}
	r.charge(n)
	if vs, ok := sequence(v); ok {
		return vs, true
	}
	switch v := v.(type) {
	case *Dict:
		return v.keys, true
	case dictView:
		return v.list(), true
	case *iterator:
		out, v.items = v.items, nil
		return out, true
	case *undefined:
		return nil, true
	case intRange:
		out = make([]Value, v.length())
		for i := range out {
			out[i] = v.at(int64(i))
		}
		return out, true
	case string:
		out = make([]Value, 0, len(v))
		for _, r := range v {
			out = append(out, string(r))
		}
		return out, true
	}
	return nil, false
}

// iterate is items, and fails where Python cannot iterate.
func (r *run) iterate(v Value) []Value {
	return want(r, r.items, v, "'%s' object is not iterable")
}

func (v dictView) list() []Value {
	switch v.kind {
	case "dict_keys":
		return v.d.keys
	case "dict_values":
		return v.d.vals
	}
	out := make([]Value, v.d.Len())
	for i := range out {
		out[i] = Tuple{v.d.keys[i], v.d.vals[i]}
	}
	return out
}

// sliceBounds returns the first index, the end and the step of a Python slice of a sequence of n.
// Arguments that were not given are nil.
func sliceBounds(n int, start, stop, step *int64) (first, end, by int) {
	by = 1
	if step != nil {
		by = int(max(min(*step, math.MaxInt32), -math.MaxInt32))
	}
	lo, hi, from, to := 0, n, 0, n
	if by < 0 {
		lo, hi, from, to = -1, n-1, n-1, -1
	}
	clamp := func(p *int64, missing int) int {
		if p == nil {
			return missing
		}
		i := *p
		if i < 0 {
			i += int64(n)
		}
		return int(max(min(i, int64(hi)), int64(lo)))
	}
	return clamp(start, from), clamp(stop, to), by
}

// steps returns how many numbers there are by step from start to before stop.
func steps[T int | int64](start, stop, step T) T {
	switch {
	case step > 0 && start < stop:
		return (stop-start-1)/step + 1
	case step < 0 && start > stop:
		return (start-stop-1)/-step + 1
	}
	return 0
}

// sliceString is s[start:stop:step] by characters.
func sliceString(s string, start, stop, step *int64) string {
	if step == nil || *step == 1 {
		n := utf8.RuneCountInString(s)
		first, end, _ := sliceBounds(n, start, stop, nil)
		end = max(first, end)
		if n == len(s) {
			return s[first:end]
		}
		from := byteOffset(s, first)
		return s[from : from+byteOffset(s[from:], end-first)]
	}
	rs := []rune(s)
	first, end, by := sliceBounds(len(rs), start, stop, step)
	var b strings.Builder
	for i := range steps(first, end, by) {
		b.WriteRune(rs[first+i*by])
	}
	return b.String()
}

// byteOffset returns the byte offset of the n-th character of s.
func byteOffset(s string, n int) int {
	i := 0
	for ; n > 0 && i < len(s); n-- {
		_, width := utf8.DecodeRuneInString(s[i:])
		i += width
	}
	return i
}
