//go:build linux

package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// How many requests schemathesis makes up for each route, besides those that
// its coverage phase derives from the schemas: a seeded few for every run, many
// with another seed each time for the long form.
const (
	openAPIExamples     = "40"
	openAPISoakExamples = "2000"
)

// startServe runs all roles in one process and asks clients for a key.
func startServe(t *testing.T) *cluster {
	t.Helper()
	c := newCluster(t)
	c.key = "sk-of-the-test"
	path := binary(t)
	file := filepath.Join(c.state, "serve.yaml") // by its name the test finds the process
	if err := os.WriteFile(file, []byte("port: "+strconv.Itoa(c.port)+"\napi-key: "+c.key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(path, "serve", "--config", file)
	c.wait(startBound, "serve is ready", func() bool { return c.body("/readyz") != "" })
	return c
}

// What fields do and which errors they bring, through the official client. The
// script holds the claims.
func TestBinaryOpenAIFields(t *testing.T) {
	t.Parallel()
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, a Python with the openai package: run make test")
	}
	c := startServe(t)
	cmd := exec.CommandContext(t.Context(), python, "testdata/openai_fields.py", c.url("/v1"))
	cmd.Env = append(os.Environ(), "OPENAI_API_KEY="+c.key, "PYTHONDONTWRITEBYTECODE=1", "NO_PROXY=127.0.0.1")
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count("\n"+string(out), "\nok ") < 10 {
		t.Errorf("the client: %v\n%s", err, out)
	}
}

// The API does what its own document says: schemathesis reads /openapi.json,
// sends what fits it and what does not, and looks at every answer and event.
func TestBinaryOpenAPI(t *testing.T) {
	t.Parallel()
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, a Python with the schemathesis package: run make test")
	}
	examples, seed, bound := openAPIExamples, int64(1), 5*time.Minute
	if os.Getenv("TANDEM_SOAK") != "" {
		examples, seed, bound = openAPISoakExamples, time.Now().UnixNano()%1e9, time.Hour
	}
	c := startServe(t)
	hooks, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(python), "schemathesis"), "run", c.url("/openapi.json"),
		"--header", "Authorization: Bearer "+c.key, "--phases", "coverage,fuzzing", "--max-examples", examples, "--seed", strconv.FormatInt(seed, 10),
		"--max-response-time", "60", "--generation-database", "none", "--no-color", "--continue-on-failure", "--warnings", "off",
		"--exclude-checks", "positive_data_acceptance") // the hooks know more about what may be refused
	cmd.Dir = t.TempDir()
	// Streams are read to their end; by default 20 events are.
	if err := os.WriteFile(filepath.Join(cmd.Dir, "schemathesis.toml"), []byte("max-stream-events = 1000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), "SCHEMATHESIS_HOOKS=openapi_hooks", "PYTHONPATH="+hooks, "PYTHONDONTWRITEBYTECODE=1", "NO_PROXY=127.0.0.1")
	var out output
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := time.AfterFunc(bound, func() { _ = cmd.Process.Kill() }) // ended already: nothing to kill
	defer stop.Stop()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("schemathesis, seed %d: %v\n%s", seed, err, &out)
	}
	_, text, found := strings.Cut(out.String(), "\ntally ")
	tally := map[string]map[string]int{} // good requests: operation, status, how many
	if err := json.Unmarshal([]byte(text), &tally); err != nil || !found {
		t.Fatalf("no tally: %v\n%s", err, &out)
	}
	// A test whose requests are all refused proves little.
	for _, operation := range []string{"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize", "GET /v1/models/{model}"} {
		if n := tally[operation]["200"]; n < 10 {
			t.Errorf("seed %d: %s served %d requests, answers were %v", seed, operation, n, tally[operation])
		}
	}
	t.Logf("note: schemathesis, seed %d: %s", seed, strings.TrimSpace(text))
	c.wait(stopBound, "nothing is left running", func() bool { return c.body("/load") == `{"server_load":0}` })
}

// body is what a route answers with 200; empty for everything else.
func (c *cluster) body(path string) string {
	req, err := http.NewRequest(http.MethodGet, c.url(path), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return ""
	}
	return string(text)
}
