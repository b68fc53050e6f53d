package nodes

import (
	"cmp"
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/breaker"
)

// Query is what a view of the fleet is made for.
type Query struct {
	Fingerprint uint64         // of the model; 0: any
	Adapter     uint64         // digest of the adapter; 0: none
	Grammar     uint32         // version of its grammars; 0: the request is not constrained
	Vectors     uint32         // version of its vectors; 0: the request is for tokens
	Avoid       []*Node        // decode nodes that are used only if no other is left
	Class       string         // numerics class; other decode nodes are used only if none of it is usable; empty: any
	Hashes      []kvcache.Hash // of the prompt's full blocks
	BlockTokens int
	Groups      []kvcache.Group // of the model's caches; none: one group
	Tokens      int             // of the prompt, without its last: at most so many are computed
	Answer      int             // KV blocks that an answer of the model is expected to take
}

// Look fills v with the fleet's state for a request. It allocates only if v has no room.
//
// Of the nodes that are ready and not draining, those that make progress and have an open
// connection are usable. If there are none, those whose breaker is not open are; then those in
// Avoid that are connected, because what they failed may be over; then all, so that a breaker never
// leaves a request without candidates. If a decode node of q.Class makes progress and has an open
// connection, those of other classes are not usable.
func (s *Snapshot) Look(v *route.View, q Query) {
	v.Decode = slices.Grow(v.Decode[:0], len(s.Decode))[:len(s.Decode)]
	v.Prefill = slices.Grow(v.Prefill[:0], len(s.Prefill))[:len(s.Prefill)]
	prompt := q // prefill nodes know nothing of what follows it
	prompt.Grammar, prompt.Vectors = 0, 0
	if s.blocks == nil || len(q.Hashes) == 0 {
		fill(s.Decode, v.Decode, nil, nil, &q)
		fill(s.Prefill, v.Prefill, nil, nil, &prompt)
		s.keepClass(v.Decode, q.Class)
		return
	}
	s.blocks.mu.RLock()
	held := s.blocks.look(q.Hashes, q.BlockTokens, q.Groups)
	fill(s.Decode, v.Decode, s.blocks, *held, &q)
	fill(s.Prefill, v.Prefill, s.blocks, *held, &prompt)
	s.blocks.match.Put(held)
	s.blocks.mu.RUnlock()
	s.keepClass(v.Decode, q.Class)
}

// keepClass makes the decode nodes of other classes unusable if one of the class is usable and
// connected. A node of unknown class is of every class.
func (s *Snapshot) keepClass(states []route.State, class string) {
	if class == "" {
		return
	}
	of := func(n *Node) bool { return n.Class() == "" || n.Class() == class }
	for i, n := range s.Decode {
		if !states[i].Usable || !of(n) || !n.connected() {
			continue
		}
		for i, n := range s.Decode {
			states[i].Usable = states[i].Usable && of(n)
		}
		return
	}
}

// Class returns the node's numerics class; empty: not known.
func (n *Node) Class() string {
	if m := n.member.Load(); m != nil {
		return m.Class
	}
	return ""
}

// Model returns the name of its model that the node announces; empty: none.
func (n *Node) Model() string { return n.member.Load().Model }

