package cuda

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// budgets are the most registers that a thread of each kernel may use, by the kernel's
// name, with its template arguments where instances differ. A budget is the measured
// number, on the architecture with the higher one, plus some room. A kernel without a
// line fails the build: decide how many of its blocks shall run at once, and add a line.
var budgets = map[string]int{
	"attend_plain": 80,
	// Accumulators of 16 rows take half as many registers as there are columns.
	"attend_split": 168, "attend_split<256>": 184, "attend_split<512>": 184,
	"attend_tiles": 224, "attend_tiles<64>": 152, "attend_tiles<512>": 200, // 2 blocks; of 64 columns 3
	"gemv":        128,                     // of 128 threads: 4 blocks, 16 warps, on a multiprocessor
	"gemv<2,4,0>": 168, "gemv<2,4,1>": 168, // 3 blocks: it widens four-bit numbers for 4 rows
	"gemv<4,4,0>": 168, "gemv<4,4,1>": 168, "gemv<5,4,0>": 168, "gemv<5,4,1>": 168, // as above, of eight and four bits
	"few_mxfp4": 128, "few_int4": 128,
	"gemm": 112, "gemm<1>": 120, // NVRTC 12.9 takes more than nvcc 13.0
	"gemm<3>": 128, "gemm<4>": 128, "gemm<5>": 128, // sums before their scale: still 4 blocks of 128 threads
	"split_sum": 44, "narrow": 32, "spread": 32, "widen": 48,

	"embed": 40, "norm": 40, "norm_whole": 80, "norm_whole<8>": 128, "head_norm": 40, "angles": 40, "rope": 40, "store_kv": 56, "store_kv_fp8": 56, "place": 56, "flat": 40,
	"route": 64, "route_groups": 64, "route_few": 64, "split": 48, "join": 48, "group": 48, "scatter": 40, "combine": 72,
	"shrink": 80, "expand": 72, "delta_mix": 56, "delta": 128, "delta<16>": 168, // 4 blocks; of 512 columns, and from 10.0 on, 3
	"rule": 72, "weigh": 88, "edge": 80, "logprobs": 64, "finish": 16, "write_host": 16, "digest": 56,
}

// laterBudgets are those of architectures from 10.0 on, where they differ by more than an eighth:
// their ptxas keeps more in registers, and some products have fewer blocks (gemv_blocks).
var laterBudgets = map[string]int{
	"gemv<0,4,0>": 168, "gemv<0,4,1>": 168, "gemv<1,4,0>": 168, "gemv<1,4,1>": 168, "gemv<3,4,0>": 255, "gemv<3,4,1>": 255,
	"gemv<3,1,0>": 168, "gemv<3,1,1>": 168, "gemv<4,1,0>": 168, "gemv<4,1,1>": 168, // they have 3 blocks on 12.0, those of int8 by nvcc only
	"shrink": 136, "split_sum": 80, "delta<4>": 168,
}

// loopBudgets are the most instructions that a warp executes for a KB that it reads, as
// measureCode counts them, with the same names and room as budgets.
var loopBudgets = map[string]int{
	"gemv<1,1,0>": 23, "gemv<1,1,1>": 23,
	"gemv": 96, "gemv<4,1,0>": 53, "gemv<2,1,0>": 190, "gemv<2,1,1>": 190, "gemm": 60, "split_sum": 40, "few_mxfp4": 205, "few_int4": 166, "few_int4<0,8>": 206, "few_int4<1,8>": 206,
	"attend_plain": 184, "attend_split": 54, "attend_split<64>": 70, "attend_tiles": 80, "attend_tiles<128>": 118, "attend_tiles<64>": 175,
	"norm": 62, "head_norm": 36, "rope": 116, "store_kv": 148, "store_kv_fp8": 380,
	"route": 40, "route_groups": 145, "route_few": 145, "group": 50, "combine": 42, "shrink": 64, "expand": 72, "delta_mix": 115,
	"rule": 172, "logprobs": 390, "weigh": 390, "edge": 510,
}

// earlyBudgets are the most accesses of global memory that a kernel may have before it waits for
// the previous kernel: of weights, which no kernel writes. Kernels of neverOverlap are not part
// of plans and do not wait.
var (
	earlyBudgets = map[string]int{"norm_whole<1>": 1, "norm_whole<2>": 2, "norm_whole<4>": 4, "norm_whole<8>": 8}
	neverOverlap = []string{"write_host", "digest"}
)

// ErrBudget is wrapped by errors about kernels over budget.
var ErrBudget = errors.New("cuda: a kernel spills, takes more registers or instructions than its budget, or does not wait for the previous one")

// Usage is ptxas's report of a kernel on one architecture, and counts of its machine code.
type Usage struct {
	Kernel, Arch   string
	Registers      int
	Stack, Spilled int // bytes of a thread; spilled ones are written
	Instructions   int
	PerKB          int // instructions of a warp per KB that it reads; 0: no loop reads a KB
	Early          int // accesses of global memory before it waits for the previous kernel; -1: it never waits
}

