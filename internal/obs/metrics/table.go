// Package metrics holds every metric of Tandem in one literal table and serves
// them in Prometheus' text format.
//
// A Set is made from the table for the roles of one process: each row becomes
// one series per combination of its label values, all of them created at
// start, so that a series never appears late and recording one is an atomic
// addition. A scrape walks the table in order.
//
// Invariant: nothing is exposed that the table does not name, and label values
// come from the table or from the process' own configuration, never from a
// request. So the number of series is known at start.
//
// The package does not measure: the packages that own a number record it, or
// give a function that is read at scrape time.
package metrics

// ID names a row of the table.
type ID int

// Every metric. The order is that of docs/metrics.md.
const (
	BuildInfo ID = iota
	LoRARequestsInfo

	// Engine, on nodes.
	NumRequestsRunning
	NumRequestsWaiting
	NumRequestsWaitingByReason
	NumRequestsKVFetch
	KVCacheUsage
	PrefixCacheQueries
	PrefixCacheHits
	ExternalPrefixCacheQueries
	ExternalPrefixCacheHits
	NumPreemptions
	PromptTokens
	PromptTokensBySource
	PromptTokensCached
	PromptTokensCachedBySource
	GenerationTokens
	RequestSuccess
	AdmissionRejections
	IterationTokens
	SpecDrafts
	SpecDraftTokens
	SpecAcceptedTokens
	SpecAcceptedPerPos
	CacheConfigInfo

	// A request's times and sizes.
	RequestPromptTokens
	RequestGenerationTokens
	RequestMaxNumGenerationTokens
	RequestParamsN
	RequestParamsMaxTokens
	TimeToFirstToken
	InterTokenLatency
	TimePerOutputToken
	E2ERequestLatency
	RequestQueueTime
	RequestInferenceTime
	RequestPrefillTime
	RequestDecodeTime
	RequestNumPreemptions
	RequestPrefillKVComputed

	// Own, on nodes.
	PrefillTokensComputed
	EngineSteps
	EngineStepSeconds
	KVBlocks
	KVBlocksPinned
	DecodePrefills
	DecodePrefillFailures
	DecodePrefillBreakers
	DecodeDroppedStreams
	DecodeRefused
	PrefillJobs
	KVTransferBytes
	KVTransferSharedBytes
	KVTransferRDMABytes
	KVTransfers
	KVTransferFailures
	KVTransferPieces
	KVTransferRetries
	KVTransferHidden
	KVTransferExposed
	KVTransferFirstByte
	KVTransferLastByte
	KVLeases
	KVLeasesExpired
	FencedWrites
	BlockEventsDropped

	// Own, at the gateway.
	HTTPRequests
	GatewayInFlight
	GatewayAttempts
	GatewayAttemptFailures
	GatewayResumes
	GatewayClassChanges
	GatewayNodesLost
	GatewayRefused
	GatewayEvictedConns
	GatewayKeyFileBad
	GatewayQueueTime
	GatewayReloadFailed
	GatewayStreamBuffers
	GatewayStaleTokens
	GatewayStreamsPaused
	GatewayStreamsAborted
	GatewayRoutes
	GatewayPredictedCached
	GatewayActualCached
	GatewayPredictedFirst
	GatewayActualFirst
	GatewayFirstError
	GatewayUsableDecodeNodes
	GatewayBreakers
	GatewayUpstreams
	GatewayUpstreamBreakers
	GatewayUpstreamRequests
	GatewayUntokenized
	GatewayRetryBudget
	TokenizerCacheLookups
	TokenizerCacheBytes

	// Own, everywhere.
	QueueLength
	QueueLimit
	RPCFrames
	RPCBytes
	RPCConnections
	RPCOutboxFull
	RPCSilent
	RPCRefused
	RPCForbidden
	RPCDialErrors
	AcceptErrors
	TraceSpans

	count // number of rows; not a metric
)

// Kind is a metric's type.
type Kind uint8

// Kinds. An info is a gauge, of 1 unless it says otherwise, whose labels are facts of the process; it is
// exposed once they are known.
const (
	KindCounter Kind = iota + 1
	KindGauge
	KindHistogram
	KindInfo
)

// Role is a set of roles, as bits.
type Role uint8

// Roles; nodes that do both or all are their union.
const (
	Gateway Role = 1 << iota
	Prefill
	Decode

	nodes = Prefill | Decode
	all   = Gateway | nodes
)

// Label is a label with every value it can take; an info's has none.
type Label struct {
	Name   string
	Values []string
	Of     map[string]Role // values that only some roles have
}

