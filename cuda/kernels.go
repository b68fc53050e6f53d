// Package cuda builds the shared objects of this folder: the kernels for GPUs, with NVRTC or nvcc,
// and their host twin, with the C++ compiler. Each source is compiled by itself and cached
// under the hash of its compiler, flags, source and the headers that it includes, so that a build
// compiles only what has changed. The cache also holds ptxas's report of each kernel and counts of
// its machine code, which are compared with budgets.
//
// Invariant: both objects have the functions of api.h and direct.h and come from the same kernels.
// Differences between them are in kernels/ptx.cuh and runtime/device_*.h only.
//
// The package does not open what it builds: engine/backend/cuda does.
package cuda

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// ErrCompile is wrapped by errors of a compiler.
var ErrCompile = errors.New("cuda: does not compile")

// sources are the sources of both objects; the twin also has those of simt/.
var sources = []string{
	"kernels/linear.cu", "kernels/few.cu", "kernels/int4.cu", "kernels/attention.cu", "kernels/decode.cu", "kernels/tiles.cu", drawSource, "kernels/rows.cu", "kernels/moe.cu", "kernels/adapt.cu", "kernels/delta.cu", "kernels/digest.cu", "runtime/device.cu",
}

// machine are the sources of the twin's machine. They are small, and most of the twin's time is
// spent in them, so that they are optimized also under sanitizers.
var machine = []string{"simt/simt.cc", "simt/warp.cc"}

// drawSource is the source of the kernels that draw.
const drawSource = "kernels/sample.cu"

// Targets are the architectures of the machine code; PTX of the first serves later ones.
var Targets = []string{"80", "89", "90a", "100", "120"}

// Sanitizers instrument the twin; the program that opens it needs the address sanitizer, too.
const Sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all"

// builder compiles with one compiler and one set of flags.
type builder struct {
	root     string // folder of go.mod
	compiler []string
	flags    []string // for each source
	fast     []string // sources with -O3 after those flags
	version  []byte   // output of the compiler's --version
}

// Twin builds the host twin below root's cache and returns its path.
func Twin(root, sanitizers string) (string, error) { return twin(root, sanitizers) }

// NarrowTwin builds a host twin whose kernels of draws have blocks of 32 threads instead of 256,
// and returns its path. A draw from a small vocabulary takes a fraction of the time.
func NarrowTwin(root, sanitizers string) (string, error) {
	return twin(root, sanitizers, "-DTD_SAMPLE_THREADS=32")
}

// twin builds a host twin. draws are more flags for the kernels of draws.
func twin(root, sanitizers string, draws ...string) (string, error) {
	optimize := "-O3"
	if sanitizers != "" { // which triple the compiler's time at -O3
		optimize = "-O1"
	}
	flags := append([]string{"-std=c++17", optimize, "-g1", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
		"-Wno-unknown-pragmas", "-Wno-unused-function", "-DTD_TWIN", "-x", "c++"}, strings.Fields(sanitizers)...)
	b, err := newBuilder(root, compilers(), flags)
	if err != nil {
		return "", err
	}
	b.fast = machine
	objects, err := b.compile(slices.Concat(sources, machine, []string{"simt/faults.cc"}))
	if err != nil {
		return "", err
	}
	if len(draws) > 0 {
		b.flags = append(slices.Clone(flags), draws...)
		if objects[slices.Index(sources, drawSource)], err = b.object(drawSource); err != nil {
			return "", err
		}
	}
	return b.link("tandem-cuda-twin", objects, append([]string{"-shared"}, strings.Fields(sanitizers)...))
}

// BlasStub builds the emulation of cuBLASLt that tests open, and returns its path.
func BlasStub(root, sanitizers string) (string, error) {
	flags := append([]string{"-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-x", "c++"}, strings.Fields(sanitizers)...)
	b, err := newBuilder(root, compilers(), flags)
	if err != nil {
		return "", err
	}
	objects, err := b.compile([]string{"simt/blaslt_stub.cc"})
	if err != nil {
		return "", err
	}
	return b.link("blaslt-stub", objects, append([]string{"-shared"}, strings.Fields(sanitizers)...))
}

// compilers returns the C++ compiler and its first arguments.
func compilers() []string {
	if cxx := strings.Fields(os.Getenv("CXX")); len(cxx) > 0 {
		return cxx
	}
	return []string{"g++"}
}

// GPUByNVCC builds the same object as GPU with the nvcc at path. The object needs a driver of the
// major version of nvcc.
func GPUByNVCC(root, nvcc string, targets []string) (string, []Usage, error) {
	b, err := newBuilder(root, []string{nvcc}, gpuFlags(targets))
	if err != nil {
		return "", nil, err
	}
	objects, err := b.compile(sources)
	if err != nil {
		return "", nil, err
	}
	used, err := usage(objects)
	if err != nil {
		return "", used, err
	}
	lib := filepath.Join(filepath.Dir(nvcc), "..", "lib")
	path, err := b.link("tandem-cuda-nvcc", objects, []string{"-shared", "-cudart", "static", "-L" + lib})
	if err != nil {
		return "", used, err
	}
	return path, used, checkLibraries(path)
}

