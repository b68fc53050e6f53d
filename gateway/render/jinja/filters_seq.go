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
	switch {
	case len(a.pos) > 0:
		name := r.wantStr(a.pos[0])
		def := r.filters[name]
		if def == nil {
			return r.fail(ErrUnsupported, "filter %q", name)
		}
		rest := callArgs{a.pos[1:], a.names, a.named}
		apply = func(e Value) Value { return def.apply(r, name, e, rest) }
	default:
		p := r.bind("filter map", a, []string{"attribute", "default"}, 0)
		if r.err != nil {
			return nil
		}
		if p[0] == absent {
			return r.fail(ErrRender, "map requires a filter argument")
		}
		apply = r.mapGetter(p[0], p[1])
	}
	vs := r.iterate(v)
	out := make([]Value, 0, len(vs))
	for _, e := range vs {
		if out = append(out, apply(e)); r.err != nil {
			return nil
		}
	}
	return generator(out)
}

// mapGetter is getter with a default for what an element lacks at any step.
func (r *run) mapGetter(attribute, missing Value) func(Value) Value {
	if missing == absent || missing == nil {
		return r.getter(attribute)
	}
	path, ok := attribute.(string)
	if !ok {
		path = ""
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
			return r.fail(ErrRender, "Missing parameter for attribute name")
		}
		get = r.getter(a.pos[0])
		a.pos = a.pos[1:]
	}
	holds := truth
	if len(a.pos) > 0 {
		name := r.wantStr(a.pos[0])
		def := r.tests[name]
		if def == nil {
			return r.fail(ErrUnsupported, "test %q", name)
		}
		rest := callArgs{a.pos[1:], a.names, a.named}
		holds = func(e Value) bool { return truth(def.apply(r, e, rest)) }
	}
	var out []Value
	for _, e := range r.iterate(v) {
		if holds(get(e)) == keep {
			out = append(out, e)
		}
		if r.err != nil {
			return nil
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
		switch {
		case r.err != nil:
			return 0
		case r.less(a.key, b.key, 0):
			return -1
		case r.less(b.key, a.key, 0):
			return 1
		}
		return 0
	})
	if reverse { // equal elements keep their order
		slices.Reverse(all)
		for lo := 0; lo < len(all); {
			hi := lo + 1
			for hi < len(all) && r.err == nil && !r.less(all[hi].key, all[lo].key, 0) {
				hi++
			}
			slices.Reverse(all[lo:hi])
			lo = hi
		}
	}
	out := make(List, len(all))
	for i, k := range all {
		out[i] = k.v
	}
	return out
}

func filterSort(r *run, v Value, p []Value) Value {
	key := r.folded(absent, p[1])
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
	} else if p[2] != absent {
		key = r.folded(p[2], p[1])
	}
	return r.sorted(r.iterate(v), key, isTrue(p[0]))
}

func filterDictSort(r *run, v Value, p []Value) Value {
	d, ok := v.(*Dict)
	if !ok {
		r.use(v)
		return r.fail(ErrRender, "dictsort of a %s", typeName(v))
	}
	by := int64(0)
	if p[1] != absent {
		switch r.str(p[1]) {
		case "key":
		case "value":
			by = 1
		default:
			return r.fail(ErrRender, `You can only sort by either "key" or "value"`)
		}
	}
	return r.sorted(dictView{d, "items"}.list(), r.folded(by, p[0]), isTrue(p[2]))
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
		if r.err != nil {
			return nil
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
		if _, ok := seen.get(k); !ok {
			r.setKey(seen, k, true)
			out = append(out, e)
		}
		if r.err != nil {
			return nil
		}
	}
	return generator(out)
}
