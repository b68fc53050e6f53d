package prefill

import (
	"context"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// know files a gateway's connection; heartbeats go to it from now on.
func (n *Node) know(c *rpc.Conn) {
	if c.Peer().GetRole() != "gateway" {
		return
	}
	n.mu.Lock()
	n.gateways[c] = true
	n.mu.Unlock()
	n.heartbeat()
}

// Heartbeats tells gateways how long the queue is and how fast it goes, until ctx
// ends.
func (n *Node) Heartbeats(ctx context.Context) {
	rpc.Beat(ctx, n.o.StatsInterval, n.stats, n.tell)
}

func (n *Node) heartbeat() { n.tell(n.stats()) }

// stats is what gateways route by.
func (n *Node) stats() *nodepb.Stats {
	st := n.o.Engine.Stats()
	u := st.Scheduler.Blocks
	n.mu.Lock()
	defer n.mu.Unlock()
	queued := st.Scheduler.Pending + n.line.WaitingTokens() // admitted ones are the engine's
	byLength := n.line.Lengths()
	m := &nodepb.Stats{
		Steps: st.Steps, Running: uint32(st.Scheduler.Running), Waiting: uint32(st.Scheduler.Waiting + n.line.Waiting()),
		BlocksTotal: uint32(u.Blocks), BlocksUsed: uint32(u.Blocks - u.Free - u.Cached), Draining: n.draining.On(),
		PrefillTokensPerS: st.PromptRate, QueuedTokens: uint32(queued),
		Adapters: n.adapters.List(), QueuedByLength: make([]uint32, len(byLength)), StepTokens: uint32(st.Scheduler.StepTokens),
	}
	for i, tokens := range byLength {
		m.QueuedByLength[i] = uint32(tokens)
	}
	return m
}

// tell sends every gateway a heartbeat.
func (n *Node) tell(m *nodepb.Stats) {
	n.mu.Lock()
	conns := make([]*rpc.Conn, 0, len(n.gateways))
	for c := range n.gateways {
		conns = append(conns, c)
	}
	n.mu.Unlock()
	rpc.Tell(conns, m, n.log)
}
