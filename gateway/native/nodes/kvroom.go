package nodes

import (
	"slices"
	"sync"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// memoryOf returns a decode node's KV memory; unknown of nodes of a version that
// does not report what is cached and reserved.
func memoryOf(m *nodepb.Stats) route.Memory {
	if m.BlocksCached == nil || m.BlocksReserved == nil {
		return route.Memory{}
	}
	total, cached := int(m.BlocksTotal), int(*m.BlocksCached)
	return route.Memory{Total: total, Free: max(0, total-int(m.BlocksUsed)-cached), Cached: cached, Reserved: int(*m.BlocksReserved)}
}

// Takes notes how many KV blocks the request is expected to take of its node,
// until a heartbeat includes it.
func (s *Stream) Takes(blocks int) {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if s.l.streams[s.id] == s && s.blocks == 0 {
		s.blocks = blocks
		s.l.blocks.Add(int64(blocks))
	}
}

// forget removes a stream. Its blocks are free until the next heartbeat says
// more; l.mu is held.
func (l *link) forget(s *Stream) {
	if l.streams[s.id] == s {
		delete(l.streams, s.id)
		l.blocks.Add(-int64(s.blocks))
	}
}

// reported starts the count of blocks anew: a heartbeat includes every stream
// that its node has accepted. l.mu is held.
func (l *link) reported() {
	sum := 0
	for _, s := range l.streams {
		if !s.accepted {
			sum += s.blocks
		}
	}
	l.blocks.Store(int64(sum))
}

// taken returns the blocks that streams took since the last heartbeat, negative
// where more came back; 0 without a link.
func (l *link) taken() int {
	if l == nil {
		return 0
	}
	return int(l.blocks.Load())
}

// Holds reports whether the whole KV memory of some node of the model could hold
// the prompt, as far as nodes report it.
func (s *Snapshot) Holds(fingerprint uint64, d route.Demand) bool {
	known := false
	for _, n := range s.Decode {
		if !n.serves(fingerprint) {
			continue
		}
		if h := n.link.Load().last(); h.number == 0 || h.Memory.Holds(d) {
			return true
		}
		known = true
	}
	return !known
}

// views are reused by HasRoom.
var views = sync.Pool{New: func() any { return new(route.View) }}

// HasRoom reports whether a node that takes requests, of those that are not in q.Avoid, has
// KV memory for one; true where none takes any and none is avoided. Where none has, most is
// the one that will probably have room first; nil: it is not known. What nodes cache of the
// prompt is looked up only when it matters.
func (s *Snapshot) HasRoom(q Query, d route.Demand) (has bool, most *Node) {
	any := false
	for _, n := range s.Decode {
		if h, ok := n.takes(q.Fingerprint); ok && !slices.Contains(q.Avoid, n) {
			state := route.State{}
			state.Merge(&h.Report, route.Sent{Blocks: n.link.Load().taken()}, q.Answer)
			if state.Memory.Fits(d, 0) {
				return true, nil
			}
			any = true
		}
	}
	if !any || len(q.Hashes) == 0 {
		return !any && len(q.Avoid) == 0, nil
	}
	v := views.Get().(*route.View)
	defer views.Put(v)
	s.Look(v, q)
	any = false
	r := route.Request{Demand: d, Uncached: q.Tokens}
	for i := range v.Decode {
		state := &v.Decode[i]
		if state.Usable = state.Usable && !slices.Contains(q.Avoid, s.Decode[i]); !state.Usable {
			continue
		}
		if state.HasRoom(&r) {
			return true, nil
		}
		any = true
	}
	if !any {
		return len(q.Avoid) == 0, nil
	}
	if at := route.Roomiest(v.Decode, &r); at >= 0 {
		most = s.Decode[at]
	}
	return false, most
}
