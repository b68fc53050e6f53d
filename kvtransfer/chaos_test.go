package kvtransfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// faults are what happens to one chaos run's connections, counted.
type faults struct {
	Network
	seed   uint64
	plain  bool // frames can be recognised, so that they can be repeated
	shared bool // they have no pages behind them
	nConn  atomic.Uint64

	off                                            atomic.Bool
	kills, flips, stalls, repeats, replay, reorder atomic.Int64
	thaws, cuts                                    atomic.Int64
	mu                                             sync.Mutex
	old                                            [][]byte // whole frames of earlier leases, at most 8
}

func (f *faults) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := f.Network.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &faultyConn{Conn: c, f: f, rng: mrand.New(mrand.NewPCG(f.seed, f.nConn.Add(1)))}, nil
}

// faultyConn spoils what is written to it.
type faultyConn struct {
	net.Conn
	f     *faults
	mu    sync.Mutex
	rng   *mrand.Rand
	frame []byte // the one being written
	need  int    // bytes of it to come
	hold  bool   // it is not written as it comes
	held  []byte // a frame that waits until the next one is written
}

func (c *faultyConn) Write(b []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	piece := len(b)
	if c.f.plain && c.f.shared && piece%sharedSize == 0 { // headers, each a frame by itself
		piece = sharedSize
	}
	for n < len(b) && err == nil {
		var m int
		m, err = c.write(b[n : n+piece])
		n += m
	}
	return n, err
}

// write needs c.mu.
func (c *faultyConn) write(b []byte) (int, error) {
	f := c.f
	if f.off.Load() {
		return c.Conn.Write(b)
	}
	header := frameSize
	if f.shared {
		header = sharedSize
	}
	atHeader := f.plain && len(b) == header && c.need <= 0
	if atHeader {
		f.mu.Lock()
		if len(f.old) > 0 && c.rng.IntN(12) == 0 { // a frame that was long on its way
			old := f.old[c.rng.IntN(len(f.old))]
			f.mu.Unlock()
			f.replay.Add(1)
			if _, err := c.Conn.Write(old); err != nil {
				return 0, err
			}
		} else {
			f.mu.Unlock()
		}
		c.frame, c.need = nil, -1
		var h frame
		if h.decode(b) == nil {
			c.need = header
			if !f.shared {
				c.need += h.count * chaosLayout.PageBytes
			}
			c.hold = c.held == nil && c.rng.IntN(12) == 0
		}
	}
	if c.hold {
		if c.remember(b) { // it overtakes nothing and is overtaken by the next
			c.held, c.hold = c.frame, false
		}
		return len(b), nil
	}
	switch n := c.rng.IntN(400); {
	case n == 0:
		f.kills.Add(1)
		n, _ := c.Conn.Write(b[:c.rng.IntN(len(b)+1)])
		c.Close()
		return n, net.ErrClosed
	case n <= 3:
		f.flips.Add(1)
		b = append([]byte(nil), b...) // the source page stays whole
		b[c.rng.IntN(len(b))] ^= 1 << c.rng.IntN(8)
	case n <= 6:
		f.stalls.Add(1)
		cut := c.rng.IntN(len(b) + 1)
		if n, err := c.Conn.Write(b[:cut]); err != nil {
			return n, err
		}
		time.Sleep(time.Duration(c.rng.IntN(60)) * time.Millisecond)
		n, err := c.Conn.Write(b[cut:])
		c.remember(b)
		return cut + n, err
	}
	n, err := c.Conn.Write(b)
	if err != nil || !c.remember(b) {
		return n, err
	}
	if c.rng.IntN(12) == 0 {
		f.repeats.Add(1)
		_, err = c.Conn.Write(c.frame)
	}
	if err == nil && c.held != nil {
		f.reorder.Add(1)
		_, err = c.Conn.Write(c.held)
		c.held = nil
	}
	return n, err
}

