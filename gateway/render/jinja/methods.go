package jinja

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Parameters of methods have no names where Python takes them by position only.

var dictMethods = map[string]*builtin{
	"items":  define(func(_ *run, d Value, _ []Value) Value { return dictView{d.(*Dict), "dict_items"} }),
	"keys":   define(func(_ *run, d Value, _ []Value) Value { return dictView{d.(*Dict), "dict_keys"} }),
	"values": define(func(_ *run, d Value, _ []Value) Value { return dictView{d.(*Dict), "dict_values"} }),
	"get": define(func(r *run, d Value, p []Value) Value {
		r.hashable(p[0])
		if v, ok := r.entry(d.(*Dict), p[0]); ok {
			return v
		}
		return p[1]
	}, "", absent, "", nil),
}

// seqMethods are those of lists and tuples.
var seqMethods = map[string]*builtin{
	"index": define(func(r *run, seq Value, p []Value) Value {
		i := slices.IndexFunc(r.iterate(seq), func(v Value) bool { return r.equal(v, p[0], 0) })
		if i < 0 {
			r.fail(ErrRender, "%s is not in list", r.str(p[0]))
		}
		return int64(i)
	}, "", absent),
	"count": define(func(r *run, seq Value, p []Value) Value {
		n := int64(0)
		for _, v := range r.iterate(seq) {
			n += boolInt(r.equal(v, p[0], 0))
		}
		return n
	}, "", absent),
}

// strMethod returns a method of strings; Markup has it too.
func strMethod(call func(r *run, s string, p []Value) Value, params ...Value) *builtin {
	return withoutMarkup(call, params...).keepMarkup()
}

// withoutMarkup returns a method that Markup lacks, because it would escape the arguments.
func withoutMarkup(call func(r *run, s string, p []Value) Value, params ...Value) *builtin {
	return define(func(r *run, recv Value, p []Value) Value { return call(r, recv.(string), p) }, params...)
}

// matching returns a method that reports whether a string has characters, and all are such.
func matching(is func(c rune) bool) *builtin {
	return strMethod(func(_ *run, s string, _ []Value) Value { return allRunes(s, is) })
}

func stripMethod(trim func(string, func(rune) bool) string) *builtin {
	return strMethod(func(r *run, s string, p []Value) Value { return r.strip(s, p[0], trim) }, "", nil)
}

// splitMethod returns str.split or, from the right, str.rsplit.
func splitMethod(right bool) *builtin {
	return strMethod(func(r *run, s string, p []Value) Value {
		limit := int(min(max(r.wantInt(p[1]), -1), 1<<30))
		if p[0] == nil {
			return r.strList(splitSpace(s, limit, right))
		}
		sep := r.wantStr(p[0])
		switch {
		case sep == "":
			return r.fail(ErrRender, "empty separator")
		case right:
			return r.strList(splitRight(s, sep, limit))
		case limit >= 0:
			limit++ // parts, of which there is one more
		}
		return r.strList(strings.SplitN(s, sep, limit))
	}, "sep", nil, "maxsplit", int64(-1))
}

// affixMethod returns a method that reports whether a string has an affix, or one of a tuple.
func affixMethod(has func(s, affix string) bool) *builtin {
	return strMethod(func(r *run, s string, p []Value) Value {
		part, _, ok := r.window(s, p)
		options, isTuple := p[0].(Tuple)
		if !isTuple {
			options = Tuple{p[0]}
		}
		return slices.ContainsFunc(options, func(o Value) bool { return has(part, r.wantStr(o)) }) && ok
	}, "", absent, "", nil, "", nil)
}

// findMethod returns a method that finds a substring; missing is the result if there is none, and
// absent an error.
func findMethod(index func(s, sub string) int, missing Value) *builtin {
	return strMethod(func(r *run, s string, p []Value) Value {
		part, offset, ok := r.window(s, p)
		at := index(part, r.wantStr(p[0]))
		switch {
		case ok && at >= 0:
			return int64(offset + utf8.RuneCountInString(part[:at]))
		case missing == absent:
			r.fail(ErrRender, "substring not found")
		}
		return missing
	}, "", absent, "", nil, "", nil)
}

