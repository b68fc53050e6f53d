package grammar

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// notation is what GBNF and Lark write differently.
type notation struct {
	keyword string
	define  string // between a rule's name and its body
	comment string
	start   string // the first rule
	lark    bool   // regular expressions, [optional], %directives, terminals in upper case
}

var (
	gbnf         = notation{keyword: "ebnf", define: "::=", comment: "#", start: "root"}
	larkNotation = notation{keyword: "lark", define: ":", comment: "//", start: "start", lark: true}
)

// ebnfParser reads a grammar of rules. Alternatives of different terminals may match the same text:
// there is no lexer that prefers one.
type ebnfParser struct {
	notation
	text    string
	at      int
	depth   int
	limits  *Limits
	names   map[string]int32
	defined []bool
	order   []string // names by rule
	rules   []*expr
	ignore  []*expr // of %ignore
	inTerm  bool    // inside a terminal of Lark, where nothing is ignored
	steps   int     // of the schemas so far
}

// compileEBNF returns the rules of a grammar text and the first.
func compileEBNF(text []byte, n notation, limits *Limits) ([]*expr, int32, error) {
	p := &ebnfParser{notation: n, text: string(text), limits: limits, names: map[string]int32{}}
	if len(text) > limits.SourceBytes {
		return nil, 0, limitError(n.keyword, "", "bytes", limits.SourceBytes)
	}
	if !utf8.Valid(text) {
		return nil, 0, p.bad("the grammar is not UTF-8")
	}
	if n.lark {
		if err := p.findIgnored(); err != nil {
			return nil, 0, err
		}
	}
	for p.skip(true); p.at < len(p.text); p.skip(true) {
		if err := p.statement(); err != nil {
			return nil, 0, err
		}
	}
	for i, ok := range p.defined {
		if !ok {
			return nil, 0, &Error{Keyword: n.keyword, Reason: fmt.Sprintf("rule %q is not defined", p.order[i])}
		}
	}
	start, ok := p.names[n.start]
	if !ok {
		return nil, 0, &Error{Keyword: n.keyword, Reason: fmt.Sprintf("rule %q is not defined", n.start)}
	}
	if err := p.finish(); err != nil {
		return nil, 0, err
	}
	return p.rules, start, nil
}

func (p *ebnfParser) bad(format string, args ...any) error {
	line := 1 + strings.Count(p.text[:min(p.at, len(p.text))], "\n")
	return &Error{Keyword: p.keyword, Pointer: "line " + strconv.Itoa(line), Reason: fmt.Sprintf(format, args...)}
}

// skip passes blanks and comments, and line ends too if lines is set.
func (p *ebnfParser) skip(lines bool) {
	for p.at < len(p.text) {
		switch c := p.text[p.at]; {
		case c == ' ' || c == '\t' || c == '\r' || lines && c == '\n':
			p.at++
		case strings.HasPrefix(p.text[p.at:], p.comment):
			for p.at < len(p.text) && p.text[p.at] != '\n' {
				p.at++
			}
		default:
			return
		}
	}
}

