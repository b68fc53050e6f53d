package prefill

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill/line"
)

func TestPush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			mu          sync.Mutex
			transferred []int64 // bytes of each push
		)
		b := newBed(t, func(o *Options, _ *scheduler.Config) {
			o.Transferred = func(t Transfer) {
				mu.Lock()
				defer mu.Unlock()
				transferred = append(transferred, t.Bytes)
			}
		})
		defer b.close()
		a := b.dec.ask(tokens(77, 1), nil) // three chunks, a partial last block
		a.grant(3, 0)
		a.arrived(77)
		again := b.dec.ask(tokens(77, 1), nil) // nine blocks are cached
		again.grant(20, 0)
		again.arrived(5)
		rest := b.dec.ask(tokens(77, 1), func(p *nodepb.Prefill) { p.Have = 24 })
		rest.grant(40, 32) // decode has found more since
		rest.arrived(5)
		whole := b.dec.ask(tokens(77, 1)[:72], nil)
		whole.grant(50, 0)
		whole.arrived(0)
		other := b.dec.ask(tokens(77, 1), func(p *nodepb.Prefill) { p.PrefixRoot = 1 })
		other.grant(3, 0)
		other.arrived(77)
		salted := b.dec.ask(tokens(77, 1), func(p *nodepb.Prefill) {
			p.PrefixDigest = make([]byte, 15, 16)
			p.PrefixDigest = append(p.PrefixDigest, 1)
		})
		salted.grant(3, 0) // of the same 64-bit root
		salted.arrived(77)
		if c := b.n.Counters(); c.Done != 6 || c.Failed+c.Cancelled+c.Refused != 0 {
			t.Errorf("%+v", c)
		}
		if got, want := b.writer.Stats().Pieces, uint64(layers*(10+10+6+9+10+10)); got != want {
			t.Errorf("%d pages sent, want %d", got, want)
		}
		mu.Lock()
		defer mu.Unlock()
		const of = layers * pageBytes
		if want := []int64{10 * of, 10 * of, 6 * of, 9 * of, 10 * of, 10 * of}; !slices.Equal(transferred, want) {
			t.Errorf("pushes with %v bytes were reported, want %v", transferred, want)
		}
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.MaxQueued, o.RunAheadTokens = 1, 50 })
		defer b.close()
		for name, c := range map[string]struct {
			change func(*nodepb.Prefill)
			code   nodepb.Code
		}{
			"no tokens":    {func(p *nodepb.Prefill) { p.Tokens = nil }, nodepb.Code_CODE_INVALID},
			"short digest": {func(p *nodepb.Prefill) { p.PrefixDigest = make([]byte, 15) }, nodepb.Code_CODE_INVALID},
			"has it all":   {func(p *nodepb.Prefill) { p.Have = 16 }, nodepb.Code_CODE_INVALID},
			"half a block": {func(p *nodepb.Prefill) { p.Have = 4 }, nodepb.Code_CODE_INVALID},
			"other model":  {func(p *nodepb.Prefill) { p.Fingerprint = 6 }, nodepb.Code_CODE_MISMATCH},
			"other class":  {func(p *nodepb.Prefill) { p.NumericsClass = "c" }, nodepb.Code_CODE_MISMATCH},
			"other layout": {func(p *nodepb.Prefill) { p.Layout = 10 }, nodepb.Code_CODE_MISMATCH},
			"vocabulary":   {func(p *nodepb.Prefill) { p.Tokens[15] = vocab }, nodepb.Code_CODE_INVALID},
			"negative":     {func(p *nodepb.Prefill) { p.Tokens[0] = -1 }, nodepb.Code_CODE_INVALID},
			"too long":     {func(p *nodepb.Prefill) { p.Tokens = make([]int32, 201) }, nodepb.Code_CODE_INVALID},
		} {
			a := b.dec.ask(tokens(16, 1), c.change)
			<-a.over
			if a.ended(c.code); !a.asked.IsZero() {
				t.Errorf("%s: it asked for a grant", name)
			}
			if m := a.end.GetMessage(); name == "other layout" && (!strings.Contains(m, "blocks of 16") || !strings.Contains(m, "blocks of 8")) {
				t.Errorf("%s: it says %q, which is not how both lay out their blocks", name, m)
			}
		}
		first := b.dec.ask(tokens(90, 1), nil)
		waits := b.dec.ask(tokens(90, 2), nil)
		b.dec.ask(tokens(90, 3), nil).ended(nodepb.Code_CODE_OVERLOADED)
		b.n.StartDrain()
		b.dec.ask(tokens(16, 4), nil).ended(nodepb.Code_CODE_DRAINING)
		first.grant(0, 0)
		waits.grant(20, 0) // what it has goes on
		first.arrived(90)
		waits.arrived(90)
		if c := b.n.Counters(); c.Refused != 12 || c.Accepted != 2 {
			t.Errorf("%+v", c)
		}
	})
}

