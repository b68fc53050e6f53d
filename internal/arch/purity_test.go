package arch

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// pureImports is all that the pure packages may import besides each other. What
// is not here has a clock, a lock, a network, a file or luck in it; a new line
// needs the certainty that it has none.
var pureImports = []string{
	"bytes", "cmp", "container/heap", "container/list", "crypto/sha256", "encoding/binary", "errors", "fmt", "html", "maps", "math", "math/big", "math/bits", "math/rand/v2",
	"path", "regexp", "regexp/syntax", "slices", "sort", "strconv", "strings", "time", "unicode", "unicode/utf16", "unicode/utf8",
	"github.com/cespare/xxhash/v2",
	module + "/engine/backend", module + "/engine/kvcache", module + "/engine/memory", module + "/engine/sample", module + "/engine/scheduler", module + "/gateway/render/parse/args", module + "/internal/jsonscan", module + "/internal/lengths",
}

// impure are the functions and types of those packages that a decider must not
// touch, called or not. A trailing * stands for any ending.
var impure = map[string][]string{
	"time": {"Now", "Since", "Until", "After*", "Sleep", "Tick*", "New*", "Timer", "Local", "LoadLocation*"},
	"fmt":  {"Print*", "Scan*"},
	// Only generators that are given their seed: the others are global.
	"math/rand/v2": {"ExpFloat64", "Float*", "Int*", "N", "NormFloat64", "Perm", "Shuffle", "Uint*"},
	// Map order as a sequence: sort it where it is made, by slices.Sorted.
	"maps": {"All", "Keys", "Values"},
}

// mapRanges lists the functions of pure packages that may range over a map,
// with the reason why its order reaches no decision.
var mapRanges = map[string]string{
	"gateway/route.(*Index).Clear":           "each entry is removed by itself, whatever came before",
	"deploy/planner/control.(*Quorum).Leads": "each entry is changed or removed by itself, and then counted",
}

// purity type-checks one pure package and collects what breaks the rules.
type purity struct {
	fset   *token.FileSet
	info   *types.Info
	ranges map[string]string // as mapRanges
	used   map[string]bool   // keys of ranges that were needed
	bad    []string
}

func (p *purity) say(n ast.Node, format string, args ...any) {
	pos := p.fset.Position(n.Pos())
	p.bad = append(p.bad, fmt.Sprintf("%s:%d: %s", pos.Filename, pos.Line, fmt.Sprintf(format, args...)))
}

// file checks one file of package pkg.
func (p *purity) file(pkg string, f *ast.File) {
	for _, i := range f.Imports {
		if path, err := strconv.Unquote(i.Path.Value); err != nil || !slices.Contains(pureImports, path) {
			p.say(i, "import of %s", i.Path.Value)
		}
	}
	for _, d := range f.Decls {
		where := pkg
		if fn, ok := d.(*ast.FuncDecl); ok {
			where += "." + funcName(fn)
		}
		var sorted ast.Expr // the argument of slices.Sorted that was last seen
		ast.Inspect(d, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				p.say(n, "go statement")
			case *ast.SelectStmt:
				p.say(n, "select")
			case *ast.ChanType:
				p.say(n, "channel type")
			case *ast.SendStmt:
				p.say(n, "send on a channel")
			case *ast.UnaryExpr:
				if n.Op == token.ARROW {
					p.say(n, "receive from a channel")
				}
			case *ast.RangeStmt:
				p.rangeOver(where, n)
			case *ast.CallExpr:
				if fn := p.called(n); fn == "slices.Sorted" && len(n.Args) == 1 {
					sorted = n.Args[0]
				} else if n == sorted && (fn == "maps.Keys" || fn == "maps.Values") {
					for _, a := range n.Args {
						ast.Inspect(a, func(n ast.Node) bool { p.use(n); return true })
					}
					return false
				}
			default:
				p.use(n)
			}
			return true
		})
	}
}

// called names the function of another package that a call calls.
func (p *purity) called(c *ast.CallExpr) string {
	if s, ok := c.Fun.(*ast.SelectorExpr); ok {
		if o := p.info.Uses[s.Sel]; o != nil && o.Pkg() != nil {
			return o.Pkg().Path() + "." + o.Name()
		}
	}
	return ""
}

