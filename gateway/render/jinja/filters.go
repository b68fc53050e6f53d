package jinja

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// filterDef is a filter: call takes bound parameters, or raw the arguments as
// they come.
type filterDef struct {
	params   []string
	required int
	call     func(r *run, v Value, p []Value) Value
	raw      func(r *run, v Value, a callArgs) Value
	// What is made of markup is markup again.
	keepsMarkup bool
}

func (f *filterDef) apply(r *run, name string, v Value, a callArgs) Value {
	if f.raw != nil {
		return f.raw(r, v, a)
	}
	p := r.bind(name, a, f.params, f.required)
	if s, ok := plain(v).(string); ok {
		r.scans(s)
	}
	if r.err != nil {
		return nil
	}
	if _, ok := v.(markup); ok && f.keepsMarkup {
		return remark(f.call(r, plain(v), plainAll(p)))
	}
	out := f.call(r, v, p)
	if s, ok := out.(string); ok {
		r.fits(len(s))
	}
	return out
}

// otherFilters are those of Jinja that are refused by name when a template is
// parsed: chat templates have no use for them.
var otherFilters = names(`batch center filesizeformat forceescape groupby pprint random slice striptags truncate urlencode
	urlize wordcount wordwrap xmlattr`)

// filters are the known ones.
var filters = map[string]*filterDef{
	"abs":        {call: filterAbs},
	"attr":       {params: []string{"name"}, required: 1, call: filterAttr},
	"capitalize": {keepsMarkup: true, call: func(r *run, v Value, _ []Value) Value { return capitalize(r.str(v)) }},
	"count":      {call: filterLength},
	"d":          {params: []string{"default_value", "boolean"}, call: filterDefault},
	"default":    {params: []string{"default_value", "boolean"}, call: filterDefault},
	"dictsort":   {params: []string{"case_sensitive", "by", "reverse"}, call: filterDictSort},
	"e":          {call: func(r *run, v Value, _ []Value) Value { return r.escape(v) }},
	"escape":     {call: func(r *run, v Value, _ []Value) Value { return r.escape(v) }},
	"first":      {call: filterFirst},
	"float":      {params: []string{"default"}, call: filterFloat},
	"format":     {raw: filterFormat},
	"indent":     {keepsMarkup: true, params: []string{"width", "first", "blank"}, call: filterIndent},
	"int":        {params: []string{"default", "base"}, call: filterInt},
	"items":      {call: filterItems},
	"join":       {params: []string{"d", "attribute"}, call: filterJoin},
	"last":       {call: filterLast},
	"length":     {call: filterLength},
	"list":       {call: func(r *run, v Value, _ []Value) Value { return List(slices.Clone(r.iterate(v))) }},
	"lower":      {keepsMarkup: true, call: func(r *run, v Value, _ []Value) Value { return lower(r.str(v)) }},
	"map":        {raw: filterMap},
	"max":        {params: []string{"case_sensitive", "attribute"}, call: filterMax},
	"min":        {params: []string{"case_sensitive", "attribute"}, call: filterMin},
	"reject":     {raw: func(r *run, v Value, a callArgs) Value { return r.choose(v, a, false, false) }},
	"rejectattr": {raw: func(r *run, v Value, a callArgs) Value { return r.choose(v, a, true, false) }},
	"replace":    {params: []string{"old", "new", "count"}, required: 2, call: filterReplace},
	"reverse":    {keepsMarkup: true, call: filterReverse},
	"round":      {params: []string{"precision", "method"}, call: filterRound},
	"safe":       {call: func(r *run, v Value, _ []Value) Value { return markup(r.str(v)) }},
	"select":     {raw: func(r *run, v Value, a callArgs) Value { return r.choose(v, a, false, true) }},
	"selectattr": {raw: func(r *run, v Value, a callArgs) Value { return r.choose(v, a, true, true) }},
	"sort":       {params: []string{"reverse", "case_sensitive", "attribute"}, call: filterSort},
	"string":     {keepsMarkup: true, call: func(r *run, v Value, _ []Value) Value { return r.str(v) }},
	"sum":        {params: []string{"attribute", "start"}, call: filterSum},
	"title":      {call: func(r *run, v Value, _ []Value) Value { return jinjaTitle(r.str(v)) }},
	"tojson":     {params: []string{"ensure_ascii", "indent", "separators", "sort_keys"}, call: toJSON},
	"trim":       {keepsMarkup: true, params: []string{"chars"}, call: func(r *run, v Value, p []Value) Value { return r.strip(r.str(v), p[0], true, true) }},
	"unique":     {params: []string{"case_sensitive", "attribute"}, call: filterUnique},
	"upper":      {keepsMarkup: true, call: func(r *run, v Value, _ []Value) Value { return upper(r.str(v)) }},
}

