package messages

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// free charges nothing.
func free(int) *openai.Error { return nil }

// user returns a request with the messages, and with more fields.
func user(messages, fields string) string {
	return `{"max_tokens":9,"messages":[` + messages + `]` + fields + `}`
}

const hi = `{"role":"user","content":"hi"}`

// A request becomes a chat: in the order of its blocks, with texts as they are written.
func TestChat(t *testing.T) {
	const (
		asked    = `"messages":[{"role":"user","content":"hi"}],`
		tool     = `,"tools":[{"name":"f","input_schema":{}}]`
		chatTool = `"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],`
	)
	for _, c := range []struct{ body, want string }{
		{user(hi, ""), asked},
		{user(hi, `,"system":"Be \u0062rief."`), `"messages":[{"role":"system","content":"Be \u0062rief."},{"role":"user","content":"hi"}],`},
		{user(hi, `,"system":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}},{"type":"text","text":"b"}]`),
			`"messages":[{"role":"system","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},{"role":"user","content":"hi"}],`},
		// The line of Claude Code that changes with every request is left out.
		{user(hi, `,"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1;"},{"type":"text","text":"b"}]`), `"messages":[{"role":"system","content":"b"},{"role":"user","content":"hi"}],`},
		{user(hi, `,"system":"x-anthropic-billing-header: cch=1;\nYou"`), `"messages":[{"role":"system","content":"You"},{"role":"user","content":"hi"}],`},
		{user(hi, `,"system":"x-anthropic-billing-header: cch=1;"`), asked},
		{user(hi, `,"system":"x-anthropic-billing-header: C:\\new \u0041\u000AYou"`), `"messages":[{"role":"system","content":"You"},{"role":"user","content":"hi"}],`},
		// Messages of the system come first, of equal names the last one counts.
		{user(hi+`,{"role":"system","content":[{"type":"text","text":"late"}]}`, `,"system":"a"`), `"messages":[{"role":"system","content":[{"type":"text","text":"a"},{"type":"text","text":"late"}]},{"role":"user","content":"hi"}],`},
		{user(`{"role":"assistant","content":"x","content":"hi","role":"user"}`, ""), asked},
		{user(`{"role":"user","content":[]}`, ""), `"messages":[{"role":"user","content":""}],`},
		// Consecutive messages of a role are one.
		{user(hi+`,{"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}]}`, ""),
			`"messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"text","text":"b"},{"type":"text","text":"c"}]}],`},
		// A turn with thinking and calls; results precede the text of their message.
		{user(hi+`,{"role":"assistant","content":[{"type":"thinking","thinking":"Hm","signature":"s"},{"type":"redacted_thinking","data":"x"},{"type":"thinking","thinking":"\"so\"","signature":""},{"type":"text","text":"I look."},
			{"type":"tool_use","id":"c1","name":"f","input":{"a": [1, 2]}},{"type":"tool_use","id":"c2","name":"g","input":{}}]},
			{"role":"user","content":[{"type":"text","text":"and?"},{"type":"tool_result","tool_use_id":"c2","content":"two"},{"type":"tool_result","tool_use_id":"c1","content":[{"type":"text","text":"o"},{"type":"text","text":"ne"}]}]}`, ""),
			`"messages":[{"role":"user","content":"hi"},{"role":"assistant","reasoning_content":"Hm\n\"so\"","content":"I look.","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":{"a": [1, 2]}}},{"id":"c2","type":"function","function":{"name":"g","arguments":{}}}]},` +
				`{"role":"tool","tool_call_id":"c2","name":"g","content":"two"},{"role":"tool","tool_call_id":"c1","name":"f","content":[{"type":"text","text":"o"},{"type":"text","text":"ne"}]},{"role":"user","content":"and?"}],`},
		{user(`{"role":"user","content":[{"type":"tool_result","tool_use_id":"?","is_error":true,"content":[{"type":"text","text":"a"},{"type":"tool_reference","tool_name":"b"}]},{"type":"tool_result","tool_use_id":"?","is_error":true},{"type":"tool_result","tool_use_id":"?"}]}`, ""),
			`"messages":[{"role":"tool","tool_call_id":"?","content":"Error: a\nb"},{"role":"tool","tool_call_id":"?","content":"Error: "},{"role":"tool","tool_call_id":"?","content":""}],`},
		// An answer continues a last message of the assistant.
		{user(hi+`,{"role":"assistant","content":[{"type":"text","text":"{"}]}`, ""),
			`"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"{"}],"continue_final_message":true,"add_generation_prompt":false,`},

		{user(hi, `,"tools":[{"name":"f","description":"d","input_schema":{"type":"object"},"cache_control":null},{"type":"custom","name":"g","input_schema":{},"strict":true}]`),
			asked + `"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}},{"type":"function","function":{"name":"g","strict":true,"parameters":{}}}],`},
		{user(hi, `,"tools":[]`), asked + `"tools":[],`},
		{user(hi, `,"tool_choice":{"type":"auto"}`), asked + `"tool_choice":"auto",`},
		{user(hi, `,"tool_choice":{"type":"none"}`), asked + `"tool_choice":"none",`},
		{user(hi, tool+`,"tool_choice":{"type":"any","disable_parallel_tool_use":false}`), asked + chatTool + `"tool_choice":"required",`},
		{user(hi, tool+`,"tool_choice":{"type":"tool","name":"f","disable_parallel_tool_use":true}`), asked + chatTool + `"tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false,`},

		{user(hi, `,"thinking":{"type":"disabled"},"output_config":{"effort":"high"}`), asked + `"reasoning_effort":"none",`},
		{user(hi, `,"thinking":{"type":"adaptive"}`), asked + `"chat_template_kwargs":{"enable_thinking":true,"thinking":true},`},
		{user(hi, `,"thinking":{"type":"adaptive","display":"omitted"},"output_config":{"effort":"max"}`), asked + `"include_reasoning":false,"reasoning_effort":"max",`},
		{user(hi, `,"thinking":{"type":"enabled","budget_tokens":1024}`), asked + `"reasoning_effort":"low",`},
		{user(hi, `,"thinking":{"type":"enabled","budget_tokens":10000}`), asked + `"reasoning_effort":"medium",`},
		{user(hi, `,"thinking":{"type":"enabled","budget_tokens":31999}`), asked + `"reasoning_effort":"high",`},
		{user(hi, `,"thinking":{"type":"enabled","budget_tokens":31999},"output_config":{"effort":"low"}`), asked + `"reasoning_effort":"low",`},
		{user(hi, `,"output_config":{"effort":"xhigh"}`), asked + `"reasoning_effort":"xhigh",`},
		{user(hi, `,"output_config":{"format":{"type":"json_schema","schema":{"type": "object"}}}`), asked + `"response_format":{"type":"json_schema","json_schema":{"name":"output","schema":{"type": "object"}}},`},
		{user(hi, `,"output_format":{"type":"json_schema","schema":true}`), asked + `"response_format":{"type":"json_schema","json_schema":{"name":"output","schema":true}},`},

		{user(hi, `,"metadata":{"user_id":"u"},"cache_control":{},"service_tier":"auto","context_management":{"edits":[]},"mcp_servers":[],"container":null,"n":3,"\u0061":[[]]`),
			`"n of /v1/messages":null,"\\u0061 of /v1/messages":null,` + asked + `"user":"u",`},
	} {
		got, fault := New().Chat([]byte(c.body), free)
		if want := `{` + strings.Replace(c.want, `\\u0061`, "a", 1) + `"max_tokens":9}`; fault != nil || string(got) != want {
			t.Errorf("%s:\n got %s %v\nwant %s", c.body, got, fault, want)
		}
		if _, fault := openai.Parse(openai.Chat, got); fault != nil && !strings.Contains(fault.Message, "not supported here (got") {
			t.Errorf("%s: %v", got, fault)
		}
	}
	const sampling = `"model":"m","max_tokens":9,"temperature":0.5,"top_p":1,"top_k":3,"stream":true,"stop":["x"],"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`
	got, fault := New().Chat([]byte(user(hi, `,"model":"m","stop_sequences":["x"],"temperature":0.5,"top_p":1,"top_k":3,"stream":true`)), nil)
	if fault != nil || string(got) != `{"messages":[{"role":"user","content":"hi"}],`+sampling {
		t.Errorf("%s %v", got, fault)
	}
	if got, fault := NewCount().Chat([]byte(`{"messages":[`+hi+`]}`), free); fault != nil || string(got) != `{"messages":[{"role":"user","content":"hi"}]}` {
		t.Errorf("%s %v", got, fault)
	}
}

