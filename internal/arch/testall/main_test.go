package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// stream is the output of go test -json with one package of each fate.
const stream = `
{"Action":"start","Package":"github.com/tandem-serving/tandem/good"}
{"Action":"run","Package":"github.com/tandem-serving/tandem/good","Test":"TestA"}
{"Action":"output","Package":"github.com/tandem-serving/tandem/good","Test":"TestA","Output":"    a_test.go:1: note: worth reading\n"}
{"Action":"output","Package":"github.com/tandem-serving/tandem/good","Test":"TestA","Output":"    a_test.go:1: not worth reading\n"}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Test":"TestA/sub","Elapsed":0.1}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Test":"TestA","Elapsed":0.1}
{"Action":"output","Package":"github.com/tandem-serving/tandem/good","Test":"TestB","Output":"    a_test.go:2: needs luck\n"}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/good","Test":"TestB","Elapsed":0}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good","Elapsed":2.5}
{"Action":"output","Package":"github.com/tandem-serving/tandem/empty","Output":"?   \tempty\t[no test files]\n"}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/empty","Elapsed":0}
{"Action":"output","Package":"github.com/tandem-serving/tandem/bad","Test":"TestC","Output":"    c_test.go:3: seed 9: got 1, want 2\n"}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/bad","Test":"TestC","Elapsed":0.2}
{"Action":"output","Package":"github.com/tandem-serving/tandem/bad","Test":"TestD","Output":"    c_test.go:4: it is late\n"}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/bad","Test":"TestD","Elapsed":0}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/bad","Elapsed":1}
{"Action":"output","Package":"github.com/tandem-serving/tandem/died","Test":"TestE","Output":"SIGSEGV: segmentation violation\n"}
{"Action":"output","Package":"github.com/tandem-serving/tandem/died","Output":"FAIL\tdied\n"}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/died","Elapsed":1}
{"ImportPath":"github.com/tandem-serving/tandem/broken","Action":"build-output","Output":"broken.go:1:1: syntax error\n"}
{"ImportPath":"github.com/tandem-serving/tandem/broken","Action":"build-fail"}
{"Action":"fail","Package":"github.com/tandem-serving/tandem/broken","Elapsed":0,"FailedBuild":"github.com/tandem-serving/tandem/broken"}
`

func newReport(out io.Writer) *report {
	return &report{out: out, log: io.Discard, began: time.Now(), skips: skips{{"race", "good", "TestB", "needs luck"}}}
}

// A run counts what passed, shows what failed in full, and takes a skip that is
// not listed for a failure.
func TestReport(t *testing.T) {
	var out bytes.Buffer
	r := newReport(&out)
	seen := r.events(step{name: "race"}, strings.NewReader(strings.TrimSpace(stream)))
	r.check("vet", time.Second, nil, "fine")
	r.check("gofmt", time.Second, errors.New("these need work"), "ugly.go\n")
	r.summary()
	text := out.String()
	for _, want := range []string{
		"ok   race             2.5 s good (3)",
		"(no tests)",
		"good: worth reading",
		"race: good skipped TestB: needs luck",
		"FAIL race         bad TestC\n     |     c_test.go:3: seed 9: got 1, want 2\n",
		"FAIL race         bad TestD\n     |     c_test.go:4: it is late\n     |     this skip is not listed",
		"FAIL race         died\n     | SIGSEGV: segmentation violation\n     | FAIL\tdied\n",
		"FAIL race         broken\n     | broken.go:1:1: syntax error\n",
		"FAIL gofmt        these need work\n     | ugly.go\n",
		"\n  race: bad TestC\n",
		"\n3 passed, 5 failed, 1 skipped\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	if strings.Contains(text, "not worth reading") {
		t.Errorf("a passed test's output is shown:\n%s", text)
	}
	if len(seen) != 5 {
		t.Errorf("results of %v", seen)
	}
	if strings.Index(text, "2.5 s  race         good") > strings.Index(text, "1.0 s  race         bad") {
		t.Errorf("times are not sorted:\n%s", text)
	}
}