// Measure compiles sources for GPUs, as GPUByNVCC does, and links nothing.
func Measure(root, nvcc string, targets, files []string) ([]Usage, error) {
	b, err := newBuilder(root, []string{nvcc}, gpuFlags(targets))
	if err != nil {
		return nil, err
	}
	objects, err := b.compile(files)
	if err != nil {
		return nil, err
	}
	return usage(objects)
}

func gpuFlags(targets []string) []string {
	flags := []string{"-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v", "--keep"}
	for i, a := range targets {
		code := "sm_" + a
		if i == 0 {
			code = "[sm_" + a + ",compute_" + a + "]"
		}
		flags = append(flags, "-gencode", "arch=compute_"+a+",code="+code)
	}
	return flags
}

// usage returns what the kernels of objects use, and compares it with their budgets.
func usage(objects []string) (used []Usage, err error) {
	for _, o := range objects {
		log, err := os.ReadFile(o + ".log")
		if err != nil {
			return nil, err
		}
		used = append(used, parseUsage(string(log))...)
	}
	return used, checkBudgets(used)
}

func newBuilder(root string, compiler, flags []string) (*builder, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	version, err := exec.Command(compiler[0], append(compiler[1:], "--version")...).Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s --version: %w", ErrCompile, strings.Join(compiler, " "), err)
	}
	b := &builder{root: root, compiler: compiler, flags: flags, version: version}
	return b, os.MkdirAll(b.cache(), 0o755)
}

// include is a header next to the source, or at a path from its folder.
var include = regexp.MustCompile(`(?m)^#include "(.+)"$`)

// texts returns a source and the headers of this folder that it includes, those of known once.
func texts(known map[string]bool, path string) ([]byte, error) {
	if known[path] {
		return nil, nil
	}
	known[path] = true
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	all := fmt.Appendf(nil, "%s %d\n%s", filepath.Base(path), len(text), text)
	for _, m := range include.FindAllSubmatch(text, -1) {
		more, err := texts(known, filepath.Join(filepath.Dir(path), string(m[1])))
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

func (b *builder) cache() string { return filepath.Join(b.root, ".cache", "cuda") }

// compile compiles every source.
func (b *builder) compile(files []string) ([]string, error) {
	objects := make([]string, len(files))
	err := each(len(files), func(i int) (err error) {
		objects[i], err = b.object(files[i])
		return err
	})
	return objects, err
}

// each calls f for each number below n, on all processors, and returns the errors.
func each(n int, f func(int) error) error {
	errs := make([]error, n)
	slot := make(chan struct{}, runtime.GOMAXPROCS(0))
	var all sync.WaitGroup
	for i := range n {
		slot <- struct{}{}
		all.Go(func() {
			defer func() { <-slot }()
			errs[i] = f(i)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// object compiles one source, unless it is cached.
func (b *builder) object(file string) (string, error) {
	text, err := texts(make(map[string]bool), filepath.Join(b.root, "cuda", file))
	if err != nil {
		return "", err
	}
	flags := slices.Clone(b.flags)
	if slices.Contains(b.fast, file) {
		flags = append(flags, "-O3")
	}
	h := sha256.New()
	fmt.Fprintf(h, "%d\n%s\n%q\n%q\n%s\n", logFormat, b.version, b.compiler, flags, text)
	name := strings.NewReplacer("/", "-", ".", "-").Replace(file)
	return b.make(fmt.Sprintf("%s-%x.o", name, h.Sum(nil)[:8]), func(to string) []string {
		args := append(flags, "-c", filepath.Join("cuda", file), "-o", to)
		if slices.Contains(flags, "--keep") {
			args = append(args, "--keep-dir", filepath.Dir(to))
		}
		return args
	})
}

// link links the shared object.
func (b *builder) link(name string, objects, flags []string) (string, error) {
	h := sha256.New()
	io.WriteString(h, strings.Join(objects, "\n")+strings.Join(flags, "\n"))
	return b.make(fmt.Sprintf("%s-%x.so", name, h.Sum(nil)[:8]), func(to string) []string {
		return append(append(slices.Clone(flags), "-o", to), objects...)
	})
}

// make runs the compiler for a file of the cache, unless the file exists. It renames the
// finished file into place, so that concurrent builds do not disturb each other.
func (b *builder) make(name string, args func(to string) []string) (string, error) {
	path := filepath.Join(b.cache(), name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	dir, err := os.MkdirTemp(b.cache(), "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	to := filepath.Join(dir, name)
	cmd := exec.Command(b.compiler[0], append(b.compiler[1:], args(to)...)...)
	cmd.Dir = b.root
	// The programs that nvcc calls find each other by PATH.
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(b.compiler[0])+string(os.PathListSeparator)+os.Getenv("PATH"), "TMPDIR="+dir)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s: %w\n%s", ErrCompile, strings.Join(cmd.Args, " "), err, output.Bytes())
	}
	code, err := codeLines(dir)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(path+".log", append(output.Bytes(), code...), 0o644); err != nil {
		return "", err
	}
	return path, os.Rename(to, path)
}
