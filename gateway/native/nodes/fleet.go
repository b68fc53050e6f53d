// Package nodes keeps one connection to each node of the fleet. It starts and cancels attempts on
// decode nodes, turns their frames into events of the request, and keeps what nodes report of their
// queues and caches.
//
// A node is dialled as soon as it is a member, and again whenever its connection is lost. A circuit
// breaker counts failures to connect and nothing else, so that dialling is the probe that closes
// it. Frames are matched to their attempt by stream, attempt number and exact position.
//
// Invariant: a request receives the tokens of its current attempts only, each position once and in
// order. Every attempt ends in exactly one last event, unless its reader cancelled it first.
//
// The package does not choose nodes, does not retry, and does not know text.
package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Bounds.
const (
	// DefaultProbeInterval is how often a node without a connection is dialled: a restarted node
	// serves again within it.
	DefaultProbeInterval = 500 * time.Millisecond
	// breakerFailures in a row open a node's breaker. One refused connection may be a restart,
	// three are not.
	breakerFailures = 3
	// DialTimeout bounds the wait for a connection that a request needs.
	DialTimeout = 2 * time.Second
	// bundleTimeout bounds a Bundle request, because tokenizers have tens of megabytes.
	bundleTimeout = 30 * time.Second
)

// errHaste reports that the caller's deadline is before DialTimeout.
var errHaste = errors.New("nodes: no time left to connect")

// Member is a node of the fleet, from gossip or configuration.
type Member struct {
	ID          string `json:"-"`              // see cluster.NewID
	Name        string `json:"id"`             // for people, see cluster.ShownNames; set by SetMembers
	Role        string `json:"role"`           // "decode", "prefill", "serve" or "gateway"; all gateways are members, this one included
	RPC         string `json:"rpc"`            // address; the node's name on the routing ring
	HTTP        string `json:"http,omitempty"` // address of its metrics
	Model       string `json:"model"`
	Build       string `json:"version,omitempty"` // version with build; empty: not known
	Fingerprint uint64 `json:"-"`
	Class       string `json:"class"` // numerics class
	Ready       bool   `json:"ready"`
	Draining    bool   `json:"draining"`
}

// Options of a Fleet.
type Options struct {
	RPC           rpc.Options
	ProbeInterval time.Duration   // 0: DefaultProbeInterval
	StallTimeout  time.Duration   // of a node with work that makes no step; 0: none
	NodeSilence   time.Duration   // of heartbeats; 0: the connection's own bound applies
	Meters        *metrics.Set    // of a gateway
	Blocks        *Blocks         // cached by nodes; nil: none are known
	Left          func(id string) // called for a member that has left; may not call the Fleet; nil: not called
	Log           *slog.Logger    // nil: discarded
}

// Fleet is the gateway's side of all connections to nodes.
type Fleet struct {
	o    Options
	pool *rpc.Pool
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup // keepers and watchSilence

	now     atomic.Pointer[Snapshot]
	changes changes // of now

	mu      sync.Mutex       // guards the three below
	decode  map[string]*Node // by rpc address
	prefill map[string]*Node
	shared  map[string]bool // names that warnOfName has warned of

	linksMu sync.RWMutex
	links   map[*rpc.Conn]*link
}

// Node is a member of the fleet.
type Node struct {
	Name string // rpc address
	// Constrained is how many of InFlight have a grammar.
	Constrained atomic.Int64

	inputs
	f       *Fleet
	breaker *breaker.Breaker
	pulse   pulse              // owned by keep, as clock
	clock   time.Time          // time of pulse, without this gateway's own pauses
	stop    context.CancelFunc // ends keep
	left    atomic.Bool        // is no longer a member

	changes *changes
	place   int32  // in changes.s, see each; or nowhere. Guarded by changes.mu, as logged
	logged  uint64 // number of entries of the log when the node was last logged
}

