//go:build linux

package e2e

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/hub/hubtest"
)

// A signal ends a pull in the middle of a file; tandem up --download continues there, once for all
// nodes, and serves the model by its name. Nothing is downloaded after the start.
func TestBinaryPull(t *testing.T) {
	path := binary(t)
	h := hubtest.New(t, "org/name", hubtest.Folder(t, "../../engine/builtin/model"))
	t.Setenv("HF_ENDPOINT", h.URL)
	t.Setenv("HF_HUB_CACHE", hubtest.Memory(t))
	t.Setenv("HF_TOKEN", "hf_secret")
	const part = 1 << 20
	var held atomic.Bool
	half := make(chan struct{})
	h.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		if !storage || !strings.HasSuffix(r.URL.Path, "/model.safetensors") || held.Swap(true) {
			return false
		}
		_, _ = w.Write(h.Files["model.safetensors"][:part])
		_ = http.NewResponseController(w).Flush()
		close(half)
		<-r.Context().Done()
		return true
	})
	var errOut bytes.Buffer
	cmd := exec.Command(path, "pull", "org/name")
	cmd.Stderr = &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-half
	time.Sleep(100 * time.Millisecond) // until the bytes are read; fewer are continued, too
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 130 || !strings.HasSuffix(errOut.String(), "tandem pull: stopped: interrupt\n") {
		t.Fatalf("status %d, %s", status, errOut.String())
	}
	if out, _, err := tandem(t, nil, "models"); err != nil || !strings.Contains(out, "org/name") || !strings.Contains(out, "no: config.json missing") {
		t.Errorf("models: %s, %v", out, err)
	}
	h.Requests()

	c := startCluster(t, "--download", "--model", "org/name")
	resolved, resumed := 0, false
	for _, r := range h.Requests() {
		if strings.Contains(r.Path, "/revision/") {
			resolved++
		}
		resumed = resumed || r.Storage && r.Range != ""
		if r.Storage && r.Authorization != "" {
			t.Errorf("the token went to storage: %+v", r)
		}
	}
	if resolved != 1 || !resumed {
		t.Errorf("%d processes asked the hub; resumed: %v", resolved, resumed)
	}
	resp, err := c.client().Get(c.url("/v1/models"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), `"org/name"`) {
		t.Errorf("%s, %v", text, err)
	}
	if _, err := c.complete([]int32{300, 301, 302}, 4); err != nil {
		t.Error(err)
	}
	if asked := h.Requests(); len(asked) > 0 {
		t.Errorf("asked after the start: %+v", asked)
	}
	for _, log := range []string{c.stderr.String(), errOut.String()} {
		if strings.Contains(log, "hf_secret") || strings.Contains(log, "signature") {
			t.Errorf("a secret in the log: %s", log)
		}
	}
	if _, err := os.Stat(os.Getenv("HF_HUB_CACHE") + "/models--org--name/refs/main"); err != nil {
		t.Error(err)
	}
}
