package render

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/parse"
)

// forecast is a schema with the kinds of values that formats write differently.
const forecast = `{"type":"object","properties":{
	"city":{"type":"string","minLength":2},"unit":{"enum":["C","F","None"]},"days":{"type":"integer","minimum":1,"maximum":7},
	"note":{"type":["string","null"]},"code":{"type":["string","null"],"pattern":"^[a-z<\"]{2,4}$"},"id":{"anyOf":[{"type":"integer"},{"type":"string","maxLength":4}]},
	"ok":{"type":"boolean"},"tags":{"type":"array","items":{"type":"string"},"maxItems":2},
	"deep":{"$ref":"#/$defs/deep"},"when":{"type":"string","pattern":"^[0-9]{2}-[0-9]{2}$"},"any":{},"short":{"type":"string","maxLength":3}},
	"$defs":{"deep":{"type":"object","properties":{"l<t":{"type":"array","items":{"anyOf":[{"type":"number"},{"type":"null"},{"const":"a<b"}]},"maxItems":3}},"required":["l<t"],"additionalProperties":false}},
	"required":["city","unit"],"additionalProperties":false}`

var grammarTools = []openai.Function{
	{Name: "forecast", Parameters: []byte(forecast)},
	{Name: "now"},
	{Name: "log_it", Parameters: []byte(`{"type":"object","properties":{"text":{"type":"string"}}}`), Strict: new(bool)},
}

