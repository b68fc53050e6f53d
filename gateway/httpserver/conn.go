package httpserver

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/internal/sock"
)

// maxReadAhead bounds what a client may send while its request is being
// answered (a pipelined next request), in bytes. Beyond it the connection is no
// longer watched, so that nothing more is held.
const maxReadAhead = 16 << 10

// listener hands out Conns and can close all of them.
type listener struct {
	net.Listener
	writeTimeout  atomic.Int64  // a duration
	headerTimeout atomic.Int64  // a duration
	minRate       atomic.Int64  // bytes of a request per second; 0: any
	perAddress    atomic.Int64  // connections; 0: any number
	maxHeld       atomic.Int64  // bytes of large bodies; 0: any number
	maxBody       atomic.Int64  // bytes of one body
	held          atomic.Int64  // bytes of those that arrive or are being answered
	tending       atomic.Bool   // tend runs
	ended         chan struct{} // closed when Run ends
	most          int           // connections; 0: any number
	meters        Counters
	errorBody     func(status int, message string) []byte

	mu    sync.Mutex
	conns map[*Conn]struct{}
	from  map[netip.Addr]int // of conns
	idle  idleList           // those of conns without a request
}

// newListener wraps l. At most most connections are open at a time; 0: any number.
func newListener(l net.Listener, most int, m Counters, errorBody func(int, string) []byte) *listener {
	return &listener{Listener: l, errorBody: errorBody, ended: make(chan struct{}), most: most, meters: m, conns: map[*Conn]struct{}{}, from: map[netip.Addr]int{}}
}

