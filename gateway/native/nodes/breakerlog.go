package nodes

import (
	"log/slog"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
)

// probeLogInterval bounds how often the probes of an unreachable node are logged. Each probe
// changes its breaker's state twice.
const probeLogInterval = 30 * time.Second

// breakerLog logs the state changes of one node's breaker: those from and to closed at once, and
// those of probes at most once in probeLogInterval, with their number.
type breakerLog struct {
	log  *slog.Logger
	node string

	mu      sync.Mutex
	logged  time.Time
	omitted int // changes since then
}

func (b *breakerLog) changed(now time.Time, from, to string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if from != breaker.Closed && to != breaker.Closed && now.Sub(b.logged) < probeLogInterval {
		b.omitted++
		return
	}
	b.log.Info("node's breaker", "node", b.node, "from", from, "to", to, "omitted", b.omitted)
	b.logged, b.omitted = now, 0
}
