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
		if f := s.exec(r); f != flowNext {
			return f
		}
	}
	return flowNext
}

func (s *dataStmt) exec(r *run) flow {
	r.write(s.text)
	return flowNext
}

func (s *outputStmt) exec(r *run) flow {
	r.print(s.line, s.x.eval(r))
	return flowNext
}

// print writes v as a string.
func (r *run) print(line int, v Value) {
	r.line = line
	r.write(r.str(v))
}

func (s *ifStmt) exec(r *run) flow {
	for i, cond := range s.conds {
		if truth(cond.eval(r)) {
			return r.exec(s.bodies[i])
		}
	}
	return r.exec(s.other)
}

func (s *setStmt) exec(r *run) flow {
	v := s.x.eval(r)
	r.line = s.line
	r.assign(s.target, v)
	return flowNext
}

// assign gives v to a target in the current scope.
func (r *run) assign(t target, v Value) {
	switch {
	case t.elems != nil:
		vs, ok := r.items(v)
		if !ok {
			r.fail(ErrRender, "cannot unpack non-iterable %s object", typeName(v))
		}
		if len(vs) != len(t.elems) {
			r.fail(ErrRender, "expected %d values to unpack, got %d", len(t.elems), len(vs))
		}
		for i, e := range t.elems {
			r.assign(e, vs[i])
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
}

func (s *setBlockStmt) exec(r *run) flow {
	v := r.filtered(s.body, s.filter)
	r.line = s.line
	r.assign(s.target, v)
	return flowNext
}

func (s *filterStmt) exec(r *run) flow {
	r.print(s.line, r.filtered(s.body, s.filter))
	return flowNext
}

// filtered returns the output of body, executed in a scope of its own and passed through a chain
// of filters.
func (r *run) filtered(body []stmt, filters expr) Value {
	defer r.push(r.scope)()
	return r.pipe(filters, r.capture(body))
}

func (r *run) pipe(filters expr, v Value) Value {
	f, ok := filters.(*applyExpr)
	if !ok {
		return v
	}
	return f.apply(r, r.pipe(f.x, v))
}

func (s *withStmt) exec(r *run) flow {
	vals := r.evalAll(s.values)
	defer r.push(r.scope)()
	r.line = s.line
	for i, t := range s.targets {
		r.assign(t, vals[i])
	}
	return r.exec(s.body)
}

func (s flowStmt) exec(*run) flow { return flow(s) }

func (s *macroStmt) exec(r *run) flow {
	r.scope.set(s.name, &macro{s, r.scope})
	return flowNext
}

func (s *callStmt) exec(r *run) flow {
	fn := s.call.fn.eval(r)
	a := r.args(&s.call.args)
	r.line = s.line
	m, ok := fn.(*macro)
	if !ok {
		r.fail(ErrUnsupported, "call block of a %s", typeName(fn))
	}
	r.write(r.callMacro(m, a, &macro{s.caller, r.scope}))
	return flowNext
}

// macro is a macro with the scope it was defined in.
type macro struct {
	def   *macroStmt
	scope *scope
}

func (m *macro) call(r *run, a callArgs) Value { return r.callMacro(m, a, nil) }

// callMacro runs a macro; caller is the body of a call block, or nil.
func (r *run) callMacro(m *macro, a callArgs, caller *macro) string {
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
		case d.usesKwargs:
			kwargs.Set(name, a.named[i])
		default:
			r.fail(ErrRender, "macro '%s' takes no keyword argument '%s'", d.name, name)
		}
	}
	if len(extra) > 0 && !d.usesVarargs {
		r.fail(ErrRender, "macro '%s' takes not more than %d argument(s)", d.name, len(d.params))
	}
	if caller != nil && !d.usesCaller {
		r.fail(ErrRender, "macro '%s' takes no keyword argument 'caller'", d.name)
	}
	firstDefault := len(d.params) - len(d.defaults)
	for i, p := range d.params {
		v := vals[i]
		if v == absent && i >= firstDefault {
			v = d.defaults[i-firstDefault].eval(r)
		} else if v == absent {
			v = &undefined{msg: "parameter '" + p + "' was not provided"}
		}
		r.scope.set(p, v)
	}
	if d.usesVarargs {
		r.scope.set("varargs", Tuple(extra))
	}
	if d.usesKwargs {
		r.scope.set("kwargs", kwargs)
	}
	if d.usesCaller {
		callerOf := Value(&undefined{msg: "No caller defined"})
		if caller != nil {
			callerOf = caller
		}
		r.scope.set("caller", callerOf)
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

func (l *loop) next() bool {
	if !l.more() {
		return false
	}
	l.prev, l.current = l.current, l.ahead[0]
	l.ahead = l.ahead[1:]
	l.index0++
	return true
}

func (l *loop) length() int {
	for l.draw() {
	}
	return l.index0 + 1 + len(l.ahead)
}

func (s *forStmt) exec(r *run) flow {
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
			r.assign(s.target, v)
			return truth(s.filter.eval(r))
		}
	}
	// As in Jinja, "else" runs unless a body ran to its end.
	completed := false
	for l.next() {
		r.scope = &scope{parent: outer}
		r.line = s.line
		r.assign(s.target, l.current)
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
