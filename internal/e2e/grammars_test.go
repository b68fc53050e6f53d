package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/gateway/render/parse/args"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// testWords returns the tokens of a checkpoint without a tokenizer: printable ASCII, then pieces of
// JSON and of words, and last the markers of calls and the token that ends an output.
func testWords(vocab int) [][]byte {
	pieces := []string{`{"`, `":`, `":"`, `","`, `"}`, `"]`, "tru", "fals", "null", "name", "the ", "12", "00", "ab", "cd", `"a"`, "[[", "]]", "}}", `\"`, "e", "é"}
	tokens := make([][]byte, vocab)
	for id := range vocab - 1 {
		switch {
		case id < 95:
			tokens[id] = []byte{byte(' ' + id)}
		case id < 95+len(pieces):
			tokens[id] = []byte(pieces[id-95])
		case id >= vocab-1-len(testMarkers):
			tokens[id] = []byte(testMarkers[vocab-2-id])
		default:
			tokens[id] = fmt.Appendf(nil, "%c%c%d", 'a'+id%26, 'A'+id%23, id%100)
		}
	}
	return tokens
}

// testMarkers are tokens that grammars demand as such. The first has the second highest id.
var testMarkers = []string{"<tool_call>", "</tool_call>"}

var testVocabularies sync.Map // of *grammar.Vocabulary, by size

// vocabularyOf returns the vocabulary of testWords.
func vocabularyOf(vocab int) *grammar.Vocabulary {
	v, ok := testVocabularies.Load(vocab)
	if !ok {
		special := map[string]int32{}
		for i, s := range testMarkers {
			special[s] = int32(vocab - 2 - i)
		}
		v, _ = testVocabularies.LoadOrStore(vocab, grammar.NewVocabulary(testWords(vocab), special, []int32{int32(vocab - 1)}))
	}
	return v.(*grammar.Vocabulary)
}

func testVocabulary(vocab int) func() (masks.Vocabulary, error) {
	return func() (masks.Vocabulary, error) { return masks.Vocabulary{Vocabulary: vocabularyOf(vocab)}, nil }
}

// testGrammars are those of the path identity: expressions, choices, grammars, schemas and a
// structural tag. Few of their outputs are long.
var testGrammars = []*nodepb.Grammar{
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte(`(ab|cd|[e-k]){2,20}( the end)?`)},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte(`[a-z]{1,8}@[a-z]{1,8}\.(com|org|net)`)},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_CHOICE, Choices: []string{"yes, certainly", "yes, perhaps", "no"}},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_EBNF, Text: []byte("root ::= \"(\" root \")\" root | [a-c]?")},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_OBJECT},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_OBJECT, Compact: true},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Compact: true, Text: []byte(`{"type":"object","properties":{"name":{"enum":["the first","the second",null]},"n":{"type":"integer","minimum":-50,"maximum":1200}},"required":["name","n"],"additionalProperties":false}`)},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(`{"type":"array","items":{"anyOf":[{"type":"boolean"},{"type":"string","maxLength":5},{"type":"array","items":{"type":"null"},"maxItems":2}]},"minItems":1,"maxItems":4}`)},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(`{"$defs":{"t":{"type":"object","properties":{"v":{"type":"integer","minimum":0,"maximum":9},"c":{"type":"array","items":{"$ref":"#/$defs/t"},"maxItems":2}},"required":["v"],"additionalProperties":false}},"$ref":"#/$defs/t"}`)},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_STRUCTURAL_TAG, Text: []byte(`{"structures":[{"begin":"<f>","schema":{"type":"array","items":{"type":"boolean"},"maxItems":2},"end":"</f>"}],"triggers":["<f"]}`)},
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte(`[a-c]{2,9}é?ü`)}, // no token of the vocabulary continues it
	toolGrammar("hermes", false), toolGrammar("hermes", true), toolGrammar("qwen3_coder", false), toolGrammar("pythonic", false),
	{Kind: nodepb.GrammarKind_GRAMMAR_KIND_STRUCTURAL_TAG, Text: []byte(`{"thinking":{"begin":"<tool_call>","end":"</tool_call>","tokens":3,"open":true},"format":{"type":"anything"}}`)},
}

// toolGrammar returns a grammar of calls in a format. With text the answer may be text.
func toolGrammar(format string, text bool) *nodepb.Grammar {
	f, err := parse.NewFormat(format, "", func(s string) (int32, bool) {
		return int32(slices.Index(testMarkers, s)), slices.Contains(testMarkers, s)
	})
	if err != nil {
		panic(err)
	}
	schema := []byte(`{"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":50},"s":{"type":"string","maxLength":4}},"required":["n"],"additionalProperties":false}`)
	tag, special, err := f.Grammar(parse.Constraint{Text: text, Types: args.NewTools([]args.Tool{{Name: "f", Parameters: schema}}), Tools: []parse.Tool{{Name: "f", Parameters: schema, Strict: true}}})
	if err != nil {
		panic(err)
	}
	return &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_STRUCTURAL_TAG, Text: tag, Special: special}
}

