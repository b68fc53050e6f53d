package gateway

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// roundTrip renders a request, sends what it got to the route of tokens and derenders the answers.
func roundTrip(t *testing.T, b *bed, path, body string) reply {
	t.Helper()
	r := b.post(path+"/render", body)
	if r.StatusCode != 200 {
		t.Fatalf("%s: %d %s", body, r.StatusCode, r.body)
	}
	if path == "/v1/chat/completions" {
		a := b.post(openai.TokensPath, r.body)
		if a.StatusCode != 200 {
			t.Fatalf("%s: %d %s", r.body, a.StatusCode, a.body)
		}
		return b.post(path+"/derender", `{"generate_response":`+a.body+`,"chat_request":`+body+`}`)
	}
	var all []json.RawMessage
	if err := json.Unmarshal([]byte(r.body), &all); err != nil {
		t.Fatal(err)
	}
	var answers []string
	for _, one := range all {
		answers = append(answers, b.post(openai.TokensPath, string(one)).body)
	}
	return b.post(path+"/derender", `{"generate_responses":[`+strings.Join(answers, ",")+`],"completion_request":`+body+`,"prompt_tokens":[1`+strings.Repeat(",2", len(all)-1)+`]}`)
}

// choicesOf returns the choices of an answer as it is written.
func choicesOf(t *testing.T, r reply) string {
	t.Helper()
	_, rest, ok := strings.Cut(r.body, `"choices":`)
	choices, _, ok2 := strings.Cut(rest, `,"usage"`)
	if !ok || !ok2 || r.StatusCode != 200 {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	return choices
}

// A request that is rendered, computed as tokens and derendered has the answer of the request.
func TestRenderAndDerender(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for _, c := range []struct{ path, body string }{
		{"/v1/chat/completions", `{` + hi + `}`},
		{"/v1/chat/completions", `{` + hi + `,"max_tokens":9,"n":2,"return_token_ids":true}`},
		{"/v1/chat/completions", `{` + hi + `,"stop":["quick"],"include_stop_str_in_output":true,"temperature":0.5,"top_k":3,"seed":-4}`},
		{"/v1/chat/completions", `{` + hi + `,"stop_token_ids":[44],"logprobs":true,"top_logprobs":1}`},
		{"/v1/completions", `{"prompt":["a","bc"],"max_tokens":5,"logit_bias":{"7":1.5,"8":-1},"bad_words":["x"],"allowed_token_ids":[1,72]}`},
		{"/v1/completions", `{"prompt":[[1,2],[3]],"max_tokens":5,"logprobs":1,"cache_salt":"s","priority":3,"min_tokens":2}`},
	} {
		if got, want := choicesOf(t, roundTrip(t, b, c.path, c.body)), choicesOf(t, b.post(c.path, c.body)); !strings.HasPrefix(c.path, "/v1/chat") {
			// The prompt's own members are not known to derender.
			if g, w := strings.Count(got, `"text":"Hello"`), strings.Count(want, `"text":"Hello"`); g != 2 || w != 2 {
				t.Errorf("%s\ngot  %s\nwant %s", c.body, got, want)
			}
		} else if got != want {
			t.Errorf("%s\ngot  %s\nwant %s", c.body, got, want)
		}
	}
	got := lastRequest(b, "d1")
	if got.Priority != 3 || got.MaxTokens != 5 || got.Sampling.MinTokens != 2 {
		t.Errorf("the node got %v", got)
	}
	r := b.post("/v1/chat/completions/render", `{`+hi+`,"max_tokens":7,"model":"tiny"}`, "X-Request-Id: r1")
	var a struct {
		ID       string  `json:"request_id"`
		Tokens   []int32 `json:"token_ids"`
		Sampling struct {
			MaxTokens   int `json:"max_tokens"`
			Temperature float64
			Seed        *int64
		} `json:"sampling_params"`
		Model string
	}
	if err := json.Unmarshal([]byte(r.body), &a); err != nil || a.ID != "chatcmpl-r1" || a.Sampling.MaxTokens != 7 || a.Sampling.Temperature != 1 || a.Sampling.Seed != nil || a.Model != "tiny" {
		t.Errorf("%v %s", err, r.body)
	}
	if text := b.g.native.Models.Load().Text.Decode(a.Tokens, false); text != chatOfHi {
		t.Errorf("%q", text)
	}
}

// Reasoning and tool calls are split off tokens as they are in the request's own answer, and
// grammars survive the way through tokens.
func TestDerenderParses(t *testing.T) {
	b := toolBed(t, Options{}, calls, hermesMarkers...)
	for _, body := range []string{
		`{` + hi + `,` + weather + `}`, `{` + hi + `}`, `{` + hi + `,` + weather + `,"stop":["look"],"seed":1}`,
		`{` + hi + `,"chat_template_kwargs":{"enable_thinking":true},"max_tokens":12}`,
		`{` + hi + `,"include_reasoning":false}`,
	} {
		got, _ := messagesOf(t, roundTrip(t, b, "/v1/chat/completions", body))
		want, _ := messagesOf(t, b.post("/v1/chat/completions", body))
		if len(got) != 1 || got[0].String() != want[0].String() {
			t.Errorf("%s\ngot  %v\nwant %v", body, got, want)
		}
	}
	constrained := newBed(t, Options{}, map[string]nodestest.Options{"d1": constraining("d1", grammar.Version)})
	for body, want := range map[string]string{
		`{` + hi + `,"structured_outputs":{"choice":["b","a"]}}`: `"structured_outputs":{"choice":["a","b"],"disable_any_whitespace":false}`,
		`{` + hi + `,"structured_outputs":{"regex":"a\"+"}}`:     `"structured_outputs":{"regex":"a\"+","disable_any_whitespace":false}`,
		`{` + hi + `,"guided_json":{"type":"integer"}}`:          `"structured_outputs":{"json":{"type":"integer"},"disable_any_whitespace":false}`,
		`{` + hi + `,"response_format":{"type":"json_object"}}`:  `"structured_outputs":{"json_object":true,"disable_any_whitespace":false}`,
		`{` + hi + `,"guided_grammar":"start: \"x\""}`:           `"structured_outputs":{"grammar":"start: \"x\"","disable_any_whitespace":false}`,
	} {
		if r := constrained.post("/v1/chat/completions/render", body); !strings.Contains(r.body, want) {
			t.Errorf("%s: %s", body, r.body)
		}
	}
	// Without the request the text is not split.
	r := b.post("/v1/chat/completions/derender", `{"generate_response":{"request_id":"a","choices":[{"token_ids":[72,105]},{"token_ids":[],"finish_reason":null}]},"prompt_tokens":3}`)
	if !strings.Contains(r.body, `"content":"Hi"`) || !strings.Contains(r.body, `"id":"a"`) || !strings.Contains(r.body, `"prompt_tokens":3,"total_tokens":5`) {
		t.Error(r.body)
	}
}

// derenderStream sends a request to the route of tokens as a stream, and derenders its events one after the
// other. It returns them as a stream.
func derenderStream(t *testing.T, b *bed, path, body string) reply {
	t.Helper()
	r := b.post(path+"/render", body)
	request := "chat_request"
	if path == "/v1/completions" {
		r.body, request = strings.TrimSuffix(strings.TrimPrefix(r.body, "["), "]"), "completion_request"
	}
	events := b.post(openai.TokensPath, r.body)
	if events.StatusCode != 200 {
		t.Fatalf("%s: %d %s", body, events.StatusCode, events.body)
	}
	states, out := map[int]json.RawMessage{}, events
	out.body = ""
	for event := range strings.SplitSeq(strings.TrimSuffix(events.body, "data: [DONE]\n\n"), "\n\n") {
		if event == "" {
			continue
		}
		var e struct{ Choices []struct{ Index int } }
		event = strings.TrimPrefix(event, "data: ")
		if err := json.Unmarshal([]byte(event), &e); err != nil {
			t.Fatal(err)
		}
		index := 0
		if len(e.Choices) > 0 {
			index = e.Choices[0].Index
		}
		state := string(states[index])
		if state == "" {
			state = "null"
		}
		d := b.post(path+"/derender", `{"stream":true,"generate_chunk":`+event+`,"stream_state":`+state+`,"`+request+`":`+body+`}`)
		var a struct {
			Chunk json.RawMessage
			State json.RawMessage `json:"stream_state"`
		}
		if err := json.Unmarshal([]byte(d.body), &a); err != nil || d.StatusCode != 200 {
			t.Fatalf("%s: %d %v %s", event, d.StatusCode, err, d.body)
		}
		states[index] = a.State
		out.body += "data: " + string(a.Chunk) + "\n\n"
	}
	out.body += "data: [DONE]\n\n"
	return out
}

// The events of a stream of tokens become those of the request's own stream, one call after the
// other, whichever gateway answers them: the client carries the state.
func TestDerenderStreams(t *testing.T) {
	const options = `,"stream":true,"stream_options":{"include_usage":true}}`
	b := toolBed(t, Options{}, calls, hermesMarkers...)
	for _, fields := range []string{
		weather, `"seed":1`, weather + `,"stop":["look"],"seed":1`, weather + `,"n":2,"seed":3`, `"logprobs":true,"top_logprobs":1,` + weather,
		`"chat_template_kwargs":{"enable_thinking":true},"max_tokens":12`, `"include_reasoning":false`,
	} {
		body := `{` + hi + `,` + fields + options
		r := derenderStream(t, b, "/v1/chat/completions", body)
		got, usage := messagesOf(t, r)
		want, wantUsage := messagesOf(t, b.post("/v1/chat/completions", body))
		if len(got) != len(want) {
			t.Fatalf("%s: %v, want %v", body, got, want)
		}
		for i := range got {
			if got[i].String() != want[i].String() {
				t.Errorf("%s\ngot  %v\nwant %v", body, got[i], want[i])
			}
		}
		completion := func(usage string) string {
			_, rest, _ := strings.Cut(usage, `"completion_tokens":`)
			rest, _, _ = strings.Cut(rest, ",")
			return rest
		}
		if n := strings.Count(r.body, `"role":"assistant"`); n != len(want) || completion(usage) == "" || completion(usage) != completion(wantUsage) {
			t.Errorf("%s: %d roles, usage %s, want %s", body, n, usage, wantUsage)
		}
	}
	plain := newBed(t, Options{}, one(nodestest.Options{}))
	for _, fields := range []string{`"max_tokens":9`, `"max_tokens":30,"stop":["quick"]`, `"max_tokens":9,"logprobs":1`} {
		body := `{"prompt":"a",` + fields + options
		got, want := derenderStream(t, plain, "/v1/completions", body).events(t), plain.post("/v1/completions", body).events(t)
		if got.text[0] != want.text[0] || got.text[0] == "" || got.finish[0] != want.finish[0] {
			t.Errorf("%s: %q %s, want %q %s", body, got.text[0], got.finish[0], want.text[0], want.finish[0])
		}
	}
	// A character whose bytes come in several events is whole, and the end has what was held back.
	r := plain.post("/v1/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{"token_ids":[195]}]}}`)
	if !strings.Contains(r.body, `"text":""`) || !strings.HasSuffix(r.body, `"stream_state":{"role_sent":false,"output_token_ids":[195]}}`) {
		t.Error(r.body)
	}
	r = plain.post("/v1/completions/derender", `{"stream":true,"generate_chunk":{"request_id":"a","choices":[{"token_ids":[169],"finish_reason":"length"}],"usage":{"completion_tokens":2}},"stream_state":{"output_token_ids":[195]},"prompt_tokens":3}`)
	if !strings.Contains(r.body, `"text":"é"`) || !strings.Contains(r.body, `"finish_reason":"length"`) || !strings.Contains(r.body, `"prompt_tokens":3,"total_tokens":5`) || !strings.HasPrefix(r.body, `{"chunk":{"id":"a"`) {
		t.Error(r.body)
	}
}

// What render and derender refuse; neither uses a node or waits for one.
func TestRenderRefusals(t *testing.T) {
	b := newBed(t, Options{Limits: Limits{MaxInFlight: 1}}, one(nodestest.Options{}))
	for _, c := range []struct {
		path, body string
		status     int
		param      string
	}{
		{"/v1/chat/completions/render", `{}`, 400, "messages"},
		{"/v1/chat/completions/render", `{` + hi + `,"model":"gpt"}`, 404, "model"},
		{"/v1/chat/completions/render", `{` + hi + `,"max_tokens":200000}`, 400, "max_tokens"},
		{"/v1/completions/render", `{"prompt":"a","guided_regex":"("}`, 400, "guided_regex"},
		{"/v1/chat/completions/derender", `{}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":null}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":[]}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[]}}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_response":{"choices":[{}]}}`, 400, "generate_chunk"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{},{}]}}`, 400, "generate_chunk"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{"finish_reason":"abort"}]}}`, 400, "generate_chunk"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{"finish_reason":""}]}}`, 400, "generate_chunk"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{"index":-1}]}}`, 400, "generate_chunk"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[],"usage":{"prompt_tokens":-1}}}`, 400, "generate_chunk"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{}]},"stream_state":7}`, 400, "stream_state"},
		{"/v1/chat/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{}]},"stream_state":{"output_token_ids":[300]}}`, 400, "token_ids"},
		{"/v1/completions/derender", `{"stream":true,"generate_responses":[{"choices":[{}]}]}`, 400, "generate_chunk"},
		{"/v1/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{}]},"prompt_tokens":[1]}`, 400, "prompt_tokens"},
		{"/v1/completions/derender", `{"stream":true,"generate_chunk":{"choices":[{"token_ids":[` + strings.Repeat("72,", 1<<17) + `72]}]}}`, 400, "token_ids"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"token_ids":["a"]}]}}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"token_ids":[null]}]}}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"token_ids":7}]}}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[7]}}`, 400, "generate_response.choices"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"token_ids":[-1]}]}}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"token_ids":[300]}]}}`, 400, "token_ids"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"finish_reason":"abort"}]}}`, 400, "generate_response"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{}]},"model":"gpt"}`, 404, "model"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{}]},"chat_request":{"prompt":"a"}}`, 400, "messages"},
		{"/v1/completions/derender", `{"generate_responses":[{"choices":[{}]}],"prompt_tokens":[1,2]}`, 400, "prompt_tokens"},
		{"/v1/completions/derender", `{"generate_responses":[{"choices":[{}]}],"prompt_token_ids":[]}`, 200, ""},
		{"/v1/completions/derender", `{"generate_responses":{}}`, 400, "generate_responses"},
		{"/v1/completions/derender", `[1]`, 400, ""},
		{"/v1/completions/derender", `{"generate_responses":[{"choices":[{}]}],"model":7}`, 400, "model"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"logprobs":{"content":[{"logprob":1e300}]}}]}}`, 400, "generate_response.choices[0].logprobs.content"},
		{"/v1/chat/completions/derender", `{"generate_response":{"choices":[{"logprobs":{"content":[{"top_logprobs":[{"bytes":[300]}]}]}}]}}`, 400, "generate_response.choices[0].logprobs.content"},
	} {
		r := b.post(c.path, c.body)
		e := r.parse(t).Error
		if r.StatusCode != c.status || e != nil && c.param != "" && (e.Param == nil || *e.Param != c.param) {
			t.Errorf("%s %s: %d %s", c.path, c.body, r.StatusCode, r.body)
		}
	}
	if r := b.post("/v1/chat/completions/derender", `{"generate_response":{"choices":[{"token_ids":[72],"stop_reason":1.5}]}}`); !strings.Contains(r.body, `"stop_reason":null`) {
		t.Error(r.body)
	}
	if n := len(b.nodes["d1"].Requests()); n != 0 {
		t.Errorf("%d requests reached the node", n)
	}
	b.g.InFlight.Add(1)
	for _, path := range []string{"/v1/chat/completions/render", "/v1/chat/completions/derender"} {
		if r := b.post(path, `{}`); r.StatusCode != 503 || r.Header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s", path, r.StatusCode, r.body)
		}
	}
	b.g.InFlight.Add(-1)
}
