package rpc

import (
	"context"
	"log/slog"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// beatsPerInterval is how much more often a node tells of itself while what
// gateways route by changes: several of them then see the same queues, and choose
// alike (bench/sim).
const beatsPerInterval = 5

// Beat has a node tell of itself until ctx ends: once in each interval, and
// beatsPerInterval times where its load changes.
func Beat(ctx context.Context, interval time.Duration, stats func() *nodepb.Stats, tell func(*nodepb.Stats)) {
	tick := time.NewTicker(max(1, interval/beatsPerInterval))
	defer tick.Stop()
	var last *nodepb.Stats
	for since := 1; ; since++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := stats(); since >= beatsPerInterval || loadChanged(last, now) {
			tell(now)
			last, since = now, 0
		}
	}
}

// Tell sends gateways what Beat has gathered. One message that is lost is followed by the next; a gateway that takes nothing for
// long is given up by its connection.
func Tell(gateways []*Conn, m *nodepb.Stats, log *slog.Logger) {
	for _, c := range gateways {
		if err := c.Send(FrameStats, 0, m); err != nil {
			log.Debug("heartbeat not sent", "err", err)
		}
	}
}

// loadChanged says whether gateways would route otherwise.
func loadChanged(a, b *nodepb.Stats) bool {
	return a.GetRunning() != b.GetRunning() || a.GetWaiting() != b.GetWaiting() || a.GetHeld() != b.GetHeld() ||
		a.GetQueuedTokens() != b.GetQueuedTokens() || a.GetDraining() != b.GetDraining()
}
