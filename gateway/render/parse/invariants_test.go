package parse

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// subject is a text in a format, with its request.
type subject struct {
	name string
	f    *Format
	o    Options
	text string
}

// subjects are the texts of all cases and samples, and hostile ones.
func subjects(t testing.TB) (all []subject) {
	for _, c := range readCases(t) {
		if f := c.format(); f != nil {
			all = append(all, subject{c.ID, f, c.options(), c.Text})
		}
	}
	for i, s := range samples {
		f := s.format(t, nil)
		all = append(all, subject{fmt.Sprint("sample ", i), f, Options{Reasoning: s.open}, s.text})
		all = append(all, subject{fmt.Sprint("sample ", i, " with types"), f, Options{Reasoning: s.open, Tools: sampleTools}, s.text})
	}
	return append(all, hostile(t)...)
}

var sampleTools = args.NewTools([]args.Tool{
	{Name: "find_city", Parameters: []byte(`{"type":"object","properties":{"q":{"type":"string"},"n":{"type":["integer","null"]},"deep":{"type":"object"}}}`)},
	{Name: "now", Parameters: nil},
})

// hostile returns texts that are no answers of a model which follows its format: each sample cut at
// some place, with a part twice, with parts exchanged, and with another format's sample inside.
func hostile(t testing.TB) (all []subject) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for i, s := range samples {
		f := s.format(t, nil)
		add := func(what, text string) {
			all = append(all, subject{fmt.Sprint("hostile ", i, " ", what), f, Options{Reasoning: s.open}, text})
		}
		cut := func() int {
			n := rnd.IntN(len(s.text) + 1)
			for n < len(s.text) && !utf8.RuneStart(s.text[n]) {
				n++
			}
			return n
		}
		for k := range 3 {
			at := cut()
			add("long", s.text[:at]+strings.Repeat([]string{" ", "\n", "né"}[k], 200+rnd.IntN(300))+s.text[at:])
			a, b := cut(), cut()
			if a > b {
				a, b = b, a
			}
			add("cut", s.text[:b])
			add("headless", s.text[a:])
			add("hole", s.text[:a]+s.text[b:])
			add("twice", s.text[:b]+s.text[a:])
			add("nested", s.text[:a]+samples[rnd.IntN(len(samples))].text+s.text[a:])
		}
	}
	return all
}

// pieces splits text at random places between characters.
func pieces(rnd *rand.Rand, text string, most int) (out []string) {
	for text != "" {
		n := min(1+rnd.IntN(most), len(text))
		for n < len(text) && !utf8.RuneStart(text[n]) {
			n++
		}
		out = append(out, text[:n])
		text = text[n:]
	}
	return out
}

// Concatenated deltas do not depend on how the text is split: into characters, into any two pieces
// or into random ones, in frames of one or several tokens.
func TestSplits(t *testing.T) {
	for i, s := range subjects(t) {
		draws := 1000
		switch {
		case testing.Short():
			draws = 10
		case !strings.HasPrefix(s.name, "sample") || s.o.Tools != nil:
			draws = 100
		}
		want := parse(t, s.f, s.o, s.text)
		check := func(how string, parts ...string) {
			t.Helper()
			if got := parseFrames(t, s.f, s.o, parts, 1); !equal(got, want) {
				t.Fatalf("%s: %q by %s:\n got %+v\nwant %+v", s.name, parts, how, got, want)
			}
		}
		check("characters", strings.Split(s.text, "")...)
		for k := range s.text {
			if testing.Short() && len(s.text) > 100 && k%7 > 0 {
				continue
			}
			check("two pieces", s.text[:k], s.text[k:])
		}
		bytewise := make([]string, len(s.text))
		for k := range bytewise {
			bytewise[k] = s.text[k : k+1]
		}
		check("bytes", bytewise...)
		rnd := rand.New(rand.NewPCG(uint64(i), 7))
		for k := range draws {
			parts := pieces(rnd, s.text, 1+rnd.IntN(12))
			if got := parseFrames(t, s.f, s.o, parts, 1+k%5); !equal(got, want) {
				t.Fatalf("%s: %q in frames of %d:\n got %+v\nwant %+v", s.name, parts, 1+k%5, got, want)
			}
		}
	}
}