// SetLimits changes the limits; any goroutine may call it.
func (l *listener) SetLimits(o Limits) {
	l.writeTimeout.Store(int64(o.SlowClientTimeout))
	l.headerTimeout.Store(int64(o.HeaderTimeout))
	l.minRate.Store(int64(max(0, o.MinBodyRate)))
	l.perAddress.Store(int64(max(0, o.MaxConnsPerAddress)))
	l.maxHeld.Store(int64(max(0, o.MaxBodyMemory)))
	l.maxBody.Store(int64(o.MaxBodyBytes))
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if tcp, ok := nc.(interface{ SetNoDelay(bool) error }); ok {
			// Go's default, but the first token's time hangs on it.
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

// Admit registers a connection, as Accept does. When --max-connections are open it closes the one that
// is longest without a request. It refuses the new connection and returns nil when all
// others have requests, or when its address has too many.
func (l *listener) Admit(nc net.Conn) *Conn {
	c := &Conn{Conn: nc, Raw: sock.Of(nc), l: l, arrival: arrival{begun: true, start: time.Now()}}
	c.from, _ = address(nc)
	most := int(l.perAddress.Load())
	l.mu.Lock()
	if most > 0 && c.from.IsValid() && l.from[c.from] >= most {
		l.mu.Unlock()
		l.meters.Crowded.Inc()
		l.refuse(nc, 429, "Too Many Requests", "your address has %d connections to this gateway, as many as it may (--max-connections-per-address)", most)
		return nil
	}
	var victim *Conn
	if l.most > 0 && len(l.conns) >= l.most {
		l.waitIdle()
	}
	if l.most > 0 && len(l.conns) >= l.most {
		if victim = l.unlinkIdle(); victim == nil {
			l.mu.Unlock()
			l.meters.Full.Inc()
			l.refuse(nc, 503, "Service Unavailable", "connection limit exceeded: the gateway has %d connections, as many as it may (--max-connections), and each has a request", l.most)
			return nil
		}
	}
	l.conns[c] = struct{}{}
	if c.from.IsValid() {
		l.from[c.from]++
	}
	l.idle.push(c)
	l.mu.Unlock()
	if victim != nil {
		l.meters.Evicted.Inc()
		_ = victim.end() // its owner may have been first
	}
	return c
}

// refuse answers a new connection with an error and closes it. A TLS connection, whose
// handshake would take time, gets no answer.
func (l *listener) refuse(nc net.Conn, status int, reason, format string, args ...any) {
	if _, secret := nc.(*tls.Conn); !secret {
		body := l.errorBody(status, fmt.Sprintf(format, args...))
		// The socket's buffer takes that at once; whatever fails, the connection ends.
		_ = nc.SetWriteDeadline(time.Now().Add(lingerTime))
		_, _ = fmt.Fprintf(nc, refusedAnswer, status, reason, retryAfter, len(body), body)
	}
	nc.Close()
}

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
	_ = victim.end() // its owner may have been first
	return true
}

// Connections is the number of open connections, of those without a request among them,
// and of the addresses that they are from.
func (l *listener) Connections() (open, idle, addresses int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := l.idle.first; c != nil; c = c.idle.next {
		idle++
	}
	return len(l.conns), idle, len(l.from)
}

// CloseAll closes every open connection.
func (l *listener) CloseAll() {
	l.mu.Lock()
	conns := make([]*Conn, 0, len(l.conns))
	for c := range l.conns {
		conns = append(conns, c)
	}
	l.mu.Unlock()
	for _, c := range conns {
		_ = c.end() // its owner may have been first
	}
}

// Conn is a client's connection. Each write is bounded in time, so that a
// client that stops reading is given up; and while a request is being answered
// its reading side can be watched for the client's going away. The server's
// goroutine owns it; only watch's goroutine reads beside it, and never at the
// same time.
type Conn struct {
	net.Conn
	Raw     *sock.Conn // the same; nil: there is none
	l       *listener
	from    netip.Addr       // invalid: none
	arrival                  // of the present request; only the server's goroutine reads it
	held    atomic.Int64     // of MaxBodyMemory, by this request
	ahead   []byte           // read by a watch or with a request's first byte, not yet by the server
	lent    *[HeadBytes]byte // what ahead is part of; nil: it is its own
	refused atomic.Bool      // its request was answered before it was read to its end
	unasked bool             // the client did not ask whether to go on: it is not told
	patient time.Time        // what the server set for the next request; zero: for ever
	armed   time.Time        // the read deadline below; zero: none

	idle idleState

	mu    sync.Mutex
	ended bool
	tell  func() // called before it is closed; nil: nobody
}

// OnEnd has f called before the connection is closed, if it is, and nobody with nil; when
// it returns what was to be called before is not running. false: it is closed.
func (c *Conn) OnEnd(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell = f
	return !c.ended
}

// deadlineSlack is how much sooner than it was told to the server may give up a
// connection that waits for its next request: deadlines that differ by less are not set anew.
const deadlineSlack = time.Second

// SetReadDeadline implements net.Conn for the server, which sets two for each request.
// They take effect with the next Read.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.patient = t
	return nil
}

