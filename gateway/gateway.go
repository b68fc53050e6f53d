// Package gateway serves the OpenAI API, and Anthropic's Messages API, to clients and operators.
//
// It connects the stages of a request. Package httpserver reads it, the table of routes finds its
// endpoint, package auth its API key, and package exchange runs it, answered by own decode nodes
// (package native) or by upstreams (package proxy).
//
// Invariant: an accepted request ends with a finish reason or with an error status. If its stream
// has started, it may also end with an error event and, unless the API has an event for failed
// answers, a connection that is aborted without the body's last chunk. So an incomplete answer
// never looks complete. Its attempts are cancelled in any case.
//
// The package does not run models, does not know where KV is, and keeps nothing of a request after
// its end.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/api/responses"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/netio"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/regular"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Fixed bounds.
const (
	cutGrace       = time.Second      // for error events to be sent after the shutdown timeout
	statsInterval  = 10 * time.Second // between lines of throughput
	retryBurstSecs = 10
)

// Gateway is one gateway. Make it with New, and call Run once.
type Gateway struct {
	*exchange.Service

	o      Options
	http   *httpserver.Server
	native *native.Fleet
	proxy  *proxy.Proxy // nil: there are no upstreams
	keys   *auth.Keyring

	document func() []byte // /openapi.json, written at its first request
	docsPage func() []byte // /docs, made when it is first requested

	responseKeys *responses.Keys
	warnDropped  rate.Sometimes

	planner  *planner // nil: there is none
	recorder recorder

	draining atomic.Bool
	cut      context.CancelFunc // ends all requests
	targeted scraped
}

