package jinja

import (
	"math"
	"sort"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// FromJSON reads a JSON document into the values that templates take, with the
// keys of objects in their order. As in Python the last of equal keys wins and
// keeps the first one's place. The values do not refer to data.
func FromJSON(data []byte) (Value, error) {
	if _, err := jsonscan.Valid(data, jsonscan.Bounds{Values: maxJSONValues}); err != nil {
		return nil, &Error{Kind: ErrInput, Msg: err.Error()}
	}
	v, _, err := fromJSON(data, jsonscan.Space(data, 0))
	return v, err
}

// maxJSONValues bounds the values in one document, each of which takes some 100 bytes.
const maxJSONValues = 1 << 17

// fromJSON reads the value at b[at], which has been checked, and returns the
// position behind it.
func fromJSON(b []byte, at int) (v Value, end int, err error) {
	switch b[at] {
	case '"':
		end = jsonscan.StringEnd(b, at)
		return jsonscan.Text(b[at:end]), end, nil
	case 'n', 't', 'f':
		end = jsonscan.PlainEnd(b, at)
		if b[at] == 'n' {
			return nil, end, nil
		}
		return b[at] == 't', end, nil
	case '[':
		list := List{}
		for at = jsonscan.Space(b, at+1); b[at] != ']'; {
			if v, at, err = fromJSON(b, at); err != nil {
				return nil, at, err
			}
			list = append(list, v)
			if at = jsonscan.Space(b, at); b[at] == ',' {
				at = jsonscan.Space(b, at+1)
			}
		}
		return list, at + 1, nil
	case '{':
		d := new(Dict)
		for at = jsonscan.Space(b, at+1); b[at] != '}'; {
			end = jsonscan.StringEnd(b, at)
			key := jsonscan.Text(b[at:end])
			if v, at, err = fromJSON(b, jsonscan.Space(b, jsonscan.Space(b, end)+1)); err != nil {
				return nil, at, err
			}
			d.Set(key, v)
			if at = jsonscan.Space(b, at); b[at] == ',' {
				at = jsonscan.Space(b, at+1)
			}
		}
		return d, at + 1, nil
	}
	end = jsonscan.PlainEnd(b, at)
	v, err = number(string(b[at:end]))
	return v, end, err
}

func number(s string) (Value, error) {
	if !strings.ContainsAny(s, ".eE") {
		if i, err := strconv.ParseInt(s, 10, 64); err == nil {
			return i, nil
		}
		return BigInt(s), nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(f, 0) {
		return nil, &Error{Kind: ErrInput, Msg: "number " + s + ": " + err.Error()}
	}
	return f, nil
}

// jsonWriter is Python's json.dumps with the options that tojson takes.
type jsonWriter struct {
	r           *run
	b           strings.Builder
	ascii       bool
	indent      string // of one level
	pretty      bool   // indent was given, maybe as nothing
	item, colon string // separators
	sortKeys    bool
}

func (w *jsonWriter) write(v Value, depth int) {
	if w.r.err != nil || !w.r.charge(1) {
		return
	}
	if depth > maxValueDepth {
		w.r.fail(ErrLimit, "a value nests deeper than %d", maxValueDepth)
		return
	}
	if w.b.Len() > maxOutput {
		w.r.fail(ErrLimit, "a string is longer than %d bytes", maxOutput)
		return
	}
	switch v := v.(type) {
	case nil, bool, int64, BigInt, float64:
		w.b.WriteString(jsonScalar(v))
	case string:
		w.str(v)
	case markup:
		w.str(string(v))
	case List:
		w.array(v, depth)
	case Tuple:
		w.array(v, depth)
	case *Dict:
		w.object(v, depth)
	default:
		w.r.fail(ErrRender, "Object of type %s is not JSON serializable", typeName(v))
	}
}

// jsonScalar writes anything but strings and containers.
func jsonScalar(v Value) string {
	switch v := v.(type) {
	case bool:
		return strconv.FormatBool(v)
	case int64:
		return strconv.FormatInt(v, 10)
	case BigInt:
		return string(v)
	case float64:
		switch {
		case math.IsNaN(v):
			return "NaN"
		case math.IsInf(v, 1):
			return "Infinity"
		case math.IsInf(v, -1):
			return "-Infinity"
		}
		return floatRepr(v)
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

func (w *jsonWriter) array(vs []Value, depth int) {
	w.b.WriteByte('[')
	for i, v := range vs {
		if i > 0 {
			w.b.WriteString(w.item)
		}
		w.newline(depth + 1)
		w.write(v, depth+1)
		if w.r.err != nil {
			return
		}
	}
	if len(vs) > 0 {
		w.newline(depth)
	}
	w.b.WriteByte(']')
}

func (w *jsonWriter) object(d *Dict, depth int) {
	order := make([]int, d.Len())
	for i := range order {
		order[i] = i
	}
	if w.sortKeys {
		sort.SliceStable(order, func(i, j int) bool { return w.r.less(d.keys[order[i]], d.keys[order[j]], 0) })
	}
	w.b.WriteByte('{')
	for n, i := range order {
		if n > 0 {
			w.b.WriteString(w.item)
		}
		w.newline(depth + 1)
		if key, ok := d.keys[i].(string); ok {
			w.str(key)
		} else {
			w.str(jsonScalar(d.keys[i]))
		}
		w.b.WriteString(w.colon)
		w.write(d.vals[i], depth+1)
		if w.r.err != nil {
			return
		}
	}
	if d.Len() > 0 {
		w.newline(depth)
	}
	w.b.WriteByte('}')
}

func (w *jsonWriter) str(s string) {
	w.b.WriteByte('"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			w.b.WriteByte('\\')
			w.b.WriteRune(c)
		case c == '\n':
			w.b.WriteString(`\n`)
		case c == '\r':
			w.b.WriteString(`\r`)
		case c == '\t':
			w.b.WriteString(`\t`)
		case c == '\b':
			w.b.WriteString(`\b`)
		case c == '\f':
			w.b.WriteString(`\f`)
		case c < 0x20 || w.ascii && c >= 0x7f && c < 0x10000:
			writeHex(&w.b, `\u`, c, 4)
		case w.ascii && c >= 0x10000:
			c -= 0x10000
			writeHex(&w.b, `\u`, 0xd800+c>>10, 4)
			writeHex(&w.b, `\u`, 0xdc00+c&0x3ff, 4)
		default:
			w.b.WriteRune(c)
		}
	}
	w.b.WriteByte('"')
}

// toJSON is the filter tojson as transformers defines it.
func toJSON(r *run, v Value, p []Value) Value {
	w := jsonWriter{r: r, item: ", ", colon: ": "}
	w.ascii = p[0] != absent && truth(p[0])
	if p[1] != absent && p[1] != nil {
		w.pretty, w.item = true, ","
		if s, ok := p[1].(string); ok {
			w.indent = s
		} else if n, ok := asInt(p[1]); ok && n <= maxValueDepth {
			w.indent = strings.Repeat(" ", int(max(n, 0)))
		} else {
			return r.fail(ErrUnsupported, "tojson(indent=%s)", r.str(p[1]))
		}
	}
	if p[2] != absent && p[2] != nil {
		pair, ok := r.items(p[2])
		if !ok || len(pair) != 2 {
			return r.fail(ErrRender, "tojson: separators must be a pair")
		}
		w.item, w.colon = r.str(pair[0]), r.str(pair[1])
	}
	w.sortKeys = p[3] != absent && truth(p[3])
	w.write(v, 0)
	r.fits(w.b.Len())
	return w.b.String()
}
