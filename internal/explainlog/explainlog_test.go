package explainlog

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/tandem-serving/tandem/docs"
)

// What New compiles is the same for each test.
var (
	compiledRules = compile(rules)
	ownLines      = Messages(docs.LogLines)
)

// explain returns the report of a log, after the checks that hold for every log.
func explain(t testing.TB, text []byte) *Report {
	t.Helper()
	e := explainer(compiledRules, ownLines)
	for line := range bytes.Lines(text) {
		e.Add(bytes.TrimSuffix(line, []byte("\n")), false)
	}
	r := e.Report()
	if err := r.check(); err != nil {
		t.Fatal(err)
	}
	return r
}

// check verifies that each line is counted once and that nothing but newlines controls a terminal.
func (r *Report) check() error {
	n := r.Omitted
	for i := range r.Runs {
		for _, e := range r.Runs[i].Entries {
			n += e.Count
			if e.What == "" {
				return fmt.Errorf("line %d has no explanation: %q", e.First, e.Text)
			}
			if e.Last < e.First {
				return fmt.Errorf("lines %d to %d", e.First, e.Last)
			}
		}
	}
	if n != r.Lines {
		return fmt.Errorf("%d of %d lines are counted", n, r.Lines)
	}
	for name, out := range map[string]string{"text": r.Text("x\x1b[2J", TextOptions{}), "page": r.HTML("x\x1b[2J<b>")} {
		for i, c := range out {
			if c != '\n' && (unicode.IsControl(c) || unicode.Is(unicode.Cf, c)) || c == unicode.ReplacementChar {
				return fmt.Errorf("%s: %q at %d", name, c, i)
			}
		}
	}
	return nil
}

// maths returns the arithmetic of the entries whose rule has that name.
func (r *Report) maths(rule string) (all []string) {
	for i := range r.Runs {
		for _, e := range r.Runs[i].Entries {
			if e.Rule == rule {
				all = append(all, strings.Join(e.Math, "\n"))
			}
		}
	}
	return all
}

// findings returns all findings with their arithmetic and changes.
func (r *Report) findings() string {
	var b strings.Builder
	for _, f := range r.Across {
		fmt.Fprintln(&b, f.Severity, f.Text, f.Math, f.Change)
	}
	for i := range r.Runs {
		for _, f := range r.Runs[i].Findings {
			fmt.Fprintln(&b, f.Severity, f.Text, f.Math, f.Change)
		}
	}
	return b.String()
}

