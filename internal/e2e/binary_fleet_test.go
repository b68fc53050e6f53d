//go:build linux

package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// slow makes a node take milliseconds per token, so that a stream lasts while a
// test acts; tokens are the same.
var slow = []string{"--cpu-kernels", "portable", "--threads", "1"}

// blockBytes is the KV of 16 tokens of the built-in model in its own type.
func blockBytes(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile("../../engine/builtin/model/config.json")
	if err != nil {
		t.Fatal(err)
	}
	var m struct {
		Layers  int64  `json:"num_hidden_layers"`
		KVHeads int64  `json:"num_key_value_heads"`
		HeadDim int64  `json:"head_dim"`
		DType   string `json:"torch_dtype"`
	}
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	if m.DType != "bfloat16" || m.Layers*m.KVHeads*m.HeadDim == 0 {
		t.Fatalf("the test does not know this model: %+v", m)
	}
	return m.Layers * 2 * 16 * m.KVHeads * m.HeadDim * 2
}

// ledger is what the two nodes have counted.
type ledger struct{ prefill, decode, out, in int64 }

func (c *cluster) ledger() ledger {
	c.t.Helper()
	return ledger{
		prefill: c.metric(0, "tandem:prefill_tokens_computed_total", ""),
		decode:  c.metric(1, "tandem:prefill_tokens_computed_total", ""),
		out:     c.metric(0, "tandem:kv_transfer_bytes_total", `direction="out"`),
		in:      c.metric(1, "tandem:kv_transfer_bytes_total", `direction="in"`),
	}
}

// A cold prompt of P tokens costs P-1 computed tokens on the prefill node, one
// on the decode node, and the bytes of its blocks once; a warm one moves none.
func TestBinaryAccounting(t *testing.T) {
	t.Parallel()
	c := startCluster(t, "--min-remote-prefill-tokens", "0")
	perBlock, seed := blockBytes(t), rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for _, n := range []int64{1, 2, 15, 16, 17, 18, 32, 33, 34, 130, 500} {
		prompt := c.prompt(r, int(n))
		before := c.ledger()
		first, err := c.complete(prompt, 3)
		if err != nil {
			t.Fatalf("seed %d, prompt of %d: %v", seed, n, err)
		}
		bytes := (n - 1 + 15) / 16 * perBlock
		want := ledger{before.prefill + n - 1, before.decode + 1, before.out + bytes, before.in + bytes}
		c.settles(fmt.Sprintf("seed %d, cold prompt of %d", seed, n), want)

		again, err := c.complete(prompt, 3)
		if err != nil {
			t.Fatalf("seed %d, prompt of %d again: %v", seed, n, err)
		}
		if again.Choices[0].Text != first.Choices[0].Text {
			t.Errorf("seed %d, prompt of %d: %q, and again %q", seed, n, first.Choices[0].Text, again.Choices[0].Text)
		}
		here := want // less than a block is missing, or all is known to be there: decode computes it
		here.decode += n - (n-1)/16*16
		c.settles(fmt.Sprintf("seed %d, warm prompt of %d", seed, n), here)
	}
}

// settles waits until the nodes have counted exactly one of these; a counter may
// be behind the answer by a moment.
func (c *cluster) settles(what string, want ...ledger) {
	c.t.Helper()
	var got ledger
	for began := time.Now(); time.Since(began) < stopBound; time.Sleep(20 * time.Millisecond) {
		if got = c.ledger(); slices.Contains(want, got) {
			return
		}
	}
	c.t.Errorf("%s: counted %+v, want %+v", what, got, want)
}

// Short prompts stay on the decode node by default.
func TestBinaryShortPromptsStay(t *testing.T) {
	t.Parallel()
	c := startCluster(t, "--min-remote-prefill-tokens", "64")
	r := rand.New(rand.NewPCG(7, 7))
	before := c.ledger()
	if _, err := c.complete(c.prompt(r, 40), 2); err != nil {
		t.Fatal(err)
	}
	c.settles("prompt of 40 below 64", ledger{before.prefill, before.decode + 40, before.out, before.in})
	bytes := (99 + 15) / 16 * blockBytes(t)
	if _, err := c.complete(c.prompt(r, 100), 2); err != nil {
		t.Fatal(err)
	}
	c.settles("prompt of 100 above 64", ledger{before.prefill + 99, before.decode + 41, before.out + bytes, before.in + bytes})
}

