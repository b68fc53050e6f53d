// Package decode owns requests: from the Generate that starts an attempt to its
// last token. It pins what it has of the prompt, has a prefill node push the
// rest into blocks it reserved, computes the last prompt token itself and
// streams what it samples, one frame per step and gateway.
//
// Invariant: an attempt that was accepted ends with a finish reason or an End
// that says why, and whatever it held - blocks, leases, the work it asked of a
// prefill node - is given back. KV that has not wholly arrived and matched is
// never decoded.
//
// The package does not choose prefill nodes (the gateway ranks them), does not
// know text, and never retries on the same prefill node.
package decode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/sony/gobreaker/v2"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/node"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Identity is what must agree between this node and those it works with.
type Identity = node.Identity

// Options configure a node. Zero durations and counts take the defaults.
type Options struct {
	Engine   *engine.Engine
	Identity Identity
	Bundle   *nodepb.Bundle
	Reader   Reader // nil: this node never asks for remote prefill
	// Dial makes the connections to prefill nodes, with the node's handler for
	// their frames. Needed with Reader.
	Dial   func(rpc.Handler) Dialer
	Logger *slog.Logger
	Tracer *trace.Tracer // nil: no spans

	MaxModelLen int
	BlockTokens int
	// MaxRequests bounds the attempts a node owns at once, running, waiting
	// and held together. Default 1024.
	MaxRequests int
	// MaxRunning is how many requests the engine runs at once, which gateways are
	// told so that the others wait there; 0: they are not.
	MaxRunning int
	// RequestTimeout ends an attempt that named no deadline. Default 30 min.
	RequestTimeout time.Duration
	// PrefillTimeout is how long one prefill node may stay silent: no answer,
	// no queue position, no grant asked. Then the next one is tried. Default 5 s.
	PrefillTimeout time.Duration
	// GrantTimeout is how long a prefill node that is ready to run waits for
	// room in this node's pool before it is sent away. Default 2 s.
	GrantTimeout time.Duration
	// LeaseDuration is how long a granted push may stay silent. Default 10 s.
	LeaseDuration time.Duration
	// StatsInterval is the heartbeat to gateways, five times as often while the
	// load changes. Default 500 ms.
	StatsInterval time.Duration
}

func (o *Options) setDefaults() {
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 30*time.Minute)
	o.PrefillTimeout = cmp.Or(o.PrefillTimeout, 5*time.Second)
	o.GrantTimeout = cmp.Or(o.GrantTimeout, 2*time.Second)
	o.LeaseDuration = cmp.Or(o.LeaseDuration, 10*time.Second)
	o.StatsInterval = cmp.Or(o.StatsInterval, node.DefaultStatsInterval)
	o.MaxRequests = cmp.Or(o.MaxRequests, 1024)
	o.BlockTokens = cmp.Or(o.BlockTokens, kvcache.DefaultBlockTokens)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Dialer finds the shared connection to a prefill node. *rpc.Pool is one.
type Dialer interface {
	Get(ctx context.Context, addr string) (*rpc.Conn, error)
}

// Node is a decode node's requests. It implements rpc.Handler for gateways'
// connections; a handler of its own serves those it dials.
type Node struct {
	*node.Base
	o       Options
	log     *slog.Logger
	prefill Dialer
	legs    legs

	mu       sync.Mutex
	gateways map[*rpc.Conn]*gateway
	attempts map[key]*attempt
	fetches  map[key]*fetch // by the stream on a prefill node's connection
	leases   leases
	recent   recent
	dirty    []*gateway // gateways with tokens of the running step
	owners   int        // goroutines that own an attempt, or that one just ended under
	count    Counters
}

// Counters only grow; metrics read them.
type Counters struct {
	Accepted, Refused                                          uint64
	Overloaded                                                 uint64 // of the refused, for want of a place in MaxRequests
	RemotePrefills                                             uint64 // prompts whose KV arrived from another node
	LocalPrefills                                              uint64 // prompts computed here, by choice or for want of a prefill node
	PrefillFailures                                            uint64 // attempts at a prefill node that came to nothing
	DroppedStreams                                             uint64 // full outbox: the stream was dropped, the step went on
	FinishedStop, FinishedLength, FinishedAbort, FinishedError uint64
}