// What is not served is refused by its name and place.
func TestRefused(t *testing.T) {
	const client = ": the client runs tools: describe each by name, description and input_schema"
	block := func(b string) string { return user(`{"role":"user","content":[{"type":"text","text":"a"},`+b+`]}`, "") }
	for body, want := range map[string]string{
		`[]`:                        `the body is not a valid JSON object: at byte 0: '[' instead of '{'`,
		`{"messages":[}`:            `the body is not a valid JSON object: at byte 13: invalid character '}' at the beginning of a value`,
		`{"max_tokens":1}`:          `messages is required: a list of objects with role and content`,
		`{"messages":[]}`:           `max_tokens is required: the most tokens of the answer`,
		user("", ""):                `messages must be a list with at least one message, not []`,
		user("3", ""):               `messages[0] must be an object, not 3`,
		user(hi+",null", ""):        `messages[1] must be an object, not null`,
		user(`{"content":"a"}`, ""): `messages[0].role must be user, assistant or system, not missing`,
		user(`{"role":"tool","content":"a"}`, ""):                          `messages[0].role must be user, assistant or system, not "tool"`,
		user(`{"role":"user"}`, ""):                                        `messages[0].content must be a string or a list of blocks, not missing`,
		user(hi+`,{"role":"assistant","content":3}`, ""):                   `messages[1].content must be a string or a list of blocks, not 3`,
		user(hi+`,{"role":"system","content":[{"type":"image"}]}`, ""):     `messages[1].content[0].type "image" is not supported here in a system prompt: send text`,
		user(hi, `,"system":3`):                                            `system must be a string or a list of text blocks, not 3`,
		user(hi, `,"system":[{"type":"text","text":"a"},{"type":"text"}]`): `system[1].text must be a string, not missing`,
		block(`3`):                                                                                               `messages[0].content[1] must be an object, not 3`,
		block(`{"text":"a"}`):                                                                                    `messages[0].content[1].type missing is not supported here in messages of the user: send text and tool_result`,
		block(`{"type":"image","source":{}}`):                                                                    `messages[0].content[1].type "image" is not supported here in messages of the user: send text and tool_result`,
		block(`{"type":"document","source":{}}`):                                                                 `messages[0].content[1].type "document" is not supported here in messages of the user: send text and tool_result`,
		block(`{"type":"text","text":null}`):                                                                     `messages[0].content[1].text must be a string, not missing`,
		block(`{"type":"tool_result"}`):                                                                          `messages[0].content[1].tool_use_id must be a string, not missing`,
		block(`{"type":"tool_result","tool_use_id":"a","content":3}`):                                            `messages[0].content[1].content must be a string or a list of blocks, not 3`,
		block(`{"type":"tool_result","tool_use_id":"a","is_error":3}`):                                           `messages[0].content[1].is_error must be true or false, not 3`,
		block(`{"type":"tool_result","tool_use_id":"a","content":["x"]}`):                                        `messages[0].content[1].content[0] must be an object, not "x"`,
		block(`{"type":"tool_result","tool_use_id":"a","content":[{"type":"image"}]}`):                           `messages[0].content[1].content[0].type "image" is not supported here in results of tools: send text`,
		user(hi+`,{"role":"assistant","content":[{"type":"server_tool_use"}]}`, ""):                              `messages[1].content[0].type "server_tool_use" is not supported here in messages of the assistant: send text, thinking, redacted_thinking and tool_use`,
		user(hi+`,{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f"}]}`, ""):                 `messages[1].content[0].input must be an object, not missing`,
		user(hi+`,{"role":"assistant","content":[{"type":"tool_use","name":"f","input":{}}]}`, ""):               `messages[1].content[0].id must be a string, not missing`,
		user(hi+`,{"role":"assistant","content":[{"type":"tool_use","id":"a","input":{}}]}`, ""):                 `messages[1].content[0].name must be a string, not missing`,
		user(hi+`,{"role":"assistant","content":[{"type":"thinking"}]}`, ""):                                     `messages[1].content[0].thinking must be a string, not missing`,
		user(hi+`,{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}`, ""):      `messages[1] ends the chat, and an answer can continue only text: a message of the user with the results of tools is missing`,
		user(hi, `,"tools":{}`):                                                                                  `tools must be a list, not {}`,
		user(hi, `,"tools":[3]`):                                                                                 `tools[0] must be an object, not 3`,
		user(hi, `,"tools":[{"name":"a","input_schema":{}},{"type":"web_search_20250305","name":"web_search"}]`): `tools[1].type "web_search_20250305" is not supported here` + client,
		user(hi, `,"tools":[{"name":"a"}]`):                                                                      `tools[0].input_schema is required: a JSON schema, which is an object, not missing`,
		user(hi, `,"tool_choice":"any"`):                                                                         `tool_choice must be an object, not "any"`,
		user(hi, `,"tool_choice":{"type":"required"}`):                                                           `tool_choice.type must be auto, any, tool or none, not "required"`,
		user(hi, `,"tool_choice":{"type":"tool"}`):                                                               `tool_choice.name must be a string, not missing`,
		user(hi, `,"tool_choice":{"type":"any","disable_parallel_tool_use":3}`):                                  `tool_choice.disable_parallel_tool_use must be true or false, not 3`,
		user(hi, `,"thinking":true`):                                                                             `thinking must be an object, not true`,
		user(hi, `,"thinking":{"type":"on"}`):                                                                    `thinking.type must be enabled, adaptive or disabled, not "on"`,
		user(hi, `,"thinking":{"type":"enabled"}`):                                                               `thinking.budget_tokens must be a number of tokens, not missing`,
		user(hi, `,"thinking":{"type":"adaptive","display":"all"}`):                                              `thinking.display must be summarized or omitted, not "all"`,
		user(hi, `,"output_config":3`):                                                                           `output_config must be an object, not 3`,
		user(hi, `,"output_config":{"format":3}`):                                                                `output_config.format must be an object, not 3`,
		user(hi, `,"output_config":{"format":{"type":"text"}}`):                                                  `output_config.format.type must be json_schema, not "text"`,
		user(hi, `,"output_format":{"type":"json_schema"}`):                                                      `output_format.schema is required: a JSON schema`,
		user(hi, `,"output_format":{},"output_config":{"format":{}}`):                                            `output_format and output_config.format both constrain the answer: send one of them`,
		user(hi, `,"metadata":3`):                                                                                `metadata must be an object, not 3`,
		user(hi, `,"container":"c"`):                                                                             `container is not supported here` + client,
		user(hi, `,"mcp_servers":[{}]`):                                                                          `mcp_servers is not supported here` + client,
		user(hi, `,"service_tier":"fast"`):                                                                       `service_tier must be auto or standard_only, not "fast"`,
		user(hi, `,"stop_sequences":"x"`):                                                                        `stop_sequences must be a list of strings, not "x"`,
		user(strings.Repeat(hi+",", openai.MaxMessages)+hi, ""):                                                  `messages: has too many elements, at most 16384 are taken`,
		block(strings.Repeat(`{"type":"text","text":""},`, openai.MaxValues/3) + `0`):                            `messages: has too many values in it, at most 131072 are taken`,
	} {
		if _, fault := New().Chat([]byte(body), free); fault == nil || fault.Message != want || fault.Status != 400 {
			t.Errorf("%.300s:\n got %v\nwant %s", body, fault, want)
		}
	}
	if _, fault := New().Chat([]byte(user(hi, "")), func(int) *openai.Error { return openai.TooMany(1, "full") }); fault == nil || fault.Status != 429 {
		t.Errorf("%v", fault)
	}
}

