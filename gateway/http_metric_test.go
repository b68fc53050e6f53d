package gateway

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// The label route has every route, and no other.
func TestHTTPMetricHasEveryRoute(t *testing.T) {
	want := []string{"other"}
	for i := range routes {
		want = append(want, routes[i].Path)
		path := strings.NewReplacer("{model}", "org/name", "{node}", "d1", "{response}", "resp_1/cancel").Replace(routes[i].Path)
		if got := routeLabel(path); got != routes[i].Path {
			t.Errorf("%s counts as %s, want %s", path, got, routes[i].Path)
		}
	}
	slices.Sort(want)
	if got := slices.Sorted(slices.Values(metrics.HTTPRoutes)); !slices.Equal(got, slices.Compact(want)) {
		t.Errorf("metrics.HTTPRoutes are\n%q, the table of routes has\n%q", got, slices.Compact(want))
	}
	if got := routeLabel("/v1/moderations"); got != "other" {
		t.Errorf("a path without a route counts as %s", got)
	}
}

// The label status has every status that the sources answer and the API's document
// names, and a class for each other one.
func TestHTTPMetricHasEveryStatus(t *testing.T) {
	answers := map[int]string{} // status: place
	for _, pattern := range []string{"*.go", "../gateway/api/openai/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) < 5 {
			t.Fatalf("%d files of %s, %v", len(files), pattern, err)
		}
		for _, name := range files {
			if !strings.HasSuffix(name, "_test.go") {
				statuses(t, name, answers)
			}
		}
	}
	for i := range routes {
		for _, status := range routes[i].Errors {
			answers[status] = routes[i].Path
		}
	}
	if len(answers) < 15 {
		t.Errorf("only %d statuses are found: %v", len(answers), answers)
	}
	for status, place := range answers {
		if !slices.Contains(metrics.HTTPStatuses, strconv.Itoa(status)) {
			t.Errorf("%s answers %d, which metrics.HTTPStatuses lacks", place, status)
		}
	}
	for status, want := range map[int]string{200: "200", 404: "404", 206: "2xx", 302: "302", 307: "3xx", 418: "4xx", 529: "5xx"} {
		if got := statusLabel(status); got != want {
			t.Errorf("%d counts as %s, want %s", status, got, want)
		}
	}
}

// statuses finds HTTP statuses in a source: of fields and arguments called Status, and
// constants of fasthttp.
func statuses(t *testing.T, name string, found map[int]string) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	add := func(e ast.Expr) {
		if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.INT {
			if n, err := strconv.Atoi(lit.Value); err == nil && n >= 200 && n < 600 {
				found[n] = fset.Position(lit.Pos()).String()
			}
		}
	}
	constants := map[string]int{"StatusNoContent": fasthttp.StatusNoContent, "StatusFound": fasthttp.StatusFound, "StatusTooManyRequests": fasthttp.StatusTooManyRequests, "StatusBadRequest": fasthttp.StatusBadRequest, "StatusOK": fasthttp.StatusOK,
		"StatusContinue": 0, "StatusExpectationFailed": fasthttp.StatusExpectationFailed, "StatusMessage": 0}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.KeyValueExpr:
			if key, ok := n.Key.(*ast.Ident); ok && strings.EqualFold(key.Name, "status") {
				add(n.Value)
			}
		case *ast.CallExpr:
			called := ""
			switch f := n.Fun.(type) {
			case *ast.SelectorExpr:
				called = f.Sel.Name
			case *ast.Ident:
				called = f.Name
			}
			if strings.Contains(strings.ToLower(called), "status") || called == "count" {
				for _, arg := range n.Args {
					add(arg)
				}
			}
		case *ast.AssignStmt:
			for i, left := range n.Lhs {
				if sel, ok := left.(*ast.SelectorExpr); ok && strings.EqualFold(sel.Sel.Name, "status") && i < len(n.Rhs) {
					add(n.Rhs[i])
				}
			}
		case *ast.SelectorExpr:
			if pkg, ok := n.X.(*ast.Ident); ok && pkg.Name == "fasthttp" && strings.HasPrefix(n.Sel.Name, "Status") {
				status, known := constants[n.Sel.Name]
				if !known {
					t.Errorf("%s: fasthttp.%s is not in this test's table", fset.Position(n.Pos()), n.Sel.Name)
				}
				if status > 0 {
					found[status] = fset.Position(n.Pos()).String()
				}
			}
		}
		return true
	})
}
