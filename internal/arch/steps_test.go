package arch

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// make check needs Go and gcc only: its tests are not pointed at a Python or a Node that make test
// installs.
func TestCheckNeedsNoInstallation(t *testing.T) {
	cmd := exec.Command("make", "--no-print-directory", "-f", "-", "check", "GO=env; true", "-o", "lint")
	cmd.Dir = root
	cmd.Stdin = strings.NewReader("include Makefile\n")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "\nTANDEM_PYTHON=\n") || !strings.Contains(string(out), "\nTANDEM_JAVASCRIPT=\n") {
		t.Errorf("%v\n%s", err, out)
	}
}

// makefileList returns the words of a variable of the Makefile.
func makefileList(t *testing.T, name string) []string {
	t.Helper()
	t.Setenv("MAKEFLAGS", "") // of a make that runs this test
	cmd := exec.Command("make", "-s", "--no-print-directory", "-f", "-", "print")
	cmd.Dir = root
	cmd.Stdin = strings.NewReader("include Makefile\nprint:\n\t@echo $(" + name + ")\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("make: %v\n%s", err, out)
	}
	return strings.Fields(string(out))
}

// Each step of make test and make soak is a target, the race step runs every package that no list
// excludes, the lists name packages that exist and that the plain step runs, and a soak installs what
// its steps need.
func TestSteps(t *testing.T) {
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("make is not installed")
	}
	text, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	all := makefileList(t, "ALL")
	for _, name := range slices.Concat(all, makefileList(t, "STEPS"), makefileList(t, "SOAK_STEPS")) {
		if !strings.Contains(string(text), "\nstep-"+name+":") || !slices.Contains(all, name) {
			t.Errorf("%s is not the name of a step", name)
		}
	}
	for _, want := range []string{"fuzz", "race", "plain", "binary"} {
		if !slices.Contains(makefileList(t, "SOAK_STEPS"), want) {
			t.Errorf("a soak lacks %s", want)
		}
	}
	soak := regexp.MustCompile(`(?m)^soak: (build .*) ## `).FindString(string(text))
	for _, want := range []string{"$(TOOLS)/staticcheck", "debian", "libfabric", "prometheus"} { // for the steps chart and plain
		if !slices.Contains(strings.Fields(soak), want) {
			t.Errorf("a soak does not install %s", want)
		}
	}
	for _, pkg := range slices.Concat(makefileList(t, "WITHOUT_RACE"), makefileList(t, "ALSO_PLAIN")) {
		if files, err := filepath.Glob(filepath.Join(root, pkg, "*_test.go")); err != nil || len(files) == 0 {
			t.Errorf("a list names %s, which has no tests", pkg)
		}
	}
	for _, part := range []string{"$(filter-out $(WITHOUT_RACE:%=$(MODULE)/%),$(PACKAGES))", "$(addprefix ./,$(WITHOUT_RACE) $(ALSO_PLAIN))"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("no step runs %s", part)
		}
	}
	cmd := exec.Command("make", "-n", "-f", "-", "steps")
	cmd.Dir = root
	cmd.Stdin = strings.NewReader("include Makefile\nsteps:\n\t@$(call steps,luck)\n")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "no such step: luck") {
		t.Errorf("a step that does not exist is accepted: %v\n%s", err, out)
	}
}
