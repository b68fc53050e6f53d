package responses

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// free accepts every charge.
func free(int) *openai.Error { return nil }

func testKeys(t testing.TB, secrets ...string) *Keys {
	t.Helper()
	var all [][]byte
	for _, s := range secrets {
		all = append(all, []byte(strings.Repeat(s, MinSecret)))
	}
	k, err := NewKeys(all...)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// chat translates a body that is good for the chat, too.
func chat(t testing.TB, o Options, body string) (*Response, string) {
	t.Helper()
	if o.Keys == nil {
		o.Keys = testKeys(t, "k")
	}
	r := New(o)
	out, fault := r.Chat([]byte(body), free)
	if fault != nil {
		t.Fatalf("%s: %v", body, fault)
	}
	if _, fault := openai.Parse(openai.Chat, out); fault != nil {
		t.Fatalf("%s: %s: %v", body, out, fault)
	}
	return r, string(out)
}

func TestMessages(t *testing.T) {
	const u = `{"role":"user","content":"u"}`
	for _, c := range []struct{ name, body, want string }{
		{"text", `"input":"a\nb"`, `{"role":"user","content":"a\nb"}`},
		{"instructions", `"instructions":"i","input":"u"`, `{"role":"system","content":"i"},` + u},
		{"empty instructions", `"instructions":"","input":"u"`, u},
		{"first system messages become one", `"instructions":"i","input":[{"role":"developer","content":"d"},{"type":"message","role":"system","content":[{"type":"input_text","text":"s"}]},` + u + `]`,
			`{"role":"system","content":"i\n\nd\n\ns"},` + u},
		{"later ones stay", `"input":[` + u + `,{"role":"developer","content":"d"},` + u + `]`, u + `,{"role":"system","content":"d"},` + u},
		{"parts", `"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"text":"b","type":"input_text"}]}]`,
			`{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}`},
		{"no parts", `"input":[{"role":"user","content":[]}]`, `{"role":"user","content":""}`},
		{"an answer of ours", `"input":[` + u + `,
			{"type":"reasoning","id":"rs_1","summary":[],"content":[{"type":"reasoning_text","text":"r"}],"encrypted_content":null,"status":"completed"},
			{"type":"message","id":"msg_1","role":"assistant","status":"completed","content":[{"type":"output_text","text":"t","annotations":[],"logprobs":[]}]},
			{"type":"function_call","id":"fc_1","call_id":"c1","name":"f","arguments":"{\"a\":1}","status":"completed"},
			{"type":"function_call","call_id":"c2","name":"g","arguments":""},
			{"type":"function_call_output","call_id":"c1","output":"o1"},
			{"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"o2"},{"type":"input_text","text":"o3"},{"type":"input_text","text":"o4"}]}]`,
			u + `,{"role":"assistant","content":"t","reasoning":"r","reasoning_content":"r","tool_calls":[` +
				`{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},{"id":"c2","type":"function","function":{"name":"g","arguments":""}}]},` +
				`{"role":"tool","tool_call_id":"c1","content":"o1"},{"role":"tool","tool_call_id":"c2","content":"o2\no3\no4"}`},
		{"reasoning between calls is of the same turn", `"input":[{"type":"reasoning","summary":[{"type":"summary_text","text":"r"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},
			{"type":"reasoning","content":[{"type":"reasoning_text","text":"s"}],"summary":[]},{"type":"function_call","call_id":"d","name":"f","arguments":"{}"}]`,
			`{"role":"assistant","content":null,"reasoning":"r\ns","reasoning_content":"r\ns","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}},` +
				`{"id":"d","type":"function","function":{"name":"f","arguments":"{}"}}]}`},
		{"outputs end a turn", `"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"},
			{"type":"function_call","call_id":"d","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"d","output":"p"}]`,
			`{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"o"},` +
				`{"role":"assistant","content":null,"tool_calls":[{"id":"d","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"d","content":"p"}`},
		{"text around a call", `"input":[{"role":"assistant","content":"a"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"role":"assistant","content":"b"}]`,
			`{"role":"assistant","content":"a\nb","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}`},
		{"two messages", `"input":[{"role":"assistant","content":"a"},{"role":"assistant","content":[{"type":"refusal","refusal":"b"}]}]`,
			`{"role":"assistant","content":"a"},{"role":"assistant","content":"b"}`},
		{"reasoning alone", `"input":[` + u + `,{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"r"}]},` + u + `]`,
			u + `,{"role":"assistant","content":"","reasoning":"r","reasoning_content":"r"},` + u},
		{"the last of equal names", `"input":[{"role":"system","role":"user","content":"a","content":"u"}]`, u},
	} {
		_, out := chat(t, Options{}, "{"+c.body+"}")
		if want := `{"messages":[` + c.want + `]}`; out != want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, out, want)
		}
	}
}

