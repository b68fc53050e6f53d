package config

// Reasons that several flags share.
const (
	cpuOnly    = "Tandem has its own kernels, for CPUs (--cpu-kernels) and GPUs (--device)"
	noGraphs   = "CUDA graphs have sizes of powers of two up to 512 tokens; CPUs have none"
	oneNode    = "a model runs whole on each node; for more throughput add decode nodes (`tandem up --decode N`, or `tandem decode --join`)"
	joins      = "nodes find each other by --join host:port; start `tandem decode` and `tandem prefill` on each machine"
	noExperts  = "each node has all experts of a model; leave it out, and split each expert by --tensor-parallel-size"
	textOnly   = "the models served read text only; send images, audio and video to a server of multimodal models"
	noMedia    = "the models served read text only"
	noMamba    = "models with state-space layers are not served"
	noLora     = "adapters are computed in float32 and stay separate from the weights"
	noSpec     = "use --speculative-config"
	noOffload  = "weights are mapped from their files, and KV blocks stay in the node's memory; set its size by --kv-cache-memory-bytes"
	noPlugin   = "code is not loaded at run time; put a proxy in front of the gateway, or change Tandem"
	noProfiler = "read /metrics, or profile the process with perf"
	safetensor = "weights are mapped from safetensors files"
	noDownload = "`tandem pull --include` picks files, and HF_HUB_CACHE is where they go"
	noParser   = "leave it out: tool calls and reasoning are split as the chat template writes them; --tool-call-parser and --reasoning-parser name other formats"
	noTune     = "it tunes a part of vLLM that Tandem does not have"
	noSleep    = "a node holds its memory while it runs; stop it (SIGTERM drains) to free it"
)

// gone begins the reason of a flag that newer versions of vllm serve do not have.
const gone = "newer vLLM has removed it; "

