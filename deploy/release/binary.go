package main

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

// oldestGlibc is the newest version of glibc that a binary may need. It is that of the wheel's
// platform tag, and older than the glibc of any distribution with support.
const oldestGlibc = "2.17"

// binary builds the program for one architecture with zig as its C compiler: zig links against
// stubs of an old glibc. The program stays dynamic because libcuda, NCCL and libfabric are opened
// at run time, which a static glibc cannot do.
func (r *release) binary(ctx context.Context, arch string) error {
	out := r.path(arch, "tandem")
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	// Go passes its own flags to CC, which may not hold spaces in a path: a wrapper is simplest.
	cc := r.path(arch, "cc")
	script := fmt.Sprintf("#!/bin/sh\nexec %s cc -target %s \"$@\"\n", strings.Join(r.zig, " "), targets[arch].zig)
	if err := os.WriteFile(cc, []byte(script), 0o755); err != nil {
		return err
	}
	env := []string{"CGO_ENABLED=1", "GOOS=linux", "GOARCH=" + arch, "CC=" + cc, "GOFLAGS=", "GOWORK=off"}
	args := []string{"build", "-trimpath", "-buildvcs=auto", "-ldflags", "-s -w -buildid= -extldflags=-s -X main.version=" + r.version, "-o", out, "."}
	if _, err := command(ctx, r.root, env, "go", args...); err != nil {
		return err
	}
	return checkGlibc(out)
}

// checkGlibc returns an error if a binary needs a newer glibc than oldestGlibc.
func checkGlibc(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, s := range symbols {
		v, ok := strings.CutPrefix(s.Version, "GLIBC_")
		if ok && semver.Compare("v"+v, "v"+oldestGlibc) > 0 {
			return fmt.Errorf("%s: %s needs glibc %s; the newest that it may need is %s", path, s.Name, v, oldestGlibc)
		}
	}
	return nil
}

// program returns the path of a binary that runs here: one of this run, or one without C that is
// built for this purpose.
func (r *release) program(ctx context.Context) (string, error) {
	if slices.Contains(r.arches, runtime.GOARCH) {
		return r.path(runtime.GOARCH, "tandem"), nil
	}
	out := r.path("host", "tandem")
	_, err := command(ctx, r.root, []string{"CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off"}, "go", "build", "-ldflags", "-X main.version="+r.version, "-o", out, ".")
	return out, err
}

// pages writes the manual page and the completions, which the program itself prints. They are the
// same for each architecture.
func (r *release) pages(ctx context.Context, _ string) error {
	program, err := r.program(ctx)
	if err != nil {
		return err
	}
	for _, p := range pages {
		text, err := command(ctx, r.work, []string{"SOURCE_DATE_EPOCH=" + fmt.Sprint(r.epoch.Unix())}, program, p.args...)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.work, p.file), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// pages are what the program prints about itself, and where packages install it.
var pages = []struct {
	file, installed string
	args            []string
}{
	{"tandem.1", "/usr/share/man/man1/tandem.1", []string{"man"}},
	{"tandem.bash", "/usr/share/bash-completion/completions/tandem", []string{"completion", "bash"}},
	{"_tandem", "/usr/share/zsh/vendor-completions/_tandem", []string{"completion", "zsh"}},
	{"tandem.fish", "/usr/share/fish/vendor_completions.d/tandem.fish", []string{"completion", "fish"}},
}
