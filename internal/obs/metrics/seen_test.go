package metrics

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each line of testdata/seen is a metric, roles, and a test, as package:Test, that
// saw it carry its right value there, other than zero; "zero" stands for one that
// the role exposes and never counts. A row that nobody has looked at has no line:
// every metric needs one for each role, and a test of internal/e2e in it, where a
// gateway has two prefill and two decode nodes. Those hold themselves to their lines
// when they run.
func TestEveryMetricIsSeen(t *testing.T) {
	text, err := os.ReadFile("testdata/seen")
	if err != nil {
		t.Fatal(err)
	}
	ids := rowNames(t)
	code := map[string]string{} // of the test files of a package
	seen, through := map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 || ids[f[0]] == "" || strings.Trim(f[1], "GPD") != "" {
			t.Errorf("%q: want a metric of the table, roles of GPD and a test", strings.TrimSpace(line))
			continue
		}
		for _, role := range f[1] {
			row := f[0] + " " + string(role)
			seen[row] = true
			through[row] = through[row] || f[2] == "zero" || strings.HasPrefix(f[2], "internal/e2e:")
		}
		if f[2] == "zero" {
			continue
		}
		dir, test, _ := strings.Cut(f[2], ":")
		if code[dir] == "" {
			code[dir] = testsOf(t, dir)
		}
		body := regexp.MustCompile(`(?s)\nfunc ` + regexp.QuoteMeta(test) + `\(t \*testing.T\) \{.*?\n\}\n`).FindString(code[dir])
		switch {
		case body == "":
			t.Errorf("%s: %s has no test %s", f[0], dir, test)
		case dir != "internal/e2e" && !strings.Contains(body, "metrics."+ids[f[0]]) && !strings.Contains(body, f[0]):
			t.Errorf("%s: the test %s of %s does not speak of it", f[0], test, dir)
		}
	}
	for i := range Rows {
		for at, role := range "GPD" {
			if r := &Rows[i]; r.Roles&(1<<at) != 0 && !seen[r.Name+" "+string(role)] {
				t.Errorf("no test has seen %s at its right value in role %c: write one and name it in testdata/seen", r.Name, role)
			} else if r.Roles&(1<<at) != 0 && !through[r.Name+" "+string(role)] {
				t.Errorf("no test of internal/e2e has seen %s in role %c behind a gateway", r.Name, role)
			}
		}
	}
}

// rowNames are the names in code of the metrics of the table.
func rowNames(t *testing.T) map[string]string {
	t.Helper()
	table, err := os.ReadFile("rows.go")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\t([A-Z]\w*) += [a-z]+\("([^"]*)"`).FindAllSubmatch(table, -1) {
		out[string(m[2])] = string(m[1])
	}
	if len(out) != len(Rows) {
		t.Fatalf("found %d rows in rows.go, the table has %d", len(out), len(Rows))
	}
	return out
}

func testsOf(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../../..", strings.TrimPrefix(dir, "main"), "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	return all.String()
}