// Names returns the names under which decode nodes serve the model, and under which they and
// prefill nodes publish block events, both sorted. A node without a name counts as own.
func (s *Snapshot) Names(fingerprint uint64, own string) (decode, events []string) {
	add := func(names []string, nodes []*Node) []string {
		for _, n := range nodes {
			if name := cmp.Or(n.Model(), own); n.serves(fingerprint) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}
	decode = add(nil, s.Decode)
	return decode, add(slices.Clone(decode), s.Prefill)
}

// levels are the conditions on a usable node below the first level, which state checks, down to
// none. Prefill nodes are never in Avoid.
var levels = [...]func(n *Node, avoid []*Node) bool{
	func(n *Node, avoid []*Node) bool {
		return n.breaker.State() != breaker.Open && !slices.Contains(avoid, n)
	},
	func(n *Node, _ []*Node) bool { return n.connected() && !n.stalled.Load() },
	func(n *Node, avoid []*Node) bool { return !slices.Contains(avoid, n) },
	func(*Node, []*Node) bool { return true },
}

// fill writes the nodes' states. The nodes of the first level that any node reaches are usable.
// held is how many leading blocks of the prompt each slot of b's index has.
func fill(nodes []*Node, states []route.State, b *Blocks, held []int32, q *Query) {
	any := false
	for i, n := range nodes {
		s := &states[i]
		n.state(s, q)
		if b != nil {
			s.Held = min(b.held(n, held)*q.BlockTokens, q.Tokens)
		}
		any = any || s.Usable
	}
	for level := 0; !any && level < len(levels); level++ {
		for i, n := range nodes {
			states[i].Usable = n.fits(q) && levels[level](n, q.Avoid)
			any = any || states[i].Usable
		}
	}
}

// state writes the node's state. The node is usable if it takes the request and is of the first
// level. A request looks at a thousand nodes: each is read once, the cheapest conditions first.
func (n *Node) state(s *route.State, q *Query) {
	l := n.link.Load()
	h := l.last()
	s.Usable = l != nil && !n.stalled.Load() && !n.quiet.Load() && l.conn.Open() && n.takesFor(l, h, q) && !slices.Contains(q.Avoid, n)
	s.Local, s.Held = n.Local.Load(), 0
	sent := route.Sent{Requests: int(n.InFlight.Load()), Blocks: l.taken()}
	n.queued.sent(&sent)
	s.Merge(&h.Report, sent, q.Answer)
}

// fits reports whether the node may get the request, connected or not.
func (n *Node) fits(q *Query) bool {
	l := n.link.Load()
	return n.takesFor(l, l.last(), q)
}

func (n *Node) takesFor(l *link, h *heartbeat, q *Query) bool {
	return !h.draining && n.servesBy(l, q.Fingerprint) && n.adapts(q.Adapter) && (q.Grammar == 0 || l != nil && l.grammar == q.Grammar) &&
		(q.Vectors == 0 || l != nil && l.vectors == q.Vectors)
}

// serves reports whether the node takes requests of the model. The fingerprint in the node's Hello
// overrides its member entry. A fingerprint of 0, as in static lists, matches every model.
func (n *Node) serves(fingerprint uint64) bool { return n.servesBy(n.link.Load(), fingerprint) }

// servesBy is serves over a link that the caller has loaded; nil: there is none.
func (n *Node) servesBy(l *link, fingerprint uint64) bool {
	m := n.member.Load()
	if !m.Ready || m.Draining {
		return false
	}
	own := fingerprintOf(l, m)
	return fingerprint == 0 || own == 0 || own == fingerprint
}

// Fingerprint returns the fingerprint of the node's model; 0: not known.
func (n *Node) Fingerprint() uint64 { return fingerprintOf(n.link.Load(), n.member.Load()) }

func fingerprintOf(l *link, m *Member) uint64 {
	if l != nil && l.model != 0 {
		return l.model
	}
	return m.Fingerprint
}

// adapts reports whether the node has an adapter. Every node has none.
func (n *Node) adapts(digest uint64) bool {
	return digest == 0 || slices.ContainsFunc(n.Adapters(), func(a Adapter) bool { return a.Digest == digest })
}

// Breakers returns the number of decode nodes whose breaker is in the state: closed, half-open or
// open.
func (s *Snapshot) Breakers(state string) int {
	return s.count(func(n *Node) bool { return n.breaker.State() == state })
}

// Usable returns the number of decode nodes that a request of the model could be sent to now over
// an open connection.
func (s *Snapshot) Usable(fingerprint uint64) int {
	return s.count(func(n *Node) bool { return n.usable(fingerprint) })
}

// Constrains returns the number of connected decode nodes that serve the model and have grammars of
// the version.
func (s *Snapshot) Constrains(fingerprint uint64, version uint32) int {
	return s.count(func(n *Node) bool {
		l := n.link.Load()
		return l != nil && l.grammar == version && n.usable(fingerprint)
	})
}

// Pools returns the number of connected decode nodes that serve the model and compute vectors of
// the version.
func (s *Snapshot) Pools(fingerprint uint64, version uint32) int {
	return s.count(func(n *Node) bool {
		l := n.link.Load()
		return l != nil && l.vectors == version && n.usable(fingerprint)
	})
}

// count returns the number of decode nodes for which is holds.
func (s *Snapshot) count(is func(*Node) bool) (n int) {
	for _, node := range s.Decode {
		if is(node) {
			n++
		}
	}
	return n
}

// Usable reports whether the node is connected and takes work.
func (n *Node) Usable() bool { return n.usable(0) }

func (n *Node) usable(fingerprint uint64) bool {
	return n.connected() && !n.link.Load().last().draining && n.serves(fingerprint)
}
