package grammar

import (
	"errors"
	"testing"
)

// fuzzLimits keep one execution short.
func fuzzLimits() Limits {
	l := DefaultLimits()
	l.Positions, l.CompileSteps, l.DFAStates, l.StateItems, l.MaskSteps = 20_000, 50_000, 300, 500, 200_000
	l.CacheBytes = 1 << 20
	return l
}

var fuzzVocabulary = testVocabulary(7)

// fuzzSource compiles a source and walks along a text: no panic, errors are the package's, and what
// is accepted byte by byte is allowed by the mask.
func fuzzSource(t *testing.T, src Source, text string) {
	t.Helper()
	limits := fuzzLimits()
	g, err := Compile(src, limits)
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || e.Keyword == "" {
			t.Fatalf("%v names no keyword", err)
		}
		return
	}
	a, err := NewAutomaton(g, fuzzVocabulary, limits)
	if err != nil {
		return
	}
	m, err := a.NewMatcher()
	mask := make([]uint64, fuzzVocabulary.Words())
	for i := 0; err == nil && i < min(len(text), 40); i++ {
		if i%8 == 0 {
			if err = m.Mask(mask); err != nil {
				break
			}
			for id, token := range fuzzVocabulary.tokens {
				if len(token) != 1 {
					continue
				}
				twin := m
				if ok := twin.AcceptBytes(token) == nil; ok != has(mask, int32(id)) {
					t.Fatalf("after %q: token %q: mask %v, accepted %v", text[:i], token, has(mask, int32(id)), ok)
				}
			}
		}
		err = m.AcceptBytes([]byte{text[i]})
	}
	if err != nil && !errors.Is(err, ErrBudget) && !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
}

func FuzzSchema(f *testing.F) {
	for _, src := range walkSources {
		if src.Kind == JSONSchema {
			f.Add(string(src.Text), `{"name": "x", "tags": ["a", "b"]}`)
		}
	}
	f.Add(`{"oneOf":[{"required":["a"]},{"properties":{"a":{"not":{"const":1}}}}],"if":{"minimum":3},"then":{"maximum":5}}`, `{"a":2}`)
	f.Add(`{"$id":"http://x/y","$defs":{"a":{"$anchor":"b","anyOf":[{"$ref":"#"},{"multipleOf":0.5}]}},"items":[{"$ref":"#b"}],"additionalItems":{"format":"ipv6"}}`, `[1.5, "::1"]`)
	f.Fuzz(func(t *testing.T, schema, text string) {
		fuzzSource(t, Source{Kind: JSONSchema, Text: []byte(schema)}, text)
	})
}

func FuzzRegex(f *testing.F) {
	for _, s := range []string{`(a{1,3}|b*)+c?`, `^(?i:x[^\d-z])$|\p{L}{2,}`, `[\w.-]+@(?<host>[a-z]+\.)+com`, `\u00e9\x41\cA.{5}$`} {
		f.Add(s, "aabc")
	}
	f.Fuzz(func(t *testing.T, regex, text string) { fuzzSource(t, Source{Kind: Regex, Text: []byte(regex)}, text) })
}

func FuzzChoice(f *testing.F) {
	f.Add("yes", "yesterday", "no", "yes")
	f.Fuzz(func(t *testing.T, a, b, c, text string) {
		fuzzSource(t, Source{Kind: Choice, Choices: []string{a, b, c}}, text)
	})
}

func FuzzEBNF(f *testing.F) {
	f.Add(gbnfJSON, `{"a": 1}`)
	f.Add("root ::= x{2,3} | [^a-c] . <|call|>\nx ::= (\"a\" | y)* # c\ny ::= \"\\u00e9\"?", "aaé")
	f.Fuzz(func(t *testing.T, grammar, text string) {
		fuzzSource(t, Source{Kind: EBNF, Text: []byte(grammar)}, text)
	})
}

func FuzzLark(f *testing.F) {
	f.Add(larkSQL, "select * from t")
	f.Add("start: a - b\na: \"x\"", "x") // a hyphen is no name
	f.Add("?start: \"a\"i ~ 2..3 [b] -> x\nb.2: /c+/s | \"d\"+\n%ignore /\\s/", "aa cc")
	f.Fuzz(func(t *testing.T, grammar, text string) {
		fuzzSource(t, Source{Kind: Lark, Text: []byte(grammar)}, text)
	})
}

func FuzzStructuralTag(f *testing.F) {
	f.Add(tagsOld, "hi <function=get>{\"a\": 1}</function>")
	f.Add(tagsNew, "<think>x</think>ok<call:x>5</call>")
	f.Add(`{"format":{"type":"tags_with_separator","separator":",","tags":[{"begin":"[","content":{"type":"grammar","grammar":"root ::= \"a\"*"},"end":["]",")"]}],"at_least_one":true}}`, "[aa],[)")
	for _, src := range walkSources {
		if src.Kind == StructuralTag {
			f.Add(string(src.Text), `<p=a text>x</p><p=c>["\u003c"]</p>`)
		}
	}
	f.Fuzz(func(t *testing.T, tag, text string) {
		fuzzSource(t, Source{Kind: StructuralTag, Text: []byte(tag)}, text)
	})
}
