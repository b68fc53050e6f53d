package kvtransfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// PingInterval is the interval of a writer's pings on an idle control connection. PeerTimeout must
// be at least twice as long.
const PingInterval = 2 * time.Second

// outboxMessages bounds the control messages that wait for a peer that does not read. One more ends
// the session.
const outboxMessages = 1024

// readerSession holds a writer's connections to this reader. Reader.mu guards its fields except out
// and gone.
type readerSession struct {
	id     uint64
	node   string       // the writer's name
	out    chan control // to the control connection
	gone   chan struct{}
	conns  []net.Conn // control first
	closed bool
	rdma   bool          // its one data connection is a fabricConn
	shared *mapping      // of the writer's memory; nil until the writer has sent it
	fabric *fabricReader // nil before the endpoints are exchanged, and after the last time that a write can land
}

// serve runs one connection from its hello to its end.
func (r *Reader) serve(raw net.Conn) {
	defer func() {
		raw.Close()
		r.mu.Lock()
		delete(r.open, raw)
		r.mu.Unlock()
	}()
	conn, s, h, err := r.shake(raw)
	if err != nil {
		return
	}
	if h.kind == controlConn {
		r.conns.Go(func() { r.sendControl(s, conn) })
		err = r.receiveControl(s, conn)
	} else {
		err = r.receive(s, conn, h.kind)
	}
	r.mu.Lock()
	r.closeSessionLocked(s, fmt.Errorf("%w: writer %q: %w", ErrConnection, s.node, err))
	r.mu.Unlock()
}

// shake reads a hello and answers it. A client that does not know the epoch learns nothing.
func (r *Reader) shake(raw net.Conn) (net.Conn, *readerSession, hello, error) {
	var h hello
	ctx, cancel := context.WithTimeout(context.Background(), r.o.HandshakeTimeout)
	defer cancel()
	raw.SetDeadline(time.Now().Add(r.o.HandshakeTimeout))
	tune(raw, r.o.SocketBuffer, false)
	conn, err := secure(ctx, raw, r.o.TLS, true)
	if err == nil {
		buf := make([]byte, helloSize)
		if _, err = io.ReadFull(conn, buf); err == nil {
			err = h.decode(buf)
		}
	}
	r.mu.Lock()
	r.nHello--
	var s *readerSession
	w := welcome{version: Version}
	if err == nil {
		s, w.status = r.joinLocked(raw, h)
		if w.status != refusedEpoch {
			w.epoch, w.layout, w.node = r.epoch, r.o.Layout, r.o.Node
		}
	}
	if s == nil {
		r.stats.Refused++
	}
	r.mu.Unlock()
	if err != nil {
		return nil, nil, h, err
	}
	_, err = conn.Write(w.encode())
	if s == nil {
		return nil, nil, h, fmt.Errorf("%w: %v", ErrRefused, w.status)
	}
	if err != nil {
		r.mu.Lock()
		r.closeSessionLocked(s, fmt.Errorf("%w: welcoming %q: %w", ErrConnection, s.node, err))
		r.mu.Unlock()
		return nil, nil, h, err
	}
	raw.SetDeadline(time.Time{})
	return conn, s, h, nil
}

// joinLocked adds a connection to its session. A control connection opens the session.
func (r *Reader) joinLocked(raw net.Conn, h hello) (*readerSession, status) {
	s := r.sessions[h.session]
	switch {
	case h.epoch != r.epoch:
		return nil, refusedEpoch
	case h.version != Version:
		return nil, refusedVersion
	case h.layout != r.o.Layout:
		return nil, refusedLayout
	case r.closed || (h.kind == controlConn && len(r.sessions) >= r.o.MaxSessions):
		return nil, refusedBusy
	case (h.kind == controlConn) != (s == nil):
		return nil, refusedSession
	case (h.kind == sharedConn) != (s != nil && s.shared != nil):
		return nil, refusedSession
	case s != nil && (h.kind == fabricConn && (r.rdma == nil || len(s.conns) > 1) || s.rdma):
		return nil, refusedSession
	case s != nil && len(s.conns) > MaxConnections:
		return nil, refusedBusy
	}
	if s == nil {
		s = &readerSession{id: h.session, node: h.node, out: make(chan control, outboxMessages), gone: make(chan struct{})}
		r.sessions[h.session] = s
	}
	s.conns, s.rdma = append(s.conns, raw), h.kind == fabricConn
	return s, welcomeOK
}

