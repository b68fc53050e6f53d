package args

import (
	"bytes"
	"maps"
	"slices"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Types is a set of types of JSON values; 0: not known.
type Types uint8

// The types of JSON.
const (
	String Types = 1 << iota
	Number
	Bool
	Null
	Array
	Object
)

// Tool is a function that a request offers.
type Tool struct {
	Name       string
	Parameters []byte // its JSON schema, valid JSON; empty: not given
}

// Tools are the functions of a request. A nil *Tools knows none. It is immutable.
type Tools struct {
	params map[string]map[string]Types // by the names of tool and parameter; nil: no schema
}

// NewTools returns the tools of a request. It reads the types of their parameters and keeps
// nothing of the schemas.
func NewTools(list []Tool) *Tools {
	t := &Tools{params: make(map[string]map[string]Types, len(list))}
	left := maxReferences
	for _, tool := range list {
		t.params[tool.Name] = schema{tool.Parameters, &left}.params()
	}
	return t
}

// Knows reports whether a tool has the name, or no tools are known.
func (t *Tools) Knows(name []byte) bool {
	if t == nil {
		return true
	}
	_, ok := t.params[string(name)]
	return ok
}

// Param returns the types of a parameter. known is false if the tool has a schema that does not
// declare the parameter.
func (t *Tools) Param(tool string, name []byte) (is Types, known bool) {
	if t == nil || t.params[tool] == nil {
		return 0, true
	}
	is, known = t.params[tool][string(name)]
	return is, known
}

// Params returns the sorted names of the parameters that a tool declares.
func (t *Tools) Params(tool string) []string {
	return slices.Sorted(maps.Keys(t.params[tool]))
}

// Names returns the names of the types, as JSON Schema has them.
func (is Types) Names() (names []string) {
	for i, name := range []string{"string", "number", "boolean", "null", "array", "object"} {
		if is>>i&1 != 0 {
			names = append(names, name)
		}
	}
	return names
}

// Bounds of what is read of schemas. Beyond them a parameter's types are not known.
const (
	maxSchemaDepth = 16   // schemas within each other, references included
	maxReferences  = 1000 // that are resolved for a request's tools
)

// schema is the root of a tool's schemas.
type schema struct {
	root []byte
	left *int // references that may still be resolved
}

// params returns the types of an object schema's properties; nil: the schema declares none.
func (r schema) params() map[string]Types {
	var out map[string]Types
	properties := member(r.root, "properties")
	if len(properties) == 0 || properties[0] != '{' {
		return nil
	}
	for s := jsonscan.Object(properties); s.Next(); {
		name := string(s.Key())
		if out == nil {
			out = map[string]Types{}
		}
		out[name] = r.types(s.Unchecked(), 0)
	}
	return out
}

// types returns the types that a schema below the root allows.
func (r schema) types(b []byte, depth int) (is Types) {
	if depth > maxSchemaDepth || len(b) == 0 || b[0] != '{' {
		return 0
	}
	for s := jsonscan.Object(b); s.Next(); {
		key, v := string(s.Key()), s.Unchecked()
		switch key {
		case "type":
			is |= typeNames(v)
		case "const":
			is |= TypeOf(v)
		case "enum":
			is |= elements(v, TypeOf)
		case "anyOf", "oneOf", "allOf":
			is |= elements(v, func(e []byte) Types { return r.types(e, depth+1) })
		case "$ref":
			is |= r.types(r.resolve(v), depth+1)
		case "nullable":
			if string(v) == "true" {
				is |= Null
			}
		}
	}
	return is
}

// elements returns the union of of over the elements of an array.
func elements(array []byte, of func([]byte) Types) (is Types) {
	for s := jsonscan.List(array); s.Next(); {
		e := s.Unchecked()
		if e == nil {
			break
		}
		is |= of(e)
	}
	return is
}

// typeNames returns the types of a schema's keyword "type".
func typeNames(v []byte) Types {
	switch string(v) {
	case `"string"`:
		return String
	case `"number"`, `"integer"`:
		return Number
	case `"boolean"`:
		return Bool
	case `"null"`:
		return Null
	case `"array"`:
		return Array
	case `"object"`:
		return Object
	}
	return elements(v, func(e []byte) Types {
		if len(e) > 0 && e[0] == '[' {
			return 0
		}
		return typeNames(e)
	})
}

// resolve returns the schema that a local reference names; nil: there is none.
func (r schema) resolve(ref []byte) []byte {
	if *r.left--; *r.left < 0 || len(ref) < 3 || ref[0] != '"' || ref[1] != '#' {
		return nil
	}
	at := r.root
	for part := range bytes.SplitSeq(ref[2:len(ref)-1], []byte("/")) {
		if len(part) > 0 {
			at = member(at, string(part))
		}
	}
	return at
}

// member returns the value of an object's member; nil: there is none, or b is no object.
func member(b []byte, name string) []byte {
	if at := jsonscan.Space(b, 0); at == len(b) || b[at] != '{' {
		return nil
	}
	for s := jsonscan.Object(b); s.Next(); {
		key := string(s.Key())
		if v := s.Unchecked(); key == name || v == nil {
			return v
		}
	}
	return nil
}

// TypeOf returns the type of a value; 0: v is not valid JSON.
func TypeOf(v []byte) Types {
	var s Scanner
	if n := s.Feed(v); n < len(v) || len(v) == 0 {
		return 0
	}
	if s.End(); !s.OK() {
		return 0
	}
	switch v[0] {
	case '{':
		return Object
	case '[':
		return Array
	case '"':
		return String
	case 't', 'f':
		return Bool
	case 'n':
		return Null
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return Number
	}
	return 0 // white space precedes the value
}

// AppendValue appends the text of a parameter as JSON of one of the types. Text that is JSON of
// such a type is appended as it is. A text that is none becomes a string.
func AppendValue(dst, text []byte, is Types) []byte {
	if is == String {
		return AppendQuoted(dst, text)
	}
	allowed := func(k Types) bool { return k != 0 && (is == 0 || is&k != 0) }
	v := bytes.TrimSpace(text)
	if allowed(TypeOf(v)) {
		return append(dst, v...)
	}
	if js := constant(v); js != "" && allowed(TypeOf([]byte(js))) {
		return append(dst, js...)
	}
	if len(v) > 0 && (v[0] == '{' && allowed(Object|Array) || (v[0] == '[' || v[0] == '(') && allowed(Array)) {
		if out, ok := AppendLiteral(dst, v, ""); ok {
			return out
		}
	}
	return AppendQuoted(dst, text)
}
