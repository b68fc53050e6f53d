//go:build linux

package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// vllmLine is a command line behind `vllm serve`, of vLLM's documentation or recipes.
type vllmLine struct {
	args    string   // words; ' quotes one with spaces
	refused []string // flags that Tandem does not have; none: it starts
	tiny    string   // a model of that architecture in engine/model/testdata, which it is started with
}

var vllmLines = []vllmLine{
	{"Qwen/Qwen3-0.6B", nil, "qwen3"},
	{"Qwen/Qwen3-32B --seed 42 --disable-log-requests --gpu-memory-utilization 0.98 --max-num-batched-tokens 2048 --max-num-seqs 256 --tensor-parallel-size 2 --max-model-len 32768", nil, "qwen3"},
	{"Qwen/Qwen3-1.7B --max-num-batched-tokens 16384 --gpu-memory-utilization 0.8", nil, "qwen3"},
	{"Qwen/Qwen3-14B --port 8000 --dtype bfloat16 --gpu-memory-utilization 0.9 --max-model-len 32768 --enable-auto-tool-choice --tool-call-parser hermes",
		nil, "qwen3"},
	{"Qwen/Qwen3-0.6B --dtype bfloat16 --tensor-parallel-size 2 --max-num-seqs 6 --max-model-len 2048 --max-num-batched-tokens 256 --block-size 128 --num-gpu-blocks-override 6 --no-enable-prefix-caching",
		[]string{"num-gpu-blocks-override", "no-enable-prefix-caching"}, ""},
	{"Qwen/Qwen3-8B --quantization fp4 --dtype auto --tensor-parallel-size 1 --api-key token --port 8001 --host 0.0.0.0 --enable-auto-tool-choice --tool-call-parser hermes",
		[]string{"quantization", "host"}, ""},
	{"Qwen/Qwen3-30B-A3B --enable-chunked-prefill true --max-num-batched-tokens 2048 --trust-remote-code", nil, "qwen3-moe"},
	{"Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8 --trust-remote-code --max-model-len 131072 --enable-expert-parallel --data-parallel-size 8 --enable-auto-tool-choice --tool-call-parser qwen3_coder",
		[]string{"enable-expert-parallel", "data-parallel-size"}, ""},
	{"Qwen/Qwen2.5-32B --seed 42 --gpu-memory-utilization 0.98 --max-num-batched-tokens 2048 --max-num-seqs 128 --tensor-parallel-size 2", nil, "qwen2"},
	{"Qwen/Qwen3-VL-4B-Instruct --dtype bfloat16 --max-model-len 65536 --max-num-batched-tokens 65536 --gpu-memory-utilization 0.9 --port 8000 --limit-mm-per-prompt.video 0 --async-scheduling", nil, "qwen3-vl"},
	{"openai/gpt-oss-20b", nil, "gpt-oss-mxfp4"},
	{"openai/gpt-oss-120b --tensor_parallel_size 2 --served_model_name rerank ranker --max-num-seqs 50", nil, "gpt-oss-mxfp4"},
	{"openai/gpt-oss-20b --enable-prefix-caching --max-model-len 131072 --quantization mxfp4 --gpu-memory-utilization 0.95 --port 8008", nil, "gpt-oss-mxfp4"},
	{"openai/gpt-oss-120b --enable-auto-tool-choice --gpu-memory-utilization 0.7 --host 0.0.0.0 --kv-cache-memory-bytes 17179869184 --max-model-len 131072 --max-num-seqs 1 --no-enable-prefix-caching --reasoning-parser openai_gptoss --tool-call-parser openai",
		[]string{"host", "no-enable-prefix-caching"}, ""},
	{`openai/gpt-oss-20b --max-model-len 10240 --max-num-batched-tokens 2048 --max-num-seqs 2 --tensor-parallel-size 8 --hf-overrides '{"quantization_config": {}}' --additional-config '{"a": {"b": [2048]}}' --port=8080`,
		[]string{"hf-overrides", "additional-config"}, ""},
	{"openai/gpt-oss-20b --data-parallel-size 2 --enable-expert-parallel --gpu-memory-utilization 0.4", []string{"data-parallel-size", "enable-expert-parallel"}, ""},
	{"meta-llama/Llama-3.1-8B-Instruct --max-num-batched-tokens 2048 --max-num-seqs 256 --kv-cache-dtype fp8", nil, "gqa-tied"},
	{"meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 4 --max-model-len 32768 --enable-prefix-caching --kv-cache-dtype fp8_e5m2", []string{"kv-cache-dtype"}, ""},
	{`meta-llama/Meta-Llama-3-8B-Instruct --speculative-config '{"method": "eagle", "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}'`,
		[]string{"speculative-config"}, ""},
	{`meta-llama/Llama-3.2-1B-Instruct --speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}' --max-model-len 8k -O3`, nil, "gqa-tied"},
	{"meta-llama/Llama-3.1-405B-Instruct --tensor-parallel-size 4 --pipeline-parallel-size 2", []string{"pipeline-parallel-size"}, ""},
	{"meta-llama/Llama-2-7b-hf --swap-space 16 --use-v2-block-manager --num-scheduler-steps 8 --disable-log-requests", nil, "mha"},
	{"mistralai/Mistral-7B-Instruct-v0.3 --port 1234 --gpu-memory-utilization 0.9 --dtype half", []string{"dtype"}, "mistral-window"},
	{"mistralai/Mistral-7B-Instruct-v0.3 --dtype auto --task generate --max-model-len auto", nil, "mistral-window"},
	{"mistralai/Ministral-3-8B-Reasoning-2512 --tokenizer_mode mistral --config_format mistral --load_format mistral --enable-auto-tool-choice --tool-call-parser mistral --reasoning-parser mistral",
		[]string{"tokenizer-mode", "config-format", "load-format"}, ""},
	{"mistralai/Mixtral-8x7B-Instruct-v0.1 --tensor-parallel-size 2 --trust-remote-code", nil, "mixtral"},
	{"google/gemma-3-4b-it --port 18002 --gpu-memory-utilization 0.85 --max-model-len 16384 --dtype bfloat16 --enable-lora=false --disable-log-stats", nil, "gemma3-multimodal"},
	{"google/gemma-4-E2B-it --tensor-parallel-size 1 --dtype bfloat16 --language-model-only --max-model-len 4096 --max-num-seqs 8 --max-num-batched-tokens 1024 --gpu-memory-utilization 0.80 --enable-chunked-prefill --async-scheduling", nil, "gemma4-multimodal"},
	{"google/gemma-4-31B-it --tensor-parallel-size 2 --max-model-len 16384 --gpu-memory-utilization 0.90 --enable-auto-tool-choice --reasoning-parser gemma4 --tool-call-parser gemma4 --chat-template examples/tool_chat_template_gemma4.jinja",
		[]string{"chat-template"}, ""},
	{"deepseek-ai/DeepSeek-V3 --tensor-parallel-size 2 --quantization fp8 --max-model-len 163840", nil, "deepseek-fp8"},
	{`deepseek-ai/DeepSeek-V3 -dp 8 -ep --all2all-backend deepep_low_latency --enable-eplb --eplb-config '{"window_size":1000}'`, []string{"data-parallel-size", "enable-expert-parallel", "enable-eplb"}, ""},
	{"deepseek-ai/DeepSeek-R1 --enable-reasoning --reasoning-parser deepseek_r1", []string{"enable-reasoning"}, ""},
	{"zai-org/GLM-4.7-Flash --speculative-config.method mtp --speculative-config.num_speculative_tokens 1 --tool-call-parser glm47 --reasoning-parser glm45 --served-model-name glm",
		[]string{"speculative-config"}, ""},
	{"zai-org/GLM-4.5-Air --tensor-parallel-size 2 --enforce-eager", nil, "glm4-moe"},
	{"MiniMaxAI/MiniMax-M2 --attention-backend ROCM_AITER_FA --trust-remote-code", nil, "minimax-m2"},
	{"MiniMaxAI/MiniMax-M2 --tensor-parallel-size 4 --trust-remote-code", []string{"tensor-parallel-size"}, "minimax-m2"},
	{`microsoft/Phi-4-mini-instruct -q none --rope-scaling '{"rope_type":"dynamic","factor":2.0}' --max-seq-len-to-capture 4096`, []string{"rope-scaling"}, ""},
}

