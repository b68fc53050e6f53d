package explainlog

import (
	"regexp"
	"strings"
)

// modules explains which part of vLLM writes lines of a source file. The first name that the
// module's contains counts.
var modules = []struct{ name, topic, what string }{
	{"api_server", topicAPI, "the API server"},
	{"serving", topicAPI, "the API's handlers"},
	{"launcher", topicAPI, "the API server"},
	{"protocol", topicAPI, "the API's requests"},
	{"parser", topicAPI, "the parsers of tool calls and reasoning"},
	{"chat", topicAPI, "chat templates and messages"},
	{"renderer", topicAPI, "chat templates and messages"},
	{"loggers", topicRates, "the statistics"},
	{"metrics", topicRates, "the statistics"},
	{"stats", topicRates, "the statistics"},
	{"scheduler", topicSched, "the scheduler, which chooses what each step computes"},
	{"kv_cache", topicMemory, "the KV cache"},
	{"block_pool", topicMemory, "the KV cache"},
	{"kv_transfer", topicNetwork, "the transfer of KV between servers"},
	{"kv_connector", topicNetwork, "the transfer of KV between servers"},
	{"nixl", topicNetwork, "the transfer of KV between servers"},
	{"lmcache", topicMemory, "LMCache, a store of KV outside of the GPU"},
	{"gpu_worker", topicMemory, "the worker process of a GPU"},
	{"worker", topicMemory, "a worker process"},
	{"model_runner", topicModel, "the runner, which computes the steps on a GPU"},
	{"core", topicStart, "the engine's core"},
	{"async_llm", topicStart, "the engine's client in the API server"},
	{"llm_engine", topicStart, "the engine"},
	{"engine", topicStart, "the engine"},
	{"executor", topicStart, "the mechanism that runs workers"},
	{"parallel_state", topicNetwork, "the groups of GPUs"},
	{"pynccl", topicNetwork, "NCCL"},
	{"nccl", topicNetwork, "NCCL"},
	{"shm_broadcast", topicNetwork, "the messages between the engine and its workers"},
	{"all_reduce", topicNetwork, "the all-reduce of GPUs"},
	{"backends", topicCompile, "torch.compile"},
	{"compil", topicCompile, "torch.compile"},
	{"decorators", topicCompile, "torch.compile"},
	{"monitor", topicCompile, "torch.compile"},
	{"cuda_graph", topicGraphs, "CUDA graphs"},
	{"cudagraph", topicGraphs, "CUDA graphs"},
	{"cuda", topicModel, "the CUDA platform"},
	{"rocm", topicModel, "the ROCm platform"},
	{"tpu", topicModel, "the TPU platform"},
	{"xpu", topicModel, "the XPU platform"},
	{"cpu", topicModel, "the CPU platform"},
	{"loader", topicModel, "the loader of weights"},
	{"weight_utils", topicModel, "the loader of weights"},
	{"fused_moe", topicModel, "the mixture of experts"},
	{"moe", topicModel, "the mixture of experts"},
	{"fp8", topicModel, "FP8 quantization"},
	{"fp4", topicModel, "FP4 quantization"},
	{"marlin", topicModel, "the Marlin kernels"},
	{"awq", topicModel, "AWQ quantization"},
	{"gptq", topicModel, "GPTQ quantization"},
	{"quant", topicModel, "quantization"},
	{"attention", topicModel, "attention"},
	{"flash", topicModel, "attention kernels"},
	{"mla", topicModel, "latent attention"},
	{"sampler", topicModel, "sampling"},
	{"spec_decode", topicSched, "guessed tokens"},
	{"eagle", topicSched, "guessed tokens"},
	{"lora", topicModel, "LoRA adapters"},
	{"tokenizer", topicModel, "the tokenizer"},
	{"transformers", topicModel, "Hugging Face transformers"},
	{"config", topicConfig, "the configuration"},
	{"arg_utils", topicConfig, "the command line"},
	{"model", topicConfig, "the model's configuration"},
	{"registry", topicModel, "the list of models"},
	{"envs", topicConfig, "the environment"},
	{"plugins", topicStart, "plugins"},
	{"platforms", topicStart, "the platform"},
	{"network_utils", topicNetwork, "the network"},
	{"utils", topicStart, "the start"},
	{"__init__", topicStart, "the start"},
	{"vllm", topicConfig, "the configuration"},
}