// Errors of the chat name the fields of this API.
func TestFault(t *testing.T) {
	for _, c := range []struct{ fields, want string }{
		{`,"stop_sequences":[3]`, `stop_sequences: must be a string or a list of strings, not [3]`},
		{`,"max_tokens":0`, `max_tokens: must be at least 1, not 0`},
		{`,"output_config":{"effort":"more"}`, `output_config.effort: must be one of none, minimal, low, medium, high, xhigh, max, not "more"`},
		{`,"tools":[{"name":"a b","input_schema":{}}]`, `tools[0].name must have 1 to 128 letters, digits, underscores, points or hyphens, not "a b"`},
		{`,"metadata":{"user_id":3}`, `metadata.user_id: must be a string, not 3`},
	} {
		body, fault := New().Chat([]byte(user(hi, c.fields)), free)
		if fault == nil {
			_, fault = openai.Parse(openai.Chat, body)
		}
		if fault == nil {
			t.Errorf("%s is served", c.fields)
		} else if got := New().Fault(fault); got.Message != c.want || !strings.HasPrefix(c.want, got.Param) {
			t.Errorf("%s: %v, want %s", c.fields, got, c.want)
		}
	}
	schema := openai.BadRequest("response_format.json_schema.schema", "response_format.json_schema.schema: no")
	older := New()
	if _, fault := older.Chat([]byte(user(hi, `,"output_format":{"type":"json_schema","schema":{"not":1}}`)), free); fault != nil {
		t.Fatal(fault)
	}
	if got := older.Fault(schema); got.Param != "output_format.schema" || got.Message != "output_format.schema: no" {
		t.Errorf("%v", got)
	}
	if got := New().Fault(schema); got.Param != "output_config.format.schema" || got.Message != "output_config.format.schema: no" {
		t.Errorf("%v", got)
	}
}