// remember collects a frame and says when it is whole.
func (c *faultyConn) remember(b []byte) bool {
	if c.need <= 0 {
		return false
	}
	c.frame = append(c.frame, b...)
	if c.need -= len(b); c.need > 0 {
		return false
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if len(c.f.old) < 8 {
		c.f.old = append(c.f.old, c.frame)
	} else {
		c.f.old[c.rng.IntN(8)] = c.frame
	}
	return true
}

var chaosLayout = Layout{Regions: 3, PageBytes: 2048, Hash: 99}

const (
	chaosPages = 96
	poison     = 0xdd
)

// chaosRun is a decode node's pages, and what became of each lease.
type chaosRun struct {
	*pair
	poison []byte
	lease  time.Duration

	mu       sync.Mutex
	free     []int32
	sources  []int32 // pages of the source that no push has
	leases   map[LeaseID]*chaosLease
	early    map[LeaseID][]Event // events that came before Grant's caller noted the lease
	wrong    error
	outcomes map[string]int
}

type chaosLease struct {
	dst, src []int32
	want     [][]byte // [region*len(dst)+i] what the source pages held
	over     chan struct{}
	failed   bool
}

// TestChaos runs transfers over connections that break, damage, delay and repeat what is written, with cancels, aborts and silent
// writers between them. Pages are poisoned whenever they are the owner's: a byte that lands then, or a wrong one that arrives, is an error.
func TestChaos(t *testing.T) {
	nTransfers := 500 // per transport
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		nTransfers = 10_000
	case testing.Short():
		nTransfers = 125
	}
	for i, tr := range allTransports(t) {
		t.Run(tr.name, func(t *testing.T) {
			if tr.fabric != "" {
				fabricDevices(t, tr.fabric) // skips without libfabric
				t.Parallel()                // their writers freeze for long
			}
			outcomes := make(map[string]int)
			for left, seed := nTransfers, uint64(i); left > 0; seed += 100 {
				n := min(left, 125)
				left -= n
				t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) { chaos(t, tr, seed, n, outcomes) })
			}
			t.Log(outcomes)
			if nTransfers < 500 {
				return // too few to meet all of the following
			}
			for _, want := range []string{"arrived", "cancelled", "aborted", "expired", "connection", "kills", "flips", "stalls"} {
				if outcomes[want] == 0 {
					t.Errorf("no transfer met %q", want)
				}
			}
			if tr.fabric != "" && (outcomes["fabric"] == 0 || outcomes["thaws"] == 0 || outcomes["truncations"] == 0) {
				t.Error("no page was written by libfabric, or no writer was thawed, or no write was cut short")
			}
			for _, want := range []string{"checksum", "repeats", "replays", "reorders", "stale"} {
				if want == "checksum" && tr.shared && nTransfers == 500 {
					continue // a header that is damaged is noticed by its own; a page is seldom copied between two contents
				}
				if outcomes[want] == 0 && tr.client == nil {
					t.Errorf("no transfer met %q", want)
				}
			}
		})
	}
}

