package gateway

import (
	"errors"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// SetLimits changes the limits. Requests that were admitted are not affected. Any goroutine may
// call it while the gateway runs.
func (g *Gateway) SetLimits(l Limits) error {
	l = l.WithDefaults()
	if err := checkLimits(&l); err != nil {
		return err
	}
	g.setLimits(&l)
	return nil
}

// setLimits sets the limits of each stage.
func (g *Gateway) setLimits(l *Limits) {
	g.Service.SetLimits(*l)
	g.http.SetLimits(connLimits(l))
	for limiter, perSecond := range map[*rate.Limiter]float64{g.Budget: l.RetriesPerSecond, g.Resumes: l.ResumesPerSecond} {
		limiter.SetLimit(rate.Limit(perSecond))
		limiter.SetBurst(burst(perSecond))
	}
	g.meterLimits()
}

// connLimits returns the limits of connections and request bodies.
func connLimits(l *Limits) httpserver.Limits {
	return httpserver.Limits{HeaderTimeout: l.HeaderTimeout, SlowClientTimeout: l.SlowClientTimeout, MinBodyRate: l.MinBodyRate,
		MaxBodyBytes: l.MaxBodyBytes, MaxBodyMemory: l.MaxBodyMemory, MaxConnsPerAddress: l.MaxConnsPerAddress}
}

// keyName is where a request keeps its key, which is looked up once.
type keyName struct{}

// keyOf returns the key of a request; nil: no key matches.
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

// SetUpstreams replaces the upstreams and their sources. The gateway must have been started with
// upstreams.
func (g *Gateway) SetUpstreams(targets []upstream.Target, sources []upstream.Source) error {
	if g.proxy == nil {
		return errors.New("gateway: it was started without upstreams")
	}
	if err := g.proxy.Pool.SetTargets(targets); err != nil {
		return err
	}
	return g.proxy.Pool.SetSources(sources)
}
