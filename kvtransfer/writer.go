package kvtransfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// WriterOptions configure a Writer. A zero bound is replaced by its default, which its comment
// gives.
type WriterOptions struct {
	Node      string         // this node's name in messages
	Layout    Layout         // must equal each reader's
	Memory    Memory         // source of pages
	Shared    *Shared        // contains all of Memory, so that readers on this host can map it; nil: not shared
	Transport Transport      // Auto: readers on this host copy from Shared
	Network   Network        // nil: TCP
	Fabric    *fabric.Device // for OverRDMA; nil: no RDMA. It outlives the Writer
	Device    DeviceMemory   // GPU memory of Memory, which Fabric reads instead; nil: host memory
	Unchecked bool           // omit checksums if the reader accepts that
	TLS       *tls.Config    // for readers that require TLS; an empty ServerName means the dialed host

	// CongestionControl is TCP's, by the kernel's name; empty: the kernel's default. On long links
	// with packet loss, bbr is eighty times as fast as cubic (bench/results/links.md).
	CongestionControl string

	Connections  int           // 2 data connections per reader: one does not fill a fast link, four measured slower
	MaxPushes    int           // 1024 open at a time; beyond, Open returns ErrBusy
	DialAttempts int           // 2 for each Open: a reader that refuses twice is down
	DialTimeout  time.Duration // 5 s for connecting, TLS and hello at one address
	PeerTimeout  time.Duration // 10 s of silence, or of not reading, on a control connection: five pings
	FrameTimeout time.Duration // 30 s for writing one frame: 0.5 MiB at 140 kbit/s
	AckTimeout   time.Duration // 5 s for the acknowledgement of an abort; then the session is closed, which has the same effect
	IdleTimeout  time.Duration // 5 min without a push closes a session
	SocketBuffer int           // 4 MiB send buffer; <0: the kernel's sizing
}

func (o *WriterOptions) setDefaults() {
	if o.Network == nil {
		o.Network = TCP{}
	}
	if o.Transport == "" {
		o.Transport = Auto
	}
	setDefault(&o.Connections, 2)
	setDefault(&o.MaxPushes, 1024)
	setDefault(&o.DialAttempts, 2)
	setDefault(&o.DialTimeout, 5*time.Second)
	setDefault(&o.PeerTimeout, 10*time.Second)
	setDefault(&o.FrameTimeout, 30*time.Second)
	setDefault(&o.AckTimeout, 5*time.Second)
	setDefault(&o.IdleTimeout, 5*time.Minute)
	setDefault(&o.SocketBuffer, 4<<20)
}

// Writer pushes pages of registered memory to readers.
type Writer struct {
	o       WriterOptions
	mem     *regions
	loops   sync.WaitGroup
	from    []fabric.Memory         // [region] source of RDMA: Memory, or Device
	sources []*fabric.Source        // [region] registrations of from; nil: no RDMA
	wrap    func(endpoint) endpoint // tests: faults
	ctx     context.Context         // ends with Close
	stop    context.CancelFunc

	mu       sync.Mutex
	sessions map[uint64]*writerSession // by the reader's epoch
	nOpen    int                       // pushes
	closed   bool
	stats    WriterStats
}

// NewWriter registers memory. It does not connect before the first Open.
func NewWriter(o WriterOptions) (*Writer, error) {
	o.setDefaults()
	mem, err := register(o.Layout, o.Memory)
	if err != nil {
		return nil, err
	}
	if err := checkPeerTimeout(o.PeerTimeout); err != nil {
		return nil, err
	}
	if len(o.Node) > maxName || o.Connections < 1 || o.Connections > MaxConnections {
		return nil, fmt.Errorf("%w: node name of %d bytes, %d connections: want at most %d, 1..%d",
			ErrArguments, len(o.Node), o.Connections, maxName, MaxConnections)
	}
	if err := CheckCongestionControl(o.CongestionControl); err != nil {
		return nil, err
	}
	if o.Shared != nil {
		for i, b := range mem.mem {
			if _, ok := o.Shared.Place(b); !ok {
				return nil, fmt.Errorf("%w: region %d is not in the shared memory", ErrArguments, i)
			}
		}
		if err := o.Shared.seal(); err != nil {
			return nil, fmt.Errorf("kvtransfer: sealing shared memory: %w", err)
		}
	} else if o.Transport == OverShared {
		return nil, fmt.Errorf("%w: transport %s without shared memory", ErrArguments, o.Transport)
	}
	w := &Writer{o: o, mem: mem, sessions: make(map[uint64]*writerSession)}
	if err := w.openFabric(); err != nil {
		return nil, err
	}
	w.ctx, w.stop = context.WithCancel(context.Background())
	return w, nil
}

