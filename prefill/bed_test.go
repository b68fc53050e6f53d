package prefill

import (
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// The tests run a prefill node in virtual time, with a real transfer to a decode
// node that does as the test says. A token's KV in a layer is kvOf(token, layer),
// and a layer of a step takes layerTime.

const (
	vocab       = 64
	layers      = 2
	blockTokens = 8
	pageBytes   = 4 * blockTokens
	stepTokens  = 32
	layerTime   = time.Millisecond
)

func kvOf(token int32, layer int) uint32 { return uint32(token)*10 + uint32(layer) + 1 }

// memory is KV pages, [layers][blocks*pageBytes].
type memory [layers][]byte

func newMemory(blocks int) *memory {
	var m memory
	for l := range m {
		m[l] = make([]byte, blocks*pageBytes)
	}
	return &m
}

func (m *memory) Region(i int) []byte { return m[i] }

func (m *memory) at(layer, page, token int) []byte {
	return m[layer][page*pageBytes+4*token:][:4]
}

type model struct {
	backend.Backend
	kv    *memory
	fail  chan error   // of the next step
	layer atomic.Int64 // a time.Duration, if longer than layerTime
	rows  []float32    // [outputs, 2] of the last step: see rowOf
}

func (m *model) VocabSize() int      { return vocab }
func (m *model) Logits() backend.Buf { return 0 }
func (m *model) Hidden() backend.Buf { return 0 }
func (m *model) HiddenSize() int     { return 2 }

func (m *model) Download([]float32, backend.Buf) []float32 { return m.rows }

func (m *model) Step(s *backend.Step, onMark func(int)) error {
	select {
	case err := <-m.fail:
		return err
	default:
	}
	for l := range layers {
		time.Sleep(max(time.Duration(m.layer.Load()), layerTime))
		for _, q := range s.Spans {
			for i, t := range s.Tokens[q.Row : q.Row+q.Tokens] {
				pos := int(q.Start) + i
				binary.LittleEndian.PutUint32(m.kv.at(l, int(q.Tables[0][pos/blockTokens]), pos%blockTokens), kvOf(t, l))
			}
		}
		if onMark != nil { // the step has a job
			onMark(l)
		}
	}
	m.rows = m.rows[:0]
	for _, o := range s.Outputs {
		for _, q := range s.Spans {
			if o.Row >= q.Row && o.Row < q.Row+q.Tokens {
				sum := uint32(0)
				for pos := range q.Start + o.Row - q.Row + 1 {
					sum += binary.LittleEndian.Uint32(m.kv.at(0, int(q.Tables[0][pos/blockTokens]), int(pos)%blockTokens))
				}
				m.rows = append(m.rows, float32(sum), float32(s.Tokens[o.Row]))
			}
		}
	}
	return nil
}

// rowOf is the row behind the last norm after a prompt: the sum of its KV in layer 0, and its last
// token.
func rowOf(prompt []int32) []float32 {
	sum := uint32(0)
	for _, t := range prompt {
		sum += kvOf(t, 0)
	}
	return []float32{float32(sum), float32(prompt[len(prompt)-1])}
}

// bed is a prefill node under test, and the decode node that asks it.
type bed struct {
	t      *testing.T
	net    *rpc.Network
	model  *model
	eng    *engine.Engine
	n      *Node
	reader *kvtransfer.Reader
	writer *kvtransfer.Writer
	kv     *memory // the decode node's
	dec    *decodePeer
	stop   []func()
	dial   atomic.Int64 // a time.Duration that connecting takes
	write  atomic.Int64 // a time.Duration that each write to the decode node's KV takes

	mu     sync.Mutex
	events map[kvtransfer.LeaseID][]kvtransfer.Event
}

func newBed(t *testing.T, change func(*Options, *scheduler.Config)) *bed {
	t.Helper()
	const blocks = 32
	b := &bed{t: t, net: rpc.NewNetwork(), model: &model{kv: newMemory(blocks), fail: make(chan error, 1)},
		kv: newMemory(64), events: map[kvtransfer.LeaseID][]kvtransfer.Event{}}
	mem := kvtransfer.NewMem()
	layout := kvtransfer.Layout{Regions: layers, PageBytes: pageBytes, Hash: 9}
	var err error
	b.reader, err = kvtransfer.NewReader(kvtransfer.ReaderOptions{
		Node: "decode", Layout: layout, Memory: b.kv, Network: mem, Listen: "decode-kv",
		OnEvent: func(ev kvtransfer.Event) {
			b.mu.Lock()
			b.events[ev.Lease] = append(b.events[ev.Lease], ev)
			b.mu.Unlock()
		},
	})
	b.must(err)
	b.writer, err = kvtransfer.NewWriter(kvtransfer.WriterOptions{Node: "prefill", Layout: layout, Memory: b.model.kv, Network: slow{mem, &b.dial, &b.write}})
	b.must(err)
	c := scheduler.Config{Pool: kvcache.Config{Blocks: blocks, BlockTokens: blockTokens}, MaxSeqs: 4, MaxBatchedTokens: stepTokens, MaxModelLen: 200}
	o := Options{
		Writer: b.writer, RunAheadTokens: 100,
		Identity: Identity{Fingerprint: 5, Class: "class", Layout: 9, KV: "blocks of 8"},
	}
	if change != nil {
		change(&o, &c)
	}
	b.eng, err = engine.New(engine.Options{
		Model: b.model, Backend: b.model, Scheduler: c,
		KV: backend.UniformKV(layers, c.Pool.Blocks, blockTokens, 1, 2, backend.F32),
	})
	b.must(err)
	o.Engine = b.eng
	b.n = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	b.stop = append(b.stop, cancel)
	go b.eng.Run(ctx)
	go b.n.Positions(ctx)
	l, err := b.net.Listen("prefill")
	b.must(err)
	served := make(chan error, 1)
	go func() { served <- rpc.Serve(ctx, l, rpc.Options{Hello: &nodepb.Hello{NodeId: "prefill"}}, b.n) }()
	b.stop = append(b.stop, func() { b.must(<-served) })
	b.dec = b.decode("decode")
	return b
}

func (b *bed) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// slow is a network on which connecting and writing take their time.
type slow struct {
	*kvtransfer.Mem
	dial, write *atomic.Int64
}

func (s slow) Dial(ctx context.Context, addr string) (net.Conn, error) {
	time.Sleep(time.Duration(s.dial.Load()))
	c, err := s.Mem.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return slowConn{c, s.write}, nil
}

type slowConn struct {
	net.Conn
	takes *atomic.Int64
}

func (c slowConn) Write(p []byte) (int, error) {
	time.Sleep(time.Duration(c.takes.Load()))
	return c.Conn.Write(p)
}

// idle wants nothing left in the node.
func (b *bed) idle() {
	b.t.Helper()
	time.Sleep(100 * time.Millisecond)
	b.must(b.eng.Check())
	s := b.eng.Stats().Scheduler
	if u := s.Blocks; s.Running+s.Waiting+u.Used+u.Pinned+u.Leaving != 0 {
		b.t.Errorf("left in the engine: %+v", s)
	}
	b.must(b.n.Check())
	b.n.mu.Lock()
	defer b.n.mu.Unlock()
	if b.n.line.Len()+len(b.n.jobs) != 0 {
		b.t.Errorf("left in the node: %d jobs, %d in the line", len(b.n.jobs), b.n.line.Len())
	}
	if c := b.n.count; c.Accepted != c.Done+c.Cancelled+c.Failed {
		b.t.Errorf("%d accepted, but %+v", c.Accepted, c)
	}
	b.must(b.writer.Check())
	b.must(b.reader.Check())
}

func (b *bed) close() {
	b.t.Helper()
	b.idle()
	b.dec.pool.Close()
	b.must(b.writer.Close())
	b.must(b.reader.Close())
	for _, f := range b.stop {
		f()
	}
	<-b.eng.Done()
}

// decodePeer is a connection of a decode node.
type decodePeer struct {
	b    *bed
	pool *rpc.Pool
	conn *rpc.Conn

	mu sync.Mutex
	by map[uint64]*ask
}

// ask is one Prefill and what was answered.
type ask struct {
	d      *decodePeer
	id     uint64
	m      *nodepb.Prefill
	wants  chan struct{} // closed when a grant is asked for
	asked  time.Time
	queued []uint32
	done   *nodepb.PrefillDone
	end    *nodepb.End
	over   chan struct{}
	lease  kvtransfer.LeaseID
	pages  []int32
	from   int
}

func (b *bed) decode(name string) *decodePeer {
	b.t.Helper()
	d := &decodePeer{b: b, by: map[uint64]*ask{}}
	d.pool = rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: name}, Dial: b.net.Dial}, d)
	var err error
	d.conn, err = d.pool.Get(context.Background(), "prefill")
	b.must(err)
	return d
}

