package decode

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

const (
	stop   = nodepb.FinishReason_FINISH_REASON_STOP
	length = nodepb.FinishReason_FINISH_REASON_LENGTH
)

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		for name, c := range map[string]struct {
			change func(*nodepb.Generate)
			code   nodepb.Code
			says   string
		}{
			"empty":       {func(g *nodepb.Generate) { g.Prompt = nil }, nodepb.Code_CODE_INVALID, "empty"},
			"no tokens":   {func(g *nodepb.Generate) { g.MaxTokens = 0 }, nodepb.Code_CODE_INVALID, "max_tokens"},
			"all out":     {func(g *nodepb.Generate) { g.Output, g.MaxTokens = []int32{1, 2}, 2 }, nodepb.Code_CODE_INVALID, "out already"},
			"too long":    {func(g *nodepb.Generate) { g.Prompt = make([]int32, maxLen) }, nodepb.Code_CODE_INVALID, "128"},
			"resumed":     {func(g *nodepb.Generate) { g.Output, g.MaxTokens = make([]int32, maxLen-8), maxLen }, nodepb.Code_CODE_INVALID, "128 tokens leave no room"},
			"other model": {func(g *nodepb.Generate) { g.Model = "n" }, nodepb.Code_CODE_NOT_FOUND, `"n"`},
			"vocabulary":  {func(g *nodepb.Generate) { g.Prompt[3] = vocab }, nodepb.Code_CODE_INVALID, "vocabulary"},
			"digest":      {func(g *nodepb.Generate) { g.PrefixDigest = make([]byte, 8) }, nodepb.Code_CODE_INVALID, "8 bytes"},
			"grammar":     {func(g *nodepb.Generate) { g.MaxTokens, g.Grammar = 0, &nodepb.Grammar{Version: 1 << 30, MaxTokens: 4} }, nodepb.Code_CODE_MISMATCH, "grammar"},
			"pooling": {func(g *nodepb.Generate) {
				g.MaxTokens, g.Pooling = 0, &nodepb.Pooling{Kind: nodepb.PoolingKind_POOLING_KIND_LAST, Version: rpc.VectorVersion}
			}, nodepb.Code_CODE_MISMATCH, "no vectors of version 1"},
			"negative": {func(g *nodepb.Generate) { g.Output = []int32{-1} }, nodepb.Code_CODE_INVALID, "vocabulary"},
		} {
			g := generate(8, 1, 4)
			c.change(g)
			s := b.gw.ask(g)
			b.wantEnd(s, c.code)
			if !strings.Contains(s.end.GetMessage(), c.says) {
				t.Errorf("%s: %q does not say %q", name, s.end.GetMessage(), c.says)
			}
		}
		b.want(b.gw.ask(generate(maxLen-1, 1, 100)), 1, length)
		if c := b.n.Counters(); c.Refused != 9 || c.Accepted != 3 || c.FinishedError != 2 {
			t.Errorf("%+v", c)
		}
	})
}

func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, c *scheduler.Config, _ *rpc.Options) { o.MaxRequests, c.MaxQueued, c.MaxSeqs = 4, 2, 1 })
		defer b.close()
		var ss []*stream
		for i := range 6 { // one runs, two wait, the fourth finds the engine's queue full
			ss = append(ss, b.gw.ask(generate(8, i, 30)))
			time.Sleep(5 * stepTime)
		}
		b.wantEnd(ss[3], nodepb.Code_CODE_OVERLOADED)
		b.wantEnd(ss[4], nodepb.Code_CODE_OVERLOADED)
		for _, s := range ss[:3] {
			b.want(s, 30, length)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config, _ *rpc.Options) { o.MaxRequests = 2 })
		defer b.close()
		one, two := b.gw.ask(generate(8, 1, 30)), b.gw.ask(generate(8, 2, 30))
		b.wantEnd(b.gw.ask(generate(8, 3, 4)), nodepb.Code_CODE_OVERLOADED)
		b.want(one, 30, length)
		b.want(two, 30, length)
		time.Sleep(time.Millisecond)
		b.want(b.gw.ask(generate(8, 3, 4)), 4, length)
	})
}

func TestTokensAndAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		first := b.gw.ask(generate(20, 1, 12))
		b.want(first, 12, length)
		if len(first.accepted) != 1 || first.accepted[0] != 0 {
			t.Errorf("accepted %v", first.accepted)
		}
		// A second attempt goes on behind the first one's output, from the cache.
		g := generate(20, 1, 12)
		g.Attempt, g.Output = 2, first.tokens[:5]
		again := b.gw.ask(g)
		b.want(again, 7, length)
		if len(again.accepted) != 2 || again.accepted[1] != 24 {
			t.Errorf("accepted %v", again.accepted)
		}
		g = generate(20, 1, 12)
		g.StopTokenIds = []int32{tokenAt(24)}
		b.want(b.gw.ask(g), 5, stop)
		g = generate(20, 1, 12)
		g.EosTokenIds = []int32{tokenAt(22)}
		b.want(b.gw.ask(g), 12, length) // ignored
		g.IgnoreEos = false
		b.want(b.gw.ask(g), 3, stop)
		if c := b.n.Counters(); c.FinishedStop != 2 || c.FinishedLength != 3 || c.LocalPrefills != 5 || c.FinishedError+c.FinishedAbort != 0 {
			t.Errorf("%+v", c)
		}
	})
}

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config, _ *rpc.Options) { o.RequestTimeout = 60 * stepTime })
		defer b.close()
		for _, c := range []struct {
			ms   uint64
			want time.Duration
		}{{20, 20 * time.Millisecond}, {0, 60 * stepTime}, {3600_000, 60 * stepTime}, {math.MaxUint64, 60 * stepTime}, {math.MaxUint64/1_000_000 + 20, 60 * stepTime}} {
			began := time.Now()
			g := generate(8, 1, 100)
			g.DeadlineMs = c.ms
			s := b.gw.ask(g)
			b.wantEnd(s, nodepb.Code_CODE_DEADLINE)
			if took := time.Since(began); took < c.want || took > c.want+2*stepTime || len(s.tokens) < int(c.want/stepTime)-2 {
				t.Errorf("deadline %d ms: %v, %d tokens", c.ms, took, len(s.tokens))
			}
		}
	})
}

func TestCancelAtEachMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("slow", func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			time.Sleep(10 * time.Millisecond)
			send(c, rpc.FrameGrantRequest, stream, &nodepb.GrantRequest{})
		})
		next := b.peer("next", nil) // must not be asked: a cancel is no failure of the first node
		const moments = 30
		for i := range moments { // before it is accepted, prefilling, granted, ...
			s := b.gw.ask(generate(30, i, 40, "slow", "next"))
			time.Sleep(time.Duration(i) * time.Millisecond * 2 / 3)
			if err := b.gw.conn.Send(rpc.FrameCancel, s.id, &nodepb.Cancel{Reason: "test"}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(50 * time.Millisecond)
			if n := b.n.Running(); n != 0 || s.end != nil {
				t.Errorf("moment %d: %d attempts, %v", i, n, s.end)
			}
			before := len(s.tokens)
			time.Sleep(50 * time.Millisecond)
			if len(s.tokens) != before {
				t.Errorf("moment %d: tokens after the cancel", i)
			}
		}
		send(b.gw.conn, rpc.FrameCancel, 1<<40, &nodepb.Cancel{}) // unknown: nothing
		asked, cancels, grants := p.seen()
		if c := b.n.Counters(); c.FinishedAbort != moments || c.FinishedError != 0 || cancels != asked || len(grants) == 0 {
			t.Errorf("%+v; %d asked, %d cancelled, %d granted", c, asked, cancels, len(grants))
		}
		if nextAsked, _, _ := next.seen(); nextAsked != 0 || b.n.Counters().PrefillFailures != 0 {
			t.Errorf("cancelled requests: %d asked of the next prefill node, %d counted as failures of one", nextAsked, b.n.Counters().PrefillFailures)
		}
	})
}

func TestSecondGenerateOnAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		s := b.gw.ask(generate(8, 1, 100))
		time.Sleep(5 * stepTime)
		send(b.gw.conn, rpc.FrameGenerate, s.id, generate(8, 2, 100))
		b.wantEnd(s, nodepb.Code_CODE_INVALID)
		time.Sleep(20 * stepTime) // the bed fails on anything that follows
		if n := b.n.Running(); n != 0 {
			t.Errorf("%d attempts", n)
		}
		b.want(b.gw.ask(generate(8, 1, 3)), 3, length)
	})
}

func TestFailedStepEndsWithAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		one, two := b.gw.ask(generate(8, 1, 30)), b.gw.ask(generate(8, 2, 30))
		time.Sleep(5 * stepTime)
		b.model.fail <- errFire
		b.wantEnd(one, nodepb.Code_CODE_INTERNAL)
		b.wantEnd(two, nodepb.Code_CODE_INTERNAL)
		b.want(b.gw.ask(generate(8, 1, 3)), 3, length)
	})
}

func TestGatewayLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		p := b.peer("granted", asks)
		other := b.gateway("other", rpc.Options{})
		defer other.pool.Close()
		mine := []*stream{b.gw.ask(generate(8, 1, 100)), b.gw.ask(generate(40, 2, 100, "granted")), b.gw.ask(generate(40, 3, 100, "nowhere"))}
		theirs := other.ask(generate(8, 4, 100))
		time.Sleep(10 * stepTime)
		b.gw.pool.Close()
		for _, s := range mine {
			<-s.done
		}
		b.want(theirs, 100, length)
		if c := b.n.Counters(); c.FinishedAbort != 3 || c.FinishedLength != 1 {
			t.Errorf("%+v", c)
		}
		if _, cancels, _ := p.seen(); cancels != 1 {
			t.Errorf("the prefill node heard %d cancels", cancels)
		}
	})
}

func TestDrain(t *testing.T) {
	for _, patient := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, nil)
			defer b.close()
			b.delivers("p1")
			b.peer("asks", asks) // its push never comes
			running, held := b.gw.ask(generate(8, 1, 50)), b.gw.ask(generate(40, 2, 5, "p1"))
			late := b.gw.ask(generate(40, 3, 5, "asks"))
			time.Sleep(2 * stepTime)
			drained := make(chan struct{})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if !patient {
				ctx, cancel = context.WithTimeout(ctx, 20*stepTime)
				defer cancel()
			}
			go func() {
				b.n.Drain(ctx)
				close(drained)
			}()
			time.Sleep(stepTime)
			b.wantEnd(b.gw.ask(generate(8, 4, 5)), nodepb.Code_CODE_DRAINING)
			b.want(held, 5, length)
			if patient {
				b.want(running, 50, length)
				b.reader.arrive(2)
				b.reader.arrive(1)
				b.want(late, 5, length)
			} else {
				b.wantEnd(running, nodepb.Code_CODE_DRAINING)
				b.wantEnd(late, nodepb.Code_CODE_DRAINING)
			}
			<-drained
			if n, _ := b.n.Owned(); n != 0 {
				t.Errorf("drained, and %d attempts have an owner", n)
			}
			if !b.gw.stats.Draining {
				t.Error("the gateway has not heard of it")
			}
		})
	}
}

// What a gateway's Drain asks for: no more attempts, an end of what runs at its
// timeout, and, cancelled, attempts again; but not of a node that shuts down.
func TestDrainAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		drain := func(d *nodepb.Drain) {
			send(b.gw.conn, rpc.FrameDrain, 0, d)
			time.Sleep(stepTime / 2)
		}
		cut, ends := b.gw.ask(generate(8, 1, 60)), b.gw.ask(generate(8, 2, 10))
		time.Sleep(stepTime)
		drain(&nodepb.Drain{TimeoutMs: uint64((20 * stepTime).Milliseconds())})
		b.wantEnd(b.gw.ask(generate(8, 3, 5)), nodepb.Code_CODE_DRAINING)
		b.want(ends, 10, length)
		b.wantEnd(cut, nodepb.Code_CODE_DRAINING)
		if n := len(cut.tokens); n < 15 || n > 25 || !b.n.Draining() {
			t.Errorf("cut after %d tokens, draining %t", n, b.n.Draining())
		}
		drain(&nodepb.Drain{Cancel: true})
		stays := b.gw.ask(generate(8, 4, 60))
		drain(&nodepb.Drain{TimeoutMs: 1000}) // and is thought better of
		drain(&nodepb.Drain{Cancel: true})
		b.want(stays, 60, length)
		b.n.StartDrain()
		drain(&nodepb.Drain{Cancel: true})
		b.wantEnd(b.gw.ask(generate(8, 3, 5)), nodepb.Code_CODE_DRAINING)
	})
}

