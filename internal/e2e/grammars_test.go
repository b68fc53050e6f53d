package e2e

import (
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// testWords returns the tokens of a checkpoint without a tokenizer: printable ASCII, then pieces of
// JSON and of words, and last the token that ends an output.
func testWords(vocab int) [][]byte {
	pieces := []string{`{"`, `":`, `":"`, `","`, `"}`, `"]`, "tru", "fals", "null", "name", "the ", "12", "00", "ab", "cd", `"a"`, "[[", "]]", "}}", `\"`, "e", "é"}
	tokens := make([][]byte, vocab)
	for id := range vocab - 1 {
		switch {
		case id < 95:
			tokens[id] = []byte{byte(' ' + id)}
		case id < 95+len(pieces):
			tokens[id] = []byte(pieces[id-95])
		default:
			tokens[id] = fmt.Appendf(nil, "%c%c%d", 'a'+id%26, 'A'+id%23, id%100)
		}
	}
	return tokens
}

var testVocabularies sync.Map // of *grammar.Vocabulary, by size

// vocabularyOf returns the vocabulary of testWords.
func vocabularyOf(vocab int) *grammar.Vocabulary {
	v, ok := testVocabularies.Load(vocab)
	if !ok {
		v, _ = testVocabularies.LoadOrStore(vocab, grammar.NewVocabulary(testWords(vocab), nil, []int32{int32(vocab - 1)}))
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
}

// constrain gives a third of the requests a grammar.
func constrain(rng *rand.Rand, g *nodepb.Generate) {
	if rng.IntN(3) > 0 {
		return
	}
	of := testGrammars[rng.IntN(len(testGrammars))]
	g.Grammar = &nodepb.Grammar{Kind: of.Kind, Text: of.Text, Choices: of.Choices, Compact: of.Compact, Version: engine.GrammarVersion, MaxTokens: g.MaxTokens}
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
	c, err := grammar.Compile(grammar.Source{Kind: grammar.Kind(g.Kind - 1), Text: g.Text, Choices: g.Choices, Compact: g.Compact}, grammar.DefaultLimits())
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
