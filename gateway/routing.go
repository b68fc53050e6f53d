package gateway

import (
	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/route"
)

// explanation is the answer of /debug/route.
type explanation struct {
	Words   []string    `json:"words"`
	Tokens  int         `json:"prompt_tokens"`
	Policy  string      `json:"policy"`
	Decode  string      `json:"decode,omitempty"`
	Prefill []string    `json:"prefill,omitempty"`
	Nodes   []routeNode `json:"nodes"`
}

// routeNode is the state of a node in a decision.
type routeNode struct {
	ID     string  `json:"id"`   // for people, as in /debug/nodes
	Name   string  `json:"name"` // address
	Role   string  `json:"role"`
	Usable bool    `json:"usable"`
	Load   int     `json:"requests"`
	Held   int     `json:"cached_tokens"`
	Queued int     `json:"queued_tokens"`
	Rate   float64 `json:"tokens_per_s"`
	Full   bool    `json:"kv_full,omitempty"` // lacks KV memory for the prompt and an answer
}

// explain answers where a prompt (?prompt=TEXT) would be computed now, and why. Nothing is sent.
func (g *Gateway) explain(ctx *fasthttp.RequestCtx) {
	if g.explainUpstream(ctx) {
		return
	}
	m, fault := g.native.Find(string(ctx.QueryArgs().Peek("model")))
	text := string(ctx.QueryArgs().Peek("prompt"))
	if fault == nil && (text == "" || m.Text == nil) {
		fault = openai.BadRequest("prompt", "give a prompt as ?prompt=TEXT (and a policy in the header %s)", exchange.PolicyHeader)
	}
	var how exchange.RouteHints
	if fault == nil {
		how, fault = g.Routing(&ctx.Request.Header)
	}
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	minRemote := max(1, g.o.MinRemotePrefillTokens)
	p, d, view, fleet := g.native.Explain(m, text, &how)
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
			e.Nodes = append(e.Nodes, routeNode{n.Member().Name, n.Name, role, s.Usable, int(s.Load), int(s.Held), int(s.Queued), s.Rate, s.Full})
		}
	}
	see("decode", fleet.Decode, view.Decode)
	see("prefill", fleet.Prefill, view.Prefill)
	g.json(ctx, e)
}
