package trace

import "go.opentelemetry.io/otel/attribute"

// Attributes: those of OpenTelemetry's conventions for generative AI and HTTP, two of vLLM's
// that the conventions lack, and Tandem's own.
const (
	Operation     = attribute.Key("gen_ai.operation.name")
	Provider      = attribute.Key("gen_ai.provider.name")
	RequestModel  = attribute.Key("gen_ai.request.model")
	ResponseModel = attribute.Key("gen_ai.response.model")
	ResponseID    = attribute.Key("gen_ai.response.id")
	MaxTokens     = attribute.Key("gen_ai.request.max_tokens")
	Temperature   = attribute.Key("gen_ai.request.temperature")
	TopP          = attribute.Key("gen_ai.request.top_p")
	TopK          = attribute.Key("gen_ai.request.top_k")
	Seed          = attribute.Key("gen_ai.request.seed")
	Choices       = attribute.Key("gen_ai.request.choice.count")
	FinishReasons = attribute.Key("gen_ai.response.finish_reasons")
	InputTokens   = attribute.Key("gen_ai.usage.input_tokens")
	OutputTokens  = attribute.Key("gen_ai.usage.output_tokens")
	CachedTokens  = attribute.Key("gen_ai.usage.cache_read.input_tokens")
	RequestID     = attribute.Key("gen_ai.request.id")                  // as vLLM
	FirstToken    = attribute.Key("gen_ai.latency.time_to_first_token") // seconds, as vLLM
	Method        = attribute.Key("http.request.method")
	Path          = attribute.Key("url.path")
	Status        = attribute.Key("http.response.status_code")
	Peer          = attribute.Key("server.address")

	Choice         = attribute.Key("tandem.choice")
	Attempt        = attribute.Key("tandem.attempt")
	PrefillPeer    = attribute.Key("tandem.prefill.address")
	RouteReason    = attribute.Key("tandem.route.reason")
	PrefillReason  = attribute.Key("tandem.route.prefill_reason")
	Resumed        = attribute.Key("tandem.resumed_tokens")
	Cached         = attribute.Key("tandem.cached_tokens")
	Arrived        = attribute.Key("tandem.arrived_tokens")
	Computed       = attribute.Key("tandem.computed_tokens")
	Preemptions    = attribute.Key("tandem.preemptions")
	Finish         = attribute.Key("tandem.finish")
	TransferBytes  = attribute.Key("tandem.kv.bytes")
	HiddenSeconds  = attribute.Key("tandem.kv.hidden_seconds")
	ExposedSeconds = attribute.Key("tandem.kv.exposed_seconds")
)
