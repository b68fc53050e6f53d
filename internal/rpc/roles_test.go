package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Every frame type has a decision on who may send it to a listener. A new type fails
// here until somebody has decided and named it below, if nodes may not send it.
func TestEveryFrameTypeHasASender(t *testing.T) {
	var closed []string
	for i := range frameTypes {
		switch f := &frameTypes[i]; {
		case f.max == 0:
		case f.from == undecided:
			t.Errorf("%s: frameTypes does not say who may send it", f.name)
		case f.from == gatewayOnly:
			closed = append(closed, f.name)
		}
	}
	if want := []string{"Generate", "BundleRequest", "Drain", "LoadAdapter", "UnloadAdapter"}; !slices.Equal(closed, want) {
		t.Errorf("only gateways may send %v, want %v", closed, want)
	}
	// What prefill and decode nodes ask of each other.
	for _, ty := range []Type{FrameHello, FramePing, FramePong, FramePrefill, FrameGrant, FrameCancel} {
		if frameTypes[ty].from != anyNode {
			t.Errorf("nodes may not send %v", ty)
		}
	}
}

// lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// roleBed is a listener over mutual TLS, which answers every frame by a Stats on its
// stream, and clients with certificates of its authority.
type roleBed struct {
	*testing.T
	ca, addr string
	counters Counters
	server   *recorder
	log      lockedBuffer
}

func newRoleBed(t *testing.T) *roleBed {
	t.Helper()
	b := &roleBed{T: t, ca: t.TempDir(), server: newRecorder()}
	if err := tlsconf.CreateCA(b.ca); err != nil {
		t.Fatal(err)
	}
	b.server.on = func(c *Conn, e event) {
		if e.t != 0 && e.t != FrameHello {
			_ = c.Send(FrameStats, e.stream, nil)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	o := Options{Hello: hello("server"), TLS: b.material("node/server").Server(), Counters: &b.counters, Log: slog.New(slog.NewTextHandler(&b.log, nil))}
	go func() { ended <- Serve(ctx, l, o, b.server) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		b.server.check(t, true)
	})
	return b
}

func (b *roleBed) material(name string) *tlsconf.Material {
	b.Helper()
	dir, err := tlsconf.IssueNode(b.ca, name, nil)
	if err != nil {
		b.Fatal(err)
	}
	m, err := tlsconf.Load(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = m.Close() })
	return m
}

// answer is a frame that a client got.
type answer struct {
	t       Type
	stream  uint64
	payload string
}

// client is a peer and what it is sent.
func (b *roleBed) client(name string) (*Pool, chan answer) {
	answers := make(chan answer, 64)
	h := newRecorder()
	h.on = func(_ *Conn, e event) {
		if e.t != 0 && e.t != FrameHello {
			answers <- answer{e.t, e.stream, e.payload}
		}
	}
	p := NewPool(Options{Hello: hello(name), TLS: b.material(name).Client()}, h)
	b.Cleanup(p.Close)
	return p, answers
}

func (b *roleBed) dial(p *Pool) *Conn {
	b.Helper()
	c, err := p.Get(b.Context(), b.addr)
	if err != nil {
		b.Fatal(err)
	}
	return c
}

func (b *roleBed) next(answers chan answer) answer {
	b.Helper()
	select {
	case a := <-answers:
		return a
	case <-time.After(10 * time.Second):
		b.Fatal("no answer within 10 s")
		panic("unreachable")
	}
}

var requests = map[Type]proto.Message{
	FrameGenerate: &nodepb.Generate{RequestId: "r", Attempt: 7}, FrameBundleRequest: nil, FrameDrain: &nodepb.Drain{TimeoutMs: 1},
	FrameLoadAdapter: &nodepb.LoadAdapter{Name: "a"}, FrameUnloadAdapter: &nodepb.UnloadAdapter{Name: "a"},
	FramePrefill: &nodepb.Prefill{RequestId: "r"}, FrameGrant: &nodepb.Grant{From: 1}, FrameCancel: &nodepb.Cancel{},
}

