package rpc

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/sock"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// writeStepBytes is the most that one Write gets, so that progress within a large
// parcel counts and a slow link does not look like a stalled peer.
const writeStepBytes = 256 << 10

// Conn is one connection to a peer. All methods may be called from any
// goroutine and none of them blocks.
type Conn struct {
	o   Options
	h   Handler
	raw net.Conn // the socket
	nc  net.Conn // read and written: raw, or TLS over it

	identity tlsconf.Identity // of the peer's certificate; zero on dialled connections and without TLS
	warnings *warnings        // set with identity

	out     outbox
	wake    chan struct{} // capacity 1: the outbox has something
	streams atomic.Uint64

	peer    *nodepb.Hello // written before ready is closed
	version uint32
	opened  bool          // the handler has seen Hello; owned by the reader
	ready   chan struct{} // closed when the handshake is done

	mu    sync.Mutex
	err   error         // why the connection ended; set with done
	done  chan struct{} // closed when the connection begins to end
	over  atomic.Bool   // done is closed
	wrote chan struct{} // closed when the writer has ended

	timer      *time.Timer   // the next beat
	silence    atomic.Int64  // Options.Silence, or the argument of SetSilence
	received   atomic.Uint64 // bytes read
	receivedAt atomic.Int64  // when bytes were last read, nanoseconds since born
	born       time.Time
	sent       atomic.Uint64 // bytes written
	lastRecv   uint64        // received at the last beat; owned by beat, as the next three
	lastSent   uint64
	silentFor  time.Duration
	stalledFor time.Duration
}

func newConn(raw, nc net.Conn, o Options, h Handler) *Conn {
	c := &Conn{
		o: o, h: h, raw: raw, nc: nc,
		out:   outbox{bound: o.OutboxBytes},
		wake:  make(chan struct{}, 1),
		ready: make(chan struct{}),
		done:  make(chan struct{}),
		wrote: make(chan struct{}),
		born:  time.Now(),
	}
	c.silence.Store(int64(o.Silence))
	c.timer = time.AfterFunc(o.Heartbeat, c.beat)
	c.timer.Stop() // starts with Hello
	return c
}

// Send queues a message as one frame; m may be nil for a type without fields.
// It fails with ErrOutboxFull or ErrClosed and never blocks.
func (c *Conn) Send(t Type, stream uint64, m proto.Message) error {
	if err := c.out.put(t, stream, m); err != nil {
		return c.refused(err)
	}
	c.queued()
	return nil
}

// SendTokens queues the tokens of one step as one frame; it does not allocate.
func (c *Conn) SendTokens(ts []Token) error {
	if len(ts) == 0 {
		return nil
	}
	if err := c.out.putTokens(ts); err != nil {
		return c.refused(err)
	}
	c.queued()
	return nil
}

func (c *Conn) queued() {
	c.o.Counters.FramesOut.Add(1)
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *Conn) refused(err error) error {
	if errors.Is(err, ErrOutboxFull) {
		c.o.Counters.OutboxFull.Add(1)
	}
	return fmt.Errorf("%w (to %s)", err, c.RemoteAddr())
}

// Peer returns the peer's Hello, which the caller must not change.
func (c *Conn) Peer() *nodepb.Hello { return c.peer }

// Version returns the protocol version that both sides agreed on.
func (c *Conn) Version() uint32 { return c.version }

// RemoteAddr returns the peer's transport address.
func (c *Conn) RemoteAddr() string { return c.raw.RemoteAddr().String() }

// NewStream returns a stream id that this side has not used on this connection.
// Only the side that dialled calls it.
func (c *Conn) NewStream() uint64 { return c.streams.Add(1) }

// Done is closed when the connection begins to end: from then on Send fails, and
// frames that arrive are dropped.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Open reports whether Done is not closed. It is cheap for callers with many connections.
func (c *Conn) Open() bool { return !c.over.Load() }

// ReceivedAt returns when bytes of the peer were last read.
func (c *Conn) ReceivedAt() time.Time { return c.born.Add(time.Duration(c.receivedAt.Load())) }

// Unread reports whether bytes of the peer, or its end, wait to be read. It is false
// for a transport that does not know.
func (c *Conn) Unread() bool {
	switch t := c.raw.(type) {
	case interface{ Unread() bool }:
		return t.Unread()
	case syscall.Conn:
		raw, err := t.SyscallConn()
		quiet := true
		if err == nil && raw.Control(func(fd uintptr) { quiet = sock.Quiet(fd) }) == nil {
			return !quiet
		}
	}
	return false
}