func (d *decodePeer) Closed(*rpc.Conn, error) {}

func (d *decodePeer) Frame(_ *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	if t == rpc.FrameHello {
		return
	}
	m, err := rpc.Decode(t, payload)
	if err != nil {
		d.b.t.Error(err)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.by[stream]
	if a.done != nil || a.end != nil {
		d.b.t.Errorf("%v after the answer", m)
		return
	}
	switch m := m.(type) {
	case *nodepb.Queued:
		a.queued = append(a.queued, m.Position)
	case *nodepb.GrantRequest:
		a.asked = time.Now()
		close(a.wants)
	case *nodepb.PrefillDone:
		a.done = m
		close(a.over)
	case *nodepb.End:
		a.end = m
		close(a.over)
	}
}

// tokens are n that differ by salt.
func tokens(n, salt int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32((i*i + salt*11) % vocab)
	}
	return out
}

// ask sends a Prefill.
func (d *decodePeer) ask(tokens []int32, change func(*nodepb.Prefill)) *ask {
	d.b.t.Helper()
	a := &ask{d: d, id: d.conn.NewStream(), wants: make(chan struct{}), over: make(chan struct{})}
	a.m = &nodepb.Prefill{RequestId: "r", Attempt: 1, Tokens: tokens, Fingerprint: 5, NumericsClass: "class", Layout: 9, Kv: "blocks of 16"}
	if change != nil {
		change(a.m)
	}
	d.mu.Lock()
	d.by[a.id] = a
	d.mu.Unlock()
	d.b.must(d.conn.Send(rpc.FramePrefill, a.id, a.m))
	return a
}

