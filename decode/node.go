// Package decode owns requests from the Generate that starts an attempt to the last token. It pins
// the cached part of the prompt, has a prefill node push the rest into blocks that it reserved,
// computes the last prompt token itself, and sends the sampled tokens in one frame per step and
// gateway.
//
// Invariant: an accepted attempt ends with a finish reason, or with an End that has the cause. All
// that it held (blocks, leases, the work of a prefill node) is released. KV that has not arrived
// completely, with matching checksums, is never decoded.
//
// The package does not choose prefill nodes (the gateway ranks them), does not know text, and never
// retries on the same prefill node.
package decode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/node"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// Identity is what must agree between this node and those it works with.
type Identity = node.Identity

// Options configure a node. Zero durations and counts are the defaults.
type Options struct {
	Engine   *engine.Engine
	Identity Identity
	Bundle   *nodepb.Bundle
	Reader   Reader // nil: the node never asks for remote prefill
	// Dial makes the connections to prefill nodes. The handler gets their frames. Needed with
	// Reader.
	Dial   func(rpc.Handler) Dialer
	Logger *slog.Logger
	Tracer *trace.Tracer // nil: no spans

	MaxModelLen int
	BlockTokens int
	// MaxRequests bounds the attempts that a node owns at once: running, waiting and held. Default
	// 1024.
	MaxRequests int
	// MaxRunning is how many requests the engine runs at once. Gateways queue the others; 0:
	// heartbeats do not have it.
	MaxRunning int
	// RequestTimeout ends an attempt without a deadline of its own. Default 30 min.
	RequestTimeout time.Duration
	// PrefillTimeout is how long a prefill node may send nothing: no answer, queue position or
	// grant request. Then the next one is tried. Default 5 s.
	PrefillTimeout time.Duration
	// GrantTimeout is how long a prefill node that is ready to run waits for room in this node's
	// pool before it is refused. Default 2 s.
	GrantTimeout time.Duration
	// LeaseDuration is how long a granted push may be idle. Default 10 s.
	LeaseDuration time.Duration
}

func (o *Options) setDefaults() {
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 30*time.Minute)
	o.PrefillTimeout = cmp.Or(o.PrefillTimeout, 5*time.Second)
	o.GrantTimeout = cmp.Or(o.GrantTimeout, 2*time.Second)
	o.LeaseDuration = cmp.Or(o.LeaseDuration, 10*time.Second)
	o.MaxRequests = cmp.Or(o.MaxRequests, 1024)
	o.BlockTokens = cmp.Or(o.BlockTokens, kvcache.DefaultBlockTokens)
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
}

// Dialer returns the shared connection to a prefill node. *rpc.Pool is one.
type Dialer interface {
	Get(ctx context.Context, addr string) (*rpc.Conn, error)
}

// Node is a decode node's requests. It implements rpc.Handler for connections of gateways.
// prefillHandler serves those that the node dials.
type Node struct {
	*node.Base
	o        Options
	log      *slog.Logger
	prefill  Dialer
	breakers prefillBreakers

	mu       sync.Mutex
	gateways map[*rpc.Conn]*gateway
	attempts map[key]*attempt
	fetches  map[key]*fetch                // by the stream on the prefill node's connection
	leases   map[kvtransfer.LeaseID]*lease // whose end kvtransfer has not reported yet
	recent   recent
	dirty    []*gateway // gateways with tokens of the running step
	owners   int        // goroutines that own an attempt, including one that has just ended
	count    Counters
}

// Counters only grow. Metrics read them.
type Counters struct {
	Accepted, Refused                                          uint64
	Overloaded                                                 uint64 // of the refused, because MaxRequests was reached
	RemotePrefills                                             uint64 // prompts whose KV arrived from another node
	LocalPrefills                                              uint64 // prompts computed here, by choice or without a usable prefill node
	PrefillFailures                                            uint64 // requests to prefill nodes that did not deliver
	DroppedStreams                                             uint64 // streams dropped because of a full outbox
	FinishedStop, FinishedLength, FinishedAbort, FinishedError uint64
}

// key identifies a stream on a connection.
type key struct {
	conn   *rpc.Conn
	stream uint64
}

// gateway is what is to be sent on one connection.
type gateway struct {
	conn   *rpc.Conn
	tokens []rpc.Token // of the running step
	// logProbs belong to those tokens, if requested.
	logProbs    []*nodepb.TokenLogProbs
	prompts     []promptProbs // of the running step
	vectors     []vector      // likewise
	dirty       bool          // is in Node.dirty
	pendingEnds []pendingEnd  // Ends that did not fit into the full outbox, oldest first
}

// promptProbs are log-probabilities of an attempt's prompt.
type promptProbs struct {
	a *attempt
	m *nodepb.PromptLogProbs
}

// vector is what ends an attempt with pooling.
type vector struct {
	a *attempt
	m *nodepb.Vector
}

