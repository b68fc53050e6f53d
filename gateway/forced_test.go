package gateway

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// obeys is a token function that draws each token among those that the request's grammar allows. It
// prefers tokens that are markers and those that end something.
func obeys(t *testing.T, b *nodepb.Bundle) func(*nodepb.Generate, int) int32 {
	v, err := masks.ReadVocabulary(b.TokenizerJson, []int32{eosID})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	known := map[string][]int32{}
	return func(r *nodepb.Generate, p int) int32 {
		mu.Lock()
		defer mu.Unlock()
		g := r.Grammar
		key := fmt.Sprintf("%d %d %s %q", r.Sampling.Seed, r.Sampling.Choice, g.GetText(), g.GetChoices())
		if known[key] == nil {
			c, err := grammar.Compile(grammar.Source{Kind: grammar.Kind(g.Kind - 1), Text: g.Text, Choices: g.Choices, Special: g.Special, After: g.After}, grammar.DefaultLimits())
			if err != nil {
				t.Error(err)
				return eosID
			}
			known[key] = drawn(t, c, v.Vocabulary, rand.New(rand.NewPCG(r.Sampling.Seed, uint64(r.Sampling.Choice))))
		}
		out := known[key]
		return out[min(p-len(r.Prompt), len(out)-1)]
	}
}

// drawn returns the tokens of a random output.
func drawn(t *testing.T, g *grammar.Grammar, v *grammar.Vocabulary, r *rand.Rand) (out []int32) {
	a, err := grammar.NewAutomaton(g, v, grammar.DefaultLimits())
	if err != nil {
		t.Error(err)
		return []int32{eosID}
	}
	m, err := a.NewMatcher()
	mask := make([]uint64, v.Words())
	for len(out) < 4000 && err == nil {
		if err = m.Mask(mask); err != nil {
			break
		}
		var all, closing []int32
		for id := range int32(64 * len(mask)) {
			if mask[id>>6]>>(id&63)&1 == 0 {
				continue
			}
			if all = append(all, id); id >= 256 || strings.IndexByte("\"}]<", byte(id)) >= 0 {
				closing = append(closing, id)
			}
		}
		if len(closing) > 0 && r.IntN(4) > 0 {
			all = closing
		}
		id := all[r.IntN(len(all))]
		err = m.Accept(id)
		if out = append(out, id); id == eosID {
			return out
		}
	}
	t.Errorf("%d tokens and no end: %v", len(out), err)
	return append(out, eosID)
}

// obedient is a gateway whose only node follows grammars.
func obedient(t *testing.T, o Options, markers ...string) *bed {
	node := constraining("d1", grammar.Version)
	node.Bundle = toolBundle(markers...)
	node.Token = obeys(t, node.Bundle)
	return newBed(t, o, one(node))
}

const (
	strictTools = `"tools":[{"type":"function","function":{"name":"weather","strict":true,"parameters":{"type":"object","properties":{"city":{"enum":["Oslo","Rome"]},"days":{"type":"integer","minimum":1,"maximum":3}},"required":["city"],"additionalProperties":false}}},` +
		`{"type":"function","function":{"name":"time"}}]`
	thinking = `,"chat_template_kwargs":{"enable_thinking":true}`
)

// checkCalls reports calls of strictTools whose arguments do not match, and returns the number of
// calls of weather.
func checkCalls(t *testing.T, where string, m message) (n int) {
	t.Helper()
	for _, c := range m.Calls {
		var args struct {
			City string
			Days *int
		}
		d := json.NewDecoder(strings.NewReader(c.Function.Arguments))
		d.DisallowUnknownFields()
		err := d.Decode(&args)
		switch c.Function.Name {
		case "weather":
			if n++; err != nil || args.City != "Oslo" && args.City != "Rome" || args.Days != nil && (*args.Days < 1 || *args.Days > 3) {
				t.Errorf("%s: %v: %v", where, m, err)
			}
		case "time":
		default:
			t.Errorf("%s: %v", where, m)
		}
	}
	return n
}

