package grammar

import (
	"slices"
)

// objectExpr is the expression of an object: members in order, then any number of others.
type objectExpr struct {
	members  []objectMember
	extra    *expr // one more member, noString if none is allowed
	min, max int32
	space    *expr
	comma    *expr

	open, close *expr
}

// objectMember is a key with its value.
type objectMember struct {
	e        *expr
	required bool
}

// object returns the objects of a flat.
func (c *schemaCompiler) object(f *flat) (*expr, error) {
	o := &objectExpr{min: f.objects.min, max: f.objects.max, space: c.space, comma: c.comma, open: lit("{"), close: lit("}")}
	keys := c.declared(f)
	var err error
	if o.members, err = c.members(f, keys, func(key string, conj []*value) (*expr, error) {
		r, err := c.rule(conj)
		return seq(lit(jsonString(key)), c.colon, ruleRef(r)), err
	}); err != nil || o.members == nil && len(f.objects.required) > 0 {
		return noString, err
	}
	if o.extra, err = c.extra(f, keys); err != nil {
		return nil, err
	}
	return &expr{kind: kindObject, object: o}, nil
}

// members returns the members of a flat with declared keys. member makes one from its key and the
// schemas of its value. There are none if a required one is not allowed.
func (c *schemaCompiler) members(f *flat, keys []string, member func(key string, conj []*value) (*expr, error)) ([]objectMember, error) {
	if err := c.step(len(keys)); err != nil {
		return nil, err
	}
	n := 0
	for _, k := range keys {
		n += len(k)
	}
	if n > c.limits.Positions { // each byte has one
		return nil, asRefusal(f.source, "properties", limitError("grammar", "", "positions", c.limits.Positions))
	}
	required := make(map[string]bool, len(f.objects.required))
	for _, k := range f.objects.required {
		required[k] = true
	}
	var out []objectMember
	for _, k := range keys {
		conj, err := c.property(f, k)
		switch {
		case err != nil:
			return nil, err
		case conj == nil && required[k]:
			return nil, nil
		case conj == nil:
			continue
		}
		e, err := member(k, conj)
		if err != nil {
			return nil, err
		}
		out = append(out, objectMember{e, required[k]})
	}
	if int(f.objects.max) < len(required) {
		return nil, nil
	}
	return out, nil
}

// declared returns the keys of properties, in their order, then those that are only required.
func (c *schemaCompiler) declared(f *flat) []string {
	var keys []string
	seen := map[string]bool{}
	add := func(k string) {
		if !seen[k] {
			seen[k] = true
			keys = append(keys, k)
		}
	}
	for _, m := range f.objects.members {
		if m.props != nil {
			for _, k := range m.props.keys {
				add(k)
			}
		}
	}
	for _, k := range f.objects.required {
		add(k)
	}
	return keys
}

// property returns the schemas of the value of a key, nil if the key is not allowed.
func (c *schemaCompiler) property(f *flat, key string) ([]*value, error) {
	if err := c.step(len(f.objects.members)); err != nil {
		return nil, err
	}
	conj := []*value{}
	for _, m := range f.objects.members {
		named := false
		if m.props != nil {
			if s := m.props.get(key); s != nil {
				conj, named = append(conj, s), true
			}
		}
		if m.patterns != nil {
			if err := c.step(len(m.patterns.keys) * (1 + len(key)/32)); err != nil {
				return nil, err
			}
			for i, p := range m.patterns.keys {
				ok, err := c.matchesPattern(p, key)
				if err != nil {
					return nil, asRefusal(f.source, "patternProperties", err)
				}
				if ok {
					conj, named = append(conj, m.patterns.vals[i]), true
				}
			}
		}
		if !named && m.rest != nil {
			conj = append(conj, m.rest)
		}
	}
	for _, s := range conj {
		if s.kind == 'b' && !s.yes {
			return nil, nil
		}
	}
	for _, n := range f.objects.names {
		ok, err := c.validConj(stringValue(key), []*value{n})
		if err != nil || !ok {
			return nil, err
		}
	}
	return conj, nil
}

// extra returns a member whose key is not declared.
func (c *schemaCompiler) extra(f *flat, keys []string) (*expr, error) {
	patterns := false
	for _, m := range f.objects.members {
		patterns = patterns || m.patterns != nil && len(m.patterns.keys) > 0
	}
	if patterns || len(f.objects.names) > 0 {
		return c.extraGroups(f, keys)
	}
	conj := []*value{}
	for _, m := range f.objects.members {
		if m.rest != nil {
			conj = append(conj, m.rest)
		}
	}
	if slices.ContainsFunc(conj, func(s *value) bool { return s.kind == 'b' && !s.yes }) {
		return noString, nil
	}
	r, err := c.rule(conj)
	if err != nil {
		return nil, err
	}
	return c.extraMember(&expr{kind: kindExcept, trie: newKeyTrie(keys)}, r), nil
}