func isNameByte(c byte) bool {
	return c == '_' || c == '-' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

func (p *ebnfParser) name() string {
	start := p.at
	for p.at < len(p.text) && isNameByte(p.text[p.at]) && !(p.lark && p.text[p.at] == '-') {
		p.at++
	}
	return p.text[start:p.at]
}

// rule returns the number of a rule, which may be defined later.
func (p *ebnfParser) rule(name string) (int32, error) {
	if i, ok := p.names[name]; ok {
		return i, nil
	}
	if len(p.rules) >= p.limits.Rules {
		return 0, limitError(p.keyword, "", "rules", p.limits.Rules)
	}
	i := int32(len(p.rules))
	p.names[name] = i
	p.rules, p.defined, p.order = append(p.rules, nil), append(p.defined, false), append(p.order, name)
	return i, nil
}

// statement reads a rule, or a directive of Lark.
func (p *ebnfParser) statement() error {
	if p.lark && p.text[p.at] == '%' {
		return p.directive()
	}
	if p.lark {
		for p.at < len(p.text) && strings.IndexByte("?!", p.text[p.at]) >= 0 {
			p.at++
		}
	}
	name := p.name()
	if name == "" {
		return p.bad("a rule's name is expected")
	}
	if p.lark && strings.HasPrefix(p.text[p.at:], ".") { // priority
		p.at++
		p.name()
	}
	if p.lark && strings.HasPrefix(p.text[p.at:], "[") {
		if err := p.attributes(); err != nil {
			return err
		}
	}
	p.skip(true)
	if !strings.HasPrefix(p.text[p.at:], p.define) {
		return p.bad("%q is expected behind %s", p.define, name)
	}
	p.at += len(p.define)
	i, err := p.rule(name)
	if err != nil {
		return err
	}
	if p.defined[i] {
		return p.bad("rule %q is defined twice", name)
	}
	p.defined[i] = true
	p.inTerm = p.lark && isTerminal(name)
	p.skipToBody()
	e, err := p.alternatives()
	if err != nil {
		return err
	}
	p.rules[i] = e
	if p.skip(false); p.at < len(p.text) && p.text[p.at] != '\n' {
		return p.bad("%q is not expected", clip(p.text[p.at:min(len(p.text), p.at+10)]))
	}
	return nil
}

// skipToBody passes line ends before a rule's body, but not to the next rule.
func (p *ebnfParser) skipToBody() {
	at := p.at
	p.skip(true)
	body := p.at
	if p.name() != "" {
		if p.skip(false); strings.HasPrefix(p.text[p.at:], p.define) {
			body = at
		}
	}
	p.at = body
}

// isTerminal reports whether Lark takes a name for a terminal's.
func isTerminal(name string) bool {
	return strings.ToUpper(name) == name && strings.ToLower(name) != name
}

func (p *ebnfParser) alternatives() (*expr, error) {
	if p.depth++; p.depth > 4*p.limits.Depth {
		return nil, limitError(p.keyword, "", "nested groups", 4*p.limits.Depth)
	}
	defer func() { p.depth-- }()
	var out []*expr
	for {
		e, err := p.sequence()
		if err != nil {
			return nil, err
		}
		out = append(out, e)
		if !p.alternativeFollows() {
			return alt(out...), nil
		}
	}
}

// alternativeFollows passes a bar, which may be at the beginning of the next line.
func (p *ebnfParser) alternativeFollows() bool {
	at := p.at
	if p.skip(true); p.at < len(p.text) && p.text[p.at] == '|' {
		p.at++
		p.skip(true)
		return true
	}
	p.at = at
	return false
}

// sequence reads factors up to a bar, a closing bracket or the end of the rule.
func (p *ebnfParser) sequence() (*expr, error) {
	var out []*expr
	for {
		p.skip(p.depth > 1)
		if p.at >= len(p.text) || strings.IndexByte("|)\n", p.text[p.at]) >= 0 || p.lark && p.text[p.at] == ']' {
			return seq(out...), nil
		}
		if p.lark && strings.HasPrefix(p.text[p.at:], "->") { // an alias
			p.at += 2
			p.skip(false)
			p.name()
			continue
		}
		e, err := p.factor()
		if err != nil {
			return nil, err
		}
		if e, err = p.quantified(e); err != nil {
			return nil, err
		}
		out = append(out, e)
	}
}

func (p *ebnfParser) quantified(e *expr) (*expr, error) {
	for p.at < len(p.text) {
		lo, hi := 0, unlimited
		switch c := p.text[p.at]; {
		case c == '*':
			p.at++
		case c == '+':
			lo = 1
			p.at++
		case c == '?':
			hi = 1
			p.at++
		case c == '{' && !p.lark || c == '{' && p.lark && p.inTerm:
			r := &regexParser{text: p.text, at: p.at, limits: p.limits, keyword: p.keyword}
			var ok bool
			var err error
			if lo, hi, ok, err = r.braces(); err != nil {
				return nil, err
			} else if !ok {
				return nil, p.bad("a repeat is {n}, {n,} or {n,m}")
			}
			p.at = r.at
		case p.lark && strings.HasPrefix(strings.TrimLeft(p.text[p.at:], " "), "~"):
			var err error
			if lo, hi, err = p.tilde(); err != nil {
				return nil, err
			}
		default:
			return e, nil
		}
		e = rep(e, int32(lo), int32(hi))
	}
	return e, nil
}

// tilde reads Lark's ~ n and ~ n..m.
func (p *ebnfParser) tilde() (lo, hi int, err error) {
	p.skip(false)
	p.at++
	p.skip(false)
	number := func() (int, error) {
		start := p.at
		for p.at < len(p.text) && '0' <= p.text[p.at] && p.text[p.at] <= '9' {
			p.at++
		}
		n, err := strconv.Atoi(p.text[start:p.at])
		if err != nil || n > p.limits.RegexRepeat {
			return 0, p.bad("a repeat is ~ n or ~ n..m, of at most %d", p.limits.RegexRepeat)
		}
		return n, nil
	}
	if lo, err = number(); err != nil {
		return 0, 0, err
	}
	hi = lo
	if strings.HasPrefix(p.text[p.at:], "..") {
		p.at += 2
		if hi, err = number(); err != nil {
			return 0, 0, err
		}
	}
	if lo > hi {
		return 0, 0, p.bad("a repeat from %d to %d", lo, hi)
	}
	return lo, hi, nil
}

func (p *ebnfParser) factor() (*expr, error) {
	c := p.text[p.at]
	switch {
	case c == '"' || c == '\'' && !p.lark:
		return p.quoted(c)
	case c == '(' || c == '[' && p.lark:
		return p.bracket(c)
	case c == '[':
		r := &regexParser{text: p.text, at: p.at, limits: p.limits, keyword: p.keyword}
		set, err := r.class()
		p.at = r.at
		if err != nil {
			return nil, p.bad("a class of characters is wrong")
		}
		return p.terminal(charsOf(modeRaw, set)), nil
	case c == '.' && !p.lark:
		p.at++
		return charsOf(modeRaw, allChars), nil
	case c == '/' && p.lark:
		return p.regex()
	case p.lark && strings.HasPrefix(p.text[p.at:], jsonDirective):
		return p.json()
	case c == '<':
		end := strings.IndexByte(p.text[p.at:], '>')
		if end < 0 || strings.ContainsAny(p.text[p.at:p.at+end], " \n") {
			return nil, p.bad("a special token is <name>")
		}
		name := p.text[p.at : p.at+end+1]
		p.at += end + 1
		return p.terminal(&expr{kind: kindToken, token: name}), nil
	case isNameByte(c):
		return p.reference()
	}
	return nil, p.bad("%q is not expected", c)
}

func (p *ebnfParser) reference() (*expr, error) {
	name := p.name()
	if name == "" {
		return nil, p.bad("%q is not expected", p.text[p.at])
	}
	if p.lark && strings.HasPrefix(p.text[p.at:], "{") && !isTerminal(name) {
		return nil, p.bad("templates are not supported")
	}
	i, err := p.rule(name)
	if err != nil {
		return nil, err
	}
	if p.lark && isTerminal(name) {
		return p.terminal(ruleRef(i)), nil
	}
	return ruleRef(i), nil
}

func (p *ebnfParser) bracket(open byte) (*expr, error) {
	p.at++
	e, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	closing := byte(')')
	if open == '[' {
		closing = ']'
		e = opt(e)
	}
	if p.skip(true); p.at >= len(p.text) || p.text[p.at] != closing {
		return nil, p.bad("%q is expected", closing)
	}
	p.at++
	return e, nil
}

// quoted reads a literal.
func (p *ebnfParser) quoted(quote byte) (*expr, error) {
	var parts []*expr
	r := &regexParser{text: p.text, at: p.at + 1, limits: p.limits, keyword: p.keyword}
	var chars []runeRange
	for {
		if r.at >= len(r.text) || r.text[r.at] == '\n' {
			return nil, p.bad("a literal has no end")
		}
		if r.text[r.at] == quote {
			r.at++
			break
		}
		if r.text[r.at] == '\\' {
			set, err := r.classEscape()
			if err != nil || len(set) != 1 || set[0].lo != set[0].hi {
				return nil, p.bad("a literal has an unknown escape")
			}
			chars = append(chars, set[0])
			continue
		}
		ch, n := utf8.DecodeRuneInString(r.text[r.at:])
		r.at += n
		chars = append(chars, runeRange{ch, ch})
	}
	if p.lark && strings.HasPrefix(r.text[r.at:], "i") {
		r.at++
		r.fold = true
	}
	var text strings.Builder
	for _, ch := range chars {
		if !r.fold {
			text.WriteRune(ch.lo)
			continue
		}
		parts = append(parts, charsOf(modeRaw, r.folded([]runeRange{ch})))
	}
	p.at = r.at
	if !r.fold {
		parts = append(parts, lit(text.String()))
	}
	return p.terminal(seq(parts...)), nil
}

// regex reads /…/ with flags.
func (p *ebnfParser) regex() (*expr, error) {
	start := p.at + 1
	end := start
	for class := false; end < len(p.text) && (p.text[end] != '/' || class); end++ {
		switch p.text[end] {
		case '\\':
			end++
		case '[':
			class = true
		case ']':
			class = false
		case '\n':
			return nil, p.bad("a regular expression has no end")
		}
	}
	if end >= len(p.text) {
		return nil, p.bad("a regular expression has no end")
	}
	text := p.text[start:end]
	for p.at = end + 1; p.at < len(p.text) && strings.IndexByte("imslux", p.text[p.at]) >= 0; p.at++ {
		switch p.text[p.at] {
		case 'i', 's':
			text = "(?" + p.text[p.at:p.at+1] + ")" + text
		case 'x', 'm':
			return nil, p.bad("flag %c is not supported", p.text[p.at])
		}
	}
	e, err := parsePattern(text, p.keyword, "", true, p.limits)
	if err != nil {
		return nil, err
	}
	return p.terminal(e), nil
}

// terminal returns a terminal, with what is ignored behind it.
func (p *ebnfParser) terminal(e *expr) *expr {
	if len(p.ignore) == 0 || p.inTerm {
		return e
	}
	return seq(e, star(alt(p.ignore...)))
}

// finish makes the bodies of repeats fit for loops, and refuses left recursion.
func (p *ebnfParser) finish() error {
	empty := make([]bool, len(p.rules))
	settle(p.rules, func(i int32) bool {
		if empty[i] || !nullable(p.rules[i], empty) {
			return false
		}
		empty[i] = true
		return true
	})
	for i, r := range p.rules {
		p.rules[i] = loopable(r, empty)
	}
	const fresh, open, done = 0, 1, 2
	state := make([]uint8, len(p.rules))
	var visit func(i int32) error
	visit = func(i int32) error {
		if state[i] == open {
			return &Error{Keyword: p.keyword, Pointer: p.order[i], Reason: "is left-recursive: the rule begins with itself"}
		}
		if state[i] == done {
			return nil
		}
		state[i] = open
		for _, to := range leading(p.rules[i], empty, nil) {
			if err := visit(to); err != nil {
				return err
			}
		}
		state[i] = done
		return nil
	}
	for i := range p.rules {
		if err := visit(int32(i)); err != nil {
			return err
		}
	}
	return nil
}

// loopable returns e with a minimum of 0 for repeats whose body may be empty.
func loopable(e *expr, empty []bool) *expr {
	return rewritten(e, map[*expr]*expr{}, func(c *expr) *expr {
		if c.kind == kindRep && nullable(c.subs[0], empty) {
			c.min = 0
		}
		return c
	})
}

// leading returns the rules that e may begin with.
func leading(e *expr, empty []bool, out []int32) []int32 {
	if e.plain {
		return out
	}
	switch e.kind {
	case kindRule:
		out = append(out, e.rule)
	case kindSeq:
		for _, s := range e.subs {
			out = leading(s, empty, out)
			if !nullable(s, empty) {
				break
			}
		}
	case kindAlt, kindRep, kindDistinct:
		for _, s := range e.subs {
			out = leading(s, empty, out)
		}
	}
	return out
}