// Where every package must have run a test, none is a failure; so is a package
// without a result, and a skip that is listed for another step.
func TestReportMissing(t *testing.T) {
	var out bytes.Buffer
	r := newReport(&out)
	r.events(step{name: "binary", each: true}, strings.NewReader(`{"Action":"skip","Package":"github.com/tandem-serving/tandem/empty"}
{"Action":"skip","Package":"github.com/tandem-serving/tandem/good","Test":"TestB"}
{"Action":"pass","Package":"github.com/tandem-serving/tandem/good"}
no JSON`))
	if r.failed != 3 || r.passed != 0 || r.skipped != 0 {
		t.Errorf("%d passed, %d failed, %d skipped:\n%s", r.passed, r.failed, r.skipped, &out)
	}
	runTests(t.Context(), r, step{name: "plain"}, []string{"./nowhere"}, options{})
	if r.failed < 4 {
		t.Errorf("a package that does not exist goes unnoticed:\n%s", &out)
	}
}

// Checks fail by status, and quiet ones by printing.
func TestCheck(t *testing.T) {
	for _, c := range []struct {
		quiet bool
		sh    string
		ok    bool
	}{{false, "echo fine", true}, {true, "true", true}, {true, "echo ugly.go", false}, {false, "exit 1", false}, {true, "exit 1", false}} {
		r := newReport(io.Discard)
		runCheck(context.Background(), r, step{name: "x", quiet: c.quiet, command: []string{"sh", "-c", c.sh}})
		if ok := r.failed == 0; ok != c.ok || r.passed+r.failed != 1 {
			t.Errorf("%q: %d passed, %d failed", c.sh, r.passed, r.failed)
		}
	}
}

func TestSkips(t *testing.T) {
	path := filepath.Join(t.TempDir(), "skips.txt")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# a comment\n\nrace  internal/rpc TestA  the race detector allocates\n* engine TestB needs a device\n")
	ss, err := readSkips(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ step, pkg, test, want string }{
		{"race", "internal/rpc", "TestA", "the race detector allocates"},
		{"race", "internal/rpc", "TestA/sub", "the race detector allocates"},
		{"plain", "internal/rpc", "TestA", ""},
		{"race", "internal/rpc", "TestAnother", ""},
		{"portable", "engine", "TestB", "needs a device"},
		{"portable", "engine/model", "TestB", ""},
	} {
		if got := ss.reason(c.step, c.pkg, c.test); got != c.want {
			t.Errorf("%v: %q", c, got)
		}
	}
	write("race internal/rpc TestA\n")
	if _, err := readSkips(path); err == nil {
		t.Error("a skip without a reason is accepted")
	}
	if _, err := readSkips("../testdata/skips"); err != nil {
		t.Error(err)
	}
}

// Every package runs under some step, and the tables name packages that exist.
func TestSteps(t *testing.T) {
	t.Chdir("../../..")
	all, err := listPackages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ran := map[string]bool{}
	for _, s := range steps {
		if s.packages == nil || s.fuzz {
			continue
		}
		for _, p := range s.packages(all) {
			ran[short(p)] = true
		}
	}
	known := map[string]bool{}
	for _, p := range all {
		known[short(p)] = true
		if !ran[short(p)] {
			t.Errorf("no step runs the tests of %s", p)
		}
	}
	for _, table := range []map[string]string{withoutRace, alsoPlain} {
		for p := range table {
			if !known[p] {
				t.Errorf("a table names %s, which does not exist", p)
			}
		}
	}
	if ok, err := run(t.Context(), options{only: []string{"luck"}, out: io.Discard}); ok || err == nil {
		t.Error("a step that does not exist is accepted")
	}
}

