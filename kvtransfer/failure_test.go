package kvtransfer

import (
	"bytes"
	"context"
	"errors"
	mrand "math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var small = Layout{Regions: 2, PageBytes: 4096, Hash: 0xabc}

// eachTransport runs f over every transport with a pair whose source is random.
func eachTransport(t *testing.T, change func(*ReaderOptions, *WriterOptions), f func(t *testing.T, tr transport, p *pair)) {
	each(t, allTransports(t), change, f)
}

// eachConnected leaves out those over libfabric.
func eachConnected(t *testing.T, change func(*ReaderOptions, *WriterOptions), f func(t *testing.T, tr transport, p *pair)) {
	each(t, transports(t), change, f)
}

func each(t *testing.T, all []transport, change func(*ReaderOptions, *WriterOptions), f func(t *testing.T, tr transport, p *pair)) {
	for _, tr := range all {
		t.Run(tr.name, func(t *testing.T) {
			p := newPair(t, tr, small, 32, change)
			p.src.randomize(mrand.New(mrand.NewPCG(1, 1)))
			f(t, tr, p)
		})
	}
}

// wantEvent waits for a lease's end.
func (p *pair) wantEvent(t *testing.T, g Grant, kind EventKind, err error) {
	t.Helper()
	if e := p.log.over(g.Lease); e.Kind != kind || !errors.Is(e.Err, err) {
		t.Fatalf("lease %x: %v (%v), want %v (%v)", g.Lease, e.Kind, e.Err, kind, err)
	}
	if err := p.reader.Check(); err != nil {
		t.Fatal(err)
	}
}

// wantWorks proves that pages, grantable again, still receive.
func (p *pair) wantWorks(t *testing.T, pages ...int32) {
	t.Helper()
	g := p.grant(t, time.Minute, pages...)
	push := p.open(t, g)
	p.sendAll(t, push, pages...)
	if err := push.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.wantEvent(t, g, Arrived, nil)
	for region := range p.layout.Regions {
		for _, page := range pages {
			if !bytes.Equal(p.dst.page(p.layout, region, page), p.src.page(p.layout, region, page)) {
				t.Fatalf("region %d, page %d: wrong bytes", region, page)
			}
		}
	}
}

func TestCancelReachesBothEnds(t *testing.T) {
	eachTransport(t, nil, func(t *testing.T, _ transport, p *pair) {
		g := p.grant(t, time.Minute, 1, 2, 3)
		push := p.open(t, g)
		if err := push.Send(0, []int32{1, 2, 3}, 0); err != nil {
			t.Fatal(err)
		}
		for p.reader.Stats().Pieces < 3 {
			time.Sleep(time.Millisecond)
		}
		if _, err := p.reader.Grant(GrantRequest{Pages: []int32{3}, Duration: time.Minute}); !errors.Is(err, ErrArguments) {
			t.Fatalf("a page under a lease was granted: %v", err)
		}
		if !p.reader.Cancel(g.Lease) || p.reader.Cancel(g.Lease) {
			t.Fatal("Cancel must end a lease once")
		}
		p.wantEvent(t, g, Failed, ErrCancelled)
		if err := push.Wait(t.Context()); !errors.Is(err, ErrCancelled) {
			t.Fatalf("the writer got %v", err)
		}
		if err := push.Send(1, []int32{1}, 0); !errors.Is(err, ErrCancelled) {
			t.Fatalf("sending on: %v", err)
		}
		p.wantWorks(t, 1, 2, 3)
		if p.reader.Cancel(g.Lease) {
			t.Fatal("an old lease was cancelled")
		}
	})
}

func TestAbortIsAcknowledged(t *testing.T) {
	eachTransport(t, nil, func(t *testing.T, _ transport, p *pair) {
		g := p.grant(t, time.Minute, 4, 5)
		push := p.open(t, g)
		if err := push.Send(1, []int32{5}, 1); err != nil {
			t.Fatal(err)
		}
		if err := push.Abort(errors.New("prefill was preempted")); err != nil {
			t.Fatal(err)
		}
		p.wantEvent(t, g, Failed, ErrAborted)
		if e := p.log.over(g.Lease); !strings.Contains(e.Err.Error(), "prefill was preempted") {
			t.Errorf("the reason was lost: %v", e.Err)
		}
		if err := push.Wait(t.Context()); !errors.Is(err, ErrAborted) {
			t.Errorf("waiting after an abort: %v", err)
		}
		if err := push.Abort(nil); err != nil {
			t.Errorf("aborting twice: %v", err)
		}
		p.wantWorks(t, 4, 5)

		g = p.grant(t, time.Minute, 4, 5)
		push = p.open(t, g)
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("client gone")
		cancel(cause)
		if err := push.Wait(ctx); !errors.Is(err, cause) || !errors.Is(err, ErrAborted) {
			t.Errorf("waiting with an ended context: %v", err)
		}
		p.wantEvent(t, g, Failed, ErrAborted)
	})
}

func TestCloseFailsTheOtherEnd(t *testing.T) {
	eachTransport(t, nil, func(t *testing.T, _ transport, p *pair) {
		g := p.grant(t, time.Minute, 1)
		push := p.open(t, g)
		for p.reader.Stats().Sessions == 0 {
			time.Sleep(time.Millisecond)
		}
		if err := push.Send(0, []int32{1}, 0); err != nil {
			t.Fatal(err)
		}
		for p.reader.Stats().Pieces == 0 {
			time.Sleep(time.Millisecond)
		}
		p.writer.Close()
		p.wantEvent(t, g, Failed, ErrConnection)
		if err := push.Wait(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("push of a closed writer: %v", err)
		}
		if _, err := p.writer.Open(t.Context(), g.Wire, PushOptions{}); !errors.Is(err, ErrClosed) {
			t.Errorf("opening on a closed writer: %v", err)
		}
	})
	eachTransport(t, nil, func(t *testing.T, _ transport, p *pair) {
		g := p.grant(t, time.Minute, 1)
		push := p.open(t, g)
		p.reader.Close()
		p.wantEvent(t, g, Failed, ErrClosed)
		if err := push.Wait(t.Context()); !errors.Is(err, ErrConnection) && !errors.Is(err, ErrClosed) {
			t.Errorf("push to a closed reader: %v", err)
		}
		if _, err := p.reader.Grant(GrantRequest{Pages: []int32{1}, Duration: 1}); !errors.Is(err, ErrClosed) {
			t.Errorf("granting on a closed reader: %v", err)
		}
		if _, err := p.writer.Open(t.Context(), g.Wire, PushOptions{}); !errors.Is(err, ErrConnection) && !errors.Is(err, ErrClosed) {
			t.Errorf("opening to a closed reader: %v", err)
		}
	})
}

// TestSendChecksItsArguments says what no grant allows; nothing of it may be queued.
func TestSendChecksItsArguments(t *testing.T) {
	eachTransport(t, nil, func(t *testing.T, _ transport, p *pair) {
		g := p.grant(t, time.Minute, 3, 4)
		push := p.open(t, g)
		for _, bad := range []struct {
			region int
			pages  []int32
			first  int
		}{{-1, []int32{0}, 0}, {2, []int32{0}, 0}, {0, []int32{0}, -1}, {0, []int32{0}, 2}, {0, []int32{0, 1, 2}, 0}, {0, []int32{32}, 0}, {0, []int32{-1}, 0}, {0, []int32{1, 2}, 1}} {
			if err := push.Send(bad.region, bad.pages, bad.first); !errors.Is(err, ErrArguments) {
				t.Errorf("sending %+v: %v", bad, err)
			}
		}
		if err := push.Send(0, nil, 2); err != nil {
			t.Errorf("sending nothing: %v", err)
		}
		if _, err := p.writer.Open(t.Context(), g.Wire, PushOptions{}); !errors.Is(err, ErrArguments) {
			t.Errorf("opening a grant twice: %v", err)
		}
		p.sendAll(t, push, 3, 4)
		if err := push.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.wantEvent(t, g, Arrived, nil)
		if err := push.Send(0, []int32{3}, 0); !errors.Is(err, ErrArguments) {
			t.Errorf("sending after the end: %v", err)
		}
	})
}

// TestDeadPooledSession proves that a session found dead costs the next push a dial, not a failure.
func TestDeadPooledSession(t *testing.T) {
	eachTransport(t, nil, func(t *testing.T, _ transport, p *pair) {
		p.wantWorks(t, 1)
		p.reader.mu.Lock()
		for _, s := range p.reader.sessions {
			p.reader.closeSessionLocked(s, ErrConnection)
		}
		p.reader.mu.Unlock()
		for p.writer.Stats().Sessions != 0 {
			time.Sleep(time.Millisecond)
		}
		p.wantWorks(t, 1)
		if n := p.writer.Stats().Dials; n != 2 {
			t.Errorf("%d dials, want 2", n)
		}
	})
}

func TestRefusals(t *testing.T) {
	eachTransport(t, func(r *ReaderOptions, w *WriterOptions) { r.MaxLeases, w.MaxPushes = 2, 1 }, func(t *testing.T, tr transport, p *pair) {
		g := p.grant(t, time.Minute, 1)
		other := p.layout
		other.Hash++
		wo := WriterOptions{Node: "prefill-9", Layout: other, Memory: newMemory(other, 1), Network: tr.network, TLS: tr.client}
		if tr.shared {
			wo.Memory, wo.Shared = sharedMemory(t, other, 1)
		}
		w, err := NewWriter(wo)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		_, err = w.Open(t.Context(), g.Wire, PushOptions{})
		if !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), p.layout.String()) || !strings.Contains(err.Error(), other.String()) {
			t.Errorf("layouts that differ: %v", err)
		}
		// A grant that lies about the layout is refused by the handshake.
		lie, err := decodeGrant(g.Wire)
		if err != nil {
			t.Fatal(err)
		}
		lie.layout = other
		if _, err = w.Open(t.Context(), lie.encode(), PushOptions{}); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), p.layout.String()) {
			t.Errorf("layouts that differ behind a grant: %v", err)
		}
		lie.layout = p.layout
		lie.key.Epoch++
		if _, err = p.writer.Open(t.Context(), lie.encode(), PushOptions{}); !errors.Is(err, ErrRefused) {
			t.Errorf("grant of another epoch: %v", err)
		}
		lie.key.Epoch--
		lie.tls = !lie.tls
		if _, err = p.writer.Open(t.Context(), lie.encode(), PushOptions{}); !errors.Is(err, ErrArguments) {
			t.Errorf("TLS at one end: %v", err)
		}
		lie.tls = !lie.tls
		lie.key.Gen++
		push, err := p.writer.Open(t.Context(), lie.encode(), PushOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.writer.Open(t.Context(), g.Wire, PushOptions{}); push.Err() == nil && !errors.Is(err, ErrBusy) {
			t.Errorf("a push too many: %v", err)
		}
		if err := push.Wait(t.Context()); !errors.Is(err, ErrUnknown) {
			t.Errorf("push under a lease that is not: %v", err)
		}
		p.grant(t, time.Minute, 2)
		if _, err := p.reader.Grant(GrantRequest{Pages: []int32{3}, Duration: time.Minute}); !errors.Is(err, ErrBusy) {
			t.Errorf("a lease too many: %v", err)
		}
		for _, bad := range []GrantRequest{{Duration: time.Minute}, {Pages: []int32{32}, Duration: time.Minute}, {Pages: []int32{-1}, Duration: 1}, {Pages: []int32{5}}} {
			if _, err := p.reader.Grant(bad); !errors.Is(err, ErrArguments) && !errors.Is(err, ErrBusy) {
				t.Errorf("granting %+v: %v", bad, err)
			}
		}
	})
}

