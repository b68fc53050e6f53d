package cuda

import (
	"debug/elf"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The names of kernels are read from an object of the host, and an object with another version of
// ELF, as older compilers write it, is parsed.
func TestNamed(t *testing.T) {
	cxx := compilers()
	if _, err := exec.LookPath(cxx[0]); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	source, object := filepath.Join(dir, "host.cc"), filepath.Join(dir, "host.o")
	text := `#include <typeinfo>
template <auto kKernel> struct Named {};
void unknown();
template <int kRows, int kGated> inline void product(int *, long) { unknown(); }
inline void flat(int) { unknown(); }
const char *names[] = {typeid(Named<(product<4, 1>)>).name(), typeid(Named<flat>).name()};
`
	if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cxx[0], append(cxx[1:], "-std=c++17", "-O2", "-c", source, "-o", object)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, err := named(object)
	if err != nil || !slices.Equal(got, []string{"_Z4flati", "_Z7productILi4ELi1EEvPil"}) {
		t.Fatalf("named %q, %v", got, err)
	}
	if name := demangle(got[1]); name != "product<4,1>" {
		t.Errorf("NVRTC is asked for %s", name)
	}
	data, err := os.ReadFile(object)
	if err != nil {
		t.Fatal(err)
	}
	data[20] = 129
	f, err := parseCubin(data)
	if err != nil || f.Version != elf.EV_CURRENT || data[20] != 129 {
		t.Errorf("an object of ELF version 129: %v", err)
	}
	if _, err := parseCubin(data[:10]); err == nil {
		t.Error("a short object was parsed")
	}
	if err := hasKernels(object, []string{"_Z7missingv"}); err == nil {
		t.Error("a missing kernel was found")
	}
}

// The table of images has each image's source, capability and form.
func TestAssembly(t *testing.T) {
	all := []image{{path: "a", kernels: []string{"_Z4flati", "_Z4normi"}, target: "90a"}, {path: "b", target: "120", source: 3}, {path: "c", target: "80", source: 3, ptx: 1}}
	text, err := assembly(all)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		".quad .Lcode0, .Lkernels0\n.long 0, 90, 1, 0\n.quad .Lcode1, .Lkernels1\n.long 3, 120, 0, 0\n.quad .Lcode2, .Lkernels2\n.long 3, 80, 0, 1\n.quad 0, 0, 0, 0\n",
		".incbin \"a\"\n.byte 0\n.Lkernels0:\n.asciz \"_Z4flati\"\n.asciz \"_Z4normi\"\n.byte 0\n",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
	all[1].target = "12x"
	if _, err := assembly(all); !errors.Is(err, ErrCompile) || !strings.Contains(err.Error(), `"12x"`) {
		t.Errorf("target 12x: %v", err)
	}
}

// An object that needs a library that images lack is refused.
func TestLibraries(t *testing.T) {
	cxx := compilers()
	path, err := exec.Command(cxx[0], append(cxx[1:], "-print-file-name=libstdc++.so.6")...).Output()
	if err != nil {
		t.Skip(err)
	}
	library := strings.TrimSpace(string(path))
	if err := checkLibraries(library); err != nil {
		t.Errorf("the C++ library: %v", err)
	}
	all := present
	defer func() { present = all }()
	present = all[:len(all)-1]
	if err := checkLibraries(library); !errors.Is(err, ErrCompile) || !strings.Contains(err.Error(), "libgcc_s.so.1") {
		t.Errorf("the C++ library where libgcc is missing: %v", err)
	}
}

// The error for an environment without NVRTC has the remedy.
func TestNoNVRTC(t *testing.T) {
	if _, _, err := GPU("..", t.TempDir(), Targets, nil); err == nil || !strings.Contains(err.Error(), "make cuda") || strings.Contains(err.Error(), "%!") {
		t.Error(err)
	}
}
