//go:build linux

package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// packageName matches the name of a package in front of an error's text.
var packageName = regexp.MustCompile(`(^|: )(engine|model|safetensors|discover|launch|tlsconf|config|gateway|cli): `)

// Errors of a first start name the remedy, and no package.
func TestBinaryErrorsNameRemedy(t *testing.T) {
	const model = "../../engine/model/testdata/gqa-tied"
	broken := func(remove, name, text string) string {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(model)); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(dir, remove)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 4711\n"
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	for name, c := range map[string]struct {
		args string
		want []string
	}{
		"bare name":              {"serve gpt2", []string{"no folder gpt2 here", "Nothing is downloaded", "tandem pull ORG/NAME"}},
		"page of the hub":        {"serve https://huggingface.co/openai/gpt-oss-20b", []string{"tandem pull openai/gpt-oss-20b"}},
		"hf URL":                 {"serve hf://openai/gpt-oss-20b", []string{"tandem pull openai/gpt-oss-20b"}},
		"LFS pointer, weights":   {"serve --port 0 --model " + broken("model.safetensors", "model.safetensors", pointer), []string{"model.safetensors", "`git lfs pull`"}},
		"LFS pointer, config":    {"serve --port 0 --model " + broken("config.json", "config.json", pointer), []string{"config.json", "`git lfs pull`"}},
		"LFS pointer, GGUF":      {"serve --port 0 --model " + broken("model.safetensors", "model.gguf", pointer) + "/model.gguf", []string{"model.gguf", "`git lfs pull`"}},
		"bin":                    {"serve --port 0 --model " + broken("model.safetensors", "pytorch_model.bin", "x"), []string{"pytorch_model.bin, which is not read", "safetensors"}},
		"plan of ORG/NAME":       {"plan memory openai/gpt-oss-120b --kv-memory 1GiB", []string{"tandem pull openai/gpt-oss-120b"}},
		"plan without memory":    {"plan memory builtin", []string{"--kv-memory 8GiB"}},
		"upstream, no scheme":    {"gateway --port 0 --upstream localhost:8000", []string{"write http://localhost:8000"}},
		"upstream with a path":   {"gateway --port 0 --upstream 127.0.0.1:8000/v1", []string{"write http://127.0.0.1:8000/v1"}},
		"upstream, unknown kind": {"gateway --port 0 --upstream luck", []string{`"luck"`, "want a URL"}},
	} {
		args := strings.Fields(c.args)
		refusedStart(t, name, 2, c.want, args...)
		_, errOut, _ := tandem(t, nil, args...)
		lines := strings.Split(strings.TrimSpace(errOut), "\n")
		_, text, _ := strings.Cut(lines[len(lines)-1], ": ")
		if packageName.MatchString(text) {
			t.Errorf("%s: the name of a package in %q", name, text)
		}
	}
	// The last line of up has the error of the node that ended it.
	c := newCluster(t)
	_, errOut, err := tandem(t, nil, "up", "--state-dir", c.state, "--port", strconv.Itoa(c.port), "--model", broken("model.safetensors", "model.safetensors", pointer))
	lines := strings.Split(strings.TrimSpace(errOut), "\n")
	if last := lines[len(lines)-1]; err == nil || !strings.HasPrefix(last, "tandem up: ") || !strings.Contains(last, "`git lfs pull`") {
		t.Errorf("up with a bad model: %v, %q", err, last)
	}
	if out, errOut, err := tandem(t, nil, "plan", "memory", "builtin", "--kv-memory", "1GiB"); err != nil || !strings.Contains(out, "KV cache") {
		t.Errorf("plan of the built-in model: %v, %s%s", err, out, errOut)
	}
}

// Ctrl-C ends a load test with the status of a signal, also while it waits for the server, and the
// wait names its reason.
func TestBinaryBenchInterrupted(t *testing.T) {
	t.Parallel()
	server, _ := slowServer(t)
	for _, c := range []struct{ url, args, until string }{
		{closesAll(t), "--ready-check-timeout-sec 60", "No answer yet"},
		{server.URL, "--request-rate 1", "Starting main benchmark run"},
	} {
		args := append([]string{"bench", "serve", "--base-url", c.url, "--model", "m", "--tokenizer", "builtin", "--num-prompts", "50"}, strings.Fields(c.args)...)
		bench := startTerminal(t, args...)
		bench.expect(c.until)
		time.Sleep(200 * time.Millisecond) // until requests have begun
		bench.enter(ctrlC)
		bench.expect("tandem bench: stopped: interrupt")
		bench.wantExit(130)
	}
}
