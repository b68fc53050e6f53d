package nodes

import (
	"cmp"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/lengths"
)

// changes is the log of a snapshot's nodes that have changed. A view reads the nodes that were
// logged since its last use, instead of all.
//
// A change stores its value, and then logs the node. A view takes from the log, and then reads the
// nodes. So a view includes every change that ended before the view was taken. A node that is
// logged, and that no view has taken since, is not logged again. So a single view never lags by
// more entries than there are nodes.
//
// mu is held for a few instructions for each change, and for each entry that a view takes. Nodes
// are read and views are searched without it, each view by one goroutine; see
// BenchmarkLookAndPickParallel. The view that was used last is reused first, so that there are as
// many views as decisions that run at once, and each change is read by so many.
type changes struct {
	mu    sync.Mutex
	s     *Snapshot       // whose nodes are logged; others are read in full
	n     uint64          // entries since s is logged
	taken uint64          // entries that some view has taken
	log   []int32         // the last entries, by their number modulo its length: places of nodes
	free  [2][]*RouteView // of s, and of its whole; not in use
	most  int             // length of each
}

// begin starts the log of a snapshot.
func (c *changes) begin(s *Snapshot) {
	log, most := make([]int32, 1<<bits.Len(uint(len(s.Decode)+len(s.Prefill)))), freeViews*runtime.GOMAXPROCS(0)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.s != nil {
		c.s.each(func(_ int, n *Node) { n.place = nowhere })
	}
	c.s, c.n, c.taken, c.log, c.free, c.most = s, 0, 0, log, [2][]*RouteView{}, most
	s.each(func(i int, n *Node) { n.place, n.logged = int32(i), 0 })
}

// nowhere is the place of a node that is not in the logged snapshot.
const nowhere = -1

// each calls f for all nodes with their places: decode nodes, then prefill nodes.
func (s *Snapshot) each(f func(place int, n *Node)) {
	for i, n := range s.Decode {
		f(i, n)
	}
	for i, n := range s.Prefill {
		f(len(s.Decode)+i, n)
	}
}

// changed logs the node. It is called after each change of a value that views include.
func (n *Node) changed() {
	c := n.changes
	if c == nil {
		return
	}
	c.mu.Lock()
	if n.place != nowhere && n.logged <= c.taken {
		c.log[c.n%uint64(len(c.log))] = n.place
		c.n++
		n.logged = c.n
	}
	c.mu.Unlock()
}

// take appends to dst the places of the nodes that were logged since entry from. all reports that
// every node is to be read, because the log does not go back so far or is of another snapshot.
func (c *changes) take(s *Snapshot, from uint64, dst []int32) (places []int32, to uint64, all bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.s != s.logged() {
		return dst, 0, true
	}
	c.taken = c.n
	if c.n-from > uint64(len(c.log)) {
		return dst, c.n, true
	}
	for ; from < c.n; from++ {
		dst = append(dst, c.log[from%uint64(len(c.log))])
	}
	return dst, c.n, false
}

// logged returns the snapshot whose places are those of s: s, or that which s is the whole of.
func (s *Snapshot) logged() *Snapshot { return cmp.Or(s.of, s) }

// freeViews returns the list of unused views of s. The caller holds mu of its changes.
func (s *Snapshot) freeViews() *[]*RouteView {
	if s.Whole() {
		return &s.changes.free[1]
	}
	return &s.changes.free[0]
}

// View returns a view of the snapshot for one goroutine, which calls Release after its last use.
func (s *Snapshot) View() *RouteView {
	c := s.changes
	c.mu.Lock()
	free := s.freeViews()
	if last := len(*free) - 1; c.s == s.logged() && last >= 0 {
		v := (*free)[last]
		*free = (*free)[:last]
		c.mu.Unlock()
		return v
	}
	c.mu.Unlock()
	return newRouteView(s)
}

// freeViews bounds the views that are kept for reuse, for each processor. Decisions do not wait, so
// that few more than one for each processor run at once.
const freeViews = 2

// Release ends the use of the view.
func (v *RouteView) Release() {
	c := v.s.changes
	c.mu.Lock()
	if free := v.s.freeViews(); c.s == v.s.logged() && len(*free) < c.most {
		*free = append(*free, v)
	}
	c.mu.Unlock()
}

