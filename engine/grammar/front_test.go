package grammar

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

const gbnfJSON = `
# JSON, as llama.cpp's example writes it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
`

const larkSQL = `
// a small query language
start: select ";"?
select: "select"i columns "from"i NAME where?
columns: "*" | NAME ("," NAME)*
where: "where"i NAME OP (NUMBER | STRING) -> filter
OP: "=" | "<" | ">"
NAME: /[a-z_]\w*/
STRING: "'" /[^']*/ "'"
%import common.NUMBER
%import common (WS)
%ignore WS
`

const tagsOld = `{"type":"structural_tag","triggers":["<function="],"structures":[{"begin":"<function=get>","schema":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false},"end":"</function>"}]}`

const tagsNew = `{"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"tag","begin":"<think>","content":{"type":"any_text"},"end":"</think>"},
{"type":"triggered_tags","triggers":["<call"],"tags":[{"begin":"<call:x>","content":{"type":"json_schema","json_schema":{"type":"integer"}},"end":"</call>"},{"begin":"<call:y>","content":{"type":"regex","pattern":"a+"},"end":"</call>"}],"at_least_one":true,"stop_after_first":true}]}}`

// larkGuidance is a grammar as guidance writes it.
const larkGuidance = `%llguidance {}

start: pet "!" code
pet[capture]: %json {
  "properties": {"animal": {"enum": ["cat", "dog"]}, "tags": {"items": {"const": "a"}}, "next": {"$ref": "#"}},
  "type": "object", "required": ["animal"], "additionalProperties": false,
  "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}
}

code[capture="the code"]: CODE
CODE: /[a-c]/
`

