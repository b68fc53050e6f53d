package native

import (
	"cmp"
	"math"
	"math/rand/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// route decides where a prompt with nOut tokens of output is computed. From minRemote uncached
// tokens on, a prefill node may compute them. Decode nodes of class are preferred, unless it is
// empty. view is of fleet, and stays the caller's. A node whose connection has closed is chosen
// only if no other is usable.
func (fl *Fleet) route(fleet *nodes.Snapshot, view *nodes.RouteView, m *Model, p *render.Prompt, how *exchange.RouteHints, demand route.Demand, nOut, minRemote int, avoid []*nodes.Node, class string) route.Decision {
	n := len(p.Tokens) + nOut - 1 // decode nodes compute the last token
	q := m.query(p, n)
	q.Avoid, q.Class = avoid, class
	r := how.Request(p.Key)
	r.Demand, r.Uncached, r.MinRemote = demand, n, minRemote
	if r.Policy == route.Prefix && fleet.Shared {
		r.Shared, r.Draw = true, rand.Uint64()
	}
	for {
		view.Look(q)
		if d := fleet.Table.Pick(r, view.View, nil); !view.Closed(d) {
			return d
		}
	}
}

// Explain decides where a prompt would be computed now. Nothing is sent.
func (fl *Fleet) Explain(m *Model, text string, how *exchange.RouteHints) (render.Prompt, route.Decision, *route.View, *nodes.Snapshot) {
	root := m.Root("")
	p := render.Prompt{Tokens: m.Text.Tokens(text, true)}
	p.Hashes = kvcache.AppendHashes(nil, root, p.Tokens, m.BlockTokens)
	p.Key = route.Key(root, p.Hashes, p.Tokens)
	fleet := fl.Nodes.Now()
	view := fleet.View() // is not released, because the caller keeps it
	minRemote := max(1, fl.o.MinRemotePrefillTokens)
	d := fl.route(fleet, view, m, &p, how, m.demand(len(p.Tokens), math.MaxInt32, 1), 0, minRemote, nil, "")
	view.Fill()
	return p, d, &view.View, fleet
}

// stepTokens is the step that KV groups with a window are sized for if the bundle does not have the
// node's own.
const stepTokens = 2048

// kvBlocks returns how many KV blocks a request of so many tokens holds at most.
func (m *Model) kvBlocks(tokens int) int {
	if len(m.groups) == 0 {
		return (tokens + m.BlockTokens - 1) / m.BlockTokens
	}
	return kvcache.Peak(m.groups, tokens, cmp.Or(int(m.bundle.StepTokens), stepTokens))
}

// demand returns the KV blocks that a prompt and its n answers are expected to take. A vector is an
// answer of 0 tokens.
func (m *Model) demand(nPrompt, maxTokens, n int) route.Demand {
	d := route.Demand{Prompt: m.kvBlocks(nPrompt + min(1, maxTokens))}
	d.Answer = n * max(0, m.kvBlocks(nPrompt+m.queue.Expect(maxTokens))-d.Prompt)
	return d
}

// query returns what a view of the fleet for a prompt looks up. At most n of the prompt's tokens
// are computed.
func (m *Model) query(p *render.Prompt, n int) nodes.Query {
	return nodes.Query{
		Fingerprint: m.Fingerprint, Adapter: m.adapter.GetDigest(), Grammar: m.grammar, Vectors: m.vectors, Hashes: p.Hashes, BlockTokens: m.BlockTokens, Groups: m.groups, Tokens: n,
		Answer: m.kvBlocks(m.queue.Expect(math.MaxInt)),
	}
}

// demand returns what the prompt and its answers are expected to take of a node's KV memory.
func (x *request) demand(p *render.Prompt) route.Demand {
	return x.model.demand(len(p.Tokens), p.MaxTokens, max(1, x.req.N))
}

// snapshot returns the nodes that may answer the request.
func (x *request) snapshot() *nodes.Snapshot {
	now := x.fleet.Nodes.Now()
	if x.pools() {
		return now.ForVectors(x.model.Fingerprint, nodes.VectorVersion)
	}
	return now
}

// kvRoom returns the demand for KV memory of the request's largest prompt, because each prompt may
// run on a node of its own. A prompt that no node could ever hold is an error.
func (x *request) kvRoom() (exchange.Room, *openai.Error) {
	var largest *render.Prompt
	total := int64(0)
	for i := range x.prompts {
		p := &x.prompts[i]
		if largest == nil || len(p.Tokens) > len(largest.Tokens) {
			largest = p
		}
		d := x.demand(p)
		total += int64(d.Prompt + d.Answer)
	}
	if largest == nil {
		return exchange.Room{}, nil
	}
	d := x.demand(largest)
	if !x.snapshot().Holds(x.model.Fingerprint, x.model.vectors, d) {
		return exchange.Room{}, openai.BadRequest(openai.PromptParam(x.req.Endpoint), "the prompt has %d tokens, which take %d KV blocks: no decode node of model %q has so many; send a shorter prompt",
			len(largest.Tokens), d.Prompt, x.model.Name)
	}
	return exchange.Room{Blocks: total, On: func(pending int64, avoid any) (bool, any) {
		d, q := d, x.model.query(largest, len(largest.Tokens)-1)
		d.Answer += int(pending)
		if n, ok := avoid.(*nodes.Node); ok {
			q.Avoid = []*nodes.Node{n}
		}
		has, most := x.snapshot().HasRoom(q, d)
		if most == nil {
			return has, nil
		}
		return has, most
	}}, nil
}

// takes returns the KV blocks that an attempt is expected to take of its node: what the node lacks
// of the prompt, and an answer.
func (x *request) takes(c *choice) int {
	d := x.model.demand(len(c.prompt.Tokens)+len(c.output), c.prompt.MaxTokens, 1)
	return d.Prompt + d.Answer - x.model.kvBlocks(c.held)
}

// Claim implements exchange.Backend.
func (x *request) Claim() (exchange.Claim, *openai.Error) {
	kv, fault := x.kvRoom()
	if fault != nil && x.surface != nil {
		fault.Param = "messages" // of the chat
		fault = x.surface.Fault(fault)
	}
	c := exchange.Claim{Queue: x.queue, Priority: x.req.Priority, Choices: int64(x.places()), Tokens: int64(x.nPrompt), Room: kv}
	if x.fleet.o.KeepModels && x.queue == x.model.queue {
		absent := func() bool { return x.fleet.Nodes.Now().Usable(x.model.Fingerprint) == 0 }
		if absent() {
			c.Queue.SetRoom(0, 0) // FollowRoom does it later
		}
		c.Late = func() *openai.Error {
			if !absent() {
				return nil
			}
			return x.NoAttempt(nil, "decode node", x.model.Name, false)
		}
	}
	return c, fault
}

// forecast counts the tokens of a prompt that a node has according to its block events. The node's
// Accepted has the true number, which another metric counts. A node uses whole blocks of all but
// the last token.
func (x *request) forecast(c *choice, node *nodes.Node) {
	bt, n := x.model.BlockTokens, len(c.prompt.Tokens)+len(c.output)
	held := bt * x.fleet.Blocks.Held(node.Member().ID, c.prompt.Hashes, bt, x.model.groups)
	x.S.Meters.Counter(metrics.GatewayPredictedCached).Add(float64(min(held, (n-1)/bt*bt)))
}
