package prefill

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// vectorPeer is a connection of a gateway that asks for vectors.
type vectorPeer struct {
	b    *bed
	pool *rpc.Pool
	conn *rpc.Conn
	mu   sync.Mutex
	by   map[uint64]*vectorAsk
	last *nodepb.Stats
}

// vectorAsk is one Generate and its answers.
type vectorAsk struct {
	p        *vectorPeer
	id       uint64
	g        *nodepb.Generate
	accepted []uint32 // cached tokens
	vector   *nodepb.Vector
	end      *nodepb.End
	over     chan struct{}
}

func (b *bed) gateway() *vectorPeer {
	b.t.Helper()
	p := &vectorPeer{b: b, by: map[uint64]*vectorAsk{}}
	p.pool = rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "gateway", Role: "gateway"}, Dial: b.net.Dial}, p)
	var err error
	p.conn, err = p.pool.Get(context.Background(), "prefill")
	b.must(err)
	return p
}

func (p *vectorPeer) Closed(*rpc.Conn, error) {}

func (p *vectorPeer) Frame(_ *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
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
	if s, ok := m.(*nodepb.Stats); ok {
		p.last = s
		return
	}
	a := p.by[stream]
	if a.vector != nil || a.end != nil {
		p.b.t.Errorf("%v after the answer", m)
		return
	}
	switch m := m.(type) {
	case *nodepb.Accepted:
		a.accepted = append(a.accepted, m.CachedTokens)
		return
	case *nodepb.Vector:
		a.vector = m
	case *nodepb.End:
		a.end = m
	default:
		p.b.t.Errorf("a gateway got %v", m)
		return
	}
	close(a.over)
}

// ask sends a Generate for a vector.
func (p *vectorPeer) ask(tokens []int32, change func(*nodepb.Generate)) *vectorAsk {
	p.b.t.Helper()
	a := &vectorAsk{p: p, id: p.conn.NewStream(), over: make(chan struct{})}
	a.g = &nodepb.Generate{RequestId: "v", Attempt: 3, Prompt: tokens, Pooling: &nodepb.Pooling{Kind: nodepb.PoolingKind_POOLING_KIND_LAST, Version: rpc.VectorVersion}}
	if change != nil {
		change(a.g)
	}
	p.mu.Lock()
	p.by[a.id] = a
	p.mu.Unlock()
	p.b.must(p.conn.Send(rpc.FrameGenerate, a.id, a.g))
	return a
}

// answers returns how many answers have come: at most one.
func (a *vectorAsk) answers() int {
	select {
	case <-a.over:
		return 1
	default:
		return 0
	}
}

// answered wants the vector.
func (a *vectorAsk) answered(want []float32) {
	a.p.b.t.Helper()
	<-a.over
	if a.vector == nil || a.vector.Attempt != 3 || !slices.Equal(a.vector.Values, want) || len(a.accepted) == 0 || a.accepted[0] != 0 {
		a.p.b.t.Errorf("%v, %v, accepted %v; want %v", a.vector, a.end, a.accepted, want)
	}
}

// ended wants an End of the attempt.
func (a *vectorAsk) ended(code nodepb.Code) {
	a.p.b.t.Helper()
	<-a.over
	if a.end == nil || a.end.Code != code || a.end.Message == "" || a.end.Attempt != 3 {
		a.p.b.t.Errorf("%v, %v; want %v", a.vector, a.end, code)
	}
}

