package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// lineOf returns the line of a name.
func lineOf(t *testing.T, lines []Line, name string) Line {
	t.Helper()
	for _, l := range lines {
		if l.Name == name {
			return l
		}
	}
	t.Fatalf("no line %q in %+v", name, lines)
	return Line{}
}

func want(t *testing.T, l Line, s State, figure, do string) {
	t.Helper()
	if l.State != s || !strings.Contains(l.Figure, figure) || !strings.Contains(l.Do, do) {
		t.Errorf("got %+v, want %s, %q, %q", l, s, figure, do)
	}
	if l.State != OK && l.Do == "" {
		t.Errorf("%+v does not name what to do", l)
	}
}

func text(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }

func TestMachine(t *testing.T) {
	system := fstest.MapFS{
		"proc/cpuinfo": text("processor\t: 0\nmodel name\t: Test CPU\n"),
		"proc/meminfo": text("MemTotal:       16777216 kB\nMemAvailable:    1048576 kB\nSwapTotal: 4194304 kB\nSwapFree: 4194304 kB\nHugePages_Total:       3\nHugepagesize:       2048 kB\n"),
		"sys/kernel/mm/transparent_hugepage/enabled":   text("always madvise [never]\n"),
		"sys/devices/system/node/node0/cpulist":        text("0\n"),
		"sys/devices/system/node/node1/cpulist":        text("1\n"),
		"proc/driver/nvidia/version":                   text("NVRM version: NVIDIA UNIX x86_64  570.1\nGCC\n"),
		"proc/driver/nvidia/gpus/0000:01/information":  text("Model: \t NVIDIA X100\n"),
		"sys/class/infiniband/mlx5_0/node_type":        text("1\n"),
		"sys/devices/system/node/node10/not a listing": text(""),
	}
	o := Options{
		System: system, MemoryLimit: 8 << 30, Kernels: []string{"portable"},
		Descriptors: func() (int, int, error) { return 256, 100, nil },
		Fabric:      func() ([]string, error) { return nil, errors.New("no library") },
		GPU:         func() (string, int64, int64, error) { return "X100", 80 << 30, 10 << 30, nil },
	}
	lines := Run(t.Context(), o)
	if l := lineOf(t, lines, "cores"); !strings.Contains(l.Figure, "Test CPU") {
		t.Errorf("%+v", l)
	}
	want(t, lineOf(t, lines, "memory"), Warning, "16.0 GiB, 1.0 GiB available, at most 8.0 GiB in this cgroup", "--kv-cache-memory-bytes")
	want(t, lineOf(t, lines, "huge pages"), Warning, "transparent: never; reserved: 3 of 2048 kB", "madvise")
	want(t, lineOf(t, lines, "NUMA"), OK, "3 nodes", "numactl")
	want(t, lineOf(t, lines, "instructions"), Warning, "portable", "gcc")
	want(t, lineOf(t, lines, "file descriptors"), Warning, "256, enough for 100 clients", "ulimit -n")
	want(t, lineOf(t, lines, "driver"), OK, "NVIDIA UNIX x86_64 570.1", "")
	want(t, lineOf(t, lines, "GPU"), OK, "NVIDIA X100", "")
	want(t, lines[len(lines)-1], Warning, "X100, 80.0 GiB, 10.0 GiB free", "nvidia-smi")
	want(t, lineOf(t, lines, "RDMA devices"), OK, "mlx5_0", "")
	want(t, lineOf(t, lines, "libfabric"), Warning, "no library", "libfabric1")

	o = Options{System: fstest.MapFS{}, Kernels: []string{"avx2", "portable"}, Descriptors: func() (int, int, error) { return 0, 0, errors.New("too low") }}
	lines = Run(t.Context(), o)
	want(t, lineOf(t, lines, "memory"), Warning, "unknown", "meminfo")
	want(t, lineOf(t, lines, "file descriptors"), Problem, "too low", "ulimit -n")
	want(t, lineOf(t, lines, "instructions"), OK, "avx2 portable", "")
	want(t, lineOf(t, lines, "driver"), OK, "computed on the CPU", "")
}

