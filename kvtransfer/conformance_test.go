package kvtransfer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a Memory of plain slices.
type memory [][]byte

func (m memory) Region(i int) []byte { return m[i] }

func newMemory(l Layout, nPages int) memory {
	m := make(memory, l.Regions)
	for i := range m {
		m[i] = make([]byte, nPages*l.PageBytes)
	}
	return m
}

// sharedMemory is memory in a file, which the test closes at its end.
func sharedMemory(t testing.TB, l Layout, nPages int) (memory, *Shared) {
	t.Helper()
	s, err := NewShared()
	if err != nil {
		t.Fatal(err)
	}
	m := make(memory, l.Regions)
	for i := range m {
		if m[i], err = s.Map(nPages * l.PageBytes); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, s
}

func (m memory) randomize(rng *mrand.Rand) {
	for _, r := range m {
		for len(r) >= 8 {
			binary.LittleEndian.PutUint64(r, rng.Uint64())
			r = r[8:]
		}
		for i := range r {
			r[i] = byte(rng.Uint32())
		}
	}
}

func (m memory) page(l Layout, region int, page int32) []byte {
	return m[region][int(page)*l.PageBytes:][:l.PageBytes]
}

// transport is one way to connect a reader and a writer.
type transport struct {
	name           string
	network        Network
	listen         string
	server, client *tls.Config
	shared         bool   // the reader copies out of the writer's memory
	fabric         string // libfabric's provider by which the writer writes to the reader's memory
}

func transports(t testing.TB) []transport {
	server, client := testTLS(t)
	return []transport{
		{name: "mem", network: NewMem(), listen: "reader"},
		{name: "tcp", network: TCP{}, listen: "127.0.0.1:0"},
		{name: "tcp+tls", network: TCP{}, listen: "127.0.0.1:0", server: server, client: client},
		{name: "shm", network: TCP{}, listen: "127.0.0.1:0", shared: true},
	}
}

// allTransports are these and those over libfabric, with whose sessions a test cannot talk frame by frame.
func allTransports(t testing.TB) []transport { return append(transports(t), fabricTransports(t)...) }

// testTLS makes a certificate that both ends show and demand.
func testTLS(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvtransfer test"},
		NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	server = &tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
	client = &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, MinVersion: tls.VersionTLS13}
	return server, client
}

// eventLog collects a reader's events and checks their order per lease.
type eventLog struct {
	mu     sync.Mutex
	change *sync.Cond
	events map[LeaseID][]Event
	broken error
}

func newEventLog() *eventLog {
	l := &eventLog{events: make(map[LeaseID][]Event)}
	l.change = sync.NewCond(&l.mu)
	return l
}

func (l *eventLog) add(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.events[e.Lease]
	ok := len(before) == 0 && (e.Kind == Arrived && e.Err == nil || e.Kind == Failed && e.Err != nil) ||
		len(before) == 1 && before[0].Kind == Failed && e.Kind == Released
	if !ok && l.broken == nil {
		l.broken = fmt.Errorf("lease %x: %v after %v", e.Lease, e, before)
	}
	l.events[e.Lease] = append(before, e)
	l.change.Broadcast()
}

// over waits until the lease's last event and returns its first.
func (l *eventLog) over(id LeaseID) Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		ev := l.events[id]
		if len(ev) > 0 && (ev[0].Kind == Arrived || len(ev) == 2) {
			return ev[0]
		}
		l.change.Wait()
	}
}

// pair is a connected reader and writer.
type pair struct {
	layout   Layout
	src, dst memory
	reader   *Reader
	writer   *Writer
	log      *eventLog
	shared   bool
	nFrames  int32 // made by frameBytes
}

