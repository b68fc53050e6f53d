package gateway

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const chatOfHi = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

// The routes between text and tokens agree with what a completion is given.
func TestTokenize(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	tok := b.g.native.Models.Load().Text.Tokenizer()
	for body, want := range map[string]string{
		`{"prompt":"hé 😀\u0000"}`: "hé 😀\x00",
		`{"prompt":""}`:           "",
		`{"prompt":"<|im_start|>a","add_special_tokens":false}`: "<|im_start|>a",
		`{` + hi + `}`: chatOfHi,
		`{` + hi + `,"add_generation_prompt":false,"model":"tiny"}`:                                                                 "<|im_start|>user\nhi<|im_end|>\n",
		`{"messages":[{"role":"a","content":[{"type":"text","text":"b"}]}],"add_generation_prompt":false,"return_token_strs":true}`: "<|im_start|>a\nb<|im_end|>\n",
	} {
		r := b.post("/tokenize", body)
		var got struct {
			Count  int
			Max    int `json:"max_model_len"`
			Tokens []int32
			Strs   []string `json:"token_strs"`
		}
		if err := json.Unmarshal([]byte(r.body), &got); err != nil || r.StatusCode != 200 {
			t.Fatalf("%s: %d %q %v", body, r.StatusCode, r.body, err)
		}
		if text := tok.Decode(got.Tokens, false); text != want || got.Count != len(got.Tokens) || got.Max != 100000 || got.Tokens == nil {
			t.Errorf("%s: %q and %+v, want %q", body, text, got, want)
		}
		if asked := strings.Contains(body, `"return_token_strs":true`); asked != (got.Strs != nil) || asked && len(got.Strs) != got.Count {
			t.Errorf("%s: %q", body, got.Strs)
		}
		for i, s := range got.Strs {
			if id, ok := tok.ID(s); !ok || id != got.Tokens[i] {
				t.Errorf("%s: token %d is called %q", body, got.Tokens[i], s)
			}
		}
		ids, err := json.Marshal(got.Tokens)
		if err != nil {
			t.Fatal(err)
		}
		back := b.post("/detokenize", `{"tokens":`+string(ids)+`}`)
		var text struct{ Prompt string }
		if err := json.Unmarshal([]byte(back.body), &text); err != nil || text.Prompt != want {
			t.Errorf("%s: came back as %q", body, back.body)
		}
	}
	if n := len(b.nodes["d1"].Requests()); n != 0 {
		t.Errorf("%d requests reached the node", n)
	}
	// What is counted is what a completion gets.
	b.post("/v1/chat/completions", `{`+hi+`}`)
	if got := tok.Decode(lastRequest(b, "d1").Prompt, false); got != chatOfHi {
		t.Errorf("the chat was %q", got)
	}
	for _, c := range []struct {
		path, body string
		status     int
		param      string
	}{
		{"/tokenize", `{}`, 400, "prompt"},
		{"/tokenize", `{"prompt":["a"]}`, 400, "prompt"},
		{"/tokenize", `{"prompt":"a","tools":[{}]}`, 400, "tools[0].type"},
		{"/tokenize", `{"messages":[{"role":"user"}]}`, 400, "messages"},
		{"/tokenize", `{"prompt":"a","model":"gpt"}`, 404, "model"},
		{"/detokenize", `{"tokens":[258]}`, 400, "tokens"},
		{"/detokenize", `{"tokens":["a"]}`, 400, "tokens"},
		{"/detokenize", `{"tokens":[1],"model":"gpt"}`, 404, "model"},
	} {
		r := b.post(c.path, c.body)
		if e := r.parse(t).Error; r.StatusCode != c.status || e == nil || e.Param == nil || *e.Param != c.param {
			t.Errorf("%s %s: %d %s", c.path, c.body, r.StatusCode, r.body)
		}
	}
}

// A model without a tokenizer says so, and one request too many is refused.
func TestTokenizeLimits(t *testing.T) {
	bare := bundle()
	bare.TokenizerJson = nil
	b := newBed(t, Options{Limits: Limits{MaxInFlight: 1}}, one(nodestest.Options{Bundle: bare}))
	for path, body := range map[string]string{"/tokenize": `{"prompt":"a"}`, "/detokenize": `{"tokens":[1]}`} {
		if r := b.post(path, body); r.StatusCode != 400 || !strings.Contains(r.body, "no tokenizer") {
			t.Errorf("%s: %d %s", path, r.StatusCode, r.body)
		}
		b.g.InFlight.Add(1)
		if r := b.post(path, body); r.StatusCode != 503 || r.Header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s", path, r.StatusCode, r.body)
		}
		if r := b.do("GET", "/load", ""); r.body != `{"server_load":1}` {
			t.Errorf("%q", r.body)
		}
		b.g.InFlight.Add(-1)
	}
}

