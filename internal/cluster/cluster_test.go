package cluster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

// TestMain gives memberlist's goroutines the time to end by their own deadlines:
// its Shutdown does not wait for a probe that is under way. The NATS server's timer stays: it samples
// the process's use of the CPU once a second.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		var err error
		sampler := goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/pse.periodic")
		for end := time.Now().Add(2 * streamTimeout); time.Now().Before(end); {
			if err = goleak.Find(sampler); err == nil {
				break
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

var key = bytes.Repeat([]byte{7}, 32)

func member(i int) Member {
	return Member{
		ID: fmt.Sprintf("node-%02d", i), Role: "decode", RPC: fmt.Sprintf("10.0.0.%d:7001", i),
		Model: "builtin", Fingerprint: uint64(i) << 40, Class: "avx2", Protocol: 1, ProtocolMin: 1, Ready: true,
	}
}

func address(i int) string { return fmt.Sprintf("10.0.0.%d:7946", i) }

// node is one member of a test's fleet.
type node struct {
	*Cluster
	mu      sync.Mutex
	changes [][]Member
}

func start(t *testing.T, n *Network, i int, change func(*Options)) *node {
	t.Helper()
	tr, err := n.Transport(address(i))
	if err != nil {
		t.Fatal(err)
	}
	c := &node{}
	o := Options{Self: member(i), Key: key, Transport: tr, OnChange: func(ms []Member) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.changes = append(c.changes, ms)
	}}
	if i > 0 {
		o.Join = []string{address(0)}
	}
	if change != nil {
		change(&o)
	}
	if c.Cluster, err = New(o); err != nil {
		t.Fatal(err)
	}
	return c
}

func ids(ms []Member) string {
	var b strings.Builder
	for _, m := range ms {
		fmt.Fprintf(&b, "%s ", m.ID)
	}
	return b.String()
}

// lose sets the share of packets that vanish from now on.
func (n *Network) lose(share float64) {
	n.mu.Lock()
	n.loss = share
	n.mu.Unlock()
}

// agree waits until every node lists exactly these members.
func agree(t *testing.T, within time.Duration, nodes []*node, want ...Member) {
	t.Helper()
	var last string
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		last = ""
		for _, n := range nodes {
			if got := n.Members(); fmt.Sprint(got) != fmt.Sprint(want) {
				last = fmt.Sprintf("%s sees %v, want %v", n.self.ID, got, want)
			}
		}
		if last == "" {
			return
		}
	}
	t.Fatalf("not within %v: %s", within, last)
}

func closeAll(t *testing.T, nodes []*node) {
	t.Helper()
	for _, n := range nodes {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	// memberlist's goroutines end at their next tick or deadline.
	time.Sleep(time.Minute)
}

func TestMembersJoinChangeLeaveAndDie(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(1, 0.1)
		var nodes []*node
		var all []Member
		// The first comes up last: the others keep asking for it.
		for i := 4; i >= 0; i-- {
			nodes = append([]*node{start(t, n, i, nil)}, nodes...)
			if i > 0 && nodes[0].Joined() {
				t.Errorf("node %d has joined nobody", i)
			}
		}
		for i := range 5 {
			all = append(all, member(i))
		}
		agree(t, time.Minute, nodes, all...)
		for i, c := range nodes {
			if !c.Joined() {
				t.Errorf("node %d does not say that it joined", i)
			}
		}

		all[2].Draining, all[2].Ready, all[2].Model = true, false, "other"
		if err := nodes[2].Update(all[2]); err != nil {
			t.Fatal(err)
		}
		agree(t, time.Minute, nodes, all...)

		// Where every copy of a good-bye is lost on its way to somebody, suspicion and
		// whole lists bring it, later.
		n.lose(0)
		if err := nodes[4].Leave(5 * time.Second); err != nil {
			t.Errorf("leaving: %v", err)
		}
		if err := nodes[4].Leave(time.Second); !errors.Is(err, ErrLeft) {
			t.Errorf("leaving twice: %v", err)
		}
		if err := nodes[4].Update(all[4]); !errors.Is(err, ErrLeft) {
			t.Errorf("updating after leaving: %v", err)
		}
		left := time.Now()
		agree(t, 10*time.Second, nodes[:4], all[:4]...)
		if took := time.Since(left); took > 5*time.Second {
			t.Errorf("a node that said good-bye was listed for %v", took)
		}
		n.lose(0.1)

		if err := nodes[3].Close(); err != nil {
			t.Fatal(err)
		}
		agree(t, time.Minute, nodes[:3], all[:3]...)

		// OnChange told the same, a moment later, and never the same twice in a row.
		time.Sleep(2 * DefaultCoalesce)
		for i, c := range nodes[:3] {
			c.mu.Lock()
			for k := 1; k < len(c.changes); k++ {
				if fmt.Sprint(c.changes[k]) == fmt.Sprint(c.changes[k-1]) {
					t.Errorf("node %d heard twice of %s", i, ids(c.changes[k]))
				}
			}
			if last := c.changes[len(c.changes)-1]; fmt.Sprint(last) != fmt.Sprint(all[:3]) {
				t.Errorf("node %d heard last of %v", i, last)
			}
			c.mu.Unlock()
		}
		closeAll(t, nodes[:3])
	})
}

func TestCutNodesComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(2, 0.02)
		var nodes []*node
		var all []Member
		for i := range 4 {
			nodes, all = append(nodes, start(t, n, i, nil)), append(all, member(i))
		}
		agree(t, 30*time.Second, nodes, all...)
		n.Cut(address(3), true)
		agree(t, time.Minute, nodes[:3], all[:3]...)
		agree(t, 3*time.Minute, nodes[3:], all[3:]...)
		n.Cut(address(3), false)
		agree(t, time.Minute, nodes, all...)
		closeAll(t, nodes)
	})
}

func TestManyEventsAreFewCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(3, 0)
		first := start(t, n, 0, func(o *Options) { o.Coalesce = time.Second })
		nodes := []*node{first}
		all := []Member{member(0)}
		for i := 1; i < 20; i++ {
			nodes, all = append(nodes, start(t, n, i, nil)), append(all, member(i))
		}
		agree(t, 30*time.Second, nodes, all...)
		time.Sleep(2 * time.Second)
		first.mu.Lock()
		if got := len(first.changes); got == 0 || got > 5 {
			t.Errorf("%d calls for 20 joins", got)
		}
		first.mu.Unlock()
		closeAll(t, nodes)
	})
}

func TestStrangersAndOldVersions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(4, 0)
		a := start(t, n, 0, nil)
		b := start(t, n, 1, func(o *Options) { o.Self.Protocol, o.Self.ProtocolMin = 3, 2 })
		c := start(t, n, 2, func(o *Options) { o.Self.Protocol, o.Self.ProtocolMin = 2, 1 })
		x := start(t, n, 3, func(o *Options) { o.Key = bytes.Repeat([]byte{8}, 32) })
		time.Sleep(30 * time.Second)
		if got := ids(x.Members()); got != "node-03 " || x.Joined() {
			t.Errorf("a node with another key sees %s", got)
		}
		mismatch := func(c *node) (s string) {
			for _, m := range c.Members() {
				s += m.ID[5:] + ":" + m.Mismatch + " "
			}
			return s
		}
		if got := mismatch(a); got != "00: 01:it speaks protocol 2 to 3, this node 1 to 1 02: " {
			t.Errorf("a: %s", got)
		}
		if got := mismatch(b); got != "00:it speaks protocol 1 to 1, this node 2 to 3 01: 02: " {
			t.Errorf("b: %s", got)
		}
		if got := mismatch(c); got != "00: 01: 02: " {
			t.Errorf("c: %s", got)
		}
		// Judgement follows a node that is upgraded in place.
		up := member(0)
		up.Protocol, up.ProtocolMin = 2, 1
		if err := a.Update(up); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if got := mismatch(a) + mismatch(b); strings.Contains(got, "speaks") {
			t.Errorf("after the upgrade: %s", got)
		}
		a.mu.Lock()
		if last := a.changes[len(a.changes)-1]; last[1].Mismatch != "" {
			t.Errorf("OnChange still says %q", last[1].Mismatch)
		}
		a.mu.Unlock()
		closeAll(t, []*node{a, b, c, x})
	})
}

