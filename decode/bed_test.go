package decode

import (
	"context"
	"errors"
	"fmt"
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

// The tests run a decode node in virtual time, between a gateway and prefill
// nodes that do as the test says. The model takes stepTime for a step and says
// tokenAt(position); what KV does to tokens is the business of other tests.

const (
	vocab    = 64
	maxLen   = 128
	stepTime = time.Millisecond
)

func tokenAt(position int) int32 { return int32((position*7 + 3) % vocab) }

type model struct {
	backend.Backend
	fail chan error   // of the next step
	slow atomic.Int64 // nanoseconds that the next step takes more
}

func (m *model) VocabSize() int      { return vocab }
func (m *model) Logits() backend.Buf { return 0 }

func (m *model) Step(s *backend.Step, _ func(int)) error {
	time.Sleep(stepTime + time.Duration(m.slow.Swap(0)))
	select {
	case err := <-m.fail:
		return err
	default:
	}
	for i, o := range s.Outputs {
		s.Sampled[i] = tokenAt(int(o.Position))
	}
	return nil
}

// reader plays kvtransfer: leases that arrive or fail when the test says so.
type reader struct {
	n      *Node
	mu     sync.Mutex
	last   kvtransfer.LeaseID
	live   map[kvtransfer.LeaseID]bool
	refuse error
	events sync.WaitGroup
}

func (r *reader) Grant(g kvtransfer.GrantRequest) (kvtransfer.Grant, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuse != nil {
		return kvtransfer.Grant{}, r.refuse
	}
	r.last++
	r.live[r.last] = true
	return kvtransfer.Grant{Lease: r.last, Wire: []byte{byte(r.last)}}, nil
}

// over ends a lease; false: it was over.
func (r *reader) over(id kvtransfer.LeaseID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.live[id]
	delete(r.live, id)
	return was
}

func (r *reader) Cancel(id kvtransfer.LeaseID) bool {
	if !r.over(id) {
		return false
	}
	r.events.Go(func() { r.failed(id, kvtransfer.ErrCancelled) })
	return true
}

func (r *reader) arrive(id kvtransfer.LeaseID) {
	if r.over(id) {
		r.n.TransferEvent(kvtransfer.Event{Kind: kvtransfer.Arrived, Lease: id})
	}
}

func (r *reader) fail(id kvtransfer.LeaseID, err error) {
	if r.over(id) {
		r.failed(id, err)
	}
}

// failed tells the end of a lease, whose pages stay in quarantine for a while.
func (r *reader) failed(id kvtransfer.LeaseID, err error) {
	r.n.TransferEvent(kvtransfer.Event{Kind: kvtransfer.Failed, Lease: id, Err: err})
	time.Sleep(20 * time.Millisecond)
	r.n.TransferEvent(kvtransfer.Event{Kind: kvtransfer.Released, Lease: id})
}

// peer is a prefill node that does what its script says on each Prefill.
type peer struct {
	b      *bed
	addr   string
	script func(c *rpc.Conn, stream uint64, p *nodepb.Prefill)

	mu      sync.Mutex
	asked   []*nodepb.Prefill
	grants  []*nodepb.Grant
	cancels int
	waits   int // frames that say that a grant waits for room
	grant   func(c *rpc.Conn, stream uint64, g *nodepb.Grant)
}

func (p *peer) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	if t == rpc.FrameHello {
		return
	}
	m, err := rpc.Decode(t, payload)
	if err != nil {
		p.b.t.Error(err)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch m := m.(type) {
	case *nodepb.Prefill:
		p.asked = append(p.asked, m)
		if p.script != nil {
			go p.script(c, stream, m)
		}
	case *nodepb.Grant:
		p.grants = append(p.grants, m)
		if p.grant != nil {
			go p.grant(c, stream, m)
		}
	case *nodepb.Queued:
		p.waits++
	case *nodepb.Cancel:
		p.cancels++
	}
}

func (p *peer) Closed(*rpc.Conn, error) {}

// waited is how many frames said that a grant waits for room.
func (p *peer) waited() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waits
}

func (p *peer) seen() (asked, cancels int, grants []*nodepb.Grant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.asked), p.cancels, slices.Clone(p.grants)
}

// send is a frame that the test may find refused, where a connection is over.
func send(c *rpc.Conn, t rpc.Type, stream uint64, m proto.Message) { _ = c.Send(t, stream, m) }

// asks is the script of a node that asks for its grant at once.
func asks(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
	send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
}

// bed is a decode node under test.
type bed struct {
	t      *testing.T
	net    *rpc.Network
	o      Options
	model  *model
	eng    *engine.Engine
	n      *Node
	reader *reader
	gw     *gatewayPeer
	stop   []func()
}

