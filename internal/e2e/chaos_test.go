package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// Two decode nodes and two prefill nodes, in virtual time, while everything that
// can go wrong does: connections are cut, silenced and lose frames, nodes stop
// and come back, drain, fail steps, leases are taken away, clients cancel, time
// out and start again elsewhere with what they have. Then the faults stop, and
//
//   - every attempt has ended once, and nothing followed its end;
//   - what a client got, over all its attempts, is a prefix of what the request
//     gets alone, token by token and logit by logit;
//   - no attempt, fetch, lease, reservation, pin, job or goroutine is left, and
//     the accounts of engine, pool, transfer and roles hold.

// counts is how often what happened, over all seeds.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

// storm is one seed's.
type storm struct {
	t          *testing.T
	seed       uint64
	count      *counts
	stepFaults float64
	failNext   atomic.Bool // the next step of any node fails
	tight      bool        // nodes have the least KV memory and the most requests
	outbox     int         // bytes that a node's connection holds; 0: the default
	faulty     atomic.Bool // frames may be lost now, and leases
	measured   *measured   // nil: nobody looks at nodes' metrics
	granted    func(l *leases, g kvtransfer.Grant)

	net    *rpc.Network
	rpc    wires
	kv     *kvWires
	probes *probes
	nodes  []*node                    // d0, d1, p0, p1
	bundle *nodepb.Bundle             // of the decode nodes; nil: nobody asks
	heard  func(addr string, up bool) // of nodes that stop and start; may be nil
	pool   *rpc.Pool

	mu sync.Mutex
	by map[clientKey]*attemptOf
}

type clientKey struct {
	conn   *rpc.Conn
	stream uint64
}

// attemptOf is one Generate as its client sees it.
type attemptOf struct {
	number    uint32
	next      uint32
	tokens    []int32
	finish    nodepb.FinishReason
	end       *nodepb.End
	lost      error
	over      bool
	cancelled bool // what comes after may still have been under way
	done      chan struct{}
}

func (c *storm) saw(what string) {
	c.count.mu.Lock()
	c.count.n[what]++
	c.count.mu.Unlock()
}

func (c *storm) errorf(format string, args ...any) {
	c.t.Errorf("seed %d: %s", c.seed, fmt.Sprintf(format, args...))
}

// dial keeps the connection for cutting.
func (c *storm) dial(ctx context.Context, addr string) (net.Conn, error) {
	return c.rpc.keep(c.net.Dial(ctx, addr))
}

// Frame is the client's side of the decode nodes' connections.
func (c *storm) Frame(conn *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch t {
	case rpc.FrameTokens:
		if err := rpc.DecodeTokens(payload, func(t rpc.Token) { c.token(conn, t) }); err != nil {
			c.errorf("%v", err)
		}
	case rpc.FrameEnd:
		e := new(nodepb.End)
		if err := proto.Unmarshal(payload, e); err != nil {
			c.errorf("%v", err)
		}
		a := c.by[clientKey{conn, stream}]
		if a.over {
			if !a.cancelled {
				c.errorf("stream %d: %v after the end (%v, %v)", stream, e, a.finish, a.end)
			}
			return
		}
		a.end = e
		a.finished()
	}
}

func (c *storm) token(conn *rpc.Conn, t rpc.Token) {
	a := c.by[clientKey{conn, t.Stream}]
	if a.cancelled {
		return
	}
	if a.over || t.Attempt != a.number || t.Position != a.next {
		c.errorf("stream %d: %+v, want position %d of attempt %d; over %t", t.Stream, t, a.next, a.number, a.over)
		return
	}
	a.next++
	a.tokens = append(a.tokens, t.ID)
	if t.Finish != 0 {
		a.finish = nodepb.FinishReason(t.Finish)
		a.finished()
	}
}

func (a *attemptOf) finished() {
	a.over = true
	close(a.done)
}

func (c *storm) Closed(conn *rpc.Conn, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, a := range c.by {
		if k.conn == conn && !a.over {
			a.lost = err
			a.finished()
		}
	}
}

