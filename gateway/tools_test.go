package gateway

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// hermes is a template as Qwen3's.
const hermes = "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}" +
	"{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>\n" +
	`{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}` + "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" +
	"{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"

const (
	weather = `"tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]`
	calls   = "<think>\nHm, \"stop\".\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo stop\"}}\n</tool_call>\n" +
		"<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>"
)

// toolBundle is a model that writes hermes' format. Its markers are tokens, or texts of bytes.
func toolBundle(markers ...string) *nodepb.Bundle {
	b := bundle()
	b.ChatTemplate, b.VocabSize = hermes, uint32(258+len(markers))
	b.TokenizerJson = nodestest.Tokenizer(nil, append([]string{"<|im_start|>", "<|im_end|>"}, markers...)...)
	return b
}

var hermesMarkers = []string{"<think>", "</think>", "<tool_call>", "</tool_call>"}

// writes is a token function that writes a text and ends.
func writes(t *testing.T, b *nodepb.Bundle, text string) func(*nodepb.Generate, int) int32 {
	tok, err := tokenizer.Load(b.TokenizerJson)
	if err != nil {
		t.Fatal(err)
	}
	ids := append(tok.Encode(text, false), eosID)
	return func(r *nodepb.Generate, p int) int32 { return ids[min(p-len(r.Prompt), len(ids)-1)] }
}

// toolBed is a gateway whose only node writes a text.
func toolBed(t *testing.T, o Options, text string, markers ...string) *bed {
	b := toolBundle(markers...)
	return newBed(t, o, one(nodestest.Options{Bundle: b, Token: writes(t, b, text)}))
}

// message is what a client reads of a choice.
type message struct {
	Content   *string `json:"content"`
	Reasoning string
	Older     string `json:"reasoning_content"`
	Calls     []struct {
		ID, Type string
		Index    int
		Function struct{ Name, Arguments string }
	} `json:"tool_calls"`
	finish string
}

func (m message) String() string {
	out := fmt.Sprintf("%q", m.Reasoning)
	if m.Content == nil {
		out += " null"
	} else {
		out += fmt.Sprintf(" %q", *m.Content)
	}
	for _, c := range m.Calls {
		out += fmt.Sprintf(" %s(%s)", c.Function.Name, c.Function.Arguments)
	}
	return out + " " + m.finish
}

// messagesOf returns the choices of an answer, of a stream put together, and its usage.
func messagesOf(t *testing.T, r reply) (all []message, usage string) {
	t.Helper()
	if r.StatusCode != 200 || r.err != nil {
		t.Fatalf("%d %v %s", r.StatusCode, r.err, r.body)
	}
	bodies := []string{r.body}
	if stream := strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream"); stream {
		bodies = strings.Split(strings.ReplaceAll(strings.TrimSuffix(r.body, "data: [DONE]\n\n"), "data: ", ""), "\n\n")
		bodies = bodies[:len(bodies)-1]
	}
	type parts struct { // of a choice's texts: a text of 60,000 characters comes in as many
		content   strings.Builder
		arguments []*strings.Builder // of each call
	}
	var streamed []*parts
	for _, body := range bodies {
		var a struct {
			Choices []struct {
				Index          int
				Message, Delta *message
				Finish         string `json:"finish_reason"`
			}
			Usage json.RawMessage
		}
		if err := json.Unmarshal([]byte(body), &a); err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		if a.Usage != nil {
			usage = string(a.Usage)
		}
		for _, c := range a.Choices {
			for len(all) <= c.Index {
				all, streamed = append(all, message{}), append(streamed, new(parts))
			}
			m, d, s := &all[c.Index], c.Delta, streamed[c.Index]
			if c.Message != nil {
				if *m = *c.Message; m.Reasoning != m.Older {
					t.Errorf("%q", body)
				}
			} else if d.Content != nil && *d.Content != "" {
				if m.Content == nil {
					m.Content = new(string)
				}
				s.content.WriteString(*d.Content)
			}
			if m.finish += c.Finish; d == nil {
				continue
			}
			if m.Reasoning += d.Reasoning; d.Reasoning != d.Older {
				t.Errorf("%q", body)
			}
			for _, call := range d.Calls {
				switch begins := call.ID != ""; {
				case begins != (call.Index == len(m.Calls)), begins != (call.Function.Name != ""), begins != (call.Type == "function"):
					t.Fatalf("call in %q after %v", body, m)
				case begins:
					m.Calls, s.arguments = append(m.Calls, call), append(s.arguments, new(strings.Builder))
					fallthrough
				default:
					s.arguments[call.Index].WriteString(call.Function.Arguments)
				}
			}
		}
	}
	for i, s := range streamed {
		if s.content.Len() > 0 {
			*all[i].Content = s.content.String()
		}
		for n, text := range s.arguments {
			all[i].Calls[n].Function.Arguments = text.String()
		}
	}
	return all, usage
}