// Snapshot is the membership of the fleet at one moment. It is not changed once made.
type Snapshot struct {
	Table   *route.Table
	Decode  []*Node // by the table's index
	Prefill []*Node
	Shared  bool // by other gateways
	blocks  *Blocks
	changes *changes

	of    *Snapshot        // the snapshot that this one is the whole of; nil: none
	whole func() *Snapshot // see ForVectors
}

// New returns a fleet without members.
func New(o Options) *Fleet {
	o.ProbeInterval = cmp.Or(o.ProbeInterval, DefaultProbeInterval)
	o.RPC.BackoffMax = cmp.Or(o.RPC.BackoffMax, o.ProbeInterval)
	o.Blocks, o.Log = cmp.Or(o.Blocks, NewBlocks()), cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	f := &Fleet{o: o, links: map[*rpc.Conn]*link{}, decode: map[string]*Node{}, prefill: map[string]*Node{}, shared: map[string]bool{}}
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.pool = rpc.NewPool(o.RPC, f)
	f.publish(&Snapshot{Table: route.New(nil, nil)})
	if o.NodeSilence > 0 {
		f.wg.Go(f.watchSilence)
	}
	return f
}

// Close closes all connections and waits for all goroutines of the fleet.
func (f *Fleet) Close() {
	f.stop()
	f.pool.Close()
	f.wg.Wait()
}

// publish makes s the present membership.
func (f *Fleet) publish(s *Snapshot) {
	s.changes, s.whole = &f.changes, sync.OnceValue(s.makeWhole)
	f.changes.begin(s)
	f.now.Store(s)
}

// Now returns the present membership.
func (f *Fleet) Now() *Snapshot { return f.now.Load() }

// makeWhole returns the nodes of s as decode nodes, all of them at their places.
func (s *Snapshot) makeWhole() *Snapshot {
	w := &Snapshot{Decode: slices.Concat(s.Decode, s.Prefill), Shared: s.Shared, blocks: s.blocks, changes: s.changes, of: s}
	w.Table = route.New(ringNodes(w.Decode), nil)
	return w
}

// ForVectors returns the snapshot for requests for vectors of the version. Its decode nodes include
// the prefill nodes, if one of these is connected, serves the model and computes such vectors. A
// request for a vector then takes one node, which computes all of its prompt.
func (s *Snapshot) ForVectors(fingerprint uint64, version uint32) *Snapshot {
	if !slices.ContainsFunc(s.Prefill, func(n *Node) bool { return n.Pools(fingerprint, version) }) {
		return s
	}
	return s.whole()
}

// Whole reports whether the decode nodes include the prefill nodes.
func (s *Snapshot) Whole() bool { return s.of != nil }

// SetMembers replaces the membership. Nodes that stay keep their connections and counts. Attempts
// on nodes that leave run until their connection ends.
func (f *Fleet) SetMembers(members []Member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return
	}
	decode, prefill, gateways := map[string]*Node{}, map[string]*Node{}, 0
	names := shownNames(members)
	for _, m := range members {
		m.Name = names[m.ID]
		switch m.Role {
		case "decode", "serve":
			decode[m.RPC] = f.node(f.decode[m.RPC], m)
		case "prefill":
			prefill[m.RPC] = f.node(f.prefill[m.RPC], m)
		case "gateway":
			gateways++
		}
	}
	f.leave(f.decode, decode)
	f.leave(f.prefill, prefill)
	f.decode, f.prefill = decode, prefill
	s := &Snapshot{Shared: gateways > 1, blocks: f.o.Blocks}
	s.Decode, s.Prefill = byName(decode), byName(prefill)
	s.Table = route.New(ringNodes(s.Decode), ringNodes(s.Prefill))
	f.publish(s)
}

// shownNames returns the names of the members that are nodes, by ID.
func shownNames(members []Member) map[string]string {
	ids := make([]string, 0, len(members))
	for _, m := range members {
		if m.Role != "gateway" {
			ids = append(ids, m.ID)
		}
	}
	return cluster.ShownNames(ids)
}