// New returns a gateway that is bound to its address, so that a port in use is an error at once.
func New(o Options) (*Gateway, error) {
	o.setDefaults()
	if o.RPC.Hello == nil {
		return nil, errors.New("gateway: Options.RPC.Hello is not set")
	}
	if err := errors.Join(o.Check()...); err != nil {
		return nil, err
	}
	policy, err := route.ParsePolicy(o.Policy)
	if err != nil {
		return nil, fmt.Errorf("gateway: --policy: %w", err)
	}
	keys, err := auth.New(o.APIKeys, o.APIKeyFile)
	if err != nil {
		return nil, err
	}
	if o.APIKeyFile != "" {
		regular.WarnExposed(o.Log, o.APIKeyFile)
	}
	sealing, err := loadResponseKeys(&o)
	if err != nil {
		return nil, err
	}
	if o.ResponseKeyFile != "" {
		regular.WarnExposed(o.Log, o.ResponseKeyFile)
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
	cut, end := context.WithCancel(context.Background())
	g := &Gateway{
		cut: end,
		Service: &exchange.Service{Log: o.Log, LogRequests: o.LogRequests, Tracer: o.Tracer, Policy: policy, Meters: o.Metrics, Budget: perSecond(o.Limits.RetriesPerSecond),
			Resumes: perSecond(o.Limits.ResumesPerSecond), Queue: exchange.NewAdmission(admit.Limits{}), Cut: cut},
		o:    o,
		keys: keys,

		responseKeys: sealing, warnDropped: rate.Sometimes{Interval: time.Second},
	}
	g.Service.SetLimits(o.Limits)
	keys.Meter(o.Metrics)
	g.KeyOf, g.Fail, g.AppendFault, g.Count = g.keyOf, g.fail, appendFault, g.count
	clients = httpserver.New(l, httpserver.Options{Handler: g.serve, Fail: g.badHTTP, ErrorBody: errorBody, Limits: o.Limits, TLS: o.TLS, MaxConns: o.MaxConns,
		Counters: httpserver.Counters{
			AddressFull: o.Metrics.Counter(metrics.GatewayRefused, "address"), Full: o.Metrics.Counter(metrics.GatewayRefused, "connections"), Evicted: o.Metrics.Counter(metrics.GatewayEvictedConns),
		}, Log: o.Log})
	g.http = clients
	if o.Planner != nil {
		g.planner = newPlanner(g, *o.Planner)
	}
	g.native = native.New(g.Service, native.Options{
		Arrived: g.arrived(), Ended: g.ended, Unserved: g.unserved(),
		Nodes:         nodes.Options{RPC: o.RPC, StallTimeout: max(0, o.StallTimeout), NodeSilence: max(0, o.NodeSilence), Log: o.Log},
		AcceptTimeout: o.AcceptTimeout, StreamTokens: o.StreamTokens, MinRemotePrefillTokens: o.MinRemotePrefillTokens, ServedModelName: o.ServedModelName, Names: o.Upstreams.Names,
		ChatTemplate: o.ChatTemplate, ToolCallParser: o.ToolCallParser, ReasoningParser: o.ReasoningParser, NoToolCalls: o.NoToolCalls,
		RejectSpecialTokens: o.RejectSpecialTokens, TrustTemplates: o.TrustTemplates, CompactJSON: o.CompactJSON, LogPromptText: o.LogPromptText, Quiet: o.Upstreams.Any(), KeepModels: o.KeepModels,
	})
	g.native.SetMembers(o.Members)
	if o.Upstreams.Any() {
		o.Upstreams.Log, o.Upstreams.StallTimeout = o.Log, max(0, o.StallTimeout)
		if g.proxy, err = proxy.New(g.Service, proxy.Options{Upstreams: o.Upstreams.Options, ForwardAuthorization: o.Upstreams.ForwardAuthorization, Tokenizers: o.Upstreams.Tokenizers,
			Pollers: max(1, runtime.GOMAXPROCS(0)/2), Routed: routed}); err != nil {
			g.native.Close()
			l.Close()
			return nil, err
		}
	}
	required := keys.Len() > 0
	g.document = sync.OnceValue(func() []byte { return openai.Document(o.Version, required, operations()) })
	g.docsPage = sync.OnceValue(func() []byte { return docsPage(g.document()) })
	g.setLimits(&g.o.Limits)
	g.meter()
	return g, nil
}

// perSecond returns a limiter that starts with a full burst.
func perSecond(n float64) *rate.Limiter { return rate.NewLimiter(rate.Limit(n), burst(n)) }

func burst(perSecond float64) int { return int(max(1, retryBurstSecs*perSecond)) }

// Addr returns the address that clients connect to.
func (g *Gateway) Addr() string { return g.http.Addr().String() }

// SetMembers replaces the members of the fleet. Any goroutine may call it.
func (g *Gateway) SetMembers(members []nodes.Member) {
	if g.planner != nil {
		g.planner.members.Store(&members)
	}
	g.native.SetMembers(members)
}

// Ready returns why the gateway should get no requests, as /readyz does, or nil.
func (g *Gateway) Ready() error {
	switch {
	case g.draining.Load():
		return errors.New("draining")
	case g.proxy != nil && g.proxy.Pool.Now().Up() > 0:
		return nil
	case g.proxy != nil && g.native.Models.Load() == nil:
		return errors.New("no upstream is up")
	case g.native.Models.Load() == nil:
		return errors.New("no model yet: no decode node has given its bundle")
	case g.native.Usable() == 0 && !g.native.Waits():
		return errors.New("no usable decode node")
	}
	return nil
}

// Run serves until ctx ends, then drains. It is not ready at once, keeps accepting for DrainDelay,
// lets running requests finish, and cuts what is left after ShutdownTimeout. It returns nil after
// that, or why serving failed.
func (g *Gateway) Run(ctx context.Context) error {
	work, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { g.native.Run(work) })
	wg.Go(func() { g.keepRoom(work) })
	if g.planner != nil {
		wg.Go(func() { g.planner.run(work) })
	}
	if g.o.APIKeyFile != "" {
		wg.Go(func() {
			g.keys.Watch(work, g.Log, g.Meters.Gauge(metrics.GatewayKeyFileBad), func(k *auth.Key) { g.Queue.SetWeight(k.Flow(), k.Limits.Weight) })
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
		_ = g.http.Close() // in case the server had not started
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
	g.http.Retire()
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
	g.Log.Warn("shutdown timeout reached, aborting running requests", "in_flight", g.InFlight.Load())
	g.cut()
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

// logStats logs the throughput of every ten seconds with work.
func (g *Gateway) logStats(ctx context.Context) {
	tick := time.NewTicker(statsInterval)
	defer tick.Stop()
	tokens, prompt, busy := g.Meters.Counter(metrics.GenerationTokens).Get(), g.Meters.Counter(metrics.PromptTokens).Get(), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, prompts, running := g.Meters.Counter(metrics.GenerationTokens).Get(), g.Meters.Counter(metrics.PromptTokens).Get(), g.InFlight.Load()
		if active := now != tokens || running > 0; active || busy {
			g.Log.Info(fmt.Sprintf("Gateway: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, Usable decode nodes: %d",
				(prompts-prompt)/statsInterval.Seconds(), (now-tokens)/statsInterval.Seconds(), running, g.native.Usable()))
			busy = active
		}
		tokens, prompt = now, prompts
	}
}

// CheckBundle checks whether a gateway could serve a node's model, by parsing its tokenizer and
// chat template. Nodes call it before they start, so that an incomplete file stops the node instead
// of failing on every gateway.
func CheckBundle(b *nodepb.Bundle) error {
	_, err := native.NewModel(b, "", "", time.Time{})
	return err
}

// CheckTemplate returns the error of a text that is no chat template, with its line.
func CheckTemplate(text string) error {
	_, err := jinja.Parse(text)
	if err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), "chat template "))
	}
	return nil
}

// CheckKeys returns the error with which New would refuse the API keys.
func CheckKeys(o *Options) error {
	_, err := auth.New(o.APIKeys, o.APIKeyFile)
	return err
}

// CheckResponseKeys returns the error with which New would refuse the keys of responses.
func CheckResponseKeys(o *Options) error {
	_, err := loadResponseKeys(o)
	return err
}

// Check verifies the gateway's counts: none is below zero. While no request is in flight, no node
// has an attempt, no connection a stream, and no admission queue a request. Any goroutine may call
// it at any time.
func (g *Gateway) Check() error {
	attempts := g.Meters.Counter(metrics.GatewayAttempts).Get()
	inFlight := g.InFlight.Load()
	err := g.native.Nodes.Check(inFlight == 0)
	g.EachQueue(func(_ any, a *exchange.Admission) { err = errors.Join(err, a.Check(inFlight == 0)) })
	if inFlight < 0 {
		err = errors.Join(err, fmt.Errorf("gateway: %d requests in flight", inFlight))
	}
	if inFlight == 0 && (g.InFlight.Load() != 0 || g.Meters.Counter(metrics.GatewayAttempts).Get() != attempts) {
		return nil // a request has started since
	}
	return err
}