func TestFields(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`"model":"m","temperature":0.5,"top_p":0.9,"max_output_tokens":7`, `"model":"m","max_tokens":7,"temperature":0.5,"top_p":0.9`},
		{`"stream":true,"stream_options":{"include_obfuscation":true}`, `"stream_options":{"include_usage":true},"stream":true`},
		{`"truncation":"auto"`, `"truncate_prompt_tokens":-1`},
		{`"truncation":"disabled","service_tier":"auto"`, `"service_tier":"auto"`},
		{`"reasoning":{"effort":"low","summary":"auto"}`, `"reasoning_effort":"low"`},
		{`"text":{"verbosity":"medium","format":{"type":"text"}}`, `"verbosity":"medium"`},
		{`"text":{"format":{"type":"json_object"}}`, `"response_format":{"type":"json_object"}`},
		{`"text":{"format":{"type":"json_schema","name":"n","strict":true,"schema":{"type":"object"}}}`,
			`"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"object"}}}`},
		{`"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"},"strict":false},{"name":"g","type":"function"}],"tool_choice":"none","parallel_tool_calls":true`,
			`"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},"strict":false}},{"type":"function","function":{"name":"g"}}],"tool_choice":"none","parallel_tool_calls":true`},
		{`"tools":[{"type":"function","name":"f","strict":true}],"tool_choice":"required","parallel_tool_calls":false`,
			`"tools":[{"type":"function","function":{"name":"f","strict":true}}],"tool_choice":"required","parallel_tool_calls":false`},
		{`"include":["reasoning.encrypted_content"]`, ``},
		{`"include":["message.output_text.logprobs"],"top_logprobs":2`, `"top_logprobs":2,"logprobs":true`},
		{`"top_logprobs":2`, `"top_logprobs":2,"logprobs":true`},
		{`"store":false,"background":false,"previous_response_id":null,"max_tool_calls":3.0,"n":1,"metadata":{"a":"b"},"user":"u","safety_identifier":"s","prompt_cache_key":"p"`, ``},
		{`"seed":1,"top_k":2,"cache_salt":"s"`, `"cache_salt":"s","seed":1,"top_k":2`},
		{`"zeta":{"a":[1]},"stream_options":null,"reasoning":{"eta":1}`, `"zeta":null,"reasoning.eta":null`},
	} {
		_, out := chat(t, Options{}, "{"+c.body+`,"input":"u"}`)
		want := `{` + c.want + `,"messages":[{"role":"user","content":"u"}]}`
		if out != strings.Replace(want, "{,", "{", 1) {
			t.Errorf("%s:\n got %s\nwant %s", c.body, out, want)
		}
	}
	r := New(Options{Keys: testKeys(t, "k")})
	out, _ := r.Chat([]byte(`{"input":"u","tool_choice":{"type":"function","name":"f"}}`), free)
	if want := `{"tool_choice":{"type":"function","function":{"name":"f"}},"messages":[{"role":"user","content":"u"}]}`; string(out) != want {
		t.Errorf("%s", out)
	}
}

