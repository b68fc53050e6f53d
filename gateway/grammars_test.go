package gateway

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// constraining returns a node that has grammars of a version.
func constraining(addr string, version uint32) nodestest.Options {
	return nodestest.Options{Hello: &nodepb.Hello{NodeId: addr, Role: "decode", Fingerprint: 7, Grammar: version}}
}

const people = `{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},"required":["name","age"]}`

// Constrained requests go only to nodes with this gateway's grammars, as the client wrote them, and
// the others to all nodes.
func TestConstrainedRequests(t *testing.T) {
	b := newBed(t, Options{Policy: "round_robin"}, map[string]nodestest.Options{"d1": constraining("d1", grammar.Version), "d2": constraining("d2", 0), "d3": constraining("d3", grammar.Version+1), "d4": {}})
	for i, c := range []struct {
		path, field string
		want        *nodepb.Grammar
	}{
		{"/v1/completions", `"response_format":{"type":"json_object"}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_OBJECT}},
		{"/v1/completions", `"response_format":{"type":"json_schema","json_schema":{"name":"p","strict":true,"schema": ` + people + `}}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(people)}},
		{"/v1/completions", `"structured_outputs":{"json":` + people + `,"disable_any_whitespace":true}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(people), Compact: true}},
		{"/v1/completions", `"structured_outputs":{"json":"{\"type\":\"null\"}"}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(`{"type":"null"}`)}},
		{"/v1/completions", `"structured_outputs":{"regex":"a+\\d","json":null}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte(`a+\d`)}},
		{"/v1/completions", `"structured_outputs":{"choice":["no","yes","no"]}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_CHOICE, Choices: []string{"no", "yes"}}},
		{"/v1/completions", `"structured_outputs":{"grammar":"root ::= \"a\""}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_EBNF, Text: []byte(`root ::= "a"`)}},
		{"/v1/completions", `"structured_outputs":{"json_object":true}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_OBJECT}},
		{"/v1/completions", `"guided_json":{"type":"integer"}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(`{"type":"integer"}`)}},
		{"/v1/completions", `"guided_regex":"x"`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte("x")}},
		{"/v1/completions", `"guided_choice":["x"]`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_CHOICE, Choices: []string{"x"}}},
		{"/v1/completions", `"guided_grammar":"start: \"a\" | \"b\" start"`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_LARK, Text: []byte(`start: "a" | "b" start`)}},
		{"/v1/completions", `"response_format":{"type":"structural_tag","structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<a"]}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_STRUCTURAL_TAG,
			Text: []byte(`{"type":"structural_tag","structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<a"]}`)}},
		{"/v1/completions", `"guided_grammar":"start: \"a\"","structured_outputs":{"grammar":"start: \"a\""},"guided_decoding_backend":"guidance"`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_LARK, Text: []byte(`start: "a"`)}},
		{"/v1/completions", `"response_format":{"type":"text"}`, nil},
		{"/v1/completions", `"response_format":null,"structured_outputs":null,"guided_json":null`, nil},
		{"/inference/v1/generate", `"sampling_params":{"max_tokens":2,"structured_outputs":{"regex":"y"}}`, &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte("y")}},
	} {
		prompt := `"max_tokens":2,"n":2,"prompt":[1,2,%d]`
		if c.path != "/v1/completions" {
			prompt = `"token_ids":[1,2,%d]`
		}
		if r := b.post(c.path, fmt.Sprintf("{"+prompt+",%s}", i, c.field)); r.StatusCode != 200 {
			t.Errorf("%s: status %d: %s", c.field, r.StatusCode, r.body)
			continue
		}
		for addr, n := range b.nodes {
			for _, g := range n.Requests() {
				if g.Prompt[2] != int32(i) {
					continue
				}
				want := c.want
				if want != nil {
					want = proto.CloneOf(want)
					want.Version, want.MaxTokens, want.MaskSteps = grammar.Version, 2, uint32(b.g.Limits().MaxMaskSteps)
				}
				if want != nil && (addr != "d1" || g.MaxTokens != 0) || !proto.Equal(g.Grammar, want) {
					t.Errorf("%s at %s: %v, want %v; max_tokens %d", c.field, addr, g.Grammar, want, g.MaxTokens)
				}
			}
		}
	}
	used := map[string]int{}
	for i := range 20 {
		b.post("/v1/completions", fmt.Sprintf(`{"max_tokens":1,"prompt":[7,%d]}`, i))
	}
	for addr, n := range b.nodes {
		used[addr] = len(n.Requests())
	}
	if len(used) != 4 || used["d2"] == 0 || used["d4"] == 0 {
		t.Errorf("requests without a grammar went to %v", used)
	}
}

