package kvtransfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// writerSession holds a writer's connections to one reader process. Lock order: writerSession.mu,
// then Writer.mu.
type writerSession struct {
	w      *Writer
	id     uint64 // sent in hellos; a new one for each address tried
	epoch  uint64 // the reader's
	node   string // the reader's name
	host   string // of its first address, whichever the session uses: the name to verify in its certificate
	tls    bool
	fabric bool          // the reader accepts RDMA
	kind   connKind      // of the data connections; known when ready
	out    chan control  // to the control connection
	ready  chan struct{} // closed when dialed
	gone   chan struct{} // closed when dead

	mu     sync.Mutex
	work   *sync.Cond    // turn or err changed
	err    error         // why the session is dead
	conns  []net.Conn    // control first
	flag   *flag         // set while the reader's copies are valid; nil: no shared memory
	rdma   *writerFabric // nil: no RDMA; known when ready
	pushes map[lease.Key]*Push
	turn   []*Push   // with pieces to send; each sender takes a batch from the first and puts it last
	idle   time.Time // since when pushes is empty
}

func newWriterSession(w *Writer, g *grant) *writerSession {
	s := &writerSession{
		w: w, epoch: g.key.Epoch, node: g.node, host: hostOf(g.addrs), tls: g.tls, fabric: g.fabric,
		out: make(chan control, outboxMessages), ready: make(chan struct{}), gone: make(chan struct{}),
		pushes: make(map[lease.Key]*Push), idle: time.Now(),
	}
	s.work = sync.NewCond(&s.mu)
	return s
}

// hostOf returns the host of the first address that has one.
func hostOf(addrs []string) string {
	for _, a := range addrs {
		if strings.HasPrefix(a, LocalScheme) {
			continue
		}
		if host, _, err := net.SplitHostPort(a); err == nil {
			return host
		}
		return a
	}
	return ""
}

// direct reports whether pages are read from the device.
func (s *writerSession) direct() bool { return s.kind == fabricConn && s.w.o.Device != nil }

// why returns the error that ended a dead session.
func (s *writerSession) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// dial connects on the first route that works, and runs the session.
func (s *writerSession) dial(addrs []string) {
	err := fmt.Errorf("%w: reader %q offers %q, this writer wants %q", ErrArguments, s.node, addrs, s.w.o.Transport)
	for _, r := range s.routes(addrs) {
		var conns []net.Conn
		var up *flag
		if conns, up, err = s.connectAll(r); err == nil {
			s.run(conns, up)
			return
		}
	}
	s.fail(err)
}

// connectAll opens the session's connections on one route. On failure it closes all of them.
func (s *writerSession) connectAll(r route) (conns []net.Conn, up *flag, err error) {
	ctx, cancel := context.WithTimeout(s.w.ctx, s.w.o.DialTimeout)
	defer cancel()
	s.id, s.kind = random64(), r.kind
	defer func() {
		if err != nil {
			closeAll(conns)
			up.close()
			err = errors.Join(err, s.rdma.close())
			conns, up, s.rdma = nil, nil, nil
		}
	}()
	nData := s.w.o.Connections
	if s.kind == fabricConn {
		nData = 1
	}
	for i := range 1 + nData {
		kind := s.kind
		if i == 0 {
			kind = controlConn
		}
		c, err := s.connect(ctx, r.addr, kind)
		if err != nil {
			return conns, up, err
		}
		conns = append(conns, c)
		if kind == fabricConn {
			if s.rdma, err = s.meet(ctx, c); err != nil {
				return conns, up, err
			}
		}
		if i == 0 && s.kind == sharedConn {
			if up, err = s.handOver(ctx, r.addr); err != nil {
				return conns, up, err
			}
		}
	}
	return conns, up, nil
}

// connect opens one connection and exchanges hello and welcome.
func (s *writerSession) connect(ctx context.Context, addr string, kind connKind) (net.Conn, error) {
	raw, err := s.w.o.Network.Dial(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("%w: dialing %q: %w", ErrConnection, addr, err)
	}
	conn, err := s.greet(ctx, raw, addr, kind)
	if err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}