// use checks a name that stands for something impure of another package,
// however that package was imported.
func (p *purity) use(n ast.Node) {
	id, ok := n.(*ast.Ident)
	if !ok {
		return
	}
	o := p.info.Uses[id]
	if o == nil || o.Pkg() == nil || o.Parent() != o.Pkg().Scope() {
		return // a local name, a field or a method
	}
	for _, name := range impure[o.Pkg().Path()] {
		start, any := strings.CutSuffix(name, "*")
		if o.Name() == start || any && strings.HasPrefix(o.Name(), start) {
			p.say(id, "%s.%s", o.Pkg().Path(), o.Name())
		}
	}
}

// rangeOver checks what a loop ranges over.
func (p *purity) rangeOver(where string, n *ast.RangeStmt) {
	t := p.info.TypeOf(n.X)
	if t == nil {
		p.say(n, "range over something of unknown type")
		return
	}
	for _, u := range underlying(t) {
		switch u.(type) {
		case *types.Chan:
			p.say(n, "range over a channel")
		case *types.Map:
			if p.ranges[where] == "" {
				p.say(n, "range over a map in %s: its order must not reach a decision; sort the keys, or give the reason in mapRanges", where)
			}
			p.used[where] = true
		}
	}
}

// underlying returns what a type is made of; a type parameter can be several.
func underlying(t types.Type) []types.Type {
	param, ok := types.Unalias(t).(*types.TypeParam)
	if !ok {
		return []types.Type{t.Underlying()}
	}
	var all []types.Type
	iface := param.Constraint().Underlying().(*types.Interface)
	for i := range iface.NumEmbeddeds() {
		switch e := iface.EmbeddedType(i).(type) {
		case *types.Union:
			for j := range e.Len() {
				all = append(all, e.Term(j).Type().Underlying())
			}
		default:
			all = append(all, e.Underlying())
		}
	}
	return all
}

// funcName is a function's name as Go prints it, with its receiver's type.
func funcName(fn *ast.FuncDecl) string {
	if fn.Recv == nil || len(fn.Recv.List) == 0 {
		return fn.Name.Name
	}
	t := fn.Recv.List[0].Type
	star, ok := t.(*ast.StarExpr)
	if ok {
		t = star.X
	}
	if i, generic := t.(*ast.IndexExpr); generic {
		t = i.X
	}
	name := "?"
	if id, plain := t.(*ast.Ident); plain {
		name = id.Name
	}
	if ok {
		name = "(*" + name + ")"
	}
	return name + "." + fn.Name.Name
}

// exports makes an importer for the packages that pure code may import.
func exports(t *testing.T, fset *token.FileSet) types.Importer {
	t.Helper()
	args := append([]string{"list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}"}, pureImports...)
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, export, _ := strings.Cut(strings.TrimSpace(line), "\t")
		files[path] = export
	}
	return importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		if files[path] == "" {
			return nil, fmt.Errorf("%s is not among the imports of pure packages", path)
		}
		return os.Open(files[path])
	})
}

// check type-checks the files of a package and holds them against the rules.
// The errors of the type checker are returned apart from what breaks the rules.
func check(imp types.Importer, fset *token.FileSet, pkg string, files []*file, ranges map[string]string) (*purity, []string) {
	p := &purity{fset: fset, ranges: ranges, used: map[string]bool{}, info: &types.Info{
		Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{},
	}}
	var parsed []*ast.File
	var errs []string
	for _, f := range files {
		a, err := parser.ParseFile(fset, f.path, f.text, parser.SkipObjectResolution)
		if err != nil {
			return p, []string{err.Error()}
		}
		parsed = append(parsed, a)
	}
	conf := types.Config{Importer: imp, FakeImportC: true, Error: func(err error) { errs = append(errs, err.Error()) }}
	// Errors are all given to Error as well.
	_, _ = conf.Check(module+"/"+pkg, fset, parsed, p.info)
	for _, a := range parsed {
		p.file(pkg, a)
	}
	return p, errs
}

func TestPurity(t *testing.T) {
	fset := token.NewFileSet()
	imp := exports(t, fset)
	all := goFiles(t)
	used := map[string]bool{}
	for _, pkg := range pure {
		var files []*file
		for _, f := range all {
			if f.pkg == pkg && !f.test() {
				files = append(files, f)
			}
		}
		if len(files) == 0 {
			t.Errorf("%s has no files", pkg)
			continue
		}
		p, errs := check(imp, fset, pkg, files, mapRanges)
		for _, e := range errs {
			t.Errorf("type check: %s", e)
		}
		for _, b := range p.bad {
			t.Error(b)
		}
		for where := range p.used {
			used[where] = true
		}
	}
	for where := range mapRanges {
		if !used[where] {
			t.Errorf("mapRanges has a line for %s, which ranges over no map", where)
		}
	}
}