// Vectors are those of their prompts, alone, in chunks, from the cache and among jobs for KV, and
// hold nothing after their answer.
func TestVectors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.MaxRunning = 4 })
		defer b.close()
		p := b.gateway()
		defer p.pool.Close()
		p.ask(tokens(9, 1), nil).answered(rowOf(tokens(9, 1)))
		p.ask(tokens(100, 2), nil).answered(rowOf(tokens(100, 2)))
		again := p.ask(tokens(100, 2), nil)
		again.answered(rowOf(tokens(100, 2)))
		if !slices.Equal(again.accepted, []uint32{0, 96}) {
			t.Errorf("accepted with %v cached tokens", again.accepted)
		}
		prompt, sum := tokens(40, 3), [2]float64{}
		for i := range prompt {
			row := rowOf(prompt[:i+1])
			sum[0], sum[1] = sum[0]+float64(row[0]), sum[1]+float64(row[1])
		}
		mean := func(g *nodepb.Generate) { g.Pooling.Kind = nodepb.PoolingKind_POOLING_KIND_MEAN }
		p.ask(prompt, mean).answered([]float32{float32(sum[0] / 40), float32(sum[1] / 40)})

		long := b.dec.ask(tokens(160, 4), nil)
		long.grant(0, 0)
		time.Sleep(layerTime)
		short := p.ask(tokens(9, 5), nil)
		short.answered(rowOf(tokens(9, 5)))
		select {
		case <-long.over:
			t.Error("the short vector waited for the long prompt")
		default:
		}
		long.arrived(160)
		if c := b.n.Counters(); c.Accepted != 6 || c.Done != 6 {
			t.Errorf("%+v", c)
		}
		b.n.Heartbeat()
		time.Sleep(10 * time.Millisecond)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.last.GetMaxRunning() != 4 || p.last.QueuedTokens != 0 {
			t.Errorf("%v", p.last)
		}
	})
}

// A vector and a job for KV wait in one line: the lesser work goes first, and neither starves the
// other.
func TestVectorsWaitInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.RunAheadTokens = 50 })
		defer b.close()
		p := b.gateway()
		defer p.pool.Close()
		b.model.layer.Store(int64(time.Second))
		first := p.ask(tokens(90, 1), nil)
		synctest.Wait()
		last, second := p.ask(tokens(90, 2), nil), p.ask(tokens(80, 3), nil)
		job := b.dec.ask(tokens(85, 4), nil)
		synctest.Wait()
		b.n.mu.Lock()
		m := &nodepb.Stats{}
		b.n.addStats(m, scheduler.Stats{})
		b.n.mu.Unlock()
		if m.Waiting != 3 || m.QueuedTokens != 255 {
			t.Errorf("%v: want three that wait, of 90, 80 and 85 tokens", m)
		}
		first.answered(rowOf(tokens(90, 1)))
		second.answered(rowOf(tokens(80, 3)))
		if job.grant(0, 0); last.answers() > 0 {
			t.Error("the longest prompt was computed before a shorter job")
		}
		job.arrived(85)
		last.answered(rowOf(tokens(90, 2)))
		b.dec.mu.Lock()
		defer b.dec.mu.Unlock()
		if len(job.queued) == 0 || job.queued[0] != 2 {
			t.Errorf("positions %v, want the second first", job.queued)
		}
	})
}

func TestVectorsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.MaxQueued, o.RunAheadTokens, o.Identity.Model = 1, 50, "m" })
		defer b.close()
		p := b.gateway()
		defer p.pool.Close()
		cases := map[string]struct {
			change func(*nodepb.Generate)
			code   nodepb.Code
		}{
			"for tokens":   {func(g *nodepb.Generate) { g.Pooling, g.MaxTokens = nil, 4 }, nodepb.Code_CODE_MISMATCH},
			"version":      {func(g *nodepb.Generate) { g.Pooling.Version++ }, nodepb.Code_CODE_MISMATCH},
			"kind":         {func(g *nodepb.Generate) { g.Pooling.Kind = 99 }, nodepb.Code_CODE_INVALID},
			"max_tokens":   {func(g *nodepb.Generate) { g.MaxTokens = 1 }, nodepb.Code_CODE_INVALID},
			"no tokens":    {func(g *nodepb.Generate) { g.Prompt = nil }, nodepb.Code_CODE_INVALID},
			"short digest": {func(g *nodepb.Generate) { g.PrefixDigest = make([]byte, 15) }, nodepb.Code_CODE_INVALID},
			"other model":  {func(g *nodepb.Generate) { g.Model = "other" }, nodepb.Code_CODE_NOT_FOUND},
			"adapter":      {func(g *nodepb.Generate) { g.Adapter = &nodepb.Adapter{Name: "a"} }, nodepb.Code_CODE_MISMATCH},
			"vocabulary":   {func(g *nodepb.Generate) { g.Prompt[15] = vocab }, nodepb.Code_CODE_INVALID},
			"too long":     {func(g *nodepb.Generate) { g.Prompt = make([]int32, 201) }, nodepb.Code_CODE_INVALID},
			"no scores":    {func(g *nodepb.Generate) { g.Pooling.Kind = nodepb.PoolingKind_POOLING_KIND_SCORES }, nodepb.Code_CODE_MISMATCH},
			"with output":  {func(g *nodepb.Generate) { g.Output = []int32{1} }, nodepb.Code_CODE_MISMATCH},
		}
		for name, c := range cases {
			a := p.ask(tokens(16, 1), c.change)
			if a.ended(c.code); t.Failed() {
				t.Fatal(name)
			}
		}
		b.model.layer.Store(int64(time.Second))
		whole := p.ask(tokens(200, 1), func(g *nodepb.Generate) { g.Model = "m" }) // the whole context
		waits := p.ask(tokens(90, 2), nil)
		p.ask(tokens(90, 4), nil).ended(nodepb.Code_CODE_OVERLOADED)
		b.n.StartDrain()
		p.ask(tokens(16, 4), nil).ended(nodepb.Code_CODE_DRAINING)
		whole.answered(rowOf(tokens(200, 1)))
		waits.answered(rowOf(tokens(90, 2)))
	})
}