var (
	entryLine = regexp.MustCompile(`Compiling entry function '(\w+)' for '(\w+)'`)
	stackLine = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers`)
	codeLine  = regexp.MustCompile(`^code (\w+) (sm_\w+) (\d+) (\d+) (-?\d+)$`)
	// A mangled name has each part's length before the part: _Z4gemvILi1ELi4EE...
	mangled = regexp.MustCompile(`^_Z(?:N\d+_GLOBAL__N__\w+?_)?L?(\d+)`)
)

// parseUsage parses the output of ptxas -v, and the lines of codeLines after it.
func parseUsage(log string) []Usage {
	var all []Usage
	for line := range strings.Lines(log) {
		if m := entryLine.FindStringSubmatch(line); m != nil {
			all = append(all, Usage{Kernel: demangle(m[1]), Arch: m[2]})
			continue
		}
		if len(all) == 0 {
			continue
		}
		if m := codeLine.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			for i := range all {
				if u := &all[i]; u.Kernel == demangle(m[1]) && u.Arch == m[2] {
					u.Instructions, _ = strconv.Atoi(m[3])
					u.PerKB, _ = strconv.Atoi(m[4])
					u.Early, _ = strconv.Atoi(m[5])
				}
			}
			continue
		}
		u := &all[len(all)-1]
		if m := stackLine.FindStringSubmatch(line); m != nil && u.Registers == 0 {
			u.Stack, _ = strconv.Atoi(m[1])
			u.Spilled, _ = strconv.Atoi(m[2])
		}
		if m := usedLine.FindStringSubmatch(line); m != nil && u.Registers == 0 {
			u.Registers, _ = strconv.Atoi(m[1])
		}
	}
	return all
}

// demangle returns a function's name without its namespace, and its template arguments.
func demangle(name string) string {
	m := mangled.FindStringSubmatchIndex(name)
	if m == nil {
		return name
	}
	n, err := strconv.Atoi(name[m[2]:m[3]])
	if err != nil || m[3]+n > len(name) {
		return name
	}
	base, rest := name[m[3]:m[3]+n], name[m[3]+n:]
	var numbers []string
	for strings.HasPrefix(rest, "I") || strings.HasPrefix(rest, "L") {
		rest = strings.TrimPrefix(rest, "I")
		value, after, ok := strings.Cut(strings.TrimPrefix(rest, "Li"), "E")
		if !ok || !strings.HasPrefix(rest, "Li") {
			break
		}
		numbers, rest = append(numbers, value), after
	}
	if len(numbers) == 0 {
		return base
	}
	return base + "<" + strings.Join(numbers, ",") + ">"
}

// budgetOf returns the budget of an instance, or else of its kernel; 0: none.
func budgetOf(of map[string]int, kernel string) int {
	if budget, ok := of[kernel]; ok {
		return budget
	}
	name, _, _ := strings.Cut(kernel, "<")
	return of[name]
}

// checkBudgets returns an error that names the kernels over budget.
func checkBudgets(used []Usage) error {
	var bad []string
	if len(used) == 0 {
		bad = append(bad, "ptxas reported no kernel")
	}
	for _, u := range used {
		budget := budgetOf(budgets, u.Kernel)
		if strings.HasPrefix(u.Arch, "sm_1") && budget > 0 {
			budget = max(budget+budget/8, budgetOf(laterBudgets, u.Kernel)) // TD_KERNEL_OF still bounds them
		}
		switch {
		case budget == 0:
			bad = append(bad, fmt.Sprintf("%s has no budget; it takes %d registers on %s", u.Kernel, u.Registers, u.Arch))
		case u.Registers == 0 || u.Registers > budget:
			bad = append(bad, fmt.Sprintf("%s takes %d registers on %s, its budget is %d", u.Kernel, u.Registers, u.Arch, budget))
		}
		if most := budgetOf(loopBudgets, u.Kernel); u.Instructions == 0 || u.PerKB > most {
			bad = append(bad, fmt.Sprintf("%s has %d instructions on %s, and %d per KB that a warp reads; its budget of these is %d", u.Kernel, u.Instructions, u.Arch, u.PerKB, most))
		}
		switch most := budgetOf(earlyBudgets, u.Kernel); {
		case strings.HasPrefix(u.Arch, "sm_8") || slices.Contains(neverOverlap, u.Kernel): // kernels do not overlap before 9.0
		case u.Early < 0:
			bad = append(bad, fmt.Sprintf("%s does not wait for the previous kernel on %s; wait_previous must be its first call", u.Kernel, u.Arch))
		case u.Early > most:
			bad = append(bad, fmt.Sprintf("%s accesses global memory %d times on %s before it waits for the previous kernel; at most %d, of weights, are allowed", u.Kernel, u.Early, u.Arch, most))
		}
		if u.Stack > 0 || u.Spilled > 0 {
			bad = append(bad, fmt.Sprintf("%s has a stack of %d bytes on %s, %d of them spilled registers", u.Kernel, u.Stack, u.Arch, u.Spilled))
		}
	}
	if len(bad) == 0 {
		return nil
	}
	slices.Sort(bad)
	return fmt.Errorf("%w:\n%s", ErrBudget, strings.Join(bad, "\n"))
}