func (s *writerSession) greet(ctx context.Context, raw net.Conn, addr string, kind connKind) (net.Conn, error) {
	o := &s.w.o
	unhook := context.AfterFunc(ctx, func() { raw.SetDeadline(time.Unix(1, 0)) })
	defer unhook()
	tune(raw, o.SocketBuffer, true)
	if err := setCongestion(raw, o.CongestionControl); err != nil {
		return nil, err
	}
	config := o.TLS
	if config != nil && config.ServerName == "" && !config.InsecureSkipVerify {
		config = config.Clone()
		if config.ServerName = s.host; !strings.HasPrefix(addr, LocalScheme) {
			config.ServerName = hostOf([]string{addr})
		}
	}
	conn, err := secure(ctx, raw, config, false)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, err)
	}
	h := hello{version: Version, kind: kind, session: s.id, epoch: s.epoch, layout: o.Layout, node: o.Node}
	if _, err := conn.Write(h.encode()); err != nil {
		return nil, fmt.Errorf("%w: greeting %q: %w", ErrConnection, addr, err)
	}
	var a welcome
	buf := make([]byte, welcomeSize)
	if _, err := io.ReadFull(conn, buf); err != nil {
		return nil, fmt.Errorf("%w: greeting %q: %w", ErrConnection, addr, err)
	}
	if err := a.decode(buf); err != nil {
		return nil, fmt.Errorf("%q: %w", addr, err)
	}
	switch a.status {
	case welcomeOK:
	case refusedVersion:
		return nil, fmt.Errorf("%w: %q speaks %d, %q speaks %d", ErrVersion, a.node, a.version, o.Node, Version)
	case refusedLayout:
		return nil, fmt.Errorf("%w: reader %q has %v, writer %q has %v", ErrLayout, a.node, a.layout, o.Node, o.Layout)
	default:
		return nil, fmt.Errorf("%w: %q: %v", ErrRefused, addr, a.status)
	}
	if !unhook() {
		return nil, fmt.Errorf("%w: greeting %q: %w", ErrTimeout, addr, ctx.Err())
	}
	return conn, nil
}

// run starts the session's loops.
func (s *writerSession) run(conns []net.Conn, up *flag) {
	s.mu.Lock()
	if s.err != nil { // closed meanwhile
		s.mu.Unlock()
		closeAll(conns)
		up.close()
		_ = s.rdma.close() // nothing was written
		return
	}
	s.conns, s.flag = conns, up
	s.idle = time.Now()
	s.mu.Unlock()
	s.w.loops.Go(func() {
		if err := pumpControl(conns[0], s.out, s.gone, PingInterval, s.w.o.PeerTimeout); err != nil {
			s.lost(err)
		}
	})
	s.w.loops.Go(func() { s.lost(s.receive(conns[0])) })
	for _, c := range conns[1:] {
		s.w.loops.Go(func() {
			send := s.send
			switch s.kind {
			case sharedConn:
				send = s.sendShared
			case fabricConn:
				send = s.sendFabric
			}
			if err := send(c); err != nil {
				s.lost(err)
			}
		})
	}
	close(s.ready)
}

// closeAll closes connections at once: TLS would first send an alert to a peer that may be gone.
func closeAll(conns []net.Conn) {
	for _, c := range conns {
		if t, ok := c.(*tls.Conn); ok {
			c = t.NetConn()
		}
		c.Close()
	}
}

func (s *writerSession) lost(err error) {
	s.fail(fmt.Errorf("%w: reader %q: %w", ErrConnection, s.node, err))
}

// fail ends the session and its pushes.
func (s *writerSession) fail(err error) { s.end(err, true) }

func (s *writerSession) end(err error, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	s.flag.close() // before any page of a push may change
	s.flag = nil
	close(s.gone)
	closeAll(s.conns)
	for _, p := range s.pushes {
		s.endLocked(p, err)
		s.dropLocked(p)
	}
	s.work.Broadcast()
	s.w.forget(s, lost)
}

