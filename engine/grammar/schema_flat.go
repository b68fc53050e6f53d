package grammar

import (
	"slices"
	"strconv"
)

// types is a set of JSON types. A number is an integer or has a fraction.
type types uint8

const (
	typeNull types = 1 << iota
	typeBool
	typeInt
	typeFrac
	typeString
	typeArray
	typeObject
	typeNumber = typeInt | typeFrac
	allTypes   = typeNull | typeBool | typeNumber | typeString | typeArray | typeObject
)

var typeNames = map[string]types{
	"null": typeNull, "boolean": typeBool, "integer": typeInt, "number": typeNumber, "string": typeString, "array": typeArray, "object": typeObject,
}

// Keywords of schemas that the compiler makes itself.
const (
	keyNotTypes   = "\x00notTypes"   // a number: the types that are excluded
	keyNotValues  = "\x00notValues"  // an array: the values that are excluded
	keyNotPattern = "\x00notPattern" // an array: patterns that strings must not match
)

// A flat is a conjunction without alternatives. Each list is a conjunction again.
type flat struct {
	types    types
	source   *value   // for messages
	limited  bool     // only lits are allowed
	lits     []*value // of enum and const
	notLits  []*value
	strings  stringPart
	lo, hi   *bound
	multiple []decimal
	arrays   arrayPart
	objects  objectPart
}

type stringPart struct {
	min, max int32
	patterns []string
	not      []string
	formats  []string
}

type arrayPart struct {
	items    []itemPart
	contains []*value // each is valid for at least one item
	min, max int32
	unique   bool
}

// itemPart is prefixItems and items of one schema.
type itemPart struct {
	prefix []*value
	rest   *value // nil: anything
}

type objectPart struct {
	members  []memberPart
	required []string
	names    []*value
	min, max int32
}

// memberPart is properties, patternProperties and additionalProperties of one schema.
type memberPart struct {
	props    *value
	patterns *value
	rest     *value // nil: anything
}

func newFlat(source *value) *flat {
	return &flat{
		types: allTypes, source: source, strings: stringPart{max: unlimited}, arrays: arrayPart{max: unlimited}, objects: objectPart{max: unlimited},
	}
}

// clone returns a copy whose lists may be appended to.
func (f *flat) clone() *flat {
	c := *f
	c.lits, c.notLits = slices.Clip(f.lits), slices.Clip(f.notLits)
	c.strings.patterns, c.strings.not, c.strings.formats = slices.Clip(f.strings.patterns), slices.Clip(f.strings.not), slices.Clip(f.strings.formats)
	c.multiple = slices.Clip(f.multiple)
	c.arrays.items, c.arrays.contains = slices.Clip(f.arrays.items), slices.Clip(f.arrays.contains)
	c.objects.members, c.objects.required, c.objects.names = slices.Clip(f.objects.members), slices.Clip(f.objects.required), slices.Clip(f.objects.names)
	return &c
}

// size returns the memory of all lists but that of values, in pointers.
func (f *flat) size() int {
	s, a, o := &f.strings, &f.arrays, &f.objects
	texts := len(s.patterns) + len(s.not) + len(s.formats) + len(o.required)
	return len(f.notLits) + len(a.contains) + len(o.names) + 2*texts + 3*len(o.members) + 4*len(a.items) + 5*len(f.multiple)
}

// flatten returns the alternatives of a conjunction.
func (c *schemaCompiler) flatten(conj []*value) ([]*flat, error) {
	var source *value
	if len(conj) > 0 {
		source = conj[0]
	} else {
		source = c.root
	}
	flats := []*flat{newFlat(source)}
	for _, v := range conj {
		var err error
		if flats, err = c.apply(flats, v, 0); err != nil {
			return nil, err
		}
	}
	return flats, nil
}

// apply restricts each alternative to a schema.
func (c *schemaCompiler) apply(flats []*flat, v *value, depth int) ([]*flat, error) {
	if err := c.step(1 + len(flats)); err != nil {
		return nil, err
	}
	if depth > c.limits.Depth {
		return nil, &Error{Keyword: "$ref", Pointer: pointer(v), Reason: "refers to itself, or is nested too deeply", Err: ErrBudget}
	}
	switch {
	case v.kind == 'b' && v.yes:
		return flats, nil
	case v.kind == 'b':
		return nil, nil
	case v.kind != '{':
		return nil, &Error{Keyword: "json_schema", Pointer: pointer(v), Reason: "a schema is an object or a boolean"}
	}
	if ref := v.get("$ref"); ref != nil && !c.siblings {
		to, err := c.resolve(v, ref)
		if err != nil {
			return nil, err
		}
		return c.apply(flats, to, depth+1)
	}
	var err error
	// type, enum and const come first, since they keep the number of alternatives small.
	for _, first := range []bool{true, false} {
		for i, k := range v.keys {
			if (k == "type" || k == "enum" || k == "const") != first {
				continue
			}
			if flats, err = c.keyword(flats, v, k, v.vals[i], depth); err != nil || len(flats) == 0 {
				return nil, err
			}
			n := 16 * 4 * len(flats)
			for _, f := range flats {
				n += f.size()
			}
			if err := c.step(n / 16); err != nil { // lists are copied where they grow
				return nil, err
			}
			if len(flats) > c.limits.AlternateSets {
				return nil, limitError(k, pointer(v), "alternatives", c.limits.AlternateSets)
			}
		}
	}
	return flats, nil
}