// checkValue returns an error unless v is valid for a schema of the keywords in forecast.
func checkValue(v any, schema, root map[string]any) error {
	if ref, ok := schema["$ref"].(string); ok {
		return checkValue(v, root["$defs"].(map[string]any)[strings.TrimPrefix(ref, "#/$defs/")].(map[string]any), root)
	}
	bad := func(keyword string) error { return fmt.Errorf("%v breaks %s %v", v, keyword, schema[keyword]) }
	if enum, ok := schema["enum"].([]any); ok && !slices.Contains(enum, v) {
		return bad("enum")
	}
	if c, ok := schema["const"]; ok && c != v {
		return bad("const")
	}
	if anyOf, ok := schema["anyOf"].([]any); ok && !slices.ContainsFunc(anyOf, func(s any) bool { return checkValue(v, s.(map[string]any), root) == nil }) {
		return bad("anyOf")
	}
	kind := "null"
	switch x := v.(type) {
	case bool:
		kind = "boolean"
	case json.Number:
		kind = "number"
		if n, ok := new(big.Rat).SetString(string(x)); ok && n.IsInt() {
			kind = "integer"
		}
	case string:
		kind = "string"
		n := utf8.RuneCountInString(x)
		if least, ok := schema["minLength"].(json.Number); ok && n < int(mustInt(least)) {
			return bad("minLength")
		}
		if most, ok := schema["maxLength"].(json.Number); ok && n > int(mustInt(most)) {
			return bad("maxLength")
		}
		if p, ok := schema["pattern"].(string); ok && !regexp.MustCompile(p).MatchString(x) {
			return bad("pattern")
		}
	case []any:
		kind = "array"
		if most, ok := schema["maxItems"].(json.Number); ok && len(x) > int(mustInt(most)) {
			return bad("maxItems")
		}
		for _, e := range x {
			if items, ok := schema["items"].(map[string]any); ok {
				if err := checkValue(e, items, root); err != nil {
					return err
				}
			}
		}
	case map[string]any:
		kind = "object"
		properties, _ := schema["properties"].(map[string]any)
		for name, e := range x {
			s, ok := properties[name].(map[string]any)
			if !ok && schema["additionalProperties"] == false {
				return fmt.Errorf("%q is not declared", name)
			}
			if ok {
				if err := checkValue(e, s, root); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		}
		required, _ := schema["required"].([]any)
		for _, name := range required {
			if _, ok := x[name.(string)]; !ok {
				return fmt.Errorf("%v is missing", name)
			}
		}
	}
	if n, ok := v.(json.Number); ok {
		for keyword, sign := range map[string]int64{"minimum": 1, "maximum": -1} {
			if limit, ok := schema[keyword].(json.Number); ok && sign*(mustInt(n)-mustInt(limit)) < 0 {
				return bad(keyword)
			}
		}
	}
	types, _ := schema["type"].([]any)
	if t, ok := schema["type"].(string); ok {
		types = []any{t}
	}
	if types != nil && !slices.Contains(types, any(kind)) && !(kind == "integer" && slices.Contains(types, any("number"))) {
		return bad("type")
	}
	return nil
}

func mustInt(n json.Number) int64 {
	i, err := n.Int64()
	if err != nil {
		return 1 << 62
	}
	return i
}

func decodeNumbers(text string) (v any, err error) {
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	err = d.Decode(&v)
	return v, err
}

// walkedVocabulary has all bytes, texts of calls and the markers that a format looks for.
type walkedVocabulary struct {
	tokens  [][]byte
	special map[string]int32
	byID    bool // markers are tokens
	eos     int32
}

func newWalkedVocabulary(byID bool) *walkedVocabulary {
	v := &walkedVocabulary{special: map[string]int32{}, byID: byID}
	for c := range 256 {
		v.tokens = append(v.tokens, []byte{byte(c)})
	}
	for _, s := range []string{"", "{\"", "\":", "\", \"", "\"}", "null", "true", "]}", "é", " the", "12", "\\u00", "[]", "{}", "\\\"", "<a", "None"} {
		v.tokens = append(v.tokens, []byte(s))
	}
	v.eos = 256
	return v
}

// added is the parse.Vocabulary. Markers that are not tokens are written by tokens of the same text.
func (v *walkedVocabulary) added(text string) (int32, bool) {
	if id, ok := v.special[text]; ok {
		return id, v.byID
	}
	id := int32(len(v.tokens))
	isToken := v.byID && !strings.ContainsAny(text, " =\n`{") && len(text) > 3 && text != "function" && text != "functools"
	switch {
	case !isToken:
		v.tokens = append(v.tokens, []byte(text), []byte("\n"+text))
		return 0, false
	case id%2 == 0: // as Qwen's <tool_call>: a token whose text is shown
		v.tokens = append(v.tokens, []byte(text))
	default:
		v.tokens = append(v.tokens, nil)
	}
	v.special[text] = id
	return id, true
}

// walkCalls returns the tokens of a random answer under a grammar; nil: it did not end.
func walkCalls(t *testing.T, g *grammar.Grammar, v *walkedVocabulary, seed uint64) []int32 {
	t.Helper()
	vocab := grammar.NewVocabulary(v.tokens, v.special, []int32{v.eos})
	a, err := grammar.NewAutomaton(g, vocab, grammar.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	m, err := a.NewMatcher()
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(seed, 3))
	mask := make([]uint64, vocab.Words())
	var out []int32
	for range 1500 {
		if err := m.Mask(mask); err != nil {
			t.Fatalf("after %q: %v", v.text(out), err)
		}
		var all, closing []int32
		for id := range int32(len(v.tokens)) {
			if mask[id>>6]>>(id&63)&1 == 0 {
				continue
			}
			all = append(all, id)
			if b := v.tokens[id]; id > 272 || id == v.eos || len(b) == 1 && strings.IndexByte("\"}])\n,", b[0]) >= 0 {
				closing = append(closing, id)
			}
		}
		from := all
		if len(closing) > 0 && r.IntN(4) > 0 {
			from = closing
		}
		id := from[r.IntN(len(from))]
		if mask[v.eos>>6]>>(v.eos&63)&1 != 0 && (r.IntN(3) == 0 || len(out) > 500) {
			id = v.eos
		}
		if err := m.Accept(id); err != nil {
			t.Fatalf("%d after %q: %v", id, v.text(out), err)
		}
		if id == v.eos {
			return out
		}
		out = append(out, id)
	}
	return nil
}

func (v *walkedVocabulary) text(ids []int32) string {
	names := map[int32]string{}
	for s, id := range v.special {
		names[id] = s
	}
	var b strings.Builder
	for _, id := range ids {
		if len(v.tokens[id]) == 0 {
			b.WriteString(names[id])
		}
		b.Write(v.tokens[id])
	}
	return b.String()
}

// parsed reads an answer by the parser of its format.
func (v *walkedVocabulary) parsed(f *parse.Format, o parse.Options, ids []int32) (content string, calls []parse.Delta) {
	p := f.NewParser(o)
	var deltas []parse.Delta
	take := func() {
		for _, d := range deltas {
			switch d.Kind {
			case parse.Content:
				content += string(d.Text)
			case parse.CallStart:
				calls = append(calls, parse.Delta{Name: d.Name, Incomplete: true})
			case parse.Arguments:
				calls[d.Call].Text = append(calls[d.Call].Text, d.Text...)
			case parse.CallEnd:
				calls[d.Call].Incomplete = d.Incomplete
			}
		}
	}
	pending := ""
	for _, id := range ids {
		pending += string(v.tokens[id])
		text := pending
		for n := 1; n < utf8.UTFMax && n <= len(pending); n++ { // whole characters
			if tail := pending[len(pending)-n:]; utf8.RuneStart(tail[0]) {
				if !utf8.FullRuneInString(tail) {
					text = pending[:len(pending)-n]
				}
				break
			}
		}
		pending = pending[len(text):]
		deltas = p.Push(deltas[:0], id, text)
		take()
	}
	deltas = p.Finish(p.Push(deltas[:0], -1, pending))
	take()
	return content, calls
}

// Random answers under the grammar of each format are parsed to calls of the tools whose arguments
// match the schemas, whether markers are tokens or texts.
func TestCallGrammars(t *testing.T) {
	root, err := decodeNumbers(forecast)
	if err != nil {
		t.Fatal(err)
	}
	schema := root.(map[string]any)
	reasoning := map[string]string{"hermes": "qwen3", "glm45": "glm45", "mistral": "mistral", "kimi_k2": "kimi_k2", "openai": "openai_gptoss", "gemma4": "gemma4", "granite": "granite"}
	finished, done := map[string]int{}, 0
	for _, name := range parse.ToolParsers() {
		for mode := range 8 {
			v := newWalkedVocabulary(mode&1 != 0)
			f, err := parse.NewFormat(name, reasoning[name], v.added)
			if err != nil {
				t.Fatal(err)
			}
			if f.Tools() != name { // an alias
				continue
			}
			c := parse.Constraint{Text: mode&6 == 0, One: mode&2 != 0, Types: ArgumentTypes(grammarTools)}
			if mode&4 != 0 && f.ReasoningEnd() != "" {
				c.Start = parse.InReasoning
			}
			for i, tool := range grammarTools {
				c.Tools = append(c.Tools, parse.Tool{Index: i, Name: tool.Name, Parameters: tool.Parameters, Strict: tool.Strict == nil})
			}
			text, special, err := f.Grammar(c)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			g, err := grammar.Compile(grammar.Source{Kind: grammar.StructuralTag, Text: text, Special: special}, grammar.DefaultLimits())
			if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, text)
			}
			for seed := range uint64(4) {
				ids := walkCalls(t, g, v, seed)
				if ids == nil {
					continue
				}
				done++
				content, calls := v.parsed(f, parse.Options{Tools: c.Types, Reasoning: c.Start == parse.InReasoning}, ids)
				where := fmt.Sprintf("%s, mode %d, seed %d: %q", name, mode, seed, v.text(ids))
				if f.Reasoning() == "minimax_m2_append_think" {
					_, content, _ = strings.Cut(content, "</think>")
				}
				if !c.Text && (strings.TrimSpace(content) != "" || len(calls) == 0) || c.One && len(calls) > 1 {
					t.Errorf("%s: %d calls, content %q", where, len(calls), content)
				}
				for _, call := range calls {
					args, err := decodeNumbers(string(call.Text))
					object, isObject := args.(map[string]any)
					switch call.Name {
					case "forecast":
						if err == nil {
							err = checkValue(args, schema, schema)
						}
					case "now":
						if len(object) > 0 {
							err = fmt.Errorf("it has no parameters")
						}
					case "log_it":
					default:
						err = fmt.Errorf("no tool has the name")
					}
					if call.Incomplete || err != nil || !isObject {
						t.Errorf("%s: %s(%s): %v", where, call.Name, call.Text, err)
					}
				}
				finished[name] += len(calls)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(finished)) {
		if finished[name] < 8 {
			t.Errorf("%s: only %d calls", name, finished[name])
		}
	}
	t.Logf("%d answers of %d formats", done, len(finished))
}

// Answers of calls or of JSON with markers in its strings are read as what the grammar has: JSON is
// content byte for byte, and calls match their schemas.
func TestContentGrammars(t *testing.T) {
	const schema = `{"anyOf":[{"type":"object","properties":{"name":{"type":"string","maxLength":60},"parameters":{"type":"object"}},"required":["name"],"additionalProperties":false},` +
		`{"type":"array","items":{"anyOf":[{"type":"string","maxLength":60},{"type":"object","properties":{"name":{"enum":["now","then"]},"arguments":{"type":"object","maxProperties":1}}}]},"maxItems":3},{"type":"string","maxLength":60}]}`
	alone, err := grammar.Compile(grammar.Source{Kind: grammar.JSONSchema, Text: []byte(schema)}, grammar.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	reasoning := map[string]string{"hermes": "qwen3", "glm45": "minimax_m2_append_think", "mistral": "mistral", "openai": "openai_gptoss", "granite": "granite", "llama3_json": "deepseek_r1", "cohere_command3": "cohere_command3"}
	contents, calls := map[string]int{}, map[string]int{}
	for _, name := range parse.ToolParsers() {
		for mode := range 8 {
			v := newWalkedVocabulary(mode&1 != 0)
			f, err := parse.NewFormat(name, reasoning[name], v.added)
			if err != nil {
				t.Fatal(err)
			}
			if f.Tools() != name { // an alias
				continue
			}
			m := &Model{Text: &TextModel{format: f}}
			body := `{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":` + schema + `}}`
			if mode&4 == 0 {
				body += `,"tools":[{"type":"function","function":{"name":"now","parameters":{"type":"object","properties":{"a":{"type":"integer","maximum":9,"minimum":0}},"required":["a"],"additionalProperties":false},"strict":true}}]`
			}
			r, fault := openai.Parse(openai.Chat, []byte(body+`}`))
			if fault != nil {
				t.Fatal(fault)
			}
			start := parse.AtBeginning
			if mode&2 != 0 && f.ReasoningEnd() != "" {
				start = parse.InReasoning
			} else if mode&2 != 0 && f.Wraps() {
				start = parse.InContent
			}
			if fault := m.ConstrainCalls(r, start); fault != nil {
				t.Fatal(fault)
			}
			if !r.Grammar.Whole && start == parse.InReasoning {
				r.Grammar.After = f.ReasoningEnd()
			}
			g, err := grammar.Compile(r.Grammar.Source, grammar.DefaultLimits())
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			for seed := range uint64(6) {
				ids := walkCalls(t, g, v, seed)
				if ids == nil {
					continue
				}
				content, got := v.parsed(f, parse.Options{Tools: ArgumentTypes(r.Functions), NoTools: r.Functions == nil, Reasoning: start == parse.InReasoning, OneContent: r.Grammar.IsJSON(), Wrapped: r.Grammar.Whole, Start: start}, ids)
				text := v.text(ids)
				where := fmt.Sprintf("%s, mode %d, seed %d: %q", name, mode, seed, text)
				if f.Reasoning() == "minimax_m2_append_think" && r.Functions != nil {
					_, content, _ = strings.Cut(content, "</think>")
				}
				content = strings.TrimSpace(content)
				if len(got) == 0 {
					contents[name]++
					if !strings.Contains(text, content) || !accepted(t, alone, content) {
						t.Errorf("%s: content %q", where, content)
					}
					continue
				}
				calls[name]++
				for _, c := range got {
					args, err := decodeNumbers(string(c.Text))
					object, isObject := args.(map[string]any)
					if err != nil || !isObject || len(object) != 1 || object["a"] == nil || c.Name != "now" || c.Incomplete || content != "" {
						t.Errorf("%s: %s(%s) with content %q: %v", where, c.Name, c.Text, content, err)
					}
				}
			}
		}
	}
	for name, n := range contents {
		if n < 6 {
			t.Errorf("%s: only %d contents", name, n)
		}
	}
	t.Logf("%v contents, %v calls", contents, calls)
}

// The content of an answer is what the request's grammar has, byte for byte, of each kind: behind
// reasoning, which the prompt or the answer begins, within the tags that a model writes around its
// content, on its channel, and where the prompt has begun the content.
func TestContentOfEveryKind(t *testing.T) {
	own := map[string]string{
		"json":    `"response_format":{"type":"json_object"}`,
		"regex":   `"guided_regex":"[ \n]{0,2}(<answer>)?[a-c<>/n\n]{2,9}(</answer>)?[ \n]{0,2}"`,
		"choice":  `"guided_choice":["<answer>\n yes","no\n</answer>"," <think>a</think>","\n"]`,
		"grammar": `"guided_grammar":"root ::= \" \"? ( \"a\" root \"b\" | \"</answer>\" | \"<answer>\" )"`,
		"lark":    `"structured_outputs":{"grammar":"start: \"(\" start \")\" | \"\\n\" | \"x\""}`,
	}
	done := map[string]int{}
	for _, names := range [][2]string{{"hermes", "qwen3"}, {"hermes", ""}, {"jamba", "hunyuan_a13b"}, {"", "hunyuan_a13b"}, {"cohere_command3", "cohere_command3"}, {"openai", "openai_gptoss"}, {"gemma4", "gemma4"}, {"", "deepseek_r1"}, {"granite", "granite"}} {
		for kind, fields := range own {
			for mode := range 10 {
				v := newWalkedVocabulary(mode&1 != 0)
				f, err := parse.NewFormat(names[0], names[1], v.added)
				if err != nil {
					t.Fatal(err)
				}
				start := parse.Start(mode / 2 % 4)
				tools := mode >= 8
				if start == parse.InReasoning && f.ReasoningEnd() == "" || start == parse.InContent && !f.Wraps() || start != parse.AtBeginning && f.Channels() ||
					tools && (kind != "json" || names[0] == "") || !v.byID && f.Channels() && kind != "json" {
					continue
				}
				if tools {
					fields += `,"tools":[{"type":"function","function":{"name":"now"}}]`
				}
				r, fault := openai.Parse(openai.Chat, []byte(`{"messages":[{"role":"user","content":"x"}],`+fields+`}`))
				if fault != nil {
					t.Fatal(fault)
				}
				client, err := grammar.Compile(r.Grammar.Source, grammar.DefaultLimits())
				if err != nil {
					t.Fatalf("%s: %v", kind, err)
				}
				if fault := (&Model{Text: &TextModel{format: f}}).ConstrainCalls(r, start); fault != nil {
					t.Fatal(fault)
				}
				if !r.Grammar.Whole && start == parse.InReasoning {
					r.Grammar.After = f.ReasoningEnd()
				}
				g, err := grammar.Compile(r.Grammar.Source, grammar.DefaultLimits())
				if err != nil {
					t.Fatalf("%v %s: %v\n%s", names, kind, err, r.Grammar.Text)
				}
				o := parse.Options{NoTools: !tools, Reasoning: start == parse.InReasoning, OneContent: r.Grammar.IsJSON() || r.Grammar.IsContent() && !f.Channels(), Start: start}
				o.Wrapped = o.OneContent && r.Grammar.Whole
				for seed := range uint64(8) {
					ids := walkCalls(t, g, v, seed)
					if ids == nil {
						continue
					}
					content, calls := v.parsed(f, o, ids)
					if len(calls) > 0 {
						continue
					}
					if done[fmt.Sprint(names)]++; !accepted(t, client, content) && (kind != "json" || !accepted(t, client, strings.TrimSpace(content))) {
						t.Errorf("%v, %s, mode %d, seed %d: %q has the content %q", names, kind, mode, seed, v.text(ids), content)
					}
				}
			}
		}
	}
	for names, n := range done {
		if n < 30 {
			t.Errorf("%s: only %d answers", names, n)
		}
	}
	t.Logf("%v", done)
}

// Calls without a marker have one spelling, which content does not have. What begins so follows the
// tool's schema.
func TestContentLikeCalls(t *testing.T) {
	const tools = `"tools":[{"type":"function","function":{"name":"now","strict":true,"parameters":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}}}]`
	for format, c := range map[string]struct {
		schema string
		texts  map[string]int // accepted texts with their number of calls; -1: not accepted
	}{
		"llama3_json": {`{"type":"object"}`, map[string]int{
			`{"name": "now", "parameters": {"a": 1}}`: 1, `{"name": "now", "parameters": {"b": 1}}`: -1, `{"name": "now", "parameters": 1}`: -1, `{"name": "now", "parameters":1}`: 0,
			`{"name":"now","parameters":{"b":1}}`: 0, `{"name":"now","parameters":{"a":1}}`: 0, `{"name": "then", "parameters": {"b": 1}}`: 0, ` {"name": "now", "parameters": {"a": 1}}`: 1,
			`{"x": {"name": "now", "parameters": {"b": 1}}}`: 0, `<|python_tag|>{"name": "now", "parameters": {"a": 1}}`: 1,
		}},
		"xlam": {`{"type":"array"}`, map[string]int{
			`[{"name": "now", "arguments": {"a": 1}}]`: 1, `[{"name": "now", "arguments": {"b": 1}}]`: -1, `[{"name":"now","arguments":{"b":1}}]`: 0, `[{"name": "then", "arguments": {"b": 1}}]`: 0,
			`[1, {"name": "now", "arguments": {"b": 1}}]`: 0, `[{"name": "now", "arguments": {"a": 1}}, {"name": "now", "arguments": {"a": 2}}]`: 2, `[[{"name": "now", "arguments": {"b": 1}}]]`: 0,
		}},
		"pythonic": {`{"type":"array"}`, map[string]int{`[now(a=1)]`: 1, `[true, "now(a=1)"]`: 0, `[["now"], {}]`: 0, `[]`: 0}},
	} {
		f, err := parse.NewFormat(format, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		r, fault := openai.Parse(openai.Chat, []byte(`{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":`+c.schema+`}},`+tools+`}`))
		if fault == nil {
			fault = (&Model{Text: &TextModel{format: f}}).ConstrainCalls(r, parse.AtBeginning)
		}
		if fault != nil {
			t.Fatal(fault)
		}
		g, err := grammar.Compile(r.Grammar.Source, grammar.DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		for text, want := range c.texts {
			if ok := accepted(t, g, text); ok != (want >= 0) {
				t.Errorf("%s: %s is accepted: %v", format, text, ok)
			}
			if want < 0 {
				continue
			}
			p := f.NewParser(parse.Options{Tools: ArgumentTypes(r.Functions), OneContent: true})
			content := ""
			for _, d := range p.Finish(p.Push(nil, -1, text)) {
				if d.Kind == parse.Content {
					content += string(d.Text)
				}
			}
			if p.Calls() != want || want == 0 && content != text || want > 0 && content != "" {
				t.Errorf("%s: %s has %d calls and the content %q", format, text, p.Calls(), content)
			}
		}
	}
}

// accepted reports whether a grammar has a text.
func accepted(t *testing.T, g *grammar.Grammar, text string) bool {
	t.Helper()
	a, err := grammar.NewAutomaton(g, nil, grammar.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	m, err := a.NewMatcher()
	if err != nil {
		t.Fatal(err)
	}
	return m.AcceptBytes([]byte(text)) == nil && m.Complete()
}

// A parameter may have the name of a member that every format of a structural tag has.
func TestParameterNamedType(t *testing.T) {
	const schema = `{"type":"object","properties":{"type":{"anyOf":[{"type":"integer","maximum":5},{"type":"string","pattern":"^[0-9]{3}$"}]}},"required":["type"],"additionalProperties":false}`
	functions := []openai.Function{{Name: "f", Parameters: []byte(schema)}}
	root, err := decodeNumbers(schema)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"qwen3_coder", "glm45", "deepseek_v32"} {
		v := newWalkedVocabulary(false)
		f, err := parse.NewFormat(name, "", v.added)
		if err != nil {
			t.Fatal(err)
		}
		types := ArgumentTypes(functions)
		text, special, err := f.Grammar(parse.Constraint{Types: types, One: true, Tools: []parse.Tool{{Name: "f", Parameters: []byte(schema), Strict: true}}})
		if err != nil {
			t.Fatal(err)
		}
		g, err := grammar.Compile(grammar.Source{Kind: grammar.StructuralTag, Text: text, Special: special}, grammar.DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		for seed := range uint64(8) {
			ids := walkCalls(t, g, v, seed)
			if ids == nil {
				continue
			}
			_, calls := v.parsed(f, parse.Options{Tools: types}, ids)
			if len(calls) != 1 {
				t.Fatalf("%s: %d calls in %q", name, len(calls), v.text(ids))
			}
			args, err := decodeNumbers(string(calls[0].Text))
			if err == nil {
				err = checkValue(args, root.(map[string]any), root.(map[string]any))
			}
			if err != nil {
				t.Errorf("%s: %q: %v", name, v.text(ids), err)
			}
		}
	}
}

// A tool whose schema declares no parameters and allows any can be called with some.
func TestOpenParameters(t *testing.T) {
	for schema, open := range map[string]bool{`{"type":"object"}`: true, `{"properties":{},"additionalProperties":true}`: true, `{"additionalProperties":false}`: false} {
		for _, name := range []string{"hermes", "qwen3_coder", "gemma4", "pythonic"} {
			f, err := parse.NewFormat(name, "", newWalkedVocabulary(false).added)
			if err != nil {
				t.Fatal(err)
			}
			m := &Model{Text: &TextModel{format: f}}
			r := &openai.Request{Calls: openai.CallRule{Required: true}, Functions: []openai.Function{{Name: "f", Parameters: []byte(schema)}}}
			if fault := m.ConstrainCalls(r, parse.AtBeginning); fault != nil {
				t.Fatal(fault)
			}
			g, err := grammar.Compile(r.Grammar.Source, grammar.DefaultLimits())
			if err != nil {
				t.Fatal(err)
			}
			some := false
			for seed := range uint64(20) {
				v := newWalkedVocabulary(false)
				if f, err = parse.NewFormat(name, "", v.added); err != nil {
					t.Fatal(err)
				}
				ids := walkCalls(t, g, v, seed)
				if ids == nil {
					continue
				}
				_, calls := v.parsed(f, parse.Options{Tools: ArgumentTypes(r.Functions)}, ids)
				for _, call := range calls {
					args, err := decodeNumbers(string(call.Text))
					object, isObject := args.(map[string]any)
					if err != nil || !isObject {
						t.Errorf("%s: %q is %s: %v", name, v.text(ids), call.Text, err)
					}
					some = some || len(object) > 0
				}
			}
			if some != open {
				t.Errorf("%s, %s: calls have parameters: %v", name, schema, some)
			}
		}
	}
}

// Schemas of tools that together have too many positions are refused by the name of the largest.
func TestPositionsOfTools(t *testing.T) {
	f, err := parse.NewFormat("hermes", "", newWalkedVocabulary(true).added)
	if err != nil {
		t.Fatal(err)
	}
	listed := func(bytes int) []byte {
		rnd := rand.New(rand.NewPCG(uint64(bytes), 3))
		text := []byte(`{"type":"object","required":["x"],"properties":{"x":{"enum":["a"`)
		for range bytes / 100 {
			text = append(text, ',', '"')
			for range 98 {
				text = append(text, 'a'+byte(rnd.IntN(26)))
			}
			text = append(text, '"')
		}
		return append(text, "]}}}"...)
	}
	r := &openai.Request{Calls: openai.CallRule{Required: true}, Functions: []openai.Function{{Name: "small", Parameters: listed(1000)}, {Name: "large", Parameters: listed(350_000)}, {Name: "medium", Parameters: listed(200_000)}}}
	if fault := (&Model{Text: &TextModel{format: f}}).ConstrainCalls(r, parse.AtBeginning); fault != nil {
		t.Fatal(fault)
	}
	_, err = grammar.Compile(r.Grammar.Source, grammar.DefaultLimits())
	if err == nil {
		t.Fatal("it compiles")
	}
	fault := openai.GrammarError(r.Grammar, err)
	const want = "tools[1].function.parameters: json_schema at #: more than 400000 positions"
	if !strings.HasPrefix(fault.Message, want) || fault.Param != "tools[1].function.parameters" || !errors.Is(err, grammar.ErrBudget) {
		t.Errorf("%v: %+v", err, fault)
	}
}

// Schemas that are too large to be compiled are refused before they are copied.
func TestSchemasTooLarge(t *testing.T) {
	f, err := parse.NewFormat("hermes", "qwen3", newWalkedVocabulary(true).added)
	if err != nil {
		t.Fatal(err)
	}
	m := &Model{Text: &TextModel{format: f}}
	large := []byte(`{"type":"object"` + strings.Repeat(" ", 8<<20) + `}`)
	budget := int64(5)
	for name, c := range map[string]struct {
		r    openai.Request
		call func(*openai.Request) *openai.Error
		want string
	}{
		"tools":   {openai.Request{Calls: openai.CallRule{Required: true}, Functions: []openai.Function{{Name: "f", Parameters: large}}}, func(r *openai.Request) *openai.Error { return m.ConstrainCalls(r, parse.AtBeginning) }, "tool_choice"},
		"content": {openai.Request{Functions: []openai.Function{{Name: "f"}}, Grammar: &openai.Grammar{Source: grammar.Source{Kind: grammar.JSONSchema, Text: large}, Param: "response_format"}}, func(r *openai.Request) *openai.Error { return m.ConstrainCalls(r, parse.AtBeginning) }, "response_format"},
		"bounded": {openai.Request{ThinkingBudget: &budget, Grammar: &openai.Grammar{Source: grammar.Source{Kind: grammar.JSONSchema, Text: large}}}, func(r *openai.Request) *openai.Error { return m.BoundThinking(r, parse.InReasoning) }, ""},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		fault := c.call(&c.r)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
			t.Errorf("%s: %d bytes are allocated", name, n)
		}
		if fault != nil && fault.Param != c.want || fault == nil && c.want != "" {
			t.Errorf("%s: %+v", name, fault)
		}
	}
}
