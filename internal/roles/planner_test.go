package roles

import (
	"strings"
	"testing"
)

// The planner belongs to a gateway of a fleet. Where there is none, its flags are refused by name.
func TestPlannerFlags(t *testing.T) {
	for args, want := range map[string]string{
		"serve builtin --planner-profile h200:llama-8b":                                                               "--planner-profile",
		"gateway --upstream http://127.0.0.1:1 --planner-profile h200:llama-8b":                                       "--planner-profile: a gateway without --tls-dir has no nodes",
		"up --model builtin --planner-profile h200:llama-8b --planner-itl 1ms":                                        "--planner-itl 1ms: a step of h200",
		"up --model builtin --planner-profile nothing.yaml":                                                           "--planner-profile: stat nothing.yaml",
		"up --model builtin --planner-profile h200:llama-8b --planner-max-nodes 8 --planner-ttft 1 --planner-itl 0.1": "",
	} {
		status, _, errOut := tandem(append(strings.Fields(args), "--dry-run")...)
		if want == "" && status != 0 || want != "" && (status != 2 || !strings.Contains(errOut, want)) {
			t.Errorf("%s: status %d, %s, want %q", args, status, errOut, want)
		}
	}
}
