package grammar

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"
)

// hostile are sources that broke other programs, or were made to: repeats of repeats, large counts,
// long lists, look-around, references in circles, surrogates, empty languages.
func hostile() map[string]Source {
	schema := func(s string) Source { return Source{Kind: JSONSchema, Text: []byte(s)} }
	regex := func(s string) Source { return Source{Kind: Regex, Text: []byte(s)} }
	out := map[string]Source{
		"repeats of repeats":        regex(`(a{1,1000}){1,1000}`),
		"repeats of repeats, 3":     regex(`((a{1,1000}){1,1000}){1,1000}`),
		"repeats of empty repeats":  regex(`((a?){0,1000}){0,1000}`),
		"many dot stars":            regex(`(.*a){20}`),
		"two to the 18 states":      regex(`.*a.{18}`),
		"two to the 300 states":     regex(`.*a.{300}`),
		"dot star and large repeat": regex(`.*a.{100000}b`),
		"nested stars":              regex(`(((((a*)*)*)*)*)*b`),
		"overlapping alternatives":  regex(`(a|aa|aaa|aaaa|aaaaa)*b`),
		"nested empty repeats":      regex(strings.Repeat("(a?", 60) + strings.Repeat(")*", 60)),
		"nested empty counts":       regex(strings.Repeat("(a?b?", 60) + strings.Repeat("){2,5}", 60)),
		"look-ahead":                regex(`(?=a)b`),
		"look-behind":               regex(`(?<!a)b`),
		"back-reference":            regex(`(a)\1`),
		"word boundary":             regex(`\bfoo\b`),
		"huge repeat":               regex(`a{1,999999999}`),
		"repeat past the limit":     regex(`a{1,99999999999}`),
		"bad range":                 regex(`[z-a]`),
		"open group":                regex(`((((((((((`),
		"deep groups":               regex(strings.Repeat("(", 2000) + "a" + strings.Repeat(")", 2000)),
		"long":                      regex(strings.Repeat("a", 5000)),
		"classes":                   regex(`[\s\S]*[\w\W]*[\d\D]*x`),
		"unicode classes":           regex(`\p{L}*\p{Lu}*\P{Nd}*!`),
		"nothing":                   regex(`[^\s\S]`),
		"no UTF-8":                  regex("a\xff"),
		"surrogate":                 regex(`\ud800`),
		"left recursion":            {Kind: EBNF, Text: []byte(`root ::= root "a" | "b"`)},
		"hidden left recursion":     {Kind: EBNF, Text: []byte("root ::= x? root \"a\" | \"b\"\nx ::= \"y\"")},
		"endless rule":              {Kind: EBNF, Text: []byte(`root ::= "a" root`)},
		"ambiguous rule":            {Kind: EBNF, Text: []byte("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"a\" root | \"d\"")},
		"repeat of an empty rule":   {Kind: EBNF, Text: []byte("root ::= x{0,1000000}\nx ::= \"a\"?")},
		"no root":                   {Kind: EBNF, Text: []byte(`x ::= "a"`)},
		"no rule":                   {Kind: Lark, Text: []byte(`start: nothing`)},
		"template":                  {Kind: Lark, Text: []byte("start: _sep{x, y}")},
		"import":                    {Kind: Lark, Text: []byte("%import .other (X)\nstart: X")},
		"no trigger":                {Kind: StructuralTag, Text: []byte(`{"structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<b>"]}`)},
		"no format":                 {Kind: StructuralTag, Text: []byte(`{"format":{"type":"unknown"}}`)},
		"many choices":              {Kind: Choice, Choices: make([]string, 20_000)},
	}
	maps.Copy(out, hostileSchemas())
	hostileRules(out)
	add := func(name string, n int, item func(int) string, open, end string) {
		var b strings.Builder
		b.WriteString(open)
		for i := range n {
			if i > 0 {
				b.WriteString(",")
			}
			b.WriteString(item(i))
		}
		b.WriteString(end)
		out[name] = schema(b.String())
	}
	add("50,000 enums", 50_000, func(i int) string { return fmt.Sprintf("%q", fmt.Sprintf("value-%d", i*7919%50_000)) }, `{"enum":[`, `]}`)
	add("40,000 names", 40_000, func(i int) string { return fmt.Sprintf("%q", fmt.Sprint("n", i)) }, `{"type":"object","required":[`, `]}`)
	add("20,000 properties", 20_000, func(i int) string { return fmt.Sprintf(`"p%d":{"type":"integer"}`, i) }, `{"type":"object","properties":{`, `}}`)
	add("20,000 anyOf", 20_000, func(i int) string { return fmt.Sprintf(`{"const":%d}`, i) }, `{"anyOf":[`, `]}`)
	add("300 oneOf", 300, func(i int) string {
		return fmt.Sprintf(`{"properties":{"t":{"const":%d},"v":{"type":"string"}},"required":["t"]}`, i)
	}, `{"oneOf":[`, `]}`)
	add("3,000 allOf", 3_000, func(i int) string { return fmt.Sprintf(`{"properties":{"a%d":{"minimum":%d}}}`, i%50, i) }, `{"allOf":[`, `]}`)
	add("1,000 patterns", 1_000, func(i int) string { return fmt.Sprintf(`{"pattern":"x%d"}`, i) }, `{"type":"string","allOf":[`, `]}`)
	return out
}

