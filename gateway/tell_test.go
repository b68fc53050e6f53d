package gateway

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// extra is what of an answer or event tells about its prompt and tokens.
type extra struct {
	promptTold
	Choices []struct {
		promptTold
		Index    int
		Text     string
		Delta    struct{ Content string }
		Message  struct{ Content string }
		TokenIDs []int `json:"token_ids"`
		Logprobs *struct {
			Offsets []int                `json:"text_offset"`
			Values  []*float64           `json:"token_logprobs"`
			Tokens  []string             `json:"tokens"`
			Tops    []map[string]float64 `json:"top_logprobs"`
			Content []struct {
				Token string
				Top   []struct{ Token string } `json:"top_logprobs"`
			}
		}
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

type promptTold struct {
	Probs []map[string]struct {
		Logprob float64
		Rank    int
		Text    string `json:"decoded_token"`
	} `json:"prompt_logprobs"`
	IDs  []int   `json:"prompt_token_ids"`
	Text *string `json:"prompt_text"`
}

func extras(t *testing.T, r reply) (all []extra) {
	t.Helper()
	texts := []string{r.body}
	if strings.HasPrefix(r.body, "data: ") {
		texts = strings.Split(strings.TrimSuffix(strings.TrimSpace(r.body), "data: [DONE]"), "\n\n")
	}
	for _, text := range texts {
		if text = strings.TrimPrefix(strings.TrimSpace(text), "data: "); text == "" {
			continue
		}
		var e extra
		if err := json.Unmarshal([]byte(text), &e); err != nil || r.StatusCode != 200 {
			t.Fatalf("%d %s: %v", r.StatusCode, text, err)
		}
		all = append(all, e)
	}
	return all
}

// A prompt's log-probabilities come as a list with an entry for each token, null
// for the first, once for a chat and for each prompt of completions; one attempt
// computes them for all choices, and none asks for KV from elsewhere.
func TestPromptLogProbs(t *testing.T) {
	b := newBed(t, Options{Members: []nodes.Member{decodeMember("d1"), {ID: "p", Role: "prefill", RPC: "p", Fingerprint: 7, Class: "test", Ready: true}},
		MinRemotePrefillTokens: 1}, one(nodestest.Options{}))
	check := func(what string, p promptTold, prompt string, best int) {
		t.Helper()
		if len(p.Probs) != len(prompt) || p.Probs[0] != nil {
			t.Fatalf("%s: %d entries for %q, the first is %v", what, len(p.Probs), prompt, p.Probs)
		}
		for i := 1; i < len(prompt); i++ {
			own := p.Probs[i][fmt.Sprint(prompt[i])]
			if own.Logprob != -float64(i) || own.Rank != i || own.Text != prompt[i:i+1] || len(p.Probs[i]) != max(1, best) {
				t.Fatalf("%s: token %d: %+v", what, i, p.Probs[i])
			}
			if next := p.Probs[i][fmt.Sprint(prompt[i]+1)]; best > 1 && (next.Logprob != -float64(i)-0.5 || next.Rank != 2) {
				t.Fatalf("%s: token %d: %+v", what, i, p.Probs[i])
			}
		}
	}
	a := extras(t, b.post("/v1/completions", `{"prompt":["abcde","fg","h"],"max_tokens":2,"prompt_logprobs":2,"n":2}`))[0]
	for i, c := range a.Choices {
		check(fmt.Sprint("choice ", i), c.promptTold, []string{"abcde", "fg", "h"}[i/2], 2)
	}
	if len(a.Choices) != 6 || a.Probs != nil || a.Usage.Prompt != 8 || a.Usage.Completion != 12 {
		t.Errorf("%+v", a)
	}
	asked := 0
	for _, r := range b.nodes["d1"].Requests() {
		if r.PromptLogprobs != nil {
			asked++
			if len(r.Prefill) != 0 {
				t.Errorf("KV is to come from %v", r.Prefill)
			}
		}
	}
	if asked != 3 {
		t.Errorf("%d attempts were asked for a prompt's log-probabilities, there are 3 prompts", asked)
	}
	a = extras(t, b.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"prompt_logprobs":0,"return_prompt_text":true}`))[0]
	if a.Text == nil || len(a.Probs) != a.Usage.Prompt || len(a.Probs[1]) != 1 || a.Choices[0].Probs != nil {
		t.Errorf("chat: %+v", a)
	}
	if a := extras(t, b.post("/v1/completions", `{"prompt":"abc","max_tokens":1}`))[0]; a.Probs != nil || a.Choices[0].Probs != nil {
		t.Errorf("not asked for: %+v", a)
	}
}

// What an answer can hold of a prompt is bounded, over prompts and choices.
func TestPromptLogProbsAreBounded(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	long := strings.Repeat("x", 20_000)
	for fields, want := range map[string]int{
		`"prompt":"` + long + `","prompt_logprobs":20`:                                      200,
		`"prompt":["` + long + `","` + long + `","` + long + `"],"prompt_logprobs":20`:      400,
		`"prompt":["` + long + `","` + long + `","` + long + `"],"prompt_logprobs":0`:       200,
		`"prompt":"` + long + `","prompt_logprobs":20,"n":3`:                                400,
		`"prompt":"` + long + `","echo":true,"logprobs":20,"prompt_logprobs":20,"n":2`:      400,
		`"prompt":"` + long + `","prompt_logprobs":20,"n":128,"truncate_prompt_tokens":300`: 200,
	} {
		if r := b.post("/v1/completions", `{"max_tokens":1,`+fields+`}`); r.StatusCode != want || want == 400 && !strings.Contains(r.body, "1048576") {
			t.Errorf("%.40s…%s: %d %.300s", fields, fields[max(0, len(fields)-60):], r.StatusCode, r.body)
		}
	}
}

// How many best tokens may be asked for is the gateway's to say.
func TestMaxLogprobs(t *testing.T) {
	for most, o := range map[int]Options{20: {}, 100: {Limits: Limits{MaxLogprobs: 100}}} {
		b := newBed(t, o, one(nodestest.Options{}))
		for path, fields := range map[string][]string{
			"/v1/chat/completions": {`"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":`, `"messages":[{"role":"user","content":"x"}],"prompt_logprobs":`},
			"/v1/completions":      {`"prompt":"x","logprobs":`, `"prompt":"x","prompt_logprobs":`},
		} {
			for _, f := range fields {
				for n, want := range map[int]int{most: 200, most + 1: 400} {
					r := b.post(path, fmt.Sprintf(`{"max_tokens":1,%s%d}`, f, n))
					name := f[strings.LastIndex(f, ",")+2 : len(f)-2]
					if r.StatusCode != want || want == 400 && (!strings.Contains(r.body, "--max-logprobs") || !strings.Contains(r.body, `"param":"`+name+`"`)) {
						t.Errorf("at most %d: %s %d: %d %s", most, f, n, r.StatusCode, r.body)
					}
				}
			}
		}
	}
}

// A node that leaves a prompt's log-probabilities out, or garbles them, is not
// believed: another one is asked.
func TestPromptLogProbsAreWhole(t *testing.T) {
	tell := nodestest.Options{}
	for name, change := range map[string]func(*nodepb.PromptLogProbs) *nodepb.PromptLogProbs{
		"missing": func(*nodepb.PromptLogProbs) *nodepb.PromptLogProbs { return nil },
		"the second half is missing": func(m *nodepb.PromptLogProbs) *nodepb.PromptLogProbs {
			if m.First > 1 {
				return nil
			}
			return m
		},
		"out of order": func(m *nodepb.PromptLogProbs) *nodepb.PromptLogProbs {
			m.First++
			return m
		},
		"ranks": func(m *nodepb.PromptLogProbs) *nodepb.PromptLogProbs {
			m.Ranks = nil
			return m
		},
		"too many": func(m *nodepb.PromptLogProbs) *nodepb.PromptLogProbs {
			m.Logprobs, m.Ranks = make([]float32, 50), make([]uint32, 50)
			m.TopTokens, m.TopLogprobs = nil, nil
			return m
		},
	} {
		t.Run(name, func(t *testing.T) {
			liar := tell
			liar.Score = change
			b := newBed(t, Options{}, map[string]nodestest.Options{"d1": liar, "d2": tell})
			for range 4 { // wherever the first goes
				a := extras(t, b.post("/v1/completions", `{"prompt":"abcde","max_tokens":2,"prompt_logprobs":0}`))[0]
				if len(a.Choices[0].Probs) != 5 || a.Choices[0].Probs[4]["101"].Logprob != -4 {
					t.Fatalf("%+v", a)
				}
			}
		})
	}
}

// With echo, the prompt's tokens stand before the answer's in every list, whole
// and streamed; with max_tokens 0 they stand alone.
func TestEchoWithLogProbs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for _, c := range []struct {
		fields, text string
		completion   int
	}{
		{`"max_tokens":2`, "abcHe", 2},
		{`"max_tokens":0`, "abc", 0},
		{`"max_tokens":2,"n":2`, "abcHe", 4},
	} {
		for _, stream := range []bool{false, true} {
			body := fmt.Sprintf(`{"prompt":"abc","echo":true,"logprobs":1,%s,"stream":%v`, c.fields, stream)
			if stream {
				body += `,"stream_options":{"include_usage":true}`
			}
			type told struct {
				text, tokens string
				offsets      []int
				values       []*float64
				tops         []map[string]float64
			}
			got, usage := map[int]*told{}, 0
			for _, e := range extras(t, b.post("/v1/completions", body+"}")) {
				usage += e.Usage.Completion
				for _, ch := range e.Choices {
					g := got[ch.Index]
					if g == nil {
						g = &told{}
						got[ch.Index] = g
					}
					g.text += ch.Text
					if p := ch.Logprobs; p != nil {
						g.tokens += strings.Join(p.Tokens, "")
						g.offsets, g.values, g.tops = append(g.offsets, p.Offsets...), append(g.values, p.Values...), append(g.tops, p.Tops...)
					}
				}
			}
			if usage != c.completion {
				t.Errorf("%s: %d tokens of completion", body, usage)
			}
			for i, g := range got {
				offsets := []int{0, 1, 2, 3, 4}[:len(c.text)]
				if g.text != c.text || g.tokens != c.text || !slices.Equal(g.offsets, offsets) || len(g.values) != len(offsets) ||
					g.values[0] != nil || g.tops[0] != nil || *g.values[2] != -2 || g.tops[2]["c"] != -2 {
					t.Errorf("%s: choice %d: %+v", body, i, g)
				}
			}
		}
	}
	a := extras(t, b.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"So: "}],"echo":true,
		"add_generation_prompt":false,"max_tokens":2}`))[0]
	if a.Choices[0].Message.Content != "So: He" {
		t.Errorf("chat: %q", a.Choices[0].Message.Content)
	}
	a = extras(t, b.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"echo":true,"max_tokens":2}`))[0]
	if a.Choices[0].Message.Content != "He" {
		t.Errorf("chat: %q", a.Choices[0].Message.Content)
	}
}

func TestNamedLogProbs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	a := extras(t, b.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"logprobs":true,"top_logprobs":5,"logprob_token_ids":[66,65]}`))[0]
	if p := a.Choices[0].Logprobs.Content; len(p) != 1 || p[0].Token != "H" || len(p[0].Top) != 2 || p[0].Top[0].Token != "B" || p[0].Top[1].Token != "A" {
		t.Errorf("%+v", p)
	}
	if r := b.post("/v1/completions", `{"prompt":"x","logprobs":0,"logprob_token_ids":[258]}`); r.StatusCode != 400 || !strings.Contains(r.body, `"logprob_token_ids"`) {
		t.Errorf("beyond the vocabulary: %d %s", r.StatusCode, r.body)
	}
	a = extras(t, b.post("/v1/completions", `{"prompt":"x","max_tokens":2,"logprobs":1,"return_tokens_as_token_ids":true}`))[0]
	if p := a.Choices[0].Logprobs; !slices.Equal(p.Tokens, []string{"token_id:72", "token_id:101"}) || !slices.Equal(p.Offsets, []int{0, 1}) || p.Tops[0]["token_id:72"] != -0.5 {
		t.Errorf("%+v", p)
	}
}

