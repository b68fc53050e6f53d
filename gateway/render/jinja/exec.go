package jinja

// flow says how a statement ended.
type flow uint8

const (
	flowNext flow = iota
	flowBreak
	flowContinue
	flowStop // an error is recorded
)

func (r *run) exec(body []stmt) flow {
	for _, s := range body {
		if !r.charge(1) {
			return flowStop
		}
		if f := s.exec(r); f != flowNext {
			return f
		}
	}
	return r.done()
}

// done ends a statement that may have failed.
func (r *run) done() flow {
	if r.err != nil {
		return flowStop
	}
	return flowNext
}

func (s *dataStmt) exec(r *run) flow {
	r.write(s.text)
	return r.done()
}

func (s *outputStmt) exec(r *run) flow {
	v := s.x.eval(r)
	if r.err == nil {
		r.line = s.line
		r.write(r.str(v))
	}
	return r.done()
}

func (s *ifStmt) exec(r *run) flow {
	for i, cond := range s.conds {
		hit := truth(cond.eval(r))
		if r.err != nil {
			return flowStop
		}
		if hit {
			return r.exec(s.bodies[i])
		}
	}
	return r.exec(s.other)
}

func (s *setStmt) exec(r *run) flow {
	v := s.x.eval(r)
	r.line = s.line
	r.assign(s.target, v)
	return r.done()
}

// assign gives v to a target in the current scope.
func (r *run) assign(t target, v Value) {
	switch {
	case r.err != nil:
	case t.elems != nil:
		vs, ok := r.items(v)
		if !ok {
			r.fail(ErrRender, "cannot unpack non-iterable %s object", typeName(v))
			return
		}
		if len(vs) != len(t.elems) {
			r.fail(ErrRender, "expected %d values to unpack, got %d", len(t.elems), len(vs))
			return
		}
		for i, e := range t.elems {
			r.assign(e, vs[i])
		}
	case t.attr != "":
		have, _ := r.lookup(t.name)
		ns, ok := have.(*namespace)
		if !ok {
			r.fail(ErrRender, "cannot assign attribute on non-namespace object")
			return
		}
		if t.attr[0] == '_' {
			r.fail(ErrRender, underscoreMsg, t.attr)
			return
		}
		ns.vars.put(t.attr, v)
	default:
		r.scope.set(t.name, v)
	}
}

func (s *setBlockStmt) exec(r *run) flow {
	restore := r.push(r.scope)
	text := r.capture(s.body)
	restore()
	var v Value = text
	if s.filter != nil {
		v = r.pipe(s.filter, text)
	}
	r.line = s.line
	r.assign(s.target, v)
	return r.done()
}

func (s *filterStmt) exec(r *run) flow {
	restore := r.push(r.scope)
	text := r.capture(s.body)
	v := r.pipe(s.filter, text)
	restore()
	if r.err == nil {
		r.line = s.line
		r.write(r.str(v))
	}
	return r.done()
}

// pipe applies the filters of a filter or set block to its text.
func (r *run) pipe(x expr, text string) Value {
	f := x.(*filterExpr)
	var v Value = text
	if f.x != nil {
		v = r.pipe(f.x, text)
	}
	if r.err != nil {
		return nil
	}
	return f.apply(r, v)
}

func (s *withStmt) exec(r *run) flow {
	vals := make([]Value, len(s.values))
	for i, x := range s.values {
		vals[i] = x.eval(r)
	}
	defer r.push(r.scope)()
	r.line = s.line
	for i, t := range s.targets {
		r.assign(t, vals[i])
	}
	if r.err != nil {
		return flowStop
	}
	return r.exec(s.body)
}

func (s *scopeStmt) exec(r *run) flow {
	defer r.push(r.scope)()
	return r.exec(s.body)
}

func (breakStmt) exec(*run) flow    { return flowBreak }
func (continueStmt) exec(*run) flow { return flowContinue }

func (s *macroStmt) exec(r *run) flow {
	r.scope.set(s.name, &macro{s, r.scope})
	return flowNext
}

func (s *callStmt) exec(r *run) flow {
	fn := s.call.fn.eval(r)
	a := r.args(&s.call.args)
	if r.err != nil {
		return flowStop
	}
	r.line = s.line
	m, ok := fn.(*macro)
	if !ok {
		r.fail(ErrUnsupported, "call block of a %s", typeName(fn))
		return flowStop
	}
	v := r.callMacro(m, a, &macro{s.caller, r.scope})
	if r.err == nil {
		r.write(v)
	}
	return r.done()
}