// With the prefill process gone, the next request is answered all the same.
func TestBinaryPrefillKilled(t *testing.T) {
	t.Parallel()
	c := startCluster(t, "--min-remote-prefill-tokens", "0")
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	if _, err := c.complete(c.prompt(r, 100), 4); err != nil {
		t.Fatal(err)
	}
	c.kill("prefill-0")
	for i := range 5 {
		began := time.Now()
		if _, err := c.complete(c.prompt(r, 200), 4); err != nil {
			t.Fatalf("request %d after the prefill node was killed: %v", i, err)
		}
		took := time.Since(began)
		if i == 0 {
			t.Logf("note: the first request after the prefill node was killed took %v", took.Round(time.Millisecond))
		}
		if took > 20*time.Second {
			t.Errorf("request %d after the prefill node was killed took %v", i, took)
		}
	}
}

// sse is an answer that comes as server-sent events.
type sse struct {
	body   io.ReadCloser
	lines  *bufio.Reader
	events int
	finish string // finish_reason, once seen
	done   bool   // [DONE] was seen
	failed string // an error event's message
}

// stream starts a completion of n tokens.
func (c *cluster) stream(prompt []int32, n int) (*sse, error) {
	return c.open(map[string]any{
		"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true, "stream": true,
	})
}

// open starts a stream.
func (c *cluster) open(request map[string]any) (*sse, error) {
	resp, err := c.post("/v1/completions", request)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		return nil, fmt.Errorf("%s: %s", resp.Status, text)
	}
	return &sse{body: resp.Body, lines: bufio.NewReader(resp.Body)}, nil
}

// next reads one event. io.EOF is the clean end of the body.
func (s *sse) next() error {
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return err
		}
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok {
			continue
		}
		s.events++
		if data == "[DONE]" {
			s.done = true
			return nil
		}
		var e struct {
			Choices []struct {
				Finish string `json:"finish_reason"`
			}
			Error struct{ Message string }
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("event %q: %w", data, err)
		}
		if e.Error.Message != "" {
			s.failed = e.Error.Message
		}
		for _, c := range e.Choices {
			if c.Finish != "" {
				s.finish = c.Finish
			}
		}
		return nil
	}
}

