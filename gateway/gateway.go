// Package gateway speaks the OpenAI API to clients and operators.
//
// It wires the stages of a request: package httpserver reads it, the table of routes finds
// who serves it, package auth whose it is, and package exchange leads it through its life,
// answered by own decode nodes (package native) or by upstream servers (package proxy).
//
// Invariant: an accepted request ends with a finish reason, with an error status, or, when
// its stream has begun, with an error event and a connection that is aborted without the
// body's last chunk: a broken answer never looks like a finished one. Whatever ends a
// request, its attempts are cancelled.
//
// The package does not run models, does not know where KV is, and keeps nothing of a request
// after its end.
package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/liveness"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/netio"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/regular"
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

// Fixed bounds of the HTTP side.
const (
	cutGrace       = time.Second      // for error events to leave when the shutdown timeout is over
	retryAfter     = 1                // seconds; what 503 answers suggest
	statsInterval  = 10 * time.Second // of the log's line about throughput
	retryBurstSecs = 10
)

// Options of a Gateway. Zero values mean the defaults above.
type Options struct {
	Host string
	Port int // -1: any free one
	// Listener is used instead of Host and Port. A deadline set on one of its
	// connections must interrupt a read that is under way.
	Listener net.Listener
	TLS      *tls.Config // towards clients; nil: plain HTTP

	RPC     rpc.Options    // towards decode nodes
	Members []nodes.Member // until SetMembers says otherwise

	// Foreign are servers of another kind, which answer for the models they
	// list; without targets there are none.
	Foreign              upstream.Options
	ForwardAuthorization bool // clients' credentials go on to them
	UpstreamRequests     int  // that each is given at once; 0: any number
	// Tokenizers are those of their models, by the models' names; "" is that of all
	// others. Prompts for models without one are routed by their bytes.
	Tokenizers map[string]*proxy.Tokenizer

	// MinRemotePrefillTokens is the number of uncached prompt tokens from which
	// a prefill node computes them; -1: the default; 0: always.
	MinRemotePrefillTokens int

	Policy string // of routing, by its name; empty: prefix

	APIKeys []string // any of them opens /v1; empty: open to all
	// RejectSpecialTokens refuses chats in whose messages of users and tools special
	// tokens are written; otherwise they become control tokens, as with Hugging Face.
	RejectSpecialTokens bool
	AllowedOrigins      []string     // of web pages that may read answers, see CheckOrigins; empty: the gateway's own
	AllowedHosts        []string     // names for which ports without keys answer; nil or with *: any
	Metrics             *metrics.Set // of a process that has other roles too; nil: the gateway's own
	APIKeyFile          string       // with more keys and their limits; read again when it changes
	ServedModelName     string       // what clients call the model; empty: its own name
	ChatTemplate        string       // instead of the model's own; empty: that
	Version             string

	ShutdownTimeout   time.Duration
	DrainDelay        time.Duration // within ShutdownTimeout; negative: none
	RequestTimeout    time.Duration
	AcceptTimeout     time.Duration
	SlowClientTimeout time.Duration
	StreamTokens      int
	MaxBodyBytes      int
	MaxBodyMemory     int // of all large bodies together; negative: no bound
	HeaderTimeout     time.Duration
	MinBodyRate       int // bytes per second; negative: any
	MaxN              int // choices of a request
	MaxPromptTokens   int // of each prompt; 0: what the model takes
	MaxLogprobs       int // best tokens told about with each token; at most openai.MaxLogprobs
	MaxInFlight       int
	MaxQueuedRequests int           // that wait here while the fleet has no room
	MaxQueuedTokens   int           // prompt tokens of those
	QueueTimeout      time.Duration // how long one waits
	NodeBacklog       int           // requests that wait on each decode node
	NodeBacklogTime   time.Duration // of computing prompts that are before the nodes
	MaxConns          int           // when so many are open, the one longest without a request is closed for a new one
	// MaxConnsPerAddress bounds those of one client address; 0: no bound.
	MaxConnsPerAddress int
	MaxAttempts        int
	RetriesPerSecond   float64
	ResumeTimeout      time.Duration
	ResumesPerSecond   float64
	StallTimeout       time.Duration // negative: never
	NodeSilence        time.Duration // negative: never; at least liveness.MinSilence

	Log    *slog.Logger  // nil: discarded
	Tracer *trace.Tracer // nil: no spans

	// AdminListener serves what is for operators, who need no key there, and
	// takes it off the clients' port; nil: it is served there.
	AdminListener net.Listener
	Level         *slog.LevelVar // of the process' log; nil: it cannot be changed
	// LogRequests has a line logged for each request, with that many characters
	// of its prompt.
	LogRequests   bool
	LogPromptText int
	QuietStats    bool // no lines of rates
}

