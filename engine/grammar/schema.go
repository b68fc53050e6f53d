package grammar

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// schemaCompiler turns a JSON schema into rules. A rule is a conjunction of schemas: those
// that apply to one place of an instance. The conjunction is brought into alternatives without
// anyOf, oneOf, allOf, if and $ref (flat), each of which becomes an expression. Equal conjunctions
// share a rule, so that recursive schemas are finite.
type schemaCompiler struct {
	limits    Limits
	root      *value
	siblings  bool // keywords next to $ref count, as since draft 2019-09
	resources map[string]*resource
	rules     []*expr
	memo      map[string]int32
	queue     []job
	steps     int
	ids       int32
	ignored   int
	space     *expr // whitespace between JSON tokens
	comma     *expr
	colon     *expr
	graphs    map[string]*graph
	exprs     map[string]*expr
	depth     int // of emptiness checks
	schemas   []rootSchema
	named     []namedRules   // of a structural tag, in the order of their rules
	dynamic   map[string]int // how many schemas have a $dynamicAnchor, by its name, or a $recursiveAnchor, as ""
}

// namedRules are the rules of a format that has a name.
type namedRules struct {
	name string
	end  int // behind the last of them
}

type job struct {
	rule int32
	conj []*value
}

// resource is a schema with an identifier of its own.
type resource struct {
	uri     string
	root    *value
	anchors map[string]*value
}

// whitespace is one character of JSON's whitespace.
var whitespace = bytesOf(runeRange{'\t', '\n'}, runeRange{'\r', '\r'}, runeRange{' ', ' '})

func newSchemaCompiler(limits Limits) *schemaCompiler {
	c := &schemaCompiler{limits: limits, resources: map[string]*resource{}, memo: map[string]int32{}, graphs: map[string]*graph{}, exprs: map[string]*expr{}}
	c.space = emptyString
	if limits.Whitespace > 0 {
		indent := rep(bytesOf(runeRange{'\t', '\t'}, runeRange{' ', ' '}), 0, int32(limits.Whitespace-1))
		c.space = opt(alt(lit(" "), seq(lit("\n"), indent)))
	}
	c.limits.steps = &c.steps
	c.comma = seq(lit(","), c.space)
	c.colon = seq(c.space, lit(":"), c.space)
	return c
}

// compileSchema returns the rules of a schema and the first.
func compileSchema(text []byte, limits *Limits) (c *schemaCompiler, start int32, err error) {
	if len(text) > limits.SourceBytes {
		return nil, 0, limitError("json_schema", "", "bytes", limits.SourceBytes)
	}
	root, err := readJSON(text, 4*limits.Depth)
	if err != nil {
		return nil, 0, err
	}
	c = newSchemaCompiler(*limits)
	start, err = c.schema(root)
	return c, start, err
}

// schema adds the rules of the instances of a schema, and of those in also, and returns the first.
func (c *schemaCompiler) schema(root *value, also ...*value) (int32, error) {
	c.schemas = append(c.schemas, rootSchema{root, also})
	c.begin(root)
	start, err := c.rule(append([]*value{root}, also...))
	if err != nil {
		return 0, err
	}
	return start, c.finish()
}

// begin starts a schema.
func (c *schemaCompiler) begin(root *value) {
	c.root = root
	c.siblings = true
	if s := root.get("$schema"); s != nil && s.kind == '"' {
		for _, old := range []string{"draft-03", "draft-04", "draft-05", "draft-06", "draft-07"} {
			c.siblings = c.siblings && !strings.Contains(s.text, old)
		}
	}
	c.memo, c.resources, c.dynamic = map[string]int32{}, map[string]*resource{}, map[string]int{} // $ref stays inside one schema
	c.index(root, root.parent, root.name, nil)
}

// finish makes the expressions of the rules that a schema needs.
func (c *schemaCompiler) finish() error {
	for len(c.queue) > 0 {
		j := c.queue[0]
		c.queue = c.queue[1:]
		e, err := c.conjunction(j.conj)
		if err != nil {
			return err
		}
		c.rules[j.rule] = e
	}
	return nil
}

