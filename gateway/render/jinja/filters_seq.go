package jinja

import (
	"slices"
	"strings"
)

// The filters that take other filters, tests or orders.

func filterMap(r *run, v Value, a callArgs) Value {
	if !truth(v) {
		return generator(nil)
	}
	var apply func(Value) Value
	if len(a.pos) > 0 {
		name := r.wantStr(a.pos[0])
		def := r.filters[name]
		if def == nil {
			r.fail(ErrUnsupported, "filter %q", name)
		}
		apply = func(e Value) Value { return def.invoke(r, name, e, a.rest(1)) }
	} else if len(a.names) == 0 {
		r.fail(ErrRender, "map requires a filter argument")
	} else {
		p := r.bind("filter map", a, []param{{"attribute", absent}, {"default", nil}})
		apply = r.mapGetter(p[0], p[1])
	}
	vs := r.iterate(v)
	out := make([]Value, len(vs))
	for i, e := range vs {
		out[i] = apply(e)
	}
	return generator(out)
}

// mapGetter is getter with a default for an attribute that is missing at any step.
func (r *run) mapGetter(attribute, missing Value) func(Value) Value {
	path, _ := attribute.(string)
	if missing == nil {
		return r.getter(attribute)
	}
	return func(v Value) Value {
		for part := range strings.SplitSeq(path, ".") {
			if v = r.getter(part)(v); isUndefined(v) {
				v = missing
			}
		}
		return v
	}
}

// choose is select, reject, selectattr and rejectattr.
func (r *run) choose(v Value, a callArgs, byAttribute, keep bool) Value {
	if !truth(v) {
		return generator(nil)
	}
	get := func(e Value) Value { return e }
	if byAttribute {
		if len(a.pos) == 0 {
			r.fail(ErrRender, "Missing parameter for attribute name")
		}
		get = r.getter(a.pos[0])
		a = a.rest(1)
	}
	holds := truth
	if len(a.pos) > 0 {
		name := r.wantStr(a.pos[0])
		def := r.tests[name]
		if def == nil {
			r.fail(ErrUnsupported, "test %q", name)
		}
		holds = func(e Value) bool { return truth(r.test(def, e, a.rest(1))) }
	}
	var out []Value
	for _, e := range r.iterate(v) {
		if holds(get(e)) == keep {
			out = append(out, e)
		}
	}
	return generator(out)
}

// sorted orders a copy of vs by key, stably, as Python's sorted does.
func (r *run) sorted(vs []Value, key func(Value) Value, reverse bool) List {
	type keyed struct{ key, v Value }
	all := make([]keyed, len(vs))
	for i, v := range vs {
		all[i] = keyed{key(v), v}
	}
	slices.SortStableFunc(all, func(a, b keyed) int {
		if reverse {
			a, b = b, a
		}
		switch {
		case r.less(a.key, b.key, 0):
			return -1
		case r.less(b.key, a.key, 0):
			return 1
		}
		return 0
	})
	out := make(List, len(all))
	for i, k := range all {
		out[i] = k.v
	}
	return out
}

func filterSort(r *run, v Value, p []Value) Value {
	key := r.folded(p[2], p[1])
	if s, ok := p[2].(string); ok {
		var gets []func(Value) Value
		for part := range strings.SplitSeq(s, ",") {
			gets = append(gets, r.folded(part, p[1]))
		}
		key = func(v Value) Value {
			parts := make(List, len(gets))
			for i, get := range gets {
				parts[i] = get(v)
			}
			return parts
		}
	}
	return r.sorted(r.iterate(v), key, truth(p[0]))
}

func filterDictSort(r *run, v Value, p []Value) Value {
	d, ok := v.(*Dict)
	if !ok {
		r.reject(v, "dictsort of a %s", typeName(v))
	}
	by := int64(slices.Index([]string{"key", "value"}, r.str(p[1])))
	if by < 0 {
		r.fail(ErrRender, `You can only sort by either "key" or "value"`)
	}
	return r.sorted(dictView{d, "dict_items"}.list(), r.folded(by, p[0]), truth(p[2]))
}

func filterMin(r *run, v Value, p []Value) Value { return r.extreme(v, p, r.less) }

func filterMax(r *run, v Value, p []Value) Value {
	return r.extreme(v, p, func(a, b Value, depth int) bool { return r.less(b, a, depth) })
}

// extreme returns the first element that no other one is before.
func (r *run) extreme(v Value, p []Value, before func(a, b Value, depth int) bool) Value {
	vs := r.iterate(v)
	if len(vs) == 0 {
		return &undefined{"No aggregated item, sequence was empty."}
	}
	key := r.folded(p[1], p[0])
	best, bestKey := vs[0], key(vs[0])
	for _, e := range vs[1:] {
		if k := key(e); before(k, bestKey, 0) {
			best, bestKey = e, k
		}
	}
	return best
}

func filterUnique(r *run, v Value, p []Value) Value {
	key := r.folded(p[1], p[0])
	seen := new(Dict)
	var out []Value
	for _, e := range r.iterate(v) {
		k := key(e)
		r.hashable(k)
		if _, ok := seen.Get(k); !ok {
			r.setKey(seen, k, true)
			out = append(out, e)
		}
	}
	return generator(out)
}
