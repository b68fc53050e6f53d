package jinja

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// methodDef is a method of a Python type. A param without a name takes a
// positional argument only.
type methodDef struct {
	params   []string
	required int
	call     func(r *run, recv Value, p []Value) Value
	raw      func(r *run, recv Value, a callArgs) Value // instead of call: the arguments as they come
}

var dictMethods = map[string]*methodDef{
	"items":  {call: func(_ *run, d Value, _ []Value) Value { return dictView{d.(*Dict), "items"} }},
	"keys":   {call: func(_ *run, d Value, _ []Value) Value { return dictView{d.(*Dict), "keys"} }},
	"values": {call: func(_ *run, d Value, _ []Value) Value { return dictView{d.(*Dict), "values"} }},
	"get": {params: []string{"", ""}, required: 1, call: func(r *run, d Value, p []Value) Value {
		r.hashable(p[0])
		if v, ok := d.(*Dict).get(p[0]); ok {
			return v
		}
		if p[1] != absent {
			return p[1]
		}
		return nil
	}},
}

// seqMethods are those of lists and tuples.
var seqMethods = map[string]*methodDef{
	"index": {params: []string{""}, required: 1, call: func(r *run, seq Value, p []Value) Value {
		vs, _ := r.items(seq)
		for i, v := range vs {
			if r.equal(v, p[0], 0) {
				return int64(i)
			}
		}
		return r.fail(ErrRender, "%s is not in list", r.str(p[0]))
	}},
	"count": {params: []string{""}, required: 1, call: func(r *run, seq Value, p []Value) Value {
		vs, _ := r.items(seq)
		n := int64(0)
		for _, v := range vs {
			n += boolInt(r.equal(v, p[0], 0))
		}
		return n
	}},
}

// strMethod declares a method whose work grows with the string.
func strMethod(params []string, required int, call func(r *run, s string, p []Value) Value) *methodDef {
	return &methodDef{params: params, required: required, call: func(r *run, recv Value, p []Value) Value {
		s := recv.(string)
		if !r.scans(s) {
			return nil
		}
		v := call(r, s, p)
		if out, ok := v.(string); ok {
			r.fits(len(out))
		}
		return v
	}}
}

func plainStr(f func(string) string) *methodDef {
	return strMethod(nil, 0, func(_ *run, s string, _ []Value) Value { return f(s) })
}

var strMethods = map[string]*methodDef{
	"format":       {raw: func(r *run, recv Value, a callArgs) Value { return r.formatMethod(recv.(string), a) }},
	"upper":        plainStr(upper),
	"lower":        plainStr(lower),
	"title":        plainStr(title),
	"capitalize":   plainStr(capitalize),
	"strip":        strMethod([]string{""}, 0, func(r *run, s string, p []Value) Value { return r.strip(s, p[0], true, true) }),
	"lstrip":       strMethod([]string{""}, 0, func(r *run, s string, p []Value) Value { return r.strip(s, p[0], true, false) }),
	"rstrip":       strMethod([]string{""}, 0, func(r *run, s string, p []Value) Value { return r.strip(s, p[0], false, true) }),
	"split":        strMethod([]string{"sep", "maxsplit"}, 0, func(r *run, s string, p []Value) Value { return r.split(s, p, false) }),
	"rsplit":       strMethod([]string{"sep", "maxsplit"}, 0, func(r *run, s string, p []Value) Value { return r.split(s, p, true) }),
	"splitlines":   strMethod([]string{"keepends"}, 0, splitLinesMethod),
	"startswith":   strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value { return r.affix(s, p, strings.HasPrefix) }),
	"endswith":     strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value { return r.affix(s, p, strings.HasSuffix) }),
	"removeprefix": strMethod([]string{""}, 1, func(r *run, s string, p []Value) Value { return strings.TrimPrefix(s, r.wantStr(p[0])) }),
	"removesuffix": strMethod([]string{""}, 1, func(r *run, s string, p []Value) Value { return strings.TrimSuffix(s, r.wantStr(p[0])) }),
	"replace": strMethod([]string{"", "", ""}, 2, func(r *run, s string, p []Value) Value {
		return r.replace(s, r.wantStr(p[0]), r.wantStr(p[1]), p[2])
	}),
	"find":  strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value { return r.find(s, p, strings.Index, false) }),
	"rfind": strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value { return r.find(s, p, strings.LastIndex, false) }),
	"index": strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value { return r.find(s, p, strings.Index, true) }),
	"rindex": strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value {
		return r.find(s, p, strings.LastIndex, true)
	}),
	"count": strMethod([]string{"", "", ""}, 1, func(r *run, s string, p []Value) Value {
		part, _, _ := r.window(s, p)
		return int64(strings.Count(part, r.wantStr(p[0])))
	}),
	"join": strMethod([]string{""}, 1, func(r *run, s string, p []Value) Value {
		vs, ok := r.items(p[0])
		if !ok {
			return r.fail(ErrRender, "can only join an iterable")
		}
		parts := make([]string, len(vs))
		for i, v := range vs {
			if parts[i], ok = plain(v).(string); !ok {
				return r.fail(ErrRender, "sequence item %d: expected str instance, %s found", i, typeName(v))
			}
		}
		return r.joinStrings(parts, s)
	}),
	"isspace": strMethod(nil, 0, func(_ *run, s string, _ []Value) Value { return allRunes(s, isSpace) }),
	"isalpha": strMethod(nil, 0, func(_ *run, s string, _ []Value) Value { return allRunes(s, unicode.IsLetter) }),
	"isdigit": strMethod(nil, 0, func(r *run, s string, _ []Value) Value { return allRunes(s, r.isDigit) }),
	"isalnum": strMethod(nil, 0, func(r *run, s string, _ []Value) Value {
		return allRunes(s, func(c rune) bool { return unicode.IsLetter(c) || r.isDigit(c) })
	}),
	"isupper": strMethod(nil, 0, func(_ *run, s string, _ []Value) Value { return onlyCase(s, isUpper) }),
	"islower": strMethod(nil, 0, func(_ *run, s string, _ []Value) Value { return onlyCase(s, isLower) }),
}