// Each error names its field with its place.
func TestErrors(t *testing.T) {
	item := func(s string) string { return `{"input":[{"role":"user","content":"a"},` + s + `]}` }
	for _, c := range []struct{ body, param, words string }{
		{`{`, "", "not valid JSON"},
		{`[]`, "", "must be a JSON object"},
		{`{}`, "input", "required"},
		{`{"input":null}`, "input", "required"},
		{`{"input":1}`, "input", "a string or a list of items"},
		{`{"input":[]}`, "input", "must not be empty"},
		{item(`5`), "input[1]", "an object"},
		{item(`{}`), "input[1].type", "required"},
		{item(`{"type":5}`), "input[1].type", "not 5"},
		{item(`{"type":"web_search_call"}`), "input[1].type", "the client runs them"},
		{item(`{"type":"item_reference","id":"msg_1"}`), "input[1]", "send the item itself"},
		{item(`{"id":"msg_1"}`), "input[1]", "send the item itself"},
		{item(`{"role":"tool","content":""}`), "input[1].role", "must be"},
		{item(`{"type":"message","content":""}`), "input[1].role", "required"},
		{item(`{"role":"user"}`), "input[1].content", "required"},
		{item(`{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"x"}]}`), "input[1].content[1].type", "only text"},
		{item(`{"role":"user","content":[{"text":"a"}]}`), "input[1].content[0].type", "required"},
		{item(`{"role":"user","content":[{"type":"input_text","text":1}]}`), "input[1].content[0].text", "must be a string"},
		{item(`{"role":"user","content":[{"type":"refusal"}]}`), "input[1].content[0].refusal", "required"},
		{item(`{"type":"function_call","call_id":"c","name":"f"}`), "input[1].arguments", "required"},
		{item(`{"type":"function_call","call_id":"c","name":1,"arguments":""}`), "input[1].name", "must be a string"},
		{item(`{"type":"function_call_output","output":""}`), "input[1].call_id", "required"},
		{item(`{"type":"function_call_output","call_id":"c","output":[{"type":"input_image"}]}`), "input[1].output[0].type", "only text"},
		{item(`{"type":"reasoning","encrypted_content":1}`), "input[1].encrypted_content", "must be a string"},
		{item(`{"type":"reasoning","summary":[{"type":"x"}]}`), "input[1].summary[0].type", "only text"},
		{`{"input":"a","instructions":[]}`, "instructions", "must be a string"},
		{`{"input":"a","store":true}`, "store", "set store to false"},
		{`{"input":"a","store":1}`, "store", "true or false"},
		{`{"input":"a","background":true}`, "background", "set stream to true"},
		{`{"input":"a","previous_response_id":"resp_1"}`, "previous_response_id", "send the items"},
		{`{"input":"a","conversation":"c"}`, "conversation", "send the items"},
		{`{"input":"a","prompt":{"id":"p"}}`, "prompt", "instructions"},
		{`{"input":"a","n":2}`, "n", "one answer"},
		{`{"input":"a","max_tokens":2}`, "max_tokens", "use max_output_tokens"},
		{`{"input":"a","messages":[]}`, "messages", "use input"},
		{`{"input":"a","echo":true}`, "echo", "leave it out"},
		{`{"input":"a","include":["x"]}`, "include[0]", "reasoning.encrypted_content"},
		{`{"input":"a","include":["reasoning.encrypted_content","file_search_call.results"]}`, "include[1]", "file_search_call.results"},
		{`{"input":"a","tools":[{"type":"function","name":"f"},{"type":"web_search"}]}`, "tools[1].type", "the client runs them"},
		{`{"input":"a","tools":[{"type":"mcp","server_url":"x"}]}`, "tools[0].type", "the client runs them"},
		{`{"input":"a","tools":[{"name":"f"}]}`, "tools[0].type", "required"},
		{`{"input":"a","tools":[{"type":"function"}]}`, "tools[0].name", "required"},
		{`{"input":"a","tools":[{"type":"function","name":"a b"}]}`, "tools[0].name", "tools[0].name must have"},
		{`{"input":"a","tools":[{"type":"function","name":"f","parameters":[]}]}`, "tools[0].parameters", "tools[0].parameters must be"},
		{`{"input":"a","tools":[{"type":"function","name":"f","strict":1}]}`, "tools[0].strict", "true or false"},
		{`{"input":"a","tool_choice":"required"}`, "tool_choice", "needs tools"},
		{`{"input":"a","tool_choice":{"type":"function"}}`, "tool_choice.name", "required"},
		{`{"input":"a","tool_choice":"any"}`, "tool_choice", `or {"type": "function", "name": ...}`},
		{`{"input":"a","tool_choice":{"type":"function","name":"a b"}}`, "tool_choice", "tool_choice.name must be the name"},
		{`{"input":"a","tool_choice":{"type":"mcp"}}`, "tool_choice.type", "the client runs them"},
		{`{"input":"a","tool_choice":{"type":"allowed_tools"}}`, "tool_choice.type", "send only"},
		{`{"input":"a","text":{"format":{"type":"x"}}}`, "text.format.type", `not "x"`},
		{`{"input":"a","text":{"format":{"type":"json_schema","schema":{}}}}`, "text.format.name", "required"},
		{`{"input":"a","text":{"format":{"type":"json_schema","name":"n"}}}`, "text.format.schema", "text.format.schema is required"},
		{`{"input":"a","text":{"verbosity":"high"}}`, "text.verbosity", "text.verbosity is not supported"},
		{`{"input":"a","reasoning":{"effort":"x"}}`, "reasoning.effort", "reasoning.effort: must be one of"},
		{`{"input":"a","reasoning":{"summary":"x"}}`, "reasoning.summary", "must be"},
		{`{"input":"a","truncation":"x"}`, "truncation", `"auto" or "disabled"`},
		{`{"input":"a","max_output_tokens":0}`, "max_output_tokens", "max_output_tokens: must be at least 1"},
		{`{"input":"a","max_tool_calls":0}`, "max_tool_calls", "at least 1"},
		{`{"input":"a","temperature":-1}`, "temperature", "between"},
		{`{"input":"a","stream_options":{}}`, "stream_options", "stream: true"},
		{`{"input":"a","stream":true,"stream_options":{"include_obfuscation":1}}`, "stream_options.include_obfuscation", "true or false"},
		{`{"input":"a","metadata":{"a":1}}`, "metadata.a", "must be a string"},
		{`{"input":"a","metadata":{` + strings.Repeat(`"a":"",`, 16) + `"a":""}}`, "metadata", "at most 16"},
		{`{"input":"a","metadata":{"a":"` + strings.Repeat("b", 513) + `"}}`, "metadata.a", "at most 512"},
		{`{"input":"a","user":"` + strings.Repeat("b", 513) + `"}`, "user", "at most 512"},
		{`{"input":[` + strings.Repeat(`1,`, openai.MaxMessages) + `1]}`, "input", "at most 16384"},
		{`{"input":"a","tools":[` + strings.Repeat(`{"type":"function","name":"f"},`, openai.MaxTools) + `{"type":"function","name":"f"}]}`, "tools", "at most 1024"},
		{`{"input":` + strings.Repeat("[", 400) + strings.Repeat("]", 400) + `}`, "", "nest deeper"},
	} {
		r := New(Options{Keys: testKeys(t, "k")})
		out, fault := r.Chat([]byte(c.body), free)
		if fault == nil {
			if _, fault = openai.Parse(openai.Chat, out); fault != nil {
				fault = r.Fault(fault)
			}
		}
		if fault == nil || fault.Status != 400 || fault.Param != c.param || !strings.Contains(fault.Message, c.words) {
			t.Errorf("%.200s: %v, want %s: %s", c.body, fault, c.param, c.words)
		}
	}
}

