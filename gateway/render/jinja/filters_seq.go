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
		f := application{kind: "filter", name: name, def: r.filters[name]}
		apply = func(e Value) Value { return f.apply(r, e, a.rest(1)) }
	} else if len(a.names) == 0 {
		r.fail(ErrRender, "map requires a filter argument")
	} else {
		p := r.bind("filter map", a, []param{{"attribute", absent}, {"default", nil}})
		apply = r.getter(p[0], p[1])
	}
	return generator(mapped(r.iterate(v), apply))
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
		get = r.getter(a.pos[0], nil)
		a = a.rest(1)
	}
	holds := truth
	if len(a.pos) > 0 {
		name := r.wantStr(a.pos[0])
		f := application{kind: "test", name: name, def: r.tests[name]}
		holds = func(e Value) bool { return truth(f.apply(r, e, a.rest(1))) }
	}
	all := slices.Clone(r.iterate(v))
	return generator(slices.DeleteFunc(all, func(e Value) bool { return holds(get(e)) != keep }))
}

// sorted orders a copy of vs by key, stably, as Python's sorted does.
func (r *run) sorted(vs []Value, key func(Value) Value, reverse bool) List {
	type keyed struct{ key, v Value }
	all := mapped(vs, func(v Value) keyed { return keyed{key(v), v} })
	slices.SortStableFunc(all, func(a, b keyed) int {
		if reverse {
			a, b = b, a
		}
		return r.order(a.key, b.key, 0)
	})
	return mapped(all, func(k keyed) Value { return k.v })
}

func filterSort(r *run, v Value, p []Value) Value {
	key := r.folded(p[2], p[1])
	if s, ok := p[2].(string); ok {
		var gets []func(Value) Value
		for part := range strings.SplitSeq(s, ",") {
			gets = append(gets, r.folded(part, p[1]))
		}
		key = func(v Value) Value {
			return List(mapped(gets, func(get func(Value) Value) Value { return get(v) }))
		}
	}
	return r.sorted(r.iterate(v), key, truth(p[0]))
}

func filterDictSort(r *run, v Value, p []Value) Value {
	d := want(r, is[*Dict], v, "dictsort of a %s")
	by := int64(slices.Index([]string{"key", "value"}, r.str(p[1])))
	if by < 0 {
		r.fail(ErrRender, `You can only sort by either "key" or "value"`)
	}
	return r.sorted(dictView{d, "dict_items"}.list(), r.folded(by, p[0]), truth(p[2]))
}

func filterMin(r *run, v Value, p []Value) Value { return r.extreme(v, p, false) }
func filterMax(r *run, v Value, p []Value) Value { return r.extreme(v, p, true) }

// extreme returns the first element that is least or greatest.
func (r *run) extreme(v Value, p []Value, greatest bool) Value {
	vs := r.iterate(v)
	if len(vs) == 0 {
		return &undefined{"No aggregated item, sequence was empty."}
	}
	key := r.folded(p[1], p[0])
	best, bestKey := vs[0], key(vs[0])
	for _, e := range vs[1:] {
		k := key(e)
		if !greatest && r.order(k, bestKey, 0) < 0 || greatest && r.order(bestKey, k, 0) < 0 {
			best, bestKey = e, k
		}
	}
	return best
}

func filterUnique(r *run, v Value, p []Value) Value {
	key := r.folded(p[1], p[0])
	seen := new(Dict)
	return generator(slices.DeleteFunc(slices.Clone(r.iterate(v)), func(e Value) bool {
		k := key(e)
		r.hashable(k)
		_, known := r.entry(seen, k)
		r.setKey(seen, k, true)
		return known
	}))
}
