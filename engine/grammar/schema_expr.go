package grammar

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// conjunction returns the expression of the instances that are valid for all schemas of conj.
func (c *schemaCompiler) conjunction(conj []*value) (*expr, error) {
	flats, err := c.flatten(conj)
	if err != nil {
		return nil, err
	}
	var lits []string
	var out []*expr
	seen := map[string]bool{}
	for _, f := range flats {
		if f.limited {
			exprs, err := c.listed(f, &lits)
			if err != nil {
				return nil, err
			}
			out = append(out, exprs...)
			continue
		}
		exprs, err := c.typed(f, &lits, seen)
		if err != nil {
			return nil, err
		}
		out = append(out, exprs...)
	}
	return alt(append([]*expr{oneOfLits(lits)}, out...)...), nil
}

// listed adds the values that a flat lists and its other keywords allow.
func (c *schemaCompiler) listed(f *flat, lits *[]string) ([]*expr, error) {
	var out []*expr
	for _, l := range f.lits {
		ok, err := c.valid(l, f)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if l.kind == '[' || l.kind == '{' {
			e, err := c.literal(l)
			if err != nil {
				return nil, err
			}
			out = append(out, e)
			continue
		}
		*lits = append(*lits, scalars(l)...)
	}
	return out, c.step(len(f.lits))
}

// scalars returns the spellings of a value that is no array or object.
func scalars(l *value) []string {
	switch l.kind {
	case 'n':
		return []string{"null"}
	case 'b':
		if l.yes {
			return []string{"true"}
		}
		return []string{"false"}
	case '"':
		return []string{jsonString(l.text)}
	}
	out := []string{l.text}
	if d, err := parseDecimal(l.text); err == nil && d.String() != l.text {
		out = append(out, d.String())
	}
	return out
}

// literal returns the spellings of a value, members in its order.
func (c *schemaCompiler) literal(l *value) (*expr, error) {
	if err := c.step(1); err != nil {
		return nil, err
	}
	var parts []*expr
	open, end := "[", "]"
	items := l.arr
	switch l.kind {
	case '{':
		open, end, items = "{", "}", l.vals
	case '[':
	default:
		return oneOfLits(scalars(l)), nil
	}
	for i, x := range items {
		if i > 0 {
			parts = append(parts, c.space, c.comma)
		}
		if l.kind == '{' {
			parts = append(parts, lit(jsonString(l.keys[i])), c.colon)
		}
		e, err := c.literal(x)
		if err != nil {
			return nil, err
		}
		parts = append(parts, e)
	}
	if len(items) > 0 {
		parts = append(parts, c.space)
	}
	return seq(lit(open), c.space, seq(parts...), lit(end)), nil
}

