package native

import (
	"math"
	"math/rand/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/route"
)

// route decides where a prompt with nOut tokens of output is computed. From minRemote uncached
// tokens on, a prefill node may compute them. Decode nodes of class are preferred, unless it is
// empty. view is filled and stays the caller's.
func (fl *Fleet) route(fleet *nodes.Snapshot, view *route.View, m *Model, p *render.Prompt, how *exchange.RouteHints, demand route.Demand, nOut, minRemote int, avoid []*nodes.Node, class string) route.Decision {
	n := len(p.Tokens) + nOut - 1 // decode nodes compute the last token
	q := m.query(p, n)
	q.Avoid, q.Class = avoid, class
	fleet.Look(view, q)
	r := how.Request(p.Key)
	r.Demand, r.Uncached, r.MinRemote = demand, n, minRemote
	if r.Policy == route.Prefix && fleet.Shared {
		r.Shared, r.Draw = true, rand.Uint64()
	}
	return fleet.Table.Pick(r, *view, nil)
}

// Explain decides where a prompt would be computed now. Nothing is sent.
func (fl *Fleet) Explain(m *Model, text string, how *exchange.RouteHints) (render.Prompt, route.Decision, *route.View, *nodes.Snapshot) {
	root := m.Root("")
	p := render.Prompt{Tokens: m.Text.Tokens(text, true)}
	p.Hashes = kvcache.AppendHashes(nil, root, p.Tokens, m.BlockTokens)
	p.Key = route.Key(root, p.Hashes, p.Tokens)
	fleet, view := fl.Nodes.Now(), new(route.View)
	minRemote := max(1, fl.o.MinRemotePrefillTokens)
	d := fl.route(fleet, view, m, &p, how, m.demand(len(p.Tokens), math.MaxInt32, 1), 0, minRemote, nil, "")
	return p, d, view, fleet
}