// parseFrames parses a text that comes in frames of several pieces. It checks that little is held
// back, and that the deltas of a frame are valid when all of it was pushed.
func parseFrames(t testing.TB, f *Format, o Options, parts []string, frame int) answer {
	t.Helper()
	p := f.NewParser(o)
	valid := utf8.ValidString(strings.Join(parts, ""))
	var a reader
	var dst []Delta
	for i, part := range parts {
		if i%frame == 0 {
			a.add(t, dst)
			dst = dst[:0]
		}
		dst = p.Push(dst, -1, part)
		for _, d := range dst {
			if valid && !utf8.Valid(d.Text) {
				t.Fatalf("a delta has a part of a character: %q", d.Text)
			}
		}
		if held := len(p.buf) - p.at; held > maxMarker {
			t.Fatalf("%d bytes are held back: %q", held, p.buf[p.at:])
		}
	}
	a.add(t, dst)
	a.add(t, p.Finish(nil))
	if len(p.Finish(nil)) > 0 || len(p.Push(nil, -1, "x")) > 0 || p.Calls() != len(a.calls) {
		t.Fatal("a parser continues behind the end")
	}
	return a.answer()
}

// maxMarker is the length of the longest marker. A Python escape is shorter.
const maxMarker = 42

func TestLongestMarker(t *testing.T) {
	longest := 0
	for _, r := range rows {
		for _, m := range append(append(append([]string{r.section, r.sectionEnd, r.callEnd, r.nameOpen, r.id, r.param, r.paramName, r.value, r.valueEnd, r.quote}, r.call...), r.noise...), r.tags...) {
			longest = max(longest, len(m))
		}
	}
	if longest != maxMarker {
		t.Errorf("the longest marker has %d bytes, want %d", longest, maxMarker)
	}
}

// tokens are a text as tokens of a vocabulary in which markers are special.
type token struct {
	id   int32
	text string
}

// vocabulary returns the ids of markers as special tokens, of those that have no letters around a
// name.
func vocabulary(text string) (int32, bool) {
	if len(text) < 4 || !strings.ContainsAny(text[:1], "<[◁") || !strings.ContainsAny(text[len(text)-1:], ">]▷") {
		return 0, false
	}
	id := int32(1000)
	for _, c := range []byte(text) {
		id = id*31 + int32(c)
	}
	return id & 0x7fffffff, true
}

// tokenize splits a text into special tokens and random pieces.
func tokenize(rnd *rand.Rand, f *Format, text string) (out []token) {
	for text != "" {
		at, best := len(text), special{}
		for _, s := range f.special {
			if i := strings.Index(text, s.text); i >= 0 && (i < at || i == at && len(s.text) > len(best.text)) {
				at, best = i, s
			}
		}
		for _, p := range pieces(rnd, text[:at], 5) {
			out = append(out, token{7, p})
		}
		if text = text[at:]; best.text != "" {
			out = append(out, token(best))
			text = text[len(best.text):]
		}
	}
	return out
}

// Markers that are special tokens mean the same by their ids, with and without their text, however
// other text is split.
func TestTokens(t *testing.T) {
	for i, s := range samples {
		f := s.format(t, vocabulary)
		if len(f.special) == 0 && strings.Contains(s.text, "<tool_call>") {
			t.Errorf("no special tokens: %q", s.text)
		}
		for seed := range 50 {
			rnd := rand.New(rand.NewPCG(uint64(i), uint64(seed)))
			p := f.NewParser(Options{Reasoning: s.open})
			var r reader
			for _, tok := range tokenize(rnd, f, s.text) {
				text := tok.text
				if tok.id != 7 && seed%2 == 1 {
					text = ""
				}
				r.add(t, p.Push(nil, tok.id, text))
			}
			r.add(t, p.Finish(nil))
			a := r.answer()
			if !equal(a, s.want) {
				t.Fatalf("%s %s: %q:\n got %+v\nwant %+v", s.tools, s.reasoning, s.text, a, s.want)
			}
		}
	}
}

// Text that spells a special token with others is text.
func TestSpelledMarkers(t *testing.T) {
	for _, s := range samples {
		f := s.format(t, vocabulary)
		if f.row.args == argsHarmony || f.row.bare != 0 || len(f.special) == 0 {
			continue
		}
		for _, sp := range f.special {
			text := "a " + sp.text + " b"
			a := parse(t, f, Options{}, strings.Split(text, "")...)
			if a.Content != text || a.Reasoning != "" || a.Calls != nil {
				t.Errorf("%s: %q is %+v", s.tools, text, a)
			}
		}
	}
}

