package upstream

import "time"

// Bounds of what is remembered of servers that left while an operator drained them.
const (
	// drainKept is how long: a name or a readiness that flaps is back sooner, and after
	// it the address may be another server's.
	drainKept  = 10 * time.Minute
	maxDrained = 1024 // servers
)

// drained are the servers that a source stopped naming while an operator drained
// them, and when: where it names one again, the operator's word still holds. One that
// was taken from the list of upstreams is not among them: its operator has spoken again.
type drained map[string]time.Time

func (d drained) left(s *Server, now time.Time) {
	for name, at := range d {
		if now.Sub(at) >= drainKept {
			delete(d, name)
		}
	}
	if s.Draining() && !s.listed && len(d) < maxDrained {
		d[s.Name] = now
	}
}

// joined says whether a server that is named anew is still drained.
func (d drained) joined(name string, now time.Time) bool {
	at, ok := d[name]
	delete(d, name)
	return ok && now.Sub(at) < drainKept
}
