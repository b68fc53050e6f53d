package jinja

import "slices"

// expr is a parsed expression.
type expr struct {
	eval    func(r *run) Value
	text    string // of a string literal
	content bool   // whether it is syntactically a message's content; see Template.ContentParts
	// callee evaluates the function and the arguments of a call, for call blocks. It is nil for
	// other expressions.
	callee func(r *run) (fn Value, a callArgs)
}

// argExprs are the arguments of a call, a filter or a test.
type argExprs struct {
	pos         []expr
	names       []string
	named       []expr // one for each of names
	star, stars *expr  // *args and **kwargs, or nil
}

// constant returns an expression for a value.
func constant(v Value) expr {
	text, _ := v.(string)
	return expr{eval: func(*run) Value { return v }, text: text}
}

// negation returns the expression not x.
func negation(x expr) expr { return expr{eval: func(r *run) Value { return !truth(x.eval(r)) }} }

// item returns the expression x[index].
func item(x, index expr, line int) expr {
	return expr{content: index.text == "content", eval: func(r *run) Value {
		v, i := x.eval(r), index.eval(r)
		r.at(line)
		return r.item(v, i)
	}}
}

// tuple parses an expression, or several with commas between as a tuple.
func (p *parser) tuple() expr { return p.tupleOf(p.expression, false) }

// tupleNoCond is tuple where "if" does not belong to the expression.
func (p *parser) tupleNoCond() expr { return p.tupleOf(p.or, false) }

func (p *parser) tupleOf(element func() expr, parens bool) expr {
	var elems []expr
	isTuple := false
	for !p.tupleEnd() {
		elems = append(elems, element())
		if !p.skipOp(",") {
			break
		}
		isTuple = true
	}
	if isTuple || parens && len(elems) == 0 {
		return expr{eval: func(r *run) Value { return Tuple(r.evalAll(elems)) }}
	}
	if len(elems) == 0 {
		p.unexpected("an expression")
	}
	return elems[0]
}

func (p *parser) tupleEnd() bool {
	k := p.cur().kind
	return k == tokVarEnd || k == tokEnd || k == tokEOF || p.isOp(")") || p.isName("recursive")
}

func (p *parser) expression() expr {
	defer p.nest()()
	known := len(p.unknown)
	x := p.or()
	for n := 0; p.chain(n) && p.skipName("if"); n++ {
		then, cond := x, p.or()
		other := constant(&undefined{msg: "the inline if-expression evaluated to false and no else section was defined."})
		if p.skipName("else") {
			other = p.expression()
		}
		x = expr{eval: func(r *run) Value {
			if truth(cond.eval(r)) {
				return then.eval(r)
			}
			return other.eval(r)
		}}
		p.unknown = p.unknown[:known] // Jinja looks them up when it evaluates them
	}
	return x
}

// Operators by precedence. All group from the left, ** too: so does Jinja, unlike Python.
func (p *parser) or() expr      { return p.infix(p.and, tokName, "or") }
func (p *parser) and() expr     { return p.infix(p.not, tokName, "and") }
func (p *parser) sum() expr     { return p.infix(p.concat, tokOp, "+", "-") }
func (p *parser) product() expr { return p.infix(p.power, tokOp, "*", "/", "//", "%") }
func (p *parser) power() expr   { return p.infix(p.filtered, tokOp, "**") }

// infix parses operators of one precedence.
func (p *parser) infix(operand func() expr, kind tokenKind, ops ...string) expr {
	x := operand()
	for n := 0; p.chain(n); n++ {
		op := p.cur()
		if op.kind != kind || !slices.Contains(ops, op.text) {
			break
		}
		p.next()
		left, right := x, operand()
		x = expr{eval: func(r *run) Value { return r.infix(op, left, right) }}
	}
	return x
}

func (p *parser) not() expr {
	if !p.skipName("not") {
		return p.compare()
	}
	defer p.nest()()
	return negation(p.not())
}

// compare parses comparisons, which chain as in Python.
func (p *parser) compare() expr {
	line, first := p.cur().line, p.sum()
	var ops []string
	var operands []expr
	for n := 0; p.chain(n); n++ {
		op := p.comparison()
		if op == "" {
			break
		}
		ops, operands = append(ops, op), append(operands, p.sum())
	}
	if len(ops) == 0 {
		return first
	}
	return expr{eval: func(r *run) Value {
		left := first.eval(r)
		for i, op := range ops {
			right := operands[i].eval(r)
			r.at(line)
			if !r.compare(op, left, right) {
				return false
			}
			left = right
		}
		return true
	}}
}

