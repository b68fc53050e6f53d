package jinja

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
)

// jsonWriter is Python's json.dumps with the options that tojson takes.
type jsonWriter struct {
	r           *run
	b           strings.Builder
	ascii       bool
	indent      string // of one level
	pretty      bool   // indent was given; it may be empty
	item, colon string // separators
	sortKeys    bool
}

func (w *jsonWriter) write(v Value, depth int) {
	w.r.enter(depth, w.b.Len())
	switch v := plain(v).(type) {
	case nil, bool, int64, BigInt, float64:
		w.b.WriteString(jsonScalar(v))
	case string:
		w.str(v)
	case List, Tuple:
		vs, _ := sequence(v)
		w.nested('[', ']', len(vs), depth, func(i int) { w.write(vs[i], depth+1) })
	case *Dict:
		w.object(v, depth)
	default:
		w.r.fail(ErrRender, "Object of type %s is not JSON serializable", typeName(v))
	}
}

// jsonScalar returns the JSON of a value that is not a string or container.
func jsonScalar(v Value) string {
	switch v := v.(type) {
	case bool:
		return strconv.FormatBool(v)
	case int64:
		return strconv.FormatInt(v, 10)
	case BigInt:
		return string(v)
	case float64:
		s := floatRepr(v)
		if name, ok := map[string]string{"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[s]; ok {
			return name
		}
		return s
	}
	return "null"
}

func (w *jsonWriter) newline(depth int) {
	if w.pretty {
		w.b.WriteByte('\n')
		for range depth {
			w.b.WriteString(w.indent)
		}
		w.r.charge(depth)
	}
}

// nested writes a container of n elements between brackets.
func (w *jsonWriter) nested(opening, closing byte, n, depth int, element func(i int)) {
	w.b.WriteByte(opening)
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
	w.b.WriteByte(closing)
}

func (w *jsonWriter) object(d *Dict, depth int) {
	order := make([]int, d.Len())
	for i := range order {
		order[i] = i
	}
	if w.sortKeys {
		slices.SortStableFunc(order, func(i, j int) int {
			if w.r.less(d.keys[i], d.keys[j], 0) {
				return -1
			}
			return 1
		})
	}
	w.nested('{', '}', len(order), depth, func(i int) {
		if key, ok := d.keys[order[i]].(string); ok {
			w.str(key)
		} else {
			w.str(jsonScalar(d.keys[order[i]]))
		}
		w.b.WriteString(w.colon)
		w.write(d.vals[order[i]], depth+1)
	})
}

func (w *jsonWriter) str(s string) {
	w.b.WriteByte('"')
	for _, c := range s {
		switch short := strings.IndexRune("\"\\\b\f\n\r\t", c); {
		case short >= 0:
			w.b.WriteByte('\\')
			w.b.WriteByte(`"\bfnrt`[short])
		case c >= 0x20 && (c < 0x7f || !w.ascii):
			w.b.WriteRune(c)
		case c >= 0x10000:
			high, low := utf16.EncodeRune(c)
			fmt.Fprintf(&w.b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&w.b, `\u%04x`, c)
		}
	}
	w.b.WriteByte('"')
}

// toJSON is the filter tojson as transformers defines it.
func toJSON(r *run, v Value, p []Value) Value {
	w := jsonWriter{r: r, item: ", ", colon: ": ", ascii: truth(p[0]), pretty: p[1] != nil, sortKeys: truth(p[3])}
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
	w.write(v, 0)
	r.fits(w.b.Len())
	return w.b.String()
}
