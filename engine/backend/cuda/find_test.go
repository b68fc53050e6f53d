package cuda

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// cuBLASLt is found in CUDA's folders and in those of Python's packages, environments first.
func TestFindBLAS(t *testing.T) {
	root := t.TempDir()
	want := []string{
		"/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
		"/home/me/.local/lib/python3.10/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"/usr/local/cuda-13/lib64/libcublasLt.so.13",
		"/usr/local/cuda-12.9/targets/sbsa-linux/lib/libcublasLt.so.13",
		"/usr/local/cuda-12.9/targets/sbsa-linux/lib/libcublasLt.so.12",
		"/usr/local/lib/python3.12/dist-packages/nvidia/cu13/lib/libcublasLt.so.13",
	}
	for _, path := range append(slices.Clone(want), "/usr/local/cuda-11/lib64/libcublasLt.so.11", "/usr/local/cuda-13/lib64/libcublas.so.13") {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{"VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda[", "HOME": "/home/me"}
	got := findBLAS(root, func(name string) string { return env[name] })
	for i := range want {
		want[i] = filepath.Join(root, want[i])
	}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}
