package cuda

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestTriedNames holds the list of kernels that TD_KERNELS may name: struct Tried of plan.h declares
// them in the order in which it reads them, and NOTES.md describes each.
func TestTriedNames(t *testing.T) {
	plan, err := os.ReadFile("runtime/plan.h")
	if err != nil {
		t.Fatal(err)
	}
	notes, err := os.ReadFile("NOTES.md")
	if err != nil {
		t.Fatal(err)
	}
	names := func(pattern string) (all []string) {
		_, body, _ := strings.Cut(string(plan), "struct Tried {")
		body, _, _ = strings.Cut(body, "\n};")
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(body, -1) {
			all = append(all, m[1])
		}
		return all
	}
	declared, read := names(`(?m)^  bool (\w+) = false;`), names(`has\("(\w+)"\)`)
	if len(declared) < 10 || !slices.Equal(declared, read) {
		t.Errorf("struct Tried declares %q and reads %q", declared, read)
	}
	for _, name := range declared {
		if !strings.Contains(string(notes), "`"+name+"`") {
			t.Errorf("NOTES.md has no `%s`", name)
		}
	}
}
