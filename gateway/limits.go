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

// lim are the options with the limits that hold now.
func (g *Gateway) lim() *Options { return g.limits.Load() }

// SetLimits takes the limits of o from now on, and nothing else; any goroutine may
// call it while the gateway runs. What has been let in stays.
func (g *Gateway) SetLimits(o Options) error {
	if err := o.CheckLimits(); err != nil {
		return err
	}
	o.setDefaults()
	now := *g.lim()
	now.MaxBodyBytes, now.MaxBodyMemory, now.HeaderTimeout, now.MinBodyRate = o.MaxBodyBytes, o.MaxBodyMemory, o.HeaderTimeout, o.MinBodyRate
	now.MaxConnsPerAddress, now.SlowClientTimeout = o.MaxConnsPerAddress, o.SlowClientTimeout
	now.MaxInFlight, now.MaxN, now.MaxPromptTokens, now.MaxLogprobs = o.MaxInFlight, o.MaxN, o.MaxPromptTokens, o.MaxLogprobs
	now.MaxQueuedRequests, now.MaxQueuedTokens, now.QueueTimeout = o.MaxQueuedRequests, o.MaxQueuedTokens, o.QueueTimeout
	now.NodeBacklog, now.NodeBacklogTime = o.NodeBacklog, o.NodeBacklogTime
	now.UpstreamRequests = o.UpstreamRequests
	now.RequestTimeout, now.ResumeTimeout, now.MaxAttempts = o.RequestTimeout, o.ResumeTimeout, o.MaxAttempts
	now.RetriesPerSecond, now.ResumesPerSecond = o.RetriesPerSecond, o.ResumesPerSecond
	g.limits.Store(&now)
	g.setRequestLimits()
	g.http.SetLimits(now.clientLimits())
	g.eachAdmission(func(a *exchange.Admission) {
		a.SetLimits(admit.Limits{Requests: o.MaxQueuedRequests, Tokens: o.MaxQueuedTokens})
	})
	for l, perSecond := range map[*rate.Limiter]float64{g.Budget: o.RetriesPerSecond, g.resumes: o.ResumesPerSecond} {
		l.SetLimit(rate.Limit(perSecond))
		l.SetBurst(burst(perSecond))
	}
	g.meterLimits()
	return nil
}

// setRequestLimits has requests take the limits that hold now.
func (g *Gateway) setRequestLimits() {
	l := g.lim()
	g.Service.SetLimits(exchange.Limits{MaxInFlight: l.MaxInFlight, MaxQueuedTokens: l.MaxQueuedTokens, MaxAttempts: l.MaxAttempts,
		RequestTimeout: l.RequestTimeout, ResumeTimeout: l.ResumeTimeout, QueueTimeout: l.QueueTimeout, MaxBodyMemory: l.MaxBodyMemory})
	if g.native != nil {
		g.native.SetLimits(l.fleetLimits())
	}
	if g.proxy != nil {
		g.proxy.SetLimits(l.upstreamLimits())
	}
}

// clientLimits are those of connections and request bodies.
func (o *Options) clientLimits() httpserver.Limits {
	return httpserver.Limits{HeaderTimeout: o.HeaderTimeout, SlowClientTimeout: o.SlowClientTimeout, MinBodyRate: o.MinBodyRate,
		MaxBodyBytes: o.MaxBodyBytes, MaxBodyMemory: o.MaxBodyMemory, MaxConnsPerAddress: o.MaxConnsPerAddress}
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

// fleetLimits are those of requests that decode nodes answer.
func (o *Options) fleetLimits() native.Limits {
	return native.Limits{MaxN: o.MaxN, MaxLogprobs: o.MaxLogprobs, MaxPromptTokens: o.MaxPromptTokens,
		MaxQueuedRequests: o.MaxQueuedRequests, MaxQueuedTokens: o.MaxQueuedTokens, NodeBacklog: o.NodeBacklog, NodeBacklogTime: o.NodeBacklogTime}
}

// upstreamLimits are those of requests that upstreams answer.
func (o *Options) upstreamLimits() proxy.Limits {
	return proxy.Limits{MaxN: o.MaxN, MaxLogprobs: o.MaxLogprobs, MaxPromptTokens: o.MaxPromptTokens, UpstreamRequests: o.UpstreamRequests,
		MaxQueuedRequests: o.MaxQueuedRequests, MaxQueuedTokens: o.MaxQueuedTokens}
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
