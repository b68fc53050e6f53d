//go:build linux

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// Where the KV memory of decode nodes is scarce and prompts are long, the default policy
// gets as much done as round robin, as in the simulator (bench/sim/fleet). A router that
// does not look at the memory gets a thirtieth of it done.
func TestBinaryPolicies(t *testing.T) {
	requests, rounds := 100, 3
	c := newCluster(t)
	c.port = freePorts(t, 4)
	c.startUp("--prefill", "1", "--decode", "2", "--kv-cache-memory-bytes", "8MiB", "--threads", "1") // 4,096 tokens a node
	took := map[string]float64{}                                                                      // seconds
	for round := range rounds {
		for _, policy := range []string{"prefix", "round_robin"} {
			dir := t.TempDir()
			out, errOut, err := tandem(t, nil, "bench", "serve", "--port", strconv.Itoa(c.port), "--header", "X-Tandem-Policy="+policy,
				"--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "600", "--prefix-repetition-suffix-len", "800",
				"--prefix-repetition-num-prefixes", "5", "--prefix-repetition-output-len", "64", "--num-prompts", strconv.Itoa(requests),
				"--max-concurrency", "16", "--seed", strconv.Itoa(round), "--ignore-eos", "--disable-tqdm",
				"--save-result", "--result-dir", dir, "--result-filename", "result.json")
			if err != nil {
				t.Fatalf("%s: %v\n%s%s", policy, err, out, errOut)
			}
			text, err := os.ReadFile(filepath.Join(dir, "result.json"))
			if err != nil {
				t.Fatal(err)
			}
			var r struct {
				Completed, Failed int
				Duration          float64
				P99               float64 `json:"p99_ttft_ms"`
			}
			if err := json.Unmarshal(text, &r); err != nil {
				t.Fatal(err)
			}
			if r.Completed != requests || r.Failed != 0 {
				t.Errorf("round %d, %s: %d of %d requests were answered, %d failed", round, policy, r.Completed, requests, r.Failed)
			}
			t.Logf("note: round %d, %s: %.1f s, first tokens within %.0f ms", round, policy, r.Duration, r.P99)
			took[policy] += r.Duration
		}
	}
	if took["prefix"] > 1.2*took["round_robin"] {
		t.Errorf("the default policy took %.1f s, round robin %.1f s", took["prefix"], took["round_robin"])
	}
}