// VLLM has every flag of vllm serve 0.33.0, and those of earlier versions that were removed since.
var VLLM = []VLLMGroup{
	{"model", nodes, flags(
		supported("enforce-eager? served-model-name*"),
		partly("model", "a folder, or a model of the local Hugging Face cache", "`tandem pull` or --download downloads a model into that cache"),
		partly("revision", "with ORG/NAME", "a folder has no revisions"),
		partly("dtype", "`auto`, the type that the weights are stored in, and `float32` for integers, which it expands", "other weights are not converted; leave it out, or convert the checkpoint"),
		partly("max-model-len", "up to the model's own limit", "the model was not made for more positions"),
		partly("quantization,q", "`none`, `int8`, `int4`, and the format that config.json declares", "other formats are neither read nor made; use int8 or int4, or a checkpoint in bfloat16, fp8 or MXFP4"),
		partly("max-logprobs", "1 to 256", "no request gets more than 256"),
		partly("chat-template", "a file, or the template itself", "a file must exist and hold a template"),
		refused("runner:auto|generate|pooling convert:auto|none|embed", "models here give tokens and vectors; use another server to classify and for rewards"),
		refused("pooler-config", "the model folder's modules.json chooses the vector; change it there"),
		refused("tokenizer", "the tokenizer is the model folder's tokenizer.json; put the file there (`tandem gateway` takes one, for upstreams)"),
		refused("tokenizer-mode:auto|hf", "the tokenizer is the model folder's tokenizer.json; leave it out"),
		noEffect("trust-remote-code? code-revision", "no code of a model folder is ever run"),
		noEffect("seed", "a request without a seed gets a random one; put \"seed\" into the request to repeat it"),
		refused("hf-config-path", "config.json is read from the model's folder; put the file there"),
		noEffect("allowed-local-media-path allowed-media-domains*", noMedia),
		refused("tokenizer-revision", "the tokenizer is the model folder's; use --revision for both"),
		refused("quantization-config", "config.json declares the weights' quantization; --quantization quantizes them to int8 or int4"),
		noEffect("allow-deprecated-quantization?", "no quantization here is deprecated"),
		refused("enable-return-routed-experts?", "responses do not name the experts that computed them"),
		refused("return-sampling-mask?", "a response has logprobs and top_logprobs, not the sampler's mask"),
		refused("logprobs-mode:raw_logprobs", "log-probabilities are the model's own, before penalties and temperature"),
		noEffect("use-fp64-gumbel? disable-cascade-attn?", noTune),
		refused("enable-trace-replay?", "give requests a \"seed\" and temperature to repeat them"),
		refused("disable-sliding-window?", "layers see the window that their model was made with; --max-model-len bounds the context"),
		refused("skip-tokenizer-init?", "leave tokenizer.json out of the folder: then prompts and answers are token ids"),
		refused("enable-prompt-embeds?", "a prompt is text or token ids"),
		refused("config-format:auto|hf", "a model is a folder in Hugging Face's layout; leave it out"),
		noEffect("hf-token", "--download reads the token from HF_TOKEN, which other users of the machine cannot see"),
		refused("hf-overrides", "edit config.json in a copy of the model's folder; the weights may be links"),
		refused("model-class-overrides", "each architecture has its own implementation"),
		refused("generation-config:auto", "generation_config.json is read from the model's folder; edit it there"),
		refused("override-generation-config", "edit generation_config.json in the model's folder, or set the values in requests"),
		refused("enable-sleep-mode? sleep-mode-backend sleep-mode-offload-cudagraph? "+
			"sleep-preserve-parameter-names",
			noSleep),
		noEffect("enable-cumem-allocator? enable-nccl-comm-suspend?", cpuOnly),
		refused("model-impl:auto|vllm", "models run on Tandem's own engine"),
		refused("logits-processors* io-processor-plugin", noPlugin),
		noEffect("renderer-num-workers", "the gateway renders on all its threads"),
	)},
	{"load", nodes, flags(
		refused("load-format:auto|safetensors", "weights are read from safetensors; convert the checkpoint"),
		noEffect("download-dir ignore-patterns*", noDownload),
		noEffect("safetensors-load-strategy safetensors-prefetch-num-threads "+
			"safetensors-prefetch-block-size model-loader-extra-config pt-load-map-location",
			safetensor),
		noEffect("use-tqdm-on-load?", "the log has the time that loading took"),
	)},
	{"attention and kernels", nodes, flags(
		noEffect("attention-backend ir-op-priority enable-flashinfer-autotune? monokernel moe-backend "+
			"linear-backend sparse-indexer-topk-backend",
			cpuOnly),
		noEffect("cudagraph-capture-sizes# max-cudagraph-capture-size", noGraphs),
		noEffect("gdn-prefill-backend kda-prefill-backend kda-decode-backend mamba-backend "+
			"mamba-ssu-algorithm enable-mamba-cache-stochastic-rounding? mamba-cache-philox-rounds",
			noMamba),
	)},
	{"reasoning", gateways, flags(
		supported("reasoning-parser"),
		refused("reasoning-parser-plugin", noPlugin),
	)},
	{"parallel", nodes, flags(
		refused("distributed-executor-backend:mp|uni pipeline-parallel-size,pp:1 "+
			"decode-context-parallel-size,dcp:1 prefill-context-parallel-size,pcp:1 "+
			"data-parallel-size,dp:1 data-parallel-size-local,dpl:1",
			oneNode),
		refused("master-addr master-port nnodes,n:1 node-rank,r:0 data-parallel-rank,dpn:0 "+
			"data-parallel-start-rank,dpr:0 data-parallel-address,dpa data-parallel-rpc-port,dpp "+
			"data-parallel-backend,dpb:mp",
			joins),
		supported("distributed-timeout-seconds"),
		partly("tensor-parallel-size,tp", "a divisor of the model's heads", "each process computes whole heads"),
		noEffect("cpu-distributed-timeout-seconds dcp-comm-backend dcp-q-replicate? "+
			"dcp-kv-cache-interleave-size cp-kv-cache-interleave-size enable-hc-sp? "+
			"enable-batch-sharded-sampling? dp-sync-interval disable-nccl-for-dp-synchronization? "+
			"disable-custom-all-reduce?",
			oneNode),
		refused("numa-bind? numa-bind-nodes#", "start the node under numactl"),
		refused("numa-bind-cpus*", "start the node under taskset or numactl"),
		refused("device-ids", cpuOnly),
		refused("data-parallel-hybrid-lb?,dph data-parallel-external-lb?,dpe "+
			"data-parallel-multi-port-external-lb?,dpm",
			"gateways balance over all decode nodes; run as many as you like"),
		refused("enable-expert-parallel?,ep enable-elastic-ep? enable-eplb?", noExperts),
		noEffect("enable-ep-weight-filter? all2all-backend elastic-ep-max-dp-size eplb-config "+
			"expert-placement-strategy",
			noExperts),
		noEffect("enable-dbo? enable-shm-tensor-arena? ubatch-size dbo-decode-token-threshold "+
			"dbo-prefill-token-threshold",
			noTune),
		noEffect("max-parallel-loading-workers", safetensor),
		noEffect("ray-workers-use-nsight?", "there are no Ray workers"),
		refused("worker-cls:auto worker-extension-cls", noPlugin),
		noEffect("enable-fault-tolerance?:true fault-tolerance-config", "the fleet always continues without nodes that end"),
	)},
	{"cache", nodes, flags(
		supported("block-size gpu-memory-utilization kv-cache-memory-bytes"),
		partly("kv-cache-dtype", "`auto`, `float32`, `bfloat16`, `fp8`, `fp8_e4m3`", "KV is stored in one of these types; use fp8 or leave it out"),
		noEffect("device-memory-utilization", "--kv-cache-memory-bytes sets the memory of KV blocks"),
		refused("num-gpu-blocks-override", "--kv-cache-memory-bytes sets the memory of KV blocks"),
		noEffect("enable-prefix-caching?:true", "prefixes are always cached, which never changes a token; leave it out; a request's \"cache_salt\" separates it from others"),
		noEffect("prefix-caching-hash-algo", "blocks are found by xxhash64 and used only if their tokens are equal"),
		noEffect("prefix-cache-retention-interval", "blocks stay cached until their memory is needed"),
		refused("kv-cache-dtype-skip-layers*", "all layers keep their KV in --kv-cache-dtype"),
		noEffect("kv-sharing-fast-prefill? swa-bounded-replay", noTune),
		noEffect("mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode "+
			"enable-mamba-shared-prefix-checkpoint? replayssm-buffer-len use-replayssm?",
			noMamba),
		noEffect("prefix-match-unit", "prefixes are matched in whole blocks, --block-size tokens or more where layers differ"),
		refused("kv-offloading-size kv-offloading-backend", noOffload),
	)},
	{"offload", nodes, flags(
		refused("offload-backend:auto cpu-offload-gb:0 cpu-offload-params offload-group-size:0 "+
			"offload-num-in-group offload-prefetch-step offload-params",
			noOffload),
	)},
	{"multimodal", nodes, flags(
		noEffect("language-model-only?:true", textOnly),
		noEffect("limit-mm-per-prompt media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "+
			"mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb "+
			"mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype "+
			"mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path "+
			"mm-encoder-fp8-scale-save-margin interleave-mm-strings? skip-mm-profiling? "+
			"video-pruning-rate video-pruning-method mm-tensor-ipc mm-processor-device "+
			"mm-ipc-gpu-memory-gb mm-device-do-normalize?",
			noMedia),
		refused("enable-mm-embeds? mm-encoder-only?", textOnly),
	)},
	{"adapters", nodes, flags(
		supported("enable-lora? max-loras max-lora-rank"),
		partly("lora-modules=", "with --enable-lora", "adapters need memory, which --enable-lora reserves"),
		partly("max-cpu-loras", "at least --max-loras", "the adapters of a step are loaded"),
		noEffect("lora-dtype fully-sharded-loras? specialize-active-lora? enable-mixed-moe-lora-format? "+
			"enable-moe-shared-loras? max-lora-cls-labels",
			noLora),
		refused("enable-tower-connector-lora? default-mm-loras", textOnly),
		refused("lora-target-modules*", "all attention and dense MLP projections of an adapter are used"),
	)},
	{"logging and metrics", nodes | gateways, flags(
		refused("logging-config log-config-file", "the log goes to standard error; choose --log-level and --log-format"),
		supported("disable-log-stats? enable-log-requests?"),
		partly("log-level", "`debug`, `info`, `warning`, `error`", "there are no other levels"),
		partly("otlp-traces-endpoint", "http:// and https:// URLs", "traces are sent by OTLP over HTTP, to port 4318 by default"),
		noEffect("show-hidden-metrics-for-version", "no metric is hidden"),
		noEffect("collect-detailed-traces*", "spans of queue, prompt and tokens are always part of a trace"),
		noEffect("per-request-spec-decode-metrics?", "/metrics counts draft and accepted tokens of all requests together"),
		noEffect("kv-cache-metrics? kv-cache-metrics-sample", "/metrics always has the use of the KV cache"),
		refused("custom-histogram-buckets*", "histograms have fixed buckets"),
		noEffect("cudagraph-metrics?", noGraphs),
		refused("enable-layerwise-nvtx-tracing? enable-mfu-metrics? enable-logging-iteration-details?", noProfiler),
		noEffect("jit-monitor-mode jit-monitor-verbose?", "nothing is compiled at run time"),
		noEffect("aggregate-engine-logging?", "a node has one engine"),
		noEffect("fail-on-environ-validation?", "a TANDEM_ variable with a bad value always ends the start"),
	)},
	{"scheduler", nodes, flags(
		supported("max-num-batched-tokens max-num-seqs max-num-queued-reqs async-scheduling?"),
		refused("max-num-scheduled-tokens", "--max-num-batched-tokens bounds the tokens of a step"),
		refused("max-num-active-seqs", "--max-num-seqs bounds the requests that run at once"),
		refused("max-num-queued-tokens", "--max-queued-tokens bounds what waits in the gateway"),
		refused("long-prefill-token-threshold:0 long-prefill-token-threshold-adaptive?", "--max-num-batched-tokens bounds how much of a prompt enters a step"),
		noEffect("scheduling-policy:fcfs|priority", "requests run in the order of their \"priority\", lower first, then of their arrival"),
		noEffect("enable-chunked-prefill?:true", "prompts are always computed in chunks of what a step has room for"),
		noEffect("disable-chunked-mm-input?", noMedia),
		refused("scheduler-cls", noPlugin),
		noEffect("scheduler-reserve-full-isl? watermark prefill-schedule-interval", noTune),
		noEffect("disable-hybrid-kv-cache-manager?", "layers with a window always keep only the blocks of that window"),
		refused("stream-interval:1", "each token is sent at once"),
	)},
	{"other engine flags", nodes, flags(
		supported("shutdown-timeout config"),
		partly("speculative-config,sc", "the methods `ngram` and `draft_model`", "leave it out: answers are the same without, only slower"),
		refused("spec-method spec-model spec-tokens:0", noSpec),
		refused("watermark-config", "output is not watermarked"),
		refused("diffusion-config,dc", "models here generate text token by token"),
		refused("kv-transfer-config", "`tandem prefill` and `tandem decode` transfer KV without configuration; start both, or `tandem up`"),
		refused("kv-events-config", "nodes publish block events to gateways without configuration; --nats-url names a NATS server for them"),
		refused("ec-transfer-config ec-manager-config", textOnly),
		noEffect("compilation-config,cc optimization-level", "nothing is compiled at run time"),
		noEffect("attention-config,ac kernel-config", cpuOnly),
		refused("engram-config", "models with an engram memory are not served"),
		refused("reasoning-config", noParser),
		refused("additional-config", "there are no platform plugins"),
		refused("aux-output-config", "a response holds text and log-probabilities"),
		refused("profiler-config", noProfiler),
		noEffect("watchdog-config", "gateways always watch their nodes; /livez fails when the process does not answer"),
		noEffect("performance-mode", noTune),
		refused("weight-transfer-config", "weights are read from files; start new nodes with the new folder and drain the old ones"),
		refused("headless?", "start `tandem decode` or `tandem prefill`: nodes have no API of their own"),
	)},
	{"front end", gateways, flags(
		supported("port api-key* max-log-len"),
		partly("host", "loopback addresses; others with --ssl-certfile, or with --insecure for plain HTTP", "the API is not served to other machines by accident"),
		partly("ssl-keyfile ssl-certfile", "both", "TLS needs the certificate and its key"),
		partly("ssl-ca-certs ssl-cert-reqs", "both, with --ssl-certfile", "client certificates are verified against authorities"),
		partly("allowed-origins", "`*` with API keys only", "every web page could use a gateway without keys"),
		partly("structured-outputs-config", "backend auto, disable_any_whitespace", "grammars are compiled by Tandem"),
		noEffect("enable-ssl-refresh?:true", "changed certificates are always loaded without a restart"),
		refused("ssl-ciphers", "TLS 1.2 and 1.3 are offered with Go's choice of ciphers"),
		refused("chat-template-content-format:auto|string|openai", "the template decides; leave it at auto"),
		supported("trust-request-chat-template? enable-tokenizer-info-endpoint?"),
		refused("trust-request-mm-kwargs?", textOnly),
		refused("default-chat-template-kwargs", "put \"chat_template_kwargs\" into the request, or the defaults into the template by --chat-template"),
		supported("enable-auto-tool-choice? tool-call-parser"),
		refused("reasoning-effort-map exclude-tools-when-tool-choice-none? tool-strict-level", noParser),
		refused("response-role:assistant", "answers have the role assistant"),
		refused("return-tokens-as-token-ids?", "answers are text; POST /tokenize gives the ids of any text"),
		refused("tool-parser-plugin middleware*:[]", noPlugin),
		refused("tool-server", "clients run their tools themselves"),
		noEffect("enable-prompt-tokens-details?:true", "usage always has prompt_tokens_details.cached_tokens"),
		refused("enable-per-request-metrics?", "/metrics has the times as histograms"),
		noEffect("enable-server-load-tracking?", "/metrics always has the load"),
		refused("enable-force-include-usage?", "put \"stream_options\": {\"include_usage\": true} into the request"),
		refused("sse-keep-alive-interval", "--sse-keep-alive 10s sends comments in silent streams; 0 sends none"),
		refused("enable-log-outputs?", "answers are never logged; log them in a proxy before the gateway"),
		noEffect("enable-log-deltas?", "contents of requests are never logged"),
		noEffect("cohere-is-reasoning-model? cohere-format", "Cohere's API is not served"),
		noEffect("anthropic-disabled-thinking-effort", "Anthropic's API is not served"),
		noEffect("log-error-stack?", "a fault of the gateway is always logged with its stack"),
		refused("tokens-only?", "leave tokenizer.json out of the folder: then prompts and answers are token ids"),
		refused("grpc? grpc-port", "the API is HTTP"),
		noEffect("data-parallel-supervisor-port dp-supervisor-probe-interval-s "+
			"dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold",
			oneNode),
		refused("uds", "listen on loopback by --host 127.0.0.1 --port PORT"),
		noEffect("uvicorn-log-level", "there is one log; use --log-level"),
		noEffect("disable-uvicorn-access-log?:true disable-access-log-for-endpoints", "requests are not logged one by one at --log-level info"),
		refused("allow-credentials?", "pages send keys in the header Authorization, which needs no cookies"),
		noEffect("allowed-methods", "pages of --allowed-origins may use GET, HEAD and POST"),
		noEffect("allowed-headers", "pages of --allowed-origins may send every header"),
		refused("root-path", "let the proxy strip the path before the gateway"),
		noEffect("enable-request-id-headers?:true", "answers always carry X-Request-Id"),
		noEffect("disable-fastapi-docs?", "the API has no pages of documentation"),
		refused("enable-offline-docs?", "the API has no pages of documentation; read docs/"),
		noEffect("enable-flash-late-interaction?", "models here generate text"),
		noEffect("api-server-count,asc", "one gateway uses all its threads; run more gateways for more"),
	)},
	{"removed from newer vLLM", nodes | gateways, flags(
		refused("override-attention-dtype:auto|float32", gone+"attention sums in float32"),
		noEffect("calculate-kv-scales? quantization-param-path", gone+"KV is kept in float32 or bfloat16, which needs no scales"),
		noEffect("max-long-partial-prefills max-num-partial-prefills scheduler-delay-factor num-scheduler-steps "+
			"multi-step-stream-outputs? num-lookahead-slots use-v2-block-manager? disable-async-output-proc? max-paddings",
			gone+noTune),
		noEffect("swap-space preemption-mode", gone+"preempted requests are computed again, and nothing is swapped out"),
		refused("task:auto|generate|embed|embedding", gone+"models here give tokens and vectors; use another server to classify and for rewards"),
		refused("rope-scaling rope-theta", gone+"edit config.json in a copy of the model's folder; the weights may be links"),
		refused("enable-reasoning?", gone+noParser),
		refused("speculative-model num-speculative-tokens speculative-model-quantization "+
			"speculative-draft-tensor-parallel-size,spec-draft-tp speculative-max-model-len "+
			"speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min",
			gone+noSpec),
		noEffect("speculative-disable-mqa-scorer? spec-decoding-acceptance-method "+
			"typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha "+
			"disable-logprobs-during-spec-decoding?",
			gone+"a guess stays if it equals the draw of the model, and answers always have log-probabilities"),
		noEffect("guided-decoding-backend guided-decoding-disable-fallback? "+
			"guided-decoding-disable-any-whitespace? guided-decoding-disable-additional-properties?",
			gone+"structured output needs no backend, and --structured-outputs-config sets its whitespace"),
		noEffect("disable-log-requests?:true", gone+"requests are logged with --enable-log-requests only"),
		noEffect("max-seq-len-to-capture max-context-len-to-capture cuda-graph-sizes# full-cuda-graph?", gone+noGraphs),
		refused("worker-use-ray? engine-use-ray?", gone+oneNode),
		noEffect("tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config disable-frontend-multiprocessing?",
			gone+"the gateway tokenizes on all its threads"),
		refused("enable-prompt-adapter? prompt-adapters=", gone+"adapters are LoRA; use --enable-lora and --lora-modules"),
		noEffect("max-prompt-adapters max-prompt-adapter-token", gone+"adapters are LoRA"),
		noEffect("lora-extra-vocab-size", gone+"adapters add no tokens"),
		refused("long-lora-scaling-factors enable-lora-bias? qlora-adapter-name-or-path", gone+"adapters in PEFT's format are served by --lora-modules"),
		noEffect("disable-mm-preprocessor-cache? image-input-type image-token-id image-input-shape image-feature-size "+
			"image-processor image-processor-revision disable-image-processor? enable-multimodal-encoder-data-parallel?",
			gone+noMedia),
		refused("logits-processor-pattern", gone+noPlugin),
		refused("override-neuron-config", gone+cpuOnly),
		refused("override-pooler-config", gone+"the model folder's modules.json chooses the vector; change it there"),
		noEffect("num-redundant-experts eplb-window-size eplb-step-interval eplb-log-balancedness?", gone+noExperts),
		noEffect("weights-load-device", gone+safetensor),
		refused("chat-template-text-format:string|openai", gone+"the template decides"),
	)},
}
