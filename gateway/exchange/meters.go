package exchange

import (
	"time"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Meters are the series that requests record. They are looked up once.
type Meters struct {
	Set *metrics.Set

	Tokens, Stale, Attempts, Resumes, Paused *metrics.Value
	ClassChanges                             *metrics.Value // of numerics, in resumed streams
	Prompt, Cached                           *metrics.Value // tokens
	Predicted, Actual                        *metrics.Value // tokens in decode nodes' caches
	Full                                     *metrics.Value // requests refused because too many are in flight
	Untokenized                              *metrics.Value // prompts for upstreams
	QueueTime                                *metrics.Histogram

	TTFT, InterToken, PerToken, E2E, Decode              *metrics.Histogram
	PredictedFirst, ActualFirst, Early, Late             *metrics.Histogram // time to the first token, and the error of its prediction
	PromptTokens, OutputTokens, MostTokens, N, MaxTokens *metrics.Histogram
}

// NewMeters looks up the series in s.
func NewMeters(s *metrics.Set) Meters {
	return Meters{
		Set:            s,
		Prompt:         s.Counter(metrics.PromptTokens),
		Cached:         s.Counter(metrics.PromptTokensCached),
		Predicted:      s.Counter(metrics.GatewayPredictedCached),
		Actual:         s.Counter(metrics.GatewayActualCached),
		Full:           s.Counter(metrics.AdmissionRejections, "max_num_queued_reqs"),
		Untokenized:    s.Counter(metrics.GatewayUntokenized),
		QueueTime:      s.Histogram(metrics.GatewayQueueTime),
		Decode:         s.Histogram(metrics.RequestDecodeTime),
		MostTokens:     s.Histogram(metrics.RequestMaxNumGenerationTokens),
		Tokens:         s.Counter(metrics.GenerationTokens),
		Stale:          s.Counter(metrics.GatewayStaleTokens),
		Attempts:       s.Counter(metrics.GatewayAttempts),
		Resumes:        s.Counter(metrics.GatewayResumes),
		ClassChanges:   s.Counter(metrics.GatewayClassChanges),
		Paused:         s.Counter(metrics.GatewayStreamsPaused),
		TTFT:           s.Histogram(metrics.TimeToFirstToken),
		InterToken:     s.Histogram(metrics.InterTokenLatency),
		PerToken:       s.Histogram(metrics.TimePerOutputToken),
		E2E:            s.Histogram(metrics.E2ERequestLatency),
		PromptTokens:   s.Histogram(metrics.RequestPromptTokens),
		OutputTokens:   s.Histogram(metrics.RequestGenerationTokens),
		N:              s.Histogram(metrics.RequestParamsN),
		MaxTokens:      s.Histogram(metrics.RequestParamsMaxTokens),
		PredictedFirst: s.Histogram(metrics.GatewayPredictedFirst),
		ActualFirst:    s.Histogram(metrics.GatewayActualFirst),
		Early:          s.Histogram(metrics.GatewayFirstError, "early"),
		Late:           s.Histogram(metrics.GatewayFirstError, "late"),
	}
}

// FirstToken records the time from routing to the first token of a first attempt, and how far it is
// from the prediction.
func (m *Meters) FirstToken(predicted, took time.Duration) {
	m.PredictedFirst.Observe(predicted.Seconds())
	m.ActualFirst.Observe(took.Seconds())
	if by := took - predicted; by >= 0 {
		m.Late.Observe(by.Seconds())
	} else {
		m.Early.Observe(-by.Seconds())
	}
}
