package upstream

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestParseEnvelope(t *testing.T) {
	for body, want := range map[string]Envelope{
		`{"model":"a","stream":true,"messages":[{"role":"user","content":"x \" ] } \\"}]}`: {Model: "a", Stream: true, N: 1, Prompt: []byte(`[{"role":"user","content":"x \" ] } \\"}]`)},
		" {\n\"prompt\" : \"p\" , \"model\" :\"a\\u0062\", \"n\":12 } \n":                  {Model: "ab", N: 12, Prompt: []byte(`"p"`)},
		`{"mod\u0065l":"x","model":"y"}`:                                                   {Model: "y", N: 1},
		`{"model":"y","mod\u0065l":"x"}`:                                                   {Model: "x", N: 1},
		`{"model":null,"n":1e2}`:                                                           {N: 100},
		`{"n":2,"n":2000}`:                                                                 {N: 2000},
		`{"n":2.0}`:                                                                        {N: 2},
		`{"n":2,"n":null}`:                                                                 {N: 1},
		`{"n":1e99}`:                                                                       {N: maxChoices},
		`{"n":"3"}`:                                                                        {N: 3},
		`{"n":" 4\u0030 "}`:                                                                {N: 40},
		`{"n":"many"}`:                                                                     {N: 1},
		`{"echo":true,"prompt_logprobs":null}`:                                             {N: 1, Whole: true},
		`{"prompt_logprobs":1,"echo":false}`:                                               {N: 1, Whole: true},
		`{"echo":true,"echo":false}`:                                                       {N: 1},
		`{}`:                                                                               {N: 1},
	} {
		got, err := ParseEnvelope([]byte(body))
		if err != nil || got.Model != want.Model || got.Stream != want.Stream || got.N != want.N || got.Whole != want.Whole || string(got.Prompt) != string(want.Prompt) {
			t.Errorf("%s: %+v %v", body, got, err)
		}
	}
	for _, body := range []string{``, `[]`, `{`, `{"a"`, `{"a":`, `{"a":}`, `{"a":1`, `{"a":"`, `{"a":"\"}`, `{"a":[1}`, `{a:1}`, `{"a":1}x`, `{"a" 1}`} {
		if got, err := ParseEnvelope([]byte(body)); err == nil {
			t.Errorf("%s: %+v", body, got)
		}
	}
}

func TestWithModel(t *testing.T) {
	const body = `{ "messages":[1, 2], "model" : "old", "x":{"model":"old"} }`
	o, err := ParseEnvelope([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	if got := string(o.WithModel(nil, []byte(body), `n"ew`)); got != strings.Replace(body, `"old"`, `"n\"ew"`, 1) {
		t.Fatal(got)
	}
}

// Whatever is JSON is understood as encoding/json understands it; nothing makes
// the scanner fall.
func FuzzEnvelope(f *testing.F) {
	for _, s := range []string{`{"model":"a","stream":true,"messages":[{"a":"\\\""}],"n":2}`, `{"a":[[{}]],"mod\u0065l":"b"}`, ` { } `, `{"a":1,}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseEnvelope([]byte(s))
		if n, _ := PromptTokens(got.Prompt); n < 0 || n > len(got.Prompt) {
			t.Fatalf("%q: %d tokens", s, n)
		}
		var want map[string]json.RawMessage
		if json.Unmarshal([]byte(s), &want) != nil || want == nil {
			return // what is wrong inside is the server's to say
		}
		if err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		var model string
		if raw := want["model"]; len(raw) > 0 && json.Unmarshal(raw, &model) == nil && model != got.Model && strings.ToValidUTF8(s, "") == s {
			t.Fatalf("%q: model %q, want %q", s, got.Model, model)
		}
	})
}

func BenchmarkEnvelope(b *testing.B) {
	body := []byte(`{"model":"m","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat(`The quick \"brown\" fox\njumps. `, 3300) + `"}],"max_tokens":10}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for range b.N {
		if _, err := ParseEnvelope(body); err != nil {
			b.Fatal(err)
		}
	}
}