// start sends one attempt.
func (c *storm) start(addr string, g *nodepb.Generate) (clientKey, *attemptOf, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	conn, err := c.pool.Get(ctx, addr)
	if err != nil {
		return clientKey{}, nil, err
	}
	a := &attemptOf{number: g.Attempt, next: uint32(len(g.Prompt) + len(g.Output)), done: make(chan struct{})}
	k := clientKey{conn, conn.NewStream()}
	c.mu.Lock()
	c.by[k] = a
	c.mu.Unlock()
	if err := conn.Send(rpc.FrameGenerate, k.stream, g); err != nil {
		c.mu.Lock()
		delete(c.by, k)
		c.mu.Unlock()
		return k, nil, err
	}
	return k, a, nil
}

// maxAttempts is more than the faults of a seed can cost one request.
const maxAttempts = 40

// client drives one request to its end, and holds what it got against want.
func (c *storm) client(rng *rand.Rand, g *nodepb.Generate, want trace) {
	time.Sleep(time.Duration(rng.IntN(80_000)) * time.Microsecond)
	var out []int32
	var last *nodepb.End
	give := time.Hour // when it loses interest, from the start of an attempt
	if rng.IntN(5) == 0 {
		give = time.Duration(rng.IntN(20_000)) * time.Microsecond
	}
	if rng.IntN(8) == 0 {
		g.DeadlineMs = uint64(1 + rng.IntN(40))
	}
	for attempt := uint32(1); attempt <= maxAttempts; attempt++ {
		q := proto.Clone(g).(*nodepb.Generate)
		q.Attempt, q.Output = attempt, out
		k, a, err := c.start(fmt.Sprintf("d%d", rng.IntN(2)), q)
		if err != nil {
			time.Sleep(time.Duration(50+rng.IntN(300)) * time.Millisecond)
			continue
		}
		select {
		case <-a.done:
		case <-time.After(give):
			c.mu.Lock()
			if !a.over {
				a.cancelled = true
				a.finished()
			}
			c.mu.Unlock()
			_ = k.conn.Send(rpc.FrameCancel, k.stream, &nodepb.Cancel{Reason: "client gone"}) // or the connection is
		}
		c.mu.Lock()
		out = slices.Concat(out, a.tokens)
		c.mu.Unlock()
		if len(out) > len(want.tokens) || !slices.Equal(out, want.tokens[:len(out)]) {
			c.errorf("request %s, attempt %d: %v is no prefix of %v", g.RequestId, attempt, out, want.tokens)
			return
		}
		if what := outcome(a); what != "" {
			if a.finish != 0 && len(out) != len(want.tokens) {
				c.errorf("request %s: finished with %d tokens of %d", g.RequestId, len(out), len(want.tokens))
			}
			c.saw(what)
			if attempt > 1 && what == "finished" {
				c.saw("finished on a later attempt")
			}
			return
		}
		c.saw("attempt lost")
		last = a.end
		time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
	}
	c.errorf("request %s: %d attempts, the last ended %v", g.RequestId, maxAttempts, last)
}

// outcome is how a request ended; empty when another attempt is due.
func outcome(a *attemptOf) string {
	switch {
	case a.cancelled:
		return "cancelled"
	case a.finish != 0:
		return "finished"
	case a.end.GetCode() == nodepb.Code_CODE_DEADLINE:
		return "deadline"
	case a.end.GetCode() == nodepb.Code_CODE_INVALID:
		return "invalid"
	}
	return ""
}

// fault does one thing that may happen to a cluster.
func (c *storm) fault(rng *rand.Rand) {
	n := c.nodes[rng.IntN(len(c.nodes))]
	switch rng.IntN(7) {
	case 0, 1:
		if c.rpc.cut(rng) {
			c.saw("rpc connection cut")
		}
	case 2:
		if c.kv.cut(rng) {
			c.saw("kv connection cut")
		}
	case 3:
		for _, n := range c.nodes {
			n.check("between faults")
		}
		c.saw("checked")
	case 4:
		c.silence(n, rng)
	case 5:
		c.restart(n, rng)
	case 6:
		c.roll(n, rng)
	}
}