func TestGrantsThatDoNotFit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		next := int32(0)
		wire := func(nPages int) []byte {
			var pages []int32
			for range nPages {
				pages = append(pages, next)
				next++
			}
			g, err := b.reader.Grant(kvtransfer.GrantRequest{Pages: pages, Duration: time.Second})
			b.must(err)
			return g.Wire
		}
		for name, c := range map[string]struct {
			grant *nodepb.Grant
			code  nodepb.Code
		}{
			"refused":        {&nodepb.Grant{Refused: nodepb.Code_CODE_OVERLOADED, Reason: "full"}, nodepb.Code_CODE_OVERLOADED},
			"other tokens":   {&nodepb.Grant{Grant: wire(4), UpTo: 31}, nodepb.Code_CODE_OVERLOADED},
			"nothing":        {&nodepb.Grant{Grant: wire(1), From: 32, UpTo: 30}, nodepb.Code_CODE_OVERLOADED},
			"half a block":   {&nodepb.Grant{Grant: wire(4), From: 3, UpTo: 30}, nodepb.Code_CODE_OVERLOADED},
			"too few pages":  {&nodepb.Grant{Grant: wire(3), UpTo: 30}, nodepb.Code_CODE_OVERLOADED},
			"too many pages": {&nodepb.Grant{Grant: wire(6), UpTo: 30}, nodepb.Code_CODE_OVERLOADED},
			"garbage":        {&nodepb.Grant{Grant: []byte("garbage"), UpTo: 30}, nodepb.Code_CODE_INTERNAL},
		} {
			a := b.dec.ask(tokens(30, 1), nil)
			<-a.wants
			a.send(rpc.FrameGrant, c.grant)
			a.send(rpc.FrameGrant, c.grant) // a second one is nothing
			a.ended(c.code)
			if b.eng.Stats().Steps != 0 {
				t.Fatalf("%s: it computes", name)
			}
		}
		// Nobody's grant, and none at all.
		a := b.dec.ask(tokens(30, 1), nil)
		<-a.wants
		other := &ask{d: b.dec, id: 1 << 40}
		other.send(rpc.FrameGrant, &nodepb.Grant{})
		other.send(rpc.FrameCancel, &nodepb.Cancel{})
		began := time.Now()
		a.ended(nodepb.Code_CODE_OVERLOADED)
		if took := time.Since(began); took < 9*time.Second || took > 11*time.Second {
			t.Errorf("gave up after %v", took)
		}
		if c := b.n.Counters(); c.Failed != 8 {
			t.Errorf("%+v", c)
		}
	})
}