// leave stops the nodes that are not among the new ones.
func (f *Fleet) leave(old, now map[string]*Node) {
	for name, n := range old {
		if now[name] == nil {
			n.left.Store(true)
			n.stop()
			f.forget(n.Member().ID)
		}
	}
}

// forget drops the cache state of a process.
func (f *Fleet) forget(id string) {
	if f.o.Left != nil {
		f.o.Left(id)
	}
	f.o.Blocks.Leave(id)
}

// node updates a node or makes it.
func (f *Fleet) node(n *Node, m Member) *Node {
	if n != nil {
		if old := n.setMember(&m).ID; old != m.ID { // another process at its address
			f.forget(old)
		}
		return n
	}
	n = &Node{Name: m.RPC, f: f, clock: time.Now(), changes: &f.changes, place: nowhere}
	n.setMember(&m)
	changes := &breakerLog{log: f.o.Log, node: m.RPC}
	n.breaker = breaker.New(breaker.Options{
		Failures: breakerFailures, Pause: f.o.ProbeInterval,
		// An error that the pool repeats, or the caller's short deadline, is no evidence.
		Ignore: func(err error) bool {
			return errors.Is(err, rpc.ErrBackoff) || errors.Is(err, context.Canceled) || errors.Is(err, errHaste)
		},
		Changed: func(from, to string) { changes.changed(time.Now(), from, to) },
	})
	var ctx context.Context
	ctx, n.stop = context.WithCancel(f.ctx)
	f.wg.Go(func() { n.keep(ctx) })
	return n
}

func byName(nodes map[string]*Node) []*Node {
	return slices.SortedFunc(maps.Values(nodes), func(a, b *Node) int { return cmp.Compare(a.Name, b.Name) })
}

func ringNodes(nodes []*Node) []route.Node {
	out := make([]route.Node, len(nodes))
	for i, n := range nodes {
		m := n.Member()
		out[i] = route.Node{Name: n.Name, Class: m.Class, Shown: m.Name}
	}
	return out
}

// keep keeps the node connected until ctx ends.
func (n *Node) keep(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
		if l, err := n.connect(ctx); err == nil {
			n.f.warnOfName(n)
			if !n.watch(ctx, l) {
				return
			}
			if n.View().Draining && l.idle() {
				n.f.o.Log.Info("drained node has closed its connection", "node", n.Name)
			} else {
				n.f.o.Log.Warn("node's connection lost", "node", n.Name, "error", l.conn.Err())
			}
			n.dropLink(l)
			pause.Reset(0) // the pool's back-off paces what follows
			continue
		}
		pause.Reset(n.f.o.ProbeInterval)
	}
}

// maxSharedNames bounds the names that are warned of.
const maxSharedNames = 1024

// warnOfName warns, once for each name, that two connected nodes have the name of n. A node that
// has started again at another address is no second one, because its former connection is lost.
func (f *Fleet) warnOfName(n *Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	own := n.Member()
	name := cluster.NameOf(own.ID)
	if f.shared[name] || len(f.shared) == maxSharedNames {
		return
	}
	for _, nodes := range []map[string]*Node{f.decode, f.prefill} {
		for _, o := range nodes {
			other := o.Member()
			if o == n || cluster.NameOf(other.ID) != name || !o.connected() {
				continue
			}
			f.shared[name] = true
			f.o.Log.Warn("two nodes have the same name: give each a --node-name of its own", "name", name,
				"shown", []string{own.Name, other.Name}, "addresses", []string{own.RPC, other.RPC})
			return
		}
	}
}

// connect returns the node's open connection, dialling within DialTimeout.
func (n *Node) connect(ctx context.Context) (*link, error) {
	if l := n.link.Load(); l != nil {
		select {
		case <-l.conn.Done():
			n.dropLink(l)
		default:
			return l, nil
		}
	}
	var l *link
	err := n.breaker.Do(func() error {
		patience, cancel := context.WithTimeout(ctx, DialTimeout)
		defer cancel()
		c, err := n.f.pool.Get(patience, n.Name)
		switch {
		case err != nil && ctx.Err() != nil:
			return fmt.Errorf("%w: %w", errHaste, err)
		case err != nil:
			return err
		}
		if l = n.f.linkOf(c); l == nil {
			return fmt.Errorf("%w: %s", ErrLost, n.Name)
		}
		l.attach(n)
		return nil
	})
	return l, err
}