// chaos runs one seed; want is what each request gets alone.
func chaos(t *testing.T, seed uint64, ds []*engine.Loaded, gs []*nodepb.Generate, want []trace, count *counts) {
	rng := rand.New(rand.NewPCG(seed, 17))
	c := &storm{
		t: t, seed: seed, count: count, net: rpc.NewNetwork(), kv: &kvWires{Mem: kvtransfer.NewMem(), seed: seed},
		probes: &probes{by: map[uint64]map[int]uint64{}}, by: map[clientKey]*attemptOf{},
	}
	if rng.IntN(3) == 0 {
		c.stepFaults = 0.01
	}
	for i, addr := range []string{"d0", "d1", "p0", "p1"} {
		n := &node{c: c, addr: addr, device: ds[i]}
		n.start(rng)
		c.nodes = append(c.nodes, n)
	}
	c.pool = rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: c.dial}, c)
	c.faulty.Store(rng.IntN(4) > 0)
	var clients sync.WaitGroup
	for i, g := range gs {
		mine := rand.New(rand.NewPCG(rng.Uint64(), 19))
		clients.Go(func() { c.client(mine, g, want[i]) })
	}
	for range 3 + rng.IntN(10) {
		time.Sleep(time.Duration(rng.IntN(25_000)) * time.Microsecond)
		c.fault(rng)
	}
	c.faulty.Store(false)
	clients.Wait()
	time.Sleep(time.Minute) // leases, quarantines, grants that nobody answers
	for _, n := range c.nodes {
		n.idle("after all")
		if n.decode != nil {
			k := n.decode.Counters()
			c.add("remote prefills", k.RemotePrefills)
			c.add("local prefills", k.LocalPrefills)
			c.add("prefill failures", k.PrefillFailures)
		}
		c.add("preemptions", n.eng.Stats().Scheduler.Preemptions)
	}
	c.pool.Close()
	for _, n := range c.nodes {
		n.kill()
	}
	for i, g := range gs {
		for pos, h := range c.probes.by[probeKey(g.Sampling.Seed, g.Sampling.Choice)] {
			if h != want[i].logits[pos] {
				c.errorf("request %s: logits differ at position %d", g.RequestId, pos)
			}
		}
	}
}

func (c *storm) add(what string, n uint64) {
	c.count.mu.Lock()
	c.count.n[what] += int(n)
	c.count.mu.Unlock()
}

func TestChaos(t *testing.T) {
	seeds := 40
	if os.Getenv("TANDEM_SOAK") != "" {
		seeds = 4000
	}
	kernels, count := native(), &counts{n: map[string]int{}}
	if testing.Short() || kernels == cpu.Portable { // which is many times slower
		seeds = min(seeds, 10)
	}
	dir := filepath.Join(checkpoints, "gqa-tied")
	ref := newAlone(t, campaigned{checkpoint: "gqa-tied", kernels: kernels})
	defer ref.f.close()
	vocab := ref.f.loaded[0].Model.VocabSize()
	ds := devices(t, dir, kernels, 4, engine.Adapters{})
	for seed := uint64(1); seed <= uint64(seeds) && !t.Failed(); seed++ {
		rng := rand.New(rand.NewPCG(seed, 7))
		var gs []*nodepb.Generate
		var want []trace
		for range 2 {
			for _, l := range schedule(rng, seed, vocab, false) {
				l.g.RequestId = fmt.Sprintf("s%d-r%d", seed, len(gs))
				l.g.Sampling.Seed = seed<<16 | uint64(len(gs))
				if rng.IntN(6) > 0 {
					l.g.Prefill = [][]string{{"p0"}, {"p1"}, {"p0", "p1"}, {"p1", "p0"}}[rng.IntN(4)]
				}
				gs = append(gs, l.g)
				want = append(want, ref.run(t, l.g))
			}
		}
		synctest.Test(t, func(t *testing.T) { chaos(t, seed, ds, gs, want, count) })
	}
	t.Logf("kernels %s, %d seeds: %v", kernels, seeds, count.n)
	if t.Failed() {
		return
	}
	for what, least := range map[string]int{
		"finished": 10 * seeds, "finished on a later attempt": seeds / 2, "cancelled": seeds / 2, "deadline": seeds / 8, "attempt lost": seeds,
		"remote prefills": seeds, "local prefills": seeds / 2, "prefill failures": seeds / 2, "preemptions": seeds / 20,
		"rpc connection cut": seeds / 2, "kv connection cut": seeds / 4, "lease taken away": seeds / 20, "silence": seeds / 4,
		"decode node stopped": seeds / 8, "prefill node stopped": seeds / 8, "node drained": seeds / 4, "failed step": seeds / 10,
		"lost Grant": seeds / 20, "lost GrantRequest": seeds / 20, "checked": seeds / 4,
	} {
		if got := count.n[what]; got < least {
			t.Errorf("%s: %d times, want %d: the campaign no longer covers this", what, got, least)
		}
	}
}