func isTrue(v Value) bool { return v != absent && truth(v) }

// iterate returns v's elements, failing where Python cannot iterate.
func (r *run) iterate(v Value) []Value {
	vs, ok := r.items(v)
	if !ok {
		r.fail(ErrRender, "'%s' object is not iterable", typeName(v))
	}
	return vs
}

func generator(vs []Value) Value { return &iterator{name: "generator", items: vs} }

// getter returns what attribute, as filters take it, reads from an element.
func (r *run) getter(attribute Value) func(Value) Value {
	var parts []Value
	switch a := attribute.(type) {
	case string:
		for part := range strings.SplitSeq(a, ".") {
			if i, err := strconv.ParseUint(part, 10, 31); err == nil {
				parts = append(parts, int64(i))
			} else {
				parts = append(parts, part)
			}
		}
	default:
		if attribute != absent && attribute != nil {
			parts = []Value{attribute}
		}
	}
	return func(v Value) Value {
		for _, part := range parts {
			v = r.item(v, part)
		}
		return v
	}
}

// folded is getter with strings in lower case, unless case matters.
func (r *run) folded(attribute, caseSensitive Value) func(Value) Value {
	get := r.getter(attribute)
	return func(v Value) Value {
		v = plain(get(v))
		if s, ok := v.(string); ok && !isTrue(caseSensitive) {
			return lower(s)
		}
		return v
	}
}

func filterAbs(r *run, v Value, _ []Value) Value {
	if f, ok := v.(float64); ok {
		return math.Abs(f)
	}
	i, ok := asInt(v)
	if !ok && r.use(v) {
		return r.fail(ErrRender, "bad operand type for abs(): '%s'", typeName(v))
	}
	if i < 0 {
		return r.intOrFail(-i, i != math.MinInt64)
	}
	return i
}

func filterAttr(r *run, v Value, p []Value) Value {
	name := r.wantStr(p[0])
	if !r.use(v) {
		return nil
	}
	if a, ok := r.attribute(v, name); ok {
		return a
	}
	return missing(v, name)
}

func filterDefault(_ *run, v Value, p []Value) Value {
	if isUndefined(v) || isTrue(p[1]) && !truth(v) {
		if p[0] == absent {
			return ""
		}
		return p[0]
	}
	return v
}

func filterLength(r *run, v Value, _ []Value) Value {
	n, ok := length(v)
	if !ok {
		return r.fail(ErrRender, "object of type '%s' has no len()", typeName(v))
	}
	return int64(n)
}

func filterFirst(r *run, v Value, _ []Value) Value {
	if it, ok := v.(*iterator); ok { // takes only one
		if len(it.items) > 0 {
			first := it.items[0]
			it.items = it.items[1:]
			return first
		}
	} else if vs := r.iterate(v); len(vs) > 0 {
		return vs[0]
	}
	return &undefined{"No first item, sequence was empty."}
}

func filterLast(r *run, v Value, _ []Value) Value {
	if it, ok := v.(*iterator); ok {
		return r.fail(ErrRender, "'%s' object is not reversible", it.name)
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
	d, ok := v.(*Dict)
	if !ok {
		return r.fail(ErrRender, "Can only get item pairs from a mapping.")
	}
	r.charge(d.Len())
	return generator(dictView{d, "items"}.list())
}

func filterJoin(r *run, v Value, p []Value) Value {
	get := r.getter(p[1])
	vs := r.iterate(v)
	parts := make([]string, len(vs))
	for i, e := range vs {
		if parts[i] = r.str(get(e)); r.err != nil {
			return nil
		}
	}
	sep := ""
	if p[0] != absent {
		sep = r.str(p[0])
	}
	return r.joinStrings(parts, sep)
}

func filterReplace(r *run, v Value, p []Value) Value {
	return r.replace(r.str(v), r.str(p[0]), r.str(p[1]), p[2])
}

func filterReverse(r *run, v Value, _ []Value) Value {
	if s, ok := v.(string); ok {
		back := int64(-1)
		return r.slice(s, nil, nil, &back)
	}
	_, oneShot := v.(*iterator)
	vs := slices.Clone(r.iterate(v))
	slices.Reverse(vs)
	if oneShot {
		return List(vs)
	}
	return &iterator{name: typeName(v) + "_reverseiterator", items: vs}
}

func filterIndent(r *run, v Value, p []Value) Value {
	s, ok := v.(string)
	if !ok && r.use(v) {
		return r.fail(ErrRender, "indent of a %s", typeName(v))
	}
	pad := "    "
	if w, ok := p[0].(string); ok {
		pad = w
	} else if p[0] != absent {
		n := r.wantInt(p[0], 4)
		if n > maxOutput {
			return r.fail(ErrLimit, "indent by %d", n)
		}
		pad = strings.Repeat(" ", int(max(n, 0)))
	}
	lines := splitLines(s+"\n", false)
	if !r.charge(len(lines)) || !r.fits(len(s)+len(lines)*(len(pad)+1)) {
		return nil
	}
	for i, line := range lines {
		if i > 0 && (line != "" || isTrue(p[2])) || i == 0 && isTrue(p[1]) {
			lines[i] = pad + line
		}
	}
	return strings.Join(lines, "\n")
}

func filterFormat(r *run, v Value, a callArgs) Value {
	if len(a.names) > 0 {
		return r.fail(ErrUnsupported, "filter format with names")
	}
	return r.percent(r.str(v), a.pos)
}

func filterInt(r *run, v Value, p []Value) Value {
	if !r.use(v) {
		return nil
	}
	v = plain(v)
	missing := Value(int64(0))
	if p[0] != absent {
		missing = p[0]
	}
	switch v := v.(type) {
	case int64, BigInt:
		return v
	case bool:
		return boolInt(v)
	case float64:
		if math.IsInf(v, 0) {
			return r.fail(ErrRender, "cannot convert float infinity to integer")
		}
		return r.truncate(v, missing)
	case string:
		return r.parseInt(v, r.wantInt(p[1], 10), missing)
	}
	return missing
}

func (r *run) truncate(f float64, missing Value) Value {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return missing
	}
	return r.intOrFail(int64(f), math.Abs(f) < 1<<63)
}