// Errors that need the model name the fields of this API, too.
func TestFault(t *testing.T) {
	r := New(Options{})
	for _, c := range [][4]string{
		{"messages", "messages: has too many values in it", "input", "input: has too many values in it"},
		{"messages", "the model's chat template refuses these messages: no", "input", "the model's chat template refuses these messages: no"},
		{"max_tokens", "The prompt has 5 tokens and max_tokens is 4", "max_output_tokens", "The prompt has 5 tokens and max_output_tokens is 4"},
		{"response_format.json_schema.schema", "response_format.json_schema.schema: contains at /a: no", "text.format.schema", "text.format.schema: contains at /a: no"},
		{"model", "several models", "model", "several models"},
		{"min_tokens", "min_tokens is 9, above max_tokens, which is 4", "min_tokens", "min_tokens is 9, above max_output_tokens, which is 4"},
		{"tool_choice", "tool_choice and response_format both constrain the answer", "tool_choice", "tool_choice and text.format both constrain the answer"},
	} {
		was := &openai.Error{Status: 400, Param: c[0], Message: c[1]}
		if f := r.Fault(was); f.Param != c[2] || f.Message != c[3] || was.Param != c[0] {
			t.Errorf("%q: %+v", c, f)
		}
	}
}

// Errors about a message name the item that it is made from.
func TestFaultOfMessage(t *testing.T) {
	r, out := chat(t, Options{}, `{"instructions":"i","input":[{"role":"user","content":"a"},{"type":"reasoning","summary":[{"type":"summary_text","text":"r"}]},{"role":"assistant","content":"b"},
		{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"},{"role":"developer","content":"d"},{"role":"user","content":"e"}]}`)
	if strings.Count(out, `"role":`) != 6 {
		t.Fatal(out)
	}
	for was, want := range map[string]string{
		"messages[0].content": "instructions", "messages[1].content": "input[0].content", "messages[2].content": "input[1].content", "messages[3].content": "input[4].output",
		"messages[3].tool_call_id": "input[4].call_id", "messages[4]": "input[5]", "messages[5].content[0].text": "input[6].content[0].text", "messages[6]": "input",
	} {
		if f := r.Fault(&openai.Error{Param: was, Message: was + " has messages"}); f.Param != want || f.Message != want+" has messages" {
			t.Errorf("%s: %+v, want %s", was, f, want)
		}
	}
	r, _ = chat(t, Options{}, `{"instructions":"i","input":"u"}`)
	if f := r.Fault(&openai.Error{Param: "messages[1]", Message: "messages[1].content of role"}); f.Param != "input" || f.Message != "input of role" {
		t.Errorf("%+v", f)
	}
}