// key names a stream on a connection.
type key struct {
	conn   *rpc.Conn
	stream uint64
}

// gateway is what one connection is to be sent.
type gateway struct {
	conn   *rpc.Conn
	tokens []rpc.Token // of the running step
	// logProbs of those tokens, for the streams that asked.
	logProbs []*nodepb.TokenLogProbs
	prompts  []promptProbs // of the running step
	dirty    bool          // is in Node.dirty
	owed     []owed        // Ends that its full outbox did not take, oldest first
}

// promptProbs is what a step tells of an attempt's prompt.
type promptProbs struct {
	a *attempt
	m *nodepb.PromptLogProbs
}

// owed is the End of one stream.
type owed struct {
	stream uint64
	end    *nodepb.End
}

// attempt is one Generate that this node owns.
type attempt struct {
	key     key
	number  uint32
	request string
	cancel  context.CancelCauseFunc
	span    trace.Span

	// Guarded by Node.mu.
	id    scheduler.RequestID // 0 until the engine has it
	ended bool
}

// Errors that end attempts; their text reaches clients.
var (
	ErrCancelled   = errors.New("decode: cancelled by the gateway")
	ErrDeadline    = errors.New("decode: the request's deadline has passed")
	ErrGatewayGone = errors.New("decode: the gateway's connection is gone")
	ErrDrained     = errors.New("decode: the node is shutting down")
	ErrStreamTwice = errors.New("decode: a second Generate on one stream")
	errBroken      = errors.New("decode: state is inconsistent")
)

// New makes a node. Its engine must have been made with OnStep set to Flush.
func New(o Options) *Node {
	o.setDefaults()
	n := &Node{
		o: o, log: o.Logger,
		gateways: make(map[*rpc.Conn]*gateway),
		attempts: make(map[key]*attempt),
		fetches:  make(map[key]*fetch),
		leases:   newLeases(),
		recent:   newRecent(),
		legs:     legs{by: make(map[string]*gobreaker.CircuitBreaker[struct{}])},
	}
	n.Base = node.New(node.Options{
		Engine: o.Engine, Log: o.Logger, Interval: o.StatsInterval, Lock: &n.mu,
		Gateways: n.flushGateways, Stats: n.addStats, Running: func() int { return len(n.attempts) }, End: n.endAll,
	})
	if o.Reader != nil {
		n.prefill = o.Dial(prefillHandler{n})
	}
	return n
}

// Frame handles one frame of a gateway.
func (n *Node) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	switch t {
	case rpc.FrameGenerate:
		n.generate(c, stream, payload)
	case rpc.FrameCancel:
		n.end(key{c, stream}, ErrCancelled, false)
	case rpc.FrameHello:
		n.know(c)
		// Before the bundle, without which a gateway is not ready: so a ready gateway
		// knows the node's adapters.
		n.send(c, rpc.FrameStats, 0, n.Stats())
	case rpc.FrameBundleRequest:
		n.send(c, rpc.FrameBundle, stream, n.o.Bundle)
	default:
		n.Base.Frame(c, t, stream, payload)
	}
}

// Closed ends what a gateway that is gone had running.
func (n *Node) Closed(c *rpc.Conn, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.gateways, c)
	for k, a := range n.attempts {
		if k.conn == c {
			n.endLocked(a, fmt.Errorf("%w: %w", ErrGatewayGone, err), false)
		}
	}
}