// Answers with tool_choice required or a name, with strict tools and with parallel_tool_calls false
// have the calls that these demand, whole and streamed.
func TestForcedCalls(t *testing.T) {
	b := obedient(t, Options{}, hermesMarkers...)
	weathers, texts, several := 0, 0, 0
	for _, c := range []struct {
		fields      string
		least, most int
		content     bool
		finish      string
	}{
		{`,"tool_choice":"required"`, 1, 99, false, "tool_calls"},
		{`,"tool_choice":"required","parallel_tool_calls":false`, 1, 1, false, "tool_calls"},
		{`,"tool_choice":{"type":"function","function":{"name":"weather"}}`, 1, 1, false, "stop"},
		{`,"tool_choice":"required","response_format":{"type":"json_object"}`, 1, 99, false, "tool_calls"},
		{`,"tool_choice":"auto"`, 0, 99, true, ""},
		{`,"parallel_tool_calls":false`, 0, 1, true, ""},
		{`,"response_format":{"type":"json_object"}`, 0, 99, true, ""},
		{`,"parallel_tool_calls":false,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"array"}}}`, 0, 1, true, ""},
	} {
		for seed := range 6 {
			body := fmt.Sprintf(`{%s,%s%s,"seed":%d,"max_tokens":5000`, hi, strictTools, c.fields, seed)
			if seed%2 == 0 {
				body += thinking
			}
			whole := ""
			for _, body := range withStream(body + `}`) {
				got, _ := messagesOf(t, b.post(chatPath, body))
				m := got[0]
				if n := len(m.Calls); n < c.least || n > c.most || !c.content && m.Content != nil || c.finish != "" && m.finish != c.finish {
					t.Errorf("%s:\n got %v", body, m)
				}
				if len(m.Calls) == 0 && m.finish != "stop" {
					t.Errorf("%s: %v", body, m)
				}
				if weathers += checkCalls(t, body, m); len(m.Calls) > 1 {
					several++
				}
				if m.Content != nil {
					if texts++; strings.Contains(c.fields, "json") && !json.Valid([]byte(*m.Content)) {
						t.Errorf("%s: %v", body, m)
					}
				}
				text := strings.Replace(m.String(), ` "" `, " null ", 1) // a stream has no content that is empty
				if whole == "" {
					whole = text
				} else if text != whole {
					t.Errorf("%s:\nwhole    %s\nstreamed %s", body, whole, text)
				}
			}
		}
	}
	if weathers < 10 || texts < 6 || several < 4 {
		t.Errorf("%d calls of weather, %d contents, %d answers of several calls", weathers, texts, several)
	}
}

// Markers in the strings of JSON that a request demands are text of the content.
func TestMarkersInContent(t *testing.T) {
	const text = `{"x":"a <tool_call>{\"name\":\"f\"}</tool_call> <think>b</think> c"}`
	for _, fields := range []string{
		strictTools + `,"response_format":{"type":"json_object"}`,
		strictTools + `,"response_format":{"type":"json_object"},"tool_choice":"none"`,
		`"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object"}}}`,
	} {
		node := constraining("d1", grammar.Version)
		node.Bundle = toolBundle()
		node.Token = writes(t, node.Bundle, text)
		b := newBed(t, Options{ToolCallParser: "hermes", ReasoningParser: "qwen3"}, one(node))
		for _, body := range withStream(`{` + hi + `,` + fields + `}`) {
			got, _ := messagesOf(t, b.post(chatPath, body))
			if m := got[0]; m.Content == nil || *m.Content != text || m.Reasoning != "" || len(m.Calls) > 0 || m.finish != "stop" {
				t.Errorf("%s: %v", body, m)
			}
		}
	}
}