// A gateway that does not read loses the streams whose tokens found no room. It
// hears so when it reads again, on the same connection; others notice nothing.
func TestFullOutboxCostsItsStreamsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, c *scheduler.Config, r *rpc.Options) {
			r.OutboxBytes = 8 << 10
			o.Bundle = &nodepb.Bundle{TokenizerJson: bytes.Repeat([]byte("x"), 300<<10)} // more than the network holds
		})
		defer b.close()
		other := b.gateway("other", rpc.Options{})
		defer other.pool.Close()
		theirs := other.ask(generate(8, 9, 100))
		p := b.delivers("p1")
		p.script = func(c *rpc.Conn, stream uint64, _ *nodepb.Prefill) {
			time.Sleep(20 * stepTime)
			asks(c, stream, nil)
		}
		last := b.gw.ask(generate(40, 4, 1, "p1")) // its only token is also its end
		short, long := b.gw.ask(generate(8, 1, 14)), b.gw.ask(generate(8, 2, 100))
		time.Sleep(5 * stepTime)
		stall := make(chan struct{})
		b.gw.mu.Lock()
		b.gw.stall = stall
		b.gw.mu.Unlock()
		time.Sleep(2 * stepTime)
		send(b.gw.conn, rpc.FrameBundleRequest, 1000, nil)
		time.Sleep(30 * stepTime)
		if b.n.Running() != 1 {
			t.Errorf("%d attempts, want the other gateway's", b.n.Running())
		}
		refused := b.gw.ask(generate(8, 3, 4))
		time.Sleep(700 * time.Millisecond)
		b.gw.mu.Lock()
		b.gw.stall = nil
		b.gw.mu.Unlock()
		close(stall)
		for _, s := range []*stream{last, short, long, refused} {
			b.wantEnd(s, nodepb.Code_CODE_OVERLOADED)
		}
		b.want(theirs, 100, length)
		b.want(b.gw.ask(generate(8, 3, 4)), 4, length) // on this connection
		if b.gw.closed != nil || len(b.gw.bundle.TokenizerJson) != 300<<10 {
			t.Errorf("connection: %v", b.gw.closed)
		}
		if c := b.n.Counters(); c.DroppedStreams != 4 {
			t.Errorf("%+v", c)
		}
	})
}

// A gateway that never reads again is not remembered for ever.
func TestOwedEndsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config, r *rpc.Options) {
			o.MaxRequests = 3
			r.OutboxBytes = 8 << 10
			o.Bundle = &nodepb.Bundle{TokenizerJson: bytes.Repeat([]byte("x"), 300<<10)}
		})
		defer b.close()
		deaf := b.gateway("deaf", rpc.Options{})
		defer deaf.pool.Close()
		stall := make(chan struct{})
		deaf.mu.Lock()
		deaf.stall = stall
		deaf.mu.Unlock()
		deaf.ask(generate(0, 1, 1)) // the word of its End is where it stops reading
		time.Sleep(stepTime)
		send(deaf.conn, rpc.FrameBundleRequest, 1000, nil)
		time.Sleep(stepTime)
		for range 5 {
			deaf.ask(generate(0, 1, 1))
		}
		time.Sleep(3 * time.Second)
		b.n.mu.Lock()
		if len(b.n.gateways) != 1 {
			t.Errorf("%d gateways", len(b.n.gateways))
		}
		b.n.mu.Unlock()
		deaf.mu.Lock()
		deaf.stall = nil
		deaf.mu.Unlock()
		close(stall)
	})
}

