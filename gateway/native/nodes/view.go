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

// RouteView is a view of a snapshot's nodes for one decision after another. It keeps the nodes'
// states from one to the next, and reads only the nodes that have changed. It has 132 bytes for
// each node, and is not safe for concurrent use.
type RouteView struct {
	route.View
	s       *Snapshot
	outline *route.Outline // of View; used if the key is that of the Look before; nil: not used yet
	levels  []route.Level
	most    []int32 // slots; reused

	facts []facts // by place
	slots []int32 // in Blocks plus one, by place; 0: the node has published nothing
	place []int32 // by slot, plus one; 0: none
	seen  uint64  // entries of the log that are included
	given uint64  // Blocks.given that slots include
	key   key     // of the last Look; the zero value: Usable is of no key
	found []int32 // of Blocks.look
	stale []int32 // places that are to be read
	fresh bool    // no node has been read
}

// facts are the properties of a node that decide whether it is usable for a key, and the part of
// its report that its memory for a key depends on.
type facts struct {
	fingerprint uint64 // 0: any
	grammar     uint32
	vectors     uint32
	running     int32
	waiting     int32
	memory      route.Memory // without the answers of running and waiting requests
	ready       bool         // it makes progress, takes work and had an open connection
	full        bool         // it is a decode node that has as many requests as it runs at once
}

// key is the part of a Query that many requests have in common.
type key struct {
	fingerprint, adapter uint64
	grammar, vectors     uint32
	answer               int
	set                  bool
}

func newRouteView(s *Snapshot) *RouteView {
	v := &RouteView{s: s, fresh: true}
	v.Decode, v.Prefill = make([]route.State, len(s.Decode)), make([]route.State, len(s.Prefill))
	v.facts, v.slots = make([]facts, len(s.Decode)+len(s.Prefill)), make([]int32, len(s.Decode)+len(s.Prefill))
	v.DecodeHeld.Slots, v.PrefillHeld.Slots = v.slots[:len(s.Decode)], v.slots[len(s.Decode):]
	return v
}

// Look brings the view up to date for a request. It allocates only if nodes or blocks are new. Held
// of the states is set by Pick, or by Fill.
//
// Of the nodes that are ready and not draining, those that make progress and have an open
// connection are usable. If there are none, those whose breaker is not open are; then those in
// Avoid that are connected, because what they failed may be over; then all, so that a breaker never
// leaves a request without candidates. If a decode node of q.Class makes progress and has an open
// connection, those of other classes are not usable.
func (v *RouteView) Look(q Query) {
	k := key{q.Fingerprint, q.Adapter, q.Grammar, q.Vectors, q.Answer, true}
	var all bool
	v.stale, v.seen, all = v.s.changes.take(v.s, v.seen, v.stale[:0])
	switch same := k == v.key; {
	case all || v.fresh:
		v.key, v.fresh, v.given = k, false, 0
		clear(v.slots)
		clear(v.place)
		v.s.each(v.read)
		v.Outline = nil
	default:
		v.key = k
		for i := 0; i < len(v.facts) && !same; i++ {
			v.adapt(i)
		}
		for _, i := range v.stale {
			v.read(int(i), v.s.node(int(i)))
		}
		v.setOutline(same)
	}
	v.hold(&q)
	for _, n := range q.Avoid {
		if i := slices.Index(v.s.Decode, n); i >= 0 {
			v.Decode[i].Usable, v.key.set = false, false
		}
	}
	v.fall(v.s.Decode, v.Decode, &q)
	prompt := q // prefill nodes know nothing of what follows it
	prompt.Grammar, prompt.Vectors = 0, 0
	v.fall(v.s.Prefill, v.Prefill, &prompt)
	v.keepClass(q.Class)
	if !v.key.set && v.Outline != nil {
		v.Fill()
		v.Outline = nil
	}
}

