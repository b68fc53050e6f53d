package openai

import (
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var endpointNames = map[string]Endpoint{"chat": Chat, "completions": Completions, "tokenize": Tokenize, "detokenize": Detokenize, "embeddings": Embeddings, "pooling": Pooling, "embed": Embed, "score": Scores, "rerank": Ranks}

// least is the smallest request of an endpoint, without its braces; fields may
// follow.
var least = map[Endpoint]string{Chat: hello, Completions: `"prompt":"a"`, Tokenize: hello, Detokenize: `"tokens":[1]`, Embeddings: `"input":"a"`, Pooling: `"input":"a"`, Embed: `"texts":["a"]`, Scores: `"text_1":"a","text_2":"b"`, Ranks: `"query":"a","documents":["b"]`}

// No field that clients know is missing, and none is made up.
func TestEveryFieldHasARow(t *testing.T) {
	data, err := os.ReadFile("testdata/fields.txt")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			want[line] = true
		}
	}
	for where, on := range endpointNames {
		n := 0
		for i := range table {
			if table[i].on&on == 0 {
				continue
			}
			n++
			line := where + " " + table[i].name
			if !want[line] {
				t.Errorf("%s: in the table, not in testdata/fields.txt", line)
			}
			delete(want, line)
		}
		if n != len(rows[on]) {
			t.Errorf("%s: %d rows, %d names: one has two rows", where, n, len(rows[on]))
		}
	}
	for line := range want {
		t.Errorf("%s: in testdata/fields.txt, not in the table", line)
	}
}

// each calls f for every row and endpoint.
func each(f func(f *field, on Endpoint, base string)) {
	for i := range table {
		for _, on := range endpoints {
			if table[i].on&on != 0 {
				f(&table[i], on, least[on])
			}
		}
	}
}

// values are of every type; most fields take some and refuse others.
var values = []string{`"some"`, `""`, "17", "0", "-3", "0.5", "1e300", "1e-300", "true", "false", "[9]", "[]", `["a"]`, `{"k":1}`, "{}", `{"3":1.5}`, `{"type":"text"}`,
	`["text"]`, "9223372036854775807", `"none"`, `"auto"`, `"medium"`, "1", "2", "[[1]]"}

// What is refused is refused by name with every value but the one that asks for
// nothing, and every field is taken when null. None is silently left out.
func TestRefusedFields(t *testing.T) {
	each(func(f *field, on Endpoint, base string) {
		if (f.class == Refused) && f.idle.values == nil != (f.idle.schema == nil) {
			t.Errorf("%s: neutral in code or schema alone", f.name)
		}
		if strings.Contains(base, `"`+f.name+`"`) {
			return // what is required cannot be null
		}
		if r, err := Parse(on, []byte(`{`+base+`,"`+f.name+`":null}`)); err != nil || len(r.Unknown) != 0 {
			t.Errorf("%s: null: %v", f.name, err)
		}
		if f.class != Refused {
			return
		}
		for _, value := range values {
			neutral := f.idle.is([]byte(value))
			r, err := Parse(on, []byte(`{`+base+`,"`+f.name+`":`+value+`}`))
			switch {
			case neutral && (err != nil || len(r.Unknown) != 0):
				t.Errorf("%s: %s asks for nothing: %v", f.name, value, err)
			case !neutral && (err == nil || err.Param != f.name || err.Status != 400 || !strings.HasPrefix(err.Message, f.name)):
				t.Errorf("%s: %s: %v", f.name, value, err)
			}
		}
	})
	for _, c := range []struct {
		on          Endpoint
		name, value string
	}{ // the neutral values themselves
		{Chat, "frequency_penalty", "0.0"}, {Chat, "repetition_penalty", "1"}, {Chat, "length_penalty", "1.0"}, {Chat, "min_p", "0"}, {Chat, "min_tokens", "0"},
		{Chat, "logit_bias", "{}"}, {Chat, "logprobs", "false"}, {Chat, "top_logprobs", "0"}, {Chat, "logprob_token_ids", "[]"}, {Chat, "bad_words", "[]"},
		{Chat, "use_beam_search", "false"}, {Completions, "best_of", "1"}, {Completions, "suffix", `""`}, {Chat, "response_format", `{"type":"text"}`},
		{Chat, "tool_choice", `"none"`}, {Chat, "function_call", `"none"`}, {Chat, "spaces_between_special_tokens", "true"}, {Chat, "vllm_xargs", "{}"},
		{Chat, "store", "false"}, {Chat, "service_tier", `"auto"`}, {Chat, "modalities", `["text"]`}, {Chat, "verbosity", `"medium"`}, {Chat, "stream_interval", "1"},
	} {
		if _, err := Parse(c.on, []byte(`{`+least[c.on]+`,"`+c.name+`":`+c.value+`}`)); err != nil {
			t.Errorf("%s: %s: %v", c.name, c.value, err)
		}
	}
}

