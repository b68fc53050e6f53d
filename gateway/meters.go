package gateway

import (
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// meter connects the gateway's state to the table of metrics.
func (g *Gateway) meter() {
	s := g.Meters
	gauge := func(id metrics.ID, f func() float64, labels ...string) { s.Gauge(id, labels...).Func(f) }
	gauge(metrics.GatewayUsableDecodeNodes, func() float64 { return float64(g.native.Usable()) })
	gauge(metrics.GatewayInFlight, func() float64 { return float64(g.InFlight.Load()) })
	gauge(metrics.GatewayStreamBuffers, func() float64 { return float64(g.native.Buffered.Load()) })
	gauge(metrics.GatewayRetryBudget, func() float64 { return max(0, g.Budget.Tokens()) })
	for _, state := range metrics.BreakerStates {
		gauge(metrics.GatewayBreakers, func() float64 { return float64(g.native.Nodes.Now().Breakers(state)) }, state)
	}
	g.meterUpstreams(gauge)
	gauge(metrics.QueueLength, func() float64 { return float64(g.InFlight.Load()) }, metrics.QueueRequests)
	gauge(metrics.QueueLength, func() (n float64) {
		g.EachQueue(func(_ any, a *exchange.Admission) { n += float64(a.Waiting()) })
		return n
	}, metrics.QueueWaiting)
	gauge(metrics.QueueLength, func() (n float64) {
		g.EachQueue(func(_ any, a *exchange.Admission) { _, tokens := a.Queued(); n += float64(tokens) })
		return n
	}, metrics.QueueWaitingTokens)
	gauge(metrics.QueueLength, func() float64 { return float64(g.http.Held()) }, metrics.QueueBodies)
	g.meterLimits()
	gauge(metrics.QueueLength, func() float64 { return float64(g.http.Open()) }, metrics.QueueConnections)
	s.Gauge(metrics.QueueLimit, metrics.QueueConnections).Set(float64(g.o.MaxConns))

	cache := func() (hits, misses uint64, bytes int) {
		for _, m := range g.native.Models.All() {
			if m.Text != nil {
				h, mi, b := m.Text.CacheStats()
				hits, misses, bytes = hits+h, misses+mi, bytes+b
			}
		}
		return hits, misses, bytes
	}
	s.Counter(metrics.TokenizerCacheLookups, "hit").Func(func() float64 { hits, _, _ := cache(); return float64(hits) })
	s.Counter(metrics.TokenizerCacheLookups, "miss").Func(func() float64 { _, misses, _ := cache(); return float64(misses) })
	gauge(metrics.TokenizerCacheBytes, func() float64 { _, _, bytes := cache(); return float64(bytes) })
}

// meterUpstreams connects the upstreams' state. Without upstreams all of it is 0.
func (g *Gateway) meterUpstreams(gauge func(id metrics.ID, f func() float64, labels ...string)) {
	if g.proxy == nil {
		return
	}
	for _, role := range []upstream.Role{upstream.Whole, upstream.Prefill, upstream.Decode} {
		for _, state := range upstream.States {
			gauge(metrics.GatewayUpstreams, func() float64 { return float64(g.proxy.Pool.Count(role, state)) }, role.String(), state)
		}
		gauge(metrics.GatewayUpstreamRequests, func() float64 { return float64(g.proxy.Pool.Now().Requests(role)) }, role.String())
	}
	for _, state := range metrics.BreakerStates {
		gauge(metrics.GatewayUpstreamBreakers, func() float64 { return float64(g.proxy.Pool.Now().Breakers(state)) }, state)
	}
}

// meterLimits sets the metrics of limits.
func (g *Gateway) meterLimits() {
	l := g.Limits()
	for queue, most := range map[string]int{metrics.QueueRequests: l.MaxInFlight, metrics.QueueWaiting: l.MaxQueuedRequests,
		metrics.QueueWaitingTokens: l.MaxQueuedTokens, metrics.QueueBodies: l.MaxBodyMemory} {
		g.Meters.Gauge(metrics.QueueLimit, queue).Set(float64(most))
	}
}
