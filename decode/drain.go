package decode

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// StartDrain stops the node from taking attempts, for good; what runs goes on.
func (n *Node) StartDrain() {
	n.mu.Lock()
	n.draining.Leave()
	n.mu.Unlock()
	n.heartbeat() // gateways hear of it at once
}

// drainAsked does what a gateway's Drain asks for: no attempts from now on, and at
// the timeout an end of what still runs, which its gateway resumes elsewhere; or
// attempts again.
func (n *Node) drainAsked(payload []byte) {
	if n.draining.Asked(payload, &n.mu, n.log, n.endAll) {
		n.heartbeat()
	}
}

// Draining says that the node takes no attempts.
func (n *Node) Draining() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.draining.On()
}

// Drain stops taking attempts and waits until none is left or ctx ends; those
// that remain are then ended with an error their gateways hear.
func (n *Node) Drain(ctx context.Context) {
	n.StartDrain()
	n.draining.Wait(ctx, &n.mu, func() int { return len(n.attempts) }, n.endAll)
	n.wg.Wait()
}

// endAll ends every attempt.
func (n *Node) endAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.endAllLocked()
}

// endAllLocked is endAll for who holds mu.
func (n *Node) endAllLocked() {
	for _, a := range n.attempts {
		n.endLocked(a, ErrDrained, true)
	}
}

// Running is how many attempts the node owns.
func (n *Node) Running() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.attempts)
}

// Heartbeats sends Stats to every gateway until ctx ends, and the Ends it is
// owed.
func (n *Node) Heartbeats(ctx context.Context) {
	rpc.Beat(ctx, n.o.StatsInterval, n.stats, n.tell)
}

// heartbeat tells every gateway how the node fares.
func (n *Node) heartbeat() { n.tell(n.stats()) }

// stats is what gateways route by.
func (n *Node) stats() *nodepb.Stats {
	st := n.o.Engine.Stats()
	u := st.Scheduler.Blocks
	n.mu.Lock()
	defer n.mu.Unlock()
	return &nodepb.Stats{
		Steps: st.Steps, Running: uint32(st.Scheduler.Running), Waiting: uint32(st.Scheduler.Waiting),
		Held: uint32(st.Scheduler.Held), BlocksTotal: uint32(u.Blocks),
		BlocksUsed: uint32(u.Blocks - u.Free - u.Cached), BlocksCached: proto.Uint32(uint32(u.Cached)), BlocksReserved: proto.Uint32(uint32(st.Scheduler.Wanted)),
		Draining: n.draining.On(), PrefillTokensPerS: st.PromptRate, QueuedTokens: uint32(st.Scheduler.Pending), MaxRunning: uint32(n.o.MaxRunning),
		Adapters: n.adapters.List(), StepTokens: uint32(st.Scheduler.StepTokens),
	}
}

// tell sends every gateway a heartbeat, and the Ends it is owed.
func (n *Node) tell(m *nodepb.Stats) {
	n.mu.Lock()
	conns := make([]*rpc.Conn, 0, len(n.gateways))
	for c, gw := range n.gateways {
		n.payEnds(gw)
		conns = append(conns, c)
	}
	n.mu.Unlock()
	rpc.Tell(conns, m, n.log)
}