func newPair(t testing.TB, tr transport, l Layout, nPages int, change func(*ReaderOptions, *WriterOptions)) *pair {
	t.Helper()
	p := &pair{layout: l, src: newMemory(l, nPages), dst: newMemory(l, nPages), log: newEventLog(), shared: tr.shared}
	ro := ReaderOptions{Node: "decode-0", Layout: l, Memory: p.dst, OnEvent: p.log.add, Network: tr.network, Listen: tr.listen, TLS: tr.server}
	wo := WriterOptions{Node: "prefill-0", Layout: l, Memory: p.src, Network: tr.network, TLS: tr.client}
	var err error
	if tr.shared {
		p.src, wo.Shared = sharedMemory(t, l, nPages)
		wo.Memory, ro.Transport, wo.Transport = p.src, OverShared, OverShared
	}
	if tr.fabric != "" {
		ro.Fabric, wo.Fabric = fabricDevices(t, tr.fabric)
		ro.Transport, wo.Transport = OverRDMA, OverRDMA
	}
	if change != nil {
		change(&ro, &wo)
	}
	if p.reader, err = NewReader(ro); err != nil {
		t.Fatal(err)
	}
	if p.writer, err = NewWriter(wo); err != nil {
		p.reader.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.writer.Close()
		p.reader.Close()
		if err := errors.Join(p.reader.Check(), p.writer.Check()); err != nil {
			t.Error(err)
		}
		if p.log.broken != nil {
			t.Error(p.log.broken)
		}
		if s := p.reader.Stats(); s.Granted+s.Arriving+s.Quarantined+s.Connections+s.Sessions != 0 {
			t.Errorf("after Close the reader holds %+v", s)
		}
		if s := p.writer.Stats(); s.Pushes+s.Sessions != 0 || s.PushesOpened != s.PushesDone+s.PushesFailed {
			t.Errorf("after Close the writer holds %+v", s)
		}
	})
	return p
}

func (p *pair) grant(t testing.TB, d time.Duration, pages ...int32) Grant {
	t.Helper()
	g, err := p.reader.Grant(GrantRequest{Pages: pages, Duration: d})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func (p *pair) open(t testing.TB, g Grant) *Push {
	t.Helper()
	push, err := p.writer.Open(t.Context(), g.Wire, PushOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return push
}

// sendAll sends pages of every region in order.
func (p *pair) sendAll(t testing.TB, push *Push, pages ...int32) {
	t.Helper()
	for region := range p.layout.Regions {
		if err := push.Send(region, pages, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPartialPages pushes pages of which some exist in the first region only.
func TestPartialPages(t *testing.T) {
	for _, tr := range allTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			p := newPair(t, tr, small, 8, nil)
			p.src.randomize(mrand.New(mrand.NewPCG(1, 2)))
			g, err := p.reader.Grant(GrantRequest{
				Pages: []int32{5, 2, 7}, Runs: []Run{{Pages: 2, Regions: 2}, {Pages: 1, Regions: 1}}, Duration: time.Minute,
			})
			if err != nil {
				t.Fatal(err)
			}
			push := p.open(t, g)
			if err := push.Send(1, []int32{0, 1, 3}, 0); !errors.Is(err, ErrArguments) {
				t.Errorf("a piece that does not exist: %v", err)
			}
			if err := errors.Join(push.Send(1, []int32{0, 1}, 0), push.Send(0, []int32{0, 1, 3}, 0), push.Wait(t.Context())); err != nil {
				t.Fatal(err)
			}
			if e := p.log.over(g.Lease); e.Kind != Arrived {
				t.Fatalf("the lease ended with %v", e)
			}
			for region, pages := range [][]int32{{5, 2, 7}, {5, 2}} {
				for i, page := range pages {
					if !bytes.Equal(p.dst.page(small, region, page), p.src.page(small, region, []int32{0, 1, 3}[i])) {
						t.Errorf("region %d, position %d differs", region, i)
					}
				}
			}
			if !bytes.Equal(p.dst.page(small, 1, 7), make([]byte, small.PageBytes)) {
				t.Error("a page was written in a region that it is not of")
			}
			if want := int64(5 * small.PageBytes); push.Bytes() != want {
				t.Errorf("%d bytes were pushed, want %d", push.Bytes(), want)
			}
		})
	}
}

// TestRandomPushes sends random pages in random pieces and orders, several pushes at a time, and compares every byte.
func TestRandomPushes(t *testing.T) {
	for _, tr := range allTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			for seed := range uint64(6) {
				t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) { randomPushes(t, tr, seed) })
			}
		})
	}
}