// generate accepts or refuses one attempt.
func (n *Node) generate(c *rpc.Conn, stream uint64, payload []byte) {
	g := new(nodepb.Generate)
	if err := proto.Unmarshal(payload, g); err != nil {
		n.refuse(c, stream, 0, nodepb.Code_CODE_INVALID, fmt.Sprintf("Generate does not parse: %v", err))
		return
	}
	if code, msg := n.validate(g); code != 0 {
		n.refuse(c, stream, g.Attempt, code, msg)
		return
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	a := &attempt{key: key{c, stream}, number: g.Attempt, request: g.RequestId, cancel: cancel, span: n.startSpan(g)}
	switch code, msg := n.enter(a); {
	case code == 0:
		go n.own(ctx, a, g)
	case code == nodepb.Code_CODE_INVALID:
		// Which of the two the gateway means by this stream cannot be told:
		// neither goes on, and one End says so.
		n.end(a.key, ErrStreamTwice, true)
		cancel(nil)
		a.span.End(time.Now())
	default:
		n.refuse(c, stream, g.Attempt, code, msg)
		cancel(nil)
		a.span.Fail(code.String(), msg)
		a.span.End(time.Now())
	}
}

// enter registers an attempt, or says why the node takes none.
func (n *Node) enter(a *attempt) (nodepb.Code, string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.attempts[a.key] != nil:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("stream %d is in use", a.key.stream)
	case n.DrainingLocked():
		return nodepb.Code_CODE_DRAINING, "the decode node is shutting down"
	case n.owners >= n.o.MaxRequests:
		n.count.Overloaded++
		return nodepb.Code_CODE_OVERLOADED, fmt.Sprintf("the decode node already owns %d requests (its bound)", n.o.MaxRequests)
	}
	n.attempts[a.key] = a
	n.owners++
	n.count.Accepted++
	n.Owners.Add(1)
	return 0, ""
}

// know files a gateway's connection; heartbeats go to it from now on.
func (n *Node) know(c *rpc.Conn) {
	c.SetSilence(rpc.StreamSilence)
	n.mu.Lock()
	n.gateways[c] = &gateway{conn: c}
	n.mu.Unlock()
}

// validate checks what the engine does not.
func (n *Node) validate(g *nodepb.Generate) (nodepb.Code, string) {
	total := len(g.Prompt) + len(g.Output)
	_, digest := kvcache.ParseRootDigest(g.PrefixDigest)
	switch {
	case len(g.Prompt) == 0:
		return nodepb.Code_CODE_INVALID, "the prompt is empty"
	case g.MaxTokens == 0:
		return nodepb.Code_CODE_INVALID, "max_tokens is 0"
	case !digest:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("prefix_digest has %d bytes, want 16 or none", len(g.PrefixDigest))
	case len(g.Output) >= int(g.MaxTokens):
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("%d tokens are out already, max_tokens is %d", len(g.Output), g.MaxTokens)
	case total >= n.o.MaxModelLen:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("%d tokens leave no room in a context of %d", total, n.o.MaxModelLen)
	case g.Model != "" && g.Model != n.o.Identity.Model:
		return nodepb.Code_CODE_NOT_FOUND, fmt.Sprintf("model %q is not served here, %q is", g.Model, n.o.Identity.Model)
	}
	return 0, ""
}

func (n *Node) refuse(c *rpc.Conn, stream uint64, attempt uint32, code nodepb.Code, msg string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.count.Refused++
	n.tellEnd(n.gateways[c], stream, &nodepb.End{Code: code, Message: msg, Attempt: attempt})
}

// send queues what may be lost: a peer that has no room for it, or is gone, is
// not the worse for missing it.
func (n *Node) send(c *rpc.Conn, t rpc.Type, stream uint64, m proto.Message) {
	if err := c.Send(t, stream, m); err != nil && !errors.Is(err, rpc.ErrClosed) {
		n.log.Warn("frame not sent", "type", t, "err", err)
	}
}

// Owned is how many attempts the node owns, and how many it may.
func (n *Node) Owned() (attempts, limit int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.owners, n.o.MaxRequests
}

// Counters returns a snapshot.
func (n *Node) Counters() Counters {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count
}

// Check verifies the node's conservation laws: each attempt it took is here or
// has ended once, has an owner, and only owners fetch.
func (n *Node) Check() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.count
	ended := c.FinishedStop + c.FinishedLength + c.FinishedAbort + c.FinishedError
	if c.Accepted != ended+uint64(len(n.attempts)) || n.owners < len(n.attempts) || n.owners < len(n.fetches) {
		return fmt.Errorf("%w: %d attempts, %d owners, %d fetches; %+v", errBroken, len(n.attempts), n.owners, len(n.fetches), c)
	}
	return nil
}
