package upstream

import (
	"slices"

	"github.com/sony/gobreaker/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// Query is whom a view of the fleet is for.
type Query struct {
	Fingerprint uint64         // of the model; 0: any
	Adapter     uint64         // digest of the adapter; 0: none
	Avoid       []*Node        // decode nodes that are used only when no other is left
	Hashes      []kvcache.Hash // of the prompt's full blocks
	BlockTokens int
	Tokens      int // of the prompt, without its last: what is computed at most
}

// View is the fleet's state for a request without a prompt.
func (s *Snapshot) View(fingerprint uint64, avoid []*Node) (v route.View) {
	s.Look(&v, Query{Fingerprint: fingerprint, Avoid: avoid})
	return v
}

// Look fills v with the fleet's state for a request; it allocates only where v
// has no room.
//
// Of the nodes that are ready and not draining, those that get on and have an
// open connection are usable; failing that, those whose breaker is not open;
// failing that, one in Avoid that is connected, since what it failed may be over;
// failing that, all: a breaker never leaves a request without candidates.
func (s *Snapshot) Look(v *route.View, q Query) {
	v.Decode = sized(v.Decode, len(s.Decode))
	v.Prefill = sized(v.Prefill, len(s.Prefill))
	fill(s.Decode, v.Decode, &q)
	fill(s.Prefill, v.Prefill, &q)
	if s.blocks == nil || len(q.Hashes) == 0 {
		return
	}
	s.blocks.mu.RLock()
	held := s.blocks.look(q.Hashes)
	s.blocks.hold(s.Decode, v.Decode, *held, &q)
	s.blocks.hold(s.Prefill, v.Prefill, *held, &q)
	s.blocks.match.Put(held)
	s.blocks.mu.RUnlock()
}

func sized(s []route.State, n int) []route.State {
	if cap(s) < n {
		return make([]route.State, n)
	}
	return s[:n]
}

// levels are what is asked of a node, from what is best down to nothing. Prefill
// nodes are never in Avoid.
var levels = [...]func(n *Node, avoid []*Node) bool{
	func(n *Node, avoid []*Node) bool {
		return n.connected() && !n.stalled.Load() && !n.quiet.Load() && !slices.Contains(avoid, n)
	},
	func(n *Node, avoid []*Node) bool {
		return n.breaker.State() != gobreaker.StateOpen && !slices.Contains(avoid, n)
	},
	func(n *Node, _ []*Node) bool { return n.connected() && !n.stalled.Load() },
	func(n *Node, avoid []*Node) bool { return !slices.Contains(avoid, n) },
	func(*Node, []*Node) bool { return true },
}

// fill writes the nodes' states; those of the first level that any reaches are
// usable.
func fill(nodes []*Node, states []route.State, q *Query) {
	for level := range levels {
		any := false
		for i, n := range nodes {
			s := &states[i]
			n.state(s)
			s.Usable = s.Usable && n.serves(q.Fingerprint) && n.adapts(q.Adapter) && levels[level](n, q.Avoid)
			any = any || s.Usable
		}
		if any {
			return
		}
	}
}

// state writes what is known of the node; it is usable unless it leaves.
func (n *Node) state(s *route.State) {
	var h heartbeat
	if l := n.link.Load(); l != nil {
		if p := l.heart.Load(); p != nil {
			h = *p
		}
	}
	*s = route.State{
		Usable: !h.draining, Local: n.Local.Load(), Rate: h.rate,
		Load:   max(h.running+h.waiting+h.held, int(n.InFlight.Load())),
		Queued: max(h.queued, int(n.Queued.Load())),
	}
}

// serves says whether the node takes requests of the model. What the node itself
// said when it was connected wins over hearsay; a fingerprint of 0, as static
// lists have it, matches every model.
func (n *Node) serves(fingerprint uint64) bool {
	m := n.member.Load()
	if !m.Ready || m.Draining {
		return false
	}
	own := n.Fingerprint()
	return fingerprint == 0 || own == 0 || own == fingerprint
}

// Fingerprint is the node's model, as far as is known; 0: any.
func (n *Node) Fingerprint() uint64 {
	if l := n.link.Load(); l != nil {
		if said := l.conn.Peer().GetFingerprint(); said != 0 {
			return said
		}
	}
	return n.member.Load().Fingerprint
}

// adapts says whether the node has an adapter; every node has none.
func (n *Node) adapts(digest uint64) bool {
	return digest == 0 || slices.ContainsFunc(n.Adapters(), func(a Adapter) bool { return a.Digest == digest })
}

// Breakers is the number of decode nodes whose breaker is in the state: closed,
// half-open or open.
func (s *Snapshot) Breakers(state string) int {
	count := 0
	for _, n := range s.Decode {
		if n.breaker.State().String() == state {
			count++
		}
	}
	return count
}

// Usable is the number of decode nodes that a request of the model could be sent
// to now over an open connection.
func (s *Snapshot) Usable(fingerprint uint64) int {
	count := 0
	for _, n := range s.Decode {
		if _, _, _, _, draining, _ := n.Stats(); n.connected() && !draining && n.serves(fingerprint) {
			count++
		}
	}
	return count
}

// Usable says that the node is connected and takes work.
func (n *Node) Usable() bool {
	_, _, _, _, draining, _ := n.Stats()
	return n.connected() && !draining && n.serves(0)
}

// Ready is the number of decode nodes that serve the model, connected or not.
func (s *Snapshot) Ready(fingerprint uint64) int {
	count := 0
	for _, n := range s.Decode {
		if n.serves(fingerprint) {
			count++
		}
	}
	return count
}
