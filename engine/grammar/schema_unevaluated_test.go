package grammar

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// Unevaluated members and items, $dynamicRef and contains are enforced where the schema alone decides
// what they apply to, and are refused by name elsewhere.
func TestUnevaluated(t *testing.T) {
	for _, c := range []struct {
		schema  string
		yes, no []string
		refused string // the keyword
	}{
		{`{"allOf":[{"properties":{"a":{"type":"integer"}}},{"$ref":"#/$defs/b"}],"unevaluatedProperties":false,"$defs":{"b":{"patternProperties":{"^b":{"type":"null"}}}}}`,
			[]string{`{}`, `{"a":1}`, `{"a":1,"b2":null}`, `3`}, []string{`{"c":1}`, `{"a":"x"}`, `{"b":1}`}, ""},
		{`{"allOf":[{"properties":{"a":true}},{"properties":{"b":true},"unevaluatedProperties":{"type":"string"}}]}`,
			[]string{`{"a":"x","b":1}`, `{"b":1,"z":"x"}`}, []string{`{"a":1}`, `{"z":1}`}, ""},
		{`{"allOf":[{"additionalProperties":{"type":"null"}}],"unevaluatedProperties":false}`, []string{`{"z":null}`}, []string{`{"z":1}`}, ""},
		{`{"properties":{"a":true},"not":{"required":["b"]},"unevaluatedProperties":false}`, []string{`{"a":1}`, `{}`}, []string{`{"b":1}`, `{"c":1}`}, ""},
		{`{"anyOf":[{"properties":{"a":true}},true],"unevaluatedProperties":false}`, nil, nil, "unevaluatedProperties"},
		{`{"allOf":[{"oneOf":[{"properties":{"a":true}},false]}],"unevaluatedProperties":false}`, nil, nil, "unevaluatedProperties"},
		{`{"unevaluatedProperties":false,"allOf":[{"$ref":"#"}]}`, nil, nil, "unevaluatedProperties"},
		{`{"prefixItems":[{"type":"integer"}],"allOf":[{"prefixItems":[true,{"type":"null"}]}],"unevaluatedItems":{"type":"boolean"}}`,
			[]string{`[1, null, true]`, `[1]`, `[]`}, []string{`[1, 2]`, `[1, null, 3]`}, ""},
		{`{"items":{"type":"null"},"unevaluatedItems":false}`, []string{`[null, null]`}, []string{`[1]`}, ""},
		{`{"contains":true,"unevaluatedItems":false}`, nil, nil, "unevaluatedItems"},

		{`{"contains":{"type":"null"}}`, []string{`[null]`, `[1, null, 2]`, `[null, null]`, `3`}, []string{`[]`, `[1]`}, ""},
		{`{"items":{"type":["null","integer"]},"contains":{"type":"null"},"minItems":1}`, []string{`[1, null]`}, []string{`[1]`, `["a", null]`}, ""},
		{`{"contains":{},"minContains":2,"maxContains":3}`, []string{`[1, 2]`, `[1, 2, 3]`}, []string{`[1]`, `[1, 2, 3, 4]`}, ""},
		{`{"contains":false}`, []string{`{}`}, []string{`[]`, `[1]`}, ""},
		{`{"contains":{"const":1},"minContains":0}`, []string{`[]`, `[2]`}, nil, ""},
		{`{"contains":{"const":1},"minContains":3,"maxContains":2}`, []string{`1`}, []string{`[]`, `[1]`}, ""},
		{`{"enum":[[1],[2],[]],"contains":{"const":1}}`, []string{`[1]`}, []string{`[2]`, `[]`}, ""},
		{`{"contains":{"const":1},"maxContains":2}`, nil, nil, "contains"},
		{`{"contains":{"const":1},"minItems":2}`, nil, nil, "contains"},
		{`{"allOf":[{"contains":{"const":1}},{"contains":{"const":2}}]}`, nil, nil, "contains"},
		{`{"enum":["a",1],"contains":{"const":1},"maxContains":2}`, []string{`"a"`, `1`}, []string{`[1]`, `2`}, ""},
		{`{"enum":["a",[1]],"contains":{"const":1},"maxContains":2}`, nil, nil, "contains"},
		{`{"type":"object","contains":{"const":1},"maxContains":2}`, []string{`{}`}, []string{`[1]`}, ""},
		{`{"if":{"contains":{"const":1}},"then":{"maxItems":1}}`, nil, nil, "if"},
		{`{"type":"array","contains":{"type":"string","enum":[1]}}`, nil, nil, "type"},

		{`{"type":"object","properties":{"c":{"$dynamicRef":"#n"}},"$dynamicAnchor":"n","required":["v"]}`, []string{`{"c":{"v":1},"v":2}`}, []string{`{"c":{},"v":2}`}, ""},
		{`{"$id":"http://x/r","$dynamicAnchor":"n","$ref":"s","$defs":{"s":{"$id":"s","$dynamicAnchor":"n","items":{"$dynamicRef":"#n"}}}}`, nil, nil, "$dynamicRef"},
		{`{"$defs":{"s":{"$id":"s","$anchor":"n","type":"null"}},"$dynamicRef":"s#n"}`, []string{`null`}, []string{`1`}, ""},
		{`{"type":"array","items":{"$recursiveRef":"#"}}`, []string{`[[], [[]]]`}, []string{`[1]`}, ""},
		{`{"$recursiveAnchor":true,"type":"array","items":{"$recursiveRef":"#"}}`, nil, nil, "$recursiveRef"},

		// In draft 7 a $ref hides its siblings, also where it is negated.
		{`{"$schema":"http://json-schema.org/draft-07/schema#","not":{"$ref":"#/definitions/a","type":"string"},"definitions":{"a":{"type":["number","null"]}}}`, []string{`"a"`, `{}`}, []string{`1`, `null`}, ""},
	} {
		src := Source{Kind: JSONSchema, Text: []byte(c.schema)}
		if c.refused != "" {
			var e *Error
			if _, err := Compile(src, DefaultLimits()); !errors.As(err, &e) || e.Keyword != c.refused {
				t.Errorf("%s: %v, want %s", c.schema, err, c.refused)
			}
			continue
		}
		for _, text := range c.yes {
			if !acceptAll(t, src, text) {
				t.Errorf("%s refuses %s", c.schema, text)
			}
		}
		for _, text := range c.no {
			if acceptAll(t, src, text) {
				t.Errorf("%s accepts %s", c.schema, text)
			}
		}
	}
}