// A start of a model with windows, whose lines have the shapes of a recent version. The names and
// figures are made up but for the KV arithmetic of a known model.
const started = `$ vllm serve org/gpt-oss-20b --max-num-seqs 12 --gpu-memory-utilization 0.5
(APIServer pid=7) INFO 02-03 10:00:00 [a.py:1] vLLM API server version 0.12.3
(APIServer pid=7) INFO 02-03 10:00:00 [utils.py:2] non-default args: {'model': 'org/gpt-oss-20b', 'max_model_len': 65536, 'max_num_seqs': 12, 'gpu_memory_utilization': 0.5}
(EngineCore pid=8) INFO 02-03 10:00:09 [core.py:3] Initializing a V1 LLM engine (v0.12.3) with config: model='org/gpt-oss-20b', dtype=torch.bfloat16, max_seq_len=65536, tensor_parallel_size=1, quantization=mxfp4, enforce_eager=False, kv_cache_dtype=auto, compilation_config={'compile_ranges_endpoints': [4096], 'cudagraph_capture_sizes': [1, 2, 4, 8, 16, 24]}
(EngineCore pid=8) INFO 02-03 10:00:10 [loader.py:4] Loading weights took 40.00 seconds
(EngineCore pid=8) INFO 02-03 10:00:50 [runner.py:5] Model loading took 14.0 GiB memory and 45.5 seconds
(EngineCore pid=8) INFO 02-03 10:00:51 [backends.py:6] Dynamo bytecode transform time: 3.00 s
(EngineCore pid=8) INFO 02-03 10:00:55 [backends.py:7] Compiling a graph for compile range (1, 4096) takes 4.50 s
(EngineCore pid=8) INFO 02-03 10:00:56 [monitor.py:8] torch.compile took 7.50 s in total
(EngineCore pid=8) INFO 02-03 10:00:57 [runner.py:9] Estimated CUDA graph memory: 0.40 GiB total
(EngineCore pid=8) INFO 02-03 10:00:57 [gpu_worker.py:10] Available KV cache memory: 18.75 GiB
(EngineCore pid=8) INFO 02-03 10:00:57 [gpu_worker.py:11] To keep the size, increase --gpu-memory-utilization from 0.5000 to 0.5050 please
(EngineCore pid=8) INFO 02-03 10:00:57 [kv.py:12] GPU KV cache size: 409,600 tokens
(EngineCore pid=8) INFO 02-03 10:00:57 [kv.py:13] Maximum concurrency for 65,536 tokens per request: 11.73x
Capturing CUDA graphs (decode, FULL): 75%|██ | 3/4 [00:00<00:00]` + "\r" + `Capturing CUDA graphs (decode, FULL): 100%|███| 4/4 [00:01<00:00,  4.1it/s](EngineCore pid=8) INFO 02-03 10:01:00 [runner.py:14] Graph capturing finished in 2 secs, took 0.25 GiB
(EngineCore pid=8) INFO 02-03 10:01:00 [core.py:15] init engine (profile, create kv cache, warmup model) took 12.00 seconds
(APIServer pid=7) INFO 02-03 10:01:01 [api_server.py:16] Starting vLLM server on http://127.0.0.1:8000
(APIServer pid=7) INFO 02-03 10:01:01 [launcher.py:17] Route: /a, Methods: GET
(APIServer pid=7) INFO 02-03 10:01:01 [launcher.py:17] Route: /b, Methods: GET
`

func TestStartArithmetic(t *testing.T) {
	r := explain(t, []byte(started))
	if len(r.Runs) != 1 || r.ByShape != 0 {
		t.Fatalf("%d runs, %d lines by shape\n%s", len(r.Runs), r.ByShape, r.Text("", TextOptions{}))
	}
	for _, c := range []struct{ rule, want string }{
		{"model-memory", "14 GiB ÷ 40.0 s of reading = 0.35 GiB/s"},
		{"model-memory", "45.5 s in all - 40.0 s reading = 5.5 s"},
		{"compile-total", "3.00 s tracing + 4.50 s compiling = 7.50 s\nas logged: 7.50 s"},
		{"graph-hint", "0.40 GiB of graphs ÷ (0.5050 - 0.5000) = 80.0 GiB"},
		{"graph-hint", "0.5000 x 80.0 GiB - 14.00 weights - 18.75 KV = 7.2 GiB"},
		{"kv-tokens", "51,200 blocks ÷ 2 groups x 16 tokens = 409,600 tokens\nas logged"},
		// 4,096 blocks without a window; 127 + 4,096 tokens are 264 blocks, and one for the shift.
		{"concurrency", "51,200 blocks ÷ 4,361 blocks of one request = 11.74 requests"},
		{"graph-bar", "4 of 4 sizes\n4 of the 6 sizes are at most --max-num-seqs 12"},
		{"graph-done", "0.25 GiB ÷ 4 graphs = 64.0 MiB each"},
		{"init-time", "7.5 s compile + 2 s graphs = 9.5 s of 12.00"},
		{"route", "2 routes"},
	} {
		if got := strings.Join(r.maths(c.rule), "\n"); !strings.Contains(got, c.want) {
			t.Errorf("%s: %q lacks %q", c.rule, got, c.want)
		}
	}
	for _, want := range []string{
		"warning Weights were read at 0.35 GiB/s",
		"warning Batches of 9 to 12 sequences have no full graph: the sizes are at most 8, the next one is 16.",
		"--gpu-memory-utilization 0.50 leaves 40 GiB of the GPU unused",
	} {
		if got := r.findings(); !strings.Contains(got, want) {
			t.Errorf("the findings lack %q:\n%s", want, got)
		}
	}
	if facts := strings.Join(r.Runs[0].Facts, "\n"); !strings.Contains(facts, "14.00 GiB weights + 18.75 KV + 0.25 graphs = 33.00 GiB of 80.0 GiB") || !strings.Contains(facts, "1 min") && !strings.Contains(facts, "61 s") {
		t.Errorf("facts:\n%s", facts)
	}
}

