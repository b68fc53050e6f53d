package arch

import (
	"fmt"
	"go/parser"
	"go/token"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// mayImport says for each package which others of this module its code (not its
// tests) may import. Imports go down only: internal/roles imports every role, roles meet in
// internal/rpc and never import each other, and what decides knows nothing of
// what moves bytes. "." is main. A package that is not here fails the test: give
// it a line, and think about which way it looks.
var mayImport = map[string][]string{
	".": {"internal/roles"},
	"internal/roles": { // the subcommands, which know every role
		"bench", "bench/dataset", "bench/load", "bench/profiler", "bench/report", "bench/sim", "bench/sim/fleet", "bench/sim/profile", "bench/sim/simulate", "deploy/planner/control", "deploy/planner/pools",
		"gateway", "gateway/proxy", "gateway/proxy/upstream", "gateway/proxy/discover", "gateway/route", "gateway/native/nodes", "prefill", "decode", "engine", "engine/kvcache", "engine/memory", "engine/scheduler", "kvtransfer", "kvtransfer/fabric",
		"internal/batch", "internal/cluster", "internal/cli", "internal/config", "internal/console", "internal/kubernetes", "internal/launch", "internal/lengths", "internal/limits", "internal/obs/logs", "internal/obs/metrics",
		"internal/process", "internal/regular", "internal/rpc", "internal/rpc/nodepb", "internal/tlsconf", "internal/obs/trace",
	},

	// The stages of a request: exchange knows no backend, backends know no other.
	"gateway": {
		"deploy/planner/control", "gateway/admit", "gateway/api/messages", "gateway/api/openai", "gateway/api/responses", "gateway/auth", "gateway/exchange", "gateway/httpserver", "gateway/liveness", "gateway/native", "gateway/native/nodes", "gateway/proxy", "gateway/proxy/upstream",
		"gateway/render", "gateway/render/jinja", "gateway/render/parse", "gateway/route", "internal/cluster", "internal/jsonscan", "internal/limits", "internal/netio", "internal/obs/logs", "internal/obs/metrics", "internal/obs/trace", "internal/regular", "internal/rpc", "internal/rpc/nodepb",
	},
	"gateway/native": {
		"engine/grammar", "engine/kvcache", "gateway/admit", "gateway/api/openai", "gateway/exchange", "gateway/exchange/choice", "gateway/httpserver", "gateway/native/nodes", "gateway/render", "gateway/render/parse", "gateway/render/parse/args", "gateway/route",
		"internal/cluster", "internal/obs/metrics", "internal/obs/trace", "internal/rpc/nodepb",
	},
	"gateway/admit":                       {},
	"gateway/auth":                        {"gateway/admit", "internal/obs/metrics", "internal/regular"},
	"gateway/exchange":                    {"engine/kvcache", "gateway/admit", "gateway/api/openai", "gateway/auth", "gateway/exchange/choice", "gateway/httpserver", "gateway/route", "internal/limits", "internal/obs/metrics", "internal/obs/trace"},
	"gateway/exchange/choice":             {},
	"gateway/proxy":                       {"engine/kvcache", "gateway/admit", "gateway/api/openai", "gateway/auth", "gateway/exchange", "gateway/exchange/choice", "gateway/httpserver", "gateway/proxy/upstream", "gateway/render", "gateway/route", "internal/obs/metrics", "internal/obs/trace", "internal/rpc/nodepb", "internal/sock"},
	"gateway/proxy/upstream":              {"gateway/route", "internal/breaker", "internal/jsonscan", "internal/sock"},
	"gateway/proxy/discover":              {"gateway/proxy/upstream", "internal/kubernetes"},
	"gateway/proxy/discover/discovertest": {}, // an API for tests
	"gateway/httpserver":                  {"internal/limits", "internal/obs/metrics", "internal/sock"},
	"gateway/liveness":                    {},
	"gateway/render":                      {"engine/grammar", "engine/kvcache", "engine/tokenizer", "gateway/api/openai", "gateway/render/jinja", "gateway/render/parse", "gateway/render/parse/args", "gateway/route", "internal/jsonscan", "internal/rpc/nodepb"},
	"gateway/render/jinja":                {},
	"gateway/render/parse":                {"gateway/render/parse/args", "internal/jsonscan"},
	"gateway/render/parse/args":           {"internal/jsonscan"},
	"gateway/route":                       {"engine/kvcache", "internal/lengths"},
	"gateway/native/nodes":                {"gateway/liveness", "gateway/route", "engine/kvcache", "internal/breaker", "internal/cluster", "internal/lengths", "internal/obs/metrics", "internal/rpc", "internal/rpc/nodepb"},
	"gateway/native/nodes/nodestest":      {"internal/rpc", "internal/rpc/nodepb"}, // a decode node for tests

	"prefill":       {"prefill/line", "engine", "engine/kvcache", "engine/scheduler", "kvtransfer", "internal/node", "internal/rpc", "internal/rpc/nodepb", "internal/obs/trace"},
	"prefill/line":  {"engine/scheduler", "internal/lengths"}, // and what a scheduler is ordered by
	"decode/course": {},
	"decode":        {"decode/course", "engine", "engine/kvcache", "engine/scheduler", "kvtransfer", "internal/breaker", "internal/cluster", "internal/node", "internal/rpc", "internal/rpc/nodepb", "internal/obs/trace"},

	"deploy/planner/control": {},
	"deploy/release":         {}, // a module of its own
	"deploy/test/checks":     {}, // in a module of its own, as are the next
	"deploy/test/crds":       {},
	"deploy/test/kube":       {"deploy/test/crds"},

	"cuda":       {},
	"cuda/build": {"cuda"},

	"bench":                  {"bench/dataset", "bench/load", "bench/native", "bench/report", "engine/builtin", "engine/kvcache", "engine/tokenizer", "internal/rpc/nodepb", "internal/tlsconf"},
	"bench/dataset":          {},
	"bench/checkpoint":       {},
	"bench/checkpoint/write": {"bench/checkpoint"},
	"bench/demo":             {"bench", "bench/checkpoint", "bench/report", "bench/sim", "bench/sim/fleet", "engine/kvcache", "gateway/route", "internal/launch"},
	"bench/engine":           {"bench/checkpoint", "engine/backend", "engine/backend/cpu", "engine/memory", "engine/model"},
	"bench/grammar":          {"engine/grammar"},
	"bench/kvtransfer":       {"bench/report"},
	"bench/gateway":          {"bench/report", "engine/builtin", "internal/cluster", "internal/rpc", "internal/rpc/nodepb", "internal/tlsconf"},
	"bench/links":            {"bench/report", "internal/netlab", "kvtransfer"},
	"bench/load":             {},
	"bench/profiler":         {"bench/report", "bench/sim/profile", "engine", "engine/kvcache", "engine/scheduler"},
	"bench/report":           {"bench/load"},
	"bench/native":           {"bench/load", "internal/rpc", "internal/rpc/nodepb"},
	"bench/offline":          {"bench/dataset", "bench/report", "engine", "engine/kvcache", "engine/tokenizer"},
	"bench/sim":              {"bench/load", "gateway/route", "engine/kvcache", "internal/regular"},
	"bench/sim/fleet":        {"bench/sim", "bench/sim/profile", "gateway/admit", "gateway/exchange/choice", "gateway/route", "prefill/line", "decode/course", "engine/kvcache", "engine/scheduler", "internal/limits"},
	"bench/sim/profile":      {"engine/scheduler", "internal/regular"},
	"bench/sim/proof": { // a twin of main whose nodes sleep
		"bench", "bench/checkpoint", "bench/load", "bench/profiler", "bench/report", "bench/sim", "bench/sim/fleet", "bench/sim/profile", "bench/sim/prove", "bench/sim/simulate", "bench/sim/sleep", "deploy/planner/pools",
		"engine", "gateway/route", "internal/cost", "internal/launch", "internal/limits", "internal/roles",
	},
	"bench/sim/prove":      {"bench/load", "bench/report", "bench/sim", "bench/sim/fleet", "engine/kvcache", "gateway/route"},
	"bench/sim/simulate":   {"bench/load", "bench/report", "bench/sim", "bench/sim/fleet", "bench/sim/profile", "gateway/route", "internal/lengths", "internal/limits", "internal/regular"},
	"bench/sim/sleep":      {"bench/sim/profile", "engine/backend"},
	"deploy/planner":       {},
	"deploy/planner/pools": {"bench/report", "bench/sim", "bench/sim/fleet", "bench/sim/profile", "bench/sim/simulate", "deploy/planner", "engine/kvcache", "internal/cost", "internal/limits"},
	"bench/sim/replay":     {"bench/sim", "bench/sim/fleet", "gateway/route"},
	"bench/sim/speed":      {"bench/sim", "bench/sim/fleet", "engine/kvcache"},
	"bench/transfer":       {"bench/load", "bench/report", "kvtransfer", "kvtransfer/fabric"},
	"bench/truth":          {"bench", "bench/load", "bench/report", "engine/builtin"},

	"kvtransfer":        {"kvtransfer/crc32c", "kvtransfer/fabric", "kvtransfer/lease"},
	"kvtransfer/crc32c": {},
	"kvtransfer/fabric": {},
	"kvtransfer/lease":  {},

	"engine": {
		"engine/backend", "engine/backend/cpu", "engine/backend/cuda", "engine/builtin", "engine/kvcache", "engine/memory", "engine/model",
		"engine/draft", "engine/grammar", "engine/masks", "engine/ngram", "engine/workers", "engine/sample", "engine/scheduler", "internal/regular",
	},
	"engine/draft":               {"engine/backend", "engine/kvcache", "engine/sample"},
	"engine/workers":             {"engine/backend"},
	"engine/ngram":               {},
	"engine/quantize":            {"engine/backend", "engine/backend/cpu", "engine/memory", "engine/model", "engine/safetensors", "engine/sample", "engine/tokenizer"},
	"engine/scheduler":           {"engine/kvcache"},
	"engine/grammar":             {},
	"engine/grammar/grammartest": {}, // hostile schemas for tests
	"engine/masks":               {"engine/grammar", "engine/tokenizer"},
	"engine/kvcache":             {},
	"engine/memory":              {"engine/backend", "engine/kvcache"}, // the shape of a model's KV, and its groups
	"engine/gguf":                {"engine/backend"},
	"engine/model":               {"engine/backend", "engine/gguf", "engine/safetensors", "engine/tokenizer", "internal/regular"},
	"engine/backend":             {"engine/sample"}, // sampling is an op
	"engine/backend/cpu":         {"engine/backend", "engine/backend/cpu/kernels", "engine/sample"},
	"engine/backend/cpu/kernels": {}, // C
	"engine/backend/cuda":        {"engine/backend", "engine/sample"},
	"engine/builtin":             {},
	"engine/safetensors":         {"internal/regular"},
	"engine/sample":              {},
	"engine/tokenizer":           {},

	"internal/batch":           {},                                 // files of requests
	"internal/breaker":         {},                                 // calls to peers that failed
	"internal/cluster":         {"internal/rpc", "engine/kvcache"}, // its in-memory network; block events
	"internal/cost":            {},                                 // prices of tokens
	"internal/cli":             {"docs", "internal/doctor", "internal/explainlog", "engine/backend/cuda", "kvtransfer", "kvtransfer/fabric", "bench", "bench/dataset", "bench/load", "bench/offline", "bench/profiler", "bench/sim/profile", "bench/transfer", "bench/truth", "engine", "engine/backend/cpu", "engine/memory", "engine/quantize", "internal/config", "internal/console", "internal/hub", "internal/kubernetes", "internal/obs/logs", "internal/process", "internal/regular", "internal/rpc", "internal/tlsconf"},
	"docs":                     {}, // pages that the program reads
	"internal/doctor":          {"internal/console", "internal/tlsconf"},
	"internal/explainlog":      {"engine/backend", "engine/memory"}, // which plans KV memory
	"internal/config":          {"internal/limits", "internal/regular"},
	"internal/console":         {"internal/regular"},
	"internal/hub":             {"internal/regular"}, // downloads models
	"internal/hub/hubtest":     {},                   // a hub for tests
	"internal/e2e":             {},
	"internal/e2e/clients":     {},
	"internal/arch":            {},
	"internal/arch/mutants":    {"internal/arch/provenance"},
	"internal/arch/provenance": {}, // of pages
	"internal/arch/verdict":    {"internal/arch/provenance"},
	"internal/kubernetes":      {"internal/regular"}, // requests to its API
	"internal/launch":          {"internal/console", "internal/process", "internal/tlsconf"},
	"internal/obs/logs":        {},
	"internal/obs/metrics":     {"internal/obs/logs", "internal/netio"},
	"internal/netlab":          {}, // networks for tests and benchmarks
	"internal/netio":           {},
	"internal/node":            {"engine", "engine/kvcache", "engine/scheduler", "internal/rpc", "internal/rpc/nodepb"}, // what prefill and decode share
	"internal/jsonscan":        {},                                                                                      // JSON without a tree
	"gateway/api/messages":     {"gateway/api/openai", "internal/jsonscan"},
	"gateway/api/openai":       {"engine/grammar", "internal/jsonscan"},
	"gateway/api/responses":    {"gateway/api/openai", "internal/jsonscan"},
	"internal/process":         {"internal/obs/logs", "internal/tlsconf"},
	"internal/sock":            {},
	"internal/rpc":             {"internal/netio", "internal/rpc/nodepb", "internal/sock", "internal/tlsconf"},
	"internal/rpc/nodepb":      {},
	"internal/lengths":         {},
	"internal/limits":          {}, // settings and their defaults
	"internal/regular":         {},
	"internal/tlsconf":         {"internal/regular"},
	"internal/obs/trace":       {"internal/rpc/nodepb", "internal/tlsconf"},
}

// roles are what main puts together; rules below keep them apart.
var roles = []string{"gateway", "prefill", "decode"}

// pure are the deciders: plain state machines (see purity_test.go).
var pure = []string{"deploy/planner", "internal/cost", "internal/explainlog", "internal/lengths", "gateway/admit", "gateway/exchange/choice", "gateway/liveness", "gateway/render/parse", "gateway/render/parse/args", "engine/grammar", "engine/scheduler", "engine/kvcache", "engine/memory", "gateway/route", "kvtransfer/lease", "prefill/line", "decode/course", "deploy/planner/control"}

// badImports holds the imports of the files against a table and returns what
// breaks it, one line each.
func badImports(files []*file, table map[string][]string) []string {
	var bad []string
	for _, f := range files {
		if f.test() {
			continue
		}
		allowed, known := table[f.pkg]
		if !known {
			bad = append(bad, fmt.Sprintf("%s: package %s is not in the table of imports", f.path, f.pkg))
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), f.path, f.text, parser.ImportsOnly)
		if err != nil {
			bad = append(bad, err.Error())
			continue
		}
		for _, i := range parsed.Imports {
			path, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				bad = append(bad, err.Error())
				continue
			}
			to, inside := strings.CutPrefix(path, module+"/")
			if path == module {
				to, inside = ".", true
			}
			if inside && !slices.Contains(allowed, to) {
				bad = append(bad, fmt.Sprintf("%s: %s may not import %s", f.path, f.pkg, to))
			}
		}
	}
	return bad
}

