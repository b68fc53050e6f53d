//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// batchLine is what the test reads of a line of run-batch's output.
type batchLine struct {
	ID       string `json:"custom_id"`
	Response struct {
		Status int `json:"status_code"`
		Body   struct {
			Object  string
			Count   int
			Choices []struct {
				Finish string `json:"finish_reason"`
			}
		}
	}
	Error json.RawMessage
}

func batchLines(t *testing.T, path string) map[string]batchLine {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]batchLine{}
	for line := range strings.Lines(string(text)) {
		var l batchLine
		if err := json.Unmarshal([]byte(line), &l); err != nil || all[l.ID].ID != "" {
			t.Fatalf("%q: %v", line, err)
		}
		all[l.ID] = l
	}
	return all
}

// A batch without a server survives a kill: what is in the output stays, and the rest follows. A
// batch in front of a gateway uses every route.
func TestBinaryRunBatch(t *testing.T) {
	t.Parallel()
	path, dir := binary(t), t.TempDir()
	in, out := filepath.Join(dir, "in.jsonl"), filepath.Join(dir, "out.jsonl")
	var lines strings.Builder
	const n = 48
	for i := range n {
		fmt.Fprintf(&lines, `{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"Count to %d"}],"max_tokens":300,"ignore_eos":true,"seed":%d}}`+"\n", i, i, i)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(in, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(lines.String())
	args := []string{"run-batch", "-i", in, "-o", out, "--max-concurrency", "4"}
	killAfter := func(s syscall.Signal, lines int, args ...string) (status int, stderr string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), path, args...)
		var log bytes.Buffer
		cmd.Stderr = &log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for until := time.Now().Add(startBound); ; time.Sleep(5 * time.Millisecond) {
			if text, err := os.ReadFile(out); err == nil && bytes.Count(text, []byte("\n")) >= lines {
				break
			}
			if time.Now().After(until) {
				t.Fatal("nothing was answered\n", log.String())
			}
		}
		if _, stderr, err := tandem(t, nil, "run-batch", "-i", in, "-o", out); err == nil || !strings.Contains(stderr, "another run-batch writes "+out) {
			t.Errorf("a second run on the output: %v\n%s", err, stderr)
		}
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // the state has the status
		return cmd.ProcessState.ExitCode(), log.String()
	}
	_, _ = killAfter(syscall.SIGKILL, 3, args...)
	before, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	had := bytes.Count(before, []byte("\n"))
	if status, stderr := killAfter(syscall.SIGTERM, had+2, args...); status != 143 || !strings.Contains(stderr, fmt.Sprintf("of %d requests are answered: the same command continues", n)) {
		t.Errorf("after SIGTERM status %d\n%s", status, stderr)
	}
	if before, err = os.ReadFile(out); err != nil {
		t.Fatal(err)
	}
	had = bytes.Count(before, []byte("\n"))
	if had >= n {
		t.Fatalf("all %d requests were answered before the kill", n)
	}
	stdout, stderr, err := tandem(t, nil, args...)
	if err != nil || !strings.Contains(stdout, fmt.Sprintf("%d requests: %d answered", n, n-had)) || !strings.Contains(stdout, fmt.Sprintf("%d answered before", had)) {
		t.Fatal(stdout, stderr, err)
	}
	after, err := os.ReadFile(out)
	if err != nil || !bytes.HasPrefix(after, before[:bytes.LastIndexByte(before, '\n')+1]) {
		t.Error("the answers of the first run changed", err)
	}
	answers := batchLines(t, out)
	for id, l := range answers {
		if l.Response.Status != 200 || string(l.Error) != "null" || l.Response.Body.Choices[0].Finish != "length" {
			t.Errorf("%s: %+v", id, l)
		}
	}
	if len(answers) != n {
		t.Errorf("%d answers", len(answers))
	}

	c := startServe(t)
	out = filepath.Join(dir, "far.jsonl")
	far := []string{"run-batch", "-i", in, "-o", out, "--url", c.url(""), "--api-key", c.key, "--max-concurrency", "2"}
	if status, stderr := killAfter(syscall.SIGINT, 2, far...); status != 130 || !strings.Contains(stderr, "tandem run-batch: stopped: interrupt; ") {
		t.Errorf("after Ctrl-C status %d\n%s", status, stderr)
	}
	if err := os.Remove(out); err != nil {
		t.Fatal(err)
	}
	write(`{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"Hello","max_tokens":3}}
{"custom_id":"b","method":"POST","url":"/tokenize","body":{"prompt":"Hello"}}
{"custom_id":"c","method":"POST","url":"/classify","body":{"input":"Hello"}}
{"custom_id":"d","method":"POST","url":"/v1/load_lora_adapter","body":{"lora_name":"x","lora_path":"/"}}
`)
	if stdout, stderr, err := tandem(t, nil, "run-batch", "-i", in, "-o", out, "--url", c.url(""), "--api-key", c.key); err != nil || !strings.Contains(stdout, "4 requests: 4 answered in") || !strings.Contains(stdout, "2 of them with an error") {
		t.Fatal(stdout, stderr, err)
	}
	if l := batchLines(t, out); l["a"].Response.Body.Object != "text_completion" || l["b"].Response.Body.Count == 0 || l["c"].Response.Status != 404 || !strings.Contains(string(l["c"].Error), "nothing at /classify") || l["d"].Response.Status != 400 {
		t.Errorf("%+v", l)
	}
	if _, stderr, err := tandem(t, nil, "run-batch", "-i", in, "-o", filepath.Join(dir, "none"), "--url", c.url(""), "--api-key", "wrong"); err == nil || !strings.Contains(stderr, "give the key with --api-key") {
		t.Error(stderr, err)
	}
	if _, stderr, err := tandem(t, nil, "run-batch", "-i", in+"x", "-o", out); err == nil || !strings.HasPrefix(stderr, "tandem run-batch: --input-file: open ") {
		t.Errorf("without an input: %v\n%s", err, stderr)
	}
	began := time.Now()
	if _, stderr, err := tandem(t, nil, "run-batch", "-i", in, "-o", dir+"/absent/x"); err == nil || !strings.HasPrefix(stderr, "tandem run-batch: --output-file: open "+dir+"/absent/x: no such") {
		t.Errorf("without a folder for the output, after %v: %v\n%s", time.Since(began), err, stderr)
	}
	if _, stderr, err := tandem(t, nil, "run-batch", "-i", in); err == nil || !strings.Contains(stderr, "--output-file (-o)") {
		t.Error(stderr, err)
	}
}
