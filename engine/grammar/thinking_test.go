package grammar

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// Reasoning ends after its tokens, with every grammar, and masks are those of Accept. Peek gives the
// mask that Accept and Mask give.
func TestThinking(t *testing.T) {
	const call, end = "<call>", "<|call|>"
	for _, rest := range []string{
		`"format":{"type":"anything"}`,
		`"format":{"type":"sequence","elements":[{"type":"any_text","excludes":["<|call|>"]},{"type":"const_string","value":"<|call|>"},{"type":"json_schema","json_schema":{"type":"array"}}]}`,
	} {
		for _, open := range []bool{true, false} {
			src := Source{Kind: StructuralTag, Special: []string{call, end}, Text: fmt.Appendf(nil, `{"thinking":{"begin":%q,"end":%q,"tokens":5,"open":%t},%s}`, call, end, open, rest)}
			g, err := Compile(src, DefaultLimits())
			if err != nil {
				t.Fatal(err)
			}
			ended := 0
			for seed := range uint64(8) {
				v := testVocabulary(seed)
				a, err := NewAutomaton(g, v, DefaultLimits())
				if err != nil {
					t.Fatal(err)
				}
				m, err := a.NewMatcher()
				if err != nil {
					t.Fatal(err)
				}
				r := rand.New(rand.NewPCG(seed, 8))
				mask, peeked := make([]uint64, v.Words()), make([]uint64, v.Words())
				for range 30 {
					if err := m.Mask(mask); m.done || err != nil {
						break
					}
					allowed := checkMask(t, a, m, mask)
					certain, ok := m.Certain()
					if ok != (len(allowed) == 1) || ok && certain != allowed[0] {
						t.Fatalf("%s: certain %d %v of %d", rest, certain, ok, len(allowed))
					}
					if m.inside && m.spent >= 5 && slices.Contains(allowed, v.special[end]) && len(allowed) > 1 {
						t.Fatalf("%s: %d tokens are allowed after %d of reasoning", rest, len(allowed), m.spent)
					}
					if m.spent > 5+3 { // a character that has begun is ended
						t.Fatalf("%s: %d tokens of reasoning", rest, m.spent)
					}
					id := allowed[r.IntN(len(allowed))]
					if slices.Contains(allowed, v.special[call]) && r.IntN(3) == 0 {
						id = v.special[call]
					}
					next, _, ok := m.Peek(id, peeked)
					if err := m.Accept(id); err != nil {
						t.Fatal(err)
					}
					if id == v.special[end] {
						ended++
					}
					if ok {
						if m.Mask(mask) != nil || !slices.Equal(mask, peeked) || next.inside != m.inside || next.spent != m.spent {
							t.Fatalf("%s: Peek differs from Accept", rest)
						}
					}
				}
			}
			if ended < 4 && (open || g.free) {
				t.Errorf("%s, open %v: reasoning ended %d times", rest, open, ended)
			}
		}
	}
	for _, bad := range []string{`{"tokens":1}`, `{"begin":"a","end":"b"}`, `{"begin":"a","end":"b","tokens":-1}`, `{"begin":"a","end":"b","tokens":1e9}`} {
		if _, err := Compile(Source{Kind: StructuralTag, Text: []byte(`{"thinking":` + bad + `,"format":{"type":"anything"}}`)}, DefaultLimits()); err == nil {
			t.Errorf("%s: no error", bad)
		}
	}
	if _, err := Compile(Source{Kind: StructuralTag, Text: []byte(`{"format":{"type":"sequence","elements":[{"type":"anything"}]}}`)}, DefaultLimits()); err == nil {
		t.Error("anything is taken within a format")
	}
}