// A cancel or a lost connection at each moment of a job's life: in the queue,
// waiting for the grant, opening the push, waiting for the engine, between two
// chunks, while the last pages travel.
func TestEndsAtEachMoment(t *testing.T) {
	for _, how := range []string{"cancel", "connection", "lease"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, func(o *Options, _ *scheduler.Config) { o.RunAheadTokens = 50 })
				defer b.close()
				done := uint64(0)
				const moments = 24
				for i := range moments {
					d := b.decode("short-lived")
					busy := b.dec.ask(tokens(60, 100+i), nil) // 2 chunks of 2 ms
					a := d.ask(tokens(90, i), nil)            // its turn comes when half of that is computed
					var grants sync.WaitGroup
					grants.Go(func() { busy.grant(0, 0) })
					grants.Go(func() {
						select {
						case <-a.wants:
							time.Sleep(layerTime)
							a.grant(20, 0)
						case <-time.After(time.Second):
						}
					})
					time.Sleep(time.Duration(i) * layerTime * 2 / 3)
					switch {
					case how == "connection":
						d.conn.Close(nil)
					case how == "lease" && i > 9: // it is granted by then
						a.revoke()
					default:
						a.send(rpc.FrameCancel, &nodepb.Cancel{})
						a.send(rpc.FrameCancel, &nodepb.Cancel{})
					}
					grants.Wait()
					a.revoke() // a grant that crossed it
					busy.arrived(60)
					b.idle()
					d.pool.Close()
					if a.end != nil {
						t.Errorf("moment %d: %v, though nobody waits", i, a.end)
					}
					if a.done != nil {
						done++
					}
				}
				c := b.n.Counters()
				if c.Failed != 0 || c.Cancelled < moments/4 || (how != "connection" && c.Done != moments+done) {
					t.Errorf("%+v; %d of %d done before", c, done, moments)
				}
				last := b.dec.ask(tokens(90, 1), nil)
				last.grant(0, 0)
				<-last.over
				if last.done == nil {
					t.Error(last.end)
				}
			})
		})
	}
}

// Grants are asked for while the jobs ahead are at most RunAheadTokens beside the
// largest; lower values of priority first, then the least work.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		var as []*ask
		for i, c := range []struct {
			n        int
			priority int32
		}{{80, 0}, {80, 0}, {40, 1}, {150, 0}, {30, 0}} {
			as = append(as, b.dec.ask(tokens(c.n, i), func(p *nodepb.Prefill) { p.Priority = c.priority }))
		}
		time.Sleep(1500 * time.Millisecond)
		asked := func() (out []bool) {
			b.dec.mu.Lock()
			defer b.dec.mu.Unlock()
			for _, a := range as {
				out = append(out, !a.asked.IsZero())
			}
			return out
		}
		if got := asked(); !slices.Equal(got, []bool{true, true, false, false, false}) {
			t.Errorf("asked %v", got)
		}
		b.dec.mu.Lock()
		if !slices.Equal(as[4].queued, []uint32{1}) || !slices.Equal(as[3].queued, []uint32{2}) || !slices.Equal(as[2].queued, []uint32{3}) || as[0].queued != nil {
			t.Errorf("positions %v, %v, %v", as[2].queued, as[3].queued, as[4].queued)
		}
		b.dec.mu.Unlock()
		if st := b.n.Stats(); st.QueuedTokens != 150+30+40 || st.Waiting != 3 {
			t.Errorf("heartbeats say %d tokens and %d jobs, want the 220 of 3 that wait", st.QueuedTokens, st.Waiting)
		}
		if st := b.n.Stats(); !slices.Equal(st.QueuedByLength, []uint32{30, 30 + 150 + 80 + 80, 30 + 150 + 80 + 80}) {
			t.Errorf("before prompts of 64, 256 and 1024 tokens: %v; the jobs have 80, 80, 150 and 30, and 40 with a lower priority", st.QueuedByLength)
		}
		if w, asking, all := b.n.Queued(); w != 3 || asking != 2 || all != 5 {
			t.Errorf("%d of %d wait", w, all)
		}
		as[0].grant(0, 0)
		as[0].arrived(80)
		if got := asked(); !slices.Equal(got, []bool{true, true, false, false, true}) {
			t.Errorf("asked %v, want 30 tokens before 150 that came earlier", got)
		}
		as[1].grant(0, 0)
		as[1].arrived(80)
		if got := asked(); !slices.Equal(got, []bool{true, true, true, true, true}) {
			t.Errorf("asked %v", got)
		}
		as[3].grant(0, 0)
		as[3].arrived(150)
		as[4].grant(0, 0)
		as[2].grant(30, 0)
		as[4].arrived(30)
		as[2].arrived(40)
		if !as[4].asked.Before(as[3].asked) || as[2].asked.Before(as[3].asked) {
			t.Error("priority 1 asked before priority 0, or 150 tokens before 30")
		}
	})
}

