package grammar

import (
	"strconv"
)

func (c *schemaCompiler) allOf(flats []*flat, v, x *value, depth int) ([]*flat, error) {
	if x.kind != '[' {
		return nil, refuse(v, "allOf", "is not an array")
	}
	var err error
	for _, s := range x.arr {
		if flats, err = c.apply(flats, s, depth+1); err != nil {
			return nil, err
		}
	}
	return flats, nil
}

func (c *schemaCompiler) anyOf(flats []*flat, v *value, k string, x *value, depth int) ([]*flat, error) {
	if x.kind != '[' {
		return nil, refuse(v, k, "is not an array")
	}
	alts := make([][]*value, len(x.arr))
	for i, s := range x.arr {
		alts[i] = []*value{s}
	}
	return c.either(flats, alts, depth)
}

// either distributes alternatives, each of which is a conjunction.
func (c *schemaCompiler) either(flats []*flat, alts [][]*value, depth int) ([]*flat, error) {
	var out []*flat
	for _, conj := range alts {
		part := flats
		var err error
		for _, s := range conj {
			if part, err = c.apply(part, s, depth+1); err != nil {
				return nil, err
			}
		}
		out = append(out, part...)
		if len(out) > 4*c.limits.AlternateSets {
			return nil, limitError("anyOf", pointer(flats[0].source), "alternatives", 4*c.limits.AlternateSets)
		}
	}
	return c.merge(out), nil
}

// merge drops alternatives that are there twice and joins those that only list values.
func (c *schemaCompiler) merge(flats []*flat) []*flat {
	var out []*flat
	for _, f := range flats {
		if n := len(out); n > 0 && f.limited && out[n-1].limited && plainList(f) && plainList(out[n-1]) && f.types == out[n-1].types {
			last := out[n-1].clone()
			last.lits = append(last.lits, f.lits...)
			out[n-1] = last
			continue
		}
		out = append(out, f)
	}
	return out
}

// plainList reports whether a flat is a list of values and nothing else.
func plainList(f *flat) bool {
	s, a, o := &f.strings, &f.arrays, &f.objects
	return len(f.notLits) == 0 && s.min == 0 && s.max == unlimited && len(s.patterns)+len(s.not)+len(s.formats) == 0 && f.lo == nil && f.hi == nil && len(f.multiple) == 0 &&
		len(a.items)+len(a.contains) == 0 && a.min == 0 && a.max == unlimited && !a.unique && len(o.members)+len(o.required)+len(o.names) == 0 && o.min == 0 && o.max == unlimited
}

// oneOf distributes branches of which exactly one is valid: each branch excludes those others
// that it may overlap. Where an exclusion cannot be expressed the schema is refused.
func (c *schemaCompiler) oneOf(flats []*flat, v, x *value, depth int) ([]*flat, error) {
	if x.kind != '[' {
		return nil, refuse(v, "oneOf", "is not an array")
	}
	var out []*flat
	for i, s := range x.arr {
		part, err := c.apply(flats, s, depth+1)
		if err != nil {
			return nil, err
		}
		for j, other := range x.arr {
			if i == j || len(part) == 0 {
				continue
			}
			if part, err = c.exclude(part, v, s, other, depth); err != nil {
				return nil, err
			}
		}
		out = append(out, part...)
	}
	return c.merge(out), nil
}

// exclude removes from flats, which are instances of branch, those of other.
func (c *schemaCompiler) exclude(flats []*flat, v, branch, other *value, depth int) ([]*flat, error) {
	var out []*flat
	for _, f := range flats {
		both, err := c.apply([]*flat{f}, other, depth+1)
		if err != nil {
			return nil, err
		}
		overlap := false
		for _, b := range both {
			empty, err := c.emptyFlat(b)
			if err != nil {
				return nil, err
			}
			overlap = overlap || !empty
		}
		if !overlap {
			out = append(out, f)
			continue
		}
		alts, err := c.negate(other, depth+1)
		if err != nil {
			return nil, refuse(v, "oneOf", "branches %s and %s may both be valid, and neither can be excluded", branch.name, other.name)
		}
		part, err := c.either([]*flat{f}, alts, depth)
		if err != nil {
			return nil, err
		}
		out = append(out, part...)
	}
	return out, nil
}

