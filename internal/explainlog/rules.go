package explainlog

// Topics of rules.
const (
	topicStart   = "start"
	topicConfig  = "configuration"
	topicModel   = "model"
	topicMemory  = "memory"
	topicCompile = "compile"
	topicGraphs  = "graphs"
	topicSched   = "scheduler"
	topicRates   = "rates"
	topicAPI     = "API"
	topicNetwork = "network"
	topicStop    = "stop"
	topicFault   = "fault"
	topicBench   = "benchmark"
	topicText    = "text"
)

// rules explains messages of vLLM, of the libraries in its process and of what surrounds a log.
// The first rule that matches counts.
var rules = []rule{
	// What surrounds the records.
	{name: "blocks", topic: topicMemory, pattern: `# (?:GPU|cuda) blocks: ([\d,]+)(?:, # CPU blocks: ([\d,]+))?`, what: "The KV cache has {1} blocks on the GPU.", math: blocksLine},
	{name: "blank", topic: topicText, pattern: `^\s*$`, what: "An empty line.", fold: true},
	{name: "fence", topic: topicText, pattern: "^\\s*(?:```\\w*|-{3,}|={3,}|\\*{3,}|#{1,6} .*)\\s*$", what: "A mark of the page that the log was copied from, or a separator.", fold: true},
	{name: "command", topic: topicStart, pattern: `^(?:\^C)?(?:[A-Z][A-Z_0-9]*=\S+ )*(?:\S*/)?(?:vllm serve|tandem (?:up|serve|gateway|prefill|decode)|python3? -m vllm\.)\b`, what: "The command line that started the server.", math: commandArgs},

	// Progress bars.
	{name: "load-bar", topic: topicModel, has: "checkpoint shards", pattern: `(\d+)% Completed \| *(\d+)/(\d+)(?: \[([0-9:]+)<|)|(\d+)% Completed (\d+)/(\d+)`, what: "Progress of reading the checkpoint's files.", fold: true, math: loadBar},
	{name: "graph-bar", topic: topicGraphs, has: "capturing cuda graph", what: "Progress of recording CUDA graphs, one for each batch size: a step of such a size is then started by one call.", fold: true, math: graphBar},
	{name: "download-bar", topic: topicModel, pattern: `^[\w./ ()-]+:? +\d+%.*(?:[kMG]B/s)`, what: "Progress of a download.", fold: true},
	{name: "bar", topic: topicText, pattern: `(\d+)%\|.*\| *(\d+)/(\d+) \[`, what: "A progress bar: {2} of {3} done.", fold: true},

	// Start and configuration.
	{name: "command-more", topic: topicStart, pattern: `^\s+--?[a-z][\w-]*(?:[ =]\S.*)?\s*\\?$`, what: "The command line continues.", fold: true, math: commandArgs},
	{name: "banner", topic: topicStart, pattern: `^[█▄▀ ]*[█▄▀][█▄▀ ]*(?: (version|model) +(\S+))?$`, what: "vLLM's drawing, with its version and the model.", fold: true, math: bannerLine},
	{name: "platform", topic: topicStart, has: "automatically detected platform", pattern: `platform (\S+?)\.?$`, what: "vLLM found out what it runs on: {1}. It is logged by each process as it starts."},
	{name: "plugin", topic: topicStart, pattern: `(?i)\bplugins?\b.*(?:load|available|found|group)|(?:load|available|found).*\bplugins?\b`, what: "A plugin of vLLM was looked for or loaded.", fold: true},
	{name: "version", topic: topicStart, has: "api server version", pattern: `version (\S+)`, what: "The API server's process has started. It parses requests; the engine is another process.", math: versionLine},
	{name: "args", topic: topicConfig, pattern: `^(?:[Nn]on-default )?args: (?:Namespace\()?\{?(.*?)[})]*$`, what: "The flags that were given, without defaults.", math: argsLine},
	{name: "architecture", topic: topicModel, has: "resolved architecture", pattern: `architecture:? (\w+)`, what: "The class that computes the model, named by its config.json: {1}.", math: architectureLine},
	{name: "safetensors-repo", topic: topicModel, has: "error retrieving safetensors", pattern: `(retrying)?`, what: "vLLM asked the Hugging Face hub how large the checkpoint is. The model is a local folder, which is no repository there, so the hub's client refuses the name. Loading continues.", math: repoLine},
	{name: "casting", topic: topicModel, pattern: `(?i)\b(?:down|up)?casting torch\.(\w+) to torch\.(\w+)`, what: "Weights that config.json declares as {1} are computed in {2}.", math: castLine},
	{name: "max-len", topic: topicConfig, has: "using max model len", pattern: `len (\d+)`, what: "Prompt and answer of a request have at most {1} tokens.", math: maxLenLine},
	{name: "max-len-derived", topic: topicConfig, has: "derived max_model_len", what: "--max-model-len is larger than the model's config.json allows.", sev: Warning, unusual: "--max-model-len exceeds what the model was made for.", change: "Lower --max-model-len; longer contexts need a rope scaling that the model supports."},
	{name: "chunk", topic: topicSched, has: "chunked prefill is enabled", pattern: `max_num_batched_tokens=(\d+)`, what: "Prompts are computed in chunks that share steps with decoding: at most {1} tokens a step.", math: chunkLine},
	{name: "batched", topic: topicSched, pattern: `max_num_batched_tokens`, what: "About the token budget of a step (--max-num-batched-tokens)."},
	{name: "graph-cap", topic: topicGraphs, has: "max cuda graph capture size", pattern: `to (\d+)`, what: "vLLM raises the largest batch with a CUDA graph to {1} for this model."},
	{name: "async", topic: topicSched, has: "asynchronous scheduling is enabled", what: "The next step is scheduled while the GPU computes the present one: less idle time between steps.", fold: true},
	{name: "async-off", topic: topicSched, pattern: `(?i)async(?:hronous)? scheduling.*(?:disabled|not supported)|disabl\w+ async`, what: "The next step is scheduled only after the present one.", sev: Note, unusual: "Asynchronous scheduling is off, which costs some CPU time in each step.", change: "See which option switches it off; the line names it."},
	{name: "engine-config", topic: topicConfig, has: "llm engine", pattern: `LLM engine(?: \(v([^)]+)\))? with config: (.*)`, what: "The engine's process has started, with every setting that it uses.", math: engineConfig},
	{name: "init-wait", topic: topicStart, pattern: `(?i)waiting for (?:init message|\d+ local.*engine)`, what: "The engine and the API server's process connect to each other."},
	{name: "eager", topic: topicGraphs, has: "enforce eager set", what: "--enforce-eager: neither torch.compile nor CUDA graphs.", sev: Warning, unusual: "Eager mode: each operation of a step is started by itself, which slows decoding down.", change: "Leave --enforce-eager out, unless graphs fail or memory is short.", math: func(s *state, _ record, _ []string, _ *note) { s.eager = true }},
	{name: "inductor-off", topic: topicCompile, has: "inductor compilation was disabled", what: "A consequence of eager mode: fused kernels of torch.compile are not used.", fold: true},
	{name: "graphs-off", topic: topicGraphs, pattern: `(?i)cudagraphs? is disabled|cuda graphs? (?:is|are) not supported`, what: "No CUDA graphs: each step's kernels are started one by one."},
	{name: "fusions", topic: topicCompile, has: "custom fusions", pattern: `fusions: (.*)$`, what: "Operations that run as one kernel: {1}."},
	{name: "head-dims", topic: topicModel, has: "heterogeneous head dimensions", what: "The model's layers have heads of two sizes, so one attention backend is used for all of them: mixed ones would round differently."},
	{name: "host-ip", topic: topicConfig, has: "host_ip is deprecated", what: "The environment has HOST_IP, which vLLM ignores.", change: "Nothing, on one machine. VLLM_HOST_IP sets the address between machines."},
	{name: "env", topic: topicConfig, pattern: `(?i)unknown vllm environment variable|environment variable .* (?:deprecated|ignored|not set)|\bVLLM_\w+ (?:is|has been) deprecated`, what: "An environment variable is unknown, deprecated or ignored.", sev: Note, unusual: "An environment variable does nothing.", change: "Remove it, or use the name that the line gives."},
	{name: "world", topic: topicNetwork, has: "world_size=", pattern: `world_size=(\d+) rank=(\d+).*?(?:backend=(\w+))?$`, what: "This worker's place among the GPU processes: rank {2} of {1}. They meet at the address in the line, by {3}.", math: worldLine},
	{name: "rank", topic: topicNetwork, has: "is assigned as", pattern: `rank (\d+) in world size (\d+)`, what: "Which part of the model this worker computes: data, pipeline, tensor and expert parallel ranks.", fold: true},
	{name: "nccl-version", topic: topicNetwork, pattern: `(?i)nccl (?:version|==)|using nccl==`, what: "The NCCL library, by which GPUs exchange data.", fold: true},
	{name: "nccl", topic: topicNetwork, pattern: `\bNCCL (?:INFO|WARN|TRACE)\b`, what: "NCCL's own log: how GPUs are connected.", fold: true},
	{name: "allreduce", topic: topicNetwork, pattern: `(?i)custom[_ ]all[_-]?reduce`, what: "About vLLM's own all-reduce for few GPUs of one machine, which is faster than NCCL where GPUs reach each other's memory.", fold: true},
	{name: "p2p", topic: topicNetwork, pattern: `(?i)p2p access cache|p2p (?:capability|access)`, what: "Whether GPUs reach each other's memory directly."},
	{name: "executor", topic: topicStart, pattern: `(?i)(?:mp|ray|multiproc\w*) (?:for|to run|executor).*(?:distributed|worker|inference)|defaulting to use (?:mp|ray)|started a local ray`, what: "Which mechanism runs the worker processes of several GPUs."},
	{name: "placement", topic: topicStart, pattern: `(?i)placement group|use_ray_spmd_worker|dp group leader`, what: "How the worker processes of several GPUs or machines find their places.", fold: true},
	{name: "threads", topic: topicStart, has: "reducing torch parallelism", what: "Each worker process uses few CPU threads, so that they do not take the cores from each other.", change: "OMP_NUM_THREADS sets another number."},
	{name: "inherited", topic: topicStart, has: "closing inherited connection", what: "A worker process closed a connection that it had from its parent; it is harmless.", fold: true},
	{name: "topk", topic: topicModel, pattern: `(?i)flashinfer.*top-?p|top-?p.*flashinfer|top-?p.*(?:pytorch|sampl)`, what: "Which kernels draw tokens when a request has top_p or top_k."},
	{name: "load-start", topic: topicModel, pattern: `(?i)start\w* (?:to load|loading) model`, what: "The worker starts to load the model."},
	{name: "scratch", topic: topicModel, has: "loading model from scratch", what: "The weights are read from files; nothing was kept from an earlier load."},
	{name: "no-flash", topic: topicModel, pattern: `(?i)cannot use flash\w*.* because (.*)$`, what: "FlashAttention is not used: {1}", sev: Note, unusual: "FlashAttention is not used: {1}", change: "See whether the reason can be removed; other kernels are usually slower."},
	{name: "fp8-config", topic: topicModel, pattern: `(?i)using default .*kernel config.*sub-?optimal`, what: "There are no tuned tile sizes for this matrix on this GPU.", sev: Note, unusual: "FP8 products run with default tile sizes: no tuned file for this GPU.", change: "Tune with vLLM's benchmarks/kernels for this GPU, or use DeepGEMM or CUTLASS where they serve it.", fold: true},
	{name: "kernel-config", topic: topicModel, pattern: `(?i)using configuration from (\S+)`, what: "Tuned tile sizes of a kernel were found for this GPU.", fold: true},
	{name: "eagle", topic: topicModel, pattern: `(?i)eagle\d?|draft model|speculative (?:decoding|config)`, what: "About guessing tokens ahead (--speculative-config).", fold: true},
	{name: "op-priority", topic: topicCompile, has: "op priority", what: "Which implementation of an operation is tried first."},
	{name: "kv-scales", topic: topicMemory, pattern: `(?i)(?:q|k|v|kv[ _-]?cache)[ _-]?(?:/v )?scal(?:e|ing)s? factors?`, what: "An fp8 KV cache needs scales, and the checkpoint has none: 1.0 is used.", sev: Note, unusual: "The fp8 KV cache uses scales of 1.0, because the checkpoint has none: answers may be less exact.", change: "Use a checkpoint with KV scales, or compare the answers with --kv-cache-dtype auto.", fold: true},
	{name: "kv-dtype", topic: topicMemory, pattern: `(?i)using (fp8\w*|int8|\w*fp8) data type to store kv ?cache`, what: "KV is stored in {1}: half of the bytes of 16 bits, so twice the tokens."},
	{name: "special-tokens", topic: topicModel, pattern: `(?i)special tokens have been added|initializing the fast tokenizer|tokenizer.*slow`, what: "A note of the tokenizer.", fold: true},
	{name: "prefix-caching", topic: topicMemory, pattern: `(?i)(?:automatic )?prefix caching`, what: "About prefix caching: prompts that begin alike share KV."},
	{name: "lora", topic: topicModel, pattern: `(?i)\blora\b`, what: "About LoRA adapters."},
	{name: "moe-backend", topic: topicModel, pattern: `(?i)using '?([\w ]+?)'? (?:backend for )?(?:mxfp4|fp8|nvfp4|unquantized|int4|wna16)? ?moe(?: backend)?\b|using (\w+) backend for \w+ moe`, what: "The kernels that compute the experts.", fold: true, math: moeLine},
	{name: "marlin", topic: topicModel, pattern: `(?i)using (?:the )?marlin (?:backend|kernel)|selected marlin\w*`, what: "Marlin kernels: weights stay in few bits in memory and are expanded as they are multiplied. They serve GPUs without such arithmetic."},
	{name: "attention", topic: topicModel, pattern: `(?i)using (?:AttentionBackendEnum\.)?([\w ]+?) (?:attention )?backend(?: on v1 engine)?(?: out of potential backends: (.*?))?\.?$`, what: "The kernels that compute attention: {1}.", fold: true, math: attentionLine},
	{name: "moe-modular", topic: topicModel, has: "moeprepareandfinalize", what: "How tokens get to the experts and back; this form is for one GPU, without data or expert parallelism."},
	{name: "moe-stream", topic: topicModel, pattern: `(?i)separate cuda stream for moe shared`, what: "Shared experts are computed on a second CUDA stream, at the same time as the others."},
	{name: "moe-config", topic: topicModel, has: "default moe config", pattern: `configs/(\S+)$`, what: "vLLM has no tuned tile sizes for this count and size of experts on this GPU.", sev: Warning, unusual: "The experts run with default tile sizes: no tuned file for this model and GPU.", change: "Run vLLM's benchmarks/kernels/benchmark_moe.py --tune on this GPU and put the file where the line names it, or into VLLM_TUNED_CONFIG_FOLDER.", math: moeConfigLine},
	{name: "mxfp4-linear", topic: topicModel, pattern: `(?i)mxfp4 (?:linear|attention) layer is not implemented`, what: "Only the experts of an MXFP4 checkpoint are in four bits; attention and other layers are computed in their own type. It is usual for gpt-oss.", fold: true},
	{name: "kernel", topic: topicModel, pattern: `(?i)^(?:selected|using) (\w*kernel\w*)(?: for (\w+))?|using (\w+) (?:as|for) .*(?:gemm|linear|scaled_?mm)`, what: "Which kernel multiplies matrices of this format.", fold: true},
	{name: "weight-only", topic: topicModel, pattern: `(?i)does not have native support for (FP\d) computation`, what: "Weights are stored in {1} and expanded to 16 bits in each product: memory and bandwidth are saved, arithmetic is not.", sev: Note, unusual: "This GPU has no {1} arithmetic: {1} weights save memory, and help decoding, but not prefill.", change: "Nothing, if memory is the reason for {1}. For prefill speed: a GPU with {1} (FP8: Ada, Hopper; FP4: Blackwell)."},
	{name: "quantization", topic: topicModel, pattern: `(?i)detected (?:that )?.*(?:checkpoint|quantiz\w+)|quantization method|is not fully optimized yet`, what: "About the format that weights are quantized in."},
	{name: "weights-format", topic: topicModel, has: "model weights format", what: "The kind of files that hold the weights."},
	{name: "no-index", topic: topicModel, has: "no model.safetensors.index.json", what: "The checkpoint has no index, because all of its weights are in one file. It is usual for small models."},
	{name: "download", topic: topicModel, has: "downloading weights", pattern: `for (\S+): ([\d.]+) seconds`, what: "The weights were not in the local cache and were downloaded.", math: downloadLine},
	{name: "weights-time", topic: topicModel, has: "loading weights took", pattern: `took ([\d.]+) sec`, what: "Reading the weights from files into the GPU.", math: weightsTime},
	{name: "model-memory", topic: topicMemory, pattern: `(?i)model loading took ([\d.]+) ?(GiB|GB)?(?: memory)? and ([\d.]+) sec`, what: "What the weights take of the GPU's memory, and how long it took to get there.", math: modelMemory},
	{name: "model-memory-old", topic: topicMemory, pattern: `(?i)model weights took ([\d.]+) ?(GiB|GB)`, what: "What the weights take of the GPU's memory.", math: func(s *state, _ record, m []string, _ *note) { s.mem.weights = number(m[1]) }},
	{name: "encoder", topic: topicMemory, has: "encoder cache", pattern: `budget of (\d+) tokens`, what: "Embeddings of images, audio or video are kept for at most {1} tokens; memory is measured with the largest such item.", math: func(_ *state, _ record, _ []string, n *note) {
		n.change("--language-model-only, or --limit-mm-per-prompt with 0 of each, frees this memory where only text is served.")
	}},
	{name: "mm-warmup", topic: topicStart, has: "multi-modal warmup", pattern: `in ([\d.]+)s`, what: "The processor of images and other media ran once, which took {1} s of the start."},

	// torch.compile.
	{name: "compile-dir", topic: topicCompile, has: "using cache directory", pattern: `directory: (\S+)`, what: "torch.compile keeps what it builds here, so that the next start with the same settings is faster.", math: cacheDir},
	{name: "dynamo", topic: topicCompile, has: "dynamo bytecode transform", pattern: `: ([\d.]+) s`, what: "torch.compile traced the model's Python code into a graph: {1} s.", math: func(s *state, _ record, m []string, _ *note) { s.dynamo = number(m[1]) }},
	{name: "graph-cached", topic: topicCompile, pattern: `(?i)^cach(?:e|ing) the graph`, what: "The compiled graph is stored for the next start."},
	{name: "graph-loaded", topic: topicCompile, pattern: `(?i)directly load (?:the compiled graph|AOT)`, what: "The compiled graph came from an earlier start's cache: nothing is compiled.", math: graphLoaded},
	{name: "graph-compile", topic: topicCompile, pattern: `(?i)compil\w+ a graph for (?:dynamic shape|compile range|general shape).*takes ([\d.]+) s`, what: "The graph was compiled to kernels: {1} s.", math: func(s *state, _ record, m []string, _ *note) { s.compiled += number(m[1]) }},
	{name: "aot", topic: topicCompile, pattern: `(?i)saved AOT compiled|saving AOT`, what: "The compiled function is stored as a whole, so that the next start skips tracing too."},
	{name: "compile-total", topic: topicCompile, pattern: `torch\.compile (?:takes|took) ([\d.]+) s`, what: "torch.compile in all: {1} s.", math: compileTotal},
	{name: "init-time", topic: topicStart, has: "init engine", pattern: `took ([\d.]+) sec`, what: "From measuring memory to the last graph: {1} s.", math: initTime},
	{name: "warmup", topic: topicCompile, pattern: `(?i)(?:profiling/warmup|warm-?up).*(?:took|completed).*?([\d.]+) ?s`, what: "A step of the largest size ran once, to measure memory and to load kernels: {1} s."},
	{name: "flashinfer-tune", topic: topicCompile, pattern: `(?i)autotun\w+|deep_?gemm.*(?:warm|jit)|warming up`, what: "Kernels are tried out or built before the first request.", fold: true},

	// Memory.
	{name: "blocks-override", topic: topicMemory, has: "num_gpu_blocks_override", pattern: `num_gpu_blocks=(\d+) with num_gpu_blocks_override=(\d+)`, what: "For the measurement of graphs alone, the KV cache has {2} blocks; the real one follows."},
	{name: "graph-profile", topic: topicGraphs, has: "profiling cuda graph memory", pattern: `(?:PIECEWISE=(\d+) \(largest=(\d+)\))?(?:, )?(?:FULL=(\d+) \(largest=(\d+)\))?$`, what: "A few graphs are recorded to estimate the memory of all.", math: graphProfile},
	{name: "graph-estimate", topic: topicGraphs, has: "estimated cuda graph memory", pattern: `memory: ([\d.]+) GiB`, what: "The estimate: {1} GiB for all graphs.", math: func(s *state, _ record, m []string, _ *note) { s.estimated = number(m[1]) }},
	{name: "kv-memory", topic: topicMemory, has: "available kv cache memory", pattern: `memory: (-?[\d.]+) GiB`, what: "What --gpu-memory-utilization leaves for KV next to weights, activations of the largest step and other use.", math: kvMemory},
	{name: "graph-hint", topic: topicGraphs, has: "increase --gpu-memory-utilization from", pattern: `from ([\d.]+) to ([\d.]+)`, what: "A hint: later versions count the memory of graphs before KV. To keep the same KV cache, --gpu-memory-utilization then has to be larger.", math: graphHint},
	{name: "kv-tokens", topic: topicMemory, has: "kv cache size", pattern: `size: ([\d,]+) tokens`, what: "How many tokens the KV cache holds.", math: func(s *state, _ record, m []string, n *note) { s.kvTokens = whole(m[1]); s.kvTokensNote(n) }},
	{name: "concurrency", topic: topicMemory, has: "maximum concurrency for", pattern: `for ([\d,]+) tokens per request: ([\d.]+)x`, what: "How many requests of full length fit the KV cache at once.", math: concurrencyLine},
	{name: "cache-config", topic: topicMemory, has: "num_gpu_blocks is", pattern: `is: ([\d,]+)`, what: "The KV cache has {1} blocks; /metrics has the figure, too.", math: blocksLine},
	{name: "profile-old", topic: topicMemory, has: "memory profiling takes", what: "How the GPU's memory is divided.", math: profileOld},
	{name: "profile-total", topic: topicMemory, has: "the current vllm instance can use", pattern: `total_gpu_memory \(([\d.]+)GiB\) x gpu_memory_utilization \(([\d.]+)\) = ([\d.]+)GiB`, what: "What this server may take of the GPU.", math: profileOld},
	{name: "profile-rest", topic: topicMemory, pattern: `model weights take ([\d.]+)GiB; .*KV Cache is ([\d.]+)GiB`, what: "How the GPU's memory is divided.", math: profileOld},
	{name: "free-memory", topic: topicMemory, pattern: `Free memory on device.*\(([\d.]+)/([\d.]+) GiB\)`, what: "{1} of {2} GiB of the GPU are free, less than --gpu-memory-utilization asks for.", sev: Problem, unusual: "Another process holds memory of the GPU: {1} of {2} GiB are free.", change: "`nvidia-smi` shows the process. End it, or lower --gpu-memory-utilization below {1} ÷ {2}."},
	{name: "hybrid-off", topic: topicMemory, pattern: `(?i)hybrid kv cache manager`, what: "All layers keep KV of all positions, those with a window too.", sev: Warning, unusual: "The hybrid KV cache manager is off: layers with a window keep all positions, so fewer tokens fit.", change: "The line, or one above, names the option that switches it off, such as a KV connector."},
	{name: "hybrid-block", topic: topicMemory, pattern: `(?i)(?:setting attention block size|padding mamba page size|unify\w* .*page size)`, what: "Layers of different kinds share one pool of pages, so their blocks are made equally large."},

	// Graphs.
	{name: "graph-done", topic: topicGraphs, has: "graph capturing finished", pattern: `finished in (\d+) secs?, took (-?[\d.]+) GiB`, what: "All CUDA graphs are recorded: {1} s and {2} GiB.", math: graphDone},
	{name: "graph-pool", topic: topicGraphs, has: "graph pool memory", pattern: `memory: ([\d.]+) GiB \(actual\), ([\d.]+) GiB \(estimated\), difference: ([\d.]+) GiB \(([\d.]+)%\)`, what: "The graphs' memory as it became, next to the estimate.", math: graphPool},
	{name: "graph-token", topic: topicGraphs, has: "compilation for number of tokens", pattern: `tokens (\d+)`, what: "A line of a development version: a graph for batches of so many tokens is recorded.", fold: true},

	// API.
	{name: "tasks", topic: topicAPI, pattern: `(?i)supported[ _]tasks: (.*)$`, what: "What the model can be asked for: {1}."},
	{name: "sampling-default", topic: topicAPI, pattern: `(?i)default (?:vllm )?sampling parameters have been overridden|using default \w+ sampling params`, what: "Requests without sampling fields use those of the model's generation_config.json instead of vLLM's (temperature 1, top_p 1).", change: "--generation-config vllm keeps vLLM's.", fold: true},
	{name: "tool-choice", topic: topicAPI, has: "tool choice has been enabled", what: "--enable-auto-tool-choice: answers may be calls of tools; --tool-call-parser reads them."},
	{name: "tool-ignored", topic: topicAPI, has: "ignore --enable-auto-tool-choice", what: "For this model tool use is always on, so the flag makes no difference. It is no fault."},
	{name: "template-format", topic: topicAPI, has: "content format", pattern: `to be '(\w+)'`, what: "How the chat template takes a message's content: {1} ('string': text alone; 'openai': a list of parts)."},
	{name: "listening", topic: topicAPI, pattern: `(?i)starting vllm (?:api )?server(?: \d+)? on <?(\S+?)>?$`, what: "The server listens at {1}; requests are answered from here on.", math: func(s *state, r record, _ []string, _ *note) { s.served, s.servedAt = true, r.at }},
	{name: "routes", topic: topicAPI, has: "available routes are", what: "The API's routes follow."},
	{name: "route", topic: topicAPI, pattern: `^Route: (\S+), Methods: (.*)$`, what: "Routes of the API.", fold: true, math: routeLine},
	{name: "uvicorn", topic: topicAPI, pattern: `(?i)^(?:started server process|waiting for application startup|application startup complete|uvicorn running on)`, what: "The HTTP server (uvicorn) starts.", fold: true, math: func(s *state, r record, _ []string, _ *note) {
		if !s.served && r.at > 0 {
			s.served, s.servedAt = true, r.at
		}
	}},
	{name: "access", topic: topicAPI, pattern: `"(GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) (\S+) HTTP/[\d.]+" (\d{3})`, what: "A request: {1} {2} was answered with {3}.", math: accessLine},
	{name: "request", topic: topicAPI, pattern: `(?i)^received request (\S+?):`, what: "A request arrived, with its sampling parameters (--enable-log-requests)."},
	{name: "request-added", topic: topicAPI, pattern: `(?i)^(?:added|finished|aborted) request`, what: "A request entered or left the engine."},

	// Rates.
	{name: "rates", topic: topicRates, has: "avg generation throughput", pattern: `^(?:Engine (\d+): )?Avg .*throughput`, what: "Rates since the line before, and the load now.", math: rate},
	{name: "gateway-rates", topic: topicRates, has: "usable decode nodes", pattern: `Avg prompt throughput: ([\d.]+).*generation throughput: ([\d.]+).*Running: (\d+) reqs, Usable decode nodes: (\d+)`, what: "Rates of Tandem's gateway over all nodes.", math: gatewayRate},
	{name: "spec", topic: topicRates, pattern: `(?i)spec(?:ulative|decod\w*) (?:decoding )?metrics`, what: "How well guessed tokens are accepted.", math: specLine},
	{name: "kv-transfer", topic: topicRates, has: "kv transfer metrics", what: "KV blocks moved between servers in the interval.", math: transferLine},

	// Requests under pressure.
	{name: "preempted", topic: topicSched, pattern: `(?i)preempt(?:ed|ion)`, what: "The KV cache was full: a running request gave its blocks back and is computed again later.", sev: Warning, unusual: "Requests are preempted: the KV cache is too small for what runs at once.", change: "Lower --max-num-seqs or --max-model-len, raise --gpu-memory-utilization, or use fp8 KV.", fold: true},
	{name: "too-long", topic: topicAPI, pattern: `(?i)maximum context length is (\d+)|longer than the maximum model length`, what: "A request has more tokens than --max-model-len.", sev: Note, unusual: "Requests are refused because they are longer than the context.", change: "Shorten them, or raise --max-model-len within what the KV cache holds.", fold: true},
	{name: "token-indices", topic: topicAPI, has: "token indices sequence length", what: "The tokenizer's warning about a long text; vLLM checks the length itself.", fold: true},

	// Faults, the most specific first.
	{name: "kv-none", topic: topicFault, has: "no available memory for the cache blocks", what: "Weights and activations leave no memory for KV.", sev: Problem, unusual: "No GPU memory is left for KV.", change: "Raise --gpu-memory-utilization, lower --max-model-len and --max-num-batched-tokens, quantize the weights, or use --tensor-parallel-size."},
	{name: "kv-short", topic: topicFault, pattern: `(?i)at least one request with the model'?s'? max(?:imum)? seq(?:uence)? len(?:gth)? \(?(\d+)\)?.*?([\d.]+) GiB.*?available KV cache memory \(([\d.]+) GiB\)(?:.*?maximum model length is (\d+))?`, what: "One request of {1} tokens needs {2} GiB of KV, and {3} GiB are there.", sev: Problem, unusual: "The KV memory ({3} GiB) is less than one request of {1} tokens needs ({2} GiB).", change: "--max-model-len at most what fits ({4}), a higher --gpu-memory-utilization, or fp8 KV."},
	{name: "kv-short-old", topic: topicFault, pattern: `(?i)max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)`, what: "One request of {1} tokens does not fit: the KV cache holds {2}.", sev: Problem, unusual: "The KV cache holds {2} tokens, fewer than --max-model-len {1}.", change: "--max-model-len {2} or less, a higher --gpu-memory-utilization, or fp8 KV."},
	{name: "oom", topic: topicFault, pattern: `(?i)cuda out of memory|OutOfMemoryError|CUDA error: out of memory|HIP out of memory`, what: "The GPU's memory is full.", sev: Problem, unusual: "The GPU ran out of memory.", change: "Lower --gpu-memory-utilization (graphs and activations are outside of it), --max-num-seqs or --max-num-batched-tokens; see with nvidia-smi what else is on the GPU.", math: oomLine},
	{name: "cuda-error", topic: topicFault, pattern: `CUDA error: (.{1,120}?)(?:\.|$)|cudaError\w+|illegal memory access`, what: "The GPU reported an error. What follows it in the log is a consequence.", sev: Problem, unusual: "A CUDA error: {1}", change: "CUDA_LAUNCH_BLOCKING=1 shows the kernel. `dmesg | grep -i xid` shows whether the GPU itself failed."},
	{name: "no-gpu", topic: topicFault, pattern: `(?i)no cuda gpus are available|found no nvidia driver|failed to infer device type|nvidia driver on your system is too old`, what: "No usable GPU or driver.", sev: Problem, unusual: "No usable GPU or driver was found.", change: "`nvidia-smi` on the host; in a container: --gpus all and the NVIDIA container toolkit. A driver that is too old has to be updated."},
	{name: "engine-dead", topic: topicFault, pattern: `(?i)engine core initialization failed|EngineDeadError|encountered a fatal error|EngineCore failed to start|engine process failed|engine (?:loop )?(?:is )?dead`, what: "The engine's process ended. This line is a consequence; the cause is an earlier line of the engine's process.", sev: Problem, unusual: "The engine's process ended with an error.", change: "Look for the first error of the engine's process above."},
	{name: "gated", topic: topicFault, pattern: `(?i)gated repo|401 client error|access to model .* is restricted|is not a valid model identifier|RepositoryNotFound`, what: "The Hugging Face hub refused the download, or does not know the name.", sev: Problem, unusual: "The model cannot be downloaded: no access, or a wrong name.", change: "Accept the licence on the model's page, set HF_TOKEN, check the name."},
	{name: "port", topic: topicFault, pattern: `(?i)address already in use`, what: "Another process listens on the port.", sev: Problem, unusual: "The port is taken.", change: "`ss -ltnp` shows by whom; choose another --port."},
	{name: "architecture-unknown", topic: topicFault, pattern: `(?i)model architectures? \[?'?(\w*)'?\]? (?:are|is) not supported|does not recognize this architecture`, what: "This version cannot compute the model.", sev: Problem, unusual: "The model's architecture is not supported by this version.", change: "A newer vLLM, and a newer transformers."},
	{name: "shm-wait", topic: topicFault, pattern: `(?i)no available (?:shared memory broadcast )?block(?: found)? in \d+ second`, what: "A worker process does not take its messages: it computes for long, or hangs.", sev: Warning, unusual: "Worker processes do not answer for a minute.", change: "At the start or while kernels compile it is usual. Otherwise `py-spy dump --pid` on the workers, and NCCL's log (NCCL_DEBUG=INFO).", fold: true},
	{name: "nccl-timeout", topic: topicFault, pattern: `(?i)watchdog.*(?:timeout|timed out)|collective operation timeout|ncclSystemError|ncclInternalError|ncclUnhandledCudaError`, what: "GPUs wait for each other without result: one of the processes ended or hangs, or the network between them fails.", sev: Problem, unusual: "Communication between GPUs failed.", change: "Look for the first error of any rank. NCCL_DEBUG=INFO shows the links."},
	{name: "shm-size", topic: topicFault, pattern: `(?i)no space left on device|bus error|insufficient shared memory`, what: "A file system is full, often /dev/shm of a container.", sev: Problem, unusual: "A file system, or shared memory, is full.", change: "`df -h`; in Docker --shm-size 16g or --ipc=host."},
	{name: "killed", topic: topicFault, pattern: `(?i)^killed$|out-of-memory: killed|exit(?:ed with)? code:? ?-?9\b|signal 9|SIGKILL`, what: "The system ended a process, usually because the host's memory was full.", sev: Problem, unusual: "A process was killed.", change: "`dmesg | grep -i kill`; more host memory, or fewer processes at once."},
	{name: "crash", topic: topicFault, pattern: `(?i)segmentation fault|core dumped|SIGSEGV|SIGABRT|^aborted|memory pressure \(OOM\)`, what: "A process crashed, or was ended because memory was short.", sev: Problem, unusual: "A process crashed.", change: "`dmesg` has the fault; a driver or a compiled extension of another version is a usual reason."},
	{name: "leak", topic: topicStop, pattern: `(?i)resource_tracker|leaked (?:semaphore|shared_memory)`, what: "Python's note at the end that shared memory was not released in order. The system releases it.", fold: true},
	{name: "process-group", topic: topicStop, pattern: `(?i)destroy_process_group`, what: "PyTorch's note at the end that the connection of the GPUs was not closed in order. It is harmless at exit.", fold: true},
	{name: "stop", topic: topicStop, pattern: `(?i)^(?:\[shutdown\]|shut(?:ting )?down)|^shutdown (?:initiated|complete)|^waiting for application shutdown|^application shutdown complete|^finished server process|received (?:signal|SIG)|keyboardinterrupt|^\^C$|^stopping reloader`, what: "The server stops.", math: stopLine},
	{name: "abort", topic: topicStop, pattern: `(?i)^aborting (\d+) requests?`, what: "{1} requests were under way and are cut.", sev: Note, unusual: "{1} requests were cut by the stop.", change: "Drain before stopping: take the server out of the load balancer and wait for Running: 0, or give vLLM a shutdown timeout."},

	// Python.
	{name: "traceback", topic: topicFault, pattern: `^\s*(?:ERROR: )?Traceback \(most recent call last\)`, what: "Python's call stack of an error. The error itself is the last line, without indentation.", fold: true, math: func(s *state, _ record, _ []string, _ *note) { s.traceback = true }},
	{name: "frame", topic: topicFault, pattern: `^\s+File "([^"]+)", line (\d+)`, what: "Frames of a call stack.", fold: true},
	{name: "python-process", topic: topicFault, pattern: `^Process [\w-]+:$`, what: "A process of Python ends with an error; its call stack follows."},
	{name: "chain", topic: topicFault, pattern: `(?i)^(?:the above exception was the direct cause|during handling of the above exception)`, what: "Another error followed from the one above; the first one is the cause."},
	{name: "error", topic: topicFault, pattern: `^(?:[a-zA-Z_][\w.]*\.)?(\w*(?:Error|Exception|Interrupt|Warning|Exit|Failure))\b(?:: (.*))?$`, what: "", math: pythonError},
	{name: "py-warning", topic: topicText, pattern: `^\S+\.py:\d+: (\w+Warning): (.*)$`, what: "A warning of a Python library ({1}).", fold: true},
	{name: "triton", topic: topicStart, pattern: `(?i)triton.*not (?:installed|available)|failed to import from vllm\._`, what: "A compiled part of vLLM or Triton is missing.", sev: Warning, unusual: "A compiled part is missing: slow paths are used, or the start fails.", change: "Install the wheel for this platform, or build vLLM from source here."},
	{name: "deprecated", topic: topicConfig, pattern: `(?i)\bdeprecat`, what: "Something that is used here will be removed in a later version.", sev: Note, unusual: "A deprecated setting is used: {0}", change: "Use what the line names instead.", math: func(_ *state, r record, _ []string, n *note) {
		n.unusual = "A deprecated setting or call: " + shorten(r.msg, 160)
	}},

	// Results of a benchmark.
	{name: "bench-head", topic: topicBench, pattern: `^=+ Serving Benchmark Result =+$`, what: "The results of `vllm bench serve` or `tandem bench serve`."},
	{name: "bench-part", topic: topicBench, pattern: `^-+ ?(?:Time|Inter|End|Speculative)[\w -]+ ?(?:\([^)]*\))? ?-+$`, what: "A part of the results."},
	{name: "bench", topic: topicBench, pattern: `^((?:[A-Z][\w/-]*|E2EL|ITL)(?: [\w/-]+){0,4}(?: \([\w/]+\))?): {2,}([\d.]+) *$`, what: "A figure of the benchmark.", math: benchLine},
}
