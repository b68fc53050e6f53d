package metrics

import "github.com/tandem-serving/tandem/internal/netio"

// request is the roles that see a request from its start to its end.
const request = Gateway | Decode

// Every metric: the order of the rows is that of docs/metrics.md.
var (
	BuildInfo = info("tandem:build_info", all,
		"Always 1; labels are the program's version and the role of the process.", label("version"), label("role"))
	PricePerHour = gauge("tandem:price_dollars_per_hour", all,
		"Price of an hour of this process in US dollars, as --price-per-hour has it; 0: none was given. The sum over a fleet, divided by its tokens, is the price of a token.")
	LoRARequestsInfo = info("vllm:lora_requests_info", nodes,
		"The time, in Unix seconds; labels are the adapters of waiting and running requests, joined by commas, and the most adapters of a step. Only with --enable-lora.", label("max_lora"), label("waiting_lora_adapters"), label("running_lora_adapters"))

	// Engine, on nodes.
	NumRequestsRunning = gauge("vllm:num_requests_running", nodes, "Requests in the engine's steps.")
	NumRequestsWaiting = gauge("vllm:num_requests_waiting", nodes,
		"Requests that wait: for the engine, for KV from another node, or on a prefill node for their turn or a grant.")
	NumRequestsWaitingByReason = gauge("vllm:num_requests_waiting_by_reason", nodes,
		"Waiting requests by reason: capacity for the engine; deferred for KV from another node or, on a prefill node, for a grant. The sum is vllm:num_requests_waiting.", label("reason", "capacity", "deferred"))
	NumRequestsKVFetch = gauge("vllm:num_requests_kv_fetch_by_stage", Decode,
		"Requests whose KV comes from another node: waiting for a grant, transferring, and arrived but not running.", label("stage", "waiting_to_start", "in_progress", "completed_waiting"))
	KVCacheUsage       = gauge("vllm:kv_cache_usage_perc", nodes, "Share of KV blocks in use, pinned ones included; 1 means all.")
	PrefixCacheQueries = counter("vllm:prefix_cache_queries_total", nodes,
		"Tokens looked up in this node's prefix cache, once per request.")
	PrefixCacheHits            = counter("vllm:prefix_cache_hits_total", nodes, "Looked-up tokens that were found in this node's prefix cache.")
	ExternalPrefixCacheQueries = counter("vllm:external_prefix_cache_queries_total", Decode,
		"Tokens whose KV was granted to a prefill node, once per request.")
	ExternalPrefixCacheHits = counter("vllm:external_prefix_cache_hits_total", Decode, "Tokens whose KV arrived from a prefill node.")
	NumPreemptions          = counter("vllm:num_preemptions_total", nodes,
		"Preemptions: a request released its KV blocks and was queued again. Jobs of prefill nodes are never preempted.")
	PromptTokens = counter("vllm:prompt_tokens_total", all,
		"Prompt tokens of requests that had their first token, and of computed prefill jobs; cached ones included.")
	PromptTokensBySource = counter("vllm:prompt_tokens_by_source_total", nodes,
		"Prompt tokens by the source of their KV. The sum is vllm:prompt_tokens_total.", label("source", "local_compute", "local_cache_hit", "external_kv_transfer"))
	PromptTokensCached = counter("vllm:prompt_tokens_cached_total", all,
		"Prompt tokens that were not computed on this node: cached or transferred. At the gateway, tokens in the caches of decode nodes.")
	PromptTokensCachedBySource = counter("vllm:prompt_tokens_cached_by_source_total", nodes,
		"Cache hits by source: this node's memory, or another node. The sum is that of both kinds of hits.", label("source", "device", "p2p"))
	GenerationTokens = counter("vllm:generation_tokens_total", all, "Tokens generated; at the gateway, tokens received from nodes.")
	RequestSuccess   = counter("vllm:request_success_total", all,
		"Finished requests by reason; at the gateway and on decode nodes each choice counts.", finished)
	AdmissionRejections = counter("vllm:admission_rejections_total", all,
		"Requests refused because a queue was full.", label("reason", "max_num_queued_reqs"))
	IterationTokens    = histogram("vllm:iteration_tokens_total", nodes, iterBuckets, "Tokens per step of the engine.")
	SpecDrafts         = counter("vllm:spec_decode_num_drafts_total", Decode, "Drafts of tokens for a request.")
	SpecDraftTokens    = counter("vllm:spec_decode_num_draft_tokens_total", Decode, "Draft tokens.")
	SpecAcceptedTokens = counter("vllm:spec_decode_num_accepted_tokens_total", Decode,
		"Draft tokens that the model accepted.")
	SpecAcceptedPerPos = counter("vllm:spec_decode_num_accepted_tokens_per_pos_total", Decode,
		"Accepted draft tokens by position in the draft, from 0; the last includes all further ones.", label("position", positions...))
	CacheConfigInfo = info("vllm:cache_config_info", nodes,
		"Always 1; labels are the KV cache's shape. num_gpu_blocks is the number of blocks on any device.", label("block_size"), label("cache_dtype"), label("enable_prefix_caching"), label("num_gpu_blocks"))

	// A request's times and sizes.
	RequestPromptTokens           = histogram("vllm:request_prompt_tokens", request, tokenBuckets, "Prompt tokens of a finished request.")
	RequestGenerationTokens       = histogram("vllm:request_generation_tokens", request, tokenBuckets, "Tokens generated for a finished request.")
	RequestMaxNumGenerationTokens = histogram("vllm:request_max_num_generation_tokens", Gateway, tokenBuckets,
		"Tokens of the longest choice of a finished request.")
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
		"Preemptions of a finished request. Jobs of prefill nodes are never preempted.")
	RequestPrefillKVComputed = histogram("vllm:request_prefill_kv_computed_tokens", nodes, tokenBuckets,
		"Prompt tokens of a request or prefill job that were computed on this node, neither cached nor transferred.")

	// Own, on nodes.
	PrefillTokensComputed = counter("tandem:prefill_tokens_computed_total", nodes,
		"Prompt tokens run through a forward pass on this node, recomputed ones included.")
	PrefillQueueSeconds = gauge("tandem:prefill_queue_seconds", Prefill,
		"Prompt tokens of all jobs that are not computed yet, divided by the node's measured speed. 0 until it has computed a prompt. For autoscaling of prefill nodes.")
	DecodePressure = gauge("tandem:decode_pressure", Decode,
		"The larger of the share of KV blocks in use, and running and waiting requests divided by --max-num-seqs. Above 1 requests wait. For autoscaling of decode nodes.")
	EngineSteps       = counter("tandem:engine_steps_total", nodes, "Steps of the engine.")
	EngineStepSeconds = histogram("tandem:engine_step_seconds", nodes, stepBuckets, "Time of a step on the device.")
	EngineWork        = counter("tandem:engine_work_total", nodes,
		"What the engine's steps computed, by kind of step. of: steps; sequences that decoded a token; context tokens that these attended to; prompt tokens; attended, the sum of the tokens before each prompt token. For tandem profile --from.", stepKinds, label("of", StepWork...))
	EngineWorkSeconds = counter("tandem:engine_work_seconds_total", nodes, "Time of the engine's steps on the device, by kind of step.", stepKinds)
	KVBlocks          = gauge("tandem:kv_blocks", nodes,
		"KV blocks by state: free; cached and unused; used by requests; pinned by transfers only. The sum is the pool.", label("state", "free", "cached", "used", "pinned"))
	KVBlocksPinned = gauge("tandem:kv_blocks_in_transfer", nodes,
		"KV blocks that a transfer may write or read, used ones included.", directions)
	DecodePrefills = counter("tandem:decode_prefills_total", Decode,
		"Attempts by the node that computed the prompt: another one, or this one.", label("where", "remote", "local"))
	DecodePrefillFailures = counter("tandem:decode_prefill_failures_total", Decode, "Prefill requests to other nodes that failed.")
	DecodePrefillBreakers = gauge("tandem:decode_prefill_breakers", Decode,
		"Prefill nodes that this node has used, by the state of their circuit breaker.", breakers)
	DecodeDroppedStreams = counter("tandem:decode_dropped_streams_total", Decode, "Streams ended because a gateway's outbox was full.")
	DecodeRefused        = counter("tandem:decode_refused_total", Decode, "Attempts that were refused on arrival.")
	PrefillJobs          = counter("tandem:prefill_jobs_total", Prefill,
		"Prefill jobs by result, jobs for vectors included.", label("result", "done", "cancelled", "failed", "refused"))
	KVTransferBytes = counter("tandem:kv_transfer_bytes_total", nodes,
		"KV bytes transferred between nodes, without headers.", directions)
	KVTransferSharedBytes = counter("tandem:kv_transfer_shared_bytes_total", nodes,
		"KV bytes that a decode node copied from the memory of a prefill node on its host; part of the transferred bytes.", directions)
	KVTransferRDMABytes = counter("tandem:kv_transfer_rdma_bytes_total", nodes,
		"KV bytes that a prefill node wrote into a decode node's memory by RDMA; part of the transferred bytes.", directions)
	KVTransfers        = counter("tandem:kv_transfers_total", nodes, "KV transfers that completed with matching checksums.", directions)
	KVTransferFailures = counter("tandem:kv_transfer_failures_total", nodes, "KV transfers that did not complete.", directions)
	KVTransferPieces   = counter("tandem:kv_transfer_pieces_total", nodes,
		"Pieces of KV transferred between nodes; each is one layer of a block.", directions)
	KVTransferRetries = counter("tandem:kv_transfer_retries_total", Prefill, "KV connections that were dialled again.")
	KVTransferHidden  = histogram("tandem:kv_transfer_hidden_seconds", Prefill, transferBuckets,
		"The part of a KV transfer's time during which the prompt was computed.")
	KVTransferExposed = histogram("tandem:kv_transfer_exposed_seconds", Prefill, transferBuckets,
		"The time from the end of the prompt's computation until all KV had arrived, which delays the request.")
	KVTransferFirstByte = histogram("tandem:kv_transfer_first_byte_seconds", Decode, transferBuckets,
		"The time from the grant of a KV transfer until its first bytes arrived.")
	KVTransferLastByte = histogram("tandem:kv_transfer_last_byte_seconds", Decode, transferBuckets,
		"The time from the grant of a KV transfer until its last byte had arrived and all checksums matched.")
	KVLeases = gauge("tandem:kv_leases", Decode,
		"Leases by state: waiting for the first page, transferring, ended with a write in flight.", label("state", "granted", "arriving", "quarantined"))
	KVLeasesExpired = counter("tandem:kv_leases_expired_total", Decode, "Leases that expired because their writer was silent.")
	FencedWrites    = counter("tandem:fenced_writes_total", Decode,
		"KV pages that were rejected: of an ended lease, sent twice, or with a wrong checksum.", label("kind", "stale", "duplicate", "corrupt"))
	GrammarMasks = counter("tandem:grammar_masks_total", Decode,
		"Token masks of constrained requests that were found in a cache, or computed.", label("source", "cached", "computed"))
	GrammarSteps       = counter("tandem:grammar_steps_total", Decode, "Counted steps of computing masks; see docs/serving.md.")
	GrammarSatOut      = counter("tandem:grammar_sat_out_total", Decode, "Times that a constrained request sat a step out because its mask was not known.")
	GrammarEnded       = counter("tandem:grammar_ended_total", Decode, "Constrained requests that could not continue: a dead end, or a limit of counted work.")
	GrammarsCached     = gauge("tandem:grammars", Decode, "Compiled grammars, in use or cached.")
	GrammarBytes       = gauge("tandem:grammar_cache_bytes", Decode, "Memory of the states and masks of grammars, at most --grammar-cache-memory.")
	GrammarWaiting     = gauge("tandem:grammar_waiting", Decode, "Constrained requests that wait for a worker to compute their mask.")
	BlockEventsDropped = counter("tandem:block_events_dropped_total", nodes,
		"Block events that were not sent. Gateways then ask for all blocks again.")

	// Own, at the gateway.
	HTTPRequests = counter("tandem:http_requests_total", Gateway,
		"Answered HTTP requests.", label("route", HTTPRoutes...), label("status", HTTPStatuses...))
	GatewayInFlight        = gauge("tandem:gateway_requests_in_flight", Gateway, "Requests accepted and not completely answered.")
	GatewayAttempts        = counter("tandem:gateway_attempts_total", Gateway, "Attempts started on decode nodes.")
	GatewayAttemptFailures = counter("tandem:gateway_attempt_failures_total", Gateway,
		"Attempts that ended in an error, by code.", label("code", AttemptFailures...))
	GatewayResumes = counter("tandem:gateway_resumes_total", Gateway,
		"Streams that moved to another node after theirs was lost.")
	GatewayClassChanges = counter("tandem:gateway_class_changes_total", Gateway,
		"Streams that continued on a node of another numerics class because no node of theirs was usable; later tokens are valid and may differ.")
	DesiredNodes = gauge("tandem:desired_nodes", Gateway,
		"Nodes that the fleet should have, by the planner of the gateway that leads; 0 on other gateways, and without --planner-profile. For autoscaling: max(tandem:desired_nodes{pool=\"decode\"}).", label("pool", "prefill", "decode"))
	GatewayNodesLost = counter("tandem:gateway_nodes_lost_total", Gateway,
		"Decode nodes whose streams moved although the connection was open: no heartbeats for --node-silence, or no step for --stall-timeout.", label("reason", "silence", "stall"))
	GatewayRefused = counter("tandem:gateway_refused_total", Gateway,
		"Requests refused with 429 by limit: the queue was full, the wait would have been or was too long, a request of higher priority took the place, the limits of the API key or of the client's address, the memory for large bodies and answers, or the grammars that wait to be compiled; and with 503: all --max-connections were busy.", label("limit", "queue", "late", "evicted", "timeout", "concurrency", "tokens", "address", "connections", "body_memory", "grammars"))
	GatewayEvictedConns = counter("tandem:gateway_evicted_connections_total", Gateway,
		"Idle client connections that were closed for new ones, the longest idle first: at --max-connections, or without free file descriptors.")
	GatewayKeyTokens = counter("tandem:gateway_key_tokens_total", Gateway,
		"Tokens of the requests of each API key: prompt, those of prompts, which include the cached ones; cached, those of prompts in the caches of decode nodes; output, those of answers. key is a name of --api-key-file, of the first hundred that the gateway has read, and other for all other requests.", Label{Name: "key", Values: []string{OtherKeys}, Named: true}, label("of", KeyTokens...))
	GatewayKeyFileBad = gauge("tandem:gateway_key_file_bad", Gateway,
		"1 while the file of API keys cannot be read; the previous keys are kept.")
	GatewayQueueTime = histogram("tandem:gateway_queue_time_seconds", Gateway, latencyBuckets,
		"How long requests waited in the gateway for room in the fleet, without requests that did not wait.")
	CertificateExpiry = gauge("tandem:certificate_expiry_timestamp_seconds", all,
		"When the first certificate of a chain expires, in Unix seconds: cluster of --tls-dir and its authority, clients of --ssl-certfile. 0: there is none.", label("certificate", "cluster", "clients"))
	GatewayReloadFailed = gauge("tandem:gateway_reload_failed", Gateway,
		"1 while the last reload of a part failed; its previous state is kept.", label("part", "certificates", "config"))
	GatewayStreamBuffers = gauge("tandem:gateway_stream_buffer_bytes", Gateway,
		"Memory of events that clients have not read yet; each stream buffers at most --stream-buffer-tokens of a choice.")
	GatewayStaleTokens = counter("tandem:gateway_stale_tokens_total", Gateway,
		"Tokens ignored because their attempt or stream had ended.")
	GatewayStreamsPaused = counter("tandem:gateway_streams_paused_total", Gateway,
		"Times a slow client's full buffer paused its generation.")
	GatewayStreamsAborted = counter("tandem:gateway_streams_aborted_total", Gateway,
		"Requests aborted before their end.", label("cause", StreamAborts...))
	GatewayRoutes = counter("tandem:gateway_routes_total", Gateway,
		"Routing decisions by reason; one about decode and one about prefill for each attempt.", label("reason", RouteReasons...))
	GatewayPredictedCached = counter("tandem:gateway_predicted_cached_tokens_total", Gateway,
		"Prompt tokens that the chosen decode nodes were expected to have cached.")
	GatewayActualCached   = counter("tandem:gateway_actual_cached_tokens_total", Gateway, "Prompt tokens that the chosen decode nodes had cached.")
	GatewayPredictedFirst = histogram("tandem:gateway_predicted_first_token_seconds", Gateway, ttftBuckets,
		"Predicted time to first token at routing, if the speed of the node that computes the prompt was known.")
	GatewayActualFirst = histogram("tandem:gateway_actual_first_token_seconds", Gateway, ttftBuckets,
		"Time to first token since routing, of the requests with a prediction. Both leave out requests whose first attempt failed.")
	GatewayFirstError = histogram("tandem:gateway_first_token_error_seconds", Gateway, ttftBuckets,
		"Difference between the first token and its prediction, early or late, of each request with a prediction.", label("side", "early", "late"))
	GatewayUsableDecodeNodes = gauge("tandem:gateway_usable_decode_nodes", Gateway, "Decode nodes that this gateway can send requests to.")
	GatewayBreakers          = gauge("tandem:gateway_breakers", Gateway, "Decode nodes by the state of their circuit breaker.", breakers)
	GatewayUpstreams         = gauge("tandem:gateway_upstreams", Gateway,
		"Upstreams by task and by the result of their probes; new: not probed yet; leaving: removed, with requests in flight.", tasks, label("state", UpstreamStates...))
	GatewayUpstreamBreakers = gauge("tandem:gateway_upstream_breakers", Gateway,
		"Upstreams by the state of their circuit breaker.", breakers)
	GatewayUpstreamRequests = gauge("tandem:gateway_upstream_requests", Gateway,
		"Requests of this gateway in flight at upstreams.", tasks)
	GatewayUntokenized = counter("tandem:gateway_untokenized_prompts_total", Gateway,
		"Requests for upstreams that were routed by the first bytes of their prompt although --tokenizer has their model, because the chat template or the tokenizer failed.")
	GatewayRetryBudget = gauge("tandem:gateway_retry_budget", Gateway,
		"Retries that may be started at once; at 0 failed attempts are not retried.")
	GatewayGrammars = counter("tandem:gateway_grammars_total", Gateway,
		"Constrained requests by the outcome of compiling their grammar: found among recent outcomes, compiled, invalid, beyond a limit of counted work, refused because too many waited, or late.", label("outcome", GrammarOutcomes...))
	GatewayGrammarsWaiting = gauge("tandem:gateway_grammars_waiting", Gateway,
		"Requests whose grammar is being compiled or waits for that; at most --grammar-compiles and --max-queued-grammars.")
	GatewayGrammarBytes   = gauge("tandem:gateway_grammar_cache_bytes", Gateway, "Memory of recent outcomes of compiling grammars.")
	TokenizerCacheLookups = counter("tandem:tokenizer_cache_lookups_total", Gateway,
		"Look-ups in the cache of tokenized chat messages.", label("result", "hit", "miss"))
	TokenizerCacheBytes = gauge("tandem:tokenizer_cache_bytes", Gateway, "Memory of the cache of tokenized chat messages.")

	// Own, everywhere.
	QueueLength = gauge("tandem:queue_length", all, "Entries of each bounded queue.", queues)
	QueueLimit  = gauge("tandem:queue_limit", all,
		"Bounds of the bounded queues; further entries are refused or wait before the queue.", queues)
	RPCFrames      = counter("tandem:rpc_frames_total", all, "Frames between nodes.", directions)
	RPCBytes       = counter("tandem:rpc_bytes_total", all, "Bytes of frames between nodes, with headers and without TLS.", directions)
	RPCConnections = gauge("tandem:rpc_connections", all, "Open connections to other nodes.")
	RPCOutboxFull  = counter("tandem:rpc_outbox_full_total", all, "Frames refused because a connection's outbox was full.")
	RPCSilent      = counter("tandem:rpc_silent_connections_total", all,
		"Connections ended because the peer was silent or did not read.")
	RPCRefused = counter("tandem:rpc_refused_connections_total", all,
		"Connections refused: foreign certificates, other versions, or too many.")
	RPCForbidden = counter("tandem:rpc_forbidden_frames_total", all,
		"Frames refused because the sender's certificate is a node's and only gateways may send them.")
	RPCDialErrors = counter("tandem:rpc_dial_errors_total", all, "Failed connections to other nodes.")
	AcceptErrors  = counter("tandem:accept_errors_total", all,
		"Failed attempts to accept a connection on the HTTP ports, which are retried: out of file descriptors (EMFILE, ENFILE) or memory (ENOBUFS, ENOMEM), or the client aborted.", label("error", netio.ErrorNames()...))
	TraceSpans = counter("tandem:trace_spans_total", all,
		"Spans sent to the collector, and spans that it did not accept.", label("result", "sent", "failed"))
)
