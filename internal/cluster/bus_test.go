package cluster

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

func material(t *testing.T) *tlsconf.Material {
	t.Helper()
	dir := t.TempDir() + "/ca"
	if err := tlsconf.CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	node, err := tlsconf.IssueNode(dir, "node", nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := tlsconf.Load(node, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func startServer(t *testing.T, m *tlsconf.Material, name, listen, route string) *Server {
	t.Helper()
	o := ServerOptions{Name: name, Listen: listen, Route: route}
	if m != nil {
		o.TLS = m.Server()
	}
	s, err := StartServer(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func bus(t *testing.T, m *tlsconf.Material, servers ...string) *Bus {
	t.Helper()
	o := BusOptions{Name: t.Name()}
	if m != nil {
		o.TLS = m.Client()
	}
	b := NewBus(o)
	t.Cleanup(b.Close)
	b.SetServers(servers)
	return b
}

// publisher opens the stream of a node's events in an epoch.
func publisher(t *testing.T, b *Bus, model, node string, epoch uint64) *Publisher {
	t.Helper()
	p, err := b.Publisher(model, node)
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.epoch = epoch
	return p
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 20 s: ", what)
		}
	}
}

// heard is a Subscriber that writes down what it is told.
type heard struct {
	mu    sync.Mutex
	lines []string
}

func (h *heard) add(s string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, s)
}

func (h *heard) Blocks(e BlockEvent) {
	h.add(fmt.Sprintf("%s %d/%d +%d -%d", e.Node, e.Epoch, e.Seq, len(e.Stored), len(e.Removed)))
}

func (h *heard) Forget(node, why string) { h.add("forget " + node + ": " + why) }

func (h *heard) last() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lines) == 0 {
		return ""
	}
	return h.lines[len(h.lines)-1]
}

func (h *heard) has(line string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.lines {
		if l == line {
			return true
		}
	}
	return false
}

func TestBlockEventsTravelUnderTLS(t *testing.T) {
	m := material(t)
	s := startServer(t, m, "gateway", "127.0.0.1:0", "")
	gateway := NewBus(BusOptions{Name: "gateway", InProcess: s})
	t.Cleanup(gateway.Close)
	node := bus(t, m, s.Addr())
	var h, other heard
	sub := gateway.Subscribe("builtin", &h)
	gateway.Subscribe("another model", &other)
	eventually(t, "both are connected", func() bool { return gateway.Connected() && node.Connected() })
	p := publisher(t, node, "builtin", "decode-1", 7)
	p.send([]Stored{{1, 0}, {2, 1}}, nil)
	p.send(nil, []uint64{2})
	eventually(t, "two messages", func() bool { return h.last() == "decode-1 7/2 +0 -1" })
	// News of any length, in parts: removals first.
	p.send(make([]Stored, 2*MaxEventHashes+1), make([]uint64, MaxEventHashes+1))
	want := []string{
		"decode-1 7/1 +2 -0", "decode-1 7/2 +0 -1",
		"decode-1 7/3 +0 -4096", "decode-1 7/4 +4096 -1", "decode-1 7/5 +4096 -0", "decode-1 7/6 +1 -0",
	}
	eventually(t, "all parts", func() bool { return h.has(want[5]) })
	if fmt.Sprint(h.lines) != fmt.Sprint(want) {
		t.Errorf("heard %q, want %q", h.lines, want)
	}
	p = publisher(t, node, "builtin", "decode-1", 8)
	p.send([]Stored{{9, 0}}, nil)
	eventually(t, "the new epoch", func() bool { return h.last() == "decode-1 8/1 +1 -0" })
	if !h.has("forget decode-1: its cache was reset (epoch 8 after 7)") {
		t.Errorf("heard %q", h.lines)
	}
	if err := node.conn.Load().Publish(subject("builtin"), []byte("hello")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "garbage is counted", func() bool { return sub.Malformed() == 1 })
	sub.Close()
	p.send(nil, nil)
	if got := other.last(); got != "" {
		t.Errorf("the other model's subscriber heard %q", got)
	}
	if p.Dropped() != 0 {
		t.Errorf("%d dropped", p.Dropped())
	}
}

func TestNATSRefusesStrangers(t *testing.T) {
	s := startServer(t, material(t), "gateway", "127.0.0.1:0", "")
	if c, err := nats.Connect(s.Addr(), nats.Secure(material(t).Client()), nats.NoReconnect()); err == nil {
		c.Close()
		t.Error("a node of another cluster got in")
	}
	if c, err := nats.Connect(s.Addr(), nats.NoReconnect()); err == nil {
		c.Close()
		t.Error("a client without TLS got in")
	}
}