// A soak is the steps that are marked; its page says what ran, and that it was
// shortened when it was.
func TestRecord(t *testing.T) {
	names := soakSteps()
	for _, want := range []string{"fuzz", "race", "plain", "binary"} {
		if !slices.Contains(names, want) {
			t.Errorf("a soak lacks %s: %v", want, names)
		}
	}
	if (&options{}).wants(step{name: "fuzz", soak: true, long: true}) || !(&options{soak: true}).wants(step{name: "fuzz", soak: true, long: true}) {
		t.Error("fuzzing belongs to a soak, and to nothing else")
	}
	for _, c := range []struct {
		o     options
		title string
	}{
		{options{minutes: wholeMinutes, fuzz: wholeFuzz}, "# Soak\n"},
		{options{minutes: 10, fuzz: wholeFuzz}, "# Soak, shortened\n"},
		{options{minutes: wholeMinutes, fuzz: wholeFuzz, run: "TestA"}, "# Soak, shortened\n"},
	} {
		r := newReport(io.Discard)
		r.events(step{name: "race"}, strings.NewReader(strings.TrimSpace(stream)))
		path := filepath.Join(t.TempDir(), "soak.md")
		if err := r.record(path, c.o, []string{"race"}); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{c.title, "- Machine: ", "2 passed, 4 failed, 1 skipped", "FAILED: race: bad TestC", "| race | good | 2.5 | 3 |", "- good: worth reading"} {
			if !strings.Contains(string(text), want) {
				t.Errorf("no %q in:\n%s", want, text)
			}
		}
	}
}

func TestFuzzTargets(t *testing.T) {
	targets, err := fuzzTargets([]string{module + "/testdata"})
	if err != nil || len(targets) != 0 {
		t.Errorf("%v, %v", targets, err)
	}
	if m := counted.FindStringSubmatch("fuzz: elapsed: 9s, execs: 1661 (551/sec), new interesting: 1 (total: 5)"); m == nil || m[1] != "1661" || m[3] != "5" {
		t.Errorf("%q", m)
	}
	if !fuzzFunc.MatchString("\nfunc FuzzX(f *testing.F) {") || fuzzFunc.MatchString("\nfunc fuzzX(f *testing.F) {") {
		t.Error("fuzz functions are not found")
	}
}

// Neighbours that may run together are one group, whatever is left out between
// them, and what each finds is counted once.
func TestStepsTogether(t *testing.T) {
	all := []step{{name: "a"}, {name: "b", together: true}, {name: "left out"}, {name: "c", together: true}, {name: "d", together: true}, {name: "e"}, {name: "f", together: true}}
	var got []string
	for group := range groups(all, func(s step) bool { return s.name != "left out" }) {
		names := ""
		for _, s := range group {
			names += s.name
		}
		got = append(got, names)
	}
	if want := []string{"a", "bcd", "e", "f"}; !slices.Equal(got, want) {
		t.Errorf("groups %q, want %q", got, want)
	}

	var out bytes.Buffer
	r := newReport(&out)
	var mu sync.Mutex
	var met sync.Once
	running, most := 0, 0
	two := make(chan struct{})
	r.together(all[1:], func(r *report, s step) {
		mu.Lock()
		running++
		most = max(most, running)
		if running == atOnce {
			met.Do(func() { close(two) })
		}
		mu.Unlock()
		<-two
		r.check(s.name, time.Second, nil, "")
		r.events(s, strings.NewReader(strings.TrimSpace(stream)))
		mu.Lock()
		running--
		mu.Unlock()
	})
	one := newReport(io.Discard)
	one.check("vet", time.Second, nil, "")
	one.events(step{name: "race"}, strings.NewReader(strings.TrimSpace(stream)))
	if n := len(all) - 1; most != atOnce || r.passed != n*one.passed || r.failed == 0 || len(r.failures) != r.failed || len(r.times) != n*len(one.times) {
		t.Errorf("%d at once, %d passed of %d, %d failed, %d failures, %d times of %d", most, r.passed, n*one.passed, r.failed, len(r.failures), len(r.times), n*len(one.times))
	}
}
