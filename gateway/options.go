package gateway

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/liveness"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// Defaults of Options.
const (
	DefaultHost = "127.0.0.1" // plain HTTP stays on this machine unless told otherwise
	DefaultPort = 8000

	// DefaultMinRemotePrefillTokens: below this many uncached prompt tokens, a block, a
	// transfer adds half to the first token and spares the decode node's other streams
	// next to nothing. From there on predicted times decide; see
	// bench/results/min-remote-prefill.md.
	DefaultMinRemotePrefillTokens = 16

	// DefaultShutdownTimeout is the time from the order to stop to the cut of
	// what still runs. Kubernetes kills after 30 s unless told otherwise.
	DefaultShutdownTimeout = 30 * time.Second
	// DefaultDrainDelay: after turning unready the gateway keeps accepting for
	// this long, until load balancers have noticed.
	DefaultDrainDelay = 3 * time.Second
	// DefaultRequestTimeout bounds a whole request; the longest answers of slow
	// models take minutes.
	DefaultRequestTimeout = 30 * time.Minute
	// DefaultAcceptTimeout: a node that has not queued an attempt within this is
	// given up for it. Queueing is immediate, so this is a few lost seconds.
	DefaultAcceptTimeout = 5 * time.Second
	// DefaultSlowClientTimeout is how long one write to a client may block.
	DefaultSlowClientTimeout = 30 * time.Second
	// DefaultStreamTokens is how many tokens of one choice may wait for a slow
	// client before its generation pauses: some seconds of a fast model.
	DefaultStreamTokens = 1024
	// DefaultMaxLogprobs is OpenAI's bound.
	DefaultMaxLogprobs = 20
	// DefaultMaxBodyBytes holds a prompt of some million tokens as text.
	DefaultMaxBodyBytes = 16 << 20
	// DefaultMaxInFlight bounds requests being answered: at some 40 KB each they
	// then hold a few hundred megabytes at most.
	DefaultMaxInFlight = 8192
	// DefaultMaxQueuedRequests may wait in the gateway while the fleet has no room:
	// some times what a large fleet runs, after which clients do better elsewhere.
	DefaultMaxQueuedRequests = 4096
	// DefaultQueueTimeout is longer than a person waits, and than a burst lasts.
	DefaultQueueTimeout = time.Minute
	// DefaultNodeBacklog requests wait on a decode node beside those that it runs,
	// so that it does not idle until the gateway has heard of a place.
	DefaultNodeBacklog = 16
	// DefaultNodeBacklogTime of prompts, at their measured speed, are before the
	// nodes: enough to keep them busy, little enough that the gateway still chooses who is next.
	DefaultNodeBacklogTime = 2 * time.Second
	// DefaultMaxQueuedTokens bounds prompt tokens that wait in the gateway: minutes
	// of work of a large fleet, and 64 MB.
	DefaultMaxQueuedTokens = 16 << 20
	// DefaultMaxN is OpenAI's bound of choices.
	DefaultMaxN = openai.MaxN
	// DefaultHeaderTimeout is for a request's head, which is one packet.
	DefaultHeaderTimeout = 10 * time.Second
	// DefaultMinBodyRate, in bytes per second, is below the slowest links.
	DefaultMinBodyRate = 1024
	// DefaultMaxBodyMemory holds 32 of the largest bodies, or thousands of long chats.
	DefaultMaxBodyMemory = 1 << 30
	// DefaultMaxConns bounds client connections, most of them idle.
	DefaultMaxConns = 65536
	// DefaultMaxAttempts is how many nodes a choice is tried on without getting a
	// token: with one node dead and one overloaded there is a third.
	DefaultMaxAttempts = 3
	// DefaultResumeTimeout is how long a stream that has begun waits for a node to
	// go on: a restart with a model of moderate size, and less than clients wait.
	DefaultResumeTimeout = 10 * time.Second
	// DefaultResumesPerSecond and the burst of ten seconds' worth: the streams of
	// a large node are taken over at once, without its neighbours drowning.
	DefaultResumesPerSecond = 200
	// DefaultStallTimeout: a decode node that has work and makes no step for so
	// long has hung. It must outlast the longest step of a slow machine.
	DefaultStallTimeout = 30 * time.Second
	// DefaultNodeSilence: a decode node whose heartbeats, one each 500 ms, are missing
	// for so long is stopped or unreachable. It must outlast a starved processor.
	DefaultNodeSilence = 2 * time.Second
	// DefaultRetriesPerSecond and the burst of ten seconds' worth are the budget
	// of all requests' retries together, so that retrying cannot become the load.
	DefaultRetriesPerSecond = 50
)

