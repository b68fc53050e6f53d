// Command release builds what users install: an archive, a Debian package, an RPM package and a
// Python wheel for each architecture, container images for all of them, a bill of materials and
// the checksums of these files.
//
// Invariant: two runs over one commit write the same bytes, from whichever folder. Every time in an
// artifact is the commit's, every order is sorted, and no path of the machine is recorded.
//
// The command publishes and signs nothing. It is a module of its own, so that the libraries which
// write packages are no dependencies of Tandem.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// release is one run: its inputs, and the files that it has written.
type release struct {
	root    string    // folder of Tandem's go.mod
	out     string    // where artifacts go
	work    string    // binaries and other intermediate files, below out
	version string    // as semantic versioning writes it, without v
	zig     []string  // command line of zig
	cuda    string    // path of tandem-cuda.so for amd64; empty: no image with it
	python  string    // for zig from PyPI
	epoch   time.Time // of every file in an artifact
	arches  []string  // as Go names them
}

// target is what one architecture is called elsewhere.
type target struct{ zig, rpm, wheel, qemu string }

var targets = map[string]target{
	"amd64": {zig: "x86_64-linux-gnu.2.17", rpm: "x86_64", wheel: "manylinux_2_17_x86_64", qemu: "qemu-x86_64"},
	"arm64": {zig: "aarch64-linux-gnu.2.17", rpm: "aarch64", wheel: "manylinux_2_17_aarch64", qemu: "qemu-aarch64"},
}

// step is one part of a run.
type step struct {
	name string
	each bool // once for each architecture
	run  func(*release, context.Context, string) error
}

// steps in the order in which they run. Each takes one architecture, or "" for all of them.
var steps = []step{
	{"binary", true, (*release).binary},
	{"pages", false, (*release).pages},
	{"archive", true, (*release).archive},
	{"deb", true, func(r *release, ctx context.Context, arch string) error { return r.pack("deb", arch) }},
	{"rpm", true, func(r *release, ctx context.Context, arch string) error { return r.pack("rpm", arch) }},
	{"wheel", true, (*release).wheel},
	{"image", false, (*release).image},
	{"sbom", false, (*release).sbom},
	{"sums", false, (*release).sums},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	r := &release{}
	f := flag.NewFlagSet("release", flag.ExitOnError)
	f.StringVar(&r.root, "root", ".", "`folder` of Tandem's source")
	f.StringVar(&r.out, "out", "dist", "`folder` for the artifacts")
	f.StringVar(&r.version, "version", "", "`version` to release, such as 0.2.0")
	f.StringVar(&r.python, "python", "python3", "Python with ziglang installed")
	f.StringVar(&r.cuda, "cuda", "", "`path` of tandem-cuda.so: also build images with it")
	arches := f.String("arch", "amd64,arm64", "architectures, separated by commas")
	only := f.String("only", "", "steps to run, separated by commas; default: all")
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := r.prepare(*arches); err != nil {
		return err
	}
	wanted := strings.FieldsFunc(*only, func(c rune) bool { return c == ',' })
	for _, name := range wanted {
		if !slices.ContainsFunc(steps, func(s step) bool { return s.name == name }) {
			return fmt.Errorf("-only %s: no such step", name)
		}
	}
	for _, s := range steps {
		if len(wanted) > 0 && !slices.Contains(wanted, s.name) {
			continue
		}
		each := []string{""}
		if s.each {
			each = r.arches
		}
		for _, arch := range each {
			start := time.Now()
			if err := s.run(r, ctx, arch); err != nil {
				return fmt.Errorf("%s: %w", strings.TrimSpace(s.name+" "+arch), err)
			}
			fmt.Printf("%-16s %5.1f s\n", strings.TrimSpace(s.name+" "+arch), time.Since(start).Seconds())
		}
	}
	return nil
}

// prepare checks the flags and reads the commit's time.
func (r *release) prepare(arches string) error {
	if r.version == "" {
		return errors.New("-version is missing; give the version to release, such as 0.2.0")
	}
	for arch := range strings.SplitSeq(arches, ",") {
		if _, ok := targets[arch]; !ok {
			return fmt.Errorf("-arch %s: want amd64 or arm64", arch)
		}
		r.arches = append(r.arches, arch)
	}
	var err error
	if r.root, err = filepath.Abs(r.root); err != nil {
		return err
	}
	if r.out, err = filepath.Abs(r.out); err != nil {
		return err
	}
	r.zig = []string{r.python, "-m", "ziglang"}
	r.work = filepath.Join(r.out, ".work")
	if err := os.MkdirAll(r.work, 0o755); err != nil {
		return err
	}
	seconds := os.Getenv("SOURCE_DATE_EPOCH")
	if seconds == "" {
		text, err := exec.Command("git", "-C", r.root, "log", "-1", "--format=%ct").Output()
		if err != nil {
			return fmt.Errorf("git does not know the commit of %s; set SOURCE_DATE_EPOCH to its time in seconds: %w", r.root, err)
		}
		seconds = strings.TrimSpace(string(text))
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH %q: want seconds since 1970", seconds)
	}
	r.epoch = time.Unix(n, 0).UTC()
	return nil
}

// path returns where an intermediate file of an architecture is.
func (r *release) path(arch, name string) string { return filepath.Join(r.work, arch, name) }

// artifact returns the path of an artifact in out.
func (r *release) artifact(name string) string { return filepath.Join(r.out, name) }

// command runs a program and returns an error with the end of its output.
func command(ctx context.Context, dir string, env []string, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		text := stderr.String()
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, text[max(0, len(text)-2000):])
	}
	return out, nil
}
