// Package limits has the limits of a gateway and their defaults, which flags and options share.
//
// Invariant: in Limits a zero means the default, and a negative number or duration means that
// there is no bound, or never.
package limits

import (
	"reflect"
	"time"
)

// Defaults of a gateway that may not change while it runs.
const (
	Host = "127.0.0.1" // plain HTTP, unless a flag sets another address
	Port = 8000
	// MaxConns bounds client connections, most of them idle.
	MaxConns = 65536
	// StreamTokens of one choice may wait for a slow client before its generation pauses. They are
	// some seconds of a fast model.
	StreamTokens = 1024
	// StallTimeout is how long a decode node with work may make no step. It must be longer than the
	// longest step of a slow machine.
	StallTimeout = 30 * time.Second
	// NodeSilence is how long heartbeats, one each 500 ms, may be missing. It must be longer than a
	// process waits for a busy processor.
	NodeSilence = 2 * time.Second
)

// Limits of clients and their requests. They may change while a gateway runs.
type Limits struct {
	// Of connections and bodies.
	HeaderTimeout      time.Duration // for a request's head
	SlowClientTimeout  time.Duration // for one write
	MinBodyRate        int           // bytes of a request per second
	SSEKeepAlive       time.Duration // of silence, after which a stream gets a comment
	SSEEarlyHead       bool          // streams that wait get their head after that silence
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

	// Of the grammars of constrained requests.
	MaxGrammarBytes   int // text of a grammar
	MaxMaskSteps      int // counted steps of a token's mask, at which a node ends the request
	MaxQueuedGrammars int // requests that wait for the compilation of theirs
	GrammarCompiles   int // at once
	GrammarCache      int // bytes of recent outcomes

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

// Default returns the defaults. Zero fields have no bound.
func Default() Limits {
	return Limits{
		HeaderTimeout:     10 * time.Second, // a head is one packet
		SlowClientTimeout: 30 * time.Second,
		SSEKeepAlive:      10 * time.Second, // proxies and clients close connections after 30 s and more
		MinBodyRate:       1 << 10,          // slower than the slowest links
		MaxBodyBytes:      32 << 20,         // a prompt of some million tokens as text
		MaxBodyMemory:     1 << 30,          // 32 of the largest bodies, or thousands of long chats

		MaxN:           128,              // OpenAI's bound
		MaxLogprobs:    20,               // OpenAI's bound
		RequestTimeout: 30 * time.Minute, // the longest answers of slow models take minutes
		MaxAttempts:    3,                // one node may be dead and one overloaded
		ResumeTimeout:  10 * time.Second, // a node restarts with a model of moderate size; clients wait longer

		MaxGrammarBytes:   1 << 20,   // the largest schemas in use have some hundred kilobytes
		MaxMaskSteps:      5_000_000, // below a second; usual masks take some thousand
		MaxQueuedGrammars: 64,        // seconds of the largest grammars
		GrammarCompiles:   2,         // other requests keep the other cores
		GrammarCache:      4 << 20,   // some ten thousand

		MaxInFlight:       8192,     // some 40 KB each, so a few hundred megabytes
		MaxQueuedRequests: 4096,     // some times what a large fleet runs
		MaxQueuedTokens:   16 << 20, // minutes of work of a large fleet, and 64 MB
		QueueTimeout:      time.Minute,
		NodeBacklog:       16,              // a node does not idle until the gateway learns of a place
		NodeBacklogTime:   2 * time.Second, // keeps nodes busy, and leaves the order to the gateway
		RetriesPerSecond:  50,              // retries cannot become the load; bursts of ten seconds' worth
		ResumesPerSecond:  200,             // a large node's streams move at once, without overloading others
	}
}

// WithDefaults returns l with defaults instead of zeros.
func (l Limits) WithDefaults() Limits {
	own, defaults := reflect.ValueOf(&l).Elem(), reflect.ValueOf(Default())
	for i := range own.NumField() {
		if own.Field(i).IsZero() {
			own.Field(i).Set(defaults.Field(i))
		}
	}
	return l
}
