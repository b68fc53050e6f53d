//go:build linux

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// battle is a cluster whose processes the test itself starts, each at an address
// of its own with the ports of the README, so that it can end and start again
// every one of them: two prefill nodes, three decode nodes, and gateways.
type battle struct {
	*cluster // as clients of the first gateway see it
	seed     uint64
	rand     *rand.Rand
	gateways []*member
	nodes    []*member // prefill nodes first
	certs    string    // the authority's folder, see certsOf
	nats     string    // address of the battle's NATS server; empty: the gateways'
}

// member is one process of a battle.
type member struct {
	name, role string
	host       string
	flags      []string
	binary     string // that it runs; empty: the one under test
	place      *place // where it runs; nil: in this network
	out        *output
	cmd        *exec.Cmd
	ended      chan struct{} // closed when cmd has
}

// The places of a battle's nodes.
var (
	ofPrefill = []int{0, 1}
	ofDecode  = []int{2, 3, 4}
)

// battles numbers those of this process.
var battles atomic.Int32

// loopback are a battle's addresses: of the last byte's choosing. All of
// 127.0.0.0/8 is this machine, and no other test listens there.
func loopback() func(last int) string {
	pid, nth := os.Getpid(), int(battles.Add(1))
	return func(last int) string {
		return fmt.Sprintf("127.%d.%d.%d", 64+pid>>8&63, pid&255, nth%16*16+last)
	}
}

// placedKey is the API key of gateways in network namespaces, whose clients do not come from loopback.
const placedKey = "placed"

// ranks is what a battle is drawn up of.
type ranks struct {
	gateways       int
	address        func(last int) string // of a node; nil: loopback
	place          func(address string) *place
	gateway, nodes []string // more flags
	nats           bool     // a server of its own, which nobody of the battle is
	before         string   // binary of the version before, which all begin with; empty: the one under test
}

// certsOf is the folder of the certificate that all processes of a role show.
func (b *battle) certsOf(role string) string {
	if role != "gateway" {
		role = "node"
	}
	return filepath.Join(b.certs, role)
}

func newBattle(t *testing.T, seed uint64, r ranks) *battle {
	t.Helper()
	c := newCluster(t)
	b := &battle{cluster: c, seed: seed, rand: rand.New(rand.NewPCG(seed, 1)), certs: filepath.Join(c.state, "certs")}
	if r.before != "" { // its certificates name no role
		if out, err := exec.Command(r.before, "ca", b.certs, "gateway", "node").CombinedOutput(); err != nil {
			t.Fatalf("tandem ca of the version before: %v\n%s", err, out)
		}
	} else if _, stderr, err := tandem(t, nil, "ca", b.certs, "gateway/gateway", "node/node"); err != nil {
		t.Fatalf("tandem ca: %v\n%s", err, stderr)
	}
	if r.address == nil {
		r.address = loopback()
	}
	if r.nats {
		b.nats = net.JoinHostPort(r.address(15), "4222")
		r.gateway, r.nodes = append(r.gateway, "--nats-url", b.nats), append(r.nodes, "--nats-url", b.nats)
	}
	var seeds []string
	for i := range max(1, r.gateways) {
		seeds = append(seeds, net.JoinHostPort(r.address(1+i), "7946"))
	}
	draw := func(role string, n, last int, flags ...string) *member {
		m := &member{name: fmt.Sprintf("%s-%d", role, n), role: role, host: r.address(last), out: new(output), binary: r.before, flags: append([]string{role,
			"--tls-dir", b.certsOf(role), "--log-level", "warning"}, flags...)}
		m.flags = append(m.flags, "--node-name", m.name, "--host", m.host)
		if r.place != nil {
			m.place = r.place(m.host)
		}
		return m
	}
	for i := range seeds {
		m := draw("gateway", i, 1+i, append([]string{"--min-remote-prefill-tokens", "32", "--insecure"}, r.gateway...)...)
		if m.place != nil {
			m.flags = append(m.flags, "--api-key", placedKey)
		}
		if others := append(append([]string(nil), seeds[:i]...), seeds[i+1:]...); len(others) > 0 {
			m.flags = append(m.flags, "--join", strings.Join(others, ","))
		}
		b.gateways = append(b.gateways, m)
	}
	for i := range len(ofPrefill) + len(ofDecode) {
		role, n := "prefill", i
		if i >= len(ofPrefill) {
			role, n = "decode", i-len(ofPrefill)
		}
		b.nodes = append(b.nodes, draw(role, n, 4+i, append([]string{
			"--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--join", strings.Join(seeds, ",")}, r.nodes...)...))
	}
	b.door(b.gateways[0])
	t.Cleanup(b.bury)
	for _, m := range b.all() {
		b.begin(m)
	}
	b.whole(b.gateways...)
	return b
}

// begin starts a member, or starts it again.
func (b *battle) begin(m *member) {
	b.t.Helper()
	path := m.binary
	if path == "" {
		path = binary(b.t)
	}
	m.cmd, m.ended = exec.Command(path, m.flags...), make(chan struct{})
	m.cmd.Stdout, m.cmd.Stderr = m.out, m.out
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	m.cmd.WaitDelay = time.Second
	if err := m.place.within(m.cmd.Start); err != nil {
		b.t.Fatal(err)
	}
	cmd, ended := m.cmd, m.ended
	go func() {
		defer close(ended)
		_ = cmd.Wait() // tests look at ProcessState
	}()
}