// synced runs f with a pair over Mem in virtual time.
func synced(t *testing.T, change func(*ReaderOptions, *WriterOptions), f func(t *testing.T, p *pair)) {
	synctest.Test(t, func(t *testing.T) {
		tr := transport{name: "mem", network: NewMem(), listen: "reader"}
		p := newPair(t, tr, small, 32, change)
		p.src.randomize(mrand.New(mrand.NewPCG(1, 1)))
		f(t, p)
	})
}

// TestSlownessLivesSilenceDoesNot keeps a lease by progress far beyond its duration, then falls silent.
func TestSlownessLivesSilenceDoesNot(t *testing.T) {
	synced(t, nil, func(t *testing.T, p *pair) {
		g := p.grant(t, 3*time.Second, 1, 2)
		push := p.open(t, g)
		for i := range 60 {
			push.Renew(uint64(i + 1))
			time.Sleep(time.Second)
		}
		if err := push.Err(); err != nil {
			t.Fatalf("a slow push ended: %v", err)
		}
		for region := range 2 {
			for i := range 2 { // pages are progress too
				if err := push.Send(region, []int32{int32(i)}, i); err != nil {
					t.Fatal(err)
				}
				if region+i < 2 {
					time.Sleep(2 * time.Second)
				}
			}
		}
		if err := push.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.wantEvent(t, g, Arrived, nil)

		start := time.Now()
		g = p.grant(t, 3*time.Second, 1, 2)
		push = p.open(t, g)
		push.Renew(1)
		before := p.writer.Stats().RenewalsSent
		if err := push.Wait(t.Context()); !errors.Is(err, ErrExpired) {
			t.Fatalf("a silent push: %v", err)
		}
		if n := p.writer.Stats().RenewalsSent - before; n != 1 {
			t.Errorf("a push that made progress once renewed %d times", n)
		}
		p.wantEvent(t, g, Failed, ErrExpired)
		if d := time.Since(start); d < 3*time.Second || d > 6*time.Second {
			t.Errorf("it expired after %v", d)
		}
		g = p.grant(t, time.Second, 1) // nobody opens it
		p.wantEvent(t, g, Failed, ErrExpired)
		if s := p.reader.Stats(); s.LeasesExpired != 2 {
			t.Errorf("%+v", s)
		}
	})
}

