package gateway

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/liveness"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// Defaults of Options. Package limits has the others.
const (
	// DefaultMinRemotePrefillTokens is one block. A transfer of fewer tokens adds half to the time to
	// the first token and saves the decode node's other streams next to nothing. From there on,
	// predicted times decide; see bench/results/min-remote-prefill.md.
	DefaultMinRemotePrefillTokens = 16
	// DefaultDrainDelay is how long a draining gateway keeps accepting, until load balancers have
	// noticed that it is not ready.
	DefaultDrainDelay = 3 * time.Second
	// DefaultAcceptTimeout bounds the time in which a node queues an attempt. Nodes do so at once.
	DefaultAcceptTimeout = 5 * time.Second
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
type Limits = limits.Limits

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
	o.Host, o.Port, o.Policy = cmp.Or(o.Host, limits.Host), cmp.Or(o.Port, limits.Port), cmp.Or(o.Policy, route.Prefix.String())
	o.MinRemotePrefillTokens = cmp.Or(o.MinRemotePrefillTokens, DefaultMinRemotePrefillTokens)
	o.ShutdownTimeout = cmp.Or(o.ShutdownTimeout, 30*time.Second)
	o.DrainDelay = cmp.Or(o.DrainDelay, DefaultDrainDelay)
	o.AcceptTimeout = cmp.Or(o.AcceptTimeout, DefaultAcceptTimeout)
	o.StreamTokens, o.MaxConns = cmp.Or(o.StreamTokens, limits.StreamTokens), cmp.Or(o.MaxConns, limits.MaxConns)
	o.StallTimeout, o.NodeSilence = cmp.Or(o.StallTimeout, limits.StallTimeout), cmp.Or(o.NodeSilence, limits.NodeSilence)
	o.Limits = o.Limits.WithDefaults()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
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
