package cli

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/hub"
)

// write makes files below a folder; a text that begins with "->" is a link.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, link := strings.CutPrefix(text, "->"); link {
			err = os.Symlink(to, path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A name of the hub is found as the hub's own tools lay it out.
func TestFindModel(t *testing.T) {
	home := t.TempDir()
	cache := filepath.Join(home, ".cache/huggingface/hub")
	write(t, cache, map[string]string{
		"models--org--a/blobs/1":                     "{}",
		"models--org--a/refs/main":                   "c1\n",
		"models--org--a/refs/pr/1":                   "c2",
		"models--org--a/snapshots/c1/config.json":    "->../../blobs/1",
		"models--org--a/snapshots/c2/config.json":    "->../../blobs/1",
		"models--org--one/snapshots/c9/config.json":  "{}",
		"models--org--two/snapshots/c1/config.json":  "{}",
		"models--org--two/snapshots/c2/config.json":  "{}",
		"models--org--torn/refs/main":                "c1",
		"models--org--torn/snapshots/c1/config.json": "->../../blobs/gone",
		"models--org--evil/refs/main":                "../../models--org--a/snapshots/c1",
		"models--org--empty/refs/main":               "c1",
		"models--org--gguf/snapshots/c1/a.gguf":      "{}",
	})
	env := []string{"HOME=" + home}
	for _, c := range []struct {
		model, revision string
		env             []string
		want            string // below the cache, or part of the refusal after "!"
	}{
		{"org/a", "", env, "models--org--a/snapshots/c1"},
		{"org/a", "main", env, "models--org--a/snapshots/c1"},
		{"org/a", "pr/1", env, "models--org--a/snapshots/c2"},
		{"org/a", "c2", env, "models--org--a/snapshots/c2"},
		{"org/a", "c3", env, `!has no revision "c3"; it has the commits ["c1" "c2"]`},
		{"org/a", "../x", env, "!not the name of a branch"},
		{"org/one", "", env, "models--org--one/snapshots/c9"},
		{"org/two", "", env, "!choose one by --revision"},
		{"org/torn", "", env, "!without its config.json"},
		{"org/gguf", "", env, "!no config.json: give the path of one of them, such as " + cache + "/models--org--gguf/snapshots/c1/a.gguf"},
		{"org/evil", "", env, "!has no revision"},
		{"org/empty", "", env, "!is not whole in the Hugging Face cache"},
		{"org/none", "", env, "!Nothing is downloaded unless --download is given: run `tandem pull org/none`"},
		{"org/a", "", []string{"HF_HUB_CACHE=" + cache, "HOME=/nowhere"}, "models--org--a/snapshots/c1"},
		{"org/a", "", []string{"HF_HOME=" + filepath.Dir(cache), "HOME=/nowhere"}, "models--org--a/snapshots/c1"},
		{"org/a", "", []string{"HF_HOME=~/.cache/huggingface", "HOME=" + home}, "models--org--a/snapshots/c1"},
		{"org/a", "", []string{"XDG_CACHE_HOME=" + filepath.Join(home, ".cache")}, "models--org--a/snapshots/c1"},
		{"org/a", "", []string{"HF_HUB_CACHE=/nowhere", "HOME=" + home}, "!/nowhere does not have that model"},
		{"org/a", "", nil, "!set HF_HUB_CACHE"},
	} {
		path, name, err := findModel(c.model, c.revision, c.env, nil)
		if text, refused := strings.CutPrefix(c.want, "!"); refused {
			if !errors.Is(err, hub.ErrModel) || !strings.Contains(err.Error(), text) {
				t.Errorf("%s at %q with %q: %q, %v; want a refusal with %q", c.model, c.revision, c.env, path, err, text)
			}
		} else if err != nil || path != filepath.Join(cache, c.want) || name != c.model {
			t.Errorf("%s at %q with %q: %q, %q, %v; want %s", c.model, c.revision, c.env, path, name, err, c.want)
		}
	}
	// What is a path stays one.
	t.Chdir(cache)
	write(t, cache, map[string]string{"org/a/config.json": "{}"})
	for _, p := range []string{"", "builtin", "org/a", "./org/b", "/x/y", "a/b/c", "org"} {
		if path, name, err := findModel(p, "", env, nil); err != nil || path != p || name != "" {
			t.Errorf("%q became %q, %q, %v", p, path, name, err)
		}
		if _, _, err := findModel(p, "nope", env, nil); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), "--revision nope") {
			t.Errorf("a revision of %q: %v", p, err)
		}
	}
}

func TestChatTemplateFile(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"t.jinja": "{{ messages }}", "empty": ""})
	m := Model{LoadOptions: engine.LoadOptions{Model: "builtin"}, template: filepath.Join(dir, "t.jinja")}
	o, err := m.Options(t.Context(), nil, slog.New(slog.DiscardHandler))
	if err != nil || o.ChatTemplate != "{{ messages }}" || m.ServedName != "" {
		t.Errorf("%v, %+v", err, o)
	}
	for _, bad := range []string{"none", "empty", "."} {
		m.template = filepath.Join(dir, bad)
		if _, err := m.Options(t.Context(), nil, slog.New(slog.DiscardHandler)); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), m.template) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
