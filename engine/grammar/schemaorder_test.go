package grammar

import (
	"slices"
	"strings"
	"testing"
)

// orderer writes instances with their members in the order of a schema, which is the order that
// grammars demand.
type orderer struct {
	t testing.TB
	c *schemaCompiler
}

// texts returns the spellings of an instance by each alternative of the schema, without repeats.
func (o *orderer) texts(v *value, conj []*value) []string {
	flats, err := o.c.flatten(conj)
	if err != nil {
		return []string{o.text(v, nil)}
	}
	var out []string
	for _, f := range o.best(v, flats) {
		if s := o.text(v, f); !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	if out == nil {
		return []string{o.text(v, nil)}
	}
	return out
}

// best returns the alternatives for which v is valid, or all.
func (o *orderer) best(v *value, flats []*flat) []*flat {
	var valid []*flat
	for _, f := range flats {
		if ok, err := o.c.valid(v, f); ok && err == nil {
			valid = append(valid, f)
		}
	}
	if valid == nil {
		return flats
	}
	return valid
}

func (o *orderer) child(v *value, conj []*value) string {
	return o.texts(v, conj)[0]
}

func (o *orderer) text(v *value, f *flat) string {
	var parts []string
	switch v.kind {
	case '[':
		for i, x := range v.arr {
			var conj []*value
			if f != nil {
				conj = o.c.itemSchemas(f, i)
			}
			parts = append(parts, o.child(x, conj))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case '{':
		keys := v.keys
		if f != nil {
			keys = nil
			declared := o.c.declared(f)
			if f.limited {
				for _, l := range f.lits {
					if equalValues(l, v, new(int)) {
						declared = l.keys
					}
				}
			}
			for _, k := range append(slices.Clone(declared), v.keys...) {
				if v.get(k) != nil && !slices.Contains(keys, k) {
					keys = append(keys, k)
				}
			}
		}
		for _, k := range keys {
			var conj []*value
			if f != nil {
				conj, _ = o.c.property(f, k)
			}
			parts = append(parts, jsonString(k)+": "+o.child(v.get(k), conj))
		}
		return "{" + strings.Join(parts, ", ") + "}"
	}
	return scalars(v)[0]
}
