package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/api/messages"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// claudeTools are tools in Anthropic's form, with a message.
const claudeTools = `"max_tokens":400,"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"weather","input_schema":{"type":"object","properties":{"city":{"type":"string"}}}}]`

// claude is a message in Anthropic's form.
type claude struct {
	ID, Type, Role, Model string
	Content               []claudeBlock
	Stop                  string  `json:"stop_reason"`
	Sequence              *string `json:"stop_sequence"`
	Usage                 struct {
		In     int `json:"input_tokens"`
		Cached int `json:"cache_read_input_tokens"`
		Out    int `json:"output_tokens"`
	}
	Error *struct{ Type, Message string }
	// RequestID is that of an error.
	RequestID string `json:"request_id"`
}

// claudeBlock is a block of its content.
type claudeBlock struct {
	Type, Text, Thinking, Signature, ID, Name string
	Input                                     json.RawMessage
}

func (m claude) String() (s string) {
	for _, b := range m.Content {
		switch b.Type {
		case "thinking":
			s += fmt.Sprintf("thinking %q %s; ", b.Thinking, b.Signature)
		case "text":
			s += fmt.Sprintf("text %q; ", b.Text)
		default:
			s += fmt.Sprintf("%s(%s); ", b.Name, b.Input)
		}
	}
	return s + m.Stop
}

// claudeOf returns an answer, of a stream put together.
func claudeOf(t *testing.T, r reply) (m claude) {
	t.Helper()
	if r.StatusCode != 200 || r.err != nil || r.Header.Get("Request-Id") != r.Header.Get("X-Request-Id") || r.Header.Get("Request-Id") == "" {
		t.Fatalf("%d %v %v %s", r.StatusCode, r.err, r.Header, r.body)
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
		if err := json.Unmarshal([]byte(r.body), &m); err != nil {
			t.Fatalf("%s: %v", r.body, err)
		}
		return m
	}
	input, last := "", ""
	for event := range strings.SplitSeq(strings.TrimSuffix(r.body, "\n\n"), "\n\n") {
		var e struct {
			Type    string
			Index   int
			Message *claude
			Block   json.RawMessage `json:"content_block"`
			Delta   struct {
				Type, Text, Thinking, Signature string
				JSON                            string `json:"partial_json"`
				claude
			}
			Usage json.RawMessage
		}
		name, data, _ := strings.Cut(event, "\ndata: ")
		if err := json.Unmarshal([]byte(data), &e); err != nil || "event: "+e.Type != name {
			t.Fatalf("%q: %v", event, err)
		}
		last = e.Type
		switch e.Type {
		case "message_start":
			m = *e.Message
		case "content_block_start":
			m.Content = append(m.Content, claudeBlock{})
			if err := json.Unmarshal(e.Block, &m.Content[e.Index]); err != nil {
				t.Fatal(err)
			}
			input = ""
		case "content_block_delta":
			b := &m.Content[e.Index]
			b.Text += e.Delta.Text
			b.Thinking += e.Delta.Thinking
			b.Signature += e.Delta.Signature
			if input += e.Delta.JSON; input != "" {
				b.Input = json.RawMessage(input)
			}
		case "message_delta":
			m.Stop, m.Sequence = e.Delta.Stop, e.Delta.Sequence
			if err := json.Unmarshal(e.Usage, &m.Usage); err != nil {
				t.Fatal(err)
			}
		}
	}
	if last != "message_stop" {
		t.Errorf("the stream ends in %s", last)
	}
	return m
}

