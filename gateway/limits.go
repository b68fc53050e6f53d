package gateway

import (
	"errors"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// lim are the limits that hold now.
func (g *Gateway) lim() *Limits { return g.limits.Load() }

// SetLimits changes the limits; any goroutine may call it while the gateway runs. What has
// been let in stays.
func (g *Gateway) SetLimits(l Limits) error {
	l.setDefaults()
	if err := l.check(); err != nil {
		return err
	}
	g.setLimits(&l)
	return nil
}

// setLimits gives each stage its limits.
func (g *Gateway) setLimits(l *Limits) {
	g.limits.Store(l)
	g.Service.SetLimits(exchange.Limits{MaxInFlight: l.MaxInFlight, MaxQueuedTokens: l.MaxQueuedTokens, MaxAttempts: l.MaxAttempts,
		RequestTimeout: l.RequestTimeout, ResumeTimeout: l.ResumeTimeout, QueueTimeout: l.QueueTimeout, MaxBodyMemory: l.MaxBodyMemory})
	g.http.SetLimits(l.clients())
	g.native.SetLimits(l.fleet())
	if g.proxy != nil {
		g.proxy.SetLimits(l.upstreams())
	}
	g.eachAdmission(func(a *exchange.Admission) {
		a.SetLimits(admit.Limits{Requests: l.MaxQueuedRequests, Tokens: l.MaxQueuedTokens})
	})
	for limiter, perSecond := range map[*rate.Limiter]float64{g.Budget: l.RetriesPerSecond, g.resumes: l.ResumesPerSecond} {
		limiter.SetLimit(rate.Limit(perSecond))
		limiter.SetBurst(burst(perSecond))
	}
	g.meterLimits()
}

// clients are the limits of connections and request bodies.
func (l *Limits) clients() httpserver.Limits {
	return httpserver.Limits{HeaderTimeout: l.HeaderTimeout, SlowClientTimeout: l.SlowClientTimeout, MinBodyRate: l.MinBodyRate,
		MaxBodyBytes: l.MaxBodyBytes, MaxBodyMemory: l.MaxBodyMemory, MaxConnsPerAddress: l.MaxConnsPerAddress}
}

// fleet are the limits of requests that decode nodes answer.
func (l *Limits) fleet() native.Limits {
	return native.Limits{MaxN: l.MaxN, MaxLogprobs: l.MaxLogprobs, MaxPromptTokens: l.MaxPromptTokens,
		MaxQueuedRequests: l.MaxQueuedRequests, MaxQueuedTokens: l.MaxQueuedTokens, NodeBacklog: l.NodeBacklog, NodeBacklogTime: l.NodeBacklogTime}
}

// upstreams are the limits of requests that upstreams answer.
func (l *Limits) upstreams() proxy.Limits {
	return proxy.Limits{MaxN: l.MaxN, MaxLogprobs: l.MaxLogprobs, MaxPromptTokens: l.MaxPromptTokens, UpstreamRequests: l.UpstreamRequests,
		MaxQueuedRequests: l.MaxQueuedRequests, MaxQueuedTokens: l.MaxQueuedTokens}
}

// keyName is where a request keeps its key, which is looked for once.
type keyName struct{}

// keyOf is the key of a request; nil: none is right.
func (g *Gateway) keyOf(ctx *fasthttp.RequestCtx) *auth.Key {
	if k, ok := ctx.Request.UserValue(keyName{}).(*auth.Key); ok {
		return k
	}
	k := g.keys.Find(ctx.Request.Header.Peek("Authorization"))
	if k != nil {
		ctx.Request.SetUserValue(keyName{}, k)
	}
	return k
}

// SetUpstreams replaces the servers of other kinds and the sources of more; there
// must have been some.
func (g *Gateway) SetUpstreams(targets []upstream.Target, sources []upstream.Source) error {
	if g.proxy == nil {
		return errors.New("gateway: it was started without upstreams")
	}
	if err := g.proxy.Pool.SetTargets(targets); err != nil {
		return err
	}
	return g.proxy.Pool.SetSources(sources)
}
