package nodes

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// pulse judges by a node's heartbeats whether it makes progress, because a process whose engine
// hangs still answers pings. It reads no clock.
type pulse struct {
	beats, steps uint64    // of the last heartbeat
	moved        time.Time // when steps last grew, or the node had no work
	beatAt       time.Time // when the last heartbeat arrived
}

// quietAfter is how long a node may miss heartbeats before it gets new requests only if no other
// node is left. It keeps its streams until its connection is closed.
const quietAfter = 2 * time.Second

// maxLookGap is how many ProbeIntervals the time between two looks counts at most.
const maxLookGap = 2

// beat updates p at now. It returns how long the node has had work and made no step. beats is 0
// before a connection's first heartbeat.
func (p *pulse) beat(now time.Time, beats, steps uint64, busy bool) time.Duration {
	fresh := beats != p.beats
	if beats == 0 || fresh {
		p.beatAt = now
	}
	if beats == 0 || p.moved.IsZero() || fresh && (steps != p.steps || !busy) {
		p.moved = now
	}
	if p.beats = beats; beats > 0 {
		p.steps = steps
	}
	return now.Sub(p.moved)
}

// watch watches an open connection until it ends; false: ctx has ended. A stalled node loses the
// connection and with it all attempts, which are resumed elsewhere. It gets no new ones until it
// has made a step.
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
			// The gateway's own pause, as of a stopped process, does not count.
			n.clock = n.clock.Add(min(now.Sub(last), maxLookGap*n.f.o.ProbeInterval))
			last = now
			still := n.pulse.beat(n.clock, beats, steps, busy)
			n.setQuiet(n.clock.Sub(n.pulse.beatAt) >= quietAfter)
			if beats > 0 && (steps != before || !busy) {
				n.setStalled(false)
			}
			if limit := n.f.o.StallTimeout; limit > 0 && still >= limit && n.setStalled(true) {
				n.f.o.Meters.Counter(metrics.GatewayNodesLost, "stall").Inc()
				l.conn.Close(fmt.Errorf("%w: %s, for %v", ErrStalled, n.Name, still.Round(time.Millisecond)))
			}
		}
	}
}