func TestReasoningIsSealed(t *testing.T) {
	const text = "Hm, \"é\"\n\x00 \x1b\xff?"
	old, k := testKeys(t, "o"), testKeys(t, "n", "o")
	for _, c := range []struct {
		name         string
		seal         *Keys
		model, owner string
		why          error // nil: it opens
	}{
		{"same", k, "m", "a", nil},
		{"older key", old, "m", "a", nil},
		{"unknown key", testKeys(t, "x"), "m", "a", errKey},
		{"other model", k, "m2", "a", errForeign},
		{"other owner", k, "m", "b", errForeign},
		{"no owner", k, "ma", "", errForeign},
	} {
		sealed := string(c.seal.appendSealed(nil, []byte(text), c.model, c.owner))
		if b, err := base64.StdEncoding.DecodeString(sealed); err != nil || bytes.Contains(b, []byte("Hm, ")) {
			t.Fatal(sealed, err)
		}
		var gotN int
		var gotErr error
		_, out := chat(t, Options{Keys: k, Owner: "a", Dropped: func(n int, field string, err error) {
			if gotN, gotErr = n, err; field != "input[0].encrypted_content" {
				t.Error(field)
			}
		}}, `{"model":"m","input":[{"type":"reasoning","summary":[],"encrypted_content":"`+sealed+`"},{"type":"reasoning","summary":[],"encrypted_content":"`+strings.TrimRight(sealed, "=")+`"},{"role":"user","content":"u"}]}`)
		if gotErr != c.why || (gotN == 2) != (c.why != nil) {
			t.Errorf("%s: %d dropped, %v", c.name, gotN, gotErr)
		}
		if opened := strings.Contains(out, `"reasoning":"Hm, \"é\"\n\u0000 \u001b`+"\uFFFD"+`?\nHm, `); opened != (c.why == nil) {
			t.Errorf("%s: %s", c.name, out)
		}
	}
	for _, sealed := range []string{"", "x", "!", "AQ==", strings.Repeat("A", 100), "AQ" + strings.Repeat("A", 9)} {
		if _, err := k.open(sealed, "m", "a"); err == nil {
			t.Errorf("%q opens", sealed)
		}
	}
	for i := range 3 { // each bit counts
		sealed := old.appendSealed(nil, []byte(text), "m", "a")
		sealed[len(sealed)/2+i] ^= 1
		if text, err := old.open(string(sealed), "m", "a"); err == nil {
			t.Errorf("a changed text opens: %q", text)
		}
	}
}

