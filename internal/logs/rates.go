package logs

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// RatesInterval is how often a node's rates are logged.
const RatesInterval = 10 * time.Second

// Counts are what a line of rates is made of. Counters only grow.
type Counts struct {
	PromptTokens, GeneratedTokens uint64
	PrefixQueries, PrefixHits     uint64 // tokens
	Running, Waiting              int
	KVUsage                       float64 // share of blocks in use
}

// Rates logs a line every interval in which something happened, and one more
// after the last of it, until ctx ends.
func Rates(ctx context.Context, log *slog.Logger, interval time.Duration, counts func() Counts) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	last, at, idle := counts(), time.Now(), true
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c, now := counts(), time.Now()
		busy := c.Running+c.Waiting > 0 || c.PromptTokens != last.PromptTokens || c.GeneratedTokens != last.GeneratedTokens
		if busy || !idle {
			log.Info(Line(last, c, now.Sub(at)))
		}
		last, at, idle = c, now, !busy
	}
}

// Line is the text between two counts: throughputs are over the interval, the
// hit rate is over it as well, or "n/a" when nothing was looked up.
func Line(from, to Counts, d time.Duration) string {
	rate := func(a, b uint64) float64 { return float64(b-a) / d.Seconds() }
	hits := "n/a"
	if q := to.PrefixQueries - from.PrefixQueries; q > 0 {
		hits = fmt.Sprintf("%.1f%%", 100*float64(to.PrefixHits-from.PrefixHits)/float64(q))
	}
	return fmt.Sprintf("Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %s",
		rate(from.PromptTokens, to.PromptTokens), rate(from.GeneratedTokens, to.GeneratedTokens),
		to.Running, to.Waiting, 100*to.KVUsage, hits)
}
