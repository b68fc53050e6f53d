package exchange

import (
	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/limits"
)

// Limits of clients and their requests, as flags declare them.
type Limits = limits.Limits

// Limits returns the present limits.
func (s *Service) Limits() *Limits { return s.limits.Load() }

// SetLimits changes the limits of requests and of all queues. Any goroutine may call it.
func (s *Service) SetLimits(l Limits) {
	s.limits.Store(&l)
	s.EachQueue(func(_ any, a *Admission) { a.SetLimits(s.queueLimits()) })
}

// queueLimits returns the bounds of one queue.
func (s *Service) queueLimits() admit.Limits {
	l := s.Limits()
	return admit.Limits{Requests: l.MaxQueuedRequests, Tokens: l.MaxQueuedTokens}
}

// CheckChoices refuses a request for more choices than the limit.
func (s *Service) CheckChoices(n int) *openai.Error {
	if most := s.Limits().MaxN; n > most {
		return openai.BadRequest("n", "n is %d: this gateway gives at most %d choices (--max-n)", n, most)
	}
	return nil
}

// CheckPrompt refuses a prompt of more tokens than the limit.
func (s *Service) CheckPrompt(on openai.Endpoint, n int) *openai.Error {
	if s.PromptFits(n) {
		return nil
	}
	return openai.BadRequest(openai.PromptParam(on), "the prompt has %d tokens: this gateway takes at most %d (--max-prompt-tokens)", n, s.Limits().MaxPromptTokens)
}

// PromptFits reports whether a prompt may have n tokens.
func (s *Service) PromptFits(n int) bool {
	most := s.Limits().MaxPromptTokens
	return most <= 0 || n <= most
}