// closeSessionLocked closes a session's connections and fails its leases.
func (r *Reader) closeSessionLocked(s *readerSession, why error) {
	if s.closed {
		return
	}
	s.closed = true
	close(s.gone)
	delete(r.sessions, s.id)
	if !errors.Is(why, io.EOF) && !errors.Is(why, ErrClosed) {
		r.stats.SessionsLost++
	}
	// Closing a socket waits for the read in progress, and that read may wait for r.mu to check the
	// fence.
	conns, shared := s.conns, s.shared
	r.conns.Go(func() {
		closeAll(conns)
		shared.drop()
	})
	for k, l := range r.leases {
		if l.session == s {
			r.endLocked(k, goneUnknown, why)
		}
	}
}

// postLocked queues a control message. It closes the session of a writer that does not read them.
func (r *Reader) postLocked(s *readerSession, m control) {
	if s.closed {
		return
	}
	select {
	case s.out <- m:
	default:
		r.closeSessionLocked(s, fmt.Errorf("%w: writer %q does not read its control connection", ErrTimeout, s.node))
	}
}

func (r *Reader) sendControl(s *readerSession, conn net.Conn) {
	if err := pumpControl(conn, s.out, s.gone, 0, r.o.PeerTimeout); err != nil {
		r.mu.Lock()
		r.closeSessionLocked(s, fmt.Errorf("%w: writer %q: %w", ErrConnection, s.node, err))
		r.mu.Unlock()
	}
}

// pumpControl writes messages until gone is closed; with an interval it also pings.
func pumpControl(conn net.Conn, out <-chan control, gone <-chan struct{}, ping, timeout time.Duration) error {
	var tick <-chan time.Time
	if ping > 0 {
		t := time.NewTicker(ping)
		defer t.Stop()
		tick = t.C
	}
	buf := make([]byte, controlSize)
	for {
		var m control
		select {
		case m = <-out:
		case <-tick:
			m = control{kind: msgPing}
		case <-gone:
			return nil
		}
		m.encode(buf)
		conn.SetWriteDeadline(time.Now().Add(timeout))
		if _, err := conn.Write(buf); err != nil {
			return err
		}
	}
}

// receiveControl handles a writer's control messages until the connection ends.
func (r *Reader) receiveControl(s *readerSession, conn net.Conn) error {
	buf := make([]byte, controlSize)
	for {
		conn.SetReadDeadline(time.Now().Add(r.o.PeerTimeout))
		m, err := readControl(conn, buf)
		if err != nil {
			return err
		}
		r.mu.Lock()
		if s.closed { // nothing would fail a lease that is bound to it now
			r.mu.Unlock()
			return net.ErrClosed
		}
		switch m.kind {
		case msgPing:
			r.postLocked(s, control{kind: msgPong})
		case msgRenew:
			r.renewLocked(s, m)
		case msgAbort:
			r.abortLocked(s, m)
		case msgFenced:
			if l := r.leases[m.key]; l != nil && l.session == s {
				r.fenceLocked(m.key, l)
			}
		default:
			err = fmt.Errorf("%w: a writer sent a message of type %d", ErrProtocol, m.kind)
		}
		r.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

func (r *Reader) renewLocked(s *readerSession, m control) {
	if r.table.Renew(r.now(), m.key, s.id, m.value) {
		r.leases[m.key].session = s
		r.permitLocked(s, m.key)
		return
	}
	r.postLocked(s, control{kind: msgGone, code: goneUnknown, key: m.key})
}

// abortLocked ends a lease of this session. The acknowledgement waits for a read in progress.
func (r *Reader) abortLocked(s *readerSession, m control) {
	if r.table.Renew(r.now(), m.key, s.id, 0) {
		r.leases[m.key].session = s
		r.leases[m.key].ackAbort = true
		r.endLocked(m.key, goneUnknown, fmt.Errorf("%w: %q: %s", ErrAborted, s.node, m.text))
		return
	}
	if l := r.leases[m.key]; l != nil && l.session == s && r.table.State(m.key) == lease.Quarantined {
		l.ackAbort = true
		return
	}
	r.postLocked(s, control{kind: msgAborted, key: m.key})
}
