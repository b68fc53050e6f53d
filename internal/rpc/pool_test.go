package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

func TestPoolSharesOneConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, Options{}, Options{})
		var wg sync.WaitGroup
		var got sync.Map
		for range 50 {
			wg.Go(func() {
				c, err := p.pool.Get(context.Background(), "node")
				if err != nil {
					t.Error(err)
				}
				got.Store(c, true)
			})
		}
		wg.Wait()
		first := p.get(t)
		got.Range(func(k, _ any) bool {
			if k != first {
				t.Error("two connections to one address")
			}
			return true
		})
		first.Close(nil)
		second := p.get(t)
		if second == first {
			t.Error("Get returned a connection that has ended")
		}
		if err := second.Send(FrameDrain, 1, nil); err != nil {
			t.Error(err)
		}
		p.stop()
		if n := len(p.server.events); n != 2 {
			t.Errorf("the server saw %d connections", n)
		}
	})
}

func TestPoolBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var nDials atomic.Int64
		broken := errors.New("cable cut")
		counters := new(Counters)
		pool := NewPool(Options{Hello: hello("client"), Counters: counters, Dial: func(context.Context, string) (net.Conn, error) {
			nDials.Add(1)
			return nil, broken
		}}, newRecorder())
		defer pool.Close()
		if _, err := pool.Get(context.Background(), "a"); !errors.Is(err, broken) || errors.Is(err, ErrBackoff) {
			t.Errorf("first: %v", err)
		}
		if _, err := pool.Get(context.Background(), "a"); !errors.Is(err, broken) || !errors.Is(err, ErrBackoff) {
			t.Errorf("second: %v", err)
		}
		// Asked a thousand times a second for a minute: 0.1 + 0.2 + … + 5 + 5 + … s.
		for range 60_000 {
			if _, err := pool.Get(context.Background(), "a"); !errors.Is(err, broken) {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		if n := nDials.Load(); n < 16 || n > 19 {
			t.Errorf("%d dials in a minute", n)
		} else if counted := counters.DialErrors.Load(); counted != uint64(n) {
			t.Errorf("%d of %d failed dials were counted", counted, n)
		}
	})
}

func TestPoolRecoversAndForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		pool := NewPool(Options{Hello: hello("client"), Dial: n.Dial, MaxConns: 2}, newRecorder())
		ctx := context.Background()
		for _, addr := range []string{"a", "b"} {
			if _, err := pool.Get(ctx, addr); !errors.Is(err, ErrNoListener) {
				t.Errorf("%s: %v", addr, err)
			}
		}
		if _, err := pool.Get(ctx, "node"); !errors.Is(err, ErrTooManyConns) {
			t.Errorf("a third address: %v", err)
		}
		time.Sleep(DefaultBackoffMin)
		l, err := n.Listen("node")
		if err != nil {
			t.Fatal(err)
		}
		serve, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- Serve(serve, l, Options{Hello: hello("server")}, newRecorder()) }()
		if _, err := pool.Get(ctx, "node"); err != nil {
			t.Errorf("after the failures were forgotten: %v", err)
		}

		// A caller that gives up does not take the dial with it.
		n.Silence("node", true)
		c, err := pool.Get(ctx, "node")
		if err != nil {
			t.Fatal(err)
		}
		<-c.Done()
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := pool.Get(short, "node"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Get with a short deadline: %v", err)
		}
		n.Silence("node", false)
		if _, err := pool.Get(ctx, "node"); err != nil {
			t.Errorf("the same dial, waited out: %v", err)
		}

		pool.Close()
		if _, err := pool.Get(ctx, "node"); !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestVersionsAreNegotiated(t *testing.T) {
	for _, tc := range []struct{ min, max, peerMin, peerMax, want uint32 }{
		{1, 1, 1, 1, 1},
		{1, 2, 1, 1, 1},
		{1, 1, 1, 2, 1},
		{2, 3, 1, 2, 2},
		{2, 3, 3, 4, 3},
		{2, 3, 1, 1, 0},
		{1, 1, 2, 3, 0},
	} {
		t.Run(fmt.Sprint(tc), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				own := &nodepb.Hello{NodeId: "new", Role: "decode", Protocol: tc.max, ProtocolMin: tc.min}
				peer := &nodepb.Hello{NodeId: "old", Role: "gateway", Protocol: tc.peerMax, ProtocolMin: tc.peerMin}
				p := newPair(t, Options{Hello: own}, Options{Hello: peer})
				c, err := p.pool.Get(context.Background(), "node")
				if tc.want != 0 {
					if err != nil || c.Version() != tc.want {
						t.Errorf("%v, %v", c, err)
					}
					return
				}
				if !errors.Is(err, ErrVersion) && !errors.Is(err, ErrRefused) {
					t.Fatalf("got %v", err)
				}
				for _, part := range []string{`"new"`, `"old"`, fmt.Sprintf("%d to %d", tc.min, tc.max), fmt.Sprintf("%d to %d", tc.peerMin, tc.peerMax)} {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("%q is not in %q", part, err)
					}
				}
			})
		})
	}
}

// deafConn is a connection whose peer does not take anything.
type deafConn struct{ net.Conn }

func (deafConn) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// A peer that judges the versions itself says why, and its words arrive.
func TestRefusalArrives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		l, err := n.Listen("node")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			c, err := l.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			time.Sleep(DefaultCloseLinger / 2)
			say(t, c, FrameEnd, &nodepb.End{Code: nodepb.Code_CODE_MISMATCH, Message: "too old for me"})
		}()
		// By the time of the refusal the peer's socket takes nothing any more: the
		// failed write must not hide the reason that is still under way.
		pool := NewPool(Options{Hello: hello("client"), Dial: func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := n.Dial(ctx, addr)
			return deafConn{c}, err
		}}, newRecorder())
		defer pool.Close()
		_, err = pool.Get(context.Background(), "node")
		if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "too old for me") {
			t.Error(err)
		}
	})
}