// Whole answers and streams have the same blocks, ids and usage, whose tokens of the prompt are those
// that count_tokens has.
func TestMessages(t *testing.T) {
	b := toolBed(t, Options{Upstreams: Upstreams{Options: upstream.Options{Names: map[string]string{"claude-tiny": "tiny"}}}}, calls, hermesMarkers...)
	const answer = `thinking "Hm, \"stop\"." dGFuZGVt; text "I look.\n"; weather({"city": "Oslo stop"}); time({}); tool_use`
	for fields, want := range map[string]string{
		`"model":"claude-tiny"`:                                   answer,
		`"stop_sequences":["stop"],"tool_choice":{"type":"auto"}`: answer,
		`"stop_sequences":["look"]`:                               `thinking "Hm, \"stop\"." dGFuZGVt; text "I "; stop_sequence`,
		`"max_tokens":13`:                                         `thinking "Hm, \"stop\"." dGFuZGVt; max_tokens`,
		`"thinking":{"type":"adaptive","display":"omitted"}`:      strings.TrimPrefix(answer, `thinking "Hm, \"stop\"." dGFuZGVt; `),
		`"system":"Be brief.","tool_choice":{"type":"none"}`:      fmt.Sprintf(`thinking "Hm, \"stop\"." dGFuZGVt; text %q; end_turn`, strings.TrimPrefix(raw(calls, hermesMarkers), "\n\n")),
	} {
		body := `{` + claudeTools + `,` + fields
		whole := claudeOf(t, b.post("/v1/messages", body+`}`, "X-Request-Id: one", "anthropic-version: 2023-06-01", "anthropic-beta: x"))
		streamed := claudeOf(t, b.post("/v1/messages?beta=true", body+`,"stream":true}`, "X-Request-Id: one"))
		if whole.String() != want || streamed.String() != want {
			t.Errorf("%s:\n got %v\n and %v\nwant %s", body, whole, streamed, want)
		}
		if whole.ID != "msg_one" || streamed.ID != whole.ID || streamed.Usage != whole.Usage || whole.Role != "assistant" || whole.Type != "message" {
			t.Errorf("%+v, then %+v", whole, streamed)
		}
		if wantModel := map[bool]string{true: "claude-tiny", false: "tiny"}[strings.Contains(fields, "model")]; whole.Model != wantModel || streamed.Model != wantModel {
			t.Errorf("%s, %s", whole.Model, streamed.Model)
		}
		if s := whole.Sequence; (s != nil) != (whole.Stop == "stop_sequence") || s != nil && *s != "look" {
			t.Errorf("%v", s)
		}
		var count struct {
			In int `json:"input_tokens"`
		}
		r := b.post("/v1/messages/count_tokens", strings.Replace(body, `"max_tokens":400,`, "", 1)+`}`)
		if err := json.Unmarshal([]byte(r.body), &count); err != nil || count.In == 0 || count.In != whole.Usage.In+whole.Usage.Cached || whole.Usage.Out == 0 {
			t.Errorf("%s: %s, %+v", fields, r.body, whole.Usage)
		}
	}
	// The second turn: the client sends thinking, call and result.
	const turn = `{"max_tokens":400,"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"thinking","thinking":"Hm","signature":"other"},{"type":"tool_use","id":"a","name":"weather","input":{"city": "Ålesund"}}]},
		{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"rain"},{"type":"text","text":"And?"}]}]}`
	claudeOf(t, b.post("/v1/messages", turn))
	prompt := b.g.native.Models.Load().Text.Decode(lastRequest(b, "d1").Prompt, false)
	if want := "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ålesund\"}}\n</tool_call><|im_end|>\n" +
		"<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"; prompt != want {
		t.Errorf("%q, want %q", prompt, want)
	}
}

// An answer whose nodes are lost in the middle is, event by event, what it is on a node that lives.
func TestMessagesResume(t *testing.T) {
	bu := toolBundle(hermesMarkers...)
	token := writes(t, bu, calls)
	live := newBed(t, Options{}, one(nodestest.Options{Bundle: bu, Token: token}))
	lossy := newBed(t, Options{}, map[string]nodestest.Options{
		"d1": {Bundle: bu, Token: token, CutAfter: 9}, "d2": {Bundle: bu, Token: token, CutAfter: 40}, "d3": {Bundle: bu, Token: token},
	})
	for _, fields := range []string{``, `,"stream":true`} {
		want := live.post("/v1/messages", `{`+claudeTools+fields+`}`, "X-Request-Id: a")
		got := lossy.post("/v1/messages", `{`+claudeTools+fields+`}`, "X-Request-Id: a")
		ids := map[string]bool{}
		for _, b := range claudeOf(t, got).Content {
			ids[b.ID] = true
		}
		// The ids of calls differ between requests, because their seed is drawn.
		if id := regexp.MustCompile(`"call_[^"]*"`); len(ids) != 3 || id.ReplaceAllString(got.body, "") != id.ReplaceAllString(want.body, "") {
			t.Errorf("%v %s, want %s", ids, got.body, want.body)
		}
	}
}