func chaos(t *testing.T, tr transport, seed uint64, nTransfers int, outcomes map[string]int) {
	f := &faults{Network: tr.network, seed: seed, plain: tr.client == nil, shared: tr.shared || tr.fabric != ""}
	run := &chaosRun{leases: make(map[LeaseID]*chaosLease), early: make(map[LeaseID][]Event), outcomes: outcomes, lease: 100 * time.Millisecond}
	if tr.fabric != "" {
		run.lease *= 4 // two endpoints take long to meet
	}
	var writers []*Writer
	var wo WriterOptions
	run.pair = newPair(t, tr, chaosLayout, chaosPages, func(r *ReaderOptions, w *WriterOptions) {
		log := r.OnEvent
		r.OnEvent = func(e Event) { log(e); run.event(e) }
		r.QuarantineTimeout = 30 * time.Millisecond
		w.Network, w.AckTimeout, w.DialAttempts = f, 200*time.Millisecond, 5
		wo = *w
	})
	rng := mrand.New(mrand.NewPCG(seed, 0))
	wo.Node = "prefill-1"
	second, err := NewWriter(wo)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if tr.fabric != "" {
		run.writer.wrap, second.wrap = f.wrap, f.wrap
	}
	writers = append(writers, run.writer, second)
	run.poison = bytes.Repeat([]byte{poison}, chaosLayout.PageBytes)
	for i := range int32(chaosPages) {
		run.poisonPage(i)
		run.free, run.sources = append(run.free, i), append(run.sources, i)
	}
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			rng := mrand.New(mrand.NewPCG(seed, uint64(1+worker)))
			for i := worker; i < nTransfers; i += 4 {
				run.transfer(t, rng, writers[rng.IntN(2)])
				if err := errors.Join(run.reader.Check(), writers[0].Check(), writers[1].Check()); err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
			}
		})
	}
	wg.Wait()
	f.off.Store(true)
	run.silent(t, rng, run.writer)
	s := run.reader.Stats()
	run.mu.Lock()
	defer run.mu.Unlock()
	if run.wrong != nil {
		t.Errorf("seed %d: %v", seed, run.wrong)
	}
	if len(run.free) != chaosPages || s.Granted+s.Arriving+s.Quarantined != 0 {
		t.Errorf("seed %d: %d of %d pages came back; %+v", seed, len(run.free), chaosPages, s)
	}
	for _, page := range run.free {
		run.checkPoison(page)
	}
	if run.wrong != nil {
		t.Errorf("seed %d: at the end: %v", seed, run.wrong)
	}
	for what, n := range map[string]int64{"kills": f.kills.Load(), "flips": f.flips.Load(), "stalls": f.stalls.Load(), "repeats": f.repeats.Load(),
		"reorders": f.reorder.Load(), "replays": f.replay.Load(), "stale": int64(s.StalePieces), "thaws": f.thaws.Load(), "truncations": f.cuts.Load(), "fabric": int64(s.FabricBytes), "duplicates": int64(s.DuplicatePieces), "quarantined": int64(s.LeasesQuarantined)} {
		outcomes[what] += int(n)
	}
}

// takeSources fills pages of the source, which nobody else has until giveSources.
func (run *chaosRun) takeSources(rng *mrand.Rand, n int) (src []int32, want [][]byte) {
	run.mu.Lock()
	src = append(src, run.sources[len(run.sources)-n:]...)
	run.sources = run.sources[:len(run.sources)-n]
	run.mu.Unlock()
	for region := range chaosLayout.Regions {
		for _, page := range src {
			b := run.src.page(chaosLayout, region, page)
			memory{b}.randomize(rng)
			want = append(want, bytes.Clone(b))
		}
	}
	return src, want
}

// giveSources makes the pages hold something else, as an owner does whose push has ended.
func (run *chaosRun) giveSources(src []int32) {
	for region := range chaosLayout.Regions {
		for _, page := range src {
			copy(run.src.page(chaosLayout, region, page), run.poison)
		}
	}
	run.mu.Lock()
	run.sources = append(run.sources, src...)
	run.mu.Unlock()
}

func (run *chaosRun) poisonPage(page int32) {
	for region := range chaosLayout.Regions {
		copy(run.dst.page(chaosLayout, region, page), run.poison)
	}
}

// checkPoison needs run.mu.
func (run *chaosRun) checkPoison(page int32) {
	for region := range chaosLayout.Regions {
		if !bytes.Equal(run.dst.page(chaosLayout, region, page), run.poison) && run.wrong == nil {
			run.wrong = fmt.Errorf("region %d, page %d was written while it was nobody's", region, page)
		}
	}
}

// event takes a lease's pages back: they must hold the source if it arrived, and are poisoned.
func (run *chaosRun) event(e Event) {
	run.mu.Lock()
	defer run.mu.Unlock()
	l := run.leases[e.Lease]
	if l == nil {
		run.early[e.Lease] = append(run.early[e.Lease], e)
		return
	}
	switch e.Kind {
	case Failed:
		l.failed = true
		for name, kind := range map[string]error{"cancelled": ErrCancelled, "aborted": ErrAborted, "expired": ErrExpired,
			"connection": ErrConnection, "checksum": ErrChecksum, "timeout": ErrTimeout} {
			if errors.Is(e.Err, kind) {
				run.outcomes[name]++
			}
		}
		return
	case Arrived:
		run.outcomes["arrived"]++
		for i := range l.dst {
			for region := range chaosLayout.Regions {
				if !bytes.Equal(run.dst.page(chaosLayout, region, l.dst[i]), l.want[region*len(l.dst)+i]) && run.wrong == nil {
					run.wrong = fmt.Errorf("lease %x arrived with wrong bytes in region %d, position %d", e.Lease, region, i)
				}
			}
		}
	}
	for _, page := range l.dst {
		run.poisonPage(page)
	}
	run.free = append(run.free, l.dst...)
	delete(run.leases, e.Lease)
	close(l.over)
}

