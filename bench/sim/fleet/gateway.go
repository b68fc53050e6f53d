package fleet

import (
	"fmt"
	"math"
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
	table           *route.Table
	view            route.View
	decode, prefill known
	draw            *rand.Rand
	turn            uint64
	hashes          []kvcache.Hash
	lastRequest     route.Request // the last routed request
	reservedNode    int           // decode node that the next waiting request waits for; -1: none
	answers         route.Answers
	waiting         *admit.Queue // requests that wait for room
	flow            *admit.Flow  // of all requests
}

// known is what the gateway knows about the nodes of one role.
type known struct {
	nodes   []*node
	index   *route.Index
	match   []int32
	reports []route.Report
	sent    []route.Sent
}

func newGateway(f *fleet) *gateway {
	g := &gateway{f: f, reservedNode: -1, draw: rand.New(rand.NewPCG(f.o.Seed, 1)), turn: uint64(f.o.Placing), decode: newKnown(f.decode), prefill: newKnown(f.prefill),
		waiting: admit.New(admit.Limits{Requests: math.MaxInt, Tokens: math.MaxInt}), flow: admit.NewFlow(1)}
	names := func(role int, nodes []*node) (list []route.Node) {
		for i := range nodes {
			list = append(list, route.Node{Name: fmt.Sprintf("10.%d.%d.%d:%d", role, i/250, i%250, 7101+f.o.Placing)})
		}
		return list
	}
	g.table = route.New(names(1, f.decode), names(2, f.prefill))
	g.view = route.View{Decode: make([]route.State, len(f.decode)), Prefill: make([]route.State, len(f.prefill))}
	return g
}

func newKnown(nodes []*node) known {
	k := known{nodes: nodes, index: route.NewIndex(), match: make([]int32, len(nodes)), reports: make([]route.Report, len(nodes)), sent: make([]route.Sent, len(nodes))}
	k.index.Grow(len(nodes))
	return k
}

func (g *gateway) knownNodes(n *node) *known {
	if n.computes {
		return &g.prefill
	}
	return &g.decode
}

// blocks applies a node's block events.
func (g *gateway) blocks(n *node, events []kvcache.Event) {
	if g.f.o.NoEvents {
		return
	}
	index := g.knownNodes(n).index
	for _, e := range events {
		if e.Kind == kvcache.Stored {
			index.Add(n.at, e.Hash)
		} else {
			index.Remove(n.at, e.Hash)
		}
	}
}

// look writes the states of the nodes for a prompt.
func (k *known) look(states []route.State, r *Request, hashes []kvcache.Hash, o *Options, answer int) {
	clear(k.match)
	k.index.Match(hashes, k.match)
	for i := range states {
		s := &states[i]
		*s = route.State{Usable: true, Held: int32(min(int(k.match[i])*o.BlockTokens, r.Prompt-1))}
		if o.Heartbeat == 0 {
			k.reports[i].Rate = k.nodes[i].rate
		}
		s.Merge(&k.reports[i], k.sent[i], answer)
	}
}

// arrive routes a request that a client sends, or queues it.
func (f *fleet) arrive(r *Request) {
	g := f.gateway
	if g.waiting.Len() == 0 && g.route(r) {
		return
	}
	if _, no := g.waiting.Push(f.at(), &admit.Item{Flow: g.flow, Tokens: r.Prompt, Owner: r}, math.MaxInt64); no != nil {
		f.fail(fmt.Errorf("a queue without bounds refuses: %+v", *no))
	}
	f.result.Waited++
	g.fill()
}

// at returns the virtual time for a queue.
func (f *fleet) at() time.Time { return time.Unix(0, int64(f.clock.now)) }

// fill routes waiting requests while there is room for the next one, and then those that
// may pass it, first to nodes that it does not wait for.
func (g *gateway) fill() {
	routes := func(i *admit.Item) bool { return g.route(i.Owner.(*Request)) }
	for g.waiting.Len() > 0 && routes(g.waiting.Next()) {
		g.waiting.Take(g.f.at())
	}
	if g.waiting.Len() == 0 {
		return
	}
	g.reservedNode = route.Roomiest(g.view.Decode, &g.lastRequest)
	for i := g.waiting.NextElsewhere(routes); i != nil; i = g.waiting.NextElsewhere(routes) {
		g.waiting.PassElsewhere(g.f.at(), i)
	}
	g.reservedNode = -1
	for i := g.waiting.NextShorter(routes); i != nil; i = g.waiting.NextShorter(routes) {
		g.waiting.Pass(g.f.at(), i)
	}
}

