package roles

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// A measured profile is what tandem sim reads.
func TestProfileCommand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.yaml")
	var status int
	var out, errOut string
	for budget := 1; budget <= 32; budget *= 2 { // on a machine that other tests use, a second may be too short
		status, out, errOut = tandem("profile", "builtin", "--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "512", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "16MiB",
			"--budget", strconv.Itoa(budget), "--price-per-hour", "2", "--accept", "--out", file)
		if !strings.Contains(errOut, "give a longer --budget") {
			break
		}
	}
	if status != 0 || !strings.HasPrefix(out, "Wrote "+file) || !strings.Contains(errOut, "Shapes that were not fitted") {
		t.Fatalf("status %d\n%s%s", status, out, errOut)
	}
	if status, out, errOut := tandem("sim", "--fleet", "1P1D", "--profile", file, "--load", "rps=1,n=5,in=100,out=5"); status != 0 || !strings.Contains(out, "Step times: measured") || !strings.Contains(out, "2 nodes at $2.00 an hour") {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
	if left, _ := filepath.Glob(file + ".part"); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// A wrong setting ends with status 2 and one line that says what to do.
func TestProfileRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"give a file in a folder that can be written": {"--out", "/nowhere/node.yaml"},
		"--price-per-hour -1: give 0":                 {"--price-per-hour", "-1"},
		"--watts 1e+07: give 0":                       {"--watts", "1e7"},
		"does not model drafts":                       {"--speculative-config", `{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":2}`},
		"./nothing":                                   {"./nothing"},
		"give a longer --budget":                      {"--max-model-len", "64", "--device", "cpu", "--budget", "1"},
		"--peer: --from measures no steps of its own": {"--from", "127.0.0.1:1", "--base", "h200:llama-8b", "--peer", "127.0.0.1:1"},
		"--seed: --from measures no steps of its own": {"--from", "127.0.0.1:1", "--base", "h200:llama-8b", "--seed", "1"},
		"connection refused":                          {"--from", "http://user:secret@127.0.0.1:1", "--base", "h200:llama-8b"},
		"--from h:x: give a node's metrics":           {"--from", "user:secret@h:x", "--base", "h200:llama-8b"},
		"unexpected argument":                         {"builtin", "more"},
	} {
		status, out, errOut := tandem(append([]string{"profile"}, args...)...)
		lines := strings.Split(strings.TrimSpace(errOut), "\n")
		last := lines[len(lines)-1]
		if status != 2 || out != "" || !strings.HasPrefix(last, "tandem profile: ") || !strings.Contains(last, want) || strings.Contains(last, "profiler: ") || strings.Contains(errOut, "secret") {
			t.Errorf("%q: status %d\n%s%s", want, status, out, errOut)
		}
	}
}
