package gateway

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/liveness"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// Defaults of Options. Package limits has the others.
const (
	// DefaultMinRemotePrefillTokens is one block. A transfer of fewer tokens adds half to the time
	// to the first token and saves the decode node's other streams next to nothing. From there on,
	// predicted times decide; see bench/results/min-remote-prefill.md.
	DefaultMinRemotePrefillTokens = 16
	// DefaultDrainDelay is how long a draining gateway keeps accepting, until load balancers have
	// noticed that it is not ready.
	DefaultDrainDelay = 3 * time.Second
	// DefaultAcceptTimeout bounds the time in which a node queues an attempt. Nodes do so at once.
	DefaultAcceptTimeout = 5 * time.Second
)

// Options of a Gateway. Here and in Limits zero is the default. A negative number or duration means
// that there is no bound, or never, where that is possible.
type Options struct {
	Host string
	Port int // negative: any free one
	// Listener is used instead of Host and Port. A deadline set on one of its connections must
	// interrupt a read in progress.
	Listener net.Listener
	TLS      *tls.Config // for clients; nil: plain HTTP
	MaxConns int         // beyond it, the connection longest without a request is closed for a new one

	RPC       rpc.Options    // for decode nodes
	Members   []nodes.Member // until SetMembers is called
	Upstreams Upstreams
	Limits    Limits

	Policy string // name of the routing policy
	// MinRemotePrefillTokens is the number of uncached prompt tokens from which a prefill node
	// computes them; negative: always.
	MinRemotePrefillTokens int
	AcceptTimeout          time.Duration // for a node to queue an attempt
	StreamTokens           int           // of one choice that may wait for a slow client
	StallTimeout           time.Duration // of a node with work that makes no step
	NodeSilence            time.Duration // without heartbeats; at least liveness.MinSilence

	ServedModelName string // in the API; empty: the model's own name
	ChatTemplate    string // replaces the model's own; empty: it does not
	// ToolCallParser and ReasoningParser name the formats of the models' answers; empty: each model's
	// chat template shows them, parse.None: there is none.
	ToolCallParser, ReasoningParser string
	NoToolCalls                     bool // refuses requests for tool calls
	// RejectSpecialTokens refuses chats with special tokens in messages of users and tools.
	// Otherwise these become control tokens, as with Hugging Face transformers.
	RejectSpecialTokens bool
	// KeepModels keeps the names of models whose nodes are all gone. Their requests wait for a node.
	KeepModels bool

	// ResponseKeyFile has secrets for the reasoning of responses, one in each line. The first one
	// encrypts, all of them decrypt. Empty: ResponseSecret does both.
	ResponseKeyFile string
	ResponseSecret  []byte // at least responses.MinSecret bytes, the same in all gateways; nil: random

	TrustTemplates bool // runs the chat templates of requests for own models, within bounds
	TokenizerInfo  bool // serves openai.TokenizerInfoPath

	CompactJSON bool // constrained answers have no whitespace between JSON tokens

	APIKeys        []string // any of them opens /v1; if there is none here or in APIKeyFile, no key is required
	APIKeyFile     string   // has more keys and their limits; read again when it changes
	AllowedOrigins []string // of web pages that may read answers, see CheckOrigins; empty: the gateway's own
	AllowedHosts   []string // names for which ports without keys answer; nil or with *: any

	// Planner decides how many nodes the fleet should have; nil: there is none.
	Planner *Planner

	ShutdownTimeout time.Duration
	DrainDelay      time.Duration // within ShutdownTimeout

	// AdminListener serves operators' endpoints, which need no key there, instead of the clients'
	// port; nil: the clients' port has them.
	AdminListener net.Listener
	Version       string
	Metrics       *metrics.Set   // of a process with other roles too; nil: the gateway makes its own
	Tracer        *trace.Tracer  // nil: no spans
	Log           *slog.Logger   // nil: discarded
	Level         *slog.LevelVar // of the process's log; nil: it cannot be changed
	LogRequests   bool           // writes a line for each request
	LogPromptText int            // characters of the prompt in that line
	QuietStats    bool           // writes no lines of throughput
}

