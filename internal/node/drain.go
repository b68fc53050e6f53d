package node

import (
	"context"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// draining is the drain state of a node. A drain that a gateway requested can be cancelled, that of
// a process that ends cannot.
type draining struct {
	on, leaving bool
	handover    *time.Timer   // ends the remaining work; nil: it is not ended
	idle        chan struct{} // closed for Drain when no work is left; nil: no Drain waits
}

// keep cancels the end of the remaining work.
func (d *draining) keep() {
	if d.handover != nil {
		d.handover.Stop()
		d.handover = nil
	}
}

// Draining reports whether the node takes no work.
func (b *Base) Draining() bool {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	return b.drain.on
}

// DrainingLocked is Draining for a caller that holds the lock.
func (b *Base) DrainingLocked() bool { return b.drain.on }

// Ended wakes Drain when nothing runs any more. The caller holds the lock.
func (b *Base) Ended() {
	if b.drain.idle != nil && b.o.Running() == 0 {
		close(b.drain.idle)
		b.drain.idle = nil
	}
}

// asked applies a gateway's Drain, and reports whether it had an effect. The node stops taking work
// and ends what runs after the Drain's timeout, if there is one; or it takes work again. A payload
// that does not parse has no effect, nor has any payload on a node that leaves.
func (b *Base) asked(payload []byte) bool {
	decoded, err := rpc.Decode(rpc.FrameDrain, payload)
	if err != nil {
		b.o.Log.Warn("a gateway's Drain does not parse", "error", err)
		return false
	}
	m := decoded.(*nodepb.Drain)
	timeout := time.Duration(m.TimeoutMs) * time.Millisecond
	b.o.Lock.Lock()
	d := &b.drain
	leaving := d.leaving
	if !leaving {
		d.keep()
		if d.on = !m.Cancel; d.on && m.TimeoutMs > 0 {
			d.handover = b.endAfter(timeout)
		}
	}
	b.o.Lock.Unlock()
	switch {
	case leaving:
	case m.Cancel:
		b.o.Log.Info("drain cancelled by a gateway")
	default:
		b.o.Log.Info("drain requested by a gateway", "timeout", timeout)
	}
	return !leaving
}

// endAfter ends what runs at that time, unless another request has followed. The caller holds the
// lock.
func (b *Base) endAfter(timeout time.Duration) (timer *time.Timer) {
	timer = time.AfterFunc(timeout, func() {
		b.o.Lock.Lock()
		last := b.drain.handover == timer
		b.o.Lock.Unlock()
		if last {
			b.o.End()
		}
	})
	return timer
}

// leave stops the node from taking work, for good. Requests of gateways no longer count.
func (b *Base) leave() {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	b.drain.keep()
	b.drain.on, b.drain.leaving = true, true
}

// StartDrain stops the node from taking work, for good. What runs continues.
func (b *Base) StartDrain() {
	b.leave()
	b.Heartbeat()
}

// Drain stops the node from taking work and returns when nothing runs any more. When ctx ends, it
// ends what still runs.
func (b *Base) Drain(ctx context.Context) {
	b.StartDrain()
	b.wait(ctx)
	b.Owners.Wait()
}

// wait returns when nothing runs any more, or ends what still runs when ctx ends.
func (b *Base) wait(ctx context.Context) {
	b.o.Lock.Lock()
	if b.drain.idle == nil {
		b.drain.idle = make(chan struct{})
	}
	idle := b.drain.idle
	b.Ended()
	b.o.Lock.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
		b.o.End()
	}
}
