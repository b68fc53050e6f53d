package kvtransfer

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// ReaderOptions configure a Reader. A zero bound is replaced by its default, which its comment
// gives.
type ReaderOptions struct {
	Node      string         // this node's name in messages
	Layout    Layout         // must equal each writer's
	Memory    Memory         // pages land here
	OnEvent   func(Event)    // called from one goroutine, in order, with no lock held; it must not block for long nor call Close
	Network   Network        // nil: TCP
	Listen    string         // address to listen on
	Advertise []string       // addresses that writers dial; none: the listener's own
	Transport Transport      // Auto: also copies from the memory of writers on this host
	TLS       *tls.Config    // nil: plain; it should require client certificates
	Fabric    *fabric.Device // lets writers write to Memory, unencrypted even with TLS; nil: no RDMA. It outlives the Reader
	Device    DeviceMemory   // GPU memory of Memory: RDMA writes there, and the owner compares Event.Digests; nil: host memory
	Unchecked bool           // accept frames without checksums: to measure their cost, not for production

	MaxLeases         int           // 1024: more than decode nodes run requests; beyond, Grant returns ErrBusy
	MaxSessions       int           // 256 writers at a time: a prefill node each
	MaxHandshakes     int           // 64 connections that have not sent a hello yet; more are closed unread
	HandshakeTimeout  time.Duration // 5 s for TLS and hello: a round trip or two
	PeerTimeout       time.Duration // 10 s of silence, or of not reading, on a control connection: five pings
	FrameTimeout      time.Duration // 30 s for the pages behind one header: 0.5 MiB at 140 kbit/s
	QuarantineTimeout time.Duration // 1 s that an ended lease waits for a read before its session is closed
	SocketBuffer      int           // 4 MiB receive buffer (4–15 % faster than the kernel's sizing); <0: the kernel's sizing
}

