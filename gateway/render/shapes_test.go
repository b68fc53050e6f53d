package render

import (
	"encoding/json"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
)

// joinedTemplate and partsTemplate write what a template sees. The second reads content parts.
const (
	joinedTemplate = `{{ messages | tojson }}`
	partsTemplate  = joinedTemplate + `{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}`
)

func TestMessageShapes(t *testing.T) {
	for _, c := range []struct{ name, in, joined, parts string }{ // parts empty: as joined
		{"null calls", `{"role":"assistant","content":"a","tool_calls":null}`, `{"role": "assistant", "content": "a"}`, ""},
		{"no calls", `{"role":"assistant","content":"a","tool_calls":[]}`, `{"role": "assistant", "content": "a"}`, ""},
		{"model_dump", `{"content":"a","refusal":null,"role":"assistant","annotations":null,"audio":null,"function_call":null,"tool_calls":null}`,
			`{"content": "a", "role": "assistant"}`, ""},
		{"null content", `{"role":"assistant","content":null}`, `{"role": "assistant", "content": ""}`, ""},
		{"null content of a user", `{"role":"user","content":null}`, `{"role": "user", "content": ""}`, ""},
		{"missing content", `{"role":"assistant"}`, `{"role": "assistant", "content": ""}`, ""},
		{"missing content of a user", `{"role":"user"}`, `{"role": "user"}`, ""},
		{"empty arguments", `{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":""}}]}`,
			`{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]}`, ""},
		{"null arguments", `{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":null}},{"function":{"name":"g"}}]}`,
			`{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}, {"function": {"name": "g", "arguments": {}}}]}`, ""},
		{"arguments", `{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{\"b\":1,\"a\":[null]}"}}]}`,
			`{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": [null]}}}]}`, ""},
		{"arguments that are no JSON", `{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{x"}}]}`,
			`{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}`, ""},
		{"parts of a tool", `{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"7"},{"type":"text","text":"8"}]}`,
			`{"role": "tool", "tool_call_id": "1", "content": "7\n8"}`, ""},
		{"other parts", `{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"x"},{"type":"refusal","refusal":"no"},{"type":"output_text","text":"b"},"c"]}`,
			`{"role": "assistant", "content": "hm\nno\nb\nc"}`,
			`{"role": "assistant", "content": [{"type": "text", "text": "hm"}, {"type": "text", "text": "no"}, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}`},
		{"a half surrogate", `{"role":"user","content":"a\ud83d"}`, "{\"role\": \"user\", \"content\": \"a\uFFFD\"}", ""},
		{"half surrogates of parts", `{"role":"user","content":[{"type":"text","text":"\ud83d"},{"type":"text","text":"\ude00"}]}`,
			"{\"role\": \"user\", \"content\": \"\uFFFD\\n\uFFFD\"}",
			"{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"\uFFFD\"}, {\"type\": \"text\", \"text\": \"\uFFFD\"}]}"},
	} {
		for _, template := range []string{joinedTemplate, partsTemplate} {
			want := c.joined
			if template == partsTemplate && c.parts != "" {
				want = c.parts
			}
			if got := rendered(t, template, `"messages":[`+c.in+`]`); got != "["+want+"]" {
				t.Errorf("%s:\n%s\nwant\n[%s]", c.name, got, want)
			}
		}
	}
}

// rendered returns the prompt of a chat request with the fields.
func rendered(t *testing.T, template, fields string) string {
	t.Helper()
	r, fault := openai.Parse(openai.Chat, []byte("{"+fields+"}"))
	if fault != nil {
		t.Fatal(fields, fault)
	}
	chat, err := jinja.Parse(template)
	if err != nil {
		t.Fatal(err)
	}
	text, _, fault := (&TextModel{chat: chat, efforts: knownEfforts(chat)}).render(r)
	if fault != nil {
		t.Fatal(fields, fault)
	}
	return text
}

func TestReasoningEffort(t *testing.T) {
	for _, c := range []struct{ template, want string }{ // of none, minimal, low, medium, high, xhigh, max
		{``, "low low low medium high high high"},                                             // gpt-oss
		{`{% if reasoning_effort == "max" %}{% endif %}`, "low low low medium high high max"}, // DeepSeek
		{`{% if reasoning_effort not in ['none', 'high'] %}{% endif %}`, "none high high high high high high"},
		{`{% if not reasoning_effort is defined or reasoning_effort not in ['high', 'low', 'no_think'] %}{% endif %}`, "no_think low low low high high high"},
		{`{% if reasoning_effort in ["medium", "high", "xhigh"] %}{% elif reasoning_effort in ["low", "minimal"] %}{% endif %}`, "minimal minimal low medium high xhigh xhigh"},
		{`{% if reasoning_effort | lower == "none" %}{% endif %}`, "none low low medium high high high"},
	} {
		got := ""
		for i, effort := range openai.ReasoningEfforts {
			if i > 0 {
				got += " "
			}
			got += rendered(t, c.template+`{{ reasoning_effort }}`, `"messages":[{"role":"user","content":"x"}],"reasoning_effort":"`+effort+`"`)
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.template, got, c.want)
		}
	}
	for fields, want := range map[string]string{
		`"reasoning_effort":null`:   "undefined undefined undefined",
		`"reasoning_effort":"none"`: "low false false",
		`"reasoning_effort":"high"`: "high true true",
		`"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true}`:         "low true false",
		`"reasoning_effort":"high","chat_template_kwargs":{"reasoning_effort":"own words"}`: "own words true true",
	} {
		const template = `{{ reasoning_effort | default("undefined") }} {{ enable_thinking | default("undefined") | lower }} {{ thinking | default("undefined") | lower }}`
		if got := rendered(t, template, `"messages":[{"role":"user","content":"x"}],`+fields); got != want {
			t.Errorf("%s: %q, want %q", fields, got, want)
		}
	}
	for _, effort := range []string{`"bogus"`, `""`, `"None"`, `1`, `true`} {
		_, fault := openai.Parse(openai.Chat, []byte(`{"messages":[{"role":"user","content":"x"}],"reasoning_effort":`+effort+`}`))
		if fault == nil || fault.Status != 400 || fault.Param != "reasoning_effort" {
			t.Errorf("%s: %v", effort, fault)
		}
	}
}

// The error of a prompt that does not fit has what LiteLLM, langchain and dspy look for.
func TestContextTooLong(t *testing.T) {
	m := &Model{MaxLen: 4, Vocab: 10}
	for _, c := range []struct {
		tokens, maxTokens int
		param, message    string
	}{
		{4, -1, "messages", "This model's maximum context length is 4 tokens. The prompt has 4 tokens, which leaves no room for an answer: shorten it (context_length_exceeded)"},
		{1, 4, "max_tokens", "This model's maximum context length is 4 tokens. The prompt has 1 token and max_tokens is 4, which is more together: shorten one of them (context_length_exceeded)"},
		{3, 2, "max_tokens", "This model's maximum context length is 4 tokens. The prompt has 3 tokens and max_tokens is 2, which is more together: shorten one of them (context_length_exceeded)"},
	} {
		fault := m.fit(&Prompt{Tokens: make([]int32, c.tokens)}, &openai.Request{MaxTokens: c.maxTokens}, "messages")
		text, _ := json.Marshal(c.message)
		want := `{"error":{"message":` + string(text) + `,"type":"BadRequestError","param":"` + c.param + `","code":"context_length_exceeded"}}`
		if fault == nil || string(fault.Append(nil)) != want {
			t.Errorf("%s\nwant\n%s", fault.Append(nil), want)
		}
	}
}