// Limits of clients and their requests. They may change while the gateway runs.
type Limits = limits.Limits

// Upstreams are OpenAI-compatible servers, which answer for the models that they list. Without
// targets and sources there are none.
type Upstreams struct {
	upstream.Options
	ForwardAuthorization bool // forwards clients' credentials
	// Tokenizers are those of the upstreams' models, by name; "" is the tokenizer of all others.
	// Prompts for models without one are routed by their bytes.
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
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
}

// checkLimits refuses limits beyond those of the API.
func checkLimits(l *Limits) error {
	switch {
	case l.MaxGrammarBytes < 1 || l.MaxGrammarBytes > limits.Default().MaxGrammarBytes:
		return fmt.Errorf("gateway: --max-grammar-bytes %d: want 1 to %d", l.MaxGrammarBytes, limits.Default().MaxGrammarBytes)
	case l.MaxLogprobs < 1 || l.MaxLogprobs > openai.MaxLogprobs:
		return fmt.Errorf("gateway: --max-logprobs %d: want 1 to %d", l.MaxLogprobs, openai.MaxLogprobs)
	case l.MaxN < 1 || l.MaxN > openai.MaxN:
		return fmt.Errorf("gateway: --max-n %d: want 1 to %d", l.MaxN, openai.MaxN)
	}
	return nil
}

// Check refuses limits beyond those of the API, times that are too short, and parsers that do not
// exist. It returns an error for each.
func (o Options) Check() (errs []error) {
	o.setDefaults()
	if err := checkLimits(&o.Limits); err != nil {
		errs = append(errs, err)
	}
	if o.NodeSilence > 0 && o.NodeSilence < liveness.MinSilence {
		errs = append(errs, fmt.Errorf("gateway: --node-silence %v: want at least %v, as nodes send a heartbeat every 500ms, or 0 for never", o.NodeSilence, liveness.MinSilence))
	}
	if _, err := parse.Choose(parse.Evidence{}, o.ToolCallParser, parse.None); err != nil {
		errs = append(errs, fmt.Errorf("gateway: --tool-call-parser: %w", err))
	}
	if _, err := parse.Choose(parse.Evidence{}, parse.None, o.ReasoningParser); err != nil {
		errs = append(errs, fmt.Errorf("gateway: --reasoning-parser: %w", err))
	}
	return errs
}

// SetLimits changes the limits. Requests that were admitted are not affected. Any goroutine may
// call it while the gateway runs.
func (g *Gateway) SetLimits(l Limits) error {
	l = l.WithDefaults()
	if err := checkLimits(&l); err != nil {
		return err
	}
	g.setLimits(&l)
	return nil
}

// setLimits sets the limits of each stage.
func (g *Gateway) setLimits(l *Limits) {
	g.Service.SetLimits(*l)
	g.http.SetLimits(*l)
	for limiter, perSecond := range map[*rate.Limiter]float64{g.Budget: l.RetriesPerSecond, g.Resumes: l.ResumesPerSecond} {
		limiter.SetLimit(rate.Limit(perSecond))
		limiter.SetBurst(burst(perSecond))
	}
	g.meterLimits()
}

// keyName is where a request keeps its key, which is looked up once.
type keyName struct{}

// keyOf returns the key of a request; nil: no key matches.
func (g *Gateway) keyOf(ctx *fasthttp.RequestCtx) *auth.Key {
	if k, ok := ctx.Request.UserValue(keyName{}).(*auth.Key); ok {
		return k
	}
	k := g.keys.Find(&ctx.Request.Header)
	if k != nil {
		ctx.Request.SetUserValue(keyName{}, k)
	}
	return k
}

// SetUpstreams replaces the upstreams and their sources. The gateway must have been started with
// upstreams.
func (g *Gateway) SetUpstreams(targets []upstream.Target, sources []upstream.Source) error {
	if g.proxy == nil {
		return errors.New("gateway: it was started without upstreams")
	}
	if err := g.proxy.Pool.SetTargets(targets); err != nil {
		return err
	}
	return g.proxy.Pool.SetSources(sources)
}
