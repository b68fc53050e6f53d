package cuda

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// NVRTCTargets are the architectures of GPUByNVRTC. Its ptxas spills registers for later ones.
var NVRTCTargets = []string{"80", "89", "90a"}

// nvrtcScript compiles a source's kernels for one architecture.
const nvrtcScript = "cuda/build/nvrtc.py"

// GPUByNVRTC builds the shared object for GPUs without nvcc: the kernels with NVRTC, and the host's
// part with the C++ compiler. venv is a Python environment with NVRTC and CUDA's runtime. The
// object needs a driver of their version, which may be older than nvcc's. The results are those of
// GPU.
func GPUByNVRTC(root, venv string, targets []string) (string, []Usage, error) {
	found, err := filepath.Glob(filepath.Join(venv, "lib", "python3*", "site-packages", "nvidia"))
	if err != nil || len(found) != 1 {
		return "", nil, fmt.Errorf("%w: -nvrtc %s has %d folders of NVIDIA's packages, want one: `make cuda-nvrtc` installs them", ErrCompile, venv, len(found))
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
	table, used, err := device.images(objects, targets)
	if err != nil {
		return "", used, err
	}
	object, err := host.assemble(table)
	if err != nil {
		return "", used, err
	}
	all := append(objects, object, filepath.Join(cudart, "lib", "libcudart_static.a"), "-ldl", "-lrt", "-lpthread")
	path, err := host.link("tandem-cuda", all, []string{"-shared", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL"})
	return path, used, err
}

// image is a file with the code of a source's kernels.
type image struct {
	path              string
	source            int
	capability, exact int
}

// images compiles the kernels that the host's objects name, and returns td_images of device.h.
func (b *builder) images(objects, targets []string) (table []byte, used []Usage, err error) {
	var all []image
	var errs []error
	var mutex sync.Mutex
	var jobs sync.WaitGroup
	slot := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, o := range objects {
		kernels, err := named(o)
		if err != nil {
			return nil, nil, err
		}
		if len(kernels) == 0 {
			continue
		}
		for _, target := range targets {
			jobs.Go(func() {
				slot <- struct{}{}
				defer func() { <-slot }()
				im, usage, err := b.image(i, kernels, target)
				mutex.Lock()
				defer mutex.Unlock()
				all, used, errs = append(all, im), append(used, usage...), append(errs, err)
			})
		}
	}
	jobs.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, nil, err
	}
	slices.SortFunc(all, func(a, b image) int {
		if a.source != b.source {
			return a.source - b.source
		}
		return a.capability - b.capability
	})
	slices.SortFunc(used, func(a, b Usage) int { return strings.Compare(a.Kernel+a.Arch, b.Kernel+b.Arch) })
	var code, entries bytes.Buffer
	for i, im := range all {
		fmt.Fprintf(&code, ".balign 64\ncode%d: .incbin %q\n.byte 0\n", i, im.path)
		fmt.Fprintf(&entries, ".quad code%d\n.long %d, %d, %d, 0\n", i, im.source, im.capability, im.exact)
	}
	return fmt.Appendf(nil, ".section .rodata\n%s.section .data.rel.ro,\"aw\"\n.balign 8\n.globl td_images\n.hidden td_images\ntd_images:\n%s.quad 0, 0, 0\n.section .note.GNU-stack,\"\",@progbits\n",
		&code, &entries), used, checkBudgets(used)
}

// image compiles a source's kernels for a target.
func (b *builder) image(source int, kernels []string, target string) (image, []Usage, error) {
	file := filepath.Join(b.root, "cuda", sources[source])
	text, err := texts(make(map[string]bool), file)
	if err != nil {
		return image{}, nil, err
	}
	var headers, instances []string
	for _, m := range kernelHeader.FindAllSubmatch(text, -1) {
		if !slices.Contains(headers, string(m[1])) {
			headers = append(headers, string(m[1]))
		}
	}
	for _, k := range kernels {
		if name := demangle(k); strings.Contains(name, "<") {
			instances = append(instances, name)
		}
	}
	im := image{source: source}
	arch, suffix := "sm_"+target, ".sm_"+target+".cubin"
	if _, err := fmt.Sscanf(target, "%d", &im.capability); err != nil {
		return image{}, nil, fmt.Errorf("%w: target %q: %w", ErrCompile, target, err)
	}
	if strings.HasSuffix(target, "a") {
		im.exact = 1
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%q\n%q\n%s\n%q\n%q\n", b.version, b.compiler, b.flags, text, instances, arch)
	name := fmt.Sprintf("%s-%x%s", strings.TrimSuffix(filepath.Base(file), ".cu"), h.Sum(nil)[:8], suffix)
	im.path, err = b.make(name, func(to string) []string {
		args := append([]string{arch, to, filepath.Join("cuda", filepath.Dir(sources[source]))}, headers...)
		return append(append(args, "--"), instances...)
	})
	if err != nil {
		return im, nil, err
	}
	log, err := os.ReadFile(im.path + ".log")
	if err != nil {
		return im, nil, err
	}
	return im, parseUsage(string(log)), hasKernels(im.path, kernels)
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
