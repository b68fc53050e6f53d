//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/builtin"
)

// startUpstream runs a server of another kind and a gateway before it: to the
// gateway another Tandem is one, with keys of its own.
func startUpstream(t *testing.T) (front, far *cluster) {
	t.Helper()
	path := binary(t)
	far = newCluster(t)
	far.key = "sk-inner"
	far.start(path, "serve", "--port", strconv.Itoa(far.port), "--api-key", far.key, "--threads", "1")
	front = newCluster(t)
	front.key = "sk-of-the-test"
	front.start(path, "gateway", "--port", strconv.Itoa(front.port), "--api-key", "sk-another,"+front.key, "--upstream", far.url(""), "--upstream-api-key", far.key)
	for _, p := range []*cluster{front, far} { // their arguments do not name the folder by which others are found
		t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	}
	front.wait(startBound, "ready", func() bool { return front.body("/readyz") != "" })
	return front, far
}

// endUpstream ends both as an operator would.
func endUpstream(front, far *cluster) {
	for _, p := range []*cluster{front, far} {
		p.signal(syscall.SIGTERM)
		p.waitGone(stopBound)
	}
}

// The official client for Node, in front of nodes and of a server of another kind:
// whole answers and streams, usage, log-probabilities, several choices, stops,
// every kind of refusal as the client's own class of error, and streams that are
// left, whose nodes are free then. The script holds the claims.
func TestBinaryOpenAINode(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.key = "sk-of-the-test"
	path := binary(t)
	c.start(path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state, "--api-key", c.key)
	c.waitUp()
	c.nodeClaims()
	c.left(func() string { return c.scrape(1) })
}

func TestBinaryOpenAINodeUpstream(t *testing.T) {
	t.Parallel()
	front, far := startUpstream(t)
	front.nodeClaims()
	far.left(func() string { return far.body("/metrics") })
	endUpstream(front, far)
}

// nodeClaims runs the client for Node through its claims.
func (c *cluster) nodeClaims() {
	c.t.Helper()
	node := os.Getenv("TANDEM_JAVASCRIPT")
	if node == "" {
		c.t.Skip("needs TANDEM_JAVASCRIPT, a Node with the openai package: run make test")
	}
	cmd := exec.CommandContext(c.t.Context(), node, "testdata/openai_client.cjs", c.url("/v1"))
	cmd.Env = append(os.Environ(), "OPENAI_API_KEY="+c.key, "NODE_PATH="+filepath.Join(filepath.Dir(filepath.Dir(node)), "node_modules"), "NO_PROXY=127.0.0.1")
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "ok ") {
			c.t.Log(strings.TrimSpace(line))
		}
	}
	if err != nil || !strings.Contains(string(out), "\nok hang_up ") {
		c.t.Fatalf("the client: %v\n%s", err, out)
	}
}

// left waits until the node whose metrics these are computes nothing and counts
// streams that it did not compute to their ends.
func (c *cluster) left(scrape func() string) {
	c.t.Helper()
	c.wait(time.Minute, "nothing runs where clients left, and their streams count as aborted", func() bool {
		text := scrape()
		running, found := pick(text, "vllm:num_requests_running", "")
		aborted, _ := pick(text, "vllm:request_success_total", `finished_reason="abort"`)
		return found && running == 0 && aborted > 0
	})
}

// How much guidellm sends in each run, and how many tokens each request asks for.
const (
	guidellmStreams  = 4
	guidellmRequests = 24
	guidellmTokens   = 24
)

// The load generator of the vLLM project, in front of nodes and of a server of
// another kind, over chats and completions: none of its requests fails, and it
// counts the tokens that it asked for.
func TestBinaryGuideLLM(t *testing.T) {
	t.Parallel()
	program := os.Getenv("TANDEM_GUIDELLM")
	if program == "" {
		t.Skip("needs TANDEM_GUIDELLM, guidellm's program: run make soak ONLY=guidellm")
	}
	c := startCluster(t)
	front, far := startUpstream(t)
	for _, format := range []string{"/v1/chat/completions", "/v1/completions"} {
		c.guidellm(program, format)
		front.guidellm(program, format)
	}
	endUpstream(front, far)
}

// guidellmReport is what is read of guidellm's JSON.
type guidellmReport struct {
	Benchmarks []struct {
		Metrics struct {
			Totals struct{ Successful, Errored, Incomplete int } `json:"request_totals"`
			Tokens struct {
				Successful struct{ Mean float64 }
			} `json:"output_token_count"` // per request
		}
	}
}

// guidellm lets it load the cluster over one route.
func (c *cluster) guidellm(program, route string) {
	c.t.Helper()
	var models struct{ Data []struct{ ID string } }
	if err := json.Unmarshal([]byte(c.body("/v1/models")), &models); err != nil || len(models.Data) != 1 {
		c.t.Fatalf("models: %v, %v", models, err)
	}
	dir := c.t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := fs.ReadFile(builtin.FS(), name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
	result := filepath.Join(dir, "result.json")
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "run",
		"--backend", fmt.Sprintf("kind=openai_http,model=%s,target=%s,request_format=%s,api_key=%s", models.Data[0].ID, c.url(""), route, c.key),
		"--profile", "kind=concurrent,streams="+strconv.Itoa(guidellmStreams), "--constraint", "kind=max_requests,count="+strconv.Itoa(guidellmRequests),
		"--tokenizer", "kind=huggingface_auto,model="+dir, "--data", fmt.Sprintf("kind=synthetic_text,prompt_tokens=64,output_tokens=%d", guidellmTokens),
		"--output", "kind=json,path="+result, "--disable-console")
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "NO_PROXY=127.0.0.1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("guidellm: %v\n%s", err, out)
	}
	data, err := os.ReadFile(result)
	if err != nil {
		c.t.Fatal(err)
	}
	var r guidellmReport
	if err := json.Unmarshal(data, &r); err != nil || len(r.Benchmarks) != 1 {
		c.t.Fatalf("guidellm's result: %v, %d benchmarks", err, len(r.Benchmarks))
	}
	m := r.Benchmarks[0].Metrics
	c.t.Logf("note: guidellm over %s: %+v requests, %g tokens each", route, m.Totals, m.Tokens.Successful.Mean)
	if m.Totals.Successful != guidellmRequests || m.Totals.Errored != 0 || m.Totals.Incomplete != 0 || m.Tokens.Successful.Mean != guidellmTokens {
		c.t.Errorf("guidellm over %s: %+v requests, %g tokens each", route, m.Totals, m.Tokens.Successful.Mean)
	}
}