// Each of several GPUs keeps its share of the KV heads.
func TestTensorParallel(t *testing.T) {
	r := explain(t, []byte(`INFO 02-03 10:00:00 [core.py:3] Initializing a V1 LLM engine (v0.12.3) with config: model='meta-llama/Llama-3.1-70B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=4, quantization=None, kv_cache_dtype=auto
INFO 02-03 10:00:00 [w.py:1] Available KV cache memory: 10.00 GiB
INFO 02-03 10:00:00 [w.py:1] GPU KV cache size: 131,072 tokens
INFO 02-03 10:00:00 [w.py:1] Maximum concurrency for 8,192 tokens per request: 16.00x
`))
	// 80 layers x 2 x 2 heads x 128 x 2 bytes x 16 tokens are 1,280 KiB.
	if got := strings.Join(append(r.maths("kv-tokens"), r.maths("concurrency")...), "\n"); !strings.Contains(got, "80 layers x 2 x 2 KV heads x 128") || !strings.Contains(got, "8,192 blocks ÷ 1 group x 16 tokens = 131,072 tokens\nas logged") || !strings.Contains(got, "as logged: 16.00") {
		t.Error(got)
	}
}

// Latent attention stores one vector of 576 values for a token and layer.
func TestLatent(t *testing.T) {
	r := explain(t, []byte(`INFO 02-03 10:00:00 [core.py:3] Initializing a V1 LLM engine (v0.12.3) with config: model='deepseek-ai/DeepSeek-R1', dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=8
INFO 02-03 10:00:00 [w.py:1] Available KV cache memory: 17.16 GiB
INFO 02-03 10:00:00 [w.py:1] GPU KV cache size: 262,144 tokens
`))
	if got := strings.Join(r.maths("kv-tokens"), "\n"); !strings.Contains(got, "61 layers x 576 x 2 bytes") || !strings.Contains(got, "as logged") {
		t.Error(got)
	}
}

// rates returns lines of rates of a server whose steps take a fixed time and more for the KV in use.
func rates(n int, running int, base, slope float64) []byte {
	var b bytes.Buffer
	for i := range n {
		kv := float64(5 + 10*i)
		fmt.Fprintf(&b, "INFO 02-03 10:%02d:00 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, Waiting: 0 reqs, GPU KV cache usage: %.1f%%, Prefix cache hit rate: 0.0%%\n",
			2+i, float64(running)/(base+slope*kv), running, kv)
	}
	return b.Bytes()
}

func TestThroughputAgainstKV(t *testing.T) {
	text := append([]byte("INFO 02-03 10:00:57 [w.py:1] Available KV cache memory: 10.00 GiB\n"), rates(8, 4, 0.010, 0.0002)...)
	r := explain(t, text)
	f := r.Runs[0].Fit
	if f == nil || f.R2 < 0.999 || f.Running != 4 {
		t.Fatalf("fit %+v", f)
	}
	if at := f.At(0); at < 395 || at > 405 { // 4 ÷ 0.010
		t.Errorf("%.1f tokens/s at 0 %%", at)
	}
	// 70 points of 10 GiB in 14 ms; 70 points in 7 minutes, 25 points are left.
	for _, want := range []string{"Generation falls from 363.6 to 160.0 tokens/s (56 % less)", "with 4 running, a step takes 11.0 ms and then 25.0 ms", "7.00 GiB more in 14.0 ms = 537 GB/s", "full 2 min 30 s after"} {
		if got := r.findings(); !strings.Contains(got, want) {
			t.Errorf("the findings lack %q:\n%s", want, got)
		}
	}
	if page := r.HTML("x"); strings.Count(page, "<svg") != 2 || !strings.Contains(page, "stroke-dasharray") {
		t.Error("the page lacks its charts")
	}
	if steady := explain(t, rates(8, 4, 0.010, 0)); strings.Contains(steady.findings(), "falls") {
		t.Errorf("a steady rate: %s", steady.findings())
	}
}

