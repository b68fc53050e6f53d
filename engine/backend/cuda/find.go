package cuda

import (
	"path/filepath"
	"slices"
)

// Folders of cuBLASLt other than those of the dynamic linker: CUDA's, and those of Python's
// packages, on which PyTorch depends. Environment variables name the roots of virtual environments.
var (
	blasRoots   = []string{"/usr", "/usr/local", "/opt/conda"}
	blasEnvs    = []string{"VIRTUAL_ENV", "CONDA_PREFIX"}
	blasFolders = []string{
		"cuda*/lib64", "cuda*/targets/*/lib", "lib",
		"lib/python3*/site-packages/nvidia/*/lib", "lib/python3*/dist-packages/nvidia/*/lib",
	}
)

// findBLAS returns the paths of cuBLASLt that exist below root, which is / but in tests: those of
// environments first, and of two in a folder the newer one.
func findBLAS(root string, getenv func(string) string) []string {
	var roots, found []string
	for _, e := range blasEnvs {
		if dir := getenv(e); dir != "" {
			roots = append(roots, dir)
		}
	}
	if home := getenv("HOME"); home != "" {
		roots = append(roots, filepath.Join(home, ".local"))
	}
	for _, r := range append(roots, blasRoots...) {
		for _, folder := range blasFolders {
			paths, err := filepath.Glob(filepath.Join(root, r, folder, "libcublasLt.so.1[23]"))
			if err != nil {
				continue // a root with the syntax of a pattern
			}
			slices.Reverse(paths)
			found = append(found, paths...)
		}
	}
	return found
}
