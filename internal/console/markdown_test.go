package console

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// render shows parts of a text one after the other.
func render(t testing.TB, width int, plain bool, parts ...string) string {
	t.Helper()
	var out strings.Builder
	m := markdown{out: &out, width: width, plain: plain}
	for _, p := range parts {
		if err := m.write(Visible(p)); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

var sgr = regexp.MustCompile("\x1b\\[[0-9;]*m")

// cells returns the characters of an output with the style of each, one a line.
func cells(output string) string {
	var b strings.Builder
	style := ""
	for output != "" {
		if output[0] == '\x1b' { // the search reads all output where no style is near
			if at := sgr.FindStringIndex(output); at != nil && at[0] == 0 {
				style = output[:at[1]]
				output = output[at[1]:]
				continue
			}
		}
		r, n := utf8.DecodeRuneInString(output)
		if style == "\x1b[0m" || r == ' ' || r == '\n' {
			b.WriteString(string(r) + "\n")
		} else {
			b.WriteString(style + string(r) + "\n")
		}
		output = output[n:]
	}
	return b.String()
}

const bigText = "# Head *line*\n\nA **bold** word, *it **b** x*, ***both***, snake_case_name, 2 * 3 * 4, `code * x`, ``a ` b``, ~~gone~~.\n" +
	"- item with a [link](http://a/b) and [no link] and \\*escaped\\*\n  1. nested that is longer than a row of the terminal\n> quote that is longer than a row of the terminal, too\n" +
	"```go\nx := `raw` // **not bold**\n\n```\n---\n| a | b |\n|---|---|\n***\n日本語のテキスト and **an unclosed one\nnext\tline 5 *stars `open\n````\n```\n````\nend__"

func TestMarkdown(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                     "plain",
		"# Head":                    "\x1b[1mHead\x1b[0m",
		"#no head":                  "#no head",
		"a **b** c":                 "a \x1b[1mb\x1b[0m c",
		"a *b* _c_":                 "a \x1b[3mb\x1b[0m \x1b[3mc\x1b[0m",
		"***x***":                   "\x1b[1;3mx\x1b[0m",
		"**a *b* c**":               "\x1b[1ma\x1b[0m \x1b[1;3mb\x1b[0m \x1b[1mc\x1b[0m",
		"a_b_c *":                   "a_b_c *",
		"2 * 3 * 4":                 "2 * 3 * 4",
		"**open":                    "**open",
		"`a*b*`":                    "\x1b[36ma*b*\x1b[0m",
		"`open":                     "`open",
		"~~x~~ ~y":                  "\x1b[9mx\x1b[0m ~y",
		`\*a\* \a`:                  `*a* \a`,
		"[t](u)":                    "\x1b[4mt\x1b[0m \x1b[2m(u)\x1b[0m",
		"[t] (u) [":                 "[t] (u) [",
		"- a\n+ b\n* c":             "• a\n• b\n• c",
		"12. a":                     "12. a",
		"> q":                       "\x1b[2m│\x1b[0m q",
		"---\nx":                    "\x1b[2m──────────\x1b[0m\nx",
		"```\n*a*\n```\n*b*":        "\x1b[2m```\x1b[0m\n\x1b[36m*a*\x1b[0m\n\x1b[2m```\x1b[0m\n\x1b[3mb\x1b[0m",
		"aaaa bbbb cccc":            "aaaa bbbb\ncccc",
		"- aaaa bbbb cccc":          "• aaaa\n  bbbb\n  cccc",
		"> aaaa bbbb cc":            "\x1b[2m│\x1b[0m aaaa\n\x1b[2m│ \x1b[0mbbbb cc",
		"aaaaaaaaaaaaaaa b":         "aaaaaaaaaaaaaaa b",
		"日本語日本語":                    "日本語日本\n語",
		"| aaa | bbb | ccc |":       "\x1b[2m|\x1b[0m aaa | bbb | ccc |",
		"\x1b[31mred \u202eeve\r\n": "␛[31mred\n\ufffdeve\n",
		"a\n\n\nb":                  "a\n\n\nb",
		"-":                         "-",
		"":                          "",
	} {
		if got := render(t, 10, false, in); got != want {
			t.Errorf("%q is shown as %q, want %q", in, got, want)
		}
	}
}

// The cells and their styles do not depend on where the text is split.
func TestMarkdownSplits(t *testing.T) {
	for _, width := range []int{0, 40} {
		for _, plain := range []bool{false, true} {
			want := cells(render(t, width, plain, bigText))
			check := func(parts ...string) {
				t.Helper()
				if got := cells(render(t, width, plain, parts...)); got != want {
					t.Fatalf("width %d: split as %q: %s\nwant %s", width, parts, render(t, width, plain, parts...), render(t, width, plain, bigText))
				}
			}
			var each []string
			for at, r := range bigText {
				check(bigText[:at], bigText[at:])
				each = append(each, string(r))
			}
			check(each...)
		}
	}
}

// What may begin a marker is held back, and nothing else, except a word at the right edge.
func TestMarkdownShowsAtOnce(t *testing.T) {
	var out strings.Builder
	m := markdown{out: &out, width: 80}
	for _, step := range []struct{ part, want string }{
		{"Pre", "Pre"}, {"fill", "fill"}, {" is", " is"}, {" **bo", ""}, {"ld** x", " \x1b[1mbold\x1b[0m x"}, {"\n-", "\n"}, {" item", "• item"}, {" `c", ""}, {"`", " "}, {"d", "\x1b[36mc\x1b[0md"},
	} {
		before := out.Len()
		if err := m.write(step.part); err != nil {
			t.Fatal(err)
		}
		if got := out.String()[before:]; strings.TrimSpace(got) != strings.TrimSpace(step.want) {
			t.Errorf("%q showed %q, want %q", step.part, got, step.want)
		}
	}
}

// Hostile text costs time in proportion to its length.
func FuzzMarkdown(f *testing.F) {
	f.Add(bigText, 7)
	f.Add(strings.Repeat("[", 5000), 1)
	f.Add(strings.Repeat("**a", 3000), 5)
	f.Add(strings.Repeat("```\n", 2000), 3)
	f.Fuzz(func(t *testing.T, text string, size int) {
		if !utf8.ValidString(text) || len(text) > 1<<16 {
			return
		}
		var parts []string
		runes := []rune(text)
		for size = max(1, size%100); len(runes) > 0; {
			n := min(size, len(runes))
			parts, runes = append(parts, string(runes[:n])), runes[n:]
		}
		for _, r := range sgr.ReplaceAllString(render(t, 40, false, parts...), "") {
			if control(r) {
				t.Fatalf("%U in the output of %q", r, text)
			}
		}
	})
}

// The display of <think> does not depend on splits.
func TestDisplayThoughts(t *testing.T) {
	show := func(parts ...Delta) string {
		var out strings.Builder
		d := newDisplay(&Terminal{Out: &out, Styled: true, Width: func() int { return 80 }})
		for _, p := range parts {
			if err := d.show(p); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.end(); err != nil {
			t.Fatal(err)
		}
		return cells(out.String())
	}
	const text = "\n<think>\nI think <th</thin\n</think>\n\n**Yes**"
	want := cells("\x1b[2mI\x1b[0m \x1b[2mthink\x1b[0m \x1b[2m<th</thin\x1b[0m\n\n\x1b[1mYes\x1b[0m\n")
	for at := range text {
		if got := show(Delta{Text: text[:at]}, Delta{Text: text[at:]}); got != want {
			t.Fatalf("split at %d: %q, want %q", at, got, want)
		}
	}
	if got := show(Delta{Text: "<think>\n\n</think>\n\nYes"}); got != cells("Yes\n") {
		t.Errorf("no thoughts: %q", got)
	}
	if got := show(Delta{Reasoning: "I th"}, Delta{Reasoning: "ink"}, Delta{Text: "\n\nYes <think>"}); got != cells("\x1b[2mI\x1b[0m \x1b[2mthink\x1b[0m\n\nYes <think>\n") {
		t.Errorf("reasoning: %q", got)
	}
	if got := show(Delta{Text: "<thin"}); got != cells("<thin\n") {
		t.Errorf("a tag that never ends: %q", got)
	}
}
