package decode

import (
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// lease joins a lease of kvtransfer with the engine's reservation.
type lease struct {
	id      kvtransfer.LeaseID
	res     scheduler.ReservationID
	fetch   *fetch
	arrived bool
	givenUp bool
}

// TransferEvent is the Reader's OnEvent.
//
// Three parties race for a lease: the writer, whose last byte makes it arrive; the transfer, which
// may fail it; and this node, which may give it up. The engine must get Arrived, or Lost and then
// Release, in that order, and never both. n.mu orders them: giveUp posts Lost under n.mu before it
// cancels, so that a concurrent Released or Arrived posts its Release after it.
func (n *Node) TransferEvent(ev kvtransfer.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.leases[ev.Lease]
	if l == nil {
		n.log.Error("transfer event for an unknown lease", "kind", ev.Kind, "lease", ev.Lease)
		return
	}
	switch ev.Kind {
	case kvtransfer.Arrived:
		delete(n.leases, l.id)
		if l.givenUp {
			n.o.Engine.Release(l.res)
			return
		}
		l.arrived = true
		n.count.RemotePrefills++ // before the engine's first token can be
		if len(ev.Digests) > 0 {
			pages := make([]engine.PageDigest, len(ev.Digests))
			for i, d := range ev.Digests {
				pages[i] = engine.PageDigest(d)
			}
			n.o.Engine.ArrivedOnDevice(l.res, pages, ev.Mismatch)
		} else {
			n.o.Engine.Arrived(l.res)
		}
		l.fetch.moved <- nil
	case kvtransfer.Failed:
		if !l.givenUp {
			l.givenUp = true
			n.o.Engine.Lost(l.res)
			l.fetch.moved <- ev.Err
		}
	case kvtransfer.Released:
		delete(n.leases, l.id)
		n.o.Engine.Release(l.res) // Failed or giveUp posted Lost before
	}
}

// giveUp ends a lease from this side. Its blocks are returned by Released. It reports whether
// everything has arrived already, so that it is too late.
func (n *Node) giveUp(l *lease) (arrived bool) {
	if l == nil {
		return false
	}
	n.mu.Lock()
	if l.arrived || l.givenUp {
		n.mu.Unlock()
		return l.arrived
	}
	l.givenUp = true
	n.o.Engine.Lost(l.res)
	n.mu.Unlock()
	n.o.Reader.Cancel(l.id)
	return false
}
