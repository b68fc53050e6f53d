package gateway

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// tokensAnswer is what of an answer, or an event of one, tests look at.
type tokensAnswer struct {
	ID      string `json:"request_id"`
	Choices []struct {
		Index    int
		Tokens   []int32 `json:"token_ids"`
		Finish   *string `json:"finish_reason"`
		Logprobs *struct{ Content []struct{ Logprob float64 } }
	}
	Prompt []map[string]any `json:"prompt_logprobs"`
	Usage  *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

// Tokens go in and come out, whole and streamed, with what vLLM tells beside them.
func TestTokensInAndOut(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	want := []int32{'H', 'e', 'l', 'l'}
	r := b.post(openai.TokensPath, `{"request_id":"r-1","token_ids":[5,6,7],"sampling_params":{"max_tokens":4,"n":2,"logprobs":1,"temperature":0,"detokenize":false},"features":null}`)
	var a tokensAnswer
	if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.StatusCode != 200 {
		t.Fatal(r.StatusCode, r.body, err)
	}
	if a.ID != "r-1" || len(a.Choices) != 2 || a.Usage.Prompt != 3 || a.Usage.Completion != 8 {
		t.Fatal(r.body)
	}
	for i, c := range a.Choices {
		if c.Index != i || !slices.Equal(c.Tokens, want) || *c.Finish != "length" || len(c.Logprobs.Content) != 4 {
			t.Errorf("%s", r.body)
		}
	}
	if got := lastRequest(b, "d1"); !slices.Equal(got.Prompt, []int32{5, 6, 7}) || got.Sampling.Temperature != 0 {
		t.Errorf("the node got %v", got)
	}
	r = b.post(openai.TokensPath, `{"token_ids":[5,6,7],"stream":true,"stream_options":{"include_usage":true},"sampling_params":{"max_tokens":4}}`)
	var got []int32
	usage, finish := 0, ""
	for event := range strings.SplitSeq(r.body, "\n\n") {
		data, _ := strings.CutPrefix(event, "data: ")
		var a tokensAnswer
		if data == "" || data == "[DONE]" {
			continue
		}
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			t.Fatal(event, err)
		}
		if a.Usage != nil {
			usage += a.Usage.Completion
		}
		for _, c := range a.Choices {
			if got = append(got, c.Tokens...); c.Finish != nil {
				finish = *c.Finish
			}
		}
	}
	if r.err != nil || !slices.Equal(got, want) || usage != 4 || finish != "length" || !strings.HasSuffix(r.body, "[DONE]\n\n") {
		t.Fatal(r.body)
	}
	for body, says := range map[string]string{
		`{"sampling_params":{}}`:                                 "token_ids",
		`{"token_ids":[]}`:                                       "token_ids",
		`{"token_ids":"text"}`:                                   "token_ids",
		`{"token_ids":[1.5]}`:                                    "token_ids: [0] must be a token id",
		`{"token_ids":[1,9999]}`:                                 "outside the vocabulary",
		`{"token_ids":[1],"max_tokens":3}`:                       "must be in sampling_params",
		`{"token_ids":[1],"features":{}}`:                        "not served here",
		`{"token_ids":[1],"sampling_params":{"temperature":-1}}`: "temperature",
		`{"token_ids":[1],"sampling_params":{"prompt":"x"}}`:     "sampling_params",
		`{"token_ids":[1],"sampling_params":3}`:                  "must be an object",
		`{"token_ids":[1]`:                                       "JSON",
		`[1]`:                                                    "object",
	} {
		b.post(openai.TokensPath, body).wantError(t, 400, says)
	}
	if r := b.post(openai.TokensPath, `{"token_ids":[1],"model":"none"}`); r.StatusCode != 404 {
		t.Error(r.StatusCode, r.body)
	}
}

// For a model of upstreams such a request goes on as it is, counted by its tokens.
func TestTokensRelayed(t *testing.T) {
	b := newRelayed(t, Options{Limits: Limits{MaxPromptTokens: 3}}, "s1")
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"request_id":"x","choices":[]}`)
	})
	body := `{"model":"m","token_ids":[1,2,3],"sampling_params":{"max_tokens":1}}`
	if r := b.post(openai.TokensPath, body); r.StatusCode != 200 || b.far["s1"].requests()[0].body != body {
		t.Fatal(r.StatusCode, r.body)
	}
	b.post(openai.TokensPath, `{"model":"m","token_ids":[1],"sampling_params":{"n":200}}`).wantError(t, 400, "n is 200")
	b.post(openai.TokensPath, `{"model":"m","token_ids":[1],"sampling_params":{"logprobs":21}}`).wantError(t, 400, "logprobs")
	b.post(openai.TokensPath, `{"model":"m","token_ids":[1,2,3,4]}`).wantError(t, 400, "4 tokens")
}
