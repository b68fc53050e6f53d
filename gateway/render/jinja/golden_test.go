package jinja

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Another set, made by goldens.py --templates DIR --out FILE, can be checked.
var (
	goldensFile  = flag.String("goldens", "testdata/goldens.json.gz", "file of golden renders")
	templatesDir = flag.String("templates", "testdata/templates", "folder of the templates in it")
)

// goldens is testdata/goldens.json.gz, which testdata/goldens.py documents.
type goldens struct {
	Renders []struct {
		Template, Chat string
		Output         *string
		Error          *pythonError
	}
	Chats   map[string]json.RawMessage
	Pieces  []piece
	Context json.RawMessage
}

type piece struct {
	text   string
	output *string
	err    *pythonError
}

func (p *piece) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&p.text, &p.output, &p.err})
}

// pythonError is the class and the message of what Python raised.
type pythonError [2]string

func loadGoldens(t testing.TB) *goldens {
	t.Helper()
	f, err := os.Open(*goldensFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zr, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g goldens
	if err := json.NewDecoder(zr).Decode(&g); err != nil {
		t.Fatal(err)
	}
	return &g
}

// clock is the time at which the goldens were rendered.
var clock = time.Date(2026, 11, 5, 7, 8, 9, 0, time.UTC)

// value reads JSON with the keys of objects in their order.
func value(t testing.TB, raw json.RawMessage) Value {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return readValue(t, d)
}

func readValue(t testing.TB, d *json.Decoder) Value {
	t.Helper()
	next := func() json.Token {
		tok, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	switch tok := next(); tok {
	case json.Delim('['):
		list := List{}
		for d.More() {
			list = append(list, readValue(t, d))
		}
		next()
		return list
	case json.Delim('{'):
		dict := new(Dict)
		for d.More() {
			key := next().(string)
			dict.Set(key, readValue(t, d))
		}
		next()
		return dict
	default:
		n, ok := tok.(json.Number)
		if !ok {
			return tok // a string, a bool or nil
		}
		if i, err := n.Int64(); err == nil {
			return i
		}
		if !strings.ContainsAny(n.String(), ".eE") {
			return BigInt(n)
		}
		f, _ := n.Float64()
		return f
	}
}

// chatInput makes a render's input of a chat of the goldens.
func chatInput(t testing.TB, raw json.RawMessage) Input {
	in := Input{BosToken: "<s>", EosToken: "</s>", Kwargs: map[string]Value{}, Now: clock}
	d := value(t, raw).(*Dict)
	for i := range d.Len() {
		key, v := d.At(i)
		switch key {
		case "messages":
			in.Messages = v.(List)
		case "tools":
			in.Tools = v.(List)
		case "add_generation_prompt":
			in.AddGenerationPrompt = v.(bool)
		case "continue_final_message":
			in.ContinueFinalMessage = v.(bool)
		case "bos_token":
			in.BosToken = ""
		default:
			in.Kwargs[key.(string)] = v
		}
	}
	return in
}

func readTemplate(t testing.TB, name string) *Template {
	t.Helper()
	src, err := os.ReadFile(filepath.Join(*templatesDir, name))
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := Parse(string(src))
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
	return tmpl
}

func TestChatsEqualReference(t *testing.T) {
	g := loadGoldens(t)
	templates := map[string]*Template{}
	failures := 0
	for _, want := range g.Renders {
		if _, ok := templates[want.Template]; !ok {
			templates[want.Template] = readTemplate(t, want.Template)
		}
		if templates[want.Template] == nil {
			continue // reported when it was parsed
		}
		got, err := templates[want.Template].Render(chatInput(t, g.Chats[want.Chat]))
		switch {
		case want.Error != nil:
			failures++
			checkError(t, want.Template+" × "+want.Chat, want.Error, err)
		case err != nil:
			t.Errorf("%s × %s: %v", want.Template, want.Chat, err)
		case got != *want.Output:
			t.Errorf("%s × %s:\n got %q\nwant %q", want.Template, want.Chat, got, *want.Output)
		}
	}
	if len(templates) < 6 || len(g.Renders) < 150 || failures < 10 {
		t.Errorf("only %d templates, %d renders, %d expected errors", len(templates), len(g.Renders), failures)
	}
}

// refusedPieces render in Python and are refused here, each as unsupported.
var refusedPieces = map[string]bool{
	"{{ d.items is defined, d['items'], d.items }}": true, // prints an address
	"{{ i.real }}":                         true,
	"{{ l.copy() }}":                       true,
	"{{ s.encode() }}":                     true,
	"{{ s | truncate(3) }}":                true,
	"{{ l | batch(2) | list }}":            true,
	"{{ ('%s' | safe) % '<' }}":            true,
	"{{ '{:>5}'.format('a') }}":            true,
	"{{ ('<' | safe).replace('<', '>') }}": true,
	"{{ '%(k)s' % d }}":                    true,
	"{{ cycler('a') }}":                    true,
	"{{ 9223372036854775807 + 1 }}":        true,
}

func TestPiecesEqualReference(t *testing.T) {
	g := loadGoldens(t)
	context := value(t, g.Context).(*Dict)
	kwargs := map[string]Value{}
	for i := range context.Len() {
		key, v := context.At(i)
		kwargs[key.(string)] = v
	}
	refused := 0
	for _, p := range g.Pieces {
		got, err := "", error(nil)
		tmpl, err := Parse(p.text)
		if err == nil {
			got, err = tmpl.Render(Input{Kwargs: kwargs, Now: clock})
		}
		switch {
		case p.err != nil:
			checkError(t, p.text, p.err, err)
		case refusedPieces[p.text]:
			refused++
			if !errors.Is(err, ErrUnsupported) {
				t.Errorf("%s: got %q and error %v, want it refused", p.text, got, err)
			}
		case err != nil:
			t.Errorf("%s: %v, want %q", p.text, err, *p.output)
		case got != *p.output:
			t.Errorf("%s:\n got %q\nwant %q", p.text, got, *p.output)
		}
	}
	if refused != len(refusedPieces) {
		t.Errorf("%d pieces were refused, the list has %d", refused, len(refusedPieces))
	}
}

// checkError holds our error against Python's: the same kind, and the same text
// where a template or a missing value is to blame, which users come to see.
func checkError(t *testing.T, what string, want *pythonError, err error) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%s: error %v, want %s: %s", what, err, want[0], want[1])
		return
	}
	class, message := want[0], want[1]
	switch class {
	case "TemplateError":
		if !errors.Is(err, ErrRaised) || e.Msg != message {
			t.Errorf("%s: error %v, want %q raised", what, err, message)
		}
	case "TemplateSyntaxError", "TemplateAssertionError", "SyntaxError":
		if !errors.Is(err, ErrSyntax) && !errors.Is(err, ErrUnsupported) || e.Line == 0 {
			t.Errorf("%s: error %v, want a syntax error with its line: %s", what, err, message)
		}
	case "UndefinedError", "SecurityError":
		if !errors.Is(err, ErrRender) && !errors.Is(err, ErrUnsupported) || errors.Is(err, ErrRender) && e.Msg != message {
			t.Errorf("%s: error %v, want %q", what, err, message)
		}
	case "ValueError":
		if !errors.Is(err, ErrInput) && !errors.Is(err, ErrRender) {
			t.Errorf("%s: error %v, want %s: %s", what, err, class, message)
		}
	case "RecursionError":
		if !errors.Is(err, ErrLimit) {
			t.Errorf("%s: error %v, want %s: %s", what, err, class, message)
		}
	default:
		if !errors.Is(err, ErrRender) && !errors.Is(err, ErrUnsupported) {
			t.Errorf("%s: error %v, want %s: %s", what, err, class, message)
		}
	}
}

func TestConcurrentRenders(t *testing.T) {
	g := loadGoldens(t)
	var wg sync.WaitGroup
	tmpl := readTemplate(t, "macros.jinja")
	in := chatInput(t, g.Chats["two_calls"])
	want, err := tmpl.Render(in)
	if err != nil || !strings.Contains(want, "Sum") {
		t.Fatalf("render gave %q, %v", want, err)
	}
	for range 4 {
		wg.Go(func() {
			for range 50 {
				if got, err := tmpl.Render(in); err != nil || got != want {
					t.Errorf("render gave %q, %v", got, err)
					return
				}
			}
		})
	}
	wg.Wait()
}
