package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// logged returns the literal texts of a file's log lines from INFO on: the
// message of a call of Info, Warn or Error on something called log, Log, Logger or
// slog, or the parts of it that are literal.
func logged(f *file) ([]string, error) {
	parsed, err := parser.ParseFile(token.NewFileSet(), f.path, f.text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var texts []string
	ast.Inspect(parsed, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		method, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || !slices.Contains([]string{"Info", "Warn", "Error"}, method.Sel.Name) {
			return true
		}
		name := ""
		switch on := method.X.(type) {
		case *ast.Ident:
			name = on.Name
		case *ast.SelectorExpr:
			name = on.Sel.Name
		}
		if !slices.Contains([]string{"log", "Log", "Logger", "logger", "slog"}, name) {
			return true
		}
		ast.Inspect(call.Args[0], func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err == nil {
					texts = append(texts, strings.TrimSpace(text))
				}
			}
			return true
		})
		return true
	})
	return texts, nil
}

// docs/logs.md explains every line that operators may see.
func TestLogLinesAreExplained(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/logs.md"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range goFiles(t) {
		if f.test() || strings.HasPrefix(f.path, "bench/") {
			continue
		}
		texts, err := logged(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range texts {
			n++
			if !strings.Contains(string(page), text) {
				t.Errorf("%s logs %q, which docs/logs.md does not explain", f.path, text)
			}
		}
	}
	if n < 40 {
		t.Errorf("found %d log lines", n)
	}
	got, err := logged(&file{path: "x.go", text: []byte(`package x
func f() { o.log.Info("a "+b); slog.Warn(fmt.Sprintf("c %d", 1), "d", "e"); log.Debug("f"); t.Error("g") }`)})
	if err != nil || !slices.Equal(got, []string{"a", "c %d"}) {
		t.Errorf("found %q, %v", got, err)
	}
}