// Served fields that no other test here shows the effect of.
func TestServedFields(t *testing.T) {
	hidden := func(r *nodepb.Generate, p int) int32 { return []int32{'a', 256, 'b', eosID}[min(p-len(r.Prompt), 3)] }
	bos := strings.Replace(chatML, "{% for", "{{ greeting }}{% for", 1)
	bu := bundle()
	bu.ChatTemplate = bos
	bu.TokenizerJson = []byte(strings.Replace(string(tokenizerJSON()), `"post_processor":null`, `"post_processor":{"type":"TemplateProcessing",
		"single":[{"SpecialToken":{"id":"<|im_start|>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],
		"special_tokens":{"<|im_start|>":{"id":"<|im_start|>","ids":[256],"tokens":["<|im_start|>"]}}}`, 1))
	b := newBed(t, Options{}, one(nodestest.Options{Bundle: bu, Token: hidden}))
	tok := b.g.native.Models.Load().Text.Tokenizer()
	for _, c := range []struct{ path, body, prompt, text string }{
		{"/v1/completions", `{"prompt":"x"}`, "<|im_start|>x", "ab"},
		{"/v1/completions", `{"prompt":"x","add_special_tokens":false}`, "x", "ab"},
		{"/v1/completions", `{"prompt":"x","skip_special_tokens":false}`, "<|im_start|>x", "a<|im_start|>b"},
		{"/v1/completions", `{"prompt":"x","max_tokens":1}`, "<|im_start|>x", "a"},
		{"/v1/chat/completions", `{` + hi + `}`, chatOfHi, "ab"},
		{"/v1/chat/completions", `{` + hi + `,"add_special_tokens":true}`, "<|im_start|>" + chatOfHi, "ab"},
		{"/v1/chat/completions", `{` + hi + `,"chat_template_kwargs":{"greeting":"Hey "}}`, "Hey " + chatOfHi, "ab"},
		{"/v1/chat/completions", `{` + hi + `,"max_completion_tokens":1,"max_tokens":2}`, chatOfHi, "a"},
	} {
		a := b.post(c.path, c.body).parse(t)
		if a.Error != nil || len(a.Choices) != 1 {
			t.Fatalf("%s: %+v", c.body, a)
		}
		text := a.Choices[0].Text + a.Choices[0].Message.Content
		if prompt := tok.Decode(lastRequest(b, "d1").Prompt, false); prompt != c.prompt || text != c.text {
			t.Errorf("%s: %q after %q, want %q after %q", c.body, text, prompt, c.text, c.prompt)
		}
	}
}

