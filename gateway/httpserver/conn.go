package httpserver

import (
	"bytes"
	"container/list"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/sock"
)

// maxReadAhead bounds what a client may send while its request is being
// answered (a pipelined next request), in bytes. Beyond it the connection is no
// longer watched, so that nothing more is held.
const maxReadAhead = 16 << 10

// listener accepts connections as Conns, bounds their number, and can close all of them.
type listener struct {
	net.Listener
	limits    atomic.Pointer[limits.Limits]
	close     func() error  // of Listener, once
	held      atomic.Int64  // bytes that are reserved for large bodies and for answers
	limiting  atomic.Bool   // limitGarbage runs
	ended     chan struct{} // closed by End
	made      time.Time
	most      int // connections; 0: any number
	meters    Counters
	errorBody func(status int, message string) []byte

	mu        sync.Mutex
	conns     *list.List         // open Conns: without a request, the longest idle first, then firstBusy, then the others
	firstBusy *list.Element      // separates the Conns without a request from those with one
	from      map[netip.Addr]int // of conns
}

// newListener wraps l. At most most connections are open at a time; 0: any number.
func newListener(l net.Listener, most int, m Counters, errorBody func(int, string) []byte) *listener {
	conns := list.New()
	own := &listener{Listener: l, close: sync.OnceValue(l.Close), errorBody: errorBody, ended: make(chan struct{}), made: time.Now(), most: most, meters: m, conns: conns, firstBusy: conns.PushBack(nil), from: map[netip.Addr]int{}}
	own.SetLimits(limits.Limits{})
	return own
}

// SetLimits changes the limits; any goroutine may call it.
func (l *listener) SetLimits(o limits.Limits) { l.limits.Store(&o) }

// Close implements net.Listener. Further calls return the error of the first.
func (l *listener) Close() error { return l.close() }

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if tcp, ok := nc.(interface{ SetNoDelay(bool) error }); ok {
			// This is Go's default. It is set again because the time to the first token depends on it.
			if err := tcp.SetNoDelay(true); err != nil {
				nc.Close()
				continue
			}
		}
		if c := l.Admit(nc); c != nil {
			return c, nil
		}
	}
}

// Admit registers a connection, as Accept does. If --max-connections are open, it closes the one
// that is longest without a request. It refuses the new connection and returns nil if all others
// have requests, or if its address has too many.
func (l *listener) Admit(nc net.Conn) *Conn {
	c := &Conn{Conn: nc, Raw: sock.NewConn(nc), l: l, arrival: arrival{begun: true, start: time.Now()}}
	c.from, _ = address(nc)
	most := l.limits.Load().MaxConnsPerAddress
	l.mu.Lock()
	if most > 0 && c.from.IsValid() && l.from[c.from] >= most {
		l.mu.Unlock()
		l.meters.AddressFull.Inc()
		l.refuse(nc, 429, "Too Many Requests", "your address has %d connections to this gateway, which is the limit (--max-connections-per-address)", most)
		return nil
	}
	var victim *Conn
	if l.most > 0 && l.open() >= l.most {
		l.waitIdle()
	}
	if l.most > 0 && l.open() >= l.most {
		if victim = l.unlinkIdle(); victim == nil {
			l.mu.Unlock()
			l.meters.Full.Inc()
			l.refuse(nc, 503, "Service Unavailable", "connection limit exceeded: the gateway has %d connections, which is the limit (--max-connections), and each has a request", l.most)
			return nil
		}
	}
	c.idle.place, c.idle.since = l.conns.InsertBefore(c, l.firstBusy), time.Now()
	if c.from.IsValid() {
		l.from[c.from]++
	}
	l.mu.Unlock()
	if victim != nil {
		l.meters.Evicted.Inc()
		_ = victim.end() // its owner may have closed it before
	}
	return c
}

