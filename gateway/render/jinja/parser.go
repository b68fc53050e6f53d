package jinja

import (
	"fmt"
	"slices"
)

const (
	// maxSource bounds a template: the longest known ones are near 20 KiB.
	maxSource = 1 << 20
	// maxNesting bounds how deep statements and expressions nest, and
	// maxChain how many operators, filters or subscripts follow each other,
	// so that parsing and evaluating cannot exhaust the stack.
	maxNesting = 200
	maxChain   = 1000
)

type parser struct {
	toks  []token
	at    int
	depth int
	loops int // loops around the statement, for break and continue
	// soft: directly in a condition or its branches, where Jinja looks up
	// unknown filters and tests only when it evaluates them.
	soft bool
	// Unknown filters and tests of the statement that are not soft.
	unknown []*applyExpr
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

func (p *parser) expectOp(op string) {
	if !p.skipOp(op) {
		p.unexpected("%q", op)
	}
}

func (p *parser) expectName() string {
	if p.cur().kind != tokName {
		p.unexpected("a name")
	}
	return p.next().text
}

func (p *parser) unexpected(format string, args ...any) {
	t := p.cur()
	fail(ErrSyntax, t.line, "expected %s, got %s", fmt.Sprintf(format, args...), t)
}

// enter counts nesting, and leave ends it.
func (p *parser) enter() {
	if p.depth++; p.depth > maxNesting {
		fail(ErrLimit, p.cur().line, "nested deeper than %d", maxNesting)
	}
}

func (p *parser) leave() { p.depth-- }

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
	for first := true; !p.isOp(closing); first = false {
		if !first {
			p.expectOp(",")
			if p.isOp(closing) {
				break
			}
		}
		element()
	}
	p.expectOp(closing)
}

// body parses statements up to a block tag that begins with one of ends, and
// leaves the parser after that name. At the top level ends is empty.
func (p *parser) body(ends ...string) []stmt {
	var out []stmt
	p.enter()
	defer p.leave()
	for {
		t := p.cur()
		switch t.kind {
		case tokEOF:
			if len(ends) > 0 {
				fail(ErrSyntax, t.line, "unexpected end of template, expected %q", ends)
			}
			return out
		case tokData:
			out = append(out, &dataStmt{t.text})
			p.next()
		case tokVarBegin:
			p.next()
			out = append(out, &outputStmt{p.tuple(), t.line})
			p.refuseUnknown()
			p.expectKind(tokVarEnd)
		default: // tokBegin: the lexer emits no other kind here
			p.next()
			if name := p.cur(); name.kind == tokName && slices.Contains(ends, name.text) {
				return out
			}
			out = append(out, p.statement())
			p.refuseUnknown()
			p.expectKind(tokEnd)
		}
	}
}

func (p *parser) expectKind(kind tokenKind) {
	if p.cur().kind != kind {
		p.unexpected("%s", token{kind: kind})
	}
	p.next()
}

// refuseUnknown fails if the statement has an unknown filter or test.
func (p *parser) refuseUnknown() {
	if len(p.unknown) > 0 {
		x := p.unknown[0]
		fail(ErrUnsupported, x.line, "%s %q", x.kind, x.name)
	}
}

// closeWith parses a body up to the given end tag, which it consumes but for
// its closing.
func (p *parser) closeWith(end string) []stmt {
	defer p.setSoft(false)()
	p.expectKind(tokEnd)
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
		f := p.filters(nil)
		return &filterStmt{f, p.closeWith("endfilter"), t.line}
	case "with":
		return p.with(t.line)
	case "generation":
		return &withStmt{body: p.closeWith("endgeneration"), line: t.line} // a scope
	case "break", "continue":
		if p.loops == 0 {
			fail(ErrSyntax, t.line, "%s outside a loop", name)
		} else if name == "break" {
			return flowStmt(flowBreak)
		}
		return flowStmt(flowContinue)
	case "include", "import", "from", "extends", "block", "autoescape", "do", "trans", "debug":
		fail(ErrUnsupported, t.line, "tag %q", name)
	}
	fail(ErrSyntax, t.line, "unknown tag %q", name)
	return nil
}