// Attributes of rules that change what matches are refused by name, and so are schemas that are none.
func TestLarkRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"start[max_tokens=3]: \"a\"": `attribute "max_tokens=3" of a rule is not supported`,
		"start[capture: \"a\"":       "have no end",
		"start: %json [1]":           "",
		"start: %json {\"type\": }":  "%json needs a JSON Schema",
		"start: %json {\"contains\": {\"type\": \"null\"}, \"maxContains\": 2}": "contains",
		"start: %jsonx": "%json needs a JSON Schema",
	} {
		if _, err := Compile(Source{Kind: Lark, Text: []byte(text)}, DefaultLimits()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The schemas of a grammar share its compile steps.
func TestLarkSchemasShareSteps(t *testing.T) {
	limits := DefaultLimits()
	limits.CompileSteps = 2000
	for n, refused := range map[int]bool{1: false, 50: true} {
		text := "start: r0\n"
		for i := range n {
			text += fmt.Sprintf("r%d: %%json {\"allOf\":[{\"pattern\":\"^[a-f]{3}%d$\"},{\"pattern\":\"a\"}]}\n", i, i)
		}
		if _, err := Compile(Source{Kind: Lark, Text: []byte(text)}, limits); errors.Is(err, ErrBudget) != refused || !refused && err != nil {
			t.Errorf("%d schemas: %v", n, err)
		}
	}
}

func TestFrontEnds(t *testing.T) {
	for _, c := range []struct {
		src     Source
		yes, no []string
	}{
		{Source{Kind: EBNF, Text: []byte(gbnfJSON)}, []string{`{"a": [1, {"b": null}], "c": -0.5e3}`, `{}`}, []string{`[]`, `{"a" 1}`, `{"a":01}`}},
		{Source{Kind: EBNF, Text: []byte("root ::= \"a\" root \"b\" | \"c\"{2,3}")}, []string{"acccb", "aaccbb", "cc"}, []string{"c", "accbb"}},
		{Source{Kind: EBNF, Text: []byte("root ::= (x | y)*\nx ::= \"x\"?\n\ny ::= \"y\"\n  | \"\\u00e9\" .")}, []string{"", "xyx", "é日"}, []string{"z"}},
		{Source{Kind: Lark, Text: []byte(larkSQL)}, []string{"select * from t;", "SELECT a , b from  x where a=1.5", "select a from b where c = 'it'"}, []string{"select from t", "select * t"}},
		{Source{Kind: Lark, Text: []byte("start: \"a\" ~ 2..3 [\"b\"] (\"c\" | /d+/i)?")}, []string{"aa", "aaab", "aabDD"}, []string{"a", "aabcc"}},
		{Source{Kind: Lark, Text: []byte(larkGuidance)}, []string{`{"animal": "cat", "tags": ["a", "a"], "next": {"animal": "dog"}}!b`, `{"animal": "dog"}!c`}, []string{`{"animal":"cat"}!b`, `{"animal": "cat"}`, `{"animal": "cow"}!b`}},
		{Source{Kind: Lark, Text: []byte(`start: "[" %json {"type":"object"} "]"`)}, []string{`[{}]`, `[{"a" : [1 ]}]`}, []string{`[]`, `[3]`}},
		{Source{Kind: StructuralTag, Text: []byte(tagsOld)}, []string{"", "hi < there <function=get>{\"a\": 1}</function> bye <f", "<<function=get>{\"a\":2}</function>"}, []string{"<function=put>", "<function=get>{}</function>", "<function=get>{\"a\":1}"}},
		{Source{Kind: StructuralTag, Text: []byte(tagsNew)}, []string{"<think>hm </thin </think>ok<call:x>5</call>", "<think></think><call:y>aa</call>"}, []string{"<think></think>ok", "<call:x>5</call>", "<think></think><call:y>b</call>", "<think></think><call:x>5</call> more"}},
		{Source{Kind: Regex, Text: []byte(`\d+`), After: "</think>"}, []string{"so </think>12", "</think>1"}, []string{"12", "a</think>", "</think></think>1"}},
		{Source{Kind: Choice, Choices: []string{"a", "ab", "b"}}, []string{"a", "ab", "b"}, []string{"", "abb"}},
	} {
		for _, s := range c.yes {
			if !acceptAll(t, c.src, s) {
				t.Errorf("%s refuses %q", c.src.Text, s)
			}
		}
		for _, s := range c.no {
			if acceptAll(t, c.src, s) {
				t.Errorf("%s accepts %q", c.src.Text, s)
			}
		}
	}
}

// Special tokens are demanded as tokens where the vocabulary has them, and are never spelled.
func TestSpecialTokens(t *testing.T) {
	v := testVocabulary(1)
	call := v.special["<|call|>"]
	for _, src := range []Source{
		{Kind: EBNF, Text: []byte(`root ::= "a" <|call|> "b"`)},
		{Kind: StructuralTag, Text: []byte(`{"format":{"type":"tag","begin":"a","content":{"type":"const_string","value":"<|call|>"},"end":"b"}}`)},
	} {
		g, err := Compile(src, DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		a, err := NewAutomaton(g, v, DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		m, _ := a.NewMatcher()
		mask := make([]uint64, v.Words())
		if err := m.AcceptBytes([]byte("a")); err != nil {
			t.Fatal(err)
		}
		if err := m.Mask(mask); err != nil {
			t.Fatal(err)
		}
		if got := checkMask(t, a, m, mask); len(got) != 1 || got[0] != call {
			t.Fatalf("after a: %d", got)
		}
		if only, ok := m.Certain(); !ok || only != call {
			t.Fatalf("certain: %d %v", only, ok)
		}
		if err := m.AcceptBytes([]byte("<|call|>")); err == nil {
			t.Fatal("a special token was spelled")
		}
		if err := m.Accept(call); err != nil {
			t.Fatal(err)
		}
		if err := m.AcceptBytes([]byte("b")); err != nil || !m.Finished() {
			t.Fatal(err)
		}
	}
	g, err := Compile(Source{Kind: StructuralTag, Special: []string{"<|call|>", "<|none|>"},
		Text: []byte(`{"format":{"type":"tag","begin":"<|call|>f<|none|>","content":{"type":"regex","pattern":"x"},"end":"y<|call|>"}}`)}, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	a, err := NewAutomaton(g, v, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	m, _ := a.NewMatcher()
	if m.AcceptBytes([]byte("<")) == nil {
		t.Fatal("a special token was spelled")
	}
	for _, step := range []error{m.Accept(call), m.AcceptBytes([]byte("f<|none|>xy")), m.Accept(call)} {
		if step != nil {
			t.Fatal(step)
		}
	}
	if !m.Finished() {
		t.Fatal("the tag has not ended")
	}
	g, err = Compile(Source{Kind: EBNF, Text: []byte(`root ::= <|none|>`)}, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewAutomaton(g, v, DefaultLimits()); err == nil || !strings.Contains(err.Error(), "<|none|>") {
		t.Fatalf("a token that is not there: %v", err)
	}
}
