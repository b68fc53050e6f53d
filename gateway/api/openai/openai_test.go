package openai

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

const hello = `"messages":[{"role":"user","content":"hi"}]`

func TestParseChat(t *testing.T) {
	r, err := Parse(Chat, []byte(`{"model":"m",`+hello+`,"max_tokens":5,"max_completion_tokens":7.0,"temperature":0.5,"top_p":1,
		"top_k":-1,"seed":-3,"stop":["a","bé"],"stop_token_ids":[1,2],"ignore_eos":true,"n":2,"stream":true,
		"stream_options":{"include_usage":true,"continuous_usage_stats":true},"user":"u","add_generation_prompt":true,
		"chat_template_kwargs":{"z":1,"a":[true]},"skip_special_tokens":false,"include_stop_str_in_output":true,"priority":-2,
		"cache_salt":"s","request_id":"r-1","echo":false,"logprobs":false,"tools":null,"response_format":{"type":"text"},
		"add_special_tokens":true,"some_new_field":{"x":1},"frequency_penalty":0.0}`))
	if err != nil {
		t.Fatal(err)
	}
	temp, topP, topK, seed, yes := float32(0.5), float32(1), int32(-1), int64(-3), true
	want := &Request{Endpoint: Chat, Model: "m", Messages: []byte(`[{"role":"user","content":"hi"}]`), AddGenerationPrompt: true,
		TemplateArgs: []byte(`{"z":1,"a":[true]}`), AddSpecialTokens: &yes, N: 2, MaxTokens: 7, Temperature: &temp, TopP: &topP,
		TopK: &topK, Seed: &seed, Stop: []string{"a", "bé"}, StopTokens: []int32{1, 2}, IgnoreEOS: true, IncludeStop: true,
		Priority: -2, CacheSalt: "s", RequestID: "r-1", Stream: true, StreamInterval: 1, IncludeUsage: true, ContinuousUsage: true,
		Unknown: []string{"some_new_field"}, maxCompletion: 7, hasOptions: true, addGenerationIn: true}
	if !reflect.DeepEqual(r, want) {
		t.Fatalf("got  %+v\nwant %+v", r, want)
	}
}

func TestParsePrompts(t *testing.T) {
	for body, want := range map[string][]Prompt{
		`"a"`:                  {{Text: "a"}},
		`""`:                   {{Text: ""}},
		`["a","b"]`:            {{Text: "a"}, {Text: "b"}},
		`[1,2,3]`:              {{Tokens: []int32{1, 2, 3}}},
		`[[1],[2,3]]`:          {{Tokens: []int32{1}}, {Tokens: []int32{2, 3}}},
		`["a",[5]]`:            {{Text: "a"}, {Tokens: []int32{5}}},
		`"\u00e9\ud83d\ude00"`: {{Text: "é😀"}},
	} {
		r, err := Parse(Completions, []byte(`{"prompt":`+body+`}`))
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if !reflect.DeepEqual(r.Prompts, want) || r.MaxTokens != -1 || r.N != 1 || !r.SkipSpecial {
			t.Errorf("%s: %+v", body, r)
		}
	}
}

