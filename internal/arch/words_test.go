package arch

import (
	"bufio"
	"bytes"
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// jargon lists the words that this project does not use in comments, messages and pages, each with
// the field's terms for it. Readers know Go and LLM serving, and have never seen this project.
var jargon = []struct {
	words string // a regular expression for whole words, in lower case
	use   string
}{
	{`tell|tells|told|telling|teller`, "send, publish, notify, report, or return"},
	{`hear|hears|heard|hearing`, "receive, or learn"},
	{`say|says|said|saying`, "report, return, state, or name the condition"},
	{`news`, "block events, update, or change"},
	{`whoever|whomever|nobody|somebody`, "the node, client, request or caller"},
	{`goes on|go on|went on|going on|gone on`, "continue, resume, move to, or forward"},
	{`stands|stood|stand`, "is, is listed, is defined, or waits"},
	{`beside`, "next to, with, or in addition to"},
	{`anew`, "again"},
	{`lets go|let go|letting go`, "release, or free"},
	{`take up|takes up|took up|taken up`, "load, start, or accept"},
	{`leg|legs`, "prefill request, decode request, or breaker"},
	{`crowd|crowds`, "poller, or many requests"},
	{`soil|soils|soiled`, "mark dirty"},
	{`torn`, "failed, or incomplete"},
	{`nap|naps`, "backoff"},
	{`owed|owes`, "pending"},
	{`foretold|foreseen`, "predicted"},
	{`lie|lies|lay`, "is, or is stored"},
	{`in vain`, "without result"},
	{`hither|thither|thereof|whereof|wherein|hence`, "a plain sentence"},
}

// jargonAllowed lists lines that may use such a word, by file or folder and part of the line, with
// the reason.
var jargonAllowed = []struct{ path, part, reason string }{
	{"internal/arch/words_test.go", "", "the list itself"},
	{"bench/results", "", "records of runs, as they were written"},
	{"bench/server.go", "what all were we when your can said", "common words that prompts are made of"},
	{"bench/server.go", "say great where help through", "common words that prompts are made of"},
	{"engine/builtin/train/bpe.py", "tell me a story", "a text of the built-in model's corpus"},
	{"engine/builtin/train/corpus.py", "", "texts of the built-in model's corpus"},
	{"engine/builtin/train/evaluate.py", "", "texts of the built-in model's corpus"},
	{"engine/builtin/train/frames.py", "", "texts of the built-in model's corpus"},
	{"engine/builtin/train/heldout.py", "", "texts of the built-in model's corpus"},
	{"engine/builtin/train/phrasings.py", "", "texts of the built-in model's corpus"},
	{"engine/builtin/train/stories.py", "", "texts of the built-in model's corpus"},
}

// notRewritten lists folders and files whose words are still those of before the list. A pattern
// with * matches as path.Match.
var notRewritten = []string{
	"engine/load.go", "engine/model", "engine/safetensors", "engine/tokenizer",
}

// longProse is the column at which comments and pages wrap.
const longProse = 100

// text is one piece of prose: a comment, a string or a line of a page.
type text struct {
	path string
	line int
	text string
}

// goTexts returns the comments, strings and identifiers of a Go file. Identifiers are split where
// their case changes, so that keepTold is "keep told".
func goTexts(path string, src []byte) []text {
	var out []text
	var s scanner.Scanner
	fset := token.NewFileSet()
	file := fset.AddFile(path, -1, len(src))
	s.Init(file, src, nil, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		switch tok {
		case token.EOF:
			return out
		case token.COMMENT, token.STRING:
			for i, l := range strings.Split(lit, "\n") {
				out = append(out, text{path, fset.Position(pos).Line + i, l})
			}
		case token.IDENT:
			out = append(out, text{path, fset.Position(pos).Line, splitName(lit)})
		}
	}
}

// splitName returns the words of an identifier, separated by spaces.
func splitName(name string) string {
	var b strings.Builder
	lower := false
	for _, r := range name {
		if r == '_' || lower && unicode.IsUpper(r) {
			b.WriteByte(' ')
		}
		lower = unicode.IsLower(r) || unicode.IsDigit(r)
		b.WriteRune(r)
	}
	return b.String()
}

// cComment matches a comment of C and CUDA. The sources have no such marks inside strings.
var cComment = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)

func cTexts(path string, src []byte) []text {
	var out []text
	for _, at := range cComment.FindAllIndex(src, -1) {
		first := 1 + bytes.Count(src[:at[0]], []byte("\n"))
		for i, l := range strings.Split(string(src[at[0]:at[1]]), "\n") {
			out = append(out, text{path, first + i, l})
		}
	}
	return out
}