// linkOf returns or makes a connection's link; nil: the connection is over. Done is closed before
// Closed is called, so that no link is made after its end.
func (f *Fleet) linkOf(c *rpc.Conn) *link {
	f.linksMu.RLock()
	l := f.links[c]
	f.linksMu.RUnlock()
	if l != nil {
		return l
	}
	f.linksMu.Lock()
	defer f.linksMu.Unlock()
	if l := f.links[c]; l != nil {
		return l
	}
	select {
	case <-c.Done():
		return nil
	default:
	}
	l = newLink(c, f.o.Meters.Counter(metrics.GatewayStaleTokens))
	l.model, l.grammar, l.vectors = c.Peer().GetFingerprint(), c.Peer().GetGrammar(), c.Peer().GetVectors()
	if role := c.Peer().GetRole(); f.o.NodeSilence > 0 && (role == "decode" || role == "serve") {
		c.SetSilence(max(rpc.StreamSilence, 2*f.o.NodeSilence))
	}
	f.links[c] = l
	return l
}

// Frame implements rpc.Handler.
func (f *Fleet) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	l := f.linkOf(c)
	if l == nil {
		return
	}
	if err := l.frame(t, stream, payload); err != nil {
		f.o.Log.Warn("bad frame from a node", "node", c.RemoteAddr(), "type", t.String(), "error", err)
		c.Close(err)
	}
}

// Closed implements rpc.Handler.
func (f *Fleet) Closed(c *rpc.Conn, err error) {
	f.linksMu.Lock()
	l := f.links[c]
	delete(f.links, c)
	f.linksMu.Unlock()
	if l != nil {
		l.lost(err)
	}
}

// Member returns the node's member entry.
func (n *Node) Member() Member { return *n.member.Load() }

// View is a member as this gateway sees it, for /debug/nodes. Fields of heartbeats are zero before
// the first one on the present connection.
type View struct {
	Member
	Connected   bool    `json:"connected"`
	Running     int     `json:"running"`
	Waiting     int     `json:"waiting"`
	KVUsage     float64 `json:"kv_usage"`     // share of blocks in use
	CacheBlocks int     `json:"cache_blocks"` // according to block events

	QueuedTokens     int     `json:"queued_tokens,omitempty"` // of prompts
	PromptTokensPerS float64 `json:"prompt_tokens_per_s,omitempty"`
	OutputTokensPerS float64 `json:"output_tokens_per_s,omitempty"`
}

// View returns the node's state.
func (n *Node) View() View {
	m, h := n.Member(), n.link.Load().last()
	m.Draining = m.Draining || h.draining
	return View{m, n.connected(), h.Running, h.Waiting + h.Held, h.kvUsage, n.f.o.Blocks.Count(m.ID), h.Queued, h.prompts, h.outputs}
}

// connected reports whether the node's connection is open.
func (n *Node) connected() bool {
	l := n.link.Load()
	return l != nil && l.conn.Open()
}

// Generate starts an attempt. Its events carry choice and are sent to in. An error means that the
// node cannot have seen the attempt.
func (n *Node) Generate(ctx context.Context, req *nodepb.Generate, in *Inbox, choice int32) (*Stream, error) {
	l, err := n.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrNode, n.Name, err)
	}
	return l.open(req, in, choice)
}