// A taken port names its process, here this test, and is a problem only if it is needed.
func TestPorts(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	u, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	tcp, udp := l.Addr().(*net.TCPAddr).Port, u.LocalAddr().(*net.UDPAddr).Port
	o := Options{System: os.DirFS("/"), Ports: []Port{
		{Role: "a", Flag: "port", Host: "127.0.0.1", Number: tcp}, {Role: "a", Flag: "gossip-port", Host: "127.0.0.1", Number: udp, UDP: true},
		{Role: "a", Flag: "any", Host: "127.0.0.1"}, {Role: "a", Flag: "far", Host: "203.0.113.7", Number: 80},
	}}
	pid := fmt.Sprintf("(pid %d) has it", os.Getpid())
	got := ports(t.Context(), &o)
	want(t, got[0], Warning, pid, "--port")
	want(t, got[1], Warning, pid, "--gossip-port")
	want(t, got[2], OK, "any free one", "")
	want(t, got[3], Problem, "", "")
	o.PortsNeeded = true
	want(t, ports(t.Context(), &o)[0], Problem, pid, "--port")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	want(t, ports(t.Context(), &o)[0], OK, "free on 127.0.0.1", "")
	if pid, program := holder(fstest.MapFS{}, 80); pid != 0 || program != "" {
		t.Errorf("%d %q", pid, program)
	}
	// tandem's own port is no fault.
	system := fstest.MapFS{
		"proc/net/tcp":   text("  sl  local_address\n   0: 0100007F:1F40 00000000:0000 0A 0 0 0 0 0 77 1\n"),
		"proc/9/comm":    text("tandem\n"),
		"proc/9/fd/3":    &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("socket:[77]")},
		"proc/self/comm": text("x"),
	}
	want(t, taken(&Options{System: system, PortsNeeded: true}, Port{Number: 8000}, "x"), OK, "tandem has it (pid 9)", "")
}