// Every error under the path has Anthropic's form, with the request's id, also before the route runs.
func TestMessagesErrors(t *testing.T) {
	o := Options{APIKeys: []string{"k"}}
	o.Limits.MaxBodyBytes = 2000
	b, empty := newBed(t, o, one(nodestest.Options{})), newBed(t, Options{}, nil)
	tight := bundle()
	tight.MaxModelLen = 40
	small := newBed(t, Options{}, one(nodestest.Options{Bundle: tight}))
	for _, stream := range []string{"", `,"stream":true`} {
		if m := claudeOf(t, small.post("/v1/messages", `{"max_tokens":200000,"messages":[{"role":"user","content":"h"}]`+stream+`}`)); m.Stop != "model_context_window_exceeded" || m.Usage.In+m.Usage.Out != 40 {
			t.Errorf("%+v", m)
		}
	}
	const key, good = "x-api-key: k", `{"max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`
	for _, c := range []struct {
		b                  *bed
		method, path, body string
		header             string
		status             int
		typ, message       string
	}{
		{b, "POST", "/v1/messages", good, "X-A: b", 401, "authentication_error", "the API key is missing or wrong"},
		{b, "POST", "/v1/messages", `{"max_tokens":4,"model":"claude","messages":[{"role":"user","content":"hi"}]}`, key, 404, "not_found_error", `the model "claude" does not exist`},
		{b, "POST", "/v1/messages", `{"messages":[{"role":"user","content":"hi"}]}`, key, 400, "invalid_request_error", "max_tokens is required"},
		{b, "POST", "/v1/messages", `{"max_tokens":4,"messages":[{"role":"user","content":[{"type":"image"}]}]}`, key, 400, "invalid_request_error", `messages[0].content[0].type "image" is not supported`},
		{small, "POST", "/v1/messages", `{"max_tokens":2,"messages":[{"role":"user","content":"hello and how are you?"}]}`, key, 400, "invalid_request_error", "This model's maximum context length is 40 tokens."},
		{b, "POST", "/v1/messages", strings.Replace(good, "hi", strings.Repeat("x", 2000), 1), key, 413, "request_too_large", "the request body is larger than 2000 bytes"},
		{b, "POST", "/v1/messages/", good, key + "\r\nContent-Type: text/plain", 415, "invalid_request_error", "Content-Type"},
		{b, "GET", "/v1/messages", "", key, 405, "invalid_request_error", "/v1/messages takes POST, OPTIONS, not GET"},
		{b, "POST", "/v1/messages/batches", good, key, 404, "not_found_error", "there is nothing at /v1/messages/batches"},
		{b, "POST", "/v1/messages/count_tokens", `{}`, key, 400, "invalid_request_error", "messages is required"},
		{b, "POST", "/v1/messages/count_tokens", `{"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"a","input_schema":{}}]}`, key, 400, "invalid_request_error", "tools: the format of tool calls"},
		{empty, "POST", "/v1/messages", good, key, 503, "overloaded_error", "no model is loaded yet"},
		{empty, "POST", "/v1/messages/count_tokens", good, key, 503, "overloaded_error", "no model is loaded yet"},
	} {
		r := c.b.do(c.method, c.path, c.body, c.header)
		var e claude
		if err := json.Unmarshal([]byte(r.body), &e); err != nil || r.StatusCode != c.status || e.Type != "error" || e.Error == nil || e.Error.Type != c.typ || !strings.Contains(e.Error.Message, c.message) {
			t.Errorf("%s %s %.80s: %d %s, want %d %s %s", c.method, c.path, c.body, r.StatusCode, r.body, c.status, c.typ, c.message)
		}
		if id := r.Header.Get("Request-Id"); id == "" || e.RequestID != id || r.Header.Get("X-Request-Id") != id {
			t.Errorf("%s: %v", r.body, r.Header)
		}
	}
	// A stream that fails ends in an event, and its body is complete.
	lost := newBed(t, Options{Limits: Limits{ResumeTimeout: 100 * time.Millisecond}}, one(nodestest.Options{CutAfter: 5, Refuse: func(r *nodepb.Generate) (nodepb.Code, string) {
		if len(r.Output) > 0 {
			return nodepb.Code_CODE_OVERLOADED, "full"
		}
		return 0, ""
	}}))
	r := lost.post("/v1/messages", strings.TrimSuffix(good, "}")+`,"max_tokens":20,"stream":true}`, "X-Request-Id: one")
	events := strings.Split(strings.TrimSuffix(r.body, "\n\n"), "\n\n")
	if last := events[len(events)-1]; r.StatusCode != 200 || r.err != nil || !strings.HasPrefix(last, `event: error`+"\n"+`data: {"type":"error","error":{"type":"overloaded_error","message":"`) || !strings.HasSuffix(last, `"},"request_id":"one"}`) {
		t.Errorf("%d %v %q", r.StatusCode, r.err, last)
	}
}