var comparisons = []string{"==", "!=", "<", "<=", ">", ">="}

// comparison consumes an operator of compare and returns it, or "" if there is none.
func (p *parser) comparison() string {
	t := p.cur()
	switch {
	case t.kind == tokOp && slices.Contains(comparisons, t.text), p.isName("in"):
		p.next()
		return t.text
	case p.isName("not") && p.look().kind == tokName && p.look().text == "in":
		p.next()
		p.next()
		return "notin"
	}
	return ""
}

func (p *parser) concat() expr {
	line, elems := p.cur().line, []expr{p.product()}
	for n := 0; p.chain(n) && p.skipOp("~"); n++ {
		elems = append(elems, p.product())
	}
	if len(elems) == 1 {
		return elems[0]
	}
	return expr{eval: func(r *run) Value {
		return r.joinStrings(mapped(elems, func(x expr) string {
			v := x.eval(r)
			r.line = line
			return r.str(v)
		}), "")
	}}
}

func (p *parser) filtered() expr { return p.filters(p.unary(), false) }

func (p *parser) unary() expr {
	defer p.nest()()
	sign := p.cur()
	if !p.skipOp("-") && !p.skipOp("+") {
		return p.postfix(p.primary())
	}
	operand := p.unary()
	return p.postfix(expr{eval: func(r *run) Value {
		v := operand.eval(r)
		r.at(sign.line)
		return r.unary(sign.text, v)
	}})
}

// constants are the names that no variable can have.
var constants = map[string]Value{"true": true, "True": true, "false": false, "False": false, "none": nil, "None": nil}

func (p *parser) primary() expr {
	t := p.next()
	switch t.kind {
	case tokName:
		if v, ok := constants[t.text]; ok {
			return constant(v)
		}
		if p.names != nil {
			p.names[t.text] = true
		}
		return expr{content: p.contentNames[t.text], eval: func(r *run) Value { return r.variable(t.text) }}
	case tokString:
		s := t.text
		for p.cur().kind == tokString {
			s += p.next().text
		}
		return constant(s)
	case tokInt, tokFloat:
		return constant(t.value)
	case tokOp:
		switch t.text {
		case "(":
			x := p.tupleOf(p.expression, true)
			p.expectOp(")")
			return x
		case "[":
			var elems []expr
			p.list("]", func() { elems = append(elems, p.expression()) })
			return expr{eval: func(r *run) Value { return List(r.evalAll(elems)) }}
		case "{":
			return p.dict(t.line)
		}
	}
	fail(ErrSyntax, t.line, "unexpected %s", t)
	return expr{}
}

func (p *parser) dict(line int) expr {
	var keys, vals []expr
	p.list("}", func() {
		keys = append(keys, p.expression())
		p.expectOp(":")
		vals = append(vals, p.expression())
	})
	return expr{eval: func(r *run) Value {
		d := new(Dict)
		for i, k := range keys {
			key, v := k.eval(r), vals[i].eval(r)
			r.line = line
			r.setKey(d, key, v)
		}
		r.charge(len(keys))
		return d
	}}
}

func (p *parser) postfix(x expr) expr {
	for n := 0; p.chain(n); n++ {
		switch {
		case p.isOp("."):
			x = p.dot(x)
		case p.isOp("["):
			x = p.subscript(x)
		case p.isOp("("):
			x = p.call(x)
		default:
			return x
		}
	}
	return x
}

func (p *parser) dot(x expr) expr {
	line := p.next().line
	t := p.next()
	switch t.kind {
	case tokName:
		return expr{content: t.text == "content", eval: func(r *run) Value {
			v := x.eval(r)
			r.at(line)
			return r.member(v, t.text)
		}}
	case tokInt:
		return item(x, constant(t.value), line)
	}
	fail(ErrSyntax, t.line, "expected a name or a number after the dot, got %s", t)
	return expr{}
}

