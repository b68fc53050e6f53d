package e2e

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	bus "github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/roles"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// The cluster of the chaos campaign: nodes that can be stopped, started and cut
// off, on models that are real and take virtual time.

// paced makes a model's step last: its layers take virtual time, so that whatever
// happens has a moment in the middle of a step to happen in. Some steps fail.
type paced struct {
	*engine.Loaded
	rng  *rand.Rand // the step goroutine's
	fail float64
	c    *storm
	addr string
}

var errStepFault = errors.New("a step fault of the campaign")

func (p *paced) VocabSize() int      { return p.Model.VocabSize() }
func (p *paced) Logits() backend.Buf { return p.Model.Logits() }

func (p *paced) Step(s *backend.Step, onMark func(int)) error {
	if m := p.c.measured; m != nil && m.took != nil {
		defer m.took(p.addr, time.Now())
	}
	time.Sleep(time.Duration(200+p.rng.IntN(300)+20*len(s.Tokens)) * time.Microsecond)
	if m := p.c.measured; m != nil && m.step != nil {
		m.step(p.addr)
	}
	if m := p.c.measured; m != nil && m.stepped != nil {
		defer m.stepped(p.addr)
	}
	if p.rng.Float64() < p.fail || p.c.failNext.CompareAndSwap(true, false) {
		p.c.saw("failed step")
		return errStepFault
	}
	if onMark == nil {
		return p.Model.Step(s, nil)
	}
	return p.Model.Step(s, func(l int) {
		onMark(l)
		time.Sleep(time.Duration(50+p.rng.IntN(200)) * time.Microsecond)
	})
}

// wires remembers open connections, so that some can be cut.
type wires struct {
	mu    sync.Mutex
	conns []net.Conn
}

func (w *wires) keep(c net.Conn, err error) (net.Conn, error) {
	if err == nil {
		w.mu.Lock()
		w.conns = append(w.conns, c)
		w.mu.Unlock()
	}
	return c, err
}

// cut closes one, perhaps one that is closed already.
func (w *wires) cut(rng *rand.Rand) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.conns) == 0 {
		return false
	}
	i := rng.IntN(len(w.conns))
	_ = w.conns[i].Close()
	w.conns = slices.Delete(w.conns, i, i+1)
	return true
}

// kvWires is the KV network: connections can be cut and take their time, so that
// pages are read long after their job has ended.
type kvWires struct {
	*kvtransfer.Mem
	wires
	seed   uint64
	refuse func() error          // a dial; nil: never
	meddle func(b []byte) []byte // with what is written; nil: never
}

func (k *kvWires) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if k.refuse != nil {
		if err := k.refuse(); err != nil {
			return nil, err
		}
	}
	conn, err := k.keep(k.Mem.Dial(ctx, addr))
	if err != nil {
		return nil, err
	}
	return &slowConn{Conn: conn, meddle: k.meddle, rng: rand.New(rand.NewPCG(k.seed, 5))}, nil
}

type slowConn struct {
	net.Conn
	meddle func(b []byte) []byte
	mu     sync.Mutex
	rng    *rand.Rand
}

func (s *slowConn) Write(b []byte) (int, error) {
	s.mu.Lock()
	pause := time.Duration(max(0, s.rng.IntN(2000)-1000)) * time.Microsecond
	s.mu.Unlock()
	time.Sleep(pause)
	if s.meddle != nil {
		n, err := s.Conn.Write(s.meddle(b))
		return min(n, len(b)), err
	}
	return s.Conn.Write(b)
}

// faults is a log in which an error is a failure of the test: nodes log as errors
// what only a fault of theirs can cause, and failed steps.
type faults struct {
	slog.Handler
	c    *storm
	addr string
}

func (f faults) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelError }

func (f faults) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "step failed" {
		return nil
	}
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		return true
	})
	f.c.errorf("%s logs: %s", f.addr, text)
	return nil
}

// leases is a decode node's Reader, of whose leases some are taken away.
type leases struct {
	*kvtransfer.Reader
	c   *storm
	mu  sync.Mutex
	rng *rand.Rand
}

func (l *leases) Grant(q kvtransfer.GrantRequest) (kvtransfer.Grant, error) {
	g, err := l.Reader.Grant(q)
	if err == nil && l.c.granted != nil {
		l.c.granted(l, g)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.c.faulty.Load() && l.rng.IntN(6) == 0 {
		time.AfterFunc(time.Duration(l.rng.IntN(8000))*time.Microsecond, func() {
			if l.Cancel(g.Lease) {
				l.c.saw("lease taken away")
			}
		})
	}
	return g, err
}

// lossy drops frames of some types on their way to a handler.
type lossy struct {
	rpc.Handler
	c    *storm
	drop []rpc.Type
	mu   sync.Mutex
	rng  *rand.Rand
}

func (l *lossy) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	if slices.Contains(l.drop, t) && l.c.faulty.Load() {
		l.mu.Lock()
		lost := l.rng.IntN(12) == 0
		l.mu.Unlock()
		if lost {
			l.c.saw("lost " + t.String())
			return
		}
	}
	l.Handler.Frame(c, t, stream, payload)
}

