//go:build linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The tests of binary_*_test.go run the program that users run: processes,
// sockets, signals. They start nothing twice, listen on loopback only, and find
// the processes they started by a state folder of their own.

const (
	startBound = time.Minute     // until a cluster says that it is up
	buildBound = 5 * time.Minute // until one does that make builds first
	stopBound  = time.Minute     // from a signal until nothing is left
)

// binary is the path of the program under test: the one that make built, or else one
// that is built here. Short tests start no programs.
func binary(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: starts the program")
	}
	path, err := builtBinary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

var builtBinary = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("TANDEM_BINARY"); path != "" {
		return path, nil
	}
	path, err := filepath.Abs("../../bin/tandem")
	if err != nil {
		return "", err
	}
	if out, err := exec.Command("go", "build", "-o", path, "../..").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// tandem runs a command that ends by itself.
func tandem(t *testing.T, env []string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	path := binary(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), env...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	return out.String(), errOut.String(), err
}

// cluster is a running `tandem up`.
type cluster struct {
	t                *testing.T
	state            string                                                            // folder that all of its processes name in their arguments
	host             string                                                            // of the gateway
	port             int                                                               // of the gateway; the nodes' metrics follow
	dial             func(ctx context.Context, network, addr string) (net.Conn, error) // to it; nil: as usual
	nPrefill         int
	key              string            // for the API, or empty
	traceparent      string            // sent along, or empty
	headers          map[string]string // more of them
	seen             map[string]bool   // "metric role" that was held to a value other than zero; nil: nobody asks
	began            time.Time
	cmd              *exec.Cmd
	stdout, stderr   output
	ended            chan struct{} // closed when up itself has ended
	tokens, vocabMin int32         // token ids of prompts are in [vocabMin, tokens)
}

// Ports come in ranges below those that the system hands out, and below those
// that `tandem up` takes for gossip. A test owns its range while it runs, before
// all other tests and other runs of them on this machine.
const (
	firstPort     = 12000
	portsPerRange = 16
	portRanges    = 1000
)

// nextPorts is the number of the next range that this process tries.
var nextPorts = func() *atomic.Int32 {
	n := new(atomic.Int32)
	n.Store(int32(os.Getpid() * 37 % portRanges))
	return n
}()

// freePorts reserves n consecutive free ports until the test ends.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	if n > portsPerRange {
		t.Fatalf("%d ports: a range has %d", n, portsPerRange)
	}
	folder := filepath.Join(os.TempDir(), "tandem-e2e-ports")
	if err := os.MkdirAll(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	for range portRanges {
		at := int(nextPorts.Add(1)) % portRanges
		lock, err := os.OpenFile(filepath.Join(folder, strconv.Itoa(at)), os.O_CREATE|os.O_RDWR, 0o666)
		if err != nil {
			t.Fatal(err)
		}
		base := firstPort + at*portsPerRange
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil && canListen(base, n) {
			t.Cleanup(func() { lock.Close() })
			return base
		}
		lock.Close()
	}
	t.Fatalf("no %d consecutive ports are free", n)
	return 0
}

// canListen reports whether nobody has one of n ports.
func canListen(base, n int) bool {
	for p := base; p < base+n; p++ {
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p))
		if err != nil {
			return false
		}
		l.Close()
	}
	return true
}

// newCluster prepares one prefill and one decode process with the built-in
// model; start runs them.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	state, err := os.MkdirTemp("", "tandem-e2e-") // not t.TempDir: it is looked for in arguments, and must be short and unique
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(state); err != nil {
			t.Error(err)
		}
	})
	return &cluster{
		t: t, state: state, host: "127.0.0.1", port: freePorts(t, 3), nPrefill: 1, ended: make(chan struct{}),
		vocabMin: 300, tokens: 2000,
	}
}

// startCluster runs `tandem up` with more flags and waits until it is up.
func startCluster(t *testing.T, args ...string) *cluster {
	t.Helper()
	c := newCluster(t)
	c.startUp(args...)
	return c
}

// startUp is that for a cluster that has its ports.
func (c *cluster) startUp(args ...string) {
	c.t.Helper()
	path := binary(c.t)
	c.start(path, append([]string{"up", "--port", strconv.Itoa(c.port), "--state-dir", c.state}, args...)...)
	c.waitUp()
}

// start runs a command that brings up the cluster.
func (c *cluster) start(name string, args ...string) {
	c.t.Helper()
	c.cmd = exec.Command(name, args...)
	c.cmd.Stdout, c.cmd.Stderr = &c.stdout, &c.stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	c.cmd.WaitDelay = time.Second
	c.began = time.Now()
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	go func() {
		defer close(c.ended)
		_ = c.cmd.Wait() // tests look at ProcessState
	}()
	c.t.Cleanup(func() {
		if c.t.Failed() {
			time.Sleep(300 * time.Millisecond) // up writes which process has ended
			c.t.Logf("running: %v", c.processes())
		}
		for _, p := range c.processes() {
			_ = syscall.Kill(p.pid, syscall.SIGKILL)
		}
		select {
		case <-c.ended:
		case <-time.After(stopBound):
			c.t.Error("the cluster outlives SIGKILL")
		}
		if strings.Contains(c.stderr.String(), "WARNING: DATA RACE") {
			c.t.Error("a process has a data race")
		}
		if c.t.Failed() {
			c.t.Logf("%s\nstdout:\n%s\nstderr:\n%s", c.cmd, &c.stdout, &c.stderr)
		}
	})
}

