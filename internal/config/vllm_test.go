package config

import (
	"os"
	"strings"
	"testing"
)

// vllmNames is the reference: names with their short forms.
func vllmNames(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("testdata/vllm-flags.txt")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if strings.HasPrefix(line, "#") || len(f) == 0 {
			continue
		}
		short := ""
		if len(f) == 2 {
			short = strings.TrimPrefix(f[1], "-")
		}
		names[strings.TrimPrefix(f[0], "--")] = short
	}
	return names
}

// The table and the reference have the same names, each once and in one class.
func TestEveryVLLMFlagIsClassified(t *testing.T) {
	names := vllmNames(t)
	if len(names) < 300 {
		t.Fatalf("the reference has only %d names", len(names))
	}
	seen := map[string]bool{}
	for _, g := range VLLM {
		for _, f := range g.Flags {
			short, known := names[f.Name]
			switch {
			case seen[f.Name]:
				t.Errorf("--%s is in the table twice", f.Name)
			case !known:
				t.Errorf("--%s is no flag of vllm serve's list", f.Name)
			case short != f.Short:
				t.Errorf("--%s: short form %q, the list says %q", f.Name, f.Short, short)
			case (f.Class == Supported && f.Only == "") != (f.Why == ""):
				t.Errorf("--%s is %v (%s) with the reason %q", f.Name, f.Class, f.Only, f.Why)
			case f.Only != "" && f.Class != Supported:
				t.Errorf("--%s is %v and has supported values", f.Name, f.Class)
			case strings.HasPrefix(f.Why, gone) != (g.Name == "removed from newer vLLM"):
				t.Errorf("--%s is in the group %q with the reason %q", f.Name, g.Name, f.Why)
			case f.Class == Supported && f.Fine != "":
				t.Errorf("--%s is supported and has values without effect", f.Name)
			case strings.HasSuffix(f.Why, "."):
				t.Errorf("--%s: the reason is part of a line and ends without a full stop", f.Name)
			}
			seen[f.Name] = true
		}
	}
	for name := range names {
		if !seen[name] {
			t.Errorf("--%s of vllm serve is not in the table", name)
		}
	}
}
