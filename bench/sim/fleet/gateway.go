package fleet

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/route"
)

// gateway is the state of a gateway and its decisions.
type gateway struct {
	f               *fleet
	down            bool
	view            route.View
	decode, prefill known
	draw            *rand.Rand
	turn            uint64
	hashes          []kvcache.Hash
	dst             []int
	lastRequest     route.Request // the last routed request
	reservedNode    int           // decode node that the next waiting request waits for; -1: none
	answers         route.Answers
	room            room
	waiting         *admit.Queue // requests that wait for room
	flow            *admit.Flow  // of all requests
	filling         bool
}

// known is what the gateway knows about the nodes of one role.
type known struct {
	nodes   []*node
	index   *route.Index // shared with the other gateways
	usable  []bool
	reports []route.Report
	own     []int // of a report's requests, those of this gateway
	sent    []route.Sent
	local   []bool // decode: the last prompt worth a transfer was computed there

	states  []route.State // of the gateway's view, kept from one decision to the next
	changed []int32       // nodes whose state is to be computed again
	isIn    []bool        // changed, by node
	levels  []route.Level // reused
	answer  int           // of the states
	logged  func(int)     // of the view's outline
}

// change makes the next look compute the state of a node.
func (k *known) change(i int) {
	if !k.isIn[i] {
		k.logged(i)
		k.isIn[i] = true
		k.changed = append(k.changed, int32(i))
	}
}

func newGateway(f *fleet, i int) *gateway {
	g := &gateway{f: f, reservedNode: -1, draw: rand.New(rand.NewPCG(f.o.Seed, uint64(1+i))), turn: uint64(f.o.Placing + i), decode: newKnown(f.decode, f.decodeBlocks), prefill: newKnown(f.prefill, f.prefillBlocks),
		waiting: admit.New(admit.Limits{Requests: bound(f.limits.MaxQueuedRequests), Tokens: bound(f.limits.MaxQueuedTokens)}), flow: admit.NewFlow(1)}
	g.view = route.View{
		Decode: g.decode.states, DecodeHeld: g.decode.holdings(&f.o), Prefill: g.prefill.states, PrefillHeld: g.prefill.holdings(&f.o), Outline: f.table.Outline(),
	}
	g.decode.logged, g.prefill.logged = g.view.Outline.ChangedDecode, g.view.Outline.ChangedPrefill
	g.decode.changeAll()
	g.prefill.changeAll()
	g.room.stale = true
	return g
}

// newTable builds the rings of the fleet.
func newTable(f *fleet) *route.Table {
	names := func(role int, nodes []*node) (list []route.Node) {
		for i := range nodes {
			name := fmt.Sprintf("10.%d.%d.%d:%d", role, i/250, i%250, 7101+f.o.Placing)
			if f.o.Names != nil {
				name = f.o.Names(Target{Prefill: role == 2, Node: i})
			}
			list = append(list, route.Node{Name: name})
		}
		return list
	}
	return route.New(names(1, f.decode), names(2, f.prefill))
}

func newKnown(nodes []*node, index *route.Index) known {
	n := len(nodes)
	k := known{nodes: nodes, index: index, usable: make([]bool, n), reports: make([]route.Report, n), own: make([]int, n), sent: make([]route.Sent, n), local: make([]bool, n), states: make([]route.State, n), isIn: make([]bool, n)}
	for i := range nodes {
		k.usable[i] = nodes[i].up
	}
	return k
}

// holdings returns holdings of a node's blocks by its place.
func (k *known) holdings(o *Options) route.Holdings {
	h := route.Holdings{Blocks: make([]int32, len(k.nodes)), BlockTokens: o.BlockTokens}
	for i := range k.nodes {
		h.Slots = append(h.Slots, int32(i+1))
	}
	return h
}

func (k *known) changeAll() {
	for i := range k.states {
		k.change(i)
	}
}

func (g *gateway) knownNodes(n *node) *known {
	if n.computes {
		return &g.prefill
	}
	return &g.decode
}

// index returns the gateways' index of the caches of the node's role. Gateways share it, because
// all of them receive an event at the same time.
func (f *fleet) index(n *node) *route.Index {
	if n.computes {
		return f.prefillBlocks
	}
	return f.decodeBlocks
}

// changed applies a node's block events.
func (f *fleet) changed(n *node, events []kvcache.Event) {
	index := f.index(n)
	for _, e := range events {
		if e.Kind == kvcache.Stored {
			index.Add(n.at, e.Hash)
		} else {
			index.Remove(n.at, e.Hash)
		}
	}
}

// setUsable makes gateways use a node, or not. A node that is gone has no cache.
func (f *fleet) setUsable(n *node, usable bool) {
	for _, g := range f.gateways {
		k := g.knownNodes(n)
		k.usable[n.at] = usable
		k.change(n.at)
		g.room.stale = true
		if !n.up {
			k.reports[n.at] = route.Report{}
		}
	}
	if !n.up {
		for shard := range route.IndexShards {
			f.index(n).Clear(n.at, shard)
		}
	}
}

