package jinja

import (
	"slices"
	"strings"
)

func kind(is func(v Value) bool) *builtin {
	return define(func(_ *run, v Value, _ []Value) Value { return is(v) })
}

// named returns a test for values of some types of Python.
func named(types string) *builtin {
	names := strings.Fields(types)
	return kind(func(v Value) bool { return slices.Contains(names, typeName(v)) })
}

func comparison(op string) *builtin {
	return define(func(r *run, v Value, p []Value) Value { return r.compare(op, v, p[0]) }, "other", absent)
}

func remainder(by, want int64) *builtin {
	return define(func(r *run, v Value, _ []Value) Value { return r.equal(r.binary("%", v, by), want, 0) })
}

var tests = map[string]*builtin{
	"defined":   kind(func(v Value) bool { return !isUndefined(v) }),
	"undefined": kind(isUndefined),
	"none":      kind(func(v Value) bool { return v == nil }),
	"boolean":   named("bool"),
	"true":      kind(func(v Value) bool { return v == true }),
	"false":     kind(func(v Value) bool { return v == false }),
	"string":    named("str"),
	"mapping":   named("dict"),
	"float":     named("float"),
	"integer":   named("int"),
	"number":    named("int float bool"),
	"sequence":  named("str list tuple dict range Undefined"),
	"iterable":  kind(isIterable),
	"callable":  named("Macro function builtin_function_or_method LoopContext Undefined"),
	"odd":       remainder(2, 1),
	"even":      remainder(2, 0),
	"divisibleby": define(func(r *run, v Value, p []Value) Value {
		return r.equal(r.binary("%", v, p[0]), int64(0), 0)
	}, "num", absent),
	"lower":  define(func(r *run, v Value, _ []Value) Value { return onlyCase(r.str(v), isLower) }),
	"upper":  define(func(r *run, v Value, _ []Value) Value { return onlyCase(r.str(v), isUpper) }),
	"in":     define(func(r *run, v Value, p []Value) Value { return r.contains(p[0], v) }, "seq", absent),
	"sameas": define(func(r *run, v Value, p []Value) Value { return r.same(v, p[0]) }, "other", absent),
	"filter": define(func(r *run, v Value, _ []Value) Value { return r.filters[r.str(v)] != nil }),
	"test":   define(func(r *run, v Value, _ []Value) Value { return r.tests[r.str(v)] != nil }),

	"==": comparison("=="), "eq": comparison("=="), "equalto": comparison("=="),
	"!=": comparison("!="), "ne": comparison("!="),
	"<": comparison("<"), "lt": comparison("<"), "lessthan": comparison("<"),
	"<=": comparison("<="), "le": comparison("<="),
	">": comparison(">"), "gt": comparison(">"), "greaterthan": comparison(">"),
	">=": comparison(">="), "ge": comparison(">="),
}

func isIterable(v Value) bool {
	switch v.(type) {
	case string, List, Tuple, *Dict, intRange, dictView, *iterator, *loop, *undefined:
		return true
	}
	return false
}

// same is Python's "is" where the result does not depend on which objects Python happens to share.
func (r *run) same(a, b Value) bool {
	switch a.(type) {
	case nil, bool, *Dict, *namespace, *macro:
		return a == b
	}
	switch b.(type) {
	case nil, bool:
		return false
	}
	r.fail(ErrUnsupported, "sameas with a %s", typeName(a))
	return false
}
