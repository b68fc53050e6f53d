package jinja

import "slices"

const (
	// maxSource bounds a template: the longest known ones are near 20 KiB.
	maxSource = 1 << 20
	// maxNesting bounds how deep statements and expressions nest, and
	// maxChain how many operators, filters or subscripts follow each other,
	// so that parsing and evaluating cannot exhaust the stack.
	maxNesting = 200
	maxChain   = 1000
)

// stmt executes a statement.
type stmt func(r *run) flow

// target is what set, for and with assign to.
type target struct {
	name  string   // a variable, or the namespace of attr
	attr  string   // of a namespace, or empty
	elems []target // a tuple, when name is empty
}

type parser struct {
	toks  []token
	at    int
	depth int
	loops int // loops around the statement, for break and continue
	// soft: directly in a condition or its branches, where Jinja looks up
	// unknown filters and tests only when it evaluates them.
	soft bool
	// Unknown filters and tests of the statement that are not soft.
	unknown []application
	// Names that the macro being parsed mentions, for varargs and the like.
	names map[string]bool
	// Variables that hold a message's content, and whether a loop runs over
	// one; see Template.ContentParts.
	contentNames map[string]bool
	contentParts bool
}

func (p *parser) cur() token { return p.toks[p.at] }

func (p *parser) next() token {
	t := p.toks[p.at]
	if t.kind != tokEOF {
		p.at++
	}
	return t
}

func (p *parser) look() token { return p.toks[min(p.at+1, len(p.toks)-1)] }

func (p *parser) is(kind tokenKind, text string) bool {
	t := p.cur()
	return t.kind == kind && t.text == text
}

func (p *parser) skip(kind tokenKind, text string) bool {
	ok := p.is(kind, text)
	if ok {
		p.at++
	}
	return ok
}

func (p *parser) isName(name string) bool   { return p.is(tokName, name) }
func (p *parser) isOp(op string) bool       { return p.is(tokOp, op) }
func (p *parser) skipName(name string) bool { return p.skip(tokName, name) }
func (p *parser) skipOp(op string) bool     { return p.skip(tokOp, op) }
func (p *parser) expectOp(op string)        { p.expect(tokOp, op) }

// expect consumes the current token, which must be the given one.
func (p *parser) expect(kind tokenKind, text string) {
	if !p.skip(kind, text) {
		p.unexpected(token{kind: kind, text: text}.String())
	}
}

func (p *parser) expectName() string {
	if p.cur().kind != tokName {
		p.unexpected("a name")
	}
	return p.next().text
}

func (p *parser) unexpected(want string) {
	fail(ErrSyntax, p.cur().line, "expected %s, got %s", want, p.cur())
}

// nest counts nesting, until the function that it returns is called.
func (p *parser) nest() (leave func()) {
	if p.depth++; p.depth > maxNesting {
		fail(ErrLimit, p.cur().line, "nested deeper than %d", maxNesting)
	}
	return func() { p.depth-- }
}

// chain fails if n operators in a row exceed the bound. Otherwise it returns true, so that it can
// be a loop's condition.
func (p *parser) chain(n int) bool {
	if n > maxChain {
		fail(ErrLimit, p.cur().line, "more than %d operators in a row", maxChain)
	}
	return true
}

// list parses elements separated by commas, and the closing operator. A last comma may follow.
func (p *parser) list(closing string, element func()) {
	for !p.isOp(closing) {
		element()
		if !p.isOp(closing) {
			p.expectOp(",")
		}
	}
	p.expectOp(closing)
}

// body parses statements up to a block tag that begins with one of ends, and
// leaves the parser after that name. At the top level ends is empty.
func (p *parser) body(ends ...string) []stmt {
	var out []stmt
	defer p.nest()()
	for {
		t := p.cur()
		switch t.kind {
		case tokEOF:
			if len(ends) > 0 {
				fail(ErrSyntax, t.line, "unexpected end of template, expected %q", ends)
			}
			return out
		case tokData:
			p.next()
			out = append(out, func(r *run) flow { return r.write(t.text) })
		case tokVarBegin:
			p.next()
			out = append(out, output(p.tuple(), t.line))
			p.refuseUnknown()
			p.expect(tokVarEnd, "")
		default: // tokBegin: the lexer emits no other kind here
			p.next()
			if name := p.cur(); name.kind == tokName && slices.Contains(ends, name.text) {
				return out
			}
			out = append(out, p.statement())
			p.refuseUnknown()
			p.expect(tokEnd, "")
		}
	}
}