// Every refusal names the field.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		on          Endpoint
		body, param string
		says        string
	}{
		{Chat, `{`, "", "not valid JSON"},
		{Chat, `{"a":01}`, "", "not valid JSON"},
		{Chat, `{"a":nan}`, "", "not valid JSON"},
		{Chat, `[]`, "", "must be a JSON object"},
		{Chat, "{\"a\":\"\xff\"}", "", "UTF-8"},
		{Chat, strings.Repeat(`[`, 100000), "", "not valid JSON"},
		{Chat, `{}`, "messages", "required"},
		{Chat, `{"messages":[]}`, "messages", "empty"},
		{Chat, `{"messages":"hi"}`, "messages", "list"},
		{Chat, `{"messages":[1]}`, "messages", "[0] must be an object"},
		{Chat, `{"messages":[{"content":"x"}]}`, "messages[0].role", "required"},
		{Chat, `{"messages":[{"role":7,"content":"x"}]}`, "messages[0].role", "required"},
		{Chat, `{"messages":[{"role":"user","content":7}]}`, "messages[0].content", "string or a list"},
		{Chat, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, "messages[0].content[0].type", "image_url"},
		{Chat, `{"messages":[{"role":"user","content":[{"type":"text"}]}]}`, "messages[0].content[0].text", "string"},
		{Chat, `{"messages":[{"role":"user","content":[3]}]}`, "messages[0].content[0].type", "only text"},
		{Chat, `{"messages":[{"role":"user","content":[{"text":"x"}]}]}`, "messages[0].content[0].type", "type is required"},
		{Completions, `{}`, "prompt", "required"},
		{Completions, `{"prompt":[]}`, "prompt", "empty"},
		{Completions, `{"prompt":[[]]}`, "prompt", "[0] must not be empty"},
		{Completions, `{"prompt":[1,"a"]}`, "prompt", "[1] must be a token id"},
		{Completions, `{"prompt":[-1]}`, "prompt", "[0] must be a token id"},
		{Completions, `{"prompt":[4294967296]}`, "prompt", "[0] must be a token id"},
		{Completions, `{"prompt":["a",true]}`, "prompt", "[1] must be"},
		{Completions, `{"prompt":7}`, "prompt", "must be a string"},
		{Completions, `{"prompt":[` + strings.Repeat(`"a",`, MaxPrompts) + `"a"]}`, "prompt", "at most 256"},
		{Completions, `{"prompt":[` + strings.Repeat(`"a",`, 99) + `"a"],"n":100}`, "n", "more than 1024"},
		{Chat, `{` + hello + `,"temperature":-0.1}`, "temperature", "between 0"},
		{Chat, `{` + hello + `,"temperature":"1"}`, "temperature", "number"},
		{Chat, `{` + hello + `,"temperature":1e999}`, "temperature", "number"},
		{Chat, `{` + hello + `,"top_p":0}`, "top_p", "above 0"},
		{Chat, `{` + hello + `,"top_p":1.01}`, "top_p", "at most 1"},
		{Chat, `{` + hello + `,"top_k":-2}`, "top_k", "at least -1"},
		{Chat, `{` + hello + `,"n":0}`, "n", "at least 1"},
		{Chat, `{` + hello + `,"n":129}`, "n", "at most 128"},
		{Chat, `{` + hello + `,"n":1.5}`, "n", "integer"},
		{Chat, `{` + hello + `,"seed":9223372036854775808}`, "seed", "integer"},
		{Chat, `{` + hello + `,"max_tokens":0}`, "max_tokens", "at least 1"},
		{Chat, `{` + hello + `,"stream":1}`, "stream", "true or false"},
		{Chat, `{` + hello + `,"stream_options":{}}`, "stream_options", "needs stream"},
		{Chat, `{` + hello + `,"stream":true,"stream_options":{"include_usage":1}}`, "stream_options.include_usage", "true or false"},
		{Chat, `{` + hello + `,"stop":""}`, "stop", "1 to 1024"},
		{Chat, `{` + hello + `,"stop":[1]}`, "stop", "string"},
		{Chat, `{` + hello + `,"stop_token_ids":["a"]}`, "stop_token_ids", "token id"},
		{Chat, `{` + hello + `,"cache_salt":""}`, "cache_salt", "1 to 1024"},
		{Chat, `{` + hello + `,"request_id":"a\nb"}`, "request_id", "printable"},
		{Completions, `{"prompt":"a","max_tokens":0}`, "max_tokens", "unless echo"},
		{Completions, `{"prompt":"a","max_tokens":0,"echo":true,"logprobs":1,"logprob_token_ids":[1]}`, "logprob_token_ids", "max_tokens is 0"},
		{Chat, `{` + hello + `,"truncate_prompt_tokens":0}`, "truncate_prompt_tokens", "at least 1"},
		{Chat, `{` + hello + `,"truncation_side":"left"}`, "truncation_side", "needs truncate_prompt_tokens"},
		{Chat, `{` + hello + `,"truncate_prompt_tokens":5,"truncation_side":"up"}`, "truncation_side", "\"left\" or"},
		{Chat, `{` + hello + `,"documents":["a"]}`, "documents", "[0] must be an object"},
		{Chat, `{` + hello + `,"stream_interval":0}`, "stream_interval", "at least 1"},
		{Chat, `{` + hello + `,"add_generation_prompt":true,"continue_final_message":true}`, "continue_final_message", "cannot both"},
		{Chat, `{` + hello + `,"chat_template_kwargs":[]}`, "chat_template_kwargs", "object"},
		{Chat, `{` + hello + `,"functions":[]}`, "functions", "not supported"},
		{Chat, `{` + hello + `,"tools":{}}`, "tools", "must be a list"},
		{Chat, `{` + hello + `,"tools":[1]}`, "tools[0]", "must be an object, not 1"},
		{Chat, `{` + hello + `,"tools":[{"type":"custom","function":{"name":"f"}}]}`, "tools[0].type", "must be \"function\""},
		{Chat, `{` + hello + `,"tools":[{"type":"function"}]}`, "tools[0].function", "must be an object, not missing"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{}}]}`, "tools[0].function.name", "must have 1 to 128"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{}}]}`, "tools[0].function.name", "not missing"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"a b"}}]}`, "tools[1].function.name", "a b"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{"name":"f","parameters":[]}}]}`, "tools[0].function.parameters", "JSON schema"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{"name":"f","description":3}}]}`, "tools[0].function.description", "must be a string"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{"name":"f","strict":1}}]}`, "tools[0].function.strict", "must be true or false, not 1"},
		{Chat, `{` + hello + `,"tools":[{"type":"function","function":{"name":"f"}}],"parallel_tool_calls":0}`, "parallel_tool_calls", "must be"},
		{Chat, `{` + hello + `,"tool_choice":"required"}`, "tool_choice", "needs tools"},
		{Chat, `{` + hello + `,"tool_choice":{"type":"function","function":{"name":"f"}}}`, "tool_choice", "needs tools"},
		{Chat, `{` + hello + `,"tool_choice":{"type":"function","function":{"name":"g"}},"tools":[{"type":"function","function":{"name":"f"}}]}`, "tool_choice", `"g", which is not among tools`},
		{Chat, `{` + hello + `,"tool_choice":{"type":"function","function":{"name":"a b"}}}`, "tool_choice", "the name of a function"},
		{Chat, `{` + hello + `,"tool_choice":{"type":"allowed_tools"}}`, "tool_choice", "must be \"none\""},
		{Chat, `{` + hello + `,"tool_choice":"any"}`, "tool_choice", "must be \"none\""},
		{Chat, `{` + hello + `,"response_format":{"type":"yaml"}}`, "response_format.type", "not \"yaml\""},
		{Chat, `{` + hello + `,"response_format":{"json_schema":{}}}`, "response_format.type", "not missing"},
		{Completions, `{"prompt":"a","suffix":"b"}`, "suffix", "not supported"},
		{Completions, `{"prompt":"a","prompt_logprobs":257}`, "prompt_logprobs", "at most 256"},
		{Completions, `{"prompt":"a","prompt_logprobs":0,"stream":true}`, "prompt_logprobs", "cannot be streamed"},
	} {
		_, err := Parse(c.on, []byte(c.body))
		if err == nil {
			t.Errorf("%.80s: taken", c.body)
			continue
		}
		if err.Status != 400 || err.Type != TypeBadRequest || err.Param != c.param || !strings.Contains(err.Message, c.says) {
			t.Errorf("%.80s: %+v, want param %q and %q", c.body, err, c.param, c.says)
		}
	}
}

