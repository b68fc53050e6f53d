package jinja

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// globals are the functions that every template sees.
var globals = map[string]*function{
	"range":           {rangeFunc},
	"dict":            {dictFunc},
	"namespace":       {namespaceFunc},
	"raise_exception": {raiseFunc},
	"strftime_now":    {strftimeFunc},
	"cycler":          {otherFunc("cycler")},
	"joiner":          {otherFunc("joiner")},
	"lipsum":          {otherFunc("lipsum")},
}

// underscoreMsg is what transformers says.
const underscoreMsg = "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '%s'. Please rename the attribute."

func otherFunc(name string) func(*run, callArgs) Value {
	return func(r *run, _ callArgs) Value { return r.fail(ErrUnsupported, "function %q", name) }
}

func rangeFunc(r *run, a callArgs) Value {
	if len(a.names) > 0 || len(a.pos) == 0 || len(a.pos) > 3 {
		return r.fail(ErrRender, "range takes 1 to 3 positional arguments")
	}
	n := [3]int64{0, 0, 1}
	for i, v := range a.pos {
		n[i] = r.wantInt(v, 0)
		if n[i] > 1<<62 || n[i] < -1<<62 {
			return r.fail(ErrUnsupported, "range with %d", n[i])
		}
	}
	g := intRange{n[0], n[1], n[2]}
	if len(a.pos) == 1 {
		g.start, g.stop = 0, n[0]
	}
	if g.step == 0 {
		return r.fail(ErrRender, "range() arg 3 must not be zero")
	}
	if r.err == nil && g.length() > maxRange {
		return r.fail(ErrRender, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	return g
}

func dictFunc(r *run, a callArgs) Value {
	d := new(Dict)
	if len(a.pos) > 1 {
		return r.fail(ErrRender, "dict expected at most 1 argument, got %d", len(a.pos))
	}
	for _, v := range a.pos {
		if from, ok := v.(*Dict); ok {
			d = from.clone()
			r.charge(d.Len())
			break
		}
		for i, pair := range r.iterate(v) {
			kv, ok := r.items(pair)
			if !ok || len(kv) != 2 {
				return r.fail(ErrRender, "dictionary update sequence element #%d is no pair", i)
			}
			r.hashable(kv[0])
			r.setKey(d, kv[0], kv[1])
		}
	}
	for i, name := range a.names {
		d.put(name, a.named[i])
	}
	r.charge(len(a.names))
	return d
}

func namespaceFunc(r *run, a callArgs) Value {
	d, ok := dictFunc(r, a).(*Dict)
	if !ok {
		return nil
	}
	for _, k := range d.keys {
		if s, ok := k.(string); ok && strings.HasPrefix(s, "_") {
			return r.fail(ErrRender, underscoreMsg, s)
		}
	}
	return &namespace{d}
}

func raiseFunc(r *run, a callArgs) Value {
	p := r.bind("raise_exception", a, []string{"message"}, 1)
	if r.err != nil {
		return nil
	}
	return r.fail(ErrRaised, "%s", r.str(p[0]))
}

func strftimeFunc(r *run, a callArgs) Value {
	p := r.bind("strftime_now", a, []string{"format"}, 1)
	if r.err != nil {
		return nil
	}
	if r.now.IsZero() {
		return r.fail(ErrInput, "the template asks for the time, and none was given")
	}
	s, err := strftime(r.now, r.wantStr(p[0]))
	if err != "" {
		return r.fail(ErrUnsupported, "%s", err)
	}
	return s
}

// strftime formats t as C's strftime in the C locale; problem names a directive
// that is not known.
func strftime(t time.Time, format string) (s, problem string) {
	layouts := map[byte]string{
		'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'h': "Jan", 'd': "02", 'm': "01", 'y': "06", 'H': "15", 'I': "03",
		'M': "04", 'S': "05", 'p': "PM", 'D': "01/02/06", 'F': "2006-01-02", 'T': "15:04:05", 'R': "15:04", 'c': "Mon Jan _2 15:04:05 2006",
		'x': "01/02/06", 'X': "15:04:05", 'e': "_2", 'r': "03:04:05 PM",
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		d := format[i]
		unpadded := d == '-' && i+1 < len(format)
		if unpadded {
			i++
			d = format[i]
		}
		var part string
		switch layout, ok := layouts[d]; {
		case ok:
			part = t.Format(layout)
		case d == 'Y':
			part = strconv.Itoa(t.Year())
		case d == 'j':
			part = fmt.Sprintf("%03d", t.YearDay())
		case d == 'f':
			part = fmt.Sprintf("%06d", t.Nanosecond()/1000)
		case d == 'u':
			part = strconv.Itoa((int(t.Weekday())+6)%7 + 1)
		case d == 'w':
			part = strconv.Itoa(int(t.Weekday()))
		case d == 'n':
			part = "\n"
		case d == 't':
			part = "\t"
		case d == '%':
			part = "%"
		case d == 'Z' || d == 'z': // the clock is a naive one
		default:
			return "", fmt.Sprintf("strftime directive %%%c", d)
		}
		if unpadded {
			if !strings.ContainsRune("dmyHIMSje", rune(d)) {
				return "", fmt.Sprintf("strftime directive %%-%c", d)
			}
			if part = strings.TrimLeft(part, "0 "); part == "" {
				part = "0"
			}
		}
		b.WriteString(part)
	}
	return b.String(), ""
}