// Ping requests an answer, which moves ReceivedAt. A full outbox already has bytes that
// the peer answers.
func (c *Conn) Ping() { _ = c.Send(FramePing, 0, nil) }

// SetSilence replaces Options.Silence for this connection.
func (c *Conn) SetSilence(d time.Duration) { c.silence.Store(int64(d)) }

// GiveUp ends the connection of a silent peer at once, for the reason err. Queued frames
// are dropped.
func (c *Conn) GiveUp(err error) {
	if c.end(err, false) {
		c.o.Counters.Silent.Add(1)
	}
}

// Err returns why the connection ended, or nil while it is open.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection for the reason err (nil: ErrClosed). Frames queued before
// are still sent, for at most CloseLinger, in the background.
func (c *Conn) Close(err error) {
	if err == nil {
		err = ErrClosed
	}
	if c.end(err, true) {
		time.AfterFunc(c.o.CloseLinger, func() { c.raw.Close() })
	}
}

// end begins the connection's end once and reports whether this call did. The first
// reason is kept.
func (c *Conn) end(err error, flush bool) bool {
	c.mu.Lock()
	first := c.err == nil
	if first {
		c.err = err
		c.over.Store(true)
		close(c.done)
	}
	c.mu.Unlock()
	if first {
		c.out.close(flush)
	}
	if !flush {
		c.raw.Close()
	}
	return first
}

// run serves the connection once its transport is open. It returns when all of the
// connection's goroutines have ended.
func (c *Conn) run() {
	c.o.Counters.Conns.Add(1)
	defer c.o.Counters.Conns.Add(-1)
	bound := time.AfterFunc(c.o.HandshakeTimeout, func() {
		c.end(fmt.Errorf("%w: no Hello from %s within %v", ErrHandshake, c.RemoteAddr(), c.o.HandshakeTimeout), false)
	})
	go c.write()
	if err := c.Send(FrameHello, 0, c.o.Hello); err != nil {
		c.end(err, false)
	}
	c.end(c.read(bound), false)
	bound.Stop()
	<-c.wrote
	if c.opened {
		c.timer.Stop()
		c.h.Closed(c, c.Err())
	}
}

// read passes frames to the Handler until the connection fails or ends. After Close it
// discards frames until the peer has closed too, so that no reset destroys frames that
// the writer still sends.
func (c *Conn) read(bound *time.Timer) error {
	fr := newFrameReader(c.nc, c.count)
	for {
		before := c.received.Load()
		t, stream, payload, err := fr.next()
		c.o.Counters.BytesIn.Add(c.received.Load() - before)
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: %s", ErrPeerClosed, c.RemoteAddr())
		}
		if err != nil {
			return fmt.Errorf("rpc: reading from %s: %w", c.RemoteAddr(), err)
		}
		if !c.Open() {
			continue
		}
		c.o.Counters.FramesIn.Add(1)
		if err := c.frame(t, stream, payload, bound); err != nil {
			return err
		}
	}
}

// count records that n bytes were read.
func (c *Conn) count(n int) {
	c.received.Add(uint64(n))
	c.receivedAt.Store(int64(time.Since(c.born)))
}

func (c *Conn) frame(t Type, stream uint64, payload []byte, bound *time.Timer) error {
	if !c.opened && t != FrameHello && t != FrameEnd {
		return fmt.Errorf("%w: %s sent %v before Hello", ErrHandshake, c.RemoteAddr(), t)
	}
	switch {
	case t == FrameHello:
		return c.hello(payload, bound)
	case t == FrameEnd && stream == 0:
		var e nodepb.End
		if err := proto.Unmarshal(payload, &e); err != nil {
			return fmt.Errorf("%w: End from %s: %v", ErrBadPayload, c.RemoteAddr(), err)
		}
		return fmt.Errorf("%w: %s: %s", ErrRefused, c.RemoteAddr(), e.Message)
	case t == FramePing:
		// A full outbox already shows the peer that this side is alive.
		_ = c.Send(FramePong, stream, nil)
	case t == FramePong:
	case !c.mayPeerSend(t):
		return c.forbid(t, stream, payload)
	default:
		c.h.Frame(c, t, stream, payload)
	}
	return nil
}

