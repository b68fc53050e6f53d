//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// From the command to the first token of a chat, as a new user sees it. This
// test runs alone.
func TestBinaryFirstToken(t *testing.T) {
	c := newCluster(t)
	path := binary(t)
	c.start(path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state)
	c.waitUp()
	up := time.Since(c.began)
	req := c.curl()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, first := "", time.Duration(0)
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var e struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		for _, choice := range e.Choices {
			if text += choice.Delta.Content; text != "" && first == 0 {
				first = time.Since(c.began)
			}
		}
	}
	t.Logf("note: up after %v, first token %v after the start; the printed curl line answers %q", up.Round(time.Millisecond), first.Round(time.Millisecond), text)
	if resp.StatusCode != http.StatusOK || text == "" || lines.Err() != nil {
		t.Errorf("the printed curl line gets %s and %q (%v)", resp.Status, text, lines.Err())
	}
	if first > startBound {
		t.Errorf("the first token took %v", first)
	}
}

// curl is the request of the line that up prints, taken apart by a shell.
func (c *cluster) curl() *http.Request {
	c.t.Helper()
	var line string
	for l := range strings.Lines(c.stdout.String()) {
		if strings.HasPrefix(strings.TrimSpace(l), "curl ") {
			line = strings.TrimSpace(l)
		}
	}
	if line == "" {
		c.t.Fatalf("no curl line in:\n%s", &c.stdout)
	}
	out, err := exec.Command("sh", "-c", "curl() { printf '%s\\n' \"$@\"; }\n"+line).Output()
	if err != nil {
		c.t.Fatalf("%s: %v", line, err)
	}
	var url, body string
	header := http.Header{}
	args := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case a == "-H" && i+1 < len(args):
			i++
			k, v, _ := strings.Cut(args[i], ": ")
			header.Set(k, v)
		case a == "-d" && i+1 < len(args):
			i++
			body = args[i]
		case a == "-sN":
		case strings.HasPrefix(a, "http://") && url == "":
			url = a
		default:
			c.t.Fatalf("the test does not know %q in: %s", a, line)
		}
	}
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header = header
	return req
}

// The official client: models, chat and completions, streams, usage, seeds,
// many at once, and every kind of refusal. The script holds the claims.
func TestBinaryOpenAIClient(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.key = "sk-of-the-test"
	path := binary(t)
	c.start(path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state, "--api-key", "sk-another,"+c.key)
	c.waitUp()
	c.allClaims()
}

// allClaims runs the official client through its claims.
func (c *cluster) allClaims() {
	c.t.Helper()
	client := c.python("all")
	err := client.wait()
	for line := range strings.Lines(client.out.String()) {
		if strings.HasPrefix(line, "ok ") {
			c.t.Log(strings.TrimSpace(line))
		}
	}
	if err != nil || strings.Count(client.out.String(), "\nok ") < 10 {
		c.t.Errorf("the client: %v\n%s", err, &client.out)
	}
}

// The same client in front of a server of another kind.
func TestBinaryOpenAIClientUpstream(t *testing.T) {
	t.Parallel()
	front, far := startUpstream(t)
	front.allClaims()
	endUpstream(front, far)
}

// The console's own commands, against a cluster.
func TestBinaryConsole(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	out, errOut, err := tandem(t, nil, "chat", "What is prefill?", "--url", c.url(""), "--temperature", "0", "--max-tokens", "40")
	if err != nil || strings.TrimSpace(out) == "" {
		t.Errorf("chat: %v, %q, %s", err, out, errOut)
	}
	out, errOut, err = tandem(t, nil, "status", "--json", "--url", c.url(""))
	var fleet struct {
		Ready bool
		Nodes []struct {
			ID, Role string
			Ready    bool
		}
	}
	if err != nil || json.Unmarshal([]byte(out), &fleet) != nil || !fleet.Ready || len(fleet.Nodes) != 2 {
		t.Errorf("status: %v, %s%s", err, out, errOut)
	}
	out, _, err = tandem(t, nil, "status", "--url", c.url(""))
	if err != nil || !strings.Contains(out, "prefill-0") || !strings.Contains(out, "decode-0") {
		t.Errorf("status: %v, %s", err, out)
	}
	_, errOut, err = tandem(t, nil, "chat", "Hello", "--url", "http://127.0.0.1:1")
	if err == nil || !strings.Contains(errOut, "127.0.0.1:1") {
		t.Errorf("chat with nobody: %v, %q", err, errOut)
	}
}

// All roles in one process answer as three do.
func TestBinaryServe(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	path := binary(t)
	// The folder in an argument is how the test finds the process.
	file := filepath.Join(c.state, "serve.yaml")
	if err := os.WriteFile(file, []byte("port: "+strconv.Itoa(c.port)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(path, "serve", "--config", file)
	c.wait(startBound, "serve is ready", func() bool {
		resp, err := http.Get(c.url("/readyz"))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if n := len(c.processes()); n != 1 {
		t.Errorf("%d processes", n)
	}
	whole := startCluster(t, "--min-remote-prefill-tokens", "0")
	prompt := []int32{1000, 900, 800, 700, 600, 500, 400, 300, 1001, 901, 801, 701, 601, 501, 401, 301, 1002, 902}
	one, err := c.complete(prompt, 60)
	if err != nil {
		t.Fatal(err)
	}
	three, err := whole.complete(prompt, 60)
	if err != nil {
		t.Fatal(err)
	}
	if one.Choices[0].Text != three.Choices[0].Text {
		t.Errorf("one process says %q, three say %q", one.Choices[0].Text, three.Choices[0].Text)
	}
	c.signal(syscall.SIGINT)
	c.waitGone(stopBound)
}

// Without a C compiler the same program answers, with portable kernels only.
func TestBinaryWithoutCgo(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("-short: builds and starts the program")
	}
	path := filepath.Join(t.TempDir(), "tandem")
	build := exec.Command("go", "build", "-o", path, "../..")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	out, err := exec.Command(path, "version", "--json").Output()
	var version struct{ Kernels []string }
	if err != nil || json.Unmarshal(out, &version) != nil || len(version.Kernels) != 1 || version.Kernels[0] != "portable" {
		t.Errorf("version: %v, %s", err, out)
	}
	c := newCluster(t)
	c.start(path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state)
	c.waitUp()
	resp, err := c.post("/v1/chat/completions", map[string]any{
		"messages": []any{map[string]any{"role": "user", "content": "What is prefill?"}}, "temperature": 0, "max_tokens": 30,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	var chat struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err != nil || json.Unmarshal(body, &chat) != nil || len(chat.Choices) != 1 || len(bytes.TrimSpace([]byte(chat.Choices[0].Message.Content))) == 0 {
		t.Errorf("chat: %v, %s", err, body)
	}
}
