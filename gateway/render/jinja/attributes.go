package jinja

import (
	"maps"
	"slices"
	"strings"
)

// methodsOf lists the methods of each type by name: nil for one of Python's that this package
// lacks, which fails when it is called, and unsafe for one that the immutable sandbox blocks,
// because it changes its receiver.
var methodsOf = map[string]map[string]*builtin{
	"str":         allStrMethods,
	"Markup":      withOthers(allStrMethods, "striptags unescape", ""),
	"dict":        withOthers(dictMethods, "copy fromkeys", "clear pop popitem setdefault update"),
	"list":        withOthers(seqMethods, "copy", "append clear pop reverse insert sort extend remove"),
	"tuple":       seqMethods,
	"int":         numMethods,
	"bool":        numMethods,
	"float":       numMethods,
	"dict_items":  viewMethods,
	"dict_keys":   viewMethods,
	"dict_values": viewMethods,
	"range":       withOthers(nil, "count index", ""),
	"Macro":       withOthers(nil, "arguments caller catch_kwargs catch_varargs explicit_caller", ""),
	"LoopContext": {"cycle": raw(loopCycle), "changed": raw(loopChanged)},
}

var (
	allStrMethods = withOthers(strMethods, `casefold center encode expandtabs format_map isascii isdecimal isidentifier
		isnumeric isprintable istitle ljust maketrans partition rjust rpartition swapcase translate zfill`, "")
	numMethods = withOthers(nil, `as_integer_ratio bit_count bit_length conjugate denominator from_bytes fromhex hex imag
		is_integer numerator real to_bytes`, "")
	viewMethods = withOthers(nil, "isdisjoint mapping", "")
	unsafe      = new(builtin)
)

// withOthers returns methods with the names of lacking and of unsafe ones added.
func withOthers(methods map[string]*builtin, lacking, blocked string) map[string]*builtin {
	all := map[string]*builtin{}
	maps.Copy(all, methods)
	for name := range strings.FieldsSeq(lacking) {
		all[name] = nil
	}
	for name := range strings.FieldsSeq(blocked) {
		all[name] = unsafe
	}
	return all
}

// attribute is Python's getattr(v, name) in the sandbox; ok is false where it
// raises AttributeError.
func (r *run) attribute(v Value, name string) (a Value, ok bool) {
	def, ok := methodsOf[typeName(v)][name]
	switch {
	case strings.HasPrefix(name, "__") || def == unsafe:
		return r.undefined("access to attribute '" + name + "' of '" + typeName(v) + "' object is unsafe."), true
	case ok:
		if _, isMarkup := v.(markup); isMarkup && def != nil && !def.keepsMarkup {
			def = nil // Markup escapes the arguments of these
		}
		return method{v, name, def}, true
	}
	switch v := v.(type) {
	case *namespace:
		return v.vars.Get(name)
	case *loop:
		if get, ok := loopAttributes[name]; ok {
			return get(v), true
		}
	case *macro:
		return v.def.name, name == "name"
	case intRange:
		if i := slices.Index([]string{"start", "stop", "step"}, name); i >= 0 {
			return [...]int64{v.start, v.stop, v.step}[i], true
		}
	}
	return nil, false
}

var loopAttributes = map[string]func(l *loop) Value{
	"index":     func(l *loop) Value { return int64(l.index0 + 1) },
	"index0":    func(l *loop) Value { return int64(l.index0) },
	"first":     func(l *loop) Value { return l.index0 == 0 },
	"last":      func(l *loop) Value { return !l.more() },
	"length":    func(l *loop) Value { return int64(l.length()) },
	"revindex":  func(l *loop) Value { return int64(l.length() - l.index0) },
	"revindex0": func(l *loop) Value { return int64(l.length() - l.index0 - 1) },
	"depth":     func(*loop) Value { return int64(1) }, // only recursive loops have other depths
	"depth0":    func(*loop) Value { return int64(0) },
	"previtem":  func(l *loop) Value { return l.prev },
	"nextitem": func(l *loop) Value {
		if l.more() {
			return l.ahead[0]
		}
		return &undefined{msg: "there is no next item"}
	},
}

func loopCycle(r *run, recv Value, a callArgs) Value {
	if len(a.names) > 0 {
		r.fail(ErrRender, "loop.cycle takes no keyword arguments")
	}
	if len(a.pos) == 0 {
		r.fail(ErrRender, "no items for cycling given")
	}
	return a.pos[recv.(*loop).index0%len(a.pos)]
}

func loopChanged(r *run, recv Value, a callArgs) Value {
	if len(a.names) > 0 {
		r.fail(ErrRender, "loop.changed takes no keyword arguments")
	}
	l := recv.(*loop)
	same := l.changed != nil && r.equalSeq(l.changed, a.pos, 0)
	l.changed = append([]Value{}, a.pos...)
	return !same
}