// add adds a push to the session and announces it to the reader.
func (s *writerSession) add(p *Push) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if s.pushes[p.key] != nil {
		return fmt.Errorf("%w: lease %v is being pushed", ErrArguments, p.key)
	}
	if err := s.w.reserve(); err != nil {
		return err
	}
	s.pushes[p.key] = p
	s.renewLocked(p)
	p.renewal = time.AfterFunc(p.duration/3, p.autoRenew)
	return nil
}

// endLocked ends a push. The push is done once no sender reads its pages.
func (s *writerSession) endLocked(p *Push, err error) {
	if p.ended {
		return
	}
	p.ended, p.err, p.queue = true, err, nil
	p.renewal.Stop()
	s.settleLocked(p)
	if !p.settled && s.kind != dataConn && s.err == nil { // bounds how long a reader that does not acknowledge holds the pages
		p.renewal = time.AfterFunc(s.w.o.AckTimeout, func() {
			s.fail(fmt.Errorf("%w: reader %q did not acknowledge pages of a push that had ended", ErrTimeout, s.node))
		})
	}
}

// settleLocked closes p.done when p has ended and no sender reads its pages.
func (s *writerSession) settleLocked(p *Push) {
	if p.ended && p.nSending == 0 && !p.settled {
		p.settled = true
		p.renewal.Stop()
		s.w.finished(p.err)
		if s.kind == fabricConn && p.err != nil && s.err == nil {
			s.postLocked(control{kind: msgFenced, key: p.key}) // without it the reader closes the session after QuarantineTimeout
		}
		close(p.done)
	}
}

// dropLocked removes a push for which the reader sends no further message.
func (s *writerSession) dropLocked(p *Push) {
	if s.pushes[p.key] != p {
		return
	}
	delete(s.pushes, p.key)
	s.idle = time.Now()
	close(p.over)
}

// postLocked queues a control message; false: the reader does not read its messages.
func (s *writerSession) postLocked(m control) bool {
	select {
	case s.out <- m:
		return true
	default:
		return false
	}
}

func (s *writerSession) renewLocked(p *Push) {
	now := p.progress + p.nSent
	if s.postLocked(control{kind: msgRenew, key: p.key, value: now + 1}) {
		p.renewed = now
		s.w.count(func(c *WriterStats) { c.RenewalsSent++ })
	}
}

