package rpc

import (
	"sync"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Draining is whether a node takes no more work: because a gateway asked for it, which may be taken back, or because its process
// ends. The zero value takes work. The node's own lock guards it, so that an admission sees one answer.
type Draining struct {
	on, leaving bool
	turn        int         // of what was asked for: an earlier turn's timer ends nothing
	handover    *time.Timer // ends what is left
}

// On says that the node takes no work.
func (d *Draining) On() bool { return d.on }

// Leave ends the taking of work for good; what a gateway asked for no longer counts.
func (d *Draining) Leave() {
	d.forget()
	d.on, d.leaving = true, true
}

// Ask does what a gateway asks for: no work from now on, and after m's timeout, where it has one, a call of end, without mu, the
// lock that guards d; or work again. It returns false, having done nothing, for a node that leaves.
func (d *Draining) Ask(m *nodepb.Drain, mu sync.Locker, end func()) bool {
	if d.leaving {
		return false
	}
	d.forget()
	d.on = !m.Cancel
	if d.on && m.TimeoutMs > 0 {
		turn := d.turn
		d.handover = time.AfterFunc(time.Duration(m.TimeoutMs)*time.Millisecond, func() {
			mu.Lock()
			mine := d.turn == turn
			mu.Unlock()
			if mine {
				end()
			}
		})
	}
	return true
}

func (d *Draining) forget() {
	d.turn++
	if d.handover != nil {
		d.handover.Stop()
		d.handover = nil
	}
}
