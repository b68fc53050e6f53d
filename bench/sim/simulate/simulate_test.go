package simulate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/internal/limits"
)

// options returns those of the command's defaults with a small load.
func options() Options {
	return Options{
		Fleet: "2P2D", Profile: "h200:llama-8b", Load: "rps=12,n=150,in=lognormal(7,0.9),out=20-120,prefix=0.3", Speedup: 1, Price: -1, Seed: 3,
		Gateways: 2, Policy: "prefix", MinRemote: 16, Limits: limits.Default(), BatchedTokens: 2048, MaxSeqs: 256,
		RoundTrip: fleet.DefaultRoundTrip, GrantTimeout: 2 * time.Second,
		Metrics: []string{"ttft", "tpot", "itl"}, Percentiles: []float64{99}, Goodput: []string{"ttft:2000", "tpot:50"},
	}
}

// played runs a simulation in a folder and returns its text, JSON and page.
func played(t *testing.T, o Options) (text string, result map[string]any, files [2][]byte) {
	t.Helper()
	dir := t.TempDir()
	o.Save, o.Detailed, o.File, o.HTML = true, true, filepath.Join(dir, "a.json"), filepath.Join(dir, "a.html")
	var out bytes.Buffer
	if err := Run(&o, &out); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{o.File, o.HTML} {
		var err error
		if files[i], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	if err := json.Unmarshal(files[0], &result); err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(out.String(), dir, ""), result, files
}

// Equal options give equal output, byte for byte. Another seed gives another output hash.
func TestEqualSeeds(t *testing.T) {
	o := options()
	o.Events = []string{"3s kill decode-1", "4s start decode-1", "2s drain prefill-0 1s", "5s cancel 30%"}
	textA, a, filesA := played(t, o)
	textB, b, filesB := played(t, o)
	if textA != textB || !bytes.Equal(filesA[0], filesB[0]) || !bytes.Equal(filesA[1], filesB[1]) {
		t.Errorf("equal options gave other output:\n%s\n%s", textA, textB)
	}
	if a["output_hash"] == "" || a["output_hash"] != b["output_hash"] {
		t.Errorf("output hashes %v and %v", a["output_hash"], b["output_hash"])
	}
	o.Seed = 4
	if _, c, _ := played(t, o); c["output_hash"] == a["output_hash"] {
		t.Error("another seed gave the same output hash")
	}
}

// The output has the block and the keys of bench serve, and the fleet's counters.
func TestReport(t *testing.T) {
	o := options()
	o.Events, o.Command = []string{"3s kill decode-1"}, "tandem sim --fleet 2P2D <&>"
	text, result, files := played(t, o)
	for _, want := range []string{
		"Fleet: 2P2D of h200:llama-8b (NVIDIA H200 SXM)", "gateways: 2", "Step times: estimate ±25 %. Decoding: all by coefficients",
		"============ Serving Benchmark Result ============\nSuccessful requests:                     150", "Request rate configured (RPS):           12.00",
		"Request goodput (req/s):", "P99 ITL (ms):", "Fleet over time (step times: estimate ±25 %)", "Nodes that died: 1, started: 0", "$15.20 an hour", "Checks: 5 schedulers and queues of nodes are consistent. Output hash 0x",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, key := range []string{
		"date", "backend", "model_id", "num_prompts", "completed", "request_throughput", "request_goodput", "output_throughput", "mean_ttft_ms", "p99_itl_ms", "latencies", "ttfts", "itls",
		"simulated", "profile", "step_times_source", "step_times_error", "decode_busy", "resumed", "checks", "price_per_million_tokens",
	} {
		if _, ok := result[key]; !ok {
			t.Errorf("the JSON has no %s", key)
		}
	}
	series := result["timeline"].(map[string]any)
	n := len(series["seconds"].([]any))
	for key, v := range series {
		if len(v.([]any)) != n || n < 20 {
			t.Errorf("timeline: %s has %d figures of %d", key, len(v.([]any)), n)
		}
	}
	if nodes := series["decode_nodes"].([]any); nodes[0] != 2.0 || nodes[n-1] != 1.0 {
		t.Errorf("decode nodes over time: %v", nodes)
	}
	page := string(files[1])
	for _, want := range []string{
		"<h1>Simulated fleet 2P2D</h1>", "estimate ±25 %", "KV memory in use", "Requests that wait", "Nodes that are up", "To repeat: tandem sim --fleet 2P2D &lt;&amp;&gt;", "150 of 150 requests were served", "2P2D, estimate ±25 %: rate 12",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if strings.Contains(page, "NaN") || regexp.MustCompile(`(src|href)=`).MatchString(page) {
		t.Error("the page has NaN, or needs another file")
	}
	// Tools that compare results of bench serve read it.
	name := filepath.Join(t.TempDir(), "r.json")
	if err := os.WriteFile(name, files[0], 0o600); err != nil {
		t.Fatal(err)
	}
	runs, err := report.Load(name)
	if err != nil || len(runs) != 1 {
		t.Errorf("%d runs, %v", len(runs), err)
	}
}

// A profile of measured points is printed as such, with the share of steps between them.
func TestMeasuredProfile(t *testing.T) {
	o := options()
	var b bytes.Buffer
	if err := PrintProfile(&o, &b); err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(b.String(), "source: estimate", "source: measured", 1)
	text = strings.Replace(text, "  error: 0.25\n", "", 1)
	text = strings.Replace(text, "  decode:\n", "  decode:\n    points: [[1, 1, 0.005], [1, 20000, 0.006], [64, 1, 0.006], [64, 20000, 0.04]]\n", 1)
	o.Profile = filepath.Join(t.TempDir(), "h200.yaml")
	if err := os.WriteFile(o.Profile, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	o.Price = 0
	out, result, _ := played(t, o)
	if !strings.Contains(out, "Step times: measured. Decoding: all between points. Prompts: all by coefficients") || strings.Contains(out, "estimate") || strings.Contains(out, "Cost:") {
		t.Error(out)
	}
	o.Price = -1
	text = strings.Replace(text, "price_per_hour: 3.8, ", "", 1)
	if err := os.WriteFile(o.Profile, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if without, _, _ := played(t, o); strings.Contains(out, "No price is known") || !strings.Contains(without, "No price is known: give --price-per-hour") || strings.Contains(without, "Cost:") {
		t.Errorf("%s\n%s", out, without)
	}
	uses := result["step_times_decode"].(map[string]any)
	if uses["points"].(float64) < 100 || uses["coefficients"] != 0.0 {
		t.Error(uses)
	}
}

// Prefill nodes of another kind have their own step times and price, and both are named.
func TestPrefillProfile(t *testing.T) {
	o := options()
	_, one, _ := played(t, o)
	o.PrefillProfile = "l40s:llama-8b"
	out, two, files := played(t, o)
	for _, want := range []string{
		"Fleet: 2 prefill nodes of l40s:llama-8b (NVIDIA L40S) and 2 decode nodes of h200:llama-8b (NVIDIA H200 SXM), with 209232 and 917024 tokens of KV memory each",
		"Cost: 2 prefill nodes at $1.00 and 2 decode nodes at $3.80 an hour: $9.60 an hour",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if two["prefill_profile"] != "l40s:llama-8b" || one["prefill_profile"] != nil || two["price_per_hour"] != 9.6 || !bytes.Contains(files[1], []byte("NVIDIA L40S")) {
		t.Errorf("%v and %v, $%v", two["prefill_profile"], one["prefill_profile"], two["price_per_hour"])
	}
	if ttft := two["mean_ttft_ms"].(float64) / one["mean_ttft_ms"].(float64); ttft < 1.5 {
		t.Errorf("first tokens take %g times as long with slower prefill nodes", ttft)
	}
}

// Each wrong option is refused with one sentence that has the value and the remedy.
func TestWrongOptions(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.jsonl")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*Options)
		want   string
	}{
		{func(o *Options) { o.Fleet = "6P" }, "6P2D"},
		{func(o *Options) { o.Fleet = "2P0D" }, "6P2D"},
		{func(o *Options) { o.Fleet, o.Blocks, o.Gateways = "999999P9D", 10, 1 }, "at most 100000 are simulated"},
		{func(o *Options) { o.Profile = "" }, "--profile is missing"},
		{func(o *Options) { o.Profile = "h300:llama-8b" }, "no GPU is called"},
		{func(o *Options) { o.Profile = "nothing.yaml" }, "nothing.yaml"},
		{func(o *Options) { o.PrefillProfile = "h300:llama-8b" }, "no GPU is called"},
		{func(o *Options) { o.Fleet, o.PrefillProfile = "2D", "h100:llama-8b" }, "--prefill-profile h100:llama-8b: the fleet 2D has no prefill nodes: give it some"},
		{func(o *Options) { o.PrefillProfile = "h100:qwen3-8b" }, "profile h100:qwen3-8b is of a model of 36 layers"},
		{func(o *Options) { o.PrefillProfile = "2xh100:llama-8b" }, "KV moves between nodes of one --tensor-parallel-size only"},
		{func(o *Options) { o.Load = "" }, "either --trace FILE or --load SPEC"},
		{func(o *Options) { o.Trace = empty }, "either --trace FILE or --load SPEC"},
		{func(o *Options) { o.Load, o.Trace = "", empty }, "there is no request"},
		{func(o *Options) { o.Load, o.Trace = "", "nothing.jsonl" }, "nothing.jsonl"},
		{func(o *Options) { o.Load = "rps=1" }, "has no in"},
		{func(o *Options) { o.Load = "rps=1,n=1000000,in=10,out=100000" }, "give --num-prompts"},
		{func(o *Options) { o.Speedup = 0 }, "--speedup 0"},
		{func(o *Options) { o.Price = math.NaN() }, "--price-per-hour NaN"},
		{func(o *Options) { o.Price = -2 }, "--price-per-hour -2"},
		{func(o *Options) { o.Policy = "best" }, "--policy"},
		{func(o *Options) { o.Events = []string{"now kill decode-0"} }, "not a time"},
		{func(o *Options) { o.Events = []string{"1s kill decode-9"} }, "has no decode-9"},
		{func(o *Options) { o.Goodput = []string{"ttft"} }, "--goodput"},
		{func(o *Options) { o.Metrics = []string{"speed"} }, "--percentile-metrics"},
		{func(o *Options) { o.Percentiles = []float64{101} }, "--metric-percentiles"},
		{func(o *Options) { o.Blocks = 1 }, "memory.blocks is 1"},
		{func(o *Options) { o.HTML = filepath.Join(empty, "x.html") }, "--html"},
		{func(o *Options) { o.Fleet = "3000P7000D" }, "give larger blocks, such as --block-size 144"},
		{func(o *Options) { o.Gateways = 10_000_000 }, "give at most 500000"},
		{func(o *Options) { o.Gateways = 1 << 62 }, "give at most 500000"}, // times the nodes: 0
		{func(o *Options) { o.Load = "rps=1,n=1000000,in=4194304,out=1" }, "draw fewer, with n="},
		{func(o *Options) { o.Heartbeat = 1 }, "nodes report every 1ns, at least 1ms"},
		{func(o *Options) { o.Goodput = []string{"ttft:5"} }, "--goodput ttft:5: the shortest step of h200:llama-8b takes 6.2 ms"},
		{func(o *Options) { o.Goodput = []string{"tpot:4"} }, "the shortest step"},
		{func(o *Options) { o.Speedup = 1e-9 }, "give --num-prompts or --speedup"},
		{func(o *Options) { o.BatchedTokens = 8 }, "--max-num-batched-tokens 8"},
		{func(o *Options) { o.MaxSeqs, o.BatchedTokens = math.MaxInt, math.MaxInt }, "at most 1048576 and 268435456 are simulated"},
		{func(o *Options) { o.Events = []string{"1s kill gateway-2"} }, "has no gateway-2: its last one is gateway-1"},
	} {
		o := options()
		c.change(&o)
		err := Run(&o, new(bytes.Buffer))
		if !errors.Is(err, ErrOption) || !strings.Contains(fmt.Sprint(err), c.want) || strings.Contains(fmt.Sprint(err), "\n") {
			t.Errorf("want %q: %v", c.want, err)
		}
	}
}

// An event after the run's end is named.
func TestEventAfterTheEnd(t *testing.T) {
	o := options()
	o.Events = []string{"1h kill decode-0"}
	if text, _, _ := played(t, o); !strings.Contains(text, "Not reached: 1h0m0s kill decode-0; the run ended at 1") {
		t.Error(text)
	}
}

// Requests that no node can hold fail with the remedy; the others are served.
func TestTooLongRequests(t *testing.T) {
	o := options()
	o.MaxModelLen = 2000
	text, result, _ := played(t, o)
	if failed := result["failed"].(float64); failed < 5 || failed > 100 || !strings.Contains(text, fmt.Sprintf("Failed requests: %g: no node can hold the request: give nodes more KV memory", failed)) {
		t.Error(text)
	}
}
