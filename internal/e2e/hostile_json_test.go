//go:build linux

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// bomb is a JSON body of any length whose parse could take more memory than it has.
type bomb struct {
	path             string
	head, unit, tail string // unit is repeated
	status           int
	says             string // in the answer
}

func (b *bomb) body(size int) []byte {
	n := max(1, (size-len(b.head)-len(b.tail))/len(b.unit))
	return []byte(b.head + strings.Repeat(b.unit, n) + b.tail)
}

// bombs are all kinds of members in all shapes of values, and what has bounds of its own.
func bombs() (all []bomb) {
	const text, chat = "/v1/completions", "/v1/chat/completions"
	shapes := []struct{ head, unit, tail string }{
		{"[1", ",1", "]"}, {"[{}", ",{}", "]"}, {"[[]", ",[]", "]"}, {`[""`, `,""`, "]"}, {`{"a":0`, `,"a":0`, "}"}, {`"`, "x", `"`},
		{`"`, `\u0041`, `"`}, {"0.", "1", ""},
	}
	for _, s := range shapes {
		for _, m := range []struct{ path, before, end string }{
			{text, `{"prompt":"x","max_tokens":1,"z":`, "}"},
			{chat, `{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"z":{"z":`, "}}"},
		} {
			all = append(all, bomb{m.path, m.before + s.head, s.unit, s.tail + m.end, 200, "usage"})
		}
	}
	for name, n := range map[string]string{"stop": `"a"`, "stop_token_ids": "1", "bad_words": `"a"`, "allowed_token_ids": "1", "logprob_token_ids": "1"} {
		all = append(all, bomb{text, `{"prompt":"x","max_tokens":1,"` + name + `":[` + n, "," + n, "]}", 400, name})
	}
	in := func(path, head, unit, tail string, status int, says string) {
		all = append(all, bomb{path, head, unit, tail, status, says})
	}
	in(text, `{"prompt":"x","max_tokens":1,"logit_bias":{"1":0`, `,"1":0`, "}}", 400, "logit_bias")
	in(text, `{"prompt":"x","max_tokens":1`, `,"n":1`, "}", 200, "usage")
	in(text, `{"max_tokens":1,"prompt":"x"`, `,"prompt":"x"`, "}", 200, "usage")
	in(text, `{"max_tokens":1,"prompt":[1`, ",1", "]}", 400, "prompt")
	in(text, `{"max_tokens":1,"prompt":["a"`, `,"a"`, "]}", 400, "at most 256")
	in(text, `{"max_tokens":1,"prompt":[[1]`, `,[1]`, "]}", 400, "at most 256")
	in(text, `{"max_tokens":1,"prompt":"`, "x", `"}`, 400, "bytes of text")
	in(text, `{"max_tokens":1,"prompt":"`, "ab cd. ", `"}`, 400, "bytes of text")
	in(text, `{"max_tokens":1,"prompt":`, "[", "", 400, "nest deeper")
	in(text, `{"max_tokens":1,"z":`, `{"a":`, "", 400, "nest deeper")
	in(chat, `{"max_tokens":1,"messages":[{"role":"user","content":"a"}`, `,{"role":"user","content":"a"}`, "]}", 400, "messages")
	in(chat, `{"max_tokens":1,"messages":[{"role":"user","content":["a"`, `,"a"`, "]}]}", 400, "messages")
	in(chat, `{"max_tokens":1,"messages":[{"role":"user","content":"a"`, `,"content":"a"`, "}]}", 400, "messages")
	in(chat, `{"max_tokens":1,"messages":[{"role":"user","content":"`, "ab cd. ", `"}]}`, 400, "messages")
	in(chat, `{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[[]`, ",[]", "]}}", 400, "chat_template_kwargs")
	in(chat, `{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"metadata":{"a":[[]`, ",[]", "]}}", 200, "usage")
	const messages, asked = "/v1/messages", `{"max_tokens":1,"messages":[{"role":"user","content":"x"}]`
	in(messages, `{"max_tokens":1,"messages":[{"role":"user","content":"a"}`, `,{"role":"user","content":"a"}`, "]}", 400, "messages: has too many")
	in(messages, `{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}`, `,{"type":"tool_result","tool_use_id":"a"}`, "]}]}", 400, "messages: has too many")
	in(messages, `{"max_tokens":1,"messages":[{"role":"user","content":"a"`, `,"content":"a"`, "}]}", 400, "messages: has too many")
	in(messages, `{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"`, "ab cd. ", `"}]}]}`, 400, "invalid_request_error")
	in(messages, asked+`,"system":[{"type":"text","text":"x-anthropic-billing-header:`, `\n`, `"}]}`, 400, "invalid_request_error")
	in(messages, asked+`,"tools":[{"name":"a","input_schema":{"a":[[]`, ",[]", "]}}]}", 400, "tools: has too many")
	in(messages, asked, `,"z":[]`, "}", 200, "usage")
	in(messages, asked+`,"`, `\u0041`, `":0}`, 200, "usage")
	in(messages, asked+`,"metadata":`, `{"user_id":`, "", 400, "nest deeper")
	in("/tokenize", `{"prompt":"`, "ab cd. ", `"}`, 400, "bytes of text")
	in("/detokenize", `{"tokens":[9999999`, ",1", "]}", 400, "tokens")
	in("/inference/v1/generate", `{"sampling_params":{"max_tokens":1},"token_ids":[1`, ",1", "]}", 400, "token_ids")
	const responses, user = "/v1/responses", `{"role":"user","content":"x"}`
	in(responses, `{"max_output_tokens":1,"input":[`+user, `,`+user, "]}", 400, "input")
	in(responses, `{"max_output_tokens":1,"input":"`, "ab cd. ", `"}`, 400, "input")
	in(responses, `{"max_output_tokens":1,"input":[{"role":"user","content":[{"type":"input_text","text":"a"}`, `,{"type":"input_text","text":"a"}`, "]}]}", 400, "input")
	in(responses, `{"max_output_tokens":1,"input":[{"role":"assistant","content":"a"}`, `,{"type":"function_call","call_id":"","name":"f","arguments":""}`, "]}", 400, "input")
	in(responses, `{"max_output_tokens":1,"input":[{"type":"reasoning","content":"`, "ab cd. ", `"},`+user+`]}`, 200, "usage")
	in(responses, `{"max_output_tokens":1,"input":[{"type":"reasoning","summary":[],"encrypted_content":"`, "AAAA", `"},`+user+`]}`, 200, "usage")
	in(responses, `{"max_output_tokens":1,"input":"x","metadata":{"a":"`, "ab cd. ", `"}}`, 400, "metadata.a")
	in(responses, `{"max_output_tokens":1,"input":"x","z":[1`, ",1", "]}", 200, "usage")
	in(responses, `{"max_output_tokens":1,"input":"x","tool_choice":"none","tools":[{"type":"function","name":"f","description":"`, "ab cd. ", `"}]}`, 200, `"description":null`)
	return all
}