// A job whose decode node has no room steps aside: jobs for other decode nodes are
// computed, 16 of them at most and for 2 s, and then it has its place again.
func TestStepsAside(t *testing.T) {
	begin := func(t *testing.T) (b *bed, full *ask) {
		b = newBed(t, func(o *Options, _ *scheduler.Config) { o.MaxQueued = 40 })
		full = b.dec.ask(tokens(150, 1), nil) // more than may be ahead: it goes alone
		<-full.wants
		return b, full
	}
	other := func(b *bed, i int) *ask { return b.dec.ask(tokens(110, i), nil) }
	asked := func(a *ask) bool {
		synctest.Wait()
		a.d.mu.Lock()
		defer a.d.mu.Unlock()
		return !a.asked.IsZero()
	}
	t.Run("others pass", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, full := begin(t)
			defer b.close()
			second := other(b, 2)
			if asked(second) {
				t.Error("110 tokens are ahead beside the largest job, with a bound of 100, and nobody is aside")
			}
			full.send(rpc.FrameQueued, &nodepb.Queued{})
			full.send(rpc.FrameQueued, &nodepb.Queued{})
			if !asked(second) {
				t.Fatal("a job that waits for room holds up another")
			}
			second.grant(0, 0)
			second.arrived(110)
			full.grant(20, 0)
			full.arrived(150)
		})
	})
	t.Run("at most 16", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, full := begin(t)
			defer b.close()
			full.send(rpc.FrameQueued, &nodepb.Queued{})
			began, passed := time.Now(), 0
			var last *ask
			for passed = 0; passed < 40; passed++ {
				if last = other(b, 2+passed); !asked(last) {
					break
				}
				last.grant(0, 0)
				if <-last.over; last.done == nil {
					t.Fatal(last.end)
				}
			}
			if passed != line.MaxPassed || time.Since(began) >= line.MaxAside {
				t.Errorf("%d jobs have passed in %v", passed, time.Since(began))
			}
			full.grant(20, 0)
			full.arrived(150)
			last.grant(0, 0)
			last.arrived(110)
		})
	})
	t.Run("at most 2 s", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, full := begin(t)
			defer b.close()
			full.send(rpc.FrameQueued, &nodepb.Queued{})
			time.Sleep(1900 * time.Millisecond)
			early := other(b, 2)
			if !asked(early) {
				t.Error("nobody passes after 1.9 s")
			}
			early.grant(0, 0)
			early.arrived(110)
			time.Sleep(200 * time.Millisecond)
			late := other(b, 3)
			if asked(late) {
				t.Error("one passes after 2 s")
			}
			full.send(rpc.FrameQueued, &nodepb.Queued{})
			if asked(late) {
				t.Error("it steps aside twice")
			}
			full.ended(nodepb.Code_CODE_OVERLOADED) // no grant has come
			late.grant(0, 0)
			late.arrived(110)
		})
	})
	t.Run("as many as may wait", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, full := begin(t)
			defer b.close()
			all := []*ask{full}
			full.send(rpc.FrameQueued, &nodepb.Queued{})
			for i := range 45 {
				a := other(b, 2+i)
				if synctest.Wait(); a.end != nil {
					break
				}
				<-a.wants
				a.send(rpc.FrameQueued, &nodepb.Queued{})
				all = append(all, a)
			}
			if synctest.Wait(); len(all) != 40 {
				t.Errorf("%d jobs wait, the bound is 40", len(all))
			}
			for _, a := range all {
				a.send(rpc.FrameCancel, &nodepb.Cancel{})
			}
		})
	})
}