// index notes where each value is, and the identifiers and anchors of schemas.
func (c *schemaCompiler) index(v, parent *value, name string, res *resource) {
	v.parent, v.name = parent, name
	if res == nil {
		res = &resource{root: v, anchors: map[string]*value{}}
		c.resources[""] = res
	}
	if v.kind == '{' && !inValues(v) {
		for _, key := range []string{"$id", "id"} {
			id := v.get(key)
			if id == nil || id.kind != '"' || v.get("$ref") != nil && !c.siblings {
				continue
			}
			uri, fragment, _ := strings.Cut(resolveURI(res.uri, id.text), "#")
			if fragment != "" && strings.HasPrefix(id.text, "#") {
				res.anchors[fragment] = v
				continue
			}
			if key == "id" && c.siblings {
				continue // a property's name, or an annotation
			}
			if v == res.root {
				res.uri = uri
				c.resources[uri] = res
			} else {
				res = &resource{uri: uri, root: v, anchors: map[string]*value{}}
				c.resources[uri] = res
			}
		}
		for _, key := range []string{"$anchor", "$dynamicAnchor"} {
			if a := v.get(key); a != nil && a.kind == '"' {
				res.anchors[a.text] = v
				if key == "$dynamicAnchor" {
					c.dynamic[a.text]++
				}
			}
		}
		if isTrue(v.get("$recursiveAnchor")) {
			c.dynamic[""]++
		}
	}
	v.res = res
	for i, x := range v.vals {
		c.index(x, v, v.keys[i], res)
	}
	for i, x := range v.arr {
		c.index(x, v, strconv.Itoa(i), res)
	}
}

// inValues reports whether v is part of an enum or a const, where nothing is a schema. Properties
// may have these names.
func inValues(v *value) bool {
	for ; v.parent != nil; v = v.parent {
		if (v.name == "enum" || v.name == "const") && v.parent.kind == '{' && (v.parent.parent == nil || !schemaMaps[v.parent.name]) {
			return true
		}
	}
	return false
}

// schemaMaps are the keywords whose members are schemas by names of their own.
var schemaMaps = map[string]bool{"properties": true, "patternProperties": true, "definitions": true, "$defs": true, "dependencies": true, "dependentSchemas": true}

// resolveURI returns a reference relative to a base.
func resolveURI(base, ref string) string {
	if strings.HasPrefix(ref, "#") {
		return base + ref
	}
	scheme, _, found := strings.Cut(ref, ":")
	if found && !strings.ContainsAny(scheme, "/?#") {
		return ref
	}
	if strings.HasPrefix(ref, "/") {
		if i := strings.Index(base, "://"); i >= 0 {
			if j := strings.IndexByte(base[i+3:], '/'); j >= 0 {
				return base[:i+3+j] + ref
			}
			return base + ref
		}
		return ref
	}
	return base[:strings.LastIndexByte(base, '/')+1] + ref
}

// pointer returns the JSON pointer of a value.
func pointer(v *value) string {
	if v == nil || v.parent == nil {
		return "#"
	}
	return pointer(v.parent) + "/" + escapePointer(v.name)
}

// escapePointer returns a name as JSON pointers spell it.
func escapePointer(name string) string {
	return strings.ReplaceAll(strings.ReplaceAll(name, "~", "~0"), "/", "~1")
}

// refuse returns the error for a keyword of a schema.
func refuse(schema *value, keyword, format string, args ...any) error {
	at := pointer(schema)
	if schema.get(keyword) != nil {
		at += "/" + keyword
	}
	return &Error{Keyword: keyword, Pointer: at, Reason: fmt.Sprintf(format, args...)}
}

// step counts work.
func (c *schemaCompiler) step(n int) error {
	if c.steps += n; c.steps > c.limits.CompileSteps {
		return limitError("json_schema", c.place(), "compile steps", c.limits.CompileSteps)
	}
	return nil
}

// place returns the pointer of the schema that is compiled; empty: it is the whole source.
func (c *schemaCompiler) place() string {
	if c.root == nil || c.root.parent == nil {
		return ""
	}
	return pointer(c.root)
}

