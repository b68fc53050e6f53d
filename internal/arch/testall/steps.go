package main

import (
	"slices"
	"time"
)

const module = "github.com/tandem-serving/tandem"

// Bounds of one package's tests.
const (
	packageTimeout     = 10 * time.Minute
	packageTimeoutSoak = 4 * time.Hour
)

// step is a check, or tests of some packages in one mode.
type step struct {
	name, what string
	env        []string
	command    []string // of a check: prints what is wrong
	quiet      bool     // the check fails if it prints anything
	page       bool     // the check writes a page of its own to bench/results

	packages func(all []string) []string // of tests: which, from all of the module
	args     []string                    // more arguments of go test
	each     bool                        // every package must have run a test
	fuzz     bool                        // their fuzz targets, not their tests

	together bool // may run beside neighbours of which this holds, too: nothing in it depends on time

	soak bool // part of a soak
	long bool // part of nothing else, and if no soak has it, run by its name alone
}

// steps are all of `make test`, in order.
var steps = []step{
	{name: "gofmt", what: "formatting", command: []string{"gofmt", "-l", "."}, quiet: true},
	{name: "vet", what: "go vet, which also compiles every test", command: []string{"go", "vet", "./..."}},
	{name: "staticcheck", what: "staticcheck", command: []string{"staticcheck", "./..."}},
	{name: "build-nocgo", what: "the build without a C compiler", env: []string{"CGO_ENABLED=0"}, command: []string{"go", "build", "./..."}},
	{name: "build-arm64", what: "the build for another architecture, kernels included", env: arm64, command: []string{"go", "build", "./..."}},

	{name: "cuda", what: "the kernels for GPUs: machine code without spills, registers within their budgets", command: []string{"go", "run", "./cuda/build", "-q"}},

	{name: "rules", what: "Prometheus' rules: alerts that fire, and that stay quiet", command: []string{"promtool", "test", "rules", "deploy/prometheus/tandem_test.yml"}},
	{name: "prometheus", what: "Prometheus' configuration", command: []string{"promtool", "check", "config", "deploy/prometheus/prometheus.yml"}},

	{name: "fuzz", soak: true, long: true, what: "every fuzz target for a minute", fuzz: true, packages: func(all []string) []string { return all }},
	{name: "race", soak: true, what: "all tests under the race detector", args: []string{"-race", "-skip", "^TestBinary"},
		packages: func(all []string) []string {
			return slices.DeleteFunc(slices.Clone(all), func(p string) bool { return withoutRace[short(p)] != "" })
		}},
	{name: "plain", together: true, soak: true, what: "tests that the race detector would distort", args: []string{"-skip", "^TestBinary"}, each: true,
		packages: func(all []string) []string {
			return slices.DeleteFunc(slices.Clone(all), func(p string) bool { return withoutRace[short(p)] == "" && alsoPlain[short(p)] == "" })
		}},
	{name: "portable", together: true, soak: true, what: "the engine's tests without C kernels", env: []string{"CGO_ENABLED=0"}, each: true,
		packages: func([]string) []string { return []string{module + "/engine/backend/cpu", module + "/engine/model"} }},
	{name: "sanitize", together: true, soak: true, what: "the C kernels under the address and undefined-behaviour sanitizers", each: true,
		env: []string{"CGO_ENABLED=1", "CGO_CFLAGS=-g -O1 -fsanitize=undefined -fno-sanitize-recover=all", "CGO_LDFLAGS=-fsanitize=undefined"},
		// The package's own Go is left as it is: naive references, which would take most of the time.
		args:     []string{"-asan", "-gcflags=-asan=false", "-run", "/^(avx512|avx2|neon|generic)$|^TestQuantized/^(avx512vnni|avxvnni)$", "-skip", distorted},
		packages: func([]string) []string { return []string{module + "/engine/backend/cpu"} }},
	{name: "sanitize-cuda", together: true, soak: true, what: "the kernels for GPUs, on their host twin, under the same sanitizers", each: true,
		// Bits that are equal without sanitizers are equal with them.
		env: []string{"CGO_ENABLED=1", "TANDEM_CUDA_SANITIZE=1", "ASAN_OPTIONS=detect_leaks=0"}, args: []string{"-asan", "-gcflags=-asan=false", "-skip", "Barriers|Deterministic|FusedBits"},
		packages: func([]string) []string { return []string{module + "/engine/backend/cuda"} }},
	{name: "arm64", together: true, what: "the kernels for 64-bit ARM, emulated", env: arm64, each: true,
		args: []string{"-exec", "qemu-aarch64 -L /usr/aarch64-linux-gnu", "-run", "/^(neon|mha|gqa-tied|qwen3-moe|mistral-window)$/^neon$/^random$", "-skip", distorted},
		packages: func([]string) []string {
			return []string{module + "/engine/backend/cpu", module + "/engine/model"}
		}},
	{name: "binary", soak: true, what: "the built binary, end to end", args: []string{"-run", "^TestBinary", "-skip", "^TestBinary(GuideLLM|HostileStopped|HostileLoad|Policies)$"}, each: true,
		packages: func([]string) []string { return []string{module + "/internal/e2e"} }},
	{name: "guidellm", soak: true, long: true, what: "guidellm, which is gigabytes, before nodes and before a server of another kind", each: true,
		args: []string{"-run", "^TestBinaryGuideLLM$"}, packages: func([]string) []string { return []string{module + "/internal/e2e"} }},
	{name: "kills", long: true, what: "500 kills of nodes under streams, without the other tests of the binary; ten minutes are enough", each: true,
		args: []string{"-run", "^TestBinaryKills$"}, packages: func([]string) []string { return []string{module + "/internal/e2e"} }},
	{name: "policies", soak: true, long: true, what: "the default policy beside round robin, where KV memory is scarce", each: true,
		args: []string{"-run", "^TestBinaryPolicies$"}, packages: func([]string) []string { return []string{module + "/internal/e2e"} }},
	{name: "hostile", long: true, what: "the campaign of attacks and faults (TestBinaryHostile*): every case, each next to streams that must not change", each: true,
		args: []string{"-run", "^TestBinaryHostile"}, packages: func([]string) []string { return []string{module + "/internal/e2e"} }},
	{name: "mutants", soak: true, long: true, page: true, what: "320 changes of the deciders' and nodes' source, one at a time, and whether the package's own tests fail; half an hour",
		command: []string{"go", "run", "./internal/arch/mutants", "-record", "bench/results/soak-mutants.md"}},

	{name: "build-race", soak: true, what: "the binary with the race detector inside", command: []string{"go", "build", "-race", "-o", "bin/tandem-race", "."}},
	{name: "binary-race", soak: true, what: "that binary, which ends at its first race", each: true,
		env:      []string{"TANDEM_BINARY=../../bin/tandem-race", "GORACE=halt_on_error=1"},
		args:     []string{"-run", "^TestBinary(FirstToken|OpenAIClient|OpenAIFields|OpenAPI|Accounting|PrefillKilled|DecodeKilled|Drain|Serve)$"},
		packages: func([]string) []string { return []string{module + "/internal/e2e"} }},
}

