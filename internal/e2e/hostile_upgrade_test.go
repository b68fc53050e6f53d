//go:build linux

package e2e

import (
	"errors"
	"fmt"
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

// versionBefore is the commit from which a fleet is upgraded while it serves.
const versionBefore = "9fcf3e2"

// binaryBefore builds that version from the repository's history, once, without C
// kernels, below .cache.
func binaryBefore(t *testing.T) string {
	t.Helper()
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(top, ".cache", "versions", versionBefore)
	path := filepath.Join(dir, "tandem")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if exec.Command("git", "-C", top, "cat-file", "-e", versionBefore+"^{commit}").Run() != nil {
		t.Skipf("needs commit %s, which this checkout's history lacks", versionBefore)
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
	run(top, "git", "archive", "--output", filepath.Join(source, "source.tar"), versionBefore)
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
		r.gone(m, stopBound)
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
	r.wait(startBound, "streams end in this phase", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.ended[r.phase.Load()] >= 2 || r.t.Failed()
	})
}

// A fleet of the version before is upgraded process by process, nodes before gateways
// and gateways before nodes, and one node goes back and forth, while clients stream by
// both gateways. No stream fails, and each has the text of the one version or of the other.
func TestBinaryHostileUpgrade(t *testing.T) {
	t.Parallel()
	binary(t) // not in short tests
	before := binaryBefore(t)
	seed := soakSeed(t, 5)
	b := newBattle(t, seed, ranks{gateways: 2, nodes: []string{"--kv-cache-memory-bytes", "128MiB"}, before: before})
	streams, tokens := 6, 96
	if soaking() {
		// The version before is built without C kernels: three nodes make some 300 tokens
		// a second, and a gateway that ends cuts what is not over within 30 s.
		streams, tokens = 24, 120
	}
	r := &rolling{battle: b, before: before, ended: map[int64]int{}}
	for i := range streams {
		request := map[string]any{"stream": true, "ignore_eos": true, "max_tokens": tokens, "temperature": 0, "prompt": b.prompt(b.rand, 8+i*12)}
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
	steps := [][]*member{{p[0], d[0]}, {p[1], d[1]}, {d[2]}, {g[0]}, {g[1]}}
	if soaking() {
		steps = [][]*member{{p[0]}, {p[1]}, {d[0]}, {d[1]}, {d[2]}, {g[0]}, {g[1]}}
	}
	all := func(binary string) {
		for _, members := range steps {
			if t.Failed() {
				return
			}
			r.roll(binary, members...)
		}
	}
	r.served()
	all(now) // nodes first
	if soaking() {
		slices.Reverse(steps)
		all(before) // the way back, gateways first
		all(now)    // gateways before nodes
	} else {
		r.roll(before, g[0], d[0]) // a new gateway beside an old one, before old and new nodes
		r.roll(now, g[0])
		r.roll(now, d[0])
	}
	close(stop)
	wg.Wait()
	if t.Failed() {
		return
	}
	want = append(want, r.undisturbed())
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
	for _, m := range b.all() {
		for line := range strings.Lines(m.out.String()) {
			if strings.Contains(line, "ERROR") {
				t.Errorf("%s: %s", m.name, line)
			}
		}
	}
	t.Logf("note: %d streams over %d changes of version (seed %d), 0 cut, 0 altered", total, r.phase.Load(), seed)
}