// A gateway's frames, and those of a certificate without a role, reach the handler. A
// node's do if nodes ask that of each other; the others are answered with CODE_FORBIDDEN
// and what to do, and counted.
func TestNodesSendOnlyWhatNodesMay(t *testing.T) {
	b := newRoleBed(t)
	forbidden := uint64(0)
	for _, name := range []string{"gateway/gw", "old", "node/d2"} {
		p, answers := b.client(name)
		c := b.dial(p)
		for ty, m := range requests {
			stream := c.NewStream()
			if err := c.Send(ty, stream, m); err != nil {
				t.Fatal(err)
			}
			a := b.next(answers)
			if a.stream != stream {
				t.Fatalf("%s: %v is answered on stream %d, want %d", name, ty, a.stream, stream)
			}
			if name != "node/d2" || frameTypes[ty].from == anyNode {
				if a.t != FrameStats {
					t.Errorf("%s: %v is answered by %v: %q", name, ty, a.t, a.payload)
				}
				continue
			}
			forbidden++
			var code nodepb.Code
			var text string
			switch m, err := Decode(a.t, []byte(a.payload)); m := m.(type) {
			case *nodepb.End:
				code, text = m.Code, m.Message
				if want := uint32(0); ty == FrameGenerate && m.Attempt != 7 || ty != FrameGenerate && m.Attempt != want {
					t.Errorf("%v: attempt %d", ty, m.Attempt)
				}
			case *nodepb.AdapterDone:
				if code, text = m.Code, m.Message; ty != FrameLoadAdapter && ty != FrameUnloadAdapter {
					t.Errorf("%v is answered by %v", ty, a.t)
				}
			default:
				t.Errorf("%v is answered by %v (%v)", ty, a.t, err)
			}
			if code != nodepb.Code_CODE_FORBIDDEN || !strings.Contains(text, ty.String()+` from node "d2"`) || !strings.Contains(text, "tandem ca DIR gateway/d2") {
				t.Errorf("%v: %v %q", ty, code, text)
			}
		}
	}
	if n := b.counters.Forbidden.Load(); n != forbidden || n != 5 {
		t.Errorf("%d frames counted, want %d", n, forbidden)
	}
	for text, want := range map[string]int{"a node sent a frame that only gateways may send": 1, "a peer's certificate has no role": 1} {
		if n := b.log.count(text); n != want {
			t.Errorf("%q is logged %d times, want %d", text, n, want)
		}
	}
	// Also on connections made anew within the minute.
	p, _ := b.client("old")
	b.dial(p)
	if n := b.log.count("a peer's certificate has no role"); n != 1 {
		t.Errorf("logged %d times within a minute", n)
	}
}

// A refused frame about the connection itself, as Drain is, closes the connection with
// the reason; the handler never sees the frame.
func TestRefusedDrainClosesTheConnection(t *testing.T) {
	b := newRoleBed(t)
	p, _ := b.client("node/d2")
	c := b.dial(p)
	if err := c.Send(FrameDrain, 0, requests[FrameDrain]); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("open after 10 s")
	}
	if err := c.Err(); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "tandem ca DIR gateway/d2") {
		t.Error(err)
	}
	at := <-b.server.closed
	for _, e := range b.server.of(at) {
		if e.t == FrameDrain {
			t.Error("the handler saw the Drain")
		}
		if e.t == 0 && !errors.Is(e.err, ErrForbidden) {
			t.Errorf("closed because of %v", e.err)
		}
	}
}

// A certificate renewed with another role changes what the next connection may send.
func TestRoleFollowsTheCertificate(t *testing.T) {
	b := newRoleBed(t)
	m := b.material("node/x")
	for i, name := range []string{"node/x", "gateway/x"} {
		if n := m.Reloads(); i > 0 {
			b.material(name)
			for end := time.Now().Add(10 * time.Second); m.Reloads() == n; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("not reloaded within 10 s")
				}
			}
		}
		answers := make(chan answer, 1)
		h := newRecorder()
		h.on = func(_ *Conn, e event) {
			if e.t != 0 && e.t != FrameHello {
				answers <- answer{e.t, e.stream, e.payload}
			}
		}
		p := NewPool(Options{Hello: hello(name), TLS: m.Client()}, h)
		defer p.Close()
		if err := b.dial(p).Send(FrameBundleRequest, 1, nil); err != nil {
			t.Fatal(err)
		}
		if a, want := b.next(answers), []Type{FrameEnd, FrameStats}[i]; a.t != want {
			t.Errorf("%s: answered by %v, want %v", name, a.t, want)
		}
	}
}

// Warnings are limited for each peer, and what is remembered of peers is bounded.
func TestWarningsAreBounded(t *testing.T) {
	var w warnings
	a := tlsconf.Identity{Name: "a"}
	if !w.due(a) || w.due(a) || !w.due(tlsconf.Identity{Role: tlsconf.Node, Name: "a"}) {
		t.Error("the second warning within a minute is due, or another peer's is not")
	}
	w.last[a] = time.Now().Add(-warnInterval)
	if !w.due(a) {
		t.Error("no warning is due after a minute")
	}
	for i := range 3 * maxWarned {
		w.due(tlsconf.Identity{Name: fmt.Sprint(i)})
		if len(w.last) > maxWarned {
			t.Fatalf("%d peers are remembered", len(w.last))
		}
	}
}