// each changes every alternative and drops those without a type.
func each(flats []*flat, change func(*flat)) []*flat {
	var out []*flat
	for _, f := range flats {
		f = f.clone()
		change(f)
		if f.types != 0 {
			out = append(out, f)
		}
	}
	return out
}

// keyword applies one member of a schema.
func (c *schemaCompiler) keyword(flats []*flat, v *value, k string, x *value, depth int) ([]*flat, error) {
	switch k {
	case "$ref":
		to, err := c.resolve(v, x)
		if err != nil {
			return nil, err
		}
		return c.apply(flats, to, depth+1)
	case "allOf":
		return c.allOf(flats, v, x, depth)
	case "anyOf":
		return c.anyOf(flats, v, k, x, depth)
	case "oneOf":
		return c.oneOf(flats, v, x, depth)
	case "not":
		alts, err := c.negate(x, depth)
		if err != nil {
			return nil, err
		}
		return c.either(flats, alts, depth)
	case "if":
		return c.condition(flats, v, x, depth)
	case "dependentRequired", "dependentSchemas", "dependencies":
		return c.dependent(flats, v, k, x, depth)
	case "type":
		return c.typeKeyword(flats, v, x)
	case "enum", "const", keyNotValues, keyNotTypes:
		return c.values(flats, v, k, x)
	case "minLength", "maxLength", "pattern", "format", keyNotPattern:
		return c.stringKeyword(flats, v, k, x)
	case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf":
		return c.numberKeyword(flats, v, k, x)
	case "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains":
		return c.arrayKeyword(flats, v, k, x)
	case "properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties", "maxProperties":
		return c.objectKeyword(flats, v, k, x)
	case "unevaluatedProperties", "unevaluatedItems":
		return c.unevaluated(flats, v, k, x)
	case "$dynamicRef", "$recursiveRef":
		to, err := c.resolveDynamic(v, k, x)
		if err != nil {
			return nil, err
		}
		return c.apply(flats, to, depth+1)
	case "extends", "disallow":
		return nil, refuse(v, k, "is not supported")
	case "then", "else", "additionalItems", "minContains", "maxContains": // read with if, items and contains
		return flats, nil
	}
	c.ignored++
	return flats, nil
}

func (c *schemaCompiler) typeKeyword(flats []*flat, v, x *value) ([]*flat, error) {
	var set types
	list := []*value{x}
	if x.kind == '[' {
		list = x.arr
	}
	for _, t := range list {
		n, ok := typeNames[t.text]
		if t.kind != '"' || !ok {
			return nil, refuse(v, "type", "unknown type")
		}
		set |= n
	}
	return each(flats, func(f *flat) { f.types &= set }), nil
}

// values applies lists of values.
func (c *schemaCompiler) values(flats []*flat, v *value, k string, x *value) ([]*flat, error) {
	list := x.arr
	switch {
	case k == "const":
		list = []*value{x}
	case k == keyNotTypes:
		n, _ := strconv.Atoi(x.text)
		return each(flats, func(f *flat) { f.types &^= types(n) }), nil
	case x.kind != '[':
		return nil, refuse(v, k, "is not an array")
	}
	if err := c.step(len(list)); err != nil {
		return nil, err
	}
	if k == keyNotValues {
		return each(flats, func(f *flat) { f.notLits = append(f.notLits, list...) }), nil
	}
	var err error
	out := each(flats, func(f *flat) {
		if !f.limited {
			f.limited, f.lits = true, slices.Clip(list)
			return
		}
		var kept []*value
		for _, a := range f.lits {
			if err = c.step(len(list)); err != nil {
				return
			}
			if slices.ContainsFunc(list, func(b *value) bool { return equalValues(a, b, &c.steps) }) {
				kept = append(kept, a)
			}
		}
		f.lits = kept
		if len(kept) == 0 {
			f.types = 0
		}
	})
	return out, err
}