// Drain asks the node to take no more work, and to end what still runs after the timeout, so that
// gateways resume it elsewhere. With cancel the node takes work again. A timeout of 0 is none. This
// gateway sends the node nothing new from now on; other gateways learn of it from the node.
func (n *Node) Drain(timeout time.Duration, cancel bool) error {
	l := n.link.Load()
	if l == nil || !n.connected() {
		return fmt.Errorf("%w: %s: not connected", ErrNode, n.Name)
	}
	if err := l.conn.Send(rpc.FrameDrain, 0, &nodepb.Drain{TimeoutMs: uint64(timeout.Milliseconds()), Cancel: cancel}); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrNode, n.Name, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.heart.Load(); old != nil && !cancel { // the node's own heartbeat follows
		h := *old
		h.draining = true
		l.setHeart(&h)
	}
	return nil
}

// Bundle asks the node for its model's tokenizer, template and defaults.
func (n *Node) Bundle(ctx context.Context) (*nodepb.Bundle, error) {
	ctx, cancel := context.WithTimeout(ctx, bundleTimeout)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("nodes: bundle of %s: %w", n.Name, err)
	}
	return ask[*nodepb.Bundle](ctx, n, rpc.FrameBundleRequest, &nodepb.BundleRequest{}, "its bundle")
}

// ask sends a request to a node and returns the reply on its stream. what names the request in
// errors.
func ask[R proto.Message](ctx context.Context, n *Node, t rpc.Type, m proto.Message, what string) (none R, err error) {
	l, err := n.connect(ctx)
	if err != nil {
		return none, fmt.Errorf("%w: %s: %w", ErrNode, n.Name, err)
	}
	id, ch := l.conn.NewStream(), make(chan proto.Message, 1)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return none, fmt.Errorf("%w: %s", ErrLost, n.Name)
	}
	l.replies[id] = ch
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.replies, id)
		l.mu.Unlock()
	}()
	if err := l.conn.Send(t, id, m); err != nil {
		return none, fmt.Errorf("%w: asking %s for %s: %w", ErrLost, n.Name, what, err)
	}
	select {
	case reply, open := <-ch:
		r, ok := reply.(R)
		switch {
		case !open:
			err = fmt.Errorf("%w: %s", ErrLost, n.Name)
		case !ok:
			err = fmt.Errorf("%w: %s refused to give %s", ErrNode, n.Name, what)
		}
		return r, err
	case <-ctx.Done():
		return none, fmt.Errorf("nodes: asking %s for %s: %w", n.Name, what, ctx.Err())
	}
}

// Check verifies the fleet's counts: no node's count of attempts is below zero. If idle, no request
// is in flight: all counts are zero and no connection has a stream.
func (f *Fleet) Check(idle bool) error {
	var errs []error
	s := f.Now()
	for _, nodes := range [][]*Node{s.Decode, s.Prefill} {
		for _, n := range nodes {
			if held := n.InFlight(); held < 0 || idle && held > 0 {
				errs = append(errs, fmt.Errorf("nodes: %d attempts on the books of %s (idle: %t)", held, n.Name, idle))
			}
		}
	}
	f.linksMu.RLock()
	defer f.linksMu.RUnlock()
	for c, l := range f.links {
		if streams := l.count(); idle && streams > 0 {
			errs = append(errs, fmt.Errorf("nodes: %d streams on the connection to %s while no request is being answered", streams, c.RemoteAddr()))
		}
	}
	return errors.Join(errs...)
}

// probeLogInterval bounds how often the probes of an unreachable node are logged. Each probe
// changes its breaker's state twice.
const probeLogInterval = 30 * time.Second

// breakerLog logs the state changes of one node's breaker: those from and to closed at once, and
// those of probes at most once in probeLogInterval, with their number.
type breakerLog struct {
	log  *slog.Logger
	node string

	mu      sync.Mutex
	logged  time.Time
	omitted int // changes since then
}

func (b *breakerLog) changed(now time.Time, from, to string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if from != breaker.Closed && to != breaker.Closed && now.Sub(b.logged) < probeLogInterval {
		b.omitted++
		return
	}
	b.log.Info("node's breaker", "node", b.node, "from", from, "to", to, "omitted", b.omitted)
	b.logged, b.omitted = now, 0
}