// grant lets it write pages first, first+1, … of the decode node.
func (a *ask) grant(first, from int) { a.grantFor(first, from, 10*time.Second) }

func (a *ask) grantFor(first, from int, duration time.Duration) {
	b := a.d.b
	b.t.Helper()
	<-a.wants
	a.from = from
	for i := range (len(a.m.Tokens) - from + blockTokens - 1) / blockTokens {
		a.pages = append(a.pages, int32(first+i))
	}
	g, err := b.reader.Grant(kvtransfer.GrantRequest{Pages: a.pages, Duration: duration})
	if err != nil {
		b.t.Error(err)
		return
	}
	a.d.mu.Lock()
	a.lease = g.Lease
	a.d.mu.Unlock()
	a.send(rpc.FrameGrant, &nodepb.Grant{Grant: g.Wire, From: uint32(from), UpTo: uint32(len(a.m.Tokens))})
}

// send may find the connection closed by the test.
func (a *ask) send(t rpc.Type, m proto.Message) { _ = a.d.conn.Send(t, a.id, m) }

// arrived wants its push complete and right.
func (a *ask) arrived(computed int) {
	b := a.d.b
	b.t.Helper()
	<-a.over
	if a.done == nil || int(a.done.ComputedTokens) != computed || int(a.done.CachedTokens) != len(a.m.Tokens)-computed {
		b.t.Errorf("%v, %v; want %d computed", a.done, a.end, computed)
		return
	}
	for l := range layers {
		for i, t := range a.m.Tokens[a.from:] {
			if got := binary.LittleEndian.Uint32(b.kv.at(l, int(a.pages[i/blockTokens]), i%blockTokens)); got != kvOf(t, l) {
				b.t.Fatalf("layer %d, token %d: %d landed, want %d", l, a.from+i, got, kvOf(t, l))
			}
		}
	}
	if kinds := a.kinds(); !slices.Equal(kinds, []kvtransfer.EventKind{kvtransfer.Arrived}) {
		b.t.Errorf("lease: %v", kinds)
	}
}

// ended wants an End.
func (a *ask) ended(code nodepb.Code) {
	a.d.b.t.Helper()
	<-a.over
	if a.end == nil || a.end.Code != code || a.end.Message == "" {
		a.d.b.t.Errorf("%v, %v; want %v", a.done, a.end, code)
	}
}

// revoke ends its lease from the decode node's side.
func (a *ask) revoke() {
	a.d.mu.Lock()
	lease := a.lease
	a.d.mu.Unlock()
	a.d.b.reader.Cancel(lease)
}

// kinds is what became of the lease.
func (a *ask) kinds() (out []kvtransfer.EventKind) {
	time.Sleep(2 * time.Second) // past any quarantine
	b := a.d.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, ev := range b.events[a.lease] {
		out = append(out, ev.Kind)
	}
	return out
}

// lost wants the lease over without arrival.
func (a *ask) lost() {
	a.d.b.t.Helper()
	if kinds := a.kinds(); !slices.Equal(kinds, []kvtransfer.EventKind{kvtransfer.Failed, kvtransfer.Released}) {
		a.d.b.t.Errorf("lease: %v", kinds)
	}
}
