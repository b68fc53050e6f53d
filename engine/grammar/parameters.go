package grammar

import (
	"fmt"
	"slices"
	"strings"
)

// parameterCompiler turns the properties of an object schema into the parameters of a tool call in
// a notation other than JSON. A parameter is a text between markers, or an argument of a call.
//
// In each notation values that are not strings are JSON, with these exceptions: Python's names of
// constants in notationPython, and in the others the escape of a less-than sign in strings, so that
// no string within a value contains a marker. Members come in the order of the schema.
type parameterCompiler struct {
	*tagCompiler
	v        *value
	notation string
	words    []string          // that no text contains
	part     map[string]string // the texts around parts, by the names in parameterParts
	text     *graph            // texts without words
}

// Notations of parameters.
const (
	notationText   = "text"   // strings without quotes, between markers
	notationPython = "python" // f(a=1, b="x")
	notationGemma  = "gemma"  // strings between markers
)

// parameterParts are the members of a format that are texts around the parts of parameters. All
// may be missing. Text is instead of middle before a string without quotes, and ends it.
var parameterParts = []string{"open", "close", "separator", "begin", "middle", "text", "text_end", "end"}

// Ways in which the reader of a text takes it for a value (member kinds of the format).
const (
	kindText     = "text"     // always a string
	kindNullable = "nullable" // a string, or null if the text is that
)

// typesValue returns a schema that allows types.
func typesValue(names ...string) *value {
	list := arrayValue()
	for _, n := range names {
		list.arr = append(list.arr, stringValue(n))
	}
	return objectValue("type", list)
}

// notStrings returns a schema that allows all types but strings.
func notStrings() *value { return typesValue("null", "boolean", "number", "array", "object") }

// parameters compiles the parameters of one call.
func (t *tagCompiler) parameters(v *value) (*expr, error) {
	p := &parameterCompiler{tagCompiler: t, v: v, part: map[string]string{}}
	for _, name := range parameterParts {
		if v.get(name) == nil {
			continue
		}
		text, err := t.text(v, name)
		if err != nil {
			return nil, err
		}
		p.part[name] = text
	}
	var err error
	if p.notation, err = t.text(v, "notation"); err != nil {
		return nil, err
	}
	if v.get("excludes") != nil {
		if p.words, err = t.strings(v, "excludes"); err != nil {
			return nil, err
		}
	}
	switch p.notation {
	case notationText, notationPython, notationGemma:
	default:
		return nil, tagError(v, "notation %q is not supported", clip(p.notation))
	}
	if p.text, err = t.freeGraph(v, p.words, nil); err != nil {
		return nil, err
	}
	return p.compile()
}

// compile returns the parameters of the schema, or those with any names and values if there is
// none, or if it declares none and allows any. The expressions that schemas share are kept for each
// notation.
func (p *parameterCompiler) compile() (*expr, error) {
	c := p.c
	if p.notations == nil {
		p.notations = map[string]map[string]*expr{}
	}
	if p.notations[p.notation] == nil {
		p.notations[p.notation] = map[string]*expr{}
	}
	json, depth, first := c.exprs, c.depth, len(c.rules)
	c.exprs, c.depth = p.notations[p.notation], 0
	defer func() { c.exprs, c.depth = json, depth }()
	schema := p.v.get("json_schema")
	free := schema == nil
	if free {
		schema = boolValue(true)
	}
	c.schemas = append(c.schemas, rootSchema{schema, []*value{typesValue("object")}})
	c.begin(schema)
	flats, err := c.flatten([]*value{schema})
	if err != nil {
		return nil, err
	}
	var out []*expr
	for _, f := range flats {
		if f.types&typeObject == 0 {
			continue
		}
		if f.limited {
			return nil, refuse(f.source, "enum", "cannot list whole objects in the model's format of tool calls")
		}
		e, err := p.object(f, free)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	if err := c.finish(); err != nil {
		return nil, err
	}
	done := map[*expr]*expr{}
	for i := first; i < len(c.rules); i++ {
		c.rules[i] = p.rewritten(c.rules[i], done)
	}
	return alt(out...), nil
}

// object returns the parameters of a flat.
func (p *parameterCompiler) object(f *flat, free bool) (*expr, error) {
	c := p.c
	gap := rep(whitespace, 0, 4)
	o := &objectExpr{
		min: f.objects.min, max: f.objects.max, space: emptyString, comma: seq(p.marker(p.part["separator"]), gap),
		open: p.marker(p.part["open"]), close: p.marker(p.part["close"]), extra: noString,
	}
	if p.notation == notationText {
		o.comma = gap
		o.open, o.close = gap, gap
	}
	keys := c.declared(f)
	if free || len(keys) == 0 && f.objects.open() {
		e, err := p.anyMember()
		o.extra = e
		return &expr{kind: kindObject, object: o}, err
	}
	var err error
	if o.members, err = c.members(f, keys, func(key string, conj []*value) (*expr, error) {
		if props := c.root.get("properties"); !parameterName(key) || props != nil && props.get(key) == nil {
			return nil, refuse(f.source, "properties", "%q cannot be a parameter in the model's format of tool calls: "+
				"declare it in properties of the schema itself, with letters, digits, underscores, points or hyphens", clip(key))
		}
		return p.member(key, conj)
	}); err != nil || o.members == nil && len(f.objects.required) > 0 {
		return noString, err
	}
	return &expr{kind: kindObject, object: o}, nil
}

// open reports whether members with any names and values are allowed.
func (o *objectPart) open() bool {
	return len(o.names) == 0 && !slices.ContainsFunc(o.members, func(m memberPart) bool {
		return m.patterns != nil || m.rest != nil && !isTrue(m.rest)
	})
}

// parameterName reports whether readers of all notations take a text for a parameter's name.
func parameterName(s string) bool {
	for _, r := range s {
		if r < 0x80 && !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("_.-", r)) {
			return false
		}
	}
	return 0 < len(s) && len(s) <= 128
}

