package prefill

import (
	"maps"
	"slices"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// register sends heartbeats to a gateway from now on.
func (n *Node) register(c *rpc.Conn) {
	if c.Peer().GetRole() != "gateway" {
		return
	}
	n.mu.Lock()
	n.gateways[c] = true
	n.mu.Unlock()
	n.Heartbeat()
}

// connected returns the connections of all gateways.
func (n *Node) connected() []*rpc.Conn {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.gateways))
}

// addStats adds the jobs in the line to a heartbeat. The engine counts only admitted ones.
func (n *Node) addStats(m *nodepb.Stats, _ scheduler.Stats) {
	m.Waiting += uint32(n.line.Waiting())
	m.QueuedTokens += uint32(n.line.WaitingTokens())
	for _, tokens := range n.line.Lengths() {
		m.QueuedByLength = append(m.QueuedByLength, uint32(tokens))
	}
}
