package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// module is the import path of the root package.
const module = "github.com/tandem-serving/tandem"

// root is the folder of go.mod.
const root = "../.."

// file is one Go source file of the module.
type file struct {
	path string // relative to root, with slashes
	pkg  string // folder relative to root; "." is main
	text []byte
}

func (f *file) test() bool { return strings.HasSuffix(f.path, "_test.go") }

// generated says whether the file carries the header that tools agree on.
func (f *file) generated() bool {
	parsed, err := parser.ParseFile(token.NewFileSet(), f.path, f.text, parser.PackageClauseOnly|parser.ParseComments)
	return err == nil && ast.IsGenerated(parsed)
}

// goFiles reads every Go file of the tree, whatever its build tags, but not
// those that the go command ignores.
func goFiles(t *testing.T) []*file {
	t.Helper()
	var files []*file
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (name[0] == '.' || name[0] == '_' || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(name) != ".go" || name[0] == '.' || name[0] == '_' {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		pkg := "."
		if i := strings.LastIndexByte(rel, '/'); i >= 0 {
			pkg = rel[:i]
		}
		files = append(files, &file{path: rel, pkg: pkg, text: text})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 50 {
		t.Fatalf("only %d Go files below %s: the tests look in the wrong place", len(files), root)
	}
	return files
}