// refuse answers a new connection with an error and closes it. A TLS connection gets no answer,
// because its handshake would take time.
func (l *listener) refuse(nc net.Conn, status int, reason, format string, args ...any) {
	if _, secret := nc.(*tls.Conn); !secret {
		body := l.errorBody(status, fmt.Sprintf(format, args...))
		// The socket's buffer takes the answer at once. Errors do not matter: the connection is closed.
		_ = nc.SetWriteDeadline(time.Now().Add(lingerTime))
		_, _ = fmt.Fprintf(nc, refusedAnswer, status, reason, retryAfter, len(body), body)
	}
	nc.Close()
}

// open returns the number of open connections. l.mu must be held.
func (l *listener) open() int { return l.conns.Len() - 1 } // without firstBusy

// Evict closes the connection that is longest without a request, and reports whether
// there was one.
func (l *listener) Evict() bool {
	l.mu.Lock()
	victim := l.unlinkIdle()
	l.mu.Unlock()
	if victim == nil {
		return false
	}
	l.meters.Evicted.Inc()
	_ = victim.end() // its owner may have closed it before
	return true
}

// Connections returns the numbers of open connections, of those without a request, and of their
// addresses.
func (l *listener) Connections() (open, idle, addresses int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for e := l.conns.Front(); e != l.firstBusy; e = e.Next() {
		idle++
	}
	return l.open(), idle, len(l.from)
}

// CloseAll closes every open connection.
func (l *listener) CloseAll() {
	l.mu.Lock()
	conns := make([]*Conn, 0, l.open())
	for e := l.conns.Front(); e != nil; e = e.Next() {
		if c, ok := e.Value.(*Conn); ok {
			conns = append(conns, c)
		}
	}
	l.mu.Unlock()
	for _, c := range conns {
		_ = c.end() // its owner may have closed it before
	}
}

// Conn is a client's connection. The time of each write is bounded, so that a client that stops
// reading loses its connection. While a request is being answered, the connection can be watched
// for its end. The server's goroutine owns it. A watch's goroutine also reads it, but never at the
// same time.
type Conn struct {
	net.Conn
	Raw            *sock.Conn // the socket of net.Conn; nil: there is none
	l              *listener
	from           netip.Addr       // invalid: not a TCP connection
	arrival                         // of the current request; only the server's goroutine reads it
	held           atomic.Int64     // bytes of MaxBodyMemory that this request holds
	ahead          []byte           // read by a watch or with a request's first byte, not yet by the server
	readAhead      *[HeadBytes]byte // the pooled buffer that has ahead; nil: ahead is not pooled
	refused        atomic.Bool      // its request was answered before it was read to its end
	suppress100    bool             // the client sent no Expect: 100-continue, so that it gets no 100
	serverDeadline time.Time        // the server's deadline of reads; zero: none
	deadline       time.Time        // the read deadline of net.Conn; zero: none

	idle idleState

	mu      sync.Mutex
	closed  bool
	onClose func() // called before the connection is closed; may be nil
}

// OnClose sets the function that is called before the connection is closed; nil: none. When it
// returns, the function that was set before is not running. It returns false if the connection is
// closed.
func (c *Conn) OnClose(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onClose = f
	return !c.closed
}

// deadlineSlack is the difference of deadlines up to which the deadline of an idle connection is
// not set again. The connection may be closed earlier by as much.
const deadlineSlack = time.Second

// SetReadDeadline implements net.Conn for the server, which sets two deadlines for each request.
// They take effect at the next Read.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.serverDeadline = t
	return nil
}

