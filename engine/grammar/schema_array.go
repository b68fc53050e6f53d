package grammar

import "slices"

// array returns the arrays of a flat.
func (c *schemaCompiler) array(f *flat) (*expr, error) {
	a := &f.arrays
	most := a.max
	prefix := 0
	for _, p := range a.items {
		prefix = max(prefix, len(p.prefix))
	}
	if len(a.contains) > 0 {
		return c.containing(f, prefix)
	}
	if a.unique && most > 1 {
		return c.uniqueArray(f, prefix)
	}
	// Items from the first that no value is valid for are not allowed.
	var items []*expr
	for i := 0; i < prefix && i < int(most); i++ {
		e, err := c.item(f, i)
		if err != nil {
			return nil, err
		}
		if e.kind == kindNone {
			most = int32(i)
			break
		}
		items = append(items, e)
	}
	rest := noString
	if most > int32(len(items)) {
		var err error
		if rest, err = c.item(f, prefix); err != nil {
			return nil, err
		}
	}
	if rest.kind == kindNone {
		most = min(most, int32(len(items)))
	}
	if most < a.min {
		return noString, nil
	}
	return seq(lit("["), c.space, c.items(items, rest, a.min, most), lit("]")), nil
}

// containing returns the arrays with an item of contains: items, one of these, and items.
func (c *schemaCompiler) containing(f *flat, prefix int) (*expr, error) {
	a := &f.arrays
	if len(a.contains) > 1 || prefix > 0 || a.unique || a.min > 1 || a.max != unlimited {
		return nil, refuse(f.source, "contains", "is not supported twice, or with prefixItems, uniqueItems, minItems or maxItems")
	}
	conj := c.itemSchemas(f, 0)
	item, err := c.rule(conj)
	if err != nil {
		return nil, err
	}
	found, err := c.rule(append(slices.Clip(conj), a.contains...))
	if err != nil {
		return nil, err
	}
	before := star(seq(ruleRef(item), c.space, c.comma))
	behind := star(seq(c.comma, ruleRef(item), c.space))
	return seq(lit("["), c.space, before, ruleRef(found), c.space, behind, lit("]")), nil
}

// item returns the expression of the i-th item, noString if there may be none.
func (c *schemaCompiler) item(f *flat, i int) (*expr, error) {
	conj := c.itemSchemas(f, i)
	for _, s := range conj {
		if s.kind == 'b' && !s.yes {
			return noString, nil
		}
	}
	r, err := c.rule(conj)
	if err != nil {
		return nil, err
	}
	return ruleRef(r), nil
}

func (c *schemaCompiler) itemSchemas(f *flat, i int) []*value {
	conj := []*value{}
	for _, p := range f.arrays.items {
		if i < len(p.prefix) {
			conj = append(conj, p.prefix[i])
		} else if p.rest != nil {
			conj = append(conj, p.rest)
		}
	}
	return conj
}

// items returns the items of an array with separators, each followed by whitespace.
func (c *schemaCompiler) items(prefix []*expr, rest *expr, least, most int32) *expr {
	n := int32(len(prefix))
	more := func(from int32) *expr { // items behind the first from, each after a comma
		return rep(seq(c.comma, rest, c.space), max(0, least-from), subtract(most, from))
	}
	if n == 0 {
		if most == 0 {
			return emptyString
		}
		e := seq(rest, c.space, more(1))
		if least == 0 {
			e = opt(e)
		}
		return e
	}
	e := emptyString
	if most > n {
		e = more(n)
	}
	for i := n - 1; i >= 0; i-- {
		e = seq(prefix[i], c.space, e)
		if i > 0 {
			e = seq(c.comma, e)
		}
		if i >= least {
			e = opt(e)
		}
	}
	return e
}

func subtract(most, n int32) int32 {
	if most == unlimited {
		return unlimited
	}
	return most - n
}

// mostDistinct is the number of values of which an array of unique items may be made.
const mostDistinct = 64

// uniqueArray returns the arrays of unique items, which must be one of a list of values.
func (c *schemaCompiler) uniqueArray(f *flat, prefix int) (*expr, error) {
	if prefix > 0 {
		return nil, refuse(f.source, "uniqueItems", "is not supported with prefixItems")
	}
	flats, err := c.flatten(c.itemSchemas(f, 0))
	if err != nil {
		return nil, err
	}
	var values []*value
	for _, item := range flats {
		if !item.limited {
			return nil, refuse(f.source, "uniqueItems", "is supported only where items are of an enum")
		}
		for _, l := range item.lits {
			ok, err := c.valid(l, item)
			if err != nil {
				return nil, err
			}
			twice := false
			for _, v := range values {
				twice = twice || equalValues(v, l, &c.steps)
			}
			if ok && !twice {
				values = append(values, l)
			}
			if len(values) > mostDistinct {
				return nil, refuse(f.source, "uniqueItems", "has more than %d values", mostDistinct)
			}
		}
	}
	var alts []*expr
	for i, v := range values {
		e, err := c.literal(v)
		if err != nil {
			return nil, err
		}
		alts = append(alts, seq(&expr{kind: kindTake, bit: int32(i)}, e))
	}
	most := min(f.arrays.max, int32(len(values)))
	if most < f.arrays.min {
		return noString, nil
	}
	items := c.items(nil, alt(alts...), f.arrays.min, most)
	return &expr{kind: kindDistinct, subs: []*expr{seq(lit("["), c.space, items, lit("]"))}}, nil
}
