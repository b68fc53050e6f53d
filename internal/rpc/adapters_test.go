package rpc

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// adapterHost refuses to unload.
type adapterHost struct{ adapters []string }

var errUnknown = errors.New("unknown")

func (h *adapterHost) LoadAdapter(name, _ string, _ bool) (digest uint64, rank int, err error) {
	h.adapters = append(h.adapters, name)
	return 7, 8, nil
}

func (*adapterHost) UnloadAdapter(string) error { return errUnknown }

func (h *adapterHost) EachAdapter(f func(name string, digest uint64, rank int)) {
	for _, name := range h.adapters {
		f(name, 7, 8)
	}
}

// The heartbeat with a change is in front of the change's answer, so that a gateway that has the
// answer lists what it changed. A refusal changes nothing.
func TestAdapterChangeBeforeAnswer(t *testing.T) {
	b := newRoleBed(t)
	var desk *AdapterDesk
	b.server.on = func(c *Conn, e event) {
		if desk == nil {
			desk = NewAdapterDesk(new(adapterHost), errUnknown, func() { _ = c.Send(FrameStats, 0, &nodepb.Stats{Adapters: desk.List()}) })
		}
		if e.t == FrameLoadAdapter || e.t == FrameUnloadAdapter {
			desk.Frame(c, e.t, e.stream, []byte(e.payload))
		}
	}
	p, answers := b.client("gateway/g1")
	c := b.dial(p)
	if err := c.Send(FrameLoadAdapter, c.NewStream(), &nodepb.LoadAdapter{Name: "french"}); err != nil {
		t.Fatal(err)
	}
	if a := b.next(answers); a.t != FrameStats || !strings.Contains(a.payload, "french") {
		t.Errorf("the first frame is %v, %q", a.t, a.payload)
	}
	if a := b.next(answers); a.t != FrameAdapterDone {
		t.Errorf("the second frame is %v", a.t)
	}
	if err := c.Send(FrameUnloadAdapter, c.NewStream(), &nodepb.UnloadAdapter{Name: "none"}); err != nil {
		t.Fatal(err)
	}
	if a := b.next(answers); a.t != FrameAdapterDone || !strings.Contains(a.payload, "unknown") {
		t.Errorf("a refusal is answered by %v, %q", a.t, a.payload)
	}
}
