package rpc

import (
	"context"
	"log/slog"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// beatsPerInterval is how many heartbeats a node sends in an interval while its load
// changes, so that all gateways see the same queues and choose alike (bench/sim).
const beatsPerInterval = 5

// Beat calls send with the node's stats until ctx ends: once in each interval, and up to
// beatsPerInterval times while its load changes.
func Beat(ctx context.Context, interval time.Duration, stats func() *nodepb.Stats, send func(*nodepb.Stats)) {
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
			send(now)
			last, since = now, 0
		}
	}
}

// SendStats sends a heartbeat to gateways. A lost message is followed by the next. The
// connection of a gateway that reads nothing ends by itself.
func SendStats(gateways []*Conn, m *nodepb.Stats, log *slog.Logger) {
	for _, c := range gateways {
		if err := c.Send(FrameStats, 0, m); err != nil {
			log.Debug("heartbeat not sent", "err", err)
		}
	}
}

// loadChanged reports whether gateways may route differently because of b.
func loadChanged(a, b *nodepb.Stats) bool {
	return a.GetRunning() != b.GetRunning() || a.GetWaiting() != b.GetWaiting() || a.GetHeld() != b.GetHeld() ||
		a.GetQueuedTokens() != b.GetQueuedTokens() || a.GetDraining() != b.GetDraining()
}
