package nodes

import (
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/lengths"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Room is what a gateway may send to the nodes of a model at once; math.MaxInt64 if nodes do not
// report it.
type Room struct {
	Requests int64
	Tokens   int64 // of prompts that are not computed yet
}

// Room returns how many requests the usable decode nodes take in addition to those of other
// gateways (route.Report.Room), and how many prompt tokens keep all usable nodes busy for so long.
// Without a usable decode node, the room is unknown.
func (s *Snapshot) Room(fingerprint uint64, waiting int, busy time.Duration) Room {
	r, any := Room{}, false
	for _, n := range s.Decode {
		h, ok := n.takes(fingerprint)
		switch {
		case !ok:
			continue
		case h.maxRunning == 0:
			return Room{math.MaxInt64, math.MaxInt64}
		}
		any = true
		r.Requests += int64(h.Room(h.maxRunning, waiting, h.own))
		r.Tokens += h.Backlog(busy)
	}
	if !any {
		return Room{math.MaxInt64, math.MaxInt64}
	}
	for _, n := range s.Prefill {
		if h, ok := n.takes(fingerprint); ok {
			r.Tokens += h.Backlog(busy)
		}
	}
	return r
}

// VectorRoom returns what a gateway may send at once of requests for vectors: what Room returns,
// less the chats that this gateway has on decode nodes, and what prefill nodes that compute vectors
// of the version take. Those order all prompts themselves, so that what they compute for decode
// nodes leaves no less room.
func (s *Snapshot) VectorRoom(fingerprint uint64, version uint32, waiting int, busy time.Duration, chats int64) Room {
	of := Room{}
	for _, n := range s.Prefill {
		if h, ok := n.takes(fingerprint); ok && n.pools(version) {
			of.Requests += int64(h.maxRunning + waiting)
			of.Tokens += h.Backlog(busy)
		}
	}
	r := s.Room(fingerprint, waiting, busy)
	switch {
	case r.Requests < math.MaxInt64:
		r.Requests = max(0, r.Requests-chats) + of.Requests
	case of.Requests > 0: // no decode node takes any, as far as is known
		return of
	}
	return r
}

// takes returns the node's last heartbeat, and whether the node takes new work of the model.
func (n *Node) takes(fingerprint uint64) (h *heartbeat, ok bool) {
	h = n.link.Load().last()
	return h, n.usable(fingerprint) && !n.stalled.Load() && !n.quiet.Load()
}

// memoryOf returns a decode node's KV memory. It is unknown for versions that do not report cached
// and reserved blocks.
func memoryOf(m *nodepb.Stats) route.Memory {
	if m.BlocksCached == nil || m.BlocksReserved == nil {
		return route.Memory{}
	}
	total, cached := int(m.BlocksTotal), int(*m.BlocksCached)
	return route.Memory{
		Total: route.Count(total), Free: route.Count(max(0, total-int(m.BlocksUsed)-cached)),
		Cached: route.Count(cached), Reserved: route.Count(int(*m.BlocksReserved)),
	}
}

// Takes counts the KV blocks that the request is expected to take of its node, until a heartbeat
// includes it.
func (s *Stream) Takes(blocks int) {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if s.l.streams[s.id] == s && s.blocks == 0 {
		s.blocks = blocks
		s.l.addBlocks(blocks)
	}
}

// forget removes a stream. Its blocks count as free until the next heartbeat. The caller holds
// l.mu.
func (l *link) forget(s *Stream) {
	if l.streams[s.id] == s {
		delete(l.streams, s.id)
		l.addBlocks(-s.blocks)
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
	l.setBlocks(sum)
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
// as nodes report it. vectors is the version of vectors that the node has to compute; 0: none.
func (s *Snapshot) Holds(fingerprint uint64, vectors uint32, d route.Demand) bool {
	known := false
	for _, n := range s.Decode {
		if !n.serves(fingerprint) || !n.pools(vectors) {
			continue
		}
		if h := n.link.Load().last(); h.number == 0 || h.Memory.Holds(d) {
			return true
		}
		known = true
	}
	return !known
}

// HasRoom reports whether a node that takes requests, other than those in q.Avoid, has KV memory
// for the demand. It returns true if no node takes any and q.Avoid is empty. If none has room, most
// is the node that probably has room first; nil: not known. The nodes' caches are looked up only if
// they matter.
func (s *Snapshot) HasRoom(q Query, d route.Demand) (has bool, most *Node) {
	any := false
	for _, n := range s.Decode {
		if h, ok := n.takes(q.Fingerprint); ok && n.pools(q.Vectors) && !slices.Contains(q.Avoid, n) {
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
	v := s.View()
	defer v.Release()
	v.Look(q)
	v.Fill()
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

// lengthsOf returns a heartbeat's queue by length.
func lengthsOf(m *nodepb.Stats) (q lengths.Queue) {
	for i := range min(len(q), len(m.QueuedByLength)) {
		q[i] = int(m.QueuedByLength[i])
	}
	return q
}
