package cuda

import (
	"encoding/binary"
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
ptxas info    : Compiling entry function '_Z4rule5td_op4Step' for 'sm_80'
ptxas info    : Function properties for _Z4rule5td_op4Step
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 632 bytes cmem[0]
code _Z4rule5td_op4Step sm_80 1605 127 -1
code _Z4norm5td_op4Step sm_80 700 30 -1
code _Z4gemvILi1ELi4EEv5td_op4Step sm_90a 900 40 0
`

func TestBudgets(t *testing.T) {
	used := parseUsage(ptxas)
	want := []Usage{
		{Kernel: "gemv<1,4>", Arch: "sm_90a", Registers: 120, Instructions: 900, PerKB: 40}, {Kernel: "norm", Arch: "sm_80", Registers: 32, Instructions: 700, PerKB: 30, Early: -1},
		{Kernel: "rule", Arch: "sm_80", Registers: 64, Instructions: 1605, PerKB: 127, Early: -1},
	}
	if !slices.Equal(used, want) {
		t.Fatalf("read %+v, want %+v", used, want)
	}
	if err := checkBudgets(used); err != nil {
		t.Error(err)
	}
	later := strings.NewReplacer("sm_90a", "sm_120", "_Z4gemvILi1ELi4EEv5td_op4Step", "_Z4gemvILi3ELi4ELi0EEv5td_op4Step", "Used 120", "Used 250")
	if err := checkBudgets(parseUsage(later.Replace(ptxas))); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct{ from, to, complaint string }{
		"registers": {"Used 120", "Used 129", "gemv<1,4> takes 129 registers on sm_90a, its budget is 128"},
		"spills":    {"0 bytes stack frame, 0 bytes spill stores", "8 bytes stack frame, 4 bytes spill stores", "gemv<1,4> has a stack of 8 bytes"},
		"unknown":   {"_Z4norm5td_op4Step' for", "_Z4luck5td_op4Step' for", "luck has no budget"},
		"no wait":   {"900 40 0", "900 40 -1", "gemv<1,4> does not wait for the previous kernel on sm_90a"},
		"early":     {"900 40 0", "900 40 2", "gemv<1,4> accesses global memory 2 times on sm_90a before it waits"},
		"loop":      {" 1605 127", " 1605 173", "rule has 1605 instructions on sm_80, and 173 per KB that a warp reads"},
		"no code":   {"code _Z4rule", "code _Z4role", "rule has 0 instructions"},
		"no answer": {"Used 32", "", "norm takes 0 registers"},
		"nothing":   {ptxas, "", "ptxas reported no kernel"},
		"later":     {ptxas, strings.NewReplacer("sm_90a", "sm_100", "Used 120", "Used 145").Replace(ptxas), "gemv<1,4> takes 145 registers on sm_100, its budget is 144"},
	} {
		err := checkBudgets(parseUsage(strings.Replace(ptxas, c.from, c.to, 1)))
		if !errors.Is(err, ErrBudget) || !strings.Contains(err.Error(), c.complaint) {
			t.Errorf("%s: got %v, want %q", name, err, c.complaint)
		}
	}
}

// Instructions are counted, and those of an inner loop by what they read. Branches are encoded in one
// way from 9.0 on, and in another before.
func TestMeasureCode(t *testing.T) {
	const reads, half, word, four = 0x7981, 2 << 9, 4 << 9, 6 << 9
	loop := func(arch string, loads int, size uint64, body int) []byte {
		var text []byte
		add := func(low, high uint64) {
			text = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(text, low), high)
		}
		jump := func(back int) {
			words := uint64(-4 * back)
			if arch == "sm_80" {
				add(0x7947|words<<34, words>>30&0x3ffff)
			} else {
				add(0x7947|words&0xff<<16|words>>8<<34, words>>38&0x3ffff)
			}
		}
		add(0x7624, 0)
		for range loads {
			add(reads, size)
		}
		for range body {
			add(0x7221, 0)
		}
		jump(loads + body + 1)
		jump(loads + body + 3) // an outer loop
		jump(1)                // what follows a kernel
		add(0x7918, 0)
		return text
	}
	for _, arch := range []string{"sm_80", "sm_90a"} {
		for _, c := range []struct {
			loads    int
			size     uint64
			body     int
			n, perKB int
		}{{8, word, 31, 42, 40}, {2, four, 7, 12, 10}, {16, word, 31, 50, 24}, {16, half, 31, 50, 48}, {7, word, 9, 19, 0}} {
			if n, perKB := measureCode(loop(arch, c.loads, c.size, c.body), arch); n != c.n || perKB != c.perKB {
				t.Errorf("%s, %d loads and %d others: %d instructions, %d per KB, want %d and %d", arch, c.loads, c.body, n, perKB, c.n, c.perKB)
			}
		}
	}
	// Accesses before the wait for the previous kernel are counted, by whatever predicate.
	code := func(ops ...uint64) (text []byte) {
		for _, op := range ops {
			text = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(text, op), 0)
		}
		return text
	}
	for want, text := range map[int][]byte{0: code(0x7624, 0x798f, 0x782e, 0x7981), 3: code(0x7981, 0x7986, 0x2fae, 0x782e, 0x7986), -1: code(0x7981, 0x7986)} {
		if n := earlyAccesses(text); n != want {
			t.Errorf("%d early accesses, want %d", n, want)
		}
	}
	if n, perKB := measureCode(nil, "sm_80"); n != 0 || perKB != 0 {
		t.Errorf("no code has %d instructions, %d per KB", n, perKB)
	}
}
