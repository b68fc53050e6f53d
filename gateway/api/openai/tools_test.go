package openai

import (
	"encoding/json"
	"strings"
	"testing"
)

// Tools are stored with their schemas. A list of none counts as absent.
func TestTools(t *testing.T) {
	r, fault := Parse(Chat, []byte(`{`+hello+`,"parallel_tool_calls":true,"tool_choice":"auto","tools":[
		{"type":"function","function":{"name":"a.b-c_1","description":null,"parameters":{"type":"object"},"strict":false,"x":1}},
		{"function":{"parameters":null,"name":"g"},"type":"function"}]}`))
	if fault != nil {
		t.Fatal(fault)
	}
	f := r.Functions
	if len(f) != 2 || f[0].Name != "a.b-c_1" || string(f[0].Parameters) != `{"type":"object"}` || f[1].Name != "g" || f[1].Parameters != nil || r.Calls.None {
		t.Errorf("%+v %+v", f, r)
	}
	if r, fault = Parse(Chat, []byte(`{`+hello+`,"tool_choice":"none","tools":[],"parallel_tool_calls":false,"include_reasoning":false}`)); fault != nil || r.Tools != nil || !r.Calls.None || !r.HideReasoning {
		t.Errorf("%v %+v", fault, r)
	}
	const one = `{"type":"function","function":{"name":"f"}},`
	for n, want := range map[int]string{MaxTools: "", MaxTools + 1: "tools"} {
		_, fault := Parse(Chat, []byte(`{`+hello+`,"tools":[`+strings.TrimSuffix(strings.Repeat(one, n), ",")+`]}`))
		if (fault == nil) != (want == "") || fault != nil && fault.Param != want {
			t.Errorf("%d tools: %v", n, fault)
		}
	}
}

// Answers with reasoning and calls, whole and streamed. A Delta has one entry for a call, and uses
// its memory again.
func TestParsedAnswers(t *testing.T) {
	e := NewEncoder(Chat, "c", 1, "m", "fp")
	d := Delta{Reasoning: []byte("so"), Finish: Finish{Reason: ReasonToolCalls, Token: -1}}
	d.AddCall(ToolCall{ID: "x", Name: "f"})
	d.AddCall(ToolCall{Arguments: []byte(`{"a":`)})
	d.AddCall(ToolCall{Arguments: []byte("1}")})
	d.AddCall(ToolCall{Index: 1, ID: "y", Name: "g"})
	for want, got := range map[string]string{
		`"message":{"role":"assistant","content":null,"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[{"id":"x","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},{"id":"y","type":"function","function":{"name":"g","arguments":""}}],"reasoning":"so","reasoning_content":"so"},"logprobs":null,"finish_reason":"tool_calls","stop_reason":null`: string(e.AppendWhole(nil, []Delta{d}, Usage{})),
		`"delta":{"reasoning":"so","reasoning_content":"so","tool_calls":[{"id":"x","type":"function","index":0,"function":{"name":"f","arguments":"{\"a\":1}"}},{"id":"y","type":"function","index":1,"function":{"name":"g","arguments":""}}]},"logprobs":null,"finish_reason":"tool_calls","stop_reason":null`:                                                                                     string(e.AppendDelta(nil, &d)),
		`"completion_tokens_details":{"reasoning_tokens":3}}`: string(Usage{Reasons: true, Reasoning: 3}.Append(nil)),
	} {
		if !strings.Contains(got, want) {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	d.Calls, d.Reasoning, d.Text, d.Finish = d.Calls[:0], nil, []byte("t"), NotFinished
	more := []byte("1}")
	if n := testing.AllocsPerRun(100, func() {
		d.Calls = d.Calls[:0]
		d.AddCall(ToolCall{Index: 1, Arguments: more})
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
	const want = `"delta":{"content":"t","tool_calls":[{"index":1,"function":{"arguments":"1}"}}]}`
	if got := string(e.AppendDelta(nil, &d)); !strings.Contains(got, want) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// The document of /v1/responses has its own form of tools and tool_choice, and what forces calls.
func TestToolsOfResponses(t *testing.T) {
	text, err := json.Marshal(responseSchemas()["ResponseRequest"])
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`"enum":["none","auto","required"]`, `{"properties":{"name":{"type":"string"},"type":{"const":"function"}},"required":["type","name"],"type":"object"}`, `"strict":{"type":["boolean","null"]}`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s is missing", want)
		}
	}
}