func (p *parser) forLoop(line int) stmt {
	s := &forStmt{line: line, target: p.target("in")}
	if !p.skipName("in") {
		p.unexpected(`"in"`)
	}
	s.in = p.tupleNoCond()
	p.contentParts = p.contentParts || p.isContent(s.in)
	if p.skipName("if") {
		s.filter = p.expression()
	}
	if p.isName("recursive") {
		fail(ErrUnsupported, p.cur().line, "recursive for loop")
	}
	p.expectKind(tokEnd)
	defer p.setSoft(false)()
	p.loops++
	s.body = p.body("endfor", "else")
	p.loops--
	if p.skipName("else") {
		s.other = p.closeWith("endfor")
	} else {
		p.skipName("endfor")
	}
	return s
}

func (p *parser) ifChain() stmt {
	s := new(ifStmt)
	defer p.setSoft(true)()
	for more := true; more; more = p.skipName("elif") {
		s.conds = append(s.conds, p.tupleNoCond())
		p.expectKind(tokEnd)
		s.bodies = append(s.bodies, p.body("elif", "else", "endif"))
	}
	if p.skipName("else") {
		p.expectKind(tokEnd)
		s.other = p.body("endif")
	}
	p.skipName("endif")
	return s
}

func (p *parser) set(line int) stmt {
	to := p.target("")
	if p.skipOp("=") {
		x := p.tuple()
		if to.name != "" && to.attr == "" && p.isContent(x) {
			p.contentNames[to.name] = true
		}
		return &setStmt{to, x, line}
	}
	var f expr
	if p.isOp("|") {
		f = p.filters(nil)
	}
	return &setBlockStmt{to, f, p.closeWith("endset"), line}
}

// target parses what is assigned to: a, ns.a, or a tuple of them. end is the
// name that ends a tuple, as in "for a, b in".
func (p *parser) target(end string) target {
	var elems []target
	for len(elems) == 0 || !p.isOp("=") && !p.isOp(")") && p.cur().kind != tokEnd && (end == "" || !p.isName(end)) {
		if p.skipOp("(") {
			p.enter()
			elems = append(elems, p.target(""))
			p.leave()
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
	if slices.Contains([]string{"true", "false", "none", "True", "False", "None"}, t.name) {
		fail(ErrSyntax, line, "cannot assign to %s", t.name)
	}
	if p.skipOp(".") {
		t.attr = p.expectName()
	}
	return t
}

func (p *parser) macro(line int) stmt {
	m := &macroStmt{name: p.expectName(), line: line}
	p.params(m)
	p.macroBody(m, "endmacro")
	return m
}

func (p *parser) params(m *macroStmt) {
	p.expectOp("(")
	for !p.isOp(")") {
		if len(m.params) > 0 {
			p.expectOp(",")
		}
		m.params = append(m.params, p.expectName())
		if p.skipOp("=") {
			m.defaults = append(m.defaults, p.expression())
		} else if len(m.defaults) > 0 {
			fail(ErrSyntax, m.line, "macro %s: an argument without default follows one with", m.name)
		}
	}
	p.expectOp(")")
}

// macroBody parses the body and notes which special variables it mentions.
func (p *parser) macroBody(m *macroStmt, end string) {
	outer, loops := p.names, p.loops
	p.names, p.loops = map[string]bool{}, 0
	m.body = p.closeWith(end)
	m.usesVarargs, m.usesKwargs, m.usesCaller = p.names["varargs"], p.names["kwargs"], p.names["caller"]
	p.names, p.loops = outer, loops
}

func (p *parser) callBlock(line int) stmt {
	m := &macroStmt{name: "caller", line: line}
	if p.isOp("(") {
		p.params(m)
	}
	call, ok := p.expression().(*callExpr)
	if !ok {
		fail(ErrSyntax, line, "expected a call")
	}
	p.macroBody(m, "endcall")
	return &callStmt{m, call, line}
}

func (p *parser) with(line int) stmt {
	s := &withStmt{line: line}
	for p.cur().kind != tokEnd {
		if len(s.targets) > 0 {
			p.expectOp(",")
		}
		s.targets = append(s.targets, p.targetName())
		p.expectOp("=")
		s.values = append(s.values, p.expression())
	}
	s.body = p.closeWith("endwith")
	return s
}

// isContent reports whether an expression is syntactically a message's content.
func (p *parser) isContent(x expr) bool {
	switch x := x.(type) {
	case *attrExpr:
		return x.name == "content"
	case *itemExpr:
		c, ok := x.index.(*constExpr)
		return ok && c.v == "content"
	case *applyExpr:
		return x.kind == "filter" && x.x != nil && p.isContent(x.x)
	case *nameExpr:
		return p.contentNames[x.name]
	}
	return false
}
