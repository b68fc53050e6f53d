package jinja

import (
	"math"
	"strings"
	"unicode/utf8"
)

// Value is a Python value as a template sees it: nil (None), bool, int64,
// float64, BigInt, string, List, Tuple or *Dict, and inside the evaluator the
// types further below. A Value is never changed once a template can see it, so
// inputs may be shared between renders.
type Value = any

// List is a Python list.
type List []Value

// Tuple is a Python tuple.
type Tuple []Value

// BigInt is an integer beyond 64 bits, in decimal. It can be printed and
// compared for equality; arithmetic with it is refused.
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
		d.put(pairs[i], pairs[i+1])
	}
	return d
}

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// Set gives key a value; a new key goes to the end.
func (d *Dict) Set(key string, v Value) { d.put(key, v) }

// Get returns the value of key.
func (d *Dict) Get(key string) (Value, bool) { return d.get(key) }

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
	if d.index != nil {
		if i, ok := d.index[k]; ok {
			return i
		}
		return -1
	}
	for i, have := range d.keys {
		if h, _ := normalKey(have); h == k {
			return i
		}
	}
	return -1
}

func (d *Dict) get(key Value) (Value, bool) {
	if i := d.find(key); i >= 0 {
		return d.vals[i], true
	}
	return nil, false
}

// put reports whether key can be a key.
func (d *Dict) put(key, v Value) bool {
	k, ok := normalKey(key)
	if !ok {
		return false
	}
	if i := d.find(key); i >= 0 {
		d.vals[i] = v
		return true
	}
	d.keys, d.vals = append(d.keys, plain(key)), append(d.vals, v)
	switch {
	case d.index != nil:
		d.index[k] = len(d.keys) - 1
	case len(d.keys) >= dictIndexFrom:
		d.index = make(map[Value]int, 2*len(d.keys))
		for i, have := range d.keys {
			h, _ := normalKey(have)
			d.index[h] = i
		}
	}
	return true
}

// clone returns a copy whose keys can be set without changing d.
func (d *Dict) clone() *Dict {
	c := &Dict{keys: append([]Value(nil), d.keys...), vals: append([]Value(nil), d.vals...)}
	if len(c.keys) >= dictIndexFrom {
		c.index = make(map[Value]int, len(c.keys))
		for i, have := range c.keys {
			h, _ := normalKey(have)
			c.index[h] = i
		}
	}
	return c
}

// undefined is Jinja's Undefined: prints as nothing, is false and empty, and
// fails with its message in any other use.
type undefined struct{ msg string }

// namespace is the one thing that a template can change.
type namespace struct{ vars *Dict }

// dictView is what items(), keys() and values() of a dict return.
type dictView struct {
	d    *Dict
	kind string // items, keys or values
}

// intRange is Python's range.
type intRange struct{ start, stop, step int64 }

func (g intRange) length() int64 {
	switch {
	case g.step > 0 && g.start < g.stop:
		return (g.stop-g.start-1)/g.step + 1
	case g.step < 0 && g.start > g.stop:
		return (g.start-g.stop-1)/-g.step + 1
	}
	return 0
}

func (g intRange) at(i int64) Value { return g.start + i*g.step }

// iterator is a Python generator or iterator: it has no length and can be gone
// through once.
type iterator struct {
	name  string // of its Python type
	items []Value
}

// method is a method bound to its receiver.
type method struct {
	recv Value
	name string
	def  *methodDef // nil: Python has it, this package has not
}

// function is a global function.
type function struct {
	call func(r *run, a callArgs) Value
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
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case markup:
		return v != ""
	case *undefined:
		return false
	}
	if n, ok := length(v); ok {
		return n > 0
	}
	return true
}

// length is Python's len(v); ok is false where that is a TypeError.
func length(v Value) (n int, ok bool) {
	switch v := v.(type) {
	case string:
		return utf8.RuneCountInString(v), true
	case markup:
		return utf8.RuneCountInString(string(v)), true
	case List:
		return len(v), true
	case Tuple:
		return len(v), true
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
	case dictView:
		return "dict_" + v.kind
	case intRange:
		return "range"
	case *iterator:
		return v.name
	case *undefined:
		return "Undefined"
	case *namespace:
		return "Namespace"
	case *macro:
		return "Macro"
	case *loop:
		return "LoopContext"
	case method:
		return "builtin_function_or_method"
	}
	return "function"
}

// items returns what iterating over v yields, and charges for it; ok is false
// where v is not iterable. An iterator is used up by it. The result must not be
// changed, and is empty when the render has to end.
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
	if !r.charge(n) {
		return nil, true
	}
	switch v := v.(type) {
	case List:
		return v, true
	case Tuple:
		return v, true
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

func (v dictView) list() []Value {
	switch v.kind {
	case "keys":
		return v.d.keys
	case "values":
		return v.d.vals
	}
	out := make([]Value, v.d.Len())
	for i := range out {
		out[i] = Tuple{v.d.keys[i], v.d.vals[i]}
	}
	return out
}

// sliceBounds turns Python slice arguments, absent ones nil, into a start, a
// step and a count of elements for a sequence of n.
func sliceBounds(n int, start, stop, step *int64) (first, by, count int) {
	by = 1
	if step != nil {
		by = int(max(min(*step, math.MaxInt32), -math.MaxInt32))
	}
	lo, hi := 0, n
	if by < 0 {
		lo, hi = -1, n-1
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
	var end int
	if by > 0 {
		first, end = clamp(start, lo), clamp(stop, hi)
		count = (end - first + by - 1) / by
	} else {
		first, end = clamp(start, hi), clamp(stop, lo)
		count = (first - end - by - 1) / -by
	}
	return first, by, max(count, 0)
}

// sliceString is s[start:stop:step] by characters.
func sliceString(s string, start, stop, step *int64) string {
	if step == nil || *step == 1 {
		n := utf8.RuneCountInString(s)
		first, _, count := sliceBounds(n, start, stop, nil)
		if n == len(s) {
			return s[first : first+count]
		}
		from := byteOffset(s, first)
		return s[from : from+byteOffset(s[from:], count)]
	}
	rs := []rune(s)
	first, by, count := sliceBounds(len(rs), start, stop, step)
	var b strings.Builder
	for i := range count {
		b.WriteRune(rs[first+i*by])
	}
	return b.String()
}

// byteOffset returns where the n-th character of s begins.
func byteOffset(s string, n int) int {
	i := 0
	for ; n > 0 && i < len(s); n-- {
		_, width := utf8.DecodeRuneInString(s[i:])
		i += width
	}
	return i
}
