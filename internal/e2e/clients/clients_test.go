package clients

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// formatsTested is how many formats make test draws; a soak takes all of them.
const formatsTested = 6

// play serves formats until the test ends.
func play(t *testing.T, formats []format) []served {
	t.Helper()
	all, stop, err := playAll(context.Background(), formats)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return all
}

// The official OpenAI clients of Python and Node finish loops with tools over drawn formats, by each
// of their surfaces. None is refused.
func TestOpenAIClients(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: starts programs")
	}
	e := environment{python: os.Getenv("TANDEM_PYTHON"), node: os.Getenv("TANDEM_JAVASCRIPT")}
	if e.python == "" || e.node == "" {
		t.Skip("needs TANDEM_PYTHON and TANDEM_JAVASCRIPT, with the openai packages: run make test")
	}
	formats, err := readFormats()
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("TANDEM_SOAK") == "" {
		rand.New(rand.NewPCG(1, 2)).Shuffle(len(formats), func(i, k int) { formats[i], formats[k] = formats[k], formats[i] })
		formats = formats[:formatsTested]
	}
	if err := e.write(setup{Key: key, Formats: play(t, formats), Models: []served{}}, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	t.Run("", func(t *testing.T) {
		for _, script := range scripts[:2] {
			t.Run(filepath.Base(script), func(t *testing.T) {
				t.Parallel()
				e.openAI(t, script)
			})
		}
	})
}

// openAI runs a script over formats.
func (e *environment) openAI(t *testing.T, script string) {
	r, err := e.run(t.Context(), script)
	if err != nil {
		t.Fatal(err)
	}
	passed := 0
	for _, c := range r.Checks {
		for _, f := range c.Failed {
			t.Errorf("%s, %s, %s, %s: %s", c.Surface, c.Ran, c.Mode, f.Name, f.Why)
		}
		if len(c.Refused) > 0 {
			t.Errorf("%s, %s, %s: refused: %v", c.Surface, c.Ran, c.Mode, c.Refused)
		}
		passed += c.OK
	}
	t.Logf("note: %s %s: %d loops", r.Client, r.Version, passed)
}

// The page has a row for each check, and each distinct answer of a server once.
func TestPage(t *testing.T) {
	refused := []outcome{{"a", "Error code: 404 - not\nhere | `x`"}, {"b", "not here | `x`"}}
	text := string(page([]report{{Client: "c", Version: "1", Config: "C(url)", Configs: map[string]string{"r": "off()"}, Checks: []check{
		{Kind: "formats", Surface: "s", Mode: "whole", Ran: "loop", Of: 3, OK: 3},
		{Kind: "models", Surface: "p", Mode: "streamed", Ran: "schema", Of: 2, Refused: refused},
		{Kind: "models", Surface: "q", Mode: "whole", Ran: "schema", Of: 3, OK: 1, Refused: refused[:1], Failed: []outcome{{"z", "Traceback\nE: bad"}}},
	}}}, 38))
	for _, want := range []string{
		"the 38 formats", "| c | 1 | all | `C(url)` |\n| | | r | `off()` |\n", "| c | `s` | loop | whole | 3 of 3 |\n", "| c | `p` | schema | streamed | 2 refused (1) |\n",
		"| c | `q` | schema | whole | 1 of 3, 1 refused, 1 failed (1) (2) |\n", "| 1 | `not here \\| 'x'` |\n| 2 | `failed: z: E: bad` |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