// Without a node that has the gateway's grammars a constrained request is a 503 that says so, whether
// it has begun or not.
func TestNoNodeConstrains(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": constraining("d1", 0), "d2": constraining("d2", grammar.Version+1)})
	body := `{"prompt":[1,2,3],"max_tokens":4,"response_format":{"type":"json_object"}}`
	r := b.post("/v1/completions", body)
	if r.StatusCode != 503 || r.Header.Get("Retry-After") == "" || !strings.Contains(string(r.body), "can constrain outputs (response_format)") {
		t.Errorf("status %d: %s", r.StatusCode, r.body)
	}
	for addr, n := range b.nodes {
		if got := n.Requests(); len(got) > 0 {
			t.Errorf("%s, of another version, got %v", addr, got)
		}
	}
	if r := b.post("/v1/completions", `{"prompt":[1,2,3],"max_tokens":4}`); r.StatusCode != 200 {
		t.Errorf("status %d: %s", r.StatusCode, r.body)
	}
}

// A stream whose node dies continues on another node with its grammar, and never on one of another
// version.
func TestConstrainedStreamResumes(t *testing.T) {
	cut := constraining("d1", grammar.Version)
	cut.CutAfter = 3
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": cut, "d2": constraining("d2", 0), "d3": constraining("d3", grammar.Version)})
	for i := range 8 {
		r := b.post("/v1/completions", fmt.Sprintf(`{"prompt":[1,2,%d],"max_tokens":9,"structured_outputs":{"regex":"z*"}}`, i))
		if r.StatusCode != 200 {
			t.Errorf("status %d: %s", r.StatusCode, r.body)
		}
	}
	resumed := 0
	for addr, n := range b.nodes {
		for _, g := range n.Requests() {
			if addr == "d2" || g.GetGrammar().GetMaxTokens() != 9 {
				t.Errorf("%s got %v", addr, g)
			}
			if len(g.Output) > 0 {
				resumed++
			}
		}
	}
	if resumed == 0 {
		t.Error("no stream was resumed")
	}
}

// What cannot be followed is refused at once, by the field, the keyword and its place.
func TestBadGrammars(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": constraining("d1", grammar.Version)})
	for _, c := range []struct{ field, param, text string }{
		{`"response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{"a":{"contains":{"type":"null"},"maxContains":2}}}}}`, "response_format.json_schema.schema", "contains at #/properties/a"},
		{`"response_format":{"type":"json_schema","json_schema":{"name":"x"}}`, "response_format.json_schema.schema", "is required"},
		{`"response_format":{"type":"json_schema"}`, "response_format.json_schema", "must be an object"},
		{`"response_format":{"type":"yaml"}`, "response_format.type", "yaml"},
		{`"response_format":"json"`, "response_format", "must be an object"},
		{`"structured_outputs":{}`, "structured_outputs", "must have one of"},
		{`"structured_outputs":{"json":5}`, "structured_outputs.json", "JSON Schema"},
		{`"structured_outputs":{"json":"{"}`, "structured_outputs.json", ""},
		{`"structured_outputs":{"regex":"("}`, "structured_outputs.regex", "regex"},
		{`"structured_outputs":{"regex":"(?=a)b"}`, "structured_outputs.regex", "regex"},
		{`"structured_outputs":{"regex":""}`, "structured_outputs.regex", "must not be empty"},
		{`"structured_outputs":{"choice":[]}`, "structured_outputs.choice", "must not be empty"},
		{`"structured_outputs":{"choice":["a",""]}`, "structured_outputs.choice[1]", "must not be empty"},
		{`"structured_outputs":{"grammar":"root ::= root"}`, "structured_outputs.grammar", ""},
		{`"structured_outputs":{"json_object":true,"regex":"a"}`, "structured_outputs.regex", "structured_outputs.json_object and structured_outputs.regex both"},
		{`"structured_outputs":{"regex":"a","whitespace_pattern":" "}`, "structured_outputs.whitespace_pattern", "not supported"},
		{`"structured_outputs":{"json":{},"disable_additional_properties":true}`, "structured_outputs.disable_additional_properties", "not supported"},
		{`"guided_json":{},"response_format":{"type":"json_object"}`, "response_format", "both"},
		{`"guided_choice":"a"`, "guided_choice", "a list of strings"},
		{`"guided_regex":"` + strings.Repeat("a", 5000) + `"`, "guided_regex", "4096"},
		{`"guided_json":{"description":"` + strings.Repeat("a", 1<<20) + `"}`, "guided_json", "--max-grammar-bytes"},
	} {
		r := b.post("/v1/completions", `{"prompt":[1,2,3],"max_tokens":4,`+c.field+`}`)
		if body := string(r.body); r.StatusCode != 400 || !strings.Contains(body, `"param":"`+c.param+`"`) || !strings.Contains(body, c.text) {
			t.Errorf("%.200s: status %d: %.300s", c.field, r.StatusCode, body)
		}
	}
	if n := len(b.nodes["d1"].Requests()); n > 0 {
		t.Errorf("the node got %d requests", n)
	}
	outcomes := b.g.Meters.Counter(metrics.GatewayGrammars, "limit").Get()
	if outcomes < 1 || b.g.Meters.Counter(metrics.GatewayGrammars, "invalid").Get() < 5 {
		t.Errorf("%v refused at a limit", outcomes)
	}
}