// route selects a request's nodes and sends it. It returns false if no node has room.
func (g *gateway) route(r *Request) bool {
	f := g.f
	tokens := f.prompt(r)
	g.hashes = kvcache.AppendHashes(g.hashes[:0], 0, tokens, f.o.BlockTokens)
	answer := g.answers.Expect(math.MaxInt)
	g.decode.look(g.view.Decode, r, g.hashes, &f.o, f.blocks(answer))
	g.prefill.look(g.view.Prefill, r, g.hashes, &f.o, 0)
	q := route.Request{
		Policy: f.o.Policy, Key: route.Key(0, g.hashes, tokens), Uncached: r.Prompt - 1, MinRemote: f.o.MinRemote,
		Turn: g.turn + 1, Draw: g.draw.Uint64(),
	}
	if !f.o.NoRoom {
		q.Demand.Prompt = f.blocks(r.Prompt + 1)
		q.Demand.Answer = f.blocks(r.Prompt+g.answers.Expect(r.Output)) - q.Demand.Prompt
		q.Demand.Answer = max(0, q.Demand.Answer)
	}
	g.lastRequest = q
	if g.reservedNode >= 0 {
		g.view.Decode[g.reservedNode].Usable = false
	}
	d := g.table.Pick(q, g.view, r.prefill[:0])
	if d.Decode < 0 {
		if !slices.ContainsFunc(g.view.Decode, func(s route.State) bool { return s.Memory.Holds(q.Demand) }) {
			r.Refused = true
			f.result.open--
			return true
		}
		return false
	}
	g.turn++
	r.decode, r.prefill = d.Decode, d.Prefill
	g.claim(r)
	f.addRequest(r)
	return true
}

// blocks returns the number of KV blocks that tokens fill.
func (f *fleet) blocks(tokens int) int { return (tokens + f.o.BlockTokens - 1) / f.o.BlockTokens }

// claim counts a routed request on its nodes. Until the first token, its prompt's uncached
// tokens count on the node that will compute them.
func (g *gateway) claim(r *Request) {
	g.decode.sent[r.decode].Requests++
	k, at, held := &g.decode, r.decode, int(g.view.Decode[r.decode].Held)
	if len(r.prefill) > 0 {
		k, at = &g.prefill, r.prefill[0]
		held = int(g.view.Prefill[at].Held)
		k.sent[at].Requests++
	}
	r.claimed, r.claimedOf = max(1, r.Prompt-1-held), &k.sent[at]
	r.claimedOf.Queued += r.claimed
	r.claimedOf.Lengths.Add(r.claimed)
	r.blocks = g.f.blocks(r.Prompt+g.answers.Expect(r.Output)) - int(g.view.Decode[r.decode].Held)/g.f.o.BlockTokens
	g.decode.sent[r.decode].Blocks += r.blocks
}

// started ends a request's claim on the node that computes its prompt.
func (g *gateway) started(r *Request) {
	if r.claimedOf == nil {
		return
	}
	r.claimedOf.Queued -= r.claimed
	r.claimedOf.Lengths.Remove(r.claimed)
	if r.claimedOf != &g.decode.sent[r.decode] {
		r.claimedOf.Requests--
	}
	r.claimedOf = nil
}

// release ends a request on its decode node.
func (g *gateway) release(r *Request) {
	g.started(r)
	sent := &g.decode.sent[r.decode]
	sent.Requests--
	sent.Blocks -= r.blocks
	g.answers.Add(r.emitted)
	g.fill()
}

// startHeartbeats makes every node report at once, as it does when a gateway connects,
// and then periodically, with the nodes spread evenly over the interval.
func (f *fleet) startHeartbeats() {
	if f.o.Heartbeat == 0 {
		return
	}
	nodes := slices.Concat(f.decode, f.prefill)
	for i, n := range nodes {
		f.gateway.knownNodes(n).reports[n.at] = n.report()
		f.clock.at(f.o.Heartbeat*time.Duration(i+1)/time.Duration(len(nodes)), n.heartbeat)
	}
}

// heartbeat reports the node to the gateway, and again after the interval.
func (n *node) heartbeat() {
	k := n.f.gateway.knownNodes(n)
	k.reports[n.at], k.sent[n.at].Blocks = n.report(), 0
	n.f.gateway.fill()
	n.f.clock.at(n.f.clock.now+n.f.o.Heartbeat, n.heartbeat)
}

// report returns the node's heartbeat with the fields of decode/drain.go and
// prefill/heartbeat.go.
func (n *node) report() route.Report {
	st := n.s.Stats()
	r := route.Report{Running: st.Running, Waiting: st.Waiting + n.line.Waiting(), Held: st.Held, Queued: st.Pending + n.line.WaitingTokens(), Rate: n.rate, StepTokens: st.StepTokens}
	if n.computes {
		r.ShortFirst, r.Lengths = true, n.line.Lengths()
	}
	b := &st.Blocks
	r.Memory = route.Memory{Total: route.Count(b.Blocks), Free: route.Count(b.Free), Cached: route.Count(b.Cached), Reserved: route.Count(st.Wanted)}
	return r
}