func TestBrokenPeersAreDropped(t *testing.T) {
	badHello := make([]byte, headerBytes+1)
	putHeader(badHello, 1, FrameHello, 0)
	badHello[headerBytes] = 0xff
	for name, tc := range map[string]struct {
		bytes string
		want  error
	}{
		"HTTP":           {"GET / HTTP/1.1\r\n\r\n", ErrUnknownFrame},
		"not a Hello":    {string(badHello), ErrBadPayload},
		"frame first":    {frameBytes(FrameCancel, 4), ErrHandshake},
		"second Hello":   {frameBytes(FrameHello, 0) + frameBytes(FrameHello, 0), ErrHandshake},
		"unknown type":   {frameBytes(FrameHello, 0) + "\x00\x00\x00\x00\x63\x00\x00\x00\x00\x00\x00\x00\x00", ErrUnknownFrame},
		"too big":        {frameBytes(FrameHello, 0) + "\x00\x00\x01\x10\x06\x00\x00\x00\x00\x00\x00\x00\x00", ErrFrameTooBig},
		"torn and gone":  {frameBytes(FrameHello, 0) + "\x01\x00", nil},
		"gone":           {frameBytes(FrameHello, 0), ErrPeerClosed},
		"says it is End": {frameBytes(FrameHello, 0) + frameBytes(FrameEnd, 0), ErrRefused},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := NewNetwork()
				l, err := n.Listen("node")
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				go func() {
					c, err := l.Accept()
					if err != nil {
						t.Error(err)
						return
					}
					defer c.Close()
					if _, err := c.Write([]byte(tc.bytes)); err != nil {
						t.Error(err)
					}
					synctest.Wait()
				}()
				h := newRecorder()
				pool := NewPool(Options{Hello: hello("client"), Dial: n.Dial}, h)
				c, err := pool.Get(context.Background(), "node")
				if err == nil {
					<-c.Done()
					err = c.Err()
				}
				if tc.want != nil && !errors.Is(err, tc.want) {
					t.Errorf("got %v, want %v", err, tc.want)
				}
				pool.Close()
				h.check(t, true)
			})
		})
	}
}

func frameBytes(typ Type, stream uint64) string {
	b, err := appendFrame(nil, typ, stream, samples[typ])
	if err != nil {
		panic(err)
	}
	return string(b)
}

func TestServeBoundsItsConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counters Counters
		p := newPair(t, Options{MaxConns: 1, Counters: &counters}, Options{})
		c := p.get(t)
		other := NewPool(Options{Hello: hello("other"), Dial: p.net.Dial}, newRecorder())
		defer other.Close()
		if _, err := other.Get(context.Background(), "node"); err == nil {
			t.Error("a second connection was taken")
		}
		if counters.Refused.Load() != 1 || counters.Conns.Load() != 1 {
			t.Errorf("refused %d, open %d", counters.Refused.Load(), counters.Conns.Load())
		}
		c.Close(nil)
		time.Sleep(time.Second)
		if _, err := other.Get(context.Background(), "node"); err != nil {
			t.Errorf("after the first has gone: %v", err)
		}
		other.Close()
		p.stop()
		if counters.Conns.Load() != 0 {
			t.Errorf("%d open after the end", counters.Conns.Load())
		}
	})
}

// Mutual TLS over a real socket: nodes of one cluster talk, others and plain HTTP
// are refused. A token frame costs no allocation of ours; crypto/tls makes one
// (24 bytes) for each record that it reads.
func TestMutualTLS(t *testing.T) {
	var materials []*tlsconf.Material
	for _, name := range []string{"one", "other"} {
		dir := t.TempDir() + "/" + name
		if err := tlsconf.CreateCA(dir); err != nil {
			t.Fatal(err)
		}
		node, err := tlsconf.IssueNode(dir, "node", nil)
		if err != nil {
			t.Fatal(err)
		}
		m, err := tlsconf.Load(node, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		materials = append(materials, m)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var counters Counters
	h := newCounter()
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, l, Options{Hello: hello("server"), TLS: materials[0].Server(), Counters: &counters}, h)
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if n := counters.Refused.Load(); n != 3 {
			t.Errorf("%d refused, want the stranger, the plain node and HTTP", n)
		}
	}()
	for name, o := range map[string]Options{
		"stranger": {Hello: hello("stranger"), TLS: materials[1].Client()},
		"plain":    {Hello: hello("plain")},
	} {
		seen := newRecorder()
		pool := NewPool(o, seen)
		if c, err := pool.Get(ctx, addr); err == nil {
			t.Errorf("%s got in as %v", name, c)
		}
		pool.Close()
		if len(seen.events) != 0 {
			t.Errorf("%s saw a connection", name)
		}
	}
	if resp, err := (&http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" + addr); err == nil {
		resp.Body.Close()
		t.Error("HTTP was answered")
	}

	pool := NewPool(Options{Hello: hello("client"), TLS: materials[0].Client()}, newCounter())
	defer pool.Close()
	c, err := pool.Get(ctx, addr)
	if err != nil {
		t.Fatal(err)
	}
	ts := batch(64)
	for range 100 {
		step(t, c, h, ts)
	}
	if raceEnabled {
		return
	}
	if n := testing.AllocsPerRun(500, func() { step(t, c, h, ts) }); n > 1 {
		t.Errorf("%v allocations a token frame over TLS", n)
	}
}