// setOutline makes Pick use the outline if the key is that of the Look before. An outline of many
// changed nodes costs more than it saves.
func (v *RouteView) setOutline(same bool) {
	switch {
	case !same:
		v.Outline = nil
	case v.outline == nil:
		v.outline = v.s.Table.Outline()
		v.Outline = v.outline
	case v.Outline == nil:
		v.outline.ChangedAll()
		v.Outline = v.outline
	default:
		for _, i := range v.stale {
			if at := int(i) - len(v.Decode); at < 0 {
				v.outline.ChangedDecode(int(i))
			} else {
				v.outline.ChangedPrefill(at)
			}
		}
	}
}

// node returns the node at a place.
func (s *Snapshot) node(place int) *Node {
	if place < len(s.Decode) {
		return s.Decode[place]
	}
	return s.Prefill[place-len(s.Decode)]
}

// state returns the state of the node at a place.
func (v *RouteView) state(place int) *route.State {
	if place < len(v.Decode) {
		return &v.Decode[place]
	}
	return &v.Prefill[place-len(v.Decode)]
}

// read brings the node at a place up to date.
func (v *RouteView) read(place int, n *Node) {
	l, m := n.link.Load(), n.member.Load()
	h, s, f := l.last(), v.state(place), &v.facts[place]
	sent := route.Sent{Requests: int(n.inFlight.Load()), Blocks: l.taken()}
	n.queued.sent(&sent)
	s.Local = n.local.Load()
	s.Merge(&h.Report, sent, 0)
	*f = facts{
		fingerprint: fingerprintOf(l, m), running: route.Count(h.Running), waiting: route.Count(h.Waiting + h.Held), memory: s.Memory,
		full:  m.Role != "prefill" && h.maxRunning > 0 && int(s.Load) >= h.maxRunning,
		ready: l != nil && !n.stalled.Load() && !n.quiet.Load() && l.conn.Open() && !h.draining && m.Ready && !m.Draining,
	}
	if l != nil {
		f.grammar, f.vectors = l.grammar, l.vectors
	}
	v.adapt(place)
}

// adapt computes the parts of a node's state that depend on the key. Prefill nodes know nothing of
// what follows the prompt. A vector is computed where it does not wait for the end of a stream.
func (v *RouteView) adapt(place int) {
	s, f, k := v.state(place), &v.facts[place], &v.key
	s.Usable = f.ready && (k.fingerprint == 0 || f.fingerprint == 0 || f.fingerprint == k.fingerprint) &&
		(k.grammar == 0 || f.grammar == k.grammar || place >= len(v.Decode)) &&
		(k.vectors == 0 || f.vectors == k.vectors && !(f.full && v.s.Whole()) || place >= len(v.Decode)) && (k.adapter == 0 || v.s.node(place).adapts(k.adapter))
	s.Memory = f.memory
	s.Memory.Reserve(0, int(f.running), int(f.waiting), k.answer)
}

// hold sets how much of the prompt each node has.
func (v *RouteView) hold(q *Query) {
	v.found, v.levels, v.most = v.found[:0], v.levels[:0], v.most[:0]
	least := 0
	if b := v.s.blocks; b != nil && len(q.Hashes) > 0 {
		b.mu.RLock()
		if len(q.Groups) > 1 || len(q.Groups) == 1 && q.Groups[0].Window > 0 { // not in levels
			v.found = b.look(v.found, q.Hashes, q.BlockTokens, q.Groups)
			v.Outline = nil
		} else {
			v.found, v.levels = b.levels(v.found, v.levels, q.Hashes)
			most, blocks := route.Most(v.levels)
			if most != nil {
				v.most = most.Slots(v.most)
			}
			least = min(int(blocks)*q.BlockTokens, q.Tokens)
		}
		if v.given != b.given {
			v.given = b.given
			v.s.each(func(i int, n *Node) {
				if v.slots[i] == 0 {
					if at, ok := b.slots[n.member.Load().ID]; ok {
						v.slots[i] = int32(at) + 1
						v.place = append(v.place, make([]int32, max(0, at+1-len(v.place)))...)
						v.place[at] = int32(i) + 1
					}
				}
			})
		}
		b.mu.RUnlock()
	}
	for _, h := range []*route.Holdings{&v.DecodeHeld, &v.PrefillHeld} {
		h.Blocks, h.BlockTokens, h.Tokens, h.Most, h.Least = v.found, q.BlockTokens, q.Tokens, h.Most[:0], least
	}
	for _, slot := range v.most {
		if int(slot) >= len(v.place) || v.place[slot] == 0 {
			continue
		}
		if at := int(v.place[slot]) - 1; at < len(v.Decode) {
			v.DecodeHeld.Most = append(v.DecodeHeld.Most, int32(at))
		} else {
			v.PrefillHeld.Most = append(v.PrefillHeld.Most, int32(at-len(v.Decode)))
		}
	}
	if v.Outline == nil {
		v.Fill()
	}
}

