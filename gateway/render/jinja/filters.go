package jinja

import (
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// otherFilters are Jinja's filters that Parse refuses by name: chat templates do not use them.
var otherFilters = strings.Fields(`batch center filesizeformat forceescape groupby pprint random slice striptags truncate
	urlencode urlize wordcount wordwrap xmlattr`)

var filters = map[string]*builtin{
	"abs":        define(filterAbs),
	"attr":       define(filterAttr, "name", absent),
	"capitalize": ofString(capitalize).keepMarkup(),
	"count":      define(filterLength),
	"d":          define(filterDefault, "default_value", "", "boolean", false),
	"default":    define(filterDefault, "default_value", "", "boolean", false),
	"dictsort":   define(filterDictSort, "case_sensitive", false, "by", "key", "reverse", false),
	"e":          define(func(r *run, v Value, _ []Value) Value { return r.escape(v) }),
	"escape":     define(func(r *run, v Value, _ []Value) Value { return r.escape(v) }),
	"first":      define(filterFirst),
	"float":      define(filterFloat, "default", 0.0),
	"format":     raw(filterFormat),
	"indent":     define(filterIndent, "width", int64(4), "first", false, "blank", false).keepMarkup(),
	"int":        define(filterInt, "default", int64(0), "base", int64(10)),
	"items":      define(filterItems),
	"join":       define(filterJoin, "d", "", "attribute", nil),
	"last":       define(filterLast),
	"length":     define(filterLength),
	"list":       define(func(r *run, v Value, _ []Value) Value { return List(slices.Clone(r.iterate(v))) }),
	"lower":      ofString(lower).keepMarkup(),
	"map":        raw(filterMap),
	"max":        define(filterMax, "case_sensitive", false, "attribute", nil),
	"min":        define(filterMin, "case_sensitive", false, "attribute", nil),
	"reject":     raw(func(r *run, v Value, a callArgs) Value { return r.choose(v, a, false, false) }),
	"rejectattr": raw(func(r *run, v Value, a callArgs) Value { return r.choose(v, a, true, false) }),
	"replace":    define(filterReplace, "old", absent, "new", absent, "count", nil),
	"reverse":    define(filterReverse).keepMarkup(),
	"round":      define(filterRound, "precision", int64(0), "method", "common"),
	"safe":       define(func(r *run, v Value, _ []Value) Value { return markup(r.str(v)) }),
	"select":     raw(func(r *run, v Value, a callArgs) Value { return r.choose(v, a, false, true) }),
	"selectattr": raw(func(r *run, v Value, a callArgs) Value { return r.choose(v, a, true, true) }),
	"sort":       define(filterSort, "reverse", false, "case_sensitive", false, "attribute", nil),
	"string":     define(func(r *run, v Value, _ []Value) Value { return r.str(v) }).keepMarkup(),
	"sum":        define(filterSum, "attribute", nil, "start", int64(0)),
	"title":      ofString(jinjaTitle),
	"tojson":     define(toJSON, "ensure_ascii", false, "indent", nil, "separators", nil, "sort_keys", false),
	"trim":       define(func(r *run, v Value, p []Value) Value { return r.strip(r.str(v), p[0], strings.TrimFunc) }, "chars", nil).keepMarkup(),
	"unique":     define(filterUnique, "case_sensitive", false, "attribute", nil),
	"upper":      ofString(upper).keepMarkup(),
}

// ofString returns a filter or method without parameters that maps a value's string.
func ofString(f func(string) string) *builtin {
	return define(func(r *run, v Value, _ []Value) Value { return f(r.str(v)) })
}

func generator(vs []Value) Value { return &iterator{name: "generator", items: vs} }

// getter returns a function that reads an attribute, as filters name it, from an element. Unless it
// is None, missing replaces what is undefined at any step.
func (r *run) getter(attribute, missing Value) func(Value) Value {
	var parts []Value
	if a, ok := attribute.(string); ok {
		for part := range strings.SplitSeq(a, ".") {
			if i, err := strconv.ParseUint(part, 10, 31); err == nil {
				parts = append(parts, int64(i))
			} else {
				parts = append(parts, part)
			}
		}
	} else if attribute != nil {
		parts = []Value{attribute}
	}
	return func(v Value) Value {
		for _, part := range parts {
			if v = r.item(v, part); missing != nil && isUndefined(v) {
				v = missing
			}
		}
		return v
	}
}

// folded is getter with strings in lower case, unless case matters.
func (r *run) folded(attribute, caseSensitive Value) func(Value) Value {
	get := r.getter(attribute, nil)
	return func(v Value) Value {
		v = plain(get(v))
		if s, ok := v.(string); ok && !truth(caseSensitive) {
			return lower(s)
		}
		return v
	}
}

func filterAbs(r *run, v Value, _ []Value) Value {
	if f, ok := v.(float64); ok {
		return math.Abs(f)
	}
	i := want(r, asInt, v, "bad operand type for abs(): '%s'")
	if i < 0 {
		return r.intOp("-", 0, i)
	}
	return i
}

func filterAttr(r *run, v Value, p []Value) Value {
	name := r.wantStr(p[0])
	r.use(v)
	if a, ok := r.attribute(v, name); ok {
		return a
	}
	return r.missing(v, name)
}

func filterDefault(_ *run, v Value, p []Value) Value {
	if isUndefined(v) || truth(p[1]) && !truth(v) {
		return p[0]
	}
	return v
}

func filterLength(r *run, v Value, _ []Value) Value {
	return int64(want(r, length, v, "object of type '%s' has no len()"))
}

func filterFirst(r *run, v Value, _ []Value) Value {
	vs := r.iterate(v)
	if len(vs) == 0 {
		return &undefined{"No first item, sequence was empty."}
	}
	if it, ok := v.(*iterator); ok { // only the first element is consumed
		it.items = vs[1:]
	}
	return vs[0]
}

func filterLast(r *run, v Value, _ []Value) Value {
	if it, ok := v.(*iterator); ok {
		r.fail(ErrRender, "'%s' object is not reversible", it.name)
	}
	if vs := r.iterate(v); len(vs) > 0 {
		return vs[len(vs)-1]
	}
	return &undefined{"No last item, sequence was empty."}
}

func filterItems(r *run, v Value, _ []Value) Value {
	if isUndefined(v) {
		return generator(nil)
	}
	d := want(r, is[*Dict], v, "Can only get item pairs from a mapping.")
	return generator(r.iterate(dictView{d, "dict_items"}))
}

func filterJoin(r *run, v Value, p []Value) Value {
	get := r.getter(p[1], nil)
	parts := mapped(r.iterate(v), func(e Value) string { return r.str(get(e)) })
	return r.joinStrings(parts, r.str(p[0]))
}

func filterReplace(r *run, v Value, p []Value) Value {
	return r.replace(r.str(v), r.str(p[0]), r.str(p[1]), p[2])
}

func filterReverse(r *run, v Value, _ []Value) Value {
	if s, ok := v.(string); ok {
		return r.slice(s, nil, nil, new(int64(-1)))
	}
	vs := slices.Clone(r.iterate(v))
	slices.Reverse(vs)
	if _, ok := v.(*iterator); ok {
		return List(vs)
	}
	return &iterator{name: typeName(v) + "_reverseiterator", items: vs}
}

func filterIndent(r *run, v Value, p []Value) Value {
	s := want(r, is[string], v, "indent of a %s")
	pad, ok := p[0].(string)
	if !ok {
		n := r.wantInt(p[0])
		if n > maxOutput {
			r.fail(ErrLimit, "indent by %d", n)
		}
		pad = strings.Repeat(" ", int(max(n, 0)))
	}
	lines := splitLines(s+"\n", false)
	r.charge(len(lines))
	r.fits(len(s) + len(lines)*(len(pad)+1))
	for i, line := range lines {
		if i > 0 && (line != "" || truth(p[2])) || i == 0 && truth(p[1]) {
			lines[i] = pad + line
		}
	}
	return strings.Join(lines, "\n")
}

func filterFormat(r *run, v Value, a callArgs) Value {
	if len(a.names) > 0 {
		r.fail(ErrUnsupported, "filter format with names")
	}
	return r.percent(r.str(v), a.pos)
}

func filterInt(r *run, v Value, p []Value) Value {
	r.use(v)
	switch v := plain(v).(type) {
	case int64, BigInt:
		return v
	case bool:
		return boolInt(v)
	case float64:
		if math.IsInf(v, 0) {
			r.fail(ErrRender, "cannot convert float infinity to integer")
		}
		return r.truncate(v, p[0])
	case string:
		if base := r.wantInt(p[1]); base != 10 {
			r.fail(ErrUnsupported, "filter int with base %d", base)
		}
		if s := strings.TrimFunc(v, isSpace); intString.MatchString(s) {
			i, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64)
			return r.intOrFail(i, err == nil)
		}
		if f, ok := parseFloat(v); ok {
			return r.truncate(f, p[0])
		}
	}
	return p[0]
}