// hostileRules adds long chains of rules.
func hostileRules(out map[string]Source) {
	var chain, back strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&chain, "r%d ::= r%d | \"a\"\n", i, i+1)
		fmt.Fprintf(&back, "r%d ::= \"b\" r%d\n", i+1, i)
	}
	out["deep rules"] = Source{Kind: EBNF, Text: []byte("root ::= r20000 \"c\"\n" + strings.ReplaceAll(back.String(), "\n", " \"d\"\n") + "r0 ::= \"x\"")}
	out["chain of rules"] = Source{Kind: EBNF, Text: []byte("root ::= r0\n" + chain.String() + "r20000 ::= \"x\"")}
	out["chain of rules, backwards"] = Source{Kind: EBNF, Text: []byte("root ::= r20000\n" + back.String() + "r0 ::= \"x\"")}
}

func hostileSchemas() map[string]Source {
	schema := func(s string) Source { return Source{Kind: JSONSchema, Text: []byte(s)} }
	return map[string]Source{
		"minItems 1e8":          schema(`{"type":"array","items":{"type":"integer"},"minItems":100000000}`),
		"maxLength 1e9":         schema(`{"type":"string","minLength":999999999,"maxLength":1000000000}`),
		"counts of counts":      schema(`{"type":"array","minItems":1000000,"maxItems":2000000,"items":{"type":"array","minItems":1000000,"items":{"type":"string","maxLength":1000000}}}`),
		"nested items":          schema(strings.Repeat(`{"items":`, 3000) + `true` + strings.Repeat(`}`, 3000)),
		"deep arrays":           schema(strings.Repeat(`[`, 100000)),
		"not a schema":          schema(`[]`),
		"not everything":        schema(`{"not":{}}`),
		"not itself":            schema(`{"not":{"$ref":"#"}}`),
		"itself":                schema(`{"$ref":"#"}`),
		"circle":                schema(`{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}`),
		"circle of anyOf":       schema(`{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}`),
		"circle of oneOf":       schema(`{"oneOf":[{"$ref":"#"},{"type":"string"}]}`),
		"endless object":        schema(`{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"],"additionalProperties":false}`),
		"endless array":         schema(`{"type":"array","items":{"$ref":"#"},"minItems":1}`),
		"deep recursion":        schema(`{"type":"array","items":{"$ref":"#"}}`),
		"allOf bomb":            schema(`{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/b"}]},"b":{"allOf":[{"$ref":"#/$defs/c"},{"$ref":"#/$defs/c"}]},"c":{"anyOf":[{"type":"string"},{"type":"null"}]}},"$ref":"#/$defs/a"}`),
		"anyOf bomb":            schema(`{"allOf":[` + strings.TrimSuffix(strings.Repeat(`{"anyOf":[{"minLength":1},{"maxLength":5},{"pattern":"a"},{"type":"null"}]},`, 20), ",") + `]}`),
		"oneOf bomb":            schema(`{"oneOf":[` + strings.TrimSuffix(strings.Repeat(`{"properties":{"a":{"oneOf":[{"type":"string"},{"minLength":2}]}}},`, 40), ",") + `]}`),
		"if bomb":               schema(`{"allOf":[` + strings.TrimSuffix(strings.Repeat(`{"if":{"properties":{"a":{"const":1}}},"then":{"required":["b"]},"else":{"required":["c"]}},`, 30), ",") + `]}`),
		"pattern and length":    schema(`{"type":"string","pattern":"^(a|b)*a(a|b){10}$","minLength":5,"maxLength":100000}`),
		"patterns":              schema(`{"allOf":[{"pattern":"a.*b.*c"},{"pattern":"c.*b.*a"},{"pattern":"(ab)+"},{"pattern":"^.{10,500}$"}],"type":"string"}`),
		"patternProperties":     schema(`{"patternProperties":{"a":{"type":"string"},"b":{"minLength":2},"c":{"type":"null"},"d":true,"e":false,"f":{"type":"integer"},"^(.*)(a|b)*$":true}}`),
		"multiples":             schema(`{"type":"integer","multipleOf":7919,"minimum":1e300}`),
		"number past the limit": schema(`{"type":"number","minimum":1e999999}`),
		"digits":                schema(`{"type":"number","minimum":0.` + strings.Repeat("1", 3000) + `}`),
		"empty enum":            schema(`{"enum":[]}`),
		"half a pair":           schema(`{"const":"\ud800"}`),
		"escaped key":           schema(`{"properties":{"\"\\\u0000\u007f\ud83d\ude00":{"type":"null"}},"required":["\"\\\u0000\u007f\ud83d\ude00"]}`),
		"large key":             schema(`{"properties":{"` + strings.Repeat("k", 900_000) + `":true}}`),
		"unique":                schema(`{"type":"array","uniqueItems":true,"items":{"enum":[` + strings.TrimSuffix(strings.Repeat("1,", 40000), ",") + `]}}`),
		"remote":                schema(`{"$ref":"https://example.com/x.json"}`),
	}
}