// parts returns a parameter with a value that is a text without quotes, and one with another value.
func (p *parameterCompiler) parts(name, text, other *expr) *expr {
	return seq(p.marker(p.part["begin"]), name, alt(
		seq(p.marker(p.part["text"]), text, p.marker(p.part["text_end"])),
		seq(p.marker(p.part["middle"]), other, p.marker(p.part["end"])),
	))
}

// anyMember returns a parameter with any name. Its value is any text, or any JSON.
func (p *parameterCompiler) anyMember() (*expr, error) {
	letters := []runeRange{{'A', 'Z'}, {'_', '_'}, {'a', 'z'}}
	name := seq(charsOf(modeRaw, letters), rep(charsOf(modeRaw, append(letters, runeRange{'0', '9'})), 0, 63))
	if p.notation == notationText {
		return p.parts(name, graphExpr(p.text, modeRaw), noString), nil
	}
	text, also := noString, []*value(nil)
	if p.notation == notationGemma {
		text, also = graphExpr(p.text, modeRaw), []*value{notStrings()}
	}
	r, err := p.c.rule(also)
	return p.parts(name, text, ruleRef(r)), err
}

// member returns one parameter.
func (p *parameterCompiler) member(name string, conj []*value) (*expr, error) {
	if types := p.v.get("types").get(name); types != nil && len(types.arr) > 0 {
		conj = append(conj, objectValue("type", types))
	}
	kind := ""
	if k := p.v.get("kinds").get(name); k != nil {
		kind = k.text
	}
	text, other := noString, noString
	if p.notation == notationGemma || p.notation == notationText && kind != "" {
		e, err := p.texts(conj, kind)
		if err != nil {
			return nil, err
		}
		if e != nil {
			text, conj = e, append(conj, notStrings())
		}
	}
	if p.notation != notationText || kind != kindText {
		r, err := p.c.rule(conj)
		if err != nil {
			return nil, err
		}
		other = ruleRef(r)
	}
	return p.parts(lit(name), text, other), nil
}

// texts returns the strings that are valid for all schemas of conj, without quotes; nil if the
// reader would take some of them for other values, so that they need quotes.
func (p *parameterCompiler) texts(conj []*value, kind string) (*expr, error) {
	flats, err := p.c.flatten(conj)
	if err != nil {
		return nil, err
	}
	var lits []string
	out := []*expr{noString}
	for _, f := range flats {
		if f.types&typeString == 0 {
			continue
		}
		if f.limited {
			for _, l := range f.lits {
				ok, err := p.c.valid(l, f)
				if err != nil {
					return nil, err
				}
				if l.kind != '"' || !ok {
					continue
				}
				if kind == kindNullable && (strings.ContainsRune(l.text, '"') || slices.Contains([]string{"null", "None"}, strings.TrimSpace(l.text))) {
					return nil, nil
				}
				if slices.ContainsFunc(p.words, func(w string) bool { return strings.Contains(l.text, w) }) {
					return nil, refuse(f.source, "enum", "%q contains a marker of the model's format of tool calls", clip(l.text))
				}
				lits = append(lits, l.text)
			}
			continue
		}
		s := &f.strings
		var not []string
		for _, l := range f.notLits {
			if l.kind == '"' {
				not = append(not, l.text)
			}
		}
		bounded := s.min > 0 || s.max != unlimited
		if kind == kindNullable && (bounded || len(s.patterns)+len(s.not)+len(s.formats)+len(not) > 0) {
			return nil, nil
		}
		e, err := p.c.shared(fmt.Sprintf("%s without %q", f.stringKey(), p.words), func() (*expr, error) {
			g, err := p.c.stringAutomaton(f, not)
			if err != nil {
				return nil, asRefusal(f.source, "pattern", err)
			}
			if g, err = p.c.intersect([]*graph{p.text, g}, nil); err != nil {
				return nil, asRefusal(f.source, "pattern", err)
			}
			if bounded {
				if g, err = g.count(s.min, s.max, &p.c.limits); err != nil {
					return nil, asRefusal(f.source, "maxLength", err)
				}
			}
			return graphExpr(g, modeRaw), nil
		})
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return alt(append(out, oneOfLits(lits))...), nil
}

// rewritten returns the expression of values in the notation.
func (p *parameterCompiler) rewritten(e *expr, done map[*expr]*expr) *expr {
	constants := map[string]string{"true": "True", "false": "False", "null": "None"}
	return rewritten(e, done, func(c *expr) *expr {
		switch {
		case c.kind == kindObject:
			o := *c.object
			o.members = slices.Clone(o.members)
			for i := range o.members {
				o.members[i].e = p.rewritten(o.members[i].e, done)
			}
			o.extra = p.rewritten(o.extra, done)
			c.object = &o
		case c.kind == kindLits:
			lits := make([]string, len(c.lits))
			for i, l := range c.lits {
				switch name, ok := constants[l]; {
				case p.notation != notationPython:
					lits[i] = strings.ReplaceAll(l, "<", `\u003c`)
				case ok:
					lits[i] = name
				default:
					lits[i] = l
				}
			}
			return oneOfLits(lits)
		case p.notation == notationPython:
		case c.kind == kindExcept, (c.kind == kindChars || c.kind == kindGraph) && c.mode != modeRaw:
			c.mode |= modeTagged
		}
		return c
	})
}
