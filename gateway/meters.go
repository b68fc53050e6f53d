package gateway

import "github.com/tandem-serving/tandem/internal/metrics"

// meters are the series that requests record, looked up once.
type meters struct {
	set *metrics.Set

	tokens, stale, attempts, resumes, paused *metrics.Value

	ttft, interToken, perToken, e2e        *metrics.Histogram
	promptTokens, outputTokens, n, maxToks *metrics.Histogram
}

func newMeters(s *metrics.Set) meters {
	return meters{
		set:          s,
		tokens:       s.Counter(metrics.GenerationTokens),
		stale:        s.Counter(metrics.GatewayStaleTokens),
		attempts:     s.Counter(metrics.GatewayAttempts),
		resumes:      s.Counter(metrics.GatewayResumes),
		paused:       s.Counter(metrics.GatewayStreamsPaused),
		ttft:         s.Histogram(metrics.TimeToFirstToken),
		interToken:   s.Histogram(metrics.InterTokenLatency),
		perToken:     s.Histogram(metrics.TimePerOutputToken),
		e2e:          s.Histogram(metrics.E2ERequestLatency),
		promptTokens: s.Histogram(metrics.RequestPromptTokens),
		outputTokens: s.Histogram(metrics.RequestGenerationTokens),
		n:            s.Histogram(metrics.RequestParamsN),
		maxToks:      s.Histogram(metrics.RequestParamsMaxTokens),
	}
}