func (o *Options) setDefaults() {
	or(&o.Host, DefaultHost)
	or(&o.Port, DefaultPort)
	or(&o.Policy, route.Prefix.String())
	if o.MinRemotePrefillTokens < 0 {
		o.MinRemotePrefillTokens = DefaultMinRemotePrefillTokens
	}
	or(&o.ShutdownTimeout, DefaultShutdownTimeout)
	or(&o.DrainDelay, DefaultDrainDelay)
	or(&o.RequestTimeout, DefaultRequestTimeout)
	or(&o.AcceptTimeout, DefaultAcceptTimeout)
	or(&o.SlowClientTimeout, DefaultSlowClientTimeout)
	or(&o.StreamTokens, DefaultStreamTokens)
	or(&o.MaxBodyBytes, DefaultMaxBodyBytes)
	or(&o.MaxBodyMemory, DefaultMaxBodyMemory)
	or(&o.HeaderTimeout, DefaultHeaderTimeout)
	or(&o.MinBodyRate, DefaultMinBodyRate)
	or(&o.MaxN, DefaultMaxN)
	or(&o.MaxLogprobs, DefaultMaxLogprobs)
	or(&o.MaxInFlight, DefaultMaxInFlight)
	or(&o.MaxConns, DefaultMaxConns)
	or(&o.MaxQueuedRequests, DefaultMaxQueuedRequests)
	or(&o.MaxQueuedTokens, DefaultMaxQueuedTokens)
	or(&o.QueueTimeout, DefaultQueueTimeout)
	or(&o.NodeBacklog, DefaultNodeBacklog)
	or(&o.NodeBacklogTime, DefaultNodeBacklogTime)
	or(&o.MaxAttempts, DefaultMaxAttempts)
	or(&o.RetriesPerSecond, DefaultRetriesPerSecond)
	or(&o.ResumeTimeout, DefaultResumeTimeout)
	or(&o.ResumesPerSecond, DefaultResumesPerSecond)
	or(&o.StallTimeout, DefaultStallTimeout)
	or(&o.NodeSilence, DefaultNodeSilence)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

func or[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Gateway is one gateway. Make it with New, run it with Run, once.
type Gateway struct {
	*exchange.Service // what requests share, whoever answers them

	o       Options
	http    *httpserver.Server
	native  *native.Fleet
	proxy   *proxy.Proxy // nil: there are no upstreams
	keys    *auth.Keyring
	resumes *rate.Limiter // paces those after it
	limits  atomic.Pointer[Options]

	document []byte        // /openapi.json
	docsPage func() []byte // /docs, made when it is asked for first

	draining atomic.Bool
	seen     seen
}

// New makes a gateway and binds its address, so that a port in use shows at
// once.
func New(o Options) (*Gateway, error) {
	o.setDefaults()
	if o.RPC.Hello == nil {
		return nil, errors.New("gateway: Options.RPC.Hello is not set")
	}
	if err := o.CheckLimits(); err != nil {
		return nil, err
	}
	policy, err := policyOf(o.Policy)
	if err != nil {
		return nil, err
	}
	keys, err := auth.New(o.APIKeys, o.APIKeyFile)
	if err != nil {
		return nil, err
	}
	if o.APIKeyFile != "" {
		regular.WarnExposed(o.Log, o.APIKeyFile)
	}
	if o.ChatTemplate != "" {
		if _, err := jinja.Parse(o.ChatTemplate); err != nil {
			return nil, fmt.Errorf("gateway: the chat template given: %w", err)
		}
	}
	l := o.Listener
	if l == nil {
		addr := net.JoinHostPort(o.Host, strconv.Itoa(max(o.Port, 0)))
		var err error
		if l, err = net.Listen("tcp", addr); err != nil {
			return nil, fmt.Errorf("gateway: listen on %s: %w", addr, err)
		}
	}
	if o.Metrics == nil {
		o.Metrics = metrics.New(metrics.Gateway, o.ServedModelName)
	}
	var clients *httpserver.Server
	retry := netio.Options{Log: o.Log, Count: func(name string) { o.Metrics.Counter(metrics.AcceptErrors, name).Inc() }, MakeRoom: func() bool { return clients.Evict() }}
	l = netio.NewListener(l, retry)
	if o.AdminListener != nil {
		o.AdminListener = netio.NewListener(o.AdminListener, retry)
	}
	g := &Gateway{
		Service: &exchange.Service{Log: o.Log, LogRequests: o.LogRequests, Tracer: o.Tracer, Policy: policy, Meters: exchange.NewMeters(o.Metrics), Budget: perSecond(o.RetriesPerSecond),
			Queue: exchange.NewAdmission(admit.Limits{Requests: o.MaxQueuedRequests, Tokens: o.MaxQueuedTokens}), Cut: make(chan struct{})},
		o:       o,
		keys:    keys,
		resumes: perSecond(o.ResumesPerSecond),
	}
	g.limits.Store(&g.o)
	g.KeyOf, g.Fail, g.Count = g.keyOf, g.fail, g.count
	g.setRequestLimits()
	clients = httpserver.New(l, httpserver.Options{Handler: g.serve, Fail: g.badHTTP, ErrorBody: errorBody, Limits: o.clientLimits(), TLS: o.TLS, MaxConns: o.MaxConns,
		Counters: httpserver.Counters{
			Crowded: o.Metrics.Counter(metrics.GatewayRefused, "address"), Full: o.Metrics.Counter(metrics.GatewayRefused, "connections"), Evicted: o.Metrics.Counter(metrics.GatewayEvictedConns),
		}, Log: o.Log})
	g.http = clients
	g.native = native.New(g.Service, native.Options{
		Nodes: nodes.Options{RPC: o.RPC, StallTimeout: max(0, o.StallTimeout), NodeSilence: max(0, o.NodeSilence), Stale: g.Meters.Stale, Log: o.Log,
			Silent: o.Metrics.Counter(metrics.GatewayNodesLost, "silence"), Stalled: o.Metrics.Counter(metrics.GatewayNodesLost, "stall")},
		AcceptTimeout: o.AcceptTimeout, StreamTokens: o.StreamTokens, MinRemotePrefillTokens: o.MinRemotePrefillTokens, ServedModelName: o.ServedModelName, Names: o.Foreign.Names,
		ChatTemplate: o.ChatTemplate, RejectSpecialTokens: o.RejectSpecialTokens, LogPromptText: o.LogPromptText, Quiet: o.Foreign.Any(), Limits: o.fleetLimits(), Resumes: g.resumes,
	})
	g.native.SetMembers(o.Members)
	if o.Foreign.Any() {
		o.Foreign.Log, o.Foreign.StallTimeout = o.Log, max(0, o.StallTimeout)
		if g.proxy, err = proxy.New(g.Service, proxy.Options{Upstreams: o.Foreign, ForwardAuthorization: o.ForwardAuthorization, Tokenizers: o.Tokenizers,
			Limits: o.upstreamLimits(), Crowds: max(1, runtime.GOMAXPROCS(0)/2), Routed: routed}); err != nil {
			g.native.Close()
			l.Close()
			return nil, err
		}
	}
	g.document = openai.Document(o.Version, keys.Len() > 0, operations())
	g.docsPage = sync.OnceValue(func() []byte { return docsPage(g.document) })
	g.meter()
	return g, nil
}

// CheckLimits refuses limits beyond those of the API.
func (o Options) CheckLimits() error {
	o.setDefaults()
	switch {
	case o.MaxLogprobs < 1 || o.MaxLogprobs > openai.MaxLogprobs:
		return fmt.Errorf("gateway: --max-logprobs %d: want 1 to %d", o.MaxLogprobs, openai.MaxLogprobs)
	case o.NodeSilence > 0 && o.NodeSilence < liveness.MinSilence:
		return fmt.Errorf("gateway: --node-silence %v: want at least %v, as nodes send a heartbeat every 500ms, or 0 for never", o.NodeSilence, liveness.MinSilence)
	case o.MaxN < 1 || o.MaxN > openai.MaxN:
		return fmt.Errorf("gateway: --max-n %d: want 1 to %d", o.MaxN, openai.MaxN)
	}
	return nil
}

func perSecond(n float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(n), burst(n))
}

func burst(perSecond float64) int { return int(max(1, retryBurstSecs*perSecond)) }

// Addr is the address on which clients are served.
func (g *Gateway) Addr() string { return g.http.Addr().String() }

// SetMembers tells the gateway who is in the fleet; any goroutine may call it.
func (g *Gateway) SetMembers(members []nodes.Member) {
	g.native.SetMembers(members)
}

// ready says why the gateway should get no requests; nil: it should.
func (g *Gateway) ready() error {
	switch {
	case g.draining.Load():
		return errors.New("draining")
	case g.proxy != nil && g.proxy.Pool.Now().Up() > 0:
		return nil
	case g.proxy != nil && g.native.Models.Load() == nil:
		return errors.New("no upstream is up")
	case g.native.Models.Load() == nil:
		return errors.New("no model yet: no decode node has given its bundle")
	case g.native.Usable() == 0:
		return errors.New("no usable decode node")
	}
	return nil
}

// Run serves until ctx ends, then drains: it turns unready at once, keeps
// accepting for DrainDelay, lets what runs finish, and cuts what is left when
// ShutdownTimeout is over. It returns nil after that, or why serving failed.
func (g *Gateway) Run(ctx context.Context) error {
	work, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { g.native.Run(work) })
	wg.Go(func() { g.keepRoom(work) })
	if g.o.APIKeyFile != "" {
		wg.Go(func() {
			g.keys.Watch(work, g.Log, g.Meters.Set.Gauge(metrics.GatewayKeyFileBad), func(k *auth.Key) { g.Queue.SetWeight(k.Flow(), k.Limits.Weight) })
		})
	}
	if !g.o.QuietStats {
		wg.Go(func() { g.logStats(work) })
	}
	served := make(chan error, 1)
	go func() { served <- g.http.Run() }()
	if g.o.AdminListener != nil {
		wg.Go(func() { g.serveAdmin(work) })
	}

	var err error
	select {
	case err = <-served:
	case <-ctx.Done():
		g.drain()
		// A server that had not begun to serve knows nothing of the end.
		_ = g.http.Close() // it may be closed already
		if err = <-served; errors.Is(err, net.ErrClosed) {
			err = nil
		}
	}
	stop()
	g.http.End()
	if g.proxy != nil {
		g.proxy.Close()
	}
	wg.Wait()
	g.native.Close()
	if err != nil {
		return fmt.Errorf("gateway: serve on %s: %w", g.Addr(), err)
	}
	return nil
}

