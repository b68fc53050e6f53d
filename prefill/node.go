// Package prefill computes prompts' KV for decode nodes and pushes it into the blocks that they
// grant, layer by layer while the next layer computes. For gateways it computes prompts' vectors.
//
// Jobs wait in one line (package line) in front of the engine. The node asks a decode node for a
// grant only when the engine is about to have room for the job, so that no blocks are reserved for
// a prompt that still waits. The line also decides which of the granted jobs get a step's tokens
// first. A job for a vector waits in the same line, and needs no grant.
//
// Invariant: a job holds source blocks from its first layer until its push has ended. Each Prefill
// is answered by exactly one PrefillDone or End, and each Generate by one Vector or End, unless the
// peer cancelled it or disconnected.
//
// The package gives no tokens, knows no text, and does not retry: the peer asks the next node.
package prefill

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/node"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill/line"
)

// Identity is what must agree with the decode nodes that ask.
type Identity = node.Identity

// Options configure a node. Zero durations and counts are the defaults.
type Options struct {
	Engine   *engine.Engine
	Identity Identity
	Writer   *kvtransfer.Writer
	Logger   *slog.Logger
	Tracer   *trace.Tracer // nil: no spans

	// RunAheadTokens bounds the tokens of jobs that have asked for their grant and are not computed
	// yet. It does not count those of the job that lacks the most, of jobs that wait for room on
	// their decode node, and those found in the prefix cache. About two steps' worth keeps the
	// engine busy while a grant is on its way. More would reserve blocks of decode nodes without
	// need. Default 4096.
	RunAheadTokens int
	// MaxQueued bounds the jobs that wait. More are refused. Default 1024.
	MaxQueued int
	// GrantTimeout is how long a decode node may take to grant. Default 10 s.
	GrantTimeout time.Duration
	// QueuedInterval is how often the positions of waiting jobs are sent to their decode nodes.
	// Default 1 s.
	QueuedInterval time.Duration
	// Transferred, if set, is called for each push that was confirmed. It must not block.
	Transferred func(Transfer)
	// JobTimeout ends a job, including the time in which it waits. The deadline of a Generate may
	// end it earlier. Default 30 min.
	JobTimeout time.Duration
	// MaxRunning is how many jobs the engine runs at once. 0: heartbeats do not have it.
	MaxRunning int
}

func (o *Options) setDefaults() {
	o.RunAheadTokens = cmp.Or(o.RunAheadTokens, 4096)
	o.MaxQueued = cmp.Or(o.MaxQueued, 1024)
	o.GrantTimeout = cmp.Or(o.GrantTimeout, 10*time.Second)
	o.QueuedInterval = cmp.Or(o.QueuedInterval, time.Second)
	o.JobTimeout = cmp.Or(o.JobTimeout, 30*time.Minute)
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
}

// Errors that end jobs. Decode nodes log their text.
var (
	errCancelled = errors.New("prefill: cancelled by the peer")
	errGone      = errors.New("prefill: the peer's connection is gone")
	errRefused   = errors.New("prefill: decode refused the grant")
	errNoGrant   = errors.New("prefill: no grant in time")
	errDrained   = errors.New("prefill: the node is shutting down")
	errTimeout   = errors.New("prefill: the job took too long")
	errBroken    = errors.New("prefill: state is inconsistent")
)

// Node is a prefill node's jobs. It implements rpc.Handler.
type Node struct {
	*node.Base
	o   Options
	log *slog.Logger

	mu       sync.Mutex
	jobs     map[key]*job
	byTicket map[line.ID]*job
	line     *line.Line // of jobs that are not computed yet
	tickets  line.ID    // given so far
	start    time.Time
	count    Counters
}

// Counters only grow. Metrics read them.
type Counters struct {
	Accepted, Refused, Done, Cancelled, Failed uint64
	Overloaded                                 uint64 // of the refused, because MaxQueued was reached
}

