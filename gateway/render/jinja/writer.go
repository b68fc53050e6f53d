package jinja

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
)

// writer writes values as Python's repr or, with the options that tojson takes, its json.dumps.
type writer struct {
	r           *run
	b           strings.Builder
	item, colon string // separators

	json     bool
	ascii    bool
	indent   string // of one level
	pretty   bool   // indent was given; it may be empty
	sortKeys bool
}

// jsonNames are Python's names of values that JSON names otherwise.
var jsonNames = map[string]string{"None": "null", "True": "true", "False": "false", "nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

// scalar returns the text of a value that is not a string or container.
func (w *writer) scalar(v Value) string {
	s := "None"
	switch v := v.(type) {
	case bool:
		if s = "False"; v {
			s = "True"
		}
	case int64:
		s = strconv.FormatInt(v, 10)
	case BigInt:
		s = string(v)
	case float64:
		s = floatRepr(v)
	}
	if name, ok := jsonNames[s]; ok && w.json {
		return name
	}
	return s
}

// value writes v, which is within depth others.
func (w *writer) value(v Value, depth int) {
	w.r.enter(depth, w.b.Len())
	if w.json {
		v = plain(v)
	}
	switch v := v.(type) {
	case nil, bool, int64, BigInt, float64:
		w.b.WriteString(w.scalar(v))
	case string:
		w.quote(v)
	case List:
		w.sequence("[", v, "]", depth)
	case Tuple:
		opening, closing := "(", ")"
		if w.json {
			opening, closing = "[", "]"
		} else if len(v) == 1 {
			closing = ",)"
		}
		w.sequence(opening, v, closing, depth)
	case *Dict:
		w.dict(v, depth)
	default:
		if w.json {
			w.r.fail(ErrRender, "Object of type %s is not JSON serializable", typeName(v))
		}
		w.object(v, depth)
	}
}

// object writes a value that has no JSON.
func (w *writer) object(v Value, depth int) {
	switch v := v.(type) {
	case markup:
		w.b.WriteString("Markup(")
		w.quote(string(v))
		w.b.WriteByte(')')
	case dictView:
		w.sequence(typeName(v)+"([", v.list(), "])", depth)
	case intRange:
		bounds := List{v.start, v.stop, v.step}
		if v.step == 1 {
			bounds = bounds[:2]
		}
		w.sequence("range(", bounds, ")", depth)
	case *undefined:
		w.b.WriteString("Undefined")
	case *namespace:
		w.b.WriteString("<Namespace ")
		w.dict(v.vars, depth)
		w.b.WriteByte('>')
	default:
		w.r.fail(ErrUnsupported, "printing a %s", typeName(v))
	}
}

func (w *writer) newline(depth int) {
	if w.pretty {
		w.b.WriteByte('\n')
		for range depth {
			w.b.WriteString(w.indent)
		}
		w.r.charge(depth)
	}
}

// nested writes a container of n elements between brackets.
func (w *writer) nested(opening, closing string, n, depth int, element func(i int)) {
	w.b.WriteString(opening)
	for i := range n {
		if i > 0 {
			w.b.WriteString(w.item)
		}
		w.newline(depth + 1)
		element(i)
	}
	if n > 0 {
		w.newline(depth)
	}
	w.b.WriteString(closing)
}

func (w *writer) sequence(opening string, vs []Value, closing string, depth int) {
	w.nested(opening, closing, len(vs), depth, func(i int) { w.value(vs[i], depth+1) })
}

func (w *writer) dict(d *Dict, depth int) {
	if w.sortKeys {
		sorted := new(Dict)
		for _, key := range w.r.sorted(d.keys, plain, false) {
			v, _ := d.Get(key)
			sorted.Set(key, v)
		}
		d = sorted
	}
	w.nested("{", "}", d.Len(), depth, func(i int) {
		key, v := d.At(i)
		if _, isString := key.(string); w.json && !isString {
			key = w.scalar(key)
		}
		w.value(key, depth+1)
		w.b.WriteString(w.colon)
		w.value(v, depth+1)
	})
}

// quote writes s in quotes: double ones, but single ones in a repr unless only those occur in s.
func (w *writer) quote(s string) {
	mark, short, letters := `"`, "\"\\\b\f\n\r\t", `"\bfnrt`
	if !w.json {
		if !strings.Contains(s, "'") || strings.Contains(s, `"`) {
			mark = "'"
		}
		short, letters = mark+"\\\n\r\t", mark+`\nrt`
	}
	w.b.WriteString(mark)
	for _, c := range s {
		at := strings.IndexRune(short, c)
		switch {
		case at >= 0:
			w.b.WriteByte('\\')
			w.b.WriteByte(letters[at])
		case w.json && c >= 0x20 && (c < 0x7f || !w.ascii), !w.json && unicode.IsPrint(c):
			w.b.WriteRune(c)
		case !w.json && c < 0x100:
			w.b.WriteString(fmt.Sprintf(`\x%02x`, c))
		case c < 0x10000:
			w.b.WriteString(fmt.Sprintf(`\u%04x`, c))
		case w.json:
			high, low := utf16.EncodeRune(c)
			w.b.WriteString(fmt.Sprintf(`\u%04x\u%04x`, high, low))
		default:
			w.b.WriteString(fmt.Sprintf(`\U%08x`, c))
		}
	}
	w.b.WriteString(mark)
}

// reprOf is Python's repr(v).
func (r *run) reprOf(v Value) string {
	w := writer{r: r, item: ", ", colon: ": "}
	return w.finish(v)
}

// finish writes v and returns all that was written.
func (w *writer) finish(v Value) string {
	w.value(v, 0)
	w.r.fits(w.b.Len())
	return w.b.String()
}

// toJSON is the filter tojson as transformers defines it.
func toJSON(r *run, v Value, p []Value) Value {
	w := writer{r: r, item: ", ", colon: ": ", json: true, ascii: truth(p[0]), pretty: p[1] != nil, sortKeys: truth(p[3])}
	if w.pretty {
		w.item = ","
		if s, ok := p[1].(string); ok {
			w.indent = s
		} else if n, ok := asInt(p[1]); ok && n <= maxValueDepth {
			w.indent = strings.Repeat(" ", int(max(n, 0)))
		} else {
			r.fail(ErrUnsupported, "tojson(indent=%s)", r.str(p[1]))
		}
	}
	if p[2] != nil {
		pair, ok := r.items(p[2])
		if !ok || len(pair) != 2 {
			r.fail(ErrRender, "tojson: separators must be a pair")
		}
		w.item, w.colon = r.str(pair[0]), r.str(pair[1])
	}
	return w.finish(v)
}
