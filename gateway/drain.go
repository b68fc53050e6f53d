package gateway

import (
	"slices"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

const (
	drainPath = "/admin/drain/"
	// defaultNodeDrain is how long streams may continue on a drained node before they are resumed
	// on other nodes.
	defaultNodeDrain = 30 * time.Second
	// maxNodeDrain is one day.
	maxNodeDrain = 24 * time.Hour
)

// drained is the answer of /admin/drain.
type drained struct {
	Node     string  `json:"node"`
	Role     string  `json:"role"`
	Draining bool    `json:"draining"`
	Timeout  float64 `json:"timeout_s,omitempty"` // 0: none, as of upstreams
	InFlight int64   `json:"in_flight"`           // requests of this gateway on the node
	Others   int     `json:"others"`              // usable nodes of the same role
}

// drainNode drains a node, or lets it take work again. The answer does not wait for the drain,
// whose progress /debug/nodes shows.
func (g *Gateway) drainNode(ctx *fasthttp.RequestCtx) {
	cancel := string(ctx.Method()) == "DELETE"
	timeout := defaultNodeDrain
	if text := string(ctx.QueryArgs().Peek("timeout")); text != "" && !cancel {
		var err error
		if timeout, err = time.ParseDuration(text); err != nil || timeout < time.Millisecond || timeout > maxNodeDrain {
			g.fail(ctx, openai.BadRequest("timeout", "timeout is %q: want a duration of 1ms to 24h, such as 30s", openai.Clip(text, 50)))
			return
		}
	}
	name := strings.TrimPrefix(pathOf(ctx), drainPath)
	fleet := g.native.Nodes.Now()
	all := slices.Concat(fleet.Prefill, fleet.Decode)
	at := slices.IndexFunc(all, func(n *nodes.Node) bool { return n.Member().ID == name || n.Name == name })
	if at < 0 && g.drainUpstream(ctx, name, cancel) {
		return
	}
	if at < 0 {
		g.fail(ctx, &openai.Error{Status: 404, Type: openai.TypeNotFound, Message: "no node is called " + openai.Clip(name, 100) + ": /debug/nodes has their names"})
		return
	}
	n := all[at]
	if err := n.Drain(timeout, cancel); err != nil {
		g.fail(ctx, openai.Unavailable(exchange.RetryAfter, "the node cannot be notified: %s", openai.Clip(err.Error(), 300)))
		return
	}
	m := n.Member()
	d := drained{Node: m.ID, Role: m.Role, Draining: !cancel, InFlight: n.InFlight.Load()}
	if !cancel {
		d.Timeout = timeout.Seconds()
	}
	for _, o := range all {
		if o != n && (o.Member().Role == "prefill") == (m.Role == "prefill") && o.Usable() {
			d.Others++
		}
	}
	g.Log.Warn("node drained by an operator", "node", m.ID, "cancel", cancel, "timeout", timeout, "others", d.Others, "peer", ctx.RemoteAddr().String())
	g.json(ctx, d)
}

// drainUpstream is drainNode for an upstream, by its URL or host. New requests use other upstreams.
// Running ones continue to their end, because no other server could resume them. It returns false
// if no upstream has the name.
func (g *Gateway) drainUpstream(ctx *fasthttp.RequestCtx, name string, cancel bool) bool {
	if g.proxy == nil {
		return false
	}
	all := g.proxy.Pool.Now().Servers
	at := slices.IndexFunc(all, func(s *upstream.Server) bool { return s.HasName(name) })
	if at < 0 {
		return false
	}
	s := all[at]
	s.Drain(!cancel)
	d := drained{Node: s.Name, Role: s.Role.String(), Draining: !cancel, InFlight: s.InFlight.Load()}
	for _, o := range all {
		if o != s && o.Role == s.Role && o.Up() && !o.Draining() {
			d.Others++
		}
	}
	g.Log.Warn("upstream drained by an operator", "upstream", s.Name, "cancel", cancel, "others", d.Others, "peer", ctx.RemoteAddr().String())
	g.json(ctx, d)
	return true
}
