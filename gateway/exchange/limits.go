package exchange

import (
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// Limits of clients and their requests. They may change while requests run.
type Limits struct {
	// Of connections and bodies.
	HeaderTimeout      time.Duration // for a request's head
	SlowClientTimeout  time.Duration // for one write
	MinBodyRate        int           // bytes of a request per second
	MaxBodyBytes       int
	MaxBodyMemory      int // bytes of all large bodies together
	MaxConnsPerAddress int // of a client; zero: no bound

	// Of one request.
	MaxN            int // choices
	MaxPromptTokens int // of each prompt; zero: what the model takes
	MaxLogprobs     int // best tokens returned with each token; at most openai.MaxLogprobs
	RequestTimeout  time.Duration
	MaxAttempts     int           // nodes that a choice is tried on without getting a token
	ResumeTimeout   time.Duration // how long a choice with tokens waits for a node

	// Of all requests.
	MaxInFlight       int
	MaxQueuedRequests int           // that wait for room, in each queue
	MaxQueuedTokens   int           // prompt tokens of those
	QueueTimeout      time.Duration // how long one waits
	NodeBacklog       int           // requests that wait on each decode node
	NodeBacklogTime   time.Duration // of computing prompts that wait on nodes
	UpstreamRequests  int           // that each upstream is given at once; zero: any number
	RetriesPerSecond  float64
	ResumesPerSecond  float64
}

// Limits returns the present limits.
func (s *Service) Limits() *Limits { return s.limits.Load() }

// SetLimits changes the limits of requests and of all queues. Any goroutine may call it.
func (s *Service) SetLimits(l Limits) {
	s.limits.Store(&l)
	s.EachQueue(func(_ any, a *Admission) { a.SetLimits(l.queue()) })
}

// queue returns the bounds of one queue.
func (l *Limits) queue() admit.Limits {
	return admit.Limits{Requests: l.MaxQueuedRequests, Tokens: l.MaxQueuedTokens}
}

// CheckChoices refuses a request for more choices than the limit.
func (l *Limits) CheckChoices(n int) *openai.Error {
	if n > l.MaxN {
		return openai.BadRequest("n", "n is %d: this gateway gives at most %d choices (--max-n)", n, l.MaxN)
	}
	return nil
}

// CheckPrompt refuses a prompt of more tokens than the limit.
func (l *Limits) CheckPrompt(on openai.Endpoint, n int) *openai.Error {
	if l.PromptFits(n) {
		return nil
	}
	return openai.BadRequest(PromptParam(on), "the prompt has %d tokens: this gateway takes at most %d (--max-prompt-tokens)", n, l.MaxPromptTokens)
}

// PromptFits reports whether a prompt may have n tokens.
func (l *Limits) PromptFits(n int) bool { return l.MaxPromptTokens <= 0 || n <= l.MaxPromptTokens }

// PromptParam returns the field of the prompt in requests of an endpoint.
func PromptParam(on openai.Endpoint) string {
	if on == openai.Chat {
		return "messages"
	}
	return "prompt"
}