// hushed is a network whose connections can be told to swallow all that is written: a peer that is gone without a word.
type hushed struct {
	Network
	hush chan struct{} // closed: from now on
}

type hushedConn struct {
	net.Conn
	hush chan struct{}
}

func (h hushed) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := h.Network.Dial(ctx, addr)
	return hushedConn{c, h.hush}, err
}

func (c hushedConn) Write(b []byte) (int, error) {
	select {
	case <-c.hush:
		return len(b), nil
	default:
		return c.Conn.Write(b)
	}
}

// TestHalfOpenPeer cuts the line without a word: both ends must learn it within PeerTimeout, and an abort within AckTimeout.
func TestHalfOpenPeer(t *testing.T) {
	for _, abort := range []bool{false, true} {
		hush := make(chan struct{})
		synced(t, func(_ *ReaderOptions, w *WriterOptions) { w.Network = hushed{w.Network, hush} }, func(t *testing.T, p *pair) {
			g := p.grant(t, time.Hour, 1)
			push := p.open(t, g)
			synctest.Wait()
			close(hush)
			start := time.Now()
			bound := 10 * time.Second
			if abort {
				bound = 5 * time.Second
				if err := push.Abort(nil); !errors.Is(err, ErrTimeout) {
					t.Errorf("an abort nobody heard: %v", err)
				}
				if p.writer.Stats().AbortsUnacked != 1 {
					t.Errorf("%+v", p.writer.Stats())
				}
			} else if err := push.Wait(t.Context()); !errors.Is(err, ErrConnection) {
				t.Errorf("the writer got %v", err)
			}
			p.wantEvent(t, g, Failed, ErrConnection)
			if d := time.Since(start); d > bound {
				t.Errorf("it took %v, want at most %v", d, bound)
			}
		})
	}
}

func TestIdleSessionsClose(t *testing.T) {
	synced(t, func(_ *ReaderOptions, w *WriterOptions) { w.IdleTimeout = time.Minute }, func(t *testing.T, p *pair) {
		p.wantWorks(t, 1)
		time.Sleep(50 * time.Second)
		if p.writer.Stats().Sessions != 1 {
			t.Error("the session did not stay")
		}
		p.wantWorks(t, 1)
		time.Sleep(70 * time.Second)
		w, r := p.writer.Stats(), p.reader.Stats()
		if w.Sessions != 0 || r.Sessions != 0 || r.Connections != 0 || w.SessionsLost != 0 || r.SessionsLost != 0 || w.Dials != 1 {
			t.Errorf("writer %+v, reader %+v", w, r)
		}
		p.wantWorks(t, 1)
	})
}