func allRunes(s string, is func(rune) bool) bool {
	for _, c := range s {
		if !is(c) {
			return false
		}
	}
	return s != ""
}

// onlyCase reports whether s has letters with case and all of them are such.
func onlyCase(s string, such func(rune) bool) bool {
	some := false
	for _, c := range s {
		if isCased(c) {
			if !such(c) {
				return false
			}
			some = true
		}
	}
	return some
}

// isDigit is str.isdigit of one character. Numbers that are no decimal digits
// are refused: Go has no table of which of them Python counts.
func (r *run) isDigit(c rune) bool {
	if unicode.Is(unicode.No, c) || unicode.Is(unicode.Nl, c) {
		r.fail(ErrUnsupported, "isdigit or isalnum of %q", c)
	}
	return unicode.IsDigit(c)
}

func (r *run) wantStr(v Value) string {
	s, ok := plain(v).(string)
	if !ok && r.use(v) {
		r.fail(ErrRender, "expected str, got %s", typeName(v))
	}
	return s
}

// wantInt returns an optional integer argument.
func (r *run) wantInt(v Value, missing int64) int64 {
	if v == absent {
		return missing
	}
	i, ok := asInt(v)
	if !ok && r.use(v) {
		r.fail(ErrRender, "'%s' object cannot be interpreted as an integer", typeName(v))
	}
	return i
}

func (r *run) strip(s string, chars Value, left, right bool) string {
	cut := isSpace
	if chars != absent && chars != nil {
		set := r.wantStr(chars)
		cut = func(c rune) bool { return strings.ContainsRune(set, c) }
	}
	if left {
		s = strings.TrimLeftFunc(s, cut)
	}
	if right {
		s = strings.TrimRightFunc(s, cut)
	}
	return s
}

// split is str.split and, from the right, str.rsplit.
func (r *run) split(s string, p []Value, right bool) Value {
	limit := int(min(max(r.wantInt(p[1], -1), -1), 1<<30))
	var parts []string
	switch {
	case p[0] == absent || p[0] == nil:
		parts = splitSpace(s, limit, right)
	case r.wantStr(p[0]) == "":
		return r.fail(ErrRender, "empty separator")
	case right:
		parts = splitRight(s, r.wantStr(p[0]), limit)
	case limit < 0:
		parts = strings.Split(s, r.wantStr(p[0]))
	default:
		parts = strings.SplitN(s, r.wantStr(p[0]), limit+1)
	}
	return r.strList(parts)
}

func (r *run) strList(parts []string) Value {
	r.charge(len(parts))
	out := make(List, len(parts))
	for i, s := range parts {
		out[i] = s
	}
	return out
}

