package decode

import (
	"bytes"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

func TestRemotePrefill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.delivers("p1")
		g := generate(30, 1, 5, "p1")
		g.PrefixRoot, g.Priority, g.Output = 77, 2, []int32{4, 5}
		g.PrefixDigest = bytes.Repeat([]byte{7}, 16)
		b.want(b.gw.ask(g), 3, length)
		asked, _, grants := p.seen()
		if asked != 1 || len(grants) != 1 || grants[0].From != 0 || grants[0].UpTo != 31 || grants[0].Refused != 0 {
			t.Fatalf("%d asked, grants %v", asked, grants)
		}
		if m := p.asked[0]; !slices.Equal(m.Tokens, append(slices.Clone(g.Prompt), 4)) || m.Have != 0 || m.PrefixRoot != 77 || !bytes.Equal(m.PrefixDigest, g.PrefixDigest) ||
			m.Priority != 2 || m.Fingerprint != 5 || m.NumericsClass != "class" || m.Layout != 9 {
			t.Errorf("%v", m)
		}
		// What is cached is neither computed nor moved: less than a block is left.
		b.want(b.gw.ask(g), 3, length)
		// A longer prompt asks for the rest.
		longer := generate(30, 1, 5, "p1")
		longer.PrefixDigest = g.PrefixDigest
		longer.PrefixRoot, longer.Output = 77, append([]int32{4, 5}, make([]int32, 17)...)
		longer.MaxTokens = 25
		b.want(b.gw.ask(longer), 6, length)
		if asked, _, grants = p.seen(); asked != 2 || grants[1].From != 32 || p.asked[1].Have != 32 {
			t.Errorf("%d asked, grants %v", asked, grants)
		}
		if c := b.n.Counters(); c.RemotePrefills != 2 || c.LocalPrefills != 1 || c.PrefillFailures != 0 {
			t.Errorf("%+v", c)
		}
		if s := b.eng.Stats(); s.PromptComputed != 1+8+1 {
			t.Errorf("computed %d of the prompts", s.PromptComputed)
		}
	})
}

// later is a bad node that asks for its grant and then does as the script says.
func later(script func(b *bed, c *rpc.Conn, stream uint64)) func(*bed) *peer {
	return func(b *bed) *peer {
		p := b.peer("bad", asks)
		p.grant = func(c *rpc.Conn, stream uint64, _ *nodepb.Grant) { script(b, c, stream) }
		return p
	}
}

// failures are the ways in which a prefill node fails, how soon the next one is
// asked, and how often the bad one hears that nobody waits (-1: any number).
var failures = map[string]struct {
	bad     func(*bed) *peer
	within  time.Duration
	cancels int
}{
	"nobody there": {func(b *bed) *peer { return nil }, 20 * time.Millisecond, 0},
	"silent":       {func(b *bed) *peer { return b.peer("bad", nil) }, 5020 * time.Millisecond, 1},
	"refuses": {func(b *bed) *peer {
		return b.peer("bad", func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			send(c, rpc.FrameEnd, stream, &nodepb.End{Code: nodepb.Code_CODE_DRAINING})
		})
	}, 20 * time.Millisecond, 1},
	"queued, then silent": {func(b *bed) *peer {
		return b.peer("bad", func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			for range 3 {
				time.Sleep(4 * time.Second)
				send(c, rpc.FrameQueued, stream, &nodepb.Queued{Position: 3})
			}
		})
	}, 17020 * time.Millisecond, 1},
	"other model": {func(b *bed) *peer {
		p := &peer{b: b}
		b.serve("bad", rpc.Options{Hello: &nodepb.Hello{Fingerprint: 6, NumericsClass: "class"}}, p)
		return p
	}, 20 * time.Millisecond, 0},
	"other class": {func(b *bed) *peer {
		p := &peer{b: b}
		b.serve("bad", rpc.Options{Hello: &nodepb.Hello{Fingerprint: 5, NumericsClass: "other"}}, p)
		return p
	}, 20 * time.Millisecond, 0},
	"closes before the grant": {func(b *bed) *peer {
		return b.peer("bad", func(c *rpc.Conn, _ uint64, _ *nodepb.Prefill) { c.Close(nil) })
	}, 20 * time.Millisecond, 0},
	"closes after the grant": {later(func(b *bed, c *rpc.Conn, _ uint64) { c.Close(nil) }), 20 * time.Millisecond, 0},
	"gives up after the grant": {later(func(b *bed, c *rpc.Conn, stream uint64) {
		send(c, rpc.FrameEnd, stream, &nodepb.End{Code: nodepb.Code_CODE_INTERNAL})
	}), 20 * time.Millisecond, 1},
	"its push fails": {later(func(b *bed, _ *rpc.Conn, _ uint64) {
		b.reader.fail(1, kvtransfer.ErrChecksum)
	}), 20 * time.Millisecond, 1},
	"its push fails behind many positions": {later(func(b *bed, c *rpc.Conn, stream uint64) {
		b.n.mu.Lock() // so that none is read before all are there
		f := b.n.leases[1].fetch
		for range 2 * maxFetchEvents {
			f.push(rpc.FrameQueued, nil)
		}
		b.n.mu.Unlock()
		b.reader.fail(1, kvtransfer.ErrExpired)
	}), 20 * time.Millisecond, 1},
	"asks twice": {later(func(b *bed, c *rpc.Conn, stream uint64) {
		send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
	}), 20 * time.Millisecond, 1},
	"floods": {func(b *bed) *peer {
		return b.peer("bad", func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			for range 100 {
				send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
				send(c, rpc.FrameGrantRequest, stream+1000, &nodepb.GrantRequest{}) // nobody's: ignored
			}
		})
	}, 20 * time.Millisecond, -1},
}