// What is accepted without effect is checked for its type, has a reason, and
// leaves the request as it was.
func TestAcceptedFields(t *testing.T) {
	each(func(f *field, on Endpoint, base string) {
		if f.class != Accepted {
			return
		}
		if f.why == "" {
			t.Errorf("%s: no reason", f.name)
		}
		plain, fault := Parse(on, []byte(`{`+base+`}`))
		if fault != nil {
			t.Fatal(fault)
		}
		taken := 0
		for _, value := range values {
			r, err := Parse(on, []byte(`{`+base+`,"`+f.name+`":`+value+`}`))
			if err != nil {
				continue
			}
			taken++
			if !reflect.DeepEqual(r, plain) {
				t.Errorf("%s: %s changes the request", f.name, value)
			}
		}
		if taken == 0 || taken == len(values) {
			t.Errorf("%s: %d of %d values taken", f.name, taken, len(values))
		}
	})
}

// effects says for each served field where its effect is tested, besides that
// its value arrives in Request.
var effects = map[string]string{
	"model":                      "gateway TestErrors",
	"messages":                   "gateway TestChatTemplate",
	"prompt":                     "gateway TestWholeAnswers, TestTokenize",
	"tokens":                     "gateway TestTokenize",
	"max_tokens":                 "gateway TestWholeAnswers",
	"max_completion_tokens":      "gateway TestServedFields",
	"stop":                       "gateway TestWholeAnswers",
	"input":                      "gateway TestEmbeddings",
	"dimensions":                 "gateway TestEmbeddings",
	"encoding_format":            "gateway TestEmbeddings",
	"normalize":                  "gateway TestEmbeddings",
	"texts":                      "gateway TestEmbed",
	"input_type":                 "gateway TestEmbed",
	"output_dimension":           "gateway TestEmbed",
	"embedding_types":            "gateway TestEmbed",
	"truncate":                   "gateway TestEmbed",
	"text_1":                     "gateway TestScores",
	"text_2":                     "gateway TestScores",
	"data_1":                     "gateway TestScores",
	"data_2":                     "gateway TestScores",
	"queries":                    "gateway TestScores",
	"items":                      "gateway TestScores",
	"query":                      "gateway TestRanks",
	"top_n":                      "gateway TestRanks",
	"use_activation":             "gateway TestEmbeddings",
	"stop_token_ids":             "gateway TestWholeAnswers",
	"ignore_eos":                 "gateway TestDefaultsOfSampling",
	"include_stop_str_in_output": "gateway TestWholeAnswers",
	"n":                          "gateway TestManyChoices",
	"seed":                       "gateway TestManyChoices",
	"temperature":                "gateway TestManyChoices",
	"top_p":                      "gateway TestManyChoices",
	"top_k":                      "gateway TestManyChoices",
	"stream":                     "gateway TestStreamBytes",
	"stream_options":             "gateway TestStreamBytes",
	"echo":                       "gateway TestWholeAnswers, TestEchoWithLogProbs",
	"request_id":                 "gateway TestRequestIDs",
	"priority":                   "gateway TestDefaultsOfSampling",
	"cache_salt":                 "gateway TestDefaultsOfSampling",
	"add_special_tokens":         "gateway TestServedFields",
	"skip_special_tokens":        "gateway TestServedFields",
	"add_generation_prompt":      "gateway TestChatTemplate",
	"continue_final_message":     "gateway TestChatTemplate",
	"chat_template_kwargs":       "gateway TestServedFields",
	"return_token_strs":          "gateway TestTokenize",
	"min_tokens":                 "gateway TestControls",
	"min_p":                      "gateway TestControls",
	"frequency_penalty":          "gateway TestControls",
	"presence_penalty":           "gateway TestControls",
	"repetition_penalty":         "gateway TestControls",
	"logit_bias":                 "gateway TestControls",
	"response_format":            "gateway TestConstrainedRequests",
	"structured_outputs":         "gateway TestConstrainedRequests",
	"guided_json":                "gateway TestConstrainedRequests",
	"guided_regex":               "gateway TestConstrainedRequests",
	"guided_choice":              "gateway TestConstrainedRequests",
	"guided_grammar":             "gateway TestConstrainedRequests",
	"allowed_token_ids":          "gateway TestControls",
	"bad_words":                  "gateway TestControls",
	"logprobs":                   "gateway TestLogProbs",
	"top_logprobs":               "gateway TestLogProbs",
	"prompt_logprobs":            "gateway TestPromptLogProbs",
	"logprob_token_ids":          "gateway TestNamedLogProbs",
	"return_tokens_as_token_ids": "gateway TestNamedLogProbs",
	"return_token_ids":           "gateway TestTokenIDs",
	"return_prompt_text":         "gateway TestTokenIDs",
	"stream_interval":            "gateway TestStreamInterval",
	"truncate_prompt_tokens":     "gateway TestTruncation",
	"truncation_side":            "gateway TestTruncation",
	"documents":                  "gateway TestTemplateVariables",
	"reasoning_effort":           "gateway TestTemplateVariables",
	"chat_template":              "gateway TestRequestTemplate",
	"tools":                      "gateway TestTools, TestForcedCallsRefused",
	"tool_choice":                "gateway TestTools, TestForcedCalls",
	"parallel_tool_calls":        "gateway TestTools, TestForcedCalls",
	"include_reasoning":          "gateway TestReasoning",
	"thinking_token_budget":      "gateway TestThinkingBudget",
}