func (o *ReaderOptions) setDefaults() {
	if o.Network == nil {
		o.Network = TCP{}
	}
	if o.Transport == "" {
		o.Transport = Auto
	}
	setDefault(&o.MaxLeases, 1024)
	setDefault(&o.MaxSessions, 256)
	setDefault(&o.MaxHandshakes, 64)
	setDefault(&o.HandshakeTimeout, 5*time.Second)
	setDefault(&o.PeerTimeout, 10*time.Second)
	setDefault(&o.FrameTimeout, 30*time.Second)
	setDefault(&o.QuarantineTimeout, time.Second)
	setDefault(&o.SocketBuffer, 4<<20)
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// MaxConnections bounds the data connections of one session, whatever the writer requests.
const MaxConnections = 16

// LeaseID identifies a lease of one Reader. It is never reused.
type LeaseID uint64

func idOf(k lease.Key) LeaseID { return LeaseID(uint64(k.Gen)<<32 | uint64(k.Slot)) }

// GrantRequest asks for a lease.
type GrantRequest struct {
	// Pages are the destination: position i of every region lands in Pages[i]. The owner must not
	// touch them until Arrived or Released. len(Pages) × Layout.Regions pieces of Layout.PageBytes
	// are expected.
	Pages []int32
	// Runs are the Pages, in order, that exist in fewer regions than Layout has; none: all exist in
	// all regions. Then fewer pieces are expected.
	Runs []Run
	// Duration is the time without landed pages or reported progress after which the lease expires.
	Duration time.Duration
}

// Grant is a lease, and the bytes with which a writer uses it.
type Grant struct {
	Lease LeaseID
	Wire  []byte // for Writer.Open; its holder may write the pages
}

// EventKind is the kind of an Event.
type EventKind uint8

const (
	Arrived  EventKind = 1 + iota // every piece landed and matched; the pages are the owner's
	Failed                        // the lease will never arrive, see Err; the pages may still be written
	Released                      // after Failed: nothing can land any more; the pages are the owner's
)

func (k EventKind) String() string { return [...]string{"", "arrived", "failed", "released"}[k] }

// Event reports a lease's end: Arrived alone, or Failed and later Released, each exactly once.
type Event struct {
	Kind  EventKind
	Lease LeaseID
	// FirstByte and LastByte are, for Arrived, the times from the grant to the first frame and to
	// the last piece that landed and matched.
	FirstByte, LastByte time.Duration
	// Digests are, for Arrived, the expected checksums of pages that have landed in Device; none:
	// the pages are in Memory, and match.
	Digests []Digest
	// Mismatch counts a checksum failure. The owner calls it for a page that differs from its
	// Digest; nil without Digests.
	Mismatch func()
	Err      error // Failed: ErrExpired, ErrCancelled, ErrAborted, ErrChecksum, ErrConnection, ErrTimeout or ErrClosed
}

// Reader receives pages into registered memory.
type Reader struct {
	o     ReaderOptions
	mem   *regions
	epoch uint64
	start time.Time // of the lease clock
	ln    net.Listener
	local *localListeners         // nil: no shared memory
	rdma  *readerFabric           // nil: no RDMA
	wrap  func(endpoint) endpoint // tests: faults
	wake  chan struct{}           // the expiry loop has an earlier deadline
	done  chan struct{}           // closed by Close
	conns sync.WaitGroup
	loops sync.WaitGroup

	mu       sync.Mutex
	table    *lease.Table
	leases   map[lease.Key]*leaseInfo // granted, and their end not yet reported to the owner
	sessions map[uint64]*readerSession
	open     map[net.Conn]struct{} // every connection, so that Close can close it
	nHello   int                   // connections of open without a hello
	events   []Event               // not yet reported; at most two per lease slot
	changed  *sync.Cond            // events or drained changed
	drained  bool                  // no further events
	closed   bool
	stats    ReaderStats
}

// leaseInfo holds the state of a lease that is not in the lease table.
type leaseInfo struct {
	session   *readerSession // bound writer, or nil
	ackAbort  bool           // the session waits for msgAborted
	fenced    bool           // msgFenced has been received
	permitted bool           // msgPermit has been sent
	key       *fabric.Key    // RDMA key of the lease; nil: the session's, or none
	granted   time.Duration  // by the lease clock
	first     time.Duration  // when its first frame arrived; 0: none has
	digests   []Digest       // of pages that landed in the device
}

// NewReader listens and registers memory.
func NewReader(o ReaderOptions) (*Reader, error) {
	o.setDefaults()
	mem, err := register(o.Layout, o.Memory)
	if err != nil {
		return nil, err
	}
	if err := checkPeerTimeout(o.PeerTimeout); err != nil {
		return nil, err
	}
	if o.Device != nil && o.Unchecked {
		return nil, fmt.Errorf("%w: pages in a device without checksums", ErrArguments)
	}
	if o.OnEvent == nil || len(o.Node) > maxName {
		return nil, fmt.Errorf("%w: OnEvent is needed, and a node name of at most %d bytes", ErrArguments, maxName)
	}
	ln, err := o.Network.Listen(o.Listen)
	if err != nil {
		return nil, fmt.Errorf("kvtransfer: listening on %q: %w", o.Listen, err)
	}
	if len(o.Advertise) == 0 {
		o.Advertise = []string{ln.Addr().String()}
	}
	if most := maxGrantAddrs - 1; len(o.Advertise) > most { // one is for the unix socket
		ln.Close()
		return nil, fmt.Errorf("%w: %d addresses to advertise, want at most %d", ErrArguments, len(o.Advertise), most)
	}
	r := &Reader{
		o: o, mem: mem, epoch: random64(), start: time.Now(), ln: ln,
		wake: make(chan struct{}, 1), done: make(chan struct{}),
		leases: make(map[lease.Key]*leaseInfo), sessions: make(map[uint64]*readerSession), open: make(map[net.Conn]struct{}),
	}
	r.changed = sync.NewCond(&r.mu)
	r.table = lease.New(lease.Options{
		Epoch: r.epoch, Regions: o.Layout.Regions, Pages: mem.nPages, MaxLeases: o.MaxLeases, Quarantine: o.QuarantineTimeout,
	})
	if err := r.listenLocal(); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	if r.rdma, err = newReaderFabric(&r.o, mem); err != nil {
		return nil, errors.Join(err, ln.Close(), r.local.close())
	}
	r.loops.Go(func() { r.acceptLoop(ln, r.serve) })
	r.loops.Go(r.expireLoop)
	r.loops.Go(r.notifyLoop)
	return r, nil
}

// checkPeerTimeout rejects a timeout that a healthy peer would exceed.
func checkPeerTimeout(d time.Duration) error {
	if d < 2*PingInterval {
		return fmt.Errorf("%w: PeerTimeout %v, want at least two pings, %v", ErrArguments, d, 2*PingInterval)
	}
	return nil
}

// random64 returns a random number other than 0, unique across processes.
func random64() uint64 {
	var b [8]byte
	for {
		rand.Read(b[:])
		if v := le.Uint64(b[:]); v != 0 {
			return v
		}
	}
}

func (r *Reader) now() time.Duration { return time.Since(r.start) }

// Addr returns the listener's address.
func (r *Reader) Addr() net.Addr { return r.ln.Addr() }

// Grant leases pages to the writer that presents the returned bytes.
func (r *Reader) Grant(req GrantRequest) (Grant, error) {
	if len(req.Pages) > MaxGrantPages {
		return Grant{}, fmt.Errorf("%w: %d pages in a grant, want at most %d", ErrArguments, len(req.Pages), MaxGrantPages)
	}
	if len(req.Runs) > maxRuns {
		return Grant{}, fmt.Errorf("%w: %d runs in a grant, want at most %d", ErrArguments, len(req.Runs), maxRuns)
	}
	pages, runs := append([]int32(nil), req.Pages...), append([]Run(nil), req.Runs...)
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return Grant{}, fmt.Errorf("%w: reader %q", ErrClosed, r.o.Node)
	}
	now := r.now()
	key, err := r.table.Grant(now, pages, req.Duration, runs...)
	if err == nil {
		r.leases[key] = &leaseInfo{granted: now}
	}
	r.mu.Unlock()
	switch {
	case errors.Is(err, lease.ErrFull):
		return Grant{}, fmt.Errorf("%w: %w", ErrBusy, err)
	case err != nil:
		return Grant{}, fmt.Errorf("%w: %w", ErrArguments, err)
	}
	signal(r.wake)
	g := grant{
		key: key, layout: r.o.Layout, duration: req.Duration, tls: r.o.TLS != nil, loose: r.o.Unchecked,
		node: r.o.Node, addrs: r.addrs(), pages: pages, runs: runs, fabric: r.rdma != nil,
	}
	return Grant{Lease: idOf(key), Wire: g.encode()}, nil
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Cancel ends a lease: Failed with ErrCancelled and Released follow, and the writer is notified. It
// returns false if the lease had already ended; then its own events follow or have been reported.
func (r *Reader) Cancel(id LeaseID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := lease.Key{Epoch: r.epoch, Slot: uint32(id), Gen: uint32(id >> 32)}
	return r.endLocked(k, goneCancelled, ErrCancelled)
}

// Close ends every lease with ErrClosed, closes every connection, and returns when OnEvent has
// returned for the last event.
func (r *Reader) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		r.loops.Wait()
		return nil
	}
	r.closed = true
	close(r.done)
	for k := range r.leases {
		r.endLocked(k, goneClosed, ErrClosed)
	}
	for _, s := range r.sessions {
		r.closeSessionLocked(s, ErrClosed)
	}
	open := make([]net.Conn, 0, len(r.open))
	for c := range r.open {
		open = append(open, c)
	}
	r.mu.Unlock()
	closeAll(open) // not under r.mu, see closeSessionLocked
	err := errors.Join(r.ln.Close(), r.local.close())
	r.conns.Wait()
	r.mu.Lock()
	r.drained = true
	r.changed.Broadcast()
	r.mu.Unlock()
	r.loops.Wait()
	return errors.Join(err, r.rdma.close())
}

