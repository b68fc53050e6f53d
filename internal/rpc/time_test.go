package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// reason returns what Closed said for a connection that has ended.
func reason(t *testing.T, r *recorder, c *Conn) error {
	t.Helper()
	es := r.of(c)
	if len(es) == 0 || es[len(es)-1].t != 0 {
		t.Fatalf("not closed: %v", es)
	}
	return es[len(es)-1].err
}

func TestIdleConnectionsLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counters Counters
		p := newPair(t, Options{Counters: &counters}, Options{})
		c := p.get(t)
		time.Sleep(time.Hour)
		if !c.Open() {
			t.Fatal(c.Err())
		}
		if n := counters.FramesIn.Load(); n < 3600/2 || n > 3*3600 {
			t.Errorf("%d frames in an idle hour", n)
		}
		p.stop()
	})
}

func TestSilenceEndsBothSidesWithinItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counters Counters
		p := newPair(t, Options{Counters: &counters}, Options{Counters: &counters})
		c := p.get(t)
		time.Sleep(10 * time.Second)

		// Shorter than the bound: nothing happens, and what was sent arrives.
		p.net.Silence("node", true)
		if err := c.Send(FrameDrain, 3, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(DefaultSilence - 2*DefaultHeartbeat)
		p.net.Silence("node", false)
		time.Sleep(10 * time.Second)
		if !c.Open() {
			t.Fatal("a short silence ended the connection: ", c.Err())
		}

		start := time.Now()
		p.net.Silence("node", true)
		<-c.Done()
		took := time.Since(start)
		if took < DefaultSilence-DefaultHeartbeat || took > DefaultSilence+DefaultHeartbeat {
			t.Errorf("given up after %v", took)
		}
		time.Sleep(2 * DefaultHeartbeat)
		server := <-p.server.closed // its network is silent still
		if err := reason(t, p.client, c); !errors.Is(err, ErrSilent) {
			t.Errorf("client: %v", err)
		}
		if err := reason(t, p.server, server); !errors.Is(err, ErrSilent) {
			t.Errorf("server: %v", err)
		}
		if es := p.server.of(server); len(es) != 3 || es[1].t != FrameDrain || es[1].stream != 3 {
			t.Errorf("server saw %v", es)
		}
		if counters.Silent.Load() != 2 {
			t.Errorf("%d counted as silent", counters.Silent.Load())
		}
		p.net.Silence("node", false)
		p.stop()
	})
}

// fake answers a dial on "node" by hand: it says Hello and then what script does.
func fake(t *testing.T, n *Network, script func(c net.Conn)) (ended <-chan struct{}) {
	t.Helper()
	l, err := n.Listen("node")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer l.Close()
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		say(t, c, FrameHello, &nodepb.Hello{Protocol: Protocol, ProtocolMin: ProtocolMin, NodeId: "fake"})
		script(c)
	}()
	return done
}

func say(t *testing.T, c net.Conn, typ Type, m proto.Message) bool {
	t.Helper()
	b, err := appendFrame(nil, typ, 0, m)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Write(b)
	return err == nil
}

// A peer that pings but never reads: Send keeps returning at once, the outbox
// keeps its bound, and the connection ends as stalled.
func TestPeerThatDoesNotReadIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		ended := fake(t, n, func(c net.Conn) {
			for say(t, c, FramePing, nil) {
				time.Sleep(time.Second)
			}
		})
		const bound = 1 << 20
		var counters Counters
		h := newRecorder()
		pool := NewPool(Options{Hello: hello("client"), Dial: n.Dial, OutboxBytes: bound, Counters: &counters}, h)
		c, err := pool.Get(context.Background(), "node")
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		ts := batch(1000)
		nFull := 0
		for c.Open() {
			err := c.SendTokens(ts)
			if err != nil && !errors.Is(err, ErrOutboxFull) && !errors.Is(err, ErrClosed) {
				t.Fatal(err)
			}
			if errors.Is(err, ErrOutboxFull) {
				nFull++
			}
			if w := c.out.waiting(); w >= bound+headerBytes+len(ts)*tokenBytes {
				t.Fatalf("%d bytes wait, the bound is %d and a frame", w, bound)
			}
			time.Sleep(10 * time.Millisecond)
		}
		took := time.Since(start)
		if took > DefaultSilence+3*DefaultHeartbeat {
			t.Errorf("given up after %v", took)
		}
		if nFull == 0 || counters.OutboxFull.Load() < uint64(nFull) {
			t.Errorf("full %d times, counted %d", nFull, counters.OutboxFull.Load())
		}
		<-h.closed
		if err := reason(t, h, c); !errors.Is(err, ErrStalled) {
			t.Error(err)
		}
		pool.Close()
		h.check(t, true)
		<-ended
	})
}

// slowConn is a link of few bytes a second in the writing direction.
type slowConn struct {
	net.Conn
	bytesPerS int
}

func (c slowConn) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		m := min(c.bytesPerS/10, len(b)-done)
		time.Sleep(100 * time.Millisecond)
		if _, err := c.Conn.Write(b[done : done+m]); err != nil {
			return done, err
		}
		done += m
	}
	return len(b), nil
}