// withStream returns a request as it is, and streamed with usage.
func withStream(body string) []string {
	return []string{body, strings.TrimSuffix(body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`}
}

// Calls, reasoning and content are split alike for whole answers and streams, whether markers are
// tokens or texts.
func TestTools(t *testing.T) {
	const answer = `"Hm, \"stop\"." "I look.\n" weather({"city": "Oslo stop"}) time({}) tool_calls`
	for name, markers := range map[string][]string{"tokens": hermesMarkers, "texts": nil} {
		b := toolBed(t, Options{}, calls, markers...)
		if !strings.Contains(b.log.String(), `tool_call_parser=hermes tool_call_parser_reason="the chat template writes calls in this format" reasoning_parser=qwen3`) {
			t.Errorf("%s", b.log.String())
		}
		for fields, want := range map[string]string{
			weather: answer,
			weather + `,"tool_choice":"auto","parallel_tool_calls":true,"seed":7`: answer,
			weather + `,"tool_choice":"none","parallel_tool_calls":false`:         fmt.Sprintf(`"Hm, \"stop\"." %q stop`, strings.TrimPrefix(raw(calls, markers), "\n\n")),
			weather + `,"stop":"stop"`:                                            answer,
			weather + `,"stop":"look"`:                                            `"Hm, \"stop\"." "I " stop`,
			weather + `,"stream_interval":50,"logprobs":true`:                     answer,
			weather + `,"include_reasoning":false`:                                strings.Replace(answer, `Hm, \"stop\".`, "", 1),
		} {
			for _, body := range withStream(`{` + hi + `,` + fields + `}`) {
				got, usage := messagesOf(t, b.post(chatPath, body))
				if len(got) != 1 || got[0].String() != want {
					t.Errorf("%s: %s:\n got %v\nwant %s", name, body, got, want)
				}
				if !strings.Contains(usage, `"completion_tokens_details":{"reasoning_tokens":`) || strings.Contains(usage, `"reasoning_tokens":0`) {
					t.Errorf("%s: %s", body, usage)
				}
			}
		}
	}
	b := toolBed(t, Options{}, calls, hermesMarkers...)
	for body, param := range map[string]string{
		`{` + hi + `,` + weather + `,"parallel_tool_calls":0}`:     "parallel_tool_calls",
		`{` + hi + `,` + weather + `,"tool_choice":"any"}`:         "tool_choice",
		`{` + hi + `,"tools":[{"type":"function","function":{}}]}`: "tools[0].function.name",
	} {
		if r := b.post(chatPath, body); r.StatusCode != 400 || *r.parse(t).Error.Param != param {
			t.Errorf("%s: %d %s", body, r.StatusCode, r.body)
		}
	}
	// The second turn: the client sends the call and its result.
	const turn = `{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"weather","arguments":"{\"city\": \"Ålesund\"}"}}]},{"role":"tool","tool_call_id":"a","content":"rain"}],` + weather + `,"seed":7}`
	second, _ := messagesOf(t, b.post(chatPath, turn))
	prompt := lastRequest(b, "d1").Prompt
	tok, err := tokenizer.Load(toolBundle(hermesMarkers...).TokenizerJson)
	if err != nil {
		t.Fatal(err)
	}
	if text := tok.Decode(prompt, false); !strings.HasPrefix(text, "<|im_start|>system\n"+strings.TrimSuffix(strings.TrimPrefix(spaced(t, weather), "["), "]")+"\n<|im_end|>") ||
		!strings.Contains(text, "<|im_start|>assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ålesund\"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>") {
		t.Errorf("%s", text)
	}
	first, _ := messagesOf(t, b.post(chatPath, `{`+hi+`,`+weather+`,"seed":7}`))
	again, _ := messagesOf(t, b.post(chatPath, `{`+hi+`,`+weather+`,"seed":7}`))
	if a, c := first[0].Calls, second[0].Calls; a[0].ID == a[1].ID || a[0].ID == c[0].ID || a[0].ID != again[0].Calls[0].ID || !strings.HasPrefix(a[0].ID, "call_") {
		t.Errorf("%v, %v, then %v", a, again[0].Calls, c)
	}
}