// Heartbeats come twice a second while a step takes 20 s: gateways take a node without
// them for stopped after --node-silence.
func TestHeartbeatsInALongStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		b.model.slow.Store(int64(20 * time.Second))
		s := b.gw.ask(generate(100, 1, 20))
		for began := time.Now(); time.Since(began) < 19*time.Second; {
			b.gw.mu.Lock()
			b.gw.stats = nil
			b.gw.mu.Unlock()
			time.Sleep(510 * time.Millisecond)
			b.gw.mu.Lock()
			if b.gw.stats == nil {
				t.Errorf("no heartbeat for 510 ms, %v into the step", time.Since(began))
			}
			b.gw.mu.Unlock()
		}
		b.want(s, 20, length)
	})
}

// A gateway hears of a node's load and adapters at once, and before its bundle.
func TestHeartbeatComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		began := time.Now()
		synctest.Wait()
		b.gw.mu.Lock()
		defer b.gw.mu.Unlock()
		if b.gw.stats == nil || time.Since(began) != 0 {
			t.Errorf("%v after %v", b.gw.stats, time.Since(began))
		}
	})
}

func TestHeartbeatAndBundle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		send(b.gw.conn, rpc.FrameBundleRequest, 7, nil)
		s := b.gw.ask(generate(100, 1, 20))
		b.peer("mute", nil)
		held := b.gw.ask(generate(100, 2, 5, "mute"))
		b.want(s, 20, length)
		time.Sleep(510 * time.Millisecond)
		b.gw.mu.Lock()
		if st := b.gw.stats; st == nil || st.Steps < 20 || st.Held != 1 || st.BlocksTotal != 32 || st.Draining || b.gw.bundle.GetModel() != "m" {
			t.Errorf("%v, bundle %v", st, b.gw.bundle)
		}
		b.gw.mu.Unlock()
		send(b.gw.conn, rpc.FrameDrain, 0, nil)
		time.Sleep(stepTime)
		b.gw.mu.Lock()
		if !b.gw.stats.Draining {
			t.Error("not draining")
		}
		b.gw.mu.Unlock()
		b.want(held, 5, length) // after the prefill node's silence
	})
}