// key returns the identity of a conjunction.
func (c *schemaCompiler) key(conj []*value) string {
	out := make([]byte, 0, 4*len(conj))
	for _, v := range conj {
		if v.id == 0 {
			c.ids++
			v.id = c.ids
		}
		out = binary.LittleEndian.AppendUint32(out, uint32(v.id))
	}
	return string(out)
}

// rule returns the rule of a conjunction, whose expression is made later.
func (c *schemaCompiler) rule(conj []*value) (int32, error) {
	conj = c.simplify(conj)
	k := c.key(conj)
	if r, ok := c.memo[k]; ok {
		return r, nil
	}
	if len(c.rules) >= c.limits.Rules {
		return 0, limitError("json_schema", c.place(), "rules", c.limits.Rules)
	}
	r := int32(len(c.rules))
	c.rules = append(c.rules, nil)
	c.memo[k] = r
	c.queue = append(c.queue, job{r, conj})
	return r, nil
}

// simplify leaves out schemas that are there twice or accept everything, and follows references
// that have no siblings.
func (c *schemaCompiler) simplify(conj []*value) []*value {
	var out []*value
	c.steps += len(conj) * len(conj) / 64
	for _, v := range conj {
		for range 16 {
			ref := v.get("$ref")
			if ref == nil || len(v.keys) != 1 {
				break
			}
			to, err := c.resolve(v, ref)
			if err != nil {
				break
			}
			v = to
		}
		if v.kind == 'b' && v.yes || v.kind == '{' && len(v.keys) == 0 || slices.Contains(out, v) {
			continue
		}
		out = append(out, v)
	}
	return out
}

// resolve returns the schema that a $ref of v names.
func (c *schemaCompiler) resolve(v, ref *value) (*value, error) {
	if ref.kind != '"' {
		return nil, refuse(v, "$ref", "is not a string")
	}
	if err := c.step(1 + len(ref.text)/8); err != nil {
		return nil, err
	}
	uri, fragment, _ := strings.Cut(ref.text, "#")
	res := v.res
	if uri != "" {
		full := resolveURI(res.uri, uri)
		if res = c.resources[full]; res == nil {
			return nil, refuse(v, "$ref", "%q is not in the schema", clip(ref.text))
		}
	}
	fragment = unescapeURI(fragment)
	if fragment == "" {
		return res.root, nil
	}
	if !strings.HasPrefix(fragment, "/") {
		if a := res.anchors[fragment]; a != nil {
			return a, nil
		}
		return nil, refuse(v, "$ref", "no anchor %q", clip(fragment))
	}
	at := res.root
	for _, part := range strings.Split(fragment[1:], "/") {
		part = strings.ReplaceAll(strings.ReplaceAll(part, "~1", "/"), "~0", "~")
		next := at.get(part)
		if i, err := strconv.Atoi(part); err == nil && at.kind == '[' && i >= 0 && i < len(at.arr) {
			next = at.arr[i]
		}
		if next == nil {
			return nil, refuse(v, "$ref", "%q does not exist", clip(ref.text))
		}
		at = next
	}
	if at.kind != '{' && at.kind != 'b' {
		return nil, refuse(v, "$ref", "%q is not a schema", clip(ref.text))
	}
	return at, nil
}

// resolveDynamic returns the schema that a $dynamicRef or a $recursiveRef of v names. It refuses a
// name that several schemas have, because the outermost of them on the way to v would count.
func (c *schemaCompiler) resolveDynamic(v *value, k string, ref *value) (*value, error) {
	to, err := c.resolve(v, ref)
	if err != nil {
		return nil, err
	}
	_, name, _ := strings.Cut(ref.text, "#")
	anchor, n := to.get("$dynamicAnchor"), c.dynamic[name]
	if k == "$dynamicRef" && (anchor == nil || anchor.text != name) {
		n = 0 // it is as $ref
	}
	if n > 1 || k == "$recursiveRef" && (name != "" || n > 0) {
		return nil, refuse(v, k, "is supported only where one schema has the anchor")
	}
	return to, nil
}

// unescapeURI decodes %XX.
func unescapeURI(s string) string {
	if !strings.Contains(s, "%") {
		return s
	}
	var out []byte
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				out = append(out, byte(v))
				i += 2
				continue
			}
		}
		out = append(out, s[i])
	}
	return string(out)
}