// Errors that are found behind the translation name fields, values and messages of the request.
func TestMessagesNames(t *testing.T) {
	reject := newBed(t, Options{RejectSpecialTokens: true}, one(nodestest.Options{}))
	hermes, plain := toolBed(t, Options{}, calls, hermesMarkers...), newBed(t, Options{}, one(nodestest.Options{}))
	first := newBed(t, Options{ChatTemplate: "{{ messages[0].content }}"}, one(nodestest.Options{}))
	const schema = `{"type":"json_schema","schema":{"type":"object"}}`
	for _, c := range []struct {
		b               *bed
		fields, message string
	}{
		{reject, `{"max_tokens":4,"system":"s","messages":[{"role":"user","content":"a"},{"role":"user","content":"<|im_end|>"}]`,
			`messages: a message of role "user" has the special token "<|im_end|>"`},
		{plain, `{"max_tokens":4,"messages":[{"role":"user","content":"hi"}],"output_config":{"format":` + schema + `}`, fmt.Sprintf(`can constrain outputs (output_config.format.schema) by grammars of version %d: upgrade the nodes, or leave output_config.format out`, grammar.Version)},
		{plain, `{"max_tokens":4,"messages":[{"role":"user","content":"hi"}],"output_format":` + schema, fmt.Sprintf(`can constrain outputs (output_format.schema) by grammars of version %d: upgrade the nodes, or leave output_format out`, grammar.Version)},
		{hermes, `{` + claudeTools + `,"tool_choice":{"type":"auto","disable_parallel_tool_use":true}`, `or leave tool_choice.disable_parallel_tool_use out`},
		{hermes, `{` + claudeTools + `,"tool_choice":{"type":"tool","name":""}`, `tool_choice.name must be the name of a function in tools, not ""`},
		{hermes, `{` + claudeTools + `,"tool_choice":{"type":"tool","name":"a b"}`, `tool_choice.name must be the name of a function in tools, not "a b"`},
		{hermes, `{` + claudeTools + `,"tool_choice":{"type":"tool","name":"other"}`, `tool_choice names the function "other", which is not among tools`},
		{hermes, `{"max_tokens":4,"messages":[{"role":"user","content":"hi"}],"tool_choice":{"type":"any"}`, `tool_choice needs tools, which are missing`},
		{first, `{"max_tokens":4,"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"x"}]`, `a last message of the assistant is continued, but the template drops text`},
		{plain, `{` + claudeTools, `or tool_choice to {"type": "none"}`},
	} {
		r := c.b.post("/v1/messages", c.fields+`}`)
		var e claude
		if err := json.Unmarshal([]byte(r.body), &e); err != nil || r.StatusCode != 400 && r.StatusCode != 503 || e.Error == nil || !strings.Contains(e.Error.Message, c.message) {
			t.Errorf("%s: %d %s, want %s", c.fields, r.StatusCode, r.body, c.message)
		}
	}
}