// Lines that no rule was written for have explanations by their shape; what says a fault is found.
func TestUnseen(t *testing.T) {
	for _, c := range []struct{ line, topic, what, severity string }{
		{"(Worker_TP1 pid=3) INFO 02-03 10:00:00 [kv_cache_pool.py:9] frobnicated 12 blocks in 3.5 ms", topicMemory, "A message of the KV cache", ""},
		{"(EngineCore pid=3) WARNING 02-03 10:00:00 [fused_moe_x.py:9] something is odd; use --frob", topicModel, "A warning of the mixture of experts", "note"},
		{"ERROR 02-03 10:00:00 [zzz.py:9] it went wrong", topicText, "An error of the source file zzz", "problem"},
		{"vllm-1  | INFO 02-03 10:00:00 scheduler.py:9] old form", topicSched, "A message of the scheduler", ""},
		{"2026-02-03T10:00:00.123Z (EngineCore pid=3) DEBUG 02-03 10:00:00 [core.py:9] detail", topicStart, "A detail for developers of the engine's core", ""},
		{`> (APIServer pid=9) INFO 02-03 10:00:00 [chat_utils.py:9] quoted`, topicAPI, "A message of chat templates", ""},
		{`{"level":"info","time":"2026-02-03T10:00:00Z","message":"hello","module":"x"}`, topicText, "A message of the program", ""},
		{"2026-02-03 10:00:00,123 - vllm.engine - INFO - hello", topicStart, "A message of the engine", ""},
		{"(pid=244, ip=10.0.0.1) INFO 02-03 10:00:00 [__init__.py:9] from Ray", topicStart, "A message of the start", ""},
		{"(Worker_TP0 pid=2) 2026-02-03 10:00:00  [Lib:lib.x:WARNING] (kernel.py:3): odd", topicText, "A warning of the source file kernel", "note"},
		{"  --max-num-seqs 4 \\", topicStart, "The command line continues", ""},
		{"W0203 10:00:00.000000 17 torch/elastic.py:9] hello", topicText, "A warning of the source file elastic", "note"},
		{"Filling 6 boxes:  50%|█████     | 3/6 [00:01<00:01,  2.7it/s]", topicText, "A progress bar: 3 of 6 done.", ""},
		{"    indented = 3 GiB", topicText, "A line of a dump", ""},
		{"the frobnicator failed", topicText, "Text without a level", "warning"},
		{"Traceback (most recent call last):", topicFault, "call stack", ""},
		{"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.", topicFault, "The GPU's memory is full.", "problem"},
		{"some.module.FrobError: no frob", topicFault, "A Python error", "problem"},
		{`INFO:     127.0.0.1:5 - "POST /v1/x HTTP/1.1" 503 Service Unavailable`, topicAPI, "answered with 503", "warning"},
		{"ValueError: Free memory on device cuda:0 (3.2/8.0 GiB) on startup is less", topicMemory, "3.2 of 8.0 GiB", "problem"},
	} {
		r := explain(t, []byte(c.line+"\n"))
		e := r.Runs[0].Entries[0]
		if e.Topic != c.topic || !strings.Contains(e.What, c.what) || e.Severity.String() != c.severity {
			t.Errorf("%s\n%q, %q, %q", c.line, e.Topic, e.What, e.Severity)
		}
		if strings.Contains(c.line, "12 blocks") && (len(e.Math) == 0 || !strings.Contains(e.Math[0], "12 blocks, 3.5 ms")) {
			t.Errorf("figures: %q", e.Math)
		}
	}
}