// reaches returns all packages below one, by the table.
func reaches(table map[string][]string, from string) map[string]bool {
	seen := map[string]bool{}
	var walk func(string)
	walk = func(p string) {
		for _, to := range table[p] {
			if !seen[to] {
				seen[to] = true
				walk(to)
			}
		}
	}
	walk(from)
	return seen
}

// badTable holds a table itself against the rules that it must not lose as
// lines are added.
func badTable(table map[string][]string) []string {
	var bad []string
	say := func(format string, args ...any) { bad = append(bad, fmt.Sprintf(format, args...)) }
	roleOf := func(p string) string { top, _, _ := strings.Cut(p, "/"); return top }
	for _, p := range slices.Sorted(maps.Keys(table)) {
		below := reaches(table, p)
		if below[p] {
			say("%s reaches itself", p)
		}
		for _, to := range slices.Sorted(maps.Keys(below)) {
			switch {
			case table[to] == nil:
				say("%s may import %s, which has no line", p, to)
			case to == ".":
				say("%s may import main", p)
			case to == "bench/sim/sleep" && p != "bench/sim/proof":
				say("%s may import %s: nodes that compute nothing are for proofs only", p, to)
			case p == "." || p == "internal/roles" || p == "bench/sim/proof": // the program itself, and its twin for proofs
			case to == "internal/roles":
				say("%s may import %s, which only main knows", p, to)
			case (to == "internal/config" || to == "internal/cli") && p != "internal/cli":
				say("%s may import %s, which only internal/roles knows", p, to)
			case to == "internal/hub" && p != "internal/cli":
				say("%s may import %s: only commands download", p, to)
			case slices.Contains(roles, roleOf(to)) && roleOf(p) != roleOf(to) && !((strings.HasPrefix(p, "bench/sim") || p == "bench/demo" || p == "deploy/planner/pools") && slices.Contains(pure, to)): // which run the real deciders
				say("%s may import %s, which belongs to a role", p, to)
			case roleOf(to) == "kvtransfer" && !slices.Contains([]string{"prefill", "decode", "kvtransfer"}, roleOf(p)) && !slices.Contains([]string{"bench/transfer", "bench/links", "internal/cli"}, p): // which measure it
				say("%s may import %s: only nodes move KV", p, to)
			case roleOf(p) == "engine" && roleOf(to) != "engine" && to != "internal/regular": // which opens files
				say("%s may import %s: the engine knows nothing of the fleet", p, to)
			case slices.Contains(pure, p) && !slices.Contains(pure, to) && to != "engine/backend" && to != "engine/sample" && to != "internal/jsonscan": // which only compute
				say("%s is pure and may import %s, which is not", p, to)
			}
		}
	}
	return bad
}

