package gateway

import (
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// meters are the series that requests record, looked up once.
type meters struct {
	set *metrics.Set

	tokens, stale, attempts, resumes, paused *metrics.Value
	classChanges                             *metrics.Value // of streams that were resumed
	prompt, cached                           *metrics.Value // tokens
	predicted, actual                        *metrics.Value // tokens in decode nodes' caches
	full                                     *metrics.Value // requests refused for want of a place
	untokenized                              *metrics.Value // prompts for upstreams
	queueTime                                *metrics.Histogram

	ttft, interToken, perToken, e2e, decode              *metrics.Histogram
	foreseen, waited, early, late                        *metrics.Histogram // first tokens against what routing predicted
	promptTokens, outputTokens, mostTokens, n, maxTokens *metrics.Histogram
}

func newMeters(s *metrics.Set) meters {
	return meters{
		set:          s,
		prompt:       s.Counter(metrics.PromptTokens),
		cached:       s.Counter(metrics.PromptTokensCached),
		predicted:    s.Counter(metrics.GatewayPredictedCached),
		actual:       s.Counter(metrics.GatewayActualCached),
		full:         s.Counter(metrics.AdmissionRejections, "max_num_queued_reqs"),
		untokenized:  s.Counter(metrics.GatewayUntokenized),
		queueTime:    s.Histogram(metrics.GatewayQueueTime),
		decode:       s.Histogram(metrics.RequestDecodeTime),
		mostTokens:   s.Histogram(metrics.RequestMaxNumGenerationTokens),
		tokens:       s.Counter(metrics.GenerationTokens),
		stale:        s.Counter(metrics.GatewayStaleTokens),
		attempts:     s.Counter(metrics.GatewayAttempts),
		resumes:      s.Counter(metrics.GatewayResumes),
		classChanges: s.Counter(metrics.GatewayClassChanges),
		paused:       s.Counter(metrics.GatewayStreamsPaused),
		ttft:         s.Histogram(metrics.TimeToFirstToken),
		interToken:   s.Histogram(metrics.InterTokenLatency),
		perToken:     s.Histogram(metrics.TimePerOutputToken),
		e2e:          s.Histogram(metrics.E2ERequestLatency),
		promptTokens: s.Histogram(metrics.RequestPromptTokens),
		outputTokens: s.Histogram(metrics.RequestGenerationTokens),
		n:            s.Histogram(metrics.RequestParamsN),
		maxTokens:    s.Histogram(metrics.RequestParamsMaxTokens),
		foreseen:     s.Histogram(metrics.GatewayPredictedFirst),
		waited:       s.Histogram(metrics.GatewayActualFirst),
		early:        s.Histogram(metrics.GatewayFirstError, "early"),
		late:         s.Histogram(metrics.GatewayFirstError, "late"),
	}
}

// meter connects what the gateway keeps anyway to the table of metrics.
func (g *Gateway) meter() {
	s := g.meters.set
	gauge := func(id metrics.ID, f func() float64, labels ...string) { s.Gauge(id, labels...).Func(f) }
	gauge(metrics.GatewayUsableDecodeNodes, func() float64 { return float64(g.usable()) })
	gauge(metrics.GatewayInFlight, func() float64 { return float64(g.inFlight.Load()) })
	gauge(metrics.GatewayStreamBuffers, func() float64 { return float64(g.buffered.Load()) })
	gauge(metrics.GatewayRetryBudget, func() float64 { return max(0, g.budget.Tokens()) })
	for _, state := range metrics.BreakerStates {
		gauge(metrics.GatewayBreakers, func() float64 { return float64(g.fleet.Now().Breakers(state)) }, state)
	}
	g.meterUpstreams(gauge)
	gauge(metrics.QueueLength, func() float64 { return float64(g.inFlight.Load()) }, metrics.QueueRequests)
	gauge(metrics.QueueLength, func() (n float64) {
		g.eachAdmission(func(a *admission) { n += float64(a.waiting.Load()) })
		return n
	}, metrics.QueueWaiting)
	gauge(metrics.QueueLength, func() (n float64) {
		g.eachAdmission(func(a *admission) { _, tokens := a.queued(); n += float64(tokens) })
		return n
	}, metrics.QueueWaitingTokens)
	gauge(metrics.QueueLength, func() float64 { return float64(g.http.Held()) }, metrics.QueueBodies)
	g.meterLimits()
	gauge(metrics.QueueLength, func() float64 { return float64(g.http.Open()) }, metrics.QueueConnections)
	s.Gauge(metrics.QueueLimit, metrics.QueueConnections).Set(float64(g.o.MaxConns))

	cache := func() (hits, misses uint64, bytes int) {
		for _, m := range g.model.All() {
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

// meterUpstreams tells of servers of another kind; without any all of it is 0.
func (g *Gateway) meterUpstreams(gauge func(id metrics.ID, f func() float64, labels ...string)) {
	if g.foreign == nil {
		return
	}
	for _, role := range []upstream.Role{upstream.Whole, upstream.Prefill, upstream.Decode} {
		for _, state := range upstream.States {
			gauge(metrics.GatewayUpstreams, func() float64 { return float64(g.foreign.Count(role, state)) }, role.String(), state)
		}
		gauge(metrics.GatewayUpstreamRequests, func() float64 { return float64(g.foreign.Now().Requests(role)) }, role.String())
	}
	for _, state := range metrics.BreakerStates {
		gauge(metrics.GatewayUpstreamBreakers, func() float64 { return float64(g.foreign.Now().Breakers(state)) }, state)
	}
}

// meterLimits tells of the limits that may change.
func (g *Gateway) meterLimits() {
	l := g.lim()
	for queue, most := range map[string]int{metrics.QueueRequests: l.MaxInFlight, metrics.QueueWaiting: l.MaxQueuedRequests,
		metrics.QueueWaitingTokens: l.MaxQueuedTokens, metrics.QueueBodies: l.MaxBodyMemory} {
		g.meters.set.Gauge(metrics.QueueLimit, queue).Set(float64(most))
	}
}

// forecast counts the tokens of a prompt that the fleet's news say a node has; the
// node's own word, which comes with its Accepted, is held against it. A node uses
// whole blocks of all but the last token.
func (j *job) forecast(c *choice, node *nodes.Node) {
	bt, n := j.model.BlockTokens, len(c.prompt.Tokens)+len(c.output)
	held := bt * j.g.blocks.Held(node.Member().ID, c.prompt.Hashes, bt, j.model.groups)
	j.g.meters.predicted.Add(float64(min(held, (n-1)/bt*bt)))
}

// foretold holds what a request's first token took from its routing on against
// what routing predicted. Only first attempts count: those after a failure are
// not what the prediction was about.
func (m *meters) foretold(c *choice, took time.Duration) {
	if c.state.Attempt() != 1 || c.foretold < 0 {
		return
	}
	m.foreseen.Observe(c.foretold.Seconds())
	m.waited.Observe(took.Seconds())
	if by := took - c.foretold; by >= 0 {
		m.late.Observe(by.Seconds())
	} else {
		m.early.Observe(-by.Seconds())
	}
}
