package cuda

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// nvrtcScript compiles a source's kernels to PTX for one architecture.
const nvrtcScript = "cuda/build/nvrtc.py"

// ptxOf has the architecture of the PTX that a target is assembled from, where that is not its own.
// NVRTC 12.9 writes the same instructions for both.
var ptxOf = map[string]string{"120": "100"}

// GPU builds the shared object for GPUs, for the named architectures: the kernels with NVRTC and
// ptxas, and the host's part with the C++ compiler. venv is a Python environment with these and
// CUDA's runtime. The object needs a driver of their major version. GPU returns the object's path
// and the resource usage of its kernels. The error names kernels that exceed their budget of
// registers or instructions, or spill. With only, GPU compiles the kernels of these sources and
// links nothing.
func GPU(root, venv string, targets, only []string) (string, []Usage, error) {
	found, err := filepath.Glob(filepath.Join(venv, "lib", "python3*", "site-packages", "nvidia"))
	if err != nil || len(found) != 1 {
		return "", nil, fmt.Errorf("%w: -nvrtc %s has %d folders of NVIDIA's packages, want one: `make cuda` installs them", ErrCompile, venv, len(found))
	}
	packages, err := filepath.Abs(found[0])
	if err != nil {
		return "", nil, err
	}
	cudart := filepath.Join(packages, "cuda_runtime")
	host, err := newBuilder(root, compilers(), []string{"-std=c++17", "-O2", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
		"-Wno-unknown-pragmas", "-Wno-unused-function", "-DTD_HOST", "-isystem", filepath.Join(cudart, "include"), "-isystem", filepath.Join(packages, "cuda_nvcc", "include"), "-x", "c++"})
	if err != nil {
		return "", nil, err
	}
	objects, err := host.compile(sources)
	if err != nil {
		return "", nil, err
	}
	libraries, err := filepath.Glob(filepath.Join(packages, "cuda_nvrtc", "lib", "libnvrtc.so.*"))
	if err != nil || len(libraries) != 1 {
		return "", nil, fmt.Errorf("%w: -nvrtc %s has the NVRTC libraries %v, want one", ErrCompile, venv, libraries)
	}
	script, err := os.ReadFile(filepath.Join(root, nvrtcScript))
	if err != nil {
		return "", nil, err
	}
	device, err := newBuilder(root, []string{filepath.Join(venv, "bin", "python"), nvrtcScript, libraries[0]}, []string{string(script)})
	if err != nil {
		return "", nil, err
	}
	assembler, err := newBuilder(root, []string{filepath.Join(packages, "cuda_nvcc", "bin", "ptxas")}, []string{"-v", "-O3"})
	if err != nil {
		return "", nil, err
	}
	table, used, err := images(device, assembler, objects, targets, only)
	if err != nil || len(only) > 0 {
		return "", used, err
	}
	object, err := host.assemble(table)
	if err != nil {
		return "", used, err
	}
	all := append(objects, object, filepath.Join(cudart, "lib", "libcudart_static.a"), "-ldl", "-lrt", "-lpthread")
	path, err := host.link("tandem-cuda", all, []string{"-shared", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL"})
	if err != nil {
		return "", used, err
	}
	return path, used, checkLibraries(path)
}

// present are the libraries that an object may need: those of C and C++. The images of
// deploy/release have them.
var present = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libstdc++.so.6", "libgcc_s.so.1"}

// checkLibraries returns an error if a shared object needs a library that images lack.
func checkLibraries(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, l := range needed {
		if !slices.Contains(present, l) {
			return fmt.Errorf("%w: %s needs %s, which the images lack", ErrCompile, path, l)
		}
	}
	return nil
}

// image is a file with the code of a source's kernels.
type image struct {
	path    string
	kernels []string // mangled names
	source  int
	target  string
	ptx     int // 1: PTX
}

// images compiles the kernels that the host's objects name, of these sources only unless there are
// none, and returns td_images of device.h. The PTX of the first target is among them.
func images(device, assembler *builder, objects, targets, only []string) (table []byte, used []Usage, err error) {
	var all, texts []image
	for i, o := range objects {
		kernels, err := named(o)
		if err != nil {
			return nil, nil, err
		}
		if len(kernels) == 0 || len(only) > 0 && !slices.Contains(only, sources[i]) {
			continue
		}
		for _, target := range targets {
			all = append(all, image{kernels: kernels, source: i, target: target})
			text := image{kernels: kernels, source: i, target: cmp.Or(ptxOf[target], target), ptx: 1}
			if findImage(texts, text) < 0 {
				texts = append(texts, text)
			}
		}
	}
	err = each(len(texts), func(i int) (err error) {
		texts[i].path, err = device.text(&texts[i])
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	usages := make([][]Usage, len(all))
	err = each(len(all), func(i int) (err error) {
		from := all[i]
		from.target = cmp.Or(ptxOf[from.target], from.target)
		all[i].path, usages[i], err = assembler.machine(&all[i], texts[findImage(texts, from)].path)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	used = slices.Concat(usages...)
	slices.SortFunc(used, func(a, b Usage) int { return strings.Compare(a.Kernel+a.Arch, b.Kernel+b.Arch) })
	for _, t := range texts {
		if t.target == targets[0] && !strings.HasSuffix(t.target, "a") {
			all = append(all, t)
		}
	}
	slices.SortStableFunc(all, func(a, b image) int { return a.source - b.source })
	table, err = assembly(all)
	return table, used, errors.Join(err, checkBudgets(used))
}

// findImage returns the index of the image with the source and target of another one, or -1.
func findImage(all []image, like image) int {
	return slices.IndexFunc(all, func(i image) bool { return i.source == like.source && i.target == like.target })
}

// assembly returns td_images in assembly language. A zero byte ends PTX. Without .file the linker
// would name the object's path, which depends on the folder of the tree.
func assembly(all []image) ([]byte, error) {
	var code, entries bytes.Buffer
	for i, im := range all {
		number, exact := strings.TrimSuffix(im.target, "a"), 0
		if number != im.target && im.ptx == 0 {
			exact = 1
		}
		capability, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("%w: target %q: %w", ErrCompile, im.target, err)
		}
		fmt.Fprintf(&code, ".balign 64\n.Lcode%d: .incbin %q\n.byte 0\n.Lkernels%d:\n", i, im.path, i)
		for _, k := range im.kernels {
			fmt.Fprintf(&code, ".asciz %q\n", k)
		}
		code.WriteString(".byte 0\n")
		fmt.Fprintf(&entries, ".quad .Lcode%d, .Lkernels%d\n.long %d, %d, %d, %d\n", i, i, im.source, capability, exact, im.ptx)
	}
	return fmt.Appendf(nil, ".file \"images.s\"\n.section .rodata\n%s.section .data.rel.ro,\"aw\"\n.balign 8\n.globl td_images\n.hidden td_images\ntd_images:\n%s.quad 0, 0, 0, 0\n.section .note.GNU-stack,\"\",@progbits\n",
		&code, &entries), nil
}

// text compiles a source's kernels to PTX for the image's target.
func (b *builder) text(im *image) (string, error) {
	file := filepath.Join(b.root, "cuda", sources[im.source])
	text, err := texts(make(map[string]bool), file)
	if err != nil {
		return "", err
	}
	var headers, instances []string
	for _, m := range kernelHeader.FindAllSubmatch(text, -1) {
		if !slices.Contains(headers, string(m[1])) {
			headers = append(headers, string(m[1]))
		}
	}
	for _, k := range im.kernels {
		if name := demangle(k); strings.Contains(name, "<") {
			instances = append(instances, name)
		}
	}
	arch := "compute_" + im.target
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%q\n%q\n%s\n%q\n%q\n", b.version, b.compiler, b.flags, text, instances, arch)
	name := fmt.Sprintf("%s-%x.%s.ptx", strings.TrimSuffix(filepath.Base(file), ".cu"), h.Sum(nil)[:8], arch)
	return b.make(name, func(to string) []string {
		args := append([]string{arch, to, filepath.Join("cuda", filepath.Dir(sources[im.source]))}, headers...)
		return append(append(args, "--"), instances...)
	})
}

// machine assembles PTX to machine code for the image's target.
func (b *builder) machine(im *image, ptx string) (string, []Usage, error) {
	text, err := os.ReadFile(ptx)
	if err != nil {
		return "", nil, err
	}
	arch := "sm_" + im.target
	h := sha256.New()
	fmt.Fprintf(h, "%d\n%s\n%q\n%s\n%q\n", logFormat, b.version, b.flags, text, arch)
	source, _, _ := strings.Cut(filepath.Base(ptx), "-")
	path, err := b.make(fmt.Sprintf("%s-%x.%s.cubin", source, h.Sum(nil)[:8], arch), func(to string) []string {
		return append(slices.Clone(b.flags), "-arch="+arch, ptx, "-o", to)
	})
	if err != nil {
		return "", nil, err
	}
	log, err := os.ReadFile(path + ".log")
	if err != nil {
		return "", nil, err
	}
	return path, parseUsage(string(log)), hasKernels(path, im.kernels)
}

// kernelHeader is a header next to the source.
var kernelHeader = regexp.MustCompile(`(?m)^#include "(\w+\.cuh)"$`)

// typeOf and typeEnd surround a kernel's mangled name in the name of its type; see device.h.
const typeOf, typeEnd = "_ZTS5NamedIXadL", "EEE"

// named returns the mangled names of the kernels that a host's object names, sorted.
func named(object string) ([]string, error) {
	f, err := elf.Open(object)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", object, err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", object, err)
	}
	var all []string
	for _, s := range symbols {
		if name, ok := strings.CutPrefix(s.Name, typeOf); ok {
			all = append(all, strings.TrimSuffix(name, typeEnd))
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// hasKernels returns an error if a cubin lacks a kernel.
func hasKernels(cubin string, kernels []string) error {
	data, err := os.ReadFile(cubin)
	if err != nil {
		return err
	}
	f, err := parseCubin(data)
	if err != nil {
		return fmt.Errorf("%s: %w", cubin, err)
	}
	for _, k := range kernels {
		if f.Section(".text."+k) == nil {
			return fmt.Errorf("%w: %s has no kernel %s, which the host names", ErrCompile, cubin, k)
		}
	}
	return nil
}

// assemble returns an object of a text in assembly language.
func (b *builder) assemble(text []byte) (string, error) {
	source := filepath.Join(b.cache(), fmt.Sprintf("images-%x.s", sha256.Sum256(text)))
	if err := os.WriteFile(source, text, 0o644); err != nil {
		return "", err
	}
	return b.make(strings.TrimSuffix(filepath.Base(source), ".s")+".o", func(to string) []string { return []string{"-c", source, "-o", to} })
}
