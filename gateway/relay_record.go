package gateway

import (
	"time"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// record counts the request's end.
func (r *relay) record() {
	m := &r.g.meters
	r.endSpan()
	switch {
	case r.cause == "client_gone":
		m.set.Counter(metrics.RequestSuccess, metrics.ReasonAbort).Inc()
		return
	case r.cause != "" || r.status >= 400:
		m.set.Counter(metrics.RequestSuccess, metrics.ReasonError).Inc()
		return
	}
	end := time.Now()
	r.recordReasons()
	m.e2e.Observe(end.Sub(r.start).Seconds())
	n := r.nOutput()
	if n > 0 {
		m.outputTokens.Observe(float64(n))
		m.tokens.Add(float64(max(0, n-r.nEvents)))
	}
	if u := &r.told.usage; u.Prompt > 0 {
		m.promptTokens.Observe(float64(u.Prompt))
		m.prompt.Add(float64(u.Prompt))
		m.cached.Add(float64(u.Cached))
	}
	if r.nEvents > 0 {
		m.decode.Observe(r.last.Sub(r.first).Seconds())
		if n > 1 {
			m.perToken.Observe(r.last.Sub(r.first).Seconds() / float64(n-1))
		}
	}
}

// measure takes note of events that came.
func (r *relay) measure(events int) {
	m, at := &r.g.meters, time.Now()
	if r.first.IsZero() {
		r.first = at
		m.ttft.Observe(at.Sub(r.start).Seconds())
	} else {
		m.interToken.Observe(at.Sub(r.last).Seconds())
	}
	r.last = at
	r.nEvents += events
	m.tokens.Add(float64(events))
	r.served(events)
}
