package arch

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// parsers lists every package that reads what comes from the network or from a
// user's file, and the fuzz targets that hold it to its promises.
var parsers = map[string][]string{
	"bench":                  {"FuzzReadSample"},                                                                     // servers' metrics
	"bench/dataset":          {"FuzzFiles"},                                                                          // datasets and traces
	"bench/sim":              {"FuzzLine"},                                                                           // lines of traces
	"bench/sim/profile":      {"FuzzRead"},                                                                           // profiles
	"bench/load":             {"FuzzEvents"},                                                                         // a server's stream of events
	"engine/backend/cpu":     {"FuzzSamplers", "FuzzDraws"},                                                          // no bytes of others: logits of all bits, for C kernels that index by them
	"engine/grammar":         {"FuzzSchema", "FuzzRegex", "FuzzChoice", "FuzzEBNF", "FuzzLark", "FuzzStructuralTag"}, // grammars of requests
	"engine/model":           {"FuzzConfig", "FuzzBundle", "FuzzAdapterConfig"},                                      // config.json and the files beside the weights; adapters
	"engine/gguf":            {"FuzzParse"},                                                                          // metadata and weights of llama.cpp's files
	"engine/safetensors":     {"FuzzParse", "FuzzIndex"},                                                             // weights and their index
	"engine/tokenizer":       {"FuzzLoad", "FuzzEncode", "FuzzOtherFormats"},                                         // tokenizer.json; prompts; tekken.json, tokenizer.model, tiktoken.model
	"gateway/api/responses":  {"FuzzChat"},                                                                           // bodies of requests
	"gateway/proxy/upstream": {"FuzzAnswer", "FuzzEnvelope"},                                                         // upstreams' answers; bodies of requests
	"gateway/render":         {"FuzzFromJSON"},                                                                       // messages, tools
	"gateway/render/parse":   {"FuzzParser"},                                                                         // answers of models
	"gateway/render/jinja":   {"FuzzParse"},                                                                          // chat templates
	"internal/cluster":       {"FuzzDecodeMember", "FuzzDecodeEvent"},                                                // gossip; NATS
	"internal/roles":         {"FuzzResolve"},                                                                        // arguments, environment, YAML
	"internal/hub":           {"FuzzListing"},                                                                        // listings of a hub
	"internal/console":       {"FuzzReadStream", "FuzzMarkdown"},                                                     // what a gateway answers; what a model writes
	"internal/explainlog":    {"FuzzAdd"},                                                                            // logs of any program
	"internal/jsonscan":      {"FuzzSkip"},                                                                           // JSON of requests and of what they carry
	"gateway/api/messages":   {"FuzzChat"},                                                                           // bodies of Anthropic's API
	"gateway/api/openai":     {"FuzzParse"},                                                                          // bodies of requests
	"internal/process":       {"FuzzMemoryLimit"},                                                                    // /proc and cgroups
	"internal/rpc":           {"FuzzMessages", "FuzzDecodeTokens", "FuzzFrameReader"},                                // frames between nodes
	"internal/tlsconf":       {"FuzzRead"},                                                                           // certificates, keys, secrets
	"kvtransfer":             {"FuzzGrant", "FuzzMessages"},                                                          // grants and the frames of KV
	"prefill/line":           {"FuzzLine"},                                                                           // no bytes of others: calls in any order
}

