package node

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// adapterEngine loads all adapters and unloads none.
type adapterEngine struct {
	sync.Mutex
	adapters []string
}

func (*adapterEngine) Stats() (s engine.Stats) { return s }

func (e *adapterEngine) LoadAdapter(name, _ string, _ bool) (digest uint64, rank int, err error) {
	e.Lock()
	defer e.Unlock()
	e.adapters = append(e.adapters, name)
	return 7, 8, nil
}

func (*adapterEngine) UnloadAdapter(name string) error {
	return fmt.Errorf("%w: %s", engine.ErrAdapter, name)
}

func (e *adapterEngine) EachAdapter(f func(name string, digest uint64, rank int)) {
	e.Lock()
	defer e.Unlock()
	for _, name := range e.adapters {
		f(name, 7, 8)
	}
}

// served is a Base as the handler of a node's connections.
type served struct{ *Base }

func (s served) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	if t == rpc.FrameHello {
		s.Register(c)
		return
	}
	s.Base.Frame(c, t, stream, payload)
}

func (s served) Closed(*rpc.Conn, error) {}

// frames receives what a node sends.
type frames chan string

func (f frames) Frame(_ *rpc.Conn, t rpc.Type, _ uint64, payload []byte) {
	switch m, err := rpc.Decode(t, payload); m := m.(type) {
	case *nodepb.Stats:
		f <- fmt.Sprint("stats ", len(m.Adapters))
	case *nodepb.AdapterDone:
		f <- fmt.Sprint("done ", m.Code, err)
	}
}

func (f frames) Closed(*rpc.Conn, error) {}

// The heartbeat with a change is in front of the change's answer, so that a gateway that has the
// answer lists what it changed. A refusal changes nothing.
func TestAdapterChangeBeforeAnswer(t *testing.T) {
	network := rpc.NewNetwork()
	l, err := network.Listen("node")
	if err != nil {
		t.Fatal(err)
	}
	b := New(Options{
		Engine: new(adapterEngine), Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Lock: new(sync.Mutex),
		Stats: func(*nodepb.Stats, scheduler.Stats) {}, Running: func() int { return 0 }, End: func() {},
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- rpc.Serve(ctx, l, rpc.Options{Hello: &nodepb.Hello{NodeId: "node", Role: "decode"}}, served{b})
	}()
	got := make(frames, 8)
	pool := rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "gateway", Role: "gateway"}, Dial: network.Dial}, got)
	defer func() {
		pool.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	c, err := pool.Get(t.Context(), "node")
	if err != nil {
		t.Fatal(err)
	}
	want := func(frames ...string) {
		t.Helper()
		for _, w := range frames {
			select {
			case f := <-got:
				if f != w {
					t.Errorf("a node sent %q, want %q", f, w)
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("a node did not send %q", w)
			}
		}
	}
	if err := c.Send(rpc.FrameLoadAdapter, c.NewStream(), &nodepb.LoadAdapter{Name: "french"}); err != nil {
		t.Fatal(err)
	}
	want("stats 1", fmt.Sprint("done ", nodepb.Code(0), nil))
	if err := c.Send(rpc.FrameUnloadAdapter, c.NewStream(), &nodepb.UnloadAdapter{Name: "none"}); err != nil {
		t.Fatal(err)
	}
	want(fmt.Sprint("done ", nodepb.Code_CODE_NOT_FOUND, nil))
}
