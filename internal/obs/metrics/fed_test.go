package metrics

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// A metric that nothing sets would be scraped as a zero that means nothing:
// every row is named by code that feeds it.
func TestEveryMetricIsFed(t *testing.T) {
	table, err := os.ReadFile("rows.go")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	root := os.DirFS("../../..")
	err = fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != "." {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(path, "internal/obs/metrics/") {
			return nil
		}
		b, err := fs.ReadFile(root, path)
		code.Write(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile(`(?m)^\t([A-Z]\w*) += [a-z]+\("`).FindAllSubmatch(table, -1)
	if len(rows) != len(Rows) {
		t.Fatalf("found %d rows in rows.go, the table has %d", len(rows), len(Rows))
	}
	fed := map[string]bool{}
	for _, m := range regexp.MustCompile(`\bmetrics\.([A-Z]\w*)`).FindAllStringSubmatch(code.String(), -1) {
		fed[m[1]] = true
	}
	for _, m := range rows {
		if id := string(m[1]); !fed[id] {
			t.Errorf("%s is exposed, and nothing sets it", id)
		}
	}
}