// typed returns the expressions of each type that a flat allows. seen has the scalar ones that
// another alternative has brought already.
func (c *schemaCompiler) typed(f *flat, lits *[]string, seen map[string]bool) ([]*expr, error) {
	var out []*expr
	if err := c.step(len(f.notLits)/4 + len(f.strings.patterns) + len(f.strings.formats)); err != nil {
		return nil, err
	}
	once := func(key string, make func() (*expr, error)) error {
		if seen[key] {
			return nil
		}
		seen[key] = true
		e, err := make()
		out = append(out, e)
		return err
	}
	if f.types&typeNull != 0 && !f.excludes(&value{kind: 'n'}, &c.steps) {
		*lits = append(*lits, "null")
	}
	if f.types&typeBool != 0 {
		for _, b := range []bool{false, true} {
			if v := boolValue(b); !f.excludes(v, &c.steps) {
				*lits = append(*lits, scalars(v)...)
			}
		}
	}
	if f.types&typeNumber != 0 {
		if err := once(f.numberKey(), func() (*expr, error) { return c.number(f) }); err != nil {
			return nil, err
		}
	}
	if f.types&typeString != 0 {
		if err := once(f.stringKey(), func() (*expr, error) { return c.string(f) }); err != nil {
			return nil, err
		}
	}
	if f.types&(typeArray|typeObject) != 0 {
		for _, l := range f.notLits {
			if l.kind == '[' && f.types&typeArray != 0 || l.kind == '{' && f.types&typeObject != 0 {
				return nil, refuse(f.source, "not", "cannot exclude arrays or objects")
			}
		}
	}
	if f.types&typeArray != 0 {
		e, err := c.array(f)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	if f.types&typeObject != 0 {
		e, err := c.object(f)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

// excludes reports whether a value is one of those that not excludes.
func (f *flat) excludes(v *value, steps *int) bool {
	return slices.ContainsFunc(f.notLits, func(l *value) bool { return equalValues(l, v, steps) })
}

func (f *flat) numberKey() string {
	key := fmt.Sprint("number ", f.types&typeNumber, f.multiple)
	if f.lo != nil {
		key += fmt.Sprint(" from ", *f.lo)
	}
	if f.hi != nil {
		key += fmt.Sprint(" to ", *f.hi)
	}
	out := []byte(key)
	for _, l := range f.notLits {
		if l.kind == '0' {
			out = append(append(out, " not "...), l.text...)
		}
	}
	return string(out)
}

// shared returns the expression that make makes, as a rule under key, so that equal parts of a
// schema share states and masks.
func (c *schemaCompiler) shared(key string, make func() (*expr, error)) (*expr, error) {
	if e, ok := c.exprs[key]; ok {
		return e, nil
	}
	e, err := make()
	if err != nil {
		return nil, err
	}
	if e.kind != kindNone {
		c.rules = append(c.rules, e)
		e = ruleRef(int32(len(c.rules) - 1))
	}
	c.exprs[key] = e
	return e, nil
}

// number returns the numbers of a flat.
func (c *schemaCompiler) number(f *flat) (*expr, error) {
	return c.shared(f.numberKey(), func() (*expr, error) {
		integer := f.types&typeFrac == 0
		if f.types&typeInt == 0 {
			return nil, refuse(f.source, "not", "cannot exclude integers from numbers")
		}
		g, err := c.numberGraph(f, integer)
		if err != nil {
			return nil, asRefusal(f.source, "multipleOf", err)
		}
		if g != nil {
			return graphExpr(g, modeRaw), nil
		}
		if integer {
			return integerExpr, nil
		}
		return numberExpr, nil
	})
}

func graphExpr(g *graph, mode charMode) *expr {
	if g.empty() {
		return noString
	}
	return &expr{kind: kindGraph, graph: g, mode: mode}
}

// asRefusal names the keyword for an error that has none.
func asRefusal(v *value, keyword string, err error) error {
	var e *Error
	if errors.As(err, &e) && e.Keyword != "grammar" {
		return err
	}
	r := refuse(v, keyword, "%v", err).(*Error)
	if errors.Is(err, ErrBudget) {
		r.Err = ErrBudget
	}
	return r
}

// numberGraph returns the automaton of the numbers of a flat, nil if nothing restricts them.
func (c *schemaCompiler) numberGraph(f *flat, integer bool) (*graph, error) {
	var parts []*graph
	if f.lo != nil || f.hi != nil {
		g, err := numberRange(f.lo, f.hi, integer, &c.limits)
		if err != nil {
			return nil, err
		}
		parts = append(parts, g)
	}
	for _, m := range f.multiple {
		if m.int == "1" && m.frac == "" && integer {
			continue
		}
		g, err := multiplesOf(m, integer, &c.limits)
		if err != nil {
			return nil, err
		}
		parts = append(parts, g)
	}
	var not []string
	for _, l := range f.notLits {
		if l.kind != '0' {
			continue
		}
		if !integer {
			return nil, refuse(f.source, "not", "cannot exclude single numbers")
		}
		if d, err := parseDecimal(l.text); err == nil && isInteger(d) {
			not = append(not, d.String())
			if d.int == "" {
				not = append(not, "-0")
			}
		}
	}
	if not != nil && parts == nil {
		g, err := determinize(integerExpr, &c.limits)
		if err != nil {
			return nil, err
		}
		parts = append(parts, g)
	}
	return c.intersect(parts, not)
}

// intersect returns the strings that are in all graphs and not among not; nil for no graph.
func (c *schemaCompiler) intersect(parts []*graph, not []string) (*graph, error) {
	if parts == nil {
		return nil, nil
	}
	g := parts[0]
	var err error
	if len(parts) == 1 && len(not) == 0 {
		return g, nil
	}
	for _, x := range parts[1:] {
		if g, err = combine(g, x, both, &c.limits); err != nil {
			return nil, err
		}
	}
	if len(not) > 0 {
		x, err := determinize(oneOfLits(not), &c.limits)
		if err != nil {
			return nil, err
		}
		if g, err = combine(g, x, onlyFirst, &c.limits); err != nil {
			return nil, err
		}
	}
	return g.finish(&c.limits)
}

func (f *flat) stringKey() string {
	s := &f.strings
	patterns := slices.Sorted(slices.Values(s.patterns)) // their order does not matter
	key := fmt.Appendf(nil, "string %d %d %q %q %q", s.min, s.max, patterns, s.not, s.formats)
	for _, l := range f.notLits {
		if l.kind == '"' {
			key = fmt.Appendf(key, " not %q", l.text)
		}
	}
	return string(key)
}

// pattern returns the expression of a pattern. Errors have the pointer of at with below; nil: none.
func (c *schemaCompiler) pattern(text, keyword string, at *value, below string) (*expr, error) {
	if e, ok := c.exprs["pattern "+text]; ok {
		return e, nil
	}
	if err := c.step(4 * len(text)); err != nil {
		return nil, err
	}
	e, err := parsePattern(text, keyword, "", false, &c.limits)
	if err != nil {
		if at != nil { // its pointer is made where it is needed, because schemas may be deep
			_, err = parsePattern(text, keyword, pointer(at)+below, false, &c.limits)
		}
		return nil, err
	}
	c.exprs["pattern "+text] = e
	return e, nil
}

// patternGraph returns the automaton of a pattern.
func (c *schemaCompiler) patternGraph(text string) (*graph, error) {
	if g, ok := c.graphs[text]; ok {
		return g, nil
	}
	e, err := c.pattern(text, "pattern", nil, "")
	if err != nil {
		return nil, err
	}
	g, err := c.determinize(e)
	if err != nil {
		return nil, err
	}
	c.graphs[text] = g
	return g, nil
}

func (c *schemaCompiler) determinize(e *expr) (*graph, error) {
	return determinize(e, &c.limits)
}

func (c *schemaCompiler) formatExpr(name string) (*expr, error) {
	if e, ok := c.exprs["format "+name]; ok {
		return e, nil
	}
	e, err := parsePattern(stringFormats[name], "format", name, true, &Limits{RegexBytes: 1 << 14, Depth: 64, RegexRepeat: 1 << 20, AlternateSets: 64})
	if err != nil {
		return nil, err
	}
	c.exprs["format "+name] = e
	return e, nil
}

// formatGraph returns the automaton of a format.
func (c *schemaCompiler) formatGraph(name string) (*graph, error) {
	key := "\x00" + name // no pattern
	if g, ok := c.graphs[key]; ok {
		return g, nil
	}
	e, err := c.formatExpr(name)
	if err != nil {
		return nil, err
	}
	g, err := c.determinize(e)
	if err != nil {
		return nil, err
	}
	c.graphs[key] = g
	return g, nil
}

// string returns the strings of a flat.
func (c *schemaCompiler) string(f *flat) (*expr, error) {
	return c.shared(f.stringKey(), func() (*expr, error) {
		e, err := c.stringBody(f)
		if err != nil {
			return nil, err
		}
		return seq(lit(`"`), e, lit(`"`)), nil
	})
}

// stringBody returns what may be between the quotes.
func (c *schemaCompiler) stringBody(f *flat) (*expr, error) {
	s := &f.strings
	var parts []*expr
	for _, p := range s.patterns {
		e, err := c.pattern(p, "pattern", f.source, "")
		if err != nil {
			return nil, err
		}
		parts = append(parts, e)
	}
	for _, name := range s.formats {
		e, err := c.formatExpr(name)
		if err != nil {
			return nil, err
		}
		parts = append(parts, e)
	}
	var not []string
	for _, l := range f.notLits {
		if l.kind == '"' {
			not = append(not, l.text)
		}
	}
	bounded := s.min > 0 || s.max != unlimited
	switch {
	case len(parts) == 0 && len(not) == 0 && len(s.not) == 0:
		return repeat(charsOf(modeEscapes, allChars), s.min, s.max), nil
	case len(parts) == 1 && len(not) == 0 && len(s.not) == 0 && !bounded:
		return spelled(parts[0], modeJSON), nil
	case len(parts) == 1 && len(not) == 0 && len(s.not) == 0:
		if e := oneClass(parts[0]); e != nil {
			lo, hi := max(s.min, e.min), min(s.max, e.max)
			return spelled(rep(e.subs[0], lo, hi), modeJSON), nil
		}
	case len(parts) == 0 && len(s.not) == 0 && !bounded:
		return &expr{kind: kindExcept, trie: newKeyTrie(not)}, nil
	}
	return c.stringGraph(f, not)
}

// oneClass returns e as a repeat of one set of characters, nil if it is none.
func oneClass(e *expr) *expr {
	switch {
	case e.kind == kindRep && e.subs[0].kind == kindChars:
		return e
	case e.kind == kindChars:
		return &expr{kind: kindRep, subs: []*expr{e}, min: 1, max: 1}
	}
	return nil
}

// stringGraph intersects everything that restricts the strings of a flat.
func (c *schemaCompiler) stringGraph(f *flat, not []string) (*expr, error) {
	s := &f.strings
	g, err := c.stringAutomaton(f, not)
	if err != nil {
		return nil, asRefusal(f.source, "pattern", err)
	}
	if s.min > 0 || s.max != unlimited {
		if g, err = g.count(s.min, s.max, &c.limits); err != nil {
			return nil, asRefusal(f.source, "maxLength", err)
		}
	}
	return graphExpr(g, modeJSON), nil
}

// stringAutomaton is the intersection without lengths.
func (c *schemaCompiler) stringAutomaton(f *flat, not []string) (*graph, error) {
	var parts []*graph
	for _, p := range f.strings.patterns {
		g, err := c.patternGraph(p)
		if err != nil {
			return nil, err
		}
		parts = append(parts, g)
	}
	for _, name := range f.strings.formats {
		g, err := c.formatGraph(name)
		if err != nil {
			return nil, err
		}
		parts = append(parts, g)
	}
	if parts == nil {
		parts = append(parts, anyText())
	}
	for _, p := range f.strings.not {
		g, err := c.patternGraph(p)
		if err != nil {
			return nil, err
		}
		if parts[0], err = combine(parts[0], g, onlyFirst, &c.limits); err != nil {
			return nil, err
		}
	}
	return c.intersect(parts, not)
}

// matchesPattern reports whether a text matches a pattern.
func (c *schemaCompiler) matchesPattern(pattern, text string) (bool, error) {
	g, err := c.patternGraph(pattern)
	if err != nil {
		return false, err
	}
	return g.start >= 0 && g.matches(strings.ToValidUTF8(text, "")), nil
}
