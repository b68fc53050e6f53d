package roles

import (
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// NodeMetrics connects the counters of a node's parts to the table of metrics, one line for
// each. A scrape reads counters. The engine and the transfers fill histograms by callbacks.
//
// Invariant: each number is exported by exactly one role. In a process with a gateway,
// the gateway exports times and sizes of requests. Nothing is counted or decided here.
type NodeMetrics struct {
	Set   *metrics.Set
	Stats func() engine.Stats // the engine's
	// transfers adds what a role's side of KV transfers counts; nil until it runs.
	transfers atomic.Pointer[func(*logs.Counts)]
}

// Counts returns the counts for the log line of rates.
func (n *NodeMetrics) Counts() logs.Counts {
	s := n.Stats()
	c := logs.Counts{
		PromptTokens: s.PromptComputed, GeneratedTokens: s.Generated,
		PrefixQueries: s.Scheduler.PrefixQueries, PrefixHits: s.Scheduler.PrefixHits,
		ExternalQueries: s.Scheduler.ExternalQueries, ExternalHits: s.Scheduler.ExternalHits, Preemptions: s.Scheduler.Preemptions,
		Running: s.Scheduler.Running, Waiting: s.Scheduler.Waiting + s.Scheduler.Held, Deferred: s.Scheduler.Held, KVUsage: n.usage(),
	}
	if f := n.transfers.Load(); f != nil {
		(*f)(&c)
	}
	return c
}

// usage returns the share of blocks that are in use.
func (n *NodeMetrics) usage() float64 {
	u := n.Stats().Scheduler.Blocks
	return float64(u.Blocks-u.Free-u.Cached) / float64(u.Blocks)
}

// priceMetric exports the price of an hour of the process.
func priceMetric(set *metrics.Set, price float64) { set.Gauge(metrics.PricePerHour).Set(price) }

// counter connects a counter of the engine.
func (n *NodeMetrics) counter(id metrics.ID, f func(s engine.Stats) uint64, labels ...string) {
	n.Set.Counter(id, labels...).Func(func() float64 { return float64(f(n.Stats())) })
}

func (n *NodeMetrics) gauge(id metrics.ID, f func(s engine.Stats) int, labels ...string) {
	n.Set.Gauge(id, labels...).Func(func() float64 { return float64(f(n.Stats())) })
}

// Engine connects the engine's counters to their metrics; build is the program's
// version.
func (n *NodeMetrics) Engine(l *engine.Loaded, build, role string) {
	n.Set.Info(metrics.BuildInfo, build, role)
	n.Set.Info(metrics.CacheConfigInfo, strconv.Itoa(l.Scheduler.Pool.BlockTokens), l.KV.DType.String(), "True", strconv.Itoa(l.KV.Blocks))
	if places := l.Adapters.Places; places > 0 {
		n.Set.InfoFunc(metrics.LoRARequestsInfo, func() (float64, []string) {
			use := n.Stats().Adapters
			return float64(time.Now().UnixMilli()) / 1e3, []string{strconv.Itoa(places), strings.Join(use.Waiting, ","), strings.Join(use.Running, ",")}
		})
	}
	n.counter(metrics.PrefillTokensComputed, func(s engine.Stats) uint64 { return s.PromptComputed })
	n.counter(metrics.GenerationTokens, func(s engine.Stats) uint64 { return s.Generated })
	n.counter(metrics.PromptTokens, func(s engine.Stats) uint64 { return s.Prompts.Total() })
	n.counter(metrics.PromptTokensBySource, func(s engine.Stats) uint64 { return s.Prompts.Computed }, "local_compute")
	n.counter(metrics.PromptTokensBySource, func(s engine.Stats) uint64 { return s.Prompts.Cached }, "local_cache_hit")
	n.counter(metrics.PromptTokensBySource, func(s engine.Stats) uint64 { return s.Prompts.Arrived }, "external_kv_transfer")
	n.counter(metrics.PromptTokensCached, func(s engine.Stats) uint64 { return s.Prompts.Cached + s.Prompts.Arrived })
	n.counter(metrics.PromptTokensCachedBySource, func(s engine.Stats) uint64 { return s.Scheduler.PrefixHits }, "device")
	n.counter(metrics.PromptTokensCachedBySource, func(s engine.Stats) uint64 { return s.Scheduler.ExternalHits }, "p2p")
	n.counter(metrics.PrefixCacheQueries, func(s engine.Stats) uint64 { return s.Scheduler.PrefixQueries })
	n.counter(metrics.PrefixCacheHits, func(s engine.Stats) uint64 { return s.Scheduler.PrefixHits })
	n.counter(metrics.NumPreemptions, func(s engine.Stats) uint64 { return s.Scheduler.Preemptions })
	n.counter(metrics.EngineSteps, func(s engine.Stats) uint64 { return s.Steps })
	n.counter(metrics.AdmissionRejections, func(s engine.Stats) uint64 { return s.Scheduler.QueueFull }, "max_num_queued_reqs")

	n.gauge(metrics.NumRequestsRunning, func(s engine.Stats) int { return s.Scheduler.Running })
	n.gauge(metrics.NumRequestsWaiting, func(s engine.Stats) int { return s.Scheduler.Waiting + s.Scheduler.Held })
	n.gauge(metrics.NumRequestsWaitingByReason, func(s engine.Stats) int { return s.Scheduler.Waiting }, "capacity")
	n.gauge(metrics.NumRequestsWaitingByReason, func(s engine.Stats) int { return s.Scheduler.Held }, "deferred")
	n.Set.Gauge(metrics.KVCacheUsage).Func(n.usage)
	n.gauge(metrics.KVBlocks, func(s engine.Stats) int { return s.Scheduler.Blocks.Free }, "free")
	n.gauge(metrics.KVBlocks, func(s engine.Stats) int { return s.Scheduler.Blocks.Cached }, "cached")
	n.gauge(metrics.KVBlocks, func(s engine.Stats) int { return s.Scheduler.Blocks.Used }, "used")
	n.gauge(metrics.KVBlocks, func(s engine.Stats) int { return s.Scheduler.Blocks.Pinned }, "pinned")
	n.gauge(metrics.KVBlocksPinned, func(s engine.Stats) int { return s.Scheduler.Blocks.Arriving }, "in")
	n.gauge(metrics.KVBlocksPinned, func(s engine.Stats) int { return s.Scheduler.Blocks.Leaving }, "out")
	if n.Set.Has(metrics.DecodePressure) {
		n.Set.Gauge(metrics.DecodePressure).Func(func() float64 {
			s := n.Stats().Scheduler
			return max(n.usage(), float64(s.Running+s.Waiting+s.Held)/float64(l.Scheduler.MaxSeqs))
		})
	}
	n.gauge(metrics.QueueLength, func(s engine.Stats) int { return s.Scheduler.Waiting + s.Scheduler.Held }, metrics.QueueEngine)
	n.Set.Gauge(metrics.QueueLimit, metrics.QueueEngine).Set(float64(l.Scheduler.MaxQueued))
	n.gauge(metrics.QueueLength, func(s engine.Stats) int { return s.Scheduler.Running }, metrics.QueueRunning)
	n.Set.Gauge(metrics.QueueLimit, metrics.QueueRunning).Set(float64(l.Scheduler.MaxSeqs))
}

// WatchEngine returns the engine's Watch, which fills the histograms. In a process with a
// gateway, the gateway exports the times and sizes of requests.
func WatchEngine(set *metrics.Set) engine.Watch {
	tokens, steps := set.Histogram(metrics.IterationTokens), set.Histogram(metrics.EngineStepSeconds)
	queue, inference := set.Histogram(metrics.RequestQueueTime), set.Histogram(metrics.RequestInferenceTime)
	prefills, preempted := set.Histogram(metrics.RequestPrefillTime), set.Histogram(metrics.RequestNumPreemptions)
	computed := set.Histogram(metrics.RequestPrefillKVComputed)
	work := workCounters(set)
	w := engine.Watch{
		Step: func(s scheduler.Shape, d time.Duration) {
			tokens.Observe(float64(s.Chunk + s.Streams))
			steps.Observe(d.Seconds())
			work(s, d)
		},
		OnFinish: func(l engine.RequestStats) {
			if l.First == 0 || l.Finish == engine.FinishError || !l.Job && l.Finish == 0 {
				return // the times of a failed request show the failure, not the service
			}
			queue.Observe((l.Admitted - l.Added).Seconds())
			prefills.Observe((l.First - l.Admitted).Seconds())
			inference.Observe((max(l.First, l.Last) - l.Admitted).Seconds())
			preempted.Observe(float64(l.Preemptions))
			computed.Observe(float64(l.Prompt - l.Cached - l.Arrived))
		},
	}
	if !set.Has(metrics.TimeToFirstToken) || set.Has(metrics.GatewayAttempts) {
		return w
	}
	first, next := set.Histogram(metrics.TimeToFirstToken), set.Histogram(metrics.InterTokenLatency)
	w.First = func(d time.Duration) { first.Observe(d.Seconds()) }
	w.Next = func(d time.Duration) { next.Observe(d.Seconds()) }
	both := w.OnFinish
	prompt, output, most := set.Histogram(metrics.RequestPromptTokens), set.Histogram(metrics.RequestGenerationTokens), set.Histogram(metrics.RequestParamsMaxTokens)
	total, decoding, perToken := set.Histogram(metrics.E2ERequestLatency), set.Histogram(metrics.RequestDecodeTime), set.Histogram(metrics.TimePerOutputToken)
	w.OnFinish = func(l engine.RequestStats) {
		both(l)
		if l.Finish != engine.FinishStop && l.Finish != engine.FinishLength {
			return
		}
		prompt.Observe(float64(l.Prompt))
		total.Observe((l.Ended - l.Added).Seconds())
		if l.Output == 0 { // a vector
			return
		}
		output.Observe(float64(l.Output))
		most.Observe(float64(l.MaxTokens))
		decoding.Observe((l.Last - l.First).Seconds())
		if l.Output > 1 {
			perToken.Observe((l.Last - l.First).Seconds() / float64(l.Output-1))
		}
	}
	return w
}

// workCounters returns a function that counts the work and the time of a step.
func workCounters(set *metrics.Set) func(s scheduler.Shape, d time.Duration) {
	type kind struct{ steps, sequences, context, prompt, attended, seconds *metrics.Value }
	kinds := make([]kind, len(metrics.StepKinds))
	for i, step := range metrics.StepKinds {
		k := &kinds[i]
		for j, v := range []**metrics.Value{&k.steps, &k.sequences, &k.context, &k.prompt, &k.attended} {
			*v = set.Counter(metrics.EngineWork, step, metrics.StepWork[j])
		}
		k.seconds = set.Counter(metrics.EngineWorkSeconds, step)
	}
	return func(s scheduler.Shape, d time.Duration) {
		k := &kinds[metrics.StepMixed]
		switch {
		case s.Chunk == 0:
			k = &kinds[metrics.StepDecode]
		case s.Streams == 0:
			k = &kinds[metrics.StepPrefill]
		}
		k.steps.Inc()
		k.sequences.Add(float64(s.Streams))
		k.context.Add(float64(s.ContextSum))
		k.prompt.Add(float64(s.Chunk))
		k.attended.Add(s.Attended)
		k.seconds.Add(d.Seconds())
	}
}

// counters returns a function that connects counters to parts of stats.
func counters[S any](set *metrics.Set, stats func() S) func(id metrics.ID, f func(S) uint64, labels ...string) {
	return func(id metrics.ID, f func(S) uint64, labels ...string) {
		set.Counter(id, labels...).Func(func() float64 { return float64(f(stats())) })
	}
}

// Decode connects a decode role's counters.
func (n *NodeMetrics) Decode(stats func() decode.Counters, owned func() (now, limit int), breakers func(state string) int) {
	for _, state := range metrics.BreakerStates {
		n.Set.Gauge(metrics.DecodePrefillBreakers, state).Func(func() float64 { return float64(breakers(state)) })
	}
	counter := counters(n.Set, stats)
	counter(metrics.RequestSuccess, func(c decode.Counters) uint64 { return c.FinishedStop }, metrics.ReasonStop)
	counter(metrics.RequestSuccess, func(c decode.Counters) uint64 { return c.FinishedLength }, metrics.ReasonLength)
	counter(metrics.RequestSuccess, func(c decode.Counters) uint64 { return c.FinishedAbort }, metrics.ReasonAbort)
	counter(metrics.RequestSuccess, func(c decode.Counters) uint64 { return c.FinishedError }, metrics.ReasonError)
	counter(metrics.DecodePrefills, func(c decode.Counters) uint64 { return c.RemotePrefills }, "remote")
	counter(metrics.DecodePrefills, func(c decode.Counters) uint64 { return c.LocalPrefills }, "local")
	counter(metrics.DecodePrefillFailures, func(c decode.Counters) uint64 { return c.PrefillFailures })
	counter(metrics.DecodeDroppedStreams, func(c decode.Counters) uint64 { return c.DroppedStreams })
	counter(metrics.DecodeRefused, func(c decode.Counters) uint64 { return c.Refused })
	n.counter(metrics.AdmissionRejections, func(s engine.Stats) uint64 { return s.Scheduler.QueueFull + stats().Overloaded }, "max_num_queued_reqs")
	n.counter(metrics.ExternalPrefixCacheQueries, func(s engine.Stats) uint64 { return s.Scheduler.ExternalQueries })
	n.counter(metrics.ExternalPrefixCacheHits, func(s engine.Stats) uint64 { return s.Scheduler.ExternalHits })
	n.counter(metrics.SpecDrafts, func(s engine.Stats) uint64 { return s.Scheduler.Drafts })
	n.counter(metrics.SpecDraftTokens, func(s engine.Stats) uint64 { return s.Scheduler.Drafted })
	n.counter(metrics.SpecAcceptedTokens, func(s engine.Stats) (sum uint64) {
		for _, tokens := range s.Scheduler.Accepted {
			sum += tokens
		}
		return sum
	})
	for place := range scheduler.DraftLimit {
		n.counter(metrics.SpecAcceptedPerPos, func(s engine.Stats) uint64 { return s.Scheduler.Accepted[place] }, strconv.Itoa(place))
	}
	n.counter(metrics.GrammarMasks, func(s engine.Stats) uint64 { return s.Masks.Cached }, "cached")
	n.counter(metrics.GrammarMasks, func(s engine.Stats) uint64 { return s.Masks.Computed }, "computed")
	n.counter(metrics.GrammarSteps, func(s engine.Stats) uint64 { return s.Masks.Steps })
	n.counter(metrics.GrammarSatOut, func(s engine.Stats) uint64 { return s.SatOut })
	n.counter(metrics.GrammarEnded, func(s engine.Stats) uint64 { return s.Masks.Ended })
	n.gauge(metrics.GrammarsCached, func(s engine.Stats) int { return s.Masks.Grammars })
	n.gauge(metrics.GrammarBytes, func(s engine.Stats) int { return s.Masks.Bytes })
	n.gauge(metrics.GrammarWaiting, func(s engine.Stats) int { return s.Masks.Waiting })
	n.gauge(metrics.NumRequestsKVFetch, func(s engine.Stats) int { return s.Scheduler.Held - s.Scheduler.Fetching }, "waiting_to_start")
	n.gauge(metrics.NumRequestsKVFetch, func(s engine.Stats) int { return s.Scheduler.Fetching }, "in_progress")
	n.gauge(metrics.NumRequestsKVFetch, func(s engine.Stats) int { return s.Scheduler.Fetched }, "completed_waiting")
	n.gauge(metrics.QueueLength, func(s engine.Stats) int { return s.Scheduler.Blocks.Arriving }, metrics.QueueArriving)
	n.gauge(metrics.QueueLimit, func(s engine.Stats) int { return s.Scheduler.ArrivingLimit }, metrics.QueueArriving)
	n.Set.Gauge(metrics.QueueLength, metrics.QueueAttempts).Func(func() float64 { now, _ := owned(); return float64(now) })
	n.Set.Gauge(metrics.QueueLimit, metrics.QueueAttempts).Func(func() float64 { _, limit := owned(); return float64(limit) })
}

// Reader connects the counters of a decode node's side of transfers.
func (n *NodeMetrics) Reader(stats func() kvtransfer.ReaderStats) {
	counter := counters(n.Set, stats)
	gauge := func(state string, f func(kvtransfer.ReaderStats) int) {
		n.Set.Gauge(metrics.KVLeases, state).Func(func() float64 { return float64(f(stats())) })
	}
	counter(metrics.KVTransferBytes, func(s kvtransfer.ReaderStats) uint64 { return s.PayloadBytes }, "in")
	counter(metrics.KVTransferSharedBytes, func(s kvtransfer.ReaderStats) uint64 { return s.SharedBytes }, "in")
	counter(metrics.KVTransferRDMABytes, func(s kvtransfer.ReaderStats) uint64 { return s.FabricBytes }, "in")
	counter(metrics.KVTransfers, func(s kvtransfer.ReaderStats) uint64 { return s.LeasesArrived }, "in")
	counter(metrics.KVTransferFailures, func(s kvtransfer.ReaderStats) uint64 { return s.LeasesFailed }, "in")
	counter(metrics.KVTransferPieces, func(s kvtransfer.ReaderStats) uint64 { return s.Pieces }, "in")
	counter(metrics.KVLeasesExpired, func(s kvtransfer.ReaderStats) uint64 { return s.LeasesExpired })
	counter(metrics.FencedWrites, func(s kvtransfer.ReaderStats) uint64 { return s.StalePieces }, "stale")
	counter(metrics.FencedWrites, func(s kvtransfer.ReaderStats) uint64 { return s.DuplicatePieces }, "duplicate")
	counter(metrics.FencedWrites, func(s kvtransfer.ReaderStats) uint64 { return s.ChecksumFailures }, "corrupt")
	gauge("granted", func(s kvtransfer.ReaderStats) int { return s.Granted })
	gauge("arriving", func(s kvtransfer.ReaderStats) int { return s.Arriving })
	gauge("quarantined", func(s kvtransfer.ReaderStats) int { return s.Quarantined })
	add := func(c *logs.Counts) {
		s := stats()
		c.Transfers, c.TransferFailures, c.TransferBytes = s.LeasesArrived, s.LeasesFailed, s.PayloadBytes
	}
	n.transfers.Store(&add)
}

// BlockEvents connects the counter of block events that were not sent.
func (n *NodeMetrics) BlockEvents(dropped func() uint64) {
	n.Set.Counter(metrics.BlockEventsDropped).Func(func() float64 { return float64(dropped()) })
}

// KVReceived fills the histograms of transfers that a decode node receives.
func KVReceived(set *metrics.Set) func(kvtransfer.Event) {
	first, last := set.Histogram(metrics.KVTransferFirstByte), set.Histogram(metrics.KVTransferLastByte)
	return func(e kvtransfer.Event) {
		if e.Kind == kvtransfer.Arrived {
			first.Observe(e.FirstByte.Seconds())
			last.Observe(e.LastByte.Seconds())
		}
	}
}

// KVSent fills the histograms of transfers that a prefill node sends.
func KVSent(set *metrics.Set) func(prefill.Transfer) {
	hidden, exposed := set.Histogram(metrics.KVTransferHidden), set.Histogram(metrics.KVTransferExposed)
	return func(t prefill.Transfer) {
		hidden.Observe(t.Hidden.Seconds())
		exposed.Observe(t.Exposed.Seconds())
	}
}

// Prefill connects a prefill role's counters and those of its pushes. tokens has the prompt tokens
// of jobs that the engine does not know yet.
func (n *NodeMetrics) Prefill(jobs func() prefill.Counters, jobsHeld func() (waiting, asking, all int), tokens func() int, limit int, stats func() kvtransfer.WriterStats) {
	job, counter := counters(n.Set, jobs), counters(n.Set, stats)
	job(metrics.PrefillJobs, func(c prefill.Counters) uint64 { return c.Done }, "done")
	job(metrics.PrefillJobs, func(c prefill.Counters) uint64 { return c.Cancelled }, "cancelled")
	job(metrics.PrefillJobs, func(c prefill.Counters) uint64 { return c.Failed }, "failed")
	job(metrics.PrefillJobs, func(c prefill.Counters) uint64 { return c.Refused }, "refused")
	n.counter(metrics.AdmissionRejections, func(s engine.Stats) uint64 { return s.Scheduler.QueueFull + jobs().Overloaded }, "max_num_queued_reqs")
	counter(metrics.KVTransferBytes, func(s kvtransfer.WriterStats) uint64 { return s.PayloadBytes }, "out")
	counter(metrics.KVTransferSharedBytes, func(s kvtransfer.WriterStats) uint64 { return s.SharedBytes }, "out")
	counter(metrics.KVTransferRDMABytes, func(s kvtransfer.WriterStats) uint64 { return s.FabricBytes }, "out")
	counter(metrics.KVTransfers, func(s kvtransfer.WriterStats) uint64 { return s.PushesDone }, "out")
	counter(metrics.KVTransferFailures, func(s kvtransfer.WriterStats) uint64 { return s.PushesFailed }, "out")
	counter(metrics.KVTransferPieces, func(s kvtransfer.WriterStats) uint64 { return s.Pieces }, "out")
	counter(metrics.KVTransferRetries, func(s kvtransfer.WriterStats) uint64 { return s.Retries })

	hidden, exposed := n.Set.Histogram(metrics.KVTransferHidden), n.Set.Histogram(metrics.KVTransferExposed)
	add := func(c *logs.Counts) {
		s := stats()
		c.Transfers, c.TransferFailures, c.TransferBytes = s.PushesDone, s.PushesFailed, s.PayloadBytes
		c.TransferHidden = time.Duration(hidden.Sum() * float64(time.Second))
		c.TransferExposed = time.Duration(exposed.Sum() * float64(time.Second))
	}
	n.transfers.Store(&add)
	n.Set.Gauge(metrics.PrefillQueueSeconds).Func(func() float64 {
		s := n.Stats()
		if s.PromptRate <= 0 {
			return 0
		}
		return float64(s.Scheduler.Pending+tokens()) / s.PromptRate
	})
	queued := func() int { waiting, _, _ := jobsHeld(); return waiting }
	asking := func() int { _, asking, _ := jobsHeld(); return asking }
	n.gauge(metrics.NumRequestsWaiting, func(s engine.Stats) int { return s.Scheduler.Waiting + queued() + asking() })
	n.gauge(metrics.NumRequestsWaitingByReason, func(engine.Stats) int { return asking() }, "deferred")
	n.gauge(metrics.NumRequestsWaitingByReason, func(s engine.Stats) int { return s.Scheduler.Waiting + queued() }, "capacity")
	n.Set.Gauge(metrics.QueueLength, metrics.QueuePrefill).Func(func() float64 { return float64(queued()) })
	n.Set.Gauge(metrics.QueueLimit, metrics.QueuePrefill).Set(float64(limit))
	n.Set.Gauge(metrics.QueueLength, metrics.QueuePushes).Func(func() float64 { return float64(stats().Pushes) })
	n.Set.Gauge(metrics.QueueLimit, metrics.QueuePushes).Set(float64(stats().MaxPushes))
}

// RPCMetrics connects the counters of a process' connections to other nodes.
func RPCMetrics(set *metrics.Set, all ...*rpc.Counters) {
	counter := func(id metrics.ID, f func(*rpc.Counters) *atomic.Uint64, labels ...string) {
		set.Counter(id, labels...).Func(func() (sum float64) {
			for _, c := range all {
				sum += float64(f(c).Load())
			}
			return sum
		})
	}
	counter(metrics.RPCFrames, func(c *rpc.Counters) *atomic.Uint64 { return &c.FramesIn }, "in")
	counter(metrics.RPCFrames, func(c *rpc.Counters) *atomic.Uint64 { return &c.FramesOut }, "out")
	counter(metrics.RPCBytes, func(c *rpc.Counters) *atomic.Uint64 { return &c.BytesIn }, "in")
	counter(metrics.RPCBytes, func(c *rpc.Counters) *atomic.Uint64 { return &c.BytesOut }, "out")
	counter(metrics.RPCOutboxFull, func(c *rpc.Counters) *atomic.Uint64 { return &c.OutboxFull })
	counter(metrics.RPCSilent, func(c *rpc.Counters) *atomic.Uint64 { return &c.Silent })
	counter(metrics.RPCRefused, func(c *rpc.Counters) *atomic.Uint64 { return &c.Refused })
	counter(metrics.RPCForbidden, func(c *rpc.Counters) *atomic.Uint64 { return &c.Forbidden })
	counter(metrics.RPCDialErrors, func(c *rpc.Counters) *atomic.Uint64 { return &c.DialErrors })
	set.Gauge(metrics.RPCConnections).Func(func() (sum float64) {
		for _, c := range all {
			sum += float64(c.Conns.Load())
		}
		return sum
	})
}

// traceMetrics connects the tracer's counters.
func traceMetrics(set *metrics.Set, t *trace.Tracer) {
	set.Counter(metrics.TraceSpans, "sent").Func(func() float64 { sent, _ := t.Counts(); return float64(sent) })
	set.Counter(metrics.TraceSpans, "failed").Func(func() float64 { _, failed := t.Counts(); return float64(failed) })
}