var (
	measured = regexp.MustCompile(`(?i)[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)? ?(?:GiB|MiB|KiB|GB|MB|kB|bytes|tokens/s|tok/s|it/s|tokens?|blocks?|seconds?|secs?|ms|µs|s|%|x|reqs?|requests?|layers?|experts?|GPUs?)(?:\b|$|[ ,.;)])`)
	setting  = regexp.MustCompile(`\b([A-Za-z_][\w.-]{1,40})=("[^"]{0,80}"|'[^']{0,80}'|[^\s,;)"']{1,80})`)
	flagName = regexp.MustCompile(`--[a-z][a-z0-9-]+`)
	indented = regexp.MustCompile(`^(?:\s{2,}|\t)\S`)
	pairLine = regexp.MustCompile(`^\s*['"]?[\w .()/-]{1,60}['"]?\s*(?::\s+|=\s*)\S`)
	brackets = regexp.MustCompile(`^\s*[\[\](){},]+\s*$`)
)

// byShape explains a record that no rule knows: by its level, the part that wrote it and its
// figures, or by the lines around it.
func byShape(s *state, r record) Entry {
	e := Entry{Topic: topicText}
	switch {
	case r.binary:
		e.What, e.fold = "Bytes that are no text: the file is no log, or is damaged here.", true
		e.Severity, e.Unusual = Warning, "The input has parts that are no text."
		return e
	case r.level != "" || r.source != "":
		return shapeOfRecord(s, r)
	case r.command:
		e.What = "A command that was typed at a shell."
		return e
	case s.traceback && (indented.MatchString(r.msg) || strings.Trim(r.msg, " ^~") == ""):
		e.Topic, e.What, e.fold = topicFault, "The code of a call stack's frame.", true
		return e
	case brackets.MatchString(r.msg):
		e.What, e.fold = "The bracket of a dump over several lines.", true
		return e
	case indented.MatchString(r.msg):
		e.What, e.fold = "A line of a dump, or the continuation of the record above.", true
		e.Math = keyFigures(r.msg)
		return e
	case pairLine.MatchString(r.msg):
		e.What = "A name with its value, outside of a record."
		e.Math = keyFigures(r.msg)
		return e
	}
	e.What = "Text without a level: output of a library, a script or a shell."
	e.Math = keyFigures(r.msg)
	if lower := strings.ToLower(r.msg); strings.Contains(lower, "error") || strings.Contains(lower, "fail") || strings.Contains(lower, "fatal") {
		e.Severity, e.Unusual = Warning, "A line outside of records reports a failure: "+shorten(r.msg, 160)
		e.Change = "Read it with the lines around it."
	}
	return e
}

// shapeOfRecord explains a record with a level or a source.
func shapeOfRecord(s *state, r record) Entry {
	e := Entry{Topic: topicText}
	subject := ""
	name := strings.ToLower(r.module)
	for _, m := range modules {
		if strings.Contains(name, m.name) {
			subject, e.Topic = m.what, m.topic
			break
		}
	}
	if r.source != "" && subject == "" {
		subject = "the source file " + shorten(r.module, 60)
	} else if subject == "" {
		subject = "the program"
		if r.process != "" {
			subject = shorten(r.process, 60)
		}
	}
	verb := "A message"
	switch r.level {
	case "DEBUG":
		verb = "A detail for developers"
	case "WARNING":
		verb = "A warning"
		e.Severity, e.Unusual = Note, "Warning of "+subject+": "+shorten(r.msg, 200)
		e.Change = "Read the message"
	case "ERROR", "CRITICAL":
		verb = "An error"
		e.Severity, e.Unusual = Problem, "Error of "+subject+": "+shorten(r.msg, 200)
		e.Change = "Read the message, and the first error of the log"
	}
	e.What = verb + " of " + subject + "; no rule explains it further."
	if flags := flagName.FindAllString(shorten(r.msg, matchLen), 4); len(flags) > 0 && e.Change != "" {
		e.Change += "; it names " + strings.Join(flags, ", ")
	}
	if e.Change != "" {
		e.Change += "."
	}
	if s.traceback && indented.MatchString(r.msg) {
		e.What, e.Topic, e.Severity, e.Unusual, e.Change, e.fold = "The code of a call stack's frame.", topicFault, Plain, "", "", true
		return e
	}
	e.Math = keyFigures(r.msg)
	return e
}

// keyFigures returns the figures with units and the settings of a message.
func keyFigures(msg string) []string {
	msg = shorten(msg, matchLen)
	var all []string
	if strings.ContainsAny(msg, "0123456789") {
		for _, m := range measured.FindAllString(msg, 6) {
			all = append(all, strings.TrimRight(m, " ,.;)"))
		}
	}
	if strings.IndexByte(msg, '=') >= 0 {
		for _, m := range setting.FindAllString(msg, 8) {
			if len(all) < 10 {
				all = append(all, m)
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	return []string{"figures: " + strings.Join(all, ", ")}
}
