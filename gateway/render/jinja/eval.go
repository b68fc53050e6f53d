package jinja

import (
	"math"
	"slices"
	"strings"
)

func (x *constExpr) eval(*run) Value { return x.v }

func (x *nameExpr) eval(r *run) Value {
	r.charge(1)
	if v, ok := r.lookup(x.name); ok {
		return v
	}
	return &undefined{msg: "'" + x.name + "' is undefined"}
}

func (r *run) lookup(name string) (Value, bool) {
	if v, ok := r.scope.get(name); ok {
		return v, true
	}
	if f, ok := globals[name]; ok {
		return f, true
	}
	return nil, false
}

func (r *run) evalAll(xs []expr) []Value {
	out := make([]Value, len(xs))
	for i, x := range xs {
		out[i] = x.eval(r)
	}
	r.charge(len(xs))
	return out
}

func (x *listExpr) eval(r *run) Value  { return List(r.evalAll(x.elems)) }
func (x *tupleExpr) eval(r *run) Value { return Tuple(r.evalAll(x.elems)) }

func (x *dictExpr) eval(r *run) Value {
	d := new(Dict)
	for i, k := range x.keys {
		key, v := k.eval(r), x.vals[i].eval(r)
		r.line = x.line
		r.setKey(d, key, v)
	}
	r.charge(len(x.keys))
	return d
}

func (r *run) setKey(d *Dict, key, v Value) {
	if !d.Set(key, v) {
		r.fail(ErrUnsupported, "a %s as key of a dict", typeName(key))
	}
}

func (x *notExpr) eval(r *run) Value { return !truth(x.x.eval(r)) }

func (x *logicExpr) eval(r *run) Value {
	l := x.l.eval(r)
	if truth(l) == x.or {
		return l
	}
	return x.r.eval(r)
}

func (x *condExpr) eval(r *run) Value {
	switch {
	case truth(x.cond.eval(r)):
		return x.then.eval(r)
	case x.other != nil:
		return x.other.eval(r)
	}
	return &undefined{msg: "the inline if-expression evaluated to false and no else section was defined."}
}

func (x *concatExpr) eval(r *run) Value {
	parts := make([]string, len(x.elems))
	n := 0
	for i, e := range x.elems {
		v := e.eval(r)
		r.line = x.line
		parts[i] = r.str(v)
		n += len(parts[i])
	}
	r.fits(n)
	return strings.Join(parts, "")
}

func (x *compareExpr) eval(r *run) Value {
	l := x.first.eval(r)
	for i, op := range x.ops {
		right := x.operands[i].eval(r)
		r.at(x.line)
		if !r.compare(op, l, right) {
			return false
		}
		l = right
	}
	return true
}

func (r *run) compare(op string, a, b Value) bool {
	switch op {
	case "==":
		return r.equal(a, b, 0)
	case "!=":
		return !r.equal(a, b, 0)
	case "in":
		return r.contains(b, a)
	case "notin":
		return !r.contains(b, a)
	}
	r.use(a, b)
	if f, ok := asFloat(a); ok {
		if g, ok := asFloat(b); ok && (math.IsNaN(f) || math.IsNaN(g)) {
			return false
		}
	}
	switch op {
	case "<":
		return r.less(a, b, 0)
	case ">":
		return r.less(b, a, 0)
	case "<=":
		return !r.less(b, a, 0)
	}
	return !r.less(a, b, 0) // >=
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
		return seq.find(v) >= 0
	}
	vs, ok := r.items(seq)
	if !ok {
		r.fail(ErrRender, "argument of type '%s' is not iterable", typeName(seq))
	}
	return slices.ContainsFunc(vs, func(e Value) bool { return r.equal(v, e, 0) })
}

func (r *run) hashable(v Value) {
	switch v.(type) {
	case List, *Dict:
		r.fail(ErrRender, "unhashable type: '%s'", typeName(v))
	}
}

func (x *attrExpr) eval(r *run) Value {
	v := x.x.eval(r)
	r.at(x.line)
	r.use(v)
	if a, ok := r.attribute(v, x.name); ok {
		return a
	}
	if d, ok := v.(*Dict); ok {
		if e, ok := d.Get(x.name); ok {
			return e
		}
	}
	return missing(v, x.name)
}

func (x *itemExpr) eval(r *run) Value {
	v, index := x.x.eval(r), x.index.eval(r)
	r.at(x.line)
	return r.item(v, index)
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
		if e, ok := d.Get(index); ok {
			return e
		}
	}
	if name, ok := index.(string); ok {
		if a, ok := r.attribute(v, name); ok {
			return a
		}
		return missing(v, name)
	}
	return &undefined{msg: objectName(v) + " has no element " + r.str(index)}
}

// element is the i-th element of a sequence, from the end for negative i.
func (r *run) element(v Value, i int64) (Value, bool) {
	n := 0
	switch v := v.(type) {
	case markup:
		c, ok := r.element(string(v), i)
		return remark(c), ok
	case string:
		r.scans(v)
		n, _ = length(v)
	case List, Tuple, intRange:
		n, _ = length(v)
	}
	if i < 0 {
		i += int64(n)
	}
	if i < 0 || i >= int64(n) {
		return nil, false
	}
	switch v := v.(type) {
	case string:
		end := i + 1
		return sliceString(v, &i, &end, nil), true
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

func missing(v Value, name string) Value {
	return &undefined{msg: "'" + objectName(v) + "' has no attribute '" + name + "'"}
}

func (x *sliceExpr) eval(r *run) Value {
	v := x.x.eval(r)
	var bounds [3]*int64
	for i, e := range []expr{x.start, x.stop, x.step} {
		if e == nil {
			continue
		}
		b := e.eval(r)
		n, ok := asInt(b)
		if b != nil && !ok {
			r.line = x.line
			r.reject(b, "slice indices must be integers or None")
		}
		if b != nil {
			bounds[i] = &n
		}
	}
	r.at(x.line)
	return r.slice(v, bounds[0], bounds[1], bounds[2])
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
	first, by, count := sliceBounds(n, start, stop, step)
	if v, ok := v.(intRange); ok {
		from := v.start + int64(first)*v.step
		return intRange{from, from + int64(count)*int64(by)*v.step, int64(by) * v.step}
	}
	r.charge(count)
	vs, _ := sequence(v)
	out := make([]Value, count)
	for i := range out {
		out[i] = vs[first+i*by]
	}
	return like(v, out)
}

func (x *callExpr) eval(r *run) Value {
	fn := x.fn.eval(r)
	a := r.args(&x.args)
	r.at(x.line)
	if c, ok := fn.(callable); ok {
		return c.call(r, a)
	}
	return r.reject(fn, "'%s' object is not callable", typeName(fn))
}

func (x *applyExpr) eval(r *run) Value { return x.apply(r, x.x.eval(r)) }

func (x *applyExpr) apply(r *run, v Value) Value {
	a := r.args(&x.args)
	r.at(x.line)
	switch {
	case x.def == nil:
		return r.fail(ErrUnsupported, "%s %q", x.kind, x.name)
	case x.kind == "test":
		return r.test(x.def, v, a)
	}
	return x.def.invoke(r, x.name, v, a)
}