// hostileRandom makes sources that nest what compiles.
func hostileRandom(r *rand.Rand, i int) Source {
	atom := []string{"a", "b", ".", "[a-f]", `\w`, `\S`, "(ab|ba)", "[^x]", "é"}
	var b strings.Builder
	switch i % 3 {
	case 0:
		for range 1 + r.IntN(12) {
			fmt.Fprintf(&b, "(%s%s{%d,%d})", atom[r.IntN(len(atom))], []string{"", "*", "+", "?"}[r.IntN(4)]+atom[r.IntN(len(atom))], r.IntN(5), 5+r.IntN(2000))
			if r.IntN(2) == 0 {
				fmt.Fprintf(&b, "{%d,%d}", r.IntN(3), 3+r.IntN(300))
			}
		}
		return Source{Kind: Regex, Text: []byte(b.String())}
	case 1:
		fmt.Fprintf(&b, `{"type":"string","minLength":%d,"maxLength":%d,"pattern":"^(%s%s{%d,%d})*$"}`, r.IntN(50), 50+r.IntN(5000), atom[r.IntN(3)], atom[r.IntN(3)], r.IntN(4), 4+r.IntN(60))
		return Source{Kind: JSONSchema, Text: []byte(b.String())}
	}
	keys := []string{"anyOf", "oneOf", "allOf"}
	var nest func(depth int) string
	nest = func(depth int) string {
		if depth == 0 {
			return []string{`{"type":"string"}`, `{"minimum":3}`, `{"enum":[1,"a",null]}`, `{"$ref":"#"}`, `{"required":["a"]}`, `{"pattern":"a+b"}`}[r.IntN(6)]
		}
		switch r.IntN(4) {
		case 0:
			return fmt.Sprintf(`{"properties":{"a":%s,"b":%s},"additionalProperties":%s}`, nest(depth-1), nest(depth-1), nest(depth-1))
		case 1:
			return fmt.Sprintf(`{"items":%s,"maxItems":%d}`, nest(depth-1), r.IntN(1_000_000))
		}
		return fmt.Sprintf(`{%q:[%s,%s,%s]}`, keys[r.IntN(3)], nest(depth-1), nest(depth-1), nest(depth-1))
	}
	return Source{Kind: JSONSchema, Text: []byte(nest(1 + r.IntN(5)))}
}