// The server dies and comes back: what was published meanwhile is lost, and the
// subscriber is told so by the next message.
func TestLostServerIsAGapNotAnError(t *testing.T) {
	first := startServer(t, nil, "gateway", "127.0.0.1:0", "")
	addr := first.Addr()
	node, gateway := bus(t, nil, addr), bus(t, nil, addr)
	var h heard
	gateway.Subscribe("m", &h)
	p := publisher(t, node, "m", "n", 1)
	eventually(t, "both are connected", func() bool { return gateway.Connected() && node.Connected() })
	time.Sleep(50 * time.Millisecond) // the subscription reaches the server
	p.send(nil, nil)
	eventually(t, "a message", func() bool { return h.last() == "n 1/1 +0 -0" })
	first.Close()
	eventually(t, "both notice", func() bool { return !gateway.Connected() && !node.Connected() })
	for range 10 {
		p.send([]Stored{{1, 2}}, nil)
	}
	eventually(t, "they are dropped", func() bool { return p.Dropped() == 10 })
	startServer(t, nil, "gateway", addr, "")
	eventually(t, "both are back", func() bool { return gateway.Connected() && node.Connected() })
	time.Sleep(50 * time.Millisecond)
	p.send(nil, []uint64{3})
	eventually(t, "a message after the gap", func() bool { return h.last() == "n 1/12 +0 -1" })
	if !h.has("forget n: messages 2 to 11 were lost") {
		t.Errorf("heard %q", h.lines)
	}
}

// With no server for a while, what nodes have told is not believed any more, and
// they tell it anew when there is one again.
func TestOldEventsAreDropped(t *testing.T) {
	first := startServer(t, nil, "gateway", "127.0.0.1:0", "")
	addr := first.Addr()
	gateway := NewBus(BusOptions{Name: "gateway", Stale: time.Millisecond})
	t.Cleanup(gateway.Close)
	gateway.SetServers([]string{addr})
	var h heard
	gateway.Subscribe("m", &h)
	p := publisher(t, bus(t, nil, addr), "m", "n", 1)
	eventually(t, "a message", func() bool { p.send(nil, nil); return h.last() != "" })
	first.Close()
	eventually(t, "all is forgotten", func() bool { return h.last() == "forget n: NATS has been gone for 1ms" })
	startServer(t, nil, "gateway", addr, "")
	var asked atomic.Bool
	p.bus.answer("m", "n", func() { asked.Store(true) })
	eventually(t, "the node is asked for everything", func() bool { p.send(nil, nil); return asked.Load() })
}

// Two gateways, each with its server: what a node publishes at one is heard at
// both, and a node whose server is lost goes to the other.
func TestServersJoinAndNodesMove(t *testing.T) {
	m := material(t)
	a := startServer(t, m, "gateway-a", "127.0.0.1:0", "127.0.0.1:0")
	b := startServer(t, m, "gateway-b", "127.0.0.1:0", "127.0.0.1:0")
	for _, s := range []*Server{a, b} {
		if err := s.SetRoutes([]string{a.RouteAddr(), b.RouteAddr()}); err != nil {
			t.Fatal(err)
		}
		if err := s.SetRoutes([]string{b.RouteAddr(), a.RouteAddr()}); err != nil {
			t.Fatal(err)
		}
	}
	var ha, hb heard
	for s, h := range map[*Server]*heard{a: &ha, b: &hb} {
		g := NewBus(BusOptions{InProcess: s})
		t.Cleanup(g.Close)
		g.Subscribe("m", h)
		eventually(t, "a gateway is connected to its own server", g.Connected)
	}
	node := bus(t, m, a.Addr())
	p := publisher(t, node, "m", "n", 1)
	eventually(t, "the node is connected", node.Connected)
	eventually(t, "both hear", func() bool {
		p.send(nil, nil)
		time.Sleep(10 * time.Millisecond)
		return ha.last() != "" && hb.last() != ""
	})
	node.SetServers([]string{a.Addr(), b.Addr()})
	before := hb.last()
	a.Close()
	eventually(t, "the node is heard through the other server", func() bool {
		p.send(nil, nil)
		time.Sleep(10 * time.Millisecond)
		return node.Connected() && hb.last() != before
	})
}

// A publisher without a server, or with one that is stalled, never waits.
func TestPublishNeverBlocks(t *testing.T) {
	b := NewBus(BusOptions{})
	p := publisher(t, b, "m", "n", 1)
	b.Close() // nobody empties the queue any more
	start := time.Now()
	for range 10 * publishQueue {
		p.send([]Stored{{1, 2}}, nil)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("%d calls took %v", 10*publishQueue, took)
	}
	if len(p.queue) != publishQueue || p.Dropped() < 9*publishQueue {
		t.Errorf("%d queued, %d dropped", len(p.queue), p.Dropped())
	}
	for _, id := range []string{"", string(make([]byte, maxNodeID+1))} {
		if _, err := b.Publisher("m", id); err == nil {
			t.Errorf("a node ID of %d bytes was taken", len(id))
		}
	}
}

func TestServerMistakesAreNamed(t *testing.T) {
	s := startServer(t, nil, "a", "127.0.0.1:0", "")
	for _, listen := range []string{"", "127.0.0.1", "127.0.0.1:x"} {
		if _, err := StartServer(ServerOptions{Listen: listen}); err == nil {
			t.Errorf("Listen %q was taken", listen)
		}
	}
	if s.RouteAddr() != "" {
		t.Errorf("routes at %s", s.RouteAddr())
	}
}