// Open starts a push under a grant. It connects to the grant's reader if there is no session. The
// reader may still refuse the lease, which ends the push later. The owner must call Wait or Abort.
func (w *Writer) Open(ctx context.Context, wire []byte, o PushOptions) (*Push, error) {
	g, err := decodeGrant(wire)
	if err != nil {
		return nil, err
	}
	if g.layout != w.o.Layout {
		return nil, fmt.Errorf("%w: reader %q has %v, writer %q has %v", ErrLayout, g.node, g.layout, w.o.Node, w.o.Layout)
	}
	if g.tls != (w.o.TLS != nil) {
		return nil, fmt.Errorf("%w: TLS at reader %q is %t, at writer %q %t", ErrArguments, g.node, g.tls, w.o.Node, w.o.TLS != nil)
	}
	for attempt := 1; ; attempt++ {
		s, fresh, err := w.session(ctx, g)
		if err == nil {
			p := newPush(s, g, o)
			if err = s.add(p); err == nil {
				return p, nil
			}
		}
		// A pooled session that has just failed does not count as an attempt.
		tried := fresh && attempt >= w.o.DialAttempts || attempt > w.o.DialAttempts
		if tried || ctx.Err() != nil || w.ctx.Err() != nil || isFinal(err) {
			return nil, fmt.Errorf("kvtransfer: opening lease %v of %q at %q: %w", g.key, g.node, g.addrs, err)
		}
		w.mu.Lock()
		w.stats.Retries++
		w.mu.Unlock()
	}
}

// isFinal reports whether another attempt to dial would fail in the same way.
func isFinal(err error) bool {
	for _, e := range []error{ErrLayout, ErrVersion, ErrRefused, ErrBusy, ErrArguments} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// session returns the session with the grant's reader, and dials it if needed. fresh reports that
// this call waited for a dial.
func (w *Writer) session(ctx context.Context, g *grant) (session *writerSession, fresh bool, err error) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil, false, fmt.Errorf("%w: writer %q", ErrClosed, w.o.Node)
	}
	s := w.sessions[g.key.Epoch]
	if s == nil {
		s = newWriterSession(w, g)
		w.sessions[s.epoch] = s
		w.stats.Dials++
		w.loops.Go(func() { s.dial(g.addrs) })
	}
	w.mu.Unlock()
	select {
	case <-s.ready:
		return s, false, nil
	default:
	}
	select {
	case <-s.ready:
		return s, true, nil
	case <-s.gone:
		return nil, true, s.why()
	case <-ctx.Done():
		return nil, true, ctx.Err()
	}
}

// forget removes a dead session from the pool.
func (w *Writer) forget(s *writerSession, lost bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sessions[s.epoch] == s {
		delete(w.sessions, s.epoch)
	}
	if lost {
		w.stats.SessionsLost++
	}
}

// Close fails open pushes with ErrClosed and closes every session. It returns when no source page
// is read any more.
func (w *Writer) Close() error {
	w.stop()
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	for _, s := range w.pool() {
		s.end(fmt.Errorf("%w: writer %q", ErrClosed, w.o.Node), false)
	}
	w.loops.Wait()
	return w.closeFabric()
}

// pool returns the current sessions.
func (w *Writer) pool() []*writerSession {
	w.mu.Lock()
	defer w.mu.Unlock()
	sessions := make([]*writerSession, 0, len(w.sessions))
	for _, s := range w.sessions {
		sessions = append(sessions, s)
	}
	return sessions
}

// Check checks the conservation laws of pushes and sessions.
func (w *Writer) Check() error {
	for _, s := range w.pool() {
		if err := s.check(); err != nil {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.stats; w.nOpen < 0 || s.PushesOpened != uint64(w.nOpen)+s.PushesDone+s.PushesFailed {
		return fmt.Errorf("kvtransfer: %d pushes opened, but %d open, %d done, %d failed", s.PushesOpened, w.nOpen, s.PushesDone, s.PushesFailed)
	}
	return nil
}

// Stats returns the counters.
func (w *Writer) Stats() WriterStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.stats
	s.Pushes, s.MaxPushes, s.Sessions = w.nOpen, w.o.MaxPushes, len(w.sessions)
	return s
}

// reserve counts a push against MaxPushes.
func (w *Writer) reserve() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.nOpen >= w.o.MaxPushes {
		return fmt.Errorf("%w: %d pushes", ErrBusy, w.nOpen)
	}
	w.nOpen++
	w.stats.PushesOpened++
	return nil
}

// finished ends a reserve.
func (w *Writer) finished(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nOpen--
	if err == nil {
		w.stats.PushesDone++
	} else {
		w.stats.PushesFailed++
	}
}

// count updates the statistics.
func (w *Writer) count(f func(*WriterStats)) {
	w.mu.Lock()
	f(&w.stats)
	w.mu.Unlock()
}