func newBed(t *testing.T, change func(*Options, *scheduler.Config, *rpc.Options)) *bed {
	t.Helper()
	b := &bed{t: t, net: rpc.NewNetwork(), model: &model{fail: make(chan error, 1)}}
	c := scheduler.Config{Pool: kvcache.Config{Blocks: 32, BlockTokens: 8}, MaxSeqs: 4, MaxBatchedTokens: 64, MaxModelLen: maxLen}
	hello := &nodepb.Hello{NodeId: "decode", Role: "decode", Fingerprint: 5, NumericsClass: "class"}
	ro := rpc.Options{Hello: hello}
	b.reader = &reader{live: map[kvtransfer.LeaseID]bool{}}
	b.o = Options{
		Reader: b.reader, MaxModelLen: maxLen, BlockTokens: 8, Bundle: &nodepb.Bundle{Model: "m"},
		Identity: Identity{Model: "m", Fingerprint: 5, Class: "class", Layout: 9},
		Dial: func(h rpc.Handler) Dialer {
			p := rpc.NewPool(rpc.Options{Hello: hello, Dial: b.net.Dial}, h)
			b.stop = append(b.stop, p.Close)
			return p
		},
	}
	if change != nil {
		change(&b.o, &c, &ro)
	}
	var err error
	b.eng, err = engine.New(engine.Options{
		Model: b.model, Backend: b.model, Scheduler: c, OnStep: func() { b.n.Flush() },
		KV: backend.UniformKV(1, c.Pool.Blocks, 8, 1, 2, backend.F32),
	})
	if err != nil {
		t.Fatal(err)
	}
	b.o.Engine = b.eng
	b.n = New(b.o)
	b.reader.n = b.n
	ctx, cancel := context.WithCancel(t.Context())
	b.stop = append(b.stop, cancel)
	go b.eng.Run(ctx)
	go b.n.Heartbeats(ctx)
	b.serve("decode", ro, b.n)
	b.gw = b.gateway("gateway", rpc.Options{})
	return b
}

func (b *bed) serve(addr string, o rpc.Options, h rpc.Handler) {
	l, err := b.net.Listen(addr)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- rpc.Serve(ctx, l, o, h) }()
	b.stop = append(b.stop, func() {
		cancel()
		if err := <-served; err != nil {
			b.t.Error(err)
		}
	})
}

// peer starts a prefill node.
func (b *bed) peer(addr string, script func(*rpc.Conn, uint64, *nodepb.Prefill)) *peer {
	p := &peer{b: b, addr: addr, script: script}
	b.serve(addr, rpc.Options{Hello: &nodepb.Hello{NodeId: addr, Fingerprint: 5, NumericsClass: "class"}}, p)
	return p
}

// delivers is a node whose pushes arrive a moment after the grant.
func (b *bed) delivers(addr string) *peer {
	p := b.peer(addr, asks)
	p.grant = func(c *rpc.Conn, stream uint64, g *nodepb.Grant) {
		if g.Refused == 0 {
			time.Sleep(3 * time.Millisecond)
			b.reader.arrive(kvtransfer.LeaseID(g.Grant[0]))
			send(c, rpc.FramePrefillDone, stream, &nodepb.PrefillDone{})
		}
	}
	return p
}

// close ends the bed and wants nothing left behind.
func (b *bed) close() {
	b.t.Helper()
	b.gw.pool.Close()
	time.Sleep(time.Second) // quarantines, queues
	b.reader.events.Wait()
	if err := b.eng.Check(); err != nil {
		b.t.Error(err)
	}
	s := b.eng.Stats().Scheduler
	if u := s.Blocks; s.Running+s.Waiting+s.Held+s.Reservations+u.Used+u.Pinned+u.Arriving != 0 {
		b.t.Errorf("left in the engine: %+v", s)
	}
	if err := b.n.Check(); err != nil {
		b.t.Error(err)
	}
	b.n.mu.Lock()
	if n := b.n; len(n.attempts)+len(n.fetches)+len(n.leases)+len(n.gateways)+n.owners != 0 {
		b.t.Errorf("left in the node: %d attempts, %d fetches, %d leases, %d gateways, %d owners",
			len(n.attempts), len(n.fetches), len(n.leases), len(n.gateways), n.owners)
	}
	b.n.mu.Unlock()
	for i := len(b.stop) - 1; i >= 0; i-- {
		b.stop[i]()
	}
}

// gatewayPeer is a gateway that insists on the protocol.
type gatewayPeer struct {
	b    *bed
	pool *rpc.Pool
	conn *rpc.Conn

	mu     sync.Mutex
	by     map[uint64]*stream
	stats  *nodepb.Stats
	bundle *nodepb.Bundle
	closed error
	stall  chan struct{} // when set, frames wait for it to close
}

