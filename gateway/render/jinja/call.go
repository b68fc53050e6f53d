package jinja

import "slices"

// builtin is a filter, test, method or global function. Its call gets one value for each of
// params; raw, where set, gets the arguments as written. The receiver is the filtered or tested
// value, or nil for a function. Work and result count as scans of a string receiver.
type builtin struct {
	call   func(r *run, recv Value, p []Value) Value
	raw    func(r *run, recv Value, a callArgs) Value
	params []param
	// keepsMarkup: applied to markup, the result is markup.
	keepsMarkup bool
}

// param is a parameter. One without a name takes a positional argument only.
type param struct {
	name  string
	value Value // the default, or absent for a required parameter
}

// absent marks an argument that was not given, and a parameter that has no default.
var absent Value = new(struct{ _ byte })

// define returns a builtin whose parameters are given as alternating names and defaults.
func define(call func(r *run, recv Value, p []Value) Value, params ...Value) *builtin {
	b := &builtin{call: call}
	for i := 0; i < len(params); i += 2 {
		b.params = append(b.params, param{params[i].(string), params[i+1]})
	}
	return b
}

func raw(call func(r *run, recv Value, a callArgs) Value) *builtin { return &builtin{raw: call} }

func (b *builtin) keepMarkup() *builtin {
	b.keepsMarkup = true
	return b
}

// invoke calls b, which error messages name what.
func (b *builtin) invoke(r *run, what string, recv Value, a callArgs) Value {
	if b.raw != nil {
		return b.raw(r, recv, a)
	}
	p := r.bind(what, a, b.params)
	if m, ok := recv.(markup); ok && b.keepsMarkup {
		r.scans(string(m))
		return remark(b.call(r, string(m), plainAll(p)))
	}
	s, ok := plain(recv).(string)
	if ok {
		r.scans(s)
	}
	v := b.call(r, recv, p)
	if s, isString := v.(string); ok && isString {
		r.fits(len(s))
	}
	return v
}

// callable is a value that a template can call.
type callable interface {
	call(r *run, a callArgs) Value
}

// method is a method bound to its receiver.
type method struct {
	recv Value
	name string
	def  *builtin // nil: a method of Python that this package lacks
}

func (m method) call(r *run, a callArgs) Value {
	if m.def == nil {
		return r.fail(ErrUnsupported, "method %q of %s", m.name, typeName(m.recv))
	}
	if m.def.raw == nil {
		a.pos, a.named = plainAll(a.pos), plainAll(a.named)
	}
	return m.def.invoke(r, m.name+"()", m.recv, a)
}

// function is a global function.
type function struct {
	name string
	def  *builtin // nil: a function of Jinja that this package lacks
}

func (f *function) call(r *run, a callArgs) Value {
	if f.def == nil {
		return r.fail(ErrUnsupported, "function %q", f.name)
	}
	return f.def.invoke(r, f.name, nil, a)
}

// callArgs are evaluated arguments.
type callArgs struct {
	pos   []Value
	names []string
	named []Value // one for each of names
}

// rest returns the arguments after the first n positional ones.
func (a callArgs) rest(n int) callArgs { return callArgs{a.pos[n:], a.names, a.named} }

// bind returns one argument for each of params: a positional one, a named one or the default.
func (r *run) bind(what string, a callArgs, params []param) []Value {
	if len(a.pos) > len(params) {
		r.fail(ErrRender, "%s takes at most %d arguments, got %d", what, len(params), len(a.pos))
	}
	out := slices.Repeat([]Value{absent}, len(params))
	copy(out, a.pos)
	for i, name := range a.names {
		at := slices.IndexFunc(params, func(p param) bool { return p.name == name && name != "" })
		if at < 0 || out[at] != absent {
			r.fail(ErrRender, "%s got an unexpected keyword argument '%s'", what, name)
		}
		out[at] = a.named[i]
	}
	for i, p := range params {
		if out[i] != absent {
			continue
		}
		if out[i] = p.value; p.value == absent {
			r.fail(ErrRender, "%s misses argument %d", what, i+1)
		}
	}
	return out
}

// args evaluates the arguments of a call.
func (r *run) args(a *argExprs) callArgs {
	eval := func(x expr) Value { return x.eval(r) }
	c := callArgs{mapped(a.pos, eval), slices.Clip(a.names), mapped(a.named, eval)}
	if a.star != nil {
		c.pos = append(c.pos, want(r, r.items, a.star.eval(r), "argument after * must be an iterable")...)
	}
	if a.stars != nil {
		d, ok := a.stars.eval(r).(*Dict)
		if !ok {
			r.fail(ErrRender, "argument after ** must be a mapping")
		}
		for i, k := range d.keys {
			name, ok := k.(string)
			if !ok {
				r.fail(ErrRender, "keywords must be strings")
			}
			c.names, c.named = append(c.names, name), append(c.named, d.vals[i])
		}
		r.charge(d.Len())
	}
	return c
}