// setUsableLater makes gateways use a node that is ready, when they learn of it.
func (f *fleet) setUsableLater(n *node) {
	epoch := n.epoch
	f.clock.at(f.clock.now+f.o.ReportDelay+f.o.RoundTrip/2, func() {
		if n.epoch != epoch || n.draining {
			return
		}
		f.setUsable(n, true)
		for _, g := range f.gateways {
			if f.o.Heartbeat > 0 {
				g.reported(n, n.report())
			}
			g.fill()
		}
	})
}

// rateChanged makes gateways that get no heartbeats know the node's rate.
func (f *fleet) rateChanged(n *node) {
	if f.o.Heartbeat == 0 {
		for _, g := range f.gateways {
			g.knownNodes(n).change(n.at)
		}
	}
}

// look brings the states up to date. answer is the expected number of KV blocks of an answer.
func (k *known) look(o *Options, answer int) {
	if answer != k.answer {
		k.answer = answer
		k.changeAll()
	}
	for _, i := range k.changed {
		k.isIn[i] = false
		if o.Heartbeat == 0 {
			k.reports[i].Rate = k.nodes[i].rate
		}
		k.states[i] = route.State{Usable: k.usable[i], Full: k.states[i].Full, Local: k.local[i]}
		k.states[i].Merge(&k.reports[i], k.sent[i], answer)
	}
	k.changed = k.changed[:0]
}

// hold sets how much each node holds of a prompt of so many tokens.
func (k *known) hold(h *route.Holdings, tokens int, hashes []kvcache.Hash) {
	if len(k.levels) > 0 {
		clear(h.Blocks)
	}
	h.Tokens, h.Most, h.Least, k.levels = tokens-1, h.Most[:0], 0, k.levels[:0]
	if len(hashes) == 0 || !k.index.Holds(hashes[0]) {
		return // most prompts without a prefix in common
	}
	k.levels = k.index.Levels(hashes, k.levels)
	for i := range k.levels {
		k.levels[i].Write(h.Blocks)
	}
	h.Most = h.Most[:0]
	most, least := route.Most(k.levels)
	if most != nil {
		h.Most = most.Slots(h.Most)
	}
	h.Least = min(int(least)*h.BlockTokens, h.Tokens)
}

// pick routes a request's prompt and answer so far. With demand, a node without KV memory for them
// is not chosen.
func (g *gateway) pick(r *Request, demand bool) route.Decision {
	f := g.f
	tokens := r.Prompt + r.emitted
	g.hashes = f.hashes(g.hashes[:0], r, tokens)
	answer := g.expect(maxAnswer)
	g.decode.look(&f.o, f.blocks(answer))
	g.prefill.look(&f.o, 0)
	g.decode.hold(&g.view.DecodeHeld, tokens, g.hashes)
	g.prefill.hold(&g.view.PrefillHeld, tokens, g.hashes)
	q := route.Request{
		Policy: f.o.Policy, Key: f.key(g.hashes, r, tokens), Uncached: tokens - 1, MinRemote: f.o.MinRemote,
		Turn: g.turn + 1, Draw: g.draw.Uint64(), Shared: len(f.gateways) > 1,
	}
	if demand && !f.o.NoRoom {
		q.Demand.Prompt = f.blocks(r.Prompt + 1)
		q.Demand.Answer = f.blocks(r.Prompt+g.expect(r.Output)) - q.Demand.Prompt
		q.Demand.Answer = max(0, q.Demand.Answer)
	}
	g.lastRequest = q
	if g.reservedNode >= 0 {
		g.exclude(g.reservedNode)
	}
	g.avoid(r)
	d := f.table.Pick(q, g.view, g.dst[:0])
	g.dst = d.Prefill
	return d
}

// avoid makes the nodes unusable that have failed the request, unless no other node is usable.
func (g *gateway) avoid(r *Request) {
	tried := r.choice.Tried
	if len(tried) == 0 {
		return
	}
	for i := range g.view.Decode {
		if g.view.Decode[i].Usable && !slices.Contains(tried, i) {
			for _, at := range tried {
				g.exclude(at)
			}
			return
		}
	}
}

// remember records for the next decision whether the decode node computes a prompt that is worth a
// transfer.
func (g *gateway) remember(d *route.Decision) {
	k, at, local := &g.decode, d.Decode, d.PrefillReason == route.ReasonLocal
	if (local || d.PrefillReason == route.ReasonRemote) && k.local[at] != local {
		k.local[at] = local
		k.change(at)
	}
}

// exclude makes a decode node unusable until the next look.
func (g *gateway) exclude(at int) {
	g.view.Decode[at].Usable = false
	g.decode.change(at)
}

// blocks returns the number of KV blocks that tokens fill.
func (f *fleet) blocks(tokens int) int { return (tokens + f.o.BlockTokens - 1) / f.o.BlockTokens }

