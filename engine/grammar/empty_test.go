package grammar

import (
	"errors"
	"testing"
)

// The error of a schema without an instance names a keyword and its place, for arguments too.
func TestEmptySchemas(t *testing.T) {
	for _, c := range []struct{ schema, keyword, pointer string }{
		{`false`, "json_schema", "#"},
		{`{"type":"object","properties":{"x":false},"required":["x"]}`, "required", "#/required"},
		{`{"type":"object","required":["x"],"additionalProperties":false}`, "required", "#/required"},
		{`{"type":"object","properties":{"a":{"type":"string","enum":[1,2]}},"required":["a"]}`, "enum", "#/properties/a/enum"},
		{`{"type":"object","properties":{"a":{"$ref":"#/$defs/b"}},"required":["a"],"$defs":{"b":{"allOf":[{"type":"string"},{"type":"null"}]}}}`, "type", "#/$defs/b/allOf/1/type"},
		{`{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}`, "$ref", "#"},
		{`{"type":"object","properties":{"a":{"type":"string","pattern":"[^\\s\\S]"}},"required":["a"]}`, "pattern", "#/properties/a/pattern"},
		{`{"type":"object","minProperties":2,"properties":{"a":{}},"additionalProperties":false}`, "minProperties", "#/minProperties"},
		{`{"type":"object","maxProperties":1,"required":["a","b"]}`, "maxProperties", "#/maxProperties"},
		{`{"type":"object","minProperties":3,"maxProperties":1}`, "maxProperties", "#/maxProperties"},
		{`{"not":{}}`, "not", "#/not"},
		{`{"type":"string","anyOf":[{"type":"null"},{"type":"integer"}]}`, "anyOf", "#/anyOf"},
		{`{"type":"array","items":false,"minItems":1}`, "minItems", "#/minItems"},
	} {
		for object, src := range []Source{{Kind: JSONSchema, Text: []byte(c.schema)},
			{Kind: StructuralTag, Text: []byte(`{"format":{"type":"json_schema","object":true,"json_schema":` + c.schema + `}}`)},
			{Kind: StructuralTag, Text: []byte(`{"format":{"type":"parameters","notation":"text","json_schema":` + c.schema + `}}`)}} {
			_, err := Compile(src, DefaultLimits())
			var e *Error
			if !errors.As(err, &e) || !errors.Is(err, ErrEmpty) {
				t.Errorf("%s: %v", src.Text, err)
				continue
			}
			keyword, pointer := c.keyword, c.pointer
			if object > 0 {
				if c.keyword == "minItems" || c.keyword == "anyOf" { // they have no object before that
					keyword, pointer = "type", "#/type"
				}
				pointer = "#/format/json_schema" + pointer[1:]
			}
			if e.Keyword != keyword || e.Pointer != pointer {
				t.Errorf("%s: %v, want %s at %s", src.Text, err, keyword, pointer)
			}
		}
	}
	_, err := Compile(Source{Kind: JSONSchema, Text: []byte(`{"type":["object"],"const":[1]}`)}, DefaultLimits())
	const want = "const at #/const: accepts no text: const leaves no value of type object"
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// An alternative that commits excludes the others where both read a byte.
func TestCommit(t *testing.T) {
	const tag = `{"format":{"type":"or","elements":[` +
		`{"type":"sequence","elements":[{"type":"const_string","value":"{\"name\": \"f\": ","commit":true},{"type":"regex","pattern":"[0-9]{2}!"}]},` +
		`{"type":"regex","pattern":"[^!]*"}]}}`
	src := Source{Kind: StructuralTag, Text: []byte(tag), Special: []string{"\x00"}}
	for text, want := range map[string]bool{
		`{"name": "f": 12!`: true, `{"name": "f": 12`: false, `{"name": "f": x`: false, `{"name": "f":`: true, `{"name": "f":x`: true, `{"name": "g": x`: true, ``: true, ` {"name": "f": x`: true,
	} {
		if got := acceptAll(t, src, text); got != want {
			t.Errorf("%q is accepted: %v", text, got)
		}
	}
}
