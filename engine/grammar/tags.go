package grammar

import (
	"errors"
	"fmt"
	"strings"
)

// tagCompiler turns a structural tag into rules: text that is free but for tagged parts. Schemas in
// it share one schemaCompiler.
type tagCompiler struct {
	c         *schemaCompiler
	special   []string                    // tokens that markers may contain
	named     map[string]int32            // rules of the tag
	notations map[string]map[string]*expr // schemaCompiler.exprs of each notation
	texts     map[string]*graph           // of freeGraph
}

// compileTags returns the compiler that has the rules of a structural tag, and the first of them.
// Both forms are read: structures with triggers, and format. Next to format, rules has formats by
// name, which the format and rules that follow can use.
func compileTags(text []byte, special []string, limits *Limits) (*schemaCompiler, int32, error) {
	if len(text) > limits.SourceBytes {
		return nil, 0, limitError("structural_tag", "", "bytes", limits.SourceBytes)
	}
	root, err := readJSON(text, 4*limits.Depth)
	if err != nil {
		return nil, 0, err
	}
	t := &tagCompiler{c: newSchemaCompiler(*limits), special: special}
	t.c.root = root
	number(root, nil, "")
	var e *expr
	switch {
	case root.get("format") != nil:
		if err = t.rules(root.get("rules")); err == nil {
			e, err = t.format(root.get("format"))
		}
	case root.get("structures") != nil:
		e, err = t.structures(root)
	default:
		err = tagError(root, "has neither format nor structures")
	}
	if err != nil {
		return nil, 0, err
	}
	start := int32(len(t.c.rules))
	t.c.rules = append(t.c.rules, e)
	return t.c, start, nil
}

// rules compiles the formats that have a name.
func (t *tagCompiler) rules(v *value) error {
	if v == nil {
		return nil
	}
	if v.kind != '{' {
		return tagError(v, "rules must be an object")
	}
	t.named = make(map[string]int32, len(v.keys))
	for i, name := range v.keys {
		e, err := t.format(v.vals[i])
		if err != nil {
			return err
		}
		if len(t.c.rules) >= t.c.limits.Rules {
			return limitError("structural_tag", pointer(v), "rules", t.c.limits.Rules)
		}
		t.named[name] = int32(len(t.c.rules))
		t.c.rules = append(t.c.rules, e)
		t.c.named = append(t.c.named, namedRules{name, len(t.c.rules)})
	}
	return nil
}

// largest returns err, of rules that together exceed a limit, as an error of the schema in the
// format with a name that has the most positions so far. Other errors stay as they are.
func (c *schemaCompiler) largest(err error) error {
	var e *Error
	if !errors.As(err, &e) || e.sizes == nil {
		return err
	}
	name, most, at := "", int32(0), 0
	for _, n := range c.named {
		size := int32(0)
		for ; at < n.end && at < len(e.sizes); at++ {
			size += e.sizes[at]
		}
		if size > most {
			name, most = n.name, size
		}
	}
	if most == 0 {
		return err
	}
	return &Error{Keyword: "json_schema", Pointer: "#/rules/" + escapePointer(name) + "/json_schema", Reason: e.Reason + " in all parts of the answer, and many of them here", Err: e.Err}
}

// number notes where each value is.
func number(v, parent *value, name string) {
	v.parent, v.name = parent, name
	for i, x := range v.vals {
		number(x, v, v.keys[i])
	}
	for i, x := range v.arr {
		number(x, v, fmt.Sprint(i))
	}
}

func tagError(v *value, format string, args ...any) error {
	return &Error{Keyword: "structural_tag", Pointer: pointer(v), Reason: fmt.Sprintf(format, args...)}
}

// text returns a member that is a string.
func (t *tagCompiler) text(v *value, key string) (string, error) {
	x := v.get(key)
	if x == nil || x.kind != '"' {
		return "", tagError(v, "%s must be a string", key)
	}
	return x.text, nil
}

// list returns the members of an array.
func (t *tagCompiler) list(v *value, key string) ([]*value, error) {
	x := v.get(key)
	if x == nil || x.kind != '[' {
		return nil, tagError(v, "%s must be an array", key)
	}
	return x.arr, nil
}