// key identifies a stream on a connection.
type key struct {
	conn   *rpc.Conn
	stream uint64
}

// New returns a node, which orders the engine's jobs from now on.
func New(o Options) *Node {
	o.setDefaults()
	n := &Node{
		o: o, log: o.Logger, jobs: make(map[key]*job), byTicket: make(map[line.ID]*job),
		line: line.New(o.RunAheadTokens), start: time.Now(),
	}
	n.Base = node.New(node.Options{
		Engine: o.Engine, Log: o.Logger, Lock: &n.mu,
		Stats: n.addStats, Running: func() int { return len(n.jobs) },
		End: func() { n.cancelAll(func(key) bool { return true }, errDrained) },
	})
	o.Engine.OrderJobs(n.order)
	return n
}

// Frame handles one frame of a decode node or gateway.
func (n *Node) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	k := key{c, stream}
	switch t {
	case rpc.FrameHello:
		if c.Peer().GetRole() == "gateway" {
			n.Register(c)
			n.Heartbeat()
		}
	case rpc.FramePrefill:
		n.accept(k, payload)
	case rpc.FrameGenerate:
		n.generate(k, payload)
	case rpc.FrameGrant:
		n.granted(k, payload)
	case rpc.FrameQueued: // the grant waits for room; decode nodes of the previous version do not send this
		n.stepAside(k)
	case rpc.FrameCancel:
		n.cancel(k, errCancelled)
	default:
		n.Base.Frame(c, t, stream, payload)
	}
}

// Closed cancels the jobs of a connection that is closed.
func (n *Node) Closed(c *rpc.Conn, err error) {
	n.mu.Lock()
	n.Forget(c)
	n.mu.Unlock()
	n.cancelAll(func(k key) bool { return k.conn == c }, fmt.Errorf("%w: %w", errGone, err))
}