// refuseUnknown fails if the statement has an unknown filter or test.
func (p *parser) refuseUnknown() {
	if len(p.unknown) > 0 {
		p.unknown[0].refuse(p.unknown[0].line)
	}
}

// output returns a statement that writes x as a string.
func output(x expr, line int) stmt {
	return func(r *run) flow {
		v := x.eval(r)
		r.line = line
		return r.write(r.str(v))
	}
}

// assignment returns a statement that assigns x to a target.
func assignment(to target, x expr, line int) stmt {
	return func(r *run) flow { return r.assign(to, x.eval(r), line) }
}

// with returns a statement that executes body in a scope with values assigned to targets.
func with(targets []target, values []expr, body []stmt, line int) stmt {
	return func(r *run) flow {
		vals := r.evalAll(values)
		defer r.push(r.scope)()
		for i, t := range targets {
			r.assign(t, vals[i], line)
		}
		return r.exec(body)
	}
}

// captured parses the filters and the body of a block. It returns the expression of the body's
// output, passed through the filters; both run in a scope of their own.
func (p *parser) captured(end string, filtered bool) expr {
	var body []stmt
	x := expr{eval: func(r *run) Value { return r.capture(body) }}
	if filtered {
		x = p.filters(x, true)
	}
	body = p.closeWith(end)
	return expr{eval: func(r *run) Value {
		defer r.push(r.scope)()
		return x.eval(r)
	}}
}

// closeWith parses a body up to the given end tag, which it consumes but for its closing.
func (p *parser) closeWith(end string) []stmt {
	defer p.setSoft(false)()
	p.expect(tokEnd, "")
	b := p.body(end)
	p.skipName(end)
	return b
}

// setSoft sets p.soft and returns a function that restores it.
func (p *parser) setSoft(soft bool) (restore func()) {
	outer := p.soft
	p.soft = soft
	return func() { p.soft = outer }
}

func (p *parser) statement() stmt {
	t := p.cur()
	name := p.expectName()
	switch name {
	case "for":
		return p.forLoop(t.line)
	case "if":
		return p.ifChain()
	case "set":
		return p.set(t.line)
	case "macro":
		return p.macro(t.line)
	case "call":
		return p.callBlock(t.line)
	case "filter":
		return output(p.captured("endfilter", true), t.line)
	case "with":
		return p.with(t.line)
	case "generation":
		return with(nil, nil, p.closeWith("endgeneration"), t.line)
	case "break", "continue":
		if p.loops == 0 {
			fail(ErrSyntax, t.line, "%s outside a loop", name)
		}
		end := map[string]flow{"break": flowBreak, "continue": flowContinue}[name]
		return func(*run) flow { return end }
	case "include", "import", "from", "extends", "block", "autoescape", "do", "trans", "debug":
		fail(ErrUnsupported, t.line, "tag %q", name)
	}
	fail(ErrSyntax, t.line, "unknown tag %q", name)
	return nil
}

func (p *parser) forLoop(line int) stmt {
	s := &loopDef{line: line, target: p.target("in")}
	p.expect(tokName, "in")
	s.in = p.tupleNoCond()
	p.contentParts = p.contentParts || s.in.content
	if p.skipName("if") {
		s.filter = new(p.expression())
	}
	if p.isName("recursive") {
		fail(ErrUnsupported, p.cur().line, "recursive for loop")
	}
	p.expect(tokEnd, "")
	defer p.setSoft(false)()
	p.loops++
	s.body = p.body("endfor", "else")
	p.loops--
	if p.skipName("else") {
		s.other = p.closeWith("endfor")
	} else {
		p.skipName("endfor")
	}
	return s.exec
}

