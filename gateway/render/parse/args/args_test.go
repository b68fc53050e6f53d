package args

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestTypes(t *testing.T) {
	tools := NewTools([]Tool{{"f", []byte(`{"type":"object","properties":{
		"s":{"type":"string"}, "n":{"type":"integer","description":"a \"number\""}, "sn":{"type":["string","null"]},
		"e":{"enum":["a","b"]}, "c":{"const":1}, "any":{}, "u":{"anyOf":[{"type":"boolean"},{"$ref":"#/$defs/o"}]},
		"self":{"$ref":"#"}, "loop":{"$ref":"#/$defs/loop"}, "list":{"type":"array","items":{"type":"string"}}},
		"$defs":{"o":{"type":"object"},"loop":{"anyOf":[{"$ref":"#/$defs/loop"},{"$ref":"#/$defs/loop"},{"type":"string"}]}}}`)}, {"g", nil}})
	for _, c := range []struct{ param, text, want string }{
		{"s", " 42 ", `" 42 "`}, {"s", "null", `"null"`}, {"s", "a\n\"\\\x01", `"a\n\"\\\u0001"`},
		{"n", " 42 ", `42`}, {"n", "1e5", `1e5`}, {"n", "NaN", `"NaN"`}, {"n", "007", `"007"`}, {"n", "True", `"True"`},
		{"sn", "None", `null`}, {"sn", "null", `null`}, {"sn", "5", `"5"`}, {"sn", "x", `"x"`},
		{"e", "5", `"5"`}, {"c", "1", `1`}, {"any", "5", `5`}, {"any", "True", `true`}, {"any", "x", `"x"`}, {"any", "", `""`},
		{"any", "{'a': (1, None)}", `{"a":[1,null]}`}, {"u", "False", `false`}, {"u", "{}", `{}`}, {"u", "{'a': 'b'}", `{"a":"b"}`}, {"u", "[1]", `"[1]"`},
		{"self", "{}", `{}`}, {"loop", "5", `"5"`}, {"list", "['a']", `["a"]`}, {"list", "[a", `"[a"`}, {"none", "5", `5`},
	} {
		is, known := tools.Param("f", []byte(c.param))
		if known != (c.param != "none") {
			t.Errorf("%s is known: %v", c.param, known)
		}
		if got := string(AppendValue(nil, []byte(c.text), is)); got != c.want {
			t.Errorf("%s: %q is %s, want %s", c.param, c.text, got, c.want)
		}
	}
	if !tools.Knows([]byte("g")) || tools.Knows([]byte("h")) {
		t.Error("the names of tools are wrong")
	}
}

// Schemas of a request whose references multiply are read within a bound.
func TestHostileSchema(t *testing.T) {
	ref := strings.TrimSuffix(strings.Repeat(`{"$ref":"#/$defs/a"},`, 1000), ",")
	schema := fmt.Appendf(nil, `{"properties":{"p":{"$ref":"#/$defs/a"}},"$defs":{"a":{"anyOf":[%s]}}}`, ref)
	left := maxReferences
	schemaOf(schema, &left)
	if left > 0 {
		t.Errorf("%d references are left", left)
	}
}

func schemaOf(b []byte, left *int) map[string]Types { return schema{b, left}.params() }

// A value is valid for the scanner if it is for encoding/json, however it is split.
func TestScanner(t *testing.T) {
	parts := strings.Split("{|}|[|]|:|,|\"|a|\"a\"|\"\\u00e9\"|\\|\\n|\"\\\"\"|1|0|-|.|1.5|e|E+|1e-2|true|fals|e|null| |\n|é|<|\x01", "|")
	rnd := rand.New(rand.NewPCG(5, 6))
	nValid := 0
	for range 300_000 {
		var v []byte
		if rnd.IntN(2) == 0 { // likely to be valid
			v, _ = json.Marshal(randomValue(rnd, 3))
		}
		for range rnd.IntN(6) {
			at := rnd.IntN(len(v) + 1)
			v = slices.Insert(v, at, []byte(parts[rnd.IntN(len(parts))])...)
		}
		want := json.Valid(v) && len(v) > 0 && !IsSpace(v[0]) && !IsSpace(v[len(v)-1])
		if want {
			nValid++
		}
		if got := TypeOf(v) != 0; got != want {
			t.Fatalf("%q is valid: %v, want %v", v, got, want)
		}
	}
	if nValid < 10_000 {
		t.Errorf("only %d values are valid", nValid)
	}
}

func randomValue(rnd *rand.Rand, depth int) any {
	switch n := rnd.IntN(8); {
	case depth > 0 && n == 0:
		return []any{randomValue(rnd, depth-1), randomValue(rnd, depth-1)}
	case depth > 0 && n < 3:
		return map[string]any{"a": randomValue(rnd, depth-1), "b\n": randomValue(rnd, depth-1)}
	case n < 5:
		return rnd.NormFloat64() * 1e9
	case n == 5:
		return "x\"\\é"
	case n == 6:
		return true
	}
	return nil
}