// The memory that a request needs is charged before it is allocated.
func TestCharge(t *testing.T) {
	name := strings.Repeat("n", 128)
	call := user(hi+`,{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"`+name+`","input":{}}]},{"role":"user","content":[{"type":"text","text":"b"}`+
		strings.Repeat(`,{"type":"tool_result","tool_use_id":"a"}`, 5000)+`]}`, "")
	for _, body := range []string{
		call, strings.Replace(call, name, name+strings.Repeat("n", 9000), 1), strings.ReplaceAll(call, `"a"}`, `"a","is_error":true}`),
		user(strings.Repeat(hi+`,{"role":"assistant","content":[]},`, 5000)+hi, ""),
		user(hi, `,"tools":[{"name":"f","input_schema":{}}`+strings.Repeat(`,{"name":"f","input_schema":{}}`, 5000)+`]`),
		user(hi, `,"x":{}`+strings.Repeat(`,"`+name+`":0`, 5000)),
	} {
		charged := 0
		got, fault := New().Chat([]byte(body), func(n int) *openai.Error { charged += n; return nil })
		if fault != nil || charged < len(got) || charged > 24*len(body) {
			t.Errorf("%d bytes: %d are charged for %d, %v", len(body), charged, len(got), fault)
		}
	}
}

// deltas are those of an answer with every kind of content.
func deltas() []openai.Delta {
	usage := func(n int) *openai.Usage {
		return &openai.Usage{Prompt: 30, Cached: 16, Completion: n, Reasoning: 3, Reasons: true}
	}
	d := func(n int, d openai.Delta) openai.Delta {
		d.Usage = usage(n)
		if d.Finish.Reason == "" {
			d.Finish = openai.NotFinished
		}
		return d
	}
	return []openai.Delta{
		d(1, openai.Delta{Begin: true}),
		d(2, openai.Delta{Reasoning: []byte("Hm, \"")}),
		d(3, openai.Delta{Reasoning: []byte("so\".")}),
		d(4, openai.Delta{Text: []byte("I ")}),
		d(5, openai.Delta{Text: []byte("look\n")}),
		d(6, openai.Delta{Calls: []openai.ToolCall{{Index: 0, ID: "c0", Name: "f"}}}),
		d(7, openai.Delta{Calls: []openai.ToolCall{{Index: 0, Arguments: []byte(`{"a": `)}}}),
		d(8, openai.Delta{Text: []byte("then"), Calls: []openai.ToolCall{{Index: 0, Arguments: []byte(`"é"}`)}, {Index: 1, ID: "c1", Name: "g", Arguments: []byte("{")}}}),
		d(9, openai.Delta{Calls: []openai.ToolCall{{Index: 1, Arguments: []byte("}")}, {Index: 2, ID: "c2", Name: "h", Arguments: []byte("{}")}}, Finish: openai.Finish{Reason: "tool_calls", Token: -1}}),
	}
}