// truncate returns f without its fraction; missing if f is not finite.
func (r *run) truncate(f float64, missing Value) Value {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return missing
	}
	return r.intOrFail(int64(f), math.Abs(f) < 1<<63)
}

// The numbers that Python's int and float read from strings.
var (
	intString   = regexp.MustCompile(`^[+-]?` + digits + `$`)
	floatString = regexp.MustCompile(`(?i)^[+-]?(inf(inity)?|nan|(` + digits + `(\.(` + digits + `)?)?|\.` + digits + `)(e[+-]?` + digits + `)?)$`)
)

// parseFloat is Python's float(v) for a string.
func parseFloat(v Value) (f float64, ok bool) {
	s, _ := asStr(v)
	s = strings.TrimFunc(s, isSpace)
	f, _ = strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64) // infinite where it is out of range
	return f, floatString.MatchString(s)
}

func filterFloat(r *run, v Value, p []Value) Value {
	r.use(v)
	if f, ok := asFloat(v); ok {
		return f
	}
	if f, ok := parseFloat(v); ok {
		return f
	}
	return p[0]
}

func filterRound(r *run, v Value, p []Value) Value {
	precision := r.wantInt(p[0])
	method := r.str(p[1])
	f := want(r, asFloat, v, "type %s doesn't define __round__ method")
	if precision < 0 || precision > 20 || math.IsInf(f, 0) || math.IsNaN(f) {
		r.fail(ErrUnsupported, "rounding %v to %d digits", f, precision)
	}
	scale := math.Pow(10, float64(precision))
	switch method {
	case "common":
		if i, ok := asInt(v); ok {
			return i
		}
		out, _ := strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(precision), 64), 64)
		return out
	case "ceil":
		return math.Ceil(f*scale) / scale
	case "floor":
		return math.Floor(f*scale) / scale
	}
	return r.fail(ErrRender, "method must be common, ceil or floor")
}

func filterSum(r *run, v Value, p []Value) Value {
	get := r.getter(p[0], nil)
	total := p[1]
	if _, ok := total.(string); ok {
		r.fail(ErrRender, "sum() can't sum strings [use ''.join(seq) instead]")
	}
	for _, e := range r.iterate(v) {
		total = r.binary("+", total, get(e))
	}
	return total
}