// shellWords splits a command line as a shell does that has ' only.
func shellWords(line string) (args []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			args = append(args, part)
		} else {
			args = append(args, strings.Fields(part)...)
		}
	}
	return args
}

// A line of vLLM's documentation starts as it is, or one answer names every flag that is missing.
func TestBinaryVLLMLines(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	tiny, err := filepath.Abs("../../engine/model/testdata")
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range vllmLines {
		args := append([]string{"serve"}, shellWords(l.args)...)
		env := []string{"HF_HUB_CACHE=" + t.TempDir()} // a machine without the model
		if l.refused != nil && l.tiny != "" {
			env = []string{"HF_HUB_CACHE=" + hubWith(t, cache, args[1], filepath.Join(tiny, l.tiny))}
		}
		if l.refused == nil || i%2 == 0 || l.tiny != "" {
			args = append(args, "--dry-run")
		}
		out, errOut, err := tandem(t, env, args...)
		if l.refused == nil {
			if err != nil || !strings.Contains(out, "max-num-seqs: ") {
				t.Errorf("%s: %v\n%s", l.args, err, errOut)
			}
			continue
		}
		var named []string
		for line := range strings.Lines(errOut) {
			line = strings.TrimPrefix(strings.TrimSpace(line), "tandem serve: ")
			if strings.HasPrefix(line, "warning:") || strings.HasSuffix(line, "settings cannot be used:") || strings.Contains(line, "Nothing is downloaded") {
				continue
			}
			flag, rest, _ := strings.Cut(strings.TrimPrefix(line, "--"), " ")
			named = append(named, strings.TrimSuffix(flag, ":"))
			if !strings.ContainsAny(rest, ":;") {
				t.Errorf("%s: %q names no replacement", l.args, line)
			}
		}
		slices.Sort(named)
		want := slices.Sorted(slices.Values(l.refused))
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 2 || !slices.Equal(named, want) {
			t.Errorf("%s: %v, refused %q, want %q\n%s", l.args, err, named, want, errOut)
		}
	}
	if len(vllmLines) < 30 {
		t.Errorf("%d lines", len(vllmLines))
	}
}

