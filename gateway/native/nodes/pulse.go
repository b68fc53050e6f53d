package nodes

import (
	"context"
	"fmt"
	"time"
)

// pulse judges by a node's heartbeats whether it gets on: a process whose engine
// hangs still answers pings. It reads no clock.
type pulse struct {
	beats, steps uint64    // of the last heartbeat looked at
	moved        time.Time // when steps last grew, or there was nothing to do
	heard        time.Time // when the last heartbeat came
}

// quietAfter: a node that misses heartbeats for so long gets new requests only
// when no other is left. Its streams stay until its connection is given up.
const quietAfter = 2 * time.Second

// maxLookGap is how many ProbeIntervals the time between two looks counts at most.
const maxLookGap = 2

// beat takes what is known at now; it returns how long the node has had work and
// made no step. beats is 0 before a connection's first heartbeat.
func (p *pulse) beat(now time.Time, beats, steps uint64, busy bool) time.Duration {
	news := beats != p.beats
	if beats == 0 || news {
		p.heard = now
	}
	if beats == 0 || p.moved.IsZero() || news && (steps != p.steps || !busy) {
		p.moved = now
	}
	if p.beats = beats; beats > 0 {
		p.steps = steps
	}
	return now.Sub(p.moved)
}

// watch looks after an open connection until it ends; false: ctx has. A node
// that is stalled loses it, and with it all attempts, which go on elsewhere;
// it gets none until it has made a step.
func (n *Node) watch(ctx context.Context, l *link) bool {
	look := time.NewTicker(n.f.o.ProbeInterval)
	defer look.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-l.conn.Done():
			return true
		case now := <-look.C:
			h := l.last()
			beats, steps, busy := h.number, h.steps, h.Running+h.Waiting > 0
			before := n.pulse.steps
			// A gateway that was stopped does not take its own pause for the node's.
			n.clock = n.clock.Add(min(now.Sub(last), maxLookGap*n.f.o.ProbeInterval))
			last = now
			still := n.pulse.beat(n.clock, beats, steps, busy)
			n.quiet.Store(n.clock.Sub(n.pulse.heard) >= quietAfter)
			if beats > 0 && (steps != before || !busy) {
				n.stalled.Store(false)
			}
			if limit := n.f.o.StallTimeout; limit > 0 && still >= limit && n.stalled.CompareAndSwap(false, true) {
				n.f.o.Stalled.Inc()
				l.conn.Close(fmt.Errorf("%w: %s, for %v", ErrStalled, n.Name, still.Round(time.Millisecond)))
			}
		}
	}
}