// hello negotiates the version and announces the connection to the Handler.
func (c *Conn) hello(payload []byte, bound *time.Timer) error {
	if c.opened {
		return fmt.Errorf("%w: second Hello from %s", ErrHandshake, c.RemoteAddr())
	}
	var p nodepb.Hello
	if err := proto.Unmarshal(payload, &p); err != nil {
		return fmt.Errorf("%w: Hello from %s: %v", ErrBadPayload, c.RemoteAddr(), err)
	}
	v, err := negotiate(c.o.Hello, &p)
	if err != nil {
		// Best effort: a new outbox has room.
		_ = c.Send(FrameEnd, 0, &nodepb.End{Code: nodepb.Code_CODE_MISMATCH, Message: err.Error()})
		c.Close(fmt.Errorf("%w (peer %s)", err, c.RemoteAddr()))
		return nil
	}
	if !bound.Stop() {
		return nil // the handshake's timeout is ending this connection
	}
	c.peer, c.version, c.opened = &p, v, true
	c.timer.Reset(c.o.Heartbeat)
	close(c.ready)
	c.h.Frame(c, FrameHello, 0, payload)
	return nil
}

// negotiate returns the highest version that both sides speak.
func negotiate(own, peer *nodepb.Hello) (uint32, error) {
	v := min(own.Protocol, peer.Protocol)
	if v == 0 || v < own.ProtocolMin || v < peer.ProtocolMin {
		return 0, fmt.Errorf("%w: %s %q (build %q) speaks %d to %d, %s %q (build %q) speaks %d to %d", ErrVersion,
			own.Role, own.NodeId, own.Build, own.ProtocolMin, own.Protocol,
			peer.Role, peer.NodeId, peer.Build, peer.ProtocolMin, peer.Protocol)
	}
	return v, nil
}

// write sends the frames of the outbox until the connection ends.
func (c *Conn) write() {
	defer close(c.wrote)
	for {
		select {
		case <-c.wake:
		case <-c.done:
		}
		p, ok := c.out.take()
		if !ok {
			c.closeWrite()
			return
		}
		n, err := c.writeParcel(p)
		if err != nil {
			// A peer that closed may have sent an End: the reader gets time to
			// read it, and the frames before it.
			select {
			case <-c.done:
			case <-time.After(c.o.CloseLinger):
			}
			c.end(fmt.Errorf("rpc: writing to %s: %w", c.RemoteAddr(), err), false)
			return
		}
		c.out.done(p, n)
	}
}

func (c *Conn) writeParcel(p parcel) (nBytes int, err error) {
	at := 0
	for _, l := range p.large {
		if err := c.writeAll(p.buf[at:l.at]); err != nil {
			return nBytes, err
		}
		if err := c.writeAll(l.data); err != nil {
			return nBytes, err
		}
		nBytes += l.at - at + len(l.data)
		at = l.at
	}
	return nBytes + len(p.buf) - at, c.writeAll(p.buf[at:])
}

func (c *Conn) writeAll(b []byte) error {
	for len(b) > 0 {
		n, err := c.nc.Write(b[:min(len(b), writeStepBytes)])
		c.sent.Add(uint64(n))
		c.o.Counters.BytesOut.Add(uint64(n))
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// closeWrite closes the sending direction. The reader then waits for the peer to close,
// at most until CloseLinger.
func (c *Conn) closeWrite() {
	half, ok := c.nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		c.raw.Close()
	}
}

// beat runs once in each Heartbeat. It gives up a peer that sends nothing or reads
// nothing, and sends a Ping if a direction was idle. It counts bytes rather than frames,
// so that a large frame on a slow link counts as activity.
func (c *Conn) beat() {
	select {
	case <-c.ready:
	default:
		return // a beat that newConn was too slow to stop
	}
	if !c.Open() {
		return
	}
	received, sent := c.received.Load(), c.sent.Load()
	idleIn, idleOut := received == c.lastRecv, sent == c.lastSent
	c.lastRecv, c.lastSent = received, sent
	c.silentFor = idleTime(idleIn, c.silentFor, c.o.Heartbeat)
	c.stalledFor = idleTime(idleOut && c.out.waiting() > 0, c.stalledFor, c.o.Heartbeat)
	var err error
	switch silence := time.Duration(c.silence.Load()); {
	case c.silentFor >= silence:
		err = fmt.Errorf("%w: nothing received from %s for %v", ErrSilent, c.RemoteAddr(), c.silentFor)
	case c.stalledFor >= silence:
		err = fmt.Errorf("%w: %s read nothing for %v while %d bytes wait", ErrStalled, c.RemoteAddr(), c.stalledFor, c.out.waiting())
	}
	if err != nil {
		c.GiveUp(err)
		return
	}
	if idleIn || idleOut {
		c.Ping()
	}
	c.timer.Reset(c.o.Heartbeat)
}

func idleTime(idle bool, so, tick time.Duration) time.Duration {
	if !idle {
		return 0
	}
	return so + tick
}
