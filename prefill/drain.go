package prefill

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// StartDrain stops the node from taking jobs, for good; what it has goes on.
func (n *Node) StartDrain() {
	n.mu.Lock()
	n.draining.Leave()
	n.mu.Unlock()
	n.heartbeat() // gateways hear of it at once
}

// drainAsked does what a gateway's Drain asks for: no jobs from now on, and at the
// timeout an end of those that are left, which their decode nodes take elsewhere;
// or jobs again.
func (n *Node) drainAsked(payload []byte) {
	d := new(nodepb.Drain)
	if err := proto.Unmarshal(payload, d); err != nil {
		n.log.Warn("a gateway's Drain does not parse", "error", err)
		return
	}
	n.mu.Lock()
	did := n.draining.Ask(d, &n.mu, func() { n.cancelAll(errDrained) })
	n.mu.Unlock()
	if !did {
		return
	}
	n.log.Info("drain asked for by a gateway", "cancel", d.Cancel, "timeout", time.Duration(d.TimeoutMs)*time.Millisecond)
	n.heartbeat()
}

// Draining says that the node takes no jobs.
func (n *Node) Draining() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.draining.On()
}

// Drain stops taking jobs and waits until none is left or ctx ends; those that
// remain are then ended.
func (n *Node) Drain(ctx context.Context) {
	n.mu.Lock()
	n.draining.Leave()
	var idle chan struct{}
	if len(n.jobs) > 0 {
		if n.idle == nil {
			n.idle = make(chan struct{})
		}
		idle = n.idle
	}
	n.mu.Unlock()
	if idle != nil {
		select {
		case <-idle:
		case <-ctx.Done():
			n.cancelAll(errDrained)
		}
	}
	n.wg.Wait()
}

func (n *Node) cancelAll(why error) {
	n.mu.Lock()
	keys := make([]key, 0, len(n.jobs))
	for k := range n.jobs {
		keys = append(keys, k)
	}
	n.mu.Unlock()
	for _, k := range keys {
		n.cancel(k, why)
	}
}
