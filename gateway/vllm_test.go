package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// SageMaker's route serves chats and completions by the members of the body, and passes other forms
// to upstreams.
func TestInvocations(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for body, object := range map[string]string{
		`{` + hi + `,"max_tokens":3}`: "chat.completion", `{"prompt":"x","max_tokens":3}`: "text_completion",
		`{"prompt":null,` + hi + `,"max_tokens":3}`: "chat.completion",
	} {
		if r := b.post("/invocations", body); r.StatusCode != 200 || r.parse(t).Object != object {
			t.Errorf("%s: %d %s", body, r.StatusCode, r.body)
		}
	}
	if s := b.post("/invocations", `{`+hi+`,"stream":true}`).events(t); !s.done || s.text[0] != lore {
		t.Errorf("%+v", s)
	}
	for body, want := range map[string]string{`{}`: "neither messages", `{"input":"x"}`: "neither messages", `[]`: "must be a JSON object", ``: "not valid JSON", `{"prompt`: "not valid JSON"} {
		if r := b.post("/invocations", body); r.StatusCode != 400 || !strings.Contains(r.body, want) {
			t.Errorf("%s: %d %s", body, r.StatusCode, r.body)
		}
	}
	far := newRelayed(t, Options{}, "s1")
	if r := far.post("/invocations", ask(true, "x")); r.StatusCode != 200 || !far.post("/invocations", ask(true, "x")).events(t).done {
		t.Error(r.body)
	}
	far.post("/invocations", `{"model":"m","input":"x"}`)
	var paths []string
	for _, r := range far.far["s1"].requests() {
		paths = append(paths, r.path)
	}
	if !slices.Equal(paths, []string{chatPath, chatPath, "/invocations"}) {
		t.Errorf("%q", paths)
	}
}

// The tokenizer's configuration is there with the flag only, and has the template in use.
func TestTokenizerInfo(t *testing.T) {
	b := newBed(t, Options{TokenizerInfo: true, ChatTemplate: "mine"}, one(nodestest.Options{}))
	var info openai.TokenizerInfo
	r := b.do("GET", "/tokenizer_info", "")
	if err := json.Unmarshal([]byte(r.body), &info); err != nil || r.StatusCode != 200 {
		t.Fatal(r.StatusCode, r.body, err)
	}
	if info.Class == "" || info.MaxLen != 100000 || *info.Eos != "<|im_end|>" || info.Bos != nil || *info.Template != "mine" || info.Added["257"].Content != "<|im_end|>" || !info.Added["257"].Special {
		t.Errorf("%s", r.body)
	}
	if r := b.do("GET", "/tokenizer_info?model=gpt", ""); r.StatusCode != 404 {
		t.Error(r.StatusCode, r.body)
	}
	off := newBed(t, Options{}, one(nodestest.Options{}))
	if r := off.do("GET", "/tokenizer_info", ""); r.StatusCode != 404 || !strings.Contains(r.body, "--enable-tokenizer-info-endpoint") {
		t.Error(r.StatusCode, r.body)
	}
}