func stream(m *Message, all []openai.Delta) (dst []byte) {
	m.Begin("req", 7, "some \"model\"")
	for i := range all {
		dst = m.AppendDelta(dst, &all[i])
	}
	return m.AppendEnd(dst, all[len(all)-1].Usage)
}

// golden compares got with a file of testdata, which UPDATE=1 rewrites.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s: %v, got\n%s", path, err, got)
	}
}

// The events of a stream: one block at a time, each with its start and its stop.
func TestStream(t *testing.T) {
	m := New()
	golden(t, "stream.txt", append(m.AppendKeepAlive(stream(m, deltas())), AppendErrorEvent(nil, openai.Unavailable(1, "no \"node\""), "req")...))
	index, open := -1, false
	for event := range strings.SplitSeq(strings.TrimSuffix(string(stream(New(), deltas())), "\n\n"), "\n\n") {
		var e struct {
			Type  string
			Index *int
		}
		name, data, _ := strings.Cut(event, "\ndata: ")
		if err := json.Unmarshal([]byte(data), &e); err != nil || name != "event: "+e.Type {
			t.Fatalf("%q: %v", event, err)
		}
		switch e.Type {
		case "content_block_start":
			if index++; open || *e.Index != index {
				t.Errorf("%q begins in block %d", event, index)
			}
			open = true
		case "content_block_delta", "content_block_stop":
			if !open || *e.Index != index {
				t.Errorf("%q is not in block %d", event, index)
			}
			open = e.Type == "content_block_delta"
		default:
			if open {
				t.Errorf("%q is in block %d", event, index)
			}
		}
	}
	if index != 5 {
		t.Errorf("%d blocks", index+1)
	}
}

