package cli

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/hub/hubtest"
)

// checkpoint is a small model that is loaded.
const checkpoint = "../../engine/model/testdata/gqa-tied"

func testHub(t *testing.T) (h *hubtest.Hub, env func(cache string) []string) {
	h = hubtest.New(t, "org/name", hubtest.Folder(t, checkpoint))
	return h, func(cache string) []string { return []string{"HF_ENDPOINT=" + h.URL, "HF_HUB_CACHE=" + cache} }
}

// A model is pulled, listed, loaded and removed.
func TestPullModelsRemove(t *testing.T) {
	h, environ := testHub(t)
	env := environ(hubtest.Memory(t))
	ok := func(args string, want ...string) (out, errOut string) {
		t.Helper()
		status, out, errOut := run(env, strings.Fields(args)...)
		if status != 0 {
			t.Fatalf("tandem %s: status %d, %s", args, status, errOut)
		}
		for _, w := range want {
			if !strings.Contains(out+errOut, w) {
				t.Errorf("tandem %s: %s%s, want %q", args, out, errOut, w)
			}
		}
		return out, errOut
	}
	refused := func(args string, status int, want string) {
		t.Helper()
		if got, out, errOut := run(env, strings.Fields(args)...); got != status || !strings.Contains(errOut, want) || out != "" || strings.Contains(errOut, "hub: ") {
			t.Errorf("tandem %s: status %d, %s%s; want %d, %q", args, got, out, errOut, status, want)
		}
	}
	ok("models", "has no models; `tandem pull ORG/NAME`")
	refused("pull", 2, "name the model, such as in `tandem pull ")
	refused("pull gpt2", 2, "want ORG/NAME")
	refused("pull org/none --quiet", 2, "answers 404")
	refused("pull org/name:v9 --quiet", 2, "no such revision")
	refused("rm org/name --yes", 2, "does not have org/name")
	refused("logits org/name --tokens 1", 2, "Nothing is downloaded unless --download")

	want, _ := ok("logits " + checkpoint + " --tokens 1,2")
	if got, errOut := ok("logits org/name --tokens 1,2 --download"); got != want || errOut != "" {
		t.Errorf("logits of the model: %s%s, want %s", got, errOut, want)
	}
	h.Requests()
	if got, _ := ok("logits org/name --tokens 1,2 --download"); got != want || len(h.Requests()) > 0 {
		t.Error("a model in the cache is downloaded again")
	}
	if out, _ := ok("pull org/name:v1 --dry-run", "org/name at 0123456789ab: ", "of which 0 B to download"); strings.Count(out, "yes\n") < 3 {
		t.Error(out)
	}
	dir, errOut := ok("pull org/name:v1 --quiet")
	if _, err := os.Stat(filepath.Join(strings.TrimSpace(dir), "config.json")); err != nil || errOut != "" {
		t.Errorf("%s, %s: %v", dir, errOut, err)
	}
	ok("models", "MODEL", "org/name", "main v1 0123456789ab", "yes       yes")
	out, _ := ok("models --json")
	var rows []struct {
		Name, Commit     string
		Size             int64
		Complete, Served bool
	}
	if err := json.Unmarshal([]byte(out), &rows); err != nil || len(rows) != 1 || !rows[0].Complete || !rows[0].Served || rows[0].Commit != hubtest.Commit || rows[0].Size == 0 {
		t.Errorf("%s: %v", out, err)
	}
	// A lost shard, an unknown architecture.
	if err := os.Remove(filepath.Join(strings.TrimSpace(dir), "model.safetensors")); err != nil {
		t.Fatal(err)
	}
	ok("models", "no: model.safetensors missing")
	ok("logits org/name --tokens 1,2 --download")
	config := filepath.Join(strings.TrimSpace(dir), "config.json")
	if err := os.Remove(config); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(`{"architectures":["LuckForCausalLM"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	ok("models", "LuckForCausalLM")

	refused("rm org/name", 2, "add --yes")
	ok("rm org/name --yes", "removed org/name: 1 revision, ")
	ok("models", "has no models")

	// Without a terminal there is a line for each tenth.
	_, errOut = ok("pull org/name")
	if n := strings.Count(errOut, "downloading"); n < 2 || n > 10 || !strings.Contains(errOut, "left=") {
		t.Errorf("%d lines: %s", n, errOut)
	}
}

// --dry-run lists what would be downloaded, and writes nothing.
func TestPullDryRun(t *testing.T) {
	h, environ := testHub(t)
	cache := filepath.Join(t.TempDir(), "cache")
	h.Requests()
	status, out, errOut := run(environ(cache), "pull", "org/name", "--dry-run", "--include", "*.safetensors", "--include", "config.json")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); status != 0 || len(lines) != 4 || !strings.HasSuffix(lines[1], "no") || errOut != "" {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
	for _, r := range h.Requests() {
		if strings.Contains(r.Path, "/resolve/") || r.Storage {
			t.Errorf("a file was requested: %+v", r)
		}
	}
	if _, err := os.Stat(cache); !os.IsNotExist(err) {
		t.Errorf("the cache exists: %v", err)
	}
	if status, out, errOut := run(environ(cache), "pull", "org/none", "--dry-run"); status != 2 || out != "" || !strings.Contains(errOut, "answers 404") {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
}

// Each GGUF file of a model is a row.
func TestModelsListsGGUF(t *testing.T) {
	_, environ := testHub(t)
	cache := t.TempDir()
	dir := filepath.Join(cache, "models--org--quants", "snapshots", hubtest.Commit)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("../../engine/model/testdata/gguf/qwen3.gguf")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"small.gguf": data, "torn.gguf": data[:100]} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	status, out, errOut := run(environ(cache), "models")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if status != 0 || len(lines) != 3 || !strings.HasPrefix(lines[1], "org/quants/small.gguf") || !strings.HasSuffix(lines[1], "yes       yes") ||
		!strings.HasPrefix(lines[2], "org/quants/torn.gguf") || !strings.Contains(lines[2], "no: ") {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
	_, out, _ = run(environ(cache), "models", "--json")
	var rows []struct {
		Name, File string
		Size       int
		Served     bool
	}
	if err := json.Unmarshal([]byte(out), &rows); err != nil || len(rows) != 2 || rows[0].File != "small.gguf" || rows[0].Size != len(data) || !rows[0].Served || rows[1].Served {
		t.Errorf("%s: %v", out, err)
	}
}

// A gated model names the licence and HF_TOKEN, and the token is in no text.
func TestPullGated(t *testing.T) {
	h, environ := testHub(t)
	h.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		hubtest.Refuse(w, http.StatusForbidden, "GatedRepo")
		return true
	})
	status, out, errOut := run(append(environ(hubtest.Memory(t)), "HF_TOKEN=hf_secret"), "pull", "org/name")
	if status != 2 || out != "" || !strings.Contains(errOut, "tandem pull: org/name: ") || !strings.Contains(errOut, "accept its licence") || strings.Contains(errOut, "hf_secret") {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
}

// huggingface_hub finds offline what tandem pulled, and tandem loads what huggingface_hub pulled,
// both from one server.
func TestHuggingFaceHub(t *testing.T) {
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, a Python with huggingface_hub: run make test")
	}
	h, environ := testHub(t)
	h.Files["original/params.json"] = []byte("{}")
	ours, theirs := hubtest.Memory(t), hubtest.Memory(t)
	if status, _, errOut := run(environ(ours), "pull", "org/name", "--quiet"); status != 0 {
		t.Fatal(errOut)
	}
	ask := func(cache, script string, env ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), python, "-c", script)
		cmd.Env = append(append(append(os.Environ(), environ(cache)...), "HF_HUB_DISABLE_XET=1", "HF_HUB_DISABLE_TELEMETRY=1", "HF_HUB_DISABLE_PROGRESS_BARS=1", "NO_PROXY=127.0.0.1"), env...)
		var errOut bytes.Buffer
		cmd.Stderr = &errOut
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v\n%s", err, errOut.String())
		}
		return strings.TrimSpace(string(out))
	}
	h.Requests()
	out := ask(ours, `
import json, os
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
folder = snapshot_download("org/name")
files = {}
for dir, _, names in os.walk(folder):
    for name in names:
        path = os.path.join(dir, name)
        files[os.path.relpath(path, folder)] = os.path.getsize(path)
assert hf_hub_download("org/name", "config.json") == os.path.join(folder, "config.json")
cache = scan_cache_dir()
assert not cache.warnings and not cache.incomplete_files, (cache.warnings, cache.incomplete_files)
(repo,) = cache.repos
(revision,) = repo.revisions
assert repo.repo_id == "org/name" and revision.refs == {"main"}, (repo, revision)
print(json.dumps(files))`, "HF_HUB_OFFLINE=1")
	if asked := h.Requests(); len(asked) > 0 {
		t.Errorf("asked offline: %+v", asked)
	}
	var files map[string]int
	if err := json.Unmarshal([]byte(out), &files); err != nil {
		t.Fatal(err)
	}
	for name := range files {
		if files[name] != len(h.Files[name]) {
			t.Errorf("%s: %d bytes, want %d", name, files[name], len(h.Files[name]))
		}
	}
	for _, name := range []string{"config.json", "model.safetensors", "tokenizer.json", "original/params.json"} {
		if _, ok := files[name]; !ok && h.Files[name] != nil {
			t.Errorf("huggingface_hub has no %s", name)
		}
	}

	dir, taken, _ := strings.Cut(ask(theirs, `
from huggingface_hub import snapshot_download
print(snapshot_download("org/name"))
print(snapshot_download("org/name", cache_dir="`+ours+`", ignore_patterns="*.gz"))`), "\n")
	weights := 0
	for _, r := range h.Requests() {
		if r.Method == http.MethodGet && r.Storage {
			weights++
		}
	}
	if !strings.HasPrefix(taken, ours) || weights != 1 {
		t.Errorf("huggingface_hub: %s, and %d downloads of the weights for two caches, one of which has them", taken, weights)
	}
	_, want, _ := run(nil, "logits", checkpoint, "--tokens", "1,2")
	if status, got, errOut := run(environ(theirs), "logits", "org/name", "--tokens", "1,2"); status != 0 || got != want {
		t.Errorf("status %d, %s%s; want %s", status, got, errOut, want)
	}
	if status, out, errOut := run(environ(theirs), "models"); status != 0 || !strings.Contains(out, "yes       yes") {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
	// A pull takes over their files.
	if status, out, errOut := run(environ(theirs), "pull", "org/name", "--quiet"); status != 0 || strings.TrimSpace(out) != dir {
		t.Errorf("status %d, %s%s; want %s", status, out, errOut, dir)
	}
	for _, r := range h.Requests() {
		if strings.Contains(r.Path, "/resolve/") {
			t.Errorf("downloaded again: %+v", r)
		}
	}
	if status, _, errOut := run(environ(theirs), "rm", "org/name", "--yes"); status != 0 {
		t.Error(errOut)
	}
}
