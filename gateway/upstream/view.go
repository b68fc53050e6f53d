package upstream

import (
	"slices"

	"github.com/sony/gobreaker/v2"

	"github.com/tandem-serving/tandem/gateway/route"
)

// View is the fleet's state for a request of the model with the fingerprint
// (0: any). Decode nodes in avoid are used only when no other is left.
//
// Of the nodes that are ready and not draining, those that get on and have an
// open connection are usable; failing that, those whose breaker is not open;
// failing that, one in avoid that is connected, since what it failed may be over;
// failing that, all: a breaker never leaves a request without candidates.
func (s *Snapshot) View(fingerprint uint64, avoid []*Node) route.View {
	v := route.View{Decode: make([]route.State, len(s.Decode)), Prefill: make([]route.State, len(s.Prefill))}
	for i, n := range s.Prefill {
		v.Prefill[i] = route.State{Usable: n.serves(fingerprint), Load: int(n.InFlight.Load())}
	}
	for _, allowed := range [...]func(*Node) bool{
		func(n *Node) bool {
			return n.connected() && !n.stalled.Load() && !n.quiet.Load() && !slices.Contains(avoid, n)
		},
		func(n *Node) bool { return n.breaker.State() != gobreaker.StateOpen && !slices.Contains(avoid, n) },
		func(n *Node) bool { return n.connected() && !n.stalled.Load() },
		func(n *Node) bool { return !slices.Contains(avoid, n) },
		func(*Node) bool { return true },
	} {
		any := false
		for i, n := range s.Decode {
			running, waiting, held, _, draining, _ := n.Stats()
			usable := n.serves(fingerprint) && !draining && allowed(n)
			any = any || usable
			v.Decode[i] = route.State{Usable: usable, Load: max(running+waiting+held, int(n.InFlight.Load()))}
		}
		if any {
			break
		}
	}
	return v
}

// serves says whether the node takes requests of the model. What the node itself
// said when it was connected wins over hearsay; a fingerprint of 0, as static
// lists have it, matches every model.
func (n *Node) serves(fingerprint uint64) bool {
	m := n.member.Load()
	if !m.Ready || m.Draining {
		return false
	}
	own := m.Fingerprint
	if l := n.link.Load(); l != nil {
		if said := l.conn.Peer().GetFingerprint(); said != 0 {
			own = said
		}
	}
	return fingerprint == 0 || own == 0 || own == fingerprint
}

// Breakers is the number of decode nodes whose breaker is in the state: closed,
// half-open or open.
func (s *Snapshot) Breakers(state string) int {
	count := 0
	for _, n := range s.Decode {
		if n.breaker.State().String() == state {
			count++
		}
	}
	return count
}

// Usable is the number of decode nodes that a request of the model could be sent
// to now over an open connection.
func (s *Snapshot) Usable(fingerprint uint64) int {
	count := 0
	for _, n := range s.Decode {
		if _, _, _, _, draining, _ := n.Stats(); n.connected() && !draining && n.serves(fingerprint) {
			count++
		}
	}
	return count
}

// Ready is the number of decode nodes that serve the model, connected or not.
func (s *Snapshot) Ready(fingerprint uint64) int {
	count := 0
	for _, n := range s.Decode {
		if n.serves(fingerprint) {
			count++
		}
	}
	return count
}
