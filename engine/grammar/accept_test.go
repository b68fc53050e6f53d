package grammar

import (
	"strings"
	"testing"
)

func acceptAll(t testing.TB, src Source, text string) bool {
	t.Helper()
	g, err := Compile(src, DefaultLimits())
	if err != nil {
		t.Fatalf("%s: %v", clip(string(src.Text)), err)
	}
	a, err := NewAutomaton(g, nil, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	m, err := a.NewMatcher()
	if err != nil {
		t.Fatal(err)
	}
	return m.AcceptBytes([]byte(text)) == nil && m.Complete()
}

func TestAccepts(t *testing.T) {
	for _, c := range []struct {
		kind    Kind
		src     string
		yes, no []string
	}{
		{Regex, `a+b{2,3}|c`, []string{"abb", "aaabbb", "c"}, []string{"ab", "abbbb", "", "cc"}},
		{Regex, `^(?:foo|ba[rz])$`, []string{"foo", "bar"}, []string{"fo"}},
		{JSONSchema, `{"type":"string","minLength":2,"maxLength":3}`, []string{`"ab"`, `"a\n"`, `"äöü"`, `"\ud83d\ude00a"`}, []string{`"a"`, `"abcd"`, `"\ud83d"`}},
		{JSONSchema, `{"type":"integer","minimum":-5,"maximum":120}`, []string{"-5", "0", "7", "99", "120", "-1"}, []string{"-6", "121", "1.0", "01", "1000"}},
		{JSONSchema, `{"type":"number","minimum":1.5,"exclusiveMaximum":3}`, []string{"1.5", "1.51", "2", "2.999"}, []string{"1.4", "3", "3.0", "1.49", "1"}},
		{JSONSchema, `{"type":"number","multipleOf":0.25}`, []string{"1.5", "1.75", "0.250", "-2"}, []string{"1.4", "0.251"}},
		{JSONSchema, `{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},"required":["b"]}`,
			[]string{`{"a":1,"b":true}`, `{"b":false}`, `{ "b" : true , "c" : [1, {"x":null}] }`, `{"b":true,"aa":1}`}, []string{`{}`, `{"a":1}`, `{"b":true,"a":"x"}`, `{"b":true,"a":1}`, `{"b":1}`, `{"b":true,}`}},
		{JSONSchema, `{"type":"object","properties":{"a":true},"additionalProperties":false,"minProperties":1}`, []string{`{"a":1}`}, []string{`{}`, `{"b":1}`}},
		{JSONSchema, `{"type":"array","items":{"enum":["x","y"]},"uniqueItems":true,"minItems":1}`, []string{`["x"]`, `["y","x"]`}, []string{`[]`, `["x","x"]`, `["x",]`}},
		{JSONSchema, `{"$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},"c":{"type":"array","items":{"$ref":"#/$defs/n"}}},"required":["v"],"additionalProperties":false}},"$ref":"#/$defs/n"}`,
			[]string{`{"v":1,"c":[{"v":2,"c":[]},{"v":3}]}`}, []string{`{"c":[]}`, `{"v":1,"c":[{}]}`}},
		{JSONSchema, `{"type":"string","pattern":"^(ab)+$","maxLength":5}`, []string{`"ab"`, `"abab"`}, []string{`"ababab"`, `"aba"`, `""`}},
		{JSONSchema, `{"type":"string","pattern":"b"}`, []string{`"ab"`, `"b"`, `"xbx"`}, []string{`"a"`}},
		{JSONSchema, `{"type":"string","format":"date"}`, []string{`"2024-02-29"`, `"2023-12-31"`}, []string{`"2023-02-29"`, `"2023-13-01"`}},
		{JSONSchema, `{"type":"string","format":"email"}`, []string{`"a.b-c@x.org"`, `"` + strings.Repeat("a", 64) + `@x"`, `"a@` + strings.Repeat("abc.", 10) + `de"`},
			[]string{`"` + strings.Repeat("a", 65) + `@x"`, `"` + strings.Repeat("a.", 32) + `a@x"`, `"a..b@x"`, `".a@x"`, `"a.@x"`, `"@x"`, `"a@` + strings.Repeat(strings.Repeat("a", 63)+".", 4) + `a"`}},
		{JSONSchema, `{"type":"string","format":"hostname","minLength":2}`, []string{`"a-b.x"`, `"` + strings.Repeat(strings.Repeat("a", 63)+".", 2) + `a"`, `"` + strings.Repeat("a.", 15) + `a"`},
			[]string{`"a"`, `"-a"`, `"a-.b"`, `"` + strings.Repeat("a", 64) + `"`, `"` + strings.Repeat(strings.Repeat("a", 62)+".", 5) + `a"`}},
		{JSONSchema, `{"oneOf":[{"required":["a"]},{"required":["b"]}],"type":"object"}`, []string{`{"a":1}`, `{"b":1,"c":2}`}, []string{`{"a":1,"b":1}`, `{"c":1}`}},
		{JSONSchema, `{"if":{"properties":{"k":{"const":"x"}},"required":["k"]},"then":{"required":["a"]},"type":"object","properties":{"k":{"type":"string"}}}`,
			[]string{`{"k":"x","a":1}`, `{"k":"y"}`, `{}`}, []string{`{"k":"x"}`}},
		{JSONSchema, `{"type":"string","not":{"enum":["a"]}}`, []string{`"b"`, `""`, `"ab"`}, []string{`"a"`}},
		{JSONSchema, `{"type":"object","patternProperties":{"^x":{"type":"integer"}},"additionalProperties":{"type":"string"}}`, []string{`{"x1":1,"y":"s"}`}, []string{`{"x1":"s"}`, `{"y":1}`}},
	} {
		for _, s := range c.yes {
			if !acceptAll(t, Source{Kind: c.kind, Text: []byte(c.src)}, s) {
				t.Errorf("%s refuses %s", c.src, s)
			}
		}
		for _, s := range c.no {
			if acceptAll(t, Source{Kind: c.kind, Text: []byte(c.src)}, s) {
				t.Errorf("%s accepts %s", c.src, s)
			}
		}
	}
}