// No word of a text is lost, whatever the model writes: it is in the content, in the reasoning or
// in a call.
func TestNoTextLost(t *testing.T) {
	for i, s := range samples {
		f, byID := s.format(t, nil), s.format(t, vocabulary)
		var marks []string
		for _, set := range f.sets() {
			for _, m := range set.marks {
				marks = append(marks, m.text)
			}
		}
		marks = append(marks, `{"name":`, `{"name": "`, `"arguments":`, `", "arguments": {`, `{`, `}`, `"`, "[", "]", "(", ")", "=", ",", ":", "'", "\n", " ", `"}`, "f(a=")
		slices.Sort(marks)
		for seed := range 300 {
			rnd := rand.New(rand.NewPCG(uint64(i), uint64(seed)))
			var text strings.Builder
			var words []string
			for k := range 1 + rnd.IntN(20) {
				if rnd.IntN(3) == 0 {
					words = append(words, fmt.Sprintf("word%dx", k))
					text.WriteString(words[len(words)-1])
				} else {
					text.WriteString(marks[rnd.IntN(len(marks))])
				}
			}
			for _, f := range []*Format{f, byID} {
				var r reader
				p := f.NewParser(Options{Reasoning: s.open})
				for _, tok := range tokenize(rnd, f, text.String()) {
					r.add(t, p.Push(nil, tok.id, tok.text))
				}
				r.add(t, p.Finish(nil))
				a := r.answer()
				all := a.Content + a.Reasoning
				for _, c := range a.Calls {
					all += c.Name + c.ID + c.Args
				}
				for _, w := range words {
					_, after, _ := strings.Cut(text.String(), w)
					_, after, _ = strings.Cut(after, "<|")
					if s.tools == "openai" && (strings.HasPrefix(after, "message") || strings.HasPrefix(after, "channel") || strings.HasPrefix(after, "constrain")) {
						continue // it is in a header
					}
					if !strings.Contains(all, w) {
						t.Fatalf("%s %s: %q loses %s: %+v", s.tools, s.reasoning, text.String(), w, a)
					}
				}
			}
		}
	}
}

// The text of a marker that means nothing where it comes is shown only if special tokens are.
func TestHiddenMarkers(t *testing.T) {
	f, err := NewFormat("hermes", "qwen3", vocabulary)
	if err != nil {
		t.Fatal(err)
	}
	id, _ := vocabulary("</tool_call>")
	for shown, want := range map[string]string{"": "ab", "</tool_call>": "a</tool_call>b"} {
		var r reader
		p := f.NewParser(Options{})
		r.add(t, p.Push(nil, 7, "a"))
		r.add(t, p.Push(nil, id, shown))
		r.add(t, p.Push(nil, 7, "b"))
		if got := string(r.content); got != want {
			t.Errorf("with %q the content is %q, want %q", shown, got, want)
		}
	}
}