// node is one process of the cluster: a role on a device that outlives it.
type node struct {
	c       *storm
	addr    string
	device  *engine.Loaded
	decode  *decode.Node
	prefill *prefill.Node
	eng     *engine.Engine
	leases  *leases
	writer  *kvtransfer.Writer
	maxSeqs int
	meters  *roles.NodeMetrics // nil: nobody asks
	asks    *rpc.Counters
	bus     *bus.Bus // nil: nobody hears of its blocks
	stop    []func() // in reverse
}

// measured says what a test that looks at metrics does to nodes.
type measured struct {
	scheduler func(addr string, o *scheduler.Config)
	decode    func(*decode.Options)
	prefill   func(*prefill.Options)
	step      func(addr string)                  // before each step
	stepped   func(addr string)                  // after it
	took      func(addr string, began time.Time) // likewise
	dialled   func(from, to string, err error)
	framed    func(addr string, t rpc.Type)             // before a node sees a frame
	blocks    func(addr string, events []kvcache.Event) // before a node tells them to a bus without a server; nil: it has no bus
	heartbeat time.Duration                             // of nodes' connections; 0: as they ship
}

// sighted shows a test what comes to a node.
type sighted struct {
	rpc.Handler
	see func(t rpc.Type)
}

func (s sighted) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	s.see(t)
	s.Handler.Frame(c, t, stream, payload)
}

// watch gives the node metrics as main does, and lets the test change its options.
func (n *node) watch(o *engine.Options) {
	c := n.c.measured
	if c == nil {
		return
	}
	role, bits := "decode", metrics.Decode
	if n.addr[0] == 'p' {
		role, bits = "prefill", metrics.Prefill
	}
	if c.scheduler != nil {
		c.scheduler(n.addr, &o.Scheduler)
	}
	n.meters, n.asks = &roles.NodeMetrics{Set: metrics.New(bits, "tiny"), Stats: func() (s engine.Stats) {
		if n.eng != nil { // which is made with these
			s = n.eng.Stats()
		}
		return s
	}}, new(rpc.Counters)
	o.Watch = roles.WatchEngine(n.meters.Set)
	if c.blocks != nil {
		n.bus = bus.NewBus(bus.BusOptions{Name: n.addr})
		news, err := n.bus.Publisher("tiny", n.addr)
		n.c.must(err)
		n.meters.BlockEvents(news.Dropped)
		o.OnBlocks = func(events []kvcache.Event, gap bool) {
			c.blocks(n.addr, events)
			news.Publish(events, gap)
		}
	}
	n.meters.Engine(&engine.Loaded{Scheduler: o.Scheduler, KV: o.KV, Adapters: n.device.Adapters}, "test", role)
	if n.device.Adapters.Places > 0 {
		o.Adapters, o.AdapterPlaces, o.Modules = n.device.Model, n.device.Adapters.Places, n.device.Adapters.Modules
	}
}

// start boots it with an empty engine.
func (n *node) start(rng *rand.Rand) {
	c := n.c
	o := n.device.Scheduler
	o.Pool.Blocks = 13 + rng.IntN(7)
	o.MaxModelLen = 13 * n.device.Scheduler.Pool.BlockTokens
	o.MaxSeqs = 2 + rng.IntN(6)
	o.MaxBatchedTokens = 8 + rng.IntN(90)
	if c.tight {
		o.Pool.Blocks, o.MaxSeqs = 13, 7
	}
	log := slog.New(faults{slog.DiscardHandler, c, n.addr})
	var err error
	eo := engine.Options{
		Logger:  log,
		Model:   &paced{Loaded: n.device, rng: rand.New(rand.NewPCG(rng.Uint64(), 1)), fail: c.stepFaults, c: c, addr: n.addr},
		Backend: n.device.Backend, KV: n.device.KV, Scheduler: o, Probe: c.probes.see,
		OnStep: func() {
			if n.decode != nil {
				n.decode.Flush()
			}
		},
	}
	eo.GrammarLimits, eo.Vocabulary = grammar.DefaultLimits(), testVocabulary(n.device.Model.VocabSize())
	n.watch(&eo)
	o, n.maxSeqs = eo.Scheduler, eo.Scheduler.MaxSeqs
	n.eng, err = engine.New(eo)
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	n.stop = append(n.stop[:0], func() {
		cancel()
		<-n.eng.Done()
	})
	if n.bus != nil {
		n.stop = append(n.stop, n.bus.Close)
	}
	h := &nodepb.Hello{NodeId: n.addr, Model: "tiny", Fingerprint: n.device.Fingerprint, NumericsClass: n.device.Class}
	var role rpc.Handler
	if n.decode, n.prefill = nil, nil; n.addr[0] == 'd' {
		role = n.startDecode(ctx, rng, h, o.MaxModelLen, log)
	} else {
		role = n.startPrefill(ctx, rng)
	}
	go n.eng.Run(ctx)
	lis, err := c.net.Listen(n.addr)
	c.must(err)
	sctx, hangUp := context.WithCancel(context.Background())
	served, counters := make(chan error, 1), new(rpc.Counters)
	ro := rpc.Options{Hello: h, OutboxBytes: c.outbox, Counters: counters}
	if m := c.measured; m != nil {
		roles.RPCMetrics(n.meters.Set, counters, n.asks)
		if ro.Heartbeat = m.heartbeat; m.framed != nil {
			role = sighted{role, func(t rpc.Type) { m.framed(n.addr, t) }}
		}
	}
	go func() {
		served <- rpc.Serve(sctx, lis, ro, role)
	}()
	n.stop = append(n.stop, func() {
		hangUp()
		c.must(<-served)
	})
	c.tell(n.addr, true)
}