func (p *parser) subscript(x expr) expr {
	line := p.next().line
	bounds := [3]expr{constant(nil), constant(nil), constant(nil)} // start, stop, step
	if !p.isOp(":") {
		bounds[0] = p.expression()
		if p.skipOp("]") {
			return item(x, bounds[0], line)
		}
		if p.isOp(",") {
			fail(ErrUnsupported, line, "subscript with a comma")
		}
	}
	p.expectOp(":")
	if !p.isOp("]") && !p.isOp(":") {
		bounds[1] = p.expression()
	}
	if p.skipOp(":") && !p.isOp("]") {
		bounds[2] = p.expression()
	}
	p.expectOp("]")
	return expr{eval: func(r *run) Value {
		v := x.eval(r)
		var at [3]*int64
		for i, bound := range bounds {
			b := bound.eval(r)
			if n, ok := asInt(b); ok {
				at[i] = &n
			} else if b != nil {
				r.line = line
				r.reject(b, "slice indices must be integers or None")
			}
		}
		r.at(line)
		return r.slice(v, at[0], at[1], at[2])
	}}
}

func (p *parser) call(fn expr) expr {
	line, args := p.cur().line, p.args()
	callee := func(r *run) (Value, callArgs) { return fn.eval(r), r.args(&args) }
	return expr{callee: callee, eval: func(r *run) Value {
		fn, a := callee(r)
		r.at(line)
		return want(r, is[callable], fn, "'%s' object is not callable").call(r, a)
	}}
}

func (p *parser) args() (a argExprs) {
	line := p.next().line
	p.list(")", func() {
		ok := a.stars == nil
		switch {
		case p.skipOp("*"):
			ok = ok && a.star == nil
			a.star = new(p.expression())
		case p.skipOp("**"):
			a.stars = new(p.expression())
		case p.cur().kind == tokName && p.look().kind == tokOp && p.look().text == "=":
			a.names = append(a.names, p.next().text)
			p.next()
			a.named = append(a.named, p.expression())
		default:
			ok = ok && a.star == nil && len(a.named) == 0
			a.pos = append(a.pos, p.expression())
		}
		if !ok {
			fail(ErrSyntax, line, "invalid syntax for function call expression")
		}
	})
	return a
}

// filters parses what may follow a postfix expression: filters, tests, calls. In the tag of a
// block only filters follow, the first with or without its bar.
func (p *parser) filters(x expr, block bool) expr {
	for n := 0; p.chain(n); n++ {
		switch {
		case block && n == 0 && p.cur().kind == tokName, p.skipOp("|"):
			x = p.filter(x)
		case block && n == 0:
			p.unexpected("a filter")
		case !block && p.isName("is"):
			x = p.test(x)
		case !block && p.isOp("("):
			x = p.call(x)
		default:
			return x
		}
	}
	return x
}

func (p *parser) filter(x expr) expr {
	line, name, args := p.cur().line, p.dottedName(), argExprs{}
	if p.isOp("(") {
		args = p.args()
	}
	return p.apply(application{"filter", name, filters[name], line}, x, args, slices.Contains(otherFilters, name))
}

// apply returns x with a filter or test applied. One that this package lacks is an error at once
// if Jinja has it, because Jinja would not fail.
func (p *parser) apply(f application, x expr, args argExprs, inJinja bool) expr {
	switch {
	case f.def != nil:
	case inJinja:
		f.refuse(f.line)
	case !p.soft:
		p.unknown = append(p.unknown, f)
	}
	return expr{content: x.content && f.kind == "filter", eval: func(r *run) Value {
		v, a := x.eval(r), r.args(&args)
		r.at(f.line)
		return f.apply(r, v, a)
	}}
}

func (p *parser) dottedName() string {
	name := p.expectName()
	for p.skipOp(".") {
		name += "." + p.expectName()
	}
	return name
}

func (p *parser) test(x expr) expr {
	line := p.next().line
	negated := p.skipName("not")
	name, args := p.dottedName(), argExprs{}
	switch c := p.cur(); {
	case p.isOp("("):
		args = p.args()
	case p.isName("else") || p.isName("or") || p.isName("and"):
	case p.isName("is"):
		fail(ErrSyntax, c.line, "tests cannot be chained with is")
	case c.kind == tokName || c.kind == tokString || c.kind == tokInt || c.kind == tokFloat || p.isOp("[") || p.isOp("{"):
		args.pos = []expr{p.postfix(p.primary())}
	}
	t := p.apply(application{"test", name, tests[name], line}, x, args, name == "escaped")
	if negated {
		return negation(t)
	}
	return t
}
