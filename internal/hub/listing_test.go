package hub

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/hub/hubtest"
)

// No listing leads to a path out of the snapshot, to a blob that is no hash, or to another server.
func FuzzListing(f *testing.F) {
	page, err := json.Marshal([]any{
		hubtest.Entry("config.json", nil), hubtest.Entry("a/model.safetensors", nil), map[string]any{"type": "directory", "path": "a"},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(page, `<https://hub.example/api/models/a/b/tree/c?cursor=1>; rel="next"`)
	f.Add([]byte(`[{"type":"file","path":"../a.json","oid":"x","size":1}]`), `<x>; rel="prev", <?cursor=2>; rel="next"`)
	f.Fuzz(func(t *testing.T, text []byte, link string) {
		_ = nextPage(link).Encode()
		var page []entry
		if json.Unmarshal(text, &page) != nil {
			return
		}
		l := listing{seen: map[string]bool{}}
		if l.add(page) != nil || l.check() != nil {
			return
		}
		seen := map[string]bool{}
		for _, file := range l.files {
			inside := filepath.Join("/snapshot", file.Path)
			if !strings.HasPrefix(inside, "/snapshot/") || seen[inside] || !filepath.IsLocal(file.Path) || !slices.Contains(extensions, filepath.Ext(inside)) {
				t.Errorf("path %q", file.Path)
			}
			seen[inside] = true
			if n := len(file.Hash); n != 40 && n != 64 || strings.Trim(file.Hash, "0123456789abcdef") != "" || file.Size < 0 {
				t.Errorf("%+v", file)
			}
		}
	})
}
