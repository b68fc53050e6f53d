//go:build cgo && linux

package kvtransfer

import (
	"bytes"
	"errors"
	mrand "math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/kvtransfer/crc32c"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// fabricTransports are those over libfabric's providers that need no hardware. A machine without the library fails the tests: install it.
func fabricTransports(testing.TB) []transport {
	return []transport{
		{name: "rdma-tcp", network: TCP{}, listen: "127.0.0.1:0", fabric: "tcp"},
		{name: "rdma-shm", network: TCP{}, listen: "127.0.0.1:0", fabric: "shm"},
	}
}

// opened are the devices of this process, by provider: a reader's and a writer's.
var opened struct {
	sync.Mutex
	devices map[string][2]*fabric.Device
}

// fabricDevices opens a provider once; at the test's end nothing of it may be in use.
func fabricDevices(t testing.TB, provider string) (reader, writer *fabric.Device) {
	t.Helper()
	opened.Lock()
	defer opened.Unlock()
	d, ok := opened.devices[provider]
	for i := range d {
		if ok {
			break
		}
		o := fabric.Options{Provider: provider}
		if provider == "tcp" {
			o.Address = "127.0.0.1"
		}
		var err error
		if d[i], err = fabric.Open(o); errors.Is(err, fabric.ErrLibrary) {
			t.Skipf("needs libfabric (apt-get install libfabric1): %v", err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if !ok {
		if opened.devices == nil {
			opened.devices = make(map[string][2]*fabric.Device)
		}
		opened.devices[provider] = d
	}
	t.Cleanup(func() {
		for _, d := range d {
			if n := d.InUse(); n != 0 {
				t.Errorf("%d endpoints and registrations are left of %v", n, d.Info())
			}
		}
	})
	return d[0], d[1]
}

// wrap spoils what a session writes.
func (f *faults) wrap(e endpoint) endpoint {
	return &faultyEnd{endpoint: e, f: f, rng: mrand.New(mrand.NewPCG(f.seed, 1<<32+f.nConn.Add(1)))}
}

// faultyEnd freezes for longer than leases and quarantines last, sends bytes that are not the page's or too few of them, and repeats and reorders writes.
type faultyEnd struct {
	endpoint
	f   *faults
	mu  sync.Mutex
	rng *mrand.Rand
}

func (e *faultyEnd) Write(w []fabric.Write, token uint64, data uint32) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.f.off.Load() {
		return e.endpoint.Write(w, token, data)
	}
	switch e.rng.IntN(200) {
	case 0, 1:
		e.f.thaws.Add(1)
		time.Sleep(time.Duration(100+e.rng.IntN(250)) * time.Millisecond)
	case 2:
		e.f.flips.Add(1)
		w = append([]fabric.Write(nil), w...)
		if x := &w[e.rng.IntN(len(w))]; uintptr(x.To)%uintptr(2*x.Bytes) == 0 {
			x.From += uintptr(x.Bytes) / 2 // of the page and the next
		} else {
			x.From -= uintptr(x.Bytes) / 2
		}
	case 3:
		e.f.repeats.Add(1)
		if n, err := e.endpoint.Write(w[:1], token, data); n == 0 {
			return 0, err
		}
	case 4:
		e.f.cuts.Add(1)
		w = append([]fabric.Write(nil), w...)
		w[e.rng.IntN(len(w))].Bytes /= 2
	case 5, 6, 7, 8: // in place, so that the caller's rest is what was not started
		e.f.reorder.Add(1)
		e.rng.Shuffle(len(w), func(i, k int) { w[i], w[k] = w[k], w[i] })
	}
	return e.endpoint.Write(w, token, data)
}

// TestLateWriteWaitsInQuarantine: a lease that ends under a writer which is in the middle of writing keeps its pages until that writer's endpoint is
// destroyed, and what it writes when it runs again lands nowhere.
func TestLateWriteWaitsInQuarantine(t *testing.T) {
	for _, tr := range fabricTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			p := newPair(t, tr, small, 32, func(r *ReaderOptions, w *WriterOptions) {
				r.QuarantineTimeout, w.AckTimeout = 100*time.Millisecond, time.Minute
			})
			p.src.randomize(mrand.New(mrand.NewPCG(1, 1)))
			p.wantWorks(t, 5) // the two have met
			frozen := &frozenEnd{writing: make(chan struct{}), thaw: make(chan struct{})}
			p.writer.wrap = func(e endpoint) endpoint {
				frozen.endpoint = e
				return frozen
			}
			p.breakSessions()
			g := p.grant(t, time.Minute, 1, 2)
			push := p.open(t, g)
			p.sendAll(t, push, 1, 2)
			<-frozen.writing
			p.reader.Cancel(g.Lease)
			if s := p.reader.Stats(); s.Quarantined != 1 || s.SessionsFabric != 1 {
				t.Errorf("%d leases in quarantine, %d sessions", s.Quarantined, s.SessionsFabric)
			}
			p.wantEvent(t, g, Failed, ErrCancelled) // and released
			poison := bytes.Repeat([]byte{poison}, small.PageBytes)
			for region := range small.Regions {
				copy(p.dst.page(small, region, 1), poison)
				copy(p.dst.page(small, region, 2), poison)
			}
			close(frozen.thaw)
			<-push.Done()
			for region := range small.Regions {
				for _, page := range []int32{1, 2} {
					if !bytes.Equal(p.dst.page(small, region, page), poison) {
						t.Errorf("region %d, page %d: a late write landed", region, page)
					}
				}
			}
			p.writer.wrap = nil
			p.wantWorks(t, 1, 2)
		})
	}
}

