package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Bounds of the in-memory network, near those of a socket.
const (
	memBufferBytes = 256 << 10 // default of Network.Buffer
	memBacklog     = 128       // connections not yet accepted
)

// Errors of the in-memory network.
var (
	ErrAddressInUse = errors.New("rpc: in-memory address is in use")
	ErrNoListener   = errors.New("rpc: nothing listens at in-memory address")
)

// Network is an in-memory counterpart of TCP. `serve` connects its roles by it, and
// whole clusters run on it in virtual time (testing/synctest). Connections have
// bounded buffers, deadlines and half-close. Silence makes an address behave
// like a machine that lost its network.
type Network struct {
	// Buffer is how many bytes may be in flight in one direction of a connection.
	// It must be set before the first Dial.
	Buffer int

	mu        sync.Mutex
	listeners map[string]*memListener
	silent    map[string]chan struct{} // closed when the silence ends
	links     map[*memLink]struct{}
}

// memLink is one connection: up carries what the dialling side writes.
type memLink struct {
	addr     string
	up, down *memPipe
}

// NewNetwork returns a network without listeners.
func NewNetwork() *Network {
	return &Network{
		Buffer:    memBufferBytes,
		listeners: map[string]*memListener{},
		silent:    map[string]chan struct{}{},
		links:     map[*memLink]struct{}{},
	}
}

// Listen opens addr, which is any name.
func (n *Network) Listen(addr string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[addr] != nil {
		return nil, fmt.Errorf("%w: %s", ErrAddressInUse, addr)
	}
	l := &memListener{n: n, addr: addr, backlog: make(chan net.Conn, memBacklog), closed: make(chan struct{})}
	n.listeners[addr] = l
	return l, nil
}

// Dial connects to a listener; it fits Options.Dial.
func (n *Network) Dial(ctx context.Context, addr string) (net.Conn, error) {
	for {
		n.mu.Lock()
		l, silent := n.listeners[addr], n.silent[addr]
		n.mu.Unlock()
		if silent != nil {
			select {
			case <-silent:
				continue
			case <-ctx.Done():
				return nil, fmt.Errorf("rpc: dialling in-memory address %s: %w", addr, ctx.Err())
			}
		}
		if l == nil {
			return nil, fmt.Errorf("%w: %s", ErrNoListener, addr)
		}
		return l.connect(ctx)
	}
}

// Silence disconnects addr, or connects it again. Meanwhile bytes of its connections
// stay in flight, the other side does not notice closes, and dials wait.
func (n *Network) Silence(addr string, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ended := n.silent[addr]
	if on == (ended != nil) {
		return
	}
	if on {
		n.silent[addr] = make(chan struct{})
	} else {
		close(ended)
		delete(n.silent, addr)
	}
	for k := range n.links {
		if k.addr == addr {
			k.up.silence(on)
			k.down.silence(on)
		}
	}
}

func (n *Network) drop(k *memLink) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.links, k)
}

type memListener struct {
	n       *Network
	addr    string
	backlog chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func (l *memListener) connect(ctx context.Context) (net.Conn, error) {
	k := &memLink{addr: l.addr, up: newMemPipe(l.n.Buffer), down: newMemPipe(l.n.Buffer)}
	l.n.mu.Lock()
	l.n.links[k] = struct{}{}
	if l.n.silent[l.addr] != nil {
		k.up.silence(true)
		k.down.silence(true)
	}
	l.n.mu.Unlock()
	near := &memConn{n: l.n, link: k, in: k.down, out: k.up, local: "dialler", remote: l.addr}
	far := &memConn{n: l.n, link: k, in: k.up, out: k.down, local: l.addr, remote: "dialler"}
	var err error
	select {
	case <-l.closed:
		err = ErrNoListener
	case <-ctx.Done():
		err = ctx.Err()
	case l.backlog <- far:
		return near, nil
	}
	l.n.drop(k)
	return nil, fmt.Errorf("rpc: dialling in-memory address %s: %w", l.addr, err)
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.backlog:
		return c, nil
	case <-l.closed:
		return nil, fmt.Errorf("rpc: in-memory listener %s: %w", l.addr, net.ErrClosed)
	}
}