// What the prefix cache has does not count as ahead of the engine.
func TestAheadWithoutCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.RunAheadTokens = 50 })
		defer b.close()
		first := b.dec.ask(tokens(90, 1), nil)
		first.grant(0, 0)
		first.arrived(90)
		b.model.layer.Store(int64(time.Second))
		again := b.dec.ask(tokens(90, 1), nil) // 88 are cached
		again.grant(20, 0)
		time.Sleep(100 * time.Millisecond)
		next := b.dec.ask(tokens(90, 2), nil)
		synctest.Wait()
		b.dec.mu.Lock()
		if next.asked.IsZero() {
			t.Error("2 tokens to compute keep 90 from asking, with a bound of 50 beside the largest")
		}
		b.dec.mu.Unlock()
		again.arrived(2)
		b.model.layer.Store(0)
		next.grant(40, 0)
		next.arrived(90)
	})
}

// A grant travels while another job computes: nobody waits for the step's end
// to ask for it.
func TestGrantIsAskedDuringAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		first := b.dec.ask(tokens(30, 1), nil)
		first.grant(0, 0)
		time.Sleep(layerTime / 2) // into its one step
		began := time.Now()
		second := b.dec.ask(tokens(30, 2), nil)
		<-second.wants
		if took := time.Since(began); took > 0 {
			t.Errorf("asked after %v", took)
		}
		second.grant(10, 0)
		first.arrived(30)
		second.arrived(30)
	})
}

// The next job asks for its grant as soon as the one before is computed, while
// its pages still travel.
func TestGrantIsAskedDuringATransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.RunAheadTokens = 50 })
		defer b.close()
		b.write.Store(int64(100 * layerTime))
		first, second := b.dec.ask(tokens(90, 1), nil), b.dec.ask(tokens(60, 2), nil)
		first.grant(0, 0)
		second.grant(20, 0)
		first.arrived(90)
		arrived := time.Now().Add(-2 * time.Second) // which arrived waits for
		if !second.asked.Before(arrived) {
			t.Errorf("asked at %v, when the transfer before had ended at %v", second.asked, arrived)
		}
		second.arrived(60)
	})
}

// A push whose lease ends while its last pages travel is not reported as done.
func TestLeaseLostBehindTheLastPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		b.write.Store(int64(100 * layerTime))
		a := b.dec.ask(tokens(30, 1), nil)
		a.grant(0, 0)
		for b.eng.Stats().Scheduler.Running+b.eng.Stats().Scheduler.Waiting == 0 {
			time.Sleep(layerTime) // the connection is made
		}
		time.Sleep(10 * layerTime) // all is computed, and the first write under way
		a.revoke()
		a.lost()
		time.Sleep(10 * time.Second)
		a.d.mu.Lock()
		defer a.d.mu.Unlock()
		if a.done != nil {
			t.Error("pages that never landed are reported as done")
		}
	})
}