var strMethods = map[string]*builtin{
	"format":       raw(func(r *run, recv Value, a callArgs) Value { return r.formatMethod(recv.(string), a) }),
	"upper":        ofString(upper).keepMarkup(),
	"lower":        ofString(lower).keepMarkup(),
	"title":        ofString(title).keepMarkup(),
	"capitalize":   ofString(capitalize).keepMarkup(),
	"strip":        stripMethod(strings.TrimFunc),
	"lstrip":       stripMethod(strings.TrimLeftFunc),
	"rstrip":       stripMethod(strings.TrimRightFunc),
	"split":        splitMethod(false),
	"rsplit":       splitMethod(true),
	"splitlines":   strMethod(func(r *run, s string, p []Value) Value { return r.strList(splitLines(s, truth(p[0]))) }, "keepends", false),
	"startswith":   affixMethod(strings.HasPrefix),
	"endswith":     affixMethod(strings.HasSuffix),
	"removeprefix": withoutMarkup(func(r *run, s string, p []Value) Value { return strings.TrimPrefix(s, r.wantStr(p[0])) }, "", absent),
	"removesuffix": withoutMarkup(func(r *run, s string, p []Value) Value { return strings.TrimSuffix(s, r.wantStr(p[0])) }, "", absent),
	"replace": withoutMarkup(func(r *run, s string, p []Value) Value {
		return r.replace(s, r.wantStr(p[0]), r.wantStr(p[1]), p[2])
	}, "", absent, "", absent, "", nil),
	"find":   findMethod(strings.Index, int64(-1)),
	"rfind":  findMethod(strings.LastIndex, int64(-1)),
	"index":  findMethod(strings.Index, absent),
	"rindex": findMethod(strings.LastIndex, absent),
	"count": strMethod(func(r *run, s string, p []Value) Value {
		part, _, _ := r.window(s, p)
		return int64(strings.Count(part, r.wantStr(p[0])))
	}, "", absent, "", nil, "", nil),
	"join": withoutMarkup(func(r *run, s string, p []Value) Value {
		vs := want(r, r.items, p[0], "can only join an iterable")
		parts := make([]string, len(vs))
		for i, v := range vs {
			var ok bool
			if parts[i], ok = asStr(v); !ok {
				r.fail(ErrRender, "sequence item %d: expected str instance, %s found", i, typeName(v))
			}
		}
		return r.joinStrings(parts, s)
	}, "", absent),
	"isspace": matching(isSpace),
	"isalpha": matching(unicode.IsLetter),
	"isdigit": strMethod(func(r *run, s string, _ []Value) Value { return allRunes(s, r.isDigit) }),
	"isalnum": strMethod(func(r *run, s string, _ []Value) Value {
		return allRunes(s, func(c rune) bool { return unicode.IsLetter(c) || r.isDigit(c) })
	}),
	"isupper": strMethod(func(_ *run, s string, _ []Value) Value { return onlyCase(s, isUpper) }),
	"islower": strMethod(func(_ *run, s string, _ []Value) Value { return onlyCase(s, isLower) }),
}

// allRunes reports whether s has characters and is holds for all.
func allRunes(s string, is func(rune) bool) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool { return !is(c) })
}

// onlyCase reports whether s has letters with case and such holds for all of them.
func onlyCase(s string, such func(rune) bool) bool {
	return strings.ContainsFunc(s, isCased) && !strings.ContainsFunc(s, func(c rune) bool { return isCased(c) && !such(c) })
}

// isDigit is str.isdigit of one character. It fails for numbers other than decimal digits,
// because Go has no table of those that Python counts.
func (r *run) isDigit(c rune) bool {
	if unicode.Is(unicode.No, c) || unicode.Is(unicode.Nl, c) {
		r.fail(ErrUnsupported, "isdigit or isalnum of %q", c)
	}
	return unicode.IsDigit(c)
}

// strip trims the characters in chars from s, or white space if chars is None.
func (r *run) strip(s string, chars Value, trim func(string, func(rune) bool) string) string {
	if chars == nil {
		return trim(s, isSpace)
	}
	set := r.wantStr(chars)
	return trim(s, func(c rune) bool { return strings.ContainsRune(set, c) })
}

func (r *run) strList(parts []string) Value {
	r.charge(len(parts))
	return List(mapped(parts, func(s string) Value { return s }))
}

func splitRight(s, sep string, limit int) []string {
	var parts []string
	for i := strings.LastIndex(s, sep); i >= 0 && limit != 0; i = strings.LastIndex(s, sep) {
		parts = append(parts, s[i+len(sep):])
		s = s[:i]
		limit--
	}
	parts = append(parts, s)
	slices.Reverse(parts)
	return parts
}

// splitSpace splits at white space, at most limit times unless limit is negative. The rest of s
// keeps its white space.
func splitSpace(s string, limit int, right bool) []string {
	parts := strings.FieldsFunc(s, isSpace)
	if limit < 0 || len(parts) <= limit {
		return parts
	}
	trim := strings.TrimLeftFunc
	if right {
		trim = strings.TrimRightFunc
	}
	for range limit {
		s = trim(trim(s, isSpace), func(c rune) bool { return !isSpace(c) })
	}
	if s = trim(s, isSpace); right {
		return append([]string{s}, parts[len(parts)-limit:]...)
	}
	return append(parts[:limit], s)
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

// window cuts s to the optional start and end in p[1] and p[2]. offset is the start of the part, in
// characters; ok is false if that is after the end of s.
func (r *run) window(s string, p []Value) (part string, offset int, ok bool) {
	if p[1] == nil && p[2] == nil {
		return s, 0, true
	}
	bounds := [2]*int64{}
	for i, v := range p[1:3] {
		if v != nil {
			bounds[i] = new(r.wantInt(v))
		}
	}
	n := utf8.RuneCountInString(s)
	first, _, _ := sliceBounds(n, bounds[0], bounds[1], nil)
	return sliceString(s, bounds[0], bounds[1], nil), first, bounds[0] == nil || *bounds[0] <= int64(n)
}

// replace is str.replace, checking the size of the result before making it.
func (r *run) replace(s, old, with string, count Value) Value {
	n := -1
	if count != nil {
		n = int(max(min(r.wantInt(count), 1<<30), -1))
	}
	hits := strings.Count(s, old)
	if n >= 0 {
		hits = min(hits, n)
	}
	r.fits(len(s) + hits*(len(with)-len(old)))
	return strings.Replace(s, old, with, n)
}

func (r *run) joinStrings(parts []string, sep string) Value {
	n := len(sep) * max(len(parts)-1, 0)
	for _, s := range parts {
		n += len(s)
	}
	r.charge(len(parts))
	r.fits(n)
	return strings.Join(parts, sep)
}