func (b *battle) all() []*member { return append(append([]*member(nil), b.gateways...), b.nodes...) }

// bury ends what still runs, and tells what all have said if the test has failed.
func (b *battle) bury() {
	for _, m := range b.all() {
		if m.cmd == nil || m.cmd.Process == nil {
			continue
		}
		_ = m.cmd.Process.Kill() // it may have ended already
		select {
		case <-m.ended:
		case <-time.After(stopBound):
			b.t.Errorf("%s outlives SIGKILL", m.name)
		}
		if strings.Contains(m.out.String(), "WARNING: DATA RACE") {
			b.t.Errorf("%s has a data race", m.name)
		}
	}
	if b.t.Failed() {
		b.t.Logf("seed %d", b.seed)
		for _, m := range b.all() {
			b.t.Logf("%s at %s said:\n%s", m.name, m.host, tailOf(m.out.String(), 6000))
		}
	}
}

func tailOf(s string, n int) string { return s[max(0, len(s)-n):] }

// signal sends a member a signal.
func (m *member) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := m.cmd.Process.Signal(s); err != nil {
		t.Fatalf("%v of %s: %v", s, m.name, err)
	}
}

// gone waits until a member has ended.
func (b *battle) gone(m *member, bound time.Duration) {
	b.t.Helper()
	select {
	case <-m.ended:
	case <-time.After(bound):
		b.t.Fatalf("%s still runs after %v", m.name, bound)
	}
}

// kill ends a member in the middle of what it does.
func (b *battle) kill(m *member) {
	b.t.Helper()
	m.signal(b.t, syscall.SIGKILL)
	b.gone(m, stopBound)
}

// replace kills members and starts them again at once, as a supervisor does.
func (b *battle) replace(ms ...*member) {
	b.t.Helper()
	for _, m := range ms {
		m.signal(b.t, syscall.SIGKILL)
	}
	for _, m := range ms {
		b.gone(m, stopBound)
		b.begin(m)
	}
}

// door makes a gateway the one whose clients the battle's requests are.
func (b *battle) door(m *member) {
	b.host, b.port, b.dial = m.host, 8000, m.place.dialer()
	if m.place != nil {
		b.key = placedKey
	}
}

// at is the battle as a gateway's clients see it.
func (b *battle) at(m *member) *battle {
	other := *b
	other.cluster = &cluster{t: b.t, state: b.state, vocabMin: b.vocabMin, tokens: b.tokens}
	other.door(m)
	return &other
}

// seen is a node as a gateway sees it.
type seen struct {
	ID, Role         string
	Ready, Connected bool
	Draining         bool
	Running          int
	CacheBlocks      int `json:"cache_blocks"`
}

// fleet is whom the battle's gateway sees; nil where it does not answer or is not ready.
func (b *battle) fleet() map[string]seen {
	var view struct {
		Ready bool
		Nodes []seen
	}
	if b.getJSON("/debug/nodes", &view) != nil || !view.Ready {
		return nil
	}
	by := map[string]seen{}
	for _, n := range view.Nodes {
		name, _, _ := strings.Cut(n.ID, "/") // a gateway of the version before shows what a node gossips
		by[name] = n
	}
	return by
}

// serves says whether the gateway can use the node.
func (n seen) serves() bool { return n.Ready && n.Connected && !n.Draining }

// ready says whether a node says so itself.
func (b *battle) ready(m *member) bool {
	port := map[string]string{"prefill": "7301", "decode": "7302"}[m.role]
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: m.place.dialer()}}
	resp, err := client.Get("http://" + net.JoinHostPort(m.host, port) + "/readyz")
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// whole waits until these gateways see every node that runs and can use it.
func (b *battle) whole(gateways ...*member) {
	b.t.Helper()
	for _, g := range gateways {
		at := b.at(g)
		b.wait(startBound, g.name+" uses all nodes", func() bool {
			fleet := at.fleet()
			for _, m := range b.nodes {
				if !fleet[m.name].serves() {
					return false
				}
			}
			return true
		})
	}
}

func (c *cluster) getJSON(path string, into any) error {
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, c.url(path), http.NoBody)
	if err != nil {
		return err
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.client().Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// metric adds up a member's series of a name whose labels contain one; false
// where the member does not answer.
func (b *battle) metric(m *member, name, label string) (sum float64, ok bool) {
	port := map[string]string{"gateway": "8000", "prefill": "7301", "decode": "7302"}[m.role]
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: m.place.dialer()}}
	req, err := http.NewRequestWithContext(b.t.Context(), http.MethodGet, "http://"+net.JoinHostPort(m.host, port)+"/metrics", http.NoBody)
	if err != nil {
		return 0, false
	}
	req.Header.Set("Authorization", "Bearer "+placedKey)
	resp, err := client.Do(req)
	if err != nil {
		return 0, false
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, labels, _ := strings.Cut(series, "{")
		if n != name || !strings.Contains(labels, label) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			b.t.Fatalf("%s: %q: %v", m.name, line, err)
		}
		sum, ok = sum+v, true
	}
	if !ok {
		b.t.Fatalf("%s exposes no %s{%s}", m.name, name, label)
	}
	return sum, true
}

// gatewayMetric is a metric of all gateways together.
func (b *battle) gatewayMetric(name string) (sum float64) {
	b.t.Helper()
	for _, g := range b.gateways {
		v, _ := b.metric(g, name, "") // one that is away has counted nothing
		sum += v
	}
	return sum
}