// A transfer is hidden as long as the engine computes, and never for longer than
// it takes.
func TestTransferTimes(t *testing.T) {
	began := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		last            time.Time
		hidden, exposed time.Duration
	}{
		"landed 2 s behind the prompt":  {began.Add(3 * time.Second), 3 * time.Second, 2 * time.Second},
		"landed before the step's end":  {began.Add(6 * time.Second), 5 * time.Second, 0},
		"the step has not ended yet":    {time.Time{}, 5 * time.Second, 0},
		"landed when the prompt ended":  {began.Add(5 * time.Second), 5 * time.Second, 0},
		"computed before the first one": {began, 0, 5 * time.Second},
	} {
		f := &feed{began: began, last: c.last}
		if got := f.transfer(began.Add(5 * time.Second)); got != (Transfer{First: began, Hidden: c.hidden, Exposed: c.exposed}) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// What is no Prefill is refused, and costs nothing else.
func TestGarbledPrefill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		a := &ask{d: b.dec, id: b.dec.conn.NewStream(), over: make(chan struct{})}
		b.dec.mu.Lock()
		b.dec.by[a.id] = a
		b.dec.mu.Unlock()
		a.send(rpc.FramePrefill, &nodepb.Grant{Grant: []byte{0xff}}) // its first field, as text
		a.ended(nodepb.Code_CODE_INVALID)
		again := b.dec.ask(tokens(9, 1), nil)
		again.grant(0, 0)
		again.arrived(9)
	})
}

// Check finds what it says it verifies.
func TestCheckFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(*Node){
		"a lost job": func(n *Node) { n.count.Accepted++ },
		"a ticket":   func(n *Node) { n.byTicket[1] = &job{} },
		"a job":      func(n *Node) { n.jobs[key{}] = &job{} },
		"the line":   func(n *Node) { n.line.Add(1, 1, 0) },
	} {
		n := &Node{jobs: map[key]*job{}, byTicket: map[line.ID]*job{}, line: line.New(1)}
		if err := n.Check(); err != nil {
			t.Fatal(err)
		}
		damage(n)
		if err := n.Check(); !errors.Is(err, errBroken) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFailedStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		defer b.close()
		a := b.dec.ask(tokens(90, 1), nil)
		a.grant(0, 0)
		time.Sleep(layerTime)
		began := time.Now()
		b.model.fail <- errors.New("the device is on fire")
		a.ended(nodepb.Code_CODE_INTERNAL)
		if took := time.Since(began); took > time.Second || !strings.Contains(a.end.Message, "on fire") {
			t.Errorf("after %v: %v: want the engine's error at once", took, a.end)
		}
		if lines := log.String(); strings.Count(lines, "prefill failed") != 1 || !strings.Contains(lines, "on fire") || !strings.Contains(lines, "request=r") || !strings.Contains(lines, "tokens=90") {
			t.Errorf("log: %q, want one line with the request, its tokens and the engine's error", lines)
		}
		a.lost()
		again := b.dec.ask(tokens(90, 1), nil)
		again.grant(0, 0)
		again.arrived(90 - stepTokens) // the first chunk was good
	})
}

func TestDrain(t *testing.T) {
	for _, patient := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, func(o *Options, _ *scheduler.Config) { o.RunAheadTokens = 50 })
			defer b.close()
			computes, waits, queued := b.dec.ask(tokens(60, 1), nil), b.dec.ask(tokens(40, 2), nil), b.dec.ask(tokens(60, 3), nil)
			computes.grant(0, 0)
			<-waits.wants
			synctest.Wait() // until the third has come, too
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if !patient {
				ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
				defer cancel()
			}
			drained := make(chan struct{})
			go func() {
				b.n.Drain(ctx)
				close(drained)
			}()
			time.Sleep(time.Millisecond)
			b.dec.ask(tokens(9, 4), nil).ended(nodepb.Code_CODE_DRAINING)
			computes.arrived(60)
			if patient {
				waits.grant(20, 0)
				waits.arrived(40)
				queued.grant(30, 0)
				queued.arrived(60)
			} else {
				waits.ended(nodepb.Code_CODE_DRAINING)
				queued.ended(nodepb.Code_CODE_DRAINING)
			}
			<-drained
		})
	}
}