// constrain gives a third of the requests a grammar.
func constrain(rng *rand.Rand, g *nodepb.Generate) {
	if rng.IntN(3) > 0 {
		return
	}
	of := testGrammars[rng.IntN(len(testGrammars))]
	g.Grammar = &nodepb.Grammar{Kind: of.Kind, Text: of.Text, Choices: of.Choices, Compact: of.Compact, Special: of.Special, Version: engine.GrammarVersion, MaxTokens: g.MaxTokens}
	g.MaxTokens = 0
}

// limitOf returns the most tokens of an output.
func limitOf(g *nodepb.Generate) int {
	if g.Grammar != nil {
		return int(g.Grammar.MaxTokens)
	}
	return int(g.MaxTokens)
}

// follows returns an error unless the tokens are the beginning of an output that the grammar allows,
// and whether they are a whole one.
func follows(g *nodepb.Grammar, tokens []int32, vocab int) (finished bool, err error) {
	c, err := grammar.Compile(grammar.Source{Kind: grammar.Kind(g.Kind - 1), Text: g.Text, Choices: g.Choices, Compact: g.Compact, Special: g.Special}, grammar.DefaultLimits())
	if err != nil {
		return false, err
	}
	a, err := grammar.NewAutomaton(c, vocabularyOf(vocab), grammar.DefaultLimits())
	if err != nil {
		return false, err
	}
	m, err := a.NewMatcher()
	if err != nil {
		return false, err
	}
	for i, t := range tokens {
		if err := m.Accept(t); err != nil {
			return false, fmt.Errorf("token %d of %v: %w", i, tokens, err)
		}
	}
	return m.Complete(), nil
}

// schemas returns the schemas of maskbench, by name.
func schemas(t *testing.T) map[string]json.RawMessage {
	t.Helper()
	packed, err := os.Open("../../engine/grammar/testdata/maskbench.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	z, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]json.RawMessage{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		var file struct{ Schema json.RawMessage }
		if err := json.NewDecoder(r).Decode(&file); err != nil {
			t.Fatalf("%s: %v", h.Name, err)
		}
		all[h.Name] = file.Schema
	}
}

// validateAll is a program that prints the numbers of the cases whose text its schema refuses. Texts
// with a key twice or a number beyond float64, and schemas that the library cannot read, are left out.
const validateAll = `
import json, math, sys, jsonschema_rs
class Unclear(Exception): pass
def pairs(items):
    if len({k for k, _ in items}) != len(items): raise Unclear()
    return dict(items)
def number(text):
    if math.isinf(float(text)): raise Unclear()
    return float(text)
for i, line in enumerate(sys.stdin):
    case = json.loads(line)
    try: instance = json.loads(case["text"], object_pairs_hook=pairs, parse_float=number)
    except Unclear: continue
    try: valid = jsonschema_rs.validator_for(case["schema"], validate_formats=True)
    except Exception: continue
    if not valid.is_valid(instance): print(i)
`

