package arch

import (
	"go/token"
	"strings"
	"testing"
)

// impureSources are small packages with one violation each, and pure ones that
// look like a violation.
var impureSources = []struct{ name, source, want string }{
	{"nothing", `func f(a []int, now time.Time) time.Duration { for range a {}; return now.Sub(time.Time{}) }`, ""},
	{"duration", `const second = time.Second; var d, _ = time.ParseDuration("1s")`, ""},
	{"own name", `type clock struct{ Now func() int }; func (c clock) Sleep() int { return c.Now() }`, ""},
	{"sorted keys", `func f(m map[int]string) { for _, k := range slices.Sorted(maps.Keys(m)) { _ = m[k] } }`, ""},
	{"clone", `func f(m map[int]string) map[int]string { return maps.Clone(m) }`, ""},
	{"seeded", `func f(s uint64) int { return rand.New(rand.NewPCG(s, 1)).IntN(3) }`, ""},
	{"printing to text", `func f() string { return fmt.Sprint(1) }`, ""},
	{"listed", `type set map[int]bool; func listed(s set) (n int) { for range s { n++ }; return n }`, ""},
	{"listed method", `type set struct{ m map[int]bool }; func (s *set) size() (n int) { for range s.m { n++ }; return n }`, ""},

	{"go", `func f() { go f() }`, "go statement"},
	{"go in a literal", `var f = func() { go func() {}() }`, "go statement"},
	{"channel field", `type s struct{ c chan int }`, "channel type"},
	{"channel parameter", `func f(c <-chan int) {}`, "channel type"},
	{"send", `func f(c chan<- int) { c <- 1 }`, "send on a channel"},
	{"receive", `func f(c chan int) { <-c }`, "receive from a channel"},
	{"select", `func f() { select {} }`, "select"},
	{"range over a channel", `func f(c chan int) { for range c {} }`, "range over a channel"},
	{"now", `func f() time.Time { return time.Now() }`, "time.Now"},
	{"now as a value", `var now = time.Now`, "time.Now"},
	{"since", `func f(t time.Time) time.Duration { return time.Since(t) }`, "time.Since"},
	{"until", `func f(t time.Time) time.Duration { return time.Until(t) }`, "time.Until"},
	{"after", `func f() { time.After(1) }`, "time.After"},
	{"after func", `func f() { time.AfterFunc(1, f) }`, "time.AfterFunc"},
	{"sleep", `func f() { time.Sleep(1) }`, "time.Sleep"},
	{"ticker", `func f() { time.NewTicker(1) }`, "time.NewTicker"},
	{"timer", `type s struct { t *time.Timer }`, "time.Timer"},
	{"tick", `func f() { time.Tick(1) }`, "time.Tick"},
	{"print", `func f() { fmt.Println() }`, "fmt.Println"},
	{"global luck", `func f() int { return rand.IntN(3) }`, "math/rand/v2.IntN"},
	{"global shuffle", `func f() { rand.Shuffle(3, func(i, j int) {}) }`, "math/rand/v2.Shuffle"},
	{"range over a map", `func f(m map[int]int) { for range m {} }`, "range over a map in p.f"},
	{"range over a named map", `type set map[int]bool; func (s set) f() { for range s {} }`, "range over a map in p.set.f"},
	{"range in a literal", `var f = func(m map[int]int) { for range m {} }`, "range over a map in p:"},
	{"range over a generic map", `func f[M ~map[int]int](m M) { for range m {} }`, "range over a map"},
	{"keys", `func f(m map[int]int) { for range maps.Keys(m) {} }`, "maps.Keys"},
	{"keys of a kind", `func f(m map[int]int) []int { return slices.Collect(maps.Keys(m)) }`, "maps.Keys"},
	{"luck inside sorted keys", `func f() { slices.Sorted(maps.Keys(map[int64]int{time.Now().Unix(): 1})) }`, "time.Now"},
}

var impureImports = []struct{ path, want string }{
	{`"net"`, `import of "net"`},
	{`"net/http"`, `import of "net/http"`},
	{`"os"`, `import of "os"`},
	{`"sync"`, `import of "sync"`},
	{`"sync/atomic"`, `import of "sync/atomic"`},
	{`"context"`, `import of "context"`},
	{`"unsafe"`, `import of "unsafe"`},
	{`"math/rand"`, `import of "math/rand"`},
	{`"crypto/rand"`, `import of "crypto/rand"`},
	{`"C"`, `import of "C"`},
	{`_ "hash/maphash"`, `import of "hash/maphash"`},
	{`"` + module + `/kvtransfer"`, `import of`},
}

// The check sees each violation, alone, and nothing where there is none.
func TestPuritySeesFaults(t *testing.T) {
	fset := token.NewFileSet()
	imp := exports(t, fset)
	ranges := map[string]string{"p.listed": "counted only", "p.(*set).size": "counted only"}
	one := func(source string) (*purity, []string) {
		return check(imp, fset, "p", []*file{{path: "p.go", pkg: "p", text: []byte("package p\n" + source)}}, ranges)
	}
	for _, c := range impureSources {
		var header strings.Builder
		for name, path := range map[string]string{"time.": "time", "slices.": "slices", "maps.": "maps", "rand.": "math/rand/v2", "fmt.": "fmt"} {
			if strings.Contains(c.source, name) {
				header.WriteString("import \"" + path + "\"\n")
			}
		}
		p, errs := one(header.String() + c.source)
		if len(errs) != 0 {
			t.Errorf("%s does not compile: %q", c.name, errs)
		}
		got := strings.Join(p.bad, "\n")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
	for _, c := range impureImports {
		if p, _ := one("import " + c.path); len(p.bad) != 1 || !strings.Contains(p.bad[0], c.want) {
			t.Errorf("%s: got %q, want %q", c.path, p.bad, c.want)
		}
	}
	for name, source := range map[string]string{
		"dot import": "import . \"time\"\nvar now = Now",
		"renamed":    "import clock \"time\"\nvar now = clock.Now",
	} {
		if p, _ := one(source); len(p.bad) != 1 || !strings.Contains(p.bad[0], "time.Now") {
			t.Errorf("%s: got %q", name, p.bad)
		}
	}
	if p, _ := one("func listed(m map[int]int) { for range m {} }"); !p.used["p.listed"] {
		t.Error("a listed range is not counted as used")
	}
}
