package jinja

import (
	"math"
	"slices"
	"strings"
)

// variable returns a variable's value.
func (r *run) variable(name string) Value {
	r.charge(1)
	if v, ok := r.lookup(name); ok {
		return v
	}
	return r.undefined("'" + name + "' is undefined")
}

func (r *run) lookup(name string) (Value, bool) {
	if v, ok := r.scope.get(name); ok {
		return v, true
	}
	f, ok := globals[name]
	return f, ok
}

func (r *run) evalAll(xs []expr) []Value {
	r.charge(len(xs))
	return mapped(xs, func(x expr) Value { return x.eval(r) })
}

func (r *run) setKey(d *Dict, key, v Value) {
	r.scansKey(key)
	if !d.Set(key, v) {
		r.fail(ErrUnsupported, "a %s as key of a dict", typeName(key))
	}
}

func (r *run) compare(op string, a, b Value) bool {
	switch op {
	case "==", "!=":
		return r.equal(a, b, 0) == (op == "==")
	case "in", "notin":
		return r.contains(b, a) == (op == "in")
	}
	r.use(a, b)
	if f, g, ok := both(asFloat, a, b); ok && (math.IsNaN(f) || math.IsNaN(g)) {
		return false
	}
	if op == "<" || op == ">=" {
		return (r.order(a, b, 0) < 0) == (op == "<")
	}
	return (r.order(b, a, 0) < 0) == (op == ">")
}

// contains is Python's v in seq.
func (r *run) contains(seq, v Value) bool {
	seq, v = plain(seq), plain(v)
	switch seq := seq.(type) {
	case string:
		s, ok := v.(string)
		if !ok {
			r.fail(ErrRender, "'in <string>' requires string as left operand, not %s", typeName(v))
		}
		r.scans(seq)
		return strings.Contains(seq, s)
	case *Dict:
		r.hashable(v)
		_, ok := r.entry(seq, v)
		return ok
	}
	vs := want(r, r.items, seq, "argument of type '%s' is not iterable")
	return slices.ContainsFunc(vs, func(e Value) bool { return r.equal(v, e, 0) })
}

// entry is d.Get, which reads a key that is a string once.
func (r *run) entry(d *Dict, key Value) (Value, bool) {
	r.scansKey(key)
	return d.Get(key)
}

func (r *run) hashable(v Value) {
	switch v.(type) {
	case List, *Dict:
		r.fail(ErrRender, "unhashable type: '%s'", typeName(v))
	}
}

// member is v.name, an attribute or else an entry of a dict.
func (r *run) member(v Value, name string) Value {
	r.use(v)
	if a, ok := r.attribute(v, name); ok {
		return a
	}
	if d, ok := v.(*Dict); ok {
		if e, ok := r.entry(d, name); ok {
			return e
		}
	}
	return r.missing(v, name)
}

// item is v[index] with Jinja's fallback to attributes.
func (r *run) item(v, index Value) Value {
	r.use(v)
	index = plain(index)
	if i, ok := asInt(index); ok {
		if e, ok := r.element(v, i); ok {
			return e
		}
	}
	if d, ok := v.(*Dict); ok {
		if e, ok := r.entry(d, index); ok {
			return e
		}
	}
	if name, ok := index.(string); ok {
		r.scans(name)
		return r.member(v, name)
	}
	return r.undefined(objectName(v) + " has no element " + r.str(index))
}

// element is the i-th element of a sequence, from the end for negative i.
func (r *run) element(v Value, i int64) (Value, bool) {
	switch v := v.(type) {
	case markup:
		c, ok := r.element(string(v), i)
		return remark(c), ok
	case string:
		r.scans(v)
	case List, Tuple, intRange:
	default:
		return nil, false
	}
	n, _ := length(v)
	if i < 0 {
		i += int64(n)
	}
	if i < 0 || i >= int64(n) {
		return nil, false
	}
	switch v := v.(type) {
	case string:
		return sliceString(v, &i, new(i+1), nil), true
	case intRange:
		return v.at(i), true
	}
	vs, _ := sequence(v)
	return vs[i], true
}

func objectName(v Value) string {
	if v == nil {
		return "None"
	}
	return typeName(v) + " object"
}

func (r *run) missing(v Value, name string) Value {
	return r.undefined("'" + objectName(v) + "' has no attribute '" + name + "'")
}

// undefined returns an undefined value. Its message may have the name of a long key.
func (r *run) undefined(msg string) Value {
	r.fits(len(msg))
	return &undefined{msg: msg}
}

func (r *run) slice(v Value, start, stop, step *int64) Value {
	r.use(v)
	if step != nil && *step == 0 {
		r.fail(ErrRender, "slice step cannot be zero")
	}
	n := 0
	switch v := v.(type) {
	case markup:
		return remark(r.slice(string(v), start, stop, step))
	case *Dict:
		r.fail(ErrRender, "unhashable type: 'slice'")
	case string:
		r.scans(v)
		s := sliceString(v, start, stop, step)
		r.fits(len(s))
		return s
	case List, Tuple, intRange:
		n, _ = length(v)
	default:
		return &undefined{msg: objectName(v) + " has no element slice"}
	}
	first, end, by := sliceBounds(n, start, stop, step)
	if g, ok := v.(intRange); ok {
		return intRange{g.start + int64(first)*g.step, g.start + int64(end)*g.step, int64(by) * g.step}
	}
	vs, _ := sequence(v)
	out := make([]Value, steps(first, end, by))
	r.charge(len(out))
	for i := range out {
		out[i] = vs[first+i*by]
	}
	return like(v, out)
}

// application is a filter or a test, applied by its name.
type application struct {
	kind string // filter or test
	name string
	def  *builtin // nil: unknown, an error when it is applied
	line int
}

// refuse fails because this package lacks the filter or test.
func (f application) refuse(line int) { fail(ErrUnsupported, line, "%s %q", f.kind, f.name) }

func (f application) apply(r *run, v Value, a callArgs) Value {
	if f.def == nil {
		f.refuse(r.line)
	}
	if f.kind == "test" { // markup counts as a plain string
		a.pos = plainAll(a.pos)
		return f.def.invoke(r, f.kind, plain(v), a)
	}
	return f.def.invoke(r, f.name, v, a)
}
