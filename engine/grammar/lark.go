package grammar

import (
	"errors"
	"strings"
)

// directive reads %ignore, %import and %declare.
func (p *ebnfParser) directive() error {
	p.at++
	word := p.name()
	p.skip(false)
	switch word {
	case "ignore":
		// Read by findIgnored.
		_, err := p.line()
		return err
	case "import":
		return p.importTerminals()
	case "llguidance":
		_, err := p.line()
		return err
	}
	return p.bad("%%%s is not supported", word)
}

// attributes passes llguidance's attributes of a rule. A capture names text for the client and
// changes nothing; others would change what matches.
func (p *ebnfParser) attributes() error {
	end := strings.IndexByte(p.text[p.at:], ']')
	if end < 0 {
		return p.bad("the attributes of a rule have no end")
	}
	for _, a := range strings.Split(p.text[p.at+1:p.at+end], ",") {
		if name, _, _ := strings.Cut(a, "="); strings.TrimSpace(name) != "capture" {
			return p.bad("attribute %q of a rule is not supported", clip(strings.TrimSpace(a)))
		}
	}
	p.at += end + 1
	return nil
}

// jsonDirective precedes a JSON Schema in a rule, as llguidance reads it.
const jsonDirective = "%json"

// json reads a schema. Its member x-guidance may fix what separates JSON tokens.
func (p *ebnfParser) json() (*expr, error) {
	p.at += len(jsonDirective)
	p.skip(true)
	r := &jsonReader{text: p.text, at: p.at, depth: 4 * p.limits.Depth}
	root, err := r.value()
	if errors.Is(err, ErrBudget) {
		return nil, err
	}
	if err != nil {
		return nil, p.bad("%s needs a JSON Schema: %v", jsonDirective, err)
	}
	c := newSchemaCompiler(*p.limits)
	if g := root.get("x-guidance"); g != nil {
		if flexible := g.get("whitespace_flexible"); flexible != nil && !isTrue(flexible) {
			c.space, c.comma, c.colon = emptyString, lit(textOr(g, "item_separator", ",")), lit(textOr(g, "key_separator", ":"))
		}
	}
	c.rules, c.steps = p.rules, p.steps
	start, err := c.schema(root)
	if err != nil {
		return nil, err
	}
	p.at, p.steps = r.at, c.steps
	for p.rules = c.rules; len(p.order) < len(p.rules); {
		p.defined, p.order = append(p.defined, true), append(p.order, jsonDirective)
	}
	return p.terminal(ruleRef(start)), nil
}

// textOr returns a member that is a string, or another text.
func textOr(v *value, key, other string) string {
	if x := v.get(key); x != nil && x.kind == '"' {
		return x.text
	}
	return other
}

// line passes the rest of the line.
func (p *ebnfParser) line() (string, error) {
	start := p.at
	for p.at < len(p.text) && p.text[p.at] != '\n' {
		p.at++
	}
	return strings.TrimSpace(p.text[start:p.at]), nil
}

// findIgnored reads the %ignore directives, which apply to rules before them too.
func (p *ebnfParser) findIgnored() error {
	for at, l := 0, ""; at < len(p.text); at += len(l) {
		l = p.text[at:]
		if end := strings.IndexByte(l, '\n'); end >= 0 {
			l = l[:end+1]
		}
		rest, ok := strings.CutPrefix(strings.TrimLeft(l, " \t"), "%ignore")
		if !ok {
			continue
		}
		p.at, p.inTerm = at+len(l)-len(rest), true
		e, err := p.alternatives()
		if err != nil {
			return err
		}
		p.ignore = append(p.ignore, e)
	}
	p.at, p.inTerm = 0, false
	return nil
}

// importTerminals reads %import common.NAME, with -> ALIAS, or %import common (A, B).
func (p *ebnfParser) importTerminals() error {
	text, err := p.line()
	if err != nil {
		return err
	}
	from, ok := strings.CutPrefix(text, "common")
	if !ok {
		return p.bad("only terminals of common can be imported")
	}
	from = strings.TrimSpace(from)
	from, alias, _ := strings.Cut(from, "->")
	from, alias = strings.TrimSpace(from), strings.TrimSpace(alias)
	var names []string
	if list, ok := strings.CutPrefix(from, "("); ok {
		for _, n := range strings.Split(strings.TrimSuffix(list, ")"), ",") {
			names = append(names, strings.TrimSpace(n))
		}
	} else {
		names = []string{strings.TrimPrefix(from, ".")}
	}
	for _, n := range names {
		re, ok := commonTerminals[n]
		if !ok {
			return p.bad("common has no terminal %q", n)
		}
		e, err := parsePattern(re, p.keyword, "", true, p.limits)
		if err != nil {
			return err
		}
		if alias != "" {
			n = alias
		}
		i, err := p.rule(n)
		if err != nil {
			return err
		}
		p.rules[i], p.defined[i] = e, true
	}
	return nil
}

// commonTerminals are the terminals of Lark's library common that are in use.
var commonTerminals = map[string]string{
	"DIGIT":          `[0-9]`,
	"HEXDIGIT":       `[0-9A-Fa-f]`,
	"INT":            `[0-9]+`,
	"SIGNED_INT":     `[+-]?[0-9]+`,
	"DECIMAL":        `[0-9]+\.[0-9]*|\.[0-9]+`,
	"FLOAT":          `[0-9]+[Ee][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[Ee][+-]?[0-9]+)?`,
	"SIGNED_FLOAT":   `[+-]?(?:[0-9]+[Ee][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[Ee][+-]?[0-9]+)?)`,
	"NUMBER":         `[0-9]+(?:[Ee][+-]?[0-9]+)?|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[Ee][+-]?[0-9]+)?`,
	"SIGNED_NUMBER":  `[+-]?(?:[0-9]+(?:[Ee][+-]?[0-9]+)?|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[Ee][+-]?[0-9]+)?)`,
	"ESCAPED_STRING": `"(?:[^"\\\n\r]|\\[^\n\r])*"`,
	"LCASE_LETTER":   `[a-z]`,
	"UCASE_LETTER":   `[A-Z]`,
	"LETTER":         `[A-Za-z]`,
	"WORD":           `[A-Za-z]+`,
	"CNAME":          `[A-Za-z_][0-9A-Za-z_]*`,
	"WS_INLINE":      `[ \t]+`,
	"WS":             `[ \t\f\r\n]+`,
	"CR":             `\r`,
	"LF":             `\n`,
	"NEWLINE":        `(?:\r?\n)+`,
	"SH_COMMENT":     `#[^\n]*`,
	"CPP_COMMENT":    `//[^\n]*`,
}
