package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// The limits of a running process follow its file, by themselves and at SIGHUP; a
// file that is wrong changes nothing but a metric.
func TestBinaryReload(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	path := binary(t)
	file := filepath.Join(c.state, "serve.yaml")
	write := func(text string) {
		t.Helper()
		err := os.WriteFile(file+".new", fmt.Appendf(nil, "port: %d\n%s\n", c.port, text), 0o600)
		if err == nil {
			err = os.Rename(file+".new", file)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	refusal := func() string {
		resp, err := http.Post(c.url("/v1/completions"), "application/json", strings.NewReader(`{"prompt":"x","n":100,"max_tokens":1}`))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	failed := func(n int) bool {
		return strings.Contains(c.body("/metrics"), fmt.Sprintf("tandem:gateway_reload_failed{part=\"config\"} %d\n", n))
	}
	write("max-n: 4")
	c.start(path, "serve", "--config", file)
	c.wait(startBound, "serve is ready", func() bool { return c.body("/readyz") != "" })
	if got := refusal(); !strings.Contains(got, "at most 4 choices") {
		t.Fatal(got)
	}
	write("max-n: 2")
	c.wait(startBound, "the new limit holds", func() bool { return strings.Contains(refusal(), "at most 2 choices") })
	write("max-n: many")
	c.wait(startBound, "the bad file shows", func() bool { return failed(1) })
	if got := refusal(); !strings.Contains(got, "at most 2 choices") {
		t.Error(got)
	}
	write("max-n: 5\napi-key: ['']") // an open gateway
	c.wait(startBound, "the empty key is refused", func() bool { return strings.Contains(c.stderr.String(), "has an empty key") })
	if got := refusal(); !strings.Contains(got, "at most 2 choices") || !failed(1) {
		t.Error(got)
	}
	write("max-n: 3")
	c.wait(startBound, "the good file is taken", func() bool { return failed(0) && strings.Contains(refusal(), "at most 3 choices") })
	said := strings.Count(c.stderr.String(), "reloaded")
	c.signal(syscall.SIGHUP)
	c.wait(startBound, "SIGHUP is heard", func() bool {
		return strings.Count(c.stderr.String(), "reloaded") > said
	})
	if c.body("/readyz") == "" {
		t.Error("SIGHUP ended it")
	}
	c.signal(syscall.SIGINT)
	c.waitGone(stopBound)
}
