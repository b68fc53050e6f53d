package explainlog

import (
	"fmt"
	"math"
	"path"
	"regexp"
	"strings"
)

// flagMeanings explains settings as they are listed in "non-default args".
var flagMeanings = []struct{ name, what string }{
	{"model", "the checkpoint"},
	{"max_model_len", "tokens of prompt and answer of one request"},
	{"max_num_seqs", "requests that run at once"},
	{"max_num_batched_tokens", "tokens of a step: the budget of prompts' chunks and decoding together"},
	{"gpu_memory_utilization", "share of the GPU's memory that the server may take"},
	{"tensor_parallel_size", "GPUs that share each layer"},
	{"pipeline_parallel_size", "GPUs that have a part of the layers each"},
	{"data_parallel_size", "copies of the engine"},
	{"quantization", "how weights are quantized as they are loaded"},
	{"kv_cache_dtype", "type of the KV cache"},
	{"enforce_eager", "neither torch.compile nor CUDA graphs"},
	{"enable_chunked_prefill", "prompts are computed in chunks; it is the default"},
	{"enable_prefix_caching", "prompts that begin alike share KV; it is the default"},
	{"trust_remote_code", "the checkpoint's own Python code is run"},
	{"speculative_config", "tokens are guessed and checked several at a time"},
	{"kv_transfer_config", "KV blocks move between servers"},
	{"reasoning_parser", "thoughts are split from the answer"},
	{"tool_call_parser", "calls of tools are read from the answer"},
	{"enable_auto_tool_choice", "the model may call tools by itself"},
	{"chat_template", "another chat template than the model's own"},
	{"served_model_name", "name in the API"},
	{"host", "address to listen on"},
	{"port", "port to listen on"},
	{"swap_space", "host memory for preempted requests (older versions)"},
	{"block_size", "tokens of a KV block"},
	{"dtype", "type of weights and activations"},
	{"seed", "of sampling"},
}