// Each way to fail leads to the next node, and the one that failed is told.
func TestNextPrefillNode(t *testing.T) {
	for name, c := range failures {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, nil)
				defer b.close()
				bad := c.bad(b)
				good := b.delivers("good")
				began := time.Now()
				b.want(b.gw.ask(generate(40, 1, 3, "bad", "good")), 3, length)
				if took := time.Since(began); took > c.within {
					t.Errorf("took %v", took)
				}
				if n := b.n.Counters(); n.RemotePrefills != 1 || n.PrefillFailures != 1 || n.LocalPrefills != 0 {
					t.Errorf("%+v", n)
				}
				if bad != nil {
					time.Sleep(10 * time.Millisecond)
					if _, cancels, _ := bad.seen(); cancels != c.cancels && c.cancels >= 0 {
						t.Errorf("told %d times that nobody waits, want %d", cancels, c.cancels)
					}
				}
				// And with no other node, the node itself.
				b.want(b.gw.ask(generate(40, 2, 3, "nowhere")), 3, length)
				if n := b.n.Counters(); n.LocalPrefills != 1 {
					t.Errorf("%+v", n)
				}
				if asked, _, _ := good.seen(); asked != 1 {
					t.Errorf("the good node was asked %d times", asked)
				}
			})
		})
	}
}

// Slowness is not silence: a position each second keeps a fetch alive, and one
// that is told late, behind the grant, does not start that clock again.
func TestQueuePositionsAndGrants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("busy", func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			for range 60 {
				time.Sleep(time.Second)
				send(c, rpc.FrameQueued, stream, &nodepb.Queued{Position: 1})
			}
			send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
		})
		p.grant = func(c *rpc.Conn, stream uint64, g *nodepb.Grant) {
			send(c, rpc.FrameQueued, stream, &nodepb.Queued{Position: 1})
			time.Sleep(30 * time.Second) // its lease is renewed by the transfer
			b.reader.arrive(1)
		}
		b.want(b.gw.ask(generate(40, 1, 3, "busy")), 3, length)
		if n := b.n.Counters(); n.RemotePrefills != 1 || n.PrefillFailures != 0 {
			t.Errorf("%+v", n)
		}
	})
}

// A lease that is lost keeps its blocks until the transfer says that nothing
// writes them any more.
func TestBlocksOfALostLeaseStayOutOfUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("p1", asks)
		p.grant = func(*rpc.Conn, uint64, *nodepb.Grant) { b.reader.fail(1, kvtransfer.ErrConnection) }
		s := b.gw.ask(generate(41, 1, 100, "p1"))
		time.Sleep(10 * time.Millisecond) // in quarantine
		if u := b.eng.Stats().Scheduler.Blocks; u.Arriving != 5 {
			t.Errorf("%+v", u)
		}
		time.Sleep(20 * time.Millisecond)
		if u := b.eng.Stats().Scheduler.Blocks; u.Arriving != 0 {
			t.Errorf("%+v", u)
		}
		b.want(s, 128-41, length)
	})
}