// A silent stream gets an event.
func TestMessagesKeepAlive(t *testing.T) {
	o := Options{}
	o.Limits.SSEKeepAlive = quiet
	gate := make(chan struct{})
	b := newBed(t, o, one(nodestest.Options{Gate: gate}))
	go func() {
		gate <- struct{}{}
		time.Sleep(10 * quiet)
		feed(gate, 2)
	}()
	r := b.post("/v1/messages", `{"max_tokens":3,"messages":[{"role":"user","content":"hi"}],"stream":true}`)
	if m := claudeOf(t, r); m.String() != `text "Hel"; max_tokens` || !strings.Contains(r.body, "event: ping\ndata: {\"type\":\"ping\"}\n\n") || strings.Contains(r.body, ": keep-alive") {
		t.Errorf("%s", r.body)
	}
}

// An upstream's answers pass byte by byte; the gateway's own errors have Anthropic's form.
func TestMessagesOfUpstreams(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	const start = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n"
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, start)
		panic(http.ErrAbortHandler)
	})
	r := b.post("/v1/messages", `{"model":"m","max_tokens":3,"messages":[],"stream":true}`, "X-Request-Id: one")
	if r.body != start+"event: error\ndata: "+`{"type":"error","error":{"type":"api_error","message":"the upstream's answer broke off"},"request_id":"one"}`+"\n\n" || r.err == nil || r.Header.Get(messages.RequestIDHeader) != "" {
		t.Errorf("%v %q", r.err, r.body)
	}
	if r := b.post("/v1/messages", `{"model":"other"}`); r.StatusCode != 404 || !strings.HasPrefix(r.body, `{"type":"error","error":{"type":"not_found_error"`) {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// The tokens of relayed messages and responses are counted by the usage that their servers report,
// streamed and whole, and charged to the client's key.
func TestUsageOfUpstreamsAPIs(t *testing.T) {
	const (
		start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"stop_reason\":null,\"usage\":{\"input_tokens\":10,\"cache_creation_input_tokens\":3,\"cache_read_input_tokens\":7,\"output_tokens\":1}}}\n\n"
		delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"\\\"usage\\\":{\\\"output_tokens\\\":9}\"}}\n\n"
		stop  = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"max_tokens\",\"stop_sequence\":null},\"usage\":{\"output_tokens\":500}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
		whole = `{"type":"message","content":[{"type":"tool_use","input":{"usage":{"output_tokens":1}}}],"stop_reason":"tool_use","usage":{"input_tokens":13,"cache_read_input_tokens":7,"output_tokens":500}}`
		item  = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n"
		made  = `{"id":"resp_1","status":"incomplete","output":[],"usage":{"input_tokens":20,"input_tokens_details":{"cached_tokens":7},"output_tokens":500,"total_tokens":520}}`
	)
	for _, c := range []struct {
		path, answer, finish string
		stream               bool
	}{
		{"/v1/messages", start + "event: ping\ndata: {\"type\": \"ping\"}\n\n" + delta + delta + stop, "length", true},
		{"/v1/messages", strings.ReplaceAll(start+delta+stop, "\n", "\r\n"), "length", true},
		{"/v1/messages", whole, "stop", false},
		{"/v1/responses", "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"usage\":null}}\n\n" + item +
			"event: response.incomplete\ndata: {\"type\":\"response.incomplete\",\"response\":" + made + "}\n\n", "length", true},
		{"/v1/responses", made, "length", false},
	} {
		b := newRelayed(t, Options{APIKeyFile: keyFile(t, "k name=k tokens-per-second=20\n"), LogRequests: true}, "s1")
		b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			if c.stream {
				w.Header().Set("Content-Type", "text/event-stream")
			}
			event(w, c.answer)
		})
		body := fmt.Sprintf(`{"model":"m","max_tokens":500,"messages":[],"stream":%t}`, c.stream)
		if r := b.post(c.path, body, "x-api-key: k"); r.StatusCode != 200 || r.body != c.answer || r.err != nil {
			t.Fatalf("%s: %d %v %s", c.path, r.StatusCode, r.err, r.body)
		}
		b.until(func() bool { return b.g.InFlight.Load() == 0 })
		if log := b.log.String(); !strings.Contains(log, "finish="+c.finish+" prompt_tokens=20 cached_tokens=7 output_tokens=500") {
			t.Errorf("%.60s: %s", c.answer, log)
		}
		m := b.g.Meters
		if p, g := m.Counter(metrics.PromptTokens).Get(), m.Counter(metrics.GenerationTokens).Get(); p != 20 || g != 500 {
			t.Errorf("%.60s: %g tokens of prompts and %g of answers are counted", c.answer, p, g)
		}
		// A burst of ten seconds of tokens is used up.
		if r := b.post(c.path, body, "x-api-key: k"); r.StatusCode != 429 {
			t.Errorf("%.60s: %d %s", c.answer, r.StatusCode, r.body)
		}
	}
	// So are those of answers and events that are too large to hold.
	large := strings.Repeat("\\\"usage\\\": ", 20<<10)
	for _, c := range []struct{ path, answer, finish string }{
		{"/v1/messages", `{"type":"message","content":[{"type":"text","text":"` + large + `"}],"stop_reason":"max_tokens","usage":{"input_tokens":13,"cache_read_input_tokens":7,"output_tokens":500}}`, "length"},
		{"/v1/responses", `{"id":"resp_1","output":["` + large + `"],"status":"incomplete"` + made[len(`{"id":"resp_1","status":"incomplete"`):], "length"},
		{"/v1/responses", item + "event: response.output_item.done\ndata: {\"type\":\"response.output_item.done\",\"item\":{\"status\":\"completed\",\"text\":\"" + large + "\"}}\n\n" +
			"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"output\":[\"" + large + "\"],\"status\":\"completed\"" + made[len(`{"id":"resp_1","status":"incomplete"`):] + "}\n\n", "stop"},
		{"/v1/chat/completions", `{"choices":[{"index":0,"message":{"content":"` + large + `"},"finish_reason":"length"}],"usage":{"prompt_tokens":20,"completion_tokens":500,"prompt_tokens_details":{"cached_tokens":7}}}`, "length"},
	} {
		stream := strings.HasPrefix(c.answer, "event:")
		b := newRelayed(t, Options{LogRequests: true}, "s1")
		b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", map[bool]string{true: "text/event-stream", false: "application/json"}[stream])
			for piece := range slices.Chunk([]byte(c.answer), 50_000) {
				event(w, string(piece))
			}
		})
		if r := b.post(c.path, fmt.Sprintf(`{"model":"m","max_tokens":500,"messages":[],"stream":%t}`, stream)); r.StatusCode != 200 || r.body != c.answer || r.err != nil {
			t.Fatalf("%s: %d %v, %d bytes", c.path, r.StatusCode, r.err, len(r.body))
		}
		b.until(func() bool { return b.g.InFlight.Load() == 0 })
		if log := b.log.String(); !strings.Contains(log, "finish="+c.finish+" prompt_tokens=20 cached_tokens=7 output_tokens=500") {
			t.Errorf("%.60s: %s", c.answer, log)
		}
	}
	// The answer of a server that reports no usage counts by its deltas.
	b := newRelayed(t, Options{LogRequests: true}, "s1")
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, start, delta+delta, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n")
	})
	b.post("/v1/messages", `{"model":"m","max_tokens":500,"messages":[],"stream":true}`)
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if !strings.Contains(b.log.String(), "output_tokens=2 ") {
		t.Error(b.log.String())
	}
}
