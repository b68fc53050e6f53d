package rpc

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Draining is the drain state of a node. A drain that a gateway requested can be cancelled,
// that of a process that ends cannot. The zero value accepts work. The node's own lock guards
// it, so that an admission sees one state.
type Draining struct {
	on, leaving bool
	turn        int           // counts requests: the timer of an earlier one does nothing
	handover    *time.Timer   // ends the remaining work
	idle        chan struct{} // closed for Wait when no work is left; nil: no Wait
}

// On reports whether the node accepts no work.
func (d *Draining) On() bool { return d.on }

// Leave stops accepting work for good. Requests of gateways no longer count.
func (d *Draining) Leave() {
	d.forget()
	d.on, d.leaving = true, true
}

// Ask applies a gateway's request: to stop accepting work and, after m's timeout if it has
// one, to call end; or to accept work again. mu is the lock that guards d; end is called
// without it. Ask does nothing and returns false for a node that leaves.
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

// Asked is Ask with the payload of a gateway's frame, for a caller that does not hold mu. It
// logs the request. A payload that does not parse has no effect.
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
		log.Info("drain requested by a gateway", "cancel", m.Cancel, "timeout", time.Duration(m.TimeoutMs)*time.Millisecond)
	}
	return did
}

// Left wakes Wait if n, the amount of work left, is 0. It is called with the lock whenever
// work has ended.
func (d *Draining) Left(n int) {
	if n == 0 && d.idle != nil {
		close(d.idle)
		d.idle = nil
	}
}

// Wait returns when no work is left. When ctx ends first, it calls end, without mu, and
// returns. left returns the amount of work and is called with mu.
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
