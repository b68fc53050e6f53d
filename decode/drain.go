package decode

import (
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

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

// flushGateways sends all pending Ends, and returns the connections of all gateways.
func (n *Node) flushGateways() []*rpc.Conn {
	n.mu.Lock()
	defer n.mu.Unlock()
	conns := make([]*rpc.Conn, 0, len(n.gateways))
	for c, gw := range n.gateways {
		n.flushEnds(gw)
		conns = append(conns, c)
	}
	return conns
}
