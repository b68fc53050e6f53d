package jinja

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func renderString(src string, kwargs map[string]Value) (string, error) {
	tmpl, err := Parse(src)
	if err != nil {
		return "", err
	}
	return tmpl.Render(Input{Kwargs: kwargs})
}

// The output is in proportion to the request: many short messages fit, and the product
// of messages and tools does not.
func TestOutputFollowsInput(t *testing.T) {
	list := func(n int) (l List) {
		for range n {
			l = append(l, NewDict("role", "user", "content", "a"))
		}
		return l
	}
	for _, c := range []struct {
		src             string
		messages, tools int
		err             error
	}{
		{"{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}", 16384, 0, nil},
		{"{% for m in messages %}{% for t in tools %}{{ t }}{% endfor %}{% endfor %}", 300, 300, ErrLimit},
	} {
		tpl, err := Parse(c.src)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := tpl.Render(Input{Messages: list(c.messages), Tools: list(c.tools)}); !errors.Is(err, c.err) {
			t.Errorf("%s with %d messages and %d tools: %d bytes, %v", c.src, c.messages, c.tools, len(out), err)
		}
	}
}

// TestLimits: whatever a template does, a render ends, and with ErrLimit.
func TestLimits(t *testing.T) {
	loops := strings.Repeat("{% for a in range(100000) %}", 4) + "{% endfor %}{% endfor %}{% endfor %}{% endfor %}"
	doubling := "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
	cases := map[string]string{
		"nested loops":        loops,
		"ranges left early":   "{% for a in range(100000) %}{% for b in range(100000) %}{% break %}{% endfor %}{% endfor %}",
		"many comparisons":    "{% set x = 'a' * 10000000 %}{% set y = x ~ 'b' %}{% set x = x ~ 'c' %}{% for a in range(100000) %}{{ x == y }}{% endfor %}",
		"many searches":       "{% set x = 'a' * 10000000 %}{% for a in range(100000) %}{{ 'b' in x }}{% endfor %}",
		"many capitals":       "{% set x = 'a' * 10000000 %}{% for a in range(100000) %}{{ x | upper is lower }}{% endfor %}",
		"many lengths":        "{% set x = 'a' * 10000000 %}{% for a in range(100000) %}{{ x | length }}{% endfor %}",
		"a doubling string":   doubling,
		"a doubling list":     strings.ReplaceAll(strings.Replace(doubling, "'aaaaaaaaaaaaaaaa'", "[1]", 1), "~", "+"),
		"a repeated string":   "{{ 'x' * 1000000000 }}",
		"a repeated list":     "{{ [1] * 1000000000 }}",
		"a replaced string":   "{% set x = 'a' * 100000 %}{{ x.replace('', x) }}",
		"a joined string":     "{% set x = 'a' * 100000 %}{{ x | list | join(x) }}",
		"an indent":           "{{ 'x' | indent(1000000000, true) }}",
		"much output":         "{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
		"many strings":        "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = ns.l + ['a' * 1000000] %}{% endfor %}",
		"deep macros":         "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
		"a deep value":        "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
		"a deep comparison":   "{% set ns = namespace(x=[], y=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
		"deep JSON":           "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
		"a doubling value":    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string | length }}",
		"a value in itself":   "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
		"parentheses":         "{{ " + strings.Repeat("(", 5000) + "1" + strings.Repeat(")", 5000) + " }}",
		"nots":                "{{ " + strings.Repeat("not ", 5000) + "1 }}",
		"signs":               "{{ " + strings.Repeat("-", 5000) + "1 }}",
		"brackets":            "{{ " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + " }}",
		"ifs":                 strings.Repeat("{% if true %}", 5000) + strings.Repeat("{% endif %}", 5000),
		"a long sum":          "{{ 1" + strings.Repeat(" + 1", 5000) + " }}",
		"many filters":        "{{ 'a'" + strings.Repeat("|upper", 5000) + " }}",
		"many subscripts":     "{{ x" + strings.Repeat(".y", 5000) + " }}",
		"else ifs in a line":  "{{ " + strings.Repeat("1 if 0 else ", 5000) + "1 }}",
		"assignment brackets": "{% set " + strings.Repeat("(", 5000) + "a" + strings.Repeat(")", 5000) + " = 1 %}",
		"a long template":     strings.Repeat(" ", maxSource+1),
	}
	for name, src := range cases {
		out, err := renderString(src, nil)
		if !errors.Is(err, ErrLimit) {
			t.Errorf("%s: gave %d bytes and error %v, want %v", name, len(out), err, ErrLimit)
		}
	}
}

