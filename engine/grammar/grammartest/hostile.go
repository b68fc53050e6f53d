// Package grammartest has hostile JSON schemas and patterns for tests of what compiles them.
//
// It knows nothing of grammars: a schema is a text, and what is to become of it is the test's.
package grammartest

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// Schemas returns JSON schemas that broke other programs, or were made to, by a name: large counts,
// long lists, references in circles, surrogates, empty languages. Some are none.
func Schemas() map[string]string {
	out := map[string]string{
		"minItems 1e8":          `{"type":"array","items":{"type":"integer"},"minItems":100000000}`,
		"maxLength 1e9":         `{"type":"string","minLength":999999999,"maxLength":1000000000}`,
		"counts of counts":      `{"type":"array","minItems":1000000,"maxItems":2000000,"items":{"type":"array","minItems":1000000,"items":{"type":"string","maxLength":1000000}}}`,
		"nested items":          strings.Repeat(`{"items":`, 3000) + `true` + strings.Repeat(`}`, 3000),
		"deep arrays":           strings.Repeat(`[`, 100000),
		"not a schema":          `[]`,
		"not everything":        `{"not":{}}`,
		"not itself":            `{"not":{"$ref":"#"}}`,
		"itself":                `{"$ref":"#"}`,
		"circle":                `{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}`,
		"circle of anyOf":       `{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}`,
		"circle of oneOf":       `{"oneOf":[{"$ref":"#"},{"type":"string"}]}`,
		"endless object":        `{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"],"additionalProperties":false}`,
		"endless array":         `{"type":"array","items":{"$ref":"#"},"minItems":1}`,
		"deep recursion":        `{"type":"array","items":{"$ref":"#"}}`,
		"allOf bomb":            `{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/b"}]},"b":{"allOf":[{"$ref":"#/$defs/c"},{"$ref":"#/$defs/c"}]},"c":{"anyOf":[{"type":"string"},{"type":"null"}]}},"$ref":"#/$defs/a"}`,
		"anyOf bomb":            `{"allOf":[` + strings.TrimSuffix(strings.Repeat(`{"anyOf":[{"minLength":1},{"maxLength":5},{"pattern":"a"},{"type":"null"}]},`, 20), ",") + `]}`,
		"oneOf bomb":            `{"oneOf":[` + strings.TrimSuffix(strings.Repeat(`{"properties":{"a":{"oneOf":[{"type":"string"},{"minLength":2}]}}},`, 40), ",") + `]}`,
		"if bomb":               `{"allOf":[` + strings.TrimSuffix(strings.Repeat(`{"if":{"properties":{"a":{"const":1}}},"then":{"required":["b"]},"else":{"required":["c"]}},`, 30), ",") + `]}`,
		"pattern and length":    `{"type":"string","pattern":"^(a|b)*a(a|b){10}$","minLength":5,"maxLength":100000}`,
		"patterns":              `{"allOf":[{"pattern":"a.*b.*c"},{"pattern":"c.*b.*a"},{"pattern":"(ab)+"},{"pattern":"^.{10,500}$"}],"type":"string"}`,
		"patternProperties":     `{"patternProperties":{"a":{"type":"string"},"b":{"minLength":2},"c":{"type":"null"},"d":true,"e":false,"f":{"type":"integer"},"^(.*)(a|b)*$":true}}`,
		"multiples":             `{"type":"integer","multipleOf":7919,"minimum":1e300}`,
		"number past the limit": `{"type":"number","minimum":1e999999}`,
		"digits":                `{"type":"number","minimum":0.` + strings.Repeat("1", 3000) + `}`,
		"empty enum":            `{"enum":[]}`,
		"half a pair":           `{"const":"\ud800"}`,
		"escaped key":           `{"properties":{"\"\\\u0000\u007f\ud83d\ude00":{"type":"null"}},"required":["\"\\\u0000\u007f\ud83d\ude00"]}`,
		"large key":             `{"properties":{"` + strings.Repeat("k", 900_000) + `":true}}`,
		"longest key":           `{"properties":{"` + strings.Repeat("k", 190_000) + `":true}}`,
		"unique":                `{"type":"array","uniqueItems":true,"items":{"enum":[` + strings.TrimSuffix(strings.Repeat("1,", 40000), ",") + `]}}`,
		"remote":                `{"$ref":"https://example.com/x.json"}`,
	}
	add := func(name string, n int, item func(int) string, open, end string) {
		var b strings.Builder
		b.WriteString(open)
		for i := range n {
			if i > 0 {
				b.WriteString(",")
			}
			b.WriteString(item(i))
		}
		b.WriteString(end)
		out[name] = b.String()
	}
	add("50,000 enums", 50_000, func(i int) string { return fmt.Sprintf("%q", fmt.Sprintf("value-%d", i*7919%50_000)) }, `{"enum":[`, `]}`)
	add("40,000 names", 40_000, func(i int) string { return fmt.Sprintf("%q", fmt.Sprint("n", i)) }, `{"type":"object","required":[`, `]}`)
	add("20,000 properties", 20_000, func(i int) string { return fmt.Sprintf(`"p%d":{"type":"integer"}`, i) }, `{"type":"object","properties":{`, `}}`)
	add("20,000 anyOf", 20_000, func(i int) string { return fmt.Sprintf(`{"const":%d}`, i) }, `{"anyOf":[`, `]}`)
	add("300 oneOf", 300, func(i int) string {
		return fmt.Sprintf(`{"properties":{"t":{"const":%d},"v":{"type":"string"}},"required":["t"]}`, i)
	}, `{"oneOf":[`, `]}`)
	add("3,000 allOf", 3_000, func(i int) string { return fmt.Sprintf(`{"properties":{"a%d":{"minimum":%d}}}`, i%50, i) }, `{"allOf":[`, `]}`)
	add("1,000 patterns", 1_000, func(i int) string { return fmt.Sprintf(`{"pattern":"x%d"}`, i) }, `{"type":"string","allOf":[`, `]}`)
	return out
}