// runHostile compiles a source and computes masks along a random output. Every error must be one
// of the package's.
func runHostile(t *testing.T, name string, src Source, v *Vocabulary, r *rand.Rand) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	g, err := Compile(src, DefaultLimits())
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || e.Keyword == "" || e.Reason == "" {
			t.Errorf("%s: %v names no keyword", name, err)
		}
	} else {
		walkHostile(t, name, g, v, r)
	}
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 1<<30 {
		t.Errorf("%s: %d MiB allocated", name, used>>20)
	}
	if took > 30*time.Second { // a second on a machine of its own
		t.Errorf("%s: %v", name, took)
	}
	if took > 300*time.Millisecond {
		t.Logf("%s: %v, %d MiB", name, took, (after.TotalAlloc-before.TotalAlloc)>>20)
	}
}

func walkHostile(t *testing.T, name string, g *Grammar, v *Vocabulary, r *rand.Rand) {
	t.Helper()
	limits := DefaultLimits()
	limits.CacheBytes = 8 << 20
	a, err := NewAutomaton(g, v, limits)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	m, err := a.NewMatcher()
	mask := make([]uint64, v.Words())
	for step := 0; err == nil && step < 6 && !m.done; step++ {
		err = m.Mask(mask)
		checkSteps(t, name, a)
		if err != nil {
			break
		}
		if step == 1 {
			checkMask(t, a, m, mask)
		}
		id := int32(r.IntN(v.size))
		for !has(mask, id) {
			id = (id + 1) % int32(v.size)
		}
		if err = m.Accept(id); err != nil {
			t.Errorf("%s: an allowed token: %v", name, err)
		}
		checkSteps(t, name, a)
	}
	if err != nil && !errors.Is(err, ErrBudget) {
		t.Errorf("%s: %v", name, err)
	}
	if a.Bytes() > limits.CacheBytes+32<<20 {
		t.Errorf("%s: caches of %d MiB", name, a.Bytes()>>20)
	}
}

// checkSteps holds the last call against the limit of counted steps. A step took at most 50 ns in
// masks of these sources over 150,000 tokens, so that 200 ns a step are below a second.
func checkSteps(t *testing.T, name string, a *Automaton) {
	t.Helper()
	const perStep, most = 200 * time.Nanosecond, time.Second
	if beyond := a.Steps() - a.limits.MaskSteps; beyond > a.limits.MaskSteps/100 || time.Duration(a.limits.MaskSteps)*perStep > most {
		t.Errorf("%s: %d steps, %d beyond the limit", name, a.Steps(), beyond)
	}
}

func TestHostile(t *testing.T) {
	v := testVocabulary(1)
	r := rand.New(rand.NewPCG(1, 1))
	for name, src := range hostile() {
		runHostile(t, name, src, v, r)
	}
	random := 200
	if testing.Short() {
		random = 50
	}
	for i := range random {
		seed := rand.New(rand.NewPCG(uint64(i), 3))
		src := hostileRandom(seed, i)
		runHostile(t, fmt.Sprintf("random %d %s", i, clip(string(src.Text))), src, v, r)
	}
}
