package kvtransfer

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
)

// Network creates the connections of a transfer. TCP is the default; Mem connects the roles of one
// process.
type Network interface {
	Listen(addr string) (net.Listener, error)
	Dial(ctx context.Context, addr string) (net.Conn, error)
}

// TCP is the network between machines, and within one. Addresses that begin with LocalScheme are
// unix sockets.
type TCP struct{}

// LocalScheme is the prefix of addresses that only processes of this host can dial.
const LocalScheme = "unix:"

func (TCP) Listen(addr string) (net.Listener, error) { return net.Listen(scheme(addr)) }

func (TCP) Dial(ctx context.Context, addr string) (net.Conn, error) {
	network, addr := scheme(addr)
	return new(net.Dialer).DialContext(ctx, network, addr)
}

func scheme(addr string) (network, rest string) {
	if rest, ok := strings.CutPrefix(addr, LocalScheme); ok {
		return "unix", rest
	}
	return "tcp", addr
}

// Mem is a network inside one process. A page is copied once, from the writer's region to the
// reader's. Any string is an address.
type Mem struct {
	mu        sync.Mutex
	listeners map[string]*memListener
}

// NewMem returns a network without listeners.
func NewMem() *Mem { return &Mem{listeners: make(map[string]*memListener)} }

type memListener struct {
	mem    *Mem
	addr   string
	accept chan net.Conn
	once   sync.Once
	closed chan struct{}
}

// memAddr is a Mem address.
type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

// Listen listens on addr, which must not be in use.
func (m *Mem) Listen(addr string) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.listeners[addr] != nil {
		return nil, fmt.Errorf("%w: mem address %q is taken", ErrArguments, addr)
	}
	l := &memListener{mem: m, addr: addr, accept: make(chan net.Conn), closed: make(chan struct{})}
	m.listeners[addr] = l
	return l, nil
}

// Dial connects to addr's listener.
func (m *Mem) Dial(ctx context.Context, addr string) (net.Conn, error) {
	m.mu.Lock()
	l := m.listeners[addr]
	m.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("%w: no listener on mem address %q", ErrConnection, addr)
	}
	here, there := net.Pipe()
	select {
	case l.accept <- there:
		return here, nil
	case <-l.closed:
		return nil, fmt.Errorf("%w: mem address %q", ErrClosed, addr)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() {
		l.mem.mu.Lock()
		delete(l.mem.listeners, l.addr)
		l.mem.mu.Unlock()
		close(l.closed)
	})
	return nil
}

func (l *memListener) Addr() net.Addr { return memAddr(l.addr) }