func (g *Gateway) drain() {
	over := time.Now().Add(g.o.ShutdownTimeout)
	g.draining.Store(true)
	g.Log.Info("draining", "in_flight", g.InFlight.Load(), "timeout", g.o.ShutdownTimeout)
	if delay := min(g.o.DrainDelay, g.o.ShutdownTimeout); delay > 0 {
		time.Sleep(delay)
	}
	ctx, cancel := context.WithDeadline(context.Background(), over)
	defer cancel()
	if err := g.http.Shutdown(ctx); ctx.Err() == nil {
		if err != nil {
			g.Log.Warn("closing the listener failed", "error", err)
		}
		return
	}
	g.Log.Warn("shutdown timeout is over, cutting what runs", "in_flight", g.InFlight.Load())
	close(g.Cut)
	if g.proxy != nil {
		g.proxy.Pool.AbortAll()
	}
	last, cancelLast := context.WithTimeout(context.Background(), cutGrace)
	defer cancelLast()
	for g.InFlight.Load() > 0 && last.Err() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	g.http.CloseAll()
}

// logStats says every ten seconds what went through, while anything does.
func (g *Gateway) logStats(ctx context.Context) {
	tick := time.NewTicker(statsInterval)
	defer tick.Stop()
	tokens, prompt, busy := g.Meters.Tokens.Get(), g.Meters.Prompt.Get(), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, prompts, running := g.Meters.Tokens.Get(), g.Meters.Prompt.Get(), g.InFlight.Load()
		if active := now != tokens || running > 0; active || busy {
			g.Log.Info(fmt.Sprintf("Gateway: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, Usable decode nodes: %d",
				(prompts-prompt)/statsInterval.Seconds(), (now-tokens)/statsInterval.Seconds(), running, g.native.Usable()))
			busy = active
		}
		tokens, prompt = now, prompts
	}
}
