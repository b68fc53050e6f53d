package cuda

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

const ptxas = `ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemvILi1ELi4EEv5td_op4Step' for 'sm_90a'
ptxas info    : Function properties for _Z4gemvILi1ELi4EEv5td_op4Step
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 120 registers, used 0 barriers
ptxas info    : Compile time = 47.520 ms
ptxas info    : Compiling entry function '_Z4norm5td_op4Step' for 'sm_80'
ptxas info    : Function properties for _Z4norm5td_op4Step
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 632 bytes cmem[0]
`

func TestBudgets(t *testing.T) {
	used := parseUsage(ptxas)
	want := []Usage{{Kernel: "gemv<1,4>", Arch: "sm_90a", Registers: 120}, {Kernel: "norm", Arch: "sm_80", Registers: 32}}
	if !slices.Equal(used, want) {
		t.Fatalf("read %+v, want %+v", used, want)
	}
	if err := checkBudgets(used); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct{ from, to, complaint string }{
		"registers": {"Used 120", "Used 129", "gemv<1,4> takes 129 registers on sm_90a, its budget is 128"},
		"spills":    {"0 bytes stack frame, 0 bytes spill stores", "8 bytes stack frame, 4 bytes spill stores", "gemv<1,4> has a stack of 8 bytes"},
		"unknown":   {"_Z4norm5td_op4Step' for", "_Z4luck5td_op4Step' for", "luck has no budget"},
		"no answer": {"Used 32", "", "norm takes 0 registers"},
		"nothing":   {ptxas, "", "ptxas reported no kernel"},
	} {
		err := checkBudgets(parseUsage(strings.Replace(ptxas, c.from, c.to, 1)))
		if !errors.Is(err, ErrBudget) || !strings.Contains(err.Error(), c.complaint) {
			t.Errorf("%s: got %v, want %q", name, err, c.complaint)
		}
	}
}