// JSON of a model whose answers are messages on channels is on the channel final, behind reasoning,
// with and without tools.
func TestJSONOnChannels(t *testing.T) {
	const text = `{"x":"<|end|><|start|>"}`
	for _, fields := range []string{`"response_format":{"type":"json_object"}`, strictTools + `,"response_format":{"type":"json_object"},"tool_choice":"none"`, strictTools + `,"response_format":{"type":"json_object"}`} {
		node := constraining("d1", grammar.Version)
		node.Bundle = toolBundle()
		node.Token = writes(t, node.Bundle, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"+text)
		b := newBed(t, Options{ToolCallParser: "openai", ReasoningParser: "openai_gptoss"}, one(node))
		for _, body := range withStream(`{` + hi + `,` + fields + `}`) {
			got, _ := messagesOf(t, b.post(chatPath, body))
			if m := got[0]; m.Content == nil || *m.Content != text || m.Reasoning != "hm" || len(m.Calls) > 0 || m.finish != "stop" {
				t.Errorf("%s: %v", body, m)
			}
		}
		for _, r := range b.nodes["d1"].Requests() {
			if r.Grammar.GetKind() != nodepb.GrammarKind_GRAMMAR_KIND_STRUCTURAL_TAG {
				t.Errorf("%s: %v", fields, r.Grammar)
			}
		}
	}
	b := obedient(t, Options{ToolCallParser: "openai", ReasoningParser: "openai_gptoss"})
	r := b.post(chatPath, `{`+hi+`,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"contains":{"type":"null"},"maxContains":2}}}}`)
	if a := r.parse(t); r.StatusCode != 400 || !strings.HasPrefix(a.Error.Message, "response_format.json_schema.schema: contains at #/contains: ") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// The content of an answer is constrained, by JSON, an expression, a choice and a grammar alike,
// behind the model's reasoning and within the tags or on the channel that the model writes.
func TestConstrainedContent(t *testing.T) {
	cohere := []string{"<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"}
	harmony := []string{"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"}
	const turn = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
	for name, f := range map[string]struct {
		tools, reasoning, template string
		markers                    []string
		thinks                     bool
		framed                     string // the beginning of what the node gets as the tag around the content
	}{
		"qwen3":                {"hermes", "qwen3", hermes, hermesMarkers, true, ""},
		"cohere":               {"cohere_command3", "cohere_command3", turn + "bot: ", cohere, true, "<|START_RESPONSE|>"},
		"cohere, opened":       {"cohere_command3", "cohere_command3", turn + "bot: <|START_RESPONSE|>", cohere, false, "<|END_RESPONSE|>"},
		"cohere, has reasoned": {"cohere_command3", "cohere_command3", turn + "bot: <|START_THINKING|><|END_THINKING|>", cohere, false, "<|START_RESPONSE|>"},
		"cohere, reasons":      {"cohere_command3", "cohere_command3", turn + "bot: <|START_THINKING|>", cohere, true, "<|START_RESPONSE|>"},
		"hunyuan":              {"jamba", "hunyuan_a13b", turn + "bot: ", []string{"<think>", "</think>"}, true, "<answer>"},
		"gpt-oss":              {"openai", "openai_gptoss", turn + "<|start|>assistant", harmony, true, "<|channel|>final"},
		"text alone":           {"hermes", "none", turn, hermesMarkers, false, ""},
	} {
		node := constraining("d1", grammar.Version)
		node.Bundle = toolBundle(f.markers...)
		node.Bundle.ChatTemplate = f.template
		node.Token = obeys(t, node.Bundle)
		b := newBed(t, Options{ToolCallParser: f.tools, ReasoningParser: f.reasoning}, one(node))
		thought := 0
		for fields, valid := range map[string]func(string) bool{
			`"response_format":{"type":"json_object"}`:                                     func(s string) bool { return json.Valid([]byte(s)) && s[0] == '{' },
			`"guided_json":{"enum":["a<answer>b</answer>"]}`:                               func(s string) bool { return s == `"a<answer>b</answer>"` },
			`"guided_regex":"\n?[a-c]{3} (<answer>|</answer>)"`:                            regexp.MustCompile("^\n?[a-c]{3} (<answer>|</answer>)$").MatchString,
			`"guided_choice":["yes"," no "]`:                                               func(s string) bool { return s == "yes" || s == " no " },
			`"structured_outputs":{"grammar":"root ::= \"(\" root \")\" | \"x\""}`:         regexp.MustCompile(`^\(*x\)*$`).MatchString,
			`"guided_grammar":"start: \"[\" start \"]\" | \"y\"","tool_choice":"none"`:     regexp.MustCompile(`^\[*y\]*$`).MatchString,
			strictTools + `,"tool_choice":"none","response_format":{"type":"json_object"}`: func(s string) bool { return json.Valid([]byte(s)) && s[0] == '{' },
		} {
			seeds := 4
			if raceEnabled { // nearly all of the work is one goroutine's
				seeds = 2
			}
			for seed := range seeds {
				whole := ""
				for _, body := range withStream(fmt.Sprintf(`{%s,%s,"seed":%d,"max_tokens":5000}`, hi, fields, seed)) {
					got, _ := messagesOf(t, b.post(chatPath, body))
					m := got[0]
					if m.Content == nil || !valid(*m.Content) || len(m.Calls) > 0 || m.finish != "stop" || m.Reasoning != "" && !f.thinks {
						t.Errorf("%s: %s: %v", name, body, m)
						continue
					}
					if m.Reasoning != "" {
						thought++
					}
					if text := m.String(); whole == "" {
						whole = text
					} else if text != whole {
						t.Errorf("%s: %s:\nwhole    %s\nstreamed %s", name, body, whole, text)
					}
				}
			}
		}
		if f.thinks && thought == 0 {
			t.Errorf("%s: no answer has reasoning", name)
		}
		for _, r := range b.nodes["d1"].Requests() {
			if !strings.Contains(string(r.Grammar.GetText()), f.framed) {
				t.Errorf("%s: %v", name, r.Grammar)
			}
		}
		for fields, want := range map[string]string{
			`"guided_regex":"(?=a)"`:                                               "guided_regex: regex: ",
			`"guided_choice":["` + strings.Repeat("a", 1<<20) + `"]`:               "guided_choice",
			`"guided_grammar":"root ::= root"`:                                     "guided_grammar: ebnf",
			`"guided_json":"{}}"`:                                                  "guided_json: json",
			`"guided_json":{"items":{"contains":{"type":"null"},"maxContains":2}}`: "guided_json: contains at #/items/contains: ",
		} {
			if r := b.post(chatPath, `{`+hi+`,`+fields+`}`); r.StatusCode != 400 || !strings.Contains(r.body, want) || strings.Contains(r.body, "structural_tag") {
				t.Errorf("%s: %.60s: %d %.300s", name, fields, r.StatusCode, r.body)
			}
		}
	}
}

// What cannot be forced is refused by name.
func TestForcedCallsRefused(t *testing.T) {
	tool := func(parameters string) string {
		return `"tools":[{"type":"function","function":{"name":"a"}},{"type":"function","function":{"name":"f","strict":true,"parameters":` + parameters + `}}]`
	}
	hermes := obedient(t, Options{Limits: Limits{MaxGrammarBytes: 4000}}, hermesMarkers...)
	python := obedient(t, Options{ToolCallParser: "pythonic"})
	coder := obedient(t, Options{ToolCallParser: "qwen3_coder"})
	old := toolBed(t, Options{}, calls)
	const anywhere = "tools[1].function.parameters"
	for _, c := range []struct {
		b                   *bed
		fields, param, says string
		status              int
	}{
		{hermes, tool(`{"type":"object","properties":{"x":{"contains":{"type":"null"},"maxContains":2}}}`), anywhere, "contains at #/properties/x/contains: ", 400},
		{hermes, tool(`{"type":"object","properties":{"x":false},"required":["x"]}`) + `,"tool_choice":{"type":"function","function":{"name":"f"}}`, "tool_choice", "tools[1].function.parameters: required at #/required: accepts no text", 400},
		{coder, tool(`{"properties":{"x":{"type":"string","enum":[1]}},"required":["x"]}`) + `,"tool_choice":{"type":"function","function":{"name":"f"}}`, "tool_choice", "tools[1].function.parameters: enum at #/properties/x/enum: accepts no text", 400},
		{hermes, tool(`{"properties":{"x":{"const":"\ud800"}}}`), anywhere, "json at #/properties/x/const: half a surrogate pair", 400},
		{hermes, tool(`{"description":"` + strings.Repeat("a", 4000) + `"}`), "tools", "--max-grammar-bytes", 400},
		{hermes, tool(`{}`) + `,"tool_choice":"required","guided_regex":"a"`, "tool_choice", "both constrain", 400},
		{hermes, tool(`{}`) + `,"guided_regex":"a"`, "tools", "guided_regex both constrain", 400},
		{hermes, weather + `,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"items":{"contains":{"type":"null"},"maxContains":2}}}}`, "response_format.json_schema.schema", "contains at #/items/contains: ", 400},
		{old, weather + `,"response_format":{"type":"json_object"}`, "", "leave response_format out", 503},
		{hermes, `"tool_choice":"required"`, "tool_choice", "needs tools", 400},
		{python, strings.Replace(tool(`{}`), `"a"`, `"2a"`, 1) + `,"tool_choice":"required"`, "tool_choice", "begin it with a letter", 400},
		{coder, tool(`{"properties":{"a b":{"type":"string"}}}`), anywhere, "properties at #/properties: \"a b\" cannot be a parameter", 400},
		{coder, tool(`{"properties":{"a":{"enum":["<parameter=x>"]}}}`), anywhere, "contains a marker", 400},
		{old, tool(`{}`), "", "by grammars of version", 503},
	} {
		r := c.b.post(chatPath, `{`+hi+`,`+c.fields+`}`)
		a := r.parse(t)
		if r.StatusCode != c.status || !strings.Contains(a.Error.Message, c.says) || c.param != "" && (a.Error.Param == nil || *a.Error.Param != c.param) {
			t.Errorf("%.120s: %d %s", c.fields, r.StatusCode, r.body)
		}
	}
	// Nothing is forced: any node serves these.
	for _, fields := range []string{tool(`{"contains":{"type":"null"},"maxContains":2}`) + `,"tool_choice":"none"`, strings.Replace(tool(`{"contains":{"type":"null"},"maxContains":2}`), "true", "false", 1), weather} {
		if r := old.post(chatPath, `{`+hi+`,`+fields+`}`); r.StatusCode != 200 {
			t.Errorf("%s: %d %s", fields, r.StatusCode, r.body)
		}
	}
}

// Constrained answers whose node is lost after any of their tokens are what they are on a node that
// lives: forced calls, JSON with and without tools, expressions and choices, behind reasoning and
// without.
func TestConstrainedAnswersResume(t *testing.T) {
	bu := toolBundle(hermesMarkers...)
	token := obeys(t, bu)
	node := func(addr string, cut int) nodestest.Options {
		n := constraining(addr, grammar.Version)
		n.Bundle, n.Token, n.CutAfter = bu, token, cut
		return n
	}
	for _, fields := range []string{
		`,` + strictTools + `,"tool_choice":"required"`, `,` + strictTools + `,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":` + people + `}}` + thinking,
		`,"guided_json":` + people, `,"guided_regex":"([a-f][0-9]){9,20}"` + thinking, `,"guided_choice":["yes, certainly","yes, perhaps"]`,
	} {
		body := `{` + hi + fields + `,"seed":4,"max_tokens":5000,"stream":true}`
		want, first, length := message{}, "", 1
		virtually(t, func(t *testing.T) {
			b := newBed(t, Options{}, map[string]nodestest.Options{"d1": node("d1", 0), "d2": node("d2", 0)})
			got, _ := messagesOf(t, b.post(chatPath, body))
			want = got[0]
			for addr, n := range b.nodes { // equal requests begin on the same node
				for _, r := range n.Requests() {
					for first = addr; token(r, len(r.Prompt)+length-1) != eosID; {
						length++
					}
				}
			}
		})
		if length < 8 || length > 150 {
			t.Errorf("%s: %d tokens: %v", fields, length, want)
		}
		step := 1
		if testing.Short() || raceEnabled { // which is ten times slower
			step = 7
		}
		second := map[string]string{"d1": "d2", "d2": "d1"}[first]
		for cut := 1; cut < length; cut += step {
			virtually(t, func(t *testing.T) {
				b := newBed(t, Options{}, map[string]nodestest.Options{first: node(first, cut), second: node(second, 0)})
				got, _ := messagesOf(t, b.post(chatPath, body))
				if fmt.Sprint(got) != fmt.Sprint([]message{want}) {
					t.Errorf("%s, lost after %d tokens:\ngot  %v\nwant %v", fields, cut, got, want)
				}
				if r := b.nodes[second].Requests(); len(r) != 1 || len(r[0].Output) > cut {
					t.Errorf("%s, lost after %d tokens: the other node got %d requests", fields, cut, len(r))
				}
			})
		}
	}
}

// thinking_token_budget ends reasoning after so many tokens, whether the prompt or the answer begins
// it, with and without another grammar.
func TestThinkingBudget(t *testing.T) {
	b := obedient(t, Options{}, hermesMarkers...)
	thought := 0
	for _, fields := range []string{``, thinking, thinking + `,"response_format":{"type":"json_object"}`, thinking + `,"guided_regex":"[a-c]{3}"`, `,"guided_regex":"[a-c]{3}"`, thinking + `,"guided_choice":["a","b"]`, `,` + strictTools + `,"tool_choice":"required"`, thinking + `,` + strictTools} {
		for seed := range 4 {
			for _, budget := range []int{0, 1, 7} {
				body := fmt.Sprintf(`{%s%s,"seed":%d,"max_tokens":5000,"thinking_token_budget":%d}`, hi, fields, seed, budget)
				whole := ""
				for _, body := range withStream(body) {
					got, _ := messagesOf(t, b.post(chatPath, body))
					m := got[0]
					if strings.Contains(fields, "strict") {
						checkCalls(t, body, m)
					}
					// A character that has begun is ended.
					if n := utf8.RuneCountInString(m.Reasoning); n > budget+3 || budget == 0 && n > 0 && !strings.Contains(fields, "think") {
						t.Errorf("%s: %d tokens of reasoning: %v", body, n, m)
					}
					if m.Reasoning != "" {
						thought++
					}
					text := strings.Replace(m.String(), ` "" `, " null ", 1)
					if whole == "" {
						whole = text
					} else if text != whole {
						t.Errorf("%s:\nwhole    %s\nstreamed %s", body, whole, text)
					}
				}
			}
		}
	}
	if thought < 20 {
		t.Errorf("%d answers with reasoning", thought)
	}
	for _, c := range []struct {
		b            *bed
		fields, says string
	}{
		{b, `"ignore_eos":true`, "ignore_eos exclude"}, {b, `"structured_outputs":{"structural_tag":{"format":{"type":"any_text"}}},"chat_template_kwargs":{"enable_thinking":true}`, "structured_outputs.structural_tag exclude"},
		{obedient(t, Options{}), `"n":1`, "needs reasoning that a token"}, {toolBed(t, Options{}, calls, hermesMarkers...), `"n":1`, "grammars of version"},
	} {
		if r := c.b.post(chatPath, `{`+hi+`,`+c.fields+`,"thinking_token_budget":5}`); r.StatusCode < 400 || !strings.Contains(r.body, c.says) {
			t.Errorf("%s: %d %s", c.fields, r.StatusCode, r.body)
		}
	}
}