// TestRequestLimits: a request's own template spends time and memory in proportion to its bounds,
// also on long keys, formats of a time, and names that are not defined.
func TestRequestLimits(t *testing.T) {
	in := Input{MaxSteps: 100_000, MaxOutput: 1 << 20, Now: time.Unix(1, 0)}
	loop := func(body string) string {
		return "{% set s = '__' ~ 'a' * 500000 %}{% set ns = namespace(l=[]) %}{% set d = {s: 1} %}{% set e = {s: 1} %}" +
			"{% for i in range(100) %}" + body + "{% endfor %}"
	}
	for name, src := range map[string]string{
		"items":           loop("{% set x = d[s] %}"),
		"get":             loop("{% set x = d.get(s) %}"),
		"keys":            loop("{% set x = s in d %}"),
		"equal dicts":     loop("{% set x = d == e %}"),
		"dicts":           loop("{% set x = {s: 1} %}"),
		"times":           loop("{% set x = strftime_now('%Y' * 1000) %}"),
		"times kept":      "{% set f = '%c' * 20000 %}{% set ns = namespace(l=[]) %}{% for i in range(100) %}{% set ns.l = ns.l + [strftime_now(f)] %}{% endfor %}",
		"undefined items": loop("{% set ns.l = [ns.l, [][s]] %}"),
		"strings":         loop("{% set ns.l = ns.l + ['a' * 500000] %}"),
		"undefined names": "{% for i in range(100) %}{% set x = " + strings.Repeat("a", 500_000) + " %}{% endfor %}",
	} {
		tmpl, err := Parse(src)
		if err != nil {
			t.Fatal(name, err)
		}
		if out, err := tmpl.Render(in); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: gave %d bytes and error %v, want %v", name, len(out), err, ErrLimit)
		}
	}
}

func TestErrorsNameTheLine(t *testing.T) {
	cases := []struct {
		src   string
		kind  error
		line  int
		names string
	}{
		{"a\n{{ x | nofilter }}", ErrUnsupported, 2, `filter "nofilter"`},
		{"a\n\n{% if x is strange %}{% endif %}", ErrUnsupported, 3, `test "strange"`},
		{"{% include 'x' %}", ErrUnsupported, 1, `tag "include"`},
		{"\n{% frobnicate %}", ErrSyntax, 2, "frobnicate"},
		{"\n\n{{ 'abc'.translate(1) }}", ErrUnsupported, 3, `method "translate" of str`},
		{"\n{{ lipsum() }}", ErrUnsupported, 2, `function "lipsum"`},
		{"{% for x in [1] recursive %}{% endfor %}", ErrUnsupported, 1, "recursive"},
		{"\n\n\n{{ nothing.here }}", ErrRender, 4, "'nothing' is undefined"},
		{"{{ 1\n + 'a' }}", ErrRender, 2, "unsupported operand"},
		{"\n{{ raise_exception('Stop: it') }}", ErrRaised, 2, "Stop: it"},
		{"{% if x %}\n\n", ErrSyntax, 2, "endif"},
		{"{{ [1).x }}", ErrSyntax, 1, `")"`},
		{"{{ strftime_now('%Y') }}", ErrInput, 1, "time"},
		{"{{ 'a' | map('nofilter') | list }}", ErrUnsupported, 1, "nofilter"},
		{"{{ range(-4611686018427387904, 4611686018427387904) }}", ErrUnsupported, 1, "range"},
		{`{{ "\N{BULLET}" }}`, ErrUnsupported, 1, `\N`},
	}
	for _, c := range cases {
		_, err := renderString(c.src, nil)
		var e *Error
		if !errors.As(err, &e) || !errors.Is(err, c.kind) || e.Line != c.line || !strings.Contains(e.Msg, c.names) {
			t.Errorf("%q: error %v, want %v on line %d naming %q", c.src, err, c.kind, c.line, c.names)
		}
	}
}