// count reads a number of characters, items or members.
func (c *schemaCompiler) count(v *value, k string, x *value) (int32, error) {
	if x.kind != '0' {
		return 0, refuse(v, k, "is not a number")
	}
	d, err := parseDecimal(x.text)
	if err != nil || d.neg || !isInteger(d) {
		return 0, refuse(v, k, "%s is not a count", clip(x.text))
	}
	if len(d.int) > 9 {
		return unlimited - 1, nil
	}
	n, _ := strconv.Atoi(intDigits(d))
	return int32(n), nil
}

func (c *schemaCompiler) stringKeyword(flats []*flat, v *value, k string, x *value) ([]*flat, error) {
	switch k {
	case "minLength", "maxLength":
		n, err := c.count(v, k, x)
		if err != nil {
			return nil, err
		}
		return each(flats, func(f *flat) {
			if k == "minLength" {
				f.strings.min = max(f.strings.min, n)
			} else {
				f.strings.max = min(f.strings.max, n)
			}
			if f.strings.min > f.strings.max {
				f.types &^= typeString
			}
		}), nil
	case keyNotPattern:
		return each(flats, func(f *flat) { f.strings.not = append(f.strings.not, x.text) }), nil
	}
	if x.kind != '"' {
		return nil, refuse(v, k, "is not a string")
	}
	if k == "pattern" {
		if _, err := c.pattern(x.text, k, v, "/pattern"); err != nil {
			return nil, err
		}
		return each(flats, func(f *flat) {
			if !slices.Contains(f.strings.patterns, x.text) {
				f.strings.patterns = append(f.strings.patterns, x.text)
			}
		}), nil
	}
	_, isString := stringFormats[x.text]
	span, isInt := integerFormats[x.text]
	if !isString && !isInt {
		c.ignored++
		return flats, nil
	}
	return each(flats, func(f *flat) {
		if isString && !slices.Contains(f.strings.formats, x.text) {
			f.strings.formats = append(f.strings.formats, x.text)
		}
		if isInt && f.types&typeFrac == 0 && f.types&typeInt != 0 {
			lo, _ := parseDecimal(span[0])
			hi, _ := parseDecimal(span[1])
			f.atLeast(&bound{at: lo})
			f.atMost(&bound{at: hi})
		}
	}), nil
}

// atLeast and atMost narrow the range of numbers.
func (f *flat) atLeast(b *bound) {
	if f.lo != nil {
		if n := f.lo.at.compare(b.at); n > 0 || n == 0 && f.lo.exclusive {
			return
		}
	}
	f.lo = b
	f.checkRange()
}

func (f *flat) atMost(b *bound) {
	if f.hi != nil {
		if n := f.hi.at.compare(b.at); n < 0 || n == 0 && f.hi.exclusive {
			return
		}
	}
	f.hi = b
	f.checkRange()
}

func (f *flat) checkRange() {
	if f.lo == nil || f.hi == nil {
		return
	}
	if n := f.lo.at.compare(f.hi.at); n > 0 || n == 0 && (f.lo.exclusive || f.hi.exclusive) {
		f.types &^= typeNumber
	}
}

