//go:build linux

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Numbers and types that vllm serve takes are taken as it means them.
func TestBinaryNumbersOfVLLM(t *testing.T) {
	for args, want := range map[string]string{
		"--max-model-len 2k":          "max-model-len: 2000 ",
		"--max-model-len 2K":          "max-model-len: 2048 ",
		"--max-model-len auto":        "max-model-len: 0 ",
		"--max-model-len -1":          "max-model-len: 0 ",
		"--max-model-len=-1":          "max-model-len: 0 ",
		"--max_num_batched_tokens 8k": "max-num-batched-tokens: 8000 ",
		"--dtype auto":                `dtype: "auto" `,
	} {
		out, errOut, err := tandem(t, nil, append([]string{"serve", "--dry-run"}, strings.Fields(args)...)...)
		if err != nil || errOut != "" || !strings.Contains(out, "\n"+want) {
			t.Errorf("%s: %v, %q, no %q", args, err, errOut, want)
		}
	}
	const model = "../../engine/model/testdata/"
	logits := func(folder, dtype string) []string {
		return []string{"logits", model + folder, "--tokens", "1,2", "--dtype", dtype}
	}
	for _, c := range [][2]string{{"gemma3", "bfloat16"}, {"gemma3", "auto"}, {"deepseek-plain", "float32"}, {"deepseek-plain", "float"}} {
		if _, errOut, err := tandem(t, nil, logits(c[0], c[1])...); err != nil || errOut != "" {
			t.Errorf("--dtype %s of %s: %v, %q", c[1], c[0], err, errOut)
		}
	}
	refusedStart(t, "another type", 2, []string{"--dtype half", "stored as bfloat16", "leave --dtype out"}, logits("gemma3", "half")...)
	refusedStart(t, "no type", 2, []string{"--dtype fp4", "want auto, float32, float16 or bfloat16"}, logits("gemma3", "fp4")...)
	file := filepath.Join(t.TempDir(), "gw.yaml")
	if err := os.WriteFile(file, []byte("max-n: 2\nport: 1\nmax_n: 4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	refusedStart(t, "a key twice", 2, []string{"gw.yaml:3: max_n is set on line 1 already"}, "gateway", "--config", file)
}