func randomPushes(t *testing.T, tr transport, seed uint64) {
	rng := mrand.New(mrand.NewPCG(seed, 1))
	l := Layout{Regions: 1 + rng.IntN(5), PageBytes: 1 + rng.IntN(70_000), Hash: rng.Uint64()}
	nPages := 60 + rng.IntN(60)
	p := newPair(t, tr, l, nPages, func(_ *ReaderOptions, w *WriterOptions) { w.Connections = 1 + rng.IntN(4) })
	p.src.randomize(rng)
	perm := rng.Perm(nPages)
	var wg sync.WaitGroup
	nPieces := 0
	for len(perm) > 0 {
		n := min(1+rng.IntN(40), len(perm))
		dst, src := make([]int32, n), make([]int32, n)
		for i := range n {
			dst[i], src[i] = int32(perm[i]), int32(rng.IntN(nPages))
		}
		perm = perm[n:]
		nPieces += n * l.Regions
		sub := mrand.New(mrand.NewPCG(seed, uint64(len(perm))))
		wg.Go(func() {
			if err := p.pushOnce(sub, dst, src); err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
		})
	}
	wg.Wait()
	out, in := p.writer.Stats(), p.reader.Stats()
	want := uint64(nPieces * l.PageBytes)
	if out.PayloadBytes != want || in.PayloadBytes != want || out.Pieces != uint64(nPieces) || in.Pieces != uint64(nPieces) {
		t.Errorf("seed %d: payload out %d, in %d, want %d; pieces %d, %d, want %d",
			seed, out.PayloadBytes, in.PayloadBytes, want, out.Pieces, in.Pieces, nPieces)
	}
	if tr.fabric != "" && (out.FabricBytes != want || in.FabricBytes != want) {
		t.Errorf("seed %d: %d and %d bytes by libfabric, want %d", seed, out.FabricBytes, in.FabricBytes, want)
	}
	if out.Dials != 1 {
		t.Errorf("seed %d: %d sessions dialed for one reader", seed, out.Dials)
	}
	if in.StaleFrames+in.DuplicatePieces+in.ChecksumFailures+in.LeasesFailed != 0 {
		t.Errorf("seed %d: %+v", seed, in)
	}
}

// pushOnce moves src pages of every region to dst pages, in random pieces and order, and compares.
func (p *pair) pushOnce(rng *mrand.Rand, dst, src []int32) error {
	g, err := p.reader.Grant(GrantRequest{Pages: dst, Duration: time.Minute})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	sent := make(map[[2]int]int)
	push, err := p.writer.Open(context.Background(), g.Wire, PushOptions{OnSent: func(region, first, n int) {
		mu.Lock()
		defer mu.Unlock()
		for i := range n {
			sent[[2]int{region, first + i}]++
		}
	}})
	if err != nil {
		return err
	}
	type piece struct{ region, first, n int }
	var pieces []piece
	for region := range p.layout.Regions {
		for first := 0; first < len(dst); {
			n := min(1+rng.IntN(25), len(dst)-first)
			pieces = append(pieces, piece{region, first, n})
			first += n
		}
	}
	rng.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
	for _, c := range pieces {
		if err := push.Send(c.region, src[c.first:][:c.n], c.first); err != nil {
			return err
		}
	}
	if err := push.Send(0, src[:1], 0); err != nil && !errors.Is(err, ErrArguments) {
		return fmt.Errorf("sending a piece twice: %w", err)
	} else if err == nil {
		return errors.New("a piece could be sent twice")
	}
	if err := push.Wait(context.Background()); err != nil {
		return err
	}
	if e := p.log.over(g.Lease); e.Kind != Arrived {
		return fmt.Errorf("%v: %w", e.Kind, e.Err)
	}
	for region := range p.layout.Regions {
		for i := range dst {
			if !bytes.Equal(p.dst.page(p.layout, region, dst[i]), p.src.page(p.layout, region, src[i])) {
				return fmt.Errorf("region %d, position %d: wrong bytes", region, i)
			}
			if n := sent[[2]int{region, i}]; n != 1 {
				return fmt.Errorf("region %d, position %d: OnSent said so %d times", region, i, n)
			}
		}
	}
	return nil
}
