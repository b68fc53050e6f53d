package node

import (
	"context"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// draining is the drain state of a node. A drain that a gateway requested can be cancelled, that
// of a process that ends cannot. The zero value takes work. Options.Lock guards it, so that an
// admission sees one state.
type draining struct {
	on, leaving bool
	handover    *time.Timer   // ends what still runs; nil: none
	idle        chan struct{} // closed for Drain when nothing runs any more; nil: no Drain
}

// Draining reports whether the node takes no work.
func (b *Base) Draining() bool {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	return b.on
}

// DrainingLocked is Draining for a caller that holds the lock.
func (b *Base) DrainingLocked() bool { return b.on }

// Ended wakes Drain when nothing runs any more. The caller holds the lock.
func (b *Base) Ended() {
	if b.idle != nil && b.o.Running() == 0 {
		close(b.idle)
		b.idle = nil
	}
}

// StartDrain stops the node from taking work, for good. What runs continues.
func (b *Base) StartDrain() {
	b.leave()
	b.Heartbeat()
}

// leave makes the node take no work, for good.
func (b *Base) leave() {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	b.cancelHandover()
	b.on, b.leaving = true, true
}

// Drain stops the node from taking work and returns when nothing runs any more. When ctx ends, it
// ends what still runs.
func (b *Base) Drain(ctx context.Context) {
	b.StartDrain()
	b.wait(ctx)
	b.Owners.Wait()
}

// wait returns when nothing runs any more. When ctx ends, it ends what still runs.
func (b *Base) wait(ctx context.Context) {
	b.o.Lock.Lock()
	var idle chan struct{}
	if b.o.Running() > 0 {
		if b.idle == nil {
			b.idle = make(chan struct{})
		}
		idle = b.idle
	}
	b.o.Lock.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-ctx.Done():
		b.o.End()
	}
}

// asked handles the payload of a gateway's Drain and reports whether it was applied.
func (b *Base) asked(payload []byte) bool {
	request, err := rpc.Decode(rpc.FrameDrain, payload)
	if err != nil {
		b.o.Log.Warn("a gateway's Drain does not parse", "error", err)
		return false
	}
	m := request.(*nodepb.Drain)
	timeout := time.Duration(m.TimeoutMs) * time.Millisecond
	if !b.ask(m.Cancel, timeout) {
		return false
	}
	b.o.Log.Info("drain requested by a gateway", "cancel", m.Cancel, "timeout", timeout)
	return true
}

// ask makes the node take no work and, after a timeout above 0, ends what still runs; or, with
// cancel, makes it take work again. It does nothing and returns false for a node that leaves.
func (b *Base) ask(cancel bool, timeout time.Duration) bool {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	if b.leaving {
		return false
	}
	b.cancelHandover()
	if b.on = !cancel; b.on && timeout > 0 {
		var handover *time.Timer
		handover = time.AfterFunc(timeout, func() {
			b.o.Lock.Lock()
			latest := b.handover == handover
			b.o.Lock.Unlock()
			if latest {
				b.o.End()
			}
		})
		b.handover = handover
	}
	return true
}

// cancelHandover stops the timer of an earlier request.
func (b *Base) cancelHandover() {
	if b.handover != nil {
		b.handover.Stop()
		b.handover = nil
	}
}
