//go:build linux

package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The tests of hostile_*_test.go attack a small fleet of processes. Each attack
// runs next to 24 streams (bystanders), none of which may be cut or differ from
// its undisturbed run, and is held to a bound on resident memory (peakRSS).
// Without TANDEM_SOAK each test runs a seeded sample of its cases.

const (
	bystanderStreams = 24
	bystanderTokens  = 160
)

// hostileFleet is a gateway, a prefill node and two decode nodes, each a process
// of its own. Requests of the embedded cluster go to the gateway.
type hostileFleet struct {
	*cluster
	gateway, prefill *daemon
	decode           [2]*daemon
	certs            string // folder of tandem ca: gw, p1, d1, d2

	gatewayGossip, nats                     int // ports
	prefillRPC, prefillHTTP                 int
	decodeRPC, decodeKV, decodeHTTP, gossip [2]int
}

// hostileFlags are more flags for each role, and the limit on file descriptors of
// each process by its name (gw, p1, d1, d2); 0: as this process.
type hostileFlags struct {
	gateway, prefill, decode []string
	files                    map[string]int
	gatewayGroup             string // folder of the cgroup that the gateway runs in; empty: this process's
}

// startHostileFleet starts the fleet and waits until the gateway uses all nodes.
func startHostileFleet(t *testing.T, o hostileFlags) *hostileFleet {
	t.Helper()
	p := freePorts(t, 16)
	port := func() (next int) { next, p = p, p+1; return next }
	f := &hostileFleet{cluster: newCluster(t), certs: t.TempDir()}
	f.port = port()
	f.gatewayGossip, f.nats, f.prefillRPC, f.prefillHTTP = port(), port(), port(), port()
	if _, errOut, err := tandem(t, nil, "ca", f.certs, "gateway/gw", "node/p1", "node/d1", "node/d2"); err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	n := strconv.Itoa
	start := func(name, role string, more []string, flags ...string) *daemon {
		flags = append([]string{role, "--node-name", name, "--tls-dir", filepath.Join(f.certs, name), "--shutdown-timeout", "2"}, flags...)
		if name == "gw" && o.gatewayGroup != "" {
			return wrappedDaemon(t, []string{"sh", "-c", `echo $$ > "$0" && exec "$@"`, filepath.Join(o.gatewayGroup, "cgroup.procs")}, append(flags, more...)...)
		}
		return limitedDaemon(t, o.files[name], append(flags, more...)...)
	}
	f.gateway = start("gw", "gateway", o.gateway, "--port", n(f.port), "--gossip-port", n(f.gatewayGossip), "--nats-port", n(f.nats))
	join := "127.0.0.1:" + n(f.gatewayGossip)
	f.prefill = start("p1", "prefill", o.prefill, "--join", join, "--gossip-port", n(port()), "--rpc-port", n(f.prefillRPC),
		"--http-port", n(f.prefillHTTP), "--threads", "1", "--kv-cache-memory-bytes", "64MiB")
	for i := range f.decode {
		f.gossip[i], f.decodeRPC[i], f.decodeKV[i], f.decodeHTTP[i] = port(), port(), port(), port()
		f.decode[i] = start("d"+n(i+1), "decode", o.decode, "--join", join, "--gossip-port", n(f.gossip[i]), "--rpc-port", n(f.decodeRPC[i]),
			"--kv-port", n(f.decodeKV[i]), "--http-port", n(f.decodeHTTP[i]), "--threads", "1", "--kv-cache-memory-bytes", "64MiB")
	}
	t.Cleanup(func() { // before each is waited for: they drain at the same time
		all := []*daemon{f.gateway, f.prefill, f.decode[0], f.decode[1]}
		for _, d := range all {
			_ = d.cmd.Process.Signal(syscall.SIGTERM)
		}
		late, cancel := context.WithTimeout(context.Background(), stopBound)
		defer cancel()
		for _, d := range all { // a second signal would end it with a failure
			select {
			case <-d.ended:
			case <-late.Done():
			}
		}
	})
	f.wait(startBound, "the gateway uses all nodes", func() bool {
		var view struct {
			Ready bool
			Nodes []seen
		}
		if err := f.getJSON("/debug/nodes", &view); err != nil || !view.Ready {
			return false
		}
		usable := 0
		for _, node := range view.Nodes {
			if node.serves() {
				usable++
			}
		}
		return usable == 3
	})
	return f
}

