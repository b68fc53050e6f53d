package prefill

import "context"

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
	if n.draining.Asked(payload, &n.mu, n.log, func() { n.cancelAll(errDrained) }) {
		n.heartbeat()
	}
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
	n.StartDrain()
	n.draining.Wait(ctx, &n.mu, func() int { return len(n.jobs) }, func() { n.cancelAll(errDrained) })
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