// At most so many grammars are compiled and wait; further requests get 429, and what was compiled
// once is not compiled again.
func TestQueueOfGrammars(t *testing.T) {
	b := newBed(t, Options{Limits: Limits{GrammarCompiles: 1, MaxQueuedGrammars: 1}}, map[string]nodestest.Options{"d1": constraining("d1", grammar.Version)})
	slow := func(i int) string { // some tenths of a second
		return fmt.Sprintf(`{"prompt":[1,2,3],"max_tokens":1,"guided_json":{"patternProperties":{"a":{"type":"string"},"b":{"minLength":2},"c":{"type":"null"},"d":true,"f":{"type":"integer"},"^(.*)(a|b)*$":{"maxLength":%d}}}}`, 9+i)
	}
	var all sync.WaitGroup
	var full, served, other atomic.Int64
	for i := range 6 {
		all.Go(func() {
			switch r := b.post("/v1/completions", slow(i)); {
			case r.StatusCode == 200:
				served.Add(1)
			case r.StatusCode == 429 && r.Header.Get("Retry-After") != "" && strings.Contains(string(r.body), "--max-queued-grammars"):
				full.Add(1)
			default:
				other.Add(1)
				t.Errorf("status %d: %s", r.StatusCode, r.body)
			}
		})
	}
	all.Wait()
	if full.Load() == 0 || served.Load() < 2 || b.refused("grammars") != float64(full.Load()) {
		t.Errorf("%d served, %d refused, %v counted", served.Load(), full.Load(), b.refused("grammars"))
	}
	compiled := b.g.Meters.Counter(metrics.GatewayGrammars, "compiled").Get()
	for i := range 6 {
		b.post("/v1/completions", slow(i%2)) // of 6 grammars, at most 2 are new
	}
	if n := b.g.Meters.Counter(metrics.GatewayGrammars, "compiled").Get(); n > compiled+2 {
		t.Errorf("%v grammars compiled again", n-compiled)
	}
}

// A node gets the limit of counted steps with the grammar, and its error ends the request at once: no
// other node would get further.
func TestMaskSteps(t *testing.T) {
	stop := constraining("d1", grammar.Version)
	stop.Leave = func(r *nodepb.Generate) nodepb.Code {
		if r.Grammar.GetMaskSteps() == 1234 {
			return nodepb.Code_CODE_INVALID
		}
		return 0
	}
	other := constraining("d2", grammar.Version)
	other.Leave = stop.Leave
	b := newBed(t, Options{Limits: Limits{MaxMaskSteps: 1234}}, map[string]nodestest.Options{"d1": stop, "d2": other})
	if r := b.post("/v1/completions", `{"prompt":[1,2,3],"max_tokens":4,"guided_regex":"a*"}`); r.StatusCode != 400 {
		t.Errorf("status %d: %s", r.StatusCode, r.body)
	}
	if n := len(b.nodes["d1"].Requests()) + len(b.nodes["d2"].Requests()); n != 1 {
		t.Errorf("%d attempts", n)
	}
}

// With CompactJSON no constrained answer has whitespace between its tokens.
func TestCompactJSON(t *testing.T) {
	b := newBed(t, Options{CompactJSON: true}, map[string]nodestest.Options{"d1": constraining("d1", grammar.Version)})
	b.post("/v1/completions", `{"prompt":[1,2,3],"max_tokens":1,"response_format":{"type":"json_object"}}`)
	if got := b.nodes["d1"].Requests(); len(got) != 1 || !got[0].Grammar.GetCompact() {
		t.Errorf("the node got %v", got)
	}
}