func splitRight(s, sep string, limit int) []string {
	var parts []string
	for ; limit != 0; limit-- {
		i := strings.LastIndex(s, sep)
		if i < 0 {
			break
		}
		parts = append(parts, s[i+len(sep):])
		s = s[:i]
	}
	parts = append(parts, s)
	slices.Reverse(parts)
	return parts
}

func splitSpace(s string, limit int, right bool) []string {
	var parts []string
	trim, index := strings.TrimLeftFunc, strings.IndexFunc
	if right {
		trim, index = strings.TrimRightFunc, strings.LastIndexFunc
	}
	for s = trim(s, isSpace); s != ""; s = trim(s, isSpace) {
		at := index(s, isSpace)
		if at < 0 || limit == 0 {
			parts = append(parts, s)
			break
		}
		limit--
		if right {
			_, width := utf8.DecodeRuneInString(s[at:])
			parts = append(parts, s[at+width:])
			s = s[:at]
		} else {
			parts = append(parts, s[:at])
			s = s[at:]
		}
	}
	if right {
		slices.Reverse(parts)
	}
	return parts
}

func splitLinesMethod(r *run, s string, p []Value) Value {
	return r.strList(splitLines(s, p[0] != absent && truth(p[0])))
}

// splitLines is str.splitlines.
func splitLines(s string, keep bool) []string {
	var lines []string
	for s != "" {
		i := strings.IndexFunc(s, func(c rune) bool {
			return c >= '\n' && c <= '\r' || c >= 0x1c && c <= 0x1e || c == 0x85 || c == 0x2028 || c == 0x2029
		})
		if i < 0 {
			return append(lines, s)
		}
		_, width := utf8.DecodeRuneInString(s[i:])
		if strings.HasPrefix(s[i:], "\r\n") {
			width = 2
		}
		if keep {
			lines = append(lines, s[:i+width])
		} else {
			lines = append(lines, s[:i])
		}
		s = s[i+width:]
	}
	return lines
}

// window cuts s to the optional start and end in p[1] and p[2]; offset is where
// it begins, in characters, and ok is false for a start behind the end of s.
func (r *run) window(s string, p []Value) (part string, offset int, ok bool) {
	if p[1] == absent && p[2] == absent {
		return s, 0, true
	}
	bounds := [2]*int64{}
	for i, v := range p[1:3] {
		if v != absent && v != nil {
			n := r.wantInt(v, 0)
			bounds[i] = &n
		}
	}
	n := utf8.RuneCountInString(s)
	first, _, count := sliceBounds(n, bounds[0], bounds[1], nil)
	inside := bounds[0] == nil || *bounds[0] <= int64(n)
	at := byteOffset(s, first)
	return s[at : at+byteOffset(s[at:], count)], first, inside
}

func (r *run) affix(s string, p []Value, has func(s, affix string) bool) Value {
	part, _, ok := r.window(s, p)
	options, isTuple := p[0].(Tuple)
	if !isTuple {
		options = Tuple{p[0]}
	}
	for _, o := range options {
		if has(part, r.wantStr(o)) {
			return ok && r.err == nil
		}
	}
	return false
}

func (r *run) find(s string, p []Value, index func(s, sub string) int, must bool) Value {
	part, offset, ok := r.window(s, p)
	at := index(part, r.wantStr(p[0]))
	if at < 0 || !ok {
		if must {
			return r.fail(ErrRender, "substring not found")
		}
		return int64(-1)
	}
	return int64(offset + utf8.RuneCountInString(part[:at]))
}

// replace is str.replace, checking the size of the result before making it.
func (r *run) replace(s, old, with string, count Value) Value {
	n := -1
	if count != absent && count != nil {
		n = int(max(min(r.wantInt(count, -1), 1<<30), -1))
	}
	hits := strings.Count(s, old)
	if n >= 0 {
		hits = min(hits, n)
	}
	if r.err != nil || !r.fits(len(s)+hits*(len(with)-len(old))) {
		return nil
	}
	return strings.Replace(s, old, with, n)
}

func (r *run) joinStrings(parts []string, sep string) Value {
	n := len(sep) * max(len(parts)-1, 0)
	for _, s := range parts {
		n += len(s)
	}
	if !r.charge(len(parts)) || !r.fits(n) {
		return nil
	}
	return strings.Join(parts, sep)
}
