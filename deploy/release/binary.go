package main

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
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

// runnable returns the command line that runs a binary here: itself, or an emulator for another
// architecture.
func (r *release) runnable(arch string) []string {
	if arch == runtime.GOARCH {
		return []string{r.path(arch, "tandem")}
	}
	return []string{targets[arch].qemu, r.path(arch, "tandem")}
}

// host returns an architecture of this run whose binary runs here.
func (r *release) host() (string, error) {
	if slices.Contains(r.arches, runtime.GOARCH) {
		return runtime.GOARCH, nil
	}
	if _, err := exec.LookPath(targets[r.arches[0]].qemu); err != nil {
		return "", fmt.Errorf("-arch %s: no binary of this run can run here; add %s", strings.Join(r.arches, ","), runtime.GOARCH)
	}
	return r.arches[0], nil
}

// pages writes the manual page and the completions, which the program itself prints. They are the
// same for each architecture.
func (r *release) pages(ctx context.Context, _ string) error {
	arch, err := r.host()
	if err != nil {
		return err
	}
	program := r.runnable(arch)
	for _, p := range pages {
		text, err := command(ctx, r.work, []string{"SOURCE_DATE_EPOCH=" + fmt.Sprint(r.epoch.Unix())}, program[0], append(program[1:], p.args...)...)
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