// Row describes one metric.
type Row struct {
	Name    string // as exposed; counters end in _total
	Kind    Kind
	Roles   Role
	Labels  []Label   // besides model_name and engine, see common
	Buckets []float64 // upper bounds of a histogram, ascending, without +Inf
	Help    string
}

// common are the labels that a row carries besides its own: vllm: rows both of
// vLLM's, but for two that it labels in another way.
func common(id ID) []string {
	switch id {
	case AdmissionRejections:
		return []string{"model_name"}
	case CacheConfigInfo:
		return []string{"engine"}
	}
	if Rows[id].Name[0] == 'v' {
		return []string{"engine", "model_name"}
	}
	return nil
}

// Label values that several packages use.
const (
	ReasonStop   = "stop"
	ReasonLength = "length"
	ReasonAbort  = "abort"
	ReasonError  = "error"
)

var (
	finished   = []Label{{Name: "finished_reason", Values: []string{ReasonStop, ReasonLength, ReasonAbort, ReasonError}}}
	directions = []Label{{Name: "direction", Values: []string{"in", "out"}}}
	breakers   = []Label{{Name: "state", Values: BreakerStates}}
	tasks      = Label{Name: "task", Values: UpstreamTasks}

	// Bounds of vLLM's histograms: dashboards depend on them.
	latencyBuckets = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	ttftBuckets    = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBuckets     = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	iterBuckets    = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	tokenBuckets   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000}
	nBuckets       = []float64{1, 2, 5, 10, 20}
	preemptBuckets = []float64{1, 2, 3, 4, 5, 10, 20}

	// A step of a small model on a CPU takes a millisecond, one of a large model
	// with a full chunk a second.
	stepBuckets = []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10}
	// Those of vLLM's connectors, with finer ones below.
	transferBuckets = []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5}
)

// The values of labels with more than a few; each list ends in what stands for
// everything else.
var (
	HTTPRoutes = []string{"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
		"/livez", "/readyz", "/health", "/ping", "/version", "/load", "/metrics", "/debug/targets", "/log-level", "/admin/drain/{node}",
		"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/openapi.json", "/docs", "/debug/nodes", "/debug/route", "other"}
	// HTTPStatuses are what the gateway itself answers, and classes for the others that
	// upstreams answer.
	HTTPStatuses = []string{"200", "204", "400", "401", "403", "404", "405", "408", "413", "415", "417", "429", "431", "499", "500", "502", "503", "504", "505",
		"2xx", "3xx", "4xx", "5xx", "other"}
	AttemptFailures = []string{"connection", "overloaded", "draining", "mismatch", "invalid", "timeout", "internal", "other"}
	BreakerStates   = []string{"closed", "half-open", "open"}
	UpstreamStates  = []string{"up", "down", "new", "leaving"}
	UpstreamTasks   = []string{"serve", "prefill", "decode"}
	StreamAborts    = []string{"upstream", "client_gone", "slow_client", "deadline", "shutdown"}
	RouteReasons    = []string{"prefix", "cached", "load", "health", "policy", "no_decode", "no_room", "remote", "local", "short", "no_prefill"}
)

// Queues, and whose they are. Each has a bound.
const (
	QueueRequests      = "requests"        // being answered by a gateway
	QueueConnections   = "connections"     // of clients
	QueueWaiting       = "waiting"         // requests that wait in a gateway for the fleet
	QueueWaitingTokens = "waiting_tokens"  // of their prompts
	QueueBodies        = "body_bytes"      // of large requests, in a gateway
	QueueEngine        = "engine_waiting"  // requests and jobs that wait for the engine or for KV
	QueueRunning       = "engine_running"  // in the engine's steps
	QueueArriving      = "arriving_blocks" // KV blocks that other nodes may write
	QueueAttempts      = "attempts"        // owned by a decode node
	QueuePrefill       = "prefill_jobs"    // that wait for their turn to ask for a grant
	QueuePushes        = "pushes"          // KV transfers under way
)

var queues = []Label{{
	Name:   "queue",
	Values: []string{QueueRequests, QueueConnections, QueueWaiting, QueueWaitingTokens, QueueBodies, QueueEngine, QueueRunning, QueueArriving, QueueAttempts, QueuePrefill, QueuePushes},
	Of: map[string]Role{
		QueueRequests: Gateway, QueueConnections: Gateway, QueueWaiting: Gateway, QueueWaitingTokens: Gateway, QueueBodies: Gateway, QueueEngine: nodes, QueueRunning: nodes, QueueArriving: Decode,
		QueueAttempts: Decode, QueuePrefill: Prefill, QueuePushes: Prefill,
	},
}}