// Check finds what it says it verifies.
func TestCheckFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(*Node){
		"an attempt that never ended": func(n *Node) { n.count.Accepted++ },
		"one that ended twice":        func(n *Node) { n.count.FinishedStop++ },
		"an attempt without an owner": func(n *Node) { n.attempts[key{}] = &attempt{}; n.count.Accepted++ },
		"a fetch without an owner":    func(n *Node) { n.fetches[key{}] = &fetch{} },
	} {
		n := &Node{attempts: map[key]*attempt{}, fetches: map[key]*fetch{}}
		if err := n.Check(); err != nil {
			t.Fatal(err)
		}
		damage(n)
		if err := n.Check(); !errors.Is(err, errBroken) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A word of no tokens bans nothing; of other bad words each token counts.
func TestRules(t *testing.T) {
	r := rules(&nodepb.Sampling{BadWords: []*nodepb.TokenSequence{{}, {Tokens: []int32{1, 2}}}, LogitBias: []*nodepb.LogitBias{{Token: 3, Value: -1}}, MinTokens: 4}, []int32{9})
	if len(r.BadWords) != 1 || !slices.Equal(r.BadWords[0], []int32{1, 2}) || !slices.Equal(r.Bias, []engine.Bias{{Token: 3, Value: -1}}) || r.MinTokens != 4 || !slices.Equal(r.Stops, []int32{9}) {
		t.Errorf("%+v", r)
	}
}

// Log-probabilities of a token and of a prompt reach the wire whole and in order,
// and nothing of an attempt that has ended does.
func TestLogProbsOnTheWire(t *testing.T) {
	top := []sample.Top{{Token: 4, LogProb: -0.5}, {Token: 5, LogProb: -1.5}}
	a := &attempt{key: key{stream: 7}, number: 2}
	p := logProbs(a, engine.Token{Position: 9, LogProbs: &engine.LogProbs{LogProb: -0.5, Rank: 1, Top: top}})
	if want := (&nodepb.TokenLogProbs{Stream: 7, Attempt: 2, Position: 9, Logprob: -0.5, Rank: 1, TopTokens: []int32{4, 5}, TopLogprobs: []float32{-0.5, -1.5}}); !proto.Equal(p, want) {
		t.Errorf("%v, want %v", p, want)
	}
	gw := &gateway{}
	n := &Node{gateways: map[*rpc.Conn]*gateway{nil: gw}}
	n.emitPrompt(a, 3, []engine.LogProbs{{LogProb: -1, Rank: 2, Top: top}, {LogProb: -2, Rank: 3, Top: top[:1]}})
	want := &nodepb.PromptLogProbs{Attempt: 2, First: 3, Logprobs: []float32{-1, -2}, Ranks: []uint32{2, 3}, TopTokens: []int32{4, 5, 4}, TopLogprobs: []float32{-0.5, -1.5, -0.5}}
	if len(gw.prompts) != 1 || !proto.Equal(gw.prompts[0].m, want) || len(n.dirty) != 1 {
		t.Errorf("%v, want %v", gw.prompts, want)
	}
	a.ended = true
	n.emitPrompt(a, 5, []engine.LogProbs{{}})
	n.emit(a, engine.Token{Position: 10})
	if len(gw.prompts) != 1 || len(gw.tokens) != 0 {
		t.Errorf("of an attempt that has ended: %v, %v", gw.prompts[1:], gw.tokens)
	}
}

// What a gateway asks of adapters is answered on its stream.
func TestAdapterFramesAreAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		answers := make(chan *nodepb.AdapterDone, 2)
		admin := adminPeer(answers)
		pool := rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "admin", Role: "gateway"}, Dial: b.net.Dial}, admin)
		defer pool.Close()
		c, err := pool.Get(t.Context(), "decode")
		if err != nil {
			t.Fatal(err)
		}
		for frame, m := range map[rpc.Type]proto.Message{
			rpc.FrameLoadAdapter: &nodepb.LoadAdapter{Name: "a", Path: "/nowhere"}, rpc.FrameUnloadAdapter: &nodepb.UnloadAdapter{Name: "a"},
		} {
			if err := c.Send(frame, c.NewStream(), m); err != nil {
				t.Fatal(err)
			}
			select {
			case a := <-answers:
				if a.Code == 0 || a.Message == "" {
					t.Errorf("frame %v: %v, want an error: this engine takes no adapters", frame, a)
				}
			case <-time.After(time.Minute):
				t.Errorf("frame %v is not answered", frame)
			}
		}
	})
}

// adminPeer gets the answers about adapters.
type adminPeer chan *nodepb.AdapterDone

func (adminPeer) Closed(*rpc.Conn, error) {}

func (p adminPeer) Frame(_ *rpc.Conn, t rpc.Type, _ uint64, payload []byte) {
	m := new(nodepb.AdapterDone)
	if t == rpc.FrameAdapterDone && proto.Unmarshal(payload, m) == nil {
		p <- m
	}
}

// An event of a lease that the node does not know changes nothing and is logged.
func TestEventOfAnUnknownLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		b := newBed(t, func(o *Options, _ *scheduler.Config, _ *rpc.Options) {
			o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		})
		defer b.close()
		for _, kind := range []kvtransfer.EventKind{kvtransfer.Arrived, kvtransfer.Failed, kvtransfer.Released} {
			b.n.TransferEvent(kvtransfer.Event{Kind: kind, Lease: 77})
		}
		if lines := log.String(); strings.Count(lines, "unknown lease") != 3 || !strings.Contains(lines, "level=ERROR") {
			t.Errorf("log: %q, want an error for each of 3 events", lines)
		}
		b.want(b.gw.ask(generate(8, 1, 4)), 4, length)
	})
}
