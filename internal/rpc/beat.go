package rpc

import (
	"context"
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

// loadChanged says whether gateways would route otherwise.
func loadChanged(a, b *nodepb.Stats) bool {
	return a.GetRunning() != b.GetRunning() || a.GetWaiting() != b.GetWaiting() || a.GetHeld() != b.GetHeld() ||
		a.GetQueuedTokens() != b.GetQueuedTokens() || a.GetDraining() != b.GetDraining()
}
