package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// stream is the output of go test -json with one package of each outcome.
const stream = `
{"Action":"start","Package":"github.com/tandem-serving/tandem/good"}
{"Action":"run","Package":"github.com/tandem-serving/tandem/good","Test":"TestA"}
{"Action":"output","Package":"github.com/tandem-serving/tandem/good","Test":"TestA","Output":"    a_test.go:1: note: worth reading\n"}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Test":"TestA/sub","Elapsed":0.1}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Test":"TestA","Elapsed":0.1}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/good","Test":"TestB","Elapsed":0}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Elapsed":2.5}
{"Action":"output","Package":"github.com/tandem-serving/tandem/empty","Output":"?   \tempty\t[no test files]\n"}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/empty","Elapsed":0}
{"Action":"output","Package":"github.com/tandem-serving/tandem/none","Output":"testing: warning: no tests to run\n"}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/none","Elapsed":0}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/bad","Test":"TestC","Elapsed":0.2}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/bad","Test":"TestD","Elapsed":0}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/bad","Elapsed":1}
{"Action":"output","Package":"github.com/tandem-serving/tandem/died","Test":"TestE","Output":"SIGSEGV: segmentation violation\n"}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/died","Elapsed":1}
{"ImportPath":"github.com/tandem-serving/tandem/broken","Action":"build-output","Output":"broken.go:1:1: syntax error\n"}
{"ImportPath":"github.com/tandem-serving/tandem/broken","Action":"build-fail"}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/broken","Elapsed":0,"FailedBuild":"github.com/tandem-serving/tandem/broken"}
`

// write makes the results of a step.
func write(t *testing.T, dir, step, status, stream string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, step), 0o755); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"status": status + "\n"}
	if stream != "" {
		files["tests.json"] = strings.TrimSpace(stream)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, step, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A run counts what passed, names each failure, and takes a skip that is not listed for a failure.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "race", "1", stream)
	write(t, dir, "vet", "0", "")
	write(t, dir, "gofmt", "2", "")
	write(t, dir, "plain", "1", `{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Test":"TestA"}`)
	var log, out bytes.Buffer
	r := &report{log: &log, skips: []skip{{"race", "good", "TestB", "needs luck"}}}
	for _, step := range []string{"race", "vet", "gofmt", "plain", "arm64"} {
		r.step(dir, step)
	}
	r.summary(&out)
	text := out.String()
	for _, want := range []string{
		"good: worth reading",
		"race: good skipped TestB: needs luck",
		"\n  race: bad TestC\n",
		"race: bad TestD: this skip is not listed",
		"race: died TestE\n",
		"race: broken\n",
		"race: none: no test ran",
		"gofmt: exit status 2; see ",
		"plain: exit status 1; see ",
		"arm64: did not run",
		"\n4 passed, 8 failed, 1 skipped\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	if strings.Index(text, "2.5 s  race         good") > strings.Index(text, "1.0 s  race         bad") {
		t.Errorf("times are not sorted:\n%s", text)
	}
	if !strings.Contains(log.String(), "race died: SIGSEGV: segmentation violation\n") {
		t.Errorf("log: %s", &log)
	}
	for _, want := range []string{"4 passed, 8 failed, 1 skipped", "- FAILED: race: bad TestC", "| race | good | 2.5 | 3 |", "- good: worth reading"} {
		if page := r.page(); !strings.Contains(page, want) {
			t.Errorf("no %q in:\n%s", want, page)
		}
	}
}

// A run that picks tests has packages without any; the progress of a fuzz target is a note.
func TestPicked(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "fuzz", "0", `{"Action":"run","Package":"github.com/tandem-serving/tandem/good","Test":"FuzzX"}
{"Action":"output","Package":"github.com/tandem-serving/tandem/good","Test":"FuzzX","Output":"fuzz: elapsed: 9s, execs: 1661 (551/sec), new interesting: 1 (total: 5)\n"}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Test":"FuzzX","Elapsed":9}
{"Action":"output","Package":"github.com/tandem-serving/tandem/none","Output":"testing: warning: no tests to run\n"}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/none","Elapsed":0}`)
	r := &report{log: new(bytes.Buffer), picked: true}
	r.step(dir, "fuzz")
	if len(r.failures) != 0 || r.passed != 1 || len(r.notes) != 1 || r.notes[0] != "good FuzzX: 1661 executions, 1 inputs that cover new code, 5 in all" {
		t.Errorf("%d passed, failures %q, notes %q", r.passed, r.failures, r.notes)
	}
}

func TestSkips(t *testing.T) {
	path := filepath.Join(t.TempDir(), "skips.txt")
	read := func(text string) (*report, error) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r := &report{}
		return r, r.readSkips(path)
	}
	for _, c := range []struct {
		step, pkg, test string
		listed          bool
	}{
		{"race", "internal/rpc", "TestA", true},
		{"race", "internal/rpc", "TestA/sub", true},
		{"plain", "internal/rpc", "TestA", false},
		{"race", "internal/rpc", "TestAnother", false},
		{"portable", "engine", "TestB", true},
		{"portable", "engine/model", "TestB", false},
	} {
		r, err := read("# a comment\n\nrace  internal/rpc TestA  the race detector allocates\n* engine TestB needs a device\n")
		if err != nil {
			t.Fatal(err)
		}
		if r.skip(c.step, c.pkg, c.test); (r.skipped == 1) != c.listed || (len(r.failures) == 0) != c.listed {
			t.Errorf("%v: %d skipped, failures %q", c, r.skipped, r.failures)
		}
	}
	if _, err := read("race internal/rpc TestA\n"); err == nil {
		t.Error("a skip without a reason is accepted")
	}
	if err := new(report).readSkips("../testdata/skips"); err != nil {
		t.Error(err)
	}
}