// What a gateway's Drain asks for: no more jobs, an end of those that are left at
// its timeout, and, cancelled, jobs again; but not of a node that shuts down.
func TestDrainAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		drain := func(d *nodepb.Drain) {
			payload, err := proto.Marshal(d)
			b.must(err)
			b.n.Frame(nil, rpc.FrameDrain, 0, payload)
		}
		computes, waits := b.dec.ask(tokens(60, 1), nil), b.dec.ask(tokens(40, 2), nil)
		computes.grant(0, 0)
		<-waits.wants
		drain(&nodepb.Drain{TimeoutMs: 100})
		b.dec.ask(tokens(9, 4), nil).ended(nodepb.Code_CODE_DRAINING)
		computes.arrived(60)
		waits.ended(nodepb.Code_CODE_DRAINING)
		drain(&nodepb.Drain{Cancel: true})
		if b.n.Draining() {
			t.Error("it drains on")
		}
		again := b.dec.ask(tokens(40, 2), nil)
		<-again.wants // the request is on the node before the drain begins
		drain(&nodepb.Drain{TimeoutMs: 100})
		drain(&nodepb.Drain{Cancel: true})
		time.Sleep(time.Second)
		again.grant(0, 0)
		again.arrived(40)
		b.n.StartDrain()
		drain(&nodepb.Drain{Cancel: true})
		b.dec.ask(tokens(9, 4), nil).ended(nodepb.Code_CODE_DRAINING)
	})
}

// JobTimeout ends a job whatever it waits for, its turn included.
func TestJobTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) {
			o.JobTimeout, o.GrantTimeout, o.RunAheadTokens = 3*time.Second, time.Minute, 50
		})
		defer b.close()
		first := b.dec.ask(tokens(90, 1), nil)
		time.Sleep(100 * time.Millisecond)
		queued := b.dec.ask(tokens(90, 2), func(p *nodepb.Prefill) { p.Priority = 1 })
		time.Sleep(2 * time.Second)
		second := b.dec.ask(tokens(90, 3), nil)
		first.ended(nodepb.Code_CODE_DEADLINE)
		queued.ended(nodepb.Code_CODE_DEADLINE)
		second.ended(nodepb.Code_CODE_DEADLINE)
		if !queued.asked.IsZero() || second.asked.IsZero() {
			t.Error("the wrong one had its turn")
		}
	})
}

// A push whose job waits behind others' work stays alive as long as the engine
// works at all.
func TestSlowEngineKeepsItsLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(_ *Options, c *scheduler.Config) { c.MaxSeqs = 1 })
		defer b.close()
		b.model.layer.Store(int64(time.Second))
		long, behind := b.dec.ask(tokens(90, 1), nil), b.dec.ask(tokens(8, 2), nil)
		long.grant(0, 0)
		time.Sleep(time.Millisecond)          // its first step runs
		behind.grantFor(20, 0, 3*time.Second) // and 5 s until its first layer is done
		behind.arrived(8)
		long.arrived(90)

		b.model.layer.Store(int64(time.Minute)) // standstill
		stuck := b.dec.ask(tokens(40, 3), nil)
		stuck.grantFor(40, 0, time.Second)
		stuck.ended(nodepb.Code_CODE_INTERNAL)
		stuck.lost()
		time.Sleep(4 * time.Minute)
	})
}

// A prompt that comes while a longer one is computed shares the next step with it: the
// bytes that land are the same, and the short prompt does not wait for the long one.
func TestShortBesideLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		long := b.dec.ask(tokens(160, 1), nil) // 5 steps alone
		long.grant(0, 0)
		time.Sleep(layerTime) // into its first step
		began := time.Now()
		short := b.dec.ask(tokens(9, 2), nil)
		short.grant(30, 0)
		<-short.over
		if took := time.Since(began); took > 4*layerTime {
			t.Errorf("the short prompt took %v, want the rest of a step and one step of %v", took, layers*layerTime)
		}
		if long.done != nil {
			t.Error("the long prompt was computed before the short one")
		}
		steps := b.eng.Stats().Steps
		short.arrived(9)
		long.arrived(160)
		if n := b.eng.Stats().Steps; steps > 3 || n != 6 {
			t.Errorf("%d steps, %d when the short prompt had ended; want 6 for 169 tokens", n, steps)
		}
	})
}
