package jinja

import "slices"

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
		return &tupleExpr{elems}
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
	p.enter()
	defer p.leave()
	known := len(p.unknown)
	x := p.or()
	for n := 0; p.chain(n) && p.skipName("if"); n++ {
		c := &condExpr{then: x, cond: p.or()}
		if p.skipName("else") {
			c.other = p.expression()
		}
		x = c
		p.unknown = p.unknown[:known] // Jinja looks them up when it evaluates them
	}
	return x
}

func (p *parser) or() expr  { return p.logic("or", p.and) }
func (p *parser) and() expr { return p.logic("and", p.not) }

func (p *parser) logic(word string, operand func() expr) expr {
	x := operand()
	for n := 0; p.chain(n) && p.skipName(word); n++ {
		x = &logicExpr{word == "or", x, operand()}
	}
	return x
}

func (p *parser) not() expr {
	if !p.skipName("not") {
		return p.compare()
	}
	p.enter()
	defer p.leave()
	return &notExpr{p.not()}
}

var comparisons = []string{"==", "!=", "<", "<=", ">", ">="}

func (p *parser) compare() expr {
	c := &compareExpr{line: p.cur().line}
	c.first = p.sum()
	for n := 0; p.chain(n); n++ {
		t := p.cur()
		switch {
		case t.kind == tokOp && slices.Contains(comparisons, t.text):
			p.next()
			c.ops = append(c.ops, t.text)
		case p.skipName("in"):
			c.ops = append(c.ops, "in")
		case p.isName("not") && p.look().kind == tokName && p.look().text == "in":
			p.next()
			p.next()
			c.ops = append(c.ops, "notin")
		default:
			if len(c.ops) == 0 {
				return c.first
			}
			return c
		}
		c.operands = append(c.operands, p.sum())
	}
	return c
}

// binary parses operators of one precedence, from the left.
func (p *parser) binary(operand func() expr, ops ...string) expr {
	x := operand()
	for n := 0; p.chain(n); n++ {
		t := p.cur()
		if t.kind != tokOp || !slices.Contains(ops, t.text) {
			break
		}
		p.next()
		x = &binaryExpr{t.text, x, operand(), t.line}
	}
	return x
}

func (p *parser) sum() expr { return p.binary(p.concat, "+", "-") }

func (p *parser) concat() expr {
	c := &concatExpr{line: p.cur().line}
	c.elems = []expr{p.product()}
	for n := 0; p.chain(n) && p.skipOp("~"); n++ {
		c.elems = append(c.elems, p.product())
	}
	if len(c.elems) == 1 {
		return c.elems[0]
	}
	return c
}

func (p *parser) product() expr { return p.binary(p.power, "*", "/", "//", "%") }

// power groups from the left, unlike Python: so does Jinja.
func (p *parser) power() expr {
	return p.binary(func() expr { return p.unary(true) }, "**")
}

func (p *parser) unary(withFilter bool) expr {
	p.enter()
	defer p.leave()
	t := p.cur()
	var x expr
	if p.skipOp("-") || p.skipOp("+") {
		x = &unaryExpr{t.text, p.unary(false), t.line}
	} else {
		x = p.primary()
	}
	x = p.postfix(x)
	if withFilter {
		x = p.filters(x)
	}
	return x
}

func (p *parser) primary() expr {
	t := p.next()
	switch t.kind {
	case tokName:
		switch t.text {
		case "true", "True":
			return &constExpr{true}
		case "false", "False":
			return &constExpr{false}
		case "none", "None":
			return &constExpr{nil}
		}
		if p.names != nil {
			p.names[t.text] = true
		}
		return &nameExpr{t.text, t.line}
	case tokString:
		s := t.text
		for p.cur().kind == tokString {
			s += p.next().text
		}
		return &constExpr{s}
	case tokInt, tokFloat:
		return &constExpr{t.value}
	case tokOp:
		switch t.text {
		case "(":
			x := p.tupleOf(p.expression, true)
			p.expectOp(")")
			return x
		case "[":
			return &listExpr{p.elements()}
		case "{":
			return p.dict(t.line)
		}
	}
	fail(ErrSyntax, t.line, "unexpected %s", t)
	return nil
}