// receive handles the reader's messages until the connection ends.
func (s *writerSession) receive(conn net.Conn) error {
	buf := make([]byte, controlSize)
	for {
		conn.SetReadDeadline(time.Now().Add(s.w.o.PeerTimeout))
		m, err := readControl(conn, buf)
		if err != nil {
			return err
		}
		s.mu.Lock()
		p := s.pushes[m.key]
		switch m.kind {
		case msgDone, msgGone, msgAborted:
			if p == nil {
				break // the push has ended, and the messages crossed
			}
			switch m.kind {
			case msgDone:
				s.endLocked(p, nil)
			case msgGone:
				s.endLocked(p, fmt.Errorf("%w: lease %v at %q", goneErrors[m.code], p.key, s.node))
			}
			p.answered = true
			s.dropLocked(p)
		case msgPermit:
			switch {
			case s.kind != fabricConn:
			case p == nil || p.settled: // the push had ended, and its fence may have reached the reader too early
				s.postLocked(control{kind: msgFenced, key: m.key})
			default:
				s.permitLocked(p, m.value)
			}
		case msgPong:
			if len(s.pushes) == 0 && time.Since(s.idle) >= s.w.o.IdleTimeout {
				s.mu.Unlock()
				s.end(fmt.Errorf("%w: idle session with %q", ErrClosed, s.node), false)
				return nil
			}
		default:
			err = fmt.Errorf("%w: a reader sent a message of type %d", ErrProtocol, m.kind)
		}
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// send writes batches to one data connection until the session ends. It combines small batches that
// wait, such as the layers of a short prompt.
func (s *writerSession) send(conn net.Conn) error {
	var headers [maxBatch][frameSize]byte
	batches := make([]batch, 0, maxBatch)
	bufs := make(net.Buffers, 0, 2*maxBatch)
	for {
		batches = s.next(batches[:0])
		if len(batches) == 0 {
			return nil
		}
		bufs = bufs[:0]
		for i, b := range batches {
			s.frame(b).encode(headers[i][:])
			bufs = append(bufs, headers[i][:])
			for _, page := range b.pages {
				bufs = append(bufs, s.w.mem.page(b.region, page))
			}
		}
		conn.SetWriteDeadline(time.Now().Add(s.w.o.FrameTimeout))
		out := bufs // WriteTo consumes its receiver
		_, err := out.WriteTo(conn)
		for _, b := range batches {
			s.sent(b, err)
		}
		if err != nil {
			return err
		}
	}
}

// batch is the content of one frame.
type batch struct {
	p      *Push
	region int
	first  int     // index of pages[0] in the grant
	pages  []int32 // source pages
}

// next waits for batches and takes some in turn from the pushes that have any: at most cap(into)
// batches and maxBatch pages. It returns none if the session is dead.
func (s *writerSession) next(into []batch) []batch {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if into = s.takeLocked(into, maxBatch); len(into) > 0 || s.err != nil {
			return into
		}
		s.work.Wait()
	}
}

// takeLocked takes batches in turn from the pushes that have any: at most cap(into) batches and,
// after the first, at most most pages.
func (s *writerSession) takeLocked(into []batch, most int) []batch {
	nPages := 0
	for s.err == nil && len(s.turn) > 0 && len(into) < cap(into) {
		p := s.turn[0]
		if len(into) > 0 && len(p.queue) > 0 && nPages+min(len(p.queue[0].pages), maxBatch) > most {
			break
		}
		s.turn = append(s.turn[:0], s.turn[1:]...)
		if len(p.queue) == 0 { // the push ended while it waited
			p.waiting = false
			continue
		}
		b := p.takeLocked()
		if p.waiting = len(p.queue) > 0; p.waiting {
			s.turn = append(s.turn, p)
		}
		nPages += len(b.pages)
		into = append(into, b)
	}
	return into
}

// sent accounts for a batch whose pages are no longer read.
func (s *writerSession) sent(b batch, err error) {
	n := uint64(len(b.pages))
	if err == nil {
		s.w.count(func(c *WriterStats) {
			c.Pieces += n
			c.PayloadBytes += n * uint64(s.w.o.Layout.PageBytes)
			if s.kind == sharedConn {
				c.SharedBytes += n * uint64(s.w.o.Layout.PageBytes)
			}
			if s.kind == fabricConn {
				c.FabricBytes += n * uint64(s.w.o.Layout.PageBytes)
			}
		})
		if b.p.onSent != nil {
			b.p.onSent(b.region, b.first, len(b.pages))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil { // otherwise the pieces count as in flight until the session is dead
		b.p.nSent += n
		b.p.nInFlight -= n
	}
	b.p.nSending--
	s.settleLocked(b.p)
}

// check checks the session's conservation laws.
func (s *writerSession) check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil && len(s.pushes) > 0 {
		return fmt.Errorf("kvtransfer: dead session with %q keeps %d pushes", s.node, len(s.pushes))
	}
	nWaiting := 0
	for _, p := range s.pushes {
		if err := p.checkLocked(); err != nil {
			return err
		}
		if !p.ended && (len(p.queue) > 0 && p.permitted) != p.waiting {
			return fmt.Errorf("kvtransfer: push %v has %d batches, waiting for its turn is %t", p.key, len(p.queue), p.waiting)
		}
		if p.waiting {
			nWaiting++
		}
	}
	if nWaiting > len(s.turn) {
		return fmt.Errorf("kvtransfer: %d pushes wait for their turn, %d are listed", nWaiting, len(s.turn))
	}
	return nil
}