// breakSessions has the writer dial anew.
func (p *pair) breakSessions() {
	for _, s := range p.writer.pool() {
		s.end(ErrClosed, false)
	}
}

// frozenEnd stops before its first write.
type frozenEnd struct {
	endpoint
	once          sync.Once
	writing, thaw chan struct{}
}

func (e *frozenEnd) Write(w []fabric.Write, token uint64, data uint32) (int, error) {
	e.once.Do(func() {
		close(e.writing)
		<-e.thaw
	})
	return e.endpoint.Write(w, token, data)
}

// TestEndpointThatStaysOpen: where the library cannot close the endpoint that an ended lease's writer writes through, no time gives the pages back.
func TestEndpointThatStaysOpen(t *testing.T) {
	for _, tr := range fabricTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			p := newPair(t, tr, small, 32, func(r *ReaderOptions, w *WriterOptions) {
				r.QuarantineTimeout, w.AckTimeout = 50*time.Millisecond, time.Minute
			})
			stuck, frozen := new(stuckEnd), &frozenEnd{writing: make(chan struct{}), thaw: make(chan struct{})}
			p.reader.wrap = func(e endpoint) endpoint {
				stuck.endpoint = e
				return stuck
			}
			p.writer.wrap = func(e endpoint) endpoint {
				frozen.endpoint = e
				return frozen
			}
			g := p.grant(t, time.Minute, 1, 2)
			push := p.open(t, g)
			p.sendAll(t, push, 1, 2)
			<-frozen.writing
			p.reader.Cancel(g.Lease)
			for p.reader.Stats().Connections > 0 {
				time.Sleep(time.Millisecond)
			}
			if s := p.reader.Stats(); s.Quarantined != 1 {
				t.Errorf("%d leases in quarantine, want that of the endpoint that is open", s.Quarantined)
			}
			if err := stuck.endpoint.Close(); err != nil {
				t.Error(err)
			}
			p.reader.mu.Lock()
			for k, l := range p.reader.leases {
				p.reader.fenceLocked(k, l)
			}
			p.reader.mu.Unlock()
			close(frozen.thaw)
			p.wantEvent(t, g, Failed, ErrCancelled)
			<-push.Done()
		})
	}
}

// stuckEnd is one that the library does not close.
type stuckEnd struct{ endpoint }

func (*stuckEnd) Close() error { return fabric.ErrFabric }