func (n *node) startDecode(ctx context.Context, rng *rand.Rand, h *nodepb.Hello, maxLen int, log *slog.Logger) rpc.Handler {
	c := n.c
	observe := func(kvtransfer.Event) {}
	if n.meters != nil {
		observe = roles.KVReceived(n.meters.Set)
	}
	r, err := kvtransfer.NewReader(kvtransfer.ReaderOptions{
		Node: n.addr, Layout: layout(n.device), Memory: n.device, Network: c.kv, Listen: n.addr + "-kv",
		OnEvent: func(ev kvtransfer.Event) {
			observe(ev)
			n.decode.TransferEvent(ev)
		},
	})
	c.must(err)
	n.leases = &leases{Reader: r, c: c, rng: rand.New(rand.NewPCG(rng.Uint64(), 4))}
	n.stop = append(n.stop, func() { c.must(r.Close()) })
	seed := rng.Uint64()
	do := decode.Options{
		Engine: n.eng, Reader: n.leases, Logger: log, MaxModelLen: maxLen, BlockTokens: n.device.Scheduler.Pool.BlockTokens, Bundle: c.bundle, MaxRunning: n.maxSeqs,
		Identity: decode.Identity{Model: "tiny", Fingerprint: n.device.Fingerprint, Class: n.device.Class, Layout: n.device.LayoutHash(), KV: n.device.KVText()},
		Dial: func(toPrefill rpc.Handler) decode.Dialer {
			l := &lossy{Handler: toPrefill, c: c, rng: rand.New(rand.NewPCG(seed, 2)), drop: []rpc.Type{rpc.FrameGrantRequest, rpc.FrameEnd, rpc.FramePrefillDone}}
			p := rpc.NewPool(rpc.Options{Hello: h, Counters: n.asks, Dial: func(ctx context.Context, addr string) (net.Conn, error) {
				conn, err := c.dial(ctx, addr)
				if c.measured != nil && c.measured.dialled != nil {
					c.measured.dialled(n.addr, addr, err)
				}
				return conn, err
			}}, l)
			n.stop = append(n.stop, p.Close)
			return p
		},
	}
	if c.measured != nil && c.measured.decode != nil {
		c.measured.decode(&do)
	}
	n.decode = decode.New(do)
	if n.meters != nil {
		n.meters.Decode(n.decode.Counters, n.decode.Owned, n.decode.PrefillBreakers)
		n.meters.Reader(r.Stats)
	}
	go n.decode.Heartbeats(ctx)
	n.stop = append(n.stop, func() {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		n.decode.Drain(now)
	})
	return n.decode
}

func (n *node) startPrefill(ctx context.Context, rng *rand.Rand) rpc.Handler {
	c := n.c
	var err error
	n.writer, err = kvtransfer.NewWriter(kvtransfer.WriterOptions{Node: n.addr, Layout: layout(n.device), Memory: n.device, Network: c.kv})
	c.must(err)
	n.stop = append(n.stop, func() { c.must(n.writer.Close()) })
	po := prefill.Options{
		Engine: n.eng, Writer: n.writer,
		RunAheadTokens: 100 + rng.IntN(300),
		Identity:       prefill.Identity{Fingerprint: n.device.Fingerprint, Class: n.device.Class, Layout: n.device.LayoutHash(), KV: n.device.KVText()},
	}
	if n.meters != nil {
		po.Transferred = roles.KVSent(n.meters.Set)
		if c.measured.prefill != nil {
			c.measured.prefill(&po)
		}
	}
	n.prefill = prefill.New(po)
	if n.meters != nil {
		n.meters.Prefill(n.prefill.Counters, n.prefill.Queued, n.prefill.QueuedTokens, n.prefill.Limit(), n.writer.Stats)
	}
	go n.prefill.Positions(ctx)
	n.stop = append(n.stop, func() {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		n.prefill.Drain(now)
	})
	return &lossy{Handler: n.prefill, c: c, rng: rand.New(rand.NewPCG(rng.Uint64(), 3)), drop: []rpc.Type{rpc.FrameGrant, rpc.FrameCancel}}
}