// pendingEnd is the End of one stream.
type pendingEnd struct {
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

// Errors that end attempts. Clients get their text.
var (
	ErrCancelled   = errors.New("decode: cancelled by the gateway")
	ErrDeadline    = errors.New("decode: the request's deadline has passed")
	ErrGatewayGone = errors.New("decode: the gateway's connection is gone")
	ErrDrained     = errors.New("decode: the node is shutting down")
	ErrStreamTwice = errors.New("decode: a second Generate on one stream")
	errBroken      = errors.New("decode: state is inconsistent")
)

// New returns a node. Its engine must have been made with OnStep set to Flush.
func New(o Options) *Node {
	o.setDefaults()
	n := &Node{
		o: o, log: o.Logger,
		gateways: make(map[*rpc.Conn]*gateway),
		attempts: make(map[key]*attempt),
		fetches:  make(map[key]*fetch),
		leases:   make(map[kvtransfer.LeaseID]*lease),
		breakers: prefillBreakers{by: make(map[string]*breaker.Breaker)},
	}
	n.Base = node.New(node.Options{
		Engine: o.Engine, Log: o.Logger, Lock: &n.mu,
		Stats: n.addStats, Sending: n.flushAllEnds, Running: func() int { return len(n.attempts) }, End: n.endAll,
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
		n.register(c)
		// Before the bundle, without which a gateway is not ready, so that a ready gateway knows
		// the node's adapters.
		n.send(c, rpc.FrameStats, 0, n.Stats())
	case rpc.FrameBundleRequest:
		n.send(c, rpc.FrameBundle, stream, n.o.Bundle)
	default:
		n.Base.Frame(c, t, stream, payload)
	}
}

// Closed ends the attempts of a gateway whose connection is closed.
func (n *Node) Closed(c *rpc.Conn, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.gateways, c)
	n.Forget(c)
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
		go n.run(ctx, a, g)
	case code == nodepb.Code_CODE_INVALID:
		// Later frames of the stream could mean either attempt, so one End ends both.
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

// enter registers an attempt, or returns why the node takes none.
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

// register sends heartbeats and tokens to a gateway from now on.
func (n *Node) register(c *rpc.Conn) {
	c.SetSilence(rpc.StreamSilence)
	n.mu.Lock()
	n.gateways[c] = &gateway{conn: c}
	n.mu.Unlock()
	n.Register(c)
}

// validate checks what the engine does not.
func (n *Node) validate(g *nodepb.Generate) (nodepb.Code, string) {
	total, limit, longest := len(g.Prompt)+len(g.Output), maxTokens(g), n.o.MaxModelLen-1
	if g.Pooling != nil {
		longest++
	}
	if code, msg := node.CheckPrompt(g, n.o.Engine.VectorSize(), n.o.Identity.Model); code != 0 {
		return code, msg
	}
	switch {
	case g.Pooling == nil && n.o.Bundle.GetVectors().GetOnly():
		return nodepb.Code_CODE_INVALID, "the model has no output projection: it gives vectors and no tokens"
	case limit == 0, g.Grammar != nil && g.MaxTokens != 0:
		return nodepb.Code_CODE_INVALID, "max_tokens is 0"
	case g.Grammar != nil && (g.Grammar.Version != engine.GrammarVersion || !n.o.Engine.Constrains()):
		return nodepb.Code_CODE_MISMATCH, fmt.Sprintf("the node has no grammars of version %d", g.Grammar.Version)
	case len(g.Output) >= limit:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("%d tokens are out already, max_tokens is %d", len(g.Output), limit)
	case total > longest:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("%d tokens leave no room in a context of %d", total, n.o.MaxModelLen)
	}
	return 0, ""
}

func (n *Node) refuse(c *rpc.Conn, stream uint64, attempt uint32, code nodepb.Code, msg string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.count.Refused++
	n.sendEnd(n.gateways[c], stream, &nodepb.End{Code: code, Message: msg, Attempt: attempt})
}

// send queues a message that may be lost: a peer without room for it, or one that is gone, does not
// need it.
func (n *Node) send(c *rpc.Conn, t rpc.Type, stream uint64, m proto.Message) {
	if err := c.Send(t, stream, m); err != nil && !errors.Is(err, rpc.ErrClosed) {
		n.log.Warn("frame not sent", "type", t, "err", err)
	}
}

// Owned returns how many attempts the node owns, and the bound.
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

// Check verifies the node's counts: each attempt that it accepted is present or has ended once, has
// an owner, and only owners fetch.
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

// endAll ends every attempt. The gateways resume them on other nodes.
func (n *Node) endAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.attempts {
		n.endLocked(a, ErrDrained, true)
	}
}

// Running returns how many attempts the node owns.
func (n *Node) Running() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.attempts)
}

// addStats adds to a heartbeat what gateways route to decode nodes by.
func (n *Node) addStats(m *nodepb.Stats, s scheduler.Stats) {
	m.Held, m.MaxRunning = uint32(s.Held), uint32(n.o.MaxRunning)
	m.BlocksCached, m.BlocksReserved = proto.Uint32(uint32(s.Blocks.Cached)), proto.Uint32(uint32(s.Wanted))
}

// flushAllEnds sends the pending Ends of all gateways. The caller holds n.mu.
func (n *Node) flushAllEnds() {
	for _, gw := range n.gateways {
		n.flushEnds(gw)
	}
}