func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	if err := tlsconf.CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"gateway/g", "node/d", "old"} {
		if _, err := tlsconf.IssueNode(dir, name, nil); err != nil {
			t.Fatal(err)
		}
	}
	at := func(d time.Duration) []Line {
		return certificates(t.Context(), &Options{TLSDirs: []string{dir}, Now: time.Now().Add(d)})
	}
	now := at(0)
	want(t, lineOf(t, now, dir), OK, "authority tandem cluster, until ", "")
	want(t, lineOf(t, now, filepath.Join(dir, "g")), OK, "gateway g, until ", "")
	want(t, lineOf(t, now, filepath.Join(dir, "d")), OK, "(364 days)", "")
	want(t, lineOf(t, now, filepath.Join(dir, "old")), Warning, "no role old", "tandem ca DIR")
	want(t, lineOf(t, at(tlsconf.NodeLifetime-20*24*time.Hour), filepath.Join(dir, "d")), Warning, "days)", "tandem ca renew DIR")
	want(t, lineOf(t, at(tlsconf.NodeLifetime+time.Hour), filepath.Join(dir, "d")), Problem, "", "it has expired")
	want(t, lineOf(t, at(-time.Hour), filepath.Join(dir, "d")), Problem, "", "valid from")
	for name, c := range map[string]struct {
		spoil  func(path string) error
		state  State
		figure string
		do     string
	}{
		"exposed": {func(p string) error { return os.Chmod(p, 0o644) }, Warning, "", "chmod 600"},
		"foreign": {func(p string) error { return os.Rename(filepath.Join(dir, "g", tlsconf.NodeKeyFile), p) }, Problem, "does not match", "again"},
		"missing": {os.Remove, Problem, "no such file", "again"},
	} {
		if err := c.spoil(filepath.Join(dir, "d", tlsconf.NodeKeyFile)); err != nil {
			t.Fatal(name, err)
		}
		want(t, lineOf(t, at(0), filepath.Join(dir, "d")), c.state, c.figure, c.do)
		for _, n := range []string{"gateway/g", "node/d"} {
			if _, err := tlsconf.IssueNode(dir, n, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(filepath.Join(dir, "d", tlsconf.NodeKeyFile), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := certificates(t.Context(), &Options{TLSDirs: []string{t.TempDir()}, Now: time.Now()}); len(got) != 1 {
		t.Errorf("%+v", got)
	} else {
		want(t, got[0], Problem, "has neither", "tandem ca")
	}
}

// Nodes are dialled at the addresses that the gateway gives; names from the network cannot write to
// the terminal.
func TestFleet(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := gone.Addr().String()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	status, date := http.StatusOK, time.Now()
	node := func(id string, connected bool, rpc, version string, draining bool) string {
		return fmt.Sprintf(`{"id":"%s","role":"decode","rpc":%q,"ready":true,"connected":%v,"version":%q,"draining":%v}`, id, rpc, connected, version, draining)
	}
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", date.UTC().Format(http.TimeFormat))
		if r.URL.Path != "/debug/nodes" {
			return
		}
		w.WriteHeader(status)
		at := l.Addr().String()
		fmt.Fprintf(w, `{"version":"1","ready":true,"nodes":[%s]}`, strings.Join([]string{
			node(`good\u001b[2J`, true, at, "1", false), node("old", true, at, "0", false), node("drained", true, at, "1", true),
			node("cut", false, at, "1", false), node("dead", false, closed, "1", false), node("hidden", true, closed, "1", false),
			`{"id":"own","role":"serve","ready":true,"connected":true,"rpc":"engine","version":"1"}`,
		}, ","))
	}))
	defer gateway.Close()
	ask := func() []Line {
		return Run(t.Context(), Options{System: fstest.MapFS{}, Now: time.Now(), URL: gateway.URL})
	}
	lines := ask()
	want(t, lineOf(t, lines, "gateway"), OK, "ready, version 1, nodes: 7", "")
	want(t, lineOf(t, lines, "clock"), OK, "of the gateway's", "")
	want(t, lineOf(t, lines, "decode good?[2J"), OK, "ready, "+l.Addr().String()+", answers in", "")
	want(t, lineOf(t, lines, "decode old"), Warning, "", "finish the upgrade")
	want(t, lineOf(t, lines, "decode drained"), Warning, "draining", "no requests")
	want(t, lineOf(t, lines, "decode cut"), Problem, "unreachable", "not from the gateway")
	want(t, lineOf(t, lines, "decode dead"), Problem, "refused", "firewall")
	want(t, lineOf(t, lines, "serve own"), OK, "ready, in the process of the gateway", "")
	want(t, lineOf(t, lines, "decode hidden"), Warning, "not reachable from here", "--advertise")

	date = time.Now().Add(-time.Minute)
	want(t, lineOf(t, ask(), "clock"), Warning, "s of the gateway's", "synchronize")
	date = time.Now().Add(time.Hour)
	want(t, lineOf(t, ask(), "clock"), Problem, "from the gateway's", "synchronize")
	status = http.StatusForbidden
	want(t, lineOf(t, ask(), "gateway"), Warning, "403", "--api-key")
	gateway.Close()
	want(t, lineOf(t, ask(), "gateway"), Problem, "no answer", "tandem up")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	Run(ctx, Options{System: fstest.MapFS{}, URL: "http://203.0.113.7"})
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("a canceled run took %v", took)
	}
}

func TestOutput(t *testing.T) {
	lines := []Line{{"a", "x", OK, "1", ""}, {"a", "longer", Warning, "2", "do it"}, {"b", "y", Problem, "3", "now"}}
	var out bytes.Buffer
	if err := Text(&out, lines); err != nil {
		t.Fatal(err)
	}
	const text = "a\n  ok       x       1\n  warning  longer  2\n                   > do it\nb\n  problem  y       3\n                   > now\n\n1 ok, 1 warning, 1 problem\n"
	if out.String() != text {
		t.Errorf("got\n%s\nwant\n%s", &out, text)
	}
	out.Reset()
	var got struct {
		Version            string
		Problems, Warnings int
		Checks             []Line
	}
	if err := JSON(&out, "1.2", lines); err != nil || json.NewDecoder(&out).Decode(&got) != nil || got.Version != "1.2" || got.Problems != 1 || len(got.Checks) != 3 || got.Checks[1] != lines[1] {
		t.Errorf("%v, %+v", err, got)
	}
	if err := Text(failing{}, lines); err == nil {
		t.Error("a failed write is not reported")
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