func TestSecrets(t *testing.T) {
	good := strings.Repeat("0123456789abcdef", 2)
	secrets, err := ReadSecrets([]byte("# new\n" + good + "\n\n  " + good + "x \n"))
	if err != nil || len(secrets) != 2 || string(secrets[1]) != good+"x" {
		t.Errorf("%q %v", secrets, err)
	}
	for _, bad := range []string{"", "# none\n", good + "\nshort", "short " + good} {
		if _, err := ReadSecrets([]byte(bad)); err == nil || strings.Contains(err.Error(), "short") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := NewKeys([]byte("short")); err == nil {
		t.Error("a short secret is taken")
	}
}

// A body is charged for before it is translated, and its translation is within the charge.
func TestCharge(t *testing.T) {
	call := `{"type":"function_call","call_id":"","name":"","arguments":""},`
	part := `{"type":"input_text","text":""},`
	for _, body := range []string{
		`{"input":[` + strings.Repeat(call, 10000) + `{"role":"user","content":""}]}`,
		`{"input":[{"role":"user","content":[` + strings.Repeat(part, 30000) + `{"type":"input_text","text":""}]}]}`,
		`{"input":[{"role":"assistant","content":[` + strings.Repeat(part, 30000) + `{"type":"input_text","text":""}]}]}`,
		`{"input":[{"type":"reasoning","content":"` + strings.Repeat("r", 1<<20) + `"}]}`,
		`{"instructions":"` + strings.Repeat("r", 1<<20) + `","input":"a"}`,
	} {
		total, calls := 0, 0
		r := New(Options{Keys: testKeys(t, "k")})
		out, fault := r.Chat([]byte(body), func(n int) *openai.Error { total, calls = total+n, calls+1; return nil })
		if fault != nil || len(out)+len(r.echo) > total || total > 12*len(body) {
			t.Errorf("%.80s: %v, %d bytes for %d, charged %d", body, fault, len(out), len(body), total)
		}
		full := &openai.Error{Status: 429}
		if _, fault := New(Options{}).Chat([]byte(body), func(int) *openai.Error { return full }); fault != full {
			t.Errorf("%.80s: %v", body, fault)
		}
	}
}

// What an answer repeats, for as long as it runs, is bounded.
func TestRepeatedIsBounded(t *testing.T) {
	big := strings.Repeat("d", maxRepeated)
	r, _ := chat(t, Options{}, `{"instructions":"`+big+`","input":"u","tools":[{"type":"function","name":"f","description":"`+big+`"}]}`)
	if want := `"tools":[{"type":"function","name":"f","description":null,"parameters":null,"strict":false}]`; len(r.echo) > 2048 || !strings.Contains(string(r.echo), want) || !strings.Contains(string(r.echo), `"instructions":null`) {
		t.Errorf("%d bytes: %.2000s", len(r.echo), r.echo)
	}
}

// A body is translated into a chat's, or refused. Nothing that a client sends breaks the answer.
func FuzzChat(f *testing.F) {
	k := testKeys(f, "k")
	for _, seed := range []string{
		`{"input":"a"}`,
		`{"model":"m","instructions":"i","input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]},{"type":"reasoning","summary":[],"encrypted_content":"` + string(k.appendSealed(nil, []byte("r"), "m", "")) + `"},
		{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":[{"type":"input_text","text":"o"}]}],"stream":true,"include":["reasoning.encrypted_content"],"stream_options":{"include_obfuscation":true}}`,
		`{"input":"a","tools":[{"type":"function","name":"f","description":"d","parameters":{"a" : [1, 2]},"strict":false}],"tool_choice":{"type":"function","name":"f"},"metadata":{"a":"b"}}`,
		`{"input":"a","text":{"format":{"type":"json_schema","name":"n","schema":{}},"verbosity":"medium"},"reasoning":{"effort":"low","summary":"auto"},"truncation":"auto","top_logprobs":1}`,
		`{"input":[{"role":"assistant","content":"\ud800"},{"id":"x"}],"\u0061":1,"stop":["a"],"max_tool_calls":1e999}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		charged := 0
		r := New(Options{Keys: k, Dropped: func(int, string, error) {}})
		out, fault := r.Chat(body, func(n int) *openai.Error { charged += n; return nil })
		if fault != nil {
			if fault.Status != 400 || fault.Message == "" || out != nil {
				t.Fatalf("%+v", fault)
			}
			return
		}
		if !json.Valid(out) || len(out) > charged {
			t.Fatalf("%d bytes, charged %d: %s", len(out), charged, out)
		}
		if _, fault := openai.Parse(openai.Chat, out); fault != nil {
			if fault = r.Fault(fault); strings.HasPrefix(fault.Param, "messages") {
				t.Fatalf("%v of %s", fault, out)
			}
			return
		}
		r.Begin("id", 1, "m")
		d := openai.Delta{Begin: true, Reasoning: []byte("r"), Text: []byte("t"), Calls: []openai.ToolCall{{ID: "c", Name: "f"}}, Finish: openai.Finish{Reason: "stop"}}
		checkEvents(t, r.AppendEnd(r.AppendDelta(nil, &d), &openai.Usage{}))
	})
}
