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

// Every metric. The order is the order of a scrape.
const (
	BuildInfo ID = iota

	// Engine, on nodes.
	NumRequestsRunning
	NumRequestsWaiting
	NumRequestsHeld
	KVCacheUsage
	PrefixCacheQueries
	PrefixCacheHits
	NumPreemptions
	GenerationTokens
	RequestSuccess

	// Own, on nodes.
	PrefillTokensComputed
	KVTransferBytes
	KVTransferFailures
	EngineSteps
	KVBlocks

	// A request's times and sizes, at the gateway.
	RequestPromptTokens
	RequestGenerationTokens
	RequestParamsN
	RequestParamsMaxTokens
	TimeToFirstToken
	InterTokenLatency
	TimePerOutputToken
	E2ERequestLatency

	// Own, at the gateway.
	HTTPRequests
	GatewayInFlight
	GatewayAttempts
	GatewayAttemptFailures
	GatewayResumes
	GatewayStaleTokens
	GatewayStreamsPaused
	GatewayStreamsAborted
	GatewayRoutes
	GatewayUsableDecodeNodes

	count // number of rows; not a metric
)

// Kind is a metric's type.
type Kind uint8

// Kinds.
const (
	KindCounter Kind = iota + 1
	KindGauge
	KindHistogram
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

// Label is a label with every value it can take.
type Label struct {
	Name   string
	Values []string
}

// Row describes one metric.
type Row struct {
	Name    string // as exposed; counters end in _total
	Kind    Kind
	Roles   Role
	Labels  []Label   // besides model_name and engine, which vllm: rows carry
	Buckets []float64 // upper bounds of a histogram, ascending, without +Inf
	Help    string
}

// Label values that several packages use.
const (
	ReasonStop   = "stop"
	ReasonLength = "length"
	ReasonAbort  = "abort"
	ReasonError  = "error"
)

var (
	finished = []Label{{"finished_reason", []string{ReasonStop, ReasonLength, ReasonAbort, ReasonError}}}

	// Bounds of vLLM's histograms: dashboards depend on them.
	latencyBuckets = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	ttftBuckets    = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBuckets     = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	tokenBuckets   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000}
	nBuckets       = []float64{1, 2, 5, 10, 20}
)