// granted passes a decode node's Grant to its job. A second one is ignored.
func (n *Node) granted(k key, payload []byte) {
	g := new(nodepb.Grant)
	if err := proto.Unmarshal(payload, g); err != nil {
		n.cancel(k, fmt.Errorf("%w: Grant does not parse: %w", errRefused, err))
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if j := n.jobs[k]; j != nil {
		select {
		case j.grant <- g:
		default:
		}
	}
}

// accept queues a Prefill or refuses it.
func (n *Node) accept(k key, payload []byte) {
	p := new(nodepb.Prefill)
	if err := proto.Unmarshal(payload, p); err != nil {
		n.refuse(k, 0, nodepb.Code_CODE_INVALID, fmt.Sprintf("Prefill does not parse: %v", err))
		return
	}
	if code, msg := n.validate(p); code != 0 {
		n.refuse(k, 0, code, msg)
		return
	}
	n.queue(&job{key: k, asked: p, grant: make(chan *nodepb.Grant, 1)}, n.o.JobTimeout)
}

// queue queues a job, or refuses it and returns false.
func (n *Node) queue(j *job, timeout time.Duration) bool {
	n.mu.Lock()
	code, msg := n.room(j.key)
	if code == 0 {
		n.count.Accepted++
		j.span = n.startSpan(j.asked)
		j.timer = time.AfterFunc(timeout, func() { n.cancel(j.key, errTimeout) })
		n.enqueue(j)
		n.admit()
	}
	n.mu.Unlock()
	if code != 0 {
		n.refuse(j.key, j.vector.GetAttempt(), code, msg)
	}
	return code == 0
}

// room returns why the node takes no job; code 0: it does. The caller holds n.mu.
func (n *Node) room(k key) (nodepb.Code, string) {
	switch {
	case n.DrainingLocked():
		return nodepb.Code_CODE_DRAINING, errDrained.Error()
	case n.line.Waiting()+n.line.Aside() >= n.o.MaxQueued:
		n.count.Overloaded++
		return nodepb.Code_CODE_OVERLOADED, fmt.Sprintf("%d prefills wait already (the bound)", n.o.MaxQueued)
	case n.jobs[k] != nil:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("stream %d is in use", k.stream)
	}
	return 0, ""
}

// validate refuses what would write wrong bytes into a decode node's blocks.
func (n *Node) validate(p *nodepb.Prefill) (nodepb.Code, string) {
	_, digest := kvcache.ParseRootDigest(p.PrefixDigest)
	switch id := n.o.Identity; {
	case len(p.Tokens) == 0:
		return nodepb.Code_CODE_INVALID, "no tokens to compute"
	case !digest:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("prefix_digest has %d bytes, want 16 or none", len(p.PrefixDigest))
	case int(p.Have) >= len(p.Tokens) || int(p.Have)%n.o.Engine.Align() != 0:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("decode has %d of %d tokens: want fewer, in whole blocks of %d", p.Have, len(p.Tokens), n.o.Engine.Align())
	case p.Fingerprint != id.Fingerprint:
		return nodepb.Code_CODE_MISMATCH, fmt.Sprintf("model fingerprint %016x asked, %016x here", p.Fingerprint, id.Fingerprint)
	case p.NumericsClass != id.Class:
		return nodepb.Code_CODE_MISMATCH, fmt.Sprintf("numerics class %q asked, %q here: both need the same weights, kernels and --kv-cache-dtype", p.NumericsClass, id.Class)
	case p.Layout != id.Layout:
		return nodepb.Code_CODE_MISMATCH, fmt.Sprintf("KV layout %016x asked (%s), %016x here (%s): both need the same --block-size and --kv-cache-dtype", p.Layout, p.Kv, id.Layout, id.KV)
	}
	return n.checkPrompt(p)
}

// checkPrompt refuses before it queues what the engine would refuse.
func (n *Node) checkPrompt(p *nodepb.Prefill) (nodepb.Code, string) {
	if a := p.GetAdapter(); a != nil {
		if err := n.o.Engine.CheckAdapter(a.Name, a.Digest); err != nil {
			return nodepb.Code_CODE_MISMATCH, err.Error()
		}
	}
	if err := n.o.Engine.CheckJob(p.Tokens); err != nil {
		return codeOf(err), err.Error()
	}
	return 0, ""
}

func (n *Node) refuse(k key, attempt uint32, code nodepb.Code, msg string) {
	n.mu.Lock()
	n.count.Refused++
	n.mu.Unlock()
	n.send(k, rpc.FrameEnd, &nodepb.End{Code: code, Message: msg, Attempt: attempt})
}

// send queues a message. A peer that cannot take it is disconnected, which cancels its jobs.
func (n *Node) send(k key, t rpc.Type, m proto.Message) {
	if err := k.conn.Send(t, k.stream, m); err != nil && !errors.Is(err, rpc.ErrClosed) {
		k.conn.Close(err)
	}
}

// Counters returns a snapshot.
func (n *Node) Counters() Counters {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count
}

// Limit returns how many jobs may wait.
func (n *Node) Limit() int { return n.o.MaxQueued }

// Queued returns how many jobs wait for their turn, how many for the grant that they asked for, and
// the number of all jobs.
func (n *Node) Queued() (waiting, asking, all int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.line.Waiting(), n.line.Asking(), len(n.jobs)
}

// QueuedTokens returns how many prompt tokens the jobs have that have not asked for their grants.
func (n *Node) QueuedTokens() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.line.WaitingTokens()
}

// addStats adds the jobs in the line to a heartbeat. The engine counts only admitted ones.
func (n *Node) addStats(m *nodepb.Stats, _ scheduler.Stats) {
	m.MaxRunning = uint32(n.o.MaxRunning)
	m.Waiting += uint32(n.line.Waiting())
	m.QueuedTokens += uint32(n.line.WaitingTokens())
	for _, tokens := range n.line.Lengths() {
		m.QueuedByLength = append(m.QueuedByLength, uint32(tokens))
	}
}