// setDeadline sets the deadline of a read, unless the current one is t or up to slack before t.
func (c *Conn) setDeadline(t time.Time, slack time.Duration) error {
	if t.Equal(c.deadline) || !c.deadline.IsZero() && !t.Before(c.deadline) && t.Sub(c.deadline) < slack {
		return nil
	}
	c.deadline = t
	return c.Conn.SetReadDeadline(t)
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	if n > 0 && c.idle.begins() {
		c.idle.first.Store(int64(time.Since(c.l.made)))
	}
	if !c.idle.busy && c.idle.headEnds(p[:n]) && !c.setBusy() {
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *Conn) read(p []byte) (int, error) {
	if len(c.ahead) > 0 {
		if c.answered {
			c.finishRequest()
		}
		n := copy(p, c.ahead)
		if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
			c.releaseAhead()
		}
		c.received(n)
		return n, nil
	}
	if c.answered { // this read waits for the next request
		c.finishRequest()
	}
	if err := c.reserveBody(len(p)); err != nil {
		return 0, err
	}
	until, slack := c.serverDeadline, deadlineSlack
	if c.begun { // the server's deadline is longestArrival
		until, slack = c.arrivalDeadline(c.l), 0
	}
	if err := c.setDeadline(until, slack); err != nil {
		return 0, err
	}
	n, err := 0, error(nil)
	if c.Raw != nil && len(p) == 1 {
		n, err = c.firstByte(p)
	} else if c.Raw != nil && len(p) > 0 {
		n, err = c.Raw.Read(p)
	} else {
		n, err = c.Conn.Read(p)
	}
	if err != nil {
		c.refusePlain(err)
	}
	c.received(n)
	return n, err
}

// refusePlain answers a client that sends plain HTTP to a port with TLS. err is that of a read.
func (c *Conn) refusePlain(err error) {
	var plain tls.RecordHeaderError
	if !errors.As(err, &plain) || plain.Conn == nil || !methodStart(plain.RecordHeader[:]) {
		return
	}
	body := c.l.errorBody(400, "this port has a certificate: write https:// instead of http://")
	// The socket's buffer takes the answer at once. Errors do not matter: the connection is closed.
	_ = plain.Conn.SetDeadline(time.Now().Add(lingerTime))
	_, _ = fmt.Fprintf(plain.Conn, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if half, ok := plain.Conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.CopyN(io.Discard, plain.Conn, lingerBytes)
	}
}

// methodStart reports whether a line of HTTP may begin so: with a method.
func methodStart(b []byte) bool {
	for i, c := range b {
		if c == ' ' {
			return i >= len("GET")
		}
		if c < 'A' || c > 'Z' {
			return false
		}
	}
	return true
}

// readAheads has buffers for the beginning of requests. Idle connections hold none.
var readAheads = sync.Pool{New: func() any { return new([HeadBytes]byte) }}

// firstByte reads the first byte of a request, which the server reads by itself before it takes a
// buffer. The bytes that arrived with it become ahead, which saves a system call.
func (c *Conn) firstByte(p []byte) (int, error) {
	n, err := c.Raw.ReadInto((*firstBytes)(c))
	if n == 0 {
		c.releaseAhead()
		return 0, err
	}
	copy(p, c.readAhead[:1])
	if c.ahead = c.readAhead[1:n]; n == 1 {
		c.releaseAhead()
	}
	return 1, nil
}

// firstBytes is a connection as a source of the buffer for the beginning of a request.
type firstBytes Conn

// Buffer implements sock.BufferSource.
func (c *firstBytes) Buffer() []byte {
	if c.readAhead == nil {
		c.readAhead = readAheads.Get().(*[HeadBytes]byte)
	}
	return c.readAhead[:]
}

// Release implements sock.BufferSource.
func (c *firstBytes) Release() { (*Conn)(c).releaseAhead() }

// releaseAhead drops the bytes that were read ahead, and their buffer.
func (c *Conn) releaseAhead() {
	if c.readAhead != nil {
		readAheads.Put(c.readAhead)
	}
	c.ahead, c.readAhead = nil, nil
}

// continueResponse asks a client for the body of its request.
var continueResponse = []byte("HTTP/1.1 100 Continue\r\n\r\n")

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	if bytes.Equal(p, continueResponse) {
		if c.suppress100 {
			c.suppress100 = false
			return len(p), nil
		}
	} else {
		c.answered = true
	}
	n, err := 0, error(nil)
	if c.Raw != nil {
		if n, err = c.Raw.WriteNow(p); err != nil || n == len(p) {
			return n, err
		}
	}
	// From here on the write may block.
	if err := c.Conn.SetWriteDeadline(time.Now().Add(c.l.limits.Load().SlowClientTimeout)); err != nil {
		return n, err
	}
	rest, err := c.Conn.Write(p[n:])
	if err == nil {
		err = c.Conn.SetWriteDeadline(time.Time{}) // it would also end writes that do not block
	}
	return n + rest, err
}

