package openai

import (
	"fmt"
	"strings"
	"testing"
)

// Every list and tree has a bound, which names the field, holds for each of equal
// names, and stops the scan at the first element too many: what follows is not read.
func TestBoundsOfFields(t *testing.T) {
	const chat = `"messages":[{"role":"user","content":"a"}]`
	list := func(n int, element string) string { return "[" + strings.Repeat(element+",", n-1) + element }
	object := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `%s"%d":0`, map[bool]string{true: "{", false: ","}[i == 0], i)
		}
		return b.String()
	}
	for _, c := range []struct {
		on          Endpoint
		name        string
		fits, more  string // one element more; neither is closed
		end, others string
	}{
		{Completions, "stop", list(MaxStops, `"a"`), list(MaxStops+1, `"a"`), "]", `"prompt":"a"`},
		{Completions, "stop_token_ids", list(MaxStops, "1"), list(MaxStops+1, "1"), "]", `"prompt":"a"`},
		{Completions, "logit_bias", object(MaxBias), object(MaxBias + 1), "}", `"prompt":"a"`},
		{Completions, "bad_words", list(MaxBadWords, `"a"`), list(MaxBadWords+1, `"a"`), "]", `"prompt":"a"`},
		{Completions, "allowed_token_ids", list(MaxAllowed, "1"), list(MaxAllowed+1, "1"), "]", `"prompt":"a"`},
		{Completions, "logprob_token_ids", list(MaxNamed, "1"), list(MaxNamed+1, "1"), "]", `"prompt":"a","logprobs":1`},
		{Completions, "prompt", list(MaxPrompts, `"a"`), list(MaxPrompts+1, `"a"`), "]", `"n":1`},
		{Completions, "prompt", "[1", list(MaxIDs+1, "1"), "]", `"n":1`},
		{Completions, "prompt", "[[1]", "[" + list(MaxIDs, "1"), "]", `"n":1`},
		{Chat, "messages", list(MaxMessages, `{"role":"a"}`), list(MaxMessages+1, `{"role":"a"}`), "]", `"n":1`},
		{Chat, "documents", list(MaxMessages, `{}`), list(MaxMessages+1, `{}`), "]", chat},
		{Chat, "chat_template_kwargs", `{"a":` + list(MaxValues-2, `{}`) + "]", `{"a":` + list(MaxValues, `{}`), "}", chat},
	} {
		for _, body := range []string{"{" + c.others + `,"` + c.name + `":` + c.fits + c.end + "}", `{"` + c.name + `":` + c.fits + c.end + "," + c.others + "}"} {
			if _, fault := Parse(c.on, []byte(body)); fault != nil {
				t.Errorf("%s that fits: %v", c.name, fault)
			}
		}
		for what, body := range map[string]string{
			"one too many":      "{" + c.others + `,"` + c.name + `":` + c.more + c.end + "}",
			"and broken behind": "{" + c.others + `,"` + c.name + `":` + c.more + " what is this",
			"the first of two":  `{"` + c.name + `":` + c.more + c.end + `,"` + c.name + `":` + c.fits + c.end + "," + c.others + "}",
		} {
			if _, fault := Parse(c.on, []byte(body)); fault == nil || fault.Status != 400 || fault.Param != c.name || !strings.Contains(fault.Message, "too many") {
				t.Errorf("%s, %s: %v", c.name, what, fault)
			}
		}
	}
	for _, name := range []string{"x", "messages", "metadata", "chat_template_kwargs"} {
		deep := `{"` + name + `":` + strings.Repeat("[", 1<<20)
		if _, fault := Parse(Chat, []byte(deep)); fault == nil || fault.Status != 400 || !strings.Contains(fault.Message, "nest deeper than 300") {
			t.Errorf("a deep %s: %v", name, fault)
		}
	}
}

// Of equal names the last counts.
func TestLastOfEqualNames(t *testing.T) {
	r, fault := Parse(Completions, []byte(`{"prompt":["a","b"],"n":3,"n":2,"prompt":"c","temperature":1,"temperature":null,"\u006e":4,"stop":[1],"stop":"x"}`))
	if fault != nil {
		t.Fatal(fault)
	}
	if len(r.Prompts) != 1 || r.Prompts[0].Text != "c" || r.N != 4 || r.Temperature != nil || len(r.Stop) != 1 {
		t.Errorf("%+v", r)
	}
}

// What is unknown, refused or without effect costs nothing, however large it is, and
// what a prompt costs is counted before it is built.
func TestMemoryIsCharged(t *testing.T) {
	charged := -1
	full := BadRequest("", "full")
	charge := func(n int) *Error { charged = n; return full }
	values := strings.Repeat("1,", 1<<20) + "1"
	for body, most := range map[string]int{
		`{"prompt":"a","z":[` + values + `]}`:                   1 << 10,
		`{"prompt":"a","user":"` + values + `"}`:                1 << 10,
		`{"prompt":"a","metadata":{"a":[` + values + `]}}`:      1 << 10,
		`{"prompt":"a"` + strings.Repeat(`,"n":1`, 1<<18) + `}`: 1 << 10,
	} {
		if _, fault := ParseWithin(Completions, []byte(body), charge); fault != full || charged > most {
			t.Errorf("%.40s: charged %d, %v", body, charged, fault)
		}
		if n := testing.AllocsPerRun(1, func() { _, _ = ParseWithin(Completions, []byte(body), nil) }); n > 50 {
			t.Errorf("%.40s: %g allocations", body, n)
		}
	}
	if _, fault := ParseWithin(Completions, []byte(`{"prompt":"`+values+`"}`), charge); fault != full || charged < 2*len(values) {
		t.Errorf("a prompt of %d bytes is charged with %d, %v", len(values), charged, fault)
	}
}

// Answers of a derender request have as many choices in all as one request may ask for.
func TestDerenderChoices(t *testing.T) {
	body := func(answers int) []byte {
		answer := `{"choices":[` + strings.Repeat("{},", MaxN-1) + `{}]},`
		return []byte(`{"generate_responses":[` + strings.TrimSuffix(strings.Repeat(answer, answers), ",") + `]}`)
	}
	free := func(int) *Error { return nil }
	if _, fault := ParseDerender(Completions, body(MaxChoices/MaxN), free); fault != nil {
		t.Error(fault)
	}
	if _, fault := ParseDerender(Completions, body(MaxChoices/MaxN+1), free); fault == nil || fault.Status != 400 || fault.Param != "generate_responses" {
		t.Error(fault)
	}
}