// condition distributes if, then and else.
func (c *schemaCompiler) condition(flats []*flat, v, x *value, depth int) ([]*flat, error) {
	then, otherwise := v.get("then"), v.get("else")
	if then == nil && otherwise == nil {
		return flats, nil
	}
	alts, err := c.negate(x, depth)
	if err != nil {
		return nil, refuse(v, "if", "cannot be excluded: %v", err)
	}
	yes := []*value{x}
	if then != nil {
		yes = append(yes, then)
	}
	all := [][]*value{yes}
	for _, a := range alts {
		if otherwise != nil {
			a = append(a[:len(a):len(a)], otherwise)
		}
		all = append(all, a)
	}
	return c.either(flats, all, depth)
}

// dependent distributes over the presence of properties.
func (c *schemaCompiler) dependent(flats []*flat, v *value, k string, x *value, depth int) ([]*flat, error) {
	if x.kind != '{' {
		return nil, refuse(v, k, "is not an object")
	}
	for i, name := range x.keys {
		then := x.vals[i]
		if then.kind == '"' {
			then = arrayValue(then)
		}
		if then.kind == '[' {
			then = c.synthetic(v, "required", then)
		}
		present := c.synthetic(v, "type", stringValue("object"), "required", arrayValue(stringValue(name)))
		absent := c.synthetic(v, "properties", objectValue(name, boolValue(false)))
		var err error
		if flats, err = c.either(flats, [][]*value{{absent}, {present, then}}, depth); err != nil {
			return nil, err
		}
	}
	return flats, nil
}

// synthetic returns a schema that the compiler makes in the place of another.
func (c *schemaCompiler) synthetic(at *value, kv ...any) *value {
	c.steps += 6
	s := objectValue(kv...)
	s.parent, s.name, s.res = at.parent, at.name, at.res
	for _, x := range s.vals {
		if x.res == nil {
			x.parent, x.name, x.res = at.parent, at.name, at.res
		}
	}
	return s
}

// negate returns alternatives that together are the instances that are not valid for a schema.
func (c *schemaCompiler) negate(v *value, depth int) ([][]*value, error) {
	if err := c.step(1); err != nil {
		return nil, err
	}
	if depth > c.limits.Depth {
		return nil, &Error{Keyword: "not", Pointer: pointer(v), Reason: "is nested too deeply", Err: ErrBudget}
	}
	if v.kind == 'b' {
		if v.yes {
			return nil, nil
		}
		return [][]*value{{}}, nil
	}
	if v.kind != '{' {
		return nil, &Error{Keyword: "not", Pointer: pointer(v), Reason: "a schema is an object or a boolean"}
	}
	var out [][]*value
	for i, k := range v.keys {
		if k != "$ref" && !c.siblings && v.get("$ref") != nil {
			continue
		}
		alts, err := c.negateKeyword(v, k, v.vals[i], depth)
		if err != nil {
			return nil, err
		}
		out = append(out, alts...)
		if len(out) > c.limits.AlternateSets {
			return nil, limitError("not", pointer(v), "alternatives", c.limits.AlternateSets)
		}
	}
	return out, nil
}

