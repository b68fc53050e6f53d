package route

import (
	"fmt"
	"time"
)

// Explain returns sentences about the reasons of a decision for a prompt of nTokens.
func (t *Table) Explain(d Decision, v View, nTokens, minRemote int) []string {
	if d.Reason == ReasonNoRoom {
		return []string{fmt.Sprintf("It waits in the gateway: none of %d decode nodes has KV memory for its prompt and an answer.", len(v.Decode))}
	}
	if d.Decode < 0 {
		return []string{fmt.Sprintf("No decode node is usable: %d are known.", len(v.Decode))}
	}
	lines, name, s := []string(nil), t.decode.nodes[d.Decode].label(), v.Decode[d.Decode]
	why := map[Reason]string{
		ReasonPrefix: "it is the home of prompts that begin like this one, and no other node is clearly faster",
		ReasonLoad:   "the home of prompts that begin like this one is overloaded",
		ReasonHealth: "the home of prompts that begin like this one is not usable",
		ReasonCached: "it holds more of the prompt than its home, and is clearly faster for it",
		ReasonPolicy: "the policy uses neither prefixes nor queues",
	}[d.Reason]
	lines = append(lines, fmt.Sprintf("Decode on %s: %s.", name, why))
	lines = append(lines, fmt.Sprintf("It has %d requests, %d tokens queued, and %d of the prompt's %d tokens cached.", s.Load, s.Queued, s.Held, nTokens))
	switch d.PrefillReason {
	case ReasonShort:
		lines = append(lines, fmt.Sprintf("It computes the prompt itself: %d tokens are missing, and a transfer is worth it from %d.", max(1, nTokens-int(s.Held)), minRemote))
	case ReasonNoPrefill:
		lines = append(lines, fmt.Sprintf("It computes the prompt itself: no prefill node of its numerics class is usable (%d are known).", len(v.Prefill)))
	case ReasonLocal:
		lines = append(lines, fmt.Sprintf("It computes the prompt itself: that is predicted to take %v, and the best prefill node %v.", round(d.Local), round(d.Remote)))
	case ReasonRemote:
		p := v.Prefill[d.Prefill[0]]
		lines = append(lines, fmt.Sprintf("Prefill on %s: it has %d tokens queued and %d of the prompt's cached.", t.prefill.nodes[d.Prefill[0]].label(), p.Queued, p.Held))
		if d.Remote > 0 {
			lines = append(lines, fmt.Sprintf("That is predicted to take %v, on the decode node %v.", round(d.Remote), round(d.Local)))
		}
	}
	return lines
}

// label returns the node's names for people: the shown one, and the address.
func (n *Node) label() string {
	if n.Shown == "" || n.Shown == n.Name {
		return n.Name
	}
	return n.Shown + " at " + n.Name
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
