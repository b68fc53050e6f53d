package hub

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// write makes files below a folder; a text that begins with "->" is a link.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if to, link := strings.CutPrefix(text, "->"); err == nil && link {
			err = os.Symlink(to, path)
		} else if err == nil {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// sample is a cache as huggingface_hub and interrupted downloads leave it.
func sample(t *testing.T) Cache {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"CACHEDIR.TAG":                                                "",
		"datasets--a--b/blobs/1":                                      "",
		"models--../blobs/1":                                          "",
		".locks/models--org--a/1.lock":                                "",
		"models--org--a/blobs/config":                                 "{}",
		"models--org--a/blobs/one":                                    "1",
		"models--org--a/blobs/two":                                    "22",
		"models--org--a/refs/main":                                    "c1",
		"models--org--a/refs/refs/pr/1":                               "c2",
		"models--org--a/snapshots/c1/config.json":                     "->../../blobs/config",
		"models--org--a/snapshots/c2/config.json":                     "->../../blobs/config",
		"models--org--a/snapshots/c1/m.safetensors":                   "->../../blobs/one",
		"models--org--a/snapshots/c2/m.safetensors":                   "->../../blobs/two",
		"models--org--a/snapshots/c2/same.safetensors":                "->../../blobs/two",
		"models--org--index/snapshots/c/config.json":                  "{}",
		"models--org--index/snapshots/c/model.safetensors.index.json": `{"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"../3.safetensors"}}`,
		"models--org--index/snapshots/c/1.safetensors":                "x",
		"models--org--torn/snapshots/c/config.json":                   "->../../blobs/gone",
		"models--org--gguf/snapshots/c/m-Q4_K_M.gguf":                 "GGUF",
		"models--org--part/blobs/1.incomplete":                        "12345",
		"blobs/ab/shared":                                             "shared",
		"models--org--shared/blobs/x":                                 "->../../blobs/ab/shared",
		"models--org--shared/snapshots/c/m.gguf":                      "->../../blobs/x",
		"models--gpt2/snapshots/c/config.json":                        "{}",
		"models--gpt2/snapshots/c/model.safetensors":                  "x",
	})
	return Cache{dir}
}

func TestList(t *testing.T) {
	list, err := sample(t).List()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range list {
		got = append(got, fmt.Sprintf("%s %s %q %d %q", s.Name, s.Commit, s.Refs, s.Size, s.Missing))
	}
	want := []string{
		`gpt2 c [] 3 []`,
		`org/a c1 ["main"] 3 []`,
		`org/a c2 ["refs/pr/1"] 4 []`,
		`org/gguf c [] 4 []`,
		`org/index c [] 82 ["../3.safetensors" "2.safetensors"]`,
		`org/part  [] 5 ["config.json"]`,
		`org/shared c [] 6 []`,
		`org/torn c [] 0 ["config.json" "model.safetensors"]`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if list, err := (Cache{"/nowhere"}).List(); err != nil || len(list) > 0 {
		t.Errorf("no cache: %v, %v", list, err)
	}
}

// Removing a revision keeps what others use, and removing the model keeps the shared store.
func TestRemove(t *testing.T) {
	c := sample(t)
	for _, bad := range [][2]string{{"org/none", ""}, {"org/a", "c3"}} {
		if _, err := c.PlanRemoval(bad[0], bad[1]); !errors.Is(err, ErrModel) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, s := range []struct {
		name, revision string
		bytes          int64
		left           []string // below the model's folder; nil: no folder
	}{
		{"org/a", "main", 1, []string{"blobs/config", "blobs/two", "refs/refs/pr/1", "snapshots/c2/config.json", "snapshots/c2/m.safetensors", "snapshots/c2/same.safetensors"}},
		{"org/a", "c2", 4, nil},
		{"org/shared", "", 6, nil},
		{"org/part", "", 5, nil},
		{"org/torn", "", 0, nil},
	} {
		r, err := c.PlanRemoval(s.name, s.revision)
		if err != nil || r.Bytes != s.bytes || len(r.Snapshots) != 1 {
			t.Fatalf("%s: %+v, %v", s.name, r, err)
		}
		if err := r.Run(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		var left []string
		if err := walk(c.Folder(s.name), func(name, _ string) { left = append(left, name) }); err != nil || !slices.Equal(left, s.left) {
			t.Errorf("%s: left %q, %v", s.name, left, err)
		}
	}
	for _, kept := range []string{"blobs/ab/shared", "datasets--a--b/blobs/1"} {
		if _, err := os.Stat(filepath.Join(c.Dir, kept)); err != nil {
			t.Error(err)
		}
	}
}

func TestSplitRevision(t *testing.T) {
	for text, want := range map[string]string{
		"org/name": "org/name ", "org/name:v1": "org/name v1", "org/name:refs/pr/1": "org/name refs/pr/1", "hf://org/name": "org/name ",
		"https://huggingface.co/org/name/tree/main": "org/name ",
		"name": "", "a/b/c": "", "org/a--b": "", "org/../b": "", "org/a..b": "", "org/name:../x": "", "org/name:/x": "", "": "", "/etc/passwd": "", "org/name:a\x00": "",
		"org/" + strings.Repeat("a", 600): "",
	} {
		name, revision, err := SplitRevision(text)
		if got := name + " " + revision; want == "" != errors.Is(err, ErrModel) || err == nil && got != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
