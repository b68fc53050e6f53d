package bench

import (
	"math"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/bench/report"
)

// What a server exposes is whatever it likes: a sample is made of numbers that a
// report can hold, or there is none.
func FuzzReadSample(f *testing.F) {
	f.Add("# HELP x\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.75\nvllm:generation_tokens_total 7\nprocess_cpu_seconds_total 1.5 1700000000000\n")
	f.Add("vllm:kv_cache_usage_perc NaN\nprocess_cpu_seconds_total +Inf\nvllm:generation_tokens_total{a=\"}\"} 1e999\n")
	f.Add("vllm:generation_tokens_total{ 5\nprocess_cpu_seconds_total\nvllm:kv_cache_usage_perc} x\n")
	f.Fuzz(func(t *testing.T, text string) {
		var s report.Sample
		if err := readSample(strings.NewReader(text), &s); err != nil {
			return
		}
		for _, v := range []float64{s.Fill, s.Tokens, s.CPU} {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				t.Fatalf("%q: %+v", text, s)
			}
		}
	})
}
