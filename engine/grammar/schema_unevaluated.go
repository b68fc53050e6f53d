package grammar

import "slices"

// evaluated is the part of an object or array that a schema evaluates, whatever its instance.
type evaluated struct {
	all      bool
	keys     []string
	seen     map[string]bool // of keys
	patterns []string
	prefix   int // items
}

// unevaluated applies a schema to the members, or items, that no other keyword of v evaluates, nor
// one of the schemas that always apply with v. Where that depends on the instance, v is refused.
func (c *schemaCompiler) unevaluated(flats []*flat, v *value, k string, x *value) ([]*flat, error) {
	if x.kind == 'b' && x.yes {
		return flats, nil
	}
	e := &evaluated{seen: map[string]bool{}}
	if err := c.evaluates(e, v, v, k, 0); err != nil || e.all {
		return flats, err
	}
	yes := []*value{boolValue(true)}
	if k == "unevaluatedItems" {
		part := itemPart{prefix: slices.Repeat(yes, e.prefix), rest: x}
		return each(flats, func(f *flat) { f.arrays.items = append(f.arrays.items, part) }), nil
	}
	part := memberPart{rest: x}
	part.props = &value{kind: '{', keys: e.keys, vals: slices.Repeat(yes, len(e.keys))}
	part.patterns = &value{kind: '{', keys: e.patterns, vals: slices.Repeat(yes, len(e.patterns))}
	return each(flats, func(f *flat) { f.objects.members = append(f.objects.members, part) }), nil
}

// evaluates adds to e what the schema s evaluates for the keyword k of v.
func (c *schemaCompiler) evaluates(e *evaluated, v, s *value, k string, depth int) error {
	if err := c.step(1 + len(s.keys)); err != nil {
		return err
	}
	if depth > c.limits.Depth {
		return refuse(v, k, "is not supported with a $ref to itself")
	}
	objects := k == "unevaluatedProperties"
	for i, key := range s.keys {
		x := s.vals[i]
		switch key {
		case "$ref", "$dynamicRef", "$recursiveRef":
			to, err := c.resolve(s, x)
			if err == nil && key != "$ref" {
				to, err = c.resolveDynamic(s, key, x)
			}
			if err == nil {
				err = c.evaluates(e, v, to, k, depth+1)
			}
			if err != nil {
				return err
			}
		case "allOf":
			for _, part := range x.arr {
				if err := c.evaluates(e, v, part, k, depth+1); err != nil {
					return err
				}
			}
		case "anyOf", "oneOf", "if", "dependentSchemas", "dependencies":
			return refuse(v, k, "is not supported with %s", key)
		case "unevaluatedProperties", "unevaluatedItems":
			e.all = e.all || key == k && s != v
		case "properties":
			for _, name := range x.keys {
				if !e.seen[name] {
					e.seen[name] = true
					e.keys = append(e.keys, name)
				}
			}
			if err := c.step(len(x.keys)); err != nil {
				return err
			}
		case "patternProperties":
			e.patterns = append(e.patterns, x.keys...)
		case "additionalProperties":
			e.all = e.all || objects
		case "prefixItems":
			e.prefix = max(e.prefix, len(x.arr))
		case "items":
			if e.prefix = max(e.prefix, len(x.arr)); x.kind != '[' {
				e.all = e.all || !objects
			}
		case "additionalItems":
			if items := s.get("items"); items != nil && items.kind == '[' {
				e.all = e.all || !objects
			}
		case "contains":
			if !objects {
				return refuse(v, k, "is not supported with %s", key)
			}
		}
	}
	return nil
}