// Stats returns the counters.
func (r *Reader) Stats() ReaderStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, c := r.stats, r.table.Counts()
	s.StaleFrames, s.StalePieces, s.DuplicatePieces = c.StaleFrames, c.StalePieces, s.DuplicatePieces+c.DuplicatePieces
	s.LeasesGranted, s.LeasesArrived, s.LeasesFailed = c.Granted, c.Completed, c.Ended
	s.LeasesExpired, s.LeasesQuarantined = c.Expired, c.Quarantines
	s.Granted, s.Arriving, s.Quarantined = c.ByState[lease.Granted], c.ByState[lease.Arriving], c.ByState[lease.Quarantined]
	s.Connections, s.Sessions = len(r.open), len(r.sessions)
	for _, x := range r.sessions {
		if x.shared != nil {
			s.SessionsShared++
		}
		if x.fabric != nil {
			s.SessionsFabric++
		}
	}
	return s
}

// Check checks the conservation laws of leases, sessions and connections.
func (r *Reader) Check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.table.Check(); err != nil {
		return err
	}
	nConns := r.nHello
	for id, s := range r.sessions {
		if s.closed || s.id != id {
			return fmt.Errorf("kvtransfer: session %016x is listed but closed", id)
		}
		nConns += len(s.conns)
	}
	if nConns > len(r.open) {
		return fmt.Errorf("kvtransfer: sessions hold %d connections but %d are open", nConns, len(r.open))
	}
	for k, l := range r.leases {
		st := r.table.State(k)
		if st == lease.Free {
			return fmt.Errorf("kvtransfer: lease %v is known but freed", k)
		}
		if (st == lease.Granted || st == lease.Arriving) && l.session != nil && l.session.closed {
			return fmt.Errorf("kvtransfer: lease %v is %v though its session is closed", k, st)
		}
	}
	return nil
}

// endLocked ends a live lease for a reason, and reports whether it was live.
func (r *Reader) endLocked(k lease.Key, code goneCode, why error) bool {
	ended, released := r.table.End(r.now(), k)
	if ended {
		r.endedLocked(k, code, why, released)
	}
	return ended
}