// Outputs of a model with random weights under many schemas: each that finished is JSON that another
// program finds valid, and each that was cut off is the beginning of a valid one.
func TestRandomOutputsFollowSchemas(t *testing.T) {
	every, seeds, begin := 8, 2, uint64(1)
	if os.Getenv("TANDEM_SOAK") != "" {
		every, seeds, begin = 1, 27, soakSeed(t, begin)
	}
	f := newFleet(t, engine.LoadOptions{Model: filepath.Join(checkpoints, "gqa-tied"), Kernels: native(), Threads: 1, KVMemory: 64 << 20, MaxSeqs: 16, MaxBatchedTokens: 256, MaxModelLen: 256}, nil)
	defer f.close()
	vocab := f.loaded[0].Model.VocabSize()
	texts, end := testWords(vocab), int32(vocab-1)
	type output struct {
		name, text string
		schema     json.RawMessage
	}
	type running struct {
		name   string
		schema json.RawMessage
		g      *nodepb.Generate
		s      *stream
	}
	var finished []output
	var now []running
	cut, refused := 0, 0
	collect := func(r running) {
		got := f.wait(t, r.s, r.g)
		if got.err != "" {
			t.Fatalf("%s, seed %d: %s", r.name, r.g.Sampling.Seed, got.err)
		}
		var text []byte
		for _, id := range got.tokens {
			text = append(text, texts[id]...)
		}
		if _, err := follows(r.g.Grammar, got.tokens, vocab); err != nil {
			t.Errorf("%s, seed %d: %q: %v", r.name, r.g.Sampling.Seed, text, err)
		}
		if got.tokens[len(got.tokens)-1] != end {
			cut++
			return
		}
		if !json.Valid(text) {
			t.Errorf("%s, seed %d: %q is no JSON", r.name, r.g.Sampling.Seed, text)
		}
		finished = append(finished, output{r.name, string(text), r.schema})
	}
	all := schemas(t)
	for i, name := range slices.Sorted(maps.Keys(all)) {
		if i%every != 0 {
			continue
		}
		if _, err := grammar.Compile(grammar.Source{Kind: grammar.JSONSchema, Text: all[name]}, grammar.DefaultLimits()); err != nil {
			refused++
			continue
		}
		for seed := range seeds {
			g := &nodepb.Generate{
				RequestId: name, Attempt: 1, Prompt: []int32{int32(seed), int32(i % vocab)}, PrefixRoot: uint64(i),
				Sampling: &nodepb.Sampling{Seed: begin<<32 | uint64(i)<<8 | uint64(seed), Temperature: 0.9},
				Grammar:  &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: all[name], Compact: seed%2 == 0, Version: engine.GrammarVersion, MaxTokens: 240},
			}
			for _, c := range []byte(`"}]`) { // so that most outputs end
				g.Sampling.LogitBias = append(g.Sampling.LogitBias, &nodepb.LogitBias{Token: int32(c - ' '), Value: 4})
			}
			g.Sampling.LogitBias = append(g.Sampling.LogitBias, &nodepb.LogitBias{Token: end, Value: 8})
			s, _, err := f.client.generate(g)
			if err != nil {
				t.Fatal(err)
			}
			if now = append(now, running{name, all[name], g, s}); len(now) == 32 {
				collect(now[0])
				now = now[1:]
			}
		}
	}
	for _, r := range now {
		collect(r)
	}
	t.Logf("note: seed %d, %d outputs finished, %d cut off, %d schemas refused", begin, len(finished), cut, refused)
	if len(finished) < (len(finished)+cut)*3/10 || len(finished) < 30 {
		t.Errorf("%d outputs finished, %d did not", len(finished), cut)
	}
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		return // make test sets it
	}
	var in bytes.Buffer
	for _, o := range finished {
		line, err := json.Marshal(map[string]any{"schema": o.schema, "text": o.text})
		if err != nil {
			t.Fatal(err)
		}
		in.Write(append(line, '\n'))
	}
	cmd := exec.Command(python, "-c", validateAll)
	cmd.Stdin = &in
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, n := range strings.Fields(string(out)) {
		i, err := strconv.Atoi(n)
		if err != nil {
			t.Fatalf("%s", out)
		}
		t.Errorf("%s: %s is not valid", finished[i].name, finished[i].text)
	}
}

// A node refuses a grammar of another version, and a Generate whose limit is not in its grammar, so
// that neither side can overlook what the other means.
func TestGrammarVersions(t *testing.T) {
	f := newFleet(t, engine.LoadOptions{Model: filepath.Join(checkpoints, "gqa-tied"), Kernels: native(), Threads: 1, KVMemory: 1 << 20, MaxSeqs: 2, MaxBatchedTokens: 64}, nil)
	defer f.close()
	for _, c := range []struct {
		version, own, inner uint32
		want                string
	}{
		{engine.GrammarVersion, 0, 3, ""},
		{engine.GrammarVersion + 1, 0, 3, fmt.Sprint("CODE_MISMATCH: the node has no grammars of version ", engine.GrammarVersion+1)},
		{0, 0, 3, "CODE_MISMATCH: the node has no grammars of version 0"},
		{engine.GrammarVersion, 3, 3, "CODE_INVALID: max_tokens"},
		{engine.GrammarVersion, 0, 0, "CODE_INVALID: max_tokens"},
	} {
		g := &nodepb.Generate{RequestId: "r", Attempt: 1, Prompt: []int32{1, 2, 3}, MaxTokens: c.own, Sampling: &nodepb.Sampling{},
			Grammar: &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte("[a-z]+"), Version: c.version, MaxTokens: c.inner}}
		s, _, err := f.client.generate(g)
		if err != nil {
			t.Fatal(err)
		}
		<-s.done
		if got := fmt.Sprint(s.err); c.want == "" && (s.err != nil || len(s.tokens) != 3) || c.want != "" && !strings.Contains(got, c.want) {
			t.Errorf("%+v: %d tokens, %s", c, len(s.tokens), got)
		}
	}
}