// claim counts a routed attempt on its nodes. Until the first token, its prompt's uncached tokens
// count on the node that will compute them.
func (g *gateway) claim(a *attempt) {
	g.decode.sent[a.n.at].Requests++
	g.decode.change(a.n.at)
	k, at, held := &g.decode, a.n.at, int(g.view.Decode[a.n.at].Held)
	if len(a.prefill) > 0 {
		k, at = &g.prefill, a.prefill[0].at
		held = int(g.view.Prefill[at].Held)
		k.sent[at].Requests++
		k.change(at)
	}
	a.claimed, a.claimedOf = max(1, a.tokens-1-held), &k.sent[at]
	a.claimedOf.Queued += a.claimed
	a.claimedOf.Lengths.Add(a.claimed)
	g.room.count(a.claimed)
	a.blocks = g.f.blocks(a.r.Prompt+g.expect(a.r.Output)) - int(g.view.Decode[a.n.at].Held)/g.f.o.BlockTokens
	g.decode.sent[a.n.at].Blocks += a.blocks
}

// started ends an attempt's claim on the node that computes its prompt.
func (g *gateway) started(a *attempt) {
	if a.claimedOf == nil {
		return
	}
	a.claimedOf.Queued -= a.claimed
	a.claimedOf.Lengths.Remove(a.claimed)
	g.decode.change(a.n.at)
	if a.claimedOf != &g.decode.sent[a.n.at] {
		a.claimedOf.Requests--
		g.prefill.change(a.prefill[0].at)
	}
	a.claimedOf = nil
	g.room.computed(a.claimed)
}

// leave ends an attempt for the gateway.
func (g *gateway) leave(a *attempt) {
	a.n.look() // its tokens until now are counted
	a.over, a.r.a = true, nil
	g.started(a)
	g.decode.change(a.n.at)
	sent := &g.decode.sent[a.n.at]
	sent.Requests--
	sent.Blocks -= a.blocks
}

// startHeartbeats makes every node report at once, as it does when a gateway connects,
// and then periodically, with the nodes spread evenly over the interval.
func (f *fleet) startHeartbeats() {
	if f.o.Heartbeat == 0 {
		return
	}
	nodes := f.upNodes()
	for i, n := range nodes {
		for _, g := range f.gateways {
			g.reported(n, n.report())
		}
		f.clock.at(f.o.Heartbeat*time.Duration(i+1)/time.Duration(len(nodes)), n.beater())
	}
}

// upNodes returns the nodes that work.
func (f *fleet) upNodes() []*node {
	return slices.DeleteFunc(slices.Concat(f.decode, f.prefill), func(n *node) bool { return !n.up })
}

// beat reports the node, and again after each interval.
func (n *node) beat() {
	if n.f.o.Heartbeat > 0 {
		n.beater()()
	}
}

// idleReports is the time between two reports of a node whose load does not change, as in
// internal/node.
const idleReports = 500 * time.Millisecond

// beater returns a function that reports the node if its load has changed or the last report is
// old, and calls itself after each interval until the node dies.
func (n *node) beater() func() {
	f, epoch := n.f, n.epoch
	var last route.Report
	var beat func()
	skipped, most := 0, int(idleReports/f.o.Heartbeat)-1
	beat = func() {
		if n.epoch != epoch {
			return
		}
		f.clock.at(f.clock.now+f.o.Heartbeat, beat)
		r := n.report()
		if skipped++; skipped <= most && r.Running == last.Running && r.Waiting == last.Waiting && r.Held == last.Held && r.Queued == last.Queued {
			return
		}
		last, skipped = r, 0
		if f.o.ReportDelay == 0 {
			f.reported(n, r)
			return
		}
		f.clock.at(f.clock.now+f.o.ReportDelay, func() {
			if n.epoch == epoch {
				f.reported(n, r)
			}
		})
	}
	return beat
}

// reported passes a heartbeat to the gateways.
func (f *fleet) reported(n *node, r route.Report) {
	for _, g := range f.gateways {
		g.reported(n, r)
	}
	for _, g := range f.gateways {
		g.fill()
	}
}

// reported records a node's heartbeat.
func (g *gateway) reported(n *node, r route.Report) {
	k := g.knownNodes(n)
	k.reports[n.at], k.own[n.at], k.sent[n.at].Blocks = r, k.sent[n.at].Requests, 0
	k.change(n.at)
	g.room.stale = true
}

// report returns the node's heartbeat with the fields of decode/drain.go and
// prefill/heartbeat.go.
func (n *node) report() route.Report {
	st := n.stats()
	r := route.Report{Running: st.Running, Waiting: st.Waiting + n.line.Waiting(), Held: st.Held, Queued: st.Pending + n.line.WaitingTokens(), Rate: n.rate, StepTokens: st.StepTokens}
	if n.computes {
		r.ShortFirst, r.Lengths = true, n.line.Lengths()
		return r
	}
	b := &st.Blocks
	r.Memory = route.Memory{Total: route.Count(b.Blocks), Free: route.Count(b.Free), Cached: route.Count(b.Cached), Reserved: route.Count(st.Wanted)}
	return r
}