// kill ends the process: connections first, as when it is gone, the rest in order.
func (n *node) kill() {
	n.c.tell(n.addr, false)
	for i := len(n.stop) - 1; i >= 0; i-- {
		if i == 0 {
			n.idle("when it was stopped")
		}
		n.stop[i]()
	}
}

// tell says whether a node runs, where somebody listens.
func (c *storm) tell(addr string, up bool) {
	if c.heard != nil {
		c.heard(addr, up)
	}
}

// silence cuts a node off for a while; the bound is 6 s.
func (c *storm) silence(n *node, rng *rand.Rand) {
	c.net.Silence(n.addr, true)
	time.Sleep(time.Duration(rng.IntN(9000)) * time.Millisecond)
	c.net.Silence(n.addr, false)
	c.saw("silence")
}

// restart ends a node and has it back some time later.
func (c *storm) restart(n *node, rng *rand.Rand) {
	n.kill()
	c.saw(map[bool]string{true: "decode node stopped", false: "prefill node stopped"}[n.addr[0] == 'd'])
	time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
	n.start(rng)
}

// roll restarts a node that drains.
func (c *storm) roll(n *node, rng *rand.Rand) {
	if n.decode != nil {
		n.decode.StartDrain()
	} else {
		n.prefill.StartDrain()
	}
	c.saw("node drained")
	time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
	n.kill()
	n.start(rng)
}

// check verifies the node's laws, whatever it does.
func (n *node) check(when string) {
	errs := []error{n.eng.Check()}
	if n.decode != nil {
		errs = append(errs, n.decode.Check(), n.leases.Check())
	} else {
		errs = append(errs, n.prefill.Check(), n.writer.Check())
	}
	for _, err := range errs {
		if err != nil {
			n.c.errorf("%s %s: %v", n.addr, when, err)
		}
	}
}

// idle wants nothing left of what the node did.
func (n *node) idle(when string) {
	n.check(when)
	n.check(when) // its turn is after the one whose snapshot is wanted
	s := n.eng.Stats().Scheduler
	if u := s.Blocks; s.Running+s.Waiting+s.Held+s.Reservations+u.Used+u.Pinned+u.Arriving+u.Leaving != 0 {
		n.c.errorf("%s %s: left in the engine: %+v", n.addr, when, s)
	}
	if n.decode != nil {
		if k := n.leases.Stats(); n.decode.Running()+k.Granted+k.Arriving+k.Quarantined != 0 || k.ChecksumFailures != 0 && n.c.measured == nil {
			n.c.errorf("%s %s: %d attempts, leases %+v", n.addr, when, n.decode.Running(), k)
		}
		return
	}
	// No job is left, so Check has held the tokens ahead against none.
	if _, asking, jobs := n.prefill.Queued(); jobs != 0 || asking != 0 || n.writer.Stats().Pushes != 0 {
		n.c.errorf("%s %s: %d jobs, %+v", n.addr, when, jobs, n.writer.Stats())
	}
}

// devices are loaded models, made once and lent to one cluster after the other.
func devices(t *testing.T, dir, kernels string, n int, adapters engine.Adapters) []*engine.Loaded {
	t.Helper()
	return devicesWithKV(t, dir, kernels, "", n, adapters)
}

// devicesWithKV is devices with KV of a type, which is part of the numerics class.
func devicesWithKV(t *testing.T, dir, kernels, kvType string, n int, adapters engine.Adapters) []*engine.Loaded {
	t.Helper()
	var out []*engine.Loaded
	for range n {
		l, err := engine.Load(engine.LoadOptions{
			Model: dir, Kernels: kernels, KVDType: kvType, Threads: 1, KVMemory: 8 << 20, MaxSeqs: 8, MaxBatchedTokens: 100, MaxModelLen: 13 * 16, Adapters: adapters,
		})
		if err != nil {
			t.Fatal(err)
		}
		if l.Scheduler.Pool.BlockTokens != 16 || l.KV.Blocks < 33 {
			t.Fatalf("%+v", l.KV)
		}
		out = append(out, l)
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return out
}

func (c *storm) must(err error) {
	if err != nil {
		c.errorf("%v", err)
		panic(fmt.Sprintf("seed %d: %v", c.seed, err))
	}
}