// macro is a macro with the scope it was defined in.
type macro struct {
	def   *macroStmt
	scope *scope
}

// callMacro runs a macro; caller is the body of a call block, or nil.
func (r *run) callMacro(m *macro, a callArgs, caller *macro) string {
	d := m.def
	if r.calls++; r.calls > maxCalls {
		r.fail(ErrLimit, "macros call each other deeper than %d", maxCalls)
		return ""
	}
	line := r.line
	defer r.push(m.scope)()
	vals := make([]Value, len(d.params))
	for i := range vals {
		vals[i] = absent
	}
	extra := a.pos[copy(vals, a.pos):]
	kwargs := new(Dict)
	for i, name := range a.names {
		at := -1
		for k, p := range d.params {
			if p == name && k >= len(a.pos) {
				at = k
			}
		}
		switch {
		case at >= 0:
			vals[at] = a.named[i]
		case d.usesKwargs:
			kwargs.put(name, a.named[i])
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
		r.scope.set("caller", callerValue(caller))
	}
	if r.err != nil {
		return ""
	}
	text := r.capture(d.body)
	r.calls--
	r.line = line
	return text
}

func callerValue(caller *macro) Value {
	if caller == nil {
		return &undefined{msg: "No caller defined"}
	}
	return caller
}

// loop is the variable of the same name in a for loop's body. Elements are
// drawn one at a time, because a filter may depend on what the body did.
type loop struct {
	r       *run
	source  []Value // not drawn yet
	keep    func(Value) bool
	index0  int
	prev    Value // undefined in the first iteration
	current Value
	ahead   []Value // drawn, not yet current: at most one, all after length was asked for
	total   int     // elements in all, or -1 before it was asked for
	changed []Value // the last arguments of changed(), or nil
}

// draw takes the next element that the filter keeps.
func (l *loop) draw() (Value, bool) {
	for len(l.source) > 0 && l.r.charge(1) {
		v := l.source[0]
		l.source = l.source[1:]
		if l.keep == nil || l.keep(v) {
			return v, true
		}
	}
	return nil, false
}

// peek returns the element after the current one.
func (l *loop) peek() (Value, bool) {
	if len(l.ahead) == 0 {
		v, ok := l.draw()
		if !ok {
			return nil, false
		}
		l.ahead = append(l.ahead, v)
	}
	return l.ahead[0], true
}

func (l *loop) next() bool {
	v, ok := l.peek()
	if !ok || l.r.err != nil {
		return false
	}
	l.ahead = l.ahead[1:]
	l.prev = l.current
	l.current = v
	l.index0++
	return true
}

func (l *loop) length() int {
	if l.total < 0 {
		for {
			v, ok := l.draw()
			if !ok {
				break
			}
			l.ahead = append(l.ahead, v)
		}
		l.total = l.index0 + 1 + len(l.ahead)
	}
	return l.total
}

func (s *forStmt) exec(r *run) flow {
	in := s.in.eval(r)
	if r.err != nil {
		return flowStop
	}
	r.line = s.line
	source, ok := r.items(in)
	if !ok {
		r.fail(ErrRender, "'%s' object is not iterable", typeName(in))
		return flowStop
	}
	outer := r.scope
	defer func() { r.scope = outer }()
	none := Value(&undefined{msg: "there is no previous item"})
	l := &loop{r: r, source: source, index0: -1, total: -1, prev: none, current: none}
	if s.filter != nil {
		l.keep = func(v Value) bool {
			defer r.push(outer)()
			r.assign(s.target, v)
			return r.err == nil && truth(s.filter.eval(r)) && r.err == nil
		}
	}
	// As in Jinja, "else" runs unless a body ran to its end.
	completed := false
	for l.next() {
		r.scope = &scope{parent: outer}
		r.line = s.line
		r.assign(s.target, l.current)
		r.scope.set("loop", l)
		switch r.exec(s.body) {
		case flowStop:
			return flowStop
		case flowBreak:
			l.source, l.ahead = nil, nil
		case flowNext:
			completed = true
		}
	}
	if r.err != nil {
		return flowStop
	}
	r.scope = outer
	if !completed && s.other != nil {
		defer r.push(outer)()
		return r.exec(s.other)
	}
	return flowNext
}