func (c *schemaCompiler) negateKeyword(v *value, k string, x *value, depth int) ([][]*value, error) {
	one := func(kv ...any) ([][]*value, error) { return [][]*value{{c.synthetic(v, kv...)}}, nil }
	typed := func(t string, kv ...any) ([][]*value, error) {
		return one(append([]any{"type", stringValue(t)}, kv...)...)
	}
	switch k {
	case "$ref":
		to, err := c.resolve(v, x)
		if err != nil {
			return nil, err
		}
		return c.negate(to, depth+1)
	case "not":
		return [][]*value{{x}}, nil
	case "anyOf":
		return c.negateAny(x, depth)
	case "allOf":
		var out [][]*value
		for _, s := range x.arr {
			alts, err := c.negate(s, depth+1)
			if err != nil {
				return nil, err
			}
			out = append(out, alts...)
		}
		return out, nil
	case "type":
		return c.negateType(v, x)
	case "enum":
		return one(keyNotValues, x)
	case "const":
		return one(keyNotValues, arrayValue(x))
	case "required":
		var out [][]*value
		for _, n := range x.arr {
			out = append(out, []*value{c.synthetic(v, "type", stringValue("object"), "properties", objectValue(n.text, boolValue(false)))})
		}
		return out, nil
	case "properties":
		return c.negateProperties(v, x, depth)
	case "minimum", "exclusiveMaximum", "maximum", "exclusiveMinimum":
		return c.negateBound(v, k, x)
	case "pattern":
		return typed("string", keyNotPattern, x)
	case "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties":
		n, err := c.count(v, k, x)
		if err != nil {
			return nil, err
		}
		t := map[string]string{"L": "string", "I": "array", "P": "object"}[k[3:4]]
		if k[:3] == "max" {
			return typed(t, "min"+k[3:], numberValue(strconv.Itoa(int(n)+1)))
		}
		if n == 0 {
			return nil, nil
		}
		return typed(t, "max"+k[3:], numberValue(strconv.Itoa(int(n)-1)))
	case "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies", "format", "multipleOf", "items", "prefixItems", "additionalItems",
		"uniqueItems", "contains", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
		"$dynamicRef", "$recursiveRef", keyNotPattern, keyNotTypes, keyNotValues:
		return nil, refuse(v, k, "cannot be negated")
	}
	return nil, nil // asserts nothing
}

// negateAny returns the conjunction of the negations of all branches.
func (c *schemaCompiler) negateAny(x *value, depth int) ([][]*value, error) {
	out := [][]*value{{}}
	for _, s := range x.arr {
		alts, err := c.negate(s, depth+1)
		if err != nil {
			return nil, err
		}
		var next [][]*value
		for _, o := range out {
			for _, a := range alts {
				next = append(next, append(o[:len(o):len(o)], a...))
			}
		}
		if len(next) > c.limits.AlternateSets {
			return nil, limitError("not", pointer(x), "alternatives", c.limits.AlternateSets)
		}
		out = next
	}
	return out, nil
}

func (c *schemaCompiler) negateType(v, x *value) ([][]*value, error) {
	list := []*value{x}
	if x.kind == '[' {
		list = x.arr
	}
	var set types
	for _, t := range list {
		n, ok := typeNames[t.text]
		if !ok {
			return nil, refuse(v, "type", "unknown type")
		}
		set |= n
	}
	return [][]*value{{c.synthetic(v, keyNotTypes, numberValue(strconv.Itoa(int(set))))}}, nil
}

func (c *schemaCompiler) negateProperties(v, x *value, depth int) ([][]*value, error) {
	var out [][]*value
	for i, name := range x.keys {
		alts, err := c.negate(x.vals[i], depth+1)
		if err != nil {
			return nil, err
		}
		for _, conj := range alts {
			property := boolValue(true)
			if len(conj) > 0 {
				property = c.synthetic(v, "allOf", arrayValue(conj...))
			}
			out = append(out, []*value{c.synthetic(v, "type", stringValue("object"), "required", arrayValue(stringValue(name)), "properties", objectValue(name, property))})
		}
	}
	return out, nil
}

func (c *schemaCompiler) negateBound(v *value, k string, x *value) ([][]*value, error) {
	if x.kind != '0' {
		return nil, refuse(v, k, "cannot be negated")
	}
	to := map[string]string{"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum"}[k]
	flag := v.get(map[string]string{"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}[k]) // draft 4
	if flag != nil && flag.kind == 'b' && flag.yes {
		to = map[string]string{"minimum": "maximum", "maximum": "minimum"}[k]
	}
	return [][]*value{{c.synthetic(v, "type", stringValue("number"), to, x)}}, nil
}