func (t *tagCompiler) strings(v *value, key string) ([]string, error) {
	list, err := t.list(v, key)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, x := range list {
		if x.kind != '"' || x.text == "" {
			return nil, tagError(v, "%s must hold strings that are not empty", key)
		}
		out = append(out, x.text)
	}
	return out, nil
}

func isTrue(v *value) bool { return v != nil && v.kind == 'b' && v.yes }

// structures compiles the older form.
func (t *tagCompiler) structures(root *value) (*expr, error) {
	triggers, err := t.strings(root, "triggers")
	if err != nil {
		return nil, err
	}
	list, err := t.list(root, "structures")
	if err != nil {
		return nil, err
	}
	var tags []*expr
	for _, s := range list {
		begin, err := t.text(s, "begin")
		if err != nil {
			return nil, err
		}
		end, err := t.text(s, "end")
		if err != nil {
			return nil, err
		}
		if !startsWithAny(begin, triggers) {
			return nil, tagError(s, "begin starts with no trigger")
		}
		schema := s.get("schema")
		if schema == nil {
			schema = boolValue(true)
		}
		content, err := t.schema(schema)
		if err != nil {
			return nil, err
		}
		tags = append(tags, seq(t.marker(begin), content, t.marker(end)))
	}
	return t.triggered(root, triggers, tags, false, false)
}

