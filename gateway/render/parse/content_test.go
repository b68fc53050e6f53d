package parse

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// contents are JSON texts with markers in their strings, and texts that look like calls without one.
func contents(f *Format) []string {
	var marks []string
	for _, set := range f.sets() {
		for _, m := range set.marks {
			if !slices.Contains(marks, m.text) {
				marks = append(marks, m.text)
			}
		}
	}
	all := strings.Join(marks, "x ")
	quoted := func(s string) string {
		b, err := json.Marshal(s)
		if err != nil {
			panic(err)
		}
		return strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(string(b))
	}
	out := []string{
		quoted(all), `[` + quoted(all) + `]`, `{"a": ` + quoted(all) + `, "b": [1, null, {}]}`, `{"a":1}`, `[]`, `{}`, `12`, `-1.5e3`, `true`, `null`, "[\n[1],\n[2]]",
		`{"name":"now","parameters":{"q":1}}`, `{"name": "other", "parameters": {"q": 1}}`, `{"name": "now", "parameters": 1}`, `{"name": "now", "parameters": "{}"}`,
		`[{"name":"now","arguments":{}}]`, `[{"name": "other", "arguments": {}}]`, `{"parameters": {}, "name": "now"}`, `["now()"]`, `[true]`,
		`{"a": "<think>b</think>"}`,
	}
	for _, m := range marks {
		out = append(out, `{"`+strings.Trim(quoted(m), `"`)+`": `+quoted("x"+m+"y")+`}`)
	}
	return out
}

// An answer that a grammar makes of calls or one content is content as it is, whatever markers are
// in it, in every format, behind reasoning and without tools too.
func TestOneContent(t *testing.T) {
	draws := 12
	if testing.Short() {
		draws = 2
	}
	for i, s := range samples {
		for _, f := range []*Format{s.format(t, nil), s.format(t, vocabulary)} {
			for k, want := range contents(f) {
				for mode := range 4 {
					o := Options{Tools: sampleTools, NoTools: mode&1 != 0, OneContent: true}
					head, tail, reasoning := "", "", ""
					switch th := &f.thought; {
					case mode&2 == 0 || len(th.close) == 0:
					case o.NoTools:
						o.Reasoning, reasoning, head = true, "let me see", "let me see"+th.close[0]
					default:
						reasoning, head = "let me see", th.open[0]+th.prefix+"let me see"+th.close[0]
					}
					if f.row.args == argsHarmony {
						head, tail, reasoning = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>", "<|return|>", "hm"
					}
					prefix := ""
					if f.thought.echo != "" && !o.NoTools {
						head, prefix = "hm</think>", "<think>hm</think>"
					}
					rnd := rand.New(rand.NewPCG(uint64(i), uint64(k)))
					for draw := range draws {
						tokens := tokenize(rnd, f, head)
						if draw%2 == 1 && f.row.args != argsHarmony {
							// A token that is a marker, but that the grammar has as text, shows its text.
							tokens = append(tokens, tokenize(rnd, f, want)...)
						} else {
							for _, piece := range pieces(rnd, want, 1+rnd.IntN(9)) {
								tokens = append(tokens, token{-1, piece})
							}
						}
						var r reader
						p := f.NewParser(o)
						for _, tok := range append(tokens, tokenize(rnd, f, tail)...) {
							r.add(t, p.Push(nil, tok.id, tok.text))
						}
						r.add(t, p.Finish(nil))
						if got := r.answer(); !equal(got, answer{prefix + want, reasoning, nil}) {
							t.Fatalf("%s %s: %q %q:\n got %+v\nwant %q, reasoning %q", s.tools, s.reasoning, head, want, got, prefix+want, reasoning)
						}
					}
				}
			}
		}
	}
}

// With OneContent calls are read as without.
func TestOneContentCalls(t *testing.T) {
	for _, s := range samples {
		f := s.format(t, nil)
		if len(s.want.Calls) == 0 || strings.TrimSpace(s.want.Content) != "" {
			continue
		}
		tools := make([]args.Tool, len(s.want.Calls))
		for i, c := range s.want.Calls {
			tools[i].Name = c.Name
		}
		o := Options{Reasoning: s.open, Tools: args.NewTools(tools)}
		want := parse(t, f, o, s.text)
		if o.OneContent = true; f.row.bare != 0 && strings.HasPrefix(strings.TrimSpace(s.text), string(f.row.bare)) {
			continue // a grammar has one spelling of these
		}
		if got := parse(t, f, o, s.text); !equal(got, want) {
			t.Errorf("%s %s: %q:\n got %+v\nwant %+v", s.tools, s.reasoning, s.text, got, want)
		}
	}
	for format, text := range map[string]string{
		"llama3_json": "\n" + `{"name": "now", "parameters": {"a":1}}; {"name": "now", "parameters": {}}`,
		"xlam":        `[{"name": "now", "arguments": {"a":1}}, {"name": "now", "arguments": {}}]`,
		"pythonic":    `[now(a=1), now()]`,
	} {
		f, err := NewFormat(format, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		got := parse(t, f, Options{Tools: sampleTools, OneContent: true}, strings.Split(text, "")...)
		if len(got.Calls) != 2 || got.Content != "" || got.Calls[0].Args != `{"a":1}` {
			t.Errorf("%s: %+v", format, got)
		}
	}
}