// Close also closes connections that were not accepted.
func (l *memListener) Close() error {
	l.once.Do(func() {
		l.n.mu.Lock()
		delete(l.n.listeners, l.addr)
		l.n.mu.Unlock()
		close(l.closed)
		for {
			select {
			case c := <-l.backlog:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}

func (l *memListener) Addr() net.Addr { return memAddr(l.addr) }

type memAddr string

func (memAddr) Network() string  { return "memory" }
func (a memAddr) String() string { return string(a) }

// memConn is one side of a link.
type memConn struct {
	n             *Network
	link          *memLink
	in, out       *memPipe
	local, remote string
}

func (c *memConn) Read(p []byte) (int, error)  { return c.in.read(p) }
func (c *memConn) Write(p []byte) (int, error) { return c.out.write(p) }

// Unread reports whether a Read would return at once.
func (c *memConn) Unread() bool {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	return !c.in.silent && (c.in.n > 0 || c.in.wclosed)
}

// CloseWrite lets the peer read to the end.
func (c *memConn) CloseWrite() error {
	c.out.closeWrite()
	return nil
}

func (c *memConn) Close() error {
	c.out.closeWrite()
	if c.in.closeRead() {
		c.n.drop(c.link)
	}
	return nil
}

func (c *memConn) LocalAddr() net.Addr  { return memAddr(c.local) }
func (c *memConn) RemoteAddr() net.Addr { return memAddr(c.remote) }

func (c *memConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *memConn) SetReadDeadline(t time.Time) error {
	c.in.readDeadline.set(c.in, t)
	return nil
}

func (c *memConn) SetWriteDeadline(t time.Time) error {
	c.out.writeDeadline.set(c.out, t)
	return nil
}

// memPipe is one direction of a link: a ring of bytes.
type memPipe struct {
	mu            sync.Mutex
	cond          sync.Cond // on any change below
	ring          []byte    // [size], made by the first write
	size          int
	first, n      int  // the bytes in flight
	wclosed       bool // no more writes; reads drain, then io.EOF
	rclosed       bool // no more reads
	silent        bool // nothing arrives
	readDeadline  memDeadline
	writeDeadline memDeadline
}

func newMemPipe(size int) *memPipe {
	p := &memPipe{size: size}
	p.cond.L = &p.mu
	return p
}

func (p *memPipe) read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.rclosed:
			return 0, net.ErrClosed
		case p.readDeadline.passed():
			return 0, os.ErrDeadlineExceeded
		case len(b) == 0:
			return 0, nil
		case p.silent:
		case p.n > 0:
			m := copy(b[:min(len(b), p.n)], p.ring[p.first:])
			p.first = (p.first + m) % len(p.ring)
			p.n -= m
			p.cond.Broadcast()
			return m, nil
		case p.wclosed:
			return 0, io.EOF
		}
		p.cond.Wait()
	}
}

func (p *memPipe) write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ring == nil {
		p.ring = make([]byte, p.size)
	}
	done := 0
	for {
		switch {
		case p.wclosed:
			return done, net.ErrClosed
		case p.writeDeadline.passed():
			return done, os.ErrDeadlineExceeded
		case p.rclosed && !p.silent:
			return done, io.ErrClosedPipe
		case done == len(b):
			return done, nil
		case p.n < len(p.ring):
			end := (p.first + p.n) % len(p.ring)
			m := copy(p.ring[end:min(len(p.ring), end+len(p.ring)-p.n)], b[done:])
			p.n += m
			done += m
			p.cond.Broadcast()
			continue
		}
		p.cond.Wait()
	}
}

// change calls f with the lock held, and wakes reads and writes.
func (p *memPipe) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.cond.Broadcast()
}

func (p *memPipe) closeWrite() {
	p.change(func() { p.wclosed = true })
	p.writeDeadline.set(p, time.Time{})
}

// closeRead ends reading and reports whether writing had ended too.
func (p *memPipe) closeRead() (both bool) {
	p.change(func() { p.rclosed, both = true, p.wclosed })
	p.readDeadline.set(p, time.Time{})
	return both
}

func (p *memPipe) silence(on bool) { p.change(func() { p.silent = on }) }

// memDeadline is guarded by its pipe's mu.
type memDeadline struct {
	at    time.Time   // zero: none
	timer *time.Timer // wakes the pipe then; nil: none
}

func (d *memDeadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

func (d *memDeadline) set(p *memPipe, t time.Time) {
	p.change(func() {
		if d.timer != nil {
			d.timer.Stop()
		}
		if d.at, d.timer = t, nil; !t.IsZero() {
			d.timer = time.AfterFunc(time.Until(t), func() { p.change(func() {}) })
		}
	})
}