func startsWithAny(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// marker returns a text in which special tokens are tokens where the vocabulary has them, and are
// spelled by bytes where it lacks them. Without a list of special tokens the whole text may be one.
func (t *tagCompiler) marker(text string) *expr {
	token := func(s string) *expr { return &expr{kind: kindToken, token: s, subs: []*expr{lit(s)}} }
	if text == "" {
		return emptyString
	}
	if len(t.special) == 0 {
		return token(text)
	}
	var parts []*expr
	start := 0
	for at := 0; at < len(text); {
		longest := ""
		for _, s := range t.special {
			if len(s) > len(longest) && strings.HasPrefix(text[at:], s) {
				longest = s
			}
		}
		if longest == "" {
			at++
			continue
		}
		parts = append(parts, lit(text[start:at]), token(longest))
		at += len(longest)
		start = at
	}
	return seq(append(parts, lit(text[start:]))...)
}

// free returns the texts that contain none of words.
func (t *tagCompiler) free(v *value, words []string) (*expr, error) {
	if len(words) == 0 {
		return star(charsOf(modeRaw, allChars)), nil
	}
	g, err := t.freeGraph(v, words, nil)
	if err != nil {
		return nil, err
	}
	return graphExpr(g, modeRaw), nil
}

// freeGraph returns the texts that contain none of words, and whose first character that is no
// whitespace begins none of first.
func (t *tagCompiler) freeGraph(v *value, words, first []string) (*graph, error) {
	if len(words)+len(first) == 0 {
		return anyText(), nil
	}
	key := fmt.Sprintf("%q %q", words, first)
	if g := t.texts[key]; g != nil {
		return g, nil
	}
	anything, space := star(charsOf(modeRaw, allChars)), star(whitespace)
	with, err := t.c.determinize(alt(seq(anything, oneOfLits(words), anything), seq(space, oneOfLits(first), anything)))
	if err != nil {
		return nil, asRefusal(v, "structural_tag", err)
	}
	without, err := combine(anyText(), with, onlyFirst, &t.c.limits)
	if err == nil {
		without, err = without.finish(&t.c.limits)
	}
	if err != nil {
		return nil, asRefusal(v, "structural_tag", err)
	}
	if t.texts == nil {
		t.texts = map[string]*graph{}
	}
	t.texts[key] = without
	return t.texts[key], nil
}

// triggered returns free text with tags.
func (t *tagCompiler) triggered(v *value, triggers []string, tags []*expr, atLeastOne, onlyFirstTag bool) (*expr, error) {
	text, err := t.free(v, triggers)
	if err != nil {
		return nil, err
	}
	tag := alt(tags...)
	switch {
	case onlyFirstTag && atLeastOne:
		return seq(text, tag), nil
	case onlyFirstTag:
		return seq(text, opt(tag)), nil
	case atLeastOne:
		return seq(text, plus(seq(tag, text))), nil
	}
	return seq(text, star(seq(tag, text))), nil
}

// schema returns the instances of a schema, and of those in also, as a rule.
func (t *tagCompiler) schema(v *value, also ...*value) (*expr, error) {
	r, err := t.c.schema(v, also...)
	if err != nil {
		return nil, err
	}
	return ruleRef(r), nil
}

// format compiles one format of the newer form.
func (t *tagCompiler) format(v *value) (*expr, error) {
	if t.c.depth++; t.c.depth > t.c.limits.Depth {
		return nil, limitError("structural_tag", pointer(v), "nested formats", t.c.limits.Depth)
	}
	defer func() { t.c.depth-- }()
	kind, err := t.text(v, "type")
	if err != nil {
		return nil, err
	}
	switch kind {
	case "const_string":
		s, err := t.text(v, "value")
		if n := len(s) - 1; n >= 0 && isTrue(v.get("commit")) {
			last := rune(s[n])
			return seq(t.marker(s[:n]), &expr{kind: kindCommit, chars: []runeRange{{last, last}}}), err
		}
		return t.marker(s), err
	case "json_schema":
		s := v.get("json_schema")
		if s == nil {
			return nil, tagError(v, "json_schema is missing")
		}
		var also []*value
		if isTrue(v.get("object")) {
			also = append(also, typesValue("object"))
		}
		depth := t.c.depth
		t.c.depth = 0
		e, err := t.schema(s, also...)
		t.c.depth = depth
		return e, err
	case "rule":
		s, err := t.text(v, "name")
		if err != nil {
			return nil, err
		}
		r, ok := t.named[s]
		if !ok {
			return nil, tagError(v, "rule %q is not defined before it is used", clip(s))
		}
		return ruleRef(r), nil
	case "parameters":
		return t.parameters(v)
	case "optional", "star", "plus":
		return t.repeated(v, kind)
	case "regex":
		s, err := t.text(v, "pattern")
		if err != nil {
			return nil, err
		}
		return parsePattern(s, "regex", pointer(v)+"/pattern", true, &t.c.limits)
	case "grammar":
		return t.grammar(v, gbnf)
	case "lark":
		return t.grammar(v, larkNotation)
	case "choice":
		values, err := t.strings(v, "values")
		if err != nil {
			return nil, err
		}
		return compileChoice(values, &t.c.limits)
	case "any_text":
		return t.anyText(v, nil)
	case formatAnything:
		if v.name != "format" || v.parent.parent != nil {
			return nil, tagError(v, "anything is a whole answer")
		}
		return star(charsOf(modeRaw, allChars)), nil
	case "sequence", "or":
		return t.elements(v, kind)
	case "tag":
		return t.tag(v)
	case "triggered_tags":
		return t.triggeredTags(v)
	case "tags_with_separator":
		return t.separated(v)
	}
	return nil, tagError(v, "type %q is not supported", kind)
}

// repeated compiles a format that occurs at most once, any number of times or at least once.
func (t *tagCompiler) repeated(v *value, kind string) (*expr, error) {
	content := v.get("content")
	if content == nil {
		return nil, tagError(v, "content is missing")
	}
	e, err := t.format(content)
	switch {
	case err != nil:
		return nil, err
	case kind == "optional":
		return opt(e), nil
	case kind == "star":
		return repeat(e, 0, unlimited), nil
	}
	return repeat(e, 1, unlimited), nil
}

func (t *tagCompiler) elements(v *value, kind string) (*expr, error) {
	list, err := t.list(v, "elements")
	if err != nil {
		return nil, err
	}
	var out []*expr
	for _, x := range list {
		e, err := t.format(x)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	if kind == "or" {
		return alt(out...), nil
	}
	return seq(out...), nil
}

// grammar adds the rules of a grammar in a notation.
func (t *tagCompiler) grammar(v *value, n notation) (*expr, error) {
	s, err := t.text(v, "grammar")
	if err != nil {
		return nil, err
	}
	rules, start, err := compileEBNF([]byte(s), n, &t.c.limits)
	if err != nil {
		return nil, err
	}
	base := int32(len(t.c.rules))
	for _, r := range rules {
		t.c.rules = append(t.c.rules, shifted(r, base))
	}
	return ruleRef(base + start), nil
}

// shifted returns e with its rules renumbered.
func shifted(e *expr, by int32) *expr {
	return rewritten(e, map[*expr]*expr{}, func(c *expr) *expr {
		if c.kind == kindRule {
			c.rule += by
		}
		return c
	})
}

// anyText returns text without the words of excludes and without ends. It does not begin with one
// of excludes_first.
func (t *tagCompiler) anyText(v *value, ends []string) (*expr, error) {
	var first []string
	if v.get("excludes_first") != nil {
		var err error
		if first, err = t.strings(v, "excludes_first"); err != nil {
			return nil, err
		}
	}
	if v.get("excludes") != nil {
		list, err := t.strings(v, "excludes")
		if err != nil {
			return nil, err
		}
		ends = append(ends, list...)
	}
	if first == nil {
		return t.free(v, ends)
	}
	g, err := t.freeGraph(v, ends, first)
	if err != nil {
		return nil, err
	}
	return graphExpr(g, modeRaw), nil
}

// tag compiles begin, content and end. Free text as content does not contain the end.
func (t *tagCompiler) tag(v *value) (*expr, error) {
	begin, err := t.text(v, "begin")
	if err != nil {
		return nil, err
	}
	ends := []string{}
	if x := v.get("end"); x != nil && x.kind == '[' {
		if ends, err = t.strings(v, "end"); err != nil {
			return nil, err
		}
	} else if end, err := t.text(v, "end"); err != nil {
		return nil, err
	} else if end != "" {
		ends = append(ends, end)
	}
	content := v.get("content")
	if content == nil {
		return nil, tagError(v, "content is missing")
	}
	var e *expr
	if k := content.get("type"); k != nil && k.text == "any_text" {
		e, err = t.anyText(content, ends)
	} else {
		e, err = t.format(content)
	}
	if err != nil {
		return nil, err
	}
	var closing []*expr
	for _, end := range ends {
		closing = append(closing, t.marker(end))
	}
	if closing == nil {
		closing = append(closing, emptyString)
	}
	return seq(t.marker(begin), e, alt(closing...)), nil
}

func (t *tagCompiler) tags(v *value) (out []*expr, begins []string, err error) {
	list, err := t.list(v, "tags")
	if err != nil {
		return nil, nil, err
	}
	for _, x := range list {
		e, err := t.tag(x)
		if err != nil {
			return nil, nil, err
		}
		out = append(out, e)
		begins = append(begins, x.get("begin").text)
	}
	return out, begins, nil
}

func (t *tagCompiler) triggeredTags(v *value) (*expr, error) {
	triggers, err := t.strings(v, "triggers")
	if err != nil {
		return nil, err
	}
	tags, begins, err := t.tags(v)
	if err != nil {
		return nil, err
	}
	for _, b := range begins {
		if !startsWithAny(b, triggers) {
			return nil, tagError(v, "begin %q starts with no trigger", clip(b))
		}
	}
	return t.triggered(v, triggers, tags, isTrue(v.get("at_least_one")), isTrue(v.get("stop_after_first")))
}

// separated compiles tags with a separator and no text around them.
func (t *tagCompiler) separated(v *value) (*expr, error) {
	separator, err := t.text(v, "separator")
	if err != nil {
		return nil, err
	}
	tags, _, err := t.tags(v)
	if err != nil {
		return nil, err
	}
	e := alt(tags...)
	if !isTrue(v.get("stop_after_first")) {
		e = seq(e, star(seq(t.marker(separator), e)))
	}
	if !isTrue(v.get("at_least_one")) {
		e = opt(e)
	}
	return e, nil
}
