//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// otherModel is the built-in model in a folder of that name, with other positions: it
// says other things.
func otherModel(t *testing.T, name string) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), name)
	if err := os.CopyFS(dir, os.DirFS("../../engine/builtin/model")); err != nil {
		t.Fatal(err)
	}
	editConfig(t, dir, map[string]any{"rope_theta": 500.0})
	return dir
}

// completeBy is complete of a model by its name, after a text; an error has the status.
func (b *battle) completeBy(model, prompt string, n int) (string, error) {
	resp, err := b.post("/v1/completions", map[string]any{"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	var a struct {
		Model   string
		Choices []struct{ Text string }
	}
	if err := json.Unmarshal(text, &a); err != nil || resp.StatusCode != http.StatusOK || a.Model != model || len(a.Choices) != 1 {
		return "", fmt.Errorf("%s by %q: %s", resp.Status, a.Model, text)
	}
	return a.Choices[0].Text, nil
}

// Two models, each on a prefill and a decode node of its own, behind one gateway as one
// URL: all are listed, each name gets its model's words, whatever else runs, and prompts are
// prefilled by nodes of their model. Where one model has lost its nodes, the other goes on.
func TestBinarySeveralModels(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := &battle{cluster: c, certs: filepath.Join(c.state, "certs")}
	if _, stderr, err := tandem(t, nil, "ca", b.certs, "gateway/gateway", "node/node"); err != nil {
		t.Fatalf("tandem ca: %v\n%s", err, stderr)
	}
	address := loopback()
	draw := func(role, name string, last int, flags ...string) *member {
		m := &member{name: name, role: role, host: address(last), out: new(output)}
		m.flags = append([]string{role, "--tls-dir", b.certsOf(role), "--log-level", "warning", "--node-name", name, "--host", m.host}, flags...)
		return m
	}
	b.gateways = []*member{draw("gateway", "gateway-0", 1, "--min-remote-prefill-tokens", "32", "--insecure")}
	models := []string{"tandem-builtin", "other"}
	of := []string{"builtin", otherModel(t, "other")}
	for i := range models {
		for j, role := range []string{"prefill", "decode"} {
			b.nodes = append(b.nodes, draw(role, role+"-"+models[i], 4+2*i+j, "--model", of[i], "--served-model-name", models[i],
				"--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--join", net.JoinHostPort(address(1), "7946")))
		}
	}
	b.door(b.gateways[0])
	t.Cleanup(b.bury)
	for _, m := range b.all() {
		b.begin(m)
	}
	b.whole(b.gateways...)
	var list struct{ Data []struct{ ID string } }
	b.wait(startBound, "both models are listed", func() bool { return b.getJSON("/v1/models", &list) == nil && len(list.Data) == len(models) })

	const nAsks = 3
	prompt := func(i int) string {
		s := fmt.Sprint("Story ", i, ": ")
		for range 20 {
			s += "once upon a time "
		}
		return s
	}
	var said [2][nAsks]string
	ask := func(model, i int) {
		text, err := b.completeBy(models[model], prompt(i), 12)
		if err != nil || said[model][i] != "" && text != said[model][i] {
			t.Errorf("%s, prompt %d: %q, and before %q: %v", models[model], i, text, said[model][i], err)
		}
		said[model][i] = text
	}
	for m := range models { // one after the other
		for i := range nAsks {
			ask(m, i)
		}
	}
	if said[0] == said[1] {
		t.Errorf("both models say %q", said[0])
	}
	var wg sync.WaitGroup
	for m := range models { // and mixed
		for i := range nAsks {
			wg.Go(func() { ask(m, i) })
		}
	}
	wg.Wait()
	for _, m := range b.nodes {
		if m.role == "prefill" {
			if n, ok := b.metric(m, "tandem:prefill_tokens_computed_total", ""); !ok || n == 0 {
				t.Errorf("%s has computed %g tokens", m.name, n)
			}
		}
	}
	if _, err := b.completeBy("third", "x", 1); err == nil {
		t.Error("a model that nobody serves has answered")
	}
	b.kill(b.nodes[2])
	b.kill(b.nodes[3])
	ask(0, 0)
	if text, err := b.completeBy(models[1], prompt(0), 1); err == nil {
		t.Errorf("a model without nodes said %q", text)
	}
}