func TestRealSockets(t *testing.T) {
	var nodes []*Cluster
	defer func() {
		for _, c := range nodes {
			if err := c.Leave(time.Second); err != nil {
				t.Error(err)
			}
		}
	}()
	for i := range 3 {
		o := Options{Self: member(i), Bind: "127.0.0.1:0", Key: key}
		if i > 0 {
			o.Join = []string{nodes[0].Addr()}
			if i == 2 {
				o.Join[0] = strings.Replace(o.Join[0], "127.0.0.1", "localhost", 1)
			}
		}
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, c)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		nThree := 0
		for _, c := range nodes {
			if len(c.Members()) == 3 {
				nThree++
			}
		}
		if nThree == 3 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d of 3 nodes see all", nThree)
		}
	}
}

func TestMistakesAreNamed(t *testing.T) {
	if _, err := New(Options{Self: member(0), Bind: "127.0.0.1:0"}); !errors.Is(err, ErrKey) {
		t.Errorf("no key: %v", err)
	}
	for _, bind := range []string{"", "localhost:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"} {
		if _, err := New(Options{Self: member(0), Key: key, Bind: bind}); !errors.Is(err, ErrBind) {
			t.Errorf("bind %q: %v", bind, err)
		}
	}
	long := member(0)
	long.Model = strings.Repeat("m", 500)
	if _, err := New(Options{Self: long, Key: key, Bind: "127.0.0.1:0"}); !errors.Is(err, ErrMetaTooLong) || !strings.Contains(err.Error(), "500") {
		t.Errorf("long model: %v", err)
	}
	if _, err := New(Options{Key: key, Bind: "127.0.0.1:0"}); !errors.Is(err, ErrBadMeta) {
		t.Errorf("no ID: %v", err)
	}
	c, err := New(Options{Self: member(0), Key: key, Bind: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	long.ID = member(0).ID
	if err := c.Update(long); !errors.Is(err, ErrMetaTooLong) {
		t.Errorf("update to a long model: %v", err)
	}
	if err := c.Update(member(1)); !errors.Is(err, ErrBadMeta) {
		t.Errorf("update to another ID: %v", err)
	}
}

func randomMember(r *rand.Rand) Member {
	text := func() string {
		b := make([]byte, r.IntN(40))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return string(b)
	}
	return Member{
		ID: "x", Role: text(), RPC: text(), HTTP: text(), Model: text(), Fingerprint: r.Uint64(), Class: text(),
		Protocol: r.Uint32(), ProtocolMin: r.Uint32() >> r.IntN(32), Ready: r.IntN(2) == 0, Draining: r.IntN(2) == 0,
		NATS: text(), NATSRoute: text(), Build: text(),
	}
}

func TestMembersSurviveEncoding(t *testing.T) {
	for seed := range uint64(2000) {
		m := randomMember(rand.New(rand.NewPCG(seed, 0)))
		b, err := m.encode()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if got, err := decode("x", b); err != nil || got != m {
			t.Fatalf("seed %d: %+v became %+v, %v", seed, m, got, err)
		}
		// A newer node's further fields are not looked at.
		if got, err := decode("x", append(b, "more"...)); err != nil || got != m {
			t.Fatalf("seed %d: with more fields: %+v, %v", seed, got, err)
		}
		older := len(b) - len(m.Build) - len(binary.AppendUvarint(nil, uint64(len(m.Build))))
		for n := range b {
			if n == older { // of a version without Build
				want := m
				want.Build = ""
				if got, err := decode("x", b[:n]); err != nil || got != want {
					t.Fatalf("seed %d: without the last text: %+v, %v", seed, got, err)
				}
				continue
			}
			if _, err := decode("x", b[:n]); !errors.Is(err, ErrBadMeta) {
				t.Fatalf("seed %d: cut at %d of %d: %v", seed, n, len(b), err)
			}
		}
	}
}

// A node whose description is full goes without Build.
func TestBuildGivesWay(t *testing.T) {
	m := Member{ID: "x", Model: strings.Repeat("m", MaxMetaBytes-30), Build: strings.Repeat("b", 30)}
	b, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	want := m
	want.Build = ""
	if got, err := decode("x", b); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
}

func FuzzDecodeMember(f *testing.F) {
	for seed := range uint64(5) {
		b, err := randomMember(rand.New(rand.NewPCG(seed, 0))).encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{2})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode("x", b)
		if err != nil {
			if m.ID != "x" || !errors.Is(err, ErrBadMeta) {
				t.Fatalf("%+v, %v", m, err)
			}
			return
		}
		again, err := m.encode()
		if len(b) > MaxMetaBytes {
			return // as nobody sends
		}
		if err != nil {
			t.Fatal(err)
		}
		if got, err := decode("x", again); err != nil || got != m {
			t.Fatalf("%+v became %+v, %v", m, got, err)
		}
	})
}

