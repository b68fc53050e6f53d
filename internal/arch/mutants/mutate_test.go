package main

import (
	"bytes"
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const root = "../../.."

// source has something for each operator to change.
const source = `package p

const limit = 3

type queue[T any] struct{ list []T; open, full bool }

func (q *queue[T]) add(v T) bool {
	if !q.open || q.full {
		return false
	}
	q.list = append(q.list, v)
	q.full = len(q.list) >= limit
	return true
}

func sum(list []int) (n int) {
	for i := 0; i < len(list); i++ {
		if list[i] == 7 {
			continue
		}
		n += list[i] * 2
		note(n)
	}
	n--
	return n
}

func note(int) {}
`

// Each operator changes the source, to one that compiles where types allow it.
func TestOperators(t *testing.T) {
	all, err := mutants("p.go", []byte(source))
	if err != nil {
		t.Fatal(err)
	}
	compiled := map[string]int{}
	for _, m := range all {
		text := m.apply([]byte(source))
		if bytes.Equal(text, []byte(source)) || m.at == m.becomes {
			t.Errorf("%s changes nothing", m.key())
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "p.go", text, 0)
		if err != nil {
			t.Errorf("%s is not even Go: %v", m.key(), err)
			continue
		}
		if _, err := new(types.Config).Check("p", fset, []*ast.File{f}, nil); err == nil {
			compiled[m.operator]++
		}
	}
	for _, op := range operators {
		if compiled[op] == 0 {
			t.Errorf("%s: no mutant compiles", op)
		}
	}
	keys := map[string]bool{}
	for _, m := range all {
		keys[m.key()] = true
	}
	if len(keys) != len(all) {
		t.Errorf("%d mutants have %d keys", len(all), len(keys))
	}
	for _, want := range []string{
		"p.go |  | const limit = 3 | const limit = 4",
		"p.go | queue.add | if !q.open || q.full { | if !q.open && q.full {",
		"p.go | queue.add | if !q.open || q.full { | if !(!q.open || q.full) {",
		"p.go | queue.add | return false | (removed)",
		"p.go | queue.add | q.list = append(q.list, v) | _ = append(q.list, v)",
		"p.go | queue.add | q.full = len(q.list) >= limit | q.full = len(q.list) > limit",
		"p.go | queue.add | q.full = len(q.list) >= limit | q.full = len(q.list) < limit",
		"p.go | queue.add | return true | return false",
		"p.go | sum | for i := 0; i < len(list); i++ { | for i := 1; i < len(list); i++ {",
		"p.go | sum | if list[i] == 7 { | if list[i] != 7 {",
		"p.go | sum | continue | (removed)",
		"p.go | sum | n += list[i] * 2 | n -= list[i] * 2",
		"p.go | sum | n += list[i] * 2 | n += list[i] / 2",
		"p.go | sum | n += list[i] * 2 | _ = list[i] * 2",
		"p.go | sum | note(n) | (removed)",
		"p.go | sum | n-- | n++",
		"p.go | sum | n-- | (removed)",
	} {
		if !keys[want] {
			t.Errorf("no mutant %s", want)
		}
	}
}

// A seed draws the same mutants again, from all lines before two from one, and
// a new line at the top of the file draws no others.
func TestOrder(t *testing.T) {
	draw := func(text string, seed uint64) (keys []string, lines []int) {
		all, err := mutants("p.go", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range order(all, seed) {
			keys, lines = append(keys, m.key()), append(lines, m.line)
		}
		return keys, lines
	}
	first, lines := draw(source, 1)
	if again, _ := draw(strings.Replace(source, "package p", "package p\n\n// One more line.", 1), 1); !slices.Equal(first, again) {
		t.Errorf("seed 1 draws\n%s\nand, with one line more,\n%s", strings.Join(first, "\n"), strings.Join(again, "\n"))
	}
	if other, _ := draw(source, 2); slices.Equal(first, other) {
		t.Error("seeds 1 and 2 draw the same")
	}
	distinct := map[int]bool{}
	for _, l := range lines {
		distinct[l] = true
	}
	if n := len(distinct); len(slices.Compact(slices.Sorted(slices.Values(lines[:n])))) != n {
		t.Errorf("the first %d draws are of lines %v: want each of the %d lines once", n, lines[:n], n)
	}
}

// The sample takes part of each package that internal/arch holds to be pure.
func TestPackages(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "internal/arch/imports_test.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var pure []string
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && v.Names[0].Name == "pure" {
			for _, e := range v.Values[0].(*ast.CompositeLit).Elts {
				name, err := strconv.Unquote(e.(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				pure = append(pure, name)
			}
		}
		return true
	})
	if len(pure) == 0 {
		t.Fatal("internal/arch/imports_test.go has no list of pure packages")
	}
	for pkg := range notSampled {
		i := slices.Index(pure, pkg)
		if i < 0 {
			t.Fatalf("notSampled lists %s, which is not pure", pkg)
		}
		pure = slices.Delete(pure, i, i+1)
	}
	if want := append(pure, "decode", "prefill"); !slices.Equal(slices.Sorted(slices.Values(packages)), slices.Sorted(slices.Values(want))) {
		t.Errorf("packages are %v: want %v", packages, want)
	}
	all, err := load(root, packages)
	if err != nil {
		t.Fatal(err)
	}
	share(all, wholeSample)
	n := 0
	for _, s := range all {
		n += s.want
		if s.want < min(minPerPackage, len(s.mutants)/3) || len(s.mutants) < 2*s.want {
			t.Errorf("%s: draws %d of %d mutants", s.name, s.want, len(s.mutants))
		}
	}
	if n < 300 {
		t.Errorf("a run draws %d mutants: want 300", n)
	}
}

// Every entry of the list names a mutant of the tree as it is, and gives its
// reason.
func TestEquivalents(t *testing.T) {
	all, err := load(root, packages)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := knownEquivalents("testdata/equivalents", all); err != nil {
		t.Error(err)
	}
	for _, c := range []struct{ text, want string }{
		{"no/such.go | f | a | b\n\tbecause\n", "matches no mutant"},
		{"no/such.go | f | a | b\n", "has no reason"},
		{"a\nb\n\tbecause\n", "has no reason"},
		{"\tbecause\n", "without a mutant"},
		{"a\n\tbecause\na\n\tbecause\n", "listed twice"},
	} {
		path := filepath.Join(t.TempDir(), "equivalents")
		if err := os.WriteFile(path, []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := knownEquivalents(path, all); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v: want %q", c.text, err, c.want)
		}
	}
}

// A run misses its goals by too many survivors, of one package or in all, by too
// many equivalents, and by an equivalent that a test kills.
func TestJudge(t *testing.T) {
	part := func(name string, kills, survivors, equivalents int) *sampled {
		s := &sampled{name: name}
		for range kills {
			s.results = append(s.results, result{&mutant{}, killed, ""})
		}
		for range survivors {
			s.results = append(s.results, result{&mutant{}, survived, ""})
		}
		for range equivalents {
			s.results = append(s.results, result{&mutant{}, survived, "equal"})
		}
		s.want = len(s.results)
		return s
	}
	untrue := part("a", 100, 0, 0)
	untrue.results = append(untrue.results, result{&mutant{}, killed, "equal"})
	fewer := part("a", 100, 0, 0)
	fewer.want++
	for name, c := range map[string]struct {
		all  []*sampled
		want []string
	}{
		"good":              {[]*sampled{part("a", 92, 8, 3), part("b", 17, 0, 0)}, nil},
		"one package":       {[]*sampled{part("a", 84, 16, 0), part("b", 200, 0, 0)}, []string{"a: the tests kill 84 of 100"}},
		"in all":            {[]*sampled{part("a", 91, 9, 0)}, []string{"the tests kill 91 of 100"}},
		"equivalents":       {[]*sampled{part("a", 94, 0, 6)}, []string{"6 of 100 mutants are listed as equivalent"}},
		"untrue equivalent": {[]*sampled{untrue}, []string{"so it is not equivalent"}},
		"small sample":      {[]*sampled{fewer}, []string{"only 100 mutants compile"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := judge(c.all)
			if len(got) != len(c.want) {
				t.Fatalf("%q: want %q", got, c.want)
			}
			for i := range got {
				if !strings.Contains(got[i], c.want[i]) {
					t.Errorf("%q: want %q", got[i], c.want[i])
				}
			}
		})
	}
}

// The fates of real runs of a small package's tests: a change that they notice,
// one that runs forever, one that does not compile, and one of a comment alone.
func TestFates(t *testing.T) {
	t.Chdir(root)
	const pkg, path = "gateway/liveness", "gateway/liveness/liveness.go"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	change := func(old, with string) *mutant {
		at := bytes.Index(text, []byte(old))
		if at < 0 {
			t.Fatalf("%s has no %q", path, old)
		}
		return &mutant{file: path, from: at, to: at + len(old), with: with}
	}
	for want, m := range map[fate]*mutant{
		survived: change("package liveness", "package liveness // as it was"),
		killed:   change("quiet >= d.silence", "quiet < d.silence"),
		timedOut: change("\tanySpeaks, mute := false", "\tfor now.IsZero() == false {\n\t}\n\tanySpeaks, mute := false"),
		broken:   change("package liveness", "package lively"),
	} {
		bound := time.Minute // of a busy machine's compiler
		if want == timedOut {
			bound = 3 * time.Second
		}
		got, out, err := try(context.Background(), pkg, m, bound)
		if err != nil || got != want {
			t.Errorf("%s: %v, %v: want %v\n%s", m.with, got, err, want, out)
		}
	}
}

// The page has a row for each package and one for all, and lists survivors and
// equivalents with their reasons.
func TestPage(t *testing.T) {
	a := &sampled{name: "some/a", lines: 10, results: []result{
		{&mutant{file: "some/a/a.go", line: 3, operator: moveBoundary, at: "a < b", becomes: "a <= b"}, survived, ""},
		{&mutant{file: "some/a/a.go", line: 4, operator: removeStatement, at: "f()"}, killed, ""},
		{&mutant{file: "some/a/a.go", line: 5, operator: removeStatement, at: "g()"}, timedOut, ""},
	}}
	b := &sampled{name: "some/b", lines: 5, results: []result{{&mutant{file: "some/b/b.go", line: 6, operator: flipBoolean, at: "true", becomes: "false"}, survived, "it is never read"}}}
	text := page(options{seed: 7, sample: wholeSample, out: io.Discard}, []*sampled{a, b}, []string{"too few"}, time.Now())
	for _, want := range []string{
		"make soak ONLY=mutants SOAK_SEED=7", "- Seed: 7\n", "MISSED: too few",
		"| some/a | 10 | 0 | 3 | 2 | 1 | 1 | 0 | 66.7 |", "| all | 15 | 0 | 4 | 2 | 1 | 1 | 1 | 66.7 |",
		"## Survivors\n\n- some/a/a.go:3, moved boundary: `a < b` → `a <= b`\n\n",
		"## Equivalents\n\n- some/b/b.go:6, true for false: `true` → `false`: it is never read\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the page has no %q:\n%s", want, text)
		}
	}
}

// A later run knows what an earlier one killed, and repeats what survived.
func TestKills(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kills")
	dead, alive := &mutant{file: "a.go", at: "a", becomes: "b", nth: 1}, &mutant{file: "a.go", at: "b", becomes: "c", nth: 1}
	for round := range 2 {
		k, err := openKills(path)
		if err != nil {
			t.Fatal(err)
		}
		if f, ok := k.fate(dead); ok != (round > 0) || ok && f != timedOut {
			t.Errorf("run %d: fate %v, %t of a killed one", round, f, ok)
		}
		if _, ok := k.fate(alive); ok {
			t.Errorf("run %d: a survivor does not run again", round)
		}
		for m, f := range map[*mutant]fate{dead: timedOut, alive: survived} {
			if err := k.add(m, f); err != nil {
				t.Fatal(err)
			}
		}
		k.close()
	}
}