func (c *schemaCompiler) numberKeyword(flats []*flat, v *value, k string, x *value) ([]*flat, error) {
	if x.kind == 'b' && (k == "exclusiveMinimum" || k == "exclusiveMaximum") {
		return flats, nil // draft 4: read with minimum and maximum
	}
	if x.kind != '0' {
		return nil, refuse(v, k, "is not a number")
	}
	d, err := parseDecimal(x.text)
	if err != nil {
		return nil, refuse(v, k, "%v", err)
	}
	b := &bound{at: d}
	switch k {
	case "multipleOf":
		return each(flats, func(f *flat) { f.multiple = append(f.multiple, d) }), nil
	case "minimum", "maximum":
		old := v.get(map[string]string{"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}[k])
		b.exclusive = old != nil && old.kind == 'b' && old.yes
	default:
		b.exclusive = true
	}
	return each(flats, func(f *flat) {
		if k == "minimum" || k == "exclusiveMinimum" {
			f.atLeast(b)
		} else {
			f.atMost(b)
		}
	}), nil
}

func (c *schemaCompiler) arrayKeyword(flats []*flat, v *value, k string, x *value) ([]*flat, error) {
	switch k {
	case "minItems", "maxItems":
		n, err := c.count(v, k, x)
		if err != nil {
			return nil, err
		}
		return each(flats, func(f *flat) {
			if k == "minItems" {
				f.arrays.min = max(f.arrays.min, n)
			} else {
				f.arrays.max = min(f.arrays.max, n)
			}
			if f.arrays.min > f.arrays.max {
				f.types &^= typeArray
			}
		}), nil
	case "uniqueItems":
		return each(flats, func(f *flat) { f.arrays.unique = f.arrays.unique || x.kind == 'b' && x.yes }), nil
	case "contains":
		return c.contains(flats, v, x)
	case "items":
		if v.get("prefixItems") != nil {
			return flats, nil // read with prefixItems
		}
		part := itemPart{rest: x}
		if x.kind == '[' {
			part = itemPart{prefix: x.arr, rest: v.get("additionalItems")}
		}
		return each(flats, func(f *flat) { f.arrays.items = append(f.arrays.items, part) }), nil
	}
	if x.kind != '[' {
		return nil, refuse(v, k, "is not an array")
	}
	part := itemPart{prefix: x.arr, rest: v.get("items")}
	return each(flats, func(f *flat) { f.arrays.items = append(f.arrays.items, part) }), nil
}

// contains demands an item for which x is valid. Another number of such items is a number of items
// if x is valid for all or for none, and is refused otherwise.
func (c *schemaCompiler) contains(flats []*flat, v, x *value) ([]*flat, error) {
	limits := [...]int32{1, unlimited}
	for i, k := range []string{"minContains", "maxContains"} {
		if limit := v.get(k); limit != nil {
			var err error
			if limits[i], err = c.count(v, k, limit); err != nil {
				return nil, err
			}
		}
	}
	least, most := limits[0], limits[1]
	switch {
	case x.kind == 'b' && x.yes || x.kind == '{' && len(x.keys) == 0:
		return each(flats, func(f *flat) {
			if f.arrays.min, f.arrays.max = max(f.arrays.min, least), min(f.arrays.max, most); f.arrays.min > f.arrays.max {
				f.types &^= typeArray
			}
		}), nil
	case least == 0 && most == unlimited:
		return flats, nil
	case x.kind == 'b' && least == 0:
		return flats, nil
	case x.kind == 'b' || least > most:
		return each(flats, func(f *flat) { f.types &^= typeArray }), nil
	case least == 1 && most == unlimited:
		return each(flats, func(f *flat) { f.arrays.contains = append(f.arrays.contains, x) }), nil
	}
	arrays := func(f *flat) bool {
		return f.types&typeArray != 0 && (!f.limited || slices.ContainsFunc(f.lits, func(l *value) bool { return l.kind == '[' }))
	}
	if slices.ContainsFunc(flats, arrays) {
		return nil, refuse(v, "contains", "is not supported with this minContains or maxContains")
	}
	return flats, nil
}

func (c *schemaCompiler) objectKeyword(flats []*flat, v *value, k string, x *value) ([]*flat, error) {
	switch k {
	case "minProperties", "maxProperties":
		n, err := c.count(v, k, x)
		if err != nil {
			return nil, err
		}
		return each(flats, func(f *flat) {
			if k == "minProperties" {
				f.objects.min = max(f.objects.min, n)
			} else {
				f.objects.max = min(f.objects.max, n)
			}
			if f.objects.min > f.objects.max {
				f.types &^= typeObject
			}
		}), nil
	case "propertyNames":
		return each(flats, func(f *flat) { f.objects.names = append(f.objects.names, x) }), nil
	case "required":
		if x.kind != '[' {
			c.ignored++ // draft 3
			return flats, nil
		}
		return each(flats, func(f *flat) {
			known := make(map[string]bool, len(f.objects.required)+len(x.arr))
			for _, k := range f.objects.required {
				known[k] = true
			}
			c.steps += len(known) + len(x.arr)
			for _, n := range x.arr {
				if n.kind == '"' && !known[n.text] {
					known[n.text] = true
					f.objects.required = append(f.objects.required, n.text)
				}
			}
		}), nil
	}
	part := memberPart{props: v.get("properties"), patterns: v.get("patternProperties"), rest: v.get("additionalProperties")}
	first := k == "properties" || k == "patternProperties" && part.props == nil || part.props == nil && part.patterns == nil
	if !first {
		return flats, nil // read with the first of the three
	}
	if part.props != nil && part.props.kind != '{' || part.patterns != nil && part.patterns.kind != '{' {
		return nil, refuse(v, k, "is not an object")
	}
	if err := c.checkPatterns(v, part.patterns); err != nil {
		return nil, err
	}
	return each(flats, func(f *flat) { f.objects.members = append(f.objects.members, part) }), nil
}

func (c *schemaCompiler) checkPatterns(v, patterns *value) error {
	if patterns == nil {
		return nil
	}
	for _, k := range patterns.keys {
		if _, err := c.pattern(k, "patternProperties", v, "/patternProperties"); err != nil {
			return err
		}
	}
	return nil
}