// A whole answer has the blocks in the order of a message.
func TestWhole(t *testing.T) {
	var whole openai.Delta
	for _, d := range deltas() {
		whole.Text, whole.Reasoning, whole.Finish = append(whole.Text, d.Text...), append(whole.Reasoning, d.Reasoning...), d.Finish
		for _, c := range d.Calls {
			whole.AddCall(c)
		}
	}
	m, usage := New(), openai.Usage{Prompt: 30, Cached: 16, Completion: 9}
	if id := m.Begin("req", 7, "some \"model\""); id != "msg_req" {
		t.Error(id)
	}
	got := m.AppendWhole(nil, []openai.Delta{whole}, usage)
	whole.Calls[1].Arguments = []byte(`{"a": [1, `) // the answer ended here
	whole.Calls[2].Arguments = nil
	whole.Finish = openai.Finish{Reason: "length", Token: -1}
	got = append(m.AppendWhole(append(got, '\n'), []openai.Delta{whole}, usage), '\n')
	got = append(m.AppendWhole(got, []openai.Delta{{Finish: openai.Finish{Reason: "stop", Stop: "\"x\"", Token: -1}}}, usage), '\n')
	golden(t, "whole.txt", got)
	for line := range bytes.Lines(got) {
		if !json.Valid(line) {
			t.Errorf("%s", line)
		}
	}
}

// The reason of the end: the length, a call, a stop sequence, the model's own.
func TestStopReason(t *testing.T) {
	for _, c := range []struct {
		finish openai.Finish
		called bool
		want   string
	}{
		{openai.Finish{Reason: "length", Token: -1}, true, `"stop_reason":"max_tokens","stop_sequence":null`},
		{openai.Finish{Reason: "length", Token: -1}, false, `"stop_reason":"max_tokens","stop_sequence":null`},
		{openai.Finish{Reason: "tool_calls", Token: -1}, true, `"stop_reason":"tool_use","stop_sequence":null`},
		{openai.Finish{Reason: "stop", Stop: "x", Token: -1}, true, `"stop_reason":"tool_use","stop_sequence":null`},
		{openai.Finish{Reason: "stop", Stop: "x", Token: -1}, false, `"stop_reason":"stop_sequence","stop_sequence":"x"`},
		{openai.Finish{Reason: "stop", Token: -1}, false, `"stop_reason":"end_turn","stop_sequence":null`},
	} {
		if got := string(appendStop(nil, &c.finish, c.called, false)); got != c.want {
			t.Errorf("%+v %t: %s", c.finish, c.called, got)
		}
	}
}

