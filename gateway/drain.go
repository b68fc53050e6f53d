package gateway

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/cluster"
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
	timeout := time.Duration(0)
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
	named := nodesOf(all, name)
	switch {
	case len(named) == 0 && g.drainUpstream(ctx, name, cancel):
		return
	case len(named) == 0:
		g.fail(ctx, &openai.Error{Status: 404, Type: openai.TypeNotFound, Message: "no node is called " + openai.Clip(name, 100) + ": /debug/nodes has their names"})
		return
	case len(named) > 1:
		g.fail(ctx, ambiguous(name, named))
		return
	}
	n := named[0]
	timeout, fault := g.native.DrainTime(n, timeout, defaultNodeDrain)
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	if err := n.Drain(timeout, cancel); err != nil {
		g.fail(ctx, openai.Unavailable(exchange.RetryAfter, "the node cannot be notified: %s", openai.Clip(err.Error(), 300)))
		return
	}
	m := n.Member()
	d := drained{Node: m.Name, Role: m.Role, Draining: !cancel, InFlight: n.InFlight()}
	if !cancel {
		d.Timeout = timeout.Seconds()
	}
	for _, o := range all {
		if o != n && (o.Member().Role == "prefill") == (m.Role == "prefill") && o.Usable() {
			d.Others++
		}
	}
	if peer := ctx.RemoteAddr().String(); cancel {
		g.Log.Warn("drain of a node cancelled by an operator", "node", m.Name, "peer", peer)
	} else {
		g.Log.Warn("node drained by an operator", "node", m.Name, "timeout", timeout, "others", d.Others, "peer", peer)
	}
	g.json(ctx, d)
}

// nodesOf returns the nodes that an operator may mean by a name: those whose identity, address or
// host it is, that have been given it, or that are shown under it.
func nodesOf(all []*nodes.Node, name string) (named []*nodes.Node) {
	for _, n := range all {
		m := n.Member()
		host, _, err := net.SplitHostPort(n.Name)
		if name == n.Name || name == m.ID || name == m.Name || name == cluster.NameOf(m.ID) || err == nil && name == host {
			named = append(named, n)
		}
	}
	return named
}

// maxCandidates bounds the nodes in the error of an ambiguous name.
const maxCandidates = 20

// ambiguous refuses a name that several nodes have.
func ambiguous(name string, named []*nodes.Node) *openai.Error {
	var all []string
	for _, n := range named[:min(len(named), maxCandidates)] {
		m := n.Member()
		all = append(all, fmt.Sprintf("%s at %s (%s)", openai.Clip(m.Name, 100), n.Name, m.Role))
	}
	if more := len(named) - len(all); more > 0 {
		all = append(all, fmt.Sprintf("%d more", more))
	}
	return &openai.Error{Status: 409, Type: openai.TypeConflict,
		Message: fmt.Sprintf("%d nodes are called %s: %s: name one of them by its address", len(named), openai.Clip(name, 100), strings.Join(all, ", "))}
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
	if peer := ctx.RemoteAddr().String(); cancel {
		g.Log.Warn("drain of an upstream cancelled by an operator", "upstream", s.Name, "peer", peer)
	} else {
		g.Log.Warn("upstream drained by an operator", "upstream", s.Name, "others", d.Others, "peer", peer)
	}
	g.json(ctx, d)
	return true
}