// raw returns what is content of an answer with calls if calls are not read.
func raw(answer string, markers []string) string {
	_, answer, _ = strings.Cut(answer, "</think>")
	for _, m := range markers { // special tokens have no text
		answer = strings.ReplaceAll(answer, m, "")
	}
	return answer
}

// spaced returns a JSON value of a member as Python writes it.
func spaced(t *testing.T, member string) string {
	_, value, _ := strings.Cut(member, ":")
	if !json.Valid([]byte(value)) {
		t.Fatal(value)
	}
	return strings.ReplaceAll(strings.ReplaceAll(value, `":`, `": `), `,"`, `, "`)
}

// A model without a format, and a gateway that reads no calls, refuse tools by name.
func TestToolsRefused(t *testing.T) {
	for name, b := range map[string]*bed{
		"--tool-call-parser":        newBed(t, Options{}, one(nodestest.Options{})),
		"tool_choice":               toolBed(t, Options{ToolCallParser: "none", ReasoningParser: "none"}, calls),
		"--enable-auto-tool-choice": toolBed(t, Options{NoToolCalls: true}, calls),
	} {
		r := b.post(chatPath, `{`+hi+`,`+weather+`}`)
		if a := r.parse(t); r.StatusCode != 400 || *a.Error.Param != "tools" || !strings.Contains(a.Error.Message, name) {
			t.Errorf("%s: %d %s", name, r.StatusCode, r.body)
		}
		if r := b.post(chatPath, `{`+hi+`,`+weather+`,"tool_choice":"none"}`); r.StatusCode != 200 {
			t.Errorf("%s: %d %s", name, r.StatusCode, r.body)
		}
	}
	for _, o := range []Options{{ToolCallParser: "x"}, {ReasoningParser: "x"}} {
		o.RPC.Hello = &nodepb.Hello{NodeId: "gw"}
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), `parser "x": known are`) {
			t.Errorf("%v", err)
		}
	}
}

// Reasoning begins with its marker, or where the template has left the prompt; markers in messages
// do not count.
func TestReasoning(t *testing.T) {
	const asked = `{"messages":[{"role":"user","content":"what is <think>"}]`
	for _, c := range []struct{ text, fields, want string }{
		{"Hm.\n</think>\n\nYes.", `"chat_template_kwargs":{"enable_thinking":true}`, `"Hm." "Yes." stop`},
		{"Hm.\n</think>\n\nYes.", `"chat_template_kwargs":{"enable_thinking":true},"include_reasoning":false`, `"" "Yes." stop`},
		{"<think>\nHm.\n</think>\n\nYes.", `"n":1`, `"Hm." "Yes." stop`},
		{"Yes.", `"n":1`, `"" "Yes." stop`},
		{"Yes.", `"chat_template_kwargs":{"enable_thinking":false}`, `"" "Yes." stop`},
		{"<think>\nHm, and", `"n":1`, `"Hm, and" null stop`},
		{"Hm, and", `"max_tokens":3,"chat_template_kwargs":{"enable_thinking":true}`, `"Hm," null length`},
	} {
		b := toolBed(t, Options{}, c.text, hermesMarkers[:2]...)
		for _, body := range withStream(asked + `,` + c.fields + `}`) {
			if got, _ := messagesOf(t, b.post(chatPath, body)); len(got) != 1 || got[0].String() != c.want {
				t.Errorf("%q, %s:\n got %v\nwant %s", c.text, body, got, c.want)
			}
		}
	}
}

// A grammar constrains what follows the reasoning if the prompt ends within it, and otherwise all of
// the answer.
func TestGrammarFollowsReasoning(t *testing.T) {
	bundle := toolBundle(hermesMarkers...)
	node := constraining("d1", grammar.Version)
	node.Bundle, node.Token = bundle, writes(t, bundle, "Hm.\n</think>{}")
	b := newBed(t, Options{}, one(node))
	for kwargs, want := range map[string]string{`{"enable_thinking":true}`: "</think>", `{"enable_thinking":false}`: "", `{}`: ""} {
		r := b.post(chatPath, `{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_object"},"chat_template_kwargs":`+kwargs+`}`)
		if r.StatusCode != 200 {
			t.Fatalf("%s: %d %s", kwargs, r.StatusCode, r.body)
		}
		for _, n := range b.nodes {
			all := n.Requests()
			if got := all[len(all)-1].Grammar.GetAfter(); got != want {
				t.Errorf("%s: the grammar begins behind %q, want %q", kwargs, got, want)
			}
		}
	}
}