// Keys of a command line and of the arguments are not repeated.
func TestKeysAreHidden(t *testing.T) {
	r := explain(t, []byte("vllm serve m --api-key PLANTED1 --port 1\n  --api-key=PLANTED2 \\\nINFO 02-03 10:00:00 [utils.py:2] non-default args: {'api_key': ['PLANTED3'], 'model': 'm'}\n"))
	text := r.Text("x", TextOptions{}) + r.HTML("x")
	if strings.Contains(text, "PLANTED") || !strings.Contains(text, "model = m") {
		t.Errorf("%s", text)
	}
}

// A call stack over several lines is one fault, with its code lines named as such.
func TestTraceback(t *testing.T) {
	r := explain(t, []byte(`(EngineCore pid=3) ERROR 02-03 10:00:00 [core.py:9] Traceback (most recent call last):
(EngineCore pid=3) ERROR 02-03 10:00:00 [core.py:9]   File "/x/core.py", line 5, in run
(EngineCore pid=3) ERROR 02-03 10:00:00 [core.py:9]     go(*args)
(EngineCore pid=3) ERROR 02-03 10:00:00 [core.py:9]     ^^^^^^^^^
(EngineCore pid=3) ERROR 02-03 10:00:00 [core.py:9] ValueError: no
`))
	problems := 0
	for _, f := range r.Runs[0].Findings {
		if f.Severity == Problem {
			problems++
		}
	}
	if problems != 1 {
		t.Errorf("%d problems:\n%s", problems, r.findings())
	}
}

// Result blocks of a benchmark are compared.
func TestBenchmarks(t *testing.T) {
	block := func(tokens int, itl float64) string {
		return fmt.Sprintf("============ Serving Benchmark Result ============\nSuccessful requests:                     50\nTotal generated tokens:                  %d\nRequest throughput (req/s):              5.00\nOutput token throughput (tok/s):         %.2f\nMedian ITL (ms):                         5.00\nP99 ITL (ms):                            %.2f\n==================================================\n", tokens, float64(tokens)/10, itl)
	}
	r := explain(t, []byte(block(1000, 100)+block(2000, 6)))
	if len(r.Runs) != 2 || r.ByShape != 0 {
		t.Fatalf("%d runs, %d by shape", len(r.Runs), r.ByShape)
	}
	for _, want := range []string{"P99 ITL is 20 times the median", "Output token throughput (tok/s): 100.00 and 200.00, 2.00 times"} {
		if !strings.Contains(r.findings(), want) {
			t.Errorf("the findings lack %q:\n%s", want, r.findings())
		}
	}
}

// Every line of docs/logs.md is known, in both of its forms, and the arithmetic of the table belongs
// to lines of the page.
func TestOwnLines(t *testing.T) {
	all := Messages(docs.LogLines)
	if len(all) < 90 {
		t.Fatalf("docs/logs.md has %d lines", len(all))
	}
	known := map[string]bool{}
	for _, m := range all {
		known[m.Text] = true
		text := strings.NewReplacer("%.1f", "1.5", "%d", "2").Replace(m.Text)
		for _, line := range []string{
			"INFO 02-03 10:00:00 " + text,
			"WARNING 02-03 10:00:00 " + text + ` node=a error="x y"`,
			"decode-0   | INFO 02-03 10:00:00 " + text + " n=3",
			`{"time":"2026-02-03T10:00:00Z","level":"INFO","msg":` + fmt.Sprintf("%q", text) + `,"role":"decode","n":3}`,
		} {
			r := explain(t, []byte(line+"\n"))
			if e := r.Runs[0].Entries[0]; e.Rule != "tandem: "+m.Text || e.What != m.What {
				t.Errorf("%s\nis explained by %q: %q", line, e.Rule, e.What)
			}
		}
	}
	for _, m := range ownMath {
		if !known[m.text] {
			t.Errorf("there is arithmetic for %q, which docs/logs.md lacks", m.text)
		}
	}
	r := explain(t, []byte(`decode-0   | INFO 02-03 10:00:00 KV cache blocks=4096 tokens=65536 block_bytes=1048576 concurrency=4.00
decode-0   | INFO 02-03 10:00:10 Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: n/a
decode-0   | INFO 02-03 10:00:10 KV Transfer metrics: Num successful transfers=4, Avg MB per transfer=2.000, Throughput (MB/s)=0.800, Num failed transfers=1
gateway    | INFO 02-03 10:00:10 Gateway: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 6.0 tokens/s, Running: 2 reqs, Usable decode nodes: 0
`))
	text := r.Text("", TextOptions{})
	for _, want := range []string{"4,096 blocks x 1,048,576 bytes = 4.000 GiB", "12.5 % of 65,536 = about 8,192 tokens", "4 transfers x 2.0 MB = 8.0 MB", "1 transfers of KV failed", "no usable decode node"} {
		if !strings.Contains(text, want) {
			t.Errorf("lacks %q:\n%s", want, text)
		}
	}
	if r.ByShape != 0 {
		t.Errorf("%d lines by shape", r.ByShape)
	}
	const load = "INFO 02-03 10:00:00 model loaded weights=\"1 GiB\"\nINFO 02-03 10:00:00 KV cache blocks=4096 tokens=65536 block_bytes=1048576\n"
	for log, want := range map[string]string{
		load: "Memory: 1.00 GiB weights + 4.00 KV = 5.00 GiB",
		"INFO 02-03 10:00:00 computing on a GPU device=cuda:0\n" + load: "GPU memory: 1.00 GiB weights + 4.00 KV = 5.00 GiB",
	} {
		if r := explain(t, []byte(log)); !slices.Contains(r.Runs[0].Facts, want) {
			t.Errorf("%q is missing from %q", want, r.Runs[0].Facts)
		}
	}
}