// limitedDaemon is daemonOf with a limit on file descriptors; 0: none.
func limitedDaemon(t *testing.T, files int, args ...string) *daemon {
	t.Helper()
	if files == 0 {
		return daemonOf(t, args...)
	}
	return wrappedDaemon(t, []string{"sh", "-c", `ulimit -n ` + strconv.Itoa(files) + ` && exec "$0" "$@"`}, args...)
}

// soaking reports whether the long form of a campaign was asked for.
func soaking() bool { return os.Getenv("TANDEM_SOAK") != "" }

// sample returns all cases in a soak, and otherwise n of them, drawn by seed.
func sample[T any](cases []T, n int, seed uint64) []T {
	if soaking() || n >= len(cases) {
		return cases
	}
	var drawn []T
	for _, i := range rand.New(rand.NewPCG(seed, 11)).Perm(len(cases))[:n] {
		drawn = append(drawn, cases[i])
	}
	return drawn
}

// bystanders are streams that run next to an attack.
type bystanders struct {
	c        *cluster
	requests []map[string]any
	want     []string // undisturbed results, as cluster.told gives them
	served   atomic.Int64
	failed   atomic.Int64
	longest  atomic.Int64 // nanoseconds of the longest stream
}

// newBystanders draws the requests and learns their undisturbed results: half of
// them greedy, half sampled with a seed.
func newBystanders(c *cluster, seed uint64) *bystanders {
	c.t.Helper()
	b := &bystanders{c: c, want: make([]string, bystanderStreams)}
	r := rand.New(rand.NewPCG(seed, 12))
	for i := range bystanderStreams {
		request := map[string]any{"stream": true, "ignore_eos": true, "max_tokens": bystanderTokens, "temperature": 0, "prompt": c.prompt(r, 8+12*i)}
		if i%2 == 1 {
			request["temperature"], request["seed"] = 0.9, i
		}
		b.requests = append(b.requests, request)
	}
	var wg sync.WaitGroup
	for i, request := range b.requests {
		wg.Go(func() {
			var err error
			if b.want[i], err = c.told(request); err != nil {
				c.t.Errorf("bystander %d, undisturbed: %v", i, err)
			}
		})
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
	return b
}

// during runs attack while all streams run, one after the other each, and returns
// when the attack and the last stream have ended. A stream that is cut, refused or
// altered fails the test.
func (b *bystanders) during(name string, attack func()) {
	b.c.t.Helper()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range b.requests {
		wg.Go(func() {
			for {
				b.stream(name, i)
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	defer wg.Wait()
	defer close(stop)
	attack()
}

func (b *bystanders) stream(attack string, i int) {
	began := time.Now()
	got, err := b.c.told(b.requests[i])
	for took := int64(time.Since(began)); ; {
		longest := b.longest.Load()
		if took <= longest || b.longest.CompareAndSwap(longest, took) {
			break
		}
	}
	b.served.Add(1)
	switch {
	case err != nil && b.failed.Add(1) < 10:
		b.c.t.Errorf("%s: bystander %d failed: %v", attack, i, err)
	case err == nil && got != b.want[i] && b.failed.Add(1) < 10:
		b.c.t.Errorf("%s: bystander %d was altered:\n got %q\nwant %q", attack, i, got, b.want[i])
	}
}

// resident returns a line of /proc/PID/status in bytes: VmRSS or VmHWM.
func resident(t *testing.T, d *daemon, line string) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), line+":")
	value, _, _ := strings.Cut(rest, "kB")
	n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
	if err != nil {
		t.Fatalf("%s of %s: %v", line, d.cmd.Args[1], err)
	}
	return n << 10
}

// resetPeak makes the resident memory of now the process's peak (VmHWM).
func resetPeak(t *testing.T, d *daemon) {
	t.Helper()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", d.cmd.Process.Pid), []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}

// peakRSS returns the highest resident memory since resetPeak, in bytes.
func peakRSS(t *testing.T, d *daemon) int64 { return resident(t, d, "VmHWM") }

// alive reports whether the process runs still.
func (d *daemon) alive() bool {
	select {
	case <-d.ended:
		return false
	default:
		return true
	}
}
