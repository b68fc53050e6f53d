// Package exchange runs one request from its head to its end. It reads routing hints and timeouts,
// admits the request under its client's key and an admission queue, lets a Backend answer it, and
// counts, traces and logs the result.
//
// A Backend computes answers: the fleet's own decode nodes (package native), or servers that speak
// the OpenAI API (package proxy). What both have in common is written once, here.
//
// Invariant: however a request ends, its backend is stopped, its place in the queue and of its key
// is released, and it is counted once.
//
// The package does not know prompts, the text of tokens, or servers.
package exchange

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// Service is what all requests of a gateway share. Exported fields are set before the first
// request.
type Service struct {
	Log         *slog.Logger
	LogRequests bool          // a line for each
	Tracer      *trace.Tracer // nil: no spans
	Meters      *metrics.Set
	Policy      route.Policy    // of requests without one
	Budget      *rate.Limiter   // of all requests' retries before their first token
	Resumes     *rate.Limiter   // of attempts of choices that have tokens
	Queue       *Admission      // whose flows keys have
	Cut         context.Context // done when all requests are to end
	InFlight    atomic.Int64    // requests

	KeyOf func(*fasthttp.RequestCtx) *auth.Key // of the client; nil: no key matches
	Fail  func(*fasthttp.RequestCtx, *openai.Error)
	// AppendFault appends the event of a stream that fails. id is the request's.
	AppendFault func(dst []byte, path string, id []byte, fault *openai.Error) []byte
	Count       func(path string, status int) // counts an answered request

	running running // requests
	limits  atomic.Pointer[Limits]
	queues  sync.Map      // *Admission, by the key of QueueOf
	turn    atomic.Uint64 // requests so far

	warned  sync.Map     // names of unknown fields that were logged
	nWarned atomic.Int64 // at most maxWarned
}

// RequestIDHeader carries the request's id in requests and answers.
const RequestIDHeader = "X-Request-Id"

// RetryAfter is the Retry-After of 503 answers, in seconds.
const RetryAfter = 1

// Charge returns a function that counts bytes for the request within the memory of large bodies,
// until its body is dropped or else its answer is sent. Beyond the bound it returns a 429.
func (s *Service) Charge(ctx *fasthttp.RequestCtx) func(bytes int) *openai.Error {
	return func(n int) *openai.Error {
		if ctx == nil || httpserver.Charge(ctx, n) {
			return nil
		}
		return s.NoMemory()
	}
}

// NoMemory counts the refusal of a request for lack of body memory, and returns its answer.
func (s *Service) NoMemory() *openai.Error {
	s.Refused("body_memory")
	return openai.TooMany(RetryAfter, "large requests and answers take as many bytes of memory as they may (--max-body-memory %d): send this one again later", s.Limits().MaxBodyMemory)
}

// maxWarned bounds the names of unknown fields that are remembered.
const maxWarned = 256

// WarnUnknown logs each field that no table has, once.
func (s *Service) WarnUnknown(names []string) {
	for _, name := range names {
		if _, seen := s.warned.Load(name); seen || s.nWarned.Load() >= maxWarned {
			continue
		}
		if _, seen := s.warned.LoadOrStore(name, true); !seen {
			s.nWarned.Add(1)
			s.Log.Warn("unknown request field ignored", "field", name)
		}
	}
}