// fall makes the nodes of the first level that any node reaches usable, if none is of the level
// that adapt checks.
func (v *RouteView) fall(nodes []*Node, states []route.State, q *Query) {
	for level := range levels {
		if slices.ContainsFunc(states, func(s route.State) bool { return s.Usable }) {
			return
		}
		for i, n := range nodes {
			if states[i].Usable = n.fits(q) && levels[level](n, q.Avoid); states[i].Usable {
				v.key.set = false
			}
		}
	}
}

// keepClass makes the decode nodes of other classes unusable if one of the class is usable and
// connected. A node of unknown class is of every class.
func (v *RouteView) keepClass(class string) {
	if class == "" {
		return
	}
	of := func(n *Node) bool { return n.Class() == "" || n.Class() == class }
	for i, n := range v.s.Decode {
		if !v.Decode[i].Usable || !of(n) || !n.connected() {
			continue
		}
		v.key.set = false
		for i, n := range v.s.Decode {
			v.Decode[i].Usable = v.Decode[i].Usable && of(n)
		}
		return
	}
}

// Closed reports whether a node of the decision, which was connected at the last Look, is not
// connected any more. The next Look takes that into account.
func (v *RouteView) Closed(d route.Decision) (closed bool) {
	check := func(place int, n *Node) {
		if v.facts[place].ready && !n.connected() {
			n.changed()
			closed = true
		}
	}
	if d.Decode >= 0 {
		check(d.Decode, v.s.Decode[d.Decode])
	}
	for _, i := range d.Prefill {
		check(len(v.s.Decode)+i, v.s.Prefill[i])
	}
	return closed
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

// levels are the conditions on a usable node below the first level, which adapt checks, down to
// none. Prefill nodes are never in Avoid.
var levels = [...]func(n *Node, avoid []*Node) bool{
	func(n *Node, avoid []*Node) bool {
		return n.breaker.State() != breaker.Open && !slices.Contains(avoid, n)
	},
	func(n *Node, _ []*Node) bool { return n.connected() && !n.stalled.Load() },
	func(n *Node, avoid []*Node) bool { return !slices.Contains(avoid, n) },
	func(*Node, []*Node) bool { return true },
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

// Pools reports whether a connected node, decode or prefill, serves the model and computes vectors
// of the version.
func (s *Snapshot) Pools(fingerprint uint64, version uint32) bool {
	pools := func(n *Node) bool { return n.Pools(fingerprint, version) }
	return slices.ContainsFunc(s.Decode, pools) || slices.ContainsFunc(s.Prefill, pools)
}

// Pools reports whether the node is connected, serves the model and computes vectors of the
// version.
func (n *Node) Pools(fingerprint uint64, version uint32) bool {
	return n.pools(version) && n.usable(fingerprint)
}

// pools reports whether the node computes vectors of the version; 0: none are asked for.
func (n *Node) pools(version uint32) bool {
	l := n.link.Load()
	return version == 0 || l != nil && l.vectors == version
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
