package exchange

import (
	"time"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Meters are the series that requests record, looked up once.
type Meters struct {
	Set *metrics.Set

	Tokens, Stale, Attempts, Resumes, Paused *metrics.Value
	ClassChanges                             *metrics.Value // of streams that were resumed
	Prompt, Cached                           *metrics.Value // tokens
	Predicted, Actual                        *metrics.Value // tokens in decode nodes' caches
	Full                                     *metrics.Value // requests refused for want of a place
	Untokenized                              *metrics.Value // prompts for upstreams
	QueueTime                                *metrics.Histogram

	TTFT, InterToken, PerToken, E2E, Decode              *metrics.Histogram
	Foreseen, Waited, Early, Late                        *metrics.Histogram // first tokens against what routing predicted
	PromptTokens, OutputTokens, MostTokens, N, MaxTokens *metrics.Histogram
}

// NewMeters looks them up.
func NewMeters(s *metrics.Set) Meters {
	return Meters{
		Set:          s,
		Prompt:       s.Counter(metrics.PromptTokens),
		Cached:       s.Counter(metrics.PromptTokensCached),
		Predicted:    s.Counter(metrics.GatewayPredictedCached),
		Actual:       s.Counter(metrics.GatewayActualCached),
		Full:         s.Counter(metrics.AdmissionRejections, "max_num_queued_reqs"),
		Untokenized:  s.Counter(metrics.GatewayUntokenized),
		QueueTime:    s.Histogram(metrics.GatewayQueueTime),
		Decode:       s.Histogram(metrics.RequestDecodeTime),
		MostTokens:   s.Histogram(metrics.RequestMaxNumGenerationTokens),
		Tokens:       s.Counter(metrics.GenerationTokens),
		Stale:        s.Counter(metrics.GatewayStaleTokens),
		Attempts:     s.Counter(metrics.GatewayAttempts),
		Resumes:      s.Counter(metrics.GatewayResumes),
		ClassChanges: s.Counter(metrics.GatewayClassChanges),
		Paused:       s.Counter(metrics.GatewayStreamsPaused),
		TTFT:         s.Histogram(metrics.TimeToFirstToken),
		InterToken:   s.Histogram(metrics.InterTokenLatency),
		PerToken:     s.Histogram(metrics.TimePerOutputToken),
		E2E:          s.Histogram(metrics.E2ERequestLatency),
		PromptTokens: s.Histogram(metrics.RequestPromptTokens),
		OutputTokens: s.Histogram(metrics.RequestGenerationTokens),
		N:            s.Histogram(metrics.RequestParamsN),
		MaxTokens:    s.Histogram(metrics.RequestParamsMaxTokens),
		Foreseen:     s.Histogram(metrics.GatewayPredictedFirst),
		Waited:       s.Histogram(metrics.GatewayActualFirst),
		Early:        s.Histogram(metrics.GatewayFirstError, "early"),
		Late:         s.Histogram(metrics.GatewayFirstError, "late"),
	}
}

// FirstToken records how long the first token of a first attempt took from routing on, and
// how far off the prediction of routing was.
func (m *Meters) FirstToken(predicted, took time.Duration) {
	m.Foreseen.Observe(predicted.Seconds())
	m.Waited.Observe(took.Seconds())
	if by := took - predicted; by >= 0 {
		m.Late.Observe(by.Seconds())
	} else {
		m.Early.Observe(-by.Seconds())
	}
}