func (c *schemaCompiler) extraMember(key *expr, rule int32) *expr {
	return seq(lit(`"`), key, lit(`"`), c.colon, ruleRef(rule))
}

// keyGroup is a set of keys that the same patterns match.
type keyGroup struct {
	keys    *graph
	matched []*value // schemas of the patterns
}

// extraGroups divides the keys that are not declared by the patterns that they match.
func (c *schemaCompiler) extraGroups(f *flat, keys []string) (*expr, error) {
	names, err := c.nameGraph(f)
	if err != nil {
		return nil, asRefusal(f.source, "propertyNames", err)
	}
	all, err := c.intersect([]*graph{names}, keys)
	if err != nil {
		return nil, asRefusal(f.source, "propertyNames", err)
	}
	groups := []keyGroup{{all, nil}}
	for _, m := range f.objects.members {
		if m.patterns == nil {
			continue
		}
		for i, p := range m.patterns.keys {
			if groups, err = c.divide(groups, p, m.patterns.vals[i]); err != nil {
				return nil, asRefusal(f.source, "patternProperties", err)
			}
		}
	}
	var out []*expr
	for _, g := range groups {
		e, err := c.groupMember(f, g)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return alt(out...), nil
}

// groupMember returns a member whose key is in a group.
func (c *schemaCompiler) groupMember(f *flat, g keyGroup) (*expr, error) {
	conj := []*value{}
	for _, m := range f.objects.members {
		named := false
		if m.patterns != nil {
			for _, s := range m.patterns.vals {
				if slices.Contains(g.matched, s) {
					conj, named = append(conj, s), true
				}
			}
		}
		if !named && m.rest != nil {
			conj = append(conj, m.rest)
		}
	}
	if g.keys.empty() || slices.ContainsFunc(conj, func(s *value) bool { return s.kind == 'b' && !s.yes }) {
		return noString, nil
	}
	r, err := c.rule(conj)
	if err != nil {
		return nil, err
	}
	return c.extraMember(graphExpr(g.keys, modeJSON), r), nil
}

// divide splits each group by a pattern.
func (c *schemaCompiler) divide(groups []keyGroup, pattern string, schema *value) ([]keyGroup, error) {
	x, err := c.patternGraph(pattern)
	if err != nil {
		return nil, err
	}
	var out []keyGroup
	for _, g := range groups {
		if len(out) > c.limits.AlternateSets {
			return nil, limitError("grammar", "", "states", c.limits.DFAStates)
		}
		for _, accept := range []func(bool, bool) bool{both, onlyFirst} {
			part, err := combine(g.keys, x, accept, &c.limits)
			if err != nil {
				return nil, err
			}
			if part.empty() {
				continue
			}
			if part, err = part.finish(&c.limits); err != nil {
				return nil, err
			}
			matched := g.matched
			if accept(true, true) {
				matched = append(slices.Clip(matched), schema)
			}
			out = append(out, keyGroup{part, matched})
		}
	}
	return out, nil
}

// nameGraph returns the strings that propertyNames allows.
func (c *schemaCompiler) nameGraph(f *flat) (*graph, error) {
	if len(f.objects.names) == 0 {
		return anyText(), nil
	}
	flats, err := c.flatten(f.objects.names)
	if err != nil {
		return nil, err
	}
	var out *graph
	for _, n := range flats {
		if n.types&typeString == 0 {
			continue
		}
		var g *graph
		if n.limited {
			g, err = c.listedNames(n)
		} else {
			g, err = c.flatNames(n)
		}
		if err != nil {
			return nil, err
		}
		if out == nil {
			out = g
			continue
		}
		return nil, refuse(f.source, "propertyNames", "has alternatives")
	}
	if out == nil {
		return &graph{start: -1, classes: 1}, nil
	}
	return out, nil
}

func (c *schemaCompiler) listedNames(n *flat) (*graph, error) {
	var names []string
	for _, l := range n.lits {
		ok, err := c.valid(l, n)
		if err != nil {
			return nil, err
		}
		if ok && l.kind == '"' {
			names = append(names, l.text)
		}
	}
	if names == nil {
		return &graph{start: -1, classes: 1}, nil
	}
	return c.determinize(oneOfLits(names))
}

func (c *schemaCompiler) flatNames(n *flat) (*graph, error) {
	var not []string
	for _, l := range n.notLits {
		if l.kind == '"' {
			not = append(not, l.text)
		}
	}
	g, err := c.stringAutomaton(n, not)
	if err != nil || n.strings.min == 0 && n.strings.max == unlimited {
		return g, err
	}
	length, err := c.determinize(rep(charsOf(modeRaw, allChars), n.strings.min, n.strings.max))
	if err != nil {
		return nil, err
	}
	return c.intersect([]*graph{g, length}, nil)
}