// endedLocked notifies the owner and the writer of a lease that the table has ended.
func (r *Reader) endedLocked(k lease.Key, code goneCode, why error, released bool) {
	r.notifyLocked(Event{Kind: Failed, Lease: idOf(k), Err: why})
	l := r.leases[k]
	if l.session != nil && !errors.Is(why, ErrAborted) {
		r.postLocked(l.session, control{kind: msgGone, code: code, key: k})
	}
	if released {
		r.releasedLocked(k)
	} else {
		signal(r.wake)
	}
}

// releasedLocked handles a lease whose pages the table has released.
func (r *Reader) releasedLocked(k lease.Key) {
	l := r.leases[k]
	r.dropKeyLocked(l)
	if l.ackAbort {
		r.postLocked(l.session, control{kind: msgAborted, key: k})
	}
	r.notifyLocked(Event{Kind: Released, Lease: idOf(k)})
}

func (r *Reader) notifyLocked(e Event) {
	r.events = append(r.events, e)
	r.changed.Broadcast()
}

// arrivedLocked notifies the owner and the writer that every piece of a lease has landed and
// matched.
func (r *Reader) arrivedLocked(s *readerSession, k lease.Key) {
	l := r.leases[k]
	r.dropKeyLocked(l)
	e := Event{Kind: Arrived, Lease: idOf(k), FirstByte: l.first - l.granted, LastByte: r.now() - l.granted, Digests: l.digests}
	if len(e.Digests) > 0 {
		e.Mismatch = r.mismatch
	}
	r.notifyLocked(e)
	r.postLocked(s, control{kind: msgDone, key: k})
}

// mismatch counts a checksum failure that the owner of a device has found.
func (r *Reader) mismatch() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stats.ChecksumFailures++
}

// notifyLoop passes events to the owner. A lease's slot can be granted again after its last event.
func (r *Reader) notifyLoop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		for len(r.events) == 0 {
			if r.drained {
				return
			}
			r.changed.Wait()
		}
		events := r.events
		r.events = nil
		r.mu.Unlock()
		for _, e := range events {
			r.o.OnEvent(e)
		}
		r.mu.Lock()
		for _, e := range events {
			if e.Kind != Failed {
				k := lease.Key{Epoch: r.epoch, Slot: uint32(e.Lease), Gen: uint32(e.Lease >> 32)}
				r.table.Free(k)
				delete(r.leases, k)
			}
		}
	}
}

// expireLoop ends silent leases, and closes sessions whose reads hold an ended lease's pages for
// too long.
func (r *Reader) expireLoop() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		r.mu.Lock()
		expired, overdue := r.table.Expire(r.now())
		for _, e := range expired {
			r.endedLocked(e.Key, goneExpired, ErrExpired, e.Released)
		}
		for _, k := range overdue {
			if l := r.leases[k]; l != nil && l.session != nil {
				r.closeSessionLocked(l.session, fmt.Errorf("%w: read of ended lease %v did not end", ErrTimeout, k))
			}
		}
		at, ok := r.table.NextDeadline()
		r.mu.Unlock()
		wait := time.Hour
		if ok {
			wait = max(at-r.now(), 0)
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-r.done:
			return
		}
	}
}

// acceptLoop accepts connections until the listener is closed.
func (r *Reader) acceptLoop(ln net.Listener, serve func(net.Conn)) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			select {
			case <-r.done:
				return
			case <-time.After(10 * time.Millisecond): // out of descriptors, or a broken listener: avoid a busy loop
				continue
			}
		}
		r.mu.Lock()
		if r.closed || r.nHello >= r.o.MaxHandshakes {
			r.stats.Refused++
			r.mu.Unlock()
			conn.Close()
			continue
		}
		r.open[conn] = struct{}{}
		r.nHello++
		r.conns.Go(func() { serve(conn) })
		r.mu.Unlock()
	}
}

// tune sets the options of a TCP connection's socket; it ignores other connections.
func tune(c net.Conn, bufferBytes int, write bool) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	// An option that the kernel refuses costs speed, not correctness, so errors are ignored.
	_ = t.SetNoDelay(true)
	if bufferBytes < 0 {
		return
	}
	if write {
		_ = setBuffer(t, sendBuffer, bufferBytes)
	} else {
		_ = setBuffer(t, receiveBuffer, bufferBytes)
	}
}

// secure wraps a connection in TLS if c is not nil.
func secure(ctx context.Context, conn net.Conn, c *tls.Config, server bool) (net.Conn, error) {
	if c == nil {
		return conn, nil
	}
	t := tls.Client(conn, c)
	if server {
		t = tls.Server(conn, c)
	}
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("kvtransfer: TLS with %v: %w", conn.RemoteAddr(), err)
	}
	return t, nil
}
