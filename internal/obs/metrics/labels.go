package metrics

// Label values that several packages use.
const (
	ReasonStop   = "stop"
	ReasonLength = "length"
	ReasonAbort  = "abort"
	ReasonError  = "error"
)

var (
	finished   = label("finished_reason", ReasonStop, ReasonLength, ReasonAbort, ReasonError)
	directions = label("direction", "in", "out")
	breakers   = label("state", BreakerStates...)
	stepKinds  = label("step", StepKinds...)
	tasks      = label("task", UpstreamTasks...)

	// Bounds of vLLM's histograms: dashboards depend on them.
	latencyBuckets = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	ttftBuckets    = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBuckets     = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	iterBuckets    = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	tokenBuckets   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000}
	nBuckets       = []float64{1, 2, 5, 10, 20}
	preemptBuckets = []float64{1, 2, 3, 4, 5, 10, 20}

	// A step of a small model on a CPU takes a millisecond, a step of a large model
	// with a full chunk a second.
	stepBuckets = []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10}
	// The buckets of vLLM's connectors, with finer ones below.
	transferBuckets = []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5}
)

// Label values that are long lists. The last of each is for all unknown values.
var (
	HTTPRoutes = []string{"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/embeddings", "/pooling", "/v2/embed", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
		"/v1/chat/completions/render", "/v1/completions/render", "/v1/chat/completions/derender", "/v1/completions/derender",
		"/v1/responses/{response}", "/v1/chat/completions/batch", "/invocations", "/tokenizer_info", "/abort_requests",
		"/livez", "/readyz", "/health", "/ping", "/version", "/load", "/metrics", "/debug/targets", "/log-level", "/admin/drain/{node}", "/admin/desired", "/admin/record",
		"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/openapi.json", "/docs", "/debug/nodes", "/debug/route", "other"}
	// HTTPStatuses are the statuses of the gateway itself, and classes for other statuses
	// of upstreams.
	HTTPStatuses = []string{"200", "204", "302", "400", "401", "403", "404", "405", "408", "409", "413", "415", "417", "429", "431", "499", "500", "502", "503", "504", "505",
		"2xx", "3xx", "4xx", "5xx", "other"}
	AttemptFailures = []string{"connection", "overloaded", "draining", "mismatch", "invalid", "timeout", "internal", "other"}
	GrammarOutcomes = []string{"known", "compiled", "invalid", "limit", "queue_full", "late"}
	StepKinds       = []string{"decode", "prefill", "mixed"} // by index: StepDecode, StepPrefill, StepMixed
	StepWork        = []string{"steps", "sequences", "context", "prompt", "attended"}
	BreakerStates   = []string{"closed", "half-open", "open"}
	UpstreamStates  = []string{"up", "down", "new", "leaving"}
	UpstreamTasks   = []string{"serve", "prefill", "decode"}
	StreamAborts    = []string{"upstream", "client_gone", "slow_client", "deadline", "shutdown", "aborted"}
	RouteReasons    = []string{"prefix", "cached", "load", "health", "policy", "no_decode", "no_room", "remote", "local", "short", "no_prefill"}
)

// KeyTokens are the counted tokens of API keys. By index: KeyPrompt, KeyCached and KeyOutput.
var KeyTokens = []string{"prompt", "cached", "output"}

// Indices of KeyTokens.
const (
	KeyPrompt = iota
	KeyCached
	KeyOutput
)

// OtherKeys is the label of API keys without a name of their own.
const OtherKeys = "other"

// Indices of StepKinds.
const (
	StepDecode = iota
	StepPrefill
	StepMixed
)

// Queues. Each has a bound.
const (
	QueueRequests      = "requests"        // in flight at a gateway
	QueueConnections   = "connections"     // of clients
	QueueWaiting       = "waiting"         // requests that wait in a gateway for the fleet
	QueueWaitingTokens = "waiting_tokens"  // prompt tokens of these
	QueueBodies        = "body_bytes"      // of large requests and answers, in a gateway
	QueueEngine        = "engine_waiting"  // requests and jobs that wait for the engine or for KV
	QueueRunning       = "engine_running"  // in the engine's steps
	QueueArriving      = "arriving_blocks" // KV blocks that other nodes may write
	QueueAttempts      = "attempts"        // owned by a decode node
	QueuePrefill       = "prefill_jobs"    // that wait for their turn to ask for a grant
	QueuePushes        = "pushes"          // KV transfers in flight
)

var queues = Label{
	Name:   "queue",
	Values: []string{QueueRequests, QueueConnections, QueueWaiting, QueueWaitingTokens, QueueBodies, QueueEngine, QueueRunning, QueueArriving, QueueAttempts, QueuePrefill, QueuePushes},
	Of: map[string]Role{
		QueueRequests: Gateway, QueueConnections: Gateway, QueueWaiting: Gateway, QueueWaitingTokens: Gateway, QueueBodies: Gateway, QueueEngine: nodes, QueueRunning: nodes, QueueArriving: Decode,
		QueueAttempts: Decode, QueuePrefill: Prefill, QueuePushes: Prefill,
	},
}

// positions are the counted positions of draft tokens.
var positions = []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"}
