package offline

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/engine"
)

func options(out io.Writer, file string) Options {
	return Options{Load: engine.LoadOptions{Model: engine.Builtin, Device: "cpu", Kernels: "auto", KVDType: "auto", KVMemory: 32 << 20, MaxSeqs: 16, MaxBatchedTokens: 128},
		N: 2, Detokenize: true, OutputJSON: file, Out: out}
}

// The lines and keys are vLLM's, and the tokens as many as were asked for.
func TestThroughput(t *testing.T) {
	var out bytes.Buffer
	file := filepath.Join(t.TempDir(), "t.json")
	requests := func(v dataset.Vocabulary) ([]dataset.Request, error) {
		return dataset.Make(dataset.Options{Name: "random", N: 3, Vocabulary: v, Random: dataset.RandomOptions{Input: 20, Output: 4}})
	}
	if err := Throughput(t.Context(), options(&out, file), 3, requests); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^Throughput: \d+\.\d\d requests/s, \d+\.\d\d total tokens/s, \d+\.\d\d output tokens/s\nTotal num prompt tokens:  60\nTotal num output tokens:  24\n$`).Match(out.Bytes()) {
		t.Errorf("printed:\n%s", &out)
	}
	var v struct {
		Elapsed  float64 `json:"elapsed_time"`
		Requests int     `json:"num_requests"`
		Tokens   int     `json:"total_num_tokens"`
		RPS      float64 `json:"requests_per_second"`
		TPS      float64 `json:"tokens_per_second"`
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &v); err != nil || v.Requests != 3 || v.Tokens != 84 || v.Elapsed <= 0 || v.RPS <= 0 || v.TPS <= v.RPS {
		t.Errorf("%s: %v", data, err)
	}
}

// Each iteration computes its whole prompts again.
func TestLatency(t *testing.T) {
	var out bytes.Buffer
	file := filepath.Join(t.TempDir(), "l.json")
	if err := Latency(t.Context(), options(&out, file), LatencyOptions{Input: 40, Output: 3, Batch: 2, Warmups: 1, Iterations: 3}); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^Warming up\.\.\.\nAvg latency: [\d.e-]+ seconds\nStd latency: [\d.e-]+ seconds\n10% percentile latency: [\d.e-]+ seconds\n25% (?s:.*)\n99% percentile latency: [\d.e-]+ seconds\n$`).Match(out.Bytes()) {
		t.Errorf("printed:\n%s", &out)
	}
	var v struct {
		Avg         float64            `json:"avg_latency"`
		Latencies   []float64          `json:"latencies"`
		Percentiles map[string]float64 `json:"percentiles"`
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &v); err != nil || len(v.Latencies) != 3 || len(v.Percentiles) != 6 || v.Percentiles["99"] < v.Percentiles["10"] || v.Avg <= 0 {
		t.Errorf("%s: %v", data, err)
	}
	b, err := start(t.Context(), options(io.Discard, ""), 2)
	if err != nil {
		t.Fatal(err)
	}
	prompts := []prompt{{b.vocabulary().IDs[:40], 1}}
	for range 2 {
		if _, _, err := b.generate(t.Context(), prompts, false); err != nil {
			t.Fatal(err)
		}
	}
	// The two outputs of one call share their prompt; no call has that of another.
	if n := b.eng.Stats().PromptComputed; n < 80 {
		t.Errorf("%d prompt tokens computed in two calls, want both of 40", n)
	}
	if err := b.close(); err != nil {
		t.Fatal(err)
	}
}

func TestRefuses(t *testing.T) {
	o := options(io.Discard, "")
	if err := Latency(t.Context(), o, LatencyOptions{}); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
	o.N = 0
	if err := Throughput(t.Context(), o, 3, nil); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
	if err := Latency(t.Context(), options(io.Discard, ""), LatencyOptions{Input: 1 << 20, Output: 1, Batch: 1, Iterations: 1}); err == nil {
		t.Error("a prompt longer than the model is accepted")
	}
}
