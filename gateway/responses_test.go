package gateway

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/api/responses"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const flatWeather = `"tools":[{"type":"function","name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}]`

// response is what tests read of a response object.
type response struct {
	ID, Status, Model string
	Store             *bool
	Created           int64 `json:"created_at"`
	Output            []struct {
		Type, ID, Status, Name, Arguments string
		CallID                            string  `json:"call_id"`
		Sealed                            *string `json:"encrypted_content"`
		Content                           []struct {
			Type, Text string
			Logprobs   []struct{ Token string }
		}
	}
	Usage struct {
		Input   int `json:"input_tokens"`
		Output  int `json:"output_tokens"`
		Details struct {
			Reasoning int `json:"reasoning_tokens"`
		} `json:"output_tokens_details"`
	}
	Incomplete *struct{ Reason string } `json:"incomplete_details"`
	Error      *struct{ Code, Message string }
}

func (r response) String() string {
	out := r.Status
	for _, i := range r.Output {
		text := i.Name + "(" + i.Arguments + ")"
		if i.Type != "function_call" {
			text = fmt.Sprintf("%q", i.Content[0].Text)
		}
		out += " " + i.Type + " " + i.Status + " " + text
	}
	return out
}

// responseOf returns the response object of an answer, of a stream that of its last event.
func responseOf(t *testing.T, r reply) (a response) {
	t.Helper()
	if r.StatusCode != 200 {
		t.Fatalf("%d %v %s", r.StatusCode, r.err, r.body)
	}
	body := r.body
	if strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
		if !strings.HasPrefix(body, "event: response.created\n") || strings.Contains(body, "[DONE]") {
			t.Fatal(body)
		}
		_, body, _ = strings.Cut(body[strings.LastIndex(body, "\ndata: "):], `"response":`)
		body = strings.TrimSuffix(body, "}\n\n")
	}
	if err := json.Unmarshal([]byte(body), &a); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	return a
}

// bothWays returns a request as it is, and streamed.
func bothWays(body string) []string {
	return []string{body, strings.TrimSuffix(body, "}") + `,"stream":true}`}
}

func TestResponses(t *testing.T) {
	const answer = `reasoning completed "Hm, \"stop\"." message completed "I look.\n" function_call completed weather({"city": "Oslo stop"}) function_call completed time({})`
	b := toolBed(t, Options{}, calls, hermesMarkers...)
	for fields, want := range map[string]string{
		flatWeather:                              "completed " + answer,
		flatWeather + `,"seed":7,"store":false`:  "completed " + answer,
		flatWeather + `,"stop":"look"`:           `completed reasoning completed "Hm, \"stop\"." message completed "I "`,
		flatWeather + `,"max_output_tokens":12`:  `incomplete reasoning incomplete "Hm, \"stop\""`,
		flatWeather + `,"max_output_tokens":100`: `incomplete reasoning completed "Hm, \"stop\"." message completed "I look.\n" function_call incomplete weather({"city": "Oslo stop"})`,
	} {
		for _, body := range bothWays(`{"input":"hi",` + fields + `}`) {
			got := responseOf(t, b.post(responses.Path, body, "X-Request-Id: r1"))
			if strings.Contains(want, "incomplete function_call") || strings.HasSuffix(fields, "100") {
				want = "" // where a call is cut depends on its markers
				if got.Status != "incomplete" || got.Output[len(got.Output)-1].Status != "incomplete" {
					t.Errorf("%s: %v", body, got)
				}
			}
			if want != "" && got.String() != want {
				t.Errorf("%s:\n got %v\nwant %s", body, got, want)
			}
			if got.ID != "resp_r1" || got.Model != "tiny" || got.Store == nil || *got.Store || got.Usage.Input == 0 || got.Usage.Output == 0 || got.Usage.Details.Reasoning == 0 || (got.Incomplete == nil) != (got.Status == "completed") {
				t.Errorf("%s: %+v", body, got)
			}
		}
	}
	// The second turn: the client sends the items back, and the results.
	const turn = `{"instructions":"i","input":[{"role":"user","content":"hi"},{"type":"reasoning","id":"rs_1","summary":[]},{"type":"function_call","id":"fc_1","call_id":"a","name":"weather","arguments":"{\"city\": \"Ålesund\"}"},{"type":"function_call_output","call_id":"a","output":"rain"}],` + flatWeather + `,"seed":7}`
	responseOf(t, b.post(responses.Path, turn))
	if text := promptOf(t, b); !strings.Contains(text, "<|im_start|>system\ni<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"+
		"<|im_start|>assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ålesund\"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>") {
		t.Errorf("%s", text)
	}
	for body, param := range map[string]string{
		`{"input":"a","store":true}`:                                        "store",
		`{"input":"a","max_output_tokens":200000}`:                          "max_output_tokens",
		`{"input":"a","metadata":{"a":"` + strings.Repeat("b", 513) + `"}}`: "metadata.a",
		`{"input":"a","user":"` + strings.Repeat("b", 513) + `"}`:           "user",
		`{"input":"a","logprobs":true}`:                                     "logprobs",
		`{"input":"a","model":"x"}`:                                         "model",
		`{"input":"a","text":{"format":{"type":"json_schema","name":"n"}}}`: "text.format.schema",
		`{"input":"a","text":{"format":{"type":"json_schema","name":"n","schema":{"anyOf":[true],"unevaluatedItems":false}}}}`: "text.format.schema",
		`{"input":[{"role":"user","content":[{"type":"input_file"}]}]}`:                                                        "input[0].content[0].type",
		`{"input":"` + strings.Repeat("a ", 100000) + `"}`:                                                                     "input",
	} {
		if r := b.post(responses.Path, body); r.StatusCode != 400 && r.StatusCode != 404 || *r.parse(t).Error.Param != param {
			t.Errorf("%.100s: %d %s", body, r.StatusCode, r.body)
		}
	}
	if b.post(responses.Path, `{"input":"a","zeta":1,"reasoning":{"eta":1}}`); !strings.Contains(b.log.String(), "field=zeta") || !strings.Contains(b.log.String(), "field=reasoning.eta") {
		t.Errorf("unknown fields are not logged: %s", b.log.String())
	}
	got := responseOf(t, b.post(responses.Path, `{"input":"a","include":["message.output_text.logprobs"],`+flatWeather+`}`))
	written := ""
	for _, p := range got.Output[1].Content[0].Logprobs {
		written += p.Token
	}
	if written != "I look.\n" {
		t.Errorf("log-probabilities of %q", written)
	}
}

// promptOf returns the text of the last prompt.
func promptOf(t *testing.T, b *bed) string {
	tok, err := tokenizer.Load(toolBundle(hermesMarkers...).TokenizerJson)
	if err != nil {
		t.Fatal(err)
	}
	return tok.Decode(lastRequest(b, "d1").Prompt, false)
}

// Reasoning that a client only has in encrypted form returns to the model, if it is the same model's
// and the same key's. Otherwise it is dropped with a line in the log.
func TestEncryptedReasoning(t *testing.T) {
	bundle := toolBundle(hermesMarkers...)
	bundle.ChatTemplate = strings.Replace(hermes, "{{ m.content or '' }}", "{{ m.reasoning_content or '' }}|{{ m.content or '' }}", 1)
	node := one(nodestest.Options{Bundle: bundle, Token: writes(t, bundle, calls)})
	keys := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, []byte("k1 name=a\nk2 name=b\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "response-keys")
	if err := os.WriteFile(file, []byte("# new, old\n"+strings.Repeat("n", 32)+"\n"+strings.Repeat("o", 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	first := newBed(t, Options{APIKeyFile: keys, ResponseSecret: []byte(strings.Repeat("o", 32))}, node)
	same := newBed(t, Options{APIKeyFile: keys, ResponseKeyFile: file}, node)
	other := newBed(t, Options{APIKeyFile: keys}, node)
	a := responseOf(t, first.post(responses.Path, `{"input":"hi","include":["reasoning.encrypted_content"]}`, "Authorization: Bearer k1"))
	if a.Output[0].Sealed == nil {
		t.Fatal(a)
	}
	next := `{"input":[{"role":"user","content":"hi"},{"type":"reasoning","id":"rs_1","summary":[],"encrypted_content":"` + *a.Output[0].Sealed + `"},{"role":"assistant","content":"t"},{"role":"user","content":"more"}]}`
	for _, c := range []struct {
		name, key string
		b         *bed
		opens     bool
	}{
		{"same gateway", "k1", first, true}, {"another gateway", "k1", same, true}, {"another key", "k2", same, false}, {"another secret", "k1", other, false},
	} {
		responseOf(t, c.b.post(responses.Path, next, "Authorization: Bearer "+c.key))
		text := promptOf(t, c.b)
		if strings.Contains(text, "assistant\nHm, \"stop\".|t<|im_end|>") != c.opens || strings.Contains(text, "assistant\n|t<|im_end|>") == c.opens {
			t.Errorf("%s: %s", c.name, text)
		}
		if logged := strings.Contains(c.b.log.String(), `msg="encrypted reasoning dropped"`); logged == c.opens || strings.Contains(c.b.log.String(), "Hm,") {
			t.Errorf("%s: %s", c.name, c.b.log.String())
		}
	}
	for _, text := range []string{"", "short\n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		o := Options{ResponseKeyFile: file}
		o.RPC.Hello = &nodepb.Hello{NodeId: "gw"}
		if _, err := New(o); err == nil || CheckResponseKeys(&o) == nil || strings.Contains(err.Error(), "short") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

var createdAt = regexp.MustCompile(`"created_at":\d+`)

// The events of a stream whose nodes are lost are those of an undisturbed one, ids included.
func TestResponsesResume(t *testing.T) {
	bundle := toolBundle(hermesMarkers...)
	token := writes(t, bundle, calls)
	whole := newBed(t, Options{}, one(nodestest.Options{Bundle: bundle, Token: token}))
	lossy := newBed(t, Options{}, map[string]nodestest.Options{
		"d1": {Bundle: bundle, Token: token, CutAfter: 9}, "d2": {Bundle: bundle, Token: token, CutAfter: 40}, "d3": {Bundle: bundle, Token: token},
	})
	for _, body := range bothWays(`{"input":"hi",` + flatWeather + `,"seed":5,"top_logprobs":1}`) {
		want, got := whole.post(responses.Path, body, "X-Request-Id: r1"), lossy.post(responses.Path, body, "X-Request-Id: r1")
		responseOf(t, want)
		responseOf(t, got)
		if g, w := createdAt.ReplaceAllString(got.body, ""), createdAt.ReplaceAllString(want.body, ""); g != w {
			t.Errorf("%s:\n got %s\nwant %s", body, g, w)
		}
	}
}

// A stream that no node continues ends in response.failed, and its body is complete.
func TestResponsesFailed(t *testing.T) {
	b := newBed(t, Options{Limits: Limits{ResumeTimeout: 10 * time.Millisecond}}, one(nodestest.Options{CutAfter: 5, CutCode: nodepb.Code_CODE_INTERNAL, Refuse: func(r *nodepb.Generate) (nodepb.Code, string) {
		if len(r.Output) > 0 {
			return nodepb.Code_CODE_OVERLOADED, "full"
		}
		return 0, ""
	}}))
	r := b.post(responses.Path, `{"input":"hi","stream":true}`)
	a := responseOf(t, r)
	if r.err != nil || a.Status != "failed" || a.Error == nil || a.Error.Code != "server_error" || a.String() != `failed message incomplete "Hello"` || !strings.Contains(r.body, "event: response.output_item.done\n") {
		t.Errorf("%v %v %s", r.err, a, r.body)
	}
}