// An answer that ends before max_tokens because of its length has filled the context.
func TestContextFull(t *testing.T) {
	for maxTokens, want := range map[string]string{"9": "max_tokens", "1e1": "model_context_window_exceeded", "1e99": "model_context_window_exceeded"} {
		m, u := New(), openai.Usage{Completion: 9}
		if _, fault := m.Chat([]byte(strings.Replace(user(hi, ""), "9", maxTokens, 1)), free); fault != nil {
			t.Fatal(fault)
		}
		d := openai.Delta{Usage: &u, Finish: openai.Finish{Reason: "length", Token: -1}}
		want := `"stop_reason":"` + want + `"`
		if got := m.AppendWhole(nil, []openai.Delta{d}, u); !bytes.Contains(got, []byte(want)) {
			t.Errorf("%s: %s", maxTokens, got)
		}
		if got := m.AppendEnd(m.AppendDelta(nil, &d), &u); !bytes.Contains(got, []byte(want)) {
			t.Errorf("%s: %s", maxTokens, got)
		}
	}
}

// Every status has a type of Anthropic's.
func TestErrorTypes(t *testing.T) {
	for status, want := range map[int]string{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
		413: "request_too_large", 429: "rate_limit_error", 499: "invalid_request_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error"} {
		got := string(AppendError(nil, &openai.Error{Status: status, Message: "no"}, "r"))
		if got != fmt.Sprintf(`{"type":"error","error":{"type":"%s","message":"no"},"request_id":"r"}`, want) {
			t.Errorf("%d: %s", status, got)
		}
	}
	for path, want := range map[string]bool{"/v1/messages": true, "/v1/messages/count_tokens": true, "/v1/messages/batches": true, "/v1/messagesx": false, "/v1/models": false} {
		if Serves(path) != want {
			t.Errorf("%s: %t", path, !want)
		}
	}
}

// A Delta is appended to the buffer without further memory.
func TestDeltasAllocateNothing(t *testing.T) {
	m, all, dst := New(), deltas(), make([]byte, 0, 8<<10)
	m.Begin("req", 7, "m")
	if n := testing.AllocsPerRun(100, func() {
		*m = Message{id: m.id, model: m.model}
		for dst = dst[:0]; len(dst) == 0; dst = m.AppendEnd(dst, all[0].Usage) {
			for i := range all {
				dst = m.AppendDelta(dst, &all[i])
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The translation of any body ends in valid JSON within the memory that is charged, or in an error
// with a message.
func FuzzChat(f *testing.F) {
	f.Add([]byte(user(hi, `,"system":[{"type":"text","text":"x-anthropic-billing-header: a\\n"}],"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"any"},"thinking":{"type":"adaptive"},"stream":true`)))
	f.Add([]byte(user(hi+`,{"role":"assistant","content":[{"type":"thinking","thinking":"\u00e9"},{"type":"tool_use","id":"a","name":"f","input":{}},{"type":"text","text":"b"}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","is_error":true,"content":[{"type":"text","text":"\""}]}]}`, `,"output_config":{"effort":"low","format":{"type":"json_schema","schema":{}}}`)))
	f.Add([]byte(user(hi+`,{"role":"assistant","content":"a"},{"role":"system","content":"b"}`, `,"x":[1,{"y":null}],"metadata":{"user_id":"u"}`)))
	f.Add([]byte(`{"\u006dessages":[{"role":"user","content":""}],"max_tokens":1e0}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, m := range []*Message{New(), NewCount()} {
			charged := 0
			got, fault := m.Chat(body, func(n int) *openai.Error { charged += n; return nil })
			if fault != nil {
				if fault.Status != 400 || fault.Message == "" {
					t.Fatalf("%v", fault)
				}
				continue
			}
			if _, err := jsonscan.Valid(got, jsonscan.Bounds{}); err != nil {
				t.Fatalf("%s: %v", got, err)
			}
			if len(got) > charged+maxUnknown*128+512 {
				t.Fatalf("%d bytes, %d charged", len(got), charged)
			}
			if _, fault := openai.Parse(openai.Chat, got); fault != nil {
				m.Fault(fault)
			}
		}
	})
}

// The official client's models read every event and answer.
func TestClientModels(t *testing.T) {
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Log("note: without TANDEM_PYTHON")
		return
	}
	out, err := exec.CommandContext(t.Context(), python, "testdata/models.py").CombinedOutput()
	if err != nil || !bytes.HasPrefix(out, []byte("read ")) && !bytes.HasPrefix(out, []byte("no client")) {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("note: %s", out)
}
