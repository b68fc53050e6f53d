package grammar

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// testVocabulary has all bytes and the substrings of texts such as models write, so that tokens
// span several parts of a grammar.
func testVocabulary(seed uint64) *Vocabulary {
	texts := []string{
		`{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true, "none": null, "x": {"y": [1, 2.5e3, -0.1]}}`,
		"{\n  \"city\": \"Zürich\",\n  \"emoji\": \"\U0001F600 ok\",\n\t\"esc\": \"a\\n\\u00e9\\\"q\\\\\"\r\n}",
		"The quick brown fox jumps over the lazy dog. 2024-02-29T12:30:00Z https://example.com/a?b=c#d",
		"user@example.org 192.168.0.1 fe80::1 550e8400-e29b-41d4-a716-446655440000 日本語テキスト",
		"<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>  \n\n    if (a < b) return [c, d];",
	}
	r := rand.New(rand.NewPCG(seed, 1))
	set := map[string]bool{}
	for c := range 256 {
		set[string([]byte{byte(c)})] = true
	}
	for range 3000 {
		s := texts[r.IntN(len(texts))]
		i := r.IntN(len(s))
		n := 1 + r.IntN(1+r.IntN(24))
		set[s[i:min(len(s), i+n)]] = true
	}
	var tokens [][]byte
	for s := range set {
		tokens = append(tokens, []byte(s))
	}
	slices.SortFunc(tokens, func(a, b []byte) int { return strings.Compare(string(a), string(b)) })
	r.Shuffle(len(tokens), func(i, j int) { tokens[i], tokens[j] = tokens[j], tokens[i] })
	special := map[string]int32{"<|end|>": int32(len(tokens)), "<|call|>": int32(len(tokens) + 1), "<call>": int32(len(tokens) + 2)}
	tokens = append(tokens, nil, nil, []byte("<call>"))
	return NewVocabulary(tokens, special, []int32{special["<|end|>"]})
}

func has(mask []uint64, id int32) bool { return mask[id>>6]>>(id&63)&1 != 0 }

// checkMask compares a mask with what accepting every token one by one gives.
func checkMask(t *testing.T, a *Automaton, m Matcher, mask []uint64) (allowed []int32) {
	t.Helper()
	v := a.vocab
	for id := range int32(v.size) {
		twin := m
		err := twin.Accept(id)
		if (err == nil) != has(mask, id) {
			t.Fatalf("token %d %q: mask %v, Accept %v", id, v.tokens[id], has(mask, id), err)
		}
		if err == nil {
			allowed = append(allowed, id)
		}
	}
	n := 0
	for _, w := range mask {
		n += bits.OnesCount64(w)
	}
	if n != len(allowed) {
		t.Fatalf("mask has %d tokens, %d are accepted", n, len(allowed))
	}
	return allowed
}

var walkSources = []Source{
	{Kind: StructuralTag, Text: []byte(`{"format":{"type":"or","elements":[{"type":"sequence","elements":[{"type":"const_string","value":"{\"name","commit":true},{"type":"regex","pattern":"\":[ 0-9a-z]{2,9}"}]},{"type":"json_schema","json_schema":{"type":"object"}},{"type":"regex","pattern":"[^<]*"}]}}`), Special: []string{"\x00"}},
	{Kind: JSONObject},
	{Kind: JSONSchema, Text: []byte(`{"type":"object","properties":{"name":{"type":"string","maxLength":9},"age":{"type":"integer","minimum":0,"maximum":150},"tags":{"type":"array","items":{"type":"string"},"minItems":2,"maxItems":3}},"required":["name","tags"]}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"object","properties":{"a":{"type":"string","minLength":30,"maxLength":40}},"required":["a"],"additionalProperties":false}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"array","items":{"type":"string","pattern":"^[a-z ]{3,9}$"},"minItems":1,"maxItems":1000}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"object","minProperties":2,"maxProperties":3,"additionalProperties":{"type":"number"}}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"array","items":{"enum":["a","b",{"x":1},null]},"uniqueItems":true,"minItems":2}`)},
	{Kind: JSONSchema, Text: []byte(`{"$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},"c":{"type":"array","items":{"$ref":"#/$defs/n"}}},"required":["v"],"additionalProperties":false}},"$ref":"#/$defs/n"}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"string","pattern":"^(ab|cde)+$","minLength":4,"maxLength":17}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"object","properties":{"when":{"format":"date-time","type":"string"},"id":{"format":"uuid","type":"string"},"n":{"type":"number","multipleOf":0.5,"minimum":-2,"maximum":1e3}}}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"},"c":{"type":"integer"}},"minProperties":2,"maxProperties":2,"additionalProperties":false}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"object","patternProperties":{"^a":{"type":"integer"},"b$":{"minimum":3}},"additionalProperties":{"type":"null"}}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"string","pattern":"fox|dog"}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"string","pattern":"^(?:\\S+\\s+){0,19}\\S+$","minLength":3,"maxLength":60}`)},
	{Kind: JSONSchema, Text: []byte(`{"type":"array","items":{"type":"string","pattern":"^[a-z ]{28,50}$"}}`)},
	{Kind: Regex, Text: []byte(`(The|A) (quick |lazy ){0,3}(fox|dog)s?\.`)},
	{Kind: Regex, Text: []byte(`[^x]{0,50}x`)},
	{Kind: Regex, Text: []byte(`(?s).*`)},
	{Kind: Choice, Choices: []string{"yes", "no", "maybe", "yesterday", "日本"}},
	{Kind: StructuralTag, Special: []string{"<call>", "<|call|>"}, Text: []byte(`{"rules":{"f":{"type":"json_schema","object":true,"json_schema":true}},
		"format":{"type":"sequence","elements":[{"type":"any_text","excludes":["<call>"],"excludes_first":["{","["]},{"type":"plus","content":{"type":"sequence","elements":[
			{"type":"const_string","value":"<call>"},{"type":"optional","content":{"type":"const_string","value":"f"}},{"type":"rule","name":"f"}]}}]}}`)},
	{Kind: StructuralTag, Special: []string{"<call>"}, Text: parametersTag("text", `"begin":"<p=","middle":">","text":" text>","end":"</p>","text_end":"</p>"`)},
	{Kind: StructuralTag, Special: []string{"<call>"}, Text: parametersTag("gemma", `"open":"{","close":"}","separator":",","middle":":","text":":<call>","text_end":"<call>"`)},
	{Kind: StructuralTag, Text: parametersTag("python", `"open":"(","close":")","separator":",","middle":"="`)},
}

