package simulate

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The figures of a measured run stand next to the predicted ones, in the text and on the page.
func TestCompare(t *testing.T) {
	o := options()
	_, result, _ := played(t, o)
	result["median_ttft_ms"] = result["median_ttft_ms"].(float64) * 1.25
	delete(result, "p99_tpot_ms")
	result["p99_e2el_ms"] = 7.0 // which is not predicted
	data, err := json.Marshal(result)
	if err != nil {
		t.Fatal(err)
	}
	o.Compare = filepath.Join(t.TempDir(), "measured.json")
	if err := os.WriteFile(o.Compare, data, 0o600); err != nil {
		t.Fatal(err)
	}
	text, _, files := played(t, o)
	errs := map[string]string{}
	_, table, _ := strings.Cut(text, "Next to ")
	for line := range strings.Lines(table) {
		for _, name := range []string{"median ttft ms", "p99 itl ms", "request goodput", "p99 tpot ms", "p99 e2el ms", "predicted"} {
			if i := strings.Index(line, name); i >= 0 {
				errs[name] = strings.Join(strings.Fields(line[i+len(name):])[max(0, len(strings.Fields(line[i+len(name):]))-2):], " ")
			}
		}
	}
	for name, want := range map[string]string{"median ttft ms": "-20.0 %", "p99 itl ms": "+0.0 %", "request goodput": "+0.0 %", "predicted": "measured error", "p99 tpot ms": "", "p99 e2el ms": ""} {
		if errs[name] != want {
			t.Errorf("%s: error %q, want %q in\n%s", name, errs[name], want, table)
		}
	}
	if !bytes.Contains(files[1], []byte("median_ttft_ms predicted")) {
		t.Error("the page lacks the comparison")
	}
}

// A file that is no result is refused before the simulation, in one sentence that names the remedy.
func TestCompareRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"none": "", "empty.json": "", "list.json": "[1]", "other.json": `{"median_ttft_ms": "fast", "p90_ttft_ms": 3}`} {
		o := options()
		o.Compare = filepath.Join(dir, name)
		if name != "none" {
			if err := os.WriteFile(o.Compare, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		err := (&run{Options: &o}).prepare()
		if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "--compare") || !strings.Contains(err.Error(), "--save-result") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
