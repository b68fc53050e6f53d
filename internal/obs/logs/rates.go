package logs

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"
)

// RatesInterval is how often a node's rates are logged.
const RatesInterval = 10 * time.Second

// Counts are the numbers in lines of rates. Counters only grow.
type Counts struct {
	PromptTokens, GeneratedTokens   uint64
	PrefixQueries, PrefixHits       uint64 // tokens
	ExternalQueries, ExternalHits   uint64 // tokens
	Preemptions                     uint64
	Running, Waiting, Deferred      int     // Waiting includes Deferred
	KVUsage                         float64 // share of blocks in use
	Transfers, TransferFailures     uint64
	TransferBytes                   uint64
	TransferHidden, TransferExposed time.Duration // sums over Transfers; of prefill nodes
}

// Rates logs a line for every interval with work, and one for the first idle interval, until
// ctx ends.
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
		busy := c.Running+c.Waiting > 0 || c.Transfers != last.Transfers || c.PromptTokens != last.PromptTokens || c.GeneratedTokens != last.GeneratedTokens
		if busy || !idle {
			log.Info(Line(last, c, now.Sub(at)))
			if line := TransferLine(last, c, now.Sub(at)); line != "" {
				log.Info(line)
			}
		}
		last, at, idle = c, now, !busy
	}
}

// Line returns the text for the interval between two counts: throughputs, and hit rates,
// which are "n/a" without look-ups. The parts in brackets in docs/logs.md are present only if
// they are not zero.
func Line(from, to Counts, d time.Duration) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, Waiting: %d reqs",
		float64(to.PromptTokens-from.PromptTokens)/d.Seconds(), float64(to.GeneratedTokens-from.GeneratedTokens)/d.Seconds(), to.Running, to.Waiting)
	if to.Deferred > 0 {
		fmt.Fprintf(&b, ", Deferred: %d reqs", to.Deferred)
	}
	if n := to.Preemptions - from.Preemptions; n > 0 {
		fmt.Fprintf(&b, ", Preemptions: %d", n)
	}
	fmt.Fprintf(&b, ", KV cache usage: %.1f%%, Prefix cache hit rate: %s", 100*to.KVUsage, rate(to.PrefixHits-from.PrefixHits, to.PrefixQueries-from.PrefixQueries))
	if to.ExternalQueries > 0 {
		fmt.Fprintf(&b, ", External prefix cache hit rate: %s", rate(to.ExternalHits-from.ExternalHits, to.ExternalQueries-from.ExternalQueries))
	}
	return b.String()
}

// TransferLine returns a second line about KV transfers in the interval; empty without any.
func TransferLine(from, to Counts, d time.Duration) string {
	done, failed := to.Transfers-from.Transfers, to.TransferFailures-from.TransferFailures
	if done+failed == 0 {
		return ""
	}
	const mb = 1 << 20
	size := float64(to.TransferBytes-from.TransferBytes) / mb
	var b strings.Builder
	fmt.Fprintf(&b, "KV Transfer metrics: Num successful transfers=%d", done)
	if done > 0 {
		fmt.Fprintf(&b, ", Avg MB per transfer=%.3f", size/float64(done))
		if to.TransferHidden+to.TransferExposed > 0 {
			mean := func(a, b time.Duration) float64 { return float64((b - a).Microseconds()) / 1000 / float64(done) }
			fmt.Fprintf(&b, ", Avg hidden time (ms)=%.3f, Avg exposed time (ms)=%.3f",
				mean(from.TransferHidden, to.TransferHidden), mean(from.TransferExposed, to.TransferExposed))
		}
	}
	fmt.Fprintf(&b, ", Throughput (MB/s)=%.3f, Num failed transfers=%d", size/d.Seconds(), failed)
	return b.String()
}

func rate(hits, queries uint64) string {
	if queries == 0 {
		return "n/a"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(hits)/float64(queries))
}
