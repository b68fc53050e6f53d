package grammar

import "unicode/utf8"

// validConj reports whether a value is valid for all schemas of conj.
func (c *schemaCompiler) validConj(v *value, conj []*value) (bool, error) {
	flats, err := c.flatten(conj)
	if err != nil {
		return false, err
	}
	for _, f := range flats {
		if err := c.step(len(f.lits)); err != nil {
			return false, err
		}
		ok := !f.limited
		for _, l := range f.lits {
			ok = ok || equalValues(l, v, &c.steps)
		}
		if !ok {
			continue
		}
		if ok, err = c.valid(v, f); ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// valid reports whether a value satisfies a flat, apart from its list of values.
func (c *schemaCompiler) valid(v *value, f *flat) (bool, error) {
	if err := c.step(1 + len(f.notLits)); err != nil {
		return false, err
	}
	if f.excludes(v, &c.steps) {
		return false, nil
	}
	switch v.kind {
	case 'n':
		return f.types&typeNull != 0, nil
	case 'b':
		return f.types&typeBool != 0, nil
	case '0':
		return f.types&typeNumber != 0 && validNumber(v, f), nil
	case '"':
		if f.types&typeString == 0 {
			return false, nil
		}
		return c.validString(v.text, f)
	case '[':
		if f.types&typeArray == 0 {
			return false, nil
		}
		return c.validArray(v, f)
	}
	if f.types&typeObject == 0 {
		return false, nil
	}
	return c.validObject(v, f)
}

func validNumber(v *value, f *flat) bool {
	d, err := parseDecimal(v.text)
	if err != nil { // beyond what bounds can be
		return f.types&typeNumber == typeNumber && f.lo == nil && f.hi == nil && f.multiple == nil
	}
	if isInteger(d) && f.types&typeInt == 0 || !isInteger(d) && f.types&typeFrac == 0 {
		return false
	}
	if f.lo != nil {
		if n := d.compare(f.lo.at); n < 0 || n == 0 && f.lo.exclusive {
			return false
		}
	}
	if f.hi != nil {
		if n := d.compare(f.hi.at); n > 0 || n == 0 && f.hi.exclusive {
			return false
		}
	}
	for _, m := range f.multiple {
		if !multiple(d, m) {
			return false
		}
	}
	return true
}

func (c *schemaCompiler) validString(s string, f *flat) (bool, error) {
	n := int32(utf8.RuneCountInString(s))
	if n < f.strings.min || n > f.strings.max {
		return false, nil
	}
	for _, p := range f.strings.patterns {
		if ok, err := c.matchesPattern(p, s); !ok || err != nil {
			return false, err
		}
	}
	for _, p := range f.strings.not {
		if ok, err := c.matchesPattern(p, s); ok || err != nil {
			return false, err
		}
	}
	for _, name := range f.strings.formats {
		g, err := c.formatGraph(name)
		if err != nil || !g.matches(s) {
			return false, err
		}
	}
	return true, nil
}

func (c *schemaCompiler) validArray(v *value, f *flat) (bool, error) {
	n := int32(len(v.arr))
	if n < f.arrays.min || n > f.arrays.max {
		return false, nil
	}
	for i, x := range v.arr {
		if ok, err := c.validConj(x, c.itemSchemas(f, i)); !ok || err != nil {
			return false, err
		}
		if !f.arrays.unique {
			continue
		}
		if err := c.step(i); err != nil {
			return false, err
		}
		for _, y := range v.arr[:i] {
			if equalValues(x, y, &c.steps) {
				return false, nil
			}
		}
	}
	for _, s := range f.arrays.contains {
		found := false
		for i := 0; i < len(v.arr) && !found; i++ {
			var err error
			if found, err = c.validConj(v.arr[i], []*value{s}); err != nil {
				return false, err
			}
		}
		if !found {
			return false, nil
		}
	}
	return true, nil
}

func (c *schemaCompiler) validObject(v *value, f *flat) (bool, error) {
	n := int32(len(v.keys))
	if n < f.objects.min || n > f.objects.max {
		return false, nil
	}
	for _, k := range f.objects.required {
		if v.get(k) == nil {
			return false, nil
		}
	}
	for i, k := range v.keys {
		conj, err := c.property(f, k)
		if err != nil || conj == nil {
			return false, err
		}
		if ok, err := c.validConj(v.vals[i], conj); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// mostEmpty is how deep emptyConj looks into properties and items.
const mostEmpty = 4

// emptyConj reports whether no value is valid for all schemas of conj. It may report false where
// that takes a closer look.
func (c *schemaCompiler) emptyConj(conj []*value) (bool, error) {
	if c.depth >= mostEmpty {
		return false, nil
	}
	c.depth++
	defer func() { c.depth-- }()
	flats, err := c.flatten(conj)
	if err != nil {
		return false, err
	}
	for _, f := range flats {
		if empty, err := c.emptyFlat(f); !empty || err != nil {
			return false, err
		}
	}
	return true, nil
}

// emptyFlat is emptyConj for one alternative.
func (c *schemaCompiler) emptyFlat(f *flat) (bool, error) {
	if f.limited {
		for _, l := range f.lits {
			if ok, err := c.valid(l, f); ok || err != nil {
				return false, err
			}
		}
		return true, nil
	}
	if f.types&typeNull != 0 && !f.excludes(&value{kind: 'n'}, &c.steps) {
		return false, nil
	}
	if f.types&typeBool != 0 && !(f.excludes(boolValue(true), &c.steps) && f.excludes(boolValue(false), &c.steps)) {
		return false, nil
	}
	if f.types&typeNumber != 0 {
		if e, err := c.number(f); err != nil || e.kind != kindNone {
			return false, err
		}
	}
	if f.types&typeString != 0 {
		s := &f.strings
		if len(s.patterns)+len(s.formats)+len(s.not) == 0 {
			return false, nil
		}
		if e, err := c.string(f); err != nil || e.kind != kindNone {
			return false, err
		}
	}
	if f.types&typeArray != 0 {
		if empty, err := c.emptyArray(f); !empty || err != nil {
			return false, err
		}
	}
	if f.types&typeObject != 0 {
		return c.emptyObject(f)
	}
	return true, nil
}

func (c *schemaCompiler) emptyArray(f *flat) (bool, error) {
	for i := range min(f.arrays.min, 16) {
		if empty, err := c.emptyConj(c.itemSchemas(f, int(i))); empty || err != nil {
			return empty, err
		}
	}
	for _, s := range f.arrays.contains {
		if empty, err := c.emptyConj([]*value{s}); empty || err != nil {
			return empty, err
		}
	}
	return false, nil
}

func (c *schemaCompiler) emptyObject(f *flat) (bool, error) {
	if int(f.objects.max) < len(f.objects.required) {
		return true, nil
	}
	for _, k := range f.objects.required {
		conj, err := c.property(f, k)
		if err != nil || conj == nil {
			return err == nil, err
		}
		if empty, err := c.emptyConj(conj); empty || err != nil {
			return empty, err
		}
	}
	return false, nil
}