// Methods, media types and what is open without a key.
func TestHTTPSurface(t *testing.T) {
	b := newBed(t, Options{APIKeys: []string{"k"}, Version: "9"}, one(nodestest.Options{}))
	const key = "Authorization: Bearer k"
	for _, c := range []struct {
		method, path, body, header string
		status                     int
		allow                      string
	}{
		{"OPTIONS", "/v1/completions", "", key, 204, "POST, OPTIONS"},
		{"OPTIONS", "/v1/completions", "", "X-A: b", 401, ""},
		{"OPTIONS", "/ping", "", "X-A: b", 204, "GET, HEAD, POST, OPTIONS"},
		{"OPTIONS", "/nothing", "", key, 404, ""},
		{"HEAD", "/v1/models", "", key, 200, ""},
		{"HEAD", "/v1/models/tiny", "", key, 200, ""},
		{"HEAD", "/v1/models/gpt", "", key, 404, ""},
		{"POST", "/v1/models/tiny", "", key, 405, "GET, HEAD, OPTIONS"},
		{"GET", "/v1/models/", "", key, 200, ""},
		{"GET", "/tokenize", "", key, 405, "POST, OPTIONS"},
		{"HEAD", "/tokenize", "", key, 405, "POST, OPTIONS"},
		{"POST", "/ping", "", "X-A: b", 200, ""},
		{"POST", "/tokenize", `{"prompt":"a"}`, "X-A: b", 401, ""},
		{"POST", "/detokenize", `{"tokens":[1]}`, "X-A: b", 401, ""},
		{"GET", "/debug/nodes", "", "X-A: b", 401, ""},
		{"GET", "/openapi.json", "", key, 200, ""},
		{"GET", "/load", "", key, 200, ""},
		{"POST", "/tokenize", `{"prompt":"a"}`, key, 200, ""},
		{"POST", "/tokenize", `{"prompt":"a"}`, key + "\r\nContent-Type: Application/JSON; charset=utf-8", 200, ""},
		{"POST", "/tokenize", `{"prompt":"a"}`, key + "\r\nContent-Encoding: identity", 200, ""},
		{"POST", "/tokenize", `{"prompt":"a"}`, key + "\r\nContent-Encoding: gzip", 415, ""},
		{"POST", "/v1/completions", `{"prompt":"a"}`, key + "\r\nContent-Type: text/plain", 415, ""},
		{"POST", "/v1/chat/completions", `{` + hi + `}`, key + "\r\nContent-Type: application/x-www-form-urlencoded", 415, ""},
	} {
		conn := b.dial()
		conn.send(c.method, c.path, c.body, c.header, "Connection: close")
		head := conn.response(c.method)
		if head.StatusCode != c.status || head.Header.Get("Allow") != c.allow || head.Header.Get("X-Request-Id") == "" {
			t.Errorf("%s %s %q: %d %v, want %d %q", c.method, c.path, c.header, head.StatusCode, head.Header, c.status, c.allow)
		}
		if c.status >= 400 && c.method != "HEAD" {
			if e := head.parse(t).Error; e == nil || e.Code != float64(c.status) {
				t.Errorf("%s %s: %s", c.method, c.path, head.body)
			}
		}
		conn.Close()
	}
}

// The document tells of every route and every field, and of nothing else.
func TestDocument(t *testing.T) {
	b := newBed(t, Options{Version: "9", TokenizerInfo: true}, one(nodestest.Options{}))
	r := b.do("GET", "/openapi.json", "")
	var doc struct {
		OpenAPI string
		Info    struct{ Title, Version string }
		Paths   map[string]map[string]struct {
			RequestBody struct {
				Content map[string]struct{ Schema map[string]any }
			}
			Responses map[string]any
		}
		Components struct {
			Schemas map[string]struct{ Properties map[string]any }
		}
	}
	if err := json.Unmarshal([]byte(r.body), &doc); err != nil || r.StatusCode != 200 || r.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %s", r.StatusCode, err, r.body)
	}
	if doc.OpenAPI != "3.1.0" || doc.Info.Version != "9" {
		t.Errorf("%+v", doc.Info)
	}
	n := 0
	for path, methods := range doc.Paths {
		for method, op := range methods {
			n++
			probe := strings.NewReplacer("{model}", "tiny", "{node}", "d1").Replace(path)
			if method == "post" {
				probe = strings.Replace(probe, "{response}", "resp_1/cancel", 1)
			}
			if r := b.do(strings.ToUpper(method), probe, ""); r.StatusCode == 404 && !strings.Contains(r.body, "answers are not stored here") && !strings.Contains(r.body, "has no planner") || r.StatusCode == 405 || op.Responses["200"] == nil {
				t.Errorf("%s %s: %d", method, path, r.StatusCode)
			}
			ref, _ := op.RequestBody.Content["application/json"].Schema["$ref"].(string)
			if _, there := doc.Components.Schemas[strings.TrimPrefix(ref, "#/components/schemas/")]; ref != "" && !there {
				t.Errorf("%s %s: %s is missing", method, path, ref)
			}
		}
	}
	if n != len(routes) {
		t.Errorf("%d operations, %d routes", n, len(routes))
	}
	for name, on := range map[string]openai.Endpoint{"ChatRequest": openai.Chat, "CompletionRequest": openai.Completions, "TokenizeRequest": openai.Tokenize, "DetokenizeRequest": openai.Detokenize} {
		// A field that the document does not tell of is one that Parse does not know.
		for field := range doc.Components.Schemas[name].Properties {
			if r, fault := openai.Parse(on, []byte(`{"`+field+`":{}}`)); fault == nil && len(r.Unknown) > 0 {
				t.Errorf("%s.%s is unknown", name, field)
			}
		}
		if len(doc.Components.Schemas[name].Properties) < 2 {
			t.Errorf("%s has no fields", name)
		}
	}
}