// frames pools the buffers of chunks. A stream that waits for its next token holds none.
var frames = sync.Pool{New: func() any { return new([]byte) }}

// ChunkWriter returns the connection of a request if chunks of a streamed answer may be written to
// it directly, and otherwise nil. fasthttp must have sent the head and all chunks before.
func ChunkWriter(ctx *fasthttp.RequestCtx) *Conn {
	if c, ok := ctx.Conn().(*Conn); ok && c.Raw != nil && ctx.Request.Header.IsHTTP11() {
		return c
	}
	return nil
}

// WriteChunkNow writes data as an HTTP chunk without waiting. It returns the part of the chunk that
// the client did not take, which Write can send.
func (c *Conn) WriteChunkNow(data []byte) (rest []byte, err error) {
	frame := frames.Get().(*[]byte)
	*frame = strconv.AppendUint((*frame)[:0], uint64(len(data)), 16)
	*frame = append(append(*frame, "\r\n"...), data...)
	*frame = append(*frame, "\r\n"...)
	n, err := c.Raw.WriteNow(*frame)
	if rest = (*frame)[n:]; err != nil || len(rest) > 0 {
		return rest, err // rest is part of the frame
	}
	frames.Put(frame)
	return nil, nil
}

// Bounds of the time and of the bytes that are read after an early answer. Closing a connection
// with unread bytes resets it, and a client that is still sending would lose the answer.
const (
	lingerTime  = time.Second
	lingerBytes = 8 << 20
)

// Close implements net.Conn; any goroutine of the server may call it.
func (c *Conn) Close() error {
	c.release()
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok && c.refused.Load() && half.CloseWrite() == nil {
		// An error means that the connection has ended.
		_ = c.Conn.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.CopyN(io.Discard, c.Conn, lingerBytes)
	}
	return c.end()
}

// end closes the connection at once.
func (c *Conn) end() error {
	c.mu.Lock()
	if c.closed = true; c.onClose != nil {
		c.onClose()
	}
	c.mu.Unlock()
	c.release() // also what reserve got while Close ran
	c.l.mu.Lock()
	c.l.unlink(c)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// Watch waits for the end of a client's connection while its request is being answered.
type Watch struct {
	Gone     chan struct{} // closed when the client has closed the connection
	done     chan struct{} // closed when the watch no longer reads
	listener GoneListener  // may be nil
	c        *Conn
}

// Closed reports whether the client has closed its connection.
func (w *Watch) Closed() bool {
	select {
	case <-w.Gone:
		return true
	default:
		return false
	}
}

// GoneListener is notified when a client has closed its connection.
type GoneListener interface{ ClientGone() }

// Watch starts a watch. Stop must be called before the server reads again; the listener is not
// called after it.
func (c *Conn) Watch(listener GoneListener) *Watch {
	w := &Watch{Gone: make(chan struct{}), done: make(chan struct{}), listener: listener, c: c}
	// The deadline of reading the request must not end the watch. An error means that the connection
	// is closed, which the watch then finds.
	_ = c.setDeadline(time.Time{}, 0)
	go w.run()
	return w
}

func (w *Watch) run() {
	defer close(w.done)
	var b [64]byte // small enough for a new goroutine's stack
	for len(w.c.ahead) < maxReadAhead {
		n, err := 0, error(nil)
		if w.c.Raw != nil {
			n, err = w.c.Raw.Read(b[:])
		} else {
			n, err = w.c.Conn.Read(b[:])
		}
		w.c.ahead = append(w.c.ahead, b[:n]...)
		if err == nil {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			close(w.Gone)
			if w.listener != nil {
				w.listener.ClientGone()
			}
		}
		return
	}
}

// Stop ends the watch. A deadline in the past ends its read, and is removed afterwards.
func (w *Watch) Stop() {
	_ = w.c.Conn.SetReadDeadline(time.Unix(1, 0)) // an error means that the connection is closed
	<-w.done
	_ = w.c.Conn.SetReadDeadline(time.Time{})
}