// The member that the others joined through, who itself joins nobody, dies and
// comes back: at once, after the others have noticed, and long after. They find it,
// and it them.
func TestSeedComesBack(t *testing.T) {
	for seed, away := range []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second, 2 * time.Minute} {
		t.Run(away.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := NewNetwork(uint64(seed), 0.02)
				var nodes []*node
				var all []Member
				for i := range 5 {
					nodes, all = append(nodes, start(t, n, i, nil)), append(all, member(i))
				}
				agree(t, 30*time.Second, nodes, all...)
				time.Sleep(time.Minute) // there is nothing left to gossip about
				if err := nodes[0].Close(); err != nil {
					t.Fatal(err)
				}
				for _, c := range nodes[1:] { // their connections to it have ended
					c.Lost(member(0).ID)
				}
				time.Sleep(away)
				nodes[0] = start(t, n, 0, nil)
				agree(t, 5*time.Second, nodes, all...)
				closeAll(t, nodes)
			})
		})
	}
}

// A node logs that it joined once, and again for a member that it did not know: not for one that
// still answers while it leaves.
func TestJoinIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lockedLog
		n := NewNetwork(1, 0)
		seed := start(t, n, 0, nil)
		c := start(t, n, 1, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
		agree(t, 10*time.Second, []*node{seed, c}, member(0), member(1))
		for range 3 {
			c.Lost(member(0).ID)
			time.Sleep(5 * time.Second)
		}
		if got := log.count("joined the cluster"); got != 1 {
			t.Errorf("%d lines, want 1", got)
		}
		if err := seed.Leave(time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		seed = start(t, n, 0, nil)
		agree(t, 10*time.Second, []*node{seed, c}, member(0), member(1))
		if got := log.count("joined the cluster"); got != 2 {
			t.Errorf("%d lines after the member came back, want 2", got)
		}
		closeAll(t, []*node{seed, c})
	})
}

// A member that reaches only itself does not log that it joined.
func TestJoinOfItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lockedLog
		c := start(t, NewNetwork(1, 0), 0, func(o *Options) { o.Join, o.Log = []string{address(0)}, slog.New(slog.NewTextHandler(&log, nil)) })
		time.Sleep(5 * time.Second)
		if log.count("joined the cluster") != 0 || log.count("--join leads to this process itself: no other member yet") != 1 {
			t.Errorf("logged: %s", &log.b)
		}
		closeAll(t, []*node{c})
	})
}

// lockedLog is a log that a test reads while it is written.
type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}
