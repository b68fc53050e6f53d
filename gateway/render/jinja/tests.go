package jinja

// testDef is what may follow "is".
type testDef struct {
	params []string
	holds  func(r *run, v Value, p []Value) bool
}

func (t *testDef) apply(r *run, v Value, a callArgs) Value {
	a.pos, v = plainAll(a.pos), plain(v)
	p := r.bind("test", a, t.params, len(t.params))
	if s, ok := v.(string); ok {
		r.scans(s)
	}
	return r.err == nil && t.holds(r, v, p)
}

func unary(is func(v Value) bool) *testDef {
	return &testDef{nil, func(_ *run, v Value, _ []Value) bool { return is(v) }}
}

func comparison(op string) *testDef {
	return &testDef{[]string{"other"}, func(r *run, v Value, p []Value) bool { return r.compare(op, v, p[0]) }}
}

var tests = map[string]*testDef{
	"defined":   unary(func(v Value) bool { return !isUndefined(v) }),
	"undefined": unary(isUndefined),
	"none":      unary(func(v Value) bool { return v == nil }),
	"boolean":   unary(func(v Value) bool { _, ok := v.(bool); return ok }),
	"true":      unary(func(v Value) bool { return v == true }),
	"false":     unary(func(v Value) bool { return v == false }),
	"string":    unary(func(v Value) bool { _, ok := v.(string); return ok }),
	"mapping":   unary(func(v Value) bool { _, ok := v.(*Dict); return ok }),
	"float":     unary(func(v Value) bool { _, ok := v.(float64); return ok }),
	"integer":   unary(isInteger),
	"number":    unary(isNumber),
	"sequence":  unary(isSequence),
	"iterable":  unary(isIterable),
	"callable":  unary(isCallable),
	"odd":       {nil, func(r *run, v Value, _ []Value) bool { return r.remainder(v, int64(2), int64(1)) }},
	"even":      {nil, func(r *run, v Value, _ []Value) bool { return r.remainder(v, int64(2), int64(0)) }},
	"divisibleby": {[]string{"num"}, func(r *run, v Value, p []Value) bool {
		return r.remainder(v, p[0], int64(0))
	}},
	"lower": {nil, func(r *run, v Value, _ []Value) bool { return onlyCase(r.str(v), isLower) }},
	"upper": {nil, func(r *run, v Value, _ []Value) bool { return onlyCase(r.str(v), isUpper) }},
	"in":    {[]string{"seq"}, func(r *run, v Value, p []Value) bool { return r.contains(p[0], v) }},
	"sameas": {[]string{"other"}, func(r *run, v Value, p []Value) bool {
		return r.same(v, p[0])
	}},
	"filter": {nil, func(r *run, v Value, _ []Value) bool { return r.filters[r.str(v)] != nil }},
	"test":   {nil, func(r *run, v Value, _ []Value) bool { return r.tests[r.str(v)] != nil }},

	"==": comparison("=="), "eq": comparison("=="), "equalto": comparison("=="),
	"!=": comparison("!="), "ne": comparison("!="),
	"<": comparison("<"), "lt": comparison("<"), "lessthan": comparison("<"),
	"<=": comparison("<="), "le": comparison("<="),
	">": comparison(">"), "gt": comparison(">"), "greaterthan": comparison(">"),
	">=": comparison(">="), "ge": comparison(">="),
}

func isInteger(v Value) bool {
	switch v.(type) {
	case int64, BigInt:
		return true
	}
	return false
}

func isNumber(v Value) bool {
	_, ok := asFloat(v)
	return ok || isInteger(v)
}

func isSequence(v Value) bool {
	switch v.(type) {
	case string, List, Tuple, *Dict, intRange, *undefined:
		return true
	}
	return false
}

func isIterable(v Value) bool {
	switch v.(type) {
	case dictView, *iterator, *loop:
		return true
	}
	return isSequence(v)
}

func isCallable(v Value) bool {
	switch v.(type) {
	case *macro, *function, method, loopMethod, *loop, *undefined:
		return true
	}
	return false
}

func (r *run) remainder(v, by, want Value) bool {
	return r.equal(r.binary("%", v, by), want, 0) && r.err == nil
}

// same is Python's "is" where that does not depend on which objects Python
// happens to share.
func (r *run) same(a, b Value) bool {
	switch a.(type) {
	case nil, bool:
		return a == b
	case *Dict, *namespace, *macro:
		return a == b
	}
	switch b.(type) {
	case nil, bool:
		return false
	}
	r.fail(ErrUnsupported, "sameas with a %s", typeName(a))
	return false
}