// commandArgs takes the flags of a command line that later arithmetic uses.
func commandArgs(s *state, r record, _ []string, n *note) {
	words := strings.Fields(r.msg)
	for i, w := range words {
		name, value, ok := strings.Cut(w, "=")
		if !ok && i+1 < len(words) {
			value = words[i+1]
		}
		switch strings.ReplaceAll(name, "_", "-") {
		case "serve":
			if i > 0 && !strings.HasPrefix(value, "-") && s.model == "" && value != "" && value != `\` {
				s.model = shorten(value, 200)
			}
		case "--max-num-seqs":
			s.maxSeqs = whole(value)
		case "--gpu-memory-utilization":
			s.utilization = number(value)
		case "--tensor-parallel-size", "-tp":
			s.tp = whole(value)
		case "--enforce-eager":
			s.eager = true
		}
	}
	if strings.HasSuffix(r.msg, `\`) && !indented.MatchString(r.msg) {
		n.what = "The command line that started the server; it continues on lines that the log lacks or that follow."
	}
}

func bannerLine(s *state, _ record, m []string, n *note) {
	switch m[1] {
	case "version":
		s.version = m[2]
	case "model":
		s.model = m[2]
	}
}

func versionLine(s *state, _ record, m []string, n *note) {
	s.version = strings.TrimPrefix(m[1], "v")
	if strings.Contains(s.version, "dev") {
		n.math("%s is a development version: its lines and defaults may differ from a release", shorten(s.version, 60))
	}
}

func argsLine(s *state, _ record, m []string, n *note) {
	args := dict(m[1])
	for _, f := range flagMeanings {
		v, ok := args[f.name]
		if !ok {
			continue
		}
		switch f.name {
		case "model":
			s.model = shorten(v, 200)
		case "max_num_seqs":
			s.maxSeqs = whole(v)
		case "max_model_len":
			s.maxLen = whole(v)
		case "max_num_batched_tokens":
			s.batched = whole(v)
		case "gpu_memory_utilization":
			s.utilization = number(v)
		case "tensor_parallel_size":
			s.tp = whole(v)
		case "block_size":
			if b := whole(v); b > 0 && b <= 256 {
				s.blockTokens = b
			}
		}
		n.math("%s = %s: %s", f.name, shorten(v, 120), f.what)
	}
	if s.utilization > 0.95 {
		n.find(Note, fmt.Sprintf("--gpu-memory-utilization %.2f leaves %.0f %% of the GPU for graphs, NCCL and other processes.", s.utilization, 100*(1-s.utilization)),
			"Lower it if the server runs out of memory under load.")
	}
	if args["trust_remote_code"] == "True" {
		n.find(Note, "--trust-remote-code runs Python code of the checkpoint.", "Leave it out if the model is known to this vLLM version.")
	}
}

func architectureLine(s *state, _ record, m []string, _ *note) { s.arch = m[1] }

func repoLine(_ *state, r record, _ []string, n *note) {
	if !strings.Contains(r.msg, "Repo id must be") {
		n.what = "vLLM asked the Hugging Face hub how large the checkpoint is, and got no answer."
	}
	n.sev, n.unusual, n.changes = Note, "An ERROR that is none: a local folder was looked up on the Hugging Face hub.", "Nothing. HF_HUB_OFFLINE=1 avoids the request and the pause."
	if !strings.Contains(r.msg, "Repo id must be") {
		n.sev, n.unusual, n.changes = Warning, "The Hugging Face hub did not describe the checkpoint's files.", "Check the network, HF_TOKEN and the name."
	}
}

var typeBytes = map[string]int{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

func castLine(_ *state, _ record, m []string, n *note) {
	if a, b := typeBytes[m[1]], typeBytes[m[2]]; a > b && b > 0 {
		n.math("%d bytes become %d: 1/%d of the memory for each weight that is stored so", a, b, a/b)
	} else if m[1] == "bfloat16" && m[2] == "float16" {
		n.find(Note, "bfloat16 weights are computed in float16, whose largest number is 65,504.", "--dtype bfloat16, on GPUs from Ampere on.")
	}
}

func maxLenLine(s *state, _ record, m []string, _ *note) { s.maxLen = whole(m[1]) }

func chunkLine(s *state, _ record, m []string, n *note) {
	before := s.batched
	s.batched = whole(m[1])
	if s.maxLen > 0 && s.batched > 0 {
		n.math("a prompt of %s tokens takes %s ÷ %s = at least %d steps", thousands(s.maxLen), thousands(s.maxLen), thousands(s.batched), ceil(s.maxLen, s.batched))
	}
	if s.maxSeqs > 0 && s.batched > s.maxSeqs {
		n.math("with %d requests decoding, %s - %d = %s tokens a step are left for prompts", s.maxSeqs, thousands(s.batched), s.maxSeqs, thousands(s.batched-s.maxSeqs))
	}
	if before > 0 && before != s.batched {
		n.math("the log first had %s; the last line counts", thousands(before))
	}
}

var rangeEnds = regexp.MustCompile(`'compile_ranges_endpoints': (\[[0-9, ]*\])`)

func engineConfig(s *state, r record, m []string, n *note) {
	_, config, _ := strings.Cut(r.msg, "with config: ")
	c := dict(config)
	s.engine = true
	if s.version == "" {
		s.version = m[1]
	}
	set := func(to *string, name string) {
		if v := strings.TrimPrefix(c[name], "torch."); v != "" {
			*to = shorten(v, 200)
		}
	}
	set(&s.model, "model")
	set(&s.dtype, "dtype")
	set(&s.quantization, "quantization")
	set(&s.kvType, "kv_cache_dtype")
	if v := whole(c["max_seq_len"]); v > 0 {
		s.maxLen = v
	}
	if v := whole(c["tensor_parallel_size"]); v > 0 {
		s.tp = v
	}
	s.eager = c["enforce_eager"] == "True"
	for _, name := range []string{"'cudagraph_capture_sizes': ", `"cudagraph_capture_sizes":`} {
		if _, rest, ok := strings.Cut(r.msg, name); ok {
			text, _, _ := strings.Cut(rest, "]")
			s.sizes = list(text)
		}
	}
	if m := rangeEnds.FindStringSubmatch(r.msg); m != nil && s.batched == 0 {
		if ends := list(m[1]); len(ends) > 0 {
			s.batched = ends[len(ends)-1] // torch.compile's ranges end at the token budget
			n.math("torch.compile covers steps up to %s tokens: the token budget of a step", thousands(s.batched))
		}
	}
	for _, f := range []struct{ name, what string }{
		{"dtype", "type of weights and activations"}, {"max_seq_len", "tokens of a request"}, {"quantization", "of the weights"},
		{"kv_cache_dtype", "auto: as the weights' type"}, {"tensor_parallel_size", "GPUs that share each layer"},
		{"pipeline_parallel_size", "GPUs with a part of the layers each"}, {"data_parallel_size", "engines"},
		{"enforce_eager", "True: no graphs"}, {"enable_prefix_caching", "True: prompts that begin alike share KV"},
		{"speculative_config", "None: no guessed tokens"}, {"load_format", ""},
	} {
		if v, ok := c[f.name]; ok {
			text := f.name + " = " + shorten(v, 120)
			if f.what != "" {
				text += " (" + f.what + ")"
			}
			n.math("%s", text)
		}
	}
	if k := len(s.sizes); k > 0 {
		low, high := s.sizes[0], s.sizes[0]
		for _, v := range s.sizes {
			low, high = min(low, v), max(high, v)
		}
		n.math("CUDA graphs for %d sizes of a step, %d to %s tokens; a step in between is padded to the next, a larger one runs without", k, low, thousands(high))
	}
	if c["enable_prefix_caching"] == "False" {
		n.find(Note, "Prefix caching is off: prompts that begin alike are computed each time.", "--enable-prefix-caching, if the model allows.")
	}
}

func worldLine(s *state, _ record, m []string, _ *note) {
	if w := whole(m[1]); w > 1 && s.tp == 0 {
		s.tp = w
	}
}

func attentionLine(_ *state, _ record, m []string, n *note) {
	name := strings.ToUpper(m[1])
	switch {
	case strings.Contains(name, "TRITON"):
		n.math("Triton: portable kernels; used where a model's attention (sinks, head sizes) or the GPU excludes FlashAttention")
	case strings.Contains(name, "FLASHINFER"):
		n.math("FlashInfer: kernels for paged KV, also fp8")
	case strings.Contains(name, "FLASH"):
		n.math("FlashAttention: the usual choice on NVIDIA GPUs from Ampere on")
	case strings.Contains(name, "XFORMERS"), strings.Contains(name, "SDPA"):
		n.math("a fallback: slower than FlashAttention")
	}
	if m[2] != "" {
		n.math("chosen from: %s", shorten(m[2], 200))
	}
}

func moeLine(_ *state, r record, m []string, n *note) {
	upper := strings.ToUpper(r.msg)
	if strings.Contains(upper, "MARLIN") {
		n.math("Marlin: experts stay in few bits in memory and are expanded in the product; for GPUs without such arithmetic")
	} else if strings.Contains(upper, "USING TRITON") {
		n.math("Triton: portable kernels, tuned by files for each GPU")
	}
}

func moeConfigLine(_ *state, _ record, m []string, n *note) {
	name := strings.TrimSuffix(path.Base(m[1]), ".json")
	for part := range strings.SplitSeq(name, ",") {
		switch key, value, _ := strings.Cut(part, "="); key {
		case "E":
			n.math("%s experts", shorten(value, 40))
		case "N":
			n.math("%s columns of each expert on this GPU", shorten(value, 40))
		case "device_name":
			n.math("GPU: %s", strings.ReplaceAll(shorten(value, 80), "_", " "))
		}
	}
}

func downloadLine(s *state, _ record, m []string, n *note) {
	s.download += number(m[2])
	n.find(Note, fmt.Sprintf("Weights were downloaded for %.0f s of this start.", number(m[2])), "Download before the start (`hf download`) and keep the cache on a volume.")
}

func weightsTime(s *state, _ record, m []string, _ *note) { s.load = number(m[1]) }

func modelMemory(s *state, _ record, m []string, n *note) {
	s.mem.weights, s.model2 = number(m[1]), number(m[3])
	if s.load > 0 && s.mem.weights > 0 {
		rate := s.mem.weights / s.load
		n.math("%s GiB ÷ %.1f s of reading = %.2f GiB/s", gib(s.mem.weights), s.load, rate)
		if rest := s.model2 - s.load - s.download; rest > 1 {
			n.math("%.1f s in all - %.1f s reading%s = %.1f s for building layers and changing formats", s.model2, s.load, minusDownload(s.download), rest)
		}
		if rate < 0.5 && s.load > 30 {
			n.find(Warning, fmt.Sprintf("Weights were read at %.2f GiB/s, which is slow: a local NVMe disk reads 2 to 6 GiB/s.", rate),
				"Copy the checkpoint to a local disk or into the page cache; network file systems are the usual reason.")
		}
	}
}

func minusDownload(d float64) string {
	if d == 0 {
		return ""
	}
	return fmt.Sprintf(" - %.1f s download", d)
}

func cacheDir(s *state, _ record, m []string, n *note) {
	if strings.HasPrefix(m[1], "/root/.cache") {
		n.change("In a container, put ~/.cache/vllm on a volume; otherwise each new container compiles again.")
	}
}

func graphLoaded(_ *state, r record, _ []string, n *note) {
	if _, took, ok := strings.Cut(r.msg, "took "); ok {
		n.math("loaded in %s", shorten(took, 20))
	}
}

func compileTotal(s *state, _ record, m []string, n *note) {
	s.compile = number(m[1])
	switch {
	case s.dynamo > 0 && s.compiled > 0:
		sum := s.dynamo + s.compiled
		n.math("%.2f s tracing + %.2f s compiling = %.2f s", s.dynamo, s.compiled, sum)
		if rest := s.compile - sum; math.Abs(rest) > 0.02 {
			n.math("%.2f s - %.2f s = %.2f s for what no line counts, such as storing the result", s.compile, sum, rest)
		} else {
			n.math("as logged: %.2f s", s.compile)
		}
	case s.dynamo > 0:
		n.math("%.2f s of it is tracing; the graph came from the cache", s.dynamo)
	}
}

func graphProfile(_ *state, _ record, m []string, n *note) {
	if m[1] != "" {
		n.math("PIECEWISE: %s sizes up to %s tokens, for steps with prompts: attention runs between the graphs", m[1], m[2])
	}
	if m[3] != "" {
		n.math("FULL: %s sizes up to %s sequences, for steps that only decode: the whole step is one graph", m[3], m[4])
	}
}

func kvMemory(s *state, _ record, m []string, n *note) {
	s.mem.kv = number(m[1])
	if s.mem.kv <= 0 {
		n.find(Problem, "No memory is left for KV.", "Raise --gpu-memory-utilization, quantize the weights, or use more GPUs.")
		return
	}
	if s.mem.weights > 0 {
		n.math("weights %.2f GiB + KV %.2f GiB = %.2f GiB", s.mem.weights, s.mem.kv, s.mem.weights+s.mem.kv)
		share := s.mem.kv / (s.mem.kv + s.mem.weights)
		n.math("KV has %.0f %% of it", 100*share)
		if share < 0.15 {
			n.find(Note, fmt.Sprintf("Weights take %.0f %% of the memory that is used: little is left for KV.", 100*(1-share)), "fp8 KV doubles the tokens; a second GPU (--tensor-parallel-size 2) frees half of the weights on each.")
		}
	}
}

func graphHint(s *state, _ record, m []string, n *note) {
	from, to := number(m[1]), number(m[2])
	s.utilization = from
	if s.estimated > 0 && to > from {
		s.mem.total = s.estimated / (to - from)
		n.math("%.2f GiB of graphs ÷ (%s - %s) = %.1f GiB: the GPU's memory", s.estimated, m[2], m[1], s.mem.total)
		if s.mem.weights > 0 && s.mem.kv > 0 {
			rest := from*s.mem.total - s.mem.weights - s.mem.kv
			n.math("%s x %.1f GiB - %.2f weights - %.2f KV = %.1f GiB for activations of the largest step and other use", m[1], s.mem.total, s.mem.weights, s.mem.kv, rest)
		}
		if from < 0.85 {
			n.find(Note, fmt.Sprintf("--gpu-memory-utilization %.2f leaves %.0f GiB of the GPU unused.", from, (1-from)*s.mem.total),
				fmt.Sprintf("If nothing else needs the GPU, 0.9 gives about %.0f GiB more for KV.", (0.9-from)*s.mem.total))
		}
	}
}

func concurrencyLine(s *state, _ record, m []string, n *note) {
	s.maxLen, s.concurrency = whole(m[1]), number(m[2])
	s.kvConcurrencyNote(n)
}

func blocksLine(s *state, _ record, m []string, n *note) {
	blocks := whole(m[1])
	if blocks == 0 {
		return
	}
	if s.kvTokens > 0 {
		n.math("%s tokens ÷ %s blocks = %.4g tokens a block", thousands(s.kvTokens), thousands(blocks), float64(s.kvTokens)/float64(blocks))
		return
	}
	n.math("%s blocks x %d tokens = %s tokens, if there is one kind of layer", thousands(blocks), s.blockTokens, thousands(blocks*s.blockTokens))
	s.kvTokens = blocks * s.blockTokens
}

func profileOld(s *state, _ record, m []string, n *note) {
	if len(m) == 4 {
		s.mem.total, s.utilization = number(m[1]), number(m[2])
		n.math("%s GiB x %s = %.2f GiB", m[1], m[2], s.mem.total*s.utilization)
	}
	if len(m) == 3 {
		s.mem.weights, s.mem.kv = number(m[1]), number(m[2])
		n.math("weights %s GiB, KV %s GiB", m[1], m[2])
		if s.mem.total > 0 {
			n.math("%.2f GiB x %.2f - %s - %s = %.2f GiB for activations and other use", s.mem.total, s.utilization, m[1], m[2], s.mem.total*s.utilization-s.mem.weights-s.mem.kv)
		}
	}
}

func loadBar(s *state, _ record, m []string, n *note) {
	if m[1] != "" {
		n.math("%s of %s files", m[2], m[3])
	} else {
		n.math("%s of %s files", m[6], m[7])
	}
}

var graphKind = regexp.MustCompile(`(PIECEWISE|FULL)\)|(\d+)/(\d+)`)

func graphBar(s *state, r record, _ []string, n *note) {
	kind, total, done := "", 0, 0
	for _, m := range graphKind.FindAllStringSubmatch(r.msg, 8) {
		if m[1] != "" {
			kind = m[1]
		} else {
			done, total = whole(m[2]), whole(m[3])
		}
	}
	if total == 0 {
		return
	}
	switch kind {
	case "FULL":
		s.full = total
		n.what = "Recording CUDA graphs of steps that only decode, each a whole step in one graph."
	case "PIECEWISE":
		s.piecewise = total
		n.what = "Recording CUDA graphs of steps with prompts: the parts between attention, which is started by itself."
	default:
		s.piecewise = total
		n.what = "Recording CUDA graphs, one for each batch size: a step of such a size is then started by one call."
	}
	s.captured = true
	n.math("%d of %d sizes", done, total)
	if kind == "FULL" && s.maxSeqs > 0 && len(s.sizes) > 0 {
		fit, largest, next := 0, 0, 0
		for _, v := range s.sizes {
			if v <= s.maxSeqs {
				fit++
				largest = max(largest, v)
			} else if next == 0 || v < next {
				next = v
			}
		}
		n.math("%d of the %d sizes are at most --max-num-seqs %d", fit, len(s.sizes), s.maxSeqs)
		if largest < s.maxSeqs && next > 0 {
			n.find(Warning, fmt.Sprintf("Batches of %d to %d sequences have no full graph: the sizes are at most %d, the next one is %d.", largest+1, s.maxSeqs, largest, next),
				fmt.Sprintf("--max-num-seqs %d, or a capture size of %d, so that the largest batches decode by one graph.", next, s.maxSeqs))
		}
	}
}

func graphDone(s *state, _ record, m []string, n *note) {
	s.graphsSeconds, s.mem.graphs, s.captured = number(m[1]), number(m[2]), true
	if k := s.full + s.piecewise; k > 0 {
		n.math("%s GiB ÷ %d graphs = %.1f MiB each", m[2], k, s.mem.graphs*1024/float64(k))
	}
	if s.mem.weights > 0 && s.mem.kv > 0 {
		n.math("weights %.2f + KV %.2f + graphs %.2f = %.2f GiB", s.mem.weights, s.mem.kv, s.mem.graphs, s.mem.weights+s.mem.kv+s.mem.graphs)
	}
}

func graphPool(_ *state, _ record, m []string, n *note) {
	actual, estimate := number(m[1]), number(m[2])
	if actual > 0 {
		n.math("|%s - %s| = %.2f GiB, %.0f %% of %s; vLLM's %s %% is of figures that are not rounded", m[1], m[2], math.Abs(actual-estimate), 100*math.Abs(actual-estimate)/actual, m[1], m[4])
	}
	if actual-estimate > 0.5 {
		n.find(Note, fmt.Sprintf("Graphs took %.2f GiB more than estimated, outside of --gpu-memory-utilization.", actual-estimate), "Leave that much free on the GPU.")
	}
}

func initTime(s *state, _ record, m []string, n *note) {
	if sum := s.compile + s.graphsSeconds; sum > 0 {
		n.math("%.1f s compile + %.0f s graphs = %.1f s of %s; the rest is profiling and warm-up", s.compile, s.graphsSeconds, sum, m[1])
	}
}

func routeLine(s *state, _ record, _ []string, n *note) {
	s.routes++
	n.math("%d routes", s.routes)
}

func accessLine(_ *state, _ record, m []string, n *note) {
	n.fold = m[3] < "400"
	switch {
	case m[3] >= "500":
		n.find(Warning, "Requests are answered with "+m[3]+".", "The lines before have the reason.")
	case m[3] >= "400":
		n.find(Note, "Requests are answered with "+m[3]+": the client's request is wrong.", "")
	}
	if n.fold {
		n.what = "Requests that were answered."
		n.math("the last: %s %s", m[1], shorten(m[2], 100))
	}
}

var figure = regexp.MustCompile(`([A-Z][\w ()/-]+?)[:=] ?(-?[\d.]+)`)

// figures returns the named numbers of a message.
func figures(msg string) map[string]float64 {
	all := map[string]float64{}
	for _, m := range figure.FindAllStringSubmatch(shorten(msg, matchLen), 64) {
		all[strings.TrimSpace(m[1])] = number(strings.TrimSuffix(m[2], "."))
	}
	return all
}

func specLine(_ *state, r record, _ []string, n *note) {
	f := figures(r.msg)
	accepted, drafted, length := f["Accepted"], f["Drafted"], f["Mean acceptance length"]
	if drafted > 0 {
		n.math("%.0f accepted ÷ %.0f guessed = %.1f %%", accepted, drafted, 100*accepted/drafted)
		if accepted/drafted < 0.3 {
			n.find(Note, fmt.Sprintf("Only %.0f %% of the guessed tokens are accepted.", 100*accepted/drafted), "Guess fewer tokens (num_speculative_tokens), or use another draft model.")
		}
	}
	if length > 0 {
		n.math("%.2f tokens a step instead of 1", length)
	}
}

func transferLine(_ *state, r record, _ []string, n *note) {
	f := figures(r.msg)
	if count, mb := f["Num successful transfers"], f["Avg MB per transfer"]; count > 0 && mb > 0 {
		n.math("%.0f transfers x %.1f MB = %.1f MB", count, mb, count*mb)
	}
	if f["Num failed transfers"] > 0 {
		n.find(Warning, fmt.Sprintf("%.0f transfers of KV failed; their prompts are computed again.", f["Num failed transfers"]), "Look for the peer's lines at the same time, and at the link.")
	}
}

func gatewayRate(s *state, r record, m []string, n *note) {
	s.sample("Gateway", Sample{Line: n.line, At: r.at, Prompt: number(m[1]), Generate: number(m[2]), Running: whole(m[3]), Waiting: -1, KV: -1, Hit: -1})
	if running, rate := number(m[3]), number(m[2]); running > 0 && rate > 0 {
		n.math("%.1f tokens/s ÷ %.0f requests = %.1f tokens/s each", rate, running, rate/running)
	}
	if whole(m[4]) == 0 {
		n.find(Problem, "The gateway has no usable decode node.", "`tandem status` shows the nodes; `tandem doctor --url …` whether they can be reached.")
	}
}

var tried = regexp.MustCompile(`[Tt]ried to allocate ([\d.]+ [MG]iB)`)

func oomLine(_ *state, r record, _ []string, n *note) {
	if m := tried.FindStringSubmatch(r.msg); m != nil {
		n.math("the allocation that failed: %s", m[1])
	}
}

func stopLine(s *state, r record, _ []string, n *note) {
	n.fold = false
	if strings.Contains(r.msg, "initiated") {
		n.what = "The server was asked to stop. With timeout=0 it does not wait for requests."
	}
}

func pythonError(s *state, r record, m []string, n *note) {
	s.traceback = false
	if strings.HasSuffix(m[1], "Warning") {
		n.what = "A warning of Python."
		return
	}
	n.what = "A Python error; the call stack above shows where."
	text := m[1]
	if m[2] != "" {
		text += ": " + m[2]
	}
	n.find(Problem, "Python error: "+shorten(text, 200), "Read the message; the first error of the log is usually the cause of the others.")
}