// What a schema has many times is compared, combined and negated within the counted steps.
func TestCountedWork(t *testing.T) {
	list := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, ","+format, i+1)
		}
		return b.String()[1:]
	}
	limits := DefaultLimits()
	limits.CompileSteps /= 10
	for _, schema := range []string{
		`{"allOf":[{"enum":[` + list(6_000, "%d") + `]},{"enum":[` + list(6_000, "-%d") + `]}]}`,
		`{"enum":[` + list(6_000, "%d") + `],"not":{"enum":[` + list(6_000, "-%d") + `]}}`,
		`{"enum":[[` + list(6_000, "%d") + `]],"uniqueItems":true}`,
		`{"enum":[[` + list(6_000, "%d") + `]],"contains":{"enum":[` + list(6_000, "-%d") + `]}}`,
		`{"oneOf":[` + list(2_000, `{"required":["k%d"]}`) + `]}`,
		`{"oneOf":[` + list(1_000, `{"const":{"a":[0,0,0,0,0,0,0,0,0,0],"b":%d}}`) + `]}`,
		`{"oneOf":[` + list(35, `{"type":"object","properties":{"a%d":{"maxLength":0},"b%[1]d":{"maxLength":1},"c%[1]d":{"maxLength":2}},"maxProperties":4}`) + `]}`,
		`{"allOf":[` + list(100, `{"patternProperties":{"a{%d}":{"type":"string"}}}`) + `]}`,
		`{"properties":{` + list(100, `"p%[1]d":{"type":"integer","multipleOf":1%03[1]d}`) + `}}`,
		`{"properties":{` + list(2_000, `"p%[1]d":{"type":"string","format":"hostname","maxLength":%[1]d}`) + `}}`,
		`{"properties":{` + list(300, `"p%[1]d":{"type":"string","pattern":"[a-z]{2}x","maxLength":1%03[1]d}`) + `}}`,
		`{"properties":{` + list(300, `"p%[1]d":{"type":"integer","multipleOf":%[1]d,"minimum":1,"allOf":[{"multipleOf":29}]}`) + `}}`,
		`{"properties":{` + list(100, `"p%d":{"type":"object","patternProperties":{"a.*b.*%[1]d":true,"^(a|ab|abc){%[1]d}$":true}}`) + `}}`,
		`{"allOf":[` + list(6_000, `{"multipleOf":0.1%d}`) + `]}`,
		`{"allOf":[` + list(6_000, `{"items":{"minLength":%d}}`) + `]}`,
		`{"anyOf":[` + list(400, `{"minLength":%d}`) + `],"allOf":[` + list(2_000, `{"maxItems":%d}`) + `]}`,
		`{"properties":{` + list(100, `"p%d":{"pattern":"%[1]d`+strings.Repeat("(a?", 200)+strings.Repeat(")*", 200)+`"}`) + `}}`,
	} {
		if _, err := Compile(Source{Kind: JSONSchema, Text: []byte(schema)}, limits); !errors.Is(err, ErrBudget) {
			t.Errorf("%s: %v", clip(schema), err)
		}
	}
	// Formats are determinized once, and values are written once into the keys of strings.
	for _, schema := range []string{
		`{"properties":{` + list(200, `"p%[1]d":{"type":"string","format":"uri-reference","maxLength":%[1]d}`) + `}}`,
		`{"type":"string","pattern":"^[a-z0-9]+$","not":{"enum":[` + list(20_000, `"a%d"`) + `]}}`,
	} {
		c := newSchemaCompiler(DefaultLimits())
		root, err := readJSON([]byte(schema), 100)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = c.schema(root); err != nil {
			t.Errorf("%s: %v", clip(schema), err)
		}
	}
}