func TestInputErrors(t *testing.T) {
	tmpl, err := Parse("{% for m in messages %}{{ m.content }}{% endfor %}")
	if err != nil {
		t.Fatal(err)
	}
	user := NewDict("role", "user", "content", "hi")
	cases := map[string]Input{
		"both":          {Messages: List{user}, AddGenerationPrompt: true, ContinueFinalMessage: true},
		"no message":    {ContinueFinalMessage: true},
		"no text":       {Messages: List{NewDict("role", "user", "content", nil)}, ContinueFinalMessage: true},
		"no object":     {Messages: List{"hi"}},
		"image at last": {Messages: List{NewDict("role", "user", "content", List{NewDict("type", "image")})}, ContinueFinalMessage: true},
	}
	for name, in := range cases {
		if out, err := tmpl.Render(in); !errors.Is(err, ErrInput) {
			t.Errorf("%s: gave %q and error %v, want %v", name, out, err, ErrInput)
		}
	}
	if _, err := tmpl.Render(Input{Messages: List{user}, ContinueFinalMessage: true}); err != nil {
		t.Errorf("a message to continue: %v", err)
	}
	if c, _ := user.Get("content"); c != "hi" {
		t.Errorf("the render changed its input to %q", c)
	}
}

func TestContentParts(t *testing.T) {
	cases := map[string]bool{
		"{% for m in messages %}{{ m.content }}{% endfor %}":                                                              false,
		"{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}":                                         true,
		"{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}":                               true,
		"{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{% endfor %}{% endfor %}":                       true,
		"{% for m in messages %}{% set c = m.content | trim %}{{ c }}{% for t in m.tool_calls %}{% endfor %}{% endfor %}": false,
	}
	for src, want := range cases {
		tmpl, err := Parse(src)
		if err != nil {
			t.Fatal(err)
		}
		if got := tmpl.ContentParts(); got != want {
			t.Errorf("%s: ContentParts is %v, want %v", src, got, want)
		}
	}
}

// TestDictKeepsOrder sets keys again and again and holds order and values against a plain list.
func TestDictKeepsOrder(t *testing.T) {
	d := new(Dict)
	var order []string
	have := map[string]int{}
	for i := range 500 {
		key := string(rune('a'+i*7%26)) + strings.Repeat("x", i*13%5)
		if _, ok := have[key]; !ok {
			order = append(order, key)
		}
		have[key] = i
		d.Set(key, int64(i))
		if d.Len() != len(order) {
			t.Fatalf("after %d sets: %d keys, want %d", i+1, d.Len(), len(order))
		}
	}
	for i, want := range order {
		key, v := d.At(i)
		got, ok := d.Get(want)
		if key != want || !ok || got != v || v != int64(have[want]) {
			t.Errorf("key %d is %v with %v, want %s with %d", i, key, v, want, have[want])
		}
	}
}

func TestSlicesOfRanges(t *testing.T) {
	cases := map[string]string{
		"range(9)[::100]":      "range(0, 9, 100)",
		"range(2, 20, 3)[1:3]": "range(5, 11, 3)",
		"range(9)[::-2]":       "range(8, -1, -2)",
		"range(9)[3:1]":        "range(3, 1)",
	}
	for src, want := range cases {
		if got, err := renderString("{{ "+src+" }}", nil); err != nil || got != want {
			t.Errorf("%s: got %q and error %v, want %q", src, got, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, p := range loadGoldens(f).Pieces {
		f.Add(p.text)
	}
	user := NewDict("role", "user", "content", "hi", "tool_calls", List{NewDict("function", NewDict("name", "f", "arguments", NewDict("a", int64(1))))})
	in := Input{Messages: List{user, user}, Tools: List{user}, BosToken: "<s>", Now: clock, Kwargs: map[string]Value{
		"s": "Hello, Wörld", "l": List{int64(3), int64(1)}, "d": NewDict("k", 1.5, "n", nil), "i": int64(7), "t": true}}
	f.Fuzz(func(t *testing.T, src string) {
		tmpl, err := Parse(src)
		var e *Error
		if err != nil {
			if !errors.As(err, &e) {
				t.Fatalf("error %v is no *Error", err)
			}
			return
		}
		first, err := tmpl.Render(in)
		if err != nil {
			if !errors.As(err, &e) {
				t.Fatalf("error %v is no *Error", err)
			}
			return
		}
		if again, err := tmpl.Render(in); err != nil || again != first {
			t.Fatalf("first %q, then %q, %v", first, again, err)
		}
	})
}

func BenchmarkRender(b *testing.B) {
	g := loadGoldens(b)
	for _, name := range []string{"chatml.jinja", "llama3.jinja", "mistral.jinja"} {
		tmpl := readTemplate(b, name)
		for _, chat := range []string{"long", "tool_calls"} {
			in := chatInput(b, g.Chats[chat])
			b.Run(strings.TrimSuffix(name, ".jinja")+"/"+chat, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := tmpl.Render(in); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
