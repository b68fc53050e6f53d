package upstream

import "time"

// Bounds of the memory of drained servers.
const (
	// drainKept is how long a drained server is remembered after it was removed. A name or readiness
	// that flaps is back sooner; later the address may belong to another server.
	drainKept  = 10 * time.Minute
	maxDrained = 1024 // servers
)

// drained has the times at which sources removed servers that an operator had drained. A server
// that is discovered again stays drained. Configured servers are not remembered, because an
// operator removed them.
type drained map[string]time.Time

// removed notes that a server was removed.
func (d drained) removed(s *Server, now time.Time) {
	for name, at := range d {
		if now.Sub(at) >= drainKept {
			delete(d, name)
		}
	}
	if s.Draining() && !s.static && len(d) < maxDrained {
		d[s.Name] = now
	}
}

// added reports whether a server that is discovered again is still drained.
func (d drained) added(name string, now time.Time) bool {
	at, ok := d[name]
	delete(d, name)
	return ok && now.Sub(at) < drainKept
}
