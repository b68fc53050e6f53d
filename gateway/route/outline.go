package route

import "math"

// Outline has bounds of the costs of groups of nodes, so that Pick reads only the nodes of groups
// that may have the best node. Decisions are those without it. It has about 24 bytes for each node.
// It is not safe for concurrent use.
//
// A group is neighbours in the order of names. For the nodes of a group whose rates are known, the
// cost is a linear function of the tokens to compute, so that the least of them is concave, and is
// at least the chord between two of its points (knots). The other terms are bounded by their least
// value. When a node changes, its group's counts are corrected and its bounds are lowered to the
// node's. They rise again when the group is next summarized: before its nodes are read, or after
// some changes.
type Outline struct{ decode, prefill outline }

// outline is the Outline of one role.
type outline struct {
	decode  bool
	of      []int32 // group, by node
	groups  []group
	counted []counted // by node
	changed []int32   // nodes
	stale   []int32   // groups to be summarized
	bounds  []bounds
}

// counted is what a node adds to the counts of its group.
type counted struct {
	load                    int32
	usable, known, memories bool
	changed                 bool // since the last Pick
}

// mostChanges is the number of changes of a group's nodes after which the group is summarized.
const mostChanges = 32

// groupNodes is the number of nodes of a group. Larger groups make a decision compare fewer groups
// and read more nodes.
const groupNodes = 32

// knots are the numbers of tokens at which the costs of a group's nodes are known.
var knots = [...]float64{0, 512, 2048, 6144, 16384, 32768, 262144}

// oddRate and its inverse bound the rates, in tokens per second, with which no bound overflows.
const oddRate = 1e-9

// group is a summary of the usable nodes of a group.
type group struct {
	stale   bool
	mixed   bool  // it has no bounds: its prefill nodes have several classes, or rates are odd
	full    bool  // the last decision has marked a node Full
	class   int32 // of its nodes
	usable  int
	load    int     // sum
	changes int     // of its nodes since it was summarized
	known   int     // nodes with a known rate
	rated   bool    // rates and nRates are those of the states
	rates   float64 // sum of the known rates, of unusable nodes, too
	nRates  int     // number of them
	short   bool    // a node with a known rate computes short prompts first
	queued  int     // least of the nodes of unknown rate
	extra   float64 // least cost of load and memory
	slope   float64 // least time of a token of the nodes of known rate
	line    [len(knots)]float64
	total   int // least KV memory that a node has
	spare   int // least KV memory beyond the margin that is available on a node
	nMemory int // nodes whose memory is known, of unusable ones, too
}

// bounds are lower bounds of a group for one request.
type bounds struct{ cost, seconds float64 }

// Outline returns an outline for views of the table's nodes. All nodes count as changed.
func (t *Table) Outline() *Outline {
	o := &Outline{newOutline(&t.decode), newOutline(&t.prefill)}
	o.decode.decode = true
	return o
}

func newOutline(r *ring) outline {
	n := (len(r.nodes) + groupNodes - 1) / groupNodes
	o := outline{of: make([]int32, len(r.nodes)), groups: make([]group, n), counted: make([]counted, len(r.nodes)), bounds: make([]bounds, n)}
	for at, i := range r.sorted {
		o.of[i] = int32(at / groupNodes)
	}
	o.changeAll()
	return o
}

// ChangedDecode records that the state of a decode node has another value than at the last Pick,
// except for Held and Full.
func (o *Outline) ChangedDecode(i int) { o.decode.change(i) }

// ChangedPrefill is ChangedDecode of a prefill node.
func (o *Outline) ChangedPrefill(i int) { o.prefill.change(i) }

// ChangedAll records that every node has changed.
func (o *Outline) ChangedAll() {
	o.decode.changeAll()
	o.prefill.changeAll()
}

// unmarked records that nodes may have been marked Full without the outline.
func (o *Outline) unmarked() {
	for g := range o.decode.groups {
		o.decode.groups[g].full = true
	}
}

func (o *outline) change(i int) {
	if n := &o.counted[i]; !n.changed {
		n.changed = true
		o.changed = append(o.changed, int32(i))
	}
}

func (o *outline) changeAll() {
	for g := range o.groups {
		o.outdate(int32(g))
	}
}

// outdate makes the next Pick summarize a group.
func (o *outline) outdate(g int32) {
	if !o.groups[g].stale {
		o.groups[g].stale = true
		o.stale = append(o.stale, g)
	}
}

// members returns the nodes of a group.
func (s *side) members(g int) []int32 {
	return s.sorted[g*groupNodes : min((g+1)*groupNodes, len(s.sorted))]
}

// refresh makes the groups those of the states.
func (s *side) refresh() {
	o := s.outline
	for _, i := range o.changed {
		n, g := &o.counted[i], &o.groups[o.of[i]]
		n.changed = false
		if g.stale {
			continue
		}
		if g.changes++; g.changes > mostChanges {
			o.outdate(o.of[i])
			continue
		}
		g.rated = false
		g.discount(n)
		s.count(g, int(i))
	}
	o.changed = o.changed[:0]
	for _, g := range o.stale {
		s.summarize(int(g))
	}
	o.stale = o.stale[:0]
}