// atoms are the parts of random patterns.
var atoms = []string{"a", "b", ".", "[a-f]", `\w`, `\S`, "(ab|ba)", "[^x]", "é"}

// RandomPattern returns a pattern that nests what compiles.
func RandomPattern(r *rand.Rand) string {
	var b strings.Builder
	for range 1 + r.IntN(12) {
		fmt.Fprintf(&b, "(%s%s{%d,%d})", atoms[r.IntN(len(atoms))], []string{"", "*", "+", "?"}[r.IntN(4)]+atoms[r.IntN(len(atoms))], r.IntN(5), 5+r.IntN(2000))
		if r.IntN(2) == 0 {
			fmt.Fprintf(&b, "{%d,%d}", r.IntN(3), 3+r.IntN(300))
		}
	}
	return b.String()
}

// RandomSchema returns a schema that nests what compiles: if i%3 is 1, a string with a pattern, and
// else any type.
func RandomSchema(r *rand.Rand, i int) string {
	if i%3 == 1 {
		return fmt.Sprintf(`{"type":"string","minLength":%d,"maxLength":%d,"pattern":"^(%s%s{%d,%d})*$"}`, r.IntN(50), 50+r.IntN(5000), atoms[r.IntN(3)], atoms[r.IntN(3)], r.IntN(4), 4+r.IntN(60))
	}
	keys := []string{"anyOf", "oneOf", "allOf"}
	var nest func(depth int) string
	nest = func(depth int) string {
		if depth == 0 {
			return []string{`{"type":"string"}`, `{"minimum":3}`, `{"enum":[1,"a",null]}`, `{"$ref":"#"}`, `{"required":["a"]}`, `{"pattern":"a+b"}`}[r.IntN(6)]
		}
		switch r.IntN(4) {
		case 0:
			return fmt.Sprintf(`{"properties":{"a":%s,"b":%s},"additionalProperties":%s}`, nest(depth-1), nest(depth-1), nest(depth-1))
		case 1:
			return fmt.Sprintf(`{"items":%s,"maxItems":%d}`, nest(depth-1), r.IntN(1_000_000))
		}
		return fmt.Sprintf(`{%q:[%s,%s,%s]}`, keys[r.IntN(3)], nest(depth-1), nest(depth-1), nest(depth-1))
	}
	return nest(1 + r.IntN(5))
}