// Options of a Gateway. In Options and Limits a zero value is the default, and a negative
// number or duration means that there is no bound, or never, where that is possible.
type Options struct {
	Host string
	Port int // negative: any free one
	// Listener is used instead of Host and Port. A deadline set on one of its
	// connections must interrupt a read that is under way.
	Listener net.Listener
	TLS      *tls.Config // towards clients; nil: plain HTTP
	MaxConns int         // when so many are open, the one longest without a request is closed for a new one

	RPC       rpc.Options    // towards decode nodes
	Members   []nodes.Member // until SetMembers says otherwise
	Upstreams Upstreams
	Limits    Limits

	Policy string // of routing, by its name
	// MinRemotePrefillTokens is the number of uncached prompt tokens from which a prefill
	// node computes them; negative: always.
	MinRemotePrefillTokens int
	AcceptTimeout          time.Duration // within which a node queues an attempt
	StreamTokens           int           // of one choice that may wait for a slow client
	StallTimeout           time.Duration // of a node with work that makes no step
	NodeSilence            time.Duration // of a node's heartbeats; at least liveness.MinSilence

	ServedModelName string // what clients call the model; empty: its own name
	ChatTemplate    string // instead of the model's own; empty: that
	// RejectSpecialTokens refuses chats in whose messages of users and tools special
	// tokens are written; otherwise they become control tokens, as with Hugging Face.
	RejectSpecialTokens bool

	APIKeys        []string // any of them opens /v1; none, here and in APIKeyFile: open to all
	APIKeyFile     string   // with more keys and their limits; read again when it changes
	AllowedOrigins []string // of web pages that may read answers, see CheckOrigins; empty: the gateway's own
	AllowedHosts   []string // names for which ports without keys answer; nil or with *: any

	ShutdownTimeout time.Duration
	DrainDelay      time.Duration // within ShutdownTimeout

	// AdminListener serves what is for operators, who need no key there, and
	// takes it off the clients' port; nil: it is served there.
	AdminListener net.Listener
	Version       string
	Metrics       *metrics.Set   // of a process that has other roles too; nil: the gateway's own
	Tracer        *trace.Tracer  // nil: no spans
	Log           *slog.Logger   // nil: discarded
	Level         *slog.LevelVar // of the process' log; nil: it cannot be changed
	LogRequests   bool           // a line for each request
	LogPromptText int            // characters of the request's prompt in its line
	QuietStats    bool           // no lines of rates
}

// Limits of clients and their requests. They may change while the gateway runs.
type Limits = exchange.Limits

// Upstreams are servers of another kind, which answer for the models that they list;
// without targets there are none.
type Upstreams struct {
	upstream.Options
	ForwardAuthorization bool // clients' credentials go on to them
	// Tokenizers are those of their models, by the models' names; "" is that of all
	// others. Prompts for models without one are routed by their bytes.
	Tokenizers map[string]*proxy.Tokenizer
}

func (o *Options) setDefaults() {
	or(&o.Host, DefaultHost)
	or(&o.Port, DefaultPort)
	or(&o.Policy, route.Prefix.String())
	or(&o.MinRemotePrefillTokens, DefaultMinRemotePrefillTokens)
	or(&o.ShutdownTimeout, DefaultShutdownTimeout)
	or(&o.DrainDelay, DefaultDrainDelay)
	or(&o.AcceptTimeout, DefaultAcceptTimeout)
	or(&o.StreamTokens, DefaultStreamTokens)
	or(&o.MaxConns, DefaultMaxConns)
	or(&o.StallTimeout, DefaultStallTimeout)
	or(&o.NodeSilence, DefaultNodeSilence)
	setLimitDefaults(&o.Limits)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

func setLimitDefaults(l *Limits) {
	or(&l.RequestTimeout, DefaultRequestTimeout)
	or(&l.SlowClientTimeout, DefaultSlowClientTimeout)
	or(&l.MaxBodyBytes, DefaultMaxBodyBytes)
	or(&l.MaxBodyMemory, DefaultMaxBodyMemory)
	or(&l.HeaderTimeout, DefaultHeaderTimeout)
	or(&l.MinBodyRate, DefaultMinBodyRate)
	or(&l.MaxN, DefaultMaxN)
	or(&l.MaxLogprobs, DefaultMaxLogprobs)
	or(&l.MaxInFlight, DefaultMaxInFlight)
	or(&l.MaxQueuedRequests, DefaultMaxQueuedRequests)
	or(&l.MaxQueuedTokens, DefaultMaxQueuedTokens)
	or(&l.QueueTimeout, DefaultQueueTimeout)
	or(&l.NodeBacklog, DefaultNodeBacklog)
	or(&l.NodeBacklogTime, DefaultNodeBacklogTime)
	or(&l.MaxAttempts, DefaultMaxAttempts)
	or(&l.RetriesPerSecond, DefaultRetriesPerSecond)
	or(&l.ResumeTimeout, DefaultResumeTimeout)
	or(&l.ResumesPerSecond, DefaultResumesPerSecond)
}

func or[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// checkLimits refuses limits beyond those of the API.
func checkLimits(l *Limits) error {
	switch {
	case l.MaxLogprobs < 1 || l.MaxLogprobs > openai.MaxLogprobs:
		return fmt.Errorf("gateway: --max-logprobs %d: want 1 to %d", l.MaxLogprobs, openai.MaxLogprobs)
	case l.MaxN < 1 || l.MaxN > openai.MaxN:
		return fmt.Errorf("gateway: --max-n %d: want 1 to %d", l.MaxN, openai.MaxN)
	}
	return nil
}

// Check refuses limits beyond those of the API, and times that are too short.
func (o Options) Check() error {
	o.setDefaults()
	if o.NodeSilence > 0 && o.NodeSilence < liveness.MinSilence {
		return fmt.Errorf("gateway: --node-silence %v: want at least %v, as nodes send a heartbeat every 500ms, or 0 for never", o.NodeSilence, liveness.MinSilence)
	}
	return checkLimits(&o.Limits)
}