// rest reads to the end; the error is nil after a clean end of the body.
func (s *sse) rest() error {
	defer s.body.Close()
	for {
		if err := s.next(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// begin starts a stream that lasts about as long, however fast the machine is,
// and reads its first events.
func (c *cluster) begin(length time.Duration) *sse {
	c.t.Helper()
	r := rand.New(rand.NewPCG(1, uint64(c.port)))
	began := time.Now()
	if _, err := c.complete(c.prompt(r, 20), 50); err != nil {
		c.t.Fatal(err)
	}
	n := min(1900, int(length*50/time.Since(began)))
	s, err := c.stream(c.prompt(r, 20), n)
	if err != nil {
		c.t.Fatal(err)
	}
	for range 5 {
		if err := s.next(); err != nil {
			c.t.Fatal(err)
		}
	}
	return s
}

// A decode process that dies in the middle of a stream leaves a visible abort:
// never a clean end, never [DONE], and an exception in the official client.
func TestBinaryDecodeKilled(t *testing.T) {
	t.Parallel()
	c := startCluster(t, slow...)
	client := c.python("abort")
	s := c.begin(10 * time.Second)
	c.wait(startBound, "the client reads its stream", func() bool { return strings.Contains(client.out.String(), "started") })
	c.kill("decode-0")
	killed := time.Now()
	err := s.rest()
	took := time.Since(killed)
	t.Logf("note: %v after the decode node was killed the stream ended: error event %q, body: %v", took.Round(time.Millisecond), s.failed, err)
	if s.done || s.finish != "" {
		t.Errorf("the broken stream ends like a finished one: finish_reason %q, [DONE] %v", s.finish, s.done)
	}
	if err == nil && s.failed == "" {
		t.Error("the broken stream ends cleanly and says nothing")
	}
	if took > 30*time.Second {
		t.Errorf("the client waited %v", took)
	}
	if err := client.wait(); err != nil {
		t.Errorf("the official client did not see the abort: %v\n%s", err, &client.out)
	}
	// The gateway lives and says what is wrong.
	resp, err := http.Get(c.url("/readyz"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without a decode node the gateway's /readyz says %s", resp.Status)
	}
}

// Ctrl-C on an idle cluster stops it in order and leaves no process.
func TestBinaryInterrupt(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	if n := len(c.processes()); n != 4 {
		t.Errorf("%d processes run, want up, gateway, prefill and decode: %v", n, c.processes())
	}
	c.signal(syscall.SIGINT)
	took := c.waitGone(stopBound)
	t.Logf("note: an idle cluster stops %v after SIGINT", took.Round(10*time.Millisecond))
	if !c.cmd.ProcessState.Success() {
		t.Errorf("up ended with %s", c.cmd.ProcessState)
	}
	if strings.Contains(c.stderr.String(), "ERROR") {
		t.Error("errors were logged on the way down")
	}
}

// With up itself killed, nothing is left either.
func TestBinaryUpKilled(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	c.signal(syscall.SIGKILL)
	t.Logf("note: nothing is left %v after SIGKILL of up", c.waitGone(stopBound).Round(10*time.Millisecond))
}

// SIGTERM lets a running stream finish, refuses new requests after a few
// seconds, and ends.
func TestBinaryDrain(t *testing.T) {
	t.Parallel()
	c := startCluster(t, append(slices.Clone(slow), "--shutdown-timeout", "60")...)
	s := c.begin(8 * time.Second)
	began := time.Now()
	c.signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- s.rest() }()
	c.wait(stopBound, "the gateway says that it is not ready", func() bool {
		resp, err := http.Get(c.url("/readyz"))
		if err != nil {
			return true
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusServiceUnavailable
	})
	// Clients that have not yet heard are still served.
	if _, err := c.complete([]int32{400, 401}, 1); err != nil && time.Since(began) < 3*time.Second {
		t.Errorf("%v after SIGTERM a request was refused: %v", time.Since(began), err)
	}
	refused := c.wait(stopBound, "new requests are refused", func() bool {
		_, err := c.complete([]int32{400, 401}, 1)
		return err != nil
	})
	if at := time.Since(began); at < 2500*time.Millisecond {
		t.Errorf("new requests were refused %v after SIGTERM, want about 3 s", at)
	}
	if err := <-ended; err != nil || !s.done || s.finish != "length" || s.failed != "" {
		t.Errorf("the stream ended after %d events with %v, [DONE] %v, finish_reason %q, error event %q", s.events, err, s.done, s.finish, s.failed)
	}
	streamed := time.Since(began)
	c.waitGone(stopBound)
	t.Logf("note: after SIGTERM new requests were refused at %v, the stream ended at %v, the cluster at %v",
		refused.Round(100*time.Millisecond), streamed.Round(100*time.Millisecond), time.Since(began).Round(100*time.Millisecond))
	if !c.cmd.ProcessState.Success() {
		t.Errorf("up ended with %s", c.cmd.ProcessState)
	}
}

// A second signal ends everything at once.
func TestBinarySecondSignal(t *testing.T) {
	t.Parallel()
	c := startCluster(t, slow...)
	s := c.begin(8 * time.Second)
	c.signal(syscall.SIGTERM)
	time.Sleep(500 * time.Millisecond)
	c.signal(syscall.SIGTERM)
	took := c.waitGone(stopBound) // were the signal lost, the stream would end whole before
	t.Logf("note: nothing is left %v after the second signal", took.Round(time.Millisecond))
	if err := s.rest(); err == nil && s.failed == "" || s.done {
		t.Errorf("the broken stream looks finished: %v, [DONE] %v", err, s.done)
	}
}

// `make up` does the same for whoever has only the sources.
func TestBinaryMakeUp(t *testing.T) {
	t.Parallel()
	binary(t) // so that make finds it built
	c := newCluster(t)
	c.start("env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", "-C", "../..", "up", "ARGS=--port "+strconv.Itoa(c.port)+" --state-dir "+c.state)
	c.upWithin(buildBound)
	// A terminal sends Ctrl-C to make, its shell and up alike.
	if err := syscall.Kill(-c.cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	c.waitGone(stopBound)
}

// python is the official client at work.
type python struct {
	cmd *exec.Cmd
	out output
}

func (p *python) wait() error { return p.cmd.Wait() }

// python starts testdata/openai_client.py in one of its modes.
func (c *cluster) python(mode string) *python {
	c.t.Helper()
	path := os.Getenv("TANDEM_PYTHON")
	if path == "" {
		c.t.Skip("needs TANDEM_PYTHON, a Python with the openai package: run make test")
	}
	p := &python{cmd: exec.CommandContext(c.t.Context(), path, "testdata/openai_client.py", mode, c.url("/v1"))}
	p.cmd.Env = append(os.Environ(), "OPENAI_API_KEY="+c.key, "PYTHONDONTWRITEBYTECODE=1", "NO_PROXY=127.0.0.1")
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := p.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	return p
}