// A batch answers each conversation as a chat of its own would be answered.
func TestChatBatch(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	r := b.post(openai.BatchPath, `{"messages":[[{"role":"user","content":"a"}],[{"role":"system","content":"b"},{"role":"user","content":[{"type":"text","text":"c"}]}]],"max_tokens":4,"seed":5,"return_token_ids":true}`)
	a := r.parse(t)
	if r.StatusCode != 200 || a.Object != "chat.completion" || len(a.Choices) != 2 || a.Choices[1].Index != 1 || a.Choices[0].Message.Content != "Hell" || a.Usage.Completion != 8 {
		t.Fatal(r.StatusCode, r.body)
	}
	tok := b.g.native.Models.Load().Text
	var prompts []string
	for _, g := range b.nodes["d1"].Requests() {
		prompts = append(prompts, tok.Decode(g.Prompt, false))
	}
	slices.Sort(prompts)
	if want := []string{"<|im_start|>system\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"}; !slices.Equal(prompts, want) {
		t.Errorf("%q", prompts)
	}
	if n := len([]rune(strings.Join(prompts, ""))); a.Usage.Prompt >= n || a.Usage.Prompt == 0 {
		t.Errorf("%d prompt tokens of %d characters", a.Usage.Prompt, n)
	}
	for body, param := range map[string]string{
		`{"messages":[{"role":"user","content":"a"}]}`: "messages", `{"messages":[]}`: "messages", `{}`: "messages", `{"messages":[[]]}`: "messages[0]",
		`{"messages":[[{"role":"user","content":"a"}],[{"content":"b"}]]}`:                                                  "messages[1][0].role",
		`{"messages":[[{"role":"user","content":"a"}]],"stream":true}`:                                                      "stream",
		`{"messages":[[{"role":"user","content":"a"}]],"n":2}`:                                                              "n",
		`{"messages":[[{"role":"user","content":"a"}]],"temperature":"x"}`:                                                  "temperature",
		`{"messages":[[{"role":"user","content":"a"}]],"prompt_logprobs":1}`:                                                "prompt_logprobs",
		`{"messages":[[{"role":"user","content":"a"}]],` + weather + `}`:                                                    "tools",
		`{"messages":[[{"role":"user","content":"a"}]` + strings.Repeat(`,[{"role":"u","content":"b"}]`, 256) + `]}`:        "messages",
		`{"messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"` + strings.Repeat("b", 100_010) + `"}]]}`: "messages[1]", // beyond the context
		`{"messages":[[{"role":"user","content":"` + strings.Repeat("b", 100_010) + `"}],[{"role":"user","content":"a"}]]}`: "messages[0]",
	} {
		r := b.post(openai.BatchPath, body)
		if e := r.parse(t).Error; r.StatusCode != 400 || e.Param == nil || *e.Param != param {
			t.Errorf("%.80s: %d %s, want %s", body, r.StatusCode, r.body, param)
		}
	}
}

// aborted is the answer of /abort_requests.
type aborted struct {
	Status  string
	Aborted int
	IDs     []string `json:"request_ids"`
}

func (b *bed) abort(body string, headers ...string) (a aborted) {
	b.Helper()
	r := b.post("/abort_requests", body, headers...)
	if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.StatusCode != 200 || a.Status != "aborted" || a.Aborted != len(a.IDs) {
		b.Fatal(r.StatusCode, r.body, err)
	}
	return a
}