// A link that is slow is not a peer that is dead: a frame that takes a virtual
// minute arrives, though neither side sees a whole frame in that time.
func TestSlowLinksAreNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		l, err := n.Listen("node")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		server, client := newRecorder(), newRecorder()
		arrived := make(chan int, 1)
		server.on = func(_ *Conn, e event) {
			if e.t == FrameBundle {
				arrived <- len(e.payload)
			}
		}
		ended := make(chan error, 1)
		go func() { ended <- Serve(ctx, l, Options{Hello: hello("server")}, server) }()
		pool := NewPool(Options{Hello: hello("client"), Dial: func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := n.Dial(ctx, addr)
			return slowConn{c, 100 << 10}, err
		}}, client)
		c, err := pool.Get(ctx, "node")
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := c.Send(FrameBundle, 1, &nodepb.Bundle{TokenizerJson: make([]byte, 6<<20)}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-arrived:
		case <-c.Done():
			t.Fatal(c.Err())
		}
		if took := time.Since(start); took < time.Minute {
			t.Errorf("the link was not slow: %v", took)
		}
		pool.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		server.check(t, true)
		client.check(t, true)
	})
}

func TestPeersWithoutHelloAreGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, Options{}, Options{})
		mute, err := p.net.Dial(context.Background(), "node")
		if err != nil {
			t.Fatal(err)
		}
		defer mute.Close()
		start := time.Now()
		if _, err := io.Copy(io.Discard, mute); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took < DefaultHandshakeTimeout || took > DefaultHandshakeTimeout+time.Second {
			t.Errorf("the server waited %v for a Hello", took)
		}

		l, err := p.net.Listen("mute")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		start = time.Now()
		_, err = p.pool.Get(context.Background(), "mute")
		if took := time.Since(start); !errors.Is(err, ErrHandshake) || took < DefaultHandshakeTimeout || took > DefaultHandshakeTimeout+time.Second {
			t.Errorf("after %v: %v", took, err)
		}
		p.stop()
		if len(p.server.events)+len(p.client.events) != 0 {
			t.Error("a handler saw a connection without Hello")
		}
	})
}

func TestCloseOfADeadPeerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, Options{}, Options{})
		c := p.get(t)
		p.net.Silence("node", true)
		start := time.Now()
		c.Close(nil)
		<-p.client.closed
		if took := time.Since(start); took != DefaultCloseLinger {
			t.Errorf("Closed came after %v", took)
		}
		p.net.Silence("node", false)
		p.stop()
	})
}

// Random traffic in both directions, silences and closes: what arrives is a
// prefix of what Send took, in order; it is all of it where the sender closed and
// the network was well.
func TestRandomTraffic(t *testing.T) {
	nSeeds := 60
	if testing.Short() {
		nSeeds = 10
	}
	var closedWell, cut int
	for seed := range uint64(nSeeds) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			p := newPair(t, Options{OutboxBytes: 64 << 10}, Options{OutboxBytes: 64 << 10})
			c := p.get(t)
			synctest.Wait()
			var s *Conn
			for k := range p.server.events {
				s = k
			}
			sent := map[*Conn][]uint64{}
			silences := 0
			for range 200 + r.IntN(200) {
				from := []*Conn{c, s}[r.IntN(2)]
				switch k := r.IntN(100); {
				case k < 80:
					id := uint64(len(sent[from]) + 1)
					err := from.Send(FrameCancel, id, &nodepb.Cancel{Reason: string(make([]byte, r.IntN(9000)))})
					if err == nil {
						sent[from] = append(sent[from], id)
					} else if !errors.Is(err, ErrOutboxFull) && !errors.Is(err, ErrClosed) {
						t.Fatalf("seed %d: %v", seed, err)
					}
				case k < 98:
					time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
				case k == 98:
					silences++
					p.net.Silence("node", true)
					time.Sleep(time.Duration(r.IntN(9000)) * time.Millisecond)
					p.net.Silence("node", false)
				}
			}
			time.Sleep(time.Minute)
			closer, other := c, s
			if r.IntN(2) == 0 {
				closer, other = s, c
			}
			well := c.Open() && s.Open()
			for range 5 { // right before the end
				id := uint64(len(sent[closer]) + 1)
				if closer.Send(FrameCancel, id, nil) == nil {
					sent[closer] = append(sent[closer], id)
				}
			}
			closer.Close(fmt.Errorf("the end of seed %d", seed))
			<-p.client.closed
			<-p.server.closed
			got := map[*Conn][]event{c: p.server.of(s), s: p.client.of(c)}
			for from, es := range got {
				es = es[1 : len(es)-1]
				for i, e := range es {
					if e.stream != uint64(i+1) {
						t.Fatalf("seed %d: frame %d has stream %d", seed, i, e.stream)
					}
				}
				if len(es) > len(sent[from]) || well && len(es) != len(sent[from]) {
					t.Fatalf("seed %d: %d frames arrived of %d (well: %v)", seed, len(es), len(sent[from]), well)
				}
			}
			if well {
				closedWell++
				if err := other.Err(); !errors.Is(err, ErrPeerClosed) {
					t.Errorf("seed %d: the other side says %v", seed, err)
				}
			} else if silences > 0 {
				cut++
			}
			p.stop()
		})
	}
	if closedWell < nSeeds/10 || cut < nSeeds/10 {
		t.Errorf("of %d seeds only %d closed well and %d were cut", nSeeds, closedWell, cut)
	}
}
