package metrics

import "github.com/tandem-serving/tandem/internal/netio"

// request are the roles that see requests from their start to their end.
const request = Gateway | Decode

// Every metric: the order of the rows is that of docs/metrics.md.
var (
	BuildInfo = info("tandem:build_info", all,
		"Always 1; the program's version and this process' role.", label("version"), label("role"))
	LoRARequestsInfo = info("vllm:lora_requests_info", nodes,
		"The time, in Unix seconds; adapters that requests wait and run with, joined by commas, and how many one step can have. There with --enable-lora alone.", label("max_lora"), label("waiting_lora_adapters"), label("running_lora_adapters"))

	// Engine, on nodes.
	NumRequestsRunning = gauge("vllm:num_requests_running", nodes, "Requests that take part in the engine's steps.")
	NumRequestsWaiting = gauge("vllm:num_requests_waiting", nodes,
		"Requests that wait: for the engine, for KV from another node, or on a prefill node for their turn or a grant.")
	NumRequestsWaitingByReason = gauge("vllm:num_requests_waiting_by_reason", nodes,
		"Those by reason: capacity waits for its turn, deferred for KV from another node or, on a prefill node, for the grant to write there. The sum is vllm:num_requests_waiting.", label("reason", "capacity", "deferred"))
	NumRequestsKVFetch = gauge("vllm:num_requests_kv_fetch_by_stage", Decode,
		"Requests whose KV comes from another node: without a grant yet, with one, arrived and not running yet.", label("stage", "waiting_to_start", "in_progress", "completed_waiting"))
	KVCacheUsage       = gauge("vllm:kv_cache_usage_perc", nodes, "Share of KV blocks in use, pinned ones included; 1 is all of them.")
	PrefixCacheQueries = counter("vllm:prefix_cache_queries_total", nodes,
		"Tokens looked up in this node's prefix cache, once per request.")
	PrefixCacheHits            = counter("vllm:prefix_cache_hits_total", nodes, "Of these, tokens that were found.")
	ExternalPrefixCacheQueries = counter("vllm:external_prefix_cache_queries_total", Decode,
		"Tokens whose KV a prefill node was let write, once per request.")
	ExternalPrefixCacheHits = counter("vllm:external_prefix_cache_hits_total", Decode, "Tokens whose KV arrived from a prefill node.")
	NumPreemptions          = counter("vllm:num_preemptions_total", nodes,
		"Times a request gave its KV blocks back and was queued again; a prefill node's jobs never do.")
	PromptTokens = counter("vllm:prompt_tokens_total", all,
		"Prompt tokens of requests that had their first token, and of computed prefill jobs; cached ones included.")
	PromptTokensBySource = counter("vllm:prompt_tokens_by_source_total", nodes,
		"Those by where their KV came from. The sum is vllm:prompt_tokens_total.", label("source", "local_compute", "local_cache_hit", "external_kv_transfer"))
	PromptTokensCached = counter("vllm:prompt_tokens_cached_total", all,
		"Of these, tokens that were not computed here: cached or transferred. At the gateway, what decode nodes found in their caches.")
	PromptTokensCachedBySource = counter("vllm:prompt_tokens_cached_by_source_total", nodes,
		"Cache hits by what supplied them: this node's memory, or another node. The sum is that of both kinds of hits.", label("source", "device", "p2p"))
	GenerationTokens = counter("vllm:generation_tokens_total", all, "Tokens generated; at the gateway, tokens taken from nodes.")
	RequestSuccess   = counter("vllm:request_success_total", all,
		"Finished requests by reason; at the gateway and on decode nodes each choice counts.", finished)
	AdmissionRejections = counter("vllm:admission_rejections_total", all,
		"Requests refused because a queue was full.", label("reason", "max_num_queued_reqs"))
	IterationTokens    = histogram("vllm:iteration_tokens_total", nodes, iterBuckets, "Tokens per step of the engine.")
	SpecDrafts         = counter("vllm:spec_decode_num_drafts_total", Decode, "Times that tokens were guessed for a request.")
	SpecDraftTokens    = counter("vllm:spec_decode_num_draft_tokens_total", Decode, "Tokens that were guessed.")
	SpecAcceptedTokens = counter("vllm:spec_decode_num_accepted_tokens_total", Decode,
		"Of these, tokens that were what the model drew.")
	SpecAcceptedPerPos = counter("vllm:spec_decode_num_accepted_tokens_per_pos_total", Decode,
		"Those by their place among the guesses, from 0; the last stands for all beyond.", label("position", positions...))
	CacheConfigInfo = info("vllm:cache_config_info", nodes,
		"Always 1; the KV cache's shape. num_gpu_blocks are those of the device, whatever it is.", label("block_size"), label("cache_dtype"), label("enable_prefix_caching"), label("num_gpu_blocks"))

	// A request's times and sizes.
	RequestPromptTokens           = histogram("vllm:request_prompt_tokens", request, tokenBuckets, "Prompt tokens of a finished request.")
	RequestGenerationTokens       = histogram("vllm:request_generation_tokens", request, tokenBuckets, "Tokens generated for a finished request.")
	RequestMaxNumGenerationTokens = histogram("vllm:request_max_num_generation_tokens", Gateway, tokenBuckets,
		"Most tokens that one of a finished request's choices got.")
	RequestParamsN         = histogram("vllm:request_params_n", Gateway, nBuckets, "The n of requests.")
	RequestParamsMaxTokens = histogram("vllm:request_params_max_tokens", request, tokenBuckets, "The max_tokens of requests.")
	TimeToFirstToken       = histogram("vllm:time_to_first_token_seconds", request, ttftBuckets,
		"From a request's arrival to its first token.")
	InterTokenLatency  = histogram("vllm:inter_token_latency_seconds", request, itlBuckets, "Between two tokens of one choice.")
	TimePerOutputToken = histogram("vllm:request_time_per_output_token_seconds", request, itlBuckets,
		"Mean time per token after the first, per request.")
	E2ERequestLatency = histogram("vllm:e2e_request_latency_seconds", request, latencyBuckets, "From a request's arrival to its end.")
	RequestQueueTime  = histogram("vllm:request_queue_time_seconds", nodes, latencyBuckets,
		"From a request's arrival at the engine to its first step; on decode nodes the wait for KV is part of it.")
	RequestInferenceTime = histogram("vllm:request_inference_time_seconds", nodes, latencyBuckets,
		"From a request's first step to its last token, or a prefill job's end.")
	RequestPrefillTime = histogram("vllm:request_prefill_time_seconds", nodes, latencyBuckets,
		"From a request's first step to its first token, or a prefill job's end.")
	RequestDecodeTime = histogram("vllm:request_decode_time_seconds", request, latencyBuckets,
		"From a request's first token to its last.")
	RequestNumPreemptions = histogram("vllm:request_num_preemptions", nodes, preemptBuckets,
		"Times a finished request was preempted; a prefill node's jobs never are.")
	RequestPrefillKVComputed = histogram("vllm:request_prefill_kv_computed_tokens", nodes, tokenBuckets,
		"Prompt tokens of a request or prefill job that were computed here, neither cached nor transferred.")

	// Own, on nodes.
	PrefillTokensComputed = counter("tandem:prefill_tokens_computed_total", nodes,
		"Prompt tokens run through a forward pass on this node, recomputed ones included.")
	EngineSteps       = counter("tandem:engine_steps_total", nodes, "Steps of the engine.")
	EngineStepSeconds = histogram("tandem:engine_step_seconds", nodes, stepBuckets, "Time of a step on the device.")
	KVBlocks          = gauge("tandem:kv_blocks", nodes,
		"KV blocks by state: free, cached without a user, used by requests, kept by transfers alone. The sum is the pool.", label("state", "free", "cached", "used", "pinned"))
	KVBlocksPinned = gauge("tandem:kv_blocks_in_transfer", nodes,
		"KV blocks that a transfer may write or read, used ones included.", directions)
	DecodePrefills = counter("tandem:decode_prefills_total", Decode,
		"Attempts whose prompt another node computed, or this one.", label("where", "remote", "local"))
	DecodePrefillFailures = counter("tandem:decode_prefill_failures_total", Decode, "Prefill nodes that were asked and did not deliver.")
	DecodePrefillBreakers = gauge("tandem:decode_prefill_breakers", Decode,
		"Prefill nodes that this node has asked, by the state of their circuit breaker.", breakers)
	DecodeDroppedStreams = counter("tandem:decode_dropped_streams_total", Decode, "Streams ended because a gateway's outbox was full.")
	DecodeRefused        = counter("tandem:decode_refused_total", Decode, "Attempts that were refused at once.")
	PrefillJobs          = counter("tandem:prefill_jobs_total", Prefill,
		"Prefill jobs by what became of them.", label("result", "done", "cancelled", "failed", "refused"))
	KVTransferBytes = counter("tandem:kv_transfer_bytes_total", nodes,
		"KV bytes moved between nodes: payload only, no headers.", directions)
	KVTransferSharedBytes = counter("tandem:kv_transfer_shared_bytes_total", nodes,
		"Of these, bytes that a decode node copied out of the memory of a prefill node on its host.", directions)
	KVTransferRDMABytes = counter("tandem:kv_transfer_rdma_bytes_total", nodes,
		"Of these, bytes that a prefill node wrote into a decode node's memory by RDMA.", directions)
	KVTransfers        = counter("tandem:kv_transfers_total", nodes, "KV transfers that were completed and checked.", directions)
	KVTransferFailures = counter("tandem:kv_transfer_failures_total", nodes, "KV transfers that did not complete.", directions)
	KVTransferPieces   = counter("tandem:kv_transfer_pieces_total", nodes,
		"Pieces of KV moved between nodes: a block of one layer each.", directions)
	KVTransferRetries = counter("tandem:kv_transfer_retries_total", Prefill, "Connections for KV that had to be dialled again.")
	KVTransferHidden  = histogram("tandem:kv_transfer_hidden_seconds", Prefill, transferBuckets,
		"Of a KV transfer, the time while the prompt was still being computed.")
	KVTransferExposed = histogram("tandem:kv_transfer_exposed_seconds", Prefill, transferBuckets,
		"Of a KV transfer, the time from the computation's end until all had landed: what a request waits for.")
	KVTransferFirstByte = histogram("tandem:kv_transfer_first_byte_seconds", Decode, transferBuckets,
		"Of a KV transfer, the time from its grant until the first bytes came.")
	KVTransferLastByte = histogram("tandem:kv_transfer_last_byte_seconds", Decode, transferBuckets,
		"Of a KV transfer, the time from its grant until the last byte had landed and matched.")
	KVLeases = gauge("tandem:kv_leases", Decode,
		"Leases by state: waiting for a first page, in transfer, ended with a write under way.", label("state", "granted", "arriving", "quarantined"))
	KVLeasesExpired = counter("tandem:kv_leases_expired_total", Decode, "Leases that ended because their writer was silent.")
	FencedWrites    = counter("tandem:fenced_writes_total", Decode,
		"KV pages that were kept out: of a lease that was over, sent twice, or not matching their checksum.", label("kind", "stale", "duplicate", "corrupt"))
	BlockEventsDropped = counter("tandem:block_events_dropped_total", nodes,
		"Messages about the prefix cache that were not sent; gateways ask for everything anew.")

	// Own, at the gateway.
	HTTPRequests = counter("tandem:http_requests_total", Gateway,
		"Answered HTTP requests.", label("route", HTTPRoutes...), label("status", HTTPStatuses...))
	GatewayInFlight        = gauge("tandem:gateway_requests_in_flight", Gateway, "Requests accepted and not yet answered in full.")
	GatewayAttempts        = counter("tandem:gateway_attempts_total", Gateway, "Attempts started on decode nodes.")
	GatewayAttemptFailures = counter("tandem:gateway_attempt_failures_total", Gateway,
		"Attempts that ended in an error, by its kind.", label("code", AttemptFailures...))
	GatewayResumes = counter("tandem:gateway_resumes_total", Gateway,
		"Started streams whose node was lost and that looked for another.")
	GatewayClassChanges = counter("tandem:gateway_class_changes_total", Gateway,
		"Started streams that another node continues in another numerics class, because no node of theirs was usable: what follows is valid and may differ.")
	GatewayNodesLost = counter("tandem:gateway_nodes_lost_total", Gateway,
		"Decode nodes that lost their streams to others over an open connection: no heartbeats for --node-silence, or no step for --stall-timeout.", label("reason", "silence", "stall"))
	GatewayRefused = counter("tandem:gateway_refused_total", Gateway,
		"Requests refused with 429: the gateway's queue was full, they would have waited too long, made place for others, did wait too long; or by their API key's limits or their address's (connections), or for want of memory for large bodies; and with 503 because all of --max-connections had requests.", label("limit", "queue", "late", "evicted", "timeout", "concurrency", "tokens", "address", "connections", "body_memory"))
	GatewayEvictedConns = counter("tandem:gateway_evicted_connections_total", Gateway,
		"Connections of clients without a request that were closed for new ones: the longest without one first, at --max-connections or out of file descriptors.")
	GatewayKeyFileBad = gauge("tandem:gateway_key_file_bad", Gateway,
		"1 while the file of API keys cannot be read; the keys before it stay.")
	GatewayQueueTime = histogram("tandem:gateway_queue_time_seconds", Gateway, latencyBuckets,
		"How long requests waited in the gateway for the fleet, of those that had to.")
	GatewayReloadFailed = gauge("tandem:gateway_reload_failed", Gateway,
		"1 while what changed of a part could not be read anew; what was there stays.", label("part", "certificates", "config"))
	GatewayStreamBuffers = gauge("tandem:gateway_stream_buffer_bytes", Gateway,
		"Memory of events that streams' clients have not taken yet; each holds at most --stream-buffer-tokens of a choice.")
	GatewayStaleTokens = counter("tandem:gateway_stale_tokens_total", Gateway,
		"Tokens refused because their attempt or stream was over.")
	GatewayStreamsPaused = counter("tandem:gateway_streams_paused_total", Gateway,
		"Times a slow client's full buffer paused its generation.")
	GatewayStreamsAborted = counter("tandem:gateway_streams_aborted_total", Gateway,
		"Requests cut before their end.", label("cause", StreamAborts...))
	GatewayRoutes = counter("tandem:gateway_routes_total", Gateway,
		"Routing decisions by reason; one about decode and one about prefill for each attempt.", label("reason", RouteReasons...))
	GatewayPredictedCached = counter("tandem:gateway_predicted_cached_tokens_total", Gateway,
		"Prompt tokens that the chosen decode nodes were expected to have cached.")
	GatewayActualCached   = counter("tandem:gateway_actual_cached_tokens_total", Gateway, "Prompt tokens that they said they had.")
	GatewayPredictedFirst = histogram("tandem:gateway_predicted_first_token_seconds", Gateway, ttftBuckets,
		"What routing predicted a request to wait for its first token, where it knew the speed of the node that was to compute the prompt.")
	GatewayActualFirst = histogram("tandem:gateway_actual_first_token_seconds", Gateway, ttftBuckets,
		"What those requests waited, from their routing on; those whose first attempt failed are left out of both.")
	GatewayFirstError = histogram("tandem:gateway_first_token_error_seconds", Gateway, ttftBuckets,
		"By how much a first token came before or after the prediction; one of the two for each of those requests.", label("side", "early", "late"))
	GatewayUsableDecodeNodes = gauge("tandem:gateway_usable_decode_nodes", Gateway, "Decode nodes that this gateway can send requests to.")
	GatewayBreakers          = gauge("tandem:gateway_breakers", Gateway, "Decode nodes by the state of their circuit breaker.", breakers)
	GatewayUpstreams         = gauge("tandem:gateway_upstreams", Gateway,
		"Servers of another kind by what they do of a request and by what their probes say; new: not looked at yet; leaving: no longer named and with requests in hand.", tasks, label("state", UpstreamStates...))
	GatewayUpstreamBreakers = gauge("tandem:gateway_upstream_breakers", Gateway,
		"Those servers by the state of their circuit breaker.", breakers)
	GatewayUpstreamRequests = gauge("tandem:gateway_upstream_requests", Gateway,
		"Requests of this gateway that those servers have in hand.", tasks)
	GatewayUntokenized = counter("tandem:gateway_untokenized_prompts_total", Gateway,
		"Requests for those servers that were routed by their prompt's first bytes although --tokenizer names one for their model: what the chat template or the tokenizer cannot take.")
	GatewayRetryBudget = gauge("tandem:gateway_retry_budget", Gateway,
		"Retries that may be started at once; at 0 failed attempts are not retried.")
	TokenizerCacheLookups = counter("tandem:tokenizer_cache_lookups_total", Gateway,
		"Look-ups of chat messages whose tokens may be known from an earlier turn.", label("result", "hit", "miss"))
	TokenizerCacheBytes = gauge("tandem:tokenizer_cache_bytes", Gateway, "Memory of that cache.")

	// Own, everywhere.
	QueueLength = gauge("tandem:queue_length", all, "Entries of each bounded queue.", queues)
	QueueLimit  = gauge("tandem:queue_limit", all,
		"The bounds of those queues; what comes beyond is refused or waits outside.", queues)
	RPCFrames      = counter("tandem:rpc_frames_total", all, "Frames between nodes.", directions)
	RPCBytes       = counter("tandem:rpc_bytes_total", all, "Their bytes, headers included and TLS left out.", directions)
	RPCConnections = gauge("tandem:rpc_connections", all, "Open connections to other nodes.")
	RPCOutboxFull  = counter("tandem:rpc_outbox_full_total", all, "Frames refused because a connection's outbox was full.")
	RPCSilent      = counter("tandem:rpc_silent_connections_total", all,
		"Connections ended because the other side was silent or did not read.")
	RPCRefused = counter("tandem:rpc_refused_connections_total", all,
		"Connections refused: strangers, other versions, too many.")
	RPCForbidden = counter("tandem:rpc_forbidden_frames_total", all,
		"Frames refused because the sender's certificate is a node's and only gateways may send them.")
	RPCDialErrors = counter("tandem:rpc_dial_errors_total", all, "Connections to other nodes that could not be made.")
	AcceptErrors  = counter("tandem:accept_errors_total", all,
		"Failed attempts to accept a connection on the HTTP ports, which are retried: out of file descriptors (EMFILE, ENFILE) or memory (ENOBUFS, ENOMEM), or the client aborted.", label("error", netio.ErrorNames()...))
	TraceSpans = counter("tandem:trace_spans_total", all,
		"Spans handed to the collector, and those that it did not take.", label("result", "sent", "failed"))
)