// parametersTag returns a structural tag of parameters in a notation.
func parametersTag(notation, parts string) []byte {
	return fmt.Appendf(nil, `{"format":{"type":"parameters","notation":%q,%s,"excludes":["</p>"],"kinds":{"a":"text","b":"nullable"},"types":{"a":["string"],"b":["string","null"]},
		"json_schema":{"properties":{"a":{"type":"string","maxLength":30},"b":{"type":["string","null"]},"c":{"type":"array","items":{"enum":["<",true,null]}},"d":{"type":"object"}},"required":["a","c"]}}}`, notation, parts)
}

// Masks equal what accepting each token gives, on random walks through every kind of grammar. The
// cache is small, so that it is dropped on the way.
func TestMaskTwin(t *testing.T) {
	for i, src := range walkSources {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			g, err := Compile(src, DefaultLimits())
			if err != nil {
				t.Fatal(err)
			}
			for seed := range uint64(3) {
				limits := DefaultLimits()
				limits.CacheBytes = 200_000
				a, err := NewAutomaton(g, testVocabulary(seed), limits)
				if err != nil {
					t.Fatal(err)
				}
				randomWalk(t, a, seed, 25)
			}
		})
	}
}

// randomWalk checks the masks along an output and returns it.
func randomWalk(t *testing.T, a *Automaton, seed uint64, steps int) (string, bool) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 2))
	m, err := a.NewMatcher()
	if err != nil {
		t.Fatal(err)
	}
	mask := make([]uint64, a.vocab.Words())
	var out strings.Builder
	for range steps {
		err := m.Mask(mask)
		if m.done {
			if !errors.Is(err, ErrDeadEnd) {
				t.Fatalf("seed %d: mask of a finished output: %v", seed, err)
			}
			return out.String(), true
		}
		if err != nil {
			t.Fatalf("seed %d: after %q: %v", seed, out.String(), err)
		}
		allowed := checkMask(t, a, m, mask)
		if only, ok := m.Certain(); ok != (len(allowed) == 1) || ok && only != allowed[0] {
			t.Fatalf("seed %d: after %q: certain %d %v of %d", seed, out.String(), only, ok, len(allowed))
		}
		id := allowed[r.IntN(len(allowed))]
		if err := m.Accept(id); err != nil {
			t.Fatal(err)
		}
		out.Write(a.vocab.tokens[id])
	}
	return out.String(), false
}

// finish brings an output to its end: an end token where one is allowed, otherwise a token that
// closes something, otherwise the first that is allowed.
func finish(m *Matcher, mask []uint64, out *strings.Builder, steps int) (bool, error) {
	v := m.a.vocab
	var closing []int32
	for _, s := range []string{`"`, "}", "]", ":", ",", "0", "n", "u", "l", "t", "r", "e", "f", "a", "s"} {
		for id, token := range v.tokens {
			if string(token) == s {
				closing = append(closing, int32(id))
			}
		}
	}
	for range steps {
		if err := m.Mask(mask); err != nil {
			return false, err
		}
		next := int32(-1)
		for _, id := range append(v.eos[:len(v.eos):len(v.eos)], closing...) {
			if has(mask, id) {
				next = id
				break
			}
		}
		for id := int32(0); next < 0; id++ {
			if has(mask, id) {
				next = id
			}
		}
		if err := m.Accept(next); err != nil {
			return false, err
		}
		if m.done {
			return true, nil
		}
		out.Write(v.tokens[next])
	}
	return false, nil
}

