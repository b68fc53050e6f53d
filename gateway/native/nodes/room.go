package nodes

import (
	"math"
	"time"
)

// leastBacklog is the number of prompt tokens that may always wait on a node. It is worth some
// steps, so that a slow node, or one of unknown speed, does not run dry between two requests.
const leastBacklog = 2048

// Room is what a gateway may send to the nodes of a model at once; math.MaxInt64 if nodes do not
// report it.
type Room struct {
	Requests int64
	Tokens   int64 // of prompts that are not computed yet
}

// Room returns how many requests the usable decode nodes take in addition to those of other
// gateways, and how many prompt tokens keep all usable nodes busy for so long. A node takes as many
// requests as it runs at once, and waiting more. A node that cannot run so many takes those that it
// runs, and waiting more. Without a usable decode node, the room is unknown.
func (s *Snapshot) Room(fingerprint uint64, waiting int, busy time.Duration) Room {
	r, any := Room{}, false
	for _, n := range s.Decode {
		h, ok := n.takes(fingerprint)
		switch {
		case !ok:
			continue
		case h.maxRunning == 0:
			return Room{math.MaxInt64, math.MaxInt64}
		}
		any = true
		most := h.maxRunning
		if h.Waiting > waiting { // for want of KV blocks
			most = min(most, max(1, h.Running))
		}
		others := max(0, h.Running+h.Waiting+h.Held-h.own)
		r.Requests += int64(max(0, most+waiting-others))
		r.Tokens += backlog(h, busy)
	}
	if !any {
		return Room{math.MaxInt64, math.MaxInt64}
	}
	for _, n := range s.Prefill {
		if h, ok := n.takes(fingerprint); ok {
			r.Tokens += backlog(h, busy)
		}
	}
	return r
}

func backlog(h *heartbeat, busy time.Duration) int64 {
	return max(leastBacklog, int64(h.Rate*busy.Seconds()))
}

// takes returns the node's last heartbeat, and whether the node takes new work of the model.
func (n *Node) takes(fingerprint uint64) (h *heartbeat, ok bool) {
	h = n.link.Load().last()
	return h, n.usable(fingerprint) && !n.stalled.Load() && !n.quiet.Load()
}