func (r *run) parseInt(s string, base int64, missing Value) Value {
	s = strings.TrimFunc(s, isSpace)
	if base != 10 {
		return r.fail(ErrUnsupported, "filter int with base %d", base)
	}
	digits := strings.TrimLeft(s, "+-")
	valid := len(s)-len(digits) <= 1 && digits != "" && digits[len(digits)-1] != '_' && digitsEnd(digits, 0, decimal) == len(digits)
	if valid {
		i, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64)
		return r.intOrFail(i, err == nil)
	}
	f, ok := parseFloat(s)
	if !ok {
		return missing
	}
	return r.truncate(f, missing)
}

// parseFloat is Python's float(s).
func parseFloat(s string) (float64, bool) {
	s = strings.TrimFunc(s, isSpace)
	if strings.ContainsAny(s, "xXpP") || strings.HasPrefix(s, "_") || strings.HasSuffix(s, "_") || strings.Contains(s, "__") {
		return 0, false
	}
	f, err := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64)
	return f, err == nil || math.IsInf(f, 0)
}

func filterFloat(r *run, v Value, p []Value) Value {
	if !r.use(v) {
		return nil
	}
	if f, ok := asFloat(v); ok {
		return f
	}
	if s, ok := plain(v).(string); ok {
		if f, ok := parseFloat(s); ok {
			return f
		}
	}
	if p[0] == absent {
		return 0.0
	}
	return p[0]
}

func filterRound(r *run, v Value, p []Value) Value {
	precision := r.wantInt(p[0], 0)
	method := "common"
	if p[1] != absent {
		method = r.str(p[1])
	}
	f, ok := asFloat(v)
	if !ok && r.use(v) {
		return r.fail(ErrRender, "type %s doesn't define __round__ method", typeName(v))
	}
	if precision < 0 || precision > 20 || math.IsInf(f, 0) || math.IsNaN(f) {
		return r.fail(ErrUnsupported, "rounding %v to %d digits", f, precision)
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
	get := r.getter(p[0])
	var total Value = int64(0)
	if p[1] != absent {
		total = p[1]
	}
	if _, ok := total.(string); ok {
		return r.fail(ErrRender, "sum() can't sum strings [use ''.join(seq) instead]")
	}
	for _, e := range r.iterate(v) {
		if total = r.binary("+", total, get(e)); r.err != nil {
			return nil
		}
	}
	return total
}

// jinjaTitle is the filter title, which is not str.title: words begin behind
// white space, dashes and opening brackets only.
func jinjaTitle(s string) string {
	var b strings.Builder
	for s != "" {
		split := func(c rune) bool { return isSpace(c) || strings.ContainsRune("-({[<", c) }
		end := strings.IndexFunc(s, split)
		if end < 0 {
			end = len(s)
		}
		if end > 0 {
			first := byteOffset(s, 1)
			b.WriteString(upper(s[:first]))
			b.WriteString(lower(s[first:end]))
		}
		s = s[end:]
		next := strings.IndexFunc(s, func(c rune) bool { return !split(c) })
		if next < 0 {
			next = len(s)
		}
		b.WriteString(s[:next])
		s = s[next:]
	}
	return b.String()
}