// TestPermitCrossesFence: a writer whose push ended before its permit came says again that it writes nothing. Its first word may have come before the
// permit was given, and without another the reader would have to close the session.
func TestPermitCrossesFence(t *testing.T) {
	for _, tr := range fabricTransports(t) {
		p := newPair(t, tr, small, 8, nil)
		d, err := decodeGrant(p.grant(t, time.Minute, 1).Wire)
		if err != nil {
			t.Fatal(err)
		}
		s := newWriterSession(p.writer, d)
		s.kind = fabricConn
		push := newPush(s, d, PushOptions{})
		if err := s.add(push); err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		s.endLocked(push, ErrAborted)
		s.mu.Unlock()
		here, there := net.Pipe()
		ended := make(chan error)
		go func() { ended <- s.receive(here) }()
		b := make([]byte, controlSize)
		(&control{kind: msgPermit, key: d.key}).encode(b)
		write(t, there, b)
		there.Close()
		<-ended
		s.fail(ErrClosed)
		close(s.out)
		fences := 0
		for m := range s.out {
			if m.kind == msgFenced && m.key == d.key {
				fences++
			}
		}
		if fences != 2 {
			t.Errorf("%s: %d fences, want one before and one behind the permit", tr.name, fences)
		}
	}
}

// TestFenceReleases: a writer that is alive says that it writes no more, and the pages come back without its session's end.
func TestFenceReleases(t *testing.T) {
	for _, tr := range fabricTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			p := newPair(t, tr, small, 32, func(r *ReaderOptions, _ *WriterOptions) { r.QuarantineTimeout = time.Minute })
			p.src.randomize(mrand.New(mrand.NewPCG(1, 1)))
			for range 20 {
				g := p.grant(t, time.Minute, 1, 2, 3)
				push := p.open(t, g)
				if err := push.Send(0, []int32{1, 2}, 0); err != nil {
					t.Fatal(err)
				}
				for push.Bytes() == 0 {
					time.Sleep(100 * time.Microsecond)
				}
				p.reader.Cancel(g.Lease)
				p.wantEvent(t, g, Failed, ErrCancelled)
				<-push.Done()
			}
			p.wantWorks(t, 1, 2, 3)
			if s := p.reader.Stats(); s.LeasesQuarantined != 20 || s.SessionsLost != 0 {
				t.Errorf("%d quarantined, %d sessions lost", s.LeasesQuarantined, s.SessionsLost)
			}
			if w := p.writer.Stats(); w.Dials != 1 {
				t.Errorf("%d sessions were dialed", w.Dials)
			}
		})
	}
}

// TestFabricViolations says what no writer says: the session ends, the pages come back, and others are served.
func TestFabricViolations(t *testing.T) {
	header := func(f frame) []byte {
		b := make([]byte, sharedSize)
		f.encode(b)
		return b
	}
	for _, tr := range fabricTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			p := newPair(t, tr, small, 32, nil)
			p.src.randomize(mrand.New(mrand.NewPCG(1, 1)))
			for name, c := range map[string]struct {
				other  bool // the frame is of a lease that was not permitted
				frame  frame
				writes int // pages, all with data
				data   uint32
				want   error // ErrProtocol
			}{
				"not permitted":    {other: true, frame: frame{count: 1, number: 0}, writes: 1},
				"far ahead":        {frame: frame{count: 1, number: fabricWindow}},
				"data far ahead":   {writes: 1, data: fabricWindow},
				"data of the past": {writes: 1, data: ^uint32(0)},
				"too many pages":   {frame: frame{count: 1, number: 0}, writes: 2},
				"a region":         {frame: frame{count: 1, number: 0, region: 2}, writes: 1},
				"an index":         {frame: frame{count: 1, number: 0, index: [maxBatch]uint32{5}}, writes: 1},
				"no header":        {writes: maxBatch + 1},
				"another page":     {frame: frame{count: 1, number: 0, crc: [maxBatch]uint32{1}}, writes: 1, want: ErrChecksum},
			} {
				p.breakSessions()
				g := p.grant(t, time.Minute, 7)
				d, err := decodeGrant(g.Wire)
				if err != nil {
					t.Fatal(err)
				}
				s := newWriterSession(p.writer, d)
				conns, _, err := s.connectAll(route{d.addrs[0], fabricConn})
				if err != nil {
					t.Fatal(err)
				}
				c.frame.key = d.key
				if c.frame.crc[0] == 0 {
					c.frame.crc[0] = crc32c.Update(0, p.src.page(small, 0, 0))
				}
				if c.want == nil {
					c.want = ErrProtocol
				}
				var stays Grant
				if c.other {
					stays = p.grant(t, time.Minute, 8)
					c.frame.key = keyOf(t, stays)
				}
				b := make([]byte, controlSize)
				(&control{kind: msgRenew, key: d.key, value: 1}).encode(b)
				write(t, conns[0], b)
				m := wantControl(t, conns[0], msgPermit, d.key)
				if c.frame.count > 0 {
					write(t, conns[1], header(c.frame))
				}
				w := fabric.Write{From: uintptr(unsafe.Pointer(&p.src[0][0])), Source: p.writer.sources[0], Bytes: small.PageBytes, To: s.rdma.targets[0].At + 7*uint64(small.PageBytes), Key: m.value}
				ended := make(chan Event, 1)
				go func() { ended <- p.log.over(g.Lease) }()
				var e Event
				for posted := 0; e.Kind == 0; {
					if posted < c.writes {
						n, _ := s.rdma.end.Write([]fabric.Write{w}, 0, c.data) // it ends some time
						posted += n
					}
					_, _ = s.rdma.end.Poll(make([]fabric.Event, 8), 1)
					select {
					case e = <-ended:
					case <-time.After(100 * time.Microsecond):
					}
				}
				if c.other && !p.reader.Cancel(stays.Lease) {
					t.Errorf("%s: the other lease has ended", name)
				}
				if e.Kind != Failed || !errors.Is(e.Err, c.want) {
					t.Errorf("%s: %v (%v)", name, e.Kind, e.Err)
				}
				closeAll(conns)
				if err := s.rdma.close(); err != nil {
					t.Error(err)
				}
			}
			p.wantWorks(t, 7)
		})
	}
}

