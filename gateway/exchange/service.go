// Package exchange leads one request through its life: it reads how the request is routed
// and how long it may take, lets its client's key in, has it wait for room, has a Backend
// answer it, and counts, traces and logs what came of it.
//
// A Backend is whoever computes answers: the fleet's own decode nodes, or servers that
// speak the OpenAI API. What both have in common stands here, once.
//
// Invariant: whatever ends a request, its backend is stopped, its place in the queue and of
// its key is given back, and it is counted once.
//
// The package knows no prompts, no tokens' texts and no servers.
package exchange

import (
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// Service is what the exchanges of a gateway share. Its exported fields are set before the
// first request.
type Service struct {
	Log         *slog.Logger
	LogRequests bool          // a line for each request
	Tracer      *trace.Tracer // nil: no spans
	Meters      Meters
	Policy      route.Policy  // of requests that name none
	Budget      *rate.Limiter // of all requests' retries before the first token
	Resumes     *rate.Limiter // paces attempts of choices that have tokens
	Queue       *Admission    // the flows of keys are those of this queue
	Cut         chan struct{} // closed when what still runs is to end
	InFlight    atomic.Int64  // requests being answered

	KeyOf func(*fasthttp.RequestCtx) *auth.Key // of the client; nil: none is right
	Fail  func(*fasthttp.RequestCtx, *openai.Error)
	Count func(path string, status int) // an answered request

	limits atomic.Pointer[Limits]
	queues sync.Map      // *Admission, by the key of QueueOf
	turn   atomic.Uint64 // requests so far

	warned  sync.Map     // names of unknown fields that were warned about
	nWarned atomic.Int64 // at most maxWarned
}

// RequestIDHeader has the request's id, in requests and answers.
const RequestIDHeader = "X-Request-Id"

// RetryAfter is what 503 answers suggest, in seconds.
const RetryAfter = 1

// Charge returns a function that counts bytes for the request among those of large bodies
// until its body is dropped. Beyond the bound it returns 429.
func (s *Service) Charge(ctx *fasthttp.RequestCtx) func(bytes int) *openai.Error {
	return func(n int) *openai.Error {
		if ctx == nil || httpserver.Charge(ctx, n) {
			return nil
		}
		return s.NoMemory()
	}
}

// NoMemory counts the refusal of a request that there is no memory for, and is its answer.
func (s *Service) NoMemory() *openai.Error {
	s.Refused("body_memory")
	return openai.TooMany(RetryAfter, "large requests take as many bytes of memory as they may (--max-body-memory %d): send this one again later", s.Limits().MaxBodyMemory)
}

// maxWarned bounds the names of unknown fields that are remembered.
const maxWarned = 256

// WarnUnknown tells the log once about each field that no table knows.
func (s *Service) WarnUnknown(names []string) {
	for _, name := range names {
		if _, seen := s.warned.Load(name); seen || s.nWarned.Load() >= maxWarned {
			continue
		}
		if _, seen := s.warned.LoadOrStore(name, true); !seen {
			s.nWarned.Add(1)
			s.Log.Warn("requests carry a field that is unknown here and ignored", "field", name)
		}
	}
}
