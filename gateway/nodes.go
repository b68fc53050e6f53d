package gateway

import (
	"encoding/json"
	"slices"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// FollowEvents subscribes to the block events of nodes, so that prompts are routed to cached
// prefixes. A planner also exchanges its demand with other gateways. It is called before Run, at
// most once.
func (g *Gateway) FollowEvents(bus *cluster.Bus) {
	g.native.FollowEvents(bus)
	if g.planner != nil {
		g.planner.share(bus)
	}
}

// fleetView is the answer of /debug/nodes.
type fleetView struct {
	Version   string       `json:"version"`
	Ready     bool         `json:"ready"`
	Reason    string       `json:"reason,omitempty"` // why not ready
	Nodes     []nodes.View `json:"nodes"`
	Upstreams []proxy.View `json:"upstreams,omitempty"`
}

// nodes answers with the gateway's view of the fleet. It has addresses, so its route requires a key
// if there are keys.
func (g *Gateway) nodes(ctx *fasthttp.RequestCtx) {
	v := fleetView{Version: g.o.Version, Ready: true, Nodes: []nodes.View{}}
	if err := g.Ready(); err != nil {
		v.Ready, v.Reason = false, err.Error()
	}
	fleet := g.native.Nodes.Now()
	for _, n := range slices.Concat(fleet.Prefill, fleet.Decode) {
		v.Nodes = append(v.Nodes, n.View())
	}
	if g.proxy != nil {
		for _, s := range g.proxy.Pool.Now().Servers {
			u := proxy.ViewOf(s)
			u.Models = s.Models()
			v.Upstreams = append(v.Upstreams, u)
		}
	}
	g.json(ctx, v)
}

// json answers with a value of plain fields.
func (g *Gateway) json(ctx *fasthttp.RequestCtx, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	sendJSON(ctx, body)
}

func sendJSON(ctx *fasthttp.RequestCtx, body []byte) {
	ctx.SetContentType("application/json")
	ctx.Response.SetBodyRaw(body)
}
