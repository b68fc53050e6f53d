package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// event is one call of a Handler.
type event struct {
	t       Type // 0: Closed
	stream  uint64
	payload string
	err     error
}

// recorder is a Handler that keeps what it sees, per connection, and may answer.
type recorder struct {
	mu     sync.Mutex
	events map[*Conn][]event
	on     func(c *Conn, e event)
	closed chan *Conn
}

func newRecorder() *recorder {
	return &recorder{events: map[*Conn][]event{}, closed: make(chan *Conn, 1024)}
}

func (r *recorder) add(c *Conn, e event) {
	r.mu.Lock()
	r.events[c] = append(r.events[c], e)
	r.mu.Unlock()
	if r.on != nil {
		r.on(c, e)
	}
}

func (r *recorder) Frame(c *Conn, t Type, stream uint64, payload []byte) {
	r.add(c, event{t: t, stream: stream, payload: string(payload)})
}

func (r *recorder) Closed(c *Conn, err error) {
	r.add(c, event{err: err})
	r.closed <- c
}

func (r *recorder) of(c *Conn) []event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]event(nil), r.events[c]...)
}

// check holds the package's invariant against what was seen: Hello first, Closed
// at most once and last (exactly once when everything has ended).
func (r *recorder) check(t testing.TB, ended bool) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for c, es := range r.events {
		if es[0].t != FrameHello {
			t.Errorf("%s: first event is %v", c.RemoteAddr(), es[0].t)
		}
		nClosed := 0
		for i, e := range es {
			if e.t == 0 {
				nClosed++
				if i != len(es)-1 {
					t.Errorf("%s: events after Closed: %v", c.RemoteAddr(), es[i+1:])
				}
				if e.err == nil {
					t.Errorf("%s: Closed without a reason", c.RemoteAddr())
				}
			}
			if i > 0 && e.t == FrameHello || e.t == FramePing || e.t == FramePong {
				t.Errorf("%s: event %d is %v", c.RemoteAddr(), i, e.t)
			}
		}
		if ended && nClosed != 1 {
			t.Errorf("%s: Closed was called %d times", c.RemoteAddr(), nClosed)
		}
	}
}

func hello(id string) *nodepb.Hello {
	return &nodepb.Hello{NodeId: id, Role: "decode", Build: "test"}
}

// pair is a server and a pool on one in-memory network.
type pair struct {
	net    *Network
	pool   *Pool
	server *recorder
	client *recorder
	stop   func() // ends both and waits
}

func newPair(t testing.TB, server, client Options) *pair {
	t.Helper()
	p := &pair{net: NewNetwork(), server: newRecorder(), client: newRecorder()}
	l, err := p.net.Listen("node")
	if err != nil {
		t.Fatal(err)
	}
	if server.Hello == nil {
		server.Hello = hello("server")
	}
	if client.Hello == nil {
		client.Hello = hello("client")
	}
	client.Dial = p.net.Dial
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, server, p.server) }()
	p.pool = NewPool(client, p.client)
	p.stop = sync.OnceFunc(func() {
		p.pool.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Serve: %v", err)
		}
		p.server.check(t, true)
		p.client.check(t, true)
	})
	t.Cleanup(p.stop)
	return p
}

