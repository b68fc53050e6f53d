package arch

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// Lengths beyond which a file or a function is worth another look.
const (
	longFile = 600 // lines
	longFunc = 70  // lines
)

// lengths returns a line per file and function that is longer than that.
func lengths(files []*file) ([]string, error) {
	var long []string
	for _, f := range files {
		if f.generated() {
			continue
		}
		if n := bytes.Count(f.text, []byte("\n")); n > longFile {
			long = append(long, fmt.Sprintf("%s has %d lines", f.path, n))
		}
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, f.path, f.text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range parsed.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			if n := fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line + 1; n > longFunc {
				long = append(long, fmt.Sprintf("%s:%d: %s has %d lines", f.path, fset.Position(fn.Pos()).Line, funcName(fn), n))
			}
		}
	}
	return long, nil
}

// Long files and functions are told, not forbidden.
func TestLengths(t *testing.T) {
	long, err := lengths(goFiles(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range long {
		t.Logf("note: %s", l)
	}
	text := "package x\n\nfunc short() {\n}\n\nfunc long() {\n"
	for range longFile {
		text += "\t_ = 0\n"
	}
	got, err := lengths([]*file{{path: "x.go", text: []byte(text + "}\n")}})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"x.go has 607 lines", "x.go:6: long has 602 lines"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// generatedBy lists the code that a tool wrote, and from what. No other file
// may carry the header of generated code.
var generatedBy = map[string]string{
	"internal/rpc/nodepb/node.pb.go": "internal/rpc/node.proto",
}

func TestGeneratedHeader(t *testing.T) {
	seen := 0
	for _, f := range goFiles(t) {
		if _, listed := generatedBy[f.path]; listed {
			seen++
			if !f.generated() {
				t.Errorf("%s lacks its header: // Code generated … DO NOT EDIT.", f.path)
			}
		} else if f.generated() {
			t.Errorf("%s says that it is generated; list it in generatedBy with its source", f.path)
		}
	}
	if seen != len(generatedBy) {
		t.Errorf("%d of %d generated files exist", seen, len(generatedBy))
	}
	if by := (&file{path: "x.go", text: []byte("// Written by hand.\n\npackage x\n")}); by.generated() {
		t.Error("a comment passes as the header of generated code")
	}
}

// toolVersions are the lines of a generated file that name its tools.
var toolVersions = regexp.MustCompile(`(?m)^// \t(protoc|protoc-gen-go) +v.*\n`)

// The committed code is what `make generate` writes. The plugin is that of
// go.mod; protoc may be any, its version leaves no other trace.
func TestGeneratedIsCurrent(t *testing.T) {
	protoc, err := exec.LookPath("protoc")
	if err != nil {
		t.Skip("needs protoc: make test and make generate install it")
	}
	dir := t.TempDir()
	plugin := filepath.Join(dir, "protoc-gen-go")
	run := func(name string, args ...string) {
		cmd := exec.Command(name, args...)
		cmd.Dir = filepath.Join(root, "internal/rpc")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v\n%s", name, args, err, out)
		}
	}
	run("go", "build", "-o", plugin, "google.golang.org/protobuf/cmd/protoc-gen-go")
	run(protoc, "--plugin="+plugin, "--go_out="+dir, "--go_opt=paths=source_relative", "node.proto")
	got, err := os.ReadFile(filepath.Join(dir, "node.pb.go"))
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(root, "internal/rpc/nodepb/node.pb.go"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(toolVersions.ReplaceAll(got, nil), toolVersions.ReplaceAll(want, nil)) {
		t.Error("internal/rpc/nodepb is not what node.proto says: run make generate")
	}
}
