package gateway

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/route"
)

// route decides where a prompt with nOut tokens of output goes, whose prefill may
// be elsewhere from minRemote uncached tokens on. Decode nodes of class are preferred
// to all others, where it is given. view is filled and stays the caller's.
func (g *Gateway) route(fleet *nodes.Snapshot, view *route.View, m *model, p *render.Prompt, how *exchange.RouteHints, demand route.Demand, nOut, minRemote int, avoid []*nodes.Node, class string) route.Decision {
	n := len(p.Tokens) + nOut - 1 // the last token is decode's own
	q := m.query(p, n)
	q.Avoid, q.Class = avoid, class
	fleet.Look(view, q)
	r := route.Request{Policy: how.Policy, Key: p.Key, Demand: demand, Uncached: n, MinRemote: minRemote, Turn: how.Turn}
	switch {
	case r.Policy == route.Session && how.Session != 0:
		r.Key = how.Session
	case r.Policy == route.PowerOfTwo:
		r.Draw = rand.Uint64()
	case r.Policy == route.Prefix && fleet.Shared:
		r.Shared, r.Draw = true, rand.Uint64()
	}
	return fleet.Table.Pick(r, *view, nil)
}

// explanation is the answer of /debug/route.
type explanation struct {
	Words   []string    `json:"words"`
	Tokens  int         `json:"prompt_tokens"`
	Policy  string      `json:"policy"`
	Decode  string      `json:"decode,omitempty"`
	Prefill []string    `json:"prefill,omitempty"`
	Nodes   []routeNode `json:"nodes"`
}

// routeNode is a node as a decision saw it.
type routeNode struct {
	Name   string  `json:"name"`
	Role   string  `json:"role"`
	Usable bool    `json:"usable"`
	Load   int     `json:"requests"`
	Held   int     `json:"cached_tokens"`
	Queued int     `json:"queued_tokens"`
	Rate   float64 `json:"tokens_per_s"`
	Full   bool    `json:"kv_full,omitempty"` // it has no KV memory for the prompt and an answer
}

// explain answers where a prompt (?prompt=TEXT) would go now, and why, in words.
// Nothing is sent.
func (g *Gateway) explain(ctx *fasthttp.RequestCtx) {
	if g.explainForeign(ctx) {
		return
	}
	m, fault := g.find(string(ctx.QueryArgs().Peek("model")))
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	text := string(ctx.QueryArgs().Peek("prompt"))
	if text == "" || m.Text == nil {
		g.fail(ctx, openai.BadRequest("prompt", "give a prompt as ?prompt=TEXT (and a policy in the header %s)", exchange.PolicyHeader))
		return
	}
	how, fault := g.Routing(&ctx.Request.Header)
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	root := m.Root("")
	p := render.Prompt{Tokens: m.Text.Tokens(text, true)}
	p.Hashes = kvcache.AppendHashes(nil, root, p.Tokens, m.BlockTokens)
	p.Key = route.Key(root, p.Hashes, p.Tokens)
	fleet, view := g.fleet.Now(), new(route.View)
	minRemote := max(1, g.o.MinRemotePrefillTokens)
	d := g.route(fleet, view, m, &p, &how, m.demand(len(p.Tokens), math.MaxInt32, 1), 0, minRemote, nil, "")
	e := explanation{Tokens: len(p.Tokens), Policy: how.Policy.String(), Nodes: []routeNode{}}
	e.Words = fleet.Table.Explain(d, *view, len(p.Tokens), minRemote)
	if d.Decode >= 0 {
		e.Decode = fleet.Decode[d.Decode].Name
	}
	for _, i := range d.Prefill {
		e.Prefill = append(e.Prefill, fleet.Prefill[i].Name)
	}
	see := func(role string, nodes []*nodes.Node, states []route.State) {
		for i, n := range nodes {
			s := &states[i]
			e.Nodes = append(e.Nodes, routeNode{n.Name, role, s.Usable, s.Load, s.Held, s.Queued, s.Rate, s.Full})
		}
	}
	see("decode", fleet.Decode, view.Decode)
	see("prefill", fleet.Prefill, view.Prefill)
	g.json(ctx, e)
}

// policyOf reads the option, which was checked where it was given.
func policyOf(name string) (route.Policy, error) {
	p, err := route.ParsePolicy(name)
	if err != nil {
		return 0, fmt.Errorf("gateway: --policy: %w", err)
	}
	return p, nil
}