// arm sets the deadline of a read, where it is not the one that is set, or up to slack later.
func (c *Conn) arm(t time.Time, slack time.Duration) error {
	if t.Equal(c.armed) || !c.armed.IsZero() && !t.Before(c.armed) && t.Sub(c.armed) < slack {
		return nil
	}
	c.armed = t
	return c.Conn.SetReadDeadline(t)
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	if !c.idle.busy && c.idle.headEnds(p[:n]) && !c.setBusy() {
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *Conn) read(p []byte) (int, error) {
	if len(c.ahead) > 0 {
		if c.answered {
			c.over()
		}
		n := copy(p, c.ahead)
		if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
			c.giveBack()
		}
		c.came(n)
		return n, nil
	}
	if c.answered { // the next request is waited for
		c.over()
	}
	if err := c.room(len(p)); err != nil {
		return 0, err
	}
	until, slack := c.patient, deadlineSlack
	if c.begun { // the server's own bound is longestArrival
		until, slack = c.deadline(c.l), 0
	}
	if err := c.arm(until, slack); err != nil {
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
	c.came(n)
	return n, err
}

// readAheads are taken when a request begins to come, and given back when the
// server has read it: connections that wait hold none.
var readAheads = sync.Pool{New: func() any { return new([HeadBytes]byte) }}

// firstByte reads a request's first byte, for which the server asks alone before it
// takes a buffer; what came with it is ahead, and costs no call of its own.
func (c *Conn) firstByte(p []byte) (int, error) {
	n, err := c.Raw.ReadInto((*firstBytes)(c))
	if n == 0 {
		c.giveBack()
		return 0, err
	}
	copy(p, c.lent[:1])
	if c.ahead = c.lent[1:n]; n == 1 {
		c.giveBack()
	}
	return 1, nil
}

// firstBytes lends a connection what its first bytes are read into.
type firstBytes Conn

// Lend implements sock.Lender.
func (c *firstBytes) Lend() []byte {
	if c.lent == nil {
		c.lent = readAheads.Get().(*[HeadBytes]byte)
	}
	return c.lent[:]
}

// Idle implements sock.Lender.
func (c *firstBytes) Idle() { (*Conn)(c).giveBack() }

// giveBack ends the use of what was read ahead.
func (c *Conn) giveBack() {
	if c.lent != nil {
		readAheads.Put(c.lent)
	}
	c.ahead, c.lent = nil, nil
}

// goOn asks a client for its body; the answer is still to come.
var goOn = []byte("HTTP/1.1 100 Continue\r\n\r\n")

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	if bytes.Equal(p, goOn) {
		if c.unasked {
			c.unasked = false
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
	// Now it may block.
	if err := c.Conn.SetWriteDeadline(time.Now().Add(time.Duration(c.l.writeTimeout.Load()))); err != nil {
		return n, err
	}
	rest, err := c.Conn.Write(p[n:])
	if err == nil {
		err = c.Conn.SetWriteDeadline(time.Time{}) // of the next write that does not block, too
	}
	return n + rest, err
}

// A client that is still sending when it is refused would lose the answer to the
// reset of a connection that is closed over unread bytes. So what it sends is
// read for a while, and for so many bytes.
const (
	lingerTime  = time.Second
	lingerBytes = 8 << 20
)

// Close implements net.Conn; any goroutine of the server may call it.
func (c *Conn) Close() error {
	c.release()
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok && c.refused.Load() && half.CloseWrite() == nil {
		// An error of either is the end that was waited for.
		_ = c.Conn.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.CopyN(io.Discard, c.Conn, lingerBytes)
	}
	return c.end()
}

// end closes the connection at once.
func (c *Conn) end() error {
	c.mu.Lock()
	if c.ended = true; c.tell != nil {
		c.tell()
	}
	c.mu.Unlock()
	c.l.mu.Lock()
	c.l.unlink(c)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// Watch looks for the end of a client's connection while its request is being
// answered.
type Watch struct {
	Gone chan struct{} // closed when the client has gone
	done chan struct{} // closed when the connection is the server's again
	tell GoneListener  // of the client's end; nil: nobody
	c    *Conn
}

// GoneListener is told that a client has gone.
type GoneListener interface{ ClientGone() }

// Watch starts watching; Stop must be called before the server reads again, and
// tell is not called after it.
func (c *Conn) Watch(tell GoneListener) *Watch {
	w := &Watch{Gone: make(chan struct{}), done: make(chan struct{}), tell: tell, c: c}
	// The server's bound on reading the request must not end the watch. An error
	// means that the connection is closed, which the watch then finds.
	_ = c.arm(time.Time{}, 0)
	go w.run()
	return w
}

func (w *Watch) run() {
	defer close(w.done)
	var b [64]byte // on a stack as small as they begin
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
			if w.tell != nil {
				w.tell.ClientGone()
			}
		}
		return
	}
}

// Stop ends the watch. A read that is under way is ended by a deadline in the
// past, which is then taken back.
func (w *Watch) Stop() {
	_ = w.c.Conn.SetReadDeadline(time.Unix(1, 0)) // an error means that the connection is closed
	<-w.done
	_ = w.c.Conn.SetReadDeadline(time.Time{})
}