// A served field has a test of its effect, which is there and names the field.
func TestServedFieldsHaveEffectTests(t *testing.T) {
	var tests strings.Builder
	files, err := os.ReadDir("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasSuffix(f.Name(), "_test.go") {
			b, err := os.ReadFile("../../" + f.Name())
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(b)
		}
	}
	served := map[string]bool{}
	for i := range table {
		f := &table[i]
		if f.class != Served {
			continue
		}
		served[f.name] = true
		where := effects[f.name]
		if where == "" {
			if _, extra := extras[f.name]; !extra { // its own test is where it is served
				t.Errorf("%s is served: say in effects which test shows it", f.name)
			}
			continue
		}
		for _, name := range strings.Split(strings.TrimPrefix(where, "gateway "), ", ") {
			_, body, found := strings.Cut(tests.String(), "\nfunc "+name+"(")
			body, _, _ = strings.Cut(body, "\n}\n")
			if !found || f.name != "prompt" && f.name != "stream" && f.name != "messages" && !strings.Contains(body, `"`+f.name+`"`) && !strings.Contains(body, "/"+f.name) {
				t.Errorf("%s: %s is not there, or does not name it", f.name, name)
			}
		}
	}
	for name := range effects {
		if !served[name] {
			t.Errorf("effects names %s, which is not served", name)
		}
	}
}