// waitUp waits for the words that tell a person to begin.
func (c *cluster) waitUp() {
	c.t.Helper()
	c.upWithin(startBound)
}

func (c *cluster) upWithin(bound time.Duration) {
	c.t.Helper()
	c.wait(bound, "the cluster says that it is up", func() bool {
		select {
		case <-c.ended:
			c.t.Fatalf("up has ended: %s\n%s", c.cmd.ProcessState, lastLines(c.stderr.String(), 8))
		default:
		}
		return strings.Contains(c.stdout.String(), "Tandem is up at "+c.url(""))
	})
}

// lastLines is the end of a log.
func lastLines(text string, n int) string {
	lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "")
}

// wait polls until ok, and fails the test after the bound.
func (c *cluster) wait(bound time.Duration, what string, ok func() bool) time.Duration {
	c.t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > bound {
			c.t.Fatalf("after %v this does not hold: %s", bound, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return time.Since(began)
}

// process is one that the cluster started.
type process struct {
	pid  int
	name string // of the node; "up" for the parent
}

// processes finds every live process with the cluster's folder in its arguments.
func (c *cluster) processes() []process {
	c.t.Helper()
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		c.t.Fatal(err)
	}
	var found []process
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		// A process may end while we look; one that is dead has no arguments.
		text, err := os.ReadFile(filepath.Join("/proc", d.Name(), "cmdline"))
		if err != nil || !bytes.Contains(text, []byte(c.state)) {
			continue
		}
		args := strings.Split(string(text), "\x00")
		p := process{pid, "up"}
		if i := slices.Index(args, "--node-name"); i >= 0 {
			p.name = args[i+1]
		}
		found = append(found, p)
	}
	return found
}

// kill ends one node as a crash would.
func (c *cluster) kill(name string) {
	c.t.Helper()
	for _, p := range c.processes() {
		if p.name == name {
			if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil {
				c.t.Fatal(err)
			}
			return
		}
	}
	c.t.Fatalf("no process is called %s among %v", name, c.processes())
}

// signal sends a signal to up alone, as a service manager does.
func (c *cluster) signal(s syscall.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.t.Fatal(err)
	}
}

// waitGone waits until up has ended and no process is left.
func (c *cluster) waitGone(bound time.Duration) time.Duration {
	c.t.Helper()
	began := time.Now()
	select {
	case <-c.ended:
	case <-time.After(bound):
		c.t.Fatalf("after %v up still runs, with %v", bound, c.processes())
	}
	c.wait(bound-time.Since(began), "no process is left", func() bool { return len(c.processes()) == 0 })
	return time.Since(began)
}

func (c *cluster) url(path string) string {
	return "http://" + net.JoinHostPort(c.host, strconv.Itoa(c.port)) + path
}

// metric reads one metric of a node, see pick; counts are whole numbers.
func (c *cluster) metric(node int, name, label string) int64 {
	c.t.Helper()
	v, found := pick(c.scrape(node), name, label)
	if !found {
		c.t.Fatalf("node %d exposes no %s{%s}", node, name, label)
	}
	return int64(v)
}

// scrape reads all metrics of a node: its 0-based place after the gateway, which
// is -1.
func (c *cluster) scrape(node int) string {
	c.t.Helper()
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", c.port+1+node))
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return string(text)
}

// pick is what a scrape says of a name: the lines with the label, added up.
func pick(text, name, label string) (sum float64, found bool) {
	for line := range strings.Lines(text) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		n, labels, _ := strings.Cut(series, "{")
		if !ok || n != name || !strings.Contains(labels, label) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, false
		}
		sum, found = sum+v, true
	}
	return sum, found
}

// prompt draws token ids that nobody has sent before.
func (c *cluster) prompt(r *rand.Rand, n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = c.vocabMin + r.Int32N(c.tokens-c.vocabMin)
	}
	return ids
}

// post sends a request; the caller closes the body.
func (c *cluster) post(path string, body map[string]any) (*http.Response, error) {
	return c.postFor(c.t.Context(), path, body)
}

// postFor gives up when ctx ends.
func (c *cluster) postFor(ctx context.Context, path string, body map[string]any) (*http.Response, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url(path), bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	if c.traceparent != "" {
		req.Header.Set("traceparent", c.traceparent)
	}
	for name, value := range c.headers {
		req.Header.Set(name, value)
	}
	return c.client().Do(req)
}

// client has a connection for each request: tests ask when new clients are refused.
func (c *cluster) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: c.dial}}
}

// answer is what /v1/completions says.
type answer struct {
	Choices []struct {
		Text   string
		Finish string `json:"finish_reason"`
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

// complete asks for n greedy tokens after a prompt of token ids.
func (c *cluster) complete(prompt []int32, n int) (*answer, error) {
	return c.completeAny(prompt, len(prompt), n)
}

// completeAny asks for n greedy tokens after a prompt, ids or text, of so many tokens.
func (c *cluster) completeAny(prompt any, tokens, n int) (*answer, error) {
	resp, err := c.post("/v1/completions", map[string]any{
		"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true,
	})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", resp.Status, text)
	}
	a := new(answer)
	if err := json.Unmarshal(text, a); err != nil {
		return nil, fmt.Errorf("%w in %s", err, text)
	}
	if len(a.Choices) != 1 || a.Usage.Prompt != tokens || a.Usage.Completion != n || a.Choices[0].Finish != "length" {
		return nil, fmt.Errorf("asked for %d tokens after %d: %s", n, tokens, text)
	}
	return a, nil
}