// Input of any kind and size is bounded in what is kept, and harmless on a terminal.
func TestHostile(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	for name, text := range map[string][]byte{
		"empty":     nil,
		"noise":     noise,
		"escapes":   []byte("\x1b]0;t\x07\x1b[2J\x1bPq\x1b\\ INFO \u202e\u2066\u200b\x9b31m\x08\x7f\r\n\x1b[31mKilled\x1b[0m"),
		"one line":  bytes.Repeat([]byte("a 1 GiB, "), 10<<20/9),
		"brackets":  bytes.Repeat([]byte("{[('"), 1<<18),
		"returns":   bytes.Repeat([]byte("1%|x| 1/2 [\r"), 1<<16),
		"page":      []byte("INFO 02-03 10:00:00 [<script>.py:1] </style><script>alert('x')</script>&\n"),
		"numbers":   []byte("INFO 02-03 10:00:00 [a.py:1] GPU KV cache size: 99999999999999999999999 tokens\nINFO 02-03 10:00:00 [a.py:1] Available KV cache memory: 1e999 GiB\nINFO 02-03 10:00:00 [a.py:1] Using max model len 99999999999\nEngine 000: Avg generation throughput: NaN tokens/s, Running: -1 reqs, GPU KV cache usage: 9e300%\n"),
		"arguments": []byte("INFO 02-03 10:00:00 [a.py:1] non-default args: {" + strings.Repeat("'a': [(", 5000) + "\n"),
	} {
		r := explain(t, text)
		if strings.Contains(r.HTML("x"), "<script") {
			t.Errorf("%s: a script in the page", name)
		}
	}
	var many bytes.Buffer
	for i := range 3 * maxEntries / 2 {
		fmt.Fprintf(&many, "INFO 02-03 10:00:00 [a.py:1] line %d of x%dy\n", i, i)
	}
	r := explain(t, many.Bytes())
	if r.Omitted != maxEntries/2 {
		t.Errorf("%d lines are omitted", r.Omitted)
	}
	z := explain(t, bytes.Repeat(rates(8, 4, 0.01, 0.0001), 1000)).Runs[0].Series[0]
	if z.Lines != 8000 || len(z.Samples) >= maxSamples {
		t.Errorf("%d lines, %d samples", z.Lines, len(z.Samples))
	}
}

func FuzzAdd(f *testing.F) {
	for line := range strings.Lines(started) {
		f.Add([]byte(line))
	}
	f.Add([]byte(`{"msg":"KV cache","blocks":1}`))
	f.Fuzz(func(t *testing.T, text []byte) { explain(t, text) })
}

