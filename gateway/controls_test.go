package gateway

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// What changes logits reaches the node as it was asked for, and what the
// vocabulary does not have is refused.
func TestControls(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	asked := func(fields string) *nodepb.Sampling {
		t.Helper()
		if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":6,"seed":1,"temperature":0,`+fields+`}`); r.StatusCode != 200 {
			t.Fatalf("%s: %d %s", fields, r.StatusCode, r.body)
		}
		all := b.nodes["d1"].Requests()
		return all[len(all)-1].Sampling
	}
	for fields, want := range map[string]*nodepb.Sampling{
		`"min_p":0.25`:                      {MinP: 0.25},
		`"min_tokens":3`:                    {MinTokens: 3},
		`"frequency_penalty":-1.5`:          {FrequencyPenalty: -1.5},
		`"presence_penalty":2`:              {PresencePenalty: 2},
		`"repetition_penalty":1.25`:         {RepetitionPenalty: 1.25},
		`"logit_bias":{"7":-100,"3":1.5}`:   {LogitBias: []*nodepb.LogitBias{{Token: 3, Value: 1.5}, {Token: 7, Value: -100}}},
		`"allowed_token_ids":[72,101]`:      {AllowedTokenIds: []int32{72, 101}},
		`"bad_words":["He"]`:                {BadWords: []*nodepb.TokenSequence{{Tokens: []int32{'H', 'e'}}}},
		`"min_p":0,"presence_penalty":null`: {},
	} {
		want.Seed, want.TopP = 1, 1
		if got := asked(fields); !proto.Equal(got, want) {
			t.Errorf("%s: the node got %v, want %v", fields, got, want)
		}
	}
	for fields, param := range map[string]string{
		`"logit_bias":{"258":1}`:    "logit_bias",
		`"allowed_token_ids":[300]`: "allowed_token_ids",
	} {
		r := b.post("/v1/completions", `{"prompt":"x",`+fields+`}`)
		if a := r.parse(t); r.StatusCode != 400 || a.Error.Param == nil || *a.Error.Param != param || !strings.Contains(a.Error.Message, "258") {
			t.Errorf("%s: %d %s", fields, r.StatusCode, r.body)
		}
	}
	// No stop string ends what has fewer than min_tokens tokens.
	for fields, want := range map[string]string{`"stop":["l"]`: "He", `"stop":["l"],"min_tokens":3`: "Hel"} {
		if a := b.post("/v1/completions", `{"prompt":"x","max_tokens":6,`+fields+`}`).parse(t); a.Choices[0].Text != want {
			t.Errorf("%s: %q, want %q", fields, a.Choices[0].Text, want)
		}
	}
}

// probAnswer is what of a response or event tells log-probabilities.
type probAnswer struct {
	Choices []struct {
		Text     string
		Delta    struct{ Content string }
		Logprobs *struct {
			Content []struct {
				Token   string
				Logprob float64
				Bytes   []byte `json:"-"`
				RawByte []int  `json:"bytes"`
				Top     []struct {
					Token   string
					Logprob float64
				} `json:"top_logprobs"`
			}
			Offsets []int                `json:"text_offset"`
			Values  []float64            `json:"token_logprobs"`
			Tokens  []string             `json:"tokens"`
			Tops    []map[string]float64 `json:"top_logprobs"`
		}
	}
}

// Each token comes with its log-probability and the best ones, whole and
// streamed, in both forms; and without being asked for there are none.
func TestLogProbs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	parse := func(body string) (a probAnswer) {
		t.Helper()
		if err := json.Unmarshal([]byte(body), &a); err != nil {
			t.Fatalf("%v in %s", err, body)
		}
		return a
	}
	chat := `{"messages":[{"role":"user","content":"x"}],"max_tokens":3`
	a := parse(b.post("/v1/chat/completions", chat+`,"logprobs":true,"top_logprobs":2}`).body)
	if p := a.Choices[0].Logprobs; p == nil || len(p.Content) != 3 || p.Content[0].Token != "H" || p.Content[0].Logprob != -0.5 ||
		!reflect.DeepEqual(p.Content[0].RawByte, []int{'H'}) || len(p.Content[0].Top) != 2 || p.Content[0].Top[1].Token != "I" || p.Content[0].Top[1].Logprob != -1.5 {
		t.Errorf("chat: %+v", p)
	}
	a = parse(b.post("/v1/completions", `{"prompt":"x","max_tokens":3,"logprobs":2}`).body)
	if p := a.Choices[0].Logprobs; p == nil || !reflect.DeepEqual(p.Tokens, []string{"H", "e", "l"}) || !reflect.DeepEqual(p.Offsets, []int{0, 1, 2}) ||
		!reflect.DeepEqual(p.Values, []float64{-0.5, -0.5, -0.5}) || !reflect.DeepEqual(p.Tops[1], map[string]float64{"e": -0.5, "f": -1.5}) {
		t.Errorf("completions: %+v", p)
	}
	if a := parse(b.post("/v1/chat/completions", chat+`}`).body); a.Choices[0].Logprobs != nil {
		t.Errorf("not asked for: %+v", a.Choices[0].Logprobs)
	}
	// Streamed, held-back text brings the log-probabilities of all its tokens.
	r := b.post("/v1/chat/completions", chat+`,"logprobs":true,"stream":true,"stop":["elx"]}`)
	tokens, text := "", ""
	for line := range strings.SplitSeq(r.body, "\n") {
		data, ok := strings.CutPrefix(line, "data: {")
		if !ok {
			continue
		}
		for _, c := range parse("{" + data).Choices {
			text += c.Delta.Content
			if c.Logprobs != nil {
				for _, p := range c.Logprobs.Content {
					tokens += p.Token
				}
			}
		}
	}
	if tokens != "Hel" || text != "Hel" {
		t.Errorf("streamed: log-probabilities of %q beside the text %q", tokens, text)
	}
}