func (p *parser) ifChain() stmt {
	var conds []expr
	var bodies [][]stmt
	defer p.setSoft(true)()
	for more := true; more; more = p.skipName("elif") {
		conds = append(conds, p.tupleNoCond())
		p.expect(tokEnd, "")
		bodies = append(bodies, p.body("elif", "else", "endif"))
	}
	var other []stmt
	if p.skipName("else") {
		p.expect(tokEnd, "")
		other = p.body("endif")
	}
	p.skipName("endif")
	return func(r *run) flow {
		for i, cond := range conds {
			if truth(cond.eval(r)) {
				return r.exec(bodies[i])
			}
		}
		return r.exec(other)
	}
}

func (p *parser) set(line int) stmt {
	to := p.target("")
	if !p.skipOp("=") {
		return assignment(to, p.captured("endset", p.isOp("|")), line)
	}
	x := p.tuple()
	if to.name != "" && to.attr == "" && x.content {
		p.contentNames[to.name] = true
	}
	return assignment(to, x, line)
}

// target parses what is assigned to: a, ns.a, or a tuple of them. end is the
// name that ends a tuple, as in "for a, b in".
func (p *parser) target(end string) target {
	var elems []target
	for len(elems) == 0 || !p.isOp("=") && !p.isOp(")") && p.cur().kind != tokEnd && (end == "" || !p.isName(end)) {
		if p.skipOp("(") {
			leave := p.nest()
			elems = append(elems, p.target(""))
			leave()
			p.expectOp(")")
		} else {
			elems = append(elems, p.targetName())
		}
		if p.skipOp(",") {
			continue
		}
		if len(elems) == 1 {
			return elems[0]
		}
		break
	}
	return target{elems: elems}
}

func (p *parser) targetName() target {
	line := p.cur().line
	t := target{name: p.expectName()}
	if _, isConstant := constants[t.name]; isConstant {
		fail(ErrSyntax, line, "cannot assign to %s", t.name)
	}
	if p.skipOp(".") {
		t.attr = p.expectName()
	}
	return t
}

func (p *parser) macro(line int) stmt {
	m := &macroDef{name: p.expectName()}
	p.params(m, line)
	p.macroBody(m, "endmacro")
	return func(r *run) flow {
		r.scope.set(m.name, &macro{m, r.scope})
		return flowNext
	}
}

func (p *parser) params(m *macroDef, line int) {
	p.expectOp("(")
	for !p.isOp(")") {
		if len(m.params) > 0 {
			p.expectOp(",")
		}
		m.params = append(m.params, p.expectName())
		if p.skipOp("=") {
			m.defaults = append(m.defaults, p.expression())
		} else if len(m.defaults) > 0 {
			fail(ErrSyntax, line, "macro %s: an argument without default follows one with", m.name)
		}
	}
	p.expectOp(")")
}

// macroBody parses the body and notes the names that it mentions.
func (p *parser) macroBody(m *macroDef, end string) {
	outer, loops := p.names, p.loops
	p.names, p.loops = map[string]bool{}, 0
	m.body, m.names = p.closeWith(end), p.names
	p.names, p.loops = outer, loops
}

func (p *parser) callBlock(line int) stmt {
	caller := &macroDef{name: "caller"}
	if p.isOp("(") {
		p.params(caller, line)
	}
	x := p.expression()
	if x.callee == nil {
		fail(ErrSyntax, line, "expected a call")
	}
	p.macroBody(caller, "endcall")
	return func(r *run) flow {
		fn, a := x.callee(r)
		r.line = line
		m, ok := fn.(*macro)
		if !ok {
			r.fail(ErrUnsupported, "call block of a %s", typeName(fn))
		}
		return r.write(r.callMacro(m, a, &macro{caller, r.scope}))
	}
}

func (p *parser) with(line int) stmt {
	var targets []target
	var values []expr
	for p.cur().kind != tokEnd {
		if len(targets) > 0 {
			p.expectOp(",")
		}
		targets = append(targets, p.targetName())
		p.expectOp("=")
		values = append(values, p.expression())
	}
	return with(targets, values, p.closeWith("endwith"), line)
}