func TestContentParts(t *testing.T) {
	r, err := Parse(Chat, []byte(`{"messages":[{"x":1,"content":[{"type":"text","text":"a\"\n"},"b",{"text":"c","type":"input_text"}],"role":"user"},{"role":"assistant","content":null}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(r.Messages), `[{"x":1,"content":"a\"\n\nb\nc","role":"user"},{"role":"assistant","content":null}]`; got != want {
		t.Fatalf("got  %s\nwant %s", got, want)
	}
	if got, want := string(r.MessageParts), `[{"x":1,"content":[{"type":"text","text":"a\"\n"},"b",{"text":"c","type":"input_text"}],"role":"user"},{"role":"assistant","content":null}]`; got != want {
		t.Fatalf("got  %s\nwant %s", got, want)
	}
}

func TestAppendStringAgainstEncodingJSON(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 6))
		var s []byte
		for range r.IntN(40) {
			switch r.IntN(4) {
			case 0:
				s = append(s, byte(r.IntN(256)))
			case 1:
				s = utf8.AppendRune(s, rune(r.IntN(0x11000)))
			case 2:
				s = append(s, byte(r.IntN(32)))
			default:
				s = append(s, "plain \"\\ text"...)
			}
		}
		var back string
		got := AppendString(nil, s)
		if err := json.Unmarshal(got, &back); err != nil {
			t.Fatalf("seed %d: %q: %v", seed, got, err)
		}
		if want := strings.ToValidUTF8(string(s), ""); strings.ReplaceAll(back, "\uFFFD", "") != strings.ReplaceAll(want, "\uFFFD", "") || !utf8.Valid(got) {
			t.Fatalf("seed %d: %q came back as %q", seed, s, back)
		}
	}
}

func TestAnswers(t *testing.T) {
	u := Usage{Prompt: 3, Completion: 2, Cached: 1}
	stop := Finish{Reason: "stop", Stop: "\n", Token: -1}
	chat := NewEncoder(Chat, "chatcmpl-1", 17, "m", "fp_1")
	text := NewEncoder(Completions, "cmpl-1", 17, "m", "fp_1")
	const usage = `{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}`
	const nulls = `,"token_ids":null,"prompt_token_ids":null,"prompt_text":null,"prompt_logprobs":null`
	chunk := func(id, object, rest string) string {
		return `data: {"id":"` + id + `","object":"` + object + `","created":17,"model":"m","system_fingerprint":"fp_1","choices":[` + rest + "\n\n"
	}
	for _, c := range []struct{ got, want string }{
		{string(chat.AppendDelta(nil, &Delta{Index: 1, Begin: true, Text: []byte("x"), Finish: NotFinished})), chunk("chatcmpl-1", "chat.completion.chunk", `{"index":1,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`) +
			chunk("chatcmpl-1", "chat.completion.chunk", `{"index":1,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}]}`)},
		{string(chat.AppendDelta(nil, &Delta{Begin: true, Text: []byte("x"), Finish: NotFinished, Usage: &u})),
			chunk("chatcmpl-1", "chat.completion.chunk", `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":1}}}`) +
				chunk("chatcmpl-1", "chat.completion.chunk", `{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}],"usage":`+usage+`}`)},
		{string(chat.AppendDelta(nil, &Delta{Text: []byte("a\"b"), Finish: NotFinished})), chunk("chatcmpl-1", "chat.completion.chunk", `{"index":0,"delta":{"content":"a\"b"},"logprobs":null,"finish_reason":null}]}`)},
		{string(chat.AppendDelta(nil, &Delta{Finish: stop, Usage: &u})), chunk("chatcmpl-1", "chat.completion.chunk", `{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":"\n"}],"usage":`+usage+`}`)},
		{string(chat.AppendEnd(nil, &u)), chunk("chatcmpl-1", "chat.completion.chunk", `],"usage":`+usage+`}`) + "data: [DONE]\n\n"},
		{string(text.AppendEnd(nil, nil)), "data: [DONE]\n\n"},
		{string(text.AppendDelta(nil, &Delta{Index: 2, Begin: true, Text: []byte("x"), Finish: Finish{Reason: "length", Token: -1}})), chunk("cmpl-1", "text_completion", `{"index":2,"text":"x","logprobs":null,"finish_reason":"length","stop_reason":null}]}`)},
		{string(text.AppendWhole(nil, []Delta{{Text: []byte("x"), Finish: Finish{Reason: "stop", Token: 5}}, {Index: 1, Finish: stop}}, u)),
			`{"id":"cmpl-1","object":"text_completion","created":17,"model":"m","system_fingerprint":"fp_1","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":"stop","stop_reason":5` + nulls + `},{"index":1,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":"\n"` + nulls + `}],"usage":` + usage + `,"service_tier":null,"kv_transfer_params":null}`},
		{string(chat.AppendWhole(nil, []Delta{{Text: []byte("x"), Finish: Finish{Reason: "length", Token: -1}}}, u)),
			`{"id":"chatcmpl-1","object":"chat.completion","created":17,"model":"m","system_fingerprint":"fp_1","choices":[{"index":0,"message":{"role":"assistant","content":"x","refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"usage":` + usage +
				`,"prompt_token_ids":null,"prompt_text":null,"prompt_logprobs":null,"service_tier":null,"kv_transfer_params":null}`},
		{string(Model{"m", 17, 4096, ""}.Append(nil)), `{"id":"m","object":"model","created":17,"owned_by":"tandem","root":"m","parent":null,"max_model_len":4096}`},
		{string((&Error{Status: 404, Type: TypeNotFound, Param: "model", Message: `no "x"`}).Append(nil)), `{"error":{"message":"no \"x\"","type":"NotFoundError","param":"model","code":404}}`},
		{string(ContextTooLong("messages", 8, "It has %d.", 9).Append(nil)),
			`{"error":{"message":"This model's maximum context length is 8 tokens. It has 9. (context_length_exceeded)","type":"BadRequestError","param":"messages","code":"context_length_exceeded"}}`},
		{string(Unavailable(1, "later").AppendEvent(nil)), "data: {\"error\":{\"message\":\"later\",\"type\":\"ServiceUnavailableError\",\"param\":null,\"code\":503}}\n\n"},
	} {
		if c.got != c.want {
			t.Errorf("got  %s\nwant %s", c.got, c.want)
		}
		for event := range strings.SplitSeq(c.got, "\n\n") {
			if body := strings.TrimPrefix(event, "data: "); body != "" && body != "[DONE]" && !json.Valid([]byte(body)) {
				t.Errorf("not JSON: %s", body)
			}
		}
	}
}

func TestStreamEventsDoNotAllocate(t *testing.T) {
	a := NewEncoder(Chat, "chatcmpl-1", 17, "m", "fp")
	buf, text, u := make([]byte, 0, 4096), "héllo \"x\"\n", Usage{}
	if n := testing.AllocsPerRun(200, func() {
		buf = a.AppendDelta(buf[:0], &Delta{Text: []byte(text), Finish: NotFinished, Usage: &u})
		buf = a.AppendEnd(buf, &u)
	}); n != 0 {
		t.Fatalf("%g allocations", n)
	}
}

// Whatever comes in: a request or a 400, never a crash, and what is taken holds
// its bounds.
func FuzzParse(f *testing.F) {
	for _, s := range []string{`{"messages":[{"role":"user","content":"hi"}]}`, `{"prompt":[[1,2],[3]],"n":3,"stop":["a"]}`,
		`{"prompt":"a","stream":true,"stream_options":{"include_usage":true},"seed":1e3}`, `{"messages":[{"role":"user","content":[{"type":"text","text":"\ud800"}]}]}`,
		`{"\u006d\u006fdel":"x","temperature":1e-400}`, `{"messages":[{}],"messages":[{"role":"a"}]}`} {
		f.Add(s, uint8(0))
		f.Add(s, uint8(1))
	}
	f.Add(`{"prompt":"a","return_token_strs":true}`, uint8(2))
	f.Add(`{"messages":[{"role":"user","reasoning_content":"so"}],"prompt":null}`, uint8(2))
	f.Add(`{"tokens":[1,2.0,3e1]}`, uint8(3))
	f.Add(`{"prompt":"a","logit_bias":{"1":2,"3":-4.5},"bad_words":["a"],"logprobs":2,"min_tokens":1,"allowed_token_ids":[1]}`, uint8(1))
	f.Add(`{"token_ids":[1,2],"sampling_params":{"n":2,"logprobs":1},"stream":true}`, uint8(1))
	f.Add(`{"messages":[[{"role":"user","content":"a"}],[{"role":"b"}]],"max_tokens":1,"structured_outputs":{"choice":["a"]}}`, uint8(0))
	f.Add(`{"generate_response":{"request_id":"r","choices":[{"token_ids":[1],"stop_reason":2,"logprobs":{"content":[{"token":"a","bytes":[1],"top_logprobs":[{"token_id":3}]}]}}]},"prompt_tokens":3}`, uint8(0))
	f.Add(`{"stream":true,"generate_chunk":{"choices":[{"index":1,"token_ids":[1]}],"usage":{"prompt_tokens":2,"completion_tokens":1}},"stream_state":{"role_sent":true,"output_token_ids":[2]}}`, uint8(0))
	f.Add(`{"generate_responses":[{"choices":[{}]}],"prompt_token_ids":[[1],null],"request_ids":["cmpl-a",null]}`, uint8(1))
	f.Fuzz(func(t *testing.T, body string, which uint8) {
		free := func(int) *Error { return nil }
		_, batch := ParseBatch([]byte(body), free)
		_, derender := ParseDerender(endpoints[which%2], []byte(body), free)
		_, abort := ParseAbort([]byte(body), free)
		for _, fault := range []*Error{batch, derender, abort} {
			if fault != nil && (fault.Status != 400 || fault.Message == "" || !json.Valid(fault.Append(nil))) {
				t.Fatalf("%q: %+v", body, fault)
			}
		}
		InvocationPath([]byte(body))
		if b, err := CompletionOfTokens([]byte(body)); err == nil && !json.Valid(b) || err != nil && err.Status != 400 {
			t.Fatalf("%q: %q %+v", body, b, err)
		}
		on := endpoints[int(which)%len(endpoints)]
		if _, fault := ParsePrompt(on, []byte(body), nil); fault != nil && (fault.Status != 400 || fault.Message == "") {
			t.Fatalf("%q: %+v", body, fault)
		}
		r, err := Parse(on, []byte(body))
		if err != nil {
			if err.Status != 400 || err.Message == "" || !json.Valid(err.Append(nil)) {
				t.Fatalf("%q: %+v", body, err)
			}
			return
		}
		if on&both != 0 { // what is rendered is a request of the same sampling
			most := r.MaxTokens
			if most < 0 {
				most = math.MaxInt32
			}
			out := (&Rendered{ID: "r", Tokens: []int32{1}, MaxTokens: most, TopP: 1}).Append(nil, r)
			c, fault := CompletionOfTokens(out)
			if fault == nil && most > 0 {
				_, fault = Parse(Completions, c)
			}
			if fault != nil || !json.Valid(out) {
				t.Fatalf("%q: rendered as %q: %v", body, out, fault)
			}
		}
		if p, fault := ParsePrompt(on, []byte(body), nil); on&both != 0 && (fault != nil || !bytes.Equal(p.Messages, r.Messages) || !reflect.DeepEqual(p.Prompts, r.Prompts) || p.AddGenerationPrompt != r.AddGenerationPrompt) {
			t.Fatalf("%q: its prompt alone is %+v, %v, not %+v", body, p, fault, r)
		}
		if r.N < 1 || r.N > MaxN || len(r.Prompts)*r.N > MaxChoices || r.MaxTokens == 0 || r.MaxTokens < -1 || len(r.Stop) > MaxStops {
			t.Fatalf("%q: %+v", body, r)
		}
		if chat := r.Messages != nil; chat == (len(r.Prompts) > 0) || chat && on&(Chat|Tokenize) == 0 || !chat && on == Chat {
			t.Fatalf("%q: %+v", body, r)
		}
		if r.TopLogprobs > MaxLogprobs || len(r.LogitBias) > MaxBias || len(r.BadWords) > MaxBadWords {
			t.Fatalf("%q: %+v", body, r)
		}
		if r.Messages != nil && !json.Valid(r.Messages) {
			t.Fatalf("%q: messages %q", body, r.Messages)
		}
		if !json.Valid([]byte(body)) {
			t.Fatalf("%q: taken, but it is not JSON", body)
		}
	})
}