// When the KV has arrived, nothing that happens to the prefill node afterwards
// makes anybody compute it again.
func TestArrivalWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("p1", asks)
		p.grant = func(c *rpc.Conn, stream uint64, g *nodepb.Grant) {
			b.n.mu.Lock() // the fetch sees all of it at once
			c.Close(nil)
			f := b.n.leases[kvtransfer.LeaseID(g.Grant[0])].fetch
			f.push(rpc.FrameEnd, errPrefill)
			go b.reader.arrive(kvtransfer.LeaseID(g.Grant[0]))
			b.n.mu.Unlock()
		}
		const n = 24
		for i := range n {
			b.want(b.gw.ask(generate(40, i, 2, "p1", "nowhere")), 2, length)
			time.Sleep(time.Second)
		}
		// Which comes first is open; but computed is either what was given up,
		// or the last token of what arrived.
		c := b.n.Counters()
		if want := 40*c.LocalPrefills + c.RemotePrefills; c.RemotePrefills+c.LocalPrefills != n || b.eng.Stats().PromptComputed != want {
			t.Errorf("%+v; computed %d, want %d", c, b.eng.Stats().PromptComputed, want)
		}
	})
}

func TestNoRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil) // half of 32 blocks may arrive at once
		defer b.close()
		p := b.peer("p1", asks)
		first := b.gw.ask(generate(100, 1, 3, "p1")) // 13 blocks, and they do not come
		time.Sleep(10 * time.Millisecond)
		began := time.Now()
		b.want(b.gw.ask(generate(50, 2, 3, "p1", "p1")), 3, length)
		if took := time.Since(began); took < 4*time.Second || took > 4*time.Second+20*time.Millisecond {
			t.Errorf("took %v, want twice the grant's bound", took)
		}
		if _, _, grants := p.seen(); len(grants) != 3 || grants[1].Refused != nodepb.Code_CODE_OVERLOADED || grants[1].Reason == "" {
			t.Errorf("%v", grants)
		}
		// With room in time the grant comes.
		waits := b.gw.ask(generate(50, 3, 3, "p1"))
		time.Sleep(time.Second)
		b.reader.arrive(1)
		b.want(first, 3, length)
		time.Sleep(10 * time.Millisecond)
		b.reader.arrive(2)
		b.want(waits, 3, length)
		if n := b.n.Counters(); n.RemotePrefills != 2 || n.LocalPrefills != 1 || n.PrefillFailures != 2 {
			t.Errorf("%+v", n)
		}
	})
}

// Grants without room are kept in order: a small one does not overtake a large one, and
// each is given when blocks come free, not at a next look. The prefill node hears at
// once that it waits, and one whose connection ends waits no more.
func TestGrantsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil) // 16 of 32 blocks may arrive at once
		defer b.close()
		p, gone := b.peer("p1", asks), b.peer("p2", asks)
		conns := make(chan *rpc.Conn, 1)
		gone.script = func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			conns <- c
			send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
		}
		first := b.gw.ask(generate(100, 1, 3, "p1")) // 13 blocks
		time.Sleep(100 * time.Millisecond)
		lost := b.gw.ask(generate(60, 2, 3, "p2"))
		time.Sleep(100 * time.Millisecond)
		large := b.gw.ask(generate(90, 3, 3, "p1"))
		time.Sleep(100 * time.Millisecond)
		small := b.gw.ask(generate(20, 4, 3, "p1")) // 3 blocks, for which there is room
		time.Sleep(100 * time.Millisecond)
		if _, _, grants := p.seen(); len(grants) != 1 || p.waited() != 2 || gone.waited() != 1 {
			t.Errorf("%d grants; told to wait %d and %d times", len(grants), p.waited(), gone.waited())
		}
		(<-conns).Close(nil)
		b.want(lost, 3, length) // computed here, long before the bound of a wait
		b.reader.arrive(1)
		synctest.Wait()
		if _, _, grants := p.seen(); len(grants) != 3 || grants[1].UpTo+grants[2].UpTo != 89+19 { // sent by a goroutine each
			t.Errorf("%v", grants)
		}
		b.reader.arrive(2)
		b.reader.arrive(3)
		for _, s := range []*stream{first, large, small} {
			b.want(s, 3, length)
		}
		if n := b.n.Counters(); n.RemotePrefills != 3 || n.LocalPrefills != 1 {
			t.Errorf("%+v", n)
		}
	})
}

// Where no prefill node can help, none is asked in vain after the first.
func TestNoOtherNodeCanHelp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(_ *Options, c *scheduler.Config, _ *rpc.Options) { c.ArrivingFraction = 0.25 })
		defer b.close()
		one, two := b.delivers("p1"), b.delivers("p2")
		b.want(b.gw.ask(generate(100, 1, 3, "p1", "p2")), 3, length) // 13 blocks; 8 may arrive
		asked, _, _ := one.seen()
		others, _, _ := two.seen()
		if n := b.n.Counters(); asked != 1 || others != 0 || n.PrefillFailures != 0 || n.LocalPrefills != 1 {
			t.Errorf("asked %d and %d; %+v", asked, others, n)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		b.peer("slow", func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			time.Sleep(2 * time.Second)
			send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
		})
		other := b.delivers("other")
		s := b.gw.ask(generate(41, 1, 3, "slow", "other"))
		time.Sleep(time.Second)
		b.want(b.gw.ask(generate(41, 1, 3)), 3, length) // computes the same prompt here
		b.want(s, 3, length)
		asked, _, _ := other.seen()
		if n := b.n.Counters(); asked != 0 || n.PrefillFailures != 0 || n.LocalPrefills != 2 {
			t.Errorf("asked the other %d times; %+v", asked, n)
		}
	})
}

func TestLeaseRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("p1", asks)
		b.reader.refuse = errors.New("too many leases")
		b.want(b.gw.ask(generate(40, 1, 3, "p1")), 3, length)
		if _, cancels, grants := p.seen(); cancels != 1 || len(grants) != 1 || grants[0].Refused == 0 {
			t.Errorf("%d cancels, %v", cancels, grants)
		}
	})
}

// A token costs no allocation from the step to the connection.
func TestEmitDoesNotAllocate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		const streams = 16
		attempts := make([]*attempt, streams)
		synctest.Wait() // the gateway is known
		b.n.mu.Lock()
		for c := range b.n.gateways {
			for i := range attempts {
				attempts[i] = &attempt{key: key{c, uint64(1000 + i)}, number: 1, cancel: func(error) {}}
				b.n.attempts[attempts[i].key] = attempts[i]
			}
		}
		b.n.mu.Unlock()
		b.gw.mu.Lock()
		for i := range streams {
			b.gw.by[uint64(1000+i)] = &stream{attempt: 1, done: make(chan struct{}), tokens: make([]int32, 0, 2000)}
		}
		b.gw.mu.Unlock()
		position := 0
		step := func() {
			for _, a := range attempts {
				b.n.emit(a, tokenOf(position))
			}
			b.n.Flush()
			position++
		}
		for range 100 {
			step()
		}
		synctest.Wait()
		if n := testing.AllocsPerRun(500, step); n != 0 {
			t.Errorf("%g allocations for a step of %d streams", n, streams)
		}
		synctest.Wait()
		b.n.mu.Lock()
		for _, a := range attempts {
			delete(b.n.attempts, a.key)
		}
		b.n.mu.Unlock()
		b.gw.mu.Lock()
		for _, s := range b.gw.by {
			if len(s.tokens) != position {
				t.Errorf("%d tokens heard of %d", len(s.tokens), position)
			}
			s.over = true
		}
		b.gw.mu.Unlock()
	})
}

// The last byte had landed when the fetch gave up, and the word of it was still
// on its way: the blocks come back all the same.
func TestArrivalThatCrossesAGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("p1", asks)
		p.grant = func(c *rpc.Conn, stream uint64, g *nodepb.Grant) {
			b.reader.over(1)
			send(c, rpc.FrameEnd, stream, &nodepb.End{Code: nodepb.Code_CODE_INTERNAL})
			time.Sleep(5 * time.Millisecond)
			b.n.TransferEvent(kvtransfer.Event{Kind: kvtransfer.Arrived, Lease: 1})
		}
		b.want(b.gw.ask(generate(40, 1, 20, "p1")), 20, length)
		if n := b.n.Counters(); n.RemotePrefills != 0 || n.LocalPrefills != 1 || n.PrefillFailures != 1 {
			t.Errorf("%+v", n)
		}
	})
}

// A token that waits for its step's frame when the stream ends goes with it.
func TestNothingFollowsAnEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		b.peer("mute", nil)
		s := b.gw.ask(generate(40, 1, 5, "mute"))
		time.Sleep(10 * time.Millisecond)
		b.n.mu.Lock()
		var a *attempt
		for _, a = range b.n.attempts {
		}
		b.n.mu.Unlock()
		b.n.emit(a, tokenOf(40))
		b.n.end(a.key, ErrDeadline, true)
		b.n.Flush()
		b.wantEnd(s, nodepb.Code_CODE_DEADLINE)
		time.Sleep(10 * time.Millisecond)
	})
}

// A prompt that leaves no block in the cache is moved once; the next time it is
// computed here, because moving it again would save nothing.
func TestShortPromptIsMovedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.delivers("p1")
		for range 3 {
			b.want(b.gw.ask(generate(6, 1, 5, "p1")), 5, length)
		}
		if asked, _, _ := p.seen(); asked != 1 {
			t.Errorf("moved %d times, want once", asked)
		}
		if c := b.n.Counters(); c.RemotePrefills != 1 || c.LocalPrefills != 2 {
			t.Errorf("%+v", c)
		}
	})
}