func TestTokenIDs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	chat := `{"messages":[{"role":"user","content":"x"}],"max_tokens":3,"n":2`
	a := extras(t, b.post("/v1/chat/completions", chat+`,"return_token_ids":true,"return_prompt_text":true}`))[0]
	if len(a.IDs) != a.Usage.Prompt || a.IDs[0] != 256 || !slices.Equal(a.Choices[1].TokenIDs, []int{'H', 'e', 'l'}) || a.Choices[0].IDs != nil ||
		!strings.HasPrefix(*a.Text, "<|im_start|>user\nx") {
		t.Errorf("chat: %+v", a)
	}
	a = extras(t, b.post("/v1/completions", `{"prompt":[97,98],"max_tokens":3,"return_token_ids":true,"return_prompt_text":true}`))[0]
	if c := a.Choices[0]; !slices.Equal(c.IDs, []int{97, 98}) || !slices.Equal(c.TokenIDs, []int{'H', 'e', 'l'}) || c.Text != "Hel" || *c.promptTold.Text != "ab" {
		t.Errorf("completions: %+v", c)
	}
	for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
		body := chat
		if path == "/v1/completions" {
			body = `{"prompt":"ab","max_tokens":3,"n":2`
		}
		ids, prompts := map[int][]int{}, 0
		for _, e := range extras(t, b.post(path, body+`,"stream":true,"return_token_ids":true,"stop":["lx"]}`)) {
			for _, c := range e.Choices {
				ids[c.Index] = append(ids[c.Index], c.TokenIDs...)
				if c.IDs != nil {
					prompts++
				}
			}
			if e.IDs != nil {
				prompts++
			}
		}
		if want := []int{'H', 'e', 'l'}; prompts != 2 || !reflect.DeepEqual(ids, map[int][]int{0: want, 1: want}) {
			t.Errorf("%s: streamed: %v, %d prompts", path, ids, prompts)
		}
	}
}