// turnOn serves a field for the time of a test.
func turnOn(t *testing.T, names ...string) {
	for i := range table {
		if f := &table[i]; slices.Contains(names, f.name) {
			was := f.class
			f.class = Served
			t.Cleanup(func() { f.class = was })
		}
	}
}

func ptr[T any](v T) *T { return &v }

// extras are the fields that change logits or tell about them: their values are
// parsed and checked whether they are served or not.
var extras = map[string][]struct {
	on    Endpoint
	value string
	says  string // of the refusal; empty: taken, and then
	get   func(r *Request) any
	want  any
}{
	"min_tokens": {
		{Chat, "5", "", func(r *Request) any { return r.MinTokens }, 5},
		{Chat, "-1", "at least 0", nil, nil},
		{Chat, "2.5", "an integer", nil, nil},
	},
	"min_p": {
		{Chat, "0.25", "", func(r *Request) any { return r.MinP }, ptr(float32(0.25))},
		{Chat, "1.5", "between 0 and 1", nil, nil},
		{Chat, `"x"`, "a number", nil, nil},
	},
	"frequency_penalty": {
		{Completions, "-2", "", func(r *Request) any { return r.FrequencyPenalty }, float32(-2)},
		{Chat, "2.1", "between -2 and 2", nil, nil},
	},
	"presence_penalty": {
		{Completions, "1.5", "", func(r *Request) any { return r.PresencePenalty }, float32(1.5)},
		{Chat, "-2.1", "between -2 and 2", nil, nil},
	},
	"repetition_penalty": {
		{Chat, "1.25", "", func(r *Request) any { return r.RepetitionPenalty }, ptr(float32(1.25))},
		{Chat, "0", "above 0", nil, nil},
		{Chat, "-1", "above 0", nil, nil},
	},
	"logit_bias": {
		{Chat, `{"12":-100,"3":1.5,"12":7}`, "", func(r *Request) any { return r.LogitBias }, []Bias{{3, 1.5}, {12, 7}}},
		{Chat, `{"12":101}`, "of token 12 must be between -100 and 100", nil, nil},
		{Chat, `{"12":"1"}`, "of token 12 must be a number", nil, nil},
		{Chat, `{"012":1}`, `not "012"`, nil, nil},
		{Chat, `{"-1":1}`, `not "-1"`, nil, nil},
		{Chat, `{"hello":1}`, `not "hello"`, nil, nil},
		{Chat, `[1]`, "an object", nil, nil},
	},
	"allowed_token_ids": {
		{Chat, "[4,2]", "", func(r *Request) any { return r.AllowedTokens }, []int32{4, 2}},
		{Chat, "[]", "empty", nil, nil},
		{Chat, "[-1]", "a token id", nil, nil},
	},
	"bad_words": {
		{Chat, `["a","bé"]`, "", func(r *Request) any { return r.BadWords }, []string{"a", "bé"}},
		{Chat, `["a",""]`, "[1] must have 1", nil, nil},
		{Chat, `"a"`, "a list of strings", nil, nil},
	},
	"logprobs": {
		{Chat, "true", "", func(r *Request) any { return []any{r.Logprobs, r.TopLogprobs} }, []any{true, 0}},
		{Completions, "3", "", func(r *Request) any { return []any{r.Logprobs, r.TopLogprobs} }, []any{true, 3}},
		{Completions, "257", "at most 256", nil, nil},
		{Completions, "-1", "at least 0", nil, nil},
		{Chat, "1", "true or false", nil, nil},
	},
	"top_logprobs": {
		{Chat, "0", "", func(r *Request) any { return r.TopLogprobs }, 0},
		{Chat, "1.5", "an integer", nil, nil},
		{Chat, "-2", "at least 0", nil, nil},
		{Chat, "1", "needs logprobs", nil, nil},
		{Chat, `1,"logprobs":true`, "", func(r *Request) any { return r.TopLogprobs }, 1},
	},
	"prompt_logprobs": {
		{Chat, "2", "", func(r *Request) any { return r.PromptLogprobs }, ptr(2)},
		{Chat, "-2", "at least 0", nil, nil},
		{Chat, `1,"stream":true`, "cannot be streamed", nil, nil},
	},
	"logprob_token_ids": {
		{Chat, `[1],"logprobs":true`, "", func(r *Request) any { return r.LogprobTokens }, []int32{1}},
		{Chat, "[1]", "needs logprobs", nil, nil},
		{Chat, `[1],"logprobs":true,"use_beam_search":true`, "exclude each other", nil, nil},
	},
}