// A vector's job ends at each moment: of its turn, while it is computed, and with its peer.
func TestVectorsEnd(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(b *bed, p *vectorPeer, running, waiting *vectorAsk)
		code nodepb.Code // of both; 0: no answer is sent
	}{
		"cancel": {end: func(b *bed, p *vectorPeer, running, waiting *vectorAsk) {
			for _, a := range []*vectorAsk{running, waiting} {
				b.must(p.conn.Send(rpc.FrameCancel, a.id, &nodepb.Cancel{}))
			}
		}},
		"gone": {end: func(_ *bed, p *vectorPeer, _, _ *vectorAsk) { p.pool.Close() }},
		"drain": {end: func(b *bed, _ *vectorPeer, _, _ *vectorAsk) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			b.n.Drain(ctx)
		}, code: nodepb.Code_CODE_DRAINING},
		"deadline": {end: func(*bed, *vectorPeer, *vectorAsk, *vectorAsk) { time.Sleep(2 * time.Second) }, code: nodepb.Code_CODE_DEADLINE},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, func(o *Options, _ *scheduler.Config) { o.RunAheadTokens = 50 })
				defer b.close()
				b.model.layer.Store(int64(time.Second))
				p := b.gateway()
				defer p.pool.Close()
				deadline := func(g *nodepb.Generate) { g.DeadlineMs = 1500 }
				running, waiting := p.ask(tokens(150, 1), deadline), p.ask(tokens(150, 3), deadline)
				time.Sleep(100 * time.Millisecond)
				if waits, _, all := b.n.Queued(); waits != 1 || all != 2 {
					t.Errorf("%d of %d jobs wait", waits, all)
				}
				if c.end(b, p, running, waiting); c.code != 0 {
					running.ended(c.code)
					waiting.ended(c.code)
				}
				b.model.layer.Store(0)
				time.Sleep(5 * time.Second)
				if _, _, all := b.n.Queued(); all != 0 || c.code == 0 && running.answers()+waiting.answers() > 0 {
					t.Errorf("%d jobs are left, %d and %d answers", all, running.answers(), waiting.answers())
				}
			})
		})
	}
}

// A step that fails ends the vectors in it with the engine's error.
func TestVectorsOfFailedStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.gateway()
		defer p.pool.Close()
		a := p.ask(tokens(90, 1), nil)
		time.Sleep(layerTime)
		b.model.fail <- errors.New("the device is on fire")
		a.ended(nodepb.Code_CODE_INTERNAL)
		p.ask(tokens(90, 1), nil).answered(rowOf(tokens(90, 1)))
	})
}

// A Generate that does not parse is refused, and the connection stays.
func TestGarbledVector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		b.n.Frame(b.dec.conn, rpc.FrameGenerate, 1<<40, []byte{0xff})
		if c := b.n.Counters(); c.Refused != 1 {
			t.Errorf("%+v", c)
		}
	})
}