// Answers with calls and reasoning whose nodes are lost in the middle are what they are on nodes
// that live, ids included.
func TestToolsResume(t *testing.T) {
	bu := toolBundle(hermesMarkers...)
	token := writes(t, bu, calls)
	whole := newBed(t, Options{}, one(nodestest.Options{Bundle: bu, Token: token}))
	lossy := newBed(t, Options{}, map[string]nodestest.Options{
		"d1": {Bundle: bu, Token: token, CutAfter: 9}, "d2": {Bundle: bu, Token: token, CutAfter: 40}, "d3": {Bundle: bu, Token: token},
	})
	for _, body := range withStream(`{` + hi + `,` + weather + `,"seed":5,"n":3,"logprobs":true}`) {
		want, wantUsage := messagesOf(t, whole.post(chatPath, body))
		got, usage := messagesOf(t, lossy.post(chatPath, body))
		if fmt.Sprint(got) != fmt.Sprint(want) || usage != wantUsage || len(got) != 3 {
			t.Errorf("%s:\n got %v %s\nwant %v %s", body, got, usage, want, wantUsage)
		}
		ids := map[string]bool{}
		for i := range want {
			for k := range want[i].Calls {
				ids[want[i].Calls[k].ID] = true
				if i < len(got) && k < len(got[i].Calls) && got[i].Calls[k].ID != want[i].Calls[k].ID {
					t.Errorf("choice %d, call %d: id %s, want %s", i, k, got[i].Calls[k].ID, want[i].Calls[k].ID)
				}
			}
		}
		if len(ids) != 6 {
			t.Errorf("ids %v", ids)
		}
	}
}

// No text of a hostile answer is lost, and each answer ends.
func TestHostileAnswers(t *testing.T) {
	for text, want := range map[string]string{
		"<tool_call>":                            `"" "<tool_call>" stop`,
		"a<tool_call>{\"name\": 3}</tool_call>b": `"" "a<tool_call>{\"name\": 3}</tool_call>b" stop`,
		"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, ":                          `"" null f({"a": [1, ) tool_calls`,
		"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"<tool_call>\"}}</tool_call>": `"" null f({"a": "<tool_call>"}) tool_calls`,
		"</tool_call></think>x": `"" "</tool_call>x" stop`,
	} {
		b := toolBed(t, Options{}, text)
		for _, body := range withStream(`{` + hi + `,` + weather + `}`) {
			if got, _ := messagesOf(t, b.post(chatPath, body)); len(got) != 1 || got[0].String() != want {
				t.Errorf("%q:\n got %v\nwant %s", text, got, want)
			}
		}
	}
	big := strings.Repeat("x", 60000)
	b := toolBed(t, Options{}, `<tool_call>{"name": "f", "arguments": {"a": "`+big+`"}}</tool_call>`)
	got, _ := messagesOf(t, b.post(chatPath, `{`+hi+`,`+weather+`,"stream":true}`))
	if got[0].String() != `"" null f({"a": "`+big+`"}) tool_calls` {
		t.Errorf("%d bytes", len(got[0].String()))
	}
}

// GPT-OSS writes messages to channels, and ends a call by a token that ends the answer.
func TestHarmonyAnswers(t *testing.T) {
	for text, want := range map[string]string{
		"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Oslo\"}<|call|>": `"Hm." null weather({"city": "Oslo"}) tool_calls`,
		"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.":                                                                     `"Hm." "Yes." stop`,
		"<|channel|>final<|message|>Yes.": `"" "Yes." stop`,
	} {
		bu := toolBundle("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>")
		bu.ChatTemplate = "{# <|channel|> <|message|> #}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
		bu.EosTokenIds = append(bu.EosTokenIds, int32(bu.VocabSize)-1)
		b := newBed(t, Options{}, one(nodestest.Options{Bundle: bu, Token: writes(t, bu, text)}))
		for _, body := range withStream(`{` + hi + `,` + weather + `}`) {
			if got, _ := messagesOf(t, b.post(chatPath, body)); len(got) != 1 || got[0].String() != want {
				t.Errorf("%q:\n got %v\nwant %s", text, got, want)
			}
		}
		if strings.Contains(text, "to=") {
			continue // without tools a model calls none
		}
		if got, _ := messagesOf(t, b.post(chatPath, `{`+hi+`}`)); got[0].String() != want {
			t.Errorf("%q without tools:\n got %v\nwant %s", text, got, want)
		}
	}
}