// hubWith puts a folder into a Hugging Face cache under a model's name, and returns the cache.
func hubWith(t *testing.T, cache, model, folder string) string {
	t.Helper()
	snapshots := filepath.Join(cache, "models--"+strings.ReplaceAll(model, "/", "--"), "snapshots")
	if err := os.MkdirAll(snapshots, 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(snapshots, filepath.Base(folder))
	if err := os.Symlink(folder, link); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	return cache
}

// The lines that are not refused start, on a small model of the same architecture.
func TestBinaryVLLMStarts(t *testing.T) {
	t.Parallel()
	path := binary(t)
	tiny, err := filepath.Abs("../../engine/model/testdata")
	if err != nil {
		t.Fatal(err)
	}
	port := freePorts(t, 2)
	for _, l := range vllmLines {
		if l.refused != nil {
			continue
		}
		args := shellWords(l.args)
		for i, a := range args { // the small models have short contexts
			if a == "--max-model-len" {
				args[i+1] = "auto"
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), startBound)
		cmd := exec.CommandContext(ctx, path, append(append([]string{"serve"}, args...), "--port", strconv.Itoa(port), "--threads", "2", "--kv-cache-memory-bytes", "32MiB")...)
		var log output
		cmd.Stderr = &log
		cmd.Env = append(os.Environ(), "HF_HUB_CACHE="+hubWith(t, t.TempDir(), args[0], filepath.Join(tiny, l.tiny)))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for up := false; !up; {
			select {
			case err := <-ended:
				t.Errorf("%s on %s: %v\n%s", l.args, l.tiny, err, &log)
				up = true
			case <-time.After(5 * time.Millisecond):
				if up = strings.Contains(log.String(), " serving addr="); up {
					if !strings.Contains(log.String(), "model="+wantName(args)) {
						t.Errorf("%s: another name in\n%s", l.args, &log)
					}
					_ = cmd.Process.Kill() // a drain would take longer than the start
					<-ended
				}
			}
		}
		cancel()
	}
}

// wantName is the name in the API of a line's model.
func wantName(args []string) string {
	for i, a := range args {
		if strings.ReplaceAll(a, "_", "-") == "--served-model-name" {
			return args[i+1]
		}
	}
	return args[0]
}
