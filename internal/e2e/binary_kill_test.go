//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
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

// battle is a cluster of two prefill and three decode processes whose nodes are
// killed and started anew while clients stream.
type battle struct {
	*cluster
	seed  uint64
	rand  *rand.Rand
	nodes [5]string // names of those that live, prefill nodes first
	born  int       // nodes started by the test
}

func newBattle(t *testing.T, seed uint64) *battle {
	t.Helper()
	c := newCluster(t)
	c.port = freePorts(t, 6)
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	c.start(path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state, "--prefill", "2", "--decode", "3",
		"--min-remote-prefill-tokens", "32", "--log-level", "warning", "--kv-cache-memory-bytes", "64MiB")
	c.waitUp()
	b := &battle{cluster: c, seed: seed, rand: rand.New(rand.NewPCG(seed, 1)),
		nodes: [5]string{"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return b
}

// find returns a node's process and its arguments.
func (b *battle) find(name string) (pid int, args []string) {
	b.t.Helper()
	for _, p := range b.processes() {
		if p.name == name {
			text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "cmdline"))
			if err != nil {
				b.t.Fatal(err)
			}
			return p.pid, strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
		}
	}
	b.t.Fatalf("no process is called %s", name)
	return 0, nil
}

// replace kills a node in the middle of what it does, and starts another in its place.
func (b *battle) replace(i int) {
	b.t.Helper()
	pid, args := b.find(b.nodes[i])
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		b.t.Fatal(err)
	}
	b.born++
	role, _, _ := strings.Cut(b.nodes[i], "-")
	b.nodes[i] = fmt.Sprintf("%s-n%d", role, b.born)
	args[slices.Index(args, "--node-name")+1] = b.nodes[i]
	args[slices.Index(args, "--http-port")+1] = "0" // the old one may take a moment to be free
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &b.stdout, &b.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have been already
		_ = cmd.Wait()
	})
}

// whole waits until the gateway sees every node and can use it.
func (b *battle) whole() {
	b.t.Helper()
	b.wait(startBound, "all nodes are there", func() bool {
		var fleet struct {
			Nodes []struct {
				ID, Role         string
				Ready, Connected bool
			}
		}
		if !b.getJSON("/debug/nodes", &fleet) {
			return false
		}
		there := 0
		for _, n := range fleet.Nodes {
			if slices.Contains(b.nodes[:], n.ID) && n.Ready && (n.Connected || n.Role == "prefill") {
				there++
			}
		}
		return there == len(b.nodes)
	})
}

func (b *battle) getJSON(path string, into any) bool {
	resp, err := http.Get(b.url(path))
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(into) == nil
}

// requests are of every kind that carries something from token to token.
func (b *battle) requests() []map[string]any {
	shared := b.prompt(b.rand, 48)
	var all []map[string]any
	for i := range 16 {
		r := map[string]any{"stream": true, "seed": i, "ignore_eos": true, "temperature": 0.9, "max_tokens": 60 + 25*i,
			"prompt": append(slices.Clone(shared[:16*(i%4)]), b.prompt(b.rand, 8+20*(i%7))...)}
		switch i % 4 {
		case 1:
			r["n"], r["max_tokens"] = 2, 40+15*i
		case 2:
			r["logprobs"], r["presence_penalty"] = 2, 0.5
		case 3:
			r["temperature"], r["frequency_penalty"], r["stream_options"] = 0, 0.3, map[string]any{"include_usage": true}
		}
		all = append(all, r)
	}
	return all
}

// told is what a client has at the end of a stream: for each choice the text, the
// log-probabilities and the finish reason, and the usage.
func (b *battle) told(request map[string]any) (string, error) {
	resp, err := b.post("/v1/completions", request)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("%w after %q", err, tail(body))
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", resp.Status, body)
	}
	if !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) {
		return "", fmt.Errorf("it ends in %q", tail(body))
	}
	var text [2]strings.Builder
	var end string
	for event := range strings.SplitSeq(strings.TrimSuffix(string(body), "data: [DONE]\n\n"), "\n\n") {
		if event == "" {
			continue
		}
		var e struct {
			Choices []struct {
				Index    int
				Text     string
				Finish   string `json:"finish_reason"`
				LogProbs *struct {
					Tokens []string
					Offset []int     `json:"text_offset"`
					Values []float64 `json:"token_logprobs"`
				}
			}
			Usage *struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
			}
		}
		if err := json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &e); err != nil {
			return "", fmt.Errorf("%w in %q", err, event)
		}
		for _, c := range e.Choices {
			text[c.Index].WriteString(c.Text)
			if c.LogProbs != nil {
				fmt.Fprintf(&text[c.Index], "|%q %v %v|", c.LogProbs.Tokens, c.LogProbs.Offset, c.LogProbs.Values)
			}
			if c.Finish != "" {
				fmt.Fprintf(&text[c.Index], "<%s>", c.Finish)
			}
		}
		if e.Usage != nil {
			end = fmt.Sprint(*e.Usage)
		}
	}
	return text[0].String() + "\n" + text[1].String() + "\n" + end, nil
}