// Requests end by their ids with what they have, those of the client's own key; operators end all.
func TestAbortRequests(t *testing.T) {
	file := keyFile(t, "one\ntwo\nboss admin=yes\n")
	b := newBed(t, Options{APIKeyFile: file}, one(nodestest.Options{Token: ramble}))
	as := func(key string) string { return "Authorization: Bearer " + key }
	begin := func(id, key string, stream bool) *client {
		c := b.dial()
		c.send("POST", "/v1/completions", fmt.Sprintf(`{"prompt":"x","max_tokens":90000,"stream":%t,"n":2}`, stream), as(key), "X-Request-Id: "+id)
		b.until(func() bool {
			return slices.ContainsFunc(b.nodes["d1"].Requests(), func(g *nodepb.Generate) bool { return g.RequestId == id })
		})
		return c
	}
	streamed, whole, other, last := begin("r1", "one", true), begin("r2", "one", false), begin("r3", "two", true), begin("r4", "two", false)
	defer streamed.Close()
	defer whole.Close()
	defer other.Close()
	defer last.Close()
	if a := b.abort(`{"request_ids":["r1","r3","none"]}`, as("one")); !slices.Equal(a.IDs, []string{"r1"}) {
		t.Errorf("%+v", a)
	}
	if s := streamed.receive().events(t); !s.done || s.finish[0] != "abort" || s.finish[1] != "abort" {
		t.Errorf("%+v", s)
	}
	if a := b.abort(`{"request_ids":["cmpl-r2"]}`, as("one")); !slices.Equal(a.IDs, []string{"r2"}) {
		t.Errorf("%+v", a)
	}
	if r := whole.receive(); r.StatusCode != 200 || *r.parse(t).Choices[0].Finish != "abort" {
		t.Error(r.StatusCode, r.body)
	}
	for _, body := range []string{`{}`, `{"request_ids":[]}`, `{"request_ids":null}`} {
		if r := b.post("/abort_requests", body, as("one")); r.StatusCode != 403 || !strings.Contains(r.body, "request_ids") {
			t.Error(r.StatusCode, r.body)
		}
	}
	if a := b.abort(`{"request_ids":["r3"]}`, as("boss")); !slices.Equal(a.IDs, []string{"r3"}) {
		t.Errorf("%+v", a)
	}
	if s := other.receive().events(t); !s.done || s.finish[0] != "abort" {
		t.Errorf("%+v", s)
	}
	if a := b.abort(`{}`, as("boss")); !slices.Equal(a.IDs, []string{"r4"}) {
		t.Errorf("%+v", a)
	}
	if r := last.receive(); r.StatusCode != 200 || *r.parse(t).Choices[0].Finish != "abort" {
		t.Error(r.StatusCode, r.body)
	}
	for _, body := range []string{`{"request_ids":"r1"}`, `{"request_ids":[1]}`, `{"request_ids":[null]}`, `null`, `[]`, ``, `x`, `{"request_ids":[` + strings.Repeat(`"a",`, openai.MaxAborts) + `"a"]}`} {
		if r := b.post("/abort_requests", body, as("boss")); r.StatusCode != 400 {
			t.Errorf("%.30s: %d %s", body, r.StatusCode, r.body)
		}
	}
	if r := b.post("/abort_requests", `{}`); r.StatusCode != 401 {
		t.Error(r.StatusCode)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 && b.nodes["d1"].Running() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
}

// A request that waits for room, and one whose prompt's log-probabilities are not there, end with
// an error; another one without a token has an empty answer.
func TestAbortBeforeTokens(t *testing.T) {
	b, gate := crowd(t, Options{})
	defer close(gate)
	scored := b.dial()
	defer scored.Close()
	scored.send("POST", "/v1/completions", `{"prompt":"x","prompt_logprobs":1}`, "X-Request-Id: a")
	b.until(func() bool { return len(b.nodes["d1"].Requests()) == 1 })
	empty := b.ask("y", 0, "X-Request-Id: b")
	waits := b.ask("z", 0, "X-Request-Id: c")
	if n := b.g.Queue.Waiting(); n != 1 {
		t.Fatalf("%d requests wait", n)
	}
	if a := b.abort(`{}`); !slices.Equal(a.IDs, []string{"a", "b", "c"}) {
		t.Errorf("%+v", a)
	}
	for _, c := range []*client{scored, waits} {
		if r := c.receive(); r.StatusCode != 499 || !strings.Contains(r.body, "aborted by POST /abort_requests") {
			t.Error(r.StatusCode, r.body)
		}
	}
	if r := empty.receive(); r.StatusCode != 200 || *r.parse(t).Choices[0].Finish != "abort" {
		t.Error(r.StatusCode, r.body)
	}
}

// APIs whose answers cannot say that they were aborted end with an error in their own form.
func TestAbortOtherAPIs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{Token: ramble}))
	for path, c := range map[string]struct{ id, body, failed string }{
		"/v1/responses": {"resp_r", `{"input":"x","max_output_tokens":90000`, "event: response.failed\n"},
		"/v1/messages":  {"msg_r", `{"messages":[{"role":"user","content":"x"}],"max_tokens":90000`, "event: error\n"},
	} {
		for _, stream := range []bool{false, true} {
			client, before := b.dial(), len(b.nodes["d1"].Requests())
			defer client.Close()
			client.send("POST", path, fmt.Sprintf(`%s,"stream":%t}`, c.body, stream), "X-Request-Id: r")
			// The gateway may have paused it already, because the client reads nothing.
			b.until(func() bool { return len(b.nodes["d1"].Requests()) > before })
			if stream {
				b.until(func() bool { return b.g.native.Buffered.Load() > 0 })
			}
			if a := b.abort(`{"request_ids":["` + c.id + `"]}`); !slices.Equal(a.IDs, []string{"r"}) {
				t.Errorf("%s: %+v", path, a)
			}
			r := client.receive()
			if !strings.Contains(r.body, "aborted by POST /abort_requests") || stream && !strings.Contains(r.body, c.failed) && r.StatusCode == 200 || !stream && r.StatusCode != 499 {
				t.Errorf("%s, stream %t: %d %.2000s", path, stream, r.StatusCode, r.body)
			}
			b.until(func() bool { return b.g.InFlight.Load() == 0 && b.nodes["d1"].Running() == 0 })
		}
	}
}

