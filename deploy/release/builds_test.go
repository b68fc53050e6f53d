//go:build deploy

package main

import (
	"bytes"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// A second build of the tree from another folder, with a compiler at another path, gives the same bytes
// of every artifact. The folder stays the same between runs, so that Go's build cache has what C
// compilers made there.
func TestTwoBuilds(t *testing.T) {
	sums := artifactOf(t, "SHA256SUMS")
	python := os.Getenv("TANDEM_ZIG_PYTHON")
	if python == "" {
		t.Fatal("TANDEM_ZIG_PYTHON is not set: run make test-deploy")
	}
	first, err := os.ReadFile(sums)
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Base(artifactOf(t, "tandem-*-image.tar"))
	version := strings.TrimSuffix(strings.TrimPrefix(image, "tandem-"), "-image.tar")
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	clone := filepath.Join(os.TempDir(), "tandem-second-build", "tree")
	out := filepath.Join(filepath.Dir(clone), "out")
	clean := func() error { return os.RemoveAll(filepath.Dir(clone)) }
	if err := clean(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = clean() }) // the next run does it, too
	// The clone has the files as they are here, so that git reports the same state of the tree. Go
	// records the commit only where .git is a folder, which it is not in a worktree.
	repository, err := os.Lstat(filepath.Join(root, ".git"))
	if err != nil {
		t.Skipf("needs a clone of the repository: %v", err)
	}
	args := []string{"clone", "-q", "--shared", "--no-checkout"}
	if !repository.IsDir() {
		args = append(args, "--separate-git-dir="+clone+".git")
	}
	output(t, "git", append(args, root, clone)...)
	output(t, "bash", "-ec", `cd "$1"
git ls-files -co --exclude-standard -z | while IFS= read -r -d "" f; do [ ! -e "$f" ] && [ ! -L "$f" ] || printf "%s\0" "$f"; done | tar --null -T - -cf - | tar -C "$2" -xf -
git -C "$2" reset -q`, "bash", root, clone)
	if here, there := output(t, "git", "-C", root, "status", "--porcelain"), output(t, "git", "-C", clone, "status", "--porcelain"); here != there {
		t.Fatalf("the clone's state is %q, want %q", there, here)
	}
	release := exec.CommandContext(t.Context(), "go", "run", ".", "-root", "../..", "-out", out, "-version", version, "-python", python, "-arch", runtime.GOARCH)
	release.Dir = filepath.Join(clone, "deploy/release")
	text, err := release.CombinedOutput()
	if err != nil {
		t.Fatalf("the second build: %v\n%s", err, text)
	}
	t.Logf("the second build:\n%s", text)
	second, err := os.ReadFile(filepath.Join(out, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Errorf("the checksums are\n%swant\n%s", second, first)
	}
	for line := range strings.Lines(string(first)) {
		_, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		kind := filepath.Ext(name)[1:]
		if name == image {
			kind = "image"
		}
		t.Run(kind, func(t *testing.T) {
			a, err := os.ReadFile(filepath.Join(filepath.Dir(sums), name))
			if err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(filepath.Join(out, name))
			if err != nil {
				t.Fatal(err)
			}
			if sha256.Sum256(a) != sha256.Sum256(b) {
				t.Errorf("two builds of %s differ", name)
			}
		})
	}
}