// A call with a megabyte of arguments comes in pieces, and a held value takes linear time.
func TestMegabyte(t *testing.T) {
	long := strings.Repeat("x{\\\"<", 200_000)
	for name, text := range map[string]string{
		"hermes":        `<tool_call>{"name":"f","arguments":{"a":"` + long + `"}}</tool_call>`,
		"llama3_json":   `{"parameters":{"a":"` + long + `"},"name":"f"}`,
		"qwen3_coder":   "<function=f><parameter=a>[\"" + long + "\"]</parameter></function>",
		"glm45":         "<tool_call>f<arg_key>a</arg_key><arg_value>" + long + "</arg_value></tool_call>",
		"pythonic":      `[f(a="` + long + `", b=["` + long + `"])]`,
		"gemma4":        `<|tool_call>call:f{a:<|"|>` + long + `<|"|>,b:[<|"|>` + long + `<|"|>]}<tool_call|>`,
		"openai":        `<|channel|>commentary to=functions.f<|message|>{"a":"` + long + `"}<|call|>`,
		"granite":       "<|tool_call|>[{\"name\":\"f\",\"arguments\":" + strings.Repeat("[", 500_000),
		"functiongemma": "<start_function_call>call:f{" + strings.Repeat("a:1,", 250_000) + "}<end_function_call>",
		"longcat":       strings.Repeat("<longcat_tool_call>{\"name\":\"f\"}", 30_000),
		"glm47":         strings.Repeat("<tool_call>f<arg_key>", 40_000),
		"mistral":       "[TOOL_CALLS]" + long,
		"deepseek_v3":   "<｜tool▁calls▁begin｜>" + strings.Repeat(" ", 500_000) + "x",
		"lfm2":          "<|tool_call_start|>[f(a=" + strings.Repeat("[", 500_000) + strings.Repeat("]", 500_000) + ")]<|tool_call_end|>",
	} {
		f, err := NewFormat(name, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		want := parse(t, f, Options{}, text)
		got := parseFrames(t, f, Options{}, pieces(rand.New(rand.NewPCG(1, 1)), text, 40), 3)
		if !equal(got, want) {
			t.Errorf("%s: %d calls, want %d", name, len(got.Calls), len(want.Calls))
		}
	}
}

func BenchmarkText(b *testing.B) {
	f, err := NewFormat("hermes", "qwen3", nil)
	if err != nil {
		b.Fatal(err)
	}
	p := f.NewParser(Options{})
	var dst []Delta
	for b.Loop() {
		dst = p.Push(dst[:0], 7, " word")
	}
}

// Tokens of text, of arguments and of values that are passed on allocate nothing.
func TestAllocations(t *testing.T) {
	for name, begin := range map[string]string{
		"hermes": "Text", "openai": "<|channel|>final<|message|>", "pythonic": "[f(a='", "glm45": "<tool_call>now<arg_key>q</arg_key><arg_value>",
		"kimi_k2": `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":"`, "gemma4": `<|tool_call>call:f{a:<|"|>`,
	} {
		for _, v := range []Vocabulary{nil, vocabulary} {
			f, err := NewFormat(name, "qwen3", v)
			if err != nil {
				t.Fatal(err)
			}
			p := f.NewParser(Options{Tools: args.NewTools([]args.Tool{{Name: "now", Parameters: []byte(`{"properties":{"q":{"type":"string"}}}`)}})})
			dst := make([]Delta, 0, 8)
			for _, tok := range tokenize(rand.New(rand.NewPCG(1, 1)), f, begin) {
				dst = p.Push(dst[:0], tok.id, tok.text)
			}
			some := 0
			n := testing.AllocsPerRun(1000, func() {
				dst = p.Push(dst[:0], 7, " some <words")
				some += len(dst)
			})
			if n != 0 || some < 1000 {
				t.Errorf("%s: %v allocations for a token, %d deltas", name, n, some)
			}
		}
	}
}

func FuzzParser(f *testing.F) {
	for i, s := range samples {
		f.Add(uint8(i), uint64(i), s.text)
	}
	for _, c := range readCases(f) {
		for i, s := range samples {
			if x := c.format(); x != nil && x.Tools() == s.tools {
				f.Add(uint8(i), uint64(i), c.Text)
				break
			}
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, seed uint64, text string) {
		s := samples[int(which)%len(samples)]
		o := Options{Reasoning: seed%2 == 1, NoTools: seed%7 == 0}
		if seed%3 == 0 {
			o.Tools = sampleTools
		}
		format := s.format(t, nil)
		want := parse(t, format, o, text)
		rnd := rand.New(rand.NewPCG(seed, 3))
		if got := parseFrames(t, format, o, pieces(rnd, text, 1+rnd.IntN(9)), 1+rnd.IntN(4)); !equal(got, want) {
			t.Fatalf("%s: got %+v, want %+v", s.tools, got, want)
		}
		byID := s.format(t, vocabulary)
		var both [2]reader
		for i := range both {
			a := &both[i]
			p := byID.NewParser(o)
			for _, tok := range tokenize(rnd, byID, text) {
				a.add(t, p.Push(nil, tok.id, tok.text))
			}
			a.add(t, p.Finish(nil))
		}
		if got, want := both[0].answer(), both[1].answer(); !equal(got, want) {
			t.Fatalf("%s by tokens: got %+v, want %+v", s.tools, got, want)
		}
	})
}