// TestRDMAFallsBackToTCP: where one end has no fabric, or another, pages travel over TCP.
func TestRDMAFallsBackToTCP(t *testing.T) {
	tr := transport{name: "rdma", network: TCP{}, listen: "127.0.0.1:0"}
	one, two := fabricDevices(t, "tcp")
	other, _ := fabricDevices(t, "shm")
	for name, c := range map[string]struct {
		reader, writer *fabric.Device
		mode           Transport // the writer's
		want           bool
	}{
		"both":              {one, two, OverRDMA, true},
		"not the reader":    {nil, two, OverRDMA, false},
		"not the writer":    {one, nil, OverRDMA, false},
		"different ones":    {one, other, OverRDMA, false},
		"the writer's auto": {one, two, Auto, false},
		"the writer's tcp":  {one, two, OverTCP, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, tr, small, 8, func(r *ReaderOptions, w *WriterOptions) {
				r.Transport, r.Fabric, w.Transport, w.Fabric = OverRDMA, c.reader, c.mode, c.writer
			})
			p.wantWorks(t, 1, 2)
			if s := p.writer.Stats(); (s.FabricBytes > 0) != c.want || s.PayloadBytes == 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestFabricUnderTLS: the connections beside prove who is who, and a stranger is told neither endpoint nor key.
func TestFabricUnderTLS(t *testing.T) {
	for _, tr := range fabricTransports(t) {
		tr.server, tr.client = testTLS(t)
		_, d := fabricDevices(t, tr.fabric)
		p := newPair(t, tr, small, 8, nil)
		p.wantWorks(t, 3, 1, 2)
		if p.writer.Stats().FabricBytes == 0 {
			t.Error("the pages went over TCP")
		}
		other, _ := testTLS(t)
		other.RootCAs = tr.client.RootCAs
		stranger, err := NewWriter(WriterOptions{Layout: small, Memory: p.src, Fabric: d, Transport: OverRDMA, TLS: other})
		if err != nil {
			t.Fatal(err)
		}
		if push, err := stranger.Open(t.Context(), p.grant(t, time.Minute, 1).Wire, PushOptions{}); err == nil {
			if err = push.Wait(t.Context()); err == nil {
				t.Error("a stranger's certificate was taken")
			}
		}
		if s := p.reader.Stats(); s.SessionsFabric != 1 {
			t.Errorf("%d sessions write by themselves", s.SessionsFabric)
		}
		if err := stranger.Close(); err != nil {
			t.Error(err)
		}
	}
}
