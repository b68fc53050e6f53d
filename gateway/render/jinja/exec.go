package jinja

import "slices"

// flow is how a statement ended.
type flow uint8

const (
	flowNext flow = iota
	flowBreak
	flowContinue
)

func (r *run) exec(body []stmt) flow {
	for _, s := range body {
		r.charge(1)
		if f := s(r); f != flowNext {
			return f
		}
	}
	return flowNext
}

// assign gives v to a target in the current scope. It returns flowNext, so that statements can
// return its result.
func (r *run) assign(t target, v Value, line int) flow {
	r.line = line
	switch {
	case t.elems != nil:
		vs := want(r, r.items, v, "cannot unpack non-iterable %s object")
		if len(vs) != len(t.elems) {
			r.fail(ErrRender, "expected %d values to unpack, got %d", len(t.elems), len(vs))
		}
		for i, e := range t.elems {
			r.assign(e, vs[i], line)
		}
	case t.attr != "":
		have, _ := r.lookup(t.name)
		ns, ok := have.(*namespace)
		if !ok {
			r.fail(ErrRender, "cannot assign attribute on non-namespace object")
		}
		if t.attr[0] == '_' {
			r.fail(ErrRender, underscoreMsg, t.attr)
		}
		ns.vars.Set(t.attr, v)
	default:
		r.scope.set(t.name, v)
	}
	return flowNext
}

// macroDef is a macro as it is written.
type macroDef struct {
	name     string
	params   []string
	defaults []expr // of the last params
	body     []stmt
	names    map[string]bool // mentioned in body: Jinja sets caller, kwargs and varargs only then
}

// macro is a macro with the scope it was defined in.
type macro struct {
	def   *macroDef
	scope *scope
}

func (m *macro) call(r *run, a callArgs) Value { return r.callMacro(m, a, noCaller) }

// noCaller is the variable caller of a macro outside a call block.
var noCaller Value = &undefined{msg: "No caller defined"}

// callMacro runs a macro; caller is the body of a call block, or noCaller.
func (r *run) callMacro(m *macro, a callArgs, caller Value) string {
	d := m.def
	if r.calls++; r.calls > maxCalls {
		r.fail(ErrLimit, "macros call each other deeper than %d", maxCalls)
	}
	line := r.line
	defer r.push(m.scope)()
	vals := slices.Repeat([]Value{absent}, len(d.params))
	extra := a.pos[copy(vals, a.pos):]
	kwargs := new(Dict)
	for i, name := range a.names {
		at := slices.Index(d.params, name)
		switch {
		case at >= len(a.pos):
			vals[at] = a.named[i]
		case d.names["kwargs"]:
			kwargs.Set(name, a.named[i])
		default:
			r.fail(ErrRender, "macro '%s' takes no keyword argument '%s'", d.name, name)
		}
	}
	if len(extra) > 0 && !d.names["varargs"] {
		r.fail(ErrRender, "macro '%s' takes not more than %d argument(s)", d.name, len(d.params))
	}
	if caller != noCaller && !d.names["caller"] {
		r.fail(ErrRender, "macro '%s' takes no keyword argument 'caller'", d.name)
	}
	firstDefault := len(d.params) - len(d.defaults)
	for i, p := range d.params {
		v := vals[i]
		if v == absent && i >= firstDefault {
			v = d.defaults[i-firstDefault].eval(r)
		} else if v == absent {
			v = r.undefined("parameter '" + p + "' was not provided")
		}
		r.scope.set(p, v)
	}
	if d.names["varargs"] {
		r.scope.set("varargs", Tuple(extra))
	}
	if d.names["kwargs"] {
		r.scope.set("kwargs", kwargs)
	}
	if d.names["caller"] {
		r.scope.set("caller", caller)
	}
	text := r.capture(d.body)
	r.calls--
	r.line = line
	return text
}

// loop is the variable of the same name in a for loop's body. It draws elements
// one at a time, because a filter may depend on effects of the body.
type loop struct {
	r       *run
	source  []Value // not drawn yet
	keep    func(Value) bool
	index0  int
	prev    Value // undefined in the first iteration
	current Value
	ahead   []Value // drawn, not yet current
	changed []Value // the last arguments of changed(), or nil
}

// draw moves the next element that the filter keeps from source to ahead.
func (l *loop) draw() bool {
	for len(l.source) > 0 {
		l.r.charge(1)
		v := l.source[0]
		l.source = l.source[1:]
		if l.keep == nil || l.keep(v) {
			l.ahead = append(l.ahead, v)
			return true
		}
	}
	return false
}

// more reports whether an element follows the current one; it is then the first of ahead.
func (l *loop) more() bool { return len(l.ahead) > 0 || l.draw() }

func (l *loop) length() int {
	for l.draw() {
	}
	return l.index0 + 1 + len(l.ahead)
}

// loopDef is a for loop as it is written.
type loopDef struct {
	target target
	in     expr
	filter *expr // or nil
	body   []stmt
	other  []stmt
	line   int
}

func (s *loopDef) exec(r *run) flow {
	in := s.in.eval(r)
	r.line = s.line
	source := r.iterate(in)
	outer := r.scope
	defer func() { r.scope = outer }()
	none := Value(&undefined{msg: "there is no previous item"})
	l := &loop{r: r, source: source, index0: -1, prev: none, current: none}
	if s.filter != nil {
		l.keep = func(v Value) bool {
			defer r.push(outer)()
			r.assign(s.target, v, r.line)
			return truth(s.filter.eval(r))
		}
	}
	// As in Jinja, "else" runs unless a body ran to its end.
	completed := false
	for l.more() {
		l.prev, l.current = l.current, l.ahead[0]
		l.ahead = l.ahead[1:]
		l.index0++
		r.scope = &scope{parent: outer}
		r.assign(s.target, l.current, s.line)
		r.scope.set("loop", l)
		end := r.exec(s.body)
		completed = completed || end == flowNext
		if end == flowBreak {
			break
		}
	}
	r.scope = outer
	if !completed && s.other != nil {
		defer r.push(outer)()
		return r.exec(s.other)
	}
	return flowNext
}