func lineTexts(path string, src []byte) []text {
	var out []text
	lines := bufio.NewScanner(bytes.NewReader(src))
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		out = append(out, text{path, n, lines.Text()})
	}
	return out
}

// proseFiles returns what the list is held over: Go that is no test, C, CUDA, protobuf, the
// Makefile and pages.
func proseFiles(t *testing.T) []text {
	t.Helper()
	var out []text
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (name[0] == '.' || name[0] == '_' || name == "testdata" || name == "bin" || name == "logs" || name == "third_party") {
				return filepath.SkipDir
			}
			return nil
		}
		var read func(string, []byte) []text
		switch filepath.Ext(name) {
		case ".go":
			if strings.HasSuffix(name, ".pb.go") || strings.HasSuffix(name, "_test.go") {
				return nil
			}
			read = goTexts
		case ".c", ".h", ".cu", ".cuh":
			read = cTexts
		case ".md", ".proto", ".sh", ".py", ".yml", ".yaml":
			read = lineTexts
		default:
			if name != "Makefile" {
				return nil
			}
			read = lineTexts
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		out = append(out, read(filepath.ToSlash(rel), src)...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// jargonOf returns a line for each word of the list in a text.
func jargonOf(texts []text) []string {
	var all []string
	for _, j := range jargon {
		all = append(all, j.words)
	}
	any := regexp.MustCompile(`(?i)\b(` + strings.Join(all, "|") + `)\b`)
	var bad []string
	for _, l := range texts {
		for _, word := range any.FindAllString(l.text, -1) {
			bad = append(bad, fmt.Sprintf("%s:%d: %q: use %s", l.path, l.line, word, insteadOf(word)))
		}
	}
	return bad
}

func insteadOf(word string) string {
	for _, j := range jargon {
		if ok, _ := regexp.MatchString(`(?i)^(`+j.words+`)$`, word); ok {
			return j.use
		}
	}
	return "another word"
}

// longLines returns a line for each comment line and each line of a page's prose past longProse.
// Tables, code blocks, directives and links may be longer.
func longLines(texts []text) []string {
	var bad []string
	block := map[string]bool{}
	for _, l := range texts {
		trimmed := strings.TrimSpace(l.text)
		if strings.HasSuffix(l.path, ".md") {
			if strings.HasPrefix(trimmed, "```") {
				block[l.path] = !block[l.path]
				continue
			}
			if block[l.path] || strings.HasPrefix(trimmed, "|") {
				continue
			}
		} else if !strings.HasPrefix(trimmed, "// ") {
			continue
		}
		if n := len([]rune(l.text)); n > longProse && !strings.Contains(trimmed, "://") {
			bad = append(bad, fmt.Sprintf("%s:%d: %d columns: wrap prose at %d", l.path, l.line, n, longProse))
		}
	}
	return bad
}

// Comments, messages, names and pages use the field's words and wrap at one column.
func TestWords(t *testing.T) {
	var texts []text
	for _, l := range proseFiles(t) {
		skip := false
		for _, dir := range notRewritten {
			matches, _ := path.Match(dir, l.path)
			skip = skip || matches || strings.HasPrefix(l.path, dir+"/")
		}
		for _, a := range jargonAllowed {
			in := l.path == a.path || strings.HasPrefix(l.path, a.path+"/")
			skip = skip || in && strings.Contains(l.text, a.part)
		}
		if !skip {
			texts = append(texts, l)
		}
	}
	for _, bad := range append(jargonOf(texts), longLines(texts)...) {
		t.Error(bad)
	}
}

func TestWordsFinds(t *testing.T) {
	src := []byte("package x\n\n// keepTold tells the node.\nfunc keepTold() { log(\"nobody is here\") }\n\n// a plain line\n")
	got := strings.Join(jargonOf(goTexts("x.go", src)), "\n")
	for _, want := range []string{`x.go:3: "tells"`, `x.go:4: "Told"`, `x.go:4: "nobody"`} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %s", got, want)
		}
	}
	if strings.Contains(got, ":6:") {
		t.Errorf("a plain line is refused: %q", got)
	}
	c := jargonOf(cTexts("x.cu", []byte("int told;\n/* one\n that tells */\n")))
	if len(c) != 1 || !strings.HasPrefix(c[0], "x.cu:3:") {
		t.Errorf("C: %q", c)
	}
	long := longLines(lineTexts("x.md", []byte(strings.Repeat("a ", 60)+"\n| "+strings.Repeat("a ", 60)+"\n")))
	if len(long) != 1 || !strings.HasPrefix(long[0], "x.md:1:") {
		t.Errorf("lines: %q", long)
	}
}