func TestValuesOfExtras(t *testing.T) {
	for name, cases := range extras {
		turnOn(t, name, "logprobs", "use_beam_search")
		for _, c := range cases {
			r, err := Parse(c.on, []byte(`{`+least[c.on]+`,"`+name+`":`+c.value+`}`))
			switch {
			case c.says == "" && err != nil:
				t.Errorf("%s: %s: %v", name, c.value, err)
			case c.says == "" && !reflect.DeepEqual(c.get(r), c.want):
				t.Errorf("%s: %s: %v, want %v", name, c.value, c.get(r), c.want)
			case c.says != "" && (err == nil || err.Param != name || !strings.Contains(err.Message, c.says)):
				t.Errorf("%s: %s: %v, want %q", name, c.value, err, c.says)
			}
		}
	}
	turnOn(t, "min_tokens")
	if _, err := Parse(Chat, []byte(`{`+hello+`,"min_tokens":6,"max_tokens":5}`)); err == nil || err.Param != "min_tokens" || !strings.Contains(err.Message, "above max_tokens") {
		t.Errorf("%v", err)
	}
}

func TestTokenizeRequests(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":""}`:                  "",
		`{` + hello + `}`:                "",
		`{"prompt":null,` + hello + `}`:  "",
		`{}`:                             "prompt",
		`{"prompt":"a",` + hello + `}`:   "prompt",
		`{"prompt":["a"]}`:               "prompt",
		`{"prompt":"a","tools":[{}]}`:    "tools[0].type",
		`{"prompt":"a","model":3}`:       "model",
		`{"prompt":"a","max_tokens":-1}`: "", // no field of this endpoint
	} {
		if _, err := Parse(Tokenize, []byte(body)); (err == nil) != (want == "") || err != nil && err.Param != want {
			t.Errorf("%s: %v, want param %q", body, err, want)
		}
	}
	for body, want := range map[string]string{`{"tokens":[]}`: "", `{"tokens":[1,2]}`: "", `{}`: "tokens", `{"tokens":"a"}`: "tokens", `{"tokens":[-1]}`: "tokens"} {
		if _, err := Parse(Detokenize, []byte(body)); (err == nil) != (want == "") || err != nil && err.Param != want {
			t.Errorf("%s: %v, want param %q", body, err, want)
		}
	}
}

// Numbers too small for a float32 keep their meaning.
func TestSmallNumbers(t *testing.T) {
	r, err := Parse(Chat, []byte(`{`+hello+`,"top_p":1e-300,"temperature":1e-300}`))
	if err != nil || *r.TopP <= 0 || *r.Temperature != 0 {
		t.Fatalf("%v %+v", err, r)
	}
}

func TestReasoningContentIsReasoning(t *testing.T) {
	r, err := Parse(Chat, []byte(`{"messages":[{"role":"assistant","reasoning_content":"so"},{"role":"assistant","reasoning_content":"so","reasoning":"but"}]}`))
	want := `[{"role":"assistant","reasoning_content":"so","reasoning":"so"},{"role":"assistant","reasoning_content":"so","reasoning":"but"}]`
	if err != nil || string(r.Messages) != want || !json.Valid(r.Messages) {
		t.Fatalf("%v %s", err, r.Messages)
	}
}
