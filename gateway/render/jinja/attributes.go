package jinja

import "strings"

// The attributes that Python's types have and this package does not implement.
// They exist for a template, and calling one is refused by name.
var (
	otherStrMethods = names(`casefold center encode expandtabs format_map isascii isdecimal isidentifier isnumeric
		isprintable istitle ljust maketrans partition rjust rpartition swapcase translate zfill`)
	otherDictMethods = names(`copy fromkeys`)
	otherListMethods = names(`copy`)
	otherNumAttrs    = names(`as_integer_ratio bit_count bit_length conjugate denominator from_bytes fromhex hex imag
		is_integer numerator real to_bytes`)
	otherViewAttrs  = names(`isdisjoint mapping`)
	otherMacroAttrs = names(`arguments caller catch_kwargs catch_varargs explicit_caller`)
	// What the immutable sandbox keeps templates from calling.
	mutatingDict = names(`clear pop popitem setdefault update`)
	mutatingList = names(`append clear pop reverse insert sort extend remove`)
)

func names(list string) map[string]bool {
	m := map[string]bool{}
	for _, n := range strings.Fields(list) {
		m[n] = true
	}
	return m
}

// attribute is Python's getattr(v, name) in the sandbox; ok is false where it
// raises AttributeError.
func (r *run) attribute(v Value, name string) (a Value, ok bool) {
	if strings.HasPrefix(name, "__") {
		return unsafeAttr(v, name), true
	}
	switch v := v.(type) {
	case string:
		return methodOf(v, name, strMethods, otherStrMethods)
	case markup:
		return markupMethod(v, name)
	case *Dict:
		if mutatingDict[name] {
			return unsafeAttr(v, name), true
		}
		return methodOf(v, name, dictMethods, otherDictMethods)
	case List:
		if mutatingList[name] {
			return unsafeAttr(v, name), true
		}
		return methodOf(v, name, seqMethods, otherListMethods)
	case Tuple:
		return methodOf(v, name, seqMethods, nil)
	case int64, float64, bool, BigInt:
		return methodOf(v, name, nil, otherNumAttrs)
	case dictView:
		return methodOf(v, name, nil, otherViewAttrs)
	case *namespace:
		return v.vars.get(name)
	case *loop:
		return v.attribute(name)
	case *macro:
		if name == "name" {
			return v.def.name, true
		}
		return methodOf(v, name, nil, otherMacroAttrs)
	case intRange:
		switch name {
		case "start":
			return v.start, true
		case "stop":
			return v.stop, true
		case "step":
			return v.step, true
		}
		return methodOf(v, name, nil, map[string]bool{"count": true, "index": true})
	}
	return nil, false
}

func methodOf(v Value, name string, known map[string]*methodDef, other map[string]bool) (Value, bool) {
	if def := known[name]; def != nil {
		return method{v, name, def}, true
	}
	if other[name] {
		return method{v, name, nil}, true
	}
	return nil, false
}

func unsafeAttr(v Value, name string) Value {
	return &undefined{msg: "access to attribute '" + name + "' of '" + typeName(v) + "' object is unsafe."}
}

// loopMethod is cycle or changed of a loop.
type loopMethod struct {
	l    *loop
	name string
}

func (l *loop) attribute(name string) (Value, bool) {
	switch name {
	case "index":
		return int64(l.index0 + 1), true
	case "index0":
		return int64(l.index0), true
	case "first":
		return l.index0 == 0, true
	case "last":
		_, more := l.peek()
		return !more, true
	case "length":
		return int64(l.length()), true
	case "revindex":
		return int64(l.length() - l.index0), true
	case "revindex0":
		return int64(l.length() - l.index0 - 1), true
	case "depth":
		return int64(1), true // loops of other depths are recursive ones
	case "depth0":
		return int64(0), true
	case "previtem":
		return l.prev, true
	case "nextitem":
		if v, ok := l.peek(); ok {
			return v, true
		}
		return &undefined{msg: "there is no next item"}, true
	case "cycle", "changed":
		return loopMethod{l, name}, true
	}
	return nil, false
}

func (m loopMethod) call(r *run, a callArgs) Value {
	if len(a.names) > 0 {
		return r.fail(ErrRender, "loop.%s takes no keyword arguments", m.name)
	}
	l := m.l
	if m.name == "cycle" {
		if len(a.pos) == 0 {
			return r.fail(ErrRender, "no items for cycling given")
		}
		return a.pos[l.index0%len(a.pos)]
	}
	if l.changed != nil && r.equalSeq(l.changed, a.pos, 0) {
		return false
	}
	l.changed = append([]Value{}, a.pos...)
	return true
}
