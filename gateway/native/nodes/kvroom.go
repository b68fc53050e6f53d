package nodes

import (
	"slices"
	"sync"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// memoryOf returns a decode node's KV memory. It is unknown for versions that do not report cached
// and reserved blocks.
func memoryOf(m *nodepb.Stats) route.Memory {
	if m.BlocksCached == nil || m.BlocksReserved == nil {
		return route.Memory{}
	}
	total, cached := int(m.BlocksTotal), int(*m.BlocksCached)
	return route.Memory{Total: total, Free: max(0, total-int(m.BlocksUsed)-cached), Cached: cached, Reserved: int(*m.BlocksReserved)}
}

// Takes counts the KV blocks that the request is expected to take of its node, until a heartbeat
// includes it.
func (s *Stream) Takes(blocks int) {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if s.l.streams[s.id] == s && s.blocks == 0 {
		s.blocks = blocks
		s.l.blocks.Add(int64(blocks))
	}
}

// forget removes a stream. Its blocks count as free until the next heartbeat. The caller holds
// l.mu.
func (l *link) forget(s *Stream) {
	if l.streams[s.id] == s {
		delete(l.streams, s.id)
		l.blocks.Add(-int64(s.blocks))
	}
}

// reported restarts the count of blocks, because a heartbeat includes every stream that its node
// has accepted. The caller holds l.mu.
func (l *link) reported() {
	sum := 0
	for _, s := range l.streams {
		if !s.accepted {
			sum += s.blocks
		}
	}
	l.blocks.Store(int64(sum))
}

// taken returns the blocks that streams took since the last heartbeat, negative if more were
// released; 0 without a link.
func (l *link) taken() int {
	if l == nil {
		return 0
	}
	return int(l.blocks.Load())
}

// Holds reports whether the whole KV memory of some node of the model could hold the prompt, as far
// as nodes report it.
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

// HasRoom reports whether a node that takes requests, other than those in q.Avoid, has KV memory
// for the demand. It returns true if no node takes any and q.Avoid is empty. If none has room, most
// is the node that probably has room first; nil: not known. The nodes' caches are looked up only if
// they matter.
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