// The first token comes at once, then so many at a time, and what is left at the end.
func TestStreamInterval(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	var texts []string
	for _, e := range extras(t, b.post("/v1/completions", `{"prompt":"x","max_tokens":12,"stream":true,"stream_interval":4,"logprobs":0}`)) {
		texts = append(texts, e.Choices[0].Text)
		if n := len(e.Choices[0].Logprobs.Tokens); n < 1 || n > 4 {
			t.Errorf("%d log-probabilities", n)
		}
	}
	if !slices.Equal(texts, []string{"H", "ello", ", w", "örl"}) { // ö has two tokens
		t.Errorf("%q", texts)
	}
}

func TestTruncation(t *testing.T) {
	small := bundle()
	small.MaxModelLen = 20
	b := newBed(t, Options{}, one(nodestest.Options{Bundle: small}))
	long := "abcdefghijklmnopqrstuvwxyz"
	for fields, want := range map[string]string{
		`"truncate_prompt_tokens":5`:                                               "vwxyz",
		`"truncate_prompt_tokens":5,"truncation_side":"left"`:                      "vwxyz",
		`"truncate_prompt_tokens":5,"truncation_side":"right"`:                     "abcde",
		`"truncate_prompt_tokens":-1,"max_tokens":4`:                               long[26-16:],
		`"truncate_prompt_tokens":-1,"max_tokens":4,"truncation_side":"right"`:     long[:16],
		`"truncate_prompt_tokens":5,"max_tokens":1,"echo":true`:                    "vwxyz",
		`"truncate_prompt_tokens":15,"max_tokens":1,"echo":true,"cache_salt":"xy"`: long[11:],
	} {
		r := b.post("/v1/completions", `{"prompt":"`+long+`",`+fields+`}`)
		if r.StatusCode != 200 {
			t.Fatalf("%s: %d %s", fields, r.StatusCode, r.body)
		}
		var ids []byte
		for _, id := range lastRequest(b, "d1").Prompt {
			ids = append(ids, byte(id))
		}
		if string(ids) != want {
			t.Errorf("%s: the node got %q, want %q", fields, ids, want)
		}
		if a := r.parse(t); strings.Contains(fields, "echo") && a.Choices[0].Text != want+"H" {
			t.Errorf("%s: %q", fields, a.Choices[0].Text)
		}
	}
}

func TestTemplateVariables(t *testing.T) {
	with := proto.CloneOf(bundle())
	with.ChatTemplate = `{{ messages[0].content }}|{{ reasoning_effort }}|{% for d in documents %}{{ d.title }};{% endfor %}`
	b := newBed(t, Options{}, one(nodestest.Options{Bundle: with}))
	a := extras(t, b.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"return_prompt_text":true,
		"reasoning_effort":"low","documents":[{"title":"a"},{"title":"b"}]}`))[0]
	if a.Text == nil || *a.Text != "x|low|a;b;" {
		t.Errorf("%+v", a)
	}
}
