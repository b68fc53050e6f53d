package rpc

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Draining is whether a node takes no more work: because a gateway asked for it, which may be taken back, or because its process
// ends. The zero value takes work. The node's own lock guards it, so that an admission sees one answer.
type Draining struct {
	on, leaving bool
	turn        int           // of what was asked for: an earlier turn's timer ends nothing
	handover    *time.Timer   // ends what is left
	idle        chan struct{} // somebody waits for it to be closed, when nothing is left
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

// Asked is Ask with what a gateway sent, for a node that does not hold mu. It says in the log what is done; what does not parse
// does nothing.
func (d *Draining) Asked(payload []byte, mu sync.Locker, log *slog.Logger, end func()) bool {
	m := new(nodepb.Drain)
	if err := proto.Unmarshal(payload, m); err != nil {
		log.Warn("a gateway's Drain does not parse", "error", err)
		return false
	}
	mu.Lock()
	did := d.Ask(m, mu, end)
	mu.Unlock()
	if did {
		log.Info("drain asked for by a gateway", "cancel", m.Cancel, "timeout", time.Duration(m.TimeoutMs)*time.Millisecond)
	}
	return did
}

// Left hears, under the lock, how much work is left whenever some has ended.
func (d *Draining) Left(n int) {
	if n == 0 && d.idle != nil {
		close(d.idle)
		d.idle = nil
	}
}

// Wait returns when no work is left, which left counts under mu, or after a call of end, without mu, once ctx has ended.
func (d *Draining) Wait(ctx context.Context, mu sync.Locker, left func() int, end func()) {
	mu.Lock()
	var idle chan struct{}
	if left() > 0 {
		if d.idle == nil {
			d.idle = make(chan struct{})
		}
		idle = d.idle
	}
	mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-ctx.Done():
		end()
	}
}

func (d *Draining) forget() {
	d.turn++
	if d.handover != nil {
		d.handover.Stop()
		d.handover = nil
	}
}