// Finished outputs of random walks through maskbench's schemas are valid, by a check that knows
// nothing of automata. On the way a second Automaton with a tiny cache gives the same masks.
func TestRandomOutputsAreValid(t *testing.T) {
	files := archive(t, "maskbench.tar.gz")
	v := testVocabulary(3)
	finished, schemas := 0, 0
	for i, name := range slices.Sorted(maps.Keys(files)) {
		if i%4 != 0 && os.Getenv("TANDEM_SOAK") != "1" {
			continue
		}
		var f struct{ Schema json.RawMessage }
		if err := json.Unmarshal(files[name], &f); err != nil {
			t.Fatal(err)
		}
		s := newScore()
		c := s.newSchemaCase(t, name, f.Schema)
		if c == nil {
			continue
		}
		schemas++
		for seed := range uint64(2) {
			if randomOutput(t, name, c, v, seed) {
				finished++
			}
		}
	}
	t.Logf("%d outputs of %d schemas finished", finished, schemas)
	if finished < schemas {
		t.Errorf("only %d outputs of %d schemas finished", finished, schemas)
	}
}

// randomOutput walks through one schema and reports whether the output finished.
func randomOutput(t *testing.T, name string, c *schemaCase, v *Vocabulary, seed uint64) bool {
	t.Helper()
	limits := DefaultLimits()
	limits.CacheBytes = 30_000
	tiny, err := NewAutomaton(&Grammar{p: c.a.p}, v, limits)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := NewAutomaton(&Grammar{p: c.a.p}, v, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(seed, 9))
	m, err := whole.NewMatcher()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	other, _ := tiny.NewMatcher()
	mask, twin := make([]uint64, v.Words()), make([]uint64, v.Words())
	var out strings.Builder
	for range 12 + r.IntN(20) {
		if err := m.Mask(mask); err != nil {
			t.Fatalf("%s: seed %d: after %q: %v", name, seed, out.String(), err)
		}
		if err := other.Mask(twin); err != nil || !slices.Equal(mask, twin) {
			t.Fatalf("%s: seed %d: after %q: masks differ with a small cache: %v", name, seed, out.String(), err)
		}
		id := int32(r.IntN(v.size))
		for !has(mask, id) {
			id = (id + 1) % int32(v.size)
		}
		if err := errors.Join(m.Accept(id), other.Accept(id)); err != nil {
			t.Fatalf("%s: seed %d: %v", name, seed, err)
		}
		if m.done {
			break
		}
		out.Write(v.tokens[id])
	}
	done := m.done
	if !done {
		if done, err = finish(&m, mask, &out, 300); err != nil {
			t.Fatalf("%s: seed %d: after %q: %v", name, seed, out.String(), err)
		}
	}
	if !done {
		return false
	}
	got, err := readJSON([]byte(out.String()), 2000)
	if err != nil {
		t.Fatalf("%s: seed %d: %q: %v", name, seed, out.String(), err)
	}
	if ok, err := c.o.c.validConj(got, []*value{c.root}); !ok || err != nil {
		if hasRepeatedKeys(out.String()) {
			return true // the last of them counts for readers, and the number of members differs
		}
		t.Errorf("%s: seed %d: %s is not valid: %v", name, seed, out.String(), err)
	}
	return true
}

// hasRepeatedKeys reports whether an object of a text has a key twice.
func hasRepeatedKeys(text string) bool {
	d := json.NewDecoder(strings.NewReader(text))
	var keys []map[string]bool
	name := false
	for {
		token, err := d.Token()
		if err != nil {
			return false
		}
		switch x := token.(type) {
		case json.Delim:
			switch x {
			case '{':
				keys, name = append(keys, map[string]bool{}), true
				continue
			case '[':
				keys = append(keys, nil)
			default:
				keys = keys[:len(keys)-1]
			}
		case string:
			if name {
				if keys[len(keys)-1][x] {
					return true
				}
				keys[len(keys)-1][x], name = true, false
				continue
			}
		}
		name = len(keys) > 0 && keys[len(keys)-1] != nil
	}
}

// An output that the Automaton has seen costs no allocation.
func TestCachedMasksAllocateNothing(t *testing.T) {
	g, err := Compile(walkSources[1], DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	v := testVocabulary(1)
	a, err := NewAutomaton(g, v, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	var ids []int32
	for _, c := range []byte(`{"name": "Ada", "age": 36, "tags": ["a", "b"]}`) {
		ids = append(ids, int32(slices.IndexFunc(v.tokens, func(token []byte) bool { return string(token) == string([]byte{c}) })))
	}
	mask := make([]uint64, v.Words())
	n := testing.AllocsPerRun(10, func() {
		m, err := a.NewMatcher()
		for _, id := range ids {
			if err == nil {
				err = m.Mask(mask)
			}
			if err == nil {
				err = m.Accept(id)
			}
		}
		if err != nil || !m.Complete() {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}