func tail(b []byte) []byte { return b[max(0, len(b)-300):] }

// storm streams the requests at a fixed rate until stop is closed, and holds each
// answer against its undisturbed one.
func (b *battle) storm(requests []map[string]any, want []string, every time.Duration, stop <-chan struct{}) (served int64) {
	const most = 64 // streams at once
	var wg sync.WaitGroup
	var done, failed atomic.Int64
	room := make(chan struct{}, most)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-stop:
			wg.Wait()
			return done.Load()
		case <-tick.C:
		}
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			at := i % len(requests)
			got, err := b.told(requests[at])
			switch {
			case err != nil && failed.Add(1) < 10:
				b.t.Errorf("stream %d (request %d) failed: %v", i, at, err)
			case err == nil && got != want[at] && failed.Add(1) < 10:
				b.t.Errorf("stream %d (request %d) was altered:\n got %q\nwant %q", i, at, got, want[at])
			}
			done.Add(1)
		})
	}
}

// disturb streams the requests while do does its worst, and says how many streams
// were resumed.
func (b *battle) disturb(do func()) (resumes int) {
	b.t.Helper()
	requests := b.requests()
	want := make([]string, len(requests))
	for i, r := range requests {
		var err error
		if want[i], err = b.told(r); err != nil {
			b.t.Fatalf("request %d, undisturbed: %v", i, err)
		}
	}
	stop, ended := make(chan struct{}), make(chan int64)
	go func() { ended <- b.storm(requests, want, 60*time.Millisecond, stop) }()
	began := time.Now()
	do()
	close(stop)
	served := <-ended
	resumes = b.gatewayMetric("tandem:gateway_resumes_total")
	b.t.Logf("note: %d streams, %d resumes, %v", served, resumes, time.Since(began).Round(time.Second))
	return resumes
}

// Nodes of every role are killed while clients stream, and no stream fails, ends
// early or differs by a byte from its undisturbed run.
func TestBinaryKills(t *testing.T) {
	t.Parallel()
	kills, seed := 20, uint64(20261121)
	if os.Getenv("TANDEM_SOAK") != "" {
		kills, seed = 500, soakSeed(t, rand.Uint64())
	}
	b := newBattle(t, seed)
	resumes := b.disturb(func() {
		for n := 0; n < kills && !t.Failed(); {
			time.Sleep(time.Duration(b.rand.IntN(600)) * time.Millisecond)
			victims := [][]int{{0}, {1}, {2}, {3}, {4}, {2, 3}, {4, 2}, {0, 4}, {1, 3}}[b.rand.IntN(9)]
			for _, v := range victims {
				b.replace(v)
				n++
			}
			b.whole()
		}
	})
	if resumes == 0 {
		t.Error("no stream was resumed: the kills have met nobody in the middle of one")
	}
}

// A decode and a prefill node freeze for longer than anyone waits for them, and
// thaw: what they still say changes nothing.
func TestBinaryFreeze(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 7)
	b.disturb(func() {
		time.Sleep(time.Second) // for streams to be under way
		for _, i := range []int{0, 3} {
			pid, _ := b.find(b.nodes[i])
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
		}
		time.Sleep(8 * time.Second) // nodes give up on each other after 6
		for _, i := range []int{0, 3} {
			pid, _ := b.find(b.nodes[i])
			if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
		}
		b.whole()
	})
}

func (b *battle) gatewayMetric(name string) int {
	b.t.Helper()
	resp, err := http.Get(b.url("/metrics"))
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), name+" "); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				b.t.Fatal(errors.Join(err, errors.New(line)))
			}
			return n
		}
	}
	b.t.Fatalf("the gateway exposes no %s", name)
	return 0
}
