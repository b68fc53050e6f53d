package nodes

import (
	"context"
	"testing"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A frame's tokens reach their inboxes without allocation.
func TestFramePathDoesNotAllocate(t *testing.T) {
	const streams = 32
	l := newLink(nil, new(metrics.Value))
	in := NewInbox(1 << 20)
	for id := range uint64(streams) {
		l.streams[id] = &Stream{l: l, in: in, id: id, choice: int32(id), attempt: 1, next: 5}
	}
	net := rpc.NewNetwork()
	payload := tokenFrame(t, net, streams)
	var last []Event
	step := func() {
		for id := range uint64(streams) {
			l.streams[id].next = 5 // again the same frame
		}
		if err := l.frame(rpc.FrameTokens, 0, payload); err != nil {
			t.Fatal(err)
		}
		last = in.Drain(last)
		if len(last) != streams {
			t.Fatalf("%d events", len(last))
		}
	}
	for range 3 { // both of the inbox's buffers grow once
		step()
	}
	if n := testing.AllocsPerRun(200, step); n != 0 {
		t.Fatalf("%g allocations per frame of %d tokens", n, streams)
	}
}

// tokenFrame is the payload of a frame with a token at position 5 for each
// stream, as a connection carries it.
func tokenFrame(t *testing.T, net *rpc.Network, streams int) []byte {
	t.Helper()
	frames := make(chan []byte, 1)
	l, err := net.Listen("node")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	defer func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	h := handlerFunc(func(ty rpc.Type, payload []byte) {
		if ty == rpc.FrameTokens {
			frames <- append([]byte(nil), payload...)
		}
	})
	go func() { served <- rpc.Serve(ctx, l, rpc.Options{Hello: &nodepb.Hello{NodeId: "node"}}, h) }()
	pool := rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "peer"}, Dial: net.Dial}, handlerFunc(func(rpc.Type, []byte) {}))
	defer pool.Close()
	c, err := pool.Get(ctx, "node")
	if err != nil {
		t.Fatal(err)
	}
	ts := make([]rpc.Token, streams)
	for i := range ts {
		ts[i] = rpc.Token{Stream: uint64(i), Attempt: 1, Position: 5, ID: 7}
	}
	if err := c.SendTokens(ts); err != nil {
		t.Fatal(err)
	}
	return <-frames
}

type handlerFunc func(rpc.Type, []byte)

func (f handlerFunc) Frame(_ *rpc.Conn, t rpc.Type, _ uint64, payload []byte) { f(t, payload) }
func (f handlerFunc) Closed(*rpc.Conn, error)                                 {}
