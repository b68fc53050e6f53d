package httpserver

import (
	"net"
	"runtime/debug"
	"testing"
)

// Memory that a request reserves while its connection closes, or returns after that, is freed once.
func TestReservationsOfClosedConnections(t *testing.T) {
	here, there := net.Pipe()
	defer there.Close()
	accepted := make(chan net.Conn, 1)
	accepted <- here
	l := newListener(oneConn{accepted}, 0, Counters{}, nil)
	nc, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := nc.(*Conn)
	if !c.reserve(1000) || l.Held() != 1000 {
		t.Fatalf("%d bytes are reserved", l.Held())
	}
	c.unreserve(400)
	if l.Held() != 600 {
		t.Errorf("%d bytes are reserved, want 600", l.Held())
	}
	_ = c.Close() // the other end is open
	for range 2 {
		c.unreserve(600)
		if l.Held() != 0 {
			t.Errorf("%d bytes are reserved after the end", l.Held())
		}
		c.reserve(2000)
	}
}

// oneConn is a listener of connections from a channel.
type oneConn struct{ conns chan net.Conn }

func (l oneConn) Accept() (net.Conn, error) { return <-l.conns, nil }
func (l oneConn) Close() error              { return nil }
func (l oneConn) Addr() net.Addr            { return &net.TCPAddr{} }

// While large bodies are held Go's memory limit leaves room for them and for a share of
// garbage; afterwards it is what it was.
func TestMemoryLimitOfBodies(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	var p gcSettings
	p.tighten(1 << 30)
	if got, least := debug.SetMemoryLimit(-1), int64(1<<30+384<<20); got < least || got > least+p.base || p.base > 1<<30 {
		t.Errorf("a limit of %d MiB with %d MiB of all else, want %d MiB more", got>>20, p.base>>20, least>>20)
	}
	p.tighten(1 << 30)
	p.adjust()
	if got, least := debug.SetMemoryLimit(-1), int64(2<<30+768<<20); got < least {
		t.Errorf("a limit of %d MiB for two gateways, want at least %d MiB", got>>20, least>>20)
	}
	p.tighten(0)
	if got := debug.SetMemoryLimit(-1); got != before {
		t.Errorf("a limit of %d with a gateway that has none, want %d", got, before)
	}
	p.restore(0)
	p.restore(1 << 30)
	p.restore(1 << 30)
	if got := debug.SetMemoryLimit(-1); got != before {
		t.Errorf("a limit of %d afterwards, want %d", got, before)
	}
}