// Rows is the table.
var Rows = [count]Row{
	BuildInfo: {"tandem:build_info", KindGauge, all, nil, nil, "Always 1; says that the process runs."},

	NumRequestsRunning: {"vllm:num_requests_running", KindGauge, nodes, nil, nil, "Requests that take part in the engine's steps."},
	NumRequestsWaiting: {"vllm:num_requests_waiting", KindGauge, nodes, nil, nil, "Requests queued for the engine."},
	NumRequestsHeld:    {"tandem:num_requests_held", KindGauge, nodes, nil, nil, "Requests that wait for KV from another node."},
	KVCacheUsage:       {"vllm:kv_cache_usage_perc", KindGauge, nodes, nil, nil, "Share of KV blocks in use; 1 is all of them."},
	PrefixCacheQueries: {"vllm:prefix_cache_queries_total", KindCounter, nodes, nil, nil, "Tokens looked up in the prefix cache."},
	PrefixCacheHits:    {"vllm:prefix_cache_hits_total", KindCounter, nodes, nil, nil, "Tokens found in the prefix cache."},
	NumPreemptions:     {"vllm:num_preemptions_total", KindCounter, nodes, nil, nil, "Times a running request gave its blocks back and was queued again."},
	GenerationTokens:   {"vllm:generation_tokens_total", KindCounter, all, nil, nil, "Tokens generated; at the gateway, tokens taken from nodes."},
	RequestSuccess:     {"vllm:request_success_total", KindCounter, all, finished, nil, "Finished requests by reason."},

	PrefillTokensComputed: {"tandem:prefill_tokens_computed_total", KindCounter, nodes, nil, nil, "Prompt tokens run through a forward pass on this node."},
	KVTransferBytes: {"tandem:kv_transfer_bytes_total", KindCounter, nodes,
		[]Label{{"direction", []string{"in", "out"}}}, nil, "KV bytes moved between nodes: payload only, no headers."},
	KVTransferFailures: {"tandem:kv_transfer_failures_total", KindCounter, nodes,
		[]Label{{"direction", []string{"in", "out"}}}, nil, "KV transfers that did not complete."},
	EngineSteps: {"tandem:engine_steps_total", KindCounter, nodes, nil, nil, "Steps of the engine."},
	KVBlocks: {"tandem:kv_blocks", KindGauge, nodes,
		[]Label{{"state", []string{"total", "used"}}}, nil, "KV blocks of the pool."},

	RequestPromptTokens:     {"vllm:request_prompt_tokens", KindHistogram, Gateway, nil, tokenBuckets, "Prompt tokens of a finished request."},
	RequestGenerationTokens: {"vllm:request_generation_tokens", KindHistogram, Gateway, nil, tokenBuckets, "Tokens generated for a finished request."},
	RequestParamsN:          {"vllm:request_params_n", KindHistogram, Gateway, nil, nBuckets, "The n of requests."},
	RequestParamsMaxTokens:  {"vllm:request_params_max_tokens", KindHistogram, Gateway, nil, tokenBuckets, "The max_tokens of requests."},
	TimeToFirstToken:        {"vllm:time_to_first_token_seconds", KindHistogram, Gateway, nil, ttftBuckets, "From a request's arrival to its first token."},
	InterTokenLatency:       {"vllm:inter_token_latency_seconds", KindHistogram, Gateway, nil, itlBuckets, "Between two tokens of one choice."},
	TimePerOutputToken:      {"vllm:request_time_per_output_token_seconds", KindHistogram, Gateway, nil, itlBuckets, "Mean time per token after the first, per request."},
	E2ERequestLatency:       {"vllm:e2e_request_latency_seconds", KindHistogram, Gateway, nil, latencyBuckets, "From a request's arrival to its end."},

	HTTPRequests: {"tandem:http_requests_total", KindCounter, Gateway,
		[]Label{{"route", HTTPRoutes}, {"status", HTTPStatuses}}, nil, "Answered HTTP requests."},
	GatewayInFlight: {"tandem:gateway_requests_in_flight", KindGauge, Gateway, nil, nil, "Requests accepted and not yet answered in full."},
	GatewayAttempts: {"tandem:gateway_attempts_total", KindCounter, Gateway, nil, nil, "Attempts started on decode nodes."},
	GatewayAttemptFailures: {"tandem:gateway_attempt_failures_total", KindCounter, Gateway,
		[]Label{{"code", AttemptFailures}}, nil, "Attempts that ended in an error, by its kind."},
	GatewayResumes:        {"tandem:gateway_resumes_total", KindCounter, Gateway, nil, nil, "Started streams whose node was lost and that looked for another."},
	GatewayStaleTokens:    {"tandem:gateway_stale_tokens_total", KindCounter, Gateway, nil, nil, "Tokens refused because their attempt or stream was over."},
	GatewayStreamsPaused:  {"tandem:gateway_streams_paused_total", KindCounter, Gateway, nil, nil, "Times a slow client's full buffer paused its generation."},
	GatewayStreamsAborted: {"tandem:gateway_streams_aborted_total", KindCounter, Gateway, []Label{{"cause", StreamAborts}}, nil, "Requests cut before their end."},
	GatewayRoutes: {"tandem:gateway_routes_total", KindCounter, Gateway,
		[]Label{{"reason", RouteReasons}}, nil, "Routing decisions by reason."},
	GatewayUsableDecodeNodes: {"tandem:gateway_usable_decode_nodes", KindGauge, Gateway, nil, nil, "Decode nodes that this gateway can send requests to."},
}

// The values of labels with more than a few; each list ends in what stands for
// everything else.
var (
	HTTPRoutes      = []string{"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "other"}
	HTTPStatuses    = []string{"200", "400", "401", "404", "405", "413", "415", "429", "499", "500", "503", "504", "other"}
	AttemptFailures = []string{"connection", "overloaded", "draining", "mismatch", "invalid", "timeout", "internal", "other"}
	StreamAborts    = []string{"upstream", "client_gone", "slow_client", "deadline", "shutdown"}
	RouteReasons    = []string{"prefix", "load", "health", "no_decode", "remote", "short", "no_prefill"}
)
