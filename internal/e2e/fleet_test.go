package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/prefill"
)

// trace is what a request got: its tokens, and a hash of the logits behind
// each, by position.
type trace struct {
	tokens []int32
	logits map[int]uint64
	prompt *nodepb.PromptLogProbs // all of them; empty where they were not asked for
	err    string                 // why a constrained request cannot continue; empty: it can
}

func hashLogits(l []float32) uint64 {
	h := fnv.New64a()
	var b [4]byte
	for _, v := range l {
		u := math.Float32bits(v)
		b[0], b[1], b[2], b[3] = byte(u), byte(u>>8), byte(u>>16), byte(u>>24)
		_, _ = h.Write(b[:])
	}
	return h.Sum64()
}

// probes collects logit hashes by probeKey, which tests make unique.
type probes struct {
	mu sync.Mutex
	by map[uint64]map[int]uint64
	// gaps, when made, collects how far the best logit is from the second.
	gaps map[uint64]map[int]float32
}

// probeKey returns the key of a request's choice. Seeds have at most 60 bits.
func probeKey(seed uint64, choice uint32) uint64 { return seed ^ uint64(choice)<<60 }

func (p *probes) see(r *engine.Request, position int, logits []float32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := probeKey(r.Sampling.Seed, r.Sampling.Choice)
	if p.by[key] == nil {
		p.by[key] = make(map[int]uint64)
	}
	p.by[key][position] = hashLogits(logits)
	if p.gaps != nil {
		if p.gaps[r.Sampling.Seed] == nil {
			p.gaps[r.Sampling.Seed] = make(map[int]float32)
		}
		first, second := float32(math.Inf(-1)), float32(math.Inf(-1))
		for _, v := range logits {
			if v > first {
				first, second = v, first
			} else if v > second {
				second = v
			}
		}
		p.gaps[r.Sampling.Seed][position] = first - second
	}
}

// fleet is one decode node, perhaps a prefill node, and a client in the
// gateway's place, over in-memory networks.
type fleet struct {
	t       testing.TB
	net     *rpc.Network
	mem     *kvtransfer.Mem
	kvNet   kvtransfer.Network
	shared  bool
	tls     *tls.Config // nil: in the clear
	rdma    string      // libfabric's provider, or none
	gpu     bool        // it reaches GPUs' memory
	kvAddr  string      // where decode listens on it
	probes  *probes
	loaded  []*engine.Loaded
	decode  *decode.Node
	prefill *prefill.Node
	decEng  *engine.Engine
	preEng  *engine.Engine
	reader  *kvtransfer.Reader
	writer  *kvtransfer.Writer
	client  *client
	stop    []func()      // in reverse
	timeout time.Duration // of a request
}

// newFleet starts a fleet on in-memory networks; newFleetOver moves KV over
// another.
func newFleet(t testing.TB, dec engine.LoadOptions, pre *engine.LoadOptions) *fleet {
	t.Helper()
	return newFleetOver(t, nil, dec, pre)
}

// sharedTCP stands for the network whose decode nodes copy out of the prefill node's memory.
type sharedTCP struct{ kvtransfer.TCP }

// tlsTCP stands for the network on which KV is encrypted.
type tlsTCP struct {
	kvtransfer.TCP
	config *tls.Config
}

// nodesTLS is what nodes of one authority show each other.
func nodesTLS(t testing.TB) *tls.Config {
	t.Helper()
	dir := t.TempDir()
	if err := tlsconf.CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	node, err := tlsconf.IssueNode(dir, "node", []string{"127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	m, err := tlsconf.Load(node, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m.Server()
}

// rdmaTCP stands for the network beside which prefill nodes write into decode nodes' memory by a provider of libfabric.
type rdmaTCP struct {
	kvtransfer.TCP
	provider string
	gpu      bool // from one GPU's memory to the other's
}

func newFleetOver(t testing.TB, kv kvtransfer.Network, dec engine.LoadOptions, pre *engine.LoadOptions) *fleet {
	t.Helper()
	f := &fleet{t: t, net: rpc.NewNetwork(), mem: kvtransfer.NewMem(), probes: &probes{by: make(map[uint64]map[int]uint64)}, timeout: time.Minute}
	if dec.CUDALibrary != "" { // whose host twin is slow
		f.timeout = 5 * time.Minute
	}
	f.kvNet, f.kvAddr = kv, "127.0.0.1:0"
	if kv == nil {
		f.kvNet, f.kvAddr = f.mem, "decode-kv"
	}
	if shared, ok := kv.(sharedTCP); ok {
		f.kvNet, f.shared = shared.TCP, true
	}
	if secure, ok := kv.(tlsTCP); ok {
		f.kvNet, f.tls = secure.TCP, secure.config
	}
	if rdma, ok := kv.(rdmaTCP); ok {
		f.kvNet, f.rdma, f.gpu = rdma.TCP, rdma.provider, rdma.gpu
	}
	f.startDecode(dec)
	if pre != nil {
		f.startPrefill(*pre)
	}
	f.client = newClient()
	pool := rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: f.net.Dial}, f.client)
	f.stop = append(f.stop, pool.Close)
	conn, err := pool.Get(context.Background(), "decode")
	if err != nil {
		t.Fatal(err)
	}
	f.client.conn = conn
	return f
}