// A pattern's needles never exclude what it matches.
func TestNeedles(t *testing.T) {
	all := compile(rules)
	find := newFinder(all)
	for i, c := range all {
		if c.has != "" && len(c.has) < leastNeedle {
			t.Errorf("%s: %q is too short to be found", c.name, c.has)
		}
		for _, line := range strings.Split(started, "\n") {
			lower := strings.ToLower(line)
			find.look(lower)
			has := c.has == "" || strings.Contains(lower, c.has)
			one := c.needles == nil || slices.ContainsFunc(c.needles, func(n string) bool { return strings.Contains(lower, n) })
			if find.may(i) != (has && one) {
				t.Errorf("%s: %q: may match: %t, has %t, needles %t", c.name, line, find.may(i), has, one)
			}
			if c.re != nil && c.re.MatchString(line) && !one {
				t.Errorf("%s: %q matches without any of %q", c.name, line, c.needles)
			}
		}
	}
	for pattern, want := range map[string]string{
		`abc`: "abc", `(?i)ABC|def`: "abc def", `a?bcd.*`: "bcd", `(?:abc)?x`: "", `ab|cde`: "", `(abc)+ (\d+) longer`: " longer", `(?:abc|defg)hij`: "abc defg",
	} {
		if got := strings.Join(needles(pattern), " "); got != want {
			t.Errorf("%s: %q, want %q", pattern, got, want)
		}
	}
}

// logsDir is the folder of real logs next to a clone; their licence keeps them out of the repository.
const logsDir = "../../../shared/logs"

// Every line of the real logs is known to a rule, and the arithmetic gives the figures that vLLM
// logged.
func TestRealLogs(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(logsDir, "*.log"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Skip("needs ../shared/logs beside the clone")
	}
	wants := map[string][]string{
		"vllm-0.11.2-gpt-oss-120b.log": {
			"= 130,960 tokens\nas logged", "16,370 blocks ÷ 6,665 blocks of one request = 2.46 requests\nas logged: 2.46", "19.07 s tracing + 44.90 s compiling = 63.97 s\nas logged",
			"Generation falls from 544.8 to 348.6 tokens/s (36 % less) while KV use rises from 4.3 % to 59.3 %", "as expected: 0.50 for each token", "3 of the 83 sizes are at most --max-num-seqs 6",
			"98,304 ÷ 8,192 = at least 12 steps",
		},
		"vllm-a100-gpt-oss-20b-gemma-4.log": {
			"= 798,624 tokens\nas logged", "as logged: 11.99", "= 93,936 tokens\nas logged", "as logged: 6.96", "= 106,800 tokens\nas logged", "as logged: 4.37", "= 16,576 tokens\nas logged", "as logged: 1.23",
			"79.2 GiB: the GPU's memory", "run 2 is eager and reaches 18.8 tokens/s, run 3 with graphs 80.6",
		},
		"vllm-llama-3.2-1b-graphs-and-eager.log": {
			"= 1,215,552 tokens\nas logged", "as logged: 9.27", "1,215,552 tokens ÷ 75,972 blocks = 16 tokens a block", "The configuration lists 67 sizes of CUDA graphs, and the log has no line about a capture",
			"P99 ITL is 35 times the median", "0.31 GiB ÷ 67 graphs = 4.7 MiB each",
		},
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		r := explain(t, text)
		all := r.findings()
		for i := range r.Runs {
			for _, e := range r.Runs[i].Entries {
				if e.Rule == "" {
					t.Errorf("%s:%d: no rule knows %q", path, e.First, e.Text)
				}
				all += "\n" + strings.Join(e.Math, "\n")
			}
		}
		name := filepath.Base(path)
		for _, want := range wants[name] {
			if !strings.Contains(all, want) {
				t.Errorf("%s: no %q", name, want)
			}
		}
		if strings.Contains(all, "it counts in another way") || regexp.MustCompile(`the log has [0-9]`).MatchString(all) {
			t.Errorf("%s: a figure is not derived", name)
		}
		delete(wants, name)
	}
	for name := range wants {
		t.Errorf("%s is not there", name)
	}
}
