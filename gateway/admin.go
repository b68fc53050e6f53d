package gateway

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// operates checks whether a request may use an endpoint for operators or overseers; nil: it may.
// Any client may read what is for operators. Changes and views of the fleet need the operators' own
// port, an API key with admin=yes, or, without keys, a client on this machine. Views do because a
// tenant could infer other tenants' prompts from them. A web page may never change anything.
func (g *Gateway) operates(ctx *fasthttp.RequestCtx, here *endpoint, method string, port audience) *openai.Error {
	looks := method == "GET" || method == "HEAD"
	if here == nil || here.who != overseers && here.who != requesters && (here.who != operators || looks) {
		return nil
	}
	fault := g.operator(ctx, here, looks, port)
	if here.who == requesters {
		if fault != nil {
			ctx.SetUserValue(notOperator{}, fault)
		}
		return nil
	}
	return fault
}

// notOperator is where a request of requesters keeps the reason why its client is no operator.
type notOperator struct{}

// operator checks whether a request is one of an operator; nil: it is.
func (g *Gateway) operator(ctx *fasthttp.RequestCtx, here *endpoint, looks bool, port audience) *openai.Error {
	if !looks && len(ctx.Request.Header.Peek("Origin")) > 0 {
		// Browsers send Origin, and programs do not.
		return &openai.Error{Status: 403, Type: openai.TypeForbidden, Message: "requests of web pages, which have the header Origin, may change nothing here"}
	}
	if port == operators {
		return nil
	}
	if g.keys.Len() > 0 {
		if k := g.keyOf(ctx); k == nil || !k.Admin {
			return &openai.Error{Status: 403, Type: openai.TypeForbidden,
				Message: fmt.Sprintf("this API key may not use %s: give it admin=yes in the file of keys, or use the gateway's --admin-listen", here.Path)}
		}
		return nil
	}
	for name := range ctx.Request.Header.All() { // including headers without a value
		if fromProxy(string(name)) {
			return &openai.Error{Status: 403, Type: openai.TypeForbidden,
				Message: fmt.Sprintf("the request came through a proxy (it has the header %s), so its client may be on another machine: use an API key with admin=yes, or the gateway's --admin-listen", openai.Clip(string(name), 100))}
		}
	}
	if ip := ctx.RemoteIP(); ip.IsLoopback() || ip.IsUnspecified() { // the latter: a connection in memory
		return nil
	}
	return &openai.Error{Status: 403, Type: openai.TypeForbidden,
		Message: "from other machines this is possible only where the gateway has API keys, or at its --admin-listen"}
}

// fromProxy reports whether proxies or content networks add a header of that name. A proxy on this
// machine makes any client look like a local one.
func fromProxy(name string) bool {
	name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
	switch name {
	case "via", "cdn-loop", "x-proxyuser-ip", "x-appengine-user-ip", "x-request-start":
		return true
	}
	for _, part := range proxyNames {
		if strings.Contains(name, part) {
			return true
		}
	}
	return false
}

// proxyNames are parts of the names of such headers.
var proxyNames = [...]string{"forwarded", "client-ip", "connecting-ip", "real-ip", "remote-addr", "remote-ip", "peer-ip", "original-",
	"cf-ray", "cf-visitor", "x-envoy-", "x-amzn-", "x-amz-cf-", "x-azure-", "fastly-"}

// level returns the log level or changes it.
func (g *Gateway) level(ctx *fasthttp.RequestCtx) {
	if g.o.Level == nil {
		g.fail(ctx, &openai.Error{Status: 403, Type: openai.TypeForbidden, Message: "this gateway's log level is not to be seen from here"})
		return
	}
	if err := metrics.ServeLevel(ctx, g.o.Level); err != nil {
		g.fail(ctx, openai.BadRequest("", "%s", err))
	}
}

// targetGroup is one address in the format of Prometheus' HTTP service discovery.
type targetGroup struct {
	Targets []string          `json:"targets"`
	Labels  map[string]string `json:"labels"`
}

// A node that has left without draining remains a target for a while, so that Prometheus reports it
// as down.
const (
	lostFor = 15 * time.Minute
	maxLost = 1024 // nodes
)

// scraped are the nodes that targets has listed, by member id.
type scraped struct {
	mu sync.Mutex
	at map[string]sighting
}

type sighting struct {
	member nodes.Member
	last   time.Time
}

// update adds the present members, and returns them and the lost ones in the order of their ids.
func (s *scraped) update(members []nodes.Member, now time.Time) []nodes.Member {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[string]sighting{}
	}
	addresses := map[string]bool{}
	for _, m := range members {
		addresses[m.HTTP] = true
		if m.HTTP != "" && (len(s.at) < maxLost || s.at[m.ID].member.ID != "") {
			s.at[m.ID] = sighting{m, now}
		}
	}
	for id, was := range s.at {
		// A node that was draining is not lost, nor one whose address another node has.
		if was.last != now && (was.member.Draining || now.Sub(was.last) > lostFor || addresses[was.member.HTTP]) {
			delete(s.at, id)
		}
	}
	var all []nodes.Member
	for _, id := range slices.Sorted(maps.Keys(s.at)) {
		all = append(all, s.at[id].member)
	}
	return all
}

// targets answers with the metrics addresses of this gateway and of its nodes, so that Prometheus
// needs the addresses of gateways only.
func (g *Gateway) targets(ctx *fasthttp.RequestCtx) {
	self := g.Addr()
	if g.o.AdminListener != nil {
		self = g.o.AdminListener.Addr().String()
	}
	groups := []targetGroup{{[]string{self}, map[string]string{"role": "gateway", "node": cluster.NameOf(g.o.RPC.Hello.NodeId)}}}
	fleet := g.native.Nodes.Now()
	var members []nodes.Member
	for _, n := range append(append(fleet.Prefill[:0:0], fleet.Prefill...), fleet.Decode...) {
		members = append(members, n.Member())
	}
	for _, m := range g.targeted.update(members, time.Now()) {
		groups = append(groups, targetGroup{[]string{m.HTTP}, map[string]string{"role": m.Role, "node": m.Name}})
	}
	g.json(ctx, groups)
}

// serveAdmin serves the operators' port until ctx ends.
func (g *Gateway) serveAdmin(ctx context.Context) {
	s := g.http.Operators(func(ctx *fasthttp.RequestCtx) { g.dispatch(ctx, pathOf(ctx), operators) }, min(adminConns, max(4, g.o.MaxConns/8)))
	served := make(chan error, 1)
	go func() { served <- s.Serve(g.o.AdminListener) }()
	select {
	case err := <-served:
		g.Log.Error("the admin listener ended", "addr", g.o.AdminListener.Addr(), "error", err)
		return
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.Background(), cutGrace)
	defer cancel()
	_ = s.ShutdownWithContext(stop) // the process's end closes what is still open
	_ = g.o.AdminListener.Close()   // in case the server had not started
	<-served
}

// adminConns bounds the connections of scrapers and people.
const adminConns = 256