func (f *fleet) close() {
	for i := len(f.stop) - 1; i >= 0; i-- {
		f.stop[i]()
	}
}

// load puts a model on a device and starts its engine.
func (f *fleet) load(o engine.LoadOptions, onStep func()) (*engine.Loaded, *engine.Engine) {
	f.t.Helper()
	l, err := engine.Load(o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.loaded = append(f.loaded, l)
	eo := l.Options()
	eo.OnStep, eo.Probe = onStep, f.probes.see
	if eo.Vocabulary == nil {
		eo.GrammarLimits, eo.Vocabulary = grammar.DefaultLimits(), testVocabulary(l.Model.VocabSize())
	}
	eng, err := engine.New(eo)
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go eng.Run(ctx)
	f.stop = append(f.stop, func() {
		if err := eng.Check(); err != nil {
			f.t.Errorf("engine: %v", err)
		}
		cancel()
		<-eng.Done()
		if err := l.Close(); err != nil {
			f.t.Errorf("close: %v", err)
		}
	})
	return l, eng
}

func (f *fleet) serve(addr string, hello *nodepb.Hello, h rpc.Handler) {
	lis, err := f.net.Listen(addr)
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- rpc.Serve(ctx, lis, rpc.Options{Hello: hello}, h) }()
	f.stop = append(f.stop, func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Errorf("serve %s: %v", addr, err)
		}
	})
}

func hello(role string, l *engine.Loaded) *nodepb.Hello {
	return &nodepb.Hello{NodeId: role, Role: role, Model: "tiny", Fingerprint: l.Fingerprint, NumericsClass: l.Class}
}

func layout(l *engine.Loaded) kvtransfer.Layout {
	return kvtransfer.Layout{Regions: l.Regions(), PageBytes: l.KV.PageBytes, Hash: l.LayoutHash()}
}