func (p *pair) get(t testing.TB) *Conn {
	t.Helper()
	c, err := p.pool.Get(context.Background(), "node")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestFramesArriveInOrderAndAnswersComeBack(t *testing.T) {
	const n = 300
	p := newPair(t, Options{}, Options{})
	p.server.on = func(c *Conn, e event) {
		if e.t == FrameGenerate {
			m, err := Decode(e.t, []byte(e.payload))
			if err != nil {
				t.Error(err)
			}
			g := m.(*nodepb.Generate)
			if err := c.Send(FrameAccepted, e.stream, &nodepb.Accepted{Attempt: g.Attempt}); err != nil {
				t.Error(err)
			}
			if err := c.SendTokens([]Token{{Stream: e.stream, Attempt: g.Attempt, Position: uint32(len(g.Prompt)), ID: 7}}); err != nil {
				t.Error(err)
			}
		}
	}
	got := make(chan event, 2*n)
	p.client.on = func(c *Conn, e event) {
		if e.t == FrameAccepted || e.t == FrameTokens {
			got <- e
		}
	}
	c := p.get(t)
	if c.Peer().NodeId != "server" || c.Version() != Protocol {
		t.Fatalf("peer %v, version %d", c.Peer(), c.Version())
	}
	for i := range n {
		// Prompts of 1 to 20,000 tokens: coalesced, queued by reference, and
		// larger than the reader's buffer.
		prompt := make([]int32, 1+i*i%20000)
		for k := range prompt {
			prompt[k] = int32(k)
		}
		m := &nodepb.Generate{Attempt: uint32(i), Prompt: prompt}
		stream := c.NewStream()
		for {
			err := c.Send(FrameGenerate, stream, m)
			if !errors.Is(err, ErrOutboxFull) {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	for i := range n {
		a, k := <-got, <-got
		if a.t != FrameAccepted || a.stream != uint64(i+1) {
			t.Fatalf("answer %d is %v of stream %d", i, a.t, a.stream)
		}
		var ts []Token
		if err := DecodeTokens([]byte(k.payload), func(t Token) { ts = append(ts, t) }); err != nil {
			t.Fatal(err)
		}
		want := Token{Stream: uint64(i + 1), Attempt: uint32(i), Position: uint32(1 + i*i%20000), ID: 7}
		if len(ts) != 1 || ts[0] != want {
			t.Fatalf("tokens %d: %v, want %v", i, ts, want)
		}
	}
	p.stop()
}

func TestCloseSendsWhatWasQueued(t *testing.T) {
	for _, network := range []string{"memory", "tcp"} {
		t.Run(network, func(t *testing.T) {
			l, dial := listen(t, network)
			server := newRecorder()
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- Serve(ctx, l, Options{Hello: hello("server")}, server) }()
			client := newRecorder()
			pool := NewPool(Options{Hello: hello("client"), Dial: dial}, client)
			c, err := pool.Get(ctx, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			why := errors.New("enough")
			const n = 500
			for i := range n {
				if err := c.Send(FrameCancel, uint64(i+1), &nodepb.Cancel{Reason: fmt.Sprint(i)}); err != nil {
					t.Fatal(err)
				}
			}
			c.Close(why)
			c.Close(errors.New("later reasons do not count"))
			if err := c.Send(FrameCancel, 1, nil); !errors.Is(err, ErrClosed) {
				t.Errorf("Send after Close: %v", err)
			}
			if got := <-client.closed; got != c {
				t.Errorf("Closed(%p), want %p", got, c)
			}
			if es := client.of(c); es[len(es)-1].err != why {
				t.Errorf("closed with %v, want %v", es[len(es)-1].err, why)
			}
			es := server.of(<-server.closed)
			if len(es) != n+2 {
				t.Fatalf("server saw %d events, want Hello, %d Cancel, Closed", len(es), n)
			}
			for i := range n {
				if es[i+1].stream != uint64(i+1) {
					t.Fatalf("frame %d has stream %d", i, es[i+1].stream)
				}
			}
			if err := es[n+1].err; !errors.Is(err, ErrPeerClosed) {
				t.Errorf("server closed with %v", err)
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
}

func listen(t testing.TB, network string) (net.Listener, func(context.Context, string) (net.Conn, error)) {
	t.Helper()
	if network == "tcp" {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l, nil
	}
	n := NewNetwork()
	l, err := n.Listen("node")
	if err != nil {
		t.Fatal(err)
	}
	return l, n.Dial
}

func TestSendRefusesWhatDoesNotFit(t *testing.T) {
	p := newPair(t, Options{}, Options{})
	c := p.get(t)
	if err := c.Send(FrameCancel, 1, &nodepb.Cancel{Reason: string(make([]byte, maxSmall))}); !errors.Is(err, ErrFrameTooBig) {
		t.Errorf("long Cancel: %v", err)
	}
	if err := c.Send(99, 1, nil); !errors.Is(err, ErrUnknownFrame) {
		t.Errorf("type 99: %v", err)
	}
	if err := c.SendTokens(make([]Token, MaxTokens+1)); !errors.Is(err, ErrFrameTooBig) {
		t.Errorf("%d tokens: %v", MaxTokens+1, err)
	}
	if err := c.SendTokens(nil); err != nil {
		t.Errorf("no tokens: %v", err)
	}
	if !c.Open() {
		t.Error("a refused Send ended the connection")
	}
}

func TestLargestFramesPass(t *testing.T) {
	p := newPair(t, Options{}, Options{})
	got := make(chan event, 1)
	p.server.on = func(c *Conn, e event) {
		if e.t == FrameBundle {
			got <- e
		}
	}
	c := p.get(t)
	b := &nodepb.Bundle{TokenizerJson: make([]byte, MaxFrame-16)}
	for i := range b.TokenizerJson {
		b.TokenizerJson[i] = byte(i * 7 >> 3)
	}
	if err := c.Send(FrameBundle, 5, b); err != nil {
		t.Fatal(err)
	}
	e := <-got
	m, err := Decode(e.t, []byte(e.payload))
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(m, b) || e.stream != 5 {
		t.Error("the Bundle changed on its way")
	}
}