func (p *parser) elements() (elems []expr) {
	p.list("]", func() { elems = append(elems, p.expression()) })
	return elems
}

func (p *parser) dict(line int) expr {
	d := &dictExpr{line: line}
	p.list("}", func() {
		d.keys = append(d.keys, p.expression())
		p.expectOp(":")
		d.vals = append(d.vals, p.expression())
	})
	return d
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
		return &attrExpr{x, t.text, line}
	case tokInt:
		return &itemExpr{x, &constExpr{t.value}, line}
	}
	fail(ErrSyntax, t.line, "expected a name or a number after the dot, got %s", t)
	return nil
}

func (p *parser) subscript(x expr) expr {
	line := p.next().line
	s := &sliceExpr{x: x, line: line}
	if !p.isOp(":") {
		index := p.expression()
		if p.skipOp("]") {
			return &itemExpr{x, index, line}
		}
		if p.isOp(",") {
			fail(ErrUnsupported, line, "subscript with a comma")
		}
		s.start = index
	}
	p.expectOp(":")
	if !p.isOp("]") && !p.isOp(":") {
		s.stop = p.expression()
	}
	if p.skipOp(":") && !p.isOp("]") {
		s.step = p.expression()
	}
	p.expectOp("]")
	return s
}

func (p *parser) call(fn expr) expr {
	line := p.cur().line
	return &callExpr{fn, p.args(), line}
}

func (p *parser) args() (a argExprs) {
	line := p.next().line
	p.list(")", func() {
		ok := a.stars == nil
		switch {
		case p.skipOp("*"):
			ok = ok && a.star == nil
			a.star = p.expression()
		case p.skipOp("**"):
			a.stars = p.expression()
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

// filters parses what may follow a postfix expression: filters, tests, calls.
// With x nil, as in a filter block, only filters.
func (p *parser) filters(x expr) expr {
	block := x == nil
	for n := 0; p.chain(n); n++ {
		switch {
		case block && n == 0 && p.cur().kind == tokName:
			x = p.filter(x)
		case p.skipOp("|"):
			x = p.filter(x)
		case !block && p.isName("is"):
			x = p.test(x)
		case !block && p.isOp("("):
			x = p.call(x)
		default:
			if x == nil {
				p.unexpected("a filter")
			}
			return x
		}
	}
	return x
}

func (p *parser) filter(x expr) expr {
	line := p.cur().line
	name := p.dottedName()
	f := &applyExpr{x: x, kind: "filter", name: name, def: filters[name], line: line}
	if p.isOp("(") {
		f.args = p.args()
	}
	p.known(f, slices.Contains(otherFilters, name))
	return f
}

// known records a filter or test that this package lacks. If Jinja has it, it is an error at once:
// Jinja would not fail.
func (p *parser) known(x *applyExpr, inJinja bool) {
	switch {
	case x.def != nil:
	case inJinja:
		fail(ErrUnsupported, x.line, "%s %q", x.kind, x.name)
	case !p.soft:
		p.unknown = append(p.unknown, x)
	}
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
	name := p.dottedName()
	t := &applyExpr{x: x, kind: "test", name: name, def: tests[name], line: line}
	p.known(t, name == "escaped")
	switch c := p.cur(); {
	case p.isOp("("):
		t.args = p.args()
	case p.isName("else") || p.isName("or") || p.isName("and"):
	case p.isName("is"):
		fail(ErrSyntax, c.line, "tests cannot be chained with is")
	case c.kind == tokName || c.kind == tokString || c.kind == tokInt || c.kind == tokFloat || p.isOp("[") || p.isOp("{"):
		t.args.pos = []expr{p.postfix(p.primary())}
	}
	if negated {
		return &notExpr{t}
	}
	return t
}
