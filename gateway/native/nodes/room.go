package nodes

import (
	"math"
	"time"
)

// leastBacklog is how many prompt tokens a node may always have before it: some
// steps' worth, so that a slow one, or one whose speed is not known yet, does not
// run dry between two requests.
const leastBacklog = 2048

// Room is what a gateway may have on the nodes of a model at once;
// math.MaxInt64 where they do not tell.
type Room struct {
	Requests int64
	Tokens   int64 // of prompts that are not computed
}

// Room is how many requests the usable decode nodes take beside those of other
// gateways: as many as they run at once and waiting ones more, of a node that cannot run
// so many only what it does run and waiting ones; and how many prompt tokens keep all usable nodes
// busy for so long. Without a usable decode node there is no telling.
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