// parsed are packages that decode with a library or by what another package of
// the table has read, and why they need no target of their own.
var parsed = map[string]string{
	"internal/batch":         "lines of files that its user gives, and a gateway's answers, by encoding/json into plain fields",
	"engine/quantize":        "numbers of tensors, whose bytes engine/safetensors has checked against their shapes",
	"gateway/proxy/discover": "Kubernetes' API, by encoding/json into plain fields",
	"internal/kubernetes":    "the message of an error of Kubernetes' API, by encoding/json into a plain field",
	"gateway":                "an adapter's name and folder, which internal/jsonscan has checked, by encoding/json into plain fields",
	"bench/truth":            "requests of load testers, by encoding/json into plain fields; guidellm's report likewise",
	"bench/engine":           "what llama.cpp prints and its own results, by encoding/json into plain fields",
	"bench/grammar":          "maskbench's files, a vocabulary that its user gives and the answers of a program that it starts, by encoding/json into plain fields",
	"bench/gateway":          "its own client's requests and results, what peers on this machine answer, /proc",
	"bench/sim/simulate":     "a result of bench serve that its user gives, by encoding/json into plain fields",
	"bench/sim/proof":        "a plan of tandem plan pools, which it has just made, by encoding/json into plain fields",
	"bench/native":           "protobuf messages, by the generated code that internal/rpc's targets run",
	"bench/transfer":         "lines of its other side, by encoding/json into plain fields; the grants in them kvtransfer's targets read",
	"bench/report":           "its own reports, by encoding/json into plain fields",
	"deploy/test/checks":     "the output of go test, by encoding/json into plain fields",
	"deploy/test/crds":       "the output of go mod download, by encoding/json into plain fields",
	"deploy/test/kube":       "questions of DNS, by golang.org/x/net, and what it wrote itself, by encoding/json into plain fields",
	"decode":                 "protobuf messages, by the generated code that internal/rpc's targets run",
	"prefill":                "protobuf messages, by the generated code that internal/rpc's targets run",
	"cuda":                   "objects of the compiler that it has just run",
	"engine/kvcache":         "digests that it has made itself",
	"engine/backend/cuda":    "matrices, whose number of bytes Load holds against their shape before it reads them",
	"engine/workers":         "messages and steps of its own other processes, which it started and shares memory with",
	"internal/config":        "arguments, environment and YAML, which the target of internal/roles passes to it",
	"internal/cli":           "lines of logs, which it only splits at newlines; internal/explainlog's target reads them; a Secret, by encoding/json into plain fields",
	"internal/launch":        "lines of its own children, which it passes on as they are",
	"internal/arch/mutants":  "the tree's own sources, by go/parser, a list of the tree, by lines, and what it wrote itself",
	"internal/arch/verdict":  "the output of go test, by gotestsum into plain fields",
	"bench/kvtransfer":       "what the programs it runs print, by encoding/json into plain fields",
	"bench/checkpoint/write": "a vocabulary of the test environment, by encoding/json into plain fields",
	"bench/links":            "what iperf3 prints, by encoding/json into plain fields",
}

// decoding finds code that takes bytes apart.
var decoding = regexp.MustCompile(`\b(json|yaml|proto)\.Unmarshal\(|json\.NewDecoder\(|(Big|Little)Endian\.Uint|pem\.Decode\(|bufio\.New(Scanner|Reader)`)

// fuzzTargets are the fuzz functions of a test file that have seeds.
func fuzzTargets(t *testing.T, f *file) (names []string) {
	p, err := parser.ParseFile(token.NewFileSet(), f.path, f.text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range p.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "Fuzz") {
			continue
		}
		seeded := false
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			seeded = seeded || ok && s.Sel.Name == "Add"
			return true
		})
		if seeded {
			names = append(names, fn.Name.Name)
		}
	}
	return names
}

func TestEveryParserIsFuzzed(t *testing.T) {
	have, decodes := map[string][]string{}, map[string]string{}
	for _, f := range goFiles(t) {
		if f.test() {
			if bytes.Contains(f.text, []byte("\nfunc Fuzz")) {
				have[f.pkg] = append(have[f.pkg], fuzzTargets(t, f)...)
			}
		} else if !f.generated() && decoding.Match(f.text) {
			decodes[f.pkg] = f.path
		}
	}
	for pkg, targets := range parsers {
		for _, name := range targets {
			if !slices.Contains(have[pkg], name) {
				t.Errorf("%s has no fuzz target %s with seeds", pkg, name)
			}
		}
	}
	for pkg, targets := range have {
		for _, name := range targets {
			if !slices.Contains(parsers[pkg], name) {
				t.Errorf("%s: %s is not in the table of parsers", pkg, name)
			}
		}
	}
	for pkg, path := range decodes {
		if parsers[pkg] == nil && parsed[pkg] == "" {
			t.Errorf("%s takes bytes apart, and %s has neither a fuzz target in the table of parsers nor a reason to need none", path, pkg)
		}
	}
	if len(decodes) < 10 {
		t.Errorf("only %d packages seem to decode anything", len(decodes))
	}
}