// Bodies that could take many times their bytes are answered as they should be, within
// four times their bytes and 32 MiB, next to streams; afterwards the memory is back.
func TestBinaryHostileJSON(t *testing.T) {
	size, slack := 4<<20, int64(32<<20)
	if soaking() {
		size = 31 << 20
	}
	f := startHostileFleet(t, hostileFlags{})
	streams := newBystanders(f.cluster, 15)
	all := bombs()
	if len(all) < 40 {
		t.Fatalf("%d bombs, want 40", len(all))
	}
	idle := resident(t, f.gateway, "VmRSS")
	streams.during("JSON", func() {
		for i, b := range sample(all, 8, 15) {
			body := b.body(size)
			resetPeak(t, f.gateway)
			before := resident(t, f.gateway, "VmRSS")
			status, answer := f.send(b.path, body)
			if status != b.status || !strings.Contains(answer, b.says) {
				t.Errorf("bomb %d, %s %.60s…: %d %.200s, want %d with %q", i, b.path, body, status, answer, b.status, b.says)
			}
			if grown := peakRSS(t, f.gateway) - before; grown > 4*int64(len(body))+slack {
				t.Errorf("bomb %d, %s %.60s…: %d MiB for a body of %d MiB", i, b.path, body, grown>>20, len(body)>>20)
			}
		}
	})
	f.wait(10*time.Second, "the memory is back", func() bool { return resident(t, f.gateway, "VmRSS") <= idle+slack })
	if !f.gateway.alive() {
		t.Error("the gateway has ended")
	}
}

// send posts a body and returns the status and the answer.
func (f *hostileFleet) send(path string, body []byte) (int, string) {
	client := http.Client{Timeout: 2 * time.Minute}
	resp, err := client.Post(fmt.Sprintf("http://127.0.0.1:%d%s", f.port, path), "application/json", bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}
