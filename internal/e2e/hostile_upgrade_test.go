//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// Commits from which a fleet is upgraded while it serves: of the release before, and of the version
// of grammars before.
const (
	versionBefore  = "9fcf3e2"
	grammarsBefore = "ff7a26b"
)

// binaryOf builds a commit from the repository's history, once, without C kernels, below .cache.
func binaryOf(t *testing.T, commit string) string {
	t.Helper()
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(top, ".cache", "versions", commit)
	path := filepath.Join(dir, "tandem")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if exec.Command("git", "-C", top, "cat-file", "-e", commit+"^{commit}").Run() != nil {
		t.Skipf("needs commit %s, which this checkout's history lacks", commit)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	source := t.TempDir()
	run := func(dir, name string, args ...string) {
		t.Helper()
		c := exec.Command(name, args...)
		c.Dir, c.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
	}
	run(top, "git", "archive", "--output", filepath.Join(source, "source.tar"), commit)
	run(source, "tar", "-xf", "source.tar")
	built := fmt.Sprintf("%s.%d", path, os.Getpid())
	run(source, "go", "build", "-o", built, ".")
	if err := os.Rename(built, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// rolling is a fleet of the version before whose processes are replaced one after the
// other by the version under test, and back, while clients stream.
type rolling struct {
	*battle
	before   string
	requests []map[string]any
	door     [2]atomic.Bool // gateways that take new requests
	phase    atomic.Int64
	held     atomic.Bool // the last node of a version of grammars is drained

	mu    sync.Mutex
	texts []map[string]bool // that each request's streams had
	ended map[int64]int     // streams, by the phase in which they began
}

// client sends one of the requests again and again until stop, by the gateways in turn.
func (r *rolling) client(i int, at [2]*battle, stop chan struct{}) {
	for turn := i; ; turn++ {
		select {
		case <-stop:
			return
		default:
		}
		gateway := turn % len(at)
		if !r.door[gateway].Load() {
			gateway = (gateway + 1) % len(at)
		}
		phase := r.phase.Load()
		text, err := at[gateway].told(r.requests[i])
		refused := errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) && !strings.Contains(err.Error(), " after ")
		if refused && !r.door[gateway].Load() {
			continue // its listener closed between the look at the door and the request
		}
		if err != nil && r.held.Load() && strings.Contains(err.Error(), "can constrain outputs") {
			continue
		}
		if err != nil {
			r.t.Errorf("phase %d, request %d by %s: %v", phase, i, r.gateways[gateway].name, err)
			return
		}
		r.mu.Lock()
		r.texts[i][text] = true
		r.ended[phase]++
		r.mu.Unlock()
	}
}

// undisturbed is what each request says with the fleet as it is.
func (r *rolling) undisturbed() []string {
	r.t.Helper()
	texts := make([]string, len(r.requests))
	var wg sync.WaitGroup
	for i, request := range r.requests {
		wg.Go(func() {
			var err error
			if texts[i], err = r.told(request); err != nil {
				r.t.Errorf("request %d, undisturbed: %v", i, err)
			}
		})
	}
	wg.Wait()
	return texts
}

// roll drains processes and starts them again as another version.
func (r *rolling) roll(binary string, members ...*member) {
	r.t.Helper()
	r.phase.Add(1)
	for i, g := range r.gateways {
		if slices.Contains(members, g) {
			r.door[i].Store(false)
		}
	}
	for _, m := range members {
		m.signal(r.t, syscall.SIGTERM)
	}
	for _, m := range members {
		r.gone(m, 3*stopBound)
		if code := m.cmd.ProcessState.ExitCode(); code != 0 {
			r.t.Errorf("%s has ended with %d", m.name, code)
		}
		m.binary = binary
		r.begin(m)
	}
	r.whole(r.gateways...)
	for i := range r.gateways {
		r.door[i].Store(true)
	}
	r.served()
}

// served waits until streams have begun and ended in this mix of versions.
func (r *rolling) served() {
	r.t.Helper()
	bound := startBound
	if soaking() { // beside other tests
		bound *= 5
	}
	r.wait(bound, "streams end in this phase", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.ended[r.phase.Load()] >= 2 || r.t.Failed()
	})
}

// constrained is a stream whose grammar only nodes of the version under test know.
var constrained = map[string]any{"stream": true, "seed": 7, "temperature": 0.9, "max_tokens": 900, "prompt": []int32{400, 401, 402},
	"structured_outputs": map[string]any{"regex": "([A-Z][a-z]{0,9} ){180,}"}}

// keepsConstrained drains the last node with a gateway's grammars, which keeps a constrained stream
// to its end. A time that would cut the stream is refused.
func (r *rolling) keepsConstrained(at *battle, last *member) {
	r.t.Helper()
	s, err := at.open(constrained)
	if err == nil {
		err = s.next()
	}
	if err != nil {
		r.t.Fatalf("a constrained stream on the last node of its version: %v", err)
	}
	resp, err := at.post("/admin/drain/"+last.name+"?timeout=1ms", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	text, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if want := "node " + last.name + " is the last with grammars of version"; resp.StatusCode != http.StatusConflict || !strings.Contains(string(text), want) {
		r.t.Errorf("a drain that would cut a constrained stream: %s %s", resp.Status, text)
	}
	r.held.Store(true)
	at.order(http.MethodPost, "/admin/drain/"+last.name)
	if err := s.rest(); err != nil || !s.done || s.finish == "" || s.failed != "" {
		r.t.Errorf("the constrained stream on a drained node: %v, [DONE] %v, finish_reason %q, error %q", err, s.done, s.finish, s.failed)
	}
}

// A fleet of the version before is upgraded process by process and then downgraded, every role,
// while clients stream by both gateways. No stream fails, and each has the text of the one version
// or of the other. A constrained stream moves to the last node of its version of grammars, and
// another one ends there while the node is drained. In a soak nodes go before gateways and
// gateways before nodes, one process at a time.
func TestBinaryHostileUpgrade(t *testing.T) {
	t.Parallel()
	binary(t) // not in short tests
	before := binaryOf(t, versionBefore)
	seed := soakSeed(t, 5)
	// The version before is built without C kernels: three nodes make some 300 tokens a second.
	// Gateways get the time to finish their streams on a machine that has other things to do.
	b := newBattle(t, seed, ranks{gateways: 2, gateway: []string{"--shutdown-timeout", "2m"},
		nodes: []string{"--kv-cache-memory-bytes", "128MiB", "--shutdown-timeout", "1s"}, before: before})
	streams, tokens, prompt := 50, 16, 2
	if soaking() {
		tokens, prompt = 120, 12
	}
	r := &rolling{battle: b, before: before, ended: map[int64]int{}}
	for i := range streams {
		request := map[string]any{"stream": true, "ignore_eos": true, "max_tokens": tokens, "temperature": 0, "prompt": b.prompt(b.rand, 8+i*prompt)}
		if i%2 == 1 {
			request["temperature"], request["seed"] = 0.9, i
		}
		r.requests, r.texts = append(r.requests, request), append(r.texts, map[string]bool{})
	}
	want := [][]string{r.undisturbed()}
	if t.Failed() {
		return
	}
	at := [2]*battle{b.at(b.gateways[0]), b.at(b.gateways[1])}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range r.gateways {
		r.door[i].Store(true)
	}
	for i := range r.requests {
		wg.Go(func() { r.client(i, at, stop) })
	}
	g, p, d := b.gateways, b.nodes[:2], b.nodes[2:]
	const now = "" // the binary under test
	all := func(binary string, steps ...[]*member) {
		for _, members := range steps {
			if t.Failed() {
				return
			}
			r.roll(binary, members...)
		}
	}
	r.served()
	if soaking() {
		steps := [][]*member{{p[0]}, {p[1]}, {d[0]}, {d[1]}, {d[2]}, {g[0]}, {g[1]}}
		all(now, steps...) // nodes first
		slices.Reverse(steps)
		all(before, steps...) // the way back, gateways first
		all(now, steps...)    // gateways before nodes
	} else {
		all(now, []*member{p[0], d[0], g[0]}, []*member{p[1], d[1], d[2], g[1]})
	}
	if !t.Failed() {
		want = append(want, r.undisturbed()) // one numerics class: other streams change nothing
		alone, err := at[1].told(constrained)
		if err != nil {
			t.Errorf("the constrained stream, undisturbed: %v", err)
		}
		var moved sync.WaitGroup
		moved.Go(func() {
			if text, err := at[1].told(constrained); err != nil || text != alone {
				t.Errorf("a constrained stream is cut or altered: %v, %q, want %q", err, tail([]byte(text)), tail([]byte(alone)))
			}
		})
		all(before, []*member{p[0], d[0], d[1], g[0]})
		moved.Wait()
		r.keepsConstrained(at[1], d[2])
		if soaking() { // else nothing is left that the first step has not shown
			all(before, []*member{p[1], d[2], g[1]})
		}
	}
	close(stop)
	wg.Wait()
	r.check(want)
}

// check compares the streams' texts with those of the two versions.
func (r *rolling) check(want [][]string) {
	t := r.t
	t.Helper()
	if t.Failed() {
		return
	}
	total := 0
	for _, n := range r.ended {
		total += n
	}
	for i, texts := range r.texts {
		for text := range texts {
			if text != want[0][i] && text != want[1][i] {
				t.Errorf("request %d is altered: %q, want %q or %q", i, tail([]byte(text)), tail([]byte(want[0][i])), tail([]byte(want[1][i])))
			}
		}
	}
	for _, m := range r.all() {
		for line := range strings.Lines(m.out.String()) {
			if strings.Contains(line, "ERROR") {
				t.Errorf("%s: %s", m.name, line)
			}
		}
	}
	t.Logf("note: %d streams over %d changes of version (seed %d), 0 cut, 0 altered", total, r.phase.Load(), r.seed)
}

// constrainedRequests are streams of which two thirds have a grammar: a schema in response_format, or
// tools of which one must be called.
func (r *rolling) constrainedRequests(n int) {
	schema := map[string]any{"type": "object", "required": []string{"name", "tags"}, "additionalProperties": false, "properties": map[string]any{
		"name": map[string]any{"type": "string", "maxLength": 12}, "tags": map[string]any{"type": "array", "items": map[string]any{"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 20, "maxItems": 40}}}
	for i := range n {
		request := map[string]any{"stream": true, "max_tokens": 60, "temperature": 0.9, "seed": i}
		switch i % 3 {
		case 0:
			request["prompt"], request["ignore_eos"] = r.prompt(r.rand, 8+i*4), true
		case 1:
			request["prompt"] = r.prompt(r.rand, 8+i*4)
			request["response_format"] = map[string]any{"type": "json_schema", "json_schema": map[string]any{"name": "a", "schema": schema}}
		default:
			request["messages"] = []map[string]any{{"role": "user", "content": fmt.Sprint("Call the function ", i)}}
			request["tools"] = []map[string]any{{"type": "function", "function": map[string]any{"name": "store", "strict": true, "parameters": schema}}}
			request["tool_choice"] = "required"
		}
		r.requests, r.texts = append(r.requests, request), append(r.texts, map[string]bool{})
	}
}

// In a soak, a fleet of the version of grammars before is upgraded in the order of docs/upgrades.md,
// and downgraded, while two thirds of the streams are constrained. No stream fails. The last node
// with a version of grammars stays until its constrained streams have ended.
func TestBinaryHostileUpgradeGrammars(t *testing.T) {
	if !soaking() {
		return
	}
	before := binaryOf(t, grammarsBefore)
	b := newBattle(t, soakSeed(t, 6), ranks{gateways: 2, gateway: []string{"--shutdown-timeout", "2m", "--tool-call-parser", "hermes"},
		nodes: []string{"--kv-cache-memory-bytes", "128MiB", "--shutdown-timeout", "1s"}, before: before})
	r := &rolling{battle: b, before: before, ended: map[int64]int{}}
	r.constrainedRequests(50)
	want := [][]string{r.undisturbed()}
	if t.Failed() {
		return
	}
	at := [2]*battle{b.at(b.gateways[0]), b.at(b.gateways[1])}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range r.gateways {
		r.door[i].Store(true)
	}
	for i := range r.requests {
		wg.Go(func() { r.client(i, at, stop) })
	}
	g, p, d := b.gateways, b.nodes[:2], b.nodes[2:]
	r.served()
	for i, binary := range []string{"", before} { // the version under test, and back
		for _, m := range []*member{p[0], p[1], d[0], d[1]} {
			if !t.Failed() {
				r.roll(binary, m)
			}
		}
		if t.Failed() {
			break
		}
		r.keepsConstrained(at[1], d[2])
		at[1].order(http.MethodDelete, "/admin/drain/"+d[2].name)
		r.whole(g...)
		r.held.Store(false)
		for _, m := range []*member{g[0], g[1], d[2]} {
			if !t.Failed() {
				r.roll(binary, m)
			}
		}
		if i == 0 && !t.Failed() {
			want = append(want, r.undisturbed())
		}
	}
	close(stop)
	wg.Wait()
	r.check(want)
}