// inputs are the values of a node that views include. They are changed only by the methods of this
// file, which log the node; a test verifies that.
type inputs struct {
	inFlight atomic.Int64 // attempts of this gateway on the node
	local    atomic.Bool  // decode: the last prompt worth a transfer was computed here
	queued   queued
	member   atomic.Pointer[Member]
	link     atomic.Pointer[link] // nil: not connected
	stalled  atomic.Bool          // has work and makes no steps
	quiet    atomic.Bool          // misses heartbeats
}

// InFlight returns the number of attempts of this gateway on the node.
func (n *Node) InFlight() int64 { return n.inFlight.Load() }

// AddInFlight adds to InFlight.
func (n *Node) AddInFlight(attempts int64) {
	n.inFlight.Add(attempts)
	n.changed()
}

// SetLocal records whether the decode node computed its last prompt that was worth a transfer.
func (n *Node) SetLocal(local bool) {
	if n.local.Swap(local) != local {
		n.changed()
	}
}

// setMember replaces the node's member entry and returns the former one; nil: there was none.
func (n *Node) setMember(m *Member) *Member {
	old := n.member.Swap(m)
	n.changed()
	return old
}

// setLink sets the node's connection.
func (n *Node) setLink(l *link) {
	n.link.Store(l)
	n.changed()
}

// dropLink removes the connection l from the node, unless the node has another one by now.
func (n *Node) dropLink(l *link) {
	if n.link.CompareAndSwap(l, nil) {
		n.changed()
	}
}

// setStalled reports whether the value was another one.
func (n *Node) setStalled(stalled bool) bool {
	if n.stalled.Swap(stalled) == stalled {
		return false
	}
	n.changed()
	return true
}

func (n *Node) setQuiet(quiet bool) {
	if n.quiet.Swap(quiet) != quiet {
		n.changed()
	}
}

// queued counts the prompt tokens of this gateway that a node is to compute, as far as is known.
type queued struct {
	tokens   atomic.Int64
	byLength [lengths.N]atomic.Int64 // of these, as in lengths.Queue
}

// Computes counts tokens of a prompt that the node is to compute.
func (n *Node) Computes(tokens int) { n.queue(tokens, tokens) }

// Computed removes them again.
func (n *Node) Computed(tokens int) { n.queue(tokens, -tokens) }

func (n *Node) queue(length, tokens int) {
	if tokens == 0 {
		return
	}
	n.queued.tokens.Add(int64(tokens))
	for i := lengths.Class(length); i < lengths.N; i++ {
		n.queued.byLength[i].Add(int64(tokens))
	}
	n.changed()
}

// sent copies the counts for a routing decision.
func (q *queued) sent(s *route.Sent) {
	s.Queued = int(q.tokens.Load())
	if s.Queued == 0 {
		return
	}
	for i := range q.byLength {
		s.Lengths[i] = int(q.byLength[i].Load())
	}
}

// reports are the values of a connection that views of its nodes include.
type reports struct {
	heart  atomic.Pointer[heartbeat] // the last one; nil: none yet
	blocks atomic.Int64              // KV blocks that streams took or released since the last heartbeat
	nodes  []*Node                   // whose connection it is; guarded by link.mu
}

// attach makes the connection that of the node. Two members with one address share a connection.
func (l *link) attach(n *Node) {
	l.mu.Lock()
	kept := l.nodes[:0]
	for _, other := range l.nodes {
		if other != n && !other.left.Load() {
			kept = append(kept, other)
		}
	}
	clear(l.nodes[len(kept):])
	l.nodes = append(kept, n)
	l.mu.Unlock()
	n.setLink(l)
}

// setHeart sets the last heartbeat. The caller holds l.mu.
func (l *link) setHeart(h *heartbeat) {
	l.heart.Store(h)
	l.changed()
}

// addBlocks adds to the blocks that streams took. The caller holds l.mu.
func (l *link) addBlocks(blocks int) {
	if blocks != 0 {
		l.blocks.Add(int64(blocks))
		l.changed()
	}
}

// setBlocks replaces the number of blocks that streams took. The caller holds l.mu.
func (l *link) setBlocks(blocks int) {
	if l.blocks.Swap(int64(blocks)) != int64(blocks) {
		l.changed()
	}
}

// changed logs the nodes of the connection. The caller holds l.mu.
func (l *link) changed() {
	for _, n := range l.nodes {
		n.changed()
	}
}
