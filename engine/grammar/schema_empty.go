package grammar

import (
	"slices"
)

// errNoText is the error of rules without a text.
var errNoText = &Error{Keyword: "grammar", Reason: "accepts no text", Err: ErrEmpty}

// A rootSchema is a schema that was compiled, with further schemas that its instances match.
type rootSchema struct {
	v    *value
	also []*value
}

// emptySchema returns why the first of several schemas without an instance has none; nil: all have
// some. It compiles them again, within the steps that are left.
func (c *schemaCompiler) emptySchema() error {
	spent := c.steps
	for _, s := range c.schemas {
		c := newSchemaCompiler(c.limits)
		c.steps = spent
		start, err := c.schema(s.v, s.also...)
		if err != nil {
			return nil // no steps are left, or it compiles only in the notation of its tag
		}
		x := &emptiness{c, heightsOf(c.rules), map[int32]bool{}}
		if x.heights[start] >= infinite {
			return x.conjunction(append(slices.Clone(s.also), s.v), start)
		}
		spent = c.steps
	}
	return nil
}

// emptiness finds why a schema has no instance.
type emptiness struct {
	c       *schemaCompiler
	heights []int32 // of rules
	seen    map[int32]bool
}

// reason returns an error that names a keyword of a schema.
func reason(schema *value, keyword, format string, args ...any) error {
	e := refuse(schema, keyword, "accepts no text: "+format, args...).(*Error)
	e.Err = ErrEmpty
	return e
}

// conjunction explains the schemas of a rule, of which at least one is of the source.
func (x *emptiness) conjunction(conj []*value, rule int32) error {
	last := conj[len(conj)-1]
	if x.seen[rule] {
		return reason(last, "$ref", "every value contains itself")
	}
	x.seen[rule] = true
	flats, err := []*flat{newFlat(last)}, error(nil)
	for _, v := range conj {
		if flats, err = x.apply(flats, v, 0); err != nil {
			return err
		}
	}
	for _, f := range flats {
		if !f.limited {
			return x.part(f)
		}
	}
	return reason(last, "enum", "no value is valid")
}

// apply returns the alternatives that a schema leaves. The error names a keyword that leaves none.
func (x *emptiness) apply(flats []*flat, v *value, depth int) ([]*flat, error) {
	c := x.c
	if v.kind != '{' || depth > c.limits.Depth {
		if flats, err := c.apply(flats, v, depth); err != nil || x.possible(flats) {
			return flats, err
		}
		return nil, reason(v, "json_schema", "the schema is false")
	}
	for _, first := range []bool{true, false} {
		for i, k := range v.keys {
			if (k == "type" || k == "enum" || k == "const") != first || k != "$ref" && v.get("$ref") != nil && !c.siblings {
				continue
			}
			parts := v.vals[i].arr
			if k == "$ref" {
				to, err := c.resolve(v, v.vals[i])
				if err != nil {
					return nil, err
				}
				parts = []*value{to}
			}
			var err error
			if k == "$ref" || k == "allOf" {
				for _, p := range parts {
					if flats, err = x.apply(flats, p, depth+1); err != nil {
						return nil, err
					}
				}
				continue
			}
			before := flats
			if flats, err = c.keyword(flats, v, k, v.vals[i], depth); err != nil {
				return nil, err
			}
			if !x.possible(flats) {
				return nil, reason(v, k, "%s leaves no value of %s", k, namesOf(before))
			}
		}
	}
	return flats, nil
}

// possible reports whether an alternative has a type left, or a value that it lists.
func (x *emptiness) possible(flats []*flat) bool {
	return slices.ContainsFunc(flats, func(f *flat) bool {
		return !f.limited && f.types != 0 || slices.ContainsFunc(f.lits, func(l *value) bool {
			ok, err := x.c.valid(l, f)
			return ok || err != nil
		})
	})
}

// namesOf returns the types of alternatives.
func namesOf(flats []*flat) string {
	all := types(0)
	for _, f := range flats {
		all |= f.types
	}
	switch all {
	case typeObject:
		return "type object"
	case allTypes:
		return "any type"
	}
	return "the types that other keywords allow"
}

// part explains an alternative of which every value lacks a part.
func (x *emptiness) part(f *flat) error {
	o := &f.objects
	if f.types&typeObject == 0 {
		for _, k := range []string{"pattern", "format", "minLength", "multipleOf", "minItems", "items", "prefixItems", "enum", "not", "anyOf", "oneOf"} {
			if f.source.get(k) != nil {
				return reason(f.source, k, "no value is valid")
			}
		}
		return reason(f.source, "type", "no value is valid")
	}
	for _, k := range o.required {
		conj, err := x.c.property(f, k)
		switch {
		case err != nil:
			return err
		case conj == nil:
			return reason(f.source, "required", "%q is required, and not allowed", clip(k))
		}
		conj = x.c.simplify(conj)
		if r, ok := x.c.memo[x.c.key(conj)]; ok && x.heights[r] >= infinite {
			return x.conjunction(conj, r)
		}
	}
	if len(o.required) > int(o.max) {
		return reason(f.source, "maxProperties", "%d members are required", len(o.required))
	}
	return reason(f.source, "minProperties", "%d members are demanded, and fewer are allowed", o.min)
}