// arm64 builds for that architecture with Debian's compiler for it.
var arm64 = []string{"CGO_ENABLED=1", "GOOS=linux", "GOARCH=arm64", "CC=aarch64-linux-gnu-gcc"}

// distorted are tests of the kernels that hold under a sanitizer or an emulator
// too, but there say nothing or take minutes.
const distorted = "Allocates|Idle|LinearBits|VariantsAgree|FaultBatchOrder|Portable|TestDraws$"

// withoutRace lists the packages whose tests do not run under the race
// detector, with the reason.
var withoutRace = map[string]string{
	"engine/backend/cuda": "one goroutine; what it calls is C++, which sanitize-cuda looks after",
	"engine/grammar":      "pure, as internal/arch holds: no goroutines, and schemas by the hundred that take 6 times as long",
	"engine/kvcache":      "pure, as internal/arch holds: no goroutines, and simulations that take 5 times as long",
	"engine/model":        "one goroutine, and 14 times as long; what is parallel below it runs in engine/backend/cpu and engine",
	"engine/scheduler":    "pure, as internal/arch holds: no goroutines, and simulations that take 8 times as long",
}

// alsoPlain lists packages that run under the race detector and once more
// without it, with the reason.
var alsoPlain = map[string]string{
	"engine/tokenizer": "texts by the ten thousand for every vocabulary, in one goroutine: 10 times as long under the race detector",
	"internal/e2e":     "runs 300 schedules on each class of numerics, which would take the race detector half an hour",
	"internal/rpc":     "counts allocations, which the race detector adds to",
}