func (f *fleet) startDecode(o engine.LoadOptions) {
	f.t.Helper()
	var n *decode.Node
	l, eng := f.load(o, func() { n.Flush() })
	f.decEng = eng
	reader, err := kvtransfer.NewReader(kvtransfer.ReaderOptions{
		Fabric: f.fabric(), Device: f.device(l),
		Node: "decode", Layout: layout(l), Memory: l, Network: f.kvNet, Listen: f.kvAddr, TLS: f.tls,
		OnEvent: func(ev kvtransfer.Event) { n.TransferEvent(ev) },
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.reader = reader
	f.stop = append(f.stop, func() {
		if err := reader.Close(); err != nil {
			f.t.Errorf("reader: %v", err)
		}
	})
	h := hello("decode", l)
	n = decode.New(decode.Options{
		Engine: eng, Reader: reader, MaxModelLen: l.Scheduler.MaxModelLen, BlockTokens: l.Scheduler.Pool.BlockTokens,
		Identity: decode.Identity{Model: "tiny", Fingerprint: l.Fingerprint, Class: l.Class, Layout: l.LayoutHash(), KV: l.KVText()},
		Dial: func(h2 rpc.Handler) decode.Dialer {
			p := rpc.NewPool(rpc.Options{Hello: h, Dial: f.net.Dial}, h2)
			f.stop = append(f.stop, p.Close)
			return p
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	f.decode = n
	f.serve("decode", h, n)
	f.stop = append(f.stop, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		n.Drain(ctx)
	})
}

// fabric opens the fleet's provider for one node; nil: it has none.
func (f *fleet) fabric() *fabric.Device {
	if f.rdma == "" {
		return nil
	}
	o := fabric.Options{Provider: f.rdma, GPU: f.gpu}
	if f.rdma == "tcp" {
		o.Address = "127.0.0.1"
	}
	d, err := fabric.Open(o)
	if errors.Is(err, fabric.ErrLibrary) {
		f.t.Skipf("needs libfabric (apt-get install libfabric1): %v", err)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	f.stop = append([]func(){func() { // after readers and writers
		if err := d.Close(); err != nil {
			f.t.Errorf("libfabric: %v", err)
		}
	}}, f.stop...)
	return d
}

// device is a node's KV in its GPU where that is what travels.
func (f *fleet) device(l *engine.Loaded) kvtransfer.DeviceMemory {
	if !f.gpu {
		return nil
	}
	return l.Direct()
}

func (f *fleet) startPrefill(o engine.LoadOptions) {
	f.t.Helper()
	wo := kvtransfer.WriterOptions{Node: "prefill", Network: f.kvNet, TLS: f.tls}
	if f.shared {
		var err error
		if wo.Shared, err = kvtransfer.NewShared(); err != nil {
			f.t.Fatal(err)
		}
		o.KVFile, wo.Transport = wo.Shared, kvtransfer.OverShared
		f.stop = append([]func(){func() { // after the engine, which reads it
			if err := wo.Shared.Close(); err != nil {
				f.t.Errorf("shared memory: %v", err)
			}
		}}, f.stop...)
	}
	if wo.Fabric = f.fabric(); wo.Fabric != nil {
		wo.Transport = kvtransfer.OverRDMA
	}
	l, eng := f.load(o, nil)
	f.preEng = eng
	wo.Layout, wo.Memory, wo.Device = layout(l), l, f.device(l)
	w, err := kvtransfer.NewWriter(wo)
	if err != nil {
		f.t.Fatal(err)
	}
	f.writer = w
	f.stop = append(f.stop, func() {
		if err := w.Close(); err != nil {
			f.t.Errorf("writer: %v", err)
		}
	})
	f.prefill = prefill.New(prefill.Options{
		Engine: eng, Writer: w,
		Identity: prefill.Identity{Fingerprint: l.Fingerprint, Class: l.Class, Layout: l.LayoutHash(), KV: l.KVText()},
	})
	f.serve("prefill", hello("prefill", l), f.prefill)
}

// client stands in for a gateway: it keeps each stream's tokens and insists on
// exact positions.
type client struct {
	conn *rpc.Conn
	mu   sync.Mutex
	by   map[uint64]*stream
}

type stream struct {
	attempt uint32
	next    uint32
	tokens  []int32
	prompt  nodepb.PromptLogProbs
	finish  uint8
	err     error
	done    chan struct{}
}

func newClient() *client { return &client{by: make(map[uint64]*stream)} }

func (c *client) Frame(_ *rpc.Conn, t rpc.Type, id uint64, payload []byte) {
	switch t {
	case rpc.FrameTokens:
		if err := rpc.DecodeTokens(payload, c.token); err != nil {
			panic(err)
		}
	case rpc.FramePromptProbs:
		m := new(nodepb.PromptLogProbs)
		if err := proto.Unmarshal(payload, m); err != nil {
			panic(err)
		}
		c.promptProbs(id, m)
	case rpc.FrameEnd:
		e := new(nodepb.End)
		if err := proto.Unmarshal(payload, e); err != nil {
			panic(err)
		}
		c.end(id, fmt.Errorf("%s: %s", e.Code, e.Message))
	}
}

func (c *client) Closed(_ *rpc.Conn, err error) {
	c.mu.Lock()
	ids := make([]uint64, 0, len(c.by))
	for id := range c.by {
		ids = append(ids, id)
	}
	c.mu.Unlock()
	for _, id := range ids {
		c.end(id, err)
	}
}

func (c *client) token(t rpc.Token) {
	c.mu.Lock()
	s := c.by[t.Stream]
	c.mu.Unlock()
	if s == nil {
		return
	}
	if t.Position != s.next || t.Attempt != s.attempt {
		c.end(t.Stream, fmt.Errorf("token at position %d of attempt %d, want %d of %d", t.Position, t.Attempt, s.next, s.attempt))
		return
	}
	s.next++
	s.tokens = append(s.tokens, t.ID)
	if t.Finish != 0 {
		s.finish = t.Finish
		c.end(t.Stream, nil)
	}
}

// promptProbs puts a prompt's log-probabilities together, which come in order
// and before any token.
func (c *client) promptProbs(id uint64, m *nodepb.PromptLogProbs) {
	c.mu.Lock()
	s := c.by[id]
	c.mu.Unlock()
	if s == nil {
		return
	}
	p := &s.prompt
	if int(m.First) != len(p.Logprobs)+1 || m.Attempt != s.attempt || len(s.tokens) > 0 {
		c.end(id, fmt.Errorf("log-probabilities from %d on after %d, %d tokens are out", m.First, len(p.Logprobs), len(s.tokens)))
		return
	}
	p.Logprobs, p.Ranks = append(p.Logprobs, m.Logprobs...), append(p.Ranks, m.Ranks...)
	p.TopTokens, p.TopLogprobs = append(p.TopTokens, m.TopTokens...), append(p.TopLogprobs, m.TopLogprobs...)
}

func (c *client) end(id uint64, err error) {
	c.mu.Lock()
	s := c.by[id]
	delete(c.by, id)
	c.mu.Unlock()
	if s != nil {
		s.err = err
		close(s.done)
	}
}

// generate starts a request.
func (c *client) generate(g *nodepb.Generate) (*stream, uint64, error) {
	s := &stream{attempt: g.Attempt, next: uint32(len(g.Prompt) + len(g.Output)), done: make(chan struct{})}
	id := c.conn.NewStream()
	c.mu.Lock()
	c.by[id] = s
	c.mu.Unlock()
	return s, id, c.conn.Send(rpc.FrameGenerate, id, g)
}