// take takes random pages out of the pool.
func (run *chaosRun) take(rng *mrand.Rand) []int32 {
	run.mu.Lock()
	defer run.mu.Unlock()
	n := min(1+rng.IntN(20), len(run.free))
	dst := make([]int32, n)
	for i := range dst {
		at := rng.IntN(len(run.free))
		dst[i] = run.free[at]
		run.free[at] = run.free[len(run.free)-1]
		run.free = run.free[:len(run.free)-1]
		run.checkPoison(dst[i])
	}
	return dst
}

// transfer runs one lease to its end, in one of many ways.
func (run *chaosRun) transfer(t *testing.T, rng *mrand.Rand, w *Writer) {
	run.begin(t, rng, w, func(_ context.Context, push *Push, g Grant, l *chaosLease) { run.push(t, rng, push, g, l) })
}

// begin grants random pages, lets write do what it will, and waits for the lease's end.
func (run *chaosRun) begin(t *testing.T, rng *mrand.Rand, w *Writer, write func(context.Context, *Push, Grant, *chaosLease)) {
	l := &chaosLease{dst: run.take(rng), over: make(chan struct{})}
	if len(l.dst) == 0 {
		return
	}
	l.src, l.want = run.takeSources(rng, len(l.dst))
	defer func() { run.giveSources(l.src) }()
	g, err := run.reader.Grant(GrantRequest{Pages: l.dst, Duration: run.lease})
	if err != nil {
		t.Error(err)
		return
	}
	run.mu.Lock()
	run.leases[g.Lease] = l
	early := run.early[g.Lease]
	delete(run.early, g.Lease)
	run.mu.Unlock()
	for _, e := range early {
		run.event(e)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if push, err := w.Open(ctx, g.Wire, PushOptions{}); err == nil {
		write(ctx, push, g, l)
		_ = push.Abort(errors.New("chaos: it has to end")) // nothing, if it has; and then its pages are read no more
		run.giveSources(l.src)
		l.src = nil
	}
	select {
	case <-l.over:
	case <-ctx.Done():
		t.Errorf("lease %x did not end", g.Lease)
	}
}

// silent is a transfer that stops and says no more, over a connection that is whole, so that nothing but time ends its lease.
func (run *chaosRun) silent(t *testing.T, rng *mrand.Rand, w *Writer) {
	run.begin(t, rng, w, func(ctx context.Context, push *Push, _ Grant, l *chaosLease) {
		if err := push.Send(0, l.src[:1], 0); err != nil {
			t.Error(err)
		}
		select {
		case <-l.over:
		case <-ctx.Done():
		}
	})
}

// push sends pages in random order and may stop at any point.
func (run *chaosRun) push(t *testing.T, rng *mrand.Rand, push *Push, g Grant, l *chaosLease) {
	fate := rng.IntN(10)
	order := rng.Perm(chaosLayout.Regions * len(l.dst))
	stop := len(order)
	if fate < 4 {
		stop = rng.IntN(len(order))
	}
	for n, piece := range order[:stop] {
		i := piece / chaosLayout.Regions
		if push.Send(piece%chaosLayout.Regions, l.src[i:i+1], i) != nil {
			break
		}
		if rng.IntN(20) == 0 {
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
		}
		push.Renew(uint64(n))
	}
	switch fate {
	case 0, 1:
		run.reader.Cancel(g.Lease)
	case 2:
		_ = push.Abort(errors.New("chaos")) // whether it was heard does not matter
	case 3: // silence
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+rng.IntN(3000))*time.Millisecond)
	defer cancel()
	err := push.Wait(ctx)
	if err != nil {
		return
	}
	select {
	case <-l.over:
	case <-time.After(5 * time.Second):
	}
	run.mu.Lock()
	defer run.mu.Unlock()
	if l.failed && run.wrong == nil {
		run.wrong = fmt.Errorf("the writer was told that lease %x arrived, but it failed", g.Lease)
	}
}