type stream struct {
	id       uint64
	attempt  uint32
	next     uint32
	tokens   []int32
	accepted []uint32 // cached tokens of each
	finish   nodepb.FinishReason
	end      *nodepb.End
	over     bool
	done     chan struct{}
}

func (b *bed) gateway(name string, o rpc.Options) *gatewayPeer {
	b.t.Helper()
	g := &gatewayPeer{b: b, by: map[uint64]*stream{}}
	o.Hello, o.Dial = &nodepb.Hello{NodeId: name, Role: "gateway"}, b.net.Dial
	g.pool = rpc.NewPool(o, g)
	c, err := g.pool.Get(context.Background(), "decode")
	if err != nil {
		b.t.Fatal(err)
	}
	g.conn = c
	return g
}

func (g *gatewayPeer) Frame(_ *rpc.Conn, t rpc.Type, id uint64, payload []byte) {
	g.mu.Lock()
	stall := g.stall
	g.mu.Unlock()
	if stall != nil {
		<-stall
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if t == rpc.FrameTokens {
		if err := rpc.DecodeTokens(payload, g.token); err != nil {
			g.b.t.Error(err)
		}
		return
	}
	m, err := rpc.Decode(t, payload)
	if err != nil {
		g.b.t.Error(err)
		return
	}
	s := g.by[id]
	switch m := m.(type) {
	case *nodepb.Stats:
		g.stats = m
	case *nodepb.Bundle:
		g.bundle = m
	case *nodepb.Accepted:
		if s.over || m.Attempt != s.attempt {
			g.b.t.Errorf("stream %d: accepted %v, over %t", id, m, s.over)
		}
		s.accepted = append(s.accepted, m.CachedTokens)
	case *nodepb.End:
		if s.over || m.Attempt != s.attempt {
			g.b.t.Errorf("stream %d: %v, over %t", id, m, s.over)
			return
		}
		s.end = m
		s.finished()
	}
}

func (s *stream) finished() {
	s.over = true
	close(s.done)
}

func (g *gatewayPeer) token(t rpc.Token) {
	s := g.by[t.Stream]
	if s.over || t.Attempt != s.attempt || t.Position != s.next || t.ID != tokenAt(int(t.Position)) {
		g.b.t.Errorf("stream %d: %+v, want position %d of attempt %d; over %t", t.Stream, t, s.next, s.attempt, s.over)
		return
	}
	s.next++
	s.tokens = append(s.tokens, t.ID)
	if t.Finish != 0 {
		s.finish = nodepb.FinishReason(t.Finish)
		s.finished()
	}
}

func (g *gatewayPeer) Closed(_ *rpc.Conn, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = err
	for _, s := range g.by {
		if !s.over {
			s.finished()
		}
	}
}

// ask starts an attempt.
func (g *gatewayPeer) ask(m *nodepb.Generate) *stream {
	g.b.t.Helper()
	s := &stream{id: g.conn.NewStream(), attempt: m.Attempt, next: uint32(len(m.Prompt) + len(m.Output)), done: make(chan struct{})}
	g.mu.Lock()
	g.by[s.id] = s
	g.mu.Unlock()
	if err := g.conn.Send(rpc.FrameGenerate, s.id, m); err != nil {
		g.b.t.Fatal(err)
	}
	return s
}

// want waits for a stream's good end.
func (b *bed) want(s *stream, nTokens int, reason nodepb.FinishReason) {
	b.t.Helper()
	<-s.done
	if s.end != nil || s.finish != reason || len(s.tokens) != nTokens {
		b.t.Errorf("%d tokens, finish %v, %v; want %d, %v", len(s.tokens), s.finish, s.end, nTokens, reason)
	}
}

// wantEnd waits for a stream's End.
func (b *bed) wantEnd(s *stream, code nodepb.Code) {
	b.t.Helper()
	<-s.done
	if s.end == nil || s.end.Code != code || s.end.Message == "" {
		b.t.Errorf("%d tokens, finish %v, %v; want %v", len(s.tokens), s.finish, s.end, code)
	}
}

// generate is a request of nPrompt tokens that differ by salt.
func generate(nPrompt, salt, maxTokens int, prefill ...string) *nodepb.Generate {
	g := &nodepb.Generate{
		RequestId: fmt.Sprintf("r%d", salt), Attempt: 1, MaxTokens: uint32(maxTokens), IgnoreEos: true, Model: "m",
		Prefill: prefill, Sampling: &nodepb.Sampling{Seed: 1},
	}
	for i := range nPrompt {
		g.Prompt = append(g.Prompt, int32((i*i+salt*11)%vocab))
	}
	return g
}

var errFire = errors.New("the device is on fire")

func tokenOf(position int) engine.Token {
	return engine.Token{ID: tokenAt(position), Position: position}
}
