//go:build clients

package clients

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/checkpoint"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// All clients of the lock files, over all formats and models: make clients. The page is written
// where no client was picked by TANDEM_CLIENTS_ONLY, a part of its script's name.
func TestAllClients(t *testing.T) {
	folder, only := os.Getenv("TANDEM_CLIENTS"), os.Getenv("TANDEM_CLIENTS_ONLY")
	e := environment{python: filepath.Join(folder, "bin/python"), olderPython: filepath.Join(folder, "openai2/bin/python"), node: filepath.Join(folder, "bin/node")}
	formats, err := readFormats()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := setup{Key: key, Formats: play(t, formats), Models: []served{builtIn(t), random(t, dir)}}
	if err := e.write(s, dir); err != nil {
		t.Fatal(err)
	}
	var all []report
	for _, script := range scripts {
		if !strings.Contains(script, only) {
			continue
		}
		began := time.Now()
		r, err := e.run(t.Context(), script)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s %s, %.0f s", r.Client, r.Version, time.Since(began).Seconds())
		for _, c := range r.Checks {
			t.Logf("%s, %s, %s: %s %.300q", c.Surface, c.Ran, c.Mode, c.verdict(), c.reasons())
			for _, f := range c.Failed {
				t.Errorf("%s: %s", f.Name, f.Why)
			}
			for _, o := range c.Refused {
				t.Errorf("%s is refused: %s", o.Name, o.Why)
			}
		}
		all = append(all, r)
	}
	if only != "" {
		return
	}
	if err := os.WriteFile("../../../docs/clients.md", page(all, len(formats)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// builtIn starts the program with the model in it.
func builtIn(t *testing.T) served { return startProgram(t, "built-in") }

// random starts the program with a model of random weights, whose tokens are bytes.
func random(t *testing.T, folder string) served {
	folder = filepath.Join(folder, "random")
	special := []string{turnStart, turnEnd}
	s := checkpoint.Shape{Vocab: 256 + len(special), Hidden: 64, FFN: 128, Layers: 2, Heads: 4, KVHeads: 2, HeadDim: 16, Positions: 8192, RopeTheta: 10000}
	if err := s.HuggingFace(folder); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"tokenizer.json":         nodestest.Tokenizer(nil, special...),
		"tokenizer_config.json":  []byte(`{"eos_token": "` + turnEnd + `"}`),
		"generation_config.json": []byte(`{"eos_token_id": 257}`),
		"chat_template.jinja":    []byte(template + "{% endif %}"),
	} {
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return startProgram(t, "random", folder)
}

// startProgram runs `tandem serve` on a free port of loopback until the test ends.
func startProgram(t *testing.T, name string, args ...string) served {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	args = append([]string{"serve"}, append(args, "--port", port, "--api-key", key, "--tool-call-parser", "hermes", "--served-model-name", name)...)
	cmd := exec.Command(os.Getenv("TANDEM_BINARY"), args...)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		<-ended
	})
	s := served{Name: name, URL: "http://127.0.0.1:" + port, Model: name}
	if err := until(t.Context(), "the model "+name+" is served", func() bool { return len(ended) > 0 || ready(t.Context(), s.URL) }); err != nil || len(ended) > 0 {
		text, _ := os.ReadFile(log.Name())
		t.Fatalf("%q: %v\n%s", args, err, text)
	}
	return s
}

// ready reports whether a server accepts requests.
func ready(ctx context.Context, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/readyz", nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
