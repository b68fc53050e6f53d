package nodes

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Nodes of the version before report no cached and reserved blocks: their memory
// is not known.
func TestMemoryOf(t *testing.T) {
	m := &nodepb.Stats{BlocksTotal: 100, BlocksUsed: 30}
	if got := memoryOf(m); got != (route.Memory{}) {
		t.Errorf("%+v", got)
	}
	m.BlocksCached, m.BlocksReserved = proto.Uint32(50), proto.Uint32(7)
	if got := memoryOf(m); got != (route.Memory{Total: 100, Free: 20, Cached: 50, Reserved: 7}) {
		t.Errorf("%+v", got)
	}
}

// A stream's blocks count until a heartbeat follows its acceptance. When it ends
// they are given back until the next.
func TestBlocksSinceTheHeartbeat(t *testing.T) {
	l := newLink(nil, nil)
	open := func(id uint64, blocks int) *Stream {
		s := &Stream{l: l, id: id}
		l.streams[id] = s
		s.Takes(blocks)
		return s
	}
	want := func(blocks int, when string) {
		t.Helper()
		if got := l.taken(); got != blocks {
			t.Errorf("%s: %d blocks, want %d", when, got, blocks)
		}
	}
	a, b := open(1, 10), open(2, 5)
	want(15, "two streams")
	a.accepted = true
	l.reported()
	want(5, "a heartbeat that includes one")
	l.forget(b)
	l.forget(b)
	want(0, "the other ended")
	l.forget(a)
	want(-10, "the first ended")
	b.Takes(5)
	want(-10, "a stream that is gone")
	l.reported()
	want(0, "the next heartbeat")
	if (*link)(nil).taken() != 0 {
		t.Error("blocks without a link")
	}
}