// Requests of upstreams end, too, before their answer and within a stream.
func TestAbortRelayed(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.Header.Get("X-Request-Id"), "streamed") {
			w.Header().Set("Content-Type", "text/event-stream")
			event(w, chunkEvent("one "))
		}
		never(w, r)
	})
	var cs []*client
	for _, id := range []string{"streamed", "early"} {
		c := b.dial()
		defer c.Close()
		c.send("POST", chatPath, ask(true, id), "X-Request-Id: "+id)
		cs = append(cs, c)
	}
	if _, err := cs[0].r.Peek(1); err != nil {
		t.Fatal(err)
	}
	b.until(func() bool { return b.far["s1"].running.Load() == 2 })
	if a := b.abort(`{"request_ids":["early","streamed"]}`); !slices.Equal(a.IDs, []string{"early", "streamed"}) {
		t.Errorf("%+v", a)
	}
	if r := cs[1].receive(); r.StatusCode != 499 {
		t.Error(r.StatusCode, r.body)
	}
	if r := cs[0].receive(); r.err == nil || !strings.Contains(r.body, "one ") || !strings.Contains(r.body, "RequestAborted") {
		t.Error(r.err, r.body)
	}
	b.until(func() bool { return b.far["s1"].running.Load() == 0 })
}

// Stored responses are read, deleted, cancelled and continued at the server that made them, by the
// client that made them and by operators. For operators all servers are asked for an unknown one.
func TestStoredResponses(t *testing.T) {
	file := keyFile(t, "one\ntwo\nboss admin=yes\n")
	as := func(key string) string { return "Authorization: Bearer " + key }
	b := newRelayed(t, Options{APIKeyFile: file, Policy: "round_robin"}, "s1", "s2", "s3")
	for name, s := range b.far {
		s.does(func(w http.ResponseWriter, r *http.Request) {
			id := "resp_" + name
			switch {
			case r.Method == "POST" && r.URL.Path == "/v1/responses" && r.Header.Get("X-Stream") != "":
				w.Header().Set("Content-Type", "text/event-stream")
				event(w, "event: response.created\ndata: {\"response\":{\"tools\":[{\"id\":\"no\"}],\"id\":\""+id+"\"},\"type\":\"response.created\"}\n\n", "data: {\"id\":\"x\"}\n\n")
			case r.Method == "POST" && r.URL.Path == "/v1/responses":
				fmt.Fprintf(w, `{"output":[{"id":"msg"}],"id" : %q,"object":"response"}`, id)
			case strings.HasPrefix(r.URL.Path, "/v1/responses/"+id), strings.HasPrefix(r.URL.Path, "/v1/responses/old_"+name):
				fmt.Fprintf(w, `{"at":%q,"method":%q,"uri":%q}`, name, r.Method, r.URL.RequestURI())
			default:
				w.WriteHeader(404)
				fmt.Fprint(w, `{"error":{"message":"Response not found"}}`)
			}
		})
	}
	count := func() (n int) {
		for _, s := range b.far {
			n += len(s.requests())
		}
		return n
	}
	for i, headers := range [][]string{{as("one")}, {as("one"), "X-Stream: 1"}, {as("one")}} {
		if r := b.post("/v1/responses", `{"model":"m","input":"x","store":true}`, headers...); r.StatusCode != 200 || !strings.Contains(r.body, "resp_s") {
			t.Fatal(i, r.StatusCode, r.body)
		}
	}
	for _, name := range []string{"s1", "s2", "s3"} {
		id, before := "resp_"+name, count()
		for _, c := range []struct{ method, path string }{
			{"GET", "/v1/responses/" + id}, {"GET", "/v1/responses/" + id + "?stream=true"}, {"POST", "/v1/responses/" + id + "/cancel"},
			{"GET", "/v1/responses/" + id + "/input_items?limit=2"}, {"DELETE", "/v1/responses/" + id},
		} {
			want := fmt.Sprintf(`{"at":%q,"method":%q,"uri":%q}`, name, c.method, c.path)
			if r := b.do(c.method, c.path, "", as("one")); r.StatusCode != 200 || r.body != want {
				t.Errorf("%s %s: %d %s", c.method, c.path, r.StatusCode, r.body)
			}
		}
		if n := count() - before; n != 5 {
			t.Errorf("%d requests for 5", n)
		}
		if r := b.do("GET", "/v1/responses/"+id, "", as("two")); r.StatusCode != 404 || count()-before != 5 {
			t.Errorf("another client: %d %s", r.StatusCode, r.body)
		}
		if r := b.do("DELETE", "/v1/responses/"+id, "", as("boss")); r.StatusCode != 200 || count()-before != 6 {
			t.Errorf("an operator: %d %s", r.StatusCode, r.body)
		}
		if r := b.do("GET", "/v1/responses/old_"+name, "", as("two")); r.StatusCode != 200 || !strings.Contains(r.body, `"at":"`+name) {
			t.Errorf("%d %s", r.StatusCode, r.body)
		}
		before = count()
		for _, key := range []string{"two", "boss", "one"} { // who reads it does not own it
			if r := b.do("GET", "/v1/responses/old_"+name, "", as(key)); r.StatusCode != 200 {
				t.Errorf("%s: %d %s", key, r.StatusCode, r.body)
			}
		}
		if n := count() - before; n != 3 {
			t.Errorf("%d requests for 3", n)
		}
		for key, want := range map[string]int{"one": 200, "two": 404, "boss": 200} {
			r := b.post("/v1/responses", `{"model":"m","input":"x","previous_response_id":"resp\u005f`+name+`"}`, as(key))
			if r.StatusCode != want || want == 404 && *r.parse(t).Error.Param != "previous_response_id" {
				t.Errorf("%s continues the response: %d %s", key, r.StatusCode, r.body)
			}
		}
		if r := b.post("/v1/responses", `{"model":"m","input":"x","previous_response_id":"unknown"}`, as("two")); r.StatusCode != 200 {
			t.Errorf("an unknown response is continued: %d %s", r.StatusCode, r.body)
		}
	}
	for range b.far { // a client that chooses the id of another's response does not get it
		if r := b.post("/v1/responses", `{"model":"m","input":"x","store":true,"request_id":"resp_s1"}`, as("two")); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	for key, want := range map[string]int{"one": 200, "two": 404} {
		if r := b.do("GET", "/v1/responses/resp_s1", "", as(key)); r.StatusCode != want {
			t.Errorf("%s: %d %s, want %d", key, r.StatusCode, r.body, want)
		}
	}
	for _, key := range []string{"one", "boss"} {
		if r := b.do("GET", "/v1/responses/none", "", as(key)); r.StatusCode != 404 || !strings.Contains(r.body, `no upstream has the response \"none\"`) {
			t.Errorf("%s: %d %s", key, r.StatusCode, r.body)
		}
	}
	if r := b.do("GET", "/v1/responses/none", ""); r.StatusCode != 401 {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	b.far["s2"].kill()
	if r := b.do("GET", "/v1/responses/none", "", as("boss")); r.StatusCode != 503 || !strings.Contains(r.body, "cannot be asked") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if r := b.do("GET", "/v1/responses/resp_s2", "", as("one")); r.StatusCode != 503 {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	own := newBed(t, Options{}, one(nodestest.Options{}))
	if r := own.do("GET", "/v1/responses/resp_1", ""); r.StatusCode != 404 || !strings.Contains(r.body, "not stored here") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// An answer that is no success ends the search for a response only if no other server has the
// response. Of such answers a refusal precedes a server's failure. Without keys all servers are
// asked for every client.
func TestStoredResponsesAnswers(t *testing.T) {
	type answers map[string]int // statuses by server
	for _, c := range []struct {
		answers
		want string // the server whose answer the client gets
	}{
		{answers{"s1": 500, "s2": 200, "s3": 401}, "s2"},
		{answers{"s1": 404, "s2": 404, "s3": 400}, "s3"},
		{answers{"s1": 503, "s2": 404, "s3": 400}, "s3"},
		{answers{"s1": 400, "s2": 404, "s3": 500}, "s1"},
		{answers{"s1": 404, "s2": 500, "s3": 405}, "s2"},
		{answers{"s1": 400, "s2": 400, "s3": 200}, "s3"},
		{answers{"s1": 404, "s2": 404, "s3": 404}, ""},
	} {
		b := newRelayed(t, Options{}, "s1", "s2", "s3")
		for name, s := range b.far {
			s.does(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("X-At", name)
				w.WriteHeader(c.answers[name])
				fmt.Fprint(w, name)
			})
		}
		for _, method := range []string{"GET", "DELETE"} {
			r := b.do(method, "/v1/responses/resp_1", "")
			if c.want == "" && r.StatusCode != 404 || c.want != "" && (r.body != c.want || r.StatusCode != c.answers[c.want] || r.Header.Get("X-At") != c.want) {
				t.Errorf("%v, %s: %d %s", c.answers, method, r.StatusCode, r.body)
			}
		}
		b.until(func() bool { return b.g.InFlight.Load() == 0 })
	}
}