func TestImports(t *testing.T) {
	files := goFiles(t)
	for _, b := range badImports(files, mayImport) {
		t.Error(b)
	}
	for _, b := range badTable(mayImport) {
		t.Error(b)
	}
	for p := range mayImport {
		if !slices.ContainsFunc(files, func(f *file) bool { return f.pkg == p }) {
			t.Errorf("the table of imports has a line for %s, which does not exist", p)
		}
	}
}

// The checks above see what they are there to see.
func TestImportsSeeFaults(t *testing.T) {
	source := func(path, imports string) *file {
		pkg := path[:strings.LastIndexByte(path, '/')]
		return &file{path: path, pkg: pkg, text: []byte("package x\n" + imports)}
	}
	const inside = `import _ "` + module + "/"
	for name, c := range map[string]struct {
		file *file
		want string // part of the only complaint; empty: none
	}{
		"allowed":             {source("engine/scheduler/a.go", inside+`engine/kvcache"`), ""},
		"standard library":    {source("engine/scheduler/a.go", `import "time"`), ""},
		"a test":              {source("engine/scheduler/a_test.go", inside+`decode"`), ""},
		"role imports role":   {source("gateway/a.go", inside+`decode"`), "gateway may not import decode"},
		"up":                  {source("engine/kvcache/a.go", inside+`engine/scheduler"`), "engine/kvcache may not import engine/scheduler"},
		"config beside main":  {source("decode/a.go", inside+`internal/config"`), "decode may not import internal/config"},
		"renamed":             {source("prefill/a.go", `import d "`+module+`/decode"`), "prefill may not import decode"},
		"main":                {source("internal/e2e/a.go", `import _ "`+module+`"`), "may not import ."},
		"other system's file": {source("engine/memory/a_windows.go", inside+`engine"`), "engine/memory may not import engine"},
		"unknown package":     {source("gateway/luck/a.go", `import "fmt"`), "gateway/luck is not in the table"},
		"no Go":               {source("gateway/a.go", "import"), "missing import path"},
	} {
		bad := badImports([]*file{c.file}, mayImport)
		if c.want == "" && len(bad) != 0 || c.want != "" && (len(bad) != 1 || !strings.Contains(bad[0], c.want)) {
			t.Errorf("%s: got %q, want %q", name, bad, c.want)
		}
	}
	for _, c := range []struct{ from, to, want string }{
		{"prefill", "decode", "prefill may import decode, which belongs to a role"},
		{"gateway/route", "gateway/native/nodes", "gateway/route is pure"},
		{"internal/rpc", "gateway/render", "which belongs to a role"},
		{"gateway", "internal/config", "which only internal/roles knows"},
		{"bench", "internal/roles", "which only main knows"},
		{"internal/roles", "bench/sim/sleep", "nodes that compute nothing are for proofs only"},
		{"gateway/native/nodes", "kvtransfer", "only nodes move KV"},
		{"engine", "internal/rpc", "knows nothing of the fleet"},
		{"gateway", "internal/hub", "only commands download"},
		{"engine/kvcache", "engine/scheduler", "engine/kvcache reaches itself"},
		{"kvtransfer/lease", "kvtransfer", "kvtransfer/lease is pure"},
		{"internal/obs/logs", ".", "internal/obs/logs may import main"},
		{"internal/obs/logs", "internal/luck", "which has no line"},
	} {
		table := maps.Clone(mayImport)
		table[c.from] = append(slices.Clone(table[c.from]), c.to)
		if bad := badTable(table); !strings.Contains(strings.Join(bad, "\n"), c.want) {
			t.Errorf("%s → %s: got %q, want %q", c.from, c.to, bad, c.want)
		}
	}
}
