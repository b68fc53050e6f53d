package nodes

import (
	"errors"
	"fmt"
)

// Check verifies the fleet's counts: no node's count of attempts is below zero. If idle, no request
// is in flight: all counts are zero and no connection has a stream.
func (f *Fleet) Check(idle bool) error {
	var errs []error
	s := f.Now()
	for _, nodes := range [][]*Node{s.Decode, s.Prefill} {
		for _, n := range nodes {
			if held := n.InFlight.Load(); held < 0 || idle && held > 0 {
				errs = append(errs, fmt.Errorf("nodes: %d attempts on the books of %s (idle: %t)", held, n.Name, idle))
			}
		}
	}
	f.linksMu.RLock()
	defer f.linksMu.RUnlock()
	for c, l := range f.links {
		l.mu.Lock()
		streams := len(l.streams)
		l.mu.Unlock()
		if idle && streams > 0 {
			errs = append(errs, fmt.Errorf("nodes: %d streams on the connection to %s while no request is being answered", streams, c.RemoteAddr()))
		}
	}
	return errors.Join(errs...)
}
