// Command build builds the shared objects of cuda/: the one for GPUs, with the given NVRTC or nvcc,
// or with -twin the host twin, with the C++ compiler.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-serving/tandem/cuda"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	nvcc := flag.String("nvcc", os.Getenv("TANDEM_NVCC"), "the compiler for GPUs")
	nvrtc := flag.String("nvrtc", "", "a Python environment with NVRTC and CUDA's runtime, to compile with instead of nvcc")
	twin := flag.Bool("twin", false, "build the host twin instead")
	out := flag.String("o", "", "copy the shared object there")
	targets := flag.String("targets", "", "the architectures of the machine code; default: all")
	only := flag.String("only", "", "compile only these sources, separated by commas, and print what their kernels take")
	quiet := flag.Bool("q", false, "do not print what each kernel takes")
	flag.Parse()
	architectures := cuda.Targets
	if *targets != "" {
		architectures = strings.Split(*targets, ",")
	}
	path, err := "", error(nil)
	sources := strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	var used []cuda.Usage
	switch {
	case *twin:
		path, err = cuda.Twin(".", "")
	case *nvrtc != "":
		path, used, err = cuda.GPU(".", *nvrtc, architectures, sources)
	case *nvcc == "":
		return errors.New("build: -nvrtc must be a Python environment with NVRTC, as `make cuda` installs it, or -nvcc (or TANDEM_NVCC) the path of nvcc 13.0, as `make cuda-nvcc` does")
	case len(sources) > 0:
		used, err = cuda.Measure(".", *nvcc, architectures, sources)
	default:
		path, used, err = cuda.GPUByNVCC(".", *nvcc, architectures)
	}
	if !*quiet || err != nil {
		for _, u := range used {
			fmt.Printf("%-20s %-7s %3d registers %6d instructions %5d per KB\n", u.Kernel, u.Arch, u.Registers, u.Instructions, u.PerKB)
		}
	}
	if err != nil || *out == "" || path == "" {
		return err
	}
	object, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(*out), 0o755); err != nil {
		return err
	}
	// Replace the file atomically: a program may have the old one open.
	if err := os.WriteFile(*out+".new", object, 0o755); err != nil {
		return err
	}
	return os.Rename(*out+".new", *out)
}