// summarize computes a group from its nodes.
func (s *side) summarize(at int) {
	old := &s.outline.groups[at]
	g := group{full: old.full, class: -1, queued: math.MaxInt, extra: math.Inf(1), slope: math.Inf(1), total: math.MaxInt, spare: math.MaxInt}
	for k := range g.line {
		g.line[k] = math.Inf(1)
	}
	for _, i := range s.members(at) {
		s.count(&g, int(i))
	}
	*old = g
}

// tighten summarizes a group that has changed since it was last summarized. It returns false for
// other groups.
func (s *side) tighten(at int) bool {
	if s.outline.groups[at].changes == 0 {
		return false
	}
	s.summarize(at)
	return true
}

// discount removes a node from the counts of its group, as which it was counted.
func (g *group) discount(n *counted) {
	if n.memories {
		g.nMemory--
	}
	if !n.usable {
		return
	}
	g.usable--
	g.load -= int(n.load)
	if n.known {
		g.known--
	}
}

// count adds a node to its group, whose bounds it lowers.
func (s *side) count(g *group, i int) {
	n, c := &s.states[i], &s.outline.counted[i]
	c.usable, c.known, c.memories = n.Usable, n.Rate > 0, n.Memory.Total != 0
	if m := &n.Memory; c.memories {
		g.nMemory++
		g.total, g.spare = min(g.total, int(m.Total)), min(g.spare, m.beyondMargin())
	}
	g.full = g.full || s.outline.decode && n.Full
	if !n.Usable {
		return
	}
	if g.usable == 0 {
		g.class = s.ring.class[i]
	}
	g.mixed = g.mixed || !s.outline.decode && (n.Full || s.ring.class[i] != g.class)
	c.load = max(0, n.Load)
	g.usable++
	g.load += int(c.load)
	extra, slow := 0.0, 1.0
	if s.outline.decode {
		extra, slow = n.pressure(), slowed(int(n.Load))
	}
	g.extra = min(g.extra, extra)
	if !c.known {
		g.queued = min(g.queued, max(0, int(n.Queued)))
		return
	}
	g.mixed = g.mixed || n.Rate < oddRate || n.Rate > 1/oddRate
	g.known++
	g.short = g.short || n.ShortFirst
	slope := slow / n.Rate
	start := float64(max(0, n.Queued))*slope + extra
	if s.outline.decode && n.ShortFirst {
		start = extra
	}
	g.slope = min(g.slope, slope)
	for k, x := range knots {
		g.line[k] = min(g.line[k], start+slope*x)
	}
}

// sumRates returns the sum of a group's known rates and their number.
func (s *side) sumRates(at int) (sum float64, n int) {
	g := &s.outline.groups[at]
	if !g.rated {
		g.rated, g.rates, g.nRates = true, 0, 0
		for _, i := range s.members(at) {
			if r := s.states[i].Rate; r > 0 {
				g.rates, g.nRates = g.rates+r, g.nRates+1
			}
		}
	}
	return g.rates, g.nRates
}

// at returns a lower bound of the cost of the nodes of known rate for x tokens.
func (g *group) at(x float64) float64 {
	if g.known == 0 {
		return math.Inf(1)
	}
	last := len(knots) - 1
	for k := 1; k <= last; k++ {
		if x <= knots[k] {
			low, high := g.line[k-1], g.line[k]
			return (low + (high-low)*(x-knots[k-1])/(knots[k]-knots[k-1])) * (1 - slack)
		}
	}
	return (g.line[last] + g.slope*(x-knots[last])) * (1 - slack)
}

// unknown reports whether a usable node has no known rate.
func (g *group) unknown() bool { return g.known < g.usable }

// hasRoom reports whether each node of the group has KV memory for the demand, as HasRoom.
func (g *group) hasRoom(d *Demand) bool {
	return g.nMemory == 0 || d.Prompt == 0 || d.Prompt <= g.total && d.Prompt+d.Answer <= g.spare
}

// Holdings is how much of a prompt nodes have in their caches. Pick reads it for the nodes that it
// considers, and sets their State.Held.
type Holdings struct {
	Blocks      []int32 // leading blocks of the prompt, by slot
	Slots       []int32 // slot plus one, by node; 0: the node holds nothing
	BlockTokens int
	Tokens      int // of the prompt that may be held
	// Most is the nodes, if any, that hold more tokens than Least. All others hold at most Least.
	Most  []int32
	Least int
}

// of returns the number of tokens that a node holds.
func (h *Holdings) of(i int) int32 {
	if at := int(h.Slots[i]); at > 0 && at <= len(h.Blocks) {
		return int32(min(int(h.Blocks[at-1])*h.BlockTokens, h.Tokens))
	}
	return 0
}

// Fill sets Held of all states from DecodeHeld and PrefillHeld. Pick has set it for some nodes only
// if there is an Outline, and does not set it without.
func (v *View) Fill() {
	for i := range v.Decode {
		v.Decode[i].Held = v.DecodeHeld.of(i)
	}
	for i := range v.Prefill {
		v.Prefill[i].Held = v.PrefillHeld.of(i)
	}
}

// hold sets the node's Held.
func (s *side) hold(i int) {
	if s.outline != nil {
		s.states[i].Held = s.held.of(i)
	}
}
