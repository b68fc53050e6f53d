package roles

import (
	"strings"
	"testing"
)

// The command line of the help works as printed, with a smaller load.
func TestPlanPoolsCommand(t *testing.T) {
	args := []string{"plan", "pools", "--profile", "h100:llama-8b", "--load", "rps=20,n=200,in=lognormal(7,0.9),out=43,prefix=0.3", "--ttft", "p90=2s", "--tpot", "p90=50ms", "--api-price", "0.1,0.3"}
	status, out, errOut := tandem(args...)
	if status != 0 || errOut != "" || !strings.HasPrefix(out, "Plan: ") || !strings.Contains(out, "To repeat: tandem plan pools --profile h100:llama-8b --load 'rps=20,n=200,in=lognormal(7,0.9),out=43,prefix=0.3' --ttft p90=2s") || !strings.Contains(out, "next to an API at $0.100") {
		t.Fatalf("status %d\n%s%s", status, out, errOut)
	}
	if status, out, _ := tandem("plan", "--help"); status != 0 || !strings.Contains(out, "\n  pools       Chooses the numbers") || !strings.Contains(out, "--kv-memory") {
		t.Errorf("status %d\n%s", status, out)
	}
	if status, out, _ := tandem("help", "plan", "pools"); status != 0 || !strings.Contains(out, "--price-per-hour") || strings.Contains(out, "--kv-memory") {
		t.Errorf("status %d\n%s", status, out)
	}
}

// A wrong setting ends with status 2 and one line without names of packages.
func TestPlanPoolsRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"--profile is missing":         {"pools"},
		"unexpected argument":          {"pools", "more"},
		"give two":                     {"pools", "--profile", "h100:llama-8b", "--load", "rps=1,in=5,out=5", "--api-price", "1"},
		"nothing.jsonl":                {"pools", "--profile", "h100:llama-8b", "--trace", "nothing.jsonl"},
		"cannot be at most 1ms":        {"pools", "--profile", "h100:llama-8b", "--load", "rps=5,in=50,out=5", "--tpot", "p90=1ms"},
		"memory, pools":                {"pool"},
		"l4:x: give the decode nodes":  {"pools", "--profile", "h100:llama-8b", "--load", "rps=5,in=50,out=5", "--decode-profile", "l4:x"},
		"name the kind of plan":        {},
		"--max-num-seqs: 0 is too few": {"pools", "--max-num-seqs", "0"},
		"--ttft soon: write a per":     {"pools", "--profile", "h100:llama-8b", "--load", "rps=5,in=50,out=5", "--ttft", "soon"},
	} {
		status, out, errOut := tandem(append([]string{"plan"}, args...)...)
		if status != 2 || out != "" || !strings.HasPrefix(errOut, "tandem plan: ") || strings.Count(errOut, "\n") != 1 || !strings.Contains(errOut, want) {
			t.Errorf("%q: status %d\n%s%s", want, status, out, errOut)
		}
	}
}
