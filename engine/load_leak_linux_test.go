package engine

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// A model that cannot be loaded leaves no open file, no mapping of its weights
// and no goroutine, wherever the loading came to its end.
func TestFailedLoadsLeakNothing(t *testing.T) {
	goroutines := goleak.IgnoreCurrent()
	edit := func(file string, change func([]byte) []byte) func(string) error {
		return func(dir string) error {
			data, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, file), change(data), 0o600)
		}
	}
	swap := func(file, old, new string) func(string) error {
		return edit(file, func(b []byte) []byte { return bytes.Replace(b, []byte(old), []byte(new), 1) })
	}
	for what, c := range map[string]struct {
		spoil func(dir string) error
		o     LoadOptions
	}{
		"torn config":           {spoil: edit("config.json", func(b []byte) []byte { return b[:len(b)/2] })},
		"unsupported kind":      {spoil: swap("config.json", "LlamaForCausalLM", "MambaForCausalLM")},
		"another vocabulary":    {spoil: swap("config.json", `"vocab_size": 256`, `"vocab_size": 264`)},
		"more layers":           {spoil: swap("config.json", `"num_hidden_layers": `, `"num_hidden_layers": 1`)},
		"torn header":           {spoil: edit("model.safetensors", func(b []byte) []byte { return b[:100] })},
		"torn data":             {spoil: edit("model.safetensors", func(b []byte) []byte { return b[:len(b)-2] })},
		"a tensor missing":      {spoil: swap("model.safetensors", `"model.norm.weight"`, `"model.norm.luck00"`)},
		"too little memory":     {o: LoadOptions{KVMemory: 1}},
		"more than the context": {o: LoadOptions{MaxModelLen: 1 << 30}},
	} {
		dir := filepath.Join(t.TempDir(), "leaktest")
		if err := os.CopyFS(dir, os.DirFS("model/testdata/mha")); err != nil {
			t.Fatal(err)
		}
		if c.spoil != nil {
			if err := c.spoil(dir); err != nil {
				t.Fatal(err)
			}
		}
		c.o.Model, c.o.Threads = dir, 2
		for range 3 {
			if l, err := Load(c.o); err == nil {
				t.Errorf("%s: loaded", what)
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}
		}
		if held := held(t, dir); held != "" {
			t.Errorf("%s: left behind:\n%s", what, held)
		}
		if err := goleak.Find(goroutines); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// held lists the open files and mappings below a folder.
func held(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, dir) { // else it is closed by now
			out.WriteString(to + "\n")
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, dir) {
			out.WriteString(line)
		}
	}
	return out.String()
}
