package jinja

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// globals are the functions that every template sees.
var globals = map[string]*function{
	"range":           {"range", raw(rangeFunc)},
	"dict":            {"dict", raw(func(r *run, _ Value, a callArgs) Value { return r.dict(a) })},
	"namespace":       {"namespace", raw(namespaceFunc)},
	"raise_exception": {"raise_exception", define(raiseFunc, "message", absent)},
	"strftime_now":    {"strftime_now", define(strftimeFunc, "format", absent)},
	"cycler":          {"cycler", nil},
	"joiner":          {"joiner", nil},
	"lipsum":          {"lipsum", nil},
}

// underscoreMsg is the message of transformers.
const underscoreMsg = "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '%s'. Please rename the attribute."

func rangeFunc(r *run, _ Value, a callArgs) Value {
	if len(a.names) > 0 || len(a.pos) == 0 || len(a.pos) > 3 {
		r.fail(ErrRender, "range takes 1 to 3 positional arguments")
	}
	n := [3]int64{0, 0, 1}
	for i, v := range a.pos {
		n[i] = r.wantInt(v)
		if n[i] >= 1<<62 || n[i] <= -1<<62 { // the length would overflow
			r.fail(ErrUnsupported, "range with %d", n[i])
		}
	}
	g := intRange{n[0], n[1], n[2]}
	if len(a.pos) == 1 {
		g.start, g.stop = 0, n[0]
	}
	if g.step == 0 {
		r.fail(ErrRender, "range() arg 3 must not be zero")
	}
	if g.length() > maxRange {
		r.fail(ErrRender, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", maxRange)
	}
	return g
}

// dict is Python's dict().
func (r *run) dict(a callArgs) *Dict {
	d := new(Dict)
	if len(a.pos) > 1 {
		r.fail(ErrRender, "dict expected at most 1 argument, got %d", len(a.pos))
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
				r.fail(ErrRender, "dictionary update sequence element #%d is no pair", i)
			}
			r.hashable(kv[0])
			r.setKey(d, kv[0], kv[1])
		}
	}
	for i, name := range a.names {
		d.Set(name, a.named[i])
	}
	r.charge(len(a.names))
	return d
}

func namespaceFunc(r *run, _ Value, a callArgs) Value {
	d := r.dict(a)
	for _, k := range d.keys {
		if s, ok := k.(string); ok && strings.HasPrefix(s, "_") {
			r.fail(ErrRender, underscoreMsg, s)
		}
	}
	return &namespace{d}
}

func raiseFunc(r *run, _ Value, p []Value) Value { return r.fail(ErrRaised, "%s", r.str(p[0])) }

func strftimeFunc(r *run, _ Value, p []Value) Value {
	if r.now.IsZero() {
		r.fail(ErrInput, "the template needs the time, and the input has none")
	}
	format := r.wantStr(p[0])
	r.charge(len(format)) // a directive of two bytes costs as much as a node
	s := r.strftime(format)
	r.fits(len(s))
	return s
}

// layouts are strftime's directives as layouts of time.Format. As in Python's naive datetime,
// there is no zone.
var layouts = map[byte]string{
	'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'h': "Jan", 'd': "02", 'm': "01", 'y': "06", 'Y': "2006", 'H': "15",
	'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'D': "01/02/06", 'F': "2006-01-02", 'T': "15:04:05", 'R': "15:04", 'j': "002",
	'c': "Mon Jan _2 15:04:05 2006", 'x': "01/02/06", 'X': "15:04:05", 'e': "_2", 'r': "03:04:05 PM", 'n': "\n", 't': "\t",
	'%': "%", 'Z': "", 'z': "",
}

var directive = regexp.MustCompile(`(?s)%-?.`)

// strftime formats the time as C's strftime in the C locale.
func (r *run) strftime(format string) string {
	return directive.ReplaceAllStringFunc(format, func(d string) string {
		letter := d[len(d)-1]
		unpadded := len(d) == 3
		layout, known := layouts[letter]
		s := r.now.Format(layout)
		switch letter {
		case 'f':
			s, known = fmt.Sprintf("%06d", r.now.Nanosecond()/1000), true
		case 'u':
			s, known = strconv.Itoa((int(r.now.Weekday())+6)%7+1), true
		case 'w':
			s, known = strconv.Itoa(int(r.now.Weekday())), true
		}
		if !known || unpadded && strings.IndexByte("dmyHIMSje", letter) < 0 {
			r.fail(ErrUnsupported, "strftime directive %s", d)
		}
		if !unpadded {
			return s
		}
		if s = strings.TrimLeft(s, "0 "); s == "" {
			return "0"
		}
		return s
	})
}
