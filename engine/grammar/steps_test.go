package grammar

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
)

// The counted steps of a mask and of a token depend on the output alone: an Automaton that has run
// other outputs, one that drops its caches and one that is new count the same, and exceed a limit at
// the same token.
func TestStepsDoNotDependOnCaches(t *testing.T) {
	v := testVocabulary(1)
	sources := append([]Source{
		{Kind: Regex, Text: []byte(`(a{1,1000}){1,1000}`)}, {Kind: Regex, Text: []byte(`.*a.{18}`)}, {Kind: Regex, Text: []byte(`(.*a){20}`)},
		{Kind: JSONSchema, Text: []byte(`{"type":"array","items":{"type":"string","pattern":"^(a|b)*c{3,90}$"},"minItems":100000}`)},
		{Kind: JSONSchema, Text: []byte(`{"$defs":{"a":{"anyOf":[{"type":"array","items":{"$ref":"#/$defs/a"},"maxItems":9},{"type":"string","maxLength":12},{"type":"object","additionalProperties":{"$ref":"#/$defs/a"}}]}},"$ref":"#/$defs/a"}`)},
	}, walkSources...)
	for i, src := range sources {
		for _, budget := range []int{DefaultLimits().MaskSteps, 3000, 300} {
			limits := DefaultLimits()
			limits.MaskSteps = budget
			g, err := Compile(src, limits)
			if err != nil {
				t.Fatalf("%s: %v", src.Text, err)
			}
			compareSteps(t, fmt.Sprintf("source %d %s, limit %d", i, clip(string(src.Text)), budget), g, v, limits, uint64(i))
		}
	}
}

func compareSteps(t *testing.T, name string, g *Grammar, v *Vocabulary, limits Limits, seed uint64) {
	t.Helper()
	automaton := func(bytes int) *Automaton {
		l := limits
		l.CacheBytes = bytes
		a, err := NewAutomaton(g, v, l)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return a
	}
	warm, forgetful := automaton(limits.CacheBytes), automaton(1<<14)
	mask, twin := make([]uint64, v.Words()), make([]uint64, v.Words())
	r := rand.New(rand.NewPCG(seed, 5))
	for range 4 {
		cold := automaton(limits.CacheBytes)
		all := []*Automaton{cold, warm, forgetful}
		matchers := make([]Matcher, len(all))
		for i, a := range all {
			var err error
			if matchers[i], err = a.NewMatcher(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		for token := range 12 {
			want, wantErr := 0, error(nil)
			for i, a := range all {
				to := mask
				if i > 0 {
					to = twin
				}
				err := matchers[i].Mask(to)
				if i == 0 {
					want, wantErr = a.Steps(), err
				} else if a.Steps() != want || errors.Is(err, ErrBudget) != errors.Is(wantErr, ErrBudget) {
					t.Fatalf("%s: mask %d takes %d steps (%v) in automaton %d, %d (%v) in a new one", name, token, a.Steps(), err, i, want, wantErr)
				}
			}
			if wantErr != nil {
				break
			}
			id := int32(r.IntN(v.size))
			for !has(mask, id) {
				id = (id + 1) % int32(v.size)
			}
			for i, a := range all {
				_, _, cached := matchers[i].Peek(id, twin)
				err := matchers[i].Accept(id)
				if i == 0 {
					want, wantErr = a.Steps(), err
				} else if a.Steps() != want || (err == nil) != (wantErr == nil) {
					t.Fatalf("%s: token %d takes %d steps (%v) in automaton %d, %d (%v) in a new one", name, token, a.Steps(), err, i, want, wantErr)
				}
				if cached && err != nil {
					t.Fatalf("%s: Peek knows the mask after token %d, which Accept refuses: %v", name, token, err)
				}
			}
			if wantErr != nil || matchers[0].done {
				break
			}
		}
	}
}

// Peek gives what Accept and Mask give, or nothing.
func TestPeek(t *testing.T) {
	v := testVocabulary(1)
	known, unknown := 0, 0
	for i, src := range walkSources {
		g, err := Compile(src, DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		a, err := NewAutomaton(g, v, DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(uint64(i), 6))
		mask, peeked := make([]uint64, v.Words()), make([]uint64, v.Words())
		for range 6 {
			m, err := a.NewMatcher()
			if err != nil {
				t.Fatal(err)
			}
			if err := m.Mask(mask); err != nil {
				t.Fatal(err)
			}
			for range 20 {
				id := int32(r.IntN(v.size))
				for !has(mask, id) {
					id = (id + 1) % int32(v.size)
				}
				next, certain, ok := m.Peek(id, peeked)
				if err := m.Accept(id); err != nil {
					t.Fatal(err)
				}
				if m.done {
					if ok {
						t.Fatalf("%s: Peek after the end", src.Text)
					}
					break
				}
				err := m.Mask(mask)
				if !ok {
					unknown++
					if err != nil {
						break
					}
					continue
				}
				known++
				only, one := m.Certain()
				if err != nil || next.state != m.state || fmt.Sprint(mask) != fmt.Sprint(peeked) || one != (certain >= 0) || one && only != certain {
					t.Fatalf("%s: Peek differs from Accept and Mask: %v, certain %d and %d", src.Text, err, certain, only)
				}
			}
		}
	}
	if known < 200 || unknown < 200 {
		t.Errorf("%d masks were cached, %d were not", known, unknown)
	}
}
